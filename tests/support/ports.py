"""A port for the ranks of a test, which all of them must know before the first listens."""

from __future__ import annotations

import secrets
import socket

_PORTS = range(10_000, 32_768)


def free_port() -> int:
    """Return a port at which nothing listens, none of those that the system gives to connections.

    Such a one is soon another process's. It may even become that of a rank's own connection: while nothing listens at a
    port, a connection to it that gets the same port as its own connects to itself.
    """
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
