"""One rank's process: its task, the connection to its launcher, and its exit."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import operator
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from statexchange import values
from statexchange.errors import NotInitializedError
from statexchange.testing.clean_state import CleanState

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Send = Callable[[object], None]
Task: TypeAlias = dict[str, Any]
"""What a rank is to do, as JSON: the function and its arguments, its rank and world, its backend and environment."""
GO, KEEP = b"go", b"keep"  # the launcher's orders, besides tasks

# How `report` reaches the launcher: by the context of a thread rank, else by the process of a process rank.
sender: ContextVar[Send | None] = ContextVar("sender", default=None)
_OWN_FILES = {os.path.join(os.path.dirname(__file__), name) for name in ("child.py", "worlds.py", "plugin.py")}
_process_sender: Send | None = None  # for all threads of the process: a new thread does not inherit the context


def report(value: object) -> None:
    """Send a JSON value to the launcher, which calls `on_message(rank, value)` at once.

    Not collective. Raises NotInitializedError outside a rank.
    """
    send = sender.get() or _process_sender
    if send is None:
        raise NotInitializedError("report() works only in ranks that run_ranks started")
    send(value)


def load(target: str) -> Callable[..., Any]:
    """Return the function ``module:qualname``."""
    module, _, qualname = target.partition(":")
    function: Callable[..., Any] = operator.attrgetter(qualname)(importlib.import_module(module))
    return function


def describe(error: BaseException) -> list[str]:
    """Return type name, message and traceback text of `error`, without the launcher's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return [type(error).__name__, str(error), text]


class _Launcher:
    """The rank's end of the pipe to the launcher. This process exits if the launcher dies."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # any thread of the task may call `report`
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.directory: str | None = None

    def send(self, kind: str, payload: object) -> None:
        message = values.encode([kind, payload]).encode()
        with self._lock:
            self._connection.send_bytes(message)

    def order(self) -> bytes:
        """Return the launcher's next order: a task, GO or KEEP."""
        return self._orders.get()

    def watch(self) -> None:
        """Receive orders until GO; exit this process if the connection ends."""
        order = b""
        while order != GO:
            try:
                order = self._connection.recv_bytes()
            except (EOFError, OSError):
                if self.directory is not None:
                    shutil.rmtree(self.directory, ignore_errors=True)  # a launcher that was killed has not removed it
                os._exit(1)  # this is not the main thread, which may hang
            self._orders.put(order)


def serve(connection: Connection) -> None:
    """Do the tasks that arrive through `connection`, until the launcher sends GO.

    Not collective; blocks on the launcher, and exits if the launcher dies. A rank that fails exits at once, so that its
    peers see their connections close; but under mpiexec it waits for GO, as its exit would end the job.

    When all ranks have done a task, the launcher sends GO, and the process ends, or KEEP. Then the rank restores its
    state, sends "clean" with None or with a description of what cannot be restored, and receives another task or GO.
    """
    launcher = _Launcher(connection)
    threading.Thread(target=launcher.watch, name="launcher", daemon=True).start()
    order = launcher.order()
    while order != GO:
        order = _serve_task(values.decode(order), launcher)


def _serve_task(task: Task, launcher: _Launcher) -> bytes:
    """Do one task, and return the launcher's next order."""
    global _process_sender
    launcher.directory = task["directory"]
    _process_sender = functools.partial(launcher.send, "report")
    _dump_stacks_into(f"{task['directory']}/stacks-{task['rank']}")
    group = contextlib.ExitStack()
    try:
        _set_environment(task)
        function = load(task["target"])
        before = _state_before(task)  # after the import of the function, which stays
        if task["backend"] == "gloo":
            group.enter_context(_gloo(task))
        launcher.send("ready", None)
        launcher.send("ok", function(*values.decode(task["args"])))
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's outcomes must reach the launcher too
        launcher.send("raised", describe(error))
        _exit_after_failure(launcher, wait_for_go=task["backend"] == "mpi")
    order = launcher.order()
    group.close()
    if order == KEEP and before is not None:
        launcher.send("clean", before.restore())
        order = launcher.order()
    return order


def _state_before(task: Task) -> CleanState | None:
    """Return the state to restore after the task, if this process may get another."""
    if not task["reuse"]:
        return None
    if task["backend"] == "mpi":
        importlib.import_module("mpi4py.MPI")  # initialises MPI, which lasts as long as the process
    return CleanState()


def _dump_stacks_into(path: str) -> None:
    file = open(path, "w")  # noqa: SIM115 - faulthandler writes into it until the process has ended
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)


def _set_environment(task: Task) -> None:
    sys.path[:] = task["path"]
    if task["environ"] is not None:  # that of the fork server is of an earlier time
        os.environ.clear()
        os.environ.update(task["environ"])
    if "torch" in sys.modules:  # each rank would else start as many threads as there are cores
        sys.modules["torch"].set_num_threads(1)


@contextlib.contextmanager
def _gloo(task: Task) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{task['directory']}/store"
    dist.init_process_group("gloo", init_method=store, rank=task["rank"], world_size=task["world_size"])
    dist.barrier()  # a rank that has connected may fail and exit while its peers still connect: they would fail, too
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_after_failure(launcher: _Launcher, *, wait_for_go: bool) -> NoReturn:
    """Exit with status 1; with `wait_for_go` not before the launcher sends GO."""
    if wait_for_go:
        launcher.order()
    # At once, without the handlers at exit, see `serve`.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
