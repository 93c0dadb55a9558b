"""The workspace: a directory in which ranks leave tensor files for each other, under names never used twice.

``<root>/<run>/<round>/rank-00003-of-00008.<nonce>.safetensors``. Reading and writing involve no collective and no
barrier. A writer who has a communicator sends the receipt through it and, when every rank has written, commits the
round with a manifest; who has none finds files by listing the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsafeError,
)
from statexchange.layout.shards import ITEMSIZE, Box, Shard
from statexchange.storage import files
from statexchange.storage.tensorfile import Header, Held, digest, read_header, write_tensor_file

__all__ = ["Manifest", "RankFile", "RankName", "Receipt", "Workspace", "local_path"]

SCHEMA = 1
MANIFEST = "manifest.json"
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_ROUND = re.compile(r"[0-9]{6,}")
_RANK_FILE = re.compile(r"rank-([0-9]{5,})-of-([0-9]{5,})\.([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True, slots=True)
class RankName:
    """Where a rank's file lies below the workspace's root."""

    run: str
    round: int
    rank: int
    world_size: int
    file: str

    @property
    def relative(self) -> str:
        """Path below the root."""
        return os.path.join(self.run, f"{self.round:06d}", self.file)

    @classmethod
    def parse(cls, relative: str) -> RankName:
        """The parts of a path below the root; anything else is an UnsafeError, so that it cannot lead elsewhere."""
        parts = relative.split(os.sep)
        match = _RANK_FILE.fullmatch(parts[-1])
        if len(parts) != 3 or match is None or not _RUN.fullmatch(parts[0]) or not _ROUND.fullmatch(parts[1]):
            raise UnsafeError(f"not the name of a rank's file: {relative!r}")
        return cls(parts[0], int(parts[1]), int(match[1]), int(match[2]), parts[2])


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a writer tells of a file that is durable: its name below the root, and its size in bytes."""

    relative: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed round: every file of it. `generation` grows with each commit in the workspace."""

    run: str
    round: int
    generation: int
    world_size: int
    receipts: tuple[Receipt, ...]
    extra: Mapping[str, Any]


def local_path(url: str) -> str:
    """The directory that a workspace URL means: a path, or ``shm://name`` for one on tmpfs."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return os.path.abspath(url)
    if scheme == "shm":
        if not _RUN.fullmatch(rest):
            raise InvalidArgumentError(f"shm:// wants a plain name, not {rest!r}")
        return f"/dev/shm/statexchange-{os.getuid()}/{rest}"  # noqa: S108 (0700, owner checked on use)
    raise InvalidArgumentError(f"a workspace lies in a directory or at shm://name; {scheme}:// is not supported")


class Workspace:
    """A directory, or ``shm://name``, in which ranks exchange tensor files.

    Not collective: constructing, writing and reading involve no other rank. The directory is made by the first write.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        self.path = local_path(self.url)
        self._durable: bool | None = None

    def __repr__(self) -> str:
        return f"Workspace({self.url!r})"

    def write(
        self,
        held: Sequence[Held],
        *,
        run: str,
        round: int,  # noqa: A002 (the workspace's own word)
        rank: int,
        world_size: int,
        config: str = "null",
        extra: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Write `rank`'s tensors and config (JSON text of `values.encode`) as one new, durable file.

        Not collective. Raises StorageError with path and errno; nothing is left of a write that failed.
        """
        name = RankName(run, round, rank, world_size, f"rank-{rank:05d}-of-{world_size:05d}.{files.new_nonce()}.safetensors")
        RankName.parse(name.relative)
        facts = {
            "schema": SCHEMA,
            "run": run,
            "round": round,
            "rank": rank,
            "world_size": world_size,
            "config": config,
            **(extra or {}),
        }
        directory = self._make_round(name)
        with files.directory(directory) as dir_fd:
            path = os.path.join(directory, name.file)
            nbytes = write_tensor_file(dir_fd, name.file, path, held, facts, durable=self.durable)
        return Receipt(name.relative, nbytes)

    @property
    def durable(self) -> bool:
        """Whether writes are synced: not on tmpfs."""
        if self._durable is None:
            self._durable = not files.filesystem_is_memory(self.path)
        return self._durable

    def _make_round(self, name: RankName) -> str:
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError.of(error, "make the workspace", path=self.path) from error
        with files.directory(self.path) as root:
            files.make_directory(name.run, root)
            with files.directory(name.run, root) as run:
                if os.fstat(run).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    raise UnsafeError("others may write in this run's directory", path=os.path.join(self.path, name.run))
                files.make_directory(f"{name.round:06d}", run)
        return os.path.join(self.path, name.run, f"{name.round:06d}")

    def runs(self) -> list[str]:
        """Runs that left something here."""
        return [name for name in files.list_directory(self.path) if _RUN.fullmatch(name) and self._is_directory(name)]

    def _is_directory(self, *parts: str) -> bool:
        return os.path.isdir(os.path.join(self.path, *parts))

    def rounds(self, run: str) -> list[int]:
        """Rounds of `run` that have a directory, oldest first."""
        return sorted(int(n) for n in files.list_directory(os.path.join(self.path, run)) if _ROUND.fullmatch(n))

    def rank_names(self, run: str, round: int) -> list[RankName]:  # noqa: A002
        """Whole files of a round, in rank order."""
        directory = os.path.join(self.path, run, f"{round:06d}")
        names = [name for name in files.list_directory(directory) if _RANK_FILE.fullmatch(name)]
        return [RankName.parse(os.path.join(run, f"{round:06d}", name)) for name in names]

    def open(self, receipt: Receipt | RankName, *, timeout_s: float = 0.0) -> RankFile:
        """Open a rank's file; close it, or use it in a with block. Not collective.

        A file that is not there yet is looked for until `timeout_s` has passed, each time through a freshly opened
        directory, then it is a NotFoundError naming rank and path.
        """
        name = receipt if isinstance(receipt, RankName) else RankName.parse(receipt.relative)
        size = receipt.nbytes if isinstance(receipt, Receipt) else None
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._open(name, size)
            except (NotFoundError, StorageError) as error:
                stale = isinstance(error, NotFoundError) or error.errno == errno.ESTALE
                if not stale or time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    def _open(self, name: RankName, size: int | None) -> RankFile:
        path = os.path.join(self.path, name.relative)
        try:
            with files.directory(os.path.dirname(path)) as dir_fd:
                fd = files.open_file(name.file, dir_fd)
        except NotFoundError:
            raise NotFoundError("this rank's file is missing", rank=name.rank, path=path) from None
        try:
            return RankFile(fd, path, name, size)
        except BaseException:
            os.close(fd)
            raise

    def commit(self, receipts: Sequence[Receipt], *, keep: int, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Make a round count: write its manifest, then drop all but the newest `keep` committed rounds. Root only."""
        names = [RankName.parse(receipt.relative) for receipt in receipts]
        first = names[0]
        generation = max((m.generation for m in self.manifests()), default=0) + 1
        manifest = Manifest(first.run, first.round, generation, first.world_size, tuple(receipts), extra or {})
        record = {
            "schema": SCHEMA,
            "run": manifest.run,
            "round": manifest.round,
            "generation": generation,
            "world_size": manifest.world_size,
            "files": [[os.path.basename(r.relative), r.nbytes] for r in receipts],
            "extra": dict(manifest.extra),
        }
        directory = os.path.join(self.path, first.run, f"{first.round:06d}")
        text = json.dumps(record, indent=1).encode()
        path = os.path.join(directory, MANIFEST)
        with files.directory(directory) as dir_fd:
            files.write_new(dir_fd, MANIFEST, [text], nbytes=len(text), path=path, durable=self.durable)
        for old in sorted(self.manifests(), key=lambda m: m.generation)[:-keep]:
            self.remove([receipt.relative for receipt in old.receipts], manifest=True)
        return manifest

    def manifests(self) -> list[Manifest]:
        """Committed rounds of all runs, oldest first."""
        found = []
        for run in self.runs():
            for number in self.rounds(run):
                with contextlib.suppress(NotFoundError):
                    found.append(self.manifest(run, number))
        return sorted(found, key=lambda m: m.generation)

    def manifest(self, run: str, round: int) -> Manifest:  # noqa: A002
        """The manifest of one round; NotFoundError if it was not committed."""
        directory = os.path.join(self.path, run, f"{round:06d}")
        path = os.path.join(directory, MANIFEST)
        raw = files.parse_json(files.read_small(path), path)
        try:
            assert isinstance(raw, dict)
            receipts = tuple(Receipt(os.path.join(run, f"{round:06d}", name), int(size)) for name, size in raw["files"])
            for receipt in receipts:
                RankName.parse(receipt.relative)
            return Manifest(run, round, int(raw["generation"]), int(raw["world_size"]), receipts, raw["extra"])
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken manifest: {error}", path=path) from None

    def next_round(self, run: str, rank: int | None = None) -> int:
        """The number after the newest round of `run`, or after the newest in which `rank` wrote."""
        try:
            rounds = self.rounds(run)
        except NotFoundError:
            return 1
        if rank is not None:
            rounds = [n for n in rounds if any(name.rank == rank for name in self.rank_names(run, n))]
        return max(rounds, default=0) + 1

    def remove(self, relatives: Iterable[str], *, manifest: bool = False) -> None:
        """Remove files by name, then the directories that this leaves empty. What is gone already is no error."""
        names = [RankName.parse(relative) for relative in relatives]
        folders = {os.path.join(self.path, name.run, f"{name.round:06d}") for name in names}
        if manifest:
            for folder in folders:
                _unlink(os.path.join(folder, MANIFEST))
        for name in names:
            _unlink(os.path.join(self.path, name.relative))
        for folder in folders:
            with contextlib.suppress(OSError):  # not empty: another rank's file, or NFS keeps an open one as .nfs*
                os.rmdir(folder)
                os.rmdir(os.path.dirname(folder))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.of(error, "remove", path=path) from error


class RankFile:
    """One rank's open file: its facts, shards and digests, and their bytes on demand. A context manager."""

    def __init__(self, fd: int, path: str, name: RankName, size: int | None = None) -> None:
        self._fd = fd
        self.path = path
        self.header: Header = read_header(fd, path)
        if size is not None and self.header.nbytes != size:
            raise CorruptError("size differs from its receipt", path=path, rank=name.rank, expected=size, found=self.header.nbytes)
        facts = self.header.facts(path)
        if facts is None:
            raise CorruptError("no file of a statexchange workspace", path=path)
        self.facts = facts
        self.shards, self.digests = _shards(self.header, facts, path)
        for key, expected in (("run", name.run), ("round", name.round), ("rank", name.rank), ("world_size", name.world_size)):
            if facts.get(key) != expected:
                raise CorruptError(f"its facts name another {key}", path=path, rank=name.rank, expected=expected, found=facts.get(key))

    @property
    def config(self) -> str:
        """The config as JSON text for `values.decode`."""
        return str(self.facts.get("config", "null"))

    def extent(self, name: str, box_index: int) -> tuple[int, int]:
        """First byte in the file, and number of bytes, of one box."""
        shard, entry = self.shards[name], self.header.entries[name]
        sizes = [box.numel * ITEMSIZE[shard.dtype] for box in shard.boxes]
        return entry.begin + sum(sizes[:box_index]), sizes[box_index]

    def read(self, name: str) -> bytearray:
        """A tensor's bytes in a buffer of its own; bytes that contradict their digest are a CorruptError."""
        entry = self.header.entries[name]
        data = bytearray(entry.nbytes)
        view = memoryview(data)
        files.pread_into(self._fd, view, entry.begin, self.path)
        held = Held(self.shards[name], view)
        for expected, box in zip(self.digests[name], held.box_views(), strict=True):
            found = digest(box)
            if found != expected:
                raise CorruptError(
                    "bytes differ from their digest", path=self.path, name=name, rank=self.facts["rank"], expected=expected, found=found
                )
        return data

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _shards(header: Header, facts: dict[str, Any], path: str) -> tuple[dict[str, Shard], dict[str, tuple[str, ...]]]:
    tensors = facts.get("tensors")
    if not isinstance(tensors, dict) or tensors.keys() != header.entries.keys():
        raise CorruptError("facts and header list different tensors", path=path)
    shards, digests = {}, {}
    for name, raw in tensors.items():
        try:
            boxes = tuple(Box.from_json(b) for b in raw["boxes"])
            shard = Shard(name, str(raw["dtype"]), tuple(int(v) for v in raw["global_shape"]), boxes)
            kept = tuple(str(d) for d in raw["digests"])
            fits = shard.nbytes == header.entries[name].nbytes and len(kept) == len(boxes)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken facts: {error}", path=path, name=name) from None
        if not fits:
            raise CorruptError("facts do not fit the header", path=path, name=name)
        shards[name], digests[name] = shard, kept
    return shards, digests
