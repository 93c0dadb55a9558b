"""Named mutations of whole checkpoints of every kind, each with the verdict that commands must give.

A mutation damages a fresh checkpoint and returns what `scan`, `info` and `verify` must report, or None if it does not
apply to the kind. Where a kind differs for a reason of its own, `EXCEPTIONS` has what is reported of it, and why.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from commands import CommandLine
from scripts import HOME
from stored import flip_bit
from sweeps import slow
from warm_python import warm_python
from whole_checkpoints import KINDS, Kind

from statexchange.formats.registry import open_source
from statexchange.report.scan import scan
from statexchange.sharding.shards import full_box
from statexchange.storage.location import seal
from statexchange.tensors import numpy_dtype

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.save of one process


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


# Nothing says how the ranks divide the tensors, nor how many ranks there are.
PLAIN = ("rank files", "rank files of torch")
DEEPSPEED = ("ZeRO-2", "ZeRO-3", "DeepSpeed pipeline", "Universal Checkpoint")
INCOMPLETE = Verdict("INCOMPLETE", "broken", "INCOMPLETE", ("INCOMPLETE",))
MISSING = Verdict("MISSING ", "broken", "INCOMPLETE", ("INCOMPLETE",))
CORRUPT = Verdict("CORRUPT", "broken")
STEP_ALONE = Verdict("", "", "USAGE", ("USAGE",))  # the directory of the step below is whole, and has to be named


def _all(names: Sequence[str], kinds: Sequence[str], verdict: Verdict) -> dict[tuple[str, str], Verdict]:
    return {(name, kind): verdict for name in names for kind in kinds}


EXCEPTIONS: dict[tuple[str, str], Verdict] = {
    # A config without any weights is no checkpoint; nothing says that there should be some.
    **_all(["lose_the_first_file", "make_a_directory_of_a_file"], ["huggingface", "torch file"], NOTHING),
    # The numbers in the names prove that all files are there.
    **_all(["lose_the_listing"], ["huggingface shards", "torch shards", "export"], WHOLE),
    # Names of tensors and boxes are in the files, so their order does not matter.
    **_all(["swap_two_files"], ["huggingface without index", "torch shards without index", "FSDP1", "verl"], WHOLE),
    # Nothing in these files says whose they are.
    **_all(
        ["swap_two_files"],
        ["dcp", "ZeRO-3", "Universal Checkpoint", "torch_checkpointing"],
        WHOLE,
    ),
    **_all(
        ["copy_a_file_over_another"],
        ["huggingface without index", "torch shards without index", "dcp", "ZeRO-3", "Universal Checkpoint"],
        WHOLE,
    ),
    **_all(
        ["swap_two_files", "copy_a_file_over_another", "lose_the_last_file", "flip_a_bit_in_the_data",
         "lose_the_end_of_a_tensor_to_zeros"],
        PLAIN,
        WHOLE,
    ),
    # .metadata says where each tensor lies, and nothing of what follows.
    **_all(["append_bytes"], ["dcp", "Megatron torch_dist", "Trainer with FSDP", "Lightning"], WHOLE),
    **_all(
        ["make_a_directory_of_a_file"],
        [*PLAIN, "huggingface without index", "torch shards without index", "FSDP1", "Universal Checkpoint",
         "torch_checkpointing", "verl", "Trainer", "accelerate"],
        INCOMPLETE,
    ),
    # Only the names of the other ranks' files say how many there are.
    **_all(
        ["lose_the_first_file", "lose_a_middle_file", "lose_the_last_file", "interrupt_the_download_of_a_file",
         "make_a_directory_of_a_file", "make_a_fifo"],
        ["workspace"],
        INCOMPLETE,
    ),
    # The one file of the model: which others there should be, only its kind says.
    **_all(["lose_the_first_file"], ["Trainer", "accelerate"], INCOMPLETE),
    **_all(["lose_the_last_file"], ["FSDP1", "torch_checkpointing"], INCOMPLETE),  # by the boxes of the others
    ("lose_all_files", "verl"): INCOMPLETE,
    ("empty_a_file", "dcp of safetensors"): CORRUPT,
    ("make_a_dangling_link", "workspace"): Verdict("REFUSED", "broken", "UNSAFE", ("UNSAFE", "INCOMPLETE")),
    # Links are not followed in a workspace.
    **_all(["lose_the_listing"], [*DEEPSPEED, "Megatron legacy"], STEP_ALONE),
    **_all(["cut_the_listing"], DEEPSPEED, INCOMPLETE),  # it names a directory that is not there
    **_all(["lose_all_files"], [*DEEPSPEED, "Megatron legacy"], MISSING),
}  # fmt: skip


def expected(name: str, kind_name: str, verdict: Verdict) -> Verdict:
    """Return the verdict that a mutation of a kind must get."""
    if verdict.values is not None and kind_name in PLAIN:
        verdict = dataclasses.replace(WHOLE, values=verdict.values)
    verdict = EXCEPTIONS.get((name, kind_name), verdict)
    if kind_name in PLAIN and verdict.verify == WHOLE.verify:  # plain tensors of ranks differ, so it is never "ok"
        verdict = dataclasses.replace(verdict, verify=("FINDINGS",))
    return verdict


@cache
def _template(kind: str) -> Path:
    path = Path(mkdtemp(prefix="whole-"))
    KINDS[kind].build(path / "one")
    return path


@pytest.fixture(scope="module", autouse=True)
def _remove_templates() -> Iterator[None]:
    yield
    for kind in KINDS:
        shutil.rmtree(_template(kind), ignore_errors=True)
    _template.cache_clear()


def _findings(verified: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of `verify` in a checkpoint, or in all saves of a job."""
    data = verified["data"]
    return [one for record in data.get("saves", [data]) for one in record["findings"]]


def wrong_verdicts(kind: Kind, verdict: Verdict, path: Path, run: Callable[..., dict[str, Any]]) -> list[str]:
    """Return what commands report of a checkpoint other than its verdict."""
    wrong = []
    scanned = run("scan", path.parent)
    rows = scanned["data"]["checkpoints"]
    place = os.path.normpath(path / (kind.row or kind.at))
    verdicts = [(row["verdict"], row["status"]) for row in rows if os.path.normpath(row["path"]) == place]
    if verdict.beside:
        beside = [one for one in verdicts if re.match(verdict.beside, one[0])]
        if not beside:
            wrong.append(f"scan: {verdicts}, expected {verdict.beside!r} beside it")
        verdicts = [one for one in verdicts if one not in beside]
    if verdict.new:
        new = [row["verdict"] for row in rows if os.path.normpath(row["path"]) == os.path.normpath(path.parent / "new")]
        if len(new) != 1 or not re.match(verdict.new, new[0]):
            wrong.append(f"scan: {new}, expected {verdict.new!r} of the new one")
    if verdict.values is not None:
        name, check = verdict.values
        found = run("verify", path / kind.at, "--values")
        checks = {one.get("check") for one in _findings(found) if one["name"] == name} - {None}
        if checks != {check}:
            wrong.append(f"verify --values: {checks} of {name}, expected {check}")
    if not verdict.scan and verdicts:
        wrong.append(f"scan: {verdicts}, expected no row")
    elif verdict.scan:
        found_verdict, status = verdicts[0] if verdicts else ("no row", "")
        is_right = re.match(verdict.scan, found_verdict) and (verdict.scan == "WHOLE") == (found_verdict == "WHOLE")
        if not is_right or not re.fullmatch(verdict.status, status):
            wrong.append(f"scan: {found_verdict!r} {status}, expected {verdict.scan!r} {verdict.status}")
    info, verified = run("info", path / kind.at), run("verify", path / kind.at)
    if not re.fullmatch(verdict.info, str(info["code"])):
        wrong.append(f"info: {info['code']}, expected {verdict.info}")
    if verified["code"] not in verdict.verify:
        wrong.append(f"verify: {verified['code']}, expected {' or '.join(verdict.verify)}")
    return wrong


def _without_override_rights(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs commands during which root, too, may not read files whose mode forbids it."""

    def limited(command: str, path: Path, *options: str) -> dict[str, Any]:
        if os.geteuid() != 0:
            return run(command, path, *options)
        libc = ctypes.CDLL(None, use_errno=True)
        header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, rights) == 0
        effective = rights[0]
        rights[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of this thread
        assert libc.capset(header, rights) == 0
        try:
            return run(command, path, *options)
        finally:
            rights[0] = effective
            assert libc.capset(header, rights) == 0

    return limited


def _share(kind_name: str, every: int) -> list[str]:
    """Return each `every`-th mutation, for each kind from another one on, so that over all kinds none is left out."""
    return list(MUTATIONS)[list(KINDS).index(kind_name) % every :: every]


@pytest.mark.parametrize("every", [12, slow(1)], ids=["some", "all"])
@pytest.mark.parametrize("kind_name", KINDS, ids=lambda text: text.replace(" ", "_"))
def test_a_mutation_gets_the_verdict_that_is_expected(
    kind_name: str, every: int, tmp_path: Path, call: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> dict[str, Any]:
        return dict(call.json(*arguments)[1])

    kind = KINDS[kind_name]
    applied, wrong = [], {}
    for name in _share(kind_name, every):
        path = tmp_path / name / "one"
        shutil.copytree(_template(kind_name) / "one", path)
        verdict = MUTATIONS[name](kind, path)
        if verdict is None:
            continue
        applied.append(name)
        limited = _without_override_rights(run) if name == "forbid_a_file" else run
        found = wrong_verdicts(kind, expected(name, kind_name, verdict), path, limited)
        if found:
            wrong[name] = found
    with capsys.disabled():
        print(f" {len(applied)} mutations of {kind_name} ", end="")
    assert applied
    assert wrong == {}


@pytest.mark.parametrize("kind_name", KINDS, ids=lambda text: text.replace(" ", "_"))
def test_without_a_mutation_each_kind_is_whole(kind_name: str) -> None:
    kind, path = KINDS[kind_name], _template(kind_name) / "one"
    rows = {os.path.normpath(row.path): row for row in scan(path)}
    row = rows[os.path.normpath(path / (kind.row or kind.at))]
    assert (row.verdict, row.step) == ("WHOLE", kind.step)
    assert (row.kind or "").startswith(kind.format)
