"""A load of an optimizer goes parameter by parameter: moments and hyperparameters come to the paths that they have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_paths import (
    Form,
    Job,
    Write,
    by_name,
    by_number,
    flattened,
    layers_job,
    lrs_of,
    moments,
    trained,
    write_dcp,
    write_save,
    write_torch,
)
from torch import nn

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Classifier(nn.Module):
    """A body, and a head whose size differs between jobs."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, num_classes)


def classifier_job(num_classes: int, *, lr: float, head_lr: float | None = None) -> Job:
    model = Classifier(num_classes)
    groups: Any = model.parameters()
    if head_lr is not None:
        groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": head_lr}]
    return {"model": model, "optimizer": torch.optim.Adam(groups, lr=lr)}


WITH_NAMES: list[tuple[Form, Write]] = [
    (dict, write_save),
    *[(form, write) for form in (by_name, flattened) for write in (write_torch, write_dcp)],
]
ALL_FORMS = [*WITH_NAMES, *[(by_number, write) for write in (write_save, write_torch, write_dcp)]]
all_forms = pytest.mark.parametrize(("form", "write"), ALL_FORMS)
forms_with_names = pytest.mark.parametrize(("form", "write"), WITH_NAMES)


# Patterns for single parameters


@all_forms
def test_a_new_head_leaves_the_body_its_moments_and_hyperparameters(form: Form, write: Write, tmp_path: Path) -> None:
    saved, live = trained(classifier_job(2, lr=0.5)), classifier_job(3, lr=0.25)
    before = copy.deepcopy(live["model"].head.state_dict())
    report = sx.load_checkpoint(live, write(form(saved), tmp_path), exclude="*head*")
    assert (report.missing, report.unexpected) == ((), ())
    expected = {name: moment for name, moment in moments(saved).items() if "body" in name}
    assert moments(live) == expected
    assert torch.equal(live["model"].body[1].weight, saved["model"].body[1].weight)
    assert str(live["model"].head.state_dict()) == str(before)
    assert live["optimizer"].param_groups[0]["lr"] == 0.5


@all_forms
def test_a_new_head_keeps_the_hyperparameters_of_a_group_of_its_own(form: Form, write: Write, tmp_path: Path) -> None:
    saved = trained(classifier_job(2, lr=0.5, head_lr=0.75))
    live = classifier_job(3, lr=0.25, head_lr=0.125)
    sx.load_checkpoint(live, write(form(saved), tmp_path), exclude="*head*")
    assert [group["lr"] for group in live["optimizer"].param_groups] == [0.5, 0.125]


@all_forms
@pytest.mark.parametrize(
    "options",
    [
        {"include": ["model.*", "optimizer.state.*"]},
        {"include": ["model", "optimizer.state"]},
        {"exclude": "optimizer.param_groups"},
        {"exclude": "optimizer.param_groups.*"},
    ],
)
def test_moments_come_back_under_a_new_learning_rate(form: Form, write: Write, options: Any, tmp_path: Path) -> None:
    saved, live = trained(classifier_job(2, lr=0.5)), classifier_job(2, lr=0.25)
    report = sx.load_checkpoint(live, write(form(saved), tmp_path), **options)
    assert (report.missing, report.unexpected) == ((), ())
    assert moments(live) == moments(saved)
    assert live["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(("form", "write"), [(dict, write_save), (flattened, write_dcp)])
@pytest.mark.parametrize("pattern", ["*.lr", "optimizer.param_groups.*.lr"])
def test_a_hyperparameter_that_is_left_out_stays(form: Form, write: Write, pattern: str, tmp_path: Path) -> None:
    """Those of a parameter are loaded or left whole, as its state is."""
    saved, live = trained(classifier_job(2, lr=0.5)), classifier_job(2, lr=0.25)
    path = write(form(saved), tmp_path)
    sx.load_checkpoint(live, path, exclude=pattern)
    assert moments(live) == moments(saved)
    assert live["optimizer"].param_groups[0]["lr"] == 0.25


def test_the_state_of_one_parameter_is_selected(tmp_path: Path) -> None:
    saved, live = trained(classifier_job(2, lr=0.5)), classifier_job(2, lr=0.25)
    path = write_save(saved, tmp_path)
    sx.load_checkpoint(live, path, include=["model.*", "optimizer.state.model.body.1.bias.exp_avg"])
    assert moments(live) == {"body.1.bias": moments(saved)["body.1.bias"]}
    assert {*live["optimizer"].state[live["model"].body[1].bias]} == {"step", "exp_avg", "exp_avg_sq"}
    larger = classifier_job(3, lr=0.25)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        sx.load_checkpoint(larger, path, exclude="model.head.*")
    assert caught.value.name is not None
    assert caught.value.name.startswith("optimizer.state.model.head.")
    assert not larger["optimizer"].state


# Groups


@forms_with_names
def test_a_parameter_brings_its_state_and_hyperparameters_into_any_group(
    form: Form, write: Write, tmp_path: Path
) -> None:
    saved = trained(layers_job(["ab", "cd"], [0.5, 0.25]))
    path = write(form(saved), tmp_path)
    for groups in ["cd", "ab"], ["dc", "b", "a"], ["c", "b", "a", "d"]:
        live = layers_job(groups, [1.0] * len(groups))
        sx.load_checkpoint(live, path)
        assert moments(live) == moments(saved)
        assert lrs_of(live) == lrs_of(saved)


@forms_with_names
def test_groups_that_are_joined_must_have_equal_hyperparameters(form: Form, write: Write, tmp_path: Path) -> None:
    path = write(form(trained(layers_job(["ab", "c", "d"], [0.5, 0.25, 0.5]))), tmp_path)
    live = layers_job(["abd", "c"], [1.0, 1.0])
    sx.load_checkpoint(live, path)
    assert [group["lr"] for group in live["optimizer"].param_groups] == [0.5, 0.25]
    live = layers_job(["d", "abc"], [1.0, 1.0])
    before = copy.deepcopy(live["model"].state_dict())
    with pytest.raises(errors.InvalidArgumentError, match="'lr'") as caught:
        sx.load_checkpoint(live, path)
    assert caught.value.name == "optimizer.param_groups.1"
    assert {caught.value.expected, caught.value.found} == {0.5, 0.25}
    assert (str(live["model"].state_dict()), lrs_of(live)["d.weight"]) == (str(before), 1.0)
    sx.load_checkpoint(live, path, exclude="optimizer.param_groups")
    assert moments(live)


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
def test_groups_of_numbered_parameters_must_have_the_same_sizes(write: Write, tmp_path: Path) -> None:
    path = write(by_number(trained(layers_job(["ab", "c"], [0.5, 0.25]))), tmp_path)
    for groups in ["c", "ab"], ["abc"], ["a", "b", "c"]:
        live = layers_job(groups, [1.0] * len(groups))
        with pytest.raises(errors.InvalidArgumentError) as caught:
            sx.load_checkpoint(live, path)
        assert caught.value.name == "optimizer"
        assert not live["optimizer"].state


def saves_on_two_ranks(path: str, is_sgd: bool) -> None:
    saved = layers_job(["ab"], [0.5 + sx.get_rank() / 4])
    for parameter in saved["model"].parameters():
        nn.init.zeros_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    if is_sgd:  # without any state
        saved["optimizer"] = torch.optim.SGD(saved["model"].parameters(), lr=0.5 + sx.get_rank() / 4)
    saved["optimizer"].step()
    sx.save_checkpoint(saved, path)


@pytest.mark.parametrize("is_sgd", [False, True])
def test_hyperparameters_that_ranks_saved_differently_are_refused_on_one(is_sgd: bool, tmp_path: Path) -> None:
    run_ranks(saves_on_two_ranks, 2, args=(str(tmp_path / "save"), is_sgd))

    def job() -> Job:
        live = layers_job(["ab"], [1.0])
        if is_sgd:
            live["optimizer"] = torch.optim.SGD(live["model"].parameters(), lr=1.0)
        return live

    live = job()
    with pytest.raises(errors.ReplicaError, match=r"optimizer\.param_groups"):
        sx.load_checkpoint(live, tmp_path / "save")
    sx.load_checkpoint(live, tmp_path / "save", exclude="optimizer.param_groups")
    assert live["optimizer"].param_groups[0]["lr"] == 1.0
    sx.load_checkpoint(live, tmp_path / "save", replicas="root")
    assert live["optimizer"].param_groups[0]["lr"] == 0.5
