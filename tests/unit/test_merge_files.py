"""Merging: metadata, small files, memory, descriptors and threads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from merging import chunks, lay_out, refuse, whole_state
from safetensors.torch import load_file, save_file
from stored import contents_of, json_header, write_raw, write_with_header
from workspaces import part, write_round

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    IncompleteError,
    InvalidArgumentError,
    OverlapError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.formats.registry import open_source
from statexchange.report.verify import verify
from statexchange.sharding.shards import Box, full_box


def test_metadata_of_a_file_is_kept(tmp_path: Path) -> None:
    kept = {f"key{n}": json.dumps({"_type": n}) for n in range(13)}
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors", {"format": "pt", **kept})
    report = merge_checkpoint(tmp_path / "one.safetensors", tmp_path / "out")
    assert json_header(tmp_path / "out/model.safetensors")["__metadata__"] == {"format": "pt", **kept}
    assert report.notes == ()
    merge_checkpoint(tmp_path / "out", tmp_path / "again", max_shard_size=1)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_metadata_on_which_files_differ_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for number, format_ in ((1, "flax"), (2, "flax")):
        metadata = {"format": format_, "same": "x", "differs": str(number), f"only{number}": "y"}
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"src/m-0000{number}-of-00002.safetensors", metadata)
    report = merge_checkpoint(tmp_path / "src", tmp_path / "out")
    kept = {"format": "pt", "only1": "y", "only2": "y", "same": "x"}
    assert json_header(tmp_path / "out/model.safetensors")["__metadata__"] == kept
    assert report.notes == (
        "metadata keys that are not kept: differs (files differ)",
        "the metadata key format becomes 'pt'; it was 'flax'",
    )


def test_metadata_that_is_no_text_is_named(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"half":"\\ud800"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    write_with_header(tmp_path / "x.safetensors", header, b"\7")
    report = merge_checkpoint(tmp_path / "x.safetensors", tmp_path / "out")
    assert report.notes == ("metadata keys that are not kept: half (not valid text)",)
    assert json_header(tmp_path / "out/model.safetensors")["__metadata__"] == {"format": "pt"}


def test_metadata_of_workspaces_and_of_torchs_writer_is_not_kept(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"w": torch.ones(4, 2)}, 2, 0))
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, path in enumerate(sorted((tmp_path / "ws").rglob("*.safetensors"))):
        shutil.copy(path, parts / f"{number}.safetensors")
    for source in ("ws", "parts"):
        report = merge_checkpoint(tmp_path / source, tmp_path / f"{source}.out")
        assert json_header(tmp_path / f"{source}.out/model.safetensors")["__metadata__"] == {"format": "pt"}
        assert report.notes == ()


@pytest.mark.parametrize("layout", [None, {"nothing": {"dim": 0}}])
def test_a_tensor_of_an_unknown_dtype_does_not_hide_others(tmp_path: Path, layout: Any) -> None:
    (tmp_path / "ws").mkdir()
    path = tmp_path / "ws/m.safetensors"
    write_raw(path, {"odd": ("Q4", [2, 2], b"ab"), "w": ("U8", [2], b"cd"), "nothing": ("U8", [1], b"e")})
    error = refuse(UnsupportedError, tmp_path, "dtype Q4", layout=layout)
    assert (error.name, error.path) == ("odd", str(path))
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", include="w", layout=layout)
    assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [99, 100]
    with sx.open_checkpoint(tmp_path / "ws") as checkpoint:
        assert {name: (t.dtype, t.shape) for name, t in checkpoint.items()} == {
            "odd": ("Q4", (2, 2)), "w": ("U8", (2,)), "nothing": ("U8", (1,))
        }  # fmt: skip
        with pytest.raises(UnsupportedError, match="Q4"):
            checkpoint["odd"].read()
    with pytest.raises(UnsupportedError, match="Q4") as caught:
        sx.load_checkpoint(
            {"odd": torch.zeros(2), "w": torch.zeros(2, dtype=torch.uint8)}, tmp_path / "ws", strict=False
        )
    assert caught.value.name == "odd"
    assert [type(found) for found in verify(tmp_path / "ws").findings] == [UnsupportedError]


def test_an_index_may_list_a_tensor_of_an_unknown_dtype(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"odd": ("Q4", [2, 2], b"ab"), "w": ("U8", [2], b"cd")})
    index = {"weight_map": {"odd": "model.safetensors", "w": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_source(tmp_path) as source:
        assert (source.problems, list(source.unsupported)) == ((), ["odd"])


def test_optimizer_state_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (tmp_path / "src").mkdir()
    torch.save(model.state_dict(), tmp_path / "src/pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "src/optimizer.pt")
    report = merge_checkpoint(tmp_path / "src", tmp_path / "out")
    assert report.notes == ("only the section 'model' is read, not 'optimizer' (all: section=\"all\", --section all)",)
    assert load_file(tmp_path / "out/model.safetensors").keys() == model.state_dict().keys()
    report = merge_checkpoint(tmp_path / "src", tmp_path / "all", section="all")
    assert report.notes[-1].startswith("6 of 8 tensors look like optimizer state, such as state.0.")
    report = merge_checkpoint(tmp_path / "src", tmp_path / "weights", section="all", exclude="state.*")
    assert load_file(tmp_path / "weights/model.safetensors").keys() == model.state_dict().keys()
    assert not any("optimizer" in note for note in report.notes)
    report = merge_checkpoint(tmp_path / "src/optimizer.pt", tmp_path / "moments", section="optimizer")
    assert report.num_tensors == 6
    assert not any("look like" in note for note in report.notes)
    save_file({"w": torch.ones(1), "w.exp_avg": torch.ones(1)}, tmp_path / "x.safetensors")  # a format without sections
    report = merge_checkpoint(tmp_path / "x.safetensors", tmp_path / "x")
    assert report.notes[-1].startswith("1 of 2 tensors look like optimizer state, such as w.exp_avg: ")


def test_deepspeeds_placeholders_are_refused_by_name(tmp_path: Path) -> None:
    state = {
        "module": {"w": torch.empty(0), "b": torch.empty(0)},
        "param_shapes": [{"w": torch.Size([2, 2]), "b": torch.Size([2])}],
        "ds_version": "0.15",
    }
    torch.save(state, tmp_path / "ws")
    error = refuse(UnsupportedError, tmp_path, r"2 tensors .*the directory")
    assert error.name == "module.w"
    torch.save({"w": torch.empty(0)}, tmp_path / "ws")
    merge_checkpoint(tmp_path / "ws", tmp_path / "out")


def test_readers_name_the_ranks_of_a_gap_and_of_an_overlap(tmp_path: Path) -> None:
    w, b = torch.ones(4), torch.ones(1)
    other = part("b", b, full_box((1,)))
    write_round(tmp_path / "hole", [other], [other, part("w", w, Box((0,), (2,)))])
    write_round(tmp_path / "overlap", [other], [part("w", w, Box((0,), (3,)))], [part("w", w, Box((2,), (2,)))])
    state = {"w": torch.zeros(4), "b": torch.zeros(1)}
    match = r"region \[2:4\].*ranks \[1\]"
    with sx.open_checkpoint(tmp_path / "hole") as checkpoint, pytest.raises(IncompleteError, match=match):
        checkpoint["w"].read()
    with pytest.raises(IncompleteError, match=r"ranks \[1\]") as hole:
        sx.load_checkpoint(state, tmp_path / "hole")
    assert (hole.value.name, hole.value.path) == ("w", str(tmp_path / "hole"))
    with pytest.raises(OverlapError, match=r"rank 1 .*rank 2\b") as overlap:
        sx.load_checkpoint(state, tmp_path / "overlap")
    assert (overlap.value.name, overlap.value.rank, overlap.value.path) == ("w", 2, str(tmp_path / "overlap"))


def test_small_files_are_copied_but_not_weights_or_training_state(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", [part("w", torch.ones(2), full_box((2,)))])
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for name in ("config.json", "tokenizer.model", ".hidden", "old.safetensors", "pytorch_model.bin", "x.index.json"):
        (model / name).write_text(name)
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=model)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        "statexchange.json",
        "tokenizer.model",
    ]
    for name in ("trainer_state.json", "latest", "zero_to_fp32.py", "train_results.json", "fsdp_config.json"):
        (model / name).write_text(name)
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=model, overwrite=True)
    assert sorted(name for name, *_ in map(str.split, os.listdir(tmp_path / "out")) if "model" not in name) == [
        "config.json",
        "statexchange.json",
    ]
    assert not any("nothing is taken" in note for note in report.notes)
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=[model / ".hidden"], overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == [".hidden", "model.safetensors", "statexchange.json"]
    files = {"config.json": "{}", "tokenizer.model": b"\xff"}
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=files, overwrite=True)
    assert (tmp_path / "out/config.json").read_text() == "{}"
    assert (tmp_path / "out/tokenizer.model").read_bytes() == b"\xff"
    shutil.rmtree(tmp_path / "out")
    for name in ("", "..", "sub/config.json", "/config.json"):
        refuse(InvalidArgumentError, tmp_path, "plain file name", files_from={name: "{}"})
    refuse(InvalidArgumentError, tmp_path, "'model.safetensors'", files_from={"model.safetensors": "{}"})
    os.mkfifo(tmp_path / "fifo")
    refuse(UnsafeError, tmp_path, "regular file", files_from=[tmp_path / "fifo"])
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refuse(UnsafeError, tmp_path, "regular file", files_from=model)


def test_a_directory_without_small_files_is_named(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", [part("w", torch.ones(2), full_box((2,)))])
    job = tmp_path / "job"
    job.mkdir()
    (job / "trainer_state.json").write_text("{}")
    text = f"files_from: nothing is taken from {job}: it has no config, tokenizer or other such file"
    assert text in merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=job).notes
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "statexchange.json"]


def test_a_dry_run_plans_and_touches_nothing(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out(whole_state(), 2, 0))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "a" / "out", max_shard_size="1MB", dry_run=True)
    assert report.dry_run
    assert len(report.files) > 1
    assert os.listdir(tmp_path) == ["ws"]


def test_a_merge_of_100_ranks_needs_few_descriptors(tmp_path: Path) -> None:
    value = torch.arange(100 * 4).reshape(100, 4)
    write_round(tmp_path / "ws", *[[part("w", value, box)] for box in chunks((100, 4), 100, 0)])
    program = "import sys; from statexchange.checkpoint.merge import merge_checkpoint; merge_checkpoint(*sys.argv[1:])"
    command = ["prlimit", "--nofile=64", sys.executable, "-c", program, str(tmp_path / "ws"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], value)


MEASURE = """
import sys
from statexchange.checkpoint import merge
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10
before = peak()
merge.merge_checkpoint(sys.argv[1], sys.argv[2], max_shard_size="60MB", threads=2)
print(peak() - before, "torch" in sys.modules)
"""


@pytest.mark.parametrize("dim", [0, 1])
def test_a_merge_of_200_mb_needs_less_than_100_mb_of_memory_and_no_torch(dim: int) -> None:
    place = Path("/dev/shm") / f"statexchange-test-{os.getpid()}"
    place.mkdir(mode=0o700)
    try:
        state = {f"w{i}": torch.zeros(5000, 2500) for i in range(4)}  # 200 MB
        write_round(place / "ws", *lay_out(state, 4, dim))
        command = [sys.executable, "-c", MEASURE, str(place / "ws"), str(place / "out")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        megabytes, torch_there = done.stdout.split()
        assert int(megabytes) < 100
        assert torch_there == "False"
    finally:
        shutil.rmtree(place)


def test_an_error_in_one_file_stops_the_others(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({f"w{i}": torch.ones(600, 1000) for i in range(8)}, 2, 1))
    seen: list[int] = []

    def fail(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_checkpoint(tmp_path / "ws", tmp_path / "out", max_shard_size="2.4MB", threads=2, on_progress=fail)
    assert len(seen) < 12  # of at least 32
    assert os.listdir(tmp_path) == ["ws"]


@pytest.mark.parametrize("files", [1, 3], ids=["one-file", "three-files"])
def test_any_number_of_threads_writes_the_same_bytes(tmp_path: Path, files: int) -> None:
    state = {f"w{i:02}": torch.randn(700, 1000) for i in range(12)}  # 34 MB: a file is divided among several threads
    state |= {"one": torch.randn(3_000_000), "empty": torch.zeros(0, 3), "last": torch.ones(3)}
    write_round(tmp_path / "ws", *lay_out(state, 2, 0))
    size = -(-sum(value.nbytes for value in state.values()) // files)
    for threads in (1, 2, 5):
        done: list[int] = []
        out = tmp_path / str(threads)

        def count(at: int, total: int, done: list[int] = done) -> None:
            done.append(at)

        merge_checkpoint(tmp_path / "ws", out, threads=threads, max_shard_size=size, on_progress=count)
        assert (done, done[-1]) == (sorted(done), sum(value.nbytes for value in state.values()))
        assert contents_of(out) == contents_of(tmp_path / "1")
    merged: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "5").glob("*.safetensors"):
        merged |= load_file(path)
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], value) for name, value in state.items())
