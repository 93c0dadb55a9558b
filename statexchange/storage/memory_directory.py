"""The copy of a save in one host's shared memory: a second place to read the same bytes from, and nothing else.

**Names.** ``/dev/shm/statexchange-<uid>`` is 0700 and must belong to this user. A copy is the directory
``copy-<digest>`` in it, whose digest is that of the save's random id and of this host: hosts may share one /dev/shm. So
a restarted job finds it whatever its processes, ranks and world size are. It has files of the save under their names,
those of this host's ranks and of the previous host's, and ``copy.json``: the path of the save, this host, and the
process that made the copy. It is published as a checkpoint is (publish/), so that each file in it is whole.

**The save on disk decides.** It says what there is to load, where each tensor lies in a file, and the digest of its
bytes. A copy needs no manifest, and cannot be of another save. Its files have headers only so that tensors lie in them
where they lie in the save.

**Removal.** A copy is not removed because its processes have ended: a restart must find it. It is removed when

* the next save of the same directory is copied. The files are then written over, as writing to new pages of memory
  takes several times as long;
* a job copies a save, and the save of this copy is gone, or another one has its path. A URL is not checked, since the
  job that would check it may have another endpoint or other credentials;
* another job lacks room for its copy, and the process that made this one has provably ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.cgroups import memory_left
from statexchange.errors import CorruptError, NotFoundError, StateExchangeError, StorageError, without_secrets
from statexchange.processes import Owner, host_identity
from statexchange.storage import files, publish
from statexchange.storage.atomic import new_nonce
from statexchange.storage.files import digest
from statexchange.storage.location import is_remote, open_path, parse_json, seal, unseal
from statexchange.storage.publish.build import NO_PLAN
from statexchange.storage.store import local_path
from statexchange.storage.tensorfile import read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statexchange.storage.publish.build import Build

_RECORD = "copy.json"
_SCHEMA = 2
_NAME = re.compile(r"copy-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """A copy on this host.

    Attributes:
        path: its directory.
        save_path: the path or URL of the save.
        save: the id of the save.
        owner: the process that made the copy.
    """

    path: str
    save_path: str
    save: str
    owner: Owner

    @property
    def has_lost_save(self) -> bool:
        """Whether the save is gone, or another one has its path."""
        if is_remote(self.save_path):
            return False
        # Not by its path alone: another save of the same step may have replaced it.
        try:
            with open_path(self.save_path) as opened:
                return read_manifest(opened.store).save != self.save
        except (NotFoundError, CorruptError):
            return True


def is_in_copy(path: str | None) -> bool:
    """Whether this is the path of a copy, or of a file in one, on any host."""
    return path is not None and path.startswith((f"{_base()}/copy-", f"{_base()}/.copy-"))


def copy_path(save: str) -> str:
    """Return the path of this host's copy of the save with this id."""
    return _path_of(json.dumps([save, host_identity()]))


def _path_of(text: str) -> str:
    return local_path(f"shm://copy-{digest(text.encode())}")


def _base() -> str:
    """Return the directory of this user in shared memory."""
    return os.path.dirname(_path_of(""))


def begin_copy(path: str, save: str, sizes: Mapping[str, int]) -> Build:
    """Open the build of this host's copy of a save, in place of the copies of other saves of the same directory.

    Not collective. The build has files of those copies, to be written over; `commit_copy` makes them whole. After a
    failure there is no copy, which costs nothing: the save is on disk. Copies that are of no use any more are removed.

    Args:
        path: the path or URL of the save.
        save: its id.
        sizes: bytes of the files to come, by name.

    Raises:
        UnsafeError: the directory in shared memory belongs to another user, or others may write in it.
        StorageError: there is too little memory.
        TargetExistsError: another process is copying this save.
    """
    build = _begin(copy_path(save))
    try:
        folder = os.path.dirname(_origin(path))
        reused: dict[str, int] = {}
        # Before the sweep, which removes copies whose saves retention has just removed.
        for copy in _copies():
            if os.path.dirname(copy.save_path) == folder:
                reused |= _move(copy.path, build.building_path, sizes)
                _remove(copy.path)
        _sweep()
        _check_room(sum(sizes.values()) - sum(reused.values()))
    except BaseException:  # an interrupt, too: nobody else has the build yet
        build.abandon()
        raise
    return build


def begin_fetch(nbytes: int) -> Build:
    """Open a build for files of `nbytes` bytes that a load fetches from other hosts; it is never committed.

    Not collective.

    Raises:
        StorageError: there is too little memory.
    """
    files.make_path(_base())
    # No copy makes room for what is needed for a moment: it may be the one that is loaded.
    _check_free(nbytes)
    return _begin(_path_of(new_nonce()))


def _begin(path: str) -> Build:
    files.make_path(_base())
    # Another user may have made it first: /dev/shm is open to all.
    with files.private_directory(_base()):
        return publish.open_build(path, NO_PLAN, [_RECORD], check=None)


def commit_copy(build: Build, path: str, save: str) -> None:
    """Let the copy of a save appear, whose files are whole. Not collective."""
    record = {
        "schema": _SCHEMA,
        "path": _origin(path),
        "save": save,
        "host": host_identity(),
        "owner": Owner.current().to_json(),
    }
    build.commit(_RECORD, json.dumps(seal(record), indent=1).encode())


def files_of(save: str) -> dict[str, int]:
    """Return the files that this host's copy of a save has, with their sizes; {} without a copy. Not collective."""
    sizes = {}
    with contextlib.suppress(NotFoundError), files.private_directory(_base()), open_path(copy_path(save)) as opened:
        for name in opened.store.files:
            if name != _RECORD:
                sizes[name] = opened.store.open(name).size
    return sizes


def drop_copies(path: str) -> None:
    """Remove the copies of the save at `path`, which may be gone. Not collective.

    Raises:
        StateExchangeError: one cannot be removed.
    """
    origin = _origin(path)
    for copy in _copies():
        if copy.save_path == origin:
            _remove(copy.path)
    # Of a directory that was copied the saves have the ids, and so the copies, of those at the other path.
    with contextlib.suppress(NotFoundError), open_path(path) as opened:
        _remove(copy_path(read_manifest(opened.store).save))


def _sweep() -> None:
    """Remove copies whose saves are gone or whose records are broken, and what ended processes left unfinished."""
    publish.clear_all(_base(), "copy-", _RECORD)
    for path in _paths():
        # A save that cannot be read is reported by the job that needs it.
        with contextlib.suppress(StateExchangeError):
            try:
                copy = _read_record(path)
            except (NotFoundError, CorruptError):
                _remove(path)  # else nobody would ever remove it
            else:
                if copy is not None and copy.has_lost_save:
                    _remove(path)


def _check_room(nbytes: int) -> None:
    """Raise StorageError if this host cannot keep `nbytes` more; copies of processes that have ended make room."""
    try:
        _check_free(nbytes)
    except StorageError:
        # Not before: a job that is restarted here may still want them.
        for copy in _copies():
            if copy.owner.is_dead:
                with contextlib.suppress(StateExchangeError):
                    _remove(copy.path)
        _check_free(nbytes)


def _check_free(nbytes: int) -> None:
    """Check both limits: beyond that of tmpfs a write fails, beyond that of host or cgroup a process is killed."""
    base = _base()
    with files.private_directory(base) as base_fd:
        files.check_room(base_fd, nbytes, base)
    # tmpfs counts for the cgroup of the process that writes it, whatever room the file system has.
    room, where = memory_left()
    if nbytes > room:
        raise StorageError(f"{nbytes} bytes are needed, and {room} are left {where}", path=base)


def _origin(path: str) -> str:
    """Return the path of a save as every job writes it, without secrets of a URL."""
    return without_secrets(path) if is_remote(path) else os.path.realpath(path)


def _paths() -> list[str]:
    """Return the paths of all copies, also of other hosts that share this memory."""
    base = _base()
    try:
        with files.private_directory(base) as base_fd:
            names = files.list_names(base_fd, base)
    except NotFoundError:
        return []
    return [os.path.join(base, name) for name in names if _NAME.fullmatch(name)]


def _copies() -> list[_HostCopy]:
    """Return the copies on this host whose records can be read."""
    copies = []
    for path in _paths():
        with contextlib.suppress(StateExchangeError):
            copy = _read_record(path)
            if copy is not None:
                copies.append(copy)
    return copies


def _read_record(path: str) -> _HostCopy | None:
    """Return the copy at a path; None if it is another host's."""
    with open_path(path) as opened:
        shown = opened.store.path_of(_RECORD)
        parsed = parse_json(opened.store.read_small(_RECORD), shown, opened.store.budget)
    try:
        raw = unseal(parsed)
        if raw["schema"] != _SCHEMA:
            raise ValueError("it has another schema")
        copy = _HostCopy(path, str(raw["path"]), str(raw["save"]), Owner.from_json(raw["owner"]))
        return copy if raw["host"] == host_identity() else None
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"broken record of a copy in memory: {error}", path=shown) from None


def _remove(path: str) -> None:
    with contextlib.suppress(NotFoundError):  # another process removes it
        publish.remove(path, _RECORD, lambda _: [])


def _move(source: str, target: str, names: Mapping[str, int]) -> dict[str, int]:
    """Move the files of these names from one directory into another; return their bytes by name."""
    moved = {}
    with files.directory(source) as source_fd, files.directory(target) as target_fd:
        for name in files.list_names(source_fd, source):
            if name not in names:
                continue
            path = os.path.join(source, name)
            files.audit("rename", path)
            try:
                nbytes = os.stat(name, dir_fd=source_fd, follow_symlinks=False).st_size
                os.rename(name, name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
                moved[name] = nbytes
            except FileNotFoundError:  # another process removes the copy
                continue
            except OSError as error:
                raise StorageError.of(error, "move", path=path) from error
    return moved
