"""Exports to object stores: the bytes of a directory, what failures and kills leave, and who uploads what."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from disk_stores import names_at, uploads_in, use_object_stores
from equality import assert_same
from forked_jobs import ForkedJobs
from safetensors.torch import load_file
from starting import launched_communicator
from sweeps import slow, some, steps

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.storage.publish import object_build
from statexchange.testing import run_ranks

LAYOUT = {"rows": {"dim": 0}, "columns": {"dim": 1}}


def whole() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(70_000.0).reshape(700, 100),
        "columns": torch.arange(12 * 5000.0).to(torch.bfloat16).reshape(12, 5000),
        "same": torch.arange(5),
        "scalar": torch.tensor(2.5),
    }


def parts(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    state = whole()
    rows = torch.tensor_split(state["rows"], world_size)[rank]
    columns = torch.tensor_split(state["columns"], world_size, 1)[rank]
    return {**state, "rows": rows, "columns": columns}


def read(url: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint that is whole."""
    live = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    sx.load_checkpoint(live, url)
    assert verify(url).findings == ()
    return live


def test_an_export_at_a_url_has_the_files_of_one_in_a_directory(store: Any, tmp_path: Path) -> None:
    options: Any = {"max_shard_size": 200_000, "files_from": {"config.json": '{"a": 1}'}}
    local = sx.export_checkpoint(whole(), tmp_path / "out", **options)
    report = sx.export_checkpoint(whole(), "memory://bucket/out", **options)
    assert (report.path, report.files, report.nbytes) == ("memory://bucket/out", local.files, local.nbytes)
    assert names_at("memory://bucket/out") == sorted(name for name, _ in local.files)
    for name, _ in local.files:
        assert store.cat_file(f"/bucket/out/{name}") == (tmp_path / "out" / name).read_bytes()


def test_only_a_checkpoint_of_ours_is_replaced(store: Any) -> None:
    sx.export_checkpoint({"w": torch.ones(2)}, "memory://out")
    with pytest.raises(sx.errors.TargetExistsError, match="overwrite=True"):
        sx.export_checkpoint({"w": torch.zeros(2)}, "memory://out")
    sx.export_checkpoint({"v": torch.zeros(2)}, "memory://out", overwrite=True)
    assert list(sx.open_checkpoint("memory://out")) == ["v"]
    store.pipe_file("/out/notes.txt", b"mine")
    with pytest.raises(sx.errors.UnsafeError, match=r"notes\.txt"):
        sx.export_checkpoint({"w": torch.zeros(2)}, "memory://out", overwrite=True)


def exports(backend: str, url: str, options: dict[str, Any], scratch: str) -> list[str]:
    """Export this rank's part; return what is left in the temporary directory."""
    os.environ["TMPDIR"] = scratch
    comm = launched_communicator(backend)
    sx.export_checkpoint(parts(comm.rank, comm.world_size), url, layout=LAYOUT, **options)
    return os.listdir(scratch)


@pytest.mark.parametrize(
    ("ranks", "backend", "options"),
    [
        (2, "gloo", {"max_shard_size": 100_000}),
        slow(3, "gloo", {"max_shard_size": 200_000}),
        slow(3, "threads", {}),
        slow(2, "mpi", {}),
    ],
    ids=["gloo-2", "gloo-3", "threads-3", "mpi-2"],
)
def test_the_ranks_of_a_host_share_the_uploads(
    ranks: int, backend: str, options: dict[str, Any], s3: str, tmp_path: Path
) -> None:
    left = run_ranks(exports, ranks, backend=backend, args=(backend, f"{s3}/a/out", options, str(tmp_path)))
    assert left == [[]] * ranks
    assert_same(read(f"{s3}/a/out"), whole())
    assert uploads_in(s3) == []


def exports_a_copy_that_differs(url: str) -> None:
    comm = sx.get_communicator()
    sx.export_checkpoint({"w": torch.full((3,), float(comm.rank))}, url)


def test_a_copy_that_differs_is_not_published(s3: str) -> None:
    outcomes = run_ranks(exports_a_copy_that_differs, 2, backend="gloo", args=(f"{s3}/out",), allow_failure=True)
    assert list(outcomes.errors.values()) == ["ReplicaError", "ReplicaError"]
    assert names_at(f"{s3}/out") == []


def dies_while_uploading(url: str, rank: int) -> None:
    """Export two files of 40 MiB; one rank is killed in the middle of its upload."""
    comm = sx.get_communicator()
    written = []
    put = object_build.ObjectFile.write

    def write(self: Any, data: Any, at: int) -> None:
        put(self, data, at)
        written.append(at)
        if comm.rank == rank and len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    object_build.ObjectFile.write = write  # type: ignore[method-assign]
    state = {f"w{number}": torch.ones(10 << 20) for number in range(2)}
    sx.export_checkpoint(state, url, max_shard_size=41 << 20)


def test_a_rank_killed_while_it_uploads_leaves_nothing(s3: str) -> None:
    args = (f"{s3}/out", 1)
    outcomes = run_ranks(dies_while_uploading, 2, backend="gloo", args=args, allow_failure=True)
    assert outcomes[0].error == "PeerError"
    assert names_at(f"{s3}/out") == []
    assert uploads_in(s3) == []


def exports_where_no_room_is(url: str, scratch: str) -> str:
    os.environ["TMPDIR"] = scratch
    try:
        sx.export_checkpoint({"w": torch.ones(1 << 20)}, url)
    except sx.errors.StorageError as error:
        return f"{error.errno} {error}"
    return "no error"


@pytest.mark.usefixtures("mounts")
def test_a_full_temporary_directory_is_named_on_all_ranks(s3: str, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        args = (f"{s3}/out", str(tmp_path))
        for text in run_ranks(exports_where_no_room_is, 2, backend="gloo", args=args):
            assert text.startswith("28 ")
            assert "TMPDIR" in text
            assert str(tmp_path) in text
        assert names_at(f"{s3}/out") == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


PROGRAM = """
import fsspec, os, torch
import statexchange as sx
from disk_stores import import_s3, use_object_stores

use_object_stores()
if "AWS_ENDPOINT_URL" in os.environ:
    import_s3()

def work(url, value):
    state = {name: torch.full((3000,), value) for name in ("a", "b")}
    sx.export_checkpoint(state, url, max_shard_size=12_000, overwrite=True)

serve(work)
"""


@pytest.mark.parametrize("base", ["disk", slow("s3")])
@pytest.mark.parametrize("every", steps(5), ids=["some", "all"])
def test_a_killed_export_is_never_read_in_part(base: str, every: int, request: Any, sweep_path: Path) -> None:
    use_object_stores()
    root = request.getfixturevalue("s3") if base == "s3" else f"disk://{sweep_path}"
    with ForkedJobs(PROGRAM) as jobs:
        assert jobs.run(f"{root}/first", 1.0) is not None
        calls = jobs.run(f"{root}/first", 2.0)
        assert calls is not None
        print(f"{base}: {len(calls)} calls")
        for number in some(range(1, len(calls) + 1), every):
            url = f"{root}/{number}"
            assert jobs.run(url, 1.0) is not None
            ended = jobs.run(url, 2.0, kill_at=number)
            assert ended is None or number > len(ended)  # a job may make a call fewer
            if "statexchange.json" in names_at(url):
                live = {name: torch.zeros(3000) for name in ("a", "b")}
                sx.load_checkpoint(live, url)
                assert live["a"][0] in (1.0, 2.0), number
                assert all(torch.equal(tensor, live["a"]) for tensor in live.values()), number
                assert live["a"].unique().numel() == 1, number
            else:
                with pytest.raises(sx.errors.StateExchangeError):
                    sx.open_checkpoint(url)
            assert jobs.run(url, 3.0) is not None, number
            assert verify(url).findings == (), number
            assert sx.open_checkpoint(url)["b"].read()[0] == 3.0, number
            assert len(names_at(url)) == 4, number


def test_a_file_of_an_upload_is_read_by_others(s3: str, tmp_path: Path) -> None:
    sx.export_checkpoint(whole(), f"{s3}/out")
    fsspec.filesystem("s3").get(f"{s3}/out/model.safetensors", str(tmp_path / "got.safetensors"))
    assert_same(load_file(tmp_path / "got.safetensors"), whole())


def leaves_while_another_writes(folder: str) -> int:
    """Rank 0 leaves the call while rank 1 writes; return how many files that rank 0 opens then are overwritten."""
    comm = sx.get_communicator()
    use_object_stores()
    left, written = Path(folder, "left"), []

    def progress(done: int, total: int) -> None:
        written.append(done)
        if comm.rank == 0:
            raise KeyboardInterrupt
        deadline = time.monotonic() + 60
        while not left.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    state = {f"w{number}": torch.full((1, 1000), 1.0) for number in range(40)}
    with pytest.raises((KeyboardInterrupt, sx.errors.StateExchangeError)):
        sx.export_checkpoint(
            state, f"disk://{folder}/out", layout={"*": {"dim": 0}}, max_shard_size=8000, on_progress=progress
        )
    if comm.rank:
        return len(written)
    files = [open(f"{folder}/own-{number}", "w+b") for number in range(60)]  # noqa: SIM115 (closed below)
    for file in files:
        file.write(b"P" * 20_000)
        file.flush()
    left.touch()
    time.sleep(1.0)
    for file in files:
        file.close()
    return sum(Path(file.name).read_bytes() != b"P" * 20_000 for file in files)


def test_a_rank_that_leaves_early_has_no_other_file_overwritten(tmp_path: Path) -> None:
    outcomes = run_ranks(
        leaves_while_another_writes, 2, backend="threads", args=(str(tmp_path),), allow_failure=True, timeout_s=120
    )
    assert outcomes[0].value == 0, str(outcomes)
