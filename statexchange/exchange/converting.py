"""Convert live state to the names and values of another model family, or to those that transformers saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.conversions.patches import Block
from statexchange.conversions.plan import ConversionPlan, InputFills
from statexchange.exchange.chosen_conversion import ChosenConversion
from statexchange.exchange.placing import place_parts
from statexchange.exchange.rank_metadata import equal_options, renumbered
from statexchange.exchange.saved_names import SavedNames
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.shards import Box, Shard
from statexchange.state.describe import Description, LocalTensor
from statexchange.tensors import TensorLike, numpy_dtype

__all__ = ["Conversion", "convert_live"]

Conversion: TypeAlias = ChosenConversion | SavedNames


def convert_live(
    comm: Communicator, described: Description, conversion: Conversion | None, options: ExportOptions
) -> tuple[Description, ExportOptions]:
    """Convert a description if any rank has a conversion, and return it with the options that are left. Collective.

    Each rank keeps the elements that it has, as views of the same memory: no bytes move between ranks.
    """
    texts = equal_options(comm, None if conversion is None else conversion.texts(), "the conversions")
    if all(rank_texts is None for rank_texts in texts):
        return described, options
    # Some ranks may have a model of transformers, and others none.
    conversion = conversion or SavedNames(None)
    layout = options.new_layout()
    described = place_parts(comm, renumbered(comm, described, layout), layout)
    plan = conversion.plan(comm, described, options)
    with comm.phase("converting its state"):
        converted = _converted(described, plan, has_zeros=comm.rank == 0)
    return converted, conversion.left_options(options)


@dataclass(slots=True)
class _Outputs:
    """The boxes of the output tensors on this rank, with their memory."""

    plan: ConversionPlan
    boxes: dict[str, list[tuple[Box, TensorLike]]]
    reductions: dict[str, str]

    def add(self, name: str, box: Box, tensor: TensorLike) -> None:
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


def _view(tensor: TensorLike, block: Block) -> TensorLike:
    """Return the view of a tensor or array that has the elements of a block of ranges, in its order."""
    index: list[int | slice] = list(block.begin)
    for along in block.dims:
        if along.dim is not None:
            first, last = (block.begin[along.dim] + along.indices[end] for end in (0, -1))
            step = along.indices[1] - along.indices[0] if last > first else 1
            index[along.dim] = slice(first, last + 1, step)
    part = tensor[(*index, ...)]
    used = [along.dim for along in block.dims if along.dim is not None]
    order = [sorted(used).index(dim) for dim in used]
    part = part.transpose(order) if isinstance(part, np.ndarray) else part.permute(order)
    return part[(*(None if along.dim is None else slice(None) for along in block.dims), ...)]
