"""Lux's `DistributedUtils`, with FluxMPI's and Flux's differences: one test for each function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from four_systems import filled, on_ranks, same_everywhere
from torch import nn

import statexchange as sx
from statexchange.comm import defaults
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MissingExtraError, UnsupportedError

# Lux


@on_ranks(1, 2)
def test_an_initialized_backend_is_returned_as_by_lux(comm: Communicator, directory: Path) -> None:
    with defaults.use(comm):
        assert sx.is_initialized()
        assert sx.init() is comm  # idempotent
        assert sx.get_communicator() is comm
    with pytest.raises(InvalidArgumentError, match="devices is"), defaults.use(None):
        sx.init("single", devices=5)
    with pytest.raises(InvalidArgumentError, match="local_rank 0"), defaults.use(None):
        sx.init("single", devices=[])
    with defaults.use(None):
        assert sx.init("single", devices=["cpu"]).device.type == "cpu"
        sx.shutdown()


def test_nccl_without_its_extension_is_a_named_error_as_in_lux() -> None:
    kinds = (MissingExtraError, UnsupportedError)  # as torch is built for CUDA or not
    with pytest.raises(kinds, match="CUDA build"), defaults.use(None):
        sx.init("nccl")


@on_ranks(1, 3)
def test_local_rank_and_total_workers_are_those_of_lux(comm: Communicator, directory: Path) -> None:
    assert 0 <= comm.rank < comm.world_size == sx.get_world_size()
    assert sx.get_rank() == comm.rank  # Lux's local_rank is the world rank
    assert 0 <= comm.local_rank < comm.local_world_size


@on_ranks(1, 2, 3)
def test_a_broadcast_gives_the_values_of_luxs_bcast(comm: Communicator, directory: Path) -> None:
    for root in {0, comm.world_size - 1}:
        value = filled(comm.rank == root)
        out = filled(7.0)
        assert comm.broadcast(value, root=root, out=out) is out
        assert out.eq(1).all()  # on root, too; Lux leaves it unchanged there
        assert value.eq(float(comm.rank == root)).all()
        assert comm.broadcast(value, root=root) is value
        assert value.eq(1).all()
    with pytest.raises(InvalidArgumentError, match="root"):
        comm.broadcast(filled(1), root=comm.world_size)


@on_ranks(1, 2, 3)
def test_a_reduce_gives_the_values_of_luxs_reduce(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for op, expected in (("sum", n * (n + 1) / 2), ("avg", (n + 1) / 2)):
        for root in {0, n - 1}:
            given, out = filled(comm.rank + 1), filled(7.0)
            comm.reduce(given, op, root=root, out=out)
            assert given.eq(comm.rank + 1).all()
            assert out.eq(expected if comm.rank == root else 7).all()
            comm.reduce(given, op, root=root)
            assert given.eq(expected if comm.rank == root else comm.rank + 1).all()  # Lux divides on all ranks


@on_ranks(1, 2, 3)
def test_an_all_reduce_gives_the_values_of_luxs_allreduce(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for op, expected in (("sum", n * (n + 1) / 2), ("avg", (n + 1) / 2)):
        given, out = filled(comm.rank + 1), filled(7.0)
        assert comm.all_reduce(given, op, out=out) is out
        assert given.eq(comm.rank + 1).all()
        assert out.eq(expected).all()
        assert comm.all_reduce(given, op) is given
        assert given.eq(expected).all()


@on_ranks(2)
def test_the_operations_of_lux_and_avg_give_its_values(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    maximum = torch.distributed.ReduceOp.MAX
    cases = (("max", n), ("min", 1), ("prod", math.factorial(n)), ("sum", n * (n + 1) / 2), (maximum, n))
    for op, expected in cases:
        assert comm.all_reduce(torch.tensor([comm.rank + 1.0]), op).item() == expected
    with pytest.raises(InvalidArgumentError, match="unknown op"):
        comm.all_reduce(filled(1), "median")
    with pytest.raises(TypeError, match=r"avg of torch\.int64"):  # Lux: InexactError afterwards, or truncation
        comm.all_reduce(torch.tensor([comm.rank]), "avg")


@on_ranks(2)
def test_arrays_of_any_kind_are_reduced_on_the_host_as_by_lux(comm: Communicator, directory: Path) -> None:
    """CPU arrays work on every backend; Lux's NCCLBackend sends them over MPI."""
    array = np.full((3, 4), comm.rank + 1.0)
    n = comm.world_size
    assert comm.all_reduce(array.T) is not None
    assert (array == n * (n + 1) / 2).all()


class Nested(NamedTuple):
    a: Any
    d: Any


@on_ranks(1, 3)
def test_nested_state_is_synchronized_as_by_lux(comm: Communicator, directory: Path) -> None:
    def value() -> torch.Tensor:
        return torch.full((2, 3), float(comm.rank == 0))

    for tree in (Nested({"b": value(), "c": value()}, value()), ((value(), value()), value()), value()):
        found = sx.synchronize(tree)
        assert type(found) is type(tree)
        leaves = list(leaves_of(found))
        assert all(leaf.eq(1).all() for leaf in leaves)
        assert all(new is old for new, old in zip(leaves, leaves_of(tree), strict=True))
    assert sx.synchronize(comm.rank) == 0
    assert sx.synchronize(None) is None
    assert sx.synchronize(()) == ()
    assert sx.synchronize(f"symbol{comm.rank}") == "symbol0"  # Lux does not change symbols
    ours = object()
    assert sx.synchronize(ours) is ours
    for kind in (torch.optim.Adam, torch.optim.SGD):
        parameter = nn.Parameter(torch.zeros(4))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = filled(float(comm.rank == 0), 4, torch.float32)
        optimizer.step()
        sx.synchronize(optimizer)
        state = optimizer.state[parameter]
        assert all(same_everywhere(comm, state[key]) for key in state if isinstance(state[key], torch.Tensor))
        if kind is torch.optim.Adam:
            torch.testing.assert_close(state["exp_avg"], torch.full((4,), 0.1))  # root's


def leaves_of(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves_of(value)


@on_ranks(1, 2, 3)
def test_an_optimizer_steps_as_luxs_distributed_optimizer(comm: Communicator, directory: Path) -> None:
    plain = [nn.Parameter(filled(0, 4)) for _ in range(2)]
    ours = [nn.Parameter(filled(0, 4)) for _ in range(2)]
    inner = torch.optim.Adam(ours, lr=1e-3)
    optimizer = sx.DistributedOptimizer(inner)
    alone = torch.optim.Adam(plain, lr=1e-3)
    assert optimizer.state_dict() == alone.state_dict()
    for step in range(2):
        for parameter in ours:
            parameter.sum().backward()  # ones
        for parameter in plain:
            parameter.grad = filled(1, 4)
        optimizer.step()
        alone.step()
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        optimizer.zero_grad()
        if step == 0:
            for group in (*optimizer.param_groups, *alone.param_groups):
                group["lr"] = 0.1  # Optimisers.adjust!
    assert inner.param_groups[0]["lr"] == 0.1
    sx.synchronize(optimizer)


@on_ranks(1, 2, 3, 4)
def test_data_have_the_parts_of_luxs_distributed_data_container(comm: Communicator, directory: Path) -> None:
    n, data = comm.world_size, torch.arange(10.0)
    part = sx.train.DistributedDataContainer(data)
    chunk = -(-10 // n)
    assert len(part) == max(0, min(chunk, 10 - comm.rank * chunk))
    total = sum(part[i] for i in range(len(part))) + torch.zeros(1)
    assert comm.all_reduce(total).item() == 45
    for count in (0, 1, 5, 9):  # Lux raises BoundsError if ceil-chunking gives too few chunks
        sizes = comm.all_gather_object(len(sx.train.DistributedDataContainer(list(range(count)))))
        assert sum(sizes) == count
    pair = sx.train.DistributedDataContainer((data, data.view(10, 1)))
    assert len(pair) == len(part)  # the length counts samples, not fields


@on_ranks(1, 2, 3)
def test_what_fluxmpi_does_unlike_lux_has_an_equivalent(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for op, expected in (("sum", n), ("prod", 1)):
        buffer = filled(1, 4)
        work = comm.all_reduce(buffer, op, async_op=True)
        assert work.wait() is buffer
        assert buffer.eq(expected).all()
    buffer = filled(comm.rank, 4)
    assert comm.broadcast(buffer, async_op=True).wait().eq(0).all()
    ours, plain = nn.Parameter(filled(0, 4)), nn.Parameter(filled(0, 4))
    summing = sx.DistributedOptimizer(torch.optim.SGD([ours], lr=0.1), scale=1.0)  # FluxMPI's sums
    ours.sum().backward()
    summing.step()
    plain.grad = filled(n, 4)
    torch.optim.SGD([plain], lr=0.1).step()
    torch.testing.assert_close(ours, plain)
    gradients = [filled(1, 4), filled(1, 4)]
    assert comm.all_reduce_multiple(gradients) is not None  # allreduce_gradients
    assert all(gradient.eq(n).all() for gradient in gradients)


@on_ranks(1, 2, 3)
def test_what_flux_does_unlike_lux_has_an_equivalent(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    integers = torch.full((4,), comm.rank + 1)
    comm.reduce(integers)
    assert integers.eq(n * (n + 1) // 2 if comm.rank == 0 else comm.rank + 1).all()
    for count in (4 * n, 7, 10):
        part = sx.train.DistributedDataContainer(torch.arange(float(count)), uneven="pad")
        assert len(part) == -(-count // n)
        total = comm.all_reduce(sum(part[i] for i in range(len(part))) + torch.zeros(1)).item()
        padding = n * len(part) - count
        assert total == sum(range(count)) + sum(range(padding))
    used, unused = nn.Parameter(torch.ones(5, 3)), nn.Parameter(filled(1, 8).view(2, 4))
    optimizer = sx.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    (used.sum() + (unused.sum() if comm.rank == n - 1 else 0)).backward()
    optimizer.step()
    assert torch.equal(used.grad, torch.ones(5, 3))
    assert unused.grad.dtype == torch.float64
    assert unused.grad.eq(1 / n).all()  # zeros for a missing gradient
