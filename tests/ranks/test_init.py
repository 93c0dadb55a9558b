"""init: ranks meet in a directory or at an address, and name those that are absent or contradict them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from initialising import describe, init_as, init_by_hand, rank_and_size, rendezvous_of
from ports import free_port
from sweeps import slow

import statexchange as sx
from statexchange.comm import tcp_store
from statexchange.comm.rendezvous_directory import _Announcement
from statexchange.errors import to_record
from statexchange.messages import encoded
from statexchange.processes import Owner
from statexchange.testing import run_ranks

# Rendezvous


def initialises(url: str, backend: str) -> list[Any]:
    comm = init_by_hand(url, backend)
    found = describe(comm)
    sx.shutdown()
    return found


@pytest.mark.parametrize(("backend", "name"), [("auto", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_ranks_started_by_hand_meet_in_a_directory(backend: str, name: str, tmp_path: Path) -> None:
    found = run_ranks(initialises, 3, backend="processes", args=(f"file://{tmp_path}/new/meeting", backend))
    assert found == [[name, rank, 3, rank, 1, 6.0] for rank in range(3)]
    assert list((tmp_path / "new" / "meeting").iterdir()) == []


def test_ranks_started_by_hand_meet_at_an_address() -> None:
    found = run_ranks(initialises, 2, backend="processes", args=(f"tcp://127.0.0.1:{free_port()}", "auto"))
    assert found == [["shm", rank, 2, rank, 1, 3.0] for rank in range(2)]


def put_files_of_a_rank_0(directory: Path, nonce: str, owner: Owner, port: int) -> None:
    """Write the files of a rank 0 that was killed in the rendezvous."""
    record = encoded(_Announcement(owner, "elsewhere", ["127.0.0.1"], port, nonce), _Announcement)
    (directory / f"server-{nonce}.json").write_bytes(record)
    (directory / f"settled-{nonce}").touch()


def test_files_of_a_crashed_run_are_ignored(tmp_path: Path) -> None:
    """Nothing listens at the port of one, another program at that of the other; a third has provably ended."""
    ours = Owner.current()
    elsewhere = replace(ours, boot="another boot", pid=1, start=1)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    silent, foreign, dead = ("a" * 32, "b" * 32, "c" * 32)
    put_files_of_a_rank_0(tmp_path, silent, elsewhere, free_port())
    put_files_of_a_rank_0(tmp_path, foreign, elsewhere, agent.port)
    put_files_of_a_rank_0(tmp_path, dead, replace(ours, pid=2**22 - 1, start=1), agent.port)
    (tmp_path / f"server-{'d' * 32}.json").write_text('{"owner": "unfinished')
    found = run_ranks(initialises, 2, backend="processes", args=(f"file://{tmp_path}", "shm"))
    assert [row[0] for row in found] == ["shm", "shm"]
    # Files of processes that have provably ended are removed; those of other hosts are not.
    left = {path.name for path in tmp_path.iterdir()}
    of_other_hosts = {name for nonce in (silent, foreign) for name in (f"server-{nonce}.json", f"settled-{nonce}")}
    assert left == of_other_hosts | {f"server-{'d' * 32}.json"}


def times_out(directory: str) -> list[Any]:
    if rank_and_size()[0] in (1, 3):
        return []
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"file://{directory}", timeout_s=2 + rank_and_size()[0])
    return [str(caught.value), list(caught.value.missing)]


def test_all_ranks_that_wait_name_all_absent_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    """Rank 0 gives up first; rank 2 does not name it as absent."""
    found = run_ranks(times_out, 4, backend="processes", args=(f"{tmp_path}/new/meeting",))
    for message, missing in (found[0], found[2]):
        assert message.startswith(f"ranks [1, 3] did not join at {tmp_path}/new/meeting in ")
        assert missing == [1, 3]
    assert list((tmp_path / "new" / "meeting").iterdir()) == []


def waits_for_rank_0(kind: str, place: str) -> list[Any]:
    if rank_and_size()[0] == 0:
        return []
    with pytest.raises(sx.errors.StallError) as caught:
        init_as(kind, place, 3.0)
    return [list(caught.value.missing), str(caught.value)]


@pytest.mark.parametrize("kind", ["file", slow("tcp"), "env", slow("agent")])
def test_an_absent_rank_0_is_named_by_the_others(kind: str, tmp_path: Path) -> None:
    with rendezvous_of(kind, tmp_path) as place:
        found = run_ranks(waits_for_rank_0, 3, backend="processes", args=(kind, place))
    assert found[0] == []
    for missing, message in found[1:]:
        assert missing == [0]
        assert message.startswith("ranks [0] did not join at ")
        assert (" in 3 s: " in message) == (kind in ("tcp", "env"))  # with what the last try has met
    assert list(tmp_path.iterdir()) == []


def joins_late(directory: str) -> list[Any]:
    rank, _ = rank_and_size()
    if rank == 1:
        time.sleep(3.5)  # joins after rank 0 has given up
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"file://{directory}", timeout_s=[2.0, 2.0, 10.0][rank])
    return [list(caught.value.missing), str(caught.value)]


def test_when_rank_0_gives_up_all_that_have_joined_raise_its_error(tmp_path: Path) -> None:
    found = run_ranks(joins_late, 3, backend="processes", args=(str(tmp_path),))
    for rank, missing in ((0, 1), (1, 0), (2, 1)):  # which is true of rank 1's own two seconds
        assert found[rank][0] == [missing]
        assert found[rank][1].startswith(f"ranks [{missing}] did not join at {tmp_path} in 2 s; init must")
    assert list(tmp_path.iterdir()) == []


def loses_rank_0(port: int) -> str:
    if rank_and_size()[0] == 0:
        server = tcp_store.Server("127.0.0.1", port, 20.0)
        while not server.store.check(["joined/1"]):
            time.sleep(0.01)
        server.close()  # as it does a second after it has given up
        return ""
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"tcp://127.0.0.1:{port}", timeout_s=2)
    assert caught.value.missing == (0,)
    return str(caught.value)


def test_a_rank_0_that_left_the_address_is_said_to_have_left() -> None:
    port = free_port()
    found = run_ranks(loses_rank_0, 2, backend="processes", args=(port,))
    expected = f"ranks [0] did not join at tcp://127.0.0.1:{port} in 2 s: rank 0 had joined, but left before all had"
    assert found[1].startswith(expected)


@pytest.mark.parametrize("decision", ["complete", "failed", None])
def test_at_its_deadline_a_rank_waits_a_moment_for_rank_0_to_decide(decision: str | None) -> None:
    server = tcp_store.Server("127.0.0.1", 0, 20.0)
    store, _ = tcp_store.connect(tcp_store.Place(["127.0.0.1"], server.port), 20.0)
    for rank in range(3):
        store.set(f"joined/{rank}", f"process {rank}")
    record = json.dumps(to_record(sx.errors.StallError("rank 1 came too late", missing=(1,)), 0, "the rendezvous"))
    decided = "complete" if decision == "complete" else record
    decides = threading.Timer(0.3, lambda: server.store.set("decision", decided))
    if decision is not None:
        decides.start()

    def waits() -> None:
        tcp_store.Joining(1, 3, 0.1, "there", time.monotonic() - 0.1).wait_until_complete(store)

    if decision == "complete":
        waits()
    else:
        message, missing = {
            "failed": ("rank 1 came too late", (1,)),
            None: ("rank 0 does not answer at there: its process is stopped, or its host is cut off", (0,)),
        }[decision]
        with pytest.raises(sx.errors.StallError) as caught:
            waits()
        assert caught.value.message == message
        assert caught.value.missing == missing
    if decision is not None:
        decides.join()
    server.close()


def joins_repeatedly(directory: str) -> list[str]:
    backends = []
    for _ in range(5):
        backends.append(init_by_hand(f"file://{directory}").backend)
        sx.shutdown()
    return backends


def test_one_directory_serves_several_rendezvous(tmp_path: Path) -> None:
    found = run_ranks(joins_repeatedly, 3, backend="processes", args=(f"{tmp_path}/new",), timeout_s=120)
    assert found == [["shm"] * 5] * 3
    assert list((tmp_path / "new").iterdir()) == []


def keeps_old_communicators(url: str, by_slurm: bool) -> list[float]:
    rank, size = rank_and_size()
    if by_slurm:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(size), SLURM_LOCALID=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=url.rpartition(":")[2])
    held, sums = [], []
    for turn in range(3):
        comm = sx.init(timeout_s=20) if by_slurm else init_by_hand(url, "auto")
        sums.append(float(comm.all_reduce(torch.ones(3))[0]))
        held += [comm, comm.split(0)]
        if rank == 0 and turn == 1:
            time.sleep(1)  # the other ranks join again while rank 0 still serves the old store
        sx.shutdown()
    return sums


@pytest.mark.parametrize("by_slurm", [False, slow(True)])
def test_init_after_shutdown_at_the_same_address_while_old_communicators_exist(by_slurm: bool) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    found = run_ranks(keeps_old_communicators, 2, backend="processes", args=(url, by_slurm), timeout_s=120)
    assert found == [[2.0] * 3] * 2


def fails_then_works(url: str) -> list[Any]:
    rank, _ = rank_and_size()
    if rank == 1:
        time.sleep(4)  # comes when rank 0 has given up once, after its deadline and a second of grace
        return [init_by_hand(url).world_size]
    with pytest.raises(sx.errors.StallError, match=r"tcp://") as caught:
        init_by_hand(url, timeout_s=1)
    assert caught.value.missing == (1,)
    return [init_by_hand(url).world_size]


def test_an_address_can_be_reused_after_a_rank_was_absent() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(fails_then_works, 2, backend="processes", args=(url,), timeout_s=120) == [[2], [2]]


def dies_while_meeting(directory: str, kill: bool) -> list[Any]:
    if kill and rank_and_size()[0] == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return [init_by_hand(f"file://{directory}").rank, time.sleep(5)]
    if kill and rank_and_size()[0] == 2:
        time.sleep(3)
        return []
    if kill:
        with pytest.raises(sx.errors.StallError, match=r"1\.5 s") as caught:
            init_by_hand(f"file://{directory}", timeout_s=1.5)
        assert caught.value.missing == (2,)  # rank 1 has joined: its death is noticed when the communicator is formed
        return []
    return describe(init_by_hand(f"file://{directory}"))


def test_after_a_crash_in_the_rendezvous_the_next_run_starts(tmp_path: Path) -> None:
    outcomes = run_ranks(dies_while_meeting, 3, backend="processes", args=(str(tmp_path), True), allow_failure=True)
    assert outcomes[0].state == "ok", outcomes
    found = run_ranks(dies_while_meeting, 3, backend="processes", args=(str(tmp_path), False))
    assert found == [["shm", rank, 3, rank, 1, 6.0] for rank in range(3)]


def contradicts(place: str, what: str, directory: str) -> str:
    """Two ranks call themselves rank 1, or rank 2 has another world_size."""
    rank, _ = rank_and_size()
    (Path(directory) / str(rank)).touch()
    while rank == 2 and len(os.listdir(directory)) < 3:
        time.sleep(0.05)
    time.sleep(1.0 if rank == 2 else 0.0)  # else it might fail the rendezvous before the others have found it
    claimed, size = (min(rank, 1), 4) if what == "rank" else (rank, 4 + rank // 2)
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.init(rendezvous=place, rank=claimed, world_size=size, timeout_s=20)
    return str(caught.value)


@pytest.mark.parametrize("what", ["rank", "world_size"])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_that_contradict_each_other_are_named_on_all(kind: str, what: str, tmp_path: Path) -> None:
    expected = {"rank": "another process has joined as rank 1", "world_size": "has another world_size"}[what]
    (tmp_path / "meeting").mkdir()
    (tmp_path / "marks").mkdir()
    with rendezvous_of(kind, tmp_path / "meeting") as place:
        messages = run_ranks(contradicts, 3, backend="processes", args=(place, what, str(tmp_path / "marks")))
    assert all(expected in message for message in messages), messages
    assert list((tmp_path / "meeting").iterdir()) == []


def begins_again(directory: str, how: str) -> int:
    """Rank 1 is killed while it waits, and started again; or gives up, and calls again."""
    rank, size = rank_and_size()
    if rank == 1 and how == "killed":
        program = f"import statexchange as sx; sx.init(rendezvous='file://{directory}', rank=1, world_size={size})"
        waits = subprocess.Popen([sys.executable, "-c", program])
        time.sleep(3)
        waits.kill()
        waits.wait()
    elif rank == 1:
        with pytest.raises(sx.errors.StallError):
            init_by_hand(f"file://{directory}", timeout_s=0.5)
    elif rank == 2:
        time.sleep(4)
    return init_by_hand(f"file://{directory}", timeout_s=30.0).world_size


@pytest.mark.parametrize("how", ["gave up", slow("killed")])
def test_a_rank_may_begin_again_while_the_others_wait(how: str, tmp_path: Path) -> None:
    assert run_ranks(begins_again, 3, backend="processes", args=(str(tmp_path), how), timeout_s=120) == [3] * 3


@contextlib.contextmanager
def silent_server(directory: Path) -> Iterator[None]:
    """Announce a server of another host, at whose port a program accepts and never answers."""
    elsewhere = replace(Owner.current(), boot="another boot", pid=1, start=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        put_files_of_a_rank_0(directory, "e" * 32, elsewhere, listener.getsockname()[1])
        yield


def names_who_is_late(directory: str) -> str:
    rank, _ = rank_and_size()
    if rank == 1:
        return ""
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"file://{directory}", timeout_s=20.0)
    return str(caught.value)


def test_a_program_that_never_answers_delays_no_rank(tmp_path: Path) -> None:
    with silent_server(tmp_path):
        began = time.monotonic()
        first, _, third = run_ranks(names_who_is_late, 3, backend="processes", args=(str(tmp_path),), timeout_s=90)
        assert time.monotonic() - began < 60
        assert "ranks [1] did not join" in first
        assert "ranks [1] did not join" in third
        found = run_ranks(initialises, 2, backend="processes", args=(f"file://{tmp_path}", "shm"))
    assert [row[0] for row in found] == ["shm", "shm"]


def is_stopped(place: str, pid_file: str) -> list[int]:
    """Rank 0 is stopped when rank 1 has joined; rank 2 does not come."""
    rank, _ = rank_and_size()
    if rank == 2:
        return []
    if rank == 0:
        Path(pid_file).write_text(str(os.getpid()))
        threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        with pytest.raises(sx.errors.StallError, match="did not join"):
            init_by_hand(place, timeout_s=6)
        return []
    with pytest.raises(sx.errors.StallError, match="rank 0 does not answer") as caught:
        init_by_hand(place, timeout_s=5)
    os.kill(int(Path(pid_file).read_text()), signal.SIGCONT)
    return list(caught.value.missing)


@pytest.mark.parametrize("kind", ["tcp", slow("file")])
def test_a_rank_0_that_is_stopped_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    with rendezvous_of(kind, tmp_path / "meeting") as place:
        args = (place, str(tmp_path / "pid"))
        assert run_ranks(is_stopped, 3, backend="processes", args=args, timeout_s=60) == [[], [0], []]


def claims_rank_0(directory: str) -> str:
    rank, _ = rank_and_size()
    if rank == 1:
        while not any(name.startswith("settled-") for name in os.listdir(directory)):
            time.sleep(0.01)
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.init(rendezvous=f"file://{directory}", rank=0, world_size=3, timeout_s=4)
    return str(caught.value)


def test_a_second_rank_0_of_a_directory_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(claims_rank_0, 2, backend="processes", args=(str(tmp_path),))
    assert first.startswith(f"ranks [1, 2] did not join at {tmp_path} in 4 s")
    assert "another rank 0" in second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rendezvous": "s3://bucket", "rank": 0, "world_size": 2}, "rendezvous must be"),
        ({"rendezvous": "file:///nu\0ll", "rank": 0, "world_size": 2}, "rendezvous must be"),
        (
            {"rendezvous": "tcp://host:70000", "rank": 0, "world_size": 2},
            "rendezvous must be",
        ),
        ({"rendezvous": "file://relative", "rank": 0, "world_size": 2}, "rendezvous must be"),
        ({"rendezvous": "tcp://host", "rank": 0, "world_size": 2}, "rendezvous must be"),
        ({"rendezvous": "file:///tmp/x"}, "needs rank"),
        ({"rendezvous": "file:///tmp/x", "rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"rank": 0, "world_size": 2}, "come with"),
        ({"backend": "mpi", "rendezvous": "file:///tmp/x"}, "takes no rendezvous"),
        ({"check": "shapes"}, "check must be"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sx.init(**arguments)
    assert not sx.is_initialized()


def test_an_address_at_which_nobody_listens_is_an_error() -> None:
    with pytest.raises(sx.errors.StallError, match=r"tcp://.*refused") as caught:
        sx.init(rendezvous=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, timeout_s=1)
    assert caught.value.missing == (0,)
