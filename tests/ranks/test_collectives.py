"""The conformance suite, run over every backend of this package and over one that a user could write."""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import require_mpi
from shared_names import no_names_left
from starting import LAUNCHED_AS, start
from sweeps import by_default, slow

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.backends.backend import Backend
from statexchange.comm.wait import Wait
from statexchange.errors import MismatchError
from statexchange.testing import conformance, run_ranks

WORLDS = [
    (backend, world_size)
    for backend in LAUNCHED_AS
    for world_size in (1, 2, 3, 4)
    if backend != "hierarchical" or world_size > 2  # its two hosts have three ranks or more
]
BY_DEFAULT = [("threads", 1), *((backend, 2) for backend in LAUNCHED_AS if backend != "hierarchical")]
NAMES = [check.name for check in conformance.CHECKS]
LIMIT_S = 120.0


def conforms(backend: str, directory: str) -> list[Any]:
    comm = start(backend, directory)
    return [comm.backend, conformance.run(comm)]


@pytest.mark.parametrize(("backend", "world_size"), by_default(WORLDS, *map(WORLDS.index, BY_DEFAULT)))
def test_a_backend_passes_the_suite(backend: str, world_size: int, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    args = (backend, str(tmp_path))
    with no_names_left():
        found = run_ranks(
            conforms, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=LIMIT_S, reuse=backend == "mpi"
        )
    expected = [check.name for check in conformance.CHECKS if check.least_ranks <= world_size]
    assert found == [["single" if world_size == 1 else backend, expected]] * world_size


def has_unordered_local_ranks(directory: str) -> list[Any]:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str([1, 0, 0][rank])  # on hosts a, b and a, as Open MPI may number them
    comm = start("hierarchical", directory)
    conformance.run(comm, ["node_and_leaders_match_the_hosts"])
    return [comm.local_rank, None if comm.leaders is None else comm.leaders.all_gather_object(rank)]


def test_local_ranks_need_not_be_in_rank_order(tmp_path: Path) -> None:
    found = run_ranks(has_unordered_local_ranks, 3, backend="processes", args=(str(tmp_path),))
    assert found == [[1, None], [0, [2, 1]], [0, [2, 1]]]


def conforms_without_hierarchy(directory: str) -> list[Any]:
    whole = start("hierarchical", directory)
    flat = whole.flat
    assert [flat.flat is flat, whole.flat is flat, flat.num_nodes] == [True, True, 2]
    with pytest.raises(MismatchError, match=r"different calls.*, flat"):
        (flat if whole.rank else whole).all_reduce(torch.ones(3))
    first, second = torch.ones(3), torch.ones(3)
    works = [whole.all_reduce(first, async_op=True), flat.all_reduce(second, async_op=True)]
    for work in works:
        work.wait()
    assert first.tolist() == second.tolist() == [3.0] * 3
    found = [flat.backend, conformance.run(flat), whole.backend]
    whole.close()
    assert flat.is_closed
    return found


@pytest.mark.slow
def test_a_flat_communicator_of_several_hosts_passes_the_suite(tmp_path: Path) -> None:
    expected = [check.name for check in conformance.CHECKS if check.least_ranks <= 3]
    found = run_ranks(conforms_without_hierarchy, 3, backend="processes", args=(str(tmp_path),), timeout_s=LIMIT_S)
    assert found == [["gloo", expected, "hierarchical"]] * 3


# A backend with only the four methods that must be implemented


class SharedMessages:
    """Messages that threads leave for each other: parts of gathers, and what one rank has sent to another."""

    def __init__(self) -> None:
        self.parts: dict[Any, bytes] = {}
        self.sent: defaultdict[Any, list[bytes]] = defaultdict(list)


class ToyBackend(Backend):
    """Ranks that are threads, and pass bytes through one shared object."""

    name = "toy"

    def __init__(self, messages: SharedMessages, group: tuple[int, ...], rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._messages = messages
        self._group = group
        self._num_gathers = 0
        self._num_groups: Counter[Any] = Counter()

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        self._num_gathers += 1
        parts = self._messages.parts
        parts[self._group, self._num_gathers, self.rank] = payload
        keys = [(self._group, self._num_gathers, rank) for rank in range(self.world_size)]
        wait.until(lambda: all(key in parts for key in keys))
        parts.pop((self._group, self._num_gathers - 1, self.rank), None)  # all ranks have read it
        return [parts[key] for key in keys]

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        self._num_groups[tuple(ranks)] += 1
        group = (*self._group, -self._num_groups[tuple(ranks)], *ranks)
        return ToyBackend(self._messages, group, list(ranks).index(self.rank), len(ranks))

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        self._messages.sent[self._group, self.rank, dst, tag].append(bytes(data.numpy().data))

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        sent = self._messages.sent[self._group, src, self.rank, tag]
        wait.until(lambda: sent)
        message = sent.pop(0)
        if message:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))


@pytest.mark.parametrize("sees_memory", [slow(True), False], ids=["one host", "hosts apart"])
@pytest.mark.parametrize("world_size", [slow(1), 2, slow(3)])
def test_a_backend_of_four_methods_passes_the_suite(
    world_size: int, sees_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "hosts apart" there is no control page either: every message goes over the backend."""
    if not sees_memory:
        monkeypatch.setattr(bootstrap, "open_control_page", lambda *_: None)
    messages = SharedMessages()

    def run_suite() -> list[str]:
        comm = conformance.communicator_of(ToyBackend(messages, (), sx.get_rank(), world_size))
        try:
            return conformance.run(comm)
        finally:
            comm.close()

    for names in run_ranks(run_suite, world_size, timeout_s=LIMIT_S):
        assert names == [check.name for check in conformance.CHECKS if check.least_ranks <= world_size]
    assert world_size == 1 or len(messages.parts) <= 16 * world_size  # parts that all ranks have read are removed


class LossyBackend(ToyBackend):
    """A backend that drops the last rank's part of long sums."""

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Any, wait: Wait) -> None:
        lost = tensor.clone() if self.rank < self.world_size - 1 or tensor.numel() < 50_000 else tensor * 0
        super().all_reduce(lost, op, finish, wait)
        tensor.copy_(lost)


class FirstRankBackend(ToyBackend):
    """A backend whose all_gather returns the first rank's bytes for every rank."""

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        super().all_gather(data, into, wait)
        into.view(self.world_size, -1)[1:] = into.view(self.world_size, -1)[0].clone()


@pytest.mark.parametrize(
    ("kind", "name", "seen"),
    [
        (
            LossyBackend,
            "reductions_are_correct_at_every_size",
            r"rank 0 on .* failed in .*all_reduce of torch.float32\[\d+\]",
        ),
        (FirstRankBackend, "moves_keep_every_bit_at_every_size", r"rank \d on .* failed in .*part 1 of all_gather"),
    ],
)
def test_the_suite_reports_a_wrong_backend_on_every_rank(kind: Any, name: str, seen: str) -> None:
    messages = SharedMessages()

    def fails() -> str:
        comm = conformance.communicator_of(kind(messages, (), sx.get_rank(), 2))
        with pytest.raises(AssertionError, match=seen) as caught:
            conformance.run(comm, [name])
        assert name in str(caught.value)
        return str(caught.value)

    first, second = run_ranks(fails, 2)
    assert first == second


def test_checks_have_unique_names_and_contracts_and_can_be_selected() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(check.contract.endswith(".") for check in conformance.CHECKS)
    comm = sx.get_communicator()
    assert conformance.run(comm, NAMES[:2]) == NAMES[:2]
    assert conformance.run(comm, ["ranks_in_different_calls_all_raise_promptly"]) == []  # it needs two ranks
    with pytest.raises(ValueError, match="no check is called nonsense"):
        conformance.run(comm, ["nonsense"])


def waits_for_a_message_of_a_failed_rank(backend: str, directory: str) -> list[Any]:
    """Rank 0 receives from rank 2, and rank 1 sends to it asynchronously, when it fails in a phase of its own."""
    comm = start(backend, directory)
    comm.barrier()
    with pytest.raises(sx.errors.PeerError) as caught:
        if comm.rank == 0:
            comm.recv(torch.zeros(3), 2)
        elif comm.rank == 1:
            comm.send(torch.zeros(70_001), 2, async_op=True).wait()
        else:
            time.sleep(0.3)
            with comm.phase("cooking"):
                raise KeyError("salt")
    # A message may have been sent in part, so no later call may run.
    with pytest.raises(sx.errors.PeerError, match="salt"):
        comm.barrier()
    return [str(caught.value), caught.value.host == comm.hosts[2]]


@pytest.mark.parametrize("backend", [slow(backend) if backend == "mpi" else backend for backend in LAUNCHED_AS])
def test_a_failure_reaches_ranks_that_wait_for_a_message(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    found = run_ranks(
        waits_for_a_message_of_a_failed_rank, 3, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path))
    )
    for message, names_host in found:
        assert re.fullmatch(r"rank 2 on \S+ failed in cooking: KeyError: 'salt'", message)
        assert names_host


def fails_with_work_in_flight(backend: str, directory: str) -> None:
    """Rank 0 gives an error to `agree` while its asynchronous work waits for rank 1, which waits for a message."""
    comm = start(backend, directory)
    comm.barrier()
    work = comm.all_reduce(torch.ones(4), async_op=True) if comm.rank == 0 else None
    with pytest.raises(sx.errors.PeerError, match=r"rank 0 .*boom"):
        if comm.rank == 0:
            time.sleep(0.3)
            comm.agree(ValueError("boom"))
        else:
            comm.recv(torch.zeros(3), 0)
    assert work is None or work.is_completed()
    with pytest.raises(sx.errors.PeerError, match="boom"):
        comm.barrier()


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo", slow("mpi")])
def test_a_failure_reaches_ranks_with_work_in_flight(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    run_ranks(fails_with_work_in_flight, 2, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path)))


def agrees_twice() -> None:
    """Raise an error of an earlier agreement again in a later block: it is a failure like any other."""
    comm = sx.get_communicator()
    with pytest.raises(sx.errors.PeerError) as caught, comm.phase("first"):
        if comm.rank == 1:
            raise ValueError("old")
    comm.barrier()
    with pytest.raises(sx.errors.PeerError, match="old"), comm.phase("second"):
        if comm.rank == 0:
            raise caught.value
    comm.barrier()


def test_an_old_error_can_be_raised_in_a_later_agreement() -> None:
    run_ranks(agrees_twice, 2)


def test_an_interrupt_leaves_a_world_of_one_usable() -> None:
    comm = sx.init("single")
    try:
        with pytest.raises(KeyboardInterrupt), comm.phase("working"):
            raise KeyboardInterrupt
        comm.barrier()
        assert comm.all_reduce(torch.ones(1)) == 1
    finally:
        sx.shutdown()
