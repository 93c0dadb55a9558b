"""A session of ranks: they meet, compare what they are about to do, keep it in order, and learn of failure.

Several threads of a rank may call, but which of them comes first may differ from rank to rank. So:

* One call runs at a time: a thread takes the session's turn, and waits while another one has it. Work that was begun
  with `async_op` takes it in the queue's thread. What goes from rank to rank has a turn for each peer and direction.
* A call carries the number of its caller: threads are counted in the order in which they first call. The number is part
  of the fingerprint that ranks compare at the entry of every collective. So the calls of a thread meet those of the
  same thread on other ranks, or all ranks raise MismatchError, even if the calls are of one shape.
* Two threads that begin at once may be counted in different orders, and be taken for each other. So at its first call a
  thread's name is compared with those of the other ranks' callers (`_check_caller`).
* Threads of autograd's engine are one caller. A reducer, which knows whose backward its hooks run in, lets them call as
  that thread (`called_by`): on some ranks a bucket goes during backward, on others in `finalize`.
* `send`, `recv` and the making of a subset do not count: not all ranks take part, so the counts would come apart.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn, TypeVar

from statexchange import values
from statexchange.comm import forks
from statexchange.comm.backend import AbandonedError, Backend, Look, Wait, Watch, is_watched, watched
from statexchange.comm.control_page import ControlPage, DifferentCallsError, closed_error
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

__all__ = [
    "Call",
    "FlatSession",
    "Place",
    "Session",
    "about",
    "call_site",
    "encoded",
    "making",
    "mark_of",
    "public_call",
    "step_text",
]

T = TypeVar("T")
_ROOM = os.path.dirname(__file__)
_NAMING_S, _NAP_S = 2.0, 0.02
_CLOSE_S = 1.0
_ARRIVAL_S = 2.0
_PACKAGE = os.path.dirname(_ROOM) + os.sep
_CALLERS = os.path.join(_PACKAGE, "testing") + os.sep  # a part of the package that calls as others do
_OF_ARGUMENTS = (TypeError, ValueError, AttributeError)
_AUTOGRAD = -1  # the caller that all threads of autograd's engine are
_SECOND_CALLER_S = 0.05  # within which a thread that begins at the same time as another one has begun
_MET = (MismatchError, NumericOverflowError, InvalidArgumentError, UnsupportedError)  # raised where all ranks have met


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks are: the host of each, by rank; and which rank this is."""

    rank: int
    nodes: tuple[int, ...]
    """The number of each rank's host, counted in the order of their lowest ranks."""
    hosts: tuple[str, ...]
    """The name of each rank's host."""
    local_ranks: tuple[int, ...] = ()
    """The number of each rank within its host, as the launcher counts; () to count in rank order."""

    @property
    def local_rank(self) -> int:
        """The number of this rank within its host."""
        return self.mates_in_order.index(self.rank)

    @property
    def mates_in_order(self) -> list[int]:
        """The ranks of this host by their local ranks."""
        return sorted(self.mates, key=lambda rank: self.local_ranks[rank]) if self.local_ranks else self.mates

    @property
    def firsts(self) -> list[int]:
        """The rank with local rank 0 of each host."""
        if not self.local_ranks:
            return self.leaders
        first = {self.nodes[rank]: rank for rank, local in enumerate(self.local_ranks) if local == 0}
        return [first[node] for node in range(len(first))]

    @property
    def mates(self) -> list[int]:
        """The ranks of this host, this one among them."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host."""
        return [self.nodes.index(node) for node in range(max(self.nodes) + 1)]


@dataclass(frozen=True, slots=True)
class _PublicCall:
    """A public call whose steps communicate: its name, and where it was made if this thread cannot show that."""

    name: str
    site: str | None


_public: ContextVar[_PublicCall | None] = ContextVar("statexchange_public_call", default=None)


@contextlib.contextmanager
def public_call(name: str, site: str | None = None) -> Iterator[None]:
    """A block, or a decorated function, whose steps are named after the public call that the user made.

    Ranks that meet in different calls are told of the public calls, not of our steps. Of nested ones the outermost
    counts. Not collective.
    """
    if _public.get() is not None:
        yield
        return
    token = _public.set(_PublicCall(name, site))
    try:
        yield
    finally:
        _public.reset(token)


def step_text(step: str) -> str:
    """Return a step in words, after the name of the public call that it belongs to."""
    public = _public.get()
    return step if public is None else f"{public.name} ({step})"


class Call:
    """What a rank is about to do, in words, and the number of the caller that does it; ranks compare both.

    `caller` counts the threads of a rank, see `Session.caller`. That of the thread that came first is 0. `public` names
    the public call of which this is a step; None if the user made this one.
    """

    __slots__ = ("caller", "failure", "public", "site", "text", "thread")

    def __init__(self, step: str, failure: dict[str, Any] | None = None) -> None:
        public = _public.get()
        self.public = None if public is None else public.name
        self.text = step_text(step)
        self.failure = failure
        self.site: str | None = None
        self.caller = 0
        self.thread: str | None = None  # its name, if that is what differs

    @classmethod
    def of_all(cls, text: str) -> Call:
        """Return a call that ranks make together from whatever public calls they are in."""
        call = cls(text)
        call.text = text
        return call

    @property
    def fingerprint(self) -> int:
        """A number that other words, and the same words of another caller, do not share."""
        return _fingerprint_of(self._compared)

    @property
    def mark(self) -> bytes:
        """The fingerprint as 8 bytes."""
        return mark_of(self._compared)

    @property
    def _compared(self) -> str:
        return self.text if not self.caller else f"{self.text} by caller {self.caller}"


@functools.lru_cache(maxsize=4096)
def mark_of(text: str) -> bytes:
    """8 bytes that other words do not share."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@functools.lru_cache(maxsize=4096)
def _fingerprint_of(text: str) -> int:
    return int.from_bytes(mark_of(text), "little")


_about: ContextVar[Callable[[], str] | None] = ContextVar("statexchange_about", default=None)


@contextlib.contextmanager
def about(what: Callable[[], str]) -> Iterator[None]:
    """A block whose calls work on what `what` names; it is asked only for an error. Not collective."""
    token = _about.set(what)
    try:
        yield
    finally:
        _about.reset(token)


def call_site() -> str:
    """File and line of the user's call, and what it is about: the innermost frame outside this package and torch.

    In a thread of autograd's own no frame is the user's; then it is that thread. A public call that goes on in a thread
    of ours says where it was made.
    """
    public = _public.get()
    if public is not None and public.site is not None:
        return public.site
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (the documented way to it)
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    thread = threading.current_thread().name
    site = f"thread {thread!r}" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    what = _about.get()
    return site if what is None else f"{site} ({what()})"


@functools.lru_cache(maxsize=4096)
def _is_internal(file: str) -> bool:
    if file == contextlib.__file__ or (file.startswith(_PACKAGE) and not file.startswith(_CALLERS)):
        return True
    torch = sys.modules.get("torch")  # its frames lie between the user's backward() and our hooks
    return torch is not None and file.startswith(os.path.dirname(str(torch.__file__)) + os.sep)


class _LookAt(Watch):
    """What the wait for one peer asks: AbandonedError, too, once some rank waits for all to hear of its failure.

    A peer that has closed its communicator sends nothing more; what it sent before has a moment to arrive.
    """

    def __init__(self, look: Look | None, peer: int) -> None:
        super().__init__(look)
        self._peer = peer
        self._left: float | None = None  # when the peer was first seen to have left

    def failed(self, doing: str) -> None:
        super().failed(doing)
        if self._look is not None and self._look.is_called():
            raise AbandonedError
        reason = self.departure_of(self._peer, doing)
        if reason is None:
            return
        now = time.monotonic()
        self._left = now if self._left is None else self._left
        if now - self._left > _ARRIVAL_S:
            raise reason

    def missing(self) -> tuple[int, ...]:
        return (self._peer,)


@contextlib.contextmanager
def making(look: Look | None, hosts: Sequence[str]) -> Iterator[None]:
    """A block that makes a group of ranks that `look` watches, on these `hosts`: it ends when one of them fails.

    Inside another such block, of the group from which the ranks come, that one's look and its ranks count.
    """
    if is_watched():
        yield
        return
    try:
        with watched(look):
            yield
    except PeerError as error:
        named = _named(error, look, hosts)
        if named is error:
            raise
        raise named from error


def _named(error: PeerError, look: Look | None, hosts: Sequence[str]) -> StateExchangeError:
    """The failure with its rank, which the transport may not report but another rank know, and its host."""
    known: StateExchangeError = error
    deadline = time.monotonic() + _NAMING_S
    while error.rank < 0 and look is not None and known is error and time.monotonic() < deadline:
        try:
            look.failed(error.phase)
            time.sleep(_NAP_S)
        except StateExchangeError as named:
            known = named
    if isinstance(known, PeerError) and known.rank >= 0 and known.host is None:
        return PeerError(known.rank, known.phase, known.cause, hosts[known.rank])
    return known


class Session:
    """One rank's part in what its group does together.

    `backend` moves tensors, `devices` those of GPUs, `page` or else `carrier` messages; `look` knows who has failed;
    `device` names the one on which this rank computes. `dead` is what every call raises once the group has failed,
    `settled` the error that all ranks have raised together last, after which the group goes on, unless a message from
    rank to rank was cut off by it.
    """

    def __init__(
        self,
        backend: Backend,
        carrier: Backend,
        page: ControlPage | None,
        look: Look | None,
        place: Place,
        timeout_s: float,
        *,
        check: bool = True,
        devices: Backend | None = None,
        device: str = "cpu",
    ) -> None:
        self.backend = backend
        self.carrier = carrier
        self.page = page
        self.look = look
        self.place = place
        self.timeout_s = timeout_s
        self.devices = devices
        self.device = device
        self.rank = place.rank
        self.world_size = len(place.nodes)
        self.dead: StateExchangeError | None = None
        self.settled: BaseException | None = None
        self._check = check
        self._failing: dict[str, Any] | None = None  # what this rank is about to bring to an agreement
        self._met: StateExchangeError | None = None  # the last error in which all ranks have met
        self._cut = False  # a message between two ranks was broken off, and may lie around half
        self._queue = WorkQueue(f"statexchange rank {place.rank}", skips=True)
        self._lines: dict[tuple[str, int], WorkQueue] = {}
        self.dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        self._turn = threading.Lock()  # held during a call, as two at once would take each other's messages
        self._holder = 0  # the thread that has it
        self._counting = threading.Lock()
        self.forget_callers()
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
        # A thread that is not here may have held a lock at the moment of the fork.
        self._turn, self._counting = threading.Lock(), threading.Lock()
        for line in [self._queue, *self._lines.values()]:
            line.disown(self.dead)

    def backend_for(self, device_type: str) -> Backend:
        """What moves tensors of this device."""
        if self.devices is not None and device_type == self.devices.device_type:
            return self.devices
        return self.backend

    def backend_of(self, tensor: Any) -> Backend:
        """Return the backend that moves `tensor`, which may be an array or a wrong argument."""
        if self.devices is None:
            return self.backend_for("cpu")
        return self.backend_for(tensor.device.type if hasattr(tensor, "is_cpu") else "cpu")

    @property
    def hierarchy(self) -> Backend | None:
        """What works within each host first and then between hosts, if there is such a backend."""
        return self.backend if self.backend.name == "hierarchical" else None

    # Callers

    def forget_callers(self) -> None:
        """Count callers from here on: the thread that has made this session need not be one. Not collective."""
        self._local = threading.local()  # not by thread id: ids are used again, by other threads on each rank
        self._callers = 0
        self._threads: dict[int, threading.Thread] = {}  # by their number, those that have not ended
        # Numbers of threads that have not made their first call. The first may be autograd's, which are not counted.
        self._newcomers: set[int] = {0} if self.world_size > 1 else set()

    def caller(self) -> int:
        """Return the number by which this thread's calls are matched: how many threads called here before it did.

        All threads of autograd's engine, which run hooks, are one caller. While only one other thread has called, they
        share its number: which thread runs a hook, and whether the last callback runs in the thread that called
        `backward`, differs from rank to rank.
        """
        try:
            number: int = self._local.caller
        except AttributeError:
            number = self._new_caller()
        return number

    def _new_caller(self) -> int:
        if _is_autograd_thread():
            return _AUTOGRAD if self._callers > 1 else 0
        with self._counting:
            number = self._local.caller = self._callers
            self._callers += 1
            if self.world_size > 1:
                if number > 0:
                    self._newcomers.add(number)
                self._threads = {known: thread for known, thread in self._threads.items() if thread.is_alive()}
                self._threads[number] = threading.current_thread()
        return number

    def _check_caller(self, call: Call, wait: Wait) -> None:
        """Raise DifferentCallsError, on all ranks, if a new caller is another thread on one rank than on another.

        Threads have names, which Python gives in the order in which they are made, with what they run. The name of
        caller n may differ, as ranks may have other threads besides; but if it is that of another caller elsewhere,
        two were counted in different orders. Of the first caller's rivals nothing may be known yet: where a thread of
        its name elsewhere might become one, it waits a moment for that thread to call.
        """
        number = call.caller
        callers = {known: thread.name for known, thread in self._threads.items()}
        account = [_process_token(os.getpid()), callers, [thread.name for thread in threading.enumerate()]]
        accounts = self._compare_callers(call, account, wait)
        is_ambiguous = False
        for process, callers, threads in accounts:
            own = callers.get(number)
            if own is None:
                continue
            elsewhere = [others for other_process, others, _ in accounts if other_process != process]
            names_of_others = {name for others in elsewhere for known, name in others.items() if known != number}
            if own in names_of_others or list(callers.values()).count(own) > 1:
                raise DifferentCallsError
            rivals = {others.get(number) for others in elsewhere} - {own, None}
            is_ambiguous = is_ambiguous or threads.count(own) > 1 or not rivals.isdisjoint(threads)
        if is_ambiguous and number == 0:
            time.sleep(_SECOND_CALLER_S)
            if any(self._compare_callers(call, self._callers > 1, wait)):
                raise DifferentCallsError
        self._newcomers.discard(number)
        call.thread = None

    def _compare_callers(self, call: Call, account: Any, wait: Wait) -> list[Any]:
        """What each rank says of its caller."""
        thread = self._threads.get(call.caller)
        call.thread = thread.name if thread is not None else None
        comparison = Call.of_all(f"{call.text}, the first of its thread")
        comparison.caller = call.caller
        return [values.decode(answer) for answer in self.messages(comparison, encoded(account), None, wait)]

    @contextlib.contextmanager
    def called_by(self, caller: int) -> Iterator[None]:
        """Have a thread of autograd's engine call as `caller` inside the block; other threads call as themselves."""
        if not _is_autograd_thread():
            yield
            return
        outer = getattr(self._local, "caller", None)
        self._local.caller = caller
        try:
            yield
        finally:
            if outer is None:
                del self._local.caller
            else:
                self._local.caller = outer

    def _take_turn(self, call: Call) -> None:
        """Wait for another thread's call to end. InvalidArgumentError if this thread itself is inside a call."""
        if self._holder == get_ident():
            raise InvalidArgumentError(
                f"{call.text} was called inside another call of this communicator, by a signal handler perhaps: "
                "use one of its own, from duplicate()"
            )
        self._turn.acquire()

    # Meetings

    def exchange(
        self, call: Call, payload: bytes, root: int | None = None, timeout_s: float | None = None
    ) -> list[bytes]:
        """Every rank's payload in rank order; on `root` only, if that is given. Collective."""
        self.raise_if_dead()
        if call.failure is not None and self.world_size > 1:
            self._failing = call.failure  # work under way may be the first to meet the others
            if self.look is not None:
                self.look.call_all()
        call.caller = self.caller()
        self._queue.drain()
        if self.world_size == 1:
            return [payload]

        def job() -> list[bytes]:
            wait = self._begin(call, timeout_s)
            answers = self.messages(call, payload, root, wait)
            if self.page is None:
                self._pass()
            return answers

        try:
            return self._in_turn(call, job)
        finally:
            if call.failure is not None:
                self._failing = None

    def _in_turn(self, call: Call, job: Callable[[], T], *, settles: bool = True) -> T:
        """`guarded`, while no other thread is inside a call."""
        if not self._turn.acquire(False):
            self._take_turn(call)
        self._holder = get_ident()
        try:
            return self.guarded(call, job, settles=settles)
        finally:
            self._holder = 0
            self._turn.release()

    def messages(self, call: Call, payload: bytes, root: int | None, wait: Wait) -> list[bytes]:
        """As `exchange`, inside a collective; DifferentCallsError, on all ranks, where they do not call the same."""
        if self.page is not None:
            return self.page.exchange(payload, root, call.fingerprint, wait)
        answers = self.carrier.exchange(call.mark + payload, wait)
        if any(answer[:8] != call.mark for answer in answers):
            raise DifferentCallsError
        return [answer[8:] for answer in answers] if root is None or root == self.rank else []

    def _meet(self, call: Call, location: int, wait: Wait) -> Sequence[int]:
        """The entry of a collective on tensors."""
        if self.page is not None and (self._check or self.backend.meets):
            return self.page.meet(call.fingerprint, location, wait)
        if self._check:
            self.messages(call, b"", None, wait)
        return ()

    def wait_for(self, call: Call, timeout_s: float | None = None) -> Wait:
        """The wait of a call: it asks who has failed, and how to meet."""
        if self.look is not None:
            self.look.entered(call.text)
        seconds = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        return Wait(seconds, call.text, self.look, functools.partial(self._meet, call))

    def _begin(self, call: Call, timeout_s: float | None = None) -> Wait:
        """The wait of a call whose turn has come, once a new caller is known to all."""
        self.raise_if_dead()
        wait = self.wait_for(call, timeout_s)
        if self._newcomers and call.caller in self._newcomers:
            self._check_caller(call, wait)
        return wait

    def _pass(self) -> None:
        """The end of a call where there is no page: an error if the ranks have given it up."""
        if self.look is not None:
            self.look.passed()

    # Order

    def collective(self, call: Call, backend: Backend, body: Callable[[Wait], T], async_op: bool) -> T | Work:
        """Run `body` after the meeting of all ranks, in the order of calls. Its caller has found the group alive."""
        if self.devices is not None:
            call.text += f" on {backend.device_type}"

        def job() -> T:
            wait = self._begin(call)
            if not backend.meets and self.world_size > 1:
                wait.enter()
            result = body(wait)
            if self.page is None:
                self._pass()
            elif not backend.meets:
                self.page.sync(wait)  # the page has seen all ranks enter, but not that each has its result
            return result

        try:
            call.caller = self._local.caller  # as `caller()`, which costs a small call too much
        except AttributeError:
            call.caller = self._new_caller()
        if async_op:
            call.site = call_site()
            return self._queue.submit(
                call.text, self._for_caller(backend, lambda: self._in_turn(call, job, settles=False))
            )
        if self._queue.has_begun:
            self._queue.drain()
        return self._in_turn(call, job)

    def refuse(self, verb: str, refusal: Exception) -> NoReturn:
        """Raise what is wrong with this rank's arguments, on all ranks: others may have called in earnest.

        What Python raises where an argument has another type or value than it should is an InvalidArgumentError.
        """
        if isinstance(refusal, _OF_ARGUMENTS) and not isinstance(refusal, StateExchangeError):
            cause, refusal = refusal, InvalidArgumentError(f"{verb}: {refusal}", rank=self.rank)
            refusal.__cause__ = cause
        if self.world_size > 1:
            step = f"{verb}, refused: {refusal}"
            self.exchange(Call(step, failure=self.record(refusal, step_text(step))), b"")
        raise refusal

    def record(self, error: BaseException, phase: str) -> dict[str, Any]:
        """What carries an error of this rank to the others."""
        return to_record(error, self.rank, phase, self.place.hosts[self.rank])

    def _for_caller(self, backend: Backend, job: Callable[[], T]) -> Callable[[], T]:
        caller = backend.as_caller()

        def run() -> T:
            with caller:
                return job()

        return run

    def deliver(
        self, backend: Backend, verb: str, peer: int, doing: str, body: Callable[[Wait], T], async_op: bool
    ) -> T | Work:
        """Run `body` after what goes to, or comes from, `peer` already; in a line of its own, so that a send does not
        hold up the receive that the peer waits for."""
        line = self._lines.setdefault((verb, peer), WorkQueue(f"statexchange {verb} {peer}"))
        call = Call(f"{doing} ({'to' if verb == 'send' else 'from'} rank {peer})")

        def job() -> T:
            self.raise_if_dead()
            try:
                return body(Wait(self.timeout_s, call.text, _LookAt(self.look, peer)))
            except AbandonedError:
                self._cut = True
                if self._met is not None and not (self.look is not None and self.look.is_called()):
                    self.fail(call, self._met)  # another thread has met the others already
                raise

        def guarded() -> T:
            with line.turn:
                return self.guarded(call, job, settles=False)

        if async_op:
            return line.submit(call.text, self._for_caller(backend, guarded), lambda: self._follow_the_call(call))
        line.drain()
        try:
            return guarded()
        except AbandonedError:
            self._follow_the_call(call)

    def _follow_the_call(self, call: Call) -> NoReturn:
        """`call` was broken off, since a rank calls all to hear of its failure: hear it, and raise it."""
        if self.look is not None and self.look.is_called():
            self.exchange(Call.of_all(f"{call.text}, broken off"), b"")
        raise self.dead or self._met or AbandonedError

    def drain(self) -> None:
        """Return when all work under way is done; its errors are its own. Not collective."""
        for line in [self._queue, *self._lines.values()]:
            line.drain()

    def wait_all(self) -> None:
        """As `drain`, and raise the first error that nobody has waited for. Not collective."""
        self.raise_if_inherited()
        self.drain()
        for line in [self._queue, *self._lines.values()]:
            line.raise_lost()

    def check_root(self, root: Any) -> None:
        """InvalidArgumentError unless `root` is a rank of this group. Not collective."""
        if not hasattr(root, "__index__") or not 0 <= operator.index(root) < self.world_size:
            what = f"root {root!r} is not a rank of this communicator of {self.world_size}"
            raise InvalidArgumentError(what, rank=self.rank)

    # Failure

    def raise_if_inherited(self) -> None:
        """ForkedError in a child that was forked from the rank."""
        if self.is_inherited:
            self.raise_if_dead()

    def raise_if_dead(self) -> None:
        """Raise what this group has failed of."""
        if self.dead is not None:
            raise self.dead.with_traceback(None)  # else each time adds to it

    def guarded(self, call: Call, body: Callable[[], T], *, settles: bool = True) -> T:
        """The value of `body`, whose failure on this rank reaches all.

        An error in which all ranks have met is `settled`, unless it is told later, to who waits for its work.
        """
        try:
            result = body()
        except DifferentCallsError:
            error = self.guarded(call, lambda: self._explanation(call), settles=settles)
            self._settle(call, error, settles)
            raise error from None
        except _MET as error:
            self._settle(call, error, settles)
            raise
        except AbandonedError:
            raise  # nothing has failed here
        except BaseException as error:
            if error is self.settled or error is self.dead:
                raise
            self.fail(call, error)
            if isinstance(error, StateExchangeError) and error is not self.dead:
                raise (self.dead or error) from error
            raise
        if settles:
            self.settled = None  # all have gone on since
        return result

    def _settle(self, call: Call, error: StateExchangeError, settles: bool) -> None:
        self._met = error
        self.settled = error if settles else None
        if self._cut:
            self.fail(call, error)

    def _explanation(self, call: Call) -> StateExchangeError:
        """Tell each other what all were about to do; the error that all are to raise."""
        failing = call.failure or self._failing
        told: dict[str, Any] = {"text": call.text, "site": call.site or call_site(), "failure": failing}
        told |= {"caller": call.caller, "thread": call.thread, "public": call.public}
        explaining = Call.of_all("an explanation")
        answers = self.messages(explaining, encoded(told), None, self.wait_for(explaining))
        accounts = [values.decode(answer) for answer in answers]
        failure = next((account["failure"] for account in accounts if account["failure"] is not None), None)
        threads = {account["thread"] for account in accounts}  # that differ, or whose calls of one text do not meet
        is_same = len({account["text"] for account in accounts}) == 1
        confused = len(threads) > 1 or (is_same and threads != {None})
        several = len({account["caller"] for account in accounts}) > 1 or confused
        if len({account["public"] for account in accounts}) > 1:  # then their steps say nothing to who made the calls
            for account in accounts:
                account["text"] = account["public"] or account["text"]
        lines = [_line(rank, account, several) for rank, account in enumerate(accounts)]
        hint = ". Several threads use this communicator: give each its own, from duplicate()" if several else ""
        if confused:
            hint += "; threads that begin at once must have names of their own, the same on all ranks"
        different = MismatchError("ranks met in different calls: " + "; ".join(lines) + hint)
        return from_record(failure) if failure is not None else different

    def fail(self, call: Call, error: BaseException) -> None:
        """Nothing works here any more: say so to the others, and remember it."""
        if isinstance(error, PeerError):
            error = _named(error, self.look, self.place.hosts)
        self.dead = error if isinstance(error, StateExchangeError) else from_record(self.record(error, call.text))
        if self.page is not None:
            self.page.leave(self.dead)
        self.backend.leave(self.dead)
        if self.look is not None:
            self.look.tell(self.dead)

    def making(self) -> contextlib.AbstractContextManager[None]:
        """A block that makes a group of ranks of this one: it ends when one of this group's ranks fails."""
        return making(self.look, self.place.hosts)

    def group_of(self, ranks: Sequence[int]) -> Backend:
        """A carrier for `ranks`, in that order; MismatchError on all if they give several. Collective over them."""
        members = sorted(ranks)
        if len(members) == self.world_size:
            self.exchange(Call(f"subset({list(ranks)})"), b"")
            group = self.carrier
        else:
            self.raise_if_dead()
            self.drain()
            group = self.carrier.subset(members, self.timeout_s)
            self._compare_orders(group, ranks, members)
        if members == list(ranks):
            return group
        return group.subset([members.index(rank) for rank in ranks], self.timeout_s)

    def _compare_orders(self, group: Backend, ranks: Sequence[int], members: Sequence[int]) -> None:
        wait = Wait(self.timeout_s, f"the making of a subset of ranks {list(members)}")
        answers = group.exchange(encoded([list(ranks), call_site()]), wait)
        orders = [values.decode(answer) for answer in answers]
        if any(order != list(ranks) for order, _ in orders):
            lines = [f"rank {r} called subset({o}) at {site}" for r, (o, site) in zip(members, orders, strict=True)]
            raise MismatchError("ranks met in different calls: " + "; ".join(lines))

    def raise_first(self, call: Call, records: Sequence[dict[str, Any] | None], cause: Exception | None) -> None:
        """Raise the failure of the lowest rank that has one."""
        failure = next((record for record in records if record is not None), None)
        if failure is not None:
            known = from_record(failure)
            self._settle(call, known, settles=True)
            if type(known) is type(cause) and isinstance(cause, StateExchangeError):
                raise known.with_traceback(cause.__traceback__) from cause.__cause__  # the same one, told once
            raise known from cause

    def close(self, error: BaseException | None) -> None:
        """Leave: peers that still wait for this rank raise PeerError, with `error` as its cause. Not collective."""
        forks.forget(self)
        public = _public.get()
        phase, ended = ("its own code", "this rank's code") if public is None else (public.name, public.name)
        known = None if error is None else from_record(self.record(error, phase))
        if self.page is not None:
            self.page.leave(known)
        self.backend.leave(known)
        if self.look is not None and known is not None:
            self.look.tell(known)
        if self.dead is None:
            since = "" if error is None else f" since {type(error).__name__} ended {ended}"
            self.dead = closed_error(self.rank, since)
        for line in [self._queue, *self._lines.values()]:
            line.close(_CLOSE_S)
        if self.look is not None:
            self.look.close()
        self.backend.close()


class FlatSession(Session):
    """`whole` itself, its failures and the order of its calls, whose tensors move over the carrier."""

    def __init__(self, whole: Session) -> None:
        self.__dict__ = whole.__dict__  # one state: what happens here has happened there

    def backend_for(self, device_type: str) -> Backend:
        """What moves tensors of this device between any two ranks."""
        backend = super().backend_for(device_type)
        return self.carrier if backend is self.backend else backend

    @property
    def hierarchy(self) -> Backend | None:
        """None: all ranks are alike."""
        return None

    def collective(self, call: Call, backend: Backend, body: Callable[[Wait], T], async_op: bool) -> T | Work:
        """As a session's; it is another call than that of `whole`."""
        call.text += ", flat"
        return super().collective(call, backend, body, async_op)


def _line(rank: int, account: Mapping[str, Any], by_caller: bool) -> str:
    """What a rank was about to do, for a message; with the thread that did it, if that matters."""
    thread = "autograd's threads" if account["caller"] == _AUTOGRAD else f"its thread {account['caller']}"
    if account["thread"]:
        thread += f" ({account['thread']})"
    return f"rank {rank} called {account['text']} at {account['site']}" + (f" in {thread}" if by_caller else "")


@functools.cache
def _process_token(pid: int) -> str:  # noqa: ARG001 (a forked child has another)
    """Return a token of this process: ranks that are threads of one process have all their names there."""
    return secrets.token_hex(8)


def _is_autograd_thread() -> bool:
    """Whether this is a thread of autograd's engine, and not one of Python's in which `backward` was called."""
    torch = sys.modules.get("torch")
    if torch is None or torch._C._current_graph_task_id() == -1:  # noqa: SLF001 (torch has no other way)
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 (nor has threading)


def encoded(obj: Any) -> bytes:
    """A JSON value as bytes."""
    return values.encode(obj).encode()
