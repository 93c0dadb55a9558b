"""The parts of a BucketReducer, each alone: plan, arrival of gradients, messages of a round, hooks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="buckets need torch")

from torch import nn  # noqa: E402

from statexchange.errors import InvalidArgumentError, MismatchError  # noqa: E402
from statexchange.train.buckets import views as bucket_views  # noqa: E402
from statexchange.train.buckets.options import BucketOptions  # noqa: E402
from statexchange.train.buckets.plan import BucketPlan  # noqa: E402
from statexchange.train.buckets.reducer import GradientHooks  # noqa: E402
from statexchange.train.buckets.rounds import (  # noqa: E402
    ARRIVED,
    FROZEN,
    LATE,
    Arrival,
    RoundReport,
    RoundSummary,
)
from statexchange.train.buckets.views import BucketView, copy_gradients, publish_gradients  # noqa: E402


def views_of(*shapes: tuple[int, ...]) -> list[BucketView]:
    return bucket_views.views_of({f"p{i}": nn.Parameter(torch.ones(shape)) for i, shape in enumerate(shapes)})


def plan_of(views: list[BucketView], bucket_bytes: int = 16, world_size: int = 1) -> BucketPlan:
    options = BucketOptions(
        bucket_bytes=bucket_bytes,
        bucket_type="gradient",
        buckets=None,
        scale=None,
        overlap=None,
        communicate=None,
    )
    empty = lambda shape, dtype: torch.full(tuple(shape), 7.0, dtype=dtype)  # noqa: E731
    comm: Any = SimpleNamespace(empty=empty, world_size=world_size)
    return BucketPlan(comm, options, views, b"digest")


def report(
    step: int = 0, digest: bytes = b"the plan", states: bytes = b"", order: Sequence[int] = (), *, is_done: bool = False
) -> bytes:
    return RoundReport(digest, step, 0.0 if is_done else 1.0, is_done, states, order).to_bytes()


# The plan


def test_a_plan_grows_at_its_end_and_changes_its_digest() -> None:
    views = views_of((2,), (3,), (1,))
    plan = plan_of(views)
    digests = [plan.digest]
    for group in ([views[2], views[0]], [views[1]]):
        plan.extend([group])
        digests.append(plan.digest)
    assert plan.names() == [["p2", "p0"], ["p1"]]
    assert len(set(digests)) == 3
    same = plan_of(views_of((2,), (3,), (1,)))
    assert same.digest == digests[0]
    plan.clear()
    assert (plan.names(), plan.digest) == ([], digests[0])
    assert all(view.bucket is None for view in views)


def test_bucket_memory_is_zero_and_has_whole_cache_lines_for_each_rank() -> None:
    views = views_of((3,), (5,))
    plan = plan_of(views, world_size=3)
    first, second = plan.extend([[views[0]], [views[1]]])
    assert [bucket.flat.nbytes for bucket in (first, second)] == [192, 192]
    assert not first.flat.any()
    assert second.flat.data_ptr() - first.flat.data_ptr() == 192


def test_buckets_are_cut_in_the_order_of_arrival() -> None:
    views = views_of((4,), (4,), (4,))
    groups = plan_of(views).split([views[2], views[0], views[1]])
    assert [[view.name for view in group] for group in groups] == [["p2"], ["p0"], ["p1"]]


def test_a_bucket_is_found_by_its_memory_and_labelled_by_its_names() -> None:
    views = views_of((1,), (1,))
    plan = plan_of(views)
    first, second = plan.extend([[views[1]], [views[0]]])
    assert plan.bucket_of(second.flat) is second
    assert plan.label(second) == "bucket 1: p0"
    assert first.views == [views[1]]


# Views


def test_gradients_are_copied_into_their_views_and_replaced_by_them() -> None:
    views = views_of((2,), (3,))
    (bucket,) = plan_of(views).extend([views])
    views[1].param.grad = torch.tensor([1.0, 2.0, 3.0])
    assert copy_gradients(views) == [views[0]]
    assert views[1].param.grad is views[1].grad
    bucket.flat.mul_(2)
    publish_gradients(views, [False, True])
    assert views[0].param.grad is None
    assert views[1].param.grad.tolist() == [2.0, 4.0, 6.0]


def test_a_bucket_of_factor_0_has_no_nan() -> None:
    views = views_of((2,))
    (bucket,) = plan_of(views).extend([views])
    views[0].param.grad = torch.full((2,), torch.nan)
    assert bucket.fill(0) == []
    assert not bucket.flat.any()


# Arrival


def test_a_bucket_waits_once_in_a_round_for_each_gradient() -> None:
    views = views_of((1,), (1,))
    plan = plan_of(views)
    (bucket,) = plan.extend([views])
    arrival = Arrival(views)
    assert arrival.record(views[0], counts=True)
    assert not arrival.record(views[0], counts=True)
    assert not arrival.record(views[1], counts=False)
    assert bucket.num_waiting == 1
    plan.begin_round()
    arrival.begin_round()
    assert arrival.record(views[0], counts=True)


def test_a_report_has_what_arrived_late_frozen_or_without_a_bucket() -> None:
    views = views_of((1,), (1,), (2, 1), (1,))
    plan = plan_of(views)
    (bucket,) = plan.extend([[views[0]]])
    bucket.in_flight = True
    views[0].param.grad = torch.ones(1)
    views[2].param.grad = torch.sparse_coo_tensor([[1]], [[3.0]], (2, 1), check_invariants=True)
    views[3].param.requires_grad_(False)
    arrival = Arrival(views)
    for index in (2, 0):
        arrival.record(views[index], counts=True)
    states, order = arrival.report(plan.buckets, recheck=False, has_weight=True)
    assert list(states) == [ARRIVED | LATE, 0, ARRIVED, FROZEN]
    assert order == [2]
    arrival.end_step()
    assert list(arrival.report([], recheck=False, has_weight=True)[0]) == [0, 0, 0, FROZEN]


def test_a_gradient_that_was_dropped_or_has_no_weight_has_not_arrived() -> None:
    views = views_of((1,))
    arrival = Arrival(views)
    arrival.record(views[0], counts=True)
    assert list(arrival.report([], recheck=True, has_weight=True)[0]) == [0]
    views[0].param.grad = torch.ones(1)
    arrival.record(views[0], counts=True)
    assert list(arrival.report([], recheck=True, has_weight=False)[0]) == [0]


# Rounds


def test_a_summary_combines_the_reports_of_all_ranks() -> None:
    messages = [report(states=b"\x01\x00\x01", order=[2]), report(states=b"\x01\x04\x00")]
    summary = RoundSummary.of(messages, 3, b"the plan")
    assert summary.active == [0, 1]
    assert (summary.any_rank, summary.all_ranks) == (b"\x01\x04\x01", b"\x01\x00\x00")
    assert summary.order() == [2]
    assert (summary.is_plain, summary.has_arrived, summary.total_weight) == (False, True, 2.0)


def test_ranks_that_are_done_are_not_compared() -> None:
    messages = [report(3), report(0, is_done=True), report(3)]
    assert RoundSummary.of(messages, 0, b"the plan").active == [0, 2]


def test_steps_and_plans_that_differ_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"\b0 .*step 1, .*\b2 .*step 2"):
        RoundSummary.of([report(1), report(1), report(2)], 0, b"the plan")
    with pytest.raises(MismatchError, match="different plans"):
        RoundSummary.of([report(), report(0, b"another!")], 0, b"the plan")


# Hooks


class Recorder:
    def __init__(self) -> None:
        self.seen: list[int | str] = []

    def arrived(self, index: int) -> None:
        self.seen.append(index)

    def ended(self) -> None:
        self.seen.append("end")


def test_hooks_report_gradients_and_the_end_of_each_backward() -> None:
    views, recorder = views_of((1,), (1,)), Recorder()
    hooks = GradientHooks(recorder.arrived)
    hooks.attach(views)
    views[1].param.sum().backward()
    hooks.watch(recorder.ended)
    (views[0].param + views[1].param).sum().backward()
    assert recorder.seen[0] == 1
    assert sorted(map(str, recorder.seen[1:3])) == ["0", "1"]
    assert recorder.seen[3:] == ["end"]
    hooks.remove()
    views[0].param.sum().backward()
    assert len(recorder.seen) == 4


def test_a_parameter_has_the_hooks_of_one_owner_that_is_alive() -> None:
    views, recorder = views_of((1,)), Recorder()
    hooks = GradientHooks(recorder.arrived)
    hooks.attach(views)
    with pytest.raises(InvalidArgumentError, match="another reducer") as refused:
        GradientHooks.check_free(views)
    assert refused.value.name == "p0"
    del hooks
    gc.collect()
    GradientHooks.check_free(views)
    views[0].param.sum().backward()
    assert not recorder.seen
