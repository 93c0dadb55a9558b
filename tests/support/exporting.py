"""Parts of tensors that ranks export, and the error that all of them get."""

from pathlib import Path
from typing import Any

import pytest
import torch

import statexchange as sx


def part(
    rank: int, world_size: int, rows: int, columns: int, dim: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a rank's chunk of arange(rows * columns), cut along `dim` as torch.chunk does; it may be empty."""
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).to(dtype)
    chunks = torch.chunk(whole, world_size, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


# Failures


def check_refusal(
    error: type[Exception], match: str, state: dict[str, torch.Tensor], out: Path, **options: Any
) -> None:
    """Check that all ranks raise the same error, that nothing is left, and that the communicator still works."""
    with pytest.raises(error, match=match):
        sx.export_checkpoint(state, out, **options)
    comm = sx.get_communicator()
    comm.barrier()
    assert not [p.name for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]
    comm.barrier()
