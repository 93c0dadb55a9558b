"""Communicators: ranks and sizes, exchange of values, agreement, and failures that reach all ranks in time."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import STARTING_S, start
from programs import require_mpi
from scripts import warm_command, with_mpiexec
from shared_names import no_names_left
from starting import AND_MPI
from sweeps import slow

import statexchange as sx
from statexchange.settings import detect_launch
from statexchange.testing import run_ranks


@pytest.mark.ranks(slow(1), 2, slow(4), backend=("threads", "gloo", "mpi"), timeout_s=STARTING_S, reuse=True)
def test_values_arrive_in_rank_order() -> None:
    comm = start()
    n = comm.world_size
    assert comm.all_gather_object({"rank": comm.rank, 3: (1, None)}) == [{"rank": r, 3: (1, None)} for r in range(n)]
    for root in {0, n - 1}:
        found = comm.gather_object("x" * comm.rank, root=root)
        assert found == (["x" * r for r in range(n)] if comm.rank == root else [])
        assert comm.broadcast_object(comm.rank, root=root) == root
    comm.barrier()


@pytest.mark.ranks(3, backend=AND_MPI, timeout_s=STARTING_S, reuse=True)
def test_long_and_short_messages_mix() -> None:
    comm = start()
    for size in (0, 10, 4000, 5000, 3_000_000, 100, 1_000_000):
        sizes = [size * (r + 1) for r in range(3)]
        payload = bytes([comm.rank]) * sizes[comm.rank]
        assert comm.all_gather_bytes(payload) == [bytes([r]) * sizes[r] for r in range(3)]


@pytest.mark.ranks(4, backend=AND_MPI, timeout_s=STARTING_S)
def test_a_group_needs_only_its_members_and_keeps_their_order() -> None:
    comm = start()
    if comm.rank == 2:
        return
    if comm.rank == 3:
        assert comm.new_group([3]).world_size == 1
        return
    pair = comm.new_group([1, 0])
    assert pair.rank == 1 - comm.rank
    assert pair.all_gather_object(comm.rank) == [1, 0]
    assert comm.new_group([1, 0]) is pair


@pytest.mark.ranks(3, backend=AND_MPI, timeout_s=STARTING_S, reuse=True)
def test_an_error_on_one_rank_is_raised_on_all_and_the_communicator_works_on() -> None:
    comm = start()
    with pytest.raises(sx.errors.PeerError) as caught, comm.phase("cooking"):
        if comm.rank == 1:
            raise KeyError("salt")
    assert (caught.value.rank, caught.value.phase) == (1, "cooking")
    assert "KeyError: 'salt'" in caught.value.cause
    with pytest.raises(sx.errors.CorruptError, match="bad bytes") as refused, comm.phase("reading"):
        if comm.rank == 2:
            raise sx.errors.CorruptError("bad bytes", path="/f")
    assert (refused.value.rank, refused.value.path) == (2, "/f")
    assert refused.value.rank == 2
    assert comm.all_gather_object(comm.rank) == [0, 1, 2]


@pytest.mark.ranks(2, backend=("threads", "gloo", "mpi"), reuse=True)
def test_all_ranks_share_a_host_and_a_run() -> None:
    comm = start()
    assert (comm.local_rank, comm.local_world_size, comm.node_rank, comm.num_nodes) == (comm.rank, 2, 0, 1)
    assert comm.shared_memory
    assert len(set(comm.all_gather_object(comm.run))) == 1


@pytest.mark.ranks(2, backend=("threads", "gloo", "mpi"), reuse=True)
def test_a_root_that_does_not_exist_is_refused() -> None:
    comm = start()
    with pytest.raises(ValueError, match="root 2"):
        comm.gather_object(1, root=2)


def waits_for_a_dead_rank(how: str) -> str:
    comm = start()
    comm.barrier()
    if comm.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "close":
            comm.close(ValueError("had enough"))
            time.sleep(1)
            return ""
        os._exit(5)
    with pytest.raises(sx.errors.PeerError) as caught:
        comm.barrier()
    with pytest.raises(sx.errors.PeerError, match="rank 1"):
        comm.barrier()  # every later call raises the same
    return str(caught.value)


@pytest.mark.parametrize("how", ["kill", "exit", "close"])
def test_a_rank_that_exits_is_named(how: str) -> None:
    outcomes = run_ranks(waits_for_a_dead_rank, 3, backend="gloo", args=(how,), allow_failure=True)
    for rank in (0, 2):
        assert outcomes[rank].value.startswith(f"rank 1 on {platform.node()} failed"), outcomes[rank]
    assert how != "close" or "had enough" in outcomes[0].value


def rank_2_is_late() -> list[int]:
    comm = start()
    comm.barrier()
    if comm.rank == 2:
        time.sleep(1.2)
        return []
    with pytest.raises(sx.errors.StallError, match="'lunch'") as caught:
        comm.barrier(0.4, tag="lunch")
    assert caught.value.missing == (2,)
    return list(caught.value.missing)


def test_a_barrier_names_missing_ranks() -> None:
    assert run_ranks(rank_2_is_late, 3, backend="gloo")[:2] == [[2], [2]]


def moves_slowly() -> float:
    """Rank 1 takes longer than the stall deadline, but reports progress."""
    comm = start()
    began = time.monotonic()
    with comm.phase("moving", timeout_s=0.5):
        for _ in range(6 if comm.rank else 0):
            time.sleep(0.2)
            comm.progress()
    return time.monotonic() - began


def test_a_stall_deadline_does_not_limit_the_total_time() -> None:
    assert min(run_ranks(moves_slowly, 2, backend="gloo")) > 1.1


def gathers_hidden(kind: str, folder: str) -> bool:
    """Gather on ranks whose /proc shows no other rank, as in containers; return whether they share memory.

    With the kind "nothing" all is to be seen.
    """
    import ctypes

    clone_newns = 0x00020000
    libc = ctypes.CDLL(None, use_errno=True)
    if kind != "nothing":
        assert libc.unshare(clone_newns) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/proc"], check=True)
    comm = sx.get_communicator()
    with sx.get_tensors_parallel(
        torch.full((3,), float(comm.rank)), [0, 1], None, None if comm.shared_memory else folder
    ) as tensors:
        assert [float(t[0]) for t in tensors] == ([0.0, 1.0] if comm.rank == 0 else [])
    return comm.shared_memory


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(("kind", "expected"), [("nothing", True), ("no_proc", False)])
def test_ranks_that_cannot_share_memory_all_fall_back(kind: str, expected: bool, tmp_path: Path) -> None:
    with no_names_left():
        assert run_ranks(gathers_hidden, 2, backend="gloo", args=(kind, str(tmp_path))) == [expected, expected]


# Which communicator a call uses


def test_without_a_launcher_there_is_a_world_of_one() -> None:
    assert (sx.get_rank(), sx.get_world_size(), sx.comm.get_backend(), sx.is_initialized()) == (
        0,
        1,
        "single",
        False,
    )
    comm = sx.get_communicator()
    assert comm.world_size == 1
    assert comm.all_gather_object(5) == [5]
    with pytest.raises(KeyError), comm.phase("alone"):
        raise KeyError("its own error, as it is")


def uses_torch_distributed() -> list[Any]:
    """Use torch.distributed without a call of sx.init that makes a communicator."""
    import torch.distributed as dist

    comm = sx.get_communicator()
    assert sx.get_communicator() is comm
    assert sx.init() is comm
    assert sx.init("gloo") is comm  # with a warning: the first communicator is kept
    odd = dist.new_group([1, 2])
    group = sx.comm.from_process_group(odd) if dist.get_rank() else None
    return [
        comm.world_size,
        comm.rank,
        comm.backend,
        group.all_gather_object(dist.get_rank()) if group else None,
    ]


def test_torch_distributed_is_adopted() -> None:
    assert run_ranks(uses_torch_distributed, 3, backend="gloo") == [
        [3, 0, "shm", None],
        [3, 1, "shm", [1, 2]],
        [3, 2, "shm", [1, 2]],
    ]


def not_initialized() -> str:
    with pytest.raises(sx.errors.NotInitializedError, match=r"WORLD_SIZE=2.*init_process_group"):
        sx.get_communicator()
    with pytest.raises(sx.errors.NotInitializedError):
        sx.export_checkpoint({"w": torch.ones(1)}, "/nowhere")
    return "ok"


def test_a_launched_rank_without_a_communicator_is_no_world_of_one() -> None:
    assert run_ranks(not_initialized, 2, backend="processes") == ["ok", "ok"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ("torchrun", 3, 8, 1, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            ("openmpi", 1, 2, 1, 2),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, ("mpich", 0, 4, None, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("none", 0, 1, 0, 1)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}, ("slurm", 2, 4, 0, 4)),
    ],
    ids=["torchrun", "Open MPI", "MPICH", "script of a Slurm job", "Slurm step"],
)
def test_launchers_are_recognised(
    variables: dict[str, str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch = detect_launch()
    assert (
        launch.launcher,
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
    ) == expected


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'smoke'.*auto, single"):
        sx.init("smoke")


RAISES_ON_RANK_1 = """
import sys, time
import statexchange as sx
comm = sx.init(sys.argv[1])
assert comm.world_size == 3, comm
if comm.rank == 1:
    raise KeyError("lost my keys")
comm.barrier()
"""


@pytest.mark.parametrize("backend", ["mpi", slow("gloo"), slow("auto")])
def test_under_mpiexec_an_uncaught_exception_ends_the_job(backend: str, tmp_path: Path) -> None:
    require_mpi()
    script = tmp_path / "script.py"
    script.write_text(RAISES_ON_RANK_1)
    words, environ = warm_command(with_mpiexec(3), RAISES_ON_RANK_1)
    environ["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run([*words, script, backend], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "lost my keys" in done.stderr


STARTS_AND_STOPS = """
import sys
import statexchange as sx
for _ in range(20):
    comm = sx.init(sys.argv[1])
    comm.barrier()
    sx.shutdown()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_twenty_starts_and_stops_leave_no_shared_memory(backend: str, tmp_path: Path) -> None:
    require_mpi()
    script = tmp_path / "script.py"
    script.write_text(STARTS_AND_STOPS)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    with no_names_left():
        done = subprocess.run(
            [mpiexec, "-n", "2", sys.executable, script, backend],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
