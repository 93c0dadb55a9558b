"""Groups of torch.distributed: existing ones, new ones on its stores, and the translation of its errors."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from statexchange.comm.wait import Wait
from statexchange.comm.work import Work
from statexchange.errors import (
    MissingExtraError,
    PeerError,
    StallError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.settings import default_timeout_s

__all__ = [
    "GRACE_S",
    "LONGEST_S",
    "absent_ranks",
    "as_timedelta",
    "await_keys",
    "await_ranks",
    "first_line",
    "known_groups",
    "make_gloo_group",
    "note_presence",
    "ranks_key",
    "reduce_options",
    "run_of_default_group",
    "start",
    "store_of_ranks",
    "torch_errors",
    "torch_timeout",
    "unused_prefix",
]

T = TypeVar("T")
LONGEST_S = 86_400.0  # in place of no deadline, so that threads inside torch end
GRACE_S = 1.0  # torch's deadlines are this much later than ours; also the longest wait for others in `close`
_stores: Any = dist  # torch exports its stores and rendezvous there, but not for type checkers
_uses: Counter[str] = Counter()  # how often a store has been used for a purpose, with different keys each time


def known_groups() -> list[object]:
    """Return all groups that torch.distributed knows in this process. Not collective."""
    return list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []  # noqa: SLF001 (torch has no other way)


def _default_store() -> Any:
    """Return the store of torch's default group; None for that of torch's MPI backend. Not collective."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no other way)


def store_of_ranks(ranks: Sequence[int]) -> Any:
    """Return a part of torch's default store for one group of these ranks. Not collective."""
    prefix = unused_prefix(f"group/{ranks_key(ranks)}")
    return _stores.PrefixStore(prefix, _default_store())


def run_of_default_group() -> str | None:
    """Return a name that the ranks of torch's default group share, and no other job has; None without such a group.

    Not collective: the first rank that asks chooses the name.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    store = _default_store()
    if store is None:
        return None
    store = _stores.PrefixStore("statexchange", store)
    with torch_errors(Wait(default_timeout_s(), "torch's store")):
        name: bytes = store.compare_set("run", "", f"run-{secrets.token_hex(8)}")
    return name.decode()


def note_presence(group: dist.ProcessGroup) -> Any:
    """Note in torch's default store that this rank has begun to form a communicator over `group`.

    Not collective. Return the part of the store that has the notes of the group's ranks, for `absent_ranks`; None for a
    group that torch.distributed does not know.
    """
    if group not in known_groups():
        return None
    prefix = unused_prefix(f"presence/{group.group_name}")
    store = _stores.PrefixStore(prefix, _default_store())
    store.set(str(dist.get_rank()), "1")
    return store


def absent_ranks(store: Any, ranks: Mapping[int, int]) -> list[int]:
    """Return the numbers of those of `ranks` that have noted no presence in `store`; [] if it cannot be asked.

    `ranks` has torch's rank of each number.
    """
    try:
        return [number for number, rank in ranks.items() if not store.check([str(rank)])]
    except RuntimeError:  # the process that serves the store has ended
        return []


def start(backend: Literal["gloo", "nccl"], store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Initialise torch.distributed's default group, and return it; with NCCL for GPUs, Gloo serves CPUs. Collective.

    Raises MissingExtraError or UnsupportedError, before anything is sent, where NCCL cannot be.
    """
    if backend == "nccl":
        needs = 'NCCL needs a CUDA build of torch and a GPU: pip install torch from the CUDA index, or use init("auto")'
        if not dist.is_available() or not dist.is_nccl_available():
            raise MissingExtraError(f"{needs} (this torch is {torch.__version__})")
        if not torch.cuda.is_available():
            raise UnsupportedError(f"{needs} (this host shows no GPU)")
    name = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    operation = "the start of torch.distributed"
    wait = Wait(timeout_s, operation)
    await_ranks(store, rank, range(world_size), wait)
    limit = torch_timeout(wait, more_s=0)
    begin = functools.partial(
        dist.init_process_group, name, store=store, rank=rank, world_size=world_size, timeout=limit
    )
    # Here torch's deadline, which the group keeps for its collectives, comes before ours, so that torch does not make a
    # group that we have given up.
    _in_another_thread(begin, Wait(timeout_s + GRACE_S, operation))
    return dist.group.WORLD


def unused_prefix(use: str) -> str:
    """Return a prefix that no earlier use has had; it is the same on all ranks that make the same calls."""
    _uses[use] += 1
    return f"statexchange/{use}/{_uses[use]}"


def ranks_key(ranks: Sequence[int]) -> str:
    """Return a name of these ranks for keys of a store."""
    return "-".join(str(rank) for rank in ranks)


def await_ranks(store: Any, rank: int, ranks: Sequence[int], wait: Wait) -> None:
    """Return when all `ranks`, `rank` among them, have called. Collective over them."""
    with torch_errors(wait):
        store.set(f"present/{rank}", "1")
        await_keys(store, [f"present/{r}" for r in ranks], ranks, wait)


def await_keys(store: Any, keys: Sequence[str], ranks: Sequence[int], wait: Wait) -> None:
    """Return when `store` has all `keys`, each set by one of `ranks`; StallError names those that did not."""
    try:
        wait.until(lambda: store.check(keys))
    except StallError as error:
        missing = tuple(rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key]))
        if error.missing or not missing:
            raise
        raise wait.stall_error(missing) from None


def make_gloo_group(store: Any, rank: int, names: Sequence[int], timeout_s: float) -> Any:
    """Make a Gloo group, on a store not used for this before; errors name rank i as `names[i]`. Collective."""
    wait = Wait(timeout_s, f"the making of a group of ranks {list(names)}")
    await_ranks(store, names[rank], names, wait)
    keys, limit = _stores.PrefixStore("group", store), torch_timeout(wait)
    return _in_another_thread(lambda: _stores.ProcessGroupGloo(keys, rank, len(names), limit), wait)


def _in_another_thread(make: Callable[[], T], wait: Wait) -> T:
    """Return the value of `make`. It runs in another thread, as it cannot be interrupted, and hangs if a rank dies."""
    work: Work[T] = Work(wait.operation)
    threading.Thread(target=work.run, args=(make,), name=wait.operation, daemon=True).start()
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
    except dist.DistStoreError as error:  # a deadline of torch's own has passed
        raise StallError(f"not all ranks reached {wait.operation} in time: {first_line(error)}") from error
    except RuntimeError as error:
        raise PeerError(-1, wait.operation, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def torch_timeout(wait: Wait, more_s: float = GRACE_S) -> timedelta:
    """Return torch's own timeout: longer than `wait`, whose deadline comes first, but finite, so that threads end."""
    return as_timedelta(wait.timeout_s + more_s)


def as_timedelta(timeout_s: float) -> timedelta:
    """Return a number of seconds, which may be inf, as a timedelta for torch."""
    return timedelta(seconds=min(timeout_s, LONGEST_S))


def reduce_options(options: Any, op: str) -> Any:
    """Return `options`, of a reduction of torch, with `op` set."""
    options.reduceOp = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))
    return options
