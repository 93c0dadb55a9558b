"""The story of a load: what a checkpoint has is matched with live state, read, and installed.

The world size, mesh and placements of the live state may be other than those of the job that wrote the checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, ReplacedError, StateExchangeError
from statexchange.exchange.chosen_conversion import ChosenConversion
from statexchange.exchange.load_checks import check_same_source, check_whose_state, compare_names, settle_names
from statexchange.exchange.load_report import LoadReport, LoadRequest, notes_on_lost_ties, notes_on_overflows
from statexchange.exchange.load_source import LoadSource, located, open_for_state, source_content
from statexchange.exchange.placing import place_parts, renumbered_names
from statexchange.exchange.reading import Messages, ReadItem, assign_readers, read_all
from statexchange.sharding.options import CallOptions, Convert, LoadOptions, Readers, Rename, Replicas
from statexchange.state.describe import Description, LocalTensor, State, local_tensors
from statexchange.state.load_plan import LoadPlan, Matching
from statexchange.state.match import match
from statexchange.tensors import check_writable, collector_paused, mark_changed, without_grad

_log = logging.getLogger(__name__)


@public_call("load_checkpoint")
def load_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    strict: bool = True,
    layout: Mapping[str, object] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    convert: Convert | None = None,
    convert_with: Mapping[str, int] | None = None,
    dtype: Literal["state"] | None = None,
    replicas: Replicas = "equal",
    readers: Readers | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    stall_timeout_s: float = 300.0,
) -> LoadReport:
    """Load the checkpoint at `path` into `state`, in place and bit for bit as it was saved.

    Collective over `comm`; blocks until all ranks are done. A rank reads what its own boxes need, so world size, mesh
    and placements may differ from those of the save. What several ranks of a host need is read once: from files through
    the page cache, from an object store by one rank, which sends it to the others (`readers`). Shapes, dtypes and names
    are checked before anything is changed; a failure on any rank is raised on all. Tensors are filled as they are read,
    those that an optimizer has already among them. After a failure during reading, each is as it was, or as it was
    saved; one that was read in part, or whose bytes differ from their digest, is filled with NaN (all bits set) unless
    its old values are still there. An error of the source's bytes or of reading them says how many tensors have
    changed. Param groups, new state of optimizers, plain values and other objects change on no rank before all have
    read everything; if one of them then refuses its state, what comes before it in the state has changed.

    Values that differ between ranks (e.g. RNG state) are restored per rank if the world size is unchanged. Otherwise
    they raise ReplicaError, unless `exclude` leaves them as they are or `replicas` is "root". So does the state of an
    object with ``per_rank = True``, even if it is equal on all ranks.
    Modules and optimizers whose `load_state_dict` does more than torch's, by hooks or overrides, load what was read.
    Tensors with no counterpart in state are created as torch tensors; where torch is not installed, as numpy arrays.

    Boxes that a rank reads whole are checked against their digests; `verify` checks all. All ranks read the same
    checkpoint: if it is replaced during the load, the new one is loaded instead; a second replacement is an error.

    `strict`, `dtype`, `replicas` and a layout's mesh must be the same on all ranks. `layout`, `include`, `exclude` and
    `rename` may otherwise differ, as between the stages of a pipeline.

    Args:
        state: a module, a mapping of names to tensors or a list of modules, with the source's names for tensors; or a
            nested mapping as for `save_checkpoint`, ``{"model": ..., "optimizer": ..., "step": 7}``, in which
            optimizers get state and param groups, objects with `load_state_dict` get their own state, and other entries
            are replaced. State of an optimizer goes to the parameter of the same name, in whatever group; that of a
            source with numbers alone, as an optimizer's own `state_dict()`, goes by order, as in torch.
            Megatron-Core's ShardedTensors are matched by their keys.
        path: a path or URL of anything that `merge_checkpoint` reads.
        comm: the communicator; by default the current one.
        strict: raise an error for names of the state that the source lacks and for names of the source that no rank
            has, as torch does; else the report lists them, and it is an error only if the source has no tensor of the
            state, or no entry of a state of plain values. Shapes and dtypes must be equal in any case. Plain values of
            a torch checkpoint that no rank has are listed by the report alone, and so is extra state of modules if a
            safetensors checkpoint has none, as an export. State of an optimizer of another shape
            or dtype than the saved one is replaced.
        layout: rules for plain tensors of `state` that are parts of whole ones, as in `export_checkpoint`, by their
            dotted paths: ``{"*.up.weight": Shard(0)}``. Optimizer state of a parameter's shape follows the parameter's
            rule. A rule that renames (split, renumber) is for sources of tensors alone, such as a Hugging
            Face checkpoint, and not for what `save_checkpoint` has written.
        include: shell patterns, one or several, of the names in `state` to load, by their dotted paths:
            ``"model.encoder.*"``, or ``"model"`` for all in it; the items of a list have their indices as names,
            ``"optimizers.0"``, and a dataclass its fields. All else stays as it is, is not read, and counts as neither
            missing nor unexpected.
            Of an optimizer the state of each parameter, ``"optimizer.state.NAME"``, and its hyperparameters,
            ``"optimizer.param_groups.NAME"``, are selected by themselves. Another object with a state of its own, or a
            list, dataclass or namedtuple of plain values, is loaded whole if anything in it matches, as it was saved
            or as it is now. It is an error if nothing at all is selected on any rank; one of several patterns may
            match nothing.
        exclude: shell patterns, in the form of `include`, of the names in `state` to leave as they are: ``"random.*"``.
            Another object than an optimizer, or a list, dataclass or namedtuple of plain values, is left whole if
            anything in it matches, as it was saved or as it is now; of an optimizer the state of one parameter, or its
            hyperparameters.
        rename: from the source's names to those in `state`: a function, or (regex, replacement) pairs, which are
            applied in order. Names are dotted paths; the parameters of optimizers are renamed too. What moves with its
            mapping keeps its keys. What is inside a list, or in the state of another object, is not renamed. Where a
            model of transformers has other names in memory than in its files, this gives the names of the files.
        convert: convert the source's model to the names and values of the state first: a built-in conversion such as
            "torchtitan:llama3", the path of a JSON file (`statexchange.conversions.rules`), or the file's content.
            "inverse:" before the name or path converts in the other direction. Only the model's tensors are loaded
            then. A name of the source without a rule is unexpected. `rename` applies to the names after the conversion.
        convert_with: numbers that the conversion needs, as ``{"n_heads": 32}``. Others come from the config of a state
            that is a model of transformers, or from a config.json beside the source.
        dtype: None: dtypes must be equal, and values are loaded bit for bit. "state": where floating dtypes (float16,
            bfloat16, float32, float64) differ, values are cast to that of the tensor in `state`, rounded to nearest;
            the report's `notes` name tensors in which finite values became infinite.
            Optimizer state that does not exist yet gets the parameter's dtype if it has its shape, else the source's.
        replicas: what to do if the number of ranks has changed and ranks saved different values of one region or plain
            value, such as BatchNorm's statistics under DistributedDataParallel: "equal" raises ReplicaError, "root"
            takes the lowest rank's. On the same number of ranks, each gets its own.
        readers: who reads what ranks of several hosts need alike, as in DDP and HSDP: "host": each host; "job": one
            rank of the job, which sends it to the other hosts. None is "job" on NFS, whose one server all hosts share,
            and "host" elsewhere. Pass "host" if an NFS server is faster than the network between the ranks. Of an
            object store each host reads for itself.
        on_progress: called with the bytes that this rank has read and those that it will read.
        stall_timeout_s: limit of the time in which no rank moves a byte; the total time is not limited. A rank that
            does not call at all is waited for until the communicator's `timeout_s`.

    Returns:
        The number of bytes and tensors that this rank has read, and the names that were missing or unexpected.

    Raises:
        NotFoundError: there is no known checkpoint at `path`; with `strict` a name is missing from it; or it lacks a
            part of a tensor that a model of transformers has in one, as an expert.
        InvalidArgumentError: with `strict` a name is unexpected; a shape or dtype differs; an optimizer is of another
            class than the saved one; ranks passed different paths or options; a layout rule does not fit a tensor, or
            matches none; `include` and `exclude` leave nothing to load.
        IncompleteError: a rank's file or a region of a tensor is missing.
        OverlapError: two ranks saved overlapping regions of a tensor.
        ReplicaError: ranks saved different values of a region or plain value, or two live tensors share memory and the
            source has different values for them; then the state has been changed. Or what belongs to a rank was saved
            by another number of ranks.
        CorruptError: bytes differ from their digest, or files contradict each other.
        ReplacedError: the checkpoint was replaced during the load, twice.
        UnsafeError: `rename` gives two entries one name, or moves one into another.
        UnsupportedError, StorageError: see `statexchange.errors`.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.save_checkpoint({"model": {"w": torch.ones(2)}, "step": 7}, "saved")
        >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
        >>> report = sx.load_checkpoint(state, "saved")
        >>> state
        {'model': {'w': tensor([1., 1.])}, 'step': 7}
    """
    arguments = locals()
    communicator = as_communicator(comm)
    began = time.perf_counter()
    # Once, before a load that may run twice: `include` may be an iterator, which a second run would find used up.
    with communicator.phase("checking its options"):
        options = LoadOptions.of(arguments)
        conversion = ChosenConversion.of(options, state) if options.converts else None
        request = LoadRequest(state, path, options, CallOptions.of(arguments), began, conversion)
    return load_now(request, communicator)


def load_now(request: LoadRequest, comm: Communicator) -> LoadReport:
    """Load as `load_checkpoint` does. Collective."""
    # One pause, until all that a load makes is gone again: a collection in between would visit it, and all the garbage
    # that others have left before the load.
    with contextlib.ExitStack() as pause:
        pause.enter_context(collector_paused())
        try:
            report = _load(request, comm, pause)
        except ReplacedError as replaced:  # raised on all ranks: the new version is loaded instead, once
            try:
                report = _load(request, comm, pause)
            except StateExchangeError as error:
                # Tensors may have values of the version before, and only the first error says how many.
                raise error.located(advice=f"before this, the first try ended so: {replaced.message}") from replaced
    if comm.rank == 0:
        _log.info("loaded %s", report)
        for note in report.notes:
            _log.warning("loaded from %s: %s", report.path, note)
    return report


def _load(request: LoadRequest, comm: Communicator, pause: contextlib.ExitStack) -> LoadReport:
    """Load once. Collective. `pause` is that of the garbage collector, which ends before remote files are read.

    Each phase ends in an agreement of all ranks: what one raises in it, all raise, so that none waits for another that
    has failed. That is why collectives lie between the phases, and a step with a collective in its middle has two.
    """
    timeout_s = request.call.stall_timeout_s
    with contextlib.ExitStack() as holding:
        with comm.phase("reading the headers", timeout_s=timeout_s):
            source = holding.enter_context(open_for_state(request, comm))
        has_layout, in_job = request.options.layout is not None, False
        # Before ranks convert it: they compare the files, and each may convert them in its own way.
        if comm.world_size > 1:
            has_layout, in_job = check_same_source(source, request, comm)
        path = source.path
        with _finding(path, request, comm):
            loaded = source_content(request, source, comm)
            if not has_layout:
                plan = _plan(request, loaded)
                items = _items(_targets(plan, loaded, comm.rank), loaded)
        if has_layout:
            plan, items = _plan_with_layout(request, loaded, comm)
        # Last of the checks: a shape that differs says more than the names that differ because of it.
        if comm.world_size > 1 or plan.missing or plan.unexpected or plan.is_empty:
            compare_names(comm, plan, loaded)
        from_source = contextlib.nullcontext((items, 0))
        reading = from_source if request.reading is None else request.reading(source, items, comm)
        with reading as (read, num_in_memory):
            messages: Messages = {}
            # An object store is asked once on each host; files are in the page cache after their first reader.
            if source.opened.store.is_remote or in_job:
                messages = assign_readers(read, comm, in_job=in_job)
            if source.opened.store.is_remote:
                # Clients of object stores leave garbage in cycles that holds the bytes of a request.
                pause.close()
            with comm.phase("reading", timeout_s=timeout_s):
                _mark_targets(plan, read)
                nbytes, overflows = read_all(read, messages, comm, request.call.on_progress)
        # Once all ranks have read everything: where one cannot, no rank has another epoch or learning rate than before.
        with comm.phase("installing what was read", timeout_s=timeout_s):
            for install in plan.callbacks:
                install()
        notes: tuple[str, ...] = ()
        if loaded.tensors.aliases:
            notes += notes_on_lost_ties(plan, loaded.tensors.aliases)
        if request.options.dtype is not None:  # equal on all ranks
            notes += notes_on_overflows(comm, overflows)
    seconds = time.perf_counter() - request.began
    names = tuple(plan.missing), tuple(plan.unexpected)
    return LoadReport(path, len(plan.targets), nbytes, *names, seconds, source.step, notes, num_in_memory)


@contextlib.contextmanager
def _finding(path: str, request: LoadRequest, comm: Communicator) -> Iterator[None]:
    """Open a phase in which what is read is found in the source at `path`, which errors then name."""
    with comm.phase("finding its tensors", timeout_s=request.call.stall_timeout_s), located(path):
        yield


def _plan(request: LoadRequest, loaded: LoadSource) -> LoadPlan:
    """Match the live state with what the source has. Not collective."""
    plan = match(request.state, loaded.live, loaded.matching)
    plan.unexpected += loaded.converted.without_rule
    if loaded.tensors.own_rank is None:  # as many ranks as have saved get back what each had
        check_whose_state(plan, loaded)
    if plan.missing or loaded.converted.source.unreadable:
        settle_names(plan, loaded)
    return plan


def _plan_with_layout(request: LoadRequest, loaded: LoadSource, comm: Communicator) -> tuple[LoadPlan, list[ReadItem]]:
    """Return the plan, and what is read, where any rank has a layout. Collective.

    The names and boxes of a layout's parts follow from the parts of all ranks, so that each of the two exchanges lies
    between phases.
    """
    path = loaded.matching.path
    loaded.matching.renumbered = renumbered_names(comm, loaded.live, loaded.matching)
    with _finding(path, request, comm):
        plan = _plan(request, loaded)
        targets = _targets(plan, loaded, comm.rank)
    targets = _placed(targets, loaded.matching, comm)
    with _finding(path, request, comm):
        return plan, _items(targets, loaded)


class _LiveTarget(NamedTuple):
    """A live tensor at `path` of the state, or a part of one, and the source's name of what fills it.

    Of a padded tensor, as Megatron-Core pads vocabularies, the part is read that the source has, too.
    """

    name: str
    path: str
    local: LocalTensor
    is_padded: bool


def _mark_targets(plan: LoadPlan, items: Sequence[ReadItem]) -> None:
    """Increment the versions of the live tensors, and of the parts that are written: autograd must see the change."""
    # A DTensor has a version of its own beside that of its local part.
    changed = [target.live for target in plan.targets]
    for item in items:
        changed += item.local.tensors
    mark_changed(changed)


def _targets(plan: LoadPlan, loaded: LoadSource, rank: int) -> list[_LiveTarget]:
    """Describe the live tensors to fill; a layout's rule may split one into several."""
    matching, layout = loaded.matching, loaded.matching.layout
    # Before any is described: a rule for a parameter is one for its moments, too.
    if layout.rules:
        layout.like = _like_parameters(plan, loaded)
    targets = []
    with without_grad():  # a part of a parameter is a view, for which autograd would keep a node
        for target in plan.targets:
            is_padded = bool(getattr(target.live, "allow_shape_mismatch", False))
            rule = layout.rule_for(target.path) if layout.rules else None
            for local in local_tensors(target.path, target.live, rule, rank):
                name = target.name
                if name is None or local.shard.name != target.path:
                    name = matching.name_of_part(local.shard.name)
                targets.append(_LiveTarget(name, target.path, local, is_padded))
    return targets


def _like_parameters(plan: LoadPlan, loaded: LoadSource) -> dict[str, str]:
    """Return the paths of the tensors that lie as their parameters do, with the names of these."""
    like = {}
    for target in plan.targets:
        if target.name is not None:
            saved = loaded.tensors.by_name[target.name].saved
            if loaded.matching.is_like_parameter(saved, target.parameter_name):
                like[target.path] = target.parameter_name
    return like


def _placed(targets: Sequence[_LiveTarget], matching: Matching, comm: Communicator) -> list[_LiveTarget]:
    """Return the targets with each part's boxes in its whole, which follow from the parts of all ranks. Collective."""
    tensors: dict[str, LocalTensor] = {}
    for target in targets:
        tensors.setdefault(target.name, target.local.renamed(target.name))
    unused: tuple[str, ...] = ()
    if not matching.names.selects:  # else a pattern may be for tensors that are left out
        unused = tuple(sorted(matching.layout.unused))
    placed = place_parts(comm, Description(tensors, unused=unused), matching.layout).tensors
    wholes = []
    for target in targets:
        local = target.local
        if local.part is not None:
            local = local._replace(shard=placed[target.name].shard, part=None)
        wholes.append(target._replace(local=local))
    return wholes


def _items(targets: Sequence[_LiveTarget], loaded: LoadSource) -> list[ReadItem]:
    """Return what is read for the targets."""
    items = []
    path, options = loaded.matching.path, loaded.matching.names.options
    for target in targets:
        stored, local = loaded.tensors.by_name[target.name], target.local
        saved, shard = stored.saved, local.shard
        if saved.problem is not None:  # made by `StoredTensors`: files disagree on the tensor
            raise saved.problem
        # Asking torch takes longer than copying a small tensor: only memory that looks odd is asked again.
        for part, memory in zip(local.tensors, local.memory, strict=True):
            if not memory.is_plain:
                check_writable(part, target.path)
        has_dims = len(shard.global_shape) == len(saved.shape)
        if shard.global_shape != saved.shape and not (target.is_padded and has_dims):
            raise _other_shape(target, loaded, saved.shape)
        if shard.dtype != saved.dtype and not options.casts(saved.dtype, shard.dtype):
            text = "the state's dtype differs from the source's; dtype=\"state\" casts floating dtypes"
            raise InvalidArgumentError(text, name=target.path, path=path, expected=saved.dtype, found=shard.dtype)
        boxes = stored.boxes
        if boxes is None:
            boxes = loaded.tensors.boxes_of(stored, shard.boxes)
        items.append(ReadItem(target.name, local, boxes, saved.dtype))
    return items


def _other_shape(target: _LiveTarget, loaded: LoadSource, expected: tuple[int, ...]) -> InvalidArgumentError:
    text = (
        "the state's shape differs from the source's: build the state as it was saved, give a layout if each rank "
        "holds a part, or leave this tensor out by exclude"
    )
    shape = target.local.shard.global_shape
    return InvalidArgumentError(text, name=target.path, path=loaded.matching.path, expected=expected, found=shape)
