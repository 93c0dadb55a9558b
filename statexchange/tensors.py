"""One adapter for the tensors of numpy and torch: dtype names, memory in C order, overlap and writability.

numpy and torch are imported late: whoever only looks at headers needs neither.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import torch

__all__ = [
    "DTYPE_NAMES",
    "ITEMSIZE",
    "LONG_NAMES",
    "DType",
    "array_over",
    "as_numpy",
    "as_torch",
    "byte_view",
    "check_dense",
    "check_writable",
    "converted",
    "dtype_name",
    "elements",
    "from_bytes",
    "is_array",
    "is_dtensor",
    "is_tensor",
    "is_torch",
    "itemsize_of",
    "mark_changed",
    "numpy_dtype",
    "own_bytes",
    "replicated_part",
    "same_memory",
    "settled",
    "torch_dtype",
    "unify_nans",
]

# A dtype as callers give it: torch's, numpy's, or a name such as "bfloat16" or "BF16".
DType: TypeAlias = "str | np.dtype[Any] | torch.dtype"

# Bytes per element by safetensors dtype name, in the order in which safetensors ranks them in a file.
# C128 is ours: safetensors has no name for it, so files store it as pairs of F64.
ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C128": 16,
}

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


def itemsize_of(dtype: str) -> int:
    """Bytes per element of a safetensors dtype name; an unknown name is a ValueError."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ValueError(f"unknown dtype {excerpt(dtype)}")
    return ITEMSIZE[dtype]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's dtype for a safetensors name; ml_dtypes supplies what numpy lacks."""
    import numpy as np

    name = LONG_NAMES[dtype]
    if dtype == "BF16" or dtype.startswith("F8"):
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def torch_dtype(dtype: str) -> Any:
    """torch's dtype for a safetensors name."""
    import torch

    return getattr(torch, LONG_NAMES[dtype])


def array_over(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of `dtype` over `data` (a buffer or a uint8 array), sharing its memory."""
    import numpy as np

    flat = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    return flat.view(numpy_dtype(dtype)).reshape(shape)


def elements(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """`data` as an array of words of the dtype's size: for moving, not for arithmetic."""
    import numpy as np

    return np.frombuffer(data, dtype=np.dtype(_WORD[ITEMSIZE[dtype]])).reshape(shape)


def from_bytes(data: Any, dtype: str, shape: tuple[int, ...], *, as_numpy: bool = False) -> Any:
    """A tensor over `data` (a uint8 numpy array or bytearray), sharing its memory."""
    import numpy as np

    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if as_numpy:
        return array_over(array, dtype, shape)
    import torch

    if not array.size:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    return torch.from_numpy(array).view(torch_dtype(dtype)).view(shape)


# Casts between floating dtypes: where bits are written or compared they are the same whoever casts, numpy or torch


def converted(array: Any, dtype: str) -> Any:
    """`array` in a floating dtype of another name, in C order: every number as torch's `to` gives it, and one NaN.

    Numbers are rounded to nearest even by way of float32, so that float64 is rounded twice, and what is out of range
    becomes infinite.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        if array.dtype != np.float64 or dtype != "F64":
            array = array.astype(np.float32, copy=False)
        found = array.astype(numpy_dtype(dtype), order="C", copy=False)
    unify_nans(found.reshape(-1).view(np.uint8), dtype)
    return found


def unify_nans(data: Any, dtype: str) -> None:
    """Give all NaNs in `data`, the bytes of a floating dtype, its one NaN: positive, quiet, without payload.

    Of one NaN torch makes others on other processors and for other strides, and numpy others again.
    """
    import numpy as np

    word, sign, infinity, nan = _nan_bits(dtype)
    bits = np.frombuffer(data, f"i{word}")
    # Two looks at the greatest cost little, and hardly any tensor has a NaN: only its bits lie beyond infinity's.
    if bits.max(initial=0) > infinity or bits.view(f"u{word}").max(initial=0) > infinity + sign:
        bits[bits & (sign - 1) > infinity] = nan


@functools.cache
def _nan_bits(dtype: str) -> tuple[int, int, int, int]:
    """A floating dtype's bytes per element, and as whole numbers its sign, its infinity and its NaN."""
    import numpy as np

    kind = numpy_dtype(dtype)
    infinity, nan = np.array([np.inf, np.nan], kind).view(f"i{kind.itemsize}").tolist()
    return kind.itemsize, 1 << 8 * kind.itemsize - 1, infinity, nan


# Live tensors


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array; numpy is not imported to find out."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor of any kind; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_tensor(value: object) -> bool:
    """Whether `value` is a numpy array, a torch tensor, or an object with torch's ``__create_chunk_list__``."""
    return is_torch(value) or is_array(value) or hasattr(type(value), "__create_chunk_list__")


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor: it has placements and a local part."""
    return hasattr(value, "placements") and hasattr(value, "to_local")


def replicated_part(tensor: Any, name: str | None, advice: str) -> Any:
    """This rank's copy of a DTensor that every rank of its mesh has whole; else an UnsupportedError with `advice`."""
    if not all(placement.is_replicate() for placement in tensor.placements):
        text = f"a DTensor placed as {list(tensor.placements)} has other parts on other ranks: {advice}"
        raise UnsupportedError(text, name=name)
    return tensor.to_local()


def settled(tensor: Any) -> Any:
    """The tensor itself, once the collective that fills it is done."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def dtype_name(tensor: Any, name: str) -> str:
    """The safetensors name of a tensor's dtype; also the gate for tensors without plain bytes.

    Sparse, meta, masked and quantised tensors, such whose storage was freed, and unknown dtypes are an UnsupportedError
    that names the tensor.
    """
    if type(tensor).__module__.startswith("torch.distributed._shard"):
        raise UnsupportedError("torch's old ShardedTensor cannot be represented: use DTensor", name=name)
    found = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if is_array(tensor) or not hasattr(tensor, "__create_chunk_list__"):
        check_dense(tensor, name)
    if found is None:
        raise UnsupportedError(f"dtype {tensor.dtype} cannot be represented", name=name)
    return found


def check_dense(tensor: Any, name: str | None = None) -> None:
    """Raise UnsupportedError unless a tensor's elements lie in memory of its own, one beside the other or strided."""
    if is_array(tensor):
        if tensor.dtype.hasobject or hasattr(tensor, "mask"):
            kind = "array of objects" if tensor.dtype.hasobject else "masked array"
            raise UnsupportedError(f"only dense tensors can be exchanged, not a {kind}", name=name)
        return
    if hasattr(tensor, "materialize"):  # UninitializedParameter and UninitializedBuffer
        text = "this parameter has no shape yet: call the module once, on every rank"
        raise InvalidArgumentError(text, name=name)
    if tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.layout is not _strided():
        kinds = {"quantized": tensor.is_quantized, "meta": tensor.is_meta, "nested": tensor.is_nested}
        kind = next((kind for kind, holds in kinds.items() if holds), str(tensor.layout)[6:])
        raise UnsupportedError(f"only dense tensors can be exchanged, not a {kind} one", name=name)
    if not tensor.numel():
        return
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.data_ptr() or tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size():
        raise UnsupportedError(f"this {type(tensor).__name__} has no storage of its own, or it was freed", name=name)


def check_writable(tensor: Any, name: str | None = None) -> None:
    """Raise InvalidArgumentError, or UnsupportedError, unless every element of a dense tensor can be written alone."""
    shape: tuple[int, ...] = tuple(tensor.shape)
    if is_array(tensor):
        if not tensor.flags.writeable:
            raise InvalidArgumentError("this array is read-only, and is to be filled", name=name)
        if tensor.flags.contiguous:
            return
        overlaps = _overlaps((*shape, tensor.itemsize), (*tensor.strides, 1))
    else:
        import torch

        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise UnsupportedError("an inference tensor cannot be changed outside torch.inference_mode()", name=name)
        if tensor.is_contiguous():
            return
        overlaps = _overlaps(shape, tensor.stride())
    if overlaps:
        raise InvalidArgumentError("several elements lie in one place of memory: clone() it first", name=name)


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a strided tensor lie in one place."""
    if 0 in shape:
        return False
    dims = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    span = 1  # the elements from the first to the last, of the dims with the smallest strides
    is_clear = True
    for stride, size in dims:
        if not stride:
            return True
        is_clear = is_clear and stride >= span
        span += stride * (size - 1)
    if is_clear:
        return False
    import numpy as np

    marks = np.zeros(span, np.bool_)  # dims that interlock may still share no place: mark each that is used
    np.lib.stride_tricks.as_strided(marks, [size for _, size in dims], [stride for stride, _ in dims])[...] = True
    return int(np.count_nonzero(marks)) < math.prod(size for _, size in dims)


def as_torch(array: Any) -> Any:
    """A torch tensor over the memory of a dense array in C order; UnsupportedError if torch has not its dtype."""
    import torch

    name = array.dtype.name
    if name not in DTYPE_NAMES or not array.dtype.isnative:
        shown = array.dtype.str if array.dtype.isbuiltin else array.dtype
        raise UnsupportedError(f"arrays of {shown} cannot be exchanged")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, name))


def as_numpy(tensor: Any) -> Any:
    """An array over the memory of a torch tensor on the host."""
    import torch

    name = DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
    if name != "BF16" and not name.startswith("F8"):
        return tensor.numpy()
    return tensor.view({1: torch.uint8, 2: torch.uint16}[tensor.itemsize]).numpy().view(numpy_dtype(name))


def mark_changed(tensors: Iterable[Any]) -> None:
    """Tell autograd, as `copy_` does, that torch tensors change: backward through their old values then fails."""
    import torch

    torch.autograd.graph.increment_version([tensor for tensor in tensors if is_torch(tensor)])


def own_bytes(tensor: Any) -> memoryview | None:
    """The memory of a tensor as bytes, if its elements lie there in C order, on the host."""
    import numpy as np

    if is_array(tensor):
        plain = np.asarray(tensor)  # a matrix stays two-dimensional whatever is done to it
        return memoryview(plain.reshape(-1).view(np.uint8).data) if plain.flags.c_contiguous else None
    if tensor.device.type != "cpu":
        return None
    if not tensor.numel():
        return memoryview(bytearray())
    run = byte_view(tensor)
    return None if run is None else memoryview(run.numpy())


def byte_view(tensor: Any) -> Any:
    """The elements of a torch tensor as one dim of uint8, its own memory, if they lie there in C order; else None."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    import torch

    # A single element counts as contiguous whatever its stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_memory(tensor: Any) -> tuple[Any, ...] | None:
    """A key that tied tensors share: the same memory seen in the same way. None where nothing is there to share."""
    if is_array(tensor):
        where = tensor.__array_interface__["data"][0]
        return (where, tensor.shape, tensor.strides, tensor.dtype) if tensor.size else None
    if not tensor.numel() or not tensor.data_ptr():
        return None
    seen_as = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), *seen_as)


def _strided() -> Any:
    import torch

    return torch.strided
