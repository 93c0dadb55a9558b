"""A small Llama-style byte model for the demo: the model, its data and its parallel form.

The parameter names are those of transformers' LlamaForCausalLM, so other tools load the exported checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_SEED = 20
_SEQUENCES, _LENGTH = 4, 128
_PEAK_LR, _WARMUP_STEPS = 5e-3, 10
DATA_PARALLEL = 2  # parts of the sequences of a step


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model, named as in transformers' LlamaConfig.

    Half of `intermediate_size` is odd: on a 2 x 2 mesh the shards differ in size.
    """

    vocab_size: int = 256
    hidden_size: int = 160
    intermediate_size: int = 514
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads


def write_config(directory: str) -> None:
    """Write the config.json with which transformers builds the same model. Not collective."""
    sizes = asdict(LlamaConfig())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")},
        **sizes,
    }
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _rotary(config: LlamaConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary embeddings, of shape (length, head_dim). Source: arXiv:2104.09864."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(length), config.rope_theta**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, config.hidden_size)
        self.k_proj = _linear(config.hidden_size, keys)
        self.v_proj = _linear(config.hidden_size, keys)
        self.o_proj = _linear(config.hidden_size, config.hidden_size)

    def _heads(self, projected: Tensor) -> Tensor:
        # -1: under tensor parallelism this rank has only some of the heads.
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotate(self._heads(self.q_proj(x)), cos, sin)
        k = _rotate(self._heads(self.k_proj(x)), cos, sin).repeat_interleave(self.queries_per_key, dim=1)
        v = self._heads(self.v_proj(x)).repeat_interleave(self.queries_per_key, dim=1)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = _rotary(self.config, tokens.shape[1])
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A Llama-style decoder: (batch, length) tokens to (batch, length, vocab_size) logits. Not collective.

    Equal seeds of torch's default generator give equal parameters.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = _Decoder(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows each token."""
        # A copy: FSDP2 warns if the root module returns a view, and the local tensor of a gathered DTensor is a view.
        return self.lm_head(self.model(tokens)).clone()  # type: ignore[no-any-return]


def mesh_shape(world_size: int) -> tuple[int, int]:
    """Return the (data parallel, tensor parallel) ranks of a job. Not collective."""
    tensor_parallel = 2 if world_size % 2 == 0 else 1
    return world_size // tensor_parallel, tensor_parallel


def shard_model(config: LlamaConfig, mesh: DeviceMesh) -> Llama:
    """Return the model, sharded on a ("dp", "tp") mesh: tensor parallel within "tp", FSDP2 over "dp".

    Collective over `mesh`: blocks until all its ranks have called.
    """
    torch.manual_seed(_SEED)
    model = Llama(config)
    parallelize_module(model, mesh["tp"], _tensor_parallel_plan())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"])
    return model


def _tensor_parallel_plan() -> dict[str, ParallelStyle]:
    # Tuples, not sets: the order of the plan is that of its collectives, and a set's order differs between processes.
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    layer = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def byte_tokens(text: bytes) -> Tensor:
    """Return the bytes of `text` as a vector of int64 tokens. Not collective."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def corpus_tokens() -> Tensor:
    """Return the training data of the demo: the English text of `pydoc_data`, as tokens. Not collective."""
    return byte_tokens("\n".join(topics.values()).encode())


def batch(corpus: Tensor, step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that depend on `step` and `dp_rank` only: equal for tensor parallel peers.

    Not collective.
    """
    generator = torch.Generator().manual_seed(1_000 * step + dp_rank)
    # Shape (_SEQUENCES, 1): added to the offsets in a sequence, these give an index for each token.
    starts = torch.randint(len(corpus) - _LENGTH, (_SEQUENCES, 1), generator=generator)
    window = corpus[starts + torch.arange(_LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: a short warm-up, then half a cosine down to a tenth. Not collective."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return _PEAK_LR * warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def generate(model: Llama, prompt: bytes, count: int, temperature: float = 0.5) -> str:
    """Return `count` bytes that the model generates after `prompt`, as printable text. Not collective.

    Equal weights give equal text: the sampling is seeded.
    """
    generator = torch.Generator().manual_seed(_SEED)
    tokens = byte_tokens(prompt)[None]
    for _ in range(count):
        probabilities = (model(tokens)[:, -1] / temperature).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
    text = bytes(tokens[0, len(prompt) :].tolist()).decode("utf-8", "replace")
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)
