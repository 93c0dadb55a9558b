"""The payload: what root says in JSON, its values and states, and how another rank reads it into what it holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from statexchange import values
from statexchange.errors import UnsupportedError
from statexchange.state.spec import StateSpec, TensorLike, value_kind, dense_tensor
from statexchange.state.optimizers import (
    hyperparameters,
    is_optimizer,
    parameters_of,
    set_optimizer,
    state_of_optimizer,
)
from statexchange.state.tree import alike, flatten, rebuild
from statexchange.tensors import same_memory

__all__ = ["PayloadReader", "encode_payload", "install_callback", "state_of"]


class _Writer:
    """A state in JSON text; what has no text is kept out and described by specs, tensors among it in `tensors`."""

    def __init__(self, path: str) -> None:
        self.tensors: list[TensorLike] = []
        self._specs: list[list[Any]] = []
        self._path = path
        self._kept: dict[int, tuple[str, Any]] = {}

    def write(self, state: Any) -> list[Any]:
        """The text, the specs and the names of the types that one must know to read it."""
        return [values.encode(state, self._keep), self._specs, list(values.types_of(state))]

    def _keep(self, value: Any, path: str) -> str | None:
        if id(value) not in self._kept:
            spec = self._spec(value, self._path + path)
            if spec is None:
                return None
            self._kept[id(value)] = (str(len(self._specs)), value)
            self._specs.append(spec)
        return self._kept[id(value)][0]

    def _spec(self, value: Any, path: str) -> list[Any] | None:
        if isinstance(value, torch.Tensor | np.ndarray):
            memory = dense_tensor(value, path, written=False)
            self.tensors.append(memory)
            if isinstance(memory, np.ndarray):
                return ["array", memory.dtype.str, list(memory.shape)]
            return ["tensor", str(memory.dtype)[6:], list(memory.shape), memory.device.type]
        return None if value_kind(value) is not None or _has_parts(value) else ["own"]


def _has_parts(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    return isinstance(value, Mapping) or type(value) in (list, tuple) or hasattr(value, "_fields")


def encode_payload(spec: StateSpec) -> Any:
    """Root's values and states; their tensors join what travels."""
    plain = _Writer("").write(spec.values)
    states = {}
    for path, obj in spec.stateful.items():
        writer = _Writer(path)
        states[path] = writer.write(state_of(obj, path))
        spec.tensors.update({f"{path}#{i}": memory for i, memory in enumerate(writer.tensors)})
    return [plain, states]


def state_of(obj: Any, path: str) -> Any:
    """The state of an optimizer, by the numbers of its parameters, or of an object that has a `state_dict`."""
    return state_of_optimizer(obj, path) if is_optimizer(obj) else obj.state_dict()


class _Placeholder:
    """A place in root's text for what has none: its spec has this number."""

    def __init__(self, number: int) -> None:
        self.number = number


class PayloadReader:
    """Root's text on a rank that holds `own`; `fill` puts in what has no text, and `tensors` are to be filled."""

    def __init__(self, payload: Sequence[Any], own: Any, path: str, device: torch.device) -> None:
        text, self._specs, types = payload
        self._path = path
        self._device = device
        self._rooms: dict[int, TensorLike] = {}
        self._reused: set[tuple[Any, ...] | None] = {None}
        self.decoded = values.decode(text, types=values.types_of(own), leaf=self._leaf)
        unknown = set(types) - values.types_of(self.decoded).keys()
        if unknown:
            raise UnsupportedError(
                f"root holds a {min(unknown)}, which this rank does not know: give it to register_config", name=path
            )

    @property
    def tensors(self) -> list[TensorLike]:
        """What is to be filled, in root's order."""
        rooms = [self._rooms[number] for number in sorted(self._rooms)]
        return [dense_tensor(room, self._path, written=True) for room in rooms]

    def _leaf(self, name: str) -> Any:
        return _Placeholder(int(name))

    def fill(self, decoded: Any, own: Any, like: torch.Tensor | None = None) -> Any:
        """`decoded` with tensors: those of `own` in the same places where they fit, else new ones, `like` a parameter."""
        held = dict(flatten(own))
        gaps = {path: leaf.number for path, leaf in flatten(decoded) if isinstance(leaf, _Placeholder)}
        filled = {path: self._filling(number, path, held, like) for path, number in gaps.items()}
        return alike(own, rebuild(decoded, filled))

    def _filling(self, number: int, path: str, held: Mapping[str, Any], like: torch.Tensor | None) -> Any:
        spec = self._specs[number]
        if spec[0] != "own":
            if number not in self._rooms:
                self._rooms[number] = self._room(spec, held.get(path), like)
            return self._rooms[number]
        if path not in held:
            raise UnsupportedError(f"root has an object at {path} that cannot be sent, this rank none", name=self._path)
        return held[path]

    def _room(self, spec: Sequence[Any], own: Any, like: torch.Tensor | None) -> TensorLike:
        """Memory for what `spec` describes: `own` if it fits and serves no other place already, else new."""
        near = self._device if like is None else like.device
        place = torch.device("cpu") if spec[3:] == ["cpu"] else near
        if _fits(own, spec, place) and (key := same_memory(own)) not in self._reused:
            self._reused.add(key)
            return own
        return _new(spec, like, place)


def _fits(own: Any, spec: Sequence[Any], place: torch.device) -> bool:
    kind, name, shape, *_ = spec
    if kind == "array":
        return isinstance(own, np.ndarray) and (own.dtype, list(own.shape)) == (np.dtype(name), shape)
    wanted = (getattr(torch, name), shape, place)
    return isinstance(own, torch.Tensor) and (own.dtype, list(own.shape), own.device) == wanted


def _new(spec: Sequence[Any], like: torch.Tensor | None, place: torch.device) -> TensorLike:
    """Memory for what `spec` describes, laid out like a parameter of that shape."""
    kind, name, shape, *_ = spec
    if kind == "array":
        return np.empty(shape, name)
    dtype = getattr(torch, name)
    if like is not None and (list(like.shape), like.device) == (shape, place):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=place)


def install_callback(obj: Any, own: Any, reader: PayloadReader) -> Callable[[], None]:
    """What gives `obj`, whose state is `own`, root's once the reader's tensors are filled."""
    decoded = reader.decoded
    if not is_optimizer(obj):
        return functools.partial(obj.load_state_dict, reader.fill(decoded, own))
    parameters = parameters_of(obj)
    groups = [
        reader.fill(its, hyperparameters(group), next(iter(group["params"]), None))
        for its, group in zip(decoded["param_groups"], obj.param_groups, strict=True)
    ]
    state = {
        parameters[i]: reader.fill(its, own["state"].get(i, {}), parameters[i]) for i, its in decoded["state"].items()
    }
    shared = {key: reader.fill(its, own["shared"].get(key, {})) for key, its in decoded["shared"].items()}
    dropped = [key for key in obj.state if key not in state and key not in shared]
    return functools.partial(set_optimizer, obj, groups, {**state, **shared}, dropped)
