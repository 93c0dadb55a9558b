"""A bootstrap backend over a torch Store: messages for the formation of a communicator, but no tensors.

Keys: `<prefix>/<n>/<rank>` is what a rank sends in the n-th gathering, and `<prefix>/<n>/read` counts the ranks that
have read it. A rank that reaches gathering n + 1 has read gathering n, and so have all when n + 1 is complete: then
each rank deletes its key of n. Rank 0 closes the server only after all have read the last one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.gloo import StoreBackend
from statexchange.comm.backends.torch_groups import GRACE_S, await_keys, await_ranks, ranks_key, torch_errors
from statexchange.comm.wait import Wait
from statexchange.errors import StallError

if TYPE_CHECKING:
    from statexchange.comm.tcp_store import Server

__all__ = ["StoreBootstrap"]

_stores: Any = dist  # torch exports its stores and rendezvous there, but not for type checkers


class StoreBootstrap(Backend):
    """One rank at a torch Store: messages are keys, and there are no sockets between ranks."""

    name = "store"

    def __init__(
        self, store: Any, rank: int, world_size: int, prefix: str = "statexchange", server: Server | None = None
    ) -> None:
        """Take part as `rank`. Nothing else may use keys of `store` that begin with `prefix`.

        `server`, if this process serves the store, is closed with this backend.
        """
        self._store = store
        self._prefix = prefix
        self._server = server
        self._count = 0
        self._uses: Counter[str] = Counter()
        self._groups: list[StoreBootstrap] = []
        self.rank = rank
        self.world_size = world_size

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload, each sent under a key. Collective."""
        self._count += 1
        keys = [self._key(self._count, rank) for rank in range(self.world_size)]
        with torch_errors(wait):
            self._store.set(keys[self.rank], payload)
            await_keys(self._store, keys, range(self.world_size), wait)
            answers = [bytes(self._store.get(key)) for key in keys]
            self._store.add(self._key(self._count, "read"), 1)
            self._forget(self._count - 1)
        return answers

    def _key(self, count: int, what: int | str) -> str:
        return f"{self._prefix}/{count}/{what}"

    def _forget(self, count: int) -> None:
        """Delete the keys of a gathering: all ranks have reached a later one, so all have read it."""
        with contextlib.suppress(RuntimeError):  # some stores cannot delete
            self._store.delete_key(self._key(count, self.rank))
            if self.rank == 0:
                self._store.delete_key(self._key(count, "read"))

    def _is_read(self, store: Any) -> bool:
        """Whether all ranks have read the last gathering; `store` is any client of the server."""
        return self._count == 0 or int(store.add(self._key(self._count, "read"), 0)) == self.world_size

    def close(self) -> None:
        """Close the server when all ranks have read what was sent, or a second later. Not collective."""
        server, self._server = self._server, None
        if server is None:
            return
        store = server.store  # not this bootstrap's client, in which a group that was given up may still wait
        with contextlib.suppress(StallError, RuntimeError):  # a rank has failed before it could read
            wait = Wait(GRACE_S, "the end of the store")
            wait.until(lambda: all(backend._is_read(store) for backend in [self, *self._groups]))  # noqa: SLF001 (our own)
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
        group = StoreBootstrap(self._store, list(ranks).index(self.rank), len(ranks), prefix)
        self._groups.append(group)
        return group

    def transport(self, timeout_s: float) -> Backend:
        """Return a Gloo group of the same ranks, made at the same store, as a store moves no tensors. Collective."""
        store = _stores.PrefixStore(self._unused_prefix("gloo"), self._store)
        return StoreBackend(store, self.rank, self.world_size, timeout_s, bootstrap=self)
