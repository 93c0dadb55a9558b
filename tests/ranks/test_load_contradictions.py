"""Names of parameters, entries and files that contradict the state in a load: a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from load_choices import Counted, trained, write_save, write_torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# The names of parameters in torch's files


def two_layers(*names: str) -> Any:
    layers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    parameters = [(name, layer.weight) for name, layer in zip(names, layers, strict=True)]
    return layers, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("names", [["y", "z"], ["module.y", "module.z"], ["x", "z"], ["u", "v"]])
def test_names_of_parameters_that_contradict_the_source_are_refused(names: list[str], tmp_path: Path) -> None:
    layers, one = two_layers("x", "y")
    for value, layer in enumerate(layers):
        layer.weight.grad = torch.full((2, 2), float(value))
    one.step()
    path = write_torch({"o": one}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match="names the parameters") as caught:
        sx.load_checkpoint({"o": two_layers(*names)[1]}, path)
    assert caught.value.name == "o"
    layers, other = two_layers("y", "x")
    sx.load_checkpoint({"o": other}, path)
    assert [float(other.state[layer.weight]["momentum_buffer"][0, 0]) for layer in layers] == [1, 0]


def test_two_parameters_of_one_name_in_their_modules_are_refused(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    named = get_optimizer_state_dict(one, trained(one))
    path = write_torch({"g": one, "d": other, "o": named}, tmp_path)
    state = {"g": one, "d": other, "o": torch.optim.Adam([*one.parameters(), *other.parameters()])}
    with pytest.raises(sx.errors.InvalidArgumentError, match="called 'weight'") as caught:
        sx.load_checkpoint(state, path, strict=False)
    assert caught.value.name == "o"
    assert not state["o"].state


@pytest.mark.parametrize(
    ("entry", "value", "found"),
    [
        *[("params", *one) for one in [(5, "an int"), (None, "a NoneType"), (torch.ones(2), "a tensor")]],
        *[("param_names", *one) for one in [(5, "an int"), ("xy", "a str"), (torch.ones(2), "a tensor")]],
    ],
)
def test_groups_that_list_no_parameters_are_refused(entry: str, value: Any, found: str, tmp_path: Path) -> None:
    optimizer = trained(nn.Linear(2, 2))
    saved = optimizer.state_dict()
    saved["param_groups"][0][entry] = value
    path = write_torch({"o": saved}, tmp_path)
    with pytest.raises(sx.errors.CorruptError, match=f"has {found}") as caught:
        sx.load_checkpoint({"o": optimizer}, path)
    assert caught.value.name == f"o.param_groups.0.{entry}"


@pytest.mark.parametrize("groups", [[{"lr": 0.1}], [1], [{"params": 3}]])
def test_a_saved_mapping_that_only_looks_like_an_optimizer_is_a_mapping(groups: Any, tmp_path: Path) -> None:
    path = write_save({"o": {"state": {}, "param_groups": groups}, "x": 1}, tmp_path)
    state: dict[str, Any] = {"o": {}, "y": 0}
    sx.load_checkpoint(state, path, rename=[("^x$", "y")])
    assert state == {"o": {"state": {}, "param_groups": groups}, "y": 1}
    with pytest.raises(sx.errors.CorruptError, match="lists no") as caught:
        sx.load_checkpoint({"o": trained(nn.Linear(1, 1)), "x": 0}, path)
    assert str(caught.value.name).startswith("o.param_groups")


def test_fewer_names_than_parameters_are_refused(tmp_path: Path) -> None:
    optimizer = two_layers("x", "y")[1]
    path = write_torch({"o": optimizer}, tmp_path)
    optimizer.param_groups[0]["param_names"] = ["x"]
    with pytest.raises(sx.errors.InvalidArgumentError, match="param_names") as caught:
        sx.load_checkpoint({"o": optimizer}, path)
    assert caught.value.name == "param_groups[0]"


# Other sources


def test_an_empty_file_has_no_entry(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    sx.load_checkpoint(state, write_torch({}, tmp_path))
    assert state == {}


def test_root_gives_its_shape_too(tmp_path: Path) -> None:
    def saves() -> None:
        sx.save_checkpoint({"w": torch.ones(1 + sx.get_rank())}, tmp_path / "two")

    run_ranks(saves, 2)
    state = {"w": torch.zeros(1)}
    with pytest.raises(sx.errors.ReplicaError, match=r'pass replicas="root"'):
        sx.load_checkpoint(state, tmp_path / "two")
    sx.load_checkpoint(state, tmp_path / "two", replicas="root")
    assert state["w"].tolist() == [1]


def test_a_huge_index_in_a_name_is_no_index(tmp_path: Path) -> None:
    state = {"o": Counted(l=[1, 2])}
    sx.load_checkpoint(state, write_torch({"o": {"l": {"9" * 5000: torch.ones(1)}}}, tmp_path))
    assert state["o"].values == {"l": {"9" * 5000: torch.ones(1)}}
    dcp.save({"o": {"l": {"9" * 5000: torch.ones(1)}}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(sx.errors.InvalidArgumentError, match="not known") as caught:
        sx.load_checkpoint({"o": Counted(l=[1, 2])}, tmp_path / "dcp")
    assert caught.value.name == "o.l"


@pytest.mark.parametrize(("state", "kind"), [([1, 2], "a list"), ("abc", "a str"), (3, "an int")])
def test_a_state_that_holds_nothing_is_refused(state: Any, kind: str, tmp_path: Path) -> None:
    path = write_torch({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match=f"is {kind}") as caught:
        sx.load_checkpoint(state, path)
    assert caught.value.path == str(path)


def test_an_iterator_of_patterns_is_used_once(tmp_path: Path) -> None:
    path = write_save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path)
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    patterns: Any = iter(["a"])
    sx.load_checkpoint(state, path, include=patterns)
    assert (state["a"].item(), state["b"].item()) == (1, 0)


# Several ranks, and layouts


def trained_part(rank: int, ranks: int, *, steps: int = 1) -> Any:
    """Return a rank's rows of a layer, with an optimizer that has taken a step."""
    layer = nn.Linear(2, 4 // ranks, bias=False)
    rows = torch.arange(8.0).reshape(4, 2).chunk(ranks)[rank]
    layer.weight.data = rows.clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    for _ in range(steps):
        layer.weight.grad = rows.clone()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", ["save", "renamed save", "torch", "torch by name"])
def test_optimizer_state_follows_its_parameters_rule(kind: str, steps: int, tmp_path: Path) -> None:
    whole, optimizer = trained_part(0, 1)
    state = {"m": whole, "o": optimizer}
    if kind == "torch by name":
        path = write_torch({"m": whole, "o": get_optimizer_state_dict(whole, optimizer)}, tmp_path)
    else:
        path = write_torch(state, tmp_path) if kind == "torch" else write_save(state, tmp_path)
    rename = [(r"^m\b", "n")] if kind == "renamed save" else []
    name = "n" if rename else "m"

    def loads() -> Any:
        rank = sx.get_rank()
        part, own = trained_part(rank, 2, steps=steps)
        part.weight.data.zero_()
        sx.load_checkpoint({name: part, "o": own}, path, layout={f"{name}.weight": Shard(0)}, rename=rename)
        assert torch.equal(part.weight, whole.weight.chunk(2)[rank])
        assert torch.equal(own.state[part.weight]["momentum_buffer"], whole.weight.chunk(2)[rank])

    run_ranks(loads, 2)
