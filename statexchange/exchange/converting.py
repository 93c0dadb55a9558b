"""Convert live state to the names and values of another model family, or to those that transformers saves."""

from __future__ import annotations

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.conversions.patches import Patch
from statexchange.conversions.plan import ConversionPlan, InputFills
from statexchange.exchange.chosen_conversion import Conversion
from statexchange.exchange.placing import place_parts
from statexchange.exchange.saved_names import SavedNames
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.shards import Box, Shard
from statexchange.state.describe import Description, LocalTensor
from statexchange.tensors import TensorLike, numpy_dtype


def convert_live(
    comm: Communicator, described: Description, conversion: Conversion | None, options: ExportOptions
) -> tuple[Description, ExportOptions]:
    """Convert a description, and return it with the options that are left. Collective.

    Call it on all ranks if any has a conversion, after `agreed_names`. Each rank keeps the elements that it has, as
    views of the same memory: no bytes move between ranks.
    """
    # Some ranks may have a model of transformers, and others none: all take part in the collectives of the conversion.
    conversion = conversion or SavedNames(None)
    described = place_parts(comm, described, options.new_layout())
    # After the layout: rules of a conversion are for whole tensors.
    plan = conversion.plan(comm, described, options)
    with comm.phase("converting its state"):
        converted = _converted(described, plan, has_zeros=comm.rank == 0)
    return converted, conversion.left_options(options)


def _converted(described: Description, plan: ConversionPlan, *, has_zeros: bool) -> Description:
    """Return the outputs of a conversion that this rank has elements of, in the order of the plan."""
    outputs: dict[str, list[tuple[Box, TensorLike]]] = {}
    reductions: dict[str, str] = {}
    for name, local in described.tensors.items():
        fills = plan.fills.get(name, ())
        for fill in fills:
            if not fill.patch.box.numel:
                # None of its elements will be found below, and without a rank that has it, it would be missing.
                outputs.setdefault(fill.target, [])
            if local.reduce is not None:
                reductions[fill.target] = local.reduce
        input_fills = InputFills(fills)
        for box, tensor in zip(local.shard.boxes, local.tensors, strict=True):
            for fill in input_fills.parts(box):
                for patch in fill.patch.ranges():
                    outputs.setdefault(fill.target, []).append((patch.box, _view(tensor, patch)))
    if has_zeros:
        for fill in plan.zeros:
            dtype = numpy_dtype(plan.tensors[fill.target].dtype)
            # One element in memory, whatever the size.
            zeros = np.broadcast_to(np.zeros((), dtype), fill.patch.box.shape)
            outputs.setdefault(fill.target, []).append((fill.patch.box, zeros))
    converted = {}
    for name, info in plan.tensors.items():
        if name in outputs:
            shard = Shard(name, info.dtype, info.shape, tuple(box for box, _ in outputs[name]))
            tensors = tuple(tensor for _, tensor in outputs[name])
            converted[name] = LocalTensor(shard, tensors, reduce=reductions.get(name))
    return Description(converted, plan.new_aliases(described.aliases))


def _view(tensor: TensorLike, patch: Patch) -> TensorLike:
    """Return the view of a tensor or array that has the elements of a patch of ranges, in its order.

    For a patch whose dims are 1 and 0 of the tensor, it is a transposed part of it.
    """
    index: list[int | slice] = [slice(begin, begin + 1) for begin in patch.begin]
    used = []
    for along in patch.dims:
        if along.dim is not None:
            first, last = patch.begin[along.dim] + along.indices[0], patch.begin[along.dim] + along.indices[-1]
            step = along.indices[1] - along.indices[0] if last > first else 1
            index[along.dim] = slice(first, last + 1, step)
            used.append(along.dim)
    order = [*used, *(dim for dim in range(len(index)) if dim not in used)]
    # With (...): else the result for an array without dims would be a number, and no view.
    part = tensor[(*index, ...)]
    part = part.transpose(order) if isinstance(part, np.ndarray) else part.permute(order)
    # Dims of one element come and go, which copies nothing.
    return part.reshape(patch.box.shape)
