"""Calls of collectives that are made again with the same dtype, shape and options: what they check and raise."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

import statexchange as sx
from statexchange.comm.session import KnownCall
from statexchange.testing import run_ranks


def remembered(comm: Any) -> int:
    """Return how many calls the communicator remembers."""
    return sum(isinstance(known, KnownCall) for known in comm._route.known.values())


def ones(comm: Any, times: int = 3, dtype: torch.dtype = torch.float32) -> None:
    """Reduce a tensor of 2 x 3 elements, so that the call is remembered."""
    for _ in range(times):
        tensor = torch.ones(2, 3, dtype=dtype)
        assert comm.all_reduce(tensor) is tensor
        assert tensor.eq(comm.world_size).all()


def texts_of_mismatches() -> list[str]:
    comm = sx.get_communicator()
    ones(comm)
    assert remembered(comm) == 1
    others: list[Any] = [(torch.ones(6), "sum"), (torch.ones(2, 3), "max"), (torch.ones(2, 3).double(), "sum")]
    texts = []
    for tensor, op in others:
        mine = (torch.ones(2, 3), "sum") if comm.rank == 0 else (tensor, op)
        with pytest.raises(sx.errors.MismatchError) as caught:
            comm.all_reduce(*mine)
        texts.append(str(caught.value))
        assert mine[0].eq(1).all()
        ones(comm, 1)  # and goes on
    with pytest.raises(sx.errors.MismatchError) as caught:
        comm.all_reduce(torch.ones(2, 3)) if comm.rank == 0 else comm.barrier()
    ones(comm, 1)
    return [*texts, str(caught.value)]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_ranks_in_different_calls_are_told_so(backend: str) -> None:
    first, second = run_ranks(in_shared_memory, 2, backend=backend, args=("texts_of_mismatches",))
    assert first == second
    words = ["float32[6]", "all_reduce max", "float64[2, 3]", "barrier"]
    for text, other in zip(first, words, strict=True):
        assert "rank 0 called all_reduce sum float32[2, 3]" in text
        assert other in text
        assert text.count("test_remembered_calls.py:") == 2


def in_shared_memory(name: str) -> Any:
    """Call a function of this module with a communicator of shared memory."""
    if not sx.is_initialized():
        sx.init("auto")
    return globals()[name]()


def reduce_all_kinds() -> int:
    comm = sx.get_communicator()
    ones(comm)
    total = comm.world_size
    row = torch.arange(3.0)
    freed, cut = torch.ones(2, 3), torch.ones(2, 3)
    freed.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(8)
    tensors: list[Any] = [
        torch.ones(3, 2).t(),  # not contiguous
        torch.ones(2, 3, requires_grad=True),
        torch.ones(4, 6)[::2, ::2],
        torch._neg_view(torch.full((2, 3), -1.0)),
        torch.nn.Parameter(torch.ones(2, 3)),
        np.ones((2, 3), np.float32),
        np.ones((3, 2), np.float32).T,
    ]
    for tensor in tensors:
        comm.all_reduce(tensor)
        assert (tensor == total).all()
    out = torch.zeros(2, 3)
    assert comm.all_reduce(torch.ones(2, 3), out=out) is out
    assert out.eq(total).all()
    assert comm.all_reduce(torch.ones(2, 3), scale=0.5).eq(total / 2).all()
    assert comm.all_reduce(torch.ones(2, 3), "avg").eq(1).all()
    assert comm.all_reduce(torch.ones(2, 3), async_op=True).wait().eq(total).all()
    with torch.inference_mode():
        for _ in range(3):
            assert comm.all_reduce(torch.ones(2, 3)).eq(total).all()
        inference = torch.ones(2, 3)
    refused: list[Any] = [
        row.expand(2, 3),
        inference,
        freed,
        cut,
        torch._efficientzerotensor((2, 3)),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, device="meta"),
        [1.0],
        None,
    ]
    for tensor in refused:
        with pytest.raises(sx.errors.StateExchangeError):
            comm.all_reduce(tensor)
        ones(comm, 1)
    for op in ([], {}, object()):
        with pytest.raises(sx.errors.StateExchangeError):
            comm.all_reduce(torch.ones(2, 3), op)
    ones(comm, 1)

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match="storage"):
            comm.all_reduce(tensor)
        return tensor

    torch.func.vmap(inside)(torch.ones(1, 2, 3))
    ones(comm, 1)
    return remembered(comm)


def test_other_tensors_of_the_same_dtype_and_shape_are_reduced_or_refused_as_before() -> None:
    assert run_ranks(in_shared_memory, 2, args=("reduce_all_kinds",)) == [1, 1]


def nans_and_halves() -> bool:
    comm = sx.get_communicator()
    for _ in range(3):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.complex64, torch.bool):
            for op in ("sum", "max"):
                tensor = torch.tensor([comm.rank, 1, 0]).to(dtype)
                if dtype == torch.complex64 and op == "max":
                    continue
                expected = torch.tensor([1, 2 if op == "sum" else 1, 0]).to(dtype)
                assert torch.equal(comm.all_reduce(tensor, op), expected), (dtype, op)
        nan = torch.tensor([float("nan") if comm.rank else 1.0, 2.0])
        assert comm.all_reduce(nan, "max").isnan().tolist() == [True, False]
        with pytest.raises(sx.errors.NumericOverflowError):
            comm.all_reduce(torch.tensor([100], dtype=torch.int8))
    return True


def test_every_dtype_gives_the_same_the_third_time() -> None:
    assert run_ranks(in_shared_memory, 2, args=("nans_and_halves",)) == [True, True]


def wait_late() -> bool:
    """Make a known call later than the deadline of the one that was remembered; a rank comes late, but not too late."""
    comm = sx.get_communicator()
    ones(comm)
    time.sleep(1.2)
    ones(comm, 1)
    if comm.rank == 1:
        time.sleep(0.6)
    ones(comm, 1)
    if comm.rank == 1:
        time.sleep(1.6)
        return True
    with pytest.raises(sx.errors.StallError) as caught:
        comm.all_reduce(torch.ones(2, 3))
    assert "ranks [1] did not reach all_reduce sum float32[2, 3] in 1 s" in str(caught.value)
    return True


def stalled() -> bool:
    sx.init("auto", timeout_s=1.0)
    return wait_late()


def test_the_deadline_counts_from_the_wait_of_each_call() -> None:
    outcomes = run_ranks(stalled, 2, backend="gloo", allow_failure=True)
    assert outcomes[0].error is None, str(outcomes)


def killed() -> str:
    comm = sx.init("auto")
    ones(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(sx.errors.PeerError) as caught:
        comm.all_reduce(torch.ones(2, 3))
    with pytest.raises(sx.errors.PeerError):
        comm.all_reduce(torch.ones(2, 3))
    return str(caught.value)


def test_a_rank_that_was_killed_is_named() -> None:
    outcomes = run_ranks(killed, 2, backend="gloo", allow_failure=True)
    assert "rank 1" in outcomes[0].value
    assert "all_reduce" in outcomes[0].value


def many_shapes() -> int:
    comm = sx.get_communicator()
    for size in range(1, 1400):
        for _ in range(2):
            comm.all_reduce(torch.ones(size))
    comm.close()
    with pytest.raises(sx.errors.StateExchangeError):
        comm.all_reduce(torch.ones(1399))
    return len(comm._route.known)


def test_few_shapes_are_remembered_and_none_after_the_end() -> None:
    assert max(run_ranks(in_shared_memory, 2, args=("many_shapes",))) <= 1024


def others_than_all_reduce() -> list[str]:
    comm = sx.get_communicator()
    total, texts = comm.world_size, []
    for turn in range(4):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            for shape in ((), (2, 3)):
                mine = torch.full(shape, comm.rank, dtype=dtype)
                gathered = comm.all_gather(mine)
                assert [part.dtype for part in gathered] == [dtype] * total
                for rank, part in enumerate(gathered):
                    assert torch.equal(part, torch.full(shape, rank, dtype=dtype))
                assert torch.equal(mine, torch.full(shape, comm.rank, dtype=dtype))
                for root in range(total):
                    sent = torch.full(shape, comm.rank, dtype=dtype)
                    assert comm.broadcast(sent, root=root) is sent
                    assert torch.equal(sent, torch.full(shape, root, dtype=dtype))
        assert remembered(comm) == (8 + 8 * total if turn else 0)
    # Others than plain tensors go the long way.
    assert comm.all_gather(np.full(2, comm.rank))[1].tolist() == [1, 1]
    transposed = torch.full((3, 2), float(comm.rank)).t()
    assert comm.broadcast(transposed, root=1).eq(1).all()
    assert comm.all_gather(torch.full((3, 2), float(comm.rank)).t())[1].eq(1).all()
    differing = [
        lambda: comm.broadcast(torch.ones(2, 3), root=comm.rank),
        lambda: comm.broadcast(torch.ones(2, 3) if comm.rank else torch.ones(6)),
        lambda: comm.all_gather(torch.ones(2, 3) if comm.rank else torch.ones(2, 3).double()),
        lambda: comm.all_gather(torch.ones(2, 3)) if comm.rank else comm.broadcast(torch.ones(2, 3)),
    ]
    for call in differing:
        with pytest.raises(sx.errors.MismatchError) as caught:
            call()
        texts.append(str(caught.value))
    for root in (7, -1, "0"):
        with pytest.raises(sx.errors.InvalidArgumentError):
            comm.broadcast(torch.ones(2, 3), root=root)
    assert comm.broadcast(torch.ones(2, 3)).eq(1).all()
    return texts


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_other_collectives_are_the_same_the_third_time(backend: str) -> None:
    first, second = run_ranks(in_shared_memory, 2, backend=backend, args=("others_than_all_reduce",))
    assert first == second
    pairs = [
        ("broadcast float32[2, 3] from 0", "broadcast float32[2, 3] from 1"),
        ("broadcast float32[6] from 0", "broadcast float32[2, 3] from 0"),
        ("all_gather float64[2, 3]", "all_gather float32[2, 3]"),
        ("broadcast float32[2, 3] from 0", "all_gather float32[2, 3]"),
    ]
    for text, (of_rank_0, of_rank_1) in zip(first, pairs, strict=True):
        assert f"rank 0 called {of_rank_0}" in text
        assert of_rank_1 in text
