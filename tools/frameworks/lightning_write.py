"""Write a checkpoint of Lightning on a CPU: torchrun --nproc-per-node 2 lightning_write.py OUT KIND [llama].

KIND is sharded or full, of ModelParallelStrategy, or fsdp1, of FSDPStrategy. OUT/last.ckpt is Lightning's;
OUT/expected.safetensors the model as torch gathers it. With fsdp1, OUT/full.ckpt is what Lightning's own
consolidate_checkpoint makes of it, and its model is the expected one. With llama, which is not for fsdp1, the model is
one of transformers: OUT/config.json is its config, and `logits` in OUT/expected.safetensors what it computes. Needs
lightning 2.6.
"""

import subprocess
import sys

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from safetensors.torch import save_file
from tiny_model import TinyModel, tiny_llama, tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Task(lightning.LightningModule):
    """Trains a model on the mesh that Lightning makes."""

    def __init__(self, model, is_fsdp1):
        super().__init__()
        self._is_fsdp1 = is_fsdp1
        self.save_hyperparameters({"lr": 0.1})
        self.model = model

    def configure_model(self):
        if not self._is_fsdp1:  # FSDPStrategy wraps the model itself
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TinyTask(Task):
    """Trains the tiny model, and has a buffer of its own."""

    def __init__(self, is_fsdp1):
        super().__init__(TinyModel(), is_fsdp1)
        self.register_buffer("seen", torch.ones(2))


class LlamaTask(Task):
    """Trains a model of transformers."""

    def __init__(self):
        super().__init__(tiny_llama(), is_fsdp1=False)

    def training_step(self, batch):
        return self.model(input_ids=batch, labels=batch).loss


class FSDPOnCpu(FSDPStrategy):
    """FSDPStrategy, which Lightning refuses on a CPU by its very class."""


def make_strategy(kind):
    if kind == "fsdp1":
        make = FullyShardedDataParallel.__init__  # Lightning gives it no device on a CPU
        FullyShardedDataParallel.__init__ = lambda self, *args, **options: make(
            self, *args, **{**options, "device_id": torch.device("cpu")}
        )
        return FSDPOnCpu(
            state_dict_type="sharded",
            process_group_backend="gloo",
        )
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=kind == "sharded",
        process_group_backend="gloo",
    )


def main(out, kind, is_llama):
    strategy = make_strategy(kind)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=2, enable_checkpointing=False, **quiet
    )
    task = LlamaTask() if is_llama else TinyTask(kind == "fsdp1")
    data = tokens().repeat(8, 1) if is_llama else torch.ones(8, 3)
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(f"{out}/last.ckpt")
    full = {} if kind == "fsdp1" else get_model_state_dict(task, options=StateDictOptions(full_state_dict=True))
    if is_llama:
        with torch.no_grad():
            full["logits"] = task.model.eval()(tokens()).logits
    if trainer.is_global_zero:
        if is_llama:
            task.model.config.save_pretrained(out)
        if kind == "fsdp1":
            tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", f"{out}/last.ckpt"]
            subprocess.run([*tool, "--output_file", f"{out}/full.ckpt"], check=True)
            full = torch.load(f"{out}/full.ckpt", weights_only=False)["state_dict"]
        save_file({name: tensor.contiguous() for name, tensor in full.items()}, f"{out}/expected.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:] == ["llama"])
