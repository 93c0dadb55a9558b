"""The payload: root's state without its tensors, as JSON. `PayloadReader` reads it on another rank.

A payload has a part for the plain values of the tree, and one for each object with a state. A part is (text, leaf
specs, type names). The text is JSON of `values`; in it the number of a leaf spec stands for a leaf without JSON text. A
leaf spec describes a tensor or array, whose bytes are sent separately, in the order of the specs; or an object that
cannot be sent, for which the reader keeps its own. The type names are those of dataclasses,
namedtuples and enums, which the reader must know to decode the text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch

from statexchange import values
from statexchange.errors import UnsupportedError
from statexchange.state.flatten import check_no_state_in
from statexchange.state.spec import StateSpec, dense_tensor, value_kind
from statexchange.state.tree import flatten, rebuild, with_types_of
from statexchange.state.units import (
    hyperparameters,
    install_optimizer,
    is_optimizer,
    load_object,
    parameters_of,
    state_of_optimizer,
)
from statexchange.tensors import DTYPE_NAMES, ITEMSIZE, TensorLike, numpy_dtype, same_memory

__all__ = ["Payload", "PayloadPart", "PayloadReader", "encode_payload", "install_callback", "state_of"]


@dataclass(frozen=True, slots=True)
class _LeafSpec:
    """The kind of a leaf without JSON text; of a tensor or array also dtype, shape and device type."""

    kind: Literal["tensor", "array", "object"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device_type: str = "cpu"

    @classmethod
    def of(cls, tensor: TensorLike, path: str) -> _LeafSpec:
        """Return the spec of a tensor or array; raise UnsupportedError if numpy has no text for an array's dtype."""
        if isinstance(tensor, np.ndarray):
            dtype = tensor.dtype
            if np.dtype(dtype.str) == dtype:
                return cls("array", dtype.str, tensor.shape)
            if dtype.name not in DTYPE_NAMES or not dtype.isnative:
                raise UnsupportedError(f"arrays of {dtype} cannot be sent in the state of an object", name=path)
            return cls("array", DTYPE_NAMES[dtype.name], tensor.shape)  # one of ml_dtypes, which numpy writes as bytes
        return cls("tensor", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)

    def fits(self, own: Any, device: torch.device) -> bool:
        """Whether `own` is such a tensor or array, on `device`."""
        if self.kind == "array":
            return isinstance(own, np.ndarray) and own.dtype == self._numpy_dtype() and own.shape == self.shape
        if not isinstance(own, torch.Tensor) or own.device != device:
            return False
        return own.dtype == getattr(torch, self.dtype) and tuple(own.shape) == self.shape

    def allocate(self, like: torch.Tensor | None, device: torch.device) -> TensorLike:
        """Allocate such a tensor or array, with the strides of the parameter `like` if that has the same shape."""
        if self.kind == "array":
            return np.empty(self.shape, self._numpy_dtype())
        dtype = getattr(torch, self.dtype)
        if like is not None and tuple(like.shape) == self.shape and like.device == device:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(self.shape, dtype=dtype, device=device)

    def _numpy_dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype) if self.dtype in ITEMSIZE else np.dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """A value as JSON text, the specs of what has no text, and the names of the types in it."""

    text: str
    leaf_specs: Sequence[_LeafSpec]
    types: Sequence[str]


@dataclass(frozen=True, slots=True)
class Payload:
    """Root's plain values, and the states of its objects by path."""

    plain: PayloadPart
    states: Mapping[str, PayloadPart]


class _Writer:
    """Writes one part of a payload; `tensors` are those that its leaf specs describe."""

    def __init__(self, path: str) -> None:
        self.tensors: list[TensorLike] = []
        self._path = path
        self._leaf_specs: list[_LeafSpec] = []
        self._names: dict[int, str] = {}  # of leaves by identity: one that occurs twice is sent once
        self._kept: list[Any] = []  # these objects, so that no other one gets the identity of one of them

    def write(self, state: Any) -> PayloadPart:
        """Return `state` as a part of a payload."""
        text = values.encode(state, self._keep, leaves_anywhere=False)
        return PayloadPart(text, self._leaf_specs, list(values.types_of(state)))

    def _keep(self, value: Any, path: str) -> str | None:
        """Return the number of the leaf spec of a value without JSON text; None for any other value."""
        if id(value) not in self._names:
            spec = self._spec_of(value, self._path + path)
            if spec is None:
                return None
            self._names[id(value)] = str(len(self._leaf_specs))
            self._kept.append(value)
            self._leaf_specs.append(spec)
        return self._names[id(value)]

    def _spec_of(self, value: Any, path: str) -> _LeafSpec | None:
        if isinstance(value, torch.Tensor | np.ndarray):
            tensor = dense_tensor(value, path, written=False)
            self.tensors.append(tensor)
            return _LeafSpec.of(tensor, path)
        if value_kind(value) is not None or _is_container(value):
            return None
        check_no_state_in(value, path)
        return _LeafSpec("object")


def _is_container(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    return isinstance(value, Mapping) or type(value) in (list, tuple) or hasattr(value, "_fields")


def encode_payload(spec: StateSpec) -> tuple[Payload, list[TensorLike]]:
    """Encode root's plain values and the states of its objects.

    Return them and the tensors in the objects' states, in the order of `PayloadReader.tensors`.
    """
    plain = _Writer("").write(spec.values)
    states = {}
    tensors: list[TensorLike] = []
    for path, obj in spec.stateful.items():
        writer = _Writer(path)
        states[path] = writer.write(state_of(obj, path))
        tensors += writer.tensors
    return Payload(plain, states), tensors


def state_of(obj: Any, path: str) -> Any:
    """Return an optimizer's state, by the numbers of its parameters, or the state dict of another object."""
    return state_of_optimizer(obj, path) if is_optimizer(obj) else obj.state_dict()


class _Placeholder:
    """A placeholder in decoded text for the leaf whose spec has this number."""

    def __init__(self, number: int) -> None:
        self.number = number


class PayloadReader:
    """Reads one part of root's payload on a rank that has `own` in the same place.

    `path` is that of the part, and `decoded` the decoded text with placeholders. `fill` replaces those in a part of it.
    When all are replaced, `tensors` are the tensors and arrays into which root's bytes are to be copied.
    """

    def __init__(self, part: PayloadPart, own: Any, path: str, device: torch.device) -> None:
        self._leaf_specs = part.leaf_specs
        self.path = path
        self._device = device
        self._tensors: dict[int, tuple[str, TensorLike]] = {}  # with their paths, by number
        # The memory of own tensors that are filled already; None stands for memory that cannot be identified.
        self._reused: set[tuple[Any, ...] | None] = {None}
        placeholders = {str(number): _Placeholder(number) for number in range(len(part.leaf_specs))}
        self.decoded = values.decode(part.text, types=values.types_of(own), leaves=placeholders)
        unknown = set(part.types) - values.types_of(self.decoded).keys()
        if unknown:
            raise UnsupportedError(
                f"root holds a {min(unknown)}, which this rank does not know: give it to register_config", name=path
            )

    @property
    def tensors(self) -> list[tuple[str, TensorLike]]:
        """The tensors to be filled with their paths, in root's order."""
        found = [self._tensors[number] for number in sorted(self._tensors)]
        return [(path, dense_tensor(tensor, path, written=True)) for path, tensor in found]

    def fill(self, decoded: Any, own: Any, like: torch.Tensor | None = None, *, step: str = "") -> Any:
        """Replace placeholders: by the tensor or object of `own` in the same place if it fits, else by a new tensor.

        New tensors are on the device of the parameter `like` and have its strides where they have its shape. `step`
        leads from the whole part to `decoded`, for paths in errors.
        """
        own_leaves = dict(flatten(own))
        filled = {}
        for path, leaf in flatten(decoded):
            if isinstance(leaf, _Placeholder):
                filled[path] = self._leaf(leaf.number, path, own_leaves, like, step)
        return with_types_of(own, rebuild(decoded, filled))

    def _leaf(self, number: int, path: str, own_leaves: Mapping[str, Any], like: torch.Tensor | None, step: str) -> Any:
        spec = self._leaf_specs[number]
        if spec.kind != "object":
            if number not in self._tensors:
                whole = f"{self.path}{step}{'' if path[:1] in ('', '[') else '.'}{path}".removeprefix(".")
                self._tensors[number] = whole, self._tensor_for(spec, own_leaves.get(path), like)
            return self._tensors[number][1]
        if path not in own_leaves:
            raise UnsupportedError(
                f"root has an object at {path} that cannot be sent, and this rank has none there", name=self.path
            )
        return own_leaves[path]

    def _tensor_for(self, spec: _LeafSpec, own: Any, like: torch.Tensor | None) -> TensorLike:
        """Return `own` if it fits and is not used for another leaf already, else a new tensor."""
        device = self._device if like is None else like.device
        if spec.kind == "tensor" and spec.device_type == "cpu":
            device = torch.device("cpu")
        if spec.fits(own, device):
            key = same_memory(own)
            if key not in self._reused:
                self._reused.add(key)
                return cast("TensorLike", own)
        return spec.allocate(like, device)


def install_callback(obj: Any, own: Any, reader: PayloadReader) -> Callable[[], None]:
    """Return a callback that installs root's state in `obj`, whose present state is `own`.

    Call it once the reader's tensors are filled.
    """
    decoded = reader.decoded
    if not is_optimizer(obj):
        return functools.partial(
            load_object, obj, obj.load_state_dict, reader.fill(decoded, own), reader.path, " on root"
        )
    parameters = parameters_of(obj)
    groups = []
    for number, (saved, group) in enumerate(zip(decoded["param_groups"], obj.param_groups, strict=True)):
        like = next(iter(group["params"]), None)
        groups.append(reader.fill(saved, hyperparameters(group), like, step=f".param_groups[{number}]"))
    state: dict[Any, Any] = {}
    for number, saved in decoded["state"].items():
        parameter = parameters[number]
        state[parameter] = reader.fill(saved, own["state"].get(number, {}), parameter, step=f".state[{number}]")
    for key, saved in decoded["shared"].items():
        state[key] = reader.fill(saved, own["shared"].get(key, {}), step=f".state[{key!r}]")
    dropped = [key for key in obj.state if key not in state]
    differing = decoded["more"].keys() ^ own["more"].keys()
    if differing:
        text = f"only one of root's state dict and this rank's has the entry {min(map(str, differing))!r}"
        raise UnsupportedError(text, name=reader.path)
    more = {key: reader.fill(saved, own["more"].get(key), step=f".{key}") for key, saved in decoded["more"].items()}
    return functools.partial(install_optimizer, obj, groups, state, dropped, more)
