"""The digests of boxes that follow from a mesh, in a file of their own beside the manifest of a checkpoint.

A checkpoint of thousands of ranks has millions of boxes. Their manifest would be larger than the headers of all files,
and each reader parses it. So such a manifest says where the boxes of a tensor lie by a placement, and at which place
their digests begin in ``statexchange.digests``: 16 bytes for each box, in the order of their first elements. A reader
computes the boxes that it reads, and fetches the digests of these::

    "placements": [[[[4], [[0, 1]]], []]],
    "digests": {"statexchange.digests": [128, 128, "f00d..."]},
    "tensors": {"w": {"file": "model.safetensors", "dtype": "F32", "shape": [8, 2], "source": "w", "placed": [0, 0, 4]}}

Each placement has the shape of a mesh, for each of its axes null or the dim that it splits with torch's `split_factor`,
and the ranks of the mesh ([]: 0, 1, ...). `placed` has the number of the placement, the number of the copy of each box
that was written, in the order of the ranks in the mesh, and the number of the first digest. `digests` has the size and
the digest of the file, as `sealed` has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from statexchange.errors import CorruptError, excerpt
from statexchange.formats.sealed_files import DIGESTS_KEY, SealedFile, parse_sealed
from statexchange.formats.source import open_listed
from statexchange.sharding.pieces import SpecPieces
from statexchange.sharding.sharding_spec import Placement, covers_exactly
from statexchange.sharding.shards import Box
from statexchange.storage.save_index import SavedLayout
from statexchange.storage.store import Budget, Store

DIGESTS = "statexchange.digests"
DIGEST_BYTES = 16
PLACED_SCHEMA = 2  # of a manifest with placements
_MAX_RANKS = 1 << 24
_PIECES_PER_STEP = 8  # of the budget
_AHEAD_BYTES = 32 << 20  # kept of what is read ahead from an object store


def placed_record(pieces: SpecPieces, placements: list[object], first: int) -> list[int]:
    """Return `placed` for a tensor, and add its placement to those of the manifest."""
    placement = [SavedLayout(pieces.placement).to_json(), pieces.ranks]
    if placement not in placements:
        placements.append(placement)
    return [placements.index(placement), pieces.copy, first]


def is_readable(tensors: Iterable[SpecPieces], num_digests: int) -> bool:
    """Whether readers accept the placements of these tensors, given so many digests."""
    # As `BoxDigests` does it, whose budget is that of a file of so many digests.
    budget = Budget(DIGESTS, DIGEST_BYTES * num_digests)
    checked: set[tuple[tuple[int, ...], Placement]] = set()
    try:
        for pieces in tensors:
            if (pieces.shape, pieces.placement) not in checked:
                checked.add((pieces.shape, pieces.placement))
                SavedLayout.from_json(json.loads(json.dumps(SavedLayout(pieces.placement).to_json())))
                budget.spend(_steps_of(pieces.placement))
    except (CorruptError, ValueError):
        return False
    return True


def _steps_of(placement: Placement) -> int:
    """Return the work that the boxes of a placement are, in steps of a budget."""
    layout = SavedLayout(placement)
    num_parts = math.prod(placement.mesh_shape[axis] for axis in layout.split_axes)
    return num_parts * layout.num_pieces // _PIECES_PER_STEP


def _digest_file(manifest: Mapping[str, Any]) -> SealedFile:
    """Return the size and digest of the file of digests by a manifest; raise ValueError or TypeError without it."""
    files = parse_sealed(manifest.get(DIGESTS_KEY, {}))
    if [file.name for file in files] != [DIGESTS]:
        raise ValueError(f"it places boxes, and does not list {DIGESTS}")
    return files[0]


def _placements_of(manifest: Mapping[str, Any]) -> list[tuple[Placement, tuple[int, ...]]]:
    """Return the placements of a manifest with the ranks of their meshes; raise ValueError for anything else."""
    listed = manifest.get("placements", [])
    if not isinstance(listed, list):
        raise ValueError(f"not a list of placements: {excerpt(listed)}")
    placements = []
    for raw in listed:
        layout, ranks = raw if isinstance(raw, list) and len(raw) == 2 else (None, None)
        placement = SavedLayout.from_json(layout).placement
        if placement is None or not isinstance(ranks, list) or {*map(type, ranks)} - {int}:
            raise ValueError(f"not a placement: {excerpt(raw)}")
        if ranks and (len(ranks) != placement.num_ranks or min(ranks) < 0 or max(ranks) >= _MAX_RANKS):
            raise ValueError(f"not the ranks of a mesh of {placement.num_ranks}: {excerpt(ranks)}")
        placements.append((placement, tuple(ranks)))
    return placements


class BoxDigests:
    """The file of digests of an opened checkpoint, and the boxes of its tensors."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        """Raise IncompleteError or CorruptError unless the file is there, with the size that the manifest says."""
        sealed = _digest_file(manifest)
        self.file = open_listed(store, DIGESTS, "the digests of a checkpoint's boxes are missing")
        if self.file.size != sealed.nbytes:
            text = "the file of digests is not the one that was published"
            raise CorruptError(text, path=self.file.path, expected=sealed.nbytes, found=self.file.size)
        self._placements = _placements_of(manifest)
        # Of each box there are 16 bytes: so the work may grow with these.
        self._budget = store.budget.of(self.file.path, self.file.size)
        # Layers have tensors of the same shapes and placements, so that few are checked.
        self._checked: set[tuple[tuple[int, ...], Placement]] = set()
        # Tensors are read in the order of their digests, each of which would be a request to an object store.
        self.file.read_ahead(_AHEAD_BYTES)

    def boxes_of(self, record: Mapping[str, Any]) -> PlacedBoxes:
        """Return the boxes of a tensor by its record in the manifest; raise ValueError if they cannot be its boxes."""
        number, turn, first = _numbers(record["placed"], 3)
        if number >= len(self._placements):
            raise ValueError(f"placement {number} is not one of {len(self._placements)}")
        placement, ranks = self._placements[number]
        shape = tuple(record["shape"])
        if (shape, placement) not in self._checked:
            self._check(shape, placement)
        pieces = SpecPieces(shape, placement, turn, ranks)
        if DIGEST_BYTES * (first + len(pieces)) > self.file.size:
            raise ValueError(f"{len(pieces)} digests from number {first} on are not in the file of digests")
        return PlacedBoxes(pieces, first, self)

    def _check(self, shape: tuple[int, ...], placement: Placement) -> None:
        """Raise ValueError unless the boxes of a placement cover a tensor of `shape` exactly once."""
        for split in placement.splits:
            if split is not None and split.dim >= len(shape):
                raise ValueError(f"{split} does not fit shape {shape}")
        # A few characters may stand for many ranks, or for thousands of pieces on each.
        self._budget.spend(_steps_of(placement))
        if not covers_exactly(shape, placement):
            raise ValueError(f"{placement} does not cover shape {shape}")
        self._checked.add((shape, placement))

    def read(self, first: int, count: int) -> list[str]:
        """Return the digests of boxes with consecutive numbers."""
        data = bytearray(DIGEST_BYTES * count)
        self.file.read_into(memoryview(data), DIGEST_BYTES * first)
        return data.hex(" ", DIGEST_BYTES).split()


class PlacedBoxes:
    """The boxes of one tensor that follow from its placement, with their digests, which are read when they are needed.

    `pieces` are its boxes with the ranks that supplied them.
    """

    def __init__(self, pieces: SpecPieces, first: int, digests: BoxDigests) -> None:
        self.pieces = pieces
        self._first = first
        self._digests = digests

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[tuple[Box, str]]:
        return zip(self.pieces.boxes, self._digests.read(self._first, len(self)), strict=True)

    def within(self, region: Box) -> Iterator[tuple[Box, str]]:
        """Yield the boxes that lie in a region, with their digests."""
        for number, box in self.pieces.within(region):
            yield box, self._digests.read(self._first + number, 1)[0]


def _numbers(raw: object, count: int) -> list[int]:
    """Return a list of so many numbers, none of which is negative; raise ValueError for anything else."""
    if not isinstance(raw, list) or len(raw) != count or {*map(type, raw)} != {int} or min(raw) < 0:
        raise ValueError(f"not {count} numbers: {excerpt(raw)}")
    return raw
