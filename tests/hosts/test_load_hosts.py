"""Load and save on two hosts: with a directory that both hosts see, and with one that only one host sees."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import slow
from two_hosts import init_on_two_hosts, two_hosts

import statexchange as sx

SIZES = {"rows": (7001, 30), "columns": (6, 5003), "few": (3, 2), "scalar": ()}
CUTS = {"rows": 0, "columns": 1, "few": 0}


def whole(name: str) -> torch.Tensor:
    """Return a tensor of one of `SIZES`, whose values are all different."""
    return torch.arange(1.0 + torch.Size(SIZES[name]).numel())[1:].reshape(SIZES[name])


def begin(folder: str) -> tuple[sx.comm.Communicator, Any]:
    """Return a communicator over both hosts, and torch's mesh of all ranks for DTensors."""
    from torch.distributed.device_mesh import init_device_mesh

    comm = init_on_two_hosts(50.0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.world_size)
    return comm, init_device_mesh("cpu", (comm.world_size,))


def end(comm: sx.comm.Communicator) -> None:
    comm.barrier()
    dist.barrier()
    dist.destroy_process_group()
    sx.shutdown()


def state_on(mesh: Any, *, filled: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = {}
    for name, shape in SIZES.items():
        tensor = whole(name) if filled else torch.zeros(shape)
        placement = Shard(CUTS[name]) if name in CUTS else Replicate()
        found[name] = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return found


def saves(folder: str) -> None:
    comm, mesh = begin(folder)
    state = state_on(mesh, filled=True)
    sx.save_checkpoint(
        {"model": state, "step": 7, "own": {f"r{comm.rank}": torch.full((9,), comm.rank)}}, f"{folder}/s"
    )
    sx.export_checkpoint(state, f"{folder}/e")
    end(comm)


def loads(folder: str) -> list[Any]:
    comm, mesh = begin(folder)
    live = state_on(mesh, filled=False)
    state = {"model": live, "step": 0, "own": {f"r{rank}": torch.zeros(9, dtype=torch.int64) for rank in range(4)}}
    sx.load_checkpoint(state, f"{folder}/s")
    assert (state["step"], [int(t[0]) for t in state["own"].values()]) == (7, [0, 1, 2, 3])
    wrong = [name for name, tensor in live.items() if not tensor.full_tensor().equal(whole(name))]
    plain = {name: torch.zeros(SIZES[name]) for name in SIZES}  # which all ranks read whole
    report = sx.load_checkpoint(plain, f"{folder}/e")
    wrong += [name for name, tensor in plain.items() if not tensor.equal(whole(name))]
    end(comm)
    return [wrong, report.num_tensors]


@pytest.mark.slow
def test_a_save_of_two_hosts_is_loaded_with_other_placements(tmp_path: Path) -> None:
    with two_hosts(2, 2) as hosts:
        hosts.run(saves, str(tmp_path), timeout_s=100)
    with two_hosts(1, 3) as hosts:
        assert hosts.run(loads, str(tmp_path), timeout_s=100) == [[[], 4]] * 4


def is_seen_by_one_host(out: str, how: str) -> list[Any]:
    """Load and save on two hosts, whose second has no such directory or another of that name; return both errors."""
    comm = sx.init("auto", timeout_s=50.0)
    sx.export_checkpoint({"a": torch.ones(5)}, out)
    if how == "another" and comm.node_rank == 1 and comm.local_rank == 0:
        os.makedirs(out)
    comm.barrier()
    live = {"a": torch.zeros(5)}
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.load_checkpoint(live, out)
    assert not live["a"].any()
    comm.barrier()
    shutil.rmtree(os.path.dirname(out), ignore_errors=True)
    comm.barrier()
    with pytest.raises(sx.StateExchangeError) as saving:
        sx.save_checkpoint(live, out)
    sx.shutdown()
    return [[type(e.value).__name__, str(e.value)] for e in (caught, saving)]


@pytest.mark.parametrize("how", [slow("nothing"), "another"])
def test_a_directory_that_one_host_does_not_see_is_an_error_that_names_it(how: str) -> None:
    with two_hosts(2, 2) as hosts:
        found = hosts.run(is_seen_by_one_host, "/dev/shm/below/out", how, timeout_s=100)
    assert all(one == found[0] for one in found)
    for (kind, text), path in zip(found[0], ("/dev/shm/below/out", "/dev/shm/below"), strict=True):
        assert kind == "NotFoundError"
        assert "rank 2" in text
        assert "bert" in text
        assert path in text


MIB = 1 << 20
NEEDED = {  # by ranks, of the names "0" to "7": all as in DDP, two copies as in HSDP, and each rank its own
    "ddp": lambda rank, ranks: range(8),
    "hsdp": lambda rank, ranks: range(rank % 2, 8, 2),
    "own": lambda rank, ranks: range(rank, 8, ranks),
}


def loads_once(path: str, kind: str, readers: Any) -> list[Any]:
    """Load a tensor of 1 MiB for each name that this rank needs; return the host and the mebibytes that it has read."""
    comm = init_on_two_hosts(50.0)
    live = {str(number): torch.zeros(MIB // 4) for number in NEEDED[kind](comm.rank, comm.world_size)}
    live["small"] = torch.zeros(3)
    report = sx.load_checkpoint(live, path, readers=readers)
    assert all(bool((tensor == float(name)).all()) for name, tensor in live.items() if name != "small")
    assert live["small"].tolist() == [1, 1, 1]
    node = comm.node_rank
    comm.barrier()
    sx.shutdown()
    return [node, (report.nbytes - 12) // MIB]


@pytest.mark.parametrize("ranks", [(2, 2), slow((1, 3))], ids=str)
@pytest.mark.parametrize(("kind", "readers"), [("ddp", "job"), ("hsdp", "job"), slow("own", "job"), slow("ddp", None)])
def test_what_ranks_of_both_hosts_need_is_read_by_one_host(
    ranks: tuple[int, int], kind: str, readers: str | None, tmp_path: Path
) -> None:
    whole = {str(number): torch.full((MIB // 4,), float(number)) for number in range(8)}
    sx.save_checkpoint({**whole, "small": torch.ones(3)}, tmp_path / "save")
    with two_hosts(*ranks) as hosts:
        read = hosts.run(loads_once, str(tmp_path / "save"), kind, readers, timeout_s=100)
    needed = [set(NEEDED[kind](rank, sum(ranks))) for rank in range(sum(ranks))]
    shared = [
        needed[rank]
        for rank, (node, _) in enumerate(read)
        if any(n != node and needed[r] == needed[rank] for r, (n, _) in enumerate(read))
    ]
    if readers is None or not shared:
        assert [count for _, count in read] == [len(names) for names in needed]
        return
    # Ranks of the reader's host that need a tensor read it from the page cache, and no rank of the other host does.
    for names in {frozenset(names) for names in needed}:
        by_host = [
            {count for rank, (node, count) in enumerate(read) if node == host and needed[rank] == names}
            for host in (0, 1)
        ]
        assert all(len(counts) <= 1 for counts in by_host), read
        assert sum(sum(counts) for counts in by_host) == len(names), read


def loads_a_large_tensor(path: str) -> list[Any]:
    """Load a tensor of 40 MiB, on one rank into every second row; return the sizes of the messages that were sent."""
    comm = init_on_two_hosts(50.0)
    live = torch.zeros(20 << (1 - comm.rank), MIB // 2)[:: 2 - comm.rank]
    sizes = []
    send = sx.comm.Communicator.send

    def noting(comm: Any, tensor: Any, dst: int) -> Any:
        sizes.append(tensor.nbytes)
        return send(comm, tensor, dst)

    sx.comm.Communicator.send = noting  # type: ignore[method-assign]
    sx.load_checkpoint({"a": live}, path, readers="job")
    assert live.equal(torch.arange(20.0)[:, None].expand_as(live))
    comm.barrier()
    sx.shutdown()
    return sizes


def test_a_large_tensor_is_sent_in_several_messages(tmp_path: Path) -> None:
    sx.save_checkpoint({"a": torch.arange(20.0)[:, None].expand(20, MIB // 2).contiguous()}, tmp_path / "save")
    with two_hosts(1, 1) as hosts:
        sent = hosts.run(loads_a_large_tensor, str(tmp_path / "save"))
    # Ranks that wait see progress after each, and put off their deadlines.
    assert sent == [[16 * MIB, 16 * MIB, 8 * MIB], []]
