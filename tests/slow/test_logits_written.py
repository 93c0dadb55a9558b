"""Models of transformers that frameworks train and save now: merged by one command, they compute the same logits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from merged_logits import merged_logits
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parents[2] / "tools" / "frameworks"

# The framework, the arguments of its script after OUT, the checkpoint, what was computed, and options of the merge.
UNWRAPPED = ("--files-from", "config.json", "--section", "model", "--rename", r"^model\.=")
CASES = [
    *(("deepspeed", [kind], kind, f"{kind}.safetensors", ()) for kind in ("llama0", "llama1", "llama2", "llama3")),
    ("deepspeed", ["llama3"], "universal_llama3", "llama3.safetensors", ()),
    ("torch_checkpointing", ["llama"], "state", "expected.safetensors", ("--files-from", "config.json")),
    ("lightning", ["sharded", "llama"], "last.ckpt", "expected.safetensors", UNWRAPPED),
    ("lightning", ["full", "llama"], "last.ckpt", "expected.safetensors", UNWRAPPED),
]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "arguments", "checkpoint", "computed", "options"), CASES)
def test_the_logits_are_those_of_the_framework_s_model(
    tmp_path: Path,
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
    arguments: list[str],
    checkpoint: str,
    computed: str,
    options: tuple[str, ...],
) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"no framework: {framework}: tools/frameworks/{framework}_write.py says what it needs")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    out = memory_path  # torch_checkpointing writes to tmpfs alone
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, SCRIPTS / f"{framework}_write.py", out, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.chdir(out)
    assert torch.equal(merged_logits(tmp_path, out / checkpoint, *options), load_file(out / computed)["logits"])
