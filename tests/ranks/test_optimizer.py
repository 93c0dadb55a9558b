"""DistributedOptimizer equals one process, DDP and, but for the averages, a plain optimizer."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import statexchange as sx
from statexchange.errors import InvalidArgumentError, MismatchError, StateExchangeError, UnsupportedError
from statexchange.testing import run_ranks
from statexchange.train.averaging import average_gradients
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.ddp_hook import as_comm_hook
from statexchange.train.optimizer import DistributedOptimizer

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return random numbers without using torch's generator, which thread ranks share."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def filled(module: Any) -> Any:
    """Fill the parameters with the same values in every process and thread; return the module."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=i) / 2)
    return module


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype)))


def state_of(module: nn.Module) -> list[Any]:
    return [value.tolist() for value in module.state_dict().values()]


def grad_of(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]


def batch(rank: int, step: int) -> torch.Tensor:
    return numbers(5, 4, seed=100 * step + rank + 7)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return (module(batch(rank, step)) ** 2).mean()


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


# Refusals


def raised_on_both(work: Callable[[], Any], expected: type[Exception]) -> StateExchangeError:
    """Return the error that both ranks raise alike."""

    def caught() -> StateExchangeError:
        with pytest.raises(expected) as error:
            work()
        assert isinstance(error.value, StateExchangeError)
        return error.value

    errors: list[StateExchangeError] = run_ranks(caught, 2)
    assert str(errors[0]) == str(errors[1])
    return errors[0]


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


# average_gradients, and DDP


def test_average_gradients_averages_each_kind_of_gradient() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = {
            "both": nn.Parameter(torch.ones(2)),
            "half": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
            "one": nn.Parameter(torch.ones(2, dtype=torch.float64)),
            "none": nn.Parameter(torch.ones(2)),
            "table": nn.Parameter(torch.ones(3, 1)),
            "mixed": nn.Parameter(torch.ones(3, 1)),
        }
        (params["both"] * (1 + comm.rank)).sum().backward()
        (params["half"] * (1 + comm.rank)).sum().backward()
        if comm.rank:
            params["one"].sum().backward()
            nn.functional.embedding(torch.tensor([1, 1]), params["table"], sparse=True).sum().backward()
        rows = torch.tensor([comm.rank])
        nn.functional.embedding(rows, params["mixed"], sparse=bool(comm.rank)).sum().backward()
        average_gradients(params, comm)
        found = {name: None if p.grad is None else p.grad.to_dense().flatten().tolist() for name, p in params.items()}
        return [found, params["table"].grad.is_sparse]

    expected = {"both": [1.5, 1.5], "half": [1.5, 1.5], "one": [0.5, 0.5], "none": None}
    expected |= {"table": [0.0, 1.0, 0.0], "mixed": [0.5, 0.5, 0.0]}
    assert run_ranks(work, 2) == [[expected, False]] * 2


def test_average_gradients_names_a_parameter_that_differs_and_accepts_no_parameters() -> None:
    average_gradients(nn.ReLU())
    error = raised_on_both(lambda: average_gradients(nn.Linear(2 + sx.get_rank(), 2)), MismatchError)
    assert error.name == "weight"


def test_average_gradients_leaves_no_memory_to_the_garbage_collector() -> None:
    def work() -> list[bool]:
        module = nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        average_gradients(module)
        averages = [weakref.ref(parameter.grad) for parameter in module.parameters()]
        module.zero_grad()
        return [average() is None for average in averages]

    gc.disable()
    try:
        assert run_ranks(work, 2) == [[True, True]] * 2
    finally:
        gc.enable()


def small_net() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def ddp_with_our_hooks() -> list[bool]:
    comm = sx.get_communicator()
    found = []
    reference = small_net()
    for x in (0, 1):
        (small_loss(reference, x) / 2).backward()
    for hook_comm in (None, comm):
        module = small_net()
        ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4)
        ddp.register_comm_hook(None, as_comm_hook(hook_comm))
        for _ in range(2):
            module.zero_grad()
            small_loss(ddp, comm.rank).backward()
        pairs = zip(module.parameters(), reference.parameters(), strict=True)
        found.append(all(torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7) for a, b in pairs))
    return found


def small_loss(module: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return (module(numbers(5, 4, seed=7 * step + rank, dtype=torch.float32)) ** 2).mean()


def test_ddp_averages_by_the_hook_of_a_communicator() -> None:
    assert run_ranks(ddp_with_our_hooks, 2, backend="gloo", timeout_s=120) == [[True] * 2] * 2
    with pytest.raises(InvalidArgumentError, match="BucketReducer"):
        as_comm_hook(BucketReducer(nn.Linear(2, 2)))  # type: ignore[arg-type]


class EveryKindOfParameter(nn.Module):
    """Tied, frozen, unused and sometimes used parameters, buffers and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.wide = nn.Linear(6, 6, dtype=torch.float64)
        self.never = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 4, bias=False)
        self.decode.weight = nn.Parameter(torch.empty(4, 6))
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.decode.weight
        filled(self)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.norm(self.encode(x))))
        h = torch.tanh(self.wide(h.double())).float()
        if extra:
            h = h + self.sometimes(h)
        return self.decode(h) + self.head(h * h)


def steps_of(module: nn.Module, second: nn.Module, optimizers: list[Optimizer], rank: int) -> Iterator[None]:
    for step in range(50):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = numbers(5, 4, seed=97 * step + rank, dtype=torch.float32)
        (module(x, (step + rank) % 3 == 0) ** 2).mean().backward()
        small_loss(second, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


def trains_beside_ddp() -> dict[str, list[bool]]:
    rank = dist.get_rank()
    comm = sx.get_communicator()
    found = {}
    for name, make in OPTIMIZERS.items():
        theirs, second = EveryKindOfParameter(), small_net()
        ddps = [DistributedDataParallel(theirs, find_unused_parameters=True), DistributedDataParallel(second)]
        plain = [make([p for p in m.parameters() if p.requires_grad]) for m in (theirs, second)]
        ours, our_second = EveryKindOfParameter(), small_net()
        pairs = [
            (ours, make([p for p in ours.parameters() if p.requires_grad])),
            (our_second, make(our_second.parameters())),
        ]
        wrapped = [DistributedOptimizer(o, comm, module=m, bucket_bytes=200, overlap=True) for m, o in pairs]
        for _ in zip(steps_of(*ddps, plain, rank), steps_of(ours, our_second, wrapped, rank), strict=True):
            pass
        both = zip(
            [*theirs.parameters(), *second.parameters()], [*ours.parameters(), *our_second.parameters()], strict=True
        )
        parameters = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in both)
        buffers = all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(theirs.buffers(), ours.buffers(), strict=True))
        found[name] = [parameters, buffers or rank > 0]  # DDP broadcasts root's buffers
    return found


@pytest.mark.slow
def test_parameters_equal_those_of_ddp_after_fifty_steps() -> None:
    expected = {name: [True, True] for name in OPTIMIZERS}
    assert run_ranks(trains_beside_ddp, 2, backend="gloo", timeout_s=120) == [expected] * 2


def with_dtensors() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    comm = sx.get_communicator()
    mesh = init_device_mesh("cpu", (2,))
    module = distribute_module(nn.Linear(4, 2), mesh)  # replicated
    found: list[Any] = []
    with BucketReducer(module, comm) as reducer:
        weight = module.weight
        (weight.to_local() * (1 + comm.rank)).sum().backward()
    grad = weight.grad
    found.append([type(grad).__name__, [p.is_replicate() for p in grad.placements], grad.to_local().unique().tolist()])
    reducer.close()
    module.zero_grad()
    (weight.to_local() * (1 + comm.rank)).sum().backward()
    average_gradients(module, comm)
    found.append(weight.grad.to_local().unique().tolist())
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    for refuse in (lambda: BucketReducer({"w": sharded}, comm), lambda: average_gradients({"w": sharded}, comm)):
        try:
            refuse()
        except UnsupportedError as error:
            found.append([error.name, "Shard(dim=0)" in str(error)])
    return found


def test_dtensors_are_averaged_where_they_are_replicated_and_refused_where_not() -> None:
    replicated = ["DTensor", [True], [1.5]]
    expected = [replicated, [1.5], ["w", True], ["w", True]]
    assert run_ranks(with_dtensors, 2, backend="gloo", timeout_s=120) == [expected] * 2


# Every backend


class Wide(nn.Module):
    """Small and large parameters, a sparse table, and a layer that one rank uses at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        self.first = nn.Linear(4, 300, dtype=torch.float64)
        self.second = nn.Linear(300, 300, dtype=torch.float64)
        self.turns = nn.Linear(300, 3, dtype=torch.float64)
        self.last = nn.Linear(300, 3, dtype=torch.bfloat16)
        for parameter in filled(self).parameters():
            parameter.data.mul_(0.1)

    def loss(self, rank: int, step: int, world_size: int) -> torch.Tensor:
        h = self.first(self.table(torch.tensor([rank, step, rank + step])))
        h = torch.tanh(self.second(torch.tanh(h)))
        used = self.turns if step % world_size == rank else self.last
        return used(h.to(used.weight.dtype)).double().square().mean()


def trains_over(backend: str, directory: str) -> list[Any]:
    torch.sparse.check_sparse_tensor_invariants.disable()
    comm = start(backend, directory)
    ours, reference = Wide(), Wide()
    optimizer = DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.05), module=ours, bucket_bytes=1 << 18)
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        ours.loss(comm.rank, step, comm.world_size).backward()
        for rank in range(comm.world_size):
            (reference.loss(rank, step, comm.world_size) / comm.world_size).backward()
        optimizer.step()
        plain.step()
    pairs = zip(ours.parameters(), reference.parameters(), strict=True)
    right = all(torch.allclose(a, b, rtol=0.01, atol=1e-5) for a, b in pairs)  # equal within the precision of bfloat16
    digest = comm.all_gather_object([float(p.detach().double().sum()) for p in ours.parameters()])
    return [comm.backend, right, all(other == digest[0] for other in digest), len(optimizer.reducer.buckets)]


@pytest.mark.parametrize("backend", [slow("gloo"), "shm", "mpi", slow("hierarchical")])
def test_training_is_right_over_every_backend(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    world_size = 3 if backend == "hierarchical" else 2
    args = (backend, str(tmp_path))
    found = run_ranks(trains_over, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=120, reuse=True)
    assert found == [[backend, True, True, 4]] * world_size
