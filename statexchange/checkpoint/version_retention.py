"""Remove old versions of weights, once no reader needs them: after a publish, or by a command."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from statexchange.checkpoint.publication import ReplaceableFiles
from statexchange.errors import NotFoundError, ReplacedError, without_secrets
from statexchange.formats.model_files import MANIFEST
from statexchange.formats.version import delta_facts, is_unfinished
from statexchange.storage import publish, versions
from statexchange.storage.location import directory_of, open_path
from statexchange.storage.versions import GRACE_S


def _obsolete_versions(
    path: str, run: str, bases: Mapping[int, int | None], keep: int, kept: Collection[int]
) -> dict[str, list[int]]:
    """Return by run the versions that need not stay and are not retired yet: `kept` are those of this run that stay."""
    # The last is the current run: ids sort by the order in which runs began.
    earlier_runs = versions.list_runs(path)[:-1]
    if len(bases) < keep:
        del earlier_runs[-1:]  # a reader may still have a version of the run before
    obsolete = {earlier: versions.list_versions(path, earlier) for earlier in earlier_runs}
    # What is not in `bases` is unfinished, or was published since they were read.
    candidates = set(bases).difference(kept)
    obsolete[run] = [number for number in versions.list_versions(path, run) if number in candidates]
    return obsolete


def remove_old_versions(path: str, run: str, bases: Mapping[int, int | None], keep: int) -> None:
    """Retire what need not stay, and remove what was retired before and nobody reads.

    Not collective; root only.

    Args:
        path: the directory of versions.
        run: the current run.
        bases: for each of its versions the one that it is based on, None for a full one.
        keep: how many of the newest stay, and with them all that they are based on.

    Raises:
        StorageError: the directory cannot be read or written.
    """
    kept = versions.kept_versions(bases, keep)
    for of_run, numbers in _obsolete_versions(path, run, bases, keep, kept).items():
        versions.retire(path, of_run, numbers)
    # What killed publishers have left. A trainer may publish while `statexchange prune` is here: its build stays.
    for of_run in versions.list_runs(path):
        whole: list[str] = []
        if of_run == run:
            whole += map(versions.version_name, kept)
        publish.clear_all(f"{path}/{of_run}", versions.VERSION_PREFIX, MANIFEST, whole)
    # Not those that were retired just now: their grace, in which readers may still write leases, has begun.
    versions.sweep_retired(path, MANIFEST, ReplaceableFiles(), grace_s=GRACE_S)
    versions.clear_runs(path)


@dataclass(frozen=True, slots=True)
class PrunedVersion:
    """The outcome for one version.

    Attributes:
        run: the id of its run.
        version: its number.
        path: its directory.
        nbytes: the bytes of its files.
        action: "removed", "retired" (to be removed by a later call) or "kept"; with `dry_run` what would be done.
    """

    run: str
    version: int
    path: str
    nbytes: int
    action: Literal["removed", "retired", "kept"]


def prune_versions(path: str, keep: int, *, dry_run: bool = False) -> list[PrunedVersion]:
    """Retire the versions that need not stay, and remove what was retired at least a minute ago and nobody reads.

    Not collective.

    Args:
        path: the directory of versions.
        keep: how many of the newest of the current run stay, and with them all that they are based on.
        dry_run: change nothing, and return what would be retired.

    Raises:
        NotFoundError: there are no versions of a `Publisher`.
        StorageError: a version cannot be read or removed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> with sx.Publisher("updates", full_every=1) as publisher:
        ...     reports = [publisher.publish({"w": torch.zeros(9)}, number) for number in (1, 2, 3)]
        >>> [(row.version, row.action) for row in prune_versions("updates", keep=2)]
        [(1, 'retired'), (2, 'kept'), (3, 'kept')]
    """
    path = directory_of(path)
    run = versions.current_run(path)
    if run is None:
        raise NotFoundError("there are no versions of a Publisher here", path=path)
    bases: dict[int, int | None] = {}
    for number in versions.list_versions(path, run):
        # A trainer may remove it meanwhile, and what it is writing is not counted among the newest.
        with suppress(NotFoundError, ReplacedError), open_path(versions.version_path(path, run, number)) as opened:
            if not is_unfinished(opened.store):
                facts = delta_facts(opened)
                bases[number] = None if facts is None else facts[0]
    before = versions.all_versions(path)
    retired = _obsolete_versions(path, run, bases, keep, versions.kept_versions(bases, keep))
    for of_run in before:
        retired[of_run] = [*retired.get(of_run, ()), *versions.retired_versions(f"{path}/{of_run}")]
    rows = []
    for of_run, numbers in before.items():
        for number in numbers:
            folder = versions.version_path(path, of_run, number)
            action: Literal["retired", "kept"] = "retired" if number in retired[of_run] else "kept"
            with suppress(NotFoundError, ReplacedError), open_path(folder) as opened:
                nbytes = versions.size_and_time(opened.store)[0]
                rows.append(PrunedVersion(of_run, number, without_secrets(folder), nbytes, action))
    if dry_run:
        return rows
    remove_old_versions(path, run, bases, keep)
    left = versions.all_versions(path)
    for number, row in enumerate(rows):
        if row.version not in left.get(row.run, ()):
            rows[number] = replace(row, action="removed")
    return rows
