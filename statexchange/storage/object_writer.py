"""Put objects under a claim (claim.py), as the publisher of a directory or as a member that helps it.

object_build.py has the protocol. Each writer creates objects exclusively and checks the claim after each put, so that
no object of a publisher that was taken for dead stays among those of its successor.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from statexchange.errors import StateExchangeError, TargetExistsError
from statexchange.storage.build import OutputFile, removed_error
from statexchange.storage.files import audit
from statexchange.storage.fsspec_store import storage_errors
from statexchange.storage.json_text import read_json
from statexchange.storage.objects import conditional

if TYPE_CHECKING:
    from collections.abc import Callable

    from statexchange.storage.files import Buffer
    from statexchange.storage.objects import Objects

__all__ = ["ObjectFile", "ObjectWriter"]

_ATTEMPTS = 5  # to put or remove an object whose name a publisher without the claim keeps creating


class ObjectFile(OutputFile):
    """A file that an `ObjectWriter` uploads from begin to end."""

    def __init__(self, writer: ObjectWriter, objects: Objects, name: str, nbytes: int, header: bytes) -> None:
        self.path = objects.path_of(name)
        self.header = header
        self.name = name
        self._writer = writer
        self._objects = objects
        self._nbytes = nbytes
        self._file: Any = None
        self._at = 0
        self.is_visible = False

    def _opened(self) -> Any:
        if self._file is None:
            self._file = self._writer.open_new(self.name, self._nbytes)
            # Some stores list an object before it is complete.
            self.is_visible = self._objects.version(self.name) is not None
            self._write(self.header)
        return self._file

    def write(self, data: Buffer, at: int) -> None:
        """Upload the next bytes; the upload begins at the first call."""
        self._opened()
        assert at == self._at, (at, self._at)
        self._writer.renew()
        self._write(data)

    def _write(self, data: Buffer) -> None:
        with storage_errors("write", self.path):
            self._file.write(data)
        self._at += memoryview(data).nbytes

    def finish(self, *, writes_header: bool = True) -> None:
        """Complete the upload: only now the object exists."""
        assert writes_header
        self._opened()
        self._writer.put_object(self.name, self._complete_upload, is_visible=self.is_visible)
        self._file = None

    def _complete_upload(self) -> None:
        audit("put", self.path)
        with conditional("put", self.path):
            if not self._file.closed:
                self._file.close()
            else:  # a second attempt: s3fs kept the uploaded parts when the name existed
                self._file.commit()

    def close(self) -> None:
        """Cancel an upload that is not complete."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # the upload is cancelled, whatever the store answers
                file.discard()
            with contextlib.suppress(Exception):
                file.closed = True  # otherwise its finalizer would put the incomplete object


class ObjectWriter(ABC):
    """Puts objects into a directory that is claimed.

    Args:
        objects: the directory.
        manifest: the name of the object that commits it.
    """

    def __init__(self, objects: Objects, manifest: str) -> None:
        self._objects = objects
        self._manifest = manifest
        self._lock = threading.RLock()
        self._versions: dict[str, str | None] = {}  # None: it is being put, or the outcome of its put is unknown

    @abstractmethod
    def renew(self) -> None:
        """Raise TargetExistsError if another publisher has taken over; most calls return without a request."""

    @abstractmethod
    def _check_claim(self) -> None:
        """Raise TargetExistsError if another publisher has taken over."""

    def open_new(self, name: str, nbytes: int) -> Any:
        """Begin to upload an object; first remove any object that an earlier publisher has put under this name."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                self._versions[name] = None
            try:
                return self._objects.open_new(name, nbytes)
            except TargetExistsError:
                self._drop(name)
        raise self._contested()

    def put_object(self, name: str, put: Callable[[], None], *, is_visible: bool = False) -> None:
        """Put an object under a free name and store its version."""
        for _ in range(_ATTEMPTS):
            self.renew()
            if not is_visible and self._objects.version(name) is not None:
                self._drop(name)
            with self._lock:
                self._versions[name] = None
            try:
                put()
            except TargetExistsError:
                self._drop(name)
                continue
            version = self._objects.version(name)
            if version is None:
                self._check_claim()  # another publisher may have removed it
                raise removed_error(self._objects.path_of(name))
            with self._lock:
                self._versions[name] = version
            try:
                self._check_claim()
            except TargetExistsError:
                self._versions.clear()
                self._remove_stray(name, version)
                raise
            return
        raise self._contested()

    def _contested(self) -> TargetExistsError:
        text = "refused: another publisher puts this object again and again"
        return TargetExistsError(text, path=self._objects.path)

    def _drop(self, name: str) -> None:
        """Remove an object that another publisher has put under one of this publisher's names."""
        with self._lock:
            self._versions.pop(name, None)
        self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove an object that was there while this publisher still had the claim.

        The version is looked up before the claim is checked. So what another publisher puts, if it takes over after
        this check, has another version, and S3 does not remove it.
        """
        audit("remove object", self._objects.path_of(name))
        for _ in range(_ATTEMPTS):
            with self._lock:
                version = self._objects.version(name)
                self._check_claim()
                if version is None or self._objects.remove(name, version):
                    return
        raise self._contested()

    def _remove_stray(self, name: str, version: str) -> None:
        """Remove an object that was put after the claim was lost, unless it may be the next publisher's.

        While another publisher has the claim, it removes what it finds of this one. Afterwards its manifest lists its
        own objects. Without claim and manifest the publisher has given up before it could know of this object.
        """
        listed = self._listed_names()
        is_stray = name not in listed if listed is not None else self._objects.claim_nonce() is None
        if is_stray and name != self._manifest and self._objects.version(name) == version:
            audit("remove object", self._objects.path_of(name))
            self._objects.remove(name, version)

    def _listed_names(self) -> set[str] | None:
        """Return the names of the files that the manifest lists; None without one, or if it cannot be read."""
        try:
            manifest: Any = read_json(self._objects.store().open(self._manifest))
            # The manifest of a save lists (name, bytes).
            return {entry if isinstance(entry, str) else str(entry[0]) for entry in manifest["files"]}
        except (StateExchangeError, TypeError, KeyError, IndexError):
            return None
