"""synchronize: values, containers, tensors and arrays take root's values in place."""

import enum
import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from equality import equal_bits
from synchronized_state import WORLDS, Pair, odd_arrays, odd_tensors, odd_values, rank_and_size
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train import windows as windows_module
from statexchange.train.synchronize import synchronize


class Handler(enum.Enum):
    ONE = functools.partial(max)


@dataclass
class Config:
    rate: float
    table: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    rate: float
    weight: Any = None


def filled(value: float, root: int = 0) -> torch.Tensor:
    """Return `value` on root, zeros elsewhere."""
    return torch.full((2, 3), value if rank_and_size()[0] == root else 0.0)


# The tests of Lux


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("last", [False, True])
def test_nested_tensors_get_roots_values_in_place(last: bool) -> None:
    root = rank_and_size()[1] - 1 if last else 0
    tensors = [filled(1.0, root) for _ in range(6)]
    tree = {"a": Pair(tensors[0], tensors[1]), "d": (tensors[2], [tensors[3]]), "e": Frozen(0.1, tensors[4])}
    assert synchronize(tree, root=root) is tree
    assert synchronize(tensors[5], root=root) is tensors[5]
    assert tree["a"].left is tensors[0]
    assert all((tensor == 1).all() for tensor in tensors)


@pytest.mark.ranks(*WORLDS)
def test_adams_state_set_to_one_on_root_is_one_everywhere() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].fill_(float(rank_and_size()[0] == 0))
    assert synchronize(optimizer) is optimizer
    for state in optimizer.state.values():
        assert (state["exp_avg"] == 1).all()
        assert (state["exp_avg_sq"] == 1).all()


@pytest.mark.ranks(*WORLDS)
def test_leaves_without_tensors_get_roots_values_or_do_not_change() -> None:
    rank = rank_and_size()[0]
    own = object()
    assert synchronize(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1 + rank)).param_groups[0]["lr"] == 0.1
    assert synchronize(None) is None
    assert synchronize(rank) == 0
    assert synchronize(f"rank {rank}") == "rank 0"
    assert synchronize(own) is own
    assert synchronize(()) == ()
    assert synchronize({}) == {}


@pytest.mark.ranks(2, 3)
def test_values_become_those_of_root_with_their_types() -> None:
    got, wanted = synchronize(odd_values(rank_and_size()[0])), odd_values(0)
    assert got == wanted
    assert {name: type(value) for name, value in got.items()} == {name: type(value) for name, value in wanted.items()}


@pytest.mark.ranks(2)
def test_nan_is_copied_like_any_value() -> None:
    assert np.isnan(synchronize(float("nan") if rank_and_size()[0] == 0 else 1.0))


@pytest.mark.ranks(2)
def test_objects_are_not_replaced() -> None:
    rank = rank_and_size()[0]
    tree = {"device": torch.device("cpu", rank), "bytes": b"%d" % rank, "handler": Handler.ONE, "call": rank_and_size}
    assert synchronize(dict(tree)) == tree


@pytest.mark.ranks(2, 4)
def test_mutable_containers_are_changed_in_place() -> None:
    rank = rank_and_size()[0]
    inner, config, frozen = [rank, "same"], Config(float(rank)), Frozen(float(rank), torch.full((2,), float(rank)))
    tree = OrderedDict(z=inner, a=config, f=frozen, p=Pair(rank, "same"), t=(rank, inner))
    got = synchronize(tree)
    assert got is tree
    assert list(tree) == ["z", "a", "f", "p", "t"]
    assert tree["z"] is inner == [0, "same"]
    assert tree["a"] is config == Config(0.0)
    assert tree["p"] == Pair(0, "same")
    assert tree["t"] == (0, inner)
    assert (tree["f"].rate, tree["f"].weight) == (0.0, frozen.weight)
    assert (frozen.weight == 0).all()
    assert frozen.rate == rank


@pytest.mark.ranks(2)
def test_the_order_of_keys_does_not_matter() -> None:
    rank = rank_and_size()[0]
    items = [("a", torch.full((3,), 1.0 + rank)), (1, torch.full((4,), 2.0 + rank)), ("b", rank)]
    tree = synchronize(dict(items if rank == 0 else reversed(items)))
    assert tree["a"].tolist() == [1.0] * 3
    assert tree[1].tolist() == [2.0] * 4
    assert tree["b"] == 0


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("limits", [(64 << 20, 1 << 20), (64, 1), (64, 48)], ids=str)
def test_any_dense_tensor_gets_roots_values_in_place(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_WINDOW_BYTES", limits[0])
    monkeypatch.setattr(windows_module, "_ALONE_BYTES", limits[1])
    rank = rank_and_size()[0]
    tensors, wanted = odd_tensors(rank), odd_tensors(0)
    before = dict(tensors)
    got = synchronize(tensors)
    for name, tensor in got.items():
        assert tensor is before[name]
        assert equal_bits(tensor, wanted[name]), name
    assert got["parameter"].requires_grad
    assert got["parameter"].is_leaf


def test_memory_around_a_view_is_not_touched() -> None:
    def body() -> list[float]:
        base = torch.full((4, 4), float(rank_and_size()[0]))
        synchronize(base[1:3, 1:3])
        return base.flatten().tolist()

    _, other = run_ranks(body, 2)
    assert [i for i, value in enumerate(other) if value == 0] == [5, 6, 9, 10]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("limits", [(64 << 20, 1 << 20), (16, 1)], ids=str)
def test_any_array_gets_roots_values_in_place(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_WINDOW_BYTES", limits[0])
    monkeypatch.setattr(windows_module, "_ALONE_BYTES", limits[1])
    arrays, wanted = odd_arrays(rank_and_size()[0]), odd_arrays(0)
    if rank_and_size()[0] == 0:
        arrays["plain"].flags.writeable = False  # those of root are only read
    before = dict(arrays)
    for name, array in synchronize(arrays).items():
        assert array is before[name]
        assert array.dtype.str == wanted[name].dtype.str, name
        assert array.tobytes() == wanted[name].tobytes(), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "number", [np.longdouble(1), np.clongdouble(1), ml_dtypes.bfloat16(1), ml_dtypes.int4(1)], ids=repr
)
def test_a_number_that_is_no_plain_value_is_named(number: Any) -> None:
    with pytest.raises(sx.errors.UnsupportedError, match=f"dtype {number.dtype} ") as caught:
        synchronize({"a": {"b": number}})
    assert caught.value.name == "a.b"


@pytest.mark.ranks(2)
def test_a_tensor_in_two_places_is_sent_once() -> None:
    weight = torch.full((3,), float(rank_and_size()[0]))
    tree = synchronize({"a": weight, "b": [weight, weight[:]]})
    assert tree["a"] is tree["b"][0] is weight
    assert weight.tolist() == [0.0] * 3


def test_windows_depend_on_shapes_only_and_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_WINDOW_BYTES", 256)
    monkeypatch.setattr(windows_module, "_ALONE_BYTES", 100)
    shapes = [(3,), (100,), (1, 300), (7, 5, 9), (2, 2), (0, 4), (), (25,), (24,), (26,)] + [(5,)] * 40
    plain = [torch.zeros(shape) for shape in shapes]
    strided = [torch.zeros([*shape, 2])[..., 0] for shape in shapes]
    windows = list(windows_module.windows(plain))
    assert [[p.shape for p in w] for w in windows] == [[p.shape for p in w] for w in windows_module.windows(strided)]
    assert all(sum(piece.nbytes for piece in window) <= 256 for window in windows)
    for window in windows:
        for piece in window:
            piece.add_(1)
    assert all((tensor == 1).all() for tensor in plain)
    assert len(windows) < 40


@pytest.mark.ranks(2)
def test_many_small_tensors_of_many_dtypes_are_sent_together() -> None:
    comm = sx.get_communicator()
    sizes: list[int] = []
    broadcast = comm.broadcast
    comm.broadcast = lambda tensor, **how: sizes.append(tensor.nbytes) or broadcast(tensor, **how)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    tree = [torch.full((i,), comm.rank + 1).to(dtypes[i % 4]) for i in range(200)]
    synchronize([*tree, torch.full((1 << 19,), float(comm.rank))])
    assert sorted(size >= 1 << 20 for size in sizes) == [False, True]
    assert all((tensor == 1).all() for tensor in tree)
