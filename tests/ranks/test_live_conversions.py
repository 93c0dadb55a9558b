"""Conversions of live state: export in another family's names and values, load from them, on any sharding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality import State, are_same, load_directory
from safetensors.torch import load_file, save_file
from stored import DATA

import statexchange as sx
from statexchange.errors import CorruptError, InvalidArgumentError, NotFoundError, UnsafeError
from statexchange.testing import run_ranks

TORCHTITAN = DATA / "torchtitan"
LLAMA3, BACK = "torchtitan:llama3", "inverse:torchtitan:llama3"


def hf_state(kind: str = "fused") -> State:
    return load_file(TORCHTITAN / kind / "to_hf.safetensors")


def titan_state(path: Path) -> State:
    """Return the whole tensors of the sample, by torchtitan's names."""
    sx.merge_checkpoint(TORCHTITAN / "fused" / "checkpoint" / "step-3", path)
    return load_directory(path)


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**json.loads((TORCHTITAN / "fused" / "config.json").read_text())))


# Export


def sharded(whole: State, kind: str) -> tuple[Any, dict[str, Any] | None]:
    """Return this rank's state, and the layout for plain tensors."""
    rank, size = sx.get_rank(), sx.get_world_size()
    if kind == "dtensor":
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (size,))
        return {name: distribute_tensor(tensor.clone(), mesh, [Shard(0)]) for name, tensor in whole.items()}, None
    if kind == "replicas":
        return whole, None
    parts = {name: tensor.tensor_split(size)[rank] for name, tensor in whole.items()}
    if kind == "arrays":
        return {name: part.numpy() for name, part in parts.items()}, {"*": {"dim": 0}}
    assert kind == "parts"
    return parts, {"*": {"dim": 0}}


def exports_titan(kind: str, whole: str, out: str, background: bool = False) -> bool:
    state, layout = sharded(load_file(whole), kind)
    options: dict[str, Any] = {
        "convert": LLAMA3,
        "layout": layout,
        "files_from": str(TORCHTITAN / "fused" / "config.json"),
    }
    if background:
        sx.export_checkpoint(state, out, background=True, **options).result()
    else:
        sx.export_checkpoint(state, out, max_shard_size=5000, **options)
    return are_same(load_directory(out), hf_state())


@pytest.mark.parametrize(
    ("kind", "ranks", "backend"),
    [
        ("dtensor", 2, "gloo"),
        ("dtensor", 3, "gloo"),
        ("replicas", 2, "threads"),
        ("parts", 3, "threads"),
        ("arrays", 2, "threads"),
    ],
)
def test_torchtitans_state_is_exported_as_its_to_hf_has_it(tmp_path: Path, kind: str, ranks: int, backend: Any) -> None:
    titan_state(tmp_path / "whole")
    arguments = (kind, str(tmp_path / "whole" / "model.safetensors"), str(tmp_path / "out"))
    assert run_ranks(exports_titan, ranks, backend=backend, args=arguments) == [True] * ranks


def test_an_export_in_the_background_converts_its_copy(tmp_path: Path) -> None:
    titan_state(tmp_path / "whole")
    arguments = ("parts", str(tmp_path / "whole" / "model.safetensors"), str(tmp_path / "out"), True)
    assert run_ranks(exports_titan, 2, backend="threads", args=arguments) == [True] * 2


def test_a_model_of_transformers_is_converted_to_torchtitans_with_the_numbers_of_its_config(tmp_path: Path) -> None:
    model = llama()
    model.load_state_dict(hf_state())
    sx.export_checkpoint(model, tmp_path / "titan", convert=BACK)
    assert are_same(load_directory(tmp_path / "titan"), titan_state(tmp_path / "whole"))


def give_different_numbers(out: str) -> None:
    """Give another number of heads on each rank."""
    with pytest.raises(InvalidArgumentError, match="convert_with is"):
        sx.export_checkpoint(
            {"norm.weight": torch.ones(2)}, out, convert=LLAMA3, convert_with={"n_heads": 1 + sx.get_rank()}
        )


def have_different_names(out: str) -> None:
    """Have a layer, and a tensor without a rule, on one rank alone: only the latter is an error, and on all ranks."""
    state = (
        {"norm.weight": torch.ones(2)}
        if sx.get_rank()
        else {"layers.0.ffn_norm.weight": torch.ones(2), "x": torch.ones(1)}
    )
    with pytest.raises(UnsafeError, match=r"no rule.*\bx;"):
        sx.export_checkpoint(state, out, convert=LLAMA3)
    layout = {"layers.*": {"renumber": "layers"}} if sx.get_rank() else None
    with pytest.raises(InvalidArgumentError, match="renumbers"):
        sx.export_checkpoint(state, out, convert=LLAMA3, exclude="x", layout=layout)
    with pytest.raises(CorruptError, match="shape differs"):
        sx.export_checkpoint({"norm.weight": torch.ones(2 + sx.get_rank())}, out, convert=LLAMA3)
    sx.export_checkpoint(state, out, convert=LLAMA3, exclude="x", rename=[("^model", "m")])
    assert set(load_directory(out)) == {"m.norm.weight", "m.layers.0.post_attention_layernorm.weight"}


@pytest.mark.parametrize("case", [give_different_numbers, have_different_names])
def test_ranks_whose_names_or_options_of_a_conversion_differ_all_raise(tmp_path: Path, case: Any) -> None:
    run_ranks(case, 2, backend="threads", args=(str(tmp_path / "out"),))


def converts_renumbered_stages(folder: str) -> None:
    """Export, merge and load pipeline stages that number their layers from 0; two ranks have halves of each stage."""
    rank, whole = sx.get_rank(), load_file(f"{folder}/titan/model.safetensors")
    stage, half = divmod(rank, 2)
    layout = {
        "mesh": {"pp": 2, "tp": 2},
        "rules": {"layers.*": [{"renumber": "layers", "axis": "pp"}, {"dim": 0, "axis": "tp"}]},
    }
    state = {}
    for name, tensor in whole.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        if layer is None:
            state[name] = tensor
        elif layer == stage:
            state[name.replace(f".{layer}.", ".0.", 1)] = tensor.tensor_split(2)[half].contiguous()
    sx.export_checkpoint(state, f"{folder}/live", convert=LLAMA3, convert_with={"n_heads": 4}, layout=layout)
    sx.export_checkpoint(state, f"{folder}/plain", layout=layout)
    save_file(state, f"{folder}/ranks/rank-{rank}.safetensors")
    sx.get_communicator().barrier()
    if rank == 0:
        numbers = {"n_heads": 4}
        sx.merge_checkpoint(f"{folder}/plain", f"{folder}/two", convert=LLAMA3, convert_with=numbers)
        sx.merge_checkpoint(f"{folder}/ranks", f"{folder}/files", convert=LLAMA3, convert_with=numbers, layout=layout)
        for other in ("two", "files"):
            assert are_same(load_directory(f"{folder}/{other}"), load_directory(f"{folder}/live"))
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    sx.load_checkpoint(empty, f"{folder}/live", convert=BACK, convert_with={"n_heads": 4}, layout=layout)
    assert are_same(empty, state)


def test_stages_that_number_their_layers_from_0_are_converted(tmp_path: Path) -> None:
    titan_state(tmp_path / "titan")
    (tmp_path / "ranks").mkdir()
    run_ranks(converts_renumbered_stages, 4, backend="threads", args=(str(tmp_path),))


def fuses_over_stages(out: str) -> None:
    """Export a tensor whose parts and layers are on different ranks, followed by padding."""
    rank = sx.get_rank()
    state = {f"{rank}.{part}": torch.full((2, 3), 10.0 * rank + number) for number, part in enumerate("gu")}
    rule = {
        "from": ["{layer}.g", "{layer}.u"],
        "to": "gu",
        "stack": ["layer"],
        "values": [{"fuse": {"dim": 1}}, {"pad": {"dim": 0, "to": 3}}],
    }
    sx.export_checkpoint(state, out, convert={"rules": [rule]}, layout={"*": "replicate"})
    found = load_directory(out)["gu"]
    assert found[:, 2].eq(0).all()
    assert found[:, 0].tolist() == [[0, 0, 0, 1, 1, 1], [10, 10, 10, 11, 11, 11]]


def test_tensors_of_several_ranks_become_one(tmp_path: Path) -> None:
    run_ranks(fuses_over_stages, 2, backend="threads", args=(str(tmp_path / "out"),))


def test_copies_that_a_layout_reduces_keep_their_reduction(tmp_path: Path) -> None:
    def export(out: str) -> None:
        state = {"w.scale": torch.full((2,), float(sx.get_rank()))}
        rules = [{"from": "{n}.scale", "to": ["{n}.a", "{n}.b"], "values": [{"split": {"sizes": [1, 1]}}]}]
        sx.export_checkpoint(state, out, layout={"*.scale": {"reduce": "max"}}, convert={"rules": rules})

    run_ranks(export, 2, backend="threads", args=(str(tmp_path / "out"),))
    assert are_same(load_directory(tmp_path / "out"), {"w.a": torch.ones(1), "w.b": torch.ones(1)})


# Load


@pytest.mark.parametrize("kind", ["fused", "tied"])
def test_a_checkpoint_of_torchtitan_is_loaded_into_a_model_of_transformers(kind: str) -> None:
    model, expected = llama(1), hf_state(kind)
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    report = sx.load_checkpoint(model, TORCHTITAN / kind / "checkpoint" / "step-3", convert=LLAMA3)
    assert are_same(dict(model.state_dict()), expected)
    assert (report.missing, report.unexpected) == ((), ())


def loads_sharded(source: str, convert: str, expected: str) -> bool:
    """Load into DTensors, cut along either dim."""
    from torch.distributed.tensor import Shard, init_device_mesh, zeros

    mesh = init_device_mesh("cpu", (sx.get_world_size(),))
    whole = load_file(expected)
    state = {}
    for number, (name, tensor) in enumerate(whole.items()):
        state[name] = zeros(*tensor.shape, device_mesh=mesh, placements=[Shard(number % tensor.ndim)])
    sx.load_checkpoint(state, source, convert=convert, convert_with={"n_heads": 4})
    return are_same({name: tensor.full_tensor() for name, tensor in state.items()}, whole)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_state_is_loaded_from_either_side(tmp_path: Path, ranks: int) -> None:
    titan, hf = TORCHTITAN / "fused" / "checkpoint" / "step-3", TORCHTITAN / "fused" / "to_hf.safetensors"
    assert run_ranks(loads_sharded, ranks, backend="gloo", args=(str(titan), LLAMA3, str(hf))) == [True] * ranks
    titan_state(tmp_path / "whole")
    arguments = (str(hf), BACK, str(tmp_path / "whole" / "model.safetensors"))
    assert run_ranks(loads_sharded, ranks, backend="gloo", args=arguments) == [True] * ranks


def test_the_model_of_a_jobs_save_is_converted_and_renames_come_after_the_conversion(tmp_path: Path) -> None:
    """A save of one's own, with an optimizer and a step beside the model."""
    model = titan_state(tmp_path / "whole")
    sx.save_checkpoint({"model": model, "optimizer": {"state": {"m": torch.ones(2)}}, "step": 3}, tmp_path / "save")
    state = {f"m.{name}": torch.zeros_like(tensor) for name, tensor in hf_state().items()}
    sx.load_checkpoint(state, tmp_path / "save", convert=LLAMA3, convert_with={"n_heads": 4}, rename=[("^", "m.")])
    assert are_same({name.removeprefix("m."): tensor for name, tensor in state.items()}, hf_state())


def test_names_without_a_rule_are_refused_or_unexpected(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(2), "x": torch.ones(1)}, tmp_path / "s.safetensors")
    state = {"model.norm.weight": torch.zeros(2)}
    with pytest.raises(UnsafeError, match=r"no rule.*\bx;"):
        sx.load_checkpoint(state, tmp_path / "s.safetensors", convert=LLAMA3)
    report = sx.load_checkpoint(state, tmp_path / "s.safetensors", convert=LLAMA3, strict=False)
    assert report.unexpected == ("x",)
    assert state["model.norm.weight"].tolist() == [1, 1]
    with pytest.raises(NotFoundError, match=r"missing.*\bmodel\.norm\.weight;"):
        sx.load_checkpoint(state, tmp_path / "s.safetensors")


def test_arrays_are_loaded_from_a_tensor_that_is_transposed_and_split(tmp_path: Path) -> None:
    rows = np.arange(12, dtype="f4").reshape(3, 4)
    save_file({"w": torch.from_numpy(rows)}, tmp_path / "s.safetensors")
    values = [{"transpose": {"order": [1, 0]}}, {"split": {"sizes": [1, 1], "groups": 2}}]
    state = {"a": np.zeros((2, 3), "f4"), "b": np.zeros((2, 3), "f4")}
    sx.load_checkpoint(
        state, tmp_path / "s.safetensors", convert={"rules": [{"from": "w", "to": ["a", "b"], "values": values}]}
    )
    assert (state["a"] == rows.T[[0, 2]]).all()
    assert (state["b"] == rows.T[[1, 3]]).all()


# Diff


def compares_with_another_family(kind: str, whole: str, path: str, convert: str) -> bool:
    state, layout = sharded(load_file(whole), kind)
    options: dict[str, Any] = {"layout": layout, "convert": convert, "convert_with": {"n_heads": 4}}
    equal_report = sx.diff_checkpoints(state, path, **options)
    norms = {LLAMA3: ("norm.weight", "model.norm.weight"), BACK: ("model.norm.weight", "norm.weight")}
    old, new = norms[convert]
    state[old] = state[old] + 1
    (found,) = sx.diff_checkpoints(state, path, **options).differing
    return equal_report.equal and (found.name, found.status) == (new, "values")


@pytest.mark.parametrize(("kind", "ranks", "backend"), [("dtensor", 2, "gloo"), ("arrays", 3, "threads")])
@pytest.mark.parametrize("convert", [LLAMA3, BACK])
def test_live_state_is_compared_with_a_checkpoint_of_another_family(
    tmp_path: Path, convert: str, kind: str, ranks: int, backend: Any
) -> None:
    save_file(hf_state(), tmp_path / "hf.safetensors")
    sx.merge_checkpoint(tmp_path / "hf.safetensors", tmp_path / "titan", convert=BACK, convert_with={"n_heads": 4})
    paths = [str(tmp_path / "titan/model.safetensors"), str(tmp_path / "hf.safetensors")]
    paths = paths if convert == LLAMA3 else paths[::-1]
    assert all(run_ranks(compares_with_another_family, ranks, backend=backend, args=(kind, *paths, convert)))
