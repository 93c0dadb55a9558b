"""Checks of the collectives that move data, and of messages between two ranks."""

from __future__ import annotations

import torch

from conformance.checking import (
    UNTOUCHED,
    WINDOW_BYTES,
    Act,
    check,
    edge_sizes,
    expect_all,
    expect_it_still_works,
    expect_same,
    expect_sites,
    least_ranks,
    noise,
    pattern,
    raised,
    roots,
)
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError


@check
def moves_keep_every_bit_at_every_size(comm: Communicator) -> None:
    """broadcast, all_gather, gather, scatter and all_to_all keep every bit, at sizes on both sides of limits."""
    cells = [(torch.float32, n) for n in edge_sizes(4)] + [(torch.uint8, WINDOW_BYTES + 1)]
    for i, (dtype, n) in enumerate(cells):
        theirs = [noise(rank, n, dtype) for rank in range(comm.world_size)]
        moves_with_root(comm, theirs, roots(comm)[i % len(roots(comm))])
        for rank, part in enumerate(comm.all_gather(theirs[comm.rank])):
            expect_same(part, theirs[rank], f"part {rank} of all_gather of {dtype}[{n}]")
        for rank, part in enumerate(comm.all_to_all([part[comm.rank :] for part in theirs])):
            expect_same(part, theirs[comm.rank][rank:], f"part {rank} of all_to_all of {dtype}[{n}]")


def moves_with_root(comm: Communicator, theirs: list[torch.Tensor], root: int) -> None:
    what, ours = f"{theirs[0].dtype}[{len(theirs[0])}] with root {root}", comm.rank == root
    target = theirs[root].clone() if ours else torch.zeros_like(theirs[0])
    expect_same(comm.broadcast(target, root=root), theirs[root], f"broadcast of {what}")
    parts = comm.gather(theirs[comm.rank], root=root)
    assert len(parts) == (comm.world_size if ours else 0), f"gather of {what} gave {len(parts)} parts"
    for rank, part in enumerate(parts):
        expect_same(part, theirs[rank], f"part {rank} of gather of {what}")
    part = comm.scatter(theirs if ours else None, root=root)
    expect_same(part, theirs[comm.rank], f"scatter of {what}")


@check
def parts_may_differ_in_shape_and_dtype(comm: Communicator) -> None:
    """Tensors that scatter and all_to_all deliver have the shape and dtype that they had on the sender."""
    n, dtypes = comm.world_size, (torch.float64, torch.uint8, torch.bool, torch.bfloat16)

    def part(src: int, dst: int) -> torch.Tensor:
        shape = (src, dst + 1, 3) if (src + dst) % 3 else (src + 1, 150_001)
        return noise(src * n + dst, torch.Size(shape).numel(), dtypes[(src + dst) % 4]).view(shape)

    for root in roots(comm):
        tensors = [part(root, dst) for dst in range(n)] if comm.rank == root else None
        expect_same(comm.scatter(tensors, root=root), part(root, comm.rank), f"scatter from {root}")
    found = comm.all_to_all([part(comm.rank, dst) for dst in range(n)])
    for src, ours in enumerate(found):
        expect_same(ours, part(src, comm.rank), f"the tensor that all_to_all delivered from {src}")


@check
def results_share_no_memory_with_arguments(comm: Communicator) -> None:
    """all_gather, gather, scatter, reduce_scatter and all_to_all return new memory, and leave their arguments alone."""
    ours = pattern(comm.rank, (comm.world_size, 3))
    results = [*comm.all_gather(ours), *comm.gather(ours), comm.reduce_scatter(ours)]
    results += [comm.scatter([ours] * comm.world_size), *comm.all_to_all([ours] * comm.world_size)]
    for result in results:
        result.fill_(UNTOUCHED)
    expect_same(ours, pattern(comm.rank, (comm.world_size, 3)), "an argument, after the results were overwritten")


# Point to point


@least_ranks(2)
def messages_arrive_in_order(comm: Communicator) -> None:
    """Tensors sent round a ring arrive in order, at every size, asynchronously or not; recv returns its tensor."""
    following, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    sizes = edge_sizes(4)
    works = [comm.send(noise(comm.rank, n, torch.float32), following, async_op=True) for n in sizes]
    for n in sizes:
        into = torch.zeros(n)
        assert comm.recv(into, before) is into, "recv must return its tensor"
        expect_same(into, noise(before, n, torch.float32), f"float32[{n}] from rank {before}")
    for work in works:
        work.wait()
    targets = [torch.zeros(5) for _ in range(3)]
    receives = [comm.recv(target, before, async_op=True) for target in targets]
    for i in range(3):
        comm.send(torch.full((5,), 10.0 * comm.rank + i), following)
    for i, receive in enumerate(receives):
        expect_all(receive.wait(), 10.0 * before + i, f"message {i} of three from rank {before}")


@least_ranks(2)
def send_and_recv_must_agree_on_shape_and_dtype(comm: Communicator) -> None:
    """A send and a recv that differ in shape or dtype raise MismatchError on both ranks, with both lines of code.

    The communicator works afterwards.
    """
    pairs: list[tuple[Act, Act]] = [
        (lambda c: c.send(torch.ones(3), 1), lambda c: c.recv(torch.ones(4), 0)),
        (lambda c: c.send(torch.ones(3), 1), lambda c: c.recv(torch.ones(3).double(), 0)),
        (lambda c: c.send(torch.ones(9**6), 1), lambda c: c.recv(torch.ones(3), 0)),
    ]
    for send, recv in pairs:
        if comm.rank < 2:
            act = (send, recv)[comm.rank]
            error = raised(MismatchError, "send and recv that differ", act, comm)
            expect_sites(error, send, recv)
    expect_it_still_works(comm)


@check
def send_and_recv_refuse_ranks_that_are_no_peers(comm: Communicator) -> None:
    """Sending to, or receiving from, itself or an absent rank raises InvalidArgumentError on the calling rank only."""
    for peer in (comm.rank, comm.world_size, -1):
        raised(InvalidArgumentError, f"send to {peer}", comm.send, torch.ones(3), peer)
        raised(InvalidArgumentError, f"recv from {peer}", comm.recv, torch.ones(3), peer)
    comm.barrier()


# Layouts
