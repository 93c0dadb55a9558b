"""The training layer over every backend: values and wrong input. Other tests of it use threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import by_default
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def model_of(seed: int) -> nn.Module:
    """Return a model from a generator of its own, since thread ranks share torch's."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def synchronises(comm: sx.comm.Communicator) -> None:
    root = comm.world_size - 1
    model, expected = model_of(comm.rank), model_of(root)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1 * (seed + 1)) for m, seed in ((model, comm.rank), (expected, root))
    ]
    trained(expected, optimizers[1], root)
    if comm.rank == root:  # the other ranks have fresh optimizers
        trained(model, optimizers[0], root)
    tree = {
        "model": model,
        "optimizer": optimizers[0],
        "more": [comm.rank, ("x" * comm.rank, torch.full((3,), comm.rank))],
    }
    found = sx.synchronize(tree, root=root)
    assert found["more"][:1] == [root]
    assert found["more"][1][1].tolist() == [root] * 3
    for turn in range(2):
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), (turn, name)
        trained(model, optimizers[0], 7)
        trained(expected, optimizers[1], 7)


def moves_parameters(comm: sx.comm.Communicator) -> None:
    model = model_of(comm.rank)
    sx.train.broadcast_parameters(model, root=1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), model_of(1).state_dict().values(), strict=True)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(comm.rank)
    model[1].num_batches_tracked.fill_(comm.rank + 5)
    sx.train.allreduce_parameters(model)
    mean = (comm.world_size - 1) / 2
    assert all(parameter.eq(mean).all() for parameter in model.parameters())
    assert model[1].num_batches_tracked == 5


def reduces(comm: sx.comm.Communicator) -> None:
    total = comm.world_size * (comm.world_size + 1) / 2
    for make in (
        sx.train.InlineReducer,
        sx.train.CoalescingReducer,
        lambda: sx.train.CoalescingReducer(cache_bytes=100, contiguous=False),
    ):
        tensors = [
            torch.full((size,), comm.rank + 1.0, dtype=dtype)
            for size in (3, 70_001)
            for dtype in (torch.float32, torch.bfloat16)
        ]
        with make() as reducer:
            for tensor in tensors:
                reducer.add(tensor)
        assert all(tensor.eq(total / comm.world_size).all() for tensor in tensors)
    model = model_of(0)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, comm.rank + 1.0) if number != comm.rank else None
    sx.average_gradients(model)
    for number, parameter in enumerate(model.parameters()):
        missing = number + 1 if number < comm.world_size else 0
        assert torch.allclose(parameter.grad, torch.full_like(parameter, (total - missing) / comm.world_size))


def splits_data(comm: sx.comm.Communicator) -> None:
    found = comm.all_gather_object(
        [int(i) for i in sx.train.DistributedDataContainer(torch.arange(10), uneven="short")]
    )
    assert sorted(number for part in found for number in part) == list(range(10))
    loader = torch.utils.data.DataLoader(
        sx.train.DistributedDataContainer((torch.arange(2), torch.ones(2)), uneven="pad")
    )
    assert len(list(loader)) == math.ceil(2 / comm.world_size)


def names_what_differs(comm: sx.comm.Communicator) -> None:
    """Check errors on all ranks, after each of which the communicator works."""
    last = comm.rank == comm.world_size - 1
    shape = nn.Linear(3 + last, 2)
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: sx.synchronize({"a": torch.ones(2 + last)}), "'a'"),
        (lambda: sx.synchronize({"a": 1, "b" if last else "c": 2}), "'c'"),
        (lambda: sx.train.broadcast_parameters(shape), "weight"),
        (lambda: sx.average_gradients(shape), "weight"),
        (lambda: sx.train.data_parallel(shape, torch.optim.SGD(shape.parameters(), lr=1.0)), "weight"),
    ]
    for act, name in bad:
        with pytest.raises(sx.StateExchangeError, match=name):
            act()
        comm.barrier()


def spreads_nan(comm: sx.comm.Communicator) -> None:
    """Check that a NaN on one rank is NaN on all, and in no other element."""
    model = nn.Linear(3, 2)
    optimizer = sx.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), module=model)
    factor = torch.tensor([float("nan") if comm.rank == 1 else 1.0, 1.0])
    (model(torch.ones(1, 3)) * factor).sum().backward()
    optimizer.step()
    assert model.bias.isnan().tolist() == [True, False]
    assert model.weight.isnan().all(1).tolist() == [True, False]


CHECKS = [synchronises, moves_parameters, reduces, splits_data, names_what_differs, spreads_nan]


def runs_all_checks(backend: str, directory: str) -> list[str]:
    comm = start(backend, directory)
    for check in CHECKS:
        check(comm)
        comm.barrier()
    return [comm.backend]


@pytest.mark.parametrize("backend", by_default(LAUNCHED_AS, *map(list(LAUNCHED_AS).index, ("shm", "gloo"))))
def test_the_training_layer_is_right_and_names_wrong_input_over_every_backend(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    found = run_ranks(runs_all_checks, 3, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path)), timeout_s=120)
    assert found == [[backend]] * 3
