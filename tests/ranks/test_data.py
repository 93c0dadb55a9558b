"""Each rank's part of the data: every sample on its rank, in every epoch and after every restart."""

import copy
import io
import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sweeps import slow
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train.data import DistributedDataContainer, part_of
from statexchange.train.synchronize import synchronize

# DataLoader forks by default, of which Python 3.12 warns.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
MODES = ("short", "pad", "drop", "balanced")


class Sample(NamedTuple):
    x: Any
    y: Any


def parts(num_samples: int, world_size: int, **options: Any) -> list[list[int]]:
    """Return each rank's part of the numbers from 0 on."""
    return run_ranks(lambda: list(DistributedDataContainer(list(range(num_samples)), **options)), world_size)


def joined(found: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(found))


def sizes(num_samples: int, world_size: int, uneven: Any) -> list[int]:
    return [part_of(num_samples, world_size, rank, uneven)[1] for rank in range(world_size)]


# The cases of Lux and Flux


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (10, [[10], [5, 5], [4, 4, 2], [3, 3, 3, 1]]),
        (5, [[5], [3, 2], [2, 2, 1], [2, 2, 1, 0]]),  # for these Lux raises BoundsError on four ranks
        (9, [[9], [5, 4], [3, 3, 3], [3, 3, 3, 0]]),
        (6, [[6], [3, 3], [2, 2, 2], [2, 2, 2, 0]]),
        (2, [[2], [1, 1], [1, 1, 0], [1, 1, 0, 0]]),
        (0, [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_short_gives_luxs_chunks_and_some_ranks_may_be_empty(num_samples: int, expected: list[list[int]]) -> None:
    for counts in expected:
        found = parts(num_samples, len(counts))
        assert [len(part) for part in found] == counts
        assert joined(found) == list(range(num_samples))


@pytest.mark.ranks(1, 2, 3, 4)
def test_partial_sums_add_up_to_the_total() -> None:
    data = torch.rand(10, generator=torch.Generator().manual_seed(0))
    mine = DistributedDataContainer(data)
    total = sx.get_communicator().all_reduce(torch.stack([torch.zeros(()), *mine]).sum())
    assert torch.isclose(total, data.sum())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pad_repeats_samples_as_flux_does(world_size: int) -> None:
    for num_samples in (4 * world_size, 7, 10):
        found = parts(num_samples, world_size, uneven="pad")
        size = -(-num_samples // world_size)
        assert [len(part) for part in found] == [size] * world_size
        padding = size * world_size - num_samples
        assert sum(map(sum, found)) == sum(range(num_samples)) + sum(range(padding))


def test_uneven_drops_balances_or_repeats_samples() -> None:
    assert parts(10, 4, uneven="drop") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts(10, 4, uneven="balanced") == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert parts(10, 4, uneven="pad") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    assert parts(1, 4, uneven="pad") == [[0]] * 4
    assert parts(3, 4, uneven="drop") == [[]] * 4
    assert parts(0, 2, uneven="pad") == [[], []]


@given(st.integers(0, 60), st.integers(1, 9))
def test_parts_follow_the_rules_of_each_option(num_samples: int, world_size: int) -> None:
    ceil, floor = -(-num_samples // world_size), num_samples // world_size
    assert sizes(num_samples, world_size, "pad") == [ceil] * world_size
    assert sizes(num_samples, world_size, "drop") == [floor] * world_size
    for uneven in ("short", "balanced"):
        found = [part_of(num_samples, world_size, rank, uneven) for rank in range(world_size)]
        assert sum(size for _, size in found) == num_samples
        assert all(begin + size == after for (begin, size), (after, _) in pairwise(found))
        assert all(0 <= begin <= begin + size <= num_samples for begin, size in found)
    balanced, short = sizes(num_samples, world_size, "balanced"), sizes(num_samples, world_size, "short")
    assert max(balanced) - min(balanced) <= 1
    assert short == sorted(short, reverse=True)
    assert all(size == ceil for size in short[: num_samples // max(ceil, 1)])


# Kinds of data


def test_tuples_and_mappings_are_fields_of_samples() -> None:
    x, y = np.arange(12).reshape(6, 2), torch.arange(6)

    def ranks() -> list[Any]:
        pair = DistributedDataContainer((x, y))
        named = DistributedDataContainer(Sample(x, {"label": y, "text": list("abcdef")}))
        return [len(pair), len(named), pair[0], named[-1], type(pair[0]), type(named[0])]

    first, second = run_ranks(ranks, 2)
    assert first[:2] == second[:2] == [3, 3]
    assert [field.tolist() for field in second[2]] == [[6, 7], 3]
    assert first[3].x.tolist() == [4, 5]
    assert first[3].y == {"label": 2, "text": "c"}
    assert first[4:] == [tuple, Sample]


def test_any_map_style_data_is_accepted() -> None:
    class Squares(Dataset[int]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return index**2

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-(index**2) for index in indices]

    assert list(DistributedDataContainer(Squares())) == [0, 1, 4, 9, 16]
    assert DistributedDataContainer(Squares()).__getitems__([1, -1]) == [-1, -16]
    assert DistributedDataContainer(TensorDataset(torch.arange(3)))[2] == (torch.tensor(2),)
    assert list(DistributedDataContainer("abc")) == ["a", "b", "c"]
    assert list(DistributedDataContainer(range(4, 7))) == [4, 5, 6]


class Stream(IterableDataset[int]):
    """Data without numbered samples."""

    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((np.ones(3), np.ones(4)), r"data\[0\] 3, data\[1\] 4"),
        ({"x": [1, 2], "y": {"z": [1]}}, r"data\['y'\]\['z'\] 1"),
        ((1, 2, 3), r"data\[0\] is"),
        ((), "no fields"),
        ({}, "no fields"),
        (Stream(), "a Stream"),
        ({1, 2}, "a set"),
        (torch.tensor(3), "a Tensor"),
        (None, "a NoneType"),
    ],
    ids=["lengths", "nested lengths", "numbers", "tuple", "mapping", "iterable", "set", "scalar", "None"],
)
def test_data_without_samples_are_refused(data: Any, words: str) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match=words):
        DistributedDataContainer(data)


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="'repeat'") as caught:
        DistributedDataContainer([1], uneven="repeat")
    assert "short, pad, drop, balanced" in str(caught.value)


def test_indices_out_of_range_are_index_errors() -> None:
    container = DistributedDataContainer([1, 2])
    assert container[-2] == 1
    for index in (2, -3):
        with pytest.raises(IndexError, match="has 2 samples"):
            container[index]


def test_a_launcher_without_a_communicator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sx.errors.NotInitializedError, match="WORLD_SIZE=2"):
        DistributedDataContainer([1])


def test_a_container_takes_any_communicator_and_does_not_keep_it() -> None:
    def ranks() -> list[Any]:
        comm = sx.get_communicator()
        container = DistributedDataContainer(list(range(6)), comm.new_group([comm.rank]))
        return [list(container), any(isinstance(value, sx.comm.Communicator) for value in vars(container).values())]

    assert run_ranks(ranks, 2) == [[[0, 1, 2, 3, 4, 5], False]] * 2


# Epochs


@pytest.mark.parametrize("uneven", MODES)
def test_shuffled_parts_have_the_same_samples(uneven: str) -> None:
    def ranks() -> list[list[int]]:
        container = DistributedDataContainer(list(range(11)), uneven=uneven, shuffle=True, seed=3)
        seen = [list(container)]
        for epoch in (1, 2, 0):
            container.set_epoch(epoch)
            assert container.epoch == epoch
            seen.append(list(container))
        return seen

    epochs = [joined(of_ranks) for of_ranks in zip(*run_ranks(ranks, 3), strict=True)]
    assert epochs[0] == epochs[3]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    counts = Counter(Counter(epochs[0]).values())
    assert counts == {"short": {1: 11}, "pad": {1: 10, 2: 1}, "drop": {1: 9}, "balanced": {1: 11}}[uneven]


def test_seed_and_epoch_are_independent() -> None:
    orders = set()
    for seed in range(4):
        container = DistributedDataContainer(list(range(20)), shuffle=True, seed=seed)
        for epoch in range(4):
            container.set_epoch(epoch)
            orders.add(tuple(container))
    assert len(orders) == 16


def test_the_order_of_a_seed_never_changes() -> None:
    """A state that an older version saved continues in the same order."""
    assert list(DistributedDataContainer(list(range(8)), shuffle=True, seed=0)) == [3, 7, 2, 0, 4, 6, 1, 5]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_persistent_workers_of_a_data_loader_follow_the_epoch(context: str) -> None:
    container = DistributedDataContainer(list(range(10)), shuffle=True)
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": context}
    loader = DataLoader(container, batch_size=4, **options)
    for epoch in (0, 1, 2):
        container.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == list(container)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # where one processor may be used
def test_data_loaders_with_and_without_workers_give_the_samples_in_order() -> None:
    container = DistributedDataContainer((np.arange(10), list(range(10))))
    for workers in (0, 2):
        batches = list(DataLoader(container, batch_size=4, num_workers=workers))
        assert (
            [x.tolist() for x, _ in batches] == [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        )


def test_a_data_loader_of_an_empty_part_gives_no_batch() -> None:
    assert run_ranks(lambda: len(list(DataLoader(DistributedDataContainer([7]), batch_size=2))), 2) == [1, 0]


def test_a_state_loaded_after_workers_began_is_an_error() -> None:
    container = DistributedDataContainer(list(range(6)))
    loader = DataLoader(container, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 6
    container.load_state_dict({**container.state_dict(), "consumed": [[1, 2]]})
    with pytest.raises(sx.errors.InvalidArgumentError, match="new DataLoader"):
        list(loader)
    assert torch.cat(list(DataLoader(container, num_workers=1))).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("how", [slow("pickle"), slow("deepcopy"), "spawn"])
def test_copies_are_independent_and_reach_their_workers(how: str) -> None:
    container = DistributedDataContainer(list(range(9)), shuffle=True)
    container.set_epoch(4)
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(container))
    elif how == "deepcopy":
        copied = copy.deepcopy(container)
    else:
        stream = io.BytesIO()
        ForkingPickler(stream).dump(container)
        copied = pickle.loads(stream.getvalue())
    assert list(copied) == list(container)
    copied.set_epoch(5)
    loader = DataLoader(copied, batch_size=3, num_workers=1, persistent_workers=True)
    for epoch in (5, 6):
        copied.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == list(copied)
    assert copied._shared.is_shared()


# Restarts


def trained(world_size: int, steps: int, state: Any = None, num_samples: int = 23, **options: Any) -> Any:
    """Return what each rank consumes in `steps` steps of two samples, and rank 0's state after them."""

    def ranks() -> Any:
        container = DistributedDataContainer(list(range(num_samples)), **options)
        if state is not None:
            container.load_state_dict(json.loads(state))
        seen = []
        for batch in list(DataLoader(container, batch_size=2))[:steps]:
            seen += batch.tolist()
            container.advance(len(batch))
        return seen, json.dumps(container.state_dict())

    found = run_ranks(ranks, world_size)
    return [seen for seen, _ in found], found[0][1]


ALL_STEPS = 1000


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("uneven", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_on_the_same_number_of_ranks_each_continues_its_part(world_size: int, uneven: str, shuffle: bool) -> None:
    options = {"uneven": uneven, "shuffle": shuffle, "num_samples": 11}
    whole, _ = trained(world_size, ALL_STEPS, **options)
    for steps in (0, 1, 2, 7):
        first, state = trained(world_size, steps, **options)
        second, again = trained(world_size, 1, state, **options)
        third, _ = trained(world_size, ALL_STEPS, again, **options)
        assert [a + b + c for a, b, c in zip(first, second, third, strict=True)] == whole


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("uneven", MODES)
@pytest.mark.parametrize("worlds", [(4, 3), (2, 4), (3, 1), (4, 2, 3)], ids=str)
def test_another_number_of_ranks_consumes_the_rest_in_its_order(
    worlds: tuple[int, ...], uneven: str, shuffle: bool
) -> None:
    options = {"uneven": uneven, "shuffle": shuffle}
    order = trained(1, ALL_STEPS, shuffle=shuffle)[0][0]
    seen: list[int] = []
    state = None
    for world_size in worlds[:-1]:
        consumed, state = trained(world_size, 1, state, **options)
        seen += joined(consumed)
    left = [sample for sample in order if sample not in seen]
    last = joined(trained(worlds[-1], ALL_STEPS, state, **options)[0])
    size = len(left) // worlds[-1] * worlds[-1]
    padding = -len(left) % worlds[-1]
    assert last == {"drop": left[:size], "pad": left + left[:padding]}.get(uneven, left)
    assert uneven == "pad" or len(set(seen + last)) == len(seen + last)


def test_the_documented_example_of_another_number_of_ranks_is_right() -> None:
    first, state = trained(3, 1, num_samples=12)
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert trained(2, ALL_STEPS, state, num_samples=12)[0] == [[2, 3, 6], [7, 10, 11]]


def test_ranks_with_shorter_parts_count_as_having_consumed_them() -> None:
    first, state = trained(4, 1, num_samples=10)  # 3, 3, 3 and 1
    assert first == [[0, 1], [3, 4], [6, 7], [9]]
    assert trained(1, ALL_STEPS, state, num_samples=10)[0] == [[2, 5, 8]]


def test_the_next_epoch_is_whole_again() -> None:
    _, state = trained(2, 2, shuffle=True)

    def ranks() -> list[int]:
        container = DistributedDataContainer(list(range(23)), shuffle=True)
        container.load_state_dict(json.loads(state))
        remaining = len(container)
        container.set_epoch(0)
        assert len(container) == remaining
        container.set_epoch(1)
        return [remaining, len(container), *container]

    found = run_ranks(ranks, 3)
    assert sum(rank[0] for rank in found) == 23 - 2 * 4
    assert sorted(joined(rank[2:] for rank in found)) == list(range(23))


def test_a_loaded_state_brings_its_seed() -> None:
    _, state = trained(1, 0, shuffle=True, seed=5)
    container = DistributedDataContainer(list(range(23)), shuffle=True, seed=6)
    container.load_state_dict(json.loads(state))
    assert container.seed == 5
    assert list(container) == list(DistributedDataContainer(list(range(23)), shuffle=True, seed=5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 24}, "num_samples differs"),
        ({"uneven": "pad"}, "uneven differs"),
        ({"shuffle": True}, "shuffle differs"),
        ({"more": 1}, "no state of"),
        ({"consumed": []}, "consumed must be"),
        ({"consumed": [[0, 1]]}, "consumed must be"),
        ({"consumed": 3}, "consumed must be"),
    ],
    ids=str,
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], words: str) -> None:
    container = DistributedDataContainer(list(range(23)))
    before = container.state_dict()
    with pytest.raises(sx.errors.InvalidArgumentError, match=words) as caught:
        container.load_state_dict({**before, **change})
    ((key, value),) = change.items()
    if words.endswith("differs"):
        assert (caught.value.expected, caught.value.found) == (before[key], value)
    with pytest.raises(sx.errors.InvalidArgumentError, match="no state of"):
        container.load_state_dict(None)
    assert container.state_dict() == before


def test_consuming_more_than_a_part_is_refused() -> None:
    container = DistributedDataContainer([1, 2, 3])
    container.advance(2)
    for number in (2, -1):
        with pytest.raises(sx.errors.InvalidArgumentError, match="2 of its 3") as caught:
            container.advance(number)
        assert "set_epoch" in str(caught.value)
    container.advance(1)
    container.set_epoch(1)
    container.advance(3)


@pytest.mark.ranks(2)
def test_synchronize_gives_a_container_the_state_of_root() -> None:
    container = DistributedDataContainer(list(range(10)))
    if sx.get_communicator().rank == 0:
        container.advance(3)
    synchronize({"data": container})
    assert container.state_dict()["consumed"] == [[2, 3]]
