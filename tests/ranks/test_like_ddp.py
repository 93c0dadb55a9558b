"""Two ranks train 31 jobs with DistributedOptimizer and with torch's DDP: after each step all bits are the same."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import statexchange as sx
from statexchange.testing import run_ranks

STEPS = 5
WIDTH = 6


class Tokens(nn.Module):
    """An embedding before a network of sequences."""

    def __init__(self, body: nn.Module, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, WIDTH, sparse=sparse), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(self.embed((x * 10).long().abs() % 11))
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found  # of recurrent networks
        return result


class Images(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 3), nn.GroupNorm(1, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x[:, None])
        return result


class Tied(nn.Module):
    """A weight under two names, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(torch.tanh(self.first(x)))) + self.second(x)


class Partly(nn.Module):
    """Layers that are used by some ranks in some steps, never, or always but frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        h: torch.Tensor = self.frozen(self.always(x))
        return self.sometimes(h) if (self.step + dist.get_rank()) % 3 == 0 else h


class Mixed(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.narrow(self.wide(self.single(x).double()).bfloat16())
        return result.float()


class Recomputed(nn.Module):
    """A block whose activations backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = mlp(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False))
        return result


class InDtype(nn.Module):
    """A network of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = mlp().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x.to(self.body[0].weight.dtype))
        return result.float()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, WIDTH))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=11, num_hidden_layers=2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.model((x * 10).long().abs() % 11).logits
            return result

    return Logits()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "images": Images,
    "embedding": lambda: Tokens(mlp()),
    "sparse embedding": lambda: Tokens(mlp(), sparse=True),
    "lstm": lambda: Tokens(nn.LSTM(WIDTH, 4, 2, batch_first=True)),
    "gru": lambda: Tokens(nn.GRU(WIDTH, 4, bidirectional=True, batch_first=True)),
    "transformer with dropout": lambda: Tokens(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.2, batch_first=True)),
    "tied": Tied,
    "partly": Partly,
    "three dtypes": Mixed,
    "bfloat16": lambda: InDtype(torch.bfloat16),
    "float64": lambda: InDtype(torch.float64),
    "recomputed": Recomputed,
    "llama": llama,
}
SGD = {"lr": 0.05, "momentum": 0.9}


@dataclass(frozen=True)
class Job:
    """A job: a model, an optimizer with its options, options of DistributedOptimizer, and what else a step does."""

    model: str = "mlp"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: SGD)
    settings: dict[str, Any] = field(default_factory=dict)
    does: str = ""


JOBS = {
    **{name: Job(name, options={"lr": 0.05} if "sparse" in name else SGD) for name in MODELS},
    "Adam": Job(optimizer="Adam", options={"lr": 0.01, "amsgrad": True}),
    "AdamW": Job(optimizer="AdamW", options={"lr": 0.01}),
    "AdamW, foreach": Job("three dtypes", "AdamW", {"lr": 0.01, "foreach": True}),
    "Adagrad": Job(optimizer="Adagrad", options={"lr": 0.01}),
    "RMSprop": Job(optimizer="RMSprop", options={"lr": 0.01, "centered": True}),
    "NAdam": Job(optimizer="NAdam", options={"lr": 0.01}),
    "Rprop": Job(optimizer="Rprop", options={"lr": 0.01}),
    "small buckets": Job("three dtypes", settings={"bucket_bytes": 64}),
    "small buckets, overlapped": Job("partly", settings={"bucket_bytes": 64, "overlap": True}),
    "tied, overlapped": Job("tied", settings={"overlap": True}),
    "reduced after backward": Job("images", settings={"overlap": False}),
    "no_sync": Job(does="no_sync"),
    "no_sync, overlapped": Job("lstm", settings={"overlap": True, "bucket_bytes": 256}, does="no_sync"),
    "clipped": Job("llama", "AdamW", {"lr": 0.01}, does="clip"),
    "scaled": Job(does="scale"),
    "scheduled": Job(does="schedule"),
    "two parameter groups": Job("images", does="groups"),
}


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.does == "groups":
        parameters = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}]
    made: torch.optim.Optimizer = getattr(torch.optim, job.optimizer)(parameters, **job.options)
    return made


def bits_after_each_step(job: Job, *, with_ddp: bool) -> list[list[list[int]]]:
    """Train; return the bits of all parameters and of the optimizer's state after each step."""
    torch.manual_seed(1)
    rank, model = dist.get_rank(), MODELS[job.model]()
    inner = optimizer = optimizer_of(job, model)
    ddp: Any = None
    if with_ddp:
        ddp = DistributedDataParallel(model, find_unused_parameters=job.model == "partly")
    else:
        optimizer = sx.DistributedOptimizer(inner, module=model, **job.settings)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=job.does == "scale")
    micros = 3 if job.does == "no_sync" else 1
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micros):
            torch.manual_seed(1000 * step + 10 * micro + rank)  # the dropout's, too
            inputs = torch.randn(4, WIDTH)
            quiet = micro < micros - 1
            with (ddp if with_ddp else optimizer).no_sync() if quiet else contextlib.nullcontext():
                loss = (ddp if with_ddp else model)(inputs).square().mean() / micros
                scaler.scale(loss).backward()
        if job.does == "clip":
            if not with_ddp:
                optimizer.finalize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        if job.does == "schedule":
            scheduler.step()
        tensors = [parameter.detach() for parameter in model.parameters()]
        for state in inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        found.append([tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for tensor in tensors])
    if not with_ddp:
        optimizer.close()
    return found


def differing(names: list[str]) -> list[str]:
    """Return the jobs in which a bit differs, or in which nothing was trained."""
    found = []
    for name in names:
        theirs, ours = (bits_after_each_step(JOBS[name], with_ddp=with_ddp) for with_ddp in (True, False))
        if theirs != ours or any(a == b for a, b in itertools.pairwise(theirs)):
            found.append(name)
    return found


@pytest.mark.slow
def test_every_job_has_the_bits_of_ddp() -> None:
    assert len(JOBS) == 31
    assert run_ranks(differing, 2, backend="gloo", args=(list(JOBS),), timeout_s=200) == [[], []]
