"""`--svg` of info, ls and show: what a picture contains, and which paths it does not replace."""

import json
import os
import stat
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from commands import CommandLine
from drawn import SVG, texts
from stored import write_raw
from whole_checkpoints import KINDS

import statexchange as sx
from statexchange.formats.registry import open_source
from statexchange.report.supply import supply_of
from statexchange.report.tensor_facts import tensor_facts
from statexchange.storage.workspace import Workspace


@pytest.fixture
def published(tmp_path: Path) -> Path:
    state = {"up.weight": np.ones((4, 3), np.float32), "down.weight": np.ones((3, 4), np.float32)}
    sx.export_checkpoint({**state, "norm": np.ones(2, np.float32)}, tmp_path / "published")
    return tmp_path / "published"


def write_safetensors(path: Path, tensors: dict[str, int]) -> None:
    """Write a file of U8 vectors of zeros, by name and size."""
    write_raw(path, {name: ("U8", [size], bytes(size)) for name, size in tensors.items()})


def texts_of(path: Path) -> list[str]:
    return texts(ET.parse(path).getroot())


def titles(path: Path) -> set[str]:
    """Return the names in the tooltips of a picture."""
    root = ET.parse(path).getroot()
    return {(title.text or "").split("\n")[0] for title in root.iter(f"{SVG}title")}


def test_info_draws_the_parameters_beside_its_summary(call: CommandLine, published: Path, tmp_path: Path) -> None:
    plain = call("info", published)
    picture = tmp_path / "parameters.svg"
    assert call("info", published, "--svg", picture) == plain
    assert titles(picture) >= {"Parameters of published", "up.weight", "down.weight", "norm"}
    assert "huggingface · 26 parameters in 3 tensors · 104 B" in texts_of(picture)
    assert stat.S_IMODE(picture.stat().st_mode) & 0o077 == 0o044


def test_the_model_that_config_json_names_is_in_the_title(call: CommandLine, published: Path, tmp_path: Path) -> None:
    (published / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    assert call("info", published, "--svg", tmp_path / "p.svg")[0] == 0
    assert "huggingface, TinyForCausalLM · 26 parameters in 3 tensors · 104 B" in texts_of(tmp_path / "p.svg")


def test_the_parameters_are_those_of_the_model_as_in_the_summary(call: CommandLine, tmp_path: Path) -> None:
    weight, moment = np.ones(10, np.float32), np.ones(1000, np.float32)
    optimizer = {"state": {0: {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    sx.save_checkpoint({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "save")
    assert "parameters  10 in the section model" in call("info", tmp_path / "save")[1]
    assert call("info", tmp_path / "save", "--svg", tmp_path / "p.svg")[0] == 0
    assert "save, section model · 10 parameters in 1 tensor · 40 B" in texts_of(tmp_path / "p.svg")
    assert not any("optimizer" in text for text in titles(tmp_path / "p.svg"))
    sx.save_checkpoint({"optimizer": optimizer}, tmp_path / "other")
    assert call("info", tmp_path / "other", "--svg", tmp_path / "o.svg")[0] == 0
    assert "save · 1,000 parameters in 1 tensor · 4.00 kB" in texts_of(tmp_path / "o.svg")


def test_ls_draws_the_listed_tensors(call: CommandLine, published: Path, tmp_path: Path) -> None:
    picture = tmp_path / "supply.svg"
    code, out, _ = call("ls", published, "--include", "*.weight", "--svg", picture, "--json")
    assert code == 0
    assert json.loads(out)["data"]["picture"] == os.fspath(picture)
    assert titles(picture) == {"Which rank supplied which bytes of published", "up.weight", "down.weight"}
    assert "96 B in 2 tensors. All rows are equally wide; the parts of each are to scale." in texts_of(picture)


def test_show_draws_the_regions_of_one_tensor(call: CommandLine, published: Path, tmp_path: Path) -> None:
    picture = tmp_path / "tensor.svg"
    plain = call("show", published, "up.weight")
    assert plain[0] == 0
    assert call("show", published, "up.weight", "--svg", picture) == plain
    assert {"up.weight", "F32 [4,3]", "48 B"} <= {*texts_of(picture)}
    assert not {"down.weight", "norm"} & {*texts_of(picture)}
    assert call("show", published, "up.weight", "--svg", picture)[0] == 7
    code, _, err = call("show", published, "--svg", tmp_path / "none.svg")
    assert code == 2
    assert "NAME" in err
    assert call("show", published, "upp.weight", "--svg", tmp_path / "none.svg")[0] == 3
    assert not (tmp_path / "none.svg").exists()


def test_without_ranks_the_legend_has_the_names_of_the_files(call: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in (1, 2):
        write_safetensors(folder / f"model-0000{number}-of-00002.safetensors", {f"t{number}": 3})
    assert call("ls", folder, "--svg", tmp_path / "s.svg")[0] == 0
    assert "1: model-00002-of-00002.safetensors · 3 B · 50.0%" in texts_of(tmp_path / "s.svg")
    assert call("seal", folder)[0] == 0
    assert call("ls", folder, "--svg", tmp_path / "sealed.svg")[0] == 0
    assert (tmp_path / "sealed.svg").read_text() == (tmp_path / "s.svg").read_text()
    assert call("merge", folder, tmp_path / "merged")[0] == 0
    assert call("ls", tmp_path / "merged", "--svg", tmp_path / "merged.svg")[0] == 0
    assert {"Which file supplied which bytes of merged", "file 1 · 3 B · 50.0%"} <= {*texts_of(tmp_path / "merged.svg")}


def test_tensors_of_a_missing_file_are_counted_in_the_picture(call: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    write_safetensors(folder / first, {"here": 5})
    index = {"metadata": {}, "weight_map": {"here": first, "gone": second, "lost": second}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for command, text in (
        ("ls", "5 B in 1 tensor; 2 more are missing, size unknown. All rows are equally wide"),
        ("info", "5 parameters in 1 tensor · 5 B · 2 without elements or of unknown size"),
    ):
        picture = tmp_path / f"{command}.svg"
        assert call(command, folder, "--svg", picture)[0] == 5
        assert any(text in line for line in texts_of(picture)), texts_of(picture)


@pytest.mark.parametrize("command", ["info", "ls"])
def test_a_file_that_exists_is_replaced_only_with_overwrite(
    call: CommandLine, published: Path, tmp_path: Path, command: str
) -> None:
    picture = tmp_path / "p.svg"
    picture.write_text("mine")
    code, out, err = call(command, published, "--svg", picture)
    assert (code, out) == (7, "")
    assert "--overwrite" in err
    assert picture.read_text() == "mine"
    assert call(command, published, "--svg", picture, "--overwrite")[0] == 0
    assert titles(picture) >= {"up.weight"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.svg", "published"]


def test_what_is_no_regular_file_is_not_replaced(call: CommandLine, published: Path, tmp_path: Path) -> None:
    (tmp_path / "link.svg").symlink_to("elsewhere")
    (tmp_path / "folder.svg").mkdir()
    os.mkfifo(tmp_path / "fifo.svg")
    for name in ("link.svg", "folder.svg", "fifo.svg"):
        code, _, err = call("info", published, "--svg", tmp_path / name, "--overwrite")
        assert code == 7
        assert "not a regular file" in err


def test_a_picture_that_cannot_be_written_is_an_error_and_leaves_nothing(
    call: CommandLine, published: Path, tmp_path: Path
) -> None:
    code, _, err = call("info", published, "--svg", tmp_path / "nowhere" / "p.svg")
    assert code == 3
    assert "nowhere" in err
    for target in ("-", "s3://bucket/p.svg"):
        code, _, err = call("ls", published, "--svg", target)
        assert code == 2
        assert "local file" in err
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


@pytest.mark.parametrize("command", ["info", "ls"])
def test_a_picture_needs_exactly_one_checkpoint(
    call: CommandLine, published: Path, tmp_path: Path, command: str
) -> None:
    picture = tmp_path / "p.svg"
    code, _, err = call(command, published, published, "--svg", picture)
    assert code == 2
    assert "name one PATH" in err
    saves = sx.Checkpoints(tmp_path / "saves")
    saves.save({"w": np.ones(3, np.float32)}, step=7)
    saves.close()
    code, _, err = call(command, tmp_path / "saves", "--svg", picture)
    assert code == 2
    assert "this directory has saves: name one of them" in err
    assert not picture.exists()
    assert call(command, tmp_path / "saves" / "step-000000007", "--svg", picture)[0] == 0
    assert "w" in titles(picture)


def test_a_picture_of_a_checkpoint_without_tensors_is_an_error(call: CommandLine, tmp_path: Path) -> None:
    Workspace(tmp_path / "ws").write([], run="job", round=1, rank=0, world_size=1)
    for command in ("info", "ls"):
        code, _, err = call(command, tmp_path / "ws", "--svg", tmp_path / "p.svg")
        assert code == 3
        assert "no tensor to draw" in err
        assert f"{tmp_path}/ws" in err


def test_hostile_names_are_escaped_in_pictures(call: CommandLine, tmp_path: Path) -> None:
    name = '</title><script>alert("1")</script>\u202e'
    write_safetensors(tmp_path / "m.safetensors", {name: 4, "w": 4})
    for command in ("info", "ls"):
        picture = tmp_path / f"{command}.svg"
        assert call(command, tmp_path / "m.safetensors", "--svg", picture)[0] == 0
        text = picture.read_text()
        assert "<script" not in text
        assert "\u202e" not in text
        assert '</title><script>alert("1")</script>?' in titles(picture)


# The kinds of which files are drawn: they have neither ranks nor a manifest.
DRAWN_BY_FILE = {
    "huggingface", "huggingface shards", "huggingface without index", "torch file", "torch shards",
    "torch shards without index", "FSDP1", "rank files of torch", "rank files", "Trainer", "Trainer with FSDP",
    "accelerate", "verl", "Lightning", "torch_checkpointing",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_each_region_is_supplied_by_the_file_that_has_it(kind: str, tmp_path: Path) -> None:
    KINDS[kind].build(tmp_path / "made")
    with open_source(tmp_path / "made" / (KINDS[kind].row or ""), strict=False) as source:
        is_drawn_by_file = not source.has_ranks and source.manifest is None
        assert is_drawn_by_file == (kind in DRAWN_BY_FILE)
        if not is_drawn_by_file:
            return
        supply = supply_of(source)
        for tensor in supply.tensors:
            facts = tensor_facts(source, tensor.name)
            assert facts is not None
            having = {region.files[0] for region in facts.regions if region.box.numel}
            named = {supply.files[number] for box, number in tensor.boxes if box.numel}
            assert len(named) == len(having)
            assert all(any(path.endswith(name) for name in named) for path in having), (named, having)
