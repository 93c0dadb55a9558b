"""Time `statexchange diff A B` of two checkpoints without digests, compared with `cat A B > /dev/null`.

    python tools/bench/diff.py [--megabytes 1024] [--rounds 5] [--dirs /dev/shm]

A and B are plain safetensors files, so that no digest settles anything and all bytes are read. "equal" means that all
bytes agree, "one tensor differs" that B has other values in one of 16 tensors, "all differ" in all. All run in turns as
whole commands with their input in the page cache; medians. The megabytes are those of A alone.

The row of checkpoints of one element shows the start of `statexchange diff`: Python and the imports. It has no GB/s,
and no value in the two columns that compare the seconds and the processor seconds with those of cat.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from machine import machine_text
from safetensors.numpy import save_file
from timed_command import STATEXCHANGE, Ran, run

DIFF = [STATEXCHANGE, "diff"]
TENSORS, COLUMNS = 16, 1024
BYTES_AT_ONCE = 1 << 20  # small, as the peak of a command includes that of this process, which starts it
ROWS_AT_ONCE = BYTES_AT_ONCE // (4 * COLUMNS)
CAT, START = "cat A B", "diff, one element"


def make(path: Path, megabytes: int, dtype: str, seed: int) -> None:
    """Write normally distributed values as a Hugging Face directory of one file."""
    itemsize = {"F32": 4, "BF16": 2}[dtype]
    rows = megabytes * 2**20 // (itemsize * TENSORS * COLUMNS)
    nbytes = rows * COLUMNS * itemsize
    header = {
        f"layers.{n}.weight": {
            "dtype": dtype,
            "shape": [rows, COLUMNS],
            "data_offsets": [n * nbytes, (n + 1) * nbytes],
        }
        for n in range(TENSORS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.mkdir()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        rng = np.random.default_rng(seed)
        for begin in range(0, TENSORS * rows, ROWS_AT_ONCE):
            values = rng.standard_normal((min(ROWS_AT_ONCE, TENSORS * rows - begin), COLUMNS), np.float32)
            if dtype == "BF16":  # the upper half of a float32
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).data)
            else:
                file.write(values.data)


def make_start(path: Path) -> None:
    """Write a checkpoint of one element."""
    path.mkdir()
    save_file({"w": np.ones(1, np.float32)}, path / "model.safetensors")


def change_last_tensor(path: Path, megabytes: int) -> None:
    """Overwrite the values of the last tensor, which ends the file of float32."""
    nbytes = megabytes * 2**20 // TENSORS
    rng = np.random.default_rng(TENSORS)
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-nbytes, os.SEEK_END)
        for begin in range(0, nbytes, BYTES_AT_ONCE):
            file.write(rng.standard_normal(min(BYTES_AT_ONCE, nbytes - begin) // 4, np.float32).data)


def measure(directory: str, megabytes: int, rounds: int) -> None:
    """Print the rows of one directory."""
    megabytes -= megabytes % TENSORS
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        names = ("a", "equal", "one", "all", "a16", "all16", "start")
        a, equal, one, everywhere, a16, everywhere16, start = (Path(folder, name) for name in names)
        make(a, megabytes, "F32", 0)
        shutil.copytree(a, equal)
        shutil.copytree(a, one)
        change_last_tensor(one, megabytes)
        make(everywhere, megabytes, "F32", 100)
        make(a16, megabytes, "BF16", 200)
        make(everywhere16, megabytes, "BF16", 300)
        make_start(start)
        ways = {
            CAT: (["cat", f"{a}/model.safetensors", f"{equal}/model.safetensors"], 0),
            START: ([*DIFF, str(start), str(start)], 0),
            "diff, equal": ([*DIFF, str(a), str(equal)], 0),
            "diff, one tensor differs": ([*DIFF, str(a), str(one)], 1),
            "diff, all differ": ([*DIFF, str(a), str(everywhere)], 1),
            "diff, all differ, bfloat16": ([*DIFF, str(a16), str(everywhere16)], 1),
        }
        found: dict[str, list[Ran]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first warms up
            for way, (command, expected) in ways.items():
                measured = run(command, expected)
                if number:
                    found[way].append(measured)
    seconds = {way: statistics.median(ran.seconds for ran in runs) for way, runs in found.items()}
    processor_s = {way: statistics.median(ran.processor_s for ran in runs) for way, runs in found.items()}
    for way, runs in found.items():
        peak = "-" if way == CAT else f"{max(ran.peak for ran in runs) >> 20} MiB"
        rates = " |  |  |  | " if way == START else _rates(way, seconds, processor_s, megabytes)
        print(f"| {directory} | {way} | {seconds[way]:.2f} | {processor_s[way]:.2f}{rates}{peak} |", flush=True)


def _rates(way: str, seconds: dict[str, float], processor_s: dict[str, float], megabytes: int) -> str:
    """Return the cells of GB/s and of the speed relative to cat by seconds and processor seconds, without the start."""
    wall, used = seconds[way], processor_s[way]
    if way != CAT:
        wall, used = max(wall - seconds[START], 0.001), max(used - processor_s[START], 0.001)
    speed, processor_speed = seconds[CAT] / wall, processor_s[CAT] / used
    return f" | {2 * megabytes * 2**20 / wall / 1e9:.2f} | {speed:.2f}x | {processor_speed:.2f}x | "


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm"])
    options = parser.parse_args()
    print(f"{options.megabytes} MiB in each of A and B, {options.rounds} rounds, {machine_text()}\n")
    print("| where | way | seconds | processor seconds | GB/s | vs cat | vs cat, processor | peak |")
    print("|---|---|---|---|---|---|---|---|")
    for directory in options.dirs:
        measure(directory, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
