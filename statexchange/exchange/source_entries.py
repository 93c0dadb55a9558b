"""The entries of an opened source by the names of the state, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from statexchange import values
from statexchange.errors import CorruptError
from statexchange.exchange.stored_tensors import StoredTensors
from statexchange.formats.source import Source
from statexchange.state.entries import Entries, Entry, OpaqueValue, RankEntries, SavedTensor, flatten_tree
from statexchange.state.flatten import LiveState, ObjectStates, types_in_objects
from statexchange.state.matching import NameFilter
from statexchange.state.types import Leaf
from statexchange.storage.json_text import decode_stored

__all__ = ["source_entries"]

T = TypeVar("T")


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

    # A lookup, and no function: a tree refers to each tensor of the source.

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
