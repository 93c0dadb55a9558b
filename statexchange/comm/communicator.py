"""The communicator: the public interface to the ranks of a group.

It delegates: `collectives` prepares the tensors of callers; the session (session.py) orders calls, compares them across
ranks and reports failure; a backend moves the bytes.

A hierarchical communicator has a second side, `flat`, whose collectives treat all ranks alike. Both sides share the
session, the groups made from them and their shared memory; they differ only in the route of their tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from statexchange import messages, values
from statexchange.comm.arena_exchange import ArenaExchange
from statexchange.comm.backends.backend import Backend, check_ranks
from statexchange.comm.calls import Call, encoded, step_text
from statexchange.comm.failure.monitor import AbandonedError
from statexchange.comm.session import Route, Session
from statexchange.errors import InvalidArgumentError, needing_extra
from statexchange.settings import check_timeout
from statexchange.tensors import TensorKindT, TensorLike, TensorT

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

    from statexchange.comm import collectives
    from statexchange.comm.backends.backend import Between
    from statexchange.comm.work import Work

T = TypeVar("T")
# What callers may pass as `comm`.
CommLike: TypeAlias = "Communicator | torch.distributed.ProcessGroup | DeviceMesh | MPI.Comm"
# What callers may pass as `op`.
ReduceOpLike: TypeAlias = "str | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType"
FormCommunicator: TypeAlias = Callable[[Backend, float], "Communicator"]
"""Forms a group's communicator from a backend over which its ranks exchange bytes, and `timeout_s`."""


class _Collectives:
    """The module `collectives`, which needs torch: it is imported when a collective is first called."""

    def __getattr__(self, name: str) -> object:
        with needing_extra("a collective on tensors or arrays"):
            from statexchange.comm import collectives
        function = getattr(collectives, name)
        setattr(self, name, function)  # else an import statement would slow down each small collective
        return function


# For type checkers it is the module itself.
if not TYPE_CHECKING:
    collectives = _Collectives()


class Communicator:
    """The ranks of one group. Made by `init`, `from_process_group` or `from_mpi`.

    Collective methods must be called by all ranks, with matching arguments, in the same order: if the ranks are in
    different calls, all raise MismatchError. One thread uses a communicator at a time, as two have no common order: it
    belongs to the thread that made it, until that thread calls `hand_over` or has ended, and a call of another one is
    an InvalidArgumentError on all ranks. Give each thread its own, from `duplicate`, which is handed over to it. A pool
    of threads, as that of `asyncio.to_thread`, has one worker then.

    When a rank dies, leaves or does not call, the others raise PeerError or StallError, and every later call raises the
    same. A rank that has completed the call, as its result had arrived before, raises it in its next call.

    It belongs to the process that made it: in a child that is forked from a rank every call raises ForkedError, and
    nothing reaches the other ranks; its attributes may be read there. Tensors from `empty`, and gradients that a
    reducer keeps in shared memory, are shared with such a child: its parent sees what it writes there.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        run: an identity that all its ranks share and no other job has.
        arenas: shared memory in which its ranks exchange data.

    Example:
        >>> comm = sx.init("single")
        >>> comm
        Communicator('single', rank 0 of 1)
        >>> comm.all_reduce(torch.ones(2))
        tensor([1., 1.])
        >>> comm.all_gather_object({"rank": comm.rank})
        [{'rank': 0}]
    """

    def __init__(
        self, session: Session, run: str, form: FormCommunicator, *, flat_side_of: Communicator | None = None
    ) -> None:
        """Make a communicator of a session; users call `init`, `from_process_group` or `from_mpi`.

        Args:
            session: this rank's part in the group.
            run: an identity that all its ranks share and no other job has.
            form: makes the communicators of groups.
            flat_side_of: the hierarchical one with which this shares all but the route of its tensors.
        """
        self._session = session
        self._form = form
        self.rank, self.world_size = session.rank, session.world_size
        self.run = run
        if flat_side_of is None:
            self._route = Route(session, session.backend)
            self._groups: dict[tuple[int, ...], Communicator] = {}  # those made from this one, by their ranks
            self._flat: Communicator | None = None
            self.arenas = ArenaExchange()
        else:
            # The suffix makes calls of the two sides differ: ranks that mix them raise MismatchError.
            self._route = Route(session, session.transport, ", flat")
            self._groups = flat_side_of._groups  # noqa: SLF001 (the other side of this one)
            self._flat = self
            self.arenas = flat_side_of.arenas

    def __repr__(self) -> str:
        return f"Communicator({self.backend!r}, rank {self.rank} of {self.world_size})"

    def compute_on(self, device: str) -> None:
        """Set the device that the property `device` returns. Not collective.

        Args:
            device: the name of a torch device.

        Example:
            >>> comm = sx.init("single")
            >>> comm.compute_on("cpu")
            >>> comm.device
            device(type='cpu')
        """
        self._session.device = device

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return (self._session.device_backend or self._route.backend_for("cpu")).name

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        with needing_extra("a device"):
            import torch
        return torch.device(self._session.device)

    @property
    def local_rank(self) -> int:
        """This rank among the ranks of its host."""
        return self._session.topology.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this host."""
        return len(self._session.topology.node_ranks)

    @property
    def node_rank(self) -> int:
        """This host among the hosts."""
        return self._session.topology.nodes[self.rank]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's host, by rank."""
        return self._session.topology.nodes

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return max(self._session.topology.nodes) + 1  # they are numbered without gaps

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host, by rank."""
        return self._session.topology.hosts

    @property
    def timeout_s(self) -> float:
        """The limit of a wait for peers, in seconds without progress."""
        return self._session.timeout_s

    @property
    def shared_memory(self) -> bool:
        """Whether all ranks can share memory."""
        return self.world_size == 1 or self._session.page is not None

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process from which this one was forked: every call raises ForkedError."""
        return self._session.is_inherited

    @property
    def is_closed(self) -> bool:
        """Whether every later call raises: it has been closed, or has failed."""
        return self._session.dead is not None

    def raise_if_closed(self) -> None:
        """Raise what every later call raises, if this has been closed or has failed. Not collective.

        Raises:
            NotInitializedError: it has been closed.
            StateExchangeError: the error with which it has failed.

        Example:
            >>> comm = sx.init("single")
            >>> comm.close()
            >>> comm.raise_if_closed()
            Traceback (most recent call last):
            statexchange.errors.NotInitializedError: ...
        """
        self._session.raise_if_dead()

    @property
    def dependents(self) -> weakref.WeakSet[Any]:
        """Objects that are closed with this communicator: reducers, whose hooks would go on to use it."""
        return self._session.dependents

    # Messages

    def all_gather_bytes(
        self,
        payload: bytes,
        *,
        root: int | None = None,
        timeout_s: float | None = None,
        operation: str = "all_gather_bytes",
    ) -> list[bytes]:
        """Return the bytes of all ranks in rank order, on all ranks or on `root` only.

        Collective. Blocks until all ranks have called.

        Args:
            payload: the bytes of this rank, of any length.
            root: the only rank that gets the payloads; the others get [].
            timeout_s: how long to wait; None is this communicator's `timeout_s`, inf is no deadline.
            operation: the purpose of this call, for errors.

        Returns:
            One entry for each rank.

        Raises:
            MismatchError: the ranks are in different calls.
            StallError: a rank did not call in time.
            PeerError: a rank has failed or left.

        Example:
            >>> sx.init("single").all_gather_bytes(b"shape")
            [b'shape']
        """
        refusal = _refusal_of(timeout_s)
        if refusal is not None:
            self._session.refuse(operation, refusal)
        call = Call(operation if root is None else f"{operation} on {root}")
        return self._session.all_gather_bytes(call, payload, root, timeout_s)

    def hand_over(self) -> None:
        """Give this communicator to the thread that calls next. Not collective.

        So are its groups, as `node` and those from `new_group`. Two threads must not call next at the same time: each
        could be the next one of another rank.

        Example:
            >>> sx.init("single").hand_over()
        """
        self._session.hand_over()
        for group in self._groups.values():
            # A group of all ranks in their own order is this communicator itself.
            if group is not self:
                group.hand_over()

    # Failure

    def agree(
        self,
        error: Exception | None = None,
        *,
        phase: str = "its own code",
        timeout_s: float | None = None,
        note: object = None,
    ) -> list[Any]:
        """Wait for all ranks; if any of them passes an error, raise it on all.

        Collective. Blocks until all ranks have called. Ranks that are in another call raise the error there. The
        communicator stays usable, because all ranks raise together.

        Args:
            error: the error of this rank, if it has failed.
            phase: a description of what the ranks have done, for errors.
            timeout_s: how long to wait; None is this communicator's `timeout_s`, inf is no deadline.
            note: a JSON value that is sent to the other ranks.

        Returns:
            The notes of all ranks, in rank order.

        Raises:
            StateExchangeError: an error of this package that a rank has passed, with the rank where it happened.
            PeerError: any other error that a rank has passed, with that rank, its phase and the cause.

        Example:
            >>> sx.init("single").agree(note={"loss": 0.5})
            [{'loss': 0.5}]
        """
        refusal = _refusal_of(timeout_s)
        if refusal is not None:
            error, timeout_s = error or refusal, None
        session = self._session
        if self.world_size == 1:
            # A job of one rank has many phases, and nothing to do at their ends but to wait for its own work.
            if session.is_inherited:
                session.raise_if_dead()
            if session.has_begun_work:
                session.drain()
            if error is not None:
                raise error
            return [note]
        record = None
        # AbandonedError is no failure of this rank: it only leads here, where another rank reports one.
        if error is not None and not isinstance(error, AbandonedError):
            record = session.record(error, step_text(phase))
        # The failure goes twice: by the call, if the ranks find that they are in different ones, and as its payload.
        call = Call(f"the end of {phase}", failure=record)
        answers = session.all_gather_bytes(call, encoded([record, note]), None, timeout_s)
        records, notes = zip(*map(values.decode, answers), strict=True)
        session.raise_first(call, records, error)
        return list(notes)

    @contextlib.contextmanager
    def phase(self, name: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run a block that ends in `agree`: what any rank raises in it, all raise.

        Collective. An interrupt (KeyboardInterrupt, SystemExit) leaves the communicator at once, and the others raise
        PeerError.

        Args:
            name: a description of the block, for errors.
            timeout_s: how long to wait for the other ranks at its end.

        Yields:
            Nothing.

        Raises:
            StateExchangeError: as `agree`.

        Example:
            >>> comm = sx.init("single")
            >>> with comm.phase("reading the config"):
            ...     config = {"layers": 2}
        """
        session = self._session
        if session.is_inherited:
            session.raise_if_dead()
        try:
            refusal = _refusal_of(timeout_s)
            if refusal is not None:
                timeout_s = None
                raise refusal
            yield
        except Exception as error:
            if error is session.dead or error is session.shared_error:
                raise  # on all ranks already
            self.agree(error, phase=name, timeout_s=timeout_s)
            raise AssertionError("agree must raise") from error
        except BaseException as error:
            # An interrupt must end this rank now, so it cannot wait in `agree`.
            # The other ranks must not wait for one that was interrupted; alone, the communicator stays usable.
            if self.world_size > 1:
                self.close(error)
            raise
        self.agree(phase=name, timeout_s=timeout_s)

    def checking(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Run a block that validates the arguments of `call`: what it raises on one rank, all raise.

        Collective only on error: a rank whose block succeeds does not communicate here, and raises in its next call.

        Args:
            call: the name of the public call, for errors.

        Returns:
            The block's context.

        Raises:
            InvalidArgumentError: the block raised TypeError, ValueError or AttributeError; others keep their type.

        Example:
            >>> comm = sx.init("single")
            >>> with comm.checking("resize"):
            ...     size = int("nine")
            Traceback (most recent call last):
            statexchange.errors.InvalidArgumentError: ...
        """
        return self._session.checking(call)

    def progress(self) -> None:
        """Report that bytes move: ranks that wait for this one extend their deadlines. Not collective.

        Raises:
            AbandonedError: another rank has failed: join the next collective, which raises its error.

        Example:
            >>> comm = sx.init("single")
            >>> for part in range(3):
            ...     comm.progress()
        """
        if self._session.is_inherited:
            self._session.raise_if_dead()
        if self.world_size > 1:
            self._session.monitor.report_progress()
            # A rank that moves bytes is in no collective, where it would learn of the failure: so it asks here.
            if self._session.monitor.collective_requested():
                raise AbandonedError

    def barrier(self, timeout_s: float | None = None, tag: str | None = None) -> None:
        """Return when all ranks have called.

        Collective. Blocks until all ranks have called.

        Args:
            timeout_s: how long to wait; None is this communicator's `timeout_s`, inf is no deadline.
            tag: a name that must be the same on all ranks.

        Raises:
            StallError: some ranks did not call in time; `missing` lists them.
            MismatchError: the ranks are in different calls.
            PeerError: a rank has failed or left.

        Example:
            >>> sx.init("single").barrier(tag="before the epoch")
        """
        operation = f"barrier {tag!r}" if tag else "a barrier"
        self.all_gather_bytes(b"", timeout_s=timeout_s, operation=operation)

    # Values

    def gather_object(self, obj: object, *, root: int = 0) -> list[Any]:
        """Return the values of all ranks in rank order, on `root` only.

        Collective. A value that cannot be encoded on one rank is an error on all.

        Args:
            obj: a JSON value, see `values`.
            root: the rank that gets the values.

        Returns:
            One value for each rank on `root`, [] elsewhere.

        Raises:
            InvalidArgumentError: a value cannot be encoded, or `root` is no rank.

        Example:
            >>> sx.init("single").gather_object((1, "a"))
            [(1, 'a')]
        """
        with self.checking("gather_object"):
            self.check_root(root)
        by_rank = self._gather_values(f"gather_object on {root}", obj, values.types_of(obj))
        return by_rank if self.rank == root else []

    def all_gather_object(self, obj: object) -> list[Any]:
        """Return the values of all ranks in rank order, on every rank.

        Collective. A value that cannot be encoded on one rank is an error on all.

        Args:
            obj: a JSON value, see `values`.

        Returns:
            One value for each rank.

        Raises:
            InvalidArgumentError: a value cannot be encoded.

        Example:
            >>> sx.init("single").all_gather_object("host a")
            ['host a']
        """
        return self._gather_values("all_gather_object", obj, values.types_of(obj))

    def broadcast_object(self, obj: object = None, *, root: int = 0) -> Any:  # noqa: ANN401 (root's value)
        """Return the value of `root`, on every rank.

        Collective.

        Args:
            obj: on `root`, a JSON value. Elsewhere None, or a value with the dataclasses that the result will have.
            root: the rank whose value it is.

        Returns:
            The value.

        Raises:
            InvalidArgumentError: the value cannot be encoded, or `root` is no rank.

        Example:
            >>> sx.init("single").broadcast_object({"seed": 1})
            {'seed': 1}
        """
        with self.checking("broadcast_object"):
            self.check_root(root)
        # By a gathering, which every backend has; the other ranks send null.
        sent = obj if self.rank == root else None
        return self._gather_values(f"broadcast_object from {root}", sent, values.types_of(obj))[root]

    def _gather_values(self, verb: str, obj: object, types: Mapping[str, type]) -> list[Any]:
        session = self._session
        failure: Exception | None = None
        try:
            payload = encoded([None, obj])
        except (TypeError, ValueError) as error:
            # The other ranks are in this call: they get the error in place of the value.
            failure = error
            payload = encoded([session.record(error, step_text("encoding its value")), None])
        if self.world_size == 1 and failure is None:
            if session.dead is not None:
                session.raise_if_dead()
            if session.has_begun_work:
                session.drain()
            # Decoded, so that a caller gets what it would get from another rank.
            return [values.decode(payload, types=types)[1]]
        call = Call(verb)
        answers = session.all_gather_bytes(call, payload)
        records, objects = zip(*[values.decode(answer, types=types) for answer in answers], strict=True)
        session.raise_first(call, records, failure)
        return list(objects)

    # Tensors

    @overload
    def all_reduce(self, tensor: float, op: ReduceOpLike = ..., *, scale: float = ...) -> float: ...
    @overload
    def all_reduce(
        self,
        tensor: TensorT,
        op: ReduceOpLike = ...,
        *,
        out: TensorT | None = ...,
        scale: float = ...,
        async_op: Literal[False] = ...,
    ) -> TensorT: ...
    @overload
    def all_reduce(
        self,
        tensor: TensorT,
        op: ReduceOpLike = ...,
        *,
        out: TensorT | None = ...,
        scale: float = ...,
        async_op: Literal[True],
    ) -> Work[TensorT]: ...
    @overload
    def all_reduce(
        self, tensor: TensorT, op: ReduceOpLike = ..., *, out: TensorT | None = ..., scale: float = ..., async_op: bool
    ) -> TensorT | Work[TensorT]: ...
    def all_reduce(
        self,
        tensor: Any,
        op: ReduceOpLike = "sum",
        *,
        out: Any = None,
        scale: float = 1.0,
        async_op: bool = False,
    ) -> Any:
        """Reduce the tensors of all ranks, in place or into `out`.

        Collective. All ranks get equal bits. float16 and bfloat16 are added up in float32 where that matters. Averages
        of integers, reductions of float8, and "min" and "max" of complex numbers are refused before anything is sent.
        After a PeerError or StallError `tensor` may hold a part of the result.

        Args:
            tensor: a torch tensor or numpy array, of one shape and dtype on all ranks. Or a float or int of Python,
                which is reduced as float64 or int64; `out` and `async_op` are for tensors.
            op: "sum", "avg", "min", "max", "prod" or a torch ReduceOp.
            out: the tensor to write the result to, instead of `tensor`.
            scale: a factor for the result.
            async_op: return at once.

        Returns:
            `tensor` or `out`; with `async_op` a Work whose `wait` returns it. For a number, a number.

        Raises:
            UnsupportedError: the dtype cannot be reduced by `op`. It is a TypeError.
            NumericOverflowError: the result does not fit into an integer dtype.
            MismatchError: the ranks are in different calls.
            PeerError: a rank has failed or left.
            StallError: a rank did not call in time.

        Example:
            >>> comm = sx.init("single")
            >>> comm.all_reduce(torch.tensor([1.0, 2.0]), "avg", scale=0.5)
            tensor([0.5000, 1.0000])
            >>> loss = comm.all_reduce(3.0, "avg")
            >>> loss
            3.0
        """
        return collectives.all_reduce(self._route, tensor, op, out, scale, async_op)

    @overload
    def all_reduce_multiple(
        self,
        tensors: Sequence[TensorT],
        op: ReduceOpLike = ...,
        *,
        scale: float = ...,
        contiguous: bool = ...,
        async_op: Literal[False] = ...,
    ) -> list[TensorT]: ...
    @overload
    def all_reduce_multiple(
        self,
        tensors: Sequence[TensorT],
        op: ReduceOpLike = ...,
        *,
        scale: float = ...,
        contiguous: bool = ...,
        async_op: Literal[True],
    ) -> Work[list[TensorT]]: ...
    @overload
    def all_reduce_multiple(
        self,
        tensors: Sequence[TensorT],
        op: ReduceOpLike = ...,
        *,
        scale: float = ...,
        contiguous: bool = ...,
        async_op: bool,
    ) -> list[TensorT] | Work[list[TensorT]]: ...
    def all_reduce_multiple(
        self,
        tensors: Sequence[TensorT],
        op: ReduceOpLike = "sum",
        *,
        scale: float = 1.0,
        contiguous: bool = True,
        async_op: bool = False,
    ) -> list[TensorT] | Work[list[TensorT]]:
        """Reduce each of `tensors` in place, as `all_reduce`.

        Collective. Nothing is sent for an empty list.

        Args:
            tensors: tensors or arrays, none of them twice.
            op: as in `all_reduce`.
            scale: a factor for the results.
            contiguous: send those of one dtype and device together.
            async_op: return at once.

        Returns:
            The list; with `async_op` a Work whose `wait` returns it.

        Raises:
            UnsupportedError: as `all_reduce`.
            NumericOverflowError: as `all_reduce`.
            MismatchError: as `all_reduce`.

        Example:
            >>> comm = sx.init("single")
            >>> comm.all_reduce_multiple([torch.ones(2), torch.zeros(1)], "max")
            [tensor([1., 1.]), tensor([0.])]
        """
        return collectives.all_reduce_multiple(self._route, tensors, op, scale, contiguous, async_op)

    @overload
    def reduce(
        self,
        tensor: TensorT,
        op: ReduceOpLike = ...,
        *,
        root: int = ...,
        out: TensorT | None = ...,
        async_op: Literal[False] = ...,
    ) -> TensorT: ...
    @overload
    def reduce(
        self,
        tensor: TensorT,
        op: ReduceOpLike = ...,
        *,
        root: int = ...,
        out: TensorT | None = ...,
        async_op: Literal[True],
    ) -> Work[TensorT]: ...
    @overload
    def reduce(
        self, tensor: TensorT, op: ReduceOpLike = ..., *, root: int = ..., out: TensorT | None = ..., async_op: bool
    ) -> TensorT | Work[TensorT]: ...
    def reduce(
        self,
        tensor: TensorT,
        op: ReduceOpLike = "sum",
        *,
        root: int = 0,
        out: TensorT | None = None,
        async_op: bool = False,
    ) -> TensorT | Work[TensorT]:
        """Reduce the tensors of all ranks, on `root` only.

        Collective. `tensor` and `out` of the other ranks stay as they are.

        Args:
            tensor: as in `all_reduce`.
            op: as in `all_reduce`.
            root: the rank that gets the result.
            out: the tensor to write the result to, instead of `tensor`.
            async_op: return at once.

        Returns:
            On `root`, `tensor` or `out`; elsewhere `tensor`; with `async_op` a Work whose `wait` returns it.

        Raises:
            UnsupportedError: as `all_reduce`.
            NumericOverflowError: as `all_reduce`.
            MismatchError: as `all_reduce`.

        Example:
            >>> comm = sx.init("single")
            >>> comm.reduce(torch.tensor([3]), root=0)
            tensor([3])
        """
        return collectives.reduce(self._route, tensor, op, root, out, async_op)

    def through_leaders(self, tensor: TensorLike, between: Between, *, operation: str = "through_leaders") -> None:
        """Sum `tensor` within each host, let the hosts' leaders exchange the sums, and copy the results to all ranks.

        Collective. A leader is the lowest rank of its host, and the ranks of its host get its result. Without a
        hierarchy, as on one host or over `flat`, each rank leads itself alone.

        Args:
            tensor: of a floating dtype; its sum must not overflow.
            between: called on each leader with a `Leaders` and the host's sum, to be changed in place: one-dimensional,
                on the backend's device.
            operation: the purpose of this call, for errors.

        Raises:
            InvalidArgumentError: `tensor` is not of a floating dtype.
            MismatchError: the ranks are in different calls.

        Example:
            >>> comm = sx.init("single")
            >>> tensor = torch.ones(2)
            >>> comm.through_leaders(tensor, lambda leaders, total: total.mul_(sum(leaders.counts) + 1))
            >>> tensor
            tensor([2., 2.])
        """
        collectives.through_leaders(self._route, tensor, between, operation)

    @overload
    def broadcast(
        self, tensor: TensorT, *, root: int = ..., out: TensorT | None = ..., async_op: Literal[False] = ...
    ) -> TensorT: ...
    @overload
    def broadcast(
        self, tensor: TensorT, *, root: int = ..., out: TensorT | None = ..., async_op: Literal[True]
    ) -> Work[TensorT]: ...
    @overload
    def broadcast(
        self, tensor: TensorT, *, root: int = ..., out: TensorT | None = ..., async_op: bool
    ) -> TensorT | Work[TensorT]: ...
    def broadcast(
        self, tensor: TensorT, *, root: int = 0, out: TensorT | None = None, async_op: bool = False
    ) -> TensorT | Work[TensorT]:
        """Copy the tensor of `root` to every rank, in place or into `out`.

        Collective.

        Args:
            tensor: of one shape and dtype on all ranks.
            root: the rank whose tensor it is.
            out: where the result goes instead of `tensor`, on `root` too.
            async_op: return at once.

        Returns:
            `tensor` or `out`; with `async_op` a Work whose `wait` returns it.

        Raises:
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").broadcast(torch.arange(3))
            tensor([0, 1, 2])
        """
        return collectives.broadcast(self._route, tensor, root, out, async_op)

    @overload
    def all_gather(self, tensor: TensorKindT, *, async_op: Literal[False] = ...) -> list[TensorKindT]: ...
    @overload
    def all_gather(self, tensor: TensorKindT, *, async_op: Literal[True]) -> Work[list[TensorKindT]]: ...
    @overload
    def all_gather(self, tensor: TensorKindT, *, async_op: bool) -> list[TensorKindT] | Work[list[TensorKindT]]: ...
    def all_gather(self, tensor: TensorKindT, *, async_op: bool = False) -> list[TensorKindT] | Work[list[TensorKindT]]:
        """Return the tensors of all ranks, on every rank.

        Collective.

        Args:
            tensor: of one shape and dtype on all ranks.
            async_op: return at once.

        Returns:
            A list of new tensors in rank order; with `async_op` a Work whose `wait` returns it.

        Raises:
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").all_gather(torch.tensor([7]))
            [tensor([7])]
        """
        return collectives.gather(self._route, tensor, None, async_op)

    @overload
    def gather(self, tensor: TensorKindT, *, root: int = ..., async_op: Literal[False] = ...) -> list[TensorKindT]: ...
    @overload
    def gather(self, tensor: TensorKindT, *, root: int = ..., async_op: Literal[True]) -> Work[list[TensorKindT]]: ...
    @overload
    def gather(
        self, tensor: TensorKindT, *, root: int = ..., async_op: bool
    ) -> list[TensorKindT] | Work[list[TensorKindT]]: ...
    def gather(
        self, tensor: TensorKindT, *, root: int = 0, async_op: bool = False
    ) -> list[TensorKindT] | Work[list[TensorKindT]]:
        """Return the tensors of all ranks, on `root` only.

        Collective.

        Args:
            tensor: of one shape and dtype on all ranks.
            root: the rank that gets the tensors.
            async_op: return at once.

        Returns:
            A list of new tensors in rank order on `root`, [] elsewhere; with `async_op` a Work whose `wait` returns it.

        Raises:
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").gather(np.arange(2))
            [array([0, 1])]
        """
        return collectives.gather(self._route, tensor, root, async_op)

    @overload
    def scatter(
        self, tensors: Sequence[TensorLike] | None = ..., *, root: int = ..., async_op: Literal[False] = ...
    ) -> Any: ...  # noqa: ANN401 (a tensor of the kind that root gives)
    @overload
    def scatter(
        self, tensors: Sequence[TensorLike] | None = ..., *, root: int = ..., async_op: Literal[True]
    ) -> Work[Any]: ...
    def scatter(
        self,
        tensors: Sequence[TensorLike] | None = None,
        *,
        root: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Return the one of root's tensors that is for this rank.

        Collective.

        Args:
            tensors: on `root`, one for each rank, of any shapes and dtypes; elsewhere None.
            root: the rank that has the tensors.
            async_op: return at once.

        Returns:
            A new tensor; with `async_op` a Work whose `wait` returns it.

        Raises:
            InvalidArgumentError: there is not one tensor for each rank.
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").scatter([torch.tensor([5])])
            tensor([5])
        """
        return collectives.scatter(self._route, tensors, root, async_op)

    @overload
    def reduce_scatter(
        self, tensor: TensorKindT, op: ReduceOpLike = ..., *, async_op: Literal[False] = ...
    ) -> TensorKindT: ...
    @overload
    def reduce_scatter(
        self, tensor: TensorKindT, op: ReduceOpLike = ..., *, async_op: Literal[True]
    ) -> Work[TensorKindT]: ...
    @overload
    def reduce_scatter(
        self, tensor: TensorKindT, op: ReduceOpLike = ..., *, async_op: bool
    ) -> TensorKindT | Work[TensorKindT]: ...
    def reduce_scatter(
        self, tensor: TensorKindT, op: ReduceOpLike = "sum", *, async_op: bool = False
    ) -> TensorKindT | Work[TensorKindT]:
        """Return this rank's part of the reduction of all ranks' tensors.

        Collective.

        Args:
            tensor: as in `all_reduce`; its dimension 0 is divided into `world_size` equal parts.
            op: as in `all_reduce`.
            async_op: return at once.

        Returns:
            A new tensor; with `async_op` a Work whose `wait` returns it.

        Raises:
            InvalidArgumentError: dimension 0 is not a multiple of `world_size`.
            UnsupportedError: as `all_reduce`.
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").reduce_scatter(torch.ones(2, 2))
            tensor([[1., 1.],
                    [1., 1.]])
        """
        return collectives.reduce_scatter(self._route, tensor, op, async_op)

    @overload
    def all_to_all(self, tensors: Sequence[TensorLike], *, async_op: Literal[False] = ...) -> list[Any]: ...
    @overload
    def all_to_all(self, tensors: Sequence[TensorLike], *, async_op: Literal[True]) -> Work[list[Any]]: ...
    @overload
    def all_to_all(self, tensors: Sequence[TensorLike], *, async_op: bool) -> list[Any] | Work[list[Any]]: ...
    def all_to_all(self, tensors: Sequence[TensorLike], *, async_op: bool = False) -> list[Any] | Work[list[Any]]:
        """Send tensor i to rank i; return the tensors that the ranks send to this one.

        Collective.

        Args:
            tensors: one for each rank; shapes and dtypes may differ.
            async_op: return at once.

        Returns:
            A list of new tensors in rank order; with `async_op` a Work whose `wait` returns it.

        Raises:
            InvalidArgumentError: there is not one tensor for each rank.
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").all_to_all([torch.tensor([1, 2])])
            [tensor([1, 2])]
        """
        return collectives.all_to_all(self._route, tensors, async_op)

    @overload
    def send(self, tensor: TensorT, dst: int, *, async_op: Literal[False] = ...) -> TensorT: ...
    @overload
    def send(self, tensor: TensorT, dst: int, *, async_op: Literal[True]) -> Work[TensorT]: ...
    @overload
    def send(self, tensor: TensorT, dst: int, *, async_op: bool) -> TensorT | Work[TensorT]: ...
    def send(self, tensor: TensorT, dst: int, *, async_op: bool = False) -> TensorT | Work[TensorT]:
        """Send `tensor` to rank `dst`, which must call `recv` with one of the same shape and dtype.

        Not collective. Blocks until the receiver is there. Tensors for one rank arrive in the order of the calls.

        Args:
            tensor: what is sent.
            dst: another rank.
            async_op: return at once.

        Returns:
            `tensor`; with `async_op` a Work whose `wait` returns it.

        Raises:
            InvalidArgumentError: `dst` is this rank or no rank.
            MismatchError: the receiver expects another shape or dtype; it raises the same.
            PeerError: the receiver has failed or left.

        Example:
            >>> comm = sx.init("single")
            >>> comm.send(torch.ones(1), dst=1)
            Traceback (most recent call last):
            statexchange.errors.InvalidArgumentError: cannot send: rank 1 is no other rank of 1...
        """
        return collectives.transfer(self._route, tensor, dst, "send", async_op)

    @overload
    def recv(self, tensor: TensorT, src: int, *, async_op: Literal[False] = ...) -> TensorT: ...
    @overload
    def recv(self, tensor: TensorT, src: int, *, async_op: Literal[True]) -> Work[TensorT]: ...
    @overload
    def recv(self, tensor: TensorT, src: int, *, async_op: bool) -> TensorT | Work[TensorT]: ...
    def recv(self, tensor: TensorT, src: int, *, async_op: bool = False) -> TensorT | Work[TensorT]:
        """Receive into `tensor` what rank `src` sends.

        Not collective. Blocks until it has arrived.

        Args:
            tensor: the tensor to write to.
            src: another rank.
            async_op: return at once.

        Returns:
            `tensor`; with `async_op` a Work whose `wait` returns it.

        Raises:
            InvalidArgumentError: `src` is this rank or no rank.
            MismatchError: the sender has another shape or dtype; it raises the same.
            PeerError: the sender has failed or left.

        Example:
            >>> comm = sx.init("single")
            >>> comm.recv(torch.empty(1), src=1)
            Traceback (most recent call last):
            statexchange.errors.InvalidArgumentError: cannot recv: rank 1 is no other rank of 1...
        """
        return collectives.transfer(self._route, tensor, src, "recv", async_op)

    def wait_all(self) -> None:
        """Return when all work that was begun with `async_op` is done.

        Not collective. Blocks until then; what is computed afterwards sees the results.

        Raises:
            StateExchangeError: the first error of work for which `wait` was not called.

        Example:
            >>> comm = sx.init("single")
            >>> tensor = torch.ones(1)
            >>> work = comm.all_reduce(tensor, scale=2.0, async_op=True)
            >>> comm.wait_all()
            >>> tensor
            tensor([2.])
        """
        self._session.wait_all()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor that collectives of this communicator reduce without copying it.

        Collective, with equal arguments. Its memory is given back at a later call, once no rank has a tensor in it.

        Args:
            shape: its shape.
            dtype: its dtype.

        Returns:
            A new tensor, in memory that the ranks of a host share where they can.

        Raises:
            InvalidArgumentError: `shape` is not a shape, or `dtype` not a torch dtype.
            MismatchError: the ranks are in different calls.

        Example:
            >>> sx.init("single").empty((2, 3), torch.float32).shape
            torch.Size([2, 3])
        """
        return collectives.empty(self._route, shape, dtype)

    # Groups

    def new_group(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of `ranks`, in that order, made on the first call.

        Collective over `ranks` only: other ranks need not call.

        Args:
            ranks: ranks of this communicator, this one among them.

        Returns:
            A communicator in which `ranks[i]` has rank i.

        Raises:
            InvalidArgumentError: ranks repeat, do not exist or lack this one.
            MismatchError: its ranks give different orders.
            StallError: some ranks did not call in time; `missing` lists them.

        Example:
            >>> comm = sx.init("single")
            >>> comm.new_group([0]).world_size
            1
        """
        self._session.raise_if_dead()
        check_ranks(ranks, self.rank, self.world_size)
        # In the order in which they are given: another order is another group, with other ranks.
        key = tuple(ranks)
        groups = self._groups
        # One that has been closed or has failed is made anew.
        if key not in groups or groups[key].is_closed:
            # Until the group has a failure monitor of its own, that of this communicator watches its ranks.
            with self._session.forming_group():
                bootstrap = self._session.group_of(key)
                is_whole = bootstrap is self._session.transport  # all ranks, in their own order
                groups[key] = self if is_whole else self._form(bootstrap, self._session.timeout_s)
        return groups[key]

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of all ranks that give the same `color`.

        Collective over all ranks.

        Args:
            color: which group this rank joins; None joins none.
            key: ranks of a group are ordered by `key`, then by rank.

        Returns:
            The communicator of this rank's group; None for None.

        Raises:
            InvalidArgumentError: `color` or `key` is no integer.

        Example:
            >>> comm = sx.init("single")
            >>> comm.split(color=comm.rank % 2).world_size
            1
        """
        if not isinstance(color, (int, type(None))) or not isinstance(key, int):
            refusal = InvalidArgumentError(f"color and key are integers, not {color!r} and {key!r}")
            self._session.refuse("split", refusal)
        # Only the ranks of one color go on together, so each must know them first.
        colors_and_keys = self._gather_values("split", [color, key], {})
        if color is None:
            return None
        members: list[tuple[int, int]] = []
        for rank, (its_color, its_key) in enumerate(colors_and_keys):
            if its_color == color:
                members.append((its_key, rank))
        return self.new_group([rank for _, rank in sorted(members)])

    def duplicate(self) -> Communicator:
        """Return a new communicator of the same ranks, for another thread.

        Collective. Calls of the new one need not keep the order of this one's.

        Returns:
            A communicator of its own.

        Raises:
            StallError: some ranks did not call in time; `missing` lists them.

        Example:
            >>> comm = sx.init("single")
            >>> comm.duplicate() is comm
            False
        """
        session, call = self._session, Call("duplicate")

        def make() -> Communicator:
            # Not `new_group`, which returns the same communicator each time.
            with session.forming_group():
                bootstrap = session.transport.new_group(range(self.world_size), self.timeout_s)
                return self._form(bootstrap, self.timeout_s)

        session.all_gather_bytes(call, b"")  # so that a rank that does not call is named
        return session.guarded(call, make)

    @property
    def node(self) -> Communicator:
        """The communicator of the ranks on this host. Collective over them, the first time."""
        # In this order, so that rank i of it is the one with local rank i.
        return self.new_group(self._session.topology.node_ranks_by_local_rank)

    @property
    def leaders(self) -> Communicator | None:
        """The communicator of the ranks with local rank 0, one of each host; None on the other ranks.

        Collective over those with local rank 0, the first time.
        """
        if self.local_rank != 0:
            return None
        return self.new_group(self._session.topology.ranks_of_local_rank_0)

    @property
    def flat(self) -> Communicator:
        """The communicator of the same ranks that reduces among all of them in one step, whatever their hosts.

        Not collective. It is this communicator itself, unless that is hierarchical. Both share everything, also
        failures and the order of calls. All ranks must make a call on the same one of the two.
        """
        # Made late, since most callers never use it.
        if self._flat is None:
            self._flat = self
            if self._route.hierarchy is not None:
                self._flat = Communicator(self._session, self.run, self._form, flat_side_of=self)
        return self._flat

    def close(self, error: BaseException | None = None) -> None:
        """Leave: peers that still wait for this rank raise PeerError.

        Not collective. Reducers of this communicator release their parameters. In a child that was forked from the rank
        this does nothing, as the child is not a rank.

        Args:
            error: why this rank leaves; the cause that the others report.

        Example:
            >>> comm = sx.init("single")
            >>> comm.close()
            >>> comm.is_closed
            True
        """
        if self.is_inherited:
            return
        for dependent in list(self.dependents):  # a copy, as each removes itself
            dependent.close()
        for group in self._groups.values():
            if group is not self:
                group.close(error)
        self._session.close(error)
        self.arenas.close()

    def check_root(self, root: int) -> None:
        """Raise InvalidArgumentError unless `root` is a rank of this communicator. Not collective.

        Args:
            root: an argument of a caller.

        Raises:
            InvalidArgumentError: `root` is not a rank.

        Example:
            >>> sx.init("single").check_root(0)
        """
        self._session.check_root(root)


def _refusal_of(timeout_s: object) -> InvalidArgumentError | None:
    """Return the error for an invalid `timeout_s`, None if it is valid."""
    # As nearly always: a save or load has dozens of phases, each of which comes here.
    if timeout_s is None or (type(timeout_s) is float and timeout_s > 0):
        return None
    try:
        check_timeout(timeout_s)
    except InvalidArgumentError as refusal:
        return refusal
    return None


# Messages; a job of one rank has them already


def to_root(comm: Communicator, data: bytes, what: str) -> list[bytes]:
    """Return the bytes of all ranks in rank order on rank 0, [] elsewhere; `what` is for errors. Collective."""
    if comm.world_size == 1:
        return [data]
    return comm.all_gather_bytes(data, root=0, operation=what)


# Those of typed records: every rank checks what it reads


def from_all(comm: Communicator, value: T, kind: type[T] | UnionType, what: str) -> list[T]:
    """Return the values of all ranks in rank order; `kind` and `what` are as for `decode`. Collective.

    Equal values are one object, since thousands of ranks most often have the same.
    """
    if comm.world_size == 1:
        return [value]
    by_rank: list[T] = []
    decoded: dict[bytes, T] = {}
    # A rank decodes its own value, too: what cannot be read is an error on all ranks, and none goes on alone.
    for rank, data in enumerate(comm.all_gather_bytes(messages.encoded(value, kind), operation=what)):
        if data not in decoded:
            decoded[data] = messages.decode(data, kind, what, rank)
        by_rank.append(decoded[data])
    return by_rank


def from_root(comm: Communicator, value: T, kind: type[T] | UnionType, what: str, root: int = 0) -> T:
    """Return the value of `root` on all ranks; those of the others are ignored. Collective."""
    if comm.world_size == 1:
        return value
    data = b""
    if comm.rank == root:
        data = messages.encoded(value, kind)
    # Every backend has all_gather_bytes, which also finds ranks that are in another call.
    return messages.decode(comm.all_gather_bytes(data, operation=what)[root], kind, what, root)


def agree(comm: Communicator, failure: Exception | None, phase: str, value: T | None, kind: type[T]) -> list[T]:
    """Wait for all ranks as `Communicator.agree` does, and return the values of all in rank order. Collective.

    `value` may be None on a rank that has a failure.
    """
    if comm.world_size == 1:
        comm.agree(failure, phase=phase)
        assert value is not None
        return [value]
    note: object = None
    if value is not None:
        note = messages.encode(value, kind)
    by_rank = []
    for rank, raw in enumerate(comm.agree(failure, phase=phase, note=note)):
        by_rank.append(messages.decode(raw, kind, f"its note on {phase}", rank))
    return by_rank
