"""Messages through an MPI communicator (mpi4py)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from statexchange.comm.communicator import Backend
from statexchange.errors import MissingExtraError, PeerError, StallError

__all__ = ["MPIBackend", "world"]

_MAX_NAP_S = 0.002


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtraError(f'MPI needs mpi4py: pip install "statexchange[mpi]" ({error})') from error
    return MPI


def world() -> Any:
    """MPI's world, with an uncaught exception on any rank set to end the whole job."""
    mpi = _mpi()
    _abort_on_uncaught()
    return mpi.COMM_WORLD


def _abort_on_uncaught() -> None:
    """Without this the other ranks of a failed one would wait for ever in MPI_Finalize."""
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
    """One rank of an MPI communicator. Requests are polled, never waited for, so that a deadline holds."""

    name = "mpi"

    def __init__(self, comm: Any, *, own: bool = False) -> None:
        self._mpi = _mpi()
        self._comm = comm if own else comm.Dup()
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.rank = int(comm.Get_rank())
        self.world_size = int(comm.Get_size())
        self._abandoned: list[Any] = []

    def exchange(self, payload: bytes, timeout_s: float, doing: str) -> list[bytes]:
        """Every rank's payload, by two all-gathers: sizes, then bytes."""
        deadline = time.monotonic() + timeout_s
        sizes = bytearray(8 * self.world_size)
        self._all_gather(len(payload).to_bytes(8, "little"), sizes, [8] * self.world_size, deadline, doing)
        counts = [int.from_bytes(sizes[i : i + 8], "little") for i in range(0, len(sizes), 8)]
        gathered = bytearray(sum(counts))
        self._all_gather(payload, gathered, counts, deadline, doing)
        begins = [sum(counts[:i]) for i in range(self.world_size)]
        return [bytes(gathered[b : b + c]) for b, c in zip(begins, counts, strict=True)]

    def _all_gather(self, ours: bytes, into: bytearray, counts: list[int], deadline: float, doing: str) -> None:
        byte = self._mpi.BYTE
        try:
            request = self._comm.Iallgatherv([ours, len(ours), byte], [into, counts, None, byte])
            nap = 2e-5
            while not request.Test():
                if time.monotonic() > deadline:
                    self._abandoned += [request, ours, into]
                    raise StallError(f"not all ranks reached {doing} in time", rank=self.rank)
                time.sleep(nap)
                nap = min(nap * 1.5, _MAX_NAP_S)
        except self._mpi.Exception as error:
            self._abandoned += [ours, into]
            raise PeerError(-1, doing, str(error)) from error

    def subset(self, ranks: Sequence[int]) -> Backend:
        """A communicator of `ranks`; only they take part in making it."""
        group = self._comm.Get_group().Incl(list(ranks))
        return MPIBackend(self._comm.Create_group(group), own=True)

    def close(self) -> None:
        """Nothing: freeing an MPI communicator is collective, so it is left to MPI_Finalize."""
