"""A merge has a note about a config.json whose sizes are not those of the tensors, and about no other."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from statexchange.checkpoint.merge import merge_checkpoint

EMBEDDING, NORM, LAYER_NORM = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"
SHAPES = {EMBEDDING: (16, 8), NORM: (8,), LAYER_NORM: (8,), "model.layers.0.mlp.up_proj.weight": (12, 8)}
CONFIG = {"num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 8}


def notes_of(
    folder: Path, config: object, shapes: dict[str, tuple[int, ...]], dtype: str = "float32", **options: Any
) -> list[str]:
    """Return the notes on the sizes in config.json of a merge of a directory of transformers."""
    save_file({name: np.ones(shape, dtype) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    notes = merge_checkpoint(folder, folder / "out", **options).notes
    return [note for note in notes if "is this the config of this model?" in note]


@pytest.mark.parametrize(
    ("config", "shapes", "text"),
    [
        ({"vocab_size": 17}, {}, f"vocab_size is 17 in config.json, and {EMBEDDING} has only 16 rows"),
        ({"hidden_size": 4}, {}, f"hidden_size is 4 in config.json, and {EMBEDDING} has 8 columns"),
        ({"hidden_size": 4}, {EMBEDDING: None}, f"hidden_size is 4 in config.json, and {NORM} has 8 elements"),
        ({"hidden_size": 4}, {EMBEDDING: None, NORM: None}, f"and {LAYER_NORM} has 8 elements"),
        (
            {"hidden_size": 4, "vocab_size": 32, "num_hidden_layers": 3},
            {},
            (
                "num_hidden_layers is 3 in config.json, and the tensors are those of 1 layer of model.layers; "
                f"vocab_size is 32 in config.json, and {EMBEDDING} has only 16 rows; "
                f"hidden_size is 4 in config.json, and {EMBEDDING} has 8 columns: "
            ),
        ),
    ],
)
def test_sizes_of_another_model_are_named_in_one_line(
    config: dict[str, int], shapes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    kept = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape is not None}
    (note,) = notes_of(tmp_path, {**CONFIG, **config}, kept)
    assert text in note
    assert note.endswith(": is this the config of this model? Give it by files_from (--files-from)")


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({}, {}),
        ({"vocab_size": 13}, {}),  # rows that fill up the embedding
        ({"vocab_size": None, "hidden_size": "8"}, {}),
        ({"hidden_size": 12}, {NORM: (12,), LAYER_NORM: (12,)}),  # an embedding of other columns
        ({"hidden_size": 12}, {NORM: (12,)}),
        ({"vocab_size": 99}, {EMBEDDING: None}),
        ({"vocab_size": 99, "hidden_size": 7}, {EMBEDDING: (4, 2, 2), NORM: None, LAYER_NORM: None}),
    ],
)
def test_sizes_that_may_be_right_are_not_named(config: dict[str, Any], shapes: dict[str, Any], tmp_path: Path) -> None:
    kept = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape is not None}
    assert notes_of(tmp_path, {**CONFIG, **config}, kept) == []


def test_packed_weights_parts_and_other_configs_are_not_compared(tmp_path: Path) -> None:
    other = {**CONFIG, "vocab_size": 99, "hidden_size": 7}
    assert notes_of(tmp_path, other, SHAPES, "uint8", overwrite=True) == []
    for config, options in (({"text_config": other}, {}), ([other], {}), (other, {"include": "model.*"})):
        assert notes_of(tmp_path, config, SHAPES, overwrite=True, **options) == []
