"""The digests of the boxes that ranks have written, and those of copies: sent to root, compared, assigned to pieces.

A rank sends 16 bytes for each box that it has written or compared, in the order of the plan, and no names: root knows
from the plan what each is of, and assigns them in arrays. Root receives them in rounds of some tensors each: held by
rank and by tensor at once, the digests of 41 million boxes would take 1.3 GB.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.checkpoint.publication import Provenance
from statexchange.comm.communicator import Communicator, to_root
from statexchange.errors import MismatchError, ReplicaError
from statexchange.formats.box_digests import DIGEST_BYTES
from statexchange.messages import decode, encoded
from statexchange.sharding.pieces import RankPiece, holders_of, pieces_of_rank
from statexchange.sharding.plan import TensorPlan, replica_error
from statexchange.sharding.rules import layout_advice
from statexchange.sharding.write_plan import WritePlan, WriteTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUND_ROWS = 1 << 20  # digests that root has at a time: 16 MiB, and their ranks and counts in arrays


@dataclass(slots=True)
class Receipts:
    """The receipts of one rank.

    Attributes:
        digests: the digest of each box that it has written or compared, in the order of the plan.
        tensor_numbers: for each digest the number of its tensor in the plan, ascending.
        overflows: by the number of a tensor how many of its finite elements became infinite as they were cast.
    """

    digests: list[bytes] = field(default_factory=list)
    tensor_numbers: list[int] = field(default_factory=list)
    overflows: dict[int, int] = field(default_factory=dict)

    def of_tensors(self, begin: int, end: int) -> bytes:
        """Return the digests of the tensors from `begin` to before `end`."""
        first, last = bisect.bisect_left(self.tensor_numbers, begin), bisect.bisect_left(self.tensor_numbers, end)
        return b"".join(self.digests[first:last])


def _compares_copies(reduce: str | None, *, compares: bool) -> bool:
    """Whether the copies of a tensor with this reduction are digested, in a plan that compares copies or does not.

    All ranks decide alike by this: receipts are assigned by their order alone.
    """
    # Copies that are reduced differ, and those of a rank that is chosen by name may.
    return compares and reduce is None


def pieces_with_receipts(plan: WritePlan, rank: int) -> list[tuple[int, WriteTensor, RankPiece]]:
    """Return the pieces that a rank writes or compares, in the order of its receipts, with the tensor and its number.

    Not collective.
    """
    pieces = []
    for number, tensor in enumerate(plan.tensors):
        for piece in pieces_of_rank(tensor.pieces, rank):
            if piece.is_written or _compares_copies(tensor.reduce, compares=plan.compares):
                pieces.append((number, tensor, piece))
    return pieces


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
    overflows = _total_overflows(comm, receipts)
    # About so many digests if each rank has one box of a tensor. All ranks find the same rounds.
    step = 1 + _ROUND_ROWS // comm.world_size
    for begin in range(0, len(plan.tensors), step):
        numbers = range(begin, min(begin + step, len(plan.tensors)))
        sent = to_root(comm, receipts.of_tensors(begin, begin + step), "the receipts")
        if comm.rank == 0:
            provenance |= _assigned(sent, tensors, numbers, overflows, compares=plan.compares)
    return provenance


def _total_overflows(comm: Communicator, receipts: Receipts) -> dict[int, int]:
    """Return on root the overflows of all ranks by the number of the tensor; {} elsewhere. Collective."""
    total: dict[int, int] = {}
    data = b""  # most often there are none, and a job has thousands of ranks
    if receipts.overflows:
        data = encoded(receipts.overflows, dict[int, int])
    for rank, of_rank in enumerate(to_root(comm, data, "overflows")):
        if of_rank:
            for number, num_overflows in decode(of_rank, dict[int, int], "its overflows", rank).items():
                total[number] = total.get(number, 0) + num_overflows
    return total


def _assigned(
    sent: Sequence[bytes],
    tensors: Sequence[TensorPlan],
    numbers: range,
    overflows: Mapping[int, int],
    *,
    compares: bool,
) -> dict[str, Provenance]:
    """Compare the digests of copies, and assign those of writers to the tensors of a round.

    Of two pieces, written by ranks 0 and 1, the first has a copy on rank 1. The rows are of the ranks 0, 1, 1, and the
    counts 2, 1. Rank 0 has sent a, rank 1 a and b: in the plan's order these are a, a, b. The first two are equal.

    Args:
        sent: the digests of each rank.
        tensors: all tensors of the plan.
        numbers: those of the round.
        overflows: by the number of a tensor.
        compares: whether copies are digested.
    """
    ranks_of, counts_of = [], []
    for number in numbers:
        with_copies = _compares_copies(tensors[number].reduce, compares=compares)
        ranks_of_tensor, counts_of_tensor = holders_of(tensors[number].pieces, with_copies=with_copies)
        ranks_of.append(ranks_of_tensor)
        counts_of.append(counts_of_tensor)
    ranks, digests = _in_plan_order(sent, np.concatenate(ranks_of))
    counts = np.concatenate(counts_of).astype(np.int64, copy=False)
    # The row of each piece's writer comes before those of its copies.
    writers = np.cumsum(counts) - counts
    if len(writers) < len(ranks):
        differing = (digests != digests[np.repeat(writers, counts)]).any(axis=1).nonzero()[0]
        if len(differing):
            piece = int(np.searchsorted(writers, differing[0], side="right")) - 1
            holder, other = int(ranks[writers[piece]]), int(ranks[differing[0]])
            raise _replica_error([tensors[number] for number in numbers], piece, holder, other)
        ranks, digests = ranks[writers], digests[writers]
    content = digests.tobytes()
    provenance: dict[str, Provenance] = {}
    at = 0
    for number, counts_of_tensor in zip(numbers, counts_of, strict=True):
        end = at + len(counts_of_tensor)
        of_tensor = content[at * DIGEST_BYTES : end * DIGEST_BYTES]
        provenance[tensors[number].name] = Provenance(ranks[at:end], of_tensor, overflows.get(number, 0))
        at = end
    return provenance


def _in_plan_order(sent: Sequence[bytes], ranks: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the rank and the digest of each row of a round, whose rows `ranks` have sent in this order.

    Raises:
        MismatchError: a rank has sent more or fewer digests than it has rows.
    """
    world_size = len(sent)
    # The ranks are kept, in 2 bytes instead of 8; and numpy's stable sort of 16-bit integers is a radix sort.
    ranks_kept: NDArray[Any] = ranks.astype(np.uint16 if world_size <= 1 << 16 else np.int64)
    wrong = np.bincount(ranks_kept, minlength=world_size) * DIGEST_BYTES != list(map(len, sent))
    if wrong.any():
        text = "this rank's digests are not as many as its boxes: run the same version of statexchange on all ranks"
        raise MismatchError(text, rank=int(wrong.nonzero()[0][0]))
    by_rank = np.frombuffer(b"".join(sent), np.uint8).reshape(-1, DIGEST_BYTES)
    digests = np.empty_like(by_rank)
    # Each rank has sent its digests in the order of the plan.
    digests[np.argsort(ranks_kept, kind="stable")] = by_rank
    return ranks_kept, digests


def _replica_error(tensors: Sequence[TensorPlan], index: int, holder: int, other: int) -> ReplicaError:
    """Return the error for a piece of some tensors of which `other` has another copy.

    It says by which layout the copy would be a part.
    """
    in_order = iter(tensors)
    tensor = next(in_order)
    while index >= len(tensor.pieces):
        index -= len(tensor.pieces)
        tensor = next(in_order)
    rules = layout_advice(tensor.source, [tensor.shape], "Shard({})") if len(tensor.pieces) == 1 else ""
    layout = f"if each rank holds a part, give layout={rules}; " if rules else ""
    advice = (
        f'{layout}to take rank {min(holder, other)}\'s copy, replicas="root"; tensors of different pipeline '
        "stages need different names, even if each stage numbers its layers from 0"
    )
    return replica_error(tensor.name, tensor.pieces[index].box, holder, other, advice)
