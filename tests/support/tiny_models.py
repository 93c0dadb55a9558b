"""Models of transformers that are built in a moment, and what files keep of their tied weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

State = dict[str, torch.Tensor]

TINY = {
    "vocab_size": 30,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
OF_PAGES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4}
"""The sizes of the models that scripts of the how-to pages train."""


def llama(*, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=tied))


def tied_llama() -> Any:
    return llama(tied=True)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4)).to(torch.bfloat16)


def clip() -> Any:
    """Return a model with position_ids in its state dict, as older transformers, and with a bool mask, as GPT-2."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 30, "max_position_embeddings": 7, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**tower, "image_size": 8, "patch_size": 4}, projection_dim=6)
    model = CLIPModel(config)
    model.text_model.embeddings.register_buffer("position_ids", torch.arange(7)[None])
    model.text_model.register_buffer("causal", torch.ones(7, 7, dtype=torch.bool).tril())
    return model


def llama_of_pages(num_hidden_layers: int = 2) -> Any:
    """Return a model of the sizes that scripts of the how-to pages train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**OF_PAGES, num_hidden_layers=num_hidden_layers))


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "tied": tied_llama, "mixtral": mixtral, "clip": clip}


def build(name: str, seed: int = 1) -> Any:
    """Return a model of `MODELS` whose weights a seed decides."""
    torch.manual_seed(seed)
    return MODELS[name]()


def untied(state: Any) -> State:
    """Keep the first of tensors that share memory, as files do."""
    first: dict[Any, str] = {}
    return {n: t for n, t in state.items() if first.setdefault((t.data_ptr(), t.shape), n) == n}
