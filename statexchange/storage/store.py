"""The store: a snapshot of a directory, local or at an fsspec URL, as of the time when it was opened.

Every reader opens its path with `location.open_path`. A store lists its directory once. It pins the directory and
each opened file: a local file by its descriptor and identity (device, inode, size, modification time), an object by its
ETag or another version that its object store gives. Data is read from the pinned file, never by opening a path again
with offsets that were found earlier. So the old content stays readable after a rename has replaced the directory. If
a rename gives the name of one file to another one, that is found after the last open and the last read (`check_opened`,
`check_current`): else some files could be of the old version and some of the new. A read that cannot return the pinned
version any more raises ReplacedError, and the caller opens the path again (`location.read_with_retry`).

A small file can ask for much: a pickle can refer to one object many times, a list of parts can name the same part again
and again, and dense text takes far more memory once parsed. So work that is done once for each reference, entry or part
is first spent from a `Budget`. Work that is done once for each byte is free. The work on a file's header or pickle may
take a number of steps for each of its bytes. What it takes beyond them comes from a reserve. An opened store has one
reserve, for itself, its subdirectories and all files in them: many small files get no more of it than one. A refused
file does not use it up.

The JSON of files is parsed more strictly than by Python's json: UTF-8 only, no NaN or Infinity, no duplicate keys, no
deep nesting. Text that would take far more memory once parsed than real headers do is refused before it is parsed.
"""

from __future__ import annotations

import io
import json
import logging
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from statexchange import values
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    StateExchangeError,
    UnsafeError,
    excerpt,
    without_secrets,
)
from statexchange.sharding.shards import Box
from statexchange.storage.files import check_size, digest
from statexchange.values import MAX_DEPTH

__all__ = [
    "MAX_MANIFEST_BYTES",
    "Budget",
    "ByteRange",
    "EntryKind",
    "FilteredStore",
    "Store",
    "StoredFile",
    "absolute_path",
    "check_parsed_size",
    "decode_stored",
    "parse_json",
    "parse_stored",
    "plain_stored",
    "read_json",
    "resolve_path",
    "seal",
    "strip_file_scheme",
    "unseal",
]

EntryKind = Literal["file", "directory", "other"]
_log = logging.getLogger(__name__)
_STEPS_PER_BYTE, _RESERVED_STEPS = 8, 1 << 16  # a real file needs less than 2 steps a byte
_CHARACTERS_PER_STEP = 16
_MEMORY_PER_BYTE, _RESERVED_MEMORY = 16, 32 << 20  # a real header takes up to 14 bytes of memory a byte


class _Reserve:
    """The rest of one source's reserve."""

    __slots__ = ("memory", "steps")

    def __init__(self) -> None:
        self.steps = _RESERVED_STEPS
        self.memory = _RESERVED_MEMORY


class Budget:
    """The work that reading `nbytes` bytes of the file at `path` may take."""

    __slots__ = ("_path", "_reserve", "_steps")

    def __init__(self, path: str, nbytes: int = 0, *, reserve: _Reserve | None = None) -> None:
        self._path = path
        self._steps = _STEPS_PER_BYTE * nbytes
        self._reserve = _Reserve() if reserve is None else reserve

    def of(self, path: str, nbytes: int) -> Budget:
        """Return a budget with the same reserve, for `nbytes` bytes of the file at `path`."""
        return Budget(path, nbytes, reserve=self._reserve)

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count steps, and characters of text that are copied, hashed or compared.

        Raises:
            CorruptError: the budget is used up.
        """
        left = self._steps - steps - characters // _CHARACTERS_PER_STEP
        if left < 0:
            if -left > self._reserve.steps:
                problem = "refused: it refers to the same objects so often that reading it would take too long"
                raise CorruptError(problem, path=self._path)
            self._reserve.steps += left
            left = 0
        self._steps = left

    def spend_memory(self, nbytes: int, text: str, path: str) -> None:
        """Count the memory that JSON of the file at `path` takes once parsed.

        Raises:
            CorruptError: the budget is used up.
        """
        beyond = max(0, nbytes - _MEMORY_PER_BYTE * len(text))
        if beyond > self._reserve.memory:
            problem = f"refused: these {len(text)} characters of JSON would take too much memory once parsed"
            raise CorruptError(problem, path=path)
        self._reserve.memory -= beyond


def strip_file_scheme(path: str) -> str:
    """Return ``/a/path`` for ``file:///a/path``; any other path unchanged."""
    if path.startswith("file:///"):
        return unquote(path.removeprefix("file://"))
    return path


def absolute_path(path: str) -> str:
    """Return an absolute path. ``..`` stays: after a symbolic link it means the parent of the link's target."""
    if ".." not in path.split(os.sep):
        return os.path.abspath(path)
    return os.path.join(os.getcwd(), path).rstrip(os.sep)


def resolve_path(path: object, what: str) -> str:
    """Return the absolute path, the URL or the ``shm://name`` for a path that a caller gave.

    Every public function resolves its paths here, so that messages show absolute paths. ``~`` is expanded and
    ``file:///a/path`` becomes ``/a/path``.

    Args:
        path: str or os.PathLike.
        what: the argument in words, with which error messages begin.

    Raises:
        InvalidArgumentError: `path` is something else, is empty, or contains a null character or what no file system
            can encode (a lone surrogate).
    """
    text: object = None
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
    # A PathLike may return bytes.
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"{what} is a path or a URL, not {excerpt(path)}")
    without_scheme = strip_file_scheme(text)
    if "\0" in without_scheme:
        shown = excerpt(without_secrets(text))
        raise InvalidArgumentError(f"{what} is a path or a URL without null characters, not {shown}")
    try:
        os.fsencode(without_scheme)  # which takes surrogates that stand for bytes of a name that is no UTF-8
    except UnicodeEncodeError as error:
        shown = excerpt(without_secrets(text))
        raise InvalidArgumentError(f"{what} is a path or a URL that {error.encoding} can encode, not {shown}") from None
    if "://" in without_scheme:
        return without_scheme
    return absolute_path(os.path.expanduser(without_scheme))


class StoredFile(ABC):
    """A file opened for reading and pinned: all reads return bytes of the same version, or raise. Thread-safe.

    Not collective.

    Attributes:
        path: the path or URL, for messages.
        size: bytes.
        is_remote: whether each read is a request over a network.
        modified: when it was last written, in seconds since the epoch; None if the store does not know.
    """

    path: str
    size: int
    is_remote: bool = False
    modified: float | None = None

    @cached_property
    def budget(self) -> Budget:
        """The budget for reading its source; a directory gives its own to its subdirectories and files."""
        return Budget(self.path)

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`.

        Raises:
            CorruptError: the file ends before the buffer is full.
            ReplacedError: the file was replaced or changed since it was opened.
        """

    def read_ahead(self, memory_bytes: int) -> None:  # noqa: B027 (the kernel does it for a local file)
        """Read a remote file ahead where reads follow one another, and keep at most `memory_bytes` of it.

        For a file of which most is read, part by part.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise ReplacedError if the file's bytes may have changed since it was opened."""

    def check_current(self) -> None:
        """Raise ReplacedError if the file was changed, or another one has its name now, as a rename gives it.

        A directory whose files are replaced one after another is read as one version only if, after the last read, all
        names still lead to the files that were opened.
        """
        self.check_unchanged()

    @property
    @abstractmethod
    def version(self) -> list[str | int]:
        """A JSON value that changes whenever the file's bytes do: path, size, and ETag or modification time."""

    @property
    @abstractmethod
    def local_identity(self) -> list[str | int]:
        """A JSON value that is equal on all ranks of one host that opened the same file."""

    @property
    @abstractmethod
    def shared_identity(self) -> list[str | int] | None:
        """A JSON value that is equal on all hosts that opened the same file; None if each host may have a copy."""

    def read_all(self, limit: int = 64 << 20) -> bytes:
        """Return all bytes; raise CorruptError for a file of more than `limit` bytes."""
        check_size(self.size, limit, self.path)
        # A BytesIO gives its bytes away without a second copy in memory, which a bytearray cannot.
        data = io.BytesIO(bytes(self.size))
        with data.getbuffer() as buffer:
            self.read_into(buffer, 0)
        return data.getvalue()


class Store(ABC):
    """A pinned directory, listed once. Not collective.

    Attributes:
        path: its absolute path or URL.
        is_remote: whether it is at a URL: each read is a request, and an unfinished build has the final name.
    """

    path: str
    is_remote: bool = False

    @cached_property
    def budget(self) -> Budget:
        """The budget for reading its source; a directory gives its own to its subdirectories and files."""
        return Budget(self.path)

    @property
    @abstractmethod
    def listing(self) -> Mapping[str, EntryKind]:
        """The kind of each entry by name, sorted. The directory is read once, at the first use."""

    @property
    def files(self) -> list[str]:
        """Names of files, in order."""
        return [name for name, kind in self.listing.items() if kind == "file"]

    @property
    def non_directories(self) -> list[str]:
        """Names of all entries but directories, in order; `open` raises for those that are no regular files."""
        return [name for name, kind in self.listing.items() if kind != "directory"]

    @property
    def directories(self) -> list[str]:
        """Names of directories, in order, without symbolic links to directories."""
        return [name for name, kind in self.listing.items() if kind == "directory"]

    def path_of(self, name: str) -> str:
        """Return the path or URL of `name`."""
        return f"{self.path.rstrip('/')}/{name}"

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """Open and pin a file of this directory, and give it the budget.

        `name` may come from a file, such as an index, and must not lead out of the directory (`check_name`).

        Raises:
            NotFoundError: there is no such file.
            UnsafeError: it is not a regular file, or `name` is a path.
            StorageError: it cannot be opened.
        """

    def check_name(self, name: str) -> None:
        """Raise UnsafeError unless `name` is that of a file in this directory, and no path."""
        if name in ("", ".", "..") or "/" in name or os.sep in name:
            raise UnsafeError(f"refused: {excerpt(name)} is not the name of a file in this directory", path=self.path)
        _log.debug("opening %s in %s", name, self.path)

    @abstractmethod
    def below(self, name: str, *, private: bool = False) -> Store:
        """Open the subdirectory `name`; it is closed with this store, and shares its budget.

        With `private`, symbolic links in it are not followed, and a directory in which other users may write raises
        UnsafeError.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the path still leads to this directory."""

    def check_opened(self) -> None:  # noqa: B027 (at a URL all versions are those of one listing)
        """Raise ReplacedError if another file has the name of one that was opened here or below."""

    @abstractmethod
    def close(self) -> None:
        """Close all descriptors of this store, of its subdirectories and of its files.

        Afterwards a local store raises InvalidArgumentError for any call that needs one of them.
        """

    def link_target(self, name: str) -> str | None:  # noqa: ARG002 (only a local store has links)
        """Return the path that a symbolic link holds; None for anything else."""
        return None

    def read_small(self, name: str, limit: int = 64 << 20) -> bytes:
        """Return all bytes of a file; raise CorruptError for one of more than `limit` bytes."""
        return self.open(name).read_all(limit)


class FilteredStore(Store):
    """A view of a store that lists only some of its names. The view does not close the store."""

    def __init__(self, store: Store, is_listed: Callable[[str], bool]) -> None:
        self.path = store.path
        self.is_remote = store.is_remote
        self.budget = store.budget
        self._store = store
        self._is_listed = is_listed

    @cached_property
    def listing(self) -> Mapping[str, EntryKind]:
        """The kind of each entry that is listed."""
        return {name: kind for name, kind in self._store.listing.items() if self._is_listed(name)}

    def open(self, name: str) -> StoredFile:
        """Open and pin a file, whether it is listed or not."""
        return self._store.open(name)

    def link_target(self, name: str) -> str | None:
        """Return the path that a symbolic link holds; None for anything else."""
        return self._store.link_target(name)

    def below(self, name: str, *, private: bool = False) -> Store:
        """Open the subdirectory `name`; it is closed with the store."""
        return self._store.below(name, private=private)

    def is_current(self) -> bool:
        """Whether the path still leads to this directory."""
        return self._store.is_current()

    def check_opened(self) -> None:
        """Raise ReplacedError if another file has the name of one that was opened."""
        self._store.check_opened()

    def close(self) -> None:
        """Do nothing: the store is closed by its owner."""


class ByteRange(NamedTuple):
    """The position of one box's bytes in a file, and their known digests.

    Attributes:
        file: the opened file.
        begin: offset in the file, in bytes, of the box's first element.
        nbytes: size of the box.
        digest: digest of the box's bytes in C order; None if it is not known.
        strides: stored elements from one index to the next in each dim; None if the box is one run in C order.
        parts: blocks of the box, in the tensor's coordinates, with their known digests.
        orders: for each dim in which the box has the stored elements in another order, their indices there, of which
            only the differences count; None for other dims, and () if there is no such dim.
    """

    file: StoredFile
    begin: int
    nbytes: int
    digest: str | None = None
    strides: tuple[int, ...] | None = None
    parts: tuple[tuple[Box, str], ...] = ()
    orders: tuple[array[int] | None, ...] = ()

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return self.file.path

    @property
    def is_proven(self) -> bool:
        """Whether digests cover all bytes of the box."""
        return self.digest is not None or bool(self.parts)


# JSON

MAX_MANIFEST_BYTES = 256 << 20  # limit of manifests, indexes and records: some four million boxes
_WINDOW_BYTES = 8 << 20
# Memory of each parsed container, key and value. json keeps equal keys once, so a repeated key costs less.
_CONTAINER_BYTES, _KEY_BYTES, _VALUE_BYTES, _REPEATED_KEY_BYTES = 64, 200, 12, 90
_REPEATED_KEYS = ("dtype", "shape", "data_offsets", "file", "source", "boxes", "digests", "global_shape")
_MAX_PARSED_BYTES = 1 << 30  # of one text, whatever its budget


def read_json(file: StoredFile, limit: int = MAX_MANIFEST_BYTES) -> object:
    """Return the JSON object in a file.

    Raises CorruptError for anything else, and for a file of more than `limit` bytes. The file is read in windows and
    refused at the first window that cannot be JSON, so that a large sparse file costs one window.
    """
    check_size(file.size, limit, file.path)
    data = bytearray()  # grows with each window: allocating the full size would touch all of its memory
    while len(data) < file.size or not data:
        window = bytearray(min(_WINDOW_BYTES, file.size - len(data)))
        file.read_into(memoryview(window), len(data))
        if not data and not window[:64].lstrip().startswith(b"{"):
            raise CorruptError("broken JSON: it is not an object", path=file.path)
        if 0 in window:
            problem = f"broken JSON: byte {len(data) + window.index(0)} is zero, as if it had not been written"
            raise CorruptError(problem, path=file.path)
        data += window
    return parse_json(data, file.path, file.budget)


def parse_json(
    data: bytes | bytearray | memoryview | str, path: str, budget: Budget, *, max_depth: int = MAX_DEPTH
) -> object:
    """Return parsed JSON, which code may walk by recursion.

    Args:
        data: the text.
        path: the file's path for messages.
        budget: the budget of the source.
        max_depth: the most containers that may lie in one another.

    Raises:
        CorruptError: the text is broken, has duplicate keys, is nested too deeply, or would take more memory once
            parsed than the budget has: 16 times its size, and 32 MiB for all texts of a source together.
    """
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")  # json.loads would also accept UTF-16 bytes
    except ValueError as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    check_parsed_size(text, path, budget)
    try:
        parsed = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    return _with_objects(parsed, path, max_depth)


def check_parsed_size(text: str, path: str, budget: Budget) -> None:
    """Spend the memory that JSON takes once parsed, estimated from its brackets, commas and colons.

    Raises CorruptError if the budget does not have it.
    """
    nbytes = _CONTAINER_BYTES * (text.count("[") + text.count("{")) + _VALUE_BYTES * text.count(",")
    nbytes += _KEY_BYTES * text.count(":")
    for key in _REPEATED_KEYS:
        nbytes -= (_KEY_BYTES - _REPEATED_KEY_BYTES) * text.count(f'"{key}"')
    if nbytes > _MAX_PARSED_BYTES:
        raise CorruptError(f"refused: it would take {nbytes} bytes of memory once parsed", path=path)
    budget.spend_memory(nbytes, text, path)


def _with_objects(parsed: object, path: str, max_depth: int) -> object:
    """Return parsed JSON with dicts in the place of `_DECODER`'s tuples of (key, value) pairs, refused if too deep.

    Example: ``(("a", 1), ("b", [()]))`` becomes ``{"a": 1, "b": [{}]}``; ``(("a", 1), ("a", 2))`` is refused.
    """
    root = [parsed]
    level: list[dict[object, object] | list[object]] = [root]
    # Level by level, not by recursion: the text may be nested as deeply as the decoder allows.
    for _ in range(max_depth + 1):
        below: list[dict[object, object] | list[object]] = []
        for container in level:
            entries = container.items() if type(container) is dict else enumerate(container)
            for key, value in entries:
                if type(value) is tuple:
                    unique = dict(value)
                    if len(unique) != len(value):
                        raise CorruptError("broken JSON: a key occurs twice", path=path)
                    container[key] = unique  # type: ignore[call-overload]
                    below.append(unique)
                elif type(value) is list:
                    below.append(value)
        if not below:
            return root[0]
        level = below
    raise CorruptError(f"refused: it is nested more than {max_depth} levels deep", path=path)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Objects come as tuples of pairs: in a dict, a key that occurs twice would be lost.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_refuse_constant)


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its digest under the key ``digest``."""
    return {**record, "digest": _digest_of(record)}


def unseal(sealed: object) -> dict[str, Any]:
    """Return the record in what `seal` has returned; raise ValueError or KeyError for anything else."""
    if not isinstance(sealed, dict):
        raise ValueError("it is not an object")
    record = dict(sealed)
    if record.pop("digest") != _digest_of(record):
        raise ValueError("it differs from its own digest")
    return record


def _digest_of(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


_JSON_PER_LEVEL = 3  # nested JSON containers for one container of a value, at most: an object, a list and its pairs


def parse_stored(text: str | bytes, path: str, budget: Budget) -> object:
    """Return the JSON in text from a file that `values.encode` wrote; raise CorruptError for text that is broken."""
    return parse_json(text, path, budget, max_depth=_JSON_PER_LEVEL * (values.MAX_DEPTH + 1))


def decode_stored(
    text: str,
    path: str,
    budget: Budget,
    *,
    types: Mapping[str, type] | None = None,
    leaves: Mapping[str, object] | None = None,
    unknown: list[values.UnknownValue] | None = None,
) -> Any:
    """Return `values.decode` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    parsed = parse_stored(text, path, budget)
    try:
        return values.decode_parsed(parsed, types=types, leaves=leaves, unknown=unknown)
    except StateExchangeError:
        raise
    except ValueError as error:
        raise _broken_config(error, path) from None


def plain_stored(text: str, path: str, budget: Budget) -> Any:
    """Return `values.to_plain` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    parsed = parse_stored(text, path, budget)
    try:
        return values.to_plain(parsed)
    except ValueError as error:
        raise _broken_config(error, path) from None


def _broken_config(error: ValueError, path: str) -> CorruptError:
    return CorruptError(f"broken config: {excerpt(str(error), 200)}", path=path)
