"""Read checkpoints of Megatron-Core and Megatron-LM: `torch_dist`, and the legacy format of mp_rank files.

A run has one directory, with ``latest_checkpointed_iteration.txt`` and a directory of each iteration,
``iter_0000007`` (or ``release``). The iteration that the file names is read. In format `torch_dist`
(megatron_torch_dist.py) an iteration is a DCP directory with two more files; in the legacy format (megatron_ranks.py)
it has a directory of each model-parallel rank, ``mp_rank_00_001``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from statexchange.errors import IncompleteError, InvalidArgumentError
from statexchange.formats import megatron_ranks, megatron_torch_dist
from statexchange.formats.newest_step import newest_step
from statexchange.formats.source import Source
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store

__all__ = ["matches", "read"]

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_[0-9]{7,12}")
_NUMBER = re.compile(r"[0-9]{1,12}")
# verl keeps its own steps beside a file of the tracker's name.
_STEP_OF_VERL = re.compile(r"global_step_[0-9]+")


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
                f"{_TRACKER} names this iteration, but it has neither {megatron_torch_dist.CONFIG} and .distcp files "
                "(torch_dist) nor directories mp_rank_*: it was not copied completely, or its format is not read",
                path=store.path,
            )
    read_iteration = megatron_torch_dist.read if megatron_torch_dist.matches(store) else megatron_ranks.read
    source = read_iteration(opened, store)
    if name is None:
        return source
    return replace(source, notes=(f"{_TRACKER} names {name}, which is read", *source.notes))


def _is_run(store: Store) -> bool:
    return _TRACKER in store.listing and not any(map(_STEP_OF_VERL.fullmatch, store.directories))


def _iterations(store: Store) -> list[str]:
    return [name for name in store.directories if _ITERATION.fullmatch(name) or name == _RELEASE]


def _is_iteration(store: Store) -> bool:
    return megatron_torch_dist.matches(store) or megatron_ranks.matches(store)


def _directory_of(text: str) -> str | None:
    """Return the iteration that the run's file names, as `newest_step` asks for it."""
    if _NUMBER.fullmatch(text):
        return f"iter_{int(text):07d}"
    return text if text == _RELEASE else None
