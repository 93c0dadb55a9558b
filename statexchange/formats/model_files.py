"""Which files of a directory are the model: the one place where that is decided, by the names in its listing.

The order is that of transformers' `from_pretrained`: ``model.safetensors``, its index, ``pytorch_model.bin``, its
index, then an adapter of PEFT. A directory without any of these names must have one candidate: one index, one file, or
one set of files that are numbered or belong to ranks. Two candidates are never united: the caller has to name one.

Frameworks' own layouts, which other formats recognise by their marks, do not come here.

Files of safetensors and of torch.save are then read in one way (`read_listed`): what is wrong with one of them is a
problem, as is what an index assigns to a file that does not have it. Without an index only the names show whether all
are there (`check_numbers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats.frameworks import state_file
from statexchange.formats.source import WEIGHT_SUFFIXES, Source, SourceKind, UnreadableTensor, abbreviated_names, joined
from statexchange.storage.location import OpenedPath, read_json
from statexchange.storage.store import Store
from statexchange.storage.tensorfile import read_header
from statexchange.units import format_number

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
_OF_TOTAL = re.compile(r"[-_.]of[-_.]?0*(?P<total>[0-9]{1,9})(?![0-9])")  # in model-00001-of-00004
_RANK = re.compile(r"(?<![a-z])(rank|tp|pp|ep|shard|part|stage|layer|mp|consolidated)[-_.]?[0-9]", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+")
(_SUFFIX,) = SAFETENSORS
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
SHARD_NAME = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_COUNTED = re.compile(rf"([0-9]{{1,9}})(?={_OF_TOTAL.pattern})")
_WORLD_SIZE = re.compile(r"world_size_(?P<total>[0-9]{1,9})(?![0-9])")
RANK = re.compile(r"(?<![A-Za-z])rank[_-]?([0-9]{1,9})(?![0-9])", re.IGNORECASE)
# The whole name of a rank's file: a number after "rank" elsewhere may be LoRA's rank.
_RANK_ALONE = re.compile(r"(?:pytorch_model_fsdp_(?:[0-9]+_)?)?rank[_-]?([0-9]{1,9})\.[a-z]+")
_ADVICE_ON_UNREAD = "to read one, give its path; a merge copies one of up to 64 MiB if --files-from gives its path"


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
    return next(filter(store.non_directories.__contains__, _PREFERRED), None)


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
        weights = [name for name in filter(is_weights, names) if name.endswith(suffixes)]
        indexes = []
        for name in names:
            if name.endswith(INDEX) and name.removesuffix(INDEX).endswith(suffixes):
                indexes.append(name)
        # An index says which files are one model; without one their names may show it.
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

    Example:
        >>> _sets(["a-1-of-2.bin", "a-2-of-2.bin", "a-1-of-3.bin", "step_100.pt", "step_200.pt"])
        [['a-1-of-2.bin', 'a-2-of-2.bin'], ['a-1-of-3.bin'], ['step_100.pt'], ['step_200.pt']]
    """
    by_form: dict[tuple[str, str | None], list[str]] = {}
    for name in names:
        total = _OF_TOTAL.search(name)
        by_form.setdefault((_NUMBER.sub("#", name), total and total[1]), []).append(name)
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
    """Return the numbers, in order, at each place at which names have different ones."""
    varying = []
    for digits in zip(*map(_NUMBER.findall, names), strict=False):
        numbers = sorted({*map(int, digits)})
        if len(numbers) > 1:
            varying.append(numbers)
    return varying


def missing_number(names: Sequence[str]) -> int | None:
    """Return the first number that is missing if names differ in one number alone, which counts from 0 or 1."""
    varying = _varying_numbers(names)
    if len(varying) == 1:
        (numbers,) = varying
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
    unread = [name for name in filter(is_weights, _names(store)) if name not in read]
    return (f"not read: {abbreviated_names(unread)}; {_ADVICE_ON_UNREAD}",) if unread else ()


def read_listed(
    kind: SourceKind,
    opened: OpenedPath,
    numbered: Iterable[tuple[int, str]],
    read_one: Callable[[int, str], Source],
    weight_map: Mapping[str, str],
    published: Mapping[str, Any] = MappingProxyType({}),
) -> Source:
    """Return the files of a model as one source. What is wrong with one of them is a problem.

    Args:
        kind: the kind of the source.
        opened: the opened path.
        numbered: each file's rank or number, and its name.
        read_one: reads one of them.
        weight_map: the file of each tensor, by an index or a manifest; {} without either.
        published: the records of the tensors in a manifest.
    """
    names: dict[str, list[str]] = {}  # by file; a broken index may list a file for each tensor
    for name, file in weight_map.items():
        names.setdefault(file, []).append(name)
    sources, files = [], []
    for number, file in numbered:
        files.append(file)
        try:
            sources.append(read_one(number, file))
        except StateExchangeError as error:
            lost = _lost_tensors(opened.store, file, names.get(file, []), published)
            sources.append(Source(kind, opened, (), problems=(error,), unreadable=lost))
    source = joined(kind, opened, sources)
    notes = unread_weights(opened.store, files) if opened.file is None else ()
    return replace(source, problems=[*source.problems, *_misplaced(source, weight_map)], notes=notes)


def _lost_tensors(
    store: Store, file: str, names: Sequence[str], published: Mapping[str, Any]
) -> list[UnreadableTensor]:
    """Return the tensors of an unreadable file.

    dtype and shape come from the manifest, or from the header if the file is only truncated. `names` are those that the
    manifest or an index assigns to the file.
    """
    described: dict[str, tuple[str | None, tuple[int, ...] | None]] = {}
    for name in filter(published.__contains__, names):
        described[name] = published[name]["dtype"], tuple(published[name]["shape"])
    # The header comes first: a copy that was interrupted has all of it.
    if not described:
        with suppress(StateExchangeError):
            header = read_header(store.open(file), whole=False)
            for name, entry in (*header.entries.items(), *header.unknown.items()):
                described[name] = entry.dtype, entry.shape
    path = store.path_of(file)
    return [UnreadableTensor(name, *described.get(name, (None, None)), path) for name in names or described]


def _misplaced(source: Source, weight_map: Mapping[str, str]) -> Iterator[IncompleteError]:
    """Yield an error for each tensor that the weight map assigns to a file that does not have it."""
    by_name = {shard_file.name: shard_file for shard_file in source.files}
    unsupported = {(tensor.name, tensor.path) for tensor in source.unreadable}
    for name, file in weight_map.items():
        shard_file = by_name.get(file)  # None for a file that has a problem of its own
        if shard_file is None or name in shard_file.tensors or name in source.others:
            continue
        if (name, shard_file.path) not in unsupported:
            text = "the index assigns this tensor to the file, which does not have it"
            yield IncompleteError(text, name=name, path=shard_file.path)


def only_indexed(source: Source, weight_map: Mapping[str, str]) -> Source:
    """Return a source with the tensors that an index assigns to its files, and a note on the others."""
    # Of tensors of which several files have parts, the index lists one file.
    parts = set()
    for _, tensor in source.shards():
        if any(any(box.offsets) for box in tensor.shard.boxes):
            parts.add(tensor.shard.name)
    indexed = []
    stale: list[str] = []
    for shard_file in source.files:
        listed: dict[str, str] = {}
        for name in shard_file.tensors:
            if weight_map.get(name) == shard_file.name or (name in parts and name in weight_map):
                listed[name] = name
            else:
                stale.append(f"{name} in {shard_file.name}")
        indexed.append(shard_file.renamed(listed.get))
    if not stale:
        return source
    count = format_number(len(stale), "tensor")
    text = f"not read: {count} that the index does not list for these files, of which transformers reads all"
    return replace(source, files=indexed, notes=(*source.notes, f"{text}: {abbreviated_names(stale)}"))


def check_file_names(weight_map: Mapping[str, str], path: str, suffix: str = _SUFFIX) -> None:
    """Raise CorruptError unless the values of a weight map are plain names of files."""
    for file in weight_map.values():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file) or not file.endswith(suffix):
            raise CorruptError(f"a tensor is listed in {excerpt(file)}, which is not a plain file name", path=path)


def read_index(store: Store, index: str, suffix: str = _SUFFIX) -> dict[str, str]:
    """Return the file of each tensor by an index.

    Raises:
        CorruptError: a file name is not plain, or has another suffix.
        IncompleteError: the index lists no tensors.
        UnsupportedError: it is that of a delta.
    """
    path = store.path_of(index)
    raw = read_json(store.open(index))
    if not isinstance(raw, dict) or not isinstance(raw.get("weight_map"), dict):
        raise CorruptError("the index has no weight_map", path=path)
    weight_map: dict[str, str] = raw["weight_map"]
    metadata = raw.get("metadata")
    # Its entries are no tensors of the model, but their differences (formats/version.py).
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        text = "the index is that of a delta of weights: give the directory weight_v... that it lay in, beside its base"
        raise UnsupportedError(text, path=path)
    check_file_names(weight_map, path, suffix)
    if not weight_map:
        raise IncompleteError("the index lists no tensors: it was not written or copied whole", path=path)
    return weight_map


def check_numbers(names: Sequence[str], store: Store) -> list[StateExchangeError]:
    """Return an IncompleteError for each incomplete set of files: numbered "i-of-n", or by ranks from 0 on.

    Without an index only the numbers in the names show that a file is missing: a set is all names that differ in this
    number alone. Nothing lists the ranks, so a file that is missing after the last one goes unnoticed.
    """
    sets: dict[tuple[str, str], dict[int, str]] = {}  # digits, by the name around them
    for name in names:
        for begin, digits, end in _around_numbers(name):
            sets.setdefault((begin, end), {})[int(digits)] = digits
    problems: list[StateExchangeError] = []
    for (begin, end), numbers in sets.items():
        of, last = _OF_TOTAL.match(end), max(numbers)
        first, total = 0, last + 1
        if of is not None:
            first, total = 1, int(of["total"])
        # The number in a lone name may be LoRA's rank, unless it is all of the name.
        is_lora = of is None and len(numbers) == 1 and not _RANK_ALONE.fullmatch(begin + numbers[last] + end)
        if len(numbers) >= total or is_lora:
            continue
        absent = next(number for number in count(first) if number not in numbers)
        width = min(map(len, numbers.values()))  # the width of n may be another: model-00001-of-000004
        path = store.path_of(f"{begin}{absent:0{width}d}{end}")
        if of is None:
            text = f"there are files of ranks up to {last}: the file of this rank is missing"
            problems.append(IncompleteError(text, rank=absent, path=path))
        else:
            text = f"by their names there should be {total} files, but there are {len(numbers)}: this one is missing"
            problems.append(IncompleteError(text, path=path))
    return problems


def _around_numbers(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield each number in a file's name that counts files, between what is before and after it."""
    matches = list(RANK.finditer(name))
    # Of two numbers after "rank" nothing says which of them is the rank.
    if len(matches) > 1:
        matches = []
    # In the name of torch's shards i-of-n is the file that would be made of them: a rank need not have parts of all n.
    if not SHARD_NAME.fullmatch(name):
        matches += _COUNTED.finditer(name)
    for match in matches:
        yield name[: match.start(1)], match[1], name[match.end(1) :]


def part_of(name: str, store: Store) -> str:
    """Return in words what a file is, if its name shows that it is one of several in its directory; else "".

    The name shows that by the number of files, by being a rank's as a whole, or by files of other ranks beside it.
    """
    if SHARD_NAME.fullmatch(name):
        return ""
    match = _COUNTED.search(name) or _WORLD_SIZE.search(name)
    if match is not None:
        total = int(match["total"])
        return f"one of {total} files, by its name" if total > 1 else ""
    for begin, digits, end in _around_numbers(name):
        for beside in store.non_directories:
            for before, _, after in _around_numbers(beside):
                if beside != name and (before, after) == (begin, end):
                    return f"one rank's, and those of others lie beside it ({excerpt(beside, 80)[1:-1]})"
        if int(digits) and _RANK_ALONE.fullmatch(name):
            return f"that of rank {int(digits)}, by its name"
    return ""
