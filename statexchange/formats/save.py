"""Read the directory of one save, or one rank's file of it, as a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, ReplacedError, StateExchangeError, excerpt
from statexchange.formats.save_files import ListedFiles
from statexchange.formats.source import ShardFile, Source, parsing
from statexchange.storage.location import OpenedPath, parse_stored
from statexchange.storage.publish.claim import claim_of
from statexchange.storage.save_index import SaveIndex
from statexchange.storage.tensorfile import (
    MANIFEST,
    IndexedState,
    SaveManifest,
    is_of_a_save,
    open_rank_file,
    rank_of_file,
    read_manifest,
)
from statexchange.units import format_number


def matches(opened: OpenedPath) -> bool:
    """Whether a path is the directory of a save, or a rank's file of one.

    Rank files match without the manifest too, as in an unfinished copy: else each would be read as a checkpoint of its
    own, and its part of the tensors would be taken for all.
    """
    has_manifest = opened.store.listing.get(MANIFEST) == "file"
    if has_manifest and opened.file is None:
        return True
    for name in opened.names:
        if rank_of_file(name) is not None:
            return has_manifest or is_of_a_save(opened.store, name)
    return False


def read(opened: OpenedPath, ranks: tuple[int, int] | None = None) -> Source:
    """Return the source at a path.

    Args:
        opened: the opened path.
        ranks: this rank and the number of ranks of a job that loads it. Files are then opened when they are read, if
            the save has an index.

    Raises:
        IncompleteError: a rank's file is missing, or the manifest.
        CorruptError: the manifest or a header is broken, or the manifest does not list the file.
    """
    manifest = _manifest_of(opened)
    index = None
    # The headers are the record: where all files are opened, the index is only compared with them.
    if manifest.index:
        path, num_files = opened.store.path_of(MANIFEST), len(manifest.all_files)
        budget = opened.store.budget.of(path, len(manifest.index))
        index = SaveIndex.parse(manifest.index, num_files, manifest.world_size, path, budget)
        if ranks is not None and opened.file is None:
            return _indexed(opened, manifest, index, ranks)
    problems: list[StateExchangeError] = []
    files: list[ShardFile] = []
    configs: dict[int, str] = {}
    states: dict[int, IndexedState] = {}
    listed = manifest.all_files
    if opened.file is not None and opened.file not in [of_rank.name for of_rank in listed]:
        raise CorruptError(f"{MANIFEST} beside this file does not list it: it is of another save", path=opened.path)
    for number, of_rank in enumerate(listed):
        if opened.file not in (None, of_rank.name):
            continue
        rank = of_rank.rank
        try:
            file = open_rank_file(opened.store, manifest, of_rank)
            if index is not None:
                index.check(number, file.shards, file.metadata, file.path)
            files.append(ShardFile.of_rank(file))
            if number < manifest.world_size:  # others have frozen parameters alone, and no state
                configs[rank] = file.config
                with parsing("broken record of a rank's state", path=file.path):
                    states[rank] = IndexedState.from_json(file.metadata)
        except ReplacedError:  # the caller opens the path again
            raise
        except StateExchangeError as error:
            problems.append(error)
    if opened.file is not None:
        problems += _absent_tensors(files, configs)
    return replace(_source(opened, manifest, files, configs, states), problems=problems)


def _indexed(opened: OpenedPath, manifest: SaveManifest, index: SaveIndex, ranks: tuple[int, int]) -> Source:
    """Return the source for one rank of a job, of which files are opened when they are read."""
    files = ListedFiles(opened, manifest, index)
    # Ranks of equal values need not be asked twice; what belongs to a rank it reads from its own file.
    firsts: dict[str, int] = {}
    rank, num_ranks = ranks
    if num_ranks == manifest.world_size:
        firsts[index.values[rank]] = rank
    for saved_by, values in enumerate(index.values):
        firsts.setdefault(values, saved_by)
    configs = {first: files.config_of(first) for first in firsts.values()}
    states = {saved_by: index.states[number] for saved_by, number in enumerate(index.ranks)}
    return _source(opened, manifest, files, configs, states)


def _source(
    opened: OpenedPath,
    manifest: SaveManifest,
    files: Sequence[ShardFile],
    configs: Mapping[int, str],
    states: Mapping[int, IndexedState],
) -> Source:
    """Return the source of a save with these files, configs and states by rank."""
    optimizers: dict[str, frozenset[str]] = {}
    for state in states.values():
        for path, kind in state.optimizers.items():
            optimizers[path] = optimizers.get(path, frozenset()) | {kind}
    return Source(
        "save",
        opened,
        files,
        run=manifest.job,
        save=manifest.save,
        step=manifest.step,
        created=manifest.created,
        metrics=manifest.metrics,
        world_size=manifest.world_size,
        configs=configs,
        per_rank=frozenset().union(*(state.per_rank for state in states.values())),
        optimizers=optimizers,
        left_out={rank: state.left_out for rank, state in states.items()},
    )


def _absent_tensors(files: Sequence[ShardFile], configs: Mapping[int, str]) -> Iterator[IncompleteError]:
    """Yield an error for a file whose state has tensors that lie in other files, or that has no state."""
    for file in files:
        if file.rank not in configs:
            text = "this file has only parameters that do not train: give the directory"
            yield IncompleteError(text, rank=file.rank, path=file.path)
            continue
        # The state as values.py encodes it: each tensor is {"$": "leaf", "name": ..., ...}.
        waiting: list[object] = [parse_stored(configs[file.rank], file.path, file.file.budget)]
        names = set()
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                name = value.get("name")
                if value.get("$") == "leaf" and isinstance(name, str):  # else its value is broken
                    names.add(name)
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
        absent = names - file.tensors.keys() - file.aliases.keys()
        if absent:
            # It names no tensor: an error with a name is left out where patterns leave out this one tensor.
            count = format_number(len(absent), "tensor")
            text = f"other files have {count} of this rank, such as {excerpt(min(absent))}: give the directory"
            yield IncompleteError(text, rank=file.rank, path=file.path)


def _manifest_of(opened: OpenedPath) -> SaveManifest:
    try:
        return read_manifest(opened.store)
    except NotFoundError as error:
        # An object store has no rename: there a save has its claim first and its manifest last (publish/claim.py).
        claim = claim_of(opened.store)
        text = f"{MANIFEST} of this save is missing: copy the whole directory, with all ranks' files"
        if claim is not None:
            text = f"this save is not finished, or is being removed: {claim}"
        raise IncompleteError(text, path=error.path) from None
