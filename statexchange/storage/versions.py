"""A directory of versions of weights: its runs, their versions, the leases of readers, and the removal of old versions.

::

    runs/000002-<run id>        one for each start of the trainer; the greatest is the current run
    <run id>/latest             "<run id>/weight_v000012", for readers of others; ours never read it
    <run id>/weight_v000012/    a version, published whole as any checkpoint
    <run id>/.leases/           who reads which version, and which versions are about to be removed

**Leases.** A reader (1) writes ``.leases/<nonce>.json`` with the number of a version, (2) looks whether the version is
marked as retired. It touches the file again and again while it reads; a lease that has not been touched for `LEASE_S`
is one of a reader that has ended. A reader that may not write here has no lease: `keep` alone protects what it reads.

**Removal.** The trainer (1) writes the mark ``.leases/retired-000007``, (2) lets `GRACE_S` pass, as a client of NFS may
see an old listing for so long, (3) looks for leases. So either the reader sees the mark, and takes another version, or
the trainer sees the lease, and the version stays until it ends. Then the directory is removed, and the mark after it.
Nothing waits: each publish goes on with what earlier ones, or those of an earlier run, have retired.

All ages are by the clock of the file server: the time of a file that was written just now, less that of the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
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
)
from statexchange.storage import files, publish
from statexchange.storage.atomic import invalidate_listings, new_nonce, remove_abandoned, write_new
from statexchange.storage.location import directory_of, is_remote, resolve_path
from statexchange.storage.store import local_path

if TYPE_CHECKING:
    from statexchange.storage.publish.build import ReplaceCheck

__all__ = [
    "GRACE_S",
    "LEASE_S",
    "VERSION_PREFIX",
    "Lease",
    "all_versions",
    "begin_run",
    "check_is_current",
    "clear_runs",
    "current_run",
    "holds_versions",
    "kept_versions",
    "list_runs",
    "list_versions",
    "retire",
    "retired_versions",
    "server_time",
    "set_latest",
    "sweep_retired",
    "version_name",
    "version_number",
    "version_path",
    "versions_path",
]

GRACE_S = 60.0  # the longest time for which an NFS client of default options answers from its cache (acdirmax)
LEASE_S = 300.0
_RENEW_S = 60.0
_RUNS, _LEASES, _LATEST = "runs", ".leases", "latest"
_RUN = re.compile(r"([0-9]{6,12})-([0-9a-f]{16})")
VERSION_PREFIX = "weight_v"
_VERSION = re.compile(r"weight_v([0-9]{6,12})")
_LEASE = re.compile(r"[0-9a-f]{16}\.json")
_RETIRED = re.compile(r"retired-([0-9]{6,12})")
_ANY_VERSION = 10**12
_log = logging.getLogger(__name__)
_MODE, _DIRECTORY_MODE = 0o666, 0o777  # less the umask: these are published


def version_name(number: int) -> str:
    """Return the name of a version's directory."""
    return f"weight_v{number:06d}"


def version_number(name: str) -> int | None:
    """Return the number of a version's directory; None for any other name."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match is not None and version_name(int(match[1])) == name else None


def version_path(path: str, run: str, number: int) -> str:
    """Return the path of a version; the one run of another program's directory is "", and lies in it."""
    return "/".join(filter(None, (path, run, version_name(number))))


def versions_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory of versions that a caller gave, which need not exist.

    Raises:
        InvalidArgumentError: it is a URL, a file or a version.
    """
    resolved = resolve_path(path, "a directory of versions")
    if is_remote(resolved):
        text = f"a directory of versions must be a local or shared path, not {resolved.partition('://')[0]}://"
        raise InvalidArgumentError(text)
    found = directory_of(resolved)
    if os.path.isfile(found):
        raise InvalidArgumentError("a directory of versions is expected, and this is a file", path=found)
    if version_number(os.path.basename(found)) is not None:
        raise InvalidArgumentError("this is a version: give the directory of versions", path=found)
    return found


def _listed(path: str) -> list[str]:
    """Return the names in a directory as the server has them now; [] if it does not exist."""
    try:
        # Opened anew, so that a client of NFS asks the server for the directory's attributes.
        with files.directory(path) as dir_fd:
            return files.list_names(dir_fd, path)
    except NotFoundError:
        return []


def list_runs(path: str) -> list[str]:
    """Return the ids of the runs in a directory of versions, the current one last. Not collective."""
    runs = sorted((int(match[1]), match[2]) for name in _listed(f"{path}/{_RUNS}") if (match := _RUN.fullmatch(name)))
    return [run for _, run in runs]


def current_run(path: str) -> str | None:
    """Return the id of the run that began last; None before the first. Not collective."""
    runs = list_runs(path)
    return runs[-1] if runs else None


def begin_run(path: str) -> str:
    """Begin a run, and return its id. Root only.

    Of two trainers that begin at once the run with the greater name wins, and `check_is_current` raises in the other.
    """
    run = secrets.token_hex(8)
    for below in (_RUNS, run, f"{run}/{_LEASES}"):
        files.make_path(f"{path}/{below}", _DIRECTORY_MODE)
    numbers = [int(match[1]) for name in _listed(f"{path}/{_RUNS}") if (match := _RUN.fullmatch(name))]
    name = f"{max(numbers, default=0) + 1:06d}-{run}"
    with files.directory(f"{path}/{_RUNS}") as dir_fd:
        write_new(dir_fd, name, b"", path=f"{path}/{_RUNS}/{name}", mode=_MODE)
        invalidate_listings(dir_fd, path=f"{path}/{_RUNS}")
    return run


def check_is_current(path: str, run: str) -> None:
    """Raise TargetExistsError if another run has begun after this one. Root only."""
    current = current_run(path)
    if current is None:
        text = "the directory of versions was removed under this trainer: go on with a new Publisher"
        raise NotFoundError(text, path=path)
    if current != run:
        text = f"another trainer has begun run {current} here after this run {run}: give each trainer a directory"
        raise TargetExistsError(text, path=path)


def list_versions(path: str, run: str) -> list[int]:
    """Return the numbers of the versions of a run that are not retired, oldest first. Not collective."""
    folder = f"{path}/{run}"
    numbers = sorted(number for name in _listed(folder) if (number := version_number(name)) is not None)
    retired = retired_versions(folder) if numbers else {}
    return [number for number in numbers if number not in retired]


def all_versions(path: str) -> dict[str, list[int]]:
    """Return the numbers of all versions of each run, retired ones too; the current run is last. Not collective.

    A directory of another program has one run, "". {} for anything else, and for a URL.
    """
    if is_remote(path):
        return {}
    found = {}
    path = local_path(path)
    for run in list_runs(path) or [""]:
        names = _listed(f"{path}/{run}") if os.path.isdir(f"{path}/{run}") else []
        found[run] = sorted(number for name in names if (number := version_number(name)) is not None)
    return found if found.get("", True) else {}


def holds_versions(path: str | os.PathLike[str]) -> bool:
    """Whether a local path is a directory of versions, ours or another program's. Not collective."""
    return any(all_versions(resolve_path(path, "a directory of versions")).values())


def set_latest(path: str, run: str, number: int) -> None:
    """Let ``latest`` name a version. Root only; after the version has been published."""
    folder = f"{path}/{run}"
    with files.directory(folder) as dir_fd:
        text = f"{run}/{version_name(number)}".encode()
        write_new(dir_fd, _LATEST, text, path=f"{folder}/{_LATEST}", mode=_MODE, overwrite=True)
        invalidate_listings(dir_fd, path=folder)


# Leases and removal


def retired_versions(folder: str) -> dict[int, str]:
    """Return the names of the marks of the retired versions of a run, by number. Not collective."""
    marks = {}
    for name in _listed(f"{folder}/{_LEASES}"):
        match = _RETIRED.fullmatch(name)
        if match is not None:
            marks[int(match[1])] = name
    return marks


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
        self._folder = f"{path}/{run}"
        self._name: str | None = f"{new_nonce()}.json"
        self._ended = threading.Event()
        record = json.dumps({"version": number}).encode()
        try:
            with files.directory(f"{self._folder}/{_LEASES}") as dir_fd:
                write_new(dir_fd, self._name, record, path=f"{self._folder}/{_LEASES}/{self._name}", mode=_MODE)
                invalidate_listings(dir_fd, path=f"{self._folder}/{_LEASES}")
        except (NotFoundError, StorageError) as error:
            # A reader without permission to write, or a directory of another program.
            if isinstance(error, StorageError) and error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self._name = None
        try:
            # After the lease is written: the trainer marks the version first, and looks for leases then.
            if number not in list_versions(path, run):
                raise NotFoundError(f"version {number} was retired: wait for a newer one", path=self._folder)
        except BaseException:
            self.end()
            raise
        if self._name is not None:
            threading.Thread(target=self._renew, name="statexchange lease", daemon=True).start()

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(f"{self._folder}/{_LEASES}/{self._name}")

    def end(self) -> None:
        """Give the lease back."""
        self._ended.set()
        if self._name is not None:
            with contextlib.suppress(StateExchangeError):
                _remove(self._folder, self._name)


def _leased(folder: str, now: float) -> set[int]:
    """Return the versions of which a reader has a lease; remove the leases of readers that have ended."""
    numbers = set()
    for name in _listed(f"{folder}/{_LEASES}"):
        if _LEASE.fullmatch(name) is None:
            continue
        lease = f"{folder}/{_LEASES}/{name}"
        if now - _mtime(lease, now) > LEASE_S:
            _remove(folder, name)
            continue
        try:
            with open(lease, "rb") as file:
                numbers.add(int(json.loads(file.read(4096))["version"]))
        except FileNotFoundError:
            continue
        except (KeyError, OSError, TypeError, ValueError):
            numbers.add(_ANY_VERSION)  # a lease that cannot be read is one of all versions, until it ends
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
        name = f"retired-{number:06d}"
        with files.directory(folder) as dir_fd, contextlib.suppress(TargetExistsError):
            write_new(dir_fd, name, b"", path=f"{folder}/{name}", mode=_MODE)
            invalidate_listings(dir_fd, path=folder)


def sweep_retired(path: str, manifest: str, check: ReplaceCheck, *, grace_s: float) -> list[str]:
    """Remove the retired versions of all runs that no reader has leased; return their paths. Root only.

    Args:
        path: the directory of versions.
        manifest: the name of the file that commits a version.
        check: returns the files of a version, as for `publish.remove`.
        grace_s: how long a version has been retired before the leases are looked at.
    """
    removed: list[str] = []
    for run in list_runs(path):
        folder = f"{path}/{run}"
        retired = retired_versions(folder)
        if not retired:
            continue
        now = server_time(f"{folder}/{_LEASES}")
        leased = _leased(folder, now)
        # Newest first, so that no delta is left without its base. A version that is read may be based on any older
        # one, so all older ones stay. The bases of a version that is not retired are not retired either.
        for number in sorted(retired, reverse=True):
            mark = retired[number]
            is_read = any(reading >= number for reading in leased if reading in retired or reading == _ANY_VERSION)
            if is_read or now - _mtime(f"{folder}/{_LEASES}/{mark}", now) < grace_s:
                continue
            version = version_path(path, run, number)
            try:
                publish.remove(version, manifest, check)
                removed.append(version)
            except NotFoundError:
                pass
            except StateExchangeError as error:  # as if it has other files, too: it stays, and the others go
                _log.warning("a retired version is not removed: %s", error)
                continue
            # Last: a publisher that is killed before it has removed all goes on with this version.
            _remove(folder, mark)
    return removed


def clear_runs(path: str) -> None:
    """Remove what killed processes left beside the versions, and earlier runs without a version. Root only."""
    runs = list_runs(path)
    for folder in (f"{path}/{_RUNS}", *(f"{path}/{run}{below}" for run in runs for below in ("", f"/{_LEASES}"))):
        with contextlib.suppress(NotFoundError), files.directory(folder) as dir_fd:
            remove_abandoned(dir_fd)
    for run in runs[:-1]:
        folder = f"{path}/{run}"
        left = set(_listed(folder)) - {_LATEST, _LEASES}
        if left or _listed(f"{folder}/{_LEASES}"):
            continue
        with files.directory(path) as dir_fd:
            for name in (_LATEST, _LEASES):
                if os.path.lexists(f"{folder}/{name}"):
                    with files.directory(folder) as run_fd:
                        files.remove_entry(name, f"{folder}/{name}", run_fd)
            files.remove_directory(run, dir_fd, folder)
        with files.directory(f"{path}/{_RUNS}") as dir_fd:
            for name in _listed(f"{path}/{_RUNS}"):
                if name.endswith(f"-{run}"):
                    files.remove_file(name, f"{path}/{_RUNS}/{name}", dir_fd)


def _remove(folder: str, name: str) -> None:
    """Remove a lease or a mark, unless another process has removed it."""
    with files.directory(f"{folder}/{_LEASES}") as dir_fd, contextlib.suppress(NotFoundError):
        files.remove_file(name, f"{folder}/{_LEASES}/{name}", dir_fd)


def server_time(path: str) -> float:
    """Return the present time by the clock of the file server of a version, a run or its leases; it is touched.

    Not collective. Without permission to write, this host's clock counts.
    """
    try:
        os.utime(path)
        return os.stat(path).st_mtime
    except OSError:
        return time.time()


def _mtime(path: str, missing: float) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return missing
