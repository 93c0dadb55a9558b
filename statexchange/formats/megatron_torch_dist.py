"""Read Megatron-Core's `torch_dist` format: one iteration, as `dist_checkpointing.save` writes it.

It is a DCP directory (dcp.py) with two more files: ``common.pt``, with what is equal on all ranks (arguments,
iteration, scheduler, parameter groups), and ``metadata.json``, which is written last. Names are the keys of Megatron's
sharded tensors: the model's have no prefix, layers are stacked along a first dim unless each has a name of its own
(``singleton_local_shards``), the optimizer's begin with ``optimizer.`` or ``chained_0.optimizer.``.

The optimizer's state is by parameter, or in flat buffers of no parameter's shape; ``param_state_sharding_type`` in
common.pt names it. Flat buffers are read as they are.
"""

from __future__ import annotations

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
from statexchange.formats.megatron_arguments import RunArguments, with_sections
from statexchange.formats.source import Source, open_listed
from statexchange.formats.torch_file import TorchFile
from statexchange.storage.location import OpenedPath, read_json
from statexchange.storage.store import Store

__all__ = ["CONFIG", "matches", "read"]

CONFIG, _COMMON = "metadata.json", "common.pt"
_BACKEND = "sharded_backend"
_MAX_CONFIG_BYTES = 1 << 16


def matches(store: Store) -> bool:
    """Whether a directory is an iteration in this format, perhaps with files missing."""
    if CONFIG in store.listing:
        try:
            return _backend(store) is not None
        except StateExchangeError:  # of another program
            pass
    return _COMMON in store.listing and dcp.matches(OpenedPath(store.path, store, None))


def _backend(store: Store) -> object:
    """Return the backend that metadata.json names; None if it is not Megatron's."""
    config = read_json(store.open(CONFIG), _MAX_CONFIG_BYTES)
    return config.get(_BACKEND) if isinstance(config, dict) else None


def read(opened: OpenedPath, store: Store) -> Source:
    """Return the source of an iteration's directory, `store`, in an opened path: its DCP, and what common.pt adds."""
    problems: list[StateExchangeError] = []
    if CONFIG not in store.listing:
        text = f"{CONFIG}, which Megatron writes last, is missing: the save did not finish, or it was not copied"
        problems.append(IncompleteError(text, path=store.path_of(CONFIG)))
    elif (backend := _backend(store)) != "torch_dist":
        text = f"{_BACKEND} is {excerpt(backend, 60)}: only torch_dist is read, which newer releases of Megatron write"
        raise UnsupportedError(text, path=store.path_of(CONFIG))
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
