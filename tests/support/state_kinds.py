"""Every kind of state, every operation on it, and the table of docs/state.md with their outcomes."""

from __future__ import annotations

import collections
import copy
import datetime as dt
import enum
import random
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from state_content import OPTIMIZERS, classes, content, equal
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "state.md"
LR = torch.optim.lr_scheduler


OPTIONS: dict[str, dict[str, Any]] = {  # with more state than by default
    "Adam with a tensor as lr, amsgrad": {"lr": torch.tensor(0.25), "amsgrad": True},
    "RMSprop with momentum, centered": {"momentum": 0.9, "centered": True},
    "SGD with momentum": {"momentum": 0.9},
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    kind.__name__: lambda optimizer, seed, kind=kind: kind(optimizer) for kind in classes(LR, LR.LRScheduler)
} | {
    "ChainedScheduler": lambda o, seed: LR.ChainedScheduler([LR.ConstantLR(o), LR.ExponentialLR(o, 0.5)]),
    "CosineAnnealingLR": lambda o, seed: LR.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o, seed: LR.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o, seed: LR.CyclicLR(o, 0.1, 1.0, step_size_up=2, cycle_momentum=False),
    "ExponentialLR": lambda o, seed: LR.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o, seed: LR.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiStepLR": lambda o, seed: LR.MultiStepLR(o, [1, seed + 1]),
    "MultiplicativeLR": lambda o, seed: LR.MultiplicativeLR(o, lambda epoch: 0.5),
    "OneCycleLR": lambda o, seed: LR.OneCycleLR(o, 1.0, total_steps=10),
    "SequentialLR": lambda o, seed: LR.SequentialLR(o, [LR.ConstantLR(o), LR.StepLR(o, 2)], [2]),
    "StepLR": lambda o, seed: LR.StepLR(o, 2),
    "SWALR": lambda o, seed: torch.optim.swa_utils.SWALR(o, 0.05),
}


class Net(nn.Module):
    """Two layers of which one has buffers; the second weight is that of the first."""

    def __init__(self, seed: int, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.norm(self.first(x)))
        return result


def train(seed: int, kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """Return a model and its optimizer after `seed` steps."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Embedding(4, 3, sparse=True) if kind is torch.optim.SparseAdam else Net(seed)
    weights = [p for p in model.parameters() if p.dim() == 2]
    parameters: Any = weights if kind.__name__ == "Muon" else model.parameters()
    optimizer: Any = kind(parameters, **{"lr": 0.01 * seed, **copy.deepcopy(options)})
    for step in range(seed):
        inputs = torch.tensor([1, 2]) if kind is torch.optim.SparseAdam else torch.full((2, 3), step + 1.0)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return {"model": model, "optimizer": optimizer}


def scheduler(seed: int, kind: str) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    one = SCHEDULERS[kind](optimizer, seed)
    optimizer.step()
    for _ in range(seed):
        one.step(*([0.5] if kind == "ReduceLROnPlateau" else []))
    return one


class Loader:
    """A stateful data loader."""

    def __init__(self, seed: int) -> None:
        self.seen = list(range(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class OwnLoader(Loader):
    """One that says that its position is in its rank's part."""

    per_rank = True


class Labelled(torch.Tensor):
    """A subclass of torch.Tensor."""


class Point(NamedTuple):
    tensor: torch.Tensor
    step: int


@dataclass
class Job:
    model: nn.Module
    step: int


@dataclass(frozen=True)
class FrozenJob:
    tensor: torch.Tensor
    step: int


class Colour(enum.Enum):
    RED = 2
    BLUE = 3


def values(seed: int) -> dict[str, Any]:
    return {
        "numpy": np.float32(seed),
        "complex": complex(seed, 1),
        "dtype": (torch.float16, torch.bfloat16)[seed % 2],
        "size": torch.Size([seed]),
        "enum": Colour(seed),
        "tuple": (seed, (None, float("inf"))),
    }


def other_values(seed: int) -> dict[str, Any]:
    return {"bytes": b"x" * seed, "path": Path("a") / str(seed), "date": dt.date(2026, 1, seed), "set": {seed, 7}}


def quantized(seed: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's deprecation warning
        return torch.quantize_per_tensor(torch.full((2,), float(seed)), 0.1, 0, torch.qint8)


def dynamic(seed: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(seed + 1, 2)), {nn.Linear})


def scaler(seed: int) -> Any:
    one = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    one.scale(torch.ones(1))
    return one


def averaged(seed: int) -> nn.Module:
    one = torch.optim.swa_utils.AveragedModel(Net(seed))
    one.update_parameters(Net(seed + 1))
    return one


def aliased(seed: int) -> dict[str, torch.Tensor]:
    whole = torch.full((4,), float(seed))
    return {"whole": whole, "again": whole, "part": whole[1:3]}


def make_array(seed: int) -> np.ndarray[Any, Any]:
    return np.full(3, seed, np.float32)


KINDS: dict[str, Callable[[int], Any]] = {
    "module": Net,
    "module with tied weights": lambda seed: Net(seed, tied=True),
    "module, compiled": lambda seed: torch.compile(Net(seed), backend="eager"),
    "average of a module (EMA)": averaged,
    "module, quantized dynamically": dynamic,
    **{f"optimizer {kind.__name__}": lambda seed, kind=kind: train(seed, kind) for kind in OPTIMIZERS},
    **{
        f"optimizer {name}": lambda seed, name=name: train(
            seed, vars(torch.optim)[name.partition(" ")[0]], **OPTIONS[name]
        )
        for name in OPTIONS
    },
    **{f"scheduler {kind}": lambda seed, kind=kind: scheduler(seed, kind) for kind in SCHEDULERS},
    "GradScaler": scaler,
    "data loader with a state": Loader,
    "object with per_rank = True": OwnLoader,
    "RNG state of torch": lambda seed: torch.Generator().manual_seed(seed).get_state(),
    "RNG state of numpy": lambda seed: np.random.RandomState(seed).get_state(),
    "RNG state of numpy's Generator": lambda seed: np.random.default_rng(seed).bit_generator.state,
    "RNG state of random": lambda seed: random.Random(seed).getstate(),
    "dataclass with a module": lambda seed: Job(Net(seed), seed),
    "frozen dataclass with a tensor": lambda seed: FrozenJob(torch.full((2,), float(seed)), seed),
    "namedtuple with a tensor": lambda seed: Point(torch.full((2,), float(seed)), seed),
    "OrderedDict of tensors": lambda seed: collections.OrderedDict(b=torch.full((2,), float(seed)), a=torch.ones(1)),
    "Counter": lambda seed: collections.Counter("x" * seed),
    "defaultdict of tensors": lambda seed: collections.defaultdict(list, a=torch.full((2,), float(seed))),
    "list of tensors": lambda seed: [torch.full((2,), float(seed)), torch.ones(1)],
    "deque of numbers": lambda seed: collections.deque([seed, 1], maxlen=3),
    "deque of tensors": lambda seed: collections.deque([torch.full((2,), float(seed))]),
    "number, text, None": lambda seed: {"a": seed, "b": str(seed), "c": None},
    "numpy scalar, complex, dtype, size, enum": values,
    "bytes, path, date, set": other_values,
    "numpy array": make_array,
    "two names for one tensor, and a view of it": aliased,
    "strided tensor": lambda seed: torch.full((4, 4), float(seed))[::2, ::2].t(),
    "expanded tensor": lambda seed: torch.full((1,), float(seed)).expand(3),
    "tensor of a subclass": lambda seed: torch.full((2,), float(seed)).as_subclass(Labelled),
    "bfloat16, float8, complex64, bool tensors": lambda seed: {
        str(dtype)[6:]: torch.full((2,), float(seed)).to(dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)
    },
    "quantized tensor": quantized,
    "sparse tensor": lambda seed: torch.full((2,), float(seed)).to_sparse(),
}


# Each operation moves the state of seed 2 into that of seed 3, on 2 ranks unless named otherwise. States are made
# before the ranks start, which are threads and share torch's generator.


def flat(value: Any) -> Any:
    """Return what functions of modules and mappings of tensors accept: a single value in a mapping."""
    return value if isinstance(value, nn.Module | Mapping) else {"x": value}


def synchronizes(make: Callable[[int], Any], path: str) -> list[Any]:
    states = [make(2), make(3)]
    return run_ranks(lambda: content(sx.synchronize({"x": states[sx.get_rank()]})["x"]), 2)


def gathers(make: Callable[[int], Any], path: str) -> list[Any]:
    given = [flat(make(2)), flat(make(2))]

    def ranks() -> Any:
        with sx.gather_state(given[sx.get_rank()]) as states:
            return [{name: content(tensor) for name, tensor in one.items()} for one in states]

    live, found = make(3), run_ranks(ranks, 2)[0]
    if isinstance(live, nn.Module):
        bare = getattr(live, "_orig_mod", getattr(live, "module", live))
        bare.load_state_dict(found[1])
        return [content(live)]
    if isinstance(live, MutableMapping):
        live.clear()
        live.update(found[1])
        return [content(live)]
    if "x" not in found[1]:  # an object with several tensors, whose names begin with its own
        return [{name.removeprefix("x."): tensor for name, tensor in found[1].items()}]
    return [content(found[1]["x"])]


def exports(make: Callable[[int], Any], path: str, after: int = 2) -> list[Any]:
    given, live = [make(2), make(2)], [make(3) for _ in range(after)]
    run_ranks(lambda: sx.export_checkpoint(flat(given[sx.get_rank()]), path) and None, 2)

    def ranks() -> Any:
        sx.load_checkpoint(flat(live[sx.get_rank()]), path)
        return content(live[sx.get_rank()])

    return run_ranks(ranks, after)


def saves(make: Callable[[int], Any], path: str, after: int = 2) -> list[Any]:
    given, live = [make(2), make(2)], [{"x": make(3)} for _ in range(after)]
    run_ranks(lambda: sx.save_checkpoint({"x": given[sx.get_rank()]}, path) and None, 2)

    def ranks() -> Any:
        sx.load_checkpoint(live[sx.get_rank()], path)
        return content(live[sx.get_rank()]["x"])

    return run_ranks(ranks, after)


CALLS: dict[str, Callable[[Callable[[int], Any], str], list[Any]]] = {
    "synchronize": synchronizes,
    "gather": gathers,
    "export, load": exports,
    "export, load on 3": lambda make, path: exports(make, path, 3),
    "save, load": saves,
    "save, load on 1": lambda make, path: saves(make, path, 1),
    "save, load on 3": lambda make, path: saves(make, path, 3),
}


def outcome(make: Callable[[int], Any], call: str, path: str) -> str:
    """Return what a call does with the state that `make` returns for a seed, as a cell of the table on the page."""
    wanted = content(make(2))
    try:
        found = CALLS[call](make, path)
    except Exception as error:  # noqa: BLE001 (its kind is the outcome)
        return "refused" if isinstance(error, sx.StateExchangeError) else f"another error: {error!r}"
    wrong = [(rank, one) for rank, one in enumerate(found) if not equal(one, wanted)]
    if not wrong:
        return "same"
    plain = all(equal(one, wanted.as_subclass(torch.Tensor)) for one in found if isinstance(wanted, torch.Tensor))
    if plain and isinstance(wanted, torch.Tensor):
        return "same, as a plain tensor"
    if call == "synchronize" and all(equal(one, content(make(3))) for _, one in wrong):
        return "each rank's own"
    rank, one = wrong[0]
    return f"rank {rank} has {one}, not {wanted}"


def table() -> dict[str, list[str]]:
    """Return the outcomes by kind that the page shows."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][1:] == list(CALLS)
    return {kind: row for kind, *row in cells[1:] if not kind.startswith("--")}
