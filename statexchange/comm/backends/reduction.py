"""The arithmetic of reductions in this process: parts of one dtype are combined in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# `minimum` and `maximum` give NaN where any part has one, whatever the order of the parts.
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """The last step of a reduction: division by `divisor`, then multiplication by `scale`."""

    divisor: int = 1
    scale: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Apply it to `tensor`, in place."""
        if tensor.is_complex():  # a product with a real number, taken as complex, would turn infinities into NaN
            tensor = torch.view_as_real(tensor)
        if self.divisor != 1:
            tensor.div_(self.divisor)
        if self.scale != 1:
            tensor.mul_(self.scale)


NO_FINISH = Finish()


def reduces_locally(op: str, dtype: torch.dtype) -> bool:
    """Whether `reduce_parts` is right for this op and dtype. Not collective."""
    return dtype in FLOATS or dtype in INTS or (dtype in COMPLEX and op in ("sum", "prod"))


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor. Not collective.

    ``torch.tensor([1, 2], dtype=torch.int16)`` becomes ``b"\\x01\\x00\\x02\\x00"``.
    """
    return bytes(tensor.cpu().view(torch.uint8).numpy().data)


def from_bytes(data: bytes | bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose bytes these are. Not collective."""
    if not data:  # which `frombuffer` refuses
        return torch.empty(0, dtype=dtype, device="cpu")
    # Torch warns of memory that cannot be written, as that of bytes.
    return torch.frombuffer(bytearray(data), dtype=dtype)


def reduce_parts(into: torch.Tensor, parts: Sequence[torch.Tensor], op: str, finish: Finish = NO_FINISH) -> None:
    """Write the reduction of `parts`, in their order, into `into`, which may be one of them. Not collective.

    Sums and products of float16 and bfloat16 are computed in float32, unless there are only two parts and nothing to
    finish. So the result is rounded once, and a sum may leave the range of float16 before it is divided.
    """
    combine = _COMBINE[op]
    halves = into.dtype in HALVES and op in ("sum", "prod")
    # Torch adds two halves in float32, too, and rounds once.
    if len(parts) == 2 and not (halves and finish != NO_FINISH):
        combine(parts[0], parts[1], out=into)
        if finish is not NO_FINISH:  # a call less for small tensors
            finish(into)
        return
    # Not into `into` at once, as it may be one of the parts.
    result = parts[0].float() if halves else parts[0].clone()
    for part in parts[1:]:
        combine(result, part, out=result)
    finish(result)
    into.copy_(result)
