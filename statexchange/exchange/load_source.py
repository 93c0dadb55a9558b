"""Open the source of a load, and find what it has by the names of the state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from statexchange import values
from statexchange.comm.communicator import Communicator
from statexchange.errors import CorruptError, InvalidArgumentError, NotFoundError, StateExchangeError
from statexchange.exchange.load_converting import ConvertedSource, converted_for_load
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.reading import StoredTensors
from statexchange.formats.registry import open_source
from statexchange.formats.save_files import ListedFiles
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, sections_of, select_section
from statexchange.formats.source import KINDS_WITH_KEYS, Source
from statexchange.state.entries import (
    Entries,
    Entry,
    OpaqueValue,
    RankEntries,
    SavedTensor,
    flatten_tree,
    is_empty_mapping,
)
from statexchange.state.load_plan import Matching, NameFilter, has_wrappers
from statexchange.state.tree import LiveState, flatten, types_in_objects
from statexchange.state.units import ObjectStates, is_module, module_items
from statexchange.storage.location import decode_stored

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadSource:
    """A source by the names of the state.

    Attributes:
        converted: the source as it is loaded, and what a conversion has left out.
        tensors: its tensors by its own names.
        matching: its entries, and what decides which of them fill the state.
        live: the live state.
    """

    converted: ConvertedSource
    tensors: StoredTensors
    matching: Matching
    live: LiveState


def open_for_state(request: LoadRequest, comm: Communicator) -> Source:
    """Open the part of the source that the state needs; on several hosts NotFoundError names the one that lacks it.

    For a conversion that is the model. From a training framework's directory it is the model, too, unless the state is
    a mapping with sections as keys, which needs all parts.
    """
    section: str | None = MODEL_OF_PARTS
    if request.conversion is not None:
        section = None
    elif isinstance(request.state, Mapping) and not set(SECTIONS).isdisjoint(request.state):
        section = ALL
    try:
        source = open_source(request.path, section=section, ranks=(comm.rank, comm.world_size))
    except NotFoundError as error:
        if comm.num_nodes == 1:
            raise
        text = f"{error.message} on {comm.hosts[comm.rank]}; all hosts must see the source"
        raise NotFoundError(text, rank=comm.rank, path=error.path) from error
    # A mapping says by its keys what it wants of a job's state; a module wants the model.
    if section is None or not is_module(request.state) or source.kind not in KINDS_WITH_KEYS:
        return source
    return _model_of_job(request, source)


def _model_of_job(request: LoadRequest, source: Source) -> Source:
    """Return the model's section alone if the source is a job's state, unless the module has its prefix in names."""
    for section in sections_of(source):
        if section.name == "model" and section.prefix:
            # A wrapper of the user's own may have the model under that very name.
            names = module_items(request.state, keep_vars=True).keys()
            if section.names.isdisjoint(names):
                return select_section(source, section.name)
    return source


def source_content(request: LoadRequest, source: Source, comm: Communicator) -> LoadSource:
    """Return what an opened source has by the names of the state. Not collective; reads no tensor."""
    state, options = request.state, request.options
    live = flatten(state)
    if isinstance(source.files, ListedFiles):  # opens none of them
        stored = {tensor.name for tensor in source.files.save_index.tensors}
    else:
        stored = source.tensor_names
    names = NameFilter(options, live.units, strips_wrappers=has_wrappers(stored, state))
    converted = ConvertedSource(source, names)
    # Only a module can be a model of transformers or PEFT, whose names in files are others.
    if request.conversion is not None or is_module(state):
        converted = converted_for_load(request, source, names)
    source, names = converted.source, converted.names
    # From here on the source is the converted one; the opened one only holds the files.
    tensors = StoredTensors(source, options.replicas, comm, converted.aliases)
    objects = ObjectStates()
    matching = Matching(
        names=names,
        entries=_source_entries(source, tensors, names, state, live, objects),
        objects=objects,
        has_tree=tensors.has_tree,
        classes={names.place(path): classes for path, classes in source.optimizers.items()},
        path=source.path,
        saved_by=source.world_size,
        loaded_by=comm.world_size,
    )
    if matching.has_tree:
        _check_layout(matching)
    if source.left_out:
        matching.left_out = _left_out(matching, source, tensors.own_rank)
    return LoadSource(converted, tensors, matching, live)


def _left_out(matching: Matching, source: Source, own_rank: int | None) -> frozenset[str]:
    """Return the paths of what a save was asked to leave out, and has from no rank, by the names of the state."""
    candidates: set[str] = set()
    for rank, paths in source.left_out.items():
        if own_rank in (None, rank):
            candidates.update(map(matching.names.path, paths))
    absent = set()
    for path in candidates:
        # In the place of an item of a list is an empty mapping.
        if all(is_empty_mapping(entry.leaf) for entry in matching.entries.below(path)):
            absent.add(path)
    return frozenset(absent)


def _check_layout(matching: Matching) -> None:
    """Raise InvalidArgumentError for a rule that renames tensors, as for an export, and a source that is a save."""
    for rule in matching.layout.rules.values():
        if rule.renames:
            text = (
                f"layout rule for {rule.pattern!r} renames tensors, and this source was saved with the names that the "
                "state has: leave it out"
            )
            raise InvalidArgumentError(text)


@contextlib.contextmanager
def located(path: str) -> Iterator[None]:
    """Let an error about the state name the source, too."""
    try:
        yield
    except StateExchangeError as error:
        if error.path is not None:
            raise
        raise error.located(path=path) from error.__cause__


def _source_entries(
    source: Source, tensors: StoredTensors, names: NameFilter, state: object, live: LiveState, objects: ObjectStates
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
        if names.changes_names:
            of_rank.templates = _moved(of_rank.templates, names)
            of_rank.containers = _moved(of_rank.containers, names)
        ranks.append(of_rank)
    return Entries(ranks, is_own=tensors.own_rank is not None)


def _moved(by_path: Mapping[str, T], names: NameFilter) -> dict[str, T]:
    return {names.place(path): value for path, value in by_path.items()}


class _TreeLeaves(dict[str, SavedTensor]):
    """The tensors that a saved tree may refer to, by name; `path` is that of the source."""

    def __init__(self, tensors: StoredTensors, path: str) -> None:
        super().__init__({name: stored.saved for name, stored in tensors.by_name.items()})
        self._path = path

    def __missing__(self, name: str) -> SavedTensor:
        raise CorruptError("the saved state has this tensor, but no file has it", name=name, path=self._path)


def _decoded_trees(
    source: Source, tensors: StoredTensors, types: Mapping[str, type], unknown: list[values.UnknownValue]
) -> dict[int, object]:
    """Return the trees that ranks saved, by rank, and add the values of unknown types to the list.

    Equal trees count once. If as many ranks load as have saved, this rank's tree comes first, as its entries count.
    """
    path = source.path
    leaves = _TreeLeaves(tensors, path)
    decode = partial(values.decode_parsed, types=types, leaves=leaves, unknown=unknown)
    trees: dict[int, object] = {}
    decoded: set[str] = set()
    # As many trees as ranks, most of them equal: decoding one takes as long as reading all its tensors' headers.
    for rank in sorted(source.configs, key=lambda rank: (rank != tensors.own_rank, rank)):
        text = source.configs[rank]
        if text not in decoded:
            decoded.add(text)
            trees[rank] = decode_stored(text, path, source.budget, decode)
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
    decoded: dict[str, object] = {}  # flattened groups repeat the same few values for each parameter
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
