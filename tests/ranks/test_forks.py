"""A communicator belongs to one process: in a forked child of a rank every call raises ForkedError."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import slow

import statexchange as sx
from statexchange.comm import defaults
from statexchange.testing import run_ranks

CHILD_S = 20
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on: fork beside threads


def in_child(body: Callable[[], Any]) -> Any:
    """Return the result of `body` in a forked child, which then runs its exit handlers."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(CHILD_S)
        faulthandler.dump_traceback_later(CHILD_S / 2)
        os.write(writes, json.dumps(body()).encode())
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, (status, text)
    return json.loads(text)


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return type(error).__name__
    return "nothing"


def calls_of(comm: Any, made: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return every call that uses a communicator, or an object of `made` that was made with it."""
    one = torch.ones(4)
    each = [torch.ones(2)] * comm.world_size
    other = (comm.rank + 1) % comm.world_size

    def phase() -> None:
        with comm.phase("a phase"):
            pass

    return {
        "all_reduce": lambda: comm.all_reduce(one),
        "async": lambda: comm.all_reduce(one, async_op=True),
        "multiple": lambda: comm.all_reduce_multiple([one]),
        "reduce": lambda: comm.reduce(one),
        "broadcast": lambda: comm.broadcast(one),
        "all_gather": lambda: comm.all_gather(one),
        "gather": lambda: comm.gather(one),
        "scatter": lambda: comm.scatter(each),
        "reduce_scatter": lambda: comm.reduce_scatter(torch.ones(4 * comm.world_size)),
        "all_to_all": lambda: comm.all_to_all(each),
        "send": lambda: comm.send(one, other),
        "recv": lambda: comm.recv(one, other, async_op=True),
        "wait_all": comm.wait_all,
        "work": lambda: made["work"].wait(),
        "empty": lambda: comm.empty((4,), torch.float32),
        "all_gather_bytes": lambda: comm.all_gather_bytes(b""),
        "agree": comm.agree,
        "phase": phase,
        "progress": comm.progress,
        "barrier": comm.barrier,
        "a bad root": lambda: comm.gather_object(1, root=99),
        "gather_object": lambda: comm.gather_object(1),
        "all_gather_object": lambda: comm.all_gather_object(1),
        "broadcast_object": lambda: comm.broadcast_object(1),
        "new_group": lambda: comm.new_group([comm.rank]),
        "a known group": lambda: comm.new_group(list(reversed(range(comm.world_size)))),
        "in a group": lambda: made["group"].barrier(),
        "split": lambda: comm.split(0),
        "duplicate": comm.duplicate,
        "node": lambda: comm.node,
        "flat": lambda: comm.flat.barrier(),
        "reducer": lambda: made["reducer"].finalize(),
        "inline reducer": lambda: made["inline"].add(one),
        "a new reducer": sx.train.CoalescingReducer,
        "gather_state": lambda: sx.gather_state({"a": one}).__enter__(),
        "save": lambda: sx.save_checkpoint({"a": one}, "/nowhere"),
        "export": lambda: sx.export_checkpoint({"a": one}, "/nowhere", comm=comm),
        "in the background": lambda: sx.export_checkpoint({"a": one}, "/nowhere", background=True),
        "init": sx.init,
        "get_communicator": lambda: sx.get_communicator().barrier(),
    }


def tries_all_calls_in_a_child(backend: str) -> list[Any]:
    """Fork on rank 1 while the other ranks wait in the first call that the child tries."""
    comm = sx.init(backend)
    module = torch.nn.Linear(2, 2)
    made = {
        "group": comm.new_group(list(reversed(range(comm.world_size)))),
        "reducer": sx.train.BucketReducer(module, comm),
        "inline": sx.train.InlineReducer(comm),
    }
    value = torch.full((4,), float(comm.rank + 1))
    if comm.rank == 1:
        made["work"] = comm.all_reduce(value, async_op=True)
        found = in_child(lambda: {name: raised_by(call) for name, call in calls_of(comm, made).items()})
        known = in_child(lambda: [sx.get_rank(), sx.get_world_size(), sx.is_initialized(), comm.rank])
        found["shutdown"] = in_child(lambda: [raised_by(comm.close), raised_by(sx.shutdown), raised_by(sx.init)])
        comm.barrier(tag="the child has ended")
        made["work"].wait()
    else:
        comm.all_reduce(value)
        found, known = {}, []
        comm.barrier(tag="the child has ended")
    again = comm.all_reduce(torch.full((4,), float(comm.rank + 1)))
    return [found, known, value.tolist(), again.tolist()]


def check_refusals(outcomes: Any, size: int) -> None:
    total = [size * (size + 1) / 2] * 4
    assert [outcome[2:] for outcome in outcomes] == [[total, total]] * size
    found, known = outcomes[1][:2]
    assert found.pop("shutdown") == ["nothing", "nothing", "ForkedError"]
    assert {name: what for name, what in found.items() if what != "ForkedError"} == {}
    assert known == [1, size, False, 1]


@pytest.mark.parametrize(
    ("ranks_backend", "backend"), [("gloo", "auto"), slow("gloo", "gloo"), slow("mpi", "mpi"), slow("mpi", "auto")]
)
def test_every_call_in_a_forked_child_is_refused(ranks_backend: str, backend: str) -> None:
    check_refusals(run_ranks(tries_all_calls_in_a_child, 3, backend=ranks_backend, args=(backend,), timeout_s=120), 3)


def alone() -> list[str]:
    """Fork a process that runs alone: the child has a world of its own."""
    parent = sx.get_communicator()

    def body() -> list[str]:
        mine = sx.get_communicator()
        return [raised_by(parent.barrier), str(mine.all_gather_object(7)), raised_by(lambda: sx.average_gradients([]))]

    return list(in_child(body))


def test_a_child_of_a_world_of_one_has_a_world_of_its_own() -> None:
    assert run_ranks(alone, 1, backend="processes")[0] == ["ForkedError", "[7]", "nothing"]


def children_make_a_world(directory: str) -> list[Any]:
    """Fork children with a rendezvous: they make a world of their own."""
    comm = sx.get_communicator()

    def body() -> list[Any]:
        mine = sx.init(rendezvous=f"file://{directory}", rank=comm.rank, world_size=2)
        answer = mine.all_gather_object(10 + comm.rank)
        sx.shutdown()
        with defaults.use(None):
            single = sx.init("single").all_gather_object(5)
        return [answer, single]

    found = in_child(body)
    comm.barrier()
    return list(found)


def test_children_may_make_a_world_of_their_own(tmp_path: Path) -> None:
    found = run_ranks(children_make_a_world, 2, backend="gloo", args=(str(tmp_path),), timeout_s=120)
    assert found == [[[10, 11], [5]]] * 2
