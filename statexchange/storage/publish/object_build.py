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
4. Check the claim, then create an object, exclusively. So a publisher that goes on after its claim was taken over can
   never replace an object of its successor. If it created a name first, the successor removes that object and puts its
   own again.
5. Renew the claim, list the directory, compare each object's version with what was put, create the manifest
   exclusively, check once more that the claim is still held, and remove the claim last.

The claim is held as long as its content has the publisher's nonce. No two contents of a claim are equal, as each
renewal counts up: a claim with the same content has not been renewed.

Renewal: every 15 s, in the calls that write, by a put that is conditional on the ETag of the claim that was read (S3).
fsspec file systems other than s3fs have no conditional put; there the claim is compared and then put. Two publishers
that take over one claim at the same moment may then both treat it as their own, until one of them puts its next object
or makes the final check of step 5. The claim is checked just before each removal. S3 then removes an object only if it
still has the ETag that it had before that check, so a publisher that stalls in between removes no object of its
successor, except one with the same bytes, which has the same ETag. Other file systems have no conditional removal.

Members: other processes may put objects under the publisher's claim (`share`, `ObjectMember`), as the ranks of a save
do. While it waits for them the publisher renews its claim in a thread. A member checks the claim when it joins, every
15 s, before its put and after it; if the claim is lost by then, it removes its own object. The publisher compares the
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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from statexchange.errors import CorruptError, NotFoundError, StateExchangeError, TargetExistsError
from statexchange.storage.atomic import new_nonce
from statexchange.storage.files import audit
from statexchange.storage.fsspec_store import storage_errors, tags_of_info
from statexchange.storage.location import read_json
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
from statexchange.storage.publish.objects import Objects, conditional
from statexchange.storage.rank_writer import DigestedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from statexchange.storage.files import Buffer
    from statexchange.storage.publish.build import OwnCheck, ReplaceCheck
    from statexchange.storage.tensorfile import ShardData
_log = logging.getLogger(__name__)
REMOVAL = "removal"
_Stage: TypeAlias = Literal["unclaimed", "claimed", "clearing", "building"]
"""How far a build is. Its end removes nothing; the claim; nothing, as the claim lists what is left; or all objects."""
# Times that a claim could not be created and was not there: other publishers' claims come and go, but not so often.
_MOST_ABSENT = 100
_ATTEMPTS = 5  # to remove an object whose name a publisher without the claim keeps creating


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

    def _open(self) -> None:
        """Begin the upload, unless it has begun."""
        if self._file is None:
            self._file = self._writer.open_new(self.name, self._nbytes)
            self._write(self.header)

    def write(self, data: Buffer, at: int) -> None:
        """Upload the next bytes; the upload begins at the first call."""
        self._open()
        assert at == self._at, (at, self._at)
        # A large file may take longer than the claim may go unchanged.
        self._writer.renew()
        self._write(data)

    def _write(self, data: Buffer) -> None:
        with storage_errors("write", self.path):
            self._file.write(data)
        self._at += memoryview(data).nbytes

    def finish(self, *, writes_header: bool = True) -> None:
        """Complete the upload: only now the object exists."""
        assert writes_header
        self._open()
        self._writer.put_object(self.name, self._complete_upload)
        self._file = None

    def _complete_upload(self) -> None:
        audit("put", self.path)
        with conditional("put", self.path):
            if not self._file.closed:
                self._file.close()
            else:
                # A second attempt: s3fs has kept the uploaded parts when the name existed.
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

    It creates objects exclusively and checks the claim before and after each put, so that no object of a publisher that
    was taken for dead stays among those of its successor.

    Args:
        objects: the directory.
        manifest: the name of the object that commits it.
        nonce: that of the claim.
    """

    renew_s = 15.0  # how often the claim is renewed, or checked by a member

    def __init__(self, objects: Objects, manifest: str, nonce: str) -> None:
        self._objects = objects
        self._manifest = manifest
        self._nonce = nonce
        self._lock = threading.RLock()
        self._renewed = time.monotonic()
        self._versions: dict[str, str] = {}  # of the objects that were put, by name

    def renew(self) -> None:
        """Renew or check the claim every `renew_s`; raise TargetExistsError if it is lost. Thread-safe."""
        with self._lock:
            if time.monotonic() - self._renewed >= self.renew_s:
                self._renew_claim()

    @abstractmethod
    def _renew_claim(self) -> None:
        """Renew or check the claim now."""

    def _check_claim(self) -> Claim:
        """Return the claim; raise TargetExistsError if another publisher has taken over, or the build has ended."""
        with self._lock:
            claim = self._objects.read_claim()
            if claim is None or claim.nonce != self._nonce:
                text = "refused: another publisher has taken over the claim on this target, or it was given up"
                raise TargetExistsError(text, path=self._objects.path)
            return claim

    def open_new(self, name: str, nbytes: int) -> Any:
        """Begin to upload an object; first remove any object that an earlier publisher has put under this name."""
        try:
            return self._objects.open_new(name, nbytes)
        except TargetExistsError:
            self._remove(name)
            return self._objects.open_new(name, nbytes)

    def put_object(self, name: str, put: Callable[[], None]) -> None:
        """Put an object under a free name and store its version."""
        self.renew()
        # Not every store completes an upload exclusively, and no object of a successor may be replaced.
        self._check_claim()
        try:
            put()
        except TargetExistsError:
            # A publisher that has lost the claim has put an object under this name.
            self._remove(name)
            put()
        # The version before the second check: if the claim is still held then, this is the version that was put.
        version = self._objects.version(name)
        try:
            self._check_claim()
        except TargetExistsError:  # its new owner may have removed the object already
            if version is not None:
                self._remove_stray(name, version)
            raise
        if version is None:
            raise removed_error(self._objects.path_of(name))
        with self._lock:
            self._versions[name] = version

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
        text = "refused: another publisher puts this object again and again"
        raise TargetExistsError(text, path=self._objects.path_of(name))

    def _remove_stray(self, name: str, version: str) -> None:
        """Remove an object that was put after the claim was lost, unless it may be the next publisher's.

        While another publisher has the claim, it removes what it finds of this one. Afterwards its manifest lists its
        own objects. Without claim and manifest the publisher has given up before it could know of this object.
        """
        listed = self._listed_names()
        is_stray = name not in listed if listed is not None else self._objects.read_claim() is None
        # Never a manifest, which the next publisher puts under the same name, and often with the same bytes.
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
    inherited: frozenset[str] = frozenset()
    if present is not None:
        if owner_state(present.owner, present.nonce) == "alive":
            raise busy_error(present.owner, objects.path)
        inherited = present.names
    _list_target(objects, manifest, check, inherited)


def _list_target(
    objects: Objects,
    manifest: str,
    check: ReplaceCheck | None,
    inherited: frozenset[str],
    is_own: OwnCheck | None = None,
) -> tuple[list[str], set[str]]:
    """Return the old checkpoint's names in the order of their removal, and the objects of earlier claims.

    `inherited` are the names that earlier claims list. Raises for any other object, and for a whole checkpoint that may
    not be replaced. Without a manifest, an object that `is_own` accepts counts as inherited, too.
    """
    store = objects.store()
    present = objects.list_infos().keys() - {CLAIM_NAME}
    old: list[str] = []
    if is_own is not None and manifest not in present:
        inherited = inherited.union(name for name in present - inherited if is_own(store, name))
    if manifest in present or present - inherited:
        if check is None:
            raise target_exists(objects.path)
        # What a killed publisher has put is no unlisted file of the old checkpoint.
        hidden = inherited | {CLAIM_NAME}
        listed = check(store.only(lambda name: name not in hidden))
        old = [name for name in listed if name in present]
    return old, (present & inherited) - set(old)


_seen_claims: dict[str, tuple[Claim, float]] = {}
"""By directory the last claim that this process has seen there, and since when, by its monotonic clock."""


def _unchanged_s(path: str, claim: Claim) -> float:
    """Return for how long this process has seen the claim in the directory `path` unchanged."""
    seen = _seen_claims.get(path)
    if seen is None or seen[0] != claim:
        seen = _seen_claims[path] = (claim, time.monotonic())
    return time.monotonic() - seen[1]


class ObjectBuild(_ObjectWriter, Build):
    """A checkpoint under construction in an object store. The top of this file explains the protocol."""

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
        self._claim = Claim.new(new_nonce(), plan_digest, names)
        super().__init__(Objects(url), names[-1], self._claim.nonce)
        self.path = self.building_path = self._objects.path
        self.finished = {}
        self._pid = os.getpid()
        self._outputs: list[ObjectFile] = []
        self._has_ended = False
        self._renewal: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._stage: _Stage = "unclaimed"
        open_builds.add((self._pid, self._nonce))
        try:
            inherited = self._take_claim(resume=resume, waits=waits)
            self._stage = "claimed"
            old, leftovers = _list_target(self._objects, self._manifest, check, inherited, is_own)
            self._clear(old, leftovers)
        except BaseException:
            self.abandon()
            raise

    # The claim

    def _take_claim(self, *, resume: bool, waits: bool) -> frozenset[str]:
        """Create the claim, or take it over from a dead publisher; return the names that the dead one may have put.

        Without `waits`, raise TargetExistsError at once if it is unknown whether the other publisher has ended.
        """
        inherited: frozenset[str] = frozenset()
        watched: Claim | None = None
        num_absent = 0
        while num_absent < _MOST_ABSENT:
            with contextlib.suppress(TargetExistsError):
                audit("claim", self._objects.path_of(CLAIM_NAME))
                self._objects.put(CLAIM_NAME, self._claim.to_bytes())
            # Read even if it was put: only the content tells whose claim stands, as a store without exclusive puts may
            # have let two publishers put one.
            present = self._objects.read_claim()
            if present is None:  # it was removed between the two calls
                num_absent += 1
                continue
            if present.nonce == self._nonce:
                self._objects.cancel_uploads(inherited)  # those of the dead publisher
                self._renewed = time.monotonic()
                return inherited
            state = owner_state(present.owner, present.nonce)
            # One that has changed while it was watched was renewed, or is another publisher's that began meanwhile.
            if state == "alive" or watched not in (None, present):
                raise busy_error(present.owner, self.path)
            if resume or state == "dead" or _unchanged_s(self.path, present) >= self.take_over_s:
                inherited, watched = present.names, None
                self._claim = replace(self._claim, names=self._claim.names | inherited)
                # Whatever the answer: a retried request may report failure although the first one succeeded.
                self._objects.replace_claim(self._claim, present)
                continue
            if not waits:
                raise busy_error(present.owner, self.path)
            if watched is None:
                _log.warning(
                    "%s: %s: waiting for %.0f s to see whether it still runs; if it has ended, resume=True (--resume) "
                    "of a merge skips the wait",
                    self.path,
                    present,
                    self.take_over_s,
                )
            watched = present
            time.sleep(min(1.0, self.take_over_s / 20))
        text = "no claim can be put here, and there is none: an object may be in the place of a directory"
        raise TargetExistsError(text, path=self.path)

    def _renew_claim(self, names: Iterable[str] = ()) -> None:
        """Renew the claim now, and add names to it."""
        with self._lock:
            present = self._check_claim()
            self._claim = replace(self._claim, names=self._claim.names.union(names), renewal=self._claim.renewal + 1)
            # Whatever the answer: a retried request may report failure although the first one succeeded.
            self._objects.replace_claim(self._claim, present)
            self._check_claim()
            self._renewed = time.monotonic()

    def _clear(self, old: Sequence[str], leftovers: set[str]) -> None:
        """Remove the checkpoint that is replaced, its manifest first, and the objects of dead publishers."""
        # In the claim before the first removal: if this publisher is killed, too, nothing else says without a manifest
        # that they may be removed.
        if not self._claim.names.issuperset({*old, *leftovers}):
            self._renew_claim({*old, *leftovers})
        self._stage = "clearing"
        # The manifest first, also that of a publisher which was killed before it removed its claim.
        for name in sorted([*old, *sorted(leftovers)], key=lambda name: name != self._manifest):
            self.renew()
            self._remove(name)
        self._stage = "building"

    # Objects

    def create(self, name: str, nbytes: int, header: bytes) -> ObjectFile:
        """Return an output file, which is uploaded while it is written."""
        output = ObjectFile(self, self._objects, name, nbytes, header)
        self._outputs.append(output)
        return output

    def put(self, name: str, data: Buffer) -> None:
        """Put a small object."""
        self.put_object(name, lambda: self._objects.put(name, bytes(data)))

    def record(self, name: str, metadata: object) -> None:
        """Do nothing: objects of a killed publisher are removed, not reused."""

    def share(self) -> str:
        """Renew the claim in a thread from now on, and return its nonce."""
        if self._renewal is None:
            name = "statexchange renewal of a claim"
            self._renewal = threading.Thread(target=self._renew_until_end, name=name, daemon=True)
            self._renewal.start()
        return self._nonce

    def _renew_until_end(self) -> None:
        while not self._is_ending.wait(self.renew_s / 3):
            try:
                self.renew()
            except TargetExistsError:  # the claim is lost: the next call of the publisher finds that out
                return
            except StateExchangeError as error:
                _log.debug("the claim of %s was not renewed: %s", self.path, error)

    def expect(self, names: Sequence[str]) -> None:
        """Add names to the claim."""
        self._renew_claim(names)

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
        self._renew_claim()  # proves that this publisher still holds the claim
        infos = self._objects.list_infos()
        # A publisher that has lost the claim, and goes on, may have replaced one of them.
        for put_name, version in self._versions.items():
            # Without a tag, the listing may give the time in another form than the look at one object.
            current = tags_of_info(infos.get(put_name, {})) or self._objects.version(put_name)
            if current != version:
                raise TargetExistsError(
                    "refused: another publisher has replaced an object of this one",
                    path=self._objects.path_of(put_name),
                    expected=version,
                    found=current or "nothing",
                )
        # Put meanwhile by a publisher that has lost the claim.
        for stray in (infos.keys() & self._claim.names) - self._versions.keys():
            self._remove(stray)
        # This commits: from here on readers accept the directory. So only the claim is removed, and last.
        self.put(name, data)
        self._stage = "claimed"
        self._end()

    def abandon(self) -> None:
        """Remove all objects of an uncommitted build, unless another publisher has taken over."""
        if self._has_ended or os.getpid() != self._pid:  # a forked child must not remove its parent's objects
            return
        for output in self._outputs:
            output.close()
        self._end()

    def _end(self) -> None:
        """Remove the objects of an uncommitted build, then the claim, if this publisher still holds it."""
        self._is_ending.set()
        # A renewal that is under way could put the claim again after its removal.
        if self._renewal is not None:
            self._renewal.join()
        try:
            self._check_claim()
            if self._stage == "clearing":  # the claim stays: it lists what is left
                _log.warning("objects of %s stay until the next publication or removal", self.path)
                return
            if self._stage == "building":
                self._remove_put()
            self._remove(CLAIM_NAME)
        except TargetExistsError:  # another publisher has the claim, and removes what it finds
            pass
        except StateExchangeError as error:
            if self._stage != "unclaimed":
                _log.warning("the claim or objects of %s stay until the next publication: %s", self.path, error)
        finally:
            self._has_ended = True
            open_builds.discard((self._pid, self._nonce))

    def _remove_put(self) -> None:
        """Remove what this publisher and its members have put. A member that puts an object later removes it itself."""
        present = self._objects.list_infos().keys() & self._claim.names
        for name in sorted(present, key=lambda name: (name != self._manifest, name)):
            self._remove(name)
        self._objects.cancel_uploads(self._claim.names)  # those of members that were killed


class ObjectMember(_ObjectWriter, Member):
    """Puts objects for a publisher whose claim has the nonce `key`.

    Raises:
        NotFoundError: there is no such claim.
    """

    def __init__(self, url: str, key: str, manifest: str) -> None:
        super().__init__(Objects(url), manifest, key)
        self.folder = self._objects.path
        try:
            self._check_claim()
        except TargetExistsError:
            raise NotFoundError("this host does not see the publisher's claim", path=self.folder) from None

    def _renew_claim(self) -> None:
        """Check the claim, which its publisher renews."""
        self._check_claim()
        self._renewed = time.monotonic()

    def write_tensors(
        self, name: str, shards: Sequence[ShardData], metadata: Mapping[str, Any], progress: Callable[[], object]
    ) -> WrittenFile:
        """Upload one file from begin to end, which needs its digests before: the tensors are read twice."""
        content = DigestedTensors.of(shards, metadata, progress)
        with self._new_file(name, content.nbytes, content.header) as output:
            content.write_to(output.write)
        return WrittenFile(self._versions[name], self.folder, content)

    def upload(self, name: str, parts: Iterable[Buffer], nbytes: int) -> str:
        """Upload a file of `nbytes` bytes from begin to end; return its version."""
        with self._new_file(name, nbytes, b"") as output:
            at = 0
            for part in parts:
                output.write(part, at)
                at += memoryview(part).nbytes
        return self._versions[name]

    @contextlib.contextmanager
    def _new_file(self, name: str, nbytes: int, header: bytes) -> Iterator[ObjectFile]:
        """Yield a file to be written after its header, which exists after the block."""
        output = ObjectFile(self, self._objects, name, nbytes, header)
        try:
            yield output
            output.finish()
        finally:
            output.close()

    def link(self, name: str, source: str, identity: Sequence[str | int], progress: Callable[[], object]) -> str | None:
        """Have the store copy an object of this size and version; return the new version.

        None if the store makes no such copy, as of a small object, or if another object is at the URL `source`.
        """
        nbytes, version = int(identity[0]), str(identity[1])
        original = self._objects.original(source, version, nbytes)
        if original is None:
            return None
        self.put_object(name, lambda: self._objects.copy_new(name, original, version, nbytes, progress))
        # Looked up again: not every S3-compatible store compares the version of what it copies.
        if self._objects.original(source, version, nbytes) is None:
            self._remove(name)
            return None
        return self._versions[name]


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
    except CorruptError:
        return UnfinishedBuild("", paths, False, None, "unknown", nbytes)
    if present is None:
        return None
    is_removal = present.plan == REMOVAL
    state = owner_state(present.owner, present.nonce)
    return UnfinishedBuild(present.nonce, paths, is_removal, present.owner, state, nbytes)


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
    if present is None:
        return None
    try:
        ObjectBuild(url, REMOVAL, [manifest], check=None, resume=False, is_own=is_own, waits=waits).abandon()
    except TargetExistsError:  # its process runs, or the directory is whole: then only the claim was removed
        return None
    return present.nonce


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
