"""The steps of publishing one version: full or delta, its marks, and what is removed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from statexchange.checkpoint.publication import Draft, Publication, VersionMarks, listed_boxes
from statexchange.comm.communicator import Communicator, from_all, from_root
from statexchange.exchange.chosen_conversion import Conversion
from statexchange.exchange.export import converted_description, export_described
from statexchange.exchange.exporting import ExportRequest
from statexchange.exchange.published import Kept, PublishedVersion, digest_of_state, keep_boxes
from statexchange.exchange.receipts import gather_provenance
from statexchange.exchange.version_delta import Delta, difference, sampled_share
from statexchange.formats.version import DELTA_SCHEMA, VERSION_KEY, index_metadata
from statexchange.formats.version_frames import compressor
from statexchange.sharding.plan import Plan
from statexchange.state.describe import Description
from statexchange.storage import versions
from statexchange.storage.files import WINDOW_BYTES, digest

_LEAST_NBYTES = 1 << 16  # a delta of a small model may be as large, as each frame has a header


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of a publish.

    Attributes:
        path: the version's directory.
        version: its number.
        base_version: the number of the version that it is based on; None for a full one.
        kind: "full" or "delta".
        changed: how many tensors have changed since the last version; all for a full one.
        num_tensors: the number of all tensors.
        nbytes: the bytes of what was written of tensors: of a delta, compressed.
        total_nbytes: the bytes of all tensors.
        seconds: duration.
        stall_s: how long the call kept the caller.
        notes: as in `ExportReport`.
    """

    path: str
    version: int
    base_version: int | None
    kind: Literal["full", "delta"]
    changed: int
    num_tensors: int
    nbytes: int
    total_nbytes: int
    seconds: float = 0.0
    stall_s: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = 100 * self.nbytes / max(1, self.total_nbytes)
        what = f"{self.changed:,} of {self.num_tensors:,} tensors, {share:.1f} % of the bytes"
        return f"version {self.version} ({self.kind}: {what}) -> {self.path} in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class VersionOptions:
    """How versions are published.

    Attributes:
        path: the directory of versions.
        keep: how many of the newest versions stay.
        full_every: a version is full at least so often.
        max_delta: the largest delta, as a share of the bytes of all tensors.
        frames: "many" or "one" in an entry of a delta.
    """

    path: str
    keep: int
    full_every: int
    max_delta: float
    frames: Literal["many", "one"]


def check_installed() -> None:
    """Raise MissingExtraError if deltas cannot be made here: else that would come with the first one."""
    compressor()


def publish_version(
    comm: Communicator,
    described: Description,
    conversion: Conversion | None,
    request: ExportRequest,
    options: VersionOptions,
    run: str,
    number: int,
    last: PublishedVersion | None,
) -> tuple[PublishReport, PublishedVersion]:
    """Publish one version: a delta of the last one if that is smaller and possible, else a full one. Collective."""
    path = versions.version_path(options.path, run, number)
    described, left_options = converted_description(comm, described, conversion, request.options)
    request = replace(request, path=path, options=left_options)
    state_digest = digest_of_state(described, left_options)
    # `last` is there on all ranks or on none: it is set at the end of a publish that no rank has failed in.
    if last is not None and _may_be_delta(comm, last, state_digest, options):
        delta = _difference(comm, described, last, options)
        if delta is not None:
            return _publish_delta(comm, delta, request, number, last)
    bases: dict[int, int | None] = {}
    if last is not None:
        bases = last.bases
        last.boxes = None  # before another copy is made
    return _publish_full(comm, described, request, run, number, state_digest, bases)


def _may_be_delta(comm: Communicator, last: PublishedVersion, state_digest: str, options: VersionOptions) -> bool:
    """Whether the next version can be a delta: all ranks have the same tensors in the same boxes. Collective."""
    is_same = last.boxes is not None and last.state_digest == state_digest
    if comm.rank == 0:
        # Nobody could read a delta without it.
        is_same = is_same and last.number in versions.list_versions(options.path, last.run)
    if not all(from_all(comm, is_same, bool, "whether its state has the same tensors as before")):
        return False
    # A reader that has no version yet reads the whole chain: it must not cost more than half a model beside the model.
    return last.chain_length + 1 < options.full_every and last.chain_nbytes <= last.full_nbytes // 2


def _difference(
    comm: Communicator, described: Description, last: PublishedVersion, options: VersionOptions
) -> Delta | None:
    """Return what has changed since the last version; None if a full version is better. Collective."""
    boxes = last.boxes
    assert boxes is not None
    if sampled_share(comm, described, last.plan, boxes) > options.max_delta:
        return None
    # From here on `boxes` are of both versions; if the delta is not published, the next version must be full.
    last.boxes = None
    most_nbytes = int(options.max_delta * last.full_nbytes) + _LEAST_NBYTES
    one_frame = options.frames == "one"
    return difference(comm, described, last.plan, boxes, last.names, most_nbytes=most_nbytes, one_frame=one_frame)


def _publish_full(
    comm: Communicator,
    described: Description,
    request: ExportRequest,
    run: str,
    number: int,
    state_digest: str,
    bases: Mapping[int, int | None],
) -> tuple[PublishReport, PublishedVersion]:
    """Export all tensors, and keep a copy of this rank's part. Collective."""
    kept: Kept = []
    marks = VersionMarks({"version": f"{number:06d}"}, {VERSION_KEY: {"run": run, "number": number}})
    # Before the commit: if the copy fails on any rank, there is no version.
    exported = export_described(
        described,
        None,
        replace(request, marks=marks, on_written=partial(keep_boxes, kept, comm, described)),
        comm,
        None,
    )
    report, root = exported.report, exported.root
    (plan, boxes) = kept[0]
    names = from_root(comm, [] if root is None else list(root.plan.tensors), list[str], "the names of the tensors")
    published = PublishedVersion(run, number, state_digest, plan, names, boxes, "", (), {})
    published.full_nbytes = report.nbytes
    if root is not None:
        published.manifest = root.publication.manifest_digest
        published.tensors = tuple(root.plan.tensors.values())
        published.aliases = root.plan.aliases
    published.bases = {**bases, number: None}
    sizes = (report.num_tensors, report.num_tensors, report.nbytes, report.nbytes)
    return PublishReport(report.path, number, None, "full", *sizes, notes=report.notes), published


def _publish_delta(
    comm: Communicator, delta: Delta, request: ExportRequest, number: int, last: PublishedVersion
) -> tuple[PublishReport, PublishedVersion]:
    """Export the entries of a delta. Collective."""
    # The ranks have digested all boxes as for a full version, by the same plan: so copies are compared as there.
    with comm.phase("comparing copies"):
        provenance = gather_provenance(comm, last.plan, delta.receipts, last.tensors)
    marks = None
    if comm.rank == 0:
        marks = _marks_of_delta(delta, provenance, number, last)
    # The entries have the names and bytes that are written: what selects, renames or casts has been applied.
    options = replace(request.options, include=(), exclude=(), rename=(), layout=None, dtype=None)
    request = replace(request, options=options, marks=marks, model_files={})
    if delta.changed:
        exported = export_described(delta.described, None, request, comm, None)
        manifest = "" if exported.root is None else exported.root.publication.manifest_digest
    else:
        manifest = _publish_empty(comm, request)
    published = replace(last, number=number, boxes=delta.boxes, manifest=manifest, chain_length=last.chain_length + 1)
    published.chain_nbytes += delta.nbytes
    published.bases = {**last.bases, number: last.number}
    sizes = (len(delta.changed), len(last.plan.tensors), delta.nbytes, last.full_nbytes)
    return PublishReport(request.path, number, last.number, "delta", *sizes), published


def _marks_of_delta(delta: Delta, provenance: Mapping[str, Any], number: int, last: PublishedVersion) -> VersionMarks:
    """Return the index, the manifest and the checksums of a delta. Root only."""
    changed: dict[str, object] = {}
    checksums: dict[str, str] = {}
    for index in delta.changed:
        tensor = last.tensors[index]
        changed[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "boxes": listed_boxes(tensor, provenance[tensor.name]),
            "frames": delta.frames[index],
        }
        checksums[tensor.name] = delta.checksums[index]
    version = {
        "run": last.run,
        "number": number,
        "base": last.number,
        "base_manifest": last.manifest,
        "frame_nbytes": WINDOW_BYTES,
        "changed": changed,
        "unchanged": sorted(tensor.name for tensor in last.tensors if tensor.name not in changed),
    }
    manifest = {"schema": DELTA_SCHEMA, "aliases": dict(last.aliases), VERSION_KEY: version}
    return VersionMarks(index_metadata(number, last.number), manifest, checksums)


def _publish_empty(comm: Communicator, request: ExportRequest) -> str:
    """Publish a delta without changes, which has no files; return on root the digest of its manifest. Collective."""
    manifest = ""
    with comm.phase("publishing"):
        if comm.rank == 0:
            draft = Draft(Plan((), {}, digest(b"")), source="export", marks=request.marks)
            with Publication(request.path, draft) as publication:
                publication.commit({})
                manifest = publication.manifest_digest
    return manifest
