"""Run scripts and commands of the pages as users start them, on one or several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from programs import require_mpi
from warm_python import warm_python

BIN = Path(sys.executable).parent
HOME = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(HOME)) for path in (HOME / "docs").rglob("*.md")))
_MARK = "this rank has reached the end of its script"

ALONE = ("python",)


def with_torchrun(ranks: int) -> tuple[str, ...]:
    """Return the words before the script's name."""
    return ("torchrun", "--nproc-per-node", str(ranks))


def with_mpiexec(ranks: int) -> tuple[str, ...]:
    """Return the words before the script's name."""
    return ("mpiexec", "-n", str(ranks), sys.executable)


CANNOT_RUN = 77
"""The exit code of a lab that says what this machine lacks."""


def run_lab(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a lab of tools/ with its output captured."""
    command = [sys.executable, f"tools/{name}", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=HOME, env=env, capture_output=True, text=True, timeout=60, check=False)


class Block(NamedTuple):
    """A fenced block of a page, with the comment before it, which names what a test does with it."""

    marker: str
    text: str


def page_text(page: str) -> str:
    """Return the text of README.md or of a page in docs."""
    return (HOME / page).read_text(encoding="utf-8")


@cache
def page_blocks(page: str) -> tuple[Block, ...]:
    """Return the marked blocks of a page, in order."""
    found = re.findall(r"^<!-- (.+?) -->\n```\w*\n(.*?)^```$", page_text(page), re.MULTILINE | re.DOTALL)
    return tuple(Block(marker, text) for marker, text in found)


def page_block(marker: str) -> str:
    """Return the only block of all pages with this marker."""
    (block,) = [block for page in PAGES for block in page_blocks(page) if block.marker == marker]
    return block.text


def warm_command(launcher: Sequence[str], text: str) -> tuple[list[str | Path], dict[str, str]]:
    """Return the words before the script's name and the environment with which a script starts at once.

    The script `text` is then forked from a process that has imported what it imports; see `warm_python`.
    """
    python = warm_python("transformers" if re.search(r"^ *(from|import) transformers", text, re.MULTILINE) else "torch")
    if launcher[0] == "python":
        return [python, *launcher[1:]], dict(os.environ)
    if launcher[0] == "torchrun":
        return [python, "-m", "torch.distributed.run", *launcher[1:]], {**os.environ, "PYTHON_EXEC": python}
    return [BIN / launcher[0], *(python if word == sys.executable else word for word in launcher[1:])], dict(os.environ)


def warm_program(*words: object, kind: str = "torch") -> tuple[list[str | Path], dict[str, str]]:
    """Return the command and the environment of a script, or of `-m` and a module, of which all processes are forked.

    These are the program, what it starts by `sys.executable` or by the command beside that, and its ranks.
    """
    python = warm_python(kind)
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return [python, HOME / "tests/support/warm_program.py", python, *map(str, words)], environment


def run_script(
    launcher: Sequence[str], name: str, text: str, folder: Path, *arguments: str | Path, is_warm: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script called `name` in `folder`; fail unless all its ranks reach its end.

    With `is_warm` false, launcher and ranks are new interpreters, as users start them.

    After that torch may abort a rank that used FSDP2 over Gloo: one of Gloo's threads that lets a tensor go while the
    interpreter ends dies of it. It is in docs/limits.md, and not a failure of the script.
    """
    if launcher[0] == "mpiexec":
        require_mpi()
    (folder / name).write_text(f"{text}\nimport sys\n\nprint('{_MARK}', file=sys.stderr, flush=True)\n")
    command, environ = [BIN / launcher[0], *launcher[1:]], dict(os.environ)
    if is_warm:
        command, environ = warm_command(launcher, text)
    command += [name, *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    ranks = next((int(word) for word in launcher if word.isdecimal()), 1)
    assert done.stderr.count(_MARK) == ranks, done.stderr
    assert done.returncode == 0 or "Signal 6 (SIGABRT)" in done.stderr, done.stderr
    return done


def shell(command: str, folder: Path, *, warm: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command line of a page in `folder`, with the programs of this environment; fail unless it succeeds.

    With `warm` its `python`, its `statexchange` and the ranks of its `torchrun` are forked; see `warm_python`.
    """
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    if warm is not None:
        python = warm_python(warm)
        environment |= {"PATH": f"{os.path.dirname(python)}{os.pathsep}{environment['PATH']}", "PYTHON_EXEC": python}
    started = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done


def run_commands(text: str, folder: Path, *, is_warm: bool = True) -> None:
    """Run the lines of a console block that begin with "$ "; what stands below one must be what it prints.

    Three dots in what is printed stand for anything. With `is_warm` false, the commands are new interpreters.
    """
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        printed = shell(command, folder, warm="commands" if is_warm else None).stdout
        if expected:
            pattern = ".*?".join(re.escape(piece) for piece in expected.split("..."))
            assert re.fullmatch(pattern, printed, re.DOTALL), (command, printed)
