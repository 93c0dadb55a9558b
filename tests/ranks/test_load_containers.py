"""A user's own containers in a load: they are refilled, or refused by name. A refused load changes nothing."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from load_choices import WRITERS, Box, Counted, Fields, Pair, ReadOnly, Write, write_save, write_torch
from torch import nn

import statexchange as sx

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Store:
    def __init__(self, items: dict[str, Any]) -> None:
        self.items = items


class Kept(Box):
    """A mapping whose items lie in an object of a class that is no container."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.store = Store(items)

    def held(self) -> dict[str, Any]:
        return self.store.items


class Ints(Box):
    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, int):
            raise TypeError("ints only")
        super().__setitem__(key, value)


@dataclasses.dataclass
class Bounded:
    a: int

    def __setattr__(self, name: str, value: Any) -> None:
        if value > 5:
            raise ValueError("too large")
        super().__setattr__(name, value)


def bounded(value: int) -> Bounded:
    made = Bounded(0)
    object.__setattr__(made, "a", value)
    return made


REFUSED: list[tuple[Any, Any, str]] = [
    (ReadOnly(a=1), ReadOnly(a=2), r"ReadOnly refuses the new values here, and raised TypeError\('read only'\)"),
    (Box({"x": 1, "y": "2"}), Ints({"x": 0}), r"Ints refuses the new values here, and raised TypeError\('ints only'"),
    ({"in": ReadOnly(a=1)}, {"in": ReadOnly(a=2)}, "ReadOnly cannot be made with other items"),
    (Fields(a=1, t=torch.ones(1)), Fields(a=2, t=torch.zeros(1)), "Fields cannot be made with other items"),
    (bounded(10), Bounded(1), r"Bounded refuses a new value of its field 'a', and raised ValueError\('too large'\)"),
    (1, torch.Generator(), "a Generator here, which a load would replace by an int"),
]


@pytest.mark.parametrize(("saved", "live", "match"), REFUSED)
def test_containers_that_cannot_be_refilled_are_refused(saved: Any, live: Any, match: str, tmp_path: Path) -> None:
    path = write_save({"v": saved, "w": torch.ones(1)}, tmp_path)
    state = {"w": torch.zeros(1), "v": live}
    before = repr(state)
    with pytest.raises(sx.errors.UnsupportedError, match=rf"{match}.*'v.*{path}"):
        sx.load_checkpoint(state, path)
    assert repr(state) == before
    sx.load_checkpoint(state, path, exclude="v")
    assert repr(state) == before.replace("tensor([0.])", "tensor([1.])", 1)


class Indexed(dict[str, Any]):
    """A mapping with an index of its values."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        self.keys_of: dict[Any, str] = {}
        for key, value in items.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            self.keys_of.pop(self[key], None)
        super().__setitem__(key, value)
        self.keys_of[value] = key

    def clear(self) -> None:
        super().clear()
        self.keys_of.clear()


@pytest.mark.parametrize(
    ("saved", "live", "expected"),
    [
        (Kept({"x": 1}), Kept({"x": 0, "old": 5}), "Box({'x': 1})"),
        ([Kept({"x": 1})], [Kept({"x": 0, "old": 5})], "[Box({'x': 1})]"),
        (Counted(b=Kept({"k": 1})), Counted(b=Kept({"k": 7, "j": 8})), "Counted({'b': Box({'k': 1})})"),
    ],
    ids=["alone", "in a list", "in an object"],
)
def test_items_in_an_object_are_copied_with_it(saved: Any, live: Any, expected: str, tmp_path: Path) -> None:
    path = write_save({"v": saved, "w": torch.ones(1)}, tmp_path)
    state, before = {"v": live, "w": torch.ones(2)}, repr(live)
    with pytest.raises(sx.StateExchangeError):
        sx.load_checkpoint(state, path)
    assert repr(live) == before
    state["w"] = torch.zeros(1)
    sx.load_checkpoint(state, path)
    assert repr(state["v"]) == expected


class Fixed(Box):
    def __delitem__(self, key: str) -> None:
        raise TypeError("the keys are fixed")


def test_keys_that_stay_are_not_removed_in_between(tmp_path: Path) -> None:
    state = {"v": Fixed({"a": 0, "b": 0})}
    sx.load_checkpoint(state, write_save({"v": {"a": 1, "b": 2}}, tmp_path))
    assert repr(state) == "{'v': Box({'a': 1, 'b': 2})}"


def test_a_load_that_is_refused_elsewhere_changes_no_container(tmp_path: Path) -> None:
    boxes = {"k": Box({"x": 1})}
    path = write_save({"b": Counted(**boxes), "i": Indexed(a=1), "w": torch.ones(1)}, tmp_path)
    state: dict[str, Any] = {"b": Counted(k=Box({"x": 0, "old": 5})), "i": Indexed(a=7), "w": torch.ones(2)}
    state["in"] = {"i": state["i"]}
    before = repr(state)
    with pytest.raises(sx.StateExchangeError):
        sx.load_checkpoint(state, path)
    assert (repr(state), state["i"].keys_of) == (before, {7: "a"})
    state["w"] = torch.zeros(1)
    del state["in"]
    sx.load_checkpoint(state, path)
    assert repr(state) == "{'b': Counted({'k': Box({'x': 1})}), 'i': {'a': 1}, 'w': tensor([1.])}"
    assert state["i"].keys_of == {1: "a"}


def test_a_read_only_mapping_of_the_same_values_stays(tmp_path: Path) -> None:
    state = {"v": ReadOnly(a=1), "w": torch.zeros(1)}
    sx.load_checkpoint(state, write_torch({"v": {"a": 1}, "w": torch.ones(1)}, tmp_path))
    assert repr(state) == "{'v': {'a': 1}, 'w': tensor([1.])}"


def test_a_tuple_that_does_not_have_the_items_it_is_made_with_is_refused(tmp_path: Path) -> None:
    path = write_torch({"p": (1, torch.ones(2))}, tmp_path)
    state = {"p": Pair(0, torch.zeros(2))}
    with pytest.raises(sx.errors.UnsupportedError, match="a Pair") as caught:
        sx.load_checkpoint(state, path)
    assert caught.value.name == "p"
    assert repr(state) == "{'p': (0, tensor([0., 0.]))}"


class Dotted(dict[str, Any]):
    """The keys are attributes, and any attribute that it has not is None."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__  # type: ignore[assignment]  # the common recipe, of other argument names


class Attributed(dict[str, Any]):
    """The keys are attributes, and another one is a KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]  # the common recipe, of other argument names


class History(list[Any]):
    pass


class Saved(dict[str, Any]):
    """A mapping with a state of its own."""

    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        entries = dict(state)
        self.position = entries.pop("position")
        self.clear()
        self.update(entries)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", [Dotted, Attributed, collections.OrderedDict])
def test_mappings_whose_keys_are_attributes_are_mappings(write: Write, kind: Any, tmp_path: Path) -> None:
    path = write({"cfg": {"lr": 1.0, "in": {"a": 1}}, "w": torch.ones(1)}, tmp_path)
    state = {"cfg": kind(lr=0.0), "w": torch.zeros(1)}
    state["cfg"]["in"] = kind(a=0)
    sx.load_checkpoint(state, path)
    assert state["cfg"] == {"lr": 1.0, "in": {"a": 1}}
    assert {type(state["cfg"]), type(state["cfg"]["in"])} == {kind}


@pytest.mark.parametrize("write", WRITERS)
def test_a_mapping_with_a_state_of_its_own_loads_it(write: Write, tmp_path: Path) -> None:
    one, other = Saved(k=1), Saved(k=0)
    one.position = 5
    state = {"s": other, "w": torch.zeros(1)}
    sx.load_checkpoint(state, write({"s": one, "w": torch.ones(1)}, tmp_path))
    assert (state["s"], other.position, dict(other)) == (other, 5, {"k": 1})


def test_a_list_keeps_its_type(tmp_path: Path) -> None:
    state: dict[str, Any] = {"h": History(), "w": torch.zeros(1)}
    sx.load_checkpoint(state, write_save({"h": History([1.0, 2.0]), "w": torch.ones(1)}, tmp_path))
    assert (type(state["h"]), state["h"]) == (History, [1.0, 2.0])


@dataclasses.dataclass(frozen=True)
class Derived:
    a: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", "of the live one")


def test_a_frozen_dataclass_keeps_what_is_no_field(tmp_path: Path) -> None:
    state: dict[str, Any] = {"c": Derived(1)}
    sx.load_checkpoint(state, write_save({"c": Derived(3)}, tmp_path))
    assert vars(state["c"]) == {"a": 3, "name": "of the live one"}


@dataclasses.dataclass
class Averages:
    decay: float
    weights: torch.Tensor


def test_a_dataclass_with_tensors_comes_back_as_a_dict_where_the_live_state_has_none(tmp_path: Path) -> None:
    state: dict[str, Any] = {"ema": None}
    sx.load_checkpoint(state, write_save({"ema": Averages(0.5, torch.ones(2))}, tmp_path))
    assert type(state["ema"]) is dict
    assert (state["ema"]["decay"], state["ema"]["weights"].tolist()) == (0.5, [1.0, 1.0])


@dataclasses.dataclass
class Output(collections.OrderedDict[str, Any]):
    a: Any = None


def test_a_mapping_that_is_a_dataclass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sx.errors.UnsupportedError, match="an Output") as caught:
        sx.save_checkpoint({"d": Output(5), "w": torch.ones(1)}, tmp_path / "save")
    assert caught.value.name == "d"


class OddModule(nn.Module):
    """A module with the attributes of an optimizer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.full((1,), value))
        self.param_groups = nn.Parameter(torch.full((1,), value))


@pytest.mark.parametrize("write", WRITERS)
def test_a_module_that_looks_like_an_optimizer_is_a_module(write: Write, tmp_path: Path) -> None:
    state = {"m": OddModule(0.0)}
    sx.load_checkpoint(state, write({"m": OddModule(2.0)}, tmp_path))
    assert state["m"].state.item() == state["m"].param_groups.item() == 2.0


def test_a_class_is_no_module(tmp_path: Path) -> None:
    state = {"norm": {"kind": nn.LayerNorm}, "w": torch.zeros(1)}
    path = write_torch({"w": torch.ones(1)}, tmp_path)
    assert sx.load_checkpoint(state, path, strict=False).missing == ("norm",)
    assert state["norm"]["kind"] is nn.LayerNorm
