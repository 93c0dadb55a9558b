"""Write what accelerate's save_state writes on a CPU: torchrun --nproc-per-node N accelerate_write.py OUT KIND.

KIND is plain (data parallel, or one process), bin (the same without safetensors), several (two models), or sharded or
full (FSDP2). OUT/state is accelerate's, OUT/expected.safetensors the model as `get_state_dict` gathers it.
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from sharding_on_cpu import allow_sharding
from tiny_model import TinyModel, rows


def main(out, kind):
    plugin = None
    if kind in ("sharded", "full"):
        allow_sharding()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=f"{kind.upper()}_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(rows(8), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if kind == "several":
        accelerator.prepare(torch.nn.Linear(2, 2))
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{out}/state", safe_serialization=kind != "bin")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{out}/expected.safetensors")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
