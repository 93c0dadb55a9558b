"""Formats of other frameworks: named and shown by `info` and `ls`, refused with the tool that reads them elsewhere."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine
from stored import DATA

import statexchange as sx
from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, UnsupportedError
from statexchange.report.summary import Summary, summarize

SAMPLES = DATA / "foreign"


def rows(call: CommandLine, path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Return dtype, shape and bytes of each tensor that `ls` lists."""
    code, envelope = call.json("ls", path)
    assert code == 0
    return {row["name"]: (row["dtype"], row["shape"], row["nbytes"]) for row in envelope["data"]["tensors"]}


PLAIN = {"layer.weight": ("F32", [2, 32], 256), "layer.bias": ("I64", [3], 24)}
# By file or directory: its kind, a word of the tool that reads it, and its tensors.
KINDS: dict[str, tuple[str, str, dict[str, tuple[str, list[int], int]]]] = {
    "model.gguf": (
        "gguf",
        "llama.cpp",
        {
            "token_embd.weight": ("F32", [2, 32], 256),
            "blk.0.attn_q.weight": ("F16", [2, 32], 128),
            "output.weight": ("Q8_0", [2, 32], 68),
        },
    ),
    "array.npy": ("npy", "numpy.load", {"array": (">f2", [2, 32], 128)}),
    "arrays.npz": (
        "npz",
        "numpy.load",
        {"weight": ("F32", [2, 32], 256), "bias": ("I64", [3], 24), "text": ("<U1", [2], 8)},
    ),
    "flax_model.msgpack": (
        "msgpack",
        "msgpack_restore",
        {
            "params.dense.kernel": ("F32", [2, 32], 256),
            "params.dense.bias": ("BF16", [3], 6),
            "params.layers.0.scale": ("I64", [3], 24),
        },
    ),
    "zarr2": ("zarr", "zarr.open", PLAIN),
    "zarr3": ("zarr", "zarr.open", PLAIN),
    "zarr3-consolidated": ("zarr", "zarr.open", PLAIN),
    "orbax": (
        "orbax",
        "orbax.checkpoint",
        {"state.params.dense.kernel": ("?", [2, 32], None), "state.params.dense.bias": ("?", [3], None)},
    ),
    "orbax-zarr": (
        "orbax",
        "orbax.checkpoint",
        {"params.dense.kernel": ("F32", [2, 32], 256), "params.dense.bias": ("BF16", [3], 6)},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_foreign_format_is_shown_and_its_tensors_are_refused(name: str, tmp_path: Path, call: CommandLine) -> None:
    kind, tool, tensors = KINDS[name]
    path = SAMPLES / name
    code, out, _ = call("info", path)
    assert code == 0
    assert f"kind        {kind}\n" in out
    assert f"tensors     {len(tensors)}\n" in out
    (note, *_) = [line for line in out.splitlines() if line.startswith("note ")]
    assert "only shown here, not read" in note
    assert tool in note
    assert "digests     not known" in out
    assert rows(call, path) == tensors
    for arguments in (("merge", path, tmp_path / "out"), ("verify", path)):
        code, _, err = call(*arguments)
        assert code == 7
        assert "only shown here" in err
        assert tool in err
    for read in (sx.open_checkpoint, lambda path: sx.load_checkpoint({"w": np.zeros(1)}, path)):
        with pytest.raises(UnsupportedError, match="only shown here") as refused:
            read(path)
        assert refused.value.path == str(path)
    assert not (tmp_path / "out").exists()


def other_entries(path: Path) -> dict[str, str]:
    return summarize(path).others


def test_entries_that_are_not_tensors_are_described() -> None:
    assert other_entries(SAMPLES / "model.gguf")["general.architecture"] == "'llama'"
    assert other_entries(SAMPLES / "model.gguf")["tokenizer.ggml.tokens"] == "4 of text"
    assert other_entries(SAMPLES / "flax_model.msgpack") == {"step": "7", "rate": "a scalar of F32", "name": "'tiny'"}
    assert other_entries(SAMPLES / "orbax") == {"state.step": "scalar"}
    assert "dtypes, and shapes of sharded arrays, lie in OCDBT files" in summarize(SAMPLES / "orbax").notes[1]


@pytest.mark.parametrize("name", ["model.gguf", "array.npy", "arrays.npz", "flax_model.msgpack"])
def test_a_file_is_known_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / name, tmp_path / "file")
    assert summarize(tmp_path / "file").kind == KINDS[name][0]
    assert summarize(tmp_path / "file").num_tensors == len(KINDS[name][2])


def summary_of(path: Path, data: bytes) -> Summary:
    """Write a file and return its summary."""
    path.write_bytes(data)
    return summarize(path)


@pytest.mark.parametrize("name", ["model.gguf", "array.npy", "arrays.npz", "flax_model.msgpack"])
def test_a_cut_file_is_corrupt_wherever_it_is_cut(name: str, tmp_path: Path, call: CommandLine) -> None:
    data = (SAMPLES / name).read_bytes()
    data = data[:-28] if name == "model.gguf" else data  # without padding after the last tensor
    step = max(1, len(data) // 60)
    for end in [*range(0, len(data) - 1, step), len(data) - 1]:
        summary = summary_of(tmp_path / name, data[:end])
        assert [type(problem) for problem in summary.problems] == [CorruptError], end
    code, _, err = call("info", tmp_path / name)
    assert code == 4
    assert str(tmp_path / name) in err
    assert call("merge", tmp_path / name, tmp_path / "out")[0] == 4


def test_broken_json_of_a_directory_is_corrupt(tmp_path: Path) -> None:
    for name, file in (
        ("zarr3", "layer/bias/zarr.json"),
        ("zarr2", "layer/bias/.zarray"),
        ("orbax", "state/_METADATA"),
    ):
        shutil.copytree(SAMPLES / name, tmp_path / name)
        (tmp_path / name / file).write_text('{"shape": ')
        (problem,) = summarize(tmp_path / name).problems
        assert isinstance(problem, CorruptError)
        assert str(tmp_path / name / file) == problem.path


def gguf(values: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def record(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BAD_GGUF: dict[str, bytes] = {
    "more values than bytes": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
    "more tensors than bytes": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "a long name": gguf([], [struct.pack("<Q", 1 << 62) + bytes(64)]),
    "a long array": gguf([text("a") + struct.pack("<IIQ", 9, 8, 1 << 60)], []),
    "an array of arrays": gguf([text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)], []),
    "an unknown type of value": gguf([text("a") + struct.pack("<I", 99) + bytes(64)], []),
    "many dims": gguf([], [text("w") + struct.pack("<I", 1 << 30)], bytes(64)),
    "a huge shape": gguf([], [record("w", 1 << 40, 1 << 40)], bytes(64)),
    "a part of a block": gguf([], [record("w", 31, kind=8)], bytes(64)),
    "two of a name": gguf([], [record("w", 1), record("w", 1)], bytes(64)),
    "an offset that is not aligned": gguf([], [record("w", 1, offset=1)], bytes(64)),
    "an alignment of 0": gguf([text("general.alignment") + struct.pack("<II", 4, 0)], []),
    "an alignment of text": gguf([text("general.alignment") + struct.pack("<I", 8) + text("x")], []),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_a_contradictory_gguf_header_is_corrupt(name: str, tmp_path: Path) -> None:
    (problem,) = summary_of(tmp_path / "x.gguf", BAD_GGUF[name]).problems
    assert isinstance(problem, CorruptError)


def test_a_gguf_tensor_of_a_new_dtype_is_listed_and_hides_no_other(tmp_path: Path, call: CommandLine) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf([], [record("new", 32, kind=77), record("w", 2, offset=32)], bytes(64)))
    assert rows(call, path) == {"new": ("type 77", [32], None), "w": ("F32", [2], 8)}


def test_a_big_endian_gguf_and_other_versions_are_refused_by_version(tmp_path: Path) -> None:
    for version in (1, 3 << 24, 4):
        (problem,) = summary_of(tmp_path / "x.gguf", gguf([], [], version=version)).problems
        assert isinstance(problem, UnsupportedError)
        assert "GGUF of version" in str(problem)


def flax_array(shape: bytes, dtype: bytes, data: bytes) -> bytes:
    inner = b"\x93" + shape + bytes((0xA0 + len(dtype),)) + dtype + b"\xc4" + bytes((len(data),)) + data
    return b"\xc7" + bytes((len(inner),)) + b"\x01" + inner


BAD_MSGPACK: dict[str, bytes] = {
    "no map": b"\x93\x01\x02\x03",
    "too many entries": b"\xdf\xff\xff\xff\xff\xa1a\x01",
    "a long list": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "nested too deep": b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
    "bytes after the end": b"\x81\xa1a\x01\x01",
    "no value": b"\x81\xa1a\xc1",
    "a list as key": b"\x81\x91\x01\x01",
    "two of a name": b"\x82\xa1a\x01\xa1a\x02",
    "an array that is too short": b"\x81\xa1a" + flax_array(b"\x91\x04", b"float32", bytes(12)),
    "a negative size": b"\x81\xa1a" + flax_array(b"\x91\xff", b"float32", bytes(4)),
    "a size of text": b"\x81\xa1a" + flax_array(b"\x91\xa1b", b"float32", bytes(4)),
    "no array": b"\x81\xa1a\xd4\x01\x90",
    "text that is not UTF-8": b"\x81\xa1\xff\x01",
    "chunks that do not fit": b"\x81\xa1a\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\x09\xa6chunks\x81\xa10"
    + flax_array(b"\x91\x01", b"float32", bytes(4)),
}


@pytest.mark.parametrize("name", BAD_MSGPACK)
def test_a_contradictory_msgpack_is_corrupt(name: str, tmp_path: Path) -> None:
    (problem,) = summary_of(tmp_path / "x.msgpack", BAD_MSGPACK[name]).problems
    assert isinstance(problem, CorruptError)


def test_names_of_a_msgpack_cannot_grow_without_bound(tmp_path: Path) -> None:
    """Each level repeats the names of all levels above."""
    key = b"\xda\x40\x00" + b"k" * 0x4000
    with_many = b"\x81" + key + b"\xdd\x00\x00\x80\x00" + b"\x91\x01" * 0x8000
    (problem,) = summary_of(tmp_path / "x.msgpack", with_many).problems
    assert isinstance(problem, CorruptError)


def npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + data


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", method) as file:
        for name, data in members:
            file.writestr(name, data)
    return found.getvalue()


GOOD_NPY = npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }\n", bytes(8))
BAD_NPY: dict[str, bytes] = {
    "no shape": npy("{'descr': '<f4', 'fortran_order': False}"),
    "code as shape": npy("{'descr': '<f4', 'fortran_order': False, 'shape': __import__('os')}"),
    "a long size": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}"),
    "nested": npy("{'descr': " + "[" * 60000),
    "other bytes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", bytes(8)),
}


@pytest.mark.parametrize("name", BAD_NPY)
def test_a_contradictory_header_of_numpy_is_corrupt(name: str, tmp_path: Path) -> None:
    for file, data in (("x.npy", BAD_NPY[name]), ("x.npz", zipped(("a.npy", GOOD_NPY), ("b.npy", BAD_NPY[name])))):
        (problem,) = summary_of(tmp_path / file, data).problems
        assert isinstance(problem, CorruptError)
        assert problem.path == str(tmp_path / file)


def test_members_that_are_no_arrays_are_named(tmp_path: Path) -> None:
    data = zipped(("a.npy", GOOD_NPY), ("b.txt", b"12"))
    assert summary_of(tmp_path / "x.npz", data).others == {"b.txt": "2 bytes"}
    data = zipped(("a.npy", GOOD_NPY), method=zipfile.ZIP_LZMA)
    assert list(summary_of(tmp_path / "x.npz", data).others) == ["a"]
    fields = np.zeros(2, [("a", "f4"), ("b", "i4")])
    objects = np.array([{}], dtype=object)
    np.savez(tmp_path / "y.npz", fields=fields, objects=objects)
    assert summarize(tmp_path / "y.npz").dtypes == {"structured": 1, "|O": 1}


def test_a_compressed_member_is_not_unpacked(tmp_path: Path) -> None:
    """A header that claims a gigabyte of zeros costs what its first bytes cost."""
    zeros = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (50000000,)}", bytes(50_000_000))
    summary = summary_of(tmp_path / "x.npz", zipped(("a.npy", zeros), method=zipfile.ZIP_DEFLATED))
    assert (summary.nbytes, summary.problems) == (50_000_000, ())


def test_a_directory_of_parts_is_one_model(tmp_path: Path) -> None:
    parts = [gguf([], [record(name, 2)], bytes(32)) for name in ("a", "b")]
    for number, data in enumerate(parts, 1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(data)
    summary = summarize(tmp_path)
    assert (summary.kind, summary.num_tensors, summary.num_files) == ("gguf", 2, 2)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    shutil.copy(tmp_path / "m-00002-of-00002.gguf", tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(IncompleteError, match="this one is missing"):
        sx.open_checkpoint(tmp_path)


def test_the_error_for_several_foreign_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).write_bytes(gguf([], []))
    with pytest.raises(InvalidArgumentError, match=r"2 files of gguf, name one of them: q4.gguf, q8.gguf"):
        summarize(tmp_path)


def test_safetensors_beside_a_foreign_file_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones(2, "f4")}, tmp_path / "model.safetensors")
    shutil.copy(SAMPLES / "flax_model.msgpack", tmp_path)
    assert list(sx.open_checkpoint(tmp_path)) == ["w"]


def test_an_orbax_checkpoint_that_was_not_finished_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "3.orbax-checkpoint-tmp-1700000000"
    shutil.copytree(SAMPLES / "orbax", path)
    (problem,) = summarize(path).problems
    assert isinstance(problem, IncompleteError)


def test_the_error_for_several_orbax_steps_asks_for_one(tmp_path: Path) -> None:
    for step in ("0", "1000"):
        shutil.copytree(SAMPLES / "orbax", tmp_path / step)
    with pytest.raises(InvalidArgumentError, match=r"contains checkpoints of Orbax, name one of them: 0, 1000"):
        sx.open_checkpoint(tmp_path)


def test_the_shape_of_a_sharded_orbax_array_is_unknown(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "orbax", tmp_path / "x")
    (tmp_path / "x/state/_sharding").write_text("{}")
    assert summarize(tmp_path / "x").num_parameters == 0


@pytest.mark.parametrize("break_it", [lambda p: p.write_bytes(b"\0" * 100), lambda p: p.write_bytes(b"")])
def test_a_file_with_the_suffix_of_a_format_but_other_content_is_corrupt(
    break_it: Callable[[Path], Any], tmp_path: Path
) -> None:
    for name in ("x.gguf", "x.npy", "x.npz", "x.msgpack"):
        break_it(tmp_path / name)
        (problem,) = summarize(tmp_path / name).problems
        assert isinstance(problem, CorruptError)
