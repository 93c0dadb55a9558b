"""How the suite is spread over processes, and what its processes do once for all of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from filelock import FileLock
from programs import require_mounts, require_mpi
from scripts import BIN

from statexchange.errors import MissingExtraError
from statexchange.testing.worlds import mpi_missing

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share the cores


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run the tests of one file in this process, which starts sooner than a worker."""
    paths = {argument.partition("::")[0] for argument in config.args}
    return 0 if len(paths) == 1 and all(path.endswith(".py") for path in paths) else None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that starts ranks under MPI where that cannot be."""
    try:
        return (yield)
    except MissingExtraError:
        if mpi_missing() is not None:
            require_mpi()
        raise


@pytest.fixture
def mounts() -> None:
    """Skip the test unless it may mount in a namespace of its own."""
    require_mounts()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> tuple[Path, str]:
    """The directory that `statexchange demo` has kept, and what it has printed; run once for all workers."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    kept, printed = shared / "demo", shared / "demo.json"
    with FileLock(f"{printed}.lock"):
        if not printed.exists():
            command = [BIN / "statexchange", "demo", "--keep", kept]
            done = subprocess.run(command, capture_output=True, text=True, timeout=800)
            printed.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    code, text, errors = json.loads(printed.read_text())
    assert code == 0, errors
    return kept, text
