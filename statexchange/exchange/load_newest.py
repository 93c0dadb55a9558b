"""Load the newest save of a directory, or a wanted one, of which files may lie in the hosts' memory."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

from statexchange.comm.communicator import Communicator, from_all, from_root
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    ReplicaError,
    StateExchangeError,
    without_secrets,
)
from statexchange.exchange.load import load_now
from statexchange.exchange.load_report import LoadReport, LoadRequest
from statexchange.exchange.memory_copy import MemoryCopies
from statexchange.exchange.saves_directory import SavesDirectory
from statexchange.settings import check_flags
from statexchange.sharding.options import check_equal_options
from statexchange.storage.memory_directory import is_in_copy

_log = logging.getLogger(__name__)
_ATTEMPTS = 5  # to load the newest save while others are removed


@dataclass(frozen=True, slots=True)
class SaveLoader:
    """Loads saves of a directory.

    Attributes:
        saves: the directory.
        memory: the copies in memory; None if there are none.
        comm: the communicator.
    """

    saves: SavesDirectory
    memory: MemoryCopies | None
    comm: Communicator

    def load(self, request: LoadRequest, step: int | None, *, missing_ok: bool) -> LoadReport | None:
        """Load the save of `step`, by default the newest; return None if there is none. Collective."""
        with self.comm.phase("looking for saves"):
            check_flags(missing_ok=missing_ok)
        # Ranks that ask for different steps would each load a save that is whole, and of another time.
        asked = {"step": str(step), "missing_ok": str(missing_ok), "memory": str(self.memory is not None)}
        sent = from_all(self.comm, asked, dict[str, str], "what to load")
        with self.comm.phase("comparing what to load"):
            check_equal_options(sent)
        attempts_left = _ATTEMPTS
        while True:
            attempts_left -= 1
            chosen = self._choose(step, missing_ok=missing_ok)
            if chosen is None:
                return None
            try:
                report = self._load(replace(request, path=self.saves.path_of(chosen)))
                self.saves.note_loaded()
                return report
            except NotFoundError as error:  # on all ranks: its names are missing, or the save was removed
                # The retention of another job may remove the newest save while it is opened: then there is a newer one.
                if not attempts_left or not self._was_removed(chosen):
                    raise
                if step is not None:
                    text = f"step {chosen} was removed while it was opened"
                    raise NotFoundError(text, path=self.saves.path_of(chosen)) from error
            except (CorruptError, IncompleteError) as error:
                if step is not None or isinstance(error, ReplicaError) or self.comm.rank != 0:
                    raise
                raise error.located(advice=self.saves.advice(chosen)) from error

    def _choose(self, step: int | None, *, missing_ok: bool) -> int | None:
        """Return the step to load, as rank 0 finds it; None without a save. Collective."""
        chosen: int | None = None
        with self.comm.phase("looking for saves"):
            # Rank 0 alone: another host may not see yet what was renamed last.
            if self.comm.rank == 0:
                chosen = self.saves.choose(step, missing_ok=missing_ok)
        return from_root(self.comm, chosen, int | None, "the step to load")

    def _was_removed(self, step: int) -> bool:
        """Return whether rank 0 finds the save of `step` gone. Collective."""
        is_gone = self.comm.rank == 0 and step not in self.saves.steps()
        return from_root(self.comm, is_gone, bool, "whether the save is gone")

    def _load(self, request: LoadRequest) -> LoadReport:
        """Load the save at the request's path: what lies in memory from there, the rest from disk. Collective."""
        copies = self.memory
        if copies is None:
            return load_now(request, self.comm)
        try:
            return load_now(replace(request, reading=copies.reading), self.comm)
        except StateExchangeError as error:  # on all ranks
            if not is_in_copy(error.path):
                raise
            path = os.fspath(request.path)
            if self.comm.rank == 0:
                text = "the copy of %s in memory cannot be loaded, so the save on disk is: %s"
                _log.warning(text, without_secrets(path), error)
            # A copy with other bytes than its digests stays wrong; what else fails may be well at the next restart.
            if isinstance(error, CorruptError):
                copies.drop(path, self.comm)
            try:
                return load_now(request, self.comm)
            except StateExchangeError as last:
                # Tensors may have been filled from memory, and only the first error says how many.
                raise last.located(advice=f"before this, the load from memory ended so: {error.message}") from error
