"""Merge a sharded checkpoint on disk into one directory, offline, in bounded memory, without torch."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import xxhash

from statexchange.checkpoint.publish import (
    BoxFact,
    OpenFile,
    Publication,
    check_target,
    target_path,
    travelling_files,
    write_manifest,
)
from statexchange.errors import CorruptError, ReplicaError
from statexchange.layout.plan import (
    FilePlan,
    Piece,
    Plan,
    PlanOptions,
    Rename,
    TensorPlan,
    plan_merge,
)
from statexchange.layout.shards import ITEMSIZE, Box
from statexchange.sources import Extent, Holder, Source, SourceTensor, open_source
from statexchange.storage import files
from statexchange.storage.regions import AHEAD_BYTES, WINDOW_BYTES, BoxReader, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MergeReport", "merge_checkpoint"]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did, or with `dry_run` would do. `files` are (name, bytes of tensors)."""

    path: str
    files: tuple[tuple[str, int], ...]
    nbytes: int
    num_tensors: int
    aliases: Mapping[str, str]
    seconds: float
    dry_run: bool


def merge_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    replicas: Literal["equal", "root"] = "equal",
    max_shard_size: int | str = "5GB",
    filename_pattern: str = "model{suffix}.safetensors",
    files_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Merge what lies at `source` into the checkpoint directory `out`, complete and durable or not at all.

    Not collective. Every element of every output tensor is proved to be supplied exactly once before anything
    is written, and every box is checked against its digest while it is copied. Options are those of
    `export_checkpoint`; `threads` deals output files (default: one per core, at most one per file);
    `on_progress(done, total)` counts bytes.

    Raises NotFoundError, IncompleteError, OverlapError, CorruptError, ReplicaError, TargetExistsError,
    StorageError.
    """
    began = time.perf_counter()
    options = PlanOptions.of(
        include=include,
        exclude=exclude,
        rename=rename,
        max_shard_size=max_shard_size,
        filename_pattern=filename_pattern,
        replicas=replicas,
    )
    opened = open_source(source)
    plan = plan_merge(opened.holdings(), options)
    if replicas == "equal":
        check_replicas(opened, plan)
    travelling = travelling_files(files_from)
    path = target_path(out)
    if dry_run:
        check_target(path, overwrite=overwrite)
    else:
        with Publication(path, plan.digest, overwrite=overwrite) as publication:
            facts = _Merge(opened, plan, publication, on_progress).run(threads)
            write_manifest(publication, plan, facts, travelling=travelling, source=opened.kind)
            publication.commit()
    names = tuple((file.name, file.data_nbytes) for file in plan.files)
    return MergeReport(path, names, plan.nbytes, plan.num_tensors, plan.aliases, time.perf_counter() - began, dry_run)


def extent_of(source: Source, tensor: TensorPlan, holder: int, box_index: int) -> Extent:
    """Where a piece's bytes lie."""
    return source.holders[holder].tensors[tensor.source].extents[box_index]


def check_replicas(source: Source, plan: Plan) -> None:
    """ReplicaError unless the copies of each box equal the one that is taken, and tied tensors each other."""
    for file in plan.files:
        for tensor in file.tensors:
            for piece in tensor.pieces:
                _check_piece(source, tensor, piece)
    for holder in source.holders:
        for alias, kept in holder.aliases.items():
            _check_tied(holder, alias, kept)


def _check_tied(holder: Holder, alias: str, kept: str) -> None:
    one, other = holder.tensors.get(alias), holder.tensors.get(kept)
    if one is None or other is None or one.extents == other.extents:  # one thing under two names
        return
    if _digests(one) != _digests(other):
        raise ReplicaError(f"is called tied to {kept!r}, but differs", name=alias, rank=holder.rank, path=holder.path)


def _digests(tensor: SourceTensor) -> list[str]:
    return [tensor.digest_of(index) for index in range(len(tensor.extents))]


def _check_piece(source: Source, tensor: TensorPlan, piece: Piece) -> None:
    if not piece.replicas:
        return
    ours = source.holders[piece.holder].tensors[tensor.source].digest_of(piece.box_index)
    for holder, index in piece.replicas:
        theirs = source.holders[holder].tensors[tensor.source]
        if theirs.digest_of(index) != ours:
            rank, other = source.holders[piece.holder].rank, source.holders[holder].rank
            raise ReplicaError(
                f"ranks {rank} and {other} hold different values for region {piece.box}; "
                'to take the lowest rank\'s, replicas="root" (--replicas root)',
                name=tensor.source,
                rank=other,
                path=theirs.extents[index].path,
            )


class _Merge:
    """One merge, from a proved plan to finished files."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        publication: Publication,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._publication = publication
        self._on_progress = on_progress
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, threads: int | None) -> dict[str, list[BoxFact]]:
        """Write all files; returns the facts of every box."""
        opened = [self._publication.create(file) for file in self._plan.files]
        facts: dict[str, list[BoxFact]] = {}
        with ThreadPoolExecutor(max(1, min(threads or os.cpu_count() or 1, len(opened)))) as pool:
            writing = [pool.submit(self._write_file, *pair) for pair in zip(self._plan.files, opened, strict=True)]
            try:
                for written in as_completed(writing):
                    facts |= written.result()
            except BaseException:
                self._stop.set()  # the others end at their next window
                raise
        return facts

    def _write_file(self, plan: FilePlan, opened: OpenFile) -> dict[str, list[BoxFact]]:
        memory = memoryview(bytearray(2 * WINDOW_BYTES))
        with files.OpenFiles() as inputs:
            facts = {tensor.name: self._write_tensor(tensor, opened, inputs, memory) for tensor in plan.tensors}
        opened.finish()
        return facts

    def _write_tensor(
        self, tensor: TensorPlan, opened: OpenFile, inputs: files.OpenFiles, memory: memoryview
    ) -> list[BoxFact]:
        readers = [self._reader(tensor, piece, inputs) for piece in tensor.pieces]
        waiting = deque(readers)
        at = opened.offset_of(tensor)
        for window in windows(tensor.shape, ITEMSIZE[tensor.dtype]) if tensor.nbytes else ():
            if self._stop.is_set():
                raise RuntimeError("another file of this merge failed")
            nbytes = window.numel * ITEMSIZE[tensor.dtype]
            self._fill(memory[:nbytes], window, waiting, memory[WINDOW_BYTES:])
            files.pwrite_all(opened.fd, memory[:nbytes], at, opened.path)
            at += nbytes
        return [self._fact(tensor, piece, reader) for piece, reader in zip(tensor.pieces, readers, strict=True)]

    def _fill(self, buffer: memoryview, window: Box, waiting: deque[BoxReader], bounce: memoryview) -> None:
        """One window's bytes, from readers in the order of their first elements; those done are dropped."""
        last = tuple(end - 1 for end in window.ends)
        for reader in takewhile(lambda reader: reader.box.offsets <= last, waiting):
            self._count(reader.copy_into(buffer, window, bounce))
        while waiting and not waiting[0].left:
            waiting.popleft()

    def _reader(self, tensor: TensorPlan, piece: Piece, inputs: files.OpenFiles) -> BoxReader:
        extent = extent_of(self._source, tensor, piece.holder, piece.box_index)
        ahead = AHEAD_BYTES // len(tensor.pieces)
        hasher = xxhash.xxh3_128()
        return BoxReader(inputs, extent.path, extent.begin, piece.box, tensor.dtype, hasher, extent.strides, ahead)

    def _fact(self, tensor: TensorPlan, piece: Piece, reader: BoxReader) -> BoxFact:
        extent = extent_of(self._source, tensor, piece.holder, piece.box_index)
        rank = self._source.holders[piece.holder].rank
        found = reader.digest()
        if extent.digest is not None and found != extent.digest:
            raise CorruptError(
                "bytes differ from their digest",
                name=tensor.source,
                rank=rank,
                path=extent.path,
                expected=extent.digest,
                found=found,
            )
        return BoxFact(rank, found)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._plan.nbytes)
