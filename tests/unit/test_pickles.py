"""The restricted reader of pickles: it reads real ones, runs nothing, and allocates nothing for false sizes."""

import argparse
import collections
import datetime as dt
import enum
import io
import os
import pathlib
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from statexchange.errors import CorruptError, StateExchangeError, UnsafeError
from statexchange.formats.pickles import GlobalRef, OpaqueObject, read_pickle

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=300)
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    SCALARS,
    lambda below: st.one_of(
        st.lists(below), st.tuples(below), st.tuples(below, below, below, below), st.dictionaries(KEYS, below)
    ),
    max_leaves=20,
)


@given(TREES, st.sampled_from([3, 4, 5]))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error_of_ours(data: bytes) -> None:
    with suppress(CorruptError, UnsafeError):
        read_pickle(b"\x80\x04" + data + b".", "x")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torchs_classes_are_described_and_not_built(protocol: int) -> None:
    value = {
        "size": torch.Size((2, 3)),
        "dtype": torch.float8_e4m3fn,
        "device": torch.device("cuda:1"),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("aab"),
        "path": pathlib.PurePosixPath("a/b"),
        "set": {1, 2},
    }
    found = read_pickle(pickle.dumps(value, protocol), "x")
    assert found["size"] == (2, 3)
    assert found["dtype"] == GlobalRef("float8_e4m3fn")
    assert (found["device"].name, found["device"].args) == ("device", ("cuda", 1))
    assert (found["ordered"], found["default"], found["counter"]) == ({"a": 1}, {"a": [1]}, {"a": 2, "b": 1})
    assert found["path"].name == "PurePosixPath"
    assert found["set"] == {1, 2} or found["set"].name == "set"


class Settings(dict[str, Any]):
    """A class that no reader knows, with items and attributes."""


class settings_of_old:  # noqa: N801 (its name is that of a function)
    pass


def opaque(value: Any, protocol: int = 2) -> Any:
    return read_pickle(pickle.dumps(value, protocol), "x", unknown_classes=True)


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_of_unknown_classes_are_opaque_and_keep_their_content(protocol: int) -> None:
    settings = Settings(a=1)
    settings.name = "x"  # type: ignore[attr-defined]
    lower = settings_of_old()
    lower.depth = 2  # type: ignore[attr-defined]
    values = [settings, lower, collections.deque([1, 2]), argparse.Namespace(lr=0.5), dt.date(2020, 1, 2)]
    read = opaque(values, protocol)
    home = Settings.__module__
    assert [(one.class_name, one.is_unknown) for one in read] == [
        (f"{home}.Settings", True),
        (f"{home}.settings_of_old", True),
        ("collections.deque", True),
        ("argparse.Namespace", True),
        ("datetime.date", True),
    ]
    assert (read[0].items, read[0].state, read[1].state) == (["a", 1], {"name": "x"}, {"depth": 2})
    assert (read[2].items, read[3].state) == ([1, 2], {"lr": 0.5})
    with pytest.raises(UnsafeError, match=r"\bSettings\b"):
        read_pickle(pickle.dumps(settings, protocol), "x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_functions_as_values_are_opaque(protocol: int) -> None:
    settings = argparse.Namespace(activation=read_pickle)
    found = opaque({"direct": os.path.join, "in": [read_pickle], "object": settings}, protocol)
    name = "statexchange.formats.pickles.read_pickle"
    assert (found["direct"].class_name, found["direct"].is_unknown) == ("posixpath.join", True)
    assert (found["in"][0].class_name, found["object"].state["activation"].class_name) == (name, name)
    with pytest.raises(UnsafeError, match=r"\bread_pickle\b"):
        read_pickle(pickle.dumps(read_pickle, protocol), "x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_numpys_objects_are_opaque(protocol: int) -> None:
    values = [np.arange(3), np.float64(1), np.dtype("f4"), np.float32, np.random.default_rng(1), np.array([None])]
    read = opaque(values, protocol)
    names = [one.name if type(one) is GlobalRef else one.class_name for one in read]
    assert [name.rpartition(".")[2] for name in names] == [
        "ndarray", "scalar", "dtype", "float32", "__generator_ctor", "ndarray"
    ]  # fmt: skip


def test_a_member_of_an_unknown_enum_is_opaque() -> None:
    found = opaque({"by value": Colour.RED})
    assert found["by value"].class_name == f"{Colour.__module__}.Colour"
    written = io.BytesIO()
    _EnumsByName(written, 4).dump(Colour.RED)
    assert read_pickle(written.getvalue(), "x", unknown_classes=True).class_name == f"{Colour.__module__}.Colour.RED"


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_member_of_an_enum_in_a_class_is_opaque(protocol: int) -> None:
    assert opaque({"x": Paint.Shade.DARK}, protocol)["x"].class_name.endswith("Paint.Shade")


class Colour(enum.Enum):
    """An enum that the reader does not know."""

    RED = 1


class Paint:
    """A class with an enum of its own."""

    class Shade(enum.Enum):
        """An enum in a class."""

        DARK = 1


class _EnumsByName(pickle.Pickler):
    """A pickler that writes the members of an enum as early releases of Python 3.11 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_a_member_of_an_enum_may_be_written_by_name() -> None:
    written = io.BytesIO()
    _EnumsByName(written, 4).dump({"properties": TensorProperties(torch.float32)})
    found = read_pickle(written.getvalue(), "x")["properties"]
    assert found.name == "TensorProperties"
    assert b"getattr" in written.getvalue()


def test_attributes_are_kept_apart() -> None:
    found = read_pickle(pickle.dumps(ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))), "x")
    assert (type(found), found.name, found.state) == (
        OpaqueObject,
        "ChunkStorageMetadata",
        {"offsets": (0,), "sizes": (3,)},
    )


REFUSED = {
    "os.system": b"cos\nsystem\n(S'x'\ntR.",
    "posix.system": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x01x\x85R.",
    "builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "getattr of a text": b"\x80\x02c__builtin__\ngetattr\nX\x01\x00\x00\x00xX\x05\x00\x00\x00upper\x86R.",
    "getattr of a module": b"\x80\x02c__builtin__\ngetattr\ncos\npath\nX\x04\x00\x00\x00join\x86R.",
    "a call of what getattr found": b"\x80\x02c__builtin__\ngetattr\nctorch\nSize\nX\x05\x00\x00\x00index\x86R)R.",
    "builtins.exec": b"\x80\x02cbuiltins\nexec\n.",
    "subprocess.Popen": b"\x80\x02csubprocess\nPopen\n)\x81.",
    "torch.load": b"\x80\x02ctorch\nload\n)R.",
    "torch.hub.load": b"\x80\x02ctorch.hub\nload\n)R.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93)R.",
    "codecs": b"\x80\x02c_codecs\ndecode\n)R.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a call of text": b"\x80\x02X\x01\0\0\0x)R.",
    "a call of what was made": b"\x80\x02ctorch\ndevice\n)R)R.",
    "a call with a list": b"\x80\x02ctorch\ndevice\n]R.",
    "state of a list": b"\x80\x02]}b.",
    "state of text": b"\x80\x02X\x01\0\0\0x}b.",
    "state of a name": b"\x80\x02ctorch\nSize\n}b.",
    "INST": b"(ios\nsystem\n.",
    "OBJ": b"\x80\x02(ctorch\nSize\no.",
    "NEWOBJ_EX": b"\x80\x04ctorch\nSize\n)}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\0.",
    "EXT4": b"\x80\x02\x84\x01\0\0\0.",
    "PERSID": b"Px\n.",
    "INT": b"I1\n.",
    "LONG": b"L1L\n.",
    "STRING": b"S'x'\n.",
    "BINSTRING": b"T\1\0\0\0x.",
    "UNICODE": b"Vx\n.",
    "FLOAT": b"F1.0\n.",
    "PUT": b"Np0\n.",
    "GET": b"Np0\ng0\n.",
    "DUP": b"N2.",
    "POP": b"NN0.",
    "POP_MARK": b"N(N1.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "BYTEARRAY8": b"\x80\x05\x96\0\0\0\0\0\0\0\0.",
    "a list as a key": b"\x80\x02}]Ns.",
    "a deep tuple as a key": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "a deep tuple in a set": b"\x80\x04\x8f()" + b"\x85" * 100_000 + b"\x90.",
    "a deep tuple in a frozenset": b"\x80\x04()" + b"\x85" * 100_000 + b"\x91.",
    "a deep key of a counter": b"\x80\x02ccollections\nCounter\n})" + b"\x85" * 100_000 + b"Ns\x85R.",
    "items that are given to a dict": b"\x80\x02ccollections\nOrderedDict\n]\x85R.",
}


REFUSED_AMONG_OPAQUE = {
    "a builtin that opens files": b"\x80\x02cbuiltins\nopen\n.",
    "a function that torch would call": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cmodule\nrun\nN)NtR.",
    "a function that numpy would call": b"\x80\x02cnumpy.random._pickle\n__generator_ctor\nNcmodule\nrun\n\x86R.",
    "a function deep in what a class is given": b"\x80\x02cmodule\nLater\n]}X\1\0\0\0acmodule\nrun\nsa\x85R.",
    "a function named after a class was given its list": b"\x80\x02cmodule\nLater\n]q\0\x85Rh\0cmodule\nrun\na\x86.",
    "a function in an object that is given": b"\x80\x02cm\nLater\ncargparse\nNamespace\n)\x81}Ncm\nrun\nsb\x85R.",
    "a call of a function": b"\x80\x02cstatexchange.demo\nrun\n)R.",
    "a call of a method": b"\x80\x02cbuiltins\ngetattr\ncmodule\nClass\nX\x04\0\0\0loadq\0\x86R)R.",
    "a class that starts a process": b"\x80\x02csubprocess\nPopen\n]\x85R.",
    "a class that makes functions of code": b"\x80\x02ctypes\nFunctionType\n.",
    "a class that loads code": b"\x80\x02cimportlib.machinery\nSourceFileLoader\n.",
    "a method by a dotted name": b"\x80\x04\x8c\6module\x8c\x0aClass.load\x93)R.",
    "a name without end": b"\x80\x02cmodule\nC" + b"c" * 300 + b"\n.",
}


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("data", [*REFUSED.values(), *REFUSED_AMONG_OPAQUE.values()])
def test_pickles_that_could_run_code_or_recurse_are_refused(data: bytes, opaque: bool) -> None:
    with pytest.raises(StateExchangeError, match="refused") as caught:
        read_pickle(data, "x", unknown_classes=opaque)
    assert (type(caught.value), caught.value.path) == (UnsafeError, "x")


BROKEN = {
    "nothing": b"",
    "no end": b"\x80\x02N",
    "two values": b"NN.",
    "no value": b".",
    "a mark is left": b"(N.",
    "no mark": b"\x80\x02t.",
    "an empty stack": b"\x80\x02\x85.",
    "a memo that is empty": b"\x80\x02h\x05.",
    "text that is no UTF-8": b"\x80\x02X\1\0\0\0\xff.",
    "a line without an end": b"\x80\x02ctorch",
    "a key without a value": b"\x80\x02}(Nu.",
    "an item of no dict": b"\x80\x02](NNu.",
    "an item of no list": b"\x80\x02}(Ne.",
    "BINUNICODE8 of 2**60": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "BINBYTES8 of 2**63": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + b"x.",
    "BINBYTES of 2**32 - 1": b"\x80\x03B" + struct.pack("<I", 0xFFFFFFFF) + b"x.",
    "LONG4 of 2**31": b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b"x.",
    "a long number": b"\x80\x02\x8b" + struct.pack("<I", 5000) + b"\1" * 5000 + b".",
    "FRAME and no more": b"\x80\x04\x95\xff",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_broken_pickles_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        read_pickle(data, "x")
    assert caught.value.path == "x"


def test_names_of_attributes_take_memory_in_proportion_to_the_pickle() -> None:
    name = "A" * 190
    get = b"\x8c\x08builtins\x8c\x07getattr\x93q\x00" + (b"\x8c\xbe" + name.encode()) * 2 + b"\x93"
    data = b"\x80\x04](" + get + b"\x8c\xc8" + b"B" * 200 + b"\x86q\x01" + b"h\x00h\x01R" * 30_000 + b"e."
    with pytest.raises(CorruptError, match="so often"):
        read_pickle(data, "x", unknown_classes=True)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_memo_index_and_deep_nesting_take_no_memory() -> None:
    before = peak_kib()
    assert read_pickle(b"\x80\x02Nr\xff\xff\xff\xff.", "x") is None
    deep = read_pickle(b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".", "x")
    assert type(deep) is list
    del deep  # freeing it does not recurse, either
    assert peak_kib() - before < 128 << 10


ATTACK = """
import os, sys
import encodings.cp437, ml_dtypes, xxhash
import statexchange.checkpoint.merge, statexchange.tensors, statexchange.report.verify
import statexchange.formats.registry
from statexchange.errors import StateExchangeError

for name in statexchange.formats.registry.FORMATS:  # an import under the hook would count as code that was run
    statexchange.formats.registry._format(name)

root = sys.argv[1]
paths = sorted(os.path.join(root, name) for name in os.listdir(root))
seen = []

def watch(event, args):
    harmless = event in ("builtins.id", "os.listdir", "object.__getattr__", "sys._getframe") or event.startswith("gc.")
    if event == "open" and args[1] in (None, "r", "rb") and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        harmless = True  # names are looked up in open directories, so no path is seen here
    if event == "os.scandir" or (event == "statexchange.storage" and args[0] in ("open", "open directory", "list")):
        harmless = True
    if not harmless:
        seen.append((event, str(args)[:200]))

sys.addaudithook(watch)
for path in paths:
    try:
        statexchange.formats.registry.open_source(path)
        print(os.path.basename(path), "ok")
    except StateExchangeError as error:
        print(os.path.basename(path), type(error).__name__)
    try:
        statexchange.report.verify.verify(path)
    except StateExchangeError:
        pass
assert not seen, seen
assert "torch" not in sys.modules
"""


def archive(path: Path, data: bytes) -> Path:
    """Write a file as torch.save would, with this pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/data/0", bytes(8))
    return path


def dcp_directory(path: Path, entry: bytes, *, of_tensor: bool) -> None:
    """Write a DCP directory of one entry with this pickle."""
    path.mkdir()
    length = archive(path / "__0_0.distcp", entry).stat().st_size
    size, begin = torch.Size((2,)), torch.Size((0,))
    chunk = ChunkStorageMetadata(offsets=begin, sizes=size)
    fact = (
        TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk]) if of_tensor else BytesStorageMetadata()
    )
    index = MetadataIndex("w", begin if of_tensor else None)
    metadata = Metadata({"w": fact}, {"w": ("w",)}, {index: _StorageInfo("__0_0.distcp", 0, length)})
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_audit_hook_sees_nothing_run(tmp_path: Path) -> None:
    """Malicious .pt files, DCP metadata, and DCP entries; some would make a file called `ran`."""
    evil = tmp_path / "evil"
    evil.mkdir()
    command = f"touch {tmp_path}/ran".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    payloads = [
        b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        b"\x80\x02cposix\nsystem\n" + text + b"\x85R.",
        b"(" + text + b"ios\nsystem\n.",
        b"\x80\x02csubprocess\nPopen\n](" + b"X\5\0\0\0touch" + b"X\3\0\0\0ran" + b"e\x85R.",
        b"\x80\x02cantigravity\nfly\n)R.",
        *REFUSED.values(),
        *REFUSED_AMONG_OPAQUE.values(),
    ]
    expected = {}
    for number, data in enumerate(payloads):
        archive(evil / f"{number}.pt", data)
        (evil / f"{number}.metadata").mkdir()
        (evil / f"{number}.metadata" / ".metadata").write_bytes(data)
        dcp_directory(evil / f"{number}.tensor", data, of_tensor=True)
        dcp_directory(evil / f"{number}.other", data, of_tensor=False)
        expected |= {f"{number}.{kind}": "UnsafeError" for kind in ("pt", "metadata", "tensor")}
        expected[f"{number}.other"] = "ok"  # listed by its type, and not read
    done = subprocess.run([sys.executable, "-c", ATTACK, str(evil)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert dict(line.split() for line in done.stdout.splitlines()) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["evil"]


def test_the_audit_hook_detects_code_that_runs(tmp_path: Path) -> None:
    """torch.load without weights_only runs the same file."""
    text = f"touch {tmp_path}/ran".encode()
    archive(tmp_path / "x.pt", b"\x80\x02cposix\nsystem\nX" + struct.pack("<I", len(text)) + text + b"\x85R.")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as file:
        file.writestr("archive/version", b"3\n")
    with suppress(Exception):
        torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").exists()
