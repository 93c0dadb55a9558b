"""Write a checkpoint with torchtitan's own CheckpointManager, and what its `to_hf` makes of it. CPU and Gloo will do.

torchrun --nproc-per-node 2 tools/frameworks/torchtitan_write.py OUT [separate] [tied] [model]

OUT/checkpoint/step-3 is the checkpoint: the whole state of a job, or with "model" the model alone.
OUT/to_hf.safetensors has the tensors and OUT/config.json the config of the same model in transformers.

pip install torch==2.13.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 tyro wandb safetensors datasets torchdata
pip install --no-deps torchtitan==0.3.0
"""

# ruff: noqa: E402 (a stub comes before the imports)
from __future__ import annotations

import json
import os
import sys
from unittest import mock

# torchtitan imports triton for kernels that a CPU never runs.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    Llama3StateDictAdapter,
    _build_llama3_layers,
    _output_linear_init,
)

DIM, HEADS, KV_HEADS, HIDDEN, VOCAB, LAYERS, THETA = 16, 4, 2, 24, 20, 2, 10000.0
STEP = 3


class TrainState:
    """The state of a trainer of torchtitan beside model and optimizer."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(STEP, dtype=torch.int32), "ntokens_seen": torch.tensor(99)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Do nothing: this job is never resumed."""


def model_config(flags: set[str]) -> Llama3Model.Config:
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=128, theta=THETA, scaling="none")
    layers = _build_llama3_layers(
        fuse_qkv="separate" not in flags,
        n_layers=LAYERS,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        hidden_dim=HIDDEN,
        rope=rope,
        attn_backend="flex",
    )
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        enable_weight_tying="tied" in flags,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=_output_linear_init(DIM)),
        layers=layers,
    )


def hf_config(flags: set[str]) -> dict[str, object]:
    """Return the config.json of the same model in transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": "tied" in flags,
        "dtype": "float32",
    }


def main(out: str, flags: set[str]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = model_config(flags)
    model = config.build()
    model.init_states() if hasattr(model, "init_states") else model.init_weights()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = default_adamw(lr=1e-2).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    for _ in range(STEP):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
    adapter = Llama3StateDictAdapter(config, None)
    manager = CheckpointManager.Config(
        enable=True,
        folder="checkpoint",
        interval=STEP,
        last_save_model_only="model" in flags,
        last_save_in_hf=False,
        export_dtype="float32",
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": TrainState()},
        sd_adapter=adapter,
        base_folder=out,
    )
    manager.save(curr_step=STEP, last_step="model" in flags)
    manager.close()
    whole = {}
    for name, tensor in model.state_dict().items():  # a collective: its hooks gather the fused weights
        whole[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
    converted = adapter.to_hf(whole)
    if dist.get_rank() == 0:
        save_file({name: t.contiguous() for name, t in converted.items()}, os.path.join(out, "to_hf.safetensors"))
        with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
            json.dump(hf_config(flags), file, indent=2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
