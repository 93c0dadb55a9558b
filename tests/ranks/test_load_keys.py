"""A load pairs entries by their keys: wrappers, keys of any type, and those that look alike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_paths import (
    Form,
    Job,
    Write,
    by_name,
    by_number,
    flattened,
    layers_job,
    lrs_of,
    moments,
    trained,
    write_dcp,
    write_save,
    write_torch,
)
from stateful import Holder, WithExtra
from stored import flip_bit
from torch import nn

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
torch_writers = pytest.mark.parametrize("write", [write_torch, write_dcp])


# Names of a model that differ


def with_prefix(state: Job, prefix: str) -> Job:
    """Return what a job has written with a prefix in the names of its module and of its optimizer's parameters."""
    optimizer = {}
    for key, value in state["optimizer"].items():
        if key == "state":
            optimizer[key] = {prefix + name: entries for name, entries in value.items()}
        elif key == "param_groups":
            optimizer[key] = [{**group, "params": [prefix + name for name in group["params"]]} for group in value]
        else:  # "state.a.weight.step"
            kind, _, name = key.partition(".")
            optimizer[f"{kind}.{prefix}{name}"] = value
    return {"model": {prefix + name: tensor for name, tensor in state["model"].items()}, "optimizer": optimizer}


@torch_writers
@pytest.mark.parametrize("form", [by_name, flattened])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_before_all_names_is_left_out(prefix: str, form: Form, write: Write, tmp_path: Path) -> None:
    saved, live = trained(layers_job(["a", "b"], [0.5, 0.25])), layers_job(["b", "a"], [1.0, 1.0])
    report = sx.load_checkpoint(live, write(with_prefix(form(saved), prefix), tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(live["model"]["a"].weight, saved["model"]["a"].weight)
    assert (moments(live), lrs_of(live)) == (moments(saved), lrs_of(saved))


@torch_writers
def test_a_module_of_the_users_own_called_module_keeps_its_name(write: Write, tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)

    saved, live = (nn.ModuleDict({"module": Wrapped(), "head": nn.Linear(2, 2)}) for _ in range(2))
    sx.load_checkpoint({"m": live}, write({"m": saved.state_dict()}, tmp_path))
    assert str(live.state_dict()) == str(saved.state_dict())
    (tmp_path / "alone").mkdir()
    alone = Wrapped()
    sx.load_checkpoint({"m": alone}, write({"m": saved["module"].state_dict()}, tmp_path / "alone"))
    assert torch.equal(alone.module.weight, saved["module"].module.weight)


class DistributedDataParallel(nn.Module):
    """A wrapper like torch's: the module is in `module`, and names of its parameters begin with that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@torch_writers
@pytest.mark.parametrize("is_live", [False, True])
def test_a_wrapped_model_and_a_plain_one_load_each_other(is_live: bool, write: Write, tmp_path: Path) -> None:
    saved, live = trained(layers_job(["a", "b"], [0.5, 0.25])), layers_job(["a", "b"], [1.0, 1.0])
    wrapped = live if is_live else saved
    before = moments(saved)
    wrapped["model"] = DistributedDataParallel(wrapped["model"])
    report = sx.load_checkpoint(live, write(by_number(saved), tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    assert [*map(str, live["model"].parameters())] == [*map(str, saved["model"].parameters())]
    assert [*moments(live).values()] == [*before.values()]


@torch_writers
@pytest.mark.parametrize("form", [by_name, flattened, by_number])
def test_the_parameters_of_an_optimizer_follow_the_renamed_model(form: Form, write: Write, tmp_path: Path) -> None:
    saved = trained(layers_job(["a", "b"], [0.5, 0.25]))
    order = ["a", "b"] if form is by_number else ["b", "a"]
    state = form(saved)
    path = write({"net": state["model"], "optimizer": state["optimizer"]}, tmp_path)
    live = layers_job(order, [1.0, 1.0])
    sx.load_checkpoint(live, path, rename=[("^net", "model")])
    assert (moments(live), lrs_of(live)) == (moments(saved), lrs_of(saved))
    if form is by_number:
        return
    (tmp_path / "inner").mkdir()
    path = write(with_prefix(state, "old_"), tmp_path / "inner")
    for rename in (r"\bold_", ""), (r"^model\.old_", "model."):  # the name of a parameter, or that of a tensor
        live = layers_job(order, [1.0, 1.0])
        sx.load_checkpoint(live, path, rename=[rename])
        assert (moments(live), lrs_of(live)) == (moments(saved), lrs_of(saved))


# Keys and containers


MIXED: Job = {
    "ints": {0: 1, 10: {2: "b"}},
    "texts": {"0": 1, "10": 2},
    "dots": {"a.b": {"c.d": 1}, "a": {"b.c": 2}},
    "list": [1, {"x": 2}, torch.ones(2), [], {}],
    "tuple": (1, [2.5, {"0": 4}]),
    "w": torch.ones(1),
}


def others(value: Any) -> Any:
    """Return other values in the same containers."""
    if isinstance(value, dict):
        return {key: others(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(others, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value * 2


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
def test_keys_come_back_as_they_were(write: Write, tmp_path: Path) -> None:
    live = others(MIXED)
    report = sx.load_checkpoint(live, write(MIXED, tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    assert repr(live) == repr(MIXED)


def test_the_keys_of_a_file_of_torch_need_no_live_ones(tmp_path: Path) -> None:
    live: Job = {"ints": {}, "texts": None, "dots": {}, "list": None, "tuple": None, "w": torch.zeros(1)}
    sx.load_checkpoint(live, write_torch(MIXED, tmp_path))
    assert repr(live) == repr(MIXED)


@pytest.mark.parametrize("live", [{}, None, {"a": 0}])
@pytest.mark.parametrize("key", [0, "0", True, None, 1.5, "a.b"])
def test_a_key_of_a_dcp_whose_type_is_not_known_is_refused(key: Any, live: Any, tmp_path: Path) -> None:
    state = {"v": copy.deepcopy(live), "w": torch.zeros(1)}
    path = write_dcp({"v": {key: 5}, "w": torch.ones(1)}, tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match="not known") as caught:
        sx.load_checkpoint(state, path)
    assert caught.value.name == "v"
    assert repr(state) == repr({"v": live, "w": torch.zeros(1)})
    state = {"v": {key: 0}, "w": torch.zeros(1)}
    sx.load_checkpoint(state, path)
    assert repr(state["v"]) == repr({key: 5})


@pytest.mark.parametrize("live", [[], [{"a": 0}, {"a": 9}], [{"a": 0}, {"a": 9}, {"a": 9}]])
def test_a_list_of_a_dcp_does_not_become_shorter(live: Any, tmp_path: Path) -> None:
    """It does not tell how many empty mappings a list ended with."""
    saved = [{"a": 1}, {}]
    state = {"v": copy.deepcopy(live), "w": torch.zeros(1)}
    with pytest.raises(errors.InvalidArgumentError) as caught:
        sx.load_checkpoint(state, write_dcp({"v": saved, "w": torch.ones(1)}, tmp_path))
    assert caught.value.name is not None
    assert caught.value.name.startswith("v")
    assert state["v"] == live
    state["v"] = [{"a": 0}, {}]
    sx.load_checkpoint(state, tmp_path / "dcp")
    assert state["v"] == saved
    state["v"] = live
    sx.load_checkpoint(state, write_torch({"v": saved, "w": torch.ones(1)}, tmp_path))
    assert state["v"] == saved


@pytest.mark.parametrize("empty", [[{}], [{}, {}], [[{}]]])
def test_lists_of_empty_mappings_which_a_dcp_leaves_out_stay_in_the_state_of_an_object(
    empty: Any, tmp_path: Path
) -> None:
    path = write_dcp({"o": Holder({"n": 5, "e": empty}), "w": torch.ones(1)}, tmp_path)
    state = {"o": Holder({"n": 0, "e": copy.deepcopy(empty)}), "w": torch.zeros(1)}
    sx.load_checkpoint(state, path)
    assert state["o"].state == {"n": 5, "e": empty}  # type: ignore[attr-defined]


def optimizer_of() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(1)])


@pytest.mark.parametrize(
    ("state", "name"),
    [
        pytest.param({"k": {0: {"step": 1}, "0": torch.ones(1)}}, "k.0", id="a number and a text"),
        pytest.param({"k": {"0": optimizer_of(), 0: [torch.ones(1)]}}, "k.0", id="an optimizer and a list"),
        pytest.param({"k": {"0": optimizer_of(), 0: {"x": torch.ones(1)}}}, "k.0", id="an optimizer and a mapping"),
        pytest.param({"a": [torch.ones(1)], "a.b": 0}, "a", id="a list and a dot"),
        pytest.param({"a": {"b": {}}, "a.b": 0}, "a", id="an empty mapping and a dot"),
        pytest.param({"a": {"b": torch.ones(1)}, "a.b": 0}, "a.b", id="a tensor and a dot"),
        pytest.param({"a": {"b": {"w": torch.ones(1)}}, "a.b": [0]}, "a.b", id="a mapping and a dot"),
    ],
)
def test_keys_that_look_alike_are_refused_by_a_save_and_a_load(state: Job, name: str, tmp_path: Path) -> None:
    before = repr(state)
    for call in (
        lambda: sx.save_checkpoint(state, tmp_path / "save"),
        lambda: sx.load_checkpoint(state, write_torch({"w": torch.ones(1)}, tmp_path), strict=False),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="look alike") as caught:
            call()
        assert caught.value.name == name
    assert repr(state) == before


class Kept:
    """An object that takes any state."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)


@torch_writers
def test_an_object_alone_is_not_given_the_entries_of_something_else(write: Write, tmp_path: Path) -> None:
    live = Kept(seen=1)
    with pytest.raises(errors.NotFoundError):
        sx.load_checkpoint(live, write({"weight": torch.ones(1)}, tmp_path))
    assert live.values == {"seen": 1}


@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_that_cannot_be_read_is_named_if_nothing_else_is_there(strict: bool, tmp_path: Path) -> None:
    path = write_torch({"m": {"weight": torch.eye(2).to_sparse()}, "w": torch.ones(1)}, tmp_path)
    for live in (nn.Linear(2, 2, bias=False), {"weight": torch.zeros(2, 2)}):
        with pytest.raises(errors.UnsupportedError) as caught:
            sx.load_checkpoint({"m": live, "w": torch.zeros(1)}, path, strict=strict)
        assert caught.value.name == "m.weight"


# Stages of a pipeline


def saves_a_stage(path: str) -> list[Any]:
    rank = sx.get_rank()
    keys = ["ab", "c"][rank]
    job = layers_job([keys], [0.5])
    for key in keys:
        nn.init.constant_(job["model"][key].weight, ord(key))
        job["model"][key].weight.grad = torch.full((3, 3), float(ord(key)))
    job["optimizer"].step()
    sx.save_checkpoint(job, path)
    return [moments(job)]


def test_stages_of_a_pipeline_come_into_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    (first,), (second,) = run_ranks(saves_a_stage, 2, args=(path,))
    for groups in ["abc"], ["ca", "b"]:
        live = layers_job(groups, [1.0] * len(groups))
        report = sx.load_checkpoint(live, path)
        assert (report.missing, report.unexpected) == ((), ())
        assert moments(live) == first | second
        assert {*lrs_of(live).values()} == {0.5}


# Modules that load themselves, and adapters


def test_an_exported_adapter_comes_back_into_the_model_that_made_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        return peft.get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), config)

    saved, live = adapted(), adapted()
    base = copy.deepcopy(live.base_model.model[1].state_dict())
    sx.export_checkpoint(saved, tmp_path / "out")
    report = sx.load_checkpoint(live, tmp_path / "out")
    assert (report.missing, report.unexpected) == ((), ())
    layers = [model.base_model.model[0] for model in (live, saved)]
    for part in ("lora_A", "lora_B"):
        assert torch.equal(*(getattr(layer, part)["default"].weight for layer in layers))
    assert not torch.equal(*(layer.base_layer.weight for layer in layers))
    assert str(live.base_model.model[1].state_dict()) == str(base)


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
@pytest.mark.parametrize("length", [0, 2, 9])
def test_extra_state_may_have_another_length(write: Write, length: int, tmp_path: Path) -> None:
    saved, live = (nn.Sequential(WithExtra(torch.arange(n, dtype=torch.uint8))) for n in (5, length))
    sx.load_checkpoint({"m": live}, write({"m": saved.state_dict()}, tmp_path))
    assert torch.equal(live[0].extra, saved[0].extra)
    assert torch.equal(live[0].weight, saved[0].weight)


@pytest.mark.parametrize(
    "state", [{"": 3, "w": 1}, {"": {"a": 1}}, {"": nn.Linear(1, 1)}], ids=["value", "mapping", "module"]
)
def test_an_empty_key_at_the_root_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="an empty text"):
        sx.save_checkpoint(state, tmp_path / "saved")
    sx.save_checkpoint({"w": 1}, tmp_path / "other")
    with pytest.raises(sx.errors.InvalidArgumentError, match="an empty text"):
        sx.load_checkpoint(state, tmp_path / "other", strict=False)


@pytest.mark.parametrize("names", ["aewx", "xwea"])
def test_an_empty_tensor_does_not_part_what_is_read_together(names: str, tmp_path: Path) -> None:
    shapes = {"a": 3, "e": 0, "w": 3, "x": 3}
    sx.save_checkpoint({name: torch.ones(shapes[name]) for name in "aewx"}, tmp_path / "saved")
    flip_bit(tmp_path / "saved/rank-00000-of-00001.safetensors", -1)
    state = {name: torch.zeros(shapes[name]) for name in names}
    with pytest.raises(sx.errors.CorruptError, match="state is unchanged"):
        sx.load_checkpoint(state, tmp_path / "saved")
    assert not any(tensor.any() for tensor in state.values())
