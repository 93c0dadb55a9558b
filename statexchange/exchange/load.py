"""The story of a load: what the source has is matched with the live state, read, and installed."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, ReplacedError
from statexchange.exchange.load_report import LoadReport, LoadRequest, notes_on_lost_ties, notes_on_overflows
from statexchange.exchange.load_source import LoadSource, located, open_for_state, source_content
from statexchange.exchange.name_check import compare_names, settle_names
from statexchange.exchange.placing import place_parts, renumbered_names
from statexchange.exchange.rank_checks import check_same_source, check_whose_state
from statexchange.exchange.reading import ReadItem, assign_readers, read_all
from statexchange.sharding.options import FLOATS
from statexchange.state.describe import Description, LocalTensor, local_tensors
from statexchange.state.load_plan import LoadPlan, Matching
from statexchange.state.match import match
from statexchange.tensors import check_writable, collector_paused, mark_changed, without_grad

__all__ = ["load_now"]

_log = logging.getLogger(__name__)


def load_now(request: LoadRequest, comm: Communicator) -> LoadReport:
    """Load as `load_checkpoint` does. Collective."""
    # One pause, until all that a load makes is gone again: a collection in between would visit it, and all the garbage
    # that others have left before the load.
    with contextlib.ExitStack() as pause:
        pause.enter_context(collector_paused())
        try:
            report = _load(request, comm, pause)
        except ReplacedError:  # raised on all ranks: the new version is loaded instead, once
            report = _load(request, comm, pause, reads_again=True)
    if comm.rank == 0:
        _log.info("loaded %s", report)
        for note in report.notes:
            _log.warning("loaded from %s: %s", report.path, note)
    return report


def _load(
    request: LoadRequest, comm: Communicator, pause: contextlib.ExitStack, *, reads_again: bool = False
) -> LoadReport:
    """Load once. Collective. `pause` is that of the garbage collector, which ends before remote files are read.

    Each phase ends in an agreement of all ranks: what one raises in it, all raise, so that none waits for another that
    has failed. That is why collectives lie between the phases, and a step with a collective in its middle has two.
    """
    timeout_s = request.call.stall_timeout_s
    with contextlib.ExitStack() as holding:
        with comm.phase("reading the headers", timeout_s=timeout_s):
            source = holding.enter_context(open_for_state(request, comm))
        has_layout = request.options.layout is not None
        # Before ranks convert it: they compare the files, and each may convert them in its own way.
        if comm.world_size > 1:
            has_layout = check_same_source(source, request, comm)
        finding = functools.partial(_finding, source.path, comm, timeout_s)
        with finding():
            loaded = source_content(request, source, comm)
            if not has_layout:
                plan = _plan(request, loaded)
                items = _items(_targets(plan, loaded, comm.rank), loaded)
        if has_layout:
            plan, items = _plan_with_layout(request, loaded, comm, finding)
        # Last of the checks: a shape that differs says more than the names that differ because of it.
        if comm.world_size > 1 or plan.missing or plan.unexpected or plan.is_empty:
            compare_names(comm, request.state, plan, loaded)
        if request.before_reading is not None:
            request.before_reading(items)
        readers = {}
        if source.opened.store.is_remote:
            # An object store is asked once per host; files are in the page cache after their first reader.
            readers = assign_readers(items, comm)
            # Clients of object stores leave garbage in cycles that holds the bytes of a request.
            pause.close()
        with comm.phase("reading", timeout_s=timeout_s):
            _mark_targets(plan, items)
            nbytes, overflows = read_all(items, readers, comm, request.call.on_progress, reads_again=reads_again)
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
    missing, unexpected = tuple(plan.missing), tuple(plan.unexpected)
    return LoadReport(source.path, len(plan.targets), nbytes, missing, unexpected, seconds, source.step, notes)


@contextlib.contextmanager
def _finding(path: str, comm: Communicator, timeout_s: float) -> Iterator[None]:
    """Open a phase in which what is read is found in the source at `path`, which errors then name."""
    with comm.phase("finding its tensors", timeout_s=timeout_s), located(path):
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


def _plan_with_layout(
    request: LoadRequest,
    loaded: LoadSource,
    comm: Communicator,
    finding: Callable[[], contextlib.AbstractContextManager[None]],
) -> tuple[LoadPlan, list[ReadItem]]:
    """Return the plan, and what is read, where any rank has a layout. Collective.

    The names and boxes of a layout's parts follow from the parts of all ranks, so that each of the two exchanges lies
    between phases.
    """
    loaded.matching.renumbered = renumbered_names(comm, loaded.live, loaded.matching)
    with finding():
        plan = _plan(request, loaded)
        targets = _targets(plan, loaded, comm.rank)
    targets = _placed(targets, loaded.matching, comm)
    with finding():
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
            local = replace(local, shard=placed[target.name].shard, part=None)
        wholes.append(target._replace(local=local))
    return wholes


def _items(targets: Sequence[_LiveTarget], loaded: LoadSource) -> list[ReadItem]:
    """Return what is read for the targets."""
    items = []
    path, options = loaded.matching.path, loaded.matching.names.options
    for target in targets:
        stored, local = loaded.tensors.by_name[target.name], target.local
        saved, shard = stored.saved, local.shard
        if saved.problem is not None:
            raise saved.problem
        # Asking torch takes longer than copying a small tensor: only memory that looks odd is asked again.
        for part, memory in zip(local.tensors, local.memory, strict=True):
            if not memory.is_plain:
                check_writable(part, target.path)
        has_dims = len(shard.global_shape) == len(saved.shape)
        if shard.global_shape != saved.shape and not (target.is_padded and has_dims):
            raise _other_shape(target, loaded, saved.shape)
        if shard.dtype != saved.dtype and not options.casts(saved.dtype, shard.dtype):
            hint = ""
            if saved.dtype in FLOATS and shard.dtype in FLOATS:
                hint = '; dtype="state" casts to the dtype that the state has'
            text = f"the state's dtype differs from the source's{hint}"
            raise InvalidArgumentError(text, name=target.path, path=path, expected=saved.dtype, found=shard.dtype)
        boxes = stored.boxes
        if boxes is None:
            boxes = loaded.tensors.boxes_of(stored)
        items.append(ReadItem(target.name, local, boxes, saved.dtype))
    return items


def _other_shape(target: _LiveTarget, loaded: LoadSource, expected: tuple[int, ...]) -> InvalidArgumentError:
    shape = target.local.shard.global_shape
    hint = "; build the state as it was saved, or leave this tensor out by exclude"
    # A plain tensor may be this rank's part of one that the job has cut itself.
    if len(shape) == len(expected) and target.local.placement is None and loaded.matching.loaded_by > 1:
        dim = 0
        while shape[dim] == expected[dim]:
            dim += 1
        hint = f'; if each rank holds a part, say so with layout={{"{target.path}": Shard({dim})}}'
    text = f"the state's shape differs from the source's{hint}"
    return InvalidArgumentError(text, name=target.path, path=loaded.matching.path, expected=expected, found=shape)
