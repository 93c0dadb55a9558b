"""Boxes, shards and dtypes: valid ones round-trip, invalid ones are refused."""

from typing import Any

import numpy as np
import pytest
import torch

from statexchange.errors import MismatchError
from statexchange.messages import decode, encode, encoded
from statexchange.sharding.shards import Box, Shard, full_box, intersect
from statexchange.tensors import DTYPE_NAMES, ITEMSIZE, array_over, elements, itemsize_of, numpy_dtype

HOSTILE = [None, 5, "ab", [], [[0]], [[0], [1], [2]], [[0], [1, 2]], [[-1], [2]], [[0], [2.0]], [["0"], [2]]]
HOSTILE += [[[True], [2]], [[2**70], [2]], [[0] * 65, [1] * 65], {"a": 1, "b": 2}, [[[0]], [[1]]]]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: repr(raw)[:40])
def test_json_that_is_no_box_is_a_value_error(raw: Any) -> None:
    with pytest.raises(ValueError, match="not a"):
        Box.from_json(raw)


@pytest.mark.parametrize(
    "wrong", [{"dtype": ["F33"]}, {"dtype": [1]}, {"global_shape": [[0], 1, [[1], [2]]]}], ids=repr
)
def test_a_message_that_is_no_shard_is_refused(wrong: dict[str, Any]) -> None:
    shard = Shard("a", "F32", (4,), (Box((0,), (4,)),))
    raw: Any = encode(shard, Shard)
    with pytest.raises(MismatchError, match=r"dtype|outside"):
        decode({**raw, **wrong}, Shard, "the shard", 1)


def test_shards_and_boxes_come_back_from_messages() -> None:
    shard = Shard("größe", "BF16", (4, 0, 6), (Box((0, 0, 2), (4, 0, 4)), Box((1, 0, 0), (1, 0, 1))))
    assert decode(encoded(shard, Shard), Shard, "the shard", 1) == shard
    assert str(shard.boxes[0]) == "[0:4, 0:0, 2:6]"
    assert str(full_box(())) == "[]"


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [((0,), (3, 1)), ((2, 0), (2, 1)), ((0, 0), (3, 2)), ((-1, 0), (2, 1)), ((0, 0), (-1, 1)), ((), ())],
)
def test_a_box_outside_its_tensor_is_refused(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"outside|argument"):
        Shard("w", "F32", (3, 1), (Box(offsets, shape),))


def test_the_local_shape_and_the_bytes_of_a_shard_follow_from_its_boxes() -> None:
    one = Shard("w", "F32", (4, 4), (Box((0, 0), (2, 4)),))
    two = Shard("w", "I16", (4, 4), (Box((0, 0), (1, 4)), Box((2, 0), (2, 2))))
    assert (one.local_shape, one.nbytes) == ((2, 4), 32)
    assert (two.local_shape, two.nbytes) == ((8,), 16)
    assert Shard("w", "F64", (), (full_box(()),)).nbytes == 8


def test_the_intersection_of_boxes_is_what_both_cover() -> None:
    one, other = Box((0, 2), (4, 4)), Box((3, 0), (4, 3))
    assert intersect(one, other) == intersect(other, one) == Box((3, 2), (1, 1))
    assert intersect(one, Box((4, 2), (1, 1))) is None
    assert intersect(full_box(()), full_box(())) == full_box(())


@pytest.mark.parametrize(("long_name", "name"), DTYPE_NAMES.items())
def test_dtypes_mean_the_same_to_torch_and_numpy(long_name: str, name: str) -> None:
    dtype = getattr(torch, long_name)
    assert (
        itemsize_of(name) == ITEMSIZE[name] == torch.empty(0, dtype=dtype).element_size() == numpy_dtype(name).itemsize
    )
    values = torch.tensor([0, 1, 2], dtype=torch.float64).to(torch.float32).to(dtype)
    ours = array_over(bytes(values.view(torch.uint8).tolist()), name, (3,))
    expected = [bool(v) for v in (0, 1, 2)] if name == "BOOL" else values.to(torch.complex64).real.tolist()
    assert [bool(v) if name == "BOOL" else complex(v).real for v in ours] == expected
    assert elements(bytearray(6 * ITEMSIZE[name]), name, (2, 3)).shape == (2, 3)


def test_arrays_share_memory_and_may_be_empty() -> None:
    data = bytearray(8)
    array_over(data, "I32", (2,))[1] = 7
    assert data == b"\0\0\0\0\7\0\0\0"
    assert array_over(b"", "F32", (0, 3)).shape == (0, 3)
    assert array_over(np.zeros(4, np.uint8), "F32", ()).shape == ()


def test_unknown_dtypes_are_value_errors() -> None:
    for name in ("Q4", "", [], None):
        with pytest.raises(ValueError, match="unknown dtype"):
            itemsize_of(name)  # type: ignore[arg-type]
