"""Identify processes and hosts, and test whether a process still runs."""

from __future__ import annotations

import functools
import os
import re
import time
from dataclasses import asdict, dataclass


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/<pid>/stat after the name, beginning with the state; None without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, the second field, may have spaces and parentheses itself: the last one ends it.
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_start(pid: int) -> int | None:
    """Return the start time of `pid` in clock ticks since boot; None if it has ended (a zombie counts as ended)."""
    fields = _stat_fields(pid)
    # A zombie has released its memory, files and locks: it waits only until its parent asks for the exit code.
    if fields is None or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])  # starttime, field 22 of proc(5); the first one here is field 3


def process_age_s() -> float | None:
    """Return the seconds since this process began; None if the system does not say."""
    start = process_start(os.getpid())
    if start is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")


def process_is_stopped(pid: int) -> bool:
    """Whether `pid` is stopped by a signal or a debugger."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] in (b"T", b"t")


def process_is_alive(pid: int, start: int) -> bool:
    """Whether the process with `pid` and start time `start` still runs; pids are reused."""
    return process_start(pid) == start


def _is_hidden(pid: int) -> bool:
    """Whether `pid` exists although /proc does not list it (mount option hidepid)."""
    if _stat_fields(pid) is not None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    # Between the two reads it may have ended and a new process, which /proc lists, may have got the pid.
    return _stat_fields(pid) is None


def usable_cores() -> int:
    """Return how many cores this process may run on. Not collective."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS binds no process to cores


def _host_name() -> str:
    import platform  # slow to import, and only writers need it

    return platform.node()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def host_identity() -> str:
    """Return a string that is equal on ranks of one host: the kernel's boot id, the host's name and /dev/shm.

    Containers with a name and a /dev/shm of their own count as hosts, even on one machine.
    """
    boot = _boot_id()
    try:
        return f"{boot} {_host_name()} {os.stat('/dev/shm').st_dev}" if boot else _host_name()  # noqa: S108 (only its identity is read)
    except OSError:
        return _host_name()


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 if it cannot be read."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def network_identity() -> str | None:
    """Return a string that is equal on processes that share a loopback address; None if it is not known."""
    boot = _boot_id()
    try:
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}" if boot else None
    except OSError:
        return None


_NAME = re.compile(r"([0-9a-f-]{0,36})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns a file or directory during its construction.

    Attributes:
        host: the host's name, for messages.
        boot: the kernel's boot id. `pid` and `start` are comparable only within one boot and namespace.
        namespace: inode of the pid namespace.
        pid: the process id.
        start: start time in clock ticks since boot.
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
    def from_json(cls, raw: object) -> Owner:
        """Return the record that `to_json` encoded; raise ValueError for anything else."""
        if not isinstance(raw, dict) or raw.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not an owner record")
        if not isinstance(raw["host"], str) or not isinstance(raw["boot"], str):
            raise ValueError("not an owner record")
        # isinstance would take true and false for numbers.
        if any(type(raw[key]) is not int for key in ("namespace", "pid", "start")):
            raise ValueError("not an owner record")
        return cls(**raw)

    def to_json(self) -> dict[str, object]:
        """Return the record as a JSON object."""
        return asdict(self)

    @classmethod
    def from_name(cls, name: str) -> Owner | None:
        """Return the record that `to_name` encoded, with this host's name; None for anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        namespace, pid, start = (int(digits, 16) for digits in match.groups()[1:])
        return cls(_host_name(), match[1], namespace, pid, start)

    def to_name(self) -> str:
        """Return the record without the host, as part of a file name."""
        return f"{self.boot}.{self.namespace:x}.{self.pid:x}.{self.start:x}"

    @property
    def is_visible(self) -> bool:
        """Whether this process can determine if the owner runs: both are in the same boot and pid namespace."""
        # An empty boot id and namespace 0 stand for what could not be read, on either side: equal ones prove nothing.
        is_complete = bool(self.boot) and self.namespace != 0 and self.pid > 0
        return is_complete and (self.boot, self.namespace) == (_boot_id(), pid_namespace())

    @property
    def is_dead(self) -> bool:
        """Whether the owner has provably ended: it ran in this boot and pid namespace and does not run any more.

        False for a process of another host, boot or container, which may still run.
        """
        # If the pid was reused, /proc has another start time, and the owner has ended.
        return self.is_visible and not process_is_alive(self.pid, self.start) and not _is_hidden(self.pid)

    @property
    def is_alive(self) -> bool:
        """Whether the owner provably runs; False for a process of another host, boot or container."""
        return self.is_visible and process_is_alive(self.pid, self.start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@functools.cache
def _owner(pid: int) -> Owner:
    """Return the owner record of this process; cached by pid, so that a forked child gets its own."""
    return Owner(_host_name(), _boot_id(), pid_namespace(), pid, process_start(pid) or 0)
