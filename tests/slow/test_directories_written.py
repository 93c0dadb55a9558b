"""Directories that the installed frameworks write now, in all variants of the scripts in tools/frameworks."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from equality import assert_same
from framework_scripts import SCRIPTS
from safetensors.torch import load_file
from scripts import warm_command

from statexchange.checkpoint.merge import merge_checkpoint

pytestmark = pytest.mark.slow

# The script, its packages, its arguments, and the directory with the model and the expected one.
CASES = [
    ("trainer", ("transformers", "accelerate"), "plain", "checkpoint-2", "expected"),
    ("trainer", ("transformers", "accelerate"), "sharded", "checkpoint-2", "expected"),
    ("trainer", ("transformers", "accelerate"), "full", "checkpoint-2", "expected"),
    ("accelerate", ("accelerate",), "plain", "state", "expected"),
    ("accelerate", ("accelerate",), "bin", "state", "expected"),
    ("accelerate", ("accelerate",), "sharded", "state", "expected"),
    ("accelerate", ("accelerate",), "full", "state", "expected"),
    ("torch", (), "", "fsdp1", "fsdp1"),
    ("torch", (), "", "dcp_safetensors", "dcp_safetensors"),
    ("lightning", ("lightning",), "sharded", "last.ckpt", "expected"),
    ("lightning", ("lightning",), "full", "last.ckpt", "expected"),
    ("lightning", ("lightning",), "fsdp1", "last.ckpt", "expected"),
    ("lightning", ("lightning",), "fsdp1", "full.ckpt", "expected"),
    ("verl", ("verl", "tensordict"), "", "run/global_step_1/actor", "expected"),
    ("verl", ("verl", "tensordict"), "lora", "run/global_step_1/actor", "expected"),
    ("verl", ("verl", "tensordict"), "fsdp1", "run/global_step_1/actor", "expected"),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("framework", "packages", "kind", "directory", "expected"), CASES)
def test_what_a_framework_writes_is_merged_bit_by_bit(
    tmp_path: Path, framework: str, packages: tuple[str, ...], kind: str, directory: str, expected: str
) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"no framework: {missing[0]}: tools/frameworks/{framework}_write.py says what it needs")
    out = tmp_path / "out"
    out.mkdir()
    script = SCRIPTS / f"{framework}_write.py"
    command, environ = warm_command(("torchrun", "--standalone", "--nproc-per-node", "2"), script.read_text())
    done = subprocess.run(
        [*command, script, out, *filter(None, [kind])],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    merge_checkpoint(out / directory, tmp_path / "merged")
    assert_same(load_file(tmp_path / "merged/model.safetensors"), load_file(out / f"{expected}.safetensors"))
