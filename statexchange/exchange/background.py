"""Export in the background: a snapshot of what this rank holds, published by a thread while training goes on."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.comm.world import as_communicator
from statexchange.exchange.export import ExportReport, ExportRequest, export_described
from statexchange.state.describe import Description, describe
from statexchange.tensors import same_memory

__all__ = ["export_checkpoint_async"]

_ALIGN_BYTES = 64
_numbers = itertools.count()


def export_checkpoint_async(
    state: Any, out: str | os.PathLike[str], *, comm: Any = None, layout: Any = None, **options: Any
) -> Future[ExportReport]:
    """As `export_checkpoint`, which has the same options, of `state` as it is now; the report comes later.

    Collective over `comm`, but it waits for no other rank, except the first time; it returns once all that this rank
    holds is copied into memory that the next export uses again. The state may be changed then, and collectives of
    `comm` go on: a thread exports over a communicator of its own. A failure on any rank is raised by `result()` on all.
    An export that is called while one goes on waits for that one first, and so does the interpreter's end.
    `on_progress` is called in the thread.
    """
    communicator = as_communicator(comm)
    known = _backgrounds.get(communicator)
    if known is not None:
        known.wait()
    if known is None or known.comm.is_closed:  # looked at after the wait, so that all ranks see the same
        known = _backgrounds[communicator] = _Background(communicator.duplicate())
    try:
        request = ExportRequest.of(out, layout=layout, **options)
        described = describe(state, request.options.new_layout(), communicator.rank)
        taken: tuple[Description, ExportRequest] | Exception = (known.snapshot(described), request)
    except Exception as error:  # noqa: BLE001 (the thread raises it, on all ranks)
        taken = error
    except BaseException as error:
        known.comm.close(error)
        raise

    def export() -> ExportReport:
        with known.comm.phase("taking a snapshot"):
            if isinstance(taken, Exception):
                raise taken
        return export_described(*taken, known.comm)

    return known.start(export)


class _Background:
    """The thread of one communicator's exports, and the memory of their snapshots."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # A name of its own: by their names ranks tell threads apart that call for the first time
        self._pool = ThreadPoolExecutor(1, f"statexchange export {next(_numbers)} of rank {comm.rank}")
        self._last: Future[ExportReport] | None = None
        self._memory: Any = None

    def wait(self) -> None:
        """Return when the last export has ended; whoever has its future hears how."""
        if self._last is not None:
            self._last.exception()

    def start(self, export: Callable[[], ExportReport]) -> Future[ExportReport]:
        """Run `export` in the thread."""
        self._last = self._pool.submit(export)
        return self._last

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
