"""What a backend is: how ranks move bytes and reduce tensors, and how they wait without waiting for ever.

A backend only has to bring `exchange` and `subset` (and `send` and `recv`, if it can): every collective has a plain
implementation by `exchange` here. What it overrides, it overrides for speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from statexchange.errors import (
    InvalidArgumentError,
    OutcomeUnknownError,
    StallError,
    StateExchangeError,
    UnsupportedError,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "AbandonedError",
    "Backend",
    "Between",
    "Finish",
    "Leaders",
    "Look",
    "Wait",
    "Watch",
    "check_ranks",
    "is_watched",
    "watched",
    "yield_core",
]

_SPINS = 100
_LAST_NAP_S = 2e-3
_YIELDING_S = 2e-4
_LOOKS = 16  # naps are 1/16 of the time waited, by which a wait may last too long
_LOOK_PERIOD_S = 0.05
_ON_ITS_WAY_S = 5.0  # time for data that was sent already to arrive


# Through ctypes, since os.sched_yield keeps the interpreter locked, in which another thread may want to go on.
yield_core: Callable[[], object] = (
    ctypes.CDLL(None).sched_yield if os.name == "posix" else functools.partial(time.sleep, 0)
)


class AbandonedError(Exception):
    """Raised inside a trip when another rank has failed: come to the agreement, which says who and why."""


class Look(Protocol):
    """What a wait asks while it waits."""

    def failed(self, doing: str) -> None:
        """Raise PeerError if a rank is known to have failed; `doing` is what this rank waits for."""

    def departure_of(self, rank: int, doing: str) -> StateExchangeError | None:
        """Why `rank` will not come to `doing`; None if it may come. What it sent before it left may yet arrive."""

    def missing(self) -> tuple[int, ...]:
        """The ranks that are known not to have come this far; () if nothing is known."""

    def close(self) -> None:
        """This rank leaves."""

    def entered(self, doing: str) -> None:
        """This rank begins its next call."""

    def passed(self) -> None:
        """This rank has all that it needs of its call; an error if the ranks have given it up meanwhile."""

    def give_up(self, error: StateExchangeError) -> None:
        """Raise `error`, which ends this rank's wait, unless another rank has completed the call: see `outcome`."""

    def tell(self, error: StateExchangeError) -> None:
        """Let the others know that this communicator has failed."""

    def call_all(self) -> None:
        """Have ranks that wait for single ones come to the next collective, in which all hear of a failure."""

    def is_called(self) -> bool:
        """Whether a rank has called all to a collective to which this one has not come yet."""

    def progress(self) -> None:
        """This rank moves bytes: whoever waits for it may go on waiting."""

    def moves(self) -> int:
        """A number that grows while any rank says that it moves bytes."""


class Watch:
    """A look that tells of another look's failures, and does nothing else for it."""

    def __init__(self, look: Look | None) -> None:
        self._look = look

    def failed(self, doing: str) -> None:
        """Raise what the other look knows."""
        if self._look is not None:
            self._look.failed(doing)

    def departure_of(self, rank: int, doing: str) -> StateExchangeError | None:
        """What the other look knows."""
        return None if self._look is None else self._look.departure_of(rank, doing)

    def missing(self) -> tuple[int, ...]:
        """Nobody: the other look counts other calls."""
        return ()

    def entered(self, doing: str) -> None:
        """Nothing: this is no call of the other look's ranks."""

    def passed(self) -> None:
        """Nothing."""

    def give_up(self, error: StateExchangeError) -> None:
        """Raise `error`: no other rank's end of the call is known."""
        raise error

    def tell(self, error: StateExchangeError) -> None:
        """Nothing: whoever runs the call tells the others."""

    def call_all(self) -> None:
        """Nothing."""

    def is_called(self) -> bool:
        """No."""
        return False

    def progress(self) -> None:
        """Nothing."""

    def moves(self) -> int:
        """As often as the other look says."""
        return 0 if self._look is None else self._look.moves()

    def close(self) -> None:
        """Nothing: it is somebody else's."""


_watched: ContextVar[Look | None] = ContextVar("statexchange_watched", default=None)


@contextlib.contextmanager
def watched(look: Look | None) -> Iterator[None]:
    """A block in which waits that have no look of their own end when `look` knows of a failure. Not collective.

    For the making of groups: their ranks cannot see each other yet, but those of the group that they come from can.
    """
    token = _watched.set(None if look is None else Watch(look))
    try:
        yield
    finally:
        _watched.reset(token)


def is_watched() -> bool:
    """Whether this is inside a `watched` block whose look knows of failures. Not collective."""
    return _watched.get() is not None


class Wait:
    """A wait for peers: `doing` names what for, `timeout_s` how long, `look` tells whether it is still worth it. Its
    deadline is put off while ranks say that they move bytes.

    `enter` is the meeting of all ranks before a collective, in which they compare what they are about to do. A backend
    may call it at the moment that suits it; otherwise it has been called before. `location` is a number that this rank
    wants the others to know; those of all ranks come back.
    """

    __slots__ = ("_completed", "_deadline", "_enter", "_looked", "_moves", "doing", "look", "timeout_s")

    def __init__(
        self,
        timeout_s: float,
        doing: str,
        look: Look | None = None,
        enter: Callable[[int, Wait], Sequence[int]] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.doing = doing
        self.look = _watched.get() if look is None else look
        self._enter = enter
        self._deadline = time.monotonic() + timeout_s
        self._looked = 0.0
        self._moves = -1
        self._completed = False  # on another rank, so that what this one waits for is on its way

    def enter(self, location: int = 0) -> Sequence[int]:
        """Meet the other ranks; an error if they are about to do something else."""
        return () if self._enter is None else self._enter(location, self)

    def poll(self) -> None:
        """To be called between two looks at what is waited for: PeerError or, past the deadline, StallError."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_PERIOD_S:
            self._looked = now
            if self.look is not None and not self._completed:
                try:
                    self.look.failed(self.doing)
                except StateExchangeError as error:
                    self._give_up(error)
            moves = self.look.moves() if self.look is not None else self._moves
            if moves != self._moves:
                self._moves, self._deadline = moves, now + self.timeout_s
        if now > self._deadline:
            missing = self.look.missing() if self.look is not None else ()
            who = f"ranks {list(missing)}" if missing else "not all ranks"
            verb = "did not reach" if missing else "reached"
            message = f"{who} {verb} {self.doing} in {self.timeout_s:g} s"
            if self._completed:
                message = f"another rank has completed {self.doing}, but not all that it sent has arrived"
                raise OutcomeUnknownError(message)
            self._give_up(StallError(message, missing=missing, rank=missing[0] if missing else None))

    def _give_up(self, error: StateExchangeError) -> None:
        """Raise `error`, unless another rank has completed the call: then wait for what is on its way."""
        if self.look is None or self._completed:
            raise error
        self.look.give_up(error)
        self._completed = True
        self._deadline = time.monotonic() + _ON_ITS_WAY_S

    def until(self, done: Callable[[], object]) -> None:
        """Return once `done()` is true: look often at first, then yield, then nap in proportion to the time waited.

        Yields come first, as a core that sleeps may take a tenth of a millisecond to wake up; few of them, since
        another thread or rank may want to compute on this core.
        """
        for _ in range(_SPINS):
            if done():
                return
        began = now = time.monotonic()
        while now - began < _YIELDING_S:
            if done():
                return
            yield_core()
            now = time.monotonic()
        while not done():
            self.poll()
            time.sleep(min((time.monotonic() - began) / _LOOKS, _LAST_NAP_S))


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of a reduced sum: it is divided by `divisor`, then multiplied by `scale`."""

    divisor: int = 1
    scale: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """In place."""
        if tensor.is_complex():  # times a number as a whole, infinities would become NaN
            import torch

            tensor = torch.view_as_real(tensor)
        if self.divisor != 1:
            tensor.div_(self.divisor)
        if self.scale != 1:
            tensor.mul_(self.scale)


class Leaders:
    """The first ranks of all hosts, as one of them sees them while a tensor goes `through_leaders`.

    `rank` is this one among them, `counts` the number of ranks that each of them leads.
    """

    def __init__(self, backend: Backend, wait: Wait, counts: Sequence[int]) -> None:
        self.rank = backend.rank
        self.counts = list(counts)
        self._backend = backend
        self._wait = wait

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send each leader its tensor, which may be empty; return those received, of the sizes sent. Collective.

        All tensors of this leader have one dtype and one dimension; what two send each other has one size.
        """
        import torch

        data = torch.cat(list(tensors))
        into = torch.empty_like(data)
        sizes = [tensor.nbytes for tensor in tensors]
        self._backend.all_to_all(data.view(torch.uint8), sizes, into.view(torch.uint8), sizes, self._wait)
        return list(torch.split(into, [tensor.numel() for tensor in tensors]))

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes, equally many, of all leaders. Collective."""
        into = data.new_empty(len(self.counts) * data.numel())
        self._backend.all_gather(data, into, self._wait)
        return list(into.view(len(self.counts), -1))


Between: TypeAlias = Callable[[Leaders, "torch.Tensor"], None]
"""What leaders do with the sums of their hosts' tensors, in place. Collective over them."""


class Backend(ABC):
    """How ranks exchange messages and tensors. An implementation never blocks without polling its `wait`.

    Tensors are one-dimensional and contiguous, of the same length and dtype on all ranks unless said otherwise, and on
    the device that `device_type` names; moves get them as uint8. Operations are "sum", "min", "max" and "prod". When a
    method raises, the tensors and requests that the transport may still touch must be kept alive.
    """

    name: str
    rank: int
    world_size: int
    device_type: str = "cpu"
    meets: bool = False
    """Whether its tensor methods call `wait.enter` themselves."""

    @functools.cached_property
    def reductions(self) -> dict[object, Any]:
        """What `reduction` has found out about this backend."""
        return {}

    @abstractmethod
    def exchange(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Every rank's payload, of any length, in rank order. Collective."""

    @abstractmethod
    def subset(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """A new backend over `ranks` of this one, in that order. Collective over those ranks only."""

    def transport(self, timeout_s: float) -> Backend:  # noqa: ARG002 (most have nothing to set up)
        """What moves tensors between hosts, where this backend only serves to meet; itself if it does. Collective."""
        return self

    def as_caller(self) -> contextlib.AbstractContextManager[Any]:
        """What another thread has to enter to work for this one: its inference mode, say. Not collective."""
        import torch

        return torch.inference_mode(torch.is_inference_mode_enabled())

    def leave(self, error: BaseException | None) -> None:  # noqa: B027 (most can tell nobody)
        """Tell those who wait for this rank inside a collective that it will not come, and why. Not collective."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free what the backend holds. Not collective."""

    def empty(self, nbytes: int, wait: Wait) -> torch.Tensor:  # noqa: ARG002 (shared memory has to be announced)
        """`nbytes` (> 0) of uint8 memory in which this backend reduces fastest. Collective, with equal `nbytes`."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Whether its reductions are right for every value of `dtype`, NaN and half precision's ranges among them.

        Whatever it says, `all_reduce` must be right for float32, float64, int64 and uint8 without NaN and overflow;
        other cells are then reduced by way of these.
        """
        from statexchange.comm import reduction

        return reduction.reduces_locally(op, dtype)

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """`tensor` becomes the reduction over all ranks. Collective."""
        from statexchange.comm import reduction

        parts = self.exchange(reduction.to_bytes(tensor), wait)
        tensors = [reduction.of_bytes(part, tensor.dtype).to(tensor.device) for part in parts]
        reduction.reduce_parts(tensor, tensors, op, finish)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """As `all_reduce`, on `root` only; the others' `tensor` stays as it is. Collective."""
        result = tensor if self.rank == root else tensor.clone()
        self.all_reduce(result, op, finish, wait)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """`into` becomes this rank's part of the reduction: `tensor` holds `world_size` parts. Collective."""
        result = tensor.clone()
        self.all_reduce(result, op, finish, wait)
        into.copy_(result.view(self.world_size, -1)[self.rank])

    def through_leaders(self, tensor: torch.Tensor, between: Between, wait: Wait) -> None:
        """Sum `tensor` on the first rank of each host, let `between` change it there, give it to the host. Collective.

        Without a hierarchy each rank leads itself alone.
        """
        between(Leaders(self, wait, [1] * self.world_size), tensor)

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """`data` becomes root's. Collective."""
        from statexchange.comm import reduction

        parts = self.exchange(reduction.to_bytes(data) if self.rank == root else b"", wait)
        if self.rank != root:
            data.copy_(reduction.of_bytes(parts[root], data.dtype))

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """`into` becomes every rank's `data`, in rank order. Collective."""
        from statexchange.comm import reduction

        for part, answer in zip(
            into.view(self.world_size, -1), self.exchange(reduction.to_bytes(data), wait), strict=True
        ):
            part.copy_(reduction.of_bytes(answer, data.dtype))

    def gather(self, data: torch.Tensor, into: torch.Tensor | None, root: int, wait: Wait) -> None:
        """`into`, given on `root` only, becomes every rank's `data`, in rank order. Collective."""
        sizes = [data.numel() if rank == root else 0 for rank in range(self.world_size)]
        into = data.new_empty(0) if into is None else into
        self.all_to_all(data, sizes, into, [into.numel() // self.world_size] * self.world_size, wait)

    def scatter(
        self, data: torch.Tensor | None, sizes: Sequence[int], into: torch.Tensor, root: int, wait: Wait
    ) -> None:
        """`into` becomes this rank's part of root's `data`; `sizes`, known to all, are those of all. Collective."""
        if data is None:
            sizes = [0] * self.world_size
            data = into.new_empty(0)
        into_sizes = [into.numel() if rank == root else 0 for rank in range(self.world_size)]
        self.all_to_all(data, sizes, into, into_sizes, wait)

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """Part i of `data` (of `sizes[i]`) goes to rank i; part i of `into` comes from rank i. Collective."""
        from statexchange.comm import reduction

        header = b"".join(size.to_bytes(8, "little") for size in sizes)
        answers = self.exchange(header + reduction.to_bytes(data), wait)
        at = 0
        for answer, size in zip(answers, into_sizes, strict=True):
            lengths = [int.from_bytes(answer[8 * r : 8 * r + 8], "little") for r in range(self.world_size)]
            begin = 8 * self.world_size + sum(lengths[: self.rank])
            into[at : at + size].copy_(reduction.of_bytes(answer[begin : begin + size], into.dtype))
            at += size

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:  # noqa: ARG002
        """Send to `dst`; returns when `data` may be used again. Messages of one tag between two ranks keep their order;
        `tag` is 0, 1 or 2."""
        raise UnsupportedError(f"the {self.name} backend does not send to single ranks")

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:  # noqa: ARG002
        """Receive from `src` exactly as many bytes as `data` holds."""
        raise UnsupportedError(f"the {self.name} backend does not send to single ranks")


def check_ranks(ranks: Sequence[int], rank: int, world_size: int) -> None:
    """InvalidArgumentError unless `ranks` are distinct ranks of a world of `world_size`, `rank` among them."""
    if not isinstance(ranks, Sequence) or not all(hasattr(r, "__index__") for r in ranks):
        raise InvalidArgumentError(f"ranks are a sequence of integers, not {ranks!r}")
    if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= r < world_size for r in ranks):
        raise InvalidArgumentError(f"ranks must be distinct and within 0..{world_size - 1}, not {list(ranks)}")
    if rank not in ranks:
        raise InvalidArgumentError(f"rank {rank} is not among ranks {list(ranks)}", rank=rank)
