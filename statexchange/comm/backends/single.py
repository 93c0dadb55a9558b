"""The backend of a world of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from statexchange.comm.backends.backend import Backend
from statexchange.comm.wait import Wait

if TYPE_CHECKING:
    import torch

    from statexchange.comm.backends.reduction import Finish


class SingleBackend(Backend):
    """One rank, without peers."""

    name = "single"
    rank = 0
    world_size = 1

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:  # noqa: ARG002 (no peers to wait for)
        """Return the payload itself."""
        return [payload]

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:  # noqa: ARG002 (only [0] exists)
        """Return this backend."""
        return self

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:  # noqa: ARG002
        """Apply `finish`: with one rank the tensor is its own reduction."""
        finish(tensor)
