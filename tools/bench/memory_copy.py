"""Time a restart from the copy in memory, compared with a copy of the same rows from memory to memory.

    python tools/bench/memory_copy.py [--ranks 2] [--megabytes 1024] [--dirs /tmp] [--rounds 5]

Each rank holds its rows of 16 tensors. Ways: `load` of a save with `memory=True`, whose copy lies in shared memory;
`load` of the same save from disk, in the page cache; a copy of the rows from memory to memory; a save to disk, and one
with the copy in memory as well. All run warm and interleaved in one job; medians and their ratios. The peak is what a
way adds to the resident set of each rank (VmHWM, reset before each run).
"""

from __future__ import annotations

from collections.abc import Callable

from machine import machine_text
from ranks import in_turns, measure, peaks, slowest

MEMCPY = "memcpy of the rows, all ranks"
TENSORS = 16


def rank_main(megabytes: int, folder: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return seconds and added bytes of every round of every way, on this rank."""
    import torch
    import torch.distributed as dist

    import statexchange as sx

    rows = megabytes * 2**20 // (4 * 1024 * TENSORS * dist.get_world_size())
    state = {f"w{number}": torch.rand(rows, 1024) for number in range(TENSORS)}
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    layout = {"*": {"dim": 0}}
    memory = sx.Checkpoints(f"{folder}/memory", 1, memory=True, layout=layout)
    disk = sx.Checkpoints(f"{folder}/disk", 1, layout=layout)

    def memcpy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    ways: dict[str, Callable[[], object]] = {
        "save": lambda: disk.save(state, 1, overwrite=True),
        "save, memory=True": lambda: memory.save(state, 1, overwrite=True),
        "load from disk": lambda: disk.load(copies),
        "load from memory": lambda: memory.load(copies),
        MEMCPY: memcpy,
    }
    found = in_turns(ways, rounds)
    memory.delete(1)
    return found


def main() -> None:
    options, measured = measure(rank_main)
    print(f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | way | seconds | GB/s | beside memcpy | peaks add, MiB |")
    print("|---|---|---|---|---|---|")
    for place, ranks in measured.items():
        seconds = {way: slowest(rank[way] for rank in ranks) for way in ranks[0]}
        for way, taken in seconds.items():
            speed = f"{options.megabytes * 2**20 / taken / 1e9:.2f}"
            print(
                f"| {place} | {way} | {taken:.3f} | {speed} | {seconds[MEMCPY] / taken:.2f}x | "
                f"{peaks(rank[way] for rank in ranks)} |"
            )


if __name__ == "__main__":
    main()
