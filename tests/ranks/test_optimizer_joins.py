"""DistributedOptimizer where ranks have unequal data, share modules or differ in parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_runs import Optimizer, batch, filled, loss_of, net, numbers, raised_on_both, state_of
from torch import nn

import statexchange as sx
from statexchange.errors import InvalidArgumentError, MismatchError
from statexchange.testing import run_ranks
from statexchange.train.optimizer import DistributedOptimizer


def tokens(rank: int, step: int) -> int:
    return (3, 1, 4, 1, 5, 9, 2, 6)[2 * step + rank]


def test_gradients_are_the_mean_over_all_tokens_of_all_ranks() -> None:
    """That is not the mean of the ranks' means."""

    def per_token(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return (module(numbers(tokens(rank, step), 4, seed=10 * rank + step)) ** 2).sum(1)

    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        count = [0]
        optimizer = DistributedOptimizer(inner, comm, weight=lambda: count[0], bucket_bytes=64)
        for step in range(4):
            optimizer.zero_grad()
            losses = per_token(module, comm.rank, step)
            count[0] = losses.numel()
            losses.mean().backward()
            optimizer.step()
        return state_of(module)

    module = net()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        plain.zero_grad()
        torch.cat([per_token(module, rank, step) for rank in range(2)]).mean().backward()
        plain.step()
    for found in run_ranks(work, 2):
        for a, b in zip(found, state_of(module), strict=True):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-12)


JOINS = [{}, {"bucket_bytes": 64, "overlap": True}, {"weight": lambda: 1.0}, {"overlap": False}]


def train_joined(optimizer: DistributedOptimizer, module: nn.Module, rank: int, steps: int, *after: Any) -> None:
    """Make `steps` steps inside `join`, with the calls `after` each backward."""
    with optimizer.join():
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(module, rank, step).backward()
            for act in after:
                act()
            optimizer.step()


@pytest.mark.parametrize("settings", JOINS, ids=["plain", "overlap", "weight", "no overlap"])
@pytest.mark.parametrize("batches", [(2, 4, 3), (0, 3, 1), (2, 2, 2), (0, 0, 0)], ids=str)
def test_join_averages_over_the_ranks_that_still_have_data(batches: tuple[int, ...], settings: dict[str, Any]) -> None:
    """At the end all ranks have the same weights and state."""

    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=0.1), comm, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        after = [optimizer.finalize, lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.5)]
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        train_joined(optimizer, module, comm.rank, batches[comm.rank], *after)
        state = optimizer.state_dict()["state"]
        return [state_of(module), [[float(s["step"]), s["exp_avg"].tolist()] for s in state.values()]]

    module = net()
    plain = torch.optim.Adam(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for step in range(max(batches)):
        plain.zero_grad()
        active = [rank for rank in range(3) if batches[rank] > step]
        (sum(loss_of(module, rank, step) for rank in active) / len(active)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        plain.step()
        scheduler.step()
    first, *others = run_ranks(work, 3)
    assert others == [first] * 2
    for a, b in zip(first[0], state_of(module), strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-9, atol=1e-12)


def test_buffers_of_the_module_are_joined_too() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = filled(nn.Sequential(nn.Linear(4, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)))
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm, module=module)
        train_joined(optimizer, module, comm.rank, 1 + 2 * comm.rank)
        return state_of(module)

    one, other = run_ranks(work, 2)
    assert one == other
    assert one[-1] == 3


def test_join_can_be_entered_again() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm)
        for epoch in range(3):
            train_joined(optimizer, module, comm.rank, 1 + (comm.rank + epoch) % 2)
        return state_of(module)

    one, other = run_ranks(work, 2)
    assert one == other


# Several optimizers


def test_gradients_that_a_generators_backward_makes_for_the_discriminator_do_not_count() -> None:
    """The generator's backward also makes gradients for the discriminator, which must not count."""

    def train(wrap: Callable[[Optimizer], Any], ranks: list[int], no_sync: bool) -> list[Any]:
        generator = filled(nn.Linear(4, 3, dtype=torch.float64))
        discriminator = filled(nn.Linear(3, 1, dtype=torch.float64))
        for_g = wrap(torch.optim.Adam(generator.parameters(), lr=0.05))
        for_d = wrap(torch.optim.Adam(discriminator.parameters(), lr=0.05))

        def mean(loss: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
            return torch.stack([loss(batch(rank, step)) for rank in ranks]).mean()

        for step in range(3):
            for_d.zero_grad()
            mean(lambda x: (discriminator(generator(x).detach()) ** 2).mean(), step).backward()
            for_d.step()
            for_g.zero_grad()
            with for_d.no_sync() if no_sync else torch.enable_grad():
                mean(lambda x: -discriminator(generator(x)).mean(), step).backward()
            for_g.step()
        return [state_of(generator), state_of(discriminator)]

    def work() -> list[Any]:
        comm = sx.get_communicator()
        return [train(lambda o: DistributedOptimizer(o, comm), [comm.rank], no_sync) for no_sync in (False, True)]

    expected = train(lambda o: o, [0, 1], no_sync=False)
    one, other = run_ranks(work, 2)
    assert one == other
    for found in one:
        for a, b in zip(sum(found, []), sum(expected, []), strict=True):  # noqa: RUF017 (four lists)
            assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-9)


def test_optimizers_that_share_a_module_and_a_backward_keep_ranks_equal() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizers = [
            DistributedOptimizer(torch.optim.SGD(module[0].parameters(), lr=0.1), comm, module=module),
            DistributedOptimizer(torch.optim.Adam(module[2].parameters(), lr=0.1), comm, module=module),
        ]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(module, comm.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        return state_of(module)

    one, other = run_ranks(work, 2)
    assert one == other


def test_an_optimizer_over_foreign_parameters_is_named_on_all_ranks() -> None:
    def with_module() -> None:
        module = net()
        foreign = [*module.parameters(), nn.Parameter(torch.ones(7))] if sx.get_rank() else module.parameters()
        DistributedOptimizer(torch.optim.SGD(foreign, lr=0.1), module=module)

    error = raised_on_both(with_module, InvalidArgumentError)
    assert error.name == "param_groups[0]['params'][4]"
    assert "float32[7]" in str(error)


def test_a_parameter_whose_shape_differs_is_named_by_the_names_of_the_module() -> None:
    def work() -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + sx.get_rank()))
        DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module=module)

    error = raised_on_both(work, MismatchError)
    assert (error.name, error.rank) == ("1.weight", 1)
