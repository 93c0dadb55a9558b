"""The digests of the boxes that ranks have written, and those of copies: sent to root, compared, assigned to pieces.

A rank sends 16 bytes for each box that it has written or compared, in the order of the plan, and no names: root knows
from the plan what each is of, and assigns them in arrays. It does so in rounds, each of some tensors, since the
receipts of 41 million boxes are 656 MB: twice, by rank and by tensor, they would be too much for it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.checkpoint.publication import Provenance
from statexchange.comm.communicator import Communicator
from statexchange.errors import MismatchError, ReplicaError
from statexchange.formats.box_digests import DIGEST_BYTES
from statexchange.messages import decode, encoded
from statexchange.sharding.pieces import holders_of
from statexchange.sharding.plan import TensorPlan, replica_error
from statexchange.sharding.rules import layout_advice
from statexchange.sharding.write_plan import WritePlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Receipts", "compares_copies", "gather_provenance"]

_COUNT_BYTES = 8
_ROUND_ROWS = 1 << 20


@dataclass(slots=True)
class Receipts:
    """The receipts of one rank.

    Attributes:
        digests: the digest of each box that it has written or compared, in the order of the plan.
        tensors: the number of each one's tensor in the plan.
        overflows: by the number of a tensor how many of its finite elements became infinite as they were cast.
    """

    digests: list[bytes] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    overflows: dict[int, int] = field(default_factory=dict)

    def to_bytes(self, begin: int, end: int) -> bytes:
        """Return those of some tensors as `_Received` reads them; overflows, if any, come with the first tensor."""
        digests = self.digests[bisect.bisect_left(self.tensors, begin) : bisect.bisect_left(self.tensors, end)]
        overflows = encoded(self.overflows, dict[int, int]) if begin == 0 and self.overflows else b""
        return b"".join((len(digests).to_bytes(_COUNT_BYTES, "little"), *digests, overflows))


def compares_copies(reduce: str | None, *, compares: bool) -> bool:
    """Whether the copies of a tensor with this reduction are digested, in a plan that compares copies or does not.

    All ranks decide alike by this: receipts are assigned by their order alone.
    """
    # Copies that are reduced differ, and those of a rank that is chosen by name may.
    return compares and reduce is None


def gather_provenance(
    comm: Communicator, plan: WritePlan, receipts: Receipts, tensors: Sequence[TensorPlan]
) -> dict[str, Provenance]:
    """Return on root the suppliers and digests of each tensor's boxes; {} elsewhere. Collective.

    To be called in a phase of `comm`, since root alone raises.

    Args:
        comm: the communicator.
        plan: the plan, equal on all ranks.
        receipts: those of this rank.
        tensors: on root the tensors of the plan, by which errors name them; ignored elsewhere.

    Raises:
        ReplicaError: copies of a box differ.
        MismatchError: the number of a rank's digests is not that of its boxes.
    """
    provenance: dict[str, Provenance] = {}
    overflows: dict[int, int] = {}
    # Most ranks have one box of a tensor, or none.
    step = 1 + _ROUND_ROWS // comm.world_size
    for begin in range(0, len(plan.tensors), step):
        end = min(begin + step, len(plan.tensors))
        parts = comm.all_gather_bytes(receipts.to_bytes(begin, end), root=0, operation="the receipts")
        if comm.rank == 0:
            received = _Received(parts, overflows)
            provenance |= _assigned(received, tensors, range(begin, end), compares=plan.compares)
    return provenance


def _assigned(
    received: _Received, tensors: Sequence[TensorPlan], numbers: range, *, compares: bool
) -> dict[str, Provenance]:
    """Compare the digests of copies, and assign those of writers to the tensors of a round."""
    ranks_of, counts_of = [], []
    for number in numbers:
        with_copies = compares_copies(tensors[number].reduce, compares=compares)
        ranks_of_tensor, counts_of_tensor = holders_of(tensors[number].pieces, with_copies=with_copies)
        ranks_of.append(ranks_of_tensor)
        counts_of.append(counts_of_tensor)
    ranks, digests = received.take(ranks_of)
    counts = np.concatenate(counts_of).astype(np.int64, copy=False)
    # The row of each piece's writer comes before those of its copies.
    writers = np.cumsum(counts) - counts
    if len(writers) < len(ranks):
        differing = (digests != digests[np.repeat(writers, counts)]).any(axis=1).nonzero()[0]
        if len(differing):
            piece = int(np.searchsorted(writers, differing[0], side="right")) - 1
            holders = int(ranks[writers[piece]]), int(ranks[differing[0]])
            raise _replica_error([tensors[number] for number in numbers], piece, *holders)
        ranks, digests = ranks[writers], digests[writers]
    content = digests.tobytes()
    provenance: dict[str, Provenance] = {}
    at = 0
    for number, counts_of_tensor in zip(numbers, counts_of, strict=True):
        end = at + len(counts_of_tensor)
        of_tensor = content[at * DIGEST_BYTES : end * DIGEST_BYTES]
        provenance[tensors[number].name] = Provenance(ranks[at:end], of_tensor, received.overflows.get(number, 0))
        at = end
    return provenance


class _Received:
    """The receipts of all ranks for some tensors, in one array.

    The first ones bring the overflows of all tensors, which are added to `overflows`.
    """

    def __init__(self, receipts: Sequence[bytes], overflows: dict[int, int]) -> None:
        self.overflows = overflows
        counts, parts = [], []
        for rank, data in enumerate(receipts):
            count = int.from_bytes(data[:_COUNT_BYTES], "little")
            end = _COUNT_BYTES + count * DIGEST_BYTES
            if len(data) > end:
                for number, num_overflows in decode(data[end:], dict[int, int], "its overflows", rank).items():
                    overflows[number] = overflows.get(number, 0) + num_overflows
            counts.append(count)
            parts.append(memoryview(data)[_COUNT_BYTES:end])
        self._counts = np.array(counts, np.int64)
        self._digests = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, DIGEST_BYTES)

    def take(self, ranks_of: Sequence[Sequence[int] | NDArray[np.int64]]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Return the ranks of all rows of the tensors, and their digests.

        Raises:
            MismatchError: a rank has sent more or fewer digests than it has boxes.
        """
        world_size = len(self._counts)
        ranks: NDArray[Any] = np.concatenate(ranks_of)
        # numpy's stable sort of 16-bit integers is a radix sort; and these are kept for each box.
        ranks = ranks.astype(np.uint16 if world_size <= 1 << 16 else np.int64)
        counts = np.bincount(ranks, minlength=world_size)
        if (counts != self._counts).any():
            rank = int((counts != self._counts).nonzero()[0][0])
            text = "this rank's digests are not as many as its boxes: run the same version of statexchange on all ranks"
            raise MismatchError(text, rank=rank)
        # By rank, and for each in the order of the plan, as it sent them.
        digests = np.empty_like(self._digests)
        digests[np.argsort(ranks, kind="stable")] = self._digests
        return ranks, digests


def _replica_error(tensors: Sequence[TensorPlan], index: int, holder: int, other: int) -> ReplicaError:
    """Return the error for a piece of some tensors of which `other` has another copy.

    It says by which layout the copy would be a part.
    """
    in_order = iter(tensors)
    tensor = next(in_order)
    while index >= len(tensor.pieces):
        index -= len(tensor.pieces)
        tensor = next(in_order)

    def rule(dim: int) -> str:
        return f'{{"{tensor.source}": Shard({dim})}}'

    rules = layout_advice([tensor.shape], rule) if len(tensor.pieces) == 1 else ""
    layout = f"if each rank holds a part, give layout={rules}; " if rules else ""
    advice = (
        f'{layout}to take rank {min(holder, other)}\'s copy, replicas="root"; tensors of different pipeline '
        "stages need different names, even if each stage numbers its layers from 0"
    )
    return replica_error(tensor.name, tensor.pieces[index].box, holder, other, advice)
