"""Selection comes before problems, and wrappers' names are removed by one rule, in merge, diff, export and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from safetensors.torch import load_file, save_file

import statexchange as sx
from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, UnsafeError

NUMBERED = "model-0000{}-of-00002.safetensors"


def sharded(folder: Path) -> Path:
    """Write a checkpoint of two files with an index: body.* in the first, head.* in the second."""
    folder.mkdir()
    weight_map = {}
    for number, part in enumerate(("body", "head"), 1):
        tensors = {f"{part}.{name}": torch.full((64,), float(number)) for name in "ab"}
        save_file(tensors, folder / NUMBERED.format(number))
        weight_map |= dict.fromkeys(tensors, NUMBERED.format(number))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def destroy(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


@pytest.mark.parametrize(
    ("harm", "kind"), [(remove, IncompleteError), (truncate, CorruptError), (destroy, CorruptError)]
)
def test_what_is_missing_or_broken_can_be_left_out(tmp_path: Path, call: CommandLine, harm: Any, kind: type) -> None:
    source = sharded(tmp_path / "source")
    harm(source / NUMBERED.format(2))
    with pytest.raises(kind):
        sx.merge_checkpoint(source, tmp_path / "whole")
    with pytest.raises(kind):
        sx.merge_checkpoint(source, tmp_path / "head", include="head.*")
    for name, options in (("a", {"exclude": "head.*"}), ("b", {"include": "body.*"})):
        sx.merge_checkpoint(source, tmp_path / name, **options)
        assert set(load_file(tmp_path / name / "model.safetensors")) == {"body.a", "body.b"}
    assert call("diff", source, tmp_path / "a")[0] not in (0, 1)
    assert call("diff", source, tmp_path / "a", "--exclude", "head.*")[0] == 0


def test_a_selection_of_nothing_that_is_there_is_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    (source / NUMBERED.format(2)).unlink()
    with pytest.raises(InvalidArgumentError, match="include"):
        sx.merge_checkpoint(source, tmp_path / "out", include=["body.*", "tail.*"])


NAMES = ["embed.weight", "layers.0.weight", "layers.1.weight"]
WRAPPED = {
    "compiled layers": lambda name: name.replace(".weight", "._orig_mod.weight"),
    "a compiled model": lambda name: f"_orig_mod.{name}",
    "checkpointed layers": lambda name: name.replace(".weight", "._checkpoint_wrapped_module.weight"),
    "FSDP1": lambda name: f"_fsdp_wrapped_module.{name}".replace(".weight", "._fsdp_wrapped_module.weight"),
    "DDP": lambda name: f"module.{name}",
    "DDP of a compiled model": lambda name: f"module._orig_mod.{name}",
    "a compiled DDP": lambda name: f"_orig_mod.module.{name}",
    "all": lambda name: f"module.{name}".replace(".weight", "._orig_mod._checkpoint_wrapped_module.weight"),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_wrappers_leave_nothing_in_names(tmp_path: Path, call: CommandLine, how: str) -> None:
    state = {name: torch.full((3,), float(number)) for number, name in enumerate(NAMES)}
    save_file(state, tmp_path / "bare.safetensors")
    save_file({WRAPPED[how](name): value for name, value in state.items()}, tmp_path / "wrapped.safetensors")
    report = sx.merge_checkpoint(tmp_path / "wrapped.safetensors", tmp_path / "out")
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == sorted(NAMES)
    assert any("wrappers" in note for note in report.notes)
    assert call("diff", tmp_path / "wrapped.safetensors", tmp_path / "bare.safetensors")[0] == 0
    assert call("diff", tmp_path / "bare.safetensors", tmp_path / "wrapped.safetensors")[0] == 0
    assert sx.diff_checkpoints(state, tmp_path / "wrapped.safetensors").equal


def test_a_users_module_of_that_name_stays(tmp_path: Path) -> None:
    names = ["module.weight", "head.weight", "layers.module.weight"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    sx.merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "out")
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == sorted(names)


def test_two_names_that_wrappers_alone_tell_apart_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(2), "a._orig_mod.weight": torch.zeros(2)}, path)
    for target in ("out", "again"):
        with pytest.raises(UnsafeError):
            sx.merge_checkpoint(path, tmp_path / target)
        with pytest.raises(UnsafeError):
            sx.diff_checkpoints(path, path)


def test_no_layout_is_advised_for_two_models(tmp_path: Path, call: CommandLine) -> None:
    for number in (1, 2):
        save_file({"w": torch.full((4, 4), float(number))}, tmp_path / f"v{number}.safetensors")
    code, _, err = call("merge", tmp_path, tmp_path / "out")
    assert code != 0
    assert "--layout" not in err
    for number in (1, 2):
        (tmp_path / f"v{number}.safetensors").rename(tmp_path / f"rank{number - 1}.safetensors")
    assert "--layout" in call("merge", tmp_path, tmp_path / "out")[2]


def test_a_whole_model_beside_files_of_ranks_is_no_rank_of_a_layout(tmp_path: Path) -> None:
    for name in ("rank0", "rank1", "model"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InvalidArgumentError, match="layout") as caught:
        sx.merge_checkpoint(tmp_path, tmp_path / "out", layout={"w": {"dim": 0}})
    assert caught.value.path == str(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert sx.merge_checkpoint(tmp_path, tmp_path / "out", layout={"w": {"dim": 0}}).nbytes == 16
