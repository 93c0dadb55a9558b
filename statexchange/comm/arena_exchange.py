"""Shared memory that the ranks of a communicator fill for each other and recycle.

A rank that sends acquires an arena, fills it and lends it; readers attach to it by its address. An arena is recycled
only when no rank refers to it any more, which no rank can find out alone. So at the end of each exchange every rank
reports which arenas it owns and which arenas of others it still refers to, and `recycle` is called with what all ranks
have reported. An arena that was lent in an exchange that failed is closed instead, as that report is missing.

Arenas are recycled because fresh pages are several times slower than pages that are mapped already.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from statexchange.shared_memory import Arena, Attached, attach

if TYPE_CHECKING:
    import numpy as np


class ArenaExchange:
    """One rank's arenas, and its mappings of other ranks' arenas."""

    def __init__(self) -> None:
        self._free: list[Arena] = []
        self._lent: list[Arena] = []  # arenas that another rank may still refer to
        self._attached: dict[str, Attached] = {}  # mappings of other ranks' arenas, by identity

    def acquire(self, nbytes: int) -> Arena:
        """Return an arena of at least `nbytes`, the smallest free one if there is one. Not collective.

        It may have the contents of an earlier use.
        """
        fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
        if fitting:
            # The smallest, so that a large one stays free for a large use.
            smallest = min(fitting, key=lambda arena: arena.nbytes)
            self._free.remove(smallest)
            return smallest
        self._close_free()  # all are too small, and hold memory that may be needed for the new one
        return Arena.create(nbytes)

    def lend(self, arena: Arena) -> None:
        """Keep `arena` until `recycle` finds that no rank refers to it. Not collective."""
        self._lent.append(arena)

    def attach(self, address: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a view of another rank's arena, as bytes; each arena is mapped once. Not collective."""
        ident = address["id"]
        if ident not in self._attached:  # a new mapping would fault its pages in again
            self._attached[ident] = attach(address)
        return self._attached[ident].lend()

    def owned_ids(self) -> list[str]:
        """Return the identities of this rank's arenas that it can recycle or has lent. Not collective."""
        return [arena.ident for arena in [*self._free, *self._lent]]

    def attached_ids(self) -> list[str]:
        """Return the identities of the other ranks' arenas that are mapped here. Not collective."""
        return list(self._attached)

    def referenced_ids(self) -> list[str]:
        """Return the identities of the other ranks' arenas to which this process still refers. Not collective."""
        return [ident for ident, attached in self._attached.items() if attached.referenced]

    def recycle(self, referenced: Collection[str], owned: Collection[str]) -> None:
        """Recycle lent arenas, and drop mappings, that no rank needs. Not collective.

        Args:
            referenced: the arenas to which any rank still refers.
            owned: the arenas that any rank owns; a mapping of another one is of no use any more.
        """
        for arena in list(self._lent):
            if arena.ident not in referenced:
                self._lent.remove(arena)
                self._free.append(arena)
        # The mapping of an arena that its owner has closed would keep its memory.
        for ident in self._attached.keys() - set(owned):
            del self._attached[ident]

    def close(self) -> None:
        """Release all memory; what tensors refer to stays until they are gone. Not collective."""
        for arena in self._lent:
            arena.close()
        self._lent.clear()
        self._close_free()
        self._attached.clear()

    def _close_free(self) -> None:
        while self._free:
            self._free.pop().close()
