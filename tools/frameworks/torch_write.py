"""Write what torch alone saves of a sharded model on a CPU: torchrun --nproc-per-node 2 torch_write.py OUT.

OUT/fsdp1 and OUT/fsdp1_local have one file of torch.save a rank, of FSDP1's SHARDED_STATE_DICT and LOCAL_STATE_DICT;
OUT/dcp_safetensors is a DCP with SerializationFormat.SAFETENSORS. OUT/*.safetensors are the models before sharding.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tiny_model import Block, TinyModel
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor


def main(out):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for name in ("fsdp1", "fsdp1_local"):
        Path(out, name).mkdir(parents=True, exist_ok=True)
    model = TinyModel()
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mixed = {"rows": torch.randn(7, 6), "columns": torch.randn(4, 5).bfloat16(), "count": torch.tensor(5)}
    if rank == 0:
        save_file(full, f"{out}/fsdp1.safetensors")
        save_file(mixed, f"{out}/dcp_safetensors.safetensors")
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=False
    )
    for name, kind in (
        ("fsdp1", StateDictType.SHARDED_STATE_DICT),
        ("fsdp1_local", StateDictType.LOCAL_STATE_DICT),
    ):
        with FullyShardedDataParallel.state_dict_type(sharded, kind):
            torch.save(sharded.state_dict(), f"{out}/{name}/rank{rank}.pt")
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "rows": distribute_tensor(mixed["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(mixed["columns"], mesh, [Shard(1)]),
        "count": mixed["count"],
    }
    writer = FileSystemWriter(f"{out}/dcp_safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
