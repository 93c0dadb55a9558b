"""Plain state of sharded parameters is a rank's own; buffers that change their shape at a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from whose_state import job, loaded_by, saved_by

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# State of a sharded parameter that is a rank's own


class PerRank(torch.optim.Optimizer):
    """Has plain state of its own for each part of a parameter."""

    def __init__(self, parameters: Any, shape: tuple[int, ...] = (), whole: bool = True) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.shape, self.whole = shape, whole

    def step(self, closure: Any = None, value: float = 1.0) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.tensor(value), "own": {"list": [torch.full(self.shape, value)]}}
            if self.whole:
                self.state[parameter]["mean"] = torch.full(tuple(parameter.shape), value)


def sharded(shape: tuple[int, ...], value: float) -> dict[str, Any]:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    optimizer = PerRank(model.parameters(), shape)
    optimizer.step(value=value)
    return {"model": model, "optimizer": optimizer, "step": value}


def saves_its_part(folder: str, own: int) -> None:
    ranks = torch.distributed.get_world_size()
    value = 2.0 + own * sx.get_rank()
    sx.save_checkpoint(sharded((4 // ranks, 4), value) | {"step": 2.0}, folder)


def loads_its_part(folder: str, exclude: str | None, replicas: Any = "equal") -> Any:
    ranks = torch.distributed.get_world_size()
    state = sharded((4 // ranks, 4), 0.0)
    try:
        sx.load_checkpoint(state, folder, exclude=exclude or (), replicas=replicas)
    except sx.StateExchangeError as error:
        return [type(error).__name__, str(error)]
    held = state["optimizer"].state[state["model"].weight]
    return [state["step"], held["own"]["list"][0].flatten().tolist(), held["mean"].sum().item(), held["step"].item()]


@pytest.mark.parametrize("own", [0, 1], ids=["equal on both ranks", "different"])
def test_plain_state_of_a_sharded_parameter_is_a_ranks_own(own: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(saves_its_part, 2, backend="gloo", args=(folder, own), reuse=True)
    first, second = run_ranks(loads_its_part, 2, backend="gloo", args=(folder, None), reuse=True)
    assert first == [2.0, [2.0] * 8, 32.0, 2.0]
    assert second == [2.0, [2.0 + own] * 8, 16 * (2.0 + own), 2.0 + own]
    for ranks in (1, 4):
        for kind, message in run_ranks(loads_its_part, ranks, backend="gloo", args=(folder, None), reuse=True):
            assert kind == "ReplicaError"
            assert "optimizer.state.model.weight.own" in message
            assert "2 rank" in message
        found = run_ranks(loads_its_part, ranks, backend="gloo", args=(folder, None, "root"), reuse=True)
        assert [one[0] for one in found] == ["ReplicaError"] * ranks
        found = run_ranks(loads_its_part, ranks, backend="gloo", args=(folder, "optimizer"), reuse=True)
        assert [one[0] for one in found] == [2.0] * ranks


def loads_renamed(folder: str) -> str:
    state = sharded((1, 4), 0.0)
    try:
        sx.load_checkpoint({"net": state["model"], **state}, folder, rename=[("^model", "net")], strict=False)
    except sx.StateExchangeError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_parts_of_a_renamed_parameter_are_a_ranks_own(tmp_path: Path) -> None:
    run_ranks(saves_its_part, 2, backend="gloo", args=(str(tmp_path / "saved"), 0), reuse=True)
    for found in run_ranks(loads_renamed, 4, backend="gloo", args=(str(tmp_path / "saved"),), reuse=True):
        assert "ReplicaError" in found
        assert "own" in found


def test_plain_state_of_one_ranks_part_does_not_go_to_two(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(saves_a_row, 1, backend="gloo", args=(folder,), reuse=True)
    for kind, message in run_ranks(loads_its_part, 2, backend="gloo", args=(folder, None), reuse=True):
        assert kind == "ReplicaError"
        assert "optimizer.state.model.weight.own" in message


def saves_a_row(folder: str) -> None:
    sx.save_checkpoint(sharded((2, 4), 2.0), folder)


@pytest.mark.parametrize(("shape", "goes"), [((2, 4), True), ((), True), ((4,), False)])
def test_plain_state_beside_a_layout_is_a_ranks_own(shape: tuple[int, ...], goes: bool, tmp_path: Path) -> None:
    """Of the shape of the rank's part it follows the layout."""
    options = {"layout": {"model.weight": Shard(0)}}

    def make(rows: int) -> Any:
        model = nn.Linear(4, rows, bias=False)
        optimizer = PerRank(model.parameters(), (rows, 4) if shape == (2, 4) else shape, whole=False)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    path = saved_by(2, lambda: make(2), tmp_path / "saved", **options)
    found = loaded_by(1, lambda: make(4), path, lambda _: "loaded", **options)
    if goes:
        assert found == ["loaded"]
        return
    assert isinstance(found[0], errors.ReplicaError)
    assert loaded_by(2, lambda: make(2), path, lambda _: "loaded", **options) == ["loaded"] * 2


def test_plain_state_of_a_whole_parameter_goes_to_any_number(tmp_path: Path) -> None:
    def make() -> Any:
        state = job(PerRank)
        for parameter in state["model"].parameters():  # ranks are threads, which share torch's generator
            parameter.data.fill_(1.0)
        state["optimizer"].shape = (5,)
        state["optimizer"].step()
        return state

    path = saved_by(2, make, tmp_path / "saved")
    for ranks in (1, 3):
        assert loaded_by(ranks, make, path, lambda _: "loaded") == ["loaded"] * ranks


# What torch resizes


class Queue(nn.Module):
    """A queue that takes the size of a saved one, by its loader."""

    def __init__(self, length: int, kind: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("items", torch.full((length,), float(length)))
        if kind == "hook":
            self.register_load_state_dict_pre_hook(type(self).resize)
        self.kind = kind

    def resize(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "items" in state:
            self.items = torch.empty_like(state[prefix + "items"])

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.kind == "override":
            self.resize(state, prefix)
        super()._load_from_state_dict(state, prefix, *args)


def queue_job(length: int, kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Queue(length, kind))


@pytest.mark.parametrize("source", ["save", "export", "torch"])
@pytest.mark.parametrize("kind", ["hook", "override"])
def test_a_buffer_that_its_module_resizes_is_loaded(kind: str, source: str, tmp_path: Path) -> None:
    saved, live = queue_job(7, kind), queue_job(1, kind)
    path = tmp_path / "saved"
    if source == "torch":
        torch.save(saved.state_dict(), path)
    else:
        (sx.save_checkpoint if source == "save" else sx.export_checkpoint)(saved, path)
    report = sx.load_checkpoint(live, path)
    assert (report.missing, report.unexpected) == ((), ())
    for name, tensor in saved.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor), name


def test_a_buffer_of_another_shape_that_nothing_resizes_is_refused_before_a_change(tmp_path: Path) -> None:
    saved = queue_job(7, "override")
    sx.save_checkpoint({"model": saved}, tmp_path / "saved")
    for live in (queue_job(1, "none"), queue_job(1, "override")):
        if live[1].kind == "override":
            live[1].scale = nn.Parameter(torch.ones(3))
        name = "model.1.items" if live[1].kind == "none" else "model.1.scale"
        before = {key: value.clone() for key, value in live.state_dict().items()}
        with pytest.raises(errors.InvalidArgumentError, match="shape") as raised:
            sx.load_checkpoint({"model": live}, tmp_path / "saved")
        assert raised.value.name == name
        assert all(torch.equal(live.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    "observer", ["PerChannelMinMaxObserver", "MovingAveragePerChannelMinMaxObserver", "HistogramObserver"]
)
def test_observers_of_quantisation_are_loaded_by_their_restarted_job(observer: str, tmp_path: Path) -> None:
    import torch.ao.quantization as quantization

    kind = getattr(quantization, observer)
    saved, live = nn.Sequential(nn.Linear(3, 4), kind()), nn.Sequential(nn.Linear(3, 4), kind())
    saved(torch.randn(5, 3))
    sx.save_checkpoint({"model": saved, "step": 1}, tmp_path / "saved")
    sx.load_checkpoint({"model": live, "step": 0}, tmp_path / "saved")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor), name


def test_fake_quantisation_is_loaded_by_its_restarted_job(tmp_path: Path) -> None:
    import torch.ao.quantization as quantization

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4),
            quantization.FakeQuantize(
                quantization.MovingAveragePerChannelMinMaxObserver,
                quant_min=-128,
                quant_max=127,
                dtype=torch.qint8,
                qscheme=torch.per_channel_symmetric,
                ch_axis=1,
            ),
        )

    saved, live = make(), make()
    inputs = torch.randn(5, 3)
    saved(inputs)
    sx.save_checkpoint({"model": saved}, tmp_path / "saved")
    sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert torch.equal(live.eval()(inputs), saved.eval()(inputs))


class WithExtra(nn.Linear):
    """A layer whose extra state is a tensor of any length, as TransformerEngine's."""

    def __init__(self, length: int) -> None:
        super().__init__(2, 2)
        self.extra = torch.arange(length, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state.clone()


@pytest.mark.parametrize("source", ["save", "torch"])
@pytest.mark.parametrize("lengths", [(7, 0), (0, 7), (7, 3)])
def test_extra_state_of_another_length_goes_to_its_module(
    lengths: tuple[int, int], source: str, tmp_path: Path
) -> None:
    saved, live = (nn.Sequential(WithExtra(length)) for length in lengths)
    path = tmp_path / "saved"
    torch.save(saved.state_dict(), path) if source == "torch" else sx.save_checkpoint(saved, path)
    sx.load_checkpoint(live, path)
    assert torch.equal(live[0].extra, saved[0].extra)
    assert torch.equal(live[0].weight, saved[0].weight)


def test_extra_state_of_another_length_on_each_rank_is_restored_to_it(tmp_path: Path) -> None:
    path = saved_by(2, lambda: {"model": WithExtra(3 + sx.get_rank()).requires_grad_(False)}, tmp_path / "saved")
    read = lambda state: len(state["model"].extra)  # noqa: E731
    options = {"exclude": ["model.weight", "model.bias"]}
    assert loaded_by(2, lambda: {"model": WithExtra(0)}, path, read, **options) == [3, 4]
    (error,) = loaded_by(1, lambda: {"model": WithExtra(0)}, path, read, **options)
    assert isinstance(error, errors.ReplicaError)


class RowMeans(torch.optim.SGD):
    """An optimizer that keeps one plain number for each row of a parameter that this rank has."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            self.state[parameter]["rows"] = local.square().mean(1)


def row_job(*, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)
    if sharded:
        fully_shard(model)
    return {"model": model, "optimizer": RowMeans(model.parameters(), lr=0.1)}


def loads_rows(path: str) -> list[str]:
    state = row_job(sharded=True)
    with pytest.raises(errors.ReplicaError) as caught:
        sx.load_checkpoint(state, path)
    sx.load_checkpoint(state, path, exclude=str(caught.value.name))
    return [str(caught.value.name), str(len(state["optimizer"].state[state["model"].weight]))]


@pytest.mark.parametrize("form", ["save", "torch"])
def test_rows_of_one_rank_are_not_those_of_a_part(form: str, tmp_path: Path) -> None:
    """A save of one rank does not show that the parameter would be sharded at the load."""
    state = row_job(sharded=False)
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    path = tmp_path / ("save" if form == "save" else "state.pt")
    if form == "save":
        sx.save_checkpoint(state, path)
    else:
        torch.save({name: value.state_dict() for name, value in state.items()}, path)
    for name, count in run_ranks(loads_rows, 2, backend="gloo", args=(str(path),)):
        assert name.startswith("optimizer.state.")
        assert count == "0"
    again = row_job(sharded=False)
    sx.load_checkpoint(again, path)
    assert again["optimizer"].state[again["model"].weight]["rows"].shape == (4,)
