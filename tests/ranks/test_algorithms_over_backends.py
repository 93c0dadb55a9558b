"""Every algorithm over every backend, over hosts, and with several optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from averaging import STEPS, batch, loss_of, net, sgd, train, trained_in_one_process, weights
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.errors import InvalidArgumentError, NumericOverflowError
from statexchange.testing import run_ranks
from statexchange.train.algorithms import (
    Decentralized,
    GradientAllReduce,
    QuantizedAllReduce,
    Run,
    ScatterGatherAllReduce,
    as_algorithm,
)
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.module import data_parallel

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
