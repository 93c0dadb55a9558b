"""The plan of a reducer: which parameter lies in which bucket, and in which order buckets are reduced.

Equal on all ranks: a bucket is one collective, so ranks must reduce the same buckets in the same order. `digest` covers
the parameters and the plan; ranks compare it in every round.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Iterator, Sequence

import torch

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.train.buckets.options import BucketOptions
from statexchange.train.buckets.views import Bucket, BucketView
from statexchange.train.comparison import shortened

_PART_BYTES = 64  # a cache line: no two buckets share one
_BATCH_BYTES = 32 << 20


class BucketPlan:
    """Buckets in the order in which they are reduced; parameters that are in none yet are added by `extend`."""

    def __init__(
        self,
        comm: Communicator,
        options: BucketOptions,
        views: Sequence[BucketView],
        specs_digest: bytes,
    ) -> None:
        self._comm = comm
        self._options = options
        self._views = views
        self._specs_digest = specs_digest
        self._set([])

    def _set(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        """In the order in which they are reduced."""
        indices = []
        for bucket in buckets:
            indices.append([view.index for view in bucket.views])
        # The numbers of the parameters suffice, as the specs give each its name, dtype and shape.
        text = json.dumps([self._specs_digest.hex(), indices])
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        """8 bytes that are equal on ranks of equal parameters and plans."""

    def clear(self) -> None:
        """Take all parameters out of their buckets."""
        for view in self._views:
            view.bucket = None
        self._set([])

    def begin_round(self) -> None:
        """Let all buckets wait for all their gradients."""
        for bucket in self.buckets:
            bucket.begin_round()

    def split(self, views: Sequence[BucketView]) -> list[list[BucketView]]:
        """Cut `views`, given in the order of arrival, into buckets; return these in the order in which they fill."""
        split = split_buckets(views, self._options.bucket_bytes)
        # The last tensor of a bucket is the last that arrives, and fills it.
        split.sort(key=operator.itemgetter(-1))
        groups = []
        for numbers in split:
            groups.append([views[number] for number in numbers])
        return groups

    def extend(self, groups: Sequence[Sequence[BucketView]]) -> list[Bucket]:
        """Make a bucket of each group of views, of one dtype and device, at the end of the plan.

        Collective if the communicator's `empty` is.
        """
        new: list[Bucket] = []
        # Runs, and not all groups of one dtype: the order of buckets is that in which they fill.
        for _, run in itertools.groupby(groups, lambda views: views[0].kind):
            alike = list(run)
            first = alike[0][0]
            numels = []
            for views in alike:
                numels.append(sum(view.shape.numel() for view in views))
            for views, flat in zip(alike, self._allocate(numels, first.dtype, first.device), strict=True):
                new.append(Bucket(views, flat))
        self._set([*self.buckets, *new])
        return new

    def _allocate(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Return a flat tensor of zeros for each of `numels`, rounded up, all cut from one allocation.

        So a bucket can be cut into one part of whole cache lines for each rank: on two ranks 33 elements of float32
        become 64.
        """
        unit = _PART_BYTES // dtype.itemsize * self._comm.world_size
        sizes = [-(-numel // unit) * unit for numel in numels]
        # One allocation for all: each call of `empty` is collective, and makes a memfd.
        if device.type == "cpu":
            memory = self._comm.empty((sum(sizes),), dtype)
        else:
            memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        memory.zero_()
        return list(torch.split(memory, sizes))

    def extend_in_batches(self, groups: Sequence[Sequence[BucketView]]) -> Iterator[list[Bucket]]:
        """Extend the plan by about 32 MiB of buckets at a time; yield each batch. Collective, as `extend`.

        Fill each batch before requesting the next: this frees the gradients' own memory. Otherwise all gradients would
        be in memory twice.
        """
        batch: list[Sequence[BucketView]] = []
        nbytes = 0
        for views in groups:
            batch.append(views)
            nbytes += sum(view.nbytes for view in views)
            if nbytes >= _BATCH_BYTES:
                yield self.extend(batch)
                batch, nbytes = [], 0
        if batch:
            yield self.extend(batch)

    def names(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket."""
        names = []
        for bucket in self.buckets:
            names.append([view.name for view in bucket.views])
        return names

    def bucket_of(self, flat: torch.Tensor) -> Bucket:
        """Return the bucket that has the memory `flat`."""
        # By identity: `==` of tensors compares elements.
        return next(bucket for bucket in self.buckets if bucket.flat is flat)

    def label(self, bucket: Bucket) -> str:
        """Return the number of a bucket and its first names, for messages."""
        return f"bucket {self.buckets.index(bucket)}: {shortened([view.name for view in bucket.views])}"


def split_buckets(views: Sequence[BucketView], bucket_bytes: int) -> list[list[int]]:
    """Return the numbers of the views in each bucket: of one kind, in the order of kinds, then as given.

    Not collective. A parameter joins the last bucket if that brings the bucket's size nearer to `bucket_bytes`; else it
    begins another. Parameters of 6, 6 and 2 MB give ``[[0, 1], [2]]`` with buckets of 10 MB.
    """
    by_kind: dict[tuple[str, str], list[int]] = {}
    for number, view in enumerate(views):
        by_kind.setdefault(view.kind, []).append(number)
    buckets = []
    for kind in sorted(by_kind):
        running: list[int] = []
        size = 0
        for number in by_kind[kind]:
            nbytes = views[number].nbytes
            if running and abs(size + nbytes - bucket_bytes) > abs(size - bucket_bytes):
                buckets.append(running)
                running, size = [], 0
            running.append(number)
            size += nbytes
        buckets.append(running)
    return buckets


def explicit_groups(buckets: Sequence[Sequence[str]], views: Sequence[BucketView]) -> list[list[BucketView]]:
    """Return the views in the caller's own buckets. Not collective.

    Raises:
        InvalidArgumentError: a bucket has an unknown parameter or mixes dtypes or devices, or a parameter lies in two.
    """
    unused = {view.name: view for view in views}
    names = set(unused)
    groups = []
    for bucket in buckets:
        group = []
        for name in bucket:
            if not isinstance(name, str) or name not in names:
                raise InvalidArgumentError(f"buckets has {excerpt(name)}, which is no name of a parameter here")
            if name not in unused:
                raise InvalidArgumentError("this parameter is in two buckets", name=name)
            group.append(unused.pop(name))
        kinds = {view.kind for view in group}
        if len(kinds) != 1:
            raise InvalidArgumentError(
                f"a bucket must have parameters of one dtype and device, not of {len(kinds)} kinds"
            )
        groups.append(group)
    return groups
