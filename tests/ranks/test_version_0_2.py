"""Saves, exports and workspaces that version 0.2 wrote (tests/data/version-0.2) are read, bit by bit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality import assert_same, load_directory
from safetensors.torch import load_file
from state_content import content, equal
from stored import DATA
from sweeps import slow
from version_states import (
    DTYPES,
    VALUES,
    State,
    all_kinds,
    cut_by_hand,
    drawn,
    plain_of,
    read_expected,
    replica,
    sharded,
    tensors_of,
    whole_tensors,
)

import statexchange as sx
from statexchange.report.scan import scan
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

SAMPLES = DATA / "version-0.2"
SAVES = ("all_kinds/save", "fsdp/save", "fsdp_tp/save", "replicas/save", "layout/save", "steps/saves/step-000000030")
EXPORTS = ("fsdp/export", "fsdp/files", "fsdp_tp/export", "fsdp_tp/files", "replicas/export", "layout/export")
ALIASES = {"second.weight": "first.weight"}


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Return a copy, since git does not keep the modes of directories."""
    copy = tmp_path / "version-0.2"
    shutil.copytree(SAMPLES, copy)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copy


@pytest.fixture
def _restored_generators() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def check_loaded(state: State, sample: str, path: str = "save", **options: Any) -> None:
    """Load a sample into a state that has other content, and compare all of it. Collective."""
    tensors, plain = read_expected(SAMPLES / sample)
    assert plain_of(state) != plain
    sx.load_checkpoint(state, SAMPLES / sample / path, **options)
    assert_same(tensors_of(state), tensors)
    assert json.loads(json.dumps(plain_of(state))) == plain


def model_of(sample: str) -> dict[str, torch.Tensor]:
    """Return the expected tensors of a sample's model, without a second name of a tensor."""
    tensors = load_file(SAMPLES / sample / "expected.safetensors")
    model = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    return {name: tensor for name, tensor in model.items() if name not in ALIASES}


needs_all_dtypes = pytest.mark.skipif(not hasattr(torch, DTYPES[-1]), reason="this torch lacks dtypes of the sample")


# Into live state


@needs_all_dtypes
@pytest.mark.usefixtures("_restored_generators")
def test_a_save_of_all_kinds_of_state_is_loaded() -> None:
    state = all_kinds(0)
    sx.load_checkpoint(state, SAMPLES / "all_kinds/save")
    check_all_kinds(state)
    assert drawn() == json.loads((SAMPLES / "all_kinds/drawn.json").read_text())


def check_all_kinds(state: State) -> None:
    tensors, plain = read_expected(SAMPLES / "all_kinds")
    assert_same(tensors_of(state), tensors)
    assert json.loads(json.dumps(plain_of(state))) == plain
    assert equal(content(state["values"]), content(VALUES))
    assert repr(state["values"]["floats"]) == repr(VALUES["floats"])  # -0.0, too
    assert state["model"].second.weight is state["model"].first.weight
    shapes, containers = state["shapes"], state["containers"]
    assert shapes["shared"].data_ptr() == shapes["shared again"].data_ptr()
    assert [type(value).__name__ for value in containers.values()] == ["list", "tuple", "OrderedDict", "dict"]


@needs_all_dtypes
def test_a_save_of_one_rank_is_loaded_on_two() -> None:
    def load() -> None:
        state = all_kinds(0)
        del state["random"]
        sx.load_checkpoint(state, SAMPLES / "all_kinds/save", exclude="random.*")
        check_all_kinds(state)

    run_ranks(load, 2)


@pytest.mark.parametrize("sample", ["fsdp", "fsdp_tp"])
def test_a_sharded_save_is_loaded_on_one_rank(sample: str) -> None:
    check_loaded(sharded(3, "alone"), sample, exclude="random.*" if sample == "fsdp" else ())


def load_sharded() -> None:
    """Load each save and export of sharded models into a model that is sharded over all ranks. For ranks."""
    for sample in ("fsdp", "fsdp_tp"):
        state = sharded(3, "fsdp")
        has_random_states = sample == "fsdp" and sx.get_world_size() == 2
        if has_random_states:
            state["random"] = sx.integrations.RandomState()
        check_loaded(state, sample, exclude=() if has_random_states or sample != "fsdp" else "random.*")
        if has_random_states:
            assert drawn() == json.loads((SAMPLES / f"fsdp/drawn-{sx.get_rank()}.json").read_text())
        model = sharded(4, "fsdp")["model"]
        sx.load_checkpoint(model, SAMPLES / sample / "export")
        assert_same(tensors_of(model), model_of(sample))


@pytest.mark.parametrize("world_size", [2, slow(3), slow(4)])
def test_sharded_saves_are_loaded_on_several_ranks(world_size: int) -> None:
    run_ranks(load_sharded, world_size, backend="gloo", timeout_s=120)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_save_of_replicas_is_loaded(world_size: int) -> None:
    def load() -> None:
        state = replica(3, sx.get_rank())
        cursor = state.pop("cursor")
        check_loaded(state, "replicas", exclude="cursor.*")
        state = {**replica(3, 7), "cursor": cursor}
        if world_size == 4:
            sx.load_checkpoint(state, SAMPLES / "replicas/save")
            assert state["cursor"] == [sx.get_rank(), 1]
        else:  # each rank's own, of four
            with pytest.raises(sx.errors.StateExchangeError, match="cursor"):
                sx.load_checkpoint(state, SAMPLES / "replicas/save")

    run_ranks(load, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["save", "export"])
def test_tensors_that_were_cut_by_hand_are_loaded(name: str, world_size: int) -> None:
    def load() -> None:
        rank = sx.get_rank()
        parts, layout = cut_by_hand(whole_tensors(5), rank, world_size)
        expected, _ = cut_by_hand(model_of("layout"), rank, world_size)
        state = {"model": parts, "step": 5} if name == "save" else parts
        sx.load_checkpoint(state, SAMPLES / "layout" / name, layout=layout)
        assert_same(parts, expected)
        assert state.get("step", 1) == 1

    run_ranks(load, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_saves_of_a_job_are_loaded_and_go_on(world_size: int, samples: Path) -> None:
    def load() -> None:
        saves = sx.Checkpoints(samples / "steps/saves", keep=2)
        assert saves.steps() == [20, 30]
        state = replica(3, sx.get_rank())
        state = {**state, "cursor": None} if world_size == 2 else state
        tensors, plain = read_expected(SAMPLES / "steps")
        report = saves.load(state, exclude=() if world_size == 2 else "cursor.*")
        assert report is not None
        assert report.step == 30
        assert state.pop("cursor") == ([sx.get_rank(), 30] if world_size == 2 else [0, 3])
        assert_same(tensors_of(state), tensors)
        assert json.loads(json.dumps(plain_of(state))) == plain
        saves.save(state, 40)

    run_ranks(load, world_size)
    assert sx.Checkpoints(samples / "steps/saves").steps() == [30, 40]


# Offline


@pytest.mark.parametrize("name", [*SAVES, *EXPORTS, "sealed/sealed", "sealed/merged"])
def test_a_checkpoint_is_whole_and_merged(name: str, tmp_path: Path) -> None:
    sample = name.partition("/")[0]
    expected = load_file(SAMPLES / sample / "expected.safetensors") if sample == "sealed" else model_of(sample)
    if name.endswith("files"):
        expected = {key: tensor.to(torch.bfloat16) for key, tensor in expected.items()}
    report = verify(SAMPLES / name)
    assert (report.findings, report.num_unproven) == ((), 0)
    assert [row.status for row in scan(SAMPLES / name)] == ["whole"]
    # That one has more tensors, of no section that is known.
    choice: State = {"include": "model.*", "rename": [(r"^model\.", "")]} if sample == "all_kinds" else {}
    sx.merge_checkpoint(SAMPLES / name, tmp_path / "merged", **choice)
    assert_same(load_directory(tmp_path / "merged"), expected)
    if "first.weight" in expected:
        model = replica(3, 0)["model"]
        sx.load_checkpoint(model, tmp_path / "merged")
        assert_same(tensors_of(model), {**expected, **{tied: expected[kept] for tied, kept in ALIASES.items()}})


def test_the_older_save_of_a_job_differs_from_the_newer() -> None:
    steps = SAMPLES / "steps/saves"
    report = sx.diff_checkpoints(steps / "step-000000020", steps / "step-000000030")
    assert report.differing
    assert not sx.diff_checkpoints(SAMPLES / "fsdp/save", SAMPLES / "fsdp/export").differing


# Workspaces


def test_the_newest_round_of_a_workspace_is_read_and_written_on(samples: Path) -> None:
    workspace = sx.NFSWorkspace(samples / "workspace/ws", run="r")
    for rank in range(2):
        config, weights = workspace.read_configs_and_weights_from_rank(rank)
        assert (config["rank"], config["number"]) == (rank, 2)
        assert equal(content(config["values"]), content(VALUES))
        assert_same(dict(weights), load_file(SAMPLES / f"workspace/expected-{rank}.safetensors"))
    # Their weights differ, and nothing else is wrong.
    assert {type(finding) for finding in verify(samples / "workspace/ws").findings} == {sx.errors.ReplicaError}

    def write() -> None:
        written = sx.NFSWorkspace(samples / "workspace/ws", run="r")
        written.write_configs_and_weights({"rank": sx.get_rank()}, {"w": torch.ones(1)})

    run_ranks(write, 2)
    for rank in range(2):
        assert workspace.read_configs_and_weights_from_rank(rank)[0] == {"rank": rank}


def test_a_committed_round_is_merged_and_loaded(samples: Path, tmp_path: Path) -> None:
    (expected,) = load_file(SAMPLES / "round/expected.safetensors").values()
    assert verify(samples / "round/ws").findings == ()
    sx.merge_checkpoint(samples / "round/ws", tmp_path / "merged")
    assert_same(load_directory(tmp_path / "merged"), {"w": expected})

    def load() -> None:
        state = {"w": torch.zeros(2, 3)}
        sx.load_checkpoint(state, samples / "round/ws", layout={"w": {"dim": 0}})
        assert_same(state, {"w": expected.chunk(2)[sx.get_rank()]})

    run_ranks(load, 2)
