"""Time `statexchange scan` of many small checkpoints, compared with `find DIR -type f | wc -l`.

    python tools/bench/scan.py [--directories 10000] [--rounds 5] [--dir /dev/shm]

Each directory has a Hugging Face checkpoint of a few kilobytes: every other one has one tensor file and a config.json,
the rest two tensor files, their index and a config.json. Both ways run in turns as whole commands, with their input in
the page cache; medians. The processor seconds are those of the command and all that it starts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import tempfile
from pathlib import Path

from machine import machine_text
from timed_command import STATEXCHANGE, Ran, run

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8})


def tensor_file(names: list[str]) -> bytes:
    """Return a safetensors file of float32 matrices of 8 x 8."""
    nbytes = 8 * 8 * 4
    header = {
        name: {"dtype": "F32", "shape": [8, 8], "data_offsets": [n * nbytes, (n + 1) * nbytes]}
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(range(1, 65)) * (len(names) * nbytes // 64)


def make(folder: Path, directories: int) -> None:
    """Write one checkpoint a directory, in groups of 100."""
    names = [f"model.layers.{n}.mlp.weight" for n in range(8)]
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    whole, first, second = tensor_file(names), tensor_file(names[:4]), tensor_file(names[4:])
    weight_map = {name: files[n // 4] for n, name in enumerate(names)}
    index = json.dumps({"metadata": {"total_size": 8 * 256}, "weight_map": weight_map})
    for number in range(directories):
        path = folder / f"group-{number // 100:04d}" / f"checkpoint-{number:06d}"
        path.mkdir(parents=True)
        (path / "config.json").write_text(CONFIG, encoding="ascii")
        if number % 2:
            (path / "model.safetensors").write_bytes(whole)
        else:
            (path / files[0]).write_bytes(first)
            (path / files[1]).write_bytes(second)
            (path / "model.safetensors.index.json").write_text(index, encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directories", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        make(Path(folder), options.directories)
        ways = {
            "statexchange scan": [STATEXCHANGE, "scan", folder],
            "find -type f, wc -l": ["sh", "-c", f"find {shlex.quote(folder)} -type f | wc -l"],
        }
        found: dict[str, list[Ran]] = {way: [] for way in ways}
        texts: dict[str, str] = {}
        for number in range(options.rounds + 1):  # the first warms up
            for way, command in ways.items():
                with tempfile.TemporaryFile() as out:
                    ran = run(command, stdout=out)
                    out.seek(0)
                    texts[way] = out.read().decode()
                if number:
                    found[way].append(ran)
        num_rows = len(texts["statexchange scan"].splitlines()) - 1  # without the header
        if num_rows != options.directories:
            raise RuntimeError(f"scan found {num_rows} checkpoints of {options.directories}")
        num_files = int(texts["find -type f, wc -l"])
    print(f"{options.directories:,} directories, {num_files:,} files, {options.rounds} rounds, {machine_text()}\n")
    print("| way | seconds | processor seconds | directories/s | peak |\n|---|---|---|---|---|")
    for way, runs in found.items():
        seconds = statistics.median(ran.seconds for ran in runs)
        processor_s = statistics.median(ran.processor_s for ran in runs)
        peak = f"{max(ran.peak for ran in runs) >> 20} MiB" if "scan" in way else "-"
        rate = f"{options.directories / seconds:,.0f}"
        print(f"| {way} | {seconds:.2f} | {processor_s:.2f} | {rate} | {peak} |")


if __name__ == "__main__":
    main()
