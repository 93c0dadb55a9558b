"""The conformance suite, run over every backend of this package and over one that a user could write."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conformance
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
from statexchange.testing import run_ranks

WORLDS = [
    (backend, world_size)
    for backend in LAUNCHED_AS
    for world_size in (1, 2, 3, 4)
    if backend != "hierarchical" or world_size > 2  # its two hosts have three ranks or more
]
BY_DEFAULT = [("threads", 1), *((backend, 2) for backend in LAUNCHED_AS if backend != "hierarchical")]
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
    assert found == [["single" if world_size == 1 else backend, conformance.names_for(world_size)]] * world_size


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
    found = run_ranks(conforms_without_hierarchy, 3, backend="processes", args=(str(tmp_path),), timeout_s=LIMIT_S)
    assert found == [["gloo", conformance.names_for(3), "hierarchical"]] * 3


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
        assert names == conformance.names_for(world_size)
    assert world_size == 1 or len(messages.parts) <= 16 * world_size  # parts that all ranks have read are removed


class LossyBackend(ToyBackend):
    """A backend that drops the last rank's part of long sums."""

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Any, wait: Wait) -> None:
        lost = tensor.clone() if self.rank < self.world_size - 1 or tensor.numel() < 50_000 else tensor * 0
        super().all_reduce(lost, op, finish, wait)
        tensor.copy_(lost)


class BlindBackend(ToyBackend):
    """A backend whose minima do not show a NaN."""

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Any, wait: Wait) -> None:
        super().all_reduce(tensor, op, finish, wait)
        if op == "min" and tensor.is_floating_point():
            tensor.nan_to_num_(0.0, posinf=float("inf"), neginf=-float("inf"))


class FirstRankBackend(ToyBackend):
    """A backend whose all_gather returns the first rank's bytes for every rank."""

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        super().all_gather(data, into, wait)
        into.view(self.world_size, -1)[1:] = into.view(self.world_size, -1)[0].clone()


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        pytest.param(LossyBackend, "reductions_are_correct_at_every_size", r"rank 0 .*all_reduce", id="lossy"),
        pytest.param(
            FirstRankBackend, "moves_keep_every_bit_at_every_size", r"rank \d .*part 1 of all_gather", id="first"
        ),
        pytest.param(
            BlindBackend, "every_operation_is_right_or_refused_on_every_dtype", r"rank \d .*min of .*nan", id="blind"
        ),
    ],
)
def test_the_suite_reports_a_wrong_backend_on_every_rank(kind: Any, name: str, words: str) -> None:
    messages = SharedMessages()

    def fails() -> str:
        comm = conformance.communicator_of(kind(messages, (), sx.get_rank(), 2))
        with pytest.raises(AssertionError, match=words) as caught:
            conformance.run(comm, [name])
        assert name in str(caught.value)
        return str(caught.value)

    first, second = run_ranks(fails, 2)
    assert first == second
