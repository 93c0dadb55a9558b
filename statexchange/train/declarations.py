"""Declarations: what ranks must agree on of parameters before they reduce them, and how these fall into buckets."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError
from statexchange.tensors import is_dtensor, replicated_part

__all__ = [
    "Declaration",
    "Source",
    "compare_declarations",
    "declare",
    "local_part",
    "named_parameters",
    "shortened",
    "split_buckets",
]

Source = Any  # a module, a mapping from names to parameters, or parameters with or without names
_NAMELESS = "parameters[{}]"
_SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True)
class Declaration:
    """What ranks must agree on of a tensor. `device` is its type and a number that counts the devices of one rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu 0"

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def named_parameters(source: Source) -> dict[str, torch.Tensor]:
    """The parameters in `source` that can have a gradient, by name; tied ones once. Not collective.

    `source` is a module, a mapping from names, or parameters, or (name, parameter) pairs; or a list of modules, whose
    names begin with their number.
    """
    if isinstance(source, torch.nn.Module):
        pairs: Iterable[tuple[str, Any]] = source.named_parameters()
    elif isinstance(source, Mapping):
        pairs = source.items()
    elif not isinstance(source, Iterable) or isinstance(source, torch.Tensor):
        raise InvalidArgumentError(f"a module, or parameters of it, are wanted, not {type(source).__name__}")
    else:
        pairs = itertools.chain.from_iterable(_named(i, item) for i, item in enumerate(source))
    named: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, parameter in pairs:
        if not isinstance(parameter, torch.Tensor):
            raise InvalidArgumentError(f"parameters are wanted, not {type(parameter).__name__}", name=name)
        if name in named:
            raise InvalidArgumentError("two parameters have one name", name=name)
        if id(parameter) not in known and (parameter.is_floating_point() or parameter.is_complex()):
            named[name] = parameter
            known.add(id(parameter))
    return named


def _named(number: int, item: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(item, torch.nn.Module):
        return item.named_parameters(prefix=str(number))
    return [item] if isinstance(item, tuple) else [(_NAMELESS.format(number), item)]


def local_part(tensor: Any, name: str) -> torch.Tensor:
    """`tensor` itself, or this rank's copy of a replicated DTensor; any other placement is refused. Not collective."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    advice = "its gradients are reduced by what sharded it, so give only replicated parameters"
    return replicated_part(tensor, name, advice)  # type: ignore[no-any-return]


def declare(named: Mapping[str, torch.Tensor]) -> list[Declaration]:
    """The declarations of parameters; UnsupportedError for those that cannot be reduced. Not collective."""
    devices: dict[torch.device, str] = {}
    declared = []
    for name, parameter in named.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise UnsupportedError("a lazy parameter has no shape yet: run a forward first", name=name)
        if parameter.is_meta:
            raise UnsupportedError("a meta tensor has no memory: materialise it first", name=name)
        if not parameter.is_leaf:
            raise InvalidArgumentError("only leaves of the graph keep a gradient, and this is none", name=name)
        local = local_part(parameter, name)
        place = devices.setdefault(local.device, f"{local.device.type} {len(devices)}")
        declared.append(Declaration(name, str(local.dtype)[6:], tuple(local.shape), place))
    return declared


def compare_declarations(comm: Communicator, declared: Sequence[Declaration], about: str) -> bytes:
    """A digest of the declarations and of `about`; a MismatchError on all ranks unless all give the same. Collective.

    The error names the first parameter that differs, and the lowest rank where it does.
    """
    text = json.dumps([about, [[d.name, str(d), d.device] for d in declared]]).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    if all(answer == digest for answer in comm.all_gather_bytes(digest, operation="comparing parameters")):
        return digest
    answers = [
        json.loads(answer) for answer in comm.all_gather_bytes(text, operation="telling of parameters that differ")
    ]
    for rank, theirs in enumerate(answers):
        if theirs != answers[0]:
            raise _difference(rank, answers[0], theirs)
    raise AssertionError("digests differ where texts do not")


def _difference(rank: int, root: list[Any], theirs: list[Any]) -> MismatchError:
    for expected, found in itertools.zip_longest(root[1], theirs[1]):
        if expected != found:
            name = (expected or found)[0]
            sides = [None if side is None else " ".join(side) for side in (expected, found)]
            sides = ["no parameter here" if side is None else side for side in sides]
            return MismatchError(
                "parameters differ between rank 0 and others", rank=rank, name=name, expected=sides[0], found=sides[1]
            )
    return MismatchError("reducers differ between rank 0 and others", rank=rank, expected=root[0], found=theirs[0])


def shortened(names: Sequence[str]) -> str:
    """The first few of `names`, and how many more there are. Not collective."""
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def split_buckets(tensors: Sequence[Declaration], bucket_bytes: int) -> list[list[Declaration]]:
    """Buckets of tensors of one dtype and device, in the order of dtypes, then as given. Not collective.

    A tensor joins the running bucket if that brings its size nearer to `bucket_bytes`, or else begins the next.
    """
    buckets = []
    for kind in sorted({(t.dtype, t.device) for t in tensors}):
        running: list[Declaration] = []
        size = 0
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != kind:
                continue
            if running and abs(size + tensor.nbytes - bucket_bytes) > abs(size - bucket_bytes):
                buckets.append(running)
                running, size = [], 0
            running.append(tensor)
            size += tensor.nbytes
        buckets.append(running)
    return buckets
