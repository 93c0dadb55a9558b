"""What a tree of `random_trees` holds, by names that do not depend on order, to be compared between ranks."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from equality import bits_of
from torch import nn

# Looking


class Atom(NamedTuple):
    """What lies at one place: whether it stays a rank's own, what all ranks share of it, and what is a rank's own."""

    is_own: bool
    shared: str
    own: str


def atoms(tree: Any) -> dict[str, Atom]:
    """Return everything in a tree by its path."""
    looking: dict[str, Atom] = {}
    _look(tree, "", looking)
    return looking


def _look(value: Any, path: str, looking: dict[str, Atom], *, in_state: bool = False) -> None:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor) and (value.is_sparse or value.is_meta):
        looking[path] = Atom(True, "", kind)
        return
    if isinstance(value, torch.Tensor):
        dtype, shape, data = bits_of(value)
        digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        looking[path] = Atom(
            False, f"{dtype} {shape} {digest}", "" if in_state else f"{kind} {value.stride()} {value.requires_grad}"
        )
        return
    if isinstance(value, np.ndarray):
        shared = f"{value.dtype.str} {value.dtype} {value.shape} {value.tobytes()!r}"
        looking[path] = Atom(False, shared, "" if in_state else f"{kind} {value.strides}")
        return
    if isinstance(value, nn.Module):
        ignored = getattr(value, "_ddp_params_and_buffers_to_ignore", ())
        tensors = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers())}
        for name, tensor in tensors.items():
            _look(tensor, f"{path}.{name}", looking)
            if name in ignored:
                looking[f"{path}.{name}"] = looking[f"{path}.{name}"]._replace(is_own=True)
        return
    if isinstance(value, torch.optim.Optimizer):
        numbers: dict[Any, int] = {}
        for at, group in enumerate(value.param_groups):
            looking[f"{path}.names[{at}]"] = Atom(True, "", str(group.get("param_names")))
            settings = {key: item for key, item in group.items() if key not in ("params", "param_names")}
            _look(settings, f"{path}.g[{at}]", looking, in_state=True)
            for parameter in group["params"]:
                numbers[parameter] = len(numbers)
        for key, entries in value.state.items():
            _look(entries, f"{path}.state[{numbers.get(key, repr(key))}]", looking, in_state=True)
        looking[f"{path}.count"] = Atom(False, str(getattr(value, "count", None)), kind)
        return
    if hasattr(value, "load_state_dict") and not isinstance(value, type):
        looking[f"{path} "] = Atom(False, kind, "")
        _look(value.state_dict(), path, looking, in_state=True)
        return
    items = _items(value)
    if items is None:
        plain = (int, float, complex, str, enum.Enum, torch.dtype, np.generic, type(None))
        text = f"{kind} {value!r}" if isinstance(value, plain) else ""
        looking[path] = Atom(not text, text, "" if text else kind)
        return
    if not in_state:
        looking[f"{path}/"] = Atom(True, "", f"{kind} {[*map(_key, items)]}")
    if len(path) > 400:  # a tree that contains itself
        return
    for key, item in items.items():
        _look(item, f"{path}/{_key(key)}", looking, in_state=in_state)


def _key(key: Any) -> str:
    return type(key).__name__ if type(key) is object else repr(key)


def _items(value: Any) -> dict[Any, Any] | None:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None


def shared_atoms(looking: Mapping[str, Atom]) -> dict[str, str]:
    """Return what all ranks share of a tree after a call."""
    return {path: atom.shared for path, atom in looking.items() if not atom.is_own}


def own_atoms(looking: Mapping[str, Atom]) -> dict[str, tuple[str, str]]:
    """Return what stays a rank's own: types, orders of keys, strides, and what `synchronize` does not know."""
    return {path: (atom.shared if atom.is_own else "", atom.own) for path, atom in looking.items() if atom.own}


def objects(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the containers, tensors and other objects of a tree by path, to compare whether they are still there."""
    reached = {path: tree}
    if isinstance(tree, torch.optim.Optimizer):
        for number, entries in enumerate(tree.state.values()):
            reached |= objects(entries, f"{path}.state[{number}]")
        for number, group in enumerate(tree.param_groups):
            reached[f"{path}.groups[{number}]"] = group
    if len(path) < 400:
        for key, item in (_items(tree) or {}).items():
            reached |= objects(item, f"{path}/{_key(key)}")
    return reached
