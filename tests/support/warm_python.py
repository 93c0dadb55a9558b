"""A Python that starts at once: scripts and commands of tests are forked from a process that has imported torch.

A new interpreter takes two to six seconds of processor time to import torch, or torch and transformers.
`warm_python()` returns a program to use in place of `sys.executable`, in a test's command or for a launcher
(`mpiexec -n 2 PROGRAM script.py`; torchrun starts what PYTHON_EXEC names). The program is a small client. It sends its
arguments, environment, directory and open files to a server, which the workers of a pytest session share. The server
forks the process that runs the code, the module or the script as `__main__`. The client passes signals on to that
process and ends as it ends: with its exit code, or by its signal. If the client is killed, so is the process.

A process that a fork cannot become is a new interpreter after all: one with other options than -u and -B, in other
namespaces, cgroups or limits than the server's, or with another value of a variable that Python or a library reads at
its start.

What differs from a new interpreter: torch and all of statexchange have been imported, and torch stays as it is when the
interpreter is finalized; the launcher is not the parent; the process leads a session of its own; all processes have one
hash seed. So tests of imports, of startup and of killed process groups use `sys.executable`, and so does at least one
test of each launcher.
"""

from __future__ import annotations

import array
import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import marshal
import os
import pkgutil
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from filelock import FileLock

_TORCH = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo.backends.common",
    "statexchange",
    "pytest",
)
MODULES = {
    "commands": ("numpy", "xxhash", "filelock", "click", "fsspec.implementations.local"),
    "torch": _TORCH,
    "transformers": (*_TORCH, "transformers.trainer", "transformers.models.llama.modeling_llama", "peft"),
}
COMMAND_LINE = tuple(
    f"statexchange.{part}."
    for part in ("checkpoint", "cli", "conversions", "exchange", "formats", "report", "sharding", "storage")
)
"""What a command needs of statexchange: nothing of it imports torch."""
_SCRIPTS = ("statexchange", "accelerate")  # which stand beside the program, as beside `sys.executable`
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TORCH_LOGS")
_NOT_AT_START = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHON_EXEC")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_LIMITS = sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_PASSED_ON = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
_WORD_BYTES = 8
_MOST_FILES = 250  # which one message can carry
_FREE_FILE = 500  # a server has no file descriptor from here on
_START_S = 100
_PR_SET_PDEATHSIG = 1
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25

# What the client does, without site-packages and with few imports: those of json, signal and socket would take as long
# as all else.
_CLIENT = f"""
import _signal as signal, _socket as socket, array, marshal, os, sys
address, *words = sys.argv[1:]
signals = {[int(number) for number in _PASSED_ON]}
before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
files = [int(name) for name in os.listdir("/proc/self/fd")]
line = socket.socket(socket.AF_UNIX)
line.connect(address)

def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return number != line.fileno()

files = sorted(filter(is_open, files))
ignored = [number for number in signals if signal.getsignal(number) == signal.SIG_IGN]
mask = os.umask(0)
os.umask(mask)
request = marshal.dumps([words, files, ignored, mask, os.getcwd(), dict(os.environ)])
carried = array.array("i", files[:{_MOST_FILES}])
line.sendmsg([len(request).to_bytes({_WORD_BYTES}, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, carried)])
line.sendall(request)
pid = int.from_bytes(line.recv({_WORD_BYTES}, socket.MSG_WAITALL), "big")
if not pid:
    line.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.execv(sys.executable, [sys.executable, *words])

def pass_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

for number in set(signals) - set(ignored):
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_SETMASK, before)
for number in files:
    os.close(number)
answer = line.recv({_WORD_BYTES}, socket.MSG_WAITALL)
code = int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL
if code < 0:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def warm_python(kind: str = "torch") -> str:
    """Return the path of a program to use in place of `sys.executable`; its server has imported MODULES[kind].

    With "commands" it has not imported torch: of processor time `-m statexchange` takes 0.07 s then, not 0.18 s.
    """
    session = os.environ.get("STATEXCHANGE_TEST_SESSION", str(os.getpid()))
    folder = Path(tempfile.gettempdir(), f"statexchange-{session}-{kind}")
    with FileLock(f"{folder}.lock"):
        # The server ends when the last worker has closed its connection.
        lifeline = socket.socket(socket.AF_UNIX)
        if lifeline.connect_ex(f"{folder}/socket"):
            shutil.rmtree(folder, ignore_errors=True)  # of a session that was killed and had the same name
            _start_server(folder, kind)
            lifeline.connect(f"{folder}/socket")
        lifeline.sendall(bytes(_WORD_BYTES))
    atexit.register(lifeline.close)
    return f"{folder}/python"


def _start_server(folder: Path, kind: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / "client.py").write_text(_CLIENT)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{folder}/client.py" "{folder}/socket" "$@"\n')
    for name in _SCRIPTS:
        (folder / name).write_text(f'#!/bin/sh\nexec "{program}" "{Path(sys.executable).parent / name}" "$@"\n')
    for path in (program, *map(folder.joinpath, _SCRIPTS)):
        path.chmod(0o700)
    command = [sys.executable, __file__, str(folder), kind]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        server.returncode = 0  # it goes on: what follows does not wait for it


class _Request(NamedTuple):
    words: list[str]
    files: list[int]
    ignored: list[int]
    umask: int
    directory: str
    environ: dict[str, str]


class _Server:
    def __init__(self, folder: str) -> None:
        self._surroundings = _surroundings(os.getpid())
        self._variables = _variables(os.environ)
        inherited = _python_path(os.environ)
        self._path = [entry for entry in sys.path[1:] if entry not in inherited]
        self._packages = imported_packages()
        self._folder = folder
        self._lifelines = 0
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/socket")
        self._listener.listen(128)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until the last lifeline is closed."""
        is_used = False
        while self._lifelines or not is_used:
            for key, _ in self._selector.select():
                key.data()
            is_used = is_used or self._lifelines > 0
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.remove(f"{self._folder}.lock")

    def _accept(self) -> None:
        line = self._listener.accept()[0]
        line.settimeout(_START_S)
        head, ancillary, _, _ = line.recvmsg(_WORD_BYTES, socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize))
        if not int.from_bytes(head, "big"):
            self._lifelines += 1
            self._selector.register(line, selectors.EVENT_READ, lambda: self._cut(line))
            return
        received = array.array("i")
        for _, _, carried in ancillary:
            received.frombytes(carried)
        with line.makefile("rb") as file:
            request = _Request(*marshal.loads(file.read(int.from_bytes(head, "big"))))
        pid = 0
        if self._can_become(request, received, line):
            pid = os.fork()
            if pid == 0:
                _become(request, received, self._path, self._packages)
            self._watch(pid, line)
        for number in received:
            os.close(number)
        with suppress(OSError):
            line.sendall(pid.to_bytes(_WORD_BYTES, "big"))
        if not pid:
            line.close()

    def _cut(self, line: socket.socket) -> None:
        self._lifelines -= 1
        self._selector.unregister(line)
        line.close()

    def _can_become(self, request: _Request, received: Sequence[int], line: socket.socket) -> bool:
        words = _without_options(request.words)
        if not words or (
            words[0] not in ("-c", "-m") and not os.path.isfile(os.path.join(request.directory, words[0]))
        ):
            return False
        if len(received) != len(request.files) or max(request.files, default=0) >= _FREE_FILE:
            return False
        peer = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return _variables(request.environ) == self._variables and _surroundings(peer) == self._surroundings

    def _watch(self, pid: int, line: socket.socket) -> None:
        ended = os.pidfd_open(pid)

        def reap() -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._selector.unregister(ended)
            os.close(ended)
            with suppress(KeyError):
                self._selector.unregister(line)
            with suppress(OSError), line:
                line.sendall(code.to_bytes(_WORD_BYTES, "big", signed=True))

        def kill() -> None:  # the client has ended
            if line.fileno() >= 0:  # else its process has ended meanwhile
                self._selector.unregister(line)
                os.kill(pid, signal.SIGKILL)

        self._selector.register(ended, selectors.EVENT_READ, reap)
        self._selector.register(line, selectors.EVENT_READ, kill)


def _without_options(words: list[str]) -> list[str]:
    """Return the words from the first on that is no option which a fork can take over."""
    known = ["-u", *(["-B"] if sys.flags.dont_write_bytecode else [])]
    return words[next((at for at, word in enumerate(words) if word not in known), len(words)) :]


def _variables(environ: Any) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if name.startswith(_READ_AT_START) and name not in _NOT_AT_START
    }


def _surroundings(pid: int) -> list[object]:
    """Return what a process has of its parent and a fork of the server would not have."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        users = [line for line in file if line.startswith(("Uid", "Gid", "Groups", "Cap", "TracerPid"))]
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        cgroups = file.read()
    namespaces = [os.readlink(f"/proc/{pid}/ns/{name}") for name in _NAMESPACES]
    limits = [resource.prlimit(pid, limit) for limit in _LIMITS]
    return [users, cgroups, namespaces, limits, os.sched_getaffinity(pid), os.readlink(f"/proc/{pid}/root")]


def _python_path(environ: Any) -> list[str]:
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _become(
    request: _Request, received: Sequence[int], path: list[str], packages: dict[str, types.ModuleType]
) -> NoReturn:
    """Run what the client was asked to run, in this process, which the server has just forked."""
    code = 1
    try:
        skip_destructors()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        _place(request.files, received)
        os.umask(request.umask)
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environ)
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
        if signal.SIGINT not in request.ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        tempfile.tempdir = None
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        code = _exit_code(_main(request, path))
    except BaseException:  # noqa: BLE001 (the server's loop must not go on in this process)
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    if code < 0:
        if sys.stdout is not None:
            sys.stdout.flush()
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    end_interpreter(packages, code)


def skip_destructors() -> None:
    """Let exit() call the C functions that are registered from now on, and not those of before the fork.

    These clear torch's registries of operators. That takes a quarter of a second, with the modules of torch in Python.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # exit() calls the last one first


def imported_packages() -> dict[str, types.ModuleType]:
    """Return all modules that are imported, without those of Python itself and of statexchange."""
    own = {*sys.stdlib_module_names, "__main__", "statexchange"}
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] not in own}


def end_interpreter(packages: dict[str, types.ModuleType], code: int) -> NoReturn:
    """Finalize the interpreter and exit, but do not clear `packages`, which were imported before the fork."""
    for name, module in packages.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(packages))
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Py_Exit has returned")


def _place(numbers: Sequence[int], received: Sequence[int]) -> None:
    """Give the client's files the numbers that they have there; close all others."""
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FREE_FILE) for number in received]
    os.closerange(0, _FREE_FILE)
    for number, copy in zip(numbers, kept, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def _main(request: _Request, path: list[str]) -> Callable[[], None]:
    """Prepare `sys` and `__main__`; return what runs it."""
    words = _without_options(request.words)
    is_unbuffered = "-u" in request.words[: -len(words)] or bool(request.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, name, is_unbuffered) if number in request.files else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.orig_argv[:] = [sys.executable, *request.words]
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main

    if words[0] == "-c":
        first, sys.argv = "", ["-c", *words[2:]]

        def run() -> None:
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        first, sys.argv = os.getcwd(), ["-m", *words[2:]]

        def run() -> None:
            runpy._run_module_as_main(words[1])
    else:
        first, sys.argv = os.path.dirname(os.path.realpath(words[0])), words
        main.__file__ = os.path.abspath(words[0])

        def run() -> None:
            with open(words[0], "rb") as file:
                source = file.read()
            exec(compile(source, main.__file__, "exec"), main.__dict__)

    sys.path[:] = [first, *_python_path(request.environ), *path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    return run


def _stream(number: int, name: str, is_unbuffered: bool) -> io.TextIOWrapper:
    old = getattr(sys, name)
    file: Any = open(number, "rb" if number == 0 else "wb", buffering=0, closefd=False)  # noqa: SIM115
    file.name = f"<{name}>"
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(file), old.encoding, old.errors)
    if is_unbuffered:
        return io.TextIOWrapper(file, old.encoding, old.errors, write_through=True)
    by_line = number == 2 or file.isatty()
    return io.TextIOWrapper(io.BufferedWriter(file), old.encoding, old.errors, line_buffering=by_line)


def _exit_code(run: Callable[[], None]) -> int:
    """Run, and return the exit code; negative for the signal that ends a Python process after KeyboardInterrupt."""
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 (as Python does at its end)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def import_for_forks(names: Sequence[str] = (), own: tuple[str, ...] = ("statexchange.",)) -> None:
    """Import modules, and all of statexchange but what imports pytest or a framework, for processes forked from this.

    Of statexchange only modules whose names begin with one of `own`. A collection of garbage in such a process, and its
    end, then leave these objects alone; else each takes a second.
    """
    import statexchange

    found = [module.name for module in pkgutil.walk_packages(statexchange.__path__, "statexchange.")]
    others = ("statexchange.__main__", "statexchange.testing.plugin", "statexchange.integrations.")
    for name in (*names, *(name for name in found if name.startswith(own) and not name.startswith(others))):
        with suppress(ImportError):
            importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # of torch's registries of operators, as in `skip_destructors`
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    use_huge_pages()


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages, of which a fork copies one entry of the page table, not 512.

    To fork a process that has imported torch, and to end the new one, takes a third of the processor time then. Where
    the kernel has no huge pages nothing changes.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mappings = [line.split() for line in file]
    for mapping in mappings:
        addresses, access, inode = mapping[0], mapping[1], mapping[4]
        if access == "rw-p" and inode == "0" and mapping[5:] != ["[stack]"]:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
            nbytes = (end - begin) // _HUGE_PAGE * _HUGE_PAGE
            if nbytes > 0:
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _MADV_COLLAPSE)


def _serve(folder: str, kind: str) -> None:
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False  # as it may be the first to import all this
    import_for_forks(MODULES[kind], COMMAND_LINE if kind == "commands" else ("statexchange.",))
    sys.dont_write_bytecode = before
    server = _Server(folder)
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    server.run()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
