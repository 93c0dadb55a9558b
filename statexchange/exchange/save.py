"""Save live state, one file per rank, keeping its sharding."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from statexchange.comm.communicator import Communicator
from statexchange.comm.session import public_call
from statexchange.comm.world import as_communicator
from statexchange.errors import NotFoundError
from statexchange.exchange.staging import Staging, held_bytes
from statexchange.settings import check_timeout
from statexchange.state.describe import describe
from statexchange.state.nested import tree_of
from statexchange.storage.workspace import Manifest, RankName, Receipt, Workspace

__all__ = ["save_checkpoint"]

_KEPT_ROUNDS = 2


@public_call("save_checkpoint")
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
            check_timeout(stall_timeout_s, "stall_timeout_s")
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
                [held_bytes(one, staging, communicator.progress) for one in held.held.values()],
                run=communicator.run,
                round=number,
                rank=communicator.rank,
                world_size=communicator.world_size,
                config=config,
                extra={"aliases": dict(held.aliases)},
                pending=True,
            )
            ours = [receipt.relative]
        told = communicator.gather_object([receipt.relative, receipt.nbytes, workspace.path])
        with communicator.phase("looking for what was saved"):
            if communicator.rank == 0:
                _check_seen(workspace, told, communicator)
        ours = []  # from here on root may commit it, and nobody else removes one
        committed: list[Any] = []
        with communicator.phase("committing"):
            if communicator.rank == 0:
                receipts = [Receipt(relative, nbytes) for relative, nbytes, _ in told]
                manifest = workspace.commit(receipts, keep=_KEPT_ROUNDS)
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


def _check_seen(workspace: Workspace, told: Sequence[Any], comm: Communicator) -> None:
    """Raise NotFoundError unless root's host sees what each rank has written. Root only."""
    with workspace.view() as view:
        seen = {name.relative for name in view.rank_names(comm.run, RankName.parse(told[0][0]).round)}
    for rank, (relative, _, path) in enumerate(told):
        if relative not in seen:
            text = (
                f"{comm.hosts[0]}, which looks in {workspace.path}, does not see what rank {rank} on "
                f"{comm.hosts[rank]} has saved in {path}: pass the same shared directory on all ranks"
            )
            raise NotFoundError(text, rank=rank, path=workspace.path)
