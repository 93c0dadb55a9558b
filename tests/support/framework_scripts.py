"""Run the scripts of tools/frameworks, in which frameworks write checkpoints on this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys

from scripts import HOME

SCRIPTS = HOME / "tools" / "frameworks"


def run_framework_script(name: str, *arguments: object, ranks: int | None = None, timeout_s: float = 400) -> None:
    """Run a script alone, or on a number of ranks under torchrun; raise AssertionError if it fails."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(SCRIPTS / name), *map(str, arguments)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
