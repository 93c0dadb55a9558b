"""Loading into live state: any source, any number of ranks, any placement, bit by bit; or a named error everywhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from starting import AND_MPI, LAUNCHED_AS, THREADS_AND_PROCESSES, launched_communicator, start
from stored import flip_bit, json_header
from sweeps import slow
from torch import nn
from torch.utils._pytree import tree_map

import statexchange as sx
from statexchange.storage.workspace import Workspace
from statexchange.testing import run_ranks
from statexchange.values import encode

NAN = float("nan")
FROZEN = np.zeros(2, np.float32)
FROZEN.flags.writeable = False


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        one, other = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (one, other))
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


# One process


def test_tensors_of_every_dtype_come_back_in_place(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64]
    saved = {f"t{i}": torch.arange(12).reshape(3, 4).to(d) for i, d in enumerate(dtypes)}
    saved |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "one": torch.ones(1, 1)}
    sx.export_checkpoint(saved, tmp_path / "out")
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    report = sx.load_checkpoint(live, tmp_path / "out")
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == before
    assert all(
        torch.equal(live[name].view(torch.uint8), saved[name].view(torch.uint8)) for name in saved if name != "scalar"
    )
    assert live["scalar"] == 2.5
    assert (report.num_tensors, report.nbytes) == (10, sum(t.nbytes for t in saved.values()))
    assert (report.missing, report.unexpected) == ((), ())


def test_strided_live_tensors_and_arrays_are_filled(tmp_path: Path) -> None:
    save_file({"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(6.0)}, tmp_path / "model.safetensors")
    turned, spread = torch.zeros(4, 3).T, np.zeros(12, np.float32)[::2]
    sx.load_checkpoint({"a": turned, "b": spread}, tmp_path)
    assert torch.equal(turned, torch.arange(12.0).reshape(3, 4))
    assert spread.tolist() == list(range(6))


@pytest.mark.slow  # torch.compile imports its compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of torch.compile
def test_a_compiled_model_with_tied_weights_is_loaded_and_stays_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3)
            self.head = nn.Linear(3, 6, bias=False)
            self.head.weight = self.embed.weight

    one, other = Tied(), Tied()
    sx.export_checkpoint(one, tmp_path / "out")
    sx.load_checkpoint(torch.compile(other), tmp_path / "out")
    assert torch.equal(other.embed.weight, one.embed.weight)
    assert other.head.weight is other.embed.weight


def test_all_names_that_differ_are_in_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    live = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(FileNotFoundError, match=r"missing.*: c;.*: b;.*strict=False"):
        sx.load_checkpoint(live, tmp_path)
    assert live["a"].tolist() == [0, 0]
    report = sx.load_checkpoint(live, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("c",), ("b",))
    assert live["a"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"not in.*\bb;"):
        sx.load_checkpoint({"a": torch.zeros(2)}, tmp_path)


@pytest.mark.parametrize(
    ("live", "differs", "sides"),
    [
        (torch.zeros(3), "shape differs", ((2,), (3,))),
        (torch.zeros(2, dtype=torch.float16), "dtype differs", ("F32", "F16")),
    ],
    ids=["shape", "dtype"],
)
def test_shapes_and_dtypes_must_be_equal(live: torch.Tensor, differs: str, sides: Any, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=differs) as caught:
        sx.load_checkpoint({"a": live}, tmp_path)
    assert caught.value.name == "a"
    assert (caught.value.expected, caught.value.found) == sides


def test_changed_bytes_are_detected(tmp_path: Path) -> None:
    sx.export_checkpoint({"a": torch.ones(1000)}, tmp_path / "out")
    flip_bit(tmp_path / "out/model.safetensors", -9)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.load_checkpoint({"a": torch.zeros(1000)}, tmp_path / "out")
    assert caught.value.name == "a"


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0, 1, 7, 500, 1030, 20_000]), min_size=1, max_size=40), st.randoms(use_true_random=False)
)
def test_any_choice_of_tensors_is_read_in_any_order(sizes: list[int], chance: random.Random) -> None:
    numbers = torch.arange(20_000)
    saved = {
        f"{i:02}": (numbers[:size] + i).to(chance.choice([torch.int32, torch.uint8])) for i, size in enumerate(sizes)
    }
    chosen = chance.sample(sorted(saved), chance.randint(1, len(saved)))
    with tempfile.TemporaryDirectory() as folder:
        if chance.random() < 0.5:
            save_file(saved, f"{folder}/model.safetensors")  # without digests
        else:
            sx.export_checkpoint(saved, folder, overwrite=True)
        for path in (folder, f"local://{folder}"):
            state = {name: torch.zeros_like(saved[name]) for name in chosen}
            if (rows := next((name for name in chosen if saved[name].numel() == 500), None)) is not None:
                state[rows] = torch.zeros(1000, dtype=saved[rows].dtype)[::2]  # not in C order
            report = sx.load_checkpoint(state, path, strict=False)
            assert equal(state, {name: saved[name] for name in chosen})
            assert report.nbytes == sum(saved[name].nbytes for name in chosen)


@pytest.mark.parametrize("size", [4, 4000, 40_000])
@pytest.mark.parametrize("scheme", ["", "local://"])
def test_values_that_differ_for_one_memory_are_not_called_corrupt(size: int, scheme: str, tmp_path: Path) -> None:
    saved = {"a": torch.ones(size), "b": torch.full((size,), 2.0), "c": torch.ones(size)}
    sx.export_checkpoint(saved, tmp_path / "out")
    memory = torch.zeros(2 * size - 1)
    for state in ({"a": memory[:size], "b": memory[:size]}, {"a": memory[:size], "b": memory[size - 1 :]}):
        with pytest.raises(sx.errors.ReplicaError, match="shares memory") as caught:
            sx.load_checkpoint(state, f"{scheme}{tmp_path}/out", strict=False)
        assert caught.value.name in ("a", "b")
    state = {"a": memory[:size], "c": memory[:size]}
    sx.load_checkpoint(state, f"{scheme}{tmp_path}/out", strict=False)
    assert equal(state, {"a": saved["a"], "c": saved["a"]})


def test_an_array_without_dims_is_filled_with_a_cast(tmp_path: Path) -> None:
    sx.export_checkpoint({"a": torch.tensor(3.0)}, tmp_path / "out")
    state = {"a": np.zeros((), np.float64)}
    sx.load_checkpoint(state, tmp_path / "out", dtype="state")
    assert state["a"] == 3.0


def test_thousands_of_tensors_are_read(tmp_path: Path) -> None:
    saved = {str(i): torch.tensor([i]) for i in range(2500)}
    sx.export_checkpoint(saved, tmp_path / "out")
    state = {name: torch.zeros(1, dtype=torch.int64) for name in reversed(saved)}
    sx.load_checkpoint(state, tmp_path / "out")
    assert equal(state, saved)


@pytest.mark.parametrize("damaged", [0, 20, 39])
def test_of_many_tensors_the_one_with_changed_bytes_is_named(damaged: int, tmp_path: Path) -> None:
    sx.export_checkpoint({f"{i:02}": torch.full((100,), i) for i in range(40)}, tmp_path / "out")
    flip_bit(tmp_path / "out/model.safetensors", -(39 - damaged) * 800 - 400)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.load_checkpoint({f"{i:02}": torch.zeros(100, dtype=torch.int64) for i in range(40)}, tmp_path / "out")
    assert caught.value.name == f"{damaged:02}"


def test_a_module_on_the_meta_device_needs_memory_first(tmp_path: Path) -> None:
    model = model_of(1)
    sx.export_checkpoint(model, tmp_path / "out")
    with torch.device("meta"):
        live = model_of(2)
    with pytest.raises(sx.errors.UnsupportedError, match="to_empty") as caught:
        sx.load_checkpoint(live, tmp_path / "out")
    assert caught.value.name in live.state_dict()
    live.to_empty(device="cpu")
    sx.load_checkpoint(live, tmp_path / "out")
    assert equal(live.state_dict(), model.state_dict())


LARGE = 1 << 17  # elements, too many to be read together with others


def damage(folder: Path, state: dict[str, torch.Tensor], name: str) -> None:
    """Export a state to `out` in the folder, and change a byte in the middle of one tensor."""
    sx.export_checkpoint(state, folder / "out")
    file = folder / "out/model.safetensors"
    begin, end = json_header(file)[name]["data_offsets"]
    data_bytes = sum(tensor.nbytes for tensor in state.values())
    flip_bit(file, (begin + end) // 2 - data_bytes)


def test_small_tensors_are_checked_before_any_changes(tmp_path: Path) -> None:
    damage(tmp_path, {f"{i:02}": torch.full((100,), i) for i in range(40)}, "39")
    live = {f"{i:02}": torch.full((100,), -7) for i in range(40)}
    with pytest.raises(sx.errors.CorruptError, match="unchanged") as caught:
        sx.load_checkpoint(live, tmp_path / "out")
    assert caught.value.name == "39"
    assert equal(live, {name: torch.full((100,), -7) for name in live})


@pytest.mark.parametrize(
    ("dtype", "invalid"),
    [(torch.float32, NAN), (torch.bfloat16, NAN), (torch.complex64, NAN), (torch.int64, -1), (torch.bool, True)],
    ids=str,
)
def test_a_large_tensor_with_changed_bytes_keeps_none_of_them(dtype: torch.dtype, invalid: Any, tmp_path: Path) -> None:
    saved = {name: torch.arange(LARGE).to(dtype) for name in "abc"}
    damage(tmp_path, saved, "b")
    live = {name: torch.zeros(LARGE, dtype=dtype) for name in "abc"}
    with pytest.raises(sx.errors.CorruptError, match="2 of 3") as caught:
        sx.load_checkpoint(live, tmp_path / "out")
    assert caught.value.name == "b"
    assert equal(live["a"], saved["a"])
    expected = torch.full((LARGE,), invalid, dtype=dtype)
    assert torch.equal(live["b"].isnan(), expected.isnan())
    assert invalid is NAN or equal(live["b"], expected)
    assert not live["c"].any()


@pytest.mark.parametrize(("elements", "left"), [(LARGE, 0.0), (3 << 20, NAN)], ids=["a window", "windows"])
def test_of_a_tensor_that_is_cast_no_rejected_byte_stays(elements: int, left: float, tmp_path: Path) -> None:
    """One that is read in one part is checked before it changes."""
    damage(tmp_path, {"a": torch.ones(elements)}, "a")
    live = {"a": torch.zeros(elements, dtype=torch.float64)}
    with pytest.raises(sx.errors.CorruptError, match="NaN" if left else "unchanged"):
        sx.load_checkpoint(live, tmp_path / "out", dtype="state")
    np.testing.assert_array_equal(live["a"].numpy(), left)


def test_a_tensor_that_was_read_in_part_is_invalid(tmp_path: Path) -> None:
    sx.export_checkpoint({"a": torch.ones(5 << 20)}, tmp_path / "out")
    live = {"a": torch.zeros(5 << 20)}

    def fails(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    with pytest.raises(RuntimeError):
        sx.load_checkpoint(live, tmp_path / "out", on_progress=fails)
    assert live["a"].isnan().all()
    sx.load_checkpoint(live, tmp_path / "out")
    assert live["a"].eq(1).all()


def loads_damaged(out: str) -> tuple[str, int | None, list[float]]:
    live = {"a": torch.zeros(LARGE), "b": torch.zeros(LARGE)}
    with pytest.raises(sx.errors.CorruptError, match="of rank 1") as caught:
        sx.load_checkpoint(live if sx.get_rank() == 1 else {"a": live["a"]}, out, strict=False)
    return str(caught.value.name), caught.value.rank, [float(tensor[0]) for tensor in live.values()]


def test_the_error_says_on_all_ranks_what_has_changed_on_the_one_that_failed(tmp_path: Path) -> None:
    damage(tmp_path, {"a": torch.ones(LARGE), "b": torch.ones(LARGE)}, "b")
    intact, failed = run_ranks(loads_damaged, 2, args=(str(tmp_path / "out"),))
    assert intact[:2] == failed[:2] == ("b", 1)
    np.testing.assert_array_equal(failed[2], [1, NAN])
    # The other rank may have seen the failure before, during or after its own reading.
    assert intact[2][0] in (0, 1) or np.isnan(intact[2][0])


def exports_halves(out: str) -> None:
    rank = sx.get_rank()
    sx.export_checkpoint({"a": torch.full((40 + rank, 30), 1.0 + rank)}, out, layout={"a": {"dim": 0}})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_digest_of_each_ranks_box_is_checked(rank: int, tmp_path: Path) -> None:
    run_ranks(exports_halves, 2, args=(str(tmp_path / "out"),))
    whole = {"a": torch.zeros(81, 30)}
    sx.load_checkpoint(whole, tmp_path / "out")
    assert whole["a"][:, 0].tolist() == [1.0] * 40 + [2.0] * 41
    flip_bit(tmp_path / "out/model.safetensors", -81 * 30 * 4 if rank == 0 else -1)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.load_checkpoint(whole, tmp_path / "out")
    assert caught.value.name == "a"


@pytest.mark.parametrize("name", ["nothing", "file.txt"])
def test_an_absent_source_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hello")
    with pytest.raises(FileNotFoundError):
        sx.load_checkpoint({"a": torch.zeros(1)}, tmp_path / name)


# Nested state


def test_a_job_resumes_where_it_stopped(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    trained(model, optimizer)
    schedule.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "step": 7,
        "seen": [1, (2, "x")],
        "nan": float("nan"),
    }
    sx.save_checkpoint(state, tmp_path / "ckpt")
    fresh = model_of(2)
    its = torch.optim.AdamW([{"params": fresh[0].parameters(), "lr": 0.1}, {"params": fresh[2].parameters()}])
    plan = torch.optim.lr_scheduler.StepLR(its, 5)
    other = {
        "model": fresh,
        "optimizer": its,
        "schedule": plan,
        "step": 0,
        "seen": [],
        "nan": 0.0,
    }
    sx.load_checkpoint(other, tmp_path / "ckpt")
    assert equal(fresh.state_dict(), model.state_dict())
    assert equal(its.state_dict(), optimizer.state_dict())
    assert equal(plan.state_dict(), schedule.state_dict())
    assert (other["step"], other["seen"], other["nan"] != other["nan"]) == (7, [1, (2, "x")], True)
    for m, o in ((model, optimizer), (fresh, its)):
        trained(m, o, 2)
    assert equal(fresh.state_dict(), model.state_dict())


def test_an_optimizer_finds_its_parameters_by_name(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "ckpt")
    turned = torch.optim.Adam(list(fresh.parameters())[::-1])
    sx.load_checkpoint({"model": fresh, "optimizer": turned}, tmp_path / "ckpt")
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert equal(optimizer.state[one], turned.state[other])


def test_state_that_was_not_saved_is_named(tmp_path: Path) -> None:
    sx.save_checkpoint({"model": model_of(1), "step": 7}, tmp_path / "ckpt")
    with pytest.raises(FileNotFoundError, match=r"missing.*\bepoch;.*\bstep;"):
        sx.load_checkpoint({"model": model_of(2), "epoch": 7}, tmp_path / "ckpt")
    with pytest.raises(FileNotFoundError, match=r'model, step;.*\{"prefix": state\}'):
        sx.load_checkpoint(model_of(2), tmp_path / "ckpt")
    with pytest.raises(
        sx.errors.InvalidArgumentError,
        match="something else",
    ) as caught:
        sx.load_checkpoint({"model": model_of(2), "step": torch.zeros(1)}, tmp_path / "ckpt")
    assert caught.value.name == "step"
    assert (caught.value.expected, caught.value.found) == ("a tensor", "an int")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"a": torch.zeros(2), "step": 7}
    with pytest.raises(FileNotFoundError, match=r"missing.*\bstep;.*strict=False"):
        sx.load_checkpoint(state, tmp_path / "model.safetensors")
    assert sx.load_checkpoint(state, tmp_path / "model.safetensors", strict=False).missing == ("step",)
    assert state["step"] == 7
    assert sx.load_checkpoint(state, tmp_path / "model.safetensors", include="a").num_tensors == 1


def test_an_optimizer_without_state_in_the_source_is_missing(tmp_path: Path) -> None:
    model = model_of(1)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    sx.export_checkpoint({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match=r"missing.*\boptimizer;.*strict=False"):
        sx.load_checkpoint(state, tmp_path / "hf")
    assert sx.load_checkpoint(state, tmp_path / "hf", include="model.*").missing == ()


class Extra(nn.Module):
    """A module with extra state (numbers or a tensor), and with a tensor that it saves as a copy."""

    def __init__(self, value: int, *, as_tensor: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.value = value
        self.as_tensor = as_tensor

    def get_extra_state(self) -> Any:
        return torch.tensor([self.value]) if self.as_tensor else {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = int(state[0]) if self.as_tensor else state["value"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].detach().clone()


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_tensor_saved_as_a_copy_is_loaded_by_its_module(as_tensor: bool, nested: bool, tmp_path: Path) -> None:
    one, other = (nn.Sequential(Extra(value, as_tensor=as_tensor)) for value in (5, 0))
    sx.save_checkpoint({"m": one} if nested else one, tmp_path / "saved")
    sx.load_checkpoint({"m": other} if nested else other, tmp_path / "saved")
    assert (other[0].value, other[0].weight.tolist()) == (5, [5.0, 5.0])


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Linear):
        """It is known by its name."""

    save_file({"weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="FSDP1"):
        sx.load_checkpoint(FullyShardedDataParallel(1, 1), tmp_path)


def test_a_mapping_of_modules_loads_names_with_a_prefix(tmp_path: Path) -> None:
    one, other = model_of(1), model_of(2)
    save_file({f"model.{n}": t for n, t in one.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r'model\..*\{"prefix": state\}'):
        sx.load_checkpoint(other, tmp_path)
    sx.load_checkpoint({"model": other}, tmp_path)
    assert equal(other.state_dict(), one.state_dict())
    report = sx.load_checkpoint({"model": other, "head": nn.Linear(1, 1)}, tmp_path, strict=False)
    assert report.missing == ("head",)


def test_a_config_without_state_is_ignored(tmp_path: Path) -> None:
    """An NFSWorkspace has such a config beside its weights."""
    sx.NFSWorkspace(tmp_path).write_configs_and_weights({"hidden": 3}, {"a": torch.ones(2)})
    live = {"a": torch.zeros(2)}
    sx.load_checkpoint(live, tmp_path)
    assert live["a"].tolist() == [1, 1]


def test_a_saved_state_with_a_tensor_that_is_in_no_file_is_corrupt(tmp_path: Path) -> None:
    config = encode({"w": [object()]}, lambda value, path: path if type(value) is object else None)
    Workspace(tmp_path).write([], run="job", round=1, rank=0, world_size=1, config=config)
    with pytest.raises(sx.errors.CorruptError, match="no file") as caught:
        sx.load_checkpoint({"w": [torch.ones(2)]}, tmp_path)
    assert caught.value.name == ".w[0]"


def test_an_optimizer_of_fewer_or_more_parameters_is_loaded_without_strict(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    optimizer = torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}])
    trained(model, optimizer)
    optimizer.state["global"] = {"seen": 3}
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    fewer = torch.optim.Adam(fresh[2].parameters())
    with pytest.raises(ValueError, match=r": optimizer\.state\.model\.0\.weight, optimizer\.state\.model\.0\.bias;"):
        sx.load_checkpoint({"model": fresh, "optimizer": fewer}, tmp_path / "saved")
    sx.load_checkpoint({"model": fresh, "optimizer": fewer}, tmp_path / "saved", strict=False)
    assert equal(fewer.state[fresh[2].weight], optimizer.state[model[2].weight])
    assert fewer.state["global"] == {"seen": 3}
    joined = torch.optim.Adam(fresh.parameters())
    with pytest.raises(ValueError, match="values of 'lr'") as caught:
        sx.load_checkpoint({"model": fresh, "optimizer": joined}, tmp_path / "saved", strict=False)
    assert caught.value.name == "optimizer.param_groups.0"
    assert all(repr(name) in str(caught.value) for name in ("model.0.weight", "model.2.weight"))
    more = torch.optim.Adam([{"params": fresh[0].parameters()}, {"params": fresh[1:].parameters()}])
    trained(fresh, more)
    before = {key: value.clone() for key, value in more.state[fresh[1].weight].items()}
    report = sx.load_checkpoint({"model": fresh, "optimizer": more}, tmp_path / "saved", strict=False)
    assert report.missing == ("optimizer.state.model.1.weight", "optimizer.state.model.1.bias")
    assert equal(more.state[fresh[1].weight], before)


@pytest.mark.parametrize(
    ("live", "message"),
    [
        ({"a": torch.zeros(1).expand(2)}, "share memory"),
        ({"a": FROZEN}, "read-only"),
        (
            {"a": torch.zeros(2), "s": torch.amp.GradScaler("cpu")},
            "something else",
        ),
        ({"a": torch.zeros(2), "s": (1, torch.zeros(2))}, "something else"),
    ],
    ids=["expanded", "read-only", "scaler", "tuple"],
)
def test_state_that_cannot_be_filled_is_refused_before_any_change(live: Any, message: str, tmp_path: Path) -> None:
    sx.save_checkpoint({"a": torch.ones(2), "s": None}, tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        sx.load_checkpoint({"first": torch.zeros(2), "s": None, **live}, tmp_path / "saved", strict=False)
    assert not live["a"].any()


def test_tensors_in_a_tuple_are_filled_in_place(tmp_path: Path) -> None:
    sx.save_checkpoint({"pair": (torch.ones(2), 3)}, tmp_path / "saved")
    live = {"pair": (torch.zeros(2), 3)}
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["pair"][0].tolist() == [1, 1]
    sx.save_checkpoint((torch.ones(2), 3), tmp_path / "tuple")
    kept = live["pair"][0]
    live["pair"] = (kept, 4)
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["pair"][0] is kept
    assert live["pair"][1] == 3
    with pytest.raises(ValueError, match="a tuple"):
        sx.load_checkpoint((kept, 4), tmp_path / "tuple")


@pytest.mark.parametrize("source", [b"x", ""])
def test_a_source_is_a_path(source: Any) -> None:
    with pytest.raises(ValueError, match="or a URL"):
        sx.load_checkpoint({"a": torch.zeros(1)}, source)


def test_three_tied_names_are_loaded_from_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model["b"].weight = model["c"].weight = model["a"].weight
    save_file({"b.weight": torch.full((2, 2), 7.0)}, tmp_path / "model.safetensors")
    sx.load_checkpoint(model, tmp_path)
    assert model["c"].weight.eq(7).all()


# Ranks


def placed(whole: torch.Tensor, mesh: Any, text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if p == "r" else Shard(int(p)) for p in text]
    return distribute_tensor(whole, mesh, placements)


def mesh_of(shape: list[int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(shape))


def saves_and_loads(folder: str, placement_cases: list[Any]) -> None:
    """Save tensors with one placement, and load them into tensors with another."""
    import torch.distributed as dist

    state, live, wholes = {}, {}, {}
    meshes: dict[str, Any] = {}
    for number, (shape, before, after) in enumerate(placement_cases):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 0.5
        wholes[f"t{number}"] = whole
        for target, (mesh_shape, text) in ((state, before), (live, after)):
            mesh = meshes.setdefault(str(mesh_shape), mesh_of(mesh_shape) if str(mesh_shape) not in meshes else None)
            target[f"t{number}"] = placed(whole if target is state else torch.zeros(shape), mesh, text)
    sx.save_checkpoint(state, f"{folder}/saved")
    sx.export_checkpoint(state, f"{folder}/exported")
    for source in ("saved", "exported"):
        for tensor in live.values():
            tensor.to_local().zero_()
        sx.load_checkpoint(live, f"{folder}/{source}")
        for name, tensor in live.items():
            assert torch.equal(tensor.full_tensor(), wholes[name]), (source, name)
    dist.barrier()


MESHES = {2: [[2]], 3: [[3]], 4: [[4], [2, 2]]}


@st.composite
def placement_cases(draw: Any, world_size: int) -> Any:
    def mesh_and_placements(dims: int) -> Any:
        mesh = draw(st.sampled_from(MESHES[world_size]))
        return [mesh, "".join(draw(st.sampled_from(["r", *map(str, range(dims))])) for _ in mesh)]

    found = []
    for _ in range(12):
        shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        found.append([shape, mesh_and_placements(len(shape)), mesh_and_placements(len(shape))])
    return found


@pytest.mark.parametrize("world_size", [2, slow(3), slow(4)])
def test_any_placement_is_loaded_into_any_other(world_size: int, tmp_path: Path) -> None:
    numbers = iter(range(100))

    @settings(max_examples=3, derandomize=True)
    @given(placement_cases(world_size))
    def check(found: Any) -> None:
        folder = str(tmp_path / str(next(numbers)))
        run_ranks(saves_and_loads, world_size, backend="gloo", args=(folder, found), timeout_s=120)

    check()


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trains_and_saves(folder: str) -> list[Any]:
    import torch.distributed as dist

    model, optimizer = sharded(1)
    trained(model, optimizer)
    sx.save_checkpoint({"model": model, "optimizer": optimizer, "step": 3}, folder)
    dist.barrier()
    return [sums(model, optimizer)]


def resumes(folder: str) -> list[Any]:
    import torch.distributed as dist

    model, optimizer = sharded(2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    sx.load_checkpoint(state, folder)
    assert state["step"] == 3
    assert optimizer.param_groups[0]["lr"] == 0.1
    kinds = {type(value).__name__ for values in optimizer.state.values() for value in values.values()}
    assert kinds == {"Tensor", "DTensor"}
    found = sums(model, optimizer)
    trained(model, optimizer, 1)  # continues
    dist.barrier()
    return [found]


def sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return a state as numbers that contain every bit."""
    tensors = list(model.state_dict().values())
    for parameter in model.parameters():
        tensors += [optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq")]
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [t.double().flatten().tolist() for t in full]


@pytest.mark.parametrize("after", [1, slow(3)])
def test_a_sharded_job_resumes_on_another_number_of_ranks(after: int, tmp_path: Path) -> None:
    before = run_ranks(trains_and_saves, 2, backend="gloo", args=(str(tmp_path / "ckpt"),), timeout_s=120)
    found = run_ranks(resumes, after, backend="gloo", args=(str(tmp_path / "ckpt"),), timeout_s=120)
    assert all(rank == before[0] for rank in found)


def loads_before_backward(folder: str) -> None:
    mesh = mesh_of([sx.get_world_size()])
    for of_local in (False, True):
        weight = nn.Parameter(placed(torch.ones(4, 2), mesh, "0"))
        used = weight.to_local() if of_local else weight
        loss = (used * used).sum()
        sx.load_checkpoint({"w": weight}, folder)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_load_increments_the_version_of_a_shard(world_size: int, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    run_ranks(loads_before_backward, world_size, backend="gloo", args=(str(tmp_path),), timeout_s=120)


def casts_into_shards(folder: str) -> None:
    """Load a model of float32 into one of bfloat16, and into one whose shards are columns."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (sx.get_world_size(),))
    for dtype, dim in ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 1)):
        weight = distribute_tensor(torch.zeros(6, 4, dtype=dtype), mesh, [Shard(dim)])
        model = distribute_module(nn.Linear(4, 6, bias=False, dtype=dtype), mesh)
        model.weight = nn.Parameter(weight)
        sx.load_checkpoint(model, folder, dtype="state")
        assert torch.equal(model.weight.full_tensor(), torch.arange(24.0).reshape(6, 4).to(dtype))
        assert model.weight.requires_grad
    model, _ = sharded(2)
    sx.export_checkpoint(model, f"{folder}/rounded", dtype="bfloat16")
    sx.load_checkpoint(model, f"{folder}/rounded", dtype="state")
    assert all(torch.equal(one, one.bfloat16()) for one in (p.full_tensor() for p in model.parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_model_of_another_dtype_is_filled(world_size: int, tmp_path: Path) -> None:
    save_file({"weight": torch.arange(24.0).reshape(6, 4)}, tmp_path / "model.safetensors")
    run_ranks(casts_into_shards, world_size, backend="gloo", args=(str(tmp_path),), timeout_s=120)


def does_not_fit(backend: str, folder: str) -> None:
    comm = launched_communicator(backend)
    live = {"a": torch.zeros(2 + comm.rank)}
    with pytest.raises(ValueError, match="shape differs") as caught:
        sx.load_checkpoint(live, folder)
    assert (caught.value.name, caught.value.rank) == ("a", 1)
    assert (caught.value.expected, caught.value.found) == ((2,), (3,))
    assert not live["a"].any()


@pytest.mark.parametrize("backend", AND_MPI)
def test_an_error_of_one_rank_is_raised_on_all(backend: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    run_ranks(does_not_fit, 2, backend=backend, args=(backend, str(tmp_path)))


def builds_stages(folder: str) -> list[Any]:
    """Save a pipeline of two stages, whose optimizers number their parameters alike."""
    rank = sx.get_communicator().rank
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    stage[f"layer{rank}"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sx.save_checkpoint({"model": stage, "optimizer": optimizer}, folder)
    return [
        [t.flatten().tolist() for t in stage.state_dict().values()],
        optimizer.state[stage[f"layer{rank}"].bias]["momentum_buffer"].tolist(),
    ]


def test_stages_of_a_pipeline_are_loaded_into_one_process(tmp_path: Path) -> None:
    stages = run_ranks(builds_stages, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    model = nn.ModuleDict({f"layer{i}": nn.Linear(3, 3) for i in range(2)})
    optimizer = torch.optim.SGD([{"params": model[name].parameters()} for name in model], lr=1.0, momentum=0.9)
    sx.load_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    for i, (tensors, momentum) in enumerate(stages):
        assert [t.flatten().tolist() for t in model[f"layer{i}"].state_dict().values()] == tensors
        assert optimizer.state[model[f"layer{i}"].bias]["momentum_buffer"].tolist() == momentum
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def resumes_stages(folder: str) -> None:
    """Load on the same number of ranks: each stage finds its own state, with strict=True."""
    rank = sx.get_communicator().rank
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0, momentum=0.9)
    report = sx.load_checkpoint({"model": stage, "optimizer": optimizer}, folder)
    assert (report.missing, report.unexpected) == ((), ())
    assert optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)


def test_stages_of_a_pipeline_resume_on_their_ranks(tmp_path: Path) -> None:
    run_ranks(builds_stages, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    run_ranks(resumes_stages, 2, backend="gloo", args=(str(tmp_path / "saved"),))


def saves_different_values(folder: str) -> None:
    """Check that each rank gets back what it saved under one name, as the state of a generator."""
    comm = sx.get_communicator()
    saved = {"rng": torch.full((3,), comm.rank), "seed": 10 + comm.rank, "same": torch.ones(2)}
    sx.save_checkpoint(saved, folder)
    live = {"rng": torch.zeros(3, dtype=torch.int64), "seed": 0, "same": torch.zeros(2)}
    sx.load_checkpoint(live, folder)
    assert (live["rng"].tolist(), live["seed"]) == ([comm.rank] * 3, 10 + comm.rank)


def test_values_that_differ_between_ranks_are_loaded_on_their_ranks(tmp_path: Path) -> None:
    run_ranks(saves_different_values, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    live = {"rng": torch.zeros(3, dtype=torch.int64), "seed": 0, "same": torch.zeros(2)}
    with pytest.raises(sx.errors.ReplicaError, match=r"'seed'.*exclude='seed'") as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.ReplicaError, match="different values") as caught:
        sx.load_checkpoint(live, tmp_path / "saved", exclude="seed")
    assert caught.value.name == "rng"
    assert caught.value.rank == 1
    assert sx.load_checkpoint(live, tmp_path / "saved", exclude=["seed", "rng"]).missing == ()
    assert (live["rng"].tolist(), live["seed"], live["same"].tolist()) == ([0, 0, 0], 0, [1.0, 1.0])


def test_the_saved_tree_can_be_read(tmp_path: Path) -> None:
    """The files have names of parameters, not numbers."""
    model = model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    trained(model, optimizer, 1)
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    from statexchange.formats.registry import open_source

    source = open_source(tmp_path / "saved")
    names = [tensor.shard.name for _, tensor in source.shards()]
    assert "optimizer.state.model.0.weight.momentum_buffer" in names
    assert json.loads(source.configs[0])["optimizer"]["param_groups"][0]["params"][0] == "model.0.weight"


def stored_tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(300_000)
    return {
        "same": numbers.float().reshape(1000, 300),
        "also": numbers[:150_000].int().reshape(500, 300),
        "strided": numbers[:150_000].bfloat16().reshape(500, 300),
        "rows": numbers.double().reshape(1000, 300),
        "scalar": torch.tensor(2.5),
    }


def load_from_a_store(backend: str, directory: str, url: str) -> int:
    """Load boxes that all ranks need and boxes that one needs; return the bytes that this rank has read."""
    comm = start(backend, directory)
    state: dict[str, Any] = {
        "same": nn.Parameter(torch.zeros(1000, 300)),
        "also": np.zeros((500, 300), np.int32),
        "strided": torch.zeros(300, 500, dtype=torch.bfloat16).T,
        "scalar": torch.tensor(0.0),
    }
    if backend == "gloo":
        state["rows"] = placed(torch.zeros(1000, 300).double(), mesh_of([comm.world_size]), "0")
    report = sx.load_checkpoint(state, url, strict=False)
    for name, live in state.items():
        found = live.full_tensor() if name == "rows" else torch.as_tensor(live).detach()
        assert torch.equal(found, stored_tensors()[name]), name
    comm.barrier()
    return report.nbytes


@pytest.mark.parametrize("backend", ["gloo", slow("shm"), "hierarchical", slow("mpi")])
def test_a_box_that_several_ranks_of_a_host_need_is_read_from_a_store_once(backend: str, tmp_path: Path) -> None:
    sx.export_checkpoint(stored_tensors(), tmp_path / "out")
    (tmp_path / "meet").mkdir()
    args = (backend, str(tmp_path / "meet"), f"local://{tmp_path}/out")
    found = run_ranks(load_from_a_store, 3, backend=LAUNCHED_AS[backend], args=args, timeout_s=120)
    whole = sum(t.nbytes for n, t in stored_tensors().items() if n != "rows" or backend == "gloo")
    hosts = 2 if backend == "hierarchical" else 1
    alone = stored_tensors()["rows"].nbytes if backend == "gloo" else 0
    assert sum(found) == hosts * (whole - alone) + alone
    assert min(found) > 0


def loads_from_its_own_directory(directory: str, folder: str) -> list[float]:
    comm = start("hierarchical", directory, "ab")
    os.chdir(f"{folder}/{comm.rank}")
    state = {"w": torch.zeros(6)}
    sx.load_checkpoint(state, "/proc/self/cwd/out")
    return list(state["w"].tolist())


def test_copies_on_two_hosts_are_one_checkpoint_though_a_tool_has_indented_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    sx.export_checkpoint({"w": torch.arange(6.0)}, tmp_path / "0" / "out")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    manifest = tmp_path / "1" / "out" / "statexchange.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=2))
    args = (str(tmp_path / "meet"), str(tmp_path))
    found = run_ranks(loads_from_its_own_directory, 2, backend=LAUNCHED_AS["hierarchical"], args=args)
    assert found == [[0, 1, 2, 3, 4, 5]] * 2


def opens_another_checkpoint(backend: str, directory: str, folder: str) -> None:
    comm = start(backend, directory)
    with pytest.raises(sx.errors.InvalidArgumentError, match="the same path") as caught:
        sx.load_checkpoint({"w": torch.zeros(3)}, f"{folder}/{'two' if comm.rank else 'one'}")
    assert caught.value.rank == 1
    assert all(f"{folder}/{name}" in str(caught.value) for name in ("one", "two"))
    state = {"w": torch.zeros(3)}
    sx.load_checkpoint(state, f"{folder}/one")
    assert state["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_ranks_that_open_different_checkpoints_get_an_error(backend: str, tmp_path: Path) -> None:
    for value, name in ((1.0, "one"), (2.0, "two")):
        sx.export_checkpoint({"w": torch.full((3,), value)}, tmp_path / name)
    run_ranks(opens_another_checkpoint, 2, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path), str(tmp_path)))


def loads_while_it_is_replaced(path: str, layout: Any, replacing_rank: int) -> int:
    """Load again and again; at the n-th storage call of one rank the checkpoint is overwritten."""
    comm = sx.get_communicator()
    alone = sx.init("single")
    calls, stop_at, value = 0, 0, 0.0

    def publish() -> None:
        tensors = {f"t{i}": torch.full((6, 4), value) for i in range(3)}
        sx.export_checkpoint(tensors, path, overwrite=True, max_shard_size=150, comm=alone)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal calls, stop_at
        if event == "statexchange.storage" and stop_at:
            calls += 1
            if calls == stop_at:
                stop_at = 0
                publish()

    sys.addaudithook(hook)
    if comm.rank == 0:
        publish()
    comm.barrier()
    for number in range(1, 100):
        calls, stop_at, value = 0, number if comm.rank == replacing_rank else 0, float(number)
        parts = {f"t{i}": torch.zeros(3 if layout else 6, 4) for i in range(3)}
        sx.load_checkpoint(parts, path, layout=layout, comm=comm)
        found = sorted({float(v) for part in parts.values() for v in part.flatten()})
        on_all = comm.gather_object(found)
        reached = comm.broadcast_object(not stop_at, root=replacing_rank)
        stop_at = 0
        if comm.rank == 0:
            assert on_all is not None
            assert on_all in ([[value - 1]] * 2, [[value]] * 2), (number, on_all)
        if not reached:
            return number - 1
    raise AssertionError("a load without an end")


@pytest.mark.parametrize("layout", [None, {"*": {"dim": 0}}], ids=["whole", "parts"])
@pytest.mark.parametrize("replacing_rank", [slow(0), 1])
def test_ranks_load_one_of_two_checkpoints_whenever_it_is_replaced(
    replacing_rank: int, layout: Any, tmp_path: Path
) -> None:
    found = run_ranks(
        loads_while_it_is_replaced,
        2,
        backend="gloo",
        args=(str(tmp_path / "out"), layout, replacing_rank),
        timeout_s=120,
    )
    print(f"replaced at {found[0]} calls")
    assert found[0] > 5
    assert os.listdir(tmp_path) == ["out"]


def saves_parts_of_its_own(folder: str) -> None:
    rank = sx.get_rank()
    sx.save_checkpoint({"buffer": torch.arange(3.0 + rank), "step": 7}, folder)
    state = {"buffer": torch.zeros(3 + rank), "step": 0}
    sx.load_checkpoint(state, folder)
    assert state["buffer"].tolist() == list(range(3 + rank))


def test_tensors_with_another_shape_on_each_rank_are_loaded(tmp_path: Path) -> None:
    run_ranks(saves_parts_of_its_own, 2, args=(str(tmp_path / "saved"),))


def test_state_without_tensors_comes_back(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 7, "x": [1, 2]}, tmp_path / "saved")
    state = {"step": 0, "x": [0]}
    sx.load_checkpoint(state, tmp_path / "saved")
    assert state == {"step": 7, "x": [1, 2]}


def test_the_names_of_a_state_of_values_are_compared(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 7, "model": nn.Linear(1, 1)}, tmp_path / "saved")
    live = {"step": 0, "own": 5}
    with pytest.raises(FileNotFoundError, match=r"missing.*: own;.*: model;.*strict=False"):
        sx.load_checkpoint(live, tmp_path / "saved")
    assert live == {"step": 0, "own": 5}
    report = sx.load_checkpoint(live, tmp_path / "saved", strict=False)
    assert (live, report.missing, report.unexpected) == ({"step": 7, "own": 5}, ("own",), ("model",))
    with pytest.raises(FileNotFoundError, match="no name") as caught:
        sx.load_checkpoint({"own": 5}, tmp_path / "saved", strict=False)
    assert ": own;" in caught.value.message


def test_strict_is_not_advised_where_it_changes_nothing(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 7}, tmp_path / "saved")
    for strict in (True, False):
        with pytest.raises(FileNotFoundError, match=r"missing.*\bw\b") as caught:
            sx.load_checkpoint({"w": torch.zeros(2), "step": 0}, tmp_path / "saved", strict=strict)
        assert "strict" not in caught.value.message


@pytest.mark.parametrize(
    "options",
    [{"include": ["*.a", "step"]}, {"exclude": ["cfg.b", "*.deep.b", "x", "model.*"]}],
    ids=["include", "exclude"],
)
@pytest.mark.parametrize("with_model", [True, False])
def test_plain_values_that_are_not_selected_stay(options: dict[str, Any], with_model: bool, tmp_path: Path) -> None:
    saved = {"step": 7, "cfg": {"a": 1, "b": 2, "deep": {"a": 3, "b": 4}}, "x": 5}
    model = {"model": nn.Linear(1, 1)} if with_model else {}
    sx.save_checkpoint({**saved, **model}, tmp_path / "saved")
    live: dict[str, Any] = {"step": 0, "cfg": {"a": 0, "b": "own", "deep": {"a": 0, "b": "own"}}, "x": "own", **model}
    inner = live["cfg"]
    sx.load_checkpoint(live, tmp_path / "saved", **options)
    assert live == {"step": 7, "cfg": {"a": 1, "b": "own", "deep": {"a": 3, "b": "own"}}, "x": "own", **model}
    assert live["cfg"] is inner
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live == {**saved, **model}


def selects_by_patterns(folder: str) -> None:
    live = {f"w{sx.get_rank()}": torch.zeros(2)}
    for strict in (True, False):
        with pytest.raises(sx.errors.InvalidArgumentError, match=r"include=\['other'\]"):
            sx.load_checkpoint(live, folder, include="other", strict=strict)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"exclude=\['\*'\]"):
        sx.load_checkpoint(live, folder, exclude="*")
    report = sx.load_checkpoint(live, folder, include="w1")  # one rank has it
    assert report.num_tensors == sx.get_rank()


@pytest.mark.parametrize("verb", ["save", "export"])
def test_patterns_that_select_nothing_on_any_rank_are_an_error(verb: str, tmp_path: Path) -> None:
    state = {"w0": torch.ones(2), "w1": torch.ones(2)}
    (sx.save_checkpoint if verb == "save" else sx.export_checkpoint)(state, tmp_path / "out")
    run_ranks(selects_by_patterns, 2, args=(str(tmp_path / "out"),))


def saves_at_two_places(folder: str) -> None:
    rank = sx.get_rank()
    with pytest.raises(sx.errors.NotFoundError, match="shared directory") as caught:
        sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/in{rank}/saved")
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.InvalidArgumentError, match="rank 1: pass the same") as caught:
        sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/{rank}")
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.InvalidArgumentError, match="or a URL"):
        sx.save_checkpoint({"w": torch.ones(3)}, 3 if rank else f"{folder}/saved")  # type: ignore[arg-type]
    for wrong in ("3", [1]):
        with pytest.raises(sx.errors.InvalidArgumentError, match="number of seconds"):
            sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/saved", stall_timeout_s=wrong)  # type: ignore[call-overload]
    left = sorted(path.name for path in Path(folder).rglob("*"))
    assert left == ["in0", "in1"]  # rank 1's was there, and rank 0's was made for what was refused: both are empty
    sx.get_communicator().barrier()
    sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/saved")
    with pytest.raises(sx.errors.InvalidArgumentError, match="number of seconds"):
        sx.load_checkpoint({"w": torch.ones(3)}, f"{folder}/saved", stall_timeout_s="3")  # type: ignore[arg-type]


def test_ranks_that_save_to_different_paths_get_an_error(tmp_path: Path) -> None:
    (tmp_path / "in1").mkdir()
    run_ranks(saves_at_two_places, 2, args=(str(tmp_path),))


def saves_at_a_relative_path(folder: str) -> None:
    """Each rank works in a directory of its own, so one relative path is two places."""
    rank = sx.get_rank()
    os.chdir(f"{folder}/{rank}")
    state = {"w": torch.ones(3)}
    for write in (
        lambda: sx.save_checkpoint(state, "saved"),
        lambda: sx.Checkpoints("saves").save(state, step=1),
    ):
        with pytest.raises(sx.StateExchangeError, match="pass the same") as caught:
            write()
        text = str(caught.value)
        assert "does not see what rank 0" in text
        assert f"{folder}/1/save" in text
        sx.get_communicator().barrier()


def test_a_relative_path_of_ranks_in_different_directories_is_an_error_that_names_both(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    run_ranks(saves_at_a_relative_path, 2, backend="gloo", args=(str(tmp_path),))
    assert {path.name for path in tmp_path.rglob("*")} <= {"0", "1", "saves"}  # the last is empty: no step was saved


class Copying(nn.Module):
    """A module that saves a copy of a tensor that is no parameter or buffer of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(size)))
        self.size = size

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "copy"] = torch.zeros(self.size)


def test_a_copy_of_another_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    sx.save_checkpoint({"model": Copying(3)}, tmp_path / "saved")
    live = Copying(4)
    with pytest.raises(sx.errors.InvalidArgumentError, match="shape or dtype") as caught:
        sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert caught.value.name == "model.copy"
    assert live.w.tolist() == [4.0, 4.0]


# Options


def saves_statistics(folder: str) -> None:
    """Save the state that DistributedDataParallel leaves: equal parameters, and statistics of each rank's batches."""
    rank = sx.get_rank()
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(1.0 + rank)
    sx.save_checkpoint({"model": norm}, folder)
    live = nn.BatchNorm1d(3)
    sx.load_checkpoint({"model": live}, folder, replicas="root")
    assert live.running_mean.tolist() == [1.0 + rank] * 3  # on the same number of ranks each gets its own


def test_replicas_root_loads_the_lowest_ranks_copy(tmp_path: Path) -> None:
    run_ranks(saves_statistics, 2, args=(str(tmp_path / "saved"),))
    live = nn.BatchNorm1d(3)
    with pytest.raises(sx.errors.ReplicaError, match='replicas="root"') as caught:
        sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert caught.value.name == "model.running_mean"
    sx.load_checkpoint({"model": live}, tmp_path / "saved", replicas="root")
    assert live.running_mean.tolist() == [1.0] * 3


class Block(nn.Module):
    """Part `rank` of `ranks` of an MLP that was cut by hand."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        gate_up, down = torch.randn(16, 5), torch.randn(5, 8)
        size = 8 // ranks
        mine = slice(rank * size, rank * size + size)
        self.gate_up = nn.Parameter(torch.cat([gate_up[:8][mine], gate_up[8:][mine]]).clone())
        self.down = nn.Parameter(down[:, mine].clone())
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Omits the sum over ranks: the gradients only need the right shapes."""
        half = self.gate_up.shape[0] // 2
        hidden = torch.nn.functional.linear(x, self.gate_up)
        return torch.nn.functional.linear(hidden[:, :half] * hidden[:, half:], self.down) * self.scale.detach()


PARTS = {"*.gate_up": {"dim": 0, "blocks": [1, 1]}, "*.down": {"dim": 1}}


def block_state(rank: int, ranks: int, *, steps: int) -> dict[str, Any]:
    model = Block(rank, ranks)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": steps}


def plain_block(state: dict[str, Any]) -> Any:
    """Return all tensors of a block and its optimizer, by name."""
    states = {name: state["optimizer"].state.get(p, {}) for name, p in state["model"].named_parameters()}
    tensors = {name: p.detach() for name, p in state["model"].named_parameters()}
    tensors |= {f"{name}.{key}": value for name, entries in states.items() for key, value in entries.items()}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def cut_by_hand(folder: str) -> list[Any]:
    rank = sx.get_rank()
    state, fresh = block_state(rank, 2, steps=2), block_state(rank, 2, steps=0)
    sx.save_checkpoint(state, f"{folder}/two", layout=PARTS)
    for parameter in fresh["model"].parameters():
        parameter.data.zero_()
    sx.load_checkpoint(fresh, f"{folder}/two", layout=PARTS)
    assert plain_block(fresh) == plain_block(state)
    assert fresh["step"] == 2
    with pytest.raises(sx.errors.InvalidArgumentError, match="give a layout"):
        sx.load_checkpoint(fresh, f"{folder}/two")
    return [plain_block(state)]


def is_the_part_of(folder: str) -> list[Any]:
    """Load what one process saved or exported into parts."""
    rank = sx.get_rank()
    found = []
    for source in ("one", "exported"):
        fresh = block_state(rank, 2, steps=0)
        state = fresh if source == "one" else {"model": fresh["model"]}
        sx.load_checkpoint(state, f"{folder}/{source}", layout=PARTS)
        found.append(plain_block(fresh))
    return found


def test_state_that_was_cut_by_hand_is_saved_and_loaded_with_a_layout(tmp_path: Path) -> None:
    parts = [found[0] for found in run_ranks(cut_by_hand, 2, args=(str(tmp_path),))]
    whole = block_state(0, 1, steps=0)
    sx.load_checkpoint(whole, tmp_path / "two")
    found = plain_block(whole)
    assert found["scale"] == parts[0]["scale"]
    for name in ("gate_up", "gate_up.exp_avg"):
        first, second = (torch.tensor(part[name]) for part in parts)
        assert found[name] == torch.cat([first[:4], second[:4], first[4:], second[4:]]).tolist()
    for name in ("down", "down.exp_avg_sq"):
        assert found[name] == torch.cat([torch.tensor(part[name]) for part in parts], 1).tolist()
    sx.save_checkpoint(whole, tmp_path / "one")
    sx.export_checkpoint(
        {"model." + name: tensor for name, tensor in whole["model"].named_parameters()}, tmp_path / "exported"
    )
    for rank, (saved, exported) in enumerate(run_ranks(is_the_part_of, 2, args=(str(tmp_path),))):
        assert saved == parts[rank]
        assert exported == {name: parts[rank][name] for name in ("gate_up", "down", "scale")}


def renames_and_splits(folder: str) -> None:
    rank = sx.get_rank()
    qkv = torch.zeros(6, 2)
    stage = {"layers.0.qkv": torch.zeros(12, 2), "layers.1.qkv": torch.zeros(12, 2)}
    split = {"split": {"qkv": {"q": 4, "k": 1, "v": 1}}, "dim": 0}
    sx.load_checkpoint({"layers.0.qkv": qkv}, folder, layout={"*.qkv": split}, strict=False)
    q = torch.arange(16.0).reshape(8, 2)
    assert qkv.tolist() == [*q[4 * rank :][:4].tolist(), [100.0 + rank] * 2, [200.0 + rank] * 2]
    rules = [{**split, "axis": []}, {"renumber": "layers", "axis": "pp"}]
    sx.load_checkpoint(stage, folder, layout={"mesh": {"pp": 2}, "rules": {"*.qkv": rules}})
    for number in range(2):
        assert stage[f"layers.{number}.qkv"][:8].tolist() == (q + 1000 * (2 * rank + number)).tolist()
    with pytest.raises(sx.errors.InvalidArgumentError, match="pattern 'other'"):
        sx.load_checkpoint(stage, folder, layout={"other": {"dim": 0}})
    with pytest.raises(sx.errors.InvalidArgumentError, match="mesh is") as caught:
        sx.load_checkpoint(stage, folder, layout={"mesh": {"pp": 2}, "rules": {}} if rank else None)
    assert caught.value.rank == 1


def test_a_layout_may_split_and_renumber_loaded_tensors(tmp_path: Path) -> None:
    state = {}
    for layer in range(4):
        state[f"layers.{layer}.q"] = torch.arange(16.0).reshape(8, 2) + 1000 * layer
        for part, value in (("k", 100.0), ("v", 200.0)):
            state[f"layers.{layer}.{part}"] = torch.tensor([[value] * 2, [value + 1] * 2])
    sx.export_checkpoint(state, tmp_path / "out")
    run_ranks(renames_and_splits, 2, args=(str(tmp_path / "out"),))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"dim": 0, "split": {"w": {"a": 1, "b": 1}}}, "'x.w' renames"),
        ({"renumber": "x"}, "'x.w' renames"),
        ({"reduce": "max"}, "'x.w' reduces"),
    ],
    ids=["split", "renumber", "reduce"],
)
def test_a_save_refuses_rules_that_change_names_or_values(rule: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match=message):
        sx.save_checkpoint({"x": {"w": torch.ones(2)}}, tmp_path / "saved", layout={"x.w": rule})
    with pytest.raises(sx.errors.InvalidArgumentError, match="pattern 'y'"):
        sx.save_checkpoint({"x": {"w": torch.ones(2)}}, tmp_path / "saved", layout={"y": {"dim": 0}})
    sx.save_checkpoint({"x": {"w": torch.ones(2)}}, tmp_path / "saved")
    if "reduce" not in rule:
        with pytest.raises(sx.errors.InvalidArgumentError, match="renames tensors"):
            sx.load_checkpoint({"x": {"w": torch.zeros(2)}}, tmp_path / "saved", layout={"x.w": rule})


def test_dtype_state_casts_values_to_the_dtype_of_the_state(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1 / 3, -1e30, NAN, 7.0, 0.1])
    sx.save_checkpoint({"a": values, "b": values.double(), "c": values, "n": torch.arange(6)}, tmp_path / "saved")
    live: dict[str, Any] = {
        "a": torch.zeros(6, dtype=torch.bfloat16),
        "b": torch.zeros(12)[::2],
        "c": np.zeros(6, np.float16),
        "n": torch.zeros(6, dtype=torch.int64),
    }
    with pytest.raises(sx.errors.InvalidArgumentError, match='dtype="state"') as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    assert (caught.value.expected, caught.value.found) == ("F32", "BF16")
    sx.load_checkpoint(live, tmp_path / "saved", dtype="state")
    assert torch.equal(live["a"].view(torch.int16), values.bfloat16().view(torch.int16))
    assert torch.equal(live["b"].view(torch.int32), values.double().float().view(torch.int32))
    assert np.array_equal(live["c"], values.half().numpy(), equal_nan=True)
    assert live["n"].tolist() == list(range(6))
    with pytest.raises(sx.errors.InvalidArgumentError, match="dtype differs") as caught:
        sx.load_checkpoint({**live, "n": torch.zeros(6)}, tmp_path / "saved", dtype="state")
    assert caught.value.name == "n"
    assert (caught.value.expected, caught.value.found) == ("I64", "F32")


def test_an_optimizer_of_another_dtype_continues(tmp_path: Path) -> None:
    model, fresh = nn.Linear(3, 2), nn.Linear(3, 2).bfloat16()
    optimizer, its = (torch.optim.Adam(one.parameters()) for one in (model, fresh))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", dtype="state")
    state = its.state[fresh.weight]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"].bfloat16())
    fresh(torch.ones(1, 3).bfloat16()).sum().backward()
    its.step()


def casts_from_a_store(url: str) -> None:
    """Load one tensor in two dtypes, on ranks of one host."""
    rank = sx.get_rank()
    live = {"w": torch.zeros(4, dtype=torch.float32 if rank == 2 else torch.bfloat16)}
    sx.load_checkpoint(live, url, dtype="state")
    assert live["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_ranks_may_load_a_tensor_in_different_dtypes(tmp_path: Path) -> None:
    sx.export_checkpoint({"w": torch.arange(4.0)}, tmp_path / "out")
    run_ranks(casts_from_a_store, 3, args=(f"local://{tmp_path}/out",))


@pytest.mark.parametrize("nested", [True, False])
def test_names_that_are_not_included_do_not_change(nested: bool, tmp_path: Path) -> None:
    saved = {"enc": model_of(1), "head": nn.Linear(2, 2)}
    live = {"enc": model_of(2), "head": nn.Linear(3, 3), "new": nn.Linear(1, 1), "step": 0}
    if nested:
        sx.save_checkpoint({**saved, "step": 7, "more": [1, 2]}, tmp_path / "out")
    else:
        flat = {f"{part}.{name}": tensor for part in saved for name, tensor in saved[part].state_dict().items()}
        sx.export_checkpoint(flat, tmp_path / "out")
    before = {name: tensor.clone() for name, tensor in live["head"].state_dict().items()}
    bias = live["enc"][0].bias.tolist()
    report = sx.load_checkpoint(live, tmp_path / "out", include="enc.*.weight")
    assert (report.num_tensors, report.missing, report.unexpected) == (3, (), ())
    assert report.nbytes == sum(saved["enc"][i].weight.nbytes for i in range(3))
    assert torch.equal(live["enc"][0].weight, saved["enc"][0].weight)
    assert (live["enc"][0].bias.tolist(), live["step"]) == (bias, 0)
    assert equal(live["head"].state_dict(), before)
    with pytest.raises(FileNotFoundError, match=r"missing.*\bnew\b"):
        sx.load_checkpoint(live, tmp_path / "out", include=["enc.*", "new.*"])
    if nested:
        assert sx.load_checkpoint(live, tmp_path / "out", include=["enc.*", "step"]).num_tensors == 9
        assert live["step"] == 7


def test_include_loads_an_optimizer_whole(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    optimizer, its = (torch.optim.Adam(one.parameters(), lr=lr) for one, lr in ((model, 0.5), (fresh, 0.1)))
    trained(model, optimizer)
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    weight = fresh[0].weight.tolist()
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", include="optimizer.*")
    assert (fresh[0].weight.tolist(), its.param_groups[0]["lr"]) == (weight, 0.5)
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", include="*.weight")
    assert fresh[0].weight.tolist() == model[0].weight.tolist()
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", include="model.*")
    assert equal(fresh.state_dict(), model.state_dict())


def test_rename_maps_names_of_the_source_to_the_state(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    flat = {f"module.net.{name}": tensor for name, tensor in model.state_dict().items()}
    sx.export_checkpoint(flat, tmp_path / "flat")
    for rename in ([(r"^module\.", ""), ("^net", "model")], lambda name: name.replace("module.net", "model")):
        for tensor in fresh.state_dict().values():
            tensor.zero_()
        sx.load_checkpoint({"model": fresh}, tmp_path / "flat", rename=rename)
        assert equal(fresh.state_dict(), model.state_dict())
    with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
        sx.load_checkpoint({"model": fresh}, tmp_path / "flat", rename=lambda name: "w")
    assert caught.value.name == "w"
    for wrong in (5, ("^net", "model")):
        with pytest.raises(sx.errors.InvalidArgumentError, match="rename must be"):
            sx.load_checkpoint({"model": fresh}, tmp_path / "flat", rename=wrong)  # type: ignore[arg-type]
    for strict in (True, False):  # loading nothing is never intended
        with pytest.raises(FileNotFoundError, match=r"missing.*\bmodel;"):
            sx.load_checkpoint({"model": fresh}, tmp_path / "flat", strict=strict)


def test_a_saved_tree_is_loaded_under_other_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"old": model_of(1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    trained(model["old"], optimizer)
    sx.save_checkpoint({"net": model, "optimizer": optimizer, "at": {"step": 7}}, tmp_path / "saved")
    fresh = model_of(2)
    its = torch.optim.Adam(fresh.parameters())
    state = {"model": fresh, "optimizer": its, "step": 0}
    sx.load_checkpoint(state, tmp_path / "saved", rename=[(r"^net\.old", "model"), (r"^at\.", "")])
    assert equal(fresh.state_dict(), model["old"].state_dict())
    assert (state["step"], its.param_groups[0]["lr"]) == (7, 0.5)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert equal(optimizer.state[one], its.state[other])
    with pytest.raises(sx.errors.UnsafeError, match="change rename") as caught:
        sx.load_checkpoint(state, tmp_path / "saved", rename=[("^at.step$", "optimizer")])
    assert caught.value.name == "optimizer"
    assert "'at.step'" in str(caught.value)
    alone = model_of(3)
    sx.load_checkpoint(alone, tmp_path / "saved", rename=[(r"^net\.old\.", "")], include=["[0-9]*"])
    assert equal(alone.state_dict(), fresh.state_dict())


def test_progress_is_reported_in_bytes(tmp_path: Path) -> None:
    state = {"a": torch.zeros(5 << 20), "b": torch.zeros(7, 3).T, "c": torch.zeros(2, dtype=torch.bfloat16)}
    saved = {"a": torch.ones(5 << 20), "b": torch.ones(3, 7), "c": torch.ones(2)}
    sx.export_checkpoint(saved, tmp_path / "out")
    progress: list[tuple[int, int]] = []
    report = sx.load_checkpoint(
        state, tmp_path / "out", dtype="state", on_progress=lambda done, total: progress.append((done, total))
    )
    assert progress[-1] == (report.nbytes, report.nbytes)
    assert report.nbytes == sum(tensor.nbytes for tensor in saved.values())
    assert {total for _, total in progress} == {report.nbytes}
    assert [done for done, _ in progress] == sorted({done for done, _ in progress})
    assert len(progress) > 4


def gives_wrong_or_different_options(folder: str) -> None:
    rank = sx.get_rank()
    options: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "state"} if rank else {}, "dtype .* default .*'state'"),
        ({"strict": rank > 0}, "strict is False .* default"),
        ({"replicas": "root"} if rank else {}, "replicas .* default .*'root'"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"replicas": "any"}, "replicas must be"),
        ({"include": 5}, "include must be"),
        ({"layout": 5} if rank else {}, "layout must map"),
    ]
    for given_options, message in options:
        with pytest.raises(sx.errors.InvalidArgumentError, match=message):
            sx.load_checkpoint({"w": torch.zeros(2)}, folder, **given_options)


def test_options_of_a_load_that_are_wrong_or_differ_are_named(tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "saved")
    run_ranks(gives_wrong_or_different_options, 2, args=(str(tmp_path / "saved"),))


def test_a_load_without_any_matching_name_names_the_options(tmp_path: Path) -> None:
    model = model_of(1)
    sx.save_checkpoint({"model": model}, tmp_path / "nested")
    sx.export_checkpoint(model, tmp_path / "flat")
    for strict in (True, False):
        with pytest.raises(FileNotFoundError, match=r'\{"prefix": state\}'):
            sx.load_checkpoint(model_of(2), tmp_path / "nested", strict=strict)
        with pytest.raises(FileNotFoundError, match=r'rename=\[\("pattern", "replacement"\)\]'):
            sx.load_checkpoint({"model": model_of(2)}, tmp_path / "flat", strict=strict)


# Live tensors that share memory


def write_model(path: Path, **tensors: torch.Tensor) -> str:
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "views",
    [
        lambda base: (base, base),
        lambda base: (base[:4], base[2:]),
        lambda base: (base, base[::2]),
        lambda base: (base.reshape(2, 3), base.reshape(2, 3).T),
    ],
    ids=["tied", "partly", "strided", "transposed"],
)
def test_live_tensors_that_share_memory_have_the_values_of_each_source(kind: Any, views: Any, tmp_path: Path) -> None:
    a, b = (torch.as_tensor(view).clone().contiguous() for view in views(torch.arange(6.0)))
    live = kind(np.zeros(6, np.float32))
    first, second = views(live)
    sx.load_checkpoint({"a": first, "b": second}, write_model(tmp_path, a=a, b=b))
    assert live.tolist() == [0, 1, 2, 3, 4, 5]

    for changed in ({"a": a + 1, "b": b}, {"a": a, "b": b + 1}):
        with pytest.raises(sx.errors.ReplicaError, match="shares memory") as caught:
            sx.load_checkpoint({"a": first, "b": second}, write_model(tmp_path, **changed))
        assert caught.value.name in ("a", "b")
    sx.load_checkpoint({"a": first, "b": second}, write_model(tmp_path, a=a, b=b + 1), exclude="b")
    assert torch.equal(torch.as_tensor(first), a)


def test_tied_weights_that_a_checkpoint_has_with_other_values_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = write_model(tmp_path, embed=torch.ones(4, 2), head=torch.full((4, 2), 2.0))

    def load() -> str:
        tied = torch.zeros(4, 2)
        with pytest.raises(sx.errors.ReplicaError) as raised:
            sx.load_checkpoint({"embed": tied, "head": tied}, path)
        return str(raised.value)

    for text in run_ranks(load, 2):
        assert "'embed'" in text
        assert "'head'" in text


def test_views_without_common_elements_may_interlock(tmp_path: Path) -> None:
    live = torch.zeros(6)
    sx.load_checkpoint(
        {"a": live[::2], "b": live[1::2]}, write_model(tmp_path, a=torch.ones(3), b=torch.full((3,), 2.0))
    )
    assert live.tolist() == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("is_negative", [False, True], ids=["conjugated", "negative"])
def test_nan_and_the_sign_of_zero_are_compared_in_views_that_negate_too(is_negative: bool, tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), -0.0, 1.0])
    if not is_negative:
        values = torch.complex(values, values.flip(0))
    live = torch.zeros(3, dtype=torch.complex64).conj()
    view = live.imag if is_negative else live
    assert view.is_neg() == is_negative
    sx.load_checkpoint({"a": view, "b": view}, write_model(tmp_path, a=values, b=values.clone()))
    assert torch.equal(view.resolve_conj().resolve_neg().view(torch.int32), values.view(torch.int32))

    with pytest.raises(sx.errors.ReplicaError, match="shares memory"):
        sx.load_checkpoint({"a": view, "b": view}, write_model(tmp_path, a=values, b=values + 0))  # -0.0 + 0 is 0.0


def test_without_strict_a_plain_value_may_be_missing_beside_any_state(tmp_path: Path) -> None:
    def scheduler() -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), step_size=3)

    saved = scheduler()
    saved.last_epoch = 5
    sx.save_checkpoint({"sched": saved, "step": 2, "w": torch.ones(2)}, tmp_path / "saved")
    live: dict[str, Any] = {"sched": scheduler(), "step": 0, "new": 1}
    sx.load_checkpoint(live, tmp_path / "saved", strict=False)
    assert (live["sched"].last_epoch, live["step"], live["new"]) == (5, 2, 1)

    live = {"w": torch.zeros(2), "step": 0, "new": 1}
    sx.load_checkpoint(live, tmp_path / "saved", include=["step", "new"], strict=False)
    assert (live["w"].tolist(), live["step"], live["new"]) == ([0, 0], 2, 1)

    with pytest.raises(sx.errors.NotFoundError, match=r"missing.*\bv;"):
        sx.load_checkpoint({"v": torch.zeros(2), "step": 0}, tmp_path / "saved", strict=False)


# Memory of tensors


def test_empty_tensors_can_be_resized_after_a_save_and_a_load(tmp_path: Path) -> None:
    whole = torch.ones(10)
    state = {"w": torch.ones(3), "empty": torch.empty(0), "part": whole[:0]}
    sx.save_checkpoint(state, tmp_path / "saved")
    sx.load_checkpoint(state, tmp_path / "saved")
    assert torch.add(state["w"], 1, out=state["empty"]).tolist() == [2, 2, 2]
    whole.untyped_storage().resize_(0)


@pytest.mark.parametrize("nbytes", [0, 64])
def test_a_tensor_whose_memory_is_given_back_during_a_load_is_not_filled(nbytes: int, tmp_path: Path) -> None:
    sx.save_checkpoint({"first": torch.ones(1 << 20), "last": torch.ones(1 << 20)}, tmp_path / "saved")
    state = {"first": torch.zeros(1 << 20), "last": torch.zeros(1 << 20)}

    def give_back(done: int, total: int) -> None:
        state["last"].untyped_storage().resize_(nbytes)

    with pytest.raises(RuntimeError, match="out of bounds"):
        sx.load_checkpoint(state, tmp_path / "saved", on_progress=give_back)


class KeptByDetach(torch.Tensor):
    """A subclass that `detach` keeps, as it must for a parameter; all other operations give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        return torch.Tensor._make_subclass(cls, found) if func is torch.ops.aten.detach.default else found


def plain(value: Any) -> Any:
    if not isinstance(value, KeptByDetach):
        return value
    with torch._C._DisableTorchDispatch():
        return value.as_subclass(torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_of_a_subclass_that_dispatches_is_saved_exported_and_loaded(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def parameter(first: float) -> nn.Parameter:
        return nn.Parameter(torch.Tensor._make_subclass(KeptByDetach, torch.arange(first, first + 4).to(dtype)))

    sx.save_checkpoint({"w": parameter(1)}, tmp_path / "saved")
    sx.export_checkpoint({"w": parameter(2)}, tmp_path / "out")
    for name, first in (("saved", 1), ("out", 2)):
        state = {"w": parameter(0)}
        sx.load_checkpoint(state, tmp_path / name)
        assert plain(state["w"]).tolist() == [first, first + 1, first + 2, first + 3]
