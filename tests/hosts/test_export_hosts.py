"""Export from ranks on two hosts: into a directory that both hosts see, and into one that only root's host sees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_stores import use_object_stores
from equality import assert_same, load_directory
from safetensors.torch import load_file
from sweeps import slow
from two_hosts import report, two_hosts

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.storage.publish import object_build


def whole() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(700_000.0).reshape(7000, 100),
        "columns": torch.arange(12 * 50_000.0).to(torch.bfloat16).reshape(12, 50_000),
        "same": torch.arange(5),
        "scalar": torch.tensor(2.5),
    }


def parts(rank: int, world_size: int) -> dict[str, Any]:
    """Return the tensors that a rank holds; the last rank also has a tensor of its own."""
    full = whole()
    rows = torch.tensor_split(full["rows"], world_size)[rank]
    columns = torch.tensor_split(full["columns"], world_size, 1)[rank]
    own = {"only.last": torch.full((3, 3), 7, dtype=torch.int8)} if rank == world_size - 1 else {}
    return {**full, "rows": rows, "columns": columns, **own}


LAYOUT = {"rows": {"dim": 0}, "columns": {"dim": 1}}


def exports(out: str, options: dict[str, Any]) -> Any:
    """Export; return whether this rank sees the directory, its files and their sizes, and numbers of the report."""
    comm = sx.init("auto", timeout_s=20.0)
    state = parts(comm.rank, comm.world_size)
    sees = os.path.isdir(os.path.dirname(out))
    found = sx.export_checkpoint(state, out, layout=LAYOUT, **options)
    files = {}
    if os.path.isdir(out):
        files = {p.name: p.stat().st_size for p in sorted(Path(out).iterdir())}
        if comm.rank == 0:
            check(out)
    sx.shutdown()
    return [sees, files, list(found.rank_nbytes), found.num_tensors]


def check(out: str) -> None:
    """Check that a directory has the whole tensors and is intact."""
    assert_same(load_directory(out), {**whole(), "only.last": torch.full((3, 3), 7, dtype=torch.int8)})
    assert not verify(out).findings


@pytest.mark.parametrize("counts", [slow((2, 2)), slow((1, 2)), slow((2, 1))], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 1_500_000}], ids=["one file", "several"])
def test_export_to_a_directory_that_both_hosts_see(
    counts: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    with two_hosts(*counts, fully=True) as hosts:
        found = hosts.run(exports, str(tmp_path / "out"), options)
    assert all(one == found[0] for one in found)
    assert found[0][0]
    assert len(found[0][1]) == (4 if options else 2)


@pytest.mark.parametrize("counts", [slow((2, 2)), (1, 2)], ids=str)
@pytest.mark.parametrize("options", [slow({}), {"max_shard_size": 1_500_000}], ids=["one file", "several"])
def test_export_to_a_directory_that_only_roots_host_sees(counts: tuple[int, int], options: dict[str, Any]) -> None:
    with two_hosts(*counts, fully=True) as hosts:
        found = hosts.run(exports, "/dev/shm/below/out", options)
    for rank, (_, files, _, tensors) in enumerate(found):
        assert bool(files) == (rank < counts[0])
        assert tensors == 5


def exports_and_publishes(folder: str) -> Any:
    """Export to an object store, and publish versions there; return the files that this rank has uploaded."""
    use_object_stores()
    comm = sx.init("auto", timeout_s=20.0)
    uploaded = []
    upload = object_build.ObjectMember.upload

    def recorded(self: Any, name: str, *rest: Any) -> str:
        uploaded.append(name)
        return upload(self, name, *rest)

    object_build.ObjectMember.upload = recorded  # type: ignore[method-assign]
    state = parts(comm.rank, comm.world_size)
    sx.export_checkpoint(state, f"disk://{folder}/out", layout=LAYOUT, max_shard_size=500_000)
    if comm.rank == 0:
        check(f"{folder}/out")  # the directory in which this store has its objects
    with sx.Publisher(f"disk://{folder}/updates", layout=LAYOUT) as publisher:
        for number in (1, 2):
            state["same"][0] = number
            kind = publisher.publish(state, number).kind
    subscriber = sx.Subscriber(f"disk://{folder}/updates", cache="/dev/shm/cache")
    with subscriber.stage(subscriber.wait()) as staged:
        staged.load_into(state, layout=LAYOUT)
    sx.shutdown()
    return [kind, int(state["same"][0]), len(uploaded)]


def test_each_host_uploads_what_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/dev/shm")  # which a host does not share with the other
    with two_hosts(1, 2, fully=True) as hosts:
        found = hosts.run(exports_and_publishes, str(tmp_path))
    assert [one[:2] for one in found] == [["delta", 2]] * 3
    assert found[0][2], "the first host uploads"
    assert found[1][2] + found[2][2], "the second host uploads"


def reduces_and_renumbers(out: str) -> dict[str, list[float]]:
    comm = sx.init("auto", timeout_s=20.0)
    state = {"scale": torch.tensor([1.0, -1.0]) * comm.rank, "experts.0.w": torch.full((2,), float(comm.rank))}
    layout = {"scale": {"reduce": "max"}, "experts.*": {"renumber": "experts"}}
    sx.export_checkpoint(state, out, layout=layout)
    found = load_file(f"{out}/model.safetensors") if comm.rank == 0 else {}
    sx.shutdown()
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.slow
def test_copies_on_several_hosts_are_reduced_and_experts_renumbered() -> None:
    with two_hosts(2, 2, fully=True) as hosts:
        found = hosts.run(reduces_and_renumbers, "/dev/shm/below/out")
    assert found[0] == {"scale": [3, 0], **{f"experts.{rank}.w": [rank, rank] for rank in range(4)}}


def fails(out: str, how: str) -> Any:
    comm = sx.init("auto", timeout_s=5.0)
    state = parts(comm.rank, comm.world_size)

    def fail(done: int, total: int) -> None:
        if comm.rank == comm.world_size - 1:
            raise KeyError("lost")

    if how == "exists" and comm.rank == 0:
        os.makedirs(out)
    options: dict[str, Any] = {"on_progress": fail} if how == "raises" else {}
    with pytest.raises((sx.errors.PeerError, sx.errors.TargetExistsError)) as caught:
        sx.export_checkpoint(state, out, layout=LAYOUT, **options)
    report("failed")
    folder = os.path.dirname(out)  # made by the export that failed, and removed again
    left = os.listdir(folder) if comm.rank == 0 and os.path.exists(folder) else []
    return [str(caught.value), [name for name in left if "partial" in name]]


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "rank 3 on bert failed in export_checkpoint (writing): KeyError: 'lost'"), slow("exists", "exists")],
)
def test_a_failure_on_one_host_is_raised_on_both(how: str, message: str) -> None:
    with two_hosts(2, 2, fully=True) as hosts:
        for text, left in hosts.run(fails, "/dev/shm/below/out", how):
            assert message in text
            assert not left
