"""The launcher's description of a process, from environments of real launchers."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import statexchange as sx
from statexchange import settings
from statexchange.errors import InvalidArgumentError
from statexchange.settings import Launch, detect_launch

LAUNCHER_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "OMPI_",
    "PMI_",
    "MPI_",
    "SLURM_",
    "MASTER_",
    "TORCHELASTIC_",
    "STATEXCHANGE_",
    "NO_COLOR",
)


def launch(monkeypatch: pytest.MonkeyPatch, **variables: Any) -> Launch:
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return detect_launch()


def test_no_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(monkeypatch) == Launch("none", 0, 1, 0, 1, "")
    assert launch(monkeypatch, RANK="3").launcher == "none"
    assert launch(monkeypatch, RANK="x", WORLD_SIZE="4").launcher == "none"


def test_torchrun_has_priority_over_the_launcher_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"PMI_RANK": 1, "PMI_SIZE": 2, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2}
    inner = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    assert launch(monkeypatch, **outer, **inner) == Launch("torchrun", 5, 8, 1, 4, "WORLD_SIZE")
    assert launch(monkeypatch, **outer).launcher == "mpich"


def test_open_mpi_sets_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
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


STEP = {"SLURM_JOB_ID": 77, "SLURM_STEP_ID": 2, "SLURM_PROCID": 6, "SLURM_STEP_NUM_TASKS": 8, "SLURM_LOCALID": 2}


def test_the_coordinator_of_a_slurm_step_is_its_first_host_with_a_port_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = launch(monkeypatch, **STEP, SLURM_STEP_NODELIST="node[009-010,3],x", SLURM_STEP_NUM_NODES=4)
    assert found.master is not None
    host, port = found.master
    assert host == "node009"
    assert 16_384 <= port < 32_768
    other_step = launch(monkeypatch, **{**STEP, "SLURM_STEP_ID": 3}, SLURM_STEP_NODELIST="node[009-010]")
    assert other_step.master is not None
    assert other_step.master[1] != port
    assert launch(monkeypatch, **STEP, SLURM_STEP_NODELIST="node9", SLURM_STEP_NUM_NODES=1).master == (
        "localhost",
        port,
    )
    reserved = launch(monkeypatch, **STEP, SLURM_STEP_NODELIST="a,b", SLURM_STEP_RESV_PORTS="12003-12004,12007")
    assert reserved.master == ("a", 12003)


def test_variables_of_the_job_script_have_priority_over_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {**STEP, "SLURM_STEP_NODELIST": "a,b"}
    assert launch(monkeypatch, **step, MASTER_ADDR="10.0.0.9", MASTER_PORT=4711).master == ("10.0.0.9", 4711)
    assert launch(monkeypatch, **step, MASTER_PORT=4711).master == ("a", 4711)
    assert launch(monkeypatch, **STEP).master is None
    assert launch(monkeypatch, **STEP, SLURM_STEP_NODELIST="a[1-").master is None


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node[001-003,7],other", "node001"),
        ("n[08-10,3]-ib,login.cluster", "n08-ib"),
        ("rack[0-1]-[00-01]", "rack0-00"),
        ("a", "a"),
    ],
)
def test_the_first_host_of_a_list_of_slurm_is_the_master(monkeypatch: pytest.MonkeyPatch, text: str, host: str) -> None:
    master = launch(monkeypatch, **STEP, SLURM_STEP_NODELIST=text).master
    assert master is not None
    assert master[0] == host


@pytest.mark.parametrize("text", ["", ",", "a,", "a[", "a]", "a[]", "a[1-]", "a[1,]", "a b"])
def test_invalid_host_lists_are_not_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert launch(monkeypatch, **STEP, SLURM_STEP_NODELIST=text).master is None


def test_a_launcher_that_gives_no_local_rank_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(monkeypatch, PMI_RANK=1, PMI_SIZE=2).local_rank is None
    assert launch(monkeypatch, PMI_RANK=0, PMI_SIZE=1).local_rank == 0
    launch(monkeypatch, PMI_RANK=1, PMI_SIZE=2)
    with pytest.raises(sx.errors.NotInitializedError, match=r"PMI_SIZE=2.*init"):
        sx.comm.get_local_rank()


INVALID_DEADLINES = (0, -1, 0.0, float("nan"), "5", True, [1], float("-inf"))


@pytest.mark.parametrize("wrong", INVALID_DEADLINES)
def test_a_deadline_is_a_number_of_seconds_above_0(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^x_s must be"):
        settings.check_timeout(wrong, "x_s")
    if wrong == 0:
        assert settings.check_timeout(wrong, zero=True) == 0
    else:
        with pytest.raises(InvalidArgumentError, match=r"^timeout_s must be"):
            settings.check_timeout(wrong, zero=True)


INF = float("inf")


@pytest.mark.parametrize(
    ("given", "seconds"), [(1, 1), (0.5, 0.5), (np.float32(2), 2), (np.int64(3), 3), (INF, INF), (10**400, INF)]
)
def test_every_number_above_0_is_a_deadline(given: Any, seconds: float) -> None:
    assert settings.check_timeout(given) == seconds


def job(monkeypatch: pytest.MonkeyPatch, name: str, restart: int = 0) -> str | None:
    return launch(monkeypatch, RANK=0, WORLD_SIZE=1, TORCHELASTIC_RUN_ID=name, TORCHELASTIC_RESTART_COUNT=restart).job


def test_a_job_is_identified_by_id_and_restart_and_never_by_the_default_id(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_timeout_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch)
    assert (settings.default_timeout_s(), settings.no_color()) == (300.0, False)
    launch(monkeypatch, STATEXCHANGE_TIMEOUT_S="1.5", NO_COLOR="1")
    assert (settings.default_timeout_s(), settings.no_color()) == (1.5, True)


def test_importing_settings_reads_no_environment() -> None:
    program = (
        "import os, builtins; os.environ = None; import statexchange.settings, statexchange.errors, statexchange.values"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
