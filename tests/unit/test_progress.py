"""Commands that last longer than a second show their progress on a terminal, and each 30 s in a log.

The files are read through an fsspec file system that waits, so that a command lasts long enough on any machine.
"""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from pathlib import Path

import numpy as np
import pytest
from command_lines import COMMAND_LINES
from commands import command_environment
from sweeps import by_default
from warm_python import warm_python

import statexchange as sx

RUN = """
import sys, threading, time
import fsspec
from fsspec.implementations.local import LocalFileSystem

speed = float(sys.argv.pop(1))
real = time.monotonic
time.monotonic = lambda: real() * speed
lock = threading.Lock()

def wait(seconds):
    with lock:  # so that threads do not share the wait
        time.sleep(seconds)

class Slow(LocalFileSystem):
    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("slow://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        wait(len(data) / 2e6)
        return data

    def ls(self, path, detail=False, **kwargs):
        wait(0.05)
        return super().ls(path, detail=detail, **kwargs)

fsspec.register_implementation("slow", Slow)
from statexchange.cli.main import main
main(sys.argv[1:])
"""
LONG = [(name, line) for lines in COMMAND_LINES.values() for name, line in lines.progress.items()]
CASES = ("terminal", "quiet", "log", "pipe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("slow")
    values = np.random.default_rng(0).normal(size=(2, 1 << 19)).astype(np.float32)  # 4 MB: two seconds
    sx.export_checkpoint({"w": values}, root / "a")
    sx.export_checkpoint({"w": values + 1}, root / "b")
    for case in CASES:
        (root / f"bare-{case}").mkdir()
        shutil.copy(root / "a/model.safetensors", root / f"bare-{case}")
    saves = sx.Checkpoints(root / "saves", keep=None)
    for step in (1, 2):
        saves.save({"w": values}, step)
    for number in range(30):
        (root / f"empty{number}").mkdir()
    return root


class Run:
    """A command that runs with stderr on a terminal, in a file or in a pipe."""

    def __init__(self, arguments: list[str], root: Path, case: str) -> None:
        words = [word.format(root=root, case=case) for word in arguments]
        self.log = root / f"{'-'.join(arguments[:1])}-{case}.log"
        environment = command_environment()
        environment.pop("COLUMNS", None)  # the width is that of the pseudo-terminal
        more = ["-q"] if case == "quiet" else []
        speed = "1" if case in ("terminal", "quiet") else "60"
        self._terminal = -1
        if case in ("terminal", "quiet"):
            self._terminal, error = pty.openpty()
            fcntl.ioctl(error, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        elif case == "pipe":
            error = subprocess.PIPE
        else:
            error = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._case = case
        self.process = subprocess.Popen(
            [warm_python("commands"), "-c", RUN, speed, *words, *more],
            stdout=subprocess.DEVNULL,
            stderr=error,
            env=environment,
        )
        if error >= 0:
            os.close(error)

    def end(self) -> str:
        """Wait for the end; return what was written to stderr."""
        if self._case == "pipe":
            return self.process.communicate(timeout=120)[1].decode()
        written = b""
        while self._terminal >= 0:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # EIO: the process has closed the terminal
                os.close(self._terminal)
                break
            written += data
        self.process.wait(timeout=120)
        return written.decode() if self._terminal >= 0 else self.log.read_text()


def screen(written: str) -> str:
    """Return what a terminal shows in the end."""
    lines = []
    for line in written.split("\n"):
        shown, at = "", 0
        for part in re.findall(r"\r|\x1b\[K|\x1b\[\d*m|[^\r\x1b]+", line):
            if part == "\r":
                at = 0
            elif part == "\x1b[K":
                shown = shown[:at]
            elif part[0] != "\x1b":
                shown = shown[:at] + part + shown[at + len(part) :]
                at += len(part)
        lines.append(shown)
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "line"), by_default(LONG, 3, 6))
def test_progress_is_shown_on_a_terminal_and_in_a_log_and_nowhere_else(name: str, line: str, root: Path) -> None:
    arguments = line.split()
    runs = {case: Run(arguments, root, case) for case in CASES}
    written = {case: run.end() for case, run in runs.items()}
    assert {run.process.returncode for run in runs.values()} == {1 if name == "diff" else 0}, written
    pattern = rf"{arguments[0]}  {COMMAND_LINES[arguments[0]].shown}"
    shown = re.findall(rf"\r{pattern}[^\r]*\x1b\[K", written["terminal"])
    assert shown, written["terminal"]
    assert written["terminal"].count("\r" + arguments[0]) == len(shown)
    assert not re.search(pattern, screen(written["terminal"]))
    assert written["quiet"] == ""
    assert any(re.match(pattern, text) for text in written["log"].splitlines())
    assert not set("\r\x1b") & set(written["log"])
    assert not re.search(pattern, written["pipe"])
    assert screen(written["terminal"]).split() == written["pipe"].split()
