"""dtype names of the three worlds (safetensors, torch, numpy), and bytes as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from statexchange.layout.shards import ITEMSIZE

__all__ = ["DTYPE_NAMES", "LONG_NAMES", "array_over", "elements", "numpy_dtype"]

# The name that torch and numpy (with ml_dtypes) use, to the name that safetensors uses.
DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex128": "C128",
}
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
