"""Jobs that a test kills at one of their storage calls; each is forked from a process that has imported everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from warm_python import import_for_forks, warm_python

if TYPE_CHECKING:
    from typing_extensions import Self


def serve(
    work: Callable[..., object],
    counts: Callable[[str], bool] = lambda path: True,
    own: tuple[str, ...] = ("statexchange.",),
) -> None:
    """Run `work` in a forked process for each line of stdin, and print its exit code and its storage calls.

    A line has the number of the call at which to kill the process (0 for none), then the arguments. Only calls with
    a path for which `counts` returns True are numbered. Only modules whose names begin with one of `own` are imported
    for all jobs.
    """
    import_for_forks(own=own)
    for line in sys.stdin:
        kill_at, *task = json.loads(line)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                calls = _watched(work, task, kill_at, counts)
                os.write(writer, json.dumps(calls).encode())
                os._exit(0)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        os.close(writer)
        with open(reader, "rb") as pipe:
            printed = pipe.read().decode()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed]), flush=True)


def _watched(
    work: Callable[..., object], task: Sequence[Any], kill_at: int, counts: Callable[[str], bool]
) -> list[str]:
    calls: list[str] = []
    lock = threading.Lock()  # ranks may be threads

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and counts(args[1]):
            with lock:
                calls.append(args[0])
                if len(calls) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work(*task)
    return calls


class ForkedJobs:
    """Starts jobs, one after another. A context manager.

    Args:
        program: the code that imports what jobs need and ends with a call of `serve`.
        kind: what the process has imported, a key of `warm_python.MODULES`.
    """

    def __init__(self, program: str, kind: str = "torch") -> None:
        command = [warm_python(kind), "-c", f"from forked_jobs import serve\n{program}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def run(self, *task: Any, kill_at: int = 0) -> list[str] | None:
        """Run a job and return its storage calls; None if it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([kill_at, *task]), file=self._process.stdin, flush=True)
        code, printed = json.loads(self._process.stdout.readline())
        if code == -signal.SIGKILL:
            return None
        assert code == 0
        return list(json.loads(printed))

    def fewest_calls(self, *tasks: Sequence[Any]) -> list[str]:
        """Run jobs that do the same, each elsewhere, and return the storage calls of the one that made fewest.

        A rank that looks at a save while another rank removes it looks again, up to 40 times.
        """
        traced = []
        for task in tasks:
            calls = self.run(*task)
            assert calls is not None, "it was killed"
            traced.append(calls)
        return min(traced, key=len)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()
