"""Checkpoints of Megatron: samples that Megatron-Core wrote (tests/data/megatron) are read as it reads them itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_samples import ITERATION, RANK_FILE, SAMPLES, rewrite
from megatron_states import check_expected, check_legacy, merged, read

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.formats.registry import open_source
from statexchange.report.summary import summarize
from statexchange.report.value_checks import CHECKS
from statexchange.report.verify import verify


@pytest.mark.parametrize("sample", SAMPLES)
def test_torch_dist_has_what_megatron_loads(megatron: Path, sample: str) -> None:
    assert check_expected(megatron / sample) == SAMPLES[sample][0]


@pytest.mark.parametrize("sample", SAMPLES)
def test_mp_rank_directories_have_the_model_of_torch_dist(megatron: Path, sample: str, tmp_path: Path) -> None:
    assert check_legacy(megatron / sample, tmp_path) == SAMPLES[sample][1]


def test_a_summary_shows_sections_arguments_and_the_iteration(megatron: Path) -> None:
    summary = summarize(megatron / "tp2_pp2/torch_dist")
    assert (summary.kind, summary.step, summary.ranks) == ("megatron torch_dist", 7, (0, 1, 2, 3))
    counts = {name: section.num_tensors for name, section in summary.sections.items()}
    assert (counts["model"], counts["optimizer"]) == (13, 12)
    assert summary.others["args"] == "tensor parallel 2, pipeline parallel 2, expert parallel 1"
    assert summary.others["content_metadata.distrib_optim_sharding_type"] == "str 'dp_reshardable'"
    assert summary.others["opt_param_scheduler.num_steps"] == "int 448"

    summary = summarize(megatron / "tp2_pp2/legacy")
    assert (summary.kind, summary.step, summary.world_size) == ("megatron ranks", 7, 4)
    assert summary.sections["model"].num_tensors == 23
    assert summary.others["distrib_optim.pt"] == "flat buffers of the distributed optimizer, not read"
    assert summary.others["iteration"] == "int 7"


def test_each_ranks_optimizer_and_random_state_have_its_directory_in_their_names(
    megatron: Path, tmp_path: Path
) -> None:
    found = merged(megatron / "pp2_tied/legacy", tmp_path / "optimizer", section="optimizer")
    assert found["mp_rank_00_001.optimizer.optimizer.state.0.exp_avg"].shape == (8, 8)
    assert len(found) == 60
    found = merged(megatron / "pp2_tied/legacy", tmp_path / "rng", section="rng")
    assert found.keys() == {f"mp_rank_00_00{rank}.rng_state.0.torch_rng_state" for rank in (0, 1)}


def test_flat_buffers_of_an_optimizer_are_named_and_are_not_the_models(megatron: Path, tmp_path: Path) -> None:
    others = summarize(megatron / "tp2_pp2/torch_dist").others
    assert others["optimizer.param_state_sharding_type"] == "str 'dp_reshardable'"
    assert not any("optimizer" in name for name in merged(megatron / "tp2_pp2/torch_dist", tmp_path / "out"))
    assert "optimizer" not in summarize(megatron / "pp2_tied/torch_dist").others
    names = merged(megatron / "pp2_tied/torch_dist", tmp_path / "optimizer", section="optimizer").keys()
    assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in names


def test_values_of_flat_buffers_are_not_checked(torch_dist: Path) -> None:
    """Megatron writes uninitialised memory between the parameters: some of the sample's is NaN."""
    report = verify(torch_dist, checks=CHECKS)
    assert (report.findings, report.num_boxes) == ((), 303)


def test_an_iteration_opens_by_its_own_directory(megatron: Path) -> None:
    for kind in ("torch_dist", "legacy"):
        run = megatron / "tp2_pp2" / kind
        of_run, of_iteration = read(run), read(run / ITERATION)
        assert of_run.keys() == of_iteration.keys()
        assert all(of_run[name][1].tobytes() == of_iteration[name][1].tobytes() for name in of_run)


def test_the_runs_file_names_the_iteration_that_is_read(legacy: Path) -> None:
    shutil.copytree(legacy / ITERATION, legacy / "iter_0000009")
    with open_source(legacy) as source:
        assert all(ITERATION in shard_file.path for shard_file in source.files)
    tracker = legacy / "latest_checkpointed_iteration.txt"
    tracker.write_text("9\n")
    with open_source(legacy) as source:
        assert all("iter_0000009" in shard_file.path for shard_file in source.files)
    (legacy / "iter_0000009").rename(legacy / "release")
    tracker.write_text("release")
    with open_source(legacy) as source:
        assert all("release" in shard_file.path for shard_file in source.files)
    tracker.write_text("9")
    with pytest.raises(IncompleteError, match=r"iter_0000009.*iter_0000007, release"):
        open_source(legacy)
    tracker.write_text("../../etc")
    with pytest.raises(CorruptError, match="name of a step"):
        open_source(legacy)
    tracker.unlink()
    with pytest.raises(InvalidArgumentError, match=r"contains checkpoints \(iter_0000007\)"):
        open_source(legacy)


def test_an_iteration_of_an_unknown_format_is_named(legacy: Path) -> None:
    shutil.rmtree(legacy / ITERATION)
    (legacy / ITERATION).mkdir()
    with pytest.raises(IncompleteError, match=r"metadata\.json.*mp_rank_\*"):
        open_source(legacy)


FAULTS_OF_TORCH_DIST: dict[str, tuple[Callable[[Path], object], type[StateExchangeError], str]] = {
    "no common.pt": (lambda path: (path / "common.pt").unlink(), IncompleteError, "copy this file, too.*common.pt"),
    "no metadata.json": (
        lambda path: (path / "metadata.json").unlink(),
        IncompleteError,
        r"metadata\.json, which Megatron writes last, is missing",
    ),
    "no .metadata": (lambda path: (path / ".metadata").unlink(), IncompleteError, "torch writes last"),
    "a missing .distcp": (
        lambda path: (path / "__1_0.distcp").unlink(),
        IncompleteError,
        r"rank 1.*__1_0\.distcp",
    ),
    "a truncated .distcp": (
        lambda path: (path / "__1_0.distcp").write_bytes((path / "__1_0.distcp").read_bytes()[:-3000]),
        CorruptError,
        r"truncated.*rank 1.*__1_0\.distcp|rank 1.*__1_0\.distcp.*truncated",
    ),
    "another backend": (
        lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        UnsupportedError,
        "sharded_backend is 'zarr'",
    ),
    "broken JSON": (
        lambda path: (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"'),
        CorruptError,
        "broken JSON",
    ),
    "a truncated common.pt": (
        lambda path: (path / "common.pt").write_bytes((path / "common.pt").read_bytes()[:-30]),
        CorruptError,
        r"common\.pt",
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_TORCH_DIST)
def test_damage_of_torch_dist_is_named(torch_dist: Path, tmp_path: Path, fault: str) -> None:
    damage, kind, match = FAULTS_OF_TORCH_DIST[fault]
    damage(torch_dist / ITERATION)
    with pytest.raises(kind, match=rf"(?s){match}"):
        merge_checkpoint(torch_dist, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_model_is_merged_if_only_the_optimizers_file_is_gone(torch_dist: Path, tmp_path: Path) -> None:
    """torch chooses the file of a tensor among a rank's two, so one is removed if it has no part of the model."""
    expected = merged(torch_dist, tmp_path / "whole")
    with open_source(torch_dist) as source:
        only_optimizer = [
            shard_file.path
            for shard_file in source.files
            if shard_file.tensors and all(name.startswith("optimizer.") for name in shard_file.tensors)
        ]
    for path in only_optimizer:
        Path(path).unlink()
    found = merged(torch_dist, tmp_path / "out")
    assert {name: values.tobytes() for name, values in found.items()} == {
        name: values.tobytes() for name, values in expected.items()
    }


class Unknown:
    """An object of a class that no reader knows."""

    def __init__(self) -> None:
        self.value = 7


class Calling:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return print, ("the reader has called me",)


def test_objects_of_unknown_classes_in_common_pt_are_named(torch_dist: Path, tmp_path: Path) -> None:
    rewrite(torch_dist / ITERATION / "common.pt", lambda state: state.update(extra=Unknown()))
    assert summarize(torch_dist).others["extra"] == "opaque test_megatron_formats.Unknown"
    assert len(merged(torch_dist, tmp_path / "out")) == 13


def test_a_refused_common_pt_does_not_stop_the_model(
    torch_dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(torch_dist / ITERATION / "common.pt", lambda state: state.update(extra=Calling()))
    assert "print, which is not known to be harmless" in summarize(torch_dist).others["common.pt"]
    assert len(merged(torch_dist, tmp_path / "out")) == 13
    assert "called" not in capsys.readouterr().out


def test_a_refused_file_of_a_rank_is_refused(legacy: Path) -> None:
    rewrite(legacy / ITERATION / "mp_rank_00_001" / RANK_FILE, lambda state: state.update(extra=Calling()))
    with pytest.raises(UnsafeError, match="mp_rank_00_001"):
        open_source(legacy)
