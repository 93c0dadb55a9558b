"""Plans of merges."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from statexchange.sharding.shards import Box, Shard, full_box


def counted(shape: tuple[int, ...], boxes: Any) -> Any:
    """Return how often each element is covered, counted one by one."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        for index in np.ndindex(*box.shape):
            counts[tuple(o + i for o, i in zip(box.offsets, index, strict=True))] += 1
    return counts


@st.composite
def meshes(draw: st.DrawFn, fewest_dims: int = 0) -> tuple[tuple[int, ...], list[list[Box]]]:
    """Draw a global shape and each holder's boxes, by cutting dims into (uneven, empty, interleaved) parts."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=fewest_dims, max_size=3)))
    cuts = [draw(st.lists(st.integers(0, size), max_size=3).map(sorted)) for size in shape]
    ranges = [list(zip([0, *c], [*c, size], strict=True)) for c, size in zip(cuts, shape, strict=True)]
    boxes = [
        Box(
            tuple(r[i][0] for r, i in zip(ranges, place, strict=True)),
            tuple(r[i][1] - r[i][0] for r, i in zip(ranges, place, strict=True)),
        )
        for place in np.ndindex(*(len(r) for r in ranges))
    ]
    holders = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, holders - 1), min_size=len(boxes), max_size=len(boxes)))
    boxes_by_holder: list[list[Box]] = [[] for _ in range(holders)]
    for box, owner in zip(draw(st.permutations(boxes)), owners, strict=True):
        boxes_by_holder[owner].append(box)
    for box in draw(st.lists(st.sampled_from(boxes), max_size=3)):  # replicas
        boxes_by_holder[draw(st.integers(0, holders - 1))].append(box)
    return shape, boxes_by_holder


@st.composite
def corruptions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    shape, boxes_by_holder = draw(meshes())
    places = [(h, i) for h, boxes in enumerate(boxes_by_holder) for i, box in enumerate(boxes) if box.numel]
    for _ in range(draw(st.integers(1, 3))):
        h, i = draw(st.sampled_from(places))
        box = boxes_by_holder[h][i]
        kind = draw(st.sampled_from(["drop", "move", "add"]))
        if kind == "drop":
            boxes_by_holder[h][i] = Box(box.offsets, (0,) * len(shape)) if shape else box
            continue
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True))
        if kind == "move":
            boxes_by_holder[h][i] = Box(offsets, sizes)
        else:
            boxes_by_holder[draw(st.integers(0, len(boxes_by_holder) - 1))].append(Box(offsets, sizes))
    return shape, boxes_by_holder


def whole(name: str, *shape: int, dtype: str = "F32") -> Shard:
    return Shard(name, dtype, shape, (full_box(shape),))
