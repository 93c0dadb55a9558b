"""The lab: a network namespace with a bridge, and hosts in it, each a user-mode-linux kernel.

All files are below one work directory. Its `state.json` names the namespace, and the token that every process of the
lab has on its command line (``umid=<token>-<host>``), so that a later invocation, also after a crash, kills exactly
these processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

from nfs_lab.machine import MAX_WORKDIR, SEARCH_PATH, CannotRunError, prepare, run

__all__ = ["CLIENTS", "DRIVER_ADDRESS", "HOSTS", "MOUNTS", "SERVER", "THIRD_CLIENT", "Lab", "LabError"]

GUEST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest")
DRIVER_ADDRESS = ("10.99.0.254", 7000)  # inside the namespace
SERVER = "srv"
CLIENTS = ("cA", "cB")
THIRD_CLIENT = "cC"  # boots when a check needs it
HOSTS = {"srv": 1, "cA": 2, "cB": 3, "cC": 4}  # name -> last number of its address, also the number of its tap device
MEMORY = {"srv": "512M"}
CLIENT_MEMORY = "2000M"

# Name -> (exported path, options). All mounts get `nosharecache`, so that each has caches of its own.
MOUNTS = {
    "v42": ("10.99.0.1:/", "vers=4.2"),
    "v41": ("10.99.0.1:/", "vers=4.1"),
    "v40": ("10.99.0.1:/", "vers=4.0"),
    "v3": ("10.99.0.1:/run/export", "vers=3,nolock"),
    "v3l": ("10.99.0.1:/run/export", "vers=3"),
    "v42noac": ("10.99.0.1:/", "vers=4.2,noac"),
    "v42ac600": ("10.99.0.1:/", "vers=4.2,actimeo=600"),
    "v42nocto": ("10.99.0.1:/", "vers=4.2,nocto"),
    "small42": ("10.99.0.1:/small", "vers=4.2"),
    "small3": ("10.99.0.1:/run/export/small", "vers=3"),
    "squash": ("10.99.0.1:/run/export/squash", "vers=3"),
    "allsquash": ("10.99.0.1:/run/export/allsquash", "vers=3"),
}

_CLONE_NEWNET = 0x40000000


class LabError(Exception):
    """The lab itself failed: a host did not boot, did not mount or does not answer."""


class Lab:
    """One lab in `workdir`; `packages` is the directory of the unpacked packages, which several labs may share."""

    def __init__(self, workdir: str, packages: str | None = None) -> None:
        self.workdir = os.path.abspath(workdir)
        if len(self.workdir) > MAX_WORKDIR:
            raise CannotRunError(f"the work directory's path has more than {MAX_WORKDIR} bytes: {self.workdir}")
        self.packages = os.path.abspath(packages or os.path.join(self.workdir, "packages"))
        self.out = os.path.join(self.workdir, "out")
        self._state_path = os.path.join(self.workdir, "state.json")
        self.token = ""
        self.namespace = ""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        if os.path.exists(self._state_path):
            with open(self._state_path, encoding="utf-8") as file:
                state = json.load(file)
            self.token, self.namespace, self.packages = state["token"], state["namespace"], state["packages"]

    @property
    def is_up(self) -> bool:
        """Whether a lab is up in this work directory."""
        return bool(self.token)

    # Up and down

    def up(self) -> None:
        """Fetch packages if needed, make the network, boot the server and the clients, and mount."""
        if self.is_up:
            raise LabError(f"a lab is up in {self.workdir} already; take it down first")
        os.makedirs(self.out, exist_ok=True)
        prepare(self.packages, GUEST)
        self._make_network()
        self._make_disks()
        for name in (SERVER, *CLIENTS):
            self.boot(name)
        for name in (SERVER, *CLIENTS):
            self.wait_until_booted(name)
        self.mount(CLIENTS)

    def down(self) -> None:
        """End every process of the lab and remove its network. Does nothing where none is up."""
        if not self.is_up:
            return
        for name in HOSTS:
            self.kill(name)
        if self.namespace in run("ip", "netns", "list").split():
            run("ip", "netns", "del", self.namespace)
        os.unlink(self._state_path)
        self.token = self.namespace = ""

    def _make_network(self) -> None:
        self.token = secrets.token_hex(4)
        self.namespace = f"nfs-lab-{self.token}"
        # First, so that `down` can remove everything that follows.
        with open(self._state_path, "w", encoding="utf-8") as file:
            json.dump({"token": self.token, "namespace": self.namespace, "packages": self.packages}, file)
        run("ip", "netns", "add", self.namespace)
        inside = ("ip", "-n", self.namespace)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "add", "br0", "type", "bridge")
        run(*inside, "addr", "add", f"{DRIVER_ADDRESS[0]}/24", "dev", "br0")
        run(*inside, "link", "set", "br0", "up")
        for number in HOSTS.values():
            run(*inside, "tuntap", "add", "dev", f"tap{number}", "mode", "tap")
            run(*inside, "link", "set", f"tap{number}", "master", "br0", "up")

    def _make_disks(self) -> None:
        for path, size, options in ((self._disk("export"), 2 << 30, ()), (self._disk("small"), 8 << 20, ("-m", "0"))):
            with open(path, "wb") as file:
                file.truncate(size)
            run("mkfs.ext4", "-q", "-F", *options, path)

    def _disk(self, name: str) -> str:
        return os.path.join(self.workdir, f"{name}.img")

    # Hosts

    def boot(self, name: str, *, after_power_cut: bool = False, skew_s: int = 0) -> None:
        """Start a host; `wait_until_booted` waits for it."""
        number = HOSTS[name]
        queue, log = os.path.join(self.out, name), os.path.join(self.out, f"{name}.log")
        os.makedirs(queue, exist_ok=True)
        for old in os.listdir(queue):
            os.unlink(os.path.join(queue, old))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log)
        server = name == SERVER
        arguments = [
            os.path.join(self.packages, "root/usr/bin/linux.uml"),
            f"mem={MEMORY.get(name, CLIENT_MEMORY)}",
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
            f"init={GUEST}/{'server' if server else 'client'}.sh",
            *("con=null", "con0=null,fd:1", "con1=null", "quiet"),
            f"umid={self._umid(name)}",
            f"uml_dir={self.workdir}/uml/",
            f"eth0=tuntap,tap{number},02:00:00:99:00:0{number}",
            *((f"ubd0={self._disk('export')}", f"ubd1={self._disk('small')}") if server else ()),
            *(f"LAB_OUT={self.out}", f"LAB_ROOT={self.packages}/root", f"LAB_GUEST={GUEST}"),
            *(f"LAB_NAME={name}", f"LAB_IP=10.99.0.{number}"),
            *(("LAB_GRACE=1",) if after_power_cut else ()),
            *((f"LAB_SKEW_S={skew_s}",) if skew_s else ()),
        ]
        environment = {**os.environ, "PATH": SEARCH_PATH, "HOME": self.workdir}
        preload = f"LD_PRELOAD={self.packages}/xstate.so"
        with open(os.path.join(self.out, f"{name}.console"), "wb") as console:
            self._processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "env", preload, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal reaches the driver only
            )

    def wait_until_booted(self, name: str, timeout_s: float = 180.0) -> None:
        """Wait until a host runs commands; LabError with the end of its console if it does not."""
        deadline = time.monotonic() + timeout_s
        log = os.path.join(self.out, f"{name}.log")
        while time.monotonic() < deadline and self._is_running(name):
            if os.path.exists(log):
                with open(log, encoding="utf-8") as file:
                    if "READY" in file.read():
                        return
            time.sleep(0.1)
        with open(os.path.join(self.out, f"{name}.console"), "rb") as file:
            end = file.read()[-600:].decode(errors="replace")
        raise LabError(f"host {name} did not boot within {timeout_s:.0f} s; its console ends: {end}")

    def _is_running(self, name: str) -> bool:
        """Whether a host that this process has booted still runs."""
        return name not in self._processes or self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        """Cut a host's power: SIGKILL to each of its processes."""
        wanted = f"umid={self._umid(name)}".encode()
        deadline = time.monotonic() + 20
        while pids := _processes_with(wanted):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if name in self._processes:
                self._processes[name].poll()  # collect the child
            if time.monotonic() > deadline:
                raise LabError(f"processes {pids} of host {name} do not end")
            time.sleep(0.02)
        directory = os.path.join(self.workdir, "uml", self._umid(name))
        if os.path.isdir(directory):  # else the next boot refuses the name as in use
            for entry in os.listdir(directory):
                os.unlink(os.path.join(directory, entry))
            os.rmdir(directory)

    def _umid(self, name: str) -> str:
        return f"{self.token}-{name}"

    # Commands in a host

    def start(self, host: str, command: str) -> str:
        """Start a shell command in a host and return its id for `wait`."""
        number = secrets.token_hex(6)
        queue = os.path.join(self.out, host)
        new = os.path.join(queue, f"{number}.new")
        with open(new, "w", encoding="utf-8") as file:
            file.write(command + "\n")
        os.rename(new, os.path.join(queue, f"{number}.cmd"))
        return number

    def wait(self, host: str, number: str, timeout_s: float = 180.0) -> tuple[int, str]:
        """Wait for a command; return its exit status and output."""
        base = os.path.join(self.out, host, number)
        deadline = time.monotonic() + timeout_s
        while not os.path.exists(base + ".status"):
            if time.monotonic() > deadline:
                raise LabError(
                    f"host {host} did not finish a command within {timeout_s:.0f} s: {self.output(host, number)}"
                )
            time.sleep(0.02)
        with open(base + ".status", encoding="utf-8") as file:
            return int(file.read()), self.output(host, number)

    def output(self, host: str, number: str) -> str:
        """Return what a command has written so far."""
        try:
            with open(os.path.join(self.out, host, f"{number}.txt"), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def on(self, host: str, command: str, timeout_s: float = 180.0) -> str:
        """Run a command in a host and return its output; LabError if it fails."""
        status, output = self.wait(host, self.start(host, command), timeout_s)
        if status:
            raise LabError(f"{command!r} on {host}: exit status {status}: {output[-600:]}")
        return output

    def boot_third_client(self, skew_s: int) -> None:
        """Boot the third client, again if it runs, with its clock `skew_s` ahead, and mount."""
        self.kill(THIRD_CLIENT)
        self.boot(THIRD_CLIENT, skew_s=skew_s)
        self.wait_until_booted(THIRD_CLIENT)
        self.mount([THIRD_CLIENT])

    def mount(self, hosts: Sequence[str], names: Sequence[str] = tuple(MOUNTS)) -> None:
        """Mount the `names` of `MOUNTS` at /run/m/<name> of each host."""
        lines = []
        for name in names:
            source, options = MOUNTS[name]
            lines.append(f"mkdir -p /run/m/{name}")
            lines.append(f"mount.nfs {source} /run/m/{name} -o nosharecache,{options} || exit 1")
        started = [(host, self.start(host, "\n".join(lines))) for host in hosts]
        for host, number in started:
            status, output = self.wait(host, number, 100.0)
            if status:
                raise LabError(f"{host} cannot mount: {output}")

    def listen(self) -> socket.socket:
        """Return a listening socket at `DRIVER_ADDRESS`, inside the namespace."""
        with _inside(f"/run/netns/{self.namespace}"):
            return socket.create_server(DRIVER_ADDRESS, backlog=64)


def _processes_with(argument: bytes) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if argument in words:
                found.append(int(entry))
    return found


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Run the block in another network namespace, for this thread only."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net", "rb") as own, open(namespace, "rb") as other:
        if libc.setns(other.fileno(), _CLONE_NEWNET):
            raise CannotRunError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            if libc.setns(own.fileno(), _CLONE_NEWNET):
                raise LabError(f"cannot leave {namespace}: {os.strerror(ctypes.get_errno())}")
