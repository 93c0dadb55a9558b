"""Tensors as the headers of a checkpoint have them: a row for each, all facts about one, and the tree of modules."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from statexchange.errors import IncompleteError, OverlapError, StateExchangeError, UnsupportedError
from statexchange.formats.sections import sections_of
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.paths import is_index
from statexchange.sharding.plan import RankShards, plan_tensors, replica_error
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.tensors import ITEMSIZE, PACKED, element_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statexchange.formats.source import ShardFile, Source, SourceTensor
    from statexchange.sharding.sharding_spec import ShardingSpec
    from statexchange.storage.store import ByteRange

    Computed = Mapping[tuple[int, str, int], str]  # digests by file, tensor and box

# --- All tensors ---


class TensorRow(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its name.
        dtype: its dtype; "?" if only the name is known.
        shape: its global shape, in elements; None if only the name is known.
        nbytes: its bytes; None if they are not known.
        holders: ranks (or numbers of files) that have a part of it; empty if it cannot be read.
        num_boxes: number of stored boxes.
        file: the first file that has a part of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int | None
    holders: tuple[int, ...]
    num_boxes: int
    file: str

    @property
    def num_parameters(self) -> int:
        """Number of its elements; 0 if only the name is known."""
        return 0 if self.shape is None else full_box(self.shape).numel


def tensor_rows(source: Source) -> list[TensorRow]:
    """Return a row for each tensor of a source, in its order. Not collective."""
    # What files have comes first: of a tensor that one file has and another, broken one lists, the facts are known.
    rows: dict[str, TensorRow] = {}
    holders: dict[int, tuple[int, ...]] = {}  # by the id of the numbers of the files, which most tensors share
    for name, spec in source.specs.items():
        if id(spec.ranks) not in holders:
            holders[id(spec.ranks)] = tuple([source.files[number].rank for number in sorted(spec.ranks)])
        rows[name] = _row_of_spec(source, spec, holders[id(spec.ranks)])
    parts: dict[str, list[tuple[ShardFile, Shard]]] = {}
    for shard_file in source.files_without_specs:
        for name, tensor in shard_file.tensors.items():
            parts.setdefault(name, []).append((shard_file, tensor.shard))
    for name, of_tensor in parts.items():
        # The shape of the last part, as by the ends of its parts a tensor's shape is known.
        last = of_tensor[-1][1]
        rows[name] = TensorRow(
            name,
            last.dtype,
            element_shape(last.dtype, last.global_shape),
            full_box(last.global_shape).numel * ITEMSIZE[last.dtype],
            # tuple and sum take lists faster than generators, and there may be a million tensors.
            tuple([shard_file.rank for shard_file, _ in of_tensor]),
            sum([len(shard.boxes) for _, shard in of_tensor]),
            of_tensor[0][0].name,
        )
    for unreadable in source.unreadable:
        if unreadable.name not in rows:
            dtype, shape, nbytes = unreadable.dtype or "?", unreadable.shape, unreadable.nbytes
            if nbytes is None and shape is not None and dtype in ITEMSIZE:
                nbytes = full_box(shape).numel * ITEMSIZE[dtype]
                shape = element_shape(dtype, shape)
            file = unreadable.path.rpartition("/")[2]
            rows[unreadable.name] = TensorRow(unreadable.name, dtype, shape, nbytes, (), 0, file)
    return list(rows.values())


def _row_of_spec(source: Source, spec: ShardingSpec, holders: tuple[int, ...]) -> TensorRow:
    """Return the row of a tensor that is cut evenly over the files of these ranks."""
    return TensorRow(
        spec.name,
        spec.dtype,
        element_shape(spec.dtype, spec.global_shape),
        spec.nbytes,
        holders,
        len(spec.ranks),
        source.files[min(spec.ranks)].name,
    )


def known_bytes(rows: Iterable[TensorRow]) -> int:
    """Return the sum of the bytes of tensors, without tensors whose size is not known."""
    return sum(filter(None, map(attrgetter("nbytes"), rows)))


def aliases_of(source: Source) -> dict[str, str]:
    """Return the names of tied tensors, with the names under which they are kept. Not collective."""
    aliases: dict[str, str] = {}
    if source.manifest is not None:
        aliases |= source.manifest.get("aliases", {})
    for shard_file in source.files:
        aliases |= shard_file.aliases
    return aliases


# --- One tensor ---


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a tensor that is stored as one block, in one or more copies.

    Attributes:
        box: the region, in elements.
        holders: the ranks (or numbers of files) that have a copy.
        files: their files, below the checkpoint's directory.
        stored: the byte range of the first copy.
    """

    box: Box
    holders: tuple[int, ...]
    files: tuple[str, ...]
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
    kept = name
    if name not in source.tensor_names:
        kept = aliases_of(source).get(name, name)
    numbers = [number for number, file in enumerate(source.files) if kept in file.tensors]
    if not numbers:
        _refuse_unreadable(source, name)
        return None

    problems = []
    for problem in cover_problems(source, kept, numbers, {}):
        if not (is_part and isinstance(problem, IncompleteError)):
            problems.append(problem)
    copies: dict[Box, list[tuple[ShardFile, ByteRange]]] = {}
    for number in numbers:
        file = source.files[number]
        tensor = file.tensors[kept]
        for box, stored in zip(tensor.shard.boxes, tensor.byte_ranges, strict=True):
            copies.setdefault(box, []).append((file, stored))
    # If files disagree on dtype or shape, `cover_problems` has raised.
    shard = source.files[numbers[0]].tensors[kept].shard
    regions = []
    for box, of_box in copies.items():
        files = tuple(dict.fromkeys(source.path_below(file) for file, _ in of_box))
        holders = tuple(dict.fromkeys(file.rank for file, _ in of_box))
        regions.append(Region(element_box(shard.dtype, box), holders, files, of_box[0][1]))
    return TensorFacts(
        name=name,
        tied_to=None if kept == name else kept,
        dtype=shard.dtype,
        shape=element_shape(shard.dtype, shard.global_shape),
        nbytes=full_box(shard.global_shape).numel * ITEMSIZE[shard.dtype],
        section=next((section.name for section in sections_of(source) if kept in section.names), None),
        regions=tuple(regions),
        problems=tuple(problems),
    )


def known_digest(computed: Computed, tensor: SourceTensor, number: int, index: int) -> str | None:
    """Return the digest of a box that a file has, stored or in `computed`; None if it is not known. Not collective."""
    stored = tensor.byte_ranges[index].digest
    return stored if stored is not None else computed.get((number, tensor.shard.name, index))


def file_numbers(files: Iterable[ShardFile]) -> dict[str, list[int]]:
    """Return the numbers of the files that have each tensor. Not collective."""
    numbers: dict[str, list[int]] = {}
    for number, shard_file in enumerate(files):
        for name in shard_file.tensors:
            numbers.setdefault(name, []).append(number)
    return numbers


def cover_problems(
    source: Source, name: str, numbers: Sequence[int], computed: Computed
) -> Iterator[StateExchangeError]:
    """Yield an error if the boxes of a tensor do not cover it exactly once, else one for each copy that differs.

    Of a tensor of shape (4, 2) whose files have the boxes [0:2, 0:2] and [3:4, 0:2], it is an IncompleteError for
    [2:3, 0:2].

    Args:
        source: the source.
        name: the tensor's name.
        numbers: the numbers of the files that have the tensor.
        computed: digests that are not stored, by the numbers of the file and names of tensors and numbers of boxes.

    Raises:
        CorruptError, ReplicaError: two files disagree on dtype or shape.
    """
    stored = [source.files[number].tensors[name] for number in numbers]
    if len(stored) == 1 and stored[0].shard.is_whole:
        return  # one box, as most tensors have, without a copy
    holders = []
    for number, tensor in zip(numbers, stored, strict=True):
        file = source.files[number]
        holders.append(RankShards(file.rank, [tensor.shard], label=source.label_of(file)))
    # The proof of a merge: what is a finding here is what a merge or a load would refuse.
    try:
        (plan,), _ = plan_tensors(holders, ExportOptions())
    except (IncompleteError, OverlapError, UnsupportedError) as error:
        yield error
        return
    for piece in plan.pieces:
        expected = known_digest(computed, stored[piece.holder], numbers[piece.holder], piece.box_index)
        for holder, index in piece.replicas:
            digest = known_digest(computed, stored[holder], numbers[holder], index)
            # A copy without a digest may be equal, and is no finding.
            if None not in (expected, digest) and expected != digest:
                first, second = source.files[numbers[piece.holder]], source.files[numbers[holder]]
                labels = source.label_of(first), source.label_of(second)
                yield replica_error(name, piece.box, *labels, path=second.path)


def uncovered(source: Source) -> tuple[StateExchangeError, ...]:
    """Return the error of the first tensor that is not covered, if only boxes can show a missing file; else ().

    Not collective. That is so for files of torch.save, one per rank, and of torch's HuggingFaceStorageWriter. Where the
    world size is known, or a manifest lists the files, a missing one is a problem of the source.
    """
    if source.problems or source.world_size is not None or source.manifest is not None:
        return ()
    files = source.files_without_specs
    # The usual directory of whole tensors: no plan is made for each.
    if all(tensor.shard.is_whole for shard_file in files for tensor in shard_file.tensors.values()):
        return ()
    for name, numbers in file_numbers(files).items():
        try:
            problem = next(cover_problems(source, name, numbers, {}), None)
        except StateExchangeError as error:  # the files disagree on it
            problem = error
        if problem is not None:
            return (problem.located(path=source.path),)
    return ()


def element_box(dtype: str, box: Box) -> Box:
    """Return a box in elements for one in groups of a packed dtype (tensors.py)."""
    return Box(element_shape(dtype, box.offsets), element_shape(dtype, box.shape))


def group_box(dtype: str, box: Box) -> Box:
    """Return the least box in groups that contains a box in elements."""
    if dtype not in PACKED or not box.shape:
        return box
    # Of F4, two elements a group, elements 3 to 7 lie in groups 1 to 4.
    size = PACKED[dtype]
    begin, end = box.offsets[-1] // size, -(-box.ends[-1] // size)
    return Box((*box.offsets[:-1], begin), (*box.shape[:-1], end - begin))


def _refuse_unreadable(source: Source, name: str) -> None:
    """Raise the reason why a listed tensor cannot be read; do nothing for a name that is not listed."""
    for unreadable in source.unreadable:
        if unreadable.name != name:
            continue
        # The first reason that holds: its own, that of its file, or that nothing else is known.
        if unreadable.unsupported is not None:
            raise unreadable.unsupported
        for problem in source.problems:
            if problem.name == name or problem.path == unreadable.path:
                raise problem
        raise IncompleteError("its file is missing or broken", name=name, path=unreadable.path)


# --- The tree of modules ---


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module, or a run of numbered ones that are alike, with all that lies below.

    Attributes:
        name: its own part of the dotted name, as "self_attn"; "0..31" for modules that are alike; "" at the top.
        path: the dotted name, which ends in `name`.
        num_alike: number of modules that this stands for.
        num_tensors: number of tensors, of all of these modules.
        num_parameters: number of their elements.
        nbytes: their bytes.
        children: the modules and tensors directly below.
    """

    name: str
    path: str
    num_alike: int
    num_tensors: int
    num_parameters: int
    nbytes: int
    children: tuple[ModuleNode, ...]

    def walk(self, depth: int) -> Iterator[tuple[int, ModuleNode]]:
        """Yield (depth, node) for this node, which has `depth`, and all below it, parents first."""
        # A stack, as what waits longest is visited last: the children of a node before its siblings.
        waiting = [(depth, self)]
        while waiting:
            level, node = waiting.pop()
            yield level, node
            waiting += [(level + 1, child) for child in reversed(node.children)]


class Branch:
    """A module with its own tensors and the modules below it. Branches are alike if their `form` is equal.

    Of the names "a.w", "a.b.w" and "a.b.v", branch "a" has the tensor "a.w" and, below "b", the other two.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.below: dict[str, Branch] = {}
        self.tensors: list[TensorRow] = []
        self.num_tensors = self.num_parameters = self.nbytes = 0
        self.form = 0


def module_branches(rows: Iterable[TensorRow], depth: int) -> list[Branch]:
    """Return the modules in the tensors' names, down to `depth` parts of a name: the top first, parents first."""
    branches = [Branch("")]
    for row in rows:
        branch = branches[0]
        path = [branch]
        for part in row.name.split(".", depth)[:depth]:  # deeper parts count in the last one
            if part not in branch.below:
                branch.below[part] = Branch(f"{branch.path}.{part}" if len(path) > 1 else part)
                branches.append(branch.below[part])
            branch = branch.below[part]
            path.append(branch)
        branch.tensors.append(row)
        for module in path:
            module.num_tensors += 1
            module.num_parameters += row.num_parameters
            module.nbytes += row.nbytes or 0
    return branches


def module_tree(rows: Iterable[TensorRow], depth: int) -> ModuleNode:
    """Return the tree of the tensors' names, down to `depth` parts of a name.

    Successive numbered modules, such as layers.0 to layers.31, are one node if all below them has the same names,
    dtypes, shapes and bytes.
    """
    branches = module_branches(rows, depth)
    forms: dict[Hashable, int] = {}  # numbers, so that a form does not hold all forms below
    for branch in reversed(branches):  # children come after their parents
        # Of a tensor what lies below the depth of the tree, and dtype, shape and bytes.
        tensors = sorted((row.name.split(".", depth)[depth:], *row[1:4]) for row in branch.tensors)
        below = tuple(sorted((name, child.form) for name, child in branch.below.items()))
        branch.form = forms.setdefault((repr(tensors), below), len(forms))
    return _node("", "", branches[0], 1)


def _node(name: str, path: str, branch: Branch, num_alike: int) -> ModuleNode:
    """Return the node of so many branches that are alike, of which `branch` is one."""
    modules = branch.below
    runs: list[list[str]] = []  # the names in order of their numbers, successive ones that are alike together
    last = ""
    for part in (*sorted(filter(is_index, modules), key=int), *filterfalse(is_index, modules)):
        is_next = is_index(part) and is_index(last) and int(part) == int(last) + 1
        if is_next and modules[part].form == modules[last].form:
            runs[-1].append(part)
        else:
            runs.append([part])
        last = part
    children = []
    for run in runs:
        shown = run[0]
        if len(run) > 1:
            shown = f"{run[0]}..{run[-1]}"
        below = f"{path}.{shown}".removeprefix(".")
        children.append(_node(shown, below, modules[run[0]], num_alike * len(run)))
    return ModuleNode(
        name,
        path,
        num_alike,
        num_alike * branch.num_tensors,
        num_alike * branch.num_parameters,
        num_alike * branch.nbytes,
        tuple(children),
    )
