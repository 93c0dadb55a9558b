"""Seal a checkpoint that exists: add a manifest with digests beside its files, which stay as they are.

The manifest is that of a published checkpoint (publication.py), with one box for each tensor, and under ``sealed`` the
size and digest of every file in the directory. It lists no files as statexchange's own, so that no publisher may
replace the directory. It is written last, when all bytes have been read and nothing has changed meanwhile, and appears
as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.checkpoint.publication import sealed_manifest_text
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    TargetExistsError,
    UnsupportedError,
    without_secrets,
)
from statexchange.formats import huggingface
from statexchange.formats.model_files import MANIFEST, check_file_names
from statexchange.formats.registry import holds_saves, open_source
from statexchange.formats.sealed_files import SealedFile, seal_file
from statexchange.sharding.options import CallOptions
from statexchange.sharding.shards import full_box
from statexchange.storage.added_file import AddedFile
from statexchange.storage.atomic import is_temporary
from statexchange.storage.location import OpenedPath, directory_of, open_path, resolve_path
from statexchange.storage.tensorfile import read_header

if TYPE_CHECKING:
    from statexchange.formats.source import Source, SourceTensor
    from statexchange.sharding.shards import Shard
    from statexchange.storage.store import StoredFile

_HAVE_DIGESTS = ("save", "workspace")


@dataclass(frozen=True, slots=True)
class SealReport:
    """The result of `seal_checkpoint`.

    Attributes:
        path: the directory.
        manifest: path of the manifest.
        dry_run: whether nothing was written.
        num_tensors: number of tensors.
        num_files: number of files that are sealed.
        nbytes: bytes of these files.
    """

    path: str
    manifest: str
    dry_run: bool
    num_tensors: int
    num_files: int
    nbytes: int


def seal_checkpoint(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> SealReport:
    """Add a manifest with the digests of all tensors and files to a checkpoint that exists.

    Not collective. No file that exists is changed. From then on `statexchange verify`, and every read of a whole tensor
    by statexchange, detects changed bytes. A sealed directory is never replaced by an export or a merge.

    Args:
        path: a Hugging Face directory of safetensors files, or one such file if its directory has no other.
        overwrite: replace a manifest that exists.
        dry_run: read the headers, check everything that can be checked by them, and write nothing.
        on_progress: called with (bytes done, bytes in total).

    Returns:
        The report.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        TargetExistsError: the directory has a manifest (unless `overwrite`).
        UnsupportedError: the checkpoint has another format or holds parts of tensors, or the URL cannot be written.
        CorruptError, IncompleteError: the checkpoint is broken, or the manifest to replace.
        ReplacedError: a file changed while it was read.
        StorageError: the operating system refused a read or write.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.arange(4)}, "model.safetensors")
        >>> report = seal_checkpoint("model.safetensors")
        >>> report.num_tensors, report.num_files
        (1, 1)
    """
    CallOptions.of(locals())  # checks them
    folder = _directory_of(resolve_path(path, "a checkpoint"))
    with open_path(folder) as opened:
        # Refused before hours of reading; `publish` refuses one that appears meanwhile.
        if MANIFEST in opened.store.listing and not overwrite:
            text = f"it has a {MANIFEST} already; overwrite=True (--overwrite) replaces it"
            raise TargetExistsError(text, path=opened.store.path)
        target = AddedFile(opened.store, MANIFEST)  # raises now if nothing may be written here
        sealing = _Sealing(opened, on_progress)
        if not dry_run:
            manifest = sealing.manifest()
            _check_unchanged(folder, opened)
            target.publish(manifest, overwrite=overwrite)
        return SealReport(
            path=without_secrets(folder),
            manifest=opened.store.path_of(MANIFEST),
            dry_run=dry_run,
            num_tensors=len(sealing.tensors),
            num_files=len(sealing.names),
            nbytes=sealing.total,
        )


def _directory_of(path: str) -> str:
    """Return the directory to seal; raise unless the checkpoint at a path is one that can be sealed."""
    if holds_saves(path):
        raise UnsupportedError("saves have digests of their own: statexchange verify checks them", path=path)
    with open_source(path, strict=False) as source:
        if source.kind in _HAVE_DIGESTS:
            text = f"a {source.kind} has digests of its own: statexchange verify checks them"
            raise UnsupportedError(text, path=source.path)
        if source.kind != "huggingface":
            text = f"only safetensors files can be sealed, and this is {source.kind}"
            text += ": statexchange merge writes a checkpoint with digests"
            raise UnsupportedError(text, path=source.path)
        file = source.opened.file
        if file is None:
            return directory_of(path)
        # The manifest is read as that of all tensors in the directory.
        for name in source.opened.store.files:
            if name.endswith(".safetensors") and name != file:
                text = f"its directory has other safetensors files, such as {name!r}: seal the directory"
                raise InvalidArgumentError(text, path=source.opened.store.path_of(file))
    return os.path.dirname(path)


class _Sealing:
    """Reads one directory. The constructor reads headers only, and raises what is broken or cannot be sealed.

    Attributes:
        tensors: the file of each tensor by name, and the tensor.
        names: the files that are sealed.
        total: bytes of these files.
    """

    def __init__(self, opened: OpenedPath, on_progress: Callable[[int, int], None] | None) -> None:
        self._on_progress = on_progress
        self._done = 0
        # By the index and headers alone: the manifest that is replaced may be the one that is wrong.
        source = huggingface.read(opened, uses_manifest=False)
        for error in (*source.problems, *source.unsupported.values()):
            raise error
        self.tensors = _whole_tensors(source)
        self._aliases = _aliases_of(opened, self.tensors)
        self._header_nbytes: dict[str, int] = {}
        # A file's header ends where its first tensor begins: the format has no gaps.
        for file, tensor in self.tensors.values():
            begin = tensor.byte_ranges[0].begin
            self._header_nbytes[file] = min(begin, self._header_nbytes.get(file, begin))
        self._source = source
        self._files: dict[str, StoredFile] = {}
        for name in opened.store.files:
            if name != MANIFEST and not is_temporary(name):
                self._files[name] = opened.store.open(name)
        self.names = tuple(self._files)
        self.total = sum(file.size for file in self._files.values())

    def manifest(self) -> bytes:
        """Read all bytes and return the manifest."""
        tensors: dict[str, tuple[str, Shard, str]] = {}
        for name, (file, tensor) in self.tensors.items():
            # `always`: from the bytes, also where a digest is recorded.
            tensors[name] = (file, tensor.shard, tensor.read_digest(0, always=True).hexdigest())
            self._count(tensor.shard.nbytes)
        sealed: list[SealedFile] = []
        for name, opened_file in self._files.items():
            nbytes = self._header_nbytes.get(name, opened_file.size)
            sealed.append(seal_file(opened_file, name, nbytes, self._count))
        # After the last read. An opened file that is replaced by a rename does not change: so names are looked at, too.
        self._source.check_unchanged()
        for opened_file in self._files.values():
            opened_file.check_current()
        return sealed_manifest_text(tensors, sealed, self._aliases)

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self.total)


def _whole_tensors(source: Source) -> dict[str, tuple[str, SourceTensor]]:
    """Return each tensor with the name of its file; raise unless each is whole, in one file, and in the index."""
    tensors: dict[str, tuple[str, SourceTensor]] = {}
    for shard_file, tensor in source.shards():
        shard, file = tensor.shard, shard_file.path.rpartition("/")[2]
        if shard.boxes != (full_box(shard.global_shape),):
            text = "its files have parts of tensors, which cannot be sealed: statexchange merge puts them together"
            raise UnsupportedError(text, name=shard.name, path=shard_file.path)
        if shard.name in tensors:
            text = f"{tensors[shard.name][0]} has a tensor of this name, too: a manifest lists each name once"
            raise UnsupportedError(text, name=shard.name, path=shard_file.path)
        tensors[shard.name] = (file, tensor)
    # Readers that go by the index do not see such a tensor, and those that go by the manifest would.
    for shard_file in source.files:
        for name in read_header(shard_file.file).entries:
            if name not in shard_file.tensors:
                text = "the index does not list this tensor, which its file has: write the index again"
                raise CorruptError(text, name=name, path=shard_file.path)
    check_file_names({name: file for name, (file, _) in tensors.items()}, source.path)
    return tensors


def _aliases_of(opened: OpenedPath, tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the aliases of tied tensors in the manifest that is replaced; {} without one.

    Raises:
        CorruptError: it cannot be read. No other file has these names.
    """
    try:
        manifest = huggingface.read_manifest(opened.store)
    except CorruptError as error:
        advice = f"the names of tied tensors in it would be lost; remove {MANIFEST} to seal without them"
        raise error.located(advice=advice) from error
    if manifest is None:
        return {}
    aliases = {}
    for alias, name in manifest.get("aliases", {}).items():
        # The files may have been changed since: only names that still have no tensor of their own are aliases.
        if name in tensors and alias not in tensors:
            aliases[alias] = name
    return aliases


def _check_unchanged(folder: str, opened: OpenedPath) -> None:
    """Raise ReplacedError if files were added to the directory, or removed from it, since it was opened."""
    before = set(opened.store.files)
    try:
        with open_path(folder) as again:
            after = set(again.store.files)
    except NotFoundError:
        raise ReplacedError("removed while it was read", path=folder) from None
    # A temporary file is of a process that writes the manifest, too, or was killed while it did (storage/atomic.py).
    changed = [name for name in before ^ after if not is_temporary(name)]
    if changed:
        name = min(changed)
        what = "added" if name in after else "removed"
        text = f"{name!r} was {what} while it was read: seal it when nothing writes there"
        raise ReplacedError(text, path=opened.store.path)
