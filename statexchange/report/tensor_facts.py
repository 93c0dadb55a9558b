"""Find out what a checkpoint's headers say of one tensor: dtype, shape, and which file has which region of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    OverlapError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.formats.sections import sections_of
from statexchange.report.summary import aliases_of
from statexchange.sharding.plan import HolderLabel, prove_cover, replica_error
from statexchange.sharding.shards import Box, full_box
from statexchange.tensors import ITEMSIZE, PACKED, element_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statexchange.formats.source import ShardFile, Source
    from statexchange.storage.store import ByteRange

__all__ = ["Region", "TensorFacts", "element_box", "group_box", "tensor_facts"]


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a tensor that is stored as one block, in one or more copies.

    Attributes:
        box: the region, in elements.
        holders: the ranks (or numbers of files) that have a copy.
        files: their files, below the checkpoint's directory.
        nbytes: bytes of one copy.
        stored: the byte range of the first copy.
    """

    box: Box
    holders: tuple[int, ...]
    files: tuple[str, ...]
    nbytes: int
    stored: ByteRange


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The facts about one tensor in headers.

    Attributes:
        name: its name.
        tied_to: the name under which a tied tensor is kept; None if it is kept under its own.
        dtype: its dtype.
        shape: its global shape, in elements.
        nbytes: its bytes, each counted once.
        section: the section of a job's state to which it belongs; None if that is not known.
        regions: its regions, in the order of the files.
        is_covered: whether the regions cover each element exactly once.
        problems: the errors that follow from headers.
    """

    name: str
    tied_to: str | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    section: str | None
    regions: tuple[Region, ...]
    is_covered: bool
    problems: tuple[StateExchangeError, ...]


def tensor_facts(source: Source, name: str, *, is_part: bool = False) -> TensorFacts | None:
    """Return the facts of one tensor of a source; None if there is no tensor of this name.

    Not collective. Reads nothing.

    Args:
        source: the source, opened with ``strict=False``.
        name: the tensor's name, or an alias of it.
        is_part: whether the source was reduced to some ranks, so that gaps are no finding.

    Raises:
        UnsupportedError: its dtype or kind is not supported.
        IncompleteError, CorruptError: its file is missing or broken, so that no header tells about it.
    """
    kept = _kept_name(source, name)
    found = [(file, file.tensors[kept]) for file in source.files if kept in file.tensors]
    if not found:
        _refuse_unreadable(source, name)
        return None
    shard = found[0][1].shard
    for shard_file, tensor in found:
        if (tensor.shard.dtype, tensor.shard.global_shape) != (shard.dtype, shard.global_shape):
            raise CorruptError("two files disagree on dtype or shape", name=name, path=shard_file.path)
    copies: dict[Box, list[tuple[ShardFile, ByteRange]]] = {}
    for shard_file, tensor in found:
        for box, stored in zip(tensor.shard.boxes, tensor.byte_ranges, strict=True):
            copies.setdefault(box, []).append((shard_file, stored))
    problems = list(_differing_copies(source, name, copies))
    labels: dict[Box, list[HolderLabel]] = {}
    for box, of_box in copies.items():
        if box.numel:
            labels[box] = [source.label_of(file) for file, _ in of_box]
    is_covered = True
    try:
        prove_cover(name, shard.global_shape, labels)
    except (IncompleteError, OverlapError, UnsupportedError) as error:
        is_covered = False
        if not (is_part and isinstance(error, IncompleteError)):
            problems.append(error)
    regions = []
    for box, of_box in copies.items():
        files = tuple(dict.fromkeys(source.path_below(file) for file, _ in of_box))
        holders = tuple(dict.fromkeys(file.rank for file, _ in of_box))
        nbytes = box.numel * ITEMSIZE[shard.dtype]
        regions.append(Region(element_box(shard.dtype, box), holders, files, nbytes, of_box[0][1]))
    return TensorFacts(
        name=name,
        tied_to=kept if kept != name else None,
        dtype=shard.dtype,
        shape=element_shape(shard.dtype, shard.global_shape),
        nbytes=full_box(shard.global_shape).numel * ITEMSIZE[shard.dtype],
        section=next((section.name for section in sections_of(source) if kept in section.names), None),
        regions=tuple(regions),
        is_covered=is_covered,
        problems=tuple(problems),
    )


def element_box(dtype: str, box: Box) -> Box:
    """Return a box in elements for one in groups of a packed dtype (tensors.py)."""
    return Box(element_shape(dtype, box.offsets), element_shape(dtype, box.shape))


def group_box(dtype: str, box: Box) -> Box:
    """Return the least box in groups that contains a box in elements."""
    if dtype not in PACKED or not box.shape:
        return box
    size = PACKED[dtype]
    begin, end = box.offsets[-1] // size, -(-box.ends[-1] // size)
    return Box((*box.offsets[:-1], begin), (*box.shape[:-1], end - begin))


def _kept_name(source: Source, name: str) -> str:
    """Return the name under which a tensor is kept: its own, unless it is tied."""
    if any(name in shard_file.tensors for shard_file in source.files):
        return name
    return aliases_of(source).get(name, name)


def _refuse_unreadable(source: Source, name: str) -> None:
    """Raise the reason why a listed tensor cannot be read; do nothing for a name that is not listed."""
    for unreadable in source.unreadable:
        if unreadable.name != name:
            continue
        if unreadable.unsupported is not None:
            raise unreadable.unsupported
        for problem in source.problems:
            if problem.name == name or problem.path == unreadable.path:
                raise problem
        raise IncompleteError("its file is missing or broken", name=name, path=unreadable.path)


def _differing_copies(
    source: Source, name: str, copies: dict[Box, list[tuple[ShardFile, ByteRange]]]
) -> Iterator[StateExchangeError]:
    """Yield an error for each copy of a region whose digest differs from that of the first one."""
    for box, of_box in copies.items():
        (first, expected), *others = of_box
        for file, stored in others:
            if None not in (stored.digest, expected.digest) and stored.digest != expected.digest:
                yield replica_error(name, box, source.label_of(first), source.label_of(file), path=file.path)
