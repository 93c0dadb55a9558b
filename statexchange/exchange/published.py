"""The record of what a run has published last, which each rank keeps to take the next difference.

**Checksum.** adler32 of bytes d at positions i of n is ``(b << 16) | a`` with ``a = 1 + sum(d)`` and ``b = n +
sum((n - i) * d)``, modulo 65521 (RFC 1950). Both sums are over any set of runs in any order, so each rank adds those of
its boxes. Of the bytes 1, 2, 3, 4 rank 0 has the first two: it adds 3 and 4 * 1 + 3 * 2 = 10, and rank 1 adds 7 and
2 * 3 + 1 * 4 = 10, so that a = 1 + 10 and b = 4 + 20.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from statexchange.comm.communicator import Communicator
from statexchange.errors import ReplacedError, UnsupportedError
from statexchange.exchange.rank_metadata import RankMetadata, local_box
from statexchange.exchange.receipts import Receipts, pieces_with_receipts
from statexchange.exchange.staging import Staging
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import TensorPlan
from statexchange.sharding.shards import Box, c_strides
from statexchange.sharding.write_plan import WritePlan, WriteTensor
from statexchange.state.describe import Description
from statexchange.storage.files import digest
from statexchange.storage.regions import box_runs
from statexchange.tensors import ITEMSIZE

_MODULUS = 65521


@dataclass(slots=True)
class PublishedBox:
    """A box that this rank writes, as it was published last.

    Attributes:
        number: the number of its tensor in the plan.
        box: the box.
        box_index: its place among the boxes that this rank has of the tensor.
        data: its bytes.
        digest: their digest.
        sums: what they add to the checksum of the tensor; None until it is asked for.
    """

    number: int
    box: Box
    box_index: int
    data: NDArray[np.uint8]
    digest: bytes
    sums: tuple[int, int] | None = None

    def sums_of(self, tensor: WriteTensor) -> tuple[int, int]:
        """Return what the box adds to both sums of its tensor's checksum."""
        if self.sums is None:
            itemsize, total = ITEMSIZE[tensor.dtype], _nbytes_of(tensor)
            first = second = 0
            for begin, part in box_runs(self.box, c_strides(tensor.shape), itemsize, self.data.data):
                # zlib takes a run for all of the data: without its 1 and its len(part), and moved to where it begins.
                checksum = zlib.adler32(part)
                of_run = (checksum & 0xFFFF) - 1
                first += of_run
                second += (checksum >> 16) - len(part) + (total - begin * itemsize - len(part)) * of_run
            self.sums = first % _MODULUS, second % _MODULUS
        return self.sums


def checksum_of(tensor: WriteTensor, sums: Sequence[tuple[int, int]]) -> str:
    """Return the adler32 of a tensor from the sums of its boxes."""
    first = (1 + sum(first for first, _ in sums)) % _MODULUS
    second = (_nbytes_of(tensor) + sum(second for _, second in sums)) % _MODULUS
    return f"{second << 16 | first:08x}"


@dataclass(slots=True)
class PublishedVersion:
    """The version that a run has published last, as this rank knows it.

    Attributes:
        run: the id of the run.
        number: the version.
        state_digest: that of the description of this rank's state.
        plan: the plan by which the ranks have written a full version.
        names: the names of its tensors in the version.
        boxes: what this rank has published; None if a publish has failed since.
        manifest: on root the digest of the version's manifest.
        tensors: on root the tensors of the plan.
        aliases: on root the names of tied tensors.
        bases: on root, for each version of the run the one that it is based on.
        full_nbytes: the bytes of all tensors.
        chain_nbytes: the bytes of the deltas since the last full version.
        chain_length: how many they are.
    """

    run: str
    number: int
    state_digest: str
    plan: WritePlan
    names: Sequence[str]
    boxes: list[PublishedBox] | None
    manifest: str
    tensors: tuple[TensorPlan, ...]
    aliases: Mapping[str, str]
    bases: dict[int, int | None] = field(default_factory=dict)
    full_nbytes: int = 0
    chain_nbytes: int = 0
    chain_length: int = 0


def _nbytes_of(tensor: WriteTensor) -> int:
    return math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]


def digest_of_state(described: Description, options: ExportOptions) -> str:
    """Return a digest of the names, dtypes, shapes and boxes of this rank's tensors, and of the options."""
    return digest(RankMetadata.of(described, options.texts()).data)


Kept: TypeAlias = list[tuple[WritePlan, list[PublishedBox]]]
"""The plan of one full version, with the boxes that this rank has written."""


def keep_boxes(kept: Kept, comm: Communicator, described: Description, plan: WritePlan, receipts: Receipts) -> None:
    """Keep a copy of what this rank has written of a full version, by its receipts. Not collective.

    Raises:
        ReplacedError: a tensor was changed since it was written.
    """
    staging = Staging()
    boxes = []
    for receipt, (number, tensor, piece) in enumerate(pieces_with_receipts(plan, comm.rank)):
        if tensor.reduce is not None:
            text = "a version is not made of copies that are reduced: give a layout without reduce"
            raise UnsupportedError(text, name=tensor.source)
        if not piece.is_written:
            continue
        live = local_box(described, tensor.source, piece.box_index)
        data = staging.bytes_of(live, tensor.dtype, comm.progress)
        # The next delta is applied to what was published: a copy of other bytes would give all readers wrong weights.
        if xxhash.xxh3_128_digest(data.data) != receipts.digests[receipt]:
            raise ReplacedError("this tensor was changed while it was published", name=tensor.source)
        boxes.append(PublishedBox(number, piece.box, piece.box_index, data, receipts.digests[receipt]))
    kept.append((plan, boxes))
