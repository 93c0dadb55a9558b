"""A bootstrap backend over a torch Store: messages for the formation of a communicator, but no tensors.

Keys: `<prefix>/<n>/<rank>` is what a rank sends in the n-th gathering, and `<prefix>/<n>/read` counts the ranks that
have read it. Rank 0 closes the server only after all have read the last one. Keys stay: a communicator needs a few.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from statexchange.comm.backends.backend import Backend, check_ranks
from statexchange.comm.backends.gloo import GlooBackend
from statexchange.comm.backends.torch_groups import (
    GRACE_S,
    ask_store,
    await_keys,
    await_ranks,
    begun,
    ranks_key,
    store_of_group,
)
from statexchange.comm.wait import Wait
from statexchange.errors import StallError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from statexchange.comm.tcp_store import Server

_stores: Any = dist  # torch exports its stores and rendezvous there, but not for type checkers


class StoreBootstrap(Backend):
    """One rank at a torch Store: messages are keys, and there are no sockets between ranks."""

    name = "store"

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[int],
        prefix: str = "statexchange",
        server: Server | None = None,
    ) -> None:
        """Take part as `rank`; errors name rank i as `names[i]`.

        Nothing else may use keys of `store` that begin with `prefix`. `server`, if this process serves the store, is
        closed with this backend.
        """
        self._store: Any = store  # `set` also takes bytes, which its type hint does not tell
        self._names = names
        self._prefix = prefix
        self._server = server
        self._count = 0
        self._uses: Counter[str] = Counter()
        self._groups: list[StoreBootstrap] = []
        self.rank = rank
        self.world_size = len(names)

    @property
    def lasting_store(self) -> Any:
        """The store for torch.distributed, which keeps it: on the rank that serves it, it keeps the server alive."""
        return self._store if self._server is None else self._server.store

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload, each sent under a key. Collective."""
        self._count += 1
        keys = {name: self._key(self._count, rank) for rank, name in enumerate(self._names)}
        name = self._names[self.rank]

        def exchange() -> list[bytes]:
            self._store.set(keys[name], payload)
            await_keys(self._store, keys, name, wait)
            # One request for all: the server answers one at a time, and has many clients.
            answers: list[bytes] = self._store.multi_get(list(keys.values()))
            self._store.add(self._key(self._count, "read"), 1)
            return answers

        return ask_store(exchange, wait)

    def _key(self, count: int, what: int | str) -> str:
        return f"{self._prefix}/{count}/{what}"

    def _is_read(self) -> bool:
        """Whether all ranks have read the last gathering, here and in the groups."""
        # Adding 0 reads a counter that may not exist yet.
        read = self._count == 0 or int(self._store.add(self._key(self._count, "read"), 0)) == self.world_size
        return read and all(group._is_read() for group in self._groups)  # noqa: SLF001 (our own)

    def close(self) -> None:
        """Close the server when all ranks have read what was sent, or a second later. Not collective."""
        server, self._server = self._server, None
        if server is None:  # of another rank, of the launcher, or closed already
            return
        operation = "the end of the store"
        # In a thread, since a group that was given up may still wait in this client, which then answers nobody else.
        reading = begun(operation, lambda: Wait(GRACE_S, operation).until(self._is_read))
        with contextlib.suppress(StallError, RuntimeError):  # a rank has failed before it could read
            reading.wait(GRACE_S)
        server.close()

    def _unused_prefix(self, use: str) -> str:
        """Return a prefix that no earlier use of this backend has had; it is the same on all ranks."""
        self._uses[use] += 1
        return f"{self._prefix}/{use}/{self._uses[use]}"

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """Return a backend of `ranks` at the same store; StallError names those that have not called.

        Collective over them.
        """
        prefix = self._unused_prefix(ranks_key(ranks))
        wait = Wait(timeout_s, f"the making of a group of ranks {list(ranks)}")
        await_ranks(_stores.PrefixStore(prefix, self._store), self.rank, ranks, wait)
        group = StoreBootstrap(self._store, list(ranks).index(self.rank), ranks, prefix)
        self._groups.append(group)
        return group

    def transport(self, timeout_s: float) -> Backend:
        """Return a Gloo group of the same ranks, made at the same store, as a store moves no tensors. Collective."""
        store = _stores.PrefixStore(self._unused_prefix("gloo"), self._store)
        return GlooBackend(store, self.rank, self._names, timeout_s, self)


def over_group(group: dist.ProcessGroup, timeout_s: float, ranks: Sequence[int] | None = None) -> StoreBootstrap:
    """Return a bootstrap backend of these ranks of `group`, in that order, by default of all. Not collective.

    It has keys of its own in the store at which the ranks of `group` have met. The group itself is left to its owner,
    whose collectives the ranks would else match with ours in different orders.

    `torch.distributed.new_group` names groups by a counter of each process. So it works for a part of the ranks only if
    all of them have made equally many groups before; else they would wait for different names. Here the ranks
    themselves are the name.
    """
    store = store_of_group(group)
    use = f"{group.group_name}/all"
    if ranks is None:
        ranks = range(group.size())
    else:
        check_ranks(ranks, group.rank(), group.size())
        use = f"{group.group_name}/{ranks_key(ranks)}"
    # Counted at this store: in the process, which may have had other groups than its peers, numbers would differ.
    count = ask_store(
        lambda: store.add(f"statexchange/{use}/uses/{group.rank()}", 1),
        Wait(timeout_s, "the formation of the communicator"),
    )
    return StoreBootstrap(store, list(ranks).index(group.rank()), ranks, f"statexchange/{use}/{count}")
