"""Whose state it is: what belongs to a rank, or to a class of optimizers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stored import json_header, write_with_header
from whose_state import accelerated, job, loaded_by, saved_by, twice, write

import statexchange as sx
from statexchange import errors

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
