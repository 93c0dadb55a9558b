"""Ranks on two hosts: collectives through the leaders, and faults that all ranks of both hosts report."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import conformance
import pytest
import torch
from sweeps import by_default, slow
from two_hosts import NAMES, Outcome, TwoHosts, init_on_two_hosts, report, seen_here, two_hosts, wait_for_go

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.failure.monitor import UNWATCHED

TIMEOUT_S = 3.0
Act = Callable[[sx.comm.Communicator], Any]


# The hosts themselves


def test_hosts_are_separate_and_leave_nothing() -> None:
    before = os.listdir("/proc/self/ns"), sorted(os.listdir("/sys/class/net")), os.stat("/dev/shm").st_dev
    with two_hosts(1, 2) as hosts:
        seen = hosts.run(seen_here)
        assert [name for _, name, _, _ in seen] == ["anna", "bert", "bert"]
        devices = [device for _, _, device, _ in seen]
        assert devices[1] == devices[2]
        assert len({*devices, before[2]}) == 3
        assert all(cards == ["cable0", "lo"] for _, _, _, cards in seen)
        holders = [host.process for host in hosts._hosts]
    assert all(holder.poll() is not None for holder in holders)
    after = os.listdir("/proc/self/ns"), sorted(os.listdir("/sys/class/net")), os.stat("/dev/shm").st_dev
    assert after == before


# What is computed


def passes_the_suite() -> str:
    comm = init_on_two_hosts()
    conformance.run(comm)
    sx.shutdown()
    return comm.backend


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 2), (1, 3)], ids=str)
def test_the_conformance_suite_passes(counts: tuple[int, int]) -> None:
    with two_hosts(*counts) as hosts:
        assert hosts.run(passes_the_suite, timeout_s=150) == ["hierarchical"] * 4


def reduces_and_moves() -> list[Any]:
    """Check collectives of all ranks; return where this rank is, results of its host and leaders, and all hosts."""
    comm = init_on_two_hosts()
    n = comm.world_size
    values = comm.rank * 1e4 + torch.arange(70_000) % 7
    found = comm.all_reduce(values.clone(), "avg")
    parts = torch.stack([rank * 1e4 + torch.arange(70_000) % 7 for rank in range(n)])
    assert torch.allclose(found, parts.mean(0))
    halves = torch.full((1000,), 40_000.0, dtype=torch.float16)  # two of these roots are out of range
    assert comm.all_reduce(halves, "avg").eq(40_000).all()
    shared = comm.empty((300_000,), torch.float32).fill_(comm.rank + 1.0)
    assert comm.all_reduce(shared).eq(n * (n + 1) / 2).all()
    for root in range(n):
        for size in (3, 300_000):
            ours = torch.full((size,), comm.rank + 1)
            comm.reduce(ours, root=root)
            assert ours.eq(n * (n + 1) // 2 if comm.rank == root else comm.rank + 1).all()
            assert comm.broadcast(torch.full((size,), comm.rank), root=root).eq(root).all()
    for size in (1, 5, 300_001):
        gathered = comm.all_gather(torch.full((size,), comm.rank))
        assert len(gathered) == n
        assert all(torch.equal(part, torch.full((size,), r)) for r, part in enumerate(gathered))
    node, leaders = comm.node, comm.leaders
    on_node = node.all_reduce(torch.ones(3)).tolist() if node.world_size > 1 else [1.0] * 3
    between = leaders.all_gather_object(comm.rank) if leaders is not None else None
    where = [comm.node_rank, comm.local_rank, comm.local_world_size, node.backend]
    comm.barrier()
    sx.shutdown()
    return [where, on_node, between, list(comm.hosts)]


@pytest.mark.parametrize("counts", [slow((2, 2)), slow((1, 3)), (2, 1)], ids=str)
def test_sums_and_averages_are_over_ranks_not_hosts(counts: tuple[int, int]) -> None:
    n = sum(counts)
    with two_hosts(*counts, fully=True) as hosts:
        for rank, (where, on_node, between, names) in enumerate(hosts.run(reduces_and_moves)):
            node = int(rank >= counts[0])
            local = rank - node * counts[0]
            assert where == [node, local, counts[node], "shm" if counts[node] > 1 else "single"]
            assert on_node == [counts[node]] * 3
            assert between == ([0, counts[0]] if local == 0 else None)
            assert names == [NAMES[r >= counts[0]] for r in range(n)]


# Faults

CALLS = ("big all_reduce", "barrier", "broadcast")


def call(comm: sx.comm.Communicator, verb: str) -> Any:
    if verb == "all_reduce":
        return comm.all_reduce(torch.ones(100))
    if verb == "big all_reduce":
        return comm.all_reduce(torch.ones(4 << 20))
    if verb == "broadcast":
        return comm.broadcast(torch.ones(1 << 18), root=1)
    return comm.barrier() if verb == "barrier" else comm.all_gather_object(comm.rank)


def error_of(comm: sx.comm.Communicator, verb: str) -> sx.StateExchangeError | None:
    try:
        call(comm, verb)
    except sx.StateExchangeError as error:
        return error
    return None


def caught(comm: sx.comm.Communicator, verb: str) -> list[Any]:
    """Return the error that the call raised and the time; check that the next call raises the same."""
    error = error_of(comm, verb)
    when = time.monotonic()
    assert error is not None, f"{verb} came to an end"
    assert str(error_of(comm, "barrier")) == str(error)
    about = [getattr(error, name, None) for name in ("rank", "host", "missing")]
    return [when, type(error).__name__, *about, str(error)]


def wait_for_victim(victim: int, verb: str, how: str = "", timeout_s: float = 30.0) -> Any:
    """Wait in a collective for `victim`, on all other ranks."""
    comm = init_on_two_hosts()
    call(comm, verb)
    comm.barrier()
    comm._session.timeout_s = timeout_s
    report("in")
    if comm.rank != victim:
        return caught(comm, verb)
    time.sleep(0.5)
    if how == "raises":
        raise ValueError("no more")
    if how == "leaves":
        sx.shutdown()
        return None
    if how == "exits":
        sys.exit(3)
    if how == "ends":
        os._exit(4)
    time.sleep(60)
    return None


def call_endlessly(timeout_s: float = 30.0) -> Any:
    """Call collectives without end on all ranks, until one raises."""
    comm = init_on_two_hosts()
    comm.barrier()
    comm._session.timeout_s = timeout_s
    report("in")
    while error_of(comm, "big all_reduce") is None:
        pass
    return caught(comm, "barrier")


def call_on_go(verb: str, timeout_s: float) -> Any:
    """Call a collective on all ranks as soon as the test calls `go`."""
    comm = init_on_two_hosts()
    call(comm, verb)
    comm._session.timeout_s = timeout_s
    report("in")
    wait_for_go()
    return caught(comm, verb)


def others(outcomes: Sequence[Outcome], hosts: TwoHosts, victim: int) -> list[Outcome]:
    """Return the outcomes of all ranks but `victim` (-1: of all), which must have ended as they should."""
    found = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(o.state == "ok" and o.exit_code == 0 for o in found), hosts.describe(outcomes)
    return found


def expect_named(outcomes: Sequence[Outcome], hosts: TwoHosts, victim: int, since: float) -> None:
    """Check that all other ranks have raised a PeerError that names `victim` and its host."""
    for outcome in others(outcomes, hosts, victim):
        when, kind, rank, host, _, text = outcome.value
        print(f"rank {outcome.rank} after {when - since:.2f} s: {text}")
        assert kind == "PeerError", text
        assert rank == victim, text
        assert host == hosts.host_of(victim), text


@pytest.mark.parametrize(
    ("counts", "victim", "verb"),
    [
        slow((2, 2), 3, "all_reduce"),
        slow((2, 2), 3, "big all_reduce"),
        slow((2, 2), 2, "barrier"),
        slow((2, 2), 0, "all_reduce"),
        ((2, 2), 1, "broadcast"),
        ((2, 1), 2, "all_reduce"),
        slow((2, 1), 2, "all_gather_object"),
        slow((1, 2), 0, "big all_reduce"),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_killed_rank_is_named_by_ranks_that_wait_for_it(counts: tuple[int, int], victim: int, verb: str) -> None:
    with two_hosts(*counts) as hosts:
        hosts.start(wait_for_victim, victim, verb)
        hosts.wait_for("in")
        time.sleep(0.3)
        killed = hosts.kill(victim)
        expect_named(hosts.finish(15), hosts, victim, killed)


@pytest.mark.parametrize(
    ("counts", "victim"), [slow((2, 2), 3), slow((2, 2), 2), slow((2, 2), 0), ((2, 1), 2)], ids=str
)
def test_a_rank_killed_during_collectives_is_named(counts: tuple[int, int], victim: int) -> None:
    with two_hosts(*counts) as hosts:
        hosts.start(call_endlessly)
        hosts.wait_for("in")
        time.sleep(0.3)
        killed = hosts.kill(victim)
        expect_named(hosts.finish(15), hosts, victim, killed)


@pytest.mark.parametrize(("how", "code"), [("raises", 1), slow("leaves", 0), slow("exits", 3), slow("ends", 4)])
def test_a_rank_that_exits_is_named(how: str, code: int) -> None:
    with two_hosts(2, 1) as hosts:
        hosts.start(wait_for_victim, 2, "all_reduce", how)
        since = hosts.wait_for("in") + 0.5
        outcomes = hosts.finish(15)
        assert outcomes[2].exit_code == code, hosts.describe(outcomes)
        expect_named(outcomes, hosts, 2, since)
        if how == "raises":
            assert all("ValueError: no more" in outcome.value[-1] for outcome in others(outcomes, hosts, 2))


def expect_missing(outcomes: Sequence[Outcome], gone: dict[int, tuple[int, ...]], since: float) -> None:
    """Check that each rank raised a StallError that names the ranks `gone` for it, or a PeerError for one of them."""
    for outcome in outcomes:
        when, kind, about, _, named, text = outcome.value
        absent = gone[outcome.rank]
        print(f"rank {outcome.rank} after {when - since:.2f} s: {text}")
        assert kind in ("StallError", "PeerError"), text
        assert about in absent if kind == "PeerError" else tuple(named) == absent, text


def far_from(hosts: TwoHosts) -> dict[int, tuple[int, ...]]:
    """Return for each rank the ranks of the other host."""
    ranks = range(hosts.world_size)
    return {rank: tuple(r for r in ranks if hosts.host_of(r) != hosts.host_of(rank)) for rank in ranks}


@pytest.mark.parametrize("verb", by_default(CALLS))
def test_a_host_that_is_cut_off_is_named_on_both_sides(verb: str) -> None:
    with two_hosts(2, 2) as hosts:
        hosts.start(call_on_go, verb, TIMEOUT_S)
        hosts.wait_for("in")
        hosts.link_down()
        since = hosts.go()
        expect_missing(others(hosts.finish(15), hosts, -1), far_from(hosts), since)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_ranks_that_have_raised_exit_normally(how: str) -> None:
    with two_hosts(2, 2, fully=True) as hosts:
        hosts.start(call_endlessly, TIMEOUT_S)
        hosts.wait_for("in")
        time.sleep(0.3)
        if how == "killed":
            hosts.kill(3)
        else:
            hosts.link_down()
        others(hosts.finish(60), hosts, 3 if how == "killed" else -1)


@pytest.mark.parametrize("counts", [slow((2, 2)), slow((1, 2))], ids=str)
def test_a_host_that_is_cut_off_during_collectives_is_named_on_both_sides(counts: tuple[int, int]) -> None:
    with two_hosts(*counts) as hosts:
        hosts.start(call_endlessly, TIMEOUT_S)
        hosts.wait_for("in")
        time.sleep(0.5)
        since = hosts.link_down()
        expect_missing(others(hosts.finish(15), hosts, -1), far_from(hosts), since)


@pytest.mark.slow
def test_a_short_interruption_of_the_cable_raises_no_error() -> None:
    with two_hosts(2, 2) as hosts:
        hosts.start(all_reduce_on_go)
        hosts.wait_for("in")
        hosts.link_down()
        hosts.go()
        time.sleep(2.5)
        hosts.link_up()
        assert [outcome.value for outcome in others(hosts.finish(20), hosts, -1)] == [6.0] * 4


def all_reduce_on_go() -> float:
    comm = init_on_two_hosts()
    comm.barrier()
    report("in")
    wait_for_go()
    found = comm.all_reduce(torch.full((3,), float(comm.rank)))
    sx.shutdown()
    return float(found[0])


@pytest.mark.parametrize(("counts", "victim"), [slow((2, 2), 3), slow((2, 2), 0), ((2, 1), 2)], ids=str)
def test_a_stopped_rank_is_named_at_the_deadline(counts: tuple[int, int], victim: int) -> None:
    with two_hosts(*counts) as hosts:
        hosts.start(wait_for_victim, victim, "all_reduce", "", TIMEOUT_S)
        hosts.wait_for("in")
        stopped = hosts.kill(victim, signal.SIGSTOP)
        outcomes = hosts.finish(15, stuck=victim)
        rest = others(outcomes, hosts, victim)
        expect_missing(rest, {o.rank: (victim,) for o in rest}, stopped)


DISAGREEMENTS: dict[str, tuple[Act, Act]] = {
    "shape": (lambda c: c.all_reduce(torch.ones(100)), lambda c: c.all_reduce(torch.ones(101))),
    "dtype": (lambda c: c.all_reduce(torch.ones(4 << 20)), lambda c: c.all_reduce(torch.ones(4 << 20).double())),
    "op": (lambda c: c.all_reduce(torch.ones(100)), lambda c: c.all_reduce(torch.ones(100), "max")),
    "root": (lambda c: c.broadcast(torch.ones(100)), lambda c: c.broadcast(torch.ones(100), root=2)),
    "call": (lambda c: c.all_gather(torch.ones(100)), lambda c: c.barrier()),
}


def disagree(odd: int) -> dict[str, Any]:
    comm = init_on_two_hosts()
    found: dict[str, Any] = {}
    for what, (call, other) in DISAGREEMENTS.items():
        for act in (call, other):  # so that neither call is the first of its kind
            act(comm)
        comm.barrier()
        begun = time.monotonic()
        with pytest.raises(sx.errors.MismatchError) as caught:
            (other if comm.rank == odd else call)(comm)
        found[what] = [time.monotonic() - begun, str(caught.value)]
        assert float(comm.all_reduce(torch.ones(1))[0]) == comm.world_size  # it still works
    sx.shutdown()
    return found


@pytest.mark.parametrize("counts", [slow((2, 2)), (1, 2)], ids=str)
def test_a_mismatch_is_raised_on_all_ranks_of_two_hosts(counts: tuple[int, int]) -> None:
    with two_hosts(*counts) as hosts:
        for rank, found in enumerate(hosts.run(disagree, sum(counts) - 1)):
            for what, (took, text) in found.items():
                print(f"rank {rank}, {what}, after {took:.3f} s: {text}")
                assert text.count("test_two_hosts.py:") == sum(counts), text


def wait_without_failure_detector(victim: int) -> Any:
    bootstrap.start_failure_detector = lambda *_: UNWATCHED
    return wait_for_victim(victim, "all_reduce", "", TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=str)
def test_without_a_failure_detector_the_deadline_still_holds(number: int) -> None:
    with two_hosts(2, 2) as hosts:
        hosts.start(wait_without_failure_detector, 3)
        hosts.wait_for("in")
        since = hosts.kill(3, number)
        for outcome in others(hosts.finish(15, stuck=3), hosts, 3):
            when, kind, *_, text = outcome.value
            print(f"rank {outcome.rank} after {when - since:.2f} s: {text}")
            assert kind in ("StallError", "PeerError"), text
