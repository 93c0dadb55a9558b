"""Time the start of commands: whole commands on little work, compared with `python -c pass`.

    python tools/bench/startup.py [--rounds 30] [--dir /dev/shm]

The merge reads and writes 10 MB. All ways run in turns, with bytecode; medians. All but the first are less what
`python -c pass` takes; processor seconds say more where other programs run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile

import numpy as np
from machine import machine_text
from safetensors.numpy import save_file
from timed_command import run_in_turns

COMMAND = [sys.executable, "-m", "statexchange"]
PASS = "python -c pass"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the round that warms up writes the bytecode
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        source = os.path.join(folder, "source")
        os.mkdir(source)
        state = {f"layers.{n}.weight": np.full((500, 500), n, np.float32) for n in range(10)}
        save_file(state, os.path.join(source, "model.safetensors"))
        ways = {
            PASS: [sys.executable, "-c", "pass"],
            "import numpy": [sys.executable, "-c", "import numpy"],
            "statexchange --help": [*COMMAND, "--help"],
            "statexchange info": [*COMMAND, "info", source],
            "statexchange merge of 10 MB": [*COMMAND, "merge", source, os.path.join(folder, "out"), "--overwrite"],
        }
        runs = run_in_turns(ways, options.rounds)
    print(f"{options.rounds} rounds, {machine_text()}\n")
    print("| way | seconds | processor seconds |\n|---|---|---|")
    wall = {way: statistics.median(ran.seconds for ran in those) for way, those in runs.items()}
    processor = {way: statistics.median(ran.processor_s for ran in those) for way, those in runs.items()}
    print(f"| {PASS} | {wall[PASS]:.3f} | {processor[PASS]:.3f} |")
    for way in list(ways)[1:]:
        print(f"| {way} | +{wall[way] - wall[PASS]:.3f} | +{processor[way] - processor[PASS]:.3f} |")


if __name__ == "__main__":
    main()
