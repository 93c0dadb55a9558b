"""The files of a save with an index: each is opened when something in it is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

from statexchange.errors import ReplacedError, StateExchangeError
from statexchange.formats.source import ShardFile
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.storage.location import STALE_S, OpenedPath
from statexchange.storage.save_index import IndexedTensor, SaveIndex
from statexchange.storage.store import ByteRange
from statexchange.storage.tensorfile import RankFile, SaveManifest, open_rank_file


class Place(NamedTuple):
    """The place of a part of a tensor: the number of its file, its layout, and the rank in the layout's mesh."""

    file: int
    layout: int
    mesh_rank: int


class ListedFiles(Sequence[ShardFile]):
    """The files that the manifest of a save lists.

    Attributes:
        save_index: the index, which says what each file has.
    """

    def __init__(self, opened: OpenedPath, manifest: SaveManifest, index: SaveIndex) -> None:
        self.save_index = index
        self._store = opened.store
        self._at = opened
        self._manifest = manifest
        self._listed = manifest.all_files
        self._opened: dict[int, tuple[RankFile, ShardFile]] = {}

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __getitem__(self, number: int) -> ShardFile: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[ShardFile]: ...

    def __getitem__(self, number: int | slice) -> ShardFile | Sequence[ShardFile]:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        return self._open(range(len(self))[number])[1]

    def rank_of(self, number: int) -> int:
        """Return the rank that wrote a file."""
        return self._listed[number].rank

    def path_of(self, number: int) -> str:
        """Return the path of a file, for messages."""
        return self._store.path_of(self._listed[number].name)

    def config_of(self, rank: int) -> str:
        """Return the config of a rank as JSON text."""
        # The ranks' own files come first in the manifest, so that a rank is the number of its file.
        return str(self._open(rank)[0].config)

    def range_of(self, name: str, file: int, box: Box) -> ByteRange:
        """Return where a box of a tensor lies in a file; opens that."""
        stored = self[file].tensors[name]
        return stored.byte_ranges[stored.shard.boxes.index(box)]

    def part(self, tensor: IndexedTensor, place: Place) -> ListedTensor:
        """Return the part of a tensor at a place."""
        # The index has no boxes without elements.
        if 0 in tensor.shape:
            boxes: tuple[Box, ...] = (full_box(tensor.shape),)
        else:
            boxes = self.save_index.boxes_at(place.layout, place.mesh_rank, tensor.shape)
        return ListedTensor(Shard(tensor.name, tensor.dtype, tensor.shape, boxes), place.file, self)

    def _open(self, number: int) -> tuple[RankFile, ShardFile]:
        if number not in self._opened:
            try:
                file = open_rank_file(self._store, self._manifest, self._listed[number])
                self.save_index.check(number, file.shards, file.metadata, file.path)
                self._opened[number] = file, ShardFile.of_rank(file)
            except ReplacedError:
                raise
            except StateExchangeError as error:
                # A job may replace the save long after its manifest was read. Then a name leads to another save's file,
                # or to none, and the caller opens the path again.
                if self._is_replaced():
                    raise ReplacedError("replaced while it was read", path=error.path) from error
                raise
        return self._opened[number]

    def _is_replaced(self) -> bool:
        """Whether another save has come to this path since its manifest was read.

        On shared storage that may show late, as `Attempts` has it.
        """
        ends = time.monotonic() + (STALE_S if self._at.is_shared else 0)
        while self._at.is_current():
            if time.monotonic() >= ends:
                return False
            time.sleep(0.05)
        return True


class ListedTensor(NamedTuple):
    """A part of a tensor, as `SourceTensor`, of a file that need not be open: the index has its boxes."""

    shard: Shard
    file: int
    files: ListedFiles

    @property
    def byte_ranges(self) -> tuple[ByteRange, ...]:
        """The byte ranges of its boxes; opens the file."""
        # Of boxes without elements a file may have some or none.
        if 0 in self.shard.global_shape:
            return (ByteRange(self.files[self.file].file, 0, 0),) * len(self.shard.boxes)
        stored = self.files[self.file].tensors[self.shard.name]
        ranges = dict(zip(stored.shard.boxes, stored.byte_ranges, strict=True))
        return tuple(ranges[box] for box in self.shard.boxes)

    def digest_of(self, index: int, progress: Callable[[], None] | None = None) -> str:
        """Return the digest of a box, as `SourceTensor.digest_of`; opens the file."""
        stored = self.files[self.file].tensors[self.shard.name]
        return stored.digest_of(stored.shard.boxes.index(self.shard.boxes[index]), progress)
