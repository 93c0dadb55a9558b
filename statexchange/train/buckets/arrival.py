"""The record of the gradients that arrived on this rank, and of their order."""

from __future__ import annotations

from collections.abc import Sequence

from statexchange.train.buckets.rounds import ARRIVED, FROZEN, LATE
from statexchange.train.buckets.views import Bucket, BucketView

__all__ = ["Arrival"]


class Arrival:
    """Records the arrival of gradients, which is not the same as ``grad is not None``.

    A user may keep old gradients, or zero them, so a tensor in `.grad` need not come from this step's backward. Only
    the hooks show which gradients it made. A gradient that has arrived counts as such until the end of the *step*
    (`end_step`), over all rounds of averaging in it. In each *round* (`begin_round`) a bucket waits once for each of
    its gradients.
    """

    def __init__(self, views: Sequence[BucketView]) -> None:
        self._views = views
        self.end_step()
        self.begin_round()

    def end_step(self) -> None:
        """Count all gradients as missing until they arrive again."""
        self._states = bytearray(len(self._views))
        self._unplaced: dict[int, None] = {}  # parameters in no bucket, in the order of arrival

    def begin_round(self) -> None:
        """Begin a round: let each bucket wait for each of its gradients again."""
        self._counted = bytearray(len(self._views))

    def record(self, view: BucketView, *, counts: bool) -> bool:
        """Record an arrival; return whether its bucket now waits for one gradient fewer.

        With `counts` False the gradient has arrived, but the bucket goes on waiting: another backward will add to it.
        """
        self._states[view.index] = ARRIVED
        bucket = view.bucket
        if bucket is None:
            self._unplaced[view.index] = None
            return False
        if not counts or self._counted[view.index]:
            return False
        self._counted[view.index] = 1
        bucket.num_waiting -= 1
        return True

    def mark_missing(self, views: Sequence[BucketView]) -> None:
        """Count these gradients as missing: their `.grad` is None, since they never arrived or although they had."""
        for view in views:
            self._states[view.index] = 0

    def report(self, buckets: Sequence[Bucket], *, recheck: bool, has_weight: bool) -> tuple[bytes, list[int]]:
        """Return the flags of all parameters, and those without a bucket in the order of arrival, for a RoundReport.

        Args:
            buckets: the buckets of the plan.
            recheck: look for gradients that became None after they had arrived. Needed only if buckets are not filled
                yet, as filling finds them, too.
            has_weight: a rank without weight reports that nothing arrived.
        """
        candidates = self._views
        if not recheck:  # what is in no bucket was not filled
            candidates = [self._views[index] for index in self._unplaced]
        self.mark_missing([view for view in candidates if view.param.grad is None])
        if not has_weight:
            self._states = bytearray(len(self._states))
        # A copy: what is late or frozen concerns this round alone, and the step goes on.
        states = bytearray(self._states)
        for bucket in buckets:
            if bucket.in_flight:
                for view in bucket.views:
                    if view.param.grad is not None:  # sending set it to None, so another backward made it
                        states[view.index] |= LATE
        for view in self._views:
            if not view.param.requires_grad:
                states[view.index] |= FROZEN
        order = [i for i in self._unplaced if self._states[i] and self._views[i].bucket is None]
        return bytes(states), order
