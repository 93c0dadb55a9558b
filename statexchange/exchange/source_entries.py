"""What a source has for a load: its tensors, one record each, and its entries by the names of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from statexchange import values
from statexchange.comm.communicator import Communicator
from statexchange.errors import CorruptError, IncompleteError, ReplicaError, StateExchangeError
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import Replicas
from statexchange.sharding.plan import HolderLabel, holders_text, prove_cover
from statexchange.sharding.shards import Box, Shard
from statexchange.state.entries import Entries, Entry, OpaqueValue, RankEntries, SavedTensor, flatten_tree
from statexchange.state.flatten import LiveState, types_in_objects
from statexchange.state.install import NameFilter
from statexchange.state.types import Leaf
from statexchange.state.units import ObjectStates
from statexchange.storage.json_text import decode_stored
from statexchange.storage.store import ByteRange

__all__ = ["StoredTensor", "StoredTensors", "differing_text", "source_entries"]

T = TypeVar("T")


class _SavedPart(NamedTuple):
    """The part of a tensor that one rank, or one file, has."""

    rank: int
    tensor: SourceTensor
    path: str
    label: HolderLabel


class StoredTensor(NamedTuple):
    """A tensor of a source.

    Attributes:
        saved: its name, dtype and shape, as a leaf of what was saved.
        parts: the parts to read from.
        boxes: the byte range of its one box, if one part is the whole tensor; None if the boxes of several parts have
            to be put together, which costs time, and only a tensor that is loaded is worth it.
    """

    saved: SavedTensor
    parts: Sequence[_SavedPart]
    boxes: Mapping[Box, ByteRange] | None


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
        self._boxes: dict[str, Mapping[Box, ByteRange]] = {}  # what `boxes_of` has put together
        self.aliases: dict[str, str] = {}
        parts: dict[str, list[_SavedPart]] = {}
        for shard_file in sorted(source.files, key=lambda file: (file.rank != self.own_rank, file.rank)):
            path, label = shard_file.path, source.label_of(shard_file)
            for name, tensor in shard_file.tensors.items():
                part = _SavedPart(shard_file.rank, tensor, path, label)
                parts.setdefault(tensor.shard.name or name, []).append(part)
            self.aliases |= shard_file.aliases
        if source.manifest is not None:
            self.aliases |= source.manifest.get("aliases", {})
        self.aliases |= aliases
        self.names = parts.keys()
        has_leaves = any('"leaf"' in text for text in source.configs.values())
        self.has_tree = has_leaves or (bool(source.configs) and not parts)
        self.by_name = self._records(parts)
        # A tied tensor is written once. A saved tree has all its names, and errors give the one that is loaded.
        of_aliases = {}
        for alias, name in self.aliases.items():
            if alias not in parts and name in parts:
                of_aliases[alias] = parts[name]
        self.by_name |= self._records(of_aliases)

    def _records(self, parts: Mapping[str, Sequence[_SavedPart]]) -> dict[str, StoredTensor]:
        """Return the record of each tensor, from the parts of it that ranks, or files, have."""
        records = {}
        for name, of_tensor in parts.items():
            first = of_tensor[0].tensor.shard
            shape = first.global_shape
            # Another rank's copy need not be compared: this rank gets back its own, or root's as the caller wants it.
            is_first_enough = len(of_tensor) == 1 or of_tensor[0].rank == self.own_rank or self._takes_root
            if is_first_enough and len(first.boxes) == 1 and first.boxes[0].shape == shape:
                boxes = {first.boxes[0]: of_tensor[0].tensor.byte_ranges[0]}
                records[name] = StoredTensor(SavedTensor(name, first.dtype, shape), of_tensor[:1], boxes)
            else:
                records[name] = self._joined(name, of_tensor)
        return records

    def _joined(self, name: str, parts: Sequence[_SavedPart]) -> StoredTensor:
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
        return StoredTensor(SavedTensor(name, first.dtype, shape, frozenset(cut_dims), problem), parts, None)

    def _disagreement(self, name: str, one: _SavedPart, other: _SavedPart) -> StateExchangeError:
        """Return the error for two parts of different dtypes or shapes. It is raised only if the tensor is loaded."""
        first, second = one.tensor.shard, other.tensor.shard
        are_whole = _is_whole(first) and _is_whole(second)
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

    def boxes_of(self, stored: StoredTensor) -> Mapping[Box, ByteRange]:
        """Return the byte range of each box of a tensor that has several parts.

        Copies without digests, as in torch's files, are read and compared.

        Raises:
            ReplicaError: copies differ, unless this rank saved one itself or `replicas` is "root".
            IncompleteError, OverlapError: the boxes are not those of a whole tensor.
        """
        name = stored.saved.name
        if name in self._boxes:
            return self._boxes[name]
        boxes: dict[Box, ByteRange] = {}
        holders: dict[Box, list[HolderLabel]] = {}
        firsts: dict[Box, tuple[_SavedPart, int]] = {}  # the first part with each box, and its number there
        digests: dict[Box, str] = {}  # of the first copies that others were compared with
        for part in stored.parts:
            for number, box in enumerate(part.tensor.shard.boxes):
                if 0 in box.shape:
                    continue
                holders.setdefault(box, []).append(part.label)
                if box not in firsts:
                    firsts[box], boxes[box] = (part, number), part.tensor.byte_ranges[number]
                    continue
                first, index = firsts[box]
                if first.rank == self.own_rank or self._takes_root:
                    continue
                # Other ranks wait meanwhile: reading a large copy must count as progress.
                if box not in digests:
                    digests[box] = first.tensor.digest_of(index, self._comm.progress)
                if part.tensor.digest_of(number, self._comm.progress) != digests[box]:
                    text = differing_text(f"different values for region {box}", name, first.label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
        try:
            prove_cover(name, stored.saved.shape, holders)
        except (CorruptError, IncompleteError) as error:
            raise self.source.explained(error).located(name=name, path=self.source.path) from error
        self._boxes[name] = boxes
        return boxes


def _is_whole(shard: Shard) -> bool:
    return len(shard.boxes) == 1 and shard.boxes[0].shape == shard.global_shape


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


# Entries


def source_entries(
    source: Source, tensors: StoredTensors, names: NameFilter, state: Leaf, live: LiveState, objects: ObjectStates
) -> Entries:
    """Return the entries of a source by the names of the state. Not collective; reads no tensor.

    Raises:
        UnsafeError: `rename` gives two entries one name.
        CorruptError: the saved state has a tensor that no file has.
    """
    if not tensors.has_tree:
        of_names = _named_entries(source, tensors)
        of_names.entries = names.entries(of_names.entries, source.path)
        return Entries([of_names], keys_are_texts=source.kind == "dcp")
    types = values.types_of(state)
    unknown: list[values.UnknownValue] = []
    trees = _decoded_trees(source, tensors, types, unknown)
    # Objects may know the types inside their states. To ask one for its state may have effects, so that they are asked
    # only for a type that is not known yet.
    if unknown:
        types |= types_in_objects(live, names.options, objects)
        trees = _decoded_trees(source, tensors, types, unknown)
    ranks = []
    for rank, tree in trees.items():
        of_rank = RankEntries(rank)
        flatten_tree(tree, of_rank)
        of_rank.entries = names.entries(of_rank.entries, source.path)
        if names.renames:
            of_rank.templates = _moved(of_rank.templates, names)
            of_rank.containers = _moved(of_rank.containers, names)
        ranks.append(of_rank)
    return Entries(ranks, is_own=tensors.own_rank is not None)


def _moved(by_path: Mapping[str, T], names: NameFilter) -> dict[str, T]:
    return {names.place(path): value for path, value in by_path.items()}


class _TreeLeaves(dict[str, SavedTensor]):
    """The tensors that a saved tree may refer to, by name."""

    path = ""

    def __missing__(self, name: str) -> SavedTensor:
        raise CorruptError("the saved state has this tensor, but no file has it", name=name, path=self.path)


def _decoded_trees(
    source: Source, tensors: StoredTensors, types: Mapping[str, type], unknown: list[values.UnknownValue]
) -> dict[int, Leaf]:
    """Return the trees that ranks saved, by rank, and add the values of unknown types to the list.

    Equal trees count once. If as many ranks load as have saved, this rank's tree comes first, as its entries count.
    """
    leaves = _TreeLeaves({name: stored.saved for name, stored in tensors.by_name.items()})
    leaves.path = source.path
    trees: dict[int, Leaf] = {}
    decoded: set[str] = set()
    # As many trees as ranks, most of them equal: decoding one takes as long as reading all its tensors' headers.
    for rank in sorted(source.configs, key=lambda rank: (rank != tensors.own_rank, rank)):
        text = source.configs[rank]
        if text not in decoded:
            decoded.add(text)
            trees[rank] = decode_stored(text, source.path, source.budget, types=types, leaves=leaves, unknown=unknown)
    return trees


def _named_entries(source: Source, tensors: StoredTensors) -> RankEntries:
    """Return the entries of a source without a saved tree, in its order, with the keys that it knows."""
    of_names = RankEntries(0)
    keys_of, entries = source.paths, of_names.entries
    for name in tensors.names:
        entries.append(Entry(name, keys_of.get(name, ()), tensors.by_name[name].saved, name))
    for alias, name in tensors.aliases.items():
        if alias not in tensors.names and name in tensors.names:
            entries.append(Entry(alias, keys_of.get(alias, ()), tensors.by_name[name].saved, alias, is_alias=True))
    decoded: dict[str, Leaf] = {}  # flattened groups repeat the same few values for each parameter
    for name, description in source.others.items():
        text = source.texts.get(name)
        keys = keys_of.get(name, ())
        if text is None:
            entries.append(Entry(name, keys, OpaqueValue(description), name))
        elif text[0] in "[{":
            value = values.decode(text)
            flatten_tree(value, of_names, Entry(name, keys, value, name))
        else:
            if text not in decoded:
                decoded[text] = values.decode(text)
            entries.append(Entry(name, keys, decoded[text], name))
    positions = dict(zip(keys_of, range(len(keys_of)), strict=True))
    entries.sort(key=lambda entry: positions.get(entry.name, -1))
    return of_names
