"""The calls on tensors: check arguments, make them contiguous, and write results back.

Each collective here has three steps. It prepares this rank's arguments; if they are wrong, all ranks raise the error,
since others may have called with good ones (`Session.checking`). It builds a `Call`, whose description the ranks
compare. And it gives the session a body, which runs once the ranks have compared their calls, maybe in another thread.

A reduction that cannot be right is refused before anything is sent. A dtype that a backend does not reduce right itself
is converted to one that it does (`Reduction`).

`send` and `recv` concern two ranks, which compare what they are about to do before any data moves, by three messages
with tags 0, 1 and 2: the sender's note goes to the receiver, the receiver's note to the sender, then the data. A note
is the hash of a dtype and shape, and a text for errors. If the hashes differ, or a rank has refused its arguments, both
ranks raise, and the data is not sent.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch

from statexchange.comm.backends.backend import Backend, Between
from statexchange.comm.backends.reduction import COMPLEX, FLOATS, HALVES, INTS, NO_FINISH, Finish
from statexchange.comm.calls import Call, call_site, fingerprint_of
from statexchange.comm.session import KnownCall, Route
from statexchange.comm.wait import Wait
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError, MismatchError, NumericOverflowError, UnsupportedError, type_text
from statexchange.tensors import (
    TensorKindT,
    TensorLike,
    TensorT,
    as_numpy,
    as_torch,
    check_dense,
    check_writable,
    is_dtensor,
)

T = TypeVar("T")
_SHOWN = 300  # characters of a list of tensors in a message
_OFFER, _ANSWER, _DATA = 0, 1, 2  # tags: of the sender's note, the receiver's note, and the data
_NOTE_BYTES = 320
_OPS = ("sum", "avg", "min", "max", "prod")
_INT64_MAX = 2**63 - 1


def _op_name(op: object) -> str:
    """Return one of _OPS for a name or a torch ReduceOp. Not collective."""
    # An op of torch prints as RedOpType.SUM.
    name = op.lower() if isinstance(op, str) else str(op).rpartition(".")[2].lower()
    name = {"product": "prod"}.get(name, name)
    if name not in _OPS:
        raise InvalidArgumentError(f"unknown op {op!r}; known: {', '.join(_OPS)}")
    return name


def _range_of_results(limits: torch.iinfo, factor: int) -> tuple[int, int]:
    """Return the least and the greatest int64 whose product with `factor` lies within `limits`.

    Those of int8 with the factor 2 are -64 and 63.
    """
    if factor == 0:
        return -_INT64_MAX - 1, _INT64_MAX
    low, high = limits.min, limits.max
    if factor < 0:
        low, high = -high, -low
    size = abs(factor)
    # Both are rounded towards zero, and cut off where int64 ends.
    return max(-(-low // size), -_INT64_MAX - 1), min(high // size, _INT64_MAX)


def _is_moved(backend: Backend, tensor: torch.Tensor) -> bool:
    """Whether a backend is called for a tensor: for an empty one only if the ranks compare their calls in it."""
    return tensor.numel() > 0 or backend.enters_itself


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of one dtype by one op on one backend. Made by `of`, which refuses what cannot be right."""

    op: str
    dtype: torch.dtype
    finish: Finish
    native: bool
    """Whether the backend reduces the dtype itself; else the tensor is converted."""
    text: str
    """The operation as text, which ranks compare."""

    @classmethod
    def of(cls, op: object, dtype: torch.dtype, scale: float, backend: Backend) -> Reduction:
        """Return how `op` reduces `dtype` on `backend`; raise UnsupportedError if no result can be right.

        Not collective.
        """
        factor = float(scale)
        # Not kept: a program may scale by another number in each step.
        if factor != 1:
            return cls._of(_op_name(op), dtype, factor, backend)
        cached: Reduction | None = backend.reductions.get((op, dtype))
        if cached is None:
            cached = backend.reductions[op, dtype] = cls._of(_op_name(op), dtype, 1.0, backend)
        return cached

    @classmethod
    def _of(cls, op: str, dtype: torch.dtype, scale: float, backend: Backend) -> Reduction:
        plain = "sum" if op == "avg" else op
        exact = dtype in INTS or dtype == torch.bool
        if not exact and dtype not in FLOATS + COMPLEX:
            raise UnsupportedError(f"{dtype} can be moved but not reduced: convert it first")
        if dtype in COMPLEX and plain in ("min", "max"):
            raise UnsupportedError(f"{op} of {dtype}: complex numbers have no order")
        if exact and op == "avg":
            raise UnsupportedError(f"avg of {dtype}: convert it to a floating dtype first")
        if exact and scale != 1 and (dtype == torch.bool or not scale.is_integer()):
            raise UnsupportedError(f"{dtype} cannot be scaled by {scale}: convert it to a floating dtype first")
        native = backend.reduces(plain, dtype)
        if dtype in COMPLEX and plain == "sum":  # torch.add multiplies by 1, which makes complex infinities NaN
            native = False
        if exact:  # sums and products must be checked for overflow
            native = native and dtype != torch.bool and plain in ("min", "max") and scale == 1
        divisor, text = 1, plain
        if op == "avg" and backend.world_size > 1:
            divisor, text = backend.world_size, "avg"
        finish = NO_FINISH
        if divisor != 1 or scale != 1:
            finish = Finish(divisor, scale)
        if scale != 1:
            text += f" times {scale!r}"
        return cls(plain, dtype, finish, native, text)

    def all_reduce(self, backend: Backend, tensor: torch.Tensor, wait: Wait) -> None:
        """Reduce `tensor` over all ranks, in place. Collective."""
        if not _is_moved(backend, tensor):
            return
        if self.native:
            backend.all_reduce(tensor, self.op, self.finish, wait)
        else:
            tensor.copy_(self._by_conversion(backend, tensor, wait))

    def reduce(self, backend: Backend, tensor: torch.Tensor, root: int, wait: Wait) -> None:
        """Reduce `tensor` over all ranks, in place on `root` only. Collective."""
        if not _is_moved(backend, tensor):
            return
        if self.native:
            backend.reduce(tensor, self.op, root, self.finish, wait)
            return
        result = self._by_conversion(backend, tensor, wait)
        if backend.rank == root:
            tensor.copy_(result)

    def reduce_scatter(self, backend: Backend, tensor: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Write this rank's part of the reduction into `into`. Collective."""
        if not _is_moved(backend, tensor):
            return
        if self.native:
            backend.reduce_scatter(tensor, into, self.op, self.finish, wait)
        else:
            into.copy_(self._by_conversion(backend, tensor, wait).view(backend.world_size, -1)[backend.rank])

    def _by_conversion(self, backend: Backend, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Return the reduction of a copy of `tensor` in a dtype that the backend reduces right, or by Backend's own."""
        if self.dtype == torch.bool:
            # The sum of bools is whether any is true, their product whether all are.
            op = "max" if self.op in ("sum", "max") else "min"
            return self._run(backend, tensor.to(torch.uint8), op, wait)
        if self.dtype in INTS:
            return self._integers(backend, tensor, wait)
        if self.dtype in COMPLEX:
            return self._complex(backend, tensor, wait)
        # A copy, as what follows works in place; halves in float32, so that a result is rounded once.
        wide = tensor.to(torch.float32) if self.dtype in HALVES else tensor.clone()
        if self.op in ("min", "max"):
            result = self._with_nan(backend, wide, wait)
        else:
            result = self._run(backend, wide, self.op, wait)
        self.finish(result)
        return result

    def _run(self, backend: Backend, tensor: torch.Tensor, op: str, wait: Wait) -> torch.Tensor:
        backend.all_reduce(tensor, op, NO_FINISH, wait)
        return tensor

    def _with_nan(self, backend: Backend, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Reduce min or max, and NaN apart: with NaN a transport's result depends on the order of ranks.

        The maximum of ``[nan, 2]`` and ``[1, 3]`` is that of ``[-inf, 2]`` and ``[1, 3]``, with NaN in place of 1.
        """
        nan = tensor.isnan()
        anywhere = self._run(backend, nan.to(torch.uint8), "max", wait).bool()
        least = float("inf")
        if self.op == "max":
            least = -least
        return self._run(backend, tensor.masked_fill_(nan, least), self.op, wait).masked_fill_(anywhere, float("nan"))

    def _integers(self, backend: Backend, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Reduce in int64, and in float64 too where int64 could wrap; raise on all ranks if a result does not fit."""
        # Applied last: `_range_of_results` returns which results, times the factor, fit.
        factor = int(self.finish.scale)
        # A copy, so that the caller's tensor stays as it is if a result does not fit.
        result = self._run(backend, tensor.to(torch.int64, copy=True), self.op, wait)
        lowest, highest = _range_of_results(torch.iinfo(self.dtype), factor)
        outside = (result < lowest) | (result > highest)
        if self.op == "prod" or (self.op == "sum" and self.dtype == torch.int64):
            # A result that has wrapped is off by a multiple of 2**64, far more than float64 is.
            approximate = self._run(backend, tensor.double(), self.op, wait)
            outside |= approximate.sub_(result).abs_() > 2.0**63
        if bool(outside.any()) or abs(factor) > _INT64_MAX:
            raise NumericOverflowError(f"the {self.op} over ranks does not fit into {self.dtype}: convert it first")
        return result * factor

    def _complex(self, backend: Backend, tensor: torch.Tensor, wait: Wait) -> torch.Tensor:
        result = tensor.clone()
        if self.op == "sum":
            self._run(backend, torch.view_as_real(result).view(-1), "sum", wait)
            self.finish(result)
        else:
            Backend.all_reduce(backend, result, self.op, self.finish, wait)  # the plain one: transports lack it
        return result


class FlatTensor(Generic[TensorT]):
    """A caller's tensor or array, and `data`: its elements as one contiguous dimension on the backend's device.

    `data` is the caller's own memory where that is possible; else `write_back` copies it there.
    """

    def __init__(self, original: TensorT, device: str, *, written: bool) -> None:
        self.original = original
        self.tensor = tensor = _tensor_of(original, written=written)
        is_on_device = tensor.is_cpu if device == "cpu" else tensor.device.type == device
        self._is_callers_memory = is_on_device and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        if self._is_callers_memory:
            # torch calls at most one element contiguous whatever its stride, but then refuses to view it as bytes.
            is_flat = tensor.dim() == 1 and tensor.stride(0) == 1
            self.data = tensor if is_flat else tensor.as_strided((tensor.numel(),), (1,))
            return
        moved = tensor if is_on_device else tensor.to(device)
        # Torch marks a conjugate or negative by a bit, and leaves its memory as it was.
        self.data = moved.resolve_conj().resolve_neg().contiguous().view(-1)

    @property
    def text(self) -> str:
        """Dtype and shape as text."""
        return _text_of(self.tensor.dtype, self.tensor.shape)

    @property
    def bytes(self) -> torch.Tensor:
        """`data` as uint8."""
        return self.data.view(torch.uint8)

    def write_back(self) -> TensorT:
        """Write `data` to what the caller gave, and return that."""
        if not self._is_callers_memory:
            self.tensor.copy_(self.data.view(self.tensor.shape))
        if isinstance(self.original, np.ndarray):
            array = as_numpy(self.tensor)
            # `_tensor_of_array` has copied an array that torch cannot take as it lies.
            if not np.may_share_memory(self.original, array):
                self.original[...] = array
        return self.original

    def start_from(self, source: FlatTensor[Any]) -> torch.Tensor:
        """Return the tensor to reduce in place: for `out` a copy of `source`, as a failed call must not change it."""
        return self.data if source is self else source.data.clone()

    def finish_with(self, result: torch.Tensor) -> TensorT:
        """Write `result` to what the caller gave, and return that."""
        if result is not self.data:
            self.data.copy_(result)
        return self.write_back()

    @property
    def kind(self) -> str:
        """The kind of results for this caller: "array", or tensors of "cpu" or "cuda"."""
        return "array" if isinstance(self.original, np.ndarray) else self.tensor.device.type


def _flat_for(route: Route, original: TensorT, *, written: bool) -> tuple[FlatTensor[TensorT], Backend]:
    """Return what a caller gave as a flat tensor, and the backend that will move it."""
    backend = route.backend_of(original)
    return FlatTensor(original, backend.device_type, written=written), backend


@functools.lru_cache(maxsize=4096)
def _text_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


def _tensor_of(original: object, *, written: bool) -> torch.Tensor:
    if not isinstance(original, torch.Tensor):
        if isinstance(original, np.ndarray):
            return _tensor_of_array(original, written=written)
        raise UnsupportedError(f"expected a torch tensor or numpy array, not {type(original).__name__}")
    if type(original) is not torch.Tensor and is_dtensor(original):
        raise UnsupportedError("a DTensor has parts on other ranks: give its to_local()")
    check_dense(original)
    if written:
        check_writable(original)
    # Autograd allows no change of a leaf in place. The detached tensor has the same memory.
    return original.detach() if original.requires_grad else original


def _tensor_of_array(array: np.ndarray[Any, Any], *, written: bool) -> torch.Tensor:
    if written:
        check_writable(array)
    plain = np.ascontiguousarray(array).reshape(array.shape)  # of no dim it makes one
    # Torch warns of an array that cannot be written, although here it is only read.
    return as_torch(plain if plain.flags.writeable else plain.copy())


def _target(flat: FlatTensor[TensorT], out: TensorT) -> FlatTensor[TensorT]:
    """Return where the result goes: into `out`, which must be like `flat`."""
    target = FlatTensor(out, flat.data.device.type, written=True)
    if target.text != flat.text:
        raise InvalidArgumentError(
            "out must have the dtype and shape of the tensor", expected=flat.text, found=target.text
        )
    return target


def _as_kind(tensor: torch.Tensor, kind: str, route: Route) -> TensorLike:
    """Return a new result as an array, or as a tensor on the device of the caller's tensors."""
    if kind == "array":
        return cast("TensorLike", as_numpy(tensor))
    if kind == tensor.device.type:
        return tensor
    return tensor.to(route.session.device)


def all_reduce(
    route: Route, tensor: TensorT, op: object, out: TensorT | None, scale: float, async_op: bool
) -> TensorT | Work[TensorT]:
    """See `Communicator.all_reduce`. Collective."""
    has_plain_options = type(op) is str and type(scale) is float and scale == 1 and out is None and not async_op
    is_plain = has_plain_options and _is_plain(tensor)
    if is_plain and route.may_repeat:
        remembered = route.known.get(("all_reduce", op, tensor.dtype, tensor.shape))
        if remembered is not None:
            return _repeat_all_reduce(route, tensor, op, remembered)
    if isinstance(tensor, float | int) and not isinstance(tensor, bool):
        return cast("TensorT", _all_reduce_number(route, tensor, op, out, scale, async_op))
    if route.session.dead is not None:
        route.session.raise_if_dead()
    try:
        backend = route.backend_of(tensor)
        flat = FlatTensor(tensor, backend.device_type, written=out is None)
        target = flat if out is None else _target(flat, out)
        reduction = Reduction.of(op, flat.data.dtype, scale, backend)
    except Exception as refusal:  # noqa: BLE001 (as `checking`, which would slow down small tensors)
        route.session.refuse("all_reduce", refusal)

    def body(wait: Wait) -> TensorT:
        result = target.start_from(flat)
        reduction.all_reduce(backend, result, wait)
        return target.finish_with(result)

    call = Call(f"all_reduce {reduction.text} {flat.text}")
    result = route.collective(call, backend, body, async_op)
    if is_plain and reduction.native:
        route.remember(("all_reduce", op, flat.tensor.dtype, flat.tensor.shape), call, backend)
    return result


def _all_reduce_number(route: Route, number: object, op: object, out: object, scale: float, async_op: bool) -> float:
    """Reduce a float as float64, or an int as int64. Collective."""
    with route.session.checking("all_reduce"):
        if out is not None or async_op:
            raise InvalidArgumentError("the sum of numbers is returned at once: use a tensor with out= and async_op=")
        if isinstance(number, int) and not -_INT64_MAX - 1 <= number <= _INT64_MAX:
            raise InvalidArgumentError(f"{number} does not fit into int64: use a float or a tensor")
        dtype = torch.int64 if isinstance(number, int) else torch.float64
        tensor = torch.tensor(number, dtype=dtype, device="cpu")
    all_reduce(route, tensor, op, None, scale, async_op=False)
    return tensor.item()


# From the third call on with one dtype, shape and options, their checks are skipped: of a small tensor they take longer
# than its data (`Route.remember`). What else may differ, `_is_plain` checks every time.


def _is_plain(tensor: object) -> bool:
    """Whether this is a contiguous tensor of this CPU that can be filled in place: what `FlatTensor` takes as it is.

    What else `FlatTensor` checks follows from the dtype and the shape.
    """
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    if tensor.requires_grad or tensor.is_inference() or tensor.is_neg() or tensor.is_conj():
        return False
    # The storage may have been resized since, as FSDP does.
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    try:
        has_memory = tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end
    except (RuntimeError, NotImplementedError):  # a tensor of torch.func, which has none
        return False
    return has_memory and tensor.is_contiguous()


def _repeat_all_reduce(route: Route, tensor: TensorT, op: object, remembered: KnownCall) -> TensorT:
    """Reduce a plain tensor of a dtype and shape that were reduced before. Collective."""
    assert isinstance(tensor, torch.Tensor)  # for mypy
    backend = remembered.backend
    reduction: Reduction = backend.reductions[op, tensor.dtype]
    flat = tensor if tensor.dim() == 1 else tensor.as_strided((tensor.numel(),), (1,))
    route.session.run(
        remembered.call, lambda: backend.all_reduce(flat, reduction.op, reduction.finish, remembered.wait)
    )
    return tensor


def _plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _ReducedTogether(NamedTuple):
    """Tensors that are reduced as one: by which reduction, on which backend."""

    reduction: Reduction
    backend: Backend
    flats: list[FlatTensor[Any]]


def all_reduce_multiple(
    route: Route, tensors: Sequence[TensorT], op: object, scale: float, contiguous: bool, async_op: bool
) -> list[TensorT] | Work[list[TensorT]]:
    """See `Communicator.all_reduce_multiple`. Collective."""
    by_key: dict[object, _ReducedTogether] = {}
    with route.session.checking("all_reduce_multiple"):
        all_tensors = list(tensors)
        for i, tensor in enumerate(all_tensors):
            flat, backend = _flat_for(route, tensor, written=True)
            key = (flat.data.dtype, flat.data.device) if contiguous else i
            reduction = Reduction.of(op, flat.data.dtype, scale, backend)
            by_key.setdefault(key, _ReducedTogether(reduction, backend, [])).flats.append(flat)
    groups = list(by_key.values())
    first_backend = groups[0].backend if groups else route.backend_for("cpu")

    def body(wait: Wait) -> list[TensorT]:
        if not groups and first_backend.enters_itself:  # without a reduction, in which it would
            wait.enter()
        for reduction, backend, flats in groups:
            alike = [flat.data for flat in flats]
            together = alike[0]  # a single one is reduced in its own memory
            if len(alike) > 1:
                together = torch.cat(alike)
            reduction.all_reduce(backend, together, wait)
            parts = torch.split(together, list(map(torch.numel, alike)))
            for flat, part in zip(flats, parts, strict=True):
                if flat.data is not together:
                    flat.data.copy_(part)
                flat.write_back()
        return all_tensors

    tensor_texts = []
    for group in groups:
        tensor_texts += [flat.text for flat in group.flats]
    reductions = " ".join(dict.fromkeys(group.reduction.text for group in groups))
    how = ""
    if not contiguous:
        how = ", one by one"
    call = Call(f"all_reduce_multiple {reductions} of {len(all_tensors)}{how}: {_short(' '.join(tensor_texts))}")
    return route.collective(call, first_backend, body, async_op)


def _short(text: str) -> str:
    """Shorten a text that may be long, so that two different ones still differ."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... {fingerprint_of(text):016x}"


def reduce(
    route: Route, tensor: TensorT, op: object, root: int, out: TensorT | None, async_op: bool
) -> TensorT | Work[TensorT]:
    """See `Communicator.reduce`. Collective."""
    is_root = route.rank == root
    with route.session.checking("reduce"):
        route.session.check_root(root)
        # Only root has a result, so the others' tensors need not be writable, and their `out` is not looked at.
        flat, backend = _flat_for(route, tensor, written=is_root and out is None)
        target = flat
        if is_root and out is not None:
            target = _target(flat, out)
        reduction = Reduction.of(op, flat.data.dtype, 1.0, backend)

    def body(wait: Wait) -> TensorT:
        result = target.start_from(flat)
        reduction.reduce(backend, result, root, wait)
        if not is_root:
            return tensor
        return target.finish_with(result)

    return route.collective(Call(f"reduce {reduction.text} {flat.text} to {root}"), backend, body, async_op)


def through_leaders(route: Route, tensor: TensorLike, between: Between, operation: str) -> None:
    """See `Communicator.through_leaders`. Collective."""
    with route.session.checking(operation):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise InvalidArgumentError(f"expected a tensor of a floating dtype, not {type(tensor).__name__}")
        backend = route.hierarchy or route.backend_for(tensor.device.type)
        flat = FlatTensor(tensor, backend.device_type, written=True)

    def body(wait: Wait) -> None:
        if flat.data.numel():
            backend.through_leaders(flat.data, between, wait)
        elif backend.enters_itself:
            wait.enter()
        flat.write_back()

    route.collective(Call(f"{operation} of {flat.text}"), backend, body, async_op=False)


def broadcast(route: Route, tensor: TensorT, root: int, out: TensorT | None, async_op: bool) -> TensorT | Work[TensorT]:
    """See `Communicator.broadcast`. Collective."""
    is_plain = type(root) is int and out is None and not async_op and _is_plain(tensor)
    if is_plain and route.may_repeat:
        remembered = route.known.get(("broadcast", root, tensor.dtype, tensor.shape))
        if remembered is not None:
            _repeat_broadcast(route, tensor, root, remembered)
            return tensor
    is_root = route.rank == root
    with route.session.checking("broadcast"):
        route.session.check_root(root)
        flat, backend = _flat_for(route, tensor, written=out is None and not is_root)
        target = flat if out is None else _target(flat, out)

    def body(wait: Wait) -> TensorT:
        moved = flat if is_root else target
        if _is_moved(backend, moved.data):
            backend.broadcast(moved.bytes, root, wait)
        if is_root and target is flat:
            return tensor
        return target.finish_with(moved.data)

    call = Call(f"broadcast {flat.text} from {root}")
    result = route.collective(call, backend, body, async_op)
    if is_plain:
        route.remember(("broadcast", root, flat.tensor.dtype, flat.tensor.shape), call, backend)
    return result


def _repeat_broadcast(route: Route, tensor: TensorLike, root: int, remembered: KnownCall) -> None:
    """Broadcast a plain tensor of a dtype and shape that were broadcast before. Collective."""
    assert isinstance(tensor, torch.Tensor)  # for mypy
    data = _plain_bytes(tensor)
    route.session.run(remembered.call, lambda: remembered.backend.broadcast(data, root, remembered.wait))


def gather(
    route: Route, tensor: TensorKindT, root: int | None, async_op: bool
) -> list[TensorKindT] | Work[list[TensorKindT]]:
    """See `Communicator.gather`, and `Communicator.all_gather` for the `root` None. Collective."""
    verb = "all_gather" if root is None else "gather"
    is_plain = root is None and not async_op and _is_plain(tensor)
    if is_plain and route.may_repeat:
        remembered = route.known.get((verb, tensor.dtype, tensor.shape))
        if remembered is not None:
            return _repeat_all_gather(route, tensor, remembered)
    with route.session.checking(verb):
        if root is not None:
            route.session.check_root(root)
        flat, backend = _flat_for(route, tensor, written=False)

    has_result = root in (None, route.rank)

    def body(wait: Wait) -> list[TensorKindT]:
        numel = flat.data.numel() * route.world_size * has_result
        gathered = flat.data.new_empty(numel)
        if root is None and _is_moved(backend, flat.data):
            backend.all_gather(flat.bytes, gathered.view(torch.uint8), wait)
        elif root is not None:
            # Each rank sends its part to root and nothing to the others; root alone receives.
            nbytes = flat.bytes.numel()
            sent = [0] * route.world_size
            sent[root] = nbytes
            received = [nbytes * has_result] * route.world_size
            backend.flat.all_to_all(flat.bytes, sent, gathered.view(torch.uint8), received, wait)
        if not has_result:
            return []
        parts = gathered.view(route.world_size, *flat.tensor.shape)
        return [cast("TensorKindT", _as_kind(part, flat.kind, route)) for part in parts]

    text = f"{verb} {flat.text}"
    if root is not None:
        text += f" to {root}"
    call = Call(text)
    result = route.collective(call, backend, body, async_op)
    if is_plain:
        route.remember((verb, flat.tensor.dtype, flat.tensor.shape), call, backend)
    return result


def _repeat_all_gather(route: Route, tensor: TensorKindT, remembered: KnownCall) -> list[TensorKindT]:
    """Gather plain tensors of a dtype and shape that were gathered before. Collective."""
    assert isinstance(tensor, torch.Tensor)  # for mypy
    gathered = tensor.new_empty(route.world_size, *tensor.shape)
    sent, received = _plain_bytes(tensor), _plain_bytes(gathered)
    route.session.run(remembered.call, lambda: remembered.backend.all_gather(sent, received, remembered.wait))
    return list(gathered.unbind())


class _TensorMetadata(NamedTuple):
    """A tensor that is sent as bytes: the name of its dtype, its shape, and the kind of tensor that it becomes."""

    dtype: str
    shape: list[int]
    kind: str

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def tensor_over(self, data: torch.Tensor, route: Route) -> TensorLike:
        """Return the tensor that has the bytes `data`."""
        # A copy: a small result must not keep all received memory alive, and a view needs an aligned beginning.
        return _as_kind(data.clone().view(getattr(torch, self.dtype)).view(tuple(self.shape)), self.kind, route)


def _metadata_json(flats: Sequence[FlatTensor[Any]]) -> bytes:
    """Return the metadata of tensors as JSON: of one, ``[["float32", [2, 3], "cpu"]]``."""
    metadata = [_TensorMetadata(str(flat.tensor.dtype)[6:], list(flat.tensor.shape), flat.kind) for flat in flats]
    return json.dumps(metadata).encode()


def _one_per_rank(
    route: Route, tensors: Sequence[TensorLike], backend: Backend | None = None
) -> tuple[list[FlatTensor[Any]], Backend]:
    """Return one flat tensor for each rank, and the backend for them: that of CPUs if they are on several devices."""
    if not isinstance(tensors, list | tuple):
        raise InvalidArgumentError(f"give a list with one tensor for each rank, not {type_text(tensors)}")
    if len(tensors) != route.world_size:
        raise InvalidArgumentError(
            "there must be one tensor for each rank", expected=route.world_size, found=len(tensors)
        )
    if backend is None:
        backends = set(map(route.backend_of, tensors))
        backend = backends.pop() if len(backends) == 1 else route.backend_for("cpu")
    return [FlatTensor(tensor, backend.device_type, written=False) for tensor in tensors], backend


def _exchanged(
    route: Route, call: Call, backend: Backend, flats: Sequence[FlatTensor[Any]], wait: Wait
) -> list[TensorLike]:
    """Send tensor i of `flats`, which may be empty, to rank i; return what the ranks send to this one. Collective."""
    messages = route.session.messages(call, _metadata_json(flats), None, wait)
    by_sender = []
    sizes = []
    for message in messages:
        # One, or none of a rank without tensors
        to_this = [_TensorMetadata(*raw) for raw in json.loads(message)[route.rank :][:1]]
        by_sender.append(to_this)
        sizes.append(sum(metadata.nbytes for metadata in to_this))
    data = torch.empty(0, dtype=torch.uint8, device=backend.device_type)
    sent = [0] * route.world_size
    if flats:
        data = torch.cat([flat.bytes for flat in flats])
        sent = [flat.bytes.numel() for flat in flats]
    received = data.new_empty(sum(sizes))
    backend.flat.all_to_all(data, sent, received, sizes, wait)
    tensors = []
    for to_this, part in zip(by_sender, torch.split(received, sizes), strict=True):
        tensors += [metadata.tensor_over(part, route) for metadata in to_this]
    return tensors


def scatter(
    route: Route, tensors: Sequence[TensorLike] | None, root: int, async_op: bool
) -> TensorLike | Work[TensorLike]:
    """See `Communicator.scatter`. Collective."""
    backend = route.backend_for("cpu")  # only root knows the device of its tensors
    flats: list[FlatTensor[Any]] = []
    with route.session.checking("scatter"):
        route.session.check_root(root)
        if route.rank == root:
            flats, _ = _one_per_rank(route, () if tensors is None else tensors, backend)
    call = Call(f"scatter from {root}")

    def body(wait: Wait) -> TensorLike:
        (received,) = _exchanged(route, call, backend, flats, wait)
        return received

    return route.collective(call, backend, body, async_op)


def all_to_all(
    route: Route, tensors: Sequence[TensorLike], async_op: bool
) -> list[TensorLike] | Work[list[TensorLike]]:
    """See `Communicator.all_to_all`. Collective."""
    with route.session.checking("all_to_all"):
        flats, backend = _one_per_rank(route, tensors)
    call = Call("all_to_all")
    return route.collective(call, backend, lambda wait: _exchanged(route, call, backend, flats, wait), async_op)


def reduce_scatter(route: Route, tensor: TensorKindT, op: object, async_op: bool) -> TensorKindT | Work[TensorKindT]:
    """See `Communicator.reduce_scatter`. Collective."""
    with route.session.checking("reduce_scatter"):
        flat, backend = _flat_for(route, tensor, written=False)
        whole = flat.tensor.shape
        if not whole or whole[0] % route.world_size:
            raise InvalidArgumentError(f"dimension 0 of {flat.text} cannot be cut into {route.world_size} parts")
        reduction = Reduction.of(op, flat.data.dtype, 1.0, backend)

    def body(wait: Wait) -> TensorKindT:
        rows, *others = flat.tensor.shape
        shape = (rows // route.world_size, *others)
        part = flat.data.new_empty(math.prod(shape))
        reduction.reduce_scatter(backend, flat.data, part, wait)
        return cast("TensorKindT", _as_kind(part.view(shape), flat.kind, route))

    return route.collective(Call(f"reduce_scatter {reduction.text} {flat.text}"), backend, body, async_op)


def empty(route: Route, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """See `Communicator.empty`. Collective."""
    with route.session.checking("empty"):
        is_shape = isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)
        if not is_shape or not isinstance(dtype, torch.dtype):
            raise InvalidArgumentError(f"expected a shape, as (2, 3), and a torch dtype, not {shape!r} and {dtype!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    backend = route.backend_for("cpu")

    def body(wait: Wait) -> torch.Tensor:
        if backend.enters_itself:
            wait.enter()
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes:  # memory of no bytes cannot be shared
            memory = backend.empty(nbytes, wait)
        return memory.view(dtype).view(tuple(shape))

    call = Call(f"empty {str(dtype)[6:]}{list(shape)}")
    return cast("torch.Tensor", route.collective(call, backend, body, async_op=False))


def transfer(route: Route, tensor: TensorT, peer: int, verb: str, async_op: bool) -> TensorT | Work[TensorT]:
    """See `Communicator.send` and `Communicator.recv`, the verbs. Not collective."""
    route.session.raise_if_dead()
    if not hasattr(peer, "__index__") or not 0 <= peer < route.world_size or peer == route.rank:
        raise InvalidArgumentError(
            f"cannot {verb}: rank {peer!r} is no other rank of {route.world_size}", rank=route.rank
        )
    refusal: Exception | None = None
    flat: FlatTensor[TensorT] | None = None
    backend = route.backend_for("cpu")  # for the notes, if this rank's tensor is refused
    try:
        flat, backend = _flat_for(route, tensor, written=verb == "recv")
        text = flat.text
    except Exception as error:  # noqa: BLE001 (whatever it is, the peer must not wait)
        refusal, text = error, f"refused: {error}"
    direction = "to" if verb == "send" else "from"
    # A refusal is a text that differs from that of any tensor: the peer reads it as a different call.
    note = f"rank {route.rank} called {verb} {text} {direction} {peer} at {call_site()}"

    mover = backend.flat

    def body(wait: Wait) -> TensorT:
        different_note = _note_if_different(mover, verb, peer, text, note, wait)
        if refusal is not None:
            raise refusal
        if different_note is not None:
            raise MismatchError(f"ranks are in different calls: {note}; {different_note}")
        assert flat is not None
        if not flat.data.numel():
            return tensor
        if verb == "send":
            mover.send(flat.bytes, peer, _DATA, wait)
            return tensor
        mover.recv(flat.bytes, peer, _DATA, wait)
        return flat.write_back()

    return route.session.deliver(backend, verb, peer, f"{verb} {text}", body, async_op)


def _note_if_different(mover: Backend, verb: str, peer: int, text: str, note: str, wait: Wait) -> str | None:
    """Exchange notes with the peer, the sender's first; return the peer's for errors, None if it expects the same.

    A note: the 8 bytes of a hash of ``float32[2]``, then ``rank 0 called send float32[2] to 1 at train.py:7``.
    """
    # Of a fixed size, since a receive must know it. The text is cut, which the hash is not.
    shown = note.encode()[: _NOTE_BYTES - 8].ljust(_NOTE_BYTES - 8, b"\0")
    own_hash = fingerprint_of(text).to_bytes(8, "little")
    sent = torch.frombuffer(bytearray(own_hash + shown), dtype=torch.uint8)
    received = torch.empty_like(sent)
    if verb == "send":
        mover.send(sent, peer, _OFFER, wait)
        mover.recv(received, peer, _ANSWER, wait)
    else:
        mover.recv(received, peer, _OFFER, wait)
        mover.send(sent, peer, _ANSWER, wait)
    answer = bytes(received.numpy().data)
    if answer[:8] == own_hash:
        return None
    # The cut may lie inside a character of several bytes.
    return answer[8:].rstrip(b"\0").decode(errors="replace")
