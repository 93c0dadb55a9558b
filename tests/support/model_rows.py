"""What a row of the table of model directories is made of: a directory, and what a person wants of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import TINY

from statexchange.errors import (
    StateExchangeError,
)

State = dict[str, torch.Tensor]
Errors = type[StateExchangeError] | tuple[type[StateExchangeError], ...]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **TINY,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_SIZES = {
    "self_attn.q_proj": (12, 12),
    "self_attn.k_proj": (12, 12),
    "self_attn.v_proj": (12, 12),
    "self_attn.o_proj": (12, 12),
    "mlp.gate_proj": (20, 12),
    "mlp.up_proj": (20, 12),
    "mlp.down_proj": (12, 20),
    "input_layernorm": (12,),
    "post_attention_layernorm": (12,),
}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
}
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
NUMBERED = "model-{:05d}-of-{:05d}.safetensors"
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
NO_UNION = ("layout", '"dim"')  # advice that would make one model of two


def llama(save: int = 1, *, layers: int = 1) -> State:
    """Return the tensors of a tiny Llama; each is filled with a number that differs by tensor and by `save`."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (30, 12), HEAD: (30, 12), NORM: (12,)}
    for layer in range(layers):
        for name, shape in _SIZES.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: torch.full(shape, save + number / 64) for number, (name, shape) in enumerate(shapes.items())}


def halves(state: State) -> tuple[State, State]:
    """Return the tensors of a state in two parts."""
    names = list(state)
    middle = len(names) // 2
    return {name: state[name] for name in names[:middle]}, {name: state[name] for name in names[middle:]}


def lora(save: int = 1, *, rank: int = 2) -> State:
    """Return the tensors of an adapter of PEFT for the query of a tiny Llama."""
    return {LORA.format("A"): torch.full((rank, 12), float(save)), LORA.format("B"): torch.full((12, rank), save + 0.5)}


@dataclass(frozen=True)
class Tensors:
    """The wanted outcome is these tensors.

    Attributes:
        state: each tensor by its name in a merged file.
        notes: words that are in the notes of a merge, and in what info and verify print.
        merge_notes: words that are in the notes of a merge.
    """

    state: State
    notes: tuple[str, ...] = ()
    merge_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """The wanted outcome is an error.

    Attributes:
        error: its class.
        words: words that are in its message, and in what info and verify print.
        lacks: words that are in none of them.
        by_bytes: whether the fault lies in the bytes of tensors, which info does not read.
        scan: words that are in what scan prints.
    """

    error: Errors
    words: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    by_bytes: bool = False
    scan: tuple[str, ...] = ()


@dataclass
class Folder:
    """Writes files into a directory.

    Attributes:
        path: the directory.
        opened: what is given to programs, if it is not the directory.
    """

    path: Path
    opened: Path | None = None

    def write(self, name: str, state: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file(dict(state), path, metadata={"format": "pt"} if metadata is None else dict(metadata) or None)
        else:
            torch.save(dict(state), path)

    def write_bytes(self, name: str, data: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def write_json(self, name: str, value: object) -> None:
        self.write_bytes(name, json.dumps(value).encode())

    def config(self, **changes: object) -> None:
        self.write_json("config.json", {**CONFIG, **changes})

    def adapter_config(self, **changes: object) -> None:
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        self.write_json("adapter_config.json", {**config, **changes})

    def index(self, name: str, files: Mapping[str, Mapping[str, object] | list[str]], **more: object) -> None:
        """Write an index that assigns tensors to files."""
        weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
        self.write_json(name, {"metadata": {"total_size": 1}, **more, "weight_map": weight_map})

    def shards(self, state: State, pattern: str = NUMBERED, index: str | None = INDEX, first: int = 1) -> list[str]:
        """Write a state as two files, with an index; return the names of the files."""
        names = [pattern.format(first + number, 2) for number in range(2)]
        parts = dict(zip(names, halves(state), strict=True))
        for file, part in parts.items():
            self.write(file, part)
        if index is not None:
            self.index(index, parts)
        return names


@dataclass(frozen=True)
class Row:
    """A directory of the table.

    Attributes:
        name: the name of the function.
        origin: the public issue, as repository and number.
        make: writes the directory and returns the wanted outcome.
        peer: the program that is asked, too; empty for none.
        agrees: whether it must read the same tensors; otherwise its outcome is shown only.
        renamed: the name in the peer's state of a name in the file.
    """

    name: str
    origin: str
    make: Callable[[Folder], Tensors | Refused]
    peer: str = ""
    agrees: bool = True
    renamed: Callable[[str], str] = field(default=str)


ROWS: dict[str, Row] = {}


def row(origin: str, peer: str = "", *, agrees: bool = True, renamed: Callable[[str], str] = str) -> Callable[..., Any]:
    """Register a function as a row."""

    def registered(make: Callable[[Folder], Tensors | Refused]) -> Callable[[Folder], Tensors | Refused]:
        name = getattr(make, "__name__")  # noqa: B009 - a Callable has no __name__ for mypy
        ROWS[name] = Row(name, origin, make, peer, agrees, renamed)
        return make

    return registered
