"""Check the files of a snapshot in huggingface_hub's cache against their hashes.

Each file of ``models--ORG--NAME/snapshots/COMMIT`` is a symbolic link to ``../../blobs/ETAG``. The ETag is the file's
SHA-256 if the Hub has it in LFS, else git's SHA-1 of it as a blob.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from statexchange.errors import CorruptError
from statexchange.storage.regions import blocks
from statexchange.storage.store import ByteRange

if TYPE_CHECKING:
    from statexchange.storage.location import OpenedPath
    from statexchange.storage.store import StoredFile

__all__ = ["blob_hashes", "check_blob"]

_BLOB = re.compile(r"(?:.*/)?blobs/([0-9a-f]{40}|[0-9a-f]{64})")


def blob_hashes(opened: OpenedPath) -> list[tuple[StoredFile, str]]:
    """Return each file at a path, or in the directory, that is a link to a blob, with the hash in the name of the blob.

    Not collective.
    """
    hashes = []
    for name in opened.names:
        match = _BLOB.fullmatch(opened.store.link_target(name) or "")
        if match is not None:
            hashes.append((opened.store.open(name), match[1]))
    return hashes


def check_blob(file: StoredFile, expected: str, on_read: Callable[[int], None]) -> None:
    """Hash a file; `on_read` is called with the bytes of each window that was read.

    Not collective.

    Raises:
        CorruptError: the hash is not the expected one.
        ReplacedError: the file changed while it was read.
    """
    if len(expected) == 64:
        kind, hasher = "SHA-256", hashlib.sha256()
    else:
        kind, hasher = "SHA-1 as a git blob", hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    for _, window in blocks(ByteRange(file, 0, file.size), (file.size,), "U8"):
        hasher.update(window)
        on_read(len(window))
    file.check_unchanged()
    if hasher.hexdigest() != expected:
        text = f"the {kind} is not that by which the Hub's cache calls the file"
        raise CorruptError(text, path=file.path, expected=expected, found=hasher.hexdigest())
