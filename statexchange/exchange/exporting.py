"""One export of described state: agree on a plan, write in place, publish, report.

Root plans and keeps the metadata; every rank writes its own bytes in place. No rank holds the model.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any

from statexchange.checkpoint.extra_files import FilesFrom, extra_files, given_config
from statexchange.checkpoint.index import BoxProvenance
from statexchange.checkpoint.notes import notes_on_written
from statexchange.checkpoint.publication import PlannedFile, Publication, target_path
from statexchange.checkpoint.tensor_notes import notes_on_tensors
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, ReplicaError
from statexchange.exchange.converting import ChosenConversion, convert_live
from statexchange.exchange.rank_metadata import (
    RankMetadata,
    check_equal_options,
    gather_metadata,
    operations,
    parse_metadata,
    rank_shards,
    renames,
)
from statexchange.exchange.reducing import reduce_copies
from statexchange.exchange.saved_names import SavedNames
from statexchange.exchange.writing import write_boxes, writing_nodes
from statexchange.formats.config_check import config_warnings, unties_heads, without_heads
from statexchange.formats.model_files import CONFIG
from statexchange.processes import collector_paused
from statexchange.settings import check_flags, check_progress, check_timeout
from statexchange.sharding import records
from statexchange.sharding.copies import check_copies, replica_error
from statexchange.sharding.layout_advice import layout_advice
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import Plan, RankShards, TensorPlan, plan_merge
from statexchange.sharding.shards import Box
from statexchange.sharding.write_plan import BoxReceipts, WriteFile, WritePlan, WriteTensor
from statexchange.state.describe import Description
from statexchange.storage.location import location
from statexchange.storage.store import resolve_path
from statexchange.tensors import ITEMSIZE
from statexchange.units import format_shares, format_transfer

__all__ = ["ExportReport", "ExportRequest", "export_described"]


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
            narrowed or left as they were; equal parts of ranks that a layout without a mesh has joined, as these may be
            copies. Root logs them, too.
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

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**record, "files": [{"name": name, "nbytes": nbytes} for name, nbytes in self.files]}

    @classmethod
    def from_json(cls, raw: Any) -> ExportReport:
        """Return the report that `to_json` wrote; raise ValueError for anything else."""
        names = [field.name for field in fields(cls)]
        path, files, nbytes, num_tensors, aliases, seconds, phases, phase_nbytes, rank_nbytes, notes = records.fields(
            raw, *names
        )
        return cls(
            records.text(path),
            records.items(files, _file_from_json),
            records.count(nbytes),
            records.count(num_tensors),
            records.texts(aliases),
            records.number(seconds),
            records.mapping(phases, records.number),
            records.mapping(phase_nbytes, records.count),
            records.items(rank_nbytes, records.count),
            records.items(notes, records.text),
        )


def _file_from_json(raw: Any) -> tuple[str, int]:
    name, nbytes = records.fields(raw, "name", "nbytes")
    return records.text(name), records.count(nbytes)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The arguments of `export_checkpoint` other than the state and the communicator."""

    path: str
    options: ExportOptions
    conversion: ChosenConversion | SavedNames | None = None
    files_from: FilesFrom = None
    own_files: Mapping[str, bytes] = field(default_factory=dict)
    overwrite: bool = False
    stall_timeout_s: float = 300.0
    on_progress: Callable[[int, int], None] | None = None

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        conversion: ChosenConversion | SavedNames | None = None,
        files_from: FilesFrom = None,
        own_files: Mapping[str, bytes] = MappingProxyType({}),
        overwrite: bool = False,
        stall_timeout_s: float = 300.0,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> ExportRequest:
        """Check and keep the arguments of a call; `own_files` are the model's config files, `options` ExportOptions."""
        check_timeout(stall_timeout_s, "stall_timeout_s")
        check_flags(overwrite=overwrite)
        check_progress(on_progress)
        return cls(
            resolve_path(path, "a target"),
            ExportOptions(**options),
            conversion,
            files_from,
            own_files,
            overwrite,
            stall_timeout_s,
            on_progress,
        )


class _Clock:
    """Seconds and bytes by phase."""

    def __init__(self, began: float | None = None) -> None:
        self.began = self._last = time.perf_counter() if began is None else began
        self.phases: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    def lap(self, phase: str, nbytes: int = 0) -> None:
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self.nbytes[phase] = nbytes
        self._last = now


def export_described(
    described: Description, request: ExportRequest, comm: Communicator, began: float | None = None
) -> ExportReport:
    """Export described state as `export_checkpoint` does; the report counts seconds from `began`. Collective."""
    return _Export(comm, described, request, _Clock(began)).run()


class _Export:
    """One export, from descriptions to the published directory."""

    def __init__(self, comm: Communicator, described: Description, request: ExportRequest, clock: _Clock) -> None:
        self._comm = comm
        self._described = described
        self._request = request
        self._options = request.options
        self._layout = request.options.new_layout()
        self._stall_timeout_s = request.stall_timeout_s
        self._clock = clock
        self._publication: Publication | None = None
        self._plan: Plan | None = None
        self._outputs: list[PlannedFile] = []
        self._probe = ""
        self._notes: tuple[str, ...] = ()
        self._extra: Mapping[str, bytes] = {}
        self._renames: list[dict[str, str]] = []

    def run(self) -> ExportReport:
        """Export; collective."""
        comm = self._comm
        try:
            with collector_paused():
                write_plan = self._agreed_plan()
            nodes = writing_nodes(comm, write_plan)
            self._prepare_values(write_plan)
            with comm.phase("writing", timeout_s=self._stall_timeout_s):
                headers = [output.header for output in self._outputs]
                own_receipts = write_boxes(comm, self._described, write_plan, nodes, headers, self._request.on_progress)
            self._clock.lap("write", self._plan.nbytes if self._plan is not None else 0)
            receipts = comm.all_gather_bytes(records.encoded(own_receipts), root=0, operation="the receipts")
            report: ExportReport | None = None
            with comm.phase("publishing", timeout_s=self._stall_timeout_s):
                if comm.rank == 0:
                    with collector_paused():
                        report = self._publish(receipts, nodes)
            return self._broadcast(report)
        finally:
            if self._publication is not None:
                self._publication.abandon()

    def _agreed_plan(self) -> WritePlan:
        """Send this rank's metadata to root; return root's plan. Collective."""
        comm, texts = self._comm, self._options.texts()
        self._described, self._options = convert_live(comm, self._described, self._request.conversion, self._options)
        self._layout = self._options.new_layout()
        own = RankMetadata.of(self._described, texts)
        metadata, nbytes = gather_metadata(comm, own, root=0)
        self._clock.lap("describe", nbytes)
        plan: WritePlan | None = None
        data = b""
        with comm.phase("planning"):
            if comm.rank == 0:
                self._prepare(parse_metadata(metadata, comm.rank, own))
                plan = self._write_plan()
                data = records.encoded(plan)
        sent = comm.all_gather_bytes(data, operation="the plan")[0]
        with comm.phase("reading the plan"):
            if plan is None:
                plan = records.decoded(sent, lambda raw: WritePlan.from_json(raw, comm.world_size), "the plan", 0)
        self._clock.lap("plan", len(sent))
        return plan

    def _prepare(self, metadata: list[RankMetadata]) -> None:
        """Prove the cover, claim the target, and create the files. Root only."""
        check_equal_options([rank_metadata.options for rank_metadata in metadata])
        self._layout.check_ranks(range(len(metadata)))
        unused = set.intersection(*(set(rank_metadata.unused) for rank_metadata in metadata))
        if unused:
            raise InvalidArgumentError(f"layout pattern {min(unused)!r} matches no tensor")
        self._renames = renames(metadata, self._layout)
        renamed = []
        for rank, (rank_metadata, names) in enumerate(zip(metadata, self._renames, strict=True)):
            renamed.append(rank_metadata.renamed(names, rank) if names else rank_metadata)
        shards = rank_shards(renamed, self._layout)
        is_untied = unties_heads(given_config(self._request.files_from) or self._request.own_files.get(CONFIG))
        by_rank = []
        for rank, rank_metadata in enumerate(renamed):
            aliases = without_heads(rank_metadata.aliases) if is_untied else rank_metadata.aliases
            by_rank.append(RankShards(rank, shards[rank], aliases))
        self._plan = plan_merge(by_rank, self._options, reductions=operations(renamed))
        if not self._plan.num_tensors:
            reason = "include and exclude leave out every tensor" if any(shards) else "no rank's state has a tensor"
            raise InvalidArgumentError(f"there is nothing to export: {reason}")
        self._notes = notes_on_tensors(by_rank, self._plan, self._options)
        path = target_path(self._request.path)
        if location(path).is_remote:
            raise InvalidArgumentError(f"a checkpoint goes to a directory, not to {path!r}")
        self._extra = extra_files(self._request.files_from, self._plan, self._request.own_files, updates_dtype=True)
        self._publication = Publication(
            path, self._plan, source="export", extra=self._extra, overwrite=self._request.overwrite
        )
        self._outputs = [self._publication.create(file) for file in self._plan.files]
        if self._comm.num_nodes > 1:
            self._probe = self._publication.make_probe()

    def _write_plan(self) -> WritePlan:
        """Return the plan by which each rank writes its part. Root only."""
        assert self._plan is not None
        distinct: dict[str, int] = {}  # the number of each distinct map of names, as JSON
        numbers = [distinct.setdefault(json.dumps(names, sort_keys=True), len(distinct)) for names in self._renames]
        tensors = []
        for number, (file, output) in enumerate(zip(self._plan.files, self._outputs, strict=True)):
            for tensor in file.tensors:
                tensors.append(
                    WriteTensor(
                        file=number,
                        begin=output.offset_of(tensor),
                        shape=tensor.shape,
                        dtype=tensor.dtype,
                        source=tensor.source,
                        reduce=tensor.reduce,
                        pieces=tensor.pieces,
                    )
                )
        files = [WriteFile(output.path, output.is_reserved) for output in self._outputs]
        compares = self._options.replicas == "equal"
        renames_by_number = tuple(json.loads(text) for text in distinct)
        return WritePlan(tuple(files), tuple(tensors), renames_by_number, tuple(numbers), self._probe, compares)

    def _prepare_values(self, write_plan: WritePlan) -> None:
        """Rename tensors as the plan does, and reduce the copies that a layout reduces. Collective."""
        comm = self._comm
        self._described = self._described.renamed(write_plan.renames[write_plan.rename_of[comm.rank]])
        reductions = write_plan.reductions()
        if reductions:
            with comm.phase("reducing copies", timeout_s=self._stall_timeout_s):
                self._described = reduce_copies(comm, self._described, reductions)
            self._clock.lap("reduce")

    def _publish(self, receipts: Sequence[bytes], nodes: Sequence[int]) -> ExportReport:
        """Compare replicas, finish the files, write the manifest and rename. Root only."""
        plan, publication = self._plan, self._publication
        assert plan is not None
        assert publication is not None
        tensors = list(plan.tensors.values())
        decoded = [
            records.decoded(receipt, BoxReceipts.from_json, "the digests", rank)
            for rank, receipt in enumerate(receipts)
        ]
        provenance = _box_provenance(tensors, decoded, compares=self._options.replicas == "equal")
        for output, node in zip(self._outputs, nodes, strict=True):
            output.finish(writes_header=node == self._comm.node_rank)
        small_files = publication.commit(provenance)
        files = [(file.name, output.nbytes) for file, output in zip(plan.files, self._outputs, strict=True)]
        is_part = self._request.options.include or self._request.options.exclude
        model_files = None if is_part else self._extra
        if model_files is not None:
            self._notes += config_warnings(plan.tensors, model_files)
        self._notes += notes_on_written(plan, provenance, self._layout, model_files)
        self._clock.lap("publish", sum(map(len, receipts)))
        return ExportReport(
            publication.path,
            tuple(sorted(files + small_files)),
            plan.nbytes,
            plan.num_tensors,
            plan.aliases,
            time.perf_counter() - self._clock.began,
            self._clock.phases,
            self._clock.nbytes,
            _nbytes_by_rank(tensors, self._comm.world_size),
            self._notes,
        )

    def _broadcast(self, report: ExportReport | None) -> ExportReport:
        """Send root's report to every rank. Collective."""
        sent = self._comm.broadcast_object(None if report is None else report.to_json())
        if report is not None:
            _log.info("exported %s", report)
            for note in report.notes:
                _log.warning("exported to %s: %s", report.path, note)
        return records.parsed(sent, ExportReport.from_json, "the report", 0)


def _nbytes_by_rank(tensors: Sequence[TensorPlan], world_size: int) -> tuple[int, ...]:
    """Return the number of bytes that each rank supplied."""
    nbytes = [0] * world_size
    for tensor in tensors:
        for piece in tensor.pieces:
            nbytes[piece.holder] += piece.box.numel * ITEMSIZE[tensor.dtype]
    return tuple(nbytes)


def _box_provenance(
    tensors: Sequence[TensorPlan], receipts: Sequence[BoxReceipts], *, compares: bool
) -> dict[str, list[BoxProvenance]]:
    """Return each tensor's supplier and digest for every piece; raise ReplicaError if replicas differ."""
    digests: dict[tuple[int, int, int, int], str] = {}  # by tensor, piece, rank, and index of the rank's box
    overflows: dict[tuple[int, int, int, int], int] = {}
    for rank, rank_receipts in enumerate(receipts):
        for receipt in rank_receipts:
            key = (receipt.tensor, receipt.piece, rank, receipt.index)
            digests[key] = receipt.digest
            if receipt.num_overflows:
                overflows[key] = receipt.num_overflows
    provenance: dict[str, list[BoxProvenance]] = {}
    for number, tensor in enumerate(tensors):
        provenance[tensor.name] = []
        for index, piece in enumerate(tensor.pieces):
            digest_of = partial(_digest_of, digests, tensor.name, number, index)
            if compares:
                check_copies(tensor, piece, digest_of, _replica_error)
            digest = digest_of(piece.holder, piece.box_index)
            num_overflows = overflows.get((number, index, piece.holder, piece.box_index), 0)
            provenance[tensor.name].append(BoxProvenance(piece.holder, digest, num_overflows))
    return provenance


def _digest_of(
    digests: Mapping[tuple[int, int, int, int], str], name: str, tensor: int, piece: int, rank: int, box: int
) -> str:
    key = (tensor, piece, rank, box)
    if key not in digests:
        text = "this rank has not sent the digest of a box: run the same version of statexchange on all ranks"
        raise MismatchError(text, name=name, rank=rank)
    return digests[key]


def _replica_error(tensor: TensorPlan, box: Box, rank: int, other: int) -> ReplicaError:
    def rule(dim: int) -> str:
        return f'{{"{tensor.source}": Shard({dim})}}'

    rules = layout_advice([tensor.shape], rule) if len(tensor.pieces) == 1 else ""
    layout = f"if each rank holds a part, give layout={rules}; " if rules else ""
    advice = (
        f'{layout}to take rank {min(rank, other)}\'s copy, replicas="root"; tensors of different pipeline '
        "stages need different names, even if each stage numbers its layers from 0"
    )
    return replica_error(tensor.name, box, rank, other, advice)
