"""Ranks of two hosts rendezvous in a directory that both see, or all raise an error that names the unreachable rank."""

import os
from pathlib import Path
from typing import Any

import pytest
from two_hosts import ADDRESSES, two_hosts

import statexchange as sx
from statexchange.comm import network


def init_in(directory: str, timeout_s: float = 30.0) -> sx.comm.Communicator:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return sx.init(rendezvous=f"file://{directory}", rank=rank, world_size=size, timeout_s=timeout_s)


def joins(directory: str) -> list[Any]:
    import torch

    comm = init_in(directory)
    found = [comm.backend, comm.num_nodes, comm.node_rank, float(comm.all_reduce(torch.ones(100_000))[-1])]
    sx.shutdown()
    return found


def test_ranks_of_two_hosts_meet_in_a_directory(tmp_path: Path) -> None:
    with two_hosts(2, 2) as hosts:
        for _ in range(2):
            found = hosts.run(joins, str(tmp_path / "new" / "meeting"))
            assert found == [["hierarchical", 2, int(rank > 1), 4.0] for rank in range(4)]
            assert list((tmp_path / "new" / "meeting").iterdir()) == []


def cannot_reach(directory: str) -> str:
    if os.environ["RANK"] == "0":
        network.addresses = lambda: ["127.0.0.1"]  # only ranks of the same host can connect to it there
    with pytest.raises(sx.errors.StallError) as caught:
        init_in(directory, 8.0)
    return str(caught.value)


def test_a_rank_that_cannot_reach_rank_0_is_named_on_all_ranks(tmp_path: Path) -> None:
    with two_hosts(2, 1) as hosts:
        *reached, alone = hosts.run(cannot_reach, str(tmp_path / "meeting"))
    for message in reached:
        assert message.startswith("ranks [2] did not join")
    assert "rank 2 on bert cannot reach rank 0 on anna at 127.0.0.1, port " in alone
    assert 'Use rendezvous="tcp://host:port"' in alone
    assert list((tmp_path / "meeting").iterdir()) == []


def address_of_rank_0(directory: str) -> str:
    """Return the address of rank 0's store that this rank uses."""
    from statexchange.comm import rendezvous

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bootstrap = rendezvous.at_url(f"file://{directory}", rank, size, 30.0)
    store = bootstrap._store
    address = "" if rank == 0 else str(store.underlying_store.host)
    if rank == 0:
        store.get("done")  # it serves until the other rank has read the address
    else:
        store.set("done", "1")
    return address


def test_rank_0_serves_at_an_address_that_other_hosts_reach(tmp_path: Path) -> None:
    with two_hosts(1, 1) as hosts:
        assert hosts.run(address_of_rank_0, str(tmp_path / "meeting")) == ["", ADDRESSES[0]]
