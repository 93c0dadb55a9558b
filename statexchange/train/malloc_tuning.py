"""Tuning of the C library's malloc for gradients, which are freed and allocated again in every step."""

from __future__ import annotations

import ctypes
import functools
import os

import torch

# glibc allocates larger blocks by mmap whatever it has learned (DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB).
_LARGEST_HEAP_BLOCK_BYTES = (32 << 20) - (64 << 10)


@functools.cache
def raise_malloc_thresholds() -> None:
    """Let glibc keep freed memory of gradients for the gradients of the next step. Not collective.

    Gradients are freed once they are in a bucket. glibc returns free memory at the end of its heap to the kernel, if it
    exceeds a threshold, so every step would fault the same pages in again. It raises this threshold, and the one for
    mmap, to the largest block that was freed so far: so one large block is allocated and freed here.
    """
    torch.empty(_LARGEST_HEAP_BLOCK_BYTES, dtype=torch.uint8, device="cpu")


def trim_malloc() -> None:
    """Return free heap memory to the kernel, if the C library can, after gradients moved into new buckets."""
    if os.name == "posix":
        # Of the process itself, which exists on POSIX alone. Glibc has the function; musl and macOS have none.
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
