"""synchronize: the states of optimizers, schedulers and scalers become root's."""

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from synchronized_state import (
    OPTIMIZERS,
    Mode,
    assert_equal_state,
    raised_on_all,
    rank_and_size,
    sgd,
    train_step,
    trained,
)
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train.synchronize import synchronize


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [(3, 0), (0, 3), (3, 2), (0, 0)], ids=["resumed root", "fresh root", "both", "none"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_gets_roots_state_and_continues_equally(kind: str, steps: tuple[int, int]) -> None:
    rank = rank_and_size()[0]
    model, optimizer = trained(kind, rank, steps[rank])
    groups, state = list(optimizer.param_groups), dict(optimizer.state)
    assert synchronize([model, optimizer]) == [model, optimizer]
    root_model, root_optimizer = trained(kind, 0, steps[0])
    assert_equal_state(optimizer, root_optimizer)
    assert all(group is own for group, own in zip(optimizer.param_groups, groups, strict=True))
    assert all(optimizer.state[key] is state[key] for key in optimizer.state.keys() & state.keys())
    for one, two in ((model, optimizer), (root_model, root_optimizer)):
        train_step(one, two, torch.ones(4, 3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), root_model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_state_tensors_of_the_same_shape_stay_the_same_objects() -> None:
    _, optimizer = trained("adam", rank_and_size()[0], 1)
    before = [tensor for state in optimizer.state.values() for tensor in state.values()]
    synchronize(optimizer)
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(one is two for one, two in zip(before, after, strict=True))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "rprop"])
def test_after_fifty_different_steps_all_ranks_equal_rank_0(kind: str) -> None:
    model, optimizer = trained(kind, rank_and_size()[0], 50)
    synchronize({"model": model, "optimizer": optimizer})
    assert_equal_state(optimizer, trained(kind, 0, 50)[1])


@pytest.mark.ranks(2)
def test_the_nested_state_of_lbfgs_is_synchronized() -> None:
    rank = rank_and_size()[0]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    if rank == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.arange(6.0).reshape(2, 3)) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    synchronize(optimizer)
    found = sx.get_communicator().all_gather_object(str(optimizer.state_dict()))
    assert found[0] == found[1]
    assert len(optimizer.state[model.weight]["old_dirs"]) > 1


@pytest.mark.ranks(2)
def test_optimizer_state_of_any_nesting_becomes_that_of_root() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    shared = torch.arange(3.0)
    if rank_and_size()[0] == 0:
        odd = {1: (shared, [shared, None, np.float32(0.5)]), "array": np.arange(3), "seen": Mode.FAST, "nan": 1j}
        optimizer.state[parameter] = {"odd": odd, "step": torch.tensor(3), "empty": torch.empty(0)}
        optimizer.state["all"] = {"count": 7}
    else:
        optimizer.state[parameter] = {"seen": Mode.SLOW, "step": 1}
    synchronize(optimizer)
    state = optimizer.state[parameter]
    assert state["odd"][1][0] is state["odd"][1][1][0]
    assert state["odd"][1][0].tolist() == [0, 1, 2]
    assert state["odd"][1][1][1:] == [None, 0.5]
    assert type(state["odd"][1][1][2]) is np.float32
    assert state["odd"]["array"].tolist() == [0, 1, 2]
    assert state["odd"]["seen"] is Mode.FAST
    assert state["odd"]["nan"] == 1j
    assert state["step"] == 3
    assert optimizer.state["all"] == {"count": 7}


@pytest.mark.ranks(2)
def test_a_tensor_that_two_parameters_states_share_is_not_filled_twice() -> None:
    first, second = parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    shared = torch.zeros(2)
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["count"] = shared if rank_and_size()[0] else torch.full((2,), float(number))
    synchronize(optimizer)
    assert optimizer.state[first]["count"].tolist() == [0, 0]
    assert optimizer.state[second]["count"].tolist() == [1, 1]


def test_state_of_a_type_that_a_rank_does_not_know_is_an_error_on_all() -> None:
    def body() -> None:
        optimizer = sgd((1,))
        if rank_and_size()[0] == 0:
            optimizer.param_groups[0]["mode"] = Mode.FAST
        synchronize({"x": optimizer})

    errors = raised_on_all(body)
    assert "synchronized_state.Mode, which this rank does not know: give it to register_config" in str(errors[0])
    assert [error.name for error in errors] == ["x", "x"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "place", [lambda optimizer: optimizer, lambda optimizer: {"all": [optimizer]}], ids=["", "all[0]"]
)
def test_new_state_of_an_optimizer_has_the_strides_of_its_parameter(place: Any) -> None:
    rank, _ = rank_and_size()
    image = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(image)]
    optimizer = torch.optim.Adam(parameters)
    if rank == 0:
        torch.stack([p.sum() for p in parameters]).sum().backward()
        optimizer.step()
    synchronize(place(optimizer))
    assert optimizer.state[parameters[1]]["exp_avg"].stride() == image.stride()


def test_an_object_in_the_state_of_an_optimizer_is_not_replaced() -> None:
    def body(both: bool) -> bool:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        own = object()
        if both or rank_and_size()[0] == 0:
            optimizer.param_groups[0]["helper"] = own
        synchronize([optimizer])
        return optimizer.param_groups[0]["helper"] is own

    assert run_ranks(body, 2, args=(True,)) == [True, True]
    outcomes = run_ranks(body, 2, args=(False,), allow_failure=True)
    assert set(outcomes.errors.values()) == {"UnsupportedError"}
    assert "root has an object here" in outcomes.messages[0]
    assert "[0].param_groups[0].helper" in outcomes.messages[0]
    assert outcomes.messages[0] == outcomes.messages[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [deque, lambda items: set(items)], ids=["deque", "set"])
def test_tensors_in_a_set_or_deque_are_refused_by_name(make: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    held = make([torch.ones(2)])
    with pytest.raises(sx.errors.UnsupportedError, match=f"a {type(held).__name__}") as caught:
        synchronize({"a": held})
    assert caught.value.name == "a"
    with pytest.raises(sx.errors.UnsupportedError, match=f"a {type(held).__name__}") as caught:
        optimizer.param_groups[0]["held"] = held
        synchronize([optimizer])
    assert caught.value.name.endswith("param_groups[0].held")
    plain = make([rank_and_size()[0]])
    assert synchronize({"a": plain})["a"] is plain


@pytest.mark.ranks(2)
def test_schedulers_and_scalers_are_synchronized_as_objects_and_as_dicts() -> None:
    rank = rank_and_size()[0]
    _, optimizer = trained("adam", rank, 2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5] * 2),
        ],
        milestones=[2],
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    for _ in range(3 - rank):
        optimizer.step()
        scheduler.step()
    plateau.step(0.25 + rank)
    tree = {"scheduler": scheduler, "optimizer": optimizer, "plateau": plateau.state_dict(), "scaler": scaler}
    synchronize(tree)
    plateau.load_state_dict(tree["plateau"])
    assert (scheduler.last_epoch, scheduler._schedulers[1].last_epoch) == (3, 1)
    assert scaler.get_scale() == 256
    assert plateau.best == 0.25
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
