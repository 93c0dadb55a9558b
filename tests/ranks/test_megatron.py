"""Megatron-Core's sharded state dicts, by their attributes alone: Megatron-Core is not installed.

The classes here stand for Megatron-Core's classes, and have the attributes that are used.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same
from safetensors.torch import load_file, save_file
from starting import THREADS_AND_PROCESSES

import statexchange as sx
from statexchange.testing import run_ranks


@dataclass
class ShardedTensor:
    key: str
    data: Any
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    has_regular_grid: bool = True


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[..., Any]
    replica_id: int | tuple[int, ...] = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


@dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0


class LocalNonpersistentObject:
    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


def sharded(key: str, data: torch.Tensor, *cuts: tuple[int, int, int], prepended: int = 0, **more: Any) -> Any:
    """Return a ShardedTensor. Its data is number `at` of `parts` along `axis`, for each (axis, at, parts) of `cuts`."""
    offset, shape = [0] * (prepended + data.ndim), [1] * prepended + list(data.shape)
    fragments = [1] * len(shape)
    for axis, at, parts in cuts:
        offset[axis] = at * shape[axis]
        fragments[axis] = parts
        shape[axis] *= parts
    found = (key, data, data.dtype, tuple(data.shape), tuple(shape), tuple(offset), tuple(fragments))
    return ShardedTensor(*found, prepend_axis_num=prepended, **more)


def gated(key: str, data: torch.Tensor, at: int, parts: int, *stacked: tuple[int, int, int]) -> ShardedTensorFactory:
    """Return a rank's gate and up projection in one parameter; the checkpoint has all gates before all ups."""
    axis = len(stacked)

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        halves = data.chunk(2)
        more = {"prepended": axis, "replica_id": replica_id}
        return [sharded(key, h, *stacked, (axis, n * parts + at, 2 * parts), **more) for n, h in enumerate(halves)]

    return ShardedTensorFactory(key, data, build, torch.cat)


LAYERS, HIDDEN, FFN, VOCABULARY = 4, 6, 8, 10


def whole_model(seed: int) -> dict[str, torch.Tensor]:
    """Return the model as in the checkpoint: the layers are stacked."""
    shapes = {
        "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 3 * HIDDEN, HIDDEN),
        "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
        "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
        "decoder.layers.input_layernorm.weight": (LAYERS, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return {key: value.bfloat16() if "qkv" in key else value for key, value in tensors.items()}


def state_of_rank(model: dict[str, torch.Tensor], rank: int, tp: int, pp: int) -> dict[str, Any]:
    """Return what Megatron-Core's `sharded_state_dict` returns on a rank; tensor parallel ranks are neighbours."""
    at, stage = rank % tp, rank // tp
    own = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
    state: dict[str, Any] = {}

    def part(name: str, dim: int, layer: int | None = None) -> torch.Tensor:
        value = model[name] if layer is None else model[name][layer]
        return value.chunk(tp, dim)[at].clone()

    for number, layer in enumerate(own):
        stack, here = (0, layer, LAYERS), f"decoder.layers.{number}"
        key = "decoder.layers.self_attention.linear_qkv.weight"
        state[f"{here}.qkv"] = sharded(key, part(key, 0, layer), stack, (1, at, tp), prepended=1)
        key = "decoder.layers.self_attention.linear_proj.weight"
        state[f"{here}.proj"] = sharded(key, part(key, 1, layer), stack, (2, at, tp), prepended=1)
        key = "decoder.layers.mlp.linear_fc1.weight"
        both = torch.cat([half.chunk(tp)[at] for half in model[key][layer].chunk(2)])
        state[f"{here}.fc1"] = gated(key, both, at, tp, stack)
        key = "decoder.layers.input_layernorm.weight"
        norm = model[key][layer].clone()
        state[f"{here}.norm"] = sharded(key, norm, stack, prepended=1, replica_id=(0, at, 0))
        state[f"{here}.mlp._extra_state"] = ShardedObject(f"{here}._extra_state", None, (LAYERS,), (layer,))
    if stage == 0:
        key = "embedding.word_embeddings.weight"
        state["embedding"] = sharded(key, part(key, 0), (0, at, tp), allow_shape_mismatch=True)
    if stage == pp - 1:
        key = "decoder.final_layernorm.weight"
        state["norm"] = sharded(key, model[key].clone(), replica_id=(0, at, 0))
    return state


def values_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: item.data for name, item in state.items() if not isinstance(item, ShardedObject)}


MESHES = [(1, 4), (2, 2), (2, 1), (1, 2), (1, 1)]


@pytest.mark.ranks(1, 2, 4, backend=THREADS_AND_PROCESSES)
def test_a_sharded_state_dict_is_exported_by_its_keys_and_loaded_in_place(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    for number, (tp, pp) in enumerate(mesh for mesh in MESHES if mesh[0] * mesh[1] == comm.world_size):
        out = tmp_path / f"out{number}"
        state = state_of_rank(whole_model(0), comm.rank, tp, pp)
        sx.export_checkpoint({"model": state, "unused": LocalNonpersistentObject(object())}, out)
        assert_same(load_file(out / "model.safetensors"), whole_model(0))
        fresh = state_of_rank(whole_model(1), comm.rank, tp, pp)
        parts = values_of(fresh)
        sx.load_checkpoint(fresh, out)
        assert_same(parts, values_of(state))
        comm.barrier()


def test_a_module_whose_class_is_called_as_one_that_is_not_saved_is_saved(tmp_path: Path) -> None:
    kind = type("LocalNonpersistentObject", (torch.nn.Linear,), {})
    saved, live = kind(2, 1), kind(2, 1)
    sx.save_checkpoint({"model": saved}, tmp_path / "saved")
    sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert torch.equal(live.weight, saved.weight)


@pytest.mark.ranks(4, backend="threads")
def test_a_saved_state_is_loaded_on_another_mesh(tmp_path: Path) -> None:
    """Paths in the dict name other layers on other stages; keys do not."""
    comm = sx.get_communicator()

    def job(seed: int, tp: int, pp: int) -> dict[str, Any]:
        model = state_of_rank(whole_model(seed), comm.rank, tp, pp)
        moments = {key: value.double() for key, value in whole_model(seed).items()}
        adam = {f"exp_avg.{key}": sharded(f"optimizer.exp_avg.{key}", value) for key, value in moments.items()}
        groups = [{"lr": seed / 10, "params": LocalNonpersistentObject([comm.rank])}]
        return {"model": model, "optimizer": {"state": adam, "param_groups": groups}, "iteration": seed}

    def check(state: dict[str, Any], seed: int, tp: int, pp: int) -> None:
        expected = job(seed, tp, pp)
        assert_same(values_of(state["model"]), values_of(expected["model"]))
        assert_same(values_of(state["optimizer"]["state"]), values_of(expected["optimizer"]["state"]))
        assert state["optimizer"]["param_groups"][0]["lr"] == seed / 10
        assert state["optimizer"]["param_groups"][0]["params"].unwrap() == [comm.rank]
        assert state["iteration"] == seed

    sx.save_checkpoint(job(3, 2, 2), tmp_path / "saved")
    comm.barrier()
    for tp, pp in ((2, 2), (1, 4)):
        fresh = job(5, tp, pp)
        sx.load_checkpoint(fresh, tmp_path / "saved")
        check(fresh, 3, tp, pp)
    sx.merge_checkpoint(tmp_path / "saved", tmp_path / f"merged{comm.rank}", exclude="optimizer.*")
    assert_same(load_file(tmp_path / f"merged{comm.rank}" / "model.safetensors"), whole_model(3))


def test_a_save_of_four_stages_is_loaded_on_one_rank(tmp_path: Path) -> None:
    run_ranks(saves_four_stages, 4, backend="threads", args=(str(tmp_path / "saved"),))
    fresh = state_of_rank(whole_model(1), 0, 1, 1)
    sx.load_checkpoint({"model": fresh}, tmp_path / "saved")
    assert_same(values_of(fresh), values_of(state_of_rank(whole_model(0), 0, 1, 1)))


def saves_four_stages(folder: str) -> None:
    sx.save_checkpoint({"model": state_of_rank(whole_model(0), sx.get_communicator().rank, 1, 4)}, folder)


def test_an_offset_of_another_length_is_an_error(tmp_path: Path) -> None:
    wrong = sharded("w", torch.ones(2, 2))
    wrong.global_offset = (0,)
    with pytest.raises(sx.errors.CorruptError, match="offset") as caught:
        sx.export_checkpoint({"w": wrong}, tmp_path / "out")
    assert caught.value.name == "w"


def test_chunks_of_one_rank_with_equal_offsets_are_an_error(tmp_path: Path) -> None:
    chunks = {f"model{n}": {"x": sharded("layers.0.w", torch.full((2,), float(n)))} for n in range(2)}
    with pytest.raises(sx.errors.ReplicaError, match="copies of rank 0") as caught:
        sx.export_checkpoint(chunks, tmp_path / "out")
    assert caught.value.name == "layers.0.w"


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_a_padded_vocabulary_is_loaded_into_another_padding(rows: int, tmp_path: Path) -> None:
    whole = torch.arange(7 * 3.0).reshape(7, 3)
    sx.export_checkpoint({"embedding": sharded("embedding.weight", whole)}, tmp_path / "out")
    live = torch.full((rows, 3), -1.0)
    with (
        pytest.raises(sx.errors.InvalidArgumentError, match="shape differs") if rows != 7 else contextlib.nullcontext()
    ):
        sx.load_checkpoint({"embedding": sharded("embedding.weight", live)}, tmp_path / "out")
    sx.load_checkpoint({"e": sharded("embedding.weight", live, allow_shape_mismatch=True)}, tmp_path / "out")
    both = min(rows, 7)
    assert torch.equal(live[:both], whole[:both])
    assert bool((live[both:] == -1).all())


def test_names_that_differ_are_reported_by_key(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    live = {"x": sharded("a", torch.zeros(2)), "y": sharded("c", torch.zeros(2))}
    with pytest.raises(FileNotFoundError, match=r"missing.*\bc;.*\bb;"):
        sx.load_checkpoint(live, tmp_path)
    sx.load_checkpoint(live, tmp_path, strict=False)
    assert live["x"].data.tolist() == [1, 1]
    sx.save_checkpoint({"m": {"x": sharded("a", torch.ones(2)), "z": sharded("b", torch.ones(2))}}, tmp_path / "saved")
    with pytest.raises(FileNotFoundError, match=r"missing.*\bc;.*\bb;"):
        sx.load_checkpoint({"m": live}, tmp_path / "saved")


def test_extra_state_is_no_tensor_of_the_model_but_is_saved(tmp_path: Path) -> None:
    def state(value: Any) -> dict[str, Any]:
        return {"w": sharded("w", torch.ones(2)), "w._extra_state": ShardedObject("w._extra_state", value, (1,), (0,))}

    sx.export_checkpoint(state(torch.ones(3)), tmp_path / "out")
    assert list(load_file(tmp_path / "out/model.safetensors")) == ["w"]
    for number, value in enumerate([{"scale": 3}, torch.arange(3), None]):
        sx.save_checkpoint(state(value), tmp_path / f"saved{number}")
        fresh = state(0)
        sx.load_checkpoint(fresh, tmp_path / f"saved{number}")
        found = fresh["w._extra_state"].data
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    with pytest.raises(TypeError, match=r"StringIO.*\.w\._extra_state"):
        sx.save_checkpoint(state(io.StringIO()), tmp_path / "no")


@dataclass
class Stage:
    """A part of a state."""

    tensors: dict[str, Any]


def test_a_sharded_tensor_in_a_dataclass_is_saved_and_loaded(tmp_path: Path) -> None:
    sx.save_checkpoint({"stage": Stage({"w": sharded("w", torch.ones(2))})}, tmp_path / "saved")
    fresh = {"stage": Stage({"w": sharded("w", torch.zeros(2))})}
    assert sx.load_checkpoint(fresh, tmp_path / "saved").missing == ()
    assert fresh["stage"].tensors["w"].data.tolist() == [1, 1]


def test_the_copy_that_a_factory_makes_is_written_back(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return {"turned": sharded(key, data.T.contiguous(), replica_id=replica_id)}

    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    make = lambda value: {"w": ShardedTensorFactory("w.T", value, build, lambda parts: parts["turned"].T)}  # noqa: E731
    sx.export_checkpoint(make(weight), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w.T"], weight.T)
    fresh = torch.nn.Parameter(torch.zeros(2, 3))
    sx.load_checkpoint(make(fresh), tmp_path / "out")
    assert torch.equal(fresh, weight)


def test_a_snapshot_is_exported_while_training_goes_on(tmp_path: Path) -> None:
    state = state_of_rank(whole_model(0), 0, 1, 1)
    future = sx.export_checkpoint(state, tmp_path / "out", background=True)
    for part in values_of(state).values():
        part.zero_()
    future.result()
    assert_same(load_file(tmp_path / "out/model.safetensors"), whole_model(0))


def test_virtual_stages_and_plain_tensors_beside_are_exported(tmp_path: Path) -> None:
    chunks = [{"l.0": sharded("l", torch.full((2,), float(n)), (0, n, 2), prepended=1)} for n in range(2)]
    beside = {"part": {"more": {"seed": torch.ones(1)}, **chunks[0]}, "plain": torch.ones(2)}
    sx.export_checkpoint([*chunks, beside], tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    expected = {"l": torch.tensor([[0.0, 0.0], [1.0, 1.0]])}
    assert_same(found, {**expected, "part.more.seed": torch.ones(1), "plain": torch.ones(2)})


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a flattened range": (
        sharded("k", torch.ones(4), flattened_range=slice(0, 4)),
        sx.errors.UnsupportedError,
        "flattened_range",
    ),
    "data of another dtype": (
        ShardedTensor("k", torch.ones(2).half(), torch.float32, (2,), (2,), (0,), (1,)),
        sx.errors.UnsupportedError,
        "its box",
    ),
    "no data": (
        ShardedTensor("k", None, torch.float32, (2,), (2,), (0,), (1,)),
        ValueError,
        "no data",
    ),
    "a part outside": (
        sharded("k", torch.ones(2), (0, 2, 2)),
        ValueError,
        "outside",
    ),
    "parts of two dtypes": (
        [sharded("k", torch.ones(2)), sharded("k", torch.ones(2).half())],
        sx.errors.CorruptError,
        "differ in dtype",
    ),
    "parts of two shapes": (
        [sharded("k", torch.ones(2)), sharded("k", torch.ones(2), (0, 1, 2))],
        sx.errors.CorruptError,
        "differ in global_shape",
    ),
    "a missing part": (
        [sharded("k", torch.ones(2), (0, 1, 2))],
        sx.errors.IncompleteError,
        r"region \[0:2\]",
    ),
    "a plain value": (
        {"w": sharded("k", torch.ones(2)), "step": 3},
        ValueError,
        r"state\['a\.step'\]",
    ),
}


@pytest.mark.parametrize(("state", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_state_that_cannot_be_exported_is_named(
    state: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        sx.export_checkpoint({"a": state}, tmp_path / "out")
    assert getattr(caught.value, "name", None) == (None if isinstance(state, dict) else "k")
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks(2, backend="threads")
def test_replicas_of_a_sharded_state_dict_must_be_equal(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    state = {"w": sharded("norm", torch.full((2,), float(rank)), replica_id=(0, rank, 0))}
    with pytest.raises(sx.errors.ReplicaError, match="different values") as caught:
        sx.export_checkpoint(state, tmp_path / "out")
    assert caught.value.name == "norm"
    assert 'replicas="root"' in str(caught.value)
    sx.export_checkpoint(state, tmp_path / "out", replicas="root")
    assert load_file(tmp_path / "out/model.safetensors")["norm"].tolist() == [0, 0]
    assert "norm" in json.loads((tmp_path / "out/statexchange.json").read_text())["tensors"]
