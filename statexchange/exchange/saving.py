"""One save of described state: every rank writes its own file into root's build, and root publishes it.

1. Root opens the build of the target (storage/publish/build.py) and sends its key and the save's random id.
2. Ranks agree who writes the tensors that several of them have with equal bytes (box_writers.py).
3. Each rank joins the build, writes its tensor file into it, writes or links its files of frozen parameters
   (frozen_files.py), and sends their sizes and versions. If a layout or a mesh says
   that ranks have copies, their digests are compared (declared_copies.py).
4. Root checks that it sees all files and commits by the manifest. Only now does the save exist.

In a directory the key is the hidden name of the directory under construction, which root renames at the end. At a URL
it is the nonce of root's claim; each rank uploads its own file there, and the manifest comes last.

If a rank fails, root removes what was written. If root is killed, the next save to this target does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import InvalidArgumentError, NotFoundError, without_secrets
from statexchange.exchange.box_writers import Shares
from statexchange.exchange.declared_copies import may_have_copies
from statexchange.exchange.frozen_files import FrozenFile, FrozenFiles, Target
from statexchange.exchange.staging import shard_data
from statexchange.sharding.options import CallOptions, LoadOptions, check_equal_options
from statexchange.state.state_dict import SavedState
from statexchange.storage.publish import join_build, open_build
from statexchange.storage.publish.build import Build, WrittenFile
from statexchange.storage.tensorfile import (
    MANIFEST,
    SavedFile,
    SaveManifest,
    frozen_file_name,
    is_stray,
    rank_file_names,
    rank_metadata,
    removable_files,
)
from statexchange.units import format_bytes, format_shares, format_transfer


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save.

    `num_tensors` is the number of tensors of which this rank holds a part; `nbytes` are the bytes that all ranks wrote,
    and `rank_nbytes` those of each rank. `linked_nbytes` are those of files that were linked instead, or that S3 has
    copied. `step` is None for a save without one. `notes` name equal parts of ranks that a layout without a mesh has
    joined, as these may be copies, patterns of `exclude` that match nothing, and optimizers whose parameters are no
    longer those of this rank's modules.
    """

    path: str
    step: int | None
    num_tensors: int
    nbytes: int
    seconds: float
    rank_nbytes: tuple[int, ...]
    notes: tuple[str, ...] = ()
    linked_nbytes: int = 0

    def __str__(self) -> str:
        done = format_transfer(self.num_tensors, self.nbytes, self.seconds)
        if self.linked_nbytes:
            done = f"{done} and {format_bytes(self.linked_nbytes)} linked"
        return f"{done} -> {self.path} ({format_shares(self.rank_nbytes)})"


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The checked arguments of a save other than the state and the communicator.

    The manifest records `job`, the run of the caller's communicator; that of a background thread has another run. If
    `frozen` is given, parameters that do not train lie in files of their own; `newest` returns the path of the
    newest save on root, and `superseded` the ids of the saves that this one supersedes. Before it opens the target,
    root calls `before`; once the save is published, each rank calls `after` with the report, and `keep_in_memory`,
    which is collective, with the path and id of the save, the sizes of all ranks' files and this rank's file.
    """

    path: str
    layout: Mapping[str, Any] | None
    selection: LoadOptions
    job: str
    call: CallOptions
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    frozen: FrozenFiles | None = None
    newest: Callable[[], str] = str
    superseded: Callable[[], Sequence[str]] = tuple
    before: Callable[[], None] | None = None
    after: Callable[[SaveReport, Communicator], None] | None = None
    keep_in_memory: Callable[[str, str, Sequence[int], WrittenFile, Communicator], None] | None = None


@dataclass(frozen=True, slots=True)
class _Start:
    """The record that each rank sends at the start of a save.

    Attributes:
        save: a random id; root's identifies the save.
        key: on root the key of the build, else "".
        newest: on root the name of the newest save in the same directory; "" without one.
        num_frozen: the most files of frozen parameters that the rank may write.
        has_layout: whether the rank was given a layout.
        has_copies: whether a layout or a mesh may say that other ranks have copies of its boxes.
        options: what must be equal on all ranks, as text by name.
        is_empty: whether that selects nothing of its state.
        unmatched: the patterns of `include` that match nothing of its state.
        unused: the patterns of `exclude` that match nothing of its state.
    """

    save: str
    key: str
    newest: str
    num_frozen: int
    has_layout: bool
    has_copies: bool
    options: Mapping[str, str]
    is_empty: bool
    unmatched: Sequence[str]
    unused: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Written:
    """The files that a rank has written: the size of its own, those of frozen parameters, and all versions by name.

    An earlier save may have written files of frozen parameters.
    """

    nbytes: int
    frozen: Sequence[SavedFile]
    versions: Mapping[str, str]


class Published(NamedTuple):
    """The bytes that each rank wrote, and those of all files that an earlier save wrote."""

    rank_nbytes: tuple[int, ...]
    linked_nbytes: int


def open_target(request: SaveRequest, comm: Communicator, building: contextlib.ExitStack) -> Build | None:
    """Begin the directory of the save on root; return it there, None elsewhere. Collective.

    It is abandoned at the end of `building`, unless it is committed.
    """
    with comm.phase("opening the target", timeout_s=request.call.stall_timeout_s):
        if comm.rank != 0:
            return None
        if request.before is not None:
            request.before()
        check = removable_files if request.call.overwrite else None
        # The id of the build is random: an interrupted save is never continued, as the state has changed since.
        names = [*rank_file_names(comm.world_size), MANIFEST]
        build = open_build(request.path, secrets.token_hex(16), names, check=check, is_own=is_stray)
        return building.enter_context(build)


def exchange_starts(request: SaveRequest, saved: SavedState, build: Build | None, comm: Communicator) -> list[_Start]:
    """Return what each rank sends at the start; raise InvalidArgumentError if they do not fit. Collective."""
    tensors = saved.described.tensors.values()
    options = {
        "the name of the save": os.path.basename(request.path),
        "include": str(list(request.selection.include)),
        "exclude": str(list(request.selection.exclude)),
        # A copy in memory and links are collective, too: with them on some ranks alone the others would not come.
        "memory": str(request.keep_in_memory is not None),
        "link": str(request.frozen is not None),
    }
    start = _Start(
        save=secrets.token_hex(8),
        key="" if build is None else build.share(),
        newest="" if build is None or request.frozen is None else os.path.basename(request.newest()),
        num_frozen=len(set(saved.frozen.values())) if request.frozen is not None else 0,
        has_layout=request.layout is not None,
        has_copies=comm.world_size > 1 and any(may_have_copies(local, comm.world_size) for local in tensors),
        options=options,
        is_empty="" in saved.selection.left_out,
        unmatched=saved.selection.unmatched,
        unused=saved.selection.unused,
    )
    # One exchange for all that ranks have to know of each other: a save of a small model consists of such waits.
    starts = from_all(comm, start, _Start, "the start of the save")
    check_equal_options([start.options for start in starts], request.path)
    # A pattern may be for the tensors of one pipeline stage: it must match on some rank.
    unmatched = _of_all_ranks([start.unmatched for start in starts])
    if unmatched:
        text = f"include pattern {min(unmatched)!r} matches nothing in the state"
        raise InvalidArgumentError(text, path=request.path)
    if all(start.is_empty for start in starts):
        text = f"include={options['include']} and exclude={options['exclude']} select nothing of the state"
        raise InvalidArgumentError(text, path=request.path)
    return starts


def notes_on_selection(starts: Sequence[_Start]) -> tuple[str, ...]:
    """Return a note on each pattern of `exclude` that matches nothing on any rank."""
    unused = _of_all_ranks([start.unused for start in starts])
    return tuple(f"exclude pattern {pattern!r} matches nothing in the state" for pattern in sorted(unused))


def _of_all_ranks(patterns: Sequence[Sequence[str]]) -> set[str]:
    """Return the patterns that are among those of every rank."""
    return set.intersection(*map(set, patterns))


def expect_frozen_files(
    build: Build | None, starts: Sequence[_Start], request: SaveRequest, comm: Communicator
) -> None:
    """Record the names of the files of frozen parameters in the build, before a rank writes one. Collective."""
    names = []
    for rank, start in enumerate(starts):
        for number in range(start.num_frozen):
            names.append(frozen_file_name(rank, comm.world_size, number))
    if not names:  # on all ranks
        return
    # So that the next save removes them if this one is killed.
    with comm.phase("opening the target", timeout_s=request.call.stall_timeout_s):
        if build is not None:
            build.expect(names)


def write_rank_file(
    shares: Shares, saved: SavedState, request: SaveRequest, start: _Start, comm: Communicator
) -> WrittenFile:
    """Write this rank's file into the directory of root. Collective."""
    with comm.phase("saving", timeout_s=request.call.stall_timeout_s):
        extra = {"aliases": dict(saved.described.aliases), **saved.owners}
        metadata = rank_metadata(start.save, comm.rank, comm.world_size, saved.config, extra)
        shards = shard_data(shares.written)
        try:
            name = rank_file_names(comm.world_size)[comm.rank]
            member = join_build(request.path, start.key, MANIFEST)
            file = member.write_tensors(name, shards, metadata, comm.progress)
        except NotFoundError as error:
            raise _unseen(comm.rank, 0, request.path, comm) from error
        # What another rank relies on must be what was compared: live tensors may change while they are written.
        if shares.digests:
            file.content.check_unchanged(shares.digests)
        return file


def frozen_target(request: SaveRequest, start: _Start, aliases: Mapping[str, str]) -> Target:
    """Return the save as its files of frozen parameters need it; the newest one lies in the same directory."""
    newest = os.path.join(os.path.dirname(request.path), start.newest) if start.newest else ""
    return Target(request.path, start.key, start.save, newest, aliases)


def publish(
    build: Build | None,
    file: WrittenFile,
    frozen: Mapping[str, FrozenFile],
    index: str,
    request: SaveRequest,
    start: _Start,
    comm: Communicator,
) -> Published:
    """Give the directory its name once root sees the files of all ranks; return their sizes. Collective."""
    listed_here = []
    versions = {rank_file_names(comm.world_size)[comm.rank]: file.version}
    for of_key in frozen.values():
        listed_here.append(of_key.listed)
        versions[of_key.listed.name] = of_key.version
    part_here = _Written(file.content.nbytes, listed_here, versions)
    # Outside of the phase: a rank that has failed before takes part in the end of a phase, and in no collective in it.
    written = from_all(comm, part_here, _Written, "the written file")
    files: list[SavedFile] = []
    sizes, rank_nbytes, linked_nbytes = [], [], 0
    for part in written:
        sizes.append(part.nbytes)
        rank_nbytes.append(part.nbytes)
        files += part.frozen
        for listed in part.frozen:
            if listed.save == start.save:
                rank_nbytes[-1] += listed.nbytes
            else:
                linked_nbytes += listed.nbytes
    with comm.phase("publishing", timeout_s=request.call.stall_timeout_s):
        if build is not None:
            # On NFS a client may not see yet what another has written: a save is whole only if root sees all of it.
            _check_seen(build, written, comm)
            manifest = SaveManifest(
                start.save,
                request.job,
                time.time(),
                tuple(sizes),
                request.step,
                request.metrics,
                tuple(files),
                index,
                tuple(request.superseded()),
            )
            build.commit(MANIFEST, manifest.to_bytes())
    if request.frozen is not None:
        request.frozen.note_published(request.path, frozen)
    return Published(tuple(rank_nbytes), linked_nbytes)


def _check_seen(build: Build, written: Sequence[_Written], comm: Communicator) -> None:
    """Raise NotFoundError unless root's host sees what each rank has written. Root only."""
    versions: dict[str, str] = {}
    ranks: dict[str, int] = {}
    for rank, part in enumerate(written):
        versions |= part.versions
        ranks |= dict.fromkeys(part.versions, rank)
    try:
        build.add_all(versions)
    except NotFoundError as error:
        raise _unseen(0, ranks[os.path.basename(str(error.path))], build.path, comm) from error


def _unseen(rank: int, writer: int, path: str, comm: Communicator) -> NotFoundError:
    """Return the error for what `writer` has written and `rank` does not see; one of the two is rank 0."""
    text = (
        f"rank {rank} on {comm.hosts[rank]} does not see what rank {writer} on {comm.hosts[writer]} has written: pass "
        "the same shared directory, or URL, on all ranks"
    )
    return NotFoundError(text, rank=rank or writer, path=without_secrets(path))
