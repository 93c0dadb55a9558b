"""NFSWorkspace: each rank writes and reads on its own; what is missing is an error, and earlier rounds stay."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stored import flip_bit

import statexchange as sx
from statexchange.storage.workspace import Workspace
from statexchange.testing import run_ranks


def test_what_a_rank_writes_any_process_reads(tmp_path: Path) -> None:
    workspace = sx.NFSWorkspace(tmp_path / "ws")
    assert workspace.is_initialized
    weights = {"w": torch.arange(6.0).reshape(2, 3).t(), "scale": torch.tensor(2.5, dtype=torch.bfloat16)}
    workspace.write_configs_and_weights({"layers": [1, (2, None)], 3: float("inf")}, weights)
    config, read = sx.NFSWorkspace(tmp_path / "ws").read_configs_and_weights_from_rank(0)
    assert config == {"layers": [1, (2, None)], 3: float("inf")}
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_workspace_without_a_path_is_not_initialized() -> None:
    workspace = sx.NFSWorkspace(None)
    assert not workspace.is_initialized
    with pytest.raises(ValueError, match="not initialized"):
        workspace.write_configs_and_weights({}, {})
    with pytest.raises(ValueError, match="not initialized"):
        workspace.read_configs_and_weights_from_rank(0)


def test_none_is_a_value_and_not_a_missing_file(tmp_path: Path) -> None:
    workspace = sx.NFSWorkspace(tmp_path / "ws")
    with pytest.raises(sx.errors.NotFoundError, match=r"rank 5.*ws"):
        workspace.read_configs_and_weights_from_rank(5)
    workspace.write_configs_and_weights(None, {})
    assert workspace.read_configs_and_weights_from_rank(0) == (None, {})
    with pytest.raises(FileNotFoundError, match="rank 1"):
        workspace.read_configs_and_weights_from_rank(1)


def test_rounds_are_counted_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    workspace = sx.NFSWorkspace(tmp_path / "ws")
    for number in range(1, 6):
        workspace.write_configs_and_weights(number, {})
        assert workspace.read_configs_and_weights_from_rank(0)[0] == number
    assert workspace.read_configs_and_weights_from_rank(0, round=4)[0] == 4
    with pytest.raises(sx.errors.NotFoundError, match="round 3"):
        workspace.read_configs_and_weights_from_rank(0, round=3)
    assert len(list((tmp_path / "ws").rglob("*.safetensors"))) == 2


def test_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        sx.NFSWorkspace(tmp_path / "ws").write_configs_and_weights({}, {"w": torch.ones(1)})
    finally:
        os.umask(old)
    for path in (tmp_path / "ws").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_with_several_runs_a_run_must_be_chosen(tmp_path: Path) -> None:
    for run in ("one", "two"):
        sx.NFSWorkspace(tmp_path / "ws", run=run).write_configs_and_weights(run, {})
    with pytest.raises(ValueError, match=r"one, two.*run="):
        sx.NFSWorkspace(tmp_path / "ws").read_configs_and_weights_from_rank(0)
    assert sx.NFSWorkspace(tmp_path / "ws", run="two").read_configs_and_weights_from_rank(0)[0] == "two"


def writes_late(path: str) -> list[object]:
    comm = sx.get_communicator()
    workspace = sx.NFSWorkspace(path)
    if comm.rank == 1:
        time.sleep(0.5)
    workspace.write_configs_and_weights({"rank": comm.rank}, {"w": torch.full((comm.rank,), 1.0)})
    if comm.rank:
        comm.barrier()
        return []
    found = [workspace.read_configs_and_weights_from_rank(r, timeout_s=10) for r in range(3)]
    comm.barrier()
    return [[config, len(weights["w"])] for config, weights in found]


def test_a_reader_waits_for_a_rank_that_is_late(tmp_path: Path) -> None:
    found = run_ranks(writes_late, 3, backend="gloo", args=(str(tmp_path / "ws"),))[0]
    assert found == [[{"rank": r}, r] for r in range(3)]


def test_a_read_that_does_not_wait_says_how_to_wait(tmp_path: Path) -> None:
    workspace = sx.NFSWorkspace(tmp_path / "ws", run="job")
    workspace.write_configs_and_weights({}, {})
    with pytest.raises(sx.errors.NotFoundError, match="longer by timeout_s="):
        workspace.read_configs_and_weights_from_rank(1)


def has_no_identity(path: str) -> None:
    with pytest.raises(ValueError, match="no id") as caught:
        sx.NFSWorkspace(path).write_configs_and_weights({}, {})
    assert "run=, which must be the same on all ranks and new for each job" in str(caught.value)
    sx.NFSWorkspace(path, run="mine").write_configs_and_weights({}, {})


def test_a_launcher_without_an_identity_is_not_trusted(tmp_path: Path) -> None:
    run_ranks(has_no_identity, 2, backend="processes", args=(str(tmp_path / "ws"),))
    assert len(list((tmp_path / "ws/mine").rglob("*.safetensors"))) == 2


def shares_a_run(path: str, job: int) -> list[object]:
    """Write and read under a run that an earlier job has used, too; rank 1 of the second job writes last."""
    comm = sx.get_communicator()
    workspace = sx.NFSWorkspace(path, run="experiment")
    if comm.rank != 1:
        workspace.write_configs_and_weights([job, comm.rank], {})
    comm.barrier()
    found: list[object] = []
    if comm.rank == 0:
        for rank, number in ((1, None), (1, 1), (2, None)):
            try:
                found.append(workspace.read_configs_and_weights_from_rank(rank, round=number)[0])
            except sx.errors.NotFoundError as error:
                found.append(str(error).partition(":")[0])
    comm.barrier()
    if comm.rank == 1:
        workspace.write_configs_and_weights([job, comm.rank], {})
    comm.barrier()
    return [*found, workspace.read_configs_and_weights_from_rank(1)[0]]


def test_a_file_of_an_earlier_job_with_the_same_run_is_not_taken(tmp_path: Path) -> None:
    """In the second job the newest file of rank 1 is older than the reader's process, whose own file is newer."""
    absent = "rank 1 has written no file in {} within 0 s"
    earlier = "the newest file of rank 1 was written before this process began, and this rank's since"
    arguments = {"backend": "gloo", "timeout_s": 60.0}
    first = run_ranks(shares_a_run, 3, args=(str(tmp_path / "ws"), 1), **arguments)[0]
    assert first == [absent.format("any round"), absent.format("round 1"), [1, 2], [1, 1]]
    time.sleep(0.1)
    second = run_ranks(shares_a_run, 3, args=(str(tmp_path / "ws"), 2), **arguments)[0]
    assert second == [earlier, [1, 1], [2, 2], [2, 1]]


def exchanges_in_torchs_group(path: str, job: int) -> list[object]:
    """Write and read in a job that has called `init_process_group` and nothing else."""
    assert dist.is_initialized()
    assert not sx.is_initialized()
    rank = dist.get_rank()
    workspace = sx.NFSWorkspace(path)
    workspace.write_configs_and_weights([job, rank], {})
    dist.barrier()
    # Another instance, as a reader makes it, finds the run of this job among those in the directory.
    configs = [sx.NFSWorkspace(path).read_configs_and_weights_from_rank(r)[0] for r in range(3)]
    dist.barrier()
    return configs


def test_the_ranks_of_torchs_default_group_share_a_run_that_no_other_job_has(tmp_path: Path) -> None:
    for job in (1, 2):
        found = run_ranks(exchanges_in_torchs_group, 3, backend="gloo", args=(str(tmp_path / "ws"), job))
        assert found == [[[job, rank] for rank in range(3)]] * 3
    assert len(list((tmp_path / "ws").iterdir())) == 2


def test_an_altered_file_is_an_error_that_names_tensor_rank_and_file(tmp_path: Path) -> None:
    sx.NFSWorkspace(tmp_path / "ws").write_configs_and_weights({}, {"layer.w": torch.ones(100)})
    (file,) = (tmp_path / "ws").rglob("*.safetensors")
    flip_bit(file, -3)
    with pytest.raises(sx.errors.CorruptError, match=rf"digest.*{file.name}") as caught:
        sx.NFSWorkspace(tmp_path / "ws").read_configs_and_weights_from_rank(0)
    assert (caught.value.name, caught.value.rank) == ("layer.w", 0)
    os.truncate(file, file.stat().st_size - 50)
    with pytest.raises(sx.errors.CorruptError, match=rf"truncated.*{file.name}"):
        sx.NFSWorkspace(tmp_path / "ws").read_configs_and_weights_from_rank(0)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for number, config in enumerate(["{", '{"$":"nothing"}', "[" * 5000, '{"a":1,"a":2}', "[[],[" * 3_000_000], 1):
        Workspace(tmp_path / "ws").write([], run="job", round=number, rank=0, world_size=1, config=config)
        with pytest.raises(sx.errors.CorruptError, match=rf"{number:06d}"):
            sx.NFSWorkspace(tmp_path / "ws").read_configs_and_weights_from_rank(0)
        with pytest.raises(sx.errors.CorruptError, match="ws"):
            sx.load_checkpoint({"a": 1}, tmp_path / "ws")


def test_a_saved_state_is_not_taken_for_a_config(tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "saved")
    with pytest.raises(sx.errors.InvalidArgumentError, match="load_checkpoint"):
        sx.NFSWorkspace(tmp_path / "saved").read_configs_and_weights_from_rank(0)
