"""Build a checkpoint in an object store: every object appears whole, and the manifest, last, says that all do.

A store has no directory to rename. A publisher claims the target by an object that it creates exclusively
(claim.py), and only who holds the claim puts or removes anything else:

1. Create the claim. It lists the names of all objects that will be put. If another one's claim is there: fail at once
   if its process runs on this host or if the claim changes; take it over at once if its process is provably dead on
   this host, or if the user says so; else after it has not changed for 60 s by this process's own clock.
2. List the directory. What an earlier claim listed is ours to remove. A manifest there means a whole checkpoint, which
   is refused unless it may be replaced; objects that neither a manifest nor a claim lists are always refused.
3. Un-commit a checkpoint that is replaced: remove its manifest, then its index, then its other objects. Readers see
   from the first removal on that it is being written (a claim and no manifest).
4. Create all objects exclusively. So a publisher that was taken for dead and goes on never replaces an object of who
   took over; if it was first with a name, its object is removed under the new claim and the put is tried again.
5. Renew the claim, list the directory, compare the version of every object with what was put, create the manifest
   exclusively, check once more that the claim is ours, remove the claim.

A claim is renewed in the calls that write, every 15 s, by a put that is conditional on the ETag that was read (S3).
Stores whose fsspec file system has no conditional put (all but s3fs, as of now) get compare-then-put: two publishers
that take over one claim within the same moment may then both believe that it is theirs, until one of them renews it
or makes the final check. Removing is unconditional everywhere: it is done only just after a look at the claim.

A publisher that fails removes its objects only while the claim is still its own; who took over removes them otherwise.
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
_PART_BYTES = 16 << 20  # of an upload; stores want at least 5 MiB
_ATTEMPTS = 5  # to put an object whose name a publisher that was taken for dead takes again and again
_READ_ONLY = ("http", "https", "data", "github", "zip", "tar")


@contextlib.contextmanager
def _conditional(doing: str, url: str) -> Iterator[None]:
    """`storage_errors`, with TargetExistsError for a condition that did not hold, which s3fs reports as EINVAL."""
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
        scheme = url.partition("://")[0].rpartition("::")[2]
        if url.partition("://")[0].partition("::")[0] in _READ_ONLY:
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
        """Return the directory as it is now; NotFoundError from its listing if nothing lies there."""
        return FsspecStore(self.url, self._system, self._base)

    def list_infos(self) -> dict[str, Mapping[str, Any]]:
        """List the directory: what the store says of each object."""
        audit("list", self.path)
        try:
            with storage_errors("list", self.url):
                self._system.invalidate_cache()
                entries = self._system.ls(self._base, detail=True)
        except NotFoundError as error:
            if "bucket" in error.message:
                raise
            return {}
        found = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in entries}
        if set(found) == {self._base.rpartition("/")[2]} and entries[0].get("type") == "file":
            same = str(entries[0]["name"]).strip("/") == self._base.strip("/")
            if same:
                raise TargetExistsError("the target is an object, not a directory", path=self.path)
        return {name: info for name, info in found.items() if name}

    def version(self, name: str) -> str | None:
        """Return what tells an object from all others that had its name; None if there is none."""
        try:
            with storage_errors("look up", f"{self.url}/{name}"):
                self._system.invalidate_cache()
                return _version(self._system.info(f"{self._base}/{name}"))
        except NotFoundError:
            return None

    def create(self, name: str, data: bytes) -> None:
        """Put a small object, whose name must be free (TargetExistsError)."""
        audit("put", self.path_of(name))
        with _conditional("put", f"{self.url}/{name}"):
            self._system.pipe_file(f"{self._base}/{name}", data, mode="create")

    def open_new(self, name: str) -> Any:
        """Begin to upload an object, whose name must be free when it is closed."""
        audit("create", self.path_of(name))
        with _conditional("create", f"{self.url}/{name}"):
            return self._system.open(f"{self._base}/{name}", "xb", block_size=_PART_BYTES)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(NotFoundError), storage_errors("remove", f"{self.url}/{name}"):
            self._system.rm_file(f"{self._base}/{name}")

    # The claim

    def read_claim(self) -> tuple[Claim, str] | None:
        """Return the claim with its version, both of one moment; None if there is none."""
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
        """Return the claim's ETag, or what else tells its versions apart; None without a claim."""
        return self.version(CLAIM_NAME)

    def replace_claim(self, claim: Claim, seen: str, nonce: str) -> bool:
        """Put a claim in place of the one that had the version `seen` and was of `nonce`; False if it is another."""
        path = self.path_of(CLAIM_NAME)
        audit("renew" if claim.nonce == nonce else "take over", path)
        key = f"{self._base}/{CLAIM_NAME}"
        if not self._has_conditional_put:
            found = self.read_claim()
            if found is None or found[0].nonce != nonce or found[1] != seen:
                return False
            with storage_errors("put", path):
                self._system.pipe_file(key, claim.to_bytes(), mode="overwrite")
            return True
        try:
            with _conditional("put", path):
                self._system.pipe_file(key, claim.to_bytes(), mode="overwrite", IfMatch=seen)
        except (TargetExistsError, NotFoundError):  # another one has put it; the claim is gone
            return False
        return True


class _Without(Store):
    """A listing without some names, which are ours to remove."""

    def __init__(self, store: FsspecStore, hidden: set[str]) -> None:
        self.path = store.path
        self._store = store
        self._hidden = hidden

    def _list(self) -> dict[str, EntryKind]:
        return {name: kind for name, kind in self._store.listing.items() if name not in self._hidden}

    def open(self, name: str) -> StoredFile:
        return self._store.open(name)

    def below(self, name: str, *, private: bool = False) -> Store:
        return self._store.below(name, private=private)

    def is_current(self) -> bool:
        return self._store.is_current()

    def close(self) -> None:
        self._store.close()


def check_url(url: str, manifest: str, check: ReplaceCheck | None) -> None:
    """Check, without changing anything, whether a build at `url` would accept the target. Raises what it would
    raise."""
    objects = _Objects(url)
    found = objects.read_claim()
    if found is not None and found[0].owner.is_alive:
        raise busy_error(found[0].owner, objects.path)
    _list_target(objects, manifest, check, set(found[0].names) if found is not None else set())


def _list_target(
    objects: _Objects, manifest: str, check: ReplaceCheck | None, inherited: set[str]
) -> tuple[list[str], set[str]]:
    """Return the names of the old checkpoint in the order of their removal, and those that earlier claims left.

    Raises for anything else that lies there, and for a whole checkpoint that may not be replaced.
    """
    there = set(objects.list_infos()) - {CLAIM_NAME}
    old: list[str] = []
    if manifest in there or there - inherited:
        if check is None:
            raise target_exists(objects.path)
        old = [name for name in check(_Without(objects.store(), inherited | {CLAIM_NAME})) if name in there]
    return old, (there & inherited) - set(old)


class ObjectFile(OutputFile):
    """A file of an `ObjectBuild`, written from its begin to its end."""

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
            # Some stores show an object before it is whole.
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
        self._build.put_object(self.name, self._give_name, is_visible=self.is_visible)
        self._file = None

    def _give_name(self) -> None:
        audit("put", self.path)
        with _conditional("put", self.path):
            if not self._file.closed:
                self._file.close()
            else:  # s3fs keeps what it has uploaded when the name was taken
                self._file.commit()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # it is given up, whatever the store says
                file.discard()
            with contextlib.suppress(Exception):
                file.closed = True  # else its end would put what there is


class ObjectBuild(Build):
    """A checkpoint on its way into an object store; the protocol is at the top of this file."""

    renew_s = 15.0
    take_over_s = 60.0

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
        self._versions: dict[str, str | None] = {}  # None: it is being put, or whether it was is not known
        self._claim = Claim.new(new_nonce(), plan_digest, tuple(names))
        self._seen: str | None = None  # the claim's version while it is ours
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
        """Create the claim, or take it over from a dead publisher; return the names of what that one may have put."""
        watched: tuple[str, float] | None = None
        while True:
            with contextlib.suppress(TargetExistsError):
                audit("claim", self._objects.path_of(CLAIM_NAME))
                self._objects.create(CLAIM_NAME, self._claim.to_bytes())
            found = self._objects.read_claim()
            if found is None:
                continue  # it was removed meanwhile
            other, version = found
            if other.nonce == self._claim.nonce:
                self._seen, self._renewed = version, time.monotonic()
                return set(other.names) - set(self._claim.names) if other.renewal else set()
            if _runs(other):
                raise busy_error(other.owner, self.path)
            now = time.monotonic()
            if watched is not None and watched[0] != version:
                raise busy_error(other.owner, self.path)
            if watched is None:
                watched = (version, now)
            if resume or _is_dead(other) or now - watched[1] >= self.take_over_s:
                names = tuple({*self._claim.names, *other.names})
                taken = replace(self._claim, names=names)
                if self._objects.replace_claim(taken, version, other.nonce):
                    if self._read_own():
                        self._claim = taken
                        return set(other.names)
                    raise TargetExistsError("refused: another publisher has taken over", path=self.path)
                watched = None
                continue
            if now == watched[1]:
                _log.warning(
                    "%s: %s: waiting for %.0f s to see whether it still runs; resume=True (--resume) of a merge says "
                    "that it does not",
                    self.path,
                    other,
                    self.take_over_s,
                )
            time.sleep(min(1.0, self.take_over_s / 20))

    def _read_own(self) -> bool:
        """Whether the claim is ours now."""
        found = self._objects.read_claim()
        if found is None or found[0].nonce != self._claim.nonce:
            self._seen = None
            return False
        self._seen, self._renewed = found[1], time.monotonic()
        return True

    def renew(self, *, at_once: bool = False) -> None:
        """Renew the claim if it is time; TargetExistsError if another publisher has taken over. For several threads."""
        if not at_once and time.monotonic() - self._renewed < self.renew_s:
            return
        with self._lock:
            if not at_once and time.monotonic() - self._renewed < self.renew_s:
                return
            versions = {name: version for name, version in self._versions.items() if version is not None}
            self._claim = replace(self._claim, renewal=self._claim.renewal + 1, versions=versions)
            if self._seen is not None:
                self._objects.replace_claim(self._claim, self._seen, self._claim.nonce)
                # A request that was sent twice may report failure although it was done: the claim itself shows.
                if self._read_own():
                    return
            raise self._lost()

    def _clear(self, old: Sequence[str], leftovers: set[str]) -> None:
        """Un-commit and remove what is replaced, and what dead publishers left."""
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
        """Begin to upload an object; what has its name under our claim is another publisher's and is removed."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                self._versions[name] = None
            try:
                return self._objects.open_new(name)
            except TargetExistsError:
                self._drop(name)
        raise TargetExistsError("refused: another publisher puts this object again and again", path=self.path)

    def _drop(self, name: str) -> None:
        """Remove an object that is not ours under a name that is."""
        with self._lock:
            self._versions.pop(name, None)
        self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove an object just after a look at the claim: without it we are the one that was taken for dead."""
        audit("remove object", self._objects.path_of(name))
        with self._lock:
            self._check_claim()
            self._objects.remove(name)

    def _check_claim(self) -> None:
        with self._lock:
            if self._seen is None or self._objects.claim_version() != self._seen:
                raise self._lost()

    def _lost(self) -> TargetExistsError:
        self._seen = None
        return TargetExistsError(
            "refused: this publisher was silent for too long, and another one has taken over", path=self.path
        )

    def put_object(self, name: str, put: Callable[[], None], *, is_visible: bool = False) -> None:
        """Put an object, whose name must be free, and remember its version."""
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
        """Remove an object that was put after another publisher took over, unless it may be that publisher's.

        Who took over removes what it finds of ours until it puts its manifest; after that only its manifest shows
        which objects are its own.
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

    def record(self, name: str, info: Any) -> None:
        """Do nothing: what a killed publisher has put is removed, not taken over."""

    def make_probe(self) -> str:
        """Raise UnsupportedError: there is no path."""
        raise UnsupportedError("ranks write their parts in place, which object stores cannot do", path=self.path)

    # Ending

    def commit(self, name: str, data: Buffer) -> None:
        """Check that all objects are those that were put, put the last one, remove the claim."""
        assert name == self._manifest
        self.renew(at_once=True)
        there = self._objects.list_infos()
        for found, version in self._versions.items():
            now = _etag(there.get(found, {}))
            if found in there and not now:  # only ETags are the same in a listing and in a look at one object
                now = self._objects.version(found) or ""
            if now != version:
                raise TargetExistsError(
                    "refused: another publisher has replaced an object of this one",
                    path=self._objects.path_of(found),
                    expected=version,
                    found=now or "nothing",
                )
        for found in (there.keys() & set(self._claim.names)) - self._versions.keys():
            self._remove(found)  # a publisher that was taken for dead has put it meanwhile
        self.put(name, data)
        self._versions.clear()
        self._end()

    def abandon(self) -> None:
        """Remove what was put, unless it was committed or another publisher has taken over."""
        if self._has_ended or os.getpid() != self._pid:  # a forked child owns nothing
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
            self._seen = None  # and the claim, which says whose they are
        finally:
            self._end()

    def _end(self) -> None:
        """Remove the claim if it is ours."""
        try:
            if self._seen is not None:
                with contextlib.suppress(TargetExistsError):  # it is another publisher's by now
                    self._remove(CLAIM_NAME)
        except StateExchangeError as error:
            _log.warning("the claim of %s stays until the next publication: %s", self.path, error)
        finally:
            self._has_ended = True
            active_builds.discard(self._claim.nonce)


def _runs(claim: Claim) -> bool:
    return claim.owner.is_alive and not _is_dead(claim)


def _is_dead(claim: Claim) -> bool:
    """Whether the publisher has provably ended; in this process, whether its build has."""
    if claim.owner == Owner.current():
        return not active_builds.is_active(claim.nonce)
    return claim.owner.is_dead


def _etag(info: Mapping[str, Any]) -> str:
    return str(info.get("ETag") or info.get("etag") or "")


def _version(info: Mapping[str, Any]) -> str:
    """Return an object's ETag; else what else its store says of its version."""
    return _etag(info) or version_of_info(info) or ""
