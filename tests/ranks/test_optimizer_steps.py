"""DistributedOptimizer: accumulation, missing gradients, failed backwards: each gradient counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_runs import batch, grad_of, loss_of, net, state_of
from torch import nn

import statexchange as sx
from statexchange.errors import InvalidArgumentError, MismatchError
from statexchange.testing import run_ranks
from statexchange.train.optimizer import DistributedOptimizer


def count_averages(optimizer: DistributedOptimizer) -> list[int]:
    """Return a list that counts how often ranks average from now on."""
    count: list[int] = []
    original = optimizer.reducer.reduce

    def counting(**kwargs: Any) -> list[int]:
        count.append(1)
        return original(**kwargs)

    optimizer.reducer.reduce = counting  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 64, "overlap": True}, {"overlap": False}], ids=str)
def test_accumulation_averages_once_and_adds_everything(settings: dict[str, Any]) -> None:
    def work() -> tuple[bool, int]:
        comm = sx.get_communicator()
        module, reference = net(), net()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, comm, **settings)
        count = count_averages(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            for micro in range(3):
                with optimizer.no_sync() if micro < 2 else torch.enable_grad():
                    loss_of(module, comm.rank, 10 * step + micro).backward()
                for rank in range(comm.world_size):
                    (loss_of(reference, rank, 10 * step + micro) / comm.world_size).backward()
            optimizer.step()
            plain.step()
        pairs = zip(module.parameters(), reference.parameters(), strict=True)
        return all(torch.allclose(a, b, rtol=1e-12) for a, b in pairs), len(count)

    assert run_ranks(work, 2) == [(True, 3)] * 2


def test_an_unfinished_accumulation_is_averaged_by_step() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm)
        with optimizer.no_sync():
            for _ in range(2):
                loss_of(module, comm.rank, 0).backward()
        optimizer.step()
        return [state_of(module), grad_of(module)]

    one, other = run_ranks(work, 2)
    assert one == other


def test_a_gradient_of_an_earlier_micro_step_alone_is_not_lost() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1), comm, bucket_bytes=1, overlap=True)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                params[comm.rank].sum().backward()
            params[2].sum().backward()
            optimizer.finalize()
            found.append([p.grad.item() for p in params])
            optimizer.step()
        return found

    assert run_ranks(work, 2) == [[[0.5, 0.5, 1.0]] * 3] * 2


def test_several_backwards_in_a_step_accumulate() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3)]
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1), comm, bucket_bytes=1, overlap=True)
        found = []
        for set_to_none in (True, False, True):
            optimizer.zero_grad(set_to_none)
            (params[0] + params[1]).sum().backward()
            (params[1] * (1 + comm.rank)).sum().backward()
            params[2].sum().backward()
            found.append([p.grad.tolist() for p in params])
            optimizer.step()
        return found

    assert run_ranks(work, 2) == [[[[1.0, 1.0], [2.5, 2.5], [1.0, 1.0]]] * 3] * 2


def test_no_sync_refuses_finalize_and_step() -> None:
    module = net()
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), sx.get_communicator())
    with optimizer.no_sync():
        loss_of(module, 0, 0).backward()
        with pytest.raises(InvalidArgumentError, match="inside no_sync"):
            optimizer.step()
        with pytest.raises(InvalidArgumentError, match="inside no_sync"):
            optimizer.finalize()
    optimizer.step()


# Ranks that differ


def test_a_gradient_that_some_ranks_lack_counts_as_zeros_and_one_that_all_lack_is_none() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
        optimizer = DistributedOptimizer(torch.optim.Adam(params, lr=0.5), comm)
        values = []
        for used in ([0, 1, 2], [0, 1] if comm.rank else [0]):
            optimizer.zero_grad(set_to_none=False)
            sum(params[i].sum() for i in used).backward()
            optimizer.step()
            values.append([p.item() for p in params])
        return [values, [None if p.grad is None else p.grad.item() for p in params]]

    for values, gradients in run_ranks(work, 2):
        assert gradients == [1.0, 0.5, None]
        assert values[0][2] == values[1][2]
        assert values[0][1] != values[1][1]


def test_a_rank_without_gradients_steps_with_the_others() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=0.1), comm)
        for step in range(4):
            optimizer.zero_grad()
            if step % 2 != comm.rank:
                loss_of(module, comm.rank, step).backward()
            optimizer.step()
        optimizer.step()
        return state_of(module)

    one, other = run_ranks(work, 2)
    assert one == other


def test_nan_on_one_rank_is_nan_on_all() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm)
        (loss_of(module, 0, 0) * (float("nan") if comm.rank else 1.0)).backward()
        optimizer.step()
        return all(bool(p.isnan().all()) for p in module.parameters())

    assert all(run_ranks(work, 2))


def test_ranks_that_step_unequally_often_raise() -> None:
    def work() -> str:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm)
        loss_of(module, comm.rank, 0).backward()
        if comm.rank:
            optimizer.step()
        with pytest.raises(MismatchError, match=r"\b0 .*step 0, .*\b1 .*step 1") as caught:
            loss_of(module, comm.rank, 1).backward()
        return str(caught.value)

    one, other = run_ranks(work, 2)
    assert one == other


def test_after_torchs_error_of_a_second_backward_training_continues() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1), comm, bucket_bytes=64, overlap=True
        )
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(module, comm.rank, step)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            optimizer.step()
        return state_of(module)

    one, other = run_ranks(work, 2)
    assert one == other


class Fails(torch.autograd.Function):
    """The identity function with a backward that fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the middle")


@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 64, "overlap": True}], ids=str)
def test_zero_grad_discards_a_failed_backward(settings: dict[str, Any]) -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm, **settings)
        for step in range(6):
            optimizer.zero_grad()
            if step % 3 == 1:
                with pytest.raises(ZeroDivisionError):
                    module[2](Fails.apply(module[1](module[0](batch(comm.rank, step))))).sum().backward()
                continue
            loss_of(module, comm.rank, step).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        return state_of(module)

    module = net()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in (0, 2, 3, 5):
        plain.zero_grad()
        (sum(loss_of(module, rank, step) for rank in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        plain.step()
    for found in run_ranks(work, 2):
        for a, b in zip(found, state_of(module), strict=True):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-9)
