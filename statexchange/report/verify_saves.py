"""Verify all saves of a job, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from statexchange.errors import IncompleteError, NotFoundError, StateExchangeError, without_secrets
from statexchange.report.verify import VerifyReport, verify
from statexchange.storage.location import is_remote
from statexchange.storage.save_check import list_save_directories
from statexchange.storage.steps import read_saves, saves_path, step_name
from statexchange.storage.store import local_path
from statexchange.storage.tensorfile import MANIFEST, SaveManifest

__all__ = ["SaveVerdict", "verify_saves"]


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
    path: str | os.PathLike[str],
    *,
    checks: Collection[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[SaveVerdict]:
    """Read and check every save of a directory of steps, oldest first, and yield the result of each.

    Not collective. Problems become findings, not exceptions. A save that is removed meanwhile is left out.

    Args:
        path: the directory or URL in which `Checkpoints` saves.
        checks: the checks of values to make, of `value_checks.CHECKS`.
        on_progress: called with (bytes done, bytes in total).

    Yields:
        The result of a save.

    Raises:
        NotFoundError: the directory does not exist, or has no saves.
        InvalidArgumentError: it is one save, or a file.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.Checkpoints("saves").save({"w": torch.zeros(2)}, 10)
        >>> for verdict in verify_saves("saves"):
        ...     verdict.step, verdict.findings
        (10, ())
    """
    root = saves_path(path)
    steps = list_save_directories(root)
    sizes = {step: sum(one.nbytes) for step, one in read_saves(root).items() if isinstance(one, SaveManifest)}
    total, done_before = sum(sizes.values()), 0
    for step in steps:
        folder = os.path.join(root, step_name(step))
        progress = None
        if on_progress is not None:
            progress = _Part(on_progress, done_before, total)
        verdict = _verdict(step, folder, checks, progress)
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


def _verdict(
    step: int, folder: str, checks: Collection[str], on_progress: Callable[[int, int], None] | None
) -> SaveVerdict | None:
    """Verify one save; None if it was removed meanwhile."""
    shown = without_secrets(folder)
    missing = IncompleteError(f"there is no {MANIFEST} in this step's directory: it is no save any more", path=folder)
    try:
        report = verify(folder, checks=checks, on_progress=on_progress)
    except NotFoundError:
        is_there = not is_remote(folder) and os.path.isdir(local_path(folder))
        return SaveVerdict(step, shown, None, (missing,)) if is_there else None
    except StateExchangeError as error:
        return SaveVerdict(step, shown, None, (error,))
    if report.kind != "save":  # without the manifest the ranks' files look like another format
        return SaveVerdict(step, shown, None, (missing,))
    return SaveVerdict(step, shown, report, report.findings)
