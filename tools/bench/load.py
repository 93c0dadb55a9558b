"""Time loading a Hugging Face checkpoint into a model sharded by FSDP2, compared with other ways.

    python tools/bench/load.py [--ranks 2] [--megabytes 1024] [--dirs /dev/shm] [--rounds 5]

The other ways: `cat` to /dev/null of each rank's rows, by all ranks at once; a copy of them from memory to memory,
which is the least that any load does; `dcp.load` of torch's own checkpoint of these shards; transformers'
`from_pretrained` on the first rank and a broadcast of its state dict into the sharded model. The sharded model is made
before the timing; all ways run warm and interleaved in one job, with the files in the page cache; medians and their
ratios. The peak is what a way adds to the resident set of each rank (VmHWM, reset before each run).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from machine import machine_text
from ranks import in_turns, measure, peaks, slowest

CAT, DCP, BROADCAST = "cat to /dev/null, all ranks", "dcp.load", "from_pretrained + broadcast"


def rank_main(megabytes: int, folder: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return seconds and added bytes of every round of every way, on this rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import statexchange as sx

    width = 1024
    layers = max(1, megabytes * 2**20 // (4 * width * width * 4 * 4))
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=256,
        tie_word_embeddings=False,
    )
    rank = dist.get_rank()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    for block in model.model.layers:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter.to_local())
    sx.export_checkpoint(model, f"{folder}/whole", files_from=None)
    if rank == 0:
        config.save_pretrained(f"{folder}/whole")
    state = model.state_dict()
    dcp.state_dict_saver.save(state, checkpoint_id=f"{folder}/dcp")
    with open(f"{folder}/rows-{rank}", "wb") as file:
        for parameter in parameters:
            file.write(parameter.to_local().detach().contiguous().view(torch.uint8).numpy().data)

    shards = [parameter.to_local().detach() for parameter in parameters]
    copies = [torch.zeros_like(shard) for shard in shards]

    def memcpy() -> None:
        for copy, shard in zip(copies, shards, strict=True):
            copy.copy_(shard)

    def cat() -> None:
        subprocess.run(["cat", f"{folder}/rows-{rank}"], stdout=subprocess.DEVNULL, check=True)

    def broadcast() -> None:
        full = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/whole").state_dict() if rank == 0 else {}
        set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    ways: dict[str, Callable[[], object]] = {
        "load": lambda: sx.load_checkpoint(model, f"{folder}/whole"),
        "load, of torch's DCP": lambda: sx.load_checkpoint(model, f"{folder}/dcp"),
        CAT: cat,
        "memcpy of the rows, all ranks": memcpy,
        DCP: lambda: dcp.state_dict_loader.load(state, checkpoint_id=f"{folder}/dcp"),
        BROADCAST: broadcast,
    }
    return in_turns(ways, rounds)


def main() -> None:
    options, measured = measure(rank_main)
    rows = []
    for place, ranks in measured.items():
        seconds = {way: slowest(rank[way] for rank in ranks) for way in ranks[0]}
        for way, taken in seconds.items():
            ratios = [f"{seconds[peer] / taken:.2f}x" for peer in (CAT, DCP, BROADCAST)]
            rows.append(
                [
                    place,
                    way,
                    f"{taken:.2f}",
                    f"{options.megabytes * 2**20 / taken / 1e9:.2f}",
                    *ratios,
                    peaks(rank[way] for rank in ranks),
                ]
            )
    print(f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | way | seconds | GB/s | vs cat | vs dcp.load | vs from_pretrained | peaks add, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
