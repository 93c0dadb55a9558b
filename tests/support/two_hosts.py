"""Two hosts on one machine: each its own network, host name and /dev/shm, joined by one cable that can be cut.

A host is a process that holds its namespaces. The namespaces have no names, so when the process has ended nothing is
left: neither the cable nor the tmpfs. The ranks of a host, processes of the fork server, enter its namespaces; they and
the host end with the test.

    with two_hosts(2, 2) as hosts:
        values = hosts.run(function, 1, 2)

`function` stands at the top of a module; its arguments and results are JSON values.
Inside a rank `report(word)` sends a JSON value to the test at once, and `wait_for_go()` waits until the test calls
`hosts.go()`. `hosts.wait_for(word)` in the test waits until all ranks have reported `word`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ports import free_port
from warm_python import end_interpreter, imported_packages, skip_destructors

from statexchange.testing.worlds import _fork_server

if TYPE_CHECKING:
    from statexchange.comm.communicator import Communicator

CABLE = "cable0"
NAMES = ("anna", "bert")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SHM_BYTES = 1 << 30
_PR_SET_PDEATHSIG = 1
_connection: Connection | None = None  # of a rank, to the test


@dataclass
class Outcome:
    """The end of a rank: `state` is "ok", "raised" (`error` names the type), "exited" or "running" (time was up)."""

    rank: int
    state: str = "running"
    value: Any = None
    error: str | None = None
    message: str = ""
    exit_code: int | None = None
    stderr: str = ""
    ended: float = 0.0  # time of its result by CLOCK_MONOTONIC, which the simulated hosts share
    reports: list[tuple[float, Any]] = field(default_factory=list)


@cache
def missing() -> str | None:
    """Return why this machine cannot make two hosts, or None if it can."""
    absent = [program for program in ("unshare", "nsenter", "ip", "mount") if shutil.which(program) is None]
    if absent:
        return f"two hosts need {', '.join(absent)}"
    if os.geteuid() != 0:
        return "two hosts need root, for namespaces of their own"
    tried = subprocess.run(
        _unshared("ip link add x type veth peer name y"), check=False, capture_output=True, text=True
    )
    return f"two hosts cannot be made: {tried.stderr.strip()}" if tried.returncode else None


def _unshared(script: str) -> list[str]:
    return ["unshare", "--net", "--uts", "--mount", "sh", "-ec", script]


class _Host:
    """Namespaces, held by a process that ends with its stdin."""

    def __init__(self, name: str) -> None:
        mounts = f"mount -t tmpfs -o size={_SHM_BYTES} tmpfs /dev/shm; mount -t sysfs sysfs /sys"
        script = f"hostname {name}; {mounts}; ip link set lo up; echo; exec cat"
        self.process = subprocess.Popen(_unshared(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.name = name

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"\n", f"no namespaces for {self.name}"

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.process.pid), "--net", "--uts", "--mount", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.inside(*command), check=True, timeout=10)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class _Rank:
    """One process of the fork server, and the thread that receives its reports."""

    def __init__(self, rank: int, task: dict[str, Any], stderr: Path, reported: threading.Condition) -> None:
        self.outcome = Outcome(rank)
        self._stderr = stderr
        self._reported = reported
        context = _fork_server()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, {**task, "stderr": str(stderr)}))
        self.process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                kind, when, what = json.loads(self.connection.recv_bytes())
                with self._reported:
                    self._note(kind, when, what)
                    self._reported.notify_all()
        with self._reported:
            if self.outcome.state == "running":
                self.outcome.state, self.outcome.ended = "exited", time.monotonic()
            self._reported.notify_all()

    def _note(self, kind: str, when: float, what: Any) -> None:
        outcome = self.outcome
        if kind == "report":
            outcome.reports.append((when, what))
        elif kind == "ok":
            outcome.state, outcome.ended, outcome.value = "ok", when, what
        else:
            outcome.state, outcome.ended = "raised", when
            outcome.error, outcome.message = what

    def has_reported(self, word: Any) -> bool:
        return any(report == word for _, report in self.outcome.reports)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def finish(self, deadline: float) -> None:
        """Wait until the process has ended; kill it at `deadline`. May be called again."""
        if self.connection.closed:
            return
        self.process.join(max(0.0, deadline - time.monotonic()))
        self.outcome.exit_code = self.process.exitcode
        if self.process.exitcode is None:
            self.send_signal(signal.SIGUSR1)  # its stacks go to stderr
            time.sleep(0.2)
            self.process.kill()
            self.process.join()
        self._listener.join(5)
        if self.outcome.exit_code is None and self.outcome.state == "exited":
            self.outcome.state = "running"
        self.connection.close()
        self.process.close()
        self.outcome.stderr = self._stderr.read_text(errors="replace") if self._stderr.exists() else ""


class TwoHosts:
    """The hosts and, once started, their ranks. Made by `two_hosts`."""

    def __init__(self, counts: Sequence[int], directory: Path, *, fully: bool) -> None:
        self.counts = tuple(counts)
        self._fully = fully
        self._directory = directory
        self._reported = threading.Condition()
        self._ranks: list[_Rank] = []
        self._hosts: list[_Host] = []

    @property
    def world_size(self) -> int:
        return sum(self.counts)

    def host_of(self, rank: int) -> str:
        """Return the name of the host of `rank`."""
        return NAMES[rank >= self.counts[0]]

    def open(self) -> None:
        """Make the namespaces and connect the cable."""
        self._hosts = [_Host(name) for name in NAMES]
        for host in self._hosts:
            host.ready()
        here, there = (str(host.process.pid) for host in self._hosts)
        link = ["ip", "link", "add", CABLE, "netns", here, "type", "veth", "peer", "name", CABLE, "netns", there]
        subprocess.run(link, check=True, timeout=10)
        for host, address in zip(self._hosts, ADDRESSES, strict=True):
            host.run("ip", "addr", "add", f"{address}/24", "dev", CABLE)
            host.run("ip", "link", "set", CABLE, "up")

    def close(self) -> None:
        """Kill all ranks that still run, and end the hosts."""
        for rank in self._ranks:
            rank.finish(0.0)
        for host in self._hosts:
            host.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Start `function(*args)` on every rank; the ranks of an earlier start must have ended."""
        port = str(free_port())
        self._ranks = []
        for rank in range(self.world_size):
            node = int(rank >= self.counts[0])
            task = {
                "function": [function.__module__, function.__qualname__],
                "args": args,
                "holder": self._hosts[node].process.pid,
                "environ": {**os.environ, **self._environ(rank, node), "MASTER_PORT": port},
                "path": sys.path,
                "directory": os.getcwd(),
                "fully": self._fully,
            }
            self._ranks.append(_Rank(rank, task, self._directory / f"stderr-{rank}", self._reported))

    def _environ(self, rank: int, node: int) -> dict[str, str]:
        local_rank = rank - node * self.counts[0]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.counts[node]),
            "MASTER_ADDR": ADDRESSES[0],
            "GLOO_SOCKET_IFNAME": CABLE,
        }

    def wait_for(self, word: Any, ranks: Sequence[int] | None = None, timeout_s: float = 30.0) -> float:
        """Return when all of `ranks` (default: all) have reported `word`; return the time of the last."""
        waited = [self._ranks[rank] for rank in (range(self.world_size) if ranks is None else ranks)]
        with self._reported:
            is_in_time = self._reported.wait_for(
                lambda: all(rank.has_reported(word) or rank.outcome.state != "running" for rank in waited), timeout_s
            )
        silent = [rank.outcome.rank for rank in waited if not rank.has_reported(word)]
        if silent or not is_in_time:
            raise AssertionError(f"ranks {silent} did not report {word!r}\n{self.describe(self.finish(1.0))}")
        return max(when for rank in waited for when, report in rank.outcome.reports if report == word)

    def wait_until(self, condition: Callable[[Sequence[Outcome]], bool], timeout_s: float = 60.0) -> None:
        """Return when the outcomes so far fulfil a condition, or when all ranks have ended."""
        outcomes = self.outcomes

        def is_over() -> bool:
            return condition(outcomes) or all(outcome.state != "running" for outcome in outcomes)

        with self._reported:
            is_in_time = self._reported.wait_for(is_over, timeout_s)
        assert is_in_time, self.describe(self.finish(1.0))

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes so far, in rank order."""
        return [rank.outcome for rank in self._ranks]

    def lose_memory(self, host: int) -> None:
        """Remove all files in the /dev/shm of a host."""
        self._hosts[host].run("sh", "-c", "rm -rf /dev/shm/* /dev/shm/.[!.]*")

    def memory_files(self, host: int) -> list[str]:
        """Return the copies of saves in the /dev/shm of a host, and what is under hidden names there."""
        find = "find /dev/shm -mindepth 2 -maxdepth 2"
        command = self._hosts[host].inside("sh", "-c", find)
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.split()

    def go(self) -> float:
        """Let all ranks return from `wait_for_go`; return the time."""
        for rank in self._ranks:
            rank.connection.send_bytes(b"go")
        return time.monotonic()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank; return the time."""
        self._ranks[rank].send_signal(number)
        return time.monotonic()

    def link_down(self) -> float:
        """Disconnect the cable from the second host; return the time."""
        self._hosts[1].run("ip", "link", "set", CABLE, "down")
        return time.monotonic()

    def link_up(self) -> None:
        """Connect the cable again."""
        self._hosts[1].run("ip", "link", "set", CABLE, "up")

    def finish(self, timeout_s: float = 30.0, *, stuck: int = -1) -> list[Outcome]:
        """Wait until all ranks but `stuck` have ended, `timeout_s` at most; then kill the rest.

        Returns the outcomes of all ranks, in rank order.
        """
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            if rank.outcome.rank != stuck:
                rank.finish(deadline)
        if stuck >= 0:
            self._ranks[stuck].finish(0.0)
        return self.outcomes

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run `function(*args)` on every rank; return the results, or raise AssertionError if a rank failed."""
        self.start(function, *args)
        outcomes = self.finish(timeout_s)
        assert all(o.state == "ok" and o.exit_code == 0 for o in outcomes), self.describe(outcomes)
        return [outcome.value for outcome in outcomes]

    def describe(self, outcomes: Sequence[Outcome]) -> str:
        """Return a text with the outcome of each rank and the end of its stderr."""
        lines = []
        for o in outcomes:
            lines.append(
                f"rank {o.rank} on {self.host_of(o.rank)}: {o.state} {o.exit_code} {o.error} {o.message} {o.value}"
            )
            lines += [f"    {line}" for line in o.stderr.splitlines()[-40:]]
        return "\n".join(lines)


@contextlib.contextmanager
def two_hosts(*counts: int, fully: bool = False) -> Iterator[TwoHosts]:
    """Make two hosts of `counts` ranks each. With `fully` each rank also finalizes its interpreter at its end."""
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as directory:
        hosts = TwoHosts(counts, Path(directory), fully=fully)
        try:
            hosts.open()
            yield hosts
        finally:
            hosts.close()


def report(word: Any) -> None:
    """Send a JSON value to the test. For ranks only."""
    _send("report", word)


def init_on_two_hosts(timeout_s: float = 30.0) -> Communicator:
    """Return the communicator of all ranks of both hosts. For ranks only."""
    import torch

    import statexchange as sx

    torch.set_num_threads(1)
    comm = sx.init("auto", timeout_s=timeout_s)
    assert comm.backend in ("hierarchical", "gloo"), comm.backend  # gloo with one rank per host
    assert comm.num_nodes == 2, comm.hosts
    return comm


def wait_for_go() -> None:
    """Wait until the test calls `go`. For ranks only."""
    assert _connection is not None
    _connection.recv_bytes()


def _send(kind: str, what: Any) -> None:
    assert _connection is not None
    _connection.send_bytes(json.dumps([kind, time.monotonic(), what]).encode())


def _serve(connection: Connection, task: dict[str, Any]) -> None:
    """Run one rank, in a process of the fork server; it ends with this function."""
    global _connection
    _connection = connection
    skip_destructors()
    packages = imported_packages()
    _enter_host(task)
    code = 0
    try:
        module, name = task["function"]
        _send("ok", getattr(importlib.import_module(module), name)(*task["args"]))
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except Exception as error:  # noqa: BLE001 (the test gets any error)
        _send("raised", [type(error).__name__, str(error)])
        sys.last_value = error
        traceback.print_exc()
        code = 1
    _end(code, packages if task["fully"] else None)


def _end(code: int, packages: dict[str, types.ModuleType] | None) -> NoReturn:
    """End as an own Python process does: wait for threads, run exit functions, finalize the interpreter if asked to.

    A child of the fork server does not by itself.
    """
    if packages is not None:
        end_interpreter(packages, code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _enter_host(task: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for namespace in ("net", "uts", "mnt"):
        with open(f"/proc/{task['holder']}/ns/{namespace}", "rb") as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the host's {namespace} namespace")
    platform._uname_cache = None  # the fork server has filled it, with the name of another host
    os.chdir(task["directory"])
    os.environ.clear()
    os.environ.update(task["environ"])
    sys.path[:] = task["path"]
    stderr = os.open(task["stderr"], os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    faulthandler.register(signal.SIGUSR1)


def seen_here() -> list[Any]:
    """Return this rank, and the host name, device of /dev/shm and network cards that it sees."""
    cards = sorted(name for _, name in socket.if_nameindex())
    return [os.environ["RANK"], socket.gethostname(), os.stat("/dev/shm").st_dev, cards]
