"""The examples in the docstrings of training, run in a world of one."""

from __future__ import annotations

import doctest
import importlib
import types

import pytest

torch = pytest.importorskip("torch", reason="training needs torch")

MODULES = [
    "statexchange.train.algorithms",
    "statexchange.train.averaging",
    "statexchange.train.buckets.reducer",
    "statexchange.train.data",
    "statexchange.train.ddp_hook",
    "statexchange.train.module",
    "statexchange.train.optimizer",
    "statexchange.train.reducers",
    "statexchange.train.synchronize",
    "statexchange.values",
]
WITH_EXAMPLES = [
    "statexchange.train.algorithms.Decentralized",
    "statexchange.train.algorithms.GradientAllReduce",
    "statexchange.train.algorithms.QuantizedAllReduce",
    "statexchange.train.algorithms.ScatterGatherAllReduce",
    "statexchange.train.averaging.average_gradients",
    "statexchange.train.buckets.reducer.BucketReducer",
    "statexchange.train.data.DistributedDataContainer",
    "statexchange.train.ddp_hook.as_comm_hook",
    "statexchange.train.module.DistributedModule",
    "statexchange.train.module.data_parallel",
    "statexchange.train.optimizer.DistributedOptimizer",
    "statexchange.train.reducers.CoalescingReducer",
    "statexchange.train.reducers.InlineReducer",
    "statexchange.train.reducers.Reducer",
    "statexchange.train.synchronize.allreduce_parameters",
    "statexchange.train.synchronize.broadcast_parameters",
    "statexchange.train.synchronize.synchronize",
    "statexchange.values.register_config",
]


def examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        assert isinstance(module, types.ModuleType)
        found.update({test.name: test for test in finder.find(module, name) if test.examples})
    return found


def test_every_public_name_has_an_example() -> None:
    assert set(WITH_EXAMPLES) <= examples().keys()


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES))
def test_the_example_does_what_it_shows(name: str) -> None:
    report: list[str] = []
    failed, tried = doctest.DocTestRunner().run(examples()[name], out=report.append)
    assert tried
    assert not failed, "".join(report)
