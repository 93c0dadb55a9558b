"""Read files of torch.save (.pt, .pth, .bin): one file, or a directory with one file per rank or per part of a model.

Nested dicts and lists become dotted names. A DTensor's pickle has its placements, its mesh and the coordinate of the
rank that saved it, and a ShardedTensor's pickle has offsets, so their boxes follow from the file alone; a plain tensor
counts as whole. An object of an unknown class is listed by its class and never constructed (pickles.py); if it contains
tensors, it is unsupported.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats.frameworks import state_file
from statexchange.formats.model_files import (
    INDEX,
    RANK,
    TORCH,
    check_numbers,
    model_files,
    only_indexed,
    read_index,
    read_listed,
)
from statexchange.formats.pickles import OpaqueObject, PickleValue, read_pickle
from statexchange.formats.sections import sections_from
from statexchange.formats.source import (
    Section,
    SectionName,
    ShardFile,
    Source,
    SourceTensor,
    UnreadableTensor,
    open_listed,
    parsing,
)
from statexchange.formats.torch_archive import (
    class_of,
    describe,
    dtype_of,
    holds_tensor,
    is_of_torch,
    is_plain,
    is_tensor,
    open_archive,
    refusal_of,
    unwrap_tensor,
    view_of,
)
from statexchange.sharding.paths import ListItem, Path, TupleItem
from statexchange.sharding.sharding_spec import DimSplit, local_boxes
from statexchange.sharding.shards import MAX_DIMS, Box, Shard, full_box, sizes_from_json
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Budget, StoredFile
from statexchange.values import MAX_DEPTH, encode

if TYPE_CHECKING:
    from typing_extensions import Self

_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_BESIDE_DCP = {"meta.pt", "common.pt"}  # of Lightning and of Megatron
_OF_DEEPSPEED = ("ds_version", "ds_config", "param_shapes")  # entries of its files of model states
_STEPS_PER_LEAF = 8  # to encode it takes about 15 us; an empty list has 2 bytes of a pickle
_STEPS_PER_REFUSAL = 256  # an error takes about 2,000 bytes; a tensor's pickle has 200
_MAX_KEY_TEXT = 512  # characters of a key that is not text, in a name
_KEY_TYPES = (str, int, float, bool, type(None), ListItem, TupleItem)  # of the keys of paths


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a file of torch.save or a directory with such files."""
    if opened.file is None:
        return any(name.removesuffix(INDEX).endswith(TORCH) for name in opened.store.non_directories)
    if opened.file.endswith((*TORCH, f".bin{INDEX}")):
        return True
    return is_of_torch(opened.store.open(opened.file))


def read(opened: OpenedPath) -> Source:
    """Return the source at a path.

    In a directory the files of the model (model_files.py) and of other parts of a job's state, such as
    ``optimizer.pt``, are read. If the names of several files have exactly one ``rankN`` each, N is the rank; otherwise
    the files are numbered in the order of their names.
    """
    indexed, names = _files_to_read(opened)
    problems: list[StateExchangeError] = []
    if opened.file is None and not indexed:
        problems += check_numbers(names, opened.store)
    sections: dict[str, SectionName] = {}  # of the entries of files whose names show it

    def read_one(rank: int, name: str) -> Source:
        # The file itself is not kept: the objects of its pickle may take far more memory than its entries.
        file = TorchFile.whole(open_listed(opened.store, name), rank)
        section = state_file(name)
        if section is not None:
            sections.update(dict.fromkeys(file.paths, section))
        return file.source(opened)

    source = read_listed("torch", opened, _ranked(names), read_one, indexed)
    problems += source.problems
    if indexed:
        source = only_indexed(source, indexed)
    has_tensors = source.unreadable or source.tensor_names
    if opened.file is None and not has_tensors and not _BESIDE_DCP.isdisjoint(names):
        text = "no file here has a tensor: those of a DCP, .metadata and .distcp files, are missing: copy them, too"
        problems.append(IncompleteError(text, path=opened.path))
    return replace(source, problems=problems, sections=_sections(source, sections))


def _sections(source: Source, sections: Mapping[str, SectionName]) -> tuple[Section, ...]:
    """Return the sections, if names of files show some; then all entries of other files are the model's.

    Raises:
        InvalidArgumentError: a tensor's name is in files of two sections.
    """
    for shard_file in source.files:
        section = state_file(shard_file.name)
        for name in shard_file.tensors:
            if sections.get(name, section) != section:
                text = f"the section {sections[name]!r} has this name, too, in another file: give the path of one file"
                raise InvalidArgumentError(text, name=name, path=shard_file.path)
    return sections_from(source.names if sections else (), lambda name: sections.get(name, "model"))


def _files_to_read(opened: OpenedPath) -> tuple[dict[str, str], list[str]]:
    """Return the file of each tensor by the index, {} without one, and the files to read."""
    store, files = opened.store, model_files(opened)
    if files.index is not None:
        indexed = read_index(store, files.index, ".bin")
        return indexed, sorted(set(indexed.values()))
    names = list(files.names)
    if opened.file is None:
        for name in store.non_directories:
            if name.endswith(TORCH) and state_file(name) is not None:
                names.append(name)
    return {}, names


def _ranked(names: Sequence[str]) -> list[tuple[int, str]]:
    """Return (rank, name) of the files to read."""
    ranked = []
    for name in names:
        digits = RANK.findall(name)
        # The number of a lone file may be LoRA's rank, and of two numbers either may be.
        if len(digits) != 1 or len(names) == 1:
            return list(enumerate(names))
        ranked.append((int(digits[0]), name))
    return sorted(ranked)


class TorchFile:
    """One file of torch.save: its tensors, its other entries, and its unsupported tensors.

    Attributes:
        path: the file's path.
        rank: its rank among all ranks, or its number.
        budget: the budget that is left for reading the content of the pickle.
        tensors: the tensors that were added, by dotted names.
        aliases: further names of tensors, by which these are listed again.
        others: descriptions, by name, of entries that are not tensors.
        texts: those of `others` that are plain values, as JSON text of `values.encode`.
        unsupported: tensors that cannot be read.
        root: the value of the pickle, as `read_pickle` returns it.
        paths: the path of each entry by its name, None if it is not recorded.
    """

    def __init__(self, file: StoredFile, rank: int) -> None:
        self._file = file
        self.path = file.path
        self.rank = rank
        self.tensors: dict[str, SourceTensor] = {}
        self.aliases: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.unsupported: list[UnreadableTensor] = []
        self.paths: dict[str, Path | None] = {}
        self._first_names: dict[object, str] = {}  # by what two names of one tensor have in common
        self._without_tensors: set[int] = set()
        self._archive = open_archive(file)
        data = self._archive.pickle()
        self._nbytes = len(data)
        self.budget = file.budget.of(file.path, len(data))
        self._ranks_in_order: dict[int, bool] = {}
        self.root = read_pickle(data, file.path, self.budget, unknown_classes=True)

    @classmethod
    def whole(cls, file: StoredFile, rank: int) -> Self:
        """Return a file with all its entries."""
        whole = cls(file, rank)
        whole.add_entries("", whole.root)
        if any(name.startswith(_OF_DEEPSPEED) for name in whole.others):
            whole._refuse_placeholders()
        return whole

    @property
    def shard_file(self) -> ShardFile:
        """The file with the tensors that were added."""
        return ShardFile(self.rank, self._file, self.tensors, self.aliases)

    def source(self, opened: OpenedPath) -> Source:
        """Return what was added as a source."""
        return Source(
            "torch",
            opened,
            (self.shard_file,),
            others=self.others,
            texts=self.texts,
            unreadable=self.unsupported,
            paths={name: path for name, path in self.paths.items() if path is not None},
        )

    def add_entries(self, prefix: str, root: PickleValue) -> None:
        """Add all that a value contains, nested keys joined with dots: tensors, and descriptions of anything else."""
        for key, keys, value in leaves(root, self.path, self.budget):
            name = f"{prefix}{key}"
            self._check_new(name)
            self.paths[name] = keys
            if is_tensor(value):
                self.add_tensor(name, value)
                continue
            self.budget.spend(_STEPS_PER_LEAF)
            description = describe(value)
            if holds_tensor(value, self.budget, self._without_tensors):
                self._refuse(name, UnsupportedError(refusal_of(value)))
            else:
                self.others[name] = description
            if is_plain(value, self._nbytes, self.budget):
                text = self.texts[name] = encode(value)
                self.budget.spend(1, len(text))

    def add_tensor(self, name: str, value: OpaqueObject) -> None:
        """Add a tensor, as an alias if it has the bytes of another; list it as unsupported if it cannot be read."""
        try:
            tensor = self._tensor(name, value)
        except UnsupportedError as error:
            self._refuse(name, error)
            return
        self.tensors[name] = tensor
        key = tensor.shard.dtype, tensor.shard.global_shape, tensor.shard.boxes, tensor.byte_ranges
        if tensor.shard.nbytes and self._first_names.setdefault(key, name) != name:
            self.aliases[name] = self._first_names[key]

    def _check_new(self, name: str) -> None:
        """Raise CorruptError if an entry of this name was added before."""
        if name in self.paths or name in self.tensors:
            text = "two entries have this name when nested keys are joined with dots"
            raise CorruptError(text, name=name, path=self.path)

    def _refuse_placeholders(self) -> None:
        """Move the tensors of shape [0] to the unsupported ones: ZeRO-3 has their values in other files."""
        empty = [name for name, tensor in self.tensors.items() if tensor.shard.global_shape == (0,)]
        text = (
            f"DeepSpeed ZeRO-3 wrote {len(empty)} tensors of shape [0] here; their values are in the "
            "*_optim_states.pt files: give the directory with all files, not one of them"
        )
        for name in empty:
            del self.tensors[name]
            self._refuse(name, UnsupportedError(text))

    def _refuse(self, name: str, error: UnsupportedError) -> None:
        """List an unsupported tensor."""
        self.budget.spend(_STEPS_PER_REFUSAL)
        located = error.located(rank=self.rank, name=name, path=self.path)
        self.unsupported.append(UnreadableTensor(name, None, None, self.path, located))

    def _tensor(self, name: str, value: OpaqueObject) -> SourceTensor:
        with parsing("not what torch writes for a tensor", name=name or None, path=self.path):
            tensor = unwrap_tensor(value)
            if class_of(tensor) == "DTensor":
                return self._distributed(name, tensor)
            if class_of(tensor) == _SHARDED_TENSOR:
                return self._sharded(name, tensor)
            view = view_of(tensor)
            shard = Shard(name, view.dtype, view.shape, (full_box(view.shape),))
            return SourceTensor(shard, (self._archive.byte_range(view),))

    def _sharded(self, name: str, tensor: OpaqueObject) -> SourceTensor:
        """Return the shard of a ShardedTensor, as FSDP1 saves it: its local shards have their offsets."""
        # `_rebuild_from_type_v2` of torch has (function, class, arguments, attributes), and its function here
        # `_rebuild_wrapper_subclass` (class, dtype, shape, ...).
        _, _, args, state = tensor.args
        shape, dtype = sizes_from_json(args[2]), dtype_of(args[1])
        boxes, byte_ranges = [], []
        self.budget.spend(len(state[0]))
        for local_shard in state[0]:
            fields = local_shard.state[1]
            placement = fields["metadata"].state[1]
            box = Box.from_json([placement["shard_offsets"], placement["shard_sizes"]])
            view = view_of(unwrap_tensor(fields["tensor"]))
            if (view.dtype, view.shape) != (dtype, box.shape):
                problem = "a local shard does not fit its metadata"
                present, expected = f"{view.dtype} {view.shape}", f"{dtype} {box.shape}"
                raise CorruptError(problem, name=name, path=self.path, expected=expected, found=present)
            boxes.append(box)
            byte_ranges.append(self._archive.byte_range(view))
        return SourceTensor(Shard(name, dtype, shape, tuple(boxes)), tuple(byte_ranges))

    def _distributed(self, name: str, dtensor: OpaqueObject) -> SourceTensor:
        """Return a DTensor's shard: the boxes of its placements, each with its part of the local tensor.

        Of shape (5, 4) with ``[Shard(0)]`` on rank 1 of a mesh of 2, it is the box of rows 3 and 4.
        """
        _, _, args, state = dtensor.args  # as above
        attributes = state[1] if type(state) is tuple else state
        shape, spec = sizes_from_json(args[2]), attributes["_spec"].state
        local = view_of(unwrap_tensor(attributes["_local_tensor"]))
        local_range = self._archive.byte_range(local)
        mesh = spec["mesh"].state
        splits = list(map(_dim_split, _checked_count(spec["placements"])))
        if "_coordinate_on_dim" not in mesh:
            raise UnsupportedError("its mesh does not have the coordinate of the rank that saved it")
        boxes = []
        for split in splits:
            if split is not None:
                # A rank has as many runs of the dim, but no more than this has indices.
                self.budget.spend(min(split.split_factor, max(shape, default=0)))
        # A rank outside of the mesh has no coordinate, and no part of the tensor.
        if mesh["_coordinate_on_dim"] is not None:
            mesh_shape = _mesh_shape(mesh, splits, self.budget, self._ranks_in_order)
            boxes = local_boxes(shape, mesh_shape, sizes_from_json(mesh["_coordinate_on_dim"]), splits)
        self.budget.spend(len(boxes))
        shard = Shard(name, local.dtype, shape, tuple(box for box, _ in boxes))
        ends = [tuple(map(operator.add, local_offsets, box.shape)) for box, local_offsets in boxes]
        expected = tuple(map(max, ends[0], *ends)) if ends else local.shape  # ends[0] twice: `max` takes no lone number
        if shard.nbytes != local.nbytes or expected != local.shape:
            problem = "its local tensor does not fit its placements"
            raise CorruptError(problem, name=name, path=self.path, expected=expected, found=local.shape)
        return SourceTensor.of_blocks(shard, local_range, local.shape, [local_offsets for _, local_offsets in boxes])


def leaves(
    value: PickleValue, path: str, budget: Budget, name: str = "", keys: Path | None = (), depth: int = 0
) -> Iterator[tuple[str, Path | None, PickleValue]]:
    """Yield (dotted name, path, value) of all but containers, in order. A sequence without tensors is one leaf.

    The path is None where its keys do not join to the name, or a key is no plain value. A pickle can refer to one list
    many times, so visits, the text of names and the keys of paths are counted against the budget.

    Args:
        value: what the pickle of the file at `path` has.
        path: the file's path, for messages.
        budget: for visits and names.
        name: the dotted name of `value`, "" if it is all of the pickle.
        keys: the path of `value`.
        depth: the number of containers around `value`.
    """
    if depth > MAX_DEPTH:
        raise CorruptError(f"refused: it is nested more than {MAX_DEPTH} levels deep", name=name[:80], path=path)
    if type(value) in (dict, list, tuple, set, frozenset):
        budget.spend(len(value))
    children = _children(value)
    if children is None:
        if name:
            yield name, keys, value
        # The file is one value. An empty mapping has no entry.
        elif type(value) is not dict:
            yield "tensor" if is_tensor(value) else "value", None, value
        return
    if depth and not name:  # below a key without text: names do not have its dot
        keys = None
    for key, child in children:
        text = key if type(key) is str else excerpt(key, _MAX_KEY_TEXT)
        below = None
        # A longer text may be cut short.
        if keys is not None and type(key) in _KEY_TYPES and (type(key) is str or len(text) < _MAX_KEY_TEXT):
            below = (*keys, key)
        budget.spend(1, len(name) + len(text))  # a path has no more keys than its name has characters
        yield from leaves(child, path, budget, f"{name}.{text}" if name else text, below, depth + 1)


def _children(value: PickleValue) -> Iterable[tuple[PickleValue, PickleValue]] | None:
    """Return (key, value) of each entry of a container; None for a leaf."""
    if type(value) is dict:
        if OpaqueObject in map(type, value):  # a name cannot be made of an object
            return None
        return value.items() if value else None
    if type(value) in (list, tuple):
        kinds = set(map(type, value))
        if not kinds.isdisjoint((dict, list, tuple)) or (OpaqueObject in kinds and any(map(is_tensor, value))):
            kind = ListItem if type(value) is list else TupleItem
            return ((kind(index), item) for index, item in enumerate(value))
    return None


def _dim_split(placement: OpaqueObject) -> DimSplit | None:
    """Return how a placement splits a dim; None for Replicate."""
    if placement.name == "Replicate":
        return None
    if placement.name in ("Shard", "_StridedShard"):
        factor = placement.state["split_factor"] if placement.name == "_StridedShard" else 1
        return DimSplit(*sizes_from_json((placement.state["dim"], factor)))
    raise UnsupportedError(f"placement {placement.name} is a pending reduction: redistribute the tensor, then save it")


def _mesh_shape(
    mesh: dict[str, PickleValue], splits: Sequence[DimSplit | None], budget: Budget, in_order: dict[int, bool]
) -> list[int]:
    """Return the shape of a mesh; `splits` has a DimSplit for each axis that splits the tensor.

    `in_order` keeps, by the id of a list of ranks, whether they ascend: meshes share such lists, and their ids stay
    valid because the pickle's root keeps them alive.

    Raises:
        UnsupportedError: the tensor is split, and ranks are not in ascending order, as state/describe.py refuses, too.
    """
    if "_layout" in mesh:
        ranks, axes = mesh["_flatten_rank_map"], _axes(mesh["_layout"].state)
    else:  # torch before 2.9
        ranks, axes = mesh["_flatten_mesh_list"], [((size,), (1,)) for size in sizes_from_json(mesh["mesh"].args[2])]
    if id(ranks) not in in_order:
        budget.spend(len(ranks))
        if any(type(rank) is not int for rank in ranks):
            raise ValueError("a rank of a mesh is not a number")
        in_order[id(ranks)] = list(ranks) == sorted(ranks)
    shape = []
    for (sizes, strides), split in zip(axes, splits, strict=True):
        shape.append(math.prod(sizes))
        if shape[-1] > len(ranks):
            raise ValueError(f"a mesh of {len(ranks)} ranks has an axis that is larger")
        if split is not None and (not in_order[id(ranks)] or list(strides) != sorted(strides, reverse=True)):
            text = (
                "its mesh lists ranks out of order, for which torch itself is inconsistent about which has which part"
            )
            raise UnsupportedError(text)
    return shape


def _axes(layout: dict[str, PickleValue]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, of each axis of a mesh, the sizes and the strides of its parts, the outer ones first."""
    if "axes" in layout:  # as torch 2.13 has it; older releases have nested tuples
        pairs = [(axis.state["shape"], axis.state["stride"]) for axis in _checked_count(layout["axes"])]
    else:
        shapes, strides = _checked_count(_as_tuple(layout["shape"])), _checked_count(_as_tuple(layout["stride"]))
        pairs = list(zip(shapes, strides, strict=True))
    return [(sizes_from_json(_as_tuple(shape)), sizes_from_json(_as_tuple(stride))) for shape, stride in pairs]


def _checked_count(axes: Sequence[PickleValue]) -> Sequence[PickleValue]:
    """Return `axes`; raise ValueError for too many: a pickle may use one long list for many tensors."""
    if len(axes) > MAX_DIMS:
        raise ValueError(f"a mesh of {len(axes)} axes")
    return axes


def _as_tuple(value: PickleValue) -> tuple[PickleValue, ...]:
    return value if type(value) is tuple else (value,)
