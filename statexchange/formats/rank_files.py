"""Read plain safetensors files, one per rank, whose sharding a layout describes (sharding/rules.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from statexchange.errors import IncompleteError, InvalidArgumentError, did_you_mean
from statexchange.formats.huggingface import read_file
from statexchange.formats.model_files import check_numbers, missing_number, part_of, preferred_file, read_listed
from statexchange.formats.source import ShardFile, Source, SourceTensor
from statexchange.sharding.rules import Layout, Part, place_parts, renumber_names
from statexchange.sharding.shards import Shard, full_box
from statexchange.storage.location import OpenedPath
from statexchange.storage.tensorfile import TORCH_SHARDING_KEY, read_header
from statexchange.storage.workspace import is_rank_file

_SUFFIX = ".safetensors"
_NUMBER = re.compile(r"([0-9]+)")


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a directory of safetensors files without sharding metadata of their own."""
    names = _names(opened)
    if not names or any(map(is_rank_file, names)):
        return False
    # torch's writer gives all of its files this entry: one of them shows it.
    return TORCH_SHARDING_KEY not in read_header(opened.store.open(names[0])).metadata


def _names(opened: OpenedPath) -> list[str]:
    if opened.file is not None:
        return []
    return [name for name in opened.store.files if name.endswith(_SUFFIX)]


def read(opened: OpenedPath) -> Source:
    """Return the safetensors files of a directory as a source, one rank each, in the order of the numbers in names.

    Raises:
        IncompleteError: the numbers in the names show that a file is missing.
    """
    names = sorted(_names(opened), key=_numeric_order)
    whole = preferred_file(opened.store)
    if whole in names and len(names) > 1:
        text = "a layout takes each file for one rank's, and by its name this is a whole model: move it, or the others"
        raise InvalidArgumentError(text, path=opened.store.path_of(whole))
    for problem in check_numbers(names, opened.store):
        if problem.rank != 0:  # ranks may be counted from 1
            raise problem
    # Also numbers without a word such as "rank" before them, as in model-0.safetensors.
    absent = missing_number(names)
    if absent is not None:
        raise IncompleteError(f"files are numbered, but number {absent} is missing", path=opened.path)
    source = read_listed("rank files", opened, enumerate(names), partial(read_file, opened), {})
    return replace(source, world_size=len(names))


def _numeric_order(name: str) -> list[tuple[str, int]]:
    """Return a sort key that compares digits as numbers.

    Example:
        >>> _numeric_order("tp10.pt")
        [('tp', 10), ('.pt', 0)]
    """
    pieces = _NUMBER.split(name)  # text and digits by turns, and text at the end
    return list(zip(pieces[::2], map(int, (*pieces[1::2], "0")), strict=True))


def apply_layout(source: Source, layout: Layout) -> tuple[Source, dict[str, str]]:
    """Return the source with its plain tensors as shards, sharded by the layout, and the reductions by tensor name.

    Raises:
        InvalidArgumentError: a rule matches no tensor, does not fit one, or matches one with sharding of its own.
        IncompleteError: no rank has some part of a tensor, or files of other ranks are missing.
    """
    _check_other_ranks(source, layout)
    if layout.mesh:
        layout.check_ranks([shard_file.rank for shard_file in source.files])
    paths = {shard_file.rank: shard_file.path for shard_file in source.files}
    old_names: dict[int, dict[str, str]] = {}
    for shard_file in source.files:
        old_names[shard_file.rank] = {name: name for name in shard_file.tensors}
    names = renumber_names(old_names, layout)
    parts: dict[str, dict[int, tuple[Part, SourceTensor]]] = {}
    reductions: dict[str, str] = {}
    for shard_file in source.files:
        for name, tensor in shard_file.tensors.items():
            for part in _parts_in(shard_file, tensor, names[shard_file.rank][name], layout, reductions):
                if shard_file.rank in parts.setdefault(part.name, {}):
                    text = "the layout gives this name to two tensors of one rank"
                    raise InvalidArgumentError(text, name=part.name, rank=shard_file.rank, path=shard_file.path)
                parts[part.name][shard_file.rank] = (part, tensor)
    for pattern in layout.rules:
        if pattern in layout.unused:
            text = f"layout pattern {pattern!r} matches no tensor{did_you_mean(pattern, parts)}"
            raise InvalidArgumentError(text, path=source.path)
    tensors: dict[int, dict[str, SourceTensor]] = {rank: {} for rank in paths}
    for name, rank_parts in parts.items():
        for rank, tensor in _placed(name, rank_parts, layout, paths).items():
            tensors[rank][name] = tensor
    shard_files = []
    for shard_file in source.files:
        renamed = tensors[shard_file.rank]
        # A rule may have cut a tied tensor into others.
        aliases = {}
        for alias, name in shard_file.aliases.items():
            if alias in renamed and name in renamed:
                aliases[alias] = name
        shard_files.append(replace(shard_file, tensors=renamed, aliases=aliases))
    return replace(source, files=shard_files), reductions


def _check_other_ranks(source: Source, layout: Layout) -> None:
    """Raise IncompleteError if a lone file's name, or the layout's mesh, shows that ranks are missing.

    A layout divides tensors over all ranks, so the tensors of some would be taken for the whole ones.
    """
    if source.opened.file is not None and (of := part_of(source.opened.file, source.opened.store)):
        text = f"this file alone is {of}, and a layout divides tensors over all: give their directory"
        raise IncompleteError(f"{text}, {source.opened.store.path}", path=source.path)
    num_ranks = math.prod(layout.mesh.values())
    if layout.mesh and len(source.files) < num_ranks:
        present = {shard_file.rank for shard_file in source.files}
        absent = next(rank for rank in range(num_ranks) if rank not in present)
        text = f"the layout's mesh ({layout.mesh_text}) has {num_ranks} ranks, but there are {len(source.files)}"
        advice = "give the directory with the files of all" if source.opened.file is not None else "copy their files"
        raise IncompleteError(f"{text}: {advice}", rank=absent, path=source.path)


def _parts_in(
    shard_file: ShardFile, tensor: SourceTensor, name: str, layout: Layout, reductions: dict[str, str]
) -> list[Part]:
    """Return what a rank's tensor is a part of, by the layout's rule; several, as the rule may cut it into tensors.

    A tensor without a rule is whole, or has the sharding that its file says. Add a rule's reduction to `reductions`.
    """
    shard = tensor.shard
    rule = layout.rule_for(shard.name)
    if rule is None:
        return [Part(name, shard.local_shape, fixed=(shard.global_shape, shard.boxes))]
    if shard.boxes != (full_box(shard.global_shape),):
        text = f"layout rule for {rule.pattern!r} matches a tensor whose file already has its sharding"
        raise InvalidArgumentError(text, name=shard.name, rank=shard_file.rank, path=shard_file.path)
    try:
        parts = rule.parts(name, shard.global_shape, shard_file.rank)
    except InvalidArgumentError as error:
        raise error.located(rank=shard_file.rank, name=name, path=shard_file.path) from None
    if rule.reduce is not None:
        for part in parts:
            reductions[part.name] = rule.reduce
    return parts


def _placed(
    name: str, rank_parts: Mapping[int, tuple[Part, SourceTensor]], layout: Layout, paths: Mapping[int, str]
) -> dict[int, SourceTensor]:
    """Return each rank's shard of one tensor with its byte ranges."""
    placed = {}
    # A part that is fixed without a cut is of a tensor without a rule: it stays where its file says.
    unplaced = {rank: part for rank, (part, _) in rank_parts.items() if part.cuts or part.fixed is None}
    positions = place_parts(unplaced, layout.mesh, paths) if unplaced else {}
    for rank, (part, tensor) in rank_parts.items():
        if rank not in positions:
            placed[rank] = replace(tensor, shard=replace(tensor.shard, name=name))
            continue
        global_shape, boxes = positions[rank]
        (byte_range,) = tensor.byte_ranges
        shard = Shard(name, tensor.shard.dtype, global_shape, boxes)
        offsets = [local.offsets for local in part.local_boxes()]
        placed[rank] = SourceTensor.of_blocks(shard, byte_range, tensor.shard.global_shape, offsets)
    return placed
