"""Algorithms: Bagua's network and formulas, quantisation errors, what decentralised weights are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from averaging import STEPS, batch, loss_of, net, sgd, train, trained, trained_in_one_process, weights
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.errors import NumericOverflowError
from statexchange.testing import run_ranks
from statexchange.train.algorithms import (
    Decentralized,
    QuantizedAllReduce,
    Run,
    dequantize,
    quantize,
)
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.module import data_parallel

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
