"""The launcher and the pytest plugin, tried on ranks that return, raise, die and hang."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import sweeps
from sweeps import slow

from statexchange.errors import InvalidArgumentError, NotInitializedError, PeerError, StateExchangeError
from statexchange.testing import RankFailure, ranks, report, run_ranks

pytest_plugins = "pytester"

PROCESS_BACKENDS = ("processes", "gloo", "mpi")


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))


def square(offset: int, extra: dict[str, tuple[int, ...]]) -> dict[str, object]:
    return {"rank": own_rank(), "square": own_rank() ** 2 + offset, "extra": extra}


def thread_rank() -> int:
    from statexchange.comm.defaults import current

    return current().rank


def reduce_on_threads() -> list[int]:
    from statexchange.comm.defaults import current

    return current().all_gather_object(current().rank)


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert torch.get_num_threads() == 1
    return ones.sum().item()


def all_reduce_mpi() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)


def raise_on_rank_1() -> str:
    if own_rank() == 1:
        raise ValueError("lost its shard")
    return "fine"


def raise_everywhere() -> None:
    raise KeyError(f"of rank {own_rank()}")


def raise_in_a_collective() -> None:
    raise_on_rank_1()
    all_reduce()


def kill_rank_1() -> str:
    if own_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def crash_rank_0() -> None:
    import ctypes

    if own_rank() == 0:
        ctypes.string_at(8)


def exit_3() -> None:
    os._exit(3)


def hang_on_rank_1() -> str:
    if own_rank() == 1:
        time.sleep(600)  # in C, so this function is the innermost frame of the stack
    return "fine"


def hang_after_failure() -> None:
    raise_on_rank_1()
    time.sleep(60)


def hang_in_mpi() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.recv(source=1)
    raise ValueError("rank 1 does not send")


def report_numbers(to: int) -> int:
    for number in range(to):
        report({"number": number, "pair": (number, number)})
    return os.getppid()


def return_an_object() -> object:
    return object()


def leave_a_thread() -> str:
    import threading

    threading.Thread(target=time.sleep, args=(60,)).start()
    return "done"


def report_pid_and_wait(directory: str) -> None:
    Path(directory, str(os.getpid())).touch()
    time.sleep(60)


def interrupt_the_launcher(pid: int, directory: str) -> None:
    Path(directory, f"rank-{own_rank()}-{os.getpid()}").touch()
    if own_rank() == 0 and wait_until(lambda: len(list(Path(directory).glob("rank-*"))) == 2):
        os.kill(pid, signal.SIGINT)
    time.sleep(60)


def environment() -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OF_THE_TEST")
    return {name: os.environ.get(name) for name in names}


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.3)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.parametrize("backend", PROCESS_BACKENDS)
def test_values_come_back_in_rank_order(backend: str) -> None:
    extra = {"axes": (1, 2)}
    found = run_ranks(square, 3, backend=backend, args=(10, extra))
    assert found == [{"rank": rank, "square": rank**2 + 10, "extra": extra} for rank in range(3)]


def test_threads_have_communicators_of_their_own() -> None:
    assert run_ranks(thread_rank, 3) == [0, 1, 2]
    assert run_ranks(lambda: "anything goes", 2) == ["anything goes"] * 2


def test_gloo_ranks_have_a_default_group() -> None:
    assert run_ranks(all_reduce, 2, backend="gloo") == [6.0, 6.0]


def test_mpi_ranks_form_a_communicator() -> None:
    assert run_ranks(all_reduce_mpi, 2, backend="mpi") == [3, 3]


def test_ranks_see_a_launcher_and_the_environment_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "here")
    before = dict(os.environ)
    found = run_ranks(environment, 2, backend="gloo")
    assert [tuple(rank.values()) for rank in found] == [(str(r), "2", str(r), "2", "lo", "here") for r in (0, 1)]
    assert dict(os.environ) == before


def test_the_fork_server_is_reused() -> None:
    assert run_ranks(report_numbers, 2, backend="processes", args=(0,)) == run_ranks(
        report_numbers, 2, backend="gloo", args=(0,)
    )


@pytest.mark.parametrize("backend", PROCESS_BACKENDS)
def test_messages_arrive_in_order(backend: str) -> None:
    found: list[tuple[int, object]] = []
    run_ranks(report_numbers, 2, backend=backend, args=(5,), on_message=lambda rank, value: found.append((rank, value)))
    for rank in range(2):
        assert [v for r, v in found if r == rank] == [{"number": n, "pair": (n, n)} for n in range(5)]


def test_messages_of_threads_arrive_in_order() -> None:
    found: list[tuple[int, object]] = []
    run_ranks(report_numbers, 2, args=(3,), on_message=lambda rank, value: found.append((rank, value)))
    assert [value["number"] for rank, value in found if rank == 1] == [0, 1, 2]


def test_a_message_arrives_before_the_rank_ends(tmp_path: Path) -> None:
    run_ranks(
        wait_for_answer,
        2,
        backend="processes",
        args=(str(tmp_path),),
        on_message=lambda r, _: (tmp_path / f"{r}").touch(),
    )


def wait_for_answer(directory: str) -> None:
    report("ready")
    assert wait_until(Path(directory, str(own_rank())).exists)


def test_report_needs_a_rank() -> None:
    with pytest.raises(NotInitializedError, match="run_ranks"):
        report(1)


@pytest.mark.parametrize("backend", PROCESS_BACKENDS)
def test_a_failing_rank_is_reported_with_its_traceback(backend: str) -> None:
    with pytest.raises(RankFailure, match=r"rank 1: .*lost its") as caught:
        run_ranks(raise_on_rank_1, 2, backend=backend)
    failure = caught.value
    assert isinstance(failure, StateExchangeError)
    assert isinstance(failure, AssertionError)
    assert failure.errors == {1: "ValueError"}
    assert failure.messages == {1: "lost its shard"}
    assert failure.exit_codes[1] == 1
    assert "rank 0: ok" in str(failure)
    assert 'raise ValueError("lost its shard")' in str(failure)
    assert "testing/child.py" not in failure.tracebacks[1]
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_every_failing_rank_has_its_traceback(backend: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(raise_everywhere, 3, backend=backend)
    assert caught.value.errors == dict.fromkeys(range(3), "KeyError")
    assert all("in raise_everywhere" in caught.value.tracebacks[rank] for rank in range(3))


def test_peers_of_a_failed_thread_raise_its_error() -> None:
    def work() -> None:
        if thread_rank() == 1:
            raise ValueError("lost its shard")
        reduce_on_threads()

    with pytest.raises(RankFailure) as caught:
        run_ranks(work, 2)
    assert caught.value.errors == {0: "PeerError", 1: "ValueError"}, caught.value
    assert "lost its shard" in caught.value.messages[0]


def test_a_failure_is_seen_soon_where_each_yield_of_the_core_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    yields = []

    def yield_beside_other_work() -> None:
        yields.append(time.sleep(0.005))

    def work() -> None:
        if thread_rank() == 1:
            raise ValueError("lost its shard")
        reduce_on_threads()

    monkeypatch.setattr("statexchange.comm.wait.yield_core", yield_beside_other_work)
    outcomes = run_ranks(work, 2, allow_failure=True)
    assert outcomes.errors == {0: "PeerError", 1: "ValueError"}, outcomes
    assert 0 < len(yields) < 50


def test_peers_of_a_failed_gloo_rank_see_its_connection_close() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(raise_in_a_collective, 2, backend="gloo")
    assert caught.value.errors == {0: "RuntimeError", 1: "ValueError"}


def test_a_result_that_is_no_json_value_fails_its_rank() -> None:
    with pytest.raises(RankFailure, match=r"builtins\.object"):
        run_ranks(return_an_object, 1, backend="processes")


def test_a_killed_rank_is_reported() -> None:
    outcomes = run_ranks(kill_rank_1, 2, backend="processes", allow_failure=True)
    assert outcomes.values == {0: "alive"}
    assert outcomes.exit_codes == {0: 0, 1: -signal.SIGKILL}
    with pytest.raises(RankFailure, match=r"rank 1: .*SIGKILL"):
        run_ranks(kill_rank_1, 2, backend="gloo")


def test_a_crash_is_reported_with_its_line() -> None:
    with pytest.raises(RankFailure, match=r"rank 0: .*SIGSEGV") as caught:
        run_ranks(crash_rank_0, 1, backend="processes")
    assert "in crash_rank_0" in caught.value.tracebacks[0]


def test_an_exit_code_is_reported() -> None:
    assert run_ranks(exit_3, 1, backend="processes", allow_failure=True).messages == {0: "exit code 3"}


def test_a_killed_mpi_rank_ends_the_job() -> None:
    with pytest.raises(RankFailure, match=r"rank 1: .*exit code"):
        run_ranks(kill_rank_1, 2, backend="mpi")


@pytest.mark.parametrize(("backend", "timeout_s"), [("processes", 2.0), slow("mpi", 6.0)])
def test_a_hang_is_named_with_its_stack(backend: str, timeout_s: float) -> None:
    with pytest.raises(RankFailure, match=rf"rank 1: .* {timeout_s:g} s, .*hang_on_rank_1\b") as caught:
        run_ranks(hang_on_rank_1, 2, backend=backend, timeout_s=timeout_s)
    assert list(caught.value.messages) == [1]
    assert caught.value.exit_codes[1] is None
    assert f'{__file__}", line' in caught.value.tracebacks[1]


def test_a_thread_that_hangs_is_named_with_its_stack() -> None:
    def hang() -> None:
        if thread_rank() == 1:
            time.sleep(2)  # the line where it hangs

    with pytest.raises(RankFailure, match=r"0\.2 s, .*in hang\b") as caught:
        run_ranks(hang, 2, timeout_s=0.2)
    assert "# the line where it hangs" in caught.value.tracebacks[1]


@pytest.mark.usefixtures("short_grace")
def test_peers_that_do_not_end_after_a_failure_are_killed() -> None:
    with pytest.raises(RankFailure, match=r"0\.3 s .*of rank 1\b") as caught:
        run_ranks(hang_after_failure, 2, backend="processes")
    assert caught.value.errors == {1: "ValueError"}
    assert list(caught.value.messages) == [0, 1]


@pytest.mark.usefixtures("short_grace")
def test_an_mpi_rank_that_waits_for_a_failed_one_is_named() -> None:
    with pytest.raises(RankFailure, match=r"rank 0: .*in hang_in_mpi"):
        run_ranks(hang_in_mpi, 2, backend="mpi")


def test_a_process_that_does_not_exit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_EXIT_S", 1.0)
    with pytest.raises(RankFailure, match="did not exit"):
        run_ranks(leave_a_thread, 1, backend="processes")


@pytest.mark.parametrize("backend", PROCESS_BACKENDS)
def test_a_function_that_cannot_be_imported_is_refused(backend: str) -> None:
    with pytest.raises(InvalidArgumentError, match="lambda"):
        run_ranks(lambda: 1, 2, backend=backend)


def test_an_unknown_backend_and_no_ranks_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no backend 'nccl'"):
        run_ranks(thread_rank, 2, backend="nccl")
    with pytest.raises(InvalidArgumentError, match="one rank"):
        run_ranks(thread_rank, 0)


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
        from test_testing import report_pid_and_wait

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
        from test_testing import own_pid

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


# The plugin


@pytest.mark.ranks(2, slow(3), backend=("processes", slow("gloo")))
@pytest.mark.parametrize("shape", [(2, 3), None])
def test_marked_tests_run_on_ranks(tmp_path: Path, shape: tuple[int, int] | None) -> None:
    assert shape in ((2, 3), None)
    assert isinstance(tmp_path, Path)
    (tmp_path / os.environ["RANK"]).touch()
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == int(os.environ["WORLD_SIZE"]))


@pytest.mark.ranks(2)
def test_marked_tests_run_on_threads(tmp_path: Path) -> None:
    assert reduce_on_threads() == [0, 1]


@pytest.mark.ranks(2, backend="mpi")
def test_marked_tests_run_under_mpi() -> None:
    assert all_reduce_mpi() == 3


MARKED = """
    import time, pytest

    @pytest.mark.ranks(2, backend="processes")
    def test_fails():
        assert [1, 2] == [1, 3]

    @pytest.mark.ranks(2, backend="processes", timeout_s=1)
    def test_hangs():
        time.sleep(60)

    @pytest.mark.ranks(1, backend="processes")
    def test_skips():
        pytest.skip("no reason")

    def test_skips_for_a_good_reason():
        pytest.skip("no GPU here")
"""


@pytest.fixture
def pytester_without_plugins(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def test_the_plugin_reports_as_pytest_does(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile(test_marked=MARKED)
    found = pytester_without_plugins.runpytest("-rs", "-p", "statexchange.testing.plugin", "--no-skips")
    found.assert_outcomes(failed=2, skipped=2)
    text = found.stdout.str()
    assert "assert [1, 2] == [1, 3]" in text
    assert "2 of 2 ranks failed on processes" in text
    assert "rank 1: running: did not finish within 1 s, still running in test_hangs" in text
    assert "--no-skips: test_marked.py::test_skips[processes-1]: no reason" in text
    assert "no-skips: test_marked.py::test_skips_for" not in text


def test_a_skip_fails_the_session_only_where_none_is_allowed(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile("import pytest\ndef test_it(): pytest.skip('just so')\n")
    assert pytester_without_plugins.runpytest("-p", "statexchange.testing.plugin").ret == 0
    assert pytester_without_plugins.runpytest("-p", "statexchange.testing.plugin", "--no-skips").ret == 1


def test_skips_of_xdists_workers_count(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile(
        "import pytest\ndef test_it(): pytest.skip('just so')\ndef test_gpu(): pytest.skip('no GPU')\n"
    )
    found = pytester_without_plugins.runpytest_subprocess(
        "-p", "xdist", "-n", "2", "-p", "statexchange.testing.plugin", "--no-skips"
    )
    assert found.ret == 1
    found.assert_outcomes(skipped=2)
    text = found.stdout.str()
    assert "--no-skips: test_skips_of_xdists_workers_count.py::test_it: just so" in text
    assert "::test_gpu: no GPU" not in text


def test_a_world_size_and_a_backend_may_have_marks(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile(
        """
        import pytest

        def more(value):
            return pytest.param(value, marks=pytest.mark.more)

        @pytest.mark.ranks(2, more(3), backend=("threads", more("gloo")))
        def test_it(): pass
        """
    )
    found = pytester_without_plugins.runpytest(
        "-p", "statexchange.testing.plugin", "-v", "-m", "not more", "-W", "ignore"
    )
    found.assert_outcomes(passed=1, deselected=3)
    assert "test_it[threads-2]" in found.stdout.str()


def test_a_marker_without_world_sizes_is_refused(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile("import pytest\n@pytest.mark.ranks(backend='gloo')\ndef test_it(): pass\n")
    found = pytester_without_plugins.runpytest("-p", "statexchange.testing.plugin")
    assert "use ranks(*world_sizes" in found.stdout.str()
