"""Compute how much memory this process may still use, on its host and within its cgroups.

Beyond that the kernel does not refuse an allocation; it kills the process that uses the memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Files:
    """The file names of one cgroup version, and its keys of `memory.stat` that count a whole subtree."""

    limit: str
    usage: str
    file_pages: str
    shmem: str


_FILES = {
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    "cgroup2": _Files("memory.max", "memory.current", "file", "shmem"),
}
_UNLIMITED = 1 << 62  # cgroup v1 reports no limit as 2**63 rounded down to a page
_ESCAPED = re.compile(r"\\([0-7]{3})")


def memory_left() -> tuple[int, str]:
    """Return the bytes of memory that this process may still use, and in words what sets the limit. Not collective."""
    return min([(_host_memory_left(), "on this host"), *memory_headrooms()])


def _host_memory_left() -> int:
    kibibytes = {line.split()[0]: int(line.split()[1]) for line in _lines("/proc/meminfo")}
    if not kibibytes:  # a sandbox without /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # MemAvailable counts the file pages that can be dropped; the kernel swaps before it kills.
    return 1024 * (kibibytes["MemAvailable:"] + kibibytes["SwapFree:"])


def memory_headrooms(proc: str = "/proc/self") -> list[tuple[int, str]]:
    """Return the headroom in each memory cgroup above this process that has a limit, and which one that is.

    Both cgroup versions are read. Headroom is the limit minus the usage. File pages do not count as used, because the
    kernel drops them when it needs memory. Pages of tmpfs and shared memory do count, because it cannot drop them.
    `proc` is the process's directory in /proc.
    """
    headrooms = []
    for version, mount, directory in _memory_cgroups(proc):
        # A limit holds for all cgroups below together: the least headroom may be that of any ancestor.
        for ancestor in _up_to(mount, directory):
            nbytes = _headroom_of(ancestor, _FILES[version])
            if nbytes is not None:
                headrooms.append((nbytes, f"in the cgroup {ancestor}"))
    return headrooms


def _memory_cgroups(proc: str) -> Iterator[tuple[str, str, str]]:
    """Yield the version, the mount point and the directory of each cgroup that counts this process's memory."""
    paths = _paths_of(proc)
    for line in _lines(f"{proc}/mountinfo"):
        fields, _, rest = line.partition(" - ")
        version, _, options = rest.partition(" ")
        words = fields.split()
        # Version 1 has a hierarchy for each controller, which the last field of its mount names.
        counts_memory = version == "cgroup2" or (version == "cgroup" and "memory" in options.split()[-1].split(","))
        if not counts_memory or version not in paths:
            continue
        root, mount = map(unescape_mountinfo, words[3:5])
        path = os.path.relpath(paths[version], root)
        # In a container the mount may show only the container's cgroup, while /proc has a path from outside.
        if path.startswith(".."):
            path = "."
        yield version, mount, os.path.normpath(os.path.join(mount, path))


def unescape_mountinfo(text: str) -> str:
    """Return a field of mountinfo with its octal escapes replaced."""
    return _ESCAPED.sub(lambda code: chr(int(code[1], 8)), text)


def _up_to(mount: str, directory: str) -> Iterator[str]:
    """Yield `directory` and its parents, `mount` last."""
    while directory != mount:
        yield directory
        directory = os.path.dirname(directory)
    yield mount


def _paths_of(proc: str) -> dict[str, str]:
    """Return the path of the process's cgroup below the root of its hierarchy, by version."""
    paths = {}
    for line in _lines(f"{proc}/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    return paths


def _headroom_of(directory: str, files: _Files) -> int | None:
    """Return the headroom of one cgroup; None if it has no limit or was removed."""
    try:
        with open(f"{directory}/{files.limit}", encoding="ascii") as file:
            limit = file.read().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        with open(f"{directory}/{files.usage}", encoding="ascii") as file:
            usage = int(file.read())
        pages = dict(line.split() for line in _lines(f"{directory}/memory.stat"))
        # The counters are read one after another, and the kernel updates them late: a difference may be negative.
        droppable = int(pages.get(files.file_pages, 0)) - int(pages.get(files.shmem, 0))
        return max(0, int(limit) - (usage - max(0, droppable)))
    except (OSError, ValueError):
        return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:  # a sandbox without /proc, or a removed cgroup
        return []
