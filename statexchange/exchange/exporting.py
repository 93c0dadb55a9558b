"""The steps of an export before and after the writing: agree on the plan, and publish what the ranks have written.

Ranks describe their boxes. Root proves the cover, opens the target and tells all who writes what. When all have
written, root compares the digests of copies, finishes the files, and gives the directory its name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from statexchange.checkpoint.extra_files import CallerFiles, extra_files, read_caller_files
from statexchange.checkpoint.notes import note_on_extra_state, notes_on_tensors, notes_on_written
from statexchange.checkpoint.publication import Draft, Publication, VersionMarks
from statexchange.comm.communicator import Communicator, from_root
from statexchange.errors import InvalidArgumentError
from statexchange.exchange.rank_metadata import (
    RankMetadata,
    check_metadata,
    gather_distinct,
    parse_metadata,
    rank_shards,
    reductions_of,
)
from statexchange.exchange.receipts import Receipts, gather_provenance
from statexchange.formats.config_check import unties_heads, without_heads
from statexchange.messages import decode
from statexchange.sharding.options import CallOptions, ExportOptions
from statexchange.sharding.plan import Plan, RankShards, plan_merge
from statexchange.sharding.shards import LongTuple
from statexchange.sharding.write_plan import WriteFile, WritePlan, WriteTensor
from statexchange.units import format_shares, format_transfer

_MOST_KEPT = 8  # ranks with different metadata, of which a plan is kept for the next export: to compare many takes long

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
    rank_nbytes: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        transfer = format_transfer(self.num_tensors, self.nbytes, self.seconds)
        return f"{transfer} -> {self.path} ({format_shares(self.rank_nbytes)})"


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The checked arguments of `export_checkpoint`.

    Attributes:
        path: the target; root's counts.
        options, call: the options.
        model_files: the files that the model itself has, on root.
        marks: on root what makes the checkpoint a version of weights; None for any other, and on other ranks.
        on_written: called with the plan and this rank's receipts when all has been written and nothing is published.
    """

    path: str
    options: ExportOptions
    call: CallOptions
    model_files: Mapping[str, bytes]
    marks: VersionMarks | None = None
    on_written: Callable[[WritePlan, Receipts], object] | None = None


@dataclass(slots=True)
class RootExport:
    """An export as root alone has it: what is written, where, and what there is to say of it.

    Attributes:
        options: the options that are left after a conversion.
        plan: the files and their tensors.
        publication: the directory under construction.
        extra: the small files beside them.
        notes: for the report.
    """

    options: ExportOptions
    plan: Plan
    publication: Publication
    extra: Mapping[str, bytes]
    notes: tuple[str, ...]

    @property
    def headers(self) -> list[bytes]:
        """The first bytes of each file."""
        return [output.header for output in self.publication.outputs]

    def write_plan(self) -> WritePlan:
        """Return the plan by which each rank writes its part."""
        outputs = [(len(output.header), output.is_reserved) for output in self.publication.outputs]
        return _write_plan(LongTuple([self.plan]), tuple(outputs), compares=self.options.replicas == "equal")


class Written(NamedTuple):
    """The result of writing the files of an export.

    Attributes:
        receipts: those of this rank.
        nodes: the host that has written each file.
        uploaded: the versions of the objects, by name; None for a directory.
    """

    receipts: Receipts
    nodes: Sequence[int]
    uploaded: Mapping[str, str] | None


class Exported(NamedTuple):
    """The result of an export, and what root has of it."""

    report: ExportReport
    root: RootExport | None


@functools.lru_cache(2)
def _write_plan(planned: LongTuple[Plan], outputs: tuple[tuple[int, bool], ...], *, compares: bool) -> WritePlan:
    """Return what ranks write; `outputs` has the length of each file's header and whether its space is reserved."""
    files, tensors = [], []
    for number, (file, (begin, is_reserved)) in enumerate(zip(planned[0].files, outputs, strict=True)):
        files.append(WriteFile(file.name, is_reserved))
        for tensor in file.tensors:
            place = (number, begin + tensor.begin)
            tensors.append(WriteTensor(*place, tensor.shape, tensor.dtype, tensor.source, tensor.reduce, tensor.pieces))
    return WritePlan(tuple(files), tuple(tensors), compares)


@functools.lru_cache(2)
def _received_plan(data: bytes, world_size: int) -> WritePlan:
    return decode(data, WritePlan, "the plan", 0, partial(WritePlan.check, world_size=world_size))


def agree_on_plan(
    comm: Communicator,
    metadata_here: RankMetadata,
    request: ExportRequest,
    options: ExportOptions,
    building: contextlib.ExitStack,
) -> tuple[WritePlan, RootExport | None]:
    """Return the plan of all ranks' tensors, and on root what it keeps of it. Collective.

    Args:
        comm: the communicator.
        metadata_here: this rank's tensors, as they are written.
        request: the arguments of the call.
        options: those that are left after a conversion.
        building: at its end the directory under construction is abandoned, unless it is committed.
    """
    root: RootExport | None = None
    if comm.world_size == 1:
        with comm.phase("planning"):
            root = _planned([metadata_here], request, options, building)
        return _in_folder(root.write_plan(), root.publication.build.building_path), root
    metadata = gather_distinct(comm, metadata_here.data, root=0)
    folder, data = "", b""
    with comm.phase("planning"):
        if comm.rank == 0:
            root = _planned(parse_metadata(metadata, comm.rank, metadata_here), request, options, building)
            folder = root.publication.build.building_path
            data = root.write_plan().data
    # As bytes of their own, which are equal at the next export of the same tensors: they are parsed once. The folder's
    # name is random each time.
    sent = comm.all_gather_bytes(data, operation="the plan")[0]
    folder = from_root(comm, folder, str, "the directory under construction")
    with comm.phase("reading the plan"):
        plan = _received_plan(sent, comm.world_size) if root is None else root.write_plan()
    return _in_folder(plan, folder), root


def _in_folder(plan: WritePlan, folder: str) -> WritePlan:
    """Return a plan whose files have names with their paths in a directory."""
    files = [WriteFile(os.path.join(folder, file.path), file.is_reserved) for file in plan.files]
    return replace(plan, files=tuple(files))


@functools.lru_cache(2)
def _plan_of(
    metadata: LongTuple[RankMetadata], all_options: LongTuple[ExportOptions], *, is_untied: bool
) -> tuple[Plan, tuple[str, ...]]:
    """Prove the cover and plan the files; return the plan, and the notes on its tensors.

    Tensors of an `is_untied` model are written under all of their names.
    """
    options = all_options[0]
    layout = options.new_layout()
    check_metadata(metadata, layout)
    by_rank = []
    for rank, shards in enumerate(rank_shards(metadata, layout)):
        aliases = metadata[rank].aliases
        if is_untied:
            aliases = without_heads(aliases)
        by_rank.append(RankShards(rank, shards, aliases))
    plan = plan_merge(by_rank, options, reductions=reductions_of(metadata))
    if not plan.num_tensors:
        reason = "no rank's state has a tensor"
        if any(holder.shards for holder in by_rank):
            reason = "include and exclude leave out every tensor"
        raise InvalidArgumentError(f"there is nothing to export: {reason}")
    return plan, notes_on_tensors(by_rank, plan, options)


def _planned(
    metadata: Sequence[RankMetadata],
    request: ExportRequest,
    options: ExportOptions,
    building: contextlib.ExitStack,
) -> RootExport:
    """Plan, claim the target, and create the files. Root only."""
    extra: dict[str, bytes] = {}
    caller_files: CallerFiles | None = None
    is_untied = False
    if request.options.files_from is not None or request.model_files:
        caller_files = read_caller_files(request.options.files_from)
        # transformers would give a head that its config does not tie, and that no file has, random values.
        is_untied = unties_heads(caller_files.config(request.model_files))
    # A function that renames may answer otherwise than at the last export. The rules of a layout are not compared, and
    # many different ranks would be kept for nothing.
    is_kept = not callable(options.rename) and options.layout is None and len(set(map(id, metadata))) <= _MOST_KEPT
    plan_of = _plan_of if is_kept else _plan_of.__wrapped__
    plan, notes = plan_of(LongTuple(metadata), LongTuple([options]), is_untied=is_untied)
    extra_state: list[str] = []
    for rank_metadata in metadata:
        extra_state += rank_metadata.extra_state
    if extra_state:
        notes += note_on_extra_state(extra_state, request.options)
    if caller_files is not None:
        extra = extra_files(caller_files.contents, plan, request.model_files, updates_dtype=True)
    if request.marks is not None and request.marks.checksums is not None:
        plan = _numbered_from_zero(plan)
    # Last: from here on there is something to clean up. Two exports to one path meet here, and one is refused.
    draft = Draft(plan, source="export", extra=extra, marks=request.marks)
    publication = Publication(request.path, draft, overwrite=request.call.overwrite)
    building.enter_context(publication)
    for file in plan.files:
        publication.create(file)
    return RootExport(options, plan, publication, extra, notes)


def _numbered_from_zero(plan: Plan) -> Plan:
    """Return the plan of a delta with the names that other programs give to its files."""
    files = []
    for number, file in enumerate(plan.files):
        files.append(replace(file, name=f"model-{number:05d}-of-{len(plan.files):05d}.safetensors"))
    return replace(plan, files=tuple(files))


def publish(
    comm: Communicator,
    root: RootExport | None,
    write_plan: WritePlan,
    written: Written,
    request: ExportRequest,
    began: float,
) -> ExportReport:
    """Give the directory its name once all copies have turned out equal; the same report on every rank. Collective.

    Args:
        comm: the communicator.
        root: on root the export, with the directory under construction.
        write_plan: the plan by which all ranks have written.
        written: what the ranks have written.
        request: the arguments of the call.
        began: when the export began, by `time.perf_counter`.
    """
    report: ExportReport | None = None
    with comm.phase("publishing", timeout_s=request.call.stall_timeout_s):
        tensors = [] if root is None else list(root.plan.tensors.values())
        provenance = gather_provenance(comm, write_plan, written.receipts, tensors)
        if root is not None:
            if written.uploaded is not None:
                root.publication.build.add_all(written.uploaded)
            else:
                for output, node in zip(root.publication.outputs, written.nodes, strict=True):
                    # The file was reserved without its header: a file that a crash leaves behind is no valid one.
                    output.finish(writes_header=node == comm.node_rank)
            # Only after the comparison: from here on readers see the checkpoint.
            small_files = root.publication.commit(provenance)
            # Of a part of a model, its config says other things than of the whole.
            is_part = not root.extra or request.options.include or request.options.exclude
            layout = root.options.new_layout()
            notes = root.notes + notes_on_written(root.plan, provenance, layout, None if is_part else root.extra)
            report = _report(root, small_files, notes, began, comm.world_size)
            _log.info("exported %s", report)
            for note in notes:
                _log.warning("exported to %s: %s", report.path, note)
    sent = from_root(comm, report, ExportReport | None, "the report")
    assert sent is not None
    return sent


def _report(
    root: RootExport, small_files: Sequence[tuple[str, int]], notes: tuple[str, ...], began: float, world_size: int
) -> ExportReport:
    plan = root.plan
    files = [*small_files]
    # By what was written, and not by what is there: another publisher may replace the directory at any time.
    for file, output in zip(plan.files, root.publication.outputs, strict=True):
        files.append((file.name, len(output.header) + file.data_nbytes))
    return ExportReport(
        root.publication.build.path,
        tuple(sorted(files)),
        plan.nbytes,
        plan.num_tensors,
        plan.aliases,
        time.perf_counter() - began,
        plan.nbytes_of_ranks(world_size),
        notes,
    )
