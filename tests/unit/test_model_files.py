"""Which files of a directory are the model, for every command: never two models as one, and nothing unread unnamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import CommandLine
from safetensors.torch import load_file, save_file
from stored import write_raw
from tiny_models import llama

import statexchange as sx
from statexchange.formats.model_files import WEIGHT_SUFFIXES
from statexchange.report.scan import scan

NUMBERED = "model-{:05d}-of-{:05d}.safetensors"


def write(folder: Path, name: str, **values: float) -> str:
    """Write a file whose tensors have two equal elements each; return its name."""
    tensors = {key.replace("__", "."): torch.full((2,), value) for key, value in values.items()}
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return name


def index(folder: Path, name: str, **files: str) -> str:
    """Write an index; return its name."""
    weight_map = {key.replace("__", "."): file for key, file in files.items()}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return name


def numbered(folder: Path, value: float, total: int = 2) -> list[str]:
    """Write a numbered set of which file i has the tensor "i"."""
    return [
        write(folder, NUMBERED.format(number, total), **{str(number): value + number}) for number in range(1, total + 1)
    ]


def merged(folder: Path, target: Path, **options: object) -> tuple[dict[str, float], str]:
    """Merge; return the first element of each tensor, and the notes."""
    report = sx.merge_checkpoint(folder, target, **options)
    files = [load_file(target / name) for name, _ in report.files]
    return {name: float(tensor[0]) for tensors in files for name, tensor in tensors.items()}, "\n".join(report.notes)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


STANDARD = {
    "a single file": ["model.safetensors"],
    "an index": ["model.safetensors.index.json"],
    "a .bin": ["pytorch_model.bin"],
    "an index of .bin": ["pytorch_model.bin.index.json"],
    "an adapter": ["adapter_model.safetensors"],
    "an adapter as .bin": ["adapter_model.bin"],
}


def write_standard(folder: Path, name: str, value: float) -> None:
    if name.endswith(".index.json"):
        suffix = ".bin" if ".bin" in name else ".safetensors"
        file = write(folder, f"part-of-{int(value)}{suffix}", w=value)
        index(folder, name, w=file)
    else:
        write(folder, name, w=value)


@pytest.mark.parametrize("first", range(len(STANDARD)))
def test_files_are_read_in_the_order_of_transformers(
    source: Path, tmp_path: Path, call: CommandLine, first: int
) -> None:
    names = [name for (name,) in STANDARD.values()]
    for number, name in enumerate(names[first:]):
        write_standard(source, name, first + number)
    values, notes = merged(source, tmp_path / "out")
    assert values == {"w": first}
    _, printed, _ = call("info", source)
    verified = "".join(map(str, call("verify", source)))
    for later in names[first + 1 :]:
        if not later.endswith(".index.json"):
            assert later in notes
            assert later in printed
            assert later in verified
    with sx.open_checkpoint(source) as checkpoint:
        assert checkpoint["w"].read()[0] == first


@pytest.mark.parametrize(
    "beside",
    ["consolidated.safetensors", "model.fp16.safetensors", "model.ema.safetensors", "ema.pt", "model.gguf", "old.ckpt"],
)
def test_weights_beside_a_model_are_named_and_not_read(source: Path, tmp_path: Path, beside: str) -> None:
    write(source, "model.safetensors", a=1.0)
    write(source, beside, a=2.0, b=2.0)
    values, notes = merged(source, tmp_path / "out")
    assert values == {"a": 1.0}
    assert beside in notes


def test_two_indexes_are_no_union(source: Path, tmp_path: Path) -> None:
    index(source, "model.safetensors.index.json", a=write(source, "x.safetensors", a=1.0))
    index(source, "zz.safetensors.index.json", a=write(source, "y.safetensors", a=2.0, b=2.0))
    values, notes = merged(source, tmp_path / "out")
    assert values == {"a": 1.0}
    assert "y.safetensors" in notes
    (source / "model.safetensors.index.json").rename(source / "aa.safetensors.index.json")
    with pytest.raises(sx.errors.InvalidArgumentError, match="sets of weights") as caught:
        sx.merge_checkpoint(source, tmp_path / "refused")
    assert "aa.safetensors.index.json" in caught.value.message
    assert "zz.safetensors.index.json" in caught.value.message


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize(
    "names",
    [
        ("consolidated", "other"),
        ("model.fp16", "model.fp32"),
        ("model_100", "model_200"),
        ("a-00001-of-00001", "a-00001-of-00002"),
        ("best", "last"),
    ],
)
def test_candidates_are_refused_by_name_in_every_command(
    source: Path, tmp_path: Path, call: CommandLine, names: tuple[str, str], suffix: str
) -> None:
    files = [write(source, f"{name}.{suffix}", a=number) for number, name in enumerate(names)]
    for words in (["info"], ["verify"], ["ls"], ["merge", tmp_path / "out"], ["diff", source]):
        code, _, err = call(words[0], source, *words[1:])
        assert code == 2, words
        for file in files:
            assert file in err, words
    with pytest.raises(sx.errors.InvalidArgumentError):
        sx.load_checkpoint({"a": torch.zeros(2)}, source)
    assert [row.status for row in scan(source)] == ["not checked"]
    assert merged(source / files[1], tmp_path / "alone")[0] == {"a": 1.0}


@pytest.mark.parametrize(
    "names",
    [
        ["rank0.safetensors", "rank1.safetensors"],
        ["layers-1.safetensors", "layers-2.safetensors"],
        ["consolidated.00.pth", "consolidated.01.pth"],
        ["tp_rank_00_pp_rank_000.pt", "tp_rank_00_pp_rank_001.pt"],
        ["w-00001-of-00002.bin", "w-00002-of-00002.bin"],
    ],
)
def test_a_set_of_numbered_files_is_one_model(source: Path, tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        write(source, name, **{str(number): number})
    assert merged(source, tmp_path / "out")[0] == {"0": 0.0, "1": 1.0}


def test_an_index_says_which_tensor_of_which_file(source: Path, tmp_path: Path, call: CommandLine) -> None:
    """Files of an earlier save may hold old values of tensors that lie elsewhere now, and tensors that went."""
    write(source, "one.safetensors", a=1.0, b=9.0, gone=9.0)
    write(source, "two.safetensors", b=2.0, a=9.0)
    index(source, "model.safetensors.index.json", a="one.safetensors", b="two.safetensors")
    values, notes = merged(source, tmp_path / "out")
    assert values == {"a": 1.0, "b": 2.0}
    for stale in ("b in one.safetensors", "gone in one.safetensors", "a in two.safetensors"):
        assert stale in notes
        assert stale in call("info", source)[1]
        assert stale in "".join(map(str, call("verify", source)))


def test_a_tensor_that_an_index_omits_is_named_with_what_transformers_does(tmp_path: Path, call: CommandLine) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "in", max_shard_size="5kB")
    path = tmp_path / "in/model.safetensors.index.json"
    listed = json.loads(path.read_text())
    del listed["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(listed))
    (note,) = sx.merge_checkpoint(tmp_path / "in", tmp_path / "out").notes
    assert "model.norm.weight" not in load_file(tmp_path / "out/model.safetensors")
    assert all(text in note for text in ("1 tensor ", "model.norm.weight", "transformers"))
    assert note in call("info", tmp_path / "in")[1]
    _, report = type(model).from_pretrained(tmp_path / "in", output_loading_info=True)
    assert not report["missing_keys"]


@pytest.mark.parametrize(
    "name", [*(f"x{suffix}" for suffix in WEIGHT_SUFFIXES), "model.safetensors.index.fp16.json", "x.bin.index.json"]
)
def test_what_is_named_as_not_copied_is_not_copied(name: str, source: Path, tmp_path: Path) -> None:
    write(source, "model.safetensors", a=1.0)
    (source / "config.json").write_text("{}")
    (source / name).write_bytes(b"{}")
    _, notes = merged(source, tmp_path / "own")
    assert (name in notes) == (not name.endswith(".json"))
    merged(source / "model.safetensors", tmp_path / "given", files_from=source)
    sx.export_checkpoint({"a": torch.ones(1)}, tmp_path / "live", files_from=source)
    for folder in ("own", "given", "live"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert names == {"config.json", "model.safetensors", "statexchange.json"}
    merged(source, tmp_path / "path", files_from=source / name)
    assert (tmp_path / "path" / name).read_bytes() == b"{}"


@pytest.mark.parametrize("later", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_written_into_a_published_directory_is_no_part_of_it(source: Path, tmp_path: Path, later: str) -> None:
    sx.export_checkpoint({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "published", max_shard_size=12)
    write(tmp_path / "published", later, a=5.0)
    if later == "model.safetensors":
        with pytest.raises(sx.errors.CorruptError, match="manifest") as caught:
            sx.merge_checkpoint(tmp_path / "published", tmp_path / "out")
        assert caught.value.path == str(tmp_path / "published" / later)
    else:  # the index comes before it, and is that of the manifest
        values, notes = merged(tmp_path / "published", tmp_path / "out")
        assert values == {"a": 1.0, "b": 1.0}
        assert later in notes


def test_an_adapter_beside_the_model_of_a_job_is_named(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    write(folder, "model.safetensors", a=1.0)
    write(folder, "adapter_model.safetensors", lora=1.0)
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    values, notes = merged(folder, tmp_path / "out")
    assert values == {"a": 1.0}
    assert "adapter_model.safetensors" in notes


def test_named_adapters_of_a_job_are_named(tmp_path: Path, call: CommandLine) -> None:
    folder = tmp_path / "checkpoint-5"
    (folder / "first").mkdir(parents=True)
    write(folder / "first", "adapter_model.safetensors", lora=1.0)
    (folder / "first/adapter_config.json").write_text("{}")
    write(folder, "optimizer.pt", x=1.0)
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    with pytest.raises(sx.errors.InvalidArgumentError, match="adapters") as caught:
        sx.merge_checkpoint(folder, tmp_path / "out")
    assert "adapters in first" in caught.value.message
    assert "first" in call("info", folder)[1]


@pytest.mark.parametrize("left", [["training_args.bin"], ["optimizer.pt", "scheduler.pt"]])
def test_a_trainer_that_was_killed_in_a_save_left_no_whole_checkpoint(tmp_path: Path, left: list[str]) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    write(folder, "model.safetensors", a=1.0)
    for name in left:
        write(folder, name, x=1.0)
    (row,) = scan(tmp_path)
    assert row.status == "broken"
    assert "trainer_state.json" in row.verdict
    assert merged(folder, tmp_path / "out")[0] == {"a": 1.0}


def test_files_of_ranks_below_accelerates_directory_are_read_by_both_paths(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    below = folder / "pytorch_model_fsdp_0"
    below.mkdir(parents=True)
    for rank in range(2):
        write(below, f"pytorch_model_fsdp_0_rank{rank}.bin", **{str(rank): rank})
        (folder / f"random_states_{rank}.pkl").write_bytes(shutil.os.urandom(0))
    for path in (folder, below):
        assert merged(path, tmp_path / f"out-{path.name}")[0] == {"0": 0.0, "1": 1.0}


@pytest.mark.parametrize("name", ["flux_lora_rank64_bf16.safetensors", "x-rank-16.safetensors"])
def test_a_number_in_the_name_of_a_lone_file_is_no_rank(source: Path, tmp_path: Path, name: str) -> None:
    write(source, name, a=1.0)
    for path in (source, source / name):
        values, notes = merged(path, tmp_path / f"out-{path.name}")
        assert values == {"a": 1.0}
        assert "rank" not in notes
    assert [row.status for row in scan(source)] == ["whole"]


def test_a_tensor_that_the_index_lists_and_no_file_has_is_named_though_another_is_left_out(
    source: Path, tmp_path: Path
) -> None:
    write_raw(source / "model.safetensors", {"a": ("F32", (1,), bytes(4)), "odd": ("F128", (1,), bytes(16))})
    name = NUMBERED.format(1, 1)
    (source / "model.safetensors").rename(source / name)
    index(source, "model.safetensors.index.json", a=name, odd=name, lost=name)
    with pytest.raises(sx.errors.IncompleteError, match="does not have it") as caught:
        sx.merge_checkpoint(source, tmp_path / "out", exclude=["odd"])
    assert caught.value.name == "lost"
    sx.merge_checkpoint(source, tmp_path / "out", exclude=["odd", "lost"])
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["a"]
