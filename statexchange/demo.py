"""The main job as a program: ranks train, are killed, resume on fewer ranks and export; one process checks the result.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import InvalidArgumentError, TargetExistsError, from_record, needing_extra
from statexchange.storage.files import make_path
from statexchange.storage.location import resolve_path
from statexchange.testing.ranks import RankFailure, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    OnProgress = Callable[[dict[str, Any]], None]

_RESUMED_RANKS = 2


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
    from statexchange.demo_model import mesh_shape, write_config
    from statexchange.demo_ranks import demo_rank, killed_rank, load_merged

    with tempfile.TemporaryDirectory(prefix="statexchange-demo-") as scratch:
        merged = _merged_path(keep or scratch)
        saved = os.path.join(scratch, "saves")
        losses = _train_until_killed(killed_rank, world_size, saved, steps, on_progress)
        write_config(scratch)
        ranks = run_ranks(
            demo_rank,
            min(world_size, _RESUMED_RANKS),
            backend="gloo",
            args=(saved, merged, steps, scratch),
            timeout_s=_time_limit_s(steps),
            on_message=lambda _rank, event: on_progress(event),
        )
        if "refused" in ranks[0]:
            raise from_record(ranks[0]["refused"])
        # Now, as the files of a demo without `keep` do not outlive this block: the caller draws them.
        on_progress({"phase": "load", "path": merged})
        facts = ranks[0]["facts"]
        resumed = facts["resumed_step"]
        return DemoReport(
            first_world_size=world_size,
            first_mesh=mesh_shape(world_size),
            first_losses=tuple(losses),
            world_size=len(ranks),
            mesh=mesh_shape(len(ranks)),
            losses=(*losses[:resumed], *facts.pop("resumed_losses")),
            **facts,
            **load_merged(merged, ranks[0]["logits"]),
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


def _train_until_killed(
    killed_rank: Callable[..., None], world_size: int, saved: str, steps: int, on_progress: OnProgress
) -> list[float]:
    """Train, save half-way and kill all ranks a little later; return their losses."""
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
