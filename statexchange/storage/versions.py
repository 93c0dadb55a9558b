"""A directory of versions of weights: its runs, their versions, the leases of readers, and the removal of old versions.

::

    runs/000002-<run id>        one for each start of the trainer; the greatest is the current run
    runs/clock                  in an object store: put to learn the store's time
    <run id>/latest             "<run id>/weight_v000012", for readers of others; ours never read it
    <run id>/weight_v000012/    a version, published whole as any checkpoint
    <run id>/.leases/           who reads which version, and which versions are about to be removed

**Leases.** A reader (1) writes ``.leases/<nonce>.json`` with the number of a version, (2) looks whether the version is
marked as retired. It writes the file again and again while it reads; a lease that is older than `LEASE_S` is one of a
reader that has ended. A reader that may not write here has no lease: `keep` alone protects what it reads.

**Removal.** The trainer (1) writes the mark ``.leases/retired-000007``, (2) lets `GRACE_S` pass, as a client of NFS may
see an old listing for so long, (3) looks for leases. So either the reader sees the mark, and takes another version, or
the trainer sees the lease, and the version stays until it ends. Then the directory is removed, and the mark after it.
Nothing waits: each publish goes on with what earlier ones, or those of an earlier run, have retired.

All ages are by the clock of the file server: the time of a file that was written just now, less that of the file.

In an object store runs, leases and marks are objects. A version has its final name while it is published or removed:
a claim and no manifest say that it is not whole (storage/publish/object_build.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
)
from statexchange.storage import publish
from statexchange.storage.atomic import new_nonce
from statexchange.storage.location import directory_of, open_path, parse_json, resolve_path
from statexchange.storage.numbered_names import NumberedNames
from statexchange.storage.records import Records, names_in, records_at
from statexchange.storage.store import Budget

if TYPE_CHECKING:
    from statexchange.storage.publish.build import ReplaceCheck
    from statexchange.storage.store import Store

GRACE_S = 60.0  # the longest time for which an NFS client of default options answers from its cache (acdirmax)
LEASE_S = 300.0
_RENEW_S = 60.0
_RUNS, _LEASES, _LATEST = "runs", ".leases", "latest"
_RUN = re.compile(r"([0-9]{6,12})-([0-9a-f]{16})")
VERSION_PREFIX = "weight_v"
_VERSIONS = NumberedNames(VERSION_PREFIX, 6, 12)
version_name = _VERSIONS.name
"""Return the name of a version's directory."""
version_number = _VERSIONS.number
"""Return the number of a version's directory; None for any other name."""
_MARKS = NumberedNames("retired-", 6, 12)
_LEASE = re.compile(r"[0-9a-f]{16}\.json")
_ANY_VERSION = 10**12
_log = logging.getLogger(__name__)


def version_path(path: str, run: str, number: int) -> str:
    """Return the path of a version; the one run of another program's directory is "", and lies in it."""
    return "/".join(filter(None, (path, run, version_name(number))))


def versions_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path or the URL of a directory of versions that a caller gave, which need not exist.

    Raises:
        InvalidArgumentError: it is a file or a version.
    """
    folder = directory_of(resolve_path(path, "a directory of versions"))
    if os.path.isfile(folder):
        raise InvalidArgumentError("a directory of versions is expected, and this is a file", path=folder)
    if version_number(os.path.basename(folder)) is not None:
        raise InvalidArgumentError("this is a version: give the directory of versions", path=folder)
    return folder


def _runs(path: str) -> dict[str, str]:
    """Return the names of the records of the runs by the ids of the runs, the current one last."""
    runs = []
    for name in names_in(f"{path}/{_RUNS}"):
        match = _RUN.fullmatch(name)
        if match is not None:
            runs.append((int(match[1]), match[2], name))
    return {run: name for _, run, name in sorted(runs)}


def list_runs(path: str) -> list[str]:
    """Return the ids of the runs in a directory of versions, the current one last. Not collective."""
    return list(_runs(path))


def current_run(path: str) -> str | None:
    """Return the id of the run that began last; None before the first. Not collective."""
    runs = list_runs(path)
    return runs[-1] if runs else None


def begin_run(path: str) -> str:
    """Begin a run, and return its id. Root only.

    Of two trainers that begin at once the run with the greater name wins, and `check_is_current` raises in the other.
    """
    run = new_nonce()
    # Before its record: who sees the run may put a lease into it at once.
    for below in (_RUNS, run, f"{run}/{_LEASES}"):
        records_at(f"{path}/{below}").make()
    last = max((int(name.partition("-")[0]) for name in _runs(path).values()), default=0)
    records_at(f"{path}/{_RUNS}").write(f"{last + 1:06d}-{run}")
    return run


def check_is_current(path: str, run: str) -> None:
    """Raise TargetExistsError if another run has begun after this one, NotFoundError if there is none. Root only."""
    current = current_run(path)
    if current is None:
        text = "the directory of versions was removed under this trainer: go on with a new Publisher"
        raise NotFoundError(text, path=path)
    if current != run:
        text = f"another trainer has begun run {current} here after this run {run}: give each trainer a directory"
        raise TargetExistsError(text, path=path)


def list_versions(path: str, run: str) -> list[int]:
    """Return the numbers of the versions of a run that are not retired, oldest first. Not collective."""
    numbers = _VERSIONS.numbers(names_in(f"{path}/{run}"))
    if numbers:
        retired = set(retired_versions(f"{path}/{run}"))
        numbers = [number for number in numbers if number not in retired]
    return numbers


def all_versions(path: str) -> dict[str, list[int]]:
    """Return the numbers of all versions of each run, retired ones too; the current run is last. Not collective.

    A directory of another program has one run, "". {} for anything else.
    """
    path = directory_of(path)
    names = names_in(path)
    of_runs = {}
    if _RUNS in names:
        for run in list_runs(path):
            of_runs[run] = _VERSIONS.numbers(names_in(f"{path}/{run}"))
    numbers = _VERSIONS.numbers(names)
    if not of_runs and numbers:
        of_runs[""] = numbers
    return of_runs


def holds_versions(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory of versions, ours or another program's. Not collective."""
    return any(all_versions(resolve_path(path, "a directory of versions")).values())


def set_latest(path: str, run: str, number: int) -> None:
    """Let ``latest`` name a version. Root only; after the version has been published."""
    records_at(f"{path}/{run}").write(_LATEST, f"{run}/{version_name(number)}".encode())


# Leases and removal


def retired_versions(folder: str) -> list[int]:
    """Return the numbers of the versions of a run that have a mark as retired. Not collective."""
    return _MARKS.numbers(names_in(f"{folder}/{_LEASES}"))


class Lease:
    """A reader's lease of a version, which keeps the version from being removed until `end`.

    Args:
        path: the directory of versions.
        run: the run.
        number: the version.

    Raises:
        NotFoundError: the version is not there, or is retired.
    """

    def __init__(self, path: str, run: str, number: int) -> None:
        self._folder = f"{path}/{run}/{_LEASES}"
        self._name = f"{new_nonce()}.json"
        self._data = json.dumps({"version": number}).encode()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_held = run != "" and self._created()  # "" is the run of another program's directory
        try:
            # After the lease is written: the trainer marks the version first, and looks for leases then.
            if number not in list_versions(path, run):
                raise NotFoundError(f"version {number} was retired: wait for a newer one", path=f"{path}/{run}")
        except BaseException:
            self.end()
            raise
        if self._is_held:
            threading.Thread(target=self._renew, name="statexchange lease", daemon=True).start()

    def _created(self) -> bool:
        """Write the lease; return False if this reader has no permission to write, or if the run is gone."""
        try:
            records_at(self._folder).write(self._name, self._data)
        except (NotFoundError, UnsupportedError):
            return False
        except StorageError as error:
            # Not all clients of object stores say why a request was refused.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, None):
                raise
            _log.warning("this version may be removed while it is read, as no lease can be written: %s", error)
            return False
        return True

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            # Not while it is removed: a lease that is written then would be there again.
            with self._lock, contextlib.suppress(OSError):
                if not self._ended.is_set():
                    records_at(self._folder).write(self._name, self._data)

    def end(self) -> None:
        """Give the lease back."""
        self._ended.set()
        if self._is_held:
            with self._lock, contextlib.suppress(StateExchangeError):
                records_at(self._folder).remove(self._name)


def _leased(records: Records, names: Iterable[str], now: float) -> set[int]:
    """Return the versions of which a reader has a lease; remove the leases of readers that have ended."""
    numbers = set()
    for name in names:
        if _LEASE.fullmatch(name) is None:
            continue
        try:
            if records.age(name, now) > LEASE_S:
                records.remove(name)
                continue
            lease = parse_json(records.read(name), f"{records.path}/{name}", Budget(records.path))
        except NotFoundError:
            continue
        except StateExchangeError:
            lease = None
        number = lease.get("version") if isinstance(lease, dict) else None
        # A lease that cannot be read is one of all versions, until it ends.
        numbers.add(number if type(number) is int else _ANY_VERSION)
    return numbers


def kept_versions(bases: Mapping[int, int | None], keep: int) -> set[int]:
    """Return the newest `keep` versions and all that they are based on.

    `bases` has for each version the one that it is based on, None for a full one.
    """
    kept: set[int] = set()
    for newest in sorted(bases)[max(0, len(bases) - keep) :]:
        number: int | None = newest
        while number is not None and number not in kept:
            kept.add(number)
            number = bases.get(number)
    return kept


def retire(path: str, run: str, numbers: Iterable[int]) -> None:
    """Mark versions of a run as retired: no reader of ours begins to read them. Root only."""
    folder = f"{path}/{run}/{_LEASES}"
    for number in numbers:
        records_at(folder).write(_MARKS.name(number))


def sweep_retired(path: str, manifest: str, check: ReplaceCheck, *, grace_s: float) -> None:
    """Remove the retired versions of all runs that no reader has leased, and the leases that have ended. Root only.

    Args:
        path: the directory of versions.
        manifest: the name of the file that commits a version.
        check: returns the files of a version, as for `publish.remove`.
        grace_s: how long a version has been retired before the leases are looked at.
    """
    for run in list_runs(path):
        folder = f"{path}/{run}/{_LEASES}"
        names = names_in(folder)  # once: who writes a lease after this finds the marks that count
        if not names:
            continue
        records, retired = records_at(folder), _MARKS.numbers(names)
        now = server_time(path)
        leased = _leased(records, names, now)
        last_read = max(leased & {*retired, _ANY_VERSION}, default=-1)
        # Newest first, so that no delta is left without its base. A version that is read may be based on any older
        # one, so all older ones stay. The bases of a version that is not retired are not retired either.
        for number in sorted(retired, reverse=True):
            mark = _MARKS.name(number)
            if number <= last_read or records.age(mark, now) < grace_s:
                continue
            version = version_path(path, run, number)
            try:
                publish.remove(version, manifest, check, waits=False)
            except NotFoundError:
                if names_in(version):  # objects that a removal has left, which `clear_all` of a later sweep removes
                    continue
            except StateExchangeError as error:  # as if it has other files, too: it stays, and the others go
                _log.warning("a retired version is not removed: %s", error)
                continue
            # Last: a publisher that is killed before it has removed all goes on with this version.
            records.remove(mark)


def clear_runs(path: str) -> None:
    """Remove what killed processes left beside the versions, and earlier runs without a version. Root only."""
    runs = _runs(path)
    for below in (_RUNS, *runs, *(f"{run}/{_LEASES}" for run in runs)):
        records_at(f"{path}/{below}").clear()
    for run in list(runs)[:-1]:
        names = set(names_in(f"{path}/{run}"))
        if names - {_LATEST, _LEASES} or names_in(f"{path}/{run}/{_LEASES}"):
            continue
        # The run's record last: what is killed before goes on.
        records_at(f"{path}/{run}/{_LEASES}").end()
        records_at(f"{path}/{run}").remove(_LATEST)
        records_at(f"{path}/{run}").end()
        records_at(f"{path}/{_RUNS}").remove(runs[run])


def server_time(path: str) -> float:
    """Return the present time by the clock of the file server of a directory of versions, which is written to.

    Not collective. Without permission to write, or in a directory of another program, this host's clock counts.
    """
    return records_at(f"{path}/{_RUNS}").now() if list_runs(path) else time.time()


def size_and_time(store: Store) -> tuple[int, float | None]:
    """Return the bytes of a version's files, and when it was published, in seconds since the epoch, if that is seen.

    Not collective.
    """
    nbytes, times = 0, []
    for name in store.files:
        file = store.open(name)
        nbytes += file.size
        if file.modified is not None:
            times.append(file.modified)
    return nbytes, max(times, default=None)


def version_age(path: str, run: str, number: int) -> float | None:
    """Return how many seconds ago a version was published; None if that cannot be seen. Not collective."""
    with contextlib.suppress(StateExchangeError), open_path(version_path(path, run, number)) as opened:
        last = size_and_time(opened.store)[1]
        return None if last is None else max(0.0, server_time(path) - last)
    return None
