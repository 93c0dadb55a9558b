"""DeepSpeed's checkpoints: samples that it wrote itself, and directories in its layout, with what may be wrong."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from equality import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scripts import page_block, run_commands
from stored import DATA
from zero_files import check_written, fragment_address, merged, reported, write_zero

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.formats.registry import open_checkpoint
from statexchange.report.summary import summarize

SAMPLES = DATA / "deepspeed"  # see README.md there


def copy_of(kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLES / kind, tmp_path / kind))


def refused(error: type[StateExchangeError], match: str, path: Path, **options: Any) -> StateExchangeError:
    """Check that a merge raises this error and writes nothing; return the error."""
    out = path.parent / "refused"
    with pytest.raises(error, match=match) as caught:
        merge_checkpoint(path, out, **options)
    assert type(caught.value) is error
    assert not out.exists()
    return caught.value


# Checkpoints that DeepSpeed wrote


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero1_fp32_gradients", "zero2", "zero3", "pipeline", "experts"])
def test_each_tensor_is_that_which_deepspeed_reports(kind: str, tmp_path: Path) -> None:
    check_written(SAMPLES, kind, tmp_path)


def test_a_step_and_a_universal_checkpoint_have_the_same_tensors(tmp_path: Path) -> None:
    expected = reported(SAMPLES, "zero3", "oracle")
    assert_same(merged(SAMPLES / "zero3/global_step2", tmp_path), expected)
    assert_same(merged(SAMPLES / "universal", tmp_path), expected)
    with open_checkpoint(SAMPLES / "universal") as universal, open_checkpoint(SAMPLES / "zero3") as divided:
        assert set(divided) - set(universal) == {f"optimizer.groups.{group}.step" for group in range(3)}
        for name, tensor in universal.items():
            assert np.array_equal(tensor.read(), divided[name].read()), name


def of_the_training(step: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Merge the file of the model's states alone, which has the weights of the training."""
    options = {"section": "model", "exclude": "frozen_param_fragments.*"}
    return merged(step / "mp_rank_00_model_states.pt", tmp_path, **options)


def test_master_weights_in_the_dtype_of_the_training_are_its_weights(tmp_path: Path) -> None:
    assert_same(
        merged(SAMPLES / "zero2", tmp_path, dtype={"scale": "float32", "*": "bfloat16"}),
        of_the_training(SAMPLES / "zero2/global_step2", tmp_path),
    )


@pytest.mark.parametrize("kind", ["zero0", "experts"])
def test_a_merge_notes_that_fp32_weights_have_no_names(kind: str, tmp_path: Path) -> None:
    report = merge_checkpoint(SAMPLES / kind, tmp_path / "out")
    assert report.notes[0].startswith("these are the weights of the training, not the fp32 master weights: ")


def test_info_shows_sections_and_ranks() -> None:
    summary = summarize(SAMPLES / "zero2")
    assert (summary.kind, summary.world_size, summary.ranks) == ("deepspeed", 2, (0, 1))
    assert {name: section.num_tensors for name, section in summary.sections.items()} == {
        "model": 9,
        "optimizer": 12,
        "other": 0,
    }
    assert summary.aliases == {"model.head.weight": "model.embed.weight"}
    assert summary.others["epoch"] == "int 1"
    assert summary.others["optimizer.param_groups.0.weight_decay"] == "float 0.1"
    assert not summary.problems


def test_the_command_line_merges_compares_and_shows_a_checkpoint(tmp_path: Path, call: CommandLine) -> None:
    source, out = SAMPLES / "zero1", tmp_path / "out"
    assert call("merge", source, out)[0] == 0
    assert call("diff", source, out)[0] == 0
    assert call("merge", source, tmp_path / "rounded", "--dtype", "bfloat16")[0] == 0
    assert call("diff", source, tmp_path / "rounded")[0] == 1
    code, shown, _ = call("info", source)
    assert code == 0
    assert "kind        deepspeed\n" in shown
    assert "ranks       2 of 2: 0-1\n" in shown


def test_a_config_beside_the_steps_is_taken_with_the_dtype_that_is_written(tmp_path: Path) -> None:
    path = copy_of("zero2", tmp_path)
    (path / "config.json").write_text('{"dtype": "bfloat16"}')
    merge_checkpoint(path, tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == '{\n  "dtype": "float32"\n}\n'
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "statexchange.json"}


@pytest.mark.parametrize(
    ("numbers", "other"),
    [
        ({"num_hidden_layers": 9}, 9),
        ({"num_hidden_layers": 0}, 0),
        ({}, None),
        ({"num_hidden_layers": 0, "num_nextn_predict_layers": 1}, None),
    ],
)
def test_a_config_with_another_number_of_layers_is_named(
    numbers: dict[str, int], other: int | None, tmp_path: Path
) -> None:
    path = SAMPLES / "llama1"
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **numbers}))
    notes = merge_checkpoint(path, tmp_path / "out", files_from=tmp_path / "config.json").notes
    found = [note for note in notes if "num_hidden_layers" in note]
    assert len(found) == (0 if other is None else 1)
    assert all(f"num_hidden_layers is {other}" in note and "1 layer of model.layers" in note for note in found)
    part = merge_checkpoint(path, tmp_path / "part", files_from=tmp_path / "config.json", include="*.layers.0.*")
    assert not [note for note in part.notes if "num_hidden_layers" in note]


def test_the_commands_of_the_page_merge_a_checkpoint_of_zero_3(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "zero3", tmp_path / "run")
    run_commands(page_block("commands: deepspeed"), tmp_path)
    assert_same(
        {name: tensor.float() for name, tensor in load_file(tmp_path / "merged/model.safetensors").items()},
        {
            name: tensor.float()
            for name, tensor in reported(SAMPLES, "zero3", "oracle").items()
            if name != "head.weight"
        },
    )


# Directories made by hand


@st.composite
def groups_of_shapes(draw: st.DrawFn) -> list[list[tuple[int, ...]]]:
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    return draw(st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3))


@settings(max_examples=20, deadline=None)
@given(groups_of_shapes(), st.integers(1, 5), st.sampled_from([(2, False), (2, True), (3, False)]))
def test_tensors_of_any_shapes_on_any_number_of_ranks_are_restored(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[tuple[int, ...]]],
    world_size: int,
    kind: tuple[int, bool],
) -> None:
    stage, paddings = kind
    generator = torch.Generator().manual_seed(0)
    groups = []
    for number, of_group in enumerate(shapes):
        tensors = [torch.randn(shape, generator=generator) for shape in of_group]
        groups.append({f"g{number}.p{at}": tensor for at, tensor in enumerate(tensors)})
    path = tmp_path_factory.mktemp("zero")
    write_zero(path / "run", stage, groups, world_size, paddings=paddings)
    whole = {name: tensor for group in groups for name, tensor in group.items()}
    assert_same(merged(path / "run", path), whole)
    with open_checkpoint(path / "run") as checkpoint:
        for name, tensor in whole.items():
            assert np.array_equal(checkpoint[f"optimizer.state.{name}.exp_avg"].read(), -tensor.numpy())
    shutil.rmtree(path)


PARAMETERS = {"a.weight": torch.arange(21.0).reshape(7, 3), "a.bias": torch.arange(5.0), "c": torch.tensor(3.0)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buffers_frozen_and_tied_parameters_are_merged(stage: int, tmp_path: Path) -> None:
    buffers = {"seen": torch.tensor([3]), "empty": torch.empty(0)}
    frozen = {"f": torch.arange(7.0).bfloat16(), "g": torch.ones(2, 3).bfloat16()}
    shared = {"tied": "a.weight", "tied.frozen": "g"}
    write_zero(tmp_path / "run", stage, [PARAMETERS], 3, buffers=buffers, frozen=frozen, shared=shared)
    tied = {"tied": PARAMETERS["a.weight"], "tied.frozen": frozen["g"]}
    assert_same(merged(tmp_path / "run", tmp_path), {**buffers, **PARAMETERS, **frozen, **tied})


def test_a_save_is_loaded_into_a_module(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 7)
    with torch.no_grad():
        expected = {name: torch.randn_like(param) for name, param in net.named_parameters()}
    write_zero(tmp_path / "run", 3, [expected], 2)
    sx.load_checkpoint(net, tmp_path / "run")
    assert_same(net.state_dict(), expected)
    other = torch.nn.Linear(3, 7)
    sx.load_checkpoint({"model": other}, tmp_path / "run", include="model.*")
    assert_same(other.state_dict(), expected)


def test_a_merge_streams_in_bounded_memory(tmp_path: Path) -> None:
    write_zero(tmp_path / "run", 3, [{f"w{i}": torch.full((1000, 4000), float(i)) for i in range(4)}], 2)
    merge_checkpoint(tmp_path / "run", tmp_path / "first")
    tracemalloc.start()
    merge_checkpoint(tmp_path / "run", tmp_path / "second")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20  # the part of the 64 MB of weights that one rank has


# Broken checkpoints


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    for kind in ("zero2", "zero3"):
        path = copy_of(kind, tmp_path)
        (file,) = path.glob("global_step2/bf16_zero_pp_rank_1_*")
        file.unlink()
        error = refused(IncompleteError, "rank's part", path)
        assert (error.rank, error.path) == (1, str(file))
        refused(IncompleteError, "rank's part", path, section="optimizer")
        summary = summarize(path)
        assert [type(problem) for problem in summary.problems] == [IncompleteError]
        assert summary.num_unreadable > 5
    assert len(of_the_training(tmp_path / "zero2/global_step2", tmp_path)) == 9


def test_a_missing_models_file_of_a_rank_of_zero_3_is_named(tmp_path: Path) -> None:
    path = copy_of("zero3", tmp_path)
    (path / "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert refused(IncompleteError, "model's states", path).rank == 1
    (path / "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert refused(IncompleteError, "describes the model", path).rank == 0


def test_without_optimizer_states_only_the_models_weights_are_merged(tmp_path: Path) -> None:
    for kind, advice in (("zero3", "optimizer's states"), ("zero2", "mp_rank_00_model_states.pt alone")):
        path = copy_of(kind, tmp_path)
        for file in path.glob("global_step2/*optim_states.pt"):
            file.unlink()
        assert refused(IncompleteError, f"rank's part.*{advice}", path).rank == 0
    assert len(of_the_training(tmp_path / "zero2/global_step2", tmp_path)) == 9
    file = tmp_path / "zero3/global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"
    refused(UnsupportedError, "the directory", file)


@pytest.mark.parametrize("section", [None, "model", "all"])
@pytest.mark.parametrize("kind", ["zero3", "llama3"])
def test_one_file_of_zero3_has_no_values_whatever_is_read_of_it(kind: str, section: str | None, tmp_path: Path) -> None:
    (file,) = (DATA / "deepspeed").glob(f"{kind}/global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt")
    match = r"[0-9]+ tensors.*the directory"
    with pytest.raises(UnsupportedError, match=match):
        merge_checkpoint(file, tmp_path / "out", section=section)  # type: ignore[arg-type]
    name = "model.norm.weight" if kind == "llama3" else "norm.weight"
    with pytest.raises(UnsupportedError, match=match):
        sx.load_checkpoint({"module": {name: torch.empty(0)}}, file)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = copy_of("zero1", tmp_path)
    (file,) = path.glob("global_step2/bf16_zero_pp_rank_1_*")
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(CorruptError, "truncated", path).path == str(file)
    of_the_training(path / "global_step2", tmp_path)


def test_a_latest_file_that_names_an_absent_step_is_named(tmp_path: Path) -> None:
    path = copy_of("zero1", tmp_path)
    (path / "latest").write_text("global_step9")
    error = refused(IncompleteError, "'global_step9'.*global_step2", path)
    assert error.path == str(path / "latest")
    shutil.rmtree(path / "global_step2")
    refused(IncompleteError, "no other", path)
    for text in ("../zero1", "", "..", "a\nb", "x" * 300):
        (path / "latest").write_text(text)
        refused(NotFoundError, "neither a save", path)


def change(file: Path, key: str, value: Any) -> None:
    """Set an entry of a file of `write_zero`, or of its optimizer's state."""
    state = torch.load(file, weights_only=False)
    (state if key in state else state["optimizer_state_dict"])[key] = value
    torch.save(state, file)


WRONG: dict[str, tuple[int, str, str, Any, str]] = {
    "more ranks than files": (2, "mp_rank_00_model", "dp_world_size", 4, "rank's part"),
    "fewer ranks than files": (2, "mp_rank_00_model", "dp_world_size", 1, "of rank 1"),
    "other partitions": (2, "rank_1_mp_rank_00_optim", "partition_count", [3], "number of partitions"),
    "another stage": (3, "rank_1_mp_rank_00_optim", "zero_stage", 2, "what DeepSpeed writes"),
    "a short partition": (
        2,
        "rank_0_mp_rank_00_optim",
        "single_partition_of_fp32_groups",
        [torch.ones(3)],
        "end of its flat",
    ),
    "no group": (2, "rank_1_mp_rank_00_optim", "single_partition_of_fp32_groups", [], "0 flat buffers"),
    "a larger shape": (
        2,
        "mp_rank_00_model",
        "param_shapes",
        [{"a.weight": torch.Size([70, 3]), "a.bias": torch.Size([5]), "c": torch.Size([])}],
        "as this parameter",
    ),
    "a larger shape in ZeRO-3": (
        3,
        "rank_0_mp_rank_00_model",
        "param_shapes",
        [{"a.weight": torch.Size([70, 3])}],
        "as 1 parameters",
    ),
    "places that overlap": (
        2,
        "rank_0_mp_rank_00_optim",
        "param_slice_mappings",
        [{"a.weight": fragment_address(15, 0), "c": fragment_address(1, 14)}],
        "overlaps another",
    ),
    "a place of no parameter": (2, "mp_rank_00_model", "param_shapes", [{"a.bias": torch.Size([5])}], "'a.weight'"),
    "no places": (2, "rank_1_mp_rank_00_optim", "param_slice_mappings", None, "old release"),
    "a matrix": (2, "rank_1_mp_rank_00_optim", "single_partition_of_fp32_groups", [torch.ones(2, 8)], "flat one"),
    "tensor parallelism": (2, "mp_rank_00_model", "mp_world_size", 2, "ds_to_universal"),
    "no parameters by name": (2, "mp_rank_00_model", "param_shapes", [[1, 2]], "place of a dict"),
}


def test_the_first_problem_is_the_cause_of_the_others(tmp_path: Path) -> None:
    step = write_zero(tmp_path / "run", 3, [PARAMETERS], 2)
    change(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", "param_shapes", [{}])
    problems = summarize(tmp_path / "run").problems
    assert [problem.message for problem in problems][-1] == "the values of this parameter are in no file"
    assert len(problems) == 2
    refused(CorruptError, "as many elements", tmp_path / "run")
    refused(CorruptError, "as many elements", tmp_path / "run", section="optimizer")


@pytest.mark.parametrize("case", WRONG)
def test_contradictions_between_files_are_named(case: str, tmp_path: Path) -> None:
    stage, file, key, value, match = WRONG[case]
    step = write_zero(tmp_path / "run", stage, [PARAMETERS], 2)
    (found,) = [path for path in step.iterdir() if file in path.name]
    change(found, key, value)
    with pytest.raises(StateExchangeError, match=match) as caught:
        merge_checkpoint(tmp_path / "run", tmp_path / "out")
    assert type(caught.value) in (CorruptError, IncompleteError, UnsupportedError)
    assert caught.value.path is not None
    assert not (tmp_path / "out").exists()


def test_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    step = write_zero(tmp_path / "run", 2, [PARAMETERS], 2)
    file = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(file, step / f"bf16_{file.name}")
    assert refused(CorruptError, "two saves", tmp_path / "run").rank == 1


def test_the_places_of_parameters_are_those_of_param_slice_mappings(tmp_path: Path) -> None:
    path = copy_of("zero1", tmp_path)
    (model,) = path.glob("global_step2/mp_rank_00_model_states.pt")
    state = torch.load(model)
    (first, second) = state["param_shapes"]
    state["param_shapes"] = [dict(reversed(first.items())), second]  # as with round_robin_gradients
    torch.save(state, model)
    assert_same(merged(path, tmp_path), merged(SAMPLES / "zero1", tmp_path))
    state["param_shapes"] = [{**first, "up.weight": torch.Size([5, 7])}, second]
    torch.save(state, model)
    assert refused(CorruptError, "as this parameter", path).name == "up.weight"


def test_a_missing_file_of_an_expert_or_of_a_universal_parameter_is_named(tmp_path: Path) -> None:
    path = copy_of("experts", tmp_path)
    (path / "global_step2/layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    refused(IncompleteError, "expert 2", path)
    path = copy_of("universal", tmp_path)
    file = path / "global_step2/zero/up.weight/fp32.pt"
    file.unlink()
    assert refused(IncompleteError, "of a parameter", path).path == str(file)
    shutil.rmtree(file.parent)
    assert refused(IncompleteError, "of a parameter", path).name == "up.weight"
    refused(IncompleteError, "of a parameter", path, section="optimizer")
    path = copy_of("universal", tmp_path / "unfinished")
    for model in (path / "global_step2").glob("*model_states.pt"):  # which the conversion copies last
        model.unlink()
    refused(IncompleteError, "is missing", path / "global_step2")


def test_a_placeholder_without_values_is_refused(tmp_path: Path) -> None:
    step = write_zero(tmp_path / "run", 3, [PARAMETERS], 2)
    file = step / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(file)
    change(file, "module", {**state["module"], "other": torch.empty(0)})
    assert refused(IncompleteError, "in no file", tmp_path / "run").name == "other"


def test_a_hostile_number_of_ranks_costs_nothing(tmp_path: Path) -> None:
    step = write_zero(tmp_path / "run", 3, [PARAMETERS], 1)
    change(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", "dp_world_size", 1 << 60)
    assert refused(IncompleteError, "is missing", tmp_path / "run").rank == 1
    change(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", "dp_world_size", -1)
    refused(CorruptError, "number of ranks", tmp_path / "run")


def test_tensors_that_a_client_saved_do_not_become_the_models(tmp_path: Path) -> None:
    step = write_zero(tmp_path / "run", 2, [{"w": torch.ones(3)}], 2)
    file = step / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file), "model": {"w": torch.zeros(2)}, "mine": torch.ones(1)}, file)
    assert_same(merged(tmp_path / "run", tmp_path), {"w": torch.ones(3)})
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert {"client.model.w", "mine"} < set(checkpoint)


def test_a_frozen_tensor_without_elements_is_kept(tmp_path: Path) -> None:
    frozen = {"nothing": torch.empty(0, 4), "w": torch.full((3,), math.pi)}
    for stage in (2, 3):
        write_zero(tmp_path / f"run{stage}", stage, [{"v": torch.ones(2)}], 2, frozen=frozen)
        assert_same(merged(tmp_path / f"run{stage}", tmp_path), {"v": torch.ones(2), **frozen})


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [
        ("experts", "layer_0_expert_1_mp_rank_00_model_states.pt"),
        ("pipeline", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
    ],
)
def test_a_file_of_experts_or_of_a_stage_that_lacks_values_is_refused(tmp_path: Path, kind: str, damaged: str) -> None:
    """The error names a tensor, which is then in no section: it must not pass for one of another section."""
    job = copy_of(kind, tmp_path)
    (path,) = job.rglob(damaged)
    with zipfile.ZipFile(path) as file:
        members = {info: file.read(info) for info in file.infolist()}
    last = max((info.filename for info in members if "/data/" in info.filename), key=lambda name: int(Path(name).name))
    with zipfile.ZipFile(path, "w") as file:
        for info, content in members.items():
            if info.filename != last:
                file.writestr(info, content)
    for section in (None, "model", "all"):
        with pytest.raises(CorruptError, match="no storage"):
            sx.merge_checkpoint(job, tmp_path / "out", section=section)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["zero1", "zero1_fp32_gradients", "zero2", "llama1"])
def test_files_of_the_optimizer_that_are_swapped_are_refused(tmp_path: Path, kind: str) -> None:
    job = copy_of(kind, tmp_path)
    first, second = sorted(job.rglob("*_optim_states.pt"))
    first.rename(tmp_path / "other")
    second.rename(first)
    (tmp_path / "other").rename(second)
    refused(CorruptError, "swapped", job)


@pytest.mark.parametrize("section", [None, "model", "all"])
def test_a_missing_file_whose_names_are_unknown_is_named_whatever_the_patterns(
    tmp_path: Path, section: str | None
) -> None:
    path = copy_of("experts", tmp_path)
    (path / "global_step2/layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    refused(IncompleteError, "expert 2", path, section=section, include=["*.weight"])


def test_plain_values_of_the_job_are_shown_and_loaded(call: CommandLine) -> None:
    code, printed, _ = call("show", str(SAMPLES / "llama3"))
    assert code == 0
    assert "  global_steps: 2\n" in printed
    state = {"global_steps": 0, "checkpoint_parallel_dimensions": {"tp_degree": 0}}
    sx.load_checkpoint(state, SAMPLES / "llama3", strict=False)
    assert state == {"global_steps": 2, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}}


def test_a_plain_value_that_differs_between_stages_is_not_loaded(tmp_path: Path) -> None:
    path = copy_of("pipeline", tmp_path)
    file = path / "global_step2/bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    file.write_bytes(file.read_bytes().replace(b"clip_gradq\x0bG?", b"clip_gradq\x0bG@"))
    with pytest.raises(UnsupportedError, match="values in several files"):
        sx.load_checkpoint({"optimizer.clip_grad": 0.0}, path, strict=False)
