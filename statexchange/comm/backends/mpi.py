"""Messages and tensors through an MPI communicator (mpi4py). Requests are polled, never waited for."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from statexchange.comm.backends.backend import Backend, gather_in_two_steps
from statexchange.comm.wait import Wait, yield_core
from statexchange.errors import MissingExtraError, NotInitializedError, PeerError, StallError, UnsupportedError
from statexchange.settings import Launch, default_timeout_s

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from statexchange.comm.backends.reduction import Finish

_FIRST_FREE_TAG = 3
_LONG_BYTES = 1 << 16
_SPIN_S, _TESTS = 0.005, 16  # how long to test a long message at a time, and how often between two yields
_NUM_TAGS = 30_000  # for groups; every MPI has tags up to 32767
# MPI types by torch's names of dtypes, which needs no torch. mpi4py must not choose them: it takes bfloat16 for bytes,
# and would sum those.
_FLOATS = {"float64": "DOUBLE", "float32": "FLOAT"}
_INTS = {"int64": "INT64_T", "int32": "INT32_T", "int16": "INT16_T", "int8": "INT8_T", "uint8": "UINT8_T"}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        raise MissingExtraError(f'MPI needs mpi4py: pip install "statexchange[mpi]" ({error})') from error
    return MPI


def world(launch: Launch | None = None) -> Any:
    """Return MPI's world. From now on an uncaught exception on any rank ends the whole job. Not collective.

    Raises NotInitializedError if its size is not that of `launch`: the launcher then belongs to another MPI.
    """
    mpi = _mpi()
    size = mpi.COMM_WORLD.Get_size()
    if launch is not None and launch.variable and launch.world_size != size:
        library = str(mpi.Get_library_version()).strip("\0").splitlines()[0]
        raise NotInitializedError(
            f"{launch.variable} is {launch.world_size}, but MPI has {size} ranks: start them with the mpiexec that "
            f"belongs to this MPI library ({library})"
        )
    _abort_on_uncaught()
    return mpi.COMM_WORLD


def _abort_on_uncaught() -> None:
    """Abort MPI on an uncaught exception: the other ranks would wait for ever in MPI_Finalize."""
    previous: Callable[..., Any] = sys.excepthook
    if getattr(previous, "ends_the_job", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from mpi4py.run import set_abort_status

        previous(kind, error, trace)
        set_abort_status(error)

    hook.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook


class MPIBackend(Backend):
    """One rank of an MPI communicator."""

    name = "mpi"

    def __init__(self, comm: MPI.Comm, *, takes_over: bool = False, timeout_s: float | None = None) -> None:
        """Make a backend over a duplicate of `comm`, or `takes_over` `comm` itself. Collective over `comm`."""
        self._mpi = _mpi()
        if self._mpi.Query_thread() != self._mpi.THREAD_MULTIPLE:
            # Work that was begun with `async_op` runs in a thread of its own.
            raise UnsupportedError(
                "MPI was initialised without MPI_THREAD_MULTIPLE: let mpi4py do it, which asks for that by default"
            )
        self._unfinished: list[object] = []  # requests that were given up: MPI may still write to their buffers
        self._datatypes: dict[object, Any] = {}  # of MPI, by those of torch
        self.rank = int(comm.Get_rank())
        self.world_size = int(comm.Get_size())
        wait_s = default_timeout_s() if timeout_s is None else timeout_s
        self._comm: Any = comm if takes_over else self._duplicate(comm, wait_s)
        # MPI's default ends the whole job at the first error; mpi4py raises an Exception instead.
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)

    def _duplicate(self, comm: MPI.Comm, timeout_s: float) -> MPI.Comm:
        wait = Wait(timeout_s, "the formation of the communicator")
        # First, as a duplication does not tell which rank is missing.
        self._await_ranks_in_collectives(comm, wait)
        # Not `Dup`, which would block without a deadline.
        duplicate, request = comm.Idup()
        self._run(lambda: request, 0, wait)
        return duplicate

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload: short ones by one all-gather, the rest of long ones by a second. Collective."""
        return gather_in_two_steps(payload, self.world_size, lambda part, sizes: self._gathered(part, sizes, wait))

    def _gathered(self, part: bytes, sizes: list[int], wait: Wait) -> list[bytes]:
        into = bytearray(sum(sizes))
        byte = self._mpi.BYTE
        sent, received = [part, len(part), byte], [into, sizes, None, byte]
        self._run(lambda: self._comm.Iallgatherv(sent, received), len(into), wait)
        ends = itertools.accumulate(sizes)
        return [bytes(into[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def _run(self, post: Callable[[], MPI.Request], nbytes: int, wait: Wait) -> None:
        """Have `post` start a request, and wait for it; while it is under way it holds its buffers."""
        requests: list[MPI.Request] = []
        with self._keeping(requests, wait):
            requests.append(post())
            wait.until(self._test(requests[0], nbytes))

    @contextlib.contextmanager
    def _keeping(self, requests: object, wait: Wait) -> Iterator[None]:
        """Keep the requests, and so their buffers, if the block fails; turn MPI's errors into PeerError."""
        try:
            yield
        except BaseException as error:
            self._unfinished.append(requests)
            if isinstance(error, self._mpi.Exception):
                raise PeerError(-1, wait.operation, (str(error).splitlines() or ["MPI failed"])[0]) from error
            raise

    def _test(self, request: MPI.Request, nbytes: int) -> Callable[[], bool]:
        """Return a test of whether `request` is done. Some MPIs move long messages only while they are tested."""

        def test_long() -> bool:
            end = time.perf_counter() + _SPIN_S
            while time.perf_counter() < end:
                for _ in range(_TESTS):
                    if request.Test():
                        return True
                yield_core()
            return False

        return request.Test if nbytes < _LONG_BYTES else test_long

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """Return a communicator of `ranks`; StallError names those that have not called. Collective over them only."""
        # The same on all `ranks` without a message, and most likely another one for other ranks.
        tag = _FIRST_FREE_TAG + zlib.crc32(repr(list(ranks)).encode()) % _NUM_TAGS
        self._await_ranks(ranks, tag, Wait(timeout_s, f"the making of a group of ranks {list(ranks)}"))
        group = self._comm.Get_group().Incl(list(ranks))
        return MPIBackend(self._comm.Create_group(group, tag), takes_over=True)  # does not wait: all are there

    def _await_ranks_in_collectives(self, comm: MPI.Comm, wait: Wait) -> None:
        """Return when all ranks of the caller's `comm` have called; StallError names those that have not.

        Sends and receives would not do: a receive of the caller's own, for any tag, could take the message. It cannot
        take part of a collective. So each rank scatters a byte to all. Only the root has the sizes, so MPIs send it
        from the root itself: the scatter from rank n ends once rank n has called.
        """
        own_bytes = [bytes(self.world_size), [1] * self.world_size, None, self._mpi.BYTE]
        requests: dict[int, MPI.Request] = {}
        with self._keeping(requests, wait):
            for rank in range(self.world_size):
                received = [bytearray(1), 1, self._mpi.BYTE]
                sent = None  # of all ranks but the root, which MPI does not read
                if rank == self.rank:
                    sent = own_bytes
                requests[rank] = comm.Iscatterv(sent, received, rank)
            self._await(requests, [], wait)

    def _await_ranks(self, ranks: Sequence[int], tag: int, wait: Wait) -> None:
        """Return when all `ranks` of this backend have called; StallError names those that have not.

        Empty messages go between all pairs: making a communicator has no request that could be polled.
        """
        peers = [rank for rank in ranks if rank != self.rank]
        empty_message = [bytearray(1), 0, self._mpi.BYTE]
        sends: list[MPI.Request] = []
        receives: dict[int, MPI.Request] = {}
        with self._keeping([sends, receives], wait):
            for rank in peers:
                receives[rank] = self._comm.Irecv(empty_message, rank, tag)
                sends.append(self._comm.Isend(empty_message, rank, tag))
            try:
                self._await(receives, sends, wait)
            except StallError as error:
                for rank in error.missing:
                    receives[rank].Cancel()  # or MPI could not finalize
                raise

    def _await(self, receives: dict[int, MPI.Request], sends: Sequence[MPI.Request], wait: Wait) -> None:
        """Return when all requests are done; StallError names the ranks whose requests in `receives` are not."""
        missing = list(receives)

        def done() -> bool:
            missing[:] = [rank for rank in missing if not receives[rank].Test()]
            return not missing and all(request.Test() for request in sends)

        try:
            wait.until(done)
        except StallError:
            raise wait.stall_error(missing) from None

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Whether MPI has a type for `dtype`. False for min and max of floats: with NaN they depend on rank order."""
        name = _name_of(dtype)
        return name in _INTS or (name in _FLOATS and op in ("sum", "prod"))

    def _typed(self, tensor: torch.Tensor, count: int | None = None) -> list[Any] | None:
        """Return `tensor` as MPI takes it; None if MPI has no type for it."""
        datatype = self._datatype_of(tensor.dtype)
        if datatype is None:
            return None
        return [tensor.numpy(), tensor.numel() if count is None else count, datatype]

    def _datatype_of(self, dtype: torch.dtype) -> Any:
        if dtype not in self._datatypes:
            name = {**_FLOATS, **_INTS}.get(_name_of(dtype))
            self._datatypes[dtype] = None if name is None else getattr(self._mpi, name)
        return self._datatypes[dtype]

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, op.upper())

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Call Iallreduce, in place. Collective."""
        typed = self._typed(tensor)
        if typed is None:
            super().all_reduce(tensor, op, finish, wait)
        else:
            self._run(lambda: self._comm.Iallreduce(self._mpi.IN_PLACE, typed, self._op(op)), tensor.nbytes, wait)
            finish(tensor)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """Call Ireduce, in place on `root`. Collective."""
        typed = self._typed(tensor)
        if typed is None:
            super().reduce(tensor, op, root, finish, wait)
        else:
            # Root alone reduces in place: the others only send, and have no receive buffer.
            sent, received = typed, None
            if self.rank == root:
                sent, received = self._mpi.IN_PLACE, typed
            self._run(lambda: self._comm.Ireduce(sent, received, self._op(op), root), tensor.nbytes, wait)
            if self.rank == root:
                finish(tensor)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Call Ireduce_scatter_block. Collective."""
        # MPI counts the elements of one rank's part, for both buffers.
        typed, received = self._typed(tensor, into.numel()), self._typed(into)
        if typed is None:
            super().reduce_scatter(tensor, into, op, finish, wait)
        else:
            self._run(lambda: self._comm.Ireduce_scatter_block(typed, received, self._op(op)), tensor.nbytes, wait)
            finish(into)

    def _bytes(self, data: torch.Tensor) -> list[object]:
        return [data.numpy(), data.numel(), self._mpi.BYTE]

    def _parts(self, data: torch.Tensor, sizes: Sequence[int]) -> list[object]:
        # Without displacements the parts follow each other.
        return [data.numpy(), list(sizes), None, self._mpi.BYTE]

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """Call Ibcast. Collective."""
        self._run(lambda: self._comm.Ibcast(self._bytes(data), root), data.numel(), wait)

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Call Iallgather. Collective."""
        received = [into.numpy(), data.numel(), self._mpi.BYTE]
        self._run(lambda: self._comm.Iallgather(self._bytes(data), received), into.numel(), wait)

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """Call Ialltoallv. Collective."""
        # Also with nothing to send or receive: sizes differ between ranks, so the others may have something.
        sent, received = self._parts(data, sizes), self._parts(into, into_sizes)
        self._run(lambda: self._comm.Ialltoallv(sent, received), data.numel() + into.numel(), wait)

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        """Call Isend. Not collective."""
        self._run(lambda: self._comm.Isend(self._bytes(data), dst, tag), data.numel(), wait)

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        """Call Irecv. Not collective."""
        self._run(lambda: self._comm.Irecv(self._bytes(data), src, tag), data.numel(), wait)

    def close(self) -> None:
        """Do nothing: freeing an MPI communicator is collective, so it is left to MPI_Finalize."""
