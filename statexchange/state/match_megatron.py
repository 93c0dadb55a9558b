"""Match the objects of Megatron-Core in a live state with a source: tensors by their keys, wherever they lie."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from statexchange.sharding.paths import joined
from statexchange.state.entries import ABSENT, Entry, SavedTensor
from statexchange.state.flatten import LiveEntry
from statexchange.state.install import LoadPlan, LoadTarget
from statexchange.state.megatron import MegatronTensor, leaves, sharded_kind
from statexchange.state.types import Leaf

__all__ = ["MegatronMatcher"]


class MegatronMatcher:
    """Plans the objects of Megatron-Core of a state, which has some."""

    def __init__(self, plan: LoadPlan) -> None:
        self._entries = plan.matching.entries
        self._options = plan.matching.names.options
        self._plan = plan
        self._live: set[str] = set()  # keys of the live state
        self._saved: dict[str, str] = {}  # the source's names, by the names of the state
        # Both names: a rename may have given a tensor another one, and keys are the source's own.
        for entry in self._entries:
            if isinstance(entry.leaf, SavedTensor):
                self._saved.setdefault(entry.text, entry.leaf.name)
                self._saved.setdefault(entry.leaf.name, entry.leaf.name)

    def match(self, entry: LiveEntry) -> None:
        """Plan an object: a tensor, what a factory builds of its parameter, or an object with data."""
        for _, part in leaves(entry.value):
            if sharded_kind(part) == "tensor":
                self._live.add(part.key)
        self._match(entry.value, entry.text)

    def _match(self, live: Leaf, path: str) -> None:
        plan, kind = self._plan, sharded_kind(live)
        if kind == "tensor" and self._options.wants(live.key):
            if live.key in self._saved:
                plan.targets.append(LoadTarget(self._saved[live.key], MegatronTensor(live), live.key))
            else:
                plan.add_missing([live.key])
        elif kind == "factory":
            # Built once: what is filled must be what is merged.
            built = live.build()
            is_whole = True
            for inner, part in leaves(built):
                if sharded_kind(part) == "tensor":
                    self._match(part, joined(path, inner))
                    is_whole = is_whole and part.key in self._saved
            # Without a part there is nothing to merge; the error names it.
            if is_whole:
                plan.callbacks.append(functools.partial(_merge_built, live, built))
        elif kind == "object":
            saved = self._entries.value(path, live.data)
            if saved is not ABSENT:
                for entry in self._entries.below(path):
                    plan.matched.add(entry.text)
                plan.callbacks.append(functools.partial(setattr, live, "data", self._plan.fill(saved, path)))
            elif live.data is not None:  # an object without data needs no saved one
                plan.add_missing([path])

    @property
    def has_tensors(self) -> bool:
        """Whether the state has tensors with keys, after all of its objects were matched."""
        return bool(self._live)

    def has_key(self, entry: Entry) -> bool:
        """Whether an entry is a tensor, or nothing: those are matched by key, and not by path."""
        return entry.leaf is None or entry.name in self._saved or entry.text in self._saved

    def is_unexpected(self, entry: Entry) -> bool:
        """Whether the state has no tensor of an entry's key."""
        return entry.leaf is not None and entry.name not in self._live


def _merge_built(factory: Leaf, built: Leaf) -> None:
    """Merge the tensors that a factory built, now filled, into its parameter."""
    import torch

    with torch.no_grad():
        factory.data.copy_(factory.merge_fn(_with_data(built)))


def _with_data(built: Leaf) -> Leaf:
    """Return a tree with the data of ShardedTensors in their place."""
    if isinstance(built, Mapping):
        return {key: _with_data(item) for key, item in built.items()}
    if type(built) in (list, tuple):
        return type(built)(map(_with_data, built))
    return built.data if sharded_kind(built) == "tensor" else built
