"""The backend of a world of one."""

from __future__ import annotations

from collections.abc import Sequence

from statexchange.comm.communicator import Backend

__all__ = ["SingleBackend"]


class SingleBackend(Backend):
    """One rank: every exchange is with itself."""

    name = "single"
    rank = 0
    world_size = 1

    def exchange(self, payload: bytes, timeout_s: float, doing: str) -> list[bytes]:  # noqa: ARG002 (nobody to wait for)
        """The payload itself."""
        return [payload]

    def subset(self, ranks: Sequence[int]) -> Backend:  # noqa: ARG002 (only [0] exists)
        """Itself."""
        return self
