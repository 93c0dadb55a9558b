"""Send and receive between two ranks, which compare what they are about to do before any data moves.

Three messages, with tags 0, 1 and 2: the sender's note goes to the receiver, the receiver's note to the sender, then
the data. A note is the hash of a dtype and shape, and a text for errors. If the hashes differ, or a rank has refused
its arguments, both ranks raise, and the data is not sent.
"""

from __future__ import annotations

import torch

from statexchange.comm.backends.backend import Backend
from statexchange.comm.calls import call_site, text_hash
from statexchange.comm.flat_tensor import FlatTensor, flat_for
from statexchange.comm.session import Route
from statexchange.comm.wait import Wait
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError, MismatchError
from statexchange.tensors import TensorT

__all__ = ["recv", "send"]

_OFFER, _ANSWER, _DATA = 0, 1, 2  # tags: of the sender's note, the receiver's note, and the data
_NOTE_BYTES = 320


def send(route: Route, tensor: TensorT, dst: int, async_op: bool) -> TensorT | Work[TensorT]:
    """See `Communicator.send`. Not collective."""
    return _transfer(route, tensor, dst, "send", async_op)


def recv(route: Route, tensor: TensorT, src: int, async_op: bool) -> TensorT | Work[TensorT]:
    """See `Communicator.recv`. Not collective."""
    return _transfer(route, tensor, src, "recv", async_op)


def _transfer(route: Route, tensor: TensorT, peer: int, verb: str, async_op: bool) -> TensorT | Work[TensorT]:
    route.session.raise_if_dead()
    if not hasattr(peer, "__index__") or not 0 <= peer < route.world_size or peer == route.rank:
        raise InvalidArgumentError(
            f"cannot {verb}: rank {peer!r} is no other rank of {route.world_size}", rank=route.rank
        )
    refusal: Exception | None = None
    flat: FlatTensor[TensorT] | None = None
    backend = route.backend_for("cpu")
    try:
        flat, backend = flat_for(route, tensor, written=verb == "recv")
        text = flat.text
    except Exception as error:  # noqa: BLE001 (whatever it is, the peer must not wait)
        refusal, text = error, f"refused: {error}"
    note = f"rank {route.rank} called {verb} {text} {'to' if verb == 'send' else 'from'} {peer} at {call_site()}"

    def body(wait: Wait) -> TensorT:
        exchange_notes = _send_note_first if verb == "send" else _receive_note_first
        different_note = exchange_notes(backend, peer, text, note, wait)
        if refusal is not None:
            raise refusal
        if different_note is not None:
            raise MismatchError(f"ranks are in different calls: {note}; {different_note}")
        assert flat is not None
        if verb == "send":
            backend.send(flat.bytes, peer, _DATA, wait)
            return tensor
        backend.recv(flat.bytes, peer, _DATA, wait)
        return flat.write_back()

    return route.session.deliver(backend, verb, peer, f"{verb} {text}", body, async_op)


def _send_note_first(backend: Backend, peer: int, text: str, note: str, wait: Wait) -> str | None:
    """Send the sender's note and receive the receiver's; return that if it differs, else None."""
    backend.send(_note(text, note), peer, _OFFER, wait)
    answer = torch.empty(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
    backend.recv(answer, peer, _ANSWER, wait)
    return _text_if_different(text, answer)


def _receive_note_first(backend: Backend, peer: int, text: str, note: str, wait: Wait) -> str | None:
    """Receive the sender's note and send the receiver's; return the sender's if it differs, else None."""
    offer = torch.empty(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
    backend.recv(offer, peer, _OFFER, wait)
    backend.send(_note(text, note), peer, _ANSWER, wait)
    return _text_if_different(text, offer)


def _note(text: str, note: str) -> torch.Tensor:
    shown = note.encode()[: _NOTE_BYTES - 8].ljust(_NOTE_BYTES - 8, b"\0")
    return torch.frombuffer(bytearray(text_hash(text) + shown), dtype=torch.uint8)


def _text_if_different(text: str, note: torch.Tensor) -> str | None:
    """Return the peer's text for errors; None if its hash is that of `text`."""
    received = bytes(note.numpy().data)
    if received[:8] == text_hash(text):
        return None
    return received[8:].rstrip(b"\0").decode(errors="replace")
