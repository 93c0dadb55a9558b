"""Conversions beside the frameworks themselves: torchtitan's `to_hf`, and the logits of Megatron-Core's own model."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from statexchange.checkpoint.merge import merge_checkpoint

SCRIPTS = Path(__file__).parents[2] / "tools" / "frameworks"


def run(*command: str | Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def torchrun(ranks: int, *command: str | Path) -> None:
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command)


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.skipif(
    find_spec("torchtitan") is None,
    reason="no framework: torchtitan: tools/frameworks/torchtitan_write.py has the commands",
)
@pytest.mark.parametrize(
    ("ranks", "flags"), [(2, ["separate"]), (2, []), (3, ["model"]), (2, ["tied"])], ids=lambda value: str(value)
)
def test_torchtitans_checkpoint_becomes_what_its_to_hf_gives(ranks: int, flags: list[str], tmp_path: Path) -> None:
    written = tmp_path / "written"
    torchrun(ranks, SCRIPTS / "torchtitan_write.py", written, *flags)
    config = [written / "config.json"]
    merge_checkpoint(written / "checkpoint" / "step-3", tmp_path / "hf", convert="torchtitan:llama3", files_from=config)
    found, expected = load_file(tmp_path / "hf" / "model.safetensors"), load_file(written / "to_hf.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("psutil") is None,
    reason='no framework: megatron-core and psutil: pip install ".[frameworks]"',
)
@pytest.mark.parametrize(
    ("ranks", "geometry", "model"),
    [
        (2, "--tp 2", "--heads 4"),
        (4, "--tp 2 --pp 2", "--heads 4 --bias"),
        (2, "--pp 2", "--heads 4 --tied --singleton"),
    ],
)
def test_megatrons_model_and_the_converted_one_have_equal_logits(
    ranks: int, geometry: str, model: str, tmp_path: Path
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    written = tmp_path / "written"
    torchrun(ranks, SCRIPTS / "megatron_write.py", written, *geometry.split(), *model.split())
    run(SCRIPTS / "megatron_logits.py", written, *model.split())
    expected = np.load(written / "logits.npy")
    for kind in ("torch_dist", "legacy"):
        options = {"convert": "megatron:gpt", "files_from": [written / "config.json"]}
        merge_checkpoint(written / kind, tmp_path / kind, **options)  # type: ignore[arg-type]
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32).eval()
        with torch.no_grad():
            found = loaded(torch.arange(8).unsqueeze(0)).logits.numpy()
        assert found.shape == (1, 8, 13)
        np.testing.assert_allclose(found, expected[..., :13], rtol=1e-5, atol=1e-7)
