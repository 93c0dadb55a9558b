"""Heads and embeddings: what is tied by storage and not by the config is written; values that differ are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from safetensors.torch import load_file
from tiny_models import llama
from transformers_logits import logits

import statexchange as sx

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DIFFERENT = "have different values"


def tied_by_storage(*, tied_by_config: bool = False) -> Any:
    """Return a model whose head is its embedding."""
    model = llama(tied=tied_by_config)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def check_loaded(path: Path, model: Any) -> None:
    """Check that transformers loads the directory without random values, and that it computes the same."""
    from transformers import LlamaForCausalLM

    loaded, report = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    assert logits(loaded).equal(logits(model))


@pytest.mark.parametrize("kind", ["bin", "save", "export"])
def test_a_head_that_is_tied_by_storage_alone_is_written(kind: str, tmp_path: Path) -> None:
    model = tied_by_storage()
    source, config = tmp_path / "in", tmp_path / "config"
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(config)
    if kind == "bin":
        model.config.save_pretrained(source)
        torch.save(model.state_dict(), source / "pytorch_model.bin")
        report: Any = sx.merge_checkpoint(source, tmp_path / "out")
    elif kind == "save":
        sx.save_checkpoint(model, source)
        report = sx.merge_checkpoint(source, tmp_path / "out", files_from=config)
    else:
        report = sx.export_checkpoint(model, tmp_path / "out")
    assert (report.notes, report.aliases) == ((), {})
    written = load_file(tmp_path / "out/model.safetensors")
    assert written[HEAD].equal(written[EMBEDDING])
    check_loaded(tmp_path / "out", model)


@pytest.mark.parametrize("kind", ["bin", "export"])
def test_a_head_that_the_config_ties_is_written_once(kind: str, tmp_path: Path) -> None:
    model = tied_by_storage(tied_by_config=True)
    source = tmp_path / "in"
    if kind == "bin":
        model.config.save_pretrained(source)
        torch.save(model.state_dict(), source / "pytorch_model.bin")
        report: Any = sx.merge_checkpoint(source, tmp_path / "out")
    else:
        report = sx.export_checkpoint(model, tmp_path / "out")
    assert len(report.aliases) == 1
    assert len(load_file(tmp_path / "out/model.safetensors").keys() & {HEAD, EMBEDDING}) == 1
    check_loaded(tmp_path / "out", model)


def test_embeddings_that_share_their_values_stay_tied_whatever_the_config_says(tmp_path: Path) -> None:
    weight = torch.ones(4, 2)
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    (tmp_path / "in").mkdir()
    torch.save(dict.fromkeys(names, weight), tmp_path / "in/pytorch_model.bin")
    (tmp_path / "in/config.json").write_text('{"tie_word_embeddings": false, "is_encoder_decoder": true}')
    sx.merge_checkpoint(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"shared.weight", "lm_head.weight"}


def test_values_that_differ_although_the_config_ties_them_are_named(tmp_path: Path, call: CommandLine) -> None:
    model = llama()
    model.config.tie_word_embeddings = True
    report = sx.export_checkpoint(model, tmp_path / "live")
    (note,) = report.notes
    assert all(text in note for text in ("tie_word_embeddings is true", HEAD, EMBEDDING, DIFFERENT))
    merged = sx.merge_checkpoint(tmp_path / "live", tmp_path / "out")
    assert merged.notes == (note,)
    code, _, err = call("verify", tmp_path / "live")
    assert (code, note in err) == (0, True)
    written = load_file(tmp_path / "out/model.safetensors")
    assert not written[HEAD].equal(written[EMBEDDING])


def test_equal_values_are_not_named(tmp_path: Path, call: CommandLine) -> None:
    model = llama()
    model.config.tie_word_embeddings = True
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    assert sx.export_checkpoint(model, tmp_path / "live").notes == ()
    assert sx.merge_checkpoint(tmp_path / "live", tmp_path / "out").notes == ()
    assert DIFFERENT not in "".join(map(str, call("verify", tmp_path / "out")))
    config = json.loads((tmp_path / "live/config.json").read_text())
    assert config["tie_word_embeddings"] is True
