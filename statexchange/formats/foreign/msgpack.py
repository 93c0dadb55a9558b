"""Show Flax's msgpack files: nested maps whose arrays are extension values with shape, dtype and bytes.

The file is walked without recursion. Arrays' bytes are skipped, so that a file costs what its keys cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statexchange.errors import CorruptError, excerpt
from statexchange.formats.foreign.contents import MAX_TEXT_BYTES, Contents, Cursor, described_tensor
from statexchange.formats.source import UnreadableTensor
from statexchange.sharding.shards import MAX_DIMS
from statexchange.storage.store import StoredFile
from statexchange.values import MAX_DEPTH

__all__ = ["read"]

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # Flax's extension types
# Flax splits an array of more than 1 GiB into a map with this key, "shape" and "chunks".
_CHUNKED = "__msgpack_chunked_array__"
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {
    0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"),
    0xC7: ("ext", ">B"), 0xC8: ("ext", ">H"), 0xC9: ("ext", ">I"),
    0xD9: ("text", ">B"), 0xDA: ("text", ">H"), 0xDB: ("text", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Token:
    """One value: its kind ("value", "text", "bytes", "ext", "list" or "map"), its length, and a plain value."""

    kind: str
    length: int = 0
    value: Any = None


@dataclass(slots=True)
class _Frame:
    """A map or list whose entries are being read."""

    name: str
    is_map: bool
    left: int
    index: int = 0


def read(file: StoredFile) -> Contents:
    """Return the contents of a file; raise CorruptError for a broken or truncated one."""
    return _Walk(file).run()


class _Walk:
    """One pass over a file."""

    def __init__(self, file: StoredFile) -> None:
        self._path = file.path
        self._cursor = Cursor(file)
        self._budget = self._cursor.budget
        self._tensors: dict[str, UnreadableTensor] = {}
        self._others: dict[str, str] = {}
        self._numbers: dict[str, int] = {}  # those of `_others` that are integers, for the shapes of chunked arrays

    def run(self) -> Contents:
        root = self._token()
        if root.kind != "map":
            raise CorruptError("not Flax's msgpack: it is not a map", path=self._path)
        frames = [_Frame("", True, root.length)]
        while frames:
            frame = frames[-1]
            if not frame.left:
                frames.pop()
                continue
            frame.left -= 1
            name = self._name(frame)
            token = self._token()
            if token.kind in ("map", "list") and token.length:
                if len(frames) >= MAX_DEPTH:
                    raise CorruptError(f"refused: it is nested more than {MAX_DEPTH} levels deep", path=self._path)
                self._check_length(token)
                frames.append(_Frame(name, token.kind == "map", token.length))
            else:
                self._leaf(name, token)
        if self._cursor.at != self._cursor.size:
            problem = f"there are bytes after its end at byte {self._cursor.at}"
            raise CorruptError(problem, path=self._path, found=f"{self._cursor.size} bytes")
        self._join_chunks()
        return Contents(tuple(self._tensors.values()), self._others)

    def _check_length(self, token: _Token) -> None:
        """Raise CorruptError if the rest of the file is too short for this many entries."""
        if token.length > self._cursor.size - self._cursor.at:
            raise CorruptError(f"a {token.kind} claims {token.length} entries", path=self._path)

    def _name(self, frame: _Frame) -> str:
        """Return the dotted name of the next entry of a frame; of a map, its key is read."""
        if frame.is_map:
            key = self._token()
            text = self._cursor.text(key.length) if key.kind == "text" else excerpt(key.value, 80)
            if key.kind not in ("text", "value"):
                raise CorruptError(f"a key of a map is a {key.kind}", path=self._path)
        else:
            text = str(frame.index)
            frame.index += 1
        self._budget.spend(1, len(frame.name) + len(text))
        name = f"{frame.name}.{text}" if frame.name else text
        if len(name) > MAX_TEXT_BYTES:
            raise CorruptError("a name is too long", name=name[:80], path=self._path)
        return name

    def _token(self) -> _Token:
        self._budget.add_entries()
        first = self._cursor.take(1)[0]
        if first <= 0x7F:
            return _Token("value", value=first)
        if first >= 0xE0:
            return _Token("value", value=first - 256)
        if first <= 0x8F:
            return _Token("map", first & 0xF)
        if first <= 0x9F:
            return _Token("list", first & 0xF)
        if first <= 0xBF:
            return _Token("text", first & 0x1F)
        if first in _CONSTANTS:
            return _Token("value", value=_CONSTANTS[first])
        if first in _NUMBERS:
            return _Token("value", value=self._cursor.unpack(_NUMBERS[first])[0])
        if 0xD4 <= first <= 0xD8:
            return _Token("ext", 1 << (first - 0xD4))
        if first not in _LENGTHS:
            raise CorruptError(f"byte {self._cursor.at - 1} is no value of msgpack", path=self._path)
        kind, layout = _LENGTHS[first]
        return _Token(kind, self._cursor.unpack(layout)[0])

    def _leaf(self, name: str, token: _Token) -> None:
        if name in self._tensors or name in self._others:
            raise CorruptError("two entries have this name when nested keys are joined with dots", name=name)
        if token.kind == "ext":
            self._extension(name, token.length)
        elif token.kind == "value":
            self._others[name] = excerpt(token.value, 80)
            if type(token.value) is int:
                self._numbers[name] = token.value
        elif token.kind == "text" and token.length <= 80:
            self._others[name] = excerpt(self._cursor.text(token.length), 80)
        else:
            self._cursor.skip(token.length)
            self._others[name] = f"empty {token.kind}" if not token.length else f"{token.length:,} bytes"

    def _extension(self, name: str, nbytes: int) -> None:
        (kind,) = self._cursor.unpack(">b")
        end = self._cursor.at + nbytes
        if kind in (_ARRAY, _SCALAR):
            tensor = self._array(name, end)
            if kind == _ARRAY:
                self._tensors[name] = tensor
            else:
                self._others[name] = f"a scalar of {tensor.dtype}"
        else:
            self._others[name] = "a complex number" if kind == _COMPLEX else f"an extension of type {kind}"
        if self._cursor.at > end:
            raise CorruptError("its array is longer than its entry", name=name, path=self._path)
        self._cursor.skip(end - self._cursor.at)

    def _array(self, name: str, end: int) -> UnreadableTensor:
        """Return an array: a list of shape, dtype's name and bytes."""
        outer, dims = self._token(), self._token()
        if (outer.kind, outer.length, dims.kind) != ("list", 3, "list") or dims.length > MAX_DIMS:
            raise CorruptError("not an array of Flax: no shape, dtype and bytes", name=name, path=self._path)
        shape = [self._token().value for _ in range(dims.length)]
        kind = self._token()
        if kind.kind not in ("text", "bytes"):
            raise CorruptError("its dtype is not text", name=name, path=self._path)
        dtype = self._cursor.text(kind.length)
        data = self._token()
        tensor = described_tensor(name, dtype, shape, self._path)
        nbytes = data.length if data.kind == "bytes" else -1
        if tensor.nbytes not in (None, nbytes) or self._cursor.at + nbytes != end:
            expected, found = tensor.nbytes, nbytes if nbytes >= 0 else data.kind
            raise CorruptError(
                "its byte count does not fit its shape", name=name, path=self._path, expected=expected, found=found
            )
        return described_tensor(name, dtype, shape, self._path, nbytes)

    def _join_chunks(self) -> None:
        """Replace the chunks of each large array by the array."""
        for marker in [name for name in self._others if name.rpartition(".")[2] == _CHUNKED]:
            name = marker[: -len(_CHUNKED) - 1]
            prefix = f"{name}." if name else ""
            del self._others[marker]
            shape: list[int] = []
            while len(shape) < MAX_DIMS and f"{prefix}shape.{len(shape)}" in self._numbers:
                key = f"{prefix}shape.{len(shape)}"
                shape.append(self._numbers[key])
                self._others.pop(key, None)
            chunks: list[UnreadableTensor] = []
            while f"{prefix}chunks.{len(chunks)}" in self._tensors:
                chunks.append(self._tensors.pop(f"{prefix}chunks.{len(chunks)}"))
            if not chunks or any(chunk.dtype != chunks[0].dtype for chunk in chunks):
                problem = "the chunks of this array are missing, or differ in dtype"
                raise CorruptError(problem, name=name, path=self._path)
            whole = described_tensor(name or "array", str(chunks[0].dtype), shape, self._path)
            nbytes = sum(chunk.nbytes or 0 for chunk in chunks)
            if whole.nbytes not in (None, nbytes):
                problem = "the chunks of this array do not fit its shape"
                raise CorruptError(problem, name=name, path=self._path, expected=whole.nbytes, found=nbytes)
            self._tensors[whole.name] = whole
