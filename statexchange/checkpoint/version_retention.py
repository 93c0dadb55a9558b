"""Remove old versions of weights, once no reader needs them."""

from __future__ import annotations

from collections.abc import Mapping

from statexchange.checkpoint.publication import ReplaceableFiles
from statexchange.formats.huggingface import MANIFEST
from statexchange.storage import publish, versions
from statexchange.storage.versions import GRACE_S

__all__ = ["remove_old_versions"]


def remove_old_versions(path: str, run: str, bases: Mapping[int, int | None], keep: int) -> list[str]:
    """Retire old versions of a run and of those before it; remove what was retired before; return the removed paths.

    Not collective; root only.

    Args:
        path: the directory of versions.
        run: the current run.
        bases: for each of its versions the one that it is based on, None for a full one.
        keep: how many of the newest stay, and with them all that they are based on.

    Raises:
        StorageError: a version cannot be removed.
    """
    versions.retire(path, run, bases, keep)
    earlier_runs = versions.list_runs(path)[:-1]
    if len(bases) < keep:
        del earlier_runs[-1:]  # a reader may still have a version of the run before
    for earlier in earlier_runs:
        versions.retire(path, earlier, dict.fromkeys(versions.list_versions(path, earlier)), 0)
    for of_run in versions.list_runs(path):  # what killed publishers have left
        publish.clear_all(f"{path}/{of_run}", versions.VERSION_PREFIX, MANIFEST)
    removed = versions.sweep_retired(path, MANIFEST, ReplaceableFiles(), grace_s=GRACE_S)
    versions.clear_runs(path)
    return removed
