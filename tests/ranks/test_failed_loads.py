"""Loads that fail while they read: the values that they leave in tensors of several boxes, and in optimizers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from stored import flip_bit
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

SMALL, LARGE = 8, 1 << 17  # elements of a box: one that is read with others, and one that is read by itself
OLD = -1.0


def saves_parts(folder: str, sizes: dict[str, int]) -> None:
    rank = sx.get_rank()
    state = {name: torch.full((size,), 10.0 + rank) for name, size in sizes.items()}
    sx.save_checkpoint(state, folder, layout={name: {"dim": 0} for name in sizes})


def flip_in(folder: Path, rank: int, name: str, ranks: int = 3) -> None:
    """Change a byte of one rank's part of a tensor."""
    file = folder / f"rank-{rank:05}-of-{ranks:05}.safetensors"
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    [entry] = [key for key in header if key.startswith(name)]
    flip_bit(file, begin + header[entry]["data_offsets"][0])


def is_old_saved_or_nan(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a tensor is as it was, as it was saved, or NaN as a whole: what load_checkpoint promises."""
    return bool(tensor.eq(OLD).all() or torch.equal(tensor, saved) or tensor.isnan().all())


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("sizes", "damaged"),
    [({"w": SMALL}, "w"), ({"v": SMALL, "w": SMALL}, "v"), ({"v": LARGE, "w": SMALL}, "w"), ({"v": LARGE}, "v")],
    ids=str,
)
def test_a_tensor_of_boxes_of_several_ranks_is_old_saved_or_nan(
    rank: int, sizes: dict[str, int], damaged: str, tmp_path: Path
) -> None:
    run_ranks(saves_parts, 3, args=(str(tmp_path / "saved"), sizes))
    flip_in(tmp_path / "saved", rank, damaged)
    live = {name: torch.full((3 * size,), OLD) for name, size in sizes.items()}
    with pytest.raises(sx.errors.CorruptError) as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    for name, tensor in live.items():
        saved = torch.arange(10.0, 13.0).repeat_interleave(sizes[name])
        assert is_old_saved_or_nan(tensor, saved), (name, str(caught.value), tensor.unique().tolist())


def saves_uneven_parts(folder: str) -> None:
    rank = sx.get_rank()
    state = {"mixed": torch.full(((SMALL, LARGE, SMALL)[rank],), 10.0 + rank), "z": torch.full((LARGE,), 10.0 + rank)}
    sx.save_checkpoint(state, folder, layout={"mixed": {"dim": 0}, "z": {"dim": 0}})


@pytest.mark.parametrize("names", [("mixed", "z"), ("z", "mixed")])
@pytest.mark.parametrize("damaged", ["mixed", "z"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_tensor_of_a_large_box_and_small_ones_is_old_saved_or_nan(
    names: tuple[str, str], damaged: str, rank: int, tmp_path: Path
) -> None:
    run_ranks(saves_uneven_parts, 3, args=(str(tmp_path / "saved"),))
    flip_in(tmp_path / "saved", rank, damaged)
    sizes = {"mixed": (SMALL, LARGE, SMALL), "z": (LARGE, LARGE, LARGE)}
    live = {name: torch.full((sum(sizes[name]),), OLD) for name in names}
    with pytest.raises(sx.errors.CorruptError) as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    for name, tensor in live.items():
        saved = torch.arange(10.0, 13.0).repeat_interleave(torch.tensor(sizes[name]))
        assert is_old_saved_or_nan(tensor, saved), (name, str(caught.value), tensor.unique().tolist())


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(seed):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed, "last": torch.full((LARGE,), float(seed))}


def test_param_groups_and_values_are_unchanged_where_a_load_fails_while_it_reads(tmp_path: Path) -> None:
    """Moments and counts of steps are tensors: each is as it was, or as it was saved."""
    saved = job(3)
    sx.save_checkpoint(saved, tmp_path / "saved")
    flip_in(tmp_path / "saved", 0, "last", 1)
    live = job(5)
    before = copy.deepcopy(live["optimizer"].state_dict())
    with pytest.raises(sx.errors.CorruptError) as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    assert caught.value.name == "last"
    assert live["step"] == 5
    assert live["last"].isnan().all()
    after, source = live["optimizer"].state_dict(), saved["optimizer"].state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entries in before["state"].items():
        for key, value in entries.items():
            found = after["state"][number][key]
            assert torch.equal(found, value) or torch.equal(found, source["state"][number][key])


def test_the_error_of_a_second_try_says_what_the_first_one_has_changed(tmp_path: Path) -> None:
    """The file is written again during the load with other names, which are refused before anything is read."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(LARGE), "b": torch.ones(LARGE)}, path)
    live = {"a": torch.full((LARGE,), OLD), "b": torch.full((LARGE,), OLD)}
    data = save({"c": torch.ones(2 * LARGE)})

    def writes_again(done: int, total: int) -> None:
        path.write_bytes(data)

    with pytest.raises(sx.errors.NotFoundError, match="2 missing") as caught:
        sx.load_checkpoint(live, path, on_progress=writes_again)
    assert "of 2 tensors have been filled" in str(caught.value)
    for tensor in live.values():
        assert is_old_saved_or_nan(tensor, torch.ones(LARGE))
