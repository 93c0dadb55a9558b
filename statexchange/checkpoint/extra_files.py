"""Read the extra files of a published checkpoint, such as its config and tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from statexchange.checkpoint.index import index_name, single_file_name
from statexchange.conversions.choice import conversion_of
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    ReplacedError,
    StateExchangeError,
    excerpt,
    without_secrets,
)
from statexchange.formats.config_check import ADAPTER_CONFIG, CONFIG, is_adapter
from statexchange.formats.huggingface import MANIFEST
from statexchange.sharding.options import FLOATS
from statexchange.storage.budget import Budget
from statexchange.storage.json_text import parse_json
from statexchange.storage.opened_path import OpenedPath, open_path
from statexchange.storage.store import resolve_path
from statexchange.tensors import LONG_NAMES

if TYPE_CHECKING:
    from statexchange.formats.source import Source
    from statexchange.sharding.plan import Plan

__all__ = [
    "FilesFrom",
    "extra_files",
    "given_config",
    "notes_on_empty_directories",
    "notes_on_foreign_names",
    "notes_on_missing_files",
    "own_files",
]

FilesFrom = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | bytes] | None

_VERL_DIRECTORY = "huggingface"
_TRANSFORMERS_NAMES = re.compile(r"(^|[._])embed|(^|\.)lm_head\.|(^|\.)(layers?|h|blocks?)\.[0-9]+\.")
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5, and of older versions
# Files of a directory that do not belong to a model: weights, indexes, manifests, hidden files and what a training job
# keeps beside them (Trainer, DeepSpeed and verl).
_NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|gguf|onnx|h5|pkl|msgpack|npz|index\.json|log)|statexchange\.json|\..*|"
    r"trainer_state\.json|(all|train|eval|test|predict)_results\.json|latest|latest_universal|zero_to_(fp32|torch)\.py|"
    r"latest_checkpointed_iteration\.txt|fsdp_config\.json|lora_train_meta\.json|events\.out\.tfevents.*"
)


def extra_files(
    files_from: FilesFrom, plan: Plan, own: Mapping[str, bytes] | None = None, *, updates_dtype: bool = False
) -> dict[str, bytes]:
    """Return the content of each extra file by name.

    Args:
        files_from: a directory, of which the small files of a model are taken; paths of files; or a mapping of names to
            contents.
        plan: the checkpoint's plan.
        own: files of the model itself, by name; those of `files_from` take precedence.
        updates_dtype: write the dtype of the plan's tensors into the model's own config.json.

    Raises:
        InvalidArgumentError: a name is not a plain file name, occurs twice, or is a file of the checkpoint itself.
    """
    files = dict(own or {})
    if updates_dtype and CONFIG in files:
        files[CONFIG] = _with_dtype(files[CONFIG], plan)
    return files | _given_files(files_from, plan)


def _given_files(files_from: FilesFrom, plan: Plan) -> dict[str, bytes]:
    if files_from is None:
        return {}
    reserved = {MANIFEST, index_name(plan), *(file.name for file in plan.files), single_file_name(plan)}
    contents: dict[str, bytes] = {}
    for name, data in _read_files(files_from):
        if name in contents:
            raise InvalidArgumentError(f"files_from gives the file name {name!r} twice")
        is_plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
        if name in reserved or not is_plain or name.startswith(".statexchange"):
            raise InvalidArgumentError(
                f"files_from: {name!r} is not a plain file name, or is one that the checkpoint itself writes"
            )
        contents[name] = data
    return contents


def given_config(files_from: FilesFrom) -> bytes | None:
    """Return the config.json among the files of the option `files_from`; None if there is none."""
    if files_from is None:
        return None
    return next((data for name, data in _read_files(files_from) if name == CONFIG), None)


def notes_on_empty_directories(files_from: FilesFrom) -> tuple[str, ...]:
    """Return a note for each directory among `files_from` in which there is nothing to take."""
    notes = []
    for path in [] if files_from is None or isinstance(files_from, Mapping) else _paths(files_from):
        with open_path(resolve_path(path, "a path of files_from")) as opened:
            if opened.file is None and all(map(_NOT_COPIED.fullmatch, opened.names)):
                shown = without_secrets(opened.path)
                text = f"files_from: nothing is taken from {shown}, which has no config, tokenizer or other such file"
                if _has_files_below(opened):
                    text += f" itself; its subdirectory {_VERL_DIRECTORY} has them"
                notes.append(text)
    return tuple(notes)


def _has_files_below(opened: OpenedPath) -> bool:
    """Whether the files are in the subdirectory in which verl keeps them."""
    store = opened.store
    return _VERL_DIRECTORY in store.directories and CONFIG in store.below(_VERL_DIRECTORY).files


def own_files(source: Source) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the extra files of a source that is a Hugging Face directory, and notes about those that cannot be read.

    A directory of torch.save files, or of DeepSpeed's steps, counts as one if it has a config.json. So does the
    subdirectory of config and tokenizer that a training framework writes.
    """
    opened = source.opened
    store = source.small_files
    if store is None:
        store = opened.store
        if opened.file is not None or source.kind not in ("huggingface", "torch", "deepspeed"):
            return {}, ()
        if source.kind != "huggingface" and CONFIG not in store.files:
            return {}, ()
    files: dict[str, bytes] = {}
    notes = []
    for name in store.files:
        if not _NOT_COPIED.fullmatch(name):
            try:
                files[name] = store.read_small(name)
            except ReplacedError:
                raise
            except StateExchangeError as error:
                notes.append(f"not copied: {error}")
    return files, tuple(notes)


def notes_on_missing_files(plan: Plan, extra: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return a note if the config is missing without which transformers loads no model, or PEFT no adapter.

    Only if tensors have names as in transformers' models: others need no config.
    """
    if extra.keys() & {CONFIG, ADAPTER_CONFIG}:
        return ()
    names = [tensor.name for file in plan.files for tensor in file.tensors]
    if not any(map(_TRANSFORMERS_NAMES.search, names)):
        return ()
    program, missing = "transformers", CONFIG
    if is_adapter(names):
        program, missing = "PEFT", ADAPTER_CONFIG
    return (f"no {missing}: {program} will not load this directory; give one by files_from (--files-from)",)


def notes_on_foreign_names(plan: Plan) -> tuple[str, ...]:
    """Return a note if a built-in conversion to names of transformers has a rule for the name of every tensor."""
    known = conversion_of([tensor.name for file in plan.files for tensor in file.tensors])
    if known is None:
        return ()
    option = f'convert="{known}" (--convert {known})'
    return (f"transformers does not know these names: {option} writes the names and values that it knows",)


def _with_dtype(config: bytes, plan: Plan) -> bytes:
    """Return a config.json with the floating dtype that most bytes of the plan have; unchanged if it is broken."""
    nbytes: Counter[str] = Counter()
    for file in plan.files:
        for tensor in file.tensors:
            if tensor.dtype in FLOATS:
                nbytes[tensor.dtype] += tensor.nbytes
    try:
        parsed = parse_json(config, CONFIG, Budget(CONFIG))
    except CorruptError:
        return config
    if not nbytes or not isinstance(parsed, dict):
        return config
    dtype = LONG_NAMES[max(nbytes, key=nbytes.__getitem__)]
    if not any(key in parsed for key in _DTYPE_KEYS):
        parsed[_DTYPE_KEYS[0]] = dtype
    _set_dtype(parsed, dtype)
    return (json.dumps(parsed, indent=2) + "\n").encode()


def _set_dtype(config: dict[str, object], dtype: str) -> None:
    """Set the dtype in a config and in the configs of its parts, such as text_config, where they have one."""
    for key, value in config.items():
        if key in _DTYPE_KEYS and value is not None:
            config[key] = dtype
        elif key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            _set_dtype(value, dtype)


def _read_files(files_from: FilesFrom) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each extra file."""
    if isinstance(files_from, Mapping):
        for name, text in files_from.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"files_from: {excerpt(name)} is not a plain file name")
            if not isinstance(text, str | bytes):
                raise InvalidArgumentError(f"files_from[{name!r}] must be str or bytes, not {type(text).__name__}")
            yield name, text.encode() if isinstance(text, str) else text
        return
    for path in _paths(files_from):
        with open_path(resolve_path(path, "a path of files_from")) as opened:
            names = opened.names
            if opened.file is None:
                names = [name for name in names if not _NOT_COPIED.fullmatch(name)]
            for name in names:
                yield name, opened.store.read_small(name)


def _paths(files_from: FilesFrom) -> Sequence[str | os.PathLike[str]]:
    """Return the paths of the option; raise InvalidArgumentError for anything else."""
    paths = [files_from] if isinstance(files_from, str | os.PathLike) else files_from
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise InvalidArgumentError(
            f"files_from must be a path, a list of paths or a mapping of names to text, not {excerpt(files_from)}"
        )
    return paths
