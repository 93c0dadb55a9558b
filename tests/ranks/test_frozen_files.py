"""Parameters that do not train: files of their own in the saves of a job, which the next save links."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import adapter_of, load_adapters, save_adapters
from forked_jobs import ForkedJobs
from frozen_parameters import ADAPTER_JOBS, FROZEN, set_base
from sweeps import slow, some
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import statexchange as sx
from statexchange.checkpoint.prune import prune_saves
from statexchange.errors import PeerError
from statexchange.report.saves import list_saves
from statexchange.report.verify import verify, verify_saves
from statexchange.storage.steps import Retention
from statexchange.testing import run_ranks


def frozen_files(path: Path) -> dict[str, list[int]]:
    """Return the inodes of the files of frozen parameters by name, one for each save."""
    found: dict[str, list[int]] = {}
    for file in sorted(path.rglob("*.frozen-*")):
        found.setdefault(file.name, []).append(file.stat().st_ino)
    return found


def saved_bytes(path: Path) -> int:
    """Return what the saves take on a disk."""
    sizes = {}
    for file in path.rglob("*.safetensors"):
        sizes[file.stat().st_ino] = file.stat().st_size
    return sum(sizes.values())


@pytest.mark.parametrize("background", [False, True])
def test_the_next_save_links_what_does_not_train(background: bool, tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, keep=None)

    def save(step: int) -> Any:
        report = saves.save(adapter_of(step), step, background=background)
        return report.result(30) if background else report

    reports = [save(step) for step in (10, 20, 30)]
    ((first, second, third),) = frozen_files(tmp_path).values()
    assert first == second == third
    base = tmp_path / "step-000000010" / FROZEN
    assert [report.linked_nbytes for report in reports] == [0, base.stat().st_size, base.stat().st_size]
    assert reports[0].nbytes == reports[1].nbytes + base.stat().st_size
    assert "linked" in str(reports[1])
    assert load_adapters(str(tmp_path)) == 30
    assert all(report.findings == () for _, report in verify_saves(tmp_path))
    assert list_saves(tmp_path).nbytes == saved_bytes(tmp_path)


def save_with_a_change(path: str, background: bool) -> list[int]:
    """Save with an equal base, with another one on rank 1, and with an equal one; load each. Return linked bytes."""
    saves = sx.Checkpoints(path, keep=None)
    linked = []
    for step in (10, 20, 30):
        state = adapter_of(step)
        if step == 20 and sx.get_rank() == 1:
            set_base(state, 7.0)
        report = saves.save(state, step, background=background)
        linked.append((report.result(60) if background else report).linked_nbytes)
        loaded = adapter_of(0)
        set_base(loaded, -1.0)
        saves.load(loaded, step)
        for name, tensor in state["model"].state_dict().items():
            assert torch.equal(tensor, loaded["model"].state_dict()[name]), (step, name)
    return linked


@pytest.mark.parametrize("background", [False, True])
def test_a_frozen_tensor_that_changes_is_written_and_comes_back_to_its_rank(background: bool, tmp_path: Path) -> None:
    linked = run_ranks(save_with_a_change, 3, args=(str(tmp_path / "saves"), background))
    assert linked[0] == linked[1] == linked[2]
    assert run_ranks(load_adapters, 2, args=(str(tmp_path / "saves"),)) == [30, 30]


def test_a_restarted_job_links_files_of_the_newest_save_that_it_has_read(tmp_path: Path) -> None:
    save_adapters(str(tmp_path), 10)
    assert sx.Checkpoints(tmp_path).save(adapter_of(20), 20).linked_nbytes > 0
    ((first, second),) = frozen_files(tmp_path).values()
    assert first == second


def save_alone_and_together(path: str) -> list[Any]:
    """Save on rank 0 alone, then on both ranks by the same Checkpoints; return its steps and what a load finds."""
    comm = sx.get_communicator()
    alone = comm.new_group([comm.rank])
    saves = sx.Checkpoints(f"{path}/{comm.rank}", comm=alone)
    saves.save(adapter_of(10), 10)
    comm.barrier()
    saves._comm, saves._saves = comm, sx.Checkpoints(f"{path}/0")._saves
    saves.save(adapter_of(20), 20)
    return [saves.steps(), load_adapters(f"{path}/0")]


def test_another_number_of_ranks_does_not_link_the_files_of_the_first(tmp_path: Path) -> None:
    assert run_ranks(save_alone_and_together, 2, args=(str(tmp_path),)) == [[[10, 20], 20]] * 2


def flip_last_byte(path: Path) -> None:
    """Change a tensor's byte, as a broken disk would: size and modification time stay."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_damaged_file_is_not_linked_by_a_restarted_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_adapters(str(tmp_path), 10)
    flip_last_byte(tmp_path / "step-000000010" / FROZEN)
    with caplog.at_level(logging.WARNING, "statexchange"):
        assert sx.Checkpoints(tmp_path).save(adapter_of(20), 20).linked_nbytes == 0
    assert "step-000000010" in caplog.text
    assert "written again" in caplog.text
    assert verify(tmp_path / "step-000000020").findings == ()
    assert load_adapters(str(tmp_path)) == 20


def test_a_file_that_was_changed_after_it_was_written_is_not_linked(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    saves.save(adapter_of(10), 10)
    os.utime(tmp_path / "step-000000010" / FROZEN)
    assert saves.save(adapter_of(20), 20).linked_nbytes == 0


def test_a_damaged_file_is_named_for_each_save_that_has_it(tmp_path: Path) -> None:
    save_adapters(str(tmp_path), 10, 20)
    flip_last_byte(tmp_path / "step-000000010" / FROZEN)
    for keys, report in verify_saves(tmp_path):
        (finding,) = report.findings
        assert (finding.name, finding.rank) == ("model.base.weight", 0)
        assert f"step-{keys['step']:09d}/{FROZEN}" in str(finding)
    with pytest.raises(sx.errors.CorruptError, match=r"model\.base"):
        sx.Checkpoints(tmp_path).load(adapter_of(0))


def test_retention_delete_and_prune_leave_the_files_of_other_saves(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30):
        saves.save(adapter_of(step), step)
    assert saves.steps() == [20, 30]
    report = prune_saves(tmp_path, Retention(keep=1))
    removed, kept = report.rows
    assert (removed.action, kept.action) == ("removed", "kept")
    assert kept.nbytes == saved_bytes(tmp_path)
    assert removed.nbytes < kept.nbytes
    saves.save(adapter_of(40), 40)
    saves.delete(30)
    assert load_adapters(str(tmp_path)) == 40


@pytest.mark.parametrize("options", [{"link": False}, {"memory": True}], ids=str)
def test_without_links_each_save_is_written_whole(options: dict[str, Any], tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, **options)
    reports = [saves.save(adapter_of(step), step) for step in (10, 20)]
    assert [report.linked_nbytes for report in reports] == [0, 0]
    assert frozen_files(tmp_path) == {}
    if "memory" in options:
        saves.delete(10)
        saves.delete(20)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT])
def test_where_no_link_can_be_made_the_file_is_written(code: int, tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    saves.save(adapter_of(10), 10)
    is_due = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal is_due
        if is_due and event == "statexchange.storage" and args[0] == "link" and args[1].endswith(FROZEN):
            is_due = False  # the file that is written then is linked to its name, too
            raise OSError(code, os.strerror(code))

    sys.addaudithook(hook)
    assert saves.save(adapter_of(20), 20).linked_nbytes == 0
    assert not is_due
    assert load_adapters(str(tmp_path)) == 20


def test_a_save_whose_file_of_frozen_parameters_is_gone_is_broken(tmp_path: Path) -> None:
    save_adapters(str(tmp_path), 10, 20)
    (tmp_path / "step-000000020" / FROZEN).unlink()
    (broken,) = [row for row in list_saves(tmp_path).saves if row.problems]
    assert (broken.step, broken.state) == (20, "rank 0 lacks a file")
    with pytest.raises(sx.errors.StateExchangeError, match=FROZEN):
        sx.Checkpoints(tmp_path).load(adapter_of(0))
    assert sx.Checkpoints(tmp_path).save(adapter_of(30), 30).step == 30


def test_a_link_that_leads_nowhere_is_a_missing_file(tmp_path: Path) -> None:
    save_adapters(str(tmp_path), 10)
    file = tmp_path / "step-000000010" / FROZEN
    file.unlink()
    file.symlink_to(tmp_path / "absent")
    (row,) = list_saves(tmp_path).saves
    assert (row.step, row.state) == (10, "rank 0 lacks a file")


def test_after_a_load_damage_is_found_and_the_file_written_again(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    saves.save(adapter_of(10), 10)
    flip_last_byte(tmp_path / "step-000000010" / FROZEN)
    with pytest.raises(sx.errors.CorruptError):
        saves.load(adapter_of(0))
    saves.save(adapter_of(20), 20)
    assert load_adapters(str(tmp_path)) == 20


def test_a_job_that_goes_back_to_an_older_step_links_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_adapters(str(tmp_path), 10, 20)
    saves = sx.Checkpoints(tmp_path)
    saves.load(adapter_of(0), 10)
    saves.delete(20)
    with caplog.at_level(logging.WARNING, "statexchange"):
        assert saves.save(adapter_of(11), 11).linked_nbytes > 0
    assert caplog.text == ""


def test_a_module_with_an_attribute_called_module_is_linked_too(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.module = torch.nn.Linear(8, 8).requires_grad_(requires_grad=False)
    model.head = torch.nn.Linear(8, 2)
    saves = sx.Checkpoints(tmp_path)
    assert [saves.save({"model": model}, step).linked_nbytes > 0 for step in (1, 2)] == [False, True]


def save_with_growing_rest(path: str) -> list[int]:
    """Save frozen parameters beside other tensors that grow; return the bytes that were linked."""
    model = torch.nn.ModuleList([torch.nn.Linear(n, 4).requires_grad_(requires_grad=False) for n in range(2, 8)])
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number)
    saves = sx.Checkpoints(path)
    linked = []
    for step in range(3):
        state = {"model": model, "rest": [torch.zeros(7 * i * step + 1) for i in range(step + 2)]}
        linked.append(saves.save(state, step).linked_nbytes)
    return linked


def test_who_writes_frozen_parameters_does_not_depend_on_other_tensors(tmp_path: Path) -> None:
    (first, second, third), _, _ = run_ranks(save_with_growing_rest, 3, args=(str(tmp_path),))
    assert first == 0
    assert second == third > 0
    assert {len(set(inodes)) for inodes in frozen_files(tmp_path).values()} == {1}


def save_with_ranks_that_differ(path: str) -> str:
    """Save with parameters that are frozen on one rank alone, then with links on one rank alone."""
    rank = sx.get_rank()
    state = adapter_of(10)
    state["model"]["base"].requires_grad_(rank == 1)
    saves = sx.Checkpoints(path)
    saves.save(state, 10)
    saves.save(state, 20)
    set_zero(state)
    saves.load(state)
    assert torch.equal(state["model"]["base"].weight, adapter_of(10)["model"]["base"].weight)
    try:
        sx.Checkpoints(path, link=rank == 0).save(state, 30)
    except sx.StateExchangeError as error:
        return str(error)
    return ""


def test_ranks_may_differ_in_what_trains_and_not_in_link(tmp_path: Path) -> None:
    for message in run_ranks(save_with_ranks_that_differ, 2, args=(str(tmp_path),)):
        assert "link is True on rank 0 and False on rank 1" in message


def test_a_file_of_frozen_parameters_alone_is_no_save(tmp_path: Path) -> None:
    save_adapters(str(tmp_path), 10)
    with pytest.raises(sx.errors.IncompleteError, match="give the directory"):
        sx.load_checkpoint(adapter_of(0), tmp_path / "step-000000010" / FROZEN)


def save_two(path: str) -> None:
    """Save a state with two modules that do not train, of which one changes, and with tied parameters."""
    saves = sx.Checkpoints(path, keep=None)
    for step in (10, 20):
        model = torch.nn.ModuleDict({"head": torch.nn.Linear(8, 8), "embedding": torch.nn.Embedding(8, 8)})
        torch.manual_seed(1)
        torch.nn.init.normal_(model["embedding"].weight)
        model["head"].weight = model["embedding"].weight
        model["embedding"].weight.requires_grad_(requires_grad=False)
        target = torch.nn.Linear(4, 4)
        target.requires_grad_(requires_grad=False)
        with torch.no_grad():
            target.weight.fill_(step)
        saves.save({"model": model, "target": target}, step)


def test_each_first_key_of_the_state_has_a_file_of_its_own(tmp_path: Path) -> None:
    save_two(str(tmp_path / "saves"))
    model, target = frozen_files(tmp_path / "saves").values()
    assert model[0] == model[1]
    assert target[0] != target[1]
    sx.merge_checkpoint(tmp_path / "saves" / "step-000000020", tmp_path / "merged", section="all")
    loaded = {"model": torch.nn.ModuleDict({"head": torch.nn.Linear(8, 8), "embedding": torch.nn.Embedding(8, 8)})}
    loaded["model"]["head"].weight = loaded["model"]["embedding"].weight
    sx.load_checkpoint(loaded, tmp_path / "saves" / "step-000000020", strict=False)
    with sx.open_checkpoint(tmp_path / "merged") as merged:
        assert sorted(name for name in merged if "model" in name) == ["model.head.bias", "model.head.weight"]
        assert torch.equal(merged["model.head.weight"].read(framework="pt"), loaded["model"]["head"].weight)
        assert merged["target.weight"].read(framework="pt")[0, 0] == 20


def test_a_damaged_file_of_an_earlier_job_leaves_the_others_linked(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = {name: torch.nn.Linear(4, 4).requires_grad_(requires_grad=False) for name in ("first", "second")}
    sx.Checkpoints(tmp_path).save(state, 10)
    damaged = min((tmp_path / "step-000000010").glob("*.frozen-*"))
    flip_last_byte(damaged)
    sx.Checkpoints(tmp_path).save(state, 20)
    inodes = frozen_files(tmp_path)
    assert [len(set(of_file)) for of_file in inodes.values()] == [2, 1]
    assert verify(tmp_path / "step-000000020").findings == ()


def test_a_module_as_the_state_has_one_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model.requires_grad_(requires_grad=False)
    model[2].requires_grad_()
    saves = sx.Checkpoints(tmp_path)
    saves.save(model, 10)
    again = sx.Checkpoints(tmp_path)
    assert again.save(model, 20).linked_nbytes > 0
    assert list(frozen_files(tmp_path)) == [FROZEN]


def shard_and_save(path: str) -> list[int]:
    """Save a model sharded by FSDP2 whose base does not train, twice; load it. Return the linked bytes."""
    mesh = init_device_mesh("cpu", (2,))
    state = adapter_of(10)
    for part in state["model"].values():
        fully_shard(part, mesh=mesh)
    saves = sx.Checkpoints(path)
    linked = [saves.save(state, step).linked_nbytes for step in (10, 20)]
    whole = state["model"]["base"].weight.full_tensor()
    set_zero(state)
    saves.load(state)
    assert torch.equal(state["model"]["base"].weight.full_tensor(), whole)
    return linked


def set_zero(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()


def test_shards_that_do_not_train_are_linked_by_each_rank(tmp_path: Path) -> None:
    for linked in run_ranks(shard_and_save, 2, backend="gloo", args=(str(tmp_path),)):
        assert linked[0] == 0
        assert linked[1] > 48 * 32 * 4
    assert len(frozen_files(tmp_path)) == 2
    assert run_ranks(load_adapters, 3, args=(str(tmp_path),)) == [10] * 3


JOBS = ADAPTER_JOBS


@pytest.mark.parametrize("every", [60, slow(1)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_call_of_a_save_with_links_goes_on_from_a_whole_save(
    every: int, jobs: ForkedJobs, sweep_path: Path
) -> None:
    jobs.run(str(sweep_path / "before"), [10, 20, 30])
    traces = [shutil.copytree(sweep_path / "before", sweep_path / name) for name in ("trace", "trace 2", "trace 3")]
    calls = jobs.fewest_calls(*((str(trace), [40]) for trace in traces))  # saves, and removes step 10
    print(f"killed at {len(calls)} calls")
    for number in some(range(1, len(calls) + 1), every):
        path = sweep_path / str(number)
        shutil.copytree(sweep_path / "before", path)
        if jobs.run(str(path), [40], kill_at=number) is not None:  # the ranks made fewer calls than those counted
            assert number > len(calls) - 10, number
        assert run_ranks(load_adapters, 3, args=(str(path),)) in ([30] * 3, [40] * 3), number
        resumed = run_ranks(load_adapters, 1, args=(str(path),))[0]
        steps = run_ranks(save_adapters, 2, args=(str(path), resumed + 10))[0]  # with no clean-up by hand
        assert steps == [resumed - 10, resumed, resumed + 10], number
        assert sorted(os.listdir(path)) == [f"step-{step:09d}" for step in steps], number
        assert all(report.findings == () for _, report in verify_saves(path)), number


def test_the_failure_of_another_rank_is_no_reason_to_write_a_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise PeerError(1, "saving", "its disk is full")

    save_adapters(str(tmp_path), 10)
    monkeypatch.setattr("statexchange.formats.source.SourceTensor.read_digest", fail)
    with caplog.at_level(logging.WARNING, "statexchange"), pytest.raises(PeerError):
        sx.Checkpoints(tmp_path).save(adapter_of(20), 20)
    assert "written again" not in caplog.text
