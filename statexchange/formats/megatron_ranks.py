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

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from statexchange.errors import CorruptError, IncompleteError, StateExchangeError, UnsupportedError
from statexchange.formats.megatron_arguments import RANK_DIRECTORY, RunArguments, with_sections
from statexchange.formats.source import ShardFile, Source, SourceTensor, UnreadableTensor, open_listed, parsing
from statexchange.formats.torch_archive import open_archive
from statexchange.formats.torch_file import TorchFile
from statexchange.sharding.sharding_spec import DimSplit, local_boxes
from statexchange.sharding.shards import Shard
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store

_LEAVE_OUT = "leave it out with exclude (--exclude)"
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
            f"it is not known how Megatron's tensor parallelism divides a parameter of this name: {_LEAVE_OUT}"
        )
    if _gate_sibling(name) is None:
        return DimSplit(0)
    # fc2 has as many columns as the gate has rows, and fc1 has the gate, or the gate and the other half.
    rows = shape[0] if shape else 0
    columns = 0
    if sibling is not None and len(sibling) == 2:
        columns = sibling[1]
    if rows not in (columns, 2 * columns) or not columns:
        raise UnsupportedError(
            f"its linear_fc2 does not show whether it is gated: {rows} rows here, {columns} columns there; {_LEAVE_OUT}"
        )
    return DimSplit(0, rows // columns)


_MAX_RANKS = 1 << 17  # more than any run has: the arguments of a damaged file may say anything
FILE = "model_optim_rng.pt"  # of a rank
_OPTIMIZER_FILE = "distrib_optim.pt"
_MODEL = re.compile(r"model[0-9]{0,4}\.(.+)", re.DOTALL)  # the name of a parameter, in a chunk of the model
# A layer: its chunk of the model, and its block, the part of names before "layers.".
_LAYER = re.compile(r"model(?P<chunk>[0-9]{0,4})\.(?P<block>(?:.*?\.)??)layers\.(?P<number>[0-9]{1,6})(?=\.)")
_NUMBERED_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))([0-9]{1,6})(?=\.|$)")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_EXTRA_STATE = "_extra_state"
_MULTI_TOKEN = "mtp."  # noqa: S105 (layers that predict further tokens, beside those that are counted)


class _Position(NamedTuple):
    """A rank's index along each axis."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """One model-parallel rank.

    Attributes:
        store: its directory.
        prefix: the directory's name with a dot, which precedes the names of the rank's own entries.
        number: its number among all ranks.
        position: its index along the tensor, pipeline and expert parallel axes.
        file: its file.
    """

    store: Store
    prefix: str
    number: int
    position: _Position
    file: TorchFile

    def chunk_of(self, layer: re.Match[str]) -> tuple[str, int, int]:
        """Return the block, the chunk and the pipeline stage of a layer."""
        return layer["block"], int(layer["chunk"] or 0), self.position.pipeline


def matches(store: Store) -> bool:
    """Whether a directory is an iteration in this format."""
    return any(map(RANK_DIRECTORY.fullmatch, store.directories))


def is_rank(opened: OpenedPath) -> bool:
    """Whether a path is the directory or the file of one rank."""
    return opened.file == FILE if opened.file is not None else FILE in opened.store.listing


def read(opened: OpenedPath, store: Store) -> Source:
    """Return the source of an iteration's directory, `store`, in an opened path.

    A rank that is missing, or belongs to another save, is a problem of the source.
    """
    stores = {name: store.below(name) for name in store.directories if RANK_DIRECTORY.fullmatch(name)}
    has_optimizer = any(_OPTIMIZER_FILE in below.listing for below in stores.values())
    problems: list[StateExchangeError] = []
    files: dict[str, TorchFile] = {}
    arguments: RunArguments | None = None
    missing = "this rank's file is missing: the save did not finish, or it was not copied completely"
    for name, below in stores.items():
        try:
            # Its rank is known when all directories are: until then its number is in messages.
            file = TorchFile.whole(open_listed(below, FILE, missing), len(files))
            of_rank = RunArguments.parse(file.root, file.path)
            arguments = arguments or of_rank
            if of_rank != arguments:
                text = "the run's arguments or iteration differ from those of other ranks: this one is of another save"
                raise IncompleteError(text, path=below.path, expected=str(arguments), found=str(of_rank))
            files[name] = file
            # Its flat buffers are not read, but a copy of the iteration without it, or with a part, is not whole.
            if has_optimizer:
                open_archive(open_listed(below, _OPTIMIZER_FILE, missing)).pickle()
        except StateExchangeError as error:
            problems.append(error)
    if arguments is None:
        return Source("megatron ranks", opened, (), problems=tuple(problems))
    positions = _directories(arguments, store.path)
    problems += _missing(store, stores, positions, arguments)
    ranks = []
    for number, (name, position) in enumerate(positions.items()):
        if name in files:
            ranks.append(_Rank(stores[name], f"{name}.", number, position, files[name]))
    return _Reader(opened, ranks, arguments).source(problems)


def _directories(arguments: RunArguments, path: str) -> dict[str, _Position]:
    """Return each rank's position by the name of its directory, in the order of ranks: tensor-parallel ones adjoin."""
    if arguments.num_ranks > _MAX_RANKS:
        text = f"not what Megatron writes: the arguments of a run on {arguments.num_ranks} ranks"
        raise CorruptError(text, path=path)
    positions: dict[str, _Position] = {}
    for pipeline, expert, tensor in product(*map(range, (arguments.pipeline, arguments.expert, arguments.tensor))):
        name = f"mp_rank_{tensor:02d}"
        if arguments.pipeline > 1:
            name += f"_{pipeline:03d}"
        if arguments.expert > 1:
            name += f"_{expert:03d}"
        positions[name] = _Position(tensor, pipeline, expert)
    return positions


def _missing(
    store: Store, names: Iterable[str], positions: Mapping[str, _Position], arguments: RunArguments
) -> list[StateExchangeError]:
    """Return an error for the first rank without a directory, and one for each directory without a rank."""
    problems: list[StateExchangeError] = []
    absent = [name for name in positions if name not in names]
    if absent:
        text = f"{len(absent)} of {len(positions)} ranks are missing ({arguments}), first this one"
        problems.append(IncompleteError(text, path=store.path_of(absent[0])))
    # Else a rank of a larger run would be left out without a word.
    for name in names:
        if name not in positions:
            text = f"a run with {arguments} has no such rank: this directory is of another save"
            problems.append(IncompleteError(text, path=store.path_of(name)))
    return problems


class _Reader:
    """Builds the source of an iteration from its ranks."""

    def __init__(self, opened: OpenedPath, ranks: list[_Rank], arguments: RunArguments) -> None:
        self._opened = opened
        self._ranks = ranks
        self._arguments = arguments
        self._others: dict[str, str] = {"args": str(arguments)}
        self._unreadable: list[UnreadableTensor] = []
        self._first_layers: Counter[tuple[str, int, int]] = Counter()  # the number of the first layer of each chunk

    def source(self, problems: Sequence[StateExchangeError]) -> Source:
        """Return the source, with these problems; without any, all layers must be there."""
        missing_layers = self._number_layers()
        files = tuple(map(self._shard_file, self._ranks))
        for rank in self._ranks:
            for unsupported in rank.file.unsupported:
                self._unreadable.append(replace(unsupported, name=self._new_name(unsupported.name, rank)))
            for name, description in rank.file.others.items():
                self._describe(name, description)
            if _OPTIMIZER_FILE in rank.store.listing:
                self._describe(_OPTIMIZER_FILE, "flat buffers of the distributed optimizer, not read")
        return with_sections(
            Source(
                "megatron ranks",
                self._opened,
                files,
                step=self._arguments.iteration,
                world_size=self._arguments.num_ranks,
                others=self._others,
                problems=tuple(problems or missing_layers),
                unreadable=tuple(self._unreadable),
                arguments=self._arguments.model,
            )
        )

    def _number_layers(self) -> list[StateExchangeError]:
        """Find the number of the first layer of each chunk; return a problem if there are not all layers."""
        counts: dict[tuple[str, int, int], int] = {}  # by block, chunk and stage
        for rank in self._ranks:
            for layer in filter(None, map(_LAYER.match, rank.file.tensors)):
                key = rank.chunk_of(layer)
                counts[key] = max(counts.get(key, 0), int(layer["number"]) + 1)
        ends: Counter[str] = Counter()  # by block
        of_stage: Counter[tuple[str, int]] = Counter()  # by block and stage
        # In this order the layers of a block follow one another: the first chunk of each stage, then the second.
        for (block, chunk, stage), count in sorted(counts.items()):
            self._first_layers[block, chunk, stage] = ends[block]
            ends[block] += count
            of_stage[block, stage] += count
        blocks = [block for block in ends if not block.startswith(_MULTI_TOKEN)]
        expected = self._arguments.model.get("num_layers")
        # Of several blocks, as of an encoder and a decoder, the arguments do not say which has how many.
        if len(blocks) != 1 or expected in (None, ends[blocks[0]]):
            return []
        fewest = min(self._ranks, key=lambda rank: of_stage[blocks[0], rank.position.pipeline])
        return [
            IncompleteError(
                "the pipeline stages do not have as many layers as the run's arguments; this one has the fewest",
                path=fewest.store.path,
                expected=f"{expected} layers",
                found=f"{ends[blocks[0]]} layers",
            )
        ]

    def _shard_file(self, rank: _Rank) -> ShardFile:
        """Return a rank's file with the names of the whole model, and with each tensor as a part of the whole one."""
        new_names: dict[str, str] = {}
        for name, tensor in rank.file.tensors.items():
            if _MODEL.fullmatch(name) and name.endswith(_EXTRA_STATE):
                self._describe(name, f"{tensor.shard.nbytes} bytes of extra state")
            else:
                new_names[name] = self._new_name(name, rank)
        # On one stage the output layer uses the embedding itself, and has no tensor.
        is_last = rank.position.pipeline == self._arguments.pipeline - 1
        if self._arguments.is_tied and is_last and _EMBEDDING not in new_names.values():
            for name, new in new_names.items():
                if new == _OUTPUT:
                    new_names[name] = _EMBEDDING
        renamed = rank.file.shard_file.renamed(new_names.get)
        shapes = {name: tensor.shard.global_shape for name, tensor in renamed.tensors.items()}
        tensors: dict[str, SourceTensor] = {}
        for name, tensor in renamed.tensors.items():
            try:
                with parsing("not what Megatron writes", rank=rank.number, name=name, path=rank.file.path):
                    is_of_model = not name.startswith(rank.prefix)
                    tensors[name] = self._part_of_whole(tensor, rank, shapes) if is_of_model else tensor
            except UnsupportedError as error:
                unreadable = UnreadableTensor(name, tensor.shard.dtype, None, rank.file.path, error)
                self._unreadable.append(unreadable)
        return replace(renamed, rank=rank.number, tensors=tensors)

    def _new_name(self, name: str, rank: _Rank) -> str:
        """Return the name in the source: in the model's, layers and experts are numbered over all ranks."""
        layer, arguments = _LAYER.match(name), self._arguments
        if layer is not None:
            number = int(layer["number"]) + self._first_layers[rank.chunk_of(layer)]
            name = f"model.{layer['block']}layers.{number}{name[layer.end() :]}"
        in_model = _MODEL.fullmatch(name)
        if in_model is None:
            return rank.prefix + name
        before = rank.position.expert * (arguments.num_experts // arguments.expert)
        return _NUMBERED_EXPERT.sub(lambda expert: f"{expert[1]}{int(expert[2]) + before}", in_model[1])

    def _describe(self, name: str, description: str) -> None:
        """List an entry that is not a tensor, of the first rank that has it."""
        in_model = _MODEL.fullmatch(name)
        self._others.setdefault(name if in_model is None else in_model[1], description)

    def _part_of_whole(self, tensor: SourceTensor, rank: _Rank, shapes: Mapping[str, tuple[int, ...]]) -> SourceTensor:
        """Return a tensor of the model as a part of the whole one."""
        shard, count = tensor.shard, self._arguments.tensor
        _check_experts(shard.name, self._arguments)
        if count == 1:
            return tensor
        if not shard.is_whole:
            raise UnsupportedError("it is a DTensor, which the legacy format is not known to have")
        split = division_of(shard.name, shard.global_shape, shapes.get(_gate_sibling(shard.name) or ""))
        if split is None:
            return tensor
        shape = list(shard.global_shape)
        shape[split.dim] *= count
        boxes = local_boxes(shape, [count], [rank.position.tensor], [split])
        placed = Shard(shard.name, shard.dtype, tuple(shape), tuple(box for box, _ in boxes))
        (byte_range,) = tensor.byte_ranges
        return SourceTensor.of_blocks(placed, byte_range, shard.global_shape, [offsets for _, offsets in boxes])


def _check_experts(name: str, arguments: RunArguments) -> None:
    """Raise UnsupportedError for a parameter of experts whose division over ranks is not known."""
    if _EXPERT.search(name) is None:
        return
    if arguments.expert > 1 and (_NUMBERED_EXPERT.search(name) is None or not arguments.num_experts):
        raise UnsupportedError(f"it is not known which experts a rank has of a parameter of this name: {_LEAVE_OUT}")
    if arguments.expert_tensor != arguments.tensor:
        raise UnsupportedError(
            f"experts are divided over {arguments.expert_tensor} tensor-parallel ranks, all else over "
            f"{arguments.tensor}, which is not read: {_LEAVE_OUT}"
        )
