"""A source: a sharded checkpoint as holders with shards, and for every box the byte range that holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, StateExchangeError
from statexchange.layout.plan import Holding
from statexchange.storage import files

if TYPE_CHECKING:
    from statexchange.layout.shards import Shard

__all__ = ["Extent", "Holder", "OpenCheckpoint", "Source", "SourceTensor", "StoredTensor"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of one box lie, in C order and as one run; their `digest`, where it is known."""

    path: str
    begin: int
    nbytes: int
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A holder's shard of one tensor, with one extent per box."""

    shard: Shard
    extents: tuple[Extent, ...]


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
    """A checkpoint on disk. `kind` is "workspace" or "huggingface"; `configs` JSON text of `values` by rank.

    `manifest` is the content of the statexchange.json of a published directory; `problems` what is missing or
    broken.
    """

    kind: str
    path: str
    holders: tuple[Holder, ...]
    run: str | None = None
    round: int | None = None
    world_size: int | None = None
    configs: Mapping[int, str] = field(default_factory=dict)
    manifest: Mapping[str, Any] | None = None
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

        data = bytearray(self._extent.nbytes)
        fd = files.open_file(self._extent.path)
        try:
            files.pread_into(fd, memoryview(data), self._extent.begin, self._extent.path)
        finally:
            os.close(fd)
        return array_over(data, self.dtype, self.shape)


class OpenCheckpoint(Mapping[str, StoredTensor]):
    """Lazy view of a checkpoint that holds whole tensors: names to `StoredTensor`."""

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._tensors: dict[str, StoredTensor] = {}
        for holder, tensor in source.shards():
            shard = tensor.shard
            if shard.name in self._tensors:
                raise CorruptError("two files have a tensor of this name", name=shard.name, path=holder.path)
            self._tensors[shard.name] = StoredTensor(shard.name, shard.dtype, shard.global_shape, tensor.extents[0])

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
