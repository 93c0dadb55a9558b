"""The directory of a job's saves as rank 0 sees it: which saves there are, which of them stay, and whose they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Literal, SupportsFloat

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    TargetExistsError,
    excerpt,
    without_secrets,
)
from statexchange.storage.location import is_remote, target_path
from statexchange.storage.publish import can_link, check_can_be_made
from statexchange.storage.save_check import check_saves, whole_saves
from statexchange.storage.steps import (
    MAX_STEP,
    Retention,
    check_only_saves,
    clear_leftovers,
    newest_step,
    read_saves,
    remove_save,
    step_name,
    steps_text,
    superseded_saves,
)
from statexchange.storage.tensorfile import SaveManifest

_log = logging.getLogger(__name__)


class SavesDirectory:
    """The saves of a job below a path. Not collective; what it remembers is of use on rank 0 alone.

    Args:
        path: the path or URL.
        keep: as for `Checkpoints`, like `keep_every` and `best`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int | None,
        keep_every: int | None,
        best: tuple[str, Literal["min", "max"]] | None,
    ) -> None:
        self.path = target_path(path)
        self._shown = without_secrets(self.path)  # for logs; errors remove secrets themselves
        self._retention = Retention(keep, keep_every, best)
        self._known: set[int] | None = None  # steps that were there at the first look, or that this job saved
        self._foreign: set[int] = set()  # steps of another job, each of which a warning has named
        self._warned_of: int | None = None  # the newest step that a warning has named
        self._checked: set[tuple[str | int, ...]] = set()  # versions of files that `check_saves` need not read
        self._begun: dict[int, str] = {}  # by step, the job of a save that has not ended, or has failed
        # The step that is being loaded, and the saves that were there when it was chosen.
        self._at_load: tuple[int, Mapping[int, SaveManifest | StateExchangeError]] = -1, {}
        self._later: dict[int, str] = {}  # by step, the ids of the saves after that of the last load, as they were then
        self._superseded: set[str] = set()  # ids of saves that this job, or the save that it loaded, left behind

    @property
    def can_link(self) -> bool:
        """Whether a save may link files of the one before, or have S3 copy them."""
        return can_link(self.path)

    def path_of(self, step: int) -> str:
        """Return the path of a save; raise InvalidArgumentError for a step that no save can have."""
        if step > MAX_STEP:
            raise InvalidArgumentError(f"step must be at most {MAX_STEP}, not {excerpt(step)}", path=self.path)
        return os.path.join(self.path, step_name(step))

    def checked_metrics(self, metrics: Mapping[str, SupportsFloat] | None, step: int, rank: int) -> dict[str, float]:
        """Return the metrics of a save as numbers; warn on rank 0 if it lacks the one of `best`."""
        if metrics is not None and not isinstance(metrics, Mapping):
            raise InvalidArgumentError(f"metrics must be numbers by name, as {{'loss': 0.25}}, not {excerpt(metrics)}")
        checked = {}
        for name, value in (metrics or {}).items():
            checked[str(name)] = _metric(name, value)
        best = self._retention.best
        if best is not None and best[0] not in checked and rank == 0:  # only its metrics are stored
            text = "%s: step %d is saved without the metric %r, so it is never the best: pass metrics={%r: ...}"
            _log.warning(text, self._shown, step, best[0], best[0])
        return checked

    # A save

    def prepare(self, step: int, job: str, *, overwrite: bool) -> None:
        """Clean up after killed jobs, warn of steps of another job, and refuse a step that is saved."""
        if not is_remote(self.path) and not os.path.isdir(self.path):
            # Now, and not after the tensors have been written.
            check_can_be_made(self.path, NotFoundError("no such directory", path=self.path))
            self._known = set()
        else:
            # Manifests of steps that were seen whole before are not read again: a job may keep thousands of saves.
            seen = self._foreign | (self._known or set())
            clear_leftovers(self.path, without=seen - {step})
            saves = read_saves(self.path, without=seen - {step})
            if self._known is None:
                self._known = set(saves)
            for new in sorted(set(saves) - self._known - self._foreign):
                manifest = saves[new]
                if isinstance(manifest, SaveManifest) and manifest.job == self._begun.get(new):
                    self._known.add(new)  # the save was interrupted after it had been published
                else:
                    self._foreign.add(new)
                    self._warn_of_other_job(new, manifest)
            if step in saves and not overwrite:
                text = (
                    f"step {step} is saved already: load the newest save before training, or, if the job has gone back "
                    "to an earlier step, replace it by overwrite=True"
                )
                raise TargetExistsError(text, path=self.path_of(step))
        self._begun[step] = job

    def newest(self) -> str:
        """Return the path of the highest step that was there at first, or that this job saved; "" without one."""
        return self.path_of(max(self._known)) if self._known else ""

    def _goes_back(self, step: int) -> bool:
        """Whether a save of this step means that the job has gone back.

        A job that has only looked at an earlier save goes on beyond the later ones.
        """
        return step <= max(self._later, default=-1)

    def superseded(self, step: int) -> list[str]:
        """Return the ids of the saves that the save of this step supersedes."""
        ids = set(self._superseded)
        if self._goes_back(step):
            ids.update(self._later.values())
        return sorted(ids)

    def note_saved(self, step: int) -> None:
        """Record a published save, and remove those that are not kept."""
        assert self._known is not None  # `prepare` has made it
        self._known.add(step)
        self._foreign.discard(step)  # overwritten
        del self._begun[step]
        left_behind: Mapping[int, str] = {}
        if self._goes_back(step):
            self._later, left_behind = {}, self._later
            self._superseded.update(left_behind.values())
        self._warn_of_later(step, left_behind, self._known)
        self._remove_obsolete(step, self._known)

    def _warn_of_other_job(self, step: int, manifest: SaveManifest | StateExchangeError) -> None:
        job = manifest.job if isinstance(manifest, SaveManifest) else "another job"
        _log.warning(
            "%s: step %d was saved here by %s while this job runs: give each job a directory of its own, or end one; "
            "this job removes none of the other's saves",
            self._shown,
            step,
            job,
        )

    def _warn_of_later(self, step: int, left_behind: Mapping[int, str], known: set[int]) -> None:
        """Warn of the saves that this one supersedes, and once of a later save that a restart would load."""
        if left_behind:
            _log.warning(
                "%s: step %d is saved after going back to an earlier one: the saves of steps %s, which the job has "
                "left behind, count as the oldest, for loads and for what is kept",
                self._shown,
                step,
                steps_text(left_behind),
            )
        if max(known) <= step:
            return
        newest = newest_step(read_saves(self.path))
        if newest is None or newest <= step or newest == self._warned_of or newest not in known:
            return
        self._warned_of = newest
        _log.warning(
            "%s: step %d is saved, but a load without a step takes the newest save, that of step %d: delete() the "
            "later saves if they are broken, or if this job began anew or went back by another Checkpoints",
            self._shown,
            step,
            newest,
        )

    def _remove_obsolete(self, current: int, known: set[int]) -> None:
        """Remove the saves that are not kept; a failure is logged, and the next save tries again."""
        if self._retention.keep is None:  # all stay: no need to read each manifest
            return
        try:
            checks = check_saves(self.path, checked=self._checked, trusted=(current,))
            for step in self._retention.obsolete(whole_saves(checks)):
                # Another job's saves count for what is kept, and are never removed.
                if step != current and step in known:
                    self._remove(step)
        except (StateExchangeError, OSError) as error:  # the other ranks do not wait for this
            _log.warning("cannot look for old saves: %s", error)

    def _remove(self, step: int) -> None:
        try:
            remove_save(self.path, step, waits=False)
            self._forget(step)
            _log.info("removed the save of step %d in %s", step, self._shown)
        except NotFoundError:
            return
        except (StateExchangeError, OSError) as error:
            _log.warning("cannot remove an old save: %s", error)

    # A load

    def choose(self, wanted: int | None, *, missing_ok: bool) -> int | None:
        """Return the step to load, by default the newest; None without a save."""
        saves = read_saves(self.path)
        if self._known is None:
            self._known = set(saves)
        step = self._step_of(saves, wanted, missing_ok=missing_ok)
        if step is not None:
            self._at_load = step, saves
        return step

    def note_loaded(self) -> None:
        """Note that the save that was chosen last has been loaded, and which later ones the next save may supersede."""
        loaded, saves = self._at_load
        all_superseded = superseded_saves(saves)
        self._later = {}
        for step, manifest in saves.items():
            if isinstance(manifest, StateExchangeError):
                continue
            if step == loaded:
                self._superseded.update(manifest.superseded)
            elif step > loaded and manifest.save in all_superseded:
                self._superseded.add(manifest.save)  # the save that records it may be removed before it
            elif step > loaded:
                self._later[step] = manifest.save

    def _step_of(
        self, saves: Mapping[int, SaveManifest | StateExchangeError], wanted: int | None, *, missing_ok: bool
    ) -> int | None:
        if wanted is not None:
            if wanted not in saves:
                listed = f"saved: {steps_text(saves)}" if saves else "there is none"
                raise NotFoundError(f"there is no save of step {wanted}: {listed}", path=self.path)
            return wanted
        if saves:
            return newest_step(saves)
        # A mistyped path must not look like the first start of a job.
        check_only_saves(self.path)
        if not missing_ok:
            raise NotFoundError("there is no save here yet", path=self.path)
        return None

    def advice(self, newest: int) -> str:
        """Return what to do about a newest save that is broken, for its error."""
        checks = check_saves(self.path)
        whole = whole_saves(checks)
        superseded = superseded_saves({check.step: check.manifest for check in checks if check.manifest is not None})
        older = [step for step, manifest in whole.items() if step < newest and manifest.save not in superseded]
        # `delete` removes only files that a manifest lists.
        has_manifest = any(check.step == newest and check.manifest is not None for check in checks)
        leave = f"delete({newest}) removes this one" if has_manifest else "move this step's directory elsewhere"
        if not older:
            return f"there is no older save that is whole; {leave}, and the job begins anew"
        # It has to go before the job goes on: the job will save this step again.
        steps = f"step{'s' * (len(older) > 1)} {steps_text(older)}"
        load = f"load(state, step={older[-1]})"
        return f"older saves that are whole: {steps}: {load}; {leave}, before the job saves this step again"

    # Questions of the user

    def steps(self) -> list[int]:
        """Return the steps of all saves, in ascending order."""
        return list(read_saves(self.path))

    def latest(self) -> int | None:
        """Return the step of the newest save that is not superseded; None without one."""
        return newest_step(read_saves(self.path))

    def best(self) -> int | None:
        """Return the step of the best save by the metric of `best`; None if no save has it."""
        if self._retention.best is None:
            text = "best() needs a metric: pass Checkpoints one, such as best=('loss', 'min')"
            raise InvalidArgumentError(text, path=self.path)
        manifests = {}
        for step, manifest in read_saves(self.path).items():
            if isinstance(manifest, SaveManifest):  # and no error
                manifests[step] = manifest
        return self._retention.best_step(manifests)

    def delete(self, step: int) -> None:
        """Remove the save of `step`."""
        self._step_of(read_saves(self.path), step, missing_ok=False)
        remove_save(self.path, step)
        self._forget(step)

    def _forget(self, step: int) -> None:
        """Record that a save is gone."""
        if self._known is not None:
            self._known.discard(step)
        self._later.pop(step, None)


def _metric(name: str, value: SupportsFloat) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(f"the metric {name!r} must be a number, not {excerpt(value)}") from None
