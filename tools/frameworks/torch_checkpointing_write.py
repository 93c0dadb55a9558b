"""Write a checkpoint of Meta's torch_checkpointing.

    torchrun --nproc-per-node 2 torch_checkpointing_write.py OUT [KIND]

OUT/state is the library's; OUT/expected.safetensors the tensors before sharding. KIND llama is a model of transformers,
sharded by FSDP2: OUT/config.json is its config, and `logits` of OUT/expected.safetensors what it computes.
Needs torch_checkpointing 0.1.1, which sends metadata through CUDA tensors (of the CPU here) and writes with O_DIRECT:
OUT must be on tmpfs.
"""

import sys

import torch
from safetensors.torch import save_file
from tiny_model import tiny_llama, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where CUDA is asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        options = kwargs or {}
        if str(options.get("device")).startswith("cuda"):
            options = {**options, "device": "cpu"}
        return function(*args, **options)


def sharded_tensors(mesh):
    """Return tensors before sharding, and sharded."""
    full = {
        "rows": torch.arange(42.0).reshape(7, 6),
        "columns": torch.arange(20.0).reshape(4, 5).bfloat16(),
        "plain": torch.ones(3),
    }
    state = {
        "rows": distribute_tensor(full["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(full["columns"], mesh, [Shard(1)]),
        "plain": full["plain"],
    }
    return full, state


def sharded_llama(mesh, out):
    """Return the tensors of a model of transformers before sharding with its logits, and sharded."""
    model = tiny_llama()
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.config.save_pretrained(out)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        full["logits"] = model.eval()(tokens()).logits
    return full, model.state_dict()


def main(out, kind="tensors"):
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    full, state = sharded_llama(mesh, out) if kind == "llama" else sharded_tensors(mesh)
    OnCpu().__enter__()
    items = {"model": ItemSpec(resharder=DefaultResharder())}
    manager = CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig()).build()
    manager.save(f"{out}/state", {"model": state, "step": 7, "config": {"lr": 0.1}})
    manager.close()
    if torch.distributed.get_rank() == 0:
        save_file(full, f"{out}/expected.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
