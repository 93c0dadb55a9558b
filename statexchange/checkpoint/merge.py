"""Merge a sharded checkpoint on disk into one directory: offline, in bounded memory, without torch.

Its steps are in `_merge`: open the source; select what is merged and convert it; plan the output, which proves that
each element is supplied exactly once, and compare copies; write the output files by several threads, window by window;
publish all together (checkpoint/publication.py).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from statexchange.checkpoint.extra_files import extra_files
from statexchange.checkpoint.notes import (
    check_readable,
    kept_metadata,
    note_on_others,
    notes_on_model,
    notes_on_names,
    notes_on_tensors,
    notes_on_written,
)
from statexchange.checkpoint.publication import Draft, Provenance, Publication
from statexchange.checkpoint.selection import Selection, open_selected, read_layout, select
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    ReplacedError,
    UnsafeError,
    without_secrets,
)
from statexchange.formats.replicas import advice_on_copies, check_tensor_copies, check_tied
from statexchange.formats.source import EvenFiles, SectionName, Source, abbreviated_list
from statexchange.formats.tensor_reader import MEMORY_BYTES, TensorReader, prefetch
from statexchange.sharding.options import CallOptions, Cast, Convert, ExportOptions, FilesFrom, Rename, Replicas
from statexchange.sharding.pieces import has_copies, holders_of
from statexchange.sharding.plan import FilePlan, Plan, TensorPlan, plan_merge
from statexchange.storage.location import is_remote, target_path
from statexchange.storage.publish.build import OutputFile
from statexchange.tensors import element_shape
from statexchange.units import format_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

_WITHOUT_MODEL = ("optimizer", "scheduler", "rng", "other")  # sections


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output tensor of a dry run: its file, and the ranks that supply its boxes."""

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_boxes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of a merge or of its dry run.

    Attributes:
        path: the checkpoint directory.
        files: (name, bytes of tensors) of each output file.
        nbytes: bytes of all tensors.
        num_tensors: number of tensors written.
        aliases: names of tied tensors that are not written, with the names under which their values are.
        seconds: duration.
        dry_run: whether nothing was written.
        notes: changed names, entries that were not written, and tensors that may not be wanted.
        reused: files that a killed merge had finished.
        tensors: the planned tensors of a dry run.
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
        prefix = "dry run: " if self.dry_run else ""
        return f"{prefix}{format_transfer(self.num_tensors, self.nbytes, self.seconds)} -> {self.path}"


def merge_checkpoint(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    section: SectionName | Literal["all"] | None = None,
    layout: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    convert: Convert | None = None,
    convert_with: Mapping[str, int] | None = None,
    replicas: Replicas = "equal",
    dtype: Cast | None = None,
    max_shard_size: int | str = "5GB",
    filename_pattern: str | None = None,
    files_from: FilesFrom = None,
    overwrite: bool = False,
    resume: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Merge a sharded checkpoint into one checkpoint directory, which appears complete and durable or not at all.

    Not collective. Before anything is written, the merge proves that each element of each output tensor is supplied
    exactly once. Each box is checked against its digest while it is copied. Memory is bounded, whatever the size of the
    model.

    What wrappers of modules put into names, such as ``_orig_mod`` anywhere or ``module.`` in front of all selected
    names, is removed before `rename`. If all begin with a ``model.`` that seems to wrap a whole model, a note in the
    report shows how to remove it.

    Entries that are not tensors are not written. The report's notes list them, and tensors that look like optimizer
    state. Text metadata of safetensors files is kept if all files agree on it.

    A source that is replaced while it is opened is read again, once. A source that is changed while it is copied raises
    ReplacedError, and nothing is published.

    A killed merge that is run again with the same options and an unchanged source reuses the output files that it had
    finished, provided its process has provably ended: it ran on this host, since the last boot.

    Args:
        source: the checkpoint to merge, of any format that `open_checkpoint` reads; a path or an fsspec URL.
        path: the directory to publish; a path or an fsspec URL.
        section: what to merge of a job's state: "model", "optimizer" or another of `info`'s sections, or "all". The
            section's prefix, such as ``model.``, is removed from the names before all other options apply. By default:
            the model, if it is known which tensors are the model's. If patterns are given (`layout`, `include`,
            `exclude`, `rename`) without `convert`: all, and the patterns match the full names. From a training
            framework's directory: always the model.
        layout: sharding of plain tensors, as a mapping or the path of a JSON file (`statexchange.sharding.rules`). Each
            safetensors file of the source directory is then one rank's. Patterns match the names in the source.
        include: shell patterns of names to merge; by default all. If the layout renames tensors, the new names count.
        exclude: shell patterns of names to leave out.
        rename: a function of a name, or (regex, replacement) pairs.
        convert: write the names and values of another model family: a built-in conversion such as "torchtitan:llama3",
            the path of a JSON file (`statexchange.conversions.rules`), or the file's content. "inverse:" before the
            name or path converts in the other direction. `include`, `exclude` and `layout` match the names before the
            conversion, `rename` and `dtype` those after. A selected name without a rule is an error.
        convert_with: numbers that the conversion needs, as ``{"n_heads": 32}``. Others come from the config.json of
            `files_from`, or of the source.
        replicas: "equal": copies of a box must be equal; "root": the lowest rank's copy is taken.
        dtype: write floating tensors as "float16", "bfloat16", "float32" or "float64" (or torch's dtype); or a mapping
            of shell patterns to dtypes, as ``{"*.norm.*": "float32", "*": "bfloat16"}``, whose first match counts.
            Integers, float8 and the scales of float8 tensors stay as they are. The manifest has digests of the cast
            bytes.
        max_shard_size: start a new file before a tensor that would make the file larger: bytes, or text like "5GB".
        filename_pattern: names of the files; {suffix} becomes -00001-of-00004 if there are several. By default
            model{suffix}.safetensors, and adapter_model{suffix}.safetensors for an adapter of PEFT.
        files_from: extra files for the checkpoint: a directory, of which the small files and directories of a model
            (64 MiB for each file, and for all in directories) are taken and not those of a job, such as
            trainer_state.json; paths; or a mapping of names to contents. Those of a Hugging Face source are copied too,
            a note names the others, and a cast updates the dtype in its config.json. ``()`` copies no files at all.
        overwrite: replace a published checkpoint at `path`.
        resume: also reuse or remove files that processes on other hosts left. The caller must know that they have
            ended: one that still runs would fail.
        threads: number of threads that write; by default one per core.
        dry_run: write nothing; check everything that can be checked without reading the tensors' bytes.
        on_progress: called with (bytes done, bytes in total).

    Returns:
        The report.

    Raises:
        NotFoundError: there is no checkpoint at `source`.
        IncompleteError: a rank, a file or a region of a tensor is missing.
        OverlapError: two ranks claim overlapping regions.
        ReplicaError: copies of a box differ.
        CorruptError: a file contradicts itself or its digests.
        ReplacedError: the source was changed during the merge.
        TargetExistsError: `path` exists, or another process is publishing to it.
        UnsafeError: the source or the target is refused for safety.
        UnsupportedError: a selected tensor has an unsupported dtype or kind.
        InvalidArgumentError: an option is wrong.
        StorageError: the operating system refused a read or write.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> import os
        >>> os.mkdir("ranks")
        >>> for rank in range(2):
        ...     rows = numpy.full((2, 3), rank, dtype="float32")
        ...     save_file({"w": rows}, f"ranks/rank-{rank}.safetensors")
        >>> report = merge_checkpoint("ranks", "merged", layout={"w": {"dim": 0}})
        >>> report.num_tensors, report.nbytes
        (1, 48)
        >>> sorted(os.listdir("merged"))
        ['model.safetensors', 'statexchange.json']
    """
    arguments = locals()
    began = time.perf_counter()
    call = CallOptions.of(arguments)
    if threads == 0:
        raise InvalidArgumentError("threads must be a number from 1 on, not 0")
    options = ExportOptions.of({**arguments, "layout": read_layout(layout)})
    request = _Request(target_path(path), call, options, began)
    # A job may replace its newest checkpoint in the moment in which it is opened. Twice in a row is no accident.
    try:
        return _merge(*open_selected(source, call, options), request)
    except ReplacedError:
        return _merge(*open_selected(source, call, options), request)


def copy_source(opened: Source, path: str, on_progress: Callable[[int, int], None] | None = None) -> MergeReport:
    """Write all tensors of an opened source as a checkpoint, and close it; raise as `merge_checkpoint`.

    Not collective. The result depends on the tensors alone, and not on the files in which they lay: so it has the same
    bytes on all hosts.
    """
    call = CallOptions(section="all", on_progress=on_progress)  # what was opened is written, whatever it is
    nbytes = sum(tensor.shard.nbytes for _, tensor in opened.shards())
    # Files are written side by side: several also of a small model, and not too many of a large one.
    options = ExportOptions(max_shard_size=max(_COPIED_SHARD_BYTES, nbytes // _MOST_COPIED_SHARDS))
    # The ranks of a source without ranks are the numbers of its files.
    files = tuple(replace(shard_file, rank=0) for shard_file in opened.files)
    request = _Request(target_path(path), call, options, time.perf_counter(), is_copy=True)
    return _merge(replace(opened, files=files), {}, request)


@dataclass(frozen=True, slots=True)
class _Request:
    """A call: the target, the options, and the time when it began.

    `is_copy`: this is `copy_source`, with tensors in the order of their names, and a killed copy is not resumed.
    """

    path: str
    call: CallOptions
    options: ExportOptions
    began: float
    is_copy: bool = False

    @property
    def has_model(self) -> bool:
        """Whether what is merged has the tensors of a model."""
        return self.call.section not in _WITHOUT_MODEL

    @property
    def is_whole_model(self) -> bool:
        """Whether nothing of the model is left out."""
        return self.has_model and not self.options.include and not self.options.exclude


@dataclass(frozen=True, slots=True)
class _Output:
    """The files to write.

    Attributes:
        draft: their plan, and all that is known of them before they are written.
        compared: the files with which the tensors of a whole model are compared; None if a part is written.
        notes: what the user should know before anything is written.
    """

    draft: Draft
    compared: Mapping[str, bytes] | None
    notes: tuple[str, ...]


def _merge(opened: Source, reductions: Mapping[str, str], request: _Request) -> MergeReport:
    """Merge once, and close the source; raise ReplacedError if it is replaced meanwhile."""
    with opened:
        opened.read_ahead()
        check_readable(opened, request.options)
        selected = select(opened, reductions, request.options)
        output = _plan(opened, selected, request)
        call, target, plan, notes = request.call, request.path, output.draft.plan, output.notes
        reused: tuple[str, ...] = ()
        _check_apart(opened, target)
        if call.dry_run:
            output.draft.check_target(target, overwrite=call.overwrite)
            if output.compared is not None:
                notes += notes_on_model(plan, output.compared, {})  # digests are known only after the tensors are read
        else:
            with Publication(
                target,
                output.draft,
                overwrite=call.overwrite,
                reuse=not request.is_copy,  # the digest of a copy's plan does not cover the files: it has no basis
                resume=call.resume,
            ) as publication:
                target, reused = publication.build.path, tuple(sorted(publication.build.finished))
                provenance = _FileWriter(selected.source, plan, publication, call).write()
                # What a conversion puts together from several boxes was read without a check against their digests.
                if selected.converted is not None:
                    selected.converted.check_digests()
                # Before the commit: a copy of a file that was changed in place is half old and half new.
                opened.check_unchanged()
                publication.commit(provenance)
            notes += notes_on_written(plan, provenance, request.options.new_layout(), output.compared)
        report = MergeReport(
            path=target,
            files=tuple((file.name, file.data_nbytes) for file in plan.files),
            nbytes=plan.nbytes,
            num_tensors=plan.num_tensors,
            aliases=plan.aliases,
            seconds=time.perf_counter() - request.began,
            dry_run=call.dry_run,
            notes=notes,
            reused=reused,
            tensors=_planned(selected.source, plan) if call.dry_run else (),
        )
        _log.info("merged %s", report)
        return report


def _plan(opened: Source, selected: Selection, request: _Request) -> _Output:
    """Plan the output, which proves that each element is supplied exactly once, and compare the copies."""
    options, left_options = request.options, selected.options
    try:
        rank_shards = selected.source.rank_shards()
        basis = "" if request.is_copy else _basis(selected.source, options, selected.reductions)
        plan = plan_merge(rank_shards, left_options, basis=basis, reductions=selected.reductions, sorts=request.is_copy)
    except (CorruptError, IncompleteError) as error:
        # The note of one of several files says where the others are.
        advice = ""
        if opened.opened.file is not None:
            advice = "; ".join(opened.notes)
        raise error.located(path=error.path or opened.path, advice=advice) from None
    # A conversion gives other names: to which of them an alias would belong, nobody can tell.
    if opened.manifest is not None and selected.converted is None:
        plan = replace(plan, aliases={**_published_aliases(opened.manifest, plan, left_options), **plan.aliases})
    if not plan.num_tensors:
        raise _nothing_to_merge(opened, request.call.section)
    if options.replicas == "equal":
        _check_copies(selected.source, plan, left_options)
    # ZeRO's float32 masters are merged, and the config beside them says bfloat16 or float16.
    updates_dtype = bool(options.dtype) or opened.kind == "deepspeed"
    extra = extra_files(selected.caller_files.contents, plan, selected.files, updates_dtype=updates_dtype)
    metadata, metadata_notes = kept_metadata(opened, left_options)
    notes = opened.notes + selected.notes + note_on_others(opened, options)
    notes += metadata_notes + selected.file_notes + selected.caller_files.notes
    notes += notes_on_tensors(rank_shards, plan, left_options)
    if request.has_model:
        notes += notes_on_names(plan, extra, is_converted=options.converts)
    compared = {**selected.compared_files, **extra} if request.is_whole_model else None
    return _Output(Draft(plan, source=opened.kind, extra=extra, metadata=metadata), compared, notes)


def _published_aliases(manifest: Mapping[str, Any], plan: Plan, options: ExportOptions) -> dict[str, str]:
    """Return the tied names of a published checkpoint, which has no tensors of these names, as they are written."""
    written = {tensor.source: tensor.name for tensor in plan.tensors.values()}
    aliases = {}
    for alias, name in manifest.get("aliases", {}).items():
        if name in written and alias not in written and options.wants(alias):
            aliases[options.renamed(alias)] = written[name]
    return aliases


def _nothing_to_merge(source: Source, section: str | None) -> InvalidArgumentError:
    """Return the error for a source of which nothing would be written."""
    what = "the source"
    if section not in (None, "all"):
        what = f"the section {section!r}"
    text = f"there is nothing to merge: {what} has no tensor"
    if source.others:
        text += f", only {abbreviated_list(source.others)}, which a merge does not write: load it with load_checkpoint"
    return InvalidArgumentError(text, path=source.path)


def _check_apart(source: Source, path: str) -> None:
    """Raise UnsafeError if the target is inside a save or a published checkpoint, or the source in a target URL.

    What has files that its manifest does not list is never removed or replaced. The objects of a target URL would be
    replaced while they are read; a local target is built under another name.
    """
    folder = source.opened.store.path.rstrip("/")
    if (source.kind == "save" or source.manifest is not None) and path.startswith(f"{folder}/"):
        text = "refused: the target is inside the source, which could not be removed or replaced any more"
        raise UnsafeError(f"{text}: choose a path outside of {without_secrets(folder)}", path=path)
    if not is_remote(path):
        return
    prefix = f"{without_secrets(path)}/"
    for _, tensor in source.shards():
        if any(byte_range.path.startswith(prefix) for byte_range in tensor.byte_ranges):
            raise UnsafeError("refused: the source is in the target, whose objects would be replaced", path=path)


_COPIED_SHARD_BYTES, _MOST_COPIED_SHARDS = 64 << 20, 64
_RECORD_VERSION = 2  # of what `_write_part` records of a file: an older one is not resumed


def _basis(source: Source, options: ExportOptions, reductions: Mapping[str, str]) -> str:
    """Return a digest of all that the output depends on, except names: options, headers, file sizes and times.

    A killed merge is resumed only with the same one. Names are in the plan, whose digest covers this basis, too.
    """
    described: list[object] = [_RECORD_VERSION, options.replicas, options.dtype, sorted(reductions.items())]
    if isinstance(source.files, EvenFiles):
        specs = [[spec.name, spec.dtype, spec.global_shape, spec.placement] for spec in source.specs.values()]
        described.append([source.files.parts.version, specs])
    for shard_file in source.files_without_specs:
        described.append([shard_file.rank, shard_file.file.version, sorted(shard_file.aliases.items())])
        for tensor in shard_file.tensors.values():
            shard = tensor.shard
            described.append([shard.name, shard.dtype, shard.global_shape, shard.boxes])
            for stored in tensor.byte_ranges:
                described.append([stored.begin, stored.nbytes, stored.digest, stored.strides, stored.orders])
    text = json.dumps(described, separators=(",", ":"), default=_digest_of)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest_of(order: array[int]) -> str:
    """Return what stands for an order in JSON: it may have a million indices."""
    return hashlib.blake2b(order).hexdigest()


def _planned(source: Source, plan: Plan) -> tuple[PlannedTensor, ...]:
    planned = []
    for file in plan.files:
        for tensor in file.tensors:
            holders, _ = holders_of(tensor.pieces, with_copies=False)
            ranks = {source.files[holder].rank for holder in holders}
            planned.append(
                PlannedTensor(
                    name=tensor.name,
                    source=tensor.source,
                    dtype=tensor.dtype,
                    shape=element_shape(tensor.dtype, tensor.shape),
                    file=file.name,
                    num_boxes=len(tensor.pieces),
                    ranks=tuple(sorted(ranks)),
                )
            )
    return tuple(planned)


def _check_copies(source: Source, plan: Plan, options: ExportOptions) -> None:
    """Raise ReplicaError unless all copies of each box are equal, and selected tied tensors equal each other.

    Before the first byte is written: the plan reads the copies that it does not write for this alone.
    """
    for tensor in plan.tensors.values():
        if has_copies(tensor.pieces):
            check_tensor_copies(source, tensor, advice_on_copies(source, tensor))
    for shard_file in source.files:
        for alias, name in shard_file.aliases.items():
            if options.wants(alias) and options.wants(name):
                check_tied(shard_file, alias, name)


@dataclass(slots=True)
class _OpenFile:
    """An output file that is being written.

    Attributes:
        plan: the file.
        output: where it is written.
        num_left: the parts of it that are not written yet.
        provenance: the boxes of the tensors that are written, by tensor name.
    """

    plan: FilePlan
    output: OutputFile
    num_left: int
    provenance: dict[str, Provenance]


class _FileWriter:
    """Writes the output files of a proved plan with several threads, window by window.

    A thread writes one file, or a part of one: a run of its tensors. Two threads that write one file take turns at its
    inode's lock, but one reads and hashes while the other writes.
    """

    def __init__(self, source: Source, plan: Plan, publication: Publication, call: CallOptions) -> None:
        self._source = source
        self._plan = plan
        self._publication = publication
        self._call = call
        self._done, self._total = 0, plan.nbytes
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def write(self) -> dict[str, Provenance]:
        """Write all files that a killed merge has not finished; return the provenance of each box by tensor name."""
        provenance: dict[str, Provenance] = {}
        plans = []
        for plan in self._plan.files:
            if plan.name in self._publication.build.finished:
                # What `_write_part` recorded. The file itself is not read again: the record came after its last byte.
                for tensor, record in zip(plan.tensors, self._publication.build.finished[plan.name], strict=True):
                    ranks, digests, num_overflows = record
                    provenance[tensor.name] = Provenance(ranks, bytes.fromhex(digests), num_overflows)
                self._count(plan.data_nbytes)
            else:
                plans.append(plan)
        threads = self._call.threads or os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            outputs = list(pool.map(self._publication.create, plans))  # a full disk is found before anything is written
            futures = []
            # Each thread gets equally many whole files. Those left over are divided among all threads. One thread
            # alone can write an object, which is uploaded from its beginning to its end (`is_sequential`).
            num_last = len(plans) % threads
            for number, (plan, output) in enumerate(zip(plans, outputs, strict=True)):
                is_divided = number >= len(plans) - num_last and not output.is_sequential
                parts = _parts(plan, -(-threads // num_last) if is_divided else 1)
                file = _OpenFile(plan, output, len(parts), {})
                futures += [pool.submit(self._write_part, file, part) for part in parts]
            try:
                for future in as_completed(futures):
                    provenance |= future.result()
            except BaseException:
                self._stop.set()  # the other threads end at their next window; the pool waits for them
                raise
        return provenance

    def _write_part(self, file: _OpenFile, tensors: Sequence[TensorPlan]) -> dict[str, Provenance]:
        """Write some tensors of a file, and finish the file if these are the last; return the boxes of all if so."""
        memory = memoryview(bytearray(MEMORY_BYTES))
        # One buffer and one queue of reads ahead for each thread: these are the memory of a merge.
        ahead = prefetch(self._source, tensors)
        for tensor in tensors:
            file.provenance[tensor.name] = self._write_tensor(tensor, file.output, memory, ahead.advance)
        # Whoever writes the last part makes the file durable, and only then records it: a record without its bytes
        # would be resumed.
        with self._lock:
            file.num_left -= 1
            if file.num_left:
                return {}
        file.output.finish()
        record = []
        for tensor in file.plan.tensors:
            ranks, digests, num_overflows = file.provenance[tensor.name]
            record.append([ranks, digests.hex(), num_overflows])
        self._publication.build.record(file.plan.name, record)
        return file.provenance

    def _write_tensor(
        self, tensor: TensorPlan, output: OutputFile, memory: memoryview, advance: Callable[[int], None]
    ) -> Provenance:
        reader = TensorReader(self._source, tensor)
        at = len(output.header) + tensor.begin
        for _, data in reader.windows(memory):
            if self._stop.is_set():
                raise RuntimeError("another file of this merge failed")
            self._count(len(data))
            # A cast or a conversion reads more or fewer bytes than are written.
            advance(int(len(data) * reader.read_per_byte))
            output.write(data, at)
            at += len(data)
        ranks = [self._source.files[piece.holder].rank for piece in tensor.pieces]
        return Provenance(ranks, bytes.fromhex("".join(reader.digests())), reader.num_overflows())

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._call.on_progress is not None:
                self._call.on_progress(self._done, self._total)


# Of a file that several threads write: less is not worth a thread, and each part needs memory for its windows.
_LEAST_PART_BYTES, _MOST_PARTS = 4 << 20, 8


def _parts(file: FilePlan, count: int) -> list[Sequence[TensorPlan]]:
    """Divide the tensors of a file into at most `count` runs of about equally many bytes.

    Four tensors of 10, 10, 20 and 40 MiB are two parts: the first three, and the last.
    """
    count = max(1, min(count, _MOST_PARTS, file.data_nbytes // _LEAST_PART_BYTES))
    begins = [tensor.begin for tensor in file.tensors]
    # The first tensors that begin at or after each n-th of the file: one that is larger than that leaves empty runs.
    cuts = [bisect.bisect_left(begins, file.data_nbytes * number // count) for number in range(count)]
    parts: list[Sequence[TensorPlan]] = []
    for first, end in itertools.pairwise([*cuts, len(begins)]):
        if first < end or count == 1:  # also a file without tensors is finished
            parts.append(file.tensors[first:end])
    return parts
