"""Open a build of the kind that a path needs: a local directory, or objects at an fsspec URL.

build.py has the interface of both and what it guarantees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statexchange.storage.store import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.storage.build import Build, ReplaceCheck

__all__ = ["check_build", "open_build"]


def open_build(
    path: str,
    plan_digest: str,
    names: Sequence[str],
    *,
    check: ReplaceCheck | None,
    reuse: bool = False,
    resume: bool = False,
) -> Build:
    """Begin to build the directory `path` (an absolute path or a URL), which will hold files of these `names`.

    Args:
        path: the target.
        plan_digest: 32 hex digits; with `reuse` they must stand for every byte of the output files.
        names: of all files; the last one is the one that `commit` writes.
        check: called with a directory that is at `path`, before it is replaced; None if none may be replaced.
        reuse: keep the output files that a killed publisher of the same plan had finished.
        resume: the user says that all publishers that have left something here are dead; else that must be proved.

    Raises:
        TargetExistsError: the target exists and `check` is None, or another process is publishing to it.
        UnsafeError: something lies there that is no directory of ours.
        UnsupportedError: the store cannot be written.
        StorageError, InvalidArgumentError.
    """
    if is_url(path):
        from statexchange.storage.object_build import ObjectBuild  # and with it fsspec, only for a URL

        return ObjectBuild(path, plan_digest, names, check=check, resume=resume)
    from statexchange.storage.directory_build import DirectoryBuild

    return DirectoryBuild(path, plan_digest, check=check, reuse=reuse, resume=resume)


def check_build(path: str, manifest: str, *, check: ReplaceCheck | None, nbytes: int, resume: bool) -> None:
    """Check, without changing anything, whether `open_build` would accept the target. Raises what it would raise.

    `manifest` is the name of the file that `commit` writes; `nbytes` is the room that all files together need.
    """
    if is_url(path):
        from statexchange.storage.object_build import check_url

        check_url(path, manifest, check)
        return
    from statexchange.storage.directory_build import check_directory

    check_directory(path, check, nbytes, resume=resume)
