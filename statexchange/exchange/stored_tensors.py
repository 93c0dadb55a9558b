"""Look up a source's tensors by its own names: dtype, shape, and the byte range of every box."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from statexchange.errors import CorruptError, ReplicaError
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import Replicas
from statexchange.sharding.plan import HolderLabel, holders_text
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.storage.byte_range import ByteRange

__all__ = ["StoredTensors", "differing_text"]


class _SavedPart(NamedTuple):
    """The part of a tensor that one rank has saved."""

    rank: int
    tensor: SourceTensor
    path: str
    label: HolderLabel


class StoredTensors:
    """The tensors of a source.

    If as many ranks load as have saved, `own_rank` is this rank, and its own part comes first. Otherwise `own_rank` is
    None, and the lowest rank's part comes first. `progress` is called again and again while copies are read to be
    compared.
    """

    def __init__(
        self, source: Source, replicas: Replicas, rank: int, world_size: int, progress: Callable[[], None]
    ) -> None:
        self.source = source
        self.world_size = world_size
        self.own_rank = rank if source.world_size == world_size else None
        self._takes_root = replicas == "root"
        self._progress = progress
        self._boxes: dict[str, dict[Box, ByteRange]] = {}  # what `boxes_of` has returned
        self._parts: dict[str, list[_SavedPart]] = {}
        self._to_read: dict[str, list[_SavedPart]] = {}  # what `_parts_to_read` has returned
        self.aliases: dict[str, str] = {}
        for shard_file in sorted(source.files, key=lambda file: (file.rank != self.own_rank, file.rank)):
            label = source.label_of(shard_file)
            for name, tensor in shard_file.tensors.items():
                part = _SavedPart(shard_file.rank, tensor, shard_file.path, label)
                self._parts.setdefault(tensor.shard.name or name, []).append(part)
            self.aliases |= shard_file.aliases
        if source.manifest is not None:
            self.aliases |= source.manifest.get("aliases", {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored(name) in self._parts

    def stored(self, name: str) -> str:
        """Return the name under which a tensor was written; a tied tensor was written under one of its names."""
        return name if name in self._parts else self.aliases.get(name, name)

    def _parts_to_read(self, name: str) -> list[_SavedPart]:
        """Return the parts of a tensor to read from: one if that is the whole tensor, and this rank's own or root's."""
        if name not in self._to_read:
            parts = self._parts[self.stored(name)]
            shard = parts[0].tensor.shard
            is_enough = len(parts) == 1 or parts[0].rank == self.own_rank or self._takes_root
            takes_first = is_enough and len(parts) > 1 and shard.boxes == (full_box(shard.global_shape),)
            self._to_read[name] = parts[:1] if takes_first else parts
        return self._to_read[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's global shape."""
        return self.shard_of(name).global_shape

    def shard_of(self, name: str) -> Shard:
        """Return a tensor's dtype and shape; raise CorruptError if the source's files disagree."""
        parts = self._parts_to_read(name)
        first = parts[0].tensor.shard
        for part in parts[1:]:
            shard = part.tensor.shard
            if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
                wholes = [one.boxes == (full_box(one.global_shape),) for one in (first, shard)]
                if all(wholes) and self.source.world_size not in (None, self.world_size):
                    what = f"{first.dtype} {list(first.global_shape)} and {shard.dtype} {list(shard.global_shape)} here"
                    text = differing_text(what, name, parts[0].label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
                raise CorruptError(
                    "two files disagree on dtype or shape",
                    name=name,
                    path=part.path,
                    expected=f"{first.dtype} {first.global_shape}",
                    found=f"{shard.dtype} {shard.global_shape}",
                )
        return first

    def boxes_of(self, name: str) -> dict[Box, ByteRange]:
        """Return the byte range of each box. Copies without digests, as in torch's files, are read and compared.

        Raise ReplicaError if copies differ, unless this rank saved one itself or `replicas` is "root".
        """
        if name in self._boxes:
            return self._boxes[name]
        boxes: dict[Box, ByteRange] = {}
        firsts: dict[Box, tuple[_SavedPart, int]] = {}  # the first part with each box, and its number there
        digests: dict[Box, str] = {}  # of the first copies that others were compared with
        for part in self._parts_to_read(name):
            for number, box in enumerate(part.tensor.shard.boxes):
                if not box.numel:
                    continue
                if box not in firsts:
                    firsts[box], boxes[box] = (part, number), part.tensor.byte_ranges[number]
                    continue
                first, index = firsts[box]
                if first.rank == self.own_rank or self._takes_root:
                    continue
                if box not in digests:
                    digests[box] = first.tensor.digest_of(index, self._progress)
                if part.tensor.digest_of(number, self._progress) != digests[box]:
                    text = differing_text(f"different values for region {box}", name, first.label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
        self._boxes[name] = boxes
        return boxes

    def holders_of(self, name: str) -> dict[Box, list[HolderLabel]]:
        """Return what messages call the holders of each box that is not empty."""
        holders: dict[Box, list[HolderLabel]] = {}
        for part in self._parts_to_read(name):
            for box in part.tensor.shard.boxes:
                if box.numel:
                    holders.setdefault(box, []).append(part.label)
        return holders


def differing_text(what: str, exclude: str | list[str], holder: HolderLabel, other: HolderLabel) -> str:
    """Return the message for a difference between the saves of two ranks, or files, with the remedies.

    `exclude` is "" if the whole state differs.
    """
    holders = holders_text(holder, other)
    leave = f"pass exclude={exclude!r} to leave the state as it is there, " if exclude else ""
    if isinstance(holder, int) and isinstance(other, int):
        return (
            f"{holders} saved {what}: load on as many ranks as have saved, so that each gets its own, {leave}or pass "
            f'replicas="root" to take rank {min(holder, other)}\'s'
        )
    return f'{holders} have {what}: give one of the files, {leave}or pass replicas="root" to take the first file\'s'
