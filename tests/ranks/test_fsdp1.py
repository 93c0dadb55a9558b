"""FSDP1 itself, `FullyShardedDataParallel`: what is refused, and what the refusals say to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import statexchange as sx
from statexchange.errors import UnsupportedError
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*FSDP.*", "ignore:.*FullyShardedDataParallel.*")


def wrapped(*, use_orig_params: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1)
    return sharded, optimizer


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(4.0).reshape(1, -1)).sum().backward()
    optimizer.step()


def goes_on_as_advised(folder: str, use_orig_params: bool) -> None:
    model, optimizer = wrapped(use_orig_params=use_orig_params)
    step(model, optimizer)
    for state, name in (({"model": model}, None), ({"optim": optimizer}, "optim"), ({"all": [optimizer]}, "all.0")):
        with pytest.raises(UnsupportedError, match="FSDP1") as refusal:
            sx.save_checkpoint(state, f"{folder}/refused")
        assert refusal.value.name == name
    assert not Path(folder, "refused").exists()
    with pytest.raises(UnsupportedError, match="FSDP1 flattened"):
        sx.synchronize({"optim": optimizer})
    sx.export_checkpoint(model, f"{folder}/model")
    whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    sx.save_checkpoint({"optim": whole}, f"{folder}/optim")
    step(model, optimizer)

    new = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sx.load_checkpoint(new, f"{folder}/model")
    other = FullyShardedDataParallel(new, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    resumed = torch.optim.Adam(other.parameters(), lr=0.5)
    with pytest.raises(UnsupportedError, match="FSDP1 flattened") as refusal:
        sx.load_checkpoint({"optim": resumed}, f"{folder}/optim")
    assert refusal.value.name == "optim"
    state: dict[str, Any] = {"optim": {}}
    sx.load_checkpoint(state, f"{folder}/optim")
    for name, entries in whole["state"].items():
        assert all(torch.equal(entries[key], state["optim"]["state"][name][key]) for key in entries)
    if use_orig_params:  # torch 2.13 on CPUs gives exp_avg the values of exp_avg_sq
        return
    resumed.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, resumed, state["optim"]))
    step(other, resumed)
    with FullyShardedDataParallel.summon_full_params(model), FullyShardedDataParallel.summon_full_params(other):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_optimizer_of_fsdp1_is_refused_and_goes_on_as_the_refusal_says(
    use_orig_params: bool, tmp_path: Path
) -> None:
    run_ranks(goes_on_as_advised, 2, backend="gloo", args=(str(tmp_path), use_orig_params))
