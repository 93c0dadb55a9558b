"""Open a path to read, a local directory or an fsspec URL, and parse the JSON that is in it.

`read_with_retry` opens a path once more where it is replaced while it is read.

The JSON of files is parsed more strictly than by Python's json: UTF-8 only, no NaN or Infinity, no duplicate keys, no
deep nesting. Text that would take far more memory once parsed than real headers do is refused before it is parsed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from statexchange import values
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    excerpt,
    without_secrets,
)
from statexchange.storage.files import check_size, digest
from statexchange.storage.store import (
    Budget,
    LocalStore,
    Store,
    StoredFile,
    absolute_path,
    local_path,
    open_local,
    strip_file_scheme,
)
from statexchange.values import MAX_DEPTH

if TYPE_CHECKING:
    from typing_extensions import Self

# Paths


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


def is_remote(path: str) -> bool:
    """Whether a path that `resolve_path` has returned is an fsspec URL. ``shm://`` and ``file://`` are local."""
    return "://" in path and not path.startswith(("shm://", "file://"))


def directory_of(path: str) -> str:
    """Return the absolute path of a directory, or its URL without trailing slashes.

    Raises:
        InvalidArgumentError: it cannot be that of a directory: a URL has nothing but a scheme.
    """
    if not is_remote(path):
        return local_path(path)
    scheme, _, rest = path.partition("://")
    if not rest.strip("/"):
        text = f"{excerpt(path)} names no bucket or directory: give the whole URL, such as {scheme}://bucket"
        raise InvalidArgumentError(text)
    return path.rstrip("/")


def target_path(path: str | os.PathLike[str], *, local: bool = False) -> str:
    """Return the absolute path of a target directory, or its URL without a trailing slash; refuse a URL if `local`."""
    name = resolve_path(path, "a target")
    if is_remote(name) and not local:
        return directory_of(name)
    if "://" in name:
        raise InvalidArgumentError(f"a checkpoint goes to a directory, not to {name!r}")
    return os.path.abspath(name)


T = TypeVar("T")
_ATTEMPTS = 40  # to open a path that other processes keep replacing
STALE_S = 1.0  # how long an NFS 3 client may show a removed directory under its old name


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """An opened path: a directory (`file` is None), or the file of that name in it."""

    path: str
    store: Store
    file: str | None

    @property
    def names(self) -> list[str]:
        """Names of the files to read: all files of the directory, or the one file."""
        return self.store.files if self.file is None else [self.file]

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may change the directory."""
        return isinstance(self.store, LocalStore) and self.store.is_shared

    def is_current(self) -> bool:
        """Whether the path still leads to what was opened."""
        return self.store.is_current()

    def close(self) -> None:
        """Release all descriptors."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_option_file(path: str | os.PathLike[str], what: str) -> object:
    """Return the parsed JSON file that an option names; `what` is what it is called in errors. Not collective.

    Raises:
        InvalidArgumentError: the path is a directory, or the file is no JSON.
        NotFoundError: there is nothing at the path.
        StorageError: the path cannot be read.
    """
    with open_path(resolve_path(path, f"{what} file")) as opened:
        if opened.file is None:
            raise InvalidArgumentError(f"{what} is a JSON file, and this is a directory", path=opened.path)
        try:
            return parse_json(opened.store.read_small(opened.file), opened.path, opened.store.budget)
        except CorruptError as error:
            text = f"{what} is a JSON file, and this is none: {error.message}"
            raise InvalidArgumentError(text, path=opened.path) from None


def open_path(path: str) -> OpenedPath:
    """Open a local path, ``file:///path``, ``shm://name`` or an fsspec URL. Not collective.

    A file system that cannot exchange two names replaces a checkpoint in two renames (atomic.py). Between them the path
    is absent; then the new checkpoint is opened under its hidden name.

    Raises:
        NotFoundError: there is nothing at the path.
        StorageError: the path cannot be read.
    """
    if not is_remote(path):
        return OpenedPath(path, *open_local(path))
    from statexchange.storage.fsspec_store import open_url

    return OpenedPath(without_secrets(path), *open_url(path))


class Attempts:
    """Attempts to read a path that other processes may replace meanwhile.

    An error counts only if the path still leads to the directory in which it arose: otherwise another process has
    replaced the directory meanwhile. On shared storage a file must also be missing or broken for a whole second,
    because an NFS client may go on showing a directory that another host has removed. `read_with_retry` shows the use.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0
        self._last_error: StateExchangeError | None = None
        self._stale_until: float | None = None

    def open(self) -> OpenedPath:
        """Open the path; the caller closes it, or passes it to `goes_on`.

        Raises:
            NotFoundError: there is nothing at the path.
            ReplacedError: the path was replaced in each of 40 attempts.
        """
        while self._count < _ATTEMPTS:
            # Longer and longer, as a replacement takes microseconds on a disk and many requests over a network.
            if self._count:
                time.sleep(min(0.001 * 2**self._count, 0.05))
            self._count += 1
            try:
                return open_path(self._path)
            except NotFoundError as error:
                if self._last_error is None:
                    raise
                # Between two publications, or removed for good: the next attempts decide.
                self._last_error = error
        if isinstance(self._last_error, NotFoundError):
            raise self._last_error
        text = "replaced again and again while it was read: try again later"
        raise ReplacedError(text, path=self._path) from self._last_error

    def goes_on(self, opened: OpenedPath, error: BaseException) -> bool:
        """Close an opened path whose reading has raised `error`; return whether to open the path again."""
        with opened:
            if isinstance(error, StateExchangeError) and self._is_replaced(opened, error):
                self._last_error = error
                return True
        return False

    def _is_replaced(self, opened: OpenedPath, error: StateExchangeError) -> bool:
        if isinstance(error, ReplacedError) or not opened.is_current():
            return True
        # Only what a half-removed directory looks like is worth a wait.
        if not opened.is_shared or not isinstance(error, NotFoundError | IncompleteError | CorruptError):
            return False
        if self._stale_until is None:
            self._stale_until = time.monotonic() + STALE_S
        return time.monotonic() < self._stale_until


def read_with_retry(path: str, read: Callable[[OpenedPath], T]) -> T:
    """Open a path, call `read` with it and return the result; retry while the path is being replaced (`Attempts`).

    After success the path stays open, and the caller closes it; after an error it is closed.
    """
    attempts = Attempts(path)
    while True:
        opened = attempts.open()
        try:
            return read(opened)
        except BaseException as error:
            if not attempts.goes_on(opened, error):
                raise


# JSON

MAX_MANIFEST_BYTES = 256 << 20  # limit of manifests, indexes and records: some four million boxes
_WINDOW_BYTES = 8 << 20
# Memory of each parsed container, key and value. json keeps equal keys once, so a repeated key costs less.
_CONTAINER_BYTES, _KEY_BYTES, _VALUE_BYTES, _REPEATED_KEY_BYTES = 64, 200, 12, 90
_REPEATED_KEYS = ("dtype", "shape", "data_offsets", "file", "source", "boxes", "digests", "global_shape")
MAX_PARSED_BYTES = 1 << 30  # of one text, whatever its budget


def read_json(file: StoredFile, limit: int = MAX_MANIFEST_BYTES) -> object:
    """Return the JSON object in a file.

    Raises CorruptError for anything else, and for a file of more than `limit` bytes. The file is read in windows and
    refused at the first window that cannot be JSON, so that a large sparse file costs one window.
    """
    check_size(file.size, limit, file.path)
    # It grows with each window: allocating the full size would touch all of its memory.
    data = bytearray()
    while len(data) < file.size or not data:
        window = bytearray(min(_WINDOW_BYTES, file.size - len(data)))
        file.read_into(memoryview(window), len(data))
        if not data and not window[:64].lstrip().startswith(b"{"):
            raise CorruptError("broken JSON: it is not an object", path=file.path)
        # JSON has no zero bytes, and blocks that were never written, as after a power cut, have nothing else.
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
    # Not by json.loads, which would accept bytes in UTF-16, too.
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")
    except ValueError as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    check_parsed_size(text, path, budget)
    try:
        parsed = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    return _with_objects(parsed, path, max_depth)


def check_parsed_size(text: str, path: str, budget: Budget) -> int:
    """Spend the memory that JSON takes once parsed, estimated from its brackets, commas and colons, and return it.

    Raises CorruptError if the budget does not have it.
    """
    # Brackets within texts count, too: it may be too high, and not too low. Counting takes far less than parsing.
    nbytes = _CONTAINER_BYTES * (text.count("[") + text.count("{")) + _VALUE_BYTES * text.count(",")
    nbytes += _KEY_BYTES * text.count(":")
    for key in _REPEATED_KEYS:
        nbytes -= (_KEY_BYTES - _REPEATED_KEY_BYTES) * text.count(f'"{key}"')
    if nbytes > MAX_PARSED_BYTES:
        raise CorruptError(f"refused: it would take {nbytes} bytes of memory once parsed", path=path)
    budget.spend_memory(nbytes, text, path)
    return nbytes


def _with_objects(parsed: object, path: str, max_depth: int) -> object:
    """Return parsed JSON with dicts in the place of `_DECODER`'s tuples of (key, value) pairs, refused if too deep.

    Example: ``(("a", 1), ("b", [()]))`` becomes ``{"a": 1, "b": [{}]}``; ``(("a", 1), ("a", 2))`` is refused.
    """
    root = [parsed]
    level: list[dict[object, object] | list[object]] = [root]
    # Level by level, not by recursion: the text may be nested as deeply as the decoder allows.
    for _ in range(max_depth + 1):
        below: list[dict[object, object] | list[object]] = []
        has_flat = False
        for container in level:
            entries = container.items() if type(container) is dict else enumerate(container)
            for key, value in entries:
                if type(value) is tuple:
                    # Readers that keep the first of two values, and others the last, would read two files.
                    unique = dict(value)
                    if len(unique) != len(value):
                        raise CorruptError("broken JSON: a key occurs twice", path=path)
                    container[key] = unique  # type: ignore[call-overload]
                    below.append(unique)
                elif type(value) is list:
                    if _PLAIN.issuperset(map(type, value)):  # as most are: not visited, but it counts as a level
                        has_flat = True
                    else:
                        below.append(value)
        if not below and not has_flat:
            return root[0]
        level = below
    raise CorruptError(f"refused: it is nested more than {max_depth} levels deep", path=path)


_PLAIN = {str, int, float, bool, type(None)}  # the types of JSON values that contain no others


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
    # Of one text, whatever the order of the keys and the blanks between them were in the file.
    return digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


_JSON_PER_LEVEL = 3  # nested JSON containers for one container of a value, at most: an object, a list and its pairs


def parse_stored(text: str | bytes, path: str, budget: Budget) -> object:
    """Return the JSON in text from a file that `values.encode` wrote; raise CorruptError for text that is broken."""
    return parse_json(text, path, budget, max_depth=_JSON_PER_LEVEL * (values.MAX_DEPTH + 1))


def decode_stored(text: str, path: str, budget: Budget, decode: Callable[[object], T]) -> T:
    """Return what `decode`, one of `values`, makes of text from a file, once it is parsed.

    Raises CorruptError for text that `values.encode` cannot write.
    """
    parsed = parse_stored(text, path, budget)
    try:
        return decode(parsed)
    except StateExchangeError:
        raise
    except ValueError as error:
        raise CorruptError(f"broken config: {excerpt(str(error), 200)}", path=path) from None
