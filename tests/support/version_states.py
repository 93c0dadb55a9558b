"""Live states of all kinds, of which `write_version.py` makes samples, and into which later versions load these.

The samples in tests/data/version-* have the names of what is defined here, so only new things may be added.
"""

from __future__ import annotations

import collections
import datetime as dt
import enum
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import statexchange as sx

State = dict[str, Any]


class Colour(enum.Enum):
    RED = 2
    BLUE = 3


class Point(NamedTuple):
    x: float
    label: str


@dataclass
class Settings:
    rate: float
    sizes: tuple[int, ...]
    point: Point


for _type in (Colour, Point, Settings):
    sx.register_config(_type)

VALUES: State = {
    "none": None,
    "bools": [True, False],
    "integers": [-7, 1 << 200],
    "floats": [0.1, -0.0, float("inf"), float("nan"), 5e-324],
    "text": "é\n\U0001f600",
    "complex": complex(-0.0, 2.5),
    "bytes": b"\0\xff",
    "path": Path("a/b"),
    "date": dt.date(2026, 11, 27),
    "time": dt.time(1, 2, 3, 4),
    "datetime": dt.datetime(2026, 11, 27, 12, 30, tzinfo=dt.timezone.utc),
    "timedelta": dt.timedelta(days=-1, microseconds=5),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "enum": Colour.BLUE,
    "namedtuple": Point(0.5, "p"),
    "dataclass": Settings(1e-3, (2, 3), Point(-1.5, "q")),
    "numpy": [np.float16(0.1), np.float32(0.1), np.float64("nan"), np.int8(-5), np.uint64(2**64 - 1), np.bool_(True)],
    "numpy complex": np.complex64(1 - 2j),
    "set": {1, "a"},
    "frozenset": frozenset({2.5}),
    "deque": collections.deque([1, (2, "b")], maxlen=3),
    "tuple": (1, (None, [2])),
    "keys": {1: "a", (2, "b"): "c", None: 0, 2.5: True},
    "tag": {"$": "tuple"},
    "": "no text",
    "a.b": "dots",
    "empty": [{}, [], (), set(), "", b""],
    "nested": {"a": [{"b": ({"c": 1},)}]},
}
DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip


def with_bits(dtype: str, seed: int, *shape: int) -> torch.Tensor | None:
    """Return a tensor with a pattern of bits that depends on `seed`; None for a dtype that this torch lacks."""
    kind = getattr(torch, dtype, None)
    if kind is None:
        return None
    numel = torch.Size(shape).numel()
    itemsize = torch.empty(0, dtype=kind).element_size()
    data = (torch.arange(numel * itemsize) * 37 + 100 * seed) % 256
    if kind is torch.bool:
        return (data % 3 == seed % 3).reshape(shape)
    return data.to(torch.uint8).view(kind).reshape(shape)


def numbers(seed: float, *shape: int) -> torch.Tensor:
    """Return float32 values that depend on `seed`, without random numbers."""
    return (torch.arange(float(torch.Size(shape).numel())) + seed).sin().reshape(shape)


def filled(module: nn.Module, seed: int) -> Any:
    """Fill the parameters and buffers of a module with values that depend on `seed`; return it."""
    with torch.no_grad():
        for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
            tensor.copy_(numbers(seed + 10 * number, *tensor.shape) * 3)
    return module


class Net(nn.Module):
    """A network with buffers, one of them a number, and with a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.norm(self.first(x)))
        return result


def stepped(model: nn.Module, width: int, optimizer: Any, scheduler: Any, steps: int) -> None:
    """Train for some steps, which give the optimizer its moments."""
    for step in range(steps):
        optimizer.zero_grad()
        model(numbers(step, 4, width)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def all_kinds(seed: int) -> State:
    """Return a state of one rank with everything that a save may hold; with seed 0 one to load into."""
    model = filled(Net(), seed)
    groups = [
        {"params": [model.first.weight], "lr": 0.01 * (seed + 1)},
        {"params": [model.first.bias, *model.norm.parameters(), model.second.bias], "weight_decay": 0.5 * seed},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, amsgrad=True, foreach=False)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [2],
    )
    stepped(model, 3, optimizer, scheduler, 3 * seed)
    ema = torch.optim.swa_utils.AveragedModel(filled(Net(), seed + 1))
    loose = nn.Parameter(numbers(seed, 4))
    loose.grad = numbers(seed + 1, 4)
    sgd = torch.optim.SGD([loose], lr=0.1 + seed, momentum=0.9)
    if seed:
        ema.update_parameters(filled(Net(), seed + 2))
        sgd.step()
    shared = numbers(seed, 6)
    tensors = {dtype: tensor for dtype in DTYPES if (tensor := with_bits(dtype, seed, 2, 4)) is not None}
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": ema,
        "loose optimizer": sgd,
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + seed)),
        "random": sx.integrations.RandomState(),
        "tensors": tensors,
        "shapes": {
            "number": torch.tensor(1.5 * seed),
            "empty": torch.empty(0, 3),
            "empty, int64": torch.empty(2, 0, dtype=torch.int64),
            "transposed": numbers(seed, 3, 2).t(),
            "shared": shared,
            "shared again": shared,
            "view": shared[2:4],
        },
        "arrays": {
            "float32": np.full((2, 3), 0.1 + seed, np.float32),
            "bool": np.array([seed > 0, False]),
            "number": np.array(7 + seed, np.int64),
            "empty": np.empty((0, 2), np.float16),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3) + seed),
        },
        "containers": {
            "list": [numbers(seed, 2), {"inner": numbers(seed + 1, 2), "rate": 0.5 * seed}, []],
            "tuple": (numbers(seed + 2, 2), seed, ()),
            "ordered": collections.OrderedDict(b=numbers(seed, 1), a=numbers(seed + 1, 1)),
            "empty": {},
        },
        "values": dict(VALUES) if seed else dict.fromkeys(VALUES),
        "step": seed,
    }


def sharded(seed: int, kind: str) -> State:
    """Return a state with a model, sharded over all ranks: "alone", "fsdp", or "fsdp and tp" on a mesh of 2 x 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = filled(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), seed)
    if kind == "fsdp and tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "fsdp":
        fully_shard(model)
    groups = [{"params": list(layer.parameters()), "lr": 0.01 * (number + seed)} for number, layer in enumerate(model)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    stepped(model, 5, optimizer, scheduler, 2 * seed)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": seed}


def replica(seed: int, rank: int) -> State:
    """Return a plain model and its average, equal on all ranks, and values that are each rank's own."""
    model = filled(Net(), seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (seed + 1), momentum=0.9)
    stepped(model, 3, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5), seed)
    average = torch.optim.swa_utils.AveragedModel(filled(Net(), seed + 1))
    return {"model": model, "optimizer": optimizer, "ema": average, "step": seed, "cursor": [rank, seed]}


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors that `cut_by_hand` cuts."""
    corners = with_bits("int64", seed, 4, 2)
    assert corners is not None
    return {
        "rows": numbers(seed, 7, 3),
        "columns": numbers(seed + 1, 2, 8).to(torch.bfloat16),
        "gate_up": numbers(seed + 2, 8, 2),  # two blocks of four rows
        "corners": corners,
        "norm": numbers(seed + 3, 3),
    }


def cut_by_hand(whole: Mapping[str, torch.Tensor], rank: int, world_size: int) -> tuple[State, dict[str, Any]]:
    """Return a rank's parts of tensors, and their layout."""
    begin, end = 4 * rank // world_size, 4 * (rank + 1) // world_size
    parts = {
        "rows": whole["rows"].tensor_split(world_size)[rank].clone(),
        "columns": whole["columns"].tensor_split(world_size, 1)[rank].clone(),
        "gate_up": torch.cat([block.tensor_split(world_size)[rank] for block in whole["gate_up"].chunk(2)]),
        "corners": whole["corners"][begin:end].clone(),
        "norm": whole["norm"].clone(),
    }
    layout = {
        "*rows": {"dim": 0},
        "*columns": {"dim": 1},
        "*gate_up": {"dim": 0, "blocks": [1, 1]},
        "*corners": {"global_shape": [4, 2], "offsets": [begin, 0], "shape": [end - begin, 2]},
    }
    return parts, layout


# What is in a state


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each tensor and plain value in a state, without random states. Collective."""
    if isinstance(value, sx.integrations.RandomState):
        return
    if isinstance(value, torch.optim.Optimizer):
        for number, group in enumerate(value.param_groups):
            yield from leaves_of({key: item for key, item in group.items() if key != "params"}, f"{path}.{number}")
            for index, parameter in enumerate(group["params"]):
                yield from leaves_of(value.state[parameter], f"{path}.{number}.{index}")
    elif hasattr(value, "state_dict"):
        yield from leaves_of(value.state_dict(), path)
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves_of(item, f"{path}.{key}")
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            yield from leaves_of(item, f"{path}.{number}")
    else:
        yield path.removeprefix("."), value.full_tensor() if hasattr(value, "full_tensor") else value


def tensors_of(state: object) -> dict[str, torch.Tensor]:
    """Return all tensors and arrays in a state by path, as safetensors can hold them. Collective."""
    tensors = {}
    for path, leaf in leaves_of(state):
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        if not isinstance(tensor, torch.Tensor):
            continue
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.dtype is torch.complex128:
            tensor = torch.view_as_real(tensor)
        elif tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
            tensor = tensor.view(torch.uint8)
        tensors[path] = tensor
    return tensors


def plain_of(state: State) -> State:
    """Return all plain values in a state by path, without the entry "values", which has values without JSON."""
    leaves = leaves_of({key: value for key, value in state.items() if key != "values"})
    return {path: leaf for path, leaf in leaves if not isinstance(leaf, torch.Tensor | np.ndarray)}


def drawn() -> State:
    """Return what the random number generators of this process give next; of torch's the digest of its state."""
    state = torch.get_rng_state().numpy().tobytes()
    return {"python": random.random(), "numpy": np.random.rand(), "torch": hashlib.sha256(state).hexdigest()}


def write_expected(folder: Path, state: State) -> None:
    """Write what is in a state beside a sample, by means that are not this package's; on rank 0. Collective."""
    tensors, plain = tensors_of(state), plain_of(state)
    if sx.get_rank() == 0:
        save_file(tensors, folder / "expected.safetensors")
        (folder / "expected.json").write_text(json.dumps(plain, indent=1) + "\n")


def read_expected(folder: Path) -> tuple[dict[str, torch.Tensor], State]:
    """Return the tensors and plain values that `write_expected` wrote."""
    return load_file(folder / "expected.safetensors"), json.loads((folder / "expected.json").read_text())
