"""Open a build of the kind that a path needs, or join one: a local directory, or objects at an fsspec URL.

build.py has the interface of both and what it guarantees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statexchange.storage.store import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.storage.build import Build, BuildMember, OwnCheck, ReplaceCheck

__all__ = ["check_build", "join_build", "open_build"]


def open_build(
    path: str,
    plan_digest: str,
    names: Sequence[str],
    *,
    check: ReplaceCheck | None,
    reuse: bool = False,
    resume: bool = False,
    is_own: OwnCheck | None = None,
) -> Build:
    """Open a build of the directory `path`. Root only.

    Args:
        path: the target, an absolute path or a URL.
        plan_digest: 32 hex digits; with `reuse`, equal digests must mean equal bytes of all output files.
        names: names of all files; `commit` writes the last one.
        check: called with the directory at `path` before it is replaced; None if it may not be replaced.
        reuse: keep the output files that a killed publisher of the same plan had finished.
        resume: treat every other publisher to this target as dead; without it a publisher's death must be proved.
        is_own: in an object store, whether an object that neither a manifest nor a claim lists may be removed.

    Returns:
        The open build.

    Raises:
        TargetExistsError: the target exists and `check` is None, or another process is publishing to it.
        UnsafeError: the target is not a directory that statexchange published.
        UnsupportedError: the store cannot be written.
        StorageError: the operating system or the store refused a read or write.
        InvalidArgumentError: the path has no name, or one that is too long.
    """
    if is_url(path):
        from statexchange.storage.object_build import ObjectBuild  # imports fsspec, which local paths do not need

        return ObjectBuild(path, plan_digest, names, check=check, resume=resume, is_own=is_own)
    from statexchange.storage.directory_build import DirectoryBuild

    return DirectoryBuild(path, plan_digest, check=check, reuse=reuse, resume=resume)


def check_build(path: str, manifest: str, *, check: ReplaceCheck | None, nbytes: int, resume: bool) -> None:
    """Raise what `open_build` would raise for this target, without changing anything.

    `manifest` is the name of the file that `commit` writes; `nbytes` is the size of all files together.
    """
    if is_url(path):
        from statexchange.storage.object_build import check_url

        check_url(path, manifest, check)
        return
    from statexchange.storage.directory_build import check_directory

    check_directory(path, check, nbytes, resume=resume)


def join_build(path: str, key: str, manifest: str) -> BuildMember:
    """Join a build that another process has opened at the target `path`.

    Args:
        path: the target, as this process names it.
        key: what `Build.share` has returned there.
        manifest: the name of the file that `commit` writes.

    Raises:
        NotFoundError: this process does not see the build.
    """
    if is_url(path):
        from statexchange.storage.object_build import ObjectMember  # as above

        return ObjectMember(path, key, manifest)
    from statexchange.storage.directory_build import DirectoryMember

    return DirectoryMember(path, key)
