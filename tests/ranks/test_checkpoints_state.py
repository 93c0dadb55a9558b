"""The state of a training job beside model and optimizer, saved by `Checkpoints`: each rank's own on as many ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.testing import run_ranks


class Job:
    """A job with a state of every kind; `steps` draws random numbers and changes all of it."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.average = AveragedModel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.random = sx.integrations.RandomState()
        torch.manual_seed(100 + rank)
        np.random.seed(200 + rank)
        random.seed(300 + rank)

    def state(self) -> dict[str, Any]:
        return {**vars(self)}

    def steps(self, number: int) -> list[float]:
        """Train on the mean of what ranks draw from their generators; return what this one drew and sums of weights."""
        drawn = []
        comm = sx.get_communicator()
        for _ in range(number):
            own = [torch.rand(()).item(), float(np.random.rand()), random.random()]
            drawn.append(sum(own))
            inputs = comm.all_reduce(torch.full((2, 4), sum(own)), "avg")
            loss = self.scaler.scale(self.model(inputs).square().mean())
            loss.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)
        return [*drawn, *(p.sum().item() for p in [*self.average.parameters(), *self.model.parameters()])]


def goes_on(folder: str) -> None:
    """Check that a new job that has loaded the save draws and learns what the first one does after it."""
    rank = sx.get_rank()
    saves, first = sx.Checkpoints(folder), Job(rank)
    first.steps(3)
    saves.save(first.state(), 3)
    expected = first.steps(4)
    second = Job(rank + 10)
    report = saves.load(second.state())
    assert report is not None
    assert (report.missing, report.unexpected, report.step) == ((), (), 3)
    assert second.steps(4) == expected
    assert second.scaler.get_scale() == first.scaler.get_scale() > 2.0**8
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()


def loads_on_another_number(folder: str) -> None:
    """Check that the error names entry and option, `exclude` keeps the state, and replicas="root" loads rank 0's."""
    rank = sx.get_rank()
    saves, job = sx.Checkpoints(folder), Job(rank)
    before = job.random.state_dict()
    with pytest.raises(sx.errors.ReplicaError) as caught:
        saves.load(job.state())
    assert caught.value.name == "random"
    assert "exclude='random'" in str(caught.value)
    assert job.random.state_dict() == before
    assert job.scheduler.last_epoch == 0

    report = saves.load(job.state(), exclude="random.python")  # which leaves the whole object
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert job.scheduler.last_epoch == 3
    assert job.random.state_dict() == before

    saves.load(job.state(), replicas="root")
    drawn = [torch.rand(()).item(), random.random()]
    assert sx.get_communicator().all_gather_object(drawn) == [drawn] * sx.get_world_size()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_goes_on_with_each_ranks_own_random_numbers(ranks: int, tmp_path: Path) -> None:
    run_ranks(goes_on, 2, backend="gloo", args=(str(tmp_path / "saves"),))
    assert verify(tmp_path / "saves" / "step-000000003").findings == ()  # that random states differ is no finding
    run_ranks(loads_on_another_number, ranks, backend="gloo", args=(str(tmp_path / "saves"),))


def saves_after_evaluation(folder: str) -> None:
    """Save and load after an evaluation, which leaves the root module's parameters whole, unlike the optimizer's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(torch.ones(2, 4)).tolist()
    state = {"optimizer": optimizer, "model": model}
    saves = sx.Checkpoints(folder)
    saves.save(state, 1)
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].zero_()
        parameter.data.zero_()
    with torch.no_grad():
        model(torch.ones(2, 4))  # the load, too, finds whole parameters
    report = saves.load(state)
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert model(torch.ones(2, 4)).tolist() == expected
    assert all(held["exp_avg"].full_tensor().any() for held in optimizer.state.values())


def test_a_job_saves_and_loads_right_after_an_evaluation(tmp_path: Path) -> None:
    run_ranks(saves_after_evaluation, 2, backend="gloo", args=(str(tmp_path / "saves"),))
    with sx.open_checkpoint(tmp_path / "saves" / "step-000000001") as saved:
        assert {"optimizer.state.model.0.weight.exp_avg", "optimizer.state.model.1.bias.step"} <= set(saved)


def own_part(rank: int, ranks: int) -> Any:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sampler = torch.utils.data.DistributedSampler(range(40), ranks, rank, shuffle=True, seed=5)
    return loader(range(40), batch_size=2, sampler=sampler)


def reads_the_rest(folder: str, apart: int) -> None:
    """Check that a loaded loader goes on after the batches that this rank's had given, in the middle of an epoch."""
    comm = sx.get_communicator()
    first = own_part(comm.rank, comm.world_size)
    batches = iter(first)
    given = [next(batches).tolist() for _ in range(3 + apart * comm.rank)]
    sx.Checkpoints(folder).save({"loader": first, "step": 3}, 3)
    expected = [batch.tolist() for batch in batches]
    second = own_part(comm.rank, comm.world_size)
    sx.Checkpoints(folder).load({"loader": second, "step": 0})
    assert [batch.tolist() for batch in second] == expected
    assert len(given) + len(expected) == 10


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata calls
@pytest.mark.parametrize("apart", [0, 1], ids=["ranks at one batch", "ranks at different batches"])
def test_a_stateful_data_loader_goes_on_where_its_rank_was(apart: int, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    run_ranks(reads_the_rest, 2, backend="gloo", args=(str(tmp_path / "saves"), apart))
    alone = {"loader": own_part(0, 1), "step": 0}
    with pytest.raises(sx.errors.ReplicaError, match="2 ranks") as caught:
        sx.Checkpoints(tmp_path / "saves").load(alone)
    assert "exclude='loader'" in str(caught.value)
    sx.Checkpoints(tmp_path / "saves").load(alone, exclude="loader.*")
    assert (len(list(alone["loader"])), alone["step"]) == (20, 3)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata calls
def test_a_data_loader_in_a_list_or_of_a_derived_class_is_found(tmp_path: Path) -> None:
    base = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    derived = type("Derived", (base,), {})

    def state() -> dict[str, Any]:
        return {"loaders": [base(range(4)), derived(range(4))], "step": 0}

    run_ranks(lambda: sx.save_checkpoint(state(), tmp_path / "save"), 2)
    for others, found in (((), "0"), (["loaders.0"], "1")):
        with pytest.raises(sx.errors.ReplicaError, match=rf"exclude='loaders\.{found}'"):
            sx.load_checkpoint(state(), tmp_path / "save", exclude=others)
    sx.load_checkpoint(state(), tmp_path / "save", exclude="loaders")


@pytest.mark.parametrize("replicas", ["equal", "root"])
def test_plain_values_that_ranks_saved_differently_are_named(replicas: Any, tmp_path: Path) -> None:
    """Entries that only some ranks have, NaN, and what the options leave out are not named."""

    def saves() -> None:
        rank = sx.get_rank()
        own = {"seed": rank, "deep": {"list": [1, [rank]], "same": (1, float("nan"))}, f"stage{rank}": rank}
        sx.Checkpoints(tmp_path).save({"w": torch.ones(2), "own": own}, 1)

    run_ranks(saves, 2)
    live: dict[str, Any] = {"w": torch.zeros(2), "own": {}}
    if replicas == "equal":
        remedies = r"exclude=\['own.seed', 'own.deep.list'\].*replicas=\"root\""
        text = rf"'own.seed'.*{remedies}"
        with pytest.raises(sx.errors.ReplicaError, match=text):
            sx.Checkpoints(tmp_path).load(live)
        with pytest.raises(sx.errors.ReplicaError, match=r"values of 'own.deep.list': "):
            sx.Checkpoints(tmp_path).load(live, exclude="own.seed")
        sx.Checkpoints(tmp_path).load(live, exclude=["own.seed", "*.list"])
        assert live["own"] == {"deep": {"same": live["own"]["deep"]["same"]}, "stage0": 0, "stage1": 1}
        sx.Checkpoints(tmp_path).load(live, include="w")
    else:
        sx.Checkpoints(tmp_path).load(live, replicas=replicas)
        assert (live["own"]["seed"], live["own"]["deep"]["list"], live["own"]["stage1"]) == (0, [1, [0]], 1)
    assert live["w"].tolist() == [1.0, 1.0]
