"""Ranks and parameters of Megatron: missing, contradicting, older and divided ones."""

from __future__ import annotations

import argparse
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from megatron_samples import ITERATION, RANK_FILE, rewrite
from megatron_states import merged
from scripts import page_block, run_commands
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    ReplicaError,
    UnsupportedError,
)
from statexchange.formats.megatron_ranks import division_of
from statexchange.formats.registry import open_source
from statexchange.report.summary import summarize
from statexchange.sharding.sharding_spec import DimSplit, local_boxes


def test_a_missing_rank_is_named_by_its_directory(legacy: Path, tmp_path: Path) -> None:
    shutil.rmtree(legacy / ITERATION / "mp_rank_01_001")
    with pytest.raises(IncompleteError, match="1 of 4 ranks") as caught:
        merge_checkpoint(legacy, tmp_path / "out")
    assert caught.value.path.endswith("mp_rank_01_001")
    summary = summarize(legacy)
    assert [problem.code for problem in summary.problems] == ["INCOMPLETE"]
    assert summary.num_tensors
    shutil.rmtree(legacy / ITERATION / "mp_rank_00_000")
    with pytest.raises(IncompleteError, match="2 of 4 ranks") as caught:
        open_source(legacy)
    assert caught.value.path.endswith("mp_rank_00_000")


def test_a_rank_without_its_file_is_named(legacy: Path) -> None:
    (legacy / ITERATION / "mp_rank_01_000" / RANK_FILE).unlink()
    with pytest.raises(IncompleteError, match=r"model_optim_rng\.pt") as caught:
        open_source(legacy)
    assert "mp_rank_01_000" in caught.value.path


def test_a_truncated_file_of_a_rank_is_named(legacy: Path) -> None:
    path = legacy / ITERATION / "mp_rank_01_000" / RANK_FILE
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CorruptError, match="mp_rank_01_000"):
        open_source(legacy)


def test_a_rank_of_another_run_is_named(legacy: Path) -> None:
    shutil.copytree(legacy / ITERATION / "mp_rank_00_000", legacy / ITERATION / "mp_rank_02_000")
    with pytest.raises(IncompleteError, match="no such rank") as caught:
        open_source(legacy)
    assert caught.value.path.endswith("mp_rank_02_000")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: setattr(state["args"], "tensor_model_parallel_size", 4),
        lambda state: state.update(iteration=8),
    ],
)
def test_ranks_that_contradict_each_other_are_named(legacy: Path, change: Callable[[Any], None]) -> None:
    rewrite(legacy / ITERATION / "mp_rank_01_000" / RANK_FILE, change)
    with pytest.raises(IncompleteError, match="another save") as caught:
        open_source(legacy)
    assert caught.value.path.endswith("mp_rank_01_000")


def test_layers_that_are_missing_are_named(legacy: Path) -> None:
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        rewrite(
            legacy / ITERATION / name / RANK_FILE,
            lambda state: state.update(model={k: v for k, v in state["model"].items() if ".layers." not in k}),
        )
    with pytest.raises(IncompleteError, match="layers") as caught:
        open_source(legacy)
    assert (caught.value.expected, caught.value.found) == ("2 layers", "1 layers")
    assert caught.value.path.endswith("mp_rank_00_001")


def test_a_file_without_the_runs_arguments_is_named(legacy: Path) -> None:
    for path in legacy.rglob(RANK_FILE):
        rewrite(path, lambda state: state.pop("args"))
    with pytest.raises(CorruptError, match="no 'args'"):
        open_source(legacy)


def test_a_parameter_of_an_unknown_name_is_refused_unless_it_is_excluded(legacy: Path, tmp_path: Path) -> None:
    for path in legacy.rglob(RANK_FILE):
        rewrite(path, lambda state: state["model"].update({"decoder.layers.0.mixer.weight": torch.ones(4, 4)}))
    with pytest.raises(UnsupportedError, match="tensor parallelism") as caught:
        merge_checkpoint(legacy, tmp_path / "out")
    assert caught.value.name == "decoder.layers.0.mixer.weight"
    found = merged(legacy, tmp_path / "out", section="model", exclude="*.mixer.*")
    assert len(found) == 23


def test_copies_of_a_tied_embedding_must_be_equal(megatron: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(megatron / "pp2_tied/legacy", tmp_path / "legacy"))
    with open_source(run, section="model") as source:
        names = {name for shard_file in source.files for name in shard_file.tensors}
    assert "embedding.word_embeddings.weight" in names
    assert "output_layer.weight" not in names

    def change(state: dict[str, Any]) -> None:
        state["model"]["output_layer.weight"][3, 3] += 1

    rewrite(run / ITERATION / "mp_rank_00_001" / RANK_FILE, change)
    with pytest.raises(ReplicaError, match="word_embeddings"):
        merge_checkpoint(run, tmp_path / "out")


def test_one_rank_alone_is_refused(megatron: Path, tmp_path: Path) -> None:
    directory = megatron / "tp2_pp2/legacy" / ITERATION / "mp_rank_00_000"
    for path in (directory, directory / RANK_FILE):
        with pytest.raises(InvalidArgumentError, match=rf"one rank's part.*{ITERATION} "):
            open_source(path)
    shutil.copy(directory / RANK_FILE, tmp_path)
    for path in (tmp_path, tmp_path / RANK_FILE):
        with pytest.raises(InvalidArgumentError, match=r"mp_rank_\*"):
            open_source(path)


def test_a_run_of_one_rank_is_read(tmp_path: Path) -> None:
    alone = tmp_path / "mp_rank_00"
    alone.mkdir()
    of_one_rank = argparse.Namespace(tensor_model_parallel_size=1, num_layers=1)
    state = {"model": {"decoder.layers.0.mlp.linear_fc1.weight": torch.ones(3)}, "args": of_one_rank, "iteration": 7}
    torch.save(state, alone / RANK_FILE)
    assert merged(tmp_path, tmp_path / "out").keys() == {"decoder.layers.0.mlp.linear_fc1.weight"}


def test_metadata_of_older_releases_is_read(torch_dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their metadata and plans are of Megatron's own classes."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)
    for parent in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    module.MCoreMetadata = type("MCoreMetadata", (Metadata,), {"__module__": name})  # type: ignore[attr-defined]
    module.MCoreSavePlan = type("MCoreSavePlan", (SavePlan,), {"__module__": name})  # type: ignore[attr-defined]
    path = torch_dist / ITERATION / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    plans = [module.MCoreSavePlan(plan.items, planner_data={"fragments": 3}) for plan in metadata.all_local_plans]
    changed = module.MCoreMetadata(metadata.state_dict_metadata, storage_data=metadata.storage_data)
    changed.all_local_plans, changed.mcore_data = plans, {"w": {"nd_reformulated_orig_global_shape": (2, 2)}}
    path.write_bytes(pickle.dumps(changed))
    assert b"MCoreSavePlan" in path.read_bytes()
    assert len(merged(torch_dist, tmp_path / "out")) == 13


def test_grouped_experts_are_numbered_and_divided(tmp_path: Path) -> None:
    """Transformer Engine's names; made by hand, since it needs a GPU. Tensor and expert parallel ranks: 2 x 2."""
    gate = torch.arange(4 * 8 * 3, dtype=torch.float32).reshape(4, 8, 3)  # experts, halves of 4 rows, inputs
    down = torch.arange(4 * 3 * 4, dtype=torch.float32).reshape(4, 3, 4)
    arguments = argparse.Namespace(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, num_experts=4, num_layers=1
    )
    for tensor, expert in ((0, 0), (1, 0), (0, 1), (1, 1)):
        model = {}
        for number in range(2):
            rows = gate[2 * expert + number].reshape(2, 4, 3)[:, 2 * tensor : 2 * tensor + 2].reshape(4, 3)
            columns = down[2 * expert + number][:, 2 * tensor : 2 * tensor + 2]
            model[f"decoder.layers.0.mlp.experts.linear_fc1.weight{number}"] = rows.clone()
            model[f"decoder.layers.0.mlp.experts.linear_fc2.weight{number}"] = columns.clone()
        directory = tmp_path / ITERATION / f"mp_rank_{tensor:02d}_{expert:03d}"
        directory.mkdir(parents=True)
        torch.save({"model": model, "args": arguments, "iteration": 7}, directory / RANK_FILE)
    found = merged(tmp_path / ITERATION, tmp_path / "out")
    for number in range(4):
        assert (found[f"decoder.layers.0.mlp.experts.linear_fc1.weight{number}"] == gate[number].numpy()).all()
        assert (found[f"decoder.layers.0.mlp.experts.linear_fc2.weight{number}"] == down[number].numpy()).all()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"expert_model_parallel_size": 2, "num_experts": 4}, "weight1"),
        ({"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}, "linear_fc2.weight0"),
    ],
)
def test_experts_whose_division_is_unknown_are_refused(tmp_path: Path, arguments: dict[str, int], name: str) -> None:
    for rank in range(2):
        tensor = f"{rank:02d}" if "tensor_model_parallel_size" in arguments else f"00_{rank:03d}"
        directory = tmp_path / ITERATION / f"mp_rank_{tensor}"
        directory.mkdir(parents=True)
        model = {f"decoder.layers.0.mlp.experts.{name}": torch.ones(4, 4)}
        torch.save({"model": model, "args": argparse.Namespace(**arguments)}, directory / RANK_FILE)
    with pytest.raises(UnsupportedError, match=r"experts.*leave .* out"):
        merge_checkpoint(tmp_path / ITERATION, tmp_path / "out")


DIVISIONS = {
    ("embedding.word_embeddings.weight", (8, 6), None): (0, 1),
    ("output_layer.weight", (8, 6), None): (0, 1),
    ("decoder.layers.0.self_attention.linear_qkv.bias", (8,), None): (0, 1),
    ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", (6,), None): (None, 1),
    ("decoder.layers.0.self_attention.q_layernorm.weight", (6,), None): (None, 1),
    ("decoder.layers.0.self_attention.linear_proj.weight", (6, 3), None): (1, 1),
    ("decoder.layers.0.mlp.linear_fc2.bias", (6,), None): (None, 1),
    ("decoder.layers.0.mlp.linear_fc1.weight", (8, 6), (6, 4)): (0, 2),
    ("decoder.layers.0.mlp.linear_fc1.weight", (8, 6), (6, 8)): (0, 1),
    ("decoder.layers.0.mlp.experts.linear_fc1.weight3", (8, 6), (6, 4)): (0, 2),
    ("decoder.layers.0.mlp.router.weight", (4, 6), None): (None, 1),
}


@pytest.mark.parametrize("case", DIVISIONS, ids=lambda case: case[0])
def test_parameters_are_divided_as_their_names_show(case: tuple[str, tuple[int, ...], tuple[int, ...] | None]) -> None:
    dim, blocks = DIVISIONS[case]
    assert division_of(*case) == (None if dim is None else DimSplit(dim, blocks))


def test_a_gated_parameter_is_divided_by_halves() -> None:
    whole = np.arange(16).reshape(8, 2)
    split = division_of("mlp.linear_fc1.weight", (4, 2), (2, 2))
    found = np.zeros_like(whole)
    for rank in range(2):
        part = np.concatenate([whole[2 * rank : 2 * rank + 2], whole[4 + 2 * rank : 6 + 2 * rank]])
        for box, (begin, _) in local_boxes(whole.shape, [2], [rank], [split]):
            found[box.offsets[0] : box.ends[0]] = part[begin : begin + box.shape[0]]
    assert found.tolist() == whole.tolist()


def test_a_linear_fc1_that_fits_no_linear_fc2_is_refused() -> None:
    for sibling in (None, (6, 3), (6,)):
        with pytest.raises(UnsupportedError, match="gated"):
            division_of("mlp.linear_fc1.weight", (8, 6), sibling)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda run: shutil.rmtree(run / ITERATION / "mp_rank_00_001"), 5),
        (lambda run: (run / ITERATION / "mp_rank_00_001" / RANK_FILE).write_bytes(b"PK\3\4"), 4),
        (lambda run: shutil.rmtree(run / ITERATION), 5),
    ],
)
def test_the_command_line_exits_with_the_code_of_the_damage(
    legacy: Path, tmp_path: Path, call: CommandLine, damage: Callable[[Path], object], code: int
) -> None:
    damage(legacy)
    for arguments in (["info", legacy], ["merge", legacy, tmp_path / "out"]):
        assert call.json(*arguments)[0] == code


def test_the_commands_of_the_page_print_what_it_shows(megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron / "tp2_pp2/torch_dist", tmp_path / "checkpoints")
    shutil.copytree(megatron / "tp2_pp2/legacy", tmp_path / "old")
    run_commands(page_block("commands: megatron"), tmp_path)
