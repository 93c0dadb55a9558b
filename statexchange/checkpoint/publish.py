"""Publish a checkpoint directory: build it under a hidden name, sync it, rename it; whole or not there.

The hidden directory is ``.<name>.<plan-digest>.partial`` beside the target. A file lock keeps a second
publisher out; correctness does not rest on it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.sources.huggingface import MANIFEST
from statexchange.storage import files
from statexchange.storage.object_store import plain
from statexchange.storage.tensorfile import encode_header

if TYPE_CHECKING:
    from statexchange.layout.plan import FilePlan, Plan, TensorPlan

__all__ = [
    "BoxFact",
    "FilesFrom",
    "OpenFile",
    "Publication",
    "check_target",
    "header_of",
    "index_name",
    "listed_files",
    "target_path",
    "travelling_files",
    "write_manifest",
]

SCHEMA = 1
_log = logging.getLogger(__name__)
FORMAT_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class BoxFact:
    """Where a box of a published tensor came from: the rank that supplied it, and the digest of its bytes."""

    rank: int
    digest: str


@dataclass(slots=True)
class OpenFile:
    """An output file under construction: its room is `reserved`, or was looked for; its header is written last."""

    fd: int
    path: str
    header: bytes
    reserved: bool

    def offset_of(self, tensor: TensorPlan) -> int:
        """First byte of a tensor in the file."""
        return len(self.header) + tensor.begin

    def write(self, data: files.Buffer, at: int) -> None:
        """Write `data` at byte `at`."""
        files.pwrite_all(self.fd, data, at, self.path)

    def finish(self, *, writes_header: bool = True) -> None:
        """Write the header, unless another host has, and make the file durable."""
        if writes_header:
            files.pwrite_all(self.fd, self.header, 0, self.path)
        files.sync_file(self.fd, self.path)
        fd, self.fd = self.fd, -1
        files.close_file(fd, self.path)

    def close(self) -> None:
        """Close a file that is not wanted any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # its bytes do not matter
                os.close(fd)


def header_of(plan: FilePlan) -> bytes:
    """The header of an output file; UnsupportedError for what safetensors cannot hold."""
    for tensor in plan.tensors:
        if tensor.dtype == "C128":
            raise UnsupportedError("safetensors has no complex128; cast or exclude it", name=tensor.name)
    return encode_header([(t.name, t.dtype, t.shape) for t in plan.tensors], FORMAT_METADATA)


def target_path(out: str | os.PathLike[str]) -> str:
    """The absolute path of a directory to publish; a URL or an empty name is an InvalidArgumentError."""
    name = plain(os.fspath(out))
    if "://" in name or not name:
        raise InvalidArgumentError(f"a checkpoint goes to a directory, not to {name!r}")
    return os.path.abspath(name)


def check_target(out: str, *, overwrite: bool) -> None:
    """Raise TargetExistsError if `out` exists and may not be replaced, UnsafeError if that would lose files."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise TargetExistsError("the target exists; overwrite=True (--overwrite) replaces it", path=out)
    if not os.path.isdir(out) or os.path.islink(out):
        raise UnsafeError("refused to overwrite: the target is no directory", path=out)
    strangers = sorted(set(files.list_directory(out)) - listed_files(out))
    if strangers:
        raise UnsafeError(f"refused to overwrite: {strangers[0]!r} is not listed in the target's {MANIFEST}", path=out)


class Publication:
    """One directory on its way to `out`. Root only.

    Constructing it checks the target and takes the lock: TargetExistsError if `out` exists (unless
    `overwrite`) or is being published by another process; UnsafeError if overwriting would remove files that
    no manifest of ours lists. Ends in `commit` or `abandon`; in a with block `abandon` is the default.

    With `resume`, output files of this very plan that a killed publisher had recorded as finished stay: `finished`
    maps their names to the facts that `record` was given. It is for plans whose digest stands for every byte.
    """

    def __init__(
        self, out: str | os.PathLike[str], plan_digest: str, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        self.out = target_path(out)
        self.parent, self.name = os.path.split(self.out)
        if not self.name:
            raise InvalidArgumentError("not a place for a checkpoint", path=self.out)
        self._overwrite = overwrite
        self.path = os.path.join(self.parent, f".{self.name}.{plan_digest}.partial")
        self._open: list[OpenFile] = []
        self._probes: list[str] = []
        self._claimed = 0  # bytes of files whose room is not reserved
        self.finished: dict[str, Any] = {}
        files.make_path(self.parent, 0o777)
        self._lock = FileLock(os.path.join(self.parent, f".{self.name}.lock"), thread_local=False)
        self._acquire()
        try:
            _complete_replacement(self.out)
            check_target(self.out, overwrite=overwrite)
            kept = resume and _is_our_directory(self.path)
            self._remove_leftovers(os.path.basename(self.path) if kept else None)
            if kept:
                self._take_over()
            else:
                self._make_directory()
        except BaseException:
            self._unlock()
            raise

    def _make_directory(self) -> None:
        try:
            os.mkdir(self.path)
        except OSError as error:
            raise StorageError.of(error, "make directory", path=self.path) from error

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise TargetExistsError("another process is publishing to this target", path=self.out) from None
        except OSError as error:
            raise StorageError.of(error, "lock the target", path=self.out) from error
        except NotImplementedError as error:
            raise StorageError(f"cannot lock the target: {error}", path=self.out) from error

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()

    def _remove_leftovers(self, kept: str | None) -> None:
        """What killed publishers have left: under our lock nobody else can be building for this target."""
        pattern = re.compile(re.escape(f".{self.name}.") + r"([0-9a-f]{32}\.partial|[0-9a-f]{16}\.discarded)")
        for name in files.list_directory(self.parent):
            if pattern.fullmatch(name) and name != kept:
                _discard(os.path.join(self.parent, name), self.name)

    def _take_over(self) -> None:
        """Keep the finished files of a killed publisher, each with its receipt; remove the rest."""
        with files.directory(self.path) as dir_fd:
            names = files.names_in(dir_fd, self.path)
            for name in names:
                facts = _finished_facts(name, dir_fd, self.path) if _receipt(name) in names else None
                if facts is not None:
                    self.finished[name] = facts
            kept = {*self.finished, *map(_receipt, self.finished)}
            for name in set(names) - kept:
                files.remove_file(name, os.path.join(self.path, name), dir_fd)

    def record(self, name: str, facts: Any) -> None:
        """Remember durably that an output file is finished, and its facts (JSON), for whoever resumes after a kill."""
        path = os.path.join(self.path, name)
        try:
            found = os.lstat(path)
        except OSError as error:
            raise StorageError.of(error, "look up", path=path) from error
        self.write_text(_receipt(name), json.dumps([*_identity(found), facts], separators=(",", ":")).encode())
        self.finished[name] = facts

    def make_probe(self) -> str:
        """A path that exists where this directory is seen, and nowhere else, until `commit`."""
        self._probes.append(f".probe-{files.new_nonce()}")
        self.write_text(self._probes[-1], b"")
        return os.path.join(self.path, self._probes[-1])

    def create(self, plan: FilePlan) -> OpenFile:
        """A new output file with all its room reserved.

        The room of a file in memory is only looked for: to reserve it would be to write it.
        """
        header = header_of(plan)
        path = os.path.join(self.path, plan.name)
        with files.directory(self.path) as dir_fd:
            fd = files.create_file(dir_fd, plan.name, path)
        opened = OpenFile(fd, path, header, reserved=False)
        self._open.append(opened)
        nbytes = len(header) + plan.data_nbytes
        if not files.filesystem_is_memory(path):
            opened.reserved = files.reserve(fd, nbytes, path)
        else:
            self._claimed += nbytes
            files.check_room(fd, self._claimed, path)
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            raise StorageError.of(error, f"make {nbytes} bytes of room", path=path) from error
        return opened

    def write_text(self, name: str, data: files.Buffer) -> None:
        """A small file of the directory."""
        path = os.path.join(self.path, name)
        with files.directory(self.path) as dir_fd:
            files.write_new(dir_fd, name, [data], nbytes=memoryview(data).nbytes, path=path, mode=0o666)

    def commit(self) -> None:
        """Give the directory its name. After this it is there, whole and durable, whatever happens."""
        with files.directory(self.path) as dir_fd:
            for name in [*map(_receipt, self.finished), *self._probes]:
                files.remove_file(name, os.path.join(self.path, name), dir_fd)
            files.sync_directory(dir_fd, self.path)
        if os.path.lexists(self.out):
            self._replace()
        else:
            files.rename_new(self.path, self.out)
            _sync_parent(self.out)
        self._unlock()

    def _replace(self) -> None:
        check_target(self.out, overwrite=self._overwrite)  # somebody may have put something there meanwhile
        if files.exchange_paths(self.path, self.out):
            _sync_parent(self.out)
            _discard_or_warn(self.path, self.name)
            return
        files.rename_new(self.path, _waiting(self.out))
        try:
            _complete_replacement(self.out)
        except BaseException:
            if os.path.lexists(self.out):  # the old one is still there
                _discard(_waiting(self.out), self.name)
            raise

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):  # an empty file that stays does no harm
            os.unlink(self._lock.lock_file)  # while it is held, so that no name of ours stays
        self._lock.release()

    def abandon(self) -> None:
        """Remove what was built, unless it was committed; free the lock."""
        for opened in self._open:
            opened.close()
        if self._lock.is_locked:
            _discard_or_warn(self.path, self.name)
            self._unlock()


def _receipt(name: str) -> str:
    """The file beside an output file that says it is finished."""
    return f".{name}.finished"


def _identity(found: os.stat_result) -> list[int]:
    """What shows that nobody has touched a finished file."""
    return [found.st_size, found.st_mtime_ns]


def _finished_facts(name: str, dir_fd: int, directory: str) -> Any:
    """The facts of a finished output file; None unless its receipt is whole and fits."""
    receipt = _receipt(name)
    try:
        path = os.path.join(directory, receipt)
        raw: Any = files.parse_json(files.read_small(receipt, 1 << 30, dir_fd, path), path)
        size, mtime_ns, facts = raw
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except (CorruptError, UnsafeError, NotFoundError, FileNotFoundError, TypeError, ValueError):
        return None
    return facts if stat.S_ISREG(found.st_mode) and _identity(found) == [size, mtime_ns] else None


def _is_our_directory(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _waiting(out: str) -> str:
    """Where a whole directory waits to replace `out` by renames, which whoever comes next completes."""
    parent, name = os.path.split(out)
    return os.path.join(parent, f".{name}.replacement")


def _complete_replacement(out: str) -> None:
    """Finish replacing the target by renames, from wherever a publisher came; if none has begun do nothing."""
    parent, name = os.path.split(out)
    new, old = _waiting(out), os.path.join(parent, f".{name}.replaced")
    if os.path.lexists(new):
        if not _is_our_directory(new):
            raise UnsafeError("refused: this is not what we had put there", path=new)
        if os.path.lexists(out):
            files.rename_new(out, old)
        files.rename_new(new, out)
        _sync_parent(out)
    if os.path.lexists(old) and os.path.lexists(out):
        _discard_or_warn(old, name)


def _sync_parent(path: str) -> None:
    parent = os.path.dirname(path)
    with files.directory(parent) as dir_fd:
        files.sync_directory(dir_fd, path)


def _discard_or_warn(path: str, name: str) -> None:
    """`_discard` where a failure must not hide what counts; the next publisher removes what stays."""
    try:
        _discard(path, name)
    except StateExchangeError as error:
        _log.warning("a directory that is not needed any more stays: %s", error)


def _discard(path: str, name: str) -> None:
    """Remove a directory of plain files; renamed first, so that whoever builds it publishes no part."""
    parent = os.path.dirname(path)
    hidden = f".{name}.{files.new_nonce()}.discarded"
    gone = os.path.join(parent, hidden)
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rename(path, gone)
            with files.directory(parent) as parent_fd, files.directory(hidden, parent_fd, gone) as dir_fd:
                for entry in files.names_in(dir_fd, gone):
                    files.remove_file(entry, os.path.join(gone, entry), dir_fd)
            os.rmdir(gone)
    except FileNotFoundError:
        return
    except OSError as error:
        if isinstance(error, StateExchangeError):
            raise
        raise StorageError.of(error, "remove", path=path) from error


def listed_files(directory: str) -> set[str]:
    """The files that a published directory's own manifest lists, itself included; none without a manifest."""
    path = os.path.join(directory, MANIFEST)
    try:
        raw = files.parse_json(files.read_small(path, 1 << 30), path)
    except NotFoundError:
        return set()
    listed = raw.get("files", []) if isinstance(raw, dict) else []
    return {str(name) for name in listed} | {MANIFEST}


def index_name(plan: Plan) -> str | None:
    """The index file that a plan's directory needs; none for a single file."""
    if len(plan.files) == 1:
        return None
    return f"{_of_one_file(plan)}.index.json"


def index_text(plan: Plan) -> bytes:
    """Hugging Face's index: which file has which tensor."""
    weight_map = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    record = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()


class TakesText(Protocol):
    """A publication on its way, for its small files."""

    def write_text(self, name: str, data: files.Buffer) -> None:
        """A small file of the checkpoint."""


def write_manifest(
    publication: TakesText,
    plan: Plan,
    facts: Mapping[str, Sequence[BoxFact]],
    *,
    travelling: Mapping[str, bytes],
    source: str,
) -> None:
    """Write travelling files, index and manifest, in this order: the manifest is the directory's last file.

    `facts` has one BoxFact per piece of each output tensor; `travelling` the small files that come along.
    """
    for name, data in travelling.items():
        publication.write_text(name, data)
    index = index_name(plan)
    if index is not None:
        publication.write_text(index, index_text(plan))
    names = [*(file.name for file in plan.files), *([index] if index else []), *travelling]
    record = {
        "schema": SCHEMA,
        "plan": plan.digest,
        "source": source,
        "digest": "xxh3-128",
        "files": sorted(names),
        "aliases": dict(plan.aliases),
        "tensors": {t.name: _tensor_record(f, t, facts[t.name]) for f in plan.files for t in f.tensors},
    }
    publication.write_text(MANIFEST, json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode())


def _tensor_record(file: FilePlan, tensor: TensorPlan, facts: Sequence[BoxFact]) -> dict[str, Any]:
    boxes = [[*p.box.to_json(), f.digest, f.rank] for p, f in zip(tensor.pieces, facts, strict=True)]
    return {
        "file": file.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "source": tensor.source,
        "boxes": boxes,
    }


FilesFrom = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | bytes] | None


def travelling_files(given: FilesFrom, plan: Plan) -> dict[str, bytes]:
    """config.json, tokenizer and other small files: of a directory all but weights, else those named or given whole.

    Names that are no plain ones, or those of the checkpoint's own files, are an InvalidArgumentError.
    """
    if given is None:
        return {}
    own = {MANIFEST, index_name(plan), *(file.name for file in plan.files), _of_one_file(plan)}
    found: dict[str, bytes] = {}
    for name, data in _given_files(given):
        if name in own or name in found or name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            why = "twice" if name in found else "which no file beside the weights can be called"
            raise InvalidArgumentError(f"files_from gives {name!r}, {why}")
        found[name] = data() if callable(data) else data
    return found


def _given_files(given: FilesFrom) -> Iterator[tuple[str, bytes | Callable[[], bytes]]]:
    """Names with their content, or a function that reads it."""
    if isinstance(given, Mapping):
        for name, text in given.items():
            if not isinstance(name, str) or not isinstance(text, str | bytes):
                raise InvalidArgumentError(f"files_from maps names to text or bytes, not {name!r} to a {type(text)!r}")
            yield name, text.encode() if isinstance(text, str) else text
        return
    named = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(named, Sequence) or not all(isinstance(one, str | os.PathLike) for one in named):
        raise InvalidArgumentError(f"files_from is a directory, files, or maps names to texts, not {given!r:.100}")
    for one in named:
        for path in _small_files(os.fspath(one)) if os.path.isdir(one) else [os.fspath(one)]:
            yield os.path.basename(path), functools.partial(files.read_small, path)


def _of_one_file(plan: Plan) -> str:
    """What the weights would be called if they were one file: readers look for it first."""
    return plan.files[0].name.replace(f"-00001-of-{len(plan.files):05d}", "", 1) if plan.files else ""


_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|gguf|onnx|h5|msgpack|npz|index\.json)|statexchange\.json|\..*"
)


def _small_files(directory: str) -> list[str]:
    paths = [os.path.join(directory, name) for name in files.list_directory(directory) if not _WEIGHTS.fullmatch(name)]
    return [path for path in paths if os.path.isfile(path)]
