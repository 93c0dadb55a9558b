"""Merge a sharded checkpoint on disk into one directory, offline, in bounded memory, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from statexchange.checkpoint.convert import ConvertingReader, cast_holdings, float_name
from statexchange.checkpoint.publish import (
    BoxFact,
    FilesFrom,
    OpenFile,
    Publication,
    check_target,
    target_path,
    travelling_files,
    write_manifest,
)
from statexchange.checkpoint.publish_objects import ObjectPublication, OpenObject, check_url
from statexchange.errors import CorruptError, ReplicaError, UnsafeError, UnsupportedError
from statexchange.layout.plan import (
    FilePlan,
    Holding,
    Piece,
    Plan,
    PlanOptions,
    Rename,
    TensorPlan,
    plan_merge,
)
from statexchange.layout.rules import Layout
from statexchange.layout.shards import ITEMSIZE, Box
from statexchange.sources import Extent, Holder, Source, SourceTensor, open_source, rank_files
from statexchange.storage import files
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.object_store import is_url
from statexchange.storage.regions import AHEAD_BYTES, BoxReader, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MergeReport", "PlannedTensor", "merge_checkpoint"]

# What wrappers put before every name (DistributedDataParallel, torch.compile), and no model calls a part of its own.
_WRAPPERS = ("module.", "_orig_mod.")
# What a whole model's state dict may begin with, which therefore shows that a "model." before it is a wrapping.
_TOPS = ("model.", "lm_head.", "transformer.", *_WRAPPERS)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """Where one output tensor goes and comes from: `file`, and the `ranks` that supply its `num_boxes` boxes."""

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_boxes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did, or with `dry_run` would do. `files` are (name, bytes of tensors).

    `notes` are things to know about names; `reused` the files that a killed merge had finished already; `tensors` is
    filled by a dry run only.
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


def merge_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    layout: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    replicas: Literal["equal", "root"] = "equal",
    dtype: Any = None,
    max_shard_size: int | str = "5GB",
    filename_pattern: str = "model{suffix}.safetensors",
    files_from: FilesFrom = None,
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

    `layout` says where tensors belong that do not say it themselves, as `statexchange.layout.rules` tells: a mapping or
    the path of a JSON file. Each safetensors file of a directory then is one rank's. Its patterns, `include` and
    `exclude` mean names as the source has them (`include` and `exclude` as the layout makes them, if it renames).

    `dtype` ("float16", "bfloat16", "float32", "float64" or torch's) is for floating tensors of these dtypes; all others
    stay as they are. Digests in the manifest are of the bytes written.

    Names that all begin with ``module.`` or ``_orig_mod.`` lose it, before `rename`: no model has such names itself.
    Where ``model.`` seems to wrap a whole model (as in torch DCP of ``{"model": ...}``), a note says how to remove it.

    A merge that was killed and is run again with the same options and unchanged sources goes on after the output files
    that it had finished.

    Raises NotFoundError, IncompleteError, OverlapError, CorruptError, ReplicaError, TargetExistsError, UnsafeError,
    InvalidArgumentError, UnsupportedError, StorageError.
    """
    began = time.perf_counter()
    wanted = float_name(dtype)
    options = PlanOptions.of(
        include=include,
        exclude=exclude,
        rename=rename,
        max_shard_size=max_shard_size,
        filename_pattern=filename_pattern,
        replicas=replicas,
    )
    opened, reductions = _open(source, layout)
    holdings = opened.holdings()
    options, notes = _unwrapped(opened.kind, holdings, options)
    basis = _basis(opened, replicas, wanted, reductions)
    plan = plan_merge(list(cast_holdings(holdings, wanted)) if wanted else holdings, options, basis=basis)
    if replicas == "equal":
        check_replicas(opened, plan, reductions)
    travelling = travelling_files(files_from, plan)
    path = os.fspath(out) if is_url(os.fspath(out)) else target_path(out)
    reused: tuple[str, ...] = ()
    _check_apart(opened, path)
    if dry_run:
        check = check_url if is_url(path) else check_target
        check(path, overwrite=overwrite)
    else:
        with _publication(path, plan, overwrite=overwrite) as publication:
            reused = tuple(sorted(publication.finished))
            facts = _Merge(opened, plan, publication, reductions, on_progress).run(threads)
            write_manifest(publication, plan, facts, travelling=travelling, source=opened.kind)
            publication.commit()
    return MergeReport(
        path,
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


def _check_apart(source: Source, path: str) -> None:
    """A store has no second name under which a checkpoint could be built while its old objects are read."""
    below = path.rstrip("/") + "/"
    if is_url(path) and any(extent.path.startswith(below) for _, t in source.shards() for extent in t.extents):
        raise UnsafeError("refused: the source lies in the target, whose objects would be replaced", path=path)


def _publication(path: str, plan: Plan, *, overwrite: bool) -> Publication | ObjectPublication:
    if is_url(path):
        return ObjectPublication(path, overwrite=overwrite)
    return Publication(path, plan.digest, overwrite=overwrite, resume=True)


def _open(
    source: str | os.PathLike[str], layout: Mapping[str, Any] | str | os.PathLike[str] | None
) -> tuple[Source, Mapping[str, str]]:
    """The source, laid out if a layout is given, and how copies of its tensors are reduced, by name."""
    if layout is None:
        return open_source(source), {}
    raw: Any = layout
    if isinstance(layout, str | os.PathLike):
        path = os.fspath(layout)
        raw = files.parse_json(files.read_small(path), path)
    parsed = Layout.parse(raw)
    plain = rank_files.recognises(os.fspath(source))
    return rank_files.lay_out(rank_files.read(os.fspath(source)) if plain else open_source(source), parsed)


def _unwrapped(kind: str, holdings: Sequence[Holding], options: PlanOptions) -> tuple[PlanOptions, tuple[str, ...]]:
    """Options that remove wrappers which begin every selected name, and what to say about it."""
    names = {shard.name for holding in holdings for shard in holding.shards if options.wants(shard.name)}
    wrapper = ""
    while names and (
        found := [w for w in _WRAPPERS if all(n.startswith(wrapper + w) and n != wrapper + w for n in names)]
    ):
        wrapper += found[0]
    if wrapper:
        pattern, rename = f"^{re.escape(wrapper)}", options.rename
        given = rename if callable(rename) else None
        unwrap = (lambda name: given(name.removeprefix(wrapper))) if given else ((pattern, ""), *rename)  # type: ignore[misc]
        return replace(options, rename=unwrap), (f"names lost the wrapper {wrapper!r} that all of them began with",)
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


def _basis(source: Source, replicas: str, dtype: str | None, reductions: Mapping[str, str]) -> str:
    """A digest of all that the merged bytes depend on beside the names: the sources' headers, sizes and times."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(fact: Any) -> None:
        hasher.update(json.dumps(fact, separators=(",", ":")).encode())

    add([replicas, dtype, sorted(reductions.items())])
    paths: dict[str, None] = {}
    for holder in source.holders:
        add([holder.rank, sorted(holder.aliases.items())])
        for tensor in holder.tensors.values():
            add([tensor.shard.to_json(), [repr(extent) for extent in tensor.extents]])
            paths.update((extent.path, None) for extent in tensor.extents)
    for path in paths:
        add(files.version_of(path))
    return hasher.hexdigest()


def _planned(source: Source, plan: Plan) -> tuple[PlannedTensor, ...]:
    def ranks(tensor: TensorPlan) -> tuple[int, ...]:
        return tuple(sorted({source.holders[piece.holder].rank for piece in tensor.pieces}))

    return tuple(
        PlannedTensor(t.name, t.source, t.dtype, t.shape, file.name, len(t.pieces), ranks(t))
        for file in plan.files
        for t in file.tensors
    )


def extent_of(source: Source, tensor: TensorPlan, holder: int, box_index: int) -> Extent:
    """Where a piece's bytes lie."""
    return source.holders[holder].tensors[tensor.source].extents[box_index]


def check_replicas(source: Source, plan: Plan, reductions: Mapping[str, str]) -> None:
    """ReplicaError unless the copies of each box equal the one that is taken, and tied tensors each other."""
    for file in plan.files:
        for tensor in file.tensors:
            if tensor.source not in reductions:
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
                f"ranks {rank} and {other} hold different values for region {piece.box}; if each holds a part, a "
                f'layout says so (--layout): {{"{tensor.source}": {{"dim": 0}}}}; '
                'to take the lowest rank\'s, replicas="root" (--replicas root)',
                name=tensor.source,
                rank=other,
                path=theirs.extents[index].path,
            )


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
        publication: Publication | ObjectPublication,
        reductions: Mapping[str, str],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._publication = publication
        self._reductions = reductions
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
            create: Callable[[FilePlan], OpenFile | OpenObject] = self._publication.create
            opened = list(pool.map(create, todo))  # all room is there before anything is written
            writing = [pool.submit(self._write_file, *pair) for pair in zip(todo, opened, strict=True)]
            try:
                for written in as_completed(writing):
                    facts |= written.result()
            except BaseException:
                self._stop.set()  # the others end at their next window
                raise
        return facts

    def _write_file(self, plan: FilePlan, opened: OpenFile | OpenObject) -> dict[str, list[BoxFact]]:
        memory = memoryview(bytearray(4 * WINDOW_BYTES))
        with files.OpenFiles() as inputs:
            facts = {tensor.name: self._write_tensor(tensor, opened, inputs, memory) for tensor in plan.tensors}
        opened.finish()
        self._publication.record(
            plan.name, [[[fact.rank, fact.digest] for fact in facts[t.name]] for t in plan.tensors]
        )
        return facts

    def _write_tensor(
        self, tensor: TensorPlan, opened: OpenFile | OpenObject, inputs: files.OpenFiles, memory: memoryview
    ) -> list[BoxFact]:
        readers = [self._reader(tensor, piece, inputs) for piece in tensor.pieces]
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

    def _reader(self, tensor: TensorPlan, piece: Piece, inputs: files.OpenFiles) -> _Reader:
        held, reduce = self._held_dtype(tensor, piece), self._reductions.get(tensor.source)
        if held == tensor.dtype and reduce is None:
            return self._box_reader(tensor, piece, piece.holder, piece.box_index, inputs)
        if reduce is not None and held.startswith("C"):
            raise UnsupportedError(f"complex numbers have no {reduce}", name=tensor.source)
        suppliers = [(piece.holder, piece.box_index), *(piece.replicas if reduce is not None else ())]
        for holder, _ in suppliers:
            found = self._source.holders[holder].tensors[tensor.source].shard.dtype
            if found != held:
                path = self._source.holders[holder].path
                raise CorruptError(
                    "copies to be reduced differ in dtype", name=tensor.source, path=path, expected=held, found=found
                )
        readers = [self._box_reader(tensor, piece, *supplier, inputs) for supplier in suppliers]
        return ConvertingReader(readers, held, tensor.dtype, reduce, xxhash.xxh3_128())

    def _box_reader(
        self, tensor: TensorPlan, piece: Piece, holder: int, box_index: int, inputs: files.OpenFiles
    ) -> BoxReader:
        extent = extent_of(self._source, tensor, holder, box_index)
        dtype = self._source.holders[holder].tensors[tensor.source].shard.dtype
        copies = 1 + len(piece.replicas) if tensor.source in self._reductions else 1
        ahead = AHEAD_BYTES // (len(tensor.pieces) * copies)
        return BoxReader(inputs, extent.path, extent.begin, piece.box, dtype, xxhash.xxh3_128(), extent.strides, ahead)

    def _fact(self, tensor: TensorPlan, piece: Piece, reader: _Reader) -> BoxFact:
        suppliers = [(piece.holder, piece.box_index), *piece.replicas]
        readers = reader.readers if isinstance(reader, ConvertingReader) else [reader]
        for (holder, box_index), one in zip(suppliers, readers, strict=False):
            extent = extent_of(self._source, tensor, holder, box_index)
            if extent.digest is not None and one.digest() != extent.digest:
                raise CorruptError(
                    "bytes differ from their digest",
                    name=tensor.source,
                    rank=self._source.holders[holder].rank,
                    path=extent.path,
                    expected=extent.digest,
                    found=one.digest(),
                )
        return BoxFact(self._source.holders[piece.holder].rank, reader.digest())

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._plan.nbytes)
