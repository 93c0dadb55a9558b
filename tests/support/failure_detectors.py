"""Failure detectors of ranks that are threads of one process, and how tests wait for what they find.

Processes that a test starts import this module, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from statexchange.comm.backends.backend import Backend
from statexchange.comm.failure.detector import FailureDetector
from statexchange.comm.failure.start import start_failure_detector
from statexchange.comm.topology import Topology
from statexchange.comm.wait import Wait

RANKS = 4
NODES = (0, 0, 1, 1)
HOSTS = ("anna", "anna", "bert", "bert")


class ByteExchange:
    """Threads that exchange bytes."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.payloads: list[bytes] = [b""] * world_size


class Bootstrap(Backend):
    """The bootstrap backend of a rank that is a thread."""

    name = "threads of a test"

    def __init__(self, exchange: ByteExchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank
        self.world_size = len(exchange.payloads)

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        self.exchange.payloads[self.rank] = payload
        self.exchange.barrier.wait(wait.timeout_s)
        answers = list(self.exchange.payloads)
        self.exchange.barrier.wait(wait.timeout_s)
        return answers

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        raise NotImplementedError


def on_all(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """Call `body` with each rank, in a thread each; return the results, None for a rank that takes over 20 s."""
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        results[rank] = body(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@contextlib.contextmanager
def detectors(nodes: tuple[int, ...] = NODES) -> Iterator[list[FailureDetector]]:
    """Start the detector of each rank, given the node of each; yield them, and close them in the end."""
    exchange = ByteExchange(len(nodes))
    hosts = tuple(HOSTS[2 * node] for node in nodes)
    members = on_all(
        len(nodes), lambda r: start_failure_detector(Bootstrap(exchange, r), Topology(r, nodes, hosts), 10)
    )
    try:
        yield members
    finally:
        on_all(len(nodes), lambda r: members[r] is not None and members[r].close())


def failure_of(detector: FailureDetector, within_s: float, operation: str = "a barrier") -> Exception | None:
    """Return the error that a detector raises within a time, or None."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            detector.check(operation)
        except Exception as error:  # noqa: BLE001
            return error
        time.sleep(0.005)
    return None


def until(condition: Callable[[], object], within_s: float) -> None:
    """Wait for a condition, and fail if it is not met within a time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.01)
