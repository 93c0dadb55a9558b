"""What a load will read of a copy in memory: the ranks' files, and whether their bytes have their digests."""

from __future__ import annotations

import os
from collections.abc import Sequence

from statexchange.comm.communicator import Communicator
from statexchange.exchange.reading import ReadItem
from statexchange.sharding.shards import Box, intersect
from statexchange.storage.regions import BoxDigest, blocks, to_global
from statexchange.storage.save_directory import rank_of_file
from statexchange.storage.store import ByteRange

__all__ = ["check_digests", "ranks_read"]


def ranks_read(items: Sequence[ReadItem]) -> list[int]:
    """Return the ranks whose files a load will read."""
    ranks = set()
    for item in items:
        for box, stored in item.boxes.items():
            rank = rank_of_file(os.path.basename(stored.file.path))
            if rank is not None and _is_read(box, item, in_part=False):
                ranks.add(rank)
    return sorted(ranks)


def check_digests(items: Sequence[ReadItem], comm: Communicator, *, every: bool) -> None:
    """Compare stored boxes with their digests: those that are read in part, or `every` one that is read."""
    checked = set()
    for item in items:
        for box, stored in item.boxes.items():
            place = (stored.file.path, stored.begin)
            # Reading checks a box that it reads whole; a part of one has no digest of its own.
            if place not in checked and _is_read(box, item, in_part=not every):
                checked.add(place)
                _check_box(item, box, stored, comm)


def _is_read(box: Box, item: ReadItem, *, in_part: bool) -> bool:
    """Whether a stored box is read for a live one; with `in_part`, whether it is read, but not as a whole."""
    for target in item.local.shard.boxes:
        shared = intersect(box, target)
        if shared is not None and not (in_part and shared == box):
            return True
    return False


def _check_box(item: ReadItem, box: Box, stored: ByteRange, comm: Communicator) -> None:
    box_digest = BoxDigest(stored, box, item.stored, always=True)
    for window, data in blocks(stored, box.shape, item.stored):
        box_digest.update(to_global(window, box), data)
        comm.progress()
    box_digest.check(item.name)
