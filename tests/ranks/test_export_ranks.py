"""Ranks of an export that differ: in meshes, in options, in copies, in how long they take."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import check_refusal
from safetensors.torch import load_file
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.checkpoint.publication import Publication
from statexchange.formats.registry import open_source
from statexchange.testing import run_ranks


def exports_on_odd_meshes(out: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = sx.get_communicator().rank
    whole = torch.arange(10.0).reshape(5, 2)
    swapped = distribute_tensor(whole, DeviceMesh("cpu", [2, 0, 1]), [Shard(0)])
    with pytest.raises(sx.errors.UnsupportedError, match="out of order") as caught:
        sx.export_checkpoint({"w": swapped}, f"{out}-swapped")
    assert caught.value.name == "w"
    pair = distribute_tensor(whole, DeviceMesh("cpu", [0, 1]), [Shard(0)])
    head = {} if rank else {"head": torch.ones(2)}
    sx.export_checkpoint({"w": pair, **head}, out, layout={"head": {"dim": 0}})
    merged = load_file(f"{out}/model.safetensors")
    assert torch.equal(merged["w"], whole)
    assert torch.equal(merged["head"], torch.ones(2))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that a mesh leaves some ranks out
def test_a_mesh_of_some_ranks_is_exported_and_one_with_ranks_out_of_order_is_refused(tmp_path: Path) -> None:
    run_ranks(exports_on_odd_meshes, 3, backend="gloo", args=(str(tmp_path / "out"),))


def test_two_tensors_of_one_name_without_wrappers_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model._orig_mod = nn.Linear(1, 1, bias=False)
    with pytest.raises(ValueError, match="this name") as caught:
        sx.export_checkpoint(model, tmp_path / "out")
    assert caught.value.name == "weight"


@pytest.mark.parametrize("out", ["shm://name"])
def test_a_target_that_is_no_directory_is_refused(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="to a directory"):
        sx.export_checkpoint({"w": torch.ones(1)}, out)
    if out.startswith("shm:"):  # a save goes to object stores, too
        with pytest.raises(ValueError, match="to a directory"):
            sx.save_checkpoint({"w": torch.ones(1)}, out)
    assert not list(tmp_path.iterdir())


def saves_by_mesh(folder: str) -> list[int]:
    """Each slice of a mesh is a new object, but not a new communicator."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = mesh.get_rank()
    sx.save_checkpoint({"other": torch.ones(1)}, f"{folder}/own{rank}", comm=sx.get_communicator().new_group([rank]))
    counts = []
    for step in range(4):
        sx.save_checkpoint({"w": torch.ones(1), "step": step}, f"{folder}/{rank // 2}-{step}", comm=mesh["b"])
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_saves_by_a_mesh_are_of_one_job_and_leave_no_descriptors(tmp_path: Path) -> None:
    for counts in run_ranks(saves_by_mesh, 4, backend="gloo", args=(str(tmp_path),)):
        assert counts == counts[:1] * 4
    for group in (0, 1):
        sources = [open_source(tmp_path / f"{group}-{step}") for step in range(4)]
        assert len({source.run for source in sources}) == 1
        assert [source.world_size for source in sources] == [2] * 4
        for source in sources:
            source.close()


def exports_the_same(out: str) -> list[int]:
    """Export; return the bytes of its description, of the plan and of its receipts that this rank sends."""
    comm = sx.get_communicator()
    nbytes: dict[str, int] = {}
    all_gather_bytes = comm.all_gather_bytes

    def counted(data: bytes, *, operation: str, **options: Any) -> list[bytes]:
        nbytes[operation] = nbytes.get(operation, 0) + len(data)
        return all_gather_bytes(data, operation=operation, **options)

    comm.all_gather_bytes = counted  # type: ignore[method-assign]
    sx.export_checkpoint({f"layer{n}": torch.full((5, 3), float(n)) for n in range(50)}, out)
    return [nbytes["the gathering of descriptions"], nbytes["the plan"]]


def test_equal_descriptions_and_the_plan_are_sent_once(tmp_path: Path) -> None:
    first, *others = run_ranks(exports_the_same, 4, args=(str(tmp_path / "four"),))
    assert min(first) > 1000
    assert others == [[0, 0]] * 3


@pytest.mark.ranks(2, backend="threads")
@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("dtype", (None, "float16"), "dtype .* default .*'float16'"),
        ("dtype", (torch.bfloat16, torch.float32), "dtype is 'bfloat16'.*'float32'"),
        ("include", ("*", ()), r"include is \('\*',\) .* default "),
        ("rename", (str.upper, [("a", "b")]), r"rename is .*\(\('a', 'b'\),\)"),
        ("max_shard_size", ("1GB", 10**9 + 1), "max_shard_size is 1000000000 .* 1000000001 "),
        ("replicas", ("root", "equal"), r"replicas .*'root'.* default "),
        ("layout", ({"mesh": {"tp": 2}, "rules": {}}, None), r"mesh is \{'tp': 2\} .* default "),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_an_option_that_differs_between_ranks_is_named(option: str, values: Any, message: str, tmp_path: Path) -> None:
    check_refusal(
        sx.errors.InvalidArgumentError,
        message,
        {"w": torch.ones(2)},
        tmp_path / "out",
        **{option: values[sx.get_rank()]},
    )
    assert not (tmp_path / "out").exists()


def fails_beside_replicas(out: str) -> None:
    comm = sx.get_communicator()
    state = {"a": torch.zeros(1, dtype=torch.float64).expand(60_000, 60_000)}

    def stop(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(sx.errors.PeerError, match=r"rank 0 .*stop"):
        sx.export_checkpoint(state, out, dtype="bfloat16", on_progress=stop if comm.rank == 0 else None)


def test_a_rank_that_only_compares_replicas_raises_the_failure(tmp_path: Path) -> None:
    run_ranks(fails_beside_replicas, 2, backend="gloo", args=(str(tmp_path / "out"),))


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_on_one_rank_must_be_equal_too(ranks: int, tmp_path: Path) -> None:
    boxes = [[[[0, 0], [1, 2]], [[0, 0], [1, 2]]]] * ranks
    layout = {"w": {"global_shape": [1, 2], "boxes": boxes}}
    args = (str(tmp_path / "out"), layout)
    run_ranks(exports_copies, ranks, args=args)


def exports_copies(out: str, layout: Any) -> None:
    with pytest.raises(sx.errors.ReplicaError, match="copies of rank 0"):
        sx.export_checkpoint({"w": torch.arange(4.0).reshape(2, 2)}, out, layout=layout)
    sx.export_checkpoint({"w": torch.ones(2, 2)}, out, layout=layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files_from": {"config.json": {"a": 1}}}, "config.json.*str or bytes"),
        ({"files_from": {5: "a"}}, "plain file name"),
        ({"files_from": 5}, "files_from must be"),
        ({"files_from": {"a\0b": "x"}}, "plain file name"),
        ({"files_from": {"model.safetensors": "x"}, "max_shard_size": 16}, "plain file name"),
        ({"rename": 5}, "rename must be"),
        ({"rename": [(1, 2)]}, "rename must be"),
        ({"include": 5}, "include must be"),
        ({"exclude": [5]}, "exclude must be"),
        ({"layout": {"a": {"global_shape": [4], "boxes": {"0": [[[0], [4]]]}}}}, "boxes must be"),
        ({"layout": {"a": {"global_shape": [4], "boxes": [[[0], [4]]]}}}, "boxes.*not a box"),
        ({"layout": {"a": {"global_shape": [4], "boxes": [0]}}}, "boxes.*iterable"),
    ],
    ids=str,
)
def test_wrong_options_are_errors_before_anything_is_written(options: Any, message: str, tmp_path: Path) -> None:
    state = {"a": np.arange(4.0), "b": np.arange(8.0)}
    with pytest.raises(sx.errors.InvalidArgumentError, match=message):
        sx.export_checkpoint(state, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_numpy_matrix_is_exported_as_its_elements(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        sx.export_checkpoint({"m": np.matrix([[1.0, 2.0], [3.0, 4.0]])}, tmp_path / "out")
    assert sx.open_checkpoint(tmp_path / "out")["m"].read().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def saves_slowly(folder: str) -> None:
    comm = sx.init("gloo", timeout_s=0.3)
    wide = torch.zeros(1).expand(150 if comm.rank == 0 else 1, 1 << 20)
    sx.save_checkpoint({"m": {f"w{comm.rank}": wide}}, folder, comm=comm)


def test_a_rank_that_saves_more_is_waited_for(tmp_path: Path) -> None:
    run_ranks(saves_slowly, 2, backend="gloo", args=(str(tmp_path / "saved"),), timeout_s=120)


def reduces_slowly(out: str) -> None:
    comm = sx.init("gloo", timeout_s=0.7)
    state = {"w": torch.arange(2.0) + comm.rank, "z": torch.zeros(1).expand(200, 1 << 20)}
    sx.export_checkpoint(state, out, comm=comm, layout={"*": {"reduce": "max"}})


@pytest.mark.slow
def test_ranks_that_reduce_much_are_waited_for(tmp_path: Path) -> None:
    run_ranks(reduces_slowly, 2, backend="gloo", args=(str(tmp_path / "out"),), timeout_s=120)


def test_the_report_is_right_if_the_target_is_moved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Publication.commit

    def commit_and_move(publication: Publication, metadata: Any) -> Any:
        found = commit(publication, metadata)
        os.rename(tmp_path / "out", tmp_path / "aside")  # as another publisher would
        return found

    monkeypatch.setattr(Publication, "commit", commit_and_move)
    report = sx.export_checkpoint({"w": torch.ones(300), "v": torch.ones(7)}, tmp_path / "out", max_shard_size="1KB")
    assert len(report.files) > 3
    assert list(report.files) == sorted((path.name, path.stat().st_size) for path in (tmp_path / "aside").iterdir())


MEASURE = """
import sys, torch
import statexchange as sx

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10

place, turned = sys.argv[1], sys.argv[2] == "turned"
state = {f"w{i}": torch.ones(4096, 4096) for i in range(4)}
state = {name: tensor.T if turned else tensor for name, tensor in state.items()}
sx.export_checkpoint({"w": torch.ones(2)}, place + "/warm")
grown = [peak()]
sx.export_checkpoint(state, place + "/out")
grown.append(peak())
sx.load_checkpoint(state, place + "/out")
grown.append(peak())
print(*(after - before for before, after in zip(grown, grown[1:])))
"""


@pytest.mark.parametrize("order", [slow("contiguous"), "turned"])
def test_an_export_and_a_load_of_256_mib_take_little_memory(order: str) -> None:
    folder = Path("/dev/shm") / f"statexchange-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        command = [sys.executable, "-c", MEASURE, str(folder), order]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert max(map(int, done.stdout.split())) < 64
    finally:
        shutil.rmtree(folder)
