"""One thread uses a communicator at a time: another one is refused by name; results are never mixed up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import slow

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.testing import run_ranks

ROUNDS = 100
REFUSED = ("InvalidArgumentError", "PeerError", "StallError")  # one that stalls may be first to see the others leave
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
        assert all(end.startswith(REFUSED) for end in ends), ends


def one_thread_beside_the_maker(backend: str) -> list[Any]:
    """On each rank another thread begins to call first: the one that made the communicator, or a new one."""
    comm = sx.init(backend)
    wrong: list[float] = []
    thread = threading.Thread(target=lambda: ends.append(sums(comm, 1.0, wrong)))
    ends: list[str] = []
    if comm.rank == 0:
        thread.start()
    ends.append(sums(comm, 1000.0, wrong))
    if comm.rank == 1:
        thread.start()
    thread.join(30)
    return [wrong, ends]


@pytest.mark.parametrize(("ranks_backend", "backend"), TRANSPORTS)
def test_a_thread_beside_the_maker_is_refused_on_all_ranks(ranks_backend: str, backend: str) -> None:
    found = run_ranks(one_thread_beside_the_maker, 2, backend=ranks_backend, args=(backend,), timeout_s=120)
    assert [wrong for wrong, _ in found] == [[], []]
    texts = [end for _, ends in found for end in ends]
    assert any("which made it and still runs" in text or "which called all_reduce" in text for text in texts), texts
    assert all(text == "ok" or text.startswith(REFUSED) for text in texts), texts


def from_one_thread(backend: str) -> list[Any]:
    """Call from one thread: the first of rank 0, the second thread of that name on rank 1, rank 2's main thread."""
    comm = sx.init(backend)
    comm.hand_over()
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


def save_beside_a_thread() -> list[str]:
    """Rank 0 calls from a thread that then stays; on all ranks the main thread calls next."""
    comm = sx.init()
    comm.hand_over()
    stop, called = threading.Event(), threading.Event()

    def train() -> None:
        comm.all_reduce(torch.ones(4))
        called.set()
        stop.wait(30)

    trainer = threading.Thread(target=train, name="trainer")
    if comm.rank == 0:
        trainer.start()
        called.wait(30)
    else:
        comm.all_reduce(torch.ones(4))
    texts = []
    for _ in range(2):
        with pytest.raises(sx.errors.InvalidArgumentError) as raised:
            sx.synchronize({"weight": torch.ones(2)}, comm=comm)
        texts.append(str(raised.value))
    stop.set()
    return texts


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_second_thread_is_refused_on_all_ranks_by_both_calls(backend: str) -> None:
    for texts in run_ranks(save_beside_a_thread, 2, backend=backend, timeout_s=120):
        for text in texts:
            assert "thread 'MainThread' called synchronize" in text, text
            assert "test_callers.py:" in text, text
            assert "belongs to thread 'trainer', which called all_reduce sum float32[4]" in text, text
            assert "duplicate()" in text, text
            assert "rank 0" in text, text


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
        assert all(end.startswith(REFUSED) for end in ends), ends


def new_thread_for_each_call(backend: str, check: str) -> list[Any]:
    """Rank 0 makes each call in a new thread, which ends; the others call from their main threads."""
    comm = sx.init(backend, check=check, timeout_s=10)
    comm.hand_over()
    found: list[Any] = []
    for value in (1.0, 2.0, 3.0):
        tensor = torch.full((4,), value)
        ends = (
            in_threads(lambda tensor=tensor: comm.all_reduce(tensor)) if comm.rank == 0 else [comm.all_reduce(tensor)]
        )
        found += [end.tolist() if isinstance(end, torch.Tensor) else repr(end) for end in ends]
    work = comm.all_reduce(torch.ones(4), async_op=True)
    return [*found, work.wait().tolist(), comm.all_gather_object(comm.rank)]


@pytest.mark.parametrize("check", ["auto", "off"])
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_thread_that_is_new_on_one_rank_alone_is_no_mismatch(backend: str, check: str) -> None:
    expected = [[3.0] * 4, [6.0] * 4, [9.0] * 4, [3.0] * 4, [0, 1, 2]]
    found = run_ranks(new_thread_for_each_call, 3, backend="gloo", args=(backend, check), timeout_s=120)
    assert found == [expected] * 3


@pytest.mark.ranks(2, backend=["gloo", slow("mpi")])
def test_threads_that_take_turns_and_threads_of_their_own_communicators_are_right() -> None:
    comm = sx.init()
    comm.hand_over()
    for _ in range(3):  # one thread after another; their ids may be reused
        assert in_threads(lambda: float(comm.all_reduce(torch.ones(1)))) == [2.0]
    pair = [comm.duplicate(), comm.duplicate()]
    for duplicate in pair:
        duplicate.hand_over()
    wrong: list[float] = []
    ends = in_threads(lambda: sums(pair[0], 1.0, wrong), lambda: sums(pair[1], 1000.0, wrong))
    assert (wrong, ends) == ([], ["ok", "ok"])


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
def test_hooks_in_autograds_threads_may_call() -> None:
    """On rank 0 the hook runs in a thread of autograd, on rank 1 in the thread that called backward."""
    comm = sx.init()
    leaf = torch.ones(4, requires_grad=True)
    in_hook: list[bool] = []

    def hook(param: torch.Tensor) -> None:
        in_hook.append(threading.current_thread() is threading.main_thread())
        comm.all_reduce(param.grad)

    comm.barrier()  # from now on the communicator belongs to the main thread
    leaf.register_post_accumulate_grad_hook(hook)
    (Deep.apply(torch.ones(4, requires_grad=True), 70, [leaf]) if comm.rank == 0 else leaf * 1).sum().backward()
    assert in_hook == [comm.rank == 1]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 4
    comm.barrier()


def test_a_world_of_one_has_no_caller(tmp_path: Path) -> None:
    optimizer = sx.DistributedOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0))
    optimizer.step()  # by the main thread

    def export() -> str:
        return sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "exported").path

    with ThreadPoolExecutor() as executor:
        assert executor.submit(export).result(30) == str(tmp_path / "exported")
    optimizer.step()
