"""List and verify the saves of a job: a directory of steps as `Checkpoints` keeps it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from statexchange.errors import IncompleteError, NotFoundError, StateExchangeError
from statexchange.report.verify import VerifyReport, verify
from statexchange.storage.local import local_path
from statexchange.storage.save_check import check_saves, list_save_directories
from statexchange.storage.save_directory import MANIFEST, SaveManifest
from statexchange.storage.steps import read_saves, step_name, unfinished_steps
from statexchange.storage.store import resolve_path

if TYPE_CHECKING:
    from statexchange.storage.directory_build import UnfinishedBuild

__all__ = ["SaveRow", "SaveVerdict", "SavesReport", "UnfinishedRow", "list_saves", "unfinished_state", "verify_saves"]


@dataclass(frozen=True, slots=True)
class SaveRow:
    """One save, as cheap looks find it: its manifest, and the sizes and headers of its files.

    Attributes:
        step: the training step.
        path: its directory.
        created: time of the save in seconds since the epoch; None if the manifest cannot be read, like the next four.
        nbytes: bytes of all ranks' files, as the manifest lists them.
        world_size: number of ranks.
        job: identity of the job's run that made it.
        metrics: numbers that the job gave with it.
        state: "whole", or in a few words what is wrong.
        problems: an error for each thing that is missing or broken.
    """

    step: int
    path: str
    created: float | None
    nbytes: int | None
    world_size: int | None
    job: str | None
    metrics: Mapping[str, float]
    state: str
    problems: tuple[StateExchangeError, ...]


@dataclass(frozen=True, slots=True)
class UnfinishedRow:
    """A save, or the removal of one, that a process has not finished.

    Attributes:
        step: the training step.
        paths: its hidden directories.
        nbytes: bytes of their files.
        owner_state: "alive", "dead" or "unknown", as far as can be proved on this host.
        state: the same in a few words.
    """

    step: int
    paths: tuple[str, ...]
    nbytes: int
    owner_state: Literal["alive", "dead", "unknown"]
    state: str


@dataclass(frozen=True, slots=True)
class SavesReport:
    """The saves of a directory, oldest first, and the unfinished ones.

    Attributes:
        path: the directory.
        saves: a row for each save.
        unfinished: a row for each unfinished save or removal; these are no problems.
    """

    path: str
    saves: tuple[SaveRow, ...]
    unfinished: tuple[UnfinishedRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all saves whose manifest can be read."""
        return sum(row.nbytes or 0 for row in self.saves)

    @property
    def problems(self) -> tuple[StateExchangeError, ...]:
        """The problems of all saves."""
        return tuple(problem for row in self.saves for problem in row.problems)


def list_saves(path: str | os.PathLike[str]) -> SavesReport:
    """List the saves of a directory of steps.

    Not collective. Reads manifests, and the sizes and headers of files. Problems are in the report, not raised.

    Args:
        path: the directory in which `Checkpoints` saves.

    Returns:
        The report.

    Raises:
        NotFoundError: the directory does not exist.
        InvalidArgumentError: it is no directory of saves.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> saves = sx.Checkpoints("saves")
        >>> for step in (10, 20):
        ...     report = saves.save({"w": torch.zeros(2)}, step, metrics={"loss": 1 / step})
        >>> for row in list_saves("saves").saves:
        ...     row.step, row.world_size, row.metrics, row.state
        (10, 1, {'loss': 0.1}, 'whole')
        (20, 1, {'loss': 0.05}, 'whole')
    """
    root = local_path(resolve_path(path, "a directory of saves"))
    rows = []
    for check in check_saves(root):
        manifest = check.manifest
        if manifest is None:
            rows.append(SaveRow(check.step, check.path, None, None, None, None, {}, check.state, check.problems))
        else:
            rows.append(
                SaveRow(
                    check.step,
                    check.path,
                    manifest.created,
                    sum(manifest.nbytes),
                    manifest.world_size,
                    manifest.job,
                    manifest.metrics,
                    check.state,
                    check.problems,
                )
            )
    unfinished = []
    for step, builds in unfinished_steps(root).items():
        for build in builds:
            unfinished.append(UnfinishedRow(step, build.paths, build.nbytes, build.state, unfinished_state(build)))
    return SavesReport(root, tuple(rows), tuple(unfinished))


def unfinished_state(build: UnfinishedBuild) -> str:
    """Return in a few words what has become of an unfinished save or removal."""
    if build.state == "alive" and build.owner is not None:
        doing = "removed" if build.is_removal else "saved"
        return f"being {doing} by {build.owner.pid} on {build.owner.host}"
    state = "killed" if build.state == "dead" else "unfinished"
    return f"{state} removal" if build.is_removal else state


@dataclass(frozen=True, slots=True)
class SaveVerdict:
    """The result of verifying one save.

    Attributes:
        step: the training step.
        path: its directory.
        report: what was read; None if the save could not be opened.
        findings: an error for each problem.
    """

    step: int
    path: str
    report: VerifyReport | None
    findings: tuple[StateExchangeError, ...]


def verify_saves(
    path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[SaveVerdict]:
    """Read and check every save of a directory of steps, oldest first, and yield the result of each.

    Not collective. Problems become findings, not exceptions. A save that is removed meanwhile is left out.

    Args:
        path: the directory in which `Checkpoints` saves.
        on_progress: called with (bytes done, bytes in total).

    Yields:
        The result of a save.

    Raises:
        NotFoundError: the directory does not exist.
        InvalidArgumentError: it is no directory of saves.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.Checkpoints("saves").save({"w": torch.zeros(2)}, 10)
        >>> for verdict in verify_saves("saves"):
        ...     verdict.step, verdict.findings
        (10, ())
    """
    root = local_path(resolve_path(path, "a directory of saves"))
    steps = list_save_directories(root)
    sizes = {step: sum(one.nbytes) for step, one in read_saves(root).items() if isinstance(one, SaveManifest)}
    total, done_before = sum(sizes.values()), 0
    for step in steps:
        folder = os.path.join(root, step_name(step))
        progress = None
        if on_progress is not None:
            progress = _Part(on_progress, done_before, total)
        verdict = _verdict(step, folder, progress)
        done_before += sizes.get(step, 0)
        if verdict is not None:
            yield verdict


class _Part:
    """Reports the progress of one save as a part of all."""

    def __init__(self, on_progress: Callable[[int, int], None], before: int, total: int) -> None:
        self._on_progress = on_progress
        self._before = before
        self._total = total

    def __call__(self, done: int, _: int) -> None:
        self._on_progress(min(self._before + done, self._total), self._total)


def _verdict(step: int, folder: str, on_progress: Callable[[int, int], None] | None) -> SaveVerdict | None:
    """Verify one save; None if it was removed meanwhile."""
    missing = IncompleteError(f"there is no {MANIFEST} in this step's directory: it is no save any more", path=folder)
    try:
        report = verify(folder, on_progress=on_progress)
    except NotFoundError:
        return SaveVerdict(step, folder, None, (missing,)) if os.path.isdir(folder) else None
    except StateExchangeError as error:
        return SaveVerdict(step, folder, None, (error,))
    if report.kind != "save":  # without the manifest the ranks' files look like another format
        return SaveVerdict(step, folder, None, (missing,))
    return SaveVerdict(step, folder, report, report.findings)
