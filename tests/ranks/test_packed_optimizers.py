"""Optimizers whose `state_dict` packs the state of a parameter, as bitsandbytes hides its 8-bit moments from FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

PACKED = "__quantized__"
HIDDEN = ("moment", "scale")


class EightBit(torch.optim.SGD):
    """Momentum in 8 bits with a scale; `state_dict` has both in a mapping, `load_state_dict` takes them out again."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                moment = parameter.grad
                if state:
                    moment = moment + 0.9 * (state["moment"].float() - 128) * state["scale"]
                scale = moment.abs().max() / 127
                state["step"] = state.get("step", 0) + 1
                state["moment"], state["scale"] = (moment / scale + 128).round().to(torch.uint8), scale.reshape(1)
                with torch.no_grad():
                    parameter -= group["lr"] * moment

    def state_dict(self) -> dict[str, Any]:
        result = super().state_dict()
        states = {}
        for number, entries in result["state"].items():
            hidden = {key: entries[key] for key in HIDDEN}
            states[number] = {"step": entries["step"], PACKED: hidden}
        return {**result, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {}
        for number, entries in state_dict["state"].items():
            states[number] = {"step": entries["step"], **entries[PACKED]}
        dtypes = [entries["moment"].dtype for entries in states.values()]
        super().load_state_dict({**state_dict, "state": states})
        for entries, dtype in zip(self.state.values(), dtypes, strict=True):
            entries["moment"] = entries["moment"].to(dtype)


def job(steps: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model.parameters():  # not by torch's seed, which ranks on threads share
        nn.init.constant_(parameter, 0.1)
    state = {"model": model, "optimizer": EightBit(model.parameters(), lr=0.1)}
    train(state, steps)
    return state


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1, 3)).square().sum().backward()
        state["optimizer"].step()


def goes_on(path: str) -> bool:
    state, whole = job(0), job(3)
    sx.load_checkpoint(state, path)
    moment = state["optimizer"].state[state["model"][0].weight]["moment"]
    train(state, 1)
    weights = zip(state["model"].parameters(), whole["model"].parameters(), strict=True)
    return all(torch.equal(*pair) for pair in weights) and moment.dtype == torch.uint8


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_state_is_saved_and_goes_on(ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    run_ranks(lambda: sx.save_checkpoint(job(2), path) and None, ranks)
    for other in (1, 2):
        assert run_ranks(goes_on, other, args=(path,)) == [True] * other


def test_what_state_dict_returns_is_a_way_out_for_other_forms(tmp_path: Path) -> None:
    class Other(EightBit):
        def state_dict(self) -> dict[str, Any]:
            result = super().state_dict()
            return {**result, "state": {str(number): entries for number, entries in result["state"].items()}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            states = {int(number): entries for number, entries in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": states})

    state, fresh = job(2), job(0)
    for job_state in (state, fresh):
        job_state["optimizer"].__class__ = Other
    with pytest.raises(sx.errors.UnsupportedError, match="state_dict") as caught:
        sx.save_checkpoint(state, tmp_path / "refused")
    assert caught.value.name == "optimizer"
    sx.save_checkpoint({**state, "optimizer": state["optimizer"].state_dict()}, tmp_path / "saved")
    loaded = {**fresh, "optimizer": fresh["optimizer"].state_dict()}
    sx.load_checkpoint(loaded, tmp_path / "saved")
    fresh["optimizer"].load_state_dict(loaded["optimizer"])
    train(state, 1)
    train(fresh, 1)
    assert torch.equal(state["model"][0].weight, fresh["model"][0].weight)
