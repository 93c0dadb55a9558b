"""Describe live state: a module or state dict as named shards with the tensors that hold their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.exchange.buffers import dtype_name, is_tensor, same_memory, settled
from statexchange.exchange.chunks import chunks_of
from statexchange.exchange.megatron import MegatronTensor, holds_sharded, kind_of, leaves
from statexchange.exchange.staging import Staging
from statexchange.layout.rules import Layout, Part, Rule
from statexchange.layout.shards import Shard, full_box
from statexchange.layout.spread import Placement
from statexchange.storage.tensorfile import Held

__all__ = [
    "Description",
    "HeldTensor",
    "describe",
    "is_module",
    "live_items",
    "load_extra_state",
    "module_items",
    "named_tensors",
]

# What wrappers put into module names: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of this rank's: its shard, and for each box the tensor that holds it.

    `part` is set for a plain tensor that has a layout rule: its shard says where the boxes lie in this rank's tensor,
    and where they lie in the whole is known once all ranks' parts are. `placement` is set for a tensor over a mesh of
    all ranks of which this rank's boxes are those that `local_boxes` gives. The shard's dtype may be another than the
    tensors': that in which their bytes are wanted. `reduce` is what is done with copies that differ, "max" or "min".
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

    def whole(self, staging: Staging, progress: Callable[[], None] | None = None) -> Held:
        """The shard with the bytes of all its boxes, which are made when they are asked for, by way of `staging`.

        `progress` is called for each part of them.
        """

        def parts(box: int) -> Iterator[memoryview]:
            for _, part in staging.parts(self.tensors[box], self.shard.dtype):
                yield part
                if progress is not None:
                    progress()

        return Held(self.shard, parts)


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


def _add_sharded(sharded: dict[str, MegatronTensor], shard: Any) -> None:
    if shard.key in sharded:
        sharded[shard.key].add(shard)
    else:
        sharded[shard.key] = MegatronTensor(shard)


def _items(state: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of all parts of a state."""
    for part in state if isinstance(state, list | tuple) else [state]:
        if is_module(part):
            # A module's extra state may be anything; it is no tensor of the model.
            yield from ((name, value) for name, value in _model_items(part).items() if is_tensor(value))
        elif isinstance(part, Mapping):
            yield from part.items()
        else:
            raise InvalidArgumentError(f"state must be a module, a mapping or a list of modules, not {type(part)!r}")


def is_module(value: Any) -> bool:
    """Whether `value` is a torch module, or behaves like one."""
    return hasattr(value, "state_dict") and hasattr(value, "modules")


def module_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """A module's state dict under the names that it has without wrappers; `keep_vars` gives the parameters themselves.

    With it goes an AveragedModel's count: at 0 its next update would put the model in place of the average. Two names
    that wrappers told apart are an InvalidArgumentError.
    """
    items = _model_items(module, keep_vars=keep_vars)
    for layer in _layers(module):
        if type(layer).__name__ == "AveragedModel":
            _add(items, "n_averaged", layer.n_averaged)
    return items


def live_items(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`module_items` in two: parameters and buffers themselves, which can be filled in place, and everything else.

    What else there is, extra state and the copies that some modules make of their tensors, goes by `load_extra_state`.
    """
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UnsupportedError("FSDP1 gives copies of its parts: load before wrapping, or use fully_shard")
    items = module_items(module, keep_vars=True)
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    live = {name: value for name, value in items.items() if is_tensor(value) and id(value) in own}
    return live, {name: value for name, value in items.items() if name not in live}


def _model_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """`module_items` without what the wrappers have of their own."""
    clean: dict[str, Any] = {}
    for name, value in _unwrapped(module).state_dict(keep_vars=keep_vars).items():
        _add(clean, _clean(name), value)
    return clean


def _add(items: dict[str, Any], name: str, value: Any) -> None:
    if name in items:
        raise InvalidArgumentError("two tensors have this name once wrappers are removed", name=name)
    items[name] = value


def load_extra_state(module: Any, extra: Mapping[str, Any]) -> None:
    """Give a module the entries of `module_items` that are not its parameters and buffers themselves."""
    module = _unwrapped(module)
    module.load_state_dict({n: extra[_clean(n)] for n in module.state_dict() if _clean(n) in extra}, strict=False)


def _unwrapped(module: Any) -> Any:
    return _layers(module)[-1]


def _layers(module: Any) -> list[Any]:
    """The wrappers around a model, the outermost first, and the model."""
    found = [module]
    while (kind := type(found[-1]).__name__) in ("DistributedDataParallel", "AveragedModel", "OptimizedModule"):
        found.append(found[-1]._orig_mod if kind == "OptimizedModule" else found[-1].module)  # noqa: SLF001
    return found


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _hold(name: str, tensor: Any, rule: Rule | None, rank: int) -> list[HeldTensor]:
    dtype = dtype_name(tensor, name)
    shape = tuple(int(size) for size in tensor.shape)
    reduce = rule.reduce if rule is not None else None
    if reduce is not None and dtype.startswith("C"):
        raise UnsupportedError(f"complex numbers have no {reduce}", name=name)
    if hasattr(tensor, "__create_chunk_list__"):
        if rule is not None and rule.says_where:
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
