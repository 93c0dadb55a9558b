"""Which rank reads a box for ranks of several hosts, and how it comes to them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from statexchange.exchange import reading
from statexchange.sharding.shards import full_box


@pytest.mark.parametrize("seed", range(20))
def test_each_host_gets_a_box_once_from_a_rank_that_has_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    box, size = full_box((1000, 1000)), rng.randint(2, 16)
    nodes = tuple(rng.randrange(rng.randint(2, 5)) for _ in range(size))
    local = SimpleNamespace(shard=SimpleNamespace(boxes=[box], dtype="F32"), memory=[None])
    stored = {box: SimpleNamespace(digest="1")}
    items: Any = [reading.ReadItem(name, local, stored, "F32") for name in "abc"]  # type: ignore[arg-type]
    monkeypatch.setattr(reading, "from_all", lambda _, value, *__: [value] * size)
    of_ranks = []
    for rank in range(size):
        comm: Any = SimpleNamespace(rank=rank, world_size=size, nodes=nodes)
        of_ranks.append(reading.assign_readers(items, comm, in_job=True))
    for wanted in of_ranks[0]:
        for rank, of_rank in enumerate(of_ranks):
            # A rank knows no messages of others, of which a large job has millions.
            assert all(rank in message for message in of_rank[wanted])
            assert list(of_rank) == list(of_ranks[0])
        messages = sorted({message for of_rank in of_ranks for message in of_rank[wanted]}, key=lambda pair: pair[1])
        assert all(message in of_ranks[rank][wanted] for message in messages for rank in message)
        receivers = [dst for _, dst in messages]
        has_box = set(range(size)) - set(receivers)
        assert len({nodes[rank] for rank in has_box}) == 1  # the reader's host
        for src, dst in messages:
            assert src in has_box
            has_box.add(dst)
        assert len(set(receivers)) == len(receivers)
        assert len([1 for src, dst in messages if nodes[src] != nodes[dst]]) == len(set(nodes)) - 1
