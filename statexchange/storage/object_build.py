"""Build a checkpoint in an object store: each object appears whole, and the manifest, put last, commits them.

A store has no directory to rename. Instead a publisher creates a claim exclusively (claim.py). Only the holder of the
claim puts or removes other objects.

States of the target: *free* (no claim), *being written* (a claim and no manifest; readers refuse it), *committed* (a
manifest).

Steps of a publisher:

1. Create the claim, which lists the names of all objects that will be put. If another publisher's claim exists: fail at
   once if its process runs on this host, or if the claim changes while it is watched. Take it over at once if its
   process is provably dead on this host, or with `resume`. Otherwise take it over after it has not changed for 60 s by
   this process's own clock (clocks of hosts are never compared).
2. List the directory. Objects that an earlier claim listed may be removed. A manifest means a whole checkpoint, which
   is refused unless it may be replaced. Objects that neither a manifest nor a claim lists are always refused.
3. Un-commit a checkpoint that is replaced: remove its manifest first, then its index, then its other objects. So
   readers refuse the directory from the first removal on.
4. Create all objects exclusively. So a publisher that goes on after its claim was taken over can never replace an
   object of its successor. If it created a name first, the successor removes that object and puts its own again.
5. Renew the claim, list the directory, compare each object's version with what was put, create the manifest
   exclusively, check once more that the claim is still held, and remove the claim last.

Renewal: every 15 s, in the calls that write, by a put that is conditional on the ETag that was read (S3). fsspec file
systems other than s3fs have no conditional put; there the claim is compared and then put. Two publishers that take over
one claim at the same moment may then both treat it as their own, until one of them renews it or makes the final
check of step 5. No store has a conditional removal, so the claim is checked just before each removal.

Failure: a publisher that fails removes its objects only while it still holds the claim; otherwise its successor removes
them. A killed publisher leaves the claim and its objects, and the next publisher takes over in step 1.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    CorruptError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
    without_secrets,
)
from statexchange.processes import Owner
from statexchange.storage.atomic import new_nonce
from statexchange.storage.build import (
    Build,
    OutputFile,
    ReplaceCheck,
    active_builds,
    busy_error,
    removed_error,
    target_exists,
)
from statexchange.storage.claim import CLAIM_NAME, Claim
from statexchange.storage.files import audit
from statexchange.storage.fsspec_store import FsspecStore, file_system, storage_errors, version_of_info
from statexchange.storage.json_text import read_json
from statexchange.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from statexchange.storage.files import Buffer
    from statexchange.storage.store import EntryKind, StoredFile

__all__ = ["ObjectBuild", "check_url"]

_log = logging.getLogger(__name__)
_PART_BYTES = 16 << 20  # of a multipart upload; stores require at least 5 MiB
_ATTEMPTS = 5  # to put an object whose name a publisher without the claim keeps creating
_READ_ONLY = ("http", "https", "data", "github", "zip", "tar")


@contextlib.contextmanager
def _conditional(doing: str, url: str) -> Iterator[None]:
    """Translate errors like `storage_errors`; a failed condition (s3fs reports EINVAL) becomes TargetExistsError."""
    try:
        with storage_errors(doing, url):
            yield
    except StorageError as error:
        if error.errno == errno.EINVAL and "pre-condition" in error.message:
            raise TargetExistsError("the object exists, or was changed", path=error.path) from None
        raise


class _Objects:
    """The objects directly below a URL, by name."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.path = without_secrets(self.url)
        scheme = url.partition("://")[0].partition("::")[0]  # of the outermost file system of a chain
        if scheme in _READ_ONLY:
            raise UnsupportedError(
                f"{scheme}:// is read-only: publish to a directory or an object store", path=self.path
            )
        self._system, path = file_system(url)
        self._base = path.rstrip("/")
        protocols = self._system.protocol
        self._has_conditional_put = "s3" in ([protocols] if isinstance(protocols, str) else protocols)

    def path_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.path}/{name}"

    def store(self) -> FsspecStore:
        """Return a new store of the directory; its listing raises NotFoundError if it does not exist."""
        return FsspecStore(self.url, self._system, self._base)

    def list_infos(self) -> dict[str, Mapping[str, Any]]:
        """List the directory: fsspec's info of each object by name."""
        audit("list", self.path)
        try:
            with storage_errors("list", self.url):
                self._system.invalidate_cache()
                entries = self._system.ls(self._base, detail=True)
        except NotFoundError as error:
            if "bucket" in error.message:
                raise
            return {}
        infos = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in entries}
        if set(infos) == {self._base.rpartition("/")[2]} and entries[0].get("type") == "file":
            is_target = str(entries[0]["name"]).strip("/") == self._base.strip("/")
            if is_target:
                raise TargetExistsError("the target is an object, not a directory", path=self.path)
        return {name: info for name, info in infos.items() if name}

    def version(self, name: str) -> str | None:
        """Return an object's version; None if it does not exist."""
        try:
            with storage_errors("look up", f"{self.url}/{name}"):
                self._system.invalidate_cache()
                return _version(self._system.info(f"{self._base}/{name}"))
        except NotFoundError:
            return None

    def create(self, name: str, data: bytes) -> None:
        """Put a small object; raise TargetExistsError if the name exists."""
        audit("put", self.path_of(name))
        with _conditional("put", f"{self.url}/{name}"):
            self._system.pipe_file(f"{self._base}/{name}", data, mode="create")

    def open_new(self, name: str) -> Any:
        """Begin to upload an object; closing it raises TargetExistsError if the name exists then."""
        audit("create", self.path_of(name))
        with _conditional("create", f"{self.url}/{name}"):
            return self._system.open(f"{self._base}/{name}", "xb", block_size=_PART_BYTES)

    def remove(self, name: str) -> None:
        """Remove an object if it exists."""
        with contextlib.suppress(NotFoundError), storage_errors("remove", f"{self.url}/{name}"):
            self._system.rm_file(f"{self._base}/{name}")

    # The claim

    def read_claim(self) -> tuple[Claim, str] | None:
        """Return the claim and its version, read consistently; None without a claim."""
        path = self.path_of(CLAIM_NAME)
        for _ in range(_ATTEMPTS):
            before = self.claim_version()
            if before is None:
                return None
            try:
                with storage_errors("read", path):
                    data = self._system.cat_file(f"{self._base}/{CLAIM_NAME}")
            except NotFoundError:
                return None
            if self.claim_version() == before:
                return Claim.parse(bytes(data), path), before
        raise busy_error(None, self.path)

    def claim_version(self) -> str | None:
        """Return the claim's ETag or other version; None without a claim."""
        return self.version(CLAIM_NAME)

    def replace_claim(self, claim: Claim, version: str, nonce: str) -> bool:
        """Replace the claim that has this version and nonce; return False if it has changed."""
        path = self.path_of(CLAIM_NAME)
        audit("renew" if claim.nonce == nonce else "take over", path)
        key = f"{self._base}/{CLAIM_NAME}"
        if not self._has_conditional_put:
            present = self.read_claim()
            if present is None or present[0].nonce != nonce or present[1] != version:
                return False
            with storage_errors("put", path):
                self._system.pipe_file(key, claim.to_bytes(), mode="overwrite")
            return True
        try:
            with _conditional("put", path):
                self._system.pipe_file(key, claim.to_bytes(), mode="overwrite", IfMatch=version)
        except (TargetExistsError, NotFoundError):  # another publisher has replaced the claim, or it was removed
            return False
        return True


class _FilteredStore(Store):
    """A store whose listing leaves out some names."""

    def __init__(self, store: FsspecStore, hidden: set[str]) -> None:
        self.path = store.path
        self._store = store
        self._hidden = hidden

    def _list(self) -> dict[str, EntryKind]:
        return {name: kind for name, kind in self._store.listing.items() if name not in self._hidden}

    def _open(self, name: str) -> StoredFile:
        return self._store.open(name)

    def below(self, name: str, *, private: bool = False) -> Store:
        return self._store.below(name, private=private)

    def is_current(self) -> bool:
        return self._store.is_current()

    def close(self) -> None:
        self._store.close()


def check_url(url: str, manifest: str, check: ReplaceCheck | None) -> None:
    """Raise what a build at `url` would raise for the target, without changing anything."""
    objects = _Objects(url)
    present = objects.read_claim()
    if present is not None and present[0].owner.is_alive:
        raise busy_error(present[0].owner, objects.path)
    _list_target(objects, manifest, check, set(present[0].names) if present is not None else set())


def _list_target(
    objects: _Objects, manifest: str, check: ReplaceCheck | None, inherited: set[str]
) -> tuple[list[str], set[str]]:
    """Return the old checkpoint's names in the order of their removal, and the objects of earlier claims.

    `inherited` are the names that earlier claims list. Raises for any other object, and for a whole checkpoint that may
    not be replaced.
    """
    present = set(objects.list_infos()) - {CLAIM_NAME}
    old: list[str] = []
    if manifest in present or present - inherited:
        if check is None:
            raise target_exists(objects.path)
        old = [name for name in check(_FilteredStore(objects.store(), inherited | {CLAIM_NAME})) if name in present]
    return old, (present & inherited) - set(old)


class ObjectFile(OutputFile):
    """A file of an `ObjectBuild`, uploaded from begin to end."""

    def __init__(self, build: ObjectBuild, objects: _Objects, name: str, header: bytes) -> None:
        self.path = objects.path_of(name)
        self.header = header
        self.name = name
        self._build = build
        self._objects = objects
        self._file: Any = None
        self._at = 0
        self.is_visible = False

    def _opened(self) -> Any:
        if self._file is None:
            self._file = self._build.open_new(self.name)
            # Some stores list an object before it is complete.
            self.is_visible = self._objects.version(self.name) is not None
            self._write(self.header)
        return self._file

    def write(self, data: Buffer, at: int) -> None:
        self._opened()
        assert at == self._at, (at, self._at)
        self._build.renew()
        self._write(data)

    def _write(self, data: Buffer) -> None:
        with storage_errors("write", self.path):
            self._file.write(data)
        self._at += memoryview(data).nbytes

    def finish(self, *, writes_header: bool = True) -> None:
        assert writes_header
        self._opened()
        self._build.put_object(self.name, self._complete_upload, is_visible=self.is_visible)
        self._file = None

    def _complete_upload(self) -> None:
        audit("put", self.path)
        with _conditional("put", self.path):
            if not self._file.closed:
                self._file.close()
            else:  # a second attempt: s3fs kept the uploaded parts when the name existed
                self._file.commit()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # the upload is cancelled, whatever the store answers
                file.discard()
            with contextlib.suppress(Exception):
                file.closed = True  # otherwise its finalizer would put the incomplete object


class ObjectBuild(Build):
    """A checkpoint under construction in an object store. The top of this file explains the protocol."""

    renew_s = 15.0  # how often the claim is renewed
    take_over_s = 60.0  # how long a claim must be unchanged before it is taken over

    def __init__(
        self, url: str, plan_digest: str, names: Sequence[str], *, check: ReplaceCheck | None, resume: bool
    ) -> None:
        self._objects = _Objects(url)
        self.path = self.building_path = self._objects.path
        self.finished = {}
        self._manifest = names[-1]
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._outputs: list[ObjectFile] = []
        self._versions: dict[str, str | None] = {}  # None: it is being put, or the outcome of its put is unknown
        self._claim = Claim.new(new_nonce(), plan_digest, tuple(names))
        self._claim_version: str | None = None  # the claim's version while this publisher holds it
        self._renewed = 0.0
        self._has_ended = False
        active_builds.add(self._claim.nonce)
        try:
            inherited = self._take_claim(resume=resume)
            old, leftovers = _list_target(self._objects, self._manifest, check, inherited)
            self._clear(old, leftovers)
        except BaseException:
            self.abandon()
            raise

    # The claim

    def _take_claim(self, *, resume: bool) -> set[str]:
        """Create the claim, or take it over from a dead publisher; return the names that the latter may have put."""
        watched_version: str | None = None
        watched_since = 0.0
        while True:
            with contextlib.suppress(TargetExistsError):
                audit("claim", self._objects.path_of(CLAIM_NAME))
                self._objects.create(CLAIM_NAME, self._claim.to_bytes())
            present = self._objects.read_claim()
            if present is None:
                continue  # it was removed between the two calls
            other, version = present
            if other.nonce == self._claim.nonce:
                self._claim_version, self._renewed = version, time.monotonic()
                return set(other.names) - set(self._claim.names) if other.renewal else set()
            if _is_alive(other):
                raise busy_error(other.owner, self.path)
            now = time.monotonic()
            is_first_look = watched_version is None
            if is_first_look:
                watched_version, watched_since = version, now
            elif watched_version != version:
                raise busy_error(other.owner, self.path)
            if resume or _is_dead(other) or now - watched_since >= self.take_over_s:
                names = tuple({*self._claim.names, *other.names})
                own_claim = replace(self._claim, names=names)
                if self._objects.replace_claim(own_claim, version, other.nonce):
                    if self._read_own():
                        self._claim = own_claim
                        return set(other.names)
                    raise TargetExistsError("refused: another publisher has taken over", path=self.path)
                watched_version = None
                continue
            if is_first_look:
                _log.warning(
                    "%s: %s: waiting for %.0f s to see whether it still runs; if it has ended, resume=True (--resume) "
                    "of a merge skips the wait",
                    self.path,
                    other,
                    self.take_over_s,
                )
            time.sleep(min(1.0, self.take_over_s / 20))

    def _read_own(self) -> bool:
        """Read the claim and return whether this publisher holds it."""
        present = self._objects.read_claim()
        if present is None or present[0].nonce != self._claim.nonce:
            self._claim_version = None
            return False
        self._claim_version, self._renewed = present[1], time.monotonic()
        return True

    def renew(self, *, at_once: bool = False) -> None:
        """Renew the claim every `renew_s`; raise TargetExistsError if another publisher has taken over. Thread-safe."""
        if not at_once and time.monotonic() - self._renewed < self.renew_s:
            return
        with self._lock:
            if not at_once and time.monotonic() - self._renewed < self.renew_s:
                return
            versions = {name: version for name, version in self._versions.items() if version is not None}
            self._claim = replace(self._claim, renewal=self._claim.renewal + 1, versions=versions)
            if self._claim_version is not None:
                self._objects.replace_claim(self._claim, self._claim_version, self._claim.nonce)
                # A retried request may report failure although the first one succeeded, so read the claim.
                if self._read_own():
                    return
            raise self._lose_claim()

    def _clear(self, old: Sequence[str], leftovers: set[str]) -> None:
        """Remove the checkpoint that is replaced, its manifest first, and the objects of dead publishers."""
        if not {*old, *leftovers} <= set(self._claim.names):
            self._claim = replace(self._claim, names=tuple({*self._claim.names, *old, *leftovers}))
            self.renew(at_once=True)
        for name in [*old, *sorted(leftovers)]:
            self.renew()
            self._remove(name)

    # Objects

    def create(self, name: str, nbytes: int, header: bytes) -> ObjectFile:  # noqa: ARG002 (a store reserves no room)
        """Return an output file, which is uploaded while it is written."""
        output = ObjectFile(self, self._objects, name, header)
        self._outputs.append(output)
        return output

    def open_new(self, name: str) -> Any:
        """Begin to upload an object; first remove any object that an earlier publisher has put under this name."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                self._versions[name] = None
            try:
                return self._objects.open_new(name)
            except TargetExistsError:
                self._drop(name)
        raise TargetExistsError("refused: another publisher puts this object again and again", path=self.path)

    def _drop(self, name: str) -> None:
        """Remove an object that another publisher has put under one of this publisher's names."""
        with self._lock:
            self._versions.pop(name, None)
        self._remove(name)

    def _remove(self, name: str) -> None:
        """Check the claim, then remove an object: without the claim another publisher has taken over."""
        audit("remove object", self._objects.path_of(name))
        with self._lock:
            self._check_claim()
            self._objects.remove(name)

    def _check_claim(self) -> None:
        with self._lock:
            if self._claim_version is None or self._objects.claim_version() != self._claim_version:
                raise self._lose_claim()

    def _lose_claim(self) -> TargetExistsError:
        """Forget the claim, which another publisher holds now, and return the error to raise."""
        self._claim_version = None
        return TargetExistsError(
            "refused: this publisher did not renew its claim in time, and another one has taken over", path=self.path
        )

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
                raise removed_error(self._objects.path_of(name))
            with self._lock:
                self._versions[name] = version
            try:
                self._check_claim()
            except TargetExistsError:
                self._versions.clear()
                self._remove_stray(name)
                raise
            return
        raise TargetExistsError("refused: another publisher puts this object again and again", path=self.path)

    def _remove_stray(self, name: str) -> None:
        """Remove an object that was put after another publisher took over, unless it may be the other publisher's.

        Until the other publisher puts its manifest, it removes what it finds of this one. Afterwards its manifest lists
        its own objects.
        """
        store = self._objects.store()
        try:
            manifest: Any = read_json(store.open(self._manifest))
            listed = manifest["files"]
        except (NotFoundError, CorruptError, TypeError, KeyError):
            return
        if isinstance(listed, list) and name not in listed and name != self._manifest:
            audit("remove object", self._objects.path_of(name))
            self._objects.remove(name)

    def put(self, name: str, data: Buffer) -> None:
        """Put a small object."""
        self.put_object(name, lambda: self._objects.create(name, bytes(data)))

    def record(self, name: str, metadata: object) -> None:
        """Do nothing: objects of a killed publisher are removed, not reused."""

    def add(self, name: str) -> None:
        """Store the version of an object that another process has put."""
        version = self._objects.version(name)
        if version is None:
            raise NotFoundError("this host does not see the object", path=self._objects.path_of(name))
        with self._lock:
            self._versions[name] = version

    def make_probe(self) -> str:
        """Raise UnsupportedError: several processes cannot write parts of one object."""
        raise UnsupportedError(
            "ranks would write their parts into one object in place, which no object store supports", path=self.path
        )

    # Ending

    def commit(self, name: str, data: Buffer) -> None:
        """Check that all objects are unchanged, put the last one, and remove the claim."""
        assert name == self._manifest
        self.renew(at_once=True)  # proves that this publisher still holds the claim
        infos = self._objects.list_infos()
        for put_name, version in self._versions.items():
            current = _etag(infos.get(put_name, {}))
            if put_name in infos and not current:  # only ETags are equal in a listing and in the info of one object
                current = self._objects.version(put_name) or ""
            if current != version:
                raise TargetExistsError(
                    "refused: another publisher has replaced an object of this one",
                    path=self._objects.path_of(put_name),
                    expected=version,
                    found=current or "nothing",
                )
        for stray in (infos.keys() & set(self._claim.names)) - self._versions.keys():
            self._remove(stray)  # put meanwhile by a publisher that has lost the claim
        self.put(name, data)  # commits: from here on readers accept the directory
        self._versions.clear()  # so that `abandon` removes nothing
        self._end()  # the claim is removed last

    def abandon(self) -> None:
        """Remove all objects of an uncommitted build, unless another publisher has taken over."""
        if self._has_ended or os.getpid() != self._pid:  # a forked child must not remove its parent's objects
            return
        for output in self._outputs:
            output.close()
        try:
            if self._read_own():
                for name in sorted(self._versions, key=lambda name: name != self._manifest):
                    version = self._objects.version(name)
                    if version is not None and self._versions[name] in (None, version):
                        self._remove(name)
        except StateExchangeError as error:
            _log.warning("objects of %s stay until the next publication: %s", self.path, error)
            self._claim_version = None  # so that `_end` keeps the claim, which lists these objects
        finally:
            self._end()

    def _end(self) -> None:
        """Remove the claim if this publisher holds it."""
        try:
            if self._claim_version is not None:
                with contextlib.suppress(TargetExistsError):  # another publisher has taken it over
                    self._remove(CLAIM_NAME)
        except StateExchangeError as error:
            _log.warning("the claim of %s stays until the next publication: %s", self.path, error)
        finally:
            self._has_ended = True
            active_builds.discard(self._claim.nonce)


def _is_alive(claim: Claim) -> bool:
    return claim.owner.is_alive and not _is_dead(claim)


def _is_dead(claim: Claim) -> bool:
    """Whether the publisher has provably ended; for this process, whether that build has."""
    if claim.owner == Owner.current():
        return not active_builds.is_active(claim.nonce)
    return claim.owner.is_dead


def _etag(info: Mapping[str, Any]) -> str:
    return str(info.get("ETag") or info.get("etag") or "")


def _version(info: Mapping[str, Any]) -> str:
    """Return an object's ETag, else another version that its store gives, else ""."""
    return _etag(info) or version_of_info(info) or ""
