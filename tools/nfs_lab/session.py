"""The objects that a check uses: agents on both client hosts, unused names, and results that several checks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from nfs_lab.agents import Agent, Agents, Reply
from nfs_lab.lab import CLIENTS, THIRD_CLIENT, Lab, LabError

__all__ = ["CheckFailedError", "Session"]

SKEW_S = 3600


class CheckFailedError(Exception):
    """A check found something; the message says what."""


class Session:
    """A lab that is up, with two agents on each client host.

    `a`, `a2` run on the first host, `b`, `b2` on the second; `third` boots one more. With `long` races are repeated
    100 times.
    """

    def __init__(self, lab: Lab, python: str, source: str, *, long: bool) -> None:
        self.lab = lab
        self.long = long
        self.a, self.a2 = (Agent(CLIENTS[0], name) for name in ("a", "a2"))
        self.b, self.b2 = (Agent(CLIENTS[1], name) for name in ("b", "b2"))
        self.ranks = (self.a, self.a2, self.b, self.b2)
        self._agents = Agents(lab, python, source)
        self._third: Agent | None = None
        self._others: list[Agent] = []
        self._number = 0
        self._token = f"{int(time.time()):x}"
        self._measured: dict[tuple[str, str], Any] = {}

    def start(self) -> None:
        """Start the agents."""
        self._agents.start_parents(*CLIENTS)
        self._agents.start(*self.ranks)

    def restore(self) -> None:
        """Replace agents that died or hang, so that the failure of one check does not make the next one fail."""
        self._agents.replace_dead(*self.ranks, *([] if self._third is None else [self._third]))
        while self._others:
            self._others.pop().close()

    def close(self) -> None:
        """End the agents."""
        for agent in (*self.ranks, *self._others, *([] if self._third is None else [self._third])):
            agent.close()
        self._agents.close()

    def new_agent(self, host: str, uid: int | None = None) -> Agent:
        """Start one more agent, which has used no mount yet; `uid` makes it another user. It ends with the check."""
        agent = Agent(host, f"uid{uid}-{self.unique()}", uid)
        self._agents.start(agent)
        self._others.append(agent)
        return agent

    def third(self) -> Agent:
        """Return an agent on a third host, whose clock is an hour ahead. The host boots at the first call."""
        if self._third is None:
            self.lab.boot_third_client(SKEW_S)
            self._agents.start_parents(THIRD_CLIENT)
            agent = Agent(THIRD_CLIENT, "c")
            self._agents.start(agent)
            self._third = agent
        return self._third

    def unique(self) -> str:
        """Return a text that was not used before, which makes a name with it an unused one."""
        self._number += 1
        return f"{self._token}-{self._number}"

    def path(self, mount: str, name: str) -> str:
        """Return an unused path below a mount. All mounts show one directory, so the mount is part of the name."""
        below = "" if mount.startswith("small") or mount.endswith("squash") else "ws/"
        return f"/run/m/{mount}/{below}{name}-{mount}-{self.unique()}"

    def stop_file(self) -> str:
        """Return an unused path in a directory that each host has for itself."""
        return f"/run/tmp/stop-{self.unique()}"

    def times(self, short: int) -> int:
        """Return how often to run a race: `short` times, or 100 times with `long`."""
        return 100 if self.long else short

    def measured(self, name: str, mount: str, measure: Callable[[], Any]) -> Any:
        """Return the result of a measurement that several checks use; it is made once."""
        if (name, mount) not in self._measured:
            try:
                self._measured[name, mount] = measure()
            except (CheckFailedError, LabError) as error:
                self._measured[name, mount] = error
        result = self._measured[name, mount]
        if isinstance(result, Exception):
            raise CheckFailedError(f"the measurement failed: {result}")
        return result

    def value(self, reply: Reply) -> Any:
        """Return the value of an answer; fail the check if the call raised an error."""
        if not reply.ok:
            raise CheckFailedError(str(reply))
        return reply.value

    def expect(self, good: bool, *details: object) -> None:
        """Fail the check unless `good`."""
        if not good:
            raise CheckFailedError("; ".join(str(detail) for detail in details))

    def expect_none(self, problems: Iterable[object], of: int | str = "") -> None:
        """Fail the check if there are problems, showing how many and the first."""
        found = list(problems)
        if found:
            count = f"{len(found)} of {of}" if of else str(len(found))
            raise CheckFailedError(f"{count}: {found[0]}")
