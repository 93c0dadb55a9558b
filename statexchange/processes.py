"""Processes: which one on which host, whether it still runs, on how many cores, and the pause of its collector."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Owner",
    "collector_paused",
    "host_identity",
    "network_identity",
    "pid_namespace",
    "process_is_alive",
    "process_is_stopped",
    "process_start",
    "usable_cores",
]


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/<pid>/stat after the name, beginning with the state; None without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_start(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None if it has ended (a zombie has)."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def process_is_stopped(pid: int) -> bool:
    """Whether `pid` has been stopped by a signal or a debugger."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] in (b"T", b"t")


def process_is_alive(pid: int, start: int) -> bool:
    """Whether the process that had `pid` at time `start` still runs."""
    return process_start(pid) == start


def _is_hidden(pid: int) -> bool:
    """Whether `pid` exists although /proc does not show it (mount option hidepid)."""
    if _stat_fields(pid) is not None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    # It may have ended, and a new process begun, between the two looks: that one /proc may show.
    return _stat_fields(pid) is None


def usable_cores() -> int:
    """Return how many cores this process may run on. Not collective."""
    return len(os.sched_getaffinity(0))


def _host_name() -> str:
    import platform  # which is slow to import, and needed by writers only

    return platform.node()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def host_identity() -> str:
    """Return what ranks of one host have in common: the kernel's boot id, the host's name and /dev/shm.

    Containers with a name and a /dev/shm of their own are hosts of their own, even on one machine.
    """
    boot = _boot_id()
    try:
        return f"{boot} {_host_name()} {os.stat('/dev/shm').st_dev}" if boot else _host_name()  # noqa: S108 (only its identity is read)
    except OSError:
        return _host_name()


def pid_namespace() -> int:
    """Return the number of the namespace in which this process sees others by their pids; 0 where none is visible."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def network_identity() -> str | None:
    """Return what processes have in common that reach each other at the loopback address; None if it is not known."""
    boot = _boot_id()
    try:
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}" if boot else None
    except OSError:
        return None


_NAME = re.compile(r"([0-9a-f-]{0,36})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a file or directory belongs to while it is built.

    `boot` and `namespace` say where `pid` and `start` (clock ticks since boot) mean anything; `host` is for messages.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    start: int

    @classmethod
    def current(cls) -> Owner:
        """Return the owner record of this process."""
        return _owner(os.getpid())

    @classmethod
    def from_json(cls, raw: Any) -> Owner:
        """Return the record that `to_json` made; anything else is a ValueError."""
        if not isinstance(raw, dict) or raw.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not an owner record")
        if not isinstance(raw["host"], str) or not isinstance(raw["boot"], str):
            raise ValueError("not an owner record")
        if any(type(raw[key]) is not int for key in ("namespace", "pid", "start")):
            raise ValueError("not an owner record")
        return cls(**raw)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return asdict(self)

    @classmethod
    def from_name(cls, name: str) -> Owner | None:
        """Return the record that `to_name` made, with this host's name; None for anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        namespace, pid, start = (int(digits, 16) for digits in match.groups()[1:])
        return cls(_host_name(), match[1], namespace, pid, start)

    def to_name(self) -> str:
        """Return the record, but for the host, in characters that are fit for a file name."""
        return f"{self.boot}.{self.namespace:x}.{self.pid:x}.{self.start:x}"

    @property
    def is_visible(self) -> bool:
        """Whether this process can see if the owner runs: both belong to one boot and one pid namespace."""
        known = bool(self.boot) and self.namespace != 0 and self.pid > 0
        return known and (self.boot, self.namespace) == (_boot_id(), pid_namespace())

    @property
    def is_dead(self) -> bool:
        """Whether this process has provably ended: it ran in this boot and pid namespace, and runs no more.

        A process of another host, boot or container may still run: for those the answer is False.
        """
        return self.is_visible and not process_is_alive(self.pid, self.start) and not _is_hidden(self.pid)

    @property
    def is_alive(self) -> bool:
        """Whether this process provably runs; of another host, boot or container that is never known."""
        return self.is_visible and process_is_alive(self.pid, self.start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@functools.cache
def _owner(pid: int) -> Owner:
    """Return the owner record of this process, which is `pid`; a forked child has a record of its own."""
    return Owner(_host_name(), _boot_id(), pid_namespace(), pid, process_start(pid) or 0)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Stop the cyclic garbage collector of this process for work that makes many objects, no cycles, and soon ends.

    Describing and planning make about a hundred objects for each tensor, all of which stay until the end. The collector
    would look at them again and again, which takes half of the time. Whoever ends first of several threads lets it run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
