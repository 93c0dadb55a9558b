"""StateSpec: a rank's tensors, values and objects with a state, in a form that ranks can compare."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Generator, MappingView
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt, type_text
from statexchange.state.flatten import LiveState, ParameterName, check_no_state_in, is_leaf, parameter_names
from statexchange.state.tree import nodes
from statexchange.state.units import (
    bare_name,
    check_module,
    check_optimizer,
    is_extra_state,
    is_optimizer,
    is_plain_entry,
    is_stateful,
    model_items,
    names_of_groups,
)
from statexchange.tensors import (
    TensorLike,
    check_dense,
    check_writable,
    is_array,
    is_dtensor,
    is_tensor,
    replicated_part,
    same_memory,
)

__all__ = [
    "EntryDetail",
    "StateSpec",
    "dense_tensor",
    "device_type_of",
    "module_spec",
    "module_tensors",
    "value_kind",
]

_VALUE, _OBJECT = "a value", "an object"


class EntryDetail(NamedTuple):
    """An entry of a StateSpec for messages: its path, the entry, the kind of a plain value, and the text to show."""

    path: str | None
    entry: str
    kind: str | None
    text: str


class StateSpec:
    """The contents of a tree on one rank, by the way in which they are sent.

    Attributes:
        entries: (path, text) of everything, in an order that all ranks share. Ranks whose trees match have equal ones.
        tensors: the dense tensors by path; tied ones once.
        values: the plain values by path.
        stateful: the optimizers and other objects with a state, by path.
    """

    def __init__(self, *, written: bool) -> None:
        """Make an empty spec. `written`: this rank's tensors will be filled, so they must be writable."""
        self.entries: list[tuple[str, str]] = []
        self.tensors: dict[str, TensorLike] = {}
        self.values: dict[str, Any] = {}
        self.stateful: dict[str, Any] = {}
        self._written = written
        self._tree: Any = None
        self._names: dict[int, ParameterName] | None = None  # made for the first optimizer
        self._seen: dict[tuple[Any, ...], str] = {}

    @property
    def digest(self) -> str:
        """A digest of the entries."""
        text = "\n".join(f"{path}\t{entry}" for path, entry in self.entries)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def kinds(self) -> list[str | None]:
        """The kinds of the plain values, in an order that all ranks share."""
        return [value_kind(value) for value in self.values.values()]

    def details(self) -> list[EntryDetail]:
        """Return all entries with the kinds and excerpts of plain values."""
        found = []
        for path, entry in self.entries:
            if entry == _VALUE:
                value = self.values[path]
                found.append(EntryDetail(path, entry, value_kind(value), f"{entry}, {excerpt(value, 60)}"))
            else:
                found.append(EntryDetail(path, entry, None, entry))
        return found

    def add_tree(self, tree: Any) -> None:
        """Add everything in `tree`."""
        self._tree = tree
        for node in nodes(tree, is_leaf):
            if node.container is not None:
                self.entries.append((node.path, node.container))
            else:
                self._add_leaf(node.path, node.value)

    def _add_leaf(self, path: str, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor | np.ndarray):
            self._add_tensor(path, leaf)
        elif isinstance(leaf, nn.Module):
            self.add_module(path, leaf, buffers=True)
        elif is_optimizer(leaf):
            self._add_optimizer(path, leaf)
        elif is_stateful(leaf):
            self.entries.append((path, f"the state of {type_text(leaf)}"))
            self.stateful[path] = leaf
        elif value_kind(leaf) is not None:
            self.entries.append((path, _VALUE))
            self.values[path] = leaf
        elif isinstance(leaf, Generator | MappingView):
            raise InvalidArgumentError(f"{type_text(leaf)} cannot be filled in place: give a list", name=path)
        elif _is_other_number(leaf):
            raise UnsupportedError(f"a number of dtype {leaf.dtype} cannot be sent: give float() of it", name=path)
        else:
            check_no_state_in(leaf, path)
            self.entries.append((path, _OBJECT))

    def add_module(self, path: str, module: nn.Module, *, buffers: bool) -> None:
        """Add the parameters of a module and, if asked, its buffers."""
        check_module(module)
        self.entries.append((path, "a module"))
        named = module_tensors(module, buffers=buffers)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        _check_entries(module, path)
        for name in sorted(named.keys() - ignored):
            self._add_tensor(f"{path}.{name}" if path else name, named[name])

    def _add_tensor(self, path: str, given: Any) -> None:
        tensor = dense_tensor(given, path, written=self._written)
        key = same_memory(tensor)
        first = path if key is None else self._seen.setdefault(key, path)
        if first == path:
            self.entries.append((path, _text(tensor)))
            self.tensors[path] = tensor
        else:
            self.entries.append((path, f"the same as {first}"))

    def _add_optimizer(self, path: str, optimizer: Any) -> None:
        check_optimizer(optimizer, path)
        if self._names is None:
            self._names = parameter_names(LiveState.of(self._tree))
        names = {key: name.in_state for key, name in self._names.items()}
        of_groups = iter(names_of_groups(optimizer) or ())
        groups = optimizer.param_groups
        self.entries.append((path, f"an optimizer {type(optimizer).__name__}"))
        self.entries.append((f"{path}.param_groups", f"list of {len(groups)}"))
        for i, group in enumerate(groups):
            params_path = f"{path}.param_groups[{i}].params"
            self.entries.append((params_path, f"list of {len(group['params'])}"))
            for j, parameter in enumerate(group["params"]):
                if is_dtensor(parameter):
                    raise UnsupportedError("the state of a DTensor lies on many ranks", name=f"{params_path}[{j}]")
                # Its state is installed by number: in another order it would be another parameter's.
                name = names.get(id(parameter), bare_name(str(next(of_groups, ""))))
                text = f"parameter {name} {_text(parameter)}" if name else f"parameter {_text(parameter)}"
                self.entries.append((f"{params_path}[{j}]", text))
        self.stateful[path] = optimizer


def _check_entries(module: nn.Module, path: str) -> None:
    """Raise UnsupportedError if a module's state dict has tensors that are no parameters or buffers of it."""
    known = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    for name, value in model_items(module, keep_vars=True).items():
        if id(value) in known or is_extra_state(name):
            continue
        if is_tensor(value) or not is_plain_entry(name, value):
            raise UnsupportedError(
                f"the module's state dict has {type_text(value)} here that is no parameter or buffer, as those "
                "of quantized modules: it cannot be changed in place",
                name=f"{path}.{name}" if path else name,
            )


def module_tensors(module: nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Return a module's parameters and, if asked, its buffers, under each of their names. Not collective."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if buffers:
        named.update(module.named_buffers(remove_duplicate=False))
    return named


def module_spec(module: Any, *, written: bool, buffers: bool = True) -> StateSpec:
    """Return the spec of a module; raise InvalidArgumentError if it is none. Not collective."""
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"expected a module, not {type(module).__name__}")
    spec = StateSpec(written=written)
    spec.add_module("", module, buffers=buffers)
    return spec


def value_kind(value: Any) -> str | None:
    """Return the kind of a plain value, which ranks compare; None for anything else."""
    if value is None:
        return "None"
    if values.is_number(value):
        return "number"
    if isinstance(value, enum.Enum):
        return f"enum {type(value).__qualname__}" if values.has_text(value) else None
    return {str: "str", torch.dtype: "dtype"}.get(type(value))


def _is_other_number(value: Any) -> bool:
    """Whether `value` is a number of numpy or ml_dtypes that is no plain value, such as a longdouble."""
    others = (np.flexible, np.object_, np.datetime64, np.timedelta64)
    return isinstance(value, np.generic) and not isinstance(value, others)


# Tensors


def dense_tensor(given: Any, path: str, *, written: bool) -> TensorLike:
    """Return the dense memory of a tensor or array, detached; of a replicated DTensor this rank's copy.

    Raises:
        UnsupportedError: it has no dense memory; the error names `path`.
        InvalidArgumentError: it is to be `written` and cannot be; the error names `path`.
    """
    if is_array(given):
        check_dense(given, path)
        if written:
            check_writable(given, path)
        return np.asarray(given)
    if is_dtensor(given):
        advice = "use save_checkpoint and load_checkpoint for it, or give to_local(), this rank's part"
        given = replicated_part(given.detach(), path, advice)
    check_dense(given, path)
    if written:
        check_writable(given, path)
    dense: torch.Tensor = given.detach()
    return dense


def device_type_of(tensor: TensorLike) -> str:
    """Return the type of a tensor's device. Not collective."""
    return "cpu" if isinstance(tensor, np.ndarray) else tensor.device.type


def _text(tensor: TensorLike) -> str:
    """Return kind, dtype, shape and device as text."""
    if isinstance(tensor, np.ndarray):
        return f"array {tensor.dtype}{list(tensor.shape)}"
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{where}"
