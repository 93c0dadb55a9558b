"""The bytes of a changed tensor: those of its base, with the frames of a delta applied.

`PatchedFile` reads like any stored file. For each part that is read, it reads the same bytes of the base and lets the
change, `Frames`, apply what concerns them. Of known frames those are decompressed that the part touches, so that parts
may be read in any order and by several threads. An entry of which the sizes of frames are not known is decompressed
from its beginning up to the part, and again from the beginning for an earlier part.
"""

from __future__ import annotations

import io
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, needing_extra
from statexchange.sharding.shards import Box, Shard, begin_of_run, full_box
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.store import ByteRange, StoredFile
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LEVEL = 1  # random differences do not become smaller at a higher one


class Frames:
    """The change of one tensor in a delta: zstd frames of ``new ^ old`` in an entry of its file. Thread-safe.

    The frames lie in stretches of known sizes: one of each frame, or a single one whose frames are not known.

    Args:
        stored: the entry.
        name: the tensor.
        sizes: the bytes of each stretch.
        ends: the byte of the tensor at which each stretch ends.
    """

    def __init__(self, stored: ByteRange, name: str, sizes: Sequence[int], ends: Sequence[int]) -> None:
        self.stored = stored
        self.name = name
        self.nbytes = ends[-1]
        self._ends = ends
        self._places = [0, *accumulate(sizes)]
        self._begun: dict[int, tuple[int, Any]] = {}  # by stretch, at most one: the tensor's next byte, and the stream
        if self._places[-1] != stored.nbytes:
            raise self.broken("its frames are not as large as its entry")

    def broken(self, problem: object) -> CorruptError:
        """Return the error for an entry that does not have what it should."""
        return CorruptError(f"the change of this tensor is broken: {problem}", name=self.name, path=self.stored.path)

    def apply(self, part: NDArray[np.uint8], offset: int) -> None:
        """Change the bytes of the base from `offset` on into those of this version."""
        number = bisect_right(self._ends, offset)
        while len(part):
            target = part[: self._ends[number] - offset]
            self._apply_stretch(number, target, offset)
            part, offset, number = part[len(target) :], offset + len(target), number + 1

    def _apply_stretch(self, number: int, target: NDArray[np.uint8], offset: int) -> None:
        """Decompress a stretch up to the target, and apply what follows."""
        import numpy as np

        # Taken away, which is atomic: no other thread goes on with the stream meanwhile, and nobody after an error.
        at, stream = self._begun.pop(number, (offset + 1, None))
        if at > offset:
            at = self._ends[number - 1] if number else 0
            begin, end = self._places[number : number + 2]
            # The default, 128 KiB at a time, is too many requests of an object store.
            stream = _reader(_Stretch(self.stored, begin, end), min(WINDOW_BYTES, end - begin))
        while at < offset:
            at += len(self._read(stream, at, offset))
        end = offset + len(target)
        while at < end:
            data = np.frombuffer(self._read(stream, at, end), np.uint8)
            target[at - offset :][: len(data)] ^= data
            at += len(data)
        if at < self._ends[number]:
            # Of one stretch alone: a source has many tensors, and each stream has a window of zstd in memory.
            self._begun = {number: (at, stream)}
        elif stream.read(1):
            raise self.broken(f"it has more than {self.nbytes} bytes")

    def _read(self, stream: Any, at: int, end: int) -> bytes:
        """Return the next bytes of the tensor, from `at` on and at most up to `end`."""
        try:
            data: bytes = stream.read(min(WINDOW_BYTES, end - at))
        except _zstandard().ZstdError as error:
            raise self.broken(error) from None
        if not data:
            raise self.broken(f"it ends at byte {at} of {self.nbytes}")
        return data


class _Stretch:
    """Some bytes of an entry as the stream that zstandard reads."""

    def __init__(self, stored: ByteRange, begin: int, end: int) -> None:
        self._file = stored.file
        self._at = stored.begin + begin
        self._end = stored.begin + end

    def read(self, nbytes: int) -> bytearray:
        """Return the next bytes, at most so many."""
        data = bytearray(min(nbytes, self._end - self._at))
        self._file.read_into(memoryview(data), self._at)
        self._at += len(data)
        return data


class PatchedFile(StoredFile):
    """All bytes of one tensor of a version, as if they lay in a file.

    Args:
        base: where the tensor of the base lies. If that is a patched file, too, its changes are applied first.
        change: what is applied.
        checksum: the adler32 of all bytes in hex digits, with which they are compared before the first read returns;
            "" if other digests prove them.
    """

    def __init__(self, base: ByteRange, change: Frames, checksum: str = "") -> None:
        self.path = change.stored.path
        self.size = change.nbytes
        self.is_remote = base.file.is_remote
        self.base = base
        self.changes: tuple[Frames, ...] = (change,)
        # A chain of versions is applied in a loop, so that it may be longer than Python recurses.
        if isinstance(base.file, PatchedFile):
            self.base = base.file.base
            self.changes = (*base.file.changes, change)
        self._checksum = checksum
        self._lock = threading.Lock()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read bytes of the base, and apply the change."""
        # Looked at without the lock, and again with it: threads that come while one compares wait for the outcome, and
        # later reads need no lock.
        if self._checksum:
            with self._lock:
                if self._checksum:
                    self._prove()
        self._read(buffer, offset)

    def _read(self, buffer: memoryview, offset: int) -> None:
        import numpy as np

        self.base.file.read_into(buffer, self.base.begin + offset)
        if len(buffer):
            part = np.frombuffer(buffer, np.uint8)
            for change in self.changes:
                change.apply(part, offset)

    def _prove(self) -> None:
        """Compare the checksum of all bytes, once."""
        checksum = 1
        memory = memoryview(bytearray(min(WINDOW_BYTES, self.size)))
        for at in range(0, self.size, WINDOW_BYTES):
            part = memory[: min(WINDOW_BYTES, self.size - at)]
            self._read(part, at)
            checksum = zlib.adler32(part, checksum)
        if int(self._checksum, 16) != checksum:
            name, expected = self.changes[-1].name, self._checksum
            text = "bytes differ from their checksum"
            raise CorruptError(text, name=name, path=self.path, expected=expected, found=f"{checksum:08x}")
        self._checksum = ""

    @property
    def _files(self) -> list[StoredFile]:
        """The files that are read."""
        return [self.base.file, *(change.stored.file for change in self.changes)]

    def check_unchanged(self) -> None:
        """Raise ReplacedError if a file that is read may have changed."""
        for file in self._files:
            file.check_unchanged()

    def check_current(self) -> None:
        """Raise ReplacedError if a file that is read may have changed, or another one has its name."""
        for file in self._files:
            file.check_current()

    @property
    def version(self) -> list[str | int]:
        """A JSON value that changes whenever the bytes do."""
        return list(chain.from_iterable(file.version for file in self._files))

    @property
    def local_identity(self) -> list[str | int]:
        """A JSON value that is equal on all ranks of one host that opened the same files."""
        return list(chain.from_iterable(file.local_identity for file in self._files))

    @property
    def shared_identity(self) -> list[str | int] | None:
        """A JSON value that is equal on all hosts that opened the same files; None if each may have copies."""
        identity: list[str | int] = []
        for file in self._files:
            of_file = file.shared_identity
            if of_file is None:
                return None
            identity += of_file
        return identity


def _zstandard() -> Any:
    with needing_extra("a delta"):
        import zstandard
    return zstandard


def _reader(stream: _Stretch | io.BytesIO, read_bytes: int) -> Any:
    """Return a stream of the decompressed bytes of all frames, which reads so many bytes at a time."""
    return _zstandard().ZstdDecompressor().stream_reader(stream, read_size=read_bytes, read_across_frames=True)


def compressor() -> Callable[[NDArray[np.uint8]], bytes]:
    """Return the function that compresses an array to one frame."""
    compress = _zstandard().ZstdCompressor(level=_LEVEL).compress
    return lambda array: compress(array.data)


def decompressed(data: bytes) -> bytes:
    """Return the content of all frames."""
    content: bytes = _reader(io.BytesIO(data), WINDOW_BYTES).read()
    return content


def are_runs(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether each box is one run of its tensor's C order: then each has frames of its own."""
    return all(begin_of_run(box, shape) is not None for box in boxes)


def frame_ends(boxes: Sequence[Box], shard: Shard, frame_nbytes: int, count: int) -> list[int]:
    """Return the offset in a tensor at which each of `count` frames ends, in bytes.

    A single one is of the whole tensor. Several are those of the windows of its boxes if each box is a run of it, else
    those of the windows of the whole tensor.

    Example:
        >>> shard = Shard("w", "F32", (4, 2), (full_box((4, 2)),))
        >>> frame_ends([Box((0, 0), (3, 2)), Box((3, 0), (1, 2))], shard, 16, 3)  # of two ranks, in windows of 16 bytes
        [16, 24, 32]
    """
    if count == 1:
        return [shard.nbytes]
    from statexchange.storage.regions import windows  # imports numpy, which reading headers does not need

    itemsize = ITEMSIZE[shard.dtype]
    ends, at = [], 0
    if not are_runs(boxes, shard.global_shape):
        boxes = [full_box(shard.global_shape)]
    for box in boxes:
        for window in windows(box.shape, itemsize, frame_nbytes):
            at += window.numel * itemsize
            ends.append(at)
            if len(ends) > count:  # at once: a broken manifest could give windows of one byte
                break
    if len(ends) != count or at != shard.nbytes:
        raise CorruptError("its frames are not those of its boxes", name=shard.name)
    return ends
