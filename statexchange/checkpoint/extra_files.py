"""Choose and read the extra files of a published checkpoint, such as its config and tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from statexchange.checkpoint.publication import index_name, single_file_name
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    ReplacedError,
    StateExchangeError,
    UnsafeError,
    excerpt,
    without_secrets,
)
from statexchange.formats.box_digests import DIGESTS
from statexchange.formats.model_files import ADAPTER_CONFIG, CONFIG, MANIFEST
from statexchange.formats.source import KINDS_BESIDE_CONFIGS, WEIGHT_SUFFIXES, abbreviated_list
from statexchange.sharding.options import FLOATS, FilesFrom
from statexchange.storage.location import open_path, parse_json, resolve_path
from statexchange.storage.store import Budget
from statexchange.tensors import LONG_NAMES
from statexchange.units import format_bytes

if TYPE_CHECKING:
    from statexchange.formats.source import Source
    from statexchange.sharding.plan import Plan
    from statexchange.storage.store import Store, StoredFile

# Small files are read into memory whole. What is larger is no config or tokenizer, and is named in a note.
_MAX_BYTES = 64 << 20  # of a file, and of all files in subdirectories
_MAX_DEPTH, _MAX_ENTRIES = 3, 1000  # of subdirectories
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5, and of older versions
# Files of a directory that do not belong to a model: weights, indexes, manifests, hidden files and what a training job
# keeps beside them (Trainer, DeepSpeed and verl).
_NOT_COPIED = re.compile(
    rf".*({'|'.join(map(re.escape, WEIGHT_SUFFIXES))}|\.distcp|\.pkl|\.log|\.index\.(.+\.)?json)|"
    r"statexchange\.(json|digests)|\..*|"
    r"trainer_state\.json|(all|train|eval|test|predict)_results\.json|latest|latest_universal|zero_to_(fp32|torch)\.py|"
    r"latest_checkpointed_iteration\.txt|fsdp_config\.json|lora_train_meta\.json|events\.out\.tfevents.*"
)

# Directories that a training job keeps beside a model.
_OF_JOB = re.compile(
    r"(checkpoint|step)-[0-9]+|global_step[0-9]*|(pytorch_model_fsdp|optimizer|dataloader)_[0-9]+|iter_[0-9]+|"
    r"mp_rank_.*|runs?|logs?|wandb|mlruns|tensorboard"
)


def extra_files(
    caller_files: Mapping[str, bytes], plan: Plan, model_files: Mapping[str, bytes], *, updates_dtype: bool
) -> dict[str, bytes]:
    """Return the content of each extra file by its name, or by its path below the checkpoint.

    Args:
        caller_files: the files of the option `files_from`.
        plan: the checkpoint's plan.
        model_files: files of the model itself, by name; those of `caller_files` take precedence.
        updates_dtype: write the dtype of the plan's tensors into the model's own config.json.

    Raises:
        InvalidArgumentError: a name is not a plain file name, or is a file of the checkpoint itself.
    """
    files = dict(model_files)
    # A config that the caller gives is written as it is: the caller may want another dtype at inference.
    if updates_dtype and CONFIG in files:
        files[CONFIG] = _with_dtype(files[CONFIG], plan)
    # The single file's name, too, if there are several files: readers would take it for the whole model.
    reserved = {"", ".", "..", MANIFEST, DIGESTS, index_name(plan), single_file_name(plan)}
    reserved.update(file.name for file in plan.files)
    for name in caller_files:
        # At a URL the claim of a publisher has a name of this kind (storage/publish/claim.py).
        if name in reserved or "\0" in name or name.startswith(".statexchange"):
            raise InvalidArgumentError(
                f"files_from: {name!r} is not a plain file name, or is one that the checkpoint itself writes"
            )
    return {**files, **caller_files}


class CallerFiles(NamedTuple):
    """The files of the option `files_from`: contents by name, and a note on each directory with nothing to take."""

    contents: Mapping[str, bytes]
    notes: tuple[str, ...] = ()

    def config(self, model_files: Mapping[str, bytes] = {}) -> bytes | None:
        """Return the config.json among them, else that among the model's own files."""
        return self.contents.get(CONFIG, model_files.get(CONFIG))


def read_caller_files(files_from: FilesFrom) -> CallerFiles:
    """Read the files of the option `files_from`.

    Args:
        files_from: a directory, of which the small files of a model are taken; paths of files; or a mapping of names to
            contents.

    Raises:
        InvalidArgumentError: it is anything else, or gives a name twice.
    """
    if files_from is None:
        return CallerFiles({})
    if isinstance(files_from, Mapping):
        return CallerFiles(_checked_files(files_from))
    paths = files_from
    if isinstance(files_from, str | os.PathLike):
        paths = [files_from]
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise InvalidArgumentError(
            f"files_from must be a path, a list of paths or a mapping of names to text, not {excerpt(files_from)}"
        )
    contents: dict[str, bytes] = {}
    notes = []
    for path in paths:
        with open_path(resolve_path(path, "a path of files_from")) as opened:
            store = opened.store
            if opened.file is not None:
                files = {opened.file: store.open(opened.file)}
            else:
                files, _ = _choose(store)
                # Other files may be left out, but the config decides what is written.
                if CONFIG in store.listing and CONFIG not in files:
                    store.open(CONFIG)
            for name, file in files.items():
                if name in contents:
                    raise InvalidArgumentError(f"files_from gives the file name {name!r} twice")
                contents[name] = file.read_all()
            if not files:
                shown = without_secrets(opened.path)
                notes.append(
                    f"files_from: nothing is taken from {shown}: it has no config, tokenizer or other such file"
                )
    return CallerFiles(contents, tuple(notes))


def _checked_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Return files that the caller gives as contents by name."""
    contents = {}
    for name, text in files.items():
        if not isinstance(name, str) or name != os.path.basename(name):
            raise InvalidArgumentError(f"files_from: {excerpt(name)} is not a plain file name")
        if not isinstance(text, str | bytes):
            raise InvalidArgumentError(f"files_from[{name!r}] must be str or bytes, not {type(text).__name__}")
        contents[name] = text.encode() if isinstance(text, str) else text
    return contents


def source_files(source: Source) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the extra files of a source that is a directory of a model, and a note about those that are not taken.

    A directory is one if it is of Hugging Face, or has a config of transformers or PEFT. So is the subdirectory of
    config and tokenizer that a training framework writes.
    """
    opened, store = source.opened, source.small_files
    if store is None:
        store = opened.store
        has_config = source.kind in KINDS_BESIDE_CONFIGS and not {CONFIG, ADAPTER_CONFIG}.isdisjoint(store.listing)
        if opened.file is not None or not (has_config or source.kind == "huggingface"):
            return {}, ()
    chosen, left = _choose(store)
    files = {}
    for name, file in chosen.items():
        with _left_out(left, name):
            files[name] = file.read_all()
    # What is read as a part of the checkpoint is not left out: files of tensors, or the directories that they are in.
    base = f"{store.path.rstrip('/')}/"
    for shard_file in source.files:
        left.pop(shard_file.path.removeprefix(base).partition("/")[0], None)
    for part in source.parts:
        for name in part.names:
            left.pop(name, None)
    if not left:
        return files, ()
    return files, (f"not copied from {without_secrets(store.path)}: {abbreviated_list(left)}",)


@contextlib.contextmanager
def _left_out(left: dict[str, str], name: str) -> Iterator[None]:
    """Note in `left` why a file or directory cannot be read; ReplacedError goes on, and the source is read again."""
    try:
        yield
    except ReplacedError:
        raise  # a file of another checkpoint that has come to this path must not lie beside tensors of this one
    except StateExchangeError as error:
        left[name] = error.message


def _choose(store: Store) -> tuple[dict[str, StoredFile], dict[str, str]]:
    """Return a model's small files in a directory and the small directories below, and why others are left out."""
    files: dict[str, StoredFile] = {}
    left: dict[str, str] = {}
    for name in store.files:
        if not _NOT_COPIED.fullmatch(name):
            with _left_out(left, name):
                files[name] = store.open(name)
    for name, file in list(files.items()):
        if file.size > _MAX_BYTES:
            left[name] = format_bytes(file.size)
            del files[name]
    if not files:
        return files, left  # no model's directory, and those below are not its parts
    room = _MAX_BYTES
    for name, kind in store.listing.items():
        if kind == "file":
            continue
        # A directory is copied as a whole or not at all: half of a tokenizer is worse than none.
        below: dict[str, StoredFile] = {}
        with _left_out(left, name):
            below = _files_below(store, name, _MAX_DEPTH)
        nbytes = sum(file.size for file in below.values())
        if nbytes > room:
            left[name] = format_bytes(nbytes)
        else:
            room -= nbytes
            files |= below
    return files, left


def _files_below(store: Store, name: str, depth: int) -> dict[str, StoredFile]:
    """Return the files in a directory by their relative paths; raise UnsafeError unless it is copied as a whole.

    Links to files are followed, as the Hub's cache has them; links to directories, which may lead anywhere, are not.
    """
    if store.listing[name] != "directory":
        raise UnsafeError("no directory or regular file")
    below = store.below(name)
    if name.startswith("."):
        # Nobody misses a directory of a tool, such as git; a note names one that may be a model.
        if CONFIG in below.listing:
            raise UnsafeError("hidden")
        return {}
    if _OF_JOB.fullmatch(name):
        raise UnsafeError("of a job")
    if MANIFEST in below.listing:
        raise UnsafeError("a checkpoint of its own")
    if not depth or len(below.listing) > _MAX_ENTRIES:
        raise UnsafeError("too many files or directories")
    files: dict[str, StoredFile] = {}
    for inner, kind in below.listing.items():
        if kind != "file":
            for path, file in _files_below(below, inner, depth - 1).items():
                files[f"{name}/{path}"] = file
        elif not inner.startswith("."):
            files[f"{name}/{inner}"] = below.open(inner)
    return files


def _with_dtype(config: bytes, plan: Plan) -> bytes:
    """Return a config.json with the floating dtype that most bytes of the plan have; unchanged if it is broken.

    ``{"dtype": "float32"}`` becomes ``{"dtype": "bfloat16"}`` beside tensors that were cast to bfloat16.
    """
    nbytes: Counter[str] = Counter()
    for tensor in plan.tensors.values():
        if tensor.dtype in FLOATS:
            nbytes[tensor.dtype] += tensor.nbytes
    # A broken config is copied as it is: the tensors are right without it, and a merge of hours must not fail of it.
    try:
        parsed = parse_json(config, CONFIG, Budget(CONFIG))
    except CorruptError:
        return config
    if not nbytes or not isinstance(parsed, dict):
        return config
    dtype = LONG_NAMES[max(nbytes, key=nbytes.__getitem__)]
    if parsed.keys().isdisjoint(_DTYPE_KEYS):
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
