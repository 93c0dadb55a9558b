"""A gather that cannot work: bad ranks, values, workspaces, and ranks that die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from equality import equal_bits
from programs import require_mounts
from shared_names import no_names_left
from starting import THREADS_AND_PROCESSES

import statexchange as sx
from statexchange.exchange import gather_transport
from statexchange.testing import run_ranks

# Failures


@pytest.mark.ranks(2, backend="threads")
@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 5], [-1, 0]], ids=str)
def test_bad_ranks_are_refused(ranks: list[int]) -> None:
    with (
        pytest.raises(ValueError, match="ranks must be"),
        sx.get_tensors_parallel(torch.ones(1), ranks),
    ):
        pass


@pytest.mark.ranks(2, backend="threads")
def test_a_caller_outside_of_ranks_is_refused() -> None:
    if sx.get_communicator().rank == 1:
        with pytest.raises(ValueError, match=r"among ranks \[0\]"), sx.get_configs_parallel({}, [0]):
            pass


@pytest.mark.ranks(3, backend=THREADS_AND_PROCESSES)
@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_the_block_is_raised_on_every_member(who: int, tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    for workspace in (None, tmp_path / "ws"):
        with (
            pytest.raises(KeyError if rank == who else sx.errors.PeerError) as caught,
            sx.gather_state({"w": torch.ones(3)}, workspace=workspace),
        ):
            if rank == who:
                raise KeyError("boo")
        if rank != who:
            assert caught.value.rank == who
            assert "KeyError: 'boo'" in str(caught.value)
    sx.get_communicator().barrier()  # each rank removes its own file after the agreement
    assert not list(tmp_path.rglob("*.safetensors"))
    with sx.gather_state({"w": torch.ones(3)}) as states:  # the communicator still works
        assert len(states) in (0, 3)


@pytest.mark.ranks(3, backend=THREADS_AND_PROCESSES)
def test_a_value_that_cannot_be_sent_is_named_on_every_rank() -> None:
    rank = sx.get_communicator().rank
    bad = torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)
    with (
        pytest.raises(sx.errors.UnsupportedError, match="sparse") as caught,
        sx.gather_state({"layer.w": bad}),
    ):
        pass
    assert (caught.value.name, caught.value.rank) == ("layer.w", 1)
    with (
        pytest.raises(sx.errors.UnsupportedError, match=r"object.* at \.a\[1\]"),
        sx.get_configs_parallel({"a": [1, object() if rank == 2 else 2]}, [0, 1, 2]),
    ):
        pass


@pytest.mark.ranks(2, backend="gloo")
def test_an_impossible_workspace_is_an_error_with_its_path_on_every_rank(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    target = tmp_path / "file"
    if rank == 0:
        target.touch()
    sx.get_communicator().barrier()
    with (
        pytest.raises(sx.errors.NotFoundError, match="not a directory"),
        sx.gather_state({"w": torch.ones(3)}, workspace=target / "ws"),
    ):
        pass


def gathers_where_others_may_write(workspace: str) -> str:
    """Gather; the directory of root is opened to other users before anything is written there."""
    begin = gather_transport._FileTransport.begin

    def begin_and_open(transport: gather_transport._FileTransport, root: int) -> None:
        begin(transport, root)
        for path in Path(workspace).glob(".gather-*.partial"):
            path.chmod(0o777)

    gather_transport._FileTransport.begin = begin_and_open
    with pytest.raises(sx.errors.UnsafeError) as caught, sx.gather_state({"w": torch.ones(2)}, workspace=workspace):
        pass
    return str(caught.value)


def test_nothing_is_written_where_other_users_may_change_it(tmp_path: Path) -> None:
    for text in run_ranks(gathers_where_others_may_write, 2, backend="gloo", args=(str(tmp_path),)):
        assert "others may write in this directory" in text
    assert os.listdir(tmp_path) == []


def gathers_in_own_directory(workspace: str) -> str:
    comm = sx.get_communicator()
    own = Path(workspace, str(comm.rank))
    own.mkdir(parents=True)
    with pytest.raises(sx.errors.NotFoundError) as caught, sx.gather_state({"w": torch.ones(2)}, workspace=own):
        pass
    return str(caught.value)


def test_ranks_that_see_different_directories_get_an_error(tmp_path: Path) -> None:
    for text in run_ranks(gathers_in_own_directory, 2, args=(str(tmp_path),)):
        assert "pass the same shared directory, or URL, on all ranks" in text
        assert "rank 1" in text
        assert str(tmp_path / "1") in text
    assert [os.listdir(tmp_path / str(rank)) for rank in range(2)] == [[], []]


IN_MEMORY = """
import os, sys
import torch
import statexchange as sx
with sx.gather_state({"w": torch.ones(3)}, workspace="shm://gathered") as (state,):
    assert state["w"].tolist() == [1, 1, 1]
base = f"/dev/shm/statexchange-{os.getuid()}"
print(oct(os.stat(base).st_mode & 0o777), os.listdir(base))
os.chmod(base, 0o777)
try:
    with sx.gather_state({"w": torch.ones(3)}, workspace="shm://gathered"):
        pass
except sx.errors.UnsafeError as error:
    print("others may write" in error.message)
"""


def test_a_gather_on_tmpfs_is_private_and_leaves_nothing() -> None:
    """It uses a /dev/shm of its own: other tests use the directory of this user."""
    require_mounts()
    script = 'mount -t tmpfs t /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, IN_MEMORY], capture_output=True, text=True
    )
    assert done.stdout == "0o700 []\nTrue\n", done.stderr


def dies_in_block(how: str, workspace: str | None) -> str:
    comm = sx.get_communicator()
    try:
        with sx.gather_state({"w": torch.ones(1000)}, workspace=workspace):
            if comm.rank == 1:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.exit(3)
    except sx.errors.PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_rank_that_dies_in_the_block_is_named_by_the_others(how: str) -> None:
    with no_names_left():
        outcomes = run_ranks(dies_in_block, 3, backend="gloo", args=(how, None), allow_failure=True)
    assert outcomes[0].value is not None
    assert "rank 1" in outcomes[0].value
    assert "rank 1" in outcomes[2].value


def test_the_file_of_a_rank_that_dies_in_the_block_is_removed(tmp_path: Path) -> None:
    args = ("kill", str(tmp_path / "ws"))
    outcomes = run_ranks(dies_in_block, 3, backend="gloo", args=args, allow_failure=True)
    assert "rank 1" in outcomes[0].value
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def is_killed_as_root(workspace: str) -> None:
    comm = sx.get_communicator()
    with sx.gather_state({"w": torch.ones(1000)}, workspace=workspace):
        comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def gathers_through(workspace: str) -> list[float]:
    with sx.gather_state({"w": torch.ones(2)}, workspace=workspace) as states:
        return [float(state["w"].sum()) for state in states]


def test_files_of_a_job_whose_ranks_were_all_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    workspace = str(tmp_path / "ws")
    run_ranks(is_killed_as_root, 2, backend="gloo", args=(workspace,), allow_failure=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
    assert run_ranks(gathers_through, 2, backend="gloo", args=(workspace,))[0] == [2.0, 2.0]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def never_calls(timeout_s: float) -> list[int]:
    import torch.distributed as dist

    comm = sx.comm.from_process_group(dist.group.WORLD, timeout_s=timeout_s)
    if comm.rank == 1:
        time.sleep(1.5)
        return []
    with (
        pytest.raises(sx.errors.StallError, match="gather_state") as caught,
        sx.gather_state({"w": torch.ones(3)}, comm=comm),
    ):
        pass
    assert caught.value.missing == (1,)
    return list(caught.value.missing)


def test_a_rank_that_never_calls_is_named_at_the_deadline() -> None:
    assert run_ranks(never_calls, 3, backend="gloo", args=(0.5,))[::2] == [[1], [1]]


def gathers_many_times(seed: int) -> list[float]:
    rank = sx.get_communicator().rank
    found = []
    for i in range(20):
        with sx.get_tensors_parallel(torch.full((2000,), float(seed * 1000 + i * 10 + rank)), [0, 1]) as tensors:
            found += [float(t[0]) for t in tensors]
    return found


def test_two_jobs_at_once_on_one_host_do_not_interfere() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, gathers_many_times, 2, backend="gloo", args=(seed,)) for seed in (1, 2)]
        for seed, job in zip((1, 2), jobs, strict=True):
            assert job.result()[0] == [float(seed * 1000 + i * 10 + r) for i in range(20) for r in range(2)]


@pytest.mark.ranks(2, backend="threads")
def test_views_of_one_memory_that_differ_in_value_or_kind_are_separate_tensors() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    p = torch.nn.Parameter(torch.ones(2))
    state = {"z": z, "conj": z.conj(), "p": p, "data": p.detach()}
    with sx.gather_state(state) as states:
        for found in states:
            assert all(equal_bits(found[name], tensor) for name, tensor in state.items())
            assert type(found["data"]) is torch.Tensor


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_ranks_stay_synchronised_after_many_errors() -> None:
    comm = sx.get_communicator()
    tensor = torch.ones(10)
    for i in range(100):
        with pytest.raises((sx.errors.PeerError, ZeroDivisionError)), sx.gather_state({"w": tensor}, root=i % 2):
            if comm.rank == i % 2:
                raise ZeroDivisionError
        with sx.get_tensors_parallel(tensor, [0, 1]) as tensors:
            assert len(tensors) == (0 if comm.rank else 2)


@pytest.mark.ranks(2, backend="threads")
def test_tensors_without_plain_bytes_are_refused_on_every_rank() -> None:
    rank = sx.get_communicator().rank
    freed = torch.randn(1000)
    freed.untyped_storage().resize_(0)
    masked = np.ma.masked_array([1, 2], [0, 1])
    for bad, match in [(freed, "freed"), (masked, "mask"), (torch.empty(2, device="meta"), "meta")]:
        with (
            pytest.raises(sx.errors.UnsupportedError, match=match),
            sx.gather_state({"w": bad if rank else torch.ones(2)}),
        ):
            pass
    nothing = None if rank else torch.ones(1)
    with (
        pytest.raises(sx.errors.InvalidArgumentError, match="tensor must be"),
        sx.get_tensors_parallel(nothing, [0, 1]),
    ):
        pass


def starts_over(folder: str) -> list[list[int]]:
    """Destroy torch.distributed's group, and make one with the ranks swapped."""
    import torch.distributed as dist

    found = []
    for turn in range(2):
        rank = dist.get_rank()
        with sx.get_tensors_parallel(torch.tensor(rank), [0, 1]) as tensors:
            found.append([int(t) for t in tensors])
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store{turn}", 2)
        dist.init_process_group("gloo", store=store, rank=1 - rank, world_size=2)
    return found


def test_a_new_default_group_gets_new_members(tmp_path: Path) -> None:
    assert run_ranks(starts_over, 2, backend="gloo", args=(str(tmp_path),)) == [[[0, 1], []], [[], [0, 1]]]
