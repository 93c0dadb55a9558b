"""Skip tests that need something which this machine lacks; the reason names it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache

import pytest
from seccomp import RENAMEAT2

from statexchange.testing.worlds import mpi_missing


def require(*names: str) -> None:
    """Skip the running test unless the programs are on PATH."""
    absent = [name for name in names if shutil.which(name) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)} on this machine")


def require_root() -> None:
    """Skip the running test unless it may change to other users and look at other processes."""
    if os.geteuid() != 0:
        pytest.skip("not root")


def require_mounts() -> None:
    """Skip the running test unless it may make a mount namespace and mount in it."""
    require_root()
    require("unshare", "mount")
    missing = _mounts_missing()
    if missing is not None:
        pytest.skip(missing)


@cache
def _mounts_missing() -> str | None:
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"no mount namespaces: {tried.stderr.strip()}" if tried.returncode else None


def require_refusal_of_exchange() -> None:
    """Skip the running test unless `seccomp.refuse_exchange` knows this processor."""
    if platform.machine() not in RENAMEAT2:
        pytest.skip(f"the number of renameat2 on {platform.machine()} is not known to tests/support/seccomp.py")


def require_mpi() -> None:
    """Skip the running test unless ranks can be started under MPI."""
    missing = mpi_missing()
    if missing is not None:
        pytest.skip(missing)
