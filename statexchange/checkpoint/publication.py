"""Publish a checkpoint directory: output files with their headers, extra files, the index, and the manifest last.

The package storage/publish makes the directory appear under its name as a whole or not at all. This module defines its
content, and which directory it may replace: only one whose own manifest lists every file in it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from statexchange.checkpoint.index import index_name, index_text, listed_files, manifest_text
from statexchange.errors import UnsafeError, UnsupportedError
from statexchange.formats.huggingface import MANIFEST
from statexchange.storage.location import target_path
from statexchange.storage.publish import check_build, open_build
from statexchange.storage.publish.build import OutputFile
from statexchange.storage.store import Store
from statexchange.storage.tensorfile import encode_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

    from statexchange.checkpoint.index import BoxProvenance
    from statexchange.sharding.plan import FilePlan, Plan

__all__ = ["FORMAT_METADATA", "Publication", "check_publication"]

FORMAT_METADATA = {"format": "pt"}  # as safetensors.torch.save_file writes


class _ReplaceCheck:
    """Finds the files of a published checkpoint that is to be replaced, and refuses it if it has any other entry.

    A build asks at the start, and again before the new directory takes the name. A manifest that has not changed since
    is not parsed again, which for many tensors would take as long as writing the new one.
    """

    def __init__(self) -> None:
        self._version: list[str | int] = []
        self._listed: list[str] = []

    def __call__(self, store: Store) -> Sequence[str]:
        """Return the files of the checkpoint; raise UnsafeError if the directory has any other entry."""
        version = store.open(MANIFEST).version if MANIFEST in store.listing else []
        if not version or version != self._version:
            self._version, self._listed = version, listed_files(store)
        listed = self._listed
        unlisted = sorted(_unlisted(store, listed))
        if unlisted:
            text = f"refused to overwrite: {unlisted[0]!r} is not listed in the target's {MANIFEST} as a file"
            raise UnsafeError(text, path=store.path)
        return listed


def _unlisted(store: Store, listed: Sequence[str], folder: str = "") -> Iterator[str]:
    """Yield what is in a directory and not listed; a directory counts as listed if a file in it is."""
    for name, kind in store.listing.items():
        path = f"{folder}{name}"
        if kind == "directory" and any(other.startswith(f"{path}/") for other in listed):
            yield from _unlisted(store.below(name), listed, f"{path}/")
        elif kind != "file" or path not in listed:
            yield path


class _Draft:
    """The content of a publication that is known before anything is written: file names, headers, small files.

    Raises:
        UnsupportedError: safetensors cannot store a dtype.
        UnsafeError: a tensor name cannot be stored, or a header is too large.
        InvalidArgumentError: two tensors of one file have the same name.
    """

    def __init__(self, plan: Plan, extra: Mapping[str, bytes], metadata: Mapping[str, str]) -> None:
        index = index_name(plan)
        self.headers = {file.name: _header_of(file, metadata) for file in plan.files}
        self.texts = dict(extra)
        self.names = [*self.headers, *extra]
        if index is not None:
            self.texts[index] = index_text(plan)
            self.names.append(index)
        self.nbytes = plan.nbytes + sum(map(len, (*self.headers.values(), *self.texts.values())))


def check_publication(
    path: str | os.PathLike[str],
    plan: Plan,
    *,
    extra: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> None:
    """Raise what a `Publication` with these arguments would raise before it writes tensors, changing nothing.

    Not collective. A quota or a store's permissions are not checked, because only a write reveals them.

    Raises:
        TargetExistsError, UnsafeError, UnsupportedError, NotFoundError, CorruptError, InvalidArgumentError,
        StorageError: as `Publication`.
    """
    draft = _Draft(plan, extra or {}, metadata or FORMAT_METADATA)
    check = _ReplaceCheck() if overwrite else None
    check_build(target_path(path), MANIFEST, check=check, nbytes=draft.nbytes, resume=resume)


class Publication:
    """One checkpoint that is being published to a path or URL.

    Root only. The constructor checks the target and takes over or removes what interrupted publishers left. Call
    `commit` or `abandon` at the end; leaving a with block abandons an uncommitted publication. `path` is the target,
    `building_path` the directory of the files until then, and `finished` the metadata of finished files by name.

    Args:
        path: the target.
        plan: the output files and their tensors.
        source: the format of the source, for the manifest.
        extra: content of the extra files by name.
        metadata: text metadata of the tensor files; by default only "format".
        overwrite: replace a published checkpoint at the target.
        reuse: keep output files that an ended process had finished for the same plan; `finished` maps their names to
            the metadata that `record` was given. Only for a plan whose digest covers all that the output depends on.
        resume: assume that processes of other hosts that left files at the target have ended.

    Raises:
        TargetExistsError: the target exists (unless `overwrite`), or another process is publishing to it.
        UnsafeError: overwriting would remove files that the target's manifest does not list.
        UnsupportedError: a dtype that safetensors cannot hold, or a URL that cannot be written.
        CorruptError: the manifest of the target is broken.
        StorageError: the operating system refused a read or write.
        InvalidArgumentError: the target is not a path or URL for a checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: Plan,
        *,
        source: str,
        extra: Mapping[str, bytes] | None = None,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        reuse: bool = False,
        resume: bool = False,
    ) -> None:
        self._plan = plan
        self._source = source
        self._draft = _Draft(plan, extra or {}, metadata or FORMAT_METADATA)
        self._build = open_build(
            target_path(path),
            plan.digest,
            [*self._draft.names, MANIFEST],
            check=_ReplaceCheck() if overwrite else None,
            reuse=reuse,
            resume=resume,
        )
        self.path, self.building_path, self.finished = self._build.path, self._build.building_path, self._build.finished

    def create(self, file: FilePlan) -> OutputFile:
        """Create an output file and reserve its disk space; on tmpfs only the free space is checked. Thread-safe."""
        header = self._draft.headers[file.name]
        return self._build.create(file.name, len(header) + file.data_nbytes, header)

    def record(self, name: str, metadata: object) -> None:
        """Record that an output file is finished, with JSON metadata, for a publisher that resumes after a kill."""
        self._build.record(name, metadata)

    def commit(self, provenance: Mapping[str, Sequence[BoxProvenance]]) -> list[tuple[str, int]]:
        """Write extra files, index and manifest, and give the directory its name; return these files with their sizes.

        The sizes are counted, not looked up, because another publisher may replace the directory at any time.
        `provenance` has one entry per piece of each output tensor. On return the checkpoint is complete and durable.

        Raises:
            TargetExistsError: another publisher was first.
        """
        texts = self._draft.texts
        for name, data in texts.items():
            self._build.put(name, data)
        manifest = manifest_text(self._plan, provenance, self._draft.names, self._source)
        self._build.commit(MANIFEST, manifest)
        return [*((name, len(data)) for name, data in texts.items()), (MANIFEST, len(manifest))]

    def abandon(self) -> None:
        """Remove all files of an uncommitted publication."""
        self._build.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


def _header_of(plan: FilePlan, metadata: Mapping[str, str]) -> bytes:
    """Return the header of an output file; raise UnsupportedError for a dtype that safetensors cannot store."""
    for tensor in plan.tensors:
        if tensor.dtype == "C128":
            raise UnsupportedError("safetensors has no complex128; cast or exclude it", name=tensor.name)
    return encode_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in plan.tensors], metadata)
