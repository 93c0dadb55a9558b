"""Checks of objects, barriers, agreement and groups."""

from __future__ import annotations

import os
import shutil
import tempfile
import time

import torch

from conformance.checking import check, expect_all, expect_it_still_works, least_ranks, raised, roots
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, PeerError


@check
def objects_arrive_unchanged(comm: Communicator) -> None:
    """Objects arrive equal: JSON values with tuples, NaN, integer keys and long text, from any root and to any root."""
    n = comm.world_size
    theirs = [{"rank": rank, 3: (1, None, "x" * 5000 * rank), "nested": [[rank], {}]} for rank in range(n)]
    assert comm.all_gather_object(theirs[comm.rank]) == theirs, "all_gather_object"
    for root in roots(comm):
        found = comm.gather_object(theirs[comm.rank], root=root)
        assert found == (theirs if comm.rank == root else []), f"gather_object on {root}"
        received = comm.broadcast_object(theirs[root] if comm.rank == root else None, root=root)
        assert received == theirs[root], f"broadcast_object from {root}"
    nan = comm.broadcast_object(float("nan") if comm.rank == 0 else 0.0)
    assert nan != nan, f"NaN arrived as {nan}"
    raised(InvalidArgumentError, "an absent root", comm.gather_object, 1, root=n)


@check
def a_barrier_waits_for_all_ranks(comm: Communicator) -> None:
    """Files that ranks create before a barrier exist after it; if ranks remove them, they are gone after the next."""
    node = comm.node
    directory = node.broadcast_object(tempfile.mkdtemp() if node.rank == 0 else None)
    try:
        time.sleep(0.02 * comm.rank)
        ours = os.path.join(directory, str(node.rank))
        open(ours, "w").close()
        comm.barrier()
        found = sorted(os.listdir(directory))
        assert found == sorted(str(rank) for rank in range(node.world_size)), f"after the first barrier: {found}"
        comm.barrier(tag="all have looked")
        os.unlink(ours)
        comm.barrier(20.0)
        assert not os.listdir(directory), f"after the last barrier: {os.listdir(directory)}"
        comm.barrier()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@check
def agree_raises_the_error_of_one_rank_on_all(comm: Communicator) -> None:
    """`agree` raises the error of one rank on all: a StateExchangeError as it is, any other in a PeerError.

    Ranks in another call raise it, too.
    """
    last = comm.world_size - 1
    assert comm.agree(note=comm.rank) == list(range(comm.world_size)), "agree must return all notes"
    ours = MismatchError("salt", rank=last) if comm.rank == last else None
    error = raised(MismatchError, "agree with an error of ours", comm.agree, ours)
    assert "salt" in str(error), f"the message was lost: {error}"
    if comm.world_size > 1:
        foreign = KeyError("pepper") if comm.rank == last else None
        error = raised(PeerError, "agree with a KeyError", comm.agree, foreign, phase="cooking")
        assert all(word in str(error) for word in ("pepper", f"rank {last}")), f"rank or cause are missing: {error}"
        act, argument = (comm.agree, ValueError("sugar")) if comm.rank == last else (comm.all_reduce, torch.ones(9))
        error = raised(PeerError, "a failure while others are in a collective", act, argument)
        assert "sugar" in str(error), f"the cause is missing: {error}"
    expect_it_still_works(comm)


# Tensors from `empty`


@check
def groups_are_communicators_of_their_ranks(comm: Communicator) -> None:
    """`new_group` numbers its ranks in the given order, is called by them alone, and returns one object for one list.

    Wrong ranks raise InvalidArgumentError.
    """
    n = comm.world_size
    backwards = comm.new_group(list(reversed(range(n))))
    assert (backwards.rank, backwards.world_size) == (n - 1 - comm.rank, n), f"ranks of {backwards}"
    assert backwards.all_gather_object(comm.rank) == list(reversed(range(n))), "objects in the order of the group"
    found = backwards.broadcast(torch.full((3,), float(comm.rank)))
    expect_all(found, n - 1, "rank 0 of the reversed group is the last")
    assert comm.new_group(list(reversed(range(n)))) is backwards, "a group must be made once"
    if comm.rank < max(n - 1, 1):
        some = comm.new_group(list(range(max(n - 1, 1))))
        expect_all(some.all_reduce(torch.ones(70_001)), some.world_size, "a sum over some ranks")
    for ranks in ([], [0, 0], [n], [comm.rank, n + 1], [(comm.rank + 1) % n] if n > 1 else [1]):
        raised(InvalidArgumentError, f"new_group({ranks})", comm.new_group, ranks)
    comm.barrier()


@least_ranks(3)
def new_group_with_different_orders_is_a_mismatch(comm: Communicator) -> None:
    """Ranks that call `new_group` with the same ranks in different orders all raise MismatchError."""
    for n in {comm.world_size, comm.world_size - 1} - {2}:
        if comm.rank < n:
            orders = [[*range(1, n), 0], [n - 1, *range(n - 1)]]
            error = raised(MismatchError, f"two orders of {n} ranks", comm.new_group, orders[comm.rank == 0])
            assert all(f"new_group({order})" in str(error) for order in orders), f"an order is missing: {error}"
            expect_all(comm.new_group(orders[0]).all_reduce(torch.ones(3)), n, f"a sum over {n} ranks")
    expect_it_still_works(comm)


@check
def split_puts_ranks_of_one_color_together(comm: Communicator) -> None:
    """`split` orders the ranks of one color by key, then rank; a rank that passes None gets None."""
    n = comm.world_size
    part = comm.split(comm.rank % 2, key=-comm.rank)
    expected = [rank for rank in reversed(range(n)) if rank % 2 == comm.rank % 2]
    assert part is not None, "a color must give a group"
    assert part.all_gather_object(comm.rank) == expected, "ranks of one color, backwards"
    alone = comm.split(None if comm.rank else 7)
    assert (alone is None) == (comm.rank > 0), "None must give None"
    if alone is not None:
        assert (alone.world_size, alone.rank) == (1, 0), "one rank is a world of one"
        expect_all(alone.all_reduce(torch.ones(3)), 1.0, "a sum over one rank")


@check
def node_and_leaders_match_the_hosts(comm: Communicator) -> None:
    """`node` holds the ranks of this host by local rank, `leaders` the local ranks 0 of all hosts by node rank."""
    n, node, leaders = comm.world_size, comm.node, comm.leaders
    assert (node.rank, node.world_size) == (comm.local_rank, comm.local_world_size), f"ranks of {node}"
    assert (leaders is None) == (comm.local_rank > 0), "leaders are the first ranks of their hosts"
    places = comm.all_gather_object([comm.node_rank, comm.local_rank, comm.hosts[comm.rank]])
    assert len({place[0] for place in places}) == comm.num_nodes, f"hosts: {places}"
    by_node = sorted(range(n), key=lambda rank: places[rank][:2])  # need not be rank order
    assert node.all_gather_object(comm.rank) == [r for r in by_node if places[r][0] == comm.node_rank], "node"
    if leaders is not None:
        assert (leaders.rank, leaders.world_size) == (comm.node_rank, comm.num_nodes), f"ranks of {leaders}"
        assert leaders.all_gather_object(comm.rank) == [r for r in by_node if places[r][1] == 0], "leaders"
    assert comm.device.type in ("cpu", "cuda"), f"device {comm.device}"
    assert len(set(comm.all_gather_object(comm.run))) == 1, "a run has one identity"


# Ranks in different calls
