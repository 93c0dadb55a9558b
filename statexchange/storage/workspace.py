"""The workspace: a directory in which ranks leave tensor files for each other, under names never used twice.

``<root>/<run>/<round>/rank-00003-of-00008.<nonce>.safetensors``. Reading and writing involve no collective
and no barrier. A writer who has a communicator sends the receipt through it and, when every rank has written,
commits the round with a manifest; who has none finds files by listing the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
    excerpt,
    without_secrets,
)
from statexchange.processes import Owner
from statexchange.settings import check_timeout
from statexchange.sharding.shards import Box, Shard, sizes_from_json
from statexchange.storage import atomic, files
from statexchange.storage.json_text import parse_json
from statexchange.storage.local import local_path
from statexchange.storage.mounts import mount_of
from statexchange.storage.opened_path import OpenedPath, open_path
from statexchange.storage.store import Store, StoredFile, resolve_path, is_url
from statexchange.storage.tensorfile import Header, ShardData, digest, read_header, storage_form, write_tensor_file
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
__all__ = [
    "Manifest",
    "RankFile",
    "RankName",
    "Receipt",
    "Workspace",
    "WorkspaceView",
    "is_rank_file",
    "is_round_name",
    "is_run_name",
]

_log = logging.getLogger(__name__)
SCHEMA = 1
MANIFEST = "manifest.json"
DROPPED = "dropped.json"  # the manifest of a round that is being removed
_ATTEMPTS = 20
_REMOVED = (NotFoundError, ReplacedError)  # what a look gets at a directory that another process removes meanwhile
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_ROUND = re.compile(r"[0-9]{6,18}")
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})-of-([0-9]{5,9})\.[0-9a-f]{16}\.safetensors")


def is_rank_file(name: str) -> bool:
    """Whether a file's name is that of a rank's file."""
    return _RANK_FILE.fullmatch(name) is not None


def is_run_name(name: str) -> bool:
    """Whether a directory's name may be that of a run."""
    return _RUN.fullmatch(name) is not None


def is_round_name(name: str) -> bool:
    """Whether a directory's name is that of a round."""
    return _ROUND.fullmatch(name) is not None and f"{int(name):06d}" == name


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
        return os.path.join(self.run, f"{self.round:06d}", self.file)

    @property
    def rank_name(self) -> RankName:
        """The name itself, as of a `Receipt`."""
        return self

    @classmethod
    def new(cls, run: str, round: int, rank: int, world_size: int) -> RankName:  # noqa: A002
        """A name that nobody has used; parts that cannot be part of a name are an UnsafeError."""
        file = f"rank-{rank:05d}-of-{world_size:05d}.{atomic.new_nonce()}.safetensors"
        return cls.parse(cls(run, round, rank, world_size, file).relative)

    @classmethod
    def parse(cls, relative: str) -> RankName:
        """The parts of a path below the root; anything else, which may lead elsewhere, is an UnsafeError."""
        parts = relative.split(os.sep)
        match = _RANK_FILE.fullmatch(parts[-1])
        if len(parts) != 3 or match is None or not _RUN.fullmatch(parts[0]) or not is_round_name(parts[1]):
            raise UnsafeError(f"not the name of a rank's file: {excerpt(relative, 300)}")
        rank, world_size = int(match[1]), int(match[2])
        if rank >= world_size or not parts[2].startswith(f"rank-{rank:05d}-of-{world_size:05d}."):
            raise UnsafeError(f"not the name of a rank's file: {excerpt(relative, 300)}")
        return cls(parts[0], int(parts[1]), rank, world_size, parts[2])


@dataclass(frozen=True, slots=True)
class Receipt:
    """A durable rank file: its path below the root and its size in bytes."""

    relative: str
    nbytes: int

    @property
    def rank_name(self) -> RankName:
        """The parsed name of the file; UnsafeError if `relative` is not the name of a rank's file."""
        return RankName.parse(self.relative)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed round: every file of it. `generation` grows with each commit in the workspace."""

    run: str
    round: int
    generation: int
    world_size: int
    receipts: tuple[Receipt, ...]
    extra: Mapping[str, Any]


class WorkspaceView:
    """A workspace as it lies at one moment: each directory is listed at most once, each file that is opened is pinned.

    Not collective. `root` is its directory; below it no symbolic link is followed, and a run's directory in which
    others may write is refused (UnsafeError). Closing `root` closes all. `has_changed` says that something which one
    directory listed was gone, or half dropped, when it was looked at: another look may find other rounds.
    """

    def __init__(self, root: Store) -> None:
        self.path = root.path
        self._root = root
        self._runs: dict[str, Store] = {}
        self._rounds: dict[tuple[str, int], Store] = {}
        self.has_changed = False

    def runs(self) -> list[str]:
        """Return the runs that left something here, in the order of their names."""
        return [name for name in self._root.directories if _RUN.fullmatch(name)]

    def rounds(self, run: str) -> list[int]:
        """Return the rounds of `run` that have a directory, oldest first; NotFoundError if there is no such run."""
        return sorted(int(name) for name in self._run(run).directories if is_round_name(name))

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
            store = self._rounds[run, number] = self._below(self._run(run), f"{number:06d}")
            self.has_changed |= DROPPED in store.listing or (not store.listing and not store.is_current())
        return self._rounds[run, number]

    def rank_names(self, run: str, round: int) -> list[RankName]:  # noqa: A002
        """Return the names of the whole files of a round, in rank order; NotFoundError if there is no such round."""
        found = filter(is_rank_file, self._round(run, round).files)
        names = [RankName.parse(os.path.join(run, f"{round:06d}", name)) for name in found]
        return sorted(names, key=lambda name: name.rank)

    def manifest(self, run: str, round: int) -> Manifest:  # noqa: A002
        """Return the manifest of a round; NotFoundError if it is not committed, or no more."""
        store = self._round(run, round)
        if MANIFEST not in store.listing:
            dropped = DROPPED in store.listing
            raise NotFoundError("this round was dropped" if dropped else "this round is not committed", path=store.path)
        return _manifest_in(store, MANIFEST, run, round)

    def dropped(self, run: str) -> list[Manifest]:
        """Return the manifests of rounds that are being dropped, or were left so by a process that was killed."""
        found = []
        for number in self.rounds(run):
            with contextlib.suppress(*_REMOVED, CorruptError):  # removed meanwhile, or nothing to go by
                store = self._round(run, number)
                if DROPPED in store.listing:
                    found.append(_manifest_in(store, DROPPED, run, number))
        return found

    def abandoned(self, run: str, round: int) -> list[str]:  # noqa: A002
        """Return the names of files in a round whose writers have provably ended before the round was committed.

        While one writer of a round may still run, the round may still be committed: then none of its files counts.
        """
        try:
            names = self._round(run, round).files
            temporary = [name for name in names if atomic.is_abandoned(name)]
            if MANIFEST in names or DROPPED in names:
                return temporary
            written = self.rank_names(run, round)
            dead = all(_is_dead(self.open(name).metadata.get("pending")) for name in written)
        except StateExchangeError:  # removed meanwhile, or nothing to go by
            return []
        return [*temporary, *(name.file for name in written if dead)]

    def all_abandoned(self, rounds: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those of `rounds` (run, round) in which there is something that was abandoned, or nothing at all."""
        return [one for one in rounds if self.abandoned(*one) or self._is_empty(*one)]

    def _is_empty(self, run: str, number: int) -> bool:
        try:
            return not self._round(run, number).listing
        except StateExchangeError:  # removed meanwhile, or not to be looked into
            return False

    def readable_manifests(self) -> list[Manifest]:
        """Return the committed rounds, oldest first, without those whose manifest is broken: a reader must see that."""
        found = []
        for run, number in self.all_rounds():
            with contextlib.suppress(*_REMOVED, CorruptError, UnsafeError):
                found.append(self.manifest(run, number))
        return sorted(found, key=_age)

    def all_rounds(self, only: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield (run, round) of all rounds that have a directory, or of those of the run `only`."""
        for run in self.runs() if only is None else [only]:
            with contextlib.suppress(*_REMOVED):  # removed meanwhile
                yield from ((run, number) for number in self.rounds(run))

    def manifests(self, rounds: Iterable[tuple[str, int]]) -> list[Manifest]:
        """Return the manifests of those of `rounds` (run, round) that are committed, oldest first."""
        found = []
        for run, number in rounds:
            with contextlib.suppress(NotFoundError):  # not committed, or dropped meanwhile
                found.append(self.manifest(run, number))
        return sorted(found, key=_age)

    def open(self, receipt: Receipt | RankName, *, owner: OpenedPath | None = None) -> RankFile:
        """Open a rank's file; NotFoundError if it is not there. Closing the file closes `owner`."""
        name = receipt.rank_name
        try:
            file = self._round(name.run, name.round).open(name.file)
        except NotFoundError:
            path = os.path.join(self.path, name.relative)
            raise NotFoundError("this rank's file is missing", rank=name.rank, path=path) from None
        return RankFile(file, name, receipt.nbytes if isinstance(receipt, Receipt) else None, owner=owner)

    def was_dropped(self, absent: Sequence[Receipt | RankName]) -> bool:
        """Whether the round of files that are not there has been dropped since this view was made: its manifest is
        gone, or, of files that no manifest lists, one of their names."""
        first = absent[0].rank_name
        try:
            with open_path(self.path) as opened:
                now = WorkspaceView(opened.store)
                if isinstance(absent[0], Receipt):
                    return not set(absent) <= set(now.manifest(first.run, first.round).receipts)
                return not set(absent) <= set(now.rank_names(first.run, first.round))
        except NotFoundError:
            return True


class Workspace:
    """A directory, or ``shm://name``, in which ranks exchange tensor files; at an fsspec URL one that is only read.

    Not collective: constructing, writing and reading involve no other rank. The directory is made by the
    first write.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._given = resolve_path(path, "a workspace")
        self.path = self._given.rstrip("/") if is_url(self._given) else local_path(self._given)
        self._in_memory = self._given.startswith("shm://")
        self._durable: bool | None = None

    def __repr__(self) -> str:
        return f"Workspace({without_secrets(self._given)!r})"

    def write(
        self,
        held: Sequence[ShardData],
        *,
        run: str,
        round: int,  # noqa: A002 (the workspace's own word)
        rank: int,
        world_size: int,
        config: str = "null",
        extra: Mapping[str, Any] | None = None,
        pending: bool = False,
    ) -> Receipt:
        """Write `rank`'s tensors and config (JSON text of `values.encode`) as one new, durable file.

        Not collective. A `pending` file counts only once its round is committed, or while its writer runs: `sweep`
        removes it when the writer has ended before. Raises StorageError with path and errno; nothing is left of a write
        that failed.
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
            **({"pending": Owner.current().to_json()} if pending else {}),
        }
        path = os.path.join(self.path, name.relative)
        nbytes = self._retried(lambda: self._write(name, path, held, metadata))
        return Receipt(name.relative, nbytes)

    def _write(self, name: RankName, path: str, held: Sequence[ShardData], metadata: Mapping[str, Any]) -> int:
        if is_url(self._given):
            text = "ranks write a workspace into a directory, which may be copied here"
            raise InvalidArgumentError(text, path=self.path)
        files.make_path(self.path)
        try:
            with self._round_directories(name.run, name.round, make=True) as dir_fds:
                nbytes = write_tensor_file(dir_fds[-1], name.file, path, held, metadata, durable=self.durable)
                atomic.invalidate_listings(*dir_fds, path=self.path)
                return nbytes
        except BaseException:
            self._remove_empty(name.run, name.round)
            raise

    def _retried(self, write: Callable[[], int]) -> int:
        """Another rank may remove a directory that it leaves empty just when we are about to use it."""
        for _ in range(_ATTEMPTS):
            try:
                return write()
            except NotFoundError:
                continue
            except StorageError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
        return write()

    @property
    def durable(self) -> bool:
        """Whether writes are synced: not on tmpfs."""
        if self._durable is None:
            self._durable = not mount_of(self.path).is_memory
        return self._durable

    @contextlib.contextmanager
    def _round_directories(self, run: str, number: int, *, make: bool = False) -> Iterator[tuple[int, int, int]]:
        """Open root, run and round, each in the one before, so that no link leads elsewhere."""
        run_path = os.path.join(self.path, run)
        path = os.path.join(run_path, f"{number:06d}")
        if self._in_memory:
            self._check_base()
        with contextlib.ExitStack() as opened:
            root_fd = opened.enter_context(files.directory(self.path))
            if make:
                files.make_directory(run, root_fd, run_path)
            run_fd = opened.enter_context(files.directory(run, root_fd, run_path))
            files.check_private(run_fd, run_path)
            if make:
                files.make_directory(f"{number:06d}", run_fd, path)
            round_fd = opened.enter_context(files.directory(f"{number:06d}", run_fd, path))
            yield root_fd, run_fd, round_fd

    @contextlib.contextmanager
    def view(self) -> Iterator[WorkspaceView]:
        """A look at the workspace as it lies now, for a with block; NotFoundError if there is none."""
        with self._open() as opened:
            yield WorkspaceView(opened.store)

    def _open(self) -> OpenedPath:
        if self._in_memory:
            self._check_base()
        opened = open_path(self.path)
        if opened.file is not None:
            opened.close()
            raise NotFoundError("not a directory", path=self.path)
        return opened

    def _check_base(self) -> None:
        """Refuse a directory on tmpfs that somebody else could have made, or may write in."""
        base = os.path.dirname(self.path)
        with files.directory(base) as base_fd:
            files.check_private(base_fd, base)

    def open(self, receipt: Receipt | RankName, *, timeout_s: float = 0.0) -> RankFile:
        """Open a rank's file; close it, or use it in a with block. Not collective.

        A file that is not there yet is looked for until `timeout_s` has passed, each time through freshly opened
        directories, then it is a NotFoundError naming rank and path.
        """
        deadline = time.monotonic() + check_timeout(timeout_s, zero=True)
        while True:
            opened = None
            try:
                opened = self._open()
                return WorkspaceView(opened.store).open(receipt, owner=opened)
            except BaseException as error:
                if opened is not None:
                    opened.close()
                gone = isinstance(error, NotFoundError | ReplacedError)
                if not gone or time.monotonic() >= deadline:
                    if isinstance(error, NotFoundError) and error.rank is None:
                        name = receipt.rank_name
                        raise NotFoundError(
                            "this rank's file is missing", rank=name.rank, path=os.path.join(self.path, name.relative)
                        ) from None
                    raise
            time.sleep(0.05)

    def commit(self, receipts: Sequence[Receipt], *, keep: int, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Make a round count: write its manifest, then drop all but this run's newest `keep` rounds. Root only.

        `receipts` are those of all ranks, in rank order. What other runs have committed is theirs and stays. A
        round that cannot be dropped stays, with a warning.

        Raises:
            InvalidArgumentError: receipts of different rounds, or not one per rank in rank order.
            TargetExistsError: the round is already committed.
            StorageError.
        """
        names = [receipt.rank_name for receipt in receipts]
        if keep < 1 or not names or not _is_whole(names):
            raise InvalidArgumentError(
                "commit needs exactly one receipt per rank, in rank order, all of one round, and keep >= 1"
            )
        first = names[0]
        with self.view() as view:
            older = view.readable_manifests()
            half_dropped = view.dropped(first.run)
            abandoned = view.all_abandoned(view.all_rounds())
        generation = max((m.generation for m in older), default=0) + 1
        manifest = Manifest(first.run, first.round, generation, first.world_size, tuple(receipts), dict(extra or {}))
        text = _manifest_text(manifest)
        path = os.path.join(self.path, first.run, f"{first.round:06d}", MANIFEST)
        with self._round_directories(first.run, first.round) as dir_fds:
            atomic.write_new(dir_fds[-1], MANIFEST, [text], nbytes=len(text), path=path, durable=self.durable)
            atomic.invalidate_listings(*dir_fds, path=self.path)
        for old in [m for m in [*older, manifest] if m.run == first.run][:-keep]:
            self._drop(old)
        for old in half_dropped:
            self._drop(old)
        self._sweep(abandoned)
        return manifest

    def sweep(self, only: str | None = None) -> None:
        """Remove what processes that have provably ended left here, or in the run `only`: temporary files, files that
        they had written for a round that was never committed, and directories of rounds that are empty. Not
        collective."""
        try:
            with self.view() as view:
                abandoned = view.all_abandoned(view.all_rounds(only))
        except _REMOVED:
            return
        self._sweep(abandoned)

    def _sweep(self, rounds: Iterable[tuple[str, int]]) -> None:
        """Remove what was abandoned in these rounds, unless another look shows that a round was committed meanwhile.

        Its writers had ended by the first look, so nobody can commit it after the second. Of a directory that was
        empty nothing is known: a writer that has just made it makes it again (`_retried`).
        """
        for run, number in rounds:
            try:
                with self.view() as view:
                    names = view.abandoned(run, number)
            except _REMOVED:
                return
            if names:
                self._remove(run, number, names)
            else:
                self._remove_empty(run, number)

    def rounds(self, run: str) -> list[int]:
        """Return the rounds of `run` that have a directory, oldest first."""
        with self.view() as view:
            return view.rounds(run)

    def rank_names(self, run: str, round: int) -> list[RankName]:  # noqa: A002
        """Return the names of the whole files of a round, in rank order."""
        with self.view() as view:
            return view.rank_names(run, round)

    def manifest(self, run: str, round: int) -> Manifest:  # noqa: A002
        """Return the manifest of one round; NotFoundError if it is not committed."""
        with self.view() as view:
            return view.manifest(run, round)

    def next_round(self, run: str, rank: int | None = None) -> int:
        """Return the number after the newest round of `run`, or after the newest in which `rank` wrote."""
        try:
            with self.view() as view:
                rounds = view.rounds(run)
                if rank is not None:
                    rounds = [number for number in rounds if _has_written(view, run, number, rank)]
        except NotFoundError:
            return 1
        return max(rounds, default=0) + 1

    def remove(self, relatives: Iterable[str]) -> None:
        """Remove files by name, then directories that this leaves empty. What is gone already is no error.

        Files of a committed round stay: they go when `commit` drops it.
        """
        for name in [RankName.parse(relative) for relative in relatives]:
            try:
                committed = self.manifest(name.run, name.round).receipts
            except NotFoundError:
                committed = ()
            if name.relative not in {receipt.relative for receipt in committed}:
                self._remove(name.run, name.round, [name.file])

    def remove_uncommitted(self, run: str) -> None:
        """Remove what a run has left in rounds that it has not committed. For when no rank of it writes any more."""
        try:
            with self.view() as view:
                found = [name for number in view.rounds(run) for name in _uncommitted(view, run, number)]
        except NotFoundError:
            return
        self.remove(name.relative for name in found)

    def _drop(self, manifest: Manifest) -> None:
        """Remove a committed round.

        It is un-committed first: its manifest is renamed, from when on no reader takes the round. The files that it
        lists follow, the renamed manifest last: after an interrupted drop the next commit finds it and goes on.
        """
        run, number = manifest.run, manifest.round
        path = os.path.join(self.path, run, f"{number:06d}")
        try:
            with self._round_directories(run, number) as dir_fds:
                names = files.list_names(dir_fds[-1], path)
                if MANIFEST in names:
                    atomic.rename_new(MANIFEST, DROPPED, dir_fd=dir_fds[-1], path=os.path.join(path, DROPPED))
                    files.sync_directory(dir_fds[-1], path)
            listed = [os.path.basename(receipt.relative) for receipt in manifest.receipts]
            self._remove(run, number, [*filter(atomic.is_temporary, names), *listed, DROPPED])
        except NotFoundError:
            return
        except (StorageError, TargetExistsError, UnsafeError) as error:
            _log.warning("an old round stays: %s", error)

    def _remove(self, run: str, number: int, names: Sequence[str]) -> None:
        """Remove files, then directories left empty."""
        path = os.path.join(self.path, run, f"{number:06d}")
        try:
            with self._round_directories(run, number) as dir_fds:
                for name in names:
                    files.remove_file(name, os.path.join(path, name), dir_fds[-1])
        except _REMOVED:
            return
        self._remove_empty(run, number)

    def _remove_empty(self, run: str, number: int) -> None:
        """Remove the directories of a round and its run where they are empty: another rank's file keeps them, and so
        does on NFS a file that is open."""
        run_path = os.path.join(self.path, run)
        with contextlib.suppress(NotFoundError, StorageError, UnsafeError), files.directory(self.path) as root_fd:
            with files.directory(run, root_fd, run_path) as run_fd:
                name = f"{number:06d}"
                files.remove_directory(name, run_fd, os.path.join(run_path, name))
            empty = files.remove_directory(run, root_fd, run_path)
            if empty and self._in_memory:
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
                    os.rmdir(os.path.dirname(self.path))


def _is_dead(pending: Any) -> bool:
    """Whether the writer of a pending file, by its record in the file, has provably ended."""
    try:
        return pending is not None and Owner.from_json(pending).is_dead
    except ValueError:
        return False


def _uncommitted(view: WorkspaceView, run: str, number: int) -> list[RankName]:
    try:
        view.manifest(run, number)
    except NotFoundError:
        with contextlib.suppress(NotFoundError):  # removed meanwhile
            return view.rank_names(run, number)
    return []


def _has_written(view: WorkspaceView, run: str, number: int, rank: int) -> bool:
    try:
        return any(name.rank == rank for name in view.rank_names(run, number))
    except _REMOVED:
        return False


def _age(manifest: Manifest) -> tuple[int, str, int]:
    """Two writers who committed at once may have taken one generation; then all must agree on some order."""
    return manifest.generation, manifest.run, manifest.round


def _is_whole(names: Sequence[RankName]) -> bool:
    first = names[0]
    same = {(name.run, name.round, name.world_size) for name in names} == {(first.run, first.round, first.world_size)}
    return same and len(names) == first.world_size and all(name.rank == n for n, name in enumerate(names))


def _manifest_text(manifest: Manifest) -> bytes:
    record = {
        "schema": SCHEMA,
        "run": manifest.run,
        "round": manifest.round,
        "generation": manifest.generation,
        "world_size": manifest.world_size,
        "files": [[os.path.basename(r.relative), r.nbytes] for r in manifest.receipts],
        "extra": dict(manifest.extra),
    }
    return json.dumps({**record, "digest": _digest_of(record)}, indent=1).encode()


def _digest_of(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


def _manifest_in(store: Store, name: str, run: str, number: int) -> Manifest:
    path = store.path_of(name)
    try:
        return _parse_manifest(parse_json(store.read_small(name), path), run, number)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, StateExchangeError):
            raise
        raise CorruptError(f"broken manifest: {error}", path=path) from None


def _parse_manifest(raw: Any, run: str, number: int) -> Manifest:
    """The manifest of a round from parsed JSON; one that contradicts itself or the round is a ValueError."""
    if not isinstance(raw, dict) or raw.pop("digest") != _digest_of(raw):
        raise ValueError("it differs from its own digest")
    files = [(name, size) for name, size in raw["files"]]
    if any(type(name) is not str or type(size) is not int or size < 0 for name, size in files):
        raise ValueError("its files are not listed by name and size")
    receipts = tuple(Receipt(os.path.join(run, f"{number:06d}", name), size) for name, size in files)
    names = [receipt.rank_name for receipt in receipts]
    known = [raw["schema"], raw["run"], raw["round"], type(raw["generation"])] == [SCHEMA, run, number, int]
    known = known and isinstance(raw["extra"], dict)
    if not known or not names or not _is_whole(names) or raw["world_size"] != names[0].world_size:
        raise ValueError("it is of another schema or round, or does not list all ranks")
    return Manifest(run, number, raw["generation"], raw["world_size"], receipts, raw["extra"])


class RankFile:
    """One rank's open file: its metadata, shards and digests, and their bytes on demand. A context manager.

    close() closes `owner` if given; a file from `WorkspaceView.open` is closed with the view.
    """

    def __init__(
        self, file: StoredFile, name: RankName, size: int | None = None, *, owner: OpenedPath | None = None
    ) -> None:
        self.file = file
        self.path = path = file.path
        self._owner = owner
        self.header: Header = read_header(file)
        if size is not None and self.header.nbytes != size:
            raise CorruptError(
                "size differs from its receipt",
                path=path,
                rank=name.rank,
                expected=size,
                found=self.header.nbytes,
            )
        metadata = self.header.workspace_metadata(path)
        if metadata is None:
            raise CorruptError("no file of a statexchange workspace", path=path)
        if metadata.get("schema") != SCHEMA:
            raise CorruptError(
                "its metadata is of another version", path=path, expected=SCHEMA, found=metadata.get("schema")
            )
        self.metadata = metadata
        self.config = metadata.get("config", "null")
        """The config as JSON text for `values.decode`."""
        if not isinstance(self.config, str):
            raise CorruptError("its config is no text", path=path, rank=name.rank)
        self.shards, self.digests = _shards(self.header, metadata, path)
        for key, expected in (
            ("run", name.run),
            ("round", name.round),
            ("rank", name.rank),
            ("world_size", name.world_size),
        ):
            if metadata.get(key) != expected:
                raise CorruptError(
                    f"its metadata names another {key}",
                    path=path,
                    rank=name.rank,
                    expected=expected,
                    found=metadata.get(key),
                )

    def byte_ranges(self, name: str) -> list[tuple[int, int]]:
        """First byte in the file, and number of bytes, of each box of a tensor."""
        shard = self.shards[name]
        sizes = [box.numel * ITEMSIZE[shard.dtype] for box in shard.boxes]
        return list(zip(accumulate(sizes, initial=self.header.entries[name].begin), sizes, strict=False))

    def read(self, name: str) -> bytearray:
        """A tensor's bytes in a buffer of its own; bytes that contradict their digest are a CorruptError."""
        entry = self.header.entries[name]
        data = bytearray(entry.nbytes)
        view = memoryview(data)
        self.file.read_into(view, entry.begin)
        for expected, (begin, nbytes) in zip(self.digests[name], self.byte_ranges(name), strict=True):
            found = digest(view[begin - entry.begin :][:nbytes])
            if found != expected:
                self.file.check_unchanged()  # what was changed while it was read is no corruption
                raise CorruptError(
                    "bytes differ from their digest",
                    path=self.path,
                    name=name,
                    rank=self.metadata["rank"],
                    expected=expected,
                    found=found,
                )
        return data

    def close(self) -> None:
        """Close what the file owns."""
        if self._owner is not None:
            self._owner.close()

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _shards(header: Header, metadata: dict[str, Any], path: str) -> tuple[dict[str, Shard], dict[str, tuple[str, ...]]]:
    tensors = metadata.get("tensors")
    if header.unknown:
        entry = next(iter(header.unknown.values()))
        raise CorruptError(f"unknown dtype {entry.dtype}", path=path, name=entry.name)
    if not isinstance(tensors, dict) or tensors.keys() != header.entries.keys():
        raise CorruptError("metadata and header list different tensors", path=path)
    shards, digests = {}, {}
    for name, raw in tensors.items():
        try:
            boxes = tuple(Box.from_json(box) for box in raw["boxes"])
            shard = Shard(name, raw["dtype"], sizes_from_json(raw["global_shape"]), boxes)
            kept = tuple(str(known) for known in raw["digests"])
            entry = header.entries[name]
            fits = storage_form(shard.dtype, shard.local_shape) == (entry.dtype, entry.shape) and len(kept) == len(boxes)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken metadata: {error}", path=path, name=name) from None
        if not fits:
            raise CorruptError("metadata does not fit the header", path=path, name=name)
        shards[name], digests[name] = shard, kept
    return shards, digests
