"""Buckets: their plan, where gradients are stored, when they are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reducing import SETTINGS, Params, average, backward, gradient_of, parameters
from torch import nn

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.testing import run_ranks
from statexchange.train.buckets import reducer as reducer_module
from statexchange.train.buckets.plan import split_buckets
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.buckets.views import BucketView

MIB = 1 << 20


# How tensors are split into buckets


def view(name: str, dtype: str, numel: int, device: str = "cpu 0") -> BucketView:
    return BucketView(0, name, torch.empty(numel, dtype=getattr(torch, dtype), device="meta"), device)


def views(dtypes: dict[str, str], order: str = "ABCDE", sizes: tuple[int, ...] = (1, 2, 3, 4, 5)) -> list[BucketView]:
    numels = dict(zip("ABCDE", sizes, strict=True))
    return [view(name, dtypes.get(name, "float32"), numels[name] * MIB) for name in order]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (views({}), ["ABC", "D", "E"]),
        (views({"C": "float16", "D": "float16"}), ["CD", "AB", "E"]),
        (views({}, "DEABC"), ["D", "E", "ABC"]),
        (views({}, sizes=(1, 3, 5, 7, 11)), ["AB", "C", "D", "E"]),
        ([], []),
    ],
    ids=["one dtype", "two dtypes", "another order", "other sizes", "no tensors"],
)
def test_tensors_are_split_into_buckets_as_by_bagua(tensors: list[BucketView], expected: list[str]) -> None:
    found = split_buckets(tensors, 20 * MIB)
    assert ["".join(tensors[i].name for i in bucket) for bucket in found] == expected


def test_a_bucket_is_as_close_to_its_size_as_tensors_allow() -> None:
    tensors = [view(str(i), "float32", n) for i, n in enumerate([1, 1, 1, 100, 3, 0, 50])]
    sizes = [[tensors[i].shape[0] for i in bucket] for bucket in split_buckets(tensors, 16)]
    assert sizes == [[1, 1, 1], [100], [3, 0], [50]]


def test_devices_and_dtypes_do_not_mix_in_a_bucket() -> None:
    tensors = [view("a", "float32", 1, "cuda 0"), view("b", "float32", 1, "cuda 1")]
    tensors += [view("c", "float32", 1, "cuda 0"), view("d", "bfloat16", 1, "cuda 1")]
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
