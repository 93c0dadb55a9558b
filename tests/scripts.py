"""Scripts as their users start them: programs of one or several ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from programs import require_mpi

BIN = Path(sys.executable).parent
README = (Path(__file__).parent.parent / "README.md").read_text()
_MARK = "this rank has reached the end of its script"

ALONE = ("python",)


def with_torchrun(ranks: int) -> tuple[str, ...]:
    """The words before the script's name."""
    return ("torchrun", "--nproc-per-node", str(ranks))


def with_mpiexec(ranks: int) -> tuple[str, ...]:
    """The words before the script's name."""
    return ("mpiexec", "-n", str(ranks), sys.executable)


def readme_block(name: str) -> str:
    """A fenced block of the README."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def run_script(
    launcher: Sequence[str], name: str, text: str, folder: Path, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a script called `name` in `folder`, which all its ranks must reach the end of.

    After that torch may abort a rank that used FSDP2 over Gloo: one of Gloo's threads that lets a tensor go while the
    interpreter ends dies of it. The README says so, and it is no failure of the script.
    """
    if launcher[0] == "mpiexec":
        require_mpi()
    (folder / name).write_text(f"{text}\nimport sys\n\nprint('{_MARK}', file=sys.stderr, flush=True)\n")
    command = [BIN / launcher[0], *launcher[1:], name, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    ranks = next((int(word) for word in launcher if word.isdecimal()), 1)
    assert done.stderr.count(_MARK) == ranks, done.stderr
    assert done.returncode == 0 or "Signal 6 (SIGABRT)" in done.stderr, done.stderr
    return done
