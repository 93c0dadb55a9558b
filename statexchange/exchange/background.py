"""Run an export or save in the background: a thread writes a copy of the tensors while training goes on."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from statexchange.comm.calls import call_site
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import public_call
from statexchange.errors import StateExchangeError, excerpt, needing_extra, without_secrets
from statexchange.state.describe import Description
from statexchange.tensors import TensorLike, copied_into, name_of_dtype, same_memory

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Report = TypeVar("Report")

_log = logging.getLogger(__name__)
_ALIGN_BYTES = 64  # of copies side by side in one buffer: a multiple of any element's size, and of a cache line


def run_in_background(
    call: str,
    path: object,
    comm: Communicator,
    prepare: Callable[[], tuple[Description, Callable[[Description, Communicator], Report]]],
) -> Future[Report]:
    """Describe a state, and write a copy of it in a thread. Collective.

    `prepare` checks the arguments of the public call named `call` and describes the state. It returns the description,
    and the function that is called with one of copies, and with a communicator. A failure in `prepare` is raised on all
    ranks by the thread, so that this call waits for no rank.
    """
    site = call_site()
    state = _backgrounds.get(comm)
    failure: BaseException | None = None
    if state is not None:
        failure = state.take_failure()
    if state is None or state.comm.is_closed:  # `is_closed` is equal on all ranks only after the wait above
        # A communicator of its own: messages of the thread must not meet those that the program sends meanwhile.
        copy = comm.duplicate()
        copy.hand_over()
        state = _backgrounds[comm] = _Background(copy)
    try:
        if failure is not None:  # raised again on all ranks, also where the caller has received it
            raise failure.located() if isinstance(failure, StateExchangeError) else failure
        described, finish = prepare()
        snapshot: Description | Exception = state.snapshot(described)
    except Exception as error:  # noqa: BLE001 (the thread raises it, on all ranks)
        snapshot = error
    except BaseException as error:
        # An interrupt or exit: this rank sends no snapshot, and the other ranks' threads must not wait for it.
        state.comm.close(error)
        raise

    def run() -> Report:
        with public_call(call, site):
            with state.comm.phase("taking a snapshot"):
                if isinstance(snapshot, Exception):
                    raise snapshot
            return finish(snapshot, state.comm)

    shown = str(path) if isinstance(path, (str, os.PathLike)) else excerpt(path)
    result: _Result[Report] = _Result(call, without_secrets(shown), is_reported=failure is not None)
    state.start(run, result)
    if failure is not None:
        raise failure.with_traceback(None)
    return result


def wait_for_end(result: Future[Report] | None) -> None:
    """Wait for the end of work in the background, if any, and raise its failure unless the caller has received it.

    A forked child, which has no such thread, returns at once.
    """
    if isinstance(result, _Result) and not result.is_inherited:
        wait_for([result])
        if not result.is_reported:
            result.result()


class _Result(Future[Report]):
    """The result of an export or save. It is running from the start, so that it cannot be cancelled.

    `is_reported`: the caller has received the failure, or an earlier one in its place.
    """

    def __init__(self, call: str, path: str, *, is_reported: bool) -> None:
        super().__init__()
        self.call = call
        self.path = path
        self.is_reported = is_reported
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()

    @property
    def is_inherited(self) -> bool:
        """Whether it was created before a fork, so that only the parent's thread completes it."""
        return os.getpid() != self._pid

    def result(self, timeout: float | None = None) -> Report:
        """Wait for the report; raise the failure."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the failure, or None."""
        failure = super().exception(timeout)
        self.is_reported = True
        return failure

    def fail(self, error: BaseException) -> None:
        """End with `error`: log it, and keep it until the caller asks for it."""
        if not self.is_reported:
            text = str(error) if isinstance(error, StateExchangeError) else repr(error)
            _log.warning("%s to %s in the background has failed: %s", self.call, self.path, text)
        self.set_exception(error)


class _Background:
    """The thread of one communicator's exports and saves, and the memory of their snapshots."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._pool = ThreadPoolExecutor(1, f"statexchange background of rank {comm.rank}")
        self._last: _Result[Any] | None = None
        self._memory: torch.Tensor | None = None

    def take_failure(self) -> BaseException | None:
        """Wait for the end of the last work; return its failure if the caller has not received it yet."""
        last, self._last = self._last, None
        if last is None:
            return None
        wait_for([last])
        return None if last.is_reported else last.exception()

    def start(self, work: Callable[[], Report], result: _Result[Report]) -> None:
        """Run `work` in the thread."""
        self._last = result

        def run() -> None:
            try:
                report = work()
            except BaseException as error:  # noqa: BLE001 (result() raises it)
                result.fail(error)
            else:
                result.set_result(report)

        self._pool.submit(run)  # of one thread: works come one after another, in the order that all ranks have

    def snapshot(self, described: Description) -> Description:
        """Return the description over copies of its tensors; tied tensors are copied once.

        All copies lie in one buffer, which the next snapshot uses again: pinning memory takes longer than copying.
        """
        unique: dict[object, TensorLike] = {}
        for local in described.tensors.values():
            for tensor in local.tensors:
                unique.setdefault(_key(tensor), tensor)
        memory = self._memory_of(sum(map(_aligned_bytes, unique.values())))
        copies: dict[object, TensorLike] = {}
        at = 0
        for key, tensor in unique.items():
            dtype, data = str(name_of_dtype(tensor.dtype)), memory[at : at + tensor.nbytes]
            copies[key] = copied_into(data, tensor, dtype, non_blocking=True)
            at += _aligned_bytes(tensor)
        # Copies of all GPUs run side by side until here.
        _synchronize(unique.values())
        tensors = {}
        for name, local in described.tensors.items():
            copied = tuple(copies[_key(tensor)] for tensor in local.tensors)
            # Not the memory of the live tensors, which the job changes while the copies are written.
            tensors[name] = local._replace(tensors=copied, memory=())
        return replace(described, tensors=tensors)

    def _memory_of(self, nbytes: int) -> NDArray[np.uint8]:
        with needing_extra("work in the background"):
            import torch

        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # frees the old memory before the new is allocated
            pinned = torch.cuda.is_available()
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._memory.numpy()


_backgrounds: weakref.WeakKeyDictionary[Communicator, _Background] = weakref.WeakKeyDictionary()


def _key(tensor: TensorLike) -> object:
    """Return a key that is equal for tied tensors."""
    return same_memory(tensor) or id(tensor)


def _aligned_bytes(tensor: TensorLike) -> int:
    """Return the bytes of a copy, rounded up to where the next copy may begin."""
    return -(-int(tensor.nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES


def _synchronize(tensors: Iterable[TensorLike]) -> None:
    """Wait until copies from GPUs are complete."""
    devices = set()
    for tensor in tensors:
        if not isinstance(tensor, np.ndarray) and tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        import torch

        torch.cuda.current_stream(device).synchronize()
