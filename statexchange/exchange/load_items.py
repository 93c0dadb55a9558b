"""Find what a load reads: the boxes of each live tensor, with the stored boxes that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.placing import place_parts
from statexchange.exchange.reading import ReadItem
from statexchange.sharding.options import FLOATS
from statexchange.state.describe import Description, LocalTensor, local_tensors
from statexchange.state.install import (
    LoadPlan,
    Matching,
)
from statexchange.tensors import check_writable, mark_changed, without_grad

__all__ = ["items_to_read", "mark_targets"]


class _Target(NamedTuple):
    """A live tensor at `path` of the state, or a part of one, and the source's name of what fills it.

    Of a padded tensor, as Megatron-Core pads vocabularies, the part is read that the source has, too.
    """

    name: str
    path: str
    local: LocalTensor
    is_padded: bool


def items_to_read(
    plan: LoadPlan, loaded: LoadSource, comm: Communicator, *, has_layout: bool, timeout_s: float
) -> list[ReadItem]:
    """Return what is read for each live tensor of a plan. Collective if any rank has a layout.

    Raises:
        InvalidArgumentError: a shape or dtype differs from the source's, or a tensor cannot be written.
        IncompleteError, OverlapError: the source's boxes are not those of a whole tensor.
    """
    with comm.phase("finding its tensors", timeout_s=timeout_s):
        targets = _targets(plan, loaded, comm.rank)
    if has_layout:
        targets = _placed(targets, loaded.matching, comm)
    # A phase of its own, as ranks exchange their parts before it.
    with comm.phase("comparing the tensors", timeout_s=timeout_s):
        return _items(targets, loaded)


def mark_targets(plan: LoadPlan, items: Sequence[ReadItem]) -> None:
    """Increment the versions of the live tensors, and of the parts that are written: autograd must see the change."""
    # A DTensor has a version of its own beside that of its local part.
    changed = [target.live for target in plan.targets]
    for item in items:
        changed += item.local.tensors
    mark_changed(changed)


def _targets(plan: LoadPlan, loaded: LoadSource, rank: int) -> list[_Target]:
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
                targets.append(_Target(name, target.path, local, is_padded))
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


def _placed(targets: Sequence[_Target], matching: Matching, comm: Communicator) -> list[_Target]:
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


def _items(targets: Sequence[_Target], loaded: LoadSource) -> list[ReadItem]:
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


def _other_shape(target: _Target, loaded: LoadSource, expected: tuple[int, ...]) -> InvalidArgumentError:
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
