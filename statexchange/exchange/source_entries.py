"""The entries of an opened source by the names of the live state, whatever its format, and whose they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from statexchange import values
from statexchange.errors import CorruptError, ReplicaError
from statexchange.exchange.stored_tensors import StoredTensors, differing_text
from statexchange.formats.source import Source
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.paths import paths_above
from statexchange.sharding.rules import with_dots
from statexchange.state.entries import Conflicts, Entries, RankEntries, flatten_tree
from statexchange.state.entry import Entry
from statexchange.state.flatten import LiveState
from statexchange.state.load_plan import ObjectStates
from statexchange.state.modules import live_items
from statexchange.state.name_filter import NameFilter
from statexchange.state.optimizers import state_of_optimizer
from statexchange.state.saved_values import OpaqueValue, SavedTensor, UnknownValue
from statexchange.storage.json_text import decode_stored
from statexchange.tensors import is_torch
from statexchange.units import format_number

__all__ = ["check_conflicts", "check_ranks", "has_tree", "source_entries"]

_MOST_NAMES = 3  # that a message lists


def has_tree(source: Source, tensors: StoredTensors) -> bool:
    """Whether a source is a save of ours with its state, and not tensors with a config beside them."""
    return bool(source.configs) and (not len(tensors) or any('"leaf"' in text for text in source.configs.values()))


def source_entries(
    source: Source, tensors: StoredTensors, names: NameFilter, state: Any, live: LiveState, objects: ObjectStates
) -> Entries:
    """Return the entries of a source by the names of the state. Not collective; reads no tensor.

    Raises:
        UnsafeError: `rename` gives two entries one name.
        CorruptError: the saved state has a tensor that no file has.
    """
    if not has_tree(source, tensors):
        of_names = RankEntries(0)
        _add_named_entries(of_names, source, tensors)
        positions = {name: position for position, name in enumerate(source.paths)}  # in the order of the source
        of_names.entries.sort(key=lambda entry: positions.get(entry.name, -1))
        of_names.entries = names.entries(of_names.entries, source.path)
        return Entries([of_names], keys_are_texts=source.kind == "dcp")
    # Equal ranks count once; this rank comes first if as many load as have saved.
    configs = sorted(source.configs.items(), key=lambda item: (item[0] != tensors.own_rank, item[0]))
    ranks: dict[str, int] = {}
    for rank, text in configs:
        ranks.setdefault(text, rank)
    unknown: list[UnknownValue] = []
    types = values.types_of(state)
    trees = _decoded_trees(source, tensors, ranks, types, unknown)
    # Objects may know the types inside their states. To ask one for its state may have effects, so that they are asked
    # only for a type that is not known yet.
    if unknown:
        types |= _types_in_objects(live, names.options, objects)
        trees = _decoded_trees(source, tensors, ranks, types, unknown)
    found = []
    for rank, tree in trees.items():
        of_rank = RankEntries(rank)
        flatten_tree(tree, of_rank)
        of_rank.entries = names.entries(of_rank.entries, source.path)
        if names.renames:
            of_rank.templates = {names.place(path): value for path, value in of_rank.templates.items()}
            of_rank.containers = {names.place(path): kind for path, kind in of_rank.containers.items()}
        found.append(of_rank)
    return Entries(found, is_own=tensors.own_rank is not None)


def _decoded_trees(
    source: Source,
    tensors: StoredTensors,
    ranks: Mapping[str, int],
    types: Mapping[str, type],
    unknown: list[UnknownValue],
) -> dict[int, Any]:
    """Return the trees that ranks saved, and add the values of unknown types to the list."""

    def leaf(name: str) -> SavedTensor:
        if name not in tensors:
            text = "the saved state has this tensor, but no file has it"
            raise CorruptError(text, name=name, path=source.path)
        return SavedTensor(name)

    def placeholder(type_name: str, text: str, problem: str) -> UnknownValue:
        unknown.append(UnknownValue(type_name, text, problem))
        return unknown[-1]

    return {
        rank: decode_stored(text, source.path, source.budget, types=types, leaf=leaf, unknown=placeholder)
        for text, rank in ranks.items()
    }


def _types_in_objects(live: LiveState, options: LoadOptions, objects: ObjectStates) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in the states of live objects, by qualified name."""
    found: dict[str, type] = {}
    for entry in live.entries:
        if not (options.wants(entry.text) or options.may_want(entry.text)):
            continue
        if entry.kind == "module":
            found |= values.types_of(live_items(entry.value)[1])
        elif entry.kind == "optimizer":
            optimizer = entry.value
            shared = {key: value for key, value in optimizer.state.items() if not is_torch(key)}
            more = state_of_optimizer(optimizer, entry.text)["more"]
            found |= values.types_of([optimizer.param_groups, list(optimizer.state.values()), shared, more])
        elif entry.kind == "object":
            found |= values.types_of(objects.of(entry.value, entry.text))
    return found


def _add_named_entries(found: RankEntries, source: Source, tensors: StoredTensors) -> None:
    """Add the entries of a source without a saved tree, with the keys that it knows."""
    found.entries += [Entry(name, _keys(source, name), SavedTensor(name), name) for name in tensors]
    for alias, name in tensors.aliases.items():
        if tensors.stored(alias) != alias:
            found.entries.append(Entry(alias, _keys(source, alias), SavedTensor(name), alias, is_alias=True))
    decoded: dict[str, Any] = {}  # flattened groups repeat the same few values for each parameter
    for name, description in source.others.items():
        text = source.texts.get(name)
        if text is None:
            found.entries.append(Entry(name, _keys(source, name), OpaqueValue(description), name))
        elif text[0] in "[{":
            value = values.decode(text)
            flatten_tree(value, found, Entry(name, _keys(source, name), value, name))
        else:
            if text not in decoded:
                decoded[text] = values.decode(text)
            found.entries.append(Entry(name, _keys(source, name), decoded[text], name))


def _keys(source: Source, name: str) -> tuple[Any, ...]:
    return source.paths.get(name, ())


# Values that differ between ranks


def check_conflicts(conflicts: Conflicts, loaded: Collection[str], tensors: StoredTensors) -> None:
    """Raise ReplicaError for values that are loaded, and that ranks saved differently."""
    places = _places(loaded)
    names = [name for name in conflicts if name in places]
    if not names:
        return
    rank, other = conflicts[names[0]]
    others = ""
    if len(names) > 1:
        others = " and 1 other entry" if len(names) == 2 else f" and {len(names) - 1} other entries"
    what = f"different values of {names[0]!r}{others}" if names[0] else "different states"
    raise ReplicaError(differing_text(what, _excluding(names), rank, other), rank=other, path=tensors.source.path)


def check_ranks(per_rank: Iterable[str], loaded: Collection[str], tensors: StoredTensors, *, takes_root: bool) -> None:
    """Raise ReplicaError if what belongs to a rank is loaded, on another number of ranks than have saved it.

    It is refused even if it is equal on all ranks: ranks with one random state draw the same numbers, and a position in
    one rank's part of the data repeats or skips samples in another. With ``replicas="root"`` the state of an object is
    loaded nevertheless, but not that of a part of a parameter, which fits no other part.
    """
    names = _places(loaded).intersection(per_rank)
    if takes_root:
        names &= {*map(with_dots, tensors)}  # these are parts of parameters
    if names:
        name, ranks = min(names), tensors.source.world_size or 1
        leave = f": pass exclude={name!r} to leave it as it is on each rank" if name else ""
        raise ReplicaError(
            f"{name or 'the state'!r} belongs to a rank, and fits the same number of ranks only: "
            f"{format_number(ranks, 'rank')} saved it, and the world size is {tensors.world_size} now{leave}",
            name=name or None,
            path=tensors.source.path,
        )


def _places(loaded: Collection[str]) -> set[str]:
    """Return the paths of all that is loaded, and of what contains it."""
    places = {path for text in loaded for path in paths_above(text)}
    return {"", *places} if places else places


def _excluding(names: Sequence[str]) -> str | list[str]:
    """Return what to pass as `exclude`: a few names, or patterns for the entries of the state that hold many."""
    while len(names) > _MOST_NAMES:
        paths = [name.removesuffix(".*") for name in names]
        outer = sorted({f"{path.rpartition('.')[0] or path}.*" for path in paths})
        if len(outer) == len(names):
            break
        names = outer
    return names[0] if len(names) == 1 else list(names)
