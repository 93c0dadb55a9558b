"""From a save of a PEFT model to an adapter: a note on a merge says that the live model writes it, which PEFT loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from tiny_models import llama

import statexchange as sx

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
}
IDS = torch.arange(8)[None]


def base() -> Any:
    torch.manual_seed(3)
    return llama()


def trained(model: Any) -> Any:
    """Change what an adapter trains."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    return model.eval()


def adapted(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    return trained(get_peft_model(base(), LoraConfig(r=2, **KINDS[kind])))


def test_the_adapter_that_peft_writes_has_no_such_note(tmp_path: Path) -> None:
    adapted("lora").save_pretrained(tmp_path / "in")
    assert sx.merge_checkpoint(tmp_path / "in", tmp_path / "out").notes == ()


def adapter_of(kind: str) -> Any:
    """Return a model with an adapter, before its training."""
    from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model

    configs: dict[str, Any] = {
        "shared": VeraConfig(r=2, target_modules=["q_proj"]),
        "numbers": AdaLoraConfig(target_modules=["q_proj"], total_step=9),
        "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }
    for name, options in KINDS.items():
        configs[name] = LoraConfig(r=2, **options)
    return get_peft_model(base(), configs[kind]).eval()


@pytest.mark.parametrize("kind", [*KINDS, "shared", "numbers", "prompt"])
@pytest.mark.parametrize("config", [{}, {"config.json": "{}"}])
def test_an_adapter_comes_from_the_live_model(kind: str, config: dict[str, str], tmp_path: Path) -> None:
    from peft import PeftModel

    model = trained(adapter_of(kind))
    sx.save_checkpoint({"model": model, "step": 1}, tmp_path / "save")
    _, note = sx.merge_checkpoint(tmp_path / "save", tmp_path / "all", files_from=config).notes
    assert all(word in note for word in ("save_pretrained", "load_checkpoint"))
    assert not any(word in note for word in ("--include", "files_from"))
    live = adapter_of(kind)
    sx.load_checkpoint(live, tmp_path / "all")
    live.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert loaded(IDS).logits.equal(model(IDS).logits)


def test_an_export_of_a_model_to_which_transformers_has_added_an_adapter_names_it(
    tmp_path: Path, call: CommandLine
) -> None:
    from peft import LoraConfig, PeftModel

    model = base()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    trained(model)
    (note,) = sx.export_checkpoint(model, tmp_path / "out").notes
    assert all(word in note for word in ("no program finds", "lora_A.default", "save_pretrained"))
    assert note in call("info", tmp_path / "out")[1]
    _, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert report["missing_keys"]
    assert report["unexpected_keys"]
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert loaded(IDS).logits.equal(model(IDS).logits)
