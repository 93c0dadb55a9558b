"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from slurm_lab.machine import SEARCH_PATH, CannotRunError, check_requirements, prepare

__all__ = ["CANNOT_RUN", "main"]

CANNOT_RUN = 77
HOME = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = os.path.dirname(os.path.dirname(HOME))
NAMESPACES = ("--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_EPILOG = f"""\
COMMAND runs on the login host, where `srun` and `sinfo` are. Without a COMMAND the checks of ranks.sh run.

exit status: the command's; 2 usage, 3 the lab itself failed,
{CANNOT_RUN} the lab cannot run on this machine (the message names what is missing)
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/slurm_lab",
        description="A Slurm cluster of two hosts on one machine, and a command on it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--packages", metavar="DIR", help="where packages are unpacked, to be used again")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the cluster, run the command, take the cluster down; return the exit status."""
    options = _parser().parse_args(arguments)
    command = options.command or [
        "bash",
        os.path.join(HOME, "ranks.sh"),
        sys.executable,
        os.path.join(HOME, "ranks.py"),
    ]
    with tempfile.TemporaryDirectory(prefix="slurm-lab-", dir="/tmp") as workdir:  # short: sockets lie below it
        try:
            check_requirements()
            packages = os.path.abspath(options.packages or os.path.join(workdir, "packages"))
            prepare(packages)
        except CannotRunError as error:
            print(f"the Slurm lab cannot run here: {error}", file=sys.stderr)
            return CANNOT_RUN
        inside = [sys.executable, os.path.join(HOME, "cluster.py"), workdir, packages, *command]
        environment = {**os.environ, "PATH": SEARCH_PATH, "LAB_WORKDIR": workdir}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [CHECKOUT, os.environ.get("PYTHONPATH")]))
        return subprocess.run(["unshare", *NAMESPACES, *inside], env=environment, check=False).returncode
