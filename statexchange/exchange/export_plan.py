"""Agree on the plan of an export: ranks describe their boxes, root proves the cover, opens the target and tells all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from statexchange.checkpoint.extra_files import extra_files, given_files
from statexchange.checkpoint.notes import note_on_extra_state, notes_on_tensors
from statexchange.checkpoint.publication import Publication
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError
from statexchange.exchange.converting import Conversion, convert_live
from statexchange.exchange.rank_metadata import (
    RankMetadata,
    check_metadata,
    gather_distinct,
    parse_metadata,
    rank_shards,
    reductions_of,
)
from statexchange.formats.config_check import unties_heads, without_heads
from statexchange.messages import decode, encoded
from statexchange.sharding.options import CallOptions, ExportOptions
from statexchange.sharding.plan import Plan, RankShards, plan_merge
from statexchange.sharding.write_plan import WriteFile, WritePlan, WriteTensor
from statexchange.state.describe import Description
from statexchange.storage.publish.build import OutputFile

__all__ = ["Clock", "ExportRequest", "RootExport", "agree_on_plan"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The checked arguments of `export_checkpoint`; `model_files` are the files that the model itself has, on root."""

    path: str
    options: ExportOptions
    call: CallOptions
    conversion: Conversion | None
    model_files: Mapping[str, bytes]


class Clock:
    """Seconds and bytes by phase."""

    def __init__(self, began: float | None) -> None:
        self.began = self._last = time.perf_counter() if began is None else began
        self.phases: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    def lap(self, phase: str, nbytes: int = 0) -> None:
        """End a phase, in which `nbytes` were moved."""
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self.nbytes[phase] = nbytes
        self._last = now


@dataclass(slots=True)
class RootExport:
    """An export as root alone has it: what is written, where, and what there is to say of it.

    Attributes:
        options: the options that are left after a conversion.
        plan: the files and their tensors.
        publication: the directory under construction.
        outputs: its files, in the order of the plan.
        extra: the small files beside them.
        notes: for the report.
    """

    options: ExportOptions
    plan: Plan
    publication: Publication
    outputs: Sequence[OutputFile]
    extra: Mapping[str, bytes]
    notes: tuple[str, ...]

    def write_plan(self, probe: str) -> WritePlan:
        """Return the plan by which each rank writes its part."""
        files, tensors = [], []
        for number, (file, output) in enumerate(zip(self.plan.files, self.outputs, strict=True)):
            files.append(WriteFile(output.path, output.is_reserved))
            for tensor in file.tensors:
                place = (number, output.offset_of(tensor))
                tensors.append(
                    WriteTensor(*place, tensor.shape, tensor.dtype, tensor.source, tensor.reduce, tensor.pieces)
                )
        return WritePlan(tuple(files), tuple(tensors), probe, self.options.replicas == "equal")


def agree_on_plan(
    comm: Communicator,
    described: Description,
    request: ExportRequest,
    clock: Clock,
    building: contextlib.ExitStack,
) -> tuple[Description, WritePlan, RootExport | None]:
    """Return this rank's tensors by their names in the plan, the plan, and on root what it keeps of it. Collective.

    The directory under construction is abandoned at the end of `building`, unless it is committed.
    """
    converted, options = convert_live(comm, described, request.conversion, request.options)
    described = replace(converted, extra_state=described.extra_state)
    # The options as they were given: a conversion has applied its patterns, which must be equal on all ranks, too.
    metadata_here = RankMetadata.of(described, request.options.texts())
    metadata, nbytes = gather_distinct(comm, encoded(metadata_here, RankMetadata), root=0)
    clock.lap("describe", nbytes)
    root: RootExport | None = None
    plan: WritePlan | None = None
    data = b""
    with comm.phase("planning"):
        if comm.rank == 0:
            parsed = parse_metadata(metadata, comm.rank, metadata_here)
            root, plan = _planned(parsed, request, options, building)
            data = encoded(plan, WritePlan)
    sent = comm.all_gather_bytes(data, operation="the plan")[0]
    with comm.phase("reading the plan"):
        if plan is None:
            plan = decode(sent, WritePlan, "the plan", 0, partial(WritePlan.check, world_size=comm.world_size))
    clock.lap("plan", len(sent))
    return described, plan, root


def _planned(
    metadata: Sequence[RankMetadata],
    request: ExportRequest,
    options: ExportOptions,
    building: contextlib.ExitStack,
) -> tuple[RootExport, WritePlan]:
    """Prove the cover, claim the target, and create the files. Root only."""
    layout = options.new_layout()
    check_metadata(metadata, layout)
    has_files = request.options.files_from is not None or bool(request.model_files)
    given = given_files(request.options.files_from) if has_files else None
    # transformers would give a head that its config does not tie, and that no file has, random values.
    is_untied = given is not None and unties_heads(given.config(request.model_files))
    by_rank = []
    for rank, shards in enumerate(rank_shards(metadata, layout)):
        aliases = metadata[rank].aliases
        by_rank.append(RankShards(rank, shards, without_heads(aliases) if is_untied else aliases))
    plan = plan_merge(by_rank, options, reductions=reductions_of(metadata))
    if not plan.num_tensors:
        has_tensors = any(holder.shards for holder in by_rank)
        reason = "include and exclude leave out every tensor" if has_tensors else "no rank's state has a tensor"
        raise InvalidArgumentError(f"there is nothing to export: {reason}")
    notes = notes_on_tensors(by_rank, plan, options)
    extra_state: list[str] = []
    for rank_metadata in metadata:
        extra_state += rank_metadata.extra_state
    if extra_state:
        notes += note_on_extra_state(extra_state, request.options)
    extra: dict[str, bytes] = {}
    if given is not None:
        extra = extra_files(given.contents, plan, request.model_files, updates_dtype=True)
    # Last: from here on there is something to clean up. Two exports to one path meet here, and one is refused.
    publication = Publication(request.path, plan, source="export", extra=extra, overwrite=request.call.overwrite)
    building.enter_context(publication)
    outputs = [publication.create(file) for file in plan.files]
    root = RootExport(options, plan, publication, outputs, extra, notes)
    # Other hosts look for the first file, and write in place if they see it. Its directory has a random name, so that
    # no NFS client can have looked it up before, and remember that it was absent.
    return root, root.write_plan(outputs[0].path)
