"""Modules whose tensors share memory, and averages of parameters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from equality import equal_bits
from synchronized_state import (
    WORLDS,
    assert_equal_state,
    overlapping,
    rank_and_size,
    tensors_of,
    tied,
    trained,
    transposed,
)
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train import windows as windows_module
from statexchange.train.synchronize import allreduce_parameters, broadcast_parameters, synchronize


@pytest.mark.ranks(2, 3)
def test_a_modules_parameters_and_buffers_get_roots_values() -> None:
    rank, world_size = rank_and_size()
    model, wanted = tied(rank), tensors_of(tied(world_size - 1))
    before = tensors_of(model)
    tree = {"model": model, "step": rank}
    assert synchronize(tree, root=world_size - 1) == {"model": model, "step": world_size - 1}
    after = tensors_of(model)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    assert model.head.weight is model.embed.weight


def apart(value: float) -> list[Any]:
    return [torch.full((6,), value), torch.full((6,), value + 1)]


def columns(value: float) -> list[Any]:
    """Two tensors that have no element in common, but whose spans in memory overlap."""
    matrix = torch.full((6, 2), value)
    matrix[:, 1] += 1
    return list(matrix.T)


def array_and_tensor(value: float) -> list[Any]:
    """An array, and a tensor over its last elements."""
    array = np.full(10, value, np.float32)
    return [array, torch.from_numpy(array)[4:]]


def transposed_view(value: float) -> list[Any]:
    square = torch.full((6, 6), value).T
    return [square, square.T]


def clones(value: float) -> list[Any]:
    return [tensor.clone() for tensor in overlapping(value)]


def columns_first(value: float) -> list[Any]:
    images = torch.arange(24.0).add(value).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return [images, images[1:]]


def rows_first(value: float) -> list[Any]:
    images = torch.arange(24.0).add(value).view(2, 3, 2, 2)
    return [images, images[1:]]


def padded(value: float) -> list[Any]:
    """Arrays of a dtype of which most bytes are padding."""
    array = np.zeros(40, np.dtype({"names": ["a"], "formats": ["u1"], "offsets": [0], "itemsize": 4096}))
    array["a"] = value
    return [array, array[5:]]


def conjugated(value: float) -> list[Any]:
    numbers = torch.arange(6) + value * 1j
    return [numbers, numbers[2:].conj()]


def not_conjugated(value: float) -> list[Any]:
    numbers = torch.arange(6) + value * 1j
    return [numbers, numbers[2:]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        overlapping,
        array_and_tensor,
        columns,
        transposed,
        rows_first,
        conjugated,
        padded,
    ],
)
def test_tensors_that_share_memory_alike_on_all_ranks_are_filled(make: Any) -> None:
    rank, _ = rank_and_size()
    tree = make(rank * 10.0)
    synchronize(tree, root=1)
    for found, wanted in zip(tree, make(10.0), strict=True):
        if isinstance(found, np.ndarray):
            assert np.array_equal(found, wanted)
        else:
            assert equal_bits(found, wanted)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("on_root", "elsewhere"),
    [
        (apart, overlapping),
        (overlapping, apart),
        (clones, overlapping),
        (apart, columns),
        (transposed, transposed_view),
        (rows_first, columns_first),
        (lambda value: [torch.full((6,), value), torch.full((6,), value + 1)], overlapping),
        (lambda value: [torch.arange(36.0).view(6, 6), torch.full((6, 6), value)], transposed),
        (conjugated, not_conjugated),
        (not_conjugated, conjugated),
    ],
)
def test_tensors_that_share_memory_otherwise_than_roots_are_refused(on_root: Any, elsewhere: Any) -> None:
    rank, _ = rank_and_size()
    make = elsewhere if rank == 1 else on_root
    tree = make(rank + 7.0)
    with pytest.raises(sx.errors.MismatchError, match=r"shares memory with pair\[.\]") as caught:
        synchronize({"pair": tree})
    assert "clone()" in str(caught.value)
    assert caught.value.rank == 1
    assert caught.value.name in ("pair[0]", "pair[1]")
    for found, before in zip(tree, make(rank + 7.0), strict=True):  # nothing has changed
        assert equal_bits(found, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharing_rank", [0, 1])
def test_parameters_that_share_memory_on_one_rank_alone_are_not_averaged(sharing_rank: int) -> None:
    rank, _ = rank_and_size()
    tensors = (overlapping if rank == sharing_rank else apart)(float(rank))
    with pytest.raises(sx.errors.MismatchError, match=rf"with [01] .*\(rank {sharing_rank}\)"):
        allreduce_parameters(nn.ParameterList(tensors))


@pytest.mark.ranks(2)
def test_parameters_that_share_memory_on_all_ranks_are_averaged() -> None:
    rank, _ = rank_and_size()
    model = nn.ParameterList(overlapping(float(rank)))
    allreduce_parameters(model)
    for found, wanted in zip(model, overlapping(0.5), strict=True):
        assert equal_bits(found, wanted)


@pytest.mark.ranks(2)
def test_an_optimizers_state_that_shares_memory_with_a_tensor_is_made_anew() -> None:
    rank, _ = rank_and_size()
    _, optimizer = trained("adam", rank, 1)
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    mean = moment if rank == 1 else torch.full_like(moment, 7.0)
    synchronize({"mean": mean, "optimizer": optimizer})
    _, wanted = trained("adam", 0, 1)
    assert (mean == 7.0).all()
    assert_equal_state(optimizer, wanted)


@pytest.mark.ranks(2)
def test_ignored_names_do_not_change() -> None:
    rank = rank_and_size()[0]
    model = tied(rank)
    model._ddp_params_and_buffers_to_ignore = ["frozen.weight", "cache"]
    own = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    synchronize(model)
    broadcast_parameters(model)
    allreduce_parameters(model)
    for name, tensor in tensors_of(model).items():
        assert torch.equal(tensor, own[name] if name in ("frozen.weight", "cache") else tensors_of(tied(0))[name])


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("buffers", [True, False])
def test_broadcast_parameters_gives_roots_parameters_and_on_request_buffers(buffers: bool) -> None:
    rank, world_size = rank_and_size()
    model, own, wanted = tied(rank), tensors_of(tied(rank)), tensors_of(tied(world_size - 1))
    assert broadcast_parameters(model, broadcast_buffers=buffers, root=world_size - 1) is None
    names = dict(model.named_buffers())
    for name, tensor in tensors_of(model).items():
        assert torch.equal(tensor, wanted[name] if buffers or name not in names else own[name])


@pytest.mark.ranks(*WORLDS)
def test_allreduce_parameters_averages_and_takes_integers_from_rank_0() -> None:
    rank, world_size = rank_and_size()
    model = tied(rank)
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    model.register_buffer("wave", torch.tensor([1.0 + rank * 1j]))
    model.register_buffer("halves", torch.full((2, 3), 1.0 + rank, dtype=torch.bfloat16).t())
    allreduce_parameters(model)
    assert model.norm.num_batches_tracked == tied(0).norm.num_batches_tracked
    assert model.flags.tolist() == [True, True]
    assert model.wave.item() == pytest.approx(1 + (world_size - 1) / 2 * 1j)
    assert (model.halves == 1 + (world_size - 1) / 2).all()
    everyone = [tensors_of(tied(r)) for r in range(world_size)]
    for name, tensor in tensors_of(tied(rank)).items():
        if tensor.is_floating_point():
            mean = torch.stack([theirs[name] for theirs in everyone]).mean(0)
            assert torch.allclose(tensors_of(model)[name], mean), name
    assert model.head.weight is model.embed.weight


@pytest.mark.ranks(2)
def test_averages_are_cut_into_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_WINDOW_BYTES", 64)
    monkeypatch.setattr(windows_module, "_ALONE_BYTES", 16)
    model = nn.Linear(50, 7)
    nn.init.constant_(model.weight, 1.0 + rank_and_size()[0])
    model.weight.data = model.weight.data.t().contiguous().t()
    allreduce_parameters(model)
    assert (model.weight == 1.5).all()


@pytest.mark.parametrize("verb", [broadcast_parameters, allreduce_parameters])
def test_another_type_than_a_module_is_an_error_on_all_ranks(verb: Callable[..., None]) -> None:
    def body() -> str:
        with pytest.raises(sx.errors.InvalidArgumentError) as caught:
            verb(None if rank_and_size()[0] == 1 else nn.Linear(1, 1))
        return str(caught.value)

    messages = run_ranks(body, 2)
    assert messages == ["expected a module, not NoneType [rank 1]"] * 2


@pytest.mark.ranks(2)
def test_float8_cannot_be_averaged() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("scale", torch.ones(1, dtype=torch.float8_e4m3fn))
    with pytest.raises(sx.errors.UnsupportedError, match="float8_e4m3fn") as caught:
        allreduce_parameters(model)
    assert caught.value.name == "scale"


@pytest.mark.ranks(2)
def test_a_tensor_and_a_view_of_it_as_integers_cannot_be_averaged() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mean", torch.full((4,), 1.0 + rank_and_size()[0]))
    model.register_buffer("bits", model.mean.view(torch.int32)[:1])
    with pytest.raises(sx.errors.UnsupportedError, match="memory with bits") as caught:
        allreduce_parameters(model)
    assert caught.value.name == "mean"
    assert (model.mean == 1.0 + rank_and_size()[0]).all()
    model.bits = model.bits.clone()
    allreduce_parameters(model)
    assert (model.mean == 1.5).all()


@pytest.mark.ranks(2)
def test_views_of_one_dtype_are_averaged_once() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mean", torch.full((4,), 1.0 + rank_and_size()[0]))
    model.register_buffer("part", model.mean[1:3])
    allreduce_parameters(model)
    assert (model.mean == 1.5).all()
