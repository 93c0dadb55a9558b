"""Flatten a live state: its tensors, the objects that load their own state, and its plain values, by their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError
from statexchange.sharding.paths import Key, joined
from statexchange.state.containers import children
from statexchange.state.leaves import contains_state, is_per_rank, is_stateful
from statexchange.state.megatron import sharded_kind
from statexchange.state.modules import is_module
from statexchange.state.optimizers import is_optimizer
from statexchange.tensors import is_tensor

__all__ = ["LiveEntry", "LiveState", "flatten"]

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
        InvalidArgumentError: it contains itself, or is nested deeper than 100.
    """
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
