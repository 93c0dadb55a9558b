"""The recipes of the how-to pages; torch, transformers and peft load their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same
from safetensors.torch import load_file
from scripts import ALONE, page_block, run_script, with_mpiexec, with_torchrun
from sweeps import slow
from tiny_models import llama_of_pages
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from transformers_logits import logits

TOKENS = torch.arange(2 * 16).reshape(2, 16)


def run_recipe(
    recipe: str,
    folder: Path,
    launcher: tuple[str, ...] = with_torchrun(2),
    *,
    before: str = "dist.barrier()\n",
    insert: str = "",
    replace: dict[str, str] | None = None,
) -> None:
    """Start a recipe as its page shows, with the lines `insert` before the line `before`."""
    script = page_block(f"block: {recipe}.py")
    for old, new in {**(replace or {}), **({before: insert + before} if insert else {})}.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    run_script(launcher, f"{recipe}.py", script, folder)


def whole_state(of: str, to: str) -> str:
    """Return lines of code that save what torch gathers of a sharded module."""
    return (
        f"whole = {{n: t.full_tensor() for n, t in {of}.items()}}\n"
        f"if dist.get_rank() == 0:\n    torch.save(whole, {to!r})\n"
    )


def from_pretrained(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


# Hugging Face Trainer


@pytest.mark.parametrize("way", [slow("ddp"), slow("fsdp2"), slow("alone")])
def test_the_callback_exports_what_trainer_saves(way: str, tmp_path: Path) -> None:
    """accelerate shards nothing on CPU, so transformers shards the model itself."""
    torch.manual_seed(0)
    start = llama_of_pages(2)
    sharded = {
        "model = LlamaForCausalLM(config)": "from transformers.distributed import DistributedConfig\n"
        "model = LlamaForCausalLM.from_pretrained('start', distributed_config=DistributedConfig(fsdp_size=2))\n"
        "assert type(model.lm_head.weight).__name__ == 'DTensor'"
    }
    start.save_pretrained(tmp_path / "start")
    launcher = ALONE if way == "alone" else with_torchrun(2)
    run_recipe("on_save", tmp_path, launcher, replace=sharded if way == "fsdp2" else None)
    saved = [tmp_path / f"run/checkpoint-{step}" for step in (2, 4)]
    for path in saved:
        trainers = load_file(path / "model.safetensors")
        assert_same(load_file(path / "merged/model.safetensors"), trainers)
        loaded = from_pretrained(path / "merged")
        assert logits(loaded, TOKENS).equal(logits(from_pretrained(path), TOKENS))
    first, last = (load_file(path / "merged/model.safetensors") for path in saved)
    assert not first["lm_head.weight"].equal(last["lm_head.weight"])


# Pipeline parallel


@pytest.mark.slow
def test_a_pipeline_becomes_the_model_that_one_process_trains(tmp_path: Path) -> None:
    run_recipe("pipeline", tmp_path, insert="torch.save(model.state_dict(), f'stage{rank}.pt')\n")
    stages = [torch.load(tmp_path / f"stage{rank}.pt") for rank in range(2)]
    assert not stages[0].keys() & stages[1].keys()
    assert [sum(n.endswith("q_proj.weight") for n in stage) for stage in stages] == [2, 1]
    assert_same(load_file(tmp_path / "merged/model.safetensors"), stages[0] | stages[1])

    torch.manual_seed(0)
    alone = llama_of_pages(3)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    tokens = torch.randint(50, (4, 16))
    for _ in range(3):
        cross_entropy(alone(tokens).logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    loaded = from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded.state_dict(), alone.state_dict())
    torch.testing.assert_close(logits(loaded, TOKENS), logits(alone, TOKENS))


# Torchtitan's names


class Attention(nn.Module):
    """Attention as in torchtitan: rotary embeddings rotate neighbouring elements, as complex numbers."""

    def __init__(self, heads: tuple[int, int], size: int) -> None:
        super().__init__()
        self.size = size
        rows = heads[0] * size, heads[1] * size
        self.wq, self.wo = (nn.Linear(rows[0], rows[0], bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(rows[0], rows[1], bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        pairs = [torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (q, k)]
        q, k = (torch.view_as_real(t * turns).flatten(-2) for t in pairs)
        return self.wo(
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )


class FeedForward(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention((4, 2), 8), FeedForward(32, 80)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(32, 1e-6), nn.RMSNorm(32, 1e-6)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.lm_head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.layers, self.norm = nn.ModuleDict({str(n): Block() for n in range(2)}), nn.RMSNorm(32, 1e-6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, torch.polar(torch.ones_like(angles), angles))
        return self.lm_head(self.norm(x))


@pytest.mark.slow
def test_a_model_with_torchtitans_names_becomes_transformers_own(tmp_path: Path) -> None:
    run_recipe("to_hf", tmp_path, insert=whole_state("state", "titan.pt"), before="# In a torchtitan job")
    titan = Transformer().double()
    state = torch.load(tmp_path / "titan.pt")
    titan.load_state_dict({name.replace("qkv_linear.", ""): tensor for name, tensor in state.items()})
    with torch.no_grad():
        expected = titan(TOKENS)
    loaded = from_pretrained(tmp_path / "hf").double()
    torch.testing.assert_close(logits(loaded, TOKENS), expected, rtol=1e-5, atol=1e-5)  # its angles are float32
    assert load_file(tmp_path / "hf/model.safetensors").keys() == loaded.state_dict().keys()


# Adapters


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's use of it
@pytest.mark.slow
def test_peft_loads_the_exported_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    def base() -> Any:
        torch.manual_seed(0)
        return llama_of_pages(2)

    run_recipe("lora", tmp_path, insert=whole_state("model.state_dict()", "whole.pt"))
    trained = get_peft_model(base(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    trained.load_state_dict(torch.load(tmp_path / "whole.pt"))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "statexchange.json",
    ]
    assert_same(load_file(tmp_path / "adapter/adapter_model.safetensors"), get_peft_model_state_dict(trained))
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert logits(loaded, TOKENS).equal(logits(trained, TOKENS))
    assert not logits(loaded, TOKENS).equal(logits(base(), TOKENS))


# Averages


@pytest.mark.slow
def test_an_average_is_exported_as_the_model(tmp_path: Path) -> None:
    insert = whole_state("average.module.state_dict()", "average.pt") + whole_state("model.state_dict()", "model.pt")
    run_recipe("ema", tmp_path, insert=insert)
    average, model = (torch.load(tmp_path / f"{name}.pt") for name in ("average", "model"))
    assert_same(load_file(tmp_path / "averaged/model.safetensors"), average)
    assert not average["lm_head.weight"].equal(model["lm_head.weight"])
    expected = llama_of_pages(2)
    expected.load_state_dict(average)
    assert logits(from_pretrained(tmp_path / "averaged"), TOKENS).equal(logits(expected, TOKENS))


def test_a_model_of_the_meta_device_is_loaded(tmp_path: Path) -> None:
    run_recipe("meta", tmp_path)


# TP x PP by hand


@pytest.mark.parametrize("way", [slow("torchrun"), slow("mpiexec and a workspace")])
def test_stages_of_unequal_length_are_gathered_on_one_rank(way: str, tmp_path: Path) -> None:
    calls = ("layers, column", "head, column", "mine, range(TP)")
    shared = {f"({call})": f"({call}, workspace_path='here')" for call in calls}
    if way == "torchrun":
        run_recipe("stages", tmp_path, with_torchrun(4))
    else:
        run_recipe("stages", tmp_path, with_mpiexec(4), replace=shared)
    ranks = []
    for rank, count in enumerate((3, 3, 2, 2)):
        torch.manual_seed(rank)
        layers = [(torch.randn(12, 8), torch.randn(8, 12), torch.rand(())) for _ in range(count)]
        ranks.append((layers, torch.randn(25, 8)))
    expected = {"head": torch.cat([ranks[2][1], ranks[3][1]])}
    columns = [ranks[0][0] + ranks[2][0], ranks[1][0] + ranks[3][0]]
    for n, (left, right) in enumerate(zip(*columns, strict=True)):
        expected[f"layers.{n}.up"] = torch.cat([left[0], right[0]])
        expected[f"layers.{n}.down"] = torch.cat([left[1], right[1]], 1)
        expected[f"layers.{n}.amax"] = torch.maximum(left[2], right[2])
    assert len(expected) == 16
    assert_same(load_file(tmp_path / "merged.safetensors"), expected)
