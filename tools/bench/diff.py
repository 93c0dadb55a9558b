"""Time `statexchange diff A B` of two checkpoints without digests, compared with `cat A B > /dev/null`.

    python tools/bench/diff.py [--megabytes 1024] [--rounds 5] [--dirs /dev/shm]

A and B are plain safetensors files of float32, so that no digest settles anything and all bytes are read. "equal" means
that all bytes agree, "one tensor differs" that B has other values in one of 16 tensors. All run in turns as whole
commands, with the start of Python, with their input in the page cache; medians. The megabytes are those of A alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import machine_text

DIFF = [str(Path(sys.executable).parent / "statexchange"), "diff"]
TENSORS, COLUMNS = 16, 1024


def make(path: Path, megabytes: int) -> None:
    """Write normally distributed values as a Hugging Face directory of one file."""
    rows = megabytes * 2**20 // (4 * TENSORS * COLUMNS)
    nbytes = rows * COLUMNS * 4
    header = {
        f"layers.{n}.weight": {
            "dtype": "F32",
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
        for number in range(TENSORS):
            values = np.random.default_rng(number).standard_normal((rows, COLUMNS), np.float32)
            file.write(values.data)


def change_last_tensor(path: Path, megabytes: int) -> None:
    """Overwrite the values of the last tensor, which ends the file."""
    values = np.random.default_rng(TENSORS).standard_normal(megabytes * 2**20 // (4 * TENSORS), np.float32)
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-values.nbytes, os.SEEK_END)
        file.write(values.data)


def run(command: list[str], expected: int) -> tuple[float, float, int]:
    """Run a command; return its seconds, processor seconds and peak memory in bytes; raise if it ends otherwise."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, not {expected}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(directory: str, megabytes: int, rounds: int) -> None:
    """Print the rows of one directory."""
    megabytes -= megabytes % TENSORS
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        a, equal, other = (Path(folder, name) for name in ("a", "equal", "other"))
        make(a, megabytes)
        shutil.copytree(a, equal)
        shutil.copytree(a, other)
        change_last_tensor(other, megabytes)
        cat = ["cat", f"{a}/model.safetensors", f"{equal}/model.safetensors"]
        ways = {
            "cat A B": (cat, 0),
            "diff, equal": ([*DIFF, str(a), str(equal)], 0),
            "diff, one tensor differs": ([*DIFF, str(a), str(other)], 1),
        }
        found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first warms up
            for way, (command, expected) in ways.items():
                measured = run(command, expected)
                if number:
                    found[way].append(measured)
    median = {way: statistics.median(seconds for seconds, _, _ in runs) for way, runs in found.items()}
    for way, runs in found.items():
        processor_s = statistics.median(seconds for _, seconds, _ in runs)
        rate = f"{2 * megabytes * 2**20 / median[way] / 1e9:.2f}"
        ratio = f"{median['cat A B'] / median[way]:.2f}x"
        peak = "-" if "cat" in way else f"{max(peak for _, _, peak in runs) >> 20} MiB"
        print(
            f"| {directory} | {way} | {median[way]:.2f} | {processor_s:.2f} | {rate} | {ratio} | {peak} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm"])
    options = parser.parse_args()
    print(f"{options.megabytes} MiB in each of A and B, {options.rounds} rounds, {machine_text()}\n")
    print("| where | way | seconds | processor seconds | GB/s | vs cat | peak |\n|---|---|---|---|---|---|---|")
    for directory in options.dirs:
        measure(directory, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
