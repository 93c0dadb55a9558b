"""Backends: how they start, and every method against a plain formula, for ranks in any order."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from starting import KINDS, launched_backend, wait
from sweeps import by_default

import statexchange as sx
from statexchange import shared_memory
from statexchange.comm import rendezvous
from statexchange.comm.backends import gloo, mpi, torch_groups
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.nccl import NCCLBackend
from statexchange.comm.backends.reduction import Finish
from statexchange.comm.backends.store import over_group
from statexchange.comm.wait import Wait
from statexchange.settings import Launch
from statexchange.testing import run_ranks

OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
PROMISED = (torch.float32, torch.float64, torch.int64, torch.uint8)  # reduced by all_reduce, whatever `reduces` is
NAN, INF = float("nan"), float("inf")


# Requirements of every backend, for any order and number of ranks


def gathers_bytes(b: Backend) -> None:
    for sizes in ([0, 0, 0], [1, 0, 248], [5, 249, 0], [300_000, 3, 248], [10, 10, 10]):
        payloads = [bytes([rank, 0, 255]) * sizes[rank] for rank in range(b.world_size)]
        assert b.all_gather_bytes(payloads[b.rank], wait()) == payloads


def moves_bytes(b: Backend) -> None:
    for size in (0, 1, 1000, 90_001):
        parts = [torch.full((size,), 7 * rank + 1, dtype=torch.uint8) for rank in range(b.world_size)]
        everything = torch.cat(parts)
        ours = parts[b.rank].clone()
        into = torch.zeros_like(everything)
        b.all_gather(ours, into, wait())
        assert torch.equal(into, everything)
        for root in range(b.world_size):
            data = ours.clone()
            b.broadcast(data, root, wait())
            assert torch.equal(data, parts[root])
        assert torch.equal(ours, parts[b.rank])


def moves_unequal_bytes(b: Backend) -> None:
    n = b.world_size
    for unit in (0, 1, 50_000):
        sizes = [[unit * ((src + 2 * dst) % 3) for dst in range(n)] for src in range(n)]
        parts = [[torch.full((sizes[s][d],), 16 * s + d, dtype=torch.uint8) for d in range(n)] for s in range(n)]
        expected = torch.cat([parts[src][b.rank] for src in range(n)])
        into = torch.empty_like(expected)
        into_sizes = [sizes[src][b.rank] for src in range(n)]
        b.all_to_all(torch.cat(parts[b.rank]), sizes[b.rank], into, into_sizes, wait())
        assert torch.equal(into, expected)


def values(dtype: torch.dtype, size: int, rank: int, op: str) -> torch.Tensor:
    """Return numbers whose reduction is exact in every order of ranks.

    Some are numbers that some transports reduce wrong.
    """
    random = torch.Generator().manual_seed(1000 * rank + size)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        small = op in ("sum", "prod")
        low, high = (0, 4) if small else (limits.min, min(limits.max, 2**62))
        return torch.randint(low, high, (size,), generator=random).to(dtype)
    tensor = torch.randint(-8, 9, (size,), generator=random).to(dtype)
    if size > 8:
        tensor[7] = 60_000.0 if op != "prod" else 2.0  # in float16 the sum is out of range, and half the average is not
        tensor[rank] = NAN
        tensor[4:7] = torch.tensor([INF, -INF if rank else 1.0, 0.0])
    return tensor


def combined(parts: list[torch.Tensor], op: str, finish: Finish) -> torch.Tensor:
    wide = [part.double() if part.is_floating_point() else part.long() for part in parts]
    result = wide[0].clone()
    for part in wide[1:]:
        result = OPS[op](result, part)
    finish(result)
    return result.to(parts[0].dtype)


def equal_values(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


def cells(b: Backend) -> list[tuple[str, torch.dtype]]:
    return [(op, dtype) for op in OPS for dtype in FLOATS + INTS if b.reduces(op, dtype)]


def reduces_all_dtypes(b: Backend) -> None:
    for op, dtype in cells(b):
        for size in (0, 1, 9, 5000 if b.name == "store" else 30_001):
            reduces_by_all_methods(b, op, dtype, size)


def all_reduces_promised_dtypes(b: Backend) -> None:
    for op in OPS:
        for dtype in PROMISED:
            parts = [values(dtype, 8, rank, op) for rank in range(b.world_size)]
            tensor = parts[b.rank].clone()
            b.all_reduce(tensor, op, Finish(), wait())
            assert equal_values(tensor, combined(parts, op, Finish())), (op, dtype)


def reduces_by_all_methods(b: Backend, op: str, dtype: torch.dtype, size: int) -> None:
    n = b.world_size
    halves = Finish(n, 0.5) if dtype.is_floating_point and op == "sum" else Finish()
    parts = [values(dtype, size * n, rank, op) for rank in range(n)]
    expected = combined(parts, op, halves)
    tensor = parts[b.rank].clone()
    b.all_reduce(tensor, op, halves, wait())
    assert equal_values(tensor, expected), (op, dtype, size)
    root = (size + 1) % n
    tensor = parts[b.rank].clone()
    b.reduce(tensor, op, root, halves, wait())
    assert equal_values(tensor, expected if b.rank == root else parts[b.rank]), (op, dtype, size)
    tensor, into = parts[b.rank].clone(), torch.empty(size, dtype=dtype)
    b.reduce_scatter(tensor, into, op, halves, wait())
    assert equal_values(into, expected.view(n, -1)[b.rank]), (op, dtype, size)
    assert equal_values(tensor, parts[b.rank]), (op, dtype, size)


def sums_to_equal_bits(b: Backend) -> None:
    """Check that sums which depend on their order are at least equal on all ranks."""
    for size in (100, 40_001):
        tensor = torch.rand(size, generator=torch.Generator().manual_seed(b.rank)) ** 9
        b.all_reduce(tensor, "sum", Finish(), wait())
        assert len(set(b.all_gather_bytes(tensor.numpy().tobytes(), wait()))) == 1


def sends_between_all_pairs(b: Backend) -> None:
    """Send from all ranks to all, both ways at once, with all tags, during reductions."""
    failures: list[BaseException] = []

    def exchange(verb: str, peer: int) -> None:
        try:
            for round_ in range(3):
                for tag, size in ((0, 320), (1, 0), (2, 400_000), (0, 1)):
                    here, there = (b.rank, peer) if verb == "send" else (peer, b.rank)
                    message = torch.full((size,), 50 * round_ + 16 * tag + 4 * here + there, dtype=torch.uint8)
                    data = message.clone() if verb == "send" else torch.zeros_like(message)
                    getattr(b, verb)(data, peer, tag, wait())
                    assert torch.equal(data, message)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    peers = [rank for rank in range(b.world_size) if rank != b.rank]
    threads = [threading.Thread(target=exchange, args=(verb, peer)) for peer in peers for verb in ("send", "recv")]
    for thread in threads:
        thread.start()
    for _ in range(5):
        tensor = torch.ones(100_000)
        b.all_reduce(tensor, "sum", Finish(), wait())
        assert (tensor == b.world_size).all()
    for thread in threads:
        thread.join()
    assert not failures, failures


def checks_all_methods(b: Backend) -> None:
    gathers_bytes(b)
    moves_bytes(b)
    moves_unequal_bytes(b)
    reduces_all_dtypes(b)
    all_reduces_promised_dtypes(b)
    if b.name == "store":
        with pytest.raises(sx.errors.UnsupportedError):
            b.send(torch.ones(1, dtype=torch.uint8), 0, 0, wait())
    else:
        sums_to_equal_bits(b)
        sends_between_all_pairs(b)


def checks_calls_of_nccl(b: Backend) -> None:
    """Run NCCL's backend over Gloo's process group: it calls what every process group has, so no GPU is needed."""
    nccl = NCCLBackend(dist.group.WORLD, b)
    gathers_bytes(nccl)
    moves_bytes(nccl)
    moves_unequal_bytes(nccl)
    all_reduces_promised_dtypes(nccl)
    tensor, into = torch.full((6,), nccl.rank + 1.0), torch.empty(2)
    nccl.reduce_scatter(tensor, into, "sum", Finish(2, 3), wait())
    assert into.tolist() == [9.0, 9.0]
    nccl.reduce(tensor, "prod", 1, Finish(), wait())
    assert nccl.rank != 1 or tensor.tolist() == [6.0] * 6
    sends_between_all_pairs(nccl)


def checks_backend_and_groups(kind: str, path: str) -> None:
    gloo._BLOCK_BYTES = 1 << 18  # several blocks without large tensors
    b = launched_backend(kind, path)
    rank = b.rank
    checks_all_methods(b)
    if kind == "gloo":
        checks_calls_of_nccl(b)

    def group_of(ranks: list[int]) -> Backend:
        group = b.new_group(ranks, 10.0)
        return group if kind == "store" else group.transport(10.0)

    turned = group_of([2, 0, 1])
    assert (turned.rank, turned.world_size) == ([2, 0, 1].index(rank), 3)
    checks_all_methods(turned)
    alone = group_of([rank])
    assert (alone.rank, alone.world_size) == (0, 1)
    checks_all_methods(alone)
    for _ in range(2):  # the same ranks again, and other ranks in between
        for ranks in ([1, 0], [1, 2]):
            if rank in ranks:
                pair = group_of(ranks)
                assert pair.all_gather_bytes(bytes([rank]), wait()) == [bytes([r]) for r in ranks]
    turned.all_gather_bytes(b"", wait())
    if kind == "mpi":  # its worlds are slow to start, so this one runs all tests of MPI alone
        bootstraps_over_mpi(b)
        leaves_the_callers_messages_alone(b)
    b.close()


@pytest.mark.parametrize("kind", by_default(KINDS, 0))
def test_every_method_is_correct(kind: str, tmp_path: Any) -> None:
    run_ranks(checks_backend_and_groups, 3, backend=KINDS[kind], args=(kind, str(tmp_path / "store")), timeout_s=120)


def bootstraps_over_mpi(b: Backend) -> None:
    """Bootstrap over MPI: it sends the address of a store, and detects a launcher of another MPI."""
    bootstrap = rendezvous.by_launcher(launch("mpich", 3), 10.0)
    assert bootstrap.all_gather_bytes(bytes([b.rank]), wait()) == [b"\0", b"\1", b"\2"]
    b.all_gather_bytes(b"", wait())  # rank 0 serves the store until all are done with it
    with pytest.raises(sx.errors.NotInitializedError, match="THE_VARIABLE"):
        mpi.world(launch("mpich", 4))


def leaves_the_callers_messages_alone(b: Backend) -> None:
    """Check that a receive for any message, posted before the rendezvous, gets the caller's next message."""
    from mpi4py import MPI

    theirs = MPI.COMM_WORLD.Dup()
    into, status = bytearray(5), MPI.Status()
    request = theirs.Irecv([into, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)
    sx.comm.from_mpi(theirs, timeout_s=10).barrier()
    theirs.Send([b"hello", MPI.BYTE], (b.rank + 1) % b.world_size, 32_767)
    request.Wait(status)
    assert (bytes(into), status.Get_source(), status.Get_tag()) == (b"hello", (b.rank - 1) % b.world_size, 32_767)


# Starting


def launch(launcher: str, size: int) -> Launch:
    return Launch(launcher, 0, size, 0, size, "THE_VARIABLE")


def test_ranks_without_a_rendezvous_get_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sx.errors.NotInitializedError, match="MASTER_ADDR"):
        rendezvous.by_launcher(launch("slurm", 2), 1.0)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sx.errors.NotInitializedError, match="MASTER_ADDR"):
        rendezvous.by_launcher(launch("torchrun", 2), 1.0)


def test_a_world_of_one_can_be_made_again_and_again() -> None:
    for _ in range(2):
        bootstrap = rendezvous.by_launcher(launch("none", 1), 1.0)
        assert bootstrap.all_gather_bytes(b"x", wait()) == [b"x"]
        assert bootstrap.transport(5.0).all_gather_bytes(b"y", wait()) == [b"y"]


def starts_gloo(path: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = torch_groups.start("gloo", dist.FileStore(path, size), rank, size, 10.0)
    b = over_group(group, 10.0).transport(10.0)
    assert b.all_gather_bytes(bytes([rank]), wait()) == [b"\0", b"\1"]
    dist.destroy_process_group()


def test_torchs_default_group_starts_on_a_store(tmp_path: Any) -> None:
    run_ranks(starts_gloo, 2, backend="processes", args=(str(tmp_path / "store"),))


def test_nccl_without_a_gpu_names_what_is_missing() -> None:
    with pytest.raises((sx.errors.MissingExtraError, sx.errors.UnsupportedError), match="NCCL"):
        torch_groups.start("nccl", dist.HashStore(), 0, 1, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nccl_is_correct_on_one_gpu() -> None:
    group = torch_groups.start("nccl", dist.HashStore(), 0, 1, 30.0)
    b = NCCLBackend(group, over_group(group, 10.0))
    try:
        assert b.all_gather_bytes(b"x", wait()) == [b"x"]
        for op, dtype in cells(b):
            tensor = values(dtype, 1000, 0, op).cuda()
            before = tensor.clone()
            b.all_reduce(tensor, op, Finish(), wait())
            b.reduce(tensor, op, 0, Finish(), wait())
            into = torch.empty_like(tensor)
            b.reduce_scatter(tensor, into, op, Finish(), wait())
            assert equal_values(into, before)
        data = torch.arange(100, dtype=torch.uint8, device="cuda")
        for move in (
            lambda into: b.all_gather(data, into, wait()),
            lambda into: b.all_to_all(data, [100], into, [100], wait()),
        ):
            into = torch.zeros_like(data)
            move(into)
            assert torch.equal(into, data)
        b.broadcast(data, 0, wait())
        assert b.empty(10, wait()).is_cuda
    finally:
        dist.destroy_process_group()


def test_timeouts_of_torch_are_longer_than_ours() -> None:
    assert torch_groups.torch_timeout(Wait(3, "a test")) == timedelta(seconds=4)
    assert torch_groups.torch_timeout(Wait(INF, "a test")) == timedelta(days=1)


def test_dropped_memory_of_empty_is_released_before_more_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job could not replace a tensor that needs more than half of what its memory limit leaves."""
    open_memory: list[int] = []

    def count_open_memory(_nbytes: int) -> None:
        open_memory.append(sum("/memfd:" in str(link) for link in links_of_descriptors()))

    def replaces() -> None:
        comm = sx.get_communicator()
        first: torch.Tensor | None = comm.empty((1 << 20,), torch.uint8)
        assert first is not None
        del first
        comm.barrier()
        comm.empty((1 << 20,), torch.uint8)

    monkeypatch.setattr(shared_memory, "_check_room", count_open_memory)
    run_ranks(replaces, 2)
    first_call, second_call = open_memory[-4:-2], open_memory[-2:]
    # Of two ranks the later one sees what the earlier one has made already: a descriptor, and that of its mapping.
    assert max(second_call) <= min(first_call) + 2


def links_of_descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{name}")
