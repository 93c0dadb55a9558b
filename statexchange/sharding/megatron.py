"""How Megatron-Core's tensor parallelism divides the parameters of a model, by their names.

A column-parallel layer has a part of the outputs on each rank: dim 0 of its weight and its bias. A row-parallel layer
has a part of the inputs: dim 1 of its weight; its bias is whole. Embeddings are divided by rows of the vocabulary,
which is padded so that all parts are equal. Norms and routers are whole on each rank. In a gated ``linear_fc1`` each
rank has its part of the gate and then its part of the other half, as two blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from statexchange.errors import UnsupportedError
from statexchange.sharding.shards import Box

__all__ = ["Division", "division_of", "gate_sibling", "is_expert"]

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


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a parameter over tensor-parallel ranks.

    Attributes:
        dim: the dim of which each rank has a part; None if each rank has the whole.
        blocks: the number of equal blocks along the dim, of each of which a rank has a part.
    """

    dim: int | None
    blocks: int = 1

    def place(self, shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[tuple[int, ...], list[tuple[Box, Box]]]:
        """Return the global shape, and each (box of the whole tensor, box of the rank's tensor).

        Raises:
            ValueError: a tensor of this shape is not divided in this way.
        """
        if self.dim is None:
            whole = Box((0,) * len(shape), shape)
            return shape, [(whole, whole)]
        dim = self.dim
        if dim >= len(shape) or shape[dim] % self.blocks:
            raise ValueError(f"a tensor of shape {shape} has no dim {dim} of {self.blocks} equal blocks")
        size = shape[dim] // self.blocks
        pairs = []
        for block in range(self.blocks):
            offset = (block * num_ranks + rank) * size
            box_shape = (*shape[:dim], size, *shape[dim + 1 :])
            pairs.append((Box(_at(shape, dim, offset), box_shape), Box(_at(shape, dim, block * size), box_shape)))
        return (*shape[:dim], shape[dim] * num_ranks, *shape[dim + 1 :]), pairs


def _at(shape: tuple[int, ...], dim: int, offset: int) -> tuple[int, ...]:
    """Return offsets that are 0 in all dims but one."""
    return (*(0,) * dim, offset, *(0,) * (len(shape) - dim - 1))


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert."""
    return _EXPERT.search(name) is not None


def gate_sibling(name: str) -> str | None:
    """Return the name of the ``linear_fc2`` weight whose columns show whether this ``linear_fc1`` is gated."""
    match = _FC1.search(name)
    if match is None:
        return None
    return f"{name[: match.start()]}{match[1]}linear_fc2.weight{match[2]}"


def division_of(name: str, shape: tuple[int, ...], sibling: tuple[int, ...] | None) -> Division:
    """Return how a parameter is divided over tensor-parallel ranks.

    Args:
        name: the parameter's name.
        shape: the shape of a rank's part.
        sibling: the shape of the rank's part of `gate_sibling(name)`; None if there is none.

    Raises:
        UnsupportedError: the name is not known, or the sibling does not show whether this one is gated.
    """
    if any(pattern.search(name) for pattern in _WHOLE):
        return Division(None)
    if _COLUMNS.search(name):
        return Division(1)
    if _ROWS.search(name) is None:
        raise UnsupportedError(
            "it is not known how Megatron's tensor parallelism divides a parameter of this name: leave it out with "
            "exclude (--exclude)"
        )
    if gate_sibling(name) is None:
        return Division(0)
    rows = shape[0] if shape else 0
    columns = sibling[1] if sibling is not None and len(sibling) == 2 else 0
    if rows not in (columns, 2 * columns) or not columns:
        raise UnsupportedError(
            f"its linear_fc2 does not show whether it is gated: {rows} rows here, {columns} columns there; leave it "
            "out with exclude (--exclude)"
        )
    return Division(0, rows // columns)
