"""The collectives on tensors: what callers give is checked and laid flat, and results go back to where they belong.

Whatever is wrong with a rank's arguments is raised on all ranks, since others may have called in earnest.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from statexchange.comm.backend import Backend, Between, Wait
from statexchange.comm.reduction import Reduction
from statexchange.comm.session import Call, Session, call_site, mark_of
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError
from statexchange.tensors import as_numpy, as_torch, check_dense, check_writable, is_dtensor

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_multiple",
    "all_to_all",
    "broadcast",
    "empty",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "through_leaders",
]

T = TypeVar("T")
_HEADER, _ANSWER, _DATA = 0, 1, 2  # tags of what goes from rank to rank
_NOTE_BYTES = 320
_SHOWN = 300  # characters of a list of tensors in a message


class Flat:
    """A caller's tensor or array, and `data`: its elements as one contiguous dimension on the backend's device.

    `data` is the caller's own memory where that is possible; `write_back` is for where it is not.
    """

    def __init__(self, given: Any, device: str, *, written: bool) -> None:
        self.given = given
        self.tensor = tensor = _tensor_of(given, written=written)
        at_home = tensor.is_cpu if device == "cpu" else tensor.device.type == device
        self._lent = at_home and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        if self._lent:
            # torch calls no or one element contiguous whatever its stride is, but then refuses to see it as bytes
            plain = tensor.dim() == 1 and tensor.stride(0) == 1
            self.data = tensor if plain else tensor.as_strided((tensor.numel(),), (1,))
            return
        there = (tensor if at_home else tensor.to(device)).resolve_conj().resolve_neg()
        self.data = there.contiguous().view(-1)

    @property
    def text(self) -> str:
        """Dtype and shape in words."""
        return _text_of(self.tensor.dtype, self.tensor.shape)

    @property
    def bytes(self) -> torch.Tensor:
        """`data` as uint8."""
        return self.data.view(torch.uint8)

    def write_back(self) -> Any:
        """What the caller gave, which now holds `data`."""
        if not self._lent:
            self.tensor.copy_(self.data.view(self.tensor.shape))
        if isinstance(self.given, np.ndarray):
            array = as_numpy(self.tensor)
            if not np.may_share_memory(self.given, array):
                self.given[...] = array
        return self.given

    def start_from(self, given: Flat) -> torch.Tensor:
        """What to reduce so that the result can go here: a failure must find a caller's `out` as it was."""
        return self.data if given is self else given.data.clone()

    def finish_with(self, result: torch.Tensor) -> Any:
        """What the caller gave, which now holds `result`."""
        if result is not self.data:
            self.data.copy_(result)
        return self.write_back()

    @property
    def kind(self) -> str:
        """What results for this caller should be: "array", or tensors of "cpu" or "cuda"."""
        return "array" if isinstance(self.given, np.ndarray) else self.tensor.device.type


@functools.lru_cache(maxsize=4096)
def _text_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


def _tensor_of(given: Any, *, written: bool) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        if isinstance(given, np.ndarray):
            return _tensor_of_array(given, written=written)
        raise UnsupportedError(f"a torch tensor or numpy array is wanted, not {type(given).__name__}")
    if type(given) is not torch.Tensor and is_dtensor(given):
        raise UnsupportedError("a DTensor has parts on other ranks: give its to_local()")
    check_dense(given)
    if written:
        check_writable(given)
    return given.detach() if given.requires_grad else given


def _tensor_of_array(array: np.ndarray[Any, Any], *, written: bool) -> torch.Tensor:
    if written:
        check_writable(array)
    plain = np.ascontiguousarray(array).reshape(array.shape)
    tensor: torch.Tensor = as_torch(plain if plain.flags.writeable else plain.copy())
    return tensor


def _refusing(session: Session, verb: str, prepare: Callable[[], T]) -> T:
    """What `prepare` makes of the arguments; where it refuses them, all ranks raise."""
    session.raise_if_dead()
    try:
        return prepare()
    except Exception as refusal:  # noqa: BLE001 (whatever it is, it must reach the others)
        session.refuse(verb, refusal)


def _flat(session: Session, given: Any, *, written: bool) -> tuple[Flat, Backend]:
    """What a caller gave, on the device of the backend that will move it."""
    backend = session.backend_of(given)
    return Flat(given, backend.device_type, written=written), backend


def _target(given: Flat, out: Any) -> Flat:
    """Where the result goes."""
    if out is None:
        return given
    target = Flat(out, given.data.device.type, written=True)
    if target.text != given.text:
        raise InvalidArgumentError("out is not like the tensor", expected=given.text, found=target.text)
    return target


def _new(tensor: torch.Tensor, kind: str, session: Session) -> Any:
    """A result of its own, where the caller's tensors lie, or as an array."""
    return as_numpy(tensor) if kind == "array" else tensor if kind == tensor.device.type else tensor.to(session.device)


def all_reduce(session: Session, tensor: Any, op: str, out: Any, scale: float, async_op: bool) -> Any:
    """See `Communicator.all_reduce`. Collective."""

    session.raise_if_dead()
    try:
        given, backend = _flat(session, tensor, written=out is None)
        target = _target(given, out)
        reduction = Reduction.of(op, given.data.dtype, scale, backend)
    except Exception as refusal:  # noqa: BLE001 (see _refusing, which costs a small tensor too much)
        session.refuse("all_reduce", refusal)

    def body(wait: Wait) -> Any:
        result = target.start_from(given)
        reduction.all_reduce(backend, result, wait)
        return target.finish_with(result)

    return session.collective(Call(f"all_reduce {reduction.text} {given.text}"), backend, body, async_op)


def all_reduce_multiple(
    session: Session, tensors: Sequence[Any], op: str, scale: float, contiguous: bool, async_op: bool
) -> Any:
    """See `Communicator.all_reduce_multiple`. Collective."""

    def prepare() -> tuple[list[Any], list[tuple[Reduction, Backend, list[Flat]]]]:
        given = list(tensors)
        groups: dict[Any, tuple[Reduction, Backend, list[Flat]]] = {}
        for i, tensor in enumerate(given):
            flat, backend = _flat(session, tensor, written=True)
            key = (flat.data.dtype, flat.data.device) if contiguous else i
            reduction = Reduction.of(op, flat.data.dtype, scale, backend)
            groups.setdefault(key, (reduction, backend, []))[2].append(flat)
        return given, list(groups.values())

    given, groups = _refusing(session, "all_reduce_multiple", prepare)
    first = groups[0][1] if groups else session.backend_for("cpu")

    def body(wait: Wait) -> Any:
        if not groups and first.meets:
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
    return session.collective(call, first, body, async_op)


def _short(text: str) -> str:
    """A text that may be long, so that two of them still differ."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {mark_of(text).hex()}"


def reduce(session: Session, tensor: Any, op: str, root: int, out: Any, async_op: bool) -> Any:
    """See `Communicator.reduce`. Collective."""
    ours = session.rank == root

    def prepare() -> tuple[Flat, Flat, Reduction, Backend]:
        session.check_root(root)
        given, backend = _flat(session, tensor, written=ours and out is None)
        target = _target(given, out) if ours else given
        return given, target, Reduction.of(op, given.data.dtype, 1.0, backend), backend

    given, target, reduction, backend = _refusing(session, "reduce", prepare)

    def body(wait: Wait) -> Any:
        result = target.start_from(given)
        reduction.reduce(backend, result, root, wait)
        return target.finish_with(result) if ours else tensor

    return session.collective(Call(f"reduce {reduction.text} {given.text} to {root}"), backend, body, async_op)


def through_leaders(session: Session, tensor: Any, between: Between, doing: str) -> None:
    """See `Communicator.through_leaders`. Collective."""

    def prepare() -> tuple[Flat, Backend]:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise InvalidArgumentError(f"a tensor of a floating dtype is wanted, not {type(tensor).__name__}")
        backend = session.hierarchy or session.backend_for(tensor.device.type)
        return Flat(tensor, backend.device_type, written=True), backend

    given, backend = _refusing(session, doing, prepare)

    def body(wait: Wait) -> None:
        if given.data.numel():
            backend.through_leaders(given.data, between, wait)
        elif backend.meets:
            wait.enter()
        given.write_back()

    session.collective(Call(f"{doing} of {given.text}"), backend, body, async_op=False)


def broadcast(session: Session, tensor: Any, root: int, out: Any, async_op: bool) -> Any:
    """See `Communicator.broadcast`. Collective."""
    ours = session.rank == root

    def prepare() -> tuple[Flat, Flat, Backend]:
        session.check_root(root)
        given, backend = _flat(session, tensor, written=out is None and not ours)
        return given, _target(given, out), backend

    given, target, backend = _refusing(session, "broadcast", prepare)

    def body(wait: Wait) -> Any:
        backend.broadcast((given if ours else target).bytes, root, wait)
        return tensor if ours and target is given else target.finish_with(given.data if ours else target.data)

    return session.collective(Call(f"broadcast {given.text} from {root}"), backend, body, async_op)


def all_gather(session: Session, tensor: Any, async_op: bool) -> Any:
    """See `Communicator.all_gather`. Collective."""
    given, backend = _refusing(session, "all_gather", lambda: _flat(session, tensor, written=False))

    def body(wait: Wait) -> list[Any]:
        into = given.data.new_empty(session.world_size * given.data.numel())
        backend.all_gather(given.bytes, into.view(torch.uint8), wait)
        return _parts(session, given, into)

    return session.collective(Call(f"all_gather {given.text}"), backend, body, async_op)


def _parts(session: Session, given: Flat, into: torch.Tensor) -> list[Any]:
    """One result like `given` for each rank."""
    return [_new(part, given.kind, session) for part in into.view(session.world_size, *given.tensor.shape)]


def gather(session: Session, tensor: Any, root: int, async_op: bool) -> Any:
    """See `Communicator.gather`. Collective."""

    def prepare() -> tuple[Flat, Backend]:
        session.check_root(root)
        return _flat(session, tensor, written=False)

    given, backend = _refusing(session, "gather", prepare)

    def body(wait: Wait) -> list[Any]:
        into = given.data.new_empty(session.world_size * given.data.numel()) if session.rank == root else None
        backend.gather(given.bytes, None if into is None else into.view(torch.uint8), root, wait)
        return [] if into is None else _parts(session, given, into)

    return session.collective(Call(f"gather {given.text} to {root}"), backend, body, async_op)


def _facts(flats: Sequence[Flat]) -> list[Any]:
    return [[str(flat.tensor.dtype)[6:], list(flat.tensor.shape), flat.kind] for flat in flats]


def _nbytes(fact: Sequence[Any]) -> int:
    return int(math.prod(fact[1]) * getattr(torch, fact[0]).itemsize)


def _made(data: torch.Tensor, fact: Sequence[Any], session: Session) -> Any:
    # A copy, so that a small result does not keep the memory of all; it also begins where its dtype may begin.
    return _new(data.clone().view(getattr(torch, fact[0])).view(tuple(fact[1])), fact[2], session)


def _one_of_each(session: Session, tensors: Sequence[Any]) -> tuple[list[Flat], Backend]:
    if len(tensors) != session.world_size:
        raise InvalidArgumentError(
            "one tensor for each rank is wanted", expected=session.world_size, found=len(tensors)
        )
    kinds = {tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu" for tensor in tensors}
    backend = session.backend_for(kinds.pop() if len(kinds) == 1 else "cpu")
    return [Flat(tensor, backend.device_type, written=False) for tensor in tensors], backend


def scatter(session: Session, tensors: Sequence[Any] | None, root: int, async_op: bool) -> Any:
    """See `Communicator.scatter`. Collective."""
    ours = session.rank == root

    def prepare() -> list[Flat]:
        session.check_root(root)
        return _one_of_each(session, () if tensors is None else tensors)[0] if ours else []

    flats = _refusing(session, "scatter", prepare)
    call = Call(f"scatter from {root}")
    backend = session.backend_for("cpu")

    def body(wait: Wait) -> Any:
        facts = json.loads(session.messages(call, json.dumps(_facts(flats)).encode(), None, wait)[root])
        sizes = [_nbytes(fact) for fact in facts]
        data = torch.cat([flat.bytes.cpu() for flat in flats]) if ours else None
        into = torch.empty(sizes[session.rank], dtype=torch.uint8, device="cpu")
        backend.scatter(data, sizes, into, root, wait)
        return _made(into, facts[session.rank], session)

    return session.collective(call, backend, body, async_op)


def all_to_all(session: Session, tensors: Sequence[Any], async_op: bool) -> Any:
    """See `Communicator.all_to_all`. Collective."""
    flats, backend = _refusing(session, "all_to_all", lambda: _one_of_each(session, tensors))
    call = Call("all_to_all")

    def body(wait: Wait) -> list[Any]:
        answers = session.messages(call, json.dumps(_facts(flats)).encode(), None, wait)
        facts = [json.loads(answer)[session.rank] for answer in answers]
        sizes = [_nbytes(fact) for fact in facts]
        data = torch.cat([flat.bytes for flat in flats])
        into = data.new_empty(sum(sizes))
        backend.all_to_all(data, [flat.bytes.numel() for flat in flats], into, sizes, wait)
        return [_made(part, fact, session) for part, fact in zip(torch.split(into, sizes), facts, strict=True)]

    return session.collective(call, backend, body, async_op)


def reduce_scatter(session: Session, tensor: Any, op: str, async_op: bool) -> Any:
    """See `Communicator.reduce_scatter`. Collective."""

    def prepare() -> tuple[Flat, Reduction, Backend]:
        given, backend = _flat(session, tensor, written=False)
        shape = given.tensor.shape
        if not shape or shape[0] % session.world_size:
            raise InvalidArgumentError(f"dimension 0 of {given.text} cannot be cut into {session.world_size} parts")
        return given, Reduction.of(op, given.data.dtype, 1.0, backend), backend

    given, reduction, backend = _refusing(session, "reduce_scatter", prepare)
    shape = [given.tensor.shape[0] // session.world_size, *given.tensor.shape[1:]] if given.tensor.shape else []

    def body(wait: Wait) -> Any:
        into = given.data.new_empty(math.prod(shape))
        reduction.reduce_scatter(backend, given.data, into, wait)
        return _new(into.view(tuple(shape)), given.kind, session)

    return session.collective(Call(f"reduce_scatter {reduction.text} {given.text}"), backend, body, async_op)


def _size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    sizes = isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"a shape, as (2, 3), and a torch dtype are wanted, not {shape!r} and {dtype!r}")
    return math.prod(shape) * dtype.itemsize


def empty(session: Session, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """See `Communicator.empty`. Collective."""
    nbytes = _refusing(session, "empty", lambda: _size_of(shape, dtype))
    backend = session.backend_for("cpu")

    def body(wait: Wait) -> torch.Tensor:
        if backend.meets:
            wait.enter()
        memory = backend.empty(nbytes, wait) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
        return memory[:nbytes].view(dtype).view(tuple(shape))

    call = Call(f"empty {str(dtype)[6:]}{list(shape)}")
    tensor: Any = session.collective(call, backend, body, async_op=False)
    return tensor  # type: ignore[no-any-return]


# From rank to rank: a note that says what comes, the receiver's answer, and the data if both want the same


def send(session: Session, tensor: Any, dst: int, async_op: bool) -> Any:
    """See `Communicator.send`. Not collective."""
    return _pass(session, tensor, dst, "send", async_op)


def recv(session: Session, tensor: Any, src: int, async_op: bool) -> Any:
    """See `Communicator.recv`. Not collective."""
    return _pass(session, tensor, src, "recv", async_op)


def _pass(session: Session, tensor: Any, peer: int, verb: str, async_op: bool) -> Any:
    session.raise_if_dead()
    if not hasattr(peer, "__index__") or not 0 <= peer < session.world_size or peer == session.rank:
        raise InvalidArgumentError(
            f"cannot {verb}: rank {peer!r} is no other rank of {session.world_size}", rank=session.rank
        )
    refusal: Exception | None = None
    flat: Flat | None = None
    backend = session.backend_for("cpu")
    try:
        flat, backend = _flat(session, tensor, written=verb == "recv")
        text = flat.text
    except Exception as error:  # noqa: BLE001 (whatever it is, the other must not wait)
        refusal, text = error, f"refused: {error}"
    note = f"rank {session.rank} called {verb} {text} {'to' if verb == 'send' else 'from'} {peer} at {call_site()}"

    def body(wait: Wait) -> Any:
        theirs = (_offer if verb == "send" else _await_offer)(backend, peer, text, note, wait)
        if refusal is not None:
            raise refusal
        if theirs is not None:
            raise MismatchError(f"ranks met in different calls: {note}; {theirs}")
        assert flat is not None
        if verb == "send":
            backend.send(flat.bytes, peer, _DATA, wait)
            return tensor
        backend.recv(flat.bytes, peer, _DATA, wait)
        return flat.write_back()

    return session.deliver(backend, verb, peer, f"{verb} {text}", body, async_op)


def _offer(backend: Backend, peer: int, text: str, note: str, wait: Wait) -> str | None:
    """Say what comes; the other's note if it wants something else."""
    backend.send(_note(text, note), peer, _HEADER, wait)
    answer = torch.empty(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
    backend.recv(answer, peer, _ANSWER, wait)
    return _differs(text, answer)


def _await_offer(backend: Backend, peer: int, text: str, note: str, wait: Wait) -> str | None:
    """Hear what comes, and say what is wanted; the other's note if that is something else."""
    offer = torch.empty(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
    backend.recv(offer, peer, _HEADER, wait)
    backend.send(_note(text, note), peer, _ANSWER, wait)
    return _differs(text, offer)


def _note(text: str, note: str) -> torch.Tensor:
    said = note.encode()[: _NOTE_BYTES - 8].ljust(_NOTE_BYTES - 8, b"\0")
    return torch.frombuffer(bytearray(mark_of(text) + said), dtype=torch.uint8)


def _differs(text: str, note: torch.Tensor) -> str | None:
    theirs = bytes(note.numpy().data)
    same = theirs[:8] == mark_of(text)
    return None if same else theirs[8:].rstrip(b"\0").decode(errors="replace")
