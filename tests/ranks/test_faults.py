"""A fault on one rank is the same named error on all; the old target stays, and the next run succeeds.

The faults are real: signals, limits, missing rights, files that vanish, and errors and signals that strace injects at
system calls. The error comes long before the deadline of a communicator, 300 s: `run_ranks` waits for 120 s at most.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import LAYOUT, LEFT, Trapped, state_of, strike
from programs import require
from safetensors.torch import load_file
from stored import contents_of
from sweeps import by_default, slow
from tracing import trace_this_process

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

RANKS = 3
SAVES = ("save", "async save")


class TrappedPath:
    """A path that runs an action when root reads it, in planning."""

    def __init__(self, path: str, action: Any) -> None:
        self.path = path
        self.action = action

    def __fspath__(self) -> str:
        self.action()
        return self.path


def under_strace(call: str, what: str, when: int, path: str | None = None) -> None:
    """Inject a fault at the n-th system call of one kind in this process, of those on `path` if that is given."""
    mine = [] if path is None else ["-P", path]
    trace_this_process("-o", "/dev/null", "-e", f"trace={call}", *mine, "-e", f"inject={call}:{what}:when={when}")


def close_fails(out: str, how: str) -> None:
    """Make close() fail for the file that this process is writing for an export."""
    under_strace("close", how, 1, str(next(Path(out).parent.glob(".*.partial/model.safetensors"))))


def act(verb: str, out: str, state: Any, options: dict[str, Any]) -> None:
    if verb == "export":
        sx.export_checkpoint(state, out, layout=LAYOUT, overwrite=True, **options)
    elif verb == "async":
        sx.export_checkpoint(state, out, layout=LAYOUT, overwrite=True, background=True, **options).result(60)
    elif verb == "save":
        sx.save_checkpoint(state, out, overwrite=True)
    elif verb == "async save":
        sx.save_checkpoint(state, out, overwrite=True, background=True).result(60)
    else:
        sx.load_checkpoint(state, out)


def live_state() -> dict[str, torch.Tensor]:
    """Return zeros to load an export of RANKS ranks into."""
    return {"rows": torch.zeros(30, 100), "same": torch.zeros(7), **{f"own{r}": torch.zeros(50) for r in range(RANKS)}}


def runs_into(verb: str, out: str, rank: int, at: str, how: str, when: int) -> list[str]:
    """Run the operation while a fault happens to `rank`; return the type and text of the error.

    The fault happens in the rank's state, in on_progress, in files_from, or at a system call.
    """
    comm = sx.get_communicator()
    mine = comm.rank == rank
    state: Any = state_of(comm.rank, 2.0, RANKS)
    options: dict[str, Any] = {}
    if verb == "load":
        state = live_state()
    if at == "state":
        state = Trapped(state, lambda: strike(how) if mine else None)
    elif at == "progress":
        options = {"on_progress": lambda done, total: strike(how) if mine and done == total else None}
    elif at == "files_from":
        options = {"files_from": TrappedPath(os.path.dirname(__file__), lambda: strike(how, after_s=0.1))}
    elif at == "while root publishes":
        if comm.rank == 0:
            under_strace("renameat2", "delay_enter=800000", 1)
        later = threading.Timer(0.4, strike, [how])
        options = {"on_progress": lambda done, total: later.start() if mine and done == total else None}
    elif at == "close" and mine:
        options = {"on_progress": lambda done, total: close_fails(out, how) if done == total else None}
    elif at == "size" and mine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    elif at == "rights":
        with tempfile.TemporaryDirectory() as elsewhere:
            first = comm.broadcast_object(elsewhere)
            act(verb, f"{first}/out", state, {})  # a process that loses its rights cannot import modules
            comm.barrier()
        if mine:
            os.seteuid(65534)
    elif mine:
        under_strace(at, how, when, f"{out}/model.safetensors" if verb == "load" else None)
    comm.barrier()
    try:
        act(verb, out, state, options)
    except BaseException as error:  # noqa: BLE001 (an interrupt, too)
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def value_of(verb: str, out: Path) -> float:
    """Return the value that fills all tensors of a target, after reading and checking all of it."""
    assert not verify(out).findings
    if verb in SAVES:
        whole = {**live_state(), "rows": torch.zeros(10, 100)}  # saved without a layout: equal copies of ten rows
        sx.load_checkpoint(whole, out)
        found = list(whole.values())
    else:
        found = list(load_file(out / "model.safetensors").values())
        assert [tuple(t.shape) for t in found].count((30, 100)) == 1
    (value,) = {float(v) for tensor in found for v in tensor.flatten()}
    return value


def prepares(verb: str, out: str) -> None:
    act(verb, out, state_of(sx.get_communicator().rank, 1.0, RANKS), {})


def next_run(verb: str, out: str) -> None:
    comm = sx.get_communicator()
    act(verb, out, state_of(comm.rank, 3.0, RANKS), {})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the targets as they were before the fault."""
    path = tmp_path_factory.mktemp("before")
    for verb in ("export", "save"):
        run_ranks(prepares, RANKS, args=(verb, str(path / verb)))
    return path


def target(prepared: Path, verb: str, tmp_path: Path) -> Path:
    """Return a copy of a prepared target, alone in its directory."""
    shutil.copytree(prepared / ("save" if verb in SAVES else "export"), tmp_path / "place" / "out")
    return tmp_path / "place" / "out"


def left_beside(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir() if p.name != out.name)


def run_next(verb: str, out: Path) -> None:
    """Check that the next run succeeds as if nothing had happened."""
    run_ranks(next_run, RANKS, args=(verb, str(out)))
    assert value_of(verb, out) == 3.0
    assert left_beside(out) == []


def needs_strace(at: str, how: str) -> None:
    """Skip the test if its fault is at a system call and strace is missing."""
    if at == "while root publishes" or "=" in how:
        require("strace")


CALLS = {
    "export": "export_checkpoint",
    "async": "export_checkpoint",
    "save": "save_checkpoint",
    "async save": "save_checkpoint",
    "load": "load_checkpoint",
}

# A killed rank

KILL = "signal=SIGKILL"
KILLED = [
    ("export", 1, "state", "kill", 0, "the end of describing its state"),
    ("export", 0, "files_from", "kill", 0, "the end of planning"),
    ("export", 0, "fallocate", KILL, 1, "the end of planning"),
    ("export", 0, "progress", "kill", 0, "the end of writing"),
    ("export", 2, "progress", "kill", 0, "the end of writing"),
    ("export", 2, "fsync", KILL, 1, "the end of writing"),
    ("export", 1, "while root publishes", "kill", 0, ""),
    ("export", 0, "renameat2", KILL, 1, "the end of publishing"),
    ("export", 0, "linkat", KILL, 1, "the end of publishing"),
    ("export", 0, "renameat2", KILL, 2, "the end of publishing"),
    ("async", 1, "state", "kill", 0, "the end of taking a snapshot"),
    ("async", 2, "progress", "kill", 0, "the end of writing"),
    ("async", 0, "renameat2", KILL, 1, "the end of publishing"),
    ("save", 1, "state", "kill", 0, "the end of describing its state"),
    ("save", 1, "pwrite64", KILL, 1, "the end of saving"),
    ("save", 2, "linkat", KILL, 1, "the end of saving"),
    ("save", 0, "linkat", KILL, 2, "the end of publishing"),
    ("load", 1, "state", "kill", 0, "the end of finding its tensors"),
    ("load", 1, "preadv,preadv2", KILL, 1, "the end of reading the headers"),
    ("load", 0, "preadv,preadv2", KILL, 3, "the end of reading"),
    ("save", 0, "renameat2", KILL, 1, "the end of publishing"),
    ("save", 0, "renameat2", KILL, 2, "the end of publishing"),
    ("async save", 1, "state", "kill", 0, "the end of taking a snapshot"),
    ("async save", 2, "linkat", KILL, 1, "the end of saving"),
]
PUBLISHED = [("while root publishes", 0), ("renameat2", 2)]  # `at`, `when`: after the two directories were exchanged


@pytest.mark.parametrize(
    ("verb", "rank", "at", "how", "when", "phase"), by_default(KILLED, 1, 6, 7, 11, 14, 16, 19, 20, 23)
)
def test_a_killed_rank_is_named_by_the_others_and_the_next_run_succeeds(
    verb: str, rank: int, at: str, how: str, when: int, phase: str, prepared: Path, tmp_path: Path
) -> None:
    needs_strace(at, how)
    out = target(prepared, verb, tmp_path)
    before = contents_of(out)
    outcomes = run_ranks(
        runs_into, RANKS, backend="gloo", args=(verb, str(out), rank, at, how, when), allow_failure=True, timeout_s=120
    )
    assert outcomes[rank].exit_code == -signal.SIGKILL, str(outcomes)
    raised = [outcomes[survivor].value for survivor in range(RANKS) if survivor != rank]
    text = f"rank {rank} on {platform.node()} failed in {CALLS[verb]} ({phase}"
    assert all(": its process " in message and message.endswith(" died") for _, message in raised), raised
    assert all(kind == "PeerError" and message.startswith(text) for kind, message in raised), raised
    assert value_of(verb, out) == (2.0 if (at, when) in PUBLISHED else 1.0)
    if verb == "load":
        assert (contents_of(out), left_beside(out)) == (before, [])
        return
    if (at, when) not in PUBLISHED:
        assert {name: data for name, data in contents_of(out).items() if name in before} == before
    assert all(name.endswith(LEFT) for name in left_beside(out))
    run_next(verb, out)


def runs_into_over_mpi(out: str, rank: int) -> None:
    comm = sx.init("mpi")

    def progress(done: int, total: int) -> None:
        if comm.rank == rank and done == total:
            strike("kill")

    sx.export_checkpoint(state_of(comm.rank, 2.0, RANKS), out, layout=LAYOUT, overwrite=True, on_progress=progress)


@pytest.mark.slow
def test_a_killed_rank_ends_the_mpi_job(prepared: Path, tmp_path: Path) -> None:
    out = target(prepared, "export", tmp_path)
    before = contents_of(out)
    outcomes = run_ranks(
        runs_into_over_mpi, RANKS, backend="mpi", args=(str(out), 1), allow_failure=True, timeout_s=120
    )
    assert not any(outcome.state in ("ok", "running") for outcome in outcomes)
    assert contents_of(out) == before
    run_next("export", out)


# A rank that fails, is interrupted, or whose system calls fail


def check_failure(raised: list[Any], out: Path, before: dict[str, bytes | None], verb: str) -> None:
    """Check that all ranks raised one error, that nothing has changed or is left, and that the next run succeeds."""
    assert all(error == raised[0] for error in raised), raised
    assert contents_of(out) == before
    assert left_beside(out) == []
    if verb != "load":
        run_next(verb, out)


RAISED = [
    ("export", 1, "state", "describing its state"),
    ("export", 0, "files_from", "planning"),
    ("export", 0, "progress", "writing"),
    ("export", 2, "progress", "writing"),
    ("async", 1, "state", "taking a snapshot"),
    ("async", 0, "files_from", "planning"),
    ("async", 2, "progress", "writing"),
    ("save", 1, "state", "describing its state"),
    ("load", 1, "state", "finding its tensors"),
    ("async save", 1, "state", "taking a snapshot"),
]


@pytest.mark.parametrize(("verb", "rank", "at", "phase"), by_default(RAISED, 1, 6, 7, 8, 9))
def test_an_exception_of_the_users_code_is_raised_on_all_ranks_and_changes_nothing(
    verb: str, rank: int, at: str, phase: str, prepared: Path, tmp_path: Path
) -> None:
    out = target(prepared, verb, tmp_path)
    before = contents_of(out)
    raised = run_ranks(runs_into, RANKS, backend="gloo", args=(verb, str(out), rank, at, "raise", 0))
    message = f"rank {rank} on {platform.node()} failed in {CALLS[verb]} ({phase}): ZeroDivisionError: oops"
    assert raised[0] == ["PeerError", message]
    check_failure(raised, out, before, verb)


@pytest.mark.parametrize(
    ("verb", "rank", "at"),
    [
        slow("export", 0, "progress"),
        ("export", 2, "progress"),
        slow("export", 1, "state"),
        slow("save", 1, "state"),
        ("load", 1, "state"),
    ],
)
def test_ctrl_c_on_one_rank_is_named_by_the_others_and_changes_nothing(
    verb: str, rank: int, at: str, prepared: Path, tmp_path: Path
) -> None:
    out = target(prepared, verb, tmp_path)
    before = contents_of(out)
    raised = run_ranks(runs_into, RANKS, backend="gloo", args=(verb, str(out), rank, at, "interrupt", 0))
    assert raised.pop(rank)[0] == "KeyboardInterrupt"
    assert raised[0][0] == "PeerError"
    assert raised[0][1].startswith(f"rank {rank} on {platform.node()} failed in ")
    assert "KeyboardInterrupt" in raised[0][1]
    check_failure(raised, out, before, verb)


REFUSED = [
    ("export", 0, "fallocate", "error=ENOSPC", 1, "No space left on device"),
    ("export", 2, "fsync", "error=EIO", 1, "Input/output error"),
    ("export", 2, "fsync", "error=ENOSPC", 1, "No space left on device"),
    ("export", 1, "close", "error=ENOSPC", 1, "No space left on device"),
    ("export", 0, "linkat", "error=EIO", 1, "Input/output error"),
    ("export", 0, "size", "", 0, "File too large"),
    ("async", 0, "fallocate", "error=ENOSPC", 1, "No space left on device"),
    ("save", 1, "fallocate", "error=ENOSPC", 1, "No space left on device"),
    ("save", 1, "size", "", 0, "File too large"),
    ("save", 2, "fsync", "error=EIO", 2, "Input/output error"),
    ("save", 0, "linkat", "error=ENOSPC", 2, "No space left on device"),
    ("load", 1, "preadv,preadv2", "error=EIO", 1, "Input/output error"),
    ("load", 0, "preadv,preadv2", "error=EIO", 3, "Input/output error"),
]


@pytest.mark.parametrize(("verb", "rank", "at", "how", "when", "message"), by_default(REFUSED, 0, 3, 4, 6, 9, 12))
def test_a_system_error_on_one_rank_is_raised_on_all_and_changes_nothing(
    verb: str, rank: int, at: str, how: str, when: int, message: str, prepared: Path, tmp_path: Path
) -> None:
    needs_strace(at, how)
    out = target(prepared, verb, tmp_path)
    before = contents_of(out)
    raised = run_ranks(runs_into, RANKS, backend="gloo", args=(verb, str(out), rank, at, how, when))
    kind, text = raised[0]
    assert kind == "StorageError", raised
    assert message in text
    assert f"rank {rank}" in text
    assert str(out.parent) in text
    check_failure(raised, out, before, verb)


@pytest.mark.parametrize("verb", ["export", "save"])
def test_a_directory_that_only_root_may_not_write_is_an_error_on_all_ranks(verb: str, prepared: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # any user may enter its parents
        os.chmod(directory, 0o755)
        out = Path(directory, "out")
        shutil.copytree(prepared / verb, out)
        before = contents_of(out)
        raised = run_ranks(runs_into, RANKS, backend="gloo", args=(verb, str(out), 0, "rights", "", 0))
        kind, text = raised[0]
        assert kind == "StorageError", raised
        assert "Permission denied" in text
        assert directory in text
        assert "rank 0" in text
        check_failure(raised, out, before, verb)


# Other processes that change the target or the source meanwhile


def target_changes(out: str, how: str) -> list[str]:
    """Let another process change the target, or the directory that becomes it, while the ranks write."""

    def meddle(done: int, total: int) -> None:
        if comm.rank == 1 and done == total:
            if how == "vanishes":
                shutil.rmtree(out)
            elif how == "appears":
                os.makedirs(f"{out}/theirs")
            elif how == "another file":
                Path(out, "notes.txt").write_text("mine")
            else:
                (partial,) = Path(out).parent.glob("*.partial")
                shutil.rmtree(partial)

    comm = sx.get_communicator()
    state, overwrite = state_of(comm.rank, 2.0, comm.world_size), how != "appears"
    try:
        sx.export_checkpoint(state, out, layout=LAYOUT, overwrite=overwrite, on_progress=meddle)
    except sx.StateExchangeError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("vanishes", "nothing"),
        ("appears", "TargetExistsError"),
        ("another file", "TargetExistsError"),
        ("its partial directory vanishes", "StorageError|NotFoundError"),
    ],
)
def test_a_target_that_changes_during_an_export_is_replaced_or_kept_as_it_is(
    how: str, kind: str, prepared: Path, tmp_path: Path
) -> None:
    out = target(prepared, "export", tmp_path)
    before = contents_of(out)
    if how == "appears":
        shutil.rmtree(out)
    raised = run_ranks(target_changes, 2, args=(str(out), how))
    assert raised[0] == raised[1]
    assert raised[0][0] in kind.split("|"), raised
    assert left_beside(out) == []
    if how == "vanishes":
        assert value_of("export", out) == 2.0
    elif how == "appears":
        assert os.listdir(out) == ["theirs"]
    else:
        assert contents_of(out) == (before | {"notes.txt": b"mine"} if how == "another file" else before)


def source_changes(out: str, how: str) -> list[str]:
    """Change the source after all ranks have read the headers, before they read the rest."""
    comm = sx.get_communicator()

    def change() -> None:
        comm.barrier()
        if comm.rank == 1:
            if how == "vanishes":
                shutil.rmtree(out)
            elif how == "is truncated":
                os.truncate(f"{out}/model.safetensors", 6000)
            else:
                Path(out, "model.safetensors").write_bytes(bytes(os.path.getsize(f"{out}/model.safetensors")))
        comm.barrier()

    try:
        sx.load_checkpoint(Trapped(live_state(), change), out)
    except sx.StateExchangeError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


@pytest.mark.parametrize(
    ("how", "kind"), [("vanishes", "nothing"), ("is truncated", "TruncatedError"), ("is emptied", "CorruptError")]
)
def test_a_source_that_changes_during_a_load_is_read_as_it_was_or_named(
    how: str, kind: str, prepared: Path, tmp_path: Path
) -> None:
    out = target(prepared, "load", tmp_path)
    raised = run_ranks(source_changes, 2, backend="gloo", args=(str(out), how))
    assert raised[0][0] == kind, raised
    assert raised[0] == raised[1]
    if how != "vanishes":  # an open file is read as it was
        assert "model.safetensors" in raised[0][1]
        assert "rank" in raised[0][1]
