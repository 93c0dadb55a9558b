"""Buckets: their plan, where gradients are stored, when buckets are sent, and that each gradient counts once."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, PeerError, StateExchangeError, UnsupportedError
from statexchange.testing import run_ranks
from statexchange.train.buckets import averager as averager_module
from statexchange.train.buckets import reducer as reducer_module
from statexchange.train.buckets.plan import split_buckets
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.parameter_specs import ParameterSpec

MIB = 1 << 20
SETTINGS: list[dict[str, Any]] = [
    {},
    {"bucket_bytes": 64, "overlap": True},
    {"bucket_bytes": 64, "overlap": False},
    {"overlap": False},
    {"bucket_bytes": 1, "overlap": True},
]
Params = dict[str, nn.Parameter]


def parameters(*shapes: Any, dtype: torch.dtype = torch.float64) -> Params:
    return {f"p{i}": nn.Parameter(torch.ones(shape, dtype=dtype)) for i, shape in enumerate(shapes)}


def gradient_of(name: str, param: torch.Tensor, rank: int, step: int = 0) -> torch.Tensor:
    """Return the gradient of a rank: small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + int(name[1:]))
    return torch.randint(-8, 9, tuple(param.shape), generator=generator).to(param.dtype)


def backward(params: Params, rank: int, step: int = 0, names: Iterable[str] | None = None, **how: Any) -> None:
    """Compute the gradients of `names` by autograd, the last first."""
    terms = [(params[n] * gradient_of(n, params[n], rank, step).conj()).sum().real.double() for n in names or params]
    torch.stack(terms).sum().backward(**how)


def average(name: str, param: torch.Tensor, world_size: int, step: int = 0) -> torch.Tensor:
    parts = [gradient_of(name, param, rank, step) for rank in range(world_size)]
    return torch.stack(parts).sum(0) / world_size


def grads(params: Params) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.tolist() for name, p in params.items()}


# How tensors are split into buckets


def specs(
    dtypes: dict[str, str], order: str = "ABCDE", sizes: tuple[int, ...] = (1, 2, 3, 4, 5)
) -> list[ParameterSpec]:
    numels = dict(zip("ABCDE", sizes, strict=True))
    return [ParameterSpec(name, dtypes.get(name, "float32"), (numels[name] * MIB,)) for name in order]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (specs({}), ["ABC", "D", "E"]),
        (specs({"C": "float16", "D": "float16"}), ["CD", "AB", "E"]),
        (specs({}, "DEABC"), ["D", "E", "ABC"]),
        (specs({}, sizes=(1, 3, 5, 7, 11)), ["AB", "C", "D", "E"]),
        ([], []),
    ],
    ids=["one dtype", "two dtypes", "another order", "other sizes", "no tensors"],
)
def test_tensors_are_split_into_buckets_as_by_bagua(tensors: list[ParameterSpec], expected: list[str]) -> None:
    found = split_buckets(tensors, 20 * MIB)
    assert ["".join(tensors[i].name for i in bucket) for bucket in found] == expected


def test_a_bucket_is_as_close_to_its_size_as_tensors_allow() -> None:
    tensors = [ParameterSpec(str(i), "float32", (n,)) for i, n in enumerate([1, 1, 1, 100, 3, 0, 50])]
    sizes = [[tensors[i].shape[0] for i in bucket] for bucket in split_buckets(tensors, 16)]
    assert sizes == [[1, 1, 1], [100], [3, 0], [50]]


def test_devices_and_dtypes_do_not_mix_in_a_bucket() -> None:
    tensors = [ParameterSpec("a", "float32", (1,), "cuda 0"), ParameterSpec("b", "float32", (1,), "cuda 1")]
    tensors += [ParameterSpec("c", "float32", (1,), "cuda 0"), ParameterSpec("d", "bfloat16", (1,), "cuda 1")]
    assert split_buckets(tensors, MIB) == [[3], [0, 2], [1]]


# Averages


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_averages(world_size: int, settings: dict[str, Any]) -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((3,), (2, 4), (), (7,), (1, 0), (5,))
        reducer = BucketReducer(params, comm, **settings)
        ok = True
        for step in range(4):
            backward(params, comm.rank, step)
            reducer.finalize()
            ok &= all(torch.equal(p.grad, average(n, p, comm.world_size, step)) for n, p in params.items())
            for p in params.values():
                if step % 2:
                    p.grad = None
                else:
                    p.grad.zero_()
        return ok

    assert all(run_ranks(work, world_size))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128], ids=str
)
def test_gradients_of_every_dtype_are_averaged(dtype: torch.dtype) -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((3,), (5,), dtype=dtype)
        with BucketReducer(params, comm, bucket_bytes=1):
            backward(params, comm.rank)
        return all(torch.equal(p.grad, average(n, p, 2)) and p.grad.dtype is dtype for n, p in params.items())

    assert all(run_ranks(work, 2))


def test_dtypes_have_separate_buckets_that_are_sent_when_full() -> None:
    def work() -> tuple[list[list[str]], bool]:
        comm = sx.get_communicator()
        params = parameters((3,), (4,), (5,))
        params["p3"] = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        params["p4"] = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
        reducer = BucketReducer(params, comm)
        names = ["p0", "p1", "p2", "p3"]
        for step in range(2):
            backward(params, comm.rank, step, names)
            reducer.finalize()
            right = all(torch.equal(params[n].grad, average(n, params[n], 2, step)) for n in names)
            for name in names:
                params[name].grad = None
        return reducer.buckets, right

    assert run_ranks(work, 2) == [([["p3"], ["p2", "p1", "p0"]], True)] * 2


def test_nan_on_one_rank_is_nan_on_all_and_inf_spreads() -> None:
    def work() -> list[str]:
        comm = sx.get_communicator()
        params = parameters((2,), (2,))
        reducer = BucketReducer(params, comm)
        factor = torch.tensor([float("nan"), 1.0]) if comm.rank else torch.ones(2)
        big = torch.tensor([float("inf"), 1.0]) if comm.rank else torch.ones(2)
        ((params["p0"] * factor).sum() + (params["p1"] * big).sum()).backward()
        reducer.finalize()
        return [str(p.grad.tolist()) for p in params.values()]

    assert run_ranks(work, 2) == [["[nan, 1.0]", "[inf, 1.0]"]] * 2


def test_scale_multiplies_the_sum() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((3,))
        with BucketReducer(params, comm, scale=3.0):
            backward(params, comm.rank)
        return torch.equal(params["p0"].grad, average("p0", params["p0"], 2) * 6)

    assert all(run_ranks(work, 2))


# Where gradients are stored


def test_gradients_are_views_of_one_bucket() -> None:
    def work() -> tuple[Any, ...]:
        comm = sx.get_communicator()
        params = parameters((3,), (4,))
        reducer = BucketReducer(params, comm)
        places = []
        for step in range(3):
            backward(params, comm.rank, step)
            reducer.finalize()
            places.append([p.grad.data_ptr() for p in params.values()])
            params["p0"].grad = None
            params["p1"].grad.zero_()
        return len({tuple(p) for p in places}) == 1, places[0][0] - places[0][1] == 4 * 8

    assert run_ranks(work, 2) == [(True, True)] * 2


def test_channels_last_is_kept() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((2, 3, 4, 5), (3, 2))
        params["p0"].data = params["p0"].data.to(memory_format=torch.channels_last)
        params["p1"].data = torch.ones(2, 3, dtype=torch.float64).T
        reducer = BucketReducer(params, comm)
        ok = True
        for step in range(2):
            backward(params, comm.rank, step)
            reducer.finalize()
            ok &= all(torch.equal(p.grad, average(n, p, 2, step)) for n, p in params.items())
            ok &= all(p.grad.stride() == p.stride() for p in params.values())
            params["p0"].grad = None
            params["p1"].grad = None
        return ok

    assert all(run_ranks(work, 2))


@pytest.mark.parametrize(
    ("bucket_bytes", "nbytes"),
    [(1, [192, 192, 384]), (MIB, [384])],
    ids=str,
)
def test_a_bucket_has_whole_cache_lines_for_each_rank(bucket_bytes: int, nbytes: list[int]) -> None:
    def work() -> tuple[list[int], bool]:
        comm = sx.get_communicator()
        params = parameters((25,), (1,), (3,))
        with BucketReducer(params, comm, bucket_bytes=bucket_bytes) as reducer:
            backward(params, comm.rank)
        return reducer.bucket_nbytes, all(torch.equal(p.grad, average(n, p, 3)) for n, p in params.items())

    assert run_ranks(work, 3) == [(nbytes, True)] * 3


# The plan


def test_the_plan_follows_roots_order_of_arrival() -> None:
    def work() -> tuple[list[list[str]], bool]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,), (1,), (1,))
        reducer = BucketReducer(params, comm, bucket_bytes=16)
        x = torch.ones(1, dtype=torch.float64)
        # they arrive on root as 2, 0, 3, 1 and on rank 1 in another order; rank 1 alone has p3
        order = ["p1", "p0", "p2"] if comm.rank == 0 else ["p0", "p1", "p3", "p2"]
        for name in order:
            x = x * params[name]
        x.sum().backward()
        reducer.finalize()
        return reducer.buckets, all(p.grad.item() == (1 if n != "p3" else 0.5) for n, p in params.items())

    assert run_ranks(work, 2) == [([["p2", "p0"], ["p1", "p3"]], True)] * 2


def recorded(comm: Communicator, params: Params, **settings: Any) -> tuple[BucketReducer, list[str]]:
    """Return a reducer, and a list to which it appends the buckets that it sends."""
    log: list[str] = []

    def communicate(flat: torch.Tensor) -> Any:
        log.append("".join(name for name, _ in reducer.spans(flat)))
        return comm.all_reduce(flat, "avg", async_op=True)

    reducer = BucketReducer(params, comm, communicate=communicate, **settings)
    return reducer, log


def test_buckets_go_in_the_order_of_the_plan_while_backward_goes_on() -> None:
    def work() -> tuple[list[str], list[str], list[str], list[str]]:
        comm = sx.get_communicator()
        params = parameters((1,), (2,), (3,), (4,))
        reducer, log = recorded(comm, params, bucket_bytes=1, overlap=True)
        backward(params, comm.rank)
        first = list(log)
        reducer.finalize()
        log.clear()
        x = torch.ones(1, dtype=torch.float64)
        for name in ["p3", "p1", "p2", "p0"]:  # p0 arrives first, then p2: it has to wait for p3 and p1
            x = (x * params[name]).sum()
        x.backward()
        during = list(log)
        reducer.finalize()
        return first, [b[0] for b in reducer.buckets], during, log

    plan = ["p3", "p2", "p1", "p0"]
    assert run_ranks(work, 2) == [([], plan, plan[:3], plan)] * 2


def test_overlap_needs_a_core_that_backward_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> list[str]:
        comm = sx.get_communicator()
        params = parameters(*[(2,)] * 3)
        reducer, log = recorded(comm, params, bucket_bytes=1)
        backward(params, comm.rank)
        reducer.finalize()
        log.clear()
        backward(params, comm.rank)
        during = list(log)
        reducer.finalize()
        return during

    monkeypatch.setattr(reducer_module, "usable_cores", lambda: 4)
    assert [len(during) for during in run_ranks(work, 2)] == [2, 2]
    monkeypatch.setattr(reducer_module, "usable_cores", lambda: 3)
    assert run_ranks(work, 2) == [[], []]


def test_without_overlap_nothing_is_sent_before_finalize() -> None:
    def work() -> tuple[list[str], list[str]]:
        comm = sx.get_communicator()
        params = parameters((1,), (2,), (3,))
        reducer, log = recorded(comm, params, bucket_bytes=1, overlap=False)
        for step in range(2):
            log.clear()
            backward(params, comm.rank, step)
            before = list(log)
            reducer.finalize()
        return before, log

    assert run_ranks(work, 2) == [([], ["p2", "p1", "p0"])] * 2


def test_communicate_replaces_the_all_reduce_and_may_cut_a_bucket_for_all_ranks() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((3,), (5,))

        def scatter_gather(flat: torch.Tensor) -> None:
            part = comm.reduce_scatter(flat, "avg")
            flat.copy_(torch.cat(comm.all_gather(part)))

        with BucketReducer(params, comm, communicate=scatter_gather):
            backward(params, comm.rank)
        return all(torch.equal(p.grad, average(n, p, 3)) for n, p in params.items())

    assert all(run_ranks(work, 3))


def test_parameters_that_are_not_in_explicit_buckets_get_buckets_of_their_own() -> None:
    def work() -> tuple[list[list[str]], list[list[str]], bool]:
        comm = sx.get_communicator()
        params = parameters((1,), (2,), (3,), (4,))
        reducer = BucketReducer(params, comm, buckets=[["p3", "p0"], ["p1"]])
        first = reducer.buckets
        backward(params, comm.rank)
        reducer.finalize()
        return first, reducer.buckets, all(torch.equal(p.grad, average(n, p, 2)) for n, p in params.items())

    explicit = [["p3", "p0"], ["p1"]]
    assert run_ranks(work, 2) == [(explicit, [*explicit, ["p2"]], True)] * 2


def test_reset_changes_options() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((2,), (2,), (2,), (2,))
        reducer = BucketReducer(params, comm)
        counts, ok = [], True
        for step, changes in enumerate(
            [{}, {"bucket_bytes": 16}, {"overlap": False}, {"buckets": [["p0", "p1"], ["p2", "p3"]]}, {"buckets": None}]
        ):
            if step:
                reducer.reset(**changes)
            for _ in range(2):
                for p in params.values():
                    p.grad = None
                backward(params, comm.rank, step)
                reducer.finalize()
                ok &= all(torch.equal(p.grad, average(n, p, 2, step)) for n, p in params.items())
            counts.append(len(reducer.buckets))
        return [counts, ok]

    assert run_ranks(work, 2) == [[[1, 4, 4, 2, 4], True]] * 2


def test_reset_takes_other_parameters() -> None:
    def work() -> tuple[list[float], Any]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,))
        reducer = BucketReducer([params["p0"]], comm)
        reducer.reset({"p1": params["p1"]})
        backward(params, comm.rank)
        own = params["p0"].grad.tolist() == gradient_of("p0", params["p0"], comm.rank).tolist()
        reducer.finalize()
        return own, params["p1"].grad.tolist() == average("p1", params["p1"], 2).tolist()

    assert run_ranks(work, 2) == [(True, True)] * 2


# Gradients that are missing


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_missing_on_some_ranks_is_zero_and_missing_on_all_is_none(set_to_none: bool, settings: dict[str, Any]) -> None:
    """A gradient has arrived if its hook ran, not if it is not None."""

    def work() -> list[dict[str, Any]]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,), (1,))
        optimizer = torch.optim.SGD(params.values())
        reducer = BucketReducer(params, comm, **settings)
        found = []
        for names in (["p0", "p1", "p2"], ["p0", "p1"] if comm.rank else ["p0"], ["p2"]):
            for name in names:
                (params[name] * (1 + comm.rank)).sum().backward()
            reducer.finalize()
            found.append(grads(params))
            optimizer.zero_grad(set_to_none)
        return found

    everything = {"p0": [1.5], "p1": [1.5], "p2": [1.5]}
    some = {"p0": [1.5], "p1": [1.0], "p2": None}
    last = {"p0": None, "p1": None, "p2": [1.5]}
    assert run_ranks(work, 2) == [[everything, some, last]] * 2


def test_a_parameter_that_is_missing_everywhere_is_skipped_by_adam() -> None:
    def work() -> list[float]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,))
        optimizer = torch.optim.Adam(params.values(), lr=0.5)
        reducer = BucketReducer(params, comm)
        for names in (["p0", "p1"], ["p0"]):
            sum(params[name].sum() for name in names).backward()
            reducer.finalize()
            before = params["p1"].item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [before, params["p1"].item()]

    for before, after in run_ranks(work, 2):
        assert before == after != 1.0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_rank_without_gradients_takes_part(settings: dict[str, Any]) -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((2,), (3,))
        reducer = BucketReducer(params, comm, **settings)
        ok = True
        for step in range(3):
            absent = step % comm.world_size
            if comm.rank != absent:
                backward(params, comm.rank, step)
            reducer.finalize()
            for name, p in params.items():
                parts = [gradient_of(name, p, rank, step) for rank in range(comm.world_size) if rank != absent]
                ok &= torch.equal(p.grad, torch.stack(parts).sum(0) / comm.world_size)
                p.grad = None
        return ok

    assert all(run_ranks(work, 3))


def test_finalize_without_a_backward_changes_nothing() -> None:
    def work() -> list[dict[str, Any]]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,))
        reducer = BucketReducer(params, comm)
        found = []
        reducer.finalize()
        found.append(grads(params))
        params["p0"].sum().backward()
        for _ in range(2):
            reducer.finalize()
            found.append(grads(params))
        return found

    one = {"p0": [1.0], "p1": None}
    assert run_ranks(work, 2) == [[{"p0": None, "p1": None}, one, one]] * 2


def test_a_gradient_that_was_set_to_none_has_not_arrived() -> None:
    def work() -> list[dict[str, Any]]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,))
        reducer = BucketReducer(params, comm, overlap=False)
        found = []
        for _ in range(2):
            (params["p0"] + params["p1"]).sum().backward()
            params["p0"].grad = None
            reducer.finalize()
            found.append(grads(params))
            params["p1"].grad = None
        return found

    assert run_ranks(work, 2) == [[{"p0": None, "p1": [1.0]}] * 2] * 2


# Several backwards, and what autograd can do


@pytest.mark.parametrize("pending_bytes", [1 << 18, 60])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_gradient_is_lost_with_any_number_of_backwards_on_any_rank(
    settings: dict[str, Any], pending_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank runs backward a random number of times.

    Each time it uses random parameters; the result is compared with the sum of all.
    """
    monkeypatch.setattr(averager_module, "_PENDING_BYTES", pending_bytes)

    def calls(step: int, rank: int) -> list[list[str]]:
        dice = random.Random(100 * step + rank)
        return [[f"p{i}" for i in range(6) if dice.random() < 0.6] for _ in range(dice.randrange(4))]

    def work() -> bool:
        comm = sx.get_communicator()
        n = comm.world_size
        params = parameters((3,), (2, 4), (), (7,), (5,), (1,))
        reducer = BucketReducer(params, comm, **settings)
        ok = True
        for step in range(15):
            for names in calls(step, comm.rank):
                if names:
                    backward(params, comm.rank, step, names)
            reducer.finalize()
            ok &= all(matches(name, p, step, n) for name, p in params.items())
            for p in params.values():
                p.grad = None
        return ok

    def matches(name: str, p: torch.Tensor, step: int, n: int) -> bool:
        times = [sum(name in names for names in calls(step, rank)) for rank in range(n)]
        if not any(times):
            return p.grad is None
        total = sum(t * gradient_of(name, p, rank, step) for rank, t in enumerate(times))
        return torch.allclose(p.grad, total / n, rtol=1e-15, atol=0)

    assert all(run_ranks(work, 3))


def test_a_second_backward_accumulates_while_buckets_are_in_flight() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((3,), (4,), (5,))
        reducer = BucketReducer(params, comm, bucket_bytes=1, overlap=True)
        ok = True
        for step in range(3):
            for _ in range(1 + comm.rank):
                backward(params, comm.rank, step)
            reducer.finalize()
            for name, p in params.items():
                expected = (gradient_of(name, p, 0, step) + 2 * gradient_of(name, p, 1, step)) / 2
                ok &= torch.equal(p.grad, expected)
                p.grad = None
        return ok

    assert all(run_ranks(work, 2))


def test_graphs_of_gradients_give_plain_averages() -> None:
    def work() -> bool:
        comm = sx.get_communicator()
        params = parameters((3,), (4,))
        reducer = BucketReducer(params, comm)
        for step in range(2):
            x = torch.stack([(p * p).sum() / 2 for p in params.values()]).sum()
            x.backward(create_graph=True)
            if step:
                torch.stack([p.grad.sum() for p in params.values()]).sum().backward()
            reducer.finalize()
        return all(torch.equal(p.grad, torch.full_like(p, 3.0)) and p.grad.grad_fn is None for p in params.values())

    with pytest.warns(UserWarning, match="create_graph"):
        found = run_ranks(work, 2)
    assert found == [True, True]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight
        nn.init.ones_(self.first.weight)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_tied_weights_are_reduced_once_also_through_checkpoints(use_reentrant: bool | None) -> None:
    """A reentrant checkpoint accumulates the gradient of a tied weight in parts."""

    def work() -> tuple[list[list[str]], bool]:
        comm = sx.get_communicator()
        module = Tied()
        extra = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.ones_(extra.weight)
        reducer = BucketReducer([module, extra], comm, bucket_bytes=1, overlap=True)
        ok = True
        for _ in range(2):
            x = torch.full((3,), 1.0 + comm.rank, dtype=torch.float64, requires_grad=True)
            y = x
            for layer in (module.first, module.second, extra):
                y = layer(y) if use_reentrant is None else checkpoint(layer, y, use_reentrant=use_reentrant)
            y.sum().backward()
            reducer.finalize()
            # d/dw of sum(w w x) summed over three equal outputs, averaged over x = 1 and 2
            ok &= torch.equal(module.first.weight.grad, torch.full((3, 3), 1.5 * (9 + 9), dtype=torch.float64))
            ok &= torch.equal(extra.weight.grad, torch.full((3, 3), 1.5 * 9, dtype=torch.float64))
            module.zero_grad()
            extra.zero_grad()
        return sorted(reducer.buckets), ok

    names = [["0.first.weight"], ["1.bias"], ["1.weight"]]
    assert run_ranks(work, 2) == [(names, True)] * 2


def test_layers_may_be_frozen_and_unfrozen_at_any_time() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,), (1,))
        params["p0"].requires_grad_(False)
        reducer = BucketReducer(params, comm)
        found = []
        for trainable in (["p1", "p2"], ["p0", "p1", "p2"], ["p0", "p1", "p2"], ["p0"], ["p0"], ["p0", "p1"]):
            for name, p in params.items():
                p.requires_grad_(name in trainable)
                p.grad = None
            sum(params[name].sum() * (1 + comm.rank) for name in trainable).backward()
            reducer.finalize()
            found.append([name for bucket in reducer.buckets for name in bucket])
            assert all(params[name].grad.tolist() == [1.5] for name in trainable)
        return found

    plans, others = run_ranks(work, 2)
    assert plans == others
    assert [sorted(plan) for plan in plans] == [
        ["p1", "p2"],
        ["p0", "p1", "p2"],
        ["p0", "p1", "p2"],
        [],  # a parameter that is frozen on all ranks empties the plan
        ["p0"],
        ["p0", "p1"],
    ]


def test_a_layer_that_is_frozen_on_one_rank_counts_as_zeros_there() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        params = parameters((1,), (1,))
        params["p1"].requires_grad_(comm.rank == 0)
        reducer = BucketReducer(params, comm)
        for _ in range(2):
            params["p0"].grad = params["p1"].grad = None
            (params["p0"] + params["p1"]).sum().backward()
            reducer.finalize()
        return [grads(params), len(reducer.buckets)]

    assert run_ranks(work, 2) == [[{"p0": [1.0], "p1": [0.5]}, 1]] * 2


# Sparse gradients


def embedding(rows: int = 5, dtype: torch.dtype = torch.float64) -> nn.Embedding:
    table = nn.Embedding(rows, 2, sparse=True, dtype=dtype)
    nn.init.ones_(table.weight)
    return table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sparse_gradients_are_averaged_and_become_dense(dtype: torch.dtype) -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        table = embedding(dtype=dtype)
        dense = nn.Parameter(torch.ones(1, dtype=dtype))
        reducer = BucketReducer({"table": table.weight, "dense": dense}, comm)
        found = []
        for rows in ([[0, 0, 3], [3]], [[1], []], [[], []]):
            mine = rows[comm.rank]
            loss = (dense * 1).sum()
            if mine:
                loss = loss + table(torch.tensor(mine)).sum()
            loss.backward()
            reducer.finalize()
            grad = table.weight.grad
            found.append(None if grad is None else [grad.is_sparse, grad[:, 0].tolist()])
            table.weight.grad = dense.grad = None
        return found

    first = [False, [1.0, 0.0, 0.0, 1.0, 0.0]]
    second = [False, [0.0, 0.5, 0.0, 0.0, 0.0]]
    assert run_ranks(work, 2) == [[first, second, None]] * 2


def test_a_table_may_be_dense_on_one_rank_and_sparse_on_another() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        table = embedding()
        reducer = BucketReducer(table, comm)
        found = []
        for sparse_ranks in ([0], [0, 1], [1]):
            table.sparse = comm.rank in sparse_ranks
            table(torch.tensor([comm.rank])).sum().backward()
            reducer.finalize()
            found.append([table.weight.grad.is_sparse, table.weight.grad.to_dense()[:, 0].tolist()])
            table.weight.grad = None
        return found

    assert run_ranks(work, 2) == [[[False, [0.5, 0.5, 0.0, 0.0, 0.0]]] * 3] * 2


def test_a_sparse_gradient_adds_up_over_backwards() -> None:
    def work() -> list[Any]:
        comm = sx.get_communicator()
        table = embedding()
        reducer = BucketReducer(table, comm)
        for row in (0, 1):
            table(torch.tensor([row])).sum().backward()
            reducer.reduce()
        reducer.end_step()
        return [table.weight.grad.is_sparse, table.weight.grad.to_dense()[:, 0].tolist()]

    assert run_ranks(work, 2) == [[False, [1.0, 1.0, 0.0, 0.0, 0.0]]] * 2


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
