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
check of step 5. The claim is checked just before each removal. S3 then removes an object only if it still has the ETag
that it had before that check, so a publisher that stalls in between removes no object of its successor, except one
with the same bytes, which has the same ETag. Other file systems have no conditional removal.

Members: other processes may put objects under the publisher's claim (`share`, `ObjectMember`), as the ranks of a save
do. While it waits for them the publisher renews its claim in a thread. A member checks the claim's nonce when it joins,
every 15 s, and after its put; if the claim is lost by then, it removes its own object. The publisher compares the
versions that the members have sent with its listing in step 5.

Removal: a build whose claim has the plan `REMOVAL`. It takes the claim, removes the manifest first and then the other
objects, and gives the claim up. A process remembers since when it has seen each claim unchanged, so that a job that
clears the remains of its saves repeatedly never has to wait for one.

Failure: a publisher that fails removes its objects only while it still holds the claim; otherwise its successor removes
them. A killed publisher leaves the claim and its objects, and the next publisher takes over in step 1; it also cancels
the uploads that a killed process has begun. A member that is killed between its put and its check, after its publisher
has failed, leaves an object that no claim lists: `is_own` recognises such objects by their content.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, NotFoundError, StateExchangeError, TargetExistsError
from statexchange.storage.atomic import new_nonce
from statexchange.storage.files import audit
from statexchange.storage.fsspec_store import storage_errors
from statexchange.storage.location import FilteredStore, read_json
from statexchange.storage.publish.build import (
    Build,
    Member,
    OutputFile,
    UnfinishedBuild,
    WrittenFile,
    busy_error,
    open_builds,
    owner_state,
    removed_error,
    target_exists,
)
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.storage.publish.objects import Objects, conditional, etag_of
from statexchange.storage.rank_writer import DigestedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from statexchange.storage.files import Buffer
    from statexchange.storage.publish.build import OwnCheck, ReplaceCheck
    from statexchange.storage.tensorfile import ShardData
__all__ = [
    "ObjectBuild",
    "ObjectFile",
    "ObjectMember",
    "check_url",
    "clear_objects",
    "remove_objects",
    "unfinished_objects",
]

_log = logging.getLogger(__name__)
REMOVAL = "removal"
_MOST_ABSENT = 100  # times that a claim could not be created and was not there
_ATTEMPTS = 5  # to put or remove an object whose name a publisher without the claim keeps creating


class ObjectFile(OutputFile):
    """A file that an `_ObjectWriter` uploads from begin to end."""

    is_sequential = True

    def __init__(self, writer: _ObjectWriter, objects: Objects, name: str, nbytes: int, header: bytes) -> None:
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


class _ObjectWriter(ABC):
    """Puts objects under a claim, as the publisher of a directory or as a member that helps it.

    It creates objects exclusively and checks the claim after each put, so that no object of a publisher that was taken
    for dead stays among those of its successor.

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
            # The manifest of a save lists its files by name and bytes, and more of those that do not train.
            listed = [*manifest["files"], *manifest.get("frozen", ())]
            return {entry if isinstance(entry, str) else str(entry[0]) for entry in listed}
        except (StateExchangeError, TypeError, KeyError, IndexError):
            return None


def check_url(url: str, manifest: str, check: ReplaceCheck | None) -> None:
    """Raise what a build at `url` would raise for the target, without changing anything."""
    objects = Objects(url)
    present = objects.read_claim()
    if present is not None and owner_state(present[0].owner, present[0].nonce) == "alive":
        raise busy_error(present[0].owner, objects.path)
    _list_target(objects, manifest, check, set(present[0].names) if present is not None else set())


def _list_target(
    objects: Objects,
    manifest: str,
    check: ReplaceCheck | None,
    inherited: set[str],
    is_own: OwnCheck | None = None,
) -> tuple[list[str], set[str]]:
    """Return the old checkpoint's names in the order of their removal, and the objects of earlier claims.

    `inherited` are the names that earlier claims list. Raises for any other object, and for a whole checkpoint that may
    not be replaced. Without a manifest, an object that `is_own` accepts counts as inherited, too.
    """
    present = set(objects.list_infos(inherited)) - {CLAIM_NAME}
    old: list[str] = []
    if is_own is not None and manifest not in present:
        store = objects.store()
        inherited = inherited | {name for name in present - inherited if is_own(store, name)}
    if manifest in present or present - inherited:
        if check is None:
            raise target_exists(objects.path)
        hidden = inherited | {CLAIM_NAME}
        visible = FilteredStore(objects.store(), lambda name: name not in hidden)
        listed = check(visible)
        present = set(objects.list_infos({*inherited, *listed})) - {CLAIM_NAME}
        old = [name for name in listed if name in present]
    return old, (present & inherited) - set(old)


_seen_claims: dict[str, tuple[str, str, float]] = {}
"""By directory, the nonce and the version of the last claim that this process has seen there, and since when it has
seen this version, by its monotonic clock."""


def _seen_since(path: str, nonce: str, version: str) -> float:
    """Return since when this process has seen the claim in the directory `path` unchanged."""
    # With the nonce, because a store may give no versions: then another publisher's claim would look like the last one.
    seen = _seen_claims.get(path)
    if seen is None or seen[:2] != (nonce, version):
        seen = _seen_claims[path] = (nonce, version, time.monotonic())
    return seen[2]


class ObjectBuild(_ObjectWriter, Build):
    """A checkpoint under construction in an object store. The top of this file explains the protocol."""

    renew_s = 15.0  # how often the claim is renewed
    take_over_s = 60.0  # how long a claim must be unchanged before it is taken over

    def __init__(
        self,
        url: str,
        plan_digest: str,
        names: Sequence[str],
        *,
        check: ReplaceCheck | None,
        resume: bool,
        is_own: OwnCheck | None = None,
        waits: bool = True,
    ) -> None:
        super().__init__(Objects(url), names[-1])
        self.path = self.building_path = self._objects.path
        self.finished = {}
        self._pid = os.getpid()
        self._outputs: list[ObjectFile] = []
        self._claim = Claim.new(new_nonce(), plan_digest, tuple(names))
        self._claim_version: str | None = None  # the claim's version while this publisher holds it
        self._renewed = 0.0
        self._renewal: _Renewal | None = None
        self._has_ended = self._is_clearing = False
        open_builds.add((self._pid, self._claim.nonce))
        try:
            inherited = self._take_claim(resume=resume, waits=waits)
            old, leftovers = _list_target(self._objects, self._manifest, check, inherited, is_own)
            self._clear(old, leftovers)
        except BaseException:
            self.abandon()
            raise

    # The claim

    def _take_claim(self, *, resume: bool, waits: bool) -> set[str]:
        """Create the claim, or take it over from a dead publisher; return the names that the dead one may have put.

        Without `waits`, raise TargetExistsError at once if it is unknown whether the other publisher has ended.
        """
        watched: str | None = None  # the version of another publisher's claim, while it is watched
        num_absent = 0
        while True:
            with contextlib.suppress(TargetExistsError):
                audit("claim", self._objects.path_of(CLAIM_NAME))
                self._objects.create(CLAIM_NAME, self._claim.to_bytes())
            present = self._objects.read_claim()
            if present is None:  # it was removed between the two calls
                num_absent += 1
                if num_absent == _MOST_ABSENT:
                    text = "no claim can be put here, and there is none: an object may be in the place of a directory"
                    raise TargetExistsError(text, path=self.path)
                continue
            num_absent = 0
            other, version = present
            if other.nonce == self._claim.nonce:
                self._claim_version, self._renewed = version, time.monotonic()
                return set(other.names) - set(self._claim.names) if other.renewal else set()
            state = owner_state(other.owner, other.nonce)
            if state == "alive":
                raise busy_error(other.owner, self.path)
            is_first_look = watched is None
            if watched not in (None, version):
                raise busy_error(other.owner, self.path)
            watched = version
            unchanged_s = time.monotonic() - _seen_since(self.path, other.nonce, version)
            if resume or state == "dead" or unchanged_s >= self.take_over_s:
                names = tuple({*self._claim.names, *other.names})
                own_claim = replace(self._claim, names=names)
                if self._objects.replace_claim(own_claim, version, other.nonce):
                    if self._read_own():
                        self._claim = own_claim
                        self._objects.cancel_uploads(own_claim.names)  # those of the dead publisher
                        return set(other.names)
                    raise TargetExistsError("refused: another publisher has taken over", path=self.path)
                watched = None
                continue
            if not waits:
                raise busy_error(other.owner, self.path)
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
            self._claim = replace(self._claim, renewal=self._claim.renewal + 1)
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
        self._is_clearing = True
        # The manifest first, also that of a publisher which was killed before it removed its claim
        for name in sorted([*old, *sorted(leftovers)], key=lambda name: name != self._manifest):
            self.renew()
            self._remove(name)
        self._is_clearing = False

    # Objects

    def create(self, name: str, nbytes: int, header: bytes) -> ObjectFile:
        """Return an output file, which is uploaded while it is written."""
        output = ObjectFile(self, self._objects, name, nbytes, header)
        self._outputs.append(output)
        return output

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

    def put(self, name: str, data: Buffer) -> None:
        """Put a small object."""
        self.put_object(name, lambda: self._objects.create(name, bytes(data)))

    def record(self, name: str, metadata: object) -> None:
        """Do nothing: objects of a killed publisher are removed, not reused."""

    def share(self) -> str:
        """Renew the claim in a thread from now on, and return its nonce."""
        if self._renewal is None:
            self._renewal = _Renewal(self)
        return self._claim.nonce

    def expect(self, names: Sequence[str]) -> None:
        """Add names to the claim."""
        with self._lock:
            new = [name for name in names if name not in self._claim.names]
            if new:
                self._claim = replace(self._claim, names=(*self._claim.names, *new))
                self.renew(at_once=True)

    def add_all(self, versions: Mapping[str, str]) -> None:
        """Store the versions of objects that members have put."""
        infos = self._objects.list_infos()
        for name in versions:
            if name not in infos:
                raise NotFoundError("this host does not see the object", path=self._objects.path_of(name))
        with self._lock:
            self._versions.update(versions)

    # Ending

    def commit(self, name: str, data: Buffer) -> None:
        """Check that all objects are unchanged, put the last one, and remove the claim."""
        assert name == self._manifest
        self.renew(at_once=True)  # proves that this publisher still holds the claim
        infos = self._objects.list_infos(self._claim.names)
        for put_name, version in self._versions.items():
            current = etag_of(infos.get(put_name, {}))
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
        self._stop_renewal()
        try:
            if self._read_own():
                if self._is_clearing:
                    _log.warning("objects of %s stay until the next publication or removal", self.path)
                    self._claim_version = None  # so that `_end` keeps the claim, which lists these objects
                self._remove_shared()
                for name in sorted(self._versions, key=lambda name: name != self._manifest):
                    version = self._objects.version(name)
                    if version is not None and self._versions[name] in (None, version):
                        self._remove(name)
        except StateExchangeError as error:
            if self._claim_version is not None:
                _log.warning("objects of %s stay until the next publication: %s", self.path, error)
            self._claim_version = None  # so that `_end` keeps the claim, which lists these objects
        finally:
            self._end()

    def _remove_shared(self) -> None:
        """Remove what members have put so far. A member that puts an object later removes it itself."""
        if self._renewal is None:
            return
        for name in sorted(self._objects.list_infos().keys() & set(self._claim.names)):
            self._remove(name)
        self._objects.cancel_uploads(self._claim.names)  # those of members that were killed

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.stop()

    def _end(self) -> None:
        """Remove the claim if this publisher holds it."""
        self._stop_renewal()
        try:
            if self._claim_version is not None:
                with contextlib.suppress(TargetExistsError):  # another publisher has taken it over
                    self._remove(CLAIM_NAME)
        except StateExchangeError as error:
            _log.warning("the claim of %s stays until the next publication: %s", self.path, error)
        finally:
            self._has_ended = True
            open_builds.discard((self._pid, self._claim.nonce))


class _Renewal:
    """A thread that renews a claim while the publisher waits for members."""

    def __init__(self, build: ObjectBuild) -> None:
        self._build = build
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statexchange renewal of a claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped.wait(self._build.renew_s / 3):
            try:
                self._build.renew()
            except TargetExistsError:  # the claim is lost: the next call of the publisher finds that out
                return
            except StateExchangeError as error:
                _log.debug("the claim of %s was not renewed: %s", self._build.path, error)

    def stop(self) -> None:
        """End the thread; wait until it makes no request any more."""
        self._is_stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


class ObjectMember(_ObjectWriter, Member):
    """Puts objects for a publisher whose claim has the nonce `key`.

    Raises:
        NotFoundError: there is no such claim.
    """

    def __init__(self, url: str, key: str, manifest: str) -> None:
        super().__init__(Objects(url), manifest)
        self.folder = self._objects.path
        self._key = key
        self._checked = time.monotonic()
        if self._objects.claim_nonce() != key:
            raise NotFoundError("this host does not see the publisher's claim", path=self.folder)

    def renew(self) -> None:
        """Check the claim every 15 s; its publisher renews it."""
        if time.monotonic() - self._checked >= ObjectBuild.renew_s:
            self._check_claim()

    def _check_claim(self) -> None:
        if self._objects.claim_nonce() != self._key:
            text = "refused: the save was given up, or another publisher has taken over"
            raise TargetExistsError(text, path=self.folder)
        self._checked = time.monotonic()

    def write_tensors(
        self, name: str, shards: Sequence[ShardData], metadata: Mapping[str, Any], progress: Callable[[], object]
    ) -> WrittenFile:
        """Upload one file from begin to end, which needs its digests before: the tensors are read twice."""
        content = DigestedTensors.of(shards, metadata, progress)
        version = self._uploaded(name, content.nbytes, content.header, content.write_to)
        return WrittenFile(version, self.folder, content)

    def upload(self, name: str, parts: Iterable[Buffer], nbytes: int) -> str:
        """Upload a file of `nbytes` bytes from begin to end; return its version."""

        def write_to(write_at: Callable[[Buffer, int], object]) -> None:
            at = 0
            for part in parts:
                write_at(part, at)
                at += memoryview(part).nbytes

        return self._uploaded(name, nbytes, b"", write_to)

    def _uploaded(
        self, name: str, nbytes: int, header: bytes, write_to: Callable[[Callable[[Buffer, int], object]], object]
    ) -> str:
        """Upload a file, of which `write_to` writes all after the header; return its version."""
        output = ObjectFile(self, self._objects, name, nbytes, header)
        try:
            write_to(output.write)
            output.finish()
        finally:
            output.close()
        return self._version_of(name)

    def link(self, name: str, source: str, identity: Sequence[str | int], progress: Callable[[], object]) -> str | None:
        """Have the store copy an object of this size and version; return the new version.

        None if the store makes no such copy, as of a small object, or if another object is at the URL `source`.
        """
        nbytes, version = int(identity[0]), str(identity[1])
        original = self._objects.original(source, version, nbytes)
        if original is None:
            return None
        self.put_object(name, lambda: self._objects.copy_new(name, original, version, nbytes, progress))
        # Not every S3-compatible store compares the version of what it copies.
        if self._objects.original(source, version, nbytes) is None:
            self._drop(name)
            return None
        return self._version_of(name)

    def _version_of(self, name: str) -> str:
        version = self._versions[name]
        assert version is not None  # it was put
        return version


def unfinished_objects(url: str, manifest: str) -> UnfinishedBuild | None:
    """Return what a publisher or removal has left, or is building, in the directory `url`; None if there is nothing.

    Not collective. With a manifest the directory is whole, even if there is still a claim.
    """
    objects = Objects(url)
    infos = objects.list_infos()
    if CLAIM_NAME not in infos or manifest in infos:
        return None
    nbytes = sum(int(info.get("size") or 0) for name, info in infos.items() if name != CLAIM_NAME)
    paths = (objects.path,)
    try:
        present = objects.read_claim()
    except StateExchangeError:  # it is broken, or renewed again and again
        return UnfinishedBuild("", paths, False, None, "unknown", nbytes)
    if present is None:
        return None
    claim, _ = present
    is_removal = claim.plan == REMOVAL
    state = owner_state(claim.owner, claim.nonce)
    return UnfinishedBuild(claim.nonce, paths, is_removal, claim.owner, state, nbytes)


def clear_objects(url: str, manifest: str, is_own: OwnCheck | None, *, waits: bool) -> str | None:
    """Remove what a dead publisher or removal has left in the directory `url`; return the nonce of its claim.

    Not collective. None if there is nothing, or if its process may still run. Of a directory with a manifest only the
    claim is removed.

    Args:
        url: the directory.
        manifest: the name of the object that commits it.
        is_own: as for `publish.open_build`.
        waits: watch the claim for 60 s, unless its process runs on this host or has provably ended. Without it only a
            claim that this process has seen unchanged for 60 s counts as a dead process's.
    """
    objects = Objects(url)
    if CLAIM_NAME not in objects.list_infos():
        return None
    try:
        present = objects.read_claim()
    except CorruptError as error:  # no reason to fail for other directories
        _log.warning("the remains of a killed save or removal are not removed: %s", error)
        return None
    except TargetExistsError:  # it is renewed again and again
        return None
    if present is None:
        return None
    try:
        ObjectBuild(url, REMOVAL, [manifest], check=None, resume=False, is_own=is_own, waits=waits).abandon()
    except TargetExistsError:  # its process runs, or the directory is whole: then only the claim was removed
        return None
    return present[0].nonce


def remove_objects(url: str, manifest: str, check: ReplaceCheck, *, waits: bool) -> None:
    """Remove a published directory, its manifest first.

    Not collective. With `waits` it watches another host's claim for 60 s, to see whether that process still runs.

    Raises:
        NotFoundError: there is no manifest.
        UnsafeError: it has other objects.
        TargetExistsError: another process is publishing or removing it.
    """
    objects = Objects(url)
    if manifest not in objects.list_infos():
        raise NotFoundError("no such path", path=objects.path)
    ObjectBuild(url, REMOVAL, [manifest], check=check, resume=False, waits=waits).abandon()
