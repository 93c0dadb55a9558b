"""Convert live state to the names and values of another model family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.conversions.choice import Convert, check_numbers
from statexchange.conversions.numbers import KnownConfig
from statexchange.conversions.patches import Block
from statexchange.conversions.plan import ConversionPlan, InputFills, TensorInfo, plan_conversion
from statexchange.conversions.rules import ConversionRules
from statexchange.errors import CorruptError, InvalidArgumentError
from statexchange.exchange.placing import place_parts
from statexchange.exchange.rank_metadata import check_equal_options, gather_distinct
from statexchange.exchange.saved_names import SavedNames
from statexchange.formats.converted import (
    config_of,
    read_conversion,
)
from statexchange.formats.model_files import CONFIG
from statexchange.sharding import records
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.rules import Layout, renumber_names
from statexchange.sharding.shards import Box, Shard, shape_from_json
from statexchange.state.describe import Description, LocalTensor
from statexchange.state.pretrained import model_config
from statexchange.tensors import is_array, itemsize_of, numpy_dtype

__all__ = ["ChosenConversion", "convert_live"]


@dataclass(frozen=True, slots=True)
class ChosenConversion:
    """The conversion of a call: its rules, the numbers that the caller gave, and the configs that this rank knows."""

    rules: ConversionRules
    numbers: Mapping[str, int]
    configs: Sequence[KnownConfig]

    @classmethod
    def of(cls, convert: Convert | None, numbers: Mapping[str, int] | None, state: Any) -> ChosenConversion | None:
        """Return the conversion that the options of a call name; None if they name none."""
        given = check_numbers(numbers, convert)
        if convert is None:
            return None
        config = model_config(state)
        configs = [] if config is None else [KnownConfig("the model's config", config)]
        return cls(read_conversion(convert), given, configs)

    def with_config(self, content: bytes | None) -> ChosenConversion:
        """Return the conversion with the config.json of `files_from`, if there is one, before other configs."""
        return self if content is None else replace(self, configs=[*config_of(CONFIG, content), *self.configs])

    def texts(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text by name."""
        return {"convert": self.rules.name, "convert_with": repr(sorted(self.numbers.items()))}

    def shared(self, comm: Communicator) -> ChosenConversion:
        """Return the conversion with the numbers of root's configs that its rules use. Collective."""
        keys = {key for rule in self.rules.numbers.values() for key in rule.config}
        own = [[config.where, json.dumps({key: config.values.get(key) for key in keys})] for config in self.configs]
        sent = comm.broadcast_object(own)
        found = records.parsed(sent, lambda raw: records.items(raw, _config_from_json), "the model's config", 0)
        return replace(self, configs=found)

    def plan(self, comm: Communicator, described: Description, options: ExportOptions) -> ConversionPlan:
        """Return the conversion of the tensors of all ranks that `include` and `exclude` select. Collective."""
        shared = self.shared(comm)
        tensors = _all_tensors(comm, described)
        with comm.phase("converting its state"):
            options.check_include(tensors)
            selected = {name: info for name, info in tensors.items() if options.wants(name)}
            return plan_conversion(shared.rules, selected, shared.numbers, shared.configs)

    def left_options(self, options: ExportOptions) -> ExportOptions:
        """Return the options that apply to the converted tensors: the patterns match names before the conversion."""
        return replace(options, include=(), exclude=(), layout=None)


def _config_from_json(raw: Any) -> KnownConfig:
    where, text = records.items(raw, records.text, 2)
    return KnownConfig(where, json.loads(text))


def convert_live(
    comm: Communicator, described: Description, conversion: ChosenConversion | SavedNames | None, options: ExportOptions
) -> tuple[Description, ExportOptions]:
    """Convert a description if any rank has a conversion, and return it with the options that are left. Collective.

    Each rank keeps the elements that it has, as views of the same memory: no bytes move between ranks.
    """
    sent = comm.all_gather_object(None if conversion is None else conversion.texts())
    with comm.phase("comparing the conversions"):
        texts = [records.parsed(raw, _optional_texts, "its conversion", rank) for rank, raw in enumerate(sent)]
        check_equal_options([rank_texts or {} for rank_texts in texts])
    if all(rank_texts is None for rank_texts in texts):
        return described, options
    # Some ranks may have a model of transformers, and others none.
    conversion = conversion or SavedNames(None)
    layout = options.new_layout()
    described = place_parts(comm, _renumbered(comm, described, layout), layout)
    plan = conversion.plan(comm, described, options)
    with comm.phase("converting its state"):
        converted = _converted(described, plan, has_zeros=comm.rank == 0)
    return converted, conversion.left_options(options)


def _optional_texts(raw: Any) -> dict[str, str] | None:
    return records.optional(raw, records.texts)


def _renumbered(comm: Communicator, described: Description, layout: Layout) -> Description:
    """Return the description with the names that a layout renumbers over all ranks. Collective."""
    sources: dict[str, str] | None = None
    if any(rule.renumber for rule in layout.rules.values()):
        sources = {name: described.sources.get(name, name) for name in described.tensors}
    sent = comm.all_gather_object(sources)
    with comm.phase("renumbering its tensors"):
        by_rank = {}
        for rank, raw in enumerate(sent):
            if (raw is None) != (sources is None):
                raise InvalidArgumentError("with convert, a layout renumbers on all ranks or on none", rank=rank)
            by_rank[rank] = {} if raw is None else records.parsed(raw, records.texts, "its names", rank)
        if sources is None:
            return described
        names = renumber_names(by_rank, layout)[comm.rank]
        if len({*names.values()}) < len(names):
            raise InvalidArgumentError("the layout gives one name to two tensors of this rank", rank=comm.rank)
        aliases = {names.get(alias, alias): names.get(name, name) for alias, name in described.aliases.items()}
        return replace(described.renamed(names), aliases=aliases)


def _all_tensors(comm: Communicator, described: Description) -> dict[str, TensorInfo]:
    """Return the dtype and global shape of each tensor of any rank. Collective."""
    own = [[local.shard.name, local.shard.dtype, local.shard.global_shape] for local in described.tensors.values()]
    sent, _ = gather_distinct(comm, json.dumps(own).encode())
    tensors: dict[str, TensorInfo] = {}
    with comm.phase("comparing its tensors"):
        for data in dict.fromkeys(sent):
            rank = sent.index(data)
            for name, info in records.decoded(data, _named_tensors, "its tensors", rank):
                first = tensors.setdefault(name, info)
                if first != info:
                    text = "this rank's dtype or shape differs from another's"
                    raise CorruptError(text, name=name, rank=rank, expected=first, found=info)
    return tensors


def _named_tensors(raw: Any) -> tuple[tuple[str, TensorInfo], ...]:
    return records.items(raw, _named_tensor)


def _named_tensor(raw: Any) -> tuple[str, TensorInfo]:
    name, dtype, shape = records.items(raw, lambda part: part, 3)
    itemsize_of(dtype)
    return records.text(name), TensorInfo(dtype, shape_from_json(shape))


@dataclass(slots=True)
class _Outputs:
    """The boxes of the output tensors on this rank, with their memory."""

    plan: ConversionPlan
    boxes: dict[str, list[tuple[Box, Any]]]
    reductions: dict[str, str]

    def add(self, name: str, box: Box, tensor: Any) -> None:
        """Add a box of an output."""
        self.boxes.setdefault(name, []).append((box, tensor))

    def described(self, aliases: Mapping[str, str]) -> Description:
        """Return the outputs, in the order of the plan."""
        converted = {}
        for name, info in self.plan.tensors.items():
            if name in self.boxes:
                boxes = self.boxes[name]
                shard = Shard(name, info.dtype, info.shape, tuple(box for box, _ in boxes))
                tensors = tuple(tensor for _, tensor in boxes)
                converted[name] = LocalTensor(shard, tensors, reduce=self.reductions.get(name))
        return Description(converted, self.plan.new_aliases(aliases))


def _converted(described: Description, plan: ConversionPlan, *, has_zeros: bool) -> Description:
    outputs = _Outputs(plan, {}, {})
    for name, local in described.tensors.items():
        fills = plan.fills.get(name, ())
        for fill in fills:
            if not fill.patch.box.numel:
                outputs.boxes.setdefault(fill.target, [])
            if local.reduce is not None:
                outputs.reductions[fill.target] = local.reduce
        found = InputFills(fills)
        for box, tensor in zip(local.shard.boxes, local.tensors, strict=True):
            for fill, block in found.blocks(box):
                for part in block.ranges():
                    outputs.add(fill.target, part.box, _view(tensor, part))
    for fill in plan.zeros if has_zeros else ():
        dtype = numpy_dtype(plan.tensors[fill.target].dtype)
        outputs.add(fill.target, fill.patch.box, np.broadcast_to(np.zeros((), dtype), fill.patch.box.shape))
    return outputs.described(described.aliases)


def _view(tensor: Any, block: Block) -> Any:
    """Return the view of a tensor or array that has the elements of a block of ranges, in its order."""
    index: list[Any] = list(block.begin)
    for along in block.dims:
        if along.dim is not None:
            first, last = (block.begin[along.dim] + along.indices[end] for end in (0, -1))
            step = along.indices[1] - along.indices[0] if last > first else 1
            index[along.dim] = slice(first, last + 1, step)
    part = tensor[(*index, ...)]
    used = [along.dim for along in block.dims if along.dim is not None]
    order = [sorted(used).index(dim) for dim in used]
    part = part.transpose(order) if is_array(part) else part.permute(order)
    return part[(*(None if along.dim is None else slice(None) for along in block.dims), ...)]
