"""Random nested states, from saves and from torch's own files: each comes back, or is refused and nothing changes.

With random patterns a load of torch's file does what a load of the same state from `save_checkpoint` does.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import equal_bits
from stateful import Holder
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import statexchange as sx

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

KEYS = ["a", "b", "a.b", "0", "1", "x y", "weight", "state", "param_groups", "None", "model", "step", "parts"]
OTHER_KEYS = [0, 1, 2, 10, -1, True, None]
PATTERNS = ["k0", "k0.*", "k1.*", "k?", "*.a", "*.b", "*.a.*", "*weight*", "*.state*", "*.step", "k*.model*", "k0.a*"]
PATTERNS += ["*exp_avg*", "k1.parts", "*.0.*"]


OBJECTS = (Holder, nn.Module, torch.optim.Optimizer)


def new_module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))


def new_optimizer(kind: Any, lr: float) -> Any:
    return kind(nn.Linear(2, 2).parameters(), lr=lr)


class Maker:
    """Makes random states."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)

    def state(self) -> dict[str, Any]:
        return {f"k{number}": self.value(3) for number in range(self.rng.randint(1, 3))}

    def value(self, depth: int, *, objects: bool = True) -> Any:
        rng, kind = self.rng, self.rng.random()
        if depth == 0 or kind < 0.35:
            return self.leaf()
        if kind < 0.5:
            return [self.value(depth - 1, objects=objects) for _ in range(rng.randrange(4))]
        if kind < 0.58:
            return tuple(self.value(depth - 1, objects=objects) for _ in range(rng.randrange(3)))
        if kind < 0.78 and objects:
            return self.object(depth)
        odd_keys = 0.5 if kind < 0.86 else 0.0
        return self.mapping(depth - 1, odd_keys, objects=objects)

    def mapping(self, depth: int, odd_keys: float, *, objects: bool) -> dict[Any, Any]:
        keys = [self.rng.choice(OTHER_KEYS if self.rng.random() < odd_keys else KEYS) for _ in range(4)]
        return {key: self.value(depth, objects=objects) for key in keys[: self.rng.randrange(5)]}

    def object(self, depth: int) -> Any:
        kind = self.rng.randrange(3)
        if kind == 0:
            return Holder(self.mapping(depth - 1, 0.5, objects=False))
        if kind == 1:
            return new_module()
        optimizer = new_optimizer(self.rng.choice([torch.optim.Adam, torch.optim.SGD]), self.rng.random())
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return optimizer

    def leaf(self) -> Any:
        rng = self.rng
        makers = [
            lambda: rng.randrange(100),
            rng.random,
            lambda: f"text {rng.randrange(9)}",
            lambda: rng.choice([None, True, False]),
            lambda: torch.randint(0, 100, (rng.randrange(3),)),
            lambda: torch.randn(rng.choice([(), (2, 2)])),
            lambda: [rng.randrange(9) for _ in range(rng.randrange(3))],
        ]
        return rng.choice(makers)()

    def others(self, value: Any) -> Any:
        """Return a state of the same structure with other values, and with fresh objects."""
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        if isinstance(value, nn.Module):
            return new_module()
        if isinstance(value, torch.optim.Optimizer):
            return new_optimizer(type(value), 0.123)
        if isinstance(value, Holder):
            return Holder(self.others(value.state))
        if isinstance(value, dict):
            return {key: self.others(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.others, value))
        if value is None:
            return self.rng.choice([None, 1, "text"])
        return not value if isinstance(value, bool) else value + ("z" if isinstance(value, str) else 1)


def without_objects(value: Any) -> Any:
    """Return what torch saves of a state."""
    if isinstance(value, OBJECTS):
        return without_objects(value.state_dict())
    if isinstance(value, dict):
        return {key: without_objects(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_objects, value))
    return value


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and bits. Of keys, too, of which `state_content.equal` compares texts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return equal_bits(one, other)
    if isinstance(one, dict):  # 1 and True are one key, but two texts
        return sorted(map(repr, one)) == sorted(map(repr, other)) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def saved_by_torch(state: dict[str, Any], seed: int, path: Path) -> Path | None:
    """Save in one of torch's formats; None if two names are the same with dots."""
    if seed % 2:
        torch.save(without_objects(state), path / "state.pt")  # the format under test
        return path / "state.pt"
    try:
        dcp.save(without_objects(state), checkpoint_id=path / "dcp", no_dist=True)
    except CheckpointException as error:
        if "duplicated flatten key" not in str(error):
            raise
        return None
    return path / "dcp"


def check_round_trip(seed: int, path: Path) -> str:
    path.mkdir()
    maker = Maker(seed)
    state = maker.state()
    live = maker.others(state)
    before = copy.deepcopy(without_objects(live))
    source = saved_by_torch(state, seed, path)
    if source is None:
        return "not saved"
    result = "same"
    try:
        sx.load_checkpoint(live, source)
    except sx.StateExchangeError as error:
        result = type(error).__name__
    expected = without_objects(state) if result == "same" else before
    assert is_same(without_objects(live), expected), (seed, result, state)
    return result


def check_own_format(seed: int, path: Path) -> str:
    maker = Maker(seed)
    state = maker.state()
    live = maker.others(state)
    if not was_saved(state, path):
        return "alike"
    sx.load_checkpoint(live, path)
    assert is_same(without_objects(live), without_objects(state)), (seed, state)
    return "same"


def was_saved(state: Any, path: Path) -> bool:
    """Whether a state was saved: one with something under the key 1, and something else under "1", is refused."""
    try:
        sx.save_checkpoint(state, path)
    except sx.errors.InvalidArgumentError as error:
        if "look alike" not in str(error):
            raise
        return False
    return True


def check_rename(seed: int, path: Path) -> str:
    """Check that what moves into a mapping, or to other names, is the same there."""
    path.mkdir()
    maker = Maker(seed)
    state = maker.state()
    inside = seed % 4 < 2
    rename = [("^", "in.")] if inside else [(r"^k(\d)", r"m\1")]
    others = maker.others(state)
    live = {"in": others} if inside else {f"m{key[1:]}": value for key, value in others.items()}
    before = copy.deepcopy(without_objects(live))
    if not was_saved(state, path / "own"):
        return "alike"
    for source in (path / "own", saved_by_torch(state, seed, path)):
        if source is None:
            return "not saved"
        moved, result = copy.deepcopy(live), "same"
        try:
            sx.load_checkpoint(moved, source, rename=rename)
        except sx.StateExchangeError as error:
            result = type(error).__name__
        found = without_objects(moved)
        if result == "same":
            found = found["in"] if inside else {f"k{key[1:]}": value for key, value in found.items()}
        assert is_same(found, without_objects(state) if result == "same" else before), (seed, source, result, state)
        # As a text with dots, "1" and 1 are one key, and so may "a.b" be one and two.
        named = ("same", "UnsafeError", "NotFoundError", "InvalidArgumentError")
        assert result in named or source.name != "own", (seed, result, state)
    return result


def check_patterns(seed: int, path: Path) -> str:
    path.mkdir()
    maker = Maker(seed)
    state = maker.state()
    if any(isinstance(value, list) and any(isinstance(item, nn.Module) for item in value) for value in walked(state)):
        return "a list of modules"  # its names are shared, and each is loaded by itself
    source = saved_by_torch(state, seed, path)
    if source is None:
        return "not saved"
    if not was_saved(state, path / "own"):
        return "alike"
    options = {
        option: maker.rng.sample(PATTERNS, maker.rng.randint(1, 2))
        for option in maker.rng.choice([["include"], ["exclude"], ["include", "exclude"]])
    }
    live = maker.others(state)
    states, found = [live, copy.deepcopy(live)], []
    for one, where in zip(states, (source, path / "own"), strict=True):
        try:
            report = sx.load_checkpoint(one, where, **options)
        except sx.StateExchangeError as error:
            found.append(error)
        else:
            found.append(report.missing)
    if isinstance(found[0], sx.StateExchangeError):
        return "refused"  # the names in torch's files do not show everything
    assert found[0] == found[1], (seed, options, state)
    assert is_same(*map(without_objects, states)), (seed, options, state)
    return "same"


def walked(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [value, *(inner for item in items for inner in walked(item))]


@pytest.mark.parametrize("check", [check_round_trip, check_own_format, check_rename, check_patterns])
@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_states_come_back(check: Any, first: int, tmp_path: Path) -> None:
    count = 100 if first == 0 else 1000
    results = Counter(check(seed, tmp_path / str(seed)) for seed in range(first, first + count))
    least = {check_round_trip: 0.85, check_own_format: 0.99, check_rename: 0.85, check_patterns: 0.4}[check]
    assert results["alike"] <= count * 0.1, results
    assert results["same"] >= (count - results["alike"]) * least, results
