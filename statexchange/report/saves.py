"""List the saves of a job: a directory of steps as `Checkpoints` keeps it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from statexchange.errors import StateExchangeError, without_secrets
from statexchange.storage.save_check import check_saves
from statexchange.storage.steps import newest_step, read_saves, saves_path, superseded_saves, unfinished_steps

if TYPE_CHECKING:
    from statexchange.storage.publish.build import UnfinishedBuild

_MAX_SHOWN = 4  # problems of one save in warnings


@dataclass(frozen=True, slots=True)
class SaveRow:
    """One save, judged by its manifest and by the sizes and headers of its files.

    Attributes:
        step: the training step.
        path: its directory.
        created: time of the save in seconds since the epoch; None if the manifest cannot be read, like the next four.
        nbytes: bytes of all files that the manifest lists, without those that are one file with a newer save's.
        world_size: number of ranks.
        job: identity of the job's run that made it.
        metrics: numbers that the job gave with it.
        state: "whole", or in a few words what is wrong.
        problems: an error for each thing that is missing or broken.
        is_superseded: whether another save supersedes it, since the job went back to an earlier step.
    """

    step: int
    path: str
    created: float | None = None
    nbytes: int | None = None
    world_size: int | None = None
    job: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str = "whole"
    problems: tuple[StateExchangeError, ...] = ()
    is_superseded: bool = False


@dataclass(frozen=True, slots=True)
class UnfinishedRow:
    """A save, or the removal of one, that a process has not finished.

    Attributes:
        step: the training step.
        paths: its hidden directories; at a URL that of the step.
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
    """The saves of a directory by step, and the unfinished ones.

    Attributes:
        path: the directory, as it was given.
        saves: a row for each save.
        newest: the row of the save that a load without a step takes; None without a save.
        unfinished: a row for each unfinished save or removal; these are not problems.
    """

    path: str
    saves: tuple[SaveRow, ...]
    newest: SaveRow | None
    unfinished: tuple[UnfinishedRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all saves whose manifest can be read."""
        return sum(row.nbytes or 0 for row in self.saves)

    @property
    def problems(self) -> tuple[StateExchangeError, ...]:
        """The problems of all saves."""
        return tuple(problem for row in self.saves for problem in row.problems)

    @property
    def warnings(self) -> list[str]:
        """The problems as text, the first few of each save: a save of many ranks may have lost all its files."""
        texts: list[str] = []
        # Each save for itself, so that a badly broken one does not hide the others.
        for row in self.saves:
            texts += map(str, row.problems[:_MAX_SHOWN])
            if len(row.problems) > _MAX_SHOWN:
                texts.append(f"{len(row.problems) - _MAX_SHOWN:,} more problems [{row.path}]")
        return texts


def list_saves(path: str | os.PathLike[str]) -> SavesReport:
    """List the saves of a directory of steps.

    Not collective. Reads manifests, and the sizes and headers of files. Problems are in the report, not raised.

    Args:
        path: the directory or URL in which `Checkpoints` saves.

    Returns:
        The report.

    Raises:
        NotFoundError: the directory does not exist, or has no saves.
        InvalidArgumentError: it is one save, or a file.

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
    root = saves_path(path)
    checks = check_saves(root)
    # As a load sees them: an unreadable manifest may still be the newest save, which a load then refuses.
    manifests = read_saves(root)
    superseded, step_of_load = superseded_saves(manifests), newest_step(manifests)
    rows = []
    newest: SaveRow | None = None
    for check in checks:
        row = SaveRow(check.step, check.path, nbytes=check.nbytes, state=check.state, problems=check.problems)
        manifest = check.manifest
        if manifest is not None:
            row = replace(
                row,
                created=manifest.created,
                world_size=manifest.world_size,
                job=manifest.job,
                metrics=manifest.metrics,
                is_superseded=manifest.save in superseded,
            )
        rows.append(row)
        if check.step == step_of_load:
            newest = row
    unfinished: list[UnfinishedRow] = []
    for step, builds in sorted(unfinished_steps(root).items()):
        for build in builds:
            unfinished.append(UnfinishedRow(step, build.paths, build.nbytes, build.state, _unfinished_state(build)))
    return SavesReport(without_secrets(os.fspath(path)), tuple(rows), newest, tuple(unfinished))


def _unfinished_state(build: UnfinishedBuild) -> str:
    """Return in a few words what has become of an unfinished save or removal."""
    if build.state == "alive" and build.owner is not None:
        doing = "removed" if build.is_removal else "saved"
        return f"being {doing} by {build.owner.pid} on {build.owner.host}"
    state = "killed" if build.state == "dead" else "unfinished"
    if build.is_removal:
        state += " removal"
    return state
