"""Read the process environment: the launcher and our few settings. No other module reads it. Also check timeouts."""

from __future__ import annotations

import math
import numbers
import os
import re
from dataclasses import dataclass

from statexchange.errors import InvalidArgumentError, excerpt


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's rank and job according to its launcher's environment.

    Attributes:
        launcher: "torchrun", "openmpi", "mpich", "slurm" or "none".
        rank: the rank in the job.
        world_size: number of ranks.
        local_rank: the rank on this host; None if a launcher of several ranks does not give it.
        local_world_size: number of ranks on this host; `world_size` if the launcher does not give it.
        variable: name of the environment variable that has `world_size`.
        job: identifies the job and its restart on all its ranks, as a valid file name; None if the launcher gives no
            reliable identity.
        master: host and port at which rank 0 may listen: MASTER_ADDR and MASTER_PORT if they are set; under Slurm
            otherwise the step's first host and a port computed for the step.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int
    variable: str
    job: str | None = None
    master: tuple[str, int] | None = None


# Above the ports of well-known services, and below those that Linux gives to clients, from 32,768 on
_FIRST_PORT, _PORTS = 16_384, 16_384
# One host or range of hosts of a Slurm host list, such as n[08-10,3]-ib, and the whole list
_HOST = r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_HOST_LIST = re.compile(rf"({_HOST})(?:,{_HOST})*")

_SINGLE = Launch("none", 0, 1, 0, 1, "")

# In order of precedence: torchrun may run under mpiexec, and mpiexec under Slurm. SLURM_STEP_NUM_TASKS is set only by
# srun; SLURM_NTASKS is also set in a batch script, which is a single process.
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
        # torchrun's default id is the constant "none", which two jobs in one directory would share.
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return None if name == "none" else f"{_file_name(name)}-{_number('TORCHELASTIC_RESTART_COUNT', 0)}"
    if "SLURM_JOB_ID" in os.environ:
        # A job that is requeued keeps its id, and each srun of it is a step of its own.
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + "-".join(str(_number(part, 0)) for part in parts)
    return None


def _master(launcher: str) -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)
    if launcher == "slurm":
        host, port = host or _first_host_of_step(), port or _port_of_step()
    return (host, port) if host and port else None


def _first_host_of_step() -> str:
    """Return the host of task 0 of this Slurm step, n08-ib for "n[08-10,3]-ib,login"; "" if it is not set."""
    if _number("SLURM_STEP_NUM_NODES", 0) == 1:
        return "localhost"  # works without a name service
    hosts = _HOST_LIST.fullmatch(os.environ.get("SLURM_STEP_NODELIST", ""))
    return "" if hosts is None else re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts[1])


def _port_of_step() -> int:
    """Return a port that is equal on all tasks of a Slurm step and probably not used by other steps.

    It is the first port that Slurm has reserved for the step (`srun --resv-ports`); otherwise it is computed from the
    ids of job and step, below Linux's range of ephemeral ports.
    """
    reserved = re.match(r"\d+", os.environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved:
        return int(reserved[0])
    job, step = _number("SLURM_JOB_ID", 0), _number("SLURM_STEP_ID", 0)
    digest = _digest(f"{job}.{step}".encode(), 8)
    return _FIRST_PORT + int.from_bytes(digest, "little") % _PORTS


def _digest(data: bytes, nbytes: int) -> bytes:
    import hashlib  # loads OpenSSL, which most commands do not need

    return hashlib.blake2b(data, digest_size=nbytes).digest()


def _file_name(text: str) -> str:
    """Return `text` if it is a plain file name, else a plain name with a hash of it, which keeps names distinct."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", text):
        return text
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", text)[:80]
    digest = _digest(os.fsencode(text), 6).hex()
    return f"{plain.lstrip('-') or 'job'}-{digest}"


def detect_launch() -> Launch:
    """Return the launch that this process's environment describes; a single rank without a launcher. Not collective."""
    for launcher, rank, size, local_rank, local_size in _VARIABLES:
        if os.environ.get(rank, "").isdecimal() and os.environ.get(size, "").isdecimal():
            world_size = _number(size, 1)
            # With several ranks it is not guessed: two ranks of a host would use one device.
            is_local_known = world_size == 1 or os.environ.get(local_rank, "").isdecimal()
            return Launch(
                launcher,
                _number(rank, 0),
                world_size,
                _number(local_rank, 0) if is_local_known else None,
                _number(local_size, world_size),
                size,
                _job(launcher),
                _master(launcher),
            )
    return _SINGLE


def default_timeout_s() -> float:
    """Return the default timeout of waits for other ranks, in seconds: STATEXCHANGE_TIMEOUT_S, else 300."""
    text = os.environ.get("STATEXCHANGE_TIMEOUT_S", "300")
    try:
        seconds: object = float(text)
    except ValueError:
        seconds = text  # refused below, with the message for any other value
    return check_timeout(seconds, "STATEXCHANGE_TIMEOUT_S")


def _as_float(number: numbers.Real) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond the largest float
        return -math.inf if number < 0 else math.inf


def check_timeout(seconds: object, name: str = "timeout_s", *, zero: bool = False) -> float:
    """Return a timeout in seconds, which is above 0; inf means no limit.

    Not collective.

    Args:
        seconds: the value that the caller gave.
        name: the argument's name for the message.
        zero: also allow 0, which means no waiting.

    Raises:
        InvalidArgumentError: it is not a number, is NaN, or is out of range.
    """
    if isinstance(seconds, numbers.Real) and not isinstance(seconds, bool):
        value = _as_float(seconds)
        if value > 0 or (zero and value == 0):
            return value
    least = "of at least 0" if zero else "above 0"
    raise InvalidArgumentError(f"{name} must be a number of seconds {least}, not {seconds!r}")


def check_flags(**flags: object) -> None:
    """Raise InvalidArgumentError unless all arguments are True or False: "no" would count as true. Not collective."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name} must be True or False, not {excerpt(value)}")


def has_agent_store() -> bool:
    """Whether torchrun serves a store for its ranks; False if a script sets RANK and WORLD_SIZE itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def limit_blas_threads() -> None:
    """Let numpy start without the threads of OpenBLAS, which spin for 50 to 100 ms, unless OPENBLAS_NUM_THREADS is set.

    For a process that multiplies no large matrices. Call it before the first import of numpy.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def no_color() -> bool:
    """Whether NO_COLOR is set."""
    return bool(os.environ.get("NO_COLOR"))
