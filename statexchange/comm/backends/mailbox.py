"""The mailbox from one rank to another on the same host: messages in order, through shared memory.

Two tags carry short notes, one at a time, which lie in the mailbox itself. The third carries data through a ring of two
chunks, an arena that the sender makes for its first data and whose address it writes into the mailbox. Each tag has two
counts: chunks posted, which only the sender writes, and chunks received, which only the receiver writes. The sender
waits while all places are full, the receiver while none is. A send ends when all of it has been received, as the ring
of a sender that ends is gone.

The memory: at byte 0 the counts of the tags 0, 1 and 2, posted before received, each in 8 bytes; at 64 and 384 the
notes of the tags 0 and 1; at 704 the address of the ring, as JSON.

Failure. If the peer leaves or dies while this rank waits, the wait raises (control_page.py); but what the peer posted
before it left is still taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from statexchange.comm.failure.control_page import ControlPage
from statexchange.comm.wait import Wait
from statexchange.shared_memory import Arena

# The size of the notes that ranks compare before data moves (collectives.py): nothing else uses the tags 0 and 1.
_NOTE_BYTES = 320
_CHUNK_BYTES = 1 << 18
_NOTES_BEGIN = 64  # after the counts
_ADDRESS_BEGIN = _NOTES_BEGIN + 2 * _NOTE_BYTES
_DATA_TAG = 2


class Mailbox:
    """One end of the mailbox from `src` to `dst`."""

    def __init__(self, page: ControlPage, src: int, dst: int) -> None:
        self._page = page
        self._is_sender = page.rank == src
        self._peer = dst if self._is_sender else src
        self._memory = page.mailbox_memory(src, dst)
        self._counts = self._memory[:_NOTES_BEGIN].cast("Q")
        self._ring: memoryview | None = None
        self._arena: Arena | None = None

    def put(self, data: memoryview, tag: int, wait: Wait) -> None:
        """Send the bytes `data`; return when the receiver has taken all of it."""
        posted, received = 2 * tag, 2 * tag + 1
        # The ring has two chunks: the sender fills one while the receiver empties the other.
        num_places = 2 if tag == _DATA_TAG else 1
        for piece in self._pieces(data, tag):
            self._until(lambda: self._counts[posted] - self._counts[received] < num_places, wait)
            self._place(tag, self._counts[posted], wait)[: len(piece)] = piece
            # After the piece: the receiver that reads the count reads the piece, too, as stores keep their order.
            self._counts[posted] += 1
        self._until(lambda: self._counts[posted] == self._counts[received], wait)

    def take(self, data: memoryview, tag: int, wait: Wait) -> None:
        """Receive into `data`."""
        posted, received = 2 * tag, 2 * tag + 1
        for piece in self._pieces(data, tag):
            self._until(lambda: self._counts[posted] > self._counts[received], wait)
            piece[:] = self._place(tag, self._counts[received], wait)[: len(piece)]
            self._counts[received] += 1  # after the copy: the sender may now write there again

    def _pieces(self, data: memoryview, tag: int) -> list[memoryview]:
        if tag != _DATA_TAG:
            assert len(data) <= _NOTE_BYTES
            return [data]
        return [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]

    def _place(self, tag: int, number: int, wait: Wait) -> memoryview:
        if tag != _DATA_TAG:
            return self._memory[_NOTES_BEGIN + tag * _NOTE_BYTES :][:_NOTE_BYTES]
        if self._ring is None:
            self._ring = self._open_ring(wait)
        return self._ring[(number & 1) * _CHUNK_BYTES :][:_CHUNK_BYTES]

    def _open_ring(self, wait: Wait) -> memoryview:
        """Make the ring, as the sender; open it, as the receiver of data that has come.

        The receiver finds the address: the sender has written it before it posted its first data.
        """
        slot = self._memory[_ADDRESS_BEGIN:]
        if not self._is_sender:
            return self._page.attach(json.loads(bytes(slot)), self._peer, wait).view
        # Not with the mailbox: most pairs of ranks send each other nothing.
        self._arena = Arena.create(2 * _CHUNK_BYTES)
        # Filled up with spaces, which JSON ignores: its length need not be written.
        slot[:] = json.dumps(self._arena.address).encode().ljust(len(slot))
        return self._arena.view

    def _until(self, done: Callable[[], bool], wait: Wait) -> None:
        """Return when `done()` is true; raise if the peer has left before."""

        def is_done() -> bool:
            reason = None
            # Only whether it has left is read at each test, as that is a word of the page. Whether its process runs
            # takes a look into /proc, which the wait's monitor does less often.
            if self._page.has_left(self._peer):
                reason = self._page.departure_of(self._peer, wait.operation)
            if done():  # read last: a peer may post and leave between two readings
                return True
            if reason is not None:
                raise reason
            return False

        wait.until(is_done)

    def close(self) -> None:
        """Release the ring."""
        self._ring = None
        if self._arena is not None:
            self._arena.close()
