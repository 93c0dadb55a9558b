"""A wrong argument is an InvalidArgumentError or UnsupportedError on all ranks, also if only one rank passes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statexchange as sx
from statexchange.comm import defaults
from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError
from statexchange.testing import run_ranks

Call = Callable[[bool], Any]


def ones() -> torch.Tensor:
    return torch.ones(4)


def comm() -> sx.comm.Communicator:
    return sx.get_communicator()


def net() -> nn.Module:
    return nn.Linear(2, 2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def parallel(wrong: bool, **settings: Any) -> Any:
    module = net()
    return sx.train.data_parallel(module, sgd(module), **(settings if wrong else {}))


def optimizers(wrong: bool, given: Any) -> Any:
    return sx.train.data_parallel(net(), given) if wrong else parallel(False)


def optimizer(wrong: bool, **settings: Any) -> Any:
    return sx.DistributedOptimizer(sgd(net()), **(settings if wrong else {}))


def buckets(wrong: bool, **settings: Any) -> Any:
    return sx.train.BucketReducer(net(), **(settings if wrong else {}))


def add(reducer: Any, tensor: Any) -> None:
    reducer.add(tensor)
    reducer.finalize()


def enter(block: contextlib.AbstractContextManager[Any]) -> None:
    with block:
        pass


# Calls by name; with `wrong` each passes a wrong argument
CALLS: dict[str, Call] = {
    "op": lambda w: comm().all_reduce(ones(), op=[] if w else "sum"),
    "scale": lambda w: comm().all_reduce(ones(), scale="x" if w else 1.0),
    "no scale": lambda w: comm().all_reduce(ones(), scale=None if w else 1.0),
    "tensors": lambda w: comm().all_reduce_multiple(5 if w else [ones()]),
    "scatter": lambda w: comm().scatter(5 if w else [ones(), ones()], root=1),
    "all_to_all": lambda w: comm().all_to_all(None if w else [ones(), ones()]),
    "gather_object": lambda w: comm().gather_object(object() if w else 1),
    "all_gather_object": lambda w: comm().all_gather_object(object() if w else 1),
    "broadcast_object": lambda w: comm().broadcast_object(object() if w else 1, root=1),
    "average_gradients of a number": lambda w: sx.average_gradients(5 if w else net()),
    "average_gradients of triples": lambda w: sx.average_gradients([(1, 2, 3)] if w else net()),
    "average_gradients of nothing": lambda w: sx.average_gradients(None if w else net()),
    "allreduce_parameters": lambda w: sx.train.allreduce_parameters(None if w else net()),
    "synchronize": lambda w: sx.synchronize(ones(), root="x" if w else 0),
    "an optimizer that is none": lambda w: sx.DistributedOptimizer(5 if w else sgd(net())),
    "module": lambda w: optimizer(w, module=5),
    "weight of an optimizer": lambda w: optimizer(w, weight=5),
    "an unknown setting": lambda w: optimizer(w, message_size=5),
    "weight of a step": lambda w: sx.DistributedOptimizer(sgd(net()), weight=lambda: "x" if w else 1).step(),
    "add_param_group": lambda w: optimizer(False).add_param_group(5 if w else {"params": [nn.Parameter(ones())]}),
    "parameters": lambda w: sx.train.BucketReducer(5 if w else net()),
    "no parameters": lambda w: sx.train.BucketReducer(None if w else net()),
    "bucket_bytes": lambda w: buckets(w, bucket_bytes="x"),
    "half a byte": lambda w: buckets(w, bucket_bytes=1.5),
    "overlap": lambda w: buckets(w, overlap="no"),
    "buckets": lambda w: buckets(w, buckets=5),
    "a bucket": lambda w: buckets(w, buckets=[5]),
    "what is in a bucket": lambda w: buckets(w, buckets=[[5]]),
    "an empty bucket": lambda w: buckets(w, buckets=[[]]),
    "scale of buckets": lambda w: buckets(w, scale="x"),
    "communicate": lambda w: buckets(w, communicate=5),
    "reset": lambda w: buckets(False).reset(5 if w else None),
    "a module that is none": lambda w: sx.train.data_parallel(5, sgd(net())) if w else parallel(False),
    "a number for an optimizer": lambda w: optimizers(w, 5),
    "no optimizers": lambda w: optimizers(w, []),
    "numbers for optimizers": lambda w: optimizers(w, [5]),
    "algorithm": lambda w: parallel(w, algorithm=[]),
    "an algorithm's class": lambda w: parallel(w, algorithm=sx.train.algorithms.GradientAllReduce),
    "root": lambda w: parallel(w, root=9),
    "bucket_bytes of data_parallel": lambda w: parallel(w, bucket_bytes="x"),
    "tune_every": lambda w: parallel(w, tune_every="x"),
    "an unknown setting of data_parallel": lambda w: parallel(w, message_size=1),
    "weight of data_parallel": lambda w: parallel(w, weight=5),
    "add": lambda w: add(sx.train.CoalescingReducer(), 5 if w else ones()),
    "add at once": lambda w: add(sx.train.InlineReducer(), 5 if w else ones()),
    "root of gather_state": lambda w: enter(sx.gather_state(net(), root="x" if w else 0)),
    "workspace": lambda w: enter(sx.gather_state(net(), workspace=5 if w else None)),
    "workspace_path": lambda w: enter(sx.get_tensors_parallel(ones(), [0, 1], None, 5 if w else None)),
    "tensor": lambda w: enter(sx.get_tensors_parallel(None if w else ones(), [0, 1])),
    "config": lambda w: enter(sx.get_configs_parallel({"a": object()} if w else 1, [0, 1])),
}


@pytest.mark.parametrize("wrong_on", ["all", "one"])
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_and_no_failure_of_a_peer(name: str, wrong_on: str) -> None:
    def work() -> str:
        wrong = wrong_on == "all" or sx.get_rank() == 1
        with pytest.raises((InvalidArgumentError, UnsupportedError)) as caught:
            CALLS[name](wrong)
        comm().barrier()  # the communicator still works
        return str(caught.value)

    one, other = run_ranks(work, 2)
    assert one == other


@pytest.mark.parametrize("name", ["path of export", "filename_pattern", "path of save", "path of load"])
def test_a_wrong_argument_about_files_is_no_failure_of_a_peer(name: str, tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises((InvalidArgumentError, UnsupportedError)):
            if name == "path of export":
                sx.export_checkpoint(net(), 5)  # type: ignore[arg-type]
            elif name == "filename_pattern":
                sx.export_checkpoint(net(), tmp_path / "out", filename_pattern=5)  # type: ignore[arg-type]
            elif name == "path of save":
                sx.save_checkpoint({"a": ones()}, 5)  # type: ignore[arg-type]
            else:
                sx.load_checkpoint(net(), 5)  # type: ignore[arg-type]

    run_ranks(work, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 5}, "devices is"),
        ({"devices": "cuda"}, "devices is"),
        ({"devices": True}, "devices is"),
        ({"devices": {0: "cpu"}}, "devices is"),
        ({"devices": [True]}, "True is no"),
        ({"devices": [1.5]}, "1.5 is no device"),
        ({"devices": [None]}, "None is no"),
        ({"rendezvous": 5, "rank": 0, "world_size": 1}, "rendezvous is"),
        ({"rendezvous": "tcp://127.0.0.1:1", "rank": "0", "world_size": 1}, "rank is"),
    ],
    ids=str,
)
def test_arguments_of_init_are_checked_before_anything_begins(arguments: dict[str, Any], words: str) -> None:
    backend = "auto" if "rendezvous" in arguments else "single"
    with defaults.use(None), pytest.raises(InvalidArgumentError, match=words):
        sx.init(backend, **arguments)


def test_ranks_that_are_no_sequence_of_integers_are_refused() -> None:
    for ranks in (5, None, [0, "1"], [0, 0.5]):
        with pytest.raises(InvalidArgumentError, match="ranks are"):
            enter(sx.get_tensors_parallel(ones(), ranks))  # type: ignore[arg-type]


def test_pythons_own_error_is_kept_as_the_cause() -> None:
    with pytest.raises(StateExchangeError, match=r"all_reduce: .*'x'") as caught:
        comm().all_reduce(ones(), scale="x")  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, ValueError)


def test_values_of_other_types_are_refused_before_anything_happens(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    sx.save_checkpoint({"w": ones()}, path)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: sx.comm.from_process_group(5), "a ProcessGroup"),
        (lambda: sx.comm.from_mpi(5), "mpi4py"),
        (lambda: sx.NFSWorkspace(tmp_path, run=5), "run must be"),
        (lambda: comm().all_to_all(5), "one tensor"),
        (lambda: sx.diff_checkpoints(path, path, on_progress=5), "on_progress must be"),
        (lambda: sx.save_checkpoint(None, tmp_path / "none"), "a NoneType"),
        (lambda: sx.save_checkpoint(5, tmp_path / "five"), "an int"),
    ]
    for call, text in calls:
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(TypeError, match="5 is no dataclass"):
        sx.register_config(5)
    with pytest.raises(UnsupportedError, match=r"tolist\(\)"):
        comm().all_gather_object([ones()])
