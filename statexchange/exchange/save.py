"""Save live state, one file per rank, keeping its sharding."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.errors import InvalidArgumentError, NotFoundError
from statexchange.exchange.placing import parameter_names, place_parts
from statexchange.exchange.receipts import CommittedRound, RoundStart, SavedFile
from statexchange.exchange.staging import Staging, held_bytes
from statexchange.processes import collector_paused
from statexchange.settings import check_timeout
from statexchange.sharding import records
from statexchange.sharding.rules import Layout
from statexchange.state.describe import State, describe
from statexchange.state.state_dict import encode_state
from statexchange.storage.workspace import Workspace
from statexchange.units import format_shares, format_transfer

__all__ = ["SaveReport", "save_checkpoint"]

_log = logging.getLogger(__name__)
_KEPT_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save.

    `num_tensors` is the number of tensors of which this rank holds a part; `nbytes` are the bytes of all ranks' files,
    `rank_nbytes` those of each rank's file. `generation` grows with each save in the workspace.
    """

    path: str
    run: str
    round: int
    generation: int
    num_tensors: int
    nbytes: int
    seconds: float
    rank_nbytes: tuple[int, ...]

    def __str__(self) -> str:
        done = format_transfer(self.num_tensors, self.nbytes, self.seconds)
        return f"{done} -> {self.path} ({format_shares(self.rank_nbytes)})"


@public_call("save_checkpoint")
def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    layout: Mapping[str, Any] | None = None,
    stall_timeout_s: float = 300.0,
) -> SaveReport:
    """Save nested `state` (modules, optimizers, tensors, numbers ...) at `path` with the sharding that it has.

    Collective; blocks until all ranks' files are durable. All hosts must see `path`; if one does not, a NotFoundError
    names it. Each rank writes its tensors as one file, under their dotted paths; then root commits the round, and this
    job's newest two rounds stay. Values that are not tensors are kept as JSON. A failure on any rank is raised on all
    ranks, and earlier rounds stay as they were.

    Args:
        state: a nested mapping, as ``{"model": ..., "optimizer": ..., "step": 7}``, or a module.
        path: a directory that all hosts see, or ``shm://name`` for one on tmpfs.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        layout: rules for plain tensors that are parts of whole ones, as in `export_checkpoint`, by their dotted paths:
            ``{"*.up.weight": Shard(0)}``. Optimizer state of a parameter's shape follows the parameter's rule. Rules
            that rename (split, renumber) or reduce are refused: tensors are saved as they are.
        stall_timeout_s: limit of the time in which no rank moves a byte, in seconds; the total time is not limited.

    Returns:
        The report, with this rank's number of tensors.

    Raises:
        InvalidArgumentError: a rule does not fit a tensor, or matches none.
        NotFoundError: a host does not see the files of the others.
        UnsupportedError, IncompleteError, StorageError: see `statexchange.errors`.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> report = sx.save_checkpoint({"model": model, "optimizer": optimizer, "step": 7}, "saved")
        >>> report.num_tensors
        2
    """
    began = time.perf_counter()
    communicator = as_communicator(comm)
    ours: list[str] = []  # files to remove after a failure
    number: Any = None
    try:
        with communicator.phase("describing its state"):
            check_timeout(stall_timeout_s, "stall_timeout_s")
            workspace = Workspace(path)
            with collector_paused():
                config, tensors = encode_state(state)
                rules = _parse_layout(layout, tensors)
                held = describe(tensors, rules, communicator.rank)
        with communicator.phase("choosing a round"):
            if communicator.rank == 0:
                number = workspace.next_round(communicator.run)
        sent = communicator.all_gather_object(RoundStart(number, layout is not None).to_json())
        starts = [
            records.parsed(raw, RoundStart.from_json, "the start of the save", rank) for rank, raw in enumerate(sent)
        ]
        number = starts[0].number
        if any(start.has_layout for start in starts):
            held = place_parts(communicator, held, rules)
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
        saved: list[SavedFile] = []
        sent = communicator.gather_object(SavedFile(receipt, workspace.path).to_json())
        with communicator.phase("looking for what was saved"):
            if communicator.rank == 0:
                saved = [
                    records.parsed(raw, SavedFile.from_json, "the receipt of the file", rank)
                    for rank, raw in enumerate(sent)
                ]
                _check_seen(workspace, saved, communicator)
        ours = []  # root may commit the file from here on, so only root may remove it
        committed: Any = None
        with communicator.phase("committing"):
            if communicator.rank == 0:
                manifest = workspace.commit([file.receipt for file in saved], keep=_KEPT_ROUNDS)
                committed = CommittedRound(manifest.generation, manifest.receipts).to_json()
        sent = communicator.broadcast_object(committed)
        kept = records.parsed(sent, CommittedRound.from_json, "the committed round", 0)
        rank_nbytes = tuple(receipt.nbytes for receipt in kept.receipts)
        seconds = time.perf_counter() - began
        report = SaveReport(
            workspace.path,
            communicator.run,
            int(number),
            kept.generation,
            len(held.held),
            sum(rank_nbytes),
            seconds,
            rank_nbytes,
        )
        if communicator.rank == 0:
            _log.info("saved %s", report)
        return report
    except BaseException:
        if communicator.rank == 0 and number is not None:
            with contextlib.suppress(NotFoundError):  # no rank has written yet
                ours = [name.relative for name in workspace.rank_names(communicator.run, number)]
        if ours:
            workspace.remove(ours)
        raise


def _parse_layout(layout: Mapping[str, Any] | None, tensors: Mapping[str, Any]) -> Layout:
    """Return the layout, in which an optimizer's tensor follows the rule of its parameter if both have one shape."""
    rules = Layout.parse({} if layout is None else layout)
    for rule in rules.rules.values():
        if rule.renames or rule.reduce is not None:
            what = "renames tensors" if rule.renames else "reduces copies"
            raise InvalidArgumentError(
                f"layout rule for {rule.pattern!r} {what}, and save_checkpoint saves tensors as they are: leave it "
                "out, or use export_checkpoint"
            )
    like = {}
    for name, tensor in tensors.items():
        for parameter in parameter_names(name):
            if parameter in tensors and tuple(tensors[parameter].shape) == tuple(tensor.shape):
                like[name] = parameter
    return replace(rules, like=like)


def _check_seen(workspace: Workspace, saved: Sequence[SavedFile], comm: Communicator) -> None:
    """Raise NotFoundError unless root's host sees what each rank has written. Root only."""
    with workspace.view() as view:
        seen = {name.relative for name in view.rank_names(comm.run, saved[0].receipt.rank_name.round)}
    for rank, file in enumerate(saved):
        if file.receipt.relative not in seen:
            text = (
                f"{comm.hosts[0]}, which looks in {workspace.path}, does not see what rank {rank} on "
                f"{comm.hosts[rank]} has saved in {file.path}: pass the same shared directory on all ranks"
            )
            raise NotFoundError(text, rank=rank, path=workspace.path)
