"""Read checkpoints of Megatron-Core and Megatron-LM: `torch_dist`, and the legacy format of mp_rank files.

A run has one directory, with ``latest_checkpointed_iteration.txt`` and a directory of each iteration,
``iter_0000007`` (or ``release``). The iteration that the file names is read. In the legacy format (megatron_ranks.py)
it has a directory of each model-parallel rank, ``mp_rank_00_001``.

In format `torch_dist`, as `dist_checkpointing.save` writes it, an iteration is a DCP directory (dcp.py) with two more
files: ``common.pt``, with what is equal on all ranks (arguments, iteration, scheduler, parameter groups), and
``metadata.json``, which is written last. Names are the keys of Megatron's sharded tensors: the model's have no prefix,
layers are stacked along a first dim unless each has a name of its own (``singleton_local_shards``), the optimizer's
begin with ``optimizer.`` or ``chained_0.optimizer.``. The optimizer's state is by parameter, or in flat buffers of no
parameter's shape; ``param_state_sharding_type`` in common.pt names it. Flat buffers are read as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats import dcp, megatron_ranks
from statexchange.formats.megatron_arguments import RunArguments, with_sections
from statexchange.formats.newest_step import newest_step
from statexchange.formats.source import Source, open_listed
from statexchange.formats.torch_file import TorchFile
from statexchange.storage.location import OpenedPath, read_json
from statexchange.storage.store import Store

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_[0-9]{7,12}")
_NUMBER = re.compile(r"[0-9]{1,12}")
# verl keeps its own steps beside a file of the tracker's name.
_STEP_OF_VERL = re.compile(r"global_step_[0-9]+")
_CONFIG, _COMMON = "metadata.json", "common.pt"  # of torch_dist
_BACKEND = "sharded_backend"
_MAX_CONFIG_BYTES = 1 << 16


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a run's directory, one of its iterations, or a part of a legacy iteration."""
    if megatron_ranks.is_rank(opened):
        return True
    return opened.file is None and (_is_run(opened.store) or _is_iteration(opened.store))


def read(opened: OpenedPath) -> Source:
    """Return the source at a path: of the newest iteration, if it is a run's directory.

    Raises:
        InvalidArgumentError: it is one rank's part of an iteration.
    """
    if megatron_ranks.is_rank(opened):
        above = opened.store.path.rstrip("/").rpartition("/")[0]
        text = f"this is one rank's part of the model: give the directory of the iteration, with mp_rank_*, {above}"
        raise InvalidArgumentError(text, path=opened.path)
    store, name = opened.store, None
    # The path of an iteration means this one, whatever its run's tracker names.
    if not _is_iteration(store):
        name = newest_step(store, _TRACKER, _directory_of, lambda: _iterations(opened.store))
        store = store.below(name)
        if not _is_iteration(store):
            raise IncompleteError(
                f"{_TRACKER} names this iteration, but it has neither {_CONFIG} and .distcp files "
                "(torch_dist) nor directories mp_rank_*: it was not copied completely, or its format is not read",
                path=store.path,
            )
    read_iteration = _read_torch_dist if _is_torch_dist(store) else megatron_ranks.read
    source = read_iteration(opened, store)
    if name is None:
        return source
    return replace(source, notes=(f"{_TRACKER} names {name}, which is read", *source.notes))


def _is_run(store: Store) -> bool:
    return _TRACKER in store.listing and not any(map(_STEP_OF_VERL.fullmatch, store.directories))


def _iterations(store: Store) -> list[str]:
    return [name for name in store.directories if _ITERATION.fullmatch(name) or name == _RELEASE]


def _is_iteration(store: Store) -> bool:
    return _is_torch_dist(store) or megatron_ranks.matches(store)


def _directory_of(text: str) -> str | None:
    """Return the iteration that the run's file names, as `newest_step` asks for it."""
    if _NUMBER.fullmatch(text):
        return f"iter_{int(text):07d}"
    return text if text == _RELEASE else None


def _is_torch_dist(store: Store) -> bool:
    """Whether a directory is an iteration in format torch_dist, perhaps with files missing."""
    if _CONFIG in store.listing:
        try:
            return _backend(store) is not None
        except StateExchangeError:  # of another program
            pass
    return _COMMON in store.listing and dcp.matches(OpenedPath(store.path, store, None))


def _backend(store: Store) -> object:
    """Return the backend that metadata.json names; None if it is not Megatron's."""
    config = read_json(store.open(_CONFIG), _MAX_CONFIG_BYTES)
    return config.get(_BACKEND) if isinstance(config, dict) else None


def _read_torch_dist(opened: OpenedPath, store: Store) -> Source:
    """Return the source of an iteration in format torch_dist, `store`: its DCP, and what common.pt adds."""
    problems: list[StateExchangeError] = []
    if _CONFIG not in store.listing:
        text = f"{_CONFIG}, which Megatron writes last, is missing: the save did not finish, or it was not copied"
        problems.append(IncompleteError(text, path=store.path_of(_CONFIG)))
    elif (backend := _backend(store)) != "torch_dist":
        text = f"{_BACKEND} is {excerpt(backend, 60)}: only torch_dist is read, which newer releases of Megatron write"
        raise UnsupportedError(text, path=store.path_of(_CONFIG))
    others: dict[str, str] = {}
    common: TorchFile | None = None
    missing = (
        "the arguments, the iteration and the parameter groups of this checkpoint are missing: copy this file, too"
    )
    try:
        common = TorchFile.whole(open_listed(store, _COMMON, missing), 0)
    except UnsafeError as error:
        others[_COMMON] = error.message
    except StateExchangeError as error:
        problems.append(error)
    stored = dcp.read(OpenedPath(store.path, store, None))
    source = replace(
        stored,
        kind="megatron torch_dist",
        opened=opened,
        others={**others, **stored.others},
        problems=(*problems, *stored.problems),
        paths={},  # the keys of Megatron's own mapping, not of a state
    )
    if common is not None:
        source = _with_common(source, common)
    # Without .metadata nothing is known of the tensors, the model's among them.
    return with_sections(source) if stored.files else source


def _with_common(source: Source, common: TorchFile) -> Source:
    """Return the source with what common.pt has: the run's arguments, and how the optimizer's state is stored."""
    described = dict(common.others)
    try:
        arguments = RunArguments.parse(common.root, common.path)
        described["args"] = str(arguments)
        source = replace(source, step=arguments.iteration, arguments=arguments.model)
    except CorruptError:  # they are not Megatron's, as a job may save anything there
        pass
    return replace(
        source,
        files=(*source.files, common.shard_file),
        others={**described, **source.others},
        unreadable=(*source.unreadable, *common.unsupported),
    )
