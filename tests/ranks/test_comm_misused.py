"""Calls that do not fit: what a rank cannot send, another call than its peers make, a closed communicator."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import STARTING_S, start
from starting import AND_MPI, THREADS_AND_PROCESSES

import statexchange as sx
from statexchange.comm.calls import call_site, step_text
from statexchange.comm.defaults import public_call
from statexchange.testing import run_ranks


@pytest.mark.ranks(3, backend=AND_MPI, timeout_s=STARTING_S, reuse=True)
def test_a_value_that_cannot_be_encoded_is_an_error_on_every_rank() -> None:
    comm = start()
    for call in (comm.gather_object, comm.all_gather_object):
        with pytest.raises(sx.errors.UnsupportedError, match="object") as caught:
            call([object() if comm.rank == 1 else 1])
        assert caught.value.rank == 1
    with pytest.raises(sx.errors.UnsupportedError, match=r"cannot write.*rank 0"):
        comm.broadcast_object(object() if comm.rank == 0 else None)
    comm.barrier()


def forks() -> str:
    comm = sx.get_communicator()
    child = os.fork()
    if not child:
        sx.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    comm.barrier()
    return "ok"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on: fork beside threads
def test_the_exit_of_a_forked_child_does_not_end_its_parent() -> None:
    assert run_ranks(forks, 2, backend="gloo") == ["ok", "ok"]


MAKES_A_GROUP = """
import statexchange as sx
comm = sx.init()
if comm.rank < 2:
    print(comm.new_group([1, 0]).all_gather_object(comm.rank), flush=True)
import torch.distributed as dist
assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_auto_under_torchrun_does_not_touch_torch_and_makes_groups(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MAKES_A_GROUP)
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--nproc-per-node", "3", tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[1, 0]") == 2


STATE = {"w": torch.ones(3)}
PUBLIC: dict[str, Callable[[str], Any]] = {
    "export_checkpoint": lambda out: sx.export_checkpoint(STATE, out),
    "save_checkpoint": lambda out: sx.save_checkpoint(STATE, out),
    "load_checkpoint": lambda out: sx.load_checkpoint({"w": torch.ones(3)}, out.removesuffix("-2")),
    "gather_state": lambda out: ExitStack().enter_context(sx.gather_state(STATE)),
    "get_tensors_parallel": lambda out: ExitStack().enter_context(sx.get_tensors_parallel(STATE["w"], [0, 1])),
    "get_configs_parallel": lambda out: ExitStack().enter_context(sx.get_configs_parallel({"a": 1}, [0, 1])),
    "synchronize": lambda out: sx.synchronize(STATE),
    "broadcast_parameters": lambda out: sx.train.broadcast_parameters(torch.nn.Linear(1, 1)),
    "allreduce_parameters": lambda out: sx.train.allreduce_parameters(torch.nn.Linear(1, 1)),
    "average_gradients": lambda out: sx.average_gradients(torch.nn.Linear(1, 1)),
    "data_parallel": lambda out: sx.train.data_parallel(
        net := torch.nn.Linear(1, 1), torch.optim.SGD(net.parameters())
    ),
    "a barrier": lambda out: sx.get_communicator().barrier(),
}


def makes_different_calls(out: str) -> list[list[str]]:
    """Call each function on rank 0 and the next one on rank 1; return both names and this rank's error for each."""
    comm = sx.get_communicator()
    comm.barrier()
    sx.export_checkpoint(STATE, out)  # to be loaded
    found = []
    for names in zip(PUBLIC, [*list(PUBLIC)[1:], next(iter(PUBLIC))], strict=True):
        with pytest.raises(sx.errors.MismatchError, match="different calls") as caught:
            PUBLIC[names[comm.rank]](f"{out}-2")
        found.append([*names, str(caught.value)])
    return found


def test_a_mismatch_names_the_calls_of_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(makes_different_calls, 2, backend="gloo", args=(str(tmp_path / "out"),), timeout_s=120)
    for first, second, text in [calls for rank in found for calls in rank]:
        line = r"at \S+test_comm_misused\.py:\d+"
        assert re.fullmatch(
            f"ranks are in different calls: rank 0 called {first} {line}; rank 1 called {second} {line}", text
        )


def exports_or_saves(out: str) -> str:
    call = sx.save_checkpoint if sx.get_rank() == 0 else sx.export_checkpoint
    with pytest.raises(sx.errors.MismatchError, match="different calls") as caught:
        call(STATE, f"{out}/{sx.get_rank()}")
    return str(caught.value)


def test_ranks_that_are_threads_are_not_taken_for_threads_of_one_rank(tmp_path: Path) -> None:
    for text in run_ranks(exports_or_saves, 2, args=(str(tmp_path),)):
        calls = r"rank 0 called save_checkpoint at \S+; rank 1 called export_checkpoint at \S+"
        assert re.fullmatch(f"ranks are in different calls: {calls}", text)


def leaves_a_block() -> str:
    """Fail in a call of the user inside the block of a gather; the error must not name the gather."""
    comm = sx.get_communicator()
    comm.barrier()
    with pytest.raises(sx.errors.MismatchError) as caught, sx.gather_state(STATE):
        if comm.rank == 0:
            comm.barrier(tag="inside")
    return str(caught.value)


def test_a_call_inside_the_block_of_a_gather_has_its_own_name() -> None:
    for text in run_ranks(leaves_a_block, 2):
        assert re.search(r"rank 0 called barrier 'inside' at .*; rank 1 called gather_state at ", text)


def test_a_call_that_continues_in_a_thread_names_its_line() -> None:
    with public_call("outer", "train.py:7"), public_call("inner"):
        assert (call_site(), step_text("writing")) == ("train.py:7", "outer (writing)")
    assert "test_comm_misused.py:" in call_site()
    assert step_text("writing") == "writing"


def is_interrupted(out: str) -> list[str]:
    comm = sx.get_communicator()

    def progress(done: int, total: int) -> None:
        if comm.rank == 0:
            raise KeyboardInterrupt

    messages = []
    with pytest.raises((KeyboardInterrupt, sx.errors.PeerError)) as caught:
        sx.export_checkpoint({f"w{comm.rank}": torch.ones(3)}, out, on_progress=progress)
    messages.append(str(caught.value))
    for again in (comm.barrier, lambda: sx.save_checkpoint(STATE, out), lambda: comm.all_reduce(torch.ones(2))):
        with pytest.raises(sx.errors.NotInitializedError if comm.rank == 0 else sx.errors.PeerError) as closed:
            again()
        messages.append(str(closed.value))
    return messages


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_after_an_interrupt_the_error_names_the_cause(backend: str, tmp_path: Path) -> None:
    interrupted, other = run_ranks(is_interrupted, 2, backend=backend, args=(str(tmp_path / "out"),), timeout_s=120)
    closed = (
        "this communicator is closed since KeyboardInterrupt ended export_checkpoint: make a new one, as "
        "shutdown() and init() do [rank 0]"
    )
    assert interrupted == ["", closed, closed, closed]
    assert other == [f"rank 0 on {platform.node()} failed in export_checkpoint: KeyboardInterrupt"] * 4


def closes() -> str:
    comm = sx.get_communicator()
    comm.close()
    with pytest.raises(sx.errors.NotInitializedError) as caught:
        comm.barrier()
    return str(caught.value)


def test_a_closed_communicator_is_a_named_error() -> None:
    closed = "this communicator is closed: make a new one, as shutdown() and init() do"
    assert run_ranks(closes, 2) == [f"{closed} [rank {rank}]" for rank in range(2)]


def test_a_closed_communicator_of_one_rank_is_refused_too(tmp_path: Path) -> None:
    """A job of one rank makes no call in which it would be found."""
    comm, state = sx.init("single"), {"w": torch.ones(1)}
    sx.shutdown()
    for write in (sx.export_checkpoint, sx.save_checkpoint):
        with pytest.raises(sx.errors.NotInitializedError):
            write(state, tmp_path / "out", comm=comm)
    assert not (tmp_path / "out").exists()
