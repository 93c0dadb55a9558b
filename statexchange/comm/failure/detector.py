"""Failure detection between hosts: which ranks have failed, left, or not arrived.

Rank 0 is the coordinator (coordinator.py), and every other rank is a member (member.py) that holds one TCP connection
to it. A thread on each rank serves the connection, so that the rank itself may compute or be blocked. The messages:

    member -> coordinator    ["at", op number, progress count]          each period, a quarter of a second
                             ["failure", record]                        when its communicator has failed
                             ["collective_requested", op number]        see `request_collective`
                             ["goodbye", op number, cause]              when it leaves
    coordinator -> members   the status of the group, as one object     each period, and on every change

How a failure shows:

* A rank reports one: the coordinator sends it to all at once. The first report counts.
* A connection ends without a goodbye: the process has ended. The kernel closes its sockets at that moment, even when it
  was killed. A grace of 0.4 s lets a goodbye, or a second connection of the same rank, arrive before the death is
  reported.
* A host is cut off: no connection ends. Its ranks fall silent, and a wait that reaches its deadline names them as
  missing.
* Rank 0 dies: each member finds that by itself, after it could not connect again (member.py).

A rank that gives up waiting raises, and reports why. The others raise that from their waits, or at the beginning of
their next call: so a failure ends the group on all ranks, although one may just have completed the call.

For example, rank 1 of three, each on a host of its own, is killed in an all_reduce of 10 million floats over Gloo. What
happens on rank 2:

    at once    Most often Gloo sees the end of a connection. It does not know the rank: `torch_errors` makes that a
               PeerError of rank -1, the backend closes its connections (gloo.py), and `Session.fail` waits for the name
               (`named_failure`).
    at once    Rank 0's thread reads the end of rank 1's connection: `Coordinator._lose`.
    0.4 s      The grace is over: `_report_deaths` on rank 0, `_post_failure`, and the status goes to all members.
               Rank 2's thread takes it: `Member._take_status` sets `_failure`.
    0.4 s      `named_failure`, which looks each 20 ms, returns the error of `check`: PeerError "rank 1 on its-host
               failed in all_reduce sum float32[10000000]: its process 4711 died". `fail` keeps it for later calls.
    then       `guarded` raises it from that of rank -1, and later calls raise the same. The connection to rank 0 stays
               until `close`. The tensor may hold a part of the result.

If Gloo notices nothing, the wait finds the same error at its next look, each 50 ms (`Wait._poll`), and the backend
closes its connections then. If no name comes in 2 s, the error of rank -1 is raised; where there is no detector, at
once. On one host there is no detector: each rank looks for the others' processes (control_page.py).
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from statexchange.comm import forks
from statexchange.comm.failure.connection import JsonConnection
from statexchange.comm.failure.monitor import FailureMonitor
from statexchange.comm.topology import Topology
from statexchange.errors import PeerError, StateExchangeError, from_record, to_record

_PERIOD_S = 0.25  # between two messages of a rank, in groups of up to _LARGE_GROUP ranks; in larger ones longer
_LARGE_GROUP = 128
_SILENT_PERIODS = 6
_GRACE_S = 0.4  # for a goodbye, or a second connection, to arrive before a process is reported as dead
_REPORT_S = 1.0
_JOIN_S = 2.0
_FINISH_S = 0.5  # for the goodbye to arrive


@dataclass
class GroupView:
    """The state of all ranks: kept by the coordinator, and on a member as the coordinator last sent it."""

    op_numbers: list[int]
    """The number of each rank's current collective."""
    silent: list[int] = field(default_factory=list)
    """Ranks that have sent nothing for several periods."""
    departed: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Ranks that sent a goodbye: the number of the last collective of each, and the cause."""
    requested_op: int = 0
    """The latest collective at which a rank has requested all ranks."""
    progress_count: int = 0
    """The number of reports that bytes move."""
    updated: float = field(default_factory=time.monotonic)


class FailureDetector(FailureMonitor):
    """One rank's side of failure detection between hosts. Made by `start_failure_detector`.

    The rank's own threads call the public methods; `_run` is the detector thread. Each attribute that both use is
    written by one of them only. In the dict `_view.departed` that one adds single items.
    """

    def __init__(self, topology: Topology) -> None:
        self.rank = topology.rank
        self._topology = topology
        self._op_number = 0
        self._operation = "its own code"
        self._progress = 0
        self._failure: dict[str, object] | None = None
        self._view = GroupView([0] * self._world_size)
        self._seen_dead_at: dict[int, float] = {}  # when its connection was first seen to have ended
        self._period_s = _PERIOD_S * max(1.0, self._world_size / _LARGE_GROUP)
        self._silent_s = _SILENT_PERIODS * self._period_s
        self._requests: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._goodbye: str | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()  # interrupts the thread's select
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ)
        self._is_inherited = False
        name = f"statexchange failure detector {topology.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def _world_size(self) -> int:
        return len(self._topology.nodes)

    def start(self) -> None:
        """Begin to take part. Not collective."""
        forks.cut_off_in_children(self)
        # So an exit without `close` is reported as leaving: without a goodbye it would be reported as a death.
        atexit.register(self.close, "its process ended")
        self._thread.start()

    # Called by this rank

    def set_current_op(self, operation: str) -> None:
        """Note that this rank begins its next collective, which all ranks count. Not collective; sends nothing."""
        self._op_number += 1
        self._operation = operation

    def check(self, operation: str) -> None:
        """Raise the failure that was reported, or PeerError if a rank left before this rank's call. Not collective."""
        failure = self._failure
        if failure is not None:
            # The record of a death has no phase: name the call in which this rank waits.
            if failure.get("phase") == "":
                failure = {**failure, "phase": operation}
            raise from_record(failure)
        # A copy, as the detector thread may add to it. A rank that left in a later call has completed this one.
        for rank, (last_op, cause) in tuple(self._view.departed.items()):
            if last_op < self._op_number and rank != self._topology.rank:
                raise self._peer_error(rank, operation, cause)

    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:
        """Return the error for `rank` if it has sent a goodbye, else None. Not collective."""
        departure = self._view.departed.get(rank)
        return None if departure is None else self._peer_error(rank, operation, departure[1])

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are in an earlier collective than this one, or silent. Not collective."""
        missing = set(self.silent_ranks())
        # An old status does not tell in which call the ranks are now.
        if not self._is_uninformed():
            missing.update(rank for rank, number in enumerate(self._view.op_numbers) if number < self._op_number)
        return tuple(sorted(missing - {self._topology.rank}))

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have sent nothing for several periods. Not collective."""
        return self._suspects() if self._is_uninformed() else tuple(self._view.silent)

    def _is_uninformed(self) -> bool:
        """Whether no status of the group has arrived for so long that the last one is out of date."""
        return time.monotonic() - self._view.updated > self._silent_s

    def report_failure(self, error: StateExchangeError) -> None:
        """Report why this communicator has failed; the first report counts. Not collective; blocks 1 s at most."""
        record = to_record(error, self._topology.rank, self._operation)
        self._run_in_thread(lambda: self._post_failure(record))

    def request_collective(self) -> None:
        """Request all ranks at this rank's next collective: waits for one rank then raise AbandonedError.

        Not collective; blocks 1 s at most.
        """
        number = self._op_number + 1
        self._run_in_thread(lambda: self._post(["collective_requested", number]))

    def collective_requested(self) -> bool:
        """Whether a rank has requested a collective that this one has not reached. Not collective."""
        return self._view.requested_op > self._op_number

    def report_progress(self) -> None:
        """Report, with the next periodic message, that bytes move. Not collective; sends nothing."""
        self._progress += 1

    def progress_count(self) -> int:
        """Return how often the ranks have reported progress, by the coordinator's last status. Not collective."""
        return self._view.progress_count

    def close(self, goodbye: str = "it closed its communicator, or its script ended") -> None:
        """Leave: ranks that wait for this one in a later collective raise PeerError. Not collective."""
        if self._is_inherited or self._goodbye is not None:
            return
        atexit.unregister(self.close)
        self._goodbye = goodbye
        self._wake_thread()
        self._thread.join(_JOIN_S)

    def _run_in_thread(self, request: Callable[[], None]) -> None:
        """Have the detector thread run `request`, and wait for it, 1 s at most."""
        if self._thread.is_alive():
            done = threading.Event()
            self._requests.put((request, done))
            self._wake_thread()
            done.wait(_REPORT_S)  # the caller may exit next, and the report would be lost

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # a full buffer: the thread will wake up anyway
            self._wakeup_sender.send(b"!")

    def _peer_error(self, rank: int, phase: str, cause: str) -> PeerError:
        return PeerError(rank, phase, cause, self._topology.hosts[rank])

    # The detector thread

    def _run(self) -> None:
        try:
            due = 0.0
            while self._goodbye is None:
                # Until the next status, or until a grace ends, which may be earlier.
                deaths_due = [since + _GRACE_S for since in self._seen_dead_at.values()]
                self._handle_events(max(0.0, min([due, *deaths_due]) - time.monotonic()))
                if time.monotonic() >= due:
                    due = time.monotonic() + self._period_s
                    self._send_status()
                self._report_deaths()
            # What this rank reported before it closed goes out before the goodbye.
            self._run_requests()
            self._post(["goodbye", self._op_number, self._goodbye])
            deadline = time.monotonic() + _FINISH_S
            for key in list(self._selector.get_map().values()):  # what was sent arrives, the goodbye among it
                if isinstance(key.data, JsonConnection):
                    key.data.finish(deadline)
        finally:
            self.drop()

    def _handle_events(self, wait_s: float) -> None:
        """Handle the input that arrives within `wait_s`, then the requests of this rank's own threads."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._wakeup_receiver:
                # One read takes all bytes: several requests may have been made since the last one.
                with contextlib.suppress(BlockingIOError):
                    self._wakeup_receiver.recv(1 << 12)
            else:
                self._handle_input(key.data)
        self._run_requests()

    def _run_requests(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request, done = self._requests.get_nowait()
                request()
                done.set()

    def _report_deaths(self) -> None:
        """Report processes that have ended without a goodbye, when their grace is over."""
        now = time.monotonic()
        for rank, since in list(self._seen_dead_at.items()):
            if rank in self._view.departed:  # its goodbye has come in the meantime
                del self._seen_dead_at[rank]
            elif now - since >= _GRACE_S:
                self._post_failure(to_record(self._peer_error(rank, "", self._cause_of_death(rank)), rank, ""))
                del self._seen_dead_at[rank]

    def _post_failure(self, record: dict[str, object]) -> None:
        self._failure = self._failure or record  # also without the coordinator, which may be gone
        self._post(["failure", record])

    def disown(self) -> None:
        """Close this child's copies of the parent's connections: else they would stay open when the parent ends."""
        self._is_inherited = True
        self.drop()

    def drop(self) -> None:
        """Close all sockets of this process without a goodbye. Not collective."""
        forks.forget(self)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._wakeup_sender.close()

    # What the coordinator and the members do differently; all but `_suspects` runs in the detector thread

    def _handle_input(self, connection: JsonConnection | None) -> None:
        raise NotImplementedError

    def _send_status(self) -> None:
        raise NotImplementedError

    def _post(self, message: list[object]) -> None:
        """Send a message to the coordinator, if it can be reached."""
        raise NotImplementedError

    def _cause_of_death(self, rank: int) -> str:
        raise NotImplementedError

    def _suspects(self) -> tuple[int, ...]:
        """Return the ranks that may be the reason why no status of the coordinator has arrived."""
        return ()  # on rank 0, the coordinator itself, only its own thread can be late
