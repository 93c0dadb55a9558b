"""Save live state as it lies, one file a rank, to go on from there later on any number of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from statexchange.comm.communicator import Communicator
from statexchange.comm.world import as_communicator
from statexchange.errors import NotFoundError
from statexchange.exchange.describe import describe
from statexchange.exchange.nested import tree_of
from statexchange.exchange.staging import Staging
from statexchange.storage.workspace import Manifest, Receipt, Workspace

__all__ = ["save_checkpoint"]

_KEPT_ROUNDS = 2


def save_checkpoint(
    state: Mapping[str, Any], url: str | os.PathLike[str], *, comm: Any = None, stall_timeout_s: float = 300.0
) -> Manifest:
    """Save nested `state` (modules, optimizers' state dicts, tensors, numbers ...) in a workspace, sharded as it lies.

    Collective over `comm`. All hosts must see `url`: a NotFoundError names one that does not. Each rank
    writes what it holds as one durable file, tensors by their dotted path; then root commits the round, and this job's
    newest two rounds stay. Everything that is no tensor is kept as JSON values. A failure on any rank is raised on all,
    and the earlier rounds stay as they were.
    """
    communicator = as_communicator(comm)
    ours: list[str] = []
    number: Any = None
    try:
        with communicator.phase("describing its state"):
            workspace = Workspace(url)
            config, tensors = tree_of(state)
            held = describe(tensors)
        with communicator.phase("choosing a round"):
            if communicator.rank == 0:
                number = workspace.next_round(communicator.run)
        number = communicator.broadcast_object(number)
        with communicator.phase("saving", timeout_s=stall_timeout_s):
            staging = Staging()
            receipt = workspace.write(
                [h.whole(staging, communicator.progress) for h in held.held.values()],
                run=communicator.run,
                round=number,
                rank=communicator.rank,
                world_size=communicator.world_size,
                config=config,
                extra={"aliases": dict(held.aliases)},
            )
            ours = [receipt.relative]
        ours = []  # from here on root may commit it, and nobody else removes one
        receipts = communicator.gather_object([receipt.relative, receipt.nbytes])
        committed: list[Any] = []
        with communicator.phase("committing"):
            if communicator.rank == 0:
                _check_seen(workspace, receipts, communicator)
                manifest = workspace.commit([Receipt(*r) for r in receipts], keep=_KEPT_ROUNDS)
                committed = [manifest.generation, [[r.relative, r.nbytes] for r in manifest.receipts]]
        generation, kept = communicator.broadcast_object(committed)
        written = tuple(Receipt(*r) for r in kept)
        return Manifest(communicator.run, number, generation, communicator.world_size, written, {})
    except BaseException:
        if communicator.rank == 0 and number is not None:
            with contextlib.suppress(NotFoundError):  # nobody has written yet
                ours = [name.relative for name in workspace.rank_names(communicator.run, number)]
        if ours:
            workspace.remove(ours)
        raise


def _check_seen(workspace: Workspace, receipts: Sequence[Any], comm: Communicator) -> None:
    """Root: what ranks have written must lie where this host sees it."""
    for rank, (relative, _) in enumerate(receipts):
        if not os.path.lexists(os.path.join(workspace.path, relative)):
            text = f"{comm.hosts[0]} does not see what rank {rank} on {comm.hosts[rank]} has saved: give all one url"
            raise NotFoundError(text, rank=rank, path=workspace.path)
