"""The actions of agents: every public function of this file, called with JSON values.

Only statexchange's public API is used. A checkpoint or save of step `k` has the value ``1000 * k + i`` in every
element of its i-th tensor, so that a reader can compute the steps from the values.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np

import statexchange as sx

Values = dict[str, Any]
DATA_LIMIT = 900 << 20
MUTATING_CALLS = {
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.link": "link",
    "os.symlink": "symlink",
    "os.truncate": "truncate",
}
STORAGE_EVENT = "statexchange.storage"  # (call, path): the product's own audit event
LOOKS = ("list", "open", "open directory")  # calls that raise the event, too, although they change nothing
SAVED_TENSORS = 4


# The agent


def limit_memory() -> None:
    """Limit this process's memory, so that a bug raises MemoryError here and does not exhaust the host."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT, DATA_LIMIT))


def import_all() -> None:
    """Import everything that actions import, by running them once on a local directory."""
    import torch  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        publish(f"{folder}/model", step=1, tensors=1, kib=1)
        read(f"{folder}/model")
        load(f"{folder}/model", tensors=1, kib=1)
        verify(f"{folder}/model")
        save(f"{folder}/save", step=1, kib=1)
        load_save(f"{folder}/save", kib=1)
        write_round(f"{folder}/workspace", run="run", step=1)
        read_round(f"{folder}/workspace", run="run")


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def count_descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def tree(path: str) -> list[str]:
    """Return all files and directories below `path`, relative to it."""
    found = []
    for folder, directories, names in os.walk(path):
        found += [os.path.relpath(os.path.join(folder, name), path) for name in (*directories, *names)]
    return sorted(found)


def names_in(path: str) -> list[str]:
    """Return the names in a directory."""
    return sorted(os.listdir(path))


def empty_directories(path: str) -> list[str]:
    """Return the empty directories below `path`, relative to it."""
    found = [folder for folder, directories, names in os.walk(path) if not directories and not names]
    return sorted(os.path.relpath(folder, path) for folder in found)


@contextlib.contextmanager
def _launched(rank: int, world_size: int) -> Iterator[None]:
    """Set the environment that a launcher gives a rank."""
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


class Errors:
    """Errors of a loop, counted by text."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.unnamed: dict[str, int] = {}  # no StateExchangeError
        self.missing: dict[str, int] = {}  # errors that call something missing
        self.corrupt: dict[str, int] = {}

    def add(self, error: Exception) -> None:
        number = getattr(error, "errno", None)
        code = "" if number is None else f" ({errno.errorcode.get(number, number)})"
        text = f"{type(error).__name__}{code}: {error!s:.160}"
        kinds = [self.texts]
        if not isinstance(error, sx.StateExchangeError):
            kinds.append(self.unnamed)
        if isinstance(error, sx.errors.CorruptError):
            kinds.append(self.corrupt)
        elif isinstance(error, (sx.errors.NotFoundError, sx.errors.IncompleteError)) or "missing" in str(error):
            kinds.append(self.missing)
        for kind in kinds:
            kind[text] = kind.get(text, 0) + 1

    def facts(self) -> Values:
        return {
            "errors": self.texts,
            "unnamed": self.unnamed,
            "missing": self.missing,
            "corrupt": self.corrupt,
        }


# Checkpoints of one process


def _state(step: int, tensors: int, kib: int) -> Values:
    return {f"layer.{i}.weight": np.full((kib, 256), 1000 * step + i, np.float32) for i in range(tensors)}


def _steps_of(tensors: Iterable[tuple[str, Any]]) -> list[float]:
    steps: set[float] = set()
    for name, values in tensors:
        index = int(name.split(".")[1])
        steps.update(((np.unique(np.asarray(values)) - index) / 1000).tolist())
    return sorted(steps)


def publish(
    path: str, step: int, overwrite: bool = False, tensors: int = 6, kib: int = 64, shard: str = "100KB"
) -> None:
    """Export a checkpoint of `tensors` tensors of `kib` KiB each."""
    sx.export_checkpoint(_state(step, tensors, kib), path, overwrite=overwrite, max_shard_size=shard)


def publish_at(path: str, step: int, at: float, overwrite: bool, jitter_s: float) -> None:
    """Publish at the clock time `at`, with random delays of up to `jitter_s` before each mutating call."""
    while time.time() < at:
        time.sleep(0.0005)
    with _delayed(jitter_s):
        publish(path, step, overwrite, tensors=4)


def publish_tensors(path: str, tensors: dict[str, tuple[list[int], float]], overwrite: bool = False) -> None:
    """Export tensors of given shapes and values."""
    state = {name: np.full(shape, value, np.float32) for name, (shape, value) in tensors.items()}
    sx.export_checkpoint(state, path, overwrite=overwrite)


def publish_repeatedly(path: str, seconds: float, first_step: int, kib: int = 64) -> Values:
    """Publish with overwrite until time is over."""
    end, step, errors = time.time() + seconds, first_step, Errors()
    done, last = 0, None
    while time.time() < end:
        try:
            publish(path, step, overwrite=True, kib=kib)
            done, last = done + 1, step
        except Exception as error:  # noqa: BLE001
            errors.add(error)
        step += 1
    return {"done": done, "last": last, **errors.facts()}


def read(path: str) -> list[float]:
    """Open a checkpoint and return the steps of its values."""
    return _steps_of((name, tensor.read()) for name, tensor in sx.open_checkpoint(path).items())


def load(path: str, tensors: int = 6, kib: int = 64) -> list[float]:
    """Load a checkpoint into live tensors and return the steps of their values."""
    state = {name: np.zeros_like(value) for name, value in _state(0, tensors, kib).items()}
    sx.load_checkpoint(state, path)
    return _steps_of(state.items())


def _continues(end: float, stop: str) -> bool:
    """Whether a loop continues: until `end`, or until the file `stop` exists on this host."""
    return time.time() < end and not (stop and os.path.exists(stop))


def _read_until(end: float, reads_max: int, read_once: Callable[[], list[float]], stop: str = "") -> Values:
    errors, reads, mixed, backwards, last = Errors(), 0, [], 0, -1.0
    while reads < reads_max and _continues(end, stop):
        reads += 1
        try:
            steps = read_once()
        except Exception as error:  # noqa: BLE001
            errors.add(error)
            continue
        if len(steps) != 1:
            mixed.append(steps)
        elif steps[0] < last:
            backwards += 1
        last = max([last, *steps])
    return {"reads": reads, "mixed": mixed[:5], "backwards": backwards, "last": last, **errors.facts()}


def read_repeatedly(path: str, seconds: float) -> Values:
    """Open and read a checkpoint until time is over."""
    return _read_until(time.time() + seconds, sys.maxsize, lambda: read(path))


def load_repeatedly(path: str, seconds: float, kib: int = 64) -> Values:
    """Load a checkpoint until time is over."""
    return _read_until(time.time() + seconds, sys.maxsize, lambda: load(path, kib=kib))


_held: Values = {}


def hold(path: str, key: str) -> list[str]:
    """Open a checkpoint, keep it open, and return the names of its tensors."""
    _held[key] = sx.open_checkpoint(path)
    return sorted(_held[key])


def read_held(key: str) -> dict[str, Any]:
    """Read each tensor of a held checkpoint three times; return by name and attempt [shape, values] or an error."""
    found: dict[str, Any] = {}
    for attempt in range(3):
        for name in _held[key]:
            try:
                values = _held[key][name].read()
                found[f"{name} {attempt}"] = [list(values.shape), np.unique(values).tolist()[:4]]
            except sx.StateExchangeError as error:
                found[f"{name} {attempt}"] = f"{type(error).__name__}: {error}"
    return found


def verify(path: str) -> list[str]:
    """Return the findings of `statexchange verify`."""
    from statexchange.report.verify import verify as verify_checkpoint

    return [f"{type(finding).__name__}: {finding!s:.200}" for finding in verify_checkpoint(path).findings]


# Saves


def _saved_state(step: int, kib: int) -> Values:
    return {"model": _state(step, SAVED_TENSORS, kib), "step": step}


def save(path: str, step: int, kib: int = 64) -> None:
    """Save the state of a step at `path`, in the place of the save that is there."""
    sx.save_checkpoint(_saved_state(step, kib), path, overwrite=True)


def load_save(path: str, kib: int = 64) -> list[float]:
    """Load a save and return the steps that its values are of."""
    state = _saved_state(0, kib)
    sx.load_checkpoint(state, path)
    return sorted({*_steps_of(state["model"].items()), float(state["step"])})


def save_at(path: str, step: int, at: float, jitter_s: float) -> None:
    """Save at the clock time `at`, with random delays before each mutating call."""
    while time.time() < at:
        time.sleep(0.0005)
    with _delayed(jitter_s):
        save(path, step)


def save_repeatedly(path: str, seconds: float, kib: int = 64) -> Values:
    """Save until time is over."""
    end, step, errors = time.time() + seconds, 0, Errors()
    while time.time() < end:
        step += 1
        try:
            save(path, step, kib)
        except Exception as error:  # noqa: BLE001
            errors.add(error)
    return {"done": step, **errors.facts()}


def load_saves_repeatedly(path: str, seconds: float, kib: int = 64) -> Values:
    """Load a save again and again until time is over."""
    return _read_until(time.time() + seconds, sys.maxsize, lambda: load_save(path, kib))


def save_adapter(path: str, step: int) -> int:
    """Save a step of a job that has just started, whose base does not train; return the bytes that were linked."""
    return sx.Checkpoints(path, keep=2).save(_adapter(step), step).linked_nbytes


def load_adapter(path: str) -> int:
    """Load the newest save of such a job and return its step; -1 if the base differs."""
    import torch

    state = _adapter(-1)
    with torch.no_grad():
        state["model"]["base"].weight.zero_()
    sx.Checkpoints(path).load(state)
    is_equal = torch.equal(state["model"]["base"].weight, _adapter(0)["model"]["base"].weight)
    return int(state["step"]) if is_equal else -1


def _adapter(step: int) -> Values:
    import torch

    model = torch.nn.ModuleDict({"base": torch.nn.Linear(100, 50), "adapter": torch.nn.Linear(2, 2)})
    model["base"].requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in model["base"].parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    return {"model": model, "step": step}


# Rounds of a workspace, with no communicator

_workspaces: dict[tuple[str, str], Any] = {}


def _workspace(path: str, run: str, fresh: bool = False) -> Any:
    if fresh or (path, run) not in _workspaces:
        _workspaces[path, run] = sx.NFSWorkspace(path, run=run)
    return _workspaces[path, run]


def write_round(path: str, run: str, step: int, rank: int = 0, world_size: int = 2, kib: int = 64) -> None:
    """Write this rank's config and weights as its next round."""
    weights = {"weight": np.full((kib, 256), step, np.float32), "bias": np.full(7, -step, np.float32)}
    with _launched(rank, world_size):
        _workspace(path, run).write_configs_and_weights({"step": step}, weights)


def read_round(path: str, run: str, rank: int = 0, timeout_s: float = 0.0, fresh: bool = False) -> list[float]:
    """Read a rank's newest round and return the steps of its values."""
    with _launched(1 - rank if rank < 2 else 0, 2):
        workspace = _workspace(path, run, fresh)
        config, weights = workspace.read_configs_and_weights_from_rank(rank, timeout_s=timeout_s)
    values = {*np.unique(weights["weight"]).tolist(), *(-np.unique(weights["bias"])).tolist()}
    return sorted({*map(float, values), float(config["step"])})


def write_rounds_repeatedly(path: str, run: str, seconds: float, stop: str) -> int:
    """Write rounds until time is over or `stop` exists."""
    end, step = time.time() + seconds, 1
    while _continues(end, stop):
        step += 1
        write_round(path, run, step)
    return step


def read_rounds_repeatedly(
    path: str, run: str, seconds: float, reads_max: int, timeout_s: float = 0.0, stop: str = ""
) -> Values:
    """Read the newest round until time is over, `reads_max` reads were made or `stop` exists."""
    return _read_until(time.time() + seconds, reads_max, lambda: read_round(path, run, timeout_s=timeout_s), stop)


def write_round_at(path: str, run: str, step: int, rank: int, at: float, jitter_s: float) -> None:
    """Write a round at the clock time `at`, with random delays before each mutating call."""
    while time.time() < at:
        time.sleep(0.0005)
    with _delayed(jitter_s):
        write_round(path, run, step, rank)


# Ranks


def initialize(rank: int, world_size: int, rendezvous: str, timeout_s: float) -> list[int]:
    """Initialise the communicator and return an all_reduce of 1 + rank."""
    import torch

    sx.init("auto", rendezvous=rendezvous, rank=rank, world_size=world_size, timeout_s=timeout_s)
    try:
        tensor = torch.tensor([1 + rank])
        result = sx.get_communicator().all_reduce(tensor)
        return [int(value) for value in (tensor if result is None else result)]
    except BaseException:
        sx.shutdown()
        raise


def shutdown() -> None:
    """Close the communicator."""
    sx.shutdown()


def gather(step: int, workspace: str, ranks: list[int]) -> list[Any]:
    """Gather a tensor and a config of each rank; return them on rank 0."""
    import torch

    rank = sx.get_rank()
    found: list[Any] = []
    with sx.get_tensors_parallel(torch.full((1000,), 10.0 * step + rank), ranks, workspace_path=workspace) as tensors:
        found += [float(tensor[0]) for tensor in tensors or ()]
    with sx.get_configs_parallel({"rank": rank, "step": step}, ranks, workspace_path=workspace) as configs:
        found += [[config["rank"], config["step"]] for config in configs or () if config is not None]
    return found


def publish_sharded(path: str, step: int) -> None:
    """Export three tensors of which each rank holds some rows, and one that is whole on every rank."""
    rank, size = sx.get_rank(), sx.get_world_size()
    rows = 192 // size
    state: Values = {
        f"layer.{i}.weight": np.full((rows, 512), 1000 * step + 10 * rank + i, np.float32) for i in range(3)
    }
    state["bias"] = np.full(100, step, np.float32)
    layout = {"layer.*": {"dim": 0}}
    sx.export_checkpoint(state, path, layout=layout, overwrite=True, max_shard_size="400KB")


def check_sharded(path: str, step: int, world_size: int) -> list[str]:
    """Return the blocks of `publish_sharded`'s checkpoint that have wrong values."""
    checkpoint, wrong = sx.open_checkpoint(path), []
    for i in range(3):
        blocks = np.split(checkpoint[f"layer.{i}.weight"].read(), world_size)
        for rank, block in enumerate(blocks):
            if not (block == 1000 * step + 10 * rank + i).all():
                wrong.append(f"layer.{i}.weight, rank {rank}: {np.unique(block).tolist()[:4]}")
    if not (checkpoint["bias"].read() == step).all():
        wrong.append("bias")
    return wrong


def save_of_rank(path: str, step: int) -> None:
    """Save state that differs between ranks, in the place of the save that is there."""
    state = {f"rank{sx.get_rank()}": np.full((100, 50), step, np.float32), "step": step}
    sx.save_checkpoint(state, path, overwrite=True)


def load_of_rank(path: str) -> list[float]:
    """Load this rank's part of a save and return the steps that it is of."""
    name = f"rank{sx.get_rank()}"
    state: Values = {name: np.zeros((100, 50), np.float32), "step": -1}
    sx.load_checkpoint(state, path, strict=False)
    return sorted({*np.unique(state[name]).tolist(), float(state["step"])})


def load_replica(path: str, names: list[str], readers: Literal["host"] | None) -> list[float]:
    """Load whole tensors of 4 MiB, of which every rank has a copy; return one value of each."""
    state: Values = {name: np.zeros(1 << 20, np.float32) for name in names}
    sx.load_checkpoint(state, path, readers=readers)
    return [float(state[name][-1]) for name in names]


def save_replicas(path: str, names: list[str]) -> None:
    """Save tensors of 4 MiB that all ranks have alike, each of its number."""
    sx.save_checkpoint({name: np.full(1 << 20, number, np.float32) for number, name in enumerate(names)}, path)


# Faults: processes that are killed or interrupted, and random delays

_hook: Callable[[str], None] | None = None
_hook_added = False
_announced = threading.local()  # .call: a call that STORAGE_EVENT announced, for which Python's own event follows


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _hook is None:
        return
    if event == STORAGE_EVENT:
        call = _announced.call = str(arguments[0])
        if call not in LOOKS:
            _hook(call)
        return
    call = MUTATING_CALLS.get(event, "")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT:
        call = "create"
    if call and call != getattr(_announced, "call", ""):
        _hook(call)
    if call:
        _announced.call = ""


@contextlib.contextmanager
def _hooked(hook: Callable[[str], None]) -> Iterator[None]:
    """Call `hook` with the name of each mutating call before it is made, in any thread."""
    global _hook, _hook_added
    if not _hook_added:  # once: audit hooks cannot be removed
        sys.addaudithook(_audit)
        _hook_added = True
    _hook = hook
    try:
        yield
    finally:
        _hook = None


def _delayed(jitter_s: float) -> contextlib.AbstractContextManager[None]:
    """Sleep up to `jitter_s` at random before each mutating call."""
    return _hooked(lambda _: time.sleep(random.random() * jitter_s))


def _in_child(action: Callable[[], None], interrupt_after_s: float | None = None) -> int:
    """Run `action` in a forked process, send it SIGINT after `interrupt_after_s` if given; return its wait status."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(write_end, b"1")  # before this a SIGINT would be lost
            action()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    if interrupt_after_s is not None:
        time.sleep(interrupt_after_s)
        os.kill(pid, signal.SIGINT)
    return os.waitpid(pid, 0)[1]


def list_calls(action: str, arguments: Values) -> list[str]:
    """Run an action in a child and return the mutating calls that it made, in order."""
    reader, writer = os.pipe()
    calls: list[str] = []

    def run() -> None:
        os.close(reader)
        with _hooked(calls.append):
            globals()[action](**arguments)
        os.write(writer, json.dumps(calls).encode())

    try:
        status = _in_child(run)
    finally:
        os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    if status:
        raise RuntimeError(f"{action} failed in a child: wait status {status}")
    return [str(call) for call in json.loads(text)]


def kill_at_call(action: str, arguments: Values, number: int) -> bool:
    """Run an action in a child that kills itself before its `number`-th mutating call; return whether it was killed."""
    left = number

    def count(_: str) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def run() -> None:
        with _hooked(count):
            globals()[action](**arguments)

    status = _in_child(run)
    if status and not os.WIFSIGNALED(status):
        raise RuntimeError(f"{action} failed in a child: exit status {os.WEXITSTATUS(status)}")
    return bool(status)


def interrupt(action: str, arguments: Values, after_s: float) -> int:
    """Run an action in a child that gets SIGINT, as Ctrl-C does, and return its exit status."""

    def run() -> None:
        globals()[action](**arguments)

    return os.waitstatus_to_exitcode(_in_child(run, after_s))


def stderr_of_use(folder: str) -> str:
    """Publish, save and write a workspace in a directory, twice each, and return the output on stderr."""
    state = {"weight": np.zeros(16, np.float32)}
    with tempfile.TemporaryFile() as file, _stderr_to(file.fileno()):
        for number in range(2):
            sx.export_checkpoint(state, f"{folder}/model", overwrite=True)
            sx.open_checkpoint(f"{folder}/model")["weight"].read()
            sx.save_checkpoint(state, f"{folder}/save{number}")
            sx.NFSWorkspace(f"{folder}/workspace", run=f"run{number}").write_configs_and_weights({}, state)
        sys.stderr.flush()
        file.seek(0)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def _stderr_to(fd: int) -> Iterator[None]:
    kept = os.dup(2)
    os.dup2(fd, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
