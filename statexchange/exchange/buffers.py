"""Tensors to bytes and back: torch tensors and numpy arrays as C-ordered host memory with a safetensors dtype name."""

from __future__ import annotations

from typing import Any

import numpy as np

from statexchange.errors import UnsupportedError
from statexchange.layout.shards import ITEMSIZE

__all__ = ["dtype_name", "element_view", "from_bytes", "host_bytes", "is_tensor", "numpy_dtype", "same_memory", "torch_dtype"]

_TORCH_NAMES = {
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
_BY_NAME = {name: torch_name for torch_name, name in _TORCH_NAMES.items()}


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor (of any kind) or a numpy array."""
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: object) -> bool:
    return any(cls.__module__ in ("torch", "torch._tensor") and cls.__name__ == "Tensor" for cls in type(value).__mro__)


def dtype_name(tensor: Any, name: str) -> str:
    """The safetensors name of a tensor's dtype; quantised and unknown dtypes are an UnsupportedError naming the tensor."""
    found = _TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if found is None or getattr(tensor, "is_quantized", False):
        raise UnsupportedError(f"dtype {tensor.dtype} cannot be represented", name=name)
    return found


def torch_dtype(dtype: str) -> Any:
    """torch's dtype for a safetensors name."""
    import torch

    return getattr(torch, _BY_NAME[dtype])


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's dtype for a safetensors name; ml_dtypes supplies what numpy lacks."""
    name = _BY_NAME[dtype]
    if dtype == "BF16" or dtype.startswith("F8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def host_bytes(tensor: Any, name: str) -> memoryview:
    """A tensor's elements in C order as bytes; the tensor's own memory where it is contiguous on the host.

    Sparse, meta and quantised tensors are an UnsupportedError that names the tensor.
    """
    if isinstance(tensor, np.ndarray):
        return memoryview(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        raise UnsupportedError(f"a {'meta' if tensor.is_meta else tensor.layout} tensor has no bytes to move", name=name)
    with torch.no_grad():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return memoryview(plain.reshape(-1).view(torch.uint8).numpy())


def from_bytes(data: Any, dtype: str, shape: tuple[int, ...], *, as_numpy: bool = False) -> Any:
    """A tensor over `data` (a uint8 numpy array or bytearray), sharing its memory."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if as_numpy:
        return array.view(numpy_dtype(dtype)).reshape(shape)
    import torch

    if not array.size:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.from_numpy(array).view(torch_dtype(dtype)).view(shape)


def same_memory(tensor: Any) -> tuple[Any, ...] | None:
    """A key that tied tensors share: the same memory seen in the same way. None where nothing is there to share."""
    if isinstance(tensor, np.ndarray):
        return (tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype) if tensor.size else None
    if tensor.is_meta or not tensor.numel() or tensor.layout is not _strided():
        return None
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _strided() -> Any:
    import torch

    return torch.strided


def element_view(data: memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """`data` as an array of opaque elements of the dtype's size: for moving, not for arithmetic."""
    return np.frombuffer(data, dtype=np.dtype(f"V{ITEMSIZE[dtype]}")).reshape(shape)
