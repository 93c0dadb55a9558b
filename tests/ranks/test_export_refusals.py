"""An export that is refused or interrupted: one named error on all ranks, and the earlier target stays."""

import os
import platform
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from equality import assert_same
from exporting import check_refusal, part
from safetensors.torch import load_file
from starting import THREADS_AND_PROCESSES
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_rules_of_a_layout_file_apply_to_live_ranks(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    gate, up, down = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    q, k = gate.clone(), up[:2].clone()
    state = {
        "gate_up.weight": torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]),
        "qk.weight": torch.cat([q.chunk(2)[rank], k.chunk(2)[rank]]),
        "l.down.weight": down.chunk(2, 1)[rank],
        "l.down.bias": torch.ones(6),
    }
    rules = {
        "gate_up.*": {"dim": 0, "blocks": [1, 1]},
        "qk.*": {"dim": 0, "split": {"qk": {"q": 3, "k": 1}}},
        "l.down": "rowwise",
    }
    sx.export_checkpoint(state, tmp_path / "out", layout={"mesh": {"tp": 2}, "rules": rules})
    expected = {"gate_up.weight": torch.cat([gate, up]), "q.weight": q, "k.weight": k}
    expected |= {"l.down.weight": down, "l.down.bias": torch.ones(6)}
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected)
    check_refusal(
        ValueError, r"mesh \(tp 3\)", {"w": q}, tmp_path / "x", layout={"mesh": {"tp": 3}, "rules": {"w": "rowwise"}}
    )


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_every_refusal_names_its_reason_on_every_rank(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    out = tmp_path / "out"
    mine = torch.full((2, 2), float(rank))
    check_refusal(
        sx.errors.ReplicaError,
        r"\{\"w\": Shard\(0\)\}.*replicas=\"root\"",
        {"w": mine},
        out,
    )
    check_refusal(
        sx.errors.CorruptError,
        r"F32, .*F64.*'w', rank 1\b",
        {"w": mine if rank == 0 else mine.double()},
        out,
    )
    gap = {"w": {"global_shape": (5, 2), "offsets": (3 * rank, 0), "shape": (2, 2)}}
    check_refusal(sx.errors.IncompleteError, r"holds region \[2:3, 0:2\].*'w'", {"w": mine}, out, layout=gap)
    overlap = {"w": {"global_shape": (3, 2), "offsets": (rank, 0), "shape": (2, 2)}}
    check_refusal(
        sx.errors.OverlapError,
        r"\[1:2, 0:2\].*rank 0\b.*rank 1\b.*'w'",
        {"w": mine},
        out,
        layout=overlap,
    )
    check_refusal(ValueError, "layout pattern 'x'", {"w": mine}, out, layout={"x": {"dim": 0}})
    check_refusal(ValueError, "include pattern 'x'", {"w": mine}, out, include="x")
    check_refusal(sx.errors.UnsupportedError, r"complex128.*'w'", {"w": torch.ones(1, dtype=torch.complex128)}, out)
    check_refusal(ValueError, "'5 apples'", {"w": mine}, out, max_shard_size="5 apples")
    assert not out.exists()
    sx.export_checkpoint({"w": mine}, out, replicas="root")
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.zeros(2, 2))


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_an_existing_target_is_kept_without_overwrite(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    out = tmp_path / "out"
    sx.export_checkpoint({"w": torch.ones(2)}, out)
    check_refusal(sx.errors.TargetExistsError, "overwrite=True", {"w": torch.zeros(2)}, out)
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.ones(2))
    comm.barrier()
    sx.export_checkpoint({"v": torch.zeros(2)}, out, overwrite=True)
    assert list(load_file(out / "model.safetensors")) == ["v"]
    comm.barrier()
    if comm.rank == 0:
        (out / "notes.txt").write_text("mine")
    comm.barrier()
    check_refusal(sx.errors.UnsafeError, r"'notes\.txt'", {"w": torch.zeros(2)}, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.ranks(2, backend="gloo")
def test_an_exception_in_on_progress_is_raised_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    comm = sx.get_communicator()

    def progress(done: int, total: int) -> None:
        if comm.rank == 1 and done == total:
            raise ZeroDivisionError("oops")

    state = {f"w{i}.{comm.rank}": torch.ones(1000) for i in range(5)}
    check_refusal(
        sx.errors.PeerError,
        rf"rank 1 on {platform.node()} .*ZeroDivisionError: oops",
        state,
        tmp_path / "out",
        on_progress=progress,
    )


def dies_while_writing(out: str, rank: int) -> str:
    comm = sx.get_communicator()

    def progress(done: int, _total: int) -> None:
        if comm.rank == rank and done:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sx.export_checkpoint({f"w{i}.{comm.rank}": torch.ones(1000) for i in range(5)}, out, on_progress=progress)
    except sx.errors.PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_writing_leaves_the_old_target_and_the_next_run_is_clean(rank: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sx.export_checkpoint({"old": torch.ones(1)}, out)
    outcomes = run_ranks(dies_while_writing, 3, backend="gloo", args=(str(tmp_path / "new"), rank), allow_failure=True)
    for survivor in {0, 1, 2} - {rank}:
        assert f"rank {rank} on {platform.node()} failed" in outcomes[survivor].value
    assert not (tmp_path / "new").exists()
    assert list(load_file(out / "model.safetensors")) == ["old"]
    sx.export_checkpoint({"fresh": torch.ones(1)}, tmp_path / "new")
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["new", "out"]


def exports_to_a_full_disk(out: str) -> str:
    try:
        sx.export_checkpoint({"w": torch.ones(1 << 20)}, out)
    except sx.errors.StorageError as error:
        return f"{error.errno} {error}"
    return "no error"


@pytest.mark.usefixtures("mounts")
def test_a_full_disk_is_one_clear_error_on_all_ranks(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        for found in run_ranks(exports_to_a_full_disk, 2, backend="gloo", args=(str(tmp_path / "out"),)):
            assert found.startswith("28 ")
            assert "model.safetensors" in found
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# save_checkpoint


@pytest.mark.ranks(1, 3, backend=THREADS_AND_PROCESSES)
def test_save_checkpoint_keeps_the_sharding_and_can_be_merged(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    weight = part(comm.rank, comm.world_size, 7, 4, 0)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for step in range(2):
        saved = sx.save_checkpoint(
            {"model": model, "optimizer": optimizer, "own": {f"part{comm.rank}": weight}, "step": step},
            tmp_path / "ckpt",
            overwrite=step > 0,
        )
    names = [f"rank-{rank:05d}-of-{comm.world_size:05d}.safetensors" for rank in range(comm.world_size)]
    assert saved.rank_nbytes == tuple((tmp_path / "ckpt" / name).stat().st_size for name in names)
    assert (saved.path, saved.step, saved.nbytes) == (str(tmp_path / "ckpt"), None, sum(saved.rank_nbytes))
    assert saved.num_tensors == 9  # 2 of the model, 3 for each of them in the optimizer, and this rank's own
    comm.barrier()
    if comm.rank:
        return
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert sorted(os.listdir(tmp_path / "ckpt")) == [*names, "save.json"]
    report = sx.merge_checkpoint(
        tmp_path / "ckpt", tmp_path / "merged", include=["model.*", "own.*"], rename=[(r"^model\.", "")]
    )
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert report.num_tensors == 2 + comm.world_size
    assert torch.equal(merged["weight"], model.weight)
    assert torch.equal(merged["own.part0"], weight)


@pytest.mark.ranks(2, backend="threads")
def test_what_cannot_be_saved_is_named_and_the_last_save_stays(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "ckpt")
    comm.barrier()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(sx.errors.UnsupportedError, match=r"object.*JSON") as caught:
        sx.save_checkpoint({"w": torch.zeros(2), "x": object() if comm.rank else 1}, tmp_path / "ckpt", overwrite=True)
    assert caught.value.rank == 1
    comm.barrier()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
