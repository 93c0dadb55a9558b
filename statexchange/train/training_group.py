"""The optimizers that train one module, and the step times by which their setting is tuned."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError
from statexchange.train.algorithm_optimizer import AlgorithmOptimizer
from statexchange.train.tuner import Setting, Trial, Tuner

__all__ = ["TrainingGroup"]

_MAX_STEP_TIMES = 1 << 12


class TrainingGroup:
    """Optimizers that train one module by one algorithm, with one setting.

    A step's time is that between two forwards in train mode. With `tune_every` the tuner runs at the end of each step
    whose forward is the `tune_every`-th: between a forward and its step, buckets cannot change.
    """

    def __init__(self, comm: Communicator) -> None:
        self.history: list[Trial] = []
        self._comm = comm
        self._optimizers: list[AlgorithmOptimizer] = []
        self._tuner: Tuner | None = None
        self._tune_every: int | None = None
        self._is_due = False
        self._num_forwards = 0
        self._last_forward_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=_MAX_STEP_TIMES)

    @property
    def optimizers(self) -> list[AlgorithmOptimizer]:
        """The optimizers, at least one."""
        if not self._optimizers:
            raise InvalidArgumentError("this module has no optimizer: data_parallel(module, optimizer) gives it one")
        return self._optimizers

    def begin(self, optimizers: list[AlgorithmOptimizer], tune_every: int | None) -> None:
        """Train with these optimizers; run the tuner after each `tune_every`-th forward, or only when called."""
        self._optimizers = optimizers
        self._tune_every = tune_every
        self._tuner = optimizers[0].new_tuner()

    def restart_tuning(self) -> None:
        """Discard the measured times: the algorithm has changed."""
        self._tuner = self.optimizers[0].new_tuner()
        self._step_times.clear()

    def count_forward(self) -> None:
        """Count a forward in train mode, and the time since the one before as a step."""
        now = time.perf_counter()
        if self._last_forward_s is not None:
            self._step_times.append(now - self._last_forward_s)
        self._last_forward_s = now
        self._num_forwards += 1
        if self._tune_every is not None and self._num_forwards % self._tune_every == 0:
            self._is_due = True

    def interrupt(self) -> None:
        """Do not count the time from the last forward to the next as a step: something else happens in between."""
        self._last_forward_s = None

    def set_step_times(self, step_s: Sequence[float]) -> None:
        """Replace what was measured by times in seconds."""
        self._step_times = deque(step_s, maxlen=_MAX_STEP_TIMES)

    def after_step(self) -> None:
        """Run the tuner if it is due after this step. Collective then."""
        if self._is_due:
            self.tune()

    def tune(self) -> bool:
        """Let rank 0 choose a setting by the step times of all ranks; return whether it changed. Collective."""
        optimizers = self.optimizers
        first = optimizers[0]
        median = statistics.median(self._step_times) if self._step_times else None
        self._step_times.clear()
        self._is_due = False
        medians = [value for value in self._comm.all_gather_object(median) if value is not None]
        if not medians or first.algorithm.averages_weights:
            return False
        present = first.setting
        num_buckets = sum(len(optimizer.reducer.buckets) for optimizer in optimizers)
        self.history.append(Trial(present.bucket_bytes, num_buckets, max(medians), present.hierarchical))
        assert self._tuner is not None
        proposed = self._tuner.propose(present, max(medians)) if self._comm.rank == 0 else present
        chosen = Setting(*self._comm.broadcast_object([proposed.bucket_bytes, proposed.hierarchical]))
        if chosen == present:
            return False
        for optimizer in optimizers:
            optimizer.use(chosen)
        self.interrupt()  # the first step with new buckets also makes them
        return True
