"""Open MPI: tools/test_on_open_mpi.sh runs the MPI tests on its wheel; a part of them runs here."""

import os
import subprocess
import sys

import pytest
from scripts import HOME


@pytest.mark.slow
@pytest.mark.timeout(850)
def test_ranks_of_open_mpi_agree_on_local_ranks_and_move_values() -> None:
    wanted = "launcher_counts or (test_comm and mpi-2)"
    done = subprocess.run(
        ["bash", "tools/test_on_open_mpi.sh", "-k", wanted, "-p", "no:cacheprovider"],
        cwd=HOME,
        env={**os.environ, "PYTHON": sys.executable, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Open MPI v5" in done.stdout
