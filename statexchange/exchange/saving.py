"""One save of described state: every rank writes its own file into root's build, and root publishes it.

1. Root opens the build of the target (storage/build.py) and sends its key and the save's random id.
2. Each rank joins the build, writes one tensor file into it, and sends its size and version. If a layout or a mesh says
   that ranks have copies, their digests are compared (declared_copies.py).
3. Root checks that it sees all files and commits by the manifest. Only now does the save exist.

In a directory the key is the hidden name of the directory under construction, which root renames at the end. At a URL
it is the nonce of root's claim; each rank uploads its own file there, and the manifest comes last.

If a rank fails, root removes what was written. If root is killed, the next save to this target does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from statexchange.checkpoint.notes import notes_on_equal_parts
from statexchange.checkpoint.publication import target_path
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, NotFoundError, type_text, without_secrets
from statexchange.exchange.declared_copies import DeclaredCopies, may_have_copies
from statexchange.exchange.placing import parameter_names, place_parts
from statexchange.exchange.progress import Progress
from statexchange.exchange.staging import Staging, shard_data
from statexchange.processes import collector_paused
from statexchange.settings import check_flags, check_timeout
from statexchange.sharding import records
from statexchange.sharding.rules import Layout
from statexchange.state.containers import children
from statexchange.state.describe import Description, State, describe
from statexchange.state.leaves import is_leaf
from statexchange.state.state_dict import encode_state, note_on_stale_optimizers, owners_of
from statexchange.storage.build import Build, WrittenFile
from statexchange.storage.location import location
from statexchange.storage.save_directory import (
    MANIFEST,
    SaveManifest,
    is_stray,
    rank_file_name,
    rank_metadata,
    removable_files,
)
from statexchange.storage.tensorfile import DigestedTensors
from statexchange.units import format_shares, format_transfer

__all__ = ["SaveReport", "SaveRequest", "SavedState", "describe_save", "save_described"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save.

    `num_tensors` is the number of tensors of which this rank holds a part; `nbytes` are the bytes of all ranks' files,
    `rank_nbytes` those of each rank's file. `step` is None for a save without one. `notes` name equal parts of ranks
    that a layout without a mesh has joined, as these may be copies, and optimizers whose parameters are no longer those
    of this rank's modules.
    """

    path: str
    step: int | None
    num_tensors: int
    nbytes: int
    seconds: float
    rank_nbytes: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = format_transfer(self.num_tensors, self.nbytes, self.seconds)
        return f"{done} -> {self.path} ({format_shares(self.rank_nbytes)})"


AfterSave: TypeAlias = Callable[[SaveReport, Communicator, DigestedTensors | None], None]
"""Takes the report, the communicator, and the content of this rank's file if it went to an object store."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a save other than the state and the communicator.

    The manifest records `job`, the run of the caller's communicator; that of a background thread has another run.
    Before it opens the target, root calls `before`; once the save is published, each rank calls `after`. `memory` says
    that `after` makes a copy in memory, which is collective.
    """

    path: str
    layout: Mapping[str, Any] | None
    job: str
    overwrite: bool
    stall_timeout_s: float
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    after: AfterSave | None = None
    memory: bool = False

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        layout: Mapping[str, Any] | None,
        job: str,
        overwrite: bool,
        stall_timeout_s: float,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        before: Callable[[], None] | None = None,
        after: AfterSave | None = None,
        memory: bool = False,
    ) -> SaveRequest:
        """Check and keep the arguments of a call."""
        check_timeout(stall_timeout_s, "stall_timeout_s")
        check_flags(overwrite=overwrite)
        target = target_path(path)
        return cls(target, layout, job, overwrite, stall_timeout_s, step, dict(metrics or {}), before, after, memory)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A rank's state as it is written: the tensors, described, all other values as JSON text, and what is whose.

    `notes` are for the report.
    """

    config: str
    owners: Mapping[str, Any]
    described: Description
    rules: Layout
    notes: tuple[str, ...]


def describe_save(state: State, layout: Mapping[str, Any] | None, rank: int) -> SavedState:
    """Describe the state of this rank. Not collective."""
    if not is_leaf(state) and children(state) is None:
        what = "a module, an optimizer, or a mapping or list of these and of tensors and values"
        raise InvalidArgumentError(f"the state is {type_text(state)}: give {what}")
    with collector_paused():
        config, tensors, names = encode_state(state)
        rules = _parse_layout(layout, tensors)
        described = describe(tensors, rules, rank)

        def has_rule(name: str) -> bool:
            return name in described.tensors and described.tensors[name].part is not None

        owners = owners_of(state, names, has_rule)
        return SavedState(config, owners, described, rules, note_on_stale_optimizers(state, names))


def _parse_layout(layout: Mapping[str, Any] | None, tensors: Mapping[str, Any]) -> Layout:
    """Parse the layout; an optimizer's tensor follows its parameter's rule if both have the same shape."""
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


@dataclass(frozen=True, slots=True)
class _Start:
    """The record that each rank sends at the start of a save.

    Attributes:
        name: the last part of the target's path.
        folder: the directory of the target on this rank; "" for a URL.
        save: a random id; root's identifies the save.
        key: on root the key of the build, else "".
        has_layout: whether the rank was given a layout.
        has_copies: whether a layout or a mesh may say that other ranks have copies of its boxes.
        memory: whether the rank makes a copy in memory.
    """

    name: str
    folder: str
    save: str
    key: str
    has_layout: bool
    has_copies: bool
    memory: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> _Start:
        *texts, layout, copies, memory = records.fields(raw, *cls.__dataclass_fields__)
        name, folder, save, key = map(records.text, texts)
        return cls(name, folder, save, key, records.flag(layout), records.flag(copies), records.flag(memory))


@dataclass(frozen=True, slots=True)
class _Written:
    """The file that a rank has written: its size and version, and the directory or URL in which the rank sees it."""

    nbytes: int
    version: str
    folder: str

    def to_json(self) -> dict[str, Any]:
        return {"nbytes": self.nbytes, "version": self.version, "folder": self.folder}

    @classmethod
    def from_json(cls, raw: Any) -> _Written:
        nbytes, version, folder = records.fields(raw, "nbytes", "version", "folder")
        return cls(records.count(nbytes), records.text(version), records.text(folder))


def save_described(saved: SavedState, request: SaveRequest, comm: Communicator, began: float) -> SaveReport:
    """Save described state as `save_checkpoint` does; the report counts seconds from `began`. Collective."""
    with contextlib.ExitStack() as building:
        build: Build | None = None
        with comm.phase("opening the target", timeout_s=request.stall_timeout_s):
            if comm.rank == 0:
                if request.before is not None:
                    request.before()
                check = removable_files if request.overwrite else None
                names = [*(rank_file_name(rank, comm.world_size) for rank in range(comm.world_size)), MANIFEST]
                build = building.enter_context(
                    location(request.path).open_build(secrets.token_hex(16), names, check=check, is_own=is_stray)
                )
        starts = _exchange_starts(request, saved, build, comm)
        described = saved.described
        if any(start.has_layout for start in starts):
            described = place_parts(comm, described, saved.rules)
        with comm.phase("saving", timeout_s=request.stall_timeout_s):
            file, folder = _write(described, saved, request.path, starts[0], comm)
        notes = saved.notes
        if any(start.has_copies for start in starts):
            notes += _compare_copies(saved, described, file.digests, comm)
        written = comm.all_gather_object(_Written(file.nbytes, file.version, folder).to_json())
        with comm.phase("publishing", timeout_s=request.stall_timeout_s):
            found = [
                records.parsed(raw, _Written.from_json, "the written file", rank) for rank, raw in enumerate(written)
            ]
            sizes = tuple(one.nbytes for one in found)
            if build is not None:
                _check_seen(build, found, comm)
                manifest = SaveManifest(starts[0].save, request.job, time.time(), sizes, request.step, request.metrics)
                build.commit(MANIFEST, manifest.to_bytes())
    seconds = time.perf_counter() - began
    shown = without_secrets(request.path)
    report = SaveReport(shown, request.step, len(described.tensors), sum(sizes), seconds, sizes, notes)
    if comm.rank == 0:
        _log.info("saved %s", report)
        for note in notes:
            _log.warning("%s: %s", shown, note)
    if request.after is not None:
        request.after(report, comm, file.content)
    return report


def _compare_copies(
    saved: SavedState, placed: Description, digests: Mapping[str, Sequence[str]], comm: Communicator
) -> tuple[str, ...]:
    """Raise ReplicaError if copies differ that a layout or mesh declares; return notes on equal parts. Collective."""
    copies = DeclaredCopies(comm, saved.described, placed, digests)
    copies.compare()
    notes = notes_on_equal_parts(saved.rules, copies.joined_parts()) if comm.rank == 0 else ()
    return records.parsed(comm.broadcast_object(notes), lambda raw: records.items(raw, records.text), "the notes", 0)


def _exchange_starts(request: SaveRequest, saved: SavedState, build: Build | None, comm: Communicator) -> list[_Start]:
    """Return what each rank sends at the start; raise InvalidArgumentError if they do not fit. Collective."""
    folder, name = os.path.split(request.path)
    ours = _Start(
        name,
        location(folder).local or "",
        save=secrets.token_hex(8),
        key="" if build is None else build.share(),
        has_layout=request.layout is not None,
        has_copies=comm.world_size > 1
        and any(may_have_copies(local, comm.world_size) for local in saved.described.tensors.values()),
        memory=request.memory,
    )
    sent = comm.all_gather_object(ours.to_json())
    starts = [records.parsed(raw, _Start.from_json, "the start of the save", rank) for rank, raw in enumerate(sent)]
    for rank, start in enumerate(starts):
        if start.name != starts[0].name:
            text = f"rank 0 saves to {starts[0].name} and rank {rank} to {start.name}: pass the same path on all ranks"
            raise InvalidArgumentError(text, rank=rank, path=request.path)
        if start.memory != starts[0].memory:
            text = (
                f"rank 0 has memory={starts[0].memory} and rank {rank} memory={start.memory}: pass the same "
                "to Checkpoints on all ranks"
            )
            raise InvalidArgumentError(text, rank=rank, path=request.path)
    return starts


def _write(
    described: Description, saved: SavedState, path: str, start: _Start, comm: Communicator
) -> tuple[WrittenFile, str]:
    """Write this rank's file into the build; return it, and where this rank looks for the build."""
    staging = Staging()
    name = rank_file_name(comm.rank, comm.world_size)
    extra = {"aliases": dict(described.aliases), **saved.owners}
    metadata = rank_metadata(start.save, comm.rank, comm.world_size, saved.config, extra)
    with collector_paused():
        progress = Progress(comm)
        shards = [shard_data(one, staging, progress) for one in described.tensors.values()]
    try:
        member = location(path).join_build(start.key, MANIFEST)
        return member.write_tensors(name, shards, metadata), member.folder
    except NotFoundError as error:
        raise _unseen(error, comm.rank, 0, path, comm, start.folder) from error


def _check_seen(build: Build, written: Sequence[_Written], comm: Communicator) -> None:
    """Raise NotFoundError unless root's host sees what each rank has written. Root only."""
    names = [rank_file_name(rank, comm.world_size) for rank in range(comm.world_size)]
    try:
        build.add_all({name: one.version for name, one in zip(names, written, strict=True)})
    except NotFoundError as error:
        rank = names.index(os.path.basename(str(error.path)))
        raise _unseen(error, 0, rank, build.path, comm, os.path.dirname(written[rank].folder)) from error


def _unseen(error: NotFoundError, rank: int, writer: int, path: str, comm: Communicator, folder: str) -> NotFoundError:
    """Return the error that says that `rank` does not see what `writer` has written to the directory `folder`.

    One of the two is rank 0; the error's `rank` is the other one.
    """
    seen_by, made_by = comm.hosts[rank], comm.hosts[writer]
    if location(path).is_remote:
        text = (
            f"{seen_by} does not see at this URL what rank {writer} on {made_by} has put there: give all ranks the "
            "same URL, endpoint and access"
        )
        return NotFoundError(text, rank=rank or writer, path=without_secrets(path))
    parent = os.path.dirname(path)
    text = (
        f"rank {rank} on {seen_by} does not see in {parent} what rank {writer} on {made_by} has written in {folder}: "
        "pass the same shared directory on all ranks"
    )
    return NotFoundError(text, rank=rank or writer, path=parent if rank else error.path)
