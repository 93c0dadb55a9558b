"""A source: a sharded checkpoint as holders with shards, and for every box the byte range that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import CorruptError, InvalidArgumentError, StateExchangeError
from statexchange.layout.plan import Holding
from statexchange.layout.shards import Shard, full_box
from statexchange.storage import files

__all__ = ["Extent", "Holder", "OpenCheckpoint", "Source", "SourceTensor", "StoredTensor"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of one box lie; the `digest` of its bytes in C order, where it is known.

    The first element starts at byte `begin` of the file. Without `strides` all `nbytes` of the box follow in C order;
    else index i lies ``sum(i * strides)`` elements further.
    """

    path: str
    begin: int
    nbytes: int
    digest: str | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A holder's shard of one tensor, with one extent per box."""

    shard: Shard
    extents: tuple[Extent, ...]

    def blocks(self, index: int) -> Iterator[memoryview]:
        """The bytes of a box in C order, block by block, each good until the next one."""
        from statexchange.storage import regions  # and with it numpy, for which looking does not wait

        extent, shape = self.extents[index], self.shard.boxes[index].shape
        with files.OpenFiles() as inputs:
            yield from regions.blocks(inputs, extent.path, extent.begin, shape, extent.strides, self.shard.dtype)

    def digest_of(self, index: int) -> str:
        """The digest of a box: the one that is known, else that of its bytes, which are read."""
        import xxhash

        known = self.extents[index].digest
        if known is not None:
            return known
        hasher = xxhash.xxh3_128()
        for block in self.blocks(index):
            hasher.update(block)
        return str(hasher.hexdigest())


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank's file, or a file that stands for one."""

    rank: int
    path: str
    nbytes: int
    tensors: Mapping[str, SourceTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on disk. `kind` is "workspace", "huggingface", "dcp" or "torch".

    `configs` is JSON text of `values` by rank; `manifest` the content of the statexchange.json of a published
    directory; `others` what is no tensor, by name and in words; `problems` what is missing or broken.
    """

    kind: str
    path: str
    holders: tuple[Holder, ...]
    run: str | None = None
    round: int | None = None
    world_size: int | None = None
    configs: Mapping[int, str] = field(default_factory=dict)
    manifest: Mapping[str, Any] | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[StateExchangeError, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(holder.nbytes for holder in self.holders)

    def holdings(self) -> list[Holding]:
        """What each holder has, for the merge plan."""
        return [Holding(h.rank, [t.shard for t in h.tensors.values()], h.aliases) for h in self.holders]

    def shards(self) -> Iterator[tuple[Holder, SourceTensor]]:
        """Every holder's tensors."""
        for holder in self.holders:
            for tensor in holder.tensors.values():
                yield holder, tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint on disk: shape and dtype at once, bytes on demand."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    _extent: Extent

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._extent.nbytes

    def read(self) -> Any:
        """The tensor as a numpy array; ml_dtypes supplies dtypes that numpy lacks."""
        from statexchange.layout.arrays import array_over
        from statexchange.storage import regions

        extent, data = self._extent, bytearray(self._extent.nbytes)
        with files.reading(extent.path) as file:
            regions.read_block(
                file, extent.begin, self.shape, extent.strides, self.dtype, memoryview(data), extent.path
            )
        return array_over(data, self.dtype, self.shape)


class OpenCheckpoint(Mapping[str, StoredTensor]):
    """Lazy view of a checkpoint that holds whole tensors: names to `StoredTensor`."""

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._tensors: dict[str, StoredTensor] = {}
        for holder, tensor in source.shards():
            shard = tensor.shard
            if shard.boxes != (full_box(shard.global_shape),):
                problem = "this holds shards of tensors: merge it first (statexchange merge)"
                raise InvalidArgumentError(problem, name=shard.name, path=source.path)
            if shard.name in self._tensors:
                raise CorruptError("two files have a tensor of this name", name=shard.name, path=holder.path)
            self._tensors[shard.name] = StoredTensor(shard.name, shard.dtype, shard.global_shape, tensor.extents[0])

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
