"""What launchers say of a process, read from real processes' environments."""

import os
import subprocess
import sys
from typing import Any

import pytest

from statexchange import settings
from statexchange.errors import InvalidArgumentError
from statexchange.settings import Launch, detect_launch

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "OMPI_",
    "PMI_",
    "MPI_",
    "SLURM_",
    "TORCHELASTIC_",
    "STATEXCHANGE_",
    "NO_COLOR",
)


def launch(monkeypatch: pytest.MonkeyPatch, **variables: Any) -> Launch:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return detect_launch()


def test_no_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(monkeypatch) == Launch("none", 0, 1, 0, 1, "")
    assert launch(monkeypatch, RANK="3").launcher == "none"
    assert launch(monkeypatch, RANK="x", WORLD_SIZE="4").launcher == "none"


def test_torchrun_is_believed_before_the_launcher_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"PMI_RANK": 1, "PMI_SIZE": 2, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2}
    inner = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    assert launch(monkeypatch, **outer, **inner) == Launch("torchrun", 5, 8, 1, 4, "WORLD_SIZE")
    assert launch(monkeypatch, **outer).launcher == "mpich"


def test_open_mpi_tells_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "OMPI_COMM_WORLD_"
    found = launch(
        monkeypatch, **{prefix + k: v for k, v in {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items()}
    )
    assert found == Launch("openmpi", 3, 4, 1, 2, prefix + "SIZE")


def test_a_batch_script_is_one_process_and_a_step_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"SLURM_JOB_ID": 77, "SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_LOCALID": 0}
    assert launch(monkeypatch, **batch).world_size == 1
    step = {**batch, "SLURM_STEP_NUM_TASKS": 8, "SLURM_STEP_ID": 2, "SLURM_PROCID": 6, "SLURM_NTASKS_PER_NODE": 4}
    assert launch(monkeypatch, **step) == Launch("slurm", 6, 8, 0, 4, "SLURM_STEP_NUM_TASKS", "slurm-77-2-0")


def job(monkeypatch: pytest.MonkeyPatch, name: str, restart: int = 0) -> str | None:
    return launch(monkeypatch, RANK=0, WORLD_SIZE=1, TORCHELASTIC_RUN_ID=name, TORCHELASTIC_RESTART_COUNT=restart).job


def test_a_job_is_known_by_name_and_restart_and_never_by_the_default_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job(monkeypatch, "none") is None
    assert job(monkeypatch, "job-1", 2) == "job-1-2"


def test_odd_job_names_become_file_names_that_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ["../../etc", "..", "a/b", "a b", "ü" * 300, "-", "x" * 300, "x" * 301]
    names = [job(monkeypatch, name) for name in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        assert name is not None
        assert name[0] not in ".-"
        assert "/" not in name
        assert len(name) < 120


@pytest.mark.parametrize("text", ["soon", "", "-1", "0", "nan"])
def test_a_bad_timeout_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("STATEXCHANGE_TIMEOUT_S", text)
    with pytest.raises(InvalidArgumentError, match="STATEXCHANGE_TIMEOUT_S"):
        settings.default_timeout_s()


def test_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch)
    assert (settings.default_timeout_s(), settings.no_color()) == (300.0, False)
    launch(monkeypatch, STATEXCHANGE_TIMEOUT_S="1.5", NO_COLOR="1")
    assert (settings.default_timeout_s(), settings.no_color()) == (1.5, True)


def test_importing_reads_nothing() -> None:
    program = (
        "import os, builtins; os.environ = None; import statexchange.settings, statexchange.errors, statexchange.values"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
