"""Runs of a flattened tensor as boxes, against numpy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statexchange.errors import IncompleteError
from statexchange.sharding.plan import prove_cover
from statexchange.sharding.shards import Box, boxes_of_run, c_contiguous, full_box
from statexchange.storage.regions import slices_within

shapes = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


def positions(shape: tuple[int, ...], box: Box) -> list[int]:
    """Return the positions of a box's elements in the C order of the tensor."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    return [int(at) for at in np.asarray(whole[slices_within(box, full_box(shape))]).reshape(-1)]


@given(runs())
def test_the_boxes_of_a_run_are_few_and_follow_one_another(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = run
    boxes = boxes_of_run(shape, begin, end)
    found = [at for box in boxes for at in positions(shape, box)]
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel and c_contiguous(box, shape) for box in boxes)


@given(shapes, st.lists(st.integers(0, 3125), max_size=6))
def test_runs_that_divide_a_tensor_cover_it_exactly_once(shape: tuple[int, ...], cuts: list[int]) -> None:
    numel = math.prod(shape)
    edges = sorted({0, numel, *(cut % (numel + 1) for cut in cuts)})
    boxes = {}
    for rank, (begin, end) in enumerate(itertools.pairwise(edges)):
        boxes |= {box: [rank] for box in boxes_of_run(shape, begin, end)}
    prove_cover("w", shape, boxes)
    last = list(boxes)[-1]
    with pytest.raises(IncompleteError, match=r"holds region"):
        prove_cover("w", shape, {box: ranks for box, ranks in boxes.items() if box != last})


def test_runs_of_scalars_of_empty_and_of_huge_tensors_become_boxes() -> None:
    assert boxes_of_run((), 0, 1) == (Box((), ()),)
    assert boxes_of_run((), 0, 0) == boxes_of_run((3, 0), 0, 0) == boxes_of_run((3,), 2, 2) == ()
    huge = (1 << 20, 1 << 14, 1 << 14)
    assert [str(box) for box in boxes_of_run(huge, 1, (1 << 48) - 1)] == [
        "[0:1, 0:1, 1:16384]",
        "[0:1, 1:16384, 0:16384]",
        "[1:1048575, 0:16384, 0:16384]",
        "[1048575:1048576, 0:16383, 0:16384]",
        "[1048575:1048576, 16383:16384, 0:16383]",
    ]


@pytest.mark.parametrize("run", [(-1, 2), (2, 1), (0, 7)])
def test_a_run_outside_of_the_tensor_is_refused(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="within the 6"):
        boxes_of_run((2, 3), *run)
