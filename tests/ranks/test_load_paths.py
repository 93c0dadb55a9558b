"""A load pairs entries by their paths, as far as a source knows them; optimizers go parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stateful import WithExtra
from stored import flip_bit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
Job = dict[str, Any]


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


def layers_job(groups: Sequence[str], lrs: Sequence[float]) -> Job:
    """Layers of one shape, whose parameters come in groups such as "ab"."""
    model = nn.ModuleDict({key: nn.Linear(3, 3, bias=False) for key in sorted("".join(groups))})
    of_groups: list[Any] = [
        {"params": [model[key].weight for key in keys], "lr": lr} for keys, lr in zip(groups, lrs, strict=True)
    ]
    return {"model": model, "optimizer": torch.optim.Adam(of_groups)}


def trained(job: Job) -> Job:
    for parameter in job["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    job["optimizer"].step()
    return job


def moments(job: Job) -> dict[str, list[float]]:
    """Return the first moment of each parameter that has one, by name."""
    named = job["model"].named_parameters()
    state = job["optimizer"].state
    return {name: state[one]["exp_avg"].flatten().tolist() for name, one in named if one in state}


def lrs_of(job: Job) -> dict[str, float]:
    names = {parameter: name for name, parameter in job["model"].named_parameters()}
    return {names[one]: group["lr"] for group in job["optimizer"].param_groups for one in group["params"]}


# What jobs write of their optimizer


def by_number(job: Job) -> Job:
    return {key: value.state_dict() for key, value in job.items()}


def by_name(job: Job, *, flat: bool = False) -> Job:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = get_optimizer_state_dict(job["model"], job["optimizer"], options=options)
    return {"model": job["model"].state_dict(), "optimizer": optimizer}


def flattened(job: Job) -> Job:
    return by_name(job, flat=True)


def write_save(state: Job, path: Path) -> Path:
    sx.save_checkpoint(state, path / "save")
    return path / "save"


def write_torch(state: Job, path: Path) -> Path:
    torch.save(state, path / "state.pt")  # the format under test
    return path / "state.pt"


def write_dcp(state: Job, path: Path) -> Path:
    dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


Form = Callable[[Job], Job]
Write = Callable[[Job, Path], Path]
WITH_NAMES: list[tuple[Form, Write]] = [
    (dict, write_save),
    *[(form, write) for form in (by_name, flattened) for write in (write_torch, write_dcp)],
]
ALL_FORMS = [*WITH_NAMES, *[(by_number, write) for write in (write_save, write_torch, write_dcp)]]
all_forms = pytest.mark.parametrize(("form", "write"), ALL_FORMS)
forms_with_names = pytest.mark.parametrize(("form", "write"), WITH_NAMES)
torch_writers = pytest.mark.parametrize("write", [write_torch, write_dcp])


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


# Names of a model that differ


def with_prefix(state: Job, prefix: str) -> Job:
    """Return what a job has written with a prefix in the names of its module and of its optimizer's parameters."""
    optimizer = {}
    for key, value in state["optimizer"].items():
        if key == "state":
            optimizer[key] = {prefix + name: entries for name, entries in value.items()}
        elif key == "param_groups":
            optimizer[key] = [{**group, "params": [prefix + name for name in group["params"]]} for group in value]
        else:  # "state.a.weight.step"
            kind, _, name = key.partition(".")
            optimizer[f"{kind}.{prefix}{name}"] = value
    return {"model": {prefix + name: tensor for name, tensor in state["model"].items()}, "optimizer": optimizer}


@torch_writers
@pytest.mark.parametrize("form", [by_name, flattened])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_before_all_names_is_left_out(prefix: str, form: Form, write: Write, tmp_path: Path) -> None:
    saved, live = trained(layers_job(["a", "b"], [0.5, 0.25])), layers_job(["b", "a"], [1.0, 1.0])
    report = sx.load_checkpoint(live, write(with_prefix(form(saved), prefix), tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(live["model"]["a"].weight, saved["model"]["a"].weight)
    assert (moments(live), lrs_of(live)) == (moments(saved), lrs_of(saved))


@torch_writers
def test_a_module_of_the_users_own_called_module_keeps_its_name(write: Write, tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)

    saved, live = (nn.ModuleDict({"module": Wrapped(), "head": nn.Linear(2, 2)}) for _ in range(2))
    sx.load_checkpoint({"m": live}, write({"m": saved.state_dict()}, tmp_path))
    assert str(live.state_dict()) == str(saved.state_dict())
    (tmp_path / "alone").mkdir()
    alone = Wrapped()
    sx.load_checkpoint({"m": alone}, write({"m": saved["module"].state_dict()}, tmp_path / "alone"))
    assert torch.equal(alone.module.weight, saved["module"].module.weight)


class DistributedDataParallel(nn.Module):
    """A wrapper like torch's: the module is in `module`, and names of its parameters begin with that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@torch_writers
@pytest.mark.parametrize("is_live", [False, True])
def test_a_wrapped_model_and_a_plain_one_load_each_other(is_live: bool, write: Write, tmp_path: Path) -> None:
    saved, live = trained(layers_job(["a", "b"], [0.5, 0.25])), layers_job(["a", "b"], [1.0, 1.0])
    wrapped = live if is_live else saved
    before = moments(saved)
    wrapped["model"] = DistributedDataParallel(wrapped["model"])
    report = sx.load_checkpoint(live, write(by_number(saved), tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    assert [*map(str, live["model"].parameters())] == [*map(str, saved["model"].parameters())]
    assert [*moments(live).values()] == [*before.values()]


@torch_writers
@pytest.mark.parametrize("form", [by_name, flattened, by_number])
def test_the_parameters_of_an_optimizer_follow_the_renamed_model(form: Form, write: Write, tmp_path: Path) -> None:
    saved = trained(layers_job(["a", "b"], [0.5, 0.25]))
    order = ["a", "b"] if form is by_number else ["b", "a"]
    state = form(saved)
    path = write({"net": state["model"], "optimizer": state["optimizer"]}, tmp_path)
    live = layers_job(order, [1.0, 1.0])
    sx.load_checkpoint(live, path, rename=[("^net", "model")])
    assert (moments(live), lrs_of(live)) == (moments(saved), lrs_of(saved))
    if form is by_number:
        return
    (tmp_path / "inner").mkdir()
    path = write(with_prefix(state, "old_"), tmp_path / "inner")
    for rename in (r"\bold_", ""), (r"^model\.old_", "model."):  # the name of a parameter, or that of a tensor
        live = layers_job(order, [1.0, 1.0])
        sx.load_checkpoint(live, path, rename=[rename])
        assert (moments(live), lrs_of(live)) == (moments(saved), lrs_of(saved))


# Keys and containers


MIXED: Job = {
    "ints": {0: 1, 10: {2: "b"}},
    "texts": {"0": 1, "10": 2},
    "dots": {"a.b": {"c.d": 1}, "a": {"b.c": 2}},
    "list": [1, {"x": 2}, torch.ones(2), [], {}],
    "tuple": (1, [2.5, {"0": 4}]),
    "w": torch.ones(1),
}


def others(value: Any) -> Any:
    """Return other values in the same containers."""
    if isinstance(value, dict):
        return {key: others(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(others, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value * 2


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
def test_keys_come_back_as_they_were(write: Write, tmp_path: Path) -> None:
    live = others(MIXED)
    report = sx.load_checkpoint(live, write(MIXED, tmp_path))
    assert (report.missing, report.unexpected) == ((), ())
    assert repr(live) == repr(MIXED)


def test_the_keys_of_a_file_of_torch_need_no_live_ones(tmp_path: Path) -> None:
    live: Job = {"ints": {}, "texts": None, "dots": {}, "list": None, "tuple": None, "w": torch.zeros(1)}
    sx.load_checkpoint(live, write_torch(MIXED, tmp_path))
    assert repr(live) == repr(MIXED)


@pytest.mark.parametrize("live", [{}, None, {"a": 0}])
@pytest.mark.parametrize("key", [0, "0", True, None, 1.5, "a.b"])
def test_a_key_of_a_dcp_whose_type_is_not_known_is_refused(key: Any, live: Any, tmp_path: Path) -> None:
    state = {"v": copy.deepcopy(live), "w": torch.zeros(1)}
    path = write_dcp({"v": {key: 5}, "w": torch.ones(1)}, tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match="not known") as caught:
        sx.load_checkpoint(state, path)
    assert caught.value.name == "v"
    assert repr(state) == repr({"v": live, "w": torch.zeros(1)})
    state = {"v": {key: 0}, "w": torch.zeros(1)}
    sx.load_checkpoint(state, path)
    assert repr(state["v"]) == repr({key: 5})


@pytest.mark.parametrize("live", [[], [{"a": 0}, {"a": 9}], [{"a": 0}, {"a": 9}, {"a": 9}]])
def test_a_list_of_a_dcp_does_not_become_shorter(live: Any, tmp_path: Path) -> None:
    """It does not tell how many empty mappings a list ended with."""
    saved = [{"a": 1}, {}]
    state = {"v": copy.deepcopy(live), "w": torch.zeros(1)}
    with pytest.raises(errors.InvalidArgumentError) as caught:
        sx.load_checkpoint(state, write_dcp({"v": saved, "w": torch.ones(1)}, tmp_path))
    assert caught.value.name is not None
    assert caught.value.name.startswith("v")
    assert state["v"] == live
    state["v"] = [{"a": 0}, {}]
    sx.load_checkpoint(state, tmp_path / "dcp")
    assert state["v"] == saved
    state["v"] = live
    sx.load_checkpoint(state, write_torch({"v": saved, "w": torch.ones(1)}, tmp_path))
    assert state["v"] == saved


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"k": {0: {"step": 1}, "0": torch.ones(1)}}, "k.0"),
        ({"k": {"0": torch.optim.SGD([torch.ones(1)]), 0: [torch.ones(1)]}}, "k.0"),
        ({"a": [torch.ones(1)], "a.b": 0}, "a"),
        ({"a": {"b": {}}, "a.b": 0}, "a"),
        ({"a": {"b": torch.ones(1)}, "a.b": 0}, "a.b"),
        ({"a": {"b": {"w": torch.ones(1)}}, "a.b": [0]}, "a.b"),
    ],
)
def test_keys_that_look_alike_are_refused_by_a_save_and_a_load(state: Job, name: str, tmp_path: Path) -> None:
    before = repr(state)
    for call in (
        lambda: sx.save_checkpoint(state, tmp_path / "save"),
        lambda: sx.load_checkpoint(state, write_torch({"w": torch.ones(1)}, tmp_path), strict=False),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="look alike") as caught:
            call()
        assert caught.value.name == name
    assert repr(state) == before


class Kept:
    """An object that takes any state."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)


@torch_writers
def test_an_object_alone_is_not_given_the_entries_of_something_else(write: Write, tmp_path: Path) -> None:
    live = Kept(seen=1)
    with pytest.raises(errors.NotFoundError):
        sx.load_checkpoint(live, write({"weight": torch.ones(1)}, tmp_path))
    assert live.values == {"seen": 1}


@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_that_cannot_be_read_is_named_if_nothing_else_is_there(strict: bool, tmp_path: Path) -> None:
    path = write_torch({"m": {"weight": torch.eye(2).to_sparse()}, "w": torch.ones(1)}, tmp_path)
    for live in (nn.Linear(2, 2, bias=False), {"weight": torch.zeros(2, 2)}):
        with pytest.raises(errors.UnsupportedError) as caught:
            sx.load_checkpoint({"m": live, "w": torch.zeros(1)}, path, strict=strict)
        assert caught.value.name == "m.weight"


# Stages of a pipeline


def saves_a_stage(path: str) -> list[Any]:
    rank = sx.get_rank()
    keys = ["ab", "c"][rank]
    job = layers_job([keys], [0.5])
    for key in keys:
        nn.init.constant_(job["model"][key].weight, ord(key))
        job["model"][key].weight.grad = torch.full((3, 3), float(ord(key)))
    job["optimizer"].step()
    sx.save_checkpoint(job, path)
    return [moments(job)]


def test_stages_of_a_pipeline_come_into_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    (first,), (second,) = run_ranks(saves_a_stage, 2, args=(path,))
    for groups in ["abc"], ["ca", "b"]:
        live = layers_job(groups, [1.0] * len(groups))
        report = sx.load_checkpoint(live, path)
        assert (report.missing, report.unexpected) == ((), ())
        assert moments(live) == first | second
        assert {*lrs_of(live).values()} == {0.5}


# Modules that load themselves, and adapters


def test_an_exported_adapter_comes_back_into_the_model_that_made_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        return peft.get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), config)

    saved, live = adapted(), adapted()
    base = copy.deepcopy(live.base_model.model[1].state_dict())
    sx.export_checkpoint(saved, tmp_path / "out")
    report = sx.load_checkpoint(live, tmp_path / "out")
    assert (report.missing, report.unexpected) == ((), ())
    layers = [model.base_model.model[0] for model in (live, saved)]
    for part in ("lora_A", "lora_B"):
        assert torch.equal(*(getattr(layer, part)["default"].weight for layer in layers))
    assert not torch.equal(*(layer.base_layer.weight for layer in layers))
    assert str(live.base_model.model[1].state_dict()) == str(base)


@pytest.mark.parametrize("write", [write_save, write_torch, write_dcp])
@pytest.mark.parametrize("length", [0, 2, 9])
def test_extra_state_may_have_another_length(write: Write, length: int, tmp_path: Path) -> None:
    saved, live = (nn.Sequential(WithExtra(torch.arange(n, dtype=torch.uint8))) for n in (5, length))
    sx.load_checkpoint({"m": live}, write({"m": saved.state_dict()}, tmp_path))
    assert torch.equal(live[0].extra, saved[0].extra)
    assert torch.equal(live[0].weight, saved[0].weight)


@pytest.mark.parametrize(
    "state", [{"": 3, "w": 1}, {"": {"a": 1}}, {"": nn.Linear(1, 1)}], ids=["value", "mapping", "module"]
)
def test_an_empty_key_at_the_root_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="an empty text"):
        sx.save_checkpoint(state, tmp_path / "saved")
    sx.save_checkpoint({"w": 1}, tmp_path / "other")
    with pytest.raises(sx.errors.InvalidArgumentError, match="an empty text"):
        sx.load_checkpoint(state, tmp_path / "other", strict=False)


@pytest.mark.parametrize("names", ["aewx", "xwea"])
def test_an_empty_tensor_does_not_part_what_is_read_together(names: str, tmp_path: Path) -> None:
    shapes = {"a": 3, "e": 0, "w": 3, "x": 3}
    sx.save_checkpoint({name: torch.ones(shapes[name]) for name in "aewx"}, tmp_path / "saved")
    flip_bit(tmp_path / "saved/rank-00000-of-00001.safetensors", -1)
    state = {name: torch.zeros(shapes[name]) for name in names}
    with pytest.raises(sx.errors.CorruptError, match="state is unchanged"):
        sx.load_checkpoint(state, tmp_path / "saved")
    assert not any(tensor.any() for tensor in state.values())
