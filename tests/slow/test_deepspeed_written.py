"""DeepSpeed itself writes checkpoints on this machine's CPU, and says what is in them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from stored import assert_same
from zero_files import check_written, merged, reported

SCRIPT = Path(__file__).parents[2] / "tools" / "frameworks" / "deepspeed_write.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason='no framework: deepspeed: pip install ".[frameworks]"')
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("zero0", 2),
        ("zero1", 2),
        ("zero1", 3),
        ("zero1_fp32_gradients", 3),
        ("zero2", 3),
        ("zero3", 1),
        ("zero3", 3),
        ("pipeline", 4),
        ("experts", 2),
    ],
)
def test_a_checkpoint_that_deepspeed_has_written_just_now(kind: str, ranks: int, tmp_path: Path) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, SCRIPT, tmp_path / "written", kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    check_written(tmp_path / "written", kind, tmp_path)
    if kind == "zero3":
        assert_same(merged(tmp_path / "written/universal", tmp_path), reported(tmp_path / "written", kind, "oracle"))
