"""Flashlight's `fl::distributed`: one test for each function that this package replaces."""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

import pytest
import torch
from four_systems import filled, flat, on_ranks, same_everywhere
from torch import nn

import statexchange as sx
from statexchange.comm import defaults
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError
from statexchange.testing import run_ranks

# Flashlight


@on_ranks(2)
def test_a_second_init_warns_as_in_flashlight(comm: Communicator, directory: Path) -> None:
    assert sx.init("auto", timeout_s=5.0) is comm  # with a warning
    assert sx.is_initialized()
    assert (sx.get_rank(), sx.get_world_size()) == (comm.rank, comm.world_size)
    assert sx.comm.get_backend() == comm.backend


def test_values_before_init_are_those_of_flashlight() -> None:
    with defaults.use(None):
        assert not sx.is_initialized()
        assert (sx.get_rank(), sx.get_world_size()) == (0, 1)
        assert sx.comm.get_backend() == "single"
        scaled = sx.get_communicator().all_reduce(torch.ones(3), scale=2.0)  # Flashlight throws; here it is scaled
        assert scaled.tolist() == [2.0] * 3


def through_a_directory(directory: str) -> int:
    comm = sx.init("auto", rendezvous=f"file://{directory}")
    value = comm.all_reduce(torch.tensor([comm.rank + 1])).item()
    comm.barrier()
    sx.shutdown()
    return int(value)


@pytest.mark.slow
def test_ranks_meet_in_a_directory_again_as_by_flashlights_file_store(tmp_path: Path) -> None:
    for _ in range(2):  # the first rendezvous has left nothing behind
        assert run_ranks(through_a_directory, 2, backend="processes", args=(str(tmp_path),), timeout_s=120) == [3, 3]
        assert not list(tmp_path.iterdir())


@on_ranks(1, 2, 3, 4)
def test_an_all_reduce_gives_the_values_of_flashlight(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for async_op in (False, True):  # Flashlight's Gloo does not support this
        tensor = filled(comm.rank, 10, torch.float32)
        result = comm.all_reduce(tensor, scale=2.0, async_op=async_op)
        if async_op:
            comm.wait_all()
            result = result.wait()
        assert result is tensor
        assert tensor.eq(n * (n - 1)).all()
    assert comm.all_reduce(torch.full((3, 3), float(comm.rank))).eq(n * (n - 1) / 2).all()  # 6 on four ranks
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        assert comm.all_reduce(filled(comm.rank, 10, dtype)).eq(n * (n - 1) / 2).all()
    with pytest.raises(TypeError, match="float8"):
        comm.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))


@on_ranks(1, 2, 3)
def test_several_tensors_are_reduced_as_by_flashlights_all_reduce_multiple(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for contiguous in (False, True):
        for async_op in (False, True):
            tensors = [filled(comm.rank + 1, 1 << 12, torch.float32) for _ in range(5)]
            work = comm.all_reduce_multiple(tensors, scale=2.0, contiguous=contiguous, async_op=async_op)
            if async_op:
                work.wait()
            assert all(tensor.eq(n * (n + 1)).all() for tensor in tensors)
            mixed = [filled(1, 3), filled(1, 3, torch.float32)]  # in Flashlight these cannot be contiguous
            comm.all_reduce_multiple(mixed, contiguous=contiguous)
            assert all(tensor.eq(n).all() for tensor in mixed)
    assert comm.all_reduce_multiple([]) == []


@pytest.mark.slow
@on_ranks(2, backends=("shm",))
def test_a_set_of_20_mib_is_reduced_as_by_flashlight(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for count in (5, 30):  # 120 MiB throw in Flashlight
        tensors = [filled(comm.rank + 1, 1 << 20, torch.float32) for _ in range(count)]
        comm.all_reduce_multiple(tensors, scale=2.0, async_op=True).wait()
        assert all(tensor.eq(n * (n + 1)).all() for tensor in tensors)


@on_ranks(1, 2)
def test_pending_work_is_waited_for_as_by_flashlights_sync_distributed(comm: Communicator, directory: Path) -> None:
    comm.wait_all()  # nothing is pending
    tensor = filled(comm.rank + 1, 1 << 16, torch.float32)
    comm.all_reduce(tensor, scale=0.5, async_op=True)
    comm.wait_all()
    n = comm.world_size
    assert tensor.eq(n * (n + 1) / 4).all()  # scaled after the sum, in any order of streams


@on_ranks(1, 2, 3)
def test_a_barrier_waits_for_all_ranks_as_in_flashlight(comm: Communicator, directory: Path) -> None:
    time.sleep(0.02 * comm.rank)  # the order in which ranks arrive
    (directory / f"rank-{comm.rank}").touch()
    comm.barrier()
    found = {path.name for path in directory.glob("rank-*")}
    assert found == {f"rank-{rank}" for rank in range(comm.world_size)}
    comm.barrier()
    (directory / f"rank-{comm.rank}").unlink()
    comm.barrier()
    assert not list(directory.glob("rank-*"))
    comm.barrier()


@on_ranks(1, 2, 3, 4)
def test_an_inline_reducer_averages_at_once_as_in_flashlight(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    reducer = sx.train.InlineReducer(comm, 1 / n)
    tensor = filled(comm.rank, 10, torch.float32)
    reducer.add(tensor)
    assert (tensor * 2 * n).eq(n * (n - 1)).all()
    reducer.finalize()  # a no-op
    assert (tensor * 2 * n).eq(n * (n - 1)).all()


@on_ranks(1, 2, 3)
def test_a_coalescing_reducer_averages_together_as_in_flashlight(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    small = 1 << 10  # five of these fill the cache
    for async_op in (False, True):
        for contiguous in (False, True):
            reducer = sx.train.CoalescingReducer(
                comm, 1 / n, async_op=async_op, contiguous=contiguous, cache_bytes=5 * 4 * small
            )
            tensors = [filled(comm.rank + 1, small, torch.float32) for _ in range(100)]
            for count, tensor in enumerate(tensors, 1):
                reducer.add(tensor)
                if count % 10 == 0:
                    reducer.finalize()
            assert all((tensor * 2 * n).eq(n * (n + 1)).all() for tensor in tensors)
    reducer = sx.train.CoalescingReducer(comm, 1.0, async_op=False, cache_bytes=5 * 4 * small)
    fit = [filled(1, small, torch.float32) for _ in range(5)]
    for tensor in fit:
        reducer.add(tensor)
    assert all(tensor.eq(1).all() for tensor in fit)  # a tensor of exactly the threshold fits
    reducer.add(big := filled(1, 6 * small, torch.float32))
    assert all(tensor.eq(n).all() for tensor in (*fit, big))  # flushed, then sent alone, as it is too large
    reducer.finalize()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if f"CoalescingReducer, made at {__file__}:" in text]


def test_a_coalescing_reducer_that_is_dropped_warns_unlike_in_flashlight(caplog: pytest.LogCaptureFixture) -> None:
    """Flashlight's destructor finalizes, which communicates.

    Here a warning names what was not reduced, and nothing is sent.
    """
    for end in ("finalize", "discard"):
        reducer = sx.train.CoalescingReducer()
        reducer.add(torch.ones(3))
        getattr(reducer, end)()
        del reducer
    with sx.train.CoalescingReducer() as reducer:
        reducer.add(torch.ones(3))
    del reducer
    assert not warned(caplog)

    def work() -> list[float]:
        reducer = sx.train.CoalescingReducer()
        tensors = [torch.full((3,), float(sx.get_rank())) for _ in range(2)]
        for tensor in tensors:
            reducer.add(tensor)
        del reducer
        return tensors[0].tolist()

    with caplog.at_level(logging.WARNING, "statexchange"):
        assert run_ranks(work, 2) == [[0.0] * 3, [1.0] * 3]
    found = warned(caplog)
    assert len(found) == 2
    assert all("2 tensors" in text for text in found)


@on_ranks(1, 2)
def test_gradients_of_a_module_are_averaged_as_by_flashlight(comm: Communicator, directory: Path) -> None:
    module = nn.Linear(3, 2)
    reducer = sx.train.BucketReducer(module)  # 1 / N by default
    (module(torch.ones(1, 3)).sum() * (comm.rank + 1)).backward()
    reducer.finalize()
    assert module.bias.grad.eq((comm.world_size + 1) / 2).all()


@on_ranks(1, 2, 3)
def test_parameters_and_gradients_are_reduced_as_by_flashlight(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    module = nn.Linear(3, 2)
    for parameter in module.parameters():
        parameter.data.fill_(comm.rank + 1)
        parameter.grad = torch.full_like(parameter, comm.rank + 1)
    sx.train.allreduce_parameters(module)
    sx.average_gradients(module)
    for parameter in module.parameters():
        assert parameter.eq((n + 1) / 2).all()  # averaged
        assert parameter.grad.eq((n + 1) / 2).all()
    with pytest.raises(InvalidArgumentError):
        sx.train.allreduce_parameters(None)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_meter_is_averaged_over_ranks_as_by_flashlight(comm: Communicator, directory: Path) -> None:
    """An average over ranks of unequal counts is computed from sums of values times counts, and of counts."""
    value, count = float(comm.rank + 1), comm.rank + 1
    total, counts = comm.all_reduce(torch.tensor([value * count, count], dtype=torch.float64)).tolist()
    n = comm.world_size
    assert total / counts == sum(i * i for i in range(1, n + 1)) / sum(range(1, n + 1))


@on_ranks(2)
def test_flashlights_example_trains_a_perceptron(comm: Communicator, directory: Path) -> None:
    """10 to 100 to 1, momentum 0.9, each rank trains on half of the samples: the whole loss falls to a twentieth."""
    generator = torch.Generator().manual_seed(5)
    module = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 1))
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
    data = torch.rand(1000, 10, generator=generator) * 2 - 1
    target = (data * torch.arange(1.0, 11)).sum(1, keepdim=True)
    part = sx.train.DistributedDataContainer((data, target))
    rows = part.__getitems__(list(range(len(part))))
    inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
    sx.train.broadcast_parameters(module)
    optimizer = sx.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9))
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach().clone(), "avg").item())
    assert losses[-1] < losses[0] / 20
    assert same_everywhere(comm, flat(module))
