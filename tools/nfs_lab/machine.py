"""Check for what the lab needs (root, programs), and unpack packages, which are never installed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

__all__ = ["SEARCH_PATH", "CannotRunError", "check_requirements", "prepare", "run"]

SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PROGRAMS = {
    "apt-get": "apt",
    "dpkg": "dpkg",
    "gcc": "gcc and libc6-dev",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
}
PACKAGES = (
    "user-mode-linux",
    "nfs-kernel-server",
    "nfs-common",
    "rpcbind",
    "kmod",
    "libkmod2",
    "keyutils",
    "libnfsidmap1",
    "libtirpc3",
    "libtirpc-common",
    "libwrap0",
    "libevent-core-2.1-7",
    "libsqlite3-0",
)
TUN = "/dev/net/tun"
HIDDEN = ("/dev", "/proc", "/run", "/sys", "/var/lib")  # hosts mount file systems of their own there
MAX_WORKDIR = 80  # the sockets of user-mode-linux lie below it, and their names are limited to 108 bytes


class CannotRunError(Exception):
    """The lab cannot run on this machine; the message names what is missing."""


def run(*command: str, cwd: str | None = None) -> str:
    """Run a program to its end and return its output; CannotRunError with its output if it fails."""
    environment = {**os.environ, "PATH": SEARCH_PATH}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRunError(
            f"{' '.join(command)}: exit status {done.returncode}: {(done.stdout + done.stderr)[-800:]}"
        )
    return done.stdout


def check_requirements() -> None:
    """Raise CannotRunError naming everything that is missing here."""
    missing = []
    if sys.platform != "linux" or platform.machine() != "x86_64":
        missing.append(f"Linux on x86_64 (this is {sys.platform} on {platform.machine()})")
    if os.geteuid() != 0:
        missing.append("root (network namespace, tap devices)")
    for program, package in PROGRAMS.items():
        if shutil.which(program, path=SEARCH_PATH) is None:
            missing.append(f"the program {program} ({package})")
    if not os.path.exists(TUN):
        missing.append(f"the device {TUN}")
    elif os.geteuid() == 0:
        try:
            os.close(os.open(TUN, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            missing.append(f"access to {TUN} ({error.strerror})")
    if missing:
        raise CannotRunError("missing: " + "; ".join(missing))


def prepare(packages: str, guest: str) -> None:
    """Fill `packages` with what hosts need: root/ (unpacked packages) and xstate.so. Does nothing if it has them."""
    real = os.path.realpath(packages)
    for folder in HIDDEN:
        if real.startswith(folder + "/"):
            raise CannotRunError(f"hosts cannot see packages in {packages}, below {folder}: choose another --packages")
    root = os.path.join(packages, "root")
    os.makedirs(root, exist_ok=True)
    library = os.path.join(packages, "xstate.so")
    if not os.path.exists(library):
        source = os.path.join(guest, "xstate.c")
        run("gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", library + ".new", source)
        os.rename(library + ".new", library)
    modules = os.path.join(root, "modtree", "lib")
    if os.path.lexists(os.path.join(modules, "modules")):
        return
    archives = os.path.join(packages, "archives")
    os.makedirs(archives, exist_ok=True)
    # apt's own user for downloads may not write into this directory.
    run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *PACKAGES, cwd=archives)
    for name in sorted(os.listdir(archives)):
        run("dpkg", "-x", os.path.join(archives, name), root)
    os.makedirs(modules, exist_ok=True)
    os.symlink(os.path.join(root, "usr/lib/uml/modules"), os.path.join(modules, "modules"))
