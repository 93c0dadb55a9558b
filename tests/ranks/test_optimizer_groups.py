"""Groups, schedulers and stages: which optimizer state goes to which parameter, or a refusal."""

from __future__ import annotations

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
