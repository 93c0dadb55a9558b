"""What lies at a path, from headers alone: kind, ranks, tensors, dtypes and bytes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.errors import without_secrets
from statexchange.formats.registry import open_source
from statexchange.formats.source import ShardFile, Source
from statexchange.sharding.shards import Shard, full_box
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from statexchange.errors import StateExchangeError

__all__ = ["Summary", "TensorRow", "summarize", "tensor_rows"]


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in a few numbers. `nbytes` counts each tensor once; `file_nbytes` is that of all files.

    Tensors that are listed somewhere and cannot be read are counted too; `num_unreadable` says how many. `proven` says
    whether the digests of all bytes are known; `others` describes by name what is no tensor; `problems` are what is
    missing or broken, `unsupported` why tensors cannot be read whose files can, by name.
    """

    kind: str
    path: str
    num_tensors: int
    num_parameters: int
    nbytes: int
    dtypes: dict[str, int]
    num_files: int
    file_nbytes: int
    run: str | None
    round: int | None
    world_size: int | None
    ranks: tuple[int, ...]
    aliases: dict[str, str]
    num_unreadable: int
    proven: bool
    others: dict[str, str]
    unsupported: dict[str, str]
    problems: tuple[StateExchangeError, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: its global shape, which ranks or numbers of files hold it, and the first file.

    Of a tensor that is only listed nobody holds a box; its `dtype` is "?" where only its name is known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    holders: tuple[int, ...]
    num_boxes: int
    file: str


def summarize(path: str | os.PathLike[str]) -> Summary:
    """The summary of what lies at `path`. Not collective; reads headers only."""
    with open_source(path, strict=False) as source:
        return _summary(without_secrets(os.fspath(path)), source)


def _summary(path: str, source: Source) -> Summary:
    rows = tensor_rows(source)
    dtypes = Counter(row.dtype for row in rows)
    by_rank = source.kind in ("workspace", "dcp")
    return Summary(
        kind=source.kind,
        path=path,
        num_tensors=len(rows),
        num_parameters=sum(full_box(row.shape).numel for row in rows if row.dtype in ITEMSIZE),
        nbytes=sum(row.nbytes for row in rows),
        dtypes=dict(sorted(dtypes.items())),
        num_files=len(source.files),
        file_nbytes=source.nbytes,
        run=source.run,
        round=source.round,
        world_size=source.world_size,
        ranks=tuple(dict.fromkeys(shard_file.rank for shard_file in source.files)) if by_rank else (),
        aliases=_aliases(source),
        num_unreadable=sum(not row.holders for row in rows),
        proven=_proven(source),
        others=dict(source.others),
        unsupported={name: error.message for name, error in source.unsupported.items()},
        problems=source.problems,
    )


def _proven(source: Source) -> bool:
    """Whether digests cover all bytes: nothing is said of what is broken, or is not there."""
    if source.problems or not source.files:
        return False
    return all(byte_range.is_proven for _, tensor in source.shards() for byte_range in tensor.byte_ranges)


def _aliases(source: Source) -> dict[str, str]:
    if source.manifest is not None:
        return {str(k): str(v) for k, v in source.manifest.get("aliases", {}).items()}
    return {alias: kept for shard_file in source.files for alias, kept in shard_file.aliases.items()}


def tensor_rows(source: Source) -> list[TensorRow]:
    """Every tensor of a source, in its order."""
    held_by: dict[str, list[ShardFile]] = {}
    last: dict[str, Shard] = {}
    num_boxes: Counter[str] = Counter()
    for shard_file, tensor in source.shards():
        shard = last[tensor.shard.name] = tensor.shard
        held_by.setdefault(shard.name, []).append(shard_file)
        num_boxes[shard.name] += len(shard.boxes)
    found: dict[str, TensorRow] = {}
    for name, holders in held_by.items():
        shard = last[name]
        found[name] = TensorRow(
            name,
            shard.dtype,
            shard.global_shape,
            full_box(shard.global_shape).numel * ITEMSIZE[shard.dtype],
            tuple(shard_file.rank for shard_file in holders),
            num_boxes[name],
            os.path.basename(holders[0].path),
        )
    for listed in source.unreadable:
        if listed.name not in found:
            dtype, shape = listed.dtype or "?", listed.shape or ()
            nbytes = full_box(shape).numel * ITEMSIZE[dtype] if dtype in ITEMSIZE else 0
            file = os.path.basename(listed.path)
            found[listed.name] = TensorRow(listed.name, dtype, shape, nbytes, (), 0, file)
    return list(found.values())
