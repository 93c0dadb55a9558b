"""Messages and tensors through what torch.distributed has: Gloo and NCCL process groups, and key-value stores."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from statexchange.comm import forks
from statexchange.comm.backend import AbandonedError, Backend, Finish, Wait, check_ranks
from statexchange.comm.reduction import reduce_parts
from statexchange.comm.work import Work
from statexchange.errors import (
    MissingExtraError,
    PeerError,
    StallError,
    StateExchangeError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from statexchange.comm.tcp_store import Server

__all__ = [
    "NCCLBackend",
    "Sibling",
    "StoreBackend",
    "StoreCarrier",
    "TorchBackend",
    "cpu_group",
    "default_group",
    "mesh_group",
    "of_ranks",
    "start_gloo",
    "start_nccl",
    "torch_errors",
    "unused",
]

_RECORD, _INLINE = 256, 248  # bytes of a message that goes in one step, and how much of it is payload
_SMALL_BYTES = 1 << 18  # what all ranks together get in one step, rather than in several
_BLOCK_BYTES = 8 << 20
_FIRST_TAG = 0x53780000  # the group may be the caller's, who counts from 0
_NEVER_SENT_TAG = _FIRST_TAG + 3
_LONGEST_S = 86_400.0
_LATER_S = 1.0
_WIDE = (torch.float32, torch.float64)
_NCCL_INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_stores: Any = dist  # torch exports its stores and rendezvous there, but not for type checkers
_following: dict[threading.Thread, _GlooBackend] = {}
_uses: Counter[str] = Counter()  # of what a store is used for again and again, with keys of its own each time


def default_group() -> dist.ProcessGroup | None:
    """torch.distributed's default group, if it is initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def known_groups() -> list[object]:
    """All groups that torch.distributed knows in this process. Not collective."""
    return list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []  # noqa: SLF001 (torch has no other way)


@dataclass(frozen=True, slots=True)
class Sibling:
    """A Gloo group of ours of `ranks` of torch's default group, in this order; torch.distributed does not know it.

    `torch.distributed.new_group` can make one without all other ranks only if all have made equally many before: it
    names groups by their number, and ranks that count differently never meet.
    """

    gloo: Any
    ranks: Sequence[int]


def cpu_group(group: dist.ProcessGroup, timeout_s: float) -> Any:
    """`group` itself if it moves CPU tensors; else a sibling Gloo group of its ranks, so that the training group is
    left alone. Collective over `group`."""
    if "cpu:gloo" in dist.get_backend_config(group) or dist.get_backend(group) == "gloo":
        return group
    return _sibling(dist.get_process_group_ranks(group), timeout_s).gloo


def _sibling(ranks: Sequence[int], timeout_s: float) -> Sibling:
    """A Gloo group of these ranks of the default group. Collective over them only."""
    prefix = unused(f"group/{_joined(ranks)}")
    store = _stores.PrefixStore(prefix, dist.distributed_c10d._get_default_store())  # noqa: SLF001 (torch has no other way)
    return Sibling(_make_gloo(store, list(ranks).index(dist.get_rank()), ranks, timeout_s), ranks)


def mesh_group(mesh: Any, timeout_s: float) -> dist.ProcessGroup | Sibling:
    """The group of all ranks of a DeviceMesh. Collective over them unless torch has it already."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    world = default_group()
    if world is not None and ranks == list(range(dist.get_world_size())):
        return world
    return _sibling(ranks, timeout_s)


def of_ranks(ranks: Sequence[int], timeout_s: float) -> Backend:
    """A Gloo backend over these ranks of the default group, in that order. Collective over them only."""
    check_ranks(ranks, dist.get_rank(), dist.get_world_size())
    return TorchBackend(_sibling(ranks, timeout_s), timeout_s)


# Meeting over a store


def start_gloo(store: Any, rank: int, world_size: int, timeout_s: float) -> dist.ProcessGroup:
    """torch.distributed's default group, initialised with Gloo. Collective."""
    return _start("gloo", store, rank, world_size, timeout_s)


def start_nccl(store: Any, rank: int, world_size: int, timeout_s: float) -> dist.ProcessGroup:
    """torch.distributed's default group, initialised with NCCL for GPUs and Gloo for CPUs. Collective.

    MissingExtraError or UnsupportedError, before anything is sent, where that cannot be.
    """
    how = 'NCCL needs a CUDA build of torch and a GPU: pip install torch from the CUDA index, or use init("auto")'
    if not dist.is_available() or not dist.is_nccl_available():
        raise MissingExtraError(f"{how} (this torch is {torch.__version__})")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{how} (this host shows no GPU)")
    return _start("cpu:gloo,cuda:nccl", store, rank, world_size, timeout_s)


def _start(backend: str, store: Any, rank: int, world_size: int, timeout_s: float) -> dist.ProcessGroup:
    doing = "the start of torch.distributed"
    wait = Wait(timeout_s, doing)
    _come(store, rank, range(world_size), wait)
    start = functools.partial(
        dist.init_process_group, backend, store=store, rank=rank, world_size=world_size, timeout=_limit(wait, more_s=0)
    )
    # Torch's own deadline, which its collectives keep, comes first: no group is made after ours has passed.
    _by_another_thread(start, Wait(timeout_s + _LATER_S, doing))
    group = default_group()
    assert group is not None
    return group


def unused(use: str) -> str:
    """A prefix that no earlier use has had: the same on all ranks that make the same calls."""
    _uses[use] += 1
    return f"statexchange/{use}/{_uses[use]}"


def _joined(ranks: Sequence[int]) -> str:
    return "-".join(str(rank) for rank in ranks)


def _come(store: Any, rank: int, ranks: Sequence[int], wait: Wait) -> None:
    """Return when all `ranks`, `rank` among them, have called."""
    with torch_errors(wait):
        store.set(f"came/{rank}", "1")
        _await_keys(store, [f"came/{r}" for r in ranks], ranks, wait)


def _await_keys(store: Any, keys: Sequence[str], ranks: Sequence[int], wait: Wait) -> None:
    """Return when `store` has all `keys`, each of which one of `ranks` sets; StallError names those that did not."""
    try:
        wait.until(lambda: store.check(keys))
    except StallError as error:
        missing = tuple(rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key]))
        if error.missing or not missing:
            raise
        text = f"ranks {list(missing)} did not reach {wait.doing} in {wait.timeout_s:g} s"
        raise StallError(text, missing=missing, rank=missing[0]) from None


def _make_gloo(store: Any, rank: int, names: Sequence[int], timeout_s: float) -> Any:
    """A Gloo group of ranks that errors call by `names`, on a store that has not been used for this. Collective."""
    wait = Wait(timeout_s, f"the making of a group of ranks {list(names)}")
    _come(store, names[rank], names, wait)
    keys, limit = _stores.PrefixStore("group", store), _limit(wait)
    return _by_another_thread(lambda: _stores.ProcessGroupGloo(keys, rank, len(names), limit), wait)


def _by_another_thread(make: Callable[[], Any], wait: Wait) -> Any:
    """The value of `make`, which cannot be interrupted and waits in vain for a rank that dies in it. Collective."""
    made = Work(wait.doing)
    threading.Thread(target=made.run, args=(make,), name=wait.doing, daemon=True).start()
    with torch_errors(wait):
        wait.until(made.is_completed)
        return made.wait()


@contextlib.contextmanager
def torch_errors(wait: Wait) -> Iterator[None]:
    """What torch raises, in our words."""
    try:
        yield
    except StateExchangeError:
        raise
    except dist.DistStoreError as error:  # a wait of torch's own ran out
        raise StallError(f"not all ranks reached {wait.doing} in time: {_first_line(error)}") from error
    except RuntimeError as error:
        raise PeerError(-1, wait.doing, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _limit(wait: Wait, more_s: float = _LATER_S) -> timedelta:
    """What torch may take: longer than we wait, so that our own deadline comes first, but not for ever, as torch's
    threads end no sooner."""
    return timedelta(seconds=min(wait.timeout_s + more_s, _LONGEST_S))


class StoreCarrier(Backend):
    """One rank at a torch Store, for ranks that only have to meet: messages are keys, and there are no sockets."""

    name = "store"

    def __init__(
        self, store: Any, rank: int, world_size: int, prefix: str = "statexchange", server: Server | None = None
    ) -> None:
        """Nobody else may use keys that begin with `prefix`. `server`, if this process serves the store, is closed
        with this carrier."""
        self._store = store
        self._prefix = prefix
        self._server = server
        self._count = 0
        self._uses: Counter[str] = Counter()
        self._subsets: list[StoreCarrier] = []
        self.rank = rank
        self.world_size = world_size

    def exchange(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Every rank's payload, each under a key."""
        self._count += 1
        keys = [self._key(self._count, rank) for rank in range(self.world_size)]
        with torch_errors(wait):
            self._store.set(keys[self.rank], payload)
            _await_keys(self._store, keys, range(self.world_size), wait)
            answers = [bytes(self._store.get(key)) for key in keys]
            self._store.add(self._key(self._count, "read"), 1)
            self._forget(self._count - 1)
        return answers

    def _key(self, count: int, what: int | str) -> str:
        return f"{self._prefix}/{count}/{what}"

    def _forget(self, count: int) -> None:
        """All ranks have come to a later exchange, so all have read this one."""
        with contextlib.suppress(RuntimeError):  # some stores cannot delete
            self._store.delete_key(self._key(count, self.rank))
            if self.rank == 0:
                self._store.delete_key(self._key(count, "read"))

    def _is_read(self, store: Any) -> bool:
        """Whether all ranks have read the last exchange; `store` is any client of the server."""
        return self._count == 0 or int(store.add(self._key(self._count, "read"), 0)) == self.world_size

    def close(self) -> None:
        """Close the server, when all ranks have read what was exchanged, or a second later."""
        server, self._server = self._server, None
        if server is None:
            return
        store = server.store  # not this carrier's client, in which a group that was given up may still wait
        with contextlib.suppress(StallError, RuntimeError):  # a rank has failed before it could read
            wait = Wait(_LATER_S, "the end of the store")
            wait.until(lambda: all(carrier._is_read(store) for carrier in [self, *self._subsets]))  # noqa: SLF001 (our own)
        server.close()

    def _within(self, use: str) -> str:
        self._uses[use] += 1
        return f"{self._prefix}/{use}/{self._uses[use]}"

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """A carrier of `ranks` at the same store; StallError names who does not come."""
        prefix = self._within(_joined(ranks))
        wait = Wait(timeout_s, f"the making of a group of ranks {list(ranks)}")
        _come(_stores.PrefixStore(prefix, self._store), self.rank, ranks, wait)
        made = StoreCarrier(self._store, list(ranks).index(self.rank), len(ranks), prefix)
        self._subsets.append(made)
        return made

    def gloo(self, timeout_s: float) -> StoreBackend:
        """A Gloo group of the same ranks, which meet at the same store. Collective."""
        store = _stores.PrefixStore(self._within("gloo"), self._store)
        return StoreBackend(store, self.rank, self.world_size, timeout_s, carrier=self)

    def transport(self, timeout_s: float) -> Backend:
        """A Gloo group: a store is no way to move tensors. Collective."""
        return self.gloo(timeout_s)


class _GlooBackend(Backend):
    """A Gloo group's collectives. Works are polled, never waited for, so that a deadline holds.

    Most of it is Gloo's all-to-all, which needs one step where a ring needs one per rank, and copies nothing. Ranks
    reduce what they have of each other themselves: the same bits everywhere, halves in full width, NaN as it should be.
    """

    name = "gloo"

    def __init__(self, group: Any) -> None:
        self._group = group
        self._abandoned: list[Any] = []
        self._is_broken_off = False
        self._leaves_work = False
        self.world_size = int(group.size())
        self.rank = int(group.rank())
        forks.cut_off_in_children(self)

    def disown(self) -> None:
        """Never break anything off: the connections are those of the parent."""
        self._is_broken_off = True

    def _run(self, wait: Wait, *posts: Callable[[], Any]) -> None:
        """Start all, then wait for all. While a work is under way it holds its tensors."""
        works: list[Any] = []
        try:
            with torch_errors(wait):
                for post in posts:
                    works.append(post())
                for work in works:
                    wait.until(work.is_completed)
                    work.wait()  # completed: this only raises what went wrong
        except BaseException as error:
            self._abandoned.append(works)
            if isinstance(error, AbandonedError):
                self._leaves_work = True  # the others are to hear why first
            elif not isinstance(error, StallError):  # for these Gloo's own time is up soon
                self._break_off()
            raise

    def leave(self, error: BaseException | None) -> None:  # noqa: ARG002 (Gloo can tell nobody)
        """End the messages that were broken off."""
        if self._leaves_work:
            self._break_off()

    def _break_off(self) -> None:
        """Have Gloo close the group's connections, as it does when a receive runs out of time.

        All works under way end then, here and on the other ranks; this process could otherwise not exit before their
        time is up.
        """
        if self._is_broken_off:
            return
        self._is_broken_off = True
        for peer in range(self.world_size):
            with contextlib.suppress(RuntimeError):  # always: it is late, or the connection is gone
                if peer != self.rank:
                    never = self._group.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT_TAG)
                    never.wait(timedelta(milliseconds=1))

    # Messages

    def exchange(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Every rank's payload: short ones by one all-gather, what is left of long ones by a second."""
        if self.world_size == 1:
            return [payload]
        records = self._gathered(len(payload).to_bytes(8, "little") + payload[:_INLINE], _RECORD, wait)
        sizes = [int.from_bytes(record[:8], "little") for record in records]
        if max(sizes) <= _INLINE:
            return [record[8 : 8 + size] for record, size in zip(records, sizes, strict=True)]
        rests = self._gathered(payload[_INLINE:], max(sizes) - _INLINE, wait)
        return [(record[8:] + rest)[:size] for record, rest, size in zip(records, rests, sizes, strict=True)]

    def _gathered(self, ours: bytes, size: int, wait: Wait) -> list[bytes]:
        """Every rank's bytes, with zeros up to `size`."""
        data = torch.frombuffer(bytearray(ours.ljust(size, b"\0")), dtype=torch.uint8)
        into = torch.empty(self.world_size * size, dtype=torch.uint8, device="cpu")
        self.all_gather(data, into, wait)
        return [row.tobytes() for row in into.view(self.world_size, size).numpy()]

    # Moves

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """By Gloo's tree. Collective."""
        if data.numel():
            self._run(wait, lambda: self._broadcast(data, root, wait))

    def _broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, _limit(wait)
        return self._group.broadcast([data], options)

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """One step for small parts; large ones from each rank in turn, as Gloo's own all-gather copies twice."""
        if not data.numel():
            return
        sizes = [data.numel()] * self.world_size
        if into.nbytes <= _SMALL_BYTES:
            self.all_to_all(data.repeat(self.world_size), sizes, into, sizes, wait)
            return
        rows = into.view(self.world_size, -1)
        rows[self.rank].copy_(data)
        self._run(wait, *(functools.partial(self._broadcast, row, rank, wait) for rank, row in enumerate(rows)))

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """By Gloo's own. Collective."""
        options = dist.AllToAllOptions()
        options.timeout = _limit(wait)
        self._run(wait, lambda: self._group.alltoall_base(into, data, list(into_sizes), list(sizes), options))

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        """By Gloo's send. Not collective."""
        if data.numel():
            self._pass(lambda: self._group.send([data], dst, _FIRST_TAG + tag), wait)

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        """By Gloo's receive. Not collective."""
        if data.numel():
            self._pass(lambda: self._group.recv([data], src, _FIRST_TAG + tag), wait)

    def _pass(self, post: Callable[[], Any], wait: Wait) -> None:
        try:
            self._run(wait, lambda: self._follow(post(), wait))
        except StallError:
            self._break_off()
            raise

    def _follow(self, native: Any, wait: Wait) -> Work:
        """Gloo completes a send or receive only for a thread that waits inside it, where nothing can be polled.

        How long is for our own wait to say, which is put off while bytes move; it breaks off what is under way.
        """
        work = Work(wait.doing)

        def follow() -> None:
            work.run(lambda: native.wait(timedelta(seconds=_LONGEST_S)))
            _following.pop(thread, None)

        thread = threading.Thread(target=follow, name=wait.doing, daemon=True)
        _mind_the_end()
        _following[thread] = self
        thread.start()
        return work

    # Reductions

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Small tensors whole to everybody; large ones by Gloo's ring where it is right, else in parts. Collective."""
        if not tensor.numel():
            return
        if self._is_small(tensor):
            rows = tensor.new_empty(self.world_size * tensor.numel())
            self.all_gather(tensor.view(torch.uint8), rows.view(torch.uint8), wait)
            reduce_parts(tensor, rows.view(self.world_size, -1).unbind(), op, finish)
        elif op in ("sum", "prod") and tensor.dtype in _WIDE:
            options = _reducing(dist.AllreduceOptions(), op)
            options.timeout = _limit(wait)
            self._run(wait, lambda: self._group.allreduce([tensor], options))
            finish(tensor)
        else:
            for block in _blocks(tensor):
                self._all_reduce_in_parts(block, op, finish, wait)

    def _is_small(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes * self.world_size <= _SMALL_BYTES

    def _all_reduce_in_parts(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        sizes = _shares(tensor.numel(), self.world_size)
        ours = self._reduced_part(tensor, sizes, op, finish, wait).view(torch.uint8)
        nbytes = [size * tensor.itemsize for size in sizes]
        here = [ours.numel()] * self.world_size
        self.all_to_all(ours.repeat(self.world_size), here, tensor.view(torch.uint8), nbytes, wait)

    def _reduced_part(
        self, tensor: torch.Tensor, sizes: Sequence[int], op: str, finish: Finish, wait: Wait
    ) -> torch.Tensor:
        """The reduction of this rank's part of `tensor`, of `sizes[rank]`."""
        size = sizes[self.rank]
        parts = tensor.new_empty(self.world_size * size)
        here = [size * tensor.itemsize for size in sizes]
        there = [size * tensor.itemsize] * self.world_size
        self.all_to_all(tensor.view(torch.uint8), here, parts.view(torch.uint8), there, wait)
        result = parts[:size]
        reduce_parts(result, parts.view(self.world_size, size).unbind(), op, finish)
        return result

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """Small tensors whole to root; of large ones each rank reduces a part, and root gathers them. Collective."""
        if tensor.numel() and self._is_small(tensor):
            rows = tensor.new_empty(self.world_size * tensor.numel()) if self.rank == root else None
            self.gather(tensor.view(torch.uint8), None if rows is None else rows.view(torch.uint8), root, wait)
            if rows is not None:
                reduce_parts(tensor, rows.view(self.world_size, -1).unbind(), op, finish)
        elif tensor.numel():
            for block in _blocks(tensor):
                self._reduce_in_parts(block, op, root, finish, wait)

    def _reduce_in_parts(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        sizes = _shares(tensor.numel(), self.world_size)
        ours = self._reduced_part(tensor, sizes, op, finish, wait).view(torch.uint8)
        here = [ours.numel() if rank == root else 0 for rank in range(self.world_size)]
        there = [size * tensor.itemsize if self.rank == root else 0 for size in sizes]
        into = tensor.view(torch.uint8) if self.rank == root else ours.new_empty(0)
        self.all_to_all(ours, here, into, there, wait)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Every rank gets its part from all, and reduces it. Collective."""
        if not tensor.numel():
            return
        rows = tensor.view(self.world_size, -1)
        width = max(_BLOCK_BYTES // (tensor.itemsize * self.world_size), 1)
        for block, part in zip(torch.split(rows, width, 1), torch.split(into, width), strict=True):
            sizes = [part.numel()] * self.world_size
            part.copy_(self._reduced_part(block.contiguous().view(-1), sizes, op, finish, wait))


@functools.cache
def _mind_the_end() -> None:
    """A thread that is inside Gloo at the interpreter's end would abort the process."""
    atexit.register(_end_following)


def _end_following() -> None:
    for backend in set(_following.values()):
        backend._break_off()  # noqa: SLF001 (our own)
    for thread in list(_following):
        thread.join(_LATER_S)


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`tensor` in pieces, so that what a reduction needs beside it stays small."""
    return torch.split(tensor, _BLOCK_BYTES // tensor.itemsize)


def _shares(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


def _reducing(options: Any, op: str) -> Any:
    options.reduceOp = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))
    return options


class TorchBackend(_GlooBackend):
    """One rank of a ProcessGroup that torch.distributed knows, or of some ranks of one."""

    def __init__(self, group: dist.ProcessGroup | Sibling, timeout_s: float) -> None:
        """Collective over a group that does not move CPU tensors itself."""
        if isinstance(group, Sibling):
            self._ranks = list(group.ranks)
            super().__init__(group.gloo)
        else:
            self._ranks = dist.get_process_group_ranks(group)
            super().__init__(cpu_group(group, timeout_s))
            self.name = str(dist.get_backend(group))

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """A Gloo group of `ranks`; only they take part in making it. StallError names who does not come."""
        return of_ranks([self._ranks[rank] for rank in ranks], timeout_s)


class StoreBackend(_GlooBackend):
    """One rank of a Gloo group made from a store, which torch.distributed does not know."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float,
        names: Sequence[int] | None = None,
        carrier: Backend | None = None,
    ) -> None:
        """Collective over all ranks, which errors call by `names`. `store` must not have been used for this before.
        `carrier`, over which the ranks have met, is closed with this backend."""
        self._store = store
        self._carrier = carrier
        self._uses: Counter[str] = Counter()
        super().__init__(_make_gloo(store, rank, range(world_size) if names is None else names, timeout_s))

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """A Gloo group of `ranks` on the same store; only they take part in making it. StallError names who does not
        come."""
        use = _joined(ranks)
        self._uses[use] += 1
        store = _stores.PrefixStore(f"{use}/{self._uses[use]}", self._store)
        return StoreBackend(store, list(ranks).index(self.rank), len(ranks), timeout_s, ranks)

    def close(self) -> None:
        """Close the carrier."""
        if self._carrier is not None:
            self._carrier.close()


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


class NCCLBackend(Backend):
    """One rank of an NCCL group, for tensors of GPUs; messages go through `cpu`, a backend over the same ranks.

    A method returns when its work is queued on the caller's current stream, which waits for it; the host does not.
    """

    name = "nccl"
    device_type = "cuda"

    def __init__(self, group: Any, cpu: Backend) -> None:
        self._group = group
        self._cpu = cpu
        self.rank = cpu.rank
        self.world_size = cpu.world_size
        assert (self.rank, self.world_size) == (group.rank(), group.size())

    def as_caller(self) -> contextlib.AbstractContextManager[Any]:
        """The caller's current stream, too."""
        return _both(torch.cuda.stream(torch.cuda.current_stream()), super().as_caller())

    def exchange(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Through the CPU backend."""
        return self._cpu.exchange(payload, wait)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """A CPU backend over `ranks`."""
        return self._cpu.subset(ranks, timeout_s)

    def empty(self, nbytes: int, wait: Wait) -> torch.Tensor:  # noqa: ARG002
        """Memory of the current GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device_type)

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Sums that are divided afterwards must not be halves, and NCCL's minimum and maximum overlook NaN."""
        return dtype in _WIDE if op in ("sum", "prod") else dtype in _NCCL_INTS

    def _run(self, post: Callable[[], Any], wait: Wait) -> None:
        with torch_errors(wait):
            post().wait()

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """By NCCL, in place. Collective."""
        if tensor.numel():
            options = _reducing(dist.AllreduceOptions(), op)
            self._run(lambda: self._group.allreduce([tensor], options), wait)
            finish(tensor)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """By NCCL, which writes on `root` only. Collective."""
        if tensor.numel():
            options = _reducing(dist.ReduceOptions(), op)
            options.rootRank, options.rootTensor = root, 0
            self._run(lambda: self._group.reduce([tensor], options), wait)
            if self.rank == root:
                finish(tensor)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """By NCCL. Collective."""
        if tensor.numel():
            options = _reducing(dist.ReduceScatterOptions(), op)
            self._run(lambda: self._group._reduce_scatter_base(into, tensor, options), wait)  # noqa: SLF001 (torch's)
            finish(into)

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """By NCCL. Collective."""
        if data.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            self._run(lambda: self._group.broadcast([data], options), wait)

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """By NCCL. Collective."""
        if data.numel():
            self._run(lambda: self._group._allgather_base(into, data), wait)  # noqa: SLF001 (torch's)

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """By NCCL; a gather and a scatter are one, too. Collective."""
        self._run(lambda: self._group.alltoall_base(into, data, list(into_sizes), list(sizes)), wait)

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        """By NCCL, which keeps the order of all messages between two ranks and knows no tags. Not collective."""
        if data.numel():
            self._run(lambda: self._group.send([data], dst, tag), wait)

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        """By NCCL. Not collective."""
        if data.numel():
            self._run(lambda: self._group.recv([data], src, tag), wait)
