"""Files of torch.save that are broken, hostile or of unknown classes: refused by name."""

import argparse
import collections
import datetime as dt
import functools
import io
import os
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from equality import assert_same
from safetensors.torch import load_file
from sweeps import slow
from torch_files import merged

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.formats.registry import open_checkpoint, open_source
from statexchange.report.verify import verify

# What is refused


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qtensor"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "dtype bits8"),
    ],
    ids=["sparse", "quantized", "meta", "conjugated", "bits8"],
)
def test_tensors_that_have_no_plain_bytes_are_refused_by_name(tmp_path: Path, value: Any, match: str) -> None:
    torch.save({"ok": torch.ones(1), "odd": value()}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match=match) as caught:
        merged(tmp_path / "x.pt")
    assert (caught.value.name, caught.value.path) == ("odd", str(tmp_path / "x.pt"))
    assert [finding.name for finding in verify(tmp_path / "x.pt").findings] == ["odd"]
    assert_same(merged(tmp_path / "x.pt", exclude="odd"), {"ok": torch.ones(1)})
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert (list(checkpoint), checkpoint["ok"].read().tolist()) == (["ok", "odd"], [1])
        with pytest.raises(UnsupportedError, match=match):
            checkpoint["odd"].read()


def test_a_tensor_in_files_of_two_sections_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "w": torch.ones(2)}, tmp_path / "model.pt")
    torch.save({"w": torch.zeros(2), "step": 1}, tmp_path / "optimizer.pt")
    with pytest.raises(InvalidArgumentError, match="'optimizer' has this name") as caught:
        merged(tmp_path)
    assert (caught.value.name, caught.value.path) == ("w", str(tmp_path / "model.pt"))


def test_many_objects_may_refer_to_one_large_object(tmp_path: Path) -> None:
    settings = argparse.Namespace(**{f"option{number}": number for number in range(2_000)})
    objects = {f"{number}": argparse.Namespace(settings=settings) for number in range(400)}
    torch.save({"w": torch.ones(1), "objects": objects}, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert list(checkpoint) == ["w"]


def test_the_format_before_torch_1_6_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    shutil.copy(tmp_path / "old.pt", tmp_path / "old")
    for name in ("old.pt", "old"):
        with pytest.raises(UnsupportedError, match=r"torch\.load\(path, weights_only=True\)"):
            open_source(tmp_path / name)


def test_files_that_torch_did_not_save_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"hello")
    with pytest.raises(CorruptError, match=r"not .*torch\.save"):
        open_source(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/b", b"")
    with pytest.raises(CorruptError, match=r"no data\.pkl"):
        open_source(tmp_path / "x.pt")
    torch.save(Path("x"), tmp_path / "x.pt")
    assert open_source(tmp_path / "x.pt").others == {"value": "a PosixPath"}


def members(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def repack(path: Path, change: Any = None, method: int = zipfile.ZIP_STORED) -> None:
    """Write the zip of a file again, with members changed by name (None omits one)."""
    kept = members(path)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in kept:
            data = change(name, data) if change is not None else data
            if data is not None:
                archive.writestr(name, data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"a": torch.arange(1000), "b": torch.ones(3)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_a_zip_that_another_tool_packed_anew_is_read(saved: Path) -> None:
    repack(saved)
    assert merged(saved)["a"].equal(torch.arange(1000))


def test_a_compressed_member_is_refused(saved: Path) -> None:
    repack(saved, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match=r"compressed.*torch\.save"):
        open_source(saved)


def test_big_endian_numbers_are_refused(saved: Path) -> None:
    repack(saved, lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(UnsupportedError, match="big-endian"):
        open_source(saved)


def test_storages_that_are_missing_or_of_another_size_are_refused(saved: Path) -> None:
    repack(saved, lambda name, data: data[:-8] if name.endswith("data/0") else data)
    with pytest.raises(CorruptError, match="storage '0'") as caught:
        open_source(saved)
    assert (caught.value.expected, caught.value.found) == ("8000 bytes", "7992 bytes")
    repack(saved, lambda name, data: None if name.endswith("data/0") else data)
    with pytest.raises(CorruptError, match="no storage '0'"):
        open_source(saved)


def test_a_duplicate_member_is_refused(saved: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("x/data/0", b"")
    with pytest.raises(CorruptError, match="two members"):
        open_source(saved)


@pytest.mark.parametrize("left", [0, 3, 4, 21, 22, 100, 1000, 9000])
def test_truncated_files_are_corrupt(saved: Path, left: int) -> None:
    os.truncate(saved, left)
    with pytest.raises(CorruptError) as caught:
        open_source(saved)
    assert caught.value.path == str(saved)


@pytest.mark.parametrize("every", [7, slow(1)], ids=["some", "all"])
def test_a_file_with_any_changed_byte_is_opened_if_not_strict(every: int, tmp_path: Path) -> None:
    """Errors become problems of the source."""
    torch.save({"a": torch.arange(6).reshape(2, 3).t(), "step": 7}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    has_problems = set()
    for at in range(0, len(data), every):
        for flip in (0x01, 0xFF):
            (tmp_path / "x.pt").write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            source = open_source(tmp_path / "x.pt", strict=False)
            assert source.kind == "torch"
            has_problems.add(bool(source.problems))
    assert has_problems == {True, False}


def huge_archive(path: Path, hole_nbytes: int) -> None:
    """Write a sparse file with a storage over 4 GiB, as torch does: zip64, with sizes in extra fields."""
    template = io.BytesIO()
    torch.save({"big": torch.zeros(2, dtype=torch.uint8)}, template)
    with zipfile.ZipFile(template) as archive:
        data = archive.read("archive/data.pkl")
    columns = b"J" + struct.pack("<i", hole_nbytes >> 16)
    shape = b"J" + struct.pack("<i", 1 << 16) + columns
    numel = b"\x8a\x05" + hole_nbytes.to_bytes(5, "little")
    assert data.count(b"K\x02") == 2
    data = data.replace(b"K\x02", numel, 1).replace(b"K\x02\x85", shape + b"\x86", 1)
    data = data.replace(b"K\x01\x85", columns + b"K\x01\x86", 1)
    entries = []
    small = [(b"archive/data.pkl", data), (b"archive/version", b"3\n"), (b"archive/byteorder", b"little")]
    with path.open("wb") as file:
        for name, content in [*small, (b"archive/data/0", None)]:
            at, nbytes = file.tell(), hole_nbytes if content is None else len(content)
            wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, *[0xFFFFFFFF] * 2, len(name), len(wide)))
            file.write(name + wide)
            entries.append((name, nbytes, at))
            if content is None:
                file.seek(nbytes - 1, os.SEEK_CUR)
            file.write(b"\7" if content is None else content)
        begin = file.tell()
        for name, nbytes, at in entries:
            wide = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, at)
            fixed = struct.pack("<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, *[0xFFFFFFFF] * 2,
                                len(name), len(wide), 0, 0, 0, 0, 0xFFFFFFFF)  # fmt: skip
            file.write(fixed + name + wide)
        end = file.tell()
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 4, 4, end - begin, begin))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def test_a_storage_over_four_gib_has_the_byte_range_that_torch_reads(tmp_path: Path) -> None:
    huge_archive(tmp_path / "huge.pt", (4 << 30) + (1 << 20))
    reference = torch.load(tmp_path / "huge.pt", mmap=True, weights_only=True)["big"]
    (holder,) = open_source(tmp_path / "huge.pt").files
    tensor = holder.tensors["big"]
    assert tensor.shard.global_shape == tuple(reference.shape)
    byte_range = tensor.byte_ranges[0]
    assert (byte_range.nbytes, byte_range.strides) == (reference.numel(), None)
    with open(byte_range.path, "rb") as file:
        file.seek(byte_range.begin + byte_range.nbytes - 1)
        assert file.read(1) == b"\7" == bytes([reference[-1, -1]])


# Malicious pickles in the right place


def write_with_pickle(path: Path, data: bytes) -> None:
    torch.save({"a": torch.ones(2)}, path)
    repack(path, lambda name, old: data if name.endswith("data.pkl") else old)


@pytest.mark.parametrize("depth", [200, 200_000])
def test_deep_nesting_is_refused(tmp_path: Path, depth: int) -> None:
    write_with_pickle(tmp_path / "x.pt", b"\x80\x02" + b"](" * depth + b"]" + b"e" * depth + b".")
    with pytest.raises(CorruptError, match="levels deep"):
        open_source(tmp_path / "x.pt")


def test_a_list_that_is_referenced_very_often_is_refused(tmp_path: Path) -> None:
    doubling = b"\x80\x02(](K\x01]eq\x00"
    for level in range(1, 60):
        doubling += b"](h" + bytes([level - 1]) + b"h" + bytes([level - 1]) + b"eq" + bytes([level])
    write_with_pickle(tmp_path / "x.pt", doubling + b"t.")
    with pytest.raises(CorruptError, match="the same objects"):
        open_source(tmp_path / "x.pt")


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    write_with_pickle(tmp_path / "x.pt", b"\x80\x02]q\x00h\x00a.")
    with pytest.raises(CorruptError, match="levels deep"):
        open_source(tmp_path / "x.pt")


class Arguments:
    """An unknown class."""


class HoldsTensors:
    """An unknown class whose objects hold tensors."""

    def __init__(self, *values: Any) -> None:
        self.values = {"deep": [values]}


def rng_state() -> dict[str, Any]:
    """Return the state that Trainer and verl save beside the weights."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def test_objects_of_unknown_classes_are_named_and_tensors_are_read(tmp_path: Path, call: CommandLine) -> None:
    state = {
        "w": torch.arange(6.0).reshape(2, 3),
        "rng": rng_state(),
        "args": argparse.Namespace(lr=0.5, at=dt.datetime(2020, 1, 2), odd=Arguments()),
        "loss": np.float64(2),
        "stages": {ValueError("a key"): 1, Arguments(): 2},
        "when": [dt.timedelta(1), Arguments()],
        "activation": torch.nn.functional.relu,
    }
    torch.save(state, tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    assert (source.unsupported, source.others["rng.numpy"]) == ({}, "tuple of 5")
    assert [source.others[name] for name in ("args", "stages", "when")] == [
        "opaque argparse.Namespace", "dict of 2", "list of 2"
    ]  # fmt: skip
    assert source.others["activation"] == "opaque torch.nn.functional.relu"
    report = merge_checkpoint(tmp_path / "x.pt", tmp_path / "out", section="all")
    assert_same(load_file(tmp_path / "out/model.safetensors"), {"w": state["w"], "rng.cpu": state["rng"]["cpu"]})
    (note,) = report.notes
    assert note.startswith("9 entries are not tensors, not written: rng.python.0 (int 3), ")
    assert "args (opaque argparse.Namespace)" in note
    for command in ("info", "ls"):
        code, out, err = call(command, tmp_path / "x.pt")
        assert (code, "args (opaque argparse.Namespace)" in out + err) == (0, True)


@pytest.mark.parametrize(
    "value",
    [
        lambda: HoldsTensors(torch.ones(1)),
        lambda: {Arguments(): torch.ones(1)},
        lambda: {torch.ones(1): 1},
        lambda: HoldsTensors(torch.nn.Parameter(torch.ones(1))),
        lambda: HoldsTensors(torch.ones(1).untyped_storage()),
        lambda: [Arguments(), HoldsTensors(torch.ones(1))],
        lambda: {torch.ones(1)},
        lambda: collections.deque([torch.ones(1)]),
    ],
    ids=["tensor", "beside a key", "key", "parameter", "storage", "in a list", "set", "deque"],
)
def test_tensors_in_unknown_objects_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    torch.save({"w": torch.ones(2), "odd": value(), "again": value()}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match="its class") as caught:
        merge_checkpoint(tmp_path / "x.pt", tmp_path / "out")
    assert (caught.value.name, caught.value.path) == ("odd", str(tmp_path / "x.pt"))
    assert list(open_source(tmp_path / "x.pt").unsupported) == ["odd", "again"]
    assert_same(merged(tmp_path / "x.pt", include="w"), {"w": torch.ones(2)})


def test_a_load_names_an_entry_that_cannot_be_read_among_those_that_the_state_lacks(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "odd": HoldsTensors(torch.ones(1))}, tmp_path / "x.pt")
    live = {"w": torch.zeros(2)}
    with pytest.raises(sx.errors.InvalidArgumentError, match="in the state: odd;"):
        sx.load_checkpoint(live, tmp_path / "x.pt")
    assert live["w"].tolist() == [0, 0]
    assert sx.load_checkpoint(live, tmp_path / "x.pt", strict=False).unexpected == ("odd",)
    assert live["w"].tolist() == [1, 1]


def test_a_tensor_that_two_objects_share_is_found_in_both(tmp_path: Path) -> None:
    shared = HoldsTensors(torch.ones(1))
    torch.save({"a": shared, "b": [shared, Arguments()], "c": Arguments()}, tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    assert (list(source.unsupported), list(source.others)) == (["a", "b"], ["c"])


def test_a_function_as_a_value_is_opaque_and_a_call_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "f": os.path.join}, tmp_path / "x.pt")
    assert list(open_source(tmp_path / "x.pt").others) == ["f"]
    assert_same(merged(tmp_path / "x.pt"), {"w": torch.ones(2)})
    torch.save({"w": torch.ones(2), "f": functools.partial(os.path.join)}, tmp_path / "x.pt")
    with pytest.raises(UnsafeError, match=r"posixpath\.join"):
        open_source(tmp_path / "x.pt")


@pytest.mark.parametrize("nested", [False, True], ids=["module", "in a dict"])
def test_a_file_of_a_whole_module_says_what_to_save_instead(nested: bool, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    torch.save({"model": module} if nested else module, tmp_path / "model.pt")
    live = torch.nn.Linear(2, 3)
    with pytest.raises(sx.errors.UnsupportedError, match="whole module") as refused:
        sx.load_checkpoint({"model": live} if nested else live, tmp_path / "model.pt", strict=False)
    assert "state_dict()" in str(refused.value)
    with pytest.raises(KeyError, match="no tensor"):
        sx.open_checkpoint(tmp_path / "model.pt")["weight"]
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.save((read["model"] if nested else read).state_dict(), tmp_path / "state.pt")
    sx.load_checkpoint(live, tmp_path / "state.pt")
    assert torch.equal(live.weight, module.weight)


def test_zipfile_gets_an_archive_with_its_own_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python checks absolute offsets at the end of a large archive since 3.10.19, 3.11.14 and their like."""
    sizes = []

    class Looking(zipfile.ZipFile):
        def __init__(self, file: Any) -> None:
            sizes.append(file.seek(0, os.SEEK_END))
            super().__init__(file)

    torch.save({"w": torch.arange(10_000)}, tmp_path / "w.pt")
    monkeypatch.setattr(zipfile, "ZipFile", Looking)
    assert sx.open_checkpoint(tmp_path / "w.pt")["w"].read().tolist() == list(range(10_000))
    assert set(sizes) == {(tmp_path / "w.pt").stat().st_size}
