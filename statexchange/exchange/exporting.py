"""Publish an export that the ranks have written: compare copies, finish the files, name the directory, and report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statexchange.checkpoint.index import BoxProvenance
from statexchange.checkpoint.notes import notes_on_written
from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_root
from statexchange.errors import MismatchError, ReplicaError
from statexchange.exchange.export_plan import Clock, ExportRequest, RootExport
from statexchange.formats.config_check import config_warnings
from statexchange.messages import decode
from statexchange.sharding.plan import TensorPlan, replica_error
from statexchange.sharding.rules import layout_advice
from statexchange.sharding.shards import Piece
from statexchange.sharding.write_plan import BoxReceipt
from statexchange.tensors import collector_paused
from statexchange.units import format_shares, format_transfer

__all__ = ["ExportReport", "publish"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: the checkpoint directory.
        files: (name, bytes) of each file.
        nbytes: bytes of all tensors.
        num_tensors: number of tensors written.
        aliases: names of tied tensors that are not written, with the names under which their values are.
        seconds: duration.
        phases: seconds by phase: metadata sent to root ("describe"), the plan sent to the ranks ("plan"), tensors
            ("write") and receipts ("publish").
        phase_nbytes: bytes by phase.
        rank_nbytes: the bytes that each rank supplied.
        notes: differences between the tensors and the config that is written; tensors that `dtype` has made infinite,
            narrowed or left as they were; extra state that is left out; equal parts of ranks that a layout without a
            mesh has joined, as these may be copies. Root logs them, too.
    """

    path: str
    files: tuple[tuple[str, int], ...]
    nbytes: int
    num_tensors: int
    aliases: Mapping[str, str]
    seconds: float
    phases: Mapping[str, float]
    phase_nbytes: Mapping[str, int]
    rank_nbytes: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        transfer = format_transfer(self.num_tensors, self.nbytes, self.seconds)
        return f"{transfer} -> {self.path} ({format_shares(self.rank_nbytes)})"


def publish(
    comm: Communicator,
    root: RootExport | None,
    receipts: Sequence[bytes],
    nodes: Sequence[int],
    request: ExportRequest,
    clock: Clock,
) -> ExportReport:
    """Give the directory its name once all copies have turned out equal; the same report on every rank. Collective.

    Args:
        comm: the communicator.
        root: on root the export, with the directory under construction.
        receipts: on root the receipts of all ranks.
        nodes: the host that has written each file.
        request: the arguments of the call.
        clock: the time that has passed.
    """
    report: ExportReport | None = None
    with comm.phase("publishing", timeout_s=request.call.stall_timeout_s), collector_paused():
        if root is not None:
            provenance = _box_provenance(root, receipts)
            for output, node in zip(root.outputs, nodes, strict=True):
                # The file was reserved without its header: a file that a crash leaves behind is no valid one.
                output.finish(writes_header=node == comm.node_rank)
            # Only after the comparison: from here on readers see the checkpoint.
            small_files = root.publication.commit(provenance)
            notes = root.notes + _notes_on_written(root, provenance, request)
            clock.lap("publish", sum(map(len, receipts)))
            report = _report(root, small_files, notes, clock, comm.world_size)
            _log.info("exported %s", report)
            for note in notes:
                _log.warning("exported to %s: %s", report.path, note)
    sent = from_root(comm, report, ExportReport | None, "the report")
    assert sent is not None
    return sent


def _notes_on_written(
    root: RootExport, provenance: Mapping[str, Sequence[BoxProvenance]], request: ExportRequest
) -> tuple[str, ...]:
    """Return what there is to say of the written tensors, and of a whole model beside its config."""
    layout = root.options.new_layout()
    # Of a part of a model, its config says other things than of the whole.
    if not root.extra or request.options.include or request.options.exclude:
        return notes_on_written(root.plan, provenance, layout, None)
    about_config = config_warnings(root.plan.tensors, root.extra)
    return about_config + notes_on_written(root.plan, provenance, layout, root.extra)


def _report(
    root: RootExport, small_files: Sequence[tuple[str, int]], notes: tuple[str, ...], clock: Clock, world_size: int
) -> ExportReport:
    plan = root.plan
    files = [*small_files]
    for file, output in zip(plan.files, root.outputs, strict=True):
        files.append((file.name, len(output.header) + file.data_nbytes))
    return ExportReport(
        root.publication.path,
        tuple(sorted(files)),
        plan.nbytes,
        plan.num_tensors,
        plan.aliases,
        time.perf_counter() - clock.began,
        clock.phases,
        clock.nbytes,
        plan.nbytes_of_ranks(world_size),
        notes,
    )


def _box_provenance(root: RootExport, receipts: Sequence[bytes]) -> dict[str, list[BoxProvenance]]:
    """Return each tensor's supplier and digest for every piece; raise ReplicaError if replicas differ."""
    boxes: dict[tuple[int, int, int, int], BoxReceipt] = {}  # by tensor, piece, rank, and index of the rank's box
    for rank, data in enumerate(receipts):
        for receipt in decode(data, list[BoxReceipt], "the digests", rank):
            boxes[receipt.tensor, receipt.piece, rank, receipt.index] = receipt
    provenance: dict[str, list[BoxProvenance]] = {}
    for number, tensor in enumerate(root.plan.tensors.values()):
        provenance[tensor.name] = []
        for index, piece in enumerate(tensor.pieces):
            written = _receipt(boxes, tensor, (number, index, piece.holder, piece.box_index))
            provenance[tensor.name].append(BoxProvenance(piece.holder, written.digest, written.num_overflows))
            # Copies that are reduced differ, and those of a rank that is chosen by name may.
            if not piece.replicas or tensor.reduce is not None or root.options.replicas != "equal":
                continue
            for rank, box_index in piece.replicas:
                if _receipt(boxes, tensor, (number, index, rank, box_index)).digest != written.digest:
                    raise _replica_error(tensor, piece, rank)
    return provenance


def _receipt(
    boxes: Mapping[tuple[int, int, int, int], BoxReceipt], tensor: TensorPlan, key: tuple[int, int, int, int]
) -> BoxReceipt:
    if key not in boxes:
        text = "this rank has not sent the digest of a box: run the same version of statexchange on all ranks"
        raise MismatchError(text, name=tensor.name, rank=key[2])
    return boxes[key]


def _replica_error(tensor: TensorPlan, piece: Piece, other: int) -> ReplicaError:
    """Return the error for a copy of `other` that differs, with the layout by which it would be a part."""

    def rule(dim: int) -> str:
        return f'{{"{tensor.source}": Shard({dim})}}'

    rules = layout_advice([tensor.shape], rule) if len(tensor.pieces) == 1 else ""
    layout = f"if each rank holds a part, give layout={rules}; " if rules else ""
    advice = (
        f'{layout}to take rank {min(piece.holder, other)}\'s copy, replicas="root"; tensors of different pipeline '
        "stages need different names, even if each stage numbers its layers from 0"
    )
    return replica_error(tensor.name, piece.box, piece.holder, other, advice)
