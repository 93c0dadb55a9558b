"""Heads and embeddings: what is tied by storage and not by the config is written; values that differ are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from safetensors.torch import load_file, save_file
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


def parts(*, ties_head: bool) -> Any:
    """Return a model whose config does not tie the head, and whose text_config does."""
    from transformers import ModernVBertConfig, ModernVBertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = ModernVBertConfig(
        text_config={**sizes, **ids, "vocab_size": 32}, vision_config=vision, pixel_shuffle_factor=1
    )
    assert (config.tie_word_embeddings, config.text_config.tie_word_embeddings) == (False, True)
    model = ModernVBertForMaskedLM(config)
    if ties_head:
        model.lm_head.weight = model.get_input_embeddings().weight
    return model


@pytest.mark.parametrize("ties_head", [False, True])
def test_the_outermost_config_says_whether_heads_are_tied(tmp_path: Path, ties_head: bool) -> None:
    model = parts(ties_head=ties_head)
    report = sx.export_checkpoint(model, tmp_path / "out")
    assert (report.notes, report.aliases) == ((), {})
    assert sx.merge_checkpoint(tmp_path / "out", tmp_path / "merged").notes == ()
    loaded, info = type(model).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.lm_head.weight.equal(model.lm_head.weight)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"encoder_layers": 1}, [HEAD, "model.decoder.embed_tokens.weight"]),  # as BigBirdPegasusForCausalLM
        ({"is_encoder_decoder": True}, [HEAD, "shared.weight"]),  # as Pop2Piano
        ({}, ["expert.lm_head.weight", "base.model.embed_tokens.weight"]),  # of two parts, as in PI0
    ],
)
def test_heads_that_the_class_may_not_tie_are_not_named(
    config: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    values = {name: torch.full((4, 2), float(number)) for number, name in enumerate(names)}
    save_file(values, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text(json.dumps({"tie_word_embeddings": True, "vocab_size": 4, **config}))
    assert sx.merge_checkpoint(tmp_path / "in", tmp_path / "out").notes == ()


@pytest.mark.parametrize("head", ["cls.predictions.decoder.weight", "predictions.decoder.weight"])
def test_heads_of_berts_are_compared_with_their_embeddings(head: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    weights = {head: torch.ones(4, 2), "bert.embeddings.word_embeddings.weight": torch.zeros(4, 2)}
    save_file(weights, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text('{"tie_word_embeddings": true, "vocab_size": 4}')
    assert DIFFERENT in str(sx.merge_checkpoint(tmp_path / "in", tmp_path / "out").notes)
