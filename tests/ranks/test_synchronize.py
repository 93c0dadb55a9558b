"""synchronize: every kind of state takes root's values in place, or all ranks raise one error with both sides."""

import enum
import functools
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from equality import equal_bits
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train import windows as windows_module
from statexchange.train.synchronize import allreduce_parameters, broadcast_parameters, synchronize

WORLDS = (1, 2, 3, 4)


class Pair(NamedTuple):
    left: Any
    right: Any


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = ("s", 1)


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


def rank_and_size() -> tuple[int, int]:
    comm = sx.get_communicator()
    return comm.rank, comm.world_size


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


# Values


def odd_values(rank: int) -> dict[str, Any]:
    return {
        "bool": rank == 0,
        "int": 2**80 + rank,
        "float": 0.1 + rank,
        "infinite": float("-inf") if rank == 0 else 1.0,
        "complex": complex(1, -2) if rank == 0 else 0j,
        "text": "größe" * (rank + 1),
        "enum": Mode.SLOW if rank == 0 else Mode.FAST,
        "dtype": torch.bfloat16 if rank == 0 else torch.float32,
        "float32": np.float32(0.1) if rank == 0 else np.float64(7),
        "int8": np.int8(-3 + rank),
        "bool_": np.bool_(rank == 0),
        "complex64": np.complex64(1 + 2j) * (rank + 1),
        "one may be None": None if rank == 0 else 3,
        "other may be None": "best" if rank == 0 else None,
        "number for number": 1 if rank == 0 else 2.5,
        "size": torch.Size([1, 2 + rank]),
    }


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


# Tensors


def odd_tensors(rank: int) -> dict[str, torch.Tensor]:
    """Tensors of all kinds whose values depend on the rank, and whose strides differ between ranks."""
    grid = torch.arange(24, dtype=torch.float32).reshape(4, 6) + 100 * rank
    image = torch.arange(48.0).reshape(1, 3, 4, 4) + rank
    found = {
        "slice": grid.clone()[::2, 1:4],
        "strides differ": grid.t().contiguous().t() if rank else grid.clone(),
        "transposed": grid.clone().t(),
        "flipped": grid.clone().flip(0)[1:],
        "zero_dim": torch.tensor(4.6 + rank),
        "one of many": torch.arange(10.0 + rank)[rank::3][:1],
        "empty": torch.empty(0, 5),
        "parameter": nn.Parameter(grid.clone()),
        "needs_grad": torch.full((2,), float(rank), requires_grad=True),
        "conjugate": torch.tensor([1 + 2j, rank + 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 + rank * 1j]).conj().imag,
        "channels_last": image.contiguous(memory_format=torch.channels_last) if rank else image,
        "view": torch.arange(1 << 12, dtype=torch.float64)[10 + rank : 20 + rank],
    }
    if rank == 0:
        found["expanded on root"] = torch.tensor([1.5]).expand(7)
    else:
        found["expanded on root"] = torch.zeros(7)
    dtypes = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16")
    dtypes += ("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    for name in dtypes:
        found[name] = torch.arange(5 + rank)[rank:].add(1).to(getattr(torch, name))
    return found


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


def odd_arrays(rank: int) -> dict[str, Any]:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6) + rank
    return {
        "plain": grid.copy(),
        "reversed": grid.copy()[::-1, ::-2],
        "fortran": np.asfortranarray(grid) if rank else grid.copy(),
        "zero_dim": np.array(3.5 + rank),
        "empty": np.empty((0, 3)),
        "big_endian": np.arange(3, dtype=">i4") + np.array(rank, dtype=">i4"),
        "text": np.array(["abc", "de"]) if rank == 0 else np.array(["...", ".."]),
        "date": np.array(["2024-02-01", "2025-01-01"], dtype="M8[D]") + np.timedelta64(rank, "D"),
        "record": np.array([(1 + rank, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "bfloat16": np.array([1.5, rank], dtype=ml_dtypes.bfloat16),
        "matrix": np.ones((2, 2)) * rank,
    }


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


# Modules


class Tied(nn.Module):
    """Tied weights, a frozen layer, a buffer in the state dict and one that is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.ones(3), persistent=False)


def fill(tensors: Iterable[torch.Tensor], generator: torch.Generator) -> None:
    """Fill tensors with random numbers of a separate generator, since thread ranks share torch's."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


def tied(rank: int) -> Tied:
    model = Tied()
    fill([*model.parameters(), *model.buffers()], torch.Generator().manual_seed(rank))
    return model


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


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


def overlapping(value: float) -> list[Any]:
    """Two tensors of which the first's last two elements are the second's first."""
    flat = torch.full((10,), value + 1)
    flat[:4] = value
    return [flat[:6], flat[4:]]


def columns(value: float) -> list[Any]:
    """Two tensors that have no element in common, but whose spans in memory overlap."""
    matrix = torch.full((6, 2), value)
    matrix[:, 1] += 1
    return list(matrix.T)


def array_and_tensor(value: float) -> list[Any]:
    """An array, and a tensor over its last elements."""
    array = np.full(10, value, np.float32)
    return [array, torch.from_numpy(array)[4:]]


def transposed(value: float) -> list[Any]:
    square = torch.full((6, 6), value)
    return [square, square.T]


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


# Optimizers

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.2),
    "momentum": functools.partial(torch.optim.SGD, lr=0.002, momentum=0.9, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.2, weight_decay=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.2, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.2),
    "tensor lr": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.2), foreach=False),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.2),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.2),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.2),
}


def trained(kind: str, rank: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a frozen layer and two param groups, after some steps on this rank's data."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    fill(model.parameters(), generator)
    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = OPTIMIZERS[kind](groups)
    optimizer.param_groups[1]["weight_decay"] = 0.01 * (rank + 1)
    for _ in range(steps):
        train_step(model, optimizer, torch.randn(5, 3, generator=generator))
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def assert_equal_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for name, value in state.items():
            mine = ours["state"][number][name]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert (mine.dtype, mine.stride()) == (value.dtype, value.stride())
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(value))
    assert str(ours["param_groups"]) == str(theirs["param_groups"])
    assert "nan" not in str(theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [(3, 0), (0, 3), (3, 2), (0, 0)], ids=["resumed root", "fresh root", "both", "none"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_gets_roots_state_and_continues_equally(kind: str, steps: tuple[int, int]) -> None:
    rank = rank_and_size()[0]
    model, optimizer = trained(kind, rank, steps[rank])
    groups, state = list(optimizer.param_groups), dict(optimizer.state)
    assert synchronize([model, optimizer]) == [model, optimizer]
    root_model, root_optimizer = trained(kind, 0, steps[0])
    assert_equal_state(optimizer, root_optimizer)
    assert all(group is own for group, own in zip(optimizer.param_groups, groups, strict=True))
    assert all(optimizer.state[key] is state[key] for key in optimizer.state.keys() & state.keys())
    for one, two in ((model, optimizer), (root_model, root_optimizer)):
        train_step(one, two, torch.ones(4, 3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), root_model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_state_tensors_of_the_same_shape_stay_the_same_objects() -> None:
    _, optimizer = trained("adam", rank_and_size()[0], 1)
    before = [tensor for state in optimizer.state.values() for tensor in state.values()]
    synchronize(optimizer)
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(one is two for one, two in zip(before, after, strict=True))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "rprop"])
def test_after_fifty_different_steps_all_ranks_equal_rank_0(kind: str) -> None:
    model, optimizer = trained(kind, rank_and_size()[0], 50)
    synchronize({"model": model, "optimizer": optimizer})
    assert_equal_state(optimizer, trained(kind, 0, 50)[1])


@pytest.mark.ranks(2)
def test_the_nested_state_of_lbfgs_is_synchronized() -> None:
    rank = rank_and_size()[0]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    if rank == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.arange(6.0).reshape(2, 3)) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    synchronize(optimizer)
    found = sx.get_communicator().all_gather_object(str(optimizer.state_dict()))
    assert found[0] == found[1]
    assert len(optimizer.state[model.weight]["old_dirs"]) > 1


@pytest.mark.ranks(2)
def test_optimizer_state_of_any_nesting_becomes_that_of_root() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    shared = torch.arange(3.0)
    if rank_and_size()[0] == 0:
        odd = {1: (shared, [shared, None, np.float32(0.5)]), "array": np.arange(3), "seen": Mode.FAST, "nan": 1j}
        optimizer.state[parameter] = {"odd": odd, "step": torch.tensor(3), "empty": torch.empty(0)}
        optimizer.state["all"] = {"count": 7}
    else:
        optimizer.state[parameter] = {"seen": Mode.SLOW, "step": 1}
    synchronize(optimizer)
    state = optimizer.state[parameter]
    assert state["odd"][1][0] is state["odd"][1][1][0]
    assert state["odd"][1][0].tolist() == [0, 1, 2]
    assert state["odd"][1][1][1:] == [None, 0.5]
    assert type(state["odd"][1][1][2]) is np.float32
    assert state["odd"]["array"].tolist() == [0, 1, 2]
    assert state["odd"]["seen"] is Mode.FAST
    assert state["odd"]["nan"] == 1j
    assert state["step"] == 3
    assert optimizer.state["all"] == {"count": 7}


@pytest.mark.ranks(2)
def test_a_tensor_that_two_parameters_states_share_is_not_filled_twice() -> None:
    first, second = parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    shared = torch.zeros(2)
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["count"] = shared if rank_and_size()[0] else torch.full((2,), float(number))
    synchronize(optimizer)
    assert optimizer.state[first]["count"].tolist() == [0, 0]
    assert optimizer.state[second]["count"].tolist() == [1, 1]


def test_state_of_a_type_that_a_rank_does_not_know_is_an_error_on_all() -> None:
    def body() -> None:
        optimizer = sgd((1,))
        if rank_and_size()[0] == 0:
            optimizer.param_groups[0]["mode"] = Mode.FAST
        synchronize({"x": optimizer})

    errors = raised_on_all(body)
    assert "test_synchronize.Mode, which this rank does not know: give it to register_config" in str(errors[0])
    assert [error.name for error in errors] == ["x", "x"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "place", [lambda optimizer: optimizer, lambda optimizer: {"all": [optimizer]}], ids=["", "all[0]"]
)
def test_new_state_of_an_optimizer_has_the_strides_of_its_parameter(place: Any) -> None:
    rank, _ = rank_and_size()
    image = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(image)]
    optimizer = torch.optim.Adam(parameters)
    if rank == 0:
        torch.stack([p.sum() for p in parameters]).sum().backward()
        optimizer.step()
    synchronize(place(optimizer))
    assert optimizer.state[parameters[1]]["exp_avg"].stride() == image.stride()


def test_an_object_in_the_state_of_an_optimizer_is_not_replaced() -> None:
    def body(both: bool) -> bool:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        own = object()
        if both or rank_and_size()[0] == 0:
            optimizer.param_groups[0]["helper"] = own
        synchronize([optimizer])
        return optimizer.param_groups[0]["helper"] is own

    assert run_ranks(body, 2, args=(True,)) == [True, True]
    outcomes = run_ranks(body, 2, args=(False,), allow_failure=True)
    assert set(outcomes.errors.values()) == {"UnsupportedError"}
    assert "root has an object here" in outcomes.messages[0]
    assert "[0].param_groups[0].helper" in outcomes.messages[0]
    assert outcomes.messages[0] == outcomes.messages[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [deque, lambda items: set(items)], ids=["deque", "set"])
def test_tensors_in_a_set_or_deque_are_refused_by_name(make: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    held = make([torch.ones(2)])
    with pytest.raises(sx.errors.UnsupportedError, match=f"a {type(held).__name__}") as caught:
        synchronize({"a": held})
    assert caught.value.name == "a"
    with pytest.raises(sx.errors.UnsupportedError, match=f"a {type(held).__name__}") as caught:
        optimizer.param_groups[0]["held"] = held
        synchronize([optimizer])
    assert caught.value.name.endswith("param_groups[0].held")
    plain = make([rank_and_size()[0]])
    assert synchronize({"a": plain})["a"] is plain


@pytest.mark.ranks(2)
def test_schedulers_and_scalers_are_synchronized_as_objects_and_as_dicts() -> None:
    rank = rank_and_size()[0]
    _, optimizer = trained("adam", rank, 2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5] * 2),
        ],
        milestones=[2],
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    for _ in range(3 - rank):
        optimizer.step()
        scheduler.step()
    plateau.step(0.25 + rank)
    tree = {"scheduler": scheduler, "optimizer": optimizer, "plateau": plateau.state_dict(), "scaler": scaler}
    synchronize(tree)
    plateau.load_state_dict(tree["plateau"])
    assert (scheduler.last_epoch, scheduler._schedulers[1].last_epoch) == (3, 1)
    assert scaler.get_scale() == 256
    assert plateau.best == 0.25
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


# Differences between ranks

SAME = torch.zeros(1)
OF_2_3, OF_3_2 = torch.ones(2, 3), torch.ones(3, 2)


def sgd(*shapes: tuple[int, ...]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(shape))]} for shape in shapes], lr=0.1)


DIFFERENT: dict[str, tuple[Any, Any, str, str, str]] = {
    "shape": ({"a": [OF_2_3]}, {"a": [OF_3_2]}, "a[0]", "float32[2, 3]", "float32[3, 2]"),
    "dtype": ([OF_2_3], [OF_2_3.double()], "[0]", "float32[2, 3]", "float64[2, 3]"),
    "a key more": ({"b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2}, "a", "nothing", "a value"),
    "a key less": ({"a": 0, "b": 1, "c": 2}, {"b": 1, "c": 2}, "a", "a value", "nothing"),
    "the last key": ({"a": 0, "z": 1}, {"a": 0}, "z", "a value", "nothing"),
    "length": ({"l": [1, 2]}, {"l": [1]}, "l", "list of 2", "list of 1"),
    "container": ([(1,)], [[1]], "[0]", "tuple of 1", "list of 1"),
    "type": (Pair(1, 2), (1, 2), "(the whole)", "namedtuple Pair", "tuple of 2"),
    "tensor or value": ({"lr": OF_2_3}, {"lr": 0.5}, "lr", "float32[2, 3]", "a value"),
    "tensor or array": ([OF_2_3], [np.ones((2, 3), np.float32)], "[0]", "float32[2, 3]", "array float32[2, 3]"),
    "byte order": ([np.ones(1)], [np.ones(1, ">f8")], "[0]", "array float64[1]", "array >f8[1]"),
    "object or value": ([object()], [1], "[0]", "an object", "a value"),
    "ties": ([OF_2_3, OF_2_3], [OF_2_3, OF_2_3.clone()], "[1]", "the same as [0]", "float32[2, 3]"),
    "modules": (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), "bias", "float32[3]", "nothing"),
    "optimizers": (
        sgd((1,)),
        torch.optim.Adam([nn.Parameter(SAME)]),
        "",
        "an optimizer SGD",
        "an optimizer Adam",
    ),
    "param groups": ([sgd((1,))], [sgd((1,), (2,))], "[0].param_groups", "list of 1", "list of 2"),
    "a parameter": ([sgd((1,))], [sgd((2,))], "[0].param_groups[0].params[0]", "parameter float32[1]", ""),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_different_trees_are_one_error_on_all_ranks(case: str, odd: int) -> None:
    """One rank, root or another, has a different tree."""
    first, second, path, theirs, ours = DIFFERENT[case]
    if odd == 0:
        first, second, theirs, ours = second, first, ours, theirs
    marks = [torch.full((2,), float(rank)) for rank in range(3)]

    def body() -> list[Any]:
        comm = sx.get_communicator()
        tree = second if comm.rank == max(odd, 1) or (odd == 0 and comm.rank != 0) else first
        with pytest.raises(sx.errors.MismatchError) as caught:
            synchronize([marks[comm.rank], tree] if path == "" else tree)
        comm.barrier()
        return [str(caught.value), caught.value.rank, caught.value.name, caught.value.expected, caught.value.found]

    found = run_ranks(body, 3)
    assert found[0] == found[1] == found[2]
    message, rank, name, expected, got = found[0]
    assert rank == max(odd, 1)
    assert name == (path or "[1]")
    assert expected.startswith(theirs)
    assert got.startswith(ours)
    assert expected.endswith("(rank 0)")
    assert got.endswith(f"(rank {rank})")
    assert f"different on: {'1, 2' if odd == 0 else odd}" in message
    assert [mark.tolist() for mark in marks] == [[float(rank)] * 2 for rank in range(3)]


@pytest.mark.parametrize(("first", "second"), [(3, "x"), ("fast", Mode.FAST), (Mode.FAST, "fast"), (torch.half, 2.0)])
def test_plain_values_of_different_types_are_one_error_on_all_ranks(first: Any, second: Any) -> None:
    """Nothing has changed then; None may stand for any value, and one number for another."""
    mark = [torch.full((2,), float(rank)) for rank in range(2)]

    def body() -> None:
        rank, _ = rank_and_size()
        synchronize({"mark": mark[rank], "mode": Mode.FAST, "n": second if rank else first})

    errors = raised_on_all(body)
    assert {type(error) for error in errors} == {sx.errors.MismatchError}
    assert (errors[0].name, errors[0].rank) == ("n", 1)
    assert [one.tolist() for one in mark] == [[0.0] * 2, [1.0] * 2]


def test_a_different_key_is_shown_with_that_of_root() -> None:
    error = raised_on_all(lambda: synchronize({"a": 0, "weight" if rank_and_size()[0] == 0 else "wait": OF_2_3}))[0]
    assert (error.name, error.rank) == ("weight", 1)
    assert (error.expected, error.found) == ("float32[2, 3] (rank 0)", "nothing (rank 1)")


def test_different_roots_are_one_error_on_all_ranks() -> None:
    outcomes = run_ranks(lambda: synchronize(1, root=rank_and_size()[0]), 2, allow_failure=True)
    assert outcomes.errors == {0: "MismatchError", 1: "MismatchError"}
    assert "root=0" in outcomes.messages[1]
    assert "root=1" in outcomes.messages[1]


def test_a_root_that_does_not_exist_is_an_error_on_all_ranks() -> None:
    outcomes = run_ranks(lambda: synchronize(1, root=5 * rank_and_size()[0]), 2, allow_failure=True)
    assert outcomes.errors == {0: "InvalidArgumentError", 1: "InvalidArgumentError"}


def test_parameters_that_differ_are_named_by_broadcast_and_allreduce_parameters() -> None:
    def body(verb: Callable[..., None]) -> None:
        verb(nn.Sequential(nn.Linear(2, 3 + rank_and_size()[0])))

    for verb in (broadcast_parameters, allreduce_parameters):
        outcomes = run_ranks(body, 2, args=(verb,), allow_failure=True)
        assert set(outcomes.errors.values()) == {"MismatchError"}
        assert "expected float32[3] (rank 0), found float32[4] (rank 1) [tensor '0.bias', rank 1]" in str(outcomes)


@pytest.mark.ranks(2)
def test_a_large_difference_is_shortened() -> None:
    tree = {f"name{i}": "x" * 10000 for i in range(200)}
    if rank_and_size()[0]:
        tree["name150"] = torch.ones(1)
    with pytest.raises(sx.errors.MismatchError) as caught:
        synchronize(tree)
    assert len(str(caught.value)) < 400


# Unsupported objects


def cycle() -> Any:
    tree: list[Any] = [1]
    tree.append({"again": tree})
    return tree


class Other(enum.Enum):
    ONE = 1


REFUSED: dict[str, tuple[Callable[[], Any], type, str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), sx.errors.UnsupportedError, "sparse_coo"),
    "meta": (lambda: torch.ones(2, device="meta"), sx.errors.UnsupportedError, "a meta one"),
    "quantised": (lambda: quantised(), sx.errors.UnsupportedError, "quantized"),
    "lazy": (lambda: nn.LazyLinear(2), sx.errors.InvalidArgumentError, "call the module"),
    "freed": (lambda: freed(), sx.errors.UnsupportedError, "no storage"),
    "generator": (lambda: nn.Linear(1, 1).parameters(), sx.errors.InvalidArgumentError, "a generator"),
    "view of values": (lambda: {"a": 1}.values(), sx.errors.InvalidArgumentError, "give a list"),
    "objects": (lambda: np.array([object()]), sx.errors.UnsupportedError, "array of objects"),
    "masked": (lambda: np.ma.array([1, 2], mask=[True, False]), sx.errors.UnsupportedError, "masked array"),
    "cycle": (cycle, sx.errors.InvalidArgumentError, r"x\[1\]\.again"),
    "key": (lambda: {nn.Parameter(torch.ones(1)): 1}, sx.errors.UnsupportedError, "a Parameter as"),
    "stale state": (lambda: stale(), sx.errors.InvalidArgumentError, "no param group"),
}


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def stale() -> torch.optim.Optimizer:
    optimizer = sgd((1,))
    optimizer.state[nn.Parameter(torch.ones(1))] = {"step": 1}
    return optimizer


def raised_on_all(body: Callable[[], Any]) -> list[Exception]:
    """Return the error of each of two ranks; the communicator must still work after it."""

    def caught() -> Exception:
        with pytest.raises(sx.StateExchangeError) as found:
            body()
        sx.get_communicator().barrier()
        return found.value

    return run_ranks(caught, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_object_on_one_rank_is_an_error_on_all(case: str) -> None:
    make, kind, words = REFUSED[case]
    bad = 0 if case == "stale state" else 1
    errors = raised_on_all(
        lambda: synchronize({"x": make() if rank_and_size()[0] == bad else sgd((1,)) if bad == 0 else 1})
    )
    assert [type(error) for error in errors] == [kind] * 2
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(kind, match=words):
        raise errors[0]
    assert errors[0].rank == bad
    assert (errors[0].name or "x").startswith("x")


UNWRITABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "expanded": (lambda: torch.ones(1).expand(3), "clone"),
    "inference": (lambda: inference(), "inference_mode"),
    "read-only": (lambda: np.frombuffer(b"abc", dtype=np.uint8), "read-only"),
}


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize("case", UNWRITABLE)
def test_read_only_memory_is_allowed_on_root_only(case: str) -> None:
    make, words = UNWRITABLE[case]

    def body(bad: int) -> Any:
        tensor = make()
        mine = tensor if rank_and_size()[0] == bad else np.array(tensor) if case == "read-only" else torch.zeros(3)
        return synchronize({"x": mine})["x"].tolist()

    first, second = run_ranks(body, 2, args=(0,))
    assert first == second == make().tolist()
    errors = raised_on_all(lambda: body(1))
    assert words in str(errors[0])
    assert [error.rank for error in errors] == [1, 1]
    assert errors[0].name == "x"


def test_an_enum_that_a_rank_does_not_know_is_an_error_on_all() -> None:
    errors = raised_on_all(lambda: synchronize({"mode": Other.ONE if rank_and_size()[0] == 0 else None}))
    assert "root holds a test_synchronize.Other, which this rank does not know" in str(errors[0])
    assert str(errors[0]) == str(errors[1])


def test_a_rank_that_fails_before_the_call_does_not_let_the_others_wait() -> None:
    def body() -> None:
        if rank_and_size()[0] == 1:
            raise RuntimeError("lost")
        synchronize(torch.ones(3))

    outcomes = run_ranks(body, 3, allow_failure=True, timeout_s=10)
    assert outcomes.errors == {0: "PeerError", 1: "RuntimeError", 2: "PeerError"}


def test_ranks_in_different_calls_raise() -> None:
    def body() -> None:
        if rank_and_size()[0] == 1:
            broadcast_parameters(nn.Linear(1, 1))
        else:
            synchronize(torch.ones(3))

    outcomes = run_ranks(body, 2, allow_failure=True, timeout_s=10)
    assert set(outcomes.errors.values()) == {"MismatchError"}


def test_in_a_world_of_one_nothing_changes() -> None:
    model, optimizer = trained("adam", 0, 1)
    tree = {"model": model, "optimizer": optimizer, "x": [1, None, object()], "array": np.arange(3)}
    assert synchronize(tree) is tree
    allreduce_parameters(model)
    with pytest.raises(sx.errors.UnsupportedError, match="sparse"):
        synchronize(torch.eye(2).to_sparse())


BIG_ENDIAN = np.dtype(ml_dtypes.bfloat16).newbyteorder(">")


class ArrayHolder:
    """An object with one array as its state."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array = state["array"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", ">i4", "<U3", "M8[s]", "V5"])
@pytest.mark.parametrize("lacks_it", [False, True])
def test_an_array_in_the_state_of_an_object_keeps_its_dtype(dtype: str, lacks_it: bool) -> None:
    rank, _ = rank_and_size()
    wanted = np.arange(4).astype("i8").astype(getattr(ml_dtypes, dtype, dtype))
    holder = ArrayHolder(wanted if rank == 0 else None if lacks_it else np.zeros_like(wanted))
    synchronize(holder)
    assert holder.array.dtype == wanted.dtype
    assert holder.array.tobytes() == wanted.tobytes()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [[("x", "f4"), ("y", "i4")], ml_dtypes.int4, BIG_ENDIAN])
def test_an_array_of_a_dtype_without_text_in_the_state_of_an_object_is_refused(dtype: Any) -> None:
    with pytest.raises(sx.errors.UnsupportedError, match="arrays of") as caught:
        synchronize({"holder": ArrayHolder(np.zeros(4, dtype))})
    assert caught.value.name == "holder.array"


# Over processes


def tree_of(rank: int, steps: int) -> dict[str, Any]:
    model, optimizer = trained("adamw", rank, steps)
    tensors = {name: tensor for name, tensor in odd_tensors(rank).items() if name != "expanded on root"}
    return {
        "tied": tied(rank),
        "model": model,
        "optimizer": optimizer,
        "tensors": tensors,
        "values": odd_values(rank),
        "arrays": odd_arrays(rank),
        "big": torch.full((3 << 20,), float(rank)),
        "strided": torch.full((1 << 9, 1 << 11), float(rank)).t(),
    }


@pytest.mark.ranks(2, backend=("gloo", slow("mpi")), timeout_s=60)
def test_every_kind_of_state_is_synchronized_between_processes() -> None:
    """Synchronize all kinds at once, on transports between processes."""
    comm = sx.init("gloo" if dist.is_initialized() else "mpi")
    tree, wanted = tree_of(comm.rank, 3 * comm.rank), tree_of(1, 3)
    assert synchronize(tree, root=1) is tree
    assert_equal_state(tree["optimizer"], wanted["optimizer"])
    assert tree["values"] == wanted["values"]
    for name in ("tied", "model"):
        pairs = zip(tensors_of(tree[name]).values(), tensors_of(wanted[name]).values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    assert all(equal_bits(tree["tensors"][name], wanted["tensors"][name]) for name in tree["tensors"])
    assert all(tree["arrays"][name].tobytes() == wanted["arrays"][name].tobytes() for name in tree["arrays"])
    assert (tree["big"] == 1).all()
    assert (tree["strided"] == 1).all()
    model = nn.Linear(600, 600)
    nn.init.constant_(model.weight, float(comm.rank))
    allreduce_parameters(model)
    assert (model.weight == 0.5).all()
    broadcast_parameters(nn.BatchNorm1d(3), root=1)
    with pytest.raises(sx.errors.MismatchError, match="shares memory") as caught:
        synchronize(overlapping(7.0) if comm.rank == 1 else [torch.zeros(6), torch.ones(6)])
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.MismatchError, match=r"float32\[2\].*float32\[3\]") as caught:
        synchronize({"w": torch.ones(2 + comm.rank)})
    assert caught.value.name == "w"
    assert caught.value.rank == 1
    if dist.is_initialized():
        on_a_mesh()


def on_a_mesh() -> None:
    """Synchronize DTensors: replicated ones are filled, sharded ones refused by name."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.full((2, 3), 1.0 + rank), mesh, [Replicate()], run_check=False)
    assert synchronize({"w": whole})["w"] is whole
    assert (whole.to_local() == 1).all()
    cut = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    with pytest.raises(sx.errors.UnsupportedError, match="several ranks") as caught:
        synchronize({"w": cut})
    assert caught.value.name == "w"
    with pytest.raises(sx.errors.UnsupportedError, match="many ranks"):
        synchronize(torch.optim.SGD([nn.Parameter(cut)], lr=0.1))
