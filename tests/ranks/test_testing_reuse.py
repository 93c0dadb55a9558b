"""The ends of a launcher and of its ranks: interrupts, ranks that are kept, and what they restore."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import sweeps
from launched_ranks import PROCESS_BACKENDS, own_rank, raise_on_rank_1, reduce_on_threads, thread_rank, wait_until
from sweeps import slow

from statexchange.errors import PeerError
from statexchange.testing import RankFailure, report, run_ranks

pytest_plugins = "pytester"


def report_pid_and_wait(directory: str) -> None:
    Path(directory, str(os.getpid())).touch()
    time.sleep(60)


def interrupt_the_launcher(pid: int, directory: str) -> None:
    Path(directory, f"rank-{own_rank()}-{os.getpid()}").touch()
    if own_rank() == 0 and wait_until(lambda: len(list(Path(directory).glob("rank-*"))) == 2):
        os.kill(pid, signal.SIGINT)
    time.sleep(60)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def start_script(directory: Path, body: str) -> subprocess.Popen[bytes]:
    """Run a launcher in a process of its own, which a test can kill or interrupt."""
    (directory / "script.py").write_text(textwrap.dedent(body))
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(sweeps.__file__).parent), str(Path(__file__).parents[2])]
    )
    environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(directory)}
    return subprocess.Popen([sys.executable, "script.py"], cwd=directory, env=environ)


@pytest.mark.parametrize("backend", ["processes", slow("mpi")])
def test_ranks_end_with_a_killed_launcher(tmp_path: Path, backend: str) -> None:
    launcher = start_script(
        tmp_path,
        f"""
        import os
        from statexchange.testing import run_ranks
        from test_testing_reuse import report_pid_and_wait

        if __name__ == "__main__":
            os.mkdir("pids")
            run_ranks(report_pid_and_wait, 2, backend={backend!r}, args=(os.path.abspath("pids"),))
        """,
    )
    assert wait_until(lambda: len(list(tmp_path.glob("pids/*"))) == 2, limit_s=120)
    pids = [int(path.name) for path in tmp_path.glob("pids/*")]
    assert all(map(is_alive, pids))
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert not list(tmp_path.glob("statexchange-*"))


@pytest.mark.parametrize("backend", ["processes", "mpi"])
def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_ranks(interrupt_the_launcher, 2, backend=backend, args=(os.getpid(), str(tmp_path)))
    pids = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("rank-*")]
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert not list(tmp_path.glob("statexchange-*"))


def test_an_interrupt_ends_the_wait_for_threads() -> None:
    def work() -> None:
        if thread_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        with contextlib.suppress(PeerError):
            reduce_on_threads()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(work, 2)


def test_the_package_imports_no_torch() -> None:
    program = "import sys, statexchange.testing.plugin; print('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


# Ranks that serve several tests


def own_pid() -> int:
    return os.getpid()


def change_process(what: str) -> list[object]:
    """Change the state of this process."""
    import torch

    from statexchange import processes

    if what == "variable":
        os.environ["LEFT_BEHIND"] = "1"
    elif what == "directory":
        os.chdir("/")
    elif what == "seed":
        torch.manual_seed(17)
    elif what == "group":
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif what == "thread":
        import threading

        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    elif what == "socket":
        sys.left = __import__("socket").socketpair()  # type: ignore[attr-defined]
    elif what == "child":
        sys.left = subprocess.Popen(  # type: ignore[attr-defined]
            ["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        report(sys.left.pid)
    elif what == "signal handler":
        signal.signal(signal.SIGUSR2, lambda *_: None)
    elif what == "function":
        processes.host_identity = lambda: "elsewhere"
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    return [os.getpid(), os.environ.get("LEFT_BEHIND"), os.getcwd() == "/", torch.initial_seed() == 17]


@pytest.mark.parametrize("backend", PROCESS_BACKENDS)
def test_ranks_that_are_reused_are_the_same_processes(backend: str) -> None:
    first = run_ranks(own_pid, 2, backend=backend, reuse=True)
    assert run_ranks(own_pid, 2, backend=backend, reuse=True) == first
    assert not set(run_ranks(own_pid, 2, backend=backend)) & set(first)
    assert not set(run_ranks(own_pid, 3, backend=backend, reuse=True)) & set(first)


@pytest.mark.parametrize("what", ["nothing", "variable", "directory", "seed", "group"])
@pytest.mark.parametrize("backend", ["processes", slow("mpi")])
def test_the_state_that_a_task_changed_is_restored(backend: str, what: str) -> None:
    first = run_ranks(change_process, 2, backend=backend, args=(what,), reuse=True, timeout_s=120)
    assert run_ranks(change_process, 2, backend=backend, args=("nothing",), reuse=True) == [
        [pid, None, False, False] for pid, *_ in first
    ]


@pytest.mark.parametrize("what", ["thread", "socket", "child", "signal handler", "function", "dtype"])
@pytest.mark.parametrize("backend", ["processes", slow("mpi")])
def test_ranks_that_leave_state_that_cannot_be_restored_are_not_reused(backend: str, what: str) -> None:
    children: list[int] = []
    args, options = (what,), {"reuse": True, "timeout_s": 60.0}
    first = run_ranks(
        change_process, 2, backend=backend, args=args, on_message=lambda _, pid: children.append(pid), **options
    )
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    again = run_ranks(change_process, 2, backend=backend, args=("nothing",), **options)
    assert not {pid for pid, *_ in first} & {pid for pid, *_ in again}
    assert not any(map(is_alive, [pid for pid, *_ in first]))


@pytest.mark.parametrize("backend", ["processes", slow("mpi")])
def test_a_world_in_which_a_rank_failed_is_not_reused(backend: str) -> None:
    first = run_ranks(own_pid, 2, backend=backend, reuse=True)
    with pytest.raises(RankFailure, match=r"rank 1: .*lost its"):
        run_ranks(raise_on_rank_1, 2, backend=backend, reuse=True)
    assert not set(run_ranks(own_pid, 2, backend=backend, reuse=True)) & set(first)
    assert not any(map(is_alive, first))


def test_an_idle_world_that_has_died_is_replaced() -> None:
    first = run_ranks(own_pid, 2, backend="processes", reuse=True)
    os.kill(first[0], signal.SIGKILL)
    assert wait_until(lambda: not os.path.exists(f"/proc/{first[0]}"))  # wait until all its threads have ended
    assert not set(run_ranks(own_pid, 2, backend="processes", reuse=True)) & set(first)
    assert not any(map(is_alive, first))


@pytest.mark.parametrize("backend", [slow("processes"), slow("mpi")])
def test_ranks_that_are_kept_end_with_their_launcher(tmp_path: Path, backend: str) -> None:
    launcher = start_script(
        tmp_path,
        f"""
        from statexchange.testing import run_ranks
        from test_testing_reuse import own_pid

        if __name__ == "__main__":
            pids = run_ranks(own_pid, 2, backend={backend!r}, reuse=True)
            open("pids", "w").write(" ".join(map(str, pids)))
        """,
    )
    assert launcher.wait(150) == 0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert not list(tmp_path.glob("statexchange-*"))
