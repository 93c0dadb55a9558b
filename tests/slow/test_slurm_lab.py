"""Ranks under Slurm: runs tools/slurm_lab, a cluster of two hosts from Debian's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
CANNOT_RUN = 77


def lab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/slurm_lab", *arguments]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(command, cwd=HOME, env=env, capture_output=True, text=True, timeout=800, check=False)


@pytest.mark.slow
@pytest.mark.timeout(850)
def test_the_checks_of_the_lab_pass() -> None:
    """On two hosts and on one, with block and cyclic distribution, with and without MASTER_ADDR; restarts."""
    done = lab()
    if done.returncode == CANNOT_RUN:
        pytest.skip(f"no Slurm on this machine: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("PASS ")]
    assert passed == ["two_hosts", "one_host", "cyclic", "gloo", "with_master_addr", "restart_from_memory", "requeue"]


def test_what_the_machine_lacks_is_named(tmp_path: Path) -> None:
    done = lab("true", PATH=str(tmp_path))
    assert done.returncode == CANNOT_RUN, done.stderr
    assert "cannot run here" in done.stderr
    for program in ("apt-get", "dpkg"):
        assert f"the program {program}" in done.stderr
