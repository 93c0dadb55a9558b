"""Describe live state: the tensors of a module or state dict as named shards, with the memory of their boxes.

A DTensor's boxes follow from its mesh and placements. Any other tensor with torch's method `__create_chunk_list__`
lists its own chunks.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt, type_text
from statexchange.sharding.rules import Layout, Part, Rule
from statexchange.sharding.sharding_spec import DimSplit, Placement, coordinate_of, local_boxes
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.state.megatron import MegatronTensor, add_sharded, holds_sharded, leaves
from statexchange.state.tree import sharded_kind
from statexchange.state.types import Leaf, Module
from statexchange.state.units import is_extra_state, is_module, model_items
from statexchange.tensors import (
    TensorLike,
    TensorMemory,
    checked_dtype,
    is_tensor_type,
    memory_of,
    same_memory,
    wait_tensor,
    without_grad,
)
from statexchange.values import has_text

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# State as callers give it: a module, a mapping of names to tensors (nested where a call allows it), or a list of such.
State: TypeAlias = "Module | Mapping[str, Leaf] | Sequence[Module | Mapping[str, Leaf]]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The layout of a DTensor on its mesh, for this rank; one object serves all of one mesh, shape and placements.

    Attributes:
        boxes: the boxes of the local part.
        begins: where each begins in the local part, if that has several.
        placement: set if `local_boxes` computes exactly this rank's boxes from it: then one record describes the boxes
            of all ranks.
        mesh_ranks: the ranks of the mesh in C order; () for the ranks 0, 1, ...
        mesh: the ranks of the mesh and what each axis splits, as text; "" for tensors without a mesh.
        copies: the ranks that have the same boxes by the mesh, as text; "" if it is this rank alone.
        problem: why the tensor is refused.
    """

    boxes: tuple[Box, ...] = ()
    begins: tuple[tuple[int, ...], ...] | None = None
    placement: Placement | None = None
    mesh_ranks: tuple[int, ...] = ()
    mesh: str = ""
    copies: str = ""
    problem: str | None = None


NO_MESH = MeshLayout()


class LocalTensor(NamedTuple):
    """One named tensor on this rank.

    Attributes:
        shard: the name, dtype, global shape and this rank's boxes.
        tensors: the memory of each box.
        memory: where the elements of each of `tensors` lie; () for tensors that were made from others.
        layout: what its mesh says of it; `NO_MESH` for a tensor without one.
        part: set for a plain tensor with a layout rule. The shard's boxes are then relative to this rank's tensor:
            offsets in the whole tensor follow only from the parts of all ranks.
        reduce: how to combine copies that differ, "max" or "min".
    """

    shard: Shard
    tensors: tuple[TensorLike, ...]
    memory: tuple[TensorMemory, ...] = ()
    layout: MeshLayout = NO_MESH
    part: Part | None = None
    reduce: str | None = None

    def renamed(self, name: str) -> LocalTensor:
        """Return the same tensor under another name."""
        part = self.part
        if part is not None:
            part = replace(part, name=name)
        return self._replace(shard=replace(self.shard, name=name), part=part)


@dataclass(frozen=True, slots=True)
class Description:
    """All tensors of a state on this rank.

    Attributes:
        tensors: the tensors by name, in the order of the state.
        aliases: the name that is kept for each other name of a tied tensor.
        unused: layout patterns that match nothing on this rank.
        sources: the name in the state of each tensor that a layout rule has renamed.
        extra_state: the names of extra state that is left out.
    """

    tensors: Mapping[str, LocalTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    extra_state: tuple[str, ...] = ()

    @property
    def has_parts(self) -> bool:
        """Whether this rank holds a part of a tensor, and not the whole."""
        num_parts = 0
        for local in self.tensors.values():
            # Not by `is_whole` and `any`, which run Python code twice for each tensor of each save.
            num_parts += local.shard.boxes != (full_box(local.shard.global_shape),)
        return num_parts > 0

    def renamed(self, names: Mapping[str, str]) -> Description:
        """Return this with tensors renamed as `names` maps; aliases and sources keep their names."""
        if not names:
            return self
        renamed = {}
        for name, local in self.tensors.items():
            new = names.get(name, name)
            renamed[new] = local.renamed(new)
        return replace(self, tensors=renamed)


def describe(
    state: State, layout: Layout | None = None, rank: int = 0, *, with_extra_state: bool = True
) -> Description:
    """Describe a module, a mapping of names to tensors, or a list of such (pipeline parts). Not collective.

    Args:
        state: the state.
        layout: rules for plain tensors that are parts of larger ones.
        rank: this rank, for layouts that give boxes by rank.
        with_extra_state: also describe extra state that is a tensor; other extra state is always left out.

    Raises:
        UnsupportedError: a tensor is sparse, quantised, meta, or has a Partial placement; the error names it.
        InvalidArgumentError: two parts of the state use one name, or an entry is no tensor.
    """
    tensors: dict[str, LocalTensor] = {}
    sources: dict[str, str] = {}
    rules = layout or Layout({})
    extra_state: list[str] = []
    # Before the block: a module's state_dict() may run hooks, which are not to be run without grad.
    named = _named_tensors(state, extra_state, with_extra_state=with_extra_state)
    with without_grad():
        for name, tensor in named:
            rule = None
            if rules.rules:
                rule = rules.rule_for(name)
            for local in local_tensors(name, tensor, rule, rank):
                new_name = local.shard.name
                # A layout may give a tensor the name of another.
                if new_name in tensors:
                    raise _used_twice(new_name)
                tensors[new_name] = local
                if new_name != name:
                    sources[new_name] = name
    return Description(tensors, _aliases(tensors), tuple(sorted(rules.unused)), sources, tuple(extra_state))


def _aliases(tensors: Mapping[str, LocalTensor]) -> dict[str, str]:
    """Return the first name of each tensor that is tied to one before it; tied tensors are written once."""
    # By address first, which is known: few tensors share one, and all else that is compared would be asked of torch.
    first_at: dict[tuple[str, int], str] = {}
    shared: list[tuple[str, str]] = []
    for name, local in tensors.items():
        for memory in local.memory[:1]:
            first = first_at.setdefault((memory.device, memory.begin), name)
            if first != name:
                shared.append((first, name))
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for pair in shared:
        for name in pair:
            memories = tuple(map(same_memory, tensors[name].tensors))
            # None stands for memory that cannot be identified, as of empty tensors.
            if None not in memories and seen.setdefault(memories, name) != name:
                aliases[name] = seen[memories]
    return aliases


def _used_twice(name: str) -> InvalidArgumentError:
    return InvalidArgumentError("two parts of the state use this name", name=name)


def _named_tensors(
    state: State, extra_state: list[str], *, with_extra_state: bool
) -> list[tuple[str, TensorLike | MegatronTensor]]:
    """Return the (name, tensor) pairs of a state; add to `extra_state` the names of extra state that is left out.

    ShardedTensors of Megatron-Core are named by their keys; all parts of a key are one tensor. Other objects in its
    sharded state dicts are left out: what Megatron-Core itself does not save.

    Raises:
        InvalidArgumentError: a name is no text, or a value is no tensor; the error names it.
    """
    named: list[tuple[str, TensorLike | MegatronTensor]] = []
    sharded: dict[str, MegatronTensor] = {}
    for name, value in _items(state):
        if not isinstance(name, str):
            raise InvalidArgumentError(f"state has the key {name!r}: names must be text")
        if is_tensor_type(type(value)) and (with_extra_state or not is_extra_state(name)):
            named.append((name, value))
            continue
        named_leaves = [(name, value)]
        # Only Megatron-Core's state dicts are nested. In any other a mapping is an error, which names the entry.
        if holds_sharded(value):
            named_leaves = leaves(value, name)
        for path, leaf in named_leaves:
            if is_extra_state(path) and not (with_extra_state and is_tensor_type(type(leaf))):
                extra_state.append(path)
            elif is_tensor_type(type(leaf)):
                named.append((path, leaf))
            elif sharded_kind(leaf) == "tensor":
                add_sharded(sharded, leaf)
            elif sharded_kind(leaf) is None:
                raise InvalidArgumentError(
                    f"state[{path!r}] is {type_text(leaf)}, not a tensor: pass a module or one flat mapping; "
                    "save_checkpoint takes nested state"
                )
    named += sharded.items()
    return named


def _items(state: State) -> list[tuple[object, Leaf]]:
    """Return the entries of all parts of a state."""
    items: list[tuple[object, Leaf]] = []
    # Parts, as the stages of a pipeline, share one namespace; a name that two have is refused where it is described.
    for part in state if isinstance(state, list | tuple) else [state]:
        if is_module(part):
            items += _tensors_of(part)
        elif isinstance(part, Mapping):
            items += part.items()
        else:
            what = type_text(state)
            if part is not state:
                what += f" that holds {type_text(part)}"
            raise InvalidArgumentError(f"the state must be a module, a mapping or a list of these, not {what}")
    return items


def _tensors_of(module: Leaf) -> list[tuple[str, Leaf]]:
    """Return a module's tensors and extra state; raise UnsupportedError for an entry that may hide weights.

    Other plain values are left out with a warning.
    """
    items = []
    for name, value in model_items(module).items():
        if is_tensor_type(type(value)) or is_extra_state(name):
            items.append((name, value))
        elif not has_text(value):
            raise UnsupportedError(
                f"the module has {type_text(value)} in the place of a tensor, which may hold its weights, as "
                "quantized modules do: give the model before it was quantized",
                name=name,
            )
        else:
            _log.warning("%s is not a tensor but %s, and is left out", name, excerpt(value))
    return items


def local_tensors(name: str, tensor: Leaf, rule: Rule | None = None, rank: int = 0) -> list[LocalTensor]:
    """Describe one tensor; a layout rule may split it into several. Not collective.

    A plain tensor of shape (4, 2) has one box, from (0, 0) on; the rank 1 of two that have a DTensor of this shape has
    one of shape (2, 2) from (2, 0) on.

    Raises:
        UnsupportedError: the tensor is sparse, quantised, meta, or has a Partial placement; the error names it.
        InvalidArgumentError: the rule does not fit the tensor, or gives two parts one name.
    """
    if hasattr(tensor, "__create_chunk_list__"):
        # A mesh already says where its parts lie. Only a reduction may be asked of it.
        if rule is not None and rule.is_explicit:
            raise InvalidArgumentError(
                f"layout rule for {rule.pattern!r} matches a tensor that is sharded already", name=name
            )
        described = [_from_chunks(name, checked_dtype(tensor, name), tuple(tensor.shape), tensor, rank)]
    else:
        # Even if no byte is read: an unknown dtype or a freed storage is an error here, which names the tensor.
        memory = memory_of(tensor, name)
        shape = tuple(memory.tensor.shape)
        if rule is None:
            shard = _shard(name, memory.dtype, shape, (full_box(shape),))
            return [LocalTensor(shard, (memory.tensor,), (memory,))]
        described = []
        names: set[str] = set()
        for part in rule.parts(name, shape, rank):
            if part.name in names:
                raise _used_twice(part.name)
            names.add(part.name)
            described.append(_from_part(part, memory))
    if rule is not None and rule.reduce is not None:
        described = [local._replace(reduce=rule.reduce) for local in described]
    return described


def _from_part(part: Part, memory: TensorMemory) -> LocalTensor:
    """Describe a plain tensor that a layout rule makes a part of a larger one."""
    boxes, tensor = part.local_boxes(), memory.tensor
    tensors, memories = [tensor], [memory]
    if part.cuts:
        # Views, so that what is read into them fills the tensor.
        tensors = [tensor[tuple(map(slice, box.offsets, box.ends))] for box in boxes]
        memories = [memory_of(cut, part.name) for cut in tensors]
    shard = Shard(part.name, memory.dtype, part.shape, boxes)
    return LocalTensor(shard, tuple(tensors), tuple(memories), part=part)


def _from_chunks(name: str, dtype: str, shape: tuple[int, ...], tensor: Leaf, rank: int) -> LocalTensor:
    """Describe a tensor with torch's `__create_chunk_list__`, such as a DTensor."""
    boxes = []
    tensors = []
    memories = []
    chunks, layout = _chunks_of(name, tensor, rank)
    for box, part in chunks:
        memory = memory_of(part, name)
        present = (memory.dtype, tuple(part.shape))
        if present != (dtype, box.shape):
            if not box.numel and not part.numel():
                continue  # torch gives an empty chunk and its tensor different shapes
            raise UnsupportedError(
                "the local part does not fit its box", name=name, expected=(dtype, box.shape), found=present
            )
        boxes.append(box)
        tensors.append(part)
        memories.append(memory)
    return LocalTensor(_shard(name, dtype, shape, tuple(boxes)), tuple(tensors), tuple(memories), layout)


# The same object for the same tensor, by which a save finds what was made of it for the last one, see `LongTuple`.
_shard = functools.lru_cache(1 << 18)(Shard)


def new_dtensor(like: DTensor, shape: Sequence[int], dtype: torch.dtype, dims: Collection[int]) -> DTensor:
    """Return a new DTensor on the mesh of `like`, sharded as `like` is in the dims `dims`, and replicated in others.

    Not collective.
    """
    from torch.distributed.tensor import Replicate, Shard, zeros

    placements = [*like.placements]
    for axis, placement in enumerate(like.placements):
        if type(placement) is not Shard or placement.dim not in dims:
            placements[axis] = Replicate()
    return zeros(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)


def _chunks_of(name: str, tensor: Leaf, rank: int) -> tuple[list[tuple[Box, torch.Tensor]], MeshLayout]:
    """Return the boxes that this rank holds, each with its memory, and what else a DTensor's mesh says.

    Not collective. Of a (4, 2) DTensor with Shard(0) on two ranks the rank 1 holds the box at (2, 0) of shape (2, 2).

    Raises:
        UnsupportedError: a placement is Partial, or a mesh lists ranks out of order; the error names the tensor.
    """
    if getattr(tensor, "device_mesh", None) is None:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        chunks = []
        for index, chunk in enumerate(tensor.__create_chunk_list__()):
            memory = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets, index))
            chunks.append((_box(chunk), memory))
        return chunks, NO_MESH
    layout = _layout_of(tensor, rank)
    if layout.problem is not None:
        raise UnsupportedError(layout.problem, name=name)
    if not layout.boxes:
        return [], layout
    local = _local_part(tensor)
    if layout.begins is None:
        return [(box, local) for box in layout.boxes], layout
    parts = []
    for box, begin in zip(layout.boxes, layout.begins, strict=True):
        parts.append((box, local[tuple(map(slice, begin, map(add, begin, box.shape)))]))
    return parts, layout


def _local_part(tensor: DTensor) -> torch.Tensor:
    # Outside of autograd's graph: `to_local` would take most of the time to add a node to it, and torch refuses to
    # slice the local part of a parameter there once it was filled.
    import torch

    if torch.is_grad_enabled():
        with torch.no_grad():
            return _local_part(tensor)
    local: torch.Tensor = wait_tensor(tensor.to_local())
    return local.detach() if local.requires_grad else local


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))


# A cache, by mesh: most of a model's tensors share shape and placements, and torch is slow to compute chunks.
_layouts: weakref.WeakKeyDictionary[DeviceMesh, dict[object, MeshLayout]] = weakref.WeakKeyDictionary()


def _layout_of(tensor: DTensor, rank: int) -> MeshLayout:
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    of_mesh = _layouts.get(mesh)
    if of_mesh is None:
        of_mesh = _layouts.setdefault(mesh, {})
    # One mesh object may serve several ranks, which are threads.
    key = placements, tensor.shape, rank, None if coordinate is None else tuple(coordinate)
    layout = of_mesh.get(key)
    if layout is None:
        layout = replace(_compute_layout(tensor, mesh, coordinate, rank), mesh=f"{mesh.mesh.tolist()} {placements}")
        of_mesh[key] = layout
    return layout


def _compute_layout(tensor: DTensor, mesh: DeviceMesh, coordinate: Sequence[int] | None, rank: int) -> MeshLayout:
    shape, mesh_shape = tuple(tensor.shape), tuple(mesh.mesh.shape)
    splits: list[DimSplit | None] = []
    is_split = False
    for placement in tensor.placements:
        if placement.is_partial():
            return MeshLayout(problem=f"placement {placement} holds an unfinished sum; redistribute it first")
        split = None
        if hasattr(placement, "dim"):
            # Counted from the last one, it would be another placement than that of a rank that counts from the first.
            dim = placement.dim
            if dim < 0:
                dim += len(shape)
            split = DimSplit(dim, getattr(placement, "split_factor", 1))
            is_split |= split.split_factor > 1
        splits.append(split)
    if coordinate is None:  # this rank is not in the tensor's mesh
        return MeshLayout()
    for axis, split in enumerate(splits):
        if split is not None and bool((mesh.mesh.diff(dim=axis) <= 0).any()):
            problem = "its mesh lists ranks out of order: torch's functions then disagree about which rank holds what"
            return MeshLayout(problem=problem)
    begins = None
    if is_split:
        # Several runs of rows. torch's one chunk does not show them: it begins with the first and has the size of all.
        runs = dict(local_boxes(shape, mesh_shape, coordinate, splits))
        boxes, begins = tuple(runs), tuple(runs.values())
    else:
        chunks: Leaf = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        boxes = tuple(map(_box, chunks))
    # The ranks at the same place of each axis that splits the tensor, wherever they are on the others.
    place = tuple(slice(None) if split is None else at for split, at in zip(splits, coordinate, strict=True))
    copies = mesh.mesh[place].flatten().tolist()
    shown = str(copies) if len(copies) > 1 else ""
    layout = MeshLayout(boxes, begins, copies=shown)
    ranks: list[int] = mesh.mesh.flatten().tolist()
    # Ranks of a communicator may be numbered in another way than those of torch's default group.
    if rank not in ranks or len(boxes) > 1:
        return layout
    try:
        implied = local_boxes(shape, mesh_shape, coordinate_of(ranks.index(rank), mesh_shape), splits)
    except ValueError:
        return layout
    # torch has an empty chunk where the rules have no box.
    if [box for box, _ in implied] != [box for box in boxes if box.numel]:
        return layout
    mesh_ranks = () if ranks == list(range(len(ranks))) else tuple(ranks)
    return replace(layout, placement=Placement(mesh_shape, tuple(splits)), mesh_ranks=mesh_ranks)
