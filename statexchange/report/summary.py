"""What lies at a path, from headers alone: kind, ranks, tensors, dtypes and bytes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.layout.shards import ITEMSIZE, full_box
from statexchange.sources import Source, open_source

if TYPE_CHECKING:
    from statexchange.errors import StateExchangeError

__all__ = ["Summary", "TensorRow", "summarize", "tensor_rows"]


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in a few numbers. `nbytes` counts each tensor once; `file_nbytes` is that of all files.

    `proven` says whether the digest of every box is known; `others` what is no tensor, by name and in words;
    `problems` are what is missing or broken.
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
    proven: bool
    others: dict[str, str]
    problems: tuple[StateExchangeError, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: its global shape, which ranks or numbers of files hold it, and the first file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    holders: tuple[int, ...]
    num_boxes: int
    file: str


def summarize(path: str | os.PathLike[str]) -> Summary:
    """The summary of what lies at `path`. Not collective; reads headers only."""
    source = open_source(path, strict=False)
    rows = tensor_rows(source)
    dtypes = Counter(row.dtype for row in rows)
    by_rank = source.kind in ("workspace", "dcp")
    return Summary(
        kind=source.kind,
        path=os.fspath(path),
        num_tensors=len(rows),
        num_parameters=sum(full_box(row.shape).numel for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        dtypes=dict(sorted(dtypes.items())),
        num_files=len(source.holders),
        file_nbytes=source.nbytes,
        run=source.run,
        round=source.round,
        world_size=source.world_size,
        ranks=tuple(dict.fromkeys(holder.rank for holder in source.holders)) if by_rank else (),
        aliases=_aliases(source),
        proven=_proven(source),
        others=dict(source.others),
        problems=source.problems,
    )


def _proven(source: Source) -> bool:
    if source.manifest is not None:
        return True
    return all(extent.digest is not None for _, tensor in source.shards() for extent in tensor.extents)


def _aliases(source: Source) -> dict[str, str]:
    if source.manifest is not None:
        return {str(k): str(v) for k, v in source.manifest.get("aliases", {}).items()}
    return {alias: kept for holder in source.holders for alias, kept in holder.aliases.items()}


def tensor_rows(source: Source) -> list[TensorRow]:
    """Every tensor of a source, in its order."""
    found: dict[str, TensorRow] = {}
    for holder, tensor in source.shards():
        shard = tensor.shard
        old = found.get(shard.name)
        found[shard.name] = TensorRow(
            shard.name,
            shard.dtype,
            shard.global_shape,
            full_box(shard.global_shape).numel * ITEMSIZE[shard.dtype],
            (*(old.holders if old else ()), holder.rank),
            (old.num_boxes if old else 0) + len(shard.boxes),
            old.file if old else os.path.basename(holder.path),
        )
    return list(found.values())
