"""Mounts: the file system of a path, and warnings about mount options that make reads stale or locks ineffective."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

from statexchange.cgroups import unescape_mountinfo

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


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: mount point, file system type, and the options of mount and superblock."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_memory(self) -> bool:
        """Whether files are stored in memory, where fsync has no effect."""
        return self.kind in _MEMORY

    @property
    def is_network(self) -> bool:
        """Whether other hosts may change files here, and this host may see them late because of its caches."""
        return self.kind in _NETWORK

    @property
    def has_no_files(self) -> bool:
        """Whether this is a kernel interface such as /proc, in which no files can be made."""
        return self.kind in _KERNEL


def _mounts() -> tuple[Mount, ...]:
    """Return all mounts in the order in which they were made; () without /proc/self/mountinfo."""
    try:
        with open("/proc/self/mountinfo", "rb", buffering=0) as lines:
            return _parsed(lines.read())
    except OSError:
        return ()


@functools.lru_cache(maxsize=1)  # a scan asks once per directory, and mounts seldom change
def _parsed(text: bytes) -> tuple[Mount, ...]:
    mounts = []
    for line in os.fsdecode(text).split("\n"):
        row = line.split()
        if not row:  # after the last line
            continue
        separator = row.index("-")  # follows the optional fields
        options = frozenset([*row[5].split(","), *row[separator + 3].split(",")])
        mounts.append(Mount(unescape_mountinfo(row[4]), row[separator + 1], options))
    return tuple(mounts)


def mount_of(path: str) -> Mount:
    """Return the mount of `path`, or of its nearest existing parent. Not collective."""
    real = os.path.realpath(path)
    best = Mount("/", "", frozenset())
    for mount in _mounts():
        # A later mount on the same point hides the earlier ones.
        is_inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if is_inside and len(mount.point) >= len(best.point):
            best = mount
    return best


_looked_at: set[int] = set()  # device numbers of file systems: a scan opens very many directories of one


def warn_of_options(path: str) -> None:
    """Warn once per file system about NFS options of `path` that make reads stale or locks ineffective.

    Not collective. Does nothing if there is no such path.
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        return
    if device in _looked_at:
        return
    _looked_at.add(device)
    mount = mount_of(path)
    if mount.kind not in ("nfs", "nfs4"):
        return
    if "nocto" in mount.options:
        _log.warning(
            "%s: mounted with nocto: this host may read stale names and bytes of files that another host has written, "
            "until its attribute cache expires; mount without nocto",
            mount.point,
        )
    if mount.options & {"nolock", "local_lock=all", "local_lock=flock"}:
        _log.warning(
            "%s: mounted with nolock or local_lock: two hosts that publish to one name detect each other only at the "
            "end, when one of them is refused",
            mount.point,
        )
