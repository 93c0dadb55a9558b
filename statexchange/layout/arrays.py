"""dtype names of the three worlds (safetensors, torch, numpy), and bytes as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from statexchange.layout.shards import DTYPE_NAMES, ITEMSIZE

__all__ = ["DTYPE_NAMES", "LONG_NAMES", "array_over", "elements", "numpy_dtype"]

LONG_NAMES = {name: long_name for long_name, name in DTYPE_NAMES.items()}
# Unsigned words move faster than opaque ones; complex carries 16 bytes.
_WORD = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's dtype for a safetensors name; ml_dtypes supplies what numpy lacks."""
    name = LONG_NAMES[dtype]
    if dtype == "BF16" or dtype.startswith("F8"):
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def array_over(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of `dtype` over `data` (a buffer or a uint8 array), sharing its memory."""
    flat = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    return flat.view(numpy_dtype(dtype)).reshape(shape)


def elements(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """`data` as an array of words of the dtype's size: for moving, not for arithmetic."""
    return np.frombuffer(data, dtype=np.dtype(_WORD[ITEMSIZE[dtype]])).reshape(shape)
