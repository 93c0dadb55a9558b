"""What becomes of the memory of gradients that have been copied into buckets."""

from __future__ import annotations

import ctypes
import functools
import os

import torch

__all__ = ["trim_malloc", "raise_malloc_thresholds"]

_LARGEST_OF_HEAP_BYTES = (32 << 20) - (64 << 10)  # above, glibc maps a block by itself and learns nothing from it


@functools.cache
def raise_malloc_thresholds() -> None:
    """Let the C library keep the memory of gradients that have been copied, for those which come next.

    glibc gives back to the kernel what is freed at the end of its heap, to fault it in again in each step, until it
    has seen a block as large as this one freed.
    """
    torch.empty(_LARGEST_OF_HEAP_BYTES, dtype=torch.uint8, device="cpu")


def trim_malloc() -> None:
    """Have the C library give back the memory of gradients that have just moved into new buckets, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
