"""The random number generators of a process as one object with a state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class RandomState:
    """The random number generators of this process: torch's, CUDA's, numpy's and Python's own.

    It has no state of its own: `state_dict` reads the global generators, and `load_state_dict` sets them. Saved and
    loaded as an entry of the state, ``{"model": model, "random": RandomState()}``, it lets a resumed job draw the
    random numbers that it would have drawn without the interruption. Each rank saves its own generators, and gets them
    back on the same number of ranks. Another number is refused, as ranks would draw equal numbers: pass
    ``exclude="random"`` to the load, and seed the ranks again.

    Only the current CUDA device's generator is saved, and only if the process has used CUDA. A load without CUDA
    ignores it.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> saves = sx.Checkpoints("saves")
        >>> state = {"random": sx.integrations.RandomState()}
        >>> report = saves.save(state, 1)
        >>> drawn = torch.rand(3)
        >>> report = saves.load(state)
        >>> torch.equal(torch.rand(3), drawn)
        True
    """

    per_rank = True

    def state_dict(self) -> dict[str, object]:
        """Return the states of the generators. Not collective."""
        # No tensors or arrays: each rank has its own values, and `verify` reports tensors that differ between ranks.
        state: dict[str, object] = {
            "python": random.getstate(),
            "numpy": _without_arrays(np.random.get_state(legacy=False)),
            "torch": _to_bytes(torch.get_rng_state()),
        }
        # Asking a process that has not used CUDA for its generator would make a context, which takes GPU memory.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = _to_bytes(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to what `state_dict` has returned. Not collective.

        Args:
            state: the states.
        """
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_from_bytes(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_from_bytes(state["cuda"]))


def _without_arrays(state: object) -> object:
    """Return the state of numpy's generator with lists in place of arrays; numpy's set_state takes both."""
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _to_bytes(state: torch.Tensor) -> bytes:
    """Return the bytes of a generator's state, which is a tensor of uint8."""
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    # A copy: torch warns of the memory of `bytes`, which cannot be written.
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
