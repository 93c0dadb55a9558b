"""The communicator: the public face of ranks that belong together."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from statexchange import values
from statexchange.comm.arena_exchange import ArenaExchange
from statexchange.comm.backends.backend import Backend, check_ranks
from statexchange.comm.calls import Call, encoded, step_text
from statexchange.comm.failure.monitor import AbandonedError
from statexchange.comm.session import Route, Session
from statexchange.errors import InvalidArgumentError, needing_torch
from statexchange.settings import check_timeout
from statexchange.shared_memory import Kind

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

    from statexchange.comm.backends.backend import Between

__all__ = ["AbandonedError", "CommLike", "Communicator"]

# What callers may pass as `comm`.
CommLike: TypeAlias = "Communicator | torch.distributed.ProcessGroup | DeviceMesh | MPI.Comm"
Buffer = Any  # a torch tensor or a numpy array
Former: TypeAlias = Callable[[Backend, float], "Communicator"]
"""What forms the communicator of a group, from a backend over which its ranks exchange bytes, and a deadline."""


@functools.cache
def _tensors() -> Any:
    """What needs torch, and is slow to import again and again."""
    with needing_torch("a collective on tensors or arrays"):
        from statexchange.comm import collectives
    return collectives


@functools.cache
def _messages() -> Any:
    """As `_tensors`, for what goes from rank to rank."""
    with needing_torch("send and recv"):
        from statexchange.comm import point_to_point
    return point_to_point


class _Groups:
    """The communicators of groups that were made from one, and a lock for each that is being made."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Communicator] = {}
        self.making: dict[tuple[int, ...], threading.Lock] = {}  # so that two threads do not make one at once


class Communicator:
    """Ranks of one group.

    Made by `init`, `from_process_group` or `from_mpi`. Attributes: `rank`, `world_size`, `local_rank` (within the
    host), `local_world_size`, `node_rank`, `num_nodes`, `backend` (its name), `device` (where this rank computes),
    `hosts` (the name of each rank's host), `run` (an identity that all its ranks share and no other job has),
    `timeout_s` (of waits for peers) and `arenas` (shared memory that its ranks fill for each other).

    Collective calls must be made by all ranks, with matching arguments, in the same order: ranks that meet in different
    calls all raise MismatchError. So do threads that use it at once: give each thread its own, from `duplicate`. Calls
    of one thread meet those of the same thread on other ranks, counted by first use; so a pool of several threads, as
    that of `asyncio.to_thread`, can use no communicator, even one call at a time: give it one worker.

    A rank that dies, leaves or does not come makes the others raise PeerError or StallError, and every later call
    raises the same. StallError says that no rank has completed the call; where that cannot be learned, it is an
    OutcomeUnknownError.

    It belongs to the process that made it: in a child that is forked from a rank every call raises ForkedError, and
    nothing reaches the other ranks; its attributes may be read there. Tensors from `empty`, and gradients that a
    reducer keeps in shared memory, are shared with such a child: its parent sees what it writes there.
    """

    def __init__(self, session: Session, run: str, form: Former, *, flat_of: Communicator | None = None) -> None:
        """`form` makes the communicators of groups. `flat_of` is the one that this is the flat side of, if any."""
        self._session = session
        self._form = form
        self.run = run
        if flat_of is None:
            self._route = Route(session, session.backend)
            self._groups = _Groups()
            self._flat: Communicator | None = None
            self.arenas = ArenaExchange(self.shared_memory or "memfd")
        else:
            self._route = Route(session, session.carrier, ", flat")
            self._groups = flat_of._groups  # noqa: SLF001 (the other side of this one)
            self._flat = self
            self.arenas = flat_of.arenas

    def __repr__(self) -> str:
        return f"Communicator({self.backend!r}, rank {self.rank} of {self.world_size})"

    def compute_on(self, device: str) -> None:
        """Say which device `device` names from now on. Not collective."""
        self._session.device = device

    @property
    def rank(self) -> int:
        """This rank."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._session.world_size

    @property
    def backend(self) -> str:
        """Name of the backend."""
        session = self._session
        return (session.devices or self._route.backend_for("cpu")).name

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        with needing_torch("a device"):
            import torch
        return torch.device(self._session.device)

    @property
    def local_rank(self) -> int:
        """This rank among the ranks of its host."""
        return self._session.place.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this host."""
        return len(self._session.place.mates)

    @property
    def node_rank(self) -> int:
        """This host among the hosts."""
        return self._session.place.nodes[self.rank]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's host, by rank."""
        return self._session.place.nodes

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return len(self._session.place.leaders)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host, by rank."""
        return self._session.place.hosts

    @property
    def timeout_s(self) -> float:
        """How long a wait for peers may take, in seconds."""
        return self._session.timeout_s

    @property
    def shared_memory(self) -> Kind | None:
        """How all ranks can share memory, or None if they cannot."""
        if self.world_size == 1:
            return "memfd"
        return self._session.page.kind if self._session.page is not None else None

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process from which this one was forked: every call raises ForkedError."""
        return self._session.is_inherited

    def raise_if_inherited(self) -> None:
        """ForkedError in a child that was forked from the rank. Not collective."""
        self._session.raise_if_inherited()

    @property
    def is_closed(self) -> bool:
        """Whether every later call raises: it has been closed, or has failed."""
        return self._session.dead is not None

    def raise_if_closed(self) -> None:
        """Raise what every later call raises, if this has been closed or has failed. Not collective."""
        self._session.raise_if_dead()

    @property
    def dependents(self) -> weakref.WeakSet[Any]:
        """What has to be closed when this communicator is: reducers, whose hooks would go on to use it."""
        return self._session.dependents

    # Messages

    def exchange(
        self,
        payload: bytes,
        *,
        root: int | None = None,
        timeout_s: float | None = None,
        doing: str = "an exchange",
    ) -> list[bytes]:
        """Every rank's bytes in rank order; if `root` is given, [] on other ranks.

        Collective. Blocks until all ranks have called; `timeout_s` None means this communicator's, inf no deadline.
        """
        refusal = _refusal_of(timeout_s)
        if refusal is not None:
            self._session.refuse(doing, refusal)
        return self._session.exchange(Call(doing if root is None else f"{doing} on {root}"), payload, root, timeout_s)

    # Callers

    @property
    def caller(self) -> int:
        """The number by which this thread's calls are matched with those of other ranks: the order of first use."""
        return self._session.callers.number()

    def forget_callers(self) -> None:
        """Count callers from here on: who has made this communicator need not be one of them. Not collective."""
        self._session.callers.restart()

    def called_by(self, caller: int) -> contextlib.AbstractContextManager[None]:
        """A block in which a thread of autograd's engine calls as `caller`; others call as themselves.

        Not collective. For hooks: which thread runs them differs from rank to rank.
        """
        return self._session.callers.called_by(caller)

    # Failure

    def agree(
        self,
        error: Exception | None = None,
        *,
        phase: str = "its own code",
        timeout_s: float | None = None,
        note: Any = None,
    ) -> list[Any]:
        """A barrier that carries failure: if any rank passes an error, all raise the same one. Collective.

        An error of ours is raised as itself on every rank, with the rank where it happened; any other error as
        `PeerError(rank, phase, cause)`. Ranks that sit in another call meanwhile raise it too. The communicator stays
        usable, since all ranks have met. Returns every rank's `note`, a JSON value.
        """
        refusal = _refusal_of(timeout_s)
        if refusal is not None:
            error, timeout_s = error or refusal, None
        if self.world_size == 1:
            self._session.raise_if_inherited()
            self._session.drain()
            if error is not None:
                raise error
            return [note]
        record = None
        if error is not None and not isinstance(error, AbandonedError):
            record = self._session.record(error, step_text(phase))
        call = Call(f"the end of {phase}", failure=record)
        answers = self._session.exchange(call, encoded([record, note]), None, timeout_s)
        records, notes = zip(*(values.decode(answer) for answer in answers), strict=True)
        self._session.raise_first(call, records, error)
        return list(notes)

    @contextlib.contextmanager
    def phase(self, name: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """A block that ends in `agree`: what any rank raises in it, all raise. Collective.

        An interrupt (KeyboardInterrupt, SystemExit) leaves the communicator at once, and the others raise PeerError.
        """
        self._session.raise_if_inherited()
        try:
            refusal = _refusal_of(timeout_s)
            if refusal is not None:
                timeout_s = None
                raise refusal
            yield
        except Exception as error:
            if error is self._session.dead or error is self._session.settled:
                raise  # all know
            self.agree(error, phase=name, timeout_s=timeout_s)
            raise AssertionError("agree must raise") from error
        except BaseException as error:
            if self.world_size > 1:
                self.close(error)
            raise
        self.agree(phase=name, timeout_s=timeout_s)

    @contextlib.contextmanager
    def checking(self, call: str) -> Iterator[None]:
        """Validate the arguments of `call` in a block: what it raises on one rank is raised on all, in their next call.

        Collective only where it raises: a rank without an error does not communicate. A TypeError, ValueError or
        AttributeError becomes an InvalidArgumentError.
        """
        try:
            yield
        except Exception as refusal:
            if refusal is self._session.dead or refusal is self._session.settled:
                raise  # all know
            self._session.refuse(call, refusal)

    def progress(self) -> None:
        """Say that bytes move; raises AbandonedError once another rank has failed. Not collective."""
        self._session.raise_if_inherited()
        monitor = self._session.monitor
        if monitor is not None:
            monitor.report_progress()
            if monitor.collective_requested():
                raise AbandonedError

    def barrier(self, timeout_s: float | None = None, tag: str | None = None) -> None:
        """Return when all ranks have called. Collective.

        A StallError after `timeout_s` seconds (default: the communicator's) names all ranks that did not come.
        """
        refusal = _refusal_of(timeout_s)
        if refusal is not None:
            self._session.refuse("barrier", refusal)
        self._session.exchange(Call(f"barrier {tag!r}" if tag else "a barrier"), b"", None, timeout_s)

    # Values

    def gather_object(self, obj: Any, *, root: int = 0) -> list[Any]:
        """The JSON values (see `values`) of all ranks in rank order on `root`, [] elsewhere. Collective.

        A value that cannot be encoded on one rank is an error on all.
        """
        self._check_root(root, "gather_object")
        found = self._exchange_values(f"gather_object on {root}", obj, values.types_of(obj))
        return found if self.rank == root else []

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The JSON values of all ranks in rank order, on every rank. Collective."""
        return self._exchange_values("all_gather_object", obj, values.types_of(obj))

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """Root's JSON value, on every rank; the others' `obj` only lends its types. Collective."""
        self._check_root(root, "broadcast_object")
        told = obj if self.rank == root else None
        return self._exchange_values(f"broadcast_object from {root}", told, values.types_of(obj))[root]

    def _exchange_values(self, verb: str, obj: Any, types: Mapping[str, type]) -> list[Any]:
        failure: Exception | None = None
        try:
            payload = encoded([None, obj])
        except (TypeError, ValueError) as error:
            failure = error
            payload = encoded([self._session.record(error, step_text("encoding its value")), None])
        call = Call(verb)
        answers = self._session.exchange(call, payload)
        records, found = zip(*(values.decode(answer, types=types) for answer in answers), strict=True)
        self._session.raise_first(call, records, failure)
        return list(found)

    # Tensors: `collectives` prepares them, here they are put in order

    def all_reduce(
        self, tensor: Buffer, op: str = "sum", *, out: Buffer = None, scale: float = 1.0, async_op: bool = False
    ) -> Any:
        """The reduction of all ranks' `tensor`, times `scale`; in place, or in `out`, which is returned.

        Collective. `op` is "sum", "avg", "min", "max", "prod" or a torch ReduceOp. All ranks get equal bits. Halves are
        added up in float32 where that matters; what does not fit into an integer dtype is a NumericOverflowError;
        averages of integers, float8 and the order of complex numbers are an UnsupportedError, which is a TypeError,
        before anything is sent.
        With `async_op`, a Work whose `wait` returns the result.
        """
        return _tensors().all_reduce(self._route, tensor, op, out, scale, async_op)

    def all_reduce_multiple(
        self,
        tensors: Sequence[Buffer],
        op: str = "sum",
        *,
        scale: float = 1.0,
        contiguous: bool = True,
        async_op: bool = False,
    ) -> Any:
        """`all_reduce` of each of `tensors`, in place; the list is returned, and nothing is done for an empty one.

        Collective. With `contiguous`, those of one dtype and device travel as one. No tensor may be given twice.
        """
        return _tensors().all_reduce_multiple(self._route, tensors, op, scale, contiguous, async_op)

    def reduce(
        self, tensor: Buffer, op: str = "sum", *, root: int = 0, out: Buffer = None, async_op: bool = False
    ) -> Any:
        """As `all_reduce`, on `root` only; other ranks' `tensor` and `out` stay as they are, and `tensor` is returned.

        Collective.
        """
        return _tensors().reduce(self._route, tensor, op, root, out, async_op)

    def through_leaders(self, tensor: Buffer, between: Between, *, doing: str = "through_leaders") -> None:
        """Sum `tensor` within each host, let the hosts' leaders exchange the sums, and give each host its leader's.

        Collective. A leader is the first rank of its host; `between(leaders, sums)` is called there only, with a
        `Leaders` and the host's sum as one dimension on the backend's device, which it changes in place. Without a
        hierarchy, as on one host or over `flat`, each rank leads itself alone. `tensor` is floating, and its sum must
        not overflow. `doing` names the call in errors.
        """
        _tensors().through_leaders(self._route, tensor, between, doing)

    def broadcast(self, tensor: Buffer, *, root: int = 0, out: Buffer = None, async_op: bool = False) -> Any:
        """Root's `tensor` on every rank: in place, or in `out`, on root too; which is returned. Collective."""
        return _tensors().broadcast(self._route, tensor, root, out, async_op)

    def all_gather(self, tensor: Buffer, *, async_op: bool = False) -> Any:
        """All ranks' tensors, of one shape and dtype, as a list of new ones in rank order. Collective."""
        return _tensors().all_gather(self._route, tensor, async_op)

    def gather(self, tensor: Buffer, *, root: int = 0, async_op: bool = False) -> Any:
        """As `all_gather` on `root`, [] elsewhere. Collective."""
        return _tensors().gather(self._route, tensor, root, async_op)

    def scatter(self, tensors: Sequence[Buffer] | None = None, *, root: int = 0, async_op: bool = False) -> Any:
        """A new tensor: root's `tensors[rank]`, of any shape and dtype. Collective; other ranks give nothing."""
        return _tensors().scatter(self._route, tensors, root, async_op)

    def reduce_scatter(self, tensor: Buffer, op: str = "sum", *, async_op: bool = False) -> Any:
        """This rank's part of the reduction, a new tensor: dimension 0 is cut into `world_size` parts. Collective."""
        return _tensors().reduce_scatter(self._route, tensor, op, async_op)

    def all_to_all(self, tensors: Sequence[Buffer], *, async_op: bool = False) -> Any:
        """New tensors: from each rank the one that it has for this one; shapes and dtypes may differ. Collective."""
        return _tensors().all_to_all(self._route, tensors, async_op)

    def send(self, tensor: Buffer, dst: int, *, async_op: bool = False) -> Any:
        """Send `tensor` to `dst`, which must `recv` one of the same shape and dtype: else both raise MismatchError.

        Not collective. Blocks until the receiver is there. Tensors for one rank arrive in the order of the calls.
        """
        return _messages().send(self._route, tensor, dst, async_op)

    def recv(self, tensor: Buffer, src: int, *, async_op: bool = False) -> Any:
        """`tensor`, in place, from `src`; it is returned. Not collective. Blocks until it is there."""
        return _messages().recv(self._route, tensor, src, async_op)

    def wait_all(self) -> None:
        """Return when all work that was begun with `async_op` is done; computing that follows sees its results.

        Not collective. Raises the first error of work whose `wait` nobody has called.
        """
        self._session.wait_all()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, uninitialised, that collectives of this communicator reduce without copying it.

        Collective, with equal arguments. Its memory is used again once nothing refers to it.
        """
        return cast("torch.Tensor", _tensors().empty(self._route, shape, dtype))

    # Groups

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of `ranks` (of this one), in that order; made once, then the same.

        Collective over `ranks`: nobody else has to call. ValueError if ranks repeat, do not exist or lack the caller;
        MismatchError if its ranks give different orders.
        """
        self._session.raise_if_dead()
        check_ranks(ranks, self.rank, self.world_size)
        key = tuple(ranks)
        with self._groups.making.setdefault(key, threading.Lock()):
            if key not in self._groups.made or self._groups.made[key].is_closed:
                with self._session.forming_group():
                    carrier = self._session.group_of(key)
                    ours = carrier is self._session.carrier  # all ranks, in their own order
                    self._groups.made[key] = self if ours else self._form(carrier, self._session.timeout_s)
            return self._groups.made[key]

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The communicator of all ranks that give the same `color`, ordered by `key`, then rank; None for None.

        Collective over all ranks.
        """
        if not isinstance(color, (int, type(None))) or not isinstance(key, int):
            what = f"color and key are integers, not {color!r} and {key!r}"
            self._session.refuse("split", InvalidArgumentError(what))
        chosen = self._exchange_values("split", [color, key], {})
        if color is None:
            return None
        members = [(k, rank) for rank, (c, k) in enumerate(chosen) if c == color]
        return self.subset([rank for _, rank in sorted(members)])

    def duplicate(self) -> Communicator:
        """A new communicator of the same ranks, for another thread: its calls need not keep the order of this one's.

        Collective.
        """
        session, call = self._session, Call("duplicate")
        everybody = tuple(range(self.world_size))

        def make() -> Communicator:
            with session.forming_group():
                carrier = session.carrier.subset(everybody, self.timeout_s)
                return self._form(carrier, self.timeout_s)

        with self._groups.making.setdefault(everybody, threading.Lock()):
            session.exchange(call, b"")
            return session.guarded(call, make)

    @property
    def node(self) -> Communicator:
        """The communicator of the ranks on this host. Collective over them, the first time."""
        return self.subset(self._session.place.mates_in_order)

    @property
    def leaders(self) -> Communicator | None:
        """The communicator of each host's first rank; None on other ranks. Collective over those, the first time."""
        return self.subset(self._session.place.firsts) if self.local_rank == 0 else None

    @property
    def flat(self) -> Communicator:
        """This communicator, whose collectives treat all ranks alike; itself, unless it is hierarchical.

        Not collective. Both share everything, their failures and the order of their calls too; all ranks use the same
        one for a call.
        """
        if self._flat is None:
            is_flat = self._route.hierarchy is None
            self._flat = self if is_flat else Communicator(self._session, self.run, self._form, flat_of=self)
        return self._flat

    def close(self, error: BaseException | None = None) -> None:
        """Leave: peers that still wait for this rank raise PeerError, with `error` as its cause. Not collective.

        Reducers of this communicator let go of their parameters. Nothing happens in a child that was forked from the
        rank: it is no rank that could leave.
        """
        if self.is_inherited:
            return
        for dependent in list(self.dependents):
            dependent.close()
        for subset in self._groups.made.values():
            if subset is not self:
                subset.close(error)
        self._session.close(error)
        self.arenas.close()

    def _check_root(self, root: int, verb: str) -> None:
        """InvalidArgumentError, on all ranks, unless `root` is a rank of this communicator."""
        try:
            self.check_root(root)
        except InvalidArgumentError as refusal:
            self._session.refuse(verb, refusal)

    def check_root(self, root: int) -> None:
        """InvalidArgumentError unless `root` is a rank of this communicator. Not collective."""
        self._session.check_root(root)


def _refusal_of(timeout_s: Any) -> InvalidArgumentError | None:
    """What is wrong with a deadline, if anything."""
    try:
        if timeout_s is not None:
            check_timeout(timeout_s)
    except InvalidArgumentError as refusal:
        return refusal
    return None
