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
import stat
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsafeError,
)
from statexchange.layout.shards import ITEMSIZE, Box, Shard, sizes_from_json
from statexchange.storage import files
from statexchange.storage.object_store import plain
from statexchange.storage.tensorfile import Header, Held, digest, read_header, stored, write_tensor_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

__all__ = [
    "Manifest",
    "RankFile",
    "RankName",
    "Receipt",
    "Workspace",
    "is_rank_file",
    "is_round_name",
    "local_path",
]

_log = logging.getLogger(__name__)
SCHEMA = 1
MANIFEST = "manifest.json"
_ATTEMPTS = 20
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_ROUND = re.compile(r"[0-9]{6,18}")
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})-of-([0-9]{5,9})\.[0-9a-f]{16}\.safetensors")
_TEMPORARY = re.compile(re.escape(files.TEMPORARY_PREFIX) + r"[0-9a-f]{16}")


def is_rank_file(name: str) -> bool:
    """Whether a file's name is that of a rank's file."""
    return _RANK_FILE.fullmatch(name) is not None


def is_round_name(name: str) -> bool:
    """Whether a directory's name is that of a round."""
    return _ROUND.fullmatch(name) is not None and f"{int(name):06d}" == name


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
    def new(cls, run: str, round: int, rank: int, world_size: int) -> RankName:  # noqa: A002
        """A name that nobody has used; parts that cannot be part of a name are an UnsafeError."""
        file = f"rank-{rank:05d}-of-{world_size:05d}.{files.new_nonce()}.safetensors"
        return cls.parse(cls(run, round, rank, world_size, file).relative)

    @classmethod
    def parse(cls, relative: str) -> RankName:
        """The parts of a path below the root; anything else, which may lead elsewhere, is an UnsafeError."""
        parts = relative.split(os.sep)
        match = _RANK_FILE.fullmatch(parts[-1])
        if len(parts) != 3 or match is None or not _RUN.fullmatch(parts[0]) or not is_round_name(parts[1]):
            raise UnsafeError(f"not the name of a rank's file: {relative!r}")
        rank, world_size = int(match[1]), int(match[2])
        if rank >= world_size or not parts[2].startswith(f"rank-{rank:05d}-of-{world_size:05d}."):
            raise UnsafeError(f"not the name of a rank's file: {relative!r}")
        return cls(parts[0], int(parts[1]), rank, world_size, parts[2])


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
    scheme, separator, rest = plain(url).partition("://")
    if not separator:
        return os.path.abspath(plain(url))
    if scheme == "shm":
        if not _RUN.fullmatch(rest):
            raise InvalidArgumentError(f"shm:// wants a plain name, not {rest!r}")
        return f"/dev/shm/statexchange-{os.getuid()}/{rest}"  # noqa: S108 (0700, owner checked on use)
    raise InvalidArgumentError(f"a workspace lies in a directory or at shm://name; {scheme}:// is not supported")


class Workspace:
    """A directory, or ``shm://name``, in which ranks exchange tensor files.

    Not collective: constructing, writing and reading involve no other rank. The directory is made by the
    first write.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        self.path = local_path(self.url)
        self._in_memory = self.url.startswith("shm://")
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
        name = RankName.new(run, round, rank, world_size)
        facts = {
            **(extra or {}),
            "schema": SCHEMA,
            "run": run,
            "round": round,
            "rank": rank,
            "world_size": world_size,
            "config": config,
        }
        path = os.path.join(self.path, name.relative)
        nbytes = self._retried(lambda: self._write(name, path, held, facts))
        return Receipt(name.relative, nbytes)

    def _write(self, name: RankName, path: str, held: Sequence[Held], facts: Mapping[str, Any]) -> int:
        files.make_path(self.path)
        with self._round_directory(name.run, name.round, make=True) as dir_fd:
            return write_tensor_file(dir_fd, name.file, path, held, facts, durable=self.durable)

    def _retried(self, write: Callable[[], int]) -> int:
        """Another rank may remove a directory that it leaves empty just when we are about to use it."""
        for _ in range(_ATTEMPTS):
            try:
                return write()
            except NotFoundError:
                continue
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
        return write()

    @property
    def durable(self) -> bool:
        """Whether writes are synced: not on tmpfs."""
        if self._durable is None:
            self._durable = not files.filesystem_is_memory(self.path)
        return self._durable

    @contextlib.contextmanager
    def _round_directory(self, run: str, number: int, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a round's directory, found step by step, so that no link leads elsewhere."""
        run_path = os.path.join(self.path, run)
        path = os.path.join(run_path, f"{number:06d}")
        if self._in_memory:  # it lies where anybody could have made a directory
            with files.directory(os.path.dirname(self.path)) as base_fd:
                _check_private(base_fd, os.path.dirname(self.path))
        with files.directory(self.path) as root_fd:
            if make:
                files.make_directory(run, root_fd, run_path)
            with files.directory(run, root_fd, run_path) as run_fd:
                _check_private(run_fd, run_path)
                if make:
                    files.make_directory(f"{number:06d}", run_fd, path)
                with files.directory(f"{number:06d}", run_fd, path) as round_fd:
                    yield round_fd

    def runs(self) -> list[str]:
        """Runs that left something here."""
        return [name for name in files.list_directory(self.path) if _RUN.fullmatch(name) and self._is_directory(name)]

    def _is_directory(self, name: str) -> bool:
        path = os.path.join(self.path, name)
        return os.path.isdir(path) and not os.path.islink(path)

    def rounds(self, run: str) -> list[int]:
        """Rounds of `run` that have a directory, oldest first."""
        return sorted(int(name) for name in files.list_directory(os.path.join(self.path, run)) if is_round_name(name))

    def rank_names(self, run: str, round: int) -> list[RankName]:  # noqa: A002
        """Whole files of a round, in rank order."""
        found = self._names_of(run, round)
        names = [RankName.parse(os.path.join(run, f"{round:06d}", name)) for name in found if is_rank_file(name)]
        return sorted(names, key=lambda name: name.rank)

    def _names_of(self, run: str, number: int) -> list[str]:
        """What lies in a round's directory."""
        with self._round_directory(run, number) as dir_fd:
            return files.names_in(dir_fd, os.path.join(self.path, run, f"{number:06d}"))

    def open(self, receipt: Receipt | RankName, *, timeout_s: float = 0.0) -> RankFile:
        """Open a rank's file; close it, or use it in a with block. Not collective.

        A file that is not there yet is looked for until `timeout_s` has passed, each time through a freshly
        opened directory, then it is a NotFoundError naming rank and path.
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
            file = self._file_of(name)
        except NotFoundError:
            raise NotFoundError("this rank's file is missing", rank=name.rank, path=path) from None
        try:
            return RankFile(file, path, name, size)
        except BaseException:
            files.close(file)
            raise

    def _file_of(self, name: RankName) -> files.Readable:
        """A rank's file, open for reading."""
        with self._round_directory(name.run, name.round) as dir_fd:
            return files.open_file(name.file, dir_fd, os.path.join(self.path, name.relative))

    def commit(self, receipts: Sequence[Receipt], *, keep: int, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Make a round count: write its manifest, then drop all but this run's newest `keep` rounds. Root only.

        `receipts` are those of all ranks, in rank order. What other runs have committed is theirs and stays. A
        round that cannot be dropped stays, with a warning.
        """
        names = [RankName.parse(receipt.relative) for receipt in receipts]
        if keep < 1 or not names or not _is_whole(names):
            raise InvalidArgumentError("a commit wants one receipt of each rank, all of one round, and keep >= 1")
        older = self._readable_manifests()
        first = names[0]
        generation = max((m.generation for m in older), default=0) + 1
        manifest = Manifest(first.run, first.round, generation, first.world_size, tuple(receipts), dict(extra or {}))
        text = _manifest_text(manifest)
        path = os.path.join(self.path, first.run, f"{first.round:06d}", MANIFEST)
        with self._round_directory(first.run, first.round) as dir_fd:
            files.write_new(dir_fd, MANIFEST, [text], nbytes=len(text), path=path, durable=self.durable)
        for old in [m for m in [*older, manifest] if m.run == first.run][:-keep]:
            self._drop(old)
        return manifest

    def _readable_manifests(self) -> list[Manifest]:
        """Committed rounds, oldest first, without those whose manifest is broken: a reader must see that."""
        found = []
        for run, number in self._all_rounds():
            with contextlib.suppress(NotFoundError, CorruptError, UnsafeError):
                found.append(self.manifest(run, number))
        return sorted(found, key=_age)

    def _all_rounds(self) -> Iterator[tuple[str, int]]:
        for run in self.runs():
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                yield from ((run, number) for number in self.rounds(run))

    def manifests(self, places: Iterable[tuple[str, int]] | None = None) -> list[Manifest]:
        """Committed rounds, oldest first: of all runs, or those among `places` (run, round)."""
        found = []
        for run, number in self._all_rounds() if places is None else places:
            with contextlib.suppress(NotFoundError):  # not committed
                found.append(self.manifest(run, number))
        return sorted(found, key=_age)

    def manifest(self, run: str, round: int) -> Manifest:  # noqa: A002
        """The manifest of one round; NotFoundError if it was not committed."""
        path = os.path.join(self.path, run, f"{round:06d}", MANIFEST)
        text = self._text_of(run, round, MANIFEST)
        try:
            return _parse_manifest(files.parse_json(text, path), run, round)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken manifest: {error}", path=path) from None

    def _text_of(self, run: str, number: int, file: str) -> bytes:
        """A small file of a round."""
        with self._round_directory(run, number) as dir_fd:
            return files.read_small(file, dir_fd=dir_fd, shown=os.path.join(self.path, run, f"{number:06d}", file))

    def next_round(self, run: str, rank: int | None = None) -> int:
        """The number after the newest round of `run`, or after the newest in which `rank` wrote."""
        try:
            rounds = self.rounds(run)
        except NotFoundError:
            return 1
        if rank is not None:
            rounds = [n for n in rounds if self._has_written(run, n, rank)]
        return max(rounds, default=0) + 1

    def _has_written(self, run: str, number: int, rank: int) -> bool:
        try:
            return any(name.rank == rank for name in self.rank_names(run, number))
        except NotFoundError:  # removed meanwhile
            return False

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

    def _drop(self, manifest: Manifest) -> None:
        """Remove a committed round, its manifest last: what a failure leaves of it is dropped again."""
        try:
            names = [*(os.path.basename(receipt.relative) for receipt in manifest.receipts), MANIFEST]
            self._remove(manifest.run, manifest.round, names, sweep=True)
        except (StorageError, UnsafeError) as error:
            _log.warning("an old round stays: %s", error)

    def _remove(self, run: str, number: int, names: Sequence[str], *, sweep: bool = False) -> None:
        """Remove files, then directories left empty; with `sweep` also what killed writers left."""
        path = os.path.join(self.path, run, f"{number:06d}")
        try:
            with self._round_directory(run, number) as dir_fd:
                left = files.names_in(dir_fd, path) if sweep else []
                for name in [*(name for name in left if _TEMPORARY.fullmatch(name)), *names]:
                    files.remove_file(name, os.path.join(path, name), dir_fd)
        except NotFoundError:
            return
        with contextlib.suppress(OSError):  # not empty: another rank's file, or NFS keeps an open one as .nfs*
            os.rmdir(path)
            os.rmdir(os.path.dirname(path))
            if self._in_memory:
                os.rmdir(self.path)
                os.rmdir(os.path.dirname(self.path))


def _age(manifest: Manifest) -> tuple[int, str, int]:
    """Two writers who committed at once may have taken one generation; then all must agree on some order."""
    return manifest.generation, manifest.run, manifest.round


def _is_whole(names: Sequence[RankName]) -> bool:
    first = names[0]
    same = {(name.run, name.round, name.world_size) for name in names} == {(first.run, first.round, first.world_size)}
    return same and [name.rank for name in names] == list(range(first.world_size))


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


def _parse_manifest(raw: Any, run: str, number: int) -> Manifest:
    """The manifest of a round from parsed JSON; one that contradicts itself or the round is a ValueError."""
    if not isinstance(raw, dict) or raw.pop("digest") != _digest_of(raw):
        raise ValueError("it differs from its own digest")
    receipts = tuple(Receipt(os.path.join(run, f"{number:06d}", name), size) for name, size in raw["files"])
    names = [RankName.parse(receipt.relative) for receipt in receipts]
    known = [raw["schema"], raw["run"], raw["round"], type(raw["generation"])] == [SCHEMA, run, number, int]
    if not known or not names or not _is_whole(names):
        raise ValueError("it is of another schema or round, or does not list all ranks")
    return Manifest(run, number, raw["generation"], raw["world_size"], receipts, raw["extra"])


def _check_private(dir_fd: int, path: str) -> None:
    """UnsafeError where others could change what lies in a directory."""
    found = os.fstat(dir_fd)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeError("refused: others may write in this directory", path=path)
    if os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        raise UnsafeError("refused: this directory belongs to another user", path=path)


class RankFile:
    """One rank's open file: its facts, shards and digests, and their bytes on demand. A context manager."""

    def __init__(self, fd: files.Readable, path: str, name: RankName, size: int | None = None) -> None:
        self._fd = fd
        self.path = path
        self.header: Header = read_header(fd, path)
        if size is not None and self.header.nbytes != size:
            raise CorruptError(
                "size differs from its receipt",
                path=path,
                rank=name.rank,
                expected=size,
                found=self.header.nbytes,
            )
        facts = self.header.facts(path)
        if facts is None:
            raise CorruptError("no file of a statexchange workspace", path=path)
        if facts.get("schema") != SCHEMA:
            raise CorruptError(
                "its facts are of another version", path=path, expected=SCHEMA, found=facts.get("schema")
            )
        self.facts = facts
        self.config = facts.get("config", "null")
        """The config as JSON text for `values.decode`."""
        if not isinstance(self.config, str):
            raise CorruptError("its config is no text", path=path, rank=name.rank)
        self.shards, self.digests = _shards(self.header, facts, path)
        for key, expected in (
            ("run", name.run),
            ("round", name.round),
            ("rank", name.rank),
            ("world_size", name.world_size),
        ):
            if facts.get(key) != expected:
                raise CorruptError(
                    f"its facts name another {key}",
                    path=path,
                    rank=name.rank,
                    expected=expected,
                    found=facts.get(key),
                )

    def extents(self, name: str) -> list[tuple[int, int]]:
        """First byte in the file, and number of bytes, of each box of a tensor."""
        shard = self.shards[name]
        sizes = [box.numel * ITEMSIZE[shard.dtype] for box in shard.boxes]
        return list(zip(accumulate(sizes, initial=self.header.entries[name].begin), sizes, strict=False))

    def read(self, name: str) -> bytearray:
        """A tensor's bytes in a buffer of its own; bytes that contradict their digest are a CorruptError."""
        entry = self.header.entries[name]
        data = bytearray(entry.nbytes)
        view = memoryview(data)
        files.pread_into(self._fd, view, entry.begin, self.path)
        for expected, (begin, nbytes) in zip(self.digests[name], self.extents(name), strict=True):
            found = digest(view[begin - entry.begin :][:nbytes])
            if found != expected:
                raise CorruptError(
                    "bytes differ from their digest",
                    path=self.path,
                    name=name,
                    rank=self.facts["rank"],
                    expected=expected,
                    found=found,
                )
        return data

    def close(self) -> None:
        """Close the file."""
        files.close(self._fd)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shards(header: Header, facts: dict[str, Any], path: str) -> tuple[dict[str, Shard], dict[str, tuple[str, ...]]]:
    tensors = facts.get("tensors")
    if not isinstance(tensors, dict) or tensors.keys() != header.entries.keys():
        raise CorruptError("facts and header list different tensors", path=path)
    shards, digests = {}, {}
    for name, raw in tensors.items():
        try:
            boxes = tuple(Box.from_json(box) for box in raw["boxes"])
            shard = Shard(name, raw["dtype"], sizes_from_json(raw["global_shape"]), boxes)
            kept = tuple(str(known) for known in raw["digests"])
            entry = header.entries[name]
            fits = stored(shard.dtype, shard.local_shape) == (entry.dtype, entry.shape) and len(kept) == len(boxes)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken facts: {error}", path=path, name=name) from None
        if not fits:
            raise CorruptError("facts do not fit the header", path=path, name=name)
        shards[name], digests[name] = shard, kept
    return shards, digests
