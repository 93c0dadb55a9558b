"""tools/slurm_lab, a Slurm cluster of two hosts from Debian's packages; .ci/run runs its checks."""

import os
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[2]
CANNOT_RUN = 77


def lab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/slurm_lab", *arguments]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(command, cwd=HOME, env=env, capture_output=True, text=True, timeout=800, check=False)


def test_what_the_machine_lacks_is_named(tmp_path: Path) -> None:
    done = lab("true", PATH=str(tmp_path))
    assert done.returncode == CANNOT_RUN, done.stderr
    assert "cannot run here" in done.stderr
    for program in ("apt-get", "dpkg"):
        assert f"the program {program}" in done.stderr
