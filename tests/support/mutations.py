"""Named mutations of whole checkpoints of every kind, each with the verdict that commands must give.

A mutation damages a fresh checkpoint and returns what `scan`, `info` and `verify` must report, or None if it does not
apply to the kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scripts import HOME
from stored import flip_bit
from warm_python import warm_python
from whole_checkpoints import Kind

from statexchange.formats.registry import open_source
from statexchange.sharding.shards import full_box
from statexchange.storage.location import seal
from statexchange.tensors import numpy_dtype


@dataclass(frozen=True)
class Verdict:
    """A verdict on a checkpoint.

    Attributes:
        scan: a pattern of its verdict; "" for no row at all.
        status: a pattern of its status in `scan`.
        info: a pattern of the code of `info`.
        verify: the codes of `verify`, of which one is given.
        beside: a pattern of the verdict of a second row with the same path.
        new: a pattern of the verdict of the row of a second directory, `new`.
        values: what `verify --values` finds, as (name of the tensor, check).
    """

    scan: str
    status: str = "broken"
    info: str = "CORRUPT"
    verify: tuple[str, ...] = ("CORRUPT",)
    beside: str = ""
    new: str = ""
    values: tuple[str, str] | None = None


WHOLE = Verdict("WHOLE", "whole", "OK", ("OK",))
FOUND_BY_VERIFY = Verdict("WHOLE", "whole", "OK", ("CORRUPT",))
NOTHING = Verdict("", "", "NOT_FOUND", ("NOT_FOUND",))


def shown(kind: Kind, path: Path, file: Path) -> str:
    """Return a pattern for the path of a file as the row of the checkpoint shows it."""
    return re.escape(os.fspath(file.relative_to(path / (kind.row or kind.at))))


def missing(kind: Kind, path: Path, file: Path) -> Verdict:
    word = "NO" if file.name.startswith(".") or file.suffix == ".json" else "MISSING"
    return Verdict(f"{word} {shown(kind, path, file)}", "broken", "INCOMPLETE", ("INCOMPLETE",))


def corrupt(kind: Kind, path: Path, file: Path, text: str = "") -> Verdict:
    return Verdict(f"CORRUPT {shown(kind, path, file)}: {text}|TRUNCATED ", "broken")


def refused(kind: Kind, path: Path, file: Path) -> Verdict:
    text = f"REFUSED {shown(kind, path, file)}: not a regular file"
    return Verdict(text, "broken", "UNSAFE", ("UNSAFE", "INCOMPLETE"))


Mutation = Callable[[Kind, Path], "Verdict | None"]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


# Files that are cut, emptied or overwritten


@mutation
def cut_in_the_header(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    os.truncate(file, 5)
    return corrupt(kind, path, file)


@mutation
def cut_in_the_middle(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[-1]
    os.truncate(file, file.stat().st_size // 2)
    return corrupt(kind, path, file)


@mutation
def lose_the_last_byte(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[-1]
    os.truncate(file, file.stat().st_size - 1)
    return corrupt(kind, path, file)


@mutation
def empty_a_file(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    os.truncate(file, 0)
    return corrupt(kind, path, file, "the file is empty")


@mutation
def fill_a_file_with_zeros(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.write_bytes(bytes(file.stat().st_size))
    return corrupt(kind, path, file, "not a ")


@mutation
def append_bytes(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    with file.open("ab") as opened:
        opened.write(b"x" * 100)
    return corrupt(kind, path, file)


@mutation
def put_a_git_lfs_pointer(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345678\n")
    return corrupt(kind, path, file, "this is a pointer of Git LFS")


@mutation
def put_a_web_page(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.write_text(f"<!DOCTYPE html>\n<html><body>404 Not found {'x' * 500}</body></html>\n")
    return corrupt(kind, path, file, "this is a web page")


@mutation
def claim_a_huge_header(kind: Kind, path: Path) -> Verdict | None:
    if kind.container != "safetensors":
        return None
    file = kind.files(path)[0]
    with file.open("r+b") as opened:
        opened.write(struct.pack("<Q", 2**62))
    return corrupt(kind, path, file, "header is truncated")


@mutation
def flip_a_bit_in_the_header(kind: Kind, path: Path) -> Verdict | None:
    if kind.container != "safetensors":
        return None
    file = kind.files(path)[0]
    flip_bit(file, 9, bit=2)
    return corrupt(kind, path, file, "broken JSON")


@mutation
def flip_a_bit_in_the_data(kind: Kind, path: Path) -> Verdict | None:
    with open_source(path / (kind.row or kind.at), strict=False) as source:
        ranges = [stored for _, tensor in source.shards() for stored in tensor.byte_ranges]
        largest = max(ranges, key=lambda stored: stored.nbytes)
        file, begin = Path(largest.file.path), largest.begin
    flip_bit(file, begin)
    return FOUND_BY_VERIFY if kind.has_digests else WHOLE


@mutation
def lose_the_end_of_a_tensor_to_zeros(kind: Kind, path: Path) -> Verdict | None:
    with open_source(path / (kind.row or kind.at), strict=False) as source:
        ranges = [stored for _, tensor in source.shards() for stored in tensor.byte_ranges]
        largest = max(ranges, key=lambda stored: stored.nbytes)
        file, end, nbytes = Path(largest.file.path), largest.begin + largest.nbytes, largest.nbytes
    with file.open("r+b") as opened:
        opened.seek(end - nbytes // 2)
        opened.write(bytes(nbytes // 2))
    return FOUND_BY_VERIFY if kind.has_digests else WHOLE


# Values


@mutation
def put_a_nan(kind: Kind, path: Path) -> Verdict | None:
    return _overwrite_values(kind, path, "nan", lambda values: values.__setitem__(0, np.nan))


@mutation
def put_an_infinity(kind: Kind, path: Path) -> Verdict | None:
    return _overwrite_values(kind, path, "inf", lambda values: values.__setitem__(0, -np.inf))


@mutation
def fill_a_tensor_with_zeros(kind: Kind, path: Path) -> Verdict | None:
    return _overwrite_values(kind, path, "all-zero", lambda values: values.fill(0))


@mutation
def fill_a_tensor_with_one_value(kind: Kind, path: Path) -> Verdict | None:
    return _overwrite_values(kind, path, "all-equal", lambda values: values.fill(0.5))


@mutation
def lose_the_last_page_of_a_tensor(kind: Kind, path: Path) -> Verdict | None:
    def fill(values: Any) -> None:
        values[-(4096 // values.itemsize) :] = 0

    return _overwrite_values(kind, path, "zero-tail", fill)


def _overwrite_values(kind: Kind, path: Path, check: str, change: Callable[[Any], None]) -> Verdict | None:
    """Change the values of each stored box of one tensor: of the model's, of 16 elements and more, the largest."""
    with open_source(path / (kind.row or kind.at), strict=False) as source:
        stored = [
            (one.nbytes, tensor.shard.name, tensor.shard.dtype, one)
            for _, tensor in source.shards()
            for one in tensor.byte_ranges
            if one.strides is None
            and tensor.shard.dtype in ("F32", "BF16", "F16", "F64")
            and not tensor.shard.name.startswith("optimizer")  # whose moments may be zero
            and full_box(tensor.shard.global_shape).numel >= 16
        ]
    if not stored:
        return None
    nbytes, largest, dtype, _ = max(stored, key=lambda one: one[:2])
    ranges = [(Path(one.file.path), one.begin, one.nbytes) for _, name, _, one in stored if name == largest]
    if check == "zero-tail" and nbytes < 3 * 4096 // 2:
        return None
    for file, begin, length in ranges:
        with file.open("r+b") as opened:
            opened.seek(begin)
            values = np.frombuffer(bytearray(opened.read(length)), numpy_dtype(dtype)).copy()
            if check == "zero-tail" and length < nbytes:
                continue
            change(values)
            opened.seek(begin)
            opened.write(values.tobytes())
    verdict = FOUND_BY_VERIFY if kind.has_digests else WHOLE
    return dataclasses.replace(verdict, values=(largest, check))


# Files that are missing, or of another kind or place


@mutation
def lose_the_first_file(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.unlink()
    return missing(kind, path, file)


@mutation
def lose_a_middle_file(kind: Kind, path: Path) -> Verdict | None:
    files = kind.files(path)
    if len(files) < 3:
        return None
    file = files[len(files) // 2]
    file.unlink()
    return missing(kind, path, file)


@mutation
def lose_the_last_file(kind: Kind, path: Path) -> Verdict | None:
    files = kind.files(path)
    if len(files) < 2:
        return None
    files[-1].unlink()
    return missing(kind, path, files[-1])


@mutation
def lose_all_files(kind: Kind, path: Path) -> Verdict | None:
    files = kind.files(path)
    if len(files) < 2 or not kind.listing:
        return None
    for file in files:
        file.unlink()
    return missing(kind, path, files[0])


@mutation
def make_a_directory_of_a_file(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.unlink()
    file.mkdir()
    return refused(kind, path, file)


@mutation
def make_a_dangling_link(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.unlink()
    file.symlink_to("../blobs/gone")
    return missing(kind, path, file)


@mutation
def make_a_link_to_itself(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.unlink()
    file.symlink_to(file.name)
    return refused(kind, path, file)


@mutation
def make_a_fifo(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.unlink()
    os.mkfifo(file)
    return refused(kind, path, file)


@mutation
def forbid_a_file(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.chmod(0)
    return Verdict(f"UNREADABLE {shown(kind, path, file)}: ", "broken", "IO", ("IO", "INCOMPLETE"))


@mutation
def swap_two_files(kind: Kind, path: Path) -> Verdict | None:
    files = kind.files(path)
    if len(files) < 2:
        return None
    aside = files[0].with_name("aside")
    files[0].rename(aside)
    files[1].rename(files[0])
    aside.rename(files[1])
    return Verdict("(CORRUPT|INCOMPLETE|TRUNCATED)", "broken", ".*", ("CORRUPT", "INCOMPLETE"))


@mutation
def copy_a_file_over_another(kind: Kind, path: Path) -> Verdict | None:
    files = kind.files(path)
    if len(files) < 2:
        return None
    shutil.copyfile(files[0], files[1])
    return Verdict("(CORRUPT|INCOMPLETE|TRUNCATED)", "broken", ".*", ("CORRUPT", "INCOMPLETE"))


@mutation
def interrupt_the_download_of_a_file(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.rename(file.with_name(f"{file.name}.incomplete"))
    if file.parent != path / (kind.row or kind.at):
        return missing(kind, path, file)
    return Verdict("UNFINISHED DOWNLOAD", "unfinished", "INCOMPLETE|NOT_FOUND", ("INCOMPLETE", "NOT_FOUND"))


@mutation
def interrupt_the_download_of_all_files(kind: Kind, path: Path) -> Verdict | None:
    """Leave what huggingface_hub does: a hidden directory, beside the small files that came first."""
    for file in kind.files(path):
        file.unlink()
    if kind.listing:
        (path / kind.listing).unlink()
    below = path / (kind.row or kind.at) / ".cache/huggingface/download"
    below.mkdir(parents=True)
    (below / "JxXh.5f0b.incomplete").write_bytes(b"half")
    return Verdict("UNFINISHED DOWNLOAD", "unfinished", ".*", ("INCOMPLETE", "NOT_FOUND", "USAGE", "OK"))


# What lists the files


@mutation
def lose_the_listing(kind: Kind, path: Path) -> Verdict | None:
    if not kind.listing:
        return None
    (path / kind.listing).unlink()
    return missing(kind, path, path / kind.listing)


@mutation
def empty_the_listing(kind: Kind, path: Path) -> Verdict | None:
    if not kind.listing:
        return None
    os.truncate(path / kind.listing, 0)
    return corrupt(kind, path, path / kind.listing)


@mutation
def cut_the_listing(kind: Kind, path: Path) -> Verdict | None:
    if not kind.listing:
        return None
    listing = path / kind.listing
    os.truncate(listing, listing.stat().st_size // 2)
    return corrupt(kind, path, listing)


@mutation
def repeat_a_key(kind: Kind, path: Path) -> Verdict | None:
    if not kind.listing.endswith(".json"):
        return None
    listing = path / kind.listing
    text = listing.read_text()
    key = next(iter(json.loads(text)))
    listing.write_text(text.replace("{", f"{{{json.dumps(key)}: 1, ", 1))
    return corrupt(kind, path, listing, "broken JSON: a key occurs twice")


@mutation
def be_of_a_later_version(kind: Kind, path: Path) -> Verdict | None:
    if not kind.has_digests or not kind.listing:
        return None
    listing = path / kind.listing
    record = json.loads(listing.read_text())
    is_sealed = "digest" in record
    record = {key: value for key, value in record.items() if key != "digest"} | {"schema": 99}
    listing.write_text(json.dumps(seal(record) if is_sealed else record))
    return corrupt(kind, path, listing, ".*(99|newer version|another schema)")


@mutation
def name_a_tensor_that_is_nowhere(kind: Kind, path: Path) -> Verdict | None:
    if not kind.listing.endswith("index.json"):
        return None
    file = kind.files(path)[0]
    _add_to_index(path / kind.listing, file.name)
    text = f"INCOMPLETE {shown(kind, path, file)}: the index assigns this tensor to the file, which does not have it"
    return Verdict(text, "broken", "INCOMPLETE", ("INCOMPLETE",))


@mutation
def name_a_file_that_is_nowhere(kind: Kind, path: Path) -> Verdict | None:
    if not kind.listing.endswith("index.json"):
        return None
    file = path / f"model-00009-of-00009{kind.files(path)[0].suffix}"
    _add_to_index(path / kind.listing, file.name)
    return missing(kind, path, file)


def _add_to_index(listing: Path, file: str) -> None:
    index = json.loads(listing.read_text())
    index["weight_map"]["layers.9.w"] = file
    listing.write_text(json.dumps(index))


# What writers leave


@mutation
def leave_a_hidden_file(kind: Kind, path: Path) -> Verdict | None:
    file = kind.files(path)[0]
    file.with_name(f".{file.name}.{'0' * 16}.partial").write_bytes(b"x" * 50)
    return WHOLE


@mutation
def kill_an_export_over_it(kind: Kind, path: Path) -> Verdict | None:
    if kind.format not in ("huggingface", "save") or kind.row is not None:
        return None
    program = f"""
import os, signal, numpy, statexchange as sx
state = {{"w": numpy.zeros(1000)}}
stop = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sx.export_checkpoint(state, {os.fspath(path)!r}, overwrite=True, on_progress=stop)
"""
    done = _run(program)
    if "overwrite" in done.stderr:  # only a checkpoint of this package is replaced
        return WHOLE
    assert done.returncode == -9, done.stderr
    return Verdict("WHOLE", "whole", "OK", ("OK",), beside="KILLED WRITER")


@mutation
def kill_an_export_beside_it(kind: Kind, path: Path) -> Verdict | None:
    if kind.row is not None:
        return None
    program = f"""
import os, signal, numpy, statexchange as sx
stop = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sx.export_checkpoint({{"w": numpy.zeros(1000)}}, {os.fspath(path.parent / "new")!r}, on_progress=stop)
"""
    done = _run(program)
    assert done.returncode == -9, done.stderr
    return dataclasses.replace(WHOLE, new="KILLED WRITER")


def _run(program: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python("commands"), "-c", program]
    return subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=60)
