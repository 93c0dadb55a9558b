"""Reductions: which of them can be right, how a backend computes them, and the arithmetic on parts in this process.

Those that cannot be right are refused before anything is sent. Parts of one dtype are combined in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from statexchange.errors import InvalidArgumentError, NumericOverflowError, UnsupportedError

if TYPE_CHECKING:
    from statexchange.comm.wait import Wait

__all__ = [
    "COMPLEX",
    "FLOATS",
    "HALVES",
    "INTS",
    "NO_FINISH",
    "OPS",
    "Finish",
    "Reduction",
    "from_bytes",
    "reduce_gathered",
    "reduce_parts",
    "reduces_locally",
    "to_bytes",
]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
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


class Reducing(Protocol):
    """The part of a backend that a reduction needs; the module of backends imports this one."""

    rank: int
    world_size: int

    @property
    def reductions(self) -> dict[object, Reduction]: ...
    def reduces(self, op: str, dtype: torch.dtype) -> bool: ...
    def all_gather_bytes(self, data: bytes, wait: Wait) -> Sequence[bytes | bytearray]: ...
    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None: ...
    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None: ...
    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None: ...


def reduces_locally(op: str, dtype: torch.dtype) -> bool:
    """Whether `reduce_parts` is right for this op and dtype. Not collective."""
    return dtype in FLOATS or dtype in INTS or (dtype in COMPLEX and op in ("sum", "prod"))


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor. Not collective."""
    return bytes(tensor.cpu().view(torch.uint8).numpy().data) if tensor.numel() else b""


def from_bytes(data: bytes | bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose bytes these are. Not collective."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def reduce_parts(into: torch.Tensor, parts: Sequence[torch.Tensor], op: str, finish: Finish = NO_FINISH) -> None:
    """Write the reduction of `parts`, in their order, into `into`, which may be one of them. Not collective.

    Sums and products of float16 and bfloat16 are computed in float32, unless there are only two parts and nothing to
    finish. So the result is rounded once, and a sum may leave the range of float16 before it is divided.
    """
    combine = _COMBINE[op]
    halves = into.dtype in HALVES and op in ("sum", "prod")
    if len(parts) == 2 and not (halves and finish != NO_FINISH):
        combine(parts[0], parts[1], out=into)
        finish(into)
        return
    result = parts[0].float() if halves else parts[0].clone()
    for part in parts[1:]:
        combine(result, part, out=result)
    finish(result)
    into.copy_(result)


def reduce_gathered(backend: Reducing, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
    """Reduce `tensor` in place from the bytes of all ranks; right for every dtype and on every backend. Collective."""
    gathered = backend.all_gather_bytes(to_bytes(tensor), wait)
    parts = [from_bytes(data, tensor.dtype).to(tensor.device) for data in gathered]
    reduce_parts(tensor, parts, op, finish)


_INT64_MAX = 2**63 - 1
OPS = ("sum", "avg", "min", "max", "prod")


def _op_name(op: object) -> str:
    """Return one of OPS for a name or a torch ReduceOp. Not collective."""
    name = op.lower() if isinstance(op, str) else str(op).rpartition(".")[2].lower()
    name = {"product": "prod"}.get(name, name)
    if name not in OPS:
        raise InvalidArgumentError(f"unknown op {op!r}; known: {', '.join(OPS)}")
    return name


def _range_of_results(limits: torch.iinfo, factor: int) -> tuple[int, int]:
    """Return the least and the greatest int64 whose product with `factor` lies within `limits`."""
    if factor == 0:
        return -_INT64_MAX - 1, _INT64_MAX
    low, high = (limits.min, limits.max) if factor > 0 else (-limits.max, -limits.min)
    size = abs(factor)
    return max(-(-low // size), -_INT64_MAX - 1), min(high // size, _INT64_MAX)


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of one dtype by one op on one backend. Made by `of`, which refuses what cannot be right."""

    op: str
    dtype: torch.dtype
    finish: Finish
    native: bool
    """Whether the backend reduces the dtype itself; else the tensor is converted."""
    text: str
    """The operation as text, which ranks compare."""

    @classmethod
    def of(cls, op: object, dtype: torch.dtype, scale: float, backend: Reducing) -> Reduction:
        """Return how `op` reduces `dtype` on `backend`; raise UnsupportedError if no result can be right.

        Not collective.
        """
        factor = float(scale)
        if factor != 1:
            return cls._of(_op_name(op), dtype, factor, backend)
        cached: Reduction | None = backend.reductions.get((op, dtype))
        if cached is None:
            cached = backend.reductions[op, dtype] = cls._of(_op_name(op), dtype, 1.0, backend)
        return cached

    @classmethod
    def _of(cls, op: str, dtype: torch.dtype, scale: float, backend: Reducing) -> Reduction:
        plain = "sum" if op == "avg" else op
        exact = dtype in INTS or dtype == torch.bool
        if not exact and dtype not in FLOATS + COMPLEX:
            raise UnsupportedError(f"{dtype} can be moved but not reduced: convert it first")
        if dtype in COMPLEX and plain in ("min", "max"):
            raise UnsupportedError(f"{op} of {dtype}: complex numbers have no order")
        if exact and op == "avg":
            raise UnsupportedError(f"avg of {dtype}: convert it to a floating dtype first")
        if exact and scale != 1 and (dtype == torch.bool or not float(scale).is_integer()):
            raise UnsupportedError(f"{dtype} cannot be scaled by {scale}: convert it to a floating dtype first")
        native = backend.reduces(plain, dtype)
        if dtype in COMPLEX and plain == "sum":  # torch.add multiplies by 1, which makes complex infinities NaN
            native = False
        if exact:  # sums and products must be checked for overflow
            native = native and dtype != torch.bool and plain in ("min", "max") and scale == 1
        finish = Finish(backend.world_size if op == "avg" else 1, scale)
        text = plain if finish.divisor == 1 else "avg"
        if scale != 1:
            text += f" times {scale!r}"
        return cls(plain, dtype, finish, native, text)

    def all_reduce(self, backend: Reducing, tensor: torch.Tensor, wait: Wait) -> None:
        """Reduce `tensor` over all ranks, in place. Collective."""
        if self.native:
            backend.all_reduce(tensor, self.op, self.finish, wait)
        else:
            tensor.copy_(self._by_conversion(backend, tensor, wait))

    def reduce(self, backend: Reducing, tensor: torch.Tensor, root: int, wait: Wait) -> None:
        """Reduce `tensor` over all ranks, in place on `root` only. Collective."""
        if self.native:
            backend.reduce(tensor, self.op, root, self.finish, wait)
            return
        result = self._by_conversion(backend, tensor, wait)
        if backend.rank == root:
            tensor.copy_(result)

    def reduce_scatter(self, backend: Reducing, tensor: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Write this rank's part of the reduction into `into`. Collective."""
        if self.native:
            backend.reduce_scatter(tensor, into, self.op, self.finish, wait)
        else:
            into.copy_(self._by_conversion(backend, tensor, wait).view(backend.world_size, -1)[backend.rank])

    def _by_conversion(self, backend: Reducing, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Return the reduction of a copy of `tensor` in a dtype that the backend reduces right, or by Backend's own."""
        if self.dtype == torch.bool:
            return self._run(backend, tensor.to(torch.uint8), "max" if self.op in ("sum", "max") else "min", wait)
        if self.dtype in INTS:
            return self._integers(backend, tensor, wait)
        if self.dtype in COMPLEX:
            return self._complex(backend, tensor, wait)
        wide = tensor.to(torch.float32) if self.dtype in HALVES else tensor.clone()
        if self.op in ("min", "max"):
            result = self._with_nan(backend, wide, wait)
        else:
            result = self._run(backend, wide, self.op, wait)
        self.finish(result)
        return result

    def _run(self, backend: Reducing, tensor: torch.Tensor, op: str, wait: Wait) -> torch.Tensor:
        backend.all_reduce(tensor, op, NO_FINISH, wait)
        return tensor

    def _with_nan(self, backend: Reducing, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Reduce min or max, and NaN apart: with NaN a transport's result depends on the order of ranks."""
        nan = tensor.isnan()
        anywhere = self._run(backend, nan.to(torch.uint8), "max", wait).bool()
        least = float("-inf") if self.op == "max" else float("inf")
        return self._run(backend, tensor.masked_fill_(nan, least), self.op, wait).masked_fill_(anywhere, float("nan"))

    def _integers(self, backend: Reducing, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Reduce in int64, and in float64 too where int64 could wrap; raise on all ranks if a result does not fit."""
        factor = int(self.finish.scale)
        result = self._run(backend, tensor.to(torch.int64, copy=True), self.op, wait)
        lowest, highest = _range_of_results(torch.iinfo(self.dtype), factor)
        outside = (result < lowest) | (result > highest)
        if self.op == "prod" or (self.op == "sum" and self.dtype == torch.int64):
            # A result that has wrapped is off by a multiple of 2**64, far more than float64 is.
            approximate = self._run(backend, tensor.double(), self.op, wait)
            outside |= approximate.sub_(result).abs_() > 2.0**63
        if bool(outside.any()) or abs(factor) > _INT64_MAX:
            raise NumericOverflowError(f"the {self.op} over ranks does not fit into {self.dtype}: convert it first")
        return result * factor

    def _complex(self, backend: Reducing, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        result = tensor.clone()
        if self.op == "sum":
            self._run(backend, torch.view_as_real(result).view(-1), "sum", wait)
            self.finish(result)
        else:
            reduce_gathered(backend, result, self.op, self.finish, wait)
        return result
