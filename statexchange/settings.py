"""The only reader of the process environment: what launcher started us, and the few knobs we have."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Launch", "default_timeout_s", "detect_launch", "no_color"]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher's environment says of this process.

    `launcher` is "torchrun", "openmpi", "mpich", "slurm" or "none"; `variable` is the environment variable that
    gave `world_size`. `job` identifies the job and its restart across all its ranks, or is None where the launcher
    gives no trustworthy identity.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    variable: str
    job: str | None = None


_SINGLE = Launch("none", 0, 1, 0, 1, "")

# In the order in which they are believed: torchrun may run under mpiexec, and mpiexec under Slurm.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _job(launcher: str) -> str | None:
    if launcher == "torchrun":
        # torchrun's default id is the constant "none": two jobs in one directory would share it.
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return None if name == "none" else f"{name}-{_number('TORCHELASTIC_RESTART_COUNT', 0)}"
    if "SLURM_JOB_ID" in os.environ:
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + "-".join(str(_number(part, 0)) for part in parts)
    return None


def detect_launch() -> Launch:
    """The launcher of this process, by its environment; a world of one if there is none. Not collective."""
    for launcher, rank, size, local_rank, local_size in _VARIABLES:
        if os.environ.get(rank, "").isdecimal() and os.environ.get(size, "").isdecimal():
            world_size = _number(size, 1)
            return Launch(
                launcher,
                _number(rank, 0),
                world_size,
                _number(local_rank, 0),
                _number(local_size, world_size),
                size,
                _job(launcher),
            )
    return _SINGLE


def default_timeout_s() -> float:
    """Seconds that a wait for peers may take: STATEXCHANGE_TIMEOUT_S, else 300."""
    return float(os.environ.get("STATEXCHANGE_TIMEOUT_S", "300"))


def no_color() -> bool:
    """Whether NO_COLOR asks for plain text."""
    return bool(os.environ.get("NO_COLOR"))
