"""One JSON value per line over a TCP connection that never blocks.

Closing needs care: a socket that is closed while received bytes lie unread makes the kernel send RST instead of FIN,
and RST discards what the other end has received from us but not read yet. So a goodbye could get lost. `finish` sends
what is left, shuts down the sending side, and reads until the other end has closed, too. Only then call `close`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

_LONGEST_LINE_BYTES = 1 << 20  # more without a newline is no message of a rank: any program may connect


class ConnectionEndedError(Exception):
    """The other end has closed the connection, or has sent something that is not JSON."""


class JsonConnection:
    """A connection that carries one JSON value per line. Only `finish` blocks. `rank` is the peer's, -1 if unknown."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # Else the kernel would hold back a failure until the message before it is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.rank = -1
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether a part of an earlier message has not been sent yet."""
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Send `message`, now or by later calls of `flush`."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now. A lost connection is not reported here, but by `receive`."""
        # A full buffer raises BlockingIOError, which is an OSError: what is left goes with a later call.
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived; raise ConnectionEndedError after the last if the connection ended."""
        # An end is raised after the messages that came before it: a goodbye may be among them.
        ended = False
        try:
            while data := self.connection.recv(1 << 16):
                self._received += data
            ended = True
        except BlockingIOError:  # all that has arrived is read
            pass
        except OSError:
            ended = True
        *lines, self._received = self._received.split(b"\n")
        try:
            for line in lines:
                yield json.loads(line)
        except ValueError:
            ended = True
        if ended or len(self._received) > _LONGEST_LINE_BYTES:
            raise ConnectionEndedError

    def finish(self, deadline: float) -> None:
        """Send what is left and wait until the other end has closed. Drain first: unread input makes close() send RST.

        Blocks until `deadline`, a time of the monotonic clock, at most.
        """
        with contextlib.suppress(OSError):
            self._set_timeout(deadline)
            self.connection.sendall(self._unsent)
            # The other end reads this as the end of the connection, and closes it.
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(1 << 16):
                self._set_timeout(deadline)

    def _set_timeout(self, deadline: float) -> None:
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
