"""Publish a checkpoint directory: output files with their headers, extra files, the index, and the manifest last.

The package storage/publish makes the directory appear under its name as a whole or not at all. This module defines its
content, Hugging Face's index and the manifest included, and which directory it may replace: only one whose own manifest
lists every file in it.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from statexchange.errors import CorruptError, NotFoundError, UnsafeError, UnsupportedError
from statexchange.formats.box_digests import DIGEST_BYTES, DIGESTS, PLACED_SCHEMA, is_readable, placed_record
from statexchange.formats.model_files import INDEX, MANIFEST
from statexchange.formats.sealed_files import DIGESTS_KEY, SealedFile
from statexchange.formats.sealed_files import KEY as SEALED
from statexchange.formats.version import VERSION_INDEX
from statexchange.sharding.pieces import SpecPieces, boxes_of
from statexchange.sharding.shards import LongTuple
from statexchange.storage.files import check_size, digest
from statexchange.storage.location import (
    MAX_MANIFEST_BYTES,
    check_parsed_size,
    read_json,
    target_path,
)
from statexchange.storage.publish import check_build, open_build
from statexchange.storage.publish.build import OutputFile
from statexchange.storage.store import Budget, Store
from statexchange.storage.tensorfile import encode_header, header_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from statexchange.sharding.plan import FilePlan, Plan, TensorPlan
    from statexchange.sharding.shards import Shard

FORMAT_METADATA = {"format": "pt"}  # as safetensors.torch.save_file writes


@dataclass(frozen=True)
class VersionMarks:
    """The marks that make a checkpoint a version of weights (formats/version.py).

    Attributes:
        index: metadata of the index, which a version always has; of a full one also its size is in it.
        manifest: keys of the manifest, instead of those that it has anyway.
        checksums: of a delta the checksum of each tensor after the change, for the metadata of its file; None for a
            full version.
    """

    index: Mapping[str, Any]
    manifest: Mapping[str, Any]
    checksums: Mapping[str, str] | None = None


class ReplaceableFiles:
    """Finds the files of a published checkpoint that is to be replaced, and refuses it if it has any other entry.

    A build asks at the start, and again before the new directory takes the name. A manifest that has not changed since
    is not parsed again, which for many tensors would take as long as writing the new one.
    """

    def __init__(self) -> None:
        self._version: list[str | int] = []
        self._listed: list[str] = []

    def __call__(self, store: Store) -> Sequence[str]:
        """Return the files of the checkpoint; raise UnsafeError if the directory has any other entry."""
        version: list[str | int] = []
        if MANIFEST in store.listing:
            version = store.open(MANIFEST).version
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


class Draft:
    """The content of a publication that is known before anything is written: file names, headers, small files.

    Args:
        plan: the output files and their tensors.
        source: the format of the source, for the manifest.
        extra: content of the extra files by name.
        metadata: text metadata of the tensor files; by default only "format".
        marks: what makes it a version of weights.

    Raises:
        UnsupportedError: safetensors cannot store a dtype.
        UnsafeError: a tensor name cannot be stored, or a header or the manifest is too large for readers.
        InvalidArgumentError: two tensors of one file have the same name.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        source: str,
        extra: Mapping[str, bytes] = {},
        metadata: Mapping[str, str] = FORMAT_METADATA,
        marks: VersionMarks | None = None,
    ) -> None:
        self.plan = plan
        self.marks = marks
        self._source = source
        # A version always has an index, also of one file: that is where readers of versions look for its number.
        index = index_name(plan) if marks is None else VERSION_INDEX
        # The files of a delta have the checksums of their tensors alone: other programs (formats/version.py) take each
        # key of the metadata for a tensor's name.
        checksums = None if marks is None else marks.checksums
        texts = metadata if checksums is None else checksums
        self.headers = _headers_of(LongTuple([plan]), tuple(texts.items()), by_tensor=checksums is not None)
        self.texts = dict(extra)
        self.names = [*self.headers, *extra]
        if index is not None:
            self.texts[index] = index_text(plan, marks)
            self.names.append(index)
        self.nbytes = plan.nbytes + sum(map(len, (*self.headers.values(), *self.texts.values())))
        self.placed = _placed(LongTuple([plan]), _MOST_LISTED)
        if self.placed.first:
            self.names.append(DIGESTS)
            self.nbytes += self.placed.num_digests * DIGEST_BYTES
        if self.placed.num_listed > _MOST_BOXES:
            text = (
                f"the manifest would list {self.placed.num_listed:,} boxes, and {_MOST_BOXES:,} are allowed: write "
                "fewer tensors at a time (include, exclude), or from fewer ranks"
            )
            raise UnsafeError(text)

    def check_target(self, path: str | os.PathLike[str], *, overwrite: bool) -> None:
        """Raise what a `Publication` of this would raise before it writes tensors, changing nothing.

        Not collective. A quota or a store's permissions are not checked, because only a write reveals them.

        Raises:
            TargetExistsError, UnsafeError, NotFoundError, CorruptError, InvalidArgumentError, StorageError: as
            `Publication`.
        """
        check_build(target_path(path), MANIFEST, check=ReplaceableFiles() if overwrite else None, nbytes=self.nbytes)

    def manifest(self, provenance: Mapping[str, Provenance], sealed: SealedFile | None) -> bytes:
        """Return the manifest: the names of all other files, and for each tensor its boxes with their provenance.

        Args:
            provenance: the boxes of each tensor.
            sealed: the file of the digests of boxes that are not listed.

        Raises:
            UnsafeError: the manifest would be larger than readers accept.

        Example:
            ::

                {"schema": 1, ..., "tensors": {"w": {"file": "model.safetensors", "dtype": "F32", "shape": [4, 3],
                  "source": "module.w", "boxes": [[[0, 0], [2, 3], "<digest>", 0], [[2, 0], [2, 3], "<digest>", 1]]}}}
        """
        tensors = {}
        placements: list[object] = []
        for file in self.plan.files:
            for tensor in file.tensors:
                record: dict[str, object] = {"file": file.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
                record["source"] = tensor.source
                if tensor.name in self.placed.first:
                    assert isinstance(tensor.pieces, SpecPieces)
                    record["placed"] = placed_record(tensor.pieces, placements, self.placed.first[tensor.name])
                else:
                    record["boxes"] = listed_boxes(tensor, provenance[tensor.name])
                tensors[tensor.name] = record
        manifest = {
            "schema": _SCHEMA,
            "plan": self.plan.digest,
            "source": self._source,
            "digest": "xxh3-128",
            "files": sorted(self.names),
            "aliases": dict(self.plan.aliases),
            "tensors": tensors,
        }
        # The schema is new only where an older version could not read the manifest.
        if sealed is not None:
            manifest |= {"schema": PLACED_SCHEMA, "placements": placements, DIGESTS_KEY: {DIGESTS: sealed.to_json()}}
        if self.marks is not None:
            manifest |= self.marks.manifest
        return _encoded(manifest)


class _Placed(NamedTuple):
    """The tensors whose boxes a manifest does not list, but gives by their placements.

    `first` is the number of each one's first digest in the file of digests, which has `num_digests` of them. Of the
    other tensors the manifest lists `num_listed` boxes.
    """

    first: Mapping[str, int]
    num_digests: int
    num_listed: int


@functools.lru_cache(2)
def _placed(planned: LongTuple[Plan], most_listed: int) -> _Placed:
    """Return the tensors that are placed: all on a mesh, if the plan has many boxes.

    Of fewer boxes all are listed, so that older versions read the manifest, too. 50 tensors of 1,000 boxes each are
    placed: ``{"w0": 0, "w1": 1000, ...}`` and 50,000 digests.
    """
    first: dict[str, int] = {}
    on_meshes = []
    num_boxes = num_placed = 0
    for file in planned[0].files:
        for tensor in file.tensors:
            num_boxes += len(tensor.pieces)
            if isinstance(tensor.pieces, SpecPieces):
                first[tensor.name] = num_placed
                on_meshes.append(tensor.pieces)
                num_placed += len(tensor.pieces)
    # Readers refuse placements whose boxes cost them too much work, by the budget for a file of this many digests.
    if num_boxes <= most_listed or not is_readable(on_meshes, num_placed):
        return _Placed({}, 0, num_boxes)
    return _Placed(first, num_placed, num_boxes - num_placed)


class Publication:
    """One checkpoint that is being published to a path or URL.

    Root only. The constructor checks the target and takes over or removes what interrupted publishers left. Call
    `commit` or `abandon` at the end; leaving a with block abandons an uncommitted publication. `build` is the directory
    under construction, `outputs` are the files that were created, in this order, and `manifest_digest` is that of a
    version after its `commit`.

    Args:
        path: the target.
        draft: its content.
        overwrite: replace a published checkpoint at the target.
        reuse: keep output files that an ended process had finished for the same plan (`Build.finished`). Only for a
            plan whose digest covers all that the output depends on.
        resume: assume that processes of other hosts that left files at the target have ended.

    Raises:
        TargetExistsError: the target exists (unless `overwrite`), or another process is publishing to it.
        UnsafeError: overwriting would remove files that the target's manifest does not list.
        UnsupportedError: a URL that cannot be written.
        CorruptError: the manifest of the target is broken.
        StorageError: the operating system refused a read or write.
        InvalidArgumentError: the target is not a path or URL for a checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        draft: Draft,
        *,
        overwrite: bool = False,
        reuse: bool = False,
        resume: bool = False,
    ) -> None:
        self._draft = draft
        self.manifest_digest = ""
        self.build = open_build(
            target_path(path),
            draft.plan.digest,
            [*draft.names, MANIFEST],
            check=ReplaceableFiles() if overwrite else None,
            reuse=reuse,
            resume=resume,
        )
        self.outputs: list[OutputFile] = []

    def create(self, file: FilePlan) -> OutputFile:
        """Create an output file and reserve its disk space; on tmpfs only the free space is checked. Thread-safe."""
        header = self._draft.headers[file.name]
        output = self.build.create(file.name, len(header) + file.data_nbytes, header)
        self.outputs.append(output)
        return output

    def commit(self, provenance: Mapping[str, Provenance]) -> list[tuple[str, int]]:
        """Write extra files, index, digests and manifest, and give the directory its name; return their names, sizes.

        The sizes are counted, not looked up, because another publisher may replace the directory at any time.
        `provenance` has the boxes of each output tensor. On return the checkpoint is complete and durable.

        Raises:
            TargetExistsError: another publisher was first.
        """
        written = []
        for name, data in self._draft.texts.items():
            self.build.put(name, data)
            written.append((name, len(data)))
        sealed: SealedFile | None = None
        if self._draft.placed.first:
            sealed = self._put_digests([provenance[name].digests for name in self._draft.placed.first])
            written.append((DIGESTS, sealed.nbytes))
        manifest = self._draft.manifest(provenance, sealed)
        # A delta names its base by this digest, so that it is not applied to another version of the same number.
        if self._draft.marks is not None:
            self.manifest_digest = digest(manifest)
        self.build.commit(MANIFEST, manifest)
        return [*written, (MANIFEST, len(manifest))]

    def _put_digests(self, digests: Sequence[bytes]) -> SealedFile:
        """Write the file of digests; not as one text, since there may be many."""
        nbytes = sum(map(len, digests))
        output = self.build.create(DIGESTS, nbytes, b"")
        at = 0
        for of_tensor in digests:
            output.write(of_tensor, at)
            at += len(of_tensor)
        output.finish()
        return SealedFile(DIGESTS, nbytes, nbytes, digest(*digests))

    def abandon(self) -> None:
        """Remove all files of an uncommitted publication."""
        self.build.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


@functools.lru_cache(2)
def _headers_of(
    planned: LongTuple[Plan], metadata: tuple[tuple[str, str], ...], *, by_tensor: bool
) -> Mapping[str, bytes]:
    """Return the header of each output file; raise UnsupportedError for a dtype that safetensors cannot store.

    Each has all of the metadata, or `by_tensor` what has the names of its tensors.
    """
    headers = {}
    of_all = dict(metadata)
    for file in planned[0].files:
        tensors = []
        for tensor in file.tensors:
            if tensor.dtype == "C128":
                raise UnsupportedError("safetensors has no complex128; cast or exclude it", name=tensor.name)
            tensors.append((tensor.name, tensor.dtype, tensor.shape))
        texts = {tensor.name: of_all[tensor.name] for tensor in file.tensors} if by_tensor else of_all
        headers[file.name] = encode_header(header_text(tensors, texts))
    return headers


# Index and manifest

_SCHEMA = 1
_MOST_BOXES = 1 << 21  # more do not fit into a manifest, by what readers accept
_HEX_DIGITS = 2 * DIGEST_BYTES
_MOST_LISTED = 1 << 14  # boxes, in 1.5 MB of a manifest: of more, those of tensors on a mesh are not listed


class Provenance(NamedTuple):
    """The provenance of the boxes of a published tensor, in the order of the plan.

    Attributes:
        ranks: the rank that supplied each.
        digests: their digests, of 16 bytes each.
        num_overflows: how many finite elements of all boxes a cast has made infinite.
    """

    ranks: Sequence[int] | NDArray[np.integer[Any]]
    digests: bytes
    num_overflows: int = 0

    def hex_digests(self) -> list[str]:
        """Return the digests as text."""
        text = self.digests.hex()
        return [text[at : at + _HEX_DIGITS] for at in range(0, len(text), _HEX_DIGITS)]


def single_file_name(plan: Plan) -> str:
    """Return the name that the weights would have as one file; readers look for it first."""
    if not plan.files:
        return ""
    return plan.files[0].name.replace(f"-00001-of-{len(plan.files):05d}", "", 1)


def index_name(plan: Plan) -> str | None:
    """Return the name of a plan's index; None for a single file."""
    return None if len(plan.files) == 1 else f"{single_file_name(plan)}{INDEX}"


def index_text(plan: Plan, marks: VersionMarks | None = None) -> bytes:
    """Return Hugging Face's index, which maps tensor names to files.

    ``{"metadata": {"total_size": 48}, "weight_map": {"w": "model-00001-of-00002.safetensors", ...}}``
    """
    weight_map = {}
    for file in plan.files:
        weight_map.update({tensor.name: file.name for tensor in file.tensors})
    metadata = {} if marks is None else dict(marks.index)
    # The index of a delta has exactly the keys that other programs expect, and the size is none of them.
    if marks is None or marks.checksums is None:
        metadata["total_size"] = plan.nbytes
    record = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()


def sealed_manifest_text(
    tensors: Mapping[str, tuple[str, Shard, str]], sealed: Sequence[SealedFile], aliases: Mapping[str, str]
) -> bytes:
    """Return the manifest of a directory that is sealed as it is.

    It lists no files, because the directory is not statexchange's own: no publisher may replace it.

    Args:
        tensors: by name the file of each tensor, its shard, which is the whole tensor, and its digest.
        sealed: the files of the directory.
        aliases: names of tied tensors that are in no file, with the names under which their values are.

    Raises:
        UnsafeError: the manifest would be larger than readers accept.
    """
    records = {}
    for name, (file_name, shard, box_digest) in tensors.items():
        records[name] = {
            "file": file_name,
            "dtype": shard.dtype,
            "shape": list(shard.global_shape),
            "source": name,
            "boxes": [[*shard.boxes[0].to_json(), box_digest, 0]],
        }
    record = {
        "schema": _SCHEMA,
        "source": "huggingface",
        "digest": "xxh3-128",
        "files": [],
        "aliases": dict(aliases),
        "tensors": records,
        SEALED: {file.name: file.to_json() for file in sealed},
    }
    return _encoded(record)


def _encoded(record: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON; raise UnsafeError if readers would refuse it."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    data = text.encode()
    # By the readers' own checks: what is published here can be read.
    try:
        check_size(len(data), MAX_MANIFEST_BYTES, MANIFEST)
        check_parsed_size(text, MANIFEST, Budget(MANIFEST))
    except CorruptError:
        problem = f"the manifest would have {len(data)} bytes, more than readers accept: publish fewer boxes"
        raise UnsafeError(problem) from None
    return data


def listed_boxes(tensor: TensorPlan, provenance: Provenance) -> list[list[object]]:
    """Return the boxes of a tensor for a manifest, each as (offsets, shape, digest, rank)."""
    boxes: list[list[object]] = []
    # Not by `hex_digests`: most tensors have one box, and each call counts where there are 50,000 tensors.
    text, at = provenance.digests.hex(), 0
    for box, rank in zip(boxes_of(tensor.pieces), provenance.ranks, strict=True):
        boxes.append([*box, text[at : at + _HEX_DIGITS], int(rank)])
        at += _HEX_DIGITS
    return boxes


def listed_files(store: Store) -> list[str]:
    """Return the files that a directory's manifest lists, in the order of their removal; [] without a manifest.

    The manifest comes first, so that the directory stops being a checkpoint at the first removal. Indexes follow, then
    the others.

    Raises:
        CorruptError: the manifest is broken.
    """
    path = store.path_of(MANIFEST)
    try:
        raw: Any = read_json(store.open(MANIFEST))
    except NotFoundError:
        return []
    names = raw.get("files") if isinstance(raw, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptError("broken manifest: it lists no files", path=path)
    return [MANIFEST, *sorted(set(names) - {MANIFEST}, key=lambda name: (not name.endswith(INDEX), name))]
