"""DeepSpeed itself writes checkpoints on this machine's CPU, and reports what is in them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from equality import assert_same
from framework_scripts import run_framework_script
from zero_files import check_written, merged, reported


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
def test_a_checkpoint_that_deepspeed_writes_now_has_what_it_reports(kind: str, ranks: int, tmp_path: Path) -> None:
    run_framework_script("deepspeed_write.py", tmp_path / "written", kind, ranks=ranks, timeout_s=250)
    check_written(tmp_path / "written", kind, tmp_path)
    if kind == "zero3":
        assert_same(merged(tmp_path / "written/universal", tmp_path), reported(tmp_path / "written", kind, "oracle"))
