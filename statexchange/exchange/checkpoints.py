"""A directory of a job's saves by step: decide when to save, save, remove old saves, and load the newest.

**The directory.** ``<path>/step-000000700/`` is the save of step 700 (saving.py). It appears when it is whole, so a job
that is killed during a save resumes from the previous save. All ranks learn from rank 0 which saves there are. At a URL
a save is whole when it has its manifest. What a process of another host left there is removed once its claim has not
changed for 60 s; for this, rank 0 remembers the claims that it has seen.

**Retention.** After a save rank 0 removes the saves that `keep`, `keep_every` and `best` do not keep, oldest first. A
save is renamed before its first file is removed, and at a URL its manifest is removed first, so no reader opens a part
of it. Directories that have files which no save lists are never removed.

**Memory.** With `memory` the newest save also lies in the hosts' shared memory, from which a restarted job loads
(memory_copy.py). Each save is on disk first, and the saves on disk decide what may be loaded.

**Two jobs.** Rank 0 remembers which steps it found and saved. A step that it did not save and that was not there before
comes from another job on the same directory, and is named in a warning. Such a step is never removed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, overload

from statexchange.checkpoint.publication import target_path
from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplicaError,
    StateExchangeError,
    TargetExistsError,
    excerpt,
    without_secrets,
)
from statexchange.exchange.background import raise_unreported, wait_for_end
from statexchange.exchange.load import load_now
from statexchange.exchange.load_checkpoint import load_checkpoint
from statexchange.exchange.load_report import LoadReport, LoadRequest
from statexchange.exchange.memory_copy import COPY_ERRORS, MemoryCopies
from statexchange.exchange.rank_metadata import check_equal_options
from statexchange.exchange.save import save_in_background, save_now
from statexchange.exchange.saving import SaveReport, SaveRequest
from statexchange.settings import check_flags, check_progress, check_timeout, restart_grace_s
from statexchange.sharding import records
from statexchange.sharding.options import LoadOptions
from statexchange.state.describe import State
from statexchange.storage.location import location
from statexchange.storage.save_check import check_saves, whole_saves
from statexchange.storage.save_directory import SaveManifest
from statexchange.storage.steps import (
    MAX_STEP,
    Retention,
    check_only_saves,
    clear_leftovers,
    read_saves,
    remove_save,
    step_name,
    steps_text,
    watch_claims,
)
from statexchange.units import format_seconds

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self

    from statexchange.storage.object_removal import ClaimWatch
    from statexchange.storage.tensorfile import DigestedTensors

__all__ = ["Checkpoints"]

_log = logging.getLogger(__name__)
_LOAD_OPTIONS = ("strict", "include", "exclude", "rename", "dtype", "replicas", "on_progress")
_ATTEMPTS = 5  # to load the newest save while others are removed


class Checkpoints:
    """The saves of a job in one directory, by step, across restarts and world sizes.

    Constructing it touches no file and communicates with no rank.

    Args:
        path: a local directory that all hosts see, or an fsspec URL such as ``s3://bucket/saves``; the first save makes
            it.
        keep: how many of the newest saves stay; None keeps all. A broken save does not count, and stays.
        every_steps: `should_save` is true at multiples of this number of steps.
        every_s: `should_save` is true when this many seconds have passed since the last save, by rank 0's clock.
        keep_every: saves at multiples of this number of steps stay, beside those of `keep`.
        best: a metric and "min" or "max", as ``("loss", "min")``: the save with the best value stays, beside those of
            `keep`. A save whose value is NaN, or that lacks the metric, is never the best.
        on_signal: signals at which `should_save` becomes true on all ranks: "SIGTERM", or "SIGUSR1" of Slurm's
            ``--signal`` (for srun and mpiexec: under torchrun it kills the agent). Handlers are installed here and
            removed by `close`. They call the handler that was there before, but SystemExit and KeyboardInterrupt,
            which it may raise, do not end the process: leave the loop when `is_stopping` is true.
        agree_every: steps between comparisons of signals and clocks. More steps are cheaper, but delay signals.
        grace_s: seconds between the signal and the kill, for a warning if they are too few; None is 30 under torchrun,
            else unknown.
        memory: also keep a copy of the newest save in each host's shared memory, of the host's own ranks and of those
            of one other host. A job that is started again on these hosts loads it from there, on any world size, if
            all of it is there, is as new as the disk's and agrees with its digests. Without room for it there is no
            copy, and one warning is given. It stays in /dev/shm after the end of the job, until `delete`, or until a
            job with `memory` finds that it is older than the disk's newest save, that `path` is gone (if it is no URL),
            or that it needs the room.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        layout: rules for plain tensors that are parts of whole ones, as in `save_checkpoint`, for saves and loads.
        stall_timeout_s: limit of the time in which no rank moves a byte, in seconds. A rank that does not call at all
            is waited for until the communicator's `timeout_s`.

    Raises:
        InvalidArgumentError: an argument is not accepted, or `on_signal` is used outside of the main thread.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> state = {"w": torch.zeros(2), "step": 0}
        >>> with sx.Checkpoints("saves", keep=2, every_steps=10) as saves:
        ...     report = saves.load(state)  # None at the first start
        ...     for step in range(state["step"] + 1, 31):
        ...         state["step"] = step
        ...         if saves.should_save(step):
        ...             report = saves.save(state, step)
        ...     saves.steps()
        [20, 30]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep_every: int | None = None,
        best: tuple[str, Literal["min", "max"]] | None = None,
        on_signal: str | Sequence[str] | None = None,
        agree_every: int = 10,
        grace_s: float | None = None,
        memory: bool = False,
        comm: CommLike | None = None,
        layout: Mapping[str, Any] | None = None,
        stall_timeout_s: float = 300.0,
    ) -> None:
        self.path = target_path(path)
        self._shown = without_secrets(self.path)  # for logs; errors remove secrets themselves
        self._retention = Retention(keep, keep_every, best)
        self._every_steps = None if every_steps is None else _whole(every_steps, "every_steps", least=1)
        self._every_s = None if every_s is None else check_timeout(every_s, "every_s")
        self._agree_every = _whole(agree_every, "agree_every", least=1)
        self._grace_s = restart_grace_s() if grace_s is None else check_timeout(grace_s, "grace_s")
        self._stall_timeout_s = check_timeout(stall_timeout_s, "stall_timeout_s")
        check_flags(memory=memory)
        self._memory = MemoryCopies(self.path, self._stall_timeout_s) if memory else None
        self._comm = comm
        self._layout = layout
        self._known: set[int] | None = None  # root: steps that were there at the first look, or that this job saved
        self._foreign: set[int] = set()  # root: steps of another job, each of which a warning has named
        self._warned_of: int | None = None  # root: the newest step that a warning has named
        self._watch: ClaimWatch | None = None  # root, at a URL
        self._checked: set[tuple[str | int, ...]] = set()  # root: versions of files that `check_saves` need not read
        self._begun: dict[int, str] = {}  # root: by step, the job of a save that has not ended, or has failed
        self._last: Future[SaveReport] | None = None
        self._pace = _Pace()
        self._signals = _Signals(on_signal)

    # Saving

    def should_save(self, step: int) -> bool:
        """Return whether to save now: the same answer on all ranks.

        Collective every `agree_every` steps if `every_s` or `on_signal` is used; else not collective. Call it once in
        each step, with the same step on all ranks. After a signal it is true once, and `is_stopping` stays true.

        Args:
            step: the number of the step that has just ended.

        Returns:
            Whether a multiple of `every_steps`, the time of `every_s` or a signal has been reached.

        Raises:
            StateExchangeError: as `Communicator.all_gather_object`.

        Example:
            >>> import statexchange as sx
            >>> saves = sx.Checkpoints("saves", every_steps=10)
            >>> [step for step in range(1, 31) if saves.should_save(step)]
            [10, 20, 30]
        """
        number = _whole(step, "step")
        self._pace.note_step(number)
        wanted = self._every_steps is not None and number > 0 and number % self._every_steps == 0
        needs_agreement = self._every_s is not None or self._signals.names
        if needs_agreement and number % self._agree_every == 0:
            wanted |= self._agree()
        return wanted

    def _agree(self) -> bool:
        """Compare signals and rank 0's clock. Collective."""
        with public_call("Checkpoints.should_save"):
            comm = as_communicator(self._comm)
        self._warn_of_grace(comm)
        is_due = comm.rank == 0 and self._every_s is not None and self._pace.since_save_s >= self._every_s
        received = self._signals.take()
        with public_call("Checkpoints.should_save"):
            sent = comm.all_gather_object([received, is_due])
        found = [records.parsed(raw, _signal_and_due, "its signals", rank) for rank, raw in enumerate(sent)]
        names = {name for name, _ in found if name is not None}
        for rank, (name, _) in enumerate(found):
            if name is not None and comm.rank == 0:
                _log.info("rank %d received %s: saving at this step", rank, name)
        self._signals.is_stopping |= bool(names)
        return bool(names) or any(due for _, due in found)

    def _warn_of_grace(self, comm: Communicator) -> None:
        """Warn once if the time between a signal and the kill is too short for the next agreement and a save."""
        needed_s = self._pace.step_s * self._agree_every + self._pace.save_s
        if not self._signals.names or self._grace_s is None or needed_s <= self._grace_s or comm.rank != 0:
            return
        _log.warning(
            "after a signal a save takes up to %s (%d steps of %s until ranks compare signals, and %s for the save), "
            "and the job is killed after %s: use a smaller agree_every, or a longer time before the kill",
            format_seconds(needed_s),
            self._agree_every,
            format_seconds(self._pace.step_s),
            format_seconds(self._pace.save_s),
            format_seconds(self._grace_s),
        )
        self._grace_s = None

    @property
    def is_stopping(self) -> bool:
        """Whether any rank has received a signal of `on_signal`: save, then leave the training loop."""
        return self._signals.is_stopping

    @overload
    def save(
        self,
        state: State,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
        background: Literal[False] = False,
    ) -> SaveReport: ...

    @overload
    def save(
        self,
        state: State,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
        background: Literal[True],
    ) -> Future[SaveReport]: ...

    def save(
        self,
        state: State,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
        background: bool = False,
    ) -> SaveReport | Future[SaveReport]:
        """Save `state` as the directory of `step`, then remove the saves that are not kept.

        Collective; blocks until the save is published, or in the background until this rank's tensors are copied. A
        save waits for one in the background, and raises its failure unless `result()` has raised it.

        Args:
            state: a nested mapping, as ``{"model": ..., "optimizer": ..., "step": 7}``, or a module.
            step: the training step, a whole number from 0 to 10**18 - 1, the same on all ranks.
            metrics: numbers to store with the save, by name; rank 0's are used, and other ranks need none.
            overwrite: replace the save of this step; without it, an existing save is a TargetExistsError.
            background: save a copy in a thread, and return a Future.

        Returns:
            The report, or with `background` a Future of it.

        Raises:
            TargetExistsError: there is a save of this step and `overwrite` is false.
            InvalidArgumentError: `step` or `metrics` is not accepted, or differs between ranks.
            StateExchangeError: as `save_checkpoint`.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> saves = sx.Checkpoints("saves", best=("loss", "min"))
            >>> report = saves.save({"w": torch.zeros(2)}, 100, metrics={"loss": 0.25})
            >>> report.step
            100
        """
        with public_call("Checkpoints.save"):
            comm = as_communicator(self._comm)

        def request() -> SaveRequest:
            check_flags(background=background)
            return self._request(step, metrics, comm, overwrite=overwrite)

        with public_call("Checkpoints.save"):
            if background:
                path = os.path.join(self.path, f"step {excerpt(step)}")
                self._last = save_in_background("Checkpoints.save", state, path, request, comm)
                self._pace.note_save(None)
                return self._last
            with comm.phase("waiting for the previous save"):
                self._wait()
            return save_now(state, request, comm)

    def _request(
        self, step: int, metrics: Mapping[str, SupportsFloat] | None, comm: Communicator, *, overwrite: bool
    ) -> SaveRequest:
        number = _whole(step, "step")
        if number > MAX_STEP:
            raise InvalidArgumentError(f"step must be at most {MAX_STEP}, not {excerpt(number)}", path=self.path)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise InvalidArgumentError(f"metrics must be numbers by name, as {{'loss': 0.25}}, not {excerpt(metrics)}")
        found = {str(name): _metric(name, value) for name, value in (metrics or {}).items()}
        best = self._retention.best
        if best is not None and best[0] not in found and comm.rank == 0:  # only its metrics are stored
            text = "%s: step %d is saved without the metric %r, so it is never the best: pass metrics={%r: ...}"
            _log.warning(text, self._shown, number, best[0], best[0])
        return SaveRequest.of(
            os.path.join(self.path, step_name(number)),
            layout=self._layout,
            job=comm.run,
            overwrite=overwrite,
            stall_timeout_s=self._stall_timeout_s,
            step=number,
            metrics=found,
            before=functools.partial(self._check_directory, number, comm.run, overwrite=overwrite),
            after=self._note_saved,
            memory=self._memory is not None,
        )

    def _note_saved(self, report: SaveReport, comm: Communicator, content: DigestedTensors | None) -> None:
        """Record a published save; root removes those that are not kept. Collective if there is a copy in memory."""
        self._pace.note_save(report.seconds)
        if comm.rank == 0 and report.step is not None:
            assert self._known is not None
            self._known.add(report.step)
            self._foreign.discard(report.step)  # overwritten
            del self._begun[report.step]
            self._remove_obsolete(report.step, self._known)
            self._warn_of_newer(report.step, max(self._known))
        if self._memory is not None and report.step is not None:
            self._memory.keep(report.step, comm, content)

    def _check_directory(self, step: int, job: str, *, overwrite: bool) -> None:
        """Clean up after killed jobs, warn of steps of another job, and refuse a step that is saved. Root only."""
        at = location(self.path)
        if at.local is not None and not os.path.isdir(at.local):
            at.check_can_be_made(NotFoundError("no such directory", path=self.path))
            self._known = set()
        else:
            seen = self._foreign | (self._known or set())
            clear_leftovers(self.path, without=seen - {step}, watch=self._claims())
            saves = read_saves(self.path, without=seen - {step})
            if self._known is None:
                self._known = set(saves)
            for found in sorted(set(saves) - self._known - self._foreign):
                manifest = saves[found]
                if isinstance(manifest, SaveManifest) and manifest.job == self._begun.get(found):
                    self._known.add(found)  # the save was interrupted after it had been published
                else:
                    self._foreign.add(found)
                    self._warn_of_other_job(found, manifest)
            if step in saves and not overwrite:
                text = (
                    f"step {step} is saved already: load the newest save before training, delete({step}), or replace "
                    "it by overwrite=True"
                )
                raise TargetExistsError(text, path=os.path.join(self.path, step_name(step)))
        self._begun[step] = job

    def _claims(self) -> ClaimWatch | None:
        """Return the record of the claims that this process has seen; None for a local directory. Root only."""
        if self._watch is None:
            self._watch = location(self.path).claim_watch()
        return self._watch

    def _warn_of_other_job(self, step: int, manifest: SaveManifest | StateExchangeError) -> None:
        job = manifest.job if isinstance(manifest, SaveManifest) else "another job"
        _log.warning(
            "%s: step %d was saved here by %s while this job runs: give each job a directory of its own, or end one; "
            "this job removes none of the other's saves",
            self._shown,
            step,
            job,
        )

    def _warn_of_newer(self, step: int, newest: int) -> None:
        """Warn once of a newer save, which a restart would load in place of the one just made. Root only."""
        if newest <= step or newest == self._warned_of or newest not in self.steps():
            return
        self._warned_of = newest
        _log.warning(
            "%s: step %d is saved, but a load without a step takes the newest save, that of step %d: if this job went "
            "back to an older step, delete() the saves that come after that step",
            self._shown,
            step,
            newest,
        )

    def _remove_obsolete(self, current: int, known: set[int]) -> None:
        """Remove the saves that are not kept; a failure is logged, and the next save tries again. Root only."""
        if self._retention.keep is None:  # all stay: no need to read each manifest
            return
        try:
            checks = check_saves(self.path, checked=self._checked, trusted=(current,))
            for step in self._retention.obsolete(whole_saves(checks)):
                if step != current and step in known:
                    self._remove(step)
        except (StateExchangeError, OSError) as error:  # the other ranks do not wait for this
            _log.warning("cannot look for old saves: %s", error)

    def _remove(self, step: int) -> None:
        try:
            remove_save(self.path, step, waits=False)
            _log.info("removed the save of step %d in %s", step, self._shown)
        except NotFoundError:
            return
        except (StateExchangeError, OSError) as error:
            _log.warning("cannot remove an old save: %s", error)

    def _wait(self) -> None:
        """Wait for a save in the background, and raise its failure unless the caller has received it."""
        last = self._last
        if last is not None:
            wait_for_end(last)
            self._last = None  # only now: an interrupted wait is not the end of the save
            raise_unreported(last)

    # Loading

    def load(
        self, state: State, step: int | None = None, *, missing_ok: bool = True, **options: Any
    ) -> LoadReport | None:
        """Load the newest save, or that of `step`, into `state`, in place.

        Collective. World size, mesh and placements may differ from those of the save.

        Args:
            state: as for `load_checkpoint`.
            step: the step to load; by default the newest.
            missing_ok: return None if there is no save yet; else that is a NotFoundError.
            options: `strict`, `include`, `exclude`, `rename`, `dtype`, `replicas` and `on_progress` of
                `load_checkpoint`.

        Returns:
            The report, whose `step` is the one that was loaded. None on all ranks if `step` is None and the directory
            is absent, is empty, or has only unfinished saves.

        Raises:
            NotFoundError: there is no save of `step`, or with ``missing_ok=False`` none at all.
            InvalidArgumentError: the directory has other content, and no saves; or there is no such option.
            StateExchangeError: as `load_checkpoint`. If the newest save is broken, rank 0's error names the older ones.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> saves = sx.Checkpoints("saves")
            >>> state = {"w": torch.zeros(2)}
            >>> saves.load(state) is None
            True
            >>> report = saves.save({"w": torch.ones(2)}, 100)
            >>> saves.load(state).step, state["w"]
            (100, tensor([1., 1.]))
        """
        unknown = sorted(options.keys() - _LOAD_OPTIONS)
        if unknown:  # even if there is nothing to load yet: else it would fail only at the first restart
            text = f"load takes no option {unknown[0]!r}, only step, {', '.join(_LOAD_OPTIONS)}"
            own = " (comm, layout and stall_timeout_s are those of Checkpoints)"
            raise InvalidArgumentError(text + own, path=self.path)
        with public_call("Checkpoints.load"):
            comm = as_communicator(self._comm)
            with comm.phase("looking for saves"):
                self._wait()
                wanted = None if step is None else _whole(step, "step")
                check_flags(missing_ok=missing_ok)
            sent = comm.all_gather_object({"step": str(wanted), "missing_ok": str(missing_ok)})
            with comm.phase("comparing what to load"):
                check_equal_options(
                    [records.parsed(raw, records.texts, "what to load", rank) for rank, raw in enumerate(sent)]
                )
            if self._memory is not None:
                report = self._load_from_memory(state, wanted, self._memory, options, comm)
                if report is not None:
                    self._pace.note_save(None)
                    return report
            for attempt in range(_ATTEMPTS):
                chosen = self._choose(wanted, missing_ok=missing_ok, comm=comm)
                if chosen is None:
                    return None
                path = os.path.join(self.path, step_name(chosen))
                try:
                    report = load_checkpoint(
                        state,
                        path,
                        comm=comm,
                        layout=self._layout,
                        stall_timeout_s=self._stall_timeout_s,
                        **options,
                    )
                except NotFoundError as error:  # on all ranks: its names are missing, or the save was removed
                    if attempt + 1 == _ATTEMPTS or not self._was_removed(chosen, comm):
                        raise
                    if step is not None:
                        text = f"step {chosen} was removed while it was opened"
                        raise NotFoundError(text, path=path) from error
                    continue
                except (CorruptError, IncompleteError) as error:
                    if step is not None or isinstance(error, ReplicaError) or comm.rank != 0:
                        raise
                    raise error.located(advice=self._advice(chosen)) from error
                self._pace.note_save(None)
                return report
        raise AssertionError("the last attempt raises")

    def _advice(self, newest: int) -> str:
        """Return what to do about a newest save that is broken, for its error. Root only."""
        checks = check_saves(self.path)
        older = [step for step in whole_saves(checks) if step < newest]
        # `delete` removes only files that a manifest lists.
        has_manifest = any(check.step == newest and check.manifest is not None for check in checks)
        leave = f"delete({newest}) removes this one" if has_manifest else "move this step's directory elsewhere"
        if not older:
            return f"there is no older save that is whole; {leave}, and the job begins anew"
        # It has to go before the job goes on: the job will save this step again.
        steps = f"step{'s' * (len(older) > 1)} {steps_text(older)}"
        load = f"load(state, step={older[-1]})"
        return f"older saves that are whole: {steps}: {load}; {leave}, before the job saves this step again"

    def _load_from_memory(
        self, state: State, step: int | None, copies: MemoryCopies, options: Mapping[str, Any], comm: Communicator
    ) -> LoadReport | None:
        """Load the copy in memory; None if it is absent, older than the disk's save or broken. Collective."""
        began = time.perf_counter()
        copy = copies.find(step, comm)
        if copy is None:
            return None
        if not copy.is_on_disk and comm.rank == 0:
            text = "%s: step %d is loaded from memory, as the disk does not have it any more; delete(%d) removes it"
            _log.warning(text, self._shown, copy.step, copy.step)
        choices = {"layout": self._layout, **options}
        on_progress = choices.pop("on_progress", None)
        with comm.phase("checking its options"):
            check_progress(on_progress)
            load_options = LoadOptions(**choices)
        try:
            with copies.opened(copy, comm) as (path, before_reading):
                request = LoadRequest(
                    state,
                    path,
                    load_options,
                    self._stall_timeout_s,
                    began,
                    on_progress=on_progress,
                    before_reading=before_reading,
                )
                return load_now(request, comm)
        except COPY_ERRORS as error:  # on all ranks
            if not copy.has_other:
                raise
            if comm.rank == 0:
                text = "%s: the copy of step %d in memory cannot be loaded, so the save on disk is: %s"
                _log.warning(text, self._shown, copy.step, error)
            if isinstance(error, CorruptError):
                copies.discard(copy, comm)
            return None

    def _choose(self, step: int | None, *, missing_ok: bool, comm: Communicator) -> int | None:
        """Return the step to load, as rank 0 finds it; None without a save. Collective."""
        chosen: int | None = None
        with comm.phase("looking for saves"):
            if comm.rank == 0:
                saves = read_saves(self.path)
                if self._known is None:
                    self._known = set(saves)
                watch = self._claims()
                if watch is not None:
                    watch_claims(self.path, watch, without=saves)
                chosen = self._step_of(saves, step, missing_ok=missing_ok)
        sent = comm.broadcast_object(chosen)
        return records.parsed(sent, lambda raw: records.optional(raw, records.count), "the step to load", 0)

    def _step_of(self, saves: Mapping[int, object], wanted: int | None, *, missing_ok: bool) -> int | None:
        if wanted is not None:
            if wanted not in saves:
                there = f"there are steps {steps_text(saves)}" if saves else "there is none"
                raise NotFoundError(f"there is no save of step {wanted}: {there}", path=self.path)
            return wanted
        if saves:
            return max(saves)
        check_only_saves(self.path)
        if not missing_ok:
            raise NotFoundError("there is no save here yet", path=self.path)
        return None

    def _was_removed(self, step: int, comm: Communicator) -> bool:
        """Return whether rank 0 finds the save of `step` gone. Collective."""
        is_gone = comm.rank == 0 and step not in read_saves(self.path)
        return bool(comm.broadcast_object(is_gone))

    # The directory

    def steps(self) -> list[int]:
        """Return the steps of all whole saves, oldest first.

        Not collective: another rank that asks later may see more or fewer. So ranks must not loop over them and make
        collective calls, such as `load`: let one rank ask, and send its answer to the others.

        Returns:
            The steps; [] if the directory does not exist.

        Raises:
            StorageError: the directory cannot be read.

        Example:
            >>> import statexchange as sx
            >>> saves, comm = sx.Checkpoints("saves"), sx.init()
            >>> comm.broadcast_object(saves.steps() if comm.rank == 0 else None)  # the same list on all ranks
            []
        """
        return list(read_saves(self.path))

    def latest(self) -> int | None:
        """Return the step of the newest save; None without one.

        Not collective: ranks may get different answers, as from `steps`. `load` without a step takes the newest save
        that rank 0 sees, on all ranks.

        Returns:
            The step.

        Raises:
            StorageError: the directory cannot be read.

        Example:
            >>> import statexchange as sx
            >>> sx.Checkpoints("saves").latest() is None
            True
        """
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step of the best save by the metric of `best`; None if no save has it.

        Not collective: ranks may get different answers, as from `steps`. If several are equal, it is the
        newest. A save whose value is NaN, or that lacks the metric, is never the best.

        Returns:
            The step.

        Raises:
            InvalidArgumentError: this Checkpoints was made without `best`.
            StorageError: the directory cannot be read.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> saves = sx.Checkpoints("saves", best=("loss", "min"))
            >>> for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            ...     report = saves.save({"w": torch.zeros(2)}, step, metrics={"loss": loss})
            >>> saves.best()
            2
        """
        with public_call("Checkpoints.best"):
            if self._retention.best is None:
                text = "best() needs a metric: pass Checkpoints one, such as best=('loss', 'min')"
                raise InvalidArgumentError(text, path=self.path)
            manifests = {step: one for step, one in read_saves(self.path).items() if isinstance(one, SaveManifest)}
            return self._retention.best_step(manifests)

    def delete(self, step: int) -> None:
        """Remove the save of `step`, and its copy in memory if there is one.

        Collective: rank 0 removes it, and a failure is raised on all ranks.

        Args:
            step: the step.

        Raises:
            NotFoundError: there is no save of this step.
            UnsafeError: its directory has files that are not of the save.
            TargetExistsError: another process is saving or removing it.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> saves = sx.Checkpoints("saves")
            >>> report = saves.save({"w": torch.zeros(2)}, 100)
            >>> saves.delete(100)
            >>> saves.steps()
            []
        """
        with public_call("Checkpoints.delete"):
            comm = as_communicator(self._comm)
            with comm.phase("removing the save"):
                self._wait()
                number = _whole(step, "step")
            was_in_memory = self._memory is not None and self._memory.drop(number, comm)
            with comm.phase("removing the save"):
                if comm.rank == 0:
                    saves = read_saves(self.path)
                    if number in saves or not was_in_memory:
                        self._step_of(saves, number, missing_ok=False)
                        remove_save(self.path, number)

    def close(self) -> None:
        """Wait for a save in the background, raise its failure unless `result()` has, and restore signal handlers.

        Not collective.

        Raises:
            StateExchangeError: the last save in the background has failed.

        Example:
            >>> import statexchange as sx
            >>> saves = sx.Checkpoints("saves", on_signal="SIGTERM")
            >>> saves.close()
        """
        try:
            self._wait()
        finally:  # after the wait: a signal that comes again must not end the process before the save is whole
            self._signals.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # the failure inside the block counts
            self._signals.restore()


class _Pace:
    """The duration of steps and saves by this rank's clock. Threads need no lock: each number is assigned at once."""

    def __init__(self) -> None:
        self.step_s = 0.0  # mean over the last steps
        self.save_s = 0.0
        self._saved_at = self._at = time.monotonic()
        self._step: int | None = None

    @property
    def since_save_s(self) -> float:
        """Seconds since the last save, or since the start."""
        return time.monotonic() - self._saved_at

    def note_step(self, step: int) -> None:
        """Count a step that has just ended."""
        now = time.monotonic()
        if self._step is not None and step > self._step:
            each = (now - self._at) / (step - self._step)
            self.step_s = each if not self.step_s else 0.8 * self.step_s + 0.2 * each
        self._step, self._at = step, now

    def note_save(self, seconds: float | None) -> None:
        """Note the start of a save or load, or the seconds that a save took."""
        self._saved_at = time.monotonic()
        if seconds is not None:
            self.save_s = seconds


class _Signals:
    """Handlers that record signals until the next agreement, and call the previous handlers.

    A handler may also run where it must not record: in a process that was forked from the job, such as a worker of a
    data loader, and after `restore`, if that could not remove it. It then puts back the previous handler and raises the
    signal again, so that SIGTERM ends such a process.

    Attributes:
        names: the signals.
        is_stopping: whether any rank has received one.
    """

    def __init__(self, given: str | Sequence[str] | None) -> None:
        self.names = _signal_names(given)
        self.is_stopping = False
        self._received: str | None = None
        self._pid = os.getpid()
        self._is_active = True
        self._previous: dict[int, Any] = {}
        if self.names and threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("on_signal needs the main thread: make this Checkpoints there")
        for name in self.names:
            number = signal.Signals[name]
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before(number)
        if self._is_active and os.getpid() == self._pid:
            self._received = signal.Signals(number).name
            if callable(before):
                # It must not end the process before the save: the job leaves its loop by `is_stopping`.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    before(number, frame)
            return
        signal.signal(number, before)
        signal.raise_signal(number)

    def _before(self, number: int) -> Any:  # noqa: ANN401 (a handler, as `signal.signal` takes it)
        """Return the previous handler, skipping those of closed Checkpoints."""
        handler = self._previous[number]
        owner = getattr(handler, "__self__", None)
        while isinstance(owner, _Signals) and not owner._is_active:  # noqa: SLF001 (another object of this class)
            handler = owner._previous[number]  # noqa: SLF001
            owner = getattr(handler, "__self__", None)
        return signal.SIG_DFL if handler is None else handler

    def take(self) -> str | None:
        """Return the signal that came since the last call."""
        received = self._received
        if received is not None:
            self._received = None
        return received

    def restore(self) -> None:
        """Restore the previous handlers; outside of the main thread, the next signal does so."""
        was_active, self._is_active = self._is_active, False
        if not was_active or threading.current_thread() is not threading.main_thread():
            return
        for number in self._previous:
            if signal.getsignal(number) == self._note:
                signal.signal(number, self._before(number))


def _signal_names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in `on_signal`; raise InvalidArgumentError for anything else."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        names: tuple[Any, ...] = (given,)
    else:
        names = tuple(given)
    for name in names:
        is_known = isinstance(name, str) and name in signal.Signals.__members__
        if not is_known or name in ("SIGKILL", "SIGSTOP"):
            raise InvalidArgumentError(f"on_signal takes names such as 'SIGTERM' or 'SIGUSR1', not {excerpt(name)}")
    return tuple(dict.fromkeys(signal.Signals[name].name for name in names))


def _signal_and_due(raw: object) -> tuple[str | None, bool]:
    name, due = records.items(raw, lambda value: value)
    return records.optional(name, records.text), records.flag(due)


def _whole(value: object, name: str, *, least: int = 0) -> int:
    """Return a whole number of at least `least`; raise InvalidArgumentError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} must be a whole number, not {excerpt(value)}") from None
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}, not {number}")
    return number


def _metric(name: str, value: SupportsFloat) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(f"the metric {name!r} must be a number, not {excerpt(value)}") from None
