"""Merge a sharded checkpoint on disk into one published directory, offline, in bounded memory, without torch."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from statexchange.checkpoint.publish import BoxFact, OpenFile, Publication, travelling_files, write_manifest
from statexchange.errors import CorruptError, ReplicaError
from statexchange.layout.plan import FilePlan, Piece, Plan, PlanOptions, Rename, TensorPlan, parse_size, plan_merge
from statexchange.layout.shards import ITEMSIZE
from statexchange.sources import Extent, Source, open_source
from statexchange.storage import files
from statexchange.storage.regions import BoxReader, windows

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

    Not collective. Every element of every output tensor is proved to be supplied exactly once before anything is
    written, and every box is checked against its digest while it is copied. Options are those of `export_checkpoint`;
    `threads` deals output files (default: one per core, at most one per file); `on_progress(done, total)` counts bytes.

    Raises NotFoundError, IncompleteError, OverlapError, CorruptError, ReplicaError, TargetExistsError, StorageError.
    """
    began = time.perf_counter()
    options = PlanOptions(_patterns(include), _patterns(exclude), rename, parse_size(max_shard_size), filename_pattern, replicas)
    opened = open_source(source)
    plan = plan_merge(opened.holdings(), options)
    if replicas == "equal":
        check_replicas(opened, plan)
    travelling = travelling_files(files_from)
    path = os.path.abspath(os.fspath(out))
    if not dry_run:
        with Publication(path, plan.digest, overwrite=overwrite) as publication:
            facts = _Merge(opened, plan, publication, on_progress).run(threads)
            write_manifest(publication, plan, facts, travelling=travelling, source=opened.kind)
            publication.commit()
    names = tuple((file.name, file.data_nbytes) for file in plan.files)
    return MergeReport(path, names, plan.nbytes, plan.num_tensors, plan.aliases, time.perf_counter() - began, dry_run)


def _patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def extent_of(source: Source, tensor: TensorPlan, holder: int, box_index: int) -> Extent:
    """Where a piece's bytes lie."""
    return source.holders[holder].tensors[tensor.source].extents[box_index]


def check_replicas(source: Source, plan: Plan) -> None:
    """ReplicaError unless all copies of each box have the digest of the one that is taken."""
    for file in plan.files:
        for tensor in file.tensors:
            for piece in tensor.pieces:
                _check_piece(source, tensor, piece)


def _check_piece(source: Source, tensor: TensorPlan, piece: Piece) -> None:
    ours = extent_of(source, tensor, piece.holder, piece.box_index).digest
    for holder, index in piece.replicas:
        theirs = extent_of(source, tensor, holder, index)
        if theirs.digest != ours:
            rank, other = source.holders[piece.holder].rank, source.holders[holder].rank
            raise ReplicaError(
                f"ranks {rank} and {other} hold different values for region {piece.box}; to take the lowest rank's, "
                'replicas="root" (--replicas root)',
                name=tensor.source,
                rank=other,
                path=theirs.path,
            )


class _Merge:
    """One merge, from a proved plan to finished files."""

    def __init__(self, source: Source, plan: Plan, publication: Publication, on_progress: Callable[[int, int], None] | None) -> None:
        self._source = source
        self._plan = plan
        self._publication = publication
        self._on_progress = on_progress
        self._done = 0
        self._lock = threading.Lock()

    def run(self, threads: int | None) -> dict[str, list[BoxFact]]:
        """Write all files; returns the facts of every box."""
        opened = [self._publication.create(file) for file in self._plan.files]
        workers = max(1, min(threads or os.cpu_count() or 1, len(opened)))
        facts: dict[str, list[BoxFact]] = {}
        with ThreadPoolExecutor(workers) as pool:
            for result in pool.map(self._write_file, self._plan.files, opened):
                facts |= result
        return facts

    def _write_file(self, plan: FilePlan, opened: OpenFile) -> dict[str, list[BoxFact]]:
        facts = {tensor.name: self._write_tensor(tensor, opened) for tensor in plan.tensors}
        opened.finish()
        return facts

    def _write_tensor(self, tensor: TensorPlan, opened: OpenFile) -> list[BoxFact]:
        if not tensor.nbytes:
            return []
        at = opened.offset_of(tensor)
        with self._readers(tensor) as readers:
            for window in windows(tensor.shape, ITEMSIZE[tensor.dtype]):
                buffer = bytearray(window.numel * ITEMSIZE[tensor.dtype])
                for reader in readers:
                    reader.copy_into(buffer, window, self._count)
                files.pwrite_all(opened.fd, buffer, at, opened.path)
                at += len(buffer)
            return [self._fact(tensor, p, r) for p, r in zip(tensor.pieces, readers, strict=True)]

    @contextlib.contextmanager
    def _readers(self, tensor: TensorPlan) -> Iterator[list[BoxReader]]:
        import xxhash

        fds: dict[str, int] = {}
        try:
            readers = []
            for piece in tensor.pieces:
                extent = extent_of(self._source, tensor, piece.holder, piece.box_index)
                if extent.path not in fds:
                    fds[extent.path] = files.open_file(extent.path)
                readers.append(
                    BoxReader(fds[extent.path], extent.path, extent.begin, piece.box, tensor.dtype, xxhash.xxh3_128())
                )
            yield readers
        finally:
            for fd in fds.values():
                os.close(fd)

    def _fact(self, tensor: TensorPlan, piece: Piece, reader: BoxReader) -> BoxFact:
        extent = extent_of(self._source, tensor, piece.holder, piece.box_index)
        rank = self._source.holders[piece.holder].rank
        found = reader.digest()
        if extent.digest is not None and found != extent.digest:
            raise CorruptError(
                "bytes differ from their digest", name=tensor.source, rank=rank, path=extent.path, expected=extent.digest, found=found
            )
        return BoxFact(rank, found)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._plan.nbytes)
