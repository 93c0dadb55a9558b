"""Which files of a directory are the model: the one place where that is decided, by the names in its listing.

The order is that of transformers' `from_pretrained`: ``model.safetensors``, its index, ``pytorch_model.bin``, its
index, then an adapter of PEFT. A directory without any of these names must have one candidate: one index, one file, or
one set of files that are numbered or belong to ranks. Two candidates are never united: the caller has to name one.

Frameworks' own layouts, which other formats recognise by their marks, do not come here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.formats.frameworks import state_file
from statexchange.formats.source import WEIGHT_SUFFIXES, ShardFile, abbreviated_names
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store
from statexchange.units import format_number

__all__ = [
    "ADAPTER_CONFIG",
    "CONFIG",
    "INDEX",
    "MANIFEST",
    "OF_TOTAL",
    "SAFETENSORS",
    "TORCH",
    "ModelFiles",
    "are_of_ranks",
    "has_safetensors_model",
    "is_weights",
    "missing_number",
    "model_files",
    "only_indexed",
    "preferred_file",
    "unread_weights",
]

CONFIG, ADAPTER_CONFIG, MANIFEST = "config.json", "adapter_config.json", "statexchange.json"
SAFETENSORS, TORCH, INDEX = (".safetensors",), (".pt", ".pth", ".bin"), ".index.json"
_PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
OF_TOTAL = re.compile(r"[-_.]of[-_.]?0*(?P<total>[0-9]{1,9})(?![0-9])")  # in model-00001-of-00004
_RANK = re.compile(r"(?<![a-z])(rank|tp|pp|ep|shard|part|stage|layer|mp|consolidated)[-_.]?[0-9]", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a directory that are its model; neither names nor an index if there is none.

    Attributes:
        names: the files; empty if an index lists them.
        index: the index that lists them; None without one.
    """

    names: tuple[str, ...] = ()
    index: str | None = None


def has_safetensors_model(store: Store) -> bool:
    """Whether the model of a directory, or one of several candidates, lies in safetensors files."""
    preferred = preferred_file(store)
    names = _names(store) if preferred is None else [preferred]
    return any(name.removesuffix(INDEX).endswith(SAFETENSORS) for name in names)


def _names(store: Store) -> list[str]:
    """Return the names of files in a directory, without the ``._NAME`` in which macOS keeps attributes of a file."""
    return [name for name in store.non_directories if not name.startswith("._")]


def preferred_file(store: Store) -> str | None:
    """Return the file or index that transformers or PEFT reads, by its name; None if there is no such file."""
    names = store.non_directories
    return next((name for name in _PREFERRED if name in names), None)


def model_files(opened: OpenedPath) -> ModelFiles:
    """Return the files of a directory that are its model; none if it has no weights that can be read.

    If the path is that of one file or index, this is the model.

    Raises:
        InvalidArgumentError: there are several candidates, and no name says which of them is the model.
    """
    store = opened.store
    preferred = preferred_file(store) if opened.file is None else opened.file
    if preferred is not None:
        return _chosen([preferred])
    # As in transformers, safetensors files come before those of torch.save.
    names = _names(store)
    for suffixes in (SAFETENSORS, TORCH):
        weights = [name for name in names if name.endswith(suffixes) and state_file(name) is None]
        indexes = [name for name in names if name.endswith(tuple(f"{suffix}{INDEX}" for suffix in suffixes))]
        candidates = [[name] for name in indexes] or _sets(weights)
        # A single file beside an index of its stem is a second save: programs differ in which of the two they read.
        candidates += [[name] for name in weights if f"{name}{INDEX}" in indexes]
        if len(candidates) > 1:
            raise _several(candidates, store)
        if candidates:
            return _chosen(candidates[0])
    return ModelFiles()


def _chosen(names: Sequence[str]) -> ModelFiles:
    """Return the candidate that was chosen: one index, or files."""
    return ModelFiles(index=names[0]) if names[0].endswith(INDEX) else ModelFiles(tuple(names))


def _sets(names: Iterable[str]) -> list[list[str]]:
    """Return sets of files, each of which may be one model: their names differ in numbers alone.

    Sets "of 2" and "of 3" are two saves. Without such a total, or a word such as "rank", numbers count the files of one
    model only if they begin at 0 or 1 and have no gap: model_100 and model_200 are two steps.
    """
    by_form: dict[tuple[str, str], list[str]] = {}
    for name in names:
        total = OF_TOTAL.search(name)
        by_form.setdefault((_NUMBER.sub("#", name), total[1] if total is not None else ""), []).append(name)
    sets = []
    for (_, total_digits), of_form in by_form.items():
        if total_digits or _RANK.search(of_form[0]) or _is_counted(of_form):
            sets.append(of_form)
        else:
            sets += [[name] for name in of_form]
    return sets


def are_of_ranks(names: Iterable[str]) -> bool:
    """Whether the name of each file shows that it is a rank's, or a part of a model."""
    return all(map(_RANK.search, names))


def _is_counted(names: Sequence[str]) -> bool:
    """Whether names differ in one number alone, which counts from 0 or 1."""
    return len(_varying_numbers(names)) < 2 and missing_number(names) is None


def _varying_numbers(names: Sequence[str]) -> list[list[int]]:
    """Return the numbers at each place at which names have different ones."""
    rows = [[int(digits) for digits in _NUMBER.findall(name)] for name in names]
    return [sorted(column) for column in zip(*rows, strict=False) if len(set(column)) > 1]


def missing_number(names: Sequence[str]) -> int | None:
    """Return the first number that is missing if names differ in one number alone, which counts from 0 or 1."""
    varying = _varying_numbers(names)
    if len(varying) == 1:
        numbers = sorted({*varying[0]})
        for number, present in enumerate(numbers, min(1, numbers[0])):
            if number != present:
                return number
    return None


def _several(candidates: Sequence[Sequence[str]], store: Store) -> InvalidArgumentError:
    shown = []
    for names in candidates:
        more = f" (of {len(names)} files)" if len(names) > 1 else ""
        shown.append(f"{excerpt(names[0], 100)[1:-1]}{more}")
    text = (
        f"this directory has {len(candidates)} sets of weights, and no name says which is the model: "
        f"{abbreviated_names(shown)}. Give the path of one file or index, or move one set to a directory of its own"
    )
    return InvalidArgumentError(text, path=store.path)


def is_weights(name: str) -> bool:
    """Whether a file has the name of one with weights, and not that of another part of a job's state."""
    return name.endswith(WEIGHT_SUFFIXES) and state_file(name) is None


def unread_weights(store: Store, names: Iterable[str]) -> tuple[str, ...]:
    """Return a note on the files of weights in a directory that are not among `names`, those that are read."""
    read = set(names)
    unread = [name for name in _names(store) if is_weights(name) and name not in read]
    if not unread:
        return ()
    advice = "to read one, give its path; a merge copies one of up to 64 MiB if --files-from gives its path"
    return (f"not read: {abbreviated_names(unread)}; {advice}",)


def only_indexed(
    files: Sequence[ShardFile], weight_map: Mapping[str, str], parts: Collection[str] = ()
) -> tuple[list[ShardFile], tuple[str, ...]]:
    """Return the files with the tensors that an index assigns to them, and a note on the others, which are not read.

    Args:
        files: the files of the index.
        weight_map: the file of each tensor, by the index.
        parts: names of tensors of which several files have parts; the index lists only one file for each.
    """
    indexed = []
    stale: list[str] = []
    for shard_file in files:
        listed: dict[str, str] = {}
        for name in shard_file.tensors:
            if weight_map.get(name) == shard_file.name or (name in parts and name in weight_map):
                listed[name] = name
            else:
                stale.append(f"{name} in {shard_file.name}")
        indexed.append(shard_file.renamed(listed.get))
    if not stale:
        return list(files), ()
    count = format_number(len(stale), "tensor")
    text = f"not read: {count} that the index does not list for these files, of which transformers reads all"
    return indexed, (f"{text}: {abbreviated_names(stale)}",)
