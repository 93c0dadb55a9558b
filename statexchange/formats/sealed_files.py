"""The sizes and digests of whole files in a manifest: of all of a sealed directory, or of the file of box digests.

The manifest of a sealed directory has them under ``sealed``: by name ``[bytes, bytes that are digested, digest]``. Of a
file whose tensors have digests of their own only the header is digested here, so that no byte is read twice; of any
other file, all bytes are::

    "sealed": {"config.json": [663, 663, "d3b0..."], "model.safetensors": [4943162336, 32896, "9a11..."]}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, excerpt
from statexchange.formats.source import open_listed
from statexchange.storage.files import WINDOW_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from statexchange.formats.source import Source
    from statexchange.storage.store import Store, StoredFile

KEY = "sealed"
DIGESTS_KEY = "digests"  # of the file of digests that a large checkpoint has (`box_digests.py`)


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file as it was when its manifest was written.

    Attributes:
        name: its name in the directory.
        nbytes: its size.
        digest_nbytes: the number of its first bytes that are digested.
        digest: their digest.
    """

    name: str
    nbytes: int
    digest_nbytes: int
    digest: str

    def to_json(self) -> list[int | str]:
        """Return the value of the manifest that `parse_sealed` reads."""
        return [self.nbytes, self.digest_nbytes, self.digest]


def parse_sealed(raw: Any) -> list[SealedFile]:
    """Return the sealed files of a manifest; raise ValueError or TypeError for anything but what `to_json` wrote."""
    if not isinstance(raw, dict):
        raise TypeError("its digests of files are not an object")
    files = []
    for name, record in raw.items():
        is_record = isinstance(record, list) and [*map(type, record)] == [int, int, str]
        if not is_record or not 0 <= record[1] <= record[0]:
            raise ValueError(f"not a sealed file: {excerpt(record)}")
        files.append(SealedFile(name, *record))
    return files


def sealed_files(source: Source) -> list[SealedFile]:
    """Return the files whose digests the manifest of a source has; [] without any."""
    if source.manifest is None:
        return []
    return parse_sealed(source.manifest.get(KEY, {})) + parse_sealed(source.manifest.get(DIGESTS_KEY, {}))


def seal_file(
    file: StoredFile, name: str, digest_nbytes: int, progress: Callable[[int], None] | None = None
) -> SealedFile:
    """Return the record of a file. `progress` is called with the number of bytes of each window that was read."""
    import xxhash  # reading headers does not need it

    hasher = xxhash.xxh3_128()
    memory = memoryview(bytearray(min(WINDOW_BYTES, digest_nbytes)))
    for begin in range(0, digest_nbytes, WINDOW_BYTES):
        window = memory[: min(WINDOW_BYTES, digest_nbytes - begin)]
        file.read_into(window, begin)
        hasher.update(window)
        if progress is not None:
            progress(len(window))
    return SealedFile(name, file.size, digest_nbytes, hasher.hexdigest())


def check_sealed_file(store: Store, sealed: SealedFile) -> None:
    """Compare a file with its record.

    Raises:
        IncompleteError: it is missing.
        CorruptError: it is another one, or was changed.
    """
    file = open_listed(store, sealed.name)
    if file.size != sealed.nbytes:
        text = "the file's size is not that in the manifest: it was replaced, cut or appended to"
        raise CorruptError(text, path=file.path, expected=sealed.nbytes, found=file.size)
    present = seal_file(file, sealed.name, sealed.digest_nbytes)
    if present != sealed:
        # A file that was replaced while it was read is another one, not a broken one.
        file.check_unchanged()
        what = "file" if sealed.digest_nbytes == sealed.nbytes else "header"
        text = f"bytes of the {what} differ from their digest in the manifest"
        raise CorruptError(text, path=file.path, expected=sealed.digest, found=present.digest)
