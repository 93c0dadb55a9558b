"""Describe live state: a module or state dict as named shards with the tensors that hold their bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt
from statexchange.sharding.rules import Layout, Part, Rule
from statexchange.sharding.sharding_spec import Placement
from statexchange.sharding.shards import Shard, full_box
from statexchange.state.dtensors import chunks_of
from statexchange.state.megatron import MegatronTensor, holds_sharded, kind_of, leaves
from statexchange.state.modules import is_extra_state, is_module, is_plain_entry, model_items
from statexchange.tensors import dtype_name, is_tensor, same_memory, settled

if TYPE_CHECKING:
    import torch

__all__ = ["Description", "HeldTensor", "State", "describe", "describe_entry", "named_tensors"]

# State as callers give it: a module, a mapping of names to tensors (nested where a call says so), or a list of such.
State: TypeAlias = "torch.nn.Module | Mapping[str, Any] | Sequence[torch.nn.Module | Mapping[str, Any]]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of this rank's: its shard, and for each box the tensor that holds it.

    `part` is set for a plain tensor that has a layout rule: its shard says where the boxes lie in this rank's tensor,
    and where they lie in the whole is known once all ranks' parts are. `placement` is set for a tensor over a mesh of
    all ranks of which this rank's boxes are those that `local_boxes` gives. `reduce` is what is done with copies that
    differ, "max" or "min".
    """

    shard: Shard
    tensors: tuple[Any, ...]
    part: Part | None = None
    placement: Placement | None = None
    reduce: str | None = None

    def renamed(self, name: str) -> HeldTensor:
        """The same under another name."""
        part = None if self.part is None else replace(self.part, name=name)
        return replace(self, shard=replace(self.shard, name=name), part=part)


@dataclass(frozen=True, slots=True)
class Description:
    """All tensors of a state on this rank, in order.

    `aliases` maps a tied name to the one that is kept; `unused` are layout patterns that match nothing on this rank.
    `sources` maps a name that a layout made of another to that one.
    """

    held: Mapping[str, HeldTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Description:
        """The same under other names, for those that `names` has one for; aliases and sources keep theirs."""
        if not names:
            return self
        new = {name: names.get(name, name) for name in self.held}
        return replace(self, held={new[name]: held.renamed(new[name]) for name, held in self.held.items()})


def describe(state: Any, layout: Layout | None = None, rank: int = 0) -> Description:
    """Describe a module, a mapping of names to tensors, or a list of such (pipeline parts). Not collective.

    Raises UnsupportedError, naming the tensor, for what has no faithful representation: a Partial placement, sparse,
    quantised or meta tensors. `rank` is this one's, where a layout gives boxes by rank.
    """
    held: dict[str, HeldTensor] = {}
    aliases: dict[str, str] = {}
    sources: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    rules = layout or Layout({})
    for name, tensor in named_tensors(state):
        for part in _hold(name, settled(tensor), rules.rule_for(name), rank):
            if part.shard.name in held:
                raise InvalidArgumentError("two parts of the state use this name", name=part.shard.name)
            held[part.shard.name] = part
            if part.shard.name != name:
                sources[part.shard.name] = name
            key = tuple(map(same_memory, part.tensors))
            if key and None not in key and seen.setdefault(key, part.shard.name) != part.shard.name:
                aliases[part.shard.name] = seen[key]
    return Description(held, aliases, tuple(sorted(rules.unused)), sources)


def describe_entry(name: str, value: Any, layout: Layout, rank: int = 0) -> list[HeldTensor]:
    """Describe one entry of a state, as `describe` does: several tensors where the layout splits it. Not collective."""
    if is_tensor(value) and layout.rule_for(name) is None:
        return _hold(name, settled(value), None, rank)
    return list(describe({name: value}, layout, rank).held.values())


def named_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a state; a value that is no tensor is an InvalidArgumentError naming it.

    What Megatron-Core's sharded state dicts have goes by its key, all parts of one as one tensor, and what is no tensor
    in them is left out: extra state, and what Megatron-Core itself leaves out.
    """
    sharded: dict[str, MegatronTensor] = {}
    for name, value in _items(state):
        if not isinstance(name, str):
            raise InvalidArgumentError(f"state has the key {name!r}: names must be text")
        if is_tensor(value):
            yield name, value
            continue
        for path, leaf in leaves(value, name) if holds_sharded(value) else [(name, value)]:
            kind = kind_of(leaf)
            if kind == "tensor":
                _add_sharded(sharded, leaf)
            elif kind is None and is_tensor(leaf):
                yield path, leaf
            elif kind is None:
                raise InvalidArgumentError(
                    f"state[{path!r}] is a {type(leaf).__name__}, not a tensor: pass a module or one flat mapping; "
                    "save_checkpoint takes nested state"
                )
    yield from sharded.items()


def _tensors_of(module: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in a module's state dict; what else lies in it is left out only if it holds none.

    Extra state may be anything, and is no tensor of the model.
    """
    for name, value in model_items(module).items():
        if is_tensor(value):
            yield name, value
        elif not is_plain_entry(name, value):
            raise UnsupportedError(
                f"the module has a {type(value).__name__} in the place of a tensor, which may hold its weights, as "
                "quantized modules do: give the model before it was quantized",
                name=name,
            )
        elif not is_extra_state(name):
            _log.warning("%s is not a tensor but %s, and is left out", name, excerpt(value))


def _add_sharded(sharded: dict[str, MegatronTensor], shard: Any) -> None:
    if shard.key in sharded:
        sharded[shard.key].add(shard)
    else:
        sharded[shard.key] = MegatronTensor(shard)


def _items(state: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of all parts of a state."""
    for part in state if isinstance(state, list | tuple) else [state]:
        if is_module(part):
            yield from _tensors_of(part)
        elif isinstance(part, Mapping):
            yield from part.items()
        else:
            raise InvalidArgumentError(f"state must be a module, a mapping or a list of modules, not {type(part)!r}")


def _hold(name: str, tensor: Any, rule: Rule | None, rank: int) -> list[HeldTensor]:
    dtype = dtype_name(tensor, name)
    shape = tuple(int(size) for size in tensor.shape)
    reduce = rule.reduce if rule is not None else None
    if hasattr(tensor, "__create_chunk_list__"):
        if rule is not None and rule.is_explicit:
            raise InvalidArgumentError(
                f"layout rule for {rule.pattern!r} matches a tensor that says itself which part it is", name=name
            )
        held = [_hold_chunks(name, dtype, shape, tensor, rank)]
    elif rule is None:
        held = [HeldTensor(Shard(name, dtype, shape, (full_box(shape),)), (tensor,))]
    else:
        held = [_hold_part(part, dtype, tensor) for part in rule.parts(name, shape, rank)]
    return held if reduce is None else [replace(one, reduce=reduce) for one in held]


def _hold_part(part: Part, dtype: str, tensor: Any) -> HeldTensor:
    boxes = part.local_boxes()
    parts = [tensor[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))] for box in boxes]
    return HeldTensor(Shard(part.name, dtype, part.shape, boxes), tuple(parts) if part.cuts else (tensor,), part)


def _hold_chunks(name: str, dtype: str, shape: tuple[int, ...], tensor: Any, rank: int) -> HeldTensor:
    """A tensor that tells its own chunks by torch's protocol, as DTensor and its placements do."""
    boxes = []
    parts = []
    chunks, placement = chunks_of(name, tensor, rank)
    for box, part in chunks:
        found = (dtype_name(part, name), tuple(part.shape))
        if found != (dtype, box.shape):
            if not box.numel and not part.numel():
                continue  # torch is of two minds about the shape of nothing
            raise UnsupportedError(
                "the local part does not fit its box", name=name, expected=(dtype, box.shape), found=found
            )
        boxes.append(box)
        parts.append(part)
    return HeldTensor(Shard(name, dtype, shape, tuple(boxes)), tuple(parts), placement=placement)
