"""Read the legacy format of Megatron-LM: an iteration with a directory of each model-parallel rank.

A rank's directory, ``mp_rank_TT``, ``mp_rank_TT_PPP``, ``mp_rank_TT_EEE`` or ``mp_rank_TT_PPP_EEE``, has
``model_optim_rng.pt``. TT, PPP and EEE are its tensor, pipeline and expert parallel rank; PPP and EEE are left out
where there is only one. Each file has the arguments of the run, with the number of ranks. A rank's tensors
are plain; how they are divided follows from the names of parameters.

A column-parallel layer has a part of the outputs on each rank: dim 0 of its weight and its bias. A row-parallel layer
has a part of the inputs: dim 1 of its weight; its bias is whole. Embeddings are divided by rows of the vocabulary,
which is padded so that all parts are equal. Norms and routers are whole on each rank. In a gated ``linear_fc1`` each
rank has its part of the gate and then its part of the other half, as two blocks.

* Each chunk of layers on a pipeline stage numbers its layers from 0. In the model the first chunks of all stages come
  first, in the order of stages, then the second chunks, and so on. So a chunk's first layer has as its number the count
  of layers in the chunks before.
* Each expert-parallel rank numbers its experts from 0, too.
* If the output layer is tied to the embedding, the last stage has a copy of the embedding under the name of the output
  layer. It is read as another copy of the embedding, and merges compare the two.
* ``distrib_optim.pt`` has flat buffers of the distributed optimizer. It is listed, but not read as tensors.
* What each rank has beside the model (optimizer, random states) is read under the name of its directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.formats import torch_file
from statexchange.formats.megatron_arguments import RunArguments, section_of_key
from statexchange.formats.sections import sections_from
from statexchange.formats.source import SectionName, ShardFile, Source, SourceTensor, UnreadableTensor
from statexchange.formats.torch_file import TorchFile
from statexchange.sharding.sharding_spec import DimSplit, local_boxes
from statexchange.sharding.shards import Shard, full_box
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store

__all__ = ["division_of", "is_rank", "is_rank_file", "matches", "read", "read_one"]

_ROWS = re.compile(
    r"(?:^|\.)(?:word_embeddings|output_layer|linear_(?:qkv|q|kv|q_proj|q_up_proj|kv_up_proj|fc1))\.(?:weight|bias)\d*$"
)
_COLUMNS = re.compile(r"(?:^|\.)linear_(?:proj|fc2)\.weight\d*$")
_WHOLE = (
    re.compile(r"(?:^|\.)linear_(?:proj|fc2)\.bias\d*$"),
    re.compile(r"(?:^|\.)\w*layernorm\.(?:weight|bias)$|\.layer_norm_(?:weight|bias)$|\.[eh]norm\.(?:weight|bias)$"),
    re.compile(r"(?:^|\.)(?:position|tokentype)_embeddings\.weight$"),
    re.compile(r"\.router\.(?:weight|bias|expert_bias)$|\.shared_experts\.gate_weight$"),
)
_EXPERT = re.compile(r"\.experts\.")
_FC1 = re.compile(r"(^|\.)linear_fc1\.(?:weight|bias)(\d*)$")


def _gate_sibling(name: str) -> str | None:
    """Return the name of the ``linear_fc2`` weight whose columns show whether this ``linear_fc1`` is gated."""
    match = _FC1.search(name)
    if match is None:
        return None
    return f"{name[: match.start()]}{match[1]}linear_fc2.weight{match[2]}"


def division_of(name: str, shape: tuple[int, ...], sibling: tuple[int, ...] | None) -> DimSplit | None:
    """Return how a parameter is divided over tensor-parallel ranks; None if each rank has the whole.

    The dim of a gated parameter is cut into its two halves first, and a rank has a part of each.

    Args:
        name: the parameter's name.
        shape: the shape of a rank's part.
        sibling: the shape of the rank's part of `_gate_sibling(name)`; None if there is none.

    Raises:
        UnsupportedError: the name is not known, or the sibling does not show whether this one is gated.
    """
    if any(pattern.search(name) for pattern in _WHOLE):
        return None
    if _COLUMNS.search(name):
        return DimSplit(1)
    if _ROWS.search(name) is None:
        raise UnsupportedError(
            "it is not known how Megatron's tensor parallelism divides a parameter of this name: leave it out with "
            "exclude (--exclude)"
        )
    if _gate_sibling(name) is None:
        return DimSplit(0)
    rows = shape[0] if shape else 0
    columns = sibling[1] if sibling is not None and len(sibling) == 2 else 0
    if rows not in (columns, 2 * columns) or not columns:
        raise UnsupportedError(
            f"its linear_fc2 does not show whether it is gated: {rows} rows here, {columns} columns there; leave it "
            "out with exclude (--exclude)"
        )
    return DimSplit(0, rows // columns)


_MAX_RANKS = 1 << 17  # more than any run has: the arguments of a damaged file may say anything
_FILE, _OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_DIRECTORY = re.compile(r"mp_rank_[0-9]{2,6}(_[0-9]{3,6}){0,2}")
_MODEL = re.compile(r"model([0-9]{0,4})\.(.+)", re.DOTALL)
_LAYER = re.compile(r"(?P<block>(?:^|.*?\.))layers\.(?P<number>[0-9]{1,6})(?=\.)")
_LOCAL_EXPERT = re.compile(r"(\.experts\.local_experts\.)([0-9]{1,6})(?=\.)")
_GROUPED_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))([0-9]{1,6})$")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_EXTRA_STATE = "_extra_state"
_MULTI_TOKEN = "mtp."  # noqa: S105 (layers that predict further tokens, beside those that are counted)


# A number by (block of layers, chunk, pipeline stage). A block is the part of names before "layers.".
_ByChunk = dict[tuple[str, int, int], int]


@dataclass(frozen=True, slots=True)
class _Position:
    """A rank's index along the tensor, pipeline and expert parallel axes."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """One model-parallel rank: its directory, its position and its file."""

    directory: str
    position: _Position
    number: int
    file: TorchFile


@dataclass(frozen=True, slots=True)
class _ModelTensor:
    """A rank's tensor of the model: its chunk, and its name in the chunk."""

    chunk: int
    name: str
    tensor: SourceTensor


def matches(store: Store) -> bool:
    """Whether a directory is an iteration in this format."""
    return any(map(_DIRECTORY.fullmatch, store.directories))


def is_rank_file(name: str) -> bool:
    """Whether this is the name of a rank's file."""
    return name == _FILE


def is_rank(store: Store) -> bool:
    """Whether a directory is a rank's."""
    name = os.path.basename(store.path.rstrip("/"))
    return _FILE in store.listing and _DIRECTORY.fullmatch(name) is not None


def read_one(opened: OpenedPath) -> Source:
    """Return the source of one rank's directory or file, if its run had no other ranks.

    Raises:
        InvalidArgumentError: the file has only a part of the model.
    """
    file = TorchFile.whole(opened.store.open(_FILE), 0)
    if type(file.root) is not dict or "args" not in file.root:  # of another program
        return torch_file.read(opened)
    arguments = RunArguments.parse(file.root, file.shard_file.path)
    num_ranks = arguments.tensor * arguments.pipeline * arguments.expert
    if num_ranks > 1:
        above = os.path.dirname(opened.store.path.rstrip("/"))
        text = f"this is one of {num_ranks} ranks' parts of the model: give the directory of the iteration, {above}"
        raise InvalidArgumentError(text, path=file.shard_file.path)
    return _Reader(opened, opened.store, [_Rank("", _Position(0, 0, 0), 0, file)], arguments, []).source()


def read(opened: OpenedPath, store: Store) -> Source:
    """Return the source of an iteration's directory, `store`, in an opened path.

    A rank that is missing, or belongs to another save, is a problem of the source.
    """
    problems: list[StateExchangeError] = []
    files: dict[str, TorchFile] = {}
    names = [name for name in store.directories if _DIRECTORY.fullmatch(name)]
    for name in names:
        below = store.below(name)
        try:
            if _FILE not in below.listing:
                text = f"this rank's {_FILE} is missing: the save did not finish, or it was not copied completely"
                raise IncompleteError(text, path=below.path_of(_FILE))
            files[name] = TorchFile.whole(below.open(_FILE), len(files))
        except StateExchangeError as error:
            problems.append(error)
    arguments = None
    for name, file in files.items():
        try:
            found = RunArguments.parse(file.root, file.shard_file.path)
            if arguments is None:
                arguments = found
            elif found != arguments:
                text = f"the run's arguments or iteration differ from those in {names[0]}: this rank is of another save"
                raise IncompleteError(text, path=store.path_of(name), expected=str(arguments), found=str(found))
        except StateExchangeError as error:
            problems.append(error)
    if arguments is None:
        return Source("megatron ranks", opened, (), problems=tuple(problems))
    positions = _directories(arguments, store.path)
    problems += _missing(store, names, positions, arguments)
    problems += _optimizer_problems([store.below(name) for name in names])
    ranks = []
    for number, (name, position) in enumerate(positions.items()):
        if name in files:
            ranks.append(_Rank(name, position, number, files[name]))
    return _Reader(opened, store, ranks, arguments, problems).source()


def _directories(arguments: RunArguments, path: str) -> dict[str, _Position]:
    """Return each rank's position by the name of its directory, in the order of ranks: tensor-parallel ones adjoin."""
    num_ranks = arguments.tensor * arguments.pipeline * arguments.expert
    if num_ranks > _MAX_RANKS:
        raise CorruptError(f"not what Megatron writes: the arguments of a run on {num_ranks} ranks", path=path)
    positions: dict[str, _Position] = {}
    for pipeline in range(arguments.pipeline):
        for expert in range(arguments.expert):
            for tensor in range(arguments.tensor):
                name = f"mp_rank_{tensor:02d}"
                if arguments.pipeline > 1:
                    name += f"_{pipeline:03d}"
                if arguments.expert > 1:
                    name += f"_{expert:03d}"
                positions[name] = _Position(tensor, pipeline, expert)
    return positions


def _missing(
    store: Store, names: Sequence[str], positions: Mapping[str, _Position], arguments: RunArguments
) -> list[StateExchangeError]:
    """Return an error for the first rank without a directory, and one for each directory without a rank."""
    problems: list[StateExchangeError] = []
    sizes = f"tensor {arguments.tensor} x pipeline {arguments.pipeline} x expert parallel {arguments.expert}"
    absent = [name for name in positions if name not in names]
    if absent:
        text = f"{len(absent)} of {len(positions)} ranks are missing ({sizes}), this one and others"
        if len(absent) == 1:
            text = f"this one of {len(positions)} ranks is missing ({sizes})"
        problems.append(IncompleteError(text, path=store.path_of(absent[0])))
    for name in names:
        if name not in positions:
            text = f"the arguments of the run, {sizes}, have no such rank: this directory is of another save"
            problems.append(IncompleteError(text, path=store.path_of(name)))
    return problems


def _optimizer_problems(stores: Sequence[Store]) -> list[StateExchangeError]:
    """Return an error for each rank's file of the distributed optimizer that is missing or broken.

    Only the file's pickle is read, not its flat buffers.
    """
    problems: list[StateExchangeError] = []
    is_saved = any(_OPTIMIZER_FILE in store.listing for store in stores)
    for store in stores if is_saved else ():
        try:
            torch_file.open_archive(store.open(_OPTIMIZER_FILE)).pickle()
        except NotFoundError:
            text = "this rank's file of the distributed optimizer is missing, and others have one"
            problems.append(IncompleteError(text, path=store.path_of(_OPTIMIZER_FILE)))
        except StateExchangeError as error:
            problems.append(error)
    return problems


class _Reader:
    """Builds the source of an iteration from its ranks."""

    def __init__(
        self,
        opened: OpenedPath,
        store: Store,
        ranks: list[_Rank],
        arguments: RunArguments,
        problems: list[StateExchangeError],
    ) -> None:
        self._opened = opened
        self._store = store
        self._ranks = ranks
        self._arguments = arguments
        self._problems = problems
        self._others: dict[str, str] = {"args": str(arguments)}
        self._unreadable: list[UnreadableTensor] = []
        self._section_of: dict[str, SectionName] = {"args": "other"}

    def source(self) -> Source:
        """Return the source."""
        counts = self._layer_counts()
        self._check_layers(counts)
        firsts = _first_layers(counts)
        files = [self._shard_file(rank, firsts) for rank in self._ranks]
        arguments = self._arguments
        return Source(
            "megatron ranks",
            self._opened,
            tuple(files),
            step=arguments.iteration,
            world_size=arguments.tensor * arguments.pipeline * arguments.expert,
            others=self._others,
            problems=tuple(self._problems),
            unreadable=tuple(self._unreadable),
            sections=sections_from(self._section_of, self._section_of.__getitem__),
            arguments=arguments.model,
        )

    def _layer_counts(self) -> _ByChunk:
        """Return the number of layers of each chunk."""
        counts: _ByChunk = {}
        for rank in self._ranks:
            for found in _model(rank):
                match = _LAYER.match(found.name)
                if match is not None:
                    key = match["block"], found.chunk, rank.position.pipeline
                    counts[key] = max(counts.get(key, 0), int(match["number"]) + 1)
        return counts

    def _check_layers(self, counts: _ByChunk) -> None:
        """Add a problem if the stages together do not have the layers of the run's arguments."""
        expected = self._arguments.num_layers
        blocks = {block for block, _, _ in counts if not block.startswith(_MULTI_TOKEN)}
        if self._problems or expected is None or len(blocks) != 1:
            return
        (block,) = blocks
        of_stage = {rank.position.pipeline: 0 for rank in self._ranks}
        for (found_block, _, stage), count in counts.items():
            if found_block == block:
                of_stage[stage] += count
        if sum(of_stage.values()) != expected:
            stage = min(of_stage, key=lambda stage: of_stage[stage])
            directory = next(rank.directory for rank in self._ranks if rank.position.pipeline == stage)
            self._problems.append(
                IncompleteError(
                    "the pipeline stages do not have as many layers as the run's arguments; this one has the fewest",
                    path=self._store.path_of(directory) if directory else self._store.path,
                    expected=f"{expected} layers",
                    found=f"{sum(of_stage.values())} layers",
                )
            )

    def _shard_file(self, rank: _Rank, firsts: _ByChunk) -> ShardFile:
        of_model = list(_model(rank))
        shapes = {(found.chunk, found.name): found.tensor.shard.global_shape for found in of_model}
        new_names: dict[str, str] = {}
        tensors: dict[str, SourceTensor] = {}
        names = {found.name for found in of_model}
        for found in of_model:
            old_name = found.tensor.shard.name
            if found.name.endswith(_EXTRA_STATE):
                self._describe(found.name, f"{found.tensor.shard.nbytes} bytes of extra state", "other")
                continue
            name = self._global_name(found, rank, firsts)
            is_last = rank.position.pipeline == self._arguments.pipeline - 1
            if name == _OUTPUT and self._arguments.is_tied and is_last and _EMBEDDING not in names:
                name = _EMBEDDING
            self._section_of[name] = "model"
            try:
                placed = self._part_of_whole(found, name, rank, shapes)
            except UnsupportedError as error:
                located = error.located(rank=rank.number, name=name, path=rank.file.shard_file.path)
                shard = found.tensor.shard
                self._unreadable.append(UnreadableTensor(name, shard.dtype, None, located.path or "", located))
                continue
            if name in tensors:
                text = "two tensors of this rank have this name once layers and experts are numbered over all ranks"
                raise CorruptError(text, name=name, rank=rank.number, path=rank.file.shard_file.path)
            tensors[name] = placed
            new_names[old_name] = name
        tensors |= self._own_entries(rank)
        old_aliases = rank.file.shard_file.aliases
        aliases = {
            new_names[alias]: new_names[name]
            for alias, name in old_aliases.items()
            if alias in new_names and name in new_names
        }
        return replace(rank.file.shard_file, rank=rank.number, tensors=tensors, aliases=aliases)

    def _own_entries(self, rank: _Rank) -> Mapping[str, SourceTensor]:
        """Return the rank's tensors that are not the model's, and describe its other values."""
        prefix = f"{rank.directory}." if rank.directory else ""
        rest = rank.file.shard_file.renamed(lambda name: prefix + name if _MODEL.fullmatch(name) is None else None)
        for name in rest.tensors:
            self._section_of[name] = section_of_key(name.removeprefix(prefix)) or "other"
        for unsupported in rank.file.unsupported:
            new_name = prefix + unsupported.name
            self._unreadable.append(replace(unsupported, name=new_name))
            is_model = _MODEL.fullmatch(unsupported.name) is not None
            self._section_of[new_name] = section_of_key(unsupported.name) or ("model" if is_model else "other")
        for name, description in rank.file.others.items():
            match = _MODEL.fullmatch(name)
            if match is not None:
                self._describe(match[2], description, "other")
            elif name != "args":
                self._describe(name, description, section_of_key(name) or "other")
        directory = self._store.below(rank.directory) if rank.directory else self._store
        if _OPTIMIZER_FILE in directory.listing:
            self._describe(_OPTIMIZER_FILE, "flat buffers of the distributed optimizer, not read", "optimizer")
        return rest.tensors

    def _describe(self, name: str, description: str, section: SectionName) -> None:
        """List an entry that is not a tensor, of the first rank that has it."""
        self._others.setdefault(name, description)
        self._section_of.setdefault(name, section)

    def _global_name(self, found: _ModelTensor, rank: _Rank, firsts: _ByChunk) -> str:
        """Return a name in which layers and experts are numbered over all ranks."""
        name = found.name
        match = _LAYER.match(name)
        if match is not None:
            before = firsts[match["block"], found.chunk, rank.position.pipeline]
            name = f"{match['block']}layers.{int(match['number']) + before}{name[match.end() :]}"
        for pattern in (_LOCAL_EXPERT, _GROUPED_EXPERT):
            expert = pattern.search(name)
            if expert is not None and self._arguments.expert > 1:
                before = rank.position.expert * ((self._arguments.num_experts or 0) // self._arguments.expert)
                name = f"{name[: expert.start()]}{expert[1]}{int(expert[2]) + before}{name[expert.end() :]}"
        return name

    def _part_of_whole(
        self, found: _ModelTensor, name: str, rank: _Rank, shapes: dict[tuple[int, str], tuple[int, ...]]
    ) -> SourceTensor:
        """Return a tensor of the model as a part of the whole one."""
        arguments = self._arguments
        shard = found.tensor.shard
        _check_experts(found.name, arguments)
        whole = replace(found.tensor, shard=replace(shard, name=name))
        if arguments.tensor == 1:
            return whole
        if shard.boxes != (full_box(shard.global_shape),):
            raise UnsupportedError("it is a DTensor, which the legacy format is not known to have")
        sibling = _gate_sibling(found.name)
        split = division_of(found.name, shard.global_shape, shapes.get((found.chunk, sibling or "")))
        if split is None:
            return whole
        shape = list(shard.global_shape)
        try:
            if split.dim >= len(shape):
                raise ValueError(f"a tensor of shape {shard.global_shape} has no dim {split.dim}")
            shape[split.dim] *= arguments.tensor
            boxes = local_boxes(shape, [arguments.tensor], [rank.position.tensor], [split])
            placed = Shard(name, shard.dtype, tuple(shape), tuple(box for box, _ in boxes))
        except ValueError as error:
            raise UnsupportedError(f"{error}: leave it out with exclude (--exclude)") from None
        (byte_range,) = found.tensor.byte_ranges
        return SourceTensor.of_blocks(placed, byte_range, shard.global_shape, [offsets for _, offsets in boxes])


def _first_layers(counts: _ByChunk) -> _ByChunk:
    """Return the number of the first layer of each chunk."""
    firsts: _ByChunk = {}
    ends: dict[str, int] = {}
    for block, chunk, stage in sorted(counts):
        firsts[block, chunk, stage] = ends.get(block, 0)
        ends[block] = firsts[block, chunk, stage] + counts[block, chunk, stage]
    return firsts


def _check_experts(name: str, arguments: RunArguments) -> None:
    """Raise UnsupportedError for a parameter of experts whose division over ranks is not known."""
    if _EXPERT.search(name) is None:
        return
    is_numbered = _LOCAL_EXPERT.search(name) is not None or _GROUPED_EXPERT.search(name) is not None
    if arguments.expert > 1 and (not is_numbered or not arguments.num_experts):
        raise UnsupportedError(
            "it is not known which experts a rank has of a parameter of this name: leave it out with exclude "
            "(--exclude)"
        )
    if arguments.expert_tensor != arguments.tensor:
        raise UnsupportedError(
            f"experts are divided over {arguments.expert_tensor} tensor-parallel ranks, all else over "
            f"{arguments.tensor}, which is not read: leave them out with exclude (--exclude)"
        )


def _model(rank: _Rank) -> Iterator[_ModelTensor]:
    """Yield the tensors of a rank's model; its chunks are ``model``, or ``model0``, ``model1`` and so on."""
    for name, tensor in rank.file.shard_file.tensors.items():
        match = _MODEL.fullmatch(name)
        if match is not None:
            yield _ModelTensor(int(match[1] or 0), match[2], tensor)
