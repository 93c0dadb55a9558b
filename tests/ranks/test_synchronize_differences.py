"""synchronize: trees that differ and objects of unknown kinds are one error on all ranks, with both sides."""

import enum
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from equality import equal_bits
from sweeps import slow
from synchronized_state import (
    Mode,
    Pair,
    assert_equal_state,
    odd_arrays,
    odd_tensors,
    odd_values,
    overlapping,
    raised_on_all,
    rank_and_size,
    sgd,
    tensors_of,
    tied,
    trained,
)
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train.synchronize import allreduce_parameters, broadcast_parameters, synchronize

# Differences between ranks

SAME = torch.zeros(1)
OF_2_3, OF_3_2 = torch.ones(2, 3), torch.ones(3, 2)


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
    assert "root holds a test_synchronize_differences.Other, which this rank does not know" in str(errors[0])
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
