"""Directories that programs read wrongly, from public issues: how each is made, and what a person wants of it.

A row of the table is a function with `@row`: it writes a small directory and returns what is wanted, `Tensors` or
`Refused`; its docstring says why. `python tests/support/model_directories.py` prints the table with both outcomes, that
of statexchange and that of transformers or PEFT. What was wanted was written before the first run.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY

import statexchange as sx
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    UnsupportedError,
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
_NO_UNION = ("layout", '"dim"')  # advice that would make one model of two


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


# ---------------------------------------------------------------------------------------------------------- indexes


@row("Blaizzy/mlx-vlm#638", "causal", agrees=False)
def index_of_the_source_of_a_conversion(folder: Folder) -> Refused:
    """The converted files are numbered by 2, the copied index lists those of the source, by 3: not to be guessed."""
    folder.config()
    folder.shards(llama(), index=None)
    folder.index(INDEX, {NUMBERED.format(number, 3): [name] for number, name in enumerate(llama(), 1) if number < 4})
    return Refused(IncompleteError, (NUMBERED.format(1, 3),))


@row("vllm-project/vllm#34859", "causal", agrees=False)
def listed_shard_is_missing(folder: Folder) -> Refused:
    """Quantized models were served with random weights in the place of the missing shard."""
    folder.config()
    names = folder.shards(llama())
    (folder.path / names[1]).unlink()
    return Refused(IncompleteError, (names[1],))


@row("JustVugg/colibri#1487", "causal", agrees=False)
def tensor_lies_in_another_shard_than_listed(folder: Folder) -> Refused:
    """The index and the headers contradict each other: one of them is of another revision."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    moved = next(iter(parts[0]))
    folder.index(INDEX, {first: list(parts[0])[1:], second: [moved, *parts[1]]})
    return Refused((CorruptError, IncompleteError), (moved,))


@row("huggingface/huggingface_hub#4728", "causal", agrees=False)
def listed_tensor_lies_nowhere(folder: Folder) -> Refused:
    """An index was written for tensors that the shard does not have."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    folder.index(INDEX, {first: parts[0], second: [*parts[1], "mtp.fc.weight"]})
    return Refused((CorruptError, IncompleteError), ("mtp.fc.weight",))


@row("jundot/omlx#2062", "causal")
def listed_file_of_another_name(folder: Folder) -> Tensors:
    """A loader that takes model*.safetensors alone loses the tensors of mtp.safetensors, which is listed."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    extra = {"mtp.fc.weight": torch.full((12, 24), 7.0)}
    folder.write("mtp.safetensors", extra)
    folder.index(INDEX, {first: parts[0], second: parts[1], "mtp.safetensors": extra})
    return Tensors({**llama(), **extra})


@row("jundot/omlx#1962", "causal")
def file_that_the_index_does_not_list(folder: Folder) -> Tensors:
    """The index lists the model; a person wants to know that model-mtp-of-00002.safetensors is not in it."""
    folder.config()
    folder.shards(llama())
    folder.write("model-mtp-of-00002.safetensors", {"mtp.fc.weight": torch.full((12, 24), 7.0)})
    return Tensors(llama(), notes=("model-mtp-of-00002.safetensors",))


@row("vllm-project/compressed-tensors#756", "causal")
def index_lists_the_single_file_and_another(folder: Folder) -> Tensors:
    """transformers takes model.safetensors before the index, which lists a second file, too: that one is named."""
    folder.config()
    extra = {"mtp.fc.weight": torch.full((12, 24), 7.0)}
    folder.write("model.safetensors", llama())
    folder.write("model_mtp.safetensors", extra)
    folder.index(INDEX, {"model.safetensors": llama(), "model_mtp.safetensors": extra})
    return Tensors(llama(), notes=("model_mtp.safetensors",))


@row("huggingface/transformers#16343", "causal", agrees=False)
def index_without_metadata(folder: Folder) -> Tensors:
    """The entry "metadata" says nothing that is needed; transformers needs it, so a merge helps."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    folder.write_json(INDEX, {"weight_map": dict.fromkeys(parts[0], first) | dict.fromkeys(parts[1], second)})
    return Tensors(llama())


@row("NVIDIA/Model-Optimizer#2199", "causal")
def index_of_an_earlier_save_whose_shards_are_gone(folder: Folder) -> Tensors:
    """A later save is one file; the old index lists files that no longer exist."""
    folder.config()
    for name in folder.shards(llama(2)):
        (folder.path / name).unlink()
    folder.write("model.safetensors", llama())
    return Tensors(llama())


@row("huggingface/diffusers#14769", "causal", agrees=False)
def index_of_an_earlier_save_before_a_torch_file(folder: Folder) -> Refused:
    """The index comes before pytorch_model.bin, and its shards are gone: all loaders fail, so no guess."""
    folder.config()
    names = folder.shards(llama(2))
    for name in names:
        (folder.path / name).unlink()
    folder.write("pytorch_model.bin", llama())
    return Refused(IncompleteError, (names[0],))


@row("liltom-eth/llama2-webui#7", "causal", agrees=False)
def index_whose_shards_were_not_downloaded(folder: Folder) -> Refused:
    """Only the .bin files were downloaded, but both indexes."""
    folder.config()
    folder.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    folder.index(INDEX, dict(zip((NUMBERED.format(1, 2), NUMBERED.format(2, 2)), halves(llama()), strict=True)))
    return Refused(IncompleteError, (NUMBERED.format(1, 2),))


@row("liltom-eth/llama2-webui#7")
def path_of_an_index(folder: Folder) -> Tensors:
    """A user names the candidate that is whole by the path of its index."""
    index_whose_shards_were_not_downloaded(folder)
    folder.opened = folder.path / BIN_INDEX
    return Tensors(llama())


@row("Neph0s/CoSER#3", "causal")
def files_that_are_fewer_than_their_numbers_say(folder: Folder) -> Tensors:
    """Files are numbered of 30, there are 15, and the index lists these alone: they are the model."""
    folder.config()
    names = (NUMBERED.format(1, 4), NUMBERED.format(2, 4))
    parts = dict(zip(names, halves(llama()), strict=True))
    for name, part in parts.items():
        folder.write(name, part)
    folder.index(INDEX, parts)
    return Tensors(llama())


@row("hyperonym/basaran#160", "causal", agrees=False)
def index_of_the_unquantized_model_beside_another_file(folder: Folder) -> Refused:
    """The .bin index of the source was copied; its files are not there, and the other file may be another model."""
    folder.config()
    missing = "pytorch_model-00001-of-00001.bin"
    folder.index(BIN_INDEX, {missing: llama()})
    folder.write("vicuna-13b-4bit-128g.safetensors", llama())
    return Refused((IncompleteError, InvalidArgumentError), (missing,))


@row("huggingface/diffusers#10634", "causal:bf16")
def variant_of_several_files_alone(folder: Folder) -> Tensors:
    """All there is is the variant bf16, in numbered files and with an index of its own name."""
    folder.config()
    folder.shards(llama(), "model.bf16-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.bf16.json")
    return Tensors(llama())


@row("huggingface/diffusers#9061", "causal")
def variant_of_several_files_beside_the_model(folder: Folder) -> Tensors:
    """Both have an index; that of the variant is not the model's."""
    folder.config()
    folder.shards(llama())
    names = folder.shards(llama(2), "model.fp16-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.fp16.json")
    return Tensors(llama(), notes=(names[0],))


# ---------------------------------------------------------------------------------------------------- numbered files


@row("unslothai/unsloth#2355", "causal", agrees=False)
def numbered_files_without_an_index(folder: Folder) -> Tensors:
    """push_to_hub_merged forgot the index; the numbers say that the set is whole."""
    folder.config()
    folder.shards(llama(), index=None)
    return Tensors(llama())


@row("unslothai/unsloth#1122", "causal", agrees=False)
def some_of_the_numbered_files(folder: Folder) -> Refused:
    """A save ended after 2 of 4 files."""
    folder.config()
    for number, part in enumerate(halves(llama()), 1):
        folder.write(NUMBERED.format(number, 4), part)
    return Refused(IncompleteError, (NUMBERED.format(3, 4),))


@row("sgl-project/sglang#24237", "causal", agrees=False)
def numbers_from_zero(folder: Folder) -> Tensors:
    """Files 0 and 1 of 2 are all."""
    folder.config()
    folder.shards(llama(), index=None, first=0)
    return Tensors(llama())


@row("unslothai/unsloth#10857", "causal")
def numbers_from_zero_with_an_index(folder: Folder) -> Tensors:
    """The index lists the only file, number 0 of 1."""
    folder.config()
    folder.write(NUMBERED.format(0, 1), llama())
    folder.index(INDEX, {NUMBERED.format(0, 1): llama()})
    return Tensors(llama())


@row("unslothai/unsloth#10857")
def gap_in_numbers_from_zero(folder: Folder) -> Refused:
    """Numbers 0 and 2 of 3."""
    for number, part in zip((0, 2), halves(llama()), strict=True):
        folder.write(NUMBERED.format(number, 3), part)
    return Refused(IncompleteError, (NUMBERED.format(1, 3),))


@row("lyogavin/airllm#214")
def total_of_more_digits_than_the_number(folder: Folder) -> Tensors:
    """DeepSeek writes model-00001-of-000002.safetensors."""
    folder.shards(llama(), "model-{:05d}-of-{:06d}.safetensors", index=None)
    return Tensors(llama())


@row("lyogavin/airllm#214")
def missing_file_of_a_total_of_more_digits(folder: Folder) -> Refused:
    """The second of two is missing."""
    names = folder.shards(llama(), "model-{:05d}-of-{:06d}.safetensors", index=None)
    (folder.path / names[1]).unlink()
    return Refused(IncompleteError, (names[1],))


@row("JustVugg/colibri#1317")
def counted_files_and_another_of_their_stem(folder: Folder) -> Refused:
    """Nothing says whether out-mtp-00000 belongs to out-00000 and out-00001, or is a model."""
    for number, part in enumerate(halves(llama())):
        folder.write(f"out-{number:05d}.safetensors", part)
    folder.write("out-mtp-00000.safetensors", {"mtp.fc.weight": torch.ones(2)})
    return Refused(InvalidArgumentError, ("out-mtp-00000.safetensors", "out-00000.safetensors"))


@row("ggml-org/llama.cpp#10756")
def equal_tensor_in_two_numbered_files(folder: Folder) -> Tensors:
    """A tied weight was written into both files: the same bits, so there is nothing to choose."""
    first, second = halves(llama())
    folder.write(NUMBERED.format(1, 2), first)
    folder.write(NUMBERED.format(2, 2), {**second, EMBED: first[EMBED]})
    return Tensors(llama())


@row("ggml-org/llama.cpp#10756")
def different_tensors_of_one_name_in_numbered_files(folder: Folder) -> Refused:
    """One of the files is of another save, and nothing says which."""
    first, second = halves(llama())
    folder.write(NUMBERED.format(1, 2), first)
    folder.write(NUMBERED.format(2, 2), {**second, EMBED: llama(2)[EMBED]})
    words = (EMBED, NUMBERED.format(1, 2), NUMBERED.format(2, 2))
    return Refused(StateExchangeError, words, _NO_UNION, by_bytes=True)


@row("ggml-org/llama.cpp#10756")
def dtypes_that_differ_by_file(folder: Folder) -> Tensors:
    """One shard is in bfloat16, one in float32: each tensor keeps its own."""
    first, second = halves(llama())
    rounded = {name: tensor.bfloat16() for name, tensor in first.items()}
    folder.write(NUMBERED.format(1, 2), rounded)
    folder.write(NUMBERED.format(2, 2), second)
    folder.index(INDEX, {NUMBERED.format(1, 2): first, NUMBERED.format(2, 2): second})
    return Tensors({**rounded, **second})


@row("osaurus-ai/vmlx-swift#217", "causal", agrees=False)
def shard_that_is_cut(folder: Folder) -> Refused:
    """Mapped into memory, the end of a cut file reads as zeros."""
    folder.config()
    _, second = folder.shards(llama())
    data = (folder.path / second).read_bytes()
    folder.write_bytes(second, data[:-100])
    return Refused(CorruptError, (second,))


@row("EricTan7/VeritasPP#2", "causal", agrees=False)
def shard_of_zeros(folder: Folder) -> Refused:
    """A download that reserved the space of the file and did not write it."""
    folder.config()
    _, second = folder.shards(llama())
    folder.write_bytes(second, bytes((folder.path / second).stat().st_size))
    return Refused(CorruptError, (second,))


@row("microsoft/OmniParser#18", "causal", agrees=False)
def shard_that_is_a_pointer_of_git_lfs(folder: Folder) -> Refused:
    """A clone without Git LFS: one of the shards was fetched by hand."""
    folder.config()
    _, second = folder.shards(llama())
    folder.write_bytes(second, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n")
    return Refused(CorruptError, (second, "LFS"))


@row("debpalash/VoiceStudio#1056", "causal", agrees=False)
def shard_that_is_a_link_to_nothing(folder: Folder) -> Refused:
    """The blob of the Hub's cache is gone."""
    folder.config()
    _, second = folder.shards(llama())
    (folder.path / second).unlink()
    (folder.path / second).symlink_to("../../blobs/c1b9b30e")
    return Refused((IncompleteError, NotFoundError), (second,))


@row("debpalash/VoiceStudio#1056", "causal", agrees=False)
def model_that_is_a_link_to_nothing(folder: Folder) -> Refused:
    """transformers then reads pytorch_model.bin; a person wants to know that the model is not there."""
    folder.config()
    (folder.path / "model.safetensors").symlink_to("../../blobs/c1b9b30e")
    folder.write("pytorch_model.bin", llama(2))
    return Refused((IncompleteError, NotFoundError), ("model.safetensors",))


@row("Comfy-Org/Comfy-Desktop#1322", "causal", agrees=False)
def empty_model_beside_a_torch_file(folder: Folder) -> Refused:
    """A download or conversion that has only begun."""
    folder.config()
    folder.write_bytes("model.safetensors", b"")
    folder.write("pytorch_model.bin", llama(2))
    return Refused(CorruptError, ("model.safetensors",))


# ------------------------------------------------------------------------------------------------- files beside a model

_APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4072)


@row("SceneWorks/SceneWorks#1333", "causal")
def files_of_macos_beside_a_model(folder: Folder) -> Tensors:
    """macOS writes ._model.safetensors on volumes without attributes: it is no file of weights."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write_bytes("._model.safetensors", _APPLE_DOUBLE)
    return Tensors(llama())


@row("lmstudio-ai/mlx-engine#79")
def files_of_macos_beside_a_lone_file(folder: Folder) -> Tensors:
    """They are no second candidate."""
    folder.write("weights-4bit.safetensors", llama())
    folder.write_bytes("._weights-4bit.safetensors", _APPLE_DOUBLE)
    return Tensors(llama())


@row("unslothai/unsloth#8919")
def files_of_macos_beside_numbered_files(folder: Folder) -> Tensors:
    """They are no second set."""
    for name in folder.shards(llama(), index=None):
        folder.write_bytes(f"._{name}", _APPLE_DOUBLE)
    return Tensors(llama())


@row("kohya-ss/musubi-tuner#60", "causal")
def state_of_accelerate(folder: Folder) -> Tensors:
    """save_state writes the optimizer, scheduler and random states beside the model."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write("optimizer.bin", {"state": torch.ones(2)})
    folder.write("scheduler.bin", {"last": torch.ones(2)})
    folder.write_bytes("random_states_0.pkl", b"")
    return Tensors(llama())


@row("vllm-project/vllm#373")
def arguments_of_trainer_beside_numbered_torch_files(folder: Folder) -> Tensors:
    """training_args.bin is no weights."""
    folder.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", index=None)
    torch.save({"learning_rate": 0.1}, folder.path / "training_args.bin")
    return Tensors(llama())


@row("deepspeedai/DeepSpeed#6658")
def directory_with_the_name_of_a_torch_file(folder: Folder) -> Tensors:
    """zero_to_fp32.py . pytorch_model.bin makes a directory of that name."""
    below = Folder(folder.path / "pytorch_model.bin")
    below.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    folder.opened = below.path
    return Tensors(llama())


@row("JIA-Lab-research/LISA#155", "causal", agrees=False)
def directory_above_the_one_with_the_name_of_a_torch_file(folder: Folder) -> Refused:
    """The weights lie one level down: the message says what lists them."""
    folder.config()
    Folder(folder.path / "pytorch_model.bin").shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    return Refused(NotFoundError, ("statexchange scan",), scan=("source/pytorch_model.bin",))


@row("haotian-liu/LLaVA#784", "peft")
def trained_weights_beside_an_adapter(folder: Folder) -> Tensors:
    """LLaVA's projector is in non_lora_trainables.bin; PEFT does not read it either, so it is named."""
    folder.adapter_config()
    folder.write("adapter_model.bin", lora())
    folder.write("non_lora_trainables.bin", {"base_model.model.model.mm_projector.weight": torch.ones(2)})
    return Tensors(lora(), notes=("non_lora_trainables.bin",))


@row("haotian-liu/LLaVA#852", "causal")
def projector_beside_a_model(folder: Folder) -> Tensors:
    """The index is of the model."""
    folder.config()
    folder.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    folder.write("mm_projector.bin", {"model.mm_projector.weight": torch.ones(2)})
    return Tensors(llama(), notes=("mm_projector.bin",))


@row("huggingface/transformers#31210", "causal")
def weights_of_other_frameworks(folder: Folder) -> Tensors:
    """They may be of another revision."""
    folder.config()
    folder.write("pytorch_model.bin", llama())
    folder.write_bytes("tf_model.h5", b"\x89HDF\r\n\x1a\n")
    folder.write_bytes("flax_model.msgpack", b"\x81")
    return Tensors(llama(), notes=("tf_model.h5", "flax_model.msgpack"))


@row("huggingface/optimum-intel#923", "causal")
def openvino_beside_a_model(folder: Folder) -> Tensors:
    """openvino_model.bin is no file of torch.save."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write_bytes("openvino_model.bin", bytes(64))
    folder.write_bytes("openvino_model.xml", b"<net/>")
    return Tensors(llama(), notes=("openvino_model.bin",))


@row("huggingface/optimum-intel#923", "causal", agrees=False)
def openvino_alone(folder: Folder) -> Refused:
    """Nothing here can be read: the file is named."""
    folder.config()
    folder.write_bytes("openvino_model.bin", bytes(64))
    folder.write_bytes("openvino_model.xml", b"<net/>")
    return Refused((CorruptError, UnsupportedError, NotFoundError), ("openvino_model.bin",))


@row("mzbac/mlx-llm-server#1", "causal", agrees=False)
def arrays_of_mlx_alone(folder: Folder) -> Refused:
    """Early models of MLX are weights.npz: what is there is named."""
    folder.config()
    np.savez(folder.path / "weights.npz", w=np.ones(2))
    return Refused((NotFoundError, UnsupportedError), ("weights.npz",))


@row("AutoGPTQ/AutoGPTQ#526", "causal", agrees=False)
def lone_file_of_any_name(folder: Folder) -> Tensors:
    """There is one file of weights, so it is the model."""
    folder.config()
    folder.write("gptq_model-4bit-128g.safetensors", llama())
    return Tensors(llama())


@row("huggingface/trl#86", "causal")
def value_head_in_the_file(folder: Folder) -> Tensors:
    """transformers ignores v_head; who merges for TRL wants it."""
    folder.config()
    head = {"v_head.summary.weight": torch.full((1, 12), 7.0)}
    folder.write("pytorch_model.bin", {**llama(), **head})
    return Tensors({**llama(), **head})


@row("huggingface/diffusers#12690", "causal")
def lora_of_diffusers_beside_a_model(folder: Folder) -> Tensors:
    """The LoRA is not in the model."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write("pytorch_lora_weights.safetensors", {"unet.lora.up.weight": torch.ones(2)})
    return Tensors(llama(), notes=("pytorch_lora_weights.safetensors",))


@row("kohya-ss/musubi-tuner#60")
def two_epochs_of_one_adapter(folder: Folder) -> Refused:
    """The numbers count epochs; both files have all tensors."""
    names = [f"Ag3d-{epoch:06d}.safetensors" for epoch in (1, 2)]
    for epoch, name in enumerate(names):
        folder.write(name, lora(epoch))
    return Refused(StateExchangeError, tuple(names), _NO_UNION, by_bytes=True)


@row("ml-explore/mlx-examples#812")
def steps_of_an_adapter_of_mlx(folder: Folder) -> Refused:
    """adapters.safetensors is the last, but no loader of ours knows that."""
    for save, name in enumerate(("adapters", "0000100_adapters", "0000200_adapters")):
        folder.write(f"{name}.safetensors", lora(save))
    return Refused(InvalidArgumentError, ("adapters.safetensors", "0000100_adapters.safetensors"), _NO_UNION)


@row("meta-pytorch/torchtune#2048")
def files_of_torchtune(folder: Folder) -> Tensors:
    """hf_model_0001_0.pt: the first number is the file, the second the epoch."""
    for number, part in enumerate(halves(llama()), 1):
        folder.write(f"hf_model_{number:04d}_0.pt", part)
    return Tensors(llama())


@row("meta-pytorch/torchtune#2048")
def two_epochs_of_torchtune(folder: Folder) -> Refused:
    """Two models, each of two files."""
    for epoch in (0, 1):
        for number, part in enumerate(halves(llama(epoch)), 1):
            folder.write(f"hf_model_{number:04d}_{epoch}.pt", part)
    return Refused(StateExchangeError, ("hf_model_0001_0.pt", "hf_model_0001_1.pt"), _NO_UNION)


@row("NovaSky-AI/SkyRL#603")
def files_of_two_numbers_of_ranks(folder: Folder) -> Refused:
    """A job was resumed on more ranks and saved into the same directory."""
    for ranks in (2, 4):
        for rank in range(ranks):
            folder.write(f"model_world_size_{ranks}_rank_{rank}.pt", {f"{rank}.weight": torch.full((2,), float(ranks))})
    return Refused((InvalidArgumentError, CorruptError), ("2 and 4 ranks",), _NO_UNION)


@row("vllm-project/vllm#4690")
def parts_of_one_rank(folder: Folder) -> Tensors:
    """The sharded state of vLLM for one rank: its tensors lie in two parts."""
    for part, state in enumerate(halves(llama())):
        folder.write(f"model-rank-0-part-{part}.safetensors", state)
    return Tensors(llama())


@row("vllm-project/vllm#4690")
def parts_of_two_ranks(folder: Folder) -> Refused:
    """Each rank has its slice under the same name; nothing says along which dim."""
    for rank in range(2):
        folder.write(f"model-rank-{rank}-part-0.safetensors", {QUERY: torch.full((6, 12), float(rank))})
    return Refused(StateExchangeError, (QUERY,), by_bytes=True)


@row("black-forest-labs/flux#457")
def two_parts_of_a_pipeline(folder: Folder) -> Refused:
    """The transformer and the autoencoder are two models."""
    folder.write("flux1-dev.safetensors", {"img_in.weight": torch.ones(2)})
    folder.write("ae.safetensors", {"decoder.conv_in.weight": torch.ones(2)})
    return Refused(InvalidArgumentError, ("flux1-dev.safetensors", "ae.safetensors"), _NO_UNION)


@row("huggingface/lerobot#826", "causal")
def numbered_files_without_an_index_beside_the_single_file(folder: Folder) -> Tensors:
    """from_pretrained reads model.safetensors; the others are named."""
    folder.config()
    folder.write("model.safetensors", llama())
    names = folder.shards(llama(2), index=None)
    return Tensors(llama(), notes=(names[0],))


@row("huggingface/diffusers#14769")
def torch_twin_of_a_part_of_diffusers(folder: Folder) -> Tensors:
    """diffusers reads the safetensors file; the .bin may be newer, so it is named."""
    folder.write("diffusion_pytorch_model.safetensors", llama())
    folder.write("diffusion_pytorch_model.bin", llama(2))
    return Tensors(llama(), notes=("diffusion_pytorch_model.bin",))


# ------------------------------------------------------------------------------------------------------- levels below


@row("huggingface/huggingface_hub#4487")
def directory_of_the_cache_of_the_hub(folder: Folder) -> Refused:
    """The model is below snapshots/REVISION: the message says what lists it."""
    folder.write_bytes("refs/main", b"c0ffee")
    folder.write("snapshots/c0ffee/model.safetensors", llama())
    (folder.path / "blobs").mkdir()
    return Refused(NotFoundError, ("statexchange scan",), scan=("source/snapshots/c0ffee",))


@row("huggingface/diffusers#10634")
def directory_of_a_pipeline(folder: Folder) -> Refused:
    """A pipeline is several models, each in its own directory: the message says what lists them."""
    folder.write_json("model_index.json", {"_class_name": "SanaPipeline", "vae": ["diffusers", "AutoencoderDC"]})
    for part in ("transformer", "vae"):
        folder.write(f"{part}/diffusion_pytorch_model.safetensors", {"w": torch.ones(2)})
    return Refused(NotFoundError, ("statexchange scan",), scan=("source/transformer", "source/vae"))


@row("hiyouga/LlamaFactory#9659", "causal", agrees=False)
def directory_of_checkpoints(folder: Folder) -> Refused:
    """The output of a job: its checkpoints are named."""
    folder.config()
    for step in (42, 84):
        folder.write(f"checkpoint-{step}/model.safetensors", llama(step))
    return Refused((NotFoundError, InvalidArgumentError), ("checkpoint-42", "checkpoint-84"))


@row("pytorch/torchtitan#4190")
def shards_below_the_consolidated_files(folder: Folder) -> Tensors:
    """torchtitan leaves the ranks' files in sharded/ beside what was made of them: no part of the model, but said."""
    folder.config()
    folder.shards(llama(), index=None)
    folder.write("sharded/model_0.safetensors", {"w": torch.ones(17 << 20)})
    return Tensors(llama(), merge_notes=("sharded",))


# ------------------------------------------------------------------------------------- names, metadata and configs


def _new_name(name: str) -> str:
    return name.replace("gamma", "weight").replace("beta", "bias")


@row("huggingface/transformers#11809", "bert", renamed=_new_name)
def old_names_of_layer_norms(folder: Folder) -> Tensors:
    """transformers renames gamma and beta as it loads; a merge keeps the names of the file."""
    folder.write_json("config.json", BERT)
    state = {
        "embeddings.LayerNorm.gamma": torch.full((12,), 3.0),
        "embeddings.LayerNorm.beta": torch.full((12,), 4.0),
        "embeddings.word_embeddings.weight": torch.full((30, 12), 5.0),
    }
    folder.write("pytorch_model.bin", state)
    return Tensors(state)


@row("huggingface/transformers#217", "causal", renamed=lambda name: name if name == HEAD else f"model.{name}")
def names_of_the_model_without_its_head(folder: Folder) -> Tensors:
    """The base model's names lack its prefix; transformers adds it."""
    folder.config()
    state = {name.removeprefix("model."): tensor for name, tensor in llama().items()}
    folder.write("model.safetensors", state)
    return Tensors(state)


@row("huggingface/transformers#34759", "causal", agrees=False)
def tied_weight_under_the_name_of_the_head(folder: Folder) -> Tensors:
    """The file has lm_head.weight alone, and the config says that they are tied."""
    folder.config(tie_word_embeddings=True)
    state = {name: tensor for name, tensor in llama().items() if name != EMBED}
    folder.write("model.safetensors", state)
    return Tensors(state)


@row("ml-explore/mlx#743", "merged")
def file_without_metadata(folder: Folder) -> Tensors:
    """Some loaders want the format in the metadata; what is merged has it."""
    folder.config()
    folder.write("model.safetensors", llama(), metadata={})
    return Tensors(llama())


@row("huggingface/transformers#29335", "merged")
def file_of_mlx(folder: Folder) -> Tensors:
    """The format in the metadata is mlx; the tensors are as any other's."""
    folder.config()
    folder.write("model.safetensors", llama(), metadata={"format": "mlx"})
    return Tensors(llama())


@row("foundation-model-stack/fastsafetensors#96", "merged")
def file_with_empty_metadata(folder: Folder) -> Tensors:
    """The header has "__metadata__": {}."""
    folder.config()
    folder.write("model.safetensors", llama())
    data = (folder.path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8 : 8 + length]), "__metadata__": {}}).encode()
    header += b" " * (-len(header) % 8)
    folder.write_bytes("model.safetensors", len(header).to_bytes(8, "little") + header + data[8 + length :])
    return Tensors(llama())


@row("hiyouga/LlamaFactory#1097", "peft")
def two_files_of_an_adapter(folder: Folder) -> Tensors:
    """PEFT takes the safetensors file."""
    folder.adapter_config()
    folder.write("adapter_model.bin", lora(2))
    folder.write("adapter_model.safetensors", lora())
    return Tensors(lora(), notes=("adapter_model.bin",))


@row("h2oai/h2ogpt#217", "peft", agrees=False)
def adapter_without_tensors(folder: Folder) -> Refused:
    """A save that gathered nothing: a file of 443 bytes."""
    folder.adapter_config()
    folder.write("adapter_model.bin", {})
    return Refused(StateExchangeError, ("no tensor",), by_bytes=True)


@row("huggingface/peft#276", "peft", agrees=False)
def adapter_of_another_rank_than_its_config(folder: Folder) -> Tensors:
    """The tensors decide; PEFT will refuse them, so both ranks are said."""
    folder.adapter_config(r=8)
    folder.write("adapter_model.safetensors", lora(rank=2))
    return Tensors(lora(rank=2), merge_notes=("adapter_config.json", "8"))


@row("redai-studio/Relax#262", "peft", agrees=False)
def adapter_without_the_prefix_of_peft(folder: Folder) -> Tensors:
    """PEFT loads it without an error and leaves each lora_B zero: the prefix that is missing is named."""
    folder.adapter_config()
    state = {name.removeprefix("base_model.model."): tensor for name, tensor in lora().items()}
    folder.write("adapter_model.safetensors", state)
    return Tensors(state, merge_notes=("base_model.model.",))


@row("huggingface/peft#1457", "peft")
def adapter_with_the_embedding(folder: Folder) -> Tensors:
    """save_embedding_layers writes the whole embedding into the adapter."""
    folder.adapter_config()
    state = {**lora(), f"base_model.model.{EMBED}": torch.full((30, 12), 7.0)}
    folder.write("adapter_model.safetensors", state)
    return Tensors(state)


@row("NVIDIA-NeMo/Automodel#2096", "causal", agrees=False)
def layers_of_one_stage(folder: Folder) -> Tensors:
    """A rank of a pipeline saved its own layers; transformers makes the others at random."""
    folder.config(num_hidden_layers=2)
    state = {name: tensor for name, tensor in llama().items() if name not in (HEAD, NORM)}
    folder.write("model.safetensors", state)
    return Tensors(state, merge_notes=("num_hidden_layers",))


@row("huggingface/transformers#38152", "causal", agrees=False)
def config_that_names_the_file(folder: Folder) -> Tensors:
    """transformers 5 reads the file that config.json names; ours is another one, so that is said."""
    folder.config(transformers_weights="other.safetensors")
    folder.write("model.safetensors", llama())
    folder.write("other.safetensors", llama(2))
    return Tensors(llama(), notes=("other.safetensors",), merge_notes=("transformers_weights",))


# ----------------------------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program for a directory: its tensors or its error, and its output."""

    state: State | None
    error: BaseException | None
    text: str = ""

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {' '.join(str(self.error).split())}"
        assert self.state is not None
        return f"{len(self.state)} tensors{'; ' if self.text else ''}{' '.join(self.text.split())}"


@dataclass(frozen=True)
class Result:
    """The outcomes of a row, and what is not as it was wanted."""

    ours: Outcome
    peer: Outcome | None
    comparison: str
    faults: list[str]


def merged(path: Path, target: Path) -> tuple[State, str]:
    """Merge; return the tensors of the output, with the tied ones, and the notes."""
    report = sx.merge_checkpoint(path, target)
    state: State = {}
    for name, _ in report.files:
        state.update(load_file(target / name))
    for alias, name in report.aliases.items():
        state[alias] = state[name]
    return state, "\n".join(report.notes)


def opened(path: Path) -> tuple[State, str]:
    """Return the tensors that `open_checkpoint` reads."""
    with sx.open_checkpoint(path) as checkpoint:
        return {name: checkpoint[name].read(framework="pt") for name in checkpoint}, ""


def printed(command: str, path: Path) -> str:
    """Return what a command prints."""
    from statexchange.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
        main([command, str(path)])
    return output.getvalue()


def differences(wanted: State, state: State) -> list[str]:
    """Return the names whose tensors differ in dtype, shape or bits, or that only one of the two has."""
    differing = sorted(wanted.keys() ^ state.keys())
    for name in sorted(wanted.keys() & state.keys()):
        if wanted[name].dtype != state[name].dtype or not torch.equal(wanted[name], state[name]):
            differing.append(name)
    return differing


@contextlib.contextmanager
def quiet_peer() -> Iterator[None]:
    """Silence the logs and warnings of transformers and PEFT."""
    import transformers

    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def from_pretrained(path: Path, peer: str = "causal") -> tuple[State, str]:
    """Return the tensors that transformers or PEFT has read, and the names of those that it made at random."""
    kind, _, variant = peer.partition(":")
    if kind == "peft":
        return _from_peft(path)
    from transformers import AutoModel, AutoModelForCausalLM

    loader = AutoModel if kind == "bert" else AutoModelForCausalLM
    options = {"variant": variant} if variant else {}
    with quiet_peer():
        model, info = loader.from_pretrained(path, output_loading_info=True, dtype="auto", **options)
    random = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in random}
    return state, f"random: {', '.join(sorted(random))}" if random else ""


def _from_peft(path: Path) -> tuple[State, str]:
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    with quiet_peer():
        base = LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": 1}))
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        state = PeftModel.from_pretrained(base, path).state_dict()
    read = {}
    for name, tensor in state.items():
        plain = name.replace(".default.", ".").replace(".base_layer.", ".")
        unchanged = before.get(plain.removeprefix("base_model.model."))
        if unchanged is None or not torch.equal(unchanged, tensor):
            read[plain] = tensor
    return read, ""


def outcome(program: Callable[[], tuple[State, str]]) -> Outcome:
    """Run a program and return its outcome; any error is one."""
    try:
        state, text = program()
    except Exception as error:  # noqa: BLE001 - the table shows whatever a program raises
        return Outcome(None, error)
    return Outcome(state, None, text)


def compared(ours: Outcome, peer: Outcome, renamed: Callable[[str], str] = str) -> str:
    """Say how the outcome of a peer compares with ours; it begins with "same" if the tensors of both are equal."""
    if peer.state is None or ours.state is None:
        return "an error" if peer.state is None else "reads it"
    state = {renamed(name): tensor for name, tensor in ours.state.items()}
    both = [name for name in peer.state if name in state]
    differing = [name for name in both if not torch.equal(state[name], peer.state[name].to(state[name].dtype))]
    if differing:
        return f"differs in {', '.join(differing[:3])}"
    more = [name for name in peer.state if name not in state]
    lacks = [name for name in state if name not in peer.state]
    word = f"has {', '.join(more[:3])}, too" if more else "same"
    return f"{word}, without {', '.join(lacks[:2])}" if lacks else word


def _faults_of_refusal(wanted: Refused, ours: Outcome, path: Path) -> list[str]:
    if not isinstance(ours.error, wanted.error):
        return [f"not refused as wanted, but: {ours}"]
    said = {"merge": str(ours.error), "verify": printed("verify", path)}
    if not wanted.by_bytes:
        said["info"] = printed("info", path)
    faults = []
    for command, text in said.items():
        faults += [f"{command} does not say {word!r}: {text}" for word in wanted.words if word not in text]
        faults += [f"{command} says {word!r}: {text}" for word in wanted.lacks if word in text]
    if wanted.scan:
        text = printed("scan", path)
        faults += [f"scan does not list {word!r}: {text}" for word in wanted.scan if word not in text]
    return faults


def _faults_of_tensors(wanted: Tensors, ours: Outcome, path: Path) -> list[str]:
    if ours.state is None:
        return [f"refused: {ours}"]
    faults = [f"merge: tensor {name}" for name in differences(wanted.state, ours.state)]
    by_opening = outcome(lambda: opened(path))
    if by_opening.state is None:
        faults.append(f"open_checkpoint: {by_opening}")
    else:
        faults += [f"open_checkpoint: tensor {name}" for name in differences(wanted.state, by_opening.state)]
    said = {"merge": ours.text, "info": printed("info", path), "verify": printed("verify", path)}
    for command, text in said.items():
        faults += [f"{command} does not say {word!r}: {text}" for word in wanted.notes if word not in text]
    faults += [f"merge does not say {word!r}: {ours.text}" for word in wanted.merge_notes if word not in ours.text]
    return faults


def run(entry: Row, directory: Path) -> Result:
    """Make the directory of a row, and return what statexchange and the peer do with it."""
    folder, target = Folder(directory / "source"), directory / "out"
    folder.path.mkdir()
    wanted = entry.make(folder)
    path = folder.opened or folder.path
    ours = outcome(lambda: merged(path, target))
    is_refusal = isinstance(wanted, Refused)
    faults = _faults_of_refusal(wanted, ours, path) if is_refusal else _faults_of_tensors(wanted, ours, path)
    if not entry.peer:
        return Result(ours, None, "", faults)
    peer_path, peer_name = (target, "causal") if entry.peer == "merged" else (path, entry.peer)
    peer = outcome(lambda: from_pretrained(peer_path, peer_name))
    comparison = compared(ours, peer, entry.renamed)
    if entry.agrees and not comparison.startswith("same"):
        faults.append(f"{entry.peer} {comparison}: {peer}")
    return Result(ours, peer, comparison, faults)


def main() -> None:
    """Print the table with both outcomes."""
    for name, entry in ROWS.items():
        with tempfile.TemporaryDirectory() as directory:
            result = run(entry, Path(directory))
            print(f"{name} ({entry.origin}): {'NOT as wanted' if result.faults else 'as wanted'}")
            print(f"  statexchange: {str(result.ours).replace(directory, '')[:200]}")
            if result.peer is not None:
                print(f"  {entry.peer}: {result.comparison}: {str(result.peer).replace(directory, '')[:160]}")
            for fault in result.faults:
                print(f"  FAULT: {' '.join(fault.replace(directory, '').split())[:300]}")


if __name__ == "__main__":
    main()
