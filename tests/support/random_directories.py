"""Random directories of a tiny Llama, drawn from a seed, and their comparison with what transformers and PEFT read.

A directory has a model in one of the forms that programs write, and up to three other things: another save, a variant,
an adapter, stale or missing shards, a wrong config, tensors that are twice in it or nowhere. The values of a tensor say
of which save it is. A fault is a difference from the peer, or a tensor of another save, that no note names.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from model_directories import Outcome, differences, from_pretrained, merged, outcome
from model_rows import BIN_INDEX, EMBED, HEAD, INDEX, Folder, State, llama, lora
from safetensors.torch import load_file

from statexchange.errors import StateExchangeError

STALE = 100
"""Added to the save of a value that an index does not mean."""

_TORCH_NUMBERED = "pytorch_model-{:05d}-of-{:05d}.bin"


@dataclass
class Drawing:
    """A directory that is being drawn.

    Attributes:
        random: the source of all choices.
        folder: where files are written.
        config: the changes of config.json; None for no such file.
        steps: the names of what was drawn.
        saves: the number of saves so far.
    """

    random: random.Random
    folder: Folder
    config: dict[str, object] | None = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    saves: int = 0

    def draw(self, choices: list[Callable[[Drawing], None]]) -> None:
        choice = self.random.choice(choices)
        self.steps.append(choice.__name__.lstrip("_"))
        choice(self)

    def state(self) -> State:
        """Return the tensors of a new save: some are left out or have another dtype, others are not the model's."""
        self.saves += 1
        state = llama(self.saves)
        kind = self.random.random()
        if kind < 0.15:
            del state[HEAD]
        elif kind < 0.25:
            for name in self.random.sample(sorted(state), 2):
                del state[name]
        elif kind < 0.4:
            state[f"mtp.{self.saves}.weight"] = torch.full((3,), float(self.saves))
        elif kind < 0.5:
            state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        elif kind < 0.55:
            state = {f"module.{name}": tensor for name, tensor in state.items()}
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        if self.random.random() < 0.25:
            state = {name: tensor.to(self.random.choice(dtypes)) for name, tensor in state.items()}
        return state

    def write_shards(self, pattern: str, index: str | None) -> dict[str, State]:
        """Write a new save as two or three numbered files."""
        total = self.random.choice([2, 3])
        state = self.state()
        parts: dict[str, State] = {pattern.format(number, total): {} for number in range(1, total + 1)}
        for name, tensor in state.items():
            parts[self.random.choice(sorted(parts))][name] = tensor
        for file, part in parts.items():
            self.folder.write(file, part)
        if index is not None:
            self.folder.index(index, parts)
        return parts


# ------------------------------------------------------------------------------------------------ forms of a model


def _single(drawing: Drawing) -> None:
    drawing.folder.write("model.safetensors", drawing.state())


def _single_torch(drawing: Drawing) -> None:
    drawing.folder.write("pytorch_model.bin", drawing.state())


def _indexed(drawing: Drawing) -> None:
    drawing.write_shards("model-{:05d}-of-{:05d}.safetensors", INDEX)


def _indexed_torch(drawing: Drawing) -> None:
    drawing.write_shards(_TORCH_NUMBERED, BIN_INDEX)


def _numbered(drawing: Drawing) -> None:
    drawing.write_shards("model-{:05d}-of-{:05d}.safetensors", None)


def _numbered_torch(drawing: Drawing) -> None:
    drawing.write_shards(_TORCH_NUMBERED, None)


def _other_name(drawing: Drawing) -> None:
    name = drawing.random.choice(
        ["weights.safetensors", "consolidated.safetensors", "gptq_model-4bit-128g.safetensors"]
    )
    drawing.folder.write(name, drawing.state())


def _variant(drawing: Drawing) -> None:
    drawing.folder.write("model.fp16.safetensors", drawing.state())


def _indexed_variant(drawing: Drawing) -> None:
    drawing.write_shards("model.fp16-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.fp16.json")


def _adapter(drawing: Drawing) -> None:
    drawing.saves += 1
    suffix = drawing.random.choice(["safetensors", "bin"])
    drawing.folder.write(f"adapter_model.{suffix}", lora(drawing.saves))
    if drawing.random.random() < 0.5:
        drawing.folder.adapter_config(base_model_name_or_path=None)


# ------------------------------------------------------------------------------------------------------ what is wrong


def _shards_on_disk(drawing: Drawing) -> list[Path]:
    return sorted(drawing.folder.path.glob("*-of-*"))


def _form(path: Path) -> str:
    """Return the name of a shard without its number: that of its set."""
    return re.sub("[0-9]+-of", "of", path.name)


def _missing_shard(drawing: Drawing) -> None:
    shards = _shards_on_disk(drawing)
    if shards:
        drawing.random.choice(shards).unlink()


def _tensor_in_a_second_file(drawing: Drawing) -> None:
    """Copy a tensor of one shard into another, with the same or with an older value."""
    shards = _shards_on_disk(drawing)
    if not shards:
        return
    source = drawing.random.choice(shards)
    others = [path for path in shards if path != source and _form(path) == _form(source)]
    if not others:
        return
    target = drawing.random.choice(others)
    tensors = _load(source)
    if not tensors:
        return
    name = drawing.random.choice(sorted(tensors))
    older = STALE if drawing.random.random() < 0.7 else 0
    drawing.folder.write(target.name, {**_load(target), name: tensors[name] + older})


def _tensor_that_no_index_lists(drawing: Drawing) -> None:
    shards = _shards_on_disk(drawing)
    if shards:
        path = drawing.random.choice(shards)
        drawing.folder.write(path.name, {**_load(path), "unlisted.weight": torch.full((3,), float(drawing.saves))})


def _index_with_a_wrong_file(drawing: Drawing) -> None:
    for name in (INDEX, BIN_INDEX):
        path = drawing.folder.path / name
        if path.exists():
            content = json.loads(path.read_text())
            files = sorted({*content["weight_map"].values()})
            if content["weight_map"]:
                content["weight_map"][drawing.random.choice(sorted(content["weight_map"]))] = drawing.random.choice(
                    files
                )
            path.write_text(json.dumps(content))


def _other_config(drawing: Drawing) -> None:
    changes: list[dict[str, object]] = [
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 2},
        {"vocab_size": 31},
        {"hidden_size": 24},
    ]
    if drawing.config is not None:
        drawing.config.update(drawing.random.choice(changes))


def _no_config(drawing: Drawing) -> None:
    drawing.config = None


def _files_of_others(drawing: Drawing) -> None:
    folder = drawing.folder
    for name in drawing.random.sample(
        ["tf_model.h5", "model.gguf", "old.ckpt", "._model.safetensors", "README.md", "model.onnx"], 2
    ):
        folder.write_bytes(name, b"\x00\x05\x16\x07" + bytes(60))


def _job_files(drawing: Drawing) -> None:
    torch.save({"learning_rate": 0.1}, drawing.folder.path / "training_args.bin")


def _below(drawing: Drawing) -> None:
    drawing.folder.write("original/model.safetensors", drawing.state())


_FORMS = [
    _single,
    _single_torch,
    _indexed,
    _indexed,
    _indexed,
    _indexed_torch,
    _numbered,
    _numbered_torch,
    _other_name,
    _adapter,
]
_MORE = [
    *_FORMS,
    _variant,
    _indexed_variant,
    _missing_shard,
    _tensor_in_a_second_file,
    _tensor_in_a_second_file,
    _tensor_that_no_index_lists,
    _index_with_a_wrong_file,
    _other_config,
    _other_config,
    _no_config,
    _files_of_others,
    _job_files,
    _below,
]


def _load(path: Path) -> State:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def draw(seed: int, path: Path) -> list[str]:
    """Write the directory of a seed; return the names of what is in it."""
    drawing = Drawing(random.Random(seed), Folder(path))
    path.mkdir()
    drawing.draw(_FORMS)
    for _ in range(drawing.random.choice([0, 1, 1, 2, 2, 3])):
        drawing.draw(_MORE)
    if drawing.config is not None:
        drawing.folder.config(**drawing.config)
    return drawing.steps


# ----------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Comparison:
    """The outcome of a directory: a word for the statistics, and the faults."""

    word: str
    faults: list[str]


def compare(path: Path, target: Path) -> Comparison:
    """Compare a merge of a directory with the rule, and with what transformers or PEFT reads of it and of the merge."""
    ours = outcome(lambda: merged(path, target))
    if ours.state is None:
        is_named = isinstance(ours.error, StateExchangeError) and (ours.error.path or ours.error.name)
        return Comparison("refused", [] if is_named else [f"an error without a name: {ours}"])
    faults = _unions(ours.state) + _faults_by_the_rule(path, ours.state)
    kind = "peft" if any(name.startswith("base_model.") for name in ours.state) else "causal"
    peer = outcome(lambda: from_pretrained(path, kind))
    again = outcome(lambda: from_pretrained(target, kind))
    if again.state:
        faults += [f"merged: {fault}" for fault in _differences(Outcome(ours.state, None), again)]
    if not peer.state:  # an error, or no tensor has a name that it knows
        return Comparison("read, not by the peer", faults)
    faults += _differences(ours, peer)
    if not again.state:
        faults.append(f"the peer does not read what was merged: {again}")
    return Comparison("read by both", faults)


def _unions(state: State) -> list[str]:
    saves = {int(tensor.flatten()[0]) % STALE for tensor in state.values()}
    return [f"a union of saves {sorted(saves)}"] if len(saves) > 1 else []


def _faults_by_the_rule(path: Path, state: State) -> list[str]:
    """Return the differences from the first of the files and indexes that transformers and PEFT know by name."""
    for name in ("model.safetensors", INDEX, "pytorch_model.bin", BIN_INDEX, "adapter_model.safetensors"):
        if not (path / name).exists():
            continue
        if not name.endswith(".index.json"):
            wanted = _load(path / name)
        else:
            weight_map = json.loads((path / name).read_text())["weight_map"]
            present = {file: _load(path / file) for file in set(weight_map.values()) if (path / file).exists()}
            lost = [tensor for tensor, file in weight_map.items() if tensor not in present.get(file, {})]
            if lost:
                return [f"read, although {name} lists what is not there: {lost[0]}"]
            wanted = {tensor: present[file][tensor] for tensor, file in weight_map.items()}
        if all(tensor.startswith("module.") for tensor in wanted):
            wanted = {tensor.removeprefix("module."): value for tensor, value in wanted.items()}
        return [f"not as in {name}: {tensor}" for tensor in differences(wanted, state)]
    return []


def _differences(ours: Outcome, peer: Outcome) -> list[str]:
    """Return the differences from a peer that no note names."""
    assert ours.state is not None
    assert peer.state is not None
    faults = []
    for peer_name, tensor in peer.state.items():
        if not _is_of_a_file(peer_name, tensor):
            continue
        name = peer_name.replace(".base_layer.", ".")
        candidates = (name, name.removeprefix("model."), f"model.{name}")
        own = next((candidate for candidate in candidates if candidate in ours.state), None)
        if own is None:
            # An adapter beside the model is loaded into it, by transformers; a tied tensor is in no file.
            is_named = name in ours.text or (".lora_" in name and "adapter_model" in ours.text)
            is_tied = name in (EMBED, HEAD) and torch.equal(peer.state[EMBED], peer.state.get(HEAD, tensor))
            if not is_named and not is_tied:
                faults.append(f"the peer has {name}, and no note names it")
        elif not torch.equal(ours.state[own].to(tensor.dtype), tensor) and own not in ours.text:
            values = float(ours.state[own].flatten()[0]), float(tensor.flatten()[0])
            faults.append(f"{name} is {values[0]}, by the peer {values[1]}")
    return faults


def _is_of_a_file(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is filled with one number, as those in the files are, and is not made by a norm's constructor.

    What transformers says of the tensors that it made is incomplete if it has loaded an adapter, too.
    """
    first = tensor.flatten()[0]
    return bool((tensor == first).all()) and not ("norm" in name and float(first) == 1)
