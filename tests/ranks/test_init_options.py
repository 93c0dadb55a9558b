"""init: local ranks, deadlines, and a world without torch or in threads."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from initialising import describe, init_by_hand, rank_and_size
from programs import require_mpi

import statexchange as sx
from statexchange.comm import defaults
from statexchange.testing import run_ranks

# Local ranks


def counts_as_open_mpi_does(directory: str) -> list[Any]:
    rank, size = rank_and_size()
    os.environ["LOCAL_RANK"] = str([0, 2, 1][rank])  # Open MPI 5 numbers ranks like this if they share cores
    before = sx.comm.get_local_rank()
    comm = sx.init(rendezvous=f"file://{directory}")
    assert comm.node.world_size == size
    found = [before, sx.comm.get_local_rank(), comm.local_rank, comm.node.rank, comm.leaders is not None]
    comm.barrier()
    pair = comm.split(0 if rank else None)
    return [*found, None if pair is None else pair.local_rank]


def test_the_local_rank_is_one_before_and_after_init(tmp_path: Path) -> None:
    found = run_ranks(counts_as_open_mpi_does, 3, backend="processes", args=(str(tmp_path),))
    assert found == [[0, 0, 0, 0, True, None], [2, 2, 2, 2, False, 0], [1, 1, 1, 1, False, 1]]


def has_impossible_local_ranks(directory: str) -> list[int]:
    os.environ["LOCAL_RANK"] = "0"  # as if each rank were alone on its host
    before = sx.comm.get_local_rank()
    comm = sx.init(rendezvous=f"file://{directory}")
    return [before, sx.comm.get_local_rank(), comm.local_rank]


def test_impossible_local_ranks_still_give_one_consistent_local_rank(tmp_path: Path) -> None:
    found = run_ranks(has_impossible_local_ranks, 2, backend="processes", args=(str(tmp_path),))
    assert found == [[0, 0, 0], [0, 0, 1]]


# Deadlines


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "5", True])
def test_every_public_call_refuses_an_invalid_deadline(wrong: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    sx.save_checkpoint({"w": torch.ones(2)}, folder)
    comm = sx.get_communicator()
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: sx.init("single", timeout_s=wrong),
        "from_process_group": lambda: sx.comm.from_process_group(None, timeout_s=wrong),
        "from_mpi": lambda: sx.comm.from_mpi(None, timeout_s=wrong),
        "barrier": lambda: comm.barrier(timeout_s=wrong),
        "agree": lambda: comm.agree(timeout_s=wrong),
        "exchange": lambda: comm.all_gather_bytes(b"", timeout_s=wrong),
        "save": lambda: sx.save_checkpoint({"w": torch.ones(2)}, folder, stall_timeout_s=wrong),
        "load": lambda: sx.load_checkpoint({"w": torch.ones(2)}, folder, stall_timeout_s=wrong),
        "export": lambda: sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "out", stall_timeout_s=wrong),
        "run_ranks": lambda: run_ranks(rank_and_size, 1, timeout_s=wrong),
    }
    if wrong != 0:
        work = comm.all_reduce(torch.ones(1), async_op=True)
        calls["Work.wait"] = lambda: work.wait(timeout_s=wrong)
        workspace = sx.NFSWorkspace(folder)
        calls["NFSWorkspace"] = lambda: workspace.read_configs_and_weights_from_rank(0, timeout_s=wrong)
    for name, call in calls.items():
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be"):
            pytest.fail(f"{name} returned {call()!r}")
    assert not sx.is_initialized()
    assert not (tmp_path / "out").exists()


def gives_wrong_deadlines() -> str:
    comm = sx.get_communicator()
    for wrong in (0, -1, float("nan"), "5"):
        timeout: Any = wrong if comm.rank else None
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be") as caught:
            comm.barrier(timeout_s=timeout)
        assert caught.value.rank == 1
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be") as caught:
            comm.agree(timeout_s=timeout)
        assert caught.value.rank == 1
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be") as caught:
            comm.all_gather_bytes(b"", timeout_s=timeout)
        assert caught.value.rank == 1
    comm.barrier(timeout_s=float("inf"))
    comm.barrier(timeout_s=10**400)
    return "ok"


def test_a_wrong_deadline_of_one_rank_is_refused_on_all_ranks() -> None:
    assert run_ranks(gives_wrong_deadlines, 2) == ["ok", "ok"]


def waits_for_ever(url: str, backend: str) -> list[Any]:
    comm = init_by_hand(url, backend, timeout_s=float("inf"))
    found = describe(comm)
    comm.all_reduce(torch.ones(2), async_op=True).wait(timeout_s=float("inf"))
    sx.shutdown()
    return found[:3]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_infinite_deadline_is_accepted(backend: str, tmp_path: Path) -> None:
    found = run_ranks(waits_for_ever, 2, backend="processes", args=(f"file://{tmp_path}/meeting", backend))
    assert found == [[backend, rank, 2] for rank in range(2)]


def counts_by_the_launcher() -> list[int]:
    before = sx.comm.get_local_rank()
    comm = sx.init("mpi")
    found = [before, sx.comm.get_local_rank(), comm.local_rank, comm.node.rank]
    assert sorted(comm.all_gather_object(before)) == [*range(comm.world_size)]
    return found


def test_the_local_rank_is_the_one_that_the_launcher_counts() -> None:
    """tools/test_on_open_mpi.sh runs this, too: Open MPI 5 does not number local ranks in rank order."""
    require_mpi()
    for before, *after in run_ranks(counts_by_the_launcher, 4, backend="mpi", timeout_s=120):
        assert after == [before] * 3


# Without torch

WITHOUT_TORCH = """
import importlib.util
import sys

import numpy as np

import statexchange as sx

assert importlib.util.find_spec("torch") is None
comm = sx.init(sys.argv[1])
n = comm.world_size
assert (comm.backend, n, sx.comm.get_local_rank()) == ("mpi", 3, comm.local_rank), comm
assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": rank} for rank in range(n)]
assert comm.broadcast_object("root's" if comm.rank == 0 else None) == "root's"
long = ["x" * 100_000 * rank for rank in range(n)]
assert comm.gather_object(long[comm.rank]) == (long if comm.rank == 0 else [])
pair = comm.split(comm.rank % 2)
assert pair.all_gather_object(comm.rank) == [rank for rank in range(n) if rank % 2 == comm.rank % 2]
assert comm.node.world_size == n
comm.barrier()
for refused in (lambda: comm.all_reduce(np.ones(3)), lambda: comm.device):
    try:
        refused()
    except sx.errors.MissingExtraError as error:
        assert 'pip install "statexchange[torch]"' in str(error)
    else:
        raise AssertionError("no MissingExtraError")
comm.barrier()
sx.shutdown()
meeting = {"rendezvous": f"file://{sys.argv[2]}", "rank": 0, "world_size": 2}
for wish in ({"backend": "shm"}, {"backend": "gloo", **meeting}):
    try:
        sx.init(**wish)
    except sx.errors.MissingExtraError as error:
        assert 'pip install "statexchange[torch]"' in str(error)
    else:
        raise AssertionError("no MissingExtraError")
assert "torch" not in sys.modules
print("reached the end")
"""


@pytest.mark.parametrize("backend", ["mpi", "auto"])
def test_mpi_works_without_torch(backend: str, tmp_path: Path) -> None:
    """In an environment with everything but torch: the installed packages, linked one by one."""
    require_mpi()
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(np.__file__).parents[1].iterdir():
        if not entry.name.startswith(("torch", "functorch", "statexchange")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    (packages / "statexchange").symlink_to(Path(sx.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    environment["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib"  # libmpi, which mpi4py searches beside site-packages
    (tmp_path / "script.py").write_text(WITHOUT_TORCH)
    words = ["-n", "3", sys.executable, "-S", str(tmp_path / "script.py"), backend, str(tmp_path / "meeting")]
    done = subprocess.run(
        [Path(sys.executable).parent / "mpiexec", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached the end") == 3, done.stdout


def test_threads_may_get_their_worlds_of_one_and_shut_down_at_once() -> None:
    def start_and_stop() -> None:
        for _ in range(100):
            with defaults.use(None):
                assert sx.get_communicator().world_size == 1
                sx.shutdown()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for ended in [threads.submit(start_and_stop) for _ in range(4)]:
                ended.result()
    finally:
        sys.setswitchinterval(interval)


def test_a_rendezvous_with_half_an_address_is_refused() -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="rendezvous must be"):
        sx.init(rendezvous="tcp://[::1", rank=0, world_size=2)
