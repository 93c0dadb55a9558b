"""The demo: ranks train a sharded model and export it, then one process loads and checks the checkpoint.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    StateExchangeError,
    StorageError,
    TargetExistsError,
    from_record,
    needing_torch,
    to_record,
)
from statexchange.storage.store import resolve_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from statexchange.demo_model import Llama
    from statexchange.exchange.export import ExportReport

    OnProgress = Callable[[dict[str, Any]], None]

__all__ = ["DemoReport", "demo_rank", "run_demo"]

_PROMPTS = (b"The import statement is ", b"If the class defines an ")  # of equal length, as they form a batch
_GENERATED_BYTES = 160


@dataclass(frozen=True)
class DemoReport:
    """The result of a demo; sizes in bytes, times in seconds.

    `mesh` is (data parallel, tensor parallel) ranks. `mismatches` names the tensors for which a rank's shard, or the
    whole tensor, differs from the merged file in any bit. `logits_error` is the greatest difference between the merged
    model's logits and the sharded model's, relative to the greatest logit. Per rank, `shard_bytes` is the size of its
    shards, and `rank_bytes` the number of bytes that it supplied to the files. `root_peak_growth_bytes` is how much the
    export raised root's peak. `path` is the merged checkpoint, or None if it was not kept.
    """

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
    """Train on `world_size` ranks of this host, export, load in this process, compare, and return a report.

    Not collective; blocks until all ranks have ended, and leaves no process behind. With `keep` the merged
    checkpoint stays in ``<keep>/merged``. `on_progress` gets {"phase": "train", "step", "loss", "seconds"}
    after each step, {"phase": "export"} before the export and, while the files exist, {"phase": "load",
    "path"}. Raises MissingExtraError without torch, TargetExistsError if ``<keep>/merged`` exists, what
    the export raises, and RankFailure if a rank fails otherwise.
    """
    began = time.perf_counter()
    _require_torch()
    with tempfile.TemporaryDirectory(prefix="statexchange-demo-") as scratch:
        merged = _merged_path(keep or scratch)
        ranks = _run_ranks(world_size, (merged, steps, _write_config(scratch)), on_progress)
        on_progress({"phase": "load", "path": merged})
        return DemoReport(
            world_size=world_size,
            **ranks[0]["facts"],
            **_load(merged, ranks[0]["logits"]),
            mismatches=tuple(sorted({name for rank in ranks for name in rank["mismatches"]})),
            shard_bytes=tuple(rank["shard_bytes"] for rank in ranks),
            files=tuple((name, os.path.getsize(os.path.join(merged, name))) for name in sorted(os.listdir(merged))),
            path=merged if keep else None,
            total_seconds=time.perf_counter() - began,
        )


def _require_torch() -> None:
    with needing_torch("the demo"):
        import torch  # noqa: F401


def _merged_path(directory: str) -> str:
    directory = resolve_path(directory, "keep")
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise StorageError.of(error, "make directory", path=directory) from error
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


def _run_ranks(world_size: int, args: tuple[str, int, str], on_progress: OnProgress) -> list[dict[str, Any]]:
    from statexchange.testing.ranks import run_ranks

    def on_message(_rank: int, event: dict[str, Any]) -> None:
        on_progress(event)

    timeout_s = 120.0 + 3.0 * args[1]
    found = run_ranks(demo_rank, world_size, backend="gloo", args=args, timeout_s=timeout_s, on_message=on_message)
    if "refused" in found[0]:
        raise from_record(found[0]["refused"])
    return found


def _load(merged: str, reference: list[list[float]]) -> dict[str, Any]:
    """Load the merged checkpoint into an unsharded model by the safetensors library; return its part of the report."""
    import torch
    from safetensors.torch import load_file

    from statexchange.demo_model import Llama, LlamaConfig, generate

    model = Llama(LlamaConfig())
    state = {name: tensor for path in _weight_files(merged) for name, tensor in load_file(path).items()}
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
    """Let torch use one thread: on busy cores so small a model only waits for its threads, 9 s instead of 0.5 s."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _weight_files(directory: str) -> list[str]:
    return [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if name.endswith(".safetensors")]


def _logits(model: Llama) -> Tensor:
    """Return the logits after each prompt, of shape (prompts, vocabulary)."""
    import torch

    from statexchange.demo_model import byte_tokens

    with torch.no_grad():
        return model(torch.stack([byte_tokens(prompt) for prompt in _PROMPTS]))[:, -1]  # type: ignore[no-any-return]


def demo_rank(out_dir: str, steps: int, config_dir: str) -> dict[str, Any]:
    """One rank's part of the demo: train, export to `out_dir`, compare the rank's shards with the files.

    Collective over torch.distributed's default group, which must be initialised; blocks as long as the demo
    takes. `steps` is the same on all ranks; `config_dir` holds the config.json to publish. Returns JSON values.
    """
    import torch

    from statexchange.demo_model import LlamaConfig, shard_model

    torch.set_num_threads(1)  # the ranks share the host's cores
    mesh = _mesh()
    model = shard_model(LlamaConfig(), mesh)
    losses, seconds = _train(model, mesh, steps)
    logits = _logits(model).tolist()
    peak = _peak_bytes()
    try:
        exported = _export(model, out_dir, config_dir)
    except StateExchangeError as error:  # the same on all ranks: the parent process raises it
        return {"refused": to_record(error, mesh.get_rank(), "export")}
    facts = {
        "mesh": tuple(mesh.shape),
        "losses": tuple(losses),
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


def _mesh() -> DeviceMesh:
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh

    world_size = get_world_size()
    tensor_parallel = 2 if world_size % 2 == 0 else 1
    shape = (world_size // tensor_parallel, tensor_parallel)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def _train(model: Llama, mesh: DeviceMesh, steps: int) -> tuple[list[float], list[float]]:
    from statexchange.demo_model import train
    from statexchange.testing.ranks import report

    losses: list[float] = []
    seconds: list[float] = []

    def on_step(step: int, loss: float, elapsed: float) -> None:
        losses.append(loss)
        seconds.append(elapsed)
        if mesh.get_rank() == 0:
            report({"phase": "train", "step": step, "loss": loss, "seconds": elapsed})

    train(model, mesh, steps, on_step)
    if mesh.get_rank() == 0:
        report({"phase": "export"})
    return losses, seconds


def _export(model: Llama, out_dir: str, config_dir: str) -> ExportReport:
    from statexchange.exchange.export import export_checkpoint

    return export_checkpoint(model, out_dir, files_from=config_dir)


@contextlib.contextmanager
def _merged_slices(merged: str) -> Iterator[dict[str, Any]]:
    """Yield safetensors' lazy slice of each merged tensor; indexing one reads that region."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in _weight_files(merged)]
        yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def _mismatches(state: Mapping[str, DTensor], merged: str) -> Iterator[str]:
    """Yield the names of tensors whose shard here, or whole, differs from the merged one in any bit. Collective."""
    # If FSDP2 and tensor parallelism shard the same dim, full_tensor gathers twice, and torch warns that this is slow.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with _merged_slices(merged) as slices:
        for name, tensor in state.items():
            whole = tensor.full_tensor()  # collective: all ranks call it, whatever they have found so far
            if name not in slices or not (_same_bits(whole, slices[name][:]) and _same_shard(tensor, slices[name])):
                yield name


def _same_shard(tensor: DTensor, merged: Any) -> bool:
    local = tensor.to_local()
    if not local.numel():
        return True
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return _same_bits(local, merged[tuple(slice(start, start + size) for start, size in ends)])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    import torch

    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


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
