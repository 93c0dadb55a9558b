"""Lists, groups and objects from torch's own files come into live state, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch_trees import WRITERS, Averages, Writer, in_torchs_form, trained, write_dcp, write_torch

import statexchange as sx

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("write", WRITERS)
def test_lists_that_hold_state_are_filled(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    one = trained(model)

    def state(value: float, optimizer: Any) -> dict[str, Any]:
        means = [torch.full((2,), value), [torch.full((1,), value), {"n": int(value)}]]
        return {"means": means, "parts": [optimizer, {0: torch.full((3,), value)}, {}]}

    path = write(state(5.0, one.state_dict()), tmp_path)
    live = state(0.0, trained(nn.Linear(1, 1), steps=0))
    tensor, parts = live["means"][0], live["parts"]
    sx.load_checkpoint(live, path)
    assert str(live["means"]) == str(state(5.0, None)["means"])
    assert live["means"][0] is tensor
    assert live["parts"] is parts
    assert parts[1][0].tolist() == [5, 5, 5]
    assert in_torchs_form(parts[0].state_dict()) == in_torchs_form(one.state_dict())
    live = state(0.0, trained(nn.Linear(1, 1), steps=0))
    assert sx.load_checkpoint(live, path, exclude=["*n", "parts.1"]).unexpected == ()
    assert str(live["means"]) == "[tensor([5., 5.]), [tensor([5.]), {'n': 0}]]"
    assert live["parts"][1][0].tolist() == [0, 0, 0]
    assert live["parts"][0].state_dict()["state"]
    for means, problem in (
        (live["means"][:1], r"has 'means\.1'"),
        ([*live["means"], torch.zeros(1)], r"lacks 'means\.2'"),
    ):
        with pytest.raises(sx.errors.InvalidArgumentError, match=problem) as caught:
            sx.load_checkpoint({**live, "means": means}, path)
        assert caught.value.name == "means"
    pair = {"pair": (torch.ones(2), 1)}
    path = write(pair, tmp_path / "tuple")
    pair["pair"] = (torch.zeros(2), 0)
    if write is write_dcp:  # torch pickles a tuple whole
        with pytest.raises(sx.errors.UnsupportedError, match="tuple of 2") as caught:
            sx.load_checkpoint(pair, path)
        assert caught.value.name == "pair"
    else:
        sx.load_checkpoint(pair, path)
        assert str(pair) == "{'pair': (tensor([1., 1.]), 1)}"


@pytest.mark.parametrize("write", WRITERS)
def test_values_that_the_source_lacks_are_missing_and_stay(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "metrics": {"loss": 1.5, "inner": {}}, "step": torch.tensor(7)}, tmp_path)
    live: dict[str, Any] = {"w": torch.zeros(1), "step": 0, "epoch": 3, "seen": {4: 5}, "names": {"a": {"b": 1}}}
    live["metrics"] = {"loss": 0.0, "best": 2.5, "inner": {"x": 1}}
    missing = "epoch, metrics.best, metrics.inner, names, seen"
    if write is write_torch:  # it has an empty mapping there
        missing = missing.replace("metrics.inner, ", "")
        live["metrics"]["inner"] = {}
    with pytest.raises(FileNotFoundError, match=f"source: {missing}; "):
        sx.load_checkpoint(live, path)
    assert sx.load_checkpoint(live, path, strict=False).missing == tuple(missing.split(", "))
    assert live["metrics"] == {"loss": 1.5, "best": 2.5, "inner": live["metrics"]["inner"]}
    assert (live["epoch"], live["seen"], live["names"]) == (3, {4: 5}, {"a": {"b": 1}})
    assert live["step"].item() == 7


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_group_without_parameters_is_no_difference(write: Writer, flatten: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def groups(lr: float) -> Any:
        return torch.optim.SGD([{"params": [*model.parameters()]}, {"params": [], "lr": lr}], lr=0.5, momentum=0.9)

    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, groups(0.25), options=options)
    path = write({"model": model.state_dict(), "o": state}, tmp_path)
    other = groups(0.125)
    assert sx.load_checkpoint({"model": model, "o": other}, path).missing == ()
    assert other.param_groups[1]["lr"] == (0.125 if flatten else 0.25)


@pytest.mark.parametrize("write", WRITERS)
def test_a_tensor_for_each_parameter_as_lr_is_refused(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, trained(model, lr=torch.tensor(0.5)), options=options)
    path = write({"model": model.state_dict(), "o": state}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match="'lr'") as caught:
        sx.load_checkpoint({"model": model, "o": trained(model)}, path)
    assert caught.value.name == "o.param_groups.0"


@pytest.mark.parametrize("write", WRITERS)
def test_modules_of_a_list_have_indices_as_names_or_share_them(write: Writer, tmp_path: Path) -> None:
    modules = [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)]
    names = {
        f"parts.{i}.{name}": tensor for i, part in enumerate(modules) for name, tensor in part.state_dict().items()
    }
    shared = {"parts": {**modules[0].state_dict(), **modules[1].state_dict()}}
    for i, state in enumerate(({"parts": [part.state_dict() for part in modules]}, names, shared)):
        live = [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)]
        sx.load_checkpoint({"parts": live}, write(state, tmp_path / str(i)))
        for one, other in zip(modules, live, strict=True):
            assert str(one.state_dict()) == str(other.state_dict())


@pytest.mark.parametrize("write", WRITERS)
def test_long_lists_and_texts_are_values(write: Writer, tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(10_001)]
    one, other = torch.optim.SGD(parameters, lr=0.5), torch.optim.SGD(parameters, lr=0.25)
    state = {"losses": [0.5] * 50_000, "config": "line\n" * 1000, "names": [f"{i}" * 300 for i in range(9)]}
    path = write({"o": one.state_dict(), **state}, tmp_path)
    live: dict[str, Any] = {"o": other, "losses": [], "config": "", "names": []}
    sx.load_checkpoint(live, path)
    assert other.param_groups[0]["lr"] == 0.5
    assert live == {"o": other, **state}


def test_containers_that_torch_leaves_out_stay_if_they_hold_nothing(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"a": Averages(value), "w": torch.full((1,), value), "empty": [{}, {"x": {}}], "values": {3: {}, 4: 1}}

    live, saved = state(0.0), state(5.0)
    for one in (live, saved):
        one["a"].state["list"] = [{}]
    sx.load_checkpoint(live, write_dcp({**saved, "a": saved["a"].state_dict()}, tmp_path))
    assert str(live.pop("a").state) == str(saved.pop("a").state)
    assert str(live) == str(saved)


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD", "Adafactor", "Adamax", "SGD"])
def test_numbered_state_that_does_not_fit_its_parameter_is_refused(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    kinds = {"SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9)}
    new = kinds.get(kind, getattr(torch.optim, kind))
    one, other = new([model.weight, model.bias]), new([model.bias, model.weight])
    model(torch.ones(1, 3)).sum().backward()
    one.step()
    path = write_torch({"o": one.state_dict()}, tmp_path)
    before = str(other.state_dict())
    with pytest.raises(sx.errors.InvalidArgumentError, match="does not fit") as caught:
        sx.load_checkpoint({"o": other}, path)
    assert caught.value.name.startswith("o.state.")
    assert str(other.state_dict()) == before


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("live_names", [True, False])
def test_numbered_parameters_are_matched_by_the_names_that_groups_have(
    write: Writer, live_names: bool, tmp_path: Path
) -> None:
    model = nn.ParameterDict({name: torch.ones(2, 2) for name in "abc"})
    named = dict(model.named_parameters())
    one = torch.optim.Adam(
        [{"params": [("a", named["a"])], "lr": 0.5}, {"params": [("b", named["b"]), ("c", named["c"])]}]
    )
    for number, parameter in enumerate(named.values()):
        parameter.grad = torch.full((2, 2), 1.0 + number)
    one.step()
    path = write({"m": model.state_dict(), "o": one.state_dict()}, tmp_path)
    last = [("c", named["c"]), ("b", named["b"])] if live_names else [named["c"], named["b"]]
    first = [("a", named["a"])] if live_names else [named["a"]]
    other = torch.optim.Adam([{"params": last}, {"params": first}])
    sx.load_checkpoint({"m": model, "o": other}, path)
    for parameter in named.values():
        assert torch.equal(other.state[parameter]["exp_avg"], one.state[parameter]["exp_avg"])
    assert [group["lr"] for group in other.param_groups] == [1e-3, 0.5]


@pytest.mark.parametrize("write", WRITERS)
def test_two_names_that_become_one_are_refused(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "old": 1, "s": 2}, tmp_path)
    for new, live in (("s", {"w": torch.zeros(1), "s": 0}), ("w", {"w": torch.zeros(1)})):
        with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
            sx.load_checkpoint(live, path, rename=[("^old$", new)])
        assert caught.value.name == new
        assert "'old'" in str(caught.value)


@pytest.mark.parametrize("write", WRITERS)
def test_keys_of_any_type_are_those_of_the_source_or_refused(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    one, other = trained(model), trained(model)
    # torch takes any key for state of the optimizer itself; its type hints allow tensors alone.
    one.state[None], other.state[None] = {"x": 1}, {"x": 0}  # type: ignore[index]
    path = write({"w": torch.ones(1), "d": {2: 3}, "e": {float("inf"): 5}, "o": one.state_dict()}, tmp_path)
    for live in ({"d": {2: 5, "2": 0}}, {"e": {}}, {"o": trained(model)}):
        if write is write_torch:
            sx.load_checkpoint({"w": torch.zeros(1), **live}, path, strict=False)
            continue
        with pytest.raises(sx.errors.InvalidArgumentError, match=r"alike|put them|known"):
            sx.load_checkpoint({"w": torch.zeros(1), **live}, path)
    sx.load_checkpoint({"w": torch.zeros(1), "o": other}, path)
    assert other.state[None] == {"x": 1}  # type: ignore[index]  # as above


@pytest.mark.parametrize("names", [("epoch_1.pt", "epoch_2.pt"), ("rank0.pt", "rank1.pt")])
def test_files_of_a_directory_that_differ_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    for number, name in enumerate(names):  # in torch's format, which is under test
        torch.save({"w": torch.full((3,), number), "same": torch.ones(2), "step": number, "n": 3}, tmp_path / name)
    with pytest.raises(sx.errors.ReplicaError, match=f"{names[0]} and {names[1]}") as caught:
        sx.load_checkpoint({"w": torch.zeros(3, dtype=torch.int64)}, tmp_path)
    assert caught.value.name == "w"
    assert "exclude='w'" in str(caught.value)
    with sx.open_checkpoint(tmp_path) as checkpoint:
        for _ in range(2):
            with pytest.raises(sx.errors.ReplicaError, match=f"{names[0]} and {names[1]}") as caught:
                checkpoint["w"].read()
            assert caught.value.name == "w"
            assert checkpoint["same"].read().tolist() == [1, 1]
    with pytest.raises(sx.errors.UnsupportedError, match="differs between the files") as caught:
        sx.load_checkpoint({"step": 5}, tmp_path, include="step")
    assert caught.value.name == "step"
    live: dict[str, Any] = {"w": torch.ones(3, dtype=torch.int64), "same": torch.zeros(2), "n": 0}
    sx.load_checkpoint(live, tmp_path, replicas="root")
    assert (live["w"].tolist(), live["same"].tolist(), live["n"]) == ([0, 0, 0], [1, 1], 3)
    live["same"].zero_()
    sx.load_checkpoint(live, tmp_path, exclude="w")
    assert live["same"].tolist() == [1, 1]


class WithExtraState(nn.Linear):
    """A module with a mapping as extra state."""

    def __init__(self, value: int) -> None:
        super().__init__(2, 1)
        self.extra = {"n": value, "tensor": torch.full((2,), float(value))}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class WithVersion(torch.optim.SGD):
    """An optimizer with one more entry in its state dict."""

    version = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.version = state["version"]


@pytest.mark.parametrize("write", WRITERS)
def test_further_entries_of_modules_and_optimizers_come_back(write: Writer, tmp_path: Path) -> None:
    one, other = WithExtraState(5), WithExtraState(0)
    optimizer, fresh = (WithVersion(module.parameters(), lr=0.5) for module in (one, other))
    optimizer.version = 7
    path = write({"m": one.state_dict(), "o": optimizer.state_dict()}, tmp_path)
    report = sx.load_checkpoint({"m": other, "o": fresh}, path)
    assert (report.missing, report.unexpected, fresh.version, str(other.extra)) == ((), (), 7, str(one.extra))


@pytest.mark.parametrize("write", WRITERS)
def test_a_tensor_that_gets_the_name_of_a_value_is_refused(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "s": 2}, tmp_path)
    with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
        sx.load_checkpoint({"s": torch.zeros(1)}, path, rename=[("^w$", "s")])
    assert caught.value.name == "s"
    assert "'w'" in str(caught.value)
