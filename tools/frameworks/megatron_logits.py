"""Write the logits of Megatron-Core's own model for a checkpoint of tools/frameworks/megatron_write.py, on a CPU.

    python tools/frameworks/megatron_logits.py OUT [--tied] [--bias] [--singleton] [--heads N]

loads OUT/torch_dist, whatever the number of ranks that wrote it, into one process in float32, and writes
OUT/logits.npy for the tokens 0 to 7, and OUT/config.json, the config of the same model in transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os

import megatron_write as written
import numpy as np
import torch
import torch.distributed as dist


def hf_config(options: argparse.Namespace) -> dict[str, object]:
    """Return the config of the model in transformers; the last rows of Megatron's embedding are padding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": written.HIDDEN,
        "intermediate_size": written.FFN,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": written.GROUPS,
        "vocab_size": written.VOCABULARY - 3,
        "rms_norm_eps": 1e-5,
        "attention_bias": options.bias,
        "mlp_bias": options.bias,
        "tie_word_embeddings": options.tied,
        "dtype": "float32",
    }


def main(options: argparse.Namespace) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    written.pretend_cuda()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel()
    options.tp = options.pp = options.ep = 1
    no_kernels = {"masked_softmax_fusion": False, "bias_activation_fusion": False}
    _, (model,) = written.build(options, torch.float32, hidden_dropout=0.0, attention_dropout=0.0, **no_kernels)
    model.eval()
    state = model.sharded_state_dict(metadata={"singleton_local_shards": options.singleton})
    path = options.out / "torch_dist" / written.STEP_DIRECTORY
    model.load_state_dict(dist_checkpointing.load(state, str(path)), strict=False)
    tokens = torch.arange(8).unsqueeze(0)
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, tokens, mask)
    np.save(options.out / "logits.npy", logits.float().numpy())
    (options.out / "config.json").write_text(json.dumps(hf_config(options), indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(written.parsed())
