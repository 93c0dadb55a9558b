"""init: a second one, repeated starts and stops, launchers, devices."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from initialising import describe, log_messages, rank_and_size
from ports import free_port
from programs import require_mpi
from scripts import ALONE, warm_command, with_mpiexec, with_torchrun
from shared_names import no_names_left
from sweeps import slow

import statexchange as sx
from statexchange.testing import run_ranks

# Repeated calls


def initialises_twice() -> list[Any]:
    logged = log_messages()
    before = [sx.get_rank(), sx.get_world_size(), sx.comm.get_backend(), sx.is_initialized()]
    first = sx.init(devices=False, timeout_s=70)
    assert sx.init() is first
    assert sx.init(timeout_s=70, devices=False) is first
    assert logged == []
    assert sx.init("single", timeout_s=80) is first
    sx.shutdown()
    assert (sx.get_rank(), sx.get_world_size(), sx.is_initialized()) == (0, 1, False)
    return [before, logged]


def test_a_second_init_returns_the_communicator_and_warns_of_other_options() -> None:
    for before, logged in run_ranks(initialises_twice, 2, backend="mpi", reuse=True):
        assert before == [0, 1, "single", False]
        (line,) = logged
        assert "its communicator stays: these are not used: InitOptions(backend='single'" in line
        assert "timeout_s=80" in line


STARTS_AND_STOPS = """
import os, sys
import torch
import torch.distributed as dist
import statexchange as sx
for i in range(20):
    comm = sx.init(sys.argv[1])
    t = torch.ones(100_000)
    comm.all_reduce(t, async_op=i % 2 == 0)
    comm.wait_all()
    assert float(t[-1]) == comm.world_size, t
    if comm.world_size > 1:
        comm.empty((1000,), torch.float32)
        assert comm.split(0, -comm.rank).rank == comm.world_size - 1 - comm.rank
    sx.shutdown()
if sys.argv[1] == "gloo":
    torch.distributed.destroy_process_group()
print("done", flush=True)
"""


def run_starts_and_stops(backend: str, launcher: tuple[str, ...], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable], dict(os.environ)
    if launcher != ALONE:
        command, environ = warm_command(launcher, STARTS_AND_STOPS)
    if launcher[0] == "mpiexec":
        require_mpi()
    script = tmp_path / "script.py"
    script.write_text(STARTS_AND_STOPS)
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, script, backend], capture_output=True, text=True, timeout=100, env=environ)


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks"),
    [
        ("single", ALONE, 1),
        slow("mpi", with_mpiexec(2), 2),
        slow("auto", with_mpiexec(2), 2),
        slow("gloo", with_mpiexec(2), 2),
        slow("shm", with_torchrun(2), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),  # the launcher's name
)
def test_twenty_starts_and_stops_leave_no_shared_memory(
    backend: str, launcher: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    with no_names_left():
        done = run_starts_and_stops(backend, launcher, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks


# Launchers


@pytest.mark.parametrize("missing", [True, False])
def test_slurm_without_an_address_is_an_error(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    if not missing:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
    expected = "MASTER_ADDR and MASTER_PORT" if missing else "tcp://127.0.0.1"
    with pytest.raises(sx.errors.NotInitializedError if missing else sx.errors.StallError, match=expected):
        sx.init(timeout_s=1)


def under_slurm(port: int) -> list[Any]:
    rank, size = rank_and_size()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(size), SLURM_LOCALID=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return describe(sx.init())


def test_ranks_of_slurm_meet_at_master_addr() -> None:
    assert [row[0] for row in run_ranks(under_slurm, 2, backend="processes", args=(free_port(),))] == ["shm", "shm"]


def test_an_mpiexec_of_another_mpi_is_detected() -> None:
    """Open MPI's mpiexec starts a Python whose mpi4py found MPICH: each rank would be a world of one."""
    script = "import statexchange as sx; sx.init('mpi')"
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "OMPI_COMM_WORLD_SIZE" in done.stderr
    assert "NotInitializedError" in done.stderr


# Devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_mpi_without_threads_is_refused() -> None:
    require_mpi()
    program = "import mpi4py; mpi4py.rc.thread_level = 'funneled'; import statexchange as sx; sx.init('mpi')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "UnsupportedError: MPI was initialised without MPI_THREAD_MULTIPLE" in done.stderr


def test_nccl_without_a_gpu_names_what_is_missing() -> None:
    with pytest.raises((sx.errors.MissingExtraError, sx.errors.UnsupportedError), match="CUDA build"):
        sx.init("nccl")
    assert not sx.is_initialized()


def device_of(devices: Any) -> Any:
    try:
        return str(sx.init("auto", devices=devices).device)
    except ValueError as error:
        return str(error)


def test_each_rank_gets_its_device_or_all_an_error() -> None:
    assert run_ranks(device_of, 2, backend="mpi", args=(["cpu", "cpu"],), reuse=True) == ["cpu", "cpu"]
    assert run_ranks(device_of, 2, backend="mpi", args=(False,), reuse=True) == ["cpu", "cpu"]
    for message in run_ranks(device_of, 2, backend="mpi", args=(["cpu"],), reuse=True):
        assert "devices=['cpu'] has no device for local_rank 1" in message
    for message in run_ranks(device_of, 2, backend="mpi", args=(["cpu", "toaster"],), reuse=True):
        assert "'toaster' is no device" in message
