"""Say what a file is that holds no tensors, by its first bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statexchange.storage.store import StoredFile

_TEXT_BYTES = 64


def wrong_kind_of(file: StoredFile) -> str | None:
    """Return a message that says what a file is, if it is empty or of a kind that holds no tensors; else None."""
    return wrong_kind_of_bytes(file.first_bytes(_TEXT_BYTES))


# The first bytes, in lower case and without leading blanks, of files that hold no tensors, and what they are
_WRONG_KINDS: tuple[tuple[bytes | tuple[bytes, ...], str], ...] = (
    (b"pk\3\4", "this is a zip archive: if torch.save wrote it, call it .pt or .bin"),
    (b"\x1f\x8b", "this file is compressed by gzip: unpack it first"),
    (
        b"version https://git-lfs.github.com/spec/",
        "this is a pointer of Git LFS, not the file itself: fetch it with git lfs pull",
    ),
    (
        (b"<!doctype html", b"<html", b"<?xml"),
        "this is a web page, not the file: the download got an error page, download it again",
    ),
)
_JSON_TEXT = "this is JSON text, not the file: if it is an error message of a download, download the file again"


def wrong_kind_of_bytes(start: bytes) -> str | None:
    """Return what `wrong_kind_of` returns, from the first bytes of a file."""
    if not start:
        return "the file is empty"
    text = start.lstrip().lower()
    for mark, kind in _WRONG_KINDS:
        if text.startswith(mark):
            return kind
    # A tensor file has zeros before its JSON, in the header's length.
    is_json = text.startswith(b"{") and start.isascii() and b"\0" not in start
    return _JSON_TEXT if is_json else None
