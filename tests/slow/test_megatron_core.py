"""Megatron-Core itself writes checkpoints of many geometries on this machine's CPU, and loads them for comparison."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from framework_scripts import run_framework_script
from megatron_states import check_expected, check_legacy

GEOMETRIES = [
    (1, "--singleton --optimizer dp_reshardable"),
    (2, "--tp 2 --qk-norm --optimizer fully_reshardable"),
    (2, "--pp 2 --tied --optimizer plain"),
    (2, "--pp 2 --vpp 2 --layers 4"),
    (2, "--pp 2 --layers 3 --first-stage-layers 1"),
    (4, "--tp 2 --pp 2 --bias --gelu --optimizer dp_reshardable"),
    (4, "--tp 2 --ep 2 --moe"),
]


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("psutil") is None,
    reason='no framework: megatron-core and psutil: pip install ".[frameworks]"',
)
@pytest.mark.parametrize(("ranks", "options"), GEOMETRIES, ids=lambda value: str(value))
def test_a_checkpoint_that_megatron_writes_now_has_what_it_loads(ranks: int, options: str, tmp_path: Path) -> None:
    out = tmp_path / "written"
    run_framework_script("megatron_write.py", out, *options.split(), ranks=ranks)
    run_framework_script("megatron_write.py", out, "--expected")
    assert check_expected(out) > 5
    assert check_legacy(out, tmp_path) > 10
