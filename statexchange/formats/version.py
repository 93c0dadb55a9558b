"""Read a version of weights: a full one, or a delta with the versions that it is based on.

A trainer publishes ``weight_v000012/`` beside ``weight_v000011/``. A full version is a Hugging Face checkpoint. A delta
has of each tensor that changed the zstd frames of ``new ^ old``, as a U8 tensor of its name, and the number of the
version that it is based on. A delta is read as all tensors of the model: unchanged ones from the files of the version
that had them last, changed ones through a `PatchedFile`, which reads the same bytes of the base and applies the
frames that they need. So every reader of boxes reads a version, and nothing is held whole.

**Our own versions** have a manifest, which alone decides. It lists every tensor as changed or unchanged, the boxes with
their digests after the change, the sizes of the frames, and the base with the digest of *its* manifest, so that a base
of another run, or one that was published again, is refused::

    "schema": 3,
    "version": {"run": "5f1d...", "number": 12, "base": 11, "base_manifest": "9a3c...", "frame_nbytes": 2097152,
                "changed": {"w": {"dtype": "BF16", "shape": [8, 2], "boxes": [[[0, 0], [4, 2], "f00d...", 0], ...],
                                  "frames": [31, 18], ...}}, "unchanged": ["b"]}

If each box of a tensor is one run of it, the frames are those of the windows of each box in turn, so that each rank
compresses its own rows where they lie. Else they are those of the windows of the whole tensor.

**Versions of others** (slime, miles, sglang, vime, stitch, ModelExpress) have no manifest. Their index decides: the
five keys of its metadata, and a weight map with which the files must agree. A tensor is proven by the checksum of the
whole new tensor in its file's metadata.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError, excerpt
from statexchange.formats import huggingface
from statexchange.formats.model_files import INDEX, MANIFEST, check_file_names
from statexchange.formats.source import ShardFile, Source, SourceTensor, open_listed, parsing
from statexchange.formats.version_frames import Frames, PatchedFile, frame_ends
from statexchange.sharding.shards import Box
from statexchange.storage.files import WINDOW_BYTES, digest
from statexchange.storage.location import MAX_MANIFEST_BYTES, OpenedPath, open_path, read_json
from statexchange.storage.publish.claim import CLAIM_NAME, claim_of
from statexchange.storage.store import ByteRange, Store, StoredFile
from statexchange.storage.tensorfile import Header, read_header
from statexchange.storage.versions import version_name, version_number

DELTA_SCHEMA = 3  # of a manifest whose directory is a delta
VERSION_KEY = "version"
VERSION_INDEX = f"model.safetensors{INDEX}"
_MARK = b'{"schema":3,'  # the first bytes of a delta's manifest, whose first key is the schema
_HEX = re.compile(r"[0-9a-fA-F]{1,64}")
_CHECKSUMS = ("adler32", "xxh3-128")
_MOST_DELTAS = 10_000


def index_metadata(number: int, base: int) -> dict[str, str]:
    """Return the metadata of the index of a delta of ours. A delta of another program has these five keys, too."""
    return {
        "version": f"{number:06d}",
        "base_version": f"{base:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }


def key_of(source: Source) -> str:
    """Return the key of a version that `read` has opened without copies. Versions with other tensors have other keys.

    That of a version of ours is the digest of its manifest, which covers its bases.
    """
    key = _manifest_digest(source.opened.store)
    # A version lists its own files before those of its base.
    return key or _key_of_files(shard_file.file for shard_file in reversed(source.files))


def _manifest_digest(store: Store) -> str:
    """Return the digest of the manifest of a version; "" without one, as in a version of another program."""
    return digest(store.open(MANIFEST).read_all(MAX_MANIFEST_BYTES)) if MANIFEST in store.listing else ""


def _key_of_files(files: Iterable[StoredFile], key: str = "") -> str:
    """Return the key of a version of another program: `key` is that of its base, whose files come before its own."""
    for file in files:
        key = digest(json.dumps([file.version, key]).encode())
    return key


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a directory that is called as a version is, or whose manifest is that of a delta."""
    if opened.file is not None:
        return False
    store = opened.store
    if _number_of(store) is not None and (MANIFEST in store.files or _has_tensors(store)):
        return True
    return MANIFEST in store.files and store.open(MANIFEST).first_bytes(len(_MARK)) == _MARK


def _number_of(store: Store) -> int | None:
    return version_number(store.path.rstrip("/").rpartition("/")[2])


def _has_tensors(store: Store) -> bool:
    return any(name.endswith((".safetensors", INDEX)) for name in store.files)


def is_unfinished(store: Store) -> bool:
    """Whether a version has a claim and no manifest, or no file at all: it is being published or removed.

    A store that has directories, as HDFS, keeps that of a removed version.
    """
    return not store.listing or (MANIFEST not in store.listing and CLAIM_NAME in store.listing)


def delta_facts(opened: OpenedPath) -> tuple[int, int] | None:
    """Return the base of a delta and the number of tensors that it changes; None for a full version.

    Raises:
        IncompleteError, CorruptError, UnsupportedError: as `read`.
    """
    delta = _delta_of(opened.store)
    return None if delta is None else (delta.base, delta.num_changed)


def read(opened: OpenedPath, *, copies: Mapping[str, str] = MappingProxyType({})) -> Source:
    """Return a version with all tensors of the model, each as its newest change has it.

    `copies` are paths of checkpoints with the tensors of versions, by the key of each, as `key_of` has it: a base is
    read there, if it has a copy.
    """
    deltas: list[tuple[OpenedPath, _Delta]] = []
    at = opened
    with contextlib.ExitStack() as bases:  # which are closed here unless all is read, else with the newest version
        while (delta := _delta_of(at.store)) is not None:
            if len(deltas) == _MOST_DELTAS:
                raise CorruptError(f"more than {_MOST_DELTAS:,} deltas follow one another", path=opened.path)
            deltas.append((at, delta))
            copy = copies.get(delta.base_manifest)
            at = bases.enter_context(_open_base(at, delta) if copy is None else open_path(copy))
        source = huggingface.read(at)
        key = _key_of_files(shard_file.file for shard_file in reversed(source.files))
        used = [at]  # whose files the source has
        while deltas:
            if key in copies:  # of another program's version, whose key only the whole chain gives
                for base in used:
                    base.close()
                used = [bases.enter_context(open_path(copies[key]))]
                source = huggingface.read(used[0])
            if source.problems:
                raise source.problems[0]
            newer, delta = deltas.pop()
            source = _resolved(newer, delta, source)
            used.append(newer)
            key = _key_of_files((file for file, _ in reversed(delta.files)), key)
        # All at once: a base that adopted its own base would be closed by recursion, and a chain may be long.
        opened.store.adopted = tuple(base.store for base in used[:-1])
        bases.pop_all()
    return source


@dataclass(frozen=True, slots=True)
class _Delta:
    """A delta: its files, its base and its changes.

    Attributes:
        files: the opened files with their headers.
        number: its own number, and
        base: that of the version that it is based on.
        checksum: the kind of the checksums in the files' metadata, each of all new bytes of a tensor; "" if boxes have
            digests.

    Of a delta with a manifest:
        base_manifest: the digest of the base's manifest.
        records: the records of the changed tensors by name, which `huggingface.check_record` has checked.
        unchanged: the names of the others.
        aliases: names of tied tensors.
        frame_nbytes: the size of windows of which each is a frame.
    """

    files: Sequence[tuple[StoredFile, Header]]
    number: int
    base: int
    checksum: str
    base_manifest: str = ""
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unchanged: frozenset[str] | None = None
    aliases: Mapping[str, str] | None = None
    frame_nbytes: int = WINDOW_BYTES

    @property
    def num_changed(self) -> int:
        """The number of changed tensors."""
        return sum(len(header.entries) for _, header in self.files)


def _delta_of(store: Store) -> _Delta | None:
    """Return the delta in a directory; None if it is a full version."""
    # Our manifest decides alone. Without one the index of another program does, if the version is whole.
    if MANIFEST in store.files:
        file = store.open(MANIFEST)
        record: Any = read_json(file)
        if not isinstance(record, dict) or record.get("schema") != DELTA_SCHEMA:
            return None
        with parsing("broken manifest", path=file.path):
            return _published(store, record)
    if is_unfinished(store):
        text = f"{claim_of(store) or 'it has no file'}: this version is not complete, or is being removed"
        raise IncompleteError(text, path=store.path)
    if VERSION_INDEX in store.files:
        index: Any = read_json(store.open(VERSION_INDEX))
        metadata = index.get("metadata") if isinstance(index, dict) else None
        if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
            return None
        with parsing("broken index of a version", path=store.path_of(VERSION_INDEX)):
            return _foreign(store, metadata, index["weight_map"])
    # Others publish the index last. Without it a delta and a full version look alike: absence decides nothing.
    if "model.safetensors" not in store.files or _is_delta_file(store):
        text = f"no {VERSION_INDEX} can be seen here: this version is not complete, or not yet visible on this host"
        raise IncompleteError(text, path=store.path)
    return None


def _is_delta_file(store: Store) -> bool:
    header = read_header(store.open("model.safetensors"))
    return bool(header.entries) and all(name in header.metadata for name in header.entries)


def _published(store: Store, manifest: Mapping[str, Any]) -> _Delta:
    """Return the delta that our manifest describes."""
    version = manifest[VERSION_KEY]
    records = version["changed"]
    for record in records.values():
        huggingface.check_record(record)
        if {*map(type, record["frames"])} - {int} or min(record["frames"], default=1) <= 0:
            raise ValueError(f"not the sizes of frames: {excerpt(record['frames'])}")
    weight_map = {name: tensor["file"] for name, tensor in manifest["tensors"].items()}
    if weight_map.keys() != records.keys():
        raise ValueError("its tensors are not those that changed")
    return _Delta(
        _opened_files(store, weight_map),
        int(version["number"]),
        int(version["base"]),
        checksum="",
        base_manifest=str(version["base_manifest"]),
        records=records,
        unchanged=frozenset(version["unchanged"]),
        aliases=manifest.get("aliases", {}),
        frame_nbytes=int(version["frame_nbytes"]),
    )


def _foreign(store: Store, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> _Delta:
    """Return the delta of another program, which its index describes."""
    path = store.path_of(VERSION_INDEX)
    missing = index_metadata(0, 0).keys() - metadata.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    encoding, compression, kind = map(metadata.get, ("delta_encoding", "compression_format", "checksum_format"))
    if encoding != "xor" or compression != "zstd" or kind not in _CHECKSUMS:
        text = f"a delta in {excerpt(encoding)}, {excerpt(compression)} and {excerpt(kind)} is not supported"
        raise UnsupportedError(f"{text}: publish in xor, zstd and {' or '.join(_CHECKSUMS)}", path=path)
    number, base = int(metadata["version"]), int(metadata["base_version"])
    # Only its name identifies the base: under another name a delta would be applied to the wrong one.
    if _number_of(store) != number:
        raise ValueError(f"it is that of version {number}")
    files = _opened_files(store, weight_map)
    for file, header in files:
        for name in header.entries:
            if not _HEX.fullmatch(header.metadata.get(name, "")):
                raise CorruptError("a changed tensor has no checksum", name=name, path=file.path)
    return _Delta(files, number, base, kind)


def _opened_files(store: Store, weight_map: Mapping[str, str]) -> list[tuple[StoredFile, Header]]:
    """Open all files of a weight map, and check that they have exactly its tensors."""
    check_file_names(weight_map, store.path)
    tensors: dict[str, set[str]] = {}  # by file
    for tensor, name in weight_map.items():
        tensors.setdefault(name, set()).add(tensor)
    files = []
    for name in sorted(tensors):
        file = open_listed(store, name, "a file of this version is missing, or not yet visible on this host")
        header = read_header(file)
        # A file of another attempt may have the same name.
        differing = sorted(header.entries.keys() ^ tensors[name])
        if differing:
            raise IncompleteError("the file and the list of its tensors disagree", name=differing[0], path=file.path)
        for tensor, entry in header.entries.items():
            if entry.dtype != "U8" or len(entry.shape) != 1:
                raise CorruptError("the entry of a delta is one row of bytes", name=tensor, path=file.path)
        files.append((file, header))
    return files


def _open_base(opened: OpenedPath, delta: _Delta) -> OpenedPath:
    """Open the version that a delta is based on, which lies beside it."""
    if not 0 <= delta.base < delta.number:
        raise CorruptError(f"version {delta.number} cannot be based on version {delta.base}", path=opened.path)
    path = f"{opened.store.address.rstrip('/').rpartition('/')[0]}/{version_name(delta.base)}"
    try:
        base = open_path(path)
    except NotFoundError:
        text = f"version {delta.number} is based on version {delta.base}, which is not beside it"
        raise IncompleteError(text, path=path) from None
    if delta.base_manifest:
        present = _manifest_digest(base.store)
        if present != delta.base_manifest:
            base.close()
            text = f"this is not the version {delta.base} on which version {delta.number} is based"
            raise CorruptError(text, path=path, expected=delta.base_manifest, found=present)
    return base


def _resolved(opened: OpenedPath, delta: _Delta, base: Source) -> Source:
    """Return the source of a delta: the tensors of the base, of which some are patched."""
    tensors: dict[str, tuple[ShardFile, SourceTensor]] = {}
    for shard_file, tensor in base.shards():
        tensors[tensor.shard.name] = shard_file, tensor
    if delta.unchanged is not None and delta.unchanged | delta.records.keys() != tensors.keys():
        name = min((delta.unchanged | delta.records.keys()) ^ tensors.keys())
        raise CorruptError("this version and its base do not have the same tensors", name=name, path=opened.path)
    files = []
    for number, (file, header) in enumerate(delta.files):
        patched = {}
        for name, entry in header.entries.items():
            if name not in tensors:
                raise CorruptError("a changed tensor is not in the base", name=name, path=file.path)
            stored = ByteRange(file, entry.begin, entry.nbytes)
            patched[name] = _patched(delta, header, stored, tensors.pop(name)[1])
        files.append(ShardFile(number, file, patched))
    # Files of the base stay listed without a tensor, so that their names and identities are still looked at.
    for shard_file in base.files:
        kept = {name: tensor for name, tensor in shard_file.tensors.items() if name in tensors}
        files.append(replace(shard_file, rank=len(files), tensors=kept))
    manifest: Mapping[str, Any] | None = None
    if base.manifest is not None and delta.aliases is not None:
        records = dict(base.manifest["tensors"])
        for name, record in delta.records.items():
            records[name] = {**records[name], **record}
        manifest = {"source": base.manifest.get("source"), "aliases": delta.aliases, "tensors": records}
    return Source(
        "version",
        opened,
        files,
        manifest=manifest,
        metadata=base.metadata,
        notes=base.notes,
        small_files=base.config_store,
    )


def _patched(delta: _Delta, header: Header, stored: ByteRange, base: SourceTensor) -> SourceTensor:
    """Return a changed tensor, whose bytes are those of the base with the change applied."""
    shard, name = base.shard, base.shard.name
    record = delta.records.get(name, {})
    if not shard.is_whole or base.byte_ranges[0].strides is not None:
        raise UnsupportedError("the base is no checkpoint of whole tensors", name=name, path=stored.path)
    # Another program's entry, and that of a tensor without elements, is one stretch of any number of frames.
    sizes = record.get("frames") or [stored.nbytes]
    boxes = [Box.from_json(box[:2]) for box in record.get("boxes", ())]
    change = Frames(stored, name, sizes, frame_ends(boxes, shard, delta.frame_nbytes, len(sizes)))
    checksum = header.metadata.get(name, "")
    file = PatchedFile(base.byte_ranges[0], change, checksum if delta.checksum == "adler32" else "")
    patched = ByteRange(file, 0, change.nbytes, checksum if delta.checksum == "xxh3-128" else None)
    if record:
        return huggingface.published_tensor(shard, patched, record, {})
    return SourceTensor(shard, (patched,))
