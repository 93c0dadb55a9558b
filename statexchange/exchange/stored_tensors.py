"""What a source has of each tensor, and where the boxes lie that a rank reads of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from statexchange.comm.communicator import Communicator
from statexchange.errors import CorruptError, IncompleteError, ReplicaError, StateExchangeError
from statexchange.exchange.holders import Holders, holders_by_tensor
from statexchange.formats.listed_files import ListedFiles, ListedTensor
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import Replicas
from statexchange.sharding.plan import HolderLabel, holders_text, prove_cover
from statexchange.sharding.shards import Box, full_box, intersect
from statexchange.state.entries import SavedTensor
from statexchange.storage.save_index import IndexedTensor
from statexchange.storage.store import ByteRange

__all__ = ["StoredTensors", "differing_text"]


class _SavedPart(NamedTuple):
    """The part of a tensor that one rank, or one file, has."""

    rank: int
    tensor: SourceTensor | ListedTensor
    path: str
    label: HolderLabel


class _StoredTensor(NamedTuple):
    """A tensor of a source.

    Attributes:
        saved: its name, dtype and shape, as a leaf of what was saved.
        parts: the parts to read from; () if they are `listed`.
        boxes: the byte range of its one box, if one part is the whole tensor; None if the boxes of several parts have
            to be put together, which costs time, and only a tensor that is loaded is worth it.
        listed: the tensor and the places of its parts, by the index of a save.
    """

    saved: SavedTensor
    parts: Sequence[_SavedPart]
    boxes: Mapping[Box, ByteRange] | None
    listed: tuple[IndexedTensor, Holders] | None = None


class StoredTensors:
    """The tensors of a source.

    Attributes:
        source: the source.
        own_rank: this rank, if as many ranks load as have saved: its own parts come first then. Else None, and the
            lowest rank's parts come first.
        aliases: other names of tensors, with the name under which each was written.
        by_name: the tensors by name, those of `aliases` included.
        names: the names under which tensors were written.
        has_tree: whether the source is a save of ours with its state, and not tensors with a config beside them.
    """

    def __init__(self, source: Source, replicas: Replicas, comm: Communicator, aliases: Mapping[str, str]) -> None:
        self.source = source
        self._comm = comm
        self.own_rank = comm.rank if source.world_size == comm.world_size else None
        self._takes_root = replicas == "root"
        self._boxes: dict[str, Mapping[Box, ByteRange]] = {}  # what `_boxes_of_parts` has put together
        self.aliases: dict[str, str] = {}
        self.by_name: dict[str, _StoredTensor] = {}
        if isinstance(source.files, ListedFiles):
            self._add_listed(source.files)
        else:
            parts: dict[str, list[_SavedPart]] = {}
            for shard_file in sorted(source.files, key=lambda file: (file.rank != self.own_rank, file.rank)):
                path, label = shard_file.path, source.label_of(shard_file)
                for name, tensor in shard_file.tensors.items():
                    part = _SavedPart(shard_file.rank, tensor, path, label)
                    parts.setdefault(tensor.shard.name or name, []).append(part)
                self.aliases |= shard_file.aliases
            self.by_name = self._records(parts)
        if source.manifest is not None:
            self.aliases |= source.manifest.get("aliases", {})
        self.aliases |= aliases
        self.names = frozenset(self.by_name)
        has_leaves = any('"leaf"' in text for text in source.configs.values())
        self.has_tree = has_leaves or (bool(source.configs) and not self.names)
        # A tied tensor is written once. A saved tree has all its names, and errors give the one that is loaded.
        of_aliases = {}
        for alias, name in self.aliases.items():
            if alias not in self.names and name in self.names:
                stored = self.by_name[name]
                if stored.listed is None:
                    of_aliases[alias] = stored.parts
                else:
                    self.by_name[alias] = self._listed_record(alias, *stored.listed)
        self.by_name |= self._records(of_aliases)

    def _add_listed(self, files: ListedFiles) -> None:
        """Add the tensors of a save that has an index; opens no file."""
        state = None
        for rank in sorted(range(len(files.save_index.ranks)), key=lambda rank: rank != self.own_rank):
            if files.save_index.ranks[rank] != state:
                state = files.save_index.ranks[rank]
                self.aliases |= files.save_index.states[state].aliases
        of_names: dict[str, list[tuple[IndexedTensor, Holders]]] = {}
        for tensor, holders in holders_by_tensor(files, self.own_rank):
            of_names.setdefault(tensor.name, []).append((tensor, holders))
        parts: dict[str, list[_SavedPart]] = {}
        for name, of_name in of_names.items():
            if len(of_name) == 1:
                self.by_name[name] = self._listed_record(name, *of_name[0])
                continue
            # Ranks had other dtypes or shapes, and each gets its own.
            for tensor, holders in of_name:
                parts.setdefault(name, []).extend(_parts_at(files, tensor, holders))
            parts[name].sort(key=lambda part: (part.rank != self.own_rank, part.rank))
        self.by_name |= self._records(parts)

    def _records(self, parts: Mapping[str, Sequence[_SavedPart]]) -> dict[str, _StoredTensor]:
        """Return the record of each tensor, from the parts of it that ranks, or files, have."""
        records = {}
        for name, of_tensor in parts.items():
            first = of_tensor[0].tensor.shard
            shape = first.global_shape
            # Another rank's copy need not be compared: this rank gets back its own, or root's as the caller wants it.
            is_first_enough = len(of_tensor) == 1 or of_tensor[0].rank == self.own_rank or self._takes_root
            if is_first_enough and len(first.boxes) == 1 and first.boxes[0].shape == shape:
                boxes = {first.boxes[0]: of_tensor[0].tensor.byte_ranges[0]}
                records[name] = _StoredTensor(SavedTensor(name, first.dtype, shape), of_tensor[:1], boxes)
            else:
                records[name] = self._joined(name, of_tensor)
        return records

    def _listed_record(self, name: str, tensor: IndexedTensor, holders: Holders) -> _StoredTensor:
        saved = SavedTensor(name, tensor.dtype, tensor.shape, holders.cut_dims(tensor.shape))
        return _StoredTensor(saved, (), None, (tensor, holders))

    def _joined(self, name: str, parts: Sequence[_SavedPart]) -> _StoredTensor:
        """Return the record of a tensor of several parts, or of one that is not all of it."""
        first = parts[0].tensor.shard
        shape = first.global_shape
        # Of an FSDP2 save each tensor comes here, from all ranks: no calls in this loop.
        cut_dims: set[int] = set()
        problem: StateExchangeError | None = None
        for part in parts:
            shard = part.tensor.shard
            if problem is None and (shard.dtype, shard.global_shape) != (first.dtype, shape):
                problem = self._disagreement(name, parts[0], part)
            for box in shard.boxes:
                if box.shape != shape and 0 not in box.shape:
                    sizes = enumerate(zip(box.shape, shape, strict=False))
                    cut_dims.update([dim for dim, (size, whole) in sizes if size != whole])
        return _StoredTensor(SavedTensor(name, first.dtype, shape, frozenset(cut_dims), problem), parts, None)

    def _disagreement(self, name: str, one: _SavedPart, other: _SavedPart) -> StateExchangeError:
        """Return the error for two parts of different dtypes or shapes. It is raised only if the tensor is loaded."""
        first, second = one.tensor.shard, other.tensor.shard
        are_whole = first.is_whole and second.is_whole
        # Ranks may have had plain tensors of different shapes, and on their own number each would get its own back.
        if are_whole and self.source.world_size not in (None, self._comm.world_size):
            shapes = f"{first.dtype} {list(first.global_shape)} and {second.dtype} {list(second.global_shape)} here"
            text = differing_text(shapes, name, one.label, other.label)
            return ReplicaError(text, name=name, rank=other.rank, path=other.path)
        return CorruptError(
            "two files disagree on dtype or shape",
            name=name,
            path=other.path,
            expected=f"{first.dtype} {first.global_shape}",
            found=f"{second.dtype} {second.global_shape}",
        )

    def boxes_of(self, stored: _StoredTensor, needed: Sequence[Box]) -> Mapping[Box, ByteRange]:
        """Return the byte ranges of the boxes of a tensor, at least of all that overlap the boxes that are needed.

        Copies without digests, as in torch's files, are read and compared.

        Raises:
            ReplicaError: copies differ, unless this rank saved one itself or `replicas` is "root".
            IncompleteError, OverlapError: the boxes are not those of a whole tensor.
        """
        if stored.boxes is not None:
            return stored.boxes
        name = stored.saved.name
        if stored.listed is not None:
            assert isinstance(self.source.files, ListedFiles)
            return self._boxes_of_listed(name, self.source.files, *stored.listed, needed)
        # Once for all that is needed of it, as copies may have to be read.
        if name not in self._boxes:
            whole = full_box(stored.saved.shape)
            self._boxes[name] = self._boxes_of_parts(name, stored.parts, [whole])
        return self._boxes[name]

    def _boxes_of_listed(
        self, name: str, files: ListedFiles, tensor: IndexedTensor, holders: Holders, needed: Sequence[Box]
    ) -> Mapping[Box, ByteRange]:
        first, whole = holders.places[0], full_box(tensor.shape)
        is_first_enough = self._takes_root or files.rank_of(first.file) == self.own_rank
        boxes: dict[Box, ByteRange] = {}
        if is_first_enough and files.save_index.boxes_at(first.layout, first.coordinate, tensor.shape) == (whole,):
            boxes[whole] = files.part(tensor, first).byte_ranges[0]
        elif holders.is_exact(tensor.shape):
            for box in needed:
                for part, place in holders.overlapping(tensor.shape, box):
                    listed = files.part(tensor, place)
                    boxes[part] = listed.byte_ranges[listed.shard.boxes.index(part)]
        else:
            boxes |= self._boxes_of_parts(name, _parts_at(files, tensor, holders), needed)
        return boxes

    def _boxes_of_parts(self, name: str, parts: Sequence[_SavedPart], needed: Sequence[Box]) -> Mapping[Box, ByteRange]:
        """Return the byte ranges of the boxes that overlap what is needed; copies of these are compared."""
        holders: dict[Box, list[HolderLabel]] = {}
        firsts: dict[Box, tuple[_SavedPart, int]] = {}  # the first part with each box, and its number there
        digests: dict[Box, str] = {}  # of the first copies that others were compared with
        for part in parts:
            for number, box in enumerate(part.tensor.shard.boxes):
                if 0 in box.shape:
                    continue
                holders.setdefault(box, []).append(part.label)
                if box not in firsts:
                    firsts[box] = part, number
                    continue
                first, index = firsts[box]
                if first.rank == self.own_rank or self._takes_root or not _overlaps(box, needed):
                    continue
                # Other ranks wait meanwhile: reading a large copy must count as progress.
                if box not in digests:
                    digests[box] = first.tensor.digest_of(index, self._comm.progress)
                if part.tensor.digest_of(number, self._comm.progress) != digests[box]:
                    text = differing_text(f"different values for region {box}", name, first.label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
        try:
            prove_cover(name, parts[0].tensor.shard.global_shape, holders)
        except (CorruptError, IncompleteError) as error:
            raise error.located(name=name, path=self.source.path) from error
        boxes = {}
        for box, (part, number) in firsts.items():
            if _overlaps(box, needed):
                boxes[box] = part.tensor.byte_ranges[number]
        return boxes


def _overlaps(box: Box, needed: Sequence[Box]) -> bool:
    return any(intersect(box, other) is not None for other in needed)


def _parts_at(files: ListedFiles, tensor: IndexedTensor, holders: Holders) -> list[_SavedPart]:
    """Return the parts of a tensor by the index of a save; opens no file."""
    parts = []
    for place in holders.places:
        rank = files.rank_of(place.file)
        parts.append(_SavedPart(rank, files.part(tensor, place), files.path_of(place.file), rank))
    return parts


def differing_text(what: str, exclude: str | list[str], holder: HolderLabel, other: HolderLabel) -> str:
    """Return the message for a difference between the saves of two ranks, or files, with the remedies.

    `exclude` is "" if the whole state differs.
    """
    holders = holders_text(holder, other)
    leave = ""
    if exclude:
        leave = f"pass exclude={exclude!r} to leave the state as it is there, "
    if isinstance(holder, int) and isinstance(other, int):
        return (
            f"{holders} saved {what}: load on as many ranks as have saved, so that each gets its own, {leave}or pass "
            f'replicas="root" to take rank {min(holder, other)}\'s'
        )
    return f'{holders} have {what}: give one of the files, {leave}or pass replicas="root" to take the first file\'s'
