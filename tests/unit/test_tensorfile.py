"""The tensor file: byte for byte what safetensors writes; any other file is refused."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored import header_of, write_with_header
from workspaces import filled

from statexchange.errors import CorruptError, InvalidArgumentError, NotFoundError, StateExchangeError, UnsafeError
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.storage import files
from statexchange.storage.files import digest
from statexchange.storage.location import open_path
from statexchange.storage.rank_writer import write_tensor_file
from statexchange.storage.store import Budget
from statexchange.storage.tensorfile import ShardData, encode_header, header_text
from statexchange.tensors import DTYPE_NAMES

DTYPES = {name: getattr(torch, long_name) for long_name, name in DTYPE_NAMES.items()}


def content(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))


def shard(name: str, tensor: torch.Tensor, global_shape: tuple[int, ...] | None = None, *boxes: Box) -> ShardData:
    dtype = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    shape = tuple(tensor.shape) if global_shape is None else global_shape
    return filled(Shard(name, dtype, shape, boxes or (full_box(shape),)), bytes(content(tensor)))


def write(path: Path, *tensors: ShardData, metadata: dict[str, Any] | None = None) -> Path:
    with files.directory(str(path.parent)) as dir_fd:
        written = write_tensor_file(dir_fd, path.name, str(path), tensors, metadata or {})
    assert written.nbytes == path.stat().st_size
    return path


def example_tensors() -> dict[str, torch.Tensor]:
    some = {
        f"{name}.größe 模型 🙂 {i}": torch.arange(1 + i).to(dtype) for i, (name, dtype) in enumerate(DTYPES.items())
    }
    return {
        **some,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0, 2),
        "Z": torch.ones(2, 2),
        "a": torch.ones(2, 2),
    }


def test_the_bytes_are_those_of_save_file(tmp_path: Path) -> None:
    tensors = {k: v for k, v in example_tensors().items() if v.dtype != torch.complex128}
    ours = write(tmp_path / "ours", *(shard(k, v) for k, v in tensors.items()), metadata={"schema": 1})
    with safe_open(ours, "pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, tmp_path / "theirs", metadata)
    header = header_of(str(ours))
    assert header.metadata == metadata
    one, other = ours.read_bytes(), (tmp_path / "theirs").read_bytes()
    # safetensors writes metadata in no particular order, so it is compared apart.
    assert json.loads(one[8 : 8 + int.from_bytes(one[:8], "little")]) == json.loads(
        other[8 : 8 + int.from_bytes(other[:8], "little")]
    )
    assert one[-sum(e.nbytes for e in header.entries.values()) :] == other[8 + int.from_bytes(other[:8], "little") :]
    back = load_file(ours)
    assert back.keys() == tensors.keys()
    assert all(back[k].dtype == v.dtype and content(back[k]) == content(v) for k, v in tensors.items())


@pytest.mark.parametrize("names", [["w"], ["b", "a"], list(DTYPES), ["größe", "模型", 'quo"te\\']])
def test_a_header_alone_is_byte_identical(tmp_path: Path, names: list[str]) -> None:
    tensors = {n: torch.zeros(3, 2, dtype=DTYPES.get(n, torch.float32)) for n in names if n != "C128"}
    save_file(tensors, tmp_path / "x", {"format": "pt"})
    header = header_of(str(tmp_path / "x"))
    text = encode_header(header_text([(e.name, e.dtype, e.shape) for e in header.entries.values()], {"format": "pt"}))
    assert (tmp_path / "x").read_bytes()[: len(text)] == text


def test_complex128_is_kept_as_pairs(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128)
    back = load_file(write(tmp_path / "x", shard("c", value)))
    assert torch.equal(torch.view_as_complex(back["c"]), value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_own_reader_merges_our_shards(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    value = torch.arange(24.0).reshape(4, 6)
    for rank, (low, high) in enumerate([(0, 2), (2, 6)]):
        part = shard("w", value[:, low:high], (4, 6), Box((0, low), (4, high - low)))
        write(tmp_path / f"part{rank}.safetensors", part, shard("bias", torch.ones(3)))
    state = {"w": torch.zeros(4, 6), "bias": torch.zeros(3)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(state["w"], value)
    assert torch.equal(state["bias"], torch.ones(3))


def test_a_digest_does_not_depend_on_how_its_bytes_are_split(tmp_path: Path) -> None:
    value = torch.arange(6.0)
    several = shard("w", value, (4, 4), Box((0, 0), (2, 2)), Box((3, 0), (1, 2)))
    boxes = [content(value[:4]), content(value[4:])]
    split = ShardData(several.shard, lambda box: (boxes[box][at : at + 3] for at in range(0, len(boxes[box]), 3)))
    for one in (several, split):
        path = write(tmp_path / f"{one is split}", one)
        metadata = header_of(str(path)).workspace_metadata("x", Budget("x"))
        assert metadata is not None
        assert metadata["tensors"]["w"]["digests"] == [digest(box) for box in boxes]
        assert load_file(path)["w"].tolist() == value.tolist()
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "it is empty"),
        ("x" * 513, "it has 513 bytes, and 512 are allowed"),
        *((name, "it holds control characters") for name in ("a\0b", "a\nb", "\x1b[31m", "a\x9bb")),
        ("\ud800", "it is not Unicode text"),
        ("__metadata__", "safetensors reserves it"),
    ],
)
def test_a_harmful_name_is_never_written(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UnsafeError, match=rf"name .*: {why}"):
        write(tmp_path / "x", shard(name, torch.ones(1)))
    assert list(tmp_path.iterdir()) == []


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="two tensors") as caught:
        write(tmp_path / "x", shard("w", torch.ones(1)), shard("w", torch.ones(1)))
    assert caught.value.name == "w"
    assert list(tmp_path.iterdir()) == []


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
        **more,
    }


def raw_file(path: Path, header: Any) -> str:
    """Write a file of a header, given as its bytes or as an object, and eight bytes of data."""
    write_with_header(path, header if isinstance(header, bytes) else json.dumps(header).encode(), bytes(8))
    return str(path)


GOOD = {"a": entry(0, 4), "b": entry(4, 8)}
BROKEN: dict[str, Any] = {
    "key twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    "key twice inside": b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    "overlap": {"a": entry(0, 8), "b": entry(4, 8)},
    "gap": {"a": entry(0, 4), "b": entry(8, 8)},
    "hole at the front": {"a": entry(4, 8)},
    "bytes too many": {"a": entry(0, 4)},
    "bytes too few": {"a": entry(0, 12)},
    "negative offsets": {"a": entry(-4, 4), "b": entry(4, 8)},
    "backwards": {"a": {**entry(8, 0), "shape": [2]}},
    "negative shape": {"a": entry(0, 8, shape=[-1, -2])},
    "huge shape": {"a": entry(0, 8, shape=[2**62, 0])},
    "overflowing shape": {"a": entry(0, 8, shape=[2**33, 2**33])},
    "many dims": {"a": entry(0, 8, shape=[1] * 10_000 + [2])},
    "float shape": {"a": entry(0, 8, shape=[2.0])},
    "true shape": {"a": entry(0, 4, shape=[True]), "b": entry(4, 8)},
    "text shape": {"a": entry(0, 8, shape="22")},
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "no dtype": {"a": entry(0, 8, "f33")},
    "unknown dtype of no number of bits": {"a": entry(0, 8, "F33", [3])},
    "unknown dtype of no elements": {"a": entry(0, 8, "F33", [0])},
    "unknown dtype, backwards": {"a": {**entry(8, 0, "F33"), "shape": [2]}, "b": entry(0, 8)},
    "dtype of ours": {"a": entry(0, 8, "C128", [0])},
    "dtype a list": {"a": entry(0, 8, [])},
    "dtype an object": {"a": entry(0, 8, {})},
    "wrong size": {"a": entry(0, 8, shape=[3])},
    "three offsets": {"a": {**entry(0, 8), "data_offsets": [0, 4, 8]}},
    "unknown field": {"a": entry(0, 8, extra=1)},
    "missing field": {"a": {"dtype": "F32", "shape": [2]}},
    "entry a list": {"a": []},
    "metadata a list": {"__metadata__": [], **GOOD},
    "metadata numbers": {"__metadata__": {"a": 1}, **GOOD},
    "control character": {"a\x1b[2J": entry(0, 8)},
    "no name": {"": entry(0, 8)},
    "lone surrogate": {"\ud800": entry(0, 8)},
    "long name": {"x" * 600: entry(0, 8)},
    "a list": [1],
    "leading space": b" {}",
    "no JSON": b'{"a"',
    "deep": b'{"a":' + b"[" * 100_000,
    "UTF-16": json.dumps(GOOD).encode("utf-16-le"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "bad UTF-8": b'{"\xff":1}',
    "long number": b'{"a":' + b"9" * 10_000 + b"}",
    "garbage after": json.dumps(GOOD).encode() + b"x",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_header_is_a_corrupt_error_that_names_the_file(tmp_path: Path, what: str) -> None:
    path = raw_file(tmp_path / "x", BROKEN[what])
    with pytest.raises(CorruptError) as caught:
        header_of(path)
    assert caught.value.path == path
    assert str(caught.value).isprintable()


def test_the_valid_header_is_accepted(tmp_path: Path) -> None:
    header = header_of(raw_file(tmp_path / "x", json.dumps(GOOD).encode() + b"   "))
    assert [e.name for e in header.entries.values()] == ["a", "b"]
    assert header.workspace_metadata("x", Budget("x")) is None


def test_a_tensor_of_a_later_dtype_is_kept_apart(tmp_path: Path) -> None:
    """Its name, shape and byte range are known, and the range must not overlap others."""
    header = header_of(raw_file(tmp_path / "x", {"a": entry(0, 4, "Q4", [2, 4]), "b": entry(4, 8)}))
    assert [(e.name, e.dtype, e.shape, e.nbytes) for e in header.unknown.values()] == [("a", "Q4", (2, 4), 4)]
    assert list(header.entries) == ["b"]
    with pytest.raises(CorruptError, match="overlap"):
        header_of(raw_file(tmp_path / "x", {"a": entry(0, 8, "Q4", [16]), "b": entry(4, 8)}))


@pytest.mark.parametrize("claim", [2**64 - 1, 100_000_001, 99_999_999, 2**63])
def test_a_huge_claimed_size_allocates_nothing(tmp_path: Path, claim: int) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", claim) + b"{}")
    with pytest.raises(CorruptError, match="truncated"):
        header_of(str(tmp_path / "x"))


def small_file(path: Path) -> bytes:
    tensors = [shard("a", torch.ones(2)), shard("b", torch.tensor(3, dtype=torch.int8)), shard("c", torch.empty(0, 4))]
    return write(path, *tensors, metadata={"schema": 1}).read_bytes()


def test_a_file_cut_off_anywhere_is_corrupt(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole")
    path = tmp_path / "cut"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptError):
            header_of(str(path))
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptError, match="last tensor"):
        header_of(str(path))


mutations = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(1, 255)),
        st.tuples(
            st.just("insert"), st.integers(0, 10**6), st.sampled_from([b'"', b"{", b"]", b",", b"0", b"-", b"9" * 30])
        ),
        st.tuples(st.just("delete"), st.integers(0, 10**6), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations)
def test_a_mutated_file_is_read_or_refused_and_nothing_else(tmp_path: Path, changes: list[Any]) -> None:
    path = tmp_path / "whole"
    if not path.exists():
        small_file(path)
    data = bytearray(path.read_bytes())
    for kind, place, what in changes:
        at = place % len(data) if kind == "flip" else place % 400
        if kind == "flip":
            data[at] ^= what
        elif kind == "insert":
            data[at:at] = what
        else:
            del data[at : at + what]
    fix = bytearray(data)
    fix[:8] = struct.pack("<Q", max(0, len(data) - 17))  # so that the mutation changes the JSON, not the padding
    for version in (data, fix):
        (tmp_path / "mutant").write_bytes(version)
        try:
            header = header_of(str(tmp_path / "mutant"))
            header.workspace_metadata("x", Budget("x"))
        except StateExchangeError:
            continue
        if not header.unknown:  # these are refused for each tensor
            load_file(tmp_path / "mutant")  # safetensors accepts every file that we accept


def test_other_than_regular_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(UnsafeError, match="regular file"):
            header_of(str(path))
    with open_path(str(tmp_path)) as place, pytest.raises(UnsafeError, match="regular file"):
        place.store.open("fifo")
    with pytest.raises(NotFoundError):
        header_of(str(tmp_path / "gone"))


def test_a_write_reports_progress_about_once_in_a_megabyte(tmp_path: Path) -> None:
    large = [filled(Shard("w", "U8", (8 << 20,), (full_box((8 << 20,)),)), bytes(8 << 20))]
    small = [filled(Shard(f"s{n}", "U8", (8,), (full_box((8,)),)), bytes(8)) for n in range(100)]
    reports: list[str] = []
    with files.directory(str(tmp_path)) as dir_fd:
        for name, shards in (("large", large), ("small", small)):
            write_tensor_file(dir_fd, name, str(tmp_path / name), shards, {}, progress=lambda: reports.append(name))  # noqa: B023
    assert 4 <= reports.count("large") <= 8
    assert reports.count("small") == 0
