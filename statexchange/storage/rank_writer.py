"""Write a rank's tensors as a tensor file (tensorfile.py), with digests that are computed as they are written."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from statexchange.errors import CorruptError
from statexchange.sharding.shards import LongTuple, Shard
from statexchange.storage.atomic import new_file
from statexchange.storage.files import PART_BYTES, REPORTED_BYTES, WINDOW_BYTES
from statexchange.storage.tensorfile import (
    METADATA_KEY,
    TORCH_SHARDING_KEY,
    TORCH_VERSION_KEY,
    WORKSPACE_KEY,
    ShardData,
    encode_header,
    header_text,
)
from statexchange.tensors import ITEMSIZE, collector_paused, run_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_PLACE_OF = {dtype: -place for place, dtype in enumerate(ITEMSIZE)}
_SHARD_OF = attrgetter("shard")
_TORCH_VERSION = "1.0"


def write_tensor_file(
    dir_fd: int,
    name: str,
    path: str,
    shards: Sequence[ShardData],
    metadata: Mapping[str, object],
    *,
    mode: int = 0o600,
    progress: Callable[[], object] | None = None,
) -> DigestedTensors:
    """Write one rank's tensors and metadata as a new file; return them with their digests.

    The digests are computed while the tensors are written, so the header, which has them, is written last. `progress`
    is called about once in a megabyte.
    """
    ordered = _in_file_order(shards)
    header = _RankHeader(ordered, metadata)
    nbytes = header.file_nbytes
    with new_file(dir_fd, name, nbytes, path=path, mode=mode) as file:
        file.seek(header.nbytes)
        # The tensors are read once: each part is digested, and written.
        digests = _digests(ordered, progress, write_part=file.write)
        assert file.tell() == nbytes, (file.tell(), nbytes)
        first_bytes = header.with_digests(digests)
        # Last: until then the file is no tensor file.
        file.seek(0)
        file.write(first_bytes)
    return DigestedTensors(first_bytes, nbytes, tuple(ordered), tuple(digests), progress)


@dataclass(frozen=True, slots=True)
class DigestedTensors:
    """One rank's tensors as the file that `write_tensor_file` writes, to write them once more, or to a store.

    A store takes bytes in order. The header comes first and has the digests, so the tensors are read twice for it.

    Attributes:
        header: the first bytes of the file.
        nbytes: the size of the file.
    """

    header: bytes
    nbytes: int
    _shards: tuple[ShardData, ...]
    _digests: tuple[str, ...]
    _progress: Callable[[], object] | None = None

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardData],
        metadata: Mapping[str, object],
        progress: Callable[[], object] | None = None,
    ) -> DigestedTensors:
        """Read the tensors once, for their digests; `progress` is called about once in a megabyte, then and later."""
        ordered = _in_file_order(shards)
        digests = _digests(ordered, progress)
        header = _RankHeader(ordered, metadata)
        return cls(header.with_digests(digests), header.file_nbytes, tuple(ordered), tuple(digests), progress)

    @property
    def digests(self) -> dict[str, list[str]]:
        """The digests of each tensor's boxes."""
        return _by_name(self._shards, self._digests)

    @property
    def shards(self) -> list[Shard]:
        """The shards, in file order."""
        return list(map(_SHARD_OF, self._shards))

    def write_to(self, write_at: Callable[[memoryview, int], object]) -> None:
        """Call `write_at(part, at)` with the bytes after the header, part by part in their order.

        A part is valid only during the call; `at` is where it begins in the file.

        Raises:
            CorruptError: a tensor was changed since its digest was made.
        """
        at = len(self.header)

        def write_part(part: memoryview) -> None:
            nonlocal at
            write_at(part, at)
            at += len(part)

        # Each part is digested after its use, so that a change before or during the use is found.
        digests = _digests(self._shards, self._progress, write_part=write_part, after_use=True)
        _check_unchanged(self.digests, _by_name(self._shards, digests))

    def check_unchanged(self, expected: Mapping[str, Sequence[str]]) -> None:
        """Raise CorruptError if a tensor had other digests when it was read before; `expected` may lack some."""
        _check_unchanged(expected, self.digests)


def _check_unchanged(expected: Mapping[str, Sequence[str]], actual: Mapping[str, Sequence[str]]) -> None:
    for name, digests in actual.items():
        if expected.get(name, digests) != digests:
            text = "changed while it was saved: do not write into the state during a save, or use background=True"
            raise CorruptError(text, name=name)


def digests_of(shards: Sequence[ShardData], progress: Callable[[], object] | None = None) -> dict[str, list[str]]:
    """Return the digests of each tensor's boxes; `progress` is called about once in a megabyte."""
    return _by_name(shards, _digests(shards, progress))


def _in_file_order(shards: Sequence[ShardData]) -> list[ShardData]:
    """Return the shards in the order of safetensors: those of large elements first, so that each tensor is aligned."""
    keys = []
    for number, data in enumerate(shards):
        keys.append((_PLACE_OF[data.shard.dtype], data.shard.name, number))
    return [shards[number] for _, _, number in sorted(keys)]


def _by_name(shards: Sequence[ShardData], digests: Sequence[str]) -> dict[str, list[str]]:
    """Return the digests of each tensor's boxes, from those of all boxes in file order."""
    following = iter(digests)
    return {data.shard.name: list(islice(following, len(data.shard.boxes))) for data in shards}


_BEFORE_METADATA = f'{{"{METADATA_KEY}":{{"{WORKSPACE_KEY}":"'


class _TensorText(NamedTuple):
    """The part of a header that follows from the tensors.

    Attributes:
        text: the text, which has `no_digest` in the place of each box's digest.
        no_digest: a text as long as a digest.
        data_nbytes: the bytes of all tensors.
    """

    text: str
    no_digest: str
    data_nbytes: int


# A save writes a file for each top-level key that does not train, too, and ranks may be threads.
@functools.lru_cache(8)
def _tensor_text(shards: LongTuple[Shard]) -> _TensorText:
    """Return the header of a rank's file from the records of its tensors on.

    Before them it has what changes with each save, see `_RankHeader`; after them "format" and torch's sharding keys.
    """
    no_digest = os.urandom(16).hex()  # random, so that no name and no value contains it
    entries, tensors, torch_sharding, nbytes = [], {}, {}, 0
    with collector_paused():
        for shard in shards:
            name, dtype, boxes = shard.name, shard.dtype, shard.boxes
            if len(boxes) == 1:
                offsets, shape = boxes[0]
                if dtype == "C128":
                    offsets = (*offsets, 0)  # in the file a number is a pair, in a dim of its own
                torch_sharding[name] = {"saved_offsets": offsets}
            else:
                shape = shard.local_shape
            entries.append((name, dtype, shape))
            nbytes += math.prod(shape) * ITEMSIZE[dtype]
            # JSON has tuples as lists, so that a box is written as `Box.to_json` returns it.
            digests = [no_digest] * len(boxes)
            tensors[name] = {"dtype": dtype, "global_shape": shard.global_shape, "boxes": boxes, "digests": digests}
        texts = {
            WORKSPACE_KEY: json.dumps({"tensors": tensors}, separators=(",", ":"))[1:],
            "format": "pt",
            TORCH_SHARDING_KEY: json.dumps(torch_sharding, separators=(",", ":")),
            TORCH_VERSION_KEY: _TORCH_VERSION,
        }
        text = header_text(entries, texts).removeprefix(_BEFORE_METADATA)
    return _TensorText(text, no_digest, nbytes)


class _RankHeader:
    """The header of a rank's file, known before the digests are: they all have the same length.

    The metadata of a save are encoded each time; what follows from the tensors is most often as at the last save.
    """

    def __init__(self, shards: Sequence[ShardData], metadata: Mapping[str, object]) -> None:
        of_tensors = _tensor_text(LongTuple(map(_SHARD_OF, shards)))
        begin = json.dumps(metadata, separators=(",", ":"))[:-1]
        if metadata:
            begin += ","
        # The beginning of a JSON text within a JSON text: a quote in it becomes a backslash and a quote.
        header = encode_header(_BEFORE_METADATA + json.dumps(begin, ensure_ascii=False)[1:-1] + of_tensors.text)
        self.nbytes = len(header)
        self.file_nbytes = len(header) + of_tensors.data_nbytes
        self._between_digests = header.split(of_tensors.no_digest.encode())

    def with_digests(self, digests: Sequence[str]) -> bytes:
        """Return the header with the digests of all boxes."""
        parts = [b""] * (2 * len(digests) + 1)
        parts[::2] = self._between_digests
        parts[1::2] = map(str.encode, digests)
        return b"".join(parts)


def _digests(
    shards: Sequence[ShardData],
    progress: Callable[[], object] | None,
    *,
    write_part: Callable[[memoryview], object] | None = None,
    after_use: bool = False,
) -> list[str]:
    """Read all boxes part by part; call `write_part` with each part, and return the digests of the boxes, in order.

    A part is valid only during the call. It is digested before it is written, while it is in the processor's cache, or
    with `after_use` afterwards.
    """
    import xxhash

    digests: list[str] = []
    unreported = 0
    for data in shards:
        source = data.data
        for index in range(len(data.shard.boxes)):
            parts: Iterable[memoryview]
            if isinstance(source, tuple):
                box = run_bytes(source[index])
                # In parts that stay in the processor's cache from the digest to the write.
                parts = [box]
                if len(box) > WINDOW_BYTES:
                    parts = [box[at : at + WINDOW_BYTES] for at in range(0, len(box), WINDOW_BYTES)]
            else:
                parts = source(index)
            hasher = xxhash.xxh3_128()
            for part in parts:
                if not after_use:
                    hasher.update(part)
                if write_part is not None:
                    write_part(part)
                if after_use:
                    hasher.update(part)
                # Not for each part: a report takes as long as the writing of a small tensor.
                unreported += len(part) + PART_BYTES
                if unreported >= REPORTED_BYTES:
                    unreported = 0
                    if progress is not None:
                        progress()
            digests.append(hasher.hexdigest())
    return digests
