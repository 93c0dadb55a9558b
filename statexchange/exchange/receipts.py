"""The digests of the boxes that ranks have written, and those of copies: sent to root, compared, assigned to pieces.

A rank sends 16 bytes for each box that it has written or compared, in the order of the plan, and no names: root knows
from the plan what each is of, and assigns them in arrays. The receipts of 4 million boxes are 64 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from statexchange.checkpoint.publication import Provenance
from statexchange.errors import MismatchError, ReplicaError
from statexchange.formats.box_digests import DIGEST_BYTES
from statexchange.messages import decode, encoded
from statexchange.sharding.pieces import holders_of
from statexchange.sharding.plan import Plan, TensorPlan, replica_error
from statexchange.sharding.rules import layout_advice

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Receipts", "compares_copies", "provenance_of"]

_COUNT_BYTES = 8
_BATCH_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Receipts:
    """The receipts of one rank.

    Attributes:
        digests: the digest of each box that it has written or compared, in the order of the plan.
        overflows: by the number of a tensor how many of its finite elements became infinite as they were cast.
    """

    digests: list[bytes]
    overflows: dict[int, int]

    def to_bytes(self) -> bytes:
        """Return this as `provenance_of` reads it."""
        count = len(self.digests).to_bytes(_COUNT_BYTES, "little")
        return b"".join((count, *self.digests, encoded(self.overflows, dict[int, int])))


def compares_copies(reduce: str | None, *, compares: bool) -> bool:
    """Whether the copies of a tensor with this reduction are digested, in a plan that compares copies or does not.

    All ranks decide alike by this: receipts are assigned by their order alone.
    """
    # Copies that are reduced differ, and those of a rank that is chosen by name may.
    return compares and reduce is None


class _Rows(NamedTuple):
    """The ranks that send a digest of a tensor, in the order of its pieces, and how many of them each piece has.

    `number` is the tensor's index in the plan.
    """

    number: int
    tensor: TensorPlan
    ranks: Sequence[int] | NDArray[np.int64]
    counts: Sequence[int] | NDArray[np.int64]


def provenance_of(plan: Plan, receipts: list[bytes], *, compares: bool) -> dict[str, Provenance]:
    """Return the suppliers and digests of each tensor's boxes. Root only.

    Args:
        plan: the plan.
        receipts: those of each rank; they are taken out of this list, as they may need much memory.
        compares: whether copies are digested, and must be equal.

    Raises:
        ReplicaError: copies of a box differ.
        MismatchError: the number of a rank's digests is not that of its boxes.
    """
    import numpy as np

    received = _Received(receipts)
    provenance: dict[str, Provenance] = {}
    for batch in _batches(plan, compares=compares):
        ranks, digests = received.take(batch)
        counts = np.concatenate([rows.counts for rows in batch]).astype(np.int64, copy=False)
        # The row of each piece's writer comes before those of its copies.
        writers = np.cumsum(counts) - counts
        if len(writers) < len(ranks):
            differing = (digests != digests[np.repeat(writers, counts)]).any(axis=1).nonzero()[0]
            if len(differing):
                piece = int(np.searchsorted(writers, differing[0], side="right")) - 1
                raise _replica_error(batch, piece, int(ranks[writers[piece]]), int(ranks[differing[0]]))
            ranks, digests = ranks[writers], digests[writers]
        content = digests.tobytes()
        at = 0
        for rows in batch:
            end = at + len(rows.counts)
            of_tensor = content[at * DIGEST_BYTES : end * DIGEST_BYTES]
            num_overflows = received.overflows.get(rows.number, 0)
            provenance[rows.tensor.name] = Provenance(ranks[at:end], of_tensor, num_overflows)
            at = end
    received.check_all_taken()
    return provenance


def _batches(plan: Plan, *, compares: bool) -> Iterator[list[_Rows]]:
    """Yield the rows of the tensors of a plan, of many small ones or a few large ones at once."""
    batch: list[_Rows] = []
    num_rows = 0
    for number, tensor in enumerate(plan.tensors.values()):
        with_copies = compares_copies(tensor.reduce, compares=compares)
        rows = _Rows(number, tensor, *holders_of(tensor.pieces, with_copies=with_copies))
        batch.append(rows)
        num_rows += len(rows.ranks)
        if num_rows >= _BATCH_ROWS:
            yield batch
            batch, num_rows = [], 0
    if batch:
        yield batch


class _Received:
    """The receipts of all ranks, in one array; each is taken once, in the order of the plan."""

    def __init__(self, receipts: list[bytes]) -> None:
        import numpy as np

        self.overflows: dict[int, int] = {}
        counts = []
        for data in receipts:
            counts.append(int.from_bytes(data[:_COUNT_BYTES], "little"))
        self._ends = np.cumsum(counts)
        self._next = self._ends - counts  # for each rank the row of its next digest
        self._digests = np.empty((sum(counts), DIGEST_BYTES), np.uint8)
        for rank, count in enumerate(counts):
            data, receipts[rank] = receipts[rank], b""
            end = _COUNT_BYTES + count * DIGEST_BYTES
            for number, overflows in decode(data[end:], dict[int, int], "its overflows", rank).items():
                self.overflows[number] = self.overflows.get(number, 0) + overflows
            rows = np.frombuffer(data[_COUNT_BYTES:end], np.uint8).reshape(count, DIGEST_BYTES)
            self._digests[self._next[rank] : self._ends[rank]] = rows

    def take(self, batch: Sequence[_Rows]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the ranks of all rows and their digests."""
        import numpy as np

        world_size = len(self._ends)
        ranks = np.concatenate([rows.ranks for rows in batch]).astype(np.int64, copy=False)
        counts = np.bincount(ranks, minlength=world_size)
        if np.any(self._next + counts > self._ends):
            raise self._wrong_count(self._next + counts > self._ends)
        # By rank, and for each in the order of the plan, as it sent them. numpy's stable sort of 16-bit integers is
        # a radix sort.
        is_small = world_size <= 1 << 16
        by_rank = np.argsort(ranks.astype(np.uint16) if is_small else ranks, kind="stable")
        row_in_rank = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.empty(len(ranks), np.int64)
        places[by_rank] = np.repeat(self._next, counts) + row_in_rank
        self._next += counts
        return ranks, self._digests[places]

    def check_all_taken(self) -> None:
        """Raise MismatchError if a rank has sent more digests than it has boxes."""
        if (self._next != self._ends).any():
            raise self._wrong_count(self._next != self._ends)

    def _wrong_count(self, ranks: NDArray[np.bool_]) -> MismatchError:
        rank = int(ranks.nonzero()[0][0])
        text = "this rank's digests are not as many as its boxes: run the same version of statexchange on all ranks"
        return MismatchError(text, rank=rank)


def _replica_error(batch: Sequence[_Rows], index: int, holder: int, other: int) -> ReplicaError:
    """Return the error for a piece of a batch of which `other` has another copy.

    It says by which layout the copy would be a part.
    """
    of_tensor = iter(batch)
    rows = next(of_tensor)
    while index >= len(rows.counts):
        index -= len(rows.counts)
        rows = next(of_tensor)
    tensor = rows.tensor

    def rule(dim: int) -> str:
        return f'{{"{tensor.source}": Shard({dim})}}'

    rules = layout_advice([tensor.shape], rule) if len(tensor.pieces) == 1 else ""
    layout = f"if each rank holds a part, give layout={rules}; " if rules else ""
    advice = (
        f'{layout}to take rank {min(holder, other)}\'s copy, replicas="root"; tensors of different pipeline '
        "stages need different names, even if each stage numbers its layers from 0"
    )
    return replica_error(tensor.name, tensor.pieces[index].box, holder, other, advice)
