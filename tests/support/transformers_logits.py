"""The logits of models of transformers, and of merged checkpoints that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from commands import exit_code_of

TOKENS = torch.arange(8).reshape(1, 8)


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Return the logits of a model; it is in eval mode from then on."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits
    return found


def merged_logits(folder: Path, source: Path, *options: str) -> torch.Tensor:
    """Return the logits of the Llama that transformers loads from `statexchange merge SOURCE FOLDER/out`.

    Raises AssertionError unless the directory has exactly the tensors of the model.
    """
    from transformers import LlamaForCausalLM

    assert exit_code_of("merge", source, folder / "out", *options) == 0
    loaded, report = LlamaForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(report.values()), report
    return logits(loaded)
