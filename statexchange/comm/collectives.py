"""The collectives on tensors: check arguments, make them contiguous, and write results back.

Each function here has three steps. It prepares this rank's arguments; if they are wrong, all ranks raise the error,
since others may have called with good ones (`_refusing`). It builds a `Call`, whose description the ranks compare. And
it gives the session a body, which runs once the ranks have compared their calls, maybe in another thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from statexchange.comm.backends.backend import Backend, Between
from statexchange.comm.backends.reduction import Reduction
from statexchange.comm.calls import Call, mark_of
from statexchange.comm.flat_tensor import FlatTensor, flat_for
from statexchange.comm.session import Route
from statexchange.comm.wait import Wait
from statexchange.errors import InvalidArgumentError
from statexchange.tensors import as_numpy

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_multiple",
    "all_to_all",
    "broadcast",
    "empty",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "through_leaders",
]

T = TypeVar("T")
_SHOWN = 300  # characters of a list of tensors in a message


def _refusing(route: Route, verb: str, prepare: Callable[[], T]) -> T:
    """Return what `prepare` makes of the arguments; if it raises, all ranks raise. Collective in that case."""
    route.session.raise_if_dead()
    try:
        return prepare()
    except Exception as refusal:  # noqa: BLE001 (whatever it is, it must reach the others)
        route.session.refuse(verb, refusal)


def _target(given: FlatTensor, out: Any) -> FlatTensor:
    """Return where the result goes: into `out`, which must be like `given`, or into `given`."""
    if out is None:
        return given
    target = FlatTensor(out, given.data.device.type, written=True)
    if target.text != given.text:
        raise InvalidArgumentError("out is not like the tensor", expected=given.text, found=target.text)
    return target


def _new(tensor: torch.Tensor, kind: str, route: Route) -> Any:
    """Return a new result on the device of the caller's tensors, or as an array."""
    return (
        as_numpy(tensor)
        if kind == "array"
        else tensor
        if kind == tensor.device.type
        else tensor.to(route.session.device)
    )


def all_reduce(route: Route, tensor: Any, op: str, out: Any, scale: float, async_op: bool) -> Any:
    """See `Communicator.all_reduce`. Collective."""
    route.session.raise_if_dead()
    try:
        given, backend = flat_for(route, tensor, written=out is None)
        target = _target(given, out)
        reduction = Reduction.of(op, given.data.dtype, scale, backend)
    except Exception as refusal:  # noqa: BLE001 (as `_refusing`, inlined because small tensors are to be fast)
        route.session.refuse("all_reduce", refusal)

    def body(wait: Wait) -> Any:
        result = target.start_from(given)
        reduction.all_reduce(backend, result, wait)
        return target.finish_with(result)

    return route.collective(Call(f"all_reduce {reduction.text} {given.text}"), backend, body, async_op)


def all_reduce_multiple(
    route: Route, tensors: Sequence[Any], op: str, scale: float, contiguous: bool, async_op: bool
) -> Any:
    """See `Communicator.all_reduce_multiple`. Collective."""

    def prepare() -> tuple[list[Any], list[tuple[Reduction, Backend, list[FlatTensor]]]]:
        given = list(tensors)
        groups: dict[Any, tuple[Reduction, Backend, list[FlatTensor]]] = {}
        for i, tensor in enumerate(given):
            flat, backend = flat_for(route, tensor, written=True)
            key = (flat.data.dtype, flat.data.device) if contiguous else i
            reduction = Reduction.of(op, flat.data.dtype, scale, backend)
            groups.setdefault(key, (reduction, backend, []))[2].append(flat)
        return given, list(groups.values())

    given, groups = _refusing(route, "all_reduce_multiple", prepare)
    first = groups[0][1] if groups else route.backend_for("cpu")

    def body(wait: Wait) -> Any:
        if not groups and first.enters_itself:
            wait.enter()
        for reduction, backend, flats in groups:
            together = flats[0].data if len(flats) == 1 else torch.cat([flat.data for flat in flats])
            reduction.all_reduce(backend, together, wait)
            for flat, part in zip(flats, torch.split(together, [flat.data.numel() for flat in flats]), strict=True):
                if flat.data is not together:
                    flat.data.copy_(part)
                flat.write_back()
        return given

    texts = " ".join(flat.text for _, _, flats in groups for flat in flats)
    kinds = " ".join(dict.fromkeys(reduction.text for reduction, _, _ in groups))
    how = "" if contiguous else ", one by one"
    call = Call(f"all_reduce_multiple {kinds} of {len(given)}{how}: {_short(texts)}")
    return route.collective(call, first, body, async_op)


def _short(text: str) -> str:
    """Shorten a text that may be long, so that two different ones still differ."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {mark_of(text).hex()}"


def reduce(route: Route, tensor: Any, op: str, root: int, out: Any, async_op: bool) -> Any:
    """See `Communicator.reduce`. Collective."""
    ours = route.rank == root

    def prepare() -> tuple[FlatTensor, FlatTensor, Reduction, Backend]:
        route.session.check_root(root)
        given, backend = flat_for(route, tensor, written=ours and out is None)
        target = _target(given, out) if ours else given
        return given, target, Reduction.of(op, given.data.dtype, 1.0, backend), backend

    given, target, reduction, backend = _refusing(route, "reduce", prepare)

    def body(wait: Wait) -> Any:
        result = target.start_from(given)
        reduction.reduce(backend, result, root, wait)
        return target.finish_with(result) if ours else tensor

    return route.collective(Call(f"reduce {reduction.text} {given.text} to {root}"), backend, body, async_op)


def through_leaders(route: Route, tensor: Any, between: Between, operation: str) -> None:
    """See `Communicator.through_leaders`. Collective."""

    def prepare() -> tuple[FlatTensor, Backend]:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise InvalidArgumentError(f"a tensor of a floating dtype is wanted, not {type(tensor).__name__}")
        backend = route.hierarchy or route.backend_for(tensor.device.type)
        return FlatTensor(tensor, backend.device_type, written=True), backend

    given, backend = _refusing(route, operation, prepare)

    def body(wait: Wait) -> None:
        if given.data.numel():
            backend.through_leaders(given.data, between, wait)
        elif backend.enters_itself:
            wait.enter()
        given.write_back()

    route.collective(Call(f"{operation} of {given.text}"), backend, body, async_op=False)


def broadcast(route: Route, tensor: Any, root: int, out: Any, async_op: bool) -> Any:
    """See `Communicator.broadcast`. Collective."""
    ours = route.rank == root

    def prepare() -> tuple[FlatTensor, FlatTensor, Backend]:
        route.session.check_root(root)
        given, backend = flat_for(route, tensor, written=out is None and not ours)
        return given, _target(given, out), backend

    given, target, backend = _refusing(route, "broadcast", prepare)

    def body(wait: Wait) -> Any:
        backend.broadcast((given if ours else target).bytes, root, wait)
        return tensor if ours and target is given else target.finish_with(given.data if ours else target.data)

    return route.collective(Call(f"broadcast {given.text} from {root}"), backend, body, async_op)


def all_gather(route: Route, tensor: Any, async_op: bool) -> Any:
    """See `Communicator.all_gather`. Collective."""
    given, backend = _refusing(route, "all_gather", lambda: flat_for(route, tensor, written=False))

    def body(wait: Wait) -> list[Any]:
        into = given.data.new_empty(route.world_size * given.data.numel())
        backend.all_gather(given.bytes, into.view(torch.uint8), wait)
        return _parts(route, given, into)

    return route.collective(Call(f"all_gather {given.text}"), backend, body, async_op)


def _parts(route: Route, given: FlatTensor, into: torch.Tensor) -> list[Any]:
    """Return one result like `given` for each rank."""
    return [_new(part, given.kind, route) for part in into.view(route.world_size, *given.tensor.shape)]


def gather(route: Route, tensor: Any, root: int, async_op: bool) -> Any:
    """See `Communicator.gather`. Collective."""

    def prepare() -> tuple[FlatTensor, Backend]:
        route.session.check_root(root)
        return flat_for(route, tensor, written=False)

    given, backend = _refusing(route, "gather", prepare)

    def body(wait: Wait) -> list[Any]:
        into = given.data.new_empty(route.world_size * given.data.numel()) if route.rank == root else None
        backend.gather(given.bytes, None if into is None else into.view(torch.uint8), root, wait)
        return [] if into is None else _parts(route, given, into)

    return route.collective(Call(f"gather {given.text} to {root}"), backend, body, async_op)


def _facts(flats: Sequence[FlatTensor]) -> list[Any]:
    return [[str(flat.tensor.dtype)[6:], list(flat.tensor.shape), flat.kind] for flat in flats]


def _nbytes(fact: Sequence[Any]) -> int:
    return int(math.prod(fact[1]) * getattr(torch, fact[0]).itemsize)


def _made(data: torch.Tensor, fact: Sequence[Any], route: Route) -> Any:
    # A copy, so that a small result does not keep the memory of all; it also begins where its dtype may begin.
    return _new(data.clone().view(getattr(torch, fact[0])).view(tuple(fact[1])), fact[2], route)


def _one_of_each(route: Route, tensors: Sequence[Any]) -> tuple[list[FlatTensor], Backend]:
    if len(tensors) != route.world_size:
        raise InvalidArgumentError("one tensor for each rank is wanted", expected=route.world_size, found=len(tensors))
    kinds = {tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu" for tensor in tensors}
    backend = route.backend_for(kinds.pop() if len(kinds) == 1 else "cpu")
    return [FlatTensor(tensor, backend.device_type, written=False) for tensor in tensors], backend


def scatter(route: Route, tensors: Sequence[Any] | None, root: int, async_op: bool) -> Any:
    """See `Communicator.scatter`. Collective."""
    ours = route.rank == root

    def prepare() -> list[FlatTensor]:
        route.session.check_root(root)
        return _one_of_each(route, () if tensors is None else tensors)[0] if ours else []

    flats = _refusing(route, "scatter", prepare)
    call = Call(f"scatter from {root}")
    backend = route.backend_for("cpu")

    def body(wait: Wait) -> Any:
        facts = json.loads(route.session.messages(call, json.dumps(_facts(flats)).encode(), None, wait)[root])
        sizes = [_nbytes(fact) for fact in facts]
        data = torch.cat([flat.bytes.cpu() for flat in flats]) if ours else None
        into = torch.empty(sizes[route.rank], dtype=torch.uint8, device="cpu")
        backend.scatter(data, sizes, into, root, wait)
        return _made(into, facts[route.rank], route)

    return route.collective(call, backend, body, async_op)


def all_to_all(route: Route, tensors: Sequence[Any], async_op: bool) -> Any:
    """See `Communicator.all_to_all`. Collective."""
    flats, backend = _refusing(route, "all_to_all", lambda: _one_of_each(route, tensors))
    call = Call("all_to_all")

    def body(wait: Wait) -> list[Any]:
        answers = route.session.messages(call, json.dumps(_facts(flats)).encode(), None, wait)
        facts = [json.loads(answer)[route.rank] for answer in answers]
        sizes = [_nbytes(fact) for fact in facts]
        data = torch.cat([flat.bytes for flat in flats])
        into = data.new_empty(sum(sizes))
        backend.all_to_all(data, [flat.bytes.numel() for flat in flats], into, sizes, wait)
        return [_made(part, fact, route) for part, fact in zip(torch.split(into, sizes), facts, strict=True)]

    return route.collective(call, backend, body, async_op)


def reduce_scatter(route: Route, tensor: Any, op: str, async_op: bool) -> Any:
    """See `Communicator.reduce_scatter`. Collective."""

    def prepare() -> tuple[FlatTensor, Reduction, Backend]:
        given, backend = flat_for(route, tensor, written=False)
        shape = given.tensor.shape
        if not shape or shape[0] % route.world_size:
            raise InvalidArgumentError(f"dimension 0 of {given.text} cannot be cut into {route.world_size} parts")
        return given, Reduction.of(op, given.data.dtype, 1.0, backend), backend

    given, reduction, backend = _refusing(route, "reduce_scatter", prepare)
    shape = [given.tensor.shape[0] // route.world_size, *given.tensor.shape[1:]] if given.tensor.shape else []

    def body(wait: Wait) -> Any:
        into = given.data.new_empty(math.prod(shape))
        reduction.reduce_scatter(backend, given.data, into, wait)
        return _new(into.view(tuple(shape)), given.kind, route)

    return route.collective(Call(f"reduce_scatter {reduction.text} {given.text}"), backend, body, async_op)


def _size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    sizes = isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"a shape, as (2, 3), and a torch dtype are wanted, not {shape!r} and {dtype!r}")
    return math.prod(shape) * dtype.itemsize


def empty(route: Route, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """See `Communicator.empty`. Collective."""
    nbytes = _refusing(route, "empty", lambda: _size_of(shape, dtype))
    backend = route.backend_for("cpu")

    def body(wait: Wait) -> torch.Tensor:
        if backend.enters_itself:
            wait.enter()
        memory = backend.empty(nbytes, wait) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
        return memory[:nbytes].view(dtype).view(tuple(shape))

    call = Call(f"empty {str(dtype)[6:]}{list(shape)}")
    tensor: Any = route.collective(call, backend, body, async_op=False)
    return tensor  # type: ignore[no-any-return]
