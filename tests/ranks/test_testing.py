"""The launcher, tried on ranks that return, raise, die and hang."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from launched_ranks import (
    PROCESS_BACKENDS,
    all_reduce_mpi,
    own_rank,
    raise_on_rank_1,
    reduce_on_threads,
    thread_rank,
    wait_until,
)
from sweeps import slow

from statexchange.errors import InvalidArgumentError, NotInitializedError, StateExchangeError
from statexchange.testing import RankFailure, ranks, report, run_ranks

pytest_plugins = "pytester"


def square(offset: int, extra: dict[str, tuple[int, ...]]) -> dict[str, object]:
    return {"rank": own_rank(), "square": own_rank() ** 2 + offset, "extra": extra}


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert torch.get_num_threads() == 1
    return ones.sum().item()


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


def environment() -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OF_THE_TEST")
    return {name: os.environ.get(name) for name in names}


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.3)


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
