"""The driver's side of agents.

An agent is a Python process in a host that runs functions of `guest.actions`, one at a time. It connects to the driver
over the lab's own network, and commands and answers are lines of JSON. The answer to a call orders events between hosts
without the file system: a reader that is called after a writer's answer must see what the writer wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
from dataclasses import dataclass
from typing import Any

from nfs_lab.lab import DRIVER_ADDRESS, Lab, LabError

__all__ = ["Agent", "Agents", "Call", "Reply", "together"]

TOOLS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Reply:
    """The answer to a call: `value`, or an error's type name, text and errno.

    `error` is "NoAnswer" where the agent died or exceeded the time limit. `named` says whether the error is one of
    statexchange's own.
    """

    value: Any = None
    error: str | None = None
    text: str = ""
    errno: int | None = None
    named: bool = False

    @property
    def ok(self) -> bool:
        """Whether the call returned."""
        return self.error is None

    def __str__(self) -> str:
        if self.ok:
            return json.dumps(self.value)
        return f"{self.error}{'' if self.errno is None else f' (errno {self.errno})'}: {self.text}"


class Agent:
    """One process in a host. With `uid` it changes from root to this user after its imports."""

    def __init__(self, host: str, name: str, uid: int | None = None) -> None:
        self.host = host
        self.name = name
        self.uid = uid
        self.pid = 0
        self._socket: socket.socket | None = None
        self._is_busy = False

    @property
    def is_alive(self) -> bool:
        """Whether it is connected, and no call is under way. One that did not answer in time is disconnected."""
        return self._socket is not None and not self._is_busy

    def attach(self, connection: socket.socket, pid: int) -> None:
        """Set the connection that this agent has opened, and its pid."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self.pid, self._is_busy = connection, pid, False

    def start(self, action: str, /, **arguments: Any) -> None:
        """Begin a call; `result` ends it."""
        if self._socket is None or self._is_busy:
            raise LabError(f"agent {self.name} is gone or busy")
        self._is_busy = True
        with contextlib.suppress(OSError):  # `result` reports the lost connection
            self._socket.sendall(json.dumps([action, arguments]).encode() + b"\n")

    def result(self, timeout_s: float = 60.0) -> Reply:
        """Return the answer to the call that `start` began."""
        if self._socket is None:
            raise LabError(f"agent {self.name} is gone")
        self._socket.settimeout(timeout_s)
        try:
            line = _read_line(self._socket)
        except TimeoutError:
            self.close()
            return Reply(error="NoAnswer", text=f"agent {self.name} did not answer within {timeout_s:.0f} s")
        except OSError as error:
            self.close()
            return Reply(error="NoAnswer", text=f"agent {self.name} ended: {error}")
        self._is_busy = False
        return Reply(**json.loads(line))

    def call(self, action: str, /, *, timeout_s: float = 60.0, **arguments: Any) -> Reply:
        """Run an action of the agent and return its answer."""
        self.start(action, **arguments)
        return self.result(timeout_s)

    def close(self) -> None:
        """Drop the connection; the agent ends."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._is_busy = False


Call = tuple[Agent, str, dict[str, Any]]


def together(*calls: Call, timeout_s: float = 60.0) -> list[Reply]:
    """Begin all calls, wait for all, and return their answers."""
    for agent, action, arguments in calls:
        agent.start(action, **arguments)
    return [agent.result(timeout_s) for agent, _, _ in calls]


def _read_line(connection: socket.socket) -> bytes:
    """Receive one line. An agent sends nothing before the next call, so nothing can follow the line."""
    parts = []
    while True:
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)


class Agents:
    """Starts agents in hosts and replaces those that have ended.

    One process per host has imported everything, and forks the agents.
    """

    def __init__(self, lab: Lab, python: str, source: str) -> None:
        self._lab = lab
        self._python = python
        self._source = source
        self._listener = lab.listen()
        self._parents: dict[str, socket.socket] = {}

    def start_parents(self, *hosts: str, timeout_s: float = 120.0) -> None:
        """Start on each host the process that forks agents, and wait until all have done their imports."""
        environment = {
            "PYTHONPATH": f"{self._source}:{TOOLS}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "LAB_DRIVER": f"{DRIVER_ADDRESS[0]}:{DRIVER_ADDRESS[1]}",
        }
        words = ["exec", "env", *(f"{key}={value}" for key, value in environment.items())]
        words += [self._python, "-m", "nfs_lab.guest.agent"]
        numbers = {host: self._lab.start(host, shlex.join([*words, host])) for host in hosts}
        while not self._parents.keys() >= set(hosts):
            try:
                name, _, connection = self._accept(timeout_s)
            except TimeoutError:
                outputs = [f"{host}: {self._lab.output(host, number)[-600:]}" for host, number in numbers.items()]
                raise LabError(f"agents did not start within {timeout_s:.0f} s: {'; '.join(outputs)}") from None
            self._parents[name] = connection

    def start(self, *agents: Agent, timeout_s: float = 30.0) -> None:
        """Fork agents and wait until they are connected."""
        waiting = {agent.name: agent for agent in agents}
        for agent in agents:
            self._parents[agent.host].sendall(json.dumps([agent.name, agent.uid]).encode() + b"\n")
        while waiting:
            try:
                name, pid, connection = self._accept(timeout_s)
            except TimeoutError:
                raise LabError(f"agents {sorted(waiting)} did not start within {timeout_s:.0f} s") from None
            waiting.pop(name).attach(connection, pid)

    def _accept(self, timeout_s: float) -> tuple[str, int, socket.socket]:
        self._listener.settimeout(timeout_s)
        connection, _ = self._listener.accept()
        connection.settimeout(timeout_s)
        name, pid = json.loads(_read_line(connection))
        return name, pid, connection

    def replace_dead(self, *agents: Agent) -> None:
        """Kill agents that did not answer, and start them again."""
        dead = [agent for agent in agents if not agent.is_alive]
        for agent in dead:
            agent.close()
            self._lab.on(agent.host, f"kill -9 {agent.pid} 2>/dev/null; true")
        if dead:
            self.start(*dead)

    def close(self) -> None:
        """Stop listening, and end the processes that fork agents."""
        self._listener.close()
        for connection in self._parents.values():
            connection.close()
