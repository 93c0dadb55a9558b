"""Merge a sharded checkpoint on disk into one directory, offline, in bounded memory, without torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import xxhash

from statexchange.checkpoint.convert import ConvertingReader
from statexchange.checkpoint.extra_files import FilesFrom, extra_files
from statexchange.checkpoint.index import BoxFact
from statexchange.checkpoint.notes import check_readable, kept_metadata, notes_about
from statexchange.checkpoint.publication import PlannedFile, Publication, check_publication, target_path
from statexchange.errors import (
    InvalidArgumentError,
    ReplacedError,
    ReplicaError,
    UnsafeError,
    excerpt,
    without_secrets,
)
from statexchange.formats import rank_files
from statexchange.formats.registry import open_source, opened, read_place
from statexchange.formats.source import Holder, Source, SourceTensor
from statexchange.sharding.copies import check_copies, replica_error
from statexchange.sharding.options import ExportOptions, Rename, Replicas
from statexchange.sharding.plan import FilePlan, Holding, Piece, Plan, TensorPlan, plan_merge
from statexchange.sharding.rules import Layout
from statexchange.sharding.shards import Box
from statexchange.storage.byte_range import ByteRange
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.json_text import parse_json
from statexchange.storage.place import Place, open_place
from statexchange.storage.regions import AHEAD_BYTES, BoxReader, windows
from statexchange.storage.store import given_path, is_url
from statexchange.tensors import ITEMSIZE, DType
from statexchange.units import format_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MergeReport", "PlannedTensor", "merge_checkpoint"]

_log = logging.getLogger(__name__)

# What wrappers put before every name (DistributedDataParallel, torch.compile), and no model calls a part of its own.
_WRAPPERS = ("module.", "_orig_mod.")
# What a whole model's state dict may begin with, which therefore shows that a "model." before it is a wrapping.
_TOPS = ("model.", "lm_head.", "transformer.", *_WRAPPERS)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output tensor of the plan: its file and the ranks that supply its boxes."""

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_boxes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of a merge, or of its dry run.

    `files` are (name, bytes of tensors); `notes` say what was done to names, what was not written, and what may not
    have been meant; `reused` the files that a killed merge had finished already; `tensors` is filled by a dry run only.
    """

    path: str
    files: tuple[tuple[str, int], ...]
    nbytes: int
    num_tensors: int
    aliases: Mapping[str, str]
    seconds: float
    dry_run: bool
    notes: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    tensors: tuple[PlannedTensor, ...] = ()

    def __str__(self) -> str:
        dry = "dry run: " if self.dry_run else ""
        return f"{dry}{format_transfer(self.num_tensors, self.nbytes, self.seconds)} -> {self.path}"


def merge_checkpoint(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    layout: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    replicas: Replicas = "equal",
    dtype: DType | None = None,
    max_shard_size: int | str = "5GB",
    filename_pattern: str = "model{suffix}.safetensors",
    files_from: FilesFrom = None,
    overwrite: bool = False,
    resume: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Merge what lies at `source` into the checkpoint directory `out`, complete and durable or not at all.

    Not collective. Every element of every output tensor is proved to be supplied exactly once before anything
    is written, and every box is checked against its digest while it is copied. Options are those of
    `export_checkpoint`; `threads` deals output files (default: one per core, at most one per file);
    `on_progress(done, total)` counts bytes.

    `layout` says where tensors belong that do not say it themselves (`statexchange.sharding.rules`): a mapping or
    the path of a JSON file. Each safetensors file of a directory then is one rank's. Its patterns, `include` and
    `exclude` mean names as the source has them (`include` and `exclude` as the layout makes them, if it renames).

    `dtype` ("float16", "bfloat16", "float32", "float64" or torch's) is for floating tensors of these dtypes; all others
    stay as they are. Digests in the manifest are of the bytes written.

    Names that all begin with ``module.`` or ``_orig_mod.`` lose it, before `rename`: no model has such names itself.
    Where ``model.`` seems to wrap a whole model (as in torch DCP of ``{"model": ...}``), a note says how to remove it.

    A source that is replaced while it is read is read again, once; what is changed while it is copied is not published.

    A merge into a directory that was killed and is run again with the same options and unchanged sources goes on after
    the output files that it had finished, if its process has provably ended: it ran on this host since the last boot.
    With `resume` the caller says so of a process of another host; if it runs after all, it fails.

    Entries of a source that are no tensors are not written, and notes name them; so do notes name tensors that look
    like optimizer state. A tensor that is not supported is an error unless it is left out by `include` or `exclude`.
    Text metadata of safetensors files on which all files agree is kept.

    `dry_run` writes nothing and raises what the merge would raise before it copies the first byte: everything but what
    only the bytes show, which `verify` reads.

    Raises NotFoundError, IncompleteError, OverlapError, CorruptError, ReplicaError, ReplacedError, TargetExistsError,
    UnsafeError, InvalidArgumentError, UnsupportedError, StorageError.
    """
    began = time.perf_counter()
    options = ExportOptions(
        include, exclude, rename, replicas, dtype, max_shard_size, filename_pattern, _read_layout(layout)
    )

    def merge_once() -> MergeReport:
        with contextlib.ExitStack() as holding:
            opened, reductions = _open(source, options)
            holding.callback(opened.close)
            return _merged(opened, reductions)

    def _merged(opened: Source, reductions: Mapping[str, str]) -> MergeReport:
        check_readable(opened, options)
        holdings = opened.holdings()
        chosen, notes = _unwrapped(opened.kind, holdings, options)
        plan = plan_merge(holdings, chosen, basis=_basis(opened, options, reductions), reductions=reductions)
        if options.replicas == "equal":
            check_replicas(opened, plan)
        extra = extra_files(files_from, plan)
        metadata, lost = kept_metadata(opened)
        sources = [tensor.source for file in plan.files for tensor in file.tensors]
        notes += (*notes_about(opened, sources, options), *lost)
        target = target_path(path)
        reused: tuple[str, ...] = ()
        _check_apart(opened, target)
        if dry_run:
            check_publication(target, plan, extra=extra, metadata=metadata, overwrite=overwrite, resume=resume)
        else:
            with Publication(
                target,
                plan,
                source=opened.kind,
                extra=extra,
                metadata=metadata,
                overwrite=overwrite,
                reuse=True,
                resume=resume,
            ) as publication:
                target = publication.path
                reused = tuple(sorted(publication.finished))
                facts = _Merge(opened, plan, publication, on_progress).run(threads)
                opened.check_unchanged()  # what was changed in place while it was copied is half old, half new
                publication.commit(facts)
        report = MergeReport(
            target,
            tuple((file.name, file.data_nbytes) for file in plan.files),
            plan.nbytes,
            plan.num_tensors,
            plan.aliases,
            time.perf_counter() - began,
            dry_run,
            notes,
            reused,
            _planned(opened, plan) if dry_run else (),
        )
        _log.info("merged %s", report)
        return report

    try:
        return merge_once()
    except ReplacedError:
        return merge_once()


def _check_apart(source: Source, path: str) -> None:
    """A store has no second name under which a checkpoint could be built while its old objects are read."""
    below = f"{without_secrets(path)}/"
    if is_url(path) and any(extent.path.startswith(below) for _, t in source.shards() for extent in t.extents):
        raise UnsafeError("refused: the source lies in the target, whose objects would be replaced", path=path)


def _read_layout(layout: Mapping[str, Any] | str | os.PathLike[str] | None) -> Any:
    """The layout as it was given, or parsed from its file if that is a path."""
    if not isinstance(layout, str | os.PathLike):
        return layout
    with open_place(given_path(layout, "a layout file")) as place:
        if place.file is None:
            raise InvalidArgumentError("a layout is a JSON file, and this is a directory", path=place.path)
        return Layout.parse(parse_json(place.store.read_small(place.file), place.path))


def _open(source: str | os.PathLike[str], options: ExportOptions) -> tuple[Source, Mapping[str, str]]:
    """The source, laid out if a layout is given, and how copies of its tensors are reduced, by name."""
    if options.layout is None:
        return open_source(source), {}
    return rank_files.lay_out(opened(source, _read_plain, strict=True), options.new_layout())


def _read_plain(place: Place, *, strict: bool) -> Source:
    """Read the files of a directory that say nothing of parts as one rank's each, anything else as what it is."""
    if rank_files.matches(place):
        return rank_files.read(place, strict=strict)
    return read_place(place, strict=strict)


def _unwrapped(kind: str, holdings: Sequence[Holding], options: ExportOptions) -> tuple[ExportOptions, tuple[str, ...]]:
    """Options that remove wrappers which begin every selected name, and what to say about it."""
    names = {shard.name for holding in holdings for shard in holding.shards if options.wants(shard.name)}
    ends = (min(names, default=""), max(names, default=""))  # what both begin with, all names begin with
    shortest, end = min(map(len, names), default=0), 0
    while found := [w for w in _WRAPPERS if end + len(w) < shortest and all(n.startswith(w, end) for n in ends)]:
        end += len(found[0])
    if wrapper := ends[0][:end]:
        pattern, rename = f"^{re.escape(wrapper)}", options.rename
        given = rename if callable(rename) else None
        unwrap = (lambda name: given(name.removeprefix(wrapper))) if given else ((pattern, ""), *rename)  # type: ignore[misc]
        text = f"names lost the wrapper {excerpt(wrapper)} that all of them began with"
        return replace(options, rename=unwrap), (text,)
    inner = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    if inner and len(inner) == len(names) and not options.rename:
        sure = any(name.startswith(_TOPS) for name in inner)
        if sure or kind == "dcp":  # where saving {"model": ...} is the custom
            what = (
                "which seems to wrap a whole model" if sure else "which may be a wrapper around the model's own names"
            )
            line = 'rename=[(r"^model\\.", "")] (--rename "^model\\.=")'
            return options, (f"all names begin with 'model.', {what}: to remove it, {line}",)
    return options, ()


def _basis(source: Source, options: ExportOptions, reductions: Mapping[str, str]) -> str:
    """A digest of all that the merged bytes depend on beside the names: the sources' headers, sizes and times."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(fact: Any) -> None:
        hasher.update(json.dumps(fact, separators=(",", ":")).encode())

    add([options.replicas, options.dtype, sorted(reductions.items())])
    for holder in source.holders:
        add([holder.rank, sorted(holder.aliases.items())])
        for tensor in holder.tensors.values():
            add([tensor.shard.to_json(), [[e.begin, e.nbytes, e.digest, e.strides] for e in tensor.extents]])
        add(holder.file.version)
    return hasher.hexdigest()


def _planned(source: Source, plan: Plan) -> tuple[PlannedTensor, ...]:
    def ranks(tensor: TensorPlan) -> tuple[int, ...]:
        return tuple(sorted({source.holders[piece.holder].rank for piece in tensor.pieces}))

    return tuple(
        PlannedTensor(t.name, t.source, t.dtype, t.shape, file.name, len(t.pieces), ranks(t))
        for file in plan.files
        for t in file.tensors
    )


def extent_of(source: Source, tensor: TensorPlan, holder: int, box_index: int) -> ByteRange:
    """Return the byte range of a piece."""
    return source.holders[holder].tensors[tensor.source].extents[box_index]


def check_replicas(source: Source, plan: Plan) -> None:
    """ReplicaError unless the copies of each box equal the one that is taken, and tied tensors each other."""
    for file in plan.files:
        for tensor in file.tensors:

            def digest_of(holder: int, index: int, name: str = tensor.source) -> str:
                return source.holders[holder].tensors[name].digest_of(index)

            def error(tensor: TensorPlan, box: Box, holder: int, other: int) -> ReplicaError:
                advice = (
                    f'if each holds a part, a layout says so (--layout): {{"{tensor.source}": {{"dim": 0}}}}; to take '
                    'the lowest rank\'s, replicas="root" (--replicas root)'
                )
                ranks = source.holders[holder].rank, source.holders[other].rank
                return replica_error(tensor.source, box, *ranks, advice, path=source.holders[other].path)

            for piece in tensor.pieces:
                check_copies(tensor, piece, digest_of, error)
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


_Reader = BoxReader | ConvertingReader


def _facts_of(plan: FilePlan, recorded: Any) -> dict[str, list[BoxFact]]:
    """The facts of a file that a killed merge had finished."""
    return {t.name: [BoxFact(*fact) for fact in facts] for t, facts in zip(plan.tensors, recorded, strict=True)}


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
        facts: dict[str, list[BoxFact]] = {}
        for file in self._plan.files:
            if file.name in self._publication.finished:
                facts |= _facts_of(file, self._publication.finished[file.name])
                self._count(file.data_nbytes)
        todo = [file for file in self._plan.files if file.name not in self._publication.finished]
        with ThreadPoolExecutor(max(1, min(threads or os.cpu_count() or 1, len(todo)))) as pool:
            opened = list(pool.map(self._publication.create, todo))  # all room is there before anything is written
            writing = [pool.submit(self._write_file, *pair) for pair in zip(todo, opened, strict=True)]
            try:
                for written in as_completed(writing):
                    facts |= written.result()
            except BaseException:
                self._stop.set()  # the others end at their next window
                raise
        return facts

    def _write_file(self, plan: FilePlan, opened: PlannedFile) -> dict[str, list[BoxFact]]:
        memory = memoryview(bytearray(4 * WINDOW_BYTES))
        facts = {tensor.name: self._write_tensor(tensor, opened, memory) for tensor in plan.tensors}
        opened.finish()
        self._publication.record(
            plan.name, [[[fact.rank, fact.digest] for fact in facts[t.name]] for t in plan.tensors]
        )
        return facts

    def _write_tensor(self, tensor: TensorPlan, opened: PlannedFile, memory: memoryview) -> list[BoxFact]:
        readers = [self._reader(tensor, piece) for piece in tensor.pieces]
        waiting = deque(readers)
        at = opened.offset_of(tensor)
        widest = max((ITEMSIZE[self._held_dtype(tensor, piece)] for piece in tensor.pieces), default=0)
        for window in windows(tensor.shape, max(widest, ITEMSIZE[tensor.dtype])) if tensor.nbytes else ():
            if self._stop.is_set():
                raise RuntimeError("another file of this merge failed")
            nbytes = window.numel * ITEMSIZE[tensor.dtype]
            self._fill(memory[:nbytes], window, waiting, memory[WINDOW_BYTES:])
            opened.write(memory[:nbytes], at)
            at += nbytes
        return [self._fact(tensor, piece, reader) for piece, reader in zip(tensor.pieces, readers, strict=True)]

    def _fill(self, buffer: memoryview, window: Box, waiting: deque[_Reader], bounce: memoryview) -> None:
        """One window's bytes, from readers in the order of their first elements; those done are dropped."""
        last = tuple(end - 1 for end in window.ends)
        for reader in takewhile(lambda reader: reader.box.offsets <= last, waiting):
            self._count(reader.copy_into(buffer, window, bounce))
        while waiting and not waiting[0].left:
            waiting.popleft()

    def _held_dtype(self, tensor: TensorPlan, piece: Piece) -> str:
        """The dtype in which a piece's supplier has it."""
        return self._source.holders[piece.holder].tensors[tensor.source].shard.dtype

    def _reader(self, tensor: TensorPlan, piece: Piece) -> _Reader:
        held = self._held_dtype(tensor, piece)
        if held == tensor.dtype and tensor.reduce is None:
            return self._box_reader(tensor, piece, piece.holder, piece.box_index)
        suppliers = [(piece.holder, piece.box_index), *(piece.replicas if tensor.reduce is not None else ())]
        readers = [self._box_reader(tensor, piece, *supplier) for supplier in suppliers]
        return ConvertingReader(readers, held, tensor.dtype, tensor.reduce, xxhash.xxh3_128())

    def _box_reader(self, tensor: TensorPlan, piece: Piece, holder: int, box_index: int) -> BoxReader:
        extent = extent_of(self._source, tensor, holder, box_index)
        dtype = self._source.holders[holder].tensors[tensor.source].shard.dtype
        copies = 1 + len(piece.replicas) if tensor.reduce is not None else 1
        ahead = AHEAD_BYTES // (len(tensor.pieces) * copies)
        return BoxReader(extent, piece.box, dtype, ahead)

    def _fact(self, tensor: TensorPlan, piece: Piece, reader: _Reader) -> BoxFact:
        suppliers = [(piece.holder, piece.box_index), *piece.replicas]
        readers = reader.readers if isinstance(reader, ConvertingReader) else [reader]
        for (holder, _), one in zip(suppliers, readers, strict=False):
            one.digest.check(tensor.source, self._source.holders[holder].rank)
        return BoxFact(self._source.holders[piece.holder].rank, reader.hexdigest())

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._plan.nbytes)
