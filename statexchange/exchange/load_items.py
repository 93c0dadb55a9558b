"""Find what a load reads: the boxes of each live tensor, with the stored boxes that fill them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from statexchange.comm.communicator import Communicator
from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError
from statexchange.exchange.placing import place_parts
from statexchange.exchange.reading import ReadItem
from statexchange.exchange.stored_tensors import StoredTensors
from statexchange.sharding import records
from statexchange.sharding.options import FLOATS, LoadOptions
from statexchange.sharding.paths import joined
from statexchange.sharding.plan import prove_cover
from statexchange.sharding.rules import Layout, renumber_names, with_dots
from statexchange.state.describe import Description, LocalTensor, describe_entry
from statexchange.state.entries import Entries
from statexchange.state.entry import Entry
from statexchange.state.flatten import LiveState
from statexchange.state.load_plan import LoadPlan
from statexchange.state.modules import live_items
from statexchange.state.saved_values import SavedTensor
from statexchange.tensors import check_writable, without_grad

__all__ = ["LiveTarget", "live_targets", "names_of", "place_targets", "read_item", "renumbered_names", "stored_entries"]


class LiveTarget(NamedTuple):
    """A live tensor at `path` of the state, or a part of one, and the source's name of what fills it."""

    name: str
    path: str
    local: LocalTensor
    is_padded: bool


def names_of(name: str, layout: Layout, renumbered: Mapping[str, str]) -> list[str]:
    """Return the names that a live tensor has in a source: several if a layout splits it."""
    if not layout.rules:
        return [name]
    rule = layout.rule_for(name)
    names = [name] if rule is None else rule.names(name)
    return [renumbered.get(new, new) for new in names]


def renumbered_names(comm: Communicator, live: LiveState, options: LoadOptions, layout: Layout) -> dict[str, str]:
    """Return the source's names of tensors that a layout renumbers over all ranks. Collective."""
    names: dict[str, str] = {}
    with comm.phase("naming its tensors"):
        if any(rule.renumber for rule in layout.rules.values()):
            for name in filter(options.wants, _live_names(live)):
                rule = layout.rule_for(name)
                names |= dict.fromkeys([name] if rule is None else rule.names(name), name)
    sent = comm.all_gather_object(names)
    with comm.phase("renumbering its tensors"):
        by_rank = {rank: records.parsed(raw, records.texts, "its names", rank) for rank, raw in enumerate(sent)}
        return renumber_names(by_rank, layout)[comm.rank]


def _live_names(live: LiveState) -> Iterator[str]:
    """Yield the names of the live tensors."""
    for entry in live.entries:
        if entry.kind == "tensor":
            yield entry.text
        elif entry.kind == "module":
            yield from (joined(entry.text, name) for name in live_items(entry.value)[0])


def stored_entries(
    text: str, keys: tuple[object, ...], entries: Entries, layout: Layout, renumbered: Mapping[str, str]
) -> list[Entry] | None:
    """Return the source's entries of the tensors that fill a live one; None if it lacks one."""
    found = []
    for name in names_of(text, layout, renumbered):
        entry = entries.at(name, keys if name == text else None)
        if entry is None or not isinstance(entry.leaf, SavedTensor):
            return None
        found.append(entry)
    return found


def live_targets(
    plan: LoadPlan, entries: Entries, tensors: StoredTensors, layout: Layout, renumbered: Mapping[str, str], rank: int
) -> list[LiveTarget]:
    """Describe the live tensors to fill; a layout's rule may split one into several."""
    if layout.rules:
        layout.like = {
            target.path: target.parameter_name
            for target in plan.targets
            if target.name is not None and like_parameter(target.name, target.parameter_name, entries, tensors, layout)
        }
    found = []
    with without_grad():
        for target in plan.targets:
            is_padded = bool(getattr(target.live, "allow_shape_mismatch", False))
            for local in describe_entry(target.path, target.live, layout, rank):
                name = target.name
                if name is None or local.shard.name != target.path:
                    source_name = renumbered.get(local.shard.name, local.shard.name)
                    entry = entries.at(source_name)
                    name = source_name if entry is None else entry.leaf.name
                found.append(LiveTarget(name, target.path, local, is_padded))
    return found


def like_parameter(name: str, parameter_name: str, entries: Entries, tensors: StoredTensors, layout: Layout) -> bool:
    """Whether a tensor of an optimizer's state has its parameter's shape in the source, and a layout shards that."""
    if not parameter_name or layout.rule_for(parameter_name) is None:
        return False
    parameter = entries.at(with_dots(parameter_name))
    if parameter is None or not isinstance(parameter.leaf, SavedTensor):
        return False
    return tensors.shape_of(parameter.leaf.name) == tensors.shape_of(name)


def place_targets(
    comm: Communicator, targets: Sequence[LiveTarget], layout: Layout, *, selects: bool
) -> list[LiveTarget]:
    """Return the targets with each part's boxes in its whole tensor. Collective."""
    tensors: dict[str, LocalTensor] = {}
    for target in targets:
        tensors.setdefault(target.name, target.local.renamed(target.name))
    unused: Iterable[str] = () if selects else sorted(layout.unused)
    placed = place_parts(comm, Description(tensors, unused=tuple(unused)), layout).tensors
    found = []
    for target in targets:
        whole = target.local
        if whole.part is not None:
            shard = replace(placed[target.name].shard, name=whole.shard.name)
            whole = replace(whole, shard=shard, part=None)
        found.append(target._replace(local=whole))
    return found


def read_item(target: LiveTarget, tensors: StoredTensors, options: LoadOptions) -> ReadItem:
    """Return what is read for a target.

    Raises:
        InvalidArgumentError: its shape or dtype differs from the source's, or it cannot be written.
        IncompleteError, OverlapError: the source's boxes are not those of a whole tensor.
    """
    stored, local, path = tensors.shard_of(target.name), target.local, tensors.source.path
    for part, memory in zip(local.tensors, local.memory, strict=True):
        if not memory.is_plain:
            check_writable(part, target.path)
    shape, expected = local.shard.global_shape, stored.global_shape
    # The common part of a padded tensor is read.
    if shape != expected and not (target.is_padded and len(shape) == len(expected)):
        hint = "; build the state as it was saved, or leave this tensor out by exclude"
        if len(shape) == len(expected) and local.placement is None and tensors.world_size > 1:
            dim = next(dim for dim in range(len(shape)) if shape[dim] != expected[dim])
            hint = f'; if each rank holds a part, say so with layout={{"{target.path}": Shard({dim})}}'
        text = f"the state's shape differs from the source's{hint}"
        raise InvalidArgumentError(text, name=target.path, path=path, expected=expected, found=shape)
    if local.shard.dtype != stored.dtype and not options.casts(stored.dtype, local.shard.dtype):
        castable = {stored.dtype, local.shard.dtype} <= set(FLOATS)
        hint = '; dtype="state" casts to the dtype that the state has' if castable else ""
        text = f"the state's dtype differs from the source's{hint}"
        found = local.shard.dtype
        raise InvalidArgumentError(text, name=target.path, path=path, expected=stored.dtype, found=found)
    boxes = tensors.boxes_of(target.name)
    try:
        prove_cover(target.name, stored.global_shape, tensors.holders_of(target.name))
    except (CorruptError, IncompleteError) as error:
        explained = tensors.source.explained(error)
        raise explained.located(name=target.name, path=path) from error
    return ReadItem(target.name, local, boxes, stored.dtype)
