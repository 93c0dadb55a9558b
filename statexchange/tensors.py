"""One adapter for the tensors of numpy and torch: dtype names, memory in C order, overlap and writability.

numpy and torch are imported inside functions: code that only reads headers needs neither.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt, needing_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import torch

# A dtype as callers give it: torch's, numpy's, or a name such as "bfloat16" or "BF16".
DType: TypeAlias = "str | np.dtype[Any] | torch.dtype"
Array: TypeAlias = "np.ndarray[Any, Any]"
# A dense tensor as callers give it.
TensorLike: TypeAlias = "torch.Tensor | Array"
# Memory that holds the bytes of a tensor.
ByteMemory: TypeAlias = "bytes | bytearray | memoryview | Array"
# For annotations in packages that never import torch.
TorchTensor: TypeAlias = "torch.Tensor"
# For a function that returns the very tensor it was given, so that a Parameter stays a Parameter.
TensorT = TypeVar("TensorT", bound="TensorLike")
# For a function that returns new tensors of the kind it was given: torch tensors or arrays.
TensorKindT = TypeVar("TensorKindT", "torch.Tensor", "Array")

# Bytes per element by safetensors dtype name, in the order in which safetensors sorts tensors in a file.
# C128 is our own name: safetensors has none for it, so files store it as pairs of F64. For a packed dtype these are the
# bytes of a group of elements that fills whole bytes. Code counts in groups; files and tables count in elements.
ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "F4": 1,
    "F6_E2M3": 3,
    "F6_E3M2": 3,
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

# Elements per group, along the last dim. The shapes of torch's float4_e2m1fn_x2 count groups, too.
PACKED = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}

# The names of torch and numpy (with ml_dtypes) to the names of safetensors
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
# With the packed dtypes that torch has. They have no arithmetic and no casts, and numpy lacks them.
_TORCH_NAMES = {**DTYPE_NAMES, "float4_e2m1fn_x2": "F4"}
_SMALL_BYTES = 1 << 16  # of a tensor whose memory `run_bytes` finds sooner than torch makes views of it
# numpy copies unsigned integers faster than opaque bytes; 16 bytes have no integer, so complex stands for them.
_WORD = {1: "u1", 2: "u2", 3: "V3", 4: "u4", 8: "u8", 16: "c16"}


def itemsize_of(dtype: str) -> int:
    """Return the bytes per element of a safetensors dtype; raise ValueError for an unknown name."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ValueError(f"unknown dtype {excerpt(dtype)}")
    return ITEMSIZE[dtype]


def element_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape in elements for one in groups: they differ in the last dim of a packed dtype.

    For F4, of which two elements fill a byte, (5, 8) becomes (5, 16).
    """
    if dtype not in PACKED or not shape:
        return tuple(shape)
    return (*shape[:-1], shape[-1] * PACKED[dtype])


def group_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return a shape in groups for one in elements; None if a row of a packed dtype has no whole number of groups."""
    if dtype not in PACKED:
        return tuple(shape)
    if not shape or shape[-1] % PACKED[dtype]:
        return None
    return (*shape[:-1], shape[-1] // PACKED[dtype])


@functools.lru_cache(maxsize=256)
def name_of_dtype(dtype: Hashable) -> str | None:
    """Return the safetensors name of a dtype of torch or numpy; None if there is none."""
    return _TORCH_NAMES.get(str(dtype).removeprefix("torch."))


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for a safetensors name; ml_dtypes has those that numpy lacks.

    A packed dtype, which both lack, becomes bytes: one or three for each group of elements.
    """
    import numpy as np

    if dtype in PACKED:
        return np.dtype(_WORD[ITEMSIZE[dtype]])
    name = LONG_NAMES[dtype]
    if dtype == "BF16" or dtype.startswith("F8"):
        import ml_dtypes

        added: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return added
    return np.dtype(name)


@functools.cache
def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype for a safetensors name; raise UnsupportedError if torch has none."""
    import torch

    for long_name, name in _TORCH_NAMES.items():
        # Older releases of torch lack the newest dtypes.
        if name == dtype and hasattr(torch, long_name):
            dtype_of_torch: torch.dtype = getattr(torch, long_name)
            return dtype_of_torch
    raise UnsupportedError(f"torch {torch.__version__} has no dtype for {dtype}")


def array_over(data: ByteMemory, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return an array of `dtype` over `data` (a buffer or a uint8 array), sharing its memory."""
    import numpy as np

    flat = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    return flat.view(numpy_dtype(dtype)).reshape(shape)


def elements(data: ByteMemory, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return `data` as an array of integers of the dtype's size, for copying and not for arithmetic."""
    import numpy as np

    return np.frombuffer(data, dtype=np.dtype(_WORD[ITEMSIZE[dtype]])).reshape(shape)


def from_bytes(data: ByteMemory, dtype: str, shape: tuple[int, ...], *, as_numpy: bool = False) -> TensorLike:
    """Return a tensor over `data` (a uint8 numpy array or bytearray), sharing its memory."""
    if as_numpy:
        return array_over(data, dtype, shape)
    array = array_over(data, "U8", (-1,))
    with needing_extra("reading a torch tensor"):
        import torch

    # torch refuses to see no bytes as a wider dtype.
    if not array.size:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    return torch.from_numpy(array).view(torch_dtype(dtype)).view(shape)


def copied_into(data: Array, tensor: TensorLike, dtype: str, *, non_blocking: bool = False) -> TensorLike:
    """Copy a tensor into `data`, the uint8 array of its size; return a tensor or array of its kind over that.

    With `non_blocking` a copy from a GPU is complete once its stream is synchronised.
    """
    import numpy as np

    if isinstance(tensor, np.ndarray):
        array = array_over(data, dtype, tensor.shape)
        array[...] = tensor
        return array
    copy = cast("torch.Tensor", from_bytes(data, dtype, tuple(tensor.shape)))
    with without_grad():
        return copy.copy_(tensor, non_blocking=non_blocking and tensor.is_cuda)


# Casts between floating dtypes: files and replicas are compared by their bits, so numpy and torch must give the same


def converted(array: Array, dtype: str) -> tuple[Array, int]:
    """Cast `array` to another floating dtype, in C order, with the same bits as torch's `to` and `unify_nans`.

    Numbers are rounded to nearest even by way of float32, so that float64 is rounded twice. Numbers out of
    range become infinite; the second result is how many.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        is_double = array.dtype == np.float64 and dtype == "F64"
        single = array if is_double else array.astype(np.float32, copy=False)
        cast = single.astype(numpy_dtype(dtype), order="C", copy=False)
    is_finite = unify_nans(cast.reshape(-1).view(np.uint8), dtype)
    return cast, 0 if is_finite else num_overflows(array, cast)


def unify_nans(data: ByteMemory, dtype: str) -> bool:
    """Replace all NaNs in `data`, the bytes of a floating dtype, by one: positive, quiet, without payload.

    Casting a NaN gives different bits in torch, depending on the processor and on strides, and others in numpy.
    Return whether all elements are finite.
    """
    import numpy as np

    # Of float16: 2 bytes, 0x8000, 0x7c00 and 0x7e00.
    word, sign, infinity, nan = _nan_bits(dtype)
    bits = np.frombuffer(data, f"i{word}")
    # The bits of NaNs alone are greater than those of infinity. Two maxima are cheap, and hardly any tensor has a NaN.
    if _magnitudes_below(bits, infinity, sign):
        return True
    bits[bits & (sign - 1) > infinity] = nan
    return False


def all_finite(data: ByteMemory, dtype: str) -> bool:
    """Whether `data`, the bytes of a floating dtype, has neither NaN nor an infinite element."""
    import numpy as np

    word, sign, infinity, _ = _nan_bits(dtype)
    return _magnitudes_below(np.frombuffer(data, f"i{word}"), infinity, sign)


def num_overflows(source: Any, cast: Any) -> int:
    """Return how many elements of `cast` are infinite and were finite in `source`: both are arrays, or both torch's."""
    if is_torch(cast):
        return int(cast.isinf().sum()) - int(source.isinf().sum())
    import numpy as np

    with np.errstate(invalid="ignore"):  # ml_dtypes warns of NaN
        return int(np.isinf(cast).sum()) - int(np.isinf(source).sum())


def count_overflows(data: ByteMemory, source: str, target: str) -> int:
    """Return how many finite elements of `data`, the bytes of dtype `source`, a cast to `target` makes infinite."""
    import numpy as np

    word, sign, infinity, _ = _nan_bits(source)
    bits, limit = np.frombuffer(data, f"i{word}"), _largest_finite(target, source)
    if limit >= infinity or _magnitudes_below(bits, limit, sign):  # as in `unify_nans`, a fast test for nearly all
        return 0
    return converted(bits.view(numpy_dtype(source)), target)[1]


def _magnitudes_below(bits: Array, limit: int, sign: int) -> bool:
    """Whether all floating numbers, given by their bits as signed integers, are smaller in magnitude than `limit`."""
    # Without the sign, bits order floating numbers as integers. Positive numbers are the largest of signed integers,
    # and negative ones, which have the highest bit, the largest of unsigned integers: no copy without it is made.
    return bool(bits.max(initial=0) < limit and bits.view(f"u{bits.itemsize}").max(initial=0) < limit + sign)


@functools.cache
def _largest_finite(dtype: str, source: str) -> int:
    """Return the bits, in dtype `source`, of the largest finite number of `dtype`; those of infinity if it has none."""
    import numpy as np

    # The number before infinity, or before NaN in a dtype without infinity
    bits = np.array([_nan_bits(dtype).infinity - 1], f"i{ITEMSIZE[dtype]}")
    with np.errstate(all="ignore"):
        wide = bits.view(numpy_dtype(dtype)).astype(np.float64).astype(numpy_dtype(source))
    return int(wide.view(f"i{ITEMSIZE[source]}")[0])


def nonfinite(data: ByteMemory, dtype: str) -> tuple[Array, Array] | None:
    """Return masks of the NaNs and of the infinite elements in `data`; None, after a fast test, if there are none.

    A complex number is NaN if one of its parts is, else infinite if one of them is. `data` are the bytes of the dtype.
    """
    import numpy as np

    if dtype[0] not in "BCF" or dtype == "BOOL" or dtype in PACKED:
        return None
    # The fast test goes by the bits of infinity, or of a NaN if there is none: here these are those of -0, or no sign.
    has_sign = dtype not in ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
    if has_sign and all_finite(data, {"C64": "F32", "C128": "F64"}.get(dtype, dtype)):
        return None
    array = array_over(data, dtype, (-1,))
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of NaN
        nan = np.isnan(array)
        infinite = np.isinf(array) & ~nan
    return (nan, infinite) if nan.any() or infinite.any() else None


class _NanBits(NamedTuple):
    """Bytes per element of a floating dtype, and as integers its sign bit, infinity and NaN."""

    itemsize: int
    sign: int
    infinity: int
    nan: int


@functools.cache
def _nan_bits(dtype: str) -> _NanBits:
    import numpy as np

    kind = numpy_dtype(dtype)
    infinity, nan = np.array([np.inf, np.nan], kind).view(f"i{kind.itemsize}").tolist()
    return _NanBits(kind.itemsize, 1 << 8 * kind.itemsize - 1, infinity, nan)


# Live tensors


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor of any kind, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_tensor(value: object) -> bool:
    """Whether `value` is a numpy array, a torch tensor, or an object with torch's ``__create_chunk_list__``."""
    return is_tensor_type(type(value))


def _is_tensor_type(kind: type) -> bool:
    """Whether values of a type are tensors, see `is_tensor`."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return True
    is_numpy = numpy is not None and issubclass(kind, numpy.ndarray)
    return is_numpy or hasattr(kind, "__create_chunk_list__")


# Asked of each value of a state several times, and nearly always of the same few types: then no Python code runs.
is_tensor_type: Callable[[type], bool] = functools.lru_cache(1024)(_is_tensor_type)


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor: it has placements and a local part."""
    return hasattr(value, "placements") and hasattr(value, "to_local")


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor that a placement divides; of torch's placements, only those that do have a `dim`."""
    if not hasattr(tensor, "placements") or not is_dtensor(tensor):  # the attribute first: most have none
        return False
    return any(hasattr(placement, "dim") for placement in tensor.placements)


def replicated_part(tensor: Any, name: str | None, advice: str) -> torch.Tensor:
    """Return this rank's copy of a replicated DTensor; raise UnsupportedError with `advice` for other placements."""
    if not all(placement.is_replicate() for placement in tensor.placements):
        text = f"a DTensor with placements {list(tensor.placements)} lies on several ranks: {advice}"
        raise UnsupportedError(text, name=name)
    local: torch.Tensor = tensor.to_local()
    return local


def without_grad() -> AbstractContextManager[object]:
    """Return torch's `no_grad`, or a context that does nothing if torch is not imported.

    Entering it takes as long as the rest of what is done to a small tensor: loops over tensors are in one.
    """
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.no_grad()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector during short work that makes many objects without cycles.

    Describing, planning and reading make about a hundred objects for each tensor, all of which live until the end. The
    collector would visit them again and again, which takes half of the time. Ranks may wait for each other in between.
    If the blocks of several threads overlap, the end of the block that began first resumes the collector, even while
    others still run.
    """
    # A user may have disabled it for the whole job.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def wait_tensor(tensor: Any) -> Any:
    """Wait for the collective that fills a tensor, if one is running, and return the tensor."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


class TensorMemory(NamedTuple):
    """The memory of a live tensor. It is looked at once: asking torch takes longer than copying a small tensor.

    Attributes:
        tensor: the tensor; what a collective had still to fill has arrived.
        dtype: the safetensors name of the dtype.
        device: "cpu", or the device as torch writes it.
        begin: the address of the first byte.
        end: the address after the last byte; `begin` if the tensor has no memory.
        is_run: whether `run_bytes` returns it: on the host, in C order, and with the bits of the elements.
        is_plain: whether `check_writable` has no objection.
    """

    tensor: TensorLike
    dtype: str
    device: str
    begin: int
    end: int
    is_run: bool = False
    is_plain: bool = False


def _old_sharded_tensor(name: str) -> UnsupportedError:
    return UnsupportedError("torch's old ShardedTensor cannot be represented: use DTensor", name=name)


def checked_dtype(tensor: TensorLike, name: str) -> str:
    """Return the safetensors name of a tensor's dtype; raise UnsupportedError, naming the tensor, if there is none."""
    if type(tensor).__module__.startswith("torch.distributed._shard"):
        raise _old_sharded_tensor(name)
    dtype = name_of_dtype(tensor.dtype)
    if dtype is None:
        raise UnsupportedError(f"dtype {tensor.dtype} cannot be represented", name=name)
    if dtype in PACKED and not len(tensor.shape):
        raise UnsupportedError(f"a tensor of {tensor.dtype} without dims cannot be represented", name=name)
    return dtype


def memory_of(tensor: TensorLike, name: str) -> TensorMemory:
    """Describe the memory of a tensor that lies in this process as a whole; of a DTensor, pass the local part.

    Raises:
        UnsupportedError: the dtype is unknown, or the tensor is sparse, meta, masked or quantised, or its storage was
            freed; names the tensor.
    """
    import numpy as np

    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed._shard"):  # first, as it has hardly any attribute
        raise _old_sharded_tensor(name)
    if kind.__name__ == "AsyncCollectiveTensor":
        tensor = wait_tensor(tensor)
    begin, end = check_dense(tensor, name)
    dtype = name_of_dtype(tensor.dtype)
    # Only now: of a quantised tensor, that says more than its dtype.
    if dtype is None or dtype in PACKED:
        dtype = checked_dtype(tensor, name)
    if isinstance(tensor, np.ndarray):
        flags = tensor.flags
        return TensorMemory(tensor, dtype, "cpu", begin, end, flags.c_contiguous, flags.writeable and flags.contiguous)
    is_contiguous, is_cpu = tensor.is_contiguous(), tensor.is_cpu
    # A view that conjugates or negates shows other values than the bits in memory.
    is_run = is_contiguous and is_cpu and not tensor.is_conj() and not tensor.is_neg()
    device = "cpu" if is_cpu else str(tensor.device)
    return TensorMemory(tensor, dtype, device, begin, end, is_run, is_contiguous and not tensor.is_inference())


def check_dense(tensor: TensorLike, name: str | None = None) -> tuple[int, int]:
    """Raise UnsupportedError unless a tensor has contiguous or strided memory of its own.

    Return the addresses of its first byte and after its last one, which are equal if it has no memory.
    """
    import numpy as np

    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject or hasattr(tensor, "mask"):
            kind = "an array of objects" if tensor.dtype.hasobject else "a masked array"
            raise UnsupportedError(f"only dense tensors can be exchanged, not {kind}", name=name)
        first = last = tensor.__array_interface__["data"][0]
        if not tensor.size:
            return first, first
        # The address is that of element [0, 0, ...]: along a dim of negative stride all others lie before it.
        for size, stride in zip(tensor.shape, tensor.strides, strict=True):
            first += min(0, stride * (size - 1))
            last += max(0, stride * (size - 1))
        return first, last + tensor.itemsize
    if hasattr(tensor, "materialize"):  # UninitializedParameter and UninitializedBuffer
        text = "this parameter has no shape yet: call the module once, on every rank"
        raise InvalidArgumentError(text, name=name)
    # torch is imported, as the tensor exists; an import statement would take longer than the test.
    strided = sys.modules["torch"].strided
    if tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.layout is not strided:
        kinds = {"quantized": tensor.is_quantized, "meta": tensor.is_meta, "nested": tensor.is_nested}
        kind = next((kind for kind, holds in kinds.items() if holds), str(tensor.layout)[6:])
        advice = ': the module\'s to_empty(device="cpu") gives it memory to load into' if tensor.is_meta else ""
        raise UnsupportedError(f"only dense tensors can be exchanged, not a {kind} one{advice}", name=name)
    # Elements from the first to the last one; torch has no negative strides.
    span = tensor.numel()
    if not span:
        return 0, 0
    if not tensor.is_contiguous():
        span = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            span += (size - 1) * stride
    address = tensor.data_ptr()
    # A subclass, as of torchao, that keeps its values in other tensors has no memory itself.
    if hasattr(tensor, "__tensor_flatten__") and not address:
        parts, _ = tensor.__tensor_flatten__()
        kind = f"{type(tensor).__module__.partition('.')[0]}'s {type(tensor).__name__}"
        text = f"{kind} is made of several tensors ({', '.join(parts)[:100]}): give what dequantize() returns"
        raise UnsupportedError(f"{text}, or save it with the library that made it", name=name)
    itemsize = tensor.element_size()
    nbytes = span * itemsize
    # A storage that was resized to nothing, as FSDP does between steps, leaves a tensor that looks whole.
    if not address or tensor.untyped_storage().nbytes() < tensor.storage_offset() * itemsize + nbytes:
        raise UnsupportedError(f"this {type(tensor).__name__} has no storage of its own, or it was freed", name=name)
    return address, address + nbytes


def check_writable(tensor: TensorLike, name: str | None = None) -> None:
    """Raise InvalidArgumentError or UnsupportedError unless a dense tensor is writable and no two elements overlap."""
    import numpy as np

    shape: tuple[int, ...] = tuple(tensor.shape)
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.writeable:
            raise InvalidArgumentError("this array is read-only and cannot be filled", name=name)
        if tensor.flags.contiguous:
            return
        # numpy's strides are in bytes and need not be multiples of the item's size: its bytes are one dim more.
        overlaps = _overlaps((*shape, tensor.itemsize), (*tensor.strides, 1))
    else:
        if tensor.is_inference() and not sys.modules["torch"].is_inference_mode_enabled():
            raise UnsupportedError("an inference tensor cannot be changed outside torch.inference_mode()", name=name)
        if tensor.is_contiguous():
            return
        overlaps = _overlaps(shape, tensor.stride())
    if overlaps:
        raise InvalidArgumentError("several elements share memory: clone() it first", name=name)


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a strided tensor share memory."""
    if 0 in shape:
        return False
    # A dim of size 1 has any stride. Where each stride is beyond all that lies within it, no two elements meet.
    dims = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    span = 1  # the distance from the first to the last element, over the dims seen so far
    is_clear = True
    for stride, size in dims:
        if not stride:
            return True
        is_clear = is_clear and stride >= span
        span += stride * (size - 1)
    if is_clear:
        return False
    import numpy as np

    # Dims may interlock and not share memory, as shape (2, 2) of strides (3, 2): 0, 2, 3, 5. Mark what each one uses.
    marks = np.zeros(span, np.bool_)
    sizes = [size for _, size in dims]
    np.lib.stride_tricks.as_strided(marks, sizes, [stride for stride, _ in dims])[...] = True
    return int(np.count_nonzero(marks)) < math.prod(sizes)


def as_torch(array: Array) -> torch.Tensor:
    """Return a torch tensor over a dense array in C order; raise UnsupportedError if torch lacks the dtype."""
    import torch

    name = array.dtype.name
    if name not in DTYPE_NAMES or not array.dtype.isnative:
        shown = array.dtype.str if array.dtype.isbuiltin else array.dtype
        raise UnsupportedError(f"arrays of {shown} cannot be exchanged")
    # 1: of numpy itself; 2: registered by another package, here ml_dtypes
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, name))


def as_numpy(tensor: torch.Tensor) -> Array:
    """Return an array over the memory of a torch tensor on the host."""
    import torch

    name = name_of_dtype(tensor.dtype)
    assert name is not None  # `memory_of` has accepted it
    # torch knows no dtypes of ml_dtypes: it gives integers of the same size, which numpy then sees as the dtype.
    if name != "BF16" and not name.startswith("F8") and name not in PACKED:
        return tensor.numpy()
    return tensor.view({1: torch.uint8, 2: torch.uint16}[tensor.itemsize]).numpy().view(numpy_dtype(name))


def mark_changed(tensors: Iterable[object]) -> None:
    """Increment the version of torch tensors, as `copy_` does: backward through their old values then raises."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.autograd.graph.increment_version([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])


def own_bytes(tensor: TensorLike) -> memoryview | None:
    """Return the memory of a tensor as bytes; None if its elements do not lie in C order, or not on the host."""
    import numpy as np

    if isinstance(tensor, np.ndarray):
        is_run = tensor.flags.c_contiguous
    else:
        is_run = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return run_bytes(tensor) if is_run else None


def run_bytes(tensor: TensorLike) -> memoryview:
    """Return the memory of a tensor that is one run on the host, see `TensorMemory`, as bytes to be used at once.

    Of a small tensor they do not block `resize_` of its storage, after which they lie in memory that was freed.
    """
    import numpy as np

    if isinstance(tensor, np.ndarray):
        plain = np.asarray(tensor)  # np.matrix would stay two-dimensional
        return memoryview(plain.reshape(-1).view(np.uint8).data)
    nbytes = tensor.nbytes
    if not nbytes:  # `numpy` would keep its storage from being resized
        return memoryview(bytearray())
    storage = tensor.untyped_storage()
    # What torch does below takes longer than to copy a small tensor.
    if nbytes <= _SMALL_BYTES and storage.nbytes() >= tensor.storage_offset() * tensor.itemsize + nbytes:
        import ctypes  # late: commands that only read headers do not need it

        block: Any = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        block.storage = storage  # keeps the memory alive
        # By numpy, as the bytes of a ctypes array cannot be compared with others: their format is "<B".
        return memoryview(np.frombuffer(block, np.uint8).data)
    import torch

    # A single element counts as contiguous whatever its stride. `as_strided` refuses a storage that was freed or shrunk
    # since the tensor was made, for which `numpy` would give other memory; and it makes a plain tensor of a subclass.
    return memoryview(tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)


def same_bytes(a: ByteMemory, b: ByteMemory) -> bool:
    """Whether two buffers of one size have the same bytes. Not collective."""
    import numpy as np

    # By the largest words that fill the buffers, which are compared fastest: of 4 bytes if there are 12.
    size = math.gcd(len(a), 8)
    return not np.count_nonzero(np.frombuffer(a, f"u{size}") != np.frombuffer(b, f"u{size}"))


def overlap_groups(tensors: Iterable[TensorLike]) -> list[list[int]]:
    """Return the numbers of dense tensors whose memory overlaps, as `overlapping` does."""
    memories = []
    for tensor in tensors:
        is_on_host = getattr(tensor, "is_cpu", True)  # arrays have no such attribute
        memories.append(TensorMemory(tensor, "", "cpu" if is_on_host else str(tensor.device), *check_dense(tensor)))
    return overlapping(memories)


def overlapping(memories: Iterable[TensorMemory]) -> list[list[int]]:
    """Return the numbers of tensors whose spans in memory, from first to last byte, overlap, a list for each group.

    Columns of one matrix are a group, although they have no byte in common. Groups are in the order of memory.
    """
    spans = []
    for number, memory in enumerate(memories):
        if memory.begin < memory.end:
            spans.append((memory.device, memory.begin, memory.end, number))
    # In order of address, a tensor overlaps one before it if it begins before the last end so far.
    spans.sort()
    groups: list[list[int]] = [[]]
    last_device, last_end = "", 0
    for device, begin, end, number in spans:
        if device != last_device or begin >= last_end:
            groups.append([])
            last_device, last_end = device, 0
        groups[-1].append(number)
        last_end = max(last_end, end)
    return [group for group in groups if len(group) > 1]


def same_memory(tensor: Any) -> tuple[Any, ...] | None:
    """Return a key that tied tensors share: memory, dtype, shape and strides. None if the tensor has no memory."""
    if is_array(tensor):
        if not tensor.size:
            return None
        return tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype
    # Of all that have no memory, the address is 0.
    if not tensor.numel() or not tensor.data_ptr():
        return None
    seen_as = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), *seen_as)
