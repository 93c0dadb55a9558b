"""Agents: processes that run actions for the driver, one at a time. ``python -m nfs_lab.guest.agent NAME``.

The process itself imports everything once, which takes seconds, and then forks an agent for each request of the
driver. It and each agent have their own connections to the driver.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from typing import Any, TextIO

import statexchange as sx
from nfs_lab.guest import actions, version_actions

_MODULES = (actions, version_actions)


def _connect(name: str) -> TextIO:
    host, _, port = os.environ["LAB_DRIVER"].partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = connection.makefile("rw", buffering=1, encoding="utf-8")
    connection.close()  # the socket stays open until `lines` is closed
    _send(lines, [name, os.getpid()])
    return lines


def _send(lines: TextIO, value: Any) -> None:
    lines.write(json.dumps(value) + "\n")
    lines.flush()


def _answer(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        module = next(module for module in _MODULES if hasattr(module, name))
        return {"value": getattr(module, name)(**arguments)}
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the driver gets it as the answer)
        number = getattr(error, "errno", None)
        named = isinstance(error, sx.StateExchangeError)
        return {"error": type(error).__name__, "text": str(error)[:600], "errno": number, "named": named}


def _serve(name: str, uid: int | None) -> None:
    random.seed()
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    lines = _connect(name)
    for line in lines:
        action, arguments = json.loads(line)
        _send(lines, _answer(action, arguments))


def main() -> None:
    """Import what actions use, then fork agents until the connection ends."""
    actions.limit_memory()
    actions.import_all()
    version_actions.import_all()
    lines = _connect(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects agents that end
    for line in lines:
        name, uid = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            lines.close()
            _serve(name, uid)
            os._exit(0)


if __name__ == "__main__":
    main()
