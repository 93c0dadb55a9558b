"""Flatten a live state: its tensors, the objects that load their own state, and its plain values, by their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, type_text
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.paths import Key, joined
from statexchange.state.containers import children
from statexchange.state.leaves import ObjectStates, contains_state, is_per_rank, is_stateful
from statexchange.state.megatron import sharded_kind
from statexchange.state.modules import is_module, live_items
from statexchange.state.optimizers import is_optimizer, state_of_optimizer
from statexchange.tensors import is_tensor, is_torch

__all__ = ["LiveEntry", "LiveState", "flatten", "types_in_objects"]

Kind = Literal["tensor", "module", "optimizer", "object", "sharded", "value"]


class LiveEntry(NamedTuple):
    """An entry of a live state at one path: a tensor, an object that loads its own state, or a plain value.

    Attributes:
        text: the path as text.
        keys: the path.
        value: the value.
        kind: how it is loaded. A container without tensors and objects is one "value".
    """

    text: str
    keys: tuple[Key, ...]
    value: Any
    kind: Kind


@dataclass(slots=True)
class LiveState:
    """A flattened state.

    Attributes:
        entries: what it has, in its own order.
        containers: the containers that were entered, by their paths.
    """

    entries: list[LiveEntry] = field(default_factory=list)
    containers: dict[tuple[Key, ...], Any] = field(default_factory=dict)

    @property
    def units(self) -> set[str]:
        """The paths of optimizers and other objects."""
        return {entry.text for entry in self.entries if entry.kind in ("optimizer", "object")}

    @property
    def per_rank(self) -> set[str]:
        """The paths of the objects whose state belongs to a rank."""
        return {entry.text for entry in self.entries if entry.kind == "object" and is_per_rank(entry.value)}


def flatten(state: Any) -> LiveState:
    """Flatten a live state. Not collective.

    Raises:
        InvalidArgumentError: it is no state, contains itself, or is nested deeper than 100.
    """
    if not isinstance(state, Mapping) and not contains_state(state):
        raise InvalidArgumentError(f"the state is {type_text(state)}: give modules, optimizers or mappings")
    found = LiveState()
    for entry in _entries(state, (), "", found.containers):
        found.entries.append(entry)
    return found


def _entries(value: Any, keys: tuple[Key, ...], text: str, containers: dict[Any, Any]) -> Iterator[LiveEntry]:
    kind = _kind(value)
    is_root = not keys and isinstance(value, Mapping) and len(value) > 0
    if kind != "value" or not (is_root or (children(value) is not None and contains_state(value))):
        yield LiveEntry(text, keys, value, kind)
        return
    if len(keys) > values.MAX_DEPTH:
        text = f"the state at {text[:80]}... is nested deeper than {values.MAX_DEPTH}, or contains itself"
        raise InvalidArgumentError(text)
    containers[keys] = value
    for key, item in (children(value) or {}).items():
        yield from _entries(item, (*keys, key), joined(text, key), containers)


def _kind(value: Any) -> Kind:
    if sharded_kind(value) is not None:
        return "sharded"
    if is_tensor(value):
        return "tensor"
    if is_module(value):
        return "module"
    if is_optimizer(value):
        return "optimizer"
    if is_stateful(value):
        return "object"
    return "value"


def types_in_objects(live: LiveState, options: LoadOptions, objects: ObjectStates) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in the states of objects that are loaded, by qualified name."""
    types: dict[str, type] = {}
    for entry in live.entries:
        if not (options.wants(entry.text) or options.may_want(entry.text)):
            continue
        if entry.kind == "module":
            types |= values.types_of(live_items(entry.value)[1])
        elif entry.kind == "optimizer":
            optimizer = entry.value
            shared = {key: value for key, value in optimizer.state.items() if not is_torch(key)}
            more = state_of_optimizer(optimizer, entry.text)["more"]
            types |= values.types_of([optimizer.param_groups, list(optimizer.state.values()), shared, more])
        elif entry.kind == "object":
            types |= values.types_of(objects.of(entry.value, entry.text))
    return types
