"""Compare the copies of boxes that a layout or a mesh declares, before a save is published.

A rank does not know which other ranks hold its boxes. So each rank sends root a record of 24 bytes for each box that
may have copies: a hash of the box, one of the tensor's name, and the first digits of the box's digest. The tensors of
a mesh of all ranks are alike on the ranks that hold copies, so one record stands for all tensors of one placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from statexchange.checkpoint.notes import JoinedParts, notes_on_equal_parts
from statexchange.comm.communicator import Communicator, from_all, from_root, to_root
from statexchange.errors import MismatchError
from statexchange.sharding.plan import replica_error
from statexchange.sharding.shards import Box, full_box
from statexchange.state.describe import Description, LocalTensor
from statexchange.state.state_dict import SavedState
from statexchange.storage.files import digest

_HASH_BYTES = 8  # of 128 bits: among 2**20 boxes two have one hash with a probability of 3e-8
_RECORD_BYTES = 3 * _HASH_BYTES
_ADVICE = (
    "the layout or mesh says that these are copies: give tensors of different pipeline stages different names, and "
    "make copies equal before a save"
)


class _BoxDigest(NamedTuple):
    """A box of a tensor and its digest."""

    name: str
    box: Box
    digest: str


def may_have_copies(local: LocalTensor, world_size: int) -> bool:
    """Whether a layout or a mesh may say that another rank has a copy of this tensor's boxes. Not collective."""
    if local.part is not None:
        return True
    if not _spans_all(local, world_size):
        return bool(local.layout.mesh) or local.shard.boxes != (full_box(local.shard.global_shape),)
    return bool(local.layout.copies)


def _spans_all(local: LocalTensor, world_size: int) -> bool:
    """Whether the boxes follow from the placement on a mesh of all ranks, in their order."""
    layout = local.layout
    return layout.placement is not None and layout.placement.num_ranks == world_size and not layout.mesh_ranks


def compare_copies(
    comm: Communicator, saved: SavedState, placed: Description, digests: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Raise ReplicaError if copies differ that a layout or mesh declares; return notes on equal parts. Collective.

    Args:
        comm: the communicator.
        saved: this rank's tensors, with the parts that layout rules have made of them.
        placed: the same tensors, in which these parts are boxes of whole tensors.
        digests: the digests of each tensor's boxes.
    """
    copies = _DeclaredCopies(comm, saved.described, placed, digests)
    copies.compare()
    notes: tuple[str, ...] = ()
    if comm.rank == 0:
        notes = notes_on_equal_parts(saved.rules, copies.joined_parts())
    return from_root(comm, notes, tuple[str, ...], "the notes")


class _DeclaredCopies:
    """This rank's boxes that may have copies; on root also the records of all ranks' boxes."""

    def __init__(
        self, comm: Communicator, parts: Description, placed: Description, digests: Mapping[str, Sequence[str]]
    ) -> None:
        self._comm = comm
        self._parts = parts
        self._placed = placed
        self._digests = digests
        self._boxes = {_hash(key): boxes for key, boxes in self._keyed_boxes().items()}
        self._sent: list[bytes] = []

    def _keyed_boxes(self) -> dict[str, list[_BoxDigest]]:
        """Return this rank's boxes by a text that is equal on the ranks that hold copies."""
        boxes: dict[str, list[_BoxDigest]] = {}
        alike: dict[str, list[_BoxDigest]] = {}
        for name, local in self._placed.tensors.items():
            shard, is_part = local.shard, self._parts.tensors[name].part is not None
            # A layout's part is known by the description before `place_parts`: now it is a box like any other.
            if not is_part and not may_have_copies(local, self._comm.world_size):
                continue
            for box, box_digest in zip(shard.boxes, self._digests[name], strict=True):
                entry = _BoxDigest(name, box, box_digest)
                if not is_part and _spans_all(local, self._comm.world_size):
                    alike.setdefault(repr(local.layout.placement), []).append(entry)
                elif box.numel:
                    # Two meshes may give one name to two whole tensors, as stages of a pipeline do. But a region of a
                    # larger tensor has one content, whatever the mesh.
                    is_whole = box == full_box(shard.global_shape) and not is_part
                    mesh = local.layout.mesh if is_whole else ""
                    boxes.setdefault(repr((name, shard.global_shape, box, mesh)), []).append(entry)
        for placement, entries in alike.items():
            # The names too: ranks of two meshes of one shape may have different tensors, which are no copies.
            boxes[repr((placement, [(entry.name, entry.box) for entry in entries]))] = entries
        return boxes

    def compare(self) -> None:
        """Raise ReplicaError, on all ranks, if copies differ. Collective."""
        records = []
        for key, boxes in self._boxes.items():
            records.append(key + _hash(boxes[0].name) + _start(boxes))
        self._sent = to_root(self._comm, b"".join(records), "the digests of copies")
        # The first alone: one error says enough, and its boxes' digests are all that is sent for it.
        difference = from_root(self._comm, self._first_difference(), tuple[bytes, int, int] | None, "copies")
        if difference is not None:
            self._raise_replica_error(*difference)

    def _records(self) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        """Yield each record as rank, hash of the box, hash of the name, and the digest's first bytes. Root only."""
        for rank, data in enumerate(self._sent):
            for at in range(0, len(data), _RECORD_BYTES):
                middle, last = at + _HASH_BYTES, at + 2 * _HASH_BYTES
                yield rank, data[at:middle], data[middle:last], data[last : at + _RECORD_BYTES]

    def _first_difference(self) -> tuple[bytes, int, int] | None:
        """Return the hash of a box, and two ranks whose copies of it differ. Root only."""
        first: dict[bytes, tuple[int, bytes]] = {}
        for rank, key, _, start in self._records():
            holder, expected = first.setdefault(key, (rank, start))
            if start != expected:
                return key, holder, rank
        return None

    def _raise_replica_error(self, key: bytes, rank: int, other: int) -> NoReturn:
        """Gather the digests of the two ranks' boxes, and raise the error for the first that differs. Collective."""
        # A record has the first digits only, and one may stand for many boxes: the two ranks send all that is in it.
        boxes: list[_BoxDigest] = []
        if self._comm.rank in (rank, other):
            boxes = self._boxes.get(key, [])
        sent = from_all(self._comm, boxes, list[_BoxDigest], "the digests of copies")
        for first, second in zip(sent[rank], sent[other], strict=True):
            if first.digest != second.digest:
                raise replica_error(first.name, first.box, rank, other, _ADVICE)
        raise MismatchError("ranks do not agree which copies differ: run the same version of statexchange on all ranks")

    def joined_parts(self) -> Iterator[JoinedParts]:
        """Yield the parts, on all ranks, of each tensor of this rank that a rule joins. Root only, after `compare`."""
        names: dict[bytes, str] = {}
        for name, local in self._parts.tensors.items():
            if local.part is not None and local.part.cuts:
                names[_hash(name)] = name
        starts: dict[str, dict[int, list[str]]] = {}
        for rank, _, name_hash, start in self._records():
            if name_hash in names:
                starts.setdefault(names[name_hash], {}).setdefault(rank, []).append(start.hex())
        for name, of_ranks in starts.items():
            shard = self._placed.tensors[name].shard
            numel = {}
            for box, box_digest in zip(shard.boxes, self._digests[name], strict=True):
                if box.numel:
                    numel[box_digest[: 2 * _HASH_BYTES]] = box.numel
            yield JoinedParts(name, shard.dtype, of_ranks, numel)


def _hash(text: str) -> bytes:
    return bytes.fromhex(digest(text.encode()))[:_HASH_BYTES]


def _start(boxes: Sequence[_BoxDigest]) -> bytes:
    """Return the first bytes of a box's digest; for several boxes, of the digest of their digests."""
    if len(boxes) == 1:
        return bytes.fromhex(boxes[0].digest)[:_HASH_BYTES]
    return _hash("".join(box.digest for box in boxes))
