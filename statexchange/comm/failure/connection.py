"""One JSON value per line over a TCP connection that never blocks."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["EndedError", "JsonConnection"]

_LINE_BYTES = 1 << 20


class EndedError(Exception):
    """The other end of a line is gone, or talks nonsense."""


class JsonConnection:
    """A connection that carries one JSON value per line, and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.rank = -1  # until it has said who it is
        self._in = bytearray()
        self._out = bytearray()

    @property
    def busy(self) -> bool:
        """Whether something said before has not left yet."""
        return bool(self._out)

    def say(self, message: Any) -> None:
        """Send `message`, now or by later calls of `flush`."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what can be sent; a lost connection shows when it is read."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.connection.send(self._out)]

    def hear(self) -> Iterator[Any]:
        """The messages that have come; EndedError when no more will."""
        ended = False
        try:
            while data := self.connection.recv(1 << 16):
                self._in += data
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, self._in = self._in.split(b"\n")
        try:
            yield from [json.loads(line) for line in lines]
        except ValueError:
            ended = True
        if ended or len(self._in) > _LINE_BYTES:
            raise EndedError

    def hang_up(self, deadline: float) -> None:
        """Wait until what was said has arrived: closing with words unread would take our last ones back."""
        with contextlib.suppress(OSError):
            self._within(deadline)
            self.connection.sendall(self._out)
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(1 << 16):
                self._within(deadline)

    def _within(self, deadline: float) -> None:
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))

    def close(self) -> None:
        """End the connection."""
        self.connection.close()
