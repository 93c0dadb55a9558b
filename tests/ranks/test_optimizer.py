"""DistributedOptimizer equals one process and, but for the averages, a plain optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_runs import OPTIMIZERS, Optimizer, batch, filled, grad_of, loss_of, net, numbers, state_of
from torch import nn

import statexchange as sx
from statexchange.errors import MismatchError
from statexchange.testing import run_ranks
from statexchange.train.optimizer import DistributedOptimizer

# Equal to one process


@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 64, "overlap": True}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_equal_one_process_that_adds_in_their_order(world_size: int, name: str, settings: dict[str, Any]) -> None:
    """Bit for bit, for any numbers: the sum is computed in the order of ranks, then divided."""

    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(OPTIMIZERS[name](module.parameters()), comm, **settings)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(module, comm.rank, step).backward()
            optimizer.step()
        return state_of(module)

    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    for step in range(4):
        sums = [torch.zeros_like(p) for p in module.parameters()]
        for rank in range(world_size):
            module.zero_grad()
            loss_of(module, rank, step).backward()
            sums = [s + p.grad if rank else p.grad for s, p in zip(sums, module.parameters(), strict=True)]
        for p, s in zip(module.parameters(), sums, strict=True):
            p.grad = s / world_size
        optimizer.step()
    assert run_ranks(work, world_size) == [state_of(module)] * world_size


def whole_numbers(n: int, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * step + rank)
    return torch.randint(-3, 4, (n, 4), generator=generator).double()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_equal_one_process_on_the_concatenated_batch(world_size: int) -> None:
    """Bit for bit, with numbers whose sums are exact in any order."""

    def squares(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (module(x) ** 2).sum()

    def linear_of_ones() -> nn.Linear:
        module = nn.Linear(4, 2, dtype=torch.float64)
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        return module

    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = linear_of_ones()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=2**-8), comm, scale=1.0)
        for step in range(3):
            optimizer.zero_grad()
            squares(module, whole_numbers(8, comm.rank, step)).backward()
            optimizer.step()
        return state_of(module)

    module = linear_of_ones()
    optimizer = torch.optim.SGD(module.parameters(), lr=2**-8)
    for step in range(3):
        optimizer.zero_grad()
        squares(module, torch.cat([whole_numbers(8, rank, step) for rank in range(world_size)])).backward()
        optimizer.step()
    assert run_ranks(work, world_size) == [state_of(module)] * world_size


def test_adam_from_zeros_equals_the_plain_optimizer_as_in_lux() -> None:
    """The gradients are ones on average; state and hyperparameters are equal, too."""

    def run(wrap: Callable[[Optimizer], Optimizer], scale: float) -> tuple[list[Any], Optimizer]:
        params = [nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in "ab"]
        optimizer = wrap(torch.optim.Adam(params, lr=1e-3))
        for lr in (1e-3, 0.1):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            (torch.stack(params).sum() * scale).backward()
            optimizer.step()
        return [p.tolist() for p in params], optimizer

    def work() -> tuple[bool, bool]:
        comm = sx.get_communicator()
        plain, reference = run(lambda o: o, 1.0)
        found, optimizer = run(lambda o: DistributedOptimizer(o, comm), 2.0 * comm.rank)
        close = torch.allclose(torch.tensor(found), torch.tensor(plain), rtol=1e-5, atol=1e-5)
        states = [o.state_dict()["state"] for o in (optimizer, reference)]
        return close, str(states[0]) == str(states[1])

    assert run_ranks(work, 2) == [(True, True)] * 2


def test_baguas_net_is_bit_equal_on_all_ranks_after_ten_steps() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        layers = [nn.Linear(2, 10, bias=False), nn.Linear(10, 50), nn.Linear(50, 4, bias=False)]
        module = filled(nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.Softmax(dim=1)))
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.01), comm)
        for step in range(10):
            data = numbers(4, 2, seed=step + 50 * comm.rank, dtype=torch.float32)
            target = numbers(4, 4, seed=step + 50 * comm.rank + 25, dtype=torch.float32)
            optimizer.zero_grad()
            nn.functional.mse_loss(module(data), target).backward()
            optimizer.step()
        return state_of(module)

    first, *others = run_ranks(work, 4)
    assert others == [first] * 3


# The rest of an optimizer's interface


def unequal(rank: int) -> nn.Sequential:
    """Return a module whose parameters and buffers differ between ranks, as without a common seed."""
    module = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64))
    for value in module.state_dict().values():
        value.copy_(torch.full_like(value, rank + 1))
    return module


GIVEN: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "parameters": lambda module: {},
    "module": lambda module: {"module": module},
    "modules": lambda module: {"module": list(module.children())},
}


@pytest.mark.parametrize("given", GIVEN)
def test_ranks_begin_with_the_parameters_of_rank_0_as_with_ddp(given: str) -> None:
    def work() -> list[Any]:
        module = unequal(sx.get_rank())
        optimizer = DistributedOptimizer(OPTIMIZERS["Adam"](module.parameters()), **GIVEN[given](module))
        begin = state_of(module)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(module, sx.get_rank(), step).backward()
            optimizer.step()
        optimizer.close()
        return [begin, [parameter.tolist() for parameter in module.parameters()]]

    first, *others = run_ranks(work, 3)
    has_buffers = given.startswith("module")
    for begin, end in others:
        assert end == first[1]
        assert begin == first[0] if has_buffers else begin[:4] == first[0][:4]
    assert others[0][0] != first[0] or has_buffers  # without the module its buffers are not seen


def test_init_sync_false_leaves_parameters_as_they_are() -> None:
    def work() -> Any:
        module = unequal(sx.get_rank())
        DistributedOptimizer(OPTIMIZERS["SGD"](module.parameters()), module=module, init_sync=False).close()
        return module[0].bias.tolist()

    assert run_ranks(work, 2) == [[1.0] * 3, [2.0] * 3]


def test_what_cannot_be_sent_names_the_way_out() -> None:
    def job() -> str:
        module = net()
        module.register_buffer("sparse", torch.eye(3).to_sparse())
        with pytest.raises(sx.StateExchangeError) as caught:
            DistributedOptimizer(OPTIMIZERS["SGD"](module.parameters()), module=module)
        return str(caught.value)

    assert all("init_sync=False" in text for text in run_ranks(job, 2))


def test_ranks_that_differ_in_init_sync_raise() -> None:
    def work() -> Any:
        with pytest.raises(MismatchError, match="init_sync") as caught:
            DistributedOptimizer(OPTIMIZERS["SGD"](net().parameters()), init_sync=sx.get_rank() != 1)
        return caught.value.rank, caught.value.found

    assert run_ranks(work, 2)[0] == (1, "init_sync=False (rank 1)")


def test_lr_schedulers_set_the_same_rates_as_for_a_plain_optimizer() -> None:
    def lrs(wrap: Callable[[Optimizer], Optimizer]) -> list[Any]:
        found = []
        for make in (
            lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
            lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        ):
            module = net()
            optimizer = wrap(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
            scheduler = make(optimizer)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(module, 0, step).backward()
                optimizer.step()
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(1.0) if plateau else scheduler.step()
                found.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
            found.append(state_of(module))
        return found

    def work() -> bool:
        comm = sx.get_communicator()
        wrapped = DistributedOptimizer(torch.optim.SGD(net().parameters()), comm)
        assert isinstance(wrapped, torch.optim.Optimizer)
        return lrs(lambda o: DistributedOptimizer(o, comm)) == lrs(lambda o: o)

    assert run_ranks(work, 2) == [True] * 2


def test_the_state_dict_is_that_of_the_inner_optimizer() -> None:
    def work() -> list[bool]:
        comm = sx.get_communicator()
        plain_module, module = net(), net()
        plain = torch.optim.Adam(plain_module.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=0.3), comm)
        for step in range(3):
            for m, o in ((plain_module, plain), (module, optimizer)):
                o.zero_grad()
                loss_of(m, 0, step).backward()
                o.step()
            if not step:
                optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
                module.load_state_dict(plain_module.state_dict())
        states = [str(o.state_dict()) for o in (optimizer, optimizer.inner, plain)]
        return [states[0] == states[1], states[0] == states[2], optimizer.state is optimizer.inner.state]

    assert run_ranks(work, 2) == [[True] * 3] * 2


def test_step_hooks_run_and_attributes_are_those_of_the_inner_optimizer() -> None:
    module = net()
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), sx.get_communicator())
    log: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: log.append("before"))
    optimizer.register_step_post_hook(lambda *_: log.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: log.append("state"))
    loss_of(module, 0, 0).backward()
    optimizer.step()
    optimizer.state_dict()
    assert log == ["before", "after", "state"]
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert repr(optimizer).startswith("DistributedOptimizer")
    with pytest.raises(AttributeError, match="nothing"):
        _ = optimizer.nothing


def test_a_group_that_is_added_is_averaged_too() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        first, second = net(), net()
        optimizer = DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), comm)
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.2})
        for step in range(2):
            optimizer.zero_grad()
            (loss_of(first, comm.rank, step) + loss_of(second, comm.rank, step)).backward()
            optimizer.step()
        return [state_of(first), state_of(second), len(optimizer.param_groups)]

    one, other = run_ranks(work, 2)
    assert one == other
    assert one[2] == 2


@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_closures_get_averages_so_that_ranks_decide_alike(kind: str) -> None:
    def work() -> tuple[list[Any], float, int]:
        comm = sx.get_communicator()
        module = net()
        inner: Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if kind == "lbfgs":
            inner = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        optimizer = DistributedOptimizer(inner, comm)
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = loss_of(module, comm.rank, 0)
            loss.backward()
            return loss

        for _ in range(2):
            loss = optimizer.step(closure)
        return state_of(module), float(loss), calls

    one, other = run_ranks(work, 2)
    assert one == other


# Gradients between backward and step


@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 64, "overlap": True}, {"overlap": False}], ids=str)
def test_clipping_clips_the_average(settings: dict[str, Any], finalize: bool) -> None:
    def work() -> tuple[float, list[Any], list[Any]]:
        comm = sx.get_communicator()
        module = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm, **settings)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(module, comm.rank, step).backward()
            if finalize:
                optimizer.finalize()
                optimizer.finalize()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            clipped = grad_of(module)
            optimizer.step()
        return float(norm), clipped, grad_of(module)

    one, other = run_ranks(work, 2)
    assert one == other
    assert one[1] == one[2]
    assert one[0] > 1e-2


def test_a_grad_scaler_skips_the_same_step_on_all_ranks() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        module = net(torch.float32)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = (module(batch(comm.rank, step).float()) ** 2).mean()
            scaler.scale(loss * (float("inf") if step == 1 and comm.rank == 1 else 1.0)).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append([state_of(module), scaler.get_scale()])
        return found

    one, other = run_ranks(work, 2)
    assert one == other
    assert one[0][0] == one[1][0] != one[2][0]
    assert [scale for _, scale in one] == [4.0, 2.0, 2.0]


def test_a_fused_optimizer_with_a_grad_scaler_steps_with_unscaled_gradients() -> None:
    module = net(torch.float32)
    inner = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    optimizer = DistributedOptimizer(inner, sx.get_communicator())
    reference = net(torch.float32)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((module(batch(0, 0).float()) ** 2).mean()).backward()
    scaler.step(optimizer)
    (reference(batch(0, 0).float()) ** 2).mean().backward()
    plain.step()
    assert torch.allclose(module[0].weight, reference[0].weight)
