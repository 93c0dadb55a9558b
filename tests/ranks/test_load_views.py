"""Live tensors that share memory, and subclasses of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_map

import statexchange as sx
from statexchange.testing import run_ranks

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
