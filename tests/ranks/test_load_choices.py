"""Renames, patterns and a user's own containers in a load: what is asked for, or a refusal by name.

A refused load changes nothing.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
Write = Callable[[Any, Path], Path]


def write_save(state: Any, path: Path) -> Path:
    sx.save_checkpoint(state, path / "save")
    return path / "save"


def write_torch(state: Any, path: Path) -> Path:
    torch.save(with_states(state), path / "state.pt")  # the format under test
    return path / "state.pt"


def with_states(state: Any) -> Any:
    if hasattr(type(state), "state_dict"):
        return state.state_dict()
    if isinstance(state, dict):
        return {key: with_states(item) for key, item in state.items()}
    return type(state)(map(with_states, state)) if type(state) in (list, tuple) else state


WRITERS = [write_save, write_torch]


class Counted:
    """An object with a state, which takes what it is given."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)

    def __repr__(self) -> str:
        return f"Counted({self.values})"


def trained(model: nn.Module, **options: Any) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


# rename


RENAMED: list[tuple[Any, Any, Any, Any]] = [
    (
        {"hist": {0: 0.5, None: 1, (1, 2): 4, "k": 5}},
        {"s": {"hist": {}}},
        lambda name: f"s.{name}",
        {"s": {"hist": {0: 0.5, None: 1, (1, 2): 4, "k": 5}}},
    ),
    (
        {"m": {0: 1, 1: 2}},
        {"m": {0: 0, 1: 0}},
        lambda name: {"m.0": "m.1", "m.1": "m.0"}.get(name, name),
        {"m": {1: 1, 0: 2}},
    ),
    ({"m": {"a": {"b": 1}, "c": 2}}, {"n": {}}, [(r"^m\b", "n")], {"n": {"a": {"b": 1}, "c": 2}}),
    ({"m": {"a": {"b": 1}, "c": 2}}, {"n": {"a": {}}}, [(r"^m\b", "n")], {"n": {"a": {"b": 1}, "c": 2}}),
    ({"m": {"a": {"b": 1}}}, {"m": {"z": {"b": 0}}}, [(r"\.a\.", ".z.")], {"m": {"z": {"b": 1}}}),
    ({"a": 1}, {"x.y": 0}, [("^a$", "x.y")], {"x.y": 1}),
    ({"m": {"l.w": torch.ones(1)}}, {"l": {"w": torch.zeros(1)}}, [("^m.", "")], {"l": {"w": torch.ones(1)}}),
    ({"x": {"sched": Counted(n=4)}}, {"sched": Counted(n=0)}, [(r"^x\.", "")], {"sched": Counted(n=4)}),
    ({"sched": Counted(n=4)}, {"scheduler": Counted(n=0)}, [("^sched$", "scheduler")], {"scheduler": Counted(n=4)}),
    ({"sched": Counted(n=4)}, {"scheduler": Counted(n=0)}, [(r"^sched\b", "scheduler")], {"scheduler": Counted(n=4)}),
]


@pytest.mark.parametrize(("saved", "live", "rename", "expected"), RENAMED)
def test_what_moves_keeps_its_keys(saved: Any, live: Any, rename: Any, expected: Any, tmp_path: Path) -> None:
    live = copy.deepcopy(live)
    sx.load_checkpoint(live, write_save(saved, tmp_path), rename=rename)
    assert repr(live) == repr(expected)


def test_a_path_whose_keys_are_not_known_is_refused(tmp_path: Path) -> None:
    live: dict[str, Any] = {"n": {}, "w": torch.zeros(1)}
    path = write_save({"m": {"a": 1}, "w": torch.ones(1)}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match="not known") as caught:
        sx.load_checkpoint(live, path, rename=[(r"^m\b", "n.x.y")])
    assert caught.value.name == "n"
    assert "'x.y.a'" in str(caught.value)
    assert repr(live) == "{'n': {}, 'w': tensor([0.])}"


def test_other_names_of_two_tensors_do_not_become_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    model["x"], model["y"] = model["a"], model["b"]
    sx.export_checkpoint(model, tmp_path / "out")
    for rename, first in (("^[xy]", "x"), ("^[xy].*", "x")):
        state = {"z.weight" if rename == "^[xy]" else "z": torch.zeros(1, 1)}
        with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
            sx.load_checkpoint(state, tmp_path / "out", rename=[(rename, "z")], strict=False)
        assert all(repr(name) in str(caught.value) for name in (f"{first}.weight", "y.weight"))
    with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
        sx.load_checkpoint({"b.weight": torch.zeros(1, 1)}, tmp_path / "out", rename=[("^x", "b")], strict=False)
    assert all(repr(name) in str(caught.value) for name in ("b.weight", "x.weight"))
    state = {"x.weight": torch.zeros(1, 1)}
    sx.load_checkpoint(state, tmp_path / "out", rename=[("^a", "x")], strict=False)
    assert torch.equal(state["x.weight"], model["a"].weight)


def test_values_that_ranks_saved_differently_are_found_under_their_new_name(tmp_path: Path) -> None:
    def saves() -> None:
        sx.save_checkpoint({"sched": Counted(n=sx.get_rank()), "w": torch.ones(1)}, tmp_path / "two")

    run_ranks(saves, 2)
    state = {"scheduler": Counted(n=9), "w": torch.zeros(1)}
    with pytest.raises(sx.errors.ReplicaError, match=r"values of 'scheduler\.n'"):
        sx.load_checkpoint(state, tmp_path / "two", rename=[("^sched$", "scheduler")])
    assert repr(state) == "{'scheduler': Counted({'n': 9}), 'w': tensor([0.])}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rename_that_raises_names_the_tensor(world_size: int, tmp_path: Path) -> None:
    path = write_torch({"w": torch.ones(2)}, tmp_path)

    def loads() -> str:
        with pytest.raises(sx.errors.InvalidArgumentError, match="KeyError") as caught:
            sx.load_checkpoint({"w": torch.zeros(2)}, path, rename={"a": "b"}.__getitem__)
        assert caught.value.name == "w"
        return "refused"

    assert run_ranks(loads, world_size) == ["refused"] * world_size


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rename": [("a{99999999999999}", "b")]}, r"rename pattern 'a\{99999999999999\}'"),
        ({"rename": [("(" * 5000 + ")" * 5000, "b")]}, "rename pattern"),
        ({"strict": "no"}, "strict must be.*'no'"),
        ({"strict": None}, "strict must be"),
    ],
)
def test_options_of_no_sense_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match=match):
        sx.load_checkpoint({"w": torch.zeros(2)}, write_torch({"w": torch.ones(2)}, tmp_path), **options)
    with pytest.raises(sx.errors.InvalidArgumentError, match="not a size"):
        sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "out", max_shard_size="9" * 5000)


@pytest.mark.parametrize("more", [{}, {"step": 0}])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_with_a_key_too_many_is_refused_with_the_names_of_both(more: Any, strict: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    sx.save_checkpoint(model, tmp_path / "save")
    sx.save_checkpoint(model.state_dict(), tmp_path / "states")
    sx.export_checkpoint(model, tmp_path / "exported")
    torch.save(model.state_dict(), tmp_path / "torch.pt")  # the format under test
    for name in ("save", "states", "exported", "torch.pt"):
        for state in ({"model": model, **more}, {"model": model.state_dict(), **more}):
            with pytest.raises(sx.errors.NotFoundError, match=r'state\["prefix"\]'):
                sx.load_checkpoint(state, tmp_path / name, strict=strict)
            sx.load_checkpoint(state["model"], tmp_path / name, strict=strict)


def test_names_that_differ_are_listed_with_the_options_that_map_them(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    encoder, state = nn.Linear(3, 3), Net()
    for source in (write_save(encoder, tmp_path), write_torch(encoder, tmp_path)):
        with pytest.raises(sx.errors.NotFoundError, match=r"weight.*bias.*rename="):
            sx.load_checkpoint(state, source)
        sx.load_checkpoint(state, source, rename=[("^", "encoder.")], strict=False)
        assert torch.equal(state.encoder.weight, encoder.weight)
    (tmp_path / "job").mkdir()
    net, other = nn.Sequential(encoder), nn.Sequential(nn.Linear(3, 3))
    path = write_save({"net": net, "optimizer": trained(net)}, tmp_path / "job")
    live = {"model": other, "optimizer": torch.optim.Adam(other.parameters())}
    for one in (live, {"model": other}):
        with pytest.raises(sx.errors.NotFoundError, match=r"source: model\b.*\bnet\b.*rename="):
            sx.load_checkpoint(one, path)
    sx.load_checkpoint(live, path, rename=[(r"^net\.", "model.")])
    assert torch.equal(other[0].weight, encoder.weight)


@pytest.mark.parametrize("write", WRITERS)
def test_a_part_of_a_model_is_loaded_alone(write: Write, tmp_path: Path) -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    path = write({"model": model, "optimizer": trained(model), "step": 7}, tmp_path)
    parts = nn.ModuleDict({key: nn.Linear(*size) for key, size in {"encoder": (3, 3), "head": (3, 2)}.items()})
    state: dict[str, Any] = {"model": {"encoder": parts["encoder"]}}
    report = sx.load_checkpoint(state, path, strict=False)
    assert report.missing == ()
    assert torch.equal(parts["encoder"].weight, model["encoder"].weight)
    sx.load_checkpoint({"model": {"head": parts["head"]}}, path, include="model.head")
    assert torch.equal(parts["head"].weight, model["head"].weight)
    states = {key: {name: torch.zeros_like(one) for name, one in part.items()} for key, part in named_parts(model)}
    optimizer = torch.optim.Adam(parts.parameters())
    both = {"model": {"encoder": parts["encoder"], "head": parts["head"]}, "optimizer": optimizer, "step": 0}
    if write is write_save:
        sx.load_checkpoint(both, path)
        assert both["step"] == 7
        assert len(optimizer.state) == 4
        sx.load_checkpoint({"model": states}, path, strict=False)
        assert torch.equal(states["head"]["bias"], model["head"].bias)


def test_a_key_with_a_dot_is_no_part_of_another_entry(tmp_path: Path) -> None:
    sx.save_checkpoint({"a.b": torch.ones(2), "c": torch.ones(1)}, tmp_path / "save")
    state = {"a": {"x": torch.zeros(2)}, "a.b": torch.zeros(2), "c": torch.zeros(1)}
    report = sx.load_checkpoint(state, tmp_path / "save", strict=False)
    assert report.missing == ("a.x",)  # the source has an entry of the name "a.b"
    assert torch.equal(state["a.b"], torch.ones(2))  # type: ignore[arg-type]


def test_a_rename_of_all_names_is_not_advised_if_some_fit(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"w": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    sx.save_checkpoint(saved, tmp_path / "save")
    live = nn.ModuleDict({"a": nn.ModuleDict({"w": nn.Linear(2, 2)}), "b": nn.Linear(2, 2)})
    with pytest.raises(sx.errors.NotFoundError) as caught:
        sx.load_checkpoint(live, tmp_path / "save")
    assert '("^"' not in str(caught.value)


def named_parts(model: nn.ModuleDict) -> list[tuple[str, dict[str, torch.Tensor]]]:
    return [(key, part.state_dict()) for key, part in model.items()]


@pytest.mark.parametrize("write", WRITERS)
def test_an_entry_is_renamed_by_a_pattern_for_what_is_inside(write: Write, tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    path = write({"net": model, "opt": optimizer, "sch": scheduler}, tmp_path)
    new = torch.optim.Adam(other.parameters())
    live = {"model": other, "optimizer": new, "scheduler": torch.optim.lr_scheduler.StepLR(new, 1)}
    rename = [(r"^net\.", "model."), (r"^opt\.", "optimizer."), (r"^sch\.", "scheduler.")]
    report = sx.load_checkpoint(live, path, rename=rename)
    assert not report.missing + report.unexpected
    assert torch.equal(new.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_dtype_that_differs_is_told_how_to_cast(tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "save")
    with pytest.raises(sx.errors.InvalidArgumentError, match='dtype="state"'):
        sx.load_checkpoint({"w": torch.ones(2, dtype=torch.float16)}, tmp_path / "save")


# include and exclude


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": "t.0"}, [[0, 2, 3], 1]),
        ({"exclude": "t[0]"}, [[0, 2, 3], 1]),
        ({"include": "t.1"}, [[0, 2, 0], 0]),
        ({"include": ["t[2]", "w"]}, [[0, 0, 3], 1]),
        ({"include": "*.n"}, [[0, 0, 3], 0]),
        ({"exclude": ["t.2.n", "w"]}, [[1, 2, 0], 0]),
    ],
)
def test_items_of_a_list_that_holds_state_are_selected(
    write: Write, options: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    def state(one: int, two: int, three: int, four: int) -> dict[str, Any]:
        return {"t": [torch.tensor(one), two, Counted(n=three)], "w": torch.tensor(four)}

    live = state(0, 0, 0, 0)
    report = sx.load_checkpoint(live, write(state(1, 2, 3, 1), tmp_path), **options)
    one, two, three = live["t"]
    assert [[int(one), two, three.values["n"]], int(live["w"])] == expected
    assert (report.missing, report.unexpected) == ((), ())


@pytest.mark.parametrize("write", WRITERS)
def test_an_object_stays_whole_if_its_present_state_has_what_is_excluded(write: Write, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = write({"o": torch.optim.Adam(model.parameters()), "x": Counted(a=1), "w": torch.ones(1)}, tmp_path)
    for pattern, kept in (("*exp_avg", 2), ("o.state.*", 2), ("o.state.0.step", 1)):  # of one parameter the state
        state = {"o": trained(model), "x": Counted(a=0), "w": torch.zeros(1)}
        sx.load_checkpoint(state, path, exclude=pattern)
        assert [parameter in state["o"].state for parameter in model.parameters()] == [True, kept == 2]
    state = {"o": trained(model), "x": Counted(a=0, b=7), "w": torch.zeros(1)}
    sx.load_checkpoint(state, path, exclude="x.b")
    assert state["x"].values == {"a": 0, "b": 7}


class Raising(Counted):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("x")


@pytest.mark.parametrize("write", WRITERS)
def test_an_object_that_is_left_out_is_not_asked(write: Write, tmp_path: Path) -> None:
    path = write({"o": Counted(n=1), "w": {"0": torch.ones(2)}}, tmp_path)
    state = {"o": Raising(n=0), "w": {"0": torch.zeros(2)}}
    sx.load_checkpoint(state, path, exclude="o")
    assert state["w"]["0"].tolist() == [1, 1]
    if write is write_torch:
        sx.load_checkpoint(state, path, exclude="o", layout={r"w.(\d+)": {"renumber": True}})
    with pytest.raises(sx.errors.InvalidArgumentError, match="KeyError") as caught:
        sx.save_checkpoint(state, tmp_path / "other")
    assert caught.value.name == "o"


@pytest.mark.parametrize("write", WRITERS)
def test_a_whole_state_that_is_one_object_is_loaded_whole(write: Write, tmp_path: Path) -> None:
    path = write(Counted(a=4, b=5), tmp_path)
    one = Counted(a=0, b=0)
    for pattern in ("b", "*"):
        with pytest.raises(sx.errors.InvalidArgumentError, match="selects no"):
            sx.load_checkpoint(one, path, exclude=pattern)
    assert one.values == {"a": 0, "b": 0}
    sx.load_checkpoint(one, path, include="b")
    assert one.values == {"a": 4, "b": 5}


def test_the_state_of_one_parameter_is_loaded_whole(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = write_save(trained(model, lr=0.5), tmp_path)
    fresh = torch.optim.Adam(model.parameters(), lr=0.25)
    sx.load_checkpoint(fresh, path, include="state.0.exp_avg")
    assert [{*state} for state in fresh.state.values()] == [{"step", "exp_avg", "exp_avg_sq"}]
    assert (*fresh.state, fresh.param_groups[0]["lr"]) == (model.weight, 0.25)
    fresh = torch.optim.Adam(model.parameters(), lr=0.25)
    sx.load_checkpoint(fresh, path, exclude="state.*.exp_avg")
    assert (len(fresh.state), fresh.param_groups[0]["lr"]) == (0, 0.5)


def test_parameters_that_the_source_lacks_are_missing_from_an_included_optimizer(tmp_path: Path) -> None:
    small = nn.Sequential(nn.Linear(2, 2))
    path = write_save({"model": small, "optimizer": trained(small)}, tmp_path)
    large = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {"model": large, "optimizer": torch.optim.Adam(large.parameters())}
    for include in ("optimizer", "optimizer.state.*", "optimizer.param_groups"):
        with pytest.raises(sx.errors.NotFoundError, match=r"missing.*\boptimizer\.state\.model\.1\.weight\b"):
            sx.load_checkpoint(state, path, include=include)


@pytest.mark.parametrize("write", WRITERS)
def test_an_included_value_that_was_not_saved_is_missing(write: Write, tmp_path: Path) -> None:
    path = write({"b": {"y": 1}, "w": torch.ones(1)}, tmp_path)
    state = {"b": {"x": 5, "y": 0}, "w": torch.zeros(1)}
    with pytest.raises(sx.errors.NotFoundError, match=r"missing.*\bb\.x;"):
        sx.load_checkpoint(state, path, include=["b.x", "w"])
    assert sx.load_checkpoint(state, path, include=["b.x", "w"], strict=False).missing == ("b.x",)
    assert repr(state) == "{'b': {'x': 5, 'y': 0}, 'w': tensor([1.])}"


def test_the_order_of_a_mapping_stays(tmp_path: Path) -> None:
    path = write_save({"b": {"x": 1, "y": 2, "z": 3}}, tmp_path)
    state = {"b": {"z": 0, "x": 0, "y": 0}}
    sx.load_checkpoint(state, path, exclude="b.x")
    assert repr(state) == "{'b': {'z': 3, 'x': 0, 'y': 2}}"


# A user's own containers


class Holding(Mapping[str, Any]):
    """A mapping that keeps its items in an attribute, and does not say how it is copied."""

    shown = "Fields"

    def __init__(self, items: dict[str, Any]) -> None:
        self.own_items = items

    def held(self) -> dict[str, Any]:
        return self.own_items

    def __getitem__(self, key: str) -> Any:
        return self.held()[key]

    def __iter__(self) -> Any:
        return iter(self.held())

    def __len__(self) -> int:
        return len(self.held())

    def __repr__(self) -> str:
        return f"{self.shown}({self.held()})"


class Box(Holding, MutableMapping[str, Any]):
    shown = "Box"

    def __setitem__(self, key: str, value: Any) -> None:
        self.held()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held()[key]


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


class ReadOnly(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read only")


class Fields(Holding):
    """A mapping that cannot be changed, nor made from a mapping."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)


class Pair(tuple[Any, ...]):
    """A tuple that is not made from one sequence."""

    __slots__ = ()

    def __new__(cls, *items: Any) -> Any:
        return super().__new__(cls, items)


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


# The names of parameters in torch's files


def two_layers(*names: str) -> Any:
    layers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    parameters = [(name, layer.weight) for name, layer in zip(names, layers, strict=True)]
    return layers, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("names", [["y", "z"], ["module.y", "module.z"], ["x", "z"], ["u", "v"]])
def test_names_of_parameters_that_contradict_the_source_are_refused(names: list[str], tmp_path: Path) -> None:
    layers, one = two_layers("x", "y")
    for value, layer in enumerate(layers):
        layer.weight.grad = torch.full((2, 2), float(value))
    one.step()
    path = write_torch({"o": one}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match="names the parameters") as caught:
        sx.load_checkpoint({"o": two_layers(*names)[1]}, path)
    assert caught.value.name == "o"
    layers, other = two_layers("y", "x")
    sx.load_checkpoint({"o": other}, path)
    assert [float(other.state[layer.weight]["momentum_buffer"][0, 0]) for layer in layers] == [1, 0]


def test_two_parameters_of_one_name_in_their_modules_are_refused(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    named = get_optimizer_state_dict(one, trained(one))
    path = write_torch({"g": one, "d": other, "o": named}, tmp_path)
    state = {"g": one, "d": other, "o": torch.optim.Adam([*one.parameters(), *other.parameters()])}
    with pytest.raises(sx.errors.InvalidArgumentError, match="called 'weight'") as caught:
        sx.load_checkpoint(state, path, strict=False)
    assert caught.value.name == "o"
    assert not state["o"].state


@pytest.mark.parametrize(
    ("entry", "value", "found"),
    [
        *[("params", *one) for one in [(5, "an int"), (None, "a NoneType"), (torch.ones(2), "a tensor")]],
        *[("param_names", *one) for one in [(5, "an int"), ("xy", "a str"), (torch.ones(2), "a tensor")]],
    ],
)
def test_groups_that_list_no_parameters_are_refused(entry: str, value: Any, found: str, tmp_path: Path) -> None:
    optimizer = trained(nn.Linear(2, 2))
    saved = optimizer.state_dict()
    saved["param_groups"][0][entry] = value
    path = write_torch({"o": saved}, tmp_path)
    with pytest.raises(sx.errors.CorruptError, match=f"has {found}") as caught:
        sx.load_checkpoint({"o": optimizer}, path)
    assert caught.value.name == f"o.param_groups.0.{entry}"


@pytest.mark.parametrize("groups", [[{"lr": 0.1}], [1], [{"params": 3}]])
def test_a_saved_mapping_that_only_looks_like_an_optimizer_is_a_mapping(groups: Any, tmp_path: Path) -> None:
    path = write_save({"o": {"state": {}, "param_groups": groups}, "x": 1}, tmp_path)
    state: dict[str, Any] = {"o": {}, "y": 0}
    sx.load_checkpoint(state, path, rename=[("^x$", "y")])
    assert state == {"o": {"state": {}, "param_groups": groups}, "y": 1}
    with pytest.raises(sx.errors.CorruptError, match="lists no") as caught:
        sx.load_checkpoint({"o": trained(nn.Linear(1, 1)), "x": 0}, path)
    assert str(caught.value.name).startswith("o.param_groups")


def test_fewer_names_than_parameters_are_refused(tmp_path: Path) -> None:
    optimizer = two_layers("x", "y")[1]
    path = write_torch({"o": optimizer}, tmp_path)
    optimizer.param_groups[0]["param_names"] = ["x"]
    with pytest.raises(sx.errors.InvalidArgumentError, match="param_names") as caught:
        sx.load_checkpoint({"o": optimizer}, path)
    assert caught.value.name == "param_groups[0]"


# Other sources


def test_an_empty_file_has_no_entry(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    sx.load_checkpoint(state, write_torch({}, tmp_path))
    assert state == {}


def test_root_gives_its_shape_too(tmp_path: Path) -> None:
    def saves() -> None:
        sx.save_checkpoint({"w": torch.ones(1 + sx.get_rank())}, tmp_path / "two")

    run_ranks(saves, 2)
    state = {"w": torch.zeros(1)}
    with pytest.raises(sx.errors.ReplicaError, match=r'pass replicas="root"'):
        sx.load_checkpoint(state, tmp_path / "two")
    sx.load_checkpoint(state, tmp_path / "two", replicas="root")
    assert state["w"].tolist() == [1]


def test_a_huge_index_in_a_name_is_no_index(tmp_path: Path) -> None:
    state = {"o": Counted(l=[1, 2])}
    sx.load_checkpoint(state, write_torch({"o": {"l": {"9" * 5000: torch.ones(1)}}}, tmp_path))
    assert state["o"].values == {"l": {"9" * 5000: torch.ones(1)}}
    dcp.save({"o": {"l": {"9" * 5000: torch.ones(1)}}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(sx.errors.InvalidArgumentError, match="not known") as caught:
        sx.load_checkpoint({"o": Counted(l=[1, 2])}, tmp_path / "dcp")
    assert caught.value.name == "o.l"


@pytest.mark.parametrize(("state", "kind"), [([1, 2], "a list"), ("abc", "a str"), (3, "an int")])
def test_a_state_that_holds_nothing_is_refused(state: Any, kind: str, tmp_path: Path) -> None:
    path = write_torch({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match=f"is {kind}") as caught:
        sx.load_checkpoint(state, path)
    assert caught.value.path == str(path)


def test_an_iterator_of_patterns_is_used_once(tmp_path: Path) -> None:
    path = write_save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path)
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    patterns: Any = iter(["a"])
    sx.load_checkpoint(state, path, include=patterns)
    assert (state["a"].item(), state["b"].item()) == (1, 0)


# Several ranks, and layouts


def trained_part(rank: int, ranks: int, *, steps: int = 1) -> Any:
    """Return a rank's rows of a layer, with an optimizer that has taken a step."""
    layer = nn.Linear(2, 4 // ranks, bias=False)
    rows = torch.arange(8.0).reshape(4, 2).chunk(ranks)[rank]
    layer.weight.data = rows.clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    for _ in range(steps):
        layer.weight.grad = rows.clone()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", ["save", "renamed save", "torch", "torch by name"])
def test_optimizer_state_follows_its_parameters_rule(kind: str, steps: int, tmp_path: Path) -> None:
    whole, optimizer = trained_part(0, 1)
    state = {"m": whole, "o": optimizer}
    if kind == "torch by name":
        path = write_torch({"m": whole, "o": get_optimizer_state_dict(whole, optimizer)}, tmp_path)
    else:
        path = write_torch(state, tmp_path) if kind == "torch" else write_save(state, tmp_path)
    rename = [(r"^m\b", "n")] if kind == "renamed save" else []
    name = "n" if rename else "m"

    def loads() -> Any:
        rank = sx.get_rank()
        part, own = trained_part(rank, 2, steps=steps)
        part.weight.data.zero_()
        sx.load_checkpoint({name: part, "o": own}, path, layout={f"{name}.weight": Shard(0)}, rename=rename)
        assert torch.equal(part.weight, whole.weight.chunk(2)[rank])
        assert torch.equal(own.state[part.weight]["momentum_buffer"], whole.weight.chunk(2)[rank])

    run_ranks(loads, 2)


class Stage(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.value = value

    def get_extra_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    "state",
    [
        lambda rank: [Stage(10 + rank)],
        lambda rank: (Counted(n=rank), {"w": torch.ones(1)}),
        lambda rank: [Stage(1) for _ in range(rank + 1)],
    ],
)
def test_states_that_are_lists_are_compared_between_ranks(state: Any, tmp_path: Path) -> None:
    run_ranks(lambda: sx.save_checkpoint(state(sx.get_rank()), tmp_path / "save"), 2)
    with pytest.raises(sx.errors.ReplicaError, match=r"different (values|states)"):
        sx.load_checkpoint(state(0), tmp_path / "save")
    sx.load_checkpoint(state(0), tmp_path / "save", replicas="root")


def test_an_item_of_a_list_that_ranks_saved_differently_can_be_left_out(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"l": [Counted(n=rank), Counted(n=5)], "w": torch.ones(1)}

    run_ranks(lambda: sx.save_checkpoint(state(sx.get_rank()), tmp_path / "save"), 2)
    live = state(9)
    with pytest.raises(sx.errors.ReplicaError, match=r"exclude='l\.0\.n'"):
        sx.load_checkpoint(live, tmp_path / "save")
    live["l"][1] = Counted(n=0)
    sx.load_checkpoint(live, tmp_path / "save", exclude="l.0.n")
    assert repr(live["l"]) == "[Counted({'n': 9}), Counted({'n': 5})]"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a": 2, "c": 2}),
        ({"exclude": "x.a"}, {"a": 9, "c": 2}),
        ({"exclude": ["x.a", "x.c"]}, {"a": 9, "c": 9}),
        ({"include": ["x.only0", "w"]}, {"a": 9, "c": 9}),
    ],
)
def test_no_rank_gets_what_another_one_saved(options: Any, expected: Any, tmp_path: Path) -> None:
    def saves_and_loads() -> Any:
        rank = sx.get_rank()
        saved = {"a": 1, "c": 1, "only0": 5} if rank == 0 else {"a": 2, "c": 2}
        sx.save_checkpoint({"x": saved, "w": torch.ones(1)}, tmp_path / "save")
        state = {"x": dict.fromkeys(saved, 9), "w": torch.zeros(1)}
        sx.load_checkpoint(state, tmp_path / "save", **options)
        return state["x"]

    assert run_ranks(saves_and_loads, 2)[1] == expected


@dataclasses.dataclass
class Once:
    a: int

    def __post_init__(self) -> None:
        self.is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "a" and hasattr(self, "is_made"):
            raise ValueError("a is final")
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda rank: ReadOnly(a=rank), "ReadOnly refuses the new values here, and raised TypeError"),
        (lambda rank: Pair(rank, 2), "Pair does not have the items"),
        (lambda rank: Once(rank), "Once refuses a new value of its field 'a'"),
    ],
)
def test_synchronize_changes_nothing_if_a_container_refuses(make: Any, match: str) -> None:
    def synchronizes() -> str:
        rank = sx.get_rank()
        state = {"a": 10 + rank, "c": make(rank), "w": torch.tensor([float(rank)])}
        before = repr(state)
        with pytest.raises(sx.StateExchangeError) as raised:
            sx.synchronize(state)
        assert repr(state) == before
        return str(raised.value)

    text = run_ranks(synchronizes, 2)[1]
    assert match in text
    assert "tensor 'c'" in text


# More of torch's files


def test_renamed_tensors_lead_to_the_parameters_that_a_source_names(tmp_path: Path) -> None:
    def job(prefix: str, order: str, *, named: bool) -> Any:
        model = nn.ModuleDict({prefix + key: nn.Linear(1, 1, bias=False) for key in "ab"})
        parameters = [(f"{prefix}{key}.weight", model[prefix + key].weight) for key in order]
        given: Any = parameters if named else [parameter for _, parameter in parameters]
        return model, torch.optim.SGD(given, lr=0.1, momentum=0.9)

    def momenta(model: Any, optimizer: Any, names: list[str]) -> list[float]:
        return [optimizer.state[model[name].weight]["momentum_buffer"].item() for name in names]

    def saved(prefix: str) -> Path:
        model, optimizer = job(prefix, "ab", named=True)
        for value, name in enumerate(model):
            model[name].weight.grad = torch.full((1, 1), 1.0 + value)
        optimizer.step()
        return write_torch({"m": model, "o": optimizer}, tmp_path)

    path = saved("old")
    for named in (False, True):
        model, optimizer = job("new", "ba", named=named)
        sx.load_checkpoint({"m": model, "o": optimizer}, path, rename=[(r"\bold", "new")])
        assert momenta(model, optimizer, ["newa", "newb"]) == [1, 2]
    path = saved("")
    model, optimizer = job("", "ab", named=True)
    swap = {"m.a.weight": "m.b.weight", "m.b.weight": "m.a.weight"}
    sx.load_checkpoint({"m": model, "o": optimizer}, path, rename=lambda name: swap.get(name, name))
    assert momenta(model, optimizer, ["a", "b"]) == [2, 1]


@pytest.mark.parametrize("write", WRITERS)
def test_empty_containers_of_the_live_state_go_if_they_were_not_saved(write: Write, tmp_path: Path) -> None:
    path = write({"h": [{"a": 5}], "k": {2: 5}, "o": Counted(n=5)}, tmp_path)
    state = {"h": [{"a": 1}, {}], "k": {1: {}, 2: 3}, "o": Counted(n=1, seen={})}
    sx.load_checkpoint(state, path)
    assert repr(state) == "{'h': [{'a': 5}], 'k': {2: 5}, 'o': Counted({'n': 5})}"
    state = {"t": {"a": {}, "b": 3}}
    sx.load_checkpoint(state, write_torch({"t": {"b": 5}}, tmp_path))
    assert state == {"t": {"b": 5}}


EXCLUDED: list[tuple[Any, Any, Any, Any]] = [
    (None, {"loss": 1.0, "epoch": 2}, "v.epoch", {"loss": 1.0, "epoch": 2}),
    ([{"a": 5}], [{"a": 1, "secret": 2}], "*.secret", [{"a": 1, "secret": 2}]),
    (7, [5, 5], "v.*", [5, 5]),
    ([1, 2, 3], [0, 0, 0, 9], "v.3", [0, 0, 0, 9]),
    ({2: 5}, {1: [], 2: 0}, "w", {2: 5}),
    ({2: 5}, {1: 0, 2: 0}, "w", {2: 5}),
    ({"b": 5}, {"a": {"x": 1, "y": 2}, "b": 0}, "v.a.x", {"a": {"x": 1, "y": 2}, "b": 5}),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("saved", "live", "exclude", "expected"), EXCLUDED)
def test_what_is_excluded_is_not_lost_with_what_holds_it(
    write: Write, saved: Any, live: Any, exclude: str, expected: Any, tmp_path: Path
) -> None:
    state = {"v": copy.deepcopy(live), "w": 0}
    sx.load_checkpoint(state, write({"v": saved, "w": 1}, tmp_path), exclude=exclude, strict=False)
    assert state["v"] == expected


@pytest.mark.parametrize("options", [{}, {"include": ["m", "o"]}, {"exclude": "step"}, {"include": ["m", "o.state.*"]}])
def test_patterns_hide_no_unexpected_entry_of_what_is_loaded(options: Any, tmp_path: Path) -> None:
    large = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    small = nn.Sequential(nn.Linear(1, 1, bias=False))
    named = get_optimizer_state_dict(large, trained(large))
    path = write_torch({"o": named, "m": small, "step": 1}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"not in.*\bo\.state\.1\.weight\b"):
        sx.load_checkpoint({"o": trained(small), "m": small, "step": 0}, path, **options)


def test_a_value_that_is_reported_missing_stays(tmp_path: Path) -> None:
    path = write_torch({"t": [torch.ones(1), {"a": 5}], "m": {"a": 5}}, tmp_path)
    state = {"t": [torch.zeros(1), {"a": 1, "b": 2}], "m": {"a": 1, "b": 2}}
    assert sx.load_checkpoint(state, path, strict=False).missing == ("m.b", "t.1.b")
    assert repr(state) == "{'t': [tensor([1.]), {'a': 5, 'b': 2}], 'm': {'a': 5, 'b': 2}}"


@pytest.mark.parametrize("write", WRITERS)
def test_entries_of_a_whole_state_are_selected_by_any_key(write: Write, tmp_path: Path) -> None:
    path = write({1: 7, "a": 8, 2: 3}, tmp_path)
    state: dict[Any, int] = {1: 0, "a": 0, 2: 0}
    sx.load_checkpoint(state, path, exclude=["1", "a"])
    assert state == {1: 0, "a": 0, 2: 3}
    sx.load_checkpoint(state, path, include="1")
    assert state == {1: 7, "a": 0, 2: 3}


def test_a_key_with_a_bracket_is_compared_between_ranks(tmp_path: Path) -> None:
    run_ranks(lambda: sx.save_checkpoint({"lr[enc]": 0.1 * (sx.get_rank() + 1)}, tmp_path / "save"), 3)
    with pytest.raises(sx.errors.ReplicaError, match=r"values of 'lr\[enc\]'") as caught:
        sx.load_checkpoint({"lr[enc]": 0.0}, tmp_path / "save")
    assert caught.value.rank == 1


def test_a_difference_names_the_ranks_that_have_the_value(tmp_path: Path) -> None:
    def saves() -> None:
        rank = sx.get_rank()
        sx.save_checkpoint({"a": 1, **({"b": rank} if rank else {})}, tmp_path / "save")

    run_ranks(saves, 3)
    state = {"a": 0, "b": 0}
    with pytest.raises(sx.errors.ReplicaError, match="values of 'b'") as caught:
        sx.load_checkpoint(state, tmp_path / "save")
    assert caught.value.rank == 2
    assert 'replicas="root"' in str(caught.value)
    sx.load_checkpoint(state, tmp_path / "save", replicas="root")
    assert state == {"a": 1, "b": 1}


def test_many_values_that_differ_are_left_out_by_a_pattern(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        rng = {f"r{number}": rank for number in range(5)}
        return {"train": {"w": torch.full((1,), 5.0), "rng": rng}}

    run_ranks(lambda: sx.save_checkpoint(state(sx.get_rank()), tmp_path / "save"), 2)
    live = state(9)
    live["train"]["w"].zero_()
    with pytest.raises(sx.errors.ReplicaError, match=r"'train\.rng\.r0' and 4 more"):
        sx.load_checkpoint(live, tmp_path / "save")
    sx.load_checkpoint(live, tmp_path / "save", exclude="train.rng.*")
    assert live["train"] == {"w": torch.full((1,), 5.0), "rng": state(9)["train"]["rng"]}


@pytest.mark.parametrize("replicas", ["equal", "root"])
def test_tensors_that_only_one_rank_has_in_a_list_are_loaded(replicas: Any, tmp_path: Path) -> None:
    def saves() -> None:
        rank = sx.get_rank()
        sx.save_checkpoint({"x": [{f"w{rank}": torch.full((1,), 1.0 + rank)}, "same"]}, tmp_path / "save")

    run_ranks(saves, 2)
    state = {"x": [{"w0": torch.zeros(1), "w1": torch.zeros(1)}, ""]}
    sx.load_checkpoint(state, tmp_path / "save", replicas=replicas)
    assert repr(state) == "{'x': [{'w0': tensor([1.]), 'w1': tensor([2.])}, 'same']}"


def test_what_is_left_out_in_a_list_is_not_missing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    path = write_torch({"l": [{"opt": trained(model), "m": model}], "t": [{"w": torch.ones(1), "v": [1]}]}, tmp_path)
    loaded: dict[str, Any] = {"opt": torch.optim.Adam(model.parameters()), "m": model}
    state = {"l": [loaded], "t": [{"w": torch.zeros(1), "v": [0]}]}
    sx.load_checkpoint(state, path, exclude=["l.0.opt.state.*.exp_avg", "t.0.v.0"])
    assert not loaded["opt"].state
    assert repr(state["t"]) == "[{'w': tensor([1.]), 'v': [0]}]"


def test_groups_without_parameters_keep_their_order(tmp_path: Path) -> None:
    def job(lr: float) -> Any:
        model = nn.Linear(1, 1)
        groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": lr}]
        groups += [{"params": [], "lr": lr + number} for number in range(1, 12)]
        return model, torch.optim.SGD(groups)

    model, optimizer = job(100)
    named = get_optimizer_state_dict(model, optimizer)
    path = write_torch({"m": model, "o": named}, tmp_path)
    model, optimizer = job(0)
    sx.load_checkpoint({"m": model, "o": optimizer}, path, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [100 + number for number in range(12)]


def test_names_are_listed_once(tmp_path: Path) -> None:
    path = write_torch({"a": 1}, tmp_path)
    with pytest.raises(sx.errors.NotFoundError, match=r"source: b;"):
        sx.load_checkpoint({"a": 0, "b": 0}, path, include=["a", "b"])
    path = write_save({"c": {"d": {"a": 1}}}, tmp_path)
    with pytest.raises(sx.errors.NotFoundError, match=r"source: c\.e;"):
        sx.load_checkpoint({"c": {"d": {"a": 0}, "e": {"b": 0}}}, path, include="c")


# Parts of parameters, lists of other lengths, and items that lie deeper


@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_of_parameters_are_cast(world_size: int, tmp_path: Path) -> None:
    whole = nn.Linear(2, 4, bias=False)
    path = write_save({"m": whole}, tmp_path)

    def loads() -> None:
        part = nn.Linear(2, 4 // world_size, bias=False).bfloat16()
        sx.load_checkpoint({"m": part}, path, layout={"m.*": Shard(0)}, dtype="state")
        assert torch.equal(part.weight, whole.weight.chunk(world_size)[sx.get_rank()].bfloat16())

    run_ranks(loads, world_size)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": "p.1"}, [[1, 0], 1]),
        ({"include": ["p.0", "step"]}, [[1, 0], 1]),
        ({"include": "p.0"}, [[1, 0], 0]),
        ({"exclude": "p"}, [[0, 0], 1]),
    ],
)
def test_items_that_are_left_out_need_not_be_there(write: Write, options: Any, expected: Any, tmp_path: Path) -> None:
    def state(*values: int) -> dict[str, Any]:
        return {"p": [Counted(n=value) for value in values], "step": 0}

    path = write({**state(1), "step": 1}, tmp_path)
    live = state(0, 0)
    sx.load_checkpoint(live, path, **options)
    assert [[one.values["n"] for one in live["p"]], live["step"]] == expected
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"'p"):
        sx.load_checkpoint(live, path)


def test_items_that_are_left_out_need_not_have_a_place(tmp_path: Path) -> None:
    for write in WRITERS:
        path = write({"p": [Counted(n=1), Counted(n=2)]}, tmp_path)
        live = {"p": [Counted(n=0)]}
        sx.load_checkpoint(live, path, exclude="p.1")
        assert live["p"][0].values == {"n": 1}
        with pytest.raises(sx.errors.InvalidArgumentError, match=r"'p"):
            sx.load_checkpoint(live, path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1]),
        ({"exclude": "m.0"}, [0, 1]),
        ({"exclude": "m.l0.*"}, [0, 1]),
        ({"include": "m.1"}, [0, 1]),
        ({"include": "m.l0.*"}, [1, 0]),
        ({"include": "m", "exclude": ["m.1.l1.weight"]}, [1, 0]),
    ],
)
def test_modules_of_a_list_are_selected_by_name_or_index(options: Any, expected: Any, tmp_path: Path) -> None:
    path = write_torch({"m": {"l0.weight": torch.ones(1, 1), "l1.weight": torch.ones(1, 1)}}, tmp_path)
    parts = [nn.ModuleDict({f"l{number}": nn.Linear(1, 1, bias=False)}) for number in range(2)]
    weights = [parameter for part in parts for parameter in part.parameters()]
    for weight in weights:
        weight.data.zero_()
    report = sx.load_checkpoint({"m": parts}, path, **options)
    assert ([weight.item() for weight in weights], report.missing, report.unexpected) == (expected, (), ())


def test_names_that_end_alike_are_told_apart(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, name: str, *, is_outer: bool = True) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))
            if is_outer:
                self.inner = Net(name, is_outer=False)

    old = Net("scale")
    optimizer = torch.optim.SGD(old.named_parameters(), lr=0.1, momentum=0.9)
    for value, parameter in enumerate(old.parameters()):
        parameter.grad = torch.full((1,), value + 1.0)
    optimizer.step()
    for value, parameter in enumerate(old.parameters()):
        parameter.data.fill_(value + 1.0)  # as its momentum
    path = write_torch({"m": old, "o": optimizer}, tmp_path)
    swap = {"m.scale": "m.inner.scale", "m.inner.scale": "m.scale"}
    renames: list[tuple[str, Any]] = [("gamma", [("scale$", "gamma")]), ("scale", lambda name: swap.get(name, name))]
    for name, rename in renames:
        new = Net(name)
        for given in ([*new.parameters()][::-1], new.named_parameters()):
            fresh = torch.optim.SGD(given, lr=0.1, momentum=0.9)
            sx.load_checkpoint({"m": new, "o": fresh}, path, rename=rename)
            for parameter in new.parameters():
                assert torch.equal(parameter, fresh.state[parameter]["momentum_buffer"])


class Layered(Box):
    """A mapping with its items in a list of mappings."""

    def __init__(self, *layers: dict[str, Any]) -> None:
        self.layers = list(layers)

    def held(self) -> dict[str, Any]:
        return {key: value for layer in self.layers[::-1] for key, value in layer.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        self.layers[0][key] = value

    def __delitem__(self, key: str) -> None:
        for layer in self.layers:
            layer.pop(key, None)


def test_items_that_lie_deeper_are_not_changed_by_a_refused_load(tmp_path: Path) -> None:
    path = write_save({"c": {"lr": 1, "bs": 2}, "w": torch.ones(1)}, tmp_path)
    config = Layered({"lr": 0}, {"bs": 0})
    state = {"c": config, "w": torch.zeros(1), "new": torch.zeros(1)}
    with pytest.raises(sx.errors.NotFoundError, match=r"missing.*\bnew;"):
        sx.load_checkpoint(state, path)
    assert config.layers == [{"lr": 0}, {"bs": 0}]
    sx.load_checkpoint(state, path, strict=False)
    assert dict(config) == {"lr": 1, "bs": 2}


def test_mappings_in_lists_of_plain_values_are_not_joined(tmp_path: Path) -> None:
    def saves() -> None:
        key = "a" if sx.get_rank() == 0 else "b"
        sx.save_checkpoint({"l": [{key: 3}], "w": torch.ones(1)}, tmp_path / "save")

    run_ranks(saves, 2)
    with pytest.raises(sx.errors.ReplicaError, match=r"values of 'l\.0'") as caught:
        sx.load_checkpoint({"l": [{}], "w": torch.zeros(1)}, tmp_path / "save")
    assert caught.value.rank == 1


# What jobs have in their files


@dataclasses.dataclass
class Progress:
    epoch: int = 0
    step: int = 0
    best: float = 9.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    epoch: int = 0
    best: float = 9.0


Score = collections.namedtuple("Score", ["epoch", "best"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": "*.best"}, (Progress(), Frozen(), Score(0, 9.0))),
        ({"include": "*.epoch"}, (Progress(1, 10, 0.5), Frozen(1, 0.5), Score(1, 0.5))),
        ({"exclude": ["p", "f.epoch"]}, (Progress(), Frozen(), Score(1, 0.5))),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_records_of_plain_values_are_loaded_or_left_whole(
    options: Any, expected: Any, world_size: int, tmp_path: Path
) -> None:
    def saves_and_loads() -> Any:
        later = 100 * sx.get_rank()
        one = {"p": Progress(1 + later, 10, 0.5), "f": Frozen(1 + later, 0.5), "n": Score(1 + later, 0.5)}
        sx.save_checkpoint({**one, "w": torch.ones(1)}, tmp_path / "save")
        state: dict[str, Any] = {"p": Progress(), "f": Frozen(), "n": Score(0, 9.0), "w": torch.ones(1)}
        progress = state["p"]
        sx.load_checkpoint(state, tmp_path / "save", **options)
        assert state["p"] is progress
        loaded = [dataclasses.asdict(progress), dataclasses.asdict(state["f"]), state["n"]._asdict()]
        return [{name: min(value, value % 100) for name, value in one.items()} for one in loaded]

    progress, frozen, score = expected
    found = [dataclasses.asdict(progress), dataclasses.asdict(frozen), score._asdict()]
    assert run_ranks(saves_and_loads, world_size) == [found] * world_size


@pytest.mark.parametrize("is_dcp", [False, True])
@pytest.mark.parametrize("options", [{}, {"include": "parts.*"}, {"strict": False}])
def test_parts_whose_names_look_like_those_of_others_are_told_apart(options: Any, is_dcp: bool, tmp_path: Path) -> None:
    def parts() -> list[nn.Module]:
        return [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))]

    saved, live = parts(), parts()
    path = tmp_path / "dcp"
    if is_dcp:
        dcp.save({"parts": [part.state_dict() for part in saved]}, checkpoint_id=path, no_dist=True)
    else:
        path = write_torch({"parts": saved}, tmp_path)
    report = sx.load_checkpoint({"parts": live}, path, **options)
    assert (report.missing, report.unexpected) == ((), ())
    for one, other in zip(saved, live, strict=True):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["model", "layer"])
def test_files_of_compiled_models_are_loaded(kind: str, named: bool, tmp_path: Path) -> None:
    def job() -> Any:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        if kind == "layer":
            model[0] = torch.compile(model[0], backend="eager")
        model = torch.compile(model, backend="eager") if kind == "model" else model
        optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, live = job(), job()
    report = sx.load_checkpoint(live, write_torch(saved, tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    pairs = zip(saved["model"].parameters(), live["model"].parameters(), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
        assert torch.equal(saved["optimizer"].state[one]["exp_avg"], live["optimizer"].state[other]["exp_avg"])
    dicts = {"model": {name: torch.zeros_like(value) for name, value in saved["model"].state_dict().items()}}
    sx.load_checkpoint(dicts, tmp_path / "state.pt", include="model")
    for name, value in saved["model"].state_dict().items():
        assert torch.equal(dicts["model"][name], value)
