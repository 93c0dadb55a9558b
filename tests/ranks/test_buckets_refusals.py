"""Weights of a reducer, and what it refuses by name on all ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from reducing import average, backward, embedding, grads, parameters
from torch import nn

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, PeerError, StateExchangeError, UnsupportedError
from statexchange.testing import run_ranks
from statexchange.train.buckets.reducer import BucketReducer

# Weights


def test_averages_are_weighted() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params, table = parameters((2,), (3,)), embedding()
        reducer = BucketReducer([*params.values(), table.weight], comm, overlap=False, bucket_bytes=1)
        found = []
        for weight in ([1, 3], [1, 1], [0, 2], [0.0, 0.0]):
            for p in [*params.values(), table.weight]:
                p.grad = None
            (sum(p.sum() for p in params.values()) * (4 + 4 * comm.rank)).backward()
            (table(torch.tensor([comm.rank])).sum() * 4).backward()
            reducer.reduce(weight=weight[comm.rank])
            reducer.end_step()
            sparse = table.weight.grad
            found.append(
                [None if p.grad is None else p.grad.unique().tolist() for p in params.values()]
                + [None if sparse is None else sparse.to_dense()[:2, 0].tolist()]
            )
        return found

    expected = [[[7.0], [7.0], [1.0, 3.0]], [[6.0], [6.0], [2.0, 2.0]], [[8.0], [8.0], [0.0, 4.0]], [None] * 3]
    assert run_ranks(work, 2) == [expected] * 2


def test_a_rank_of_weight_0_does_not_spread_nan() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((1,))
        reducer = BucketReducer(params, comm, overlap=False)
        for _ in range(2):
            params["p0"].grad = None
            (params["p0"] * (float("nan") if comm.rank else 1.0)).sum().backward()
            reducer.reduce(weight=1 - comm.rank)
        return params["p0"].grad.tolist()

    assert run_ranks(work, 2) == [[1.0]] * 2


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 2.0])
def test_an_impossible_weight_is_refused_on_all_ranks(weight: float) -> None:
    def work() -> str:
        comm = sx.get_communicator()
        params = parameters((1,))
        reducer = BucketReducer(params, comm, overlap=None if weight == 2.0 else False)
        backward(params, comm.rank)
        with pytest.raises(InvalidArgumentError, match="a weight") as caught:
            reducer.reduce(weight=weight if comm.rank else 1.0)
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert first == second


# Weights and parameters instead of gradients


def test_the_bucket_type_weight_averages_the_parameters_themselves() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((3,), (2, 2))
        for p in params.values():
            p.data.fill_(comm.rank)
        versions = [p._version for p in params.values()]
        reducer = BucketReducer(params, comm, bucket_type="weight", bucket_bytes=1)
        for p in params.values():
            p.sum().backward()
        for _ in range(2):
            reducer.finalize()
        moved = [p._version > v for p, v in zip(params.values(), versions, strict=True)]
        kept = all(torch.equal(p.grad, torch.ones_like(p)) for p in params.values())
        return [[p.unique().tolist() for p in params.values()], moved, kept, len(reducer.buckets)]

    assert run_ranks(work, 2) == [[[[0.5], [0.5]], [True, True], True, 2]] * 2


# Refusals, by name and on all ranks


def raised_by_all(world_size: int, expected: type[Exception], work: Any) -> list[StateExchangeError]:
    def caught() -> StateExchangeError:
        with pytest.raises(expected) as error:
            work(sx.get_communicator())
        assert isinstance(error.value, StateExchangeError)
        return error.value

    errors: list[StateExchangeError] = run_ranks(caught, world_size)
    return errors


def test_shapes_that_differ_are_named_with_rank_and_parameter() -> None:
    def work(comm: Communicator) -> None:
        BucketReducer(parameters((2,), (3, 2 if comm.rank == 2 else 4)), comm)

    for error in raised_by_all(3, MismatchError, work):
        assert (error.name, error.rank) == ("p1", 2)
        assert "float64[3, 4]" in str(error)
        assert "float64[3, 2]" in str(error)


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        (lambda: parameters((2,)), "p1"),
        (lambda: parameters((2,), (3,), (4,)), "p2"),
        (lambda: {"p0": nn.Parameter(torch.ones(2))} | {"p1": parameters((3,))["p0"]}, "p0"),
        (lambda: {"q": parameters((2,))["p0"], "p1": parameters((3,))["p0"]}, "p0"),
    ],
    ids=["one is missing", "one more", "dtype", "name"],
)
def test_parameters_that_differ_are_named(theirs: Any, name: str) -> None:
    def work(comm: Communicator) -> None:
        BucketReducer(theirs() if comm.rank else parameters((2,), (3,)), comm)

    assert {error.name for error in raised_by_all(2, MismatchError, work)} == {name}


def test_settings_that_differ_are_named() -> None:
    def work(comm: Communicator) -> None:
        BucketReducer(parameters((2,)), comm, bucket_bytes=100 + comm.rank)

    for error in raised_by_all(2, MismatchError, work):
        assert "bucket_bytes=100" in str(error)
        assert "bucket_bytes=101" in str(error)


def test_a_parameter_that_was_replaced_is_named() -> None:
    def work(comm: Communicator) -> None:
        params = parameters((2,), (3,))
        reducer = BucketReducer(params, comm)
        backward(params, comm.rank)
        reducer.finalize()
        if comm.rank:
            params["p1"].grad = None
            params["p1"].data = params["p1"].data.float()
        backward(params, comm.rank)
        reducer.finalize()

    for error in raised_by_all(2, InvalidArgumentError, work):
        assert error.name == "p1"
        assert "reset()" in str(error)


def test_impossible_parameters_and_settings_are_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="lazy") as lazy:
        BucketReducer(nn.LazyLinear(2))
    with pytest.raises(UnsupportedError, match="meta"):
        BucketReducer(nn.Linear(2, 2, device="meta"))
    with pytest.raises(InvalidArgumentError, match="leaf"):
        BucketReducer([module.weight * 2])
    with pytest.raises(InvalidArgumentError, match="not str"):
        BucketReducer(["weight"])
    with pytest.raises(InvalidArgumentError, match="one name"):
        BucketReducer([("a", module.weight), ("a", module.bias)])
    with pytest.raises(InvalidArgumentError, match="bucket_type"):
        BucketReducer(module, bucket_type="grads")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="bucket_bytes"):
        BucketReducer(module, bucket_bytes=0)
    assert lazy.value.name == "weight"


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        ([["weight"], ["other"]], "'other'"),
        ([["weight", "weight"]], "in two buckets"),
        ([[]], "one dtype"),
        ([[torch.ones(1)]], "no name"),
    ],
    ids=["unknown", "twice", "empty", "another tensor"],
)
def test_impossible_explicit_buckets_are_refused(explicit: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        BucketReducer(nn.Linear(2, 2), buckets=explicit)


def test_reset_names_an_unknown_option() -> None:
    reducer = BucketReducer(nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match=r"'bucket_size'.*bucket_bytes"):
        reducer.reset(bucket_size=3)
    with pytest.raises(InvalidArgumentError, match="overlap"):
        reducer.reset(overlap=3)


def test_ranks_that_reduce_different_reducers_raise() -> None:
    def work(comm: Communicator) -> None:
        both = [parameters((2,)), parameters((2,))]
        reducers = [BucketReducer(params, comm) for params in both]
        for params in both:
            backward(params, comm.rank)
        reducers[comm.rank].finalize()

    for error in raised_by_all(2, MismatchError, work):
        assert "different reducers" in str(error)


def test_ranks_in_different_steps_raise() -> None:
    def work(comm: Communicator) -> None:
        params = parameters((2,))
        reducer = BucketReducer(params, comm)
        backward(params, comm.rank)
        reducer.reduce(step=3 + comm.rank)

    for error in raised_by_all(2, MismatchError, work):
        assert all(step in str(error) for step in ("step 3", "step 4"))


def test_a_rank_that_leaves_is_named() -> None:
    def work() -> Any:
        comm = sx.get_communicator()
        params = parameters((2,), (3,))
        reducer = BucketReducer(params, comm, bucket_bytes=1, overlap=True)
        backward(params, comm.rank)
        reducer.finalize()
        if comm.rank:
            raise ZeroDivisionError("of its own")
        backward(params, comm.rank)
        with pytest.raises(PeerError) as caught:
            reducer.finalize()
        return caught.value.rank

    outcomes = run_ranks(work, 2, allow_failure=True)
    assert outcomes.values == {0: 1}
    assert outcomes.errors == {1: "ZeroDivisionError"}


# When a reducer ends, and what it is given


def test_a_closed_or_collected_reducer_removes_its_hooks() -> None:
    module = nn.Linear(2, 2)
    first = BucketReducer(module)
    with pytest.raises(InvalidArgumentError, match="another reducer") as caught:
        BucketReducer(module)
    assert caught.value.name == "weight"
    first.close()
    second = BucketReducer(module)
    gone = weakref.ref(second)
    module(torch.ones(2)).sum().backward()
    second.finalize()
    gc.disable()
    try:
        del second
        assert gone() is None  # without a garbage collection: there is no reference cycle
    finally:
        gc.enable()
    module.zero_grad()
    module(torch.ones(2)).sum().backward()
    third = BucketReducer(module)
    third.finalize()
    assert module.weight.grad is not None


def test_gradients_made_by_hand_are_added() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,))
        reducer = BucketReducer(params, comm)
        params["p0"].grad = torch.full((1,), 1.0 + comm.rank, dtype=torch.float64)
        reducer.add(params["p0"])
        reducer.finalize()
        with pytest.raises(InvalidArgumentError, match="no parameter"):
            reducer.add(torch.ones(1))
        with pytest.raises(InvalidArgumentError, match="it has none"):
            reducer.add(params["p1"])
        return [grads(params)]

    assert run_ranks(work, 2) == [[{"p0": [1.5], "p1": None}]] * 2


def test_a_block_that_raises_averages_nothing() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((2,), (3,), (4,))
        reducer = BucketReducer(params, comm, bucket_bytes=1, overlap=True)
        backward(params, comm.rank)
        reducer.finalize()
        with pytest.raises(ZeroDivisionError), reducer:
            backward(params, comm.rank)
            _ = 1 / 0
        for p in params.values():
            p.grad = None
        with reducer:
            backward(params, comm.rank, 1)
        return [torch.equal(p.grad, average(n, p, 2, 1)) for n, p in params.items()]

    assert run_ranks(work, 2) == [[True] * 3] * 2


def test_a_module_without_parameters_has_no_buckets() -> None:
    def work() -> list[list[str]]:
        with BucketReducer(nn.ReLU()) as reducer:
            pass
        return reducer.buckets

    assert run_ranks(work, 2) == [[], []]


def test_modules_parameters_and_names_are_all_taken() -> None:
    module = nn.Linear(2, 2)
    for source in (module, dict(module.named_parameters()), module.named_parameters(), module.parameters(), [module]):
        reducer = BucketReducer(source, bucket_bytes=1)
        assert list(reducer.parameters.values()) == [module.weight, module.bias]
        reducer.close()
