"""Read objects of an fsspec file system, byte range by byte range.

An object is pinned by the version that its store gives (an ETag, a generation or a time). A range request returns
bytes of the newest version, not of the pinned one. So the reader compares the version again after reading
(`check_unchanged`).

A request takes tens of milliseconds, in which megabytes could be transferred. So files may be read ahead (`ReadAhead`),
as the kernel does it: a read that goes on where another ended fetches more than it asks for, each time twice as much as
before; any other read fetches only what it asks for. So reads in order are few requests, and reads in random order cost
no more than without.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from statexchange.errors import (
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
    secrets_of,
    without_secrets,
)
from statexchange.storage.store import EntryKind, Store, StoredFile

_NUM_WINDOWS = 8  # that a file has: several threads may read it, each in another place
_GAP_BYTES = 64 << 10  # from the end of one read to another that counts as going on there
_LEAST_BYTES = 64 << 10
_NOTHING = memoryview(b"")


class _Window(NamedTuple):
    """Bytes of a file from `begin` on."""

    begin: int
    data: memoryview

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class ReadAhead:
    """Reads a file of `size` bytes by `fetch(begin, end)`, and keeps at most `memory_bytes` of it. Thread-safe."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, memory_bytes: int) -> None:
        self._fetch = fetch
        self._size = size
        self._window_bytes = memory_bytes // _NUM_WINDOWS
        self._lock = threading.Lock()
        self._windows: list[_Window] = []  # the one that was used last comes last

    def read(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes from `begin` to `end`, which is not beyond the file, in one or two pieces.

        Of a file that was read up to 128 KiB, of which a window has the last 64 KiB, a read of [120 KiB, 130 KiB) takes
        8 KiB from the window, and fetches the 128 KiB that follow it.
        """
        last = self._window_for(begin)
        buffered, ahead = _NOTHING, 0
        if last is not None:
            buffered = last.data[begin - last.begin : end - last.begin]
            ahead = min(self._window_bytes, max(_LEAST_BYTES, 2 * len(last.data)))
        first = begin + len(buffered)
        if first == end:
            return [buffered]
        data = memoryview(self._fetch(first, max(end, min(first + ahead, self._size))))
        # Of a read that is larger than a window only its end is remembered, so that the next one may go on there.
        window = _Window(first, data) if len(data) <= self._window_bytes else _Window(end, _NOTHING)
        self._use(window, instead_of=last)
        return [buffered, data[: end - first]]

    def _window_for(self, begin: int) -> _Window | None:
        """Return the window that has byte `begin`, or ends shortly before it."""
        for window in reversed(self._windows):
            if window.begin <= begin <= window.end + _GAP_BYTES:
                self._use(window, instead_of=window)
                return window
        return None

    def _use(self, window: _Window, *, instead_of: _Window | None) -> None:
        # A new list each time: other threads may be searching the old one.
        with self._lock:
            others = [other for other in self._windows if other is not instead_of]
            self._windows = [*others[1 - _NUM_WINDOWS :], window]


# By the names that file systems of fsspec give them: s3fs, HTTP, gcsfs, adlfs and others.
_TAGS = ("ETag", "etag", "md5Hash", "generation")
_NO_BUCKET = "no such bucket"
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


@contextlib.contextmanager
def storage_errors(doing: str, url: str) -> Iterator[None]:
    """Translate any exception of the block into a StateExchangeError.

    Credentials and the query are removed from the URL. `doing` completes "cannot ...". KeyboardInterrupt passes.
    """
    try:
        yield
    except StateExchangeError:
        raise
    except FileNotFoundError as error:
        failure = _failure_of_server(error)
        if failure is not None:
            reason = _redacted(str(failure), url)
            raise StorageError(f"cannot {doing}: {reason}", path=url) from _cause(failure, url)
        # s3fs says "The specified bucket does not exist", without an error code; a path may have the word in it, too.
        path = url.rpartition("://")[2].strip("/")
        is_bucket = "bucket" in str(error).replace(path, "").lower()
        raise NotFoundError(_NO_BUCKET if is_bucket else "no such path", path=url) from None
    except FileExistsError:
        raise TargetExistsError("the object exists", path=url) from None
    except NotImplementedError:
        raise UnsupportedError(f"cannot {doing}: this file system does not support it", path=url) from None
    except OSError as error:
        reason = _redacted(f"{error.strerror or error}", url)
        raise StorageError(f"cannot {doing}: {reason}", errno=error.errno, path=url) from _cause(error, url)
    except Exception as error:  # noqa: BLE001 (it is translated)
        reason = _redacted(f"{type(error).__name__}: {error}", url)
        if "Credentials" in type(error).__name__:  # of botocore and google.auth
            reason += "; give them by the environment or the configuration file that the provider's own tools read"
        raise StorageError(f"cannot {doing}: {reason}", path=url) from _cause(error, url)


def _failure_of_server(error: FileNotFoundError) -> Exception | None:
    """Return why a server gave no answer about a path: fsspec calls every failure over HTTP "not found"."""
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):  # no connection
        return cause
    # Of an answer, in aiohttp's errors; 404 and 410 say that there is nothing.
    status = getattr(cause, "status", None)
    return cause if isinstance(cause, Exception) and isinstance(status, int) and status not in (404, 410) else None


def is_missing_bucket(error: StateExchangeError) -> bool:
    """Whether `storage_errors` has raised this error because of a bucket that does not exist."""
    return error.message == _NO_BUCKET


def _redacted(text: str, url: str) -> str:
    """Return text without the secrets of a URL."""
    for secret in secrets_of(url):
        text = text.replace(secret, "...")
    return text


def _cause(error: Exception, url: str) -> Exception | None:
    """Return the error as the cause for a traceback; None if it could show secrets of the URL."""
    return None if secrets_of(url) else error


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    # As in "zip://model.safetensors::/data/model.zip", whose inner file fsspec opens by itself.
    for inner in url.split("::")[1:]:
        _check_regular(inner.removeprefix("file://"), url)
    with storage_errors("open", url):  # in a chain of URLs, fsspec may open the inner ones here
        try:
            system_and_path: tuple[Any, str] = url_to_fs(url)
            return system_and_path
        except ImportError as error:
            scheme = url.partition("://")[0]
            extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
            advice = f'pip install "statexchange[{extra}]"' if extra else str(error)
            text = f"{scheme}:// needs another package: {advice}"
            raise MissingExtraError(text, path=url) from _cause(error, url)
        except ValueError as error:
            text = f"no file system for this: {_redacted(str(error), url)}"
            raise InvalidArgumentError(text, path=url) from _cause(error, url)


def _check_regular(path: str, url: str) -> None:
    """Raise UnsafeError if a local path in a chain of URLs leads to a FIFO or a device: opening it could block."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # no local path
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UnsafeError("refused: not a regular file", path=url)


def tags_of_info(info: Mapping[str, Any]) -> str:
    """Return what tags a version of an object in its store's info; "" without."""
    return _joined(info, _TAGS)


def version_of_info(info: Mapping[str, Any]) -> str | None:
    """Return the version in a store's info about an object, its tags or else its times; None if it has none."""
    return tags_of_info(info) or _joined(info, _TIMES) or None


def _joined(info: Mapping[str, Any], keys: Sequence[str]) -> str:
    return " ".join(str(info[key]) for key in keys if info.get(key) is not None)


def _time_of_info(info: Mapping[str, Any]) -> float | None:
    """Return when an object was last written, in seconds since the epoch; None if the store's info does not say."""
    for key in _TIMES:
        value = info.get(key)
        if isinstance(value, str):  # as in "2026-05-31T09:07:00.000Z"
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


class FsspecFile(StoredFile):
    """An object, pinned by its version."""

    is_remote = True

    def __init__(self, system: Any, path: str, url: str, info: Mapping[str, Any]) -> None:
        self.path = without_secrets(url)
        self._system = system
        self._path = path
        self._url = url
        if info.get("size") is None:
            raise UnsupportedError(
                "this server does not report the file's size: copy the file here first", path=self.path
            )
        self.size = int(info["size"])
        self._version = version_of_info(info)
        self.modified = _time_of_info(info)
        self._ahead: ReadAhead | None = None

    def read_ahead(self, memory_bytes: int) -> None:
        """Read ahead where reads follow one another, and keep at most `memory_bytes`."""
        self._ahead = ReadAhead(self._request, self.size, memory_bytes)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`, by one request."""
        if not buffer:
            return
        end = offset + len(buffer)
        if end > self.size:
            raise TruncatedError("object is truncated", path=self.path, expected=end, found=self.size)
        buffer[:] = self._request(offset, end) if self._ahead is None else b"".join(self._ahead.read(offset, end))

    def _request(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, which is not beyond the object."""
        try:
            with storage_errors("read", self._url):
                data: bytes = self._system.cat_file(self._path, start=begin, end=end)
        except NotFoundError:  # it was there when it was opened
            raise ReplacedError("removed while it was read", path=self.path) from None
        nbytes = end - begin
        # The whole object, for a part of it.
        if len(data) == self.size > nbytes:
            raise UnsupportedError(
                "this server does not answer range requests: copy the file here first", path=self.path
            )
        if len(data) != nbytes:
            self.check_unchanged()
            raise TruncatedError("object is truncated", path=self.path, expected=nbytes, found=len(data))
        return data

    def check_unchanged(self) -> None:
        """Ask the store for its size and version again."""
        try:
            with storage_errors("look up", self._url):
                self._system.invalidate_cache()
                info = self._system.info(self._path)
        except NotFoundError:
            raise ReplacedError("removed while it was read", path=self.path) from None
        if (info.get("size"), version_of_info(info)) != (self.size, self._version):
            raise ReplacedError("replaced or changed while it was read: read it again", path=self.path)

    @property
    def version(self) -> list[str | int]:
        """Path, size and version."""
        # Without a version from the store nothing proves that two reads are of one version, so no two values are equal.
        return [self.path, self.size, self._version or secrets.token_hex(8)]

    @property
    def local_identity(self) -> list[str | int]:
        """Size and version."""
        return [self.size, self._version or ""]

    @property
    def shared_identity(self) -> list[str | int] | None:
        """Size and version; None if the store gives no version."""
        if self._version is None:
            return None
        return [self.size, self._version]


class FsspecStore(Store):
    """The objects below one URL."""

    is_remote = True

    def __init__(self, url: str, system: Any, path: str) -> None:
        self.path = without_secrets(url.rstrip("/"))
        self._url = url.rstrip("/")
        self._system = system
        self._path = path.rstrip("/")
        self._infos: dict[str, Mapping[str, Any]] = {}
        self._opened: dict[str, FsspecFile] = {}

    @property
    def address(self) -> str:
        """Its URL with user and query."""
        return self._url

    def add(self, name: str, file: FsspecFile) -> None:
        """Make `open(name)` return this file, whose URL may have a query after the name."""
        self._opened[name] = file

    @cached_property
    def listing(self) -> Mapping[str, EntryKind]:
        """The kind of each entry by name, sorted."""
        with storage_errors("list", self._url):
            self._system.invalidate_cache()
            entries = self._system.ls(self._path, detail=True)
        kinds: dict[str, EntryKind] = {}
        for info in entries:
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            if name:
                self._infos[name] = info
                kinds[name] = "directory" if info.get("type") == "directory" else "file"
        return dict(sorted(kinds.items()))

    def open(self, name: str) -> FsspecFile:
        """Pin the version of an object."""
        self.check_name(name)
        file = self._opened.get(name) or self._pinned(name)
        file.budget = self.budget
        return file

    def _pinned(self, name: str) -> FsspecFile:
        info = self._infos.get(name)
        url = f"{self._url}/{name}"
        if info is None or not tags_of_info(info):
            # A listing may format a time differently than the info of a single object does.
            with storage_errors("look up", url):
                info = self._system.info(f"{self._path}/{name}")
        return FsspecFile(self._system, f"{self._path}/{name}", url, info)

    def below(self, name: str, *, private: bool = False) -> FsspecStore:  # noqa: ARG002 (an object store has no file permissions)
        """Return the store of the objects below `name`; nothing is requested."""
        store = FsspecStore(f"{self._url}/{name}", self._system, f"{self._path}/{name}")
        store.budget = self.budget
        return store

    def is_current(self) -> bool:
        """Whether all listed and opened objects are unchanged: an object store has no directory to pin."""
        before = self._versions()
        try:
            for file in self._opened.values():
                file.check_unchanged()
            if not before:  # nothing was listed
                return True
            current = FsspecStore(self._url, self._system, self._path)
            current.listing  # noqa: B018 (fills `_infos`)
        except (NotFoundError, StorageError):
            return False
        return before == current._versions()

    def _versions(self) -> dict[str, tuple[object, str | None]]:
        """Return (size, version) of each listed object by name."""
        return {name: (info.get("size"), version_of_info(info)) for name, info in self._infos.items()}


def open_url(url: str) -> tuple[FsspecStore, str | None]:
    """Open the directory at a URL, or, for an object, its parent and the object's name."""
    system, path = file_system(url)
    with storage_errors("look up", url):
        system.invalidate_cache()
        info = system.info(path)
    if info["type"] == "directory":
        return FsspecStore(url, system, path), None
    name = without_secrets(url).rstrip("/").rpartition("/")[2]
    store = FsspecStore(url.partition("?")[0].rstrip("/").rpartition("/")[0], system, path.rpartition("/")[0])
    # Under its name alone: the query of a signed URL opens this one object.
    store.add(name, FsspecFile(system, path, url, info))
    return store, name
