"""Kinds of state: each kind of value round-trips, or is refused by its name."""

from __future__ import annotations

import collections
import datetime as dt
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader

import statexchange as sx
from statexchange.testing import run_ranks


def quantize_dynamically() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's deprecation warning
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# Refusals


def gathers(state: Any) -> None:
    with sx.gather_state(state):
        pass


@pytest.mark.parametrize("verb", ["export", "save", "gather"])
def test_a_module_with_weights_that_are_no_tensors_is_refused_by_name(verb: str, tmp_path: Path) -> None:
    verbs = {"export": sx.export_checkpoint, "save": sx.save_checkpoint, "gather": lambda state, _: gathers(state)}
    with pytest.raises(TypeError, match=r"_packed_params"):
        verbs[verb](quantize_dynamically(), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


class Odd(nn.Module):
    """A module with a plain value and extra state in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> Any:
        return {"tensor": torch.ones(1)}

    def set_extra_state(self, state: Any) -> None:
        pass

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "format"] = "row"


def test_a_plain_value_of_a_module_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "statexchange"):
        report = sx.export_checkpoint(Odd(), tmp_path / "out")
    assert report.num_tensors == 1
    plain, extra = (record.getMessage() for record in caplog.records)
    assert plain == "format is not a tensor but 'row', and is left out"
    assert "_extra_state" in extra


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "call the module"),
        (lambda: {"a": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])}, "nested"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "sparse_coo"),
    ],
    ids=["lazy", "nested", "sparse"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("verb", ["export", "save", "load", "gather", "synchronize"])
def test_tensors_without_plain_memory_are_refused_by_name(
    verb: str, make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    state = make()
    sx.save_checkpoint({"a": torch.ones(2), "0.weight": torch.ones(2), "0.bias": torch.ones(2)}, tmp_path / "saved")
    verbs = {
        "export": lambda: sx.export_checkpoint(state, tmp_path / "out"),
        "save": lambda: sx.save_checkpoint(state, tmp_path / "out"),
        "load": lambda: sx.load_checkpoint(state, tmp_path / "saved", strict=False),
        "gather": lambda: gathers(state),
        "synchronize": lambda: sx.synchronize(state),
    }
    with pytest.raises(sx.StateExchangeError, match=message):
        verbs[verb]()


def test_a_list_that_contains_itself_and_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(ValueError, match=r"\.loop\.1\.1.* contains itself"):
        sx.save_checkpoint({"loop": loop}, tmp_path / "saved")
    with pytest.raises(ValueError, match="look alike"):
        sx.save_checkpoint({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "saved")


@pytest.mark.parametrize("source", ["saved", "exported"])
def test_a_state_that_is_too_deep_or_contains_itself_cannot_be_loaded(source: str, tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(1)}, tmp_path / "saved")
    sx.export_checkpoint({"w": torch.ones(1)}, tmp_path / "exported")
    weight = torch.zeros(1)
    deep: dict[str, Any] = {"w": weight}
    for _ in range(3000):
        deep = {"x": deep}
    loop: dict[str, Any] = {"w": weight}
    loop["x"] = loop
    for state in (deep, loop):
        with pytest.raises(sx.errors.InvalidArgumentError, match=r"deeper|itself"):
            sx.load_checkpoint({**state, "w": weight}, tmp_path / source, strict=False)
    assert weight.tolist() == [0]


def test_an_export_of_no_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to export"):
        sx.export_checkpoint({}, tmp_path / "out")
    with pytest.raises(ValueError, match="exclude"):
        sx.export_checkpoint({"a": torch.ones(1)}, tmp_path / "out", exclude="a")
    assert not (tmp_path / "out").exists()


def test_save_refuses_a_module_that_fsdp1_wraps(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Linear):
        """It is known by its name."""

    with pytest.raises(TypeError, match="FSDP1 gives copies"):
        sx.save_checkpoint({"model": FullyShardedDataParallel(1, 1)}, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


# Round trips


def test_live_containers_keep_their_types(tmp_path: Path) -> None:
    state = {
        "ordered": collections.OrderedDict(b=1, a=collections.Counter("xxy")),
        "default": collections.defaultdict(list, a=[1]),
        "nested": {"tensor": torch.ones(2), "counter": collections.Counter("ab")},
        "list": [1, 2],
    }
    live: dict[str, Any] = {
        "ordered": collections.OrderedDict(a=collections.Counter()),
        "default": collections.defaultdict(list, c=[5]),
        "nested": {"tensor": torch.zeros(2), "counter": collections.Counter("c")},
        "list": [],
    }
    objects = {name: live[name] for name in ("ordered", "default", "nested")}
    sx.save_checkpoint(state, tmp_path / "saved")
    sx.load_checkpoint(live, tmp_path / "saved")
    assert all(live[name] is held for name, held in objects.items())
    assert live["ordered"] == state["ordered"]
    assert type(live["ordered"]["a"]) is collections.Counter
    assert live["default"] == {"a": [1]}
    assert live["default"]["new"] == []
    assert live["nested"]["tensor"].tolist() == [1, 1]
    assert live["nested"]["counter"] == collections.Counter("ab")
    assert type(live["nested"]["counter"]) is collections.Counter


def scheduler_of(milestones: list[int]) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter in")
def test_a_scheduler_that_counts_milestones_goes_on(tmp_path: Path) -> None:
    sx.save_checkpoint({"scheduler": scheduler_of([2, 4])}, tmp_path / "saved")
    live = {"scheduler": scheduler_of([1])}
    sx.load_checkpoint(live, tmp_path / "saved")
    live["scheduler"].step(3)
    assert live["scheduler"].milestones == collections.Counter([2, 4])
    assert live["scheduler"].get_last_lr() == [0.1]


def test_a_synchronized_scheduler_has_the_milestones_of_root() -> None:
    assert run_ranks(synchronizes_a_scheduler, 2) == [[[2, 4], "Counter"]] * 2


def synchronizes_a_scheduler() -> list[Any]:
    scheduler = sx.synchronize(scheduler_of([2, 4] if sx.get_rank() == 0 else [1]))
    return [sorted(scheduler.milestones.elements()), type(scheduler.milestones).__name__]


def test_numpys_random_state_is_restored(tmp_path: Path) -> None:
    generator = np.random.RandomState(5)
    sx.save_checkpoint({"rng": generator.get_state(), "list": [generator.get_state()]}, tmp_path / "saved")
    wanted = generator.rand(3)
    other = np.random.RandomState(7)
    other.randn()
    live = {"rng": other.get_state(), "list": [other.get_state()]}
    sx.load_checkpoint(live, tmp_path / "saved")
    for state in (live["rng"], live["list"][0]):
        other.set_state(state)
        assert (other.rand(3) == wanted).all()


class Pair(NamedTuple):
    tensor: torch.Tensor
    step: int


@dataclass
class Job:
    model: nn.Module
    step: int
    best: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FrozenJob:
    weights: torch.Tensor
    step: int


def test_dataclasses_and_namedtuples_that_hold_state_are_filled(tmp_path: Path) -> None:
    def state(value: float, step: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        frozen = FrozenJob(torch.full((2,), value), step)
        return {"job": Job(model, step, {"loss": value}), "frozen": frozen, "pair": Pair(torch.full((1,), value), step)}

    saved, live = state(3, 7), state(0, 0)
    sx.save_checkpoint(saved, tmp_path / "saved")
    job, weights = live["job"], live["frozen"].weights
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["job"] is job
    assert (job.step, job.best, job.model.weight.tolist()) == (7, {"loss": 3.0}, [[3.0, 3.0]] * 2)
    assert live["frozen"].weights is weights
    assert (live["frozen"].step, weights.tolist()) == (7, [3.0, 3.0])
    assert type(live["pair"]) is Pair
    assert (live["pair"].step, live["pair"].tensor.tolist()) == (7, [3.0])


PLAIN = {
    "float32": np.float32(0.1),
    "int64": np.int64(-(2**60)),
    "bool": np.bool_(True),
    "complex": 1 - 2j,
    "set": {1, 2, (3, "x")},
    "frozenset": frozenset("ab"),
    "path": Path("a/b"),
    "datetime": dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.timezone.utc),
    "date": dt.date(2026, 1, 2),
    "time": dt.time(3, 4),
    "timedelta": dt.timedelta(1, 2, 3),
    "bytes": b"\x00\xff",
    "deque": collections.deque([1, 2], 5),
    "size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
}


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    sx.save_checkpoint({"values": PLAIN}, tmp_path / "saved")
    live: dict[str, Any] = {"values": {}}
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["values"] == PLAIN
    assert {name: type(value) for name, value in live["values"].items()} == {n: type(v) for n, v in PLAIN.items()}
    assert live["values"]["deque"].maxlen == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.Generator(), r"Generator.*get_state\(\)"),
        (DataLoader([1, 2]), "DataLoader as"),
        (np.random.default_rng(), r"Generator.*bit_generator\.state"),
        (np.random.RandomState(0), r"RandomState.*get_state\(\)"),
        (10**5000, r"16,610 bits.*hex\(\)"),
        (object(), r"object .*at \.a: "),
        (np.longdouble(1), "longdouble"),
        (collections.deque([torch.ones(1)]), r"a Tensor .*\.a\[0\]"),
        ({torch.ones(1): 1}, "a Tensor cannot be"),
        ([{torch.ones(1)}], r"a Tensor .*\.a\[0\]<item"),
    ],
    ids=[
        "generator",
        "data loader",
        "numpy's generator",
        "numpy's state",
        "large integer",
        "object",
        "longdouble",
        "deque",
        "key",
        "set",
    ],
)
def test_other_values_are_refused_with_what_to_write(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(sx.StateExchangeError, match=message):
        sx.save_checkpoint({"a": value}, tmp_path / "saved")


def test_a_load_increments_the_version_of_a_tensor(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    sx.save_checkpoint({"p": torch.zeros(3)}, tmp_path / "saved")
    loss = (parameter * parameter).sum()
    sx.load_checkpoint({"p": parameter}, tmp_path / "saved")
    with pytest.raises(RuntimeError, match="modified by"):
        loss.backward()


@pytest.mark.parametrize("shape", [(4, 4), (2, 3)], ids=["overlapping", "interleaved"])
def test_a_tensor_that_overlaps_itself_is_refused_and_an_interleaved_one_is_not(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    wanted = torch.arange(float(shape[0] * shape[1])).view(shape)
    sx.save_checkpoint({"t": wanted}, tmp_path / "saved")
    live = torch.zeros(20).as_strided(shape, (2, 1) if shape == (4, 4) else (3, 2))
    if shape == (4, 4):
        with pytest.raises(ValueError, match="share memory") as caught:
            sx.load_checkpoint({"t": live}, tmp_path / "saved")
        assert caught.value.name == "t"
    else:
        sx.load_checkpoint({"t": live}, tmp_path / "saved")
        assert torch.equal(live, wanted)


@pytest.mark.parametrize("flatten", [True, False])
def test_an_optimizer_resumes_from_torchs_own_checkpoint(flatten: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    first = torch.optim.AdamW(one.parameters(), lr=0.5)
    second = torch.optim.AdamW(other.parameters(), lr=0.1)
    train_step(one, first)
    options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(one, first, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning that there is one process
        saved = {"model": model_state, "optim": optimizer_state, "step": 7, "seen": {"epochs": [1, 2]}}
        dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    live: dict[str, Any] = {"model": other, "optim": second, "step": 0, "seen": {}}
    sx.load_checkpoint(live, tmp_path / "dcp")
    assert (live["step"], live["seen"]) == (7, {"epochs": [1, 2]})
    for ours, theirs in zip(other.parameters(), one.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert second.state[ours].keys() == first.state[theirs].keys()
        assert all(torch.equal(second.state[ours][key], held) for key, held in first.state[theirs].items())
    assert [(group["lr"], group["betas"], len(group["params"])) for group in second.param_groups] == [
        (0.5, (0.9, 0.999), 4)
    ]
    train_step(one, first)
    train_step(other, second)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_an_optimizer_that_the_source_does_not_have_is_missing(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    sx.export_checkpoint({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "out")
    live = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    with pytest.raises(FileNotFoundError, match=r"missing.*\boptimizer;"):
        sx.load_checkpoint(live, tmp_path / "out")
