"""The built-in conversions, in the form of a user's own file (`rules`)."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BUILTIN"]

# The first key is that of transformers' config.json, the second that of Megatron's arguments.
_HEADS: dict[str, object] = {
    "n_heads": {"about": "attention heads", "config": ["num_attention_heads"]},
    "n_kv_heads": {"about": "heads of keys and values", "config": ["num_key_value_heads", "num_query_groups"]},
    "head_dim": {"about": "size of a head", "config": ["head_dim", "kv_channels"]},
}
_TIED: dict[str, object] = {
    "tie_word_embeddings": {"about": "1 if lm_head is the embedding", "config": ["tie_word_embeddings"]},
}


def _renamed(names: Mapping[str, str]) -> list[dict[str, object]]:
    """Return rules that only rename."""
    return [{"from": old, "to": new} for old, new in names.items()]


# torchtitan rotates neighbouring rows of queries and keys, transformers the two halves of a head.
_LAYER, _HF_LAYER = "layers.{layer}", "model.layers.{layer}"
_HF_QKV = [f"{_HF_LAYER}.self_attn.{part}_proj" for part in "qkv"]


def _rotary(heads: str, **of: int) -> dict[str, object]:
    return {"permute": {"dim": 0, "shape": [heads, "half", 2], "order": [0, 2, 1], **of}}


def _torchtitan_attention(prefix: str) -> list[dict[str, object]]:
    """Return the rules for separate queries, keys and values below `prefix`."""
    rules: list[dict[str, object]] = []
    for part, new, values in zip("qkv", _HF_QKV, ([_rotary("n_heads")], [_rotary("n_kv_heads")], []), strict=True):
        rules.append({"from": f"{prefix}.w{part}.weight", "to": f"{new}.weight", "values": values})
    return rules


_TORCHTITAN_LLAMA3: dict[str, object] = {
    "about": "torchtitan's Llama 3 to LlamaForCausalLM of transformers",
    "numbers": {**_HEADS, "half": {"value": "head_dim / 2"}, **_TIED},
    "rules": [
        *_renamed(
            {
                "tok_embeddings.weight": "model.embed_tokens.weight",
                f"{_LAYER}.attention.wo.weight": f"{_HF_LAYER}.self_attn.o_proj.weight",
                f"{_LAYER}.feed_forward.w1.weight": f"{_HF_LAYER}.mlp.gate_proj.weight",
                f"{_LAYER}.feed_forward.w2.weight": f"{_HF_LAYER}.mlp.down_proj.weight",
                f"{_LAYER}.feed_forward.w3.weight": f"{_HF_LAYER}.mlp.up_proj.weight",
                f"{_LAYER}.attention_norm.weight": f"{_HF_LAYER}.input_layernorm.weight",
                f"{_LAYER}.ffn_norm.weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
                "norm.weight": "model.norm.weight",
            }
        ),
        *_torchtitan_attention(f"{_LAYER}.attention.qkv_linear"),
        {
            "from": f"{_LAYER}.attention.qkv_linear.wqkv.weight",
            "to": [f"{name}.weight" for name in _HF_QKV],
            "values": [
                {"split": {"dim": 0, "sizes": ["n_heads / n_kv_heads", 1, 1], "groups": "n_kv_heads"}},
                _rotary("n_heads", of=0),
                _rotary("n_kv_heads", of=1),
            ],
        },
        {"from": "lm_head.weight", "to": "lm_head.weight", "tied_to": "tok_embeddings.weight"},
        # Names up to torchtitan 0.2; and freqs_cis, which is computed from the config, and dropped.
        *_torchtitan_attention(f"{_LAYER}.attention"),
        {"from": "output.weight", "to": "lm_head.weight", "tied_to": "tok_embeddings.weight"},
        {"from": "freqs_cis", "to": []},
    ],
}

# Megatron-Core fuses queries, keys and values by group of heads, and gate and up one after the other. torch_dist stacks
# the layers, unless it was saved with singleton_local_shards; the older format has a name for each layer.
_SPLIT_QKV = {"split": {"dim": 0, "sizes": ["n_heads / n_kv_heads", 1, 1], "groups": "n_kv_heads"}}
# An MLP has a gate if its fc1 has twice as many rows as its fc2 has columns.
_GATED = {"permute": {"dim": 0, "shape": [2, "ffn"], "order": [0, 1]}}
_FC2 = {"permute": {"dim": 1, "shape": ["ffn"], "order": [0]}}
_MLP = [f"{_HF_LAYER}.mlp.gate_proj", f"{_HF_LAYER}.mlp.up_proj"]
_UNPAD = {"unpad": {"dim": 0, "to": "vocab_size", "from": "padded_vocab_size"}}


def _megatron_layer() -> list[dict[str, object]]:
    """Return the rules for the tensors of one layer, by their names after ``decoder.layers.{layer}.``."""
    rules = _renamed(
        {
            # Transformer Engine's layers have the norm in the linear that follows; the local ones beside it.
            "self_attention.linear_qkv.layer_norm_weight": f"{_HF_LAYER}.input_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
            "input_layernorm.weight": f"{_HF_LAYER}.input_layernorm.weight",
            "pre_mlp_layernorm.weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
            "mlp.linear_fc2.bias": f"{_HF_LAYER}.mlp.down_proj.bias",
        }
    )
    rules.append({"from": "mlp.linear_fc2.weight", "to": f"{_HF_LAYER}.mlp.down_proj.weight", "values": [_FC2]})
    for kind in ("weight", "bias"):
        targets = [f"{name}.{kind}" for name in _HF_QKV]
        rules.append({"from": f"self_attention.linear_qkv.{kind}", "to": targets, "values": [_SPLIT_QKV]})
        rules.append({"from": f"self_attention.linear_proj.{kind}", "to": f"{_HF_LAYER}.self_attn.o_proj.{kind}"})
        targets = [f"{name}.{kind}" for name in _MLP]
        halves = [_GATED, {"split": {"dim": 0, "sizes": [1, 1]}}]
        rules.append({"from": f"mlp.linear_fc1.{kind}", "to": targets, "values": halves})
        # With singleton_local_shards Megatron-Core saves the gate and up apart.
        rules += _renamed({f"mlp.linear_fc1.{kind}_w": targets[0], f"mlp.linear_fc1.{kind}_v": targets[1]})
    return rules


def _megatron_layers() -> list[dict[str, object]]:
    """Return the rules for stacked layers, and for one name a layer."""
    rules = []
    for rule in _megatron_layer():
        rules.append({**rule, "from": f"decoder.layers.{rule['from']}", "unstack": ["layer"]})
    for rule in _megatron_layer():
        rules.append({**rule, "from": f"decoder.layers.{{layer}}.{rule['from']}"})
    return rules


_MEGATRON_GPT: dict[str, object] = {
    "about": "Megatron-Core's GPTModel (RMSNorm, rotary embeddings, gated MLP) to LlamaForCausalLM of transformers",
    "numbers": {
        **_HEADS,
        "ffn": {"about": "rows of the gate", "config": ["intermediate_size", "ffn_hidden_size"]},
        "vocab_size": {"about": "rows of the embedding without padding", "config": ["vocab_size"]},
        "padded_vocab_size": {"about": "rows of the embedding", "config": ["padded_vocab_size"]},
        "gated": {"about": "1 if the MLP has a gate", "config": ["swiglu"], "must_be": 1},
        "norms_1p": {"about": "1 if norms add 1 to their weights", "config": ["apply_layernorm_1p"], "must_be": 0},
        "interleaved": {"about": "1 if pairs of rows are rotated", "config": ["rotary_interleaved"], "must_be": 0},
    },
    "rules": [
        {"from": "embedding.word_embeddings.weight", "to": "model.embed_tokens.weight", "values": [_UNPAD]},
        *_megatron_layers(),
        {"from": "decoder.final_layernorm.weight", "to": "model.norm.weight"},
        {"from": "output_layer.weight", "to": "lm_head.weight", "values": [_UNPAD]},
        {"from": "rotary_pos_emb.inv_freq", "to": []},
    ],
}

BUILTIN: Mapping[str, Mapping[str, object]] = {
    "torchtitan:llama3": _TORCHTITAN_LLAMA3,
    "megatron:gpt": _MEGATRON_GPT,
}
