"""Parameter specs: names, dtypes, shapes and devices, which ranks compare before they reduce gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.tensors import is_dtensor, replicated_part
from statexchange.train.comparison import Entry

__all__ = [
    "ParameterSpec",
    "Source",
    "local_part",
    "named_parameters",
    "specs_of",
]

# Parameters as callers give them: a module, a mapping of names, parameters, (name, parameter) pairs, or modules.
Source: TypeAlias = (
    "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor] | torch.nn.Module]"
)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter's name, dtype, shape and device.

    `device` is a type and a count of this rank's devices, as "cuda 0": torch's own indices may differ between ranks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu 0"

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    @property
    def entry(self) -> Entry:
        """What ranks compare of the parameter."""
        return Entry(self.name, f"{self.dtype}{list(self.shape)} {self.device}")


def named_parameters(source: Source) -> dict[str, torch.Tensor]:
    """Return the parameters in `source` that can have a gradient, by name; tied ones once. Not collective.

    Args:
        source: a module, a mapping from names, parameters or (name, parameter) pairs, or a list of modules, whose
            parameters get names that begin with the number of the module.

    Raises:
        InvalidArgumentError: `source` is something else, or two parameters have one name.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in _pairs(source):
        if not isinstance(parameter, torch.Tensor):
            raise InvalidArgumentError(f"expected parameters, not {type(parameter).__name__}", name=name)
        if name in named:
            raise InvalidArgumentError("two parameters have one name", name=name)
        # Integers, as those of quantised modules, get no gradient.
        if id(parameter) not in seen and (parameter.is_floating_point() or parameter.is_complex()):
            named[name] = parameter
            seen.add(id(parameter))
    return named


def _pairs(source: Source) -> Iterable[tuple[str, Any]]:
    """Return the names and parameters in `source`; a module gives those that are tied once, a list may repeat them."""
    if isinstance(source, torch.nn.Module):
        return source.named_parameters()
    if isinstance(source, Mapping):
        return source.items()
    if not isinstance(source, Iterable) or isinstance(source, torch.Tensor):
        raise InvalidArgumentError(f"expected a module or parameters, not {type(source).__name__}")
    pairs: list[tuple[str, Any]] = []
    for number, item in enumerate(source):
        if isinstance(item, torch.nn.Module):
            pairs += item.named_parameters(prefix=str(number))
        else:
            pairs.append(item if isinstance(item, tuple) else (f"parameters[{number}]", item))
    return pairs


def local_part(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor itself, or this rank's copy of a replicated DTensor. Not collective.

    Raises:
        UnsupportedError: the DTensor has another placement.
    """
    if not is_dtensor(tensor):
        return tensor
    advice = "what sharded it, such as FSDP, reduces its gradients: give only replicated parameters"
    return replicated_part(tensor, name, advice)


def specs_of(named: Mapping[str, torch.Tensor]) -> list[ParameterSpec]:
    """Return the specs of parameters. Not collective.

    Raises:
        UnsupportedError: a parameter is lazy, a meta tensor, or a DTensor that is not replicated.
        InvalidArgumentError: a tensor is no leaf of the graph.
    """
    devices: dict[torch.device, str] = {}
    specs = []
    for name, parameter in named.items():
        # First, as a lazy parameter raises an error of torch's where it is asked for its shape.
        if torch.nn.parameter.is_lazy(parameter):
            raise UnsupportedError("a lazy parameter has no shape yet: run a forward first", name=name)
        if parameter.is_meta:
            raise UnsupportedError("a meta tensor has no memory: materialise it first", name=name)
        if not parameter.is_leaf:
            raise InvalidArgumentError("this tensor is no leaf of autograd's graph, and gets no gradient", name=name)
        local = local_part(parameter, name)
        # Counted as they come: a rank's GPU may be cuda:0, and another rank's cuda:1.
        device = devices.setdefault(local.device, f"{local.device.type} {len(devices)}")
        specs.append(ParameterSpec(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), device))
    return specs
