"""Write a small checkpoint with DeepSpeed on the CPU, and what DeepSpeed itself says is in it.

    export DS_ACCELERATOR=cpu DS_BUILD_OPS=0
    torchrun --nproc-per-node 2 tools/frameworks/deepspeed_write.py OUT KIND

KIND is zero0, zero1, zero1_fp32_gradients, zero2, zero3, pipeline, experts, or llama0 to llama3. ``OUT/KIND`` is the
checkpoint. ``OUT/KIND.safetensors`` has, by the names of parameters, ``master.`` the fp32 weights, ``exp_avg.`` the
optimizer's first moments and ``model.`` the weights of the training, all from the live engine; and ``oracle.`` what
DeepSpeed's zero_to_fp32 makes of the files, where it reads this kind. zero3 is converted to ``OUT/universal``, too, and
llama3 to ``OUT/universal_llama3``.

llama0 to llama3 train a model of transformers in float32 by ZeRO-0 to 3, and put its config into the checkpoint;
``OUT/KIND.safetensors`` has the model's tensors as the live engine gathers them, and ``logits``, what it computes.

Needs deepspeed and safetensors: ``pip install "statexchange[frameworks]"``. Run with two ranks or more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp())  # the common one may have an old lock

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from tiny_model import tiny_llama, tokens

LLAMAS = ("llama0", "llama1", "llama2", "llama3")
KINDS = ("zero0", "zero1", "zero1_fp32_gradients", "zero2", "zero3", "pipeline", "experts", *LLAMAS)
UNIVERSAL = {"zero3": "universal", "llama3": "universal_llama3"}  # what is converted, too
STEPS = 2


class Net(torch.nn.Module):
    """A model with tied, frozen and odd-sized parameters, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.down = torch.nn.Linear(5, 6, bias=False)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 0.25]))
        self.register_buffer("count", torch.tensor(3))
        self.norm.bias.requires_grad = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.norm(self.up(x)))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, -2).float(), tokens.flatten())


class Experts(torch.nn.Module):
    """A layer of experts between two linear layers."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.experts = MoE(4, torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4)), 4, ep_size=2, k=1)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y, loss, _ = self.experts(x)
        return self.last(x + y).square().mean() + 0.01 * loss


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 20},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **more,
    }


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups of parameters: with and without weight decay."""
    trained = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in trained if param.ndim > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]


def train_net(stage: int, **more: Any) -> Any:
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(stage, **more))
    for step in range(STEPS):
        tokens = (torch.arange(5) + dist.get_rank() + step).view(1, 5) % 11
        engine.backward(engine(tokens))
        engine.step()
    return engine


def train_pipeline() -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(torch.nn.Linear, 3, 3) for _ in range(4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    more = {"gradient_accumulation_steps": 2, "pipeline": {"activation_checkpoint_interval": 0}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(1, **more))
    batch = (torch.ones(1, 3).bfloat16(), torch.zeros(1, 3).bfloat16())
    for _ in range(STEPS):
        engine.train_batch(iter([batch, batch]))
    return engine


def train_experts() -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Experts()
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config(2))
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(4, 4).bfloat16()))
        engine.step()
    return engine


def train_llama(stage: int) -> Any:
    model = tiny_llama()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups(model), config=config(stage, bf16={"enabled": False})
    )
    for _ in range(STEPS):
        rows = (tokens() + dist.get_rank()) % 11
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
    return engine


def live_llama(engine: Any) -> dict[str, torch.Tensor]:
    """Return the engine's model and its logits. Collective."""
    engine.eval()
    with torch.no_grad():
        logits = engine(tokens()).logits
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
    return {**found, "logits": logits}


def live(engine: Any) -> dict[str, torch.Tensor]:
    """Return what the engine holds, by names with the prefixes of the module's docstring. Collective."""
    found = {}
    has_states = engine.zero_optimization_stage() > 0 and not engine.has_moe_layers
    for name, param in engine.module.named_parameters():
        if has_states and param.requires_grad:
            found[f"master.{name}"] = safe_get_full_fp32_param(param)
            # In ZeRO-1 and 2, DeepSpeed 0.19.8 does not find the states of the second group: parameters of one dim.
            if len(getattr(param, "ds_shape", param.shape)) > 1:
                found[f"exp_avg.{name}"] = safe_get_full_optimizer_state(param, "exp_avg")
        if not engine.zero_optimization_partition_weights():
            found[f"model.{name}"] = param.detach()
    if engine.has_moe_layers:  # each rank has experts 0 and 1 of its own
        first = 2 * dist.get_rank()
        for name in [name for name in found if "deepspeed_experts." in name]:
            head, _, tail = name.partition("deepspeed_experts.")
            number, _, rest = tail.partition(".")
            found[f"{head}deepspeed_experts.{first + int(number)}.{rest}"] = found.pop(name)
    return {name: tensor.clone().cpu() for name, tensor in found.items()}


def oracle(path: Path) -> dict[str, torch.Tensor]:
    """Return what zero_to_fp32 makes of a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(path))
    return {f"oracle.{name}": tensor.clone().contiguous() for name, tensor in state.items()}


def write(out: Path, kind: str) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it runs a compiler
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    if kind == "pipeline":
        engine = train_pipeline()
    elif kind == "experts":
        engine = train_experts()
    elif kind in LLAMAS:
        engine = train_llama(int(kind.removeprefix("llama")))
    elif kind == "zero1_fp32_gradients":  # another optimizer of DeepSpeed
        engine = train_net(1, data_types={"grad_accum_dtype": "fp32"})
    else:
        engine = train_net(int(kind.removeprefix("zero")))
    engine.save_checkpoint(str(out / kind), client_state={"epoch": 1})
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, live_llama(engine) if kind in LLAMAS else live(engine))
    if dist.get_rank() == 0:
        found = {name: tensor for part in reversed(parts) for name, tensor in part.items()}
        if kind in ("zero1", "zero2", "zero3"):
            found |= oracle(out / kind)
        if kind in LLAMAS:
            engine.module.config.save_pretrained(out / kind)
        save_file(found, out / f"{kind}.safetensors")
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (out / kind / script).unlink(missing_ok=True)
    dist.barrier()
    dist.destroy_process_group()
    if kind in UNIVERSAL and os.environ["RANK"] == "0":
        to_universal(out / kind, out / UNIVERSAL[kind])


def to_universal(source: Path, target: Path) -> None:
    step, universal = (path / f"global_step{STEPS}" for path in (source, target))
    shutil.rmtree(universal, ignore_errors=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(step), "--output_folder", str(universal)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if (source / "config.json").exists():
        shutil.copy(source / "config.json", target)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in KINDS:
        sys.exit(__doc__)
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write(Path(sys.argv[1]).resolve(), sys.argv[2])
