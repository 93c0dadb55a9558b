"""Save live state with its sharding, one file per rank, now or in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import without_secrets
from statexchange.exchange.background import run_in_background
from statexchange.exchange.box_writers import Shares, share_writing
from statexchange.exchange.declared_copies import compare_copies
from statexchange.exchange.frozen_files import FrozenFile, frozen_parameters
from statexchange.exchange.placing import place_parts
from statexchange.exchange.save_index import gather_index
from statexchange.exchange.saving import (
    SaveReport,
    SaveRequest,
    exchange_starts,
    expect_frozen_files,
    frozen_target,
    notes_on_selection,
    open_target,
    publish,
    write_rank_file,
)
from statexchange.sharding.options import CallOptions, LoadOptions
from statexchange.state.describe import Description, LocalTensor, State
from statexchange.state.state_dict import SavedState, describe_save
from statexchange.storage.location import is_remote, target_path

if TYPE_CHECKING:
    from typing import Unpack

_log = logging.getLogger(__name__)


class _Options(TypedDict, total=False):
    comm: CommLike | None
    layout: Mapping[str, Any] | None
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    overwrite: bool
    stall_timeout_s: float


@overload
def save_checkpoint(
    state: State, path: str | os.PathLike[str], *, background: Literal[False] = False, **options: Unpack[_Options]
) -> SaveReport: ...


@overload
def save_checkpoint(
    state: State, path: str | os.PathLike[str], *, background: Literal[True], **options: Unpack[_Options]
) -> Future[SaveReport]: ...


@public_call("save_checkpoint")
def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    layout: Mapping[str, Any] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    overwrite: bool = False,
    background: bool = False,
    stall_timeout_s: float = 300.0,
) -> SaveReport | Future[SaveReport]:
    """Save nested `state` (modules, optimizers, tensors, numbers ...) to `path`, with its sharding.

    Collective; blocks until the save is published. It appears when it is whole and durable, or not at all. Each rank
    writes its tensors as one file, under their dotted paths; values that are not tensors are kept as JSON. Of tensors
    that ranks have with equal bytes each is written by one of them; what differs is each rank's own. All hosts must see
    `path`; if one does not, a NotFoundError names it. At a URL each rank uploads its own file in parts, and reads its
    tensors twice, because the file begins with their digests. A failure on any rank is raised on all ranks.
    For a job that saves again and again use `Checkpoints`.

    In the background, the call returns once this rank's tensors are copied, and a thread writes the copy; see
    `export_checkpoint`. A save first waits for one that still runs. A failure is raised by `result()`, or else by the
    next save or export in the background.

    Args:
        state: a nested mapping, as ``{"model": ..., "optimizer": ..., "step": 7}``, or a module.
        path: a local directory or an fsspec URL such as ``s3://bucket/saved``, the same on all ranks.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        layout: rules for plain tensors that are parts of whole ones, as in `export_checkpoint`, by their dotted paths:
            ``{"*.up.weight": Shard(0)}``. Optimizer state of a parameter's shape follows the parameter's rule. Rules
            that rename (split, renumber) or reduce are refused: tensors are saved as they are.
        include: shell patterns of names in the state, or of what contains them, as in `load_checkpoint`: only what
            they match is saved. Objects, and the state of a parameter in an optimizer, are saved or left out whole. The
            save records what it leaves out, and a load of it leaves that as it is. Not with `layout`.
        exclude: patterns of what is left out: ``exclude="model.base.*"``.
        overwrite: replace the save at `path`; else an existing target is a TargetExistsError. The old save stays until
            the new one is whole; at a URL, where nothing is replaced in one step, it is removed first.
        background: save a copy in a thread, and return a Future.
        stall_timeout_s: limit of the time in which no rank moves a byte, in seconds; the total time is not limited.
            A rank that does not call at all is waited for until the communicator's `timeout_s`.

    Returns:
        The report, with this rank's number of tensors, or with `background` a Future of it.

    Raises:
        TargetExistsError: `path` exists and `overwrite` is false, or another process is writing there.
        InvalidArgumentError: a rule does not fit a tensor, or matches none; a pattern of `include` matches nothing on
            any rank.
        ReplicaError: copies differ that the layout or a mesh declares. Other plain tensors may differ between ranks.
        NotFoundError: a host does not see the files of the others, or there is no such bucket.
        CorruptError: a tensor was changed while it was saved to a URL, or after ranks have compared their copies.
        UnsafeError: overwriting would remove files that do not belong to a save.
        IncompleteError, OverlapError: the parts of a tensor leave a gap, or overlap; nothing is written.
        CorruptError: ranks disagree on the dtype or shape of a tensor of which they have parts; nothing is written.
        UnsupportedError, StorageError: see `statexchange.errors`.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> report = sx.save_checkpoint({"model": model, "optimizer": optimizer, "step": 7}, "saved")
        >>> report.num_tensors
        2
    """
    arguments = locals()
    communicator = as_communicator(comm)

    def request() -> SaveRequest:
        selection = LoadOptions(include=include, exclude=exclude)
        return SaveRequest(target_path(path), layout, selection, communicator.run, CallOptions.of(arguments))

    return save_state("save_checkpoint", state, path, request, communicator, background=background)


def save_state(
    call: str,
    state: State,
    path: object,
    request: Callable[[], SaveRequest],
    comm: Communicator,
    *,
    background: bool,
) -> SaveReport | Future[SaveReport]:
    """Save `state` for the public call named `call`, whose arguments `request` checks. Collective."""

    def prepare() -> tuple[Description, Callable[[Description, Communicator], SaveReport]]:
        began = time.perf_counter()
        checked = request()
        saved = describe_save(
            state, checked.layout, checked.selection, comm.rank, separates_frozen=checked.frozen is not None
        )
        return saved.described, lambda copies, comm: _save(replace(saved, described=copies), checked, comm, began)

    if background:
        return run_in_background(call, path, comm, prepare)
    with comm.phase("describing its state"):
        described, finish = prepare()
    return finish(described, comm)


def _save(saved: SavedState, request: SaveRequest, comm: Communicator, began: float) -> SaveReport:
    """Plan, write and publish a described state; the report counts seconds from `began`. Collective."""
    with contextlib.ExitStack() as building:
        build = open_target(request, comm, building)
        starts = exchange_starts(request, saved, build, comm)
        described = saved.described
        if request.frozen is not None:
            expect_frozen_files(build, starts, request, comm)
        if any(start.has_layout for start in starts):
            # Where a part lies in its whole follows only from the parts of all ranks.
            described = place_parts(comm, described, saved.rules)
        shares = Shares(list(described.tensors.values()), {})
        # One rank alone writes all that it has. Its parts of tensors must be all parts of them.
        if comm.world_size > 1 or described.has_parts:
            limit_s = request.call.stall_timeout_s
            shares = share_writing(comm, shares.written, described.aliases, saved.frozen, limit_s)
        written = shares.written
        frozen: dict[str, list[LocalTensor]] = {}
        frozen_files: dict[str, FrozenFile] = {}
        if request.frozen is not None:
            frozen, written = frozen_parameters(written, saved.frozen, described.aliases)
        file = write_rank_file(Shares(written, shares.digests), saved, request, starts[0], comm)
        if request.frozen is not None:
            with comm.phase("saving parameters that do not train", timeout_s=request.call.stall_timeout_s):
                target = frozen_target(request, starts[0], described.aliases)
                frozen_files = request.frozen.write(frozen, shares.digests, target, comm)
        notes = saved.notes
        if request.selection.exclude:
            notes += notes_on_selection(starts)
        # Before the commit, as a copy that differs must not appear as one; after the write, which has made the digests.
        if any(start.has_copies for start in starts):
            digests = {**shares.digests, **file.content.digests}
            for of_key in frozen_files.values():
                digests |= of_key.digests
            notes += compare_copies(comm, saved, described, digests)
        index = gather_index(comm, saved, described, file, frozen_files) if comm.world_size > 1 else ""
        published = publish(build, file, frozen_files, index, request, starts[0], comm)
    seconds = time.perf_counter() - began
    shown = without_secrets(request.path) if is_remote(request.path) else request.path
    sizes, linked_nbytes = published
    report = SaveReport(shown, request.step, len(described.tensors), sum(sizes), seconds, sizes, notes, linked_nbytes)
    if comm.rank == 0:
        _log.info("saved %s", report)
        for note in notes:
            _log.warning("%s: %s", shown, note)
    # Outside of the block: what follows may fail, and the save is there all the same.
    if request.after is not None:
        request.after(report, comm)
    if request.keep_in_memory is not None:
        request.keep_in_memory(request.path, starts[0].save, sizes, file, comm)
    return report
