"""The parameters that a caller gives, by name, and the part of each that this rank has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from statexchange.errors import InvalidArgumentError
from statexchange.tensors import is_dtensor, replicated_part

# Parameters as callers give them: a module, a mapping of names, parameters, (name, parameter) pairs, or modules.
Source: TypeAlias = (
    "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor] | torch.nn.Module]"
)


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
