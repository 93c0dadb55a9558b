"""The leaves of a state: tensors, modules, optimizers and other objects with a state of their own."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError, excerpt, type_text
from statexchange.state.megatron import sharded_kind
from statexchange.state.modules import is_module
from statexchange.state.optimizers import is_optimizer
from statexchange.state.tree import contains
from statexchange.state.types import Leaf, Stateful
from statexchange.tensors import is_tensor

__all__ = [
    "ObjectStates",
    "check_no_state_in",
    "contains_state",
    "is_leaf",
    "is_per_rank",
    "is_stateful",
    "load_object",
    "state_of_object",
]


def is_stateful(value: Any) -> bool:
    """Whether `value` is an object with `state_dict` and `load_state_dict`, such as an LR scheduler. Not collective.

    Of a mapping the class is asked, as its keys may be attributes.
    """
    if isinstance(value, type):
        return False
    holder = type(value) if isinstance(value, Mapping) else value
    return all(callable(getattr(holder, name, None)) for name in ("state_dict", "load_state_dict"))


def is_per_rank(value: Any) -> bool:
    """Whether the state of an object belongs to its rank, even if it is equal on all ranks. Not collective.

    Objects with ``per_rank = True`` are such. So are torchdata's loaders: their position is one in the rank's part.
    """
    if not is_stateful(value):
        return False
    bases = type(value).__mro__
    return getattr(value, "per_rank", False) is True or any(base.__module__.startswith("torchdata.") for base in bases)


def state_of_object(value: Any, path: str, advice: str) -> Any:
    """Return what `state_dict` of an object returns. Not collective.

    Raises:
        InvalidArgumentError: it raises an error, which becomes one that names `path` and ends with `advice`.
    """
    try:
        return value.state_dict()
    except StateExchangeError:
        raise
    except Exception as error:
        text = f"state_dict() of {type_text(value)} raised {excerpt(error, 200)}: {advice}"
        raise InvalidArgumentError(text, name=path) from error


class ObjectStates:
    """The present states of objects. Each object's `state_dict` is called once, before anything changes.

    A data loader may draw random numbers in it.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Stateful, Leaf]] = {}  # the objects too, so that no other gets their id

    def of(self, live: Stateful, path: str) -> Leaf:
        """Return the present state of the object at `path`; raise InvalidArgumentError if it raises an error."""
        if id(live) not in self._states:
            self._states[id(live)] = live, state_of_object(live, path, "leave it out by exclude")
        return self._states[id(live)][1]


def load_object(
    value: Any, load: Callable[[Any], object], state: Any, path: str, advice: str = ", or leave it out by exclude"
) -> None:
    """Let an object load its state by `load`. Not collective.

    Raises:
        InvalidArgumentError: it raises an error, which becomes one that names `path` and ends with `advice`.
    """
    try:
        load(state)
    except StateExchangeError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{type_text(value)} does not take the state that it is given here, and raised {excerpt(error, 200)}. What "
            f"comes before it in the state has been changed: make the object as it was saved{advice}",
            name=path,
        ) from error


def is_leaf(value: Any) -> bool:
    """Whether a walk over a state stops at `value`, whatever it contains. Not collective."""
    return (
        is_tensor(value)
        or isinstance(value, enum.Enum)
        or is_module(value)
        or is_optimizer(value)
        or is_stateful(value)
        or sharded_kind(value) is not None
    )


def contains_state(value: Any) -> bool:
    """Whether `value` is, or contains, a tensor or an object with a state, to be filled in place. Not collective."""
    return contains(value, lambda item: is_leaf(item) and not isinstance(item, enum.Enum))


def check_no_state_in(value: Any, path: str) -> None:
    """Raise UnsupportedError if `value` is a set or deque that holds a tensor or an object with a state.

    Not collective. Walks do not enter sets and deques, so what lies in them would be left out.
    """
    if not isinstance(value, set | frozenset | deque):
        return
    if any(contains_state(item) for item in value if not isinstance(item, int | float | str)):
        text = f"{type_text(value)} here holds tensors, which cannot be filled in it: give a list"
        raise UnsupportedError(text, name=path)
