"""DistributedOptimizer beside DDP, with DTensors and over every backend."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_runs import OPTIMIZERS, Optimizer, filled, numbers, raised_on_both
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import statexchange as sx
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError
from statexchange.testing import run_ranks
from statexchange.train.buckets.reducer import BucketReducer, average_gradients
from statexchange.train.ddp_hook import as_comm_hook
from statexchange.train.optimizer import DistributedOptimizer

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
