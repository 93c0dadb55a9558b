"""Each rank's part of a dataset: which samples, in which order, and where to continue after a restart.

A DataLoader may keep its workers over epochs, and a worker has a copy of the dataset, made when the first epoch began.
So the epoch's number lies in shared memory, which all copies see, and so does the number of states that were loaded: a
copy that was made before a load has the old state, and refuses to go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch.utils.data import Dataset, IterableDataset

from statexchange.comm.communicator import CommLike
from statexchange.comm.defaults import as_communicator, get_rank, get_world_size
from statexchange.errors import InvalidArgumentError, type_text

Uneven = Literal["short", "pad", "drop", "balanced"]
Sample: TypeAlias = Any
"""A sample, or a part of one: whatever the caller's data has."""


class Samples(Protocol):
    """Samples by number: a map-style dataset, an array, a tensor or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> Sample: ...


# What a DistributedDataContainer takes: samples, or fields of samples, which may be nested.
Data: TypeAlias = "Samples | tuple[Any, ...] | Mapping[Any, Any]"


def part_of(num_samples: int, world_size: int, rank: int, uneven: Uneven = "short") -> tuple[int, int]:
    """Return the first sample of the part of `rank`, and its number of samples. Not collective.

    All parts are contiguous and in rank order.

    Args:
        num_samples: the number n of samples.
        world_size: the number w of ranks.
        rank: the rank.
        uneven: what happens where w does not divide n.

            * "short" gives each rank ceil(n / w) samples until there are no more, so that the last ranks may have
              fewer, or none;
            * "pad" gives each rank ceil(n / w), beginning again with the first sample after the last one;
            * "drop" gives each rank floor(n / w), and leaves out the last n mod w samples;
            * "balanced" gives floor(n / w), and one more to the first n mod w ranks.

            Of 10 samples 4 ranks get 3, 3, 3, 1; 3, 3, 3, 3; 2, 2, 2, 2; or 3, 3, 2, 2.

    Returns:
        The number of the first sample, and the number of samples.
    """
    if uneven == "balanced":
        size, more = divmod(num_samples, world_size)
        return rank * size + min(rank, more), size + (rank < more)
    size = num_samples // world_size if uneven == "drop" else -(-num_samples // world_size)
    if uneven == "short":
        begin = min(rank * size, num_samples)
        return begin, min(size, num_samples - begin)
    return rank * size, size


class DistributedDataContainer(Dataset[Sample]):
    """This rank's part of a map-style dataset, for indexing or for a DataLoader with workers.

    Not collective, unless `comm` is a ProcessGroup or MPI communicator that is given for the first time. A part without
    samples is an empty dataset. The name is Lux.jl's DistributedDataContainer.

    To continue after a restart, call ``advance(len(batch))`` after each step and save rank 0's `state_dict()`. It holds
    for all ranks: no part is longer than rank 0's, and as ranks step together, each has consumed as many samples as
    rank 0, or all of its part. After `load_state_dict` the dataset is what remains of the epoch. With as many ranks as
    before, each continues in its part. With another number, the samples that no rank has consumed are cut into parts
    again, in their old order and by the same rule, without padding; what "drop" left out comes at the end.

    Args:
        data: a dataset with a length and numbered samples. Or a tuple or mapping of such (arrays, tensors, lists; also
            nested), all of one length: its samples are tuples or dicts of one sample of each.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        uneven: what happens where the ranks do not divide the samples. Of 10 samples 4 ranks get 3, 3, 3, 1 with
            "short"; 2, 2, 2, 2 with "drop"; 3, 3, 2, 2 with "balanced"; and 3, 3, 3, 3 with "pad", which begins again
            with the first sample.
        shuffle: cut a random order into parts, instead of the order of `data`. It depends on `seed` and the epoch.
        seed: the same on all ranks.

    Raises:
        InvalidArgumentError: `data` has no length or no numbered samples, or its fields differ in length.

    Example:
        >>> import statexchange as sx
        >>> part = sx.train.DistributedDataContainer({"x": [1, 2, 3], "y": [4, 5, 6]})
        >>> len(part), part[1]  # a world of one has all samples
        (3, {'x': 2, 'y': 5})
        >>> part.advance(2)
        >>> rest = sx.train.DistributedDataContainer({"x": [1, 2, 3], "y": [4, 5, 6]})
        >>> rest.load_state_dict(part.state_dict())
        >>> list(rest)
        [{'x': 3, 'y': 6}]
    """

    def __init__(
        self,
        data: Data,
        comm: CommLike | None = None,
        *,
        uneven: Uneven = "short",
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if uneven not in get_args(Uneven):
            raise InvalidArgumentError(f"uneven is one of {', '.join(get_args(Uneven))}, not {uneven!r}")
        self.data = data
        self.uneven: Uneven = uneven
        self.shuffle = shuffle
        self.seed = seed
        self.num_samples = _num_samples(data)
        self.rank, self.world_size = _rank_and_world_size(comm)
        # The epoch and the number of states that were loaded
        self._shared = torch.zeros(2, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._loads = 0
        self._begin(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A plain pickle or copy has made private memory of it. What torch sends to a worker is shared already.
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._epoch

    def __len__(self) -> int:
        return len(self._part) - self._skipped

    def __getitem__(self, index: int) -> Sample:
        return _item(self.data, self._sample(index))

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Sample]:
        """Return the samples of a batch, by the dataset's own `__getitems__` if it has one."""
        # A DataLoader calls this, and not `__getitem__`, for a batch.
        samples = list(map(self._sample, indices))
        fetch: Callable[[list[int]], Sequence[Sample]] | None = getattr(self.data, "__getitems__", None)
        if fetch is not None:
            return fetch(samples)
        return [_item(self.data, sample) for sample in samples]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first sample, unless it is the present one. Not collective, but all ranks must call."""
        if epoch != self._epoch:
            self._begin(epoch)
            self._shared[0] = epoch

    def advance(self, num_samples: int) -> None:
        """Count this rank's next `num_samples` samples as consumed, for `state_dict`. Not collective.

        Raises:
            InvalidArgumentError: the part has fewer samples left.
        """
        if not 0 <= num_samples <= len(self._part) - self._consumed:
            raise InvalidArgumentError(
                f"this rank has consumed {self._consumed} of its {len(self._part)} samples of epoch {self._epoch} and "
                f"cannot advance by {num_samples}: set_epoch begins the next epoch",
                rank=self.rank,
            )
        self._consumed += num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue here, in JSON values. Not collective."""
        consumed = [*self._history, (self.world_size, self._consumed)]
        return {
            "num_samples": self.num_samples,
            "uneven": self.uneven,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self._epoch,
            "consumed": list(map(list, consumed)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where rank 0's `state_dict` was taken, on any number of ranks.

        Not collective, but all ranks load the same state, before a DataLoader with workers is made. The seed becomes
        the state's.

        Raises:
            InvalidArgumentError: the state belongs to other data, has another `uneven` or `shuffle`, or is none of this
                class.
        """
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise InvalidArgumentError("this is no state of a DistributedDataContainer")
        for name in ("num_samples", "uneven", "shuffle"):
            if state[name] != getattr(self, name):
                raise InvalidArgumentError(
                    f"the state belongs to other data: {name} differs", expected=getattr(self, name), found=state[name]
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
        """Find this rank's samples of an epoch.

        Args:
            epoch: the epoch.
            history: for each earlier run of the epoch, its number of ranks and what each of them consumed.
            consumed: what this rank has consumed in this run.
        """
        self._epoch = epoch
        self._history = list(history)
        # A range, which takes no memory, unless the order is another one.
        order: range | torch.Tensor = range(self.num_samples)
        if self.shuffle:
            order = _shuffled(self.num_samples, self.seed, epoch)
        # Each earlier run has left something of what the run before it had left.
        for world_size, count in history:
            if isinstance(order, range):
                order = torch.arange(self.num_samples)
            order = _remaining(order, world_size, count, self.uneven)
        begin, size = part_of(len(order), self.world_size, self.rank, self.uneven)
        self._part = _cut(order, begin, size)
        # The state is rank 0's. A rank whose part is shorter has consumed all of it.
        self._skipped = self._consumed = min(consumed, size)

    def _sample(self, index: int) -> int:
        """Return the number in `data` of this rank's sample `index`."""
        # This may be a worker's copy: it can begin another epoch by itself, but it does not have a state loaded later.
        epoch, loads = self._shared.tolist()
        if loads != self._loads:
            raise InvalidArgumentError("a state was loaded after these workers started: make a new DataLoader")
        if epoch != self._epoch:
            self._begin(epoch)
        if not -len(self) <= index < len(self):
            raise IndexError(f"this rank's part has {len(self)} samples, and none with the number {index}")
        return int(self._part[self._skipped + index % len(self)]) % self.num_samples


def _rank_and_world_size(comm: CommLike | None) -> tuple[int, int]:
    """Return this rank and the number of ranks, without making a communicator for the default."""
    # Making one would be collective, and a container may be made on some ranks only.
    if comm is None and get_world_size() > 1:
        return get_rank(), get_world_size()
    communicator = as_communicator(comm)
    return communicator.rank, communicator.world_size


def _checked_consumption(raw: Any) -> list[tuple[int, int]]:  # noqa: ANN401 (what a state has there)
    """Return (number of ranks, samples that each consumed) of each run of an epoch; the last run saved the state."""
    try:
        runs = [(int(ranks), int(count)) for ranks, count in raw]
    except (TypeError, ValueError):
        runs = []
    if not runs or any(ranks < 1 or count < 0 for ranks, count in runs):
        raise InvalidArgumentError(f"a state's consumed must be pairs of ranks and samples, not {raw!r}")
    return runs


def _shuffled(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a random order that depends on the arguments alone: it is the same on all ranks."""
    # A hash, so that seed 1 of epoch 2 is not seed 2 of epoch 1; 7 bytes, as a seed has 64 bits with a sign.
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest()
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))


def _cut(order: range | torch.Tensor, begin: int, size: int) -> range | torch.Tensor:
    """Return `size` samples of `order` from `begin` on, beginning again with the first after the last.

    Two samples of ``[5, 6, 7]`` from 2 on are ``[7, 5]``.
    """
    if isinstance(order, range):
        return range(begin, begin + size)  # `_sample` takes its numbers modulo the number of samples
    return order[torch.arange(begin, begin + size) % max(len(order), 1)]


def _remaining(order: torch.Tensor, world_size: int, consumed: int, uneven: Uneven) -> torch.Tensor:
    """Return what is left of `order` when each of `world_size` ranks has consumed `consumed` samples of its part.

    Of 0 to 5 on two ranks, which have consumed one each, these are 1, 2, 4, 5.
    """
    parts = [part_of(len(order), world_size, rank, uneven) for rank in range(world_size)]
    left = [order[begin + min(consumed, size) : begin + size] for begin, size in parts]
    return torch.cat([*left, order[sum(parts[-1]) :]])  # at the end what "drop" has left out


def _num_samples(data: Data) -> int:
    """Return the number of samples in `data`."""
    lengths = dict(_lengths(data, "data"))
    if not lengths:
        raise InvalidArgumentError("data has no fields")
    numbers = set(lengths.values())
    if len(numbers) > 1:
        text = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise InvalidArgumentError(f"the fields of the data differ in length: {text}")
    return numbers.pop()


def _lengths(data: Data, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path and length of each field."""
    if isinstance(data, tuple | Mapping):
        entries = data.items() if isinstance(data, Mapping) else enumerate(data)
        for key, field in entries:
            yield from _lengths(field, f"{path}[{key!r}]")
        return
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise InvalidArgumentError(f"{path} is {type_text(data)} and has no numbered samples: give a list of them")
    try:
        yield path, len(data)
    except TypeError as error:
        raise InvalidArgumentError(f"{path} is {type_text(data)} and has no length") from error


def _item(data: Data, sample: int) -> Sample:
    """Return one sample of all fields."""
    if isinstance(data, Mapping):
        return {key: _item(field, sample) for key, field in data.items()}
    if isinstance(data, tuple):
        items = [_item(field, sample) for field in data]
        if hasattr(data, "_make"):  # a namedtuple, whose class takes its fields one by one
            return data._make(items)
        return tuple(items)
    return data[sample]
