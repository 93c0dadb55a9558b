"""Each rank's part of a dataset: which samples, in which order, and where to go on after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Dataset, IterableDataset

from statexchange.comm.defaults import as_communicator, get_rank, get_world_size
from statexchange.errors import InvalidArgumentError

__all__ = ["DistributedDataContainer", "part_of"]

Uneven = Literal["short", "pad", "drop", "balanced"]


def part_of(num_samples: int, world_size: int, rank: int, uneven: Uneven = "short") -> tuple[int, int]:
    """Where the part of `rank` begins, and how many samples it has. Not collective.

    With n samples on w ranks: "short" gives each rank ceil(n / w) until there are no more, so that the last ones may
    have fewer, or none; "pad" gives each ceil(n / w), counting on from the first sample after the last one; "drop"
    gives each floor(n / w), and the last n mod w samples to nobody; "balanced" gives floor(n / w), and one more to the
    first n mod w ranks. All parts are contiguous and in rank order.
    """
    if uneven == "balanced":
        size, more = divmod(num_samples, world_size)
        return rank * size + min(rank, more), size + (rank < more)
    size = num_samples // world_size if uneven == "drop" else -(-num_samples // world_size)
    if uneven == "short":
        begin = min(rank * size, num_samples)
        return begin, min(size, num_samples - begin)
    return rank * size, size


class DistributedDataContainer(Dataset[Any]):
    """This rank's part of `data`, a map-style dataset: `len`, indexing, and a DataLoader with workers.

    Not collective, but where `comm` is a ProcessGroup or MPI communicator that is met for the first time. `data` has a
    length and numbered samples; a tuple or mapping of such (arrays, tensors, lists; also nested) counts samples, not
    fields: its samples are tuples or dicts of one of each field, and fields of different lengths are an
    InvalidArgumentError. A part without samples is an empty dataset.

    `uneven` says what happens where the ranks do not divide the samples: see `part_of`. With `shuffle`, what is cut
    into parts is an order that follows from `seed` (the same on all ranks) and the epoch. `set_epoch` begins an epoch,
    also in workers that a DataLoader keeps.

    To go on after a restart, `advance(len(batch))` after each step and save rank 0's `state_dict()`: no rank has a
    longer part. Ranks step together, so that each has consumed as many samples as rank 0, or all that it had. After
    `load_state_dict` the dataset is what remains of the epoch: with as many ranks as before, each goes on in its part;
    with another number, the samples that nobody has consumed are cut into parts anew, in their old order and by the
    same rule (what was only padding is forgotten, what "drop" left out comes in again at the end).
    """

    def __init__(
        self, data: Any, comm: Any = None, *, uneven: Uneven = "short", shuffle: bool = False, seed: int = 0
    ) -> None:
        if uneven not in get_args(Uneven):
            raise InvalidArgumentError(f"uneven is one of {', '.join(get_args(Uneven))}, not {uneven!r}")
        self.data = data
        self.uneven: Uneven = uneven
        self.shuffle = shuffle
        self.seed = seed
        self.num_samples = _num_samples(data)
        self.rank, self.world_size = _place(comm)
        # The epoch and how many states were loaded, where workers that outlive an epoch see them.
        self._shared = torch.zeros(2, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._loads = 0
        self._begin(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._epoch

    def __len__(self) -> int:
        return len(self._part) - self._skipped

    def __getitem__(self, index: int) -> Any:
        return _item(self.data, self._sample(index))

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The samples of a batch, by the dataset's own way to fetch several if it has one."""
        samples = [self._sample(index) for index in indices]
        fetch = getattr(self.data, "__getitems__", None)
        found: Sequence[Any] = fetch(samples) if fetch else [_item(self.data, sample) for sample in samples]
        return found

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first sample; one that is under way goes on. Not collective: all ranks do the same."""
        if epoch != self._epoch:
            self._begin(epoch)
            self._shared[0] = epoch

    def advance(self, num_samples: int) -> None:
        """Say that this rank has consumed its next `num_samples` samples, for `state_dict`. Not collective."""
        if not 0 <= num_samples <= len(self._part) - self._consumed:
            raise InvalidArgumentError(
                f"this rank has consumed {self._consumed} of its {len(self._part)} samples of epoch {self._epoch} and "
                f"cannot advance by {num_samples}: set_epoch begins the next epoch",
                rank=self.rank,
            )
        self._consumed += num_samples

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on here, in JSON values. Not collective."""
        consumed = [*self._history, (self.world_size, self._consumed)]
        return {
            "num_samples": self.num_samples,
            "uneven": self.uneven,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self._epoch,
            "consumed": [list(entry) for entry in consumed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where rank 0's `state_dict` was taken, be it with another number of ranks. Not collective.

        All ranks load the same state, before a DataLoader with workers is made. The seed is the state's; a state of
        other data, of another `uneven` or `shuffle`, or none at all, is an InvalidArgumentError.
        """
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise InvalidArgumentError("this is no state of a DistributedDataContainer")
        for name in ("num_samples", "uneven", "shuffle"):
            if state[name] != getattr(self, name):
                raise InvalidArgumentError(
                    f"the state is one of other data: {name}", expected=getattr(self, name), found=state[name]
                )
        *history, (world_size, consumed) = _checked_consumption(state["consumed"])
        self.seed = int(state["seed"])
        if world_size == self.world_size:
            self._begin(int(state["epoch"]), history, consumed)
        else:
            self._begin(int(state["epoch"]), [*history, (world_size, consumed)])
        self._loads += 1
        self._shared[:] = torch.tensor([self._epoch, self._loads])

    def _begin(self, epoch: int, history: Sequence[tuple[int, int]] = (), consumed: int = 0) -> None:
        """Find this rank's samples of an epoch of which other worlds have consumed some, and this one `consumed`."""
        self._epoch = epoch
        self._history = list(history)
        order: range | torch.Tensor = range(self.num_samples)
        if self.shuffle:
            order = _shuffled(self.num_samples, self.seed, epoch)
        for world_size, count in history:
            every = torch.arange(self.num_samples) if isinstance(order, range) else order
            order = _remaining(every, world_size, count, self.uneven)
        begin, size = part_of(len(order), self.world_size, self.rank, self.uneven)
        self._part = _cut(order, begin, size)
        self._skipped = self._consumed = min(consumed, size)

    def _sample(self, index: int) -> int:
        """The number in `data` of a sample of this rank's."""
        epoch, loads = self._shared.tolist()
        if loads != self._loads:
            raise InvalidArgumentError("a state was loaded after these workers began: make the DataLoader after that")
        if epoch != self._epoch:
            self._begin(epoch)
        if not -len(self) <= index < len(self):
            raise IndexError(f"this rank's part has {len(self)} samples, and none with the number {index}")
        return int(self._part[self._skipped + index % len(self)]) % self.num_samples


def _place(comm: Any) -> tuple[int, int]:
    """This rank and the number of ranks."""
    if comm is None and get_world_size() > 1:
        return get_rank(), get_world_size()
    communicator = as_communicator(comm)
    return communicator.rank, communicator.world_size


def _checked_consumption(raw: Any) -> list[tuple[int, int]]:
    """Numbers of ranks, and how many samples each of them has consumed; the last are those that saved the state."""
    try:
        found = [(int(ranks), int(count)) for ranks, count in raw]
    except (TypeError, ValueError):
        found = []
    if not found or any(ranks < 1 or count < 0 for ranks, count in found):
        raise InvalidArgumentError(f"a state's consumed is pairs of ranks and samples, not {raw!r}")
    return found


def _shuffled(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """An order that is the same wherever it is made, and another for each seed and epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest()
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))


def _cut(order: range | torch.Tensor, begin: int, size: int) -> range | torch.Tensor:
    """`size` of `order` from `begin` on, and on from its first when it ends."""
    if isinstance(order, range):
        return range(begin, begin + size)  # whose numbers count modulo the samples
    return order[torch.arange(begin, begin + size) % max(len(order), 1)]


def _remaining(order: torch.Tensor, world_size: int, consumed: int, uneven: Uneven) -> torch.Tensor:
    """What of `order` is left when each of `world_size` ranks has consumed so many samples of its part."""
    parts = [part_of(len(order), world_size, rank, uneven) for rank in range(world_size)]
    left = [order[begin + min(consumed, size) : begin + size] for begin, size in parts]
    return torch.cat([*left, order[sum(parts[-1]) :]])


def _num_samples(data: Any) -> int:
    """The samples that all fields of `data` have."""
    lengths = dict(_lengths(data, "data"))
    if not lengths:
        raise InvalidArgumentError("data has no fields")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise InvalidArgumentError(f"the fields of the data differ in length: {told}")
    return next(iter(lengths.values()))


def _lengths(data: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(data, tuple | Mapping):
        entries = data.items() if isinstance(data, Mapping) else enumerate(data)
        for key, field in entries:
            yield from _lengths(field, f"{path}[{key!r}]")
        return
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise InvalidArgumentError(
            f"{path} is a {type(data).__name__} and has no numbered samples: give a list of them"
        )
    try:
        yield path, len(data)
    except TypeError as error:
        raise InvalidArgumentError(f"{path} is a {type(data).__name__} and has no length") from error


def _item(data: Any, sample: int) -> Any:
    if isinstance(data, Mapping):
        return {key: _item(field, sample) for key, field in data.items()}
    if isinstance(data, tuple):
        items = (_item(field, sample) for field in data)
        return type(data)._make(items) if hasattr(data, "_make") else tuple(items)
    return data[sample]
