"""Objects of an fsspec file system, by URL: ranges of them are read as they are asked for, whole ones are put.

That an object appears under its name when it is whole, and not before, is the store's part; S3 and GCS do it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    TargetExistsError,
)

__all__ = [
    "NewObject",
    "ObjectFile",
    "is_url",
    "join",
    "kind_of",
    "names_below",
    "plain",
    "put_new",
    "remove",
    "version_of",
]

_PART_BYTES = 16 << 20  # of an upload; stores want at least 5 MiB
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "updated", "created")


def is_url(path: str) -> bool:
    """Whether `path` names something in an object store."""
    return "://" in path and not path.startswith(("shm://", "file://"))


def plain(path: str) -> str:
    """`path` itself; of ``file:///a/path`` the path that it means."""
    return unquote(path.removeprefix("file://")) if path.startswith("file:///") else path


def join(url: str, name: str) -> str:
    """The URL of `name` below `url`."""
    return f"{url.rstrip('/')}/{name}"


@contextlib.contextmanager
def _errors(doing: str, url: str) -> Iterator[None]:
    """What a file system raises, in our words."""
    url = _shown(url)
    try:
        yield
    except (StorageError, NotFoundError, TargetExistsError, CorruptError):
        raise
    except FileNotFoundError:
        raise NotFoundError("no such object", path=url) from None
    except FileExistsError:
        raise TargetExistsError("the object exists", path=url) from None
    except OSError as error:
        raise StorageError.of(error, doing, path=url) from error
    except Exception as error:
        raise StorageError(f"cannot {doing}: {type(error).__name__}: {error}", path=url) from error


def _shown(url: str) -> str:
    """A URL without its user, password and query, which may let somebody in."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        scheme = url.partition("://")[0]
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
        advice = f'pip install "statexchange[{extra}]"' if extra else str(error)
        raise MissingExtraError(f"{scheme}:// needs another package: {advice}", path=_shown(url)) from error
    except ValueError as error:
        raise InvalidArgumentError(f"no file system for this: {error}", path=_shown(url)) from error


def kind_of(url: str) -> str | None:
    """ "file", "directory", or None where nothing lies."""
    store, path = _store(url)
    with _errors("look up", url):
        store.invalidate_cache()
        try:
            return str(store.info(path)["type"])
        except FileNotFoundError:
            return None


def version_of(url: str) -> str:
    """What changes when the object does; where the store tells no such thing, what has never been before."""
    store, path = _store(url)
    with _errors("look up", url):
        facts = store.info(path)
    told = [str(facts[key]) for key in _VERSIONS if facts.get(key) is not None]
    return " ".join([str(facts.get("size")), *(told or [secrets.token_hex(8)])])


def names_below(url: str) -> list[str]:
    """Names directly below a directory, sorted."""
    store, path = _store(url)
    with _errors("list", url):
        store.invalidate_cache()
        found = store.ls(path, detail=False)
    return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})


class ObjectFile:
    """An object open for reading."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store, self._path = _store(url)
        with _errors("look up", url):
            self.size = int(self._store.info(self._path)["size"])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; an object that ends before that is a CorruptError."""
        if not len(buffer):
            return
        end = offset + len(buffer)
        if end > self.size:
            raise CorruptError("object is truncated", path=self._url, expected=f"{end} bytes", found=self.size)
        with _errors("read", self._url):
            data = self._store.cat_file(self._path, start=offset, end=end)
        if len(data) != len(buffer):
            raise CorruptError("object is truncated", path=self._url, expected=len(buffer), found=len(data))
        buffer[:] = data


class NewObject:
    """An object to be written from its begin to its end, which must not exist unless `replace`."""

    def __init__(self, url: str, *, replace: bool) -> None:
        self._url = url
        store, path = _store(url)
        with _errors("create", url):
            self._file = store.open(path, "wb" if replace else "xb", block_size=_PART_BYTES)
            self._is_there = not replace and store.exists(path)  # some stores show it before it is whole
        self._at = 0

    def write(self, data: Any, offset: int) -> None:
        """The next bytes."""
        assert offset == self._at
        with _errors("write", self._url):
            self._file.write(data)
        self._at += memoryview(data).nbytes

    def finish(self) -> None:
        """Give the object its name."""
        with _errors("put", self._url):
            self._file.close()
        self._is_there = False

    def abandon(self) -> None:
        """Drop what was written; nothing appears."""
        with contextlib.suppress(Exception):  # it is given up, whatever the store says
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # else its end would put what there is
        if self._is_there:
            remove(self._url)


def put_new(url: str, data: bytes, *, replace: bool = False) -> None:
    """A small object, put at once; one that exists is a TargetExistsError unless `replace`."""
    store, path = _store(url)
    with _errors("put", url):
        store.pipe_file(path, bytes(data), mode="overwrite" if replace else "create")


def remove(url: str) -> None:
    """Remove an object, if it is there."""
    store, path = _store(url)
    with _errors("remove", url), contextlib.suppress(FileNotFoundError):
        store.rm_file(path)
