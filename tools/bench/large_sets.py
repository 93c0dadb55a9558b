"""Measure the processor seconds of commands on checkpoints of very many small tensors.

    python tools/bench/large_sets.py [--names 500000] [--tensors 100000] [--rounds 3] [--dir /dev/shm]

`info` and `scan` look at the first checkpoint, by default 500,000 tensors in 50 files with an index; `ls`, `verify` and
`diff` at the second, by default 100,000 tensors in 10 files without one, and `diff` compares it with an equal copy. A
tensor is a bfloat16 matrix of 4 x 4. `json.load` is of the index alone, in a process of its own. All run in turns as
whole commands with their input in the page cache; medians of the processor seconds of a command and all that it starts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from machine import machine_text
from timed_command import STATEXCHANGE, in_child, run_in_turns

TENSORS_PER_FILE = 10_000
NBYTES = 4 * 4 * 2
INDEX = "model.safetensors.index.json"


def make(folder: Path, num_tensors: int, with_index: bool) -> None:
    """Write a Hugging Face checkpoint of experts, 10,000 tensors a file."""
    folder.mkdir()
    num_files = -(-num_tensors // TENSORS_PER_FILE)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        header = {}
        begin = 0
        for expert in range(min(TENSORS_PER_FILE, num_tensors - number * TENSORS_PER_FILE)):
            name = f"model.layers.{number}.mlp.experts.{expert}.w"
            header[name] = {"dtype": "BF16", "shape": [4, 4], "data_offsets": [begin, begin + NBYTES]}
            weight_map[name] = file
            begin += NBYTES
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = bytes(range(1, NBYTES + 1)) * (begin // NBYTES)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    if with_index:
        index = {"metadata": {"total_size": num_tensors * NBYTES}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index), encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=int, default=500_000)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        many, few, copy = (Path(folder, name) for name in ("many", "few", "copy"))
        in_child(make, many, options.names, True)
        in_child(make, few, options.tensors, False)
        shutil.copytree(few, copy)
        index = str(many / INDEX)
        ways: dict[tuple[str, int], list[str]] = {
            ("json.load of the index", options.names): [
                sys.executable,
                "-c",
                "import json, sys; json.load(open(sys.argv[1]))",
                index,
            ],
            ("info of the index", options.names): [STATEXCHANGE, "info", index],
            ("scan", options.names): [STATEXCHANGE, "scan", str(many)],
            ("ls", options.tensors): [STATEXCHANGE, "ls", str(few)],
            ("verify", options.tensors): [STATEXCHANGE, "verify", str(few)],
            ("diff, equal", options.tensors): [STATEXCHANGE, "diff", str(few), str(copy)],
        }
        runs = run_in_turns(ways, options.rounds)
    print(f"{options.rounds} rounds, {machine_text()}\n")
    print("| way | tensors | processor seconds | a tensor | peak |\n|---|---|---|---|---|")
    for (name, num_tensors), of_way in runs.items():
        processor_s = statistics.median(ran.processor_s for ran in of_way)
        peak = max(ran.peak for ran in of_way) >> 20
        print(
            f"| {name} | {num_tensors:,} | {processor_s:.2f} | {1e6 * processor_s / num_tensors:.1f} us | {peak} MiB |"
        )


if __name__ == "__main__":
    main()
