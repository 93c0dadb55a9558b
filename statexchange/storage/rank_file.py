"""A rank's tensor file, opened: its metadata is checked, and its tensors are read with their digests."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, TruncatedError
from statexchange.sharding.shards import Box, Shard, sizes_from_json
from statexchange.storage.sealed_json import unseal
from statexchange.storage.tensorfile import Header, digest, read_header, storage_form
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statexchange.storage.opened_path import OpenedPath
    from statexchange.storage.store import StoredFile

__all__ = ["SCHEMA", "RankFile"]

SCHEMA = 1  # of the metadata


class RankFile:
    """One rank's open file: metadata, shards and digests, and bytes on demand. A context manager.

    Args:
        file: the file.
        expected: entries that its metadata must have, among them its "rank".
        size: the size in bytes that it must have, if it is known.
        owner: what `close` closes; None if the file is closed with something else, such as a `WorkspaceView`.

    Attributes:
        path: the file's path.
        metadata: what the writer stored about the file, as a JSON object.
        config: the config as JSON text for `values.decode`.
        shards: the rank's shards by tensor name.
        digests: for each shard, the digests of its boxes.
    """

    def __init__(
        self,
        file: StoredFile,
        expected: Mapping[str, str | int],
        size: int | None = None,
        *,
        owner: OpenedPath | None = None,
    ) -> None:
        self.file = file
        self.path = path = file.path
        self._owner = owner
        rank = int(expected["rank"])
        if size is not None and file.size < size:
            raise TruncatedError("file is truncated", path=path, rank=rank, expected=size, found=file.size)
        if size is not None and file.size > size:
            raise CorruptError("size differs from its receipt", path=path, rank=rank, expected=size, found=file.size)
        self.header: Header = read_header(file)
        metadata = self.header.workspace_metadata(path, file.budget)
        if metadata is None:
            raise CorruptError("not a rank's file of statexchange", path=path)
        if metadata.get("schema") != SCHEMA:
            raise CorruptError(
                "its metadata is of another version", path=path, expected=SCHEMA, found=metadata.get("schema")
            )
        _check_digest(metadata, path, rank)
        self.metadata = metadata
        self.config = metadata.get("config", "null")
        if not isinstance(self.config, str):
            raise CorruptError("its config is not text", path=path, rank=rank)
        self.shards, self.digests = _shards(self.header, metadata, path)
        for key, value in expected.items():
            if metadata.get(key) != value:
                raise CorruptError(
                    f"its metadata names another {key}",
                    path=path,
                    rank=rank,
                    expected=value,
                    found=metadata.get(key),
                )

    def byte_ranges(self, name: str) -> list[tuple[int, int]]:
        """Return (first byte in the file, number of bytes) of each box of a tensor."""
        shard = self.shards[name]
        sizes = [box.numel * ITEMSIZE[shard.dtype] for box in shard.boxes]
        return list(zip(accumulate(sizes, initial=self.header.entries[name].begin), sizes, strict=False))

    def read(self, name: str) -> bytearray:
        """Return a tensor's bytes in a new buffer; raise CorruptError if a digest differs."""
        entry = self.header.entries[name]
        data = bytearray(entry.nbytes)
        view = memoryview(data)
        self.file.read_into(view, entry.begin)
        for expected, (begin, nbytes) in zip(self.digests[name], self.byte_ranges(name), strict=True):
            found = digest(view[begin - entry.begin :][:nbytes])
            if found != expected:
                self.file.check_unchanged()  # a file that was changed while it was read is not corrupt
                raise CorruptError(
                    "bytes differ from their digest",
                    path=self.path,
                    name=name,
                    rank=self.metadata["rank"],
                    expected=expected,
                    found=found,
                )
        return data

    def close(self) -> None:
        """Close `owner` if it was given."""
        if self._owner is not None:
            self._owner.close()

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_digest(metadata: dict[str, Any], path: str, rank: int) -> None:
    """Raise CorruptError if metadata differs from its own digest, which files of older versions do not have.

    It covers the config and all else but the tensors, which are compared with the header and have digests.
    """
    if "digest" not in metadata:
        return
    try:
        unseal({key: value for key, value in metadata.items() if key != "tensors"})
    except ValueError:
        raise CorruptError("its metadata differs from its own digest", path=path, rank=rank) from None


def _shards(header: Header, metadata: dict[str, Any], path: str) -> tuple[dict[str, Shard], dict[str, tuple[str, ...]]]:
    """Return the shards of a file's tensors, and the digests of their boxes, by tensor name."""
    tensors = metadata.get("tensors")
    if header.unknown:
        entry = next(iter(header.unknown.values()))
        raise CorruptError(f"unknown dtype {entry.dtype}", path=path, name=entry.name)
    if not isinstance(tensors, dict) or tensors.keys() != header.entries.keys():
        raise CorruptError("metadata and header list different tensors", path=path)
    shards, digests = {}, {}
    for name, raw in tensors.items():
        try:
            boxes = tuple(Box.from_json(box) for box in raw["boxes"])
            shard = Shard(name, raw["dtype"], sizes_from_json(raw["global_shape"]), boxes)
            box_digests = tuple(str(text) for text in raw["digests"])
            entry = header.entries[name]
            stored = storage_form(entry.dtype, entry.shape)
            fits = storage_form(shard.dtype, shard.local_shape) == stored
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken metadata: {error}", path=path, name=name) from None
        if not fits or len(box_digests) != len(boxes):
            raise CorruptError("metadata does not fit the header", path=path, name=name)
        shards[name], digests[name] = shard, box_digests
    return shards, digests
