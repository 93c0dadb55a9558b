"""Publish a checkpoint directory: output files with their headers, extra files, index, and the manifest last.

How the directory appears under its name as a whole or not at all is the build's part (storage/build.py). Here is what
lies in it, and which directory it may replace: one in which every file is listed by a manifest of ours.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from statexchange.checkpoint.index import index_name, index_text, listed_files, manifest_text
from statexchange.errors import InvalidArgumentError, UnsafeError, UnsupportedError
from statexchange.formats.huggingface import MANIFEST
from statexchange.storage.build import OutputFile
from statexchange.storage.open_build import check_build, open_build
from statexchange.storage.store import Store, resolve_path, is_url
from statexchange.storage.tensorfile import encode_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from statexchange.checkpoint.index import BoxProvenance
    from statexchange.sharding.plan import FilePlan, Plan, TensorPlan
    from statexchange.storage.files import Buffer

__all__ = ["FORMAT_METADATA", "PlannedFile", "Publication", "check_publication", "target_path"]

FORMAT_METADATA = {"format": "pt"}  # what save_file is given for tensors of torch


def target_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory to publish, or its URL without a slash at the end."""
    name = resolve_path(path, "a target")
    if is_url(name):
        return name.rstrip("/")
    if "://" in name:
        raise InvalidArgumentError(f"a checkpoint goes to a directory, not to {name!r}")
    return os.path.abspath(name)


def _replaceable_files(store: Store) -> Sequence[str]:
    """Return the files of a checkpoint of ours; UnsafeError if replacing the directory would remove anything else."""
    listed = listed_files(store)
    unlisted = sorted(name for name, kind in store.listing.items() if kind != "file" or name not in listed)
    if unlisted:
        raise UnsafeError(
            f"refused to overwrite: {unlisted[0]!r} is not listed in the target's {MANIFEST} as a file", path=store.path
        )
    return listed


class PlannedFile:
    """An output file under construction: where its tensors go, and what writes there."""

    def __init__(self, plan: FilePlan, output: OutputFile) -> None:
        self._plan = plan
        self._output = output

    @property
    def path(self) -> str:
        """Path of the file during writing."""
        return self._output.path

    @property
    def header(self) -> bytes:
        """The first bytes of the file."""
        return self._output.header

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + self._plan.data_nbytes

    @property
    def is_reserved(self) -> bool:
        """Whether the room for all its bytes is reserved."""
        return self._output.is_reserved

    def offset_of(self, tensor: TensorPlan) -> int:
        """Return the first byte of a tensor in the file."""
        return len(self._output.header) + tensor.begin

    def write(self, data: Buffer, at: int) -> None:
        """Write `data` at byte `at`; in an object store from the first tensor's begin on, in order."""
        self._output.write(data, at)

    def finish(self, *, writes_header: bool = True) -> None:
        """Write the header, unless another host has, and make the file whole and durable."""
        self._output.finish(writes_header=writes_header)


class _Draft:
    """All that is known of a publication before anything is written: its files by name, and their headers.

    Raises what no file can hold: UnsupportedError for a dtype, UnsafeError for a name, InvalidArgumentError.
    """

    def __init__(self, plan: Plan, extra: Mapping[str, bytes], metadata: Mapping[str, str]) -> None:
        index = index_name(plan)
        self.texts = {**extra, **({index: index_text(plan)} if index else {})}
        self.headers = {file.name: _header_of(file, metadata) for file in plan.files}
        self.names = [*self.headers, *([index] if index else []), *extra]
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
    """Raise what a `Publication` with these arguments would raise until its files have all their room.

    Not collective. Nothing is changed. What cannot be told without writing (a quota, a store's permissions) is not
    found. Raises TargetExistsError, UnsafeError, UnsupportedError, NotFoundError, CorruptError, InvalidArgumentError,
    StorageError.
    """
    draft = _Draft(plan, extra or {}, metadata or FORMAT_METADATA)
    check = _replaceable_files if overwrite else None
    check_build(target_path(path), MANIFEST, check=check, nbytes=draft.nbytes, resume=resume)


class Publication:
    """One checkpoint on its way to its path or URL. Root only.

    Constructing it checks the target, and takes over or removes what interrupted publishers left. Ends in `commit` or
    `abandon`; in a with block `abandon` is the default.

    Args:
        path: the target.
        plan: what is published.
        source: the format that the tensors come from, for the manifest.
        extra: content of the extra files by name.
        metadata: text metadata of the tensor files; "format" alone unless given.
        overwrite: replace a checkpoint of ours that lies at the target.
        reuse: keep output files of this very plan that a dead publisher had finished: `finished` maps their names to
            the metadata that `record` was given. It is for plans whose digest stands for every byte.
        resume: the user says that publishers of other hosts that have left something at the target are dead.

    Raises:
        TargetExistsError: the target exists (unless `overwrite`), or another process is publishing to it.
        UnsafeError: overwriting would remove files that no manifest of ours lists.
        UnsupportedError: a dtype that safetensors cannot hold, or a URL that cannot be written.
        StorageError, CorruptError, InvalidArgumentError.
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
            check=_replaceable_files if overwrite else None,
            reuse=reuse,
            resume=resume,
        )

    @property
    def path(self) -> str:
        """The target."""
        return self._build.path

    @property
    def building_path(self) -> str:
        """Directory of the files until commit."""
        return self._build.building_path

    @property
    def finished(self) -> Mapping[str, Any]:
        """Facts of the output files that are finished, by name."""
        return self._build.finished

    def create(self, file: FilePlan) -> PlannedFile:
        """Make an output file with all its room reserved; room in memory is only looked for. For several threads."""
        header = self._draft.headers[file.name]
        return PlannedFile(file, self._build.create(file.name, len(header) + file.data_nbytes, header))

    def record(self, name: str, metadata: Any) -> None:
        """Record that an output file is finished, with metadata (JSON), for whoever resumes after a kill."""
        self._build.record(name, metadata)

    def make_probe(self) -> str:
        """Return a path that exists where the files are seen, and nowhere else, until `commit`."""
        return self._build.make_probe()

    def commit(self, provenance: Mapping[str, Sequence[BoxProvenance]]) -> list[tuple[str, int]]:
        """Write extra files, index and manifest, and give the directory its name; return these files with their sizes.

        The sizes are those written: the name may lead to another checkpoint a moment later.

        `provenance` has one BoxProvenance per piece of each output tensor. When this returns the checkpoint is there, whole and
        durable. Raises TargetExistsError if another publisher was first.
        """
        texts = self._draft.texts
        for name, data in texts.items():
            self._build.put(name, data)
        manifest = manifest_text(self._plan, provenance, self._draft.names, self._source)
        self._build.commit(MANIFEST, manifest)
        return [*((name, len(data)) for name, data in texts.items()), (MANIFEST, len(manifest))]

    def abandon(self) -> None:
        """Remove what was built, unless it was committed."""
        self._build.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


def _header_of(plan: FilePlan, metadata: Mapping[str, str]) -> bytes:
    """Return the header of an output file; UnsupportedError for what safetensors cannot hold."""
    for tensor in plan.tensors:
        if tensor.dtype == "C128":
            raise UnsupportedError("safetensors has no complex128; cast or exclude it", name=tensor.name)
    return encode_header([(t.name, t.dtype, t.shape) for t in plan.tensors], metadata)
