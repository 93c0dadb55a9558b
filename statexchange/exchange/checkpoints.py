"""A directory of a job's saves by step: decide when to save, save, remove old saves, and load the newest.

**The directory.** ``<path>/step-000000700/`` is the save of step 700 (saving.py). It appears when it is whole, so a job
that is killed during a save resumes from the previous save. All ranks learn from rank 0 which saves there are. At a URL
a save is whole when it has its manifest. What a process of another host left there is removed once its claim has not
changed for 60 s; for this, rank 0 remembers the claims that it has seen.

**Retention.** After a save rank 0 removes the saves that `keep`, `keep_every` and `best` do not keep, oldest first. A
save is renamed before its first file is removed, and at a URL its manifest is removed first, so no reader opens a part
of it. Directories that have files which no save lists are never removed.

**Memory.** With `memory` the newest save also lies in the hosts' shared memory, where a restarted job reads it
(memory_copy.py). Each save is on disk first, and the disk decides what is loaded.

**Two jobs.** Rank 0 remembers which steps it found and saved. A step that it did not save and that was not there before
comes from another job on the same directory, and is named in a warning. Such a step is never removed.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, overload

from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.exchange.background import wait_for_end
from statexchange.exchange.frozen_files import FrozenFiles
from statexchange.exchange.load_newest import SaveLoader
from statexchange.exchange.load_report import LoadReport, LoadRequest
from statexchange.exchange.memory_copy import MemoryCopies
from statexchange.exchange.save import save_state
from statexchange.exchange.save_schedule import SaveSchedule
from statexchange.exchange.saves_directory import SavesDirectory
from statexchange.exchange.saving import SaveReport, SaveRequest
from statexchange.sharding.options import CallOptions, LoadOptions, whole_number
from statexchange.state.describe import State

if TYPE_CHECKING:
    from typing_extensions import Self

_LOAD_OPTIONS = ("strict", "include", "exclude", "rename", "dtype", "replicas", "readers", "on_progress")


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
        agree_every: steps between comparisons of signals and clocks. More steps are cheaper, but delay signals: so many
            steps and a save must fit between the signal and the kill (30 s under torchrun).
        memory: also keep a copy of the newest save in each host's shared memory, of the host's own ranks and of those
            of one other host. A job that is started again on these hosts, on any world size, reads tensors there; the
            disk decides which save is loaded, and has what is not there. Without room there is no copy, and one
            warning is given. It stays in /dev/shm after the end of the job, until the next save or `delete`, or until a
            job with `memory` saves and finds that its save is gone (if that is at no URL), or that it needs the room.
        link: parameters that do not train (``requires_grad=False``) lie in files of their own, and a save makes a hard
            link of those of the last save if they have the bytes that it would write: saves then share these files, and
            a damaged one is damaged in each. S3 copies such files itself. At other URLs, and with `memory`, each
            save is written whole. The same on all ranks.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        layout: rules for plain tensors that are parts of whole ones, as in `save_checkpoint`, for saves and loads.
        include: patterns of what each save has of the state, as in `save_checkpoint`.
        exclude: patterns of what each save leaves out, as the frozen base of an adapter: ``exclude="model.base.*"``.
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
        memory: bool = False,
        link: bool = True,
        comm: CommLike | None = None,
        layout: Mapping[str, Any] | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        stall_timeout_s: float = 300.0,
    ) -> None:
        self._saves = SavesDirectory(path, keep, keep_every, best)
        self._schedule = SaveSchedule(every_steps, every_s, on_signal, agree_every)
        self._call = CallOptions(memory=memory, stall_timeout_s=stall_timeout_s)
        self._memory = MemoryCopies(self.path, stall_timeout_s) if memory else None
        # A copy in memory is made of whole files of the ranks, one each.
        self._frozen = FrozenFiles() if link and not memory and self._saves.can_link else None
        self._comm = comm
        self._layout = layout
        self._selection = LoadOptions(include=include, exclude=exclude)
        self._last: Future[SaveReport] | None = None

    @property
    def path(self) -> str:
        """The directory of the saves."""
        return self._saves.path

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
        number = whole_number(step, "step")
        wanted = self._schedule.is_multiple(number)
        if self._schedule.needs_agreement(number):
            with public_call("Checkpoints.should_save"):
                wanted |= self._schedule.agree(as_communicator(self._comm))
        return wanted

    @property
    def is_stopping(self) -> bool:
        """Whether any rank has received a signal of `on_signal`: save, then leave the training loop."""
        return self._schedule.is_stopping

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
                number = whole_number(step, "step")
                return SaveRequest(
                    self._saves.path_of(number),
                    self._layout,
                    self._selection,
                    comm.run,
                    replace(self._call, overwrite=overwrite, background=background),
                    step=number,
                    metrics=self._saves.checked_metrics(metrics, number, comm.rank),
                    frozen=self._frozen,
                    newest=self._saves.newest,
                    superseded=functools.partial(self._saves.superseded, number),
                    before=functools.partial(self._saves.prepare, number, comm.run, overwrite=overwrite),
                    after=self._note_saved,
                    keep_in_memory=None if self._memory is None else self._memory.keep,
                )

            if not background:
                with comm.phase("waiting for the previous save"):
                    wait_for_end(self._last)
            shown = os.path.join(self.path, f"step {excerpt(step)}")
            report = save_state("Checkpoints.save", state, shown, request, comm, background=background)
        if isinstance(report, Future):
            self._last = report
            # Now, too, and not only when the thread has published: else the next step would save again.
            self._schedule.note_save()
        return report

    def _note_saved(self, report: SaveReport, comm: Communicator) -> None:
        """Record a published save; root removes those that are not kept. Not collective."""
        self._schedule.note_save()
        if comm.rank == 0 and report.step is not None:
            self._saves.note_saved(report.step)

    # Loading

    def load(
        self, state: State, step: int | None = None, *, missing_ok: bool = True, **options: Any
    ) -> LoadReport | None:
        """Load the newest save, or that of `step`, into `state`, in place.

        Collective. World size, mesh and placements may differ from those of the save.

        Args:
            state: as for `load_checkpoint`.
            step: the step to load; by default the newest. If the next save is not beyond all saves of later steps,
                the job has gone back: these are superseded, and count as the oldest.
            missing_ok: return None if there is no save yet; else that is a NotFoundError.
            options: `strict`, `include`, `exclude`, `rename`, `dtype`, `replicas`, `readers` and `on_progress` of
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
            text += " (comm, layout and stall_timeout_s are those of Checkpoints)"
            raise InvalidArgumentError(text, path=self.path)
        with public_call("Checkpoints.load"):
            comm = as_communicator(self._comm)
            began = time.perf_counter()
            with comm.phase("looking for saves"):
                wait_for_end(self._last)
                wanted = None if step is None else whole_number(step, "step")
            with comm.phase("checking its options"):
                # Once: an iterator of patterns would be used up by the first of several attempts.
                arguments = {"layout": self._layout, "stall_timeout_s": self._call.stall_timeout_s, **options}
                choices, call = LoadOptions.of(arguments), CallOptions.of(arguments)
                request = LoadRequest(state, self.path, choices, call, began)
            if self._frozen is not None:
                self._frozen.forget()
            report = SaveLoader(self._saves, self._memory, comm).load(request, wanted, missing_ok=missing_ok)
        if report is not None:
            self._schedule.note_save()
        return report

    # The directory

    def steps(self) -> list[int]:
        """Return the steps of all saves, in ascending order.

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
        return self._saves.steps()

    def latest(self) -> int | None:
        """Return the step of the newest save that is not superseded; None without one.

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
        return self._saves.latest()

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
            return self._saves.best()

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
            # Ranks that differ in `memory` differ in this name, and get an error before anything is removed.
            phase = "choosing the save"
            if self._memory is not None:
                phase = "choosing the save and its copy in memory"
            with comm.phase(phase):
                wait_for_end(self._last)
                number = whole_number(step, "step")
            with comm.phase("removing the save"):
                if comm.rank == 0:
                    self._saves.delete(number)
            if self._memory is not None:
                self._memory.drop(self._saves.path_of(number), comm)

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
            wait_for_end(self._last)
        finally:  # after the wait: a signal that comes again must not end the process before the save is whole
            self._schedule.restore_signals()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # the failure inside the block counts
            self._schedule.restore_signals()
