"""Export in the background: a snapshot of what this rank holds, published by a thread while training goes on."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any

import numpy as np

from statexchange.comm.calls import call_site, public_call
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.errors import StateExchangeError, excerpt, without_secrets
from statexchange.exchange.export import ExportReport, ExportRequest, export_described
from statexchange.state.describe import Description, describe
from statexchange.tensors import same_memory

__all__ = ["export_checkpoint_async"]

_log = logging.getLogger(__name__)
_ALIGN_BYTES = 64
_numbers = itertools.count()


@public_call("export_checkpoint_async")
def export_checkpoint_async(
    state: Any, out: str | os.PathLike[str], *, comm: Any = None, layout: Any = None, **options: Any
) -> Future[ExportReport]:
    """As `export_checkpoint`, which has the same options, of `state` as it is now; the report comes later.

    Collective over `comm`, but it waits for no other rank, except the first time; it returns once all that this rank
    holds is copied into memory that the next export uses again. The state may be changed then, and collectives of
    `comm` go on: a thread exports over a communicator of its own. An export that is called while one goes on waits for
    that one first, and so does the interpreter's end; it cannot be cancelled. `on_progress` is called in the thread.

    A failure on any rank is logged on all, and raised by `result()` on all. Where nobody has asked for it, the next
    call raises it, and exports nothing on any rank; at the interpreter's end it is logged once more.
    """
    communicator = as_communicator(comm)
    site = call_site()
    known = _backgrounds.get(communicator)
    failure = None if known is None else known.take_failure()
    if known is None or known.comm.is_closed:  # looked at after the wait, so that all ranks see the same
        known = _backgrounds[communicator] = _Background(communicator.duplicate())
    try:
        if failure is not None:  # the other ranks may have heard of it, and go on: they are to raise it, too
            raise failure.located() if isinstance(failure, StateExchangeError) else failure  # not as the one they know
        request = ExportRequest.of(out, layout=layout, **options)
        described = describe(state, request.options.new_layout(), communicator.rank)
        taken: tuple[Description, ExportRequest] | Exception = (known.snapshot(described), request)
    except Exception as error:  # noqa: BLE001 (the thread raises it, on all ranks)
        taken = error
    except BaseException as error:
        known.comm.close(error)
        raise

    def export() -> ExportReport:
        with public_call("export_checkpoint_async", site):
            with known.comm.phase("taking a snapshot"):
                if isinstance(taken, Exception):
                    raise taken
            return export_described(*taken, known.comm)

    shown = str(out) if isinstance(out, (str, os.PathLike)) else excerpt(out)
    result = _Result(without_secrets(shown), is_told=failure is not None)
    known.start(export, result)
    if failure is not None:
        raise failure.with_traceback(None)
    return result


class _Result(Future[ExportReport]):
    """The result of an export, which runs from the beginning: it cannot be cancelled.

    `is_told` says that whoever called has been told of a failure, or needs not be.
    """

    def __init__(self, out: str, *, is_told: bool) -> None:
        super().__init__()
        self.out = out
        self.is_told = is_told
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> ExportReport:
        """Wait for the report; raise what the export has failed of."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return what the export has failed of."""
        failure = super().exception(timeout)
        self.tell()
        return failure

    def tell(self) -> None:
        """Count a failure as told."""
        self.is_told = True
        _untold.discard(self)

    def fail(self, error: BaseException) -> None:
        """End with `error`, which is logged, and kept until somebody is told."""
        if not self.is_told:
            _untold.add(self)
            _log.warning("the export to %s in the background has failed: %s", self.out, _said(error))
        self.set_exception(error)


_untold: set[_Result] = set()


@functools.cache
def _log_at_exit() -> None:
    """Have failures that nobody has asked for logged at the interpreter's end, once the threads have ended."""
    atexit.register(_log_untold)


def _log_untold() -> None:
    for result in list(_untold):
        error = result.exception()
        _log.warning(
            "nobody has asked how the export to %s went, and it has failed: call result() of what "
            "export_checkpoint_async returns (%s)",
            result.out,
            _said(error),
        )


def _said(error: BaseException | None) -> str:
    return str(error) if isinstance(error, StateExchangeError) else repr(error)


class _Background:
    """The thread of one communicator's exports, and the memory of their snapshots."""

    def __init__(self, comm: Communicator) -> None:
        _log_at_exit()
        self.comm = comm
        # A name of its own: by their names ranks tell threads apart that call for the first time
        self._pool = ThreadPoolExecutor(1, f"statexchange export {next(_numbers)} of rank {comm.rank}")
        self._last: _Result | None = None
        self._memory: Any = None

    def take_failure(self) -> BaseException | None:
        """Wait for the end of the last export; return what it has failed of, if nobody was told, who now is."""
        last, self._last = self._last, None
        if last is None:
            return None
        wait_for([last])
        return None if last.is_told else last.exception()

    def start(self, export: Callable[[], ExportReport], result: _Result) -> None:
        """Run `export` in the thread."""
        self._last = result

        def run() -> None:
            try:
                report = export()
            except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
                result.fail(error)
            else:
                result.set_result(report)

        self._pool.submit(run)

    def snapshot(self, described: Description) -> Description:
        """`described` with all tensors copied; what is one tensor is copied once."""
        unique: dict[Any, Any] = {}
        for held in described.held.values():
            for tensor in held.tensors:
                unique.setdefault(_key(tensor), tensor)
        sizes = {key: _room(tensor) for key, tensor in unique.items()}
        memory = self._room_for(sum(sizes.values()))
        copies, at = {}, 0
        for key, tensor in unique.items():
            copies[key] = _copied(tensor, memory[at : at + sizes[key]])
            at += sizes[key]
        _settle(unique.values())
        return replace(
            described,
            held={n: replace(h, tensors=tuple(copies[_key(t)] for t in h.tensors)) for n, h in described.held.items()},
        )

    def _room_for(self, nbytes: int) -> Any:
        import torch

        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # before the new one is made
            pinned = torch.cuda.is_available()
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._memory


_backgrounds: weakref.WeakKeyDictionary[Communicator, _Background] = weakref.WeakKeyDictionary()


def _key(tensor: Any) -> Any:
    """What tied tensors share."""
    return same_memory(tensor) or id(tensor)


def _room(tensor: Any) -> int:
    """Bytes that a copy takes, up to where the next one may begin."""
    return -(-int(tensor.nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES


def _copied(tensor: Any, room: Any) -> Any:
    """A copy of `tensor` on the host, in `room`; of a GPU's it is complete only after `_settle`."""
    if isinstance(tensor, np.ndarray):
        copy = room.numpy()[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        copy[...] = tensor
        return copy
    import torch

    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    copy = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _settle(tensors: Iterable[Any]) -> None:
    """Return when copies from GPUs are complete."""
    for device in {str(tensor.device) for tensor in tensors if not isinstance(tensor, np.ndarray)}:
        if device.startswith("cuda"):
            import torch

            torch.cuda.current_stream(device).synchronize()
