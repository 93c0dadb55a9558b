"""Each parameter gets its own optimizer state: by its name in the state, by the source's names, or by its number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from named_parameters import (
    Write,
    hidden_job,
    moments,
    net,
    states_of,
    stepped,
    write_dcp,
    write_save,
    write_states,
    write_torch,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# Parameters that lie in the state itself


def loose_job(order: Sequence[int], *, named: bool = False) -> tuple[dict[str, Any], list[Any]]:
    """A model and two parameters beside it; the optimizer has them in this order. Shapes cannot tell them apart."""
    model = nn.Linear(3, 1, bias=False)
    query, scale = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(1, 3))
    known: list[Any] = [("weight", model.weight), ("query", query), ("scale", scale)]
    chosen = [known[i] if named else known[i][1] for i in order]
    job = {"model": model, "query": query, "more": [{"scale": scale}], "optimizer": torch.optim.Adam(chosen, lr=0.1)}
    return job, [model.weight, query, scale]


@pytest.mark.parametrize("named", [False, True])
def test_parameters_of_no_module_have_the_names_of_their_places(named: bool, tmp_path: Path) -> None:
    saved, theirs = loose_job([0, 1, 2], named=named)
    stepped(saved["optimizer"])
    live, ours = loose_job([2, 0, 1], named=named)
    report = sx.load_checkpoint(live, write_save(saved, tmp_path))
    assert not report.missing + report.unexpected
    assert moments(live["optimizer"], ours) == moments(saved["optimizer"], theirs)


def test_the_first_of_two_places_names_a_parameter_that_a_module_has_too(tmp_path: Path) -> None:
    saved, theirs = loose_job([0, 1, 2])
    stepped(saved["optimizer"])
    path = write_save({"a_weight": theirs[0], **saved}, tmp_path)
    live, ours = loose_job([1, 2, 0])
    sx.load_checkpoint(live, path, exclude="a_weight")
    assert moments(live["optimizer"], ours) == moments(saved["optimizer"], theirs)


def sharded_job(*, scale_first: bool = False) -> tuple[dict[str, Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    scale = nn.Parameter(torch.zeros(4))
    parameters = [scale, model.weight] if scale_first else [model.weight, scale]
    return {"model": model, "scale": scale, "optimizer": torch.optim.Adam(parameters)}, [model.weight, scale]


def saves_sharded(path: str, as_states: bool) -> None:
    state, parameters = sharded_job()
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    state["optimizer"].step()
    sx.save_checkpoint(states_of(state) if as_states else state, path)


def loads_sharded(path: str, scale_first: bool) -> list[Any]:
    state, parameters = sharded_job(scale_first=scale_first)
    sx.load_checkpoint(state, path)
    found = [state["optimizer"].state[parameter]["exp_avg"] for parameter in parameters]
    whole = found[0].full_tensor()
    return [list(whole.shape), float(whole.min()), float(whole.max()), found[1].tolist()]


@pytest.mark.parametrize("num_loading", [1, 2, 3])
@pytest.mark.parametrize("as_states", [False, True])
def test_they_have_their_state_on_other_numbers_of_ranks(num_loading: int, as_states: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    run_ranks(saves_sharded, 2, backend="gloo", args=(path, as_states))
    expected = [[4, 4], pytest.approx(0.1), pytest.approx(0.1), pytest.approx([0.2] * 4)]
    # What state_dict() returns has numbers, so that the order counts.
    found = run_ranks(loads_sharded, num_loading, backend="gloo", args=(path, not as_states))
    assert found == [expected] * num_loading


@pytest.mark.parametrize("pattern", ["parts.0", "parts[0]", "parts*"])
def test_a_layout_names_an_item_of_a_list_as_messages_do(pattern: str, tmp_path: Path) -> None:
    whole = torch.arange(8.0).reshape(4, 2)

    def job() -> tuple[dict[str, Any], Any]:
        part = nn.Parameter(torch.zeros(2, 2))
        return {"parts": [part], "optimizer": torch.optim.SGD([part], lr=1.0, momentum=0.9)}, part

    def saves_and_loads() -> None:
        (saved, part), (live, own) = job(), job()
        part.grad = whole.chunk(2)[sx.get_rank()].clone()
        saved["optimizer"].step()
        sx.save_checkpoint(saved, tmp_path / "save", layout={pattern: Shard(0)})
        sx.load_checkpoint(live, tmp_path / "save", layout={pattern: Shard(0)})
        assert torch.equal(own, part)
        assert torch.equal(live["optimizer"].state[own]["momentum_buffer"], part.grad)

    run_ranks(saves_and_loads, 2)
    with sx.open_checkpoint(tmp_path / "save") as saved:
        assert torch.equal(torch.from_numpy(saved["parts[0]"].read()), -whole)


@pytest.mark.parametrize(
    ("shapes", "sizes", "match"),
    [
        ([2, 3, 3], [1, 2], r"\[3\].*\[1, 2\]"),
        ([2, 3], [2], r"\[3\].*\[2\]"),
        ([2, 4, 3], [3], r"not fit .*'1'.*\(4,\).*\(3,\)"),
    ],
)
@pytest.mark.parametrize("write", [write_save, write_states, write_torch])
def test_numbers_that_do_not_fit_are_refused(
    shapes: list[int], sizes: list[int], match: str, write: Write, tmp_path: Path
) -> None:
    saved, _ = hidden_job([2, 3, 3], [3])
    stepped(saved["optimizer"])
    live, _ = hidden_job(shapes, sizes)
    before = copy.deepcopy(live["optimizer"].state_dict())
    with pytest.raises(errors.InvalidArgumentError, match=match):
        sx.load_checkpoint(live, write(saved, tmp_path))
    assert live["optimizer"].state_dict() == before


@pytest.mark.parametrize("write", [write_save, write_states, write_torch])
def test_names_that_groups_have_come_before_the_order(write: Write, tmp_path: Path) -> None:
    saved, theirs = hidden_job([3, 3, 3], [3], names=["a", "b", "c"])
    stepped(saved["optimizer"])
    path = write(saved, tmp_path)
    live, ours = hidden_job([3, 3, 3], [1, 2], names=["c", "a", "b"])
    sx.load_checkpoint(live, path)
    assert moments(live["optimizer"], [ours[1], ours[2], ours[0]]) == moments(saved["optimizer"], theirs)
    assert [group["param_names"] for group in live["optimizer"].param_groups] == [["c"], ["a", "b"]]
    live, _ = hidden_job([3, 3, 3], [3], names=["c", "a", "x"])
    with pytest.raises(errors.InvalidArgumentError, match="names the parameters") as caught:
        sx.load_checkpoint(live, path)
    assert caught.value.name == "optimizer"
    assert all(name in str(caught.value) for name in ("'x'", "'b'"))


@pytest.mark.parametrize("named", [False, True])
def test_state_dicts_are_loaded_into_objects(named: bool, tmp_path: Path) -> None:
    model = net(0)
    saved = {
        "model": model,
        "optimizer": stepped(torch.optim.Adam(model.named_parameters() if named else model.parameters())),
        "step": 7,
    }
    path = write_states(saved, tmp_path)
    new = net(1)
    parameters = [*new.named_parameters()][:: -1 if named else 1] if named else [*new.parameters()]
    live = {"model": new, "optimizer": torch.optim.Adam(parameters), "step": 0}  # type: ignore[arg-type]
    report = sx.load_checkpoint(live, path)
    assert not report.missing + report.unexpected
    assert live["step"] == 7
    assert moments(live["optimizer"], [*new.parameters()]) == moments(saved["optimizer"], [*model.parameters()])


def test_an_optimizer_without_its_model_says_what_is_missing(tmp_path: Path) -> None:
    model = net(0)
    saved = {"model": model, "optimizer": stepped(torch.optim.Adam(model.parameters()))}
    path = write_save(saved, tmp_path)
    new = net(1)
    optimizer = torch.optim.Adam(new.parameters())
    with pytest.raises(errors.NotFoundError, match=r"state\.model\.0\.weight") as raised:
        sx.load_checkpoint({"optimizer": optimizer}, path, include="optimizer")
    assert "optimizer.state.0" in str(raised.value)
    before = new[0].weight.tolist()
    sx.load_checkpoint({"optimizer": optimizer, "model": new}, path, exclude="model")
    assert new[0].weight.tolist() == before
    assert moments(optimizer, [*new.parameters()]) == moments(saved["optimizer"], [*model.parameters()])


# Names that wrappers have changed


class DistributedDataParallel(nn.Module):
    """A wrapper like torch's: the module is in `module`, and names of its parameters begin with that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("write", [write_states, write_torch, write_dcp])
@pytest.mark.parametrize("wrap", [compiled, DistributedDataParallel])
@pytest.mark.parametrize("is_live", [False, True])
def test_names_in_groups_may_be_those_of_a_wrapped_model(
    write: Write, wrap: Callable[[Any], Any], is_live: bool, tmp_path: Path
) -> None:
    def optimizer_of(model: nn.Module, wrapped: bool) -> Any:
        named = [*(wrap(model) if wrapped else model).named_parameters()]
        return torch.optim.Adam(named[:: -1 if wrapped else 1])

    model, new = net(0), net(1)
    saved = {"model": model, "optimizer": stepped(optimizer_of(model, not is_live))}
    live = {"model": new, "optimizer": optimizer_of(new, is_live)}
    sx.load_checkpoint(live, write(saved, tmp_path))
    assert moments(live["optimizer"], [*new.parameters()]) == moments(saved["optimizer"], [*model.parameters()])


def test_a_part_of_a_name_is_no_prefix(tmp_path: Path) -> None:
    one, other = nn.Module(), nn.Module()
    one.register_parameter("xa", nn.Parameter(torch.randn(3)))
    one.register_parameter("xb", nn.Parameter(torch.randn(3)))
    other.register_parameter("b", nn.Parameter(torch.randn(3)))
    other.register_parameter("a", nn.Parameter(torch.randn(3)))
    path = write_torch({"optimizer": stepped(torch.optim.Adam(one.named_parameters()))}, tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match=r"\['a', 'b'\].*\['xa', 'xb'\]"):
        sx.load_checkpoint({"optimizer": torch.optim.Adam(other.named_parameters())}, path)


# Groups that have other names than those of the model's tensors


def changed(job: Any) -> dict[str, list[float]]:
    """Give each parameter of a job's modules a state of its own, and return it by name."""
    step_of(job)
    return by_parameter(job)


def step_of(job: Any) -> None:
    count = 0
    for value in job.values():
        for parameter in value.parameters() if isinstance(value, nn.Module) else ():
            count += 1
            parameter.grad = torch.full_like(parameter, float(count))
    job["o"].step()


def by_parameter(job: Any) -> dict[str, list[float]]:
    return {
        f"{key}.{name}": job["o"].state[parameter]["exp_avg"].flatten().tolist()
        for key, value in job.items()
        if isinstance(value, nn.Module)
        for name, parameter in value.named_parameters()
    }


def two_models(*, named: bool, bias: bool) -> dict[str, Any]:
    g, d = nn.Linear(3, 3), nn.Linear(3, 3, bias=bias)
    both: list[Any] = [*g.named_parameters(), *d.named_parameters()]
    return {"g": g, "d": d, "o": torch.optim.Adam(both if named else [one for _, one in both])}


@pytest.mark.parametrize("write", [write_states, write_torch, write_dcp])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_names_that_occur_twice_are_refused(write: Write, named: bool, bias: bool, tmp_path: Path) -> None:
    saved, live = two_models(named=True, bias=bias), two_models(named=named, bias=bias)
    step_of(saved)
    path = write(saved, tmp_path)
    before = str(live["g"].weight)
    with pytest.raises(errors.InvalidArgumentError, match="names") as caught:
        sx.load_checkpoint(live, path)
    assert caught.value.name == "o"
    assert (str(live["g"].weight), len(live["o"].state)) == (before, 0)
    sx.load_checkpoint(live, path, exclude="o")
    assert torch.equal(live["g"].weight, saved["g"].weight)


@pytest.mark.parametrize("write", [write_states, write_torch, write_dcp])
@pytest.mark.parametrize("named", [False, True])
def test_a_module_of_a_model_may_be_in_the_state_too(write: Write, named: bool, tmp_path: Path) -> None:
    def job(named: bool) -> dict[str, Any]:
        model = net(0)
        parameters: Any = model.named_parameters() if named else model.parameters()
        return {"last": nn.Sequential(model[1]), "model": model, "o": torch.optim.Adam(parameters)}

    saved, live = job(True), job(named)
    expected = changed(saved)
    path = write(saved, tmp_path)
    # Numbers with names that two modules of the state have for different parameters
    if write is write_states and not named:
        with pytest.raises(errors.InvalidArgumentError, match="two modules"):
            sx.load_checkpoint(live, path)
        return
    sx.load_checkpoint(live, path)
    assert by_parameter(live) == expected


def test_names_that_two_modules_have_for_different_parameters_are_refused(tmp_path: Path) -> None:
    def job(*orders: list[int], named: bool = False) -> dict[str, Any]:
        layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]
        optimizer = torch.optim.Adam(layer.weight for layer in layers)
        if named:
            optimizer = torch.optim.Adam((f"{i}.weight", layer.weight) for i, layer in enumerate(layers))
        modules = {f"m{n}": nn.Sequential(*(layers[i] for i in order)) for n, order in enumerate(orders)}
        return {**modules, "o": optimizer}

    saved = job([0, 1, 2], named=True)
    expected = changed(saved)
    path = write_torch({"o": saved["o"]}, tmp_path)
    for orders in ([1, 2, 0], [0, 1, 2]), ([1, 2, 0], [2, 0, 1]):  # also if one has the order of the optimizer
        with pytest.raises(errors.InvalidArgumentError, match="two modules") as caught:
            sx.load_checkpoint(job(*orders), path, include="o")
        assert caught.value.name == "o"
    live = job([0, 1, 2], [0, 1])  # the names are those of one module's parameters
    sx.load_checkpoint(live, path, include="o")
    assert {name: moment for name, moment in by_parameter(live).items() if "m0" in name} == expected


@pytest.mark.parametrize("write", [write_states, write_torch, write_dcp])
@pytest.mark.parametrize("named", [False, True])
def test_names_in_groups_may_be_those_in_the_state(write: Write, named: bool, tmp_path: Path) -> None:
    def job(*keys: str, named: bool) -> dict[str, Any]:
        modules = {key: nn.Linear(3, 3, bias=False) for key in keys}
        parameters: Any = [(f"{key}.weight", module.weight) for key, module in modules.items()]
        return {**modules, "o": torch.optim.Adam(parameters if named else [one for _, one in parameters])}

    saved, live = job("encoder", "head", named=True), job("head", "encoder", named=named)
    expected = changed(saved)
    sx.load_checkpoint(live, write({"o": saved["o"]}, tmp_path), include="o")
    assert by_parameter(live) == expected


@pytest.mark.parametrize("write", [write_save, write_states, write_torch, write_dcp])
@pytest.mark.parametrize("names", [None, ("x", "y")])
def test_names_may_be_none_or_a_tuple(write: Write, names: Any, tmp_path: Path) -> None:
    def job() -> tuple[dict[str, Any], list[Any]]:
        state, parameters = hidden_job([3, 3], [2])
        state["optimizer"].param_groups[0]["param_names"] = names
        return state, parameters

    (saved, theirs), (live, ours) = job(), job()
    stepped(saved["optimizer"])
    sx.load_checkpoint(live, write(saved, tmp_path))
    assert moments(live["optimizer"], ours) == moments(saved["optimizer"], theirs)


class OneMoment(torch.optim.Optimizer):
    """An optimizer like Adam-mini: one second moment for a whole parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            mean = parameter.grad.pow(2).mean()
            self.state[parameter] = {"exp_avg": parameter.grad.clone(), "exp_avg_sq": mean}


@pytest.mark.parametrize("write", [write_states, write_torch, write_dcp])
@pytest.mark.parametrize("steps", [0, 1])
def test_optimizers_of_others_may_have_moments_of_any_shape(write: Write, steps: int, tmp_path: Path) -> None:
    saved, live = ({"model": nn.Linear(3, 2)} for _ in range(2))
    saved["o"], live["o"] = (OneMoment(job["model"].parameters()) for job in (saved, live))  # type: ignore[assignment]
    expected = changed(saved)
    for _ in range(steps):
        step_of(live)
    sx.load_checkpoint(live, write(saved, tmp_path))
    assert by_parameter(live) == expected
    other = {"model": live["model"], "o": OneMoment([*live["model"].parameters()][::-1])}
    with pytest.raises(errors.InvalidArgumentError, match="does not fit"):
        sx.load_checkpoint(other, write_torch(saved, tmp_path))


def test_a_part_of_the_names_of_a_wrapped_model_contradicts_the_order(tmp_path: Path) -> None:
    def model(*keys: str) -> nn.Module:
        return nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in keys})

    for wrap in (compiled, DistributedDataParallel):
        saved, live = model("enc", "head"), model("cls", "enc")
        job = {"m": saved, "o": stepped(torch.optim.Adam(wrap(saved).named_parameters()))}
        with pytest.raises(errors.InvalidArgumentError, match=r"the source .*head"):
            sx.load_checkpoint(
                {"m": live, "o": torch.optim.Adam(live.parameters())}, write_torch(job, tmp_path), exclude="m"
            )


def test_names_that_are_numbers_are_not_taken_for_numbers(tmp_path: Path) -> None:
    def job(order: list[int]) -> tuple[Any, Any]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        return model, torch.optim.Adam([model[i] for i in order])

    model, optimizer = job([0, 1, 2])
    stepped(optimizer)
    sx.save_checkpoint({"m": model, "o": get_optimizer_state_dict(model, optimizer)}, tmp_path / "save")
    other, permuted = job([2, 0, 1])
    with pytest.raises(errors.InvalidArgumentError, match="is not known") as caught:
        sx.load_checkpoint({"m": other, "o": permuted}, tmp_path / "save")
    assert caught.value.name == "o"
    other, same = job([0, 1, 2])
    sx.load_checkpoint({"m": other, "o": same}, tmp_path / "save")
    assert moments(same, [*other]) == moments(optimizer, [*model])
