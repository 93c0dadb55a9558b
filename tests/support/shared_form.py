"""The shared form of weight versions on disk, read and written independently of the package.

slime, miles, sglang and ModelExpress read this form. This module imports nothing of the package, so that its writer and
its reader can be tested against another implementation of the same description. It is as strict as the strictest of
those readers, and holds everything in memory.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
import xxhash
import zstandard

Checksum = Literal["adler32", "xxh3-128"]

INDEX = "model.safetensors.index.json"
DELTA_KEYS = frozenset(("version", "base_version", "delta_encoding", "compression_format", "checksum_format"))
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class FormError(Exception):
    """Something on disk, or asked of the writer, is not of the shared form."""


class RawTensor(NamedTuple):
    """A tensor as safetensors stores it: the name of its dtype, its shape, and its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Index(NamedTuple):
    directory: Path
    metadata: dict[str, Any]
    weight_map: dict[str, str]

    @property
    def is_delta(self) -> bool:
        return "delta_encoding" in self.metadata


def version_name(number: int) -> str:
    """The directory name of a version."""
    return f"weight_v{_digits(number)}"


def checksum_text(data: bytes, checksum: str) -> str:
    """The checksum of a whole tensor as a delta file records it: lower-case hexadecimal, all digits."""
    if checksum == "adler32":
        return f"{zlib.adler32(data):08x}"
    if checksum == "xxh3-128":
        return str(xxhash.xxh3_128_hexdigest(data))
    raise FormError(f"checksum_format {checksum!r} is not known")


def read_version(
    run_directory: Path,
    number: int,
    *,
    other_formats: bool = False,
    one_frame: bool = False,
) -> dict[str, RawTensor]:
    """All tensors of a version, from the nearest full version and each delta after it.

    Args:
        run_directory: holds the directories `weight_v000001` and so on.
        number: the version to read.
        other_formats: accept xxh3-128 too, which ModelExpress refuses.
        one_frame: decompress an xor entry in one shot, which sees its first frame alone; otherwise all frames are read.

    Raises:
        FormError: some version of the chain is absent, incomplete or not of the form.
    """
    chain = [_read_index(run_directory, number, other_formats)]
    while chain[-1].is_delta:
        chain.append(_read_index(run_directory, number - len(chain), other_formats))
    *deltas, full = chain
    tensors = _read_full(full)
    for delta in reversed(deltas):
        tensors |= _read_changes(delta, tensors, one_frame)
    return tensors


def _digits(number: int) -> str:
    if not 0 <= number <= 999_999:
        raise FormError(f"version {number} has no name of six digits")
    return f"{number:06d}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FormError(f"a JSON object names a key twice: {sorted(name for name, _ in pairs)}")
    return result


def _json_object(raw: bytes, place: Path) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise FormError(f"{place}: not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise FormError(f"{place}: not a JSON object")
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormError(f"{path}: cannot be read: {error.strerror}") from error


def _read_index(run_directory: Path, number: int, other_formats: bool) -> _Index:
    directory = run_directory / version_name(number)
    place = directory / INDEX
    index = _json_object(_read_bytes(place), place)
    metadata, weight_map = index.get("metadata"), index.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise FormError(f"{place}: metadata or weight_map is not an object")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise FormError(f"{place}: {file!r} is not a plain file name that ends in .safetensors")
    if metadata.get("version", _digits(number)) != _digits(number):
        raise FormError(f"{place}: version is {metadata['version']!r}, not {_digits(number)!r}")
    if "delta_encoding" in metadata:
        _check_delta(metadata, number, place, other_formats)
    return _Index(directory, metadata, weight_map)


def _check_delta(metadata: dict[str, Any], number: int, place: Path, other_formats: bool) -> None:
    if metadata.keys() != DELTA_KEYS:
        raise FormError(f"{place}: the keys of a delta's metadata are {sorted(metadata)}, not {sorted(DELTA_KEYS)}")
    allowed = {
        "base_version": [_digits(number - 1)],
        "delta_encoding": ["xor"],
        "compression_format": ["zstd"],
        "checksum_format": ["adler32", "xxh3-128"] if other_formats else ["adler32"],
    }
    for key, values in allowed.items():
        if metadata[key] not in values:
            raise FormError(f"{place}: {key} is {metadata[key]!r}, not {' or '.join(map(repr, values))}")


def _read_file(path: Path) -> tuple[dict[str, RawTensor], dict[str, str]]:
    raw = _read_bytes(path)
    try:
        safetensors.deserialize(raw)  # type: ignore[no-untyped-call]  # checks the offsets, the sizes and the length of the file
    except safetensors.SafetensorError as error:
        raise FormError(f"{path}: not a whole safetensors file: {error}") from error
    start = 8 + int.from_bytes(raw[:8], "little")
    header = _json_object(raw[8:start], path)
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        tensors[name] = RawTensor(entry["dtype"], tuple(entry["shape"]), raw[start + first : start + end])
    return tensors, metadata


def _read_files(index: _Index) -> list[tuple[Path, dict[str, RawTensor], dict[str, str]]]:
    """Each data file with its tensors and metadata; one that the index does not name may hold no tensor."""
    names = {path.name for path in index.directory.glob("*.safetensors")} | set(index.weight_map.values())
    result = []
    for file in sorted(names):
        path = index.directory / file
        tensors, metadata = _read_file(path)
        expected = {name for name, place in index.weight_map.items() if place == file}
        if tensors.keys() != expected:
            raise FormError(f"{path}: index and header differ by the tensors {sorted(tensors.keys() ^ expected)}")
        result.append((path, tensors, metadata))
    return result


def _read_full(index: _Index) -> dict[str, RawTensor]:
    result: dict[str, RawTensor] = {}
    for _, tensors, _ in _read_files(index):
        result |= tensors
    total = sum(len(tensor.data) for tensor in result.values())
    if index.metadata.get("total_size", total) != total:
        raise FormError(f"{index.directory}: total_size is {index.metadata['total_size']}, the tensors have {total}")
    return result


def _read_changes(index: _Index, base: dict[str, RawTensor], one_frame: bool) -> dict[str, RawTensor]:
    """The changed tensors of a delta, applied to those of its base and checked."""
    result: dict[str, RawTensor] = {}
    for path, entries, checksums in _read_files(index):
        if checksums.keys() != entries.keys():
            raise FormError(f"{path}: not one checksum a tensor: {sorted(checksums.keys() ^ entries.keys())}")
        for name, entry in entries.items():
            place = f"{path}: {name}"
            if name not in base:
                raise FormError(f"{place}: the base version has no such tensor")
            if entry.dtype != "U8" or len(entry.shape) != 1:
                raise FormError(f"{place}: an entry is U8 of one dimension, not {entry.dtype} {entry.shape}")
            blob = _decompress(entry.data, one_frame, place)
            old = base[name]
            data = _xored(old.data, blob, place)
            found = checksum_text(data, index.metadata["checksum_format"])
            if found != checksums[name]:
                raise FormError(f"{place}: the checksum after the change is {found}, not {checksums[name]}")
            result[name] = old._replace(data=data)
    return result


def _decompress(data: bytes, one_frame: bool, place: str) -> bytes:
    decompressor = zstandard.ZstdDecompressor()
    try:
        return bytes(decompressor.decompress(data) if one_frame else decompressor.stream_reader(data).read())
    except zstandard.ZstdError as error:
        raise FormError(f"{place}: not zstd: {error}") from error


def _xored(old: bytes, blob: bytes, place: str) -> bytes:
    if len(blob) != len(old):
        raise FormError(f"{place}: {len(blob)} bytes after decompression, the tensor has {len(old)}")
    return (np.frombuffer(old, np.uint8) ^ np.frombuffer(blob, np.uint8)).tobytes()


class SharedFormWriter:
    """Writes versions as the trainers' tools do: data files, then the index by a temporary name, fsync and rename.

    Entries are one zstd frame each, with the size of its content. At most `files` data files are written, none of them
    empty; tensors go to them in turn. Nothing is refused that a test may want wrong on disk, such as a base version
    that is not the one before; but a version is not written twice.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        compression_level: int = 1,
        checksum: Checksum = "adler32",
        files: int = 1,
    ) -> None:
        self._run_directory = run_directory
        self._compressor = zstandard.ZstdCompressor(level=compression_level)
        self._checksum: Checksum = checksum
        self._files = files

    def write_full(self, number: int, tensors: Mapping[str, RawTensor], total_size: int | None = None) -> Path:
        """Write a full version; `total_size` is what the index records, by default the bytes of all tensors."""
        if total_size is None:
            total_size = sum(len(tensor.data) for tensor in tensors.values())
        return self._write(number, {"total_size": total_size}, tensors, {})

    def write_delta(
        self, number: int, base_number: int, old: Mapping[str, RawTensor], new: Mapping[str, RawTensor]
    ) -> Path:
        """Write what differs between `old`, the tensors of the base version, and `new`, of the same names."""
        if [(name, *old[name][:2]) for name in sorted(old)] != [(name, *new[name][:2]) for name in sorted(new)]:
            raise FormError("a delta cannot change names, dtypes or shapes")
        entries, checksums = {}, {}
        for name, tensor in new.items():
            if tensor.data != old[name].data:
                data = self._compressor.compress(_xored(old[name].data, tensor.data, name))
                entries[name] = RawTensor("U8", (len(data),), data)
                checksums[name] = checksum_text(tensor.data, self._checksum)
        metadata = {
            "version": _digits(number),
            "base_version": _digits(base_number),
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        return self._write(number, metadata, entries, checksums)

    def _write(
        self, number: int, metadata: dict[str, Any], tensors: Mapping[str, RawTensor], checksums: dict[str, str]
    ) -> Path:
        directory = self._run_directory / version_name(number)
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise FormError(f"{directory}: was written before") from error
        count = min(self._files, len(tensors))
        weight_map = {name: f"model-{i % count:05d}-of-{count:05d}.safetensors" for i, name in enumerate(tensors)}
        for file in sorted(set(weight_map.values())):
            names = [name for name in tensors if weight_map[name] == file]
            sums = {name: checksums[name] for name in names if name in checksums}
            _write_synced(directory / file, _file_bytes({name: tensors[name] for name in names}, sums))
        temporary = directory / f"{INDEX}.tmp"
        _write_synced(temporary, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode())
        temporary.rename(directory / INDEX)
        _sync_directory(directory)
        _sync_directory(self._run_directory)
        return directory


def _file_bytes(tensors: Mapping[str, RawTensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_tensors(rng: np.random.Generator, n: int) -> dict[str, RawTensor]:
    """Tensors of finite values: the first has more than 1 MiB, the others are small, scalars or empty.

    Dtypes BF16, F32, F8_E4M3 and I64 take turns with the kinds of shape, so that 20 tensors hold each pair.
    """
    tensors = {}
    for i in range(n):
        small = [int(size) for size in rng.integers(1, 40, 3)]
        empty = [(0,), (3, 0), (2, 0, 5)][i % 3]
        shape = (1031, 517) if i == 0 else [tuple(small), (), tuple(small[:1]), tuple(small[:2]), empty][i % 5]
        dtype = ("BF16", "F32", "F8_E4M3", "I64")[i % 4]
        tensors[f"model.layers.{i}.weight"] = RawTensor(dtype, shape, _random_values(rng, dtype, math.prod(shape)))
    return tensors


def _random_values(rng: np.random.Generator, dtype: str, count: int) -> bytes:
    if dtype == "I64":
        return rng.integers(-(2**40), 2**40, count, np.int64).astype("<i8").tobytes()
    if dtype == "F8_E4M3":  # 0x7f and 0xff are its NaN
        return bytes(rng.integers(0, 0x7F, count, np.uint8) | (rng.integers(0, 2, count, np.uint8) << 7))
    floats = rng.standard_normal(count, np.float32).astype("<f4")
    return floats.tobytes() if dtype == "F32" else (floats.view("<u4") >> 16).astype("<u2").tobytes()


def changed(rng: np.random.Generator, tensors: Mapping[str, RawTensor], fraction: float) -> dict[str, RawTensor]:
    """The same tensors after a step: in about half of them, `fraction` of the elements (at least one) differ.

    At least one tensor changes if any has elements and `fraction` is above 0; values of `random_tensors` stay finite.
    """
    result = dict(tensors)
    names = [name for name, tensor in tensors.items() if tensor.data and fraction > 0]
    if not names:
        return result
    chosen = {name for name in names if rng.random() < 0.5} | {names[int(rng.integers(len(names)))]}
    for name in (name for name in names if name in chosen):
        tensor = tensors[name]
        rows = np.frombuffer(tensor.data, np.uint8).reshape(-1, ITEM_BYTES[tensor.dtype]).copy()
        where = rng.choice(len(rows), max(1, round(fraction * len(rows))), replace=False)
        # The low seven bits are mantissa bits of BF16 and F32; of F8_E4M3 only the sign is sure to leave it finite.
        bits = 0x80 if tensor.dtype.startswith("F8") else rng.integers(1, 0x80, len(where), np.uint8)
        rows[where, 0] ^= bits
        result[name] = tensor._replace(data=rows.tobytes())
    return result
