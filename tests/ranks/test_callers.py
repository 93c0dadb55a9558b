"""Several threads on one communicator: calls are matched by caller, or refused by name; results are never mixed up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sweeps import slow

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.testing import run_ranks

ROUNDS = 100
TRANSPORTS = [("gloo", "auto"), ("gloo", "gloo"), slow("mpi", "mpi")]


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Run each body in a thread of its own, started in this order; return what they return or raise."""
    found: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            found[number] = bodies[number]()
        except BaseException as error:  # noqa: BLE001
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def sums(comm: Communicator, value: float, wrong: list[float]) -> str:
    """Add up `value` of all ranks again and again; return how it ended."""
    for _ in range(ROUNDS):
        try:
            result = float(comm.all_reduce(torch.full((8,), value))[0])
        except sx.StateExchangeError as error:
            return f"{type(error).__name__}: {error}"
        if result != comm.world_size * value:
            wrong.append(result)
    return "ok"


def two_threads(backend: str) -> list[Any]:
    comm = sx.init(backend)
    wrong: list[float] = []
    ends = in_threads(lambda: sums(comm, 1.0, wrong), lambda: sums(comm, 1000.0, wrong))
    return [wrong, ends]


@pytest.mark.parametrize(("ranks_backend", "backend"), TRANSPORTS)
def test_two_threads_never_get_each_others_results(ranks_backend: str, backend: str) -> None:
    for wrong, ends in run_ranks(two_threads, 2, backend=ranks_backend, args=(backend,), timeout_s=120):
        assert wrong == []
        assert all(end == "ok" or end.startswith(("MismatchError", "PeerError", "StallError")) for end in ends), ends


def from_one_thread(backend: str) -> list[Any]:
    """Call from one thread: the first of rank 0, the second thread of that name on rank 1, rank 2's main thread."""
    comm = sx.init(backend)
    stop = threading.Event()
    idle = threading.Thread(target=stop.wait, name="worker")
    idle.start()
    found: list[Any] = []

    def reduce() -> None:
        found.extend(float(comm.all_reduce(torch.ones(2))[0]) for _ in range(3))

    if comm.rank == 2:
        reduce()
    else:
        worker = threading.Thread(target=reduce, name="worker" if comm.rank else "MainThread")
        worker.start()
        worker.join(30)
    stop.set()
    return found


@pytest.mark.parametrize(("ranks_backend", "backend"), TRANSPORTS)
def test_a_single_caller_may_be_any_thread_of_each_rank(ranks_backend: str, backend: str) -> None:
    assert run_ranks(from_one_thread, 3, backend=ranks_backend, args=(backend,), timeout_s=120) == [[3.0] * 3] * 3


def out_of_order(backend: str) -> list[str]:
    """Call from two threads in another order on each rank, with equal shapes and from one line."""
    comm = sx.init(backend)
    turns = [threading.Event(), threading.Event()]
    turns[0].set()

    def reduce_at(turn: int) -> str:
        turns[turn].wait(20)
        try:
            comm.all_reduce(torch.ones(4))
        except sx.errors.MismatchError as error:
            return str(error)
        finally:
            turns[1].set()
        return "nothing"

    known = in_threads(lambda: comm.caller), in_threads(lambda: comm.caller)
    assert known == ([0], [1])
    first_is_known = threading.Event()

    def counted(number: int, turn: int) -> Callable[[], str]:
        """Return the body of the caller 2 + `number`, which reduces at its turn."""

        def body() -> str:
            if number:
                first_is_known.wait(20)
            assert comm.caller == 2 + number
            first_is_known.set()
            return reduce_at(turn)

        return body

    first = comm.rank == 0
    return in_threads(counted(0, 0 if first else 1), counted(1, 1 if first else 0))


@pytest.mark.parametrize(("ranks_backend", "backend"), TRANSPORTS)
def test_callers_in_different_orders_are_a_mismatch_that_names_both(ranks_backend: str, backend: str) -> None:
    for messages in run_ranks(out_of_order, 2, backend=ranks_backend, args=(backend,), timeout_s=120):
        for text in messages:
            assert "rank 0 called all_reduce sum float32[4] at" in text, text
            assert "rank 1 called all_reduce sum float32[4] at" in text, text
            assert text.count("test_callers.py:") == 2, text
            assert "in its thread 2" in text, text
            assert "in its thread 3" in text, text
            assert "duplicate()" in text, text


def with_a_reducer(backend: str) -> list[Any]:
    """One thread trains; another one reduces tensors of the size of its bucket."""
    comm = sx.init(backend)
    module = torch.nn.Linear(8, 1, bias=False)
    reducer = sx.train.BucketReducer(module, comm, overlap=True)
    wrong: list[float] = []

    def train() -> str:
        for step in range(ROUNDS):
            try:
                module(torch.full((1, 8), float(comm.rank + step))).sum().backward()
                reducer.finalize()
            except sx.StateExchangeError as error:
                return f"{type(error).__name__}: {error}"
            grad = module.weight.grad
            assert grad is not None
            if grad.flatten().tolist() != [step + 0.5] * 8:
                wrong.append(float(grad.flatten()[0]))
            module.weight.grad = None
        return "ok"

    return [wrong, in_threads(train, lambda: sums(comm, 1000.0, wrong))]


@pytest.mark.parametrize(("ranks_backend", "backend"), TRANSPORTS[:2])
def test_a_reducer_and_another_thread_do_not_mix_results(ranks_backend: str, backend: str) -> None:
    for wrong, ends in run_ranks(with_a_reducer, 2, backend=ranks_backend, args=(backend,), timeout_s=120):
        assert wrong == []
        assert all(end == "ok" or end.startswith(("MismatchError", "PeerError", "StallError")) for end in ends), ends


@pytest.mark.ranks(2, backend=["gloo", slow("mpi")])
def test_threads_that_take_turns_and_threads_of_their_own_communicators_are_right() -> None:
    comm = sx.init()
    for _ in range(3):  # one thread after another; their ids may be reused
        assert in_threads(lambda: float(comm.all_reduce(torch.ones(1)))) == [2.0]
    pair = [comm.duplicate(), comm.duplicate()]
    wrong: list[float] = []
    ends = in_threads(lambda: sums(pair[0], 1.0, wrong), lambda: sums(pair[1], 1000.0, wrong))
    assert (wrong, ends) == ([], ["ok", "ok"])


@pytest.mark.ranks(2, backend=["gloo", slow("mpi")])
def test_tensors_that_two_threads_send_at_once_arrive_whole() -> None:
    """Both have the same size; their order is undefined."""
    comm = sx.init()
    tensors = [torch.full((100_000,), float(k)) for k in (1, 2)]
    if comm.rank:
        got = [torch.zeros(100_000) for _ in tensors]
        ends = in_threads(lambda: comm.recv(got[0], 0) is got[0], lambda: comm.recv(got[1], 0) is got[1])
        assert sorted(sorted(set(tensor.tolist())) for tensor in got) == [[1.0], [2.0]]
    else:
        ends = in_threads(
            lambda: comm.send(tensors[0], 1) is tensors[0], lambda: comm.send(tensors[1], 1) is tensors[1]
        )
    assert ends == [True, True]
    comm.barrier()


def called_in_a_call() -> list[str]:
    comm = sx.init()
    messages: list[str] = []

    def handle(*_: Any) -> None:
        try:
            comm.barrier()
        except sx.errors.InvalidArgumentError as error:
            messages.append(str(error))

    signal.signal(signal.SIGALRM, handle)
    if comm.rank:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        time.sleep(0.6)
    comm.all_reduce(torch.ones(1))
    comm.barrier()
    return messages


def test_a_call_inside_a_call_is_refused() -> None:
    quiet, messages = run_ranks(called_in_a_call, 2, backend="gloo")
    assert quiet == []
    assert "a barrier was called inside another call" in messages[0]


class Deep(torch.autograd.Function):
    """Calls backward within backward, so deep that autograd continues in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, leaf: list[torch.Tensor]) -> torch.Tensor:
        ctx.depth, ctx.leaf = depth, leaf
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            inner = torch.ones(4, requires_grad=True)
            result = Deep.apply(inner, ctx.depth - 1, ctx.leaf) if ctx.depth else ctx.leaf[0] * 1
            result.sum().backward()
        return grads[0], None, None


@pytest.mark.ranks(2, backend="gloo")
def test_hooks_in_autograds_threads_call_as_the_thread_that_trains() -> None:
    """On rank 0 the hook runs in a thread of autograd, on rank 1 in the thread that called backward."""
    comm = sx.init()
    leaf = torch.ones(4, requires_grad=True)
    in_hook: list[tuple[bool, int]] = []

    def hook(param: torch.Tensor) -> None:
        in_hook.append((threading.current_thread() is threading.main_thread(), comm.caller))
        comm.all_reduce(param.grad)

    leaf.register_post_accumulate_grad_hook(hook)
    (Deep.apply(torch.ones(4, requires_grad=True), 70, [leaf]) if comm.rank == 0 else leaf * 1).sum().backward()
    assert in_hook == [(comm.rank == 1, 0)]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 4
    comm.barrier()
    assert in_threads(lambda: comm.caller) == [1]
    leaf.grad = None
    expected = pytest.raises(sx.errors.MismatchError, match=r"rank 0 .*autograd.*rank 1\b")
    with expected:
        (Deep.apply(torch.ones(4, requires_grad=True), 70, [leaf]) if comm.rank == 0 else leaf * 1).sum().backward()
    with comm.called_by(7):
        assert comm.caller == 0  # this thread was started by Python
