"""Boxes of placements equal torch's own split, for any mesh, shape and placement."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from statexchange.sharding.sharding_spec import DimSplit, local_boxes


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[Any]]:
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    coordinate = [draw(st.integers(0, size - 1)) for size in mesh]
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4))
    placements = draw(
        st.lists(
            st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided), min_size=len(mesh), max_size=len(mesh)
        )
    )
    return shape, mesh, coordinate, placements


def split_of(placement: Any) -> DimSplit | None:
    if isinstance(placement, Replicate):
        return None
    return DimSplit(placement.dim, getattr(placement, "split_factor", 1))


@given(worlds())
@settings(max_examples=100)
def test_boxes_are_the_chunks_that_torch_gives_a_rank(world: tuple[list[int], list[int], list[int], list[Any]]) -> None:
    shape, mesh, coordinate, placements = world
    whole = torch.arange(math.prod(shape)).reshape(shape)
    local = whole
    for size, index, placement in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, size, with_padding=False, contiguous=True)[0][index]
    found = local_boxes(shape, mesh, coordinate, [split_of(p) for p in placements])
    assert sum(box.numel for box, _ in found) == local.numel()
    for box, place in found:
        part = local[tuple(slice(p, p + s) for p, s in zip(place, box.shape, strict=True))]
        assert part.equal(whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))])


def test_runs_that_touch_are_one_box() -> None:
    assert len(local_boxes((8, 8), (2, 2), (1, 1), [DimSplit(0, 2), DimSplit(0)])) == 1
    assert len(local_boxes((8, 8), (2,), (1,), [DimSplit(0, 2)])) == 2


@pytest.mark.parametrize(
    ("mesh", "coordinate", "cuts"),
    [
        ((2,), (2,), [DimSplit(0)]),
        ((2,), (-1,), [DimSplit(0)]),
        ((2, 2), (0,), [DimSplit(0)]),
        ((2,), (0,), [DimSplit(2)]),
        ((2,), (0,), [DimSplit(0, 0)]),
        ((2,), (0,), [DimSplit(0, 1 << 40)]),
    ],
)
def test_invalid_placements_are_refused(mesh: Any, coordinate: Any, cuts: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        local_boxes((1 << 30, 4), mesh, coordinate, cuts)


def test_many_runs_in_several_dims_are_refused() -> None:
    # 300 * 300 boxes are more than the 1 << 16 that are allowed.
    with pytest.raises(ValueError, match="90000 boxes"):
        local_boxes((1200, 1200), (2, 2), (0, 0), [DimSplit(0, 300), DimSplit(1, 300)])
