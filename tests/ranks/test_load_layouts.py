"""Loading by a layout: parts that were cut by hand, replicas, blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

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
