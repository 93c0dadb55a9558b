"""Time copies between GPU and host through two pinned buffers, compared with torch's `copy_` of the whole tensor.

    python tools/bench/gpu.py [--megabytes 1024] [--rounds 5] [--dir /dev/shm]

`copy_` works on pinned memory of the tensor's size, which was made before. Then export and load of one tensor are
timed, and those of the same tensor in that memory. All ways run warm and interleaved; medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import statexchange as sx
from statexchange.exchange.staging import Staging


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(3, "no GPU: torch.cuda.is_available() is False\n")
    tensor = torch.randn(options.megabytes * 2**18, device="cuda").view(1024, -1)
    pinned = torch.empty(tensor.shape, pin_memory=True)
    staging = Staging()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        out = f"{folder}/out"

        def export(given: torch.Tensor) -> None:
            shutil.rmtree(out, ignore_errors=True)
            sx.export_checkpoint({"w": given}, out)

        ways: dict[str, Callable[[], object]] = {
            "out, copy_ to pinned memory": lambda: pinned.copy_(tensor),
            "out, two buffers": lambda: [None for _ in staging.parts(tensor, "F32")],
            "in, copy_ from pinned memory": lambda: tensor.copy_(pinned),
            "in, two buffers": lambda: [None for _ in staging.targets(tensor, "F32")],
            "export": lambda: export(tensor),
            "load": lambda: sx.load_checkpoint({"w": tensor}, out),
            "export from the host": lambda: export(pinned),
            "load to the host": lambda: sx.load_checkpoint({"w": pinned}, out),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):  # the first warms up
            for way, run in ways.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                run()
                torch.cuda.synchronize()
                if number:
                    seconds[way].append(time.perf_counter() - began)
    print(f"{options.megabytes} MiB, {torch.cuda.get_device_name()}, {options.rounds} rounds")
    print("| way | seconds | GB/s |")
    print("|---|---|---|")
    for way, taken in seconds.items():
        median = statistics.median(taken)
        print(f"| {way} | {median:.3f} | {tensor.nbytes / median / 1e9:.1f} |")


if __name__ == "__main__":
    main()
