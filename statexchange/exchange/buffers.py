"""Tensors to bytes and back: torch tensors and numpy arrays as C-ordered host memory with a safetensors dtype name."""

from __future__ import annotations

from typing import Any

import numpy as np

from statexchange.errors import UnsupportedError
from statexchange.layout.arrays import DTYPE_NAMES, LONG_NAMES, array_over

__all__ = ["dtype_name", "from_bytes", "is_tensor", "own_bytes", "same_memory", "settled", "torch_dtype"]


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor (of any kind), a numpy array, or tells its chunks by torch's protocol."""
    return isinstance(value, np.ndarray) or _is_torch(value) or hasattr(type(value), "__create_chunk_list__")


def _is_torch(value: object) -> bool:
    return any(cls.__module__ in ("torch", "torch._tensor") and cls.__name__ == "Tensor" for cls in type(value).__mro__)


def dtype_name(tensor: Any, name: str) -> str:
    """The safetensors name of a tensor's dtype; also the gate for tensors without plain bytes.

    Sparse, meta, masked and quantised tensors, such whose storage was freed, and unknown dtypes are an UnsupportedError
    that names the tensor.
    """
    if type(tensor).__module__.startswith("torch.distributed._shard"):
        raise UnsupportedError("torch's old ShardedTensor cannot be represented: use DTensor", name=name)
    found = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if found is None or getattr(tensor, "is_quantized", False):
        raise UnsupportedError(f"dtype {tensor.dtype} cannot be represented", name=name)
    if isinstance(tensor, np.ma.MaskedArray):
        raise UnsupportedError("a masked array would lose its mask", name=name)
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "__create_chunk_list__"):
        _check_storage(tensor, name)
    return found


def _check_storage(tensor: Any, name: str) -> None:
    if tensor.is_meta or tensor.layout is not _strided():
        kind = "meta" if tensor.is_meta else tensor.layout
        raise UnsupportedError(f"a {kind} tensor has no bytes to move", name=name)
    if not tensor.numel():
        return
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.data_ptr() or tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size():
        raise UnsupportedError(f"this {type(tensor).__name__} has no storage of its own, or it was freed", name=name)


def settled(tensor: Any) -> Any:
    """The tensor itself, once the collective that fills it is done."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def torch_dtype(dtype: str) -> Any:
    """torch's dtype for a safetensors name."""
    import torch

    return getattr(torch, LONG_NAMES[dtype])


def own_bytes(tensor: Any) -> memoryview | None:
    """The memory of a tensor as bytes, if its elements lie there in C order, on the host."""
    if isinstance(tensor, np.ndarray):
        plain = np.asarray(tensor)  # a matrix stays two-dimensional whatever is done to it
        return memoryview(plain.reshape(-1).view(np.uint8).data) if plain.flags.c_contiguous else None
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.numel():
        return memoryview(bytearray())
    import torch

    # A single element counts as contiguous whatever its stride.
    return memoryview(tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


def from_bytes(data: Any, dtype: str, shape: tuple[int, ...], *, as_numpy: bool = False) -> Any:
    """A tensor over `data` (a uint8 numpy array or bytearray), sharing its memory."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if as_numpy:
        return array_over(array, dtype, shape)
    import torch

    if not array.size:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    return torch.from_numpy(array).view(torch_dtype(dtype)).view(shape)


def same_memory(tensor: Any) -> tuple[Any, ...] | None:
    """A key that tied tensors share: the same memory seen in the same way. None where nothing is there to share."""
    if isinstance(tensor, np.ndarray):
        return (
            (tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype) if tensor.size else None
        )
    if not tensor.numel() or not tensor.data_ptr():
        return None
    seen_as = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), *seen_as)


def _strided() -> Any:
    import torch

    return torch.strided
