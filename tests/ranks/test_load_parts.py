"""Parts of lists, modules and records in a load: each is selected, cast or left whole by itself."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from load_choices import WRITERS, Box, Counted, Write, write_save, write_torch
from torch import nn
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
    ids=lambda value: "" if isinstance(value, tuple) else None,
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
