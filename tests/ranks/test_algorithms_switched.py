"""Algorithms while a training goes on: a switch keeps the state, a module stays what it wraps, a wrong argument."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, loss_of, net, sgd, train, weights
from torch import nn

import statexchange as sx
from statexchange.errors import InvalidArgumentError, MismatchError
from statexchange.testing import run_ranks
from statexchange.train.algorithms import (
    Decentralized,
    GradientAllReduce,
    QuantizedAllReduce,
    ScatterGatherAllReduce,
    as_algorithm,
)
from statexchange.train.module import DistributedModule, data_parallel

# Switching between algorithms


def test_switching_through_all_algorithms_keeps_adams_state() -> None:
    def work() -> dict[str, Any]:
        comm = sx.get_communicator()
        module = net(comm.rank)
        module.register_buffer("seen", torch.tensor(10 * comm.rank))
        module.register_buffer("mean", torch.tensor(float(comm.rank)))
        adam = torch.optim.Adam(module.parameters(), lr=0.01)
        wrapped, optimizer = data_parallel(module, adam, GradientAllReduce())
        reached: list[Any] = [(weights(module), module.mean.item(), module.seen.item())]
        module.mean += comm.rank
        apart = []
        begin = 0
        for name in ("quantize", Decentralized("shift_one", 2), "sg-allreduce", "allreduce"):
            train(wrapped, optimizer, comm.rank, range(begin, begin + 4))
            begin += 4
            before = {key: value.clone() for key, value in adam.state[module[0].weight].items()}
            apart.append([before["exp_avg"].tolist(), weights(module)])
            assert wrapped.switch_to(name) is wrapped
            state = adam.state[module[0].weight]
            gathered = comm.all_gather(before["exp_avg"])
            expected = sum(gathered) / comm.world_size if name == "sg-allreduce" else gathered[comm.rank]
            torch.testing.assert_close(state["exp_avg"], expected)
            assert state["step"].item() == begin
            reached.append((weights(module), module.mean.item(), module.seen.item()))
        train(wrapped, optimizer, comm.rank, range(begin, begin + 4))
        exact = adam.state[module[0].weight]["exp_avg_sq"].tolist()
        return {"reached": reached, "apart": apart, "end": [weights(module), exact], "step": state["step"].item()}

    results = run_ranks(work, 3)
    first = results[0]
    for result in results:
        assert result["reached"] == first["reached"]
        assert result["end"] == first["end"]
        assert result["step"] == 20
    assert [first["reached"][i][1:] for i in (0, 1)] == [(0.0, 0), (1.0, 0)]
    assert [result["apart"][0] == first["apart"][0] for result in results] == [True] * 3
    assert [result["apart"][1] == first["apart"][1] for result in results] == [True] * 3
    assert len({str(result["apart"][2]) for result in results}) == 3, "weights drift apart in between"


def test_two_models_share_one_algorithm_and_a_part_of_the_ranks_trains() -> None:
    def work() -> list[Any] | None:
        rank = sx.get_rank()
        algorithm = QuantizedAllReduce(error_feedback=True)
        alone = net(rank)
        if rank == 2:
            return None
        comm = sx.get_communicator().new_group([0, 1])
        wrapped, optimizer = data_parallel(alone, sgd(alone), algorithm, comm)
        train(wrapped, optimizer, rank, range(3))
        one, two = net(rank), net(rank)
        pairs = [data_parallel(module, sgd(module), algorithm, comm) for module in (one, two)]
        for step in range(3):
            for wrapped, optimizer in pairs:
                train(wrapped, optimizer, rank, [step])
        return [weights(module) for module in (alone, one, two)]

    results = run_ranks(work, 3)
    assert results[0] == results[1]
    assert results[0][0] == results[0][1] == results[0][2]


def test_state_that_not_all_ranks_have_cannot_be_averaged() -> None:
    def work() -> bool:
        rank = sx.get_rank()
        module = net()
        wrapped, optimizer = data_parallel(module, torch.optim.Adam(module.parameters()), "decentralize")
        loss = loss_of(wrapped, rank, 0) if rank else wrapped.get_parameter("0.weight").sum()
        loss.backward()
        optimizer.step()
        with pytest.raises(MismatchError, match="2/bias/exp_avg"):
            wrapped.switch_to("allreduce")
        train(wrapped, optimizer, rank, range(2))
        wrapped.switch_to("allreduce")
        train(wrapped, optimizer, rank, range(2))
        return True

    assert all(run_ranks(work, 2))


def test_the_first_step_after_a_switch_communicates() -> None:
    def work() -> list[Any]:
        rank = sx.get_rank()
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module))
        train(wrapped, optimizer, rank, range(3))
        wrapped.switch_to(Decentralized(interval=2))
        for step in range(2):
            with torch.no_grad():
                module[0].weight.fill_(rank)
            optimizer.zero_grad()
            optimizer.step()
            assert (module[0].weight == (rank if step else 0.5)).all()
        return weights(module)[1:]

    one, two = run_ranks(work, 2)
    assert one == two


def test_a_switch_equals_a_fresh_start_with_the_same_state() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        module, other = net(), net()
        wrapped, optimizer = data_parallel(module, sgd(module), "decentralize")
        train(wrapped, optimizer, comm.rank, range(3))
        wrapped.switch_to("allreduce")
        other.load_state_dict(module.state_dict())
        fresh, its = data_parallel(other, sgd(other))
        train(wrapped, optimizer, comm.rank, range(3, 6))
        train(fresh, its, comm.rank, range(3, 6))
        return weights(module) == weights(other)

    assert all(run_ranks(work, 2))


def test_schedulers_clipping_and_averages_after_backward_work_with_every_algorithm() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        module = net()
        wrapped, optimizer = data_parallel(module, torch.optim.AdamW(module.parameters()), "sg-allreduce")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for name in ("quantize", "decentralize", "allreduce"):
            loss_of(wrapped, comm.rank, 0).backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            if wrapped.algorithm.bucket_type == "gradient":
                gathered = comm.all_gather(module[0].weight.grad)
                assert all(torch.equal(grad, gathered[0]) for grad in gathered)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            wrapped.switch_to(name)
        return optimizer.param_groups[0]["lr"] == 1e-3 / 8 and isinstance(wrapped.algorithm, GradientAllReduce)

    assert all(run_ranks(work, 2))


def closure(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(module, rank, 0)
    loss.backward()
    return loss


def test_gradients_of_a_closure_and_accumulated_ones_are_averaged() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        found = []
        for algorithm in ("sg-allreduce", "decentralize"):
            module = net()
            lbfgs = torch.optim.LBFGS(module.parameters(), max_iter=2)
            wrapped, optimizer = data_parallel(module, lbfgs, algorithm)

            optimizer.step(functools.partial(closure, wrapped, optimizer, comm.rank))
            found.append(weights(module))
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module))
        for step in range(4):
            with torch.enable_grad() if step % 2 else optimizer.no_sync():
                loss_of(wrapped, comm.rank, step).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return [*found, weights(module)]

    one, two = run_ranks(work, 2)
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert one[2] == two[2]


def test_after_a_join_ranks_that_had_unequal_data_have_equal_weights() -> None:
    def work() -> list[Any]:
        rank = sx.get_rank()
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module), Decentralized("shift_one"))
        with optimizer.join():
            train(wrapped, optimizer, rank, range(2 + rank))
        return weights(module)

    results = run_ranks(work, 3)
    assert results[0] == results[1] == results[2]


# The module


def test_a_module_behaves_like_the_module_that_it_wraps() -> None:
    module = net()
    module.note = "mine"
    module.register_buffer("seen", torch.tensor(3))
    wrapped = DistributedModule(module)
    assert wrapped.unwrap() is module
    assert wrapped.note == "mine"
    assert torch.equal(wrapped(batch(0, 0)[0]), module(batch(0, 0)[0]))
    assert list(wrapped.state_dict()) == list(module.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == ["seen"]
    state = {name: torch.full_like(tensor, 2) for name, tensor in wrapped.state_dict().items()}
    assert str(wrapped.load_state_dict(state)) == "<All keys matched successfully>"
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert not wrapped.eval().module.training
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    with pytest.raises(InvalidArgumentError, match="data_parallel"):
        wrapped.switch_to("quantize")


def test_a_copy_is_independent_and_not_averaged() -> None:
    def work() -> None:
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module))
        train(wrapped, optimizer, sx.get_rank(), range(1))
        copied = copy.deepcopy(wrapped)
        assert isinstance(copied, DistributedModule)
        before = weights(copied)
        train(wrapped, optimizer, sx.get_rank(), range(1, 3))
        assert weights(copied) == before != weights(wrapped)

    run_ranks(work, 2)


def test_ignored_parameters_are_not_averaged() -> None:
    def work() -> list[Any]:
        rank = sx.get_rank()
        module = net(rank)
        module.register_buffer("mine", torch.tensor(float(rank)))
        module._ddp_params_and_buffers_to_ignore = ["4.weight", "mine"]
        own = module[4].weight.tolist()
        wrapped, optimizer = data_parallel(module, sgd(module))
        assert module[4].weight.tolist() == own
        train(wrapped, optimizer, rank, range(2))
        wrapped.switch_to(Decentralized())
        train(wrapped, optimizer, rank, range(2))
        assert module[4].weight.tolist() != own
        assert module.mine.item() == rank
        wrapped.switch_to("allreduce")
        return [weights(module)[:3], module[4].weight.tolist()]

    one, two = run_ranks(work, 2)
    assert one[0] == two[0]
    assert one[1] != two[1]


# Refusals


def test_an_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'bytegrad'.*quantize"):
        as_algorithm("bytegrad")
    with pytest.raises(ValueError, match=r"'some'.*shift_one"):
        Decentralized("some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="interval"):
        Decentralized(interval=0)
    names = ("allreduce", "sg-allreduce", "quantize", "decentralize")
    kinds = [GradientAllReduce, ScatterGatherAllReduce, QuantizedAllReduce, Decentralized]
    assert [type(as_algorithm(name)) for name in names] == kinds
    assert [as_algorithm(name).hierarchical for name in names] == [None] * 4


# Calls on a rank with a module that is wrapped already, the error, and its text
WRONG: dict[str, tuple[Callable[[int, DistributedModule], Any], type[Exception], str]] = {
    "an unknown name on one rank": (
        lambda rank, m: m.switch_to("nothing" if rank else "quantize"),
        InvalidArgumentError,
        "'nothing'; known",
    ),
    "different algorithms": (
        lambda rank, m: m.switch_to(["allreduce", "quantize"][rank]),
        MismatchError,
        "algorithm=Gradient.*algorithm=Quantized",
    ),
    "different options": (lambda rank, m: m.switch_to(Decentralized(interval=1 + rank)), MismatchError, "interval=2"),
    "an optimizer of another module": (
        lambda rank, m: data_parallel(net(), sgd(net())),
        InvalidArgumentError,
        "does not have",
    ),
    "different shapes": (
        lambda rank, m: data_parallel(shaped(rank), sgd(shaped(rank))),
        MismatchError,
        r"\[3\].*\[4\].*'0\.bias', rank 1",
    ),
    "a module that is wrapped": (
        lambda rank, m: data_parallel(m.unwrap(), sgd(m)),
        InvalidArgumentError,
        r"another reducer.*0\.weight",
    ),
    "a weight for averages of weights": (lambda rank, m: weighted("decentralize"), InvalidArgumentError, "weight="),
    "a switch to averages of weights, with a weight": (
        lambda rank, m: weighted("allreduce").switch_to("decentralize"),
        InvalidArgumentError,
        "weight=",
    ),
    "scale": (
        lambda rank, m: data_parallel(net(), sgd(net()), scale=2.0),
        InvalidArgumentError,
        "scale is set",
    ),
    "tune_every": (
        lambda rank, m: data_parallel(net(), sgd(net()), tune_every=0),
        InvalidArgumentError,
        "tune_every",
    ),
}


def shaped(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3 + rank))


def weighted(algorithm: str) -> DistributedModule:
    module = net()
    return data_parallel(module, sgd(module), algorithm, weight=lambda: 1.0)[0]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_an_error_on_all_ranks(case: str) -> None:
    act, kind, message = WRONG[case]

    def work() -> bool:
        rank = sx.get_rank()
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module))
        with pytest.raises(kind, match=message):
            act(rank, wrapped)
        train(wrapped, optimizer, rank, range(2))
        return True

    assert all(run_ranks(work, 2))


def test_a_step_inside_no_sync_is_refused() -> None:
    def work() -> bool:
        module = net()
        _, optimizer = data_parallel(module, sgd(module), Decentralized(interval=2))
        for _ in range(2):
            with optimizer.no_sync(), pytest.raises(InvalidArgumentError, match="no_sync"):
                optimizer.step()
            optimizer.step()
        return True

    assert all(run_ranks(work, 2))
