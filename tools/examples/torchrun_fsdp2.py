"""Train a model sharded by FSDP2, then export one Hugging Face style checkpoint.

    torchrun --nproc-per-node 4 tools/examples/torchrun_fsdp2.py OUT

sx.init is not called: statexchange uses the default group of torch.distributed.
"""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import statexchange as sx

TEXT = torch.tensor(list(sys.copyright.encode() * 40))


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 30), nn.Flatten(), nn.Linear(8 * 30, 101), nn.ReLU(), nn.Linear(101, 256))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        at = (torch.arange(64) * 7 + step * 64 + dist.get_rank()) % (len(TEXT) - 9)
        context = torch.stack([TEXT[i : i + 8] for i in at])
        loss = nn.functional.cross_entropy(model(context), TEXT[at + 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, 59):
            print(f"step {step}: loss {loss.item():.2f}")

    report = sx.export_checkpoint(model, out)

    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        merged = load_file(f"{out}/model.safetensors")
        equal = sum(torch.equal(merged[name], tensor) for name, tensor in whole.items())
        print(f"{equal} of {len(whole)} tensors bit-equal; ranks supplied {report.rank_nbytes} bytes")
    dist.barrier()  # torch sometimes aborts if one rank exits while Gloo of another still sends to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
