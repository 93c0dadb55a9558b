"""The logits of a Llama, and those of one that was merged by a command and loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from commands import exit_code_of
from transformers import LlamaForCausalLM

TOKENS = torch.arange(8).reshape(1, 8)


def logits(model: Any) -> torch.Tensor:
    """Return what a model computes of `TOKENS`."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


def merged_logits(tmp_path: Path, source: Path, *options: str) -> torch.Tensor:
    """Return the logits of the model that transformers loads from `statexchange merge SOURCE out`."""
    assert exit_code_of("merge", source, tmp_path / "out", *options) == 0
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    return logits(loaded)
