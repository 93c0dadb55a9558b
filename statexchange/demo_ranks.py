"""The ranks of the demo's two jobs, and the process that loads what they have exported. demo.py starts them."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from statexchange.demo_model import (
    DATA_PARALLEL,
    Llama,
    LlamaConfig,
    batch,
    byte_tokens,
    corpus_tokens,
    generate,
    learning_rate,
    mesh_shape,
    shard_model,
)
from statexchange.errors import StateExchangeError, to_record
from statexchange.exchange.checkpoints import Checkpoints
from statexchange.exchange.export import export_checkpoint
from statexchange.testing.child import report

_PROMPTS = (b"The import statement is ", b"If the class defines an ")  # of equal length, as they form a batch
_GENERATED_BYTES = 160


class _Job:
    """One rank's model, optimizer and saves."""

    def __init__(self, saved: str) -> None:
        torch.set_num_threads(1)  # the ranks share the host's cores
        self.mesh = _mesh()
        self.model = shard_model(LlamaConfig(), self.mesh)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.saves = Checkpoints(saved)

    def train(self, steps: range, total_steps: int) -> tuple[list[float], list[float]]:
        """Train on `corpus_tokens()`; return the mean losses and the seconds of the steps, counted from 0.

        Collective: blocks on each step's exchanges. Each step trains on the same sequences on any mesh of up to
        `DATA_PARALLEL` data parallel ranks, so a job that resumes on another one follows the same curve.
        """
        losses: list[float] = []
        seconds: list[float] = []
        corpus = corpus_tokens()
        size, rank = self.mesh["dp"].size(), self.mesh.get_local_rank("dp")
        parts = range(rank, max(size, DATA_PARALLEL), size)
        for step in steps:
            began = time.perf_counter()
            self.optimizer.param_groups[0]["lr"] = learning_rate(step, total_steps)
            losses.append(self._step([batch(corpus, step, part) for part in parts]))
            seconds.append(time.perf_counter() - began)
            if self.mesh.get_rank() == 0:
                report({"phase": "train", "step": step, "loss": losses[-1], "seconds": seconds[-1]})
        return losses, seconds

    def _step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        mean = torch.zeros(())
        for tokens, targets in batches:
            loss = cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            mean += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Tensor parallel peers have equal losses, so that the mean over all ranks is that over the data parallel ones.
        mean /= dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", mesh_shape(dist.get_world_size()), mesh_dim_names=("dp", "tp"))


def killed_rank(saved: str, steps: int) -> None:
    """One rank of the job that is killed: train, save to `saved` half-way, go on for some steps, and be killed.

    Collective over torch.distributed's default group, as `demo_rank`.
    """
    job = _Job(saved)
    half = steps // 2
    job.train(range(half), steps)
    if half:
        job.saves.save(job.state, half)
    job.train(range(half, min(steps - 1, half + max(1, steps // 10))), steps)
    dist.barrier()  # so that none is killed while another one waits for it
    os.kill(os.getpid(), signal.SIGKILL)


def demo_rank(saved: str, out_dir: str, steps: int, config_dir: str) -> dict[str, Any]:
    """One rank of the job that resumes: load from `saved`, train, export to `out_dir`, compare it with its own shards.

    Collective over torch.distributed's default group, which must be initialised; blocks as long as the demo
    takes. `steps` is the same on all ranks; `config_dir` holds the config.json to publish. Returns JSON values.
    """
    job = _Job(saved)
    loaded = job.saves.load(job.state)
    # A demo of one step is killed before its first save.
    resumed = 0
    if loaded is not None and loaded.step is not None:
        resumed = loaded.step
    model, mesh = job.model, job.mesh
    if mesh.get_rank() == 0:
        report({"phase": "resumed", "step": resumed, "ranks": mesh.size()})
    losses, seconds = job.train(range(resumed, steps), steps)
    if mesh.get_rank() == 0:
        report({"phase": "export"})
    logits = _logits(model).tolist()
    peak = _peak_bytes()  # after the logits, whose memory the export does not need
    try:
        exported = export_checkpoint(model, out_dir, files_from=config_dir)
    except StateExchangeError as error:  # the same on all ranks: the parent process raises it
        return {"refused": to_record(error, mesh.get_rank(), "export")}
    facts = {
        "resumed_step": resumed,
        "resumed_losses": tuple(losses),
        "step_seconds": tuple(seconds),
        "tensors_total": len(model.state_dict()),
        "export_bytes": exported.nbytes,
        "export_seconds": exported.seconds,
        "rank_bytes": exported.rank_nbytes,
        "root_peak_bytes": _peak_bytes(),
        "root_peak_growth_bytes": _peak_bytes() - peak,
    }
    state = model.state_dict()
    return {
        "facts": facts,
        "logits": logits,
        "mismatches": list(_mismatches(state, out_dir)),
        "shard_bytes": sum(tensor.to_local().nbytes for tensor in state.values()),
    }


def _mismatches(state: Mapping[str, DTensor], merged: str) -> Iterator[str]:
    """Yield the names of tensors that differ from the merged ones in any bit. Collective."""
    # If FSDP2 and tensor parallelism shard the same dim, full_tensor gathers twice, and torch warns that this is slow.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tensors = _merged_tensors(merged)
    for name, tensor in state.items():
        whole = tensor.full_tensor()  # collective: all ranks call it, whatever they have found so far
        if name not in tensors or not torch.equal(_bytes_of(whole), _bytes_of(tensors[name])):
            yield name


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: as numbers, NaN differ from themselves and -0.0 equals 0.0."""
    return tensor.flatten().view(torch.uint8)


def _peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load_merged(merged: str, reference: list[list[float]]) -> dict[str, Any]:
    """Load the merged checkpoint into an unsharded model by safetensors; return its part of the report."""
    model = Llama(LlamaConfig())
    state = _merged_tensors(merged)
    # By torch and safetensors alone: what is proved is that other tools can read the checkpoint.
    model.load_state_dict(state)
    with _one_thread():
        whole, text = _logits(model), generate(model, _PROMPTS[0], _GENERATED_BYTES)
    sharded = torch.tensor(reference)
    return {
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "model_bytes": sum(tensor.nbytes for tensor in state.values()),
        "logits_error": ((whole - sharded).abs().max() / sharded.abs().max()).item(),
        "prompt": _PROMPTS[0].decode(),
        "text": text,
    }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: on busy cores this small model waited for its threads, 9 s instead of 0.5 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _merged_tensors(directory: str) -> dict[str, Tensor]:
    """Return the tensors of the merged checkpoint, which safetensors reads."""
    tensors: dict[str, Tensor] = {}
    for name in os.listdir(directory):
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(directory, name))
    return tensors


def _logits(model: Llama) -> Tensor:
    """Return the logits after each prompt, of shape (prompts, vocabulary)."""
    with torch.no_grad():
        return model(torch.stack(list(map(byte_tokens, _PROMPTS))))[:, -1]  # type: ignore[no-any-return]
