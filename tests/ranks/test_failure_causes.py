"""The errors that surviving ranks raise after a failure: type, cause, operation and the user's line."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from starting import LAUNCHED_AS, start
from sweeps import by_default, slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.backends import store
from statexchange.errors import InvalidArgumentError, MismatchError, PeerError
from statexchange.testing import run_ranks
from statexchange.train.algorithms import Decentralized
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.ddp_hook import as_comm_hook
from statexchange.train.module import data_parallel
from statexchange.train.optimizer import DistributedOptimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(module: nn.Module) -> torch.Tensor:
    return (module(torch.ones(5, 4)) ** 2).mean()


def marked_line(function: Any) -> str:
    """Return the place of the line of `function` that ends with "# here", as messages show it."""
    code = function.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    found = [n for n in range(code.co_firstlineno, len(lines)) if lines[n - 1].endswith("# here")]
    return f"{code.co_filename}:{found[0]}"


# The communication hook of DDP


class Skips(nn.Module):
    """Layers of which each call uses all but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != skipped:
                x = layer(x)
        return x


def trains_with_unused_parameters(adopts: bool) -> list[Any]:
    """Ranks skip different layers, so that DDP's own all_reduce of what was used comes at different moments."""
    comm = sx.get_communicator() if adopts else sx.init("gloo", timeout_s=30)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Skips(), find_unused_parameters=True, bucket_cap_mb=0.01)
    ddp.register_comm_hook(None, as_comm_hook(comm))
    for step in range(30):
        ddp(torch.ones(2, 64), (step + comm.rank) % 8).sum().backward()
    return [float(parameter.grad.double().sum()) for parameter in ddp.parameters()]


@pytest.mark.parametrize("adopts", [False, slow(True)])
def test_ddp_may_use_its_group_while_its_hook_uses_the_communicator(adopts: bool) -> None:
    first, second = run_ranks(trains_with_unused_parameters, 2, backend="gloo", args=(adopts,), timeout_s=60)
    assert first == second


def fails_beside_torchs_group() -> list[float]:
    """The communicator fails in the middle of a large all_reduce; torch's group of the same ranks goes on."""
    comm = sx.init("gloo", timeout_s=20)
    if comm.rank == 1:
        comm.close(ValueError("a bad batch"))
    else:
        with pytest.raises(PeerError, match="a bad batch"):
            comm.all_reduce(torch.ones(5_000_000))
    total = torch.ones(2)
    dist.all_reduce(total)
    return total.tolist()


def test_a_failed_communicator_leaves_the_group_of_torch_usable() -> None:
    assert run_ranks(fails_beside_torchs_group, 2, backend="gloo", timeout_s=60) == [[2.0, 2.0]] * 2


def fails_under_ddp(how: str) -> list[Any]:
    comm = sx.get_communicator()
    module = net()
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4)
    ddp.register_comm_hook(None, as_comm_hook(comm))
    loss_of(ddp).backward()
    if comm.rank == 1:

        def strike(_: torch.Tensor) -> None:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("oops")

        module[2].weight.register_hook(strike)
        try:
            loss_of(ddp).backward()
        except ZeroDivisionError as error:
            comm.close(error)  # as Python does for an uncaught exception at exit
            return []
    with pytest.raises(PeerError) as caught:
        loss_of(ddp).backward()
    return [caught.value.rank, caught.value.cause]


@pytest.mark.parametrize(("how", "cause"), [("kill", "died"), ("raise", "ZeroDivisionError: oops")])
def test_under_ddp_a_failed_rank_is_a_peer_error_in_backward(how: str, cause: str) -> None:
    outcomes = run_ranks(fails_under_ddp, 2, backend="gloo", args=(how,), timeout_s=120, allow_failure=True)
    assert outcomes[0].state == "ok", outcomes
    rank, message = outcomes[0].value
    assert rank == 1
    assert re.search(cause, message)


def mismatches_under_ddp() -> list[Any]:
    comm = sx.get_communicator()
    module = net()
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, as_comm_hook(comm))
    for _ in range(2):  # in the second step DDP rebuilds its buckets
        loss_of(ddp).backward()
    with pytest.raises(MismatchError) as caught:
        if comm.rank == 0:
            loss_of(ddp).backward()  # here
        else:
            comm.all_reduce(torch.ones(3))
    # All ranks have called, so the communicator still works, and DDP, too.
    module.zero_grad()
    loss_of(ddp).backward()
    reference = net()
    loss_of(reference).backward()
    same = [torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), reference.parameters(), strict=True)]
    return [str(caught.value), same]


def test_ddp_gives_right_gradients_after_a_mismatch_in_its_backward() -> None:
    for message, same in run_ranks(mismatches_under_ddp, 2, backend="gloo", timeout_s=120):
        where = marked_line(mismatches_under_ddp)
        assert f"at {where} (bucket 0 of DDP)" in message
        assert same == [True] * 4


# Hooks of this package


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def mismatches_in_backward(directory: str) -> str:
    comm = start("shm", directory)
    module = net()
    kept = DistributedOptimizer(sgd(module), comm, module=module)
    loss_of(module).backward()
    with pytest.raises(MismatchError) as caught:
        if comm.rank == 0:
            loss_of(module).backward()  # here
        else:
            comm.barrier()
    kept.close()
    return str(caught.value)


def test_a_mismatch_in_backward_names_the_line_and_the_parameters(tmp_path: Path) -> None:
    where = marked_line(mismatches_in_backward)
    for message in run_ranks(mismatches_in_backward, 2, backend="processes", args=(str(tmp_path),), timeout_s=120):
        found = re.search(r"rank 0 called all_reduce avg float32\[96\] at (\S+) \((.*)\); rank 1 called", message)
        assert found is not None, message
        assert found[1] == where
        assert found[2] == "bucket 0: 2.bias, 2.weight, 0.bias, 0.weight"


def has_sent_several_buckets(directory: str) -> list[Any]:
    """Rank 1 waits in its own code until rank 0, which has sent several buckets, raises."""
    comm = start("shm", directory)
    raised = Path(directory) / "raised"
    module = net()
    reducer = BucketReducer(module, comm, bucket_bytes=16, overlap=True)
    loss_of(module).backward()
    reducer.finalize()
    if comm.rank == 1:
        with pytest.raises(MismatchError):
            comm.barrier()
        deadline = time.monotonic() + 20
        while not raised.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return [raised.exists()]
    with pytest.raises(MismatchError) as caught:
        loss_of(module).backward()
        reducer.finalize()
    raised.touch()
    return [len(reducer.buckets), str(caught.value)]


def test_a_mismatch_in_one_bucket_ends_the_following_ones_at_once(tmp_path: Path) -> None:
    """No following bucket waits for a call of rank 1, which could be taken for its counterpart."""
    found = run_ranks(has_sent_several_buckets, 2, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert found[1] == [True]
    assert found[0][0] == 4
    assert "(bucket 0: " in found[0][1]


def begins_works_in_a_row(backend: str, directory: str) -> list[Any]:
    """After a failed work, works that were begun before its error was raised fail, too."""
    comm = start(backend, directory)
    first, second = torch.ones(3 + comm.rank), torch.ones(3)
    works = [comm.all_reduce(first, async_op=True), comm.all_reduce(second, async_op=True)]
    with pytest.raises(MismatchError) as early:
        works[0].wait()
    third = comm.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(MismatchError) as late:
        works[1].wait()
    assert str(late.value) == str(early.value)
    assert second.tolist() == [1.0] * 3
    found = third.wait().tolist()
    # The order of waits does not matter.
    works = [comm.all_reduce(first, async_op=True), comm.all_reduce(second, async_op=True)]
    with pytest.raises(MismatchError):
        works[1].wait()
    comm.all_reduce(second)
    comm.wait_all()  # the error has been raised, so later works succeed
    return [found, second.tolist()]


@pytest.mark.parametrize("backend", ["threads", slow("shm"), "gloo"])
def test_works_after_a_mismatch_fail(backend: str, tmp_path: Path) -> None:
    args = (backend, str(tmp_path))
    found = run_ranks(begins_works_in_a_row, 2, backend=LAUNCHED_AS[backend], args=args, timeout_s=120)
    assert found == [[[2.0] * 3, [2.0] * 3]] * 2


def trains_alone_after_a_failure(directory: str) -> list[Any]:
    comm = start("shm", directory)
    module = net()
    optimizer = DistributedOptimizer(sgd(module), module=module)
    loss_of(module).backward()
    if comm.rank == 1:
        comm.close(RuntimeError("boom"))
        return []
    with pytest.raises(PeerError, match="boom"):
        loss_of(module).backward()
    with pytest.raises(PeerError, match="boom"):
        loss_of(module).backward()  # it raises this until it is closed
    sx.shutdown()
    module.zero_grad()
    loss_of(module).backward()
    reference = net()
    loss_of(reference).backward()
    same = [torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), reference.parameters(), strict=True)]
    with pytest.raises(PeerError, match="boom"):
        optimizer.step()  # not with the gradients of this rank alone
    again = DistributedOptimizer(sgd(module), sx.init("single"), module=module)
    loss_of(module).backward()
    again.step()
    return same


def test_after_a_failure_and_shutdown_parameters_can_be_trained_alone(tmp_path: Path) -> None:
    found = run_ranks(trains_alone_after_a_failure, 2, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert found[0] == [True] * 4


@pytest.mark.parametrize("overlap", [None, False])
def test_a_closed_optimizer_removes_its_hooks_and_does_not_step(overlap: bool | None) -> None:
    module = net()
    optimizer = DistributedOptimizer(sgd(module), module=module, overlap=overlap)
    loss_of(module).backward()
    optimizer.close()
    optimizer.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        optimizer.step()
    with pytest.raises(InvalidArgumentError, match="closed"):
        optimizer.finalize()
    DistributedOptimizer(sgd(module), module=module).step()


def shuts_down_between_backward_and_step(directory: str) -> None:
    module = net()
    start("shm", directory)
    trained, optimizer = data_parallel(module, sgd(module), Decentralized(interval=3))
    loss_of(trained).backward()
    optimizer.step()
    sx.shutdown()
    loss_of(trained).backward()
    with pytest.raises(sx.errors.NotInitializedError, match="closed"):
        optimizer.step()  # no reduction is pending, and none could run


def test_no_step_is_silently_local_after_shutdown(tmp_path: Path) -> None:
    run_ranks(shuts_down_between_backward_and_step, 2, backend="processes", args=(str(tmp_path),), timeout_s=120)


# Ranks that wait for a failed one


def calls_a_failed_rank(backend: str, directory: str, verb: str, how: str) -> list[Any]:
    comm = start(backend, directory)
    comm.barrier()
    if comm.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.close(RuntimeError("boom") if how == "raise" else None)
        return []
    wait = {
        "send": lambda: comm.send(torch.ones(3), 1),
        "recv": lambda: comm.recv(torch.ones(3), 1),
        "all_reduce": lambda: comm.all_reduce(torch.ones(3)),
    }
    with pytest.raises(PeerError) as caught:
        wait[verb]()
    return [caught.value.rank, caught.value.phase, caught.value.cause]


CAUSES = {
    "raise": "RuntimeError: boom",
    "close": "it closed its communicator, or its script ended",
    "kill": r"its process \d+ died",
}


FAILED_PEERS = [
    (backend, verb, how) for backend in ("shm", "gloo") for verb in ("recv", "send", "all_reduce") for how in CAUSES
]


@pytest.mark.parametrize(("backend", "verb", "how"), by_default(FAILED_PEERS, 0, 2, 3))
def test_a_rank_that_waits_for_a_failed_one_raises_its_cause_and_operation(
    backend: str, verb: str, how: str, tmp_path: Path
) -> None:
    args = (backend, str(tmp_path), verb, how)
    launched = LAUNCHED_AS[backend]
    outcomes = run_ranks(calls_a_failed_rank, 2, backend=launched, args=args, allow_failure=True, timeout_s=120)
    assert outcomes[0].state == "ok", outcomes
    rank, phase, cause = outcomes[0].value
    assert rank == 1
    assert re.fullmatch(CAUSES[how], cause)
    if how == "raise":
        assert phase == "its own code"
    else:
        assert phase.startswith(f"{verb} "), phase


# Groups that are being made


def dies_while_groups_are_made(backend: str, directory: str, where: str) -> list[Any]:
    comm = start(backend, directory)
    if comm.rank == 1:
        module = store if where == "await_ranks" else bootstrap

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, where, die)
    with pytest.raises(PeerError) as caught:
        sx.export_checkpoint({"w": torch.ones(3)}, f"{directory}/out", background=True)
    with pytest.raises(PeerError):
        comm.barrier()
    return [caught.value.rank, caught.value.cause]


@pytest.mark.parametrize("where", ["await_ranks", "open_control_page"])
def test_a_rank_that_dies_while_the_first_async_call_makes_its_communicator_is_named(
    where: str, tmp_path: Path
) -> None:
    """The error comes long before the default deadline of 300 s."""
    args = ("gloo", str(tmp_path), where)
    outcomes = run_ranks(dies_while_groups_are_made, 3, backend="gloo", args=args, timeout_s=120, allow_failure=True)
    for rank in (0, 2):
        assert outcomes[rank].state == "ok", outcomes
        assert outcomes[rank].exit_code == 0  # although torch's constructor may still wait in a thread
        assert outcomes[rank].value[0] == 1
        assert re.fullmatch(r"its process \d+ died", outcomes[rank].value[1])
