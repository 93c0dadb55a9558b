"""The options of a BucketReducer that must be equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from statexchange.errors import InvalidArgumentError
from statexchange.train.reducers import operation

__all__ = ["BucketOptions", "BucketType"]

BucketType = Literal["gradient", "weight", "parameter"]

_CHUNK_ALIGN_BYTES = 32


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """Options of a BucketReducer as its constructor explains them; its text is compared between ranks."""

    bucket_bytes: int
    align_bytes: int
    chunking: bool
    fusion: bool
    delay_reduce: bool
    bucket_type: BucketType
    buckets: tuple[tuple[str, ...], ...] | None
    scale: float | None

    @classmethod
    def names(cls) -> set[str]:
        """The names of all options."""
        return set(cls.__slots__)

    def check(self) -> None:
        """Raise InvalidArgumentError unless every option is possible."""
        if not _is_integer(self.bucket_bytes) or self.bucket_bytes < 1:
            raise InvalidArgumentError("bucket_bytes must be a positive number of bytes", found=self.bucket_bytes)
        if not _is_integer(self.align_bytes) or self.align_bytes < 8 or self.align_bytes & (self.align_bytes - 1):
            raise InvalidArgumentError("align_bytes must be a power of two, 8 or more", found=self.align_bytes)
        if self.bucket_type not in ("gradient", "weight", "parameter"):
            raise InvalidArgumentError(f"unknown bucket_type {self.bucket_type!r}; known: gradient, weight, parameter")
        operation(self.scale)

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients lie in the buckets, and not the parameters themselves."""
        return self.bucket_type == "gradient"

    def size_unit(self, world_size: int) -> int:
        """The number of bytes of which a bucket's size is a multiple."""
        return max(self.align_bytes, _CHUNK_ALIGN_BYTES * world_size) if self.chunking else self.align_bytes


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
