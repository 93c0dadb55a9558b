"""The store: a snapshot of a directory, local or at an fsspec URL, as of the time when it was opened.

Every reader opens its path with `location.open_path`. A store lists its directory once. It pins the directory and
each opened file: a local file by its descriptor and identity (device, inode, size, modification time), an object by its
ETag or another version that its object store gives. Data is read from the pinned file, never by opening a path again
with offsets that were found earlier. So the old content stays readable after a rename has replaced the directory. If
a rename gives the name of one file to another one, that is found after the last open and the last read (`check_opened`,
`check_current`): else some files could be of the old version and some of the new. A read that cannot return the pinned
version any more raises ReplacedError, and the caller opens the path again (`location.read_with_retry`).

A small file can ask for much: a pickle can refer to one object many times, a list of parts can name the same part again
and again, and dense text takes far more memory once parsed. So work that is done once for each reference, entry or part
is first spent from a `Budget`. Work that is done once for each byte is free. The work on a file's header or pickle may
take a number of steps for each of its bytes. What it takes beyond them comes from a reserve. An opened store has one
reserve, for itself, its subdirectories and all files in them: many small files get no more of it than one. A refused
file does not use it up.

A local file is pinned by its identity, not by its descriptor. The first files of an opened path keep their descriptors.
Others are opened for each use by name in the pinned directory, and their identity is compared. So a checkpoint of any
number of files can be read, and a file that was replaced in between raises ReplacedError. A subdirectory is opened anew
for each use, and its identity is compared, too.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import logging
import os
import re
import resource
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol
from urllib.parse import unquote

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    UnsafeError,
    excerpt,
)
from statexchange.sharding.shards import Box, intersect
from statexchange.storage.files import (
    Identity,
    audit,
    begin_reading,
    check_private,
    check_size,
    directory,
    fstat_of,
    hidden_entries,
    mount_of,
    open_directory,
    open_file,
    open_parent,
    pread_into,
    read_error,
    stat_identity,
    stat_of,
    warn_of_options,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

EntryKind = Literal["file", "directory", "other"]
# A real file needs less than 2 steps a byte.
_STEPS_PER_BYTE, _RESERVED_STEPS = 8, 1 << 16
_CHARACTERS_PER_STEP = 16
# A real header takes up to 14 bytes of memory a byte.
_MEMORY_PER_BYTE, _RESERVED_MEMORY = 16, 32 << 20
# Measured: more is not faster, and each rank of a host has as much in the page cache.
_PREFETCHED_BYTES = 32 << 20
PREFETCH_STEP_BYTES = 1 << 20


class _Reserve:
    """What is left of one source's reserve; all budgets of the source spend from this one object."""

    __slots__ = ("memory", "steps")

    def __init__(self) -> None:
        self.steps = _RESERVED_STEPS
        self.memory = _RESERVED_MEMORY


class Budget:
    """The work that reading `nbytes` bytes of the file at `path` may take."""

    __slots__ = ("_path", "_reserve", "_steps")

    def __init__(self, path: str, nbytes: int = 0, *, reserve: _Reserve | None = None) -> None:
        self._path = path
        self._steps = _STEPS_PER_BYTE * nbytes
        self._reserve = _Reserve() if reserve is None else reserve

    def of(self, path: str, nbytes: int) -> Budget:
        """Return a budget with the same reserve, for `nbytes` bytes of the file at `path`."""
        return Budget(path, nbytes, reserve=self._reserve)

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count steps, and characters of text that are copied, hashed or compared.

        Raises:
            CorruptError: the budget is used up.
        """
        left = self._steps - steps - characters // _CHARACTERS_PER_STEP
        if left < 0:
            # Before anything is taken: a file that is refused leaves the reserve to the others.
            if -left > self._reserve.steps:
                problem = "refused: it refers to the same objects so often that reading it would take too long"
                raise CorruptError(problem, path=self._path)
            self._reserve.steps += left
            left = 0
        self._steps = left

    def spend_memory(self, nbytes: int, text: str, path: str) -> None:
        """Count the memory that JSON of the file at `path` takes once parsed.

        Raises:
            CorruptError: the budget is used up.
        """
        beyond = max(0, nbytes - _MEMORY_PER_BYTE * len(text))
        if beyond > self._reserve.memory:
            problem = f"refused: these {len(text)} characters of JSON would take too much memory once parsed"
            raise CorruptError(problem, path=path)
        self._reserve.memory -= beyond


def strip_file_scheme(path: str) -> str:
    """Return ``/a/path`` for ``file:///a/path``; any other path unchanged."""
    if path.startswith("file:///"):
        return unquote(path.removeprefix("file://"))
    return path


def absolute_path(path: str) -> str:
    """Return an absolute path. ``..`` stays: after a symbolic link it means the parent of the link's target."""
    if ".." not in path.split(os.sep):
        return os.path.abspath(path)
    return os.path.join(os.getcwd(), path).rstrip(os.sep)


class StoredFile(ABC):
    """A file opened for reading and pinned: all reads return bytes of the same version, or raise. Thread-safe.

    Not collective.

    Attributes:
        path: the path or URL, for messages.
        size: bytes.
        is_remote: whether each read is a request over a network.
        modified: when it was last written, in seconds since the epoch; None if the store does not know.
    """

    path: str
    size: int
    is_remote: bool = False
    modified: float | None = None

    @cached_property
    def budget(self) -> Budget:
        """The budget for reading its source; a directory gives its own to its subdirectories and files."""
        return Budget(self.path)

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`.

        Raises:
            CorruptError: the file ends before the buffer is full.
            ReplacedError: the file was replaced or changed since it was opened.
        """

    def read_ahead(self, memory_bytes: int) -> None:  # noqa: B027 (the kernel does it for a local file)
        """Read a remote file ahead where reads follow one another, and keep at most `memory_bytes` of it.

        For a file of which most is read, part by part.
        """

    def will_need(self, begin: int, nbytes: int) -> None:  # noqa: B027 (a remote file is read in large requests)
        """Begin to read bytes from the disk, and do not wait."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise ReplacedError if the file's bytes may have changed since it was opened."""

    def check_current(self) -> None:
        """Raise ReplacedError if the file was changed, or another one has its name now, as a rename gives it.

        A directory whose files are replaced one after another is read as one version only if, after the last read, all
        names still lead to the files that were opened.
        """
        self.check_unchanged()

    @property
    @abstractmethod
    def version(self) -> list[str | int]:
        """A JSON value that changes whenever the file's bytes do: path, size, and ETag or modification time."""

    @property
    @abstractmethod
    def local_identity(self) -> list[str | int]:
        """A JSON value that is equal on all ranks of one host that opened the same file."""

    @property
    @abstractmethod
    def shared_identity(self) -> list[str | int] | None:
        """A JSON value that is equal on all hosts that opened the same file; None if each host may have a copy."""

    def first_bytes(self, limit: int) -> bytes:
        """Return the first `limit` bytes, or all bytes of a shorter file."""
        start = bytearray(min(limit, self.size))
        self.read_into(memoryview(start), 0)
        return bytes(start)

    def read_all(self, limit: int = 64 << 20) -> bytes:
        """Return all bytes; raise CorruptError for a file of more than `limit` bytes."""
        check_size(self.size, limit, self.path)
        # A BytesIO gives its bytes away without a second copy in memory, which a bytearray cannot.
        data = io.BytesIO(bytes(self.size))
        with data.getbuffer() as buffer:
            self.read_into(buffer, 0)
        return data.getvalue()


class Span(NamedTuple):
    """Bytes that will be read: from `begin` of `file` on; without a file they are not asked for."""

    file: StoredFile | None
    begin: int
    nbytes: int


class Prefetch:
    """Asks the disk or server for `spans`, which are in the order of their reading, at most 32 MiB ahead of it.

    The kernel's own read-ahead follows one file in its order, and has 128 KiB in flight on most systems. A plan knows
    all that it will read. Advice takes next to no time, and gets from a cold disk what eight reading threads get
    (docs/benchmarks.md). Not thread-safe.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        joined: list[Span] = []
        for span in spans:
            last = joined[-1] if joined else None
            # Neighbours are one span, so that a small tensor costs no advice of its own.
            if last is not None and span.file is last.file and span.begin == last.begin + last.nbytes:
                joined[-1] = last._replace(nbytes=last.nbytes + span.nbytes)
            else:
                joined.append(span)
        self._left = joined[::-1]  # the next one comes last
        self._num_ahead = 0
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """Ask for more, after the caller has read `nbytes`."""
        self._num_ahead -= nbytes
        while self._left and self._num_ahead < _PREFETCHED_BYTES:
            file, begin, left = self._left.pop()
            # In steps, so that a large tensor is not asked for as a whole, beyond the 32 MiB.
            step = min(PREFETCH_STEP_BYTES, left)
            if file is not None and step:
                file.will_need(begin, step)
            if step < left:
                self._left.append(Span(file, begin + step, left - step))
            # What is not asked for counts, too: `advance` is called for all that the caller reads.
            self._num_ahead += step


class Store(ABC):
    """A pinned directory, listed once. Not collective.

    Attributes:
        path: its absolute path or URL.
        is_remote: whether it is at a URL: each read is a request, and an unfinished build has the final name.
        is_nfs: whether it is of an NFS server, which all hosts share.
        adopted: other opened paths that `close` closes, too: the source of this one reads their files.
    """

    path: str
    is_remote: bool = False
    is_nfs: bool = False
    adopted: tuple[Store, ...] = ()

    @cached_property
    def budget(self) -> Budget:
        """The budget for reading its source; a directory gives its own to its subdirectories and files."""
        return Budget(self.path)

    @property
    def address(self) -> str:
        """The path or URL by which it is opened, with what may grant access: not for messages."""
        return self.path

    @property
    @abstractmethod
    def listing(self) -> Mapping[str, EntryKind]:
        """The kind of each entry by name, sorted. The directory is read once, at the first use."""

    @property
    def files(self) -> list[str]:
        """Names of files, in order."""
        return [name for name, kind in self.listing.items() if kind == "file"]

    @property
    def non_directories(self) -> list[str]:
        """Names of all entries but directories, in order; `open` raises for those that are no regular files."""
        return [name for name, kind in self.listing.items() if kind != "directory"]

    @property
    def directories(self) -> list[str]:
        """Names of directories, in order, without symbolic links to directories."""
        return [name for name, kind in self.listing.items() if kind == "directory"]

    def path_of(self, name: str) -> str:
        """Return the path or URL of `name`."""
        return f"{self.path.rstrip('/')}/{name}"

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """Open and pin a file of this directory, and give it the budget.

        `name` may come from a file, such as an index, and must not lead out of the directory (`check_name`).

        Raises:
            NotFoundError: there is no such file.
            UnsafeError: it is not a regular file, or `name` is a path.
            StorageError: it cannot be opened.
        """

    def check_name(self, name: str) -> None:
        """Raise UnsafeError unless `name` is that of a file in this directory, and no path."""
        if name in ("", ".", "..") or "/" in name or os.sep in name:
            raise UnsafeError(f"refused: {excerpt(name)} is not the name of a file in this directory", path=self.path)
        _log.debug("opening %s in %s", name, self.path)

    @abstractmethod
    def below(self, name: str, *, private: bool = False) -> Store:
        """Open the subdirectory `name`; it is closed with this store, and shares its budget.

        With `private`, symbolic links in it are not followed, and a directory in which other users may write raises
        UnsafeError.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the path still leads to this directory."""

    def check_opened(self) -> None:  # noqa: B027 (at a URL all versions are those of one listing)
        """Raise ReplacedError if another file has the name of one that was opened here or below."""

    def close(self) -> None:
        """Close all descriptors of this store, of its subdirectories and of its files, and what it has adopted.

        Afterwards a local store raises InvalidArgumentError for any call that needs one of them.
        """
        for other in self.adopted:
            other.close()

    def only(self, is_listed: Callable[[str], bool]) -> Self:
        """Return this directory with a listing of some of its names; `open` opens the others, too.

        The two are one opened path: what closes one of them closes the other.
        """
        view = copy.copy(self)
        # The copy has it only if it was used before: two views of one directory may not have two reserves.
        view.budget = self.budget
        listing = {name: kind for name, kind in self.listing.items() if is_listed(name)}
        vars(view)["listing"] = listing  # as if the view had listed the directory
        return view

    def link_target(self, name: str) -> str | None:  # noqa: ARG002 (only a local store has links)
        """Return the path that a symbolic link holds; None for anything else."""
        return None

    def read_small(self, name: str, limit: int = 64 << 20) -> bytes:
        """Return all bytes of a file; raise CorruptError for one of more than `limit` bytes."""
        return self.open(name).read_all(limit)


class KnownDigests(Protocol):
    """Blocks of a box, in the tensor's coordinates, with their known digests."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Box, str]]: ...

    def within(self, region: Box) -> Iterator[tuple[Box, str]]:
        """Yield the blocks that lie in a region of the tensor."""


class ListedDigests(tuple[tuple[Box, str], ...]):
    """Blocks and their digests as a list."""

    __slots__ = ()

    def within(self, region: Box) -> Iterator[tuple[Box, str]]:
        """Yield the blocks that lie in a region of the tensor."""
        for block, digest in self:
            if intersect(block, region) == block:
                yield block, digest


class ByteRange(NamedTuple):
    """The position of one box's bytes in a file, and their known digests.

    Attributes:
        file: the opened file.
        begin: offset in the file, in bytes, of the box's first element.
        nbytes: size of the box.
        digest: digest of the box's bytes in C order; None if it is not known.
        strides: stored elements from one index to the next in each dim; None if the box is one run in C order.
        parts: blocks of the box, in the tensor's coordinates, with their known digests.
        orders: for each dim in which the box has the stored elements in another order, their indices there, of which
            only the differences count; None for other dims, and () if there is no such dim.
    """

    file: StoredFile
    begin: int
    nbytes: int
    digest: str | None = None
    strides: tuple[int, ...] | None = None
    parts: KnownDigests = ListedDigests()
    orders: tuple[array[int] | None, ...] = ()

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return self.file.path

    @property
    def is_proven(self) -> bool:
        """Whether digests cover all bytes of the box."""
        return self.digest is not None or len(self.parts) > 0


# Local directories

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_FILE_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_MAX_LOOKUPS = 40  # of a name that is absent while its directory is being replaced
_LOOKUP_INTERVAL_S = 0.01
_LEAST_HELD = 4  # descriptors that each opened path may keep open, even over the limit


def local_path(url: str) -> str:
    """Return the absolute path for a local path, ``file:///path`` or ``shm://name`` (a directory on tmpfs)."""
    scheme, separator, rest = strip_file_scheme(url).partition("://")
    if not separator:
        return absolute_path(strip_file_scheme(url))
    if scheme == "shm":
        if not _PLAIN_NAME.fullmatch(rest):
            raise InvalidArgumentError(
                "shm:// must be followed by a name of letters, digits, '.', '_' and '-' that begins with a letter, "
                f"digit or '_', not {rest!r}"
            )
        # Of this user, as /dev/shm is open to all; it is 0700, and its owner is checked when it is used.
        return f"/dev/shm/statexchange-{os.getuid()}/{rest}"  # noqa: S108
    if scheme == "file":
        raise InvalidArgumentError(f"{url!r} names a host: write file:///absolute/path, or the path alone")
    raise InvalidArgumentError(f"a workspace is a directory or shm://name; {scheme}:// is not supported")


_num_held = 0  # descriptors that all opened paths of this process hold


def _held_limit() -> int:
    """Return how many descriptors they may hold: a quarter of those that the process may open, at most 256."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_LEAST_HELD, min(256, soft // 4))


class _Descriptors:
    """The descriptors of one opened path: its directory, and the first files in it and below.

    All are closed by `close` or when the last reference is dropped. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: set[int] = set()
        # A source that nobody closes is no leak: the last of its files takes the descriptors along.
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        self.is_open = True
        # The identity of each file that was opened, by its path below the opened directory.
        self.identities: dict[str, Identity] = {}

    def hold(self, fd: int, path: str) -> None:
        """Take ownership of a descriptor, which stays open until `close`."""
        global _num_held
        with self._lock:
            if not self.is_open:
                os.close(fd)
                raise _closed(path)
            self._fds.add(fd)
            _num_held += 1

    @property
    def is_full(self) -> bool:
        """Whether no more files may keep their descriptors."""
        return len(self._fds) > _LEAST_HELD and _num_held >= _held_limit()

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            self.is_open = False
            self._finalizer()


def _closed(path: str) -> InvalidArgumentError:
    """Return the error of a use after `close`: a closed descriptor's number may belong to another file."""
    return InvalidArgumentError("this checkpoint has been closed: open it again", path=path)


def _close_all(fds: set[int]) -> None:
    global _num_held
    _num_held -= len(fds)
    while fds:
        os.close(fds.pop())


class LocalFile(StoredFile):
    """A file of a `LocalStore`, pinned by device, inode, size and modification time."""

    def __init__(self, store: LocalStore, name: str, descriptors: _Descriptors) -> None:
        self.path = path = store.path_of(name)
        self.budget = store.budget
        self._store = store
        self._name = name
        self._descriptors = descriptors
        self._fd = -1  # if it is opened for each use
        fd = store.open_name(name, path)
        try:
            self._identity = stat_identity(fstat_of(fd, path))
        except StorageError:
            os.close(fd)
            raise
        self.size = self._identity[2]
        self.modified = self._identity[3] / 1e9
        if descriptors.is_full:
            os.close(fd)
        else:
            descriptors.hold(fd, path)
            self._fd = fd
        # The first one counts: a name that is opened twice must have led to the same file.
        descriptors.identities.setdefault(store.below_root + name, self._identity)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a descriptor of the file; raise ReplacedError if another file has the name in the directory."""
        if self._fd >= 0:
            if not self._descriptors.is_open:
                raise _closed(self.path)
            yield self._fd
            return
        try:
            fd = self._store.open_name(self._name, self.path)
        except NotFoundError:
            raise ReplacedError("removed while it was read", path=self.path) from None
        try:
            if stat_identity(fstat_of(fd, self.path)) != self._identity:
                raise self._replaced()
            yield fd
        finally:
            os.close(fd)

    def _replaced(self) -> ReplacedError:
        return ReplacedError("replaced or changed while it was read: read it again", path=self.path)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`."""
        try:
            with self._opened() as fd:
                pread_into(fd, buffer, offset, self.path)
        except CorruptError:
            # The file was long enough when it was opened: another process has cut it since.
            if offset + len(buffer) <= self.size:
                raise self._replaced() from None
            raise

    def will_need(self, begin: int, nbytes: int) -> None:
        """Begin to read bytes into the page cache, and do not wait."""
        with self._opened() as fd:
            begin_reading(fd, begin, nbytes)

    def check_unchanged(self) -> None:
        """Raise ReplacedError if the file's bytes may have changed since it was opened."""
        with self._opened() as fd:
            try:
                attributes = self._fresh_stat(fd)
            except OSError as error:
                raise read_error(error, "read the attributes", self.path) from error
        if stat_identity(attributes) != self._identity:
            raise self._replaced()

    def check_current(self) -> None:
        """Raise ReplacedError if the file was changed, or another one has its name now.

        A file without a name is not another version: its directory was replaced as a whole, and is being removed.
        """
        identity = self._store.identity_of(self._name)
        if identity is None:
            self.check_unchanged()
        elif identity != self._identity:
            raise self._replaced()

    def _fresh_stat(self, fd: int) -> os.stat_result:
        """Return the file's attributes; on NFS open the file once more, which makes the client ask the server."""
        if not self._store.is_shared:
            return os.fstat(fd)
        # By its descriptor, as its name may be another file's by now.
        new_fd = os.open(f"/proc/self/fd/{fd}", _FILE_FLAGS)
        try:
            return os.fstat(new_fd)
        finally:
            os.close(new_fd)

    @property
    def version(self) -> list[str | int]:
        """Path, size and modification time."""
        return [self.path, self.size, self._identity[3]]

    @property
    def shared_identity(self) -> list[str | int] | None:
        """Inode, size and modification time, on a file system that hosts share."""
        return list(self._identity[1:]) if self._store.is_shared else None

    @property
    def local_identity(self) -> list[str | int]:
        """Device, inode, size and modification time."""
        return list(self._identity)


class LocalStore(Store):
    """A local directory, pinned by its descriptor; a subdirectory is pinned by its identity.

    Args:
        path: absolute path.
        fd: descriptor of the directory, owned by this store, also if the constructor raises.
        descriptors: closes all descriptors of the opened path.
        parent: the store of the parent directory, if this is a subdirectory.
        follow: follow symbolic links to files, as Hugging Face's cache has them.
    """

    def __init__(
        self, path: str, fd: int, descriptors: _Descriptors, *, parent: LocalStore | None = None, follow: bool = True
    ) -> None:
        self.path = path
        self._fd = fd
        self._parent = parent
        self._descriptors = descriptors
        self.below_root: str = "" if parent is None else f"{parent.below_root}{os.path.basename(path)}/"
        self._follow = follow
        try:
            self._identity = _directory_identity(fd, path)
        except BaseException:
            os.close(fd)
            raise
        if parent is None:
            descriptors.hold(fd, path)
        else:
            self.budget = parent.budget
            os.close(fd)

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yield the descriptor of the directory, which is open in the with block."""
        if self._parent is None:
            if not self._descriptors.is_open:
                raise _closed(self.path)
            yield self._fd
            return
        # Not kept open, as a checkpoint may have thousands of subdirectories. From the root down, name by name, so that
        # no link on the way is followed.
        with self._parent.descriptor() as parent_fd:
            try:
                fd = open_directory(os.path.basename(self.path), parent_fd, self.path)
            except NotFoundError:
                raise ReplacedError("removed while it was read", path=self.path) from None
        try:
            if _directory_identity(fd, self.path) != self._identity:
                raise ReplacedError("replaced since it was opened: open it again", path=self.path)
            yield fd
        finally:
            os.close(fd)

    @cached_property
    def is_shared(self) -> bool:
        """Whether other hosts may change this directory."""
        return mount_of(self.path).is_network

    @cached_property
    def is_nfs(self) -> bool:  # type: ignore[override]
        """Whether it is of an NFS server."""
        return mount_of(self.path).kind in ("nfs", "nfs4")

    @cached_property
    def listing(self) -> Mapping[str, EntryKind]:
        """The kind of each entry by name, sorted."""
        audit("list", self.path)
        kinds: dict[str, EntryKind] = {}
        try:
            with self.descriptor() as fd, os.scandir(fd) as entries:
                for entry in entries:
                    # Nearly all entries are files, of which the kernel says so with their names: no call for each.
                    kinds[entry.name] = "file" if entry.is_file(follow_symlinks=False) else _kind_of(entry)
        except OSError as error:
            if isinstance(error, StateExchangeError):
                raise
            raise read_error(error, "list directory", self.path) from error
        return dict(sorted(kinds.items()))

    def open_name(self, name: str, path: str) -> int:
        """Return a new descriptor of a file in this directory; `path` is its path for messages."""
        with self.descriptor() as fd:
            return open_file(name, fd, path, follow=self._follow)

    def link_target(self, name: str) -> str | None:
        """Return the path that a symbolic link holds; None for anything else."""
        with self.descriptor() as fd:
            return _link_target(name, fd)

    def open(self, name: str) -> LocalFile:
        """Open and pin a file."""
        self.check_name(name)
        return LocalFile(self, name, self._descriptors)

    def below(self, name: str, *, private: bool = False) -> LocalStore:
        """Open a subdirectory; a symbolic link raises UnsafeError."""
        path = self.path_of(name)
        with self.descriptor() as own_fd:
            fd = open_directory(name, own_fd, path)
        try:
            if private:
                check_private(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return LocalStore(path, fd, self._descriptors, parent=self, follow=self._follow and not private)

    def is_current(self) -> bool:
        """Whether the path still leads to this directory; True if that cannot be determined."""
        try:
            with directory(self.path) as fd:
                return _directory_identity(fd, self.path) == self._identity
        except (NotFoundError, ReplacedError):
            return False
        except StorageError:
            # Without permission, say: what was read is pinned in any case.
            return True

    def identity_of(self, name: str) -> Identity | None:
        """Return the identity of the file that has a name, or a path, below this directory; None without one."""
        with self.descriptor() as dir_fd:
            try:
                if not self.is_shared:
                    return stat_identity(os.stat(name, dir_fd=dir_fd, follow_symlinks=self._follow))
                # An open makes a client of NFS ask the server. fstat fails if the server has removed the file since.
                fd = open_file(name, dir_fd, self.path_of(name), follow=self._follow)
                try:
                    return stat_identity(os.fstat(fd))
                finally:
                    os.close(fd)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if isinstance(error, StateExchangeError):
                    raise
                raise read_error(error, "read the attributes", self.path_of(name)) from error

    def check_opened(self) -> None:
        """Raise ReplacedError if another file has the name of one that was opened here or below.

        Do nothing after `close`, as a format closes what it cannot read.
        """
        if not self._descriptors.is_open:
            return
        for name, opened in self._descriptors.identities.items():
            if self.identity_of(name) not in (opened, None):
                raise ReplacedError("replaced while the others were opened: read it again", path=self.path_of(name))

    def close(self) -> None:
        """Close all descriptors."""
        super().close()
        self._descriptors.close()


def _directory_identity(fd: int, path: str) -> tuple[int, int]:
    attributes = fstat_of(fd, path)
    return attributes.st_dev, attributes.st_ino


def _kind_of(entry: os.DirEntry[str]) -> EntryKind:
    """Return the kind of an entry. A link to a file is a "file", and so is a dangling link: opening it reports that."""
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    if not entry.is_symlink():
        return "other"
    try:
        mode = entry.stat().st_mode
    except OSError:
        return "file"  # opening it reports the error
    return "file" if stat.S_ISREG(mode) else "other"


class _BeingReplacedError(Exception):
    """A name is absent because its directory is being replaced at this moment."""


def open_local(path: str) -> tuple[LocalStore, str | None]:
    """Open the directory at a local path, or, for a file, its parent directory and the file's name.

    The caller closes the store. Raises NotFoundError, UnsafeError (neither file nor directory), StorageError.
    """
    is_absent = False
    for _ in range(_MAX_LOOKUPS):
        try:
            return _open_path(path)
        except _BeingReplacedError:
            # The second rename follows at once, unless the publisher was killed; then the new directory is listed.
            time.sleep(_LOOKUP_INTERVAL_S)
        except NotFoundError:
            # A listing that spans both renames of a replacement can lack all their names, so list once more.
            if is_absent:
                raise
            is_absent = True
    raise NotFoundError("no such path", path=local_path(path))


def _open_path(path: str) -> tuple[LocalStore, str | None]:
    path = local_path(path)
    parent, name = os.path.split(path)
    if name == "..":  # the parent of a link's target: only the kernel can resolve it
        parent, name = path, ""
    warn_of_options(path)
    audit("open directory", path)
    if not name:
        return LocalStore(path, open_directory(path), _Descriptors()), None
    parent_fd = -1
    try:
        parent_fd = open_parent(parent)
        # The name is looked up and opened relative to one descriptor, so both concern the same parent directory.
        attributes = stat_of(name, parent_fd, path, follow=True)
        if attributes is not None and stat.S_ISREG(attributes.st_mode):
            return LocalStore(parent, os.dup(parent_fd), _Descriptors()), name
        if attributes is not None and not stat.S_ISDIR(attributes.st_mode):
            raise UnsafeError("refused: not a regular file", path=path)
        shown = path
        if attributes is None:
            target = _link_target(name, parent_fd)
            if target is not None:  # what it leads to is absent, or is being replaced
                return _open_target(path, os.path.join(parent, target))
            hidden_name = replacement_of(name, parent_fd)
            if hidden_name is None:
                raise NotFoundError("no such path", path=path)
            name, shown = hidden_name, os.path.join(parent, hidden_name)
        try:
            fd = os.open(name, _FILE_FLAGS | os.O_DIRECTORY, dir_fd=parent_fd)
        except FileNotFoundError:  # it existed a moment ago
            raise _BeingReplacedError from None
        return LocalStore(shown, fd, _Descriptors()), None
    except StateExchangeError:  # of which some are OSErrors, too
        raise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise NotFoundError("no such path", path=path) from None
        raise read_error(error, "open", path) from error
    finally:
        if parent_fd >= 0:
            os.close(parent_fd)


def _link_target(name: str, dir_fd: int) -> str | None:
    """Return what a symbolic link says; None for anything else."""
    try:
        return os.readlink(name, dir_fd=dir_fd)
    except OSError:
        return None


def _open_target(path: str, target: str) -> tuple[LocalStore, str | None]:
    """Open what the link at `path` leads to."""
    try:
        return _open_path(target)
    except NotFoundError:
        raise NotFoundError(f"this link leads to {target}, which does not exist", path=path) from None


def replacement_of(name: str, dir_fd: int) -> str | None:
    """Return the hidden name of the new directory in an unfinished replacement of `name`, which is absent.

    None if `name` is not being replaced. atomic.py explains how a directory is replaced.

    Raises:
        _BeingReplacedError: the old directory is set aside, but the new one is not listed under its hidden name. Either
            it has just got `name`, or an NFS client shows a stale listing. Look up `name` again.
    """
    try:
        names = os.listdir(dir_fd)
    except OSError:  # no permission to list the directory
        return None
    hidden = hidden_entries(name, names)
    replaced = {match["nonce"] for match in hidden.values() if match["kind"] == "replaced"}
    # Both with one nonce: only then the new directory is complete, as the old one is set aside after its last write.
    for entry, match in hidden.items():
        if match["kind"] == "partial" and match["nonce"] in replaced:
            return entry
    if name in names or replaced:
        raise _BeingReplacedError
    return None
