"""scan: which checkpoints lie below a directory, and the verdict on each that a person would give."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import CommandLine
from safetensors.torch import save_file
from stored import DATA
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statexchange as sx
from statexchange.report.scan import ScanRow, scan
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.save of one process


def hugging_face(path: Path, files: int = 1) -> None:
    path.mkdir(parents=True)
    for number in range(1, files + 1):
        name = "model.safetensors" if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"
        save_file({f"layers.{number}.w": torch.ones(100, 10)}, path / name)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))


def saves(path: Path) -> None:
    kept = sx.Checkpoints(path, keep=None)
    for step in (10, 20):
        kept.save({"w": torch.ones(100)}, step)


def rows_of(path: Path) -> dict[str, ScanRow]:
    return {os.path.relpath(row.path, path): row for row in scan(path)}


def verdicts_of(path: Path) -> dict[str, str]:
    return {name: row.verdict for name, row in rows_of(path).items()}


def test_each_checkpoint_below_has_a_row(tmp_path: Path) -> None:
    hugging_face(tmp_path / "a/deep/model", files=2)
    saves(tmp_path / "job/saves")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "pt").mkdir()
    torch.save({"w": torch.ones(5)}, tmp_path / "pt/model.pt")
    workspace = sx.NFSWorkspace(tmp_path / "ws")
    workspace.write_configs_and_weights({}, {"w": torch.ones(4)})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/numbers.txt").write_text("1 2 3")
    (tmp_path / ".git").mkdir()
    hugging_face(tmp_path / ".git/hidden")
    rows = rows_of(tmp_path)
    assert list(rows) == ["a/deep/model", "dcp", "job/saves/step-000000010", "job/saves/step-000000020", "pt", "ws"]
    assert {row.verdict for row in rows.values()} == {"WHOLE"}
    assert [row.kind for row in rows.values()] == ["huggingface", "dcp", "save", "save", "torch", "workspace"]
    assert [row.num_parameters for row in rows.values()] == [2000, 3, 100, 100, 5, 4]
    model = rows["a/deep/model"]
    assert (model.model, model.num_tensors, model.step) == ("LlamaForCausalLM", 2, None)
    assert model.nbytes == sum(path.stat().st_size for path in (tmp_path / "a/deep/model").glob("*.safetensors"))
    assert rows["job/saves/step-000000020"].step == 20


def test_the_step_is_known_from_the_name_of_the_directory(tmp_path: Path) -> None:
    steps = {"checkpoint-500": 500, "global_step20": 20, "iter_0000007": 7, "step-30": 30, "model-7b": None}
    for name in steps:
        hugging_face(tmp_path / name)
    assert {name: row.step for name, row in rows_of(tmp_path).items()} == steps


def remove_a_file(path: Path) -> None:
    hugging_face(path, files=3)
    (path / "model-00002-of-00003.safetensors").unlink()


def truncate(path: Path) -> None:
    hugging_face(path)
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def empty_a_file(path: Path) -> None:
    hugging_face(path)
    os.truncate(path / "model.safetensors", 0)


def write_zeros(path: Path) -> None:
    hugging_face(path)
    (path / "model.safetensors").write_bytes(bytes(5000))


def link_to_nothing(path: Path) -> None:
    hugging_face(path)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("../blobs/gone")


def make_a_fifo(path: Path) -> None:
    hugging_face(path)
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


def lose_the_metadata(path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
    (path / ".metadata").unlink()


def lose_a_rank(path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(100)}, path)
    next(path.glob("*.safetensors")).unlink()


def truncate_a_rank(path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(1000)}, path)
    file = next(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 4)


def lose_a_rank_that_nothing_lists(path: Path) -> None:
    run_ranks(save_dtensors, 3, backend="gloo", args=(str(path),))
    (path / "rank2.pt").unlink()


def lose_a_middle_rank(path: Path) -> None:
    path.mkdir()
    for rank in (0, 2):
        torch.save({"w": torch.ones(3)}, path / f"rank{rank}.pt")


def save_dtensors(path: str) -> None:
    os.makedirs(path, exist_ok=True)
    mesh = init_device_mesh("cpu", (3,))
    torch.save({"w": distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])}, f"{path}/rank{mesh.get_rank()}.pt")


class Calls:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def run_code(path: Path) -> None:
    path.mkdir()
    torch.save({"w": Calls()}, path / "model.pt")


def cut_the_zip(path: Path) -> None:
    path.mkdir()
    torch.save({"w": torch.ones(1000)}, path / "model.pt")
    os.truncate(path / "model.pt", 2000)


BROKEN: dict[Callable[[Path], None], str] = {
    remove_a_file: "MISSING model-00002-of-00003.safetensors",
    truncate: "TRUNCATED 50 % model.safetensors",
    empty_a_file: "CORRUPT model.safetensors: the file is empty",
    write_zeros: "CORRUPT model.safetensors: not a safetensors file: its header is not a JSON object",
    link_to_nothing: "MISSING model.safetensors",
    make_a_fifo: "REFUSED model.safetensors: not a regular file",
    lose_the_metadata: "NO .metadata",
    lose_a_rank: "MISSING rank-00000-of-00001.safetensors",
    truncate_a_rank: "TRUNCATED 25 % rank-00000-of-00001.safetensors",
    lose_a_rank_that_nothing_lists: "INCOMPLETE: ",
    lose_a_middle_rank: "MISSING rank1.pt",
    run_code: "REFUSED model.pt: the pickle uses posix.system, which is not known to be harmless",
    cut_the_zip: "CORRUPT model.pt: truncated, or not a file of torch.save: it does not end like a zip archive",
}


@pytest.mark.parametrize("break_one", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_checkpoint_has_a_short_verdict(break_one: Callable[[Path], None], tmp_path: Path) -> None:
    break_one(tmp_path / "one")
    (row,) = scan(tmp_path)
    assert (row.verdict[: len(BROKEN[break_one])], row.status) == (BROKEN[break_one], "broken")
    assert row.problems


def test_the_model_of_verls_shards_is_that_of_the_config_in_their_folder_huggingface() -> None:
    assert [row.model for row in scan(DATA / "verl/fsdp2/run/global_step_1/actor")] == ["LlamaForCausalLM"]


def test_the_size_of_a_broken_checkpoint_counts_the_files_in_its_folders_and_those_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    below = tmp_path / "zero3"
    shutil.copytree(DATA / "deepspeed" / "zero3", below)
    next(below.glob("*/*rank_1_*optim_states.pt")).unlink()
    left = [*below.glob("*/*.pt"), below / "latest"]
    truncate(tmp_path / "cut")
    sizes = {Path(row.path).name: row.nbytes for row in scan(tmp_path)}
    assert sizes == {
        "zero3": sum(file.stat().st_size for file in left),
        "cut": (tmp_path / "cut" / "model.safetensors").stat().st_size,
    }


@pytest.mark.parametrize("shape", [(8, 2), (12,)], ids=["longer", "of other dims"])
def test_files_with_one_name_and_different_shapes_are_not_whole(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.ones(6, 2), "b": torch.ones(2)}, model / "model-00001-of-00002.safetensors")
    save_file({"a": torch.ones(shape), "c": torch.ones(2)}, model / "model-00002-of-00002.safetensors")
    assert rows_of(tmp_path)["model"].status == "broken"


def test_links_are_not_followed(tmp_path: Path) -> None:
    hugging_face(tmp_path / "outside")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/link").symlink_to(tmp_path / "outside")
    (tmp_path / "inside/loop").symlink_to(tmp_path)
    assert list(scan(tmp_path / "inside")) == []
    with pytest.raises(sx.errors.NotFoundError):
        list(scan(tmp_path / "absent"))


def test_an_export_that_runs_is_being_written(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def look(done: int, total: int) -> None:
        seen.append(verdicts_of(tmp_path))

    # The progress of an export is reported while its directory is being written.
    sx.export_checkpoint(torch.nn.Linear(10, 10), tmp_path / "out", on_progress=look)
    assert seen == [{"out": "BEING WRITTEN"}] * len(seen) != []
    assert verdicts_of(tmp_path) == {"out": "WHOLE"}


def test_scan_names_the_broken_checkpoint(tmp_path: Path, call: CommandLine) -> None:
    hugging_face(tmp_path / "whole")
    for function in (truncate, lose_the_metadata):
        function(tmp_path / function.__name__)
    code, out, err = call("scan", tmp_path, "--only", "broken", "--sort", "verdict")
    assert code == 1
    lines = [line.split("\t") for line in out.splitlines()]
    column = lines[0].index("VERDICT")
    assert [line[column] for line in lines[1:]] == ["NO .metadata", "TRUNCATED 50 % model.safetensors"]
    assert err == "3 checkpoints in 4 directories: 2 broken, 1 whole\n"
    code, found = call.json("scan", tmp_path)
    assert code == 1
    assert (found["code"], found["data"]["num_broken"]) == ("FINDINGS", 2)
    assert [one["verdict"] for one in found["data"]["checkpoints"]] == [
        "NO .metadata",
        "TRUNCATED 50 % model.safetensors",
        "WHOLE",
    ]
    shutil.rmtree(tmp_path / "truncate")
    shutil.rmtree(tmp_path / "lose_the_metadata")
    assert call("scan", tmp_path)[0] == 0


def test_a_directory_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")

    def remove_the_next(folder: str) -> None:
        if folder.endswith("/a"):
            shutil.rmtree(tmp_path / "b")

    found = {os.path.basename(row.path): row.verdict for row in scan(tmp_path, on_directory=remove_the_next)}
    assert found == {"a": "WHOLE", "c": "WHOLE"}


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_without_tensors_or_files_is_not_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"metadata": {}, "weight_map": {}}')
    for path in (tmp_path, tmp_path / name):
        (row,) = scan(path)
        assert row.status == "broken"
        assert "no tensors" in row.verdict
        with pytest.raises(sx.errors.IncompleteError) as caught:
            sx.merge_checkpoint(path, tmp_path / "merged")
        assert caught.value.path == str(tmp_path / name)


def test_a_file_that_lacks_a_tensor_is_not_missing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(("v", "w"), "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (row,) = scan(tmp_path)
    assert row.status == "broken"
    assert row.verdict.startswith("INCOMPLETE model-00001-of-00001.safetensors: the index assigns this tensor")
