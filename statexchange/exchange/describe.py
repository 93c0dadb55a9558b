"""Describe live state: a module or state dict as named shards with the tensors that hold their bytes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.exchange.buffers import dtype_name, host_bytes, is_tensor, same_memory, settled
from statexchange.layout.shards import Box, Shard, full_box
from statexchange.storage.tensorfile import Held

__all__ = [
    "Description",
    "HeldTensor",
    "Layout",
    "describe",
    "is_module",
    "load_extra_state",
    "module_items",
    "named_tensors",
    "resolve_layout",
]

# What wrappers put into module names: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

Layout = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of this rank's: its shard, and for each box the tensor that holds it.

    `cut_dim` is set for a plain tensor that a layout rule calls one of equal-rank parts: its true box is known once all
    ranks' parts are. `cast` is the torch dtype in which its bytes are wanted, if another.
    """

    shard: Shard
    tensors: tuple[Any, ...]
    cut_dim: int | None = None
    cast: Any = None

    def box_bytes(self, index: int) -> memoryview:
        """Bytes of one box in C order, in the dtype of the shard."""
        tensor = self.tensors[index]
        return host_bytes(tensor if self.cast is None else tensor.to(self.cast))

    def whole(self) -> Held:
        """The shard with the bytes of all its boxes."""
        views = [self.box_bytes(index) for index in range(len(self.shard.boxes))]
        return Held(self.shard, views[0] if len(views) == 1 else memoryview(b"".join(views)))


@dataclass(frozen=True, slots=True)
class Description:
    """All tensors of a state on this rank, in order.

    `aliases` maps a tied name to the one that is kept; `unused` are layout patterns that match nothing on this rank.
    """

    held: Mapping[str, HeldTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def describe(state: Any, layout: Layout | None = None) -> Description:
    """Describe a module, a mapping of names to tensors, or a list of modules (pipeline parts). Not collective.

    Raises UnsupportedError, naming the tensor, for what has no faithful representation: a Partial placement, sparse,
    quantised or meta tensors.
    """
    held: dict[str, HeldTensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    rules = _Rules(layout or {})
    for name, tensor in named_tensors(state):
        if name in held:
            raise InvalidArgumentError("two parts of the state use this name", name=name)
        held[name] = _hold(name, settled(tensor), rules.rule_for(name))
        key = same_memory(held[name].tensors[0]) if held[name].tensors else None
        if key is not None and seen.setdefault(key, name) != name:
            aliases[name] = seen[key]
    return Description(held, aliases, tuple(sorted(rules.unused)))


def named_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a state; a value that is no tensor is an InvalidArgumentError naming it."""
    parts = state if isinstance(state, list | tuple) else [state]
    for part in parts:
        # A module's extra state may be anything; it is no tensor of the model.
        items = {n: v for n, v in module_items(part).items() if is_tensor(v)} if is_module(part) else part
        if not isinstance(items, Mapping):
            raise InvalidArgumentError(f"state must be a module, a mapping or a list of modules, not {type(part)!r}")
        for name, value in items.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"state has the key {name!r}: names must be text")
            if not is_tensor(value):
                found = f"state[{name!r}] is a {type(value).__name__}, not a tensor"
                raise InvalidArgumentError(
                    f"{found}: pass a module or one flat mapping; save_checkpoint takes nested state"
                )
            yield name, value


def is_module(value: Any) -> bool:
    """Whether `value` is a torch module, or behaves like one."""
    return hasattr(value, "state_dict") and hasattr(value, "modules")


def module_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """A module's state dict under the names that it has without wrappers; `keep_vars` gives the parameters themselves.

    Two names that wrappers told apart are an InvalidArgumentError.
    """
    module = _unwrapped(module)
    clean: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=keep_vars).items():
        if _clean(name) in clean:
            raise InvalidArgumentError("two tensors have this name once wrappers are removed", name=_clean(name))
        clean[_clean(name)] = value
    return clean


def load_extra_state(module: Any, extra: Mapping[str, Any]) -> None:
    """Give a module those entries of `module_items` that are no tensors."""
    module = _unwrapped(module)
    module.load_state_dict({n: extra[_clean(n)] for n in module.state_dict() if _clean(n) in extra}, strict=False)


def _unwrapped(module: Any) -> Any:
    while type(module).__name__ in ("DistributedDataParallel", "AveragedModel", "OptimizedModule"):
        module = module._orig_mod if type(module).__name__ == "OptimizedModule" else module.module  # noqa: SLF001
    return module


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _hold(name: str, tensor: Any, rule: Any) -> HeldTensor:
    dtype = dtype_name(tensor, name)
    shape = tuple(int(size) for size in tensor.shape)
    if hasattr(tensor, "__create_chunk_list__"):
        return _hold_chunks(name, dtype, shape, tensor)
    if rule is None:
        return HeldTensor(Shard(name, dtype, shape, (full_box(shape),)), (tensor,))
    if isinstance(rule, int):
        if not -len(shape) <= rule < len(shape):
            raise InvalidArgumentError(f"layout says dim {rule}, but the shape is {shape}", name=name)
        return HeldTensor(Shard(name, dtype, shape, (full_box(shape),)), (tensor,), rule % len(shape))
    global_shape, box = rule
    if box.shape != shape:
        raise InvalidArgumentError("layout box and tensor differ in shape", name=name, expected=box.shape, found=shape)
    return HeldTensor(Shard(name, dtype, global_shape, (box,)), (tensor,))


def _hold_chunks(name: str, dtype: str, shape: tuple[int, ...], tensor: Any) -> HeldTensor:
    """A tensor that tells its own chunks by torch's protocol, as DTensor and its placements do."""
    partial = [str(p) for p in getattr(tensor, "placements", ()) if p.is_partial()]
    if partial:
        raise UnsupportedError(f"placement {partial[0]} holds an unfinished sum; redistribute it first", name=name)
    boxes = []
    parts = []
    for chunk in _own_chunks(name, tensor):
        box = Box(tuple(int(o) for o in chunk.offsets), tuple(int(s) for s in chunk.sizes))
        part = _chunk_tensor(name, tensor, chunk)
        dtype_name(part, name)
        if tuple(part.shape) != box.shape:
            raise UnsupportedError(
                "the local part does not fit its box", name=name, expected=box.shape, found=tuple(part.shape)
            )
        boxes.append(box)
        parts.append(part)
    return HeldTensor(Shard(name, dtype, shape, tuple(boxes)), tuple(parts))


def _own_chunks(name: str, tensor: Any) -> list[Any]:
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return list(tensor.__create_chunk_list__())
    if mesh.get_coordinate() is None:
        return []  # this rank is not in the tensor's mesh
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard() and bool((mesh.mesh.diff(dim=axis) <= 0).any()):
            raise UnsupportedError(
                "its mesh lists ranks out of order, and torch itself is of two minds about who then holds what",
                name=name,
            )
    return list(tensor.__create_chunk_list__())


def _chunk_tensor(name: str, tensor: Any, chunk: Any) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if hasattr(tensor, "to_local"):
        return settled(tensor.to_local())
    return tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))


class _Rules:
    """Layout rules by name pattern; each gives None (replicated), a dim, or (global shape, box)."""

    def __init__(self, layout: Layout) -> None:
        if not isinstance(layout, Mapping):
            raise InvalidArgumentError(f"layout must map name patterns to rules, not be a {type(layout).__name__}")
        self._rules = [(pattern, _parse_rule(pattern, rule)) for pattern, rule in layout.items()]
        self.unused = set(layout)

    def rule_for(self, name: str) -> Any:
        for pattern, rule in self._rules:
            if fnmatch.fnmatchcase(name, pattern):
                self.unused.discard(pattern)
                return rule
        return None


def _parse_rule(pattern: str, rule: Any) -> Any:
    """torch's Shard(dim), Replicate(), ``{"dim": 0}``, or ``{"global_shape": ..., "offsets": ..., "shape": ...}``."""
    if type(rule).__name__ == "Replicate":
        return None
    if type(rule).__name__ == "Shard":
        return int(rule.dim)
    if isinstance(rule, Mapping) and rule.keys() == {"dim"}:
        return int(rule["dim"])
    if isinstance(rule, Mapping) and rule.keys() == {"global_shape", "offsets", "shape"}:
        return tuple(rule["global_shape"]), Box(tuple(rule["offsets"]), tuple(rule["shape"]))
    raise InvalidArgumentError(
        f"layout rule for {pattern!r} must be Shard(dim), Replicate(), a mapping with dim, or a box, not {rule!r}"
    )


def resolve_layout(described: Sequence[Sequence[tuple[Shard, int | None]]]) -> list[list[Shard]]:
    """Every rank's shards, with parts that a layout rule cuts along a dim placed one after another in rank order."""
    begins: dict[str, int] = {}
    totals: dict[str, int] = {}
    for shards in described:
        for shard, dim in shards:
            if dim is not None:
                totals[shard.name] = totals.get(shard.name, 0) + shard.global_shape[dim]
    return [[_placed(shard, dim, begins, totals) for shard, dim in shards] for shards in described]


def _placed(shard: Shard, dim: int | None, begins: dict[str, int], totals: dict[str, int]) -> Shard:
    if dim is None:
        return shard
    shape = shard.global_shape
    begin = begins.get(shard.name, 0)
    begins[shard.name] = begin + shape[dim]
    offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
    global_shape = tuple(totals[shard.name] if d == dim else size for d, size in enumerate(shape))
    return Shard(shard.name, shard.dtype, global_shape, (Box(offsets, shape),))
