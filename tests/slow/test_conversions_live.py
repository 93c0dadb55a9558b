"""Conversions give what the frameworks themselves do: torchtitan's `to_hf`, and Megatron-Core's model its logits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from equality import assert_same
from framework_scripts import run_framework_script
from safetensors.torch import load_file

from statexchange.checkpoint.merge import merge_checkpoint


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
    run_framework_script("torchtitan_write.py", written, *flags, ranks=ranks)
    config = [written / "config.json"]
    merge_checkpoint(written / "checkpoint" / "step-3", tmp_path / "hf", convert="torchtitan:llama3", files_from=config)
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(written / "to_hf.safetensors"))


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
    run_framework_script("megatron_write.py", written, *geometry.split(), *model.split(), ranks=ranks)
    run_framework_script("megatron_logits.py", written, *model.split())
    expected = np.load(written / "logits.npy")
    for kind in ("torch_dist", "legacy"):
        options = {"convert": "megatron:gpt", "files_from": [written / "config.json"]}
        merge_checkpoint(written / kind, tmp_path / kind, **options)  # type: ignore[arg-type]
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32).eval()
        with torch.no_grad():
            found = loaded(torch.arange(8).unsqueeze(0)).logits.numpy()
        assert found.shape == (1, 8, 13)
        np.testing.assert_allclose(found, expected[..., :13], rtol=1e-5, atol=1e-7)
