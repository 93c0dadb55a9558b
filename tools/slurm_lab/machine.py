"""Check for what the lab needs (root, programs), and unpack packages, which are never installed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

__all__ = ["SEARCH_PATH", "CannotRunError", "check_requirements", "prepare", "run"]

SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PROGRAMS = {"apt-get": "apt", "dpkg": "dpkg", "ip": "iproute2", "mount": "mount", "unshare": "util-linux"}
PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "libdbus-1-3",
    "libhwloc15",
    "libjson-c5",
    "liblua5.1-0",
    "liblz4-1",
    "libmunge2",
    "libnuma1",
    "libpam0g",
    "libreadline8",
    "libyaml-0-2",
)


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
        missing.append("root (namespaces, mounts)")
    for program, package in PROGRAMS.items():
        if shutil.which(program, path=SEARCH_PATH) is None:
            missing.append(f"the program {program} ({package})")
    if missing:
        raise CannotRunError("missing: " + "; ".join(missing))
    run("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true")


def prepare(packages: str) -> None:
    """Fill `packages`/root with Slurm's files. Does nothing if that exists."""
    done = os.path.join(packages, "root")
    if os.path.isdir(done):
        return
    archives, unpacked = os.path.join(packages, "archives"), os.path.join(packages, "root.new")
    os.makedirs(archives, exist_ok=True)
    # apt's own user for downloads may not write into this directory.
    run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *PACKAGES, cwd=archives)
    for name in sorted(os.listdir(archives)):
        run("dpkg", "-x", os.path.join(archives, name), unpacked)
    # The installation of the package would make this link: slurmd starts the program by this name.
    os.symlink("slurmstepd-wlm", os.path.join(unpacked, "usr/sbin/slurmstepd"))
    os.rename(unpacked, done)
