"""Mounts: which file system a path lies on, and which of its mount options break a promise of ours."""

from __future__ import annotations

import functools
import logging
import os
import re
from dataclasses import dataclass

__all__ = ["Mount", "mount_of", "warn_of_options"]

_log = logging.getLogger(__name__)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "9p",
        "afs",
        "virtiofs",
        "fuse.sshfs",
        "fuse.juicefs",
        "fuse.glusterfs",
        "fuse.ceph",
    }
)
_KERNEL = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "devpts"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: mount point, file system type, and the options of mount and superblock."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_memory(self) -> bool:
        """Whether files lie in memory, where syncing is meaningless."""
        return self.kind in _MEMORY

    @property
    def is_network(self) -> bool:
        """Whether other hosts may change what lies here, with caches between."""
        return self.kind in _NETWORK

    @property
    def has_no_files(self) -> bool:
        """Whether it shows the kernel, and nobody makes files in it."""
        return self.kind in _KERNEL


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _mounts() -> list[Mount]:
    """Return all mounts in the order in which they were made; [] where /proc does not show them."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return []
    found = []
    for row in rows:
        dash = row.index("-")  # optional fields end with it
        options = frozenset([*row[5].split(","), *row[dash + 3].split(",")])
        found.append(Mount(_unescaped(row[4]), row[dash + 1], options))
    return found


def mount_of(path: str) -> Mount:
    """Return the mount that `path` lies on; its last existing directory counts. Not collective."""
    real = os.path.realpath(path)
    best = Mount("/", "", frozenset())
    for mount in _mounts():
        # Of several mounts on one point the last one is visible.
        below = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if below and len(mount.point) >= len(best.point):
            best = mount
    return best


@functools.cache
def _warn_once(point: str, text: str) -> None:
    _log.warning("%s: %s", point, text)


def warn_of_options(path: str) -> None:
    """Warn once by name of each mount option that takes back a promise for what lies at `path`. Not collective."""
    mount = mount_of(path)
    if mount.kind not in ("nfs", "nfs4"):
        return
    if "nocto" in mount.options:
        _warn_once(
            mount.point,
            "mounted with nocto: this host may read old names and old bytes of what another host has written here, "
            "for as long as its attribute cache lasts; mount without nocto",
        )
    if mount.options & {"nolock", "local_lock=all", "local_lock=flock"}:
        _warn_once(
            mount.point,
            "mounted with nolock or local_lock: two hosts that publish to one name are not told of each other before "
            "the end, where one of them is refused",
        )
