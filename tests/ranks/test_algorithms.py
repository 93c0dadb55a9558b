"""Algorithms: Bagua's network and formulas, quantisation errors, switching while training, tuner of bucket sizes."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bagua import bagua_net
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.errors import InvalidArgumentError, MismatchError, NumericOverflowError
from statexchange.testing import run_ranks
from statexchange.train.algorithms import (
    Algorithm,
    Decentralized,
    GradientAllReduce,
    QuantizedAllReduce,
    Run,
    ScatterGatherAllReduce,
    as_algorithm,
    dequantize,
    quantize,
)
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.module import DistributedModule, data_parallel
from statexchange.train.tuner import Setting, Tuner

STEPS = 10
Weights = list[list[Any]]


def net(seed: int = 0) -> nn.Sequential:
    """Return the network in float64, so that equal algorithms are equal to the last bit."""
    return bagua_net(seed).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    data, target = torch.randn(4, 2, generator=generator), torch.randn(4, 4, generator=generator)
    return data.double(), target.double()


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    data, target = batch(rank, step)
    return nn.functional.mse_loss(module(data), target)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(module, rank, step).backward()
        optimizer.step()


def weights(module: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in module.parameters()]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def trained(algorithm: Algorithm | str, steps: int = STEPS, **settings: Any) -> Callable[[], list[Any]]:
    """Run Bagua's training on a rank, seeded by the rank; return its final weights."""

    def work() -> list[Any]:
        rank = sx.get_rank()
        module = net(rank)
        wrapped, optimizer = data_parallel(module, sgd(module), algorithm, **settings)
        train(wrapped, optimizer, rank, range(steps))
        return weights(module)

    return work


def trained_in_one_process(world_size: int) -> list[Any]:
    """Run the same training in one process: gradients are added in the order of ranks, then divided."""
    module = net(0)
    optimizer = sgd(module)
    for step in range(STEPS):
        grads = [torch.autograd.grad(loss_of(module, r, step), list(module.parameters())) for r in range(world_size)]
        for parameter, its in zip(module.parameters(), zip(*grads, strict=True), strict=True):
            parameter.grad = torch.stack(its).sum(0) / world_size
        optimizer.step()
    return weights(module)


# Averages of gradients


@pytest.mark.parametrize("algorithm", ["allreduce", "sg-allreduce"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_baguas_net_is_bit_equal_between_ranks_and_to_one_process(algorithm: str, world_size: int) -> None:
    results = run_ranks(trained(algorithm), world_size)
    assert all(result == results[0] for result in results)
    expected = trained_in_one_process(world_size)
    if world_size < 3:
        assert results[0] == expected
    else:
        for ours, theirs in zip(results[0], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [{"bucket_bytes": 64, "overlap": True}, {"bucket_bytes": 1}, {"overlap": False}], ids=str
)
def test_scatter_gather_equals_allreduce_with_buckets_of_any_size(settings: dict[str, Any]) -> None:
    plain, scattered = (run_ranks(trained(name, 3, **settings), 3) for name in ("allreduce", "sg-allreduce"))
    assert all(result == scattered[0] for result in scattered)
    for ours, theirs in zip(scattered[0], plain[0], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-9, atol=1e-12)


# 8 bits


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_quantised_values_differ_by_half_a_step_at_most(scale: float) -> None:
    chunks = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * scale
    chunks[1] = chunks[1, 0]
    for row, sent in zip(chunks, quantize(chunks), strict=True):
        step = (row.max().double() - row.min()) / 255
        assert sent.numel() == 8 + 1000
        assert (dequantize(sent).double() - row).abs().max() <= step * 0.50001


def quantised_average(gradients: list[list[torch.Tensor]], *, error_feedback: bool = False) -> list[list[Any]]:
    """Return the averages on each rank after each round; gradients are given by round and rank."""

    def work() -> list[Any]:
        comm = sx.get_communicator()
        parameter = nn.Parameter(torch.zeros_like(gradients[0][0]))
        run = Run(comm)
        communicate = QuantizedAllReduce(error_feedback=error_feedback).collective(run)
        run.reducer = BucketReducer({"p": parameter}, comm, communicate=communicate)
        averages = []
        for theirs in gradients:
            parameter.grad = theirs[comm.rank].clone()
            run.reducer.add(parameter)
            run.reducer.finalize()
            averages.append(parameter.grad.clone())
        return averages

    return run_ranks(work, len(gradients[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(("world_size", "numel"), [(1, 7), (2, 1), (2, 1001), (3, 1001)])
def test_a_quantised_average_differs_by_half_a_step_per_stage(world_size: int, numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(world_size)
    theirs = [torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype) + 5 for _ in range(world_size)]
    results = [result[0] for result in quantised_average([theirs])]
    assert all(torch.equal(result, results[0]) for result in results)
    reals = [torch.view_as_real(t) if dtype.is_complex else t for t in (*theirs, results[0])]
    *inputs, result = [real.double().flatten() for real in reals]
    chunk = -(-inputs[0].numel() // world_size)
    for begin in range(0, inputs[0].numel(), chunk):
        parts = [t[begin : begin + chunk] for t in inputs]
        ranges = [float(part.max() - part.min()) for part in parts]
        mean = sum(parts) / world_size
        first = sum(ranges) / world_size / 255 / 2
        second = (float(mean.max() - mean.min()) + 2 * first) / 255 / 2
        rounding = 0.05 if dtype is torch.bfloat16 else 1e-5
        assert (result[begin : begin + chunk] - mean).abs().max() <= (first + second) * 1.0001 + rounding


def test_error_feedback_compensates_the_quantisation_error() -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = [torch.randn(64, generator=generator) for _ in range(2)]
    errors = []
    for error_feedback in (False, True):
        averages = quantised_average([theirs] * 40, error_feedback=error_feedback)[0]
        errors.append(float((torch.stack(averages).mean(0) - sum(theirs) / 2).abs().mean()))
    assert errors[1] < errors[0] / 2


def test_the_largest_values_that_can_be_quantised_are_averaged() -> None:
    largest = torch.tensor([-(2.0**126), 2.0**126] * 30)
    (result,) = quantised_average([[largest] * 3])[0]
    torch.testing.assert_close(result, largest)


def test_the_padding_of_a_bucket_does_not_change_its_range() -> None:
    """If it did, the large gradient of the first round would stay in the padding."""
    large = torch.tensor([0, 0, 0, -1e8, 2.1e8])  # no quantisation level between these two is 0
    rounds = [[large] * 2, [torch.full((5,), 1e-6)] * 2]
    assert all(torch.equal(result[1], rounds[1][0]) for result in quantised_average(rounds))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 64, "overlap": True}, {"overlap": False}], ids=str)
def test_a_gradient_that_cannot_be_quantised_is_named_on_all_ranks(bad: float, settings: dict[str, Any]) -> None:
    def work() -> tuple[str | None, int | None, bool, list[Any]]:
        comm = sx.get_communicator()
        module = net().float()
        wrapped, optimizer = data_parallel(module, sgd(module), "quantize", **settings)
        before = weights(module)

        def step(factor: float) -> None:
            optimizer.zero_grad()
            (wrapped(batch(0, 0)[0].float()).sum() + (module[2].bias * factor).sum()).backward()
            optimizer.step()

        with pytest.raises(NumericOverflowError) as caught:
            step(bad if comm.rank == 1 else 1.0)
        kept = weights(module) == before
        step(1.0)
        return caught.value.name, caught.value.rank, kept, weights(module)

    results = run_ranks(work, 3)
    assert {result[:3] for result in results} == {("2.bias", 1, True)}
    assert all(result[3] == results[0][3] for result in results)
    assert all(torch.tensor(weight).isfinite().all() for weight in results[0][3])


def test_a_quantised_training_stays_near_the_exact_one() -> None:
    for algorithm in ("quantize", QuantizedAllReduce(error_feedback=True)):
        results = run_ranks(trained(algorithm), 3)
        assert all(result == results[0] for result in results)
        for ours, theirs in zip(results[0], trained_in_one_process(3), strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-4)


# Averages of weights


def pairs_by_hand(world_size: int, communication: int) -> dict[int, int]:
    """Return the weights by Bagua's formula, from its test; with an odd number of ranks the last one has no peer."""
    ranks = world_size + world_size % 2
    peers = {}
    for rank in range(ranks):
        if rank < ranks // 2:
            peers[rank] = ((communication + rank) % ((ranks + 1) // 2)) + ranks // 2
        else:
            peers[rank] = (rank - ranks // 2 - communication) % (ranks // 2)
    return {rank: peer for rank, peer in peers.items() if max(rank, peer) < world_size}


@pytest.mark.parametrize("world_size", range(1, 10))
def test_shift_one_pairs_as_bagua_does(world_size: int) -> None:
    met = set()
    for communication in range(2 * world_size):
        found = {
            rank: peer
            for rank in range(world_size)
            for peer in Decentralized(peers="shift_one").peers_of(rank, world_size, communication)
        }
        assert found == pairs_by_hand(world_size, communication)
        assert all(found[peer] == rank for rank, peer in found.items())
        assert len(found) == world_size - world_size % 2
        met |= set(found.items())
    half = (world_size + 1) // 2
    assert met == {
        pair for pair in itertools.product(range(world_size), repeat=2) if (pair[0] < half) != (pair[1] < half)
    }


def test_the_peers_of_shift_one_on_four_and_on_three_ranks() -> None:
    algorithm = Decentralized("shift_one")
    assert [[algorithm.peers_of(r, 4, s) for r in range(4)] for s in range(2)] == [
        [[2], [3], [0], [1]],
        [[3], [2], [1], [0]],
    ]
    assert [[algorithm.peers_of(r, 3, s) for r in range(3)] for s in range(2)] == [[[2], [], [0]], [[], [2], [1]]]


def decentralised_by_hand(algorithm: Decentralized, world_size: int) -> list[list[Any]]:
    """Return the final weights of all ranks, whose training one process computes."""
    modules = [net(0) for _ in range(world_size)]
    optimizers = [sgd(module) for module in modules]
    for step in range(STEPS):
        for rank, module in enumerate(modules):
            optimizers[rank].zero_grad()
            loss_of(module, rank, step).backward()
        if step % algorithm.interval == 0:
            before = [[p.detach().clone() for p in module.parameters()] for module in modules]
            for rank, module in enumerate(modules):
                group = group_by_hand(algorithm.peers, rank, world_size, step // algorithm.interval)
                for i, parameter in enumerate(module.parameters()):
                    parameter.data.copy_(sum(before[peer][i] for peer in sorted(group)) / len(group))
        for optimizer in optimizers:
            optimizer.step()
    return [weights(module) for module in modules]


def group_by_hand(peers: str, rank: int, world_size: int, communication: int) -> set[int]:
    """Return the ranks whose weights a rank averages."""
    if peers == "all":
        return set(range(world_size))
    if peers == "ring":
        return {(rank - 1) % world_size, rank, (rank + 1) % world_size}
    return {rank, pairs_by_hand(world_size, communication).get(rank, rank)}


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("peers", ["all", "shift_one", "ring"])
@pytest.mark.parametrize("world_size", [slow(1), 2, 3, slow(4)])
def test_decentralised_weights_are_those_of_the_formula(peers: Any, interval: int, world_size: int) -> None:
    algorithm = Decentralized(peers, interval)
    results = run_ranks(trained(algorithm, bucket_bytes=512), world_size)
    for ours, theirs in zip(results, decentralised_by_hand(algorithm, world_size), strict=True):
        for weight, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("peers", ["all", "shift_one"])
def test_peers_have_equal_bits_after_a_communication(peers: Any) -> None:
    def work() -> list[Any]:
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module), Decentralized(peers))
        train(wrapped, optimizer, sx.get_rank(), range(STEPS))
        optimizer.finalize()  # the averages, with which the next step begins
        return weights(module)

    results = run_ranks(work, 4)
    for rank, peer in pairs_by_hand(4, STEPS).items():
        assert results[rank] == results[peer]
    assert (results[0] == results[1]) == (peers == "all")


def test_weights_of_halves_are_averaged_in_float32() -> None:
    def work() -> list[float]:
        rank = sx.get_rank()
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        module = nn.ParameterList([parameter])
        _, optimizer = data_parallel(module, sgd(module), Decentralized("ring"))
        parameter.data.fill_([64000.0, 48000.0, 32000.0][rank])
        optimizer.step()
        sx.get_communicator().barrier()
        return parameter.tolist()

    assert run_ranks(work, 3) == [[48000.0, 48000.0]] * 3


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


# The tuner


def test_the_tuner_tries_powers_of_two_and_keeps_the_fastest() -> None:
    took = {2**k: abs(k - 21) + 1.0 for k in range(10, 32)} | {10 << 20: 9.0}
    tuner = Tuner(Setting(10 << 20))
    sizes = [10 << 20]
    for _ in range(8):
        sizes.append(tuner.propose(Setting(sizes[-1]), took[sizes[-1]]).bucket_bytes)
    assert sizes == [10 << 20, 4 << 20, 16 << 20, 2 << 20, 32 << 20, 2 << 20, 2 << 20, 2 << 20, 2 << 20]
    assert Tuner(Setting(1)).propose(Setting(1), 1.0) == Setting(1)


@pytest.mark.parametrize("faster", [False, True])
def test_the_tuner_tries_sizes_with_the_faster_way_of_several_hosts(faster: bool) -> None:
    present = Setting(4096, hierarchical=True)
    tuner, tried = Tuner(present, both=True), [present]
    for _ in range(6):
        tried.append(tuner.propose(tried[-1], 1.0 + (tried[-1].hierarchical is not faster)))
    assert tried[1] == Setting(4096, hierarchical=False)
    assert tried[2:6] == [Setting(size, hierarchical=faster) for size in (2048, 8192, 1024, 16384)]
    assert tried[6] == Setting(4096, hierarchical=faster)


def test_the_bucket_count_changes_on_all_ranks_at_the_same_step() -> None:
    def work() -> tuple[Any, ...]:
        comm = sx.get_communicator()
        module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(16)))  # 1 KiB each
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.01)
        wrapped, optimizer = data_parallel(module, sgd(module), bucket_bytes=4096, tune_every=5)
        counts = []
        for step in range(32):
            optimizer.zero_grad()
            wrapped(torch.full((2, 16), float(comm.rank + step))).sum().backward()
            counts.append(len(optimizer.reducer.buckets))
            optimizer.step()
            if step % 5 == 2:  # a forward in eval mode is not counted, nor is its time
                wrapped.eval()
                wrapped(torch.zeros(1, 16))
                wrapped.train()
        trials = [(trial.bucket_bytes, trial.buckets, trial.step_s) for trial in wrapped.tuning_history]
        return counts, trials, weights(module)

    results = run_ranks(work, 2)
    counts, trials, _ = results[0]
    assert results[1] == results[0]
    assert counts[:5] == [4] * 5
    assert counts[5:20] == [8] * 5 + [2] * 5 + [16] * 5
    assert [trial[0] for trial in trials[:5]] == [4096, 2048, 8192, 1024, 16384]
    assert [trial[1] for trial in trials[:5]] == [4, 8, 2, 16, 1]
    assert counts[25:] == [{trial[0]: trial[1] for trial in trials}[min(trials[:5], key=lambda t: t[2])[0]]] * 7
    assert all(trial[2] > 0 for trial in trials)


def test_step_times_can_be_reported_and_the_slowest_rank_counts() -> None:
    def work() -> tuple[Any, ...]:
        comm = sx.get_communicator()
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module), bucket_bytes=2048)
        assert not wrapped.ask_and_update_hyperparameters()  # no step was measured
        answers = []
        for seconds in (5.0, 4.0, 1.0, 3.0, 2.0, 7.0):
            train(wrapped, optimizer, comm.rank, range(1))
            wrapped.report_metrics([seconds if comm.rank else 0.5] * 3)
            answers.append(wrapped.ask_and_update_hyperparameters())
        wrapped.switch_to("decentralize")
        wrapped.report_metrics([1.0])
        answers.append(wrapped.ask_and_update_hyperparameters())
        return (
            answers,
            [(trial.bucket_bytes, trial.step_s) for trial in wrapped.tuning_history],
            optimizer.setting.bucket_bytes,
        )

    expected = [(2048, 5.0), (1024, 4.0), (4096, 1.0), (8192, 3.0), (4096, 2.0), (4096, 7.0)]
    for answers, trials, present in run_ranks(work, 2):
        assert trials == expected
        assert answers == [True, True, True, True, False, False, False]
        assert present == 4096


# Every backend


def trains_with_all_algorithms(backend: str, directory: str) -> list[Any]:
    """Train with all algorithms one after the other, and with the tuner."""
    comm = start(backend, directory)
    module = net(comm.rank)
    wrapped, optimizer = data_parallel(module, torch.optim.Adam(module.parameters()), bucket_bytes=512)
    for name in ("sg-allreduce", "quantize", Decentralized("shift_one"), Decentralized("ring", 2), "allreduce"):
        train(wrapped, optimizer, comm.rank, range(3))
        wrapped.switch_to(name)
    wrapped.report_metrics([1.0])
    changed = wrapped.ask_and_update_hyperparameters()
    train(wrapped, optimizer, comm.rank, range(3))
    return [changed, weights(module), [list(map(float, s["exp_avg"].flatten())) for s in optimizer.state.values()]]


def trains_with_unequal_data(backend: str, directory: str) -> list[Any]:
    """Train by each averaging algorithm with unequal amounts of data, one rank without any; return the weights."""
    comm = start(backend, directory)
    found = []
    for name in ("allreduce", "sg-allreduce", "quantize"):
        module = net(comm.rank)
        wrapped, optimizer = data_parallel(module, sgd(module), name, bucket_bytes=512)
        with optimizer.join():
            train(wrapped, optimizer, comm.rank, range(2 * comm.rank))
        found.append(weights(module))
    return found


def trains_with_a_grad_scaler(backend: str, directory: str) -> list[Any]:
    """Train with a GradScaler and inf on one rank in step 1.

    Returns the scale, and whether weights changed, for each step.
    """
    comm = start(backend, directory)
    found = []
    for name in ("allreduce", "sg-allreduce"):
        module = net(comm.rank).float()
        wrapped, optimizer = data_parallel(module, sgd(module), name)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(3):
            before = weights(module)
            optimizer.zero_grad()
            data, target = (part.float() for part in batch(comm.rank, step))
            loss = nn.functional.mse_loss(wrapped(data), target)
            scaler.scale(loss * (float("inf") if step == 1 and comm.rank == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append([scaler.get_scale(), weights(module) != before, weights(module)])
    return found


BACKENDS = pytest.mark.parametrize("backend", ["gloo", "shm", "mpi", slow("hierarchical")])
BY_DEFAULT_SHM = pytest.mark.parametrize("backend", [slow("gloo"), "shm", slow("mpi"), slow("hierarchical")])


def run_over(backend: str, work: Callable[..., list[Any]], tmp_path: Path) -> list[list[Any]]:
    """Return what each rank found over `backend`."""
    if backend == "mpi":
        require_mpi()
    world_size = 3 if backend == "hierarchical" else 2
    args = (backend, str(tmp_path))
    return run_ranks(work, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=120, reuse=True)


@BACKENDS
def test_every_algorithm_trains_over_every_backend(backend: str, tmp_path: Path) -> None:
    first, *others = run_over(backend, trains_with_all_algorithms, tmp_path)
    assert others == [first] * len(others)
    assert first[0] is True


@BY_DEFAULT_SHM
def test_every_averaging_algorithm_joins_uneven_data(backend: str, tmp_path: Path) -> None:
    first, *others = run_over(backend, trains_with_unequal_data, tmp_path)
    assert others == [first] * len(others)
    module, world_size = net(), 1 + len(others)
    optimizer = sgd(module)
    for step in range(2 * (world_size - 1)):
        optimizer.zero_grad()
        active = [rank for rank in range(world_size) if 2 * rank > step]
        (sum(loss_of(module, rank, step) for rank in active) / len(active)).backward()
        optimizer.step()
    for found, slack in zip(first, (1e-12, 1e-12, 1e-4), strict=True):
        for ours, theirs in zip(found, weights(module), strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=slack)


@BY_DEFAULT_SHM
def test_a_grad_scaler_skips_the_same_step_on_all_ranks(backend: str, tmp_path: Path) -> None:
    first, *others = run_over(backend, trains_with_a_grad_scaler, tmp_path)
    assert others == [first] * len(others)
    assert [step[:2] for step in first] == [[4.0, True], [2.0, False], [2.0, True]] * 2


def over_two_hosts(directory: str) -> list[Any]:
    """Train three ranks on two hosts.

    Runs every algorithm with and without hierarchy, and the tuner, which tries both.
    """
    comm = start("hierarchical", directory)
    kinds: list[Any] = [GradientAllReduce, ScatterGatherAllReduce, QuantizedAllReduce, Decentralized]
    found: dict[bool | None, list[Any]] = {}
    for hierarchical in (None, True, False):
        module = net(comm.rank)
        wrapped, optimizer = data_parallel(module, sgd(module), kinds[0](hierarchical=hierarchical))
        steps = (comm.backend if hierarchical is not False else comm.flat.backend, optimizer.reducer.comm.backend)
        assert steps[0] == steps[1]
        train(wrapped, optimizer, comm.rank, range(STEPS))
        right = all(
            torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-9, atol=1e-12)
            for ours, theirs in zip(weights(module), trained_in_one_process(comm.world_size), strict=True)
        )
        for kind in [*kinds[1:], kinds[0]]:
            wrapped.switch_to(kind(hierarchical=hierarchical))
            train(wrapped, optimizer, comm.rank, range(2))
        for step_s in (3.0, 2.0, 1.0, 4.0):
            wrapped.report_metrics([step_s])
            wrapped.ask_and_update_hyperparameters()
            train(wrapped, optimizer, comm.rank, range(1))
        tried = [trial.hierarchical for trial in wrapped.tuning_history]
        found[hierarchical] = [right, tried, weights(module), optimizer.reducer.comm.backend]
    assert found[None][:2] == [True, [True, False, False, False]]
    assert found[True][:2] == [True, [True] * 4]
    assert found[False][:2] == [True, [False] * 4]
    return [[result[2:] for result in found.values()], comm.backend]


@pytest.mark.slow
def test_the_hierarchy_is_chosen_by_the_caller_or_the_tuner(tmp_path: Path) -> None:
    results = run_ranks(over_two_hosts, 3, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert results[1:] == results[:1] * 2
    found, backend = results[0]
    assert backend == "hierarchical"
    assert [result[1] for result in found] == ["gloo", "hierarchical", "gloo"]


# With the hierarchy

WEIGHTS = [1.0, 2.0, 4.0, 8.0, 16.0]


def averages_of_hosts(directory: str, hosts: str, cases: list[Any]) -> list[list[float]]:
    """Return a weight after each of three steps, which begin with WEIGHTS, for each of `cases`."""
    comm = start("hierarchical", directory, hosts)
    found = []
    for peers, dtype, hierarchical in cases:
        parameter = nn.Parameter(torch.zeros(7, dtype=getattr(torch, dtype)))
        module = nn.ParameterList([parameter])
        algorithm = Decentralized(peers, hierarchical=hierarchical)
        _, optimizer = data_parallel(module, sgd(module), algorithm, comm)
        values = []
        for _ in range(3):
            parameter.data.fill_(WEIGHTS[comm.rank])
            optimizer.step()
            assert parameter.eq(parameter[0]).all()
            values.append(parameter[0].abs().item())
        found.append(values)
    comm.barrier()
    return found


def expected_of_hosts(peers: Any, hosts: str) -> list[list[float]]:
    """Return by rank the mean, in each step, over all ranks of its host and of the hosts that are its peers."""
    names = sorted(set(hosts))
    found: list[list[float]] = [[] for _ in hosts]
    for step in range(3):
        for rank, host in enumerate(hosts):
            its_peers = Decentralized(peers).peers_of(names.index(host), len(names), step)
            group = {host, *(names[peer] for peer in its_peers)}
            values = [WEIGHTS[r] for r, name in enumerate(hosts) if name in group]
            found[rank].append(sum(values) / len(values))
    return found


CASES = [("shift_one", "float32", True), ("shift_one", "bfloat16", None), ("ring", "float64", True)]


@pytest.mark.parametrize("hosts", ["aabb", slow("abbb"), slow("aabbc")])
def test_with_a_hierarchy_peers_are_hosts(hosts: str, tmp_path: Path) -> None:
    args = (str(tmp_path), hosts, [*CASES, ("shift_one", "float32", False), ("ring", "complex64", True)])
    results = run_ranks(averages_of_hosts, len(hosts), backend="processes", args=args, timeout_s=120)
    if hosts == "aabb":
        assert [result[0] for result in results] == [[3.75] * 3] * 4
        assert [result[3] for result in results] == [[2.5, 4.5, 2.5], [5.0, 3.0, 5.0], [2.5, 3.0, 2.5], [5.0, 4.5, 5.0]]
    for at, peers in ((0, "shift_one"), (1, "shift_one"), (2, "ring"), (4, "ring")):
        found, expected = torch.tensor([r[at] for r in results]), torch.tensor(expected_of_hosts(peers, hosts))
        torch.testing.assert_close(found, expected, rtol=1e-2 if at == 1 else 1e-6, atol=0)


def quantised_by_hosts(directory: str) -> list[Any]:
    """Return averages of gradients over uneven hosts, and the names in errors for too large values and NaN."""
    comm = start("hierarchical", directory)
    found: list[Any] = []
    for error_feedback in (False, True):
        run = Run(comm)
        parameter = nn.Parameter(torch.zeros(1001))
        communicate = QuantizedAllReduce(error_feedback=error_feedback, hierarchical=True).collective(run)
        run.reducer = BucketReducer({"p": parameter}, comm, communicate=communicate)
        rounds = []
        for bad in (None, None, 3e38, float("nan"), None):
            parameter.grad = spread_of(comm.rank)
            if bad is not None and comm.rank == 1:
                parameter.grad[17] = bad
            run.reducer.add(parameter)
            try:
                run.reducer.finalize()
                rounds.append(parameter.grad.tolist())
            except NumericOverflowError as error:
                rounds.append([error.name, error.rank])
                run.reducer.discard()
        found.append(rounds)
    comm.barrier()
    return found


def spread_of(rank: int) -> torch.Tensor:
    return torch.linspace(-1 - rank, 1 + rank, 1001) ** 3


@pytest.mark.slow
def test_quantised_averages_on_uneven_hosts_are_over_ranks(tmp_path: Path) -> None:
    results = run_ranks(quantised_by_hosts, 4, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert results[1:] == results[:1] * 3
    mean = sum(spread_of(rank) for rank in range(4)) / 4
    for rounds in results[0]:
        assert rounds[2:4] == [["p", 1]] * 2
        for at in (0, 1, 4):
            assert (torch.tensor(rounds[at]) - mean).abs().max() < 2 * 64 / 255 / 2


def refused_without_hierarchy(directory: str) -> list[str]:
    """Ask for a hierarchy on two simulated hosts of two ranks over Gloo alone."""
    bootstrap.host_identity = lambda: "aabb"[int(os.environ["RANK"])]
    comm = sx.init("gloo", rendezvous=f"file://{directory}")
    errors = []
    for name in ("allreduce", "sg-allreduce", "quantize", "decentralize"):
        module = net()
        with pytest.raises(InvalidArgumentError, match=r"hierarchical=True.* gloo") as caught:
            data_parallel(module, sgd(module), type(as_algorithm(name))(hierarchical=True), comm)
        errors.append(str(caught.value))
        data_parallel(module, sgd(module), name, comm)[1].step()
    return errors


@pytest.mark.slow
def test_a_hierarchy_that_the_communicator_lacks_is_refused(tmp_path: Path) -> None:
    results = run_ranks(refused_without_hierarchy, 4, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert all("init('auto')" in error for errors in results for error in errors)


def test_hierarchical_on_one_host_averages_over_its_ranks() -> None:
    def work() -> float:
        rank = sx.get_rank()
        module = nn.ParameterList([nn.Parameter(torch.zeros(3))])
        _, optimizer = data_parallel(module, sgd(module), Decentralized("shift_one", hierarchical=True))
        module[0].data.fill_(WEIGHTS[rank])
        optimizer.step()
        return module[0].max().item()

    assert run_ranks(work, 4) == [3.75] * 4


# Several optimizers


def test_several_optimizers_may_step_at_different_times() -> None:
    """Like a generator and a discriminator: each steps with averages, also of several backwards."""

    def work() -> list[Any]:
        rank = sx.get_rank()
        module = net(rank)
        first = torch.optim.SGD(module[:3].parameters(), lr=0.1)
        second = torch.optim.Adam(module[3:].parameters(), lr=0.1)
        wrapped, (one, two) = data_parallel(module, [first, second], bucket_bytes=512)
        for step in range(4):
            loss_of(wrapped, rank, step).backward()
            one.step()
            one.zero_grad()
            if step % 2:
                two.step()
                two.zero_grad()
        steps = second.state[module[4].weight]["step"].item()
        return [steps, weights(module)]

    results = run_ranks(work, 3)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == 2


@pytest.mark.parametrize("algorithm", ["allreduce", "decentralize"])
def test_several_optimizers_equal_one_with_all_param_groups(algorithm: str) -> None:
    def work() -> list[Any]:
        rank = sx.get_rank()
        found = []
        for several in (False, True):
            module = net()
            parts = [module[:3], module[3:]]
            optimizer: Any = [sgd(part) for part in parts] if several else sgd(module)
            wrapped, trained = data_parallel(module, optimizer, algorithm)
            for step in range(3):
                loss_of(wrapped, rank, step).backward()
                for one in trained if several else [trained]:
                    one.step()
                    one.zero_grad()
            wrapped.switch_to("sg-allreduce")
            found.append(weights(module))
        return found

    for several, one in run_ranks(work, 2):
        assert several == one


def test_what_several_optimizers_cannot_do_is_refused() -> None:
    def work() -> None:
        module = net()
        both = [sgd(module[:3]), sgd(module[3:])]
        with pytest.raises(InvalidArgumentError, match="tune_every"):
            data_parallel(module, both, tune_every=100)
        with pytest.raises(InvalidArgumentError, match="another reducer") as caught:
            data_parallel(module, [sgd(module), sgd(module[3:])])
        assert caught.value.name == "4.weight"
        _, (one, _) = data_parallel(module, both)
        with pytest.raises(InvalidArgumentError, match="for one optimizer"), one.join():
            pass

    run_ranks(work, 2)
