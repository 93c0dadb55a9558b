"""The inside of one rank: its task, the one line to its launcher, and its end."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import operator
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from statexchange import values
from statexchange.errors import NotInitializedError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["describe", "load", "report", "sender", "serve"]

Send = Callable[[object], None]

sender: ContextVar[Send | None] = ContextVar("sender", default=None)
_OWN_FILES = {os.path.join(os.path.dirname(__file__), name) for name in ("child.py", "worlds.py", "plugin.py")}
_process_sender: Send | None = None  # of a rank that is a process: its own threads have no context of ours


def report(value: object) -> None:
    """Hand a JSON value to the launcher's `on_message(rank, value)` at once, from within a rank.

    Not collective. Outside a rank it is a NotInitializedError.
    """
    send = sender.get() or _process_sender
    if send is None:
        raise NotInitializedError("report() speaks for a rank that run_ranks started, and this is none")
    send(value)


def load(target: str) -> Callable[..., Any]:
    """The function that ``module:qualname`` names."""
    module, _, qualname = target.partition(":")
    function: Callable[..., Any] = operator.attrgetter(qualname)(importlib.import_module(module))
    return function


def describe(error: BaseException) -> list[str]:
    """The type name, message and traceback text of `error`, without the launcher's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return [type(error).__name__, str(error), text]


class _Line:
    """The rank's end of the pipe: what it says, the launcher's word to go, and the launcher's death."""

    def __init__(self, connection: Connection, directory: str) -> None:
        self._connection = connection
        self._directory = directory
        self._lock = threading.Lock()
        self.released = threading.Event()

    def send(self, kind: str, payload: object) -> None:
        message = values.encode([kind, payload]).encode()
        with self._lock:
            self._connection.send_bytes(message)

    def watch(self) -> None:
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            shutil.rmtree(self._directory, ignore_errors=True)  # a launcher killed by force cannot
            os._exit(1)
        self.released.set()


def serve(connection: Connection) -> None:
    """Do the task that comes through `connection`, and stay until the launcher says that all ranks are done.

    Not collective; blocks on the launcher, whose death ends this process. A rank that fails exits at once, so
    that its peers see their connections close; under mpiexec it waits too, as its exit would end the job.
    """
    global _process_sender
    task = values.decode(connection.recv_bytes())
    line = _Line(connection, task["directory"])
    _process_sender = functools.partial(line.send, "report")
    _dump_stacks_into(f"{task['directory']}/stacks-{task['rank']}")
    threading.Thread(target=line.watch, name="launcher", daemon=True).start()
    group = contextlib.ExitStack()
    try:
        line.send("ok", _work(task, group))
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's outcomes must reach the launcher too
        line.send("raised", describe(error))
        _leave(line, patient=task["backend"] == "mpi")
    line.released.wait()
    group.close()


def _dump_stacks_into(path: str) -> None:
    file = open(path, "w")  # noqa: SIM115 - faulthandler writes into it until the process has ended
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)


def _work(task: dict[str, Any], group: contextlib.ExitStack) -> Any:
    _settle(task)
    if task["backend"] == "gloo":
        group.enter_context(_gloo(task))
    return load(task["target"])(*values.decode(task["args"]))


def _settle(task: dict[str, Any]) -> None:
    sys.path[:] = task["path"]
    if task["environ"] is not None:
        os.environ.clear()
        os.environ.update(task["environ"])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@contextlib.contextmanager
def _gloo(task: dict[str, Any]) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{task['directory']}/store"
    dist.init_process_group("gloo", init_method=store, rank=task["rank"], world_size=task["world_size"])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(line: _Line, *, patient: bool) -> NoReturn:
    if patient:
        line.released.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
