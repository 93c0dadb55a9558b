"""Whose state it is: what belongs to a rank, to a class of optimizers, or to a loader of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stored import json_header, write_with_header
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# Objects that are a rank's own


class Position:
    """An object that says that its state is a rank's own. It is equal on all ranks."""

    per_rank = True

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Shared(Position):
    per_rank = False


def saved_by(ranks: int, make: Callable[[], Any], path: Path, **options: Any) -> str:
    run_ranks(lambda: sx.save_checkpoint(make(), path, **options) and None, ranks)
    return str(path)


def loaded_by(ranks: int, make: Callable[[], Any], path: str, read: Callable[[Any], Any], **options: Any) -> Any:
    """Load on some ranks; return what `read` returns of each rank's state, or the class and name of the error."""

    def ranks_load() -> Any:
        state = make()
        try:
            sx.load_checkpoint(state, path, **options)
        except sx.StateExchangeError as error:
            return error
        return read(state)

    return run_ranks(ranks_load, ranks)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("place", ["at", "jobs.0", ""])
def test_what_is_a_ranks_own_fits_the_same_number_of_ranks(place: str, before: int, after: int, tmp_path: Path) -> None:
    def make(at: int) -> Any:
        return {"at": {"at": Position(at), "step": at}, "jobs.0": {"jobs": [Position(at)], "step": at}}.get(
            place, Position(at)
        )

    path = saved_by(before, lambda: make(5), tmp_path / "saved")
    same = loaded_by(before, lambda: make(0), path, lambda state: json.dumps(state, default=lambda one: one.at))
    assert all("5" in one and "0" not in one for one in same)
    for options in ({}, {"strict": False}):
        for error in loaded_by(after, lambda: make(0), path, lambda _: None, **options):
            assert isinstance(error, errors.ReplicaError), options
            assert all(part in str(error) for part in [f"{before} rank", place, f"exclude='{place}'" if place else ""])
    root = loaded_by(after, lambda: make(0), path, lambda _: "loaded", replicas="root")
    assert root == ["loaded"] * after  # as its documentation says
    if place:
        found = loaded_by(after, lambda: make(0), path, lambda state: state["step"], exclude=place)
        assert found == [5] * after


def test_a_whole_state_that_is_a_ranks_own_can_be_left_out(tmp_path: Path) -> None:
    path = saved_by(1, lambda: Position(5), tmp_path / "saved")
    for error in loaded_by(2, lambda: Position(0), path, lambda _: None, exclude="at"):
        assert isinstance(error, errors.InvalidArgumentError)  # nothing else is there
        assert not isinstance(error, errors.ReplicaError)


def test_generators_do_not_become_equal_on_more_ranks_than_have_saved_them(tmp_path: Path) -> None:
    path = saved_by(1, lambda: {"random": sx.integrations.RandomState(), "step": 1}, tmp_path / "saved")
    before = random.getstate()
    for error in loaded_by(2, lambda: {"random": sx.integrations.RandomState(), "step": 0}, path, lambda _: None):
        assert isinstance(error, errors.ReplicaError)
        assert "random" in str(error)
    assert random.getstate() == before


def test_a_plain_mapping_does_not_take_a_ranks_own_state_of_another_number(tmp_path: Path) -> None:
    path = saved_by(1, lambda: {"own": Position(5)}, tmp_path / "saved")
    for state in ({}, {"own": {"at": 0}}):
        for error in loaded_by(2, lambda state=state: state, path, lambda _: None):  # type: ignore[misc]
            assert isinstance(error, errors.ReplicaError)
    assert loaded_by(1, dict, path, lambda state: state) == [{"own": {"at": 5}}]


def test_an_object_says_it_in_the_save_or_at_the_load(tmp_path: Path) -> None:
    path = saved_by(1, lambda: {"a": Shared(5), "b": Position(6)}, tmp_path / "saved")
    read = lambda state: [one.at for one in state.values()]  # noqa: E731
    found = loaded_by(2, lambda: {"a": Shared(0), "b": Shared(0)}, path, read, exclude="b")
    assert found == [[5, 0]] * 2
    for kinds in ((Position, Shared), (Shared, Shared)):
        for error in loaded_by(2, lambda kinds=kinds: dict(zip("ab", [k(0) for k in kinds], strict=True)), path, read):  # type: ignore[misc]
            assert isinstance(error, errors.ReplicaError)


def test_a_renamed_object_stays_a_ranks_own(tmp_path: Path) -> None:
    path = saved_by(1, lambda: {"old": Position(5), "step": 1}, tmp_path / "saved")
    for error in loaded_by(
        2, lambda: {"new": Shared(0), "step": 0}, path, lambda _: None, rename=[(r"^old\.", "new.")]
    ):
        assert isinstance(error, errors.ReplicaError)
        assert "exclude='new'" in str(error)


@pytest.mark.parametrize("write", ["torch", "dcp"])
def test_other_files_have_one_state_which_is_no_ranks_own(write: str, tmp_path: Path) -> None:
    state = {"own": {"at": 5}, "w": torch.ones(2)}
    path = str(tmp_path / write)
    torch.save(state, path) if write == "torch" else dcp.save(state, checkpoint_id=path, no_dist=True)
    make = lambda: {"own": Position(0), "w": torch.zeros(2)}  # noqa: E731
    for error in loaded_by(2, make, path, lambda _: None):
        assert isinstance(error, errors.ReplicaError)
        assert "exclude='own'" in str(error)
    assert loaded_by(2, make, path, lambda state: state["w"].tolist(), exclude="own") == [[1, 1]] * 2
    assert loaded_by(1, make, path, lambda state: state["own"].at) == [5]


BROKEN = [("per_rank", "own"), ("per_rank", [1]), ("optimizers", ["o"]), ("optimizers", {"o": 1})]


def change_record(file: Path, name: str, value: Any) -> None:
    """Change an entry of the record of a rank's file, whose size stays."""
    header, data = json_header(file), file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    record = json.loads(header["__metadata__"]["statexchange"])
    del record["digest"]
    header["__metadata__"]["statexchange"] = json.dumps({**record, name: value})
    write_with_header(file, json.dumps(header, separators=(",", ":")).encode().ljust(length), data[8 + length :])


def test_a_broken_record_of_what_is_whose_is_corrupt(tmp_path: Path) -> None:
    for number, (name, value) in enumerate(BROKEN):
        path = saved_by(1, lambda: {"own": Position(5)}, tmp_path / str(number))
        change_record(next(Path(path).glob("rank-*")), name, value)
        with pytest.raises(errors.CorruptError):
            sx.load_checkpoint({"own": Position(0)}, path)


# Classes of optimizers


def job(kind: Any, *, steps: int = 0, wrap: Callable[[Any], Any] = lambda one: one, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": wrap(optimizer), "step": steps}


def write(form: str, state: dict[str, Any], path: Path) -> str:
    states = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in state.items()}
    if form == "save":
        sx.save_checkpoint(state, path)
    elif form == "states":
        sx.save_checkpoint(states, path)
    elif form == "torch":
        torch.save(states, path)
    else:
        dcp.save(states, checkpoint_id=path, no_dist=True)
    return str(path)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.parametrize("before", ["AdamW", "SGD"])
@pytest.mark.parametrize("after", OPTIMIZERS)
def test_a_save_of_another_class_is_refused_and_can_be_left_out(before: str, after: str, tmp_path: Path) -> None:
    path = write("save", job(OPTIMIZERS[before], steps=2), tmp_path / "saved")
    live = job(OPTIMIZERS[after])
    if before == after:
        sx.load_checkpoint(live, path)
        assert len(live["optimizer"].state) == 2
        return
    kept = live["model"].weight.detach().clone()
    with pytest.raises(errors.InvalidArgumentError) as raised:
        sx.load_checkpoint(live, path)
    assert raised.value.name == "optimizer"
    assert all(part in str(raised.value) for part in (before, after, "exclude='optimizer'"))
    assert not live["optimizer"].state
    assert torch.equal(live["model"].weight, kept)
    sx.load_checkpoint(live, path, exclude="optimizer")
    assert live["step"] == 2
    assert not torch.equal(live["model"].weight, kept)


@pytest.mark.parametrize("form", ["states", "torch", "dcp"])
def test_without_a_class_the_names_of_hyperparameters_decide(form: str, tmp_path: Path) -> None:
    path = write(form, job(OPTIMIZERS["AdamW"], steps=2), tmp_path / "saved")
    for other in ("SGD", "RMSprop", "NAdam"):
        live = job(OPTIMIZERS[other])
        with pytest.raises(errors.InvalidArgumentError) as raised:
            sx.load_checkpoint(live, path)
        assert raised.value.name == "optimizer"
        assert all(part in str(raised.value) for part in ("hyperparameters", other, "exclude='optimizer'"))
        sx.load_checkpoint(live, path, exclude="optimizer")
    for same in ("AdamW", "Adam"):  # which nothing in these sources tells apart
        live = job(OPTIMIZERS[same])
        sx.load_checkpoint(live, path)
        assert len(live["optimizer"].state) == 2


def test_hyperparameters_that_were_added_do_not_make_another_class(tmp_path: Path) -> None:
    """Those of another version of torch, of a scheduler, and of the job."""
    saved = job(OPTIMIZERS["AdamW"], steps=1)
    torch.optim.lr_scheduler.StepLR(saved["optimizer"], 1)
    (group,) = saved["optimizer"].param_groups
    for newer in ("decoupled_weight_decay", "fused"):
        group.pop(newer)
    path = write("torch", saved, tmp_path / "old")
    live = job(OPTIMIZERS["AdamW"])
    sx.load_checkpoint(live, path)
    assert len(live["optimizer"].state) == 2
    saved = job(OPTIMIZERS["AdamW"], steps=1)
    saved["optimizer"].param_groups[0]["label"] = "decay"
    live = job(OPTIMIZERS["AdamW"])
    live["optimizer"].param_groups[0]["mine"] = 1
    sx.load_checkpoint(live, write("save", saved, tmp_path / "saved"))
    assert live["optimizer"].param_groups[0]["label"] == "decay"


def accelerated(optimizer: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optimizer)


def twice(optimizer: Any) -> Any:
    return accelerated(sx.DistributedOptimizer(optimizer))


@pytest.mark.parametrize("wrap", [sx.DistributedOptimizer, accelerated, twice])
def test_a_wrapper_is_of_the_class_that_it_wraps(wrap: Any, tmp_path: Path) -> None:
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    write("save", job(OPTIMIZERS["AdamW"], steps=2), plain)
    write("save", job(OPTIMIZERS["AdamW"], steps=2, wrap=wrap), wrapped)
    for path, live in ((plain, job(OPTIMIZERS["AdamW"], wrap=wrap)), (wrapped, job(OPTIMIZERS["AdamW"]))):
        sx.load_checkpoint(live, path)
        assert len(live["optimizer"].state) == 2
    for path, live in ((plain, job(OPTIMIZERS["Adam"], wrap=wrap)), (wrapped, job(OPTIMIZERS["Adam"]))):
        with pytest.raises(errors.InvalidArgumentError, match="AdamW"):
            sx.load_checkpoint(live, path)


def test_a_fused_optimizer_is_of_the_same_class_and_so_is_one_of_another_module(tmp_path: Path) -> None:
    path = write("save", job(OPTIMIZERS["AdamW"], steps=2), tmp_path / "saved")
    sx.load_checkpoint(job(lambda parameters: torch.optim.AdamW(parameters, fused=True)), path)
    moved = type("AdamW", (torch.optim.AdamW,), {"__module__": "train"})
    sx.load_checkpoint(job(moved), path)
    other = type("AdamW", (torch.optim.RMSprop,), {"__module__": "train"})
    with pytest.raises(errors.InvalidArgumentError, match="exclude='optimizer'"):
        sx.load_checkpoint(job(other), path)


def test_optimizers_in_a_list_and_renamed_ones_have_their_classes(tmp_path: Path) -> None:
    first, second = job(OPTIMIZERS["AdamW"], steps=1), job(OPTIMIZERS["SGD"], steps=1)
    state = {"models": [first["model"], second["model"]], "optimizers": [first["optimizer"], second["optimizer"]]}
    sx.save_checkpoint(state, tmp_path / "saved")
    live = {"models": state["models"], "optimizers": [job(OPTIMIZERS["AdamW"])["optimizer"], second["optimizer"]]}
    sx.load_checkpoint(state, tmp_path / "saved")
    turned = {"models": live["models"][::-1], "optimizers": state["optimizers"][::-1]}
    with pytest.raises(errors.InvalidArgumentError, match="SGD"):
        sx.load_checkpoint(turned, tmp_path / "saved")
    path = write("save", first, tmp_path / "one")
    renamed = job(OPTIMIZERS["Adam"])
    renamed["opt"] = renamed.pop("optimizer")
    with pytest.raises(errors.InvalidArgumentError, match="exclude='opt'"):
        sx.load_checkpoint(renamed, path, rename=[(r"^optimizer\.", "opt.")])


def test_a_trainer_does_not_resume_with_another_optimizer(tmp_path: Path) -> None:
    from tiny_models import llama_of_pages
    from transformers import TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(50, (16, 4))]
    saves = sx.Checkpoints(tmp_path / "saves")

    def train(optim: str, steps: int) -> Any:
        args = TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, save_steps=1, optim=optim, use_cpu=True, report_to="none"
        )
        trainer = sx.integrations.CheckpointsTrainer(llama_of_pages(), args, train_dataset=rows, saves=saves)
        return trainer.train(resume_from_checkpoint=True).global_step

    assert train("adamw_torch", 1) == 1
    with pytest.raises(errors.InvalidArgumentError, match="SGD"):
        train("sgd", 2)
    assert train("adamw_torch_fused", 2) == 2


# Loaders of their own


class Scaled(nn.Linear):
    """A layer whose forward uses a copy of its weight, made when weights are loaded."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = 0
        self.derive()

    def derive(self) -> None:
        self.calls += 1
        self.doubled = self.weight.detach().clone() * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.doubled.T


class ByPostHook(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())


class ByPreHook(Scaled):
    """As torch's: the hook sees what is loaded, before it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(type(self).keep)

    def keep(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.calls += 1
        self.doubled = state[prefix + "weight"].clone() * 2


class ByOverride(Scaled):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derive()


class Whole(Scaled):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().load_state_dict(*args, **options)
        self.derive()
        return found


def holding(layer: nn.Module, place: str) -> nn.Module:
    return layer if place == "top" else nn.Sequential(nn.Linear(3, 3), layer, nn.BatchNorm1d(2))


@pytest.mark.parametrize("source", ["save", "export", "torch"])
@pytest.mark.parametrize("place", ["top", "inside"])
@pytest.mark.parametrize("kind", [ByPostHook, ByPreHook, ByOverride, Whole])
def test_what_a_module_derives_at_a_load_is_derived(kind: Any, place: str, source: str, tmp_path: Path) -> None:
    saved, live = holding(kind(), place).eval(), holding(kind(), place).eval()
    path = tmp_path / "saved"
    {"save": sx.save_checkpoint, "export": sx.export_checkpoint}.get(
        source, lambda module, path: torch.save(module.state_dict(), path)
    )(saved, path)
    weight = next(live.parameters())
    calls = [one.calls for one in live.modules() if isinstance(one, Scaled)]
    sx.load_checkpoint(live, path)
    assert next(live.parameters()) is weight
    if kind is Whole and place == "inside":  # torch calls this method of the outermost module alone
        torch_loads = holding(kind(), place).eval()
        torch_loads.load_state_dict(saved.state_dict())
        live[1].derive()
        torch_loads[1].derive()
        saved = torch_loads
    else:
        assert [one.calls for one in live.modules() if isinstance(one, Scaled)] == [one + 1 for one in calls]
    assert torch.equal(live(torch.ones(4, 3)), saved(torch.ones(4, 3)))


def test_hooks_see_all_weights_of_a_load_in_parts_and_nothing_is_called_for_no_weights(tmp_path: Path) -> None:
    saved, live = nn.Sequential(ByPostHook(), nn.Linear(2, 2)), nn.Sequential(ByPostHook(), nn.Linear(2, 2))
    sx.save_checkpoint({"model": saved, "step": 1}, tmp_path / "saved")
    before = live[0].calls
    sx.load_checkpoint({"model": live, "step": 0}, tmp_path / "saved", exclude="model")
    assert live[0].calls == before
    kept = live[1].weight.detach().clone()
    sx.load_checkpoint({"model": live}, tmp_path / "saved", include="model.0.*")
    assert live[0].calls == before + 1
    assert torch.equal(live[0].doubled, saved[0].doubled)
    assert torch.equal(live[1].weight, kept)


def test_a_loader_that_raises_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    sx.save_checkpoint({"model": model}, tmp_path / "saved")

    def fails(module: nn.Module, keys: Any) -> None:
        raise RuntimeError("no GPU")

    model[0].register_load_state_dict_post_hook(fails)
    with pytest.raises(errors.InvalidArgumentError, match="no GPU") as raised:
        sx.load_checkpoint({"model": model}, tmp_path / "saved")
    assert raised.value.name == "model"


def test_hooks_on_a_wrapper_are_refused_by_its_type(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sx.save_checkpoint({"model": model}, tmp_path / "saved")
    average = torch.optim.swa_utils.AveragedModel(model)
    average.register_load_state_dict_post_hook(lambda module, keys: None)
    with pytest.raises(errors.UnsupportedError, match="AveragedModel"):
        sx.load_checkpoint({"model": average}, tmp_path / "saved", strict=False)


def loads_a_sharded_module(folder: str) -> bool:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].register_load_state_dict_post_hook(
        lambda module, keys: setattr(module, "total", module.weight.full_tensor().sum().item())
    )
    fully_shard(model[0])
    fully_shard(model)
    sx.load_checkpoint({"model": model}, folder)
    return bool(model[1].total == model[1].weight.full_tensor().sum().item() != 0)


def test_hooks_of_a_sharded_module_are_called_with_its_shards(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sx.save_checkpoint({"model": model}, tmp_path / "saved")
    assert run_ranks(loads_a_sharded_module, 2, backend="gloo", args=(str(tmp_path / "saved"),)) == [True, True]


class WithTrust(torch.optim.SGD):
    """Trains by what its loader has derived of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.trust = 0.0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.derive()

    def derive(self) -> None:
        self.trust = sum(one["momentum_buffer"].abs().sum().item() for one in self.state.values())


def by_hook(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.trust = 0.0  # type: ignore[attr-defined]
    optimizer.register_load_state_dict_post_hook(WithTrust.derive)
    return optimizer


def by_set_state(parameters: Any) -> Any:
    class WithState(torch.optim.SGD):
        trust = 0.0

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            WithTrust.derive(self)  # type: ignore[arg-type]

    return WithState(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [WithTrust, by_hook, by_set_state])
def test_what_an_optimizer_derives_at_a_load_is_derived(kind: Any, tmp_path: Path) -> None:
    saved, live = job(kind, steps=2), job(kind, steps=1)
    WithTrust.derive(saved["optimizer"])
    path = write("save", saved, tmp_path / "saved")
    group, state = live["optimizer"].param_groups[0], live["optimizer"].state[live["model"].weight]
    sx.load_checkpoint(live, path)
    assert live["optimizer"].trust == saved["optimizer"].trust
    assert live["optimizer"].param_groups[0] is group
    assert live["optimizer"].state[live["model"].weight] is state
    for mine, theirs in zip(live["model"].parameters(), saved["model"].parameters(), strict=True):
        buffers = [held["optimizer"].state[one]["momentum_buffer"] for held, one in ((live, mine), (saved, theirs))]
        assert torch.equal(*buffers)


class Halving(torch.optim.SGD):
    """Changes the state that it loads."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for held in self.state.values():
            held["momentum_buffer"] = held["momentum_buffer"] / 2
        self.param_groups[0]["lr"] = 0.5


def test_what_a_loader_of_an_optimizer_changes_stays_changed(tmp_path: Path) -> None:
    make = lambda parameters: Halving(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    saved, live, torchs = job(make, steps=2), job(make, steps=1), job(make)
    torchs["optimizer"].load_state_dict(saved["optimizer"].state_dict())
    sx.load_checkpoint(live, write("save", saved, tmp_path / "saved"))
    for mine, theirs in zip(live["model"].parameters(), torchs["model"].parameters(), strict=True):
        buffers = [held["optimizer"].state[one]["momentum_buffer"] for held, one in ((live, mine), (torchs, theirs))]
        assert torch.equal(*buffers)
    assert live["optimizer"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, accelerated, twice])
def test_a_loader_of_an_optimizer_does_not_round_its_state(wrap: Any, tmp_path: Path) -> None:
    """torch's casts moments to the dtype of the parameters."""

    def make(steps: int) -> dict[str, Any]:
        state = job(WithTrust, steps=steps, wrap=wrap)
        state["model"].bfloat16()
        for parameter in state["model"].parameters():
            state["optimizer"].state[parameter]["momentum_buffer"] = torch.full(parameter.shape, steps + 1e-5)
        return state

    saved, live = make(2), make(1)
    sx.load_checkpoint(live, write("save", saved, tmp_path / "saved"))
    for parameter in live["model"].parameters():
        assert torch.equal(live["optimizer"].state[parameter]["momentum_buffer"], torch.full(parameter.shape, 2 + 1e-5))


# State of a sharded parameter that is a rank's own


class PerRank(torch.optim.Optimizer):
    """Has plain state of its own for each part of a parameter."""

    def __init__(self, parameters: Any, shape: tuple[int, ...] = (), whole: bool = True) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.shape, self.whole = shape, whole

    def step(self, closure: Any = None, value: float = 1.0) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.tensor(value), "own": {"list": [torch.full(self.shape, value)]}}
            if self.whole:
                self.state[parameter]["mean"] = torch.full(tuple(parameter.shape), value)


def sharded(shape: tuple[int, ...], value: float) -> dict[str, Any]:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    optimizer = PerRank(model.parameters(), shape)
    optimizer.step(value=value)
    return {"model": model, "optimizer": optimizer, "step": value}


def saves_its_part(folder: str, own: int) -> None:
    ranks = torch.distributed.get_world_size()
    value = 2.0 + own * sx.get_rank()
    sx.save_checkpoint(sharded((4 // ranks, 4), value) | {"step": 2.0}, folder)


def loads_its_part(folder: str, exclude: str | None, replicas: Any = "equal") -> Any:
    ranks = torch.distributed.get_world_size()
    state = sharded((4 // ranks, 4), 0.0)
    try:
        sx.load_checkpoint(state, folder, exclude=exclude or (), replicas=replicas)
    except sx.StateExchangeError as error:
        return [type(error).__name__, str(error)]
    held = state["optimizer"].state[state["model"].weight]
    return [state["step"], held["own"]["list"][0].flatten().tolist(), held["mean"].sum().item(), held["step"].item()]


@pytest.mark.parametrize("own", [0, 1], ids=["equal on both ranks", "different"])
def test_plain_state_of_a_sharded_parameter_is_a_ranks_own(own: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(saves_its_part, 2, backend="gloo", args=(folder, own), reuse=True)
    first, second = run_ranks(loads_its_part, 2, backend="gloo", args=(folder, None), reuse=True)
    assert first == [2.0, [2.0] * 8, 32.0, 2.0]
    assert second == [2.0, [2.0 + own] * 8, 16 * (2.0 + own), 2.0 + own]
    for ranks in (1, 4):
        for kind, message in run_ranks(loads_its_part, ranks, backend="gloo", args=(folder, None), reuse=True):
            assert kind == "ReplicaError"
            assert "optimizer.state.model.weight.own" in message
            assert "2 rank" in message
        found = run_ranks(loads_its_part, ranks, backend="gloo", args=(folder, None, "root"), reuse=True)
        assert [one[0] for one in found] == ["ReplicaError"] * ranks
        found = run_ranks(loads_its_part, ranks, backend="gloo", args=(folder, "optimizer"), reuse=True)
        assert [one[0] for one in found] == [2.0] * ranks


def loads_renamed(folder: str) -> str:
    state = sharded((1, 4), 0.0)
    try:
        sx.load_checkpoint({"net": state["model"], **state}, folder, rename=[("^model", "net")], strict=False)
    except sx.StateExchangeError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_parts_of_a_renamed_parameter_are_a_ranks_own(tmp_path: Path) -> None:
    run_ranks(saves_its_part, 2, backend="gloo", args=(str(tmp_path / "saved"), 0), reuse=True)
    for found in run_ranks(loads_renamed, 4, backend="gloo", args=(str(tmp_path / "saved"),), reuse=True):
        assert "ReplicaError" in found
        assert "own" in found


def test_plain_state_of_one_ranks_part_does_not_go_to_two(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(saves_a_row, 1, backend="gloo", args=(folder,), reuse=True)
    for kind, message in run_ranks(loads_its_part, 2, backend="gloo", args=(folder, None), reuse=True):
        assert kind == "ReplicaError"
        assert "optimizer.state.model.weight.own" in message


def saves_a_row(folder: str) -> None:
    sx.save_checkpoint(sharded((2, 4), 2.0), folder)


@pytest.mark.parametrize(("shape", "goes"), [((2, 4), True), ((), True), ((4,), False)])
def test_plain_state_beside_a_layout_is_a_ranks_own(shape: tuple[int, ...], goes: bool, tmp_path: Path) -> None:
    """Of the shape of the rank's part it follows the layout."""
    options = {"layout": {"model.weight": Shard(0)}}

    def make(rows: int) -> Any:
        model = nn.Linear(4, rows, bias=False)
        optimizer = PerRank(model.parameters(), (rows, 4) if shape == (2, 4) else shape, whole=False)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    path = saved_by(2, lambda: make(2), tmp_path / "saved", **options)
    found = loaded_by(1, lambda: make(4), path, lambda _: "loaded", **options)
    if goes:
        assert found == ["loaded"]
        return
    assert isinstance(found[0], errors.ReplicaError)
    assert loaded_by(2, lambda: make(2), path, lambda _: "loaded", **options) == ["loaded"] * 2


def test_plain_state_of_a_whole_parameter_goes_to_any_number(tmp_path: Path) -> None:
    def make() -> Any:
        state = job(PerRank)
        for parameter in state["model"].parameters():  # ranks are threads, which share torch's generator
            parameter.data.fill_(1.0)
        state["optimizer"].shape = (5,)
        state["optimizer"].step()
        return state

    path = saved_by(2, make, tmp_path / "saved")
    for ranks in (1, 3):
        assert loaded_by(ranks, make, path, lambda _: "loaded") == ["loaded"] * ranks


# What torch resizes


class Queue(nn.Module):
    """A queue that takes the size of a saved one, by its loader."""

    def __init__(self, length: int, kind: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("items", torch.full((length,), float(length)))
        if kind == "hook":
            self.register_load_state_dict_pre_hook(type(self).resize)
        self.kind = kind

    def resize(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "items" in state:
            self.items = torch.empty_like(state[prefix + "items"])

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.kind == "override":
            self.resize(state, prefix)
        super()._load_from_state_dict(state, prefix, *args)


def queue_job(length: int, kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Queue(length, kind))


@pytest.mark.parametrize("source", ["save", "export", "torch"])
@pytest.mark.parametrize("kind", ["hook", "override"])
def test_a_buffer_that_its_module_resizes_is_loaded(kind: str, source: str, tmp_path: Path) -> None:
    saved, live = queue_job(7, kind), queue_job(1, kind)
    path = tmp_path / "saved"
    if source == "torch":
        torch.save(saved.state_dict(), path)
    else:
        (sx.save_checkpoint if source == "save" else sx.export_checkpoint)(saved, path)
    report = sx.load_checkpoint(live, path)
    assert (report.missing, report.unexpected) == ((), ())
    for name, tensor in saved.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor), name


def test_a_buffer_of_another_shape_that_nothing_resizes_is_refused_before_a_change(tmp_path: Path) -> None:
    saved = queue_job(7, "override")
    sx.save_checkpoint({"model": saved}, tmp_path / "saved")
    for live in (queue_job(1, "none"), queue_job(1, "override")):
        if live[1].kind == "override":
            live[1].scale = nn.Parameter(torch.ones(3))
        name = "model.1.items" if live[1].kind == "none" else "model.1.scale"
        before = {key: value.clone() for key, value in live.state_dict().items()}
        with pytest.raises(errors.InvalidArgumentError, match="shape") as raised:
            sx.load_checkpoint({"model": live}, tmp_path / "saved")
        assert raised.value.name == name
        assert all(torch.equal(live.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    "observer", ["PerChannelMinMaxObserver", "MovingAveragePerChannelMinMaxObserver", "HistogramObserver"]
)
def test_observers_of_quantisation_are_loaded_by_their_restarted_job(observer: str, tmp_path: Path) -> None:
    import torch.ao.quantization as quantization

    kind = getattr(quantization, observer)
    saved, live = nn.Sequential(nn.Linear(3, 4), kind()), nn.Sequential(nn.Linear(3, 4), kind())
    saved(torch.randn(5, 3))
    sx.save_checkpoint({"model": saved, "step": 1}, tmp_path / "saved")
    sx.load_checkpoint({"model": live, "step": 0}, tmp_path / "saved")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor), name


def test_fake_quantisation_is_loaded_by_its_restarted_job(tmp_path: Path) -> None:
    import torch.ao.quantization as quantization

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4),
            quantization.FakeQuantize(
                quantization.MovingAveragePerChannelMinMaxObserver,
                quant_min=-128,
                quant_max=127,
                dtype=torch.qint8,
                qscheme=torch.per_channel_symmetric,
                ch_axis=1,
            ),
        )

    saved, live = make(), make()
    inputs = torch.randn(5, 3)
    saved(inputs)
    sx.save_checkpoint({"model": saved}, tmp_path / "saved")
    sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert torch.equal(live.eval()(inputs), saved.eval()(inputs))


class WithExtra(nn.Linear):
    """A layer whose extra state is a tensor of any length, as TransformerEngine's."""

    def __init__(self, length: int) -> None:
        super().__init__(2, 2)
        self.extra = torch.arange(length, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state.clone()


@pytest.mark.parametrize("source", ["save", "torch"])
@pytest.mark.parametrize("lengths", [(7, 0), (0, 7), (7, 3)])
def test_extra_state_of_another_length_goes_to_its_module(
    lengths: tuple[int, int], source: str, tmp_path: Path
) -> None:
    saved, live = (nn.Sequential(WithExtra(length)) for length in lengths)
    path = tmp_path / "saved"
    torch.save(saved.state_dict(), path) if source == "torch" else sx.save_checkpoint(saved, path)
    sx.load_checkpoint(live, path)
    assert torch.equal(live[0].extra, saved[0].extra)
    assert torch.equal(live[0].weight, saved[0].weight)


def test_extra_state_of_another_length_on_each_rank_is_restored_to_it(tmp_path: Path) -> None:
    path = saved_by(2, lambda: {"model": WithExtra(3 + sx.get_rank()).requires_grad_(False)}, tmp_path / "saved")
    read = lambda state: len(state["model"].extra)  # noqa: E731
    options = {"exclude": ["model.weight", "model.bias"]}
    assert loaded_by(2, lambda: {"model": WithExtra(0)}, path, read, **options) == [3, 4]
    (error,) = loaded_by(1, lambda: {"model": WithExtra(0)}, path, read, **options)
    assert isinstance(error, errors.ReplicaError)


class RowMeans(torch.optim.SGD):
    """An optimizer that keeps one plain number for each row of a parameter that this rank has."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            self.state[parameter]["rows"] = local.square().mean(1)


def row_job(*, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)
    if sharded:
        fully_shard(model)
    return {"model": model, "optimizer": RowMeans(model.parameters(), lr=0.1)}


def loads_rows(path: str) -> list[str]:
    state = row_job(sharded=True)
    with pytest.raises(errors.ReplicaError) as caught:
        sx.load_checkpoint(state, path)
    sx.load_checkpoint(state, path, exclude=str(caught.value.name))
    return [str(caught.value.name), str(len(state["optimizer"].state[state["model"].weight]))]


@pytest.mark.parametrize("form", ["save", "torch"])
def test_rows_of_one_rank_are_not_those_of_a_part(form: str, tmp_path: Path) -> None:
    """A save of one rank does not show that the parameter would be sharded at the load."""
    state = row_job(sharded=False)
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    path = tmp_path / ("save" if form == "save" else "state.pt")
    if form == "save":
        sx.save_checkpoint(state, path)
    else:
        torch.save({name: value.state_dict() for name, value in state.items()}, path)
    for name, count in run_ranks(loads_rows, 2, backend="gloo", args=(str(path),)):
        assert name.startswith("optimizer.state.")
        assert count == "0"
    again = row_job(sharded=False)
    sx.load_checkpoint(again, path)
    assert again["optimizer"].state[again["model"].weight]["rows"].shape == (4,)
