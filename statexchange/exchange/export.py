"""Export live sharded state as one Hugging Face checkpoint, now or in the background."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from statexchange.checkpoint.extra_files import read_caller_files
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.exchange.background import run_in_background
from statexchange.exchange.chosen_conversion import Conversion, chosen_conversion
from statexchange.exchange.converting import convert_live
from statexchange.exchange.exporting import Exported, ExportReport, ExportRequest, agree_on_plan, publish
from statexchange.exchange.pretrained import adapter_state, is_adapter_model, model_files, tokenizer_files
from statexchange.exchange.rank_metadata import RankMetadata, agreed_names
from statexchange.exchange.writing import write_files
from statexchange.sharding.options import (
    ADAPTER_PATTERN,
    CallOptions,
    Cast,
    Convert,
    ExportOptions,
    FilesFrom,
    Rename,
    Replicas,
)
from statexchange.state.describe import Description, State, describe
from statexchange.storage.location import target_path
from statexchange.tensors import collector_paused

if TYPE_CHECKING:
    from typing import Unpack


class _Options(TypedDict, total=False):
    comm: CommLike | None
    layout: Mapping[str, Any] | None
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    rename: Rename
    convert: Convert | None
    convert_with: Mapping[str, int] | None
    replicas: Replicas
    dtype: Cast | None
    max_shard_size: int | str
    filename_pattern: str | None
    files_from: FilesFrom
    tokenizer: Any
    overwrite: bool
    stall_timeout_s: float
    on_progress: Callable[[int, int], None] | None


@overload
def export_checkpoint(
    state: State, path: str | os.PathLike[str], *, background: Literal[False] = False, **options: Unpack[_Options]
) -> ExportReport: ...


@overload
def export_checkpoint(
    state: State, path: str | os.PathLike[str], *, background: Literal[True], **options: Unpack[_Options]
) -> Future[ExportReport]: ...


@public_call("export_checkpoint")
def export_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    layout: Mapping[str, Any] | None = None,
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
    tokenizer: Any = None,
    overwrite: bool = False,
    background: bool = False,
    stall_timeout_s: float = 300.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport | Future[ExportReport]:
    """Write the ranks' sharded `state` as one merged checkpoint directory at `path`; the same report on every rank.

    Collective; blocks until the directory is published. It appears when it is whole and durable, or not at all. A
    failure on any rank is raised on all ranks. No rank holds more than its own shard. Only root's host must see `path`:
    the bytes of other hosts are sent there, unless they see it too and write their own. At a URL every host uploads
    the files that it writes, from temporary files in its TMPDIR, which needs room for its share of the tensors.

    For a model of transformers, its config.json (with the written dtype) and generation_config.json are written too, so
    that `from_pretrained(path)` loads the directory. For a PEFT model, only the active adapter and its
    adapter_config.json are written, as PEFT loads them.

    In the background, the call returns once this rank's tensors are copied; it waits for other ranks only the first
    time. Then the state may change and `comm` may be used: a thread exports the copy over a communicator of its own,
    and calls `on_progress`. The copy's memory is used again by the next export. A further export, and the interpreter's
    exit, first wait for the one that runs; an export cannot be cancelled. A failure on any rank is logged on all ranks
    and raised by `result()` on all ranks. If `result()` was not called, the next export in the background raises the
    failure instead of exporting.

    Args:
        state: a module, a mapping of names to tensors, or a list of such. DTensors and Megatron-Core's ShardedTensors
            carry their sharding (the latter also their keys, and the padding of a vocabulary); a plain tensor counts as
            a replica unless `layout` has a rule for its name. Extra state of modules is left out, and the report's
            `notes` name it.
        path: a local directory, or an fsspec URL such as ``s3://bucket/merged``. Root's `path`, `files_from` and
            `overwrite` are used; pass the same on all ranks. All other options must be equal on all ranks, except the
            rules of a layout.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        layout: sharding rules by name pattern: torch's ``Shard(dim)`` or ``Replicate()``, ``{"dim": 0}``, keywords of
            transformers' `model.tp_plan`, or any rule of `statexchange.sharding.rules`. With ``{"reduce": "max"}`` the
            rank that writes the result needs memory for it.
        include: shell patterns of the names to export, one or several; by default all. Unlike in `load_checkpoint`, a
            pattern must match the whole name: ``"encoder.*"``.
        exclude: shell patterns of the names to leave out.
        rename: a function of a name, or (regex, replacement) pairs that are applied in order.
        convert: write the names and values of another model family: a built-in conversion such as "torchtitan:llama3",
            the path of a JSON file (`statexchange.conversions.rules`), or the file's content. "inverse:" before the
            name or path converts in the other direction. `include`, `exclude` and `layout` match the names before the
            conversion, `rename` and `dtype` those after. A selected name without a rule is an error. By default a model
            of transformers is written by the names of its `save_pretrained`, such as one of each expert's weight, where
            it has others in memory. Then only `layout` matches the names in memory, and all other options those that
            are written. A model in a container, and its state dict, keep the names in memory.
        convert_with: numbers that the conversion needs, as ``{"n_heads": 32}``. Others come from root's config.json of
            `files_from`, or from the config of root's model of transformers.
        replicas: "equal" raises ReplicaError if copies differ; "root" takes the lowest rank's copy.
        dtype: the dtype to which floating tensors are cast, or a mapping of shell patterns of names to dtypes, whose
            first match counts; by default nothing is cast. The scales of float8 tensors are never cast. The report's
            `notes` name what has become infinite, and what a cast should not narrow.
        max_shard_size: limit of a file's bytes: an int, or text such as "5GB".
        filename_pattern: the files' names; ``{suffix}`` becomes ``-00001-of-00004`` where there are several. By default
            ``model{suffix}.safetensors``, and ``adapter_model{suffix}.safetensors`` for a PEFT model.
        files_from: a directory whose small files (config, tokenizer) are copied, or files, or a mapping of names to
            texts; they take precedence over the files of the model and the tokenizer.
        tokenizer: a tokenizer or processor of transformers, whose files are written too. Root's is used.
        overwrite: replace what is at `path`; else an existing target is a TargetExistsError. At a URL, where nothing is
            replaced in one step, it is removed first.
        background: export a snapshot in a thread, and return a Future.
        stall_timeout_s: limit of the time in which no rank moves a byte, in seconds; the total time is not limited.
            A rank that does not call at all is waited for until the communicator's `timeout_s`.
        on_progress: called with the bytes that this rank has written and those that it will write.

    Returns:
        The report, or with `background` a Future of it.

    Raises:
        InvalidArgumentError: an option is not accepted, or differs between ranks; nothing is left to export.
        TargetExistsError: `path` exists and `overwrite` is false, or another process is writing there.
        IncompleteError, OverlapError: the ranks' shards do not cover a tensor exactly once.
        ReplicaError: copies of a region differ.
        UnsafeError, UnsupportedError, CorruptError, StorageError: see `statexchange.errors`.
        NotFoundError: a file of `files_from` does not exist.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.export_checkpoint({"w": torch.zeros(2, 3)}, "merged")
        >>> report.num_tensors, report.nbytes
        (1, 24)
    """
    arguments = locals()
    communicator = as_communicator(comm)

    def prepare() -> tuple[Description, Callable[[Description, Communicator], ExportReport]]:
        began = None if background else time.perf_counter()
        call, options = CallOptions.of(arguments), ExportOptions.of(arguments)
        tensors: State = state
        # Of a PEFT model the base is not written: it lies where it was loaded from.
        if "peft" in sys.modules and is_adapter_model(state):
            tensors = adapter_state(state)
            if filename_pattern is None:
                options = replace(options, filename_pattern=ADAPTER_PATTERN)
        files, conversion = model_of(state, options, communicator)
        if tokenizer is not None and communicator.rank == 0:
            files |= tokenizer_files(tokenizer)
        # Now: in the background the program may change its working directory before root opens the target.
        request = ExportRequest(target_path(path), options, call, files)
        # A new layout each time: it remembers which patterns have matched a name.
        with collector_paused():
            described = describe(tensors, options.new_layout(), communicator.rank, with_extra_state=False)
        return described, lambda copies, comm: export_described(copies, conversion, request, comm, began).report

    if background:
        return run_in_background("export_checkpoint", path, communicator, prepare)
    with communicator.phase("describing its state"):
        described, export = prepare()
    return export(described, communicator)


def model_of(state: State, options: ExportOptions, comm: Communicator) -> tuple[dict[str, bytes], Conversion | None]:
    """Return the files of a state that is a model of transformers or PEFT, on root, and its conversion. Not collective.

    The conversion is the one that the options name, or else that of `save_pretrained`.
    """
    # A model can only be one of transformers or PEFT, which imports transformers, if that has been imported.
    if not options.converts and "transformers" not in sys.modules:
        return {}, None
    # Root's files are written, and its config decides: other ranks' models may be parts, and need not have one.
    files: dict[str, bytes] = {}
    config: bytes | None = None
    if comm.rank == 0:
        files = model_files(state)
        if options.convert is not None:
            config = read_caller_files(options.files_from).config()
    return files, chosen_conversion(options, state, config)


def export_described(
    described: Description,
    conversion: Conversion | None,
    request: ExportRequest,
    comm: Communicator,
    began: float | None,
) -> Exported:
    """Convert, plan, write and publish described tensors; the report counts seconds from `began`. Collective."""
    if began is None:
        began = time.perf_counter()
    with contextlib.ExitStack() as building:
        # Many small objects are made here, and none is garbage: the collector would look at all of them repeatedly.
        with collector_paused():
            described, options = converted_description(comm, described, conversion, request.options)
            # The options as they were given: a conversion has applied its patterns, which must be equal on all ranks.
            metadata = RankMetadata.of(described, request.options.texts())
            plan, root = agree_on_plan(comm, metadata, request, options, building)
        written = write_files(comm, described, plan, root, request, building)
        if request.on_written is not None:
            with comm.phase("copying what it has written"):
                request.on_written(plan, written.receipts)
        with collector_paused():
            report = publish(comm, root, plan, written, request, began)
            return Exported(report, root)


def converted_description(
    comm: Communicator, described: Description, conversion: Conversion | None, options: ExportOptions
) -> tuple[Description, ExportOptions]:
    """Return the tensors by the names to be written, and the options that are left for them. Collective."""
    texts = None if conversion is None else conversion.texts()
    described, converts = agreed_names(comm, described, options.new_layout(), texts)
    if not converts:
        return described, options
    converted, options = convert_live(comm, described, conversion, options)
    return replace(converted, extra_state=described.extra_state), options
