"""Remove a published directory of a file system; see what builds there have left, or would refuse, and change nothing.

The top of directory_build.py explains the names and the protocol.
"""

from __future__ import annotations

import contextlib
import os

from statexchange.errors import NotFoundError, StateExchangeError
from statexchange.storage import files
from statexchange.storage.atomic import invalidate_lookups
from statexchange.storage.location import open_path
from statexchange.storage.publish.build import NO_PLAN, ReplaceCheck, UnfinishedBuild, target_exists
from statexchange.storage.publish.directory_build import (
    DirectoryBuild,
    Leftover,
    check_target,
    conflict,
    find_leftovers,
    refuse_others,
)


def unfinished_builds(path: str) -> list[UnfinishedBuild]:
    """Return what publishers and removals have under hidden names beside the target `path`.

    Not collective. [] if the parent directory does not exist.
    """
    parent, name = files.split_target(path)
    builds = []
    try:
        with files.directory(parent) as dir_fd:
            leftovers = find_leftovers(name, dir_fd, parent)
    except NotFoundError:
        return []
    for leftover in leftovers:
        paths = tuple(os.path.join(parent, hidden) for hidden in leftover.directories.values())
        # A publisher that has not committed has its partial directory.
        is_removal = bool(paths) and "partial" not in leftover.directories
        nbytes = sum(map(_size_of_files, paths))
        builds.append(UnfinishedBuild(leftover.nonce, paths, is_removal, leftover.owner, leftover.state, nbytes))
    return builds


def _size_of_files(path: str) -> int:
    """Return the bytes of the files in a directory; 0 if it cannot be read."""
    with contextlib.suppress(StateExchangeError), open_path(path) as opened:
        return sum(opened.store.open(name).size for name in opened.store.files)
    return 0


def check_directory(path: str, check: ReplaceCheck | None, nbytes: int) -> None:
    """Raise what a build of `nbytes` bytes at `path` would raise for the target, without changing anything."""
    parent, name = files.split_target(path)
    dir_fd, nearest = files.open_nearest(parent)
    try:
        files.mount_of(nearest).check_takes_files(nearest)
        leftovers: list[Leftover] = []
        # Else neither a target nor hidden names can be there.
        if nearest == parent:
            leftovers = find_leftovers(name, dir_fd, parent)
            refuse_others(leftovers, path)
            if check is None and any(leftover.is_interrupted for leftover in leftovers):
                raise target_exists(path)
            check_target(path, dir_fd, check)
        files.check_writable(dir_fd, nearest)
        # A build would remove or reuse leftovers: how much room there is then is not known.
        if not leftovers:
            files.check_room(dir_fd, nbytes, path)
    finally:
        os.close(dir_fd)


class DirectoryRemoval(DirectoryBuild):
    """The removal of a published directory, and of everything that dead publishers have left beside it.

    It takes the place of a publisher: it has an owner record, excludes other publishers, and removes only the directory
    that it has checked. The directory is renamed to its ``.discarded`` name first, so that no reader opens a part of
    it. After a kill the next removal or publisher finds that name and goes on.
    """

    def __init__(self, path: str, *, check: ReplaceCheck) -> None:
        super().__init__(path, NO_PLAN, check=check, reuse=False, resume=False)

    def _make_partial(self) -> None:
        """Make nothing: this only removes."""

    def run(self) -> None:
        """Remove the directory.

        Raises:
            NotFoundError: it does not exist, or was removed meanwhile.
            TargetExistsError: another publisher replaced it meanwhile.
        """
        try:
            if self._old_identity is None or not self._is_replaceable():
                raise NotFoundError("there is nothing to remove", path=self.path)
            if not self._rename(self._name, self._discarded):
                raise NotFoundError("it was removed meanwhile", path=self.path)
            # Else this host's NFS client may show its cached directory under the new name, not the renamed one.
            invalidate_lookups(self._parent_fd, self._parent)
            if self._identity(self._discarded) != self._old_identity:
                self._rename(self._discarded, self._name)
                raise conflict(self.path, "replaced the target meanwhile")
            # The name is gone durably before the first file is: a power cut may not bring back a part of it.
            files.sync_directory(self._parent_fd, self.path)
            self._is_published = True
            self._end()
        except BaseException:
            self.abandon()
            raise
