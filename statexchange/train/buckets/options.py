"""The options of a BucketReducer: as keyword arguments, and as a record that ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

import torch

from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError
from statexchange.settings import check_flags
from statexchange.train.reducers import operation

BucketType = Literal["gradient", "weight"]
Communicate = Callable[[torch.Tensor], "Work[Any] | None"]


class _CommonOptions(TypedDict, total=False):
    """Options that no algorithm sets."""

    bucket_bytes: int
    buckets: Sequence[Sequence[str]] | None
    overlap: bool | None


class ReducerOptions(_CommonOptions, total=False):
    """Keyword arguments of BucketReducer."""

    bucket_type: BucketType
    scale: float | None
    communicate: Communicate | None


class TrainingOptions(_CommonOptions, total=False):
    """Keyword arguments that `data_parallel` passes on to DistributedOptimizer and BucketReducer."""

    weight: Callable[[], float] | None


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """The options of a BucketReducer, which explains them.

    They must be equal on all ranks, which compare the record as text. Only `communicate`, which has none, may differ.
    """

    bucket_bytes: int
    bucket_type: BucketType
    buckets: Sequence[Sequence[str]] | None
    scale: float | None
    overlap: bool | None
    communicate: Communicate | None = field(repr=False)

    def check(self) -> None:
        """Raise InvalidArgumentError unless every option is valid."""
        if not _is_integer(self.bucket_bytes) or self.bucket_bytes < 1:
            raise InvalidArgumentError("bucket_bytes must be a positive number of bytes", found=self.bucket_bytes)
        if self.bucket_type not in ("gradient", "weight"):
            raise InvalidArgumentError(f"unknown bucket_type {self.bucket_type!r}; known: gradient, weight")
        operation(self.scale)
        if self.overlap is not None:
            check_flags(overlap=self.overlap)
        if self.communicate is not None and not callable(self.communicate):
            raise InvalidArgumentError(f"communicate is a function or None, not {self.communicate!r}")

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged, and not the parameters themselves."""
        return self.bucket_type == "gradient"

    @property
    def is_delayed(self) -> bool:
        """Whether ranks exchange their weights before they send any bucket."""
        return self.overlap is False


def check_names(names: Iterable[str], *others: str) -> None:
    """Raise InvalidArgumentError for a name that is neither an option of BucketReducer nor among `others`.

    Not collective.
    """
    options = {*others, *(option.name for option in fields(BucketOptions))}
    unknown = sorted(set(names) - options)
    if unknown:
        raise InvalidArgumentError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(options))}")


def _is_integer(value: object) -> bool:
    # As numpy's integers, too. A bool counts as one in Python.
    return hasattr(value, "__index__") and not isinstance(value, bool)
