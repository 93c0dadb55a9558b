"""Remove saves from an object store, and what killed processes have left there.

A removal is a build (object_build.py) that takes the claim, removes the manifest first and then the other objects, and
gives the claim up. Its claim has the plan `REMOVAL`.

Only its claim, which it renews, shows whether a process on another host still runs. `ClaimWatch` remembers since when
each claim is unchanged, so that a job that looks at its saves repeatedly never has to wait for one.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from statexchange.errors import CorruptError, NotFoundError, StateExchangeError, TargetExistsError
from statexchange.storage.build import UnfinishedBuild
from statexchange.storage.claim import CLAIM_NAME
from statexchange.storage.object_build import ObjectBuild, WatchedClaim, claim_is_dead
from statexchange.storage.objects import Objects

if TYPE_CHECKING:
    from statexchange.storage.build import OwnCheck, ReplaceCheck

__all__ = ["ClaimWatch", "clear_objects", "remove_objects", "unfinished_objects"]

_log = logging.getLogger(__name__)
REMOVAL = "removal"


class ClaimWatch:
    """The versions of claims that a process has seen, and since when. For one thread."""

    def __init__(self) -> None:
        self._seen: dict[str, WatchedClaim] = {}  # by the path of the directory

    def look_at(self, url: str) -> None:
        """Remember the claim in a directory, if there is one."""
        objects = Objects(url)
        version = objects.claim_version()
        if version is not None:
            self.remember(objects.path, version)

    def remember(self, path: str, version: str) -> WatchedClaim:
        """Remember `version` of the claim in the directory `path`; return it and since when it is unchanged."""
        seen = self._seen.get(path)
        if seen is None or seen.version != version:
            seen = self._seen[path] = WatchedClaim(version, time.monotonic())
        return seen


def unfinished_objects(url: str, manifest: str) -> UnfinishedBuild | None:
    """Return what a publisher or removal has left, or is building, in the directory `url`; None if there is nothing.

    Not collective. With a manifest the directory is whole, even if there is still a claim.
    """
    objects = Objects(url)
    infos = objects.list_infos()
    if CLAIM_NAME not in infos or manifest in infos:
        return None
    nbytes = sum(int(info.get("size") or 0) for name, info in infos.items() if name != CLAIM_NAME)
    paths = (objects.path,)
    try:
        present = objects.read_claim()
    except StateExchangeError:  # it is broken, or renewed again and again
        return UnfinishedBuild("", paths, False, None, "unknown", nbytes)
    if present is None:
        return None
    claim, _ = present
    is_removal = claim.plan == REMOVAL
    if claim_is_dead(claim):
        return UnfinishedBuild(claim.nonce, paths, is_removal, claim.owner, "dead", nbytes)
    if claim.owner.is_alive:
        return UnfinishedBuild(claim.nonce, paths, is_removal, claim.owner, "alive", nbytes)
    return UnfinishedBuild(claim.nonce, paths, is_removal, claim.owner, "unknown", nbytes)


def clear_objects(
    url: str, manifest: str, is_own: OwnCheck, *, watch: ClaimWatch | None = None, waits: bool = False
) -> str | None:
    """Remove what a dead publisher or removal has left in the directory `url`; return the nonce of its claim.

    Not collective. None if there is nothing, or if its process may still run. Of a directory with a manifest only the
    claim is removed.

    Args:
        url: the directory.
        manifest: the name of the object that commits it.
        is_own: as for `publish.open_build`.
        watch: what this process has seen of claims; a claim that has not changed for 60 s counts as a dead process's.
        waits: watch the claim for 60 s, unless its process runs on this host or has provably ended.
    """
    objects = Objects(url)
    if CLAIM_NAME not in objects.list_infos():
        return None
    try:
        present = objects.read_claim()
    except CorruptError as error:  # no reason to fail for other directories
        _log.warning("the remains of a killed save or removal are not removed: %s", error)
        return None
    except TargetExistsError:  # it is renewed again and again
        return None
    if present is None:
        return None
    claim, version = present
    watched = None if watch is None else watch.remember(objects.path, version)
    try:
        ObjectBuild(
            url, REMOVAL, [manifest], check=None, resume=False, is_own=is_own, watched=watched, waits=waits
        ).abandon()
    except TargetExistsError:  # its process runs, or the directory is whole: then only the claim was removed
        return None
    return claim.nonce


def remove_objects(url: str, manifest: str, check: ReplaceCheck, *, waits: bool) -> None:
    """Remove a published directory, its manifest first.

    Not collective. With `waits` it watches another host's claim for 60 s, to see whether that process still runs.

    Raises:
        NotFoundError: there is no manifest.
        UnsafeError: it has other objects.
        TargetExistsError: another process is publishing or removing it.
    """
    objects = Objects(url)
    if manifest not in objects.list_infos():
        raise NotFoundError("no such path", path=objects.path)
    ObjectBuild(url, REMOVAL, [manifest], check=check, resume=False, waits=waits).abandon()
