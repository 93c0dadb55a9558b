"""The only reader of the process environment: what launcher started us, and the few knobs we have."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass

from statexchange.errors import InvalidArgumentError

__all__ = ["Launch", "default_timeout_s", "detect_launch", "gloo_interface", "has_agent_store", "no_color"]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher's environment says of this process.

    `launcher` is "torchrun", "openmpi", "mpich", "slurm" or "none"; `variable` is the environment variable
    that gave `world_size`. `job` identifies the job and its restart across all its ranks, and is fit to be a
    file name; it is None where the launcher gives no trustworthy identity. `master` is the host and port of
    MASTER_ADDR and MASTER_PORT, where they are set.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    variable: str
    job: str | None = None
    master: tuple[str, int] | None = None


_SINGLE = Launch("none", 0, 1, 0, 1, "")

# In the order in which they are believed: torchrun may run under mpiexec, and mpiexec under Slurm. A batch script
# alone has SLURM_NTASKS too, but is one process; only srun sets SLURM_STEP_NUM_TASKS.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _job(launcher: str) -> str | None:
    if launcher == "torchrun":
        # torchrun's default id is the constant "none": two jobs in one directory would share it.
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return None if name == "none" else f"{_file_name(name)}-{_number('TORCHELASTIC_RESTART_COUNT', 0)}"
    if "SLURM_JOB_ID" in os.environ:
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + "-".join(str(_number(part, 0)) for part in parts)
    return None


def _master() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)
    return (host, port) if host and port else None


def _file_name(text: str) -> str:
    """`text` where it is fit to be a file name, else with a hash that keeps two such texts apart."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", text):
        return text
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", text)[:80]
    digest = hashlib.blake2b(os.fsencode(text), digest_size=6).hexdigest()
    return f"{plain.lstrip('-') or 'job'}-{digest}"


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
                _master(),
            )
    return _SINGLE


def default_timeout_s() -> float:
    """Seconds that a wait for peers may take: STATEXCHANGE_TIMEOUT_S, else 300."""
    text = os.environ.get("STATEXCHANGE_TIMEOUT_S", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InvalidArgumentError(f"STATEXCHANGE_TIMEOUT_S must be a number of seconds above 0, not {text!r}")
    return seconds


def has_agent_store() -> bool:
    """Whether torchrun serves a store for its ranks; not so where a script sets RANK and WORLD_SIZE itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def gloo_interface() -> str | None:
    """Return the network interface that GLOO_SOCKET_IFNAME names, the first of several; None if it is not set."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip() or None


def no_color() -> bool:
    """Whether NO_COLOR asks for plain text."""
    return bool(os.environ.get("NO_COLOR"))
