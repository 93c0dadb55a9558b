"""Reducers: Flashlight's formulas, its threshold rule, and the context manager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError
from statexchange.testing import run_ranks
from statexchange.train.reducers import CoalescingReducer, InlineReducer, Reducer

CACHE = 20 << 10
SMALL = 1 << 10  # float32 elements: five such tensors fill the cache


def filled(n: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def batches_of(comm: Communicator) -> list[list[int]]:
    """Return a list of the sizes in bytes of each batch that is sent over `comm` from now on."""
    batches: list[list[int]] = []
    original = comm.all_reduce_multiple

    def recording(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append([tensor.nbytes for tensor in tensors])
        return original(tensors, *args, **kwargs)

    comm.all_reduce_multiple = recording  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_inline_reducer_averages_at_once_as_flashlights(world_size: int) -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        tensor = filled(10, comm.rank)
        with InlineReducer(comm, 1 / comm.world_size) as reducer:
            reducer.add(tensor)
            now = tensor.clone()
        average = filled(10, comm.rank)
        InlineReducer().add(average)
        expected = filled(10, comm.world_size * (comm.world_size - 1))
        return all(torch.equal(t * 2 * comm.world_size, expected) for t in (now, tensor, average))

    assert all(run_ranks(work, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_coalescing_reducer_averages_as_flashlights(world_size: int, async_op: bool, contiguous: bool) -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        n = comm.world_size
        scaled = CoalescingReducer(comm, 1 / n, async_op=async_op, contiguous=contiguous, cache_bytes=CACHE)
        average = CoalescingReducer(async_op=async_op, contiguous=contiguous, cache_bytes=CACHE)
        ok = True
        for reducer in (scaled, average):
            tensors = [filled(SMALL, comm.rank + 1) for _ in range(50)]
            for i, tensor in enumerate(tensors, 1):
                reducer.add(tensor)
                if i % 10 == 0:
                    reducer.finalize()
            expected = filled(SMALL, n * (n + 1))
            ok &= all(torch.allclose(tensor * 2 * n, expected, rtol=1e-6) for tensor in tensors)
        return ok

    assert all(run_ranks(work, world_size))


def test_nothing_is_sent_before_the_default_cache_of_20_mib_is_full() -> None:
    def work() -> tuple[Any, ...]:
        comm = sx.get_communicator()
        batches = batches_of(comm)
        tensors = [filled(1 << 20, comm.rank + 1) for _ in range(6)]
        with CoalescingReducer(comm, 2.0) as reducer:
            for tensor in tensors[:5]:
                reducer.add(tensor)
            sent_before = len(batches)
            unchanged = all(bool((tensor == comm.rank + 1).all()) for tensor in tensors[:5])
            reducer.add(tensors[5])
            sent_after = len(batches)
        n = comm.world_size
        exact = all(bool((tensor == n * (n + 1)).all()) for tensor in tensors)
        return sent_before, unchanged, sent_after, batches, exact

    mib = 1 << 20
    assert run_ranks(work, 2) == [(0, True, 1, [[4 * mib] * 5, [4 * mib]], True)] * 2


THRESHOLD_CASES = [
    ("exactly full", [8, 8, 4], [[8, 8, 4]]),
    ("one byte more flushes first", [8, 12, 4], [[8, 12], [4]]),
    ("what is too large goes alone, after the cache", [4, 24, 4], [[4], [24], [4]]),
    ("as large as the cache is not too large", [20, 20], [[20], [20]]),
    ("too large and nothing cached", [24, 24, 4], [[24], [24], [4]]),
    ("nothing", [], []),
    ("empty tensors", [0, 0], [[0, 0]]),
]


@pytest.mark.parametrize(("sizes", "expected"), [c[1:] for c in THRESHOLD_CASES], ids=[c[0] for c in THRESHOLD_CASES])
def test_tensors_are_sent_together_once_they_reach_the_threshold(sizes: list[int], expected: list[list[int]]) -> None:
    def work() -> tuple[Any, bool]:
        comm = sx.get_communicator()
        batches = batches_of(comm)
        tensors = [filled(size // 4, comm.rank + i) for i, size in enumerate(sizes)]
        with CoalescingReducer(comm, cache_bytes=20) as reducer:
            for tensor in tensors:
                reducer.add(tensor)
        exact = all(torch.equal(tensor, filled(tensor.numel(), i + 0.5)) for i, tensor in enumerate(tensors))
        return batches, exact

    assert run_ranks(work, 2) == [(expected, True)] * 2


def test_a_cache_of_0_bytes_sends_everything_at_once() -> None:
    def work() -> list[list[int]]:
        comm = sx.get_communicator()
        batches = batches_of(comm)
        with CoalescingReducer(comm, cache_bytes=0) as reducer:
            for _ in range(3):
                reducer.add(filled(1, 1.0))
        return batches

    assert run_ranks(work, 2) == [[[4]] * 3] * 2


@pytest.mark.parametrize("contiguous", [False, True])
def test_dtypes_shapes_and_strides_may_be_mixed(contiguous: bool) -> None:
    dtypes = [torch.float64, torch.float16, torch.float32, torch.bfloat16, torch.complex64]

    def work() -> bool:
        comm = sx.get_communicator()
        r = comm.rank
        tensors = [torch.full((2, 3), r, dtype=dtype) for dtype in dtypes for _ in range(2)]
        tensors += [torch.full((3, 2), r, dtype=torch.float32).T, torch.tensor(float(r)), torch.empty(0)]
        with CoalescingReducer(comm, contiguous=contiguous) as reducer:
            for tensor in tensors:
                reducer.add(tensor)
        return all(bool((tensor == 0.5).all()) for tensor in tensors)

    assert all(run_ranks(work, 2))


def test_a_gradient_that_requires_grad_and_a_leaf_are_changed_in_place() -> None:
    def work() -> list[float]:
        comm = sx.get_communicator()
        leaf = torch.full((2,), float(comm.rank), requires_grad=True)
        for reducer in (InlineReducer(comm), CoalescingReducer(comm)):
            with reducer:
                reducer.add(leaf)
        return leaf.tolist()

    assert run_ranks(work, 2) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("kind", [InlineReducer, CoalescingReducer])
def test_finalize_may_be_called_again_and_without_tensors(kind: type[Reducer]) -> None:
    def work() -> list[float]:
        comm = sx.get_communicator()
        tensor = filled(2, comm.rank)
        reducer = kind(comm)
        reducer.finalize()
        reducer.add(tensor)
        reducer.finalize()
        reducer.finalize()
        return tensor.tolist()

    assert run_ranks(work, 2) == [[0.5, 0.5]] * 2


def test_a_block_that_raises_finalizes_nothing() -> None:
    def work() -> tuple[list[float], list[list[int]], list[float]]:
        comm = sx.get_communicator()
        batches = batches_of(comm)
        first, second = filled(1, comm.rank), filled(1, comm.rank)
        reducer = CoalescingReducer(comm)
        with pytest.raises(ZeroDivisionError), reducer:
            reducer.add(first)
            _ = 1 / 0
        with reducer:
            reducer.add(second)
        return first.tolist(), batches, second.tolist()

    assert run_ranks(work, 2) == [([float(rank)], [[4]], [0.5]) for rank in range(2)]


def test_a_collected_reducer_sends_nothing() -> None:
    def work() -> list[list[int]]:
        comm = sx.get_communicator()
        batches = batches_of(comm)
        reducer = CoalescingReducer(comm)
        reducer.add(filled(1, 1.0))
        del reducer
        comm.barrier()
        return batches

    assert run_ranks(work, 2) == [[], []]


@pytest.mark.parametrize("kind", [InlineReducer, CoalescingReducer])
def test_what_cannot_be_averaged_is_refused_on_all_ranks_and_the_reducer_goes_on(kind: type[Reducer]) -> None:
    def work() -> tuple[bool, list[float]]:
        comm = sx.get_communicator()
        reducer = kind(comm)
        with pytest.raises(UnsupportedError, match="int64"), reducer:
            reducer.add(torch.ones(2, dtype=torch.int64))
        tensor = filled(1, comm.rank)
        with reducer:
            reducer.add(tensor)
        return True, tensor.tolist()

    assert run_ranks(work, 2) == [(True, [0.5])] * 2


def test_ranks_that_add_different_tensors_get_an_error() -> None:
    def work() -> str:
        comm = sx.get_communicator()
        with pytest.raises(MismatchError, match="different calls") as caught, CoalescingReducer(comm) as reducer:
            reducer.add(filled(2 + comm.rank, 1.0))
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert "[2]" in first
    assert "[3]" in first


def test_impossible_reducers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cache_bytes"):
        CoalescingReducer(cache_bytes=-1)
    with pytest.raises(TypeError, match="abstract"):
        Reducer()  # type: ignore[abstract]
