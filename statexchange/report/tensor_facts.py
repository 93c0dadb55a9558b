"""Find out what a checkpoint's headers say of one tensor: dtype, shape, and which file has which region of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.errors import IncompleteError, OverlapError, StateExchangeError, UnsupportedError
from statexchange.formats.sections import sections_of
from statexchange.report.summary import aliases_of
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import RankShards, plan_tensors, replica_error
from statexchange.sharding.shards import Box, full_box
from statexchange.tensors import ITEMSIZE, PACKED, element_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statexchange.formats.source import ShardFile, Source
    from statexchange.storage.store import ByteRange

__all__ = ["Region", "TensorFacts", "cover_problems", "element_box", "group_box", "tensor_facts"]


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
        problems: the errors that follow from headers.
    """

    name: str
    tied_to: str | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    section: str | None
    regions: tuple[Region, ...]
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
    # A tensor is kept under its own name, unless it is tied.
    has_name = any(name in file.tensors for file in source.files)
    kept = name if has_name else aliases_of(source).get(name, name)
    numbers = [number for number, file in enumerate(source.files) if kept in file.tensors]
    if not numbers:
        _refuse_unreadable(source, name)
        return None

    def stored_digest(number: int, index: int) -> str | None:
        return source.files[number].tensors[kept].byte_ranges[index].digest

    problems = []
    for problem in cover_problems(source, kept, numbers, stored_digest):
        if not (is_part and isinstance(problem, IncompleteError)):
            problems.append(problem)
    copies: dict[Box, list[tuple[ShardFile, ByteRange]]] = {}
    for number in numbers:
        file = source.files[number]
        tensor = file.tensors[kept]
        for box, stored in zip(tensor.shard.boxes, tensor.byte_ranges, strict=True):
            copies.setdefault(box, []).append((file, stored))
    shard = source.files[numbers[0]].tensors[kept].shard
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
        problems=tuple(problems),
    )


def cover_problems(
    source: Source, name: str, numbers: Sequence[int], digest_of: Callable[[int, int], str | None]
) -> Iterator[StateExchangeError]:
    """Yield an error if the boxes of a tensor do not cover it exactly once, else one for each copy that differs.

    Args:
        source: the source.
        name: the tensor's name.
        numbers: the numbers of the files that have the tensor.
        digest_of: returns the digest of a box by the numbers of its file and of the box; None if it is not known.

    Raises:
        CorruptError, ReplicaError: two files disagree on dtype or shape.
    """
    if len(numbers) == 1 and source.files[numbers[0]].tensors[name].shard.is_whole:
        return  # one box, as most tensors have, without a copy
    holders = []
    for number in numbers:
        file = source.files[number]
        holders.append(RankShards(file.rank, [file.tensors[name].shard], label=source.label_of(file)))
    try:
        (plan,), _ = plan_tensors(holders, ExportOptions())
    except (IncompleteError, OverlapError, UnsupportedError) as error:
        yield error
        return
    for piece in plan.pieces:
        expected = digest_of(numbers[piece.holder], piece.box_index)
        for holder, index in piece.replicas:
            digest = digest_of(numbers[holder], index)
            if None not in (expected, digest) and expected != digest:
                first, other = source.files[numbers[piece.holder]], source.files[numbers[holder]]
                labels = source.label_of(first), source.label_of(other)
                yield replica_error(name, piece.box, *labels, path=other.path)


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
