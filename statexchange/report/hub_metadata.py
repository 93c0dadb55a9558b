"""Compare files with the hashes that huggingface_hub keeps of what it downloaded.

`hf download REPO --local-dir DIR` writes ``DIR/.cache/huggingface/download/NAME.metadata`` for each file NAME: three
lines, the commit, the ETag and the time. The ETag is the file's SHA-256 if the Hub has it in LFS, else git's SHA-1 of
it as a blob. huggingface_hub trusts it as long as the file is not newer; here the bytes are hashed.

In the cache of huggingface_hub, each file of ``models--ORG--NAME/snapshots/COMMIT`` is a symbolic link to
``../../blobs/ETAG``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
)
from statexchange.storage.location import open_path, resolve_path
from statexchange.storage.store import ByteRange

if TYPE_CHECKING:
    from statexchange.storage.location import OpenedPath
    from statexchange.storage.store import Store, StoredFile

_FOLDERS = (".cache", "huggingface", "download")
_SUFFIX = ".metadata"
_MAX_DEPTH = 20
_MAX_BYTES = 4096  # of one metadata file
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BLOB = re.compile(rf"(?:.*/)?blobs/({_ETAG.pattern})")
_RECORD = re.compile(rb"([0-9a-f]{40})\s*\n\s*([!-~]+)\s*\n\s*[0-9.e+-]+\s*")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


@dataclass(frozen=True, slots=True)
class HubComparison:
    """The files at a path, compared with the hashes of a download.

    Attributes:
        equal: names of the files whose bytes have the hash that the Hub gave.
        findings: an error for each file that differs or is missing, and for metadata that cannot be read.
        not_covered: names of the files of which no hash is known.
        commits: the commits from which the files were downloaded, sorted.
        nbytes: bytes that were hashed.
    """

    equal: tuple[str, ...]
    findings: tuple[StateExchangeError, ...]
    not_covered: tuple[str, ...]
    commits: tuple[str, ...]
    nbytes: int


def compare_with_hub(
    path: str | os.PathLike[str],
    metadata: str | os.PathLike[str],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> HubComparison:
    """Compare the hash of each file at a path with the metadata of a download.

    Not collective. Links to directories are not followed.

    Args:
        path: a directory, or one file of it.
        metadata: the directory into which the files were downloaded, or its ``.cache/huggingface/download``.
        on_progress: called with (bytes done, bytes in total).

    Returns:
        The comparison.

    Raises:
        NotFoundError: one of the two does not exist, or there is no such metadata.
        InvalidArgumentError: the metadata is a file.
        ReplacedError: a file changed while it was read.
    """
    path, metadata = resolve_path(path, "a source"), resolve_path(metadata, "the metadata")
    with open_path(metadata) as opened_metadata, open_path(path) as opened:
        if opened_metadata.file is not None:
            raise InvalidArgumentError("a directory with the metadata of a download is expected", path=metadata)
        store = metadata_store(opened_metadata.store) or opened_metadata.store
        records = {}
        for name, folder in _files_below(store):
            if name.endswith(_SUFFIX) and os.path.basename(name) != _SUFFIX:  # .metadata is a file of torch DCP
                records[name.removesuffix(_SUFFIX)] = folder
        if not records:
            text = f"no metadata of a download: there is no {'/'.join(_FOLDERS)}/NAME{_SUFFIX}"
            raise NotFoundError(text, path=metadata)
        files = _files_at(opened)
        findings: list[StateExchangeError] = []
        commits, expected = set(), {}
        for name, folder in records.items():
            # One file may have been named, and the metadata is of the whole download.
            if opened.file not in (None, name):
                continue
            try:
                commit, etag = _read_record(folder.open(os.path.basename(name) + _SUFFIX))
            except StateExchangeError as error:
                findings.append(error)
                continue
            commits.add(commit)
            if name not in files:
                text = "the metadata lists this file, and it is missing"
                findings.append(IncompleteError(text, path=opened.store.path_of(name)))
            # Another server, which HF_ENDPOINT names, may give an ETag that is no hash: the file is not covered then.
            elif _ETAG.fullmatch(etag):
                expected[name] = etag
        return _compared(files, expected, commits, findings, on_progress)


def compare_with_cache(
    opened: OpenedPath, *, on_progress: Callable[[int, int], None] | None = None
) -> HubComparison | None:
    """Compare the hash of each file of a snapshot in huggingface_hub's cache with the name of its blob.

    Not collective. Return None if nothing directly at the path is a link to a blob.

    Raises:
        ReplacedError: a file changed while it was read.
    """
    if not any(_blob(opened.store, name) for name in opened.names):
        return None
    files = _files_at(opened)
    expected = {}
    for name, folder in files.items():
        blob = _blob(folder, name)
        if blob is not None:
            expected[name] = blob
    return _compared(files, expected, set(_SNAPSHOT.findall(opened.store.path)), [], on_progress)


def _blob(folder: Store, name: str) -> str | None:
    """Return the hash in the name of the blob of a cache to which a file is a link; None for anything else."""
    match = _BLOB.fullmatch(folder.link_target(os.path.basename(name)) or "")
    if match is None:
        return None
    return match[1]


def _files_at(opened: OpenedPath) -> dict[str, Store]:
    """Return the folder of the one file at a path, or of all files in the directory and below, by their paths."""
    if opened.file is not None:
        return {opened.file: opened.store}
    return dict(_files_below(opened.store))


def metadata_store(store: Store) -> Store | None:
    """Return the directory that huggingface_hub keeps inside of a download; None without one. Not collective."""
    for folder in _FOLDERS:
        if folder not in store.directories:
            return None
        store = store.below(folder)
    return store


def _files_below(store: Store, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Store]]:
    """Yield the path of each file in the directory, and its folder, without those in folders named .cache."""
    for name in store.files:
        yield prefix + name, store
    if depth == _MAX_DEPTH:
        return
    for name in store.directories:
        # What huggingface_hub keeps there was not downloaded, and has no hash.
        if name == _FOLDERS[0]:
            continue
        yield from _files_below(store.below(name), f"{prefix}{name}/", depth + 1)


def _compared(
    files: dict[str, Store],
    expected: dict[str, str],
    commits: set[str],
    findings: list[StateExchangeError],
    on_progress: Callable[[int, int], None] | None,
) -> HubComparison:
    """Hash the files and compare them with the hashes in `expected`, both by name; add to `findings`."""
    from statexchange.storage.regions import blocks  # imports numpy, which `scan` does not need

    equal: list[str] = []
    opened: dict[str, StoredFile] = {}
    # All at first: the progress needs the sum of their sizes.
    for name in expected:
        try:
            opened[name] = files[name].open(os.path.basename(name))
        except StateExchangeError as error:
            findings.append(error)
    total, done = sum(file.size for file in opened.values()), 0
    for name, file in opened.items():
        etag = expected[name]
        kind, hasher = "SHA-256", hashlib.sha256()
        if len(etag) == 40:
            # git hashes a header before the bytes. In FIPS mode OpenSSL has SHA-1 only for uses that are not security.
            kind = "SHA-1 as a git blob"
            hasher = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        for _, window in blocks(ByteRange(file, 0, file.size), (file.size,), "U8"):
            hasher.update(window)
            done += len(window)
            if on_progress is not None:
                on_progress(done, total)
        file.check_unchanged()
        digest = hasher.hexdigest()
        if digest == etag:
            equal.append(name)
            continue
        text = f"the {kind} differs from that of the download"
        findings.append(CorruptError(text, path=file.path, expected=etag, found=digest))
    not_covered = sorted(files.keys() - expected.keys())
    return HubComparison(tuple(sorted(equal)), tuple(findings), tuple(not_covered), tuple(sorted(commits)), done)


def _read_record(file: StoredFile) -> tuple[str, str]:
    """Return the commit and the ETag of a metadata file; raise CorruptError for anything else."""
    # A larger file is refused by `read_all`: three short lines are no reason to read it.
    match = _RECORD.fullmatch(file.read_all(_MAX_BYTES))
    if match is None:
        text = "broken metadata of a download: a commit, an ETag and a time are expected, a line each"
        raise CorruptError(text, path=file.path)
    return match[1].decode(), match[2].decode()
