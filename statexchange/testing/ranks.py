"""The launcher: run a function on every rank of a small world, as threads or processes, within a time limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, overload

from statexchange.errors import InvalidArgumentError, StateExchangeError
from statexchange.settings import check_timeout
from statexchange.testing.worlds import LAUNCH_METHODS, World, open_world

_START_S = 60.0  # for all ranks to import their function: torch takes long on a busy machine
_GRACE_S = 2.0  # for the peers of a failed rank to end by themselves
_EXIT_S = 30.0  # for a process to end after its work: torch and MPI take long on a busy machine


Value: TypeAlias = Any
"""What a rank's function takes or returns; a JSON value if the rank is a process."""
OnMessage = Callable[[int, Value], None]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The end of one rank.

    `state` is "ok", "raised" (`error` is the exception's type name), "exited" (its process ended without an outcome)
    or "running" (at its time limit; `traceback` is its stack). `exit_code` is negative for a signal, and None for
    threads and for processes that the launcher ended or keeps. Under mpiexec it is that of the whole job.
    """

    rank: int
    state: str
    value: Value = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.state}"
        if self.error:
            text += f" {self.error}"
        if self.message:
            text += f": {self.message}"
        return text


class RankOutcomes(tuple[RankOutcome, ...]):
    """The outcomes of all ranks, in rank order.

    `values`, `errors`, `messages`, `tracebacks` and `exit_codes` are dictionaries by rank, without ranks that have no
    such value.
    """

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """Whether every rank returned, and no process crashed at its exit."""
        return all(outcome.state == "ok" for outcome in self)

    @property
    def values(self) -> dict[int, Value]:
        """The values that the ranks returned, by rank, without ranks that failed."""
        return {outcome.rank: outcome.value for outcome in self if outcome.state == "ok"}

    @property
    def errors(self) -> dict[int, str]:
        """The type names of the exceptions that were raised."""
        return {outcome.rank: outcome.error for outcome in self if outcome.error is not None}

    @property
    def messages(self) -> dict[int, str]:
        """The messages of all ranks that did not end well."""
        return {outcome.rank: outcome.message for outcome in self if outcome.state != "ok"}

    @property
    def tracebacks(self) -> dict[int, str]:
        """The tracebacks of exceptions, and the stacks of ranks that were running or crashed."""
        return {outcome.rank: outcome.traceback for outcome in self if outcome.traceback}

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes of all ranks."""
        return {outcome.rank: outcome.exit_code for outcome in self}

    def __str__(self) -> str:
        stacks = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in self.tracebacks.items()]
        return "\n".join([*map(str, self), *stacks])


class RankFailure(StateExchangeError, AssertionError):  # noqa: N818 - it is what a test fails with
    """Ranks failed; the message describes every rank, and so do `outcomes` and the dictionaries by rank."""

    def __init__(self, message: str, *, outcomes: Iterable[RankOutcome] = (), **about: Any) -> None:
        super().__init__(message, **about)
        self.outcomes = RankOutcomes(outcomes)
        self.errors = self.outcomes.errors
        self.messages = self.outcomes.messages
        self.tracebacks = self.outcomes.tracebacks
        self.exit_codes = self.outcomes.exit_codes

    def __reduce__(self) -> tuple[Any, ...]:
        # The base's has what all errors have. The dictionaries are made again from the outcomes.
        rebuild, (cls, message, about) = super().__reduce__()
        return rebuild, (cls, message, {**about, "outcomes": tuple(self.outcomes)})


@overload
def run_ranks(
    fn: Callable[..., Value],
    world_size: int,
    *,
    backend: str = ...,
    args: tuple[Value, ...] = ...,
    timeout_s: float = ...,
    on_message: OnMessage | None = ...,
    allow_failure: Literal[False] = ...,
    reuse: bool = ...,
) -> list[Value]: ...
@overload
def run_ranks(
    fn: Callable[..., Value],
    world_size: int,
    *,
    backend: str = ...,
    args: tuple[Value, ...] = ...,
    timeout_s: float = ...,
    on_message: OnMessage | None = ...,
    allow_failure: Literal[True],
    reuse: bool = ...,
) -> RankOutcomes: ...
def run_ranks(
    fn: Callable[..., Value],
    world_size: int,
    *,
    backend: str = "threads",
    args: tuple[Value, ...] = (),
    timeout_s: float = 60.0,
    on_message: OnMessage | None = None,
    allow_failure: bool = False,
    reuse: bool = False,
) -> list[Value] | RankOutcomes:
    """Run ``fn(*args)`` on `world_size` ranks and return their results, in rank order.

    Not collective; blocks until all ranks have ended, and leaves no process behind unless `reuse` is given.

    Args:
        fn: the function; for processes it must be importable by name, and return JSON values. Values that it gives to
            `report` reach `on_message` at once.
        world_size: number of ranks.
        backend: "threads" of this process, each with a communicator of its own as its default; "processes", which find
            RANK and WORLD_SIZE in their environment; "gloo", the same with torch.distributed's default group; "mpi",
            under mpiexec.
        args: the arguments; JSON values for processes.
        timeout_s: limit from the time at which all ranks have imported `fn`. For that they get a minute, because on a
            busy machine the import of torch takes longer than most tests.
        on_message: called with (rank, value) for each `report`.
        allow_failure: return the outcomes instead of raising. After a failure the other ranks get all of `timeout_s`,
            and not two seconds, to end by themselves.
        reuse: let the processes serve several calls with `reuse`, until this process ends. It saves the launch, which
            takes seconds under mpiexec. Communicators, process groups, environment, working directory and torch's seed
            are restored in between; a world in which anything failed, or a rank left a thread, a child process, a
            socket or other state behind, is not used again. The call does not wait for the ranks to exit, so there are
            no exit codes. `fn` must not depend on a new process, nor change variables of modules.

    Returns:
        The results in rank order, or with `allow_failure` the outcomes.

    Raises:
        RankFailure: a rank failed; it has the outcome of each rank.
        InvalidArgumentError: an argument is not accepted.
    """
    if backend not in LAUNCH_METHODS:
        raise InvalidArgumentError(f"no backend {backend!r}: use one of {', '.join(LAUNCH_METHODS)}")
    if world_size < 1:
        raise InvalidArgumentError("a world has at least one rank", expected="world_size >= 1", found=world_size)
    check_timeout(timeout_s)
    world = open_world(backend, fn, args, world_size, reuse=reuse)
    try:
        world.start()
        outcomes = _watch(world, world_size, timeout_s, on_message, full_timeout=allow_failure)
    finally:
        world.close()
    if allow_failure:
        return outcomes
    if outcomes.ok:
        return [outcome.value for outcome in outcomes]
    head = f"{len(outcomes.messages)} of {world_size} ranks failed on {backend}"
    raise RankFailure(f"{head}\n{outcomes}", outcomes=outcomes)


def _watch(
    world: World, world_size: int, timeout_s: float, on_message: OnMessage | None, *, full_timeout: bool
) -> RankOutcomes:
    """Collect the outcomes of all ranks; end those that still run at the time limit.

    After a failure the other ranks get `_GRACE_S` more, or with `full_timeout` all of `timeout_s`.
    """
    ends: dict[int, RankOutcome] = {}
    ready: set[int] = set()
    has_failed = False
    limit = f"was not ready within {_START_S:g} s"
    deadline = time.monotonic() + _START_S
    while len(ends) < world_size and (left_s := deadline - time.monotonic()) > 0:
        for rank, kind, payload in world.events(left_s):
            ready.add(rank)  # also one that has ended: the others need not wait for it to begin
            if kind == "ready":
                # After a failure the grace period runs already.
                if len(ready) == world_size and not has_failed:
                    limit, deadline = f"did not finish within {timeout_s:g} s", time.monotonic() + timeout_s
            elif kind == "report":
                if on_message is not None:
                    on_message(rank, payload)
            elif rank not in ends:  # a process that has sent its outcome also ends its connection
                ends[rank] = _outcome(rank, kind, payload)
                if kind == "ok":
                    continue
                has_failed = True
                grace_s, since = timeout_s, ""
                if not full_timeout:
                    grace_s, since = _GRACE_S, f" of the failure of rank {rank}"
                if time.monotonic() + grace_s < deadline:
                    limit, deadline = f"did not finish within {grace_s:g} s{since}", time.monotonic() + grace_s
    running = set(range(world_size)) - ends.keys()
    if not has_failed and not running and world.keep():
        return RankOutcomes(map(ends.__getitem__, range(world_size)))
    for rank in sorted(running):  # the stacks of all first, as the death of one would change those of its peers
        ends[rank] = _running(world, rank, limit)
    world.kill(running)
    world.release()
    for rank in range(world_size):
        if rank not in running:
            ends[rank] = _end(world, ends[rank])
    return RankOutcomes(map(ends.__getitem__, range(world_size)))


def _outcome(rank: int, kind: str, payload: Value) -> RankOutcome:
    if kind == "raised":
        return RankOutcome(rank, kind, None, *payload)
    return RankOutcome(rank, kind, payload)


def _running(world: World, rank: int, why: str) -> RankOutcome:
    innermost, stack = world.stack(rank)
    return RankOutcome(rank, "running", message=f"{why}, still running in {innermost}", traceback=stack)


def _end(world: World, end: RankOutcome) -> RankOutcome:
    """The final outcome, once the process has ended: a crash at exit is a failure even if the task succeeded."""
    if not world.ended(end.rank, _EXIT_S) and end.state == "ok":
        return _running(world, end.rank, "did its work but did not exit")
    code = world.exit_code(end.rank)
    if end.state == "raised" or (end.state == "ok" and not code):
        return replace(end, exit_code=code)
    message = _exit_text(code)
    if end.state == "ok":
        message = f"returned, then {message}"
    _, stack = world.stack(end.rank)
    return RankOutcome(end.rank, "exited", message=message, traceback=stack, exit_code=code)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "ended without an outcome"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
