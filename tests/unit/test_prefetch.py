"""Bytes are asked for ahead of their reading: each once, in order, a bounded number, and into the page cache."""

from __future__ import annotations

import mmap
import os
import random
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import require
from scripts import HOME

from statexchange.sharding.shards import Box, full_box, intersect
from statexchange.storage.regions import in_turns, windows
from statexchange.storage.store import Prefetch, Span, StoredFile, open_local

MIB = 1 << 20


class AskedFile(StoredFile):
    """A file that notes which of its bytes were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def will_need(self, begin: int, nbytes: int) -> None:
        self.asked.append((begin, nbytes))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        raise AssertionError

    def check_unchanged(self) -> None:
        raise AssertionError

    version = local_identity = shared_identity = property(lambda self: [])  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_asked_for_once_in_order_and_at_most_32_mib_ahead(seed: int) -> None:
    rng = random.Random(seed)
    files = [AskedFile(), AskedFile()]
    spans, wanted, at = [], [], 0
    for _ in range(30):
        file = rng.choice([*files, None])
        at += rng.choice([0, 0, 5000])  # neighbours, and gaps
        nbytes = rng.choice([0, 1, 4096, 3 * MIB, 40 * MIB])
        spans.append(Span(file, at, nbytes))
        if file is not None:
            wanted += [(file, at, at + nbytes)] if nbytes else []
        at += nbytes
    total, num_read = sum(span.nbytes for span in spans), 0
    prefetch = Prefetch(spans)
    while num_read < total:
        step = min(rng.choice([1, 100_000, 2 * MIB]), total - num_read)
        num_read += step
        prefetch.advance(step)
        num_asked = sum(nbytes for file in files for _, nbytes in file.asked)
        assert num_asked <= num_read + 33 * MIB
    for file in files:
        asked = [(begin, begin + nbytes) for begin, nbytes in file.asked]
        assert joined(asked) == joined([(begin, end) for of, begin, end in wanted if of is file])


@pytest.mark.parametrize("cuts", [(4, 1), (1, 4), (2, 3)], ids=str)
def test_boxes_of_a_tensor_are_asked_for_in_the_order_in_which_its_windows_read_them(cuts: tuple[int, int]) -> None:
    shape = (600, 60_000)
    height, width = shape[0] // cuts[0], shape[1] // cuts[1]
    boxes = [Box((row, column), (height, width)) for row in range(0, 600, height) for column in range(0, 60_000, width)]
    files = {box: AskedFile() for box in boxes}
    spans = in_turns([(box, Span(files[box], 0, 8 * box.numel)) for box in boxes], full_box(shape))
    prefetch, num_read = Prefetch(spans), dict.fromkeys(boxes, 0)
    for window in windows(shape, 8):
        for box in boxes:
            part = intersect(box, window)
            num_read[box] += 0 if part is None else 8 * part.numel
            # No byte is read before it was asked for.
            assert sum(nbytes for _, nbytes in files[box].asked) >= num_read[box]
        prefetch.advance(8 * window.numel)
    for file in files.values():
        asked = [(begin, begin + nbytes) for begin, nbytes in file.asked]
        assert joined(asked) == [(0, 8 * height * width)]


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans with neighbours joined; they must be in order and must not overlap."""
    result: list[tuple[int, int]] = []
    for begin, end in spans:
        assert not result or begin >= result[-1][1]
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result


def test_what_will_be_needed_comes_into_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if len(cached(fd)) == 8:
            pytest.skip(f"{tmp_path} is on a file system that keeps its files in memory")
        store, name = open_local(str(path))
        assert name is not None
        store.open(name).will_need(2 * MIB, 3 * MIB)
        deadline = time.monotonic() + 10
        while cached(fd) != [2, 3, 4]:
            assert time.monotonic() < deadline, cached(fd)
            time.sleep(0.01)
        store.close()
    finally:
        os.close(fd)


def cached(fd: int) -> list[int]:
    """Return of which mebibytes all pages are in the page cache."""
    pages = runpy.run_path(str(HOME / "tools/bench/page_cache.py"))["cached_pages"](fd)
    step = MIB // mmap.PAGESIZE
    return [at // step for at in range(0, len(pages), step) if all(pages[at : at + step])]


def test_a_large_write_goes_to_the_disk_before_the_file_is_synced(tmp_path: Path) -> None:
    require("strace")
    program = (
        "import sys, numpy, statexchange as sx\n"
        "values = {'large': numpy.zeros(1 << 20, 'f4'), 'small': numpy.zeros(3, 'f4')}\n"
        "sx.save_checkpoint(values, sys.argv[1])\n"
    )
    log = tmp_path / "log"
    tracing = ["strace", "-f", "-qq", "-e", "trace=sync_file_range,fsync", "-o", str(log)]
    subprocess.run([*tracing, sys.executable, "-c", program, str(tmp_path / "save")], check=True)
    calls = re.findall(r"(sync_file_range|fsync)\((\d+)", log.read_text())
    descriptor = next(fd for call, fd in calls if call == "sync_file_range")
    assert ("fsync", descriptor) in calls[calls.index(("sync_file_range", descriptor)) :]
