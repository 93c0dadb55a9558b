"""Megatron-Core's sharded state dicts. Objects are recognised by their attributes: the package is never imported.

A ShardedTensor has a key, the global tensor's shape, and its `data` with an offset in that tensor. The key is the
tensor's name in a checkpoint. The names in the dict are not: they count layers from 0 on every pipeline stage. A key
may occur several times on one rank: layers that are stacked along a prepended dim share it. `global_shape` and
`global_offset` include that dim, `data` does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from statexchange.errors import CorruptError, InvalidArgumentError, UnsupportedError
from statexchange.state.tree import children, parts, path_to, sharded_kind, step_form
from statexchange.state.types import Leaf
from statexchange.tensors import TensorLike, is_tensor


def holds_sharded(value: Leaf) -> bool:
    """Whether `value` is, or contains, an object of Megatron-Core."""
    return not is_tensor(value) and any(sharded_kind(part) is not None for part in parts(value))


def leaves(value: Leaf, path: str = "") -> list[tuple[str, Leaf]]:
    """Return (dotted path, leaf) of a nested state dict; in place of a factory, the leaves of what it builds."""
    if sharded_kind(value) == "factory":
        return leaves(value.build(), path)
    # They are dataclasses, whose fields are no part of a state.
    items = children(value)
    if items is None or sharded_kind(value) is not None:
        return [(path, value)]
    inside = []
    form = step_form(value)
    for key, item in items.items():
        inside += leaves(item, path_to(path, form.format(key)))
    return inside


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box, with the attributes of torch's ChunkStorageMetadata."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class MegatronTensor:
    """The ShardedTensors of one key on this rank as one tensor with torch's `__create_chunk_list__`.

    `shape` is the global shape, vocabulary padding included. With `allow_shape_mismatch` the saved tensor may have
    another shape.
    """

    def __init__(self, shard: Leaf) -> None:
        self.name = str(shard.key)
        self.dtype = shard.dtype
        self.shape = tuple(map(int, shard.global_shape))
        self.allow_shape_mismatch = bool(getattr(shard, "allow_shape_mismatch", False))
        self._chunks: list[_Chunk] = []
        self._parts: list[TensorLike] = []
        self.add(shard)

    def add(self, shard: Leaf) -> None:
        """Add another ShardedTensor of the same key; raise StateExchangeError, naming the key, if it does not fit."""
        if getattr(shard, "flattened_range", None) is not None:
            raise UnsupportedError(
                "a flattened_range is a run of elements and no block of the tensor: have the optimizer save whole "
                "parameters (fully_reshardable, as Megatron-Core calls it)",
                name=self.name,
            )
        # As after `without_data`, of a state dict that is only a template.
        if shard.data is None:
            raise InvalidArgumentError("this ShardedTensor has no data", name=self.name)
        for attribute, expected, found in (
            ("dtype", self.dtype, shard.dtype),
            ("global_shape", self.shape, tuple(shard.global_shape)),
        ):
            if expected != found:
                raise CorruptError(
                    f"ShardedTensors of one key differ in {attribute}", name=self.name, expected=expected, found=found
                )
        dims = len(self.shape)
        if len(shard.global_offset) != dims or shard.prepend_axis_num + len(shard.local_shape) != dims:
            raise CorruptError(
                "a ShardedTensor's offset and local shape do not fit its global shape", name=self.name, expected=dims
            )
        # `data` lacks the dims of the stacked layers, in which this part is one layer.
        chunk = _Chunk(tuple(shard.global_offset), (*(1,) * shard.prepend_axis_num, *shard.local_shape))
        for offset, size, total in zip(chunk.offsets, chunk.sizes, self.shape, strict=True):
            if offset < 0 or offset + size > total:
                raise InvalidArgumentError(
                    f"a ShardedTensor of shape {chunk.sizes} at {chunk.offsets} lies outside {self.shape}",
                    name=self.name,
                )
        self._chunks.append(chunk)
        # A view with the prepended dims, so that what is read into it fills `data`.
        self._parts.append(shard.data.detach()[(None,) * shard.prepend_axis_num])

    def __create_chunk_list__(self) -> list[_Chunk]:
        return list(self._chunks)

    def __get_tensor_shard__(self, index: Leaf) -> TensorLike:
        part: TensorLike = self._parts[index.index]
        return part


def add_sharded(tensors: dict[str, MegatronTensor], shard: Leaf) -> MegatronTensor:
    """Add a ShardedTensor to the tensor of its key; return that."""
    if shard.key in tensors:
        tensors[shard.key].add(shard)
    else:
        tensors[shard.key] = MegatronTensor(shard)
    return tensors[shard.key]
