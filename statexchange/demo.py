"""The main job as a program: ranks train, are killed, resume on fewer ranks and export; one process checks the result.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    InvalidArgumentError,
    StateExchangeError,
    TargetExistsError,
    from_record,
    needing_extra,
    to_record,
)
from statexchange.storage.files import make_path
from statexchange.storage.location import resolve_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from statexchange.demo_model import Llama

    OnProgress = Callable[[dict[str, Any]], None]

__all__ = ["DemoReport", "demo_rank", "killed_rank", "run_demo"]

_RESUMED_RANKS = 2

_PROMPTS = (b"The import statement is ", b"If the class defines an ")  # of equal length, as they form a batch
_GENERATED_BYTES = 160


@dataclass(frozen=True)
class DemoReport:
    """The result of a demo; sizes in bytes, times in seconds.

    `first_mesh` and `mesh` are the (data parallel, tensor parallel) ranks of the job that was killed and of the one
    that resumed and exported, of `first_world_size` and `world_size` ranks. `first_losses` are the losses until the
    kill; `losses` are those of the exported model: the first `resumed_step` by the first job, the others by the second.
    `mismatches` names the tensors that differ from the merged file in any bit.
    `logits_error` is the greatest difference between the merged model's logits and the sharded model's, relative to the
    greatest logit. By rank, `shard_bytes` is what it held and `rank_bytes` what it supplied to the files.
    `root_peak_growth_bytes` is how much the export raised root's peak. `path` is the merged checkpoint, or None if it
    was not kept.
    """

    first_world_size: int
    first_mesh: tuple[int, int]
    first_losses: tuple[float, ...]
    resumed_step: int
    world_size: int
    mesh: tuple[int, int]
    parameters: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    tensors_total: int
    mismatches: tuple[str, ...]
    logits_error: float
    prompt: str
    text: str
    files: tuple[tuple[str, int], ...]
    model_bytes: int
    shard_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    export_bytes: int
    export_seconds: float
    root_peak_bytes: int
    root_peak_growth_bytes: int
    total_seconds: float
    path: str | None

    @property
    def tensors_equal(self) -> int:
        """The number of merged tensors that are bit-equal to the sharded ones."""
        return self.tensors_total - len(self.mismatches)

    @property
    def ok(self) -> bool:
        """Whether every tensor is bit-equal and the logits agree within 1e-5."""
        return not self.mismatches and self.logits_error <= 1e-5


def run_demo(
    world_size: int = 4,
    keep: str | None = None,
    steps: int = 100,
    on_progress: OnProgress = lambda _event: None,
) -> DemoReport:
    """Train on `world_size` ranks, kill them half-way, resume on two, export, load in this process, and report.

    Not collective; blocks until all ranks have ended, and leaves no process behind. With `keep` the merged
    checkpoint stays in ``<keep>/merged``. `on_progress` gets {"phase": "train", "step", "loss", "seconds"}
    after each step, {"phase": "killed", "step", "ranks"} after the kill, {"phase": "resumed", "step", "ranks"} after
    the load, {"phase": "export"} before the export and, while the files exist, {"phase": "load", "path"}. Raises
    MissingExtraError without torch, TargetExistsError if ``<keep>/merged`` exists, what a save, the load or the export
    raises, and RankFailure if a rank fails otherwise.
    """
    began = time.perf_counter()
    with needing_extra("the demo"):
        import torch  # noqa: F401
    with tempfile.TemporaryDirectory(prefix="statexchange-demo-") as scratch:
        merged = _merged_path(keep or scratch)
        saved = os.path.join(scratch, "saves")
        losses = _train_until_killed(world_size, saved, steps, on_progress)
        args = (saved, merged, steps, _write_config(scratch))
        ranks = _run_ranks(min(world_size, _RESUMED_RANKS), args, on_progress)
        # Now, as the files of a demo without `keep` do not outlive this block: the caller draws them.
        on_progress({"phase": "load", "path": merged})
        facts = ranks[0]["facts"]
        resumed = facts["resumed_step"]
        return DemoReport(
            first_world_size=world_size,
            first_mesh=_mesh_shape(world_size),
            first_losses=tuple(losses),
            world_size=len(ranks),
            mesh=_mesh_shape(len(ranks)),
            losses=(*losses[:resumed], *facts.pop("resumed_losses")),
            **facts,
            **_load(merged, ranks[0]["logits"]),
            mismatches=tuple(sorted({name for rank in ranks for name in rank["mismatches"]})),
            shard_bytes=tuple(rank["shard_bytes"] for rank in ranks),
            files=tuple((name, os.path.getsize(os.path.join(merged, name))) for name in sorted(os.listdir(merged))),
            path=merged if keep else None,
            total_seconds=time.perf_counter() - began,
        )


def _merged_path(directory: str) -> str:
    directory = resolve_path(directory, "keep")
    try:
        directory.encode()
    except UnicodeEncodeError:
        text = "the demo reads its checkpoint with safetensors, which opens paths in UTF-8 only: choose another"
        raise InvalidArgumentError(text, path=directory) from None
    make_path(directory, 0o777)
    target = os.path.join(directory, "merged")
    if os.path.lexists(target):  # the export would refuse it, too, but only after the training
        raise TargetExistsError(
            "the demo's checkpoint already exists: remove it, or choose another directory", path=target
        )
    return target


def _write_config(directory: str) -> str:
    from statexchange.demo_model import LlamaConfig, huggingface_config

    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        json.dump(huggingface_config(LlamaConfig()), file, indent=2)
    return directory


def _train_until_killed(world_size: int, saved: str, steps: int, on_progress: OnProgress) -> list[float]:
    """Train, save half-way and kill all ranks a little later; return their losses."""
    from statexchange.testing.ranks import RankFailure, run_ranks

    losses: list[float] = []

    def on_message(_rank: int, event: dict[str, Any]) -> None:
        losses.append(event["loss"])
        on_progress(event)

    outcomes = run_ranks(
        killed_rank,
        world_size,
        backend="gloo",
        args=(saved, steps),
        timeout_s=_time_limit_s(steps),
        on_message=on_message,
        allow_failure=True,
    )
    # A rank that failed earlier would be taken for one that was killed.
    if any(outcome.exit_code != -signal.SIGKILL for outcome in outcomes):
        text = f"the ranks of the demo's first job were to be killed, and ended otherwise:\n{outcomes}"
        raise RankFailure(text, outcomes=outcomes)
    on_progress({"phase": "killed", "step": len(losses), "ranks": world_size})
    return losses


def _time_limit_s(steps: int) -> float:
    return 120.0 + 3.0 * steps


def _run_ranks(world_size: int, args: tuple[str, str, int, str], on_progress: OnProgress) -> list[dict[str, Any]]:
    from statexchange.testing.ranks import run_ranks

    results = run_ranks(
        demo_rank,
        world_size,
        backend="gloo",
        args=args,
        timeout_s=_time_limit_s(args[2]),
        on_message=lambda _rank, event: on_progress(event),
    )
    if "refused" in results[0]:
        raise from_record(results[0]["refused"])
    return results


def _load(merged: str, reference: list[list[float]]) -> dict[str, Any]:
    """Load the merged checkpoint into an unsharded model by safetensors; return its part of the report."""
    import torch

    from statexchange.demo_model import Llama, LlamaConfig, generate

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
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _merged_tensors(directory: str) -> dict[str, Tensor]:
    """Return the tensors of the merged checkpoint, which safetensors reads."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for name in os.listdir(directory):
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(directory, name))
    return tensors


def _logits(model: Llama) -> Tensor:
    """Return the logits after each prompt, of shape (prompts, vocabulary)."""
    import torch

    from statexchange.demo_model import byte_tokens

    with torch.no_grad():
        return model(torch.stack([byte_tokens(prompt) for prompt in _PROMPTS]))[:, -1]  # type: ignore[no-any-return]


def killed_rank(saved: str, steps: int) -> None:
    """One rank of the job that is killed: train, save to `saved` half-way, go on for some steps, and be killed.

    Collective over torch.distributed's default group, as `demo_rank`.
    """
    import torch.distributed as dist

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
    from statexchange.exchange.export import export_checkpoint
    from statexchange.testing.ranks import report

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


def _mesh_shape(world_size: int) -> tuple[int, int]:
    """Return the (data parallel, tensor parallel) ranks of a job."""
    tensor_parallel = 2 if world_size % 2 == 0 else 1
    return world_size // tensor_parallel, tensor_parallel


def _mesh() -> DeviceMesh:
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", _mesh_shape(get_world_size()), mesh_dim_names=("dp", "tp"))


class _Job:
    """One rank's model, optimizer and saves."""

    def __init__(self, saved: str) -> None:
        import torch

        from statexchange.demo_model import LlamaConfig, new_optimizer, shard_model
        from statexchange.exchange.checkpoints import Checkpoints

        torch.set_num_threads(1)  # the ranks share the host's cores
        self.mesh = _mesh()
        self.model = shard_model(LlamaConfig(), self.mesh)
        self.optimizer = new_optimizer(self.model)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.saves = Checkpoints(saved)

    def train(self, steps: range, total_steps: int) -> tuple[list[float], list[float]]:
        """Train and return the losses and the seconds of the steps. Collective."""
        from statexchange.demo_model import train
        from statexchange.testing.ranks import report

        losses: list[float] = []
        seconds: list[float] = []

        def on_step(step: int, loss: float, elapsed: float) -> None:
            losses.append(loss)
            seconds.append(elapsed)
            if self.mesh.get_rank() == 0:
                report({"phase": "train", "step": step, "loss": loss, "seconds": elapsed})

        train(self.model, self.optimizer, self.mesh, steps, total_steps, on_step)
        return losses, seconds


def _mismatches(state: Mapping[str, DTensor], merged: str) -> Iterator[str]:
    """Yield the names of tensors that differ from the merged ones in any bit. Collective."""
    import torch

    # If FSDP2 and tensor parallelism shard the same dim, full_tensor gathers twice, and torch warns that this is slow.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tensors = _merged_tensors(merged)
    for name, tensor in state.items():
        whole = tensor.full_tensor()  # collective: all ranks call it, whatever they have found so far
        if name not in tensors or not torch.equal(_bytes_of(whole), _bytes_of(tensors[name])):
            yield name


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: as numbers, NaN differ from themselves and -0.0 equals 0.0."""
    import torch

    return tensor.flatten().view(torch.uint8)


def _peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    import resource

    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
