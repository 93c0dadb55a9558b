"""Each parameter gets its own optimizer state: by its name in the state, by the source's names, or by its number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
Write = Callable[[Any, Path], Path]


def states_of(job: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in job.items()}


def write_save(job: dict[str, Any], path: Path) -> Path:
    sx.save_checkpoint(job, path / "save")
    return path / "save"


def write_states(job: dict[str, Any], path: Path) -> Path:
    return write_save(states_of(job), path)


def write_torch(job: dict[str, Any], path: Path) -> Path:
    torch.save(states_of(job), path / "state.pt")  # the format under test
    return path / "state.pt"


def write_dcp(job: dict[str, Any], path: Path) -> Path:
    dcp.save(states_of(job), checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def stepped(optimizer: Any) -> Any:
    """Give each parameter a state of its own, which `moments` returns."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def moments(optimizer: Any, parameters: Sequence[Any]) -> list[list[float]]:
    return [optimizer.state[parameter]["exp_avg"].flatten().tolist() for parameter in parameters]


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


# Parameters by number


def hidden_job(shapes: Sequence[int], sizes: Sequence[int], *, names: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """An optimizer whose parameters, in groups of these sizes, are not all in the state."""
    parameters = [nn.Parameter(torch.randn(size)) for size in shapes]
    entries: list[Any] = [*zip(names, parameters, strict=True)] if names else parameters
    groups, begin = [], 0
    for size in sizes:
        groups.append({"params": entries[begin : begin + size]})
        begin += size
    return {"first": parameters[0], "optimizer": torch.optim.Adam(groups, lr=0.1)}, parameters


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


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


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


# Schedulers, which have values by the number of a group


def grouped_job(order: Sequence[str], lrs: dict[str, float], make: Callable[[Any], Any]) -> dict[str, Any]:
    model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in sorted(lrs)})
    optimizer = torch.optim.SGD([{"params": [model[key].weight], "lr": lrs[key]} for key in order], lr=1.0)
    return {"m": model, "o": optimizer, "s": make(optimizer)}


def advanced(job: dict[str, Any]) -> dict[str, float]:
    """Return each parameter's learning rate after a step."""
    job["o"].step()
    job["s"].step()
    names = {parameter: name for name, parameter in job["m"].named_parameters()}
    return {names[group["params"][0]]: group["lr"] for group in job["o"].param_groups}


def by_lambda(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def in_sequence(optimizer: Any) -> Any:
    schedulers = [by_lambda(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [2])


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
@pytest.mark.parametrize("make", [by_lambda, in_sequence])
@pytest.mark.parametrize("lrs", [{"a": 1.0, "b": 0.1}, {"a": 1.0, "b": 1.0}])
def test_a_scheduler_of_groups_in_another_order_is_refused(
    write: Write, make: Callable[[Any], Any], lrs: dict[str, float], tmp_path: Path
) -> None:
    saved = grouped_job(["a", "b"], lrs, make)
    advanced(saved)
    path = write(saved, tmp_path)
    same = grouped_job(["a", "b"], lrs, make)
    sx.load_checkpoint(same, path)
    assert advanced(same) == advanced(saved)
    if write is write_save:  # what state_dict() returns has numbers, and no names
        with pytest.raises(errors.InvalidArgumentError, match="scheduler out") as caught:
            sx.load_checkpoint(grouped_job(["b", "a"], lrs, make), path)
        assert caught.value.name == "s"
        sx.load_checkpoint(grouped_job(["b", "a"], lrs, make), path, exclude="s")


def test_a_scheduler_of_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    lrs = {"a": 1.0, "b": 1.0}
    sx.save_checkpoint(grouped_job(["a", "b"], lrs, by_lambda), tmp_path / "save")
    live = grouped_job(["a", "b"], lrs, by_lambda)
    optimizer = torch.optim.SGD(live["m"].parameters(), lr=1.0)
    joined = {"m": live["m"], "o": optimizer, "s": by_lambda(optimizer)}
    with pytest.raises(errors.InvalidArgumentError, match="scheduler out"):
        sx.load_checkpoint(joined, tmp_path / "save")
    sx.load_checkpoint(joined, tmp_path / "save", exclude="s")


@pytest.mark.parametrize("write", [write_torch, write_dcp])
def test_a_scheduler_goes_on_from_the_flattened_form_if_there_is_one_group(write: Write, tmp_path: Path) -> None:
    def job(*groups: str) -> dict[str, Any]:
        model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in "ab"})
        optimizer = torch.optim.SGD([{"params": [model[key].weight for key in keys]} for keys in groups], lr=1.0)
        return {"m": model, "o": optimizer, "s": by_lambda(optimizer)}

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for groups in ("ab",), ("a", "b"):
        saved, live = job(*groups), job(*groups)
        advanced(saved)
        (tmp_path / str(len(groups))).mkdir()
        flat = get_optimizer_state_dict(saved["m"], saved["o"], options=options)
        path = write({**saved, "o": flat}, tmp_path / str(len(groups)))
        if len(groups) == 1:
            sx.load_checkpoint(live, path)
            assert advanced(live) == advanced(saved)
        else:  # it does not say which parameters one group had
            with pytest.raises(errors.InvalidArgumentError, match="scheduler out") as caught:
                sx.load_checkpoint(live, path)
            assert caught.value.name == "s"
            sx.load_checkpoint(live, path, exclude="s")


def test_a_scheduler_of_other_groups_is_refused(tmp_path: Path) -> None:
    def job(*groups: str, lrs: Sequence[float]) -> dict[str, Any]:
        model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in "abcd"})
        of_groups: Any = [
            {"params": [model[key].weight for key in keys], "lr": lr} for keys, lr in zip(groups, lrs, strict=True)
        ]
        optimizer = torch.optim.SGD(of_groups, lr=1.0)
        return {"m": model, "o": optimizer, "s": by_lambda(optimizer)}

    match = "scheduler out"
    sx.save_checkpoint(job("ab", "c", "d", lrs=[1, 0.1, 0.1]), tmp_path / "split")
    with pytest.raises(errors.InvalidArgumentError, match=match):
        sx.load_checkpoint(job("a", "b", "cd", lrs=[1, 1, 0.1]), tmp_path / "split")
    sx.save_checkpoint(job("a", "b", lrs=[1, 0.1]), tmp_path / "other")
    with pytest.raises(errors.InvalidArgumentError, match=match):
        sx.load_checkpoint(job("b", "c", lrs=[0.1, 0.5]), tmp_path / "other", strict=False)
    for new in (job("a", "bc", lrs=[1, 0.1]), job("a", "c", lrs=[1, 0.1]), job("c", lrs=[0.5])):
        with pytest.raises(errors.InvalidArgumentError, match=match):  # parameters that the source does not have
            sx.load_checkpoint(new, tmp_path / "other", strict=False)
    for new in (job("b", "a", lrs=[0.1, 1]), job("ab", lrs=[1])):
        with pytest.raises(errors.InvalidArgumentError, match=match):
            sx.load_checkpoint(new, tmp_path / "other", exclude="o")
    sx.load_checkpoint(job("a", "b", lrs=[0.3, 0.2]), tmp_path / "other", exclude="o")


@pytest.mark.parametrize("write", [write_save, write_states, write_torch])
def test_a_layer_of_another_shape_is_not_left_out_alone(write: Write, tmp_path: Path) -> None:
    def job(out: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, out))
        return {"m": model, "o": torch.optim.Adam(model.parameters())}

    saved, live = job(2), job(3)
    stepped(saved["o"])
    path = write(saved, tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match=r"'m\.1\.weight'"):
        sx.load_checkpoint(live, path, exclude="m.1.*")
    assert not live["o"].state
    sx.load_checkpoint(live, path, exclude=["m.1.*", "o"])
    assert torch.equal(live["m"][0].weight, saved["m"][0].weight)


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
@pytest.mark.parametrize("added_late", [False, True])
def test_a_group_may_be_added_after_the_scheduler_was_made(write: Write, added_late: bool, tmp_path: Path) -> None:
    def job(added_late: bool) -> dict[str, Any]:
        model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in "ab"})
        optimizer = torch.optim.SGD(model["b"].parameters(), lr=1.0)
        group = {"params": [model["a"].weight], "lr": 0.1}
        if not added_late:
            optimizer.add_param_group(group)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if added_late:
            optimizer.add_param_group(group)
        return {"m": model, "o": optimizer, "s": scheduler}

    saved, live = job(True), job(added_late)
    advanced(saved)
    path = write(saved, tmp_path)
    sx.load_checkpoint(live, path)
    assert advanced(live) == advanced(saved)
    sx.load_checkpoint(job(True), path, exclude="o")


def saves_a_stage(path: str) -> None:
    """Save one of two stages. Each has the groups head, body and embed, of which one is empty."""
    job = staged_job(["body", "embed"] if sx.get_rank() == 0 else ["head", "tail"])
    job["o"].step()
    job["s"].step()
    sx.save_checkpoint(job, path)


def staged_job(keys: Sequence[str]) -> dict[str, Any]:
    lrs = {"head": 1.0, "body": 0.1, "embed": 0.01}
    modules = {key: nn.Linear(2, 2, bias=False) for key in keys}
    of_kind = {"head": ["head"], "body": ["body", "tail"], "embed": ["embed"]}
    groups: Any = [
        {"params": [modules[key].weight for key in of_kind[kind] if key in modules], "lr": lr}
        for kind, lr in lrs.items()
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return {**modules, "o": optimizer, "s": by_lambda(optimizer)}


def test_schedulers_of_stages_go_on_in_one_job(tmp_path: Path) -> None:
    run_ranks(saves_a_stage, 2, args=(str(tmp_path / "save"),))
    live = staged_job(["head", "body", "tail", "embed"])
    sx.load_checkpoint(live, tmp_path / "save", strict=False)
    live["o"].step()
    live["s"].step()
    assert [group["lr"] for group in live["o"].param_groups] == [pytest.approx(0.81 * one) for one in (1, 0.1, 0.01)]


def test_a_part_of_the_model_may_be_in_the_state_before_it(tmp_path: Path) -> None:
    saved, model = net(0), net(1)
    optimizer = stepped(torch.optim.Adam(saved.parameters()))
    sx.save_checkpoint({"model": saved, "o": optimizer}, tmp_path / "save")
    live = {"head": model[1], "model": model, "o": torch.optim.Adam(model.parameters())}
    sx.load_checkpoint(live, tmp_path / "save", exclude="head")
    assert moments(live["o"], [*model.parameters()]) == moments(optimizer, [*saved.parameters()])


# Synchronization


def synchronizes_orders(named: bool) -> str:
    torch.manual_seed(0)
    model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in "ab"})
    order = [*model.named_parameters()][:: -1 if sx.get_rank() else 1]
    parameters: Any = order if named else [one for _, one in order]
    tree = {"o": torch.optim.Adam(parameters)} if named else {"m": model, "o": torch.optim.Adam(parameters)}
    with pytest.raises(errors.MismatchError) as caught:
        sx.synchronize(tree)
    return str(caught.value)


@pytest.mark.parametrize("named", [False, True])
def test_optimizers_with_parameters_in_another_order_are_not_synchronized(named: bool) -> None:
    for text in run_ranks(synchronizes_orders, 2, args=(named,)):
        assert "o.param_groups[0].params[0]" in text
        assert "b.weight" in text


class Broken:
    """An object that does not take its state."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("no")


def synchronizes_a_broken_object() -> str:
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.synchronize({"x": Broken()})
    return str(caught.value)


def test_an_object_that_does_not_take_its_state_is_named() -> None:
    for text in run_ranks(synchronizes_a_broken_object, 2):
        assert "Broken does not take the state that it is given here" in text
        assert "tensor 'x'" in text


# Ranks with parameters of their own


def stage_job(rank: int, kind: str, *, reverse: bool = False) -> tuple[dict[str, Any], list[Any]]:
    """The job of a pipeline's stage. Rank 1 has a parameter more."""
    known = [(f"s{rank}.l{i}", nn.Parameter(torch.zeros(3))) for i in range(2 + rank)]
    order = known[::-1] if reverse else known
    parameters: Any = order if "named" in kind else [one for _, one in order]
    is_hidden = "hidden" in kind and rank == 1
    own = dict(known[:1] if is_hidden else known)
    return {f"stage{rank}": own, "optimizer": torch.optim.Adam(parameters)}, [one for _, one in known]


def saves_and_loads_stages(path: str, kind: str, replicas: Any) -> list[float]:
    rank = sx.get_rank()
    saved, parameters = stage_job(rank, kind)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 10.0 * rank + number + 1)
    saved["optimizer"].step()
    sx.save_checkpoint(states_of(saved) if "states" in kind else saved, path)
    live, parameters = stage_job(rank, kind, reverse="named" in kind)
    sx.load_checkpoint(live, path, replicas=replicas)
    return [round(10 * float(live["optimizer"].state[one]["exp_avg"][0]), 4) for one in parameters]


def saves_named_ranks(path: str, named_rank: int) -> None:
    job, parameters = hidden_job([3, 3], [2], names=["a", "b"] if sx.get_rank() == named_rank else ())
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
        parameter.data.zero_()
    job["optimizer"].step()
    sx.save_checkpoint(states_of(job), path)


@pytest.mark.parametrize("named_rank", [0, 1])
def test_names_of_any_rank_are_used(named_rank: int, tmp_path: Path) -> None:
    run_ranks(saves_named_ranks, 2, args=(str(tmp_path / "save"), named_rank))
    live, parameters = hidden_job([3, 3], [2], names=["b", "a"])
    sx.load_checkpoint(live, tmp_path / "save")
    found = moments(live["optimizer"], parameters)
    assert found == [pytest.approx([0.2] * 3), pytest.approx([0.1] * 3)]


@pytest.mark.parametrize("kind", ["states", "states, named"])
def test_numbers_of_ranks_with_other_parameters_are_refused_on_one_rank(kind: str, tmp_path: Path) -> None:
    run_ranks(saves_and_loads_stages, 2, args=(str(tmp_path / "save"), kind, "equal"))
    live, _ = stage_job(0, kind)
    with pytest.raises(errors.InvalidArgumentError, match="as many ranks") as caught:
        sx.load_checkpoint({"optimizer": live["optimizer"]}, tmp_path / "save", strict=False)
    assert caught.value.name == "optimizer"


@pytest.mark.parametrize("kind", ["objects", "objects, named", "hidden", "hidden, named", "states", "states, named"])
def test_each_stage_of_a_pipeline_gets_what_it_saved(kind: str, tmp_path: Path) -> None:
    found = run_ranks(saves_and_loads_stages, 2, args=(str(tmp_path / "save"), kind, "equal"))
    assert found == [[1, 2], [11, 12, 13]]


# Several names of one parameter


@pytest.mark.parametrize("write", [write_torch, write_dcp])
def test_a_parameter_has_the_names_of_all_its_modules(write: Write, tmp_path: Path) -> None:
    model, new = net(0), net(1)
    optimizer = stepped(torch.optim.Adam(model.parameters()))
    by_name = get_optimizer_state_dict(model, optimizer)
    path = write({"model": model, "optimizer": by_name}, tmp_path)
    live = {"backbone": new[0], "model": new, "optimizer": torch.optim.Adam(new.parameters())}
    sx.load_checkpoint(live, path, exclude="backbone")
    assert moments(live["optimizer"], [*new.parameters()]) == moments(optimizer, [*model.parameters()])


def test_a_shorter_list_becomes_the_saved_one(tmp_path: Path) -> None:
    path = write_torch({"model": net(0), "history": [{"loss": 0.5}, {"loss": 0.25}, {}]}, tmp_path)
    live = {"model": net(1), "history": []}
    sx.load_checkpoint(live, path)
    assert live["history"] == [{"loss": 0.5}, {"loss": 0.25}, {}]
