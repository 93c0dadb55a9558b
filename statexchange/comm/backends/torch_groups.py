"""Groups of torch.distributed: existing ones, new ones on its stores, and the translation of its errors."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from statexchange.comm.failure.monitor import FailureMonitor, OuterMonitor
from statexchange.comm.wait import Wait
from statexchange.comm.work import Work
from statexchange.errors import (
    InvalidArgumentError,
    MissingExtraError,
    PeerError,
    StallError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.settings import default_timeout_s

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed exports it, but not for type checkers

T = TypeVar("T")
LONGEST_S = 86_400.0  # in place of no deadline, so that threads inside torch end
GRACE_S = 1.0  # torch's deadlines are this much later than ours; also the longest wait for others in `close`
_stores: Any = dist  # torch exports its stores and rendezvous there, but not for type checkers


def known_groups() -> Mapping[Any, tuple[str, Store | None]]:
    """Return all groups that torch.distributed knows in this process, with backend and store. Not collective."""
    if not dist.is_available():  # a torch that was built without it
        return {}
    return dist.distributed_c10d._world.pg_map  # noqa: SLF001 (torch has no other way)


def store_of_group(group: dist.ProcessGroup) -> Store:
    """Return the torch Store at which the ranks of `group` have met. Not collective."""
    groups = known_groups()
    if group not in groups:
        raise InvalidArgumentError("torch.distributed does not know this group: was it destroyed?")
    backend, store = groups[group]
    if store is None:
        raise UnsupportedError(f"torch's {backend} backend has no store at which ranks could meet: use from_mpi")
    return store


def run_of_default_group() -> str | None:
    """Return a name that the ranks of torch's default group share, and no other job has; None without such a group.

    Not collective: the first rank that asks chooses the name.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    _, store = known_groups()[dist.group.WORLD]
    if store is None:  # that of torch's MPI backend
        return None
    store = _stores.PrefixStore("statexchange", store)
    with torch_errors(Wait(default_timeout_s(), "torch's store")):
        name: bytes = store.compare_set("run", "", f"run-{secrets.token_hex(8)}")
    return name.decode()


def start(backend: str, store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """Initialise torch.distributed's default group, and return it; with "nccl", Gloo serves CPUs. Collective.

    Raises MissingExtraError or UnsupportedError, before anything is sent, where NCCL cannot be.
    """
    if backend == "nccl":
        needs = 'NCCL needs a CUDA build of torch and a GPU: pip install torch from the CUDA index, or use init("auto")'
        if not dist.is_available() or not dist.is_nccl_available():
            raise MissingExtraError(f"{needs} (this torch is {torch.__version__})")
        if not torch.cuda.is_available():
            raise UnsupportedError(f"{needs} (this host shows no GPU)")
    name = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    # Torch's deadline, which the group keeps for its collectives, comes before ours, so that torch does not make a
    # group that we have given up.
    wait, limit = Wait(timeout_s + GRACE_S, "the start of torch.distributed"), as_timedelta(timeout_s)
    _awaited(
        functools.partial(dist.init_process_group, name, store=store, rank=rank, world_size=world_size, timeout=limit),
        wait,
    )
    return dist.group.WORLD


def ranks_key(ranks: Sequence[int]) -> str:
    """Return a name of these ranks for keys of a store."""
    return "-".join(map(str, ranks))


class _Arrivals(OuterMonitor):
    """Names the ranks that have not set their keys in a store."""

    def __init__(self, outer: FailureMonitor, store: Store, keys: Mapping[int, str], rank: int) -> None:
        super().__init__(outer)
        self.rank = rank
        self._store = store
        self._keys = keys

    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, key in self._keys.items() if not self._store.check([key]))

    def late_ranks(self) -> tuple[int, ...]:
        # One rank alone asks about all: thousands that did so at once would keep the store busy for minutes. There is
        # a first one, as this rank has set its own key.
        first = next(rank for rank, key in self._keys.items() if self._store.check([key]))
        if first != self.rank:
            return ()
        return self.missing_ranks()


def await_keys(store: Store, keys: Mapping[int, str], rank: int, wait: Wait) -> None:
    """Return when `store` has the key of each rank; StallError names those that did not set theirs.

    This `rank` has set its own. Late ranks are logged by the lowest one that waits.
    """
    texts = list(keys.values())
    # All at once, in one request; one by one only for the names, when it is too late.
    arrivals = _Arrivals(wait.monitor, store, keys, rank)
    Wait(wait.timeout_s, wait.operation, arrivals).until(lambda: store.check(texts))


def await_ranks(store: Store, rank: int, ranks: Sequence[int], wait: Wait) -> None:
    """Return when all `ranks`, `rank` among them, have called. Collective over them."""

    def meet() -> None:
        store.set(f"present/{rank}", "1")
        await_keys(store, {each: f"present/{each}" for each in ranks}, rank, wait)

    ask_store(meet, wait)


def ask_store(requests: Callable[[], T], wait: Wait) -> T:
    """Return the value of `requests` to a store, which themselves end with `wait`, unless the store does not answer."""
    # While the process that serves a store is stopped, or its host is cut off, a request blocks without a deadline.
    work = begun(wait.operation, requests)
    server = "the store, which rank 0 or torchrun serves,"
    try:
        Wait(wait.timeout_s + GRACE_S, wait.operation, wait.monitor).until(work.is_completed)
        return work.wait()
    except StallError as error:
        if error.missing:
            raise
        raise StallError(f"{server} does not answer in {wait.operation}") from error
    except StateExchangeError:
        raise
    except RuntimeError as error:
        raise PeerError(-1, wait.operation, f"{server} has ended: {first_line(error)}") from error


def make_gloo_group(store: Store, rank: int, names: Sequence[int], timeout_s: float) -> Any:
    """Make a Gloo group, on a store not used for this before; errors name rank i as `names[i]`. Collective."""
    wait = Wait(timeout_s, f"the making of a group of ranks {list(names)}")
    # Before Gloo connects, as Gloo does not name the ranks that are missing.
    await_ranks(store, names[rank], names, wait)
    keys, limit = _stores.PrefixStore("group", store), torch_timeout(wait)
    return _awaited(lambda: _stores.ProcessGroupGloo(keys, rank, len(names), limit), wait)


def begun(operation: str, call: Callable[[], T]) -> Work[T]:
    """Begin `call`, of torch, in a thread that ends with the process: it cannot be interrupted, and may hang."""
    work: Work[T] = Work(operation)
    run = contextvars.copy_context().run  # so that its errors name the public call under way
    threading.Thread(target=run, args=(work.run, call), name=operation, daemon=True).start()
    return work


def _awaited(make: Callable[[], T], wait: Wait) -> T:
    """Return the value of `make`, which hangs if a rank dies; `wait` ends then."""
    work = begun(wait.operation, make)
    with torch_errors(wait):
        wait.until(work.is_completed)
        return work.wait()


@contextlib.contextmanager
def torch_errors(wait: Wait) -> Iterator[None]:
    """Translate torch's errors inside the block into StallError and PeerError."""
    try:
        yield
    except StateExchangeError:
        raise
    # Before RuntimeError, from which it is derived.
    except dist.DistStoreError as error:  # a deadline of torch's own has passed
        raise StallError(f"not all ranks reached {wait.operation} in time: {first_line(error)}") from error
    except RuntimeError as error:
        raise PeerError(-1, wait.operation, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a message."""
    # NCCL's texts have several lines, and all have a stack trace of C++ if TORCH_SHOW_CPP_STACKTRACES is set.
    return (str(error).splitlines() or [type(error).__name__])[0]


def torch_timeout(wait: Wait) -> timedelta:
    """Return torch's own timeout: longer than `wait`, whose deadline comes first, but finite, so that threads end."""
    return as_timedelta(wait.timeout_s + GRACE_S)


def as_timedelta(timeout_s: float) -> timedelta:
    """Return a number of seconds, which may be inf, as a timedelta for torch."""
    return timedelta(seconds=min(timeout_s, LONGEST_S))


def reduce_options(options: Any, op: str) -> Any:
    """Return `options`, of a reduction of torch, with `op` set."""
    options.reduceOp = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))
    return options
