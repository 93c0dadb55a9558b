"""The options of a BucketReducer: as keyword arguments, and as a record that ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

import torch

from statexchange.comm.communicator import CommLike
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError
from statexchange.train.reducers import operation

__all__ = [
    "AlgorithmOptions",
    "BucketOptions",
    "BucketType",
    "Communicate",
    "ReducerOptions",
    "ResetOptions",
    "TrainingOptions",
    "check_names",
]

BucketType = Literal["gradient", "weight", "parameter"]
Communicate = Callable[[torch.Tensor], "Work[Any] | None"]

_CHUNK_ALIGN_BYTES = 32


class _CommonOptions(TypedDict, total=False):
    """Options that no algorithm sets."""

    bucket_bytes: int
    align_bytes: int
    fusion: bool
    delay_reduce: bool
    buckets: Sequence[Sequence[str | torch.Tensor]] | None
    overlap: bool | None


class AlgorithmOptions(TypedDict, total=False):
    """The options of a BucketReducer that an algorithm sets."""

    bucket_type: BucketType
    chunking: bool
    communicate: Communicate | None


class ReducerOptions(_CommonOptions, AlgorithmOptions, total=False):
    """Keyword arguments of BucketReducer."""

    scale: float | None


class ResetOptions(ReducerOptions, total=False):
    """Keyword arguments of BucketReducer.reset."""

    comm: CommLike | None


class TrainingOptions(_CommonOptions, total=False):
    """Keyword arguments that `data_parallel` passes on to DistributedOptimizer and BucketReducer."""

    accumulate: int
    weight: Callable[[], float] | None


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """The options of a BucketReducer, which explains them.

    They must be equal on all ranks, which compare the record as text. What has no text here may differ between ranks:
    a function, or objects of the caller's, whose names the reducer adds.
    """

    bucket_bytes: int
    align_bytes: int
    chunking: bool
    fusion: bool
    delay_reduce: bool
    bucket_type: BucketType
    scale: float | None
    buckets: Sequence[Sequence[str | torch.Tensor]] | None = field(repr=False)
    overlap: bool | None = field(repr=False)
    communicate: Communicate | None = field(repr=False)

    def check(self) -> None:
        """Raise InvalidArgumentError unless every option is valid."""
        if not _is_integer(self.bucket_bytes) or self.bucket_bytes < 1:
            raise InvalidArgumentError("bucket_bytes must be a positive number of bytes", found=self.bucket_bytes)
        if not _is_integer(self.align_bytes) or self.align_bytes < 8 or self.align_bytes & (self.align_bytes - 1):
            raise InvalidArgumentError("align_bytes must be a power of two, 8 or more", found=self.align_bytes)
        if self.bucket_type not in ("gradient", "weight", "parameter"):
            raise InvalidArgumentError(f"unknown bucket_type {self.bucket_type!r}; known: gradient, weight, parameter")
        operation(self.scale)
        if self.communicate is not None and not callable(self.communicate):
            raise InvalidArgumentError(f"communicate is a function or None, not {self.communicate!r}")

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged, and not the parameters themselves."""
        return self.bucket_type == "gradient"

    def size_unit(self, world_size: int) -> int:
        """The unit of a bucket's size, in bytes."""
        return max(self.align_bytes, _CHUNK_ALIGN_BYTES * world_size) if self.chunking else self.align_bytes


def check_names(names: Iterable[str], *others: str) -> None:
    """Raise InvalidArgumentError for a name that is neither an option of BucketReducer nor among `others`.

    Not collective.
    """
    options = {*others, *(option.name for option in fields(BucketOptions))}
    unknown = sorted(set(names) - options)
    if unknown:
        raise InvalidArgumentError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(options))}")


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
