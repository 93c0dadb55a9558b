"""Reading ahead: the bytes are those of the file, requests are few in order, and memory is bounded."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statexchange.storage.fsspec_store import ReadAhead

DATA = random.Random(0).randbytes(3 << 20)
SIZE = len(DATA)


class Requests:
    """A file that counts the requests."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def fetch(self, begin: int, end: int) -> bytes:
        assert 0 <= begin < end <= SIZE
        self.sizes.append(end - begin)
        return DATA[begin:end]


def read(ahead: ReadAhead, begin: int, end: int) -> bytes:
    return b"".join(ahead.read(begin, end))


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 1 << 19)), max_size=60), st.integers(0, 4 << 20))
def test_any_reads_return_the_bytes_of_the_file(reads: list[tuple[int, int]], memory_bytes: int) -> None:
    ahead = ReadAhead(Requests().fetch, SIZE, memory_bytes)
    for begin, nbytes in reads:
        end = min(SIZE, begin + nbytes)
        assert read(ahead, begin, end) == DATA[begin:end]
    assert sum(len(window.data) for window in ahead._windows) <= memory_bytes


@pytest.mark.parametrize("gap", [0, 100, 60_000])
def test_small_reads_in_order_are_few_requests(gap: int) -> None:
    requests = Requests()
    ahead = ReadAhead(requests.fetch, SIZE, 8 << 20)
    begins = range(0, SIZE - 10, 10 + gap)
    assert all(read(ahead, begin, begin + 10) == DATA[begin : begin + 10] for begin in begins)
    assert len(requests.sizes) < 12
    assert sum(requests.sizes) <= SIZE


def test_reads_in_random_order_fetch_no_more_than_they_ask_for() -> None:
    requests = Requests()
    ahead = ReadAhead(requests.fetch, SIZE, 8 << 20)
    begins = list(range(0, SIZE, 200_000))
    for begin in reversed(begins):
        read(ahead, begin, begin + 10)
    assert requests.sizes == [10] * len(begins)


def test_reads_that_are_larger_than_the_memory_are_not_kept_and_are_not_cut() -> None:
    requests = Requests()
    ahead = ReadAhead(requests.fetch, SIZE, 800_000)
    for begin in range(0, SIZE - 500_000, 500_000):
        assert read(ahead, begin, begin + 500_000) == DATA[begin : begin + 500_000]
    assert set(requests.sizes) == {500_000}


def test_threads_in_different_places_each_read_ahead() -> None:
    requests = Requests()
    ahead = ReadAhead(requests.fetch, SIZE, 8 << 20)
    wrong: list[int] = []

    def run(first: int) -> None:
        for begin in range(first, first + (1 << 20), 100):
            if read(ahead, begin, begin + 100) != DATA[begin : begin + 100]:
                wrong.append(begin)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(0, 2 << 20, 1 << 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(requests.sizes) < 200
