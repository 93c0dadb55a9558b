"""From a save of a PEFT model to an adapter: the note on a merge shows the command line, and PEFT loads its result."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from tiny_models import TINY, llama
from transformers_logits import logits

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


def options_in(note: str) -> list[str]:
    """Return the options of the command line in a note."""
    match = re.search(r"\((--.*)\)$", note)
    assert match is not None, note
    return shlex.split(match[1])


# The form of the save does not depend on the kind of the adapter.
FORMS = [("job", kind) for kind in KINDS] + [("model", "lora"), ("nested", "lora")]


@pytest.mark.parametrize(("form", "kind"), FORMS)
def test_the_command_line_of_the_note_makes_an_adapter_that_peft_loads(
    kind: str, form: str, tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    model = adapted(kind)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    forms = {"job": {"model": model, "optimizer": optimizer}, "model": model, "nested": {"model": model}}
    sx.save_checkpoint(forms[form], tmp_path / "save")
    model.save_pretrained(tmp_path / "peft")
    code, _, err = call("merge", tmp_path / "save", tmp_path / "all")
    (note,) = [line for line in err.splitlines() if "what PEFT loads" in line]
    assert (code, "no adapter_config.json" in err) == (0, False)
    assert "adapter_model.safetensors" not in os.listdir(tmp_path / "all")
    monkeypatch.chdir(tmp_path / "peft")  # where adapter_config.json lies
    code, _, err = call("merge", tmp_path / "save", tmp_path / "out", *options_in(note))
    assert (code, "what PEFT loads" in err) == (0, False), err
    loaded = PeftModel.from_pretrained(base(), tmp_path / "out").eval()
    assert logits(loaded).equal(logits(model))
    assert not logits(loaded).equal(logits(base()))


def test_the_adapter_that_peft_writes_has_no_such_note(tmp_path: Path) -> None:
    adapted("lora").save_pretrained(tmp_path / "in")
    assert sx.merge_checkpoint(tmp_path / "in", tmp_path / "out").notes == ()


def test_one_of_several_adapters_is_shown(tmp_path: Path) -> None:
    model = adapted("lora")
    model.add_adapter("other", model.peft_config["default"])
    sx.save_checkpoint({"model": model.state_dict()}, tmp_path / "save")
    (note,) = [
        note for note in sx.merge_checkpoint(tmp_path / "save", tmp_path / "all").notes if "what PEFT loads" in note
    ]
    assert "default" in note
    assert "other" in note


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_biases_that_the_adapter_trains_are_in_the_advice(
    bias: Any, tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def biased() -> Any:
        torch.manual_seed(3)
        return Qwen2ForCausalLM(Qwen2Config(**TINY))

    model = trained(get_peft_model(biased(), LoraConfig(r=2, target_modules=["q_proj"], bias=bias)))
    sx.save_checkpoint({"model": model, "step": 1}, tmp_path / "save")
    model.save_pretrained(tmp_path / "peft")
    _, _, err = call("merge", tmp_path / "save", tmp_path / "all")
    (note,) = [line for line in err.splitlines() if "what PEFT loads" in line]
    assert "biases" in note
    options = options_in(note) + ["--include", "*.bias"] * (bias != "none")
    monkeypatch.chdir(tmp_path / "peft")
    code, _, err = call("merge", tmp_path / "save", tmp_path / "out", *options)
    assert (code, "PEFT" in err) == (0, False), err
    loaded = PeftModel.from_pretrained(biased(), tmp_path / "out").eval()
    assert loaded(IDS).logits.equal(model(IDS).logits)
    assert sx.merge_checkpoint(tmp_path / "peft", tmp_path / "copy").notes == ()


def of_other_names(kind: str) -> Any:
    """Return a model with an adapter of which PEFT saves tensors by names that do not follow from the live ones."""
    from peft import AdaLoraConfig, PromptTuningConfig, VeraConfig, get_peft_model

    configs: dict[str, Any] = {
        "shared": VeraConfig(r=2, target_modules=["q_proj"]),
        "numbers": AdaLoraConfig(target_modules=["q_proj"], total_step=9),
        "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }
    return get_peft_model(base(), configs[kind]).eval()


@pytest.mark.parametrize("kind", ["shared", "numbers", "prompt"])
@pytest.mark.parametrize("config", [{}, {"config.json": "{}"}])
def test_an_adapter_of_other_names_comes_from_the_live_model(kind: str, config: dict[str, str], tmp_path: Path) -> None:
    from peft import PeftModel

    model = trained(of_other_names(kind))
    sx.save_checkpoint({"model": model, "step": 1}, tmp_path / "save")
    _, note = sx.merge_checkpoint(tmp_path / "save", tmp_path / "all", files_from=config).notes
    assert all(word in note for word in ("save_pretrained", "load_checkpoint"))
    assert not any(word in note for word in ("--include", "files_from"))
    live = of_other_names(kind)
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
    assert all(word in note for word in ("config.json", "lora_A.default", "save_pretrained"))
    assert note in call("info", tmp_path / "out")[1]
    _, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert report["missing_keys"]
    assert report["unexpected_keys"]
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert loaded(IDS).logits.equal(model(IDS).logits)
