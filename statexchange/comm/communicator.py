"""The communicator: ranks of one group that agree on values and on failure."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange import values
from statexchange.comm.control_page import ControlPage
from statexchange.errors import InvalidArgumentError, PeerError, StateExchangeError, from_record, to_record
from statexchange.shared_memory import Arena, ArenaPool, Attached, Kind

__all__ = ["AbandonedError", "Backend", "Communicator", "Place", "check_ranks"]


class AbandonedError(Exception):
    """Raised inside a trip when another rank has failed: come to the agreement, which says who and why."""


class Backend(ABC):
    """How ranks exchange messages without a control page. An implementation never blocks without a deadline."""

    name: str
    rank: int
    world_size: int

    @abstractmethod
    def exchange(self, payload: bytes, timeout_s: float, doing: str) -> list[bytes]:
        """Every rank's payload in rank order. Collective."""

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> Backend:
        """A backend over `ranks` of this one. Collective over those ranks only."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free what the backend holds. Not collective."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: its host among hosts, and itself among the ranks of its host."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


class Communicator:
    """Ranks of one group.

    Made by `init`, `from_process_group` or `from_mpi`. Attributes: `rank`, `world_size`, `local_rank` (within the
    host), `local_world_size`, `node_rank`, `num_nodes`, `backend` (its name), `run` (an identity that all its ranks
    share and no other job has), `timeout_s` (of waits for peers), `arenas` (shared memory that this rank recycles),
    `lent` (arenas that another rank still looks at) and `attached` (mappings of other ranks' arenas, by identity).
    """

    def __init__(self, backend: Backend, page: ControlPage | None, place: Place, run: str, timeout_s: float) -> None:
        self._backend = backend
        self._page = page
        self._place = place
        self._subsets: dict[tuple[int, ...], Communicator] = {}
        self._dead: StateExchangeError | None = None
        self.arenas = ArenaPool(page.kind if page is not None else "memfd")
        self.lent: list[Arena] = []
        self.attached: dict[str, Attached] = {}
        self.run = run
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"Communicator({self.backend!r}, rank {self.rank} of {self.world_size})"

    @property
    def rank(self) -> int:
        """This rank."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._backend.world_size

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self._backend.name

    @property
    def local_rank(self) -> int:
        """This rank among the ranks of its host."""
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this host."""
        return self._place.local_world_size

    @property
    def node_rank(self) -> int:
        """This host among the hosts."""
        return self._place.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self._place.num_nodes

    @property
    def shared_memory(self) -> Kind | None:
        """How all ranks can share memory, or None if they cannot."""
        if self.world_size == 1:
            return "memfd"
        return self._page.kind if self._page is not None else None

    def exchange(
        self,
        payload: bytes,
        *,
        root: int | None = None,
        timeout_s: float | None = None,
        doing: str = "an exchange",
    ) -> list[bytes]:
        """Every rank's bytes in rank order; if `root` is given, [] on other ranks.

        Collective. Blocks until all ranks have called; `timeout_s` None means this communicator's, inf no deadline.
        """
        if self._dead is not None:
            raise self._dead
        if self.world_size == 1:
            return [payload]
        wait = self.timeout_s if timeout_s is None else timeout_s
        try:
            if self._page is not None:
                return self._page.exchange(payload, root, None if wait == float("inf") else wait, doing)
            answers = self._backend.exchange(payload, wait, doing)
        except StateExchangeError as error:
            self._dead = error
            raise
        return answers if root is None or root == self.rank else []

    def gather_object(self, obj: Any, *, root: int = 0) -> list[Any]:
        """The JSON values (see `values`) of all ranks in rank order on `root`, [] elsewhere. Collective.

        A value that cannot be encoded on one rank is an error on all.
        """
        self.check_root(root)
        found = self.all_gather_object(obj)
        return found if self.rank == root else []

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The JSON values of all ranks in rank order, on every rank. Collective."""
        return self._exchange_values(obj, values.types_of(obj))

    def _exchange_values(self, obj: Any, types: Mapping[str, type]) -> list[Any]:
        failure: Exception | None = None
        try:
            payload = _encoded([None, obj])
        except (TypeError, ValueError) as error:
            failure = error
            payload = _encoded([to_record(error, self.rank, "encoding its value"), None])
        answers = self.exchange(payload, doing="the exchange of values")
        records, found = zip(*(values.decode(answer, types=types) for answer in answers), strict=True)
        _raise_first(records, failure)
        return list(found)

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """Root's JSON value, on every rank; the others' `obj` only lends its types. Collective."""
        self.check_root(root)
        return self._exchange_values(obj if self.rank == root else None, values.types_of(obj))[root]

    def barrier(self, timeout_s: float | None = None, tag: str | None = None) -> None:
        """Return when all ranks have called. Collective.

        A StallError after `timeout_s` seconds (default: the communicator's) names all ranks that did not come.
        """
        self.exchange(b"", timeout_s=timeout_s, doing=f"barrier {tag!r}" if tag else "a barrier")

    def agree(
        self,
        error: Exception | None = None,
        *,
        phase: str = "its own code",
        timeout_s: float | None = None,
        note: Any = None,
    ) -> list[Any]:
        """A barrier that carries failure: if any rank passes an error, all raise the same one. Collective.

        An error of ours is raised as itself on every rank, with the rank where it happened; any other error as
        `PeerError(rank, phase, cause)`. The communicator stays usable, since all ranks have met. Returns every rank's
        `note`, a JSON value.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return [note]
        if self._page is not None and error is not None:
            self._page.flag_failure()
        record = None if error is None or isinstance(error, AbandonedError) else to_record(error, self.rank, phase)
        answers = self.exchange(_encoded([record, note]), timeout_s=timeout_s, doing=f"the end of {phase}")
        records, notes = zip(*(values.decode(answer) for answer in answers), strict=True)
        _raise_first(records, error)
        return list(notes)

    @contextlib.contextmanager
    def phase(self, name: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """A block that ends in `agree`: what any rank raises in it, all raise. Collective.

        An interrupt (KeyboardInterrupt, SystemExit) leaves the communicator at once, and the others raise PeerError.
        """
        try:
            yield
        except Exception as error:
            if error is self._dead:
                raise
            self.agree(error, phase=name, timeout_s=timeout_s)
            raise AssertionError("agree must raise") from error
        except BaseException as error:
            self.close(error)
            raise
        self.agree(phase=name, timeout_s=timeout_s)

    def progress(self) -> None:
        """Say that bytes move; raises AbandonedError once another rank has failed. Not collective."""
        if self._page is not None and not self._page.progress():
            raise AbandonedError

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of `ranks` (of this one), in that order; made once, then the same.

        Collective over `ranks`: nobody else has to call. ValueError if ranks repeat, do not exist or lack the caller.
        """
        check_ranks(ranks, self.rank, self.world_size)
        key = tuple(ranks)
        if key == tuple(range(self.world_size)):
            return self
        if key not in self._subsets:
            from statexchange.comm.world import communicator

            self._subsets[key] = communicator(self._backend.subset(key), self.timeout_s)
        return self._subsets[key]

    def close(self, error: BaseException | None = None) -> None:
        """Leave: peers that still wait for this rank raise PeerError, with `error` as its cause. Not collective."""
        for subset in self._subsets.values():
            subset.close(error)
        if self._page is not None:
            self._page.leave(error)
        self.arenas.close()
        self.attached.clear()
        if self._dead is None and self.world_size > 1:
            self._dead = PeerError(self.rank, "a later call", "this communicator is closed")
        self._backend.close()

    def check_root(self, root: int) -> None:
        """InvalidArgumentError unless `root` is a rank of this communicator."""
        if not 0 <= root < self.world_size:
            raise InvalidArgumentError(
                f"root {root} is not a rank of this communicator of {self.world_size}", rank=self.rank
            )


def check_ranks(ranks: Sequence[int], rank: int, world_size: int) -> None:
    """InvalidArgumentError unless `ranks` are distinct ranks of a world of `world_size`, `rank` among them."""
    if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= r < world_size for r in ranks):
        raise InvalidArgumentError(f"ranks must be distinct and within 0..{world_size - 1}, not {list(ranks)}")
    if rank not in ranks:
        raise InvalidArgumentError(f"rank {rank} is not among ranks {list(ranks)}", rank=rank)


def _raise_first(records: Sequence[dict[str, Any] | None], cause: Exception | None) -> None:
    """Raise the failure of the lowest rank that has one."""
    failure = next((record for record in records if record is not None), None)
    if failure is not None:
        raise from_record(failure) from cause


def _encoded(obj: Any) -> bytes:
    return values.encode(obj).encode()
