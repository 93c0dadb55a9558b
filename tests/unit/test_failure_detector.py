"""Failure detection between hosts: reported, dead, missing and departed ranks, and clean exits of processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import failure_detectors
import pytest
from failure_detectors import HOSTS, RANKS, detectors, failure_of, until

from statexchange.comm.failure import start
from statexchange.comm.failure.detector import FailureDetector
from statexchange.comm.failure.member import CoordinatorAddress, Member, connect_member
from statexchange.comm.failure.monitor import UNWATCHED, named_failure
from statexchange.comm.topology import Topology
from statexchange.errors import PeerError, StallError

SUPPORT = os.path.dirname(failure_detectors.__file__)


@pytest.mark.parametrize("reporter", range(RANKS))
def test_a_reported_failure_reaches_all_ranks_at_once(reporter: int) -> None:
    with detectors() as members:
        for detector in members:
            detector.check("a barrier")
        members[reporter].report_failure(StallError("ranks [2] did not come", missing=(2,), rank=2))
        errors = [failure_of(detector, 0.5) for detector in members]
        assert [type(error) for error in errors] == [StallError] * RANKS
        assert all(error.missing == (2,) for error in errors)  # type: ignore[union-attr]


@pytest.mark.parametrize("caller", range(RANKS))
def test_ranks_that_wait_in_another_call_get_the_request_of_a_collective(caller: int) -> None:
    """Only ranks that have not yet reached the caller's collective get the request."""
    with detectors() as members:
        ahead = (caller + 1) % RANKS
        members[ahead].set_current_op("the end of cooking")
        members[caller].request_collective()
        members[caller].set_current_op("the end of cooking")
        waiting = [detector for rank, detector in enumerate(members) if rank not in (caller, ahead)]
        until(lambda: all(detector.collective_requested() for detector in waiting), 0.5)
        assert not members[caller].collective_requested()
        assert not members[ahead].collective_requested()
        for detector in waiting:
            detector.set_current_op("a message, broken off")
            assert not detector.collective_requested()


def test_the_first_reported_failure_is_kept() -> None:
    with detectors() as members:
        members[3].report_failure(PeerError(3, "one", "first"))
        assert failure_of(members[1], 0.5) is not None
        members[1].report_failure(PeerError(1, "two", "second"))
        time.sleep(0.1)
        assert {str(failure_of(detector, 0.5)) for detector in members} == {"rank 3 failed in one: first"}


def test_a_rank_that_has_not_called_is_missing() -> None:
    with detectors() as members:
        for rank in (0, 1, 3):
            members[rank].set_current_op("a barrier")
        until(lambda: [detector.missing_ranks() for detector in members] == [(2,), (2,), (), (2,)], 2)
        members[2].set_current_op("a barrier")
        until(lambda: not any(detector.missing_ranks() for detector in members), 2)
        assert all(failure_of(detector, 0.01) is None for detector in members)


def test_a_rank_that_left_is_no_failure_unless_a_later_call_waits_for_it() -> None:
    with detectors() as members:
        for detector in members:
            detector.set_current_op("the last call")
        members[2].close()
        time.sleep(0.7)
        assert [failure_of(detector, 0.01) for detector in members] == [None] * RANKS
        members[1].set_current_op("a call too many")
        error = failure_of(members[1], 0.5, "a call too many")
        assert isinstance(error, PeerError)
        assert (error.rank, error.host, error.phase) == (2, "bert", "a call too many")
        assert failure_of(members[0], 0.01) is None


def test_the_coordinator_sends_a_goodbye_too() -> None:
    with detectors() as members:
        for detector in members:
            detector.set_current_op("the last call")
        members[0].close()
        time.sleep(0.7)
        assert [failure_of(detector, 0.01) for detector in members] == [None] * RANKS
        members[3].set_current_op("a call too many")
        error = failure_of(members[3], 0.5)
        assert isinstance(error, PeerError)
        assert error.rank == 0


def cut(detector: FailureDetector) -> None:
    """Reset the connection of this detector without its knowledge."""
    line = detector._connection  # type: ignore[attr-defined]
    line.connection.shutdown(socket.SHUT_RDWR)


def test_a_lost_connection_is_reconnected() -> None:
    with detectors() as members:
        cut(members[2])
        time.sleep(1.0)
        assert [failure_of(detector, 0.01) for detector in members] == [None] * RANKS
        members[1].report_failure(PeerError(1, "its own code", "later"))
        assert str(failure_of(members[2], 0.5)) == "rank 1 failed in its own code: later"


def test_a_message_whose_connection_ended_names_a_peer_that_has_closed() -> None:
    ended, hosts = PeerError(-1, "recv (from rank 2)", "connection ended"), ("anna", "anna", "bert", "bert")
    with detectors() as members:
        members[2].close("it closed its communicator")
        named = named_failure(ended, members[1], hosts, peer=2)
        assert str(named) == "rank 2 on bert failed in recv (from rank 2): it closed its communicator"
        members[3].report_failure(PeerError(3, "its own code", "broken"))
        members[3].close()
        assert str(named_failure(ended, members[1], hosts, peer=3)) == "rank 3 on bert failed in its own code: broken"


class Relay:
    """A network between members and the coordinator: it may swallow what members send, or end their connections."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.swallows = False
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                member, _ = self._listener.accept()
                coordinator = socket.create_connection(self._address)
                self._ends += [member, coordinator]
                for source, target in ((member, coordinator), (coordinator, member)):
                    self._start(self._pass_on, source, target)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.swallows:
                    target.sendall(data)

    def cut(self) -> None:
        """End all connections that there are; new ones are passed on."""
        self.swallows = False  # first: a member connects again at once
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


def test_a_failure_that_was_lost_with_the_connection_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    relays: list[Relay] = []

    def through_a_relay(topology: Topology, coordinator: CoordinatorAddress) -> Member | None:
        if topology.rank == 3:
            relays.append(Relay(("127.0.0.1", coordinator.port)))
            coordinator = coordinator._replace(addresses=["127.0.0.1"], port=relays[0].port)
        return connect_member(topology, coordinator)

    monkeypatch.setattr(start, "connect_member", through_a_relay)
    with detectors() as members:
        (relay,) = relays
        relay.swallows = True
        members[3].report_failure(StallError("ranks [2] did not come", missing=(2,), rank=2))
        assert failure_of(members[0], 0.3) is None
        relay.cut()
        assert {type(failure_of(detector, 3)) for detector in members} == {StallError}
    relay.close()


def test_connections_without_the_nonce_are_closed() -> None:
    with detectors() as members:
        offer = members[1]._coordinator  # type: ignore[attr-defined]
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'["nonce", 1]\n', b'{"a": 1}\n', b'["a"]\n', b"7\n", b"\xff" * 100):
            with socket.create_connection(("127.0.0.1", offer.port), 2) as connection:
                connection.sendall(words + b"\n")
                connection.settimeout(2)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(100) == b""
        assert [failure_of(detector, 0.01) for detector in members] == [None] * RANKS
        members[3].report_failure(PeerError(3, "x", "y"))
        assert failure_of(members[0], 0.5) is not None


def test_if_one_rank_cannot_connect_no_rank_has_a_detector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = start.connect_member

    def connect_but_rank_2(topology: Topology, *rest: Any) -> Any:
        return None if topology.rank == 2 else connect(topology, *rest)

    monkeypatch.setattr(start, "connect_member", connect_but_rank_2)
    with detectors() as members:
        assert members == [UNWATCHED] * RANKS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ranks [2] cannot reach rank 0" in caplog.text


def test_if_rank_0_cannot_listen_no_rank_has_a_detector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: Any, **_options: Any) -> socket.socket:
        raise OSError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)
    with detectors() as members:
        assert members == [UNWATCHED] * RANKS
    assert len(caplog.records) == 1


def test_a_host_name_that_does_not_resolve_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with detectors() as members:
        assert UNWATCHED not in members


def test_closed_detectors_leave_no_threads_or_sockets() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with detectors():
            pass
    assert not [thread for thread in threading.enumerate() if "detector" in thread.name]
    assert len(os.listdir("/proc/self/fd")) <= len(before)


# Ranks that are processes: a pair of pipes to each one is the bootstrap transport.

PROCESS = """
import json, os, sys, time
sys.path.insert(0, {support!r})
from failure_detectors import HOSTS, Bootstrap, ByteExchange, failure_of
from statexchange.comm.failure.start import start_failure_detector
from statexchange.comm.topology import Topology
from statexchange.errors import PeerError

class Piped(Bootstrap):
    def all_gather_bytes(self, payload, wait):
        print(json.dumps(payload.decode()), flush=True)
        return [text.encode() for text in json.loads(sys.stdin.readline())]

rank, nodes = {rank}, {nodes}
topology = Topology(rank, nodes, tuple(HOSTS[2 * node] for node in nodes))
for cycle in range({cycles}):
    detector = start_failure_detector(Piped(ByteExchange(len(nodes)), rank), topology, 20)
    detector.set_current_op("all_reduce")
    if cycle < {cycles} - 1:
        detector.close()
{body}
"""

WATCH = """
print(json.dumps(os.getpid()), flush=True)
detector.set_current_op("a barrier")
error = failure_of(detector, 6)
about = [getattr(error, "rank", None), getattr(error, "host", None)]
print(json.dumps([time.monotonic(), str(error), *about]), flush=True)
"""


class Job:
    """Processes with a detector each."""

    def __init__(self, nodes: tuple[int, ...], body: str, cycles: int = 1) -> None:
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROCESS.format(support=SUPPORT, rank=rank, nodes=nodes, body=body, cycles=cycles),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(len(nodes))
        ]
        for _ in range(2 * cycles):
            answers = json.dumps(self.lines())
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(answers + "\n")
                process.stdin.flush()

    def lines(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the next line of each rank."""
        return [self._line(self.processes[r]) for r in (range(len(self.processes)) if ranks is None else ranks)]

    def _line(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        text = process.stdout.readline()
        assert text, process.communicate()[1]
        return json.loads(text)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def job(nodes: tuple[int, ...], body: str, cycles: int = 1) -> Iterator[Job]:
    members = Job(nodes, body, cycles)
    try:
        yield members
    finally:
        members.close()


@pytest.mark.parametrize(
    ("nodes", "victim"),
    [
        pytest.param((0, 0, 1), 0, id="coordinator"),
        pytest.param((0, 0, 1), 1, id="beside the coordinator", marks=pytest.mark.slow),
        pytest.param((0, 0, 1), 2, id="alone"),
        pytest.param((0, 1, 1), 0, id="coordinator alone", marks=pytest.mark.slow),
        pytest.param((0, 1, 1), 2, id="beside a member", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_all_others(nodes: tuple[int, ...], victim: int) -> None:
    with job(nodes, WATCH) as members:
        members.lines()
        time.sleep(0.3)
        members.processes[victim].kill()
        killed = time.monotonic()
        others = [rank for rank in range(len(nodes)) if rank != victim]
        for when, text, rank, host in members.lines(others):
            print(f"{when - killed:.2f} s", text)
            assert rank == victim, text
            assert host == HOSTS[2 * nodes[victim]], text


def test_a_child_of_a_killed_rank_does_not_hide_its_death() -> None:
    fork = """
if rank == 1 and os.fork() == 0:
    for fd in range(3):
        os.close(fd)  # the test does not wait for this process
    time.sleep(20)  # longer than the watch
    os._exit(0)
"""
    with job((0, 1), fork + WATCH) as members:
        members.lines()
        members.processes[1].kill()
        ((_, text, rank, _),) = members.lines([0])
        assert rank == 1, text


def test_the_exit_of_a_child_is_no_failure_of_its_rank() -> None:
    fork = """
import atexit
detector.close() if rank == 2 else None
child = os.fork()
if child == 0:
    detector.report_failure(PeerError(rank, "a child", "nonsense"))
    detector.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
time.sleep(0.7)
print(json.dumps(str(failure_of(detector, 0.01))), flush=True)
"""
    with job((0, 0, 1), fork) as members:
        assert members.lines() == ["None"] * 3
        assert [process.wait(10) for process in members.processes] == [0] * 3
        assert [process.stderr.read() for process in members.processes if process.stderr is not None] == [""] * 3


def test_a_rank_that_exits_is_named() -> None:
    leave = """
if rank == 1:
    sys.exit(0)
"""
    with job((0, 1), leave + WATCH) as members:
        assert members.processes[1].wait(10) == 0
        members.lines([0])
        ((_, text, rank, _),) = members.lines([0])
        assert rank == 1
        assert "its process ended" in text


@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_stopped_rank_is_missing(victim: int) -> None:
    look = """
print(json.dumps("in"), flush=True)
time.sleep(3)
print(json.dumps(detector.missing_ranks()), flush=True)
"""
    with job((0, 0, 1), look) as members:
        members.lines()
        members.processes[victim].send_signal(signal.SIGSTOP)
        assert members.lines([rank for rank in range(3) if rank != victim]) == [[victim]] * 2


@pytest.mark.slow
def test_processes_exit_cleanly_after_many_detectors_even_if_one_stays_open() -> None:
    with job((0, 0, 1), "", cycles=20) as members:
        for process in members.processes:
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
