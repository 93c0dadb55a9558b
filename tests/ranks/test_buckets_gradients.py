"""Each gradient counts once: missing, frozen, tied and sparse ones, and several backwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reducing import SETTINGS, backward, embedding, gradient_of, grads, parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train.buckets import averager as averager_module
from statexchange.train.buckets.reducer import BucketReducer

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

    def work() -> list[tuple[int, str]]:
        comm = sx.get_communicator()
        n = comm.world_size
        params = parameters((3,), (2, 4), (), (7,), (5,), (1,))
        reducer = BucketReducer(params, comm, **settings)
        wrong = []
        for step in range(15):
            for names in calls(step, comm.rank):
                if names:
                    backward(params, comm.rank, step, names)
            reducer.finalize()
            wrong += [(step, name) for name, p in params.items() if not matches(name, p, step, n)]
            for p in params.values():
                p.grad = None
        return wrong

    def matches(name: str, p: torch.Tensor, step: int, n: int) -> bool:
        times = [sum(name in names for names in calls(step, rank)) for rank in range(n)]
        if not any(times):
            return p.grad is None
        total = sum(t * gradient_of(name, p, rank, step) for rank, t in enumerate(times))
        return torch.allclose(p.grad, total / n, rtol=1e-15, atol=0)

    assert run_ranks(work, 3) == [[]] * 3


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
