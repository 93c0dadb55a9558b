"""The workspace: a directory through which ranks exchange tensor files, under names that are never reused.

**Names.** ``<root>/<run>/<round>/rank-00003-of-00008.<nonce>.safetensors``. The nonce makes each name unique, so no
file is ever overwritten and no reader sees a mix of two writes.

**Protocol.** Reading and writing involve no other rank. Each rank writes its file (atomic.py: the name appears only
when the file is complete), and a reader lists the directory. Each rank removes its own files when no reader needs them
any more.

**After a failure.** A failed write removes its file. A killed writer leaves a temporary file, which `sweep` removes
once the process has provably ended. A directory is removed only if it is empty, so files of other ranks are safe; a
writer whose directory is removed before its first file makes it again.

**Committed rounds.** In earlier versions root wrote ``manifest.json`` into a round at last. Such a round is read as any
other, and never swept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    UnsafeError,
    excerpt,
    without_secrets,
)
from statexchange.storage import atomic, files
from statexchange.storage.location import (
    directory_of,
    is_remote,
    open_path,
    resolve_path,
    seal,
)
from statexchange.storage.numbered_names import NumberedNames
from statexchange.storage.rank_writer import write_tensor_file
from statexchange.storage.store import Store, StoredFile
from statexchange.storage.tensorfile import SCHEMA, RankFile, ShardData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
_MANIFEST = "manifest.json"  # of a round that was committed
_ATTEMPTS = 20  # to write into a directory that other ranks keep removing while it is empty
_REMOVED = (NotFoundError, ReplacedError)  # raised for a directory that another process removes meanwhile
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_ROUNDS = NumberedNames("", 6, 18)
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})-of-([0-9]{5,9})\.[0-9a-f]{16}\.safetensors")


def is_rank_file(name: str) -> bool:
    """Whether this is the name of a rank's file."""
    return _RANK_FILE.fullmatch(name) is not None


def is_run_name(name: str) -> bool:
    """Whether this may be the name of a run's directory."""
    return _RUN.fullmatch(name) is not None


def is_round_name(name: str) -> bool:
    """Whether this is the name of a round's directory: "000012", and neither "12" nor "0000012"."""
    return _ROUNDS.number(name) is not None


@dataclass(frozen=True, slots=True)
class RankName:
    """The parsed name of a rank's file below the workspace root."""

    run: str
    round: int
    rank: int
    world_size: int
    file: str

    @property
    def relative(self) -> str:
        """Path below the root."""
        return os.path.join(self.run, _ROUNDS.name(self.round), self.file)

    @classmethod
    def new(cls, run: str, round: int, rank: int, world_size: int) -> RankName:  # noqa: A002
        """Return a new, unique name; raise UnsafeError for a run or number that cannot be part of a name."""
        file = f"rank-{rank:05d}-of-{world_size:05d}.{atomic.new_nonce()}.safetensors"
        return cls.parse(cls(run, round, rank, world_size, file).relative)

    @classmethod
    def parse(cls, relative: str) -> RankName:
        """Parse a path below the root; raise UnsafeError for any other path, which might lead out of the root."""
        parts = relative.split(os.sep)
        match = _RANK_FILE.fullmatch(parts[-1])
        if len(parts) == 3 and match is not None and _RUN.fullmatch(parts[0]) and is_round_name(parts[1]):
            rank, world_size = int(match[1]), int(match[2])
            # A number has one form: "rank-000003" would be a second name of rank 3.
            if rank < world_size and parts[2].startswith(f"rank-{rank:05d}-of-{world_size:05d}."):
                return cls(parts[0], int(parts[1]), rank, world_size, parts[2])
        raise UnsafeError(f"not the name of a rank's file: {excerpt(relative, 300)}")


class WorkspaceView:
    """A snapshot of a workspace: each directory is listed at most once and each opened file is pinned.

    Not collective. Below the root no symbolic link is followed, and a directory in which other users may write raises
    UnsafeError.

    Args:
        root: the opened root directory; closing it closes everything.

    Attributes:
        path: the root's path.
        has_changed: whether a listed directory was absent when it was opened. A new view may find other rounds.
    """

    def __init__(self, root: Store) -> None:
        self.path = root.path
        self._root = root
        self._runs: dict[str, Store] = {}
        self._rounds: dict[tuple[str, int], Store] = {}
        self.has_changed = False

    @property
    def files(self) -> list[str]:
        """Names of the files in the root, in which a workspace has none."""
        return self._root.files

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        return [name for name in self._root.directories if _RUN.fullmatch(name)]

    def rounds(self, run: str) -> list[int]:
        """Return the rounds of `run` that have a directory, oldest first; raise NotFoundError without such a run."""
        return _ROUNDS.numbers(self._run(run).directories)

    def _run(self, run: str) -> Store:
        if run not in self._runs:
            self._runs[run] = self._below(self._root, run)
        return self._runs[run]

    def _below(self, store: Store, name: str) -> Store:
        try:
            return store.below(name, private=True)
        except NotFoundError:
            self.has_changed = True
            raise

    def _round(self, run: str, number: int) -> Store:
        if (run, number) not in self._rounds:
            store = self._rounds[run, number] = self._below(self._run(run), _ROUNDS.name(number))
            # A directory that was removed has an empty listing, and another rank may have made it again since.
            self.has_changed |= not store.listing and not store.is_current()
        return self._rounds[run, number]

    def rank_names(self, run: str, round: int) -> list[RankName]:  # noqa: A002
        """Return the names of a round's complete files, in rank order; raise NotFoundError without such a round."""
        file_names = filter(is_rank_file, self._round(run, round).files)
        names = [RankName.parse(os.path.join(run, _ROUNDS.name(round), name)) for name in file_names]
        return sorted(names, key=lambda name: name.rank)

    def temporary_files(self, run: str, round: int) -> list[tuple[str, int]]:  # noqa: A002
        """Return the name and size of each incomplete file of a round; raise NotFoundError without such a round."""
        store = self._round(run, round)
        sizes = []
        for name in filter(atomic.is_temporary, store.files):
            with contextlib.suppress(*_REMOVED):  # completed or removed meanwhile
                sizes.append((name, store.open(name).size))
        return sizes

    def stored(self, name: RankName) -> StoredFile | None:
        """Return a rank's file, whose content is not checked; None if it cannot be opened."""
        try:
            return self._round(name.run, name.round).open(name.file)
        except StateExchangeError:
            return None

    def all_rounds(self, only: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield (run, round) for all rounds that have a directory, or for those of the run `only`."""
        runs = self.runs() if only is None else [only]
        for run in runs:
            with contextlib.suppress(*_REMOVED):  # removed meanwhile
                for number in self.rounds(run):
                    yield run, number

    def open(self, name: RankName) -> RankFile:
        """Open a rank's file, which is closed with the store; raise NotFoundError if it is absent."""
        try:
            file = self._round(name.run, name.round).open(name.file)
        except NotFoundError:
            path = os.path.join(self.path, name.relative)
            raise NotFoundError("this rank's file is missing", rank=name.rank, path=path) from None
        expected: dict[str, str | int] = {
            "run": name.run,
            "round": name.round,
            "rank": name.rank,
            "world_size": name.world_size,
        }
        return RankFile(file, expected)

    def was_removed(self, absent: Sequence[RankName]) -> bool:
        """Whether one of these files, which could not be opened, is not listed any more, or its round is gone."""
        # By a new listing, as this view's may be older than the removal.
        first = absent[0]
        try:
            with open_path(self.path) as opened:
                return not set(absent) <= set(WorkspaceView(opened.store).rank_names(first.run, first.round))
        except NotFoundError:
            return True


class Workspace:
    """A directory through which ranks exchange tensor files.

    Not collective: constructing, writing and reading involve no other rank. The first write makes the directory.

    Args:
        path: a local path, ``shm://name`` for a directory on tmpfs, or an fsspec URL, which can only be read.

    Example:
        >>> import numpy as np
        >>> from statexchange.sharding.shards import Box, Shard
        >>> from statexchange.storage.tensorfile import ShardData
        >>> workspace = Workspace("ws")
        >>> shard = Shard("w", "U8", (4,), (Box((0,), (4,)),))
        >>> name = workspace.write(
        ...     [ShardData(shard, (np.frombuffer(b"abcd", np.uint8),))], run="job", round=1, rank=0, world_size=1
        ... )
        >>> with workspace.open(name) as file:
        ...     bytes(file.read("w"))
        b'abcd'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        resolved = resolve_path(path, "a workspace")
        self.path = directory_of(resolved)
        self._shown = without_secrets(resolved)
        self._in_memory = resolved.startswith("shm://")

    def __repr__(self) -> str:
        return f"Workspace({self._shown!r})"

    def write(
        self,
        shards: Sequence[ShardData],
        *,
        run: str,
        round: int,  # noqa: A002 (the workspace's own word)
        rank: int,
        world_size: int,
        config: str = "null",
        extra: Mapping[str, Any] | None = None,
    ) -> RankName:
        """Write a rank's tensors and config as one new, durable file.

        Not collective.

        Args:
            shards: the rank's shards with their bytes.
            run: name of the run: letters, digits, ".", "_" and "-".
            round: number of the round.
            rank: this rank.
            world_size: number of ranks that write in this round.
            config: JSON text of `values.encode`.
            extra: further metadata of the file, as a JSON object.

        Returns:
            The name of the file, by which any rank opens it.

        Raises:
            StorageError: the write failed; nothing is left of it.
            UnsafeError: the run's directory is writable for other users.
            InvalidArgumentError: the workspace is at an fsspec URL.
        """
        name = RankName.new(run, round, rank, world_size)
        metadata = {
            **(extra or {}),
            "schema": SCHEMA,
            "run": run,
            "round": round,
            "rank": rank,
            "world_size": world_size,
            "config": config,
        }
        path = os.path.join(self.path, name.relative)
        self._retried(lambda: self._write(name, path, shards, seal(metadata)))
        return name

    def _write(self, name: RankName, path: str, shards: Sequence[ShardData], metadata: Mapping[str, Any]) -> None:
        if is_remote(self.path):
            text = "a workspace at a URL is read-only: write it in a directory and copy it here"
            raise InvalidArgumentError(text, path=self.path)
        files.make_path(self.path)
        try:
            with self._round_directories(name.run, name.round, make=True) as dir_fds:
                write_tensor_file(dir_fds[-1], name.file, path, shards, metadata)
                # Before the name is returned: its recipient may list these directories on another host.
                atomic.invalidate_listings(*dir_fds, path=self.path)
        except BaseException:
            # Nobody else removes a run that only this rank has begun.
            self._remove_empty(name.run, name.round)
            raise

    def _retried(self, write: Callable[[], None]) -> None:
        """Call `write` again if another rank has removed an empty directory that this write was about to use."""
        for _ in range(_ATTEMPTS):
            try:
                write()
                return
            except NotFoundError:
                continue
            except StorageError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
        # The last attempt, whose error counts.
        write()

    @contextlib.contextmanager
    def _round_directories(self, run: str, number: int, *, make: bool = False) -> Iterator[tuple[int, int, int]]:
        """Open root, run and round, each relative to the one before, so that no link is followed."""
        run_path = os.path.join(self.path, run)
        path = os.path.join(run_path, _ROUNDS.name(number))
        if self._in_memory:
            self._check_base()
        with contextlib.ExitStack() as opened:
            root_fd = opened.enter_context(files.directory(self.path))
            if make:
                files.make_directory(run, root_fd, run_path)
            run_fd = opened.enter_context(files.directory(run, root_fd, run_path))
            # The root may be open to others, as /tmp is, but not what this makes in it.
            files.check_private(run_fd, run_path)
            if make:
                files.make_directory(_ROUNDS.name(number), run_fd, path)
            round_fd = opened.enter_context(files.directory(_ROUNDS.name(number), run_fd, path))
            yield root_fd, run_fd, round_fd

    @contextlib.contextmanager
    def view(self) -> Iterator[WorkspaceView]:
        """Yield a view of the present workspace, which is closed after the with block.

        Raises:
            NotFoundError: the directory does not exist.
        """
        if self._in_memory:
            self._check_base()
        with open_path(self.path) as opened:
            if opened.file is not None:
                raise NotFoundError("not a directory", path=self.path)
            yield WorkspaceView(opened.store)

    def _check_base(self) -> None:
        """Raise UnsafeError if another user made the directory on tmpfs, or may write in it."""
        with files.private_directory(os.path.dirname(self.path)):
            pass

    @contextlib.contextmanager
    def open(self, name: RankName) -> Iterator[RankFile]:
        """Open a rank's file for a with block.

        Not collective.

        Args:
            name: the name of the file.

        Yields:
            The open file.

        Raises:
            NotFoundError: the file is missing; the error has its rank and path.
            CorruptError: the file's header or metadata is wrong.
        """
        with self.view() as view:
            yield view.open(name)

    def sweep(self, run: str, rank: int, before: int) -> None:
        """Remove what is of no use any more in a run.

        These are the files of `rank` in rounds before the round `before`, temporary files whose writers have provably
        ended, and directories of rounds without a file. Not collective.
        """
        with contextlib.suppress(*_REMOVED), self.view() as view:
            for number in view.rounds(run):
                with contextlib.suppress(*_REMOVED):  # another rank removes it
                    names = view.rank_names(run, number)
                    obsolete = [name for name, _ in view.temporary_files(run, number) if atomic.is_abandoned(name)]
                    if number < before:
                        obsolete += [name.file for name in names if name.rank == rank]
                    if obsolete or not names:
                        # A writer may have just made a directory without a file; it makes it again (`_retried`).
                        self._remove(run, number, obsolete)

    def next_round(self, run: str, rank: int) -> int:
        """Return the number after the newest round of `run` in which `rank` wrote. Not collective."""
        with contextlib.suppress(*_REMOVED), self.view() as view:
            for number in reversed(view.rounds(run)):
                with contextlib.suppress(*_REMOVED):  # another rank removes it
                    if any(name.rank == rank for name in view.rank_names(run, number)):
                        return number + 1
        return 1

    def remove(self, relatives: Iterable[str]) -> None:
        """Remove files by their paths below the root, then directories that this leaves empty.

        Not collective. Missing files are no error.
        """
        # All paths are parsed first: of several, one that is none of a rank's file lets nothing be removed.
        for name in list(map(RankName.parse, relatives)):
            self._remove(name.run, name.round, [name.file])

    def _remove(self, run: str, number: int, names: Sequence[str]) -> None:
        """Remove files, then directories left empty. Those of a committed round stay."""
        path = os.path.join(self.path, run, _ROUNDS.name(number))
        try:
            with self._round_directories(run, number) as dir_fds:
                if files.stat_of(_MANIFEST, dir_fds[-1], path) is not None:
                    return
                for name in names:
                    files.remove_file(name, os.path.join(path, name), dir_fds[-1])
        except _REMOVED:
            return
        # The rank that removes its file last finds them empty.
        self._remove_empty(run, number)

    def _remove_empty(self, run: str, number: int) -> None:
        """Remove the directories of a round and its run if they are empty; on NFS an open file keeps them too."""
        run_path = os.path.join(self.path, run)
        with contextlib.suppress(NotFoundError, StorageError, UnsafeError), files.directory(self.path) as root_fd:
            with files.directory(run, root_fd, run_path) as run_fd:
                name = _ROUNDS.name(number)
                files.remove_directory(name, run_fd, os.path.join(run_path, name))
            empty = files.remove_directory(run, root_fd, run_path)
            # On tmpfs what stays takes memory until the host is booted; on a disk the root is the caller's directory.
            if empty and self._in_memory:
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
                    os.rmdir(os.path.dirname(self.path))
