"""Files of torch.save and what is merged from them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from statexchange.checkpoint.merge import merge_checkpoint


def merged(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = source.parent / f"{source.name}.out"
    merge_checkpoint(source, out, **options)
    return dict(load_file(out / "model.safetensors"))
