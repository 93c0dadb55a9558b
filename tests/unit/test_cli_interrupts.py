"""Commands that are interrupted at any moment, or whose streams are closed."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_lines import COMMAND_LINES, SHARED
from commands import command_environment
from scripts import warm_program
from sweeps import slow
from warm_python import warm_python

pytestmark = pytest.mark.usefixtures("plain_environment")


DEMO = COMMAND_LINES["demo"].shared.split()
SLOW = pytest.mark.slow
# Marks of the forms of a command, text and JSON: of each third command one form is tried by default.
SOME_FORMS = [([], [SLOW]), *[([SLOW], [SLOW])] * 2, ([SLOW], []), *[([SLOW], [SLOW])] * 2]


# Interrupts and closed streams


BEGIN = """
import linecache, os, runpy, signal, sys
begun = int(sys.argv.pop(1))
sys.argv[0] = "-m"

def trace(frame, event, argument):
    if frame.f_code.co_name != "main" or not frame.f_code.co_filename.endswith("__main__.py"):
        return None
    if event == "line" and "import main" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        sys.settrace(None)
        os.write(begun, b"x")
    return trace

sys.settrace(trace)
runpy.run_module("statexchange", run_name="__main__", alter_sys=True)
"""


def begin(*arguments: object) -> "subprocess.Popen[str]":
    """Start the command line; return when the first line of its `try` runs: before it, Python handles an interrupt."""
    reading, writing = os.pipe()
    run = [sys.executable, "-c", BEGIN, str(writing), *map(str, arguments)]
    process = subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=command_environment(), pass_fds=[writing]
    )
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return process


@pytest.mark.parametrize(
    "moments", [3, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["quick", "sweep"]
)
@pytest.mark.parametrize(
    "command", [slow(["info", "whole"]), slow(["verify", "whole"]), ["merge", "whole", "out", "--dry-run"]]
)
def test_ctrl_c_at_any_moment_ends_without_a_traceback(
    made: Path, command: list[str], moments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    process = begin(*command)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 0
    takes = time.monotonic() - began
    for moment in range(moments):
        process = begin(*command)
        time.sleep(takes * (moment + 0.5) / moments)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode in (0, 130), "Traceback" in err) == (True, False), (process.returncode, err)


DROPPED_BY_PYTHON = """
import signal, sys, time, weakref

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "statexchange.cli.main":
            held = [type("Held", (), {})()]
            reference = weakref.ref(held[0], lambda _: signal.raise_signal(signal.SIGINT))
            held.clear()
            print("went on", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Finder())
from statexchange.__main__ import main
main()
"""


# As on a busy machine: what a thread does may come before `start` has returned.
STARTS_SLOWLY = """
import threading, time
begin = threading.Thread.start

def start(self):
    begin(self)
    threading.Thread.start = begin
    time.sleep(0.1)

threading.Thread.start = start
"""


@pytest.mark.parametrize("before", ["", STARTS_SLOWLY], ids=["", "threads start slowly"])
def test_an_interrupt_is_not_lost_where_python_drops_exceptions(before: str) -> None:
    run = [sys.executable, "-c", before + DROPPED_BY_PYTHON]
    done = subprocess.run(run, capture_output=True, text=True, env=command_environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "went on\n", "error: interrupted\n")


REPLACED_BY_PYTHON = """
import signal, sys

class Interrupting:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            type("Owner", (), {"attribute": Interrupting()})

interrupted = sys.argv.pop()
sys.meta_path.insert(0, Finder())
from statexchange.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["statexchange.cli.main", "statexchange.cli.info", "statexchange.report.summary"])
def test_an_interrupt_while_a_class_is_created_exits_with_130(made: Path, module: str) -> None:
    run = [sys.executable, "-c", REPLACED_BY_PYTHON, "info", made / "whole", module]
    done = subprocess.run(run, capture_output=True, text=True, env=command_environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


IN_A_STRING = """
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            exec("import signal; signal.raise_signal(signal.SIGINT)")

interrupted = sys.argv.pop()
sys.meta_path.insert(0, Finder())
from statexchange.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["statexchange.cli.main", "statexchange.report.summary"])
def test_an_interrupt_in_code_that_is_a_string_exits_with_130(made: Path, module: str, tmp_path: Path) -> None:
    (tmp_path / "interrupted_here.py").write_text(IN_A_STRING)
    run = [sys.executable, "-m", "interrupted_here", "info", made / "whole", module]
    done = subprocess.run(run, capture_output=True, text=True, env=command_environment(), timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    ("command", "form"),
    [
        *(
            pytest.param(command, form, marks=marks)
            for number, command in enumerate(SHARED)
            for form, marks in zip(([], ["--json"]), SOME_FORMS[number % 6], strict=True)
        ),
        pytest.param(DEMO, [], marks=[SLOW, pytest.mark.timeout(600)]),
    ],
    ids=lambda words: words[0] if words else "text",
)
def test_closed_streams_set_the_exit_code_without_a_traceback(
    made: Path, command: list[str], form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    # Streams are looked at before a command is imported: `info` shows that in new interpreters, the others in forks.
    started: list[Any] = [sys.executable, "-m", "statexchange"]
    if command[0] == "demo":
        started = warm_program("-m", "statexchange")[0]
    elif command[0] != "info":
        started[0] = warm_python("commands")
    line = shlex.join(map(str, [*started, *command, *form]))

    def bash(script: str) -> str:
        run = ["bash", "-c", script]
        done = subprocess.run(run, capture_output=True, text=True, env=command_environment(), timeout=250)
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout

    def with_stdout(stdout: str) -> str:
        return bash(f"{line} 2>&1 {stdout}; echo $?").splitlines()[-1]

    def with_reader(reader: str, streams: str) -> str:
        return bash(f"{line} {streams} | {reader} >/dev/null; echo ${{PIPESTATUS[0]}}")

    if command[0] == "demo":
        assert with_stdout(">&-") == "8"
        assert with_reader("head -1", "2>&1") == "0\n"
        return
    code = bash(f"{line} >/dev/null 2>&1; echo $?")
    assert code in ("0\n", "1\n")
    assert bash(f"{line} 2>&- >/dev/null; echo $?") == code
    for stdout in (">&-", "> /dev/full"):
        assert with_stdout(stdout) == "8"
    assert bash(f"{line} >&- 2>&-; echo $?") == "8\n"
    for reader in ("head -c 0", "head -1"):
        assert with_reader(reader, "2>/dev/null") == code
        assert with_reader(reader, "2>&1") == code
