"""A session: the state of one rank in its group. It orders calls, compares them across ranks, and reports failure.

Order. The order of calls must be the same on all ranks, and two threads of a rank have none:

* A session belongs to the thread that made it, until that thread hands it over or has ended: then to the thread that
  calls next. A call of another thread ends the session on all ranks, since it could meet that of this thread on another
  rank, and each would get the other's result. Threads of autograd's engine, which run hooks, may call: the thread that
  called `backward` waits for them.
* One collective runs at a time. Work that was begun with `async_op` runs in the queue's thread, for which later calls
  wait. Sends and receives have a queue for each peer and direction.

Comparison. Before a collective the ranks compare the fingerprints of their calls: in the control page on one host, by
one small message elsewhere. If they differ, all ranks exchange what they were about to do (`_explanation`), and all
raise the same MismatchError. If a rank was about to report an error of its own, all raise that instead.

States. A session is *usable* until it is *dead*; it never becomes usable again. detector.py has an example, step by
step, of a rank that dies.

* An error that all ranks raise together, as a MismatchError or a refused argument, leaves it usable (`shared_error`).
* Any other error inside a call ends it: `fail` keeps the error as `dead`, which every later call raises, and reports it
  to the other ranks by the page, the backend and the monitor. They raise it from their waits, and are then dead, too.
* A rank that had completed the call in which another one failed raises the error in its next call.
* A rank that dies reports nothing. On one host each other rank notices by itself (control_page.py). Between hosts rank
  0, or a rank of the same host, notices and reports it to the others (detector.py). Their waits raise PeerError, which
  ends their sessions likewise. Where the transport fails first, it does not know the rank: `fail` then waits a moment
  for the monitor to name it (`named_failure`).
* `close` ends this rank's session. A rank that waits for this one raises PeerError, or the `error` given to `close`.
* A rank that waits for a single rank in `send` or `recv` does not see what the others raise together. So a rank with an
  error to report requests a collective first: those waits then raise AbandonedError, and join it.

What a session remembers of errors:

    dead                  the error that has ended this session. It is never cleared
    _last_shared_error    the last error that all ranks raised together, in a call or in work begun with `async_op`. It
                          is never cleared. A send or receive that was broken off for it raises it
    shared_error          `_last_shared_error`, if it was raised in a call, and no call has succeeded since; else None.
                          All ranks are raising the exception that is `shared_error`, so no rank reports it again
    _pending_failure      set while this rank is in `agree` with an error, and waits for work that was begun before. If
                          the ranks find in that work that their calls differ, they raise this error, not MismatchError
    _has_cut_message      whether a send or receive was broken off. Half of its message may still be under way, so the
                          session cannot be used any more: the next shared error also becomes `dead`

So after a shared error `dead` is still None, unless a message was cut: then `dead` is the shared error.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import current_thread
from typing import Any, NamedTuple, NoReturn, TypeVar

from statexchange import values
from statexchange.comm import forks
from statexchange.comm.backends.backend import Backend
from statexchange.comm.calls import (
    Call,
    call_site,
    encoded,
    is_autograd_thread,
    note_joined,
    step_text,
    under_way,
)
from statexchange.comm.failure.control_page import ControlPage, DifferentCallsError, closed_error
from statexchange.comm.failure.monitor import (
    AbandonedError,
    FailureMonitor,
    PeerMonitor,
    forming_group,
    named_failure,
    naming_failures,
)
from statexchange.comm.topology import Topology
from statexchange.comm.wait import Wait
from statexchange.comm.work import Work, WorkQueue
from statexchange.errors import (
    ForkedError,
    InvalidArgumentError,
    MismatchError,
    NumericOverflowError,
    PeerError,
    StateExchangeError,
    UnsupportedError,
    from_record,
    to_record,
)
from statexchange.settings import check_timeout

T = TypeVar("T")
_CLOSE_S = 1.0
_MOST_KNOWN = 1024  # calls that a route remembers
_ARGUMENT_ERRORS = (TypeError, ValueError, AttributeError)
# Errors that all ranks raise together, after they have exchanged messages.
_SHARED_ERRORS = (MismatchError, NumericOverflowError, InvalidArgumentError, UnsupportedError)


class Session:
    """The state of one rank in its group.

    Attributes:
        backend: moves tensors of CPUs.
        device_backend: moves tensors of GPUs; None if nothing does.
        page: carries messages on one host.
        transport: carries messages where there is no page; groups are made from it.
        monitor: reports which ranks have failed.
        device: the name of the device on which this rank computes.
        dead: the error that every call raises once the group has failed or this rank has closed it.
        shared_error: the error that all ranks have raised together in their last call; see the top of this file.
        has_begun_work: whether a call with `async_op` was made.
    """

    def __init__(
        self,
        backend: Backend,
        transport: Backend,
        page: ControlPage | None,
        monitor: FailureMonitor,
        topology: Topology,
        timeout_s: float,
        *,
        check: bool = True,
        device_backend: Backend | None = None,
    ) -> None:
        self.backend = backend
        self.transport = transport
        self.page = page
        self.monitor = monitor
        self.topology = topology
        self.timeout_s = timeout_s
        self.device_backend = device_backend
        self.device = "cpu"
        self.rank = topology.rank
        self.world_size = len(topology.nodes)
        self.dead: StateExchangeError | None = None
        self.shared_error: BaseException | None = None
        self._check = check
        self._last_shared_error: StateExchangeError | None = None
        self._pending_failure: dict[str, object] | None = None
        self._has_cut_message = False
        self.has_begun_work = False
        self._queue = WorkQueue(f"statexchange rank {topology.rank}", skips=True)
        self._peer_queues: dict[tuple[str, int], WorkQueue] = {}
        self.dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        self._call_lock = threading.Lock()  # held during a call: two at once would take each other's messages
        self._last_call = ""  # the text of the call that holds it, or last did
        # The thread to which this belongs; None for the one that calls next. Autograd's threads never end.
        self._caller: threading.Thread | None = None if is_autograd_thread() else current_thread()
        self._claiming = threading.Lock()  # held by a thread that becomes the caller
        self.is_inherited = False
        forks.cut_off_in_children(self)

    def disown(self) -> None:
        """Have every call raise ForkedError: this is the copy of a forked child."""
        self.is_inherited = True
        self.dead = ForkedError(
            "this process was forked from a rank, and a communicator belongs to the process that made it: "
            "communicate in that process, or start this one as a rank of its own (not by fork)",
            rank=self.rank,
        )
        # A thread of the parent, which does not exist here, may have held a lock during the fork: use new ones.
        self._call_lock = threading.Lock()
        for queue in self._queues:
            queue.disown(self.dead)

    def _claim(self, call: Call) -> None:
        """Make this thread the caller. If another one is it and still runs, end this group on all ranks, and raise."""
        thread = current_thread()
        if thread is self._caller or is_autograd_thread():
            return
        with self._claiming:
            caller = self._caller
            # In a world of one there is no rank whose calls those of another thread could meet.
            if caller is None or not caller.is_alive() or self.world_size == 1:
                self._caller = thread
                return
        last_call = f"called {self._last_call}" if self._last_call else "made it"
        error = InvalidArgumentError(
            f"thread {thread.name!r} called {call.text} at {call_site()}, but the communicator belongs to thread "
            f"{caller.name!r}, which {last_call} and still runs: "
            "give each thread a communicator of its own, from duplicate(), or call hand_over() in that thread first",
            rank=self.rank,
        )
        self.fail(call, error)
        raise error

    def hand_over(self) -> None:
        """Let the thread that calls next be the caller. Not collective."""
        self._caller = None

    # Messages

    def all_gather_bytes(
        self, call: Call, payload: bytes, root: int | None = None, timeout_s: float | None = None
    ) -> list[bytes]:
        """Return every rank's payload in rank order; on `root` only, if that is given. Collective."""
        self.raise_if_dead()
        if call.failure is not None and self.world_size > 1:
            # Work that was begun before raises it, if the ranks find there that their calls differ.
            self._pending_failure = call.failure
            self.monitor.request_collective()

        def job() -> list[bytes]:
            if self.world_size == 1:
                return [payload]
            return self.messages(call, payload, root, self.begin(call, timeout_s))

        try:
            return self.run(call, job)
        finally:
            if call.failure is not None:
                self._pending_failure = None

    def run(self, call: Call, job: Callable[[], T]) -> T:
        """Run `job` in the order of calls. Collective."""
        if current_thread() is not self._caller:  # as `_claim` tests, too, whose call would slow down small tensors
            self._claim(call)
        if self.has_begun_work:
            self._queue.drain()
        return self._one_at_a_time(call, job)

    def submit(self, call: Call, job: Callable[[], T], backend: Backend) -> Work[T]:
        """Have the queue's thread run `job`, work of `backend`, in the order of calls. Collective."""
        self._claim(call)
        call.site = call_site()
        self.has_begun_work = True
        queued = self._for_caller(backend, lambda: self._one_at_a_time(call, job, is_shared=False))
        return self._queue.submit(call.text, queued)

    def _one_at_a_time(self, call: Call, job: Callable[[], T], *, is_shared: bool = True) -> T:
        """Run `job` as `guarded` does, unless this rank is inside a call."""
        # Without blocking: it may be this very thread that holds the lock, below a signal handler.
        if not self._call_lock.acquire(False):
            raise InvalidArgumentError(
                f"{call.text} was called inside another call of this communicator, {self._last_call}, by a signal "
                "handler perhaps: use one of its own, from duplicate()"
            )
        self._last_call = call.text
        try:
            result = self.guarded(call, job, is_shared=is_shared)
            note_joined()
            return result
        finally:
            self._call_lock.release()

    def messages(self, call: Call, payload: bytes, root: int | None, wait: Wait) -> list[bytes]:
        """Gather bytes inside a call; raise DifferentCallsError, on all ranks, if calls differ. Collective."""
        if self.page is not None:
            return self.page.all_gather_bytes(payload, root, call.fingerprint, wait)
        # Together with the payload: a comparison before it would be a message more.
        fingerprint = call.fingerprint.to_bytes(8, "little")
        answers = self.transport.all_gather_bytes(fingerprint + payload, wait)
        if any(answer[:8] != fingerprint for answer in answers):
            raise DifferentCallsError
        if root not in (None, self.rank):  # the transport gives all ranks all answers
            return []
        return [answer[8:] for answer in answers]

    def _enter(self, call: Call, location: int | None, wait: Wait) -> Sequence[int]:
        """Compare the ranks' calls at the entry of a collective on tensors. This is what `Wait.enter` calls."""
        if self.page is not None and (self._check or self.backend.enters_itself):
            return self.page.enter(call.fingerprint, location, wait)
        if self._check:
            self.messages(call, b"", None, wait)
        return ()

    def begin(self, call: Call, timeout_s: float | None = None) -> Wait:
        """Begin a call: return its Wait, whose `enter` compares calls. Raise if the group has ended."""
        if self.dead is not None:
            self.raise_if_dead()
        if self.page is None:  # which counts barriers, and is checked at each of them
            self.monitor.set_current_op(call.text)
            self.monitor.check(call.text)  # a rank may have given up the call before, which this one had completed
        seconds = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        return Wait(seconds, call.text, self.monitor, functools.partial(self._enter, call))

    def refuse(self, verb: str, refusal: Exception) -> NoReturn:
        """Raise `refusal` of this rank's arguments, on all ranks, as others may have called with good ones. Collective.

        A TypeError, ValueError or AttributeError becomes an InvalidArgumentError.
        """
        if isinstance(refusal, _ARGUMENT_ERRORS) and not isinstance(refusal, StateExchangeError):
            cause, refusal = refusal, InvalidArgumentError(f"{verb}: {refusal}", rank=self.rank)
            refusal.__cause__ = cause
        if self.world_size > 1:
            step = f"{verb}, refused: {refusal}"
            self.all_gather_bytes(Call(step, failure=self.record(refusal, step_text(step))), b"")
        raise refusal

    @contextlib.contextmanager
    def checking(self, verb: str) -> Iterator[None]:
        """A block that prepares the arguments of `verb`: what it raises on one rank, all raise. Collective then."""
        self.raise_if_dead()
        try:
            yield
        except Exception as refusal:
            if refusal is self.dead or refusal is self.shared_error:
                raise  # on all ranks already
            self.refuse(verb, refusal)

    def record(self, error: BaseException, phase: str) -> dict[str, object]:
        """Return the record that carries an error of this rank to the others."""
        return to_record(error, self.rank, phase, self.topology.hosts[self.rank])

    def _for_caller(self, backend: Backend, job: Callable[[], T]) -> Callable[[], T]:
        """Return `job` for another thread, with the state of the current one that `backend` needs."""
        caller = backend.as_caller()

        def run() -> T:
            with caller:
                return job()

        return run

    def deliver(
        self, backend: Backend, verb: str, peer: int, operation: str, body: Callable[[Wait], T], async_op: bool
    ) -> T | Work[T]:
        """Run a send or receive, `body`, after the earlier ones of the same peer and direction. Not collective.

        Each peer and direction has a queue of its own, so that a send does not delay the receive that its peer needs.
        """
        queue = self._peer_queues.setdefault((verb, peer), WorkQueue(f"statexchange {verb} {peer}"))
        call = Call(f"{operation} ({'to' if verb == 'send' else 'from'} rank {peer})")
        self._claim(call)

        def job() -> T:
            self.raise_if_dead()
            try:
                with naming_failures(self.monitor, self.topology.hosts, peer):
                    return body(Wait(self.timeout_s, call.text, PeerMonitor(self.monitor, peer)))
            except AbandonedError:
                self._has_cut_message = True  # the peer may have sent a part of it, which nobody will receive
                if self._last_shared_error is not None and not self.monitor.collective_requested():
                    self.fail(call, self._last_shared_error)  # this rank has already joined the collective
                raise

        def guarded() -> T:
            return self.guarded(call, job, is_shared=False)

        if async_op:
            self.has_begun_work = True
            job_of_caller = self._for_caller(backend, guarded)
            return queue.submit(call.text, job_of_caller, lambda: self._join_requested_collective(call))
        queue.drain()
        try:
            return guarded()
        except AbandonedError:
            self._join_requested_collective(call)

    def _join_requested_collective(self, call: Call) -> NoReturn:
        """Join the collective for which `call` was broken off, and raise the failure that it reports. Collective."""
        if self.monitor.collective_requested():  # else this rank has joined it already, in another call
            self.all_gather_bytes(Call.of_all(f"{call.text}, broken off"), b"")
        raise self.dead or self._last_shared_error or AbandonedError

    @property
    def _queues(self) -> list[WorkQueue]:
        return [self._queue, *self._peer_queues.values()]

    def drain(self) -> None:
        """Return when all work under way is done; its errors are raised by `wait`. Not collective."""
        for queue in self._queues:
            queue.drain()

    def wait_all(self) -> None:
        """Drain; then raise the first error of work for which `wait` was not called. Not collective."""
        if self.is_inherited:
            self.raise_if_dead()
        self.drain()
        for queue in self._queues:
            queue.raise_lost()

    def check_root(self, root: object) -> None:
        """Raise InvalidArgumentError unless `root` is a rank of this group. Not collective."""
        if not hasattr(root, "__index__") or not 0 <= operator.index(root) < self.world_size:
            what = f"root {root!r} is not a rank of this communicator of {self.world_size}"
            raise InvalidArgumentError(what, rank=self.rank)

    # Failure

    def raise_if_dead(self) -> None:
        """Raise the error with which this group has failed, if it has. Not collective."""
        if self.dead is not None:
            raise self.dead.with_traceback(None)  # else it would grow with each raise

    def guarded(self, call: Call, body: Callable[[], T], *, is_shared: bool = True) -> T:
        """Return the value of `body`; report what it raises to all ranks.

        An error that all ranks raise together becomes `shared_error` if `is_shared`. An error of asynchronous work does
        not: `wait` raises it later, at different moments on different ranks.
        """
        try:
            result = body()
        except DifferentCallsError:
            # Guarded, too: a rank may die in this exchange as in any other.
            error = self.guarded(call, lambda: self._explanation(call), is_shared=is_shared)
            self._note_shared_error(call, error, is_shared)
            raise error from None
        except _SHARED_ERRORS as error:
            self._note_shared_error(call, error, is_shared)
            raise
        except AbandonedError:
            raise  # this rank has not failed: another one has
        except BaseException as error:
            if error is self.shared_error or error is self.dead:
                raise
            if self.dead is None:  # else a second thread has ended this group, which is the reason
                self.fail(call, error)
            if isinstance(error, StateExchangeError) and error is not self.dead and self.dead is not None:
                raise self.dead from error
            raise
        if is_shared:
            self.shared_error = None  # all ranks have gone on since
        return result

    def _note_shared_error(self, call: Call, error: StateExchangeError, is_shared: bool) -> None:
        self._last_shared_error = error
        self.shared_error = error if is_shared else None
        if self._has_cut_message:
            self.fail(call, error)

    def _explanation(self, call: Call) -> StateExchangeError:
        """Return the error that all ranks raise, after they have exchanged what they were about to do. Collective."""
        account: dict[str, object] = {
            "text": call.text,
            "site": call.site or call_site(),
            "failure": call.failure or self._pending_failure,
            "public": call.public,
        }
        explaining = Call.of_all("an explanation")
        answers = self.messages(explaining, encoded(account), None, self.begin(explaining))
        accounts = list(map(values.decode, answers))
        # The failure of the lowest rank, so that all ranks raise the same.
        for each in accounts:
            if each["failure"] is not None:
                return from_record(each["failure"])
        if len({account["public"] for account in accounts}) > 1:
            # Name the public calls, which the user has made, and not their steps.
            for account in accounts:
                account["text"] = account["public"] or account["text"]
        return _different_calls_error(range(self.world_size), [(each["text"], each["site"]) for each in accounts])

    def fail(self, call: Call, error: BaseException) -> None:
        """End this group: keep the error for later calls, and report it to the other ranks. Not collective.

        Blocks for 3 s at most: until the rank that has failed is named, and the report is sent.
        """
        if isinstance(error, PeerError):
            error = named_failure(error, self.monitor, self.topology.hosts)
        if not isinstance(error, StateExchangeError):
            error = from_record(self.record(error, call.text))
        self.dead = error
        self.monitor.report_failure(self.dead)
        self.backend.leave(self.dead)

    def forming_group(self) -> contextlib.AbstractContextManager[None]:
        """A block that forms a group of ranks of this one: it raises when one of this group's ranks fails.

        Not collective.
        """
        return forming_group(self.monitor, self.topology.hosts)

    def group_of(self, ranks: Sequence[int]) -> Backend:
        """Return a backend of `ranks`, in that order; raise MismatchError, on all, if orders differ.

        Collective over them.
        """
        # In one order first, so that ranks that give different orders meet, and can compare them.
        members = sorted(ranks)
        if len(members) == self.world_size:
            self.all_gather_bytes(Call(f"new_group({list(ranks)})"), b"")
            group = self.transport
        else:
            self.raise_if_dead()
            self.drain()  # as `all_gather_bytes` does in the other branch
            group = self.transport.new_group(members, self.timeout_s)
            self._compare_orders(group, ranks, members)
        if members == list(ranks):
            return group
        return group.new_group(list(map(members.index, ranks)), self.timeout_s)

    def _compare_orders(self, group: Backend, ranks: Sequence[int], members: Sequence[int]) -> None:
        wait = Wait(self.timeout_s, f"the making of a group of ranks {list(members)}")
        answers = group.all_gather_bytes(encoded([list(ranks), call_site()]), wait)
        orders = list(map(values.decode, answers))
        if any(order != list(ranks) for order, _ in orders):
            raise _different_calls_error(members, [(f"new_group({order})", site) for order, site in orders])

    def raise_first(self, call: Call, records: Sequence[dict[str, object] | None], cause: Exception | None) -> None:
        """Raise the failure of the lowest rank that has one. All have equal `records`; `cause` is this rank's error."""
        failure = next((record for record in records if record is not None), None)
        if failure is not None:
            error = from_record(failure)
            self._note_shared_error(call, error, is_shared=True)
            # Most often this is this rank's own error, which keeps its place in the user's code and its cause.
            if type(error) is type(cause) and isinstance(cause, StateExchangeError):
                raise error.with_traceback(cause.__traceback__) from cause.__cause__
            raise error from cause

    def close(self, error: BaseException | None) -> None:
        """Leave the group: peers that wait for this rank raise PeerError, or `error`. Not collective."""
        forks.forget(self)
        public = under_way.get()
        reported, since = None, ""
        if error is not None:
            phase, ended = "its own code", "this rank's code"
            if public is not None:
                phase = ended = public.name
            reported = from_record(self.record(error, phase))
            since = f" since {type(error).__name__} ended {ended}"
        # First the reason, then the end of the connections: ranks that wait here raise what reaches them first.
        if self.page is not None:
            self.page.leave(reported)
        self.backend.leave(reported)
        if reported is not None:
            self.monitor.report_failure(reported)
        if self.dead is None:
            self.dead = closed_error(self.rank, since)
        # Work under way uses the monitor and the backends: it ends before they close, or a second has passed.
        for queue in self._queues:
            queue.close(_CLOSE_S)
        self.monitor.close()
        self.backend.close()
        if self.transport is not self.backend:
            self.transport.close()


def _different_calls_error(ranks: Sequence[int], calls: Sequence[tuple[str, str]]) -> MismatchError:
    """Return the error for ranks that have made different `calls`, given as text and site."""
    lines = [f"rank {rank} called {text} at {site}" for rank, (text, site) in zip(ranks, calls, strict=True)]
    return MismatchError("ranks are in different calls: " + "; ".join(lines))


class KnownCall(NamedTuple):
    """A call that was made before, with the same dtypes and shapes, with the wait and backend of its repetitions."""

    call: Call
    wait: Wait
    backend: Backend


class Route:
    """The choice of the backend for a tensor: `backend` for CPUs, the session's `device_backend` for GPUs.

    Several routes may share a session, and so its failures and the order of its calls. `suffix` is added to the text of
    a call, so that ranks that use different routes raise MismatchError.
    """

    def __init__(self, session: Session, backend: Backend, suffix: str = "") -> None:
        self.session = session
        self.rank = session.rank
        self.world_size = session.world_size
        self._backend = backend
        self._suffix = suffix
        self.known: dict[object, KnownCall | None] = {}  # None: it was made once

    def remember(self, key: object, call: Call, backend: Backend) -> None:
        """Keep a call of a user, made for the second time, if it is compared on a page of shared memory.

        Not collective. Its text and its checks are those of all calls with this key.
        """
        page = self.session.page
        if call.public is not None or page is None or not backend.enters_itself:
            return
        if key not in self.known:
            # A program whose shapes change in every step would else fill the memory.
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[key] = None
            return
        enter = functools.partial(page.enter, call.fingerprint)
        wait = Wait(self.session.timeout_s, call.text, self.session.monitor, enter)
        self.known[key] = KnownCall(call, wait, backend)

    @property
    def may_repeat(self) -> bool:
        """Whether a known call can be made again as it is. Not collective.

        Not inside of a public call, whose name is a part of the text, and not while ranks have anything else to compare
        or to raise.
        """
        session = self.session
        # Also not once the group has failed: the checks of a call are what raises that error.
        return session.dead is None and under_way.get() is None

    def backend_for(self, device_type: str) -> Backend:
        """Return the backend for tensors of this device."""
        devices = self.session.device_backend
        if devices is not None and device_type == devices.device_type:
            return devices
        return self._backend

    def backend_of(self, tensor: Any) -> Backend:
        """Return the backend for `tensor`, which may be an array; any other argument gets the one for CPUs."""
        if self.session.device_backend is None:
            return self._backend
        return self.backend_for(tensor.device.type if hasattr(tensor, "is_cpu") else "cpu")

    @property
    def hierarchy(self) -> Backend | None:
        """The backend that reduces within each host first and then between hosts, if this is one."""
        return None if self._backend.flat is self._backend else self._backend

    def collective(self, call: Call, backend: Backend, body: Callable[[Wait], T], async_op: bool) -> T | Work[T]:
        """Run `body` after all ranks have entered, in the order of calls. Collective."""
        session = self.session
        # Ranks on different backends would wait for each other for ever: so their calls must differ in the text.
        if session.device_backend is not None:
            call.text += f" on {backend.device_type}"
        if self._suffix:
            call.text += self._suffix

        def job() -> T:
            wait = session.begin(call)
            if not backend.enters_itself and self.world_size > 1:
                wait.enter()
            result = body(wait)
            if session.page is not None and not backend.enters_itself:
                session.page.sync(wait)  # as all ranks have entered, but some may not have their results yet
            return result

        return session.submit(call, job, backend) if async_op else session.run(call, job)
