"""The tuner of bucket sizes: what it tries, what it keeps, and the same choice on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from averaging import net, sgd, train, weights
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks
from statexchange.train.module import Setting, Tuner, data_parallel

# The tuner


def test_the_tuner_tries_powers_of_two_and_keeps_the_fastest() -> None:
    took = {2**k: abs(k - 21) + 1.0 for k in range(10, 32)} | {10 << 20: 9.0}
    tuner = Tuner(Setting(10 << 20))
    sizes = [10 << 20]
    for _ in range(8):
        sizes.append(tuner.propose(Setting(sizes[-1]), took[sizes[-1]]).bucket_bytes)
    assert sizes == [10 << 20, 4 << 20, 16 << 20, 2 << 20, 32 << 20, 2 << 20, 2 << 20, 2 << 20, 2 << 20]
    assert Tuner(Setting(1)).propose(Setting(1), 1.0) == Setting(1)


@pytest.mark.parametrize("faster", [False, True])
def test_the_tuner_tries_sizes_with_the_faster_way_of_several_hosts(faster: bool) -> None:
    present = Setting(4096, hierarchical=True)
    tuner, tried = Tuner(present, both=True), [present]
    for _ in range(6):
        tried.append(tuner.propose(tried[-1], 1.0 + (tried[-1].hierarchical is not faster)))
    assert tried[1] == Setting(4096, hierarchical=False)
    assert tried[2:6] == [Setting(size, hierarchical=faster) for size in (2048, 8192, 1024, 16384)]
    assert tried[6] == Setting(4096, hierarchical=faster)


def test_the_bucket_count_changes_on_all_ranks_at_the_same_step() -> None:
    def work() -> tuple[Any, ...]:
        comm = sx.get_communicator()
        module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(16)))  # 1 KiB each
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.01)
        wrapped, optimizer = data_parallel(module, sgd(module), bucket_bytes=4096, tune_every=5)
        counts = []
        for step in range(32):
            optimizer.zero_grad()
            wrapped(torch.full((2, 16), float(comm.rank + step))).sum().backward()
            counts.append(len(optimizer.reducer.buckets))
            optimizer.step()
            if step % 5 == 2:  # a forward in eval mode is not counted, nor is its time
                wrapped.eval()
                wrapped(torch.zeros(1, 16))
                wrapped.train()
        trials = [(trial.bucket_bytes, trial.buckets, trial.step_s) for trial in wrapped.tuning_history]
        return counts, trials, weights(module)

    results = run_ranks(work, 2)
    counts, trials, _ = results[0]
    assert results[1] == results[0]
    assert counts[:5] == [4] * 5
    assert counts[5:20] == [8] * 5 + [2] * 5 + [16] * 5
    assert [trial[0] for trial in trials[:5]] == [4096, 2048, 8192, 1024, 16384]
    assert [trial[1] for trial in trials[:5]] == [4, 8, 2, 16, 1]
    assert counts[25:] == [{trial[0]: trial[1] for trial in trials}[min(trials[:5], key=lambda t: t[2])[0]]] * 7
    assert all(trial[2] > 0 for trial in trials)


def test_step_times_can_be_reported_and_the_slowest_rank_counts() -> None:
    def work() -> tuple[Any, ...]:
        comm = sx.get_communicator()
        module = net()
        wrapped, optimizer = data_parallel(module, sgd(module), bucket_bytes=2048)
        assert not wrapped.ask_and_update_hyperparameters()  # no step was measured
        answers = []
        for seconds in (5.0, 4.0, 1.0, 3.0, 2.0, 7.0):
            train(wrapped, optimizer, comm.rank, range(1))
            wrapped.report_metrics([seconds if comm.rank else 0.5] * 3)
            answers.append(wrapped.ask_and_update_hyperparameters())
        wrapped.switch_to("decentralize")
        wrapped.report_metrics([1.0])
        answers.append(wrapped.ask_and_update_hyperparameters())
        return (
            answers,
            [(trial.bucket_bytes, trial.step_s) for trial in wrapped.tuning_history],
            optimizer.setting.bucket_bytes,
        )

    expected = [(2048, 5.0), (1024, 4.0), (4096, 1.0), (8192, 3.0), (4096, 2.0), (4096, 7.0)]
    for answers, trials, present in run_ranks(work, 2):
        assert trials == expected
        assert answers == [True, True, True, True, False, False, False]
        assert present == 4096
