"""Read checkpoints of Megatron-Core and Megatron-LM: `torch_dist`, and the legacy format of mp_rank files.

A run has one directory, with ``latest_checkpointed_iteration.txt`` and a directory of each iteration,
``iter_0000007`` (or ``release``). The iteration that the file names is read. In format `torch_dist`
(megatron_torch_dist.py) an iteration is a DCP directory with two more files; in the legacy format (megatron_ranks.py)
it has a directory of each model-parallel rank, ``mp_rank_00_001``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, StateExchangeError, excerpt
from statexchange.formats import megatron_ranks, megatron_torch_dist
from statexchange.formats.source import Source
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store

__all__ = ["matches", "read"]

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_[0-9]{7,12}")
_NUMBER = re.compile(r"[0-9]{1,12}")
_STEP_OF_VERL = re.compile(r"global_step_[0-9]+")  # beside a file of the same name as the tracker
_MAX_TRACKER_BYTES = 64
_MAX_LISTED = 8


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
    if not _is_iteration(store):
        name = _newest(store)
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
    if _TRACKER in store.listing and not any(map(_STEP_OF_VERL.fullmatch, store.directories)):
        return True
    return any(_is_iteration_of(store, name) for name in _iterations(store))


def _iterations(store: Store) -> list[str]:
    return [name for name in store.directories if _ITERATION.fullmatch(name) or name == _RELEASE]


def _is_iteration_of(store: Store, name: str) -> bool:
    try:
        return _is_iteration(store.below(name))
    except StateExchangeError:  # removed meanwhile, or unreadable
        return False


def _is_iteration(store: Store) -> bool:
    return megatron_torch_dist.matches(store) or megatron_ranks.matches(store)


def _newest(store: Store) -> str:
    """Return the name of the iteration's directory that the run's file names."""
    names = _iterations(store)
    listed = ", ".join(names[-_MAX_LISTED:]) or "none"
    if _TRACKER not in store.listing:
        text = f"{_TRACKER}, which names the newest iteration, is missing: give the directory of one of them ({listed})"
        raise InvalidArgumentError(text, path=store.path)
    data = store.read_small(_TRACKER, _MAX_TRACKER_BYTES)
    text = data.decode("ascii", "replace").strip()
    if text != _RELEASE and not _NUMBER.fullmatch(text):
        raise CorruptError(f"not the number of an iteration: {excerpt(data)}", path=store.path_of(_TRACKER))
    name = text if text == _RELEASE else f"iter_{int(text):07d}"
    if name not in store.directories:
        advice = "no other is here: copy it, too"
        if names:
            advice = f"there are: {listed}. To read one of these, give its directory"
        raise IncompleteError(f"{_TRACKER} names {name}, which is missing; {advice}", path=store.path_of(name))
    return name
