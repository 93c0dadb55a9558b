"""Publish a directory so that it appears whole or not at all, at a local path or a URL: the one door to do so.

A publisher begins (`open_build`), creates and writes files, then commits (`Build.commit`) or gives up
(`Build.abandon`). build.py says what is guaranteed. There are two carriers, each with its protocol and the reason for
each odd step at the top of its file:

* On a file system (directory_build.py) the files lie in a hidden directory beside the target. The commit is the rename
  of this directory to the target's name.
* In an object store (object_build.py), which cannot rename, the files have their final names from the start, and a
  claim beside them says whose they are. The commit is the put of the manifest, which comes last: readers refuse a
  directory without one.

A publisher that is killed before its commit leaves names that no reader opens. The next one to the same target settles
them.

Nothing here is collective. Both carriers are imported at the first call that needs them: fsspec is slow to import.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from statexchange.errors import NotFoundError, StorageError, TargetExistsError, UnsafeError
from statexchange.storage import files
from statexchange.storage.location import is_remote, open_path

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from statexchange.storage.publish.build import Build, Member, OwnCheck, ReplaceCheck, UnfinishedBuild

__all__ = [
    "can_link",
    "check_build",
    "check_can_be_made",
    "clear_all",
    "join_build",
    "open_build",
    "remove",
    "unfinished",
    "unfinished_names",
]

_log = logging.getLogger(__name__)


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
    """Open a build of a directory. Root only.

    Args:
        path: the directory.
        plan_digest: 32 hex digits; with `reuse`, equal digests must mean equal bytes of all output files.
        names: names of all files; `commit` writes the last one.
        check: called with the existing directory before that is replaced; None if none may be replaced.
        reuse: keep the output files that a killed publisher of the same plan had finished, in a local directory.
        resume: treat every other publisher to this target as dead; without it a publisher's death must be proved.
        is_own: in an object store, whether an object that neither a manifest nor a claim lists may be removed.

    Raises:
        TargetExistsError: the target exists and `check` is None, or another process is publishing to it.
        UnsafeError: the target is not a directory that statexchange published.
        UnsupportedError: the store cannot be written.
        StorageError: the operating system or the store refused a read or write.
        InvalidArgumentError: the path has no name, or one that is too long.
    """
    if is_remote(path):
        from statexchange.storage.publish.object_build import ObjectBuild

        return ObjectBuild(path, plan_digest, names, check=check, resume=resume, is_own=is_own)
    from statexchange.storage.publish.directory_build import DirectoryBuild

    return DirectoryBuild(path, plan_digest, check=check, reuse=reuse, resume=resume)


def check_build(path: str, manifest: str, *, check: ReplaceCheck | None, nbytes: int) -> None:
    """Raise what `open_build` would raise, and StorageError if a disk has too little space, without changing anything.

    `manifest` is the name of the file that `commit` writes; `nbytes` is the size of all files together.
    """
    if is_remote(path):
        from statexchange.storage.publish.object_build import check_url

        check_url(path, manifest, check)
    else:
        from statexchange.storage.publish.directory_removal import check_directory

        check_directory(path, check, nbytes)


def join_build(path: str, key: str, manifest: str) -> Member:
    """Return what puts files into a build that another process has opened.

    Args:
        path: the directory, as this process sees it.
        key: what `Build.share` has returned there.
        manifest: the name of the file that `commit` writes.

    Raises:
        NotFoundError: this process does not see the build.
    """
    if is_remote(path):
        from statexchange.storage.publish.object_build import ObjectMember

        return ObjectMember(path, key, manifest)
    from statexchange.storage.publish.directory_build import DirectoryMember

    return DirectoryMember(path, key)


def can_link(path: str) -> bool:
    """Whether `Member.link` may succeed below a path or URL. Nothing is looked at there."""
    return not is_remote(path) or path.partition("://")[0] in ("s3", "s3a")


def check_can_be_made(path: str, absence: NotFoundError) -> None:
    """Raise NotFoundError if nothing is at a path and the first build in this directory could not make it.

    The path is then wrong, or a disk is not mounted: there is no such bucket, or the path, or what it would be made in,
    is a file or a link that leads nowhere.

    Args:
        path: the path.
        absence: the error that says that nothing is there.
    """
    if is_remote(path):
        from statexchange.storage.fsspec_store import is_missing_bucket

        if is_missing_bucket(absence):
            raise absence
        return
    # A build makes missing parents, so that the nearest directory above is enough.
    dir_fd, _ = files.open_nearest(path)
    os.close(dir_fd)


def remove(path: str, manifest: str, check: ReplaceCheck, *, waits: bool = True) -> None:
    """Remove a published directory.

    No reader opens a part of it. A reader that has opened it before may fail; its error says that it was removed.

    Args:
        path: the directory.
        manifest: the name of the file that commits it, and that is removed first.
        check: as for `open_build`.
        waits: at a URL: if a process of another host has begun to remove it, watch that process's claim for 60 s,
            to see whether it still runs.

    Raises:
        NotFoundError: there is no such directory.
        UnsafeError: it has files that were not published.
        TargetExistsError: another process is publishing or removing it.
    """
    if is_remote(path):
        from statexchange.storage.publish.object_build import remove_objects

        remove_objects(path, manifest, check, waits=waits)
    else:
        from statexchange.storage.publish.directory_removal import DirectoryRemoval

        DirectoryRemoval(path, check=check).run()


def unfinished(path: str, manifest: str) -> list[UnfinishedBuild]:
    """Return the builds and removals of a directory that are under way, or were killed.

    Raises:
        StorageError: the directory cannot be read.
    """
    if is_remote(path):
        from statexchange.storage.publish.object_build import unfinished_objects

        build = unfinished_objects(path, manifest)
        return [] if build is None else [build]
    from statexchange.storage.publish.directory_removal import unfinished_builds

    return unfinished_builds(path)


def unfinished_names(path: str, without: Collection[str]) -> list[str]:
    """Return the names in a directory at which there may be an unfinished build. [] if it does not exist.

    Names in `without` are known to be whole. They are left out at a URL, where an unfinished build has its final name;
    a local directory may be whole while another build of it is unfinished.
    """
    if not is_remote(path):
        try:
            entries = os.listdir(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError.of(error, "list directory", path=path) from error
        # A target may have several hidden names, and may be absent itself.
        return sorted(set(filter(None, map(files.hidden_target, entries))))
    try:
        with open_path(path) as opened:
            names = [] if opened.file is not None else opened.store.directories
    except NotFoundError:
        return []
    return [name for name in names if name not in without]


def _clear(path: str, manifest: str, is_own: OwnCheck | None, *, waits: bool) -> str | None:
    """Remove the remains of a directory's builds and removals, as `clear_all` does; return the nonce of a claim."""
    if is_remote(path):
        from statexchange.storage.publish.object_build import clear_objects

        return clear_objects(path, manifest, is_own, waits=waits)
    from statexchange.storage.publish.directory_removal import DirectoryRemoval

    # Where all owners may still run nothing can be removed, and not even a record is written.
    builds = unfinished(path, manifest)
    if builds and all(build.owner is not None and build.state != "dead" for build in builds):
        return None
    # A removal settles what dead publishers have left when it begins; then it is given up, and the target stays.
    try:
        DirectoryRemoval(path, check=lambda _: []).abandon()
    except TargetExistsError:  # a process that runs is publishing here
        pass
    except UnsafeError as error:  # another user's, or not a directory: other directories can still be cleared
        _log.warning("the remains of a killed save or removal are not removed: %s", error)
    return None


def clear_all(
    path: str,
    prefix: str,
    manifest: str,
    without: Collection[str] = (),
    *,
    is_own: OwnCheck | None = None,
    waits: bool = False,
) -> list[str]:
    """Remove the remains of builds and removals whose processes have provably ended, and return nonces of claims.

    A warning is logged about what is under hidden names of a local directory and is not ours.

    Args:
        path: the directory in which the builds are.
        prefix: how the names of their targets begin.
        manifest: the name of the file that commits them.
        without: names that are known to be whole.
        is_own: as for `open_build`.
        waits: at a URL: watch the claim of another host's process for 60 s. Without it only a claim that this process
            has seen unchanged for 60 s counts as a dead process's.

    Returns:
        At a URL the nonces of the claims that were removed.
    """
    nonces = []
    for name in unfinished_names(path, without):
        if name.startswith(prefix):
            nonce = _clear(os.path.join(path, name), manifest, is_own, waits=waits)
            if nonce is not None:
                nonces.append(nonce)
    return nonces
