"""Measure `info` and `merge --dry-run` on the directories that jobs of very many ranks leave.

    python tools/bench/large_jobs.py [--ranks 1000] [--tensors 1000] [--whole] [--torch] [--rounds 1] [--dir /dev/shm]

A DCP directory: each rank has a part of each tensor, cut along its first dim, in a file of its own. `.metadata` has the
opcodes that torch's writer makes; the files of tensors are sparse, of the right sizes, and with `--whole` have each
entry as torch.save writes it. `--torch` also measures how torch reads `.metadata`. All run in turns as whole commands.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from machine import machine_text
from timed_command import STATEXCHANGE, in_child, run_in_turns

_FRAME_BYTES = 1 << 16  # of which the C pickler makes a frame
_CLASSES = "torch.distributed.checkpoint.metadata"
_COLUMNS = 8


class _Pickle:
    """Writes the opcodes of Python's pickler, protocol 4, for what a Metadata of DCP has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._out = bytearray()
        self._memo: dict[object, int] = {}
        self._count = 0
        file.write(b"\x80\x04")

    def put(self, opcodes: bytes) -> None:
        """Write opcodes, and end the frame if it is long."""
        self._out += opcodes
        if len(self._out) >= _FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write a frame."""
        self._file.write(b"\x95" + len(self._out).to_bytes(8, "little") + self._out)
        self._out.clear()

    def refer(self, key: object) -> bool:
        """Refer to what is memoized under a key; return False if nothing is, and memoize what comes next."""
        number = self._memo.get(key)
        if number is None:
            return False
        self.put(b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little"))
        return True

    def text(self, text: str, key: object = None) -> None:
        """Write a text; with a key, refer to it later."""
        if key is not None and self.refer(key):
            return
        data = text.encode()
        self.put(b"\x8c" + bytes([len(data)]) + data)
        self.memoize(key)

    def memoize(self, key: object = None) -> None:
        """Memoize the top of the stack."""
        if key is not None:
            self._memo[key] = self._count
        self._count += 1
        self.put(b"\x94")

    def name(self, module: str, name: str) -> None:
        """Write a global."""
        if not self.refer((module, name)):
            self.text(module, module if module == _CLASSES else None)
            self.text(name)
            self.put(b"\x93")
            self.memoize((module, name))

    def new(self, module: str, name: str) -> None:
        """Begin an object with a dict of attributes; end it by b"ub"."""
        self.name(module, name)
        self.put(b")\x81")
        self.memoize()
        self.put(b"}")
        self.memoize()
        self.put(b"(")

    def number(self, number: int) -> None:
        """Write an integer."""
        for code, nbytes, limit in ((b"K", 1, 8), (b"M", 2, 16), (b"J", 4, 31)):
            if number < 1 << limit:
                self.put(code + number.to_bytes(nbytes, "little"))
                return
        nbytes = number.bit_length() // 8 + 1
        self.put(b"\x8a" + bytes([nbytes]) + number.to_bytes(nbytes, "little"))

    def size(self, *sizes: int) -> None:
        """Write a torch.Size of two dims."""
        self.name("torch", "Size")
        for size in sizes:
            self.number(size)
        self.put(b"\x86")
        self.memoize()
        self.put(b"\x85")
        self.memoize()
        self.put(b"R")
        self.memoize()


def tensor_name(number: int) -> str:
    """Return the name of a tensor of the job."""
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    return f"model.layers.{number // 4}.{kinds[number % 4]}.weight"


def rows_of(number: int) -> int:
    """Return the number of rows that each rank has of a tensor."""
    return 1 + number % 3


def entries(num_tensors: int) -> list[bytes]:
    """Return the entry of each tensor in the file of a rank, as torch.save writes it."""
    import torch

    of_rows = {}
    for rows in {rows_of(number) for number in range(num_tensors)}:
        data = io.BytesIO()
        torch.save(torch.ones(rows, _COLUMNS), data)
        of_rows[rows] = data.getvalue()
    return [of_rows[rows_of(number)] for number in range(num_tensors)]


def write_metadata(path: Path, num_ranks: int, sizes: list[int]) -> None:
    """Write the .metadata of tensors whose entries have these sizes."""
    with path.open("wb") as file:
        pickle = _Pickle(file)
        pickle.new(_CLASSES, "Metadata")
        pickle.text("state_dict_metadata", "state_dict_metadata")
        pickle.put(b"}")
        pickle.memoize()
        _batches(pickle, len(sizes), lambda number: _describe(pickle, number, num_ranks), b"u")
        pickle.text("planner_data")
        pickle.put(b"N")
        pickle.text("storage_data")
        pickle.put(b"}")
        pickle.memoize()
        begins = [sum(sizes[:number]) for number in range(len(sizes))]

        def stored(at: int) -> None:
            rank, number = divmod(at, len(sizes))
            _store(pickle, rank, number, begins[number], sizes[number])

        _batches(pickle, num_ranks * len(sizes), stored, b"u")
        pickle.put(b"ub.")
        pickle.flush()


def _batches(pickle: _Pickle, count: int, write: Callable[[int], None], end: bytes) -> None:
    """Write items in batches of 1,000, as Python's pickler does."""
    for first in range(0, count, 1000):
        pickle.put(b"(")
        for number in range(first, min(first + 1000, count)):
            write(number)
        pickle.put(end)


def _describe(pickle: _Pickle, number: int, num_ranks: int) -> None:
    rows = rows_of(number)
    pickle.text(tensor_name(number))
    pickle.new(_CLASSES, "TensorStorageMetadata")
    pickle.text("properties", "properties")
    pickle.name(_CLASSES, "TensorProperties")
    pickle.put(b")\x81")
    pickle.memoize()
    pickle.put(b"(")
    pickle.name("torch", "float32")
    _call_with(pickle, "torch.serialization", "_get_layout", "torch.strided")
    pickle.put(b"\x89")
    _call_with(pickle, _CLASSES, "_MEM_FORMAT_ENCODING", 0)
    pickle.put(b"\x89t")
    pickle.memoize()
    pickle.put(b"b")
    pickle.text("size", "size")
    pickle.size(rows * num_ranks, _COLUMNS)
    pickle.text("chunks", "chunks")
    pickle.put(b"]")
    pickle.memoize()

    def chunk(rank: int) -> None:
        pickle.new(_CLASSES, "ChunkStorageMetadata")
        pickle.text("offsets", "offsets")
        pickle.size(rank * rows, 0)
        pickle.text("sizes", "sizes")
        pickle.size(rows, _COLUMNS)
        pickle.put(b"ub")

    _batches(pickle, num_ranks, chunk, b"e")
    pickle.put(b"ub")


def _call_with(pickle: _Pickle, module: str, name: str, argument: int | str) -> None:
    """Write the result of a call, of which there is one object."""
    if pickle.refer((name, argument)):
        return
    pickle.name(module, name)
    if isinstance(argument, int):
        pickle.number(argument)
    else:
        pickle.text(argument, argument)
    pickle.put(b"\x85")
    pickle.memoize()
    pickle.put(b"R")
    pickle.memoize((name, argument))


def _store(pickle: _Pickle, rank: int, number: int, begin: int, nbytes: int) -> None:
    pickle.new(_CLASSES, "MetadataIndex")
    pickle.text("fqn", "fqn")
    pickle.text(tensor_name(number))  # each rank sends its own
    pickle.text("index", "index")
    pickle.number(rank)
    pickle.text("offset", "offset")
    pickle.size(rank * rows_of(number), 0)
    pickle.put(b"ub")
    pickle.new("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    pickle.text("relative_path", "relative_path")
    pickle.text(f"__{rank}_0.distcp", ("file", rank))
    pickle.text("offset", "offset")
    pickle.number(begin)
    pickle.text("length", "length")
    pickle.number(nbytes)
    pickle.put(b"ub")


def make(folder: Path, num_ranks: int, num_tensors: int, is_whole: bool) -> None:
    """Write the directory of a job."""
    folder.mkdir()
    of_rank = entries(num_tensors)
    write_metadata(folder / ".metadata", num_ranks, [len(entry) for entry in of_rank])
    content = b"".join(of_rank)
    for rank in range(num_ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            if is_whole:
                file.write(content)
            else:
                file.write(of_rank[0])
                os.truncate(file.fileno(), len(content))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        job, out = Path(folder, "job"), str(Path(folder, "merged"))
        in_child(make, job, options.ranks, options.tensors, options.whole)
        ways = {
            "info": [STATEXCHANGE, "info", str(job)],
            "merge --dry-run": [STATEXCHANGE, "merge", str(job), out, "--dry-run"],
        }
        if options.torch:
            code = "import sys, torch.distributed.checkpoint as dcp; dcp.FileSystemReader(sys.argv[1]).read_metadata()"
            ways["torch's read_metadata"] = [sys.executable, "-c", code, str(job)]
        nbytes = (job / ".metadata").stat().st_size
        runs = run_in_turns(ways, options.rounds)
    print(f"{options.ranks:,} files, {nbytes >> 20} MiB of .metadata, {options.rounds} rounds, {machine_text()}\n")
    print("| way | boxes | seconds | processor seconds | peak |\n|---|---|---|---|---|")
    boxes = f"{options.ranks * options.tensors:,}"
    for name, of_way in runs.items():
        seconds = statistics.median(ran.seconds for ran in of_way)
        processor_s = statistics.median(ran.processor_s for ran in of_way)
        print(f"| {name} | {boxes} | {seconds:.1f} | {processor_s:.1f} | {max(ran.peak for ran in of_way) >> 20} MiB |")


if __name__ == "__main__":
    main()
