"""Rules for live state: copies are reduced, names renumbered, ties kept as in a merge of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import State, are_same, load_directory
from hypothesis import given, settings
from random_layouts import cut_by_rules
from safetensors.torch import save_file
from starting import THREADS_AND_PROCESSES
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def check_refusal(error: type[Exception], match: str, state: Any, out: Path, **options: Any) -> None:
    """Check that all ranks raise the same error, and that nothing is left."""
    with pytest.raises(error, match=match):
        sx.export_checkpoint(state, out, **options)
    sx.get_communicator().barrier()
    assert not out.exists()
    sx.get_communicator().barrier()


# Live ranks and files laid out alike


def merge_files(path: Path, states: list[State], layout: Any, **options: Any) -> State:
    """Return what a merge makes of the same state, written to one plain file per rank."""
    path.mkdir()
    for rank, state in enumerate(states):
        save_file({name: value.contiguous() for name, value in state.items()}, path / f"rank{rank}.safetensors")
    sx.merge_checkpoint(path, path / "out", layout=layout, **options)
    return load_directory(path / "out")


def export_as_files(path: Path, states_of: Callable[[], list[State]], layout: Any, **options: Any) -> State:
    """Return the export of the live ranks, after comparing it with the merge of their files."""
    comm = sx.get_communicator()
    states = states_of()
    sx.export_checkpoint(states[comm.rank], path / "live", layout=layout, **options)
    found = load_directory(path / "live")
    theirs = merge_files(path / f"files{comm.rank}", states, layout, **options)
    assert are_same(found, theirs)
    assert digests(path / "live") == digests(path / f"files{comm.rank}/out")
    comm.barrier()
    return found


def digests(path: Path) -> dict[str, Any]:
    """Return the manifest's entry of each tensor, without the ranks that supplied it."""
    tensors = json.loads((path / "statexchange.json").read_text())["tensors"]
    return {name: {**entry, "boxes": [box[:3] for box in entry["boxes"]]} for name, entry in tensors.items()}


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def scales() -> list[State]:
    seed = torch.Generator().manual_seed(1)
    states: list[State] = []
    for _ in range(3):
        values = torch.randint(-9, 9, (5, 7), generator=seed).float()
        state = {f"{str(dtype).removeprefix('torch.')}_scale": values.to(dtype) for dtype in DTYPES}
        state["nan_scale"] = torch.where(torch.rand(9, generator=seed) < 0.2, torch.nan, torch.randn(9, generator=seed))
        state["scalar_scale"] = torch.randn((), generator=seed)
        state["large_scale"] = torch.randn(1100, 1001, generator=seed)  # larger than one message
        states.append(state)
    return states


@pytest.mark.ranks(3, backend=THREADS_AND_PROCESSES)
def test_copies_are_reduced_as_in_files(tmp_path: Path) -> None:
    for reduce in ("max", "min"):
        path = tmp_path / f"{reduce}"
        path.mkdir(exist_ok=True)
        found = export_as_files(path, scales, {"*_scale": {"reduce": reduce}})
        states = scales()
        for name in ("large_scale", "nan_scale"):
            stacked = torch.stack([state[name] for state in states])
            expected = getattr(stacked, f"a{reduce}")(0)
            assert torch.equal(found[name].nan_to_num(99), expected.nan_to_num(99))


def cut_scales() -> list[State]:
    whole = torch.randn(2, 64, 90, generator=torch.Generator().manual_seed(2))
    return [
        {"s": whole[dp, :, 45 * tp : 45 * tp + 45].clone(), "w": whole[0, :, 45 * tp : 45 * tp + 45].clone()}
        for dp in range(2)
        for tp in range(2)
    ]


@pytest.mark.ranks(4, backend=THREADS_AND_PROCESSES)
def test_copies_that_are_cut_and_cast_are_reduced_as_in_files(tmp_path: Path) -> None:
    cut = {"dim": 1, "axis": "tp"}
    layout = {"mesh": {"dp": 2, "tp": 2}, "rules": {"s": [cut, {"reduce": "max"}], "w": cut}}
    for number, options in enumerate([{}, {"dtype": "bfloat16"}, {"replicas": "root"}]):
        path = tmp_path / str(number)
        path.mkdir(exist_ok=True)
        export_as_files(path, cut_scales, layout, **options)


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_a_reduction_does_not_change_the_state_and_complex_numbers_are_refused(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    mine = torch.full((3,), float(rank))
    future = sx.export_checkpoint({"s": mine}, tmp_path / "out", layout={"s": {"reduce": "max"}}, background=True)
    mine += 10
    future.result()
    assert load_directory(tmp_path / "out")["s"].tolist() == [1, 1, 1]
    assert mine.tolist() == [rank + 10.0] * 3
    layout = {"s": {"reduce": "max"}}
    complex_ = {"s": torch.zeros(2, dtype=torch.complex64)}
    check_refusal(sx.errors.UnsupportedError, "complex numbers.*'s'", complex_, tmp_path / "x", layout=layout)
    uneven = {"s": mine if rank else mine.bfloat16()}
    message = r"BF16, .* F32 .*'s', rank 1\b"
    check_refusal(sx.errors.CorruptError, message, uneven, tmp_path / "x", layout=layout, dtype="float16")


def exports_by_rules(layout: Any, states: list[State], out: str) -> None:
    sx.export_checkpoint(states[sx.get_communicator().rank], out, layout=layout)


@settings(max_examples=15)
@given(cut_by_rules())
def test_random_rules_give_the_same_export_as_files(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    layout, whole, states = case
    out = tmp_path_factory.mktemp("rules", numbered=True) / "out"
    run_ranks(exports_by_rules, len(states), backend="threads", args=(layout, states, str(out)))
    assert are_same(load_directory(out), whole)


MESH = {"pp": 2, "ep": 2, "tp": 1}


def experts() -> list[State]:
    """Return stages of 2 and 1 layers; each expert parallel rank has three experts of each layer, numbered from 0."""
    seed = torch.Generator().manual_seed(3)
    states: list[State] = []
    for layers in (2, 1):
        norms = torch.randn(layers, 4, generator=seed)
        for _ in range(2):
            state: State = {}
            for layer in range(layers):
                for expert in range(3):
                    state[f"layers.{layer}.experts.{expert}.gate_up"] = torch.randn(4, 2, generator=seed)
                state[f"layers.{layer}.norm"] = norms[layer].clone()
                state[f"layers.{layer}.amax"] = torch.randn(2, generator=seed)
            states.append(state)
    return states


@pytest.mark.ranks(4, backend=THREADS_AND_PROCESSES)
def test_experts_and_layers_are_renumbered_as_in_files(tmp_path: Path) -> None:
    layers, numbers = {"renumber": "layers", "axis": "pp"}, {"renumber": "experts", "axis": "ep"}
    split = {"dim": 0, "axis": [], "split": {"gate_up": {"gate": 1, "up": 1}}}
    rules = {
        "*.experts.*": [layers, numbers, split],
        "*.norm": layers,
        "*.amax": [layers, {"reduce": "max"}],
    }
    options = {"exclude": "*.experts.5.up", "rename": [("^layers", "model.layers")]}
    found = export_as_files(tmp_path, experts, {"mesh": MESH, "rules": rules}, **options)
    names = [f"model.layers.{n}.experts.{e}.{part}" for n in range(3) for e in range(6) for part in ("gate", "up")]
    names = [name for name in names if not name.endswith("5.up")]
    assert found.keys() == {*names, *(f"model.layers.{n}.{part}" for n in range(3) for part in ("norm", "amax"))}
    states = experts()
    assert torch.equal(found["model.layers.2.experts.4.up"], states[3]["layers.0.experts.1.gate_up"][2:])
    sx.export_checkpoint(
        states[sx.get_communicator().rank], tmp_path / "later", layout={"mesh": MESH, "rules": rules}, background=True
    ).result()
    assert load_directory(tmp_path / "later").keys() >= {"layers.2.experts.4.up", "layers.0.amax"}


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_names_that_cannot_be_renumbered_are_refused(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    layout = {"*.w": {"renumber": "experts"}}
    bad = {"experts.w": torch.ones(1)}
    check_refusal(
        ValueError,
        r"no number .*'experts\.w'",
        bad,
        tmp_path / "x",
        layout=layout,
    )
    state = {"experts.0.w": torch.ones(1), f"experts.{rank}.v": torch.ones(1)}
    twice = {"experts.0.w": torch.ones(1), **({"experts.1.v": torch.ones(1)} if rank else {})}
    rename = {"*.w": [{"renumber": "experts"}, {"dim": 0, "split": {"w": {"v": 1}}}]}
    message = r"two tensors.*'experts\.1\.v', rank 1\b"
    check_refusal(ValueError, message, twice, tmp_path / "x", layout=rename)
    sx.export_checkpoint(state, tmp_path / "out", layout=layout)
    assert sorted(load_directory(tmp_path / "out")) == ["experts.0.v", "experts.0.w", "experts.1.v", "experts.1.w"]


@pytest.mark.ranks(2, backend="threads")
def test_tied_tensors_keep_their_tie_under_new_names(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    weight = torch.full((2,), float(rank))
    state = {"experts.0.w": weight, "experts.0.tied": weight}
    report = sx.export_checkpoint(state, tmp_path / "out", layout={"experts.*": {"renumber": "experts"}})
    assert report.aliases == {"experts.0.tied": "experts.0.w", "experts.1.tied": "experts.1.w"}
    assert load_directory(tmp_path / "out")["experts.1.w"].tolist() == [1, 1]


# Statistics that differ between ranks


def exports_batch_norms(out: str) -> list[str]:
    rank = sx.get_communicator().rank
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))).sum().backward()
    try:
        sx.export_checkpoint(model, out)
    except sx.errors.ReplicaError as error:
        sx.export_checkpoint(model, out, replicas="root")
        mine = are_same(load_directory(out), dict(model.module.state_dict()))
        return [str(error), str(error.name), str(mine)]
    return []


def test_the_error_of_different_batch_norm_statistics_shows_the_option_that_takes_roots(tmp_path: Path) -> None:
    found = run_ranks(exports_batch_norms, 2, backend="gloo", args=(str(tmp_path / "out"),))
    assert [(name, mine) for _, name, mine in found] == [("1.running_mean", "True"), ("1.running_mean", "False")]
    assert all('replicas="root"' in text for text, _, _ in found)
