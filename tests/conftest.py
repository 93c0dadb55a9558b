"""The distribution of the suite over processes, and fixtures that all test files share."""

from __future__ import annotations

import compileall
import gc
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from bytecode import compile_imports
from commands import LAUNCHER_VARIABLES, CommandLine
from filelock import FileLock
from hypothesis import HealthCheck, settings
from programs import require_mounts, require_mpi
from scripts import BIN
from warm_python import warm_python

from statexchange.errors import MissingExtraError
from statexchange.processes import usable_cores
from statexchange.testing import worlds
from statexchange.testing.worlds import mpi_missing

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; ranks would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share the cores
sys.dont_write_bytecode = False  # else each worker and rank rewrites the assertions of its test files again
# Processes of tests write no bytecode: what all of them import is compiled here, before any starts. Where a write comes
# short, as in tests of full disks and of limits on the size of files, Python 3.13.0 leaves truncated bytecode.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.environ.setdefault("STATEXCHANGE_TEST_SESSION", os.urandom(8).hex())  # what `warm_python` has for all its workers
if "PYTEST_XDIST_WORKER" not in os.environ:
    for _folder in ("statexchange", "tests"):
        compileall.compile_dir(Path(__file__).parents[1] / _folder, rx=re.compile(r"/test_[^/]*$"), quiet=2)
    compile_imports()
# On a busy machine any example may take seconds.
settings.register_profile("statexchange", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("statexchange")


# The fork server of `run_ranks`, and its ranks under mpiexec, are themselves forked from a process with torch. The
# launcher's own tests, in test_testing*.py, also start scripts of their own, with new interpreters. Open MPI, whose
# program is prterun, knows its ranks by their process ids.
_new_fork_server = worlds._fork_server


def _fork_server() -> multiprocessing.context.ForkServerContext:
    is_needed = "transformers" in sys.modules or "PYTEST_XDIST_WORKER" in os.environ  # a worker has tests of all files
    multiprocessing.set_executable(warm_python("transformers" if is_needed else "torch"))
    return _new_fork_server()


worlds._fork_server = _fork_server
if not (BIN / "prterun").exists():
    worlds._python = warm_python


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those marked gpu: the others have more ranks than most machines have GPUs."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run the tests of one file in this process, which starts sooner than a worker; more files by two workers per core.

    Tests wait for more than half of their time: for ranks that start, for disks, and for deadlines.
    """
    paths = {argument.partition("::")[0] for argument in config.args}
    if len(paths) == 1 and all(path.endswith(".py") for path in paths):
        return 0
    return 2 * usable_cores()


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers from a process with torch and transformers, from which ranks and scripts are forked, too."""
    for spec in specs:
        spec.python = warm_python("transformers")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker begin a directory at another file: it then finds in the cache what the others have compiled.

    Half of the time to import a test file is for the rewriting of its assertions.
    """
    report = yield
    worker, count = _worker(collector.config)
    if isinstance(collector, pytest.Directory):
        begin = len(report.result) * worker // count
        report.result = report.result[begin:] + report.result[:begin]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let every worker begin with tests that may take long, so that at the end none runs one while the others are idle.

    xdist gives each worker an equal share of consecutive tests, and one that has ended takes from the end of another's.
    """
    items.sort(key=lambda item: item.path)  # the order of all workers is the same again
    limits: dict[Any, float] = {}
    # By what is marked: a test, or a file whose tests share fixtures. Those that wait for the demo, which is run once
    # for all workers, are one worker's.
    long: dict[Any, list[pytest.Item]] = {}
    others = []
    for item in items:
        marked, marker = next(item.iter_markers_with_node("timeout"), (None, None))
        if marker is None:
            others.append(item)
        else:
            key = "demo" if "demo" in getattr(item, "fixturenames", ()) else marked
            limits[key] = marker.args[0]
            long.setdefault(key, []).append(item)
    groups = [long[marked] for marked in sorted(long, key=lambda marked: -limits[marked])]
    _, count = _worker(config)
    dealt: list[pytest.Item] = []
    for worker in range(count):
        share = (len(items) - len(dealt)) // (count - worker)
        begun = [item for group in groups[worker::count] for item in group]
        num_others = max(share - len(begun), 0)
        dealt += begun + others[:num_others]
        del others[:num_others]
    items[:] = dealt


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what has been collected out of each garbage collection, which takes half a second otherwise."""
    gc.collect()
    gc.freeze()


def _worker(config: pytest.Config) -> tuple[int, int]:
    """Return the number of this worker and how many there are; without workers 0 of 1."""
    worker: dict[str, Any] = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    return int(worker["workerid"].removeprefix("gw")), worker["workercount"]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Let the id of a case show what pytest would only number: a dtype of torch, or a container of plain values.

    Of a long text or number it shows the beginning.
    """
    if isinstance(val, str | bytes | int) and len(str(val)) > 100:
        return str(val)[:60]
    is_shown = isinstance(val, dict | list | tuple) or type(val).__name__ == "dtype"
    return repr(val)[:60] if is_shown and _is_plain(val) else None


def _is_plain(value: object) -> bool:
    """Whether all workers write a value alike: objects may have an address in their text, and sets another order."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bytes | int | float) or type(value).__name__ == "dtype"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that starts ranks under MPI if this machine cannot."""
    try:
        return (yield)
    except MissingExtraError:
        if mpi_missing() is not None:
            require_mpi()
        raise


@pytest.fixture
def sweep_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a directory for a sweep over all events: in memory for a slow test, as syncs of a disk would take long."""
    is_slow = request.node.get_closest_marker("slow") is not None
    if not is_slow or not os.path.isdir("/dev/shm") or shutil.disk_usage("/dev/shm").free < 1 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="statexchange-sweep-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables by which a command takes itself for a rank of a job, or writes no colours."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], plain_environment: None) -> CommandLine:
    """Run command lines of `statexchange` in this process, in a plain environment."""
    return CommandLine(capsys)


@pytest.fixture
def mounts() -> None:
    """Skip the test unless it may mount in a namespace of its own."""
    require_mounts()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> tuple[Path, str]:
    """Run `statexchange demo` once for all workers; return the directory that it kept, and its output.

    It trains for 30 steps instead of 100: more of them would only repeat the same calls.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    kept, printed = shared / "demo", shared / "demo.json"
    with FileLock(f"{printed}.lock"):
        if not printed.exists():
            command = [BIN / "statexchange", "demo", "--steps", "30", "--keep", kept]
            done = subprocess.run(command, capture_output=True, text=True, timeout=800)
            printed.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    code, text, errors = json.loads(printed.read_text())
    assert code == 0, errors
    return kept, text


@pytest.fixture
def store() -> Iterator[Any]:
    """Return an empty object store, which lives in this process."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def s3_server() -> Iterator[None]:
    """Start an S3 server on this host; yield the environment variables by which s3fs finds it."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    from werkzeug.serving import make_server  # moto needs it

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # The application of S3 alone: moto's own server finds out at each request which of all services is meant.
    running = make_server("127.0.0.1", 0, server.create_backend_app("s3"), threaded=True)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.server_port}")
        patch.setenv("AWS_MAX_ATTEMPTS", "2")
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # an instance made before has another environment
        yield
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def s3(s3_server: None) -> str:
    """Return the URL of an empty bucket."""
    bucket = f"bucket-{os.urandom(6).hex()}"
    address = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT"), timeout=60).close()
    return f"s3://{bucket}"
