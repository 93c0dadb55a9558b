"""Files of ranks that are merged by a layout."""

from pathlib import Path
from typing import Any

import pytest
from random_layouts import State
from safetensors.torch import save_file

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    StateExchangeError,
)


def write_ranks(path: Path, *states: State, name: str = "rank{}.safetensors") -> Path:
    """Write a plain safetensors file for each rank."""
    path.mkdir()
    for rank, state in enumerate(states):
        save_file({key: value.contiguous() for key, value in state.items()}, path / name.format(rank))
    return path


def refuse(error: type[StateExchangeError], match: str, path: Path, layout: Any, *states: State) -> StateExchangeError:
    """Check that a merge by the layout raises this error and writes nothing; return the error."""
    source = write_ranks(path / "in", *states)
    with pytest.raises(error, match=match) as caught:
        merge_checkpoint(source, path / "out", layout=layout)
    assert not (path / "out").exists()
    return caught.value
