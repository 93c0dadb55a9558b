"""States that `synchronize` fills, and errors that all ranks get."""

import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

WORLDS = (1, 2, 3, 4)


class Pair(NamedTuple):
    left: Any
    right: Any


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = ("s", 1)


def rank_and_size() -> tuple[int, int]:
    comm = sx.get_communicator()
    return comm.rank, comm.world_size


# Values


def odd_values(rank: int) -> dict[str, Any]:
    return {
        "bool": rank == 0,
        "int": 2**80 + rank,
        "float": 0.1 + rank,
        "infinite": float("-inf") if rank == 0 else 1.0,
        "complex": complex(1, -2) if rank == 0 else 0j,
        "text": "größe" * (rank + 1),
        "enum": Mode.SLOW if rank == 0 else Mode.FAST,
        "dtype": torch.bfloat16 if rank == 0 else torch.float32,
        "float32": np.float32(0.1) if rank == 0 else np.float64(7),
        "int8": np.int8(-3 + rank),
        "bool_": np.bool_(rank == 0),
        "complex64": np.complex64(1 + 2j) * (rank + 1),
        "one may be None": None if rank == 0 else 3,
        "other may be None": "best" if rank == 0 else None,
        "number for number": 1 if rank == 0 else 2.5,
        "size": torch.Size([1, 2 + rank]),
    }


# Tensors


def odd_tensors(rank: int) -> dict[str, torch.Tensor]:
    """Tensors of all kinds whose values depend on the rank, and whose strides differ between ranks."""
    grid = torch.arange(24, dtype=torch.float32).reshape(4, 6) + 100 * rank
    image = torch.arange(48.0).reshape(1, 3, 4, 4) + rank
    found = {
        "slice": grid.clone()[::2, 1:4],
        "strides differ": grid.t().contiguous().t() if rank else grid.clone(),
        "transposed": grid.clone().t(),
        "flipped": grid.clone().flip(0)[1:],
        "zero_dim": torch.tensor(4.6 + rank),
        "one of many": torch.arange(10.0 + rank)[rank::3][:1],
        "empty": torch.empty(0, 5),
        "parameter": nn.Parameter(grid.clone()),
        "needs_grad": torch.full((2,), float(rank), requires_grad=True),
        "conjugate": torch.tensor([1 + 2j, rank + 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 + rank * 1j]).conj().imag,
        "channels_last": image.contiguous(memory_format=torch.channels_last) if rank else image,
        "view": torch.arange(1 << 12, dtype=torch.float64)[10 + rank : 20 + rank],
    }
    if rank == 0:
        found["expanded on root"] = torch.tensor([1.5]).expand(7)
    else:
        found["expanded on root"] = torch.zeros(7)
    dtypes = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16")
    dtypes += ("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    for name in dtypes:
        found[name] = torch.arange(5 + rank)[rank:].add(1).to(getattr(torch, name))
    return found


def odd_arrays(rank: int) -> dict[str, Any]:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6) + rank
    return {
        "plain": grid.copy(),
        "reversed": grid.copy()[::-1, ::-2],
        "fortran": np.asfortranarray(grid) if rank else grid.copy(),
        "zero_dim": np.array(3.5 + rank),
        "empty": np.empty((0, 3)),
        "big_endian": np.arange(3, dtype=">i4") + np.array(rank, dtype=">i4"),
        "text": np.array(["abc", "de"]) if rank == 0 else np.array(["...", ".."]),
        "date": np.array(["2024-02-01", "2025-01-01"], dtype="M8[D]") + np.timedelta64(rank, "D"),
        "record": np.array([(1 + rank, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "bfloat16": np.array([1.5, rank], dtype=ml_dtypes.bfloat16),
        "matrix": np.ones((2, 2)) * rank,
    }


# Modules


class Tied(nn.Module):
    """Tied weights, a frozen layer, a buffer in the state dict and one that is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.ones(3), persistent=False)


def fill(tensors: Iterable[torch.Tensor], generator: torch.Generator) -> None:
    """Fill tensors with random numbers of a separate generator, since thread ranks share torch's."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


def tied(rank: int) -> Tied:
    model = Tied()
    fill([*model.parameters(), *model.buffers()], torch.Generator().manual_seed(rank))
    return model


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def overlapping(value: float) -> list[Any]:
    """Two tensors of which the first's last two elements are the second's first."""
    flat = torch.full((10,), value + 1)
    flat[:4] = value
    return [flat[:6], flat[4:]]


def transposed(value: float) -> list[Any]:
    square = torch.full((6, 6), value)
    return [square, square.T]


# Optimizers

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.2),
    "momentum": functools.partial(torch.optim.SGD, lr=0.002, momentum=0.9, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.2, weight_decay=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.2, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.2),
    "tensor lr": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.2), foreach=False),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.2),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.2),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.2),
}


def trained(kind: str, rank: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a frozen layer and two param groups, after some steps on this rank's data."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    fill(model.parameters(), generator)
    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = OPTIMIZERS[kind](groups)
    optimizer.param_groups[1]["weight_decay"] = 0.01 * (rank + 1)
    for _ in range(steps):
        train_step(model, optimizer, torch.randn(5, 3, generator=generator))
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def assert_equal_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for name, value in state.items():
            mine = ours["state"][number][name]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert (mine.dtype, mine.stride()) == (value.dtype, value.stride())
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(value))
    assert str(ours["param_groups"]) == str(theirs["param_groups"])
    assert "nan" not in str(theirs)


def sgd(*shapes: tuple[int, ...]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(shape))]} for shape in shapes], lr=0.1)


def raised_on_all(body: Callable[[], Any]) -> list[Exception]:
    """Return the error of each of two ranks; the communicator must still work after it."""

    def caught() -> Exception:
        with pytest.raises(sx.StateExchangeError) as found:
            body()
        sx.get_communicator().barrier()
        return found.value

    return run_ranks(caught, 2)
