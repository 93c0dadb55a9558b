"""A process that is forked from a warm one behaves as a new interpreter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import require
from warm_python import warm_python

MODULE = "import sys; print(__name__, __spec__.name, sys.argv, sys.path[0])"
SCRIPT = "import sys; print(__name__, __file__, sys.argv, sys.path[0], __builtins__.len('ab'))"
AT_END = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
"""
FINALIZED = """
class A:
    def __del__(self): print("gone")
a = A()
a.itself = a
"""
CALLED_BY_C = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.on_exit(libc.dprintf, ctypes.c_void_p(libc.strdup(b"called by exit(1)")))
sys.exit(1)
"""
PICKLED = "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)) is A)"
FILES = (
    "import os; print(os.read(int(os.environ['PIPE']), 4)); os.fstat(0); print(sorted(os.listdir('/proc/self/fd'))[:4])"
)
STREAMS = (
    "import sys; print([(s.encoding, s.errors, s.line_buffering, s.name) for s in (sys.stdin, sys.stdout, sys.stderr)])"
)


def both(*words: str | Path, folder: Path, **options: object) -> tuple[subprocess.CompletedProcess[str], ...]:
    """Run a warm and a new Python with the same words."""
    return tuple(
        subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]
        for python in (warm_python(), sys.executable)
    )


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "import sys; print(sys.argv, sys.path, sys.orig_argv[1:], __name__)", "a b", "-c"),
        ("-m", "module", "a", "-m"),
        ("-m", "absent"),
        ("script.py", "a b"),
        ("absent.py",),
        ("-c", AT_END),
        ("-c", FINALIZED),
        ("-c", "import ctypes; ctypes.CDLL(None).printf(b'kept by C')"),
        ("-c", CALLED_BY_C),
        ("-c", PICKLED),
        ("-c", "import sys; print(sys.stdin.read(), end=''); sys.exit(3)"),
        ("-c", "import sys; sys.exit('bye')"),
        ("-c", "import sys; sys.exit(None)"),
        ("-c", "def f():\n    1 / 0\nf()"),
        ("script.py", "fails"),
        ("-c", "1 +"),
        ("-c", "import os; os.abort()"),
        ("-c", "import os; os.kill(os.getpid(), 9)"),
        ("-c", "raise KeyboardInterrupt"),
        ("-c", "import os; os._exit(7)"),
        ("-c", "import os; print(os.getcwd(), os.umask(0), sorted(os.environ.items()))"),
        ("-c", FILES),
        ("-c", STREAMS),
        ("-u", "-c", "import os; print('first'); os._exit(0)"),
        ("-c", "import os; print('lost'); os._exit(0)"),
        ("-c", "import signal; print([signal.getsignal(n) for n in (1, 2, 10, 13, 15)])"),
        ("-V",),
    ],
)
def test_a_warm_python_ends_and_prints_as_a_new_interpreter(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nif 'fails' in sys.argv:\n    raise ValueError('no')")
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.write(writer, b"same" * 2)
    os.close(writer)
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "OWN": "x", "PIPE": str(reader)}
    environ |= {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LC_", "LANG", "LD_"))}
    warm, new = both(*words, folder=tmp_path, input="given", env=environ, umask=0o027, close_fds=False)
    os.close(reader)
    for done in (warm, new):
        done.stdout = done.stdout.replace(f"('PWD', '{tmp_path}'), ", "")  # of the shell that starts the client
        done.stderr = re.sub("^    .*\n", "", done.stderr, flags=re.MULTILINE)  # Python 3.13 knows the lines of -c
    assert (warm.returncode, warm.stdout, warm.stderr) == (new.returncode, new.stdout, new.stderr)


SLEEPS = "import os, time\ntry:\n    print(os.getpid(), flush=True)\n    time.sleep(60)\nfinally:\n    print('end')"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_reaches_the_process_of_a_warm_python(number: signal.Signals) -> None:
    command = [warm_python(), "-c", SLEEPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert pid != client.pid
        client.send_signal(number)
        assert client.stdout.read() == ("end\n" if number == signal.SIGINT else "")
        assert client.wait() == -number
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def test_an_ignored_signal_stays_ignored() -> None:
    program = "import os; os.kill(os.getpid(), 1); print('goes on')"
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", warm_python(), "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "goes on\n"


LOADED = "import sys; print('statexchange' in sys.modules)"


@pytest.mark.parametrize(
    ("changed", "is_warm"),
    [
        (["env", "OWN=1"], True),
        (["env", "OMP_NUM_THREADS=7"], False),
        (["env", "PYTHONHASHSEED=1"], False),
        (["prlimit", "--nofile=64"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_in_other_surroundings_a_warm_python_is_a_new_interpreter(changed: list[str], is_warm: bool) -> None:
    require(changed[0])
    done = subprocess.run([*changed, warm_python(), "-c", LOADED], capture_output=True, text=True)
    assert done.stdout == f"{is_warm}\n"


@pytest.mark.parametrize(("option", "is_warm"), [("-B", True), ("-u", True), ("-O", False)])
def test_options_that_a_fork_takes_over(option: str, is_warm: bool) -> None:
    """-B is one: multiprocessing gives it to its fork server where no bytecode is written, as in workers."""
    done = subprocess.run([warm_python(), option, "-c", LOADED], capture_output=True, text=True)
    assert done.stdout == f"{is_warm}\n"


def test_a_warm_command_line_has_no_torch() -> None:
    program = "import sys; print('statexchange.cli.info' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([warm_python("commands"), "-c", program], capture_output=True, text=True)
    assert done.stdout == "True False\n"
