"""Remove old saves of a job, and what killed processes have left beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    TargetExistsError,
    without_secrets,
)
from statexchange.sharding.options import CallOptions
from statexchange.storage.location import is_remote, open_path
from statexchange.storage.save_check import check_saves, whole_saves
from statexchange.storage.steps import (
    Retention,
    clear_leftovers,
    remove_save,
    saves_path,
    step_name,
    unfinished_steps,
)
from statexchange.storage.tensorfile import SaveManifest, removable_files

if TYPE_CHECKING:
    from statexchange.storage.publish.build import UnfinishedBuild

_ATTEMPTS, _INTERVAL_S = 6, 0.1  # to remove a save that another process is working on


@dataclass(frozen=True, slots=True)
class PruneRow:
    """The outcome for one save, or for the leftovers of one.

    Attributes:
        step: the training step.
        paths: its directories.
        nbytes: bytes of its files, without those that are one file with a newer save's; None if its manifest cannot be
            read.
        is_unfinished: whether it is an unfinished save or removal.
        action: "removed" (with `dry_run`: would be), "kept" by the retention, or "not removed".
        reason: why, in a few words.
        problem: the error, of a save that is broken or could not be removed.
    """

    step: int
    paths: tuple[str, ...]
    nbytes: int | None
    is_unfinished: bool
    action: Literal["removed", "kept", "not removed"]
    reason: str
    problem: StateExchangeError | None = None


@dataclass(frozen=True, slots=True)
class PruneReport:
    """The result of `prune_saves`.

    Attributes:
        path: the directory, as it was given.
        dry_run: whether nothing was removed.
        rows: each save, oldest first, then each unfinished save or removal.
    """

    path: str
    dry_run: bool
    rows: tuple[PruneRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that were removed."""
        return sum(row.nbytes or 0 for row in self.rows if row.action == "removed")

    @property
    def problems(self) -> tuple[StateExchangeError, ...]:
        """An error for each save that is broken or could not be removed."""
        return tuple(row.problem for row in self.rows if row.problem is not None)


def prune_saves(
    path: str | os.PathLike[str],
    retention: Retention,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PruneReport:
    """Remove the saves that `retention` does not keep, oldest first, and what killed processes left.

    Not collective. A broken save is neither counted nor removed. A directory is not removed if it has files that belong
    to no save, or if another process is removing or replacing it. What an unfinished save left is removed only if its
    process has provably ended; at a URL also if its claim does not change while it is watched for 60 s.

    Args:
        path: the directory or URL in which `Checkpoints` saves.
        retention: which saves stay.
        dry_run: remove nothing, and report what would be removed.
        on_progress: called with (bytes done, bytes in total).

    Returns:
        The report.

    Raises:
        NotFoundError: the directory does not exist, or has no saves.
        InvalidArgumentError: it is one save, or a file, or no save has the metric of `retention`.
        StorageError: it cannot be read.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> saves = sx.Checkpoints("saves", keep=None)
        >>> for step in (10, 20, 30):
        ...     report = saves.save({"w": torch.zeros(2)}, step)
        >>> for row in prune_saves("saves", Retention(keep=2)).rows:
        ...     row.step, row.action, row.reason
        (10, 'removed', '')
        (20, 'kept', 'one of the newest 2')
        (30, 'kept', 'one of the newest 2')
    """
    CallOptions.of(locals())  # checks them
    root = saves_path(path)
    rows: list[PruneRow] = []
    checks = check_saves(root)
    whole = whole_saves(checks)
    for check in checks:
        if check.step not in whole:
            reason = f"broken, does not count: {check.state}"
            row = PruneRow(check.step, (check.path,), check.nbytes, False, "not removed", reason, check.problems[0])
            rows.append(row)
    _check_metric(retention, whole, root)  # before anything is removed
    sizes = {check.step: check.nbytes or 0 for check in checks}
    total = sum(sizes[step] for step in retention.obsolete(whole))
    reasons = retention.reasons(whole)
    done = 0
    # Oldest first: if this is killed, the newest saves are those that are left.
    for step in whole:
        folder = without_secrets(os.path.join(root, step_name(step)))
        row = PruneRow(step, (folder,), sizes[step], False, "kept", "")
        if step in reasons:
            rows.append(replace(row, reason=reasons[step]))
            continue
        removed = _remove(root, row, dry_run=dry_run)  # one that cannot be removed does not keep others
        done += sizes[step]
        if on_progress is not None:
            on_progress(done, total)
        if removed is not None:
            rows.append(removed)
    rows.sort(key=lambda row: row.step)
    return PruneReport(without_secrets(os.fspath(path)), dry_run, (*rows, *_clear(root, dry_run=dry_run)))


def _check_metric(retention: Retention, saves: dict[int, SaveManifest], path: str) -> None:
    """Raise InvalidArgumentError if saves would be removed because no save has the metric that chooses the best."""
    if retention.best is None or not saves:
        return
    names = sorted(set[str]().union(*(manifest.metrics for manifest in saves.values())))
    if retention.best[0] not in names:
        text = f"no save here has the metric {retention.best[0]!r}: they have {', '.join(names) or 'none'}"
        raise InvalidArgumentError(text, path=path)


def _remove(root: str, row: PruneRow, *, dry_run: bool) -> PruneRow | None:
    """Remove a save, or check that it can be removed; None if another process has removed it."""
    try:
        if dry_run:
            with open_path(os.path.join(root, step_name(row.step))) as opened:
                removable_files(opened.store)
        else:
            _remove_when_free(root, row.step)
    except NotFoundError:
        return None
    except TargetExistsError as error:
        return replace(row, action="not removed", reason="another process is working on it", problem=error)
    except StateExchangeError as error:
        return replace(row, action="not removed", reason=error.message, problem=error)
    return replace(row, action="removed")


def _remove_when_free(root: str, step: int) -> None:
    """Remove a save; if a running job is removing it too, wait until it is gone, which is a NotFoundError."""
    for _ in range(_ATTEMPTS - 1):
        try:
            remove_save(root, step)
        except TargetExistsError:
            time.sleep(_INTERVAL_S)
        else:
            return
    remove_save(root, step)


def _clear(root: str, *, dry_run: bool) -> Iterable[PruneRow]:
    """Remove what provably ended processes left; return a row for each unfinished save or removal."""
    before = unfinished_steps(root)
    problem: StateExchangeError | None = None
    cleared: list[str] = []
    if not dry_run:
        try:
            cleared = clear_leftovers(root, waits=True)
        except StateExchangeError as error:
            problem = error
    after = before if dry_run else unfinished_steps(root)
    left: set[str] = set()
    for builds in after.values():
        left.update(build.nonce for build in builds)
    rows = []
    for step, builds in sorted(before.items()):
        for build in builds:
            row = PruneRow(step, build.paths, build.nbytes, True, "not removed", _reason(build, root, step))
            # `cleared`: at a URL, also those of processes that were not known to be dead before they were watched.
            if build.nonce in cleared or (build.state == "dead" and (dry_run or build.nonce not in left)):
                row = replace(row, action="removed")
            elif build.state == "dead":
                row = replace(row, problem=problem)
            # One that is neither there nor removed was committed meanwhile, or removed by another process.
            if build.nonce in left or row.action == "removed":
                rows.append(row)
    return rows


def _reason(build: UnfinishedBuild, root: str, step: int) -> str:
    """Return whose unfinished save or removal it is, and what to do if that cannot be proved."""
    what = "unfinished removal" if build.is_removal else "unfinished save"
    if build.state == "dead":
        return f"{what}, {build.owner} has ended"
    if build.state == "alive":
        return f"{what}, {build.owner} runs"
    whose = "an unknown process"
    if build.owner is not None:
        whose = f"{build.owner}, which cannot be seen from here"
    if is_remote(root):
        url = f"{without_secrets(root)}/{step_name(step)}"
        if build.owner is None:
            return f"{what} of {whose}: if it has ended, remove all objects in {url}"
        return f"{what} of {whose}: without --dry-run it is removed if its claim does not change for 60 s"
    hidden = os.path.join(root, f".{step_name(step)}.*{build.nonce}*")  # the directories and the owner record
    return f"{what} of {whose}: if it has ended, remove {hidden}"
