"""Boxes inside files, against numpy: every way of cutting and every way of writing gives the same bytes."""

import math
import os
import resource
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import stored_file

from statexchange.errors import CorruptError, ReplacedError, StorageError
from statexchange.sharding.shards import Box, c_contiguous, linear_offset
from statexchange.storage.location import open_path
from statexchange.storage.regions import BoxReader, blocks, read_part, slices_within, windows, write_box
from statexchange.storage.store import ByteRange

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def boxed(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes)
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return shape, Box(offsets, tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True)))


def numbers(shape: tuple[int, ...]) -> Any:
    return np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)


def slices(box: Box) -> tuple[slice, ...]:
    return slices_within(box, Box((0,) * len(box.shape), box.shape))


@given(shapes, st.integers(2, 60))
def test_windows_follow_the_c_order_without_gaps_and_within_budget(shape: tuple[int, ...], budget: int) -> None:
    whole = numbers(shape)
    parts = [np.asarray(whole[slices(window)]).reshape(-1) for window in windows(shape, 2, budget)]
    assert np.concatenate(parts).tolist() == whole.reshape(-1).tolist()
    assert all(0 < part.nbytes <= budget for part in parts)


def test_windows_of_empty_and_scalar_tensors_and_of_very_long_rows() -> None:
    assert [w for w in windows((0, 5), 4) if w.numel] == []
    assert [w for w in windows((5, 0), 4) if w.numel] == []
    assert len(list(windows((2, 10**6), 4, 1 << 20))) == 8
    assert list(windows((), 4)) == [Box((), ())]


@given(boxed())
def test_a_box_of_one_run_is_distinguished_from_several(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    places = numbers(shape)[slices(box)].reshape(-1)
    assert c_contiguous(box, shape) == bool((np.diff(places.astype(int)) == 1).all())
    assert linear_offset(box, shape) == places[0]


@given(boxed(), st.booleans())
def test_a_box_is_written_where_it_belongs_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Box], reserved: bool
) -> None:
    shape, box = case
    path = tmp_path_factory.mktemp("box") / "file"
    whole = numbers(shape)
    begin = 10  # unaligned, as after a header of any length
    path.write_bytes(b"\xff" * (begin + whole.nbytes + 3))
    fd = os.open(path, os.O_RDWR)
    data = memoryview(np.ascontiguousarray(whole[slices(box)]).reshape(-1).view(np.uint8))
    write_box(fd, begin, shape, "I16", box, data, str(path), reserved=reserved)
    os.close(fd)
    expected = np.full(shape, 0xFFFF, dtype=np.uint16)
    expected[slices(box)] = whole[slices(box)]
    assert path.read_bytes() == b"\xff" * begin + expected.tobytes() + b"\xff" * 3


@given(boxed(), st.integers(2, 60))
def test_a_box_is_read_window_by_window(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Box], budget: int
) -> None:
    shape, box = case
    path = tmp_path_factory.mktemp("box") / "file"
    whole = numbers(shape)
    data = np.ascontiguousarray(whole[slices(box)]).tobytes()
    path.write_bytes(b"head" + data)
    out = np.zeros(whole.size, dtype=np.uint16)
    with stored_file(path) as file:
        reader = BoxReader(ByteRange(file, 4, len(data)), box, "I16")
        at = 0
        for window in windows(shape, 2, budget):
            buffer = memoryview(out.view(np.uint8))[2 * at : 2 * (at + window.numel)]
            reader.copy_into(buffer, window, memoryview(bytearray(budget)))
            at += window.numel
    expected = np.zeros_like(whole)
    expected[slices(box)] = whole[slices(box)]
    assert out.tolist() == expected.reshape(-1).tolist()
    assert (reader.bytes_left, reader.hexdigest()) == (0, xxhash.xxh3_128(data).hexdigest())


@pytest.mark.parametrize("reserved", [True, False])
def test_boxes_of_long_and_of_short_runs_are_written_side_by_side(reserved: bool, tmp_path: Path) -> None:
    whole = np.arange(3 * 40_000, dtype=np.uint16).reshape(3, 40_000)
    path = tmp_path / "file"
    path.write_bytes(bytes(10 + whole.nbytes))
    fd = os.open(path, os.O_RDWR)
    for begin, end in ((0, 30_000), (30_000, 30_007), (30_007, 40_000)):
        box = Box((0, begin), (3, end - begin))
        data = memoryview(np.ascontiguousarray(whole[:, begin:end]).reshape(-1).view(np.uint8))
        write_box(fd, 10, whole.shape, "I16", box, data, str(path), reserved=reserved)
    os.close(fd)
    assert path.read_bytes() == bytes(10) + whole.tobytes()


def test_a_file_that_ends_early_or_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    with stored_file(path) as file:
        reader = BoxReader(ByteRange(file, 0, 5), Box((0,), (5,)), "U8")
        with pytest.raises(CorruptError, match="truncated"):
            reader.copy_into(memoryview(bytearray(5)), Box((0,), (5,)), memoryview(bytearray(5)))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(StorageError, match="cannot map") as caught:
        write_box(fd, 0, (2, 2), "U8", Box((0, 0), (2, 1)), memoryview(b"xy"), "p", reserved=True)
    os.close(fd)
    assert caught.value.path == "p"
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(StorageError, match="truncated the file"):
        write_box(fd, 0, (64, 64), "F32", Box((0, 0), (64, 2)), memoryview(bytes(512)), "p", reserved=True)
    os.close(fd)


def test_few_descriptors_serve_many_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(i)) for i in range(40)]
    for path in paths:
        Path(path).write_text(path)
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (16 + before, hard))
    try:
        with open_path(str(tmp_path)) as place:
            stored = [place.store.open(name) for name in place.store.files]
            for file in [*stored, *stored, stored[-1]]:
                assert file.read_all().decode() == file.path
                assert len(os.listdir("/proc/self/fd")) <= before + 12
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.data())
@settings(max_examples=50)
def test_strided_boxes_are_read_in_the_order_of_their_indices(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any permuted and sliced view of a file, read through windows of the tensor that holds it."""
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    base = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    view = base.transpose(data.draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.integers(1, 3))) for n in view.shape)]
    path = tmp_path_factory.mktemp("strided") / "file"
    path.write_bytes(b"head" + base.tobytes())
    at = 4 + view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    strides = tuple(step // 4 for step in view.strides)
    margins = [data.draw(st.integers(0, 2)) for _ in view.shape]
    whole = tuple(n + 2 * m for n, m in zip(view.shape, margins, strict=True))
    out = np.zeros(whole, "<i4")
    box = Box(tuple(margins), view.shape)
    with stored_file(path) as file:
        stored = ByteRange(file, at, view.nbytes, strides=strides)
        reader = BoxReader(stored, box, "I32")
        for window in windows(whole, 4, data.draw(st.sampled_from([4, 40, 400]))):
            buffer = memoryview(bytearray(window.numel * 4))
            reader.copy_into(buffer, window, memoryview(bytearray(window.numel * 4)))
            out[slices_within(window, Box((0,) * out.ndim, whole))] = np.frombuffer(buffer, "<i4").reshape(window.shape)
        whole_box = b"".join(bytes(part) for _, part in blocks(stored, view.shape, "I32"))
    assert np.array_equal(out[slices_within(box, Box((0,) * out.ndim, whole))], view)
    assert reader.hexdigest() == xxhash.xxh3_128_hexdigest(whole_box) == xxhash.xxh3_128_hexdigest(view.tobytes())
    assert (reader.bytes_left, out.sum()) == (0, view.sum())


def test_strided_blocks_come_in_parts_and_a_file_that_ends_early_is_corrupt(tmp_path: Path) -> None:
    base = np.arange(600 * 700, dtype="<i4").reshape(600, 700)
    (tmp_path / "file").write_bytes(base.tobytes())
    with stored_file(tmp_path / "file") as file:
        stored = ByteRange(file, 0, base.nbytes, strides=(1, 700))
        parts = [bytes(part) for _, part in blocks(stored, (700, 600), "I32", 100_000)]
        assert b"".join(parts) == base.T.tobytes()
        assert max(map(len, parts)) <= 100_000
        os.truncate(tmp_path / "file", base.nbytes - 1)
        with pytest.raises(ReplacedError, match="changed while"):
            list(blocks(stored, (700, 600), "I32"))
    with stored_file(tmp_path / "file") as file, pytest.raises(CorruptError, match="truncated"):
        list(blocks(ByteRange(file, 0, base.nbytes, strides=(1, 700)), (700, 600), "I32"))


@given(st.data())
@settings(max_examples=50)
def test_boxes_of_another_order_are_read_in_their_own(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any selection of the indices of some dims, read as a whole and part by part."""
    base = np.arange(5 * 6 * 4, dtype="<i4").reshape(5, 6, 4)
    chosen = []
    for size in base.shape:
        chosen.append(data.draw(st.none() | st.lists(st.integers(0, size - 1), min_size=1, max_size=7, unique=True)))
    view = base
    for dim, indices in enumerate(chosen):
        view = view if indices is None else view.take(indices, axis=dim)
    orders = tuple(None if indices is None else array("q", indices) for indices in chosen)
    path = tmp_path_factory.mktemp("orders") / "file"
    path.write_bytes(b"head" + base.tobytes())
    box = Box((1, 2, 0), view.shape)
    low = [data.draw(st.integers(0, size - 1)) for size in view.shape]
    high = [data.draw(st.integers(first + 1, size)) for first, size in zip(low, view.shape, strict=True)]
    offsets = tuple(first + begin for first, begin in zip(low, box.offsets, strict=True))
    part = Box(offsets, tuple(end - first for first, end in zip(low, high, strict=True)))
    memory = bytearray(part.numel * 4)
    with stored_file(path) as file:
        stored = ByteRange(file, 4 + 4 * int(view[0, 0, 0]), view.nbytes, strides=(24, 4, 1), orders=orders)
        whole = b"".join(bytes(window) for _, window in blocks(stored, view.shape, "I32"))
        read_part(stored, box, part, "I32", memoryview(memory), part)
    assert whole == view.tobytes()
    assert memory == view[tuple(map(slice, low, high))].tobytes()


@pytest.mark.parametrize("factors", [(2, 1 << 10), (1 << 10, 2), (1 << 5, 2, 1 << 5), (1 << 11, 1)])
@pytest.mark.parametrize("row", [1 << 12, 1])
def test_an_order_over_far_rows_is_read_in_parts(tmp_path: Path, factors: tuple[int, ...], row: int) -> None:
    rows = 1 << 11
    base = np.arange(rows * row, dtype="<i4").reshape(rows, row)
    order = np.arange(rows).reshape(factors).swapaxes(0, -1).reshape(-1) if factors[-1] > 1 else np.arange(rows)[::-1]
    (tmp_path / "file").write_bytes(base.tobytes())
    with stored_file(tmp_path / "file") as file:
        orders = (array("q", order.tolist()), None)
        stored = ByteRange(file, int(order[0]) * row * 4, base.nbytes, strides=(row, 1), orders=orders)
        for begin, part in blocks(stored, base.shape, "I32"):
            values = base[order[begin.offsets[0] : begin.ends[0]]]
            assert part == memoryview(values.tobytes())
