"""The ways to start the ranks of a small world: threads, processes of a fork server, and mpiexec."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import multiprocessing
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from statexchange import values
from statexchange.errors import InvalidArgumentError, MissingExtraError, StallError
from statexchange.testing import child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    from statexchange.comm.communicator import Communicator

LAUNCH_METHODS = ("threads", "processes", "gloo", "mpi")  # what `run_ranks` takes as `backend`
Value: TypeAlias = Any
"""What a rank's function takes or returns, or a rank sends."""
Event = tuple[int, str, Value]  # rank; "ready", "report", "ok", "raised" or "exited"; what it sent

_POLL_S = 0.05
_STACK_S = 1.0
_CLEAN_S = 8.0  # for a rank to restore its state, or to end after that
_log = logging.getLogger("statexchange")
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = {  # without these Open MPI refuses to run as root, and to start more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class World(ABC):
    """Ranks as the launcher sees them."""

    @abstractmethod
    def start(self) -> None:
        """Start all ranks."""

    @abstractmethod
    def events(self, wait_s: float) -> Iterator[Event]:
        """Yield the events of the ranks that arrive within `wait_s`."""

    @abstractmethod
    def stack(self, rank: int) -> tuple[str, str]:
        """Return the innermost frame and the whole stack of `rank`, or those of its crash if they are known."""

    @abstractmethod
    def kill(self, ranks: set[int]) -> None:
        """Kill ranks that do not end by themselves."""

    @abstractmethod
    def ended(self, rank: int, wait_s: float) -> bool:
        """Whether `rank` has ended within `wait_s`."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and remove all files."""

    def release(self) -> None:  # noqa: B027 (threads end by themselves)
        """Let ranks that have finished their task end."""

    def keep(self) -> bool:
        """Keep the ranks, all of which have finished their task, for another one; return False if they must end."""
        return False

    def exit_code(self, rank: int) -> int | None:  # noqa: ARG002 (a thread has none)
        """Return the exit code of `rank`, if it has one of its own."""
        return None


def open_world(
    backend: str, fn: Callable[..., Value], args: tuple[Value, ...], world_size: int, *, reuse: bool = False
) -> World:
    """Return a world whose ranks call ``fn(*args)`` when it starts; with `reuse` an idle one, if one fits."""
    if backend == "threads":
        return _Threads(fn, args, world_size)
    task = {"target": _target(fn, backend), "args": values.encode(args), "world_size": world_size}
    task |= {"backend": backend, "reuse": reuse}
    kind = _MpiJob if backend == "mpi" else _Processes
    if reuse:
        world = _take_kept(kind, world_size)
        if world is not None:
            world.take(task)
            return world
    return kind(task)


# Worlds whose ranks wait for another task, the oldest first; at most one of each kind and size.
_kept: list[_Remote] = []
_ended_badly: list[str] = []  # ranks of such worlds that failed at their end; `dismiss_kept` reports them
_MOST_KEPT_RANKS = 8
_MOST_TASKS = 50  # of one world: each may leave some state that CleanState does not detect


def _take_kept(kind: type[_Remote], world_size: int) -> _Remote | None:
    for world in _kept:
        if type(world) is kind and world.world_size == world_size:
            _kept.remove(world)  # this loop ends now: a list must not change while it goes on
            if not world.is_alive():
                _log.warning("ranks that were kept for other tests have died in the meantime")
                world.dismiss()
            elif world.fits():
                return world
            else:
                _ended_badly.extend(world.dismiss())
            break
    return None


def _put_kept(world: _Remote) -> None:
    _dismiss_at_exit()  # for programs without the plugin, which ends them with the session
    _kept.append(world)
    while sum(kept.world_size for kept in _kept) > _MOST_KEPT_RANKS:
        _ended_badly.extend(_kept.pop(0).dismiss())


def dismiss_kept() -> None:
    """End the ranks that are kept for another task; RuntimeError if one of them ends with an error."""
    while _kept:
        _ended_badly.extend(_kept.pop().dismiss())
    if _ended_badly:
        text = ", ".join(_ended_badly)
        _ended_badly.clear()
        raise RuntimeError(f"ranks that were kept for other tests did not end well: {text}")


@functools.cache
def _dismiss_at_exit() -> None:
    atexit.register(dismiss_kept)


def _target(fn: Callable[..., object], backend: str) -> str:
    """Return ``module:qualname`` of `fn`; raise if another process cannot import that."""
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module is None or qualname is None or "<" in qualname:
        raise InvalidArgumentError(
            f"another process cannot import {qualname or fn!r}: with backend {backend!r} give a function from"
            " the top of a module, no lambda, nested function or partial; 'threads' takes any callable"
        )
    not_importable = backend == "mpi" or not hasattr(sys.modules["__main__"], "__file__")
    if module == "__main__" and not_importable:
        raise InvalidArgumentError(f"another process cannot import {qualname} from __main__: put it in a module")
    return f"{module}:{qualname}"


class _Threads(World):
    """Ranks that are threads of this process. A thread that hangs cannot be killed; it is reported."""

    def __init__(self, fn: Callable[..., Value], args: tuple[Value, ...], world_size: int) -> None:
        self._fn = fn
        self._args = args
        self._world_size = world_size
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._communicators: list[Communicator] = []

    def start(self) -> None:
        import torch.distributed

        from statexchange.comm.backends.store import StoreBootstrap
        from statexchange.comm.bootstrap import form_communicator
        from statexchange.settings import default_timeout_s

        store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]

        def form(rank: int) -> Communicator:
            bootstrap = StoreBootstrap(store, rank, range(self._world_size))
            bootstrap.name = "threads"
            return form_communicator(bootstrap, default_timeout_s())

        # Forming is collective, so that each rank needs a thread; other threads may then use the communicators.
        with ThreadPoolExecutor(self._world_size) as pool:
            self._communicators = list(pool.map(form, range(self._world_size)))
        for rank in range(self._world_size):
            # A daemon, as nothing ends a thread that hangs: the program must end all the same.
            thread = threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, rank: int) -> None:
        from statexchange.comm import defaults

        communicator = self._communicators[rank]
        # Through JSON, as from a process: else a test would pass with threads alone.
        child.sender.set(lambda value: self._events.put((rank, "report", values.decode(values.encode(value)))))
        self._events.put((rank, "ready", None))
        try:
            with defaults.use(communicator):
                value = self._fn(*self._args)
            communicator.close(error=None)
        except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's outcomes must reach the launcher too
            # Before the others raise because this rank has left: theirs is not the first failure.
            self._events.put((rank, "raised", child.describe(error)))
            communicator.close(error=error)
        else:
            self._events.put((rank, "ok", value))

    def events(self, wait_s: float) -> Iterator[Event]:
        with contextlib.suppress(queue.Empty):  # no event within wait_s: the caller checks the time
            yield self._events.get(timeout=wait_s)

    def stack(self, rank: int) -> tuple[str, str]:
        frame = sys._current_frames().get(self._threads[rank].ident or 0)  # noqa: SLF001 - documented by sys
        if frame is None:
            return "its exit", ""
        last = traceback.extract_stack(frame)[-1]
        where = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
        return where, "".join(traceback.format_stack(frame))

    def kill(self, ranks: set[int]) -> None:
        # A rank that waits for another one raises then; one that computes goes on.
        for rank in ranks:
            self._communicators[rank].close(error=StallError("the launcher ended this rank", rank=rank))

    def ended(self, rank: int, wait_s: float) -> bool:
        self._threads[rank].join(wait_s)
        return not self._threads[rank].is_alive()

    def close(self) -> None:
        self.kill({rank for rank, thread in enumerate(self._threads) if thread.is_alive()})


class _Remote(World):
    """Ranks that are processes, each at the other end of a connection."""

    def __init__(self, task: child.Task) -> None:
        self.world_size: int = task["world_size"]
        self._tasks = 0
        self._connections: dict[int, Connection] = {}
        self._open: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}
        self.take(task)

    def take(self, task: child.Task) -> None:
        """Set the task that `start` sends to the ranks."""
        self._directory = tempfile.TemporaryDirectory(prefix="statexchange-")
        self._task = {**task, "path": sys.path, "environ": None, "directory": self._directory.name}
        self._tasks += 1
        self.is_kept = False

    def start(self) -> None:
        if self._connections:
            for rank in self._connections:
                self._send_task(rank)
        else:
            self._launch()

    @abstractmethod
    def _launch(self) -> None:
        """Start the processes; `_take_connection` is called for each, here or when it has connected."""

    def _take_connection(self, rank: int, pid: int, connection: Connection) -> None:
        self._connections[rank] = connection
        self._open[connection] = rank
        self._pids[rank] = pid
        self._send_task(rank)

    def _send_task(self, rank: int) -> None:
        task = {**self._task, "rank": rank, "environ": self._environ(rank)}
        self._send(rank, values.encode(task).encode())

    def _environ(self, rank: int) -> dict[str, str] | None:  # noqa: ARG002
        """Return the environment of a rank; None: the one in which it was launched."""
        return None

    def _send(self, rank: int, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended; `_read` then reports "exited"
            self._connections[rank].send_bytes(message)

    def _read(self, ready: Iterable[object]) -> Iterator[Event]:
        """Yield an event for each connection in `ready`: its next message, or its end."""
        for connection in ready:
            if not isinstance(connection, Connection):  # the listener
                continue
            rank = self._open[connection]
            try:
                kind, payload = values.decode(connection.recv_bytes())
            except (EOFError, OSError):
                del self._open[connection]
                yield rank, "exited", None
            else:
                yield rank, kind, payload

    def stack(self, rank: int) -> tuple[str, str]:
        file = Path(self._directory.name, f"stacks-{rank}")
        if not self.ended(rank, 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
            _wait_for_text(file)
        text = ""
        with contextlib.suppress(FileNotFoundError):  # it has not come so far
            text = file.read_text()
        # Without the thread that reads the launcher's orders
        threads = [thread for thread in text.split("\n\n") if " in watch\n" not in thread]
        return _innermost(threads), "\n\n".join(threads)

    def release(self) -> None:
        for rank in self._connections:
            self._send(rank, child.GO)

    def keep(self) -> bool:
        if not self._task["reuse"] or self._tasks >= _MOST_TASKS:
            return False
        for rank in self._connections:
            self._send(rank, child.KEEP)
        clean: set[int] = set()
        deadline = time.monotonic() + _CLEAN_S
        while len(clean) < self.world_size and time.monotonic() < deadline:
            for rank, kind, reason in self.events(deadline - time.monotonic()):
                if kind == "clean" and reason is None:
                    clean.add(rank)
                elif kind != "report":
                    _log.debug("rank %d of %s is not used again: %s", rank, self._task["target"], reason or kind)
                    return False
        if len(clean) < self.world_size:
            return False
        self._directory.cleanup()
        _put_kept(self)
        self.is_kept = True
        return True

    def is_alive(self) -> bool:
        """Whether all ranks of a kept world wait for a task."""
        return not wait(list(self._open), 0)

    def fits(self) -> bool:
        """Whether the ranks were launched in the environment that new ranks would get now."""
        return True

    def dismiss(self) -> list[str]:
        """End ranks that have been kept; return a line for each that ends with an error."""
        self.is_kept = False
        self.release()
        errors = []
        for rank in range(self.world_size):
            if not self.ended(rank, _CLEAN_S):
                errors.append(f"rank {rank}: did not exit")
            elif self.exit_code(rank):
                errors.append(f"rank {rank} of {self.world_size}: exit code {self.exit_code(rank)}")
        self.close()
        return errors

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def close(self) -> None:
        if not self.is_kept:
            self._end()

    def _end(self) -> None:
        self._disconnect()
        self._directory.cleanup()


def _innermost(threads: list[str]) -> str:
    """Return the innermost frame of the main thread, which faulthandler writes last."""
    frame = re.search(r'File "(.*)", line (\d+) in (.*)', threads[-1] if threads else "")
    if frame is None:
        return "an unknown place"
    return f"{frame[3]} ({Path(frame[1]).name}:{frame[2]})"


def _wait_for_text(file: Path) -> None:
    """Wait until the signal handler in the other process has written its whole stack."""
    deadline = time.monotonic() + _STACK_S
    before, size = -1, 0
    while (size == 0 or size != before) and time.monotonic() < deadline:
        time.sleep(_POLL_S / 2)
        before, size = size, file.stat().st_size if file.exists() else 0


class _Processes(_Remote):
    """Children of multiprocessing's fork server, which is started once and has torch imported."""

    def __init__(self, task: child.Task) -> None:
        super().__init__(task)
        self._processes: list[ForkServerProcess] = []

    def _launch(self) -> None:
        context = _fork_server()
        for rank in range(self.world_size):
            connection, end_of_rank = context.Pipe()
            process = context.Process(target=child.serve, args=(end_of_rank,), name=f"rank {rank}")
            process.start()
            end_of_rank.close()  # else the launcher would not see that the process has ended
            self._processes.append(process)
            self._take_connection(rank, process.pid or 0, connection)

    def _environ(self, rank: int) -> dict[str, str]:
        size = self.world_size
        launch = dict(zip(_LAUNCH_VARIABLES, map(str, (rank, size, rank, size)), strict=True))
        # Gloo takes the address of the host's name otherwise, which may lead nowhere.
        return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **launch}

    def events(self, wait_s: float) -> Iterator[Event]:
        yield from self._read(wait(list(self._open), wait_s))

    def kill(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._processes[rank].kill()

    def ended(self, rank: int, wait_s: float) -> bool:
        self._processes[rank].join(wait_s)
        return self._processes[rank].exitcode is not None

    def exit_code(self, rank: int) -> int | None:
        return self._processes[rank].exitcode

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        super()._end()


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # What is imported there once, no rank imports: a fork has it.
    preload = []
    for name in sys.modules:
        # Ranks import the module of their function, and with it the models for whose sake it was imported here.
        is_model = name.startswith("transformers.") and ".modeling_" in name
        if is_model or name.startswith("statexchange") or name in ("hypothesis", "pytest", "accelerate", "peft"):
            preload.append(name)
    if importlib.util.find_spec("torch") is not None:
        preload += ["torch", "torch.distributed.fsdp"]
        preload += ["torch._dynamo"]  # each rank with an optimizer would import it
    context.set_forkserver_preload(preload)  # has no effect once the server runs
    return context


def _python() -> str:
    return sys.executable


def _mpiexec() -> str | None:
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpi_missing() -> str | None:
    """Return why ranks cannot be started under MPI here, or None if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return 'no mpi4py: pip install "statexchange[mpi]"'
    return "no mpiexec: pip install mpich" if _mpiexec() is None else None


class _MpiJob(_Remote):
    """Ranks under mpiexec, which connect to a socket of the launcher. Only the job as a whole has an exit code."""

    _ok: set[int]

    def __init__(self, task: child.Task) -> None:
        self._launched_in = _launch_environment()
        super().__init__(task)
        self._listener = socket.socket(socket.AF_UNIX)
        self._job: subprocess.Popen[bytes] | None = None

    def _launch(self) -> None:
        mpiexec = _mpiexec()
        if mpiexec is None:
            raise MissingExtraError("no mpiexec beside this Python or on PATH: pip install mpich")
        address = f"{self._directory.name}/launcher"
        self._listener.bind(address)
        self._listener.listen(self.world_size)
        rank = [_python(), "-m", "statexchange.testing.mpi_rank", address]
        command = [mpiexec, "-n", str(self.world_size), *rank]
        # In a session of its own: Ctrl-C does not reach it, and this process ends it.
        self._job = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_mpi_environ(), start_new_session=True)

    def events(self, wait_s: float) -> Iterator[Event]:
        ready = wait([self._listener, *self._open], min(wait_s, _POLL_S))
        if self._listener in ready:
            self._admit()
        events = list(self._read(ready))
        # Ranks that have never connected have no connection whose end would be seen.
        if not ready and self.ended(0, 0):
            for rank in set(range(self.world_size)) - self._connections.keys():
                events.append((rank, "exited", None))
        for rank, kind, _ in events:
            if kind == "ok":
                self._ok.add(rank)
        yield from events

    def _admit(self) -> None:
        connection = Connection(self._listener.accept()[0].detach())
        rank, pid = values.decode(connection.recv_bytes())
        self._take_connection(rank, pid, connection)

    def kill(self, ranks: set[int]) -> None:
        for rank in ranks & self._pids.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)
        if ranks - self._pids.keys() and self._job is not None:
            self._job.terminate()

    def ended(self, rank: int, wait_s: float) -> bool:  # noqa: ARG002 (ranks end with their job)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._job is None or self._job.wait(wait_s) is not None
        return False

    def exit_code(self, rank: int) -> int | None:
        if self._job is None or (rank in self._ok and len(self._ok) < self.world_size):
            return None  # the job's exit code is that of the ranks that failed
        return self._job.returncode

    def take(self, task: child.Task) -> None:
        super().take(task)
        self._ok = set()

    def fits(self) -> bool:
        return self._launched_in == _launch_environment()

    def _end(self) -> None:
        self._listener.close()
        self._disconnect()
        if self._job is not None and not self.ended(0, _POLL_S):
            self._job.terminate()
            if not self.ended(0, _STACK_S):
                self._job.kill()
                self._job.wait()
        super()._end()


def _launch_environment() -> tuple[str, dict[str, str]]:
    """Return the working directory and environment that a job launched now inherits."""
    environ = _mpi_environ()
    environ.pop("PYTEST_CURRENT_TEST", None)  # another one for each test
    return os.getcwd(), environ


def _mpi_environ() -> dict[str, str]:
    environ = dict(os.environ)
    for name in _LAUNCH_VARIABLES:  # those of a launcher of this process would be taken for mpiexec's
        environ.pop(name, None)
    # mpiexec starts a new Python, which must find this package even if it is not installed.
    paths = (str(Path(child.__file__).parents[2]), environ.get("PYTHONPATH"))
    return {**_OPEN_MPI, **environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
