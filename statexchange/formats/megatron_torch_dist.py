"""Read Megatron-Core's `torch_dist` format: one iteration, as `dist_checkpointing.save` writes it.

It is a DCP directory (dcp.py) with two more files: ``common.pt``, with what is equal on all ranks (arguments,
iteration, scheduler, parameter groups), and ``metadata.json``, which is written last. Names are the keys of Megatron's
sharded tensors: the model's have no prefix, layers are stacked along a first dim unless each has a name of its own
(``singleton_local_shards``), the optimizer's begin with ``optimizer.`` or ``chained_0.optimizer.``.

The optimizer's state is by parameter, or in flat buffers of no parameter's shape; ``param_state_sharding_type`` in
common.pt names it. Flat buffers are read as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats import dcp
from statexchange.formats.megatron_arguments import RunArguments, section_of_key
from statexchange.formats.sections import sections_from
from statexchange.formats.source import SectionName, Source, open_listed
from statexchange.formats.torch_file import TorchFile
from statexchange.sharding.shards import Box
from statexchange.storage.location import OpenedPath, read_json
from statexchange.storage.store import Store

__all__ = ["COMMON", "CONFIG", "matches", "read"]

CONFIG, COMMON = "metadata.json", "common.pt"
_BACKEND = "sharded_backend"
_MAX_CONFIG_BYTES = 1 << 16
_SHARDING_TYPE = "param_state_sharding_type"
_BY_PARAMETER, _FLAT = "fully_reshardable", "dp_reshardable"
_BUCKET = re.compile(r"\.bucket_idx_[0-9]+\.[a-z_]+$")
_ALIGNMENT = 64  # elements


def matches(store: Store) -> bool:
    """Whether a directory is an iteration in this format, perhaps with files missing."""
    if CONFIG in store.listing:
        try:
            return _backend(store) is not None
        except StateExchangeError:  # of another program
            pass
    return COMMON in store.listing and dcp.matches(OpenedPath(store.path, store, None))


def _backend(store: Store) -> object:
    """Return the backend that metadata.json names; None if it is not Megatron's."""
    config = read_json(store.open(CONFIG), _MAX_CONFIG_BYTES)
    return config.get(_BACKEND) if isinstance(config, dict) else None


def read(opened: OpenedPath, store: Store) -> Source:
    """Return the source of an iteration's directory, `store`, in an opened path."""
    problems: list[StateExchangeError] = []
    if CONFIG not in store.listing:
        text = f"{CONFIG}, which Megatron writes last, is missing: the save did not finish, or it was not copied"
        problems.append(IncompleteError(text, path=store.path_of(CONFIG)))
    elif (backend := _backend(store)) != "torch_dist":
        text = f"{_BACKEND} is {excerpt(backend, 60)}: only torch_dist is read, which newer releases of Megatron write"
        raise UnsupportedError(text, path=store.path_of(CONFIG))
    common = _read_common(store, problems)
    source = dcp.read(OpenedPath(store.path, store, None))
    problems += source.problems
    others: dict[str, str] = {}
    files = source.files
    unreadable = list(source.unreadable)
    arguments: RunArguments | None = None
    iteration = None
    if isinstance(common, str):
        others[COMMON] = common
    elif common is not None:
        others |= common.others
        files = (*files, common.shard_file)
        arguments = _arguments(common)
        iteration = _iteration(common) if arguments is None else arguments.iteration
        if arguments is not None:
            others["args"] = str(arguments)
        _describe_flat_buffers(others)
        _check_no_names_twice(source, common)
        unreadable += common.unsupported
    others |= source.others
    joined = replace(source, files=files, others={}, unreadable=tuple(unreadable))
    tensors = joined.names

    def section_of_name(name: str) -> SectionName:
        # Tensors without the key of another section are the model's.
        return section_of_key(name) or ("model" if name in tensors else "other")

    return replace(
        joined,
        kind="megatron torch_dist",
        opened=opened,
        step=iteration,
        others=others,
        problems=tuple(problems),
        # Without .metadata nothing is known of the tensors, the model's among them.
        sections=sections_from(tensors | others.keys(), section_of_name) if source.files else (),
        arguments={} if arguments is None else arguments.model,
        padding=_padding(source) if _is_flat(others) else {},
        paths={},  # the keys of Megatron's own mapping, not of a state
    )


def _read_common(store: Store, problems: list[StateExchangeError]) -> TorchFile | str | None:
    """Return common.pt; the reason as text if its pickle is refused; None, and a problem, if it cannot be read."""
    text = "the arguments, the iteration and the parameter groups of this checkpoint are missing: copy this file, too"
    try:
        return TorchFile.whole(open_listed(store, COMMON, text), 0)
    except UnsafeError as error:
        return error.message
    except StateExchangeError as error:
        problems.append(error)
    return None


def _arguments(common: TorchFile) -> RunArguments | None:
    """Return the arguments of the run; None if they are not Megatron's, as a job may save anything there."""
    try:
        return RunArguments.parse(common.root, common.shard_file.path)
    except CorruptError:
        return None


def _iteration(common: TorchFile) -> int | None:
    iteration = common.root.get("iteration") if type(common.root) is dict else None
    return iteration if type(iteration) is int else None


def _check_no_names_twice(source: Source, common: TorchFile) -> None:
    for _, tensor in source.shards():
        name = tensor.shard.name
        if name in common.shard_file.tensors:
            raise CorruptError(f"both {COMMON} and a .distcp file have this tensor", name=name, path=source.path)


def _padding(source: Source) -> dict[str, frozenset[Box]]:
    """Return, by the name of the flat buffer, the boxes of the gaps between its parameters.

    In a buffer each parameter begins at a multiple of `_ALIGNMENT` elements. Each rank has a box for each parameter, or
    the part of one that it has, and one for each gap. A gap begins elsewhere and is smaller than `_ALIGNMENT`.
    """
    boxes: dict[str, list[tuple[Box, int]]] = {}  # with their ranks
    for shard_file, tensor in source.shards():
        if _BUCKET.search(tensor.shard.name) and len(tensor.shard.global_shape) == 1:
            boxes.setdefault(tensor.shard.name, []).extend((box, shard_file.rank) for box in tensor.shard.boxes)
    return {name: frozenset(_gaps(sorted(of_name, key=_first_offset))) for name, of_name in boxes.items()}


def _first_offset(pair: tuple[Box, int]) -> int:
    return pair[0].offsets[0]


def _gaps(boxes: Sequence[tuple[Box, int]]) -> Iterator[Box]:
    """Yield the gaps among a buffer's sorted boxes.

    A rank's first box may continue the last parameter of the rank before, so it is a gap only if that rank ended with
    one.
    """
    was_gap = False
    last_rank: int | None = None
    for number, (box, rank) in enumerate(boxes):
        (begin,), (size,) = box.offsets, box.shape
        is_last_of_rank = number + 1 < len(boxes) and boxes[number + 1][1] != rank
        can_be_gap = begin % _ALIGNMENT != 0 and size < _ALIGNMENT
        ends_as_gap = (begin + size) % _ALIGNMENT == 0 or is_last_of_rank
        was_gap = can_be_gap and ends_as_gap and (rank == last_rank or was_gap)
        last_rank = rank
        if was_gap:
            yield box


def _is_flat(others: Mapping[str, str]) -> bool:
    """Whether the optimizer's state is in flat buffers whose boxes are parameters and gaps."""
    return any(name.endswith(f".{_SHARDING_TYPE}") and others[name] == f"str {_FLAT!r}" for name in others)


def _describe_flat_buffers(others: dict[str, str]) -> None:
    """List the optimizer as an entry of its own if its state is in flat buffers."""
    kinds = {others[name] for name in others if name.endswith(f".{_SHARDING_TYPE}")}  # one for each chained optimizer
    flat = sorted(kinds - {f"str {_BY_PARAMETER!r}"})
    if flat:
        others["optimizer"] = f"flat buffers, not by parameter: {_SHARDING_TYPE} is {flat[0].removeprefix('str ')}"
