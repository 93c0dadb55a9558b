"""Plain values in a state come back as each rank saved them: to the bit, and of their type, or they are refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.testing import RankFailure, run_ranks


@dataclasses.dataclass
class Progress:
    step: int
    loss: float = dataclasses.field(default=0.0, compare=False)
    counts: Any = dataclasses.field(default_factory=lambda: collections.defaultdict(int))

    def __post_init__(self) -> None:
        self.note = "of the live object"


class Holder:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def own_values(rank: int) -> dict[str, Any]:
    """Return plain values whose keys, and their order, differ between ranks."""
    return {
        "seen": {f"file{rank}": rank},
        "order": {"a": 1, "b": 2} if rank == 0 else {"b": 2, "a": 1},
        "empty": {} if rank else {"k": 1},
        "counts": collections.Counter({f"c{rank}": rank + 1}),
        "cache": {f"t{rank}": torch.full((1,), float(rank))},
    }


def test_each_rank_gets_its_own_mappings_on_the_same_number_of_ranks(tmp_path: Path) -> None:
    def saves_and_loads() -> None:
        rank = sx.get_rank()
        holder = Holder()
        holder.state = own_values(rank)
        sx.save_checkpoint({"w": torch.zeros(1), "own": own_values(rank), "holder": holder}, tmp_path / "save")
        again = Holder()
        live: dict[str, Any] = {"w": torch.ones(1), "own": {"counts": collections.Counter()}, "holder": again}
        sx.load_checkpoint(live, tmp_path / "save")
        for found in (live["own"], again.state):
            assert {name: list(value.items()) for name, value in found.items()} == {
                name: list(value.items()) for name, value in own_values(rank).items()
            }
        assert type(live["own"]["counts"]) is collections.Counter

    run_ranks(saves_and_loads, 2)


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_dict_of_an_optimizer_is_a_plain_value(differ: bool, world_size: int, tmp_path: Path) -> None:
    def state(lr: float) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], lr=lr)
        weight.sum().backward()
        optimizer.step()
        return optimizer, {"optim": optimizer.state_dict(), "rng": sx.get_rank()}

    def saves() -> None:
        sx.save_checkpoint(state(0.5 + sx.get_rank() * differ)[1], tmp_path / "save")

    def loads(**options: Any) -> Any:
        optimizer, live = state(0.1)
        sx.load_checkpoint(live, tmp_path / "save", exclude="rng", **options)
        optimizer.load_state_dict(live["optim"])
        return optimizer.param_groups[0]["lr"]

    run_ranks(saves, 2)
    if world_size == 1 and differ:
        with pytest.raises(sx.errors.ReplicaError, match=r"'optim\.param_groups\.0\.lr'"):
            sx.load_checkpoint(state(0.1)[1], tmp_path / "save", exclude="rng")
        assert run_ranks(lambda: loads(replicas="root"), 1) == [0.5]
    else:
        assert run_ranks(loads, world_size) == [0.5, 0.5 + differ][:world_size]


EQUAL: list[tuple[Any, Any]] = [
    (-0.0, 0.0),
    ([True, 1], [1, True]),
    ((1.0,), (1,)),
    ({True}, {1}),
    (collections.deque([1], 5), collections.deque([1], 3)),
    (
        dt.datetime(2020, 1, 1, 12, tzinfo=dt.timezone.utc),
        dt.datetime(2020, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=1))),
    ),
    ([Progress(1, 2.0)], [Progress(1, 3.0)]),
]


@pytest.mark.parametrize(("saved", "live"), EQUAL, ids=repr)
def test_a_value_that_is_only_equal_is_replaced(saved: Any, live: Any, tmp_path: Path) -> None:
    assert saved == live
    sx.save_checkpoint({"value": saved, "w": torch.zeros(1)}, tmp_path / "save")
    state = {"value": live, "w": torch.ones(1)}
    sx.load_checkpoint(state, tmp_path / "save")
    assert repr(state["value"]) == repr(saved)

    def saves() -> None:
        sx.save_checkpoint({"value": live if sx.get_rank() else saved, "w": torch.zeros(1)}, tmp_path / "two")

    run_ranks(saves, 2)
    with pytest.raises(sx.errors.ReplicaError, match=r"values of 'value(\.0)?(\.loss)?'"):
        sx.load_checkpoint(state, tmp_path / "two")


@pytest.mark.ranks(2)
def test_synchronize_gives_the_sign_of_zero() -> None:
    assert repr(sx.synchronize([-0.0 if sx.get_rank() == 0 else 0.0])) == "[-0.0]"


def test_a_live_dataclass_stays_itself_and_keeps_what_is_no_field(tmp_path: Path) -> None:
    saved = Progress(5, 2.0)
    saved.counts["a"] = 1
    sx.save_checkpoint({"progress": saved, "w": torch.zeros(1)}, tmp_path / "save")
    live = Progress(0)
    live.note = "kept"
    sx.load_checkpoint({"progress": live, "w": torch.ones(1)}, tmp_path / "save")
    assert (live.step, live.loss, live.counts, live.note) == (5, 2.0, {"a": 1}, "kept")
    assert type(live.counts) is collections.defaultdict


class WithNan(enum.Enum):
    A = float("nan")


REFUSED: list[tuple[Any, str]] = [
    (dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "x")), "datetime.*UTC"),
    (dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=5))), "in UTC"),
    (pathlib.PureWindowsPath("a\\b"), "PureWindowsPath"),
    (WithNan.A, "lead back"),
    (10**4300, "14,285 bits"),
    ({10**5000: 1}, "16,610 bits"),
]


@pytest.mark.parametrize(("value", "match"), REFUSED, ids=[type(value).__name__ for value, _ in REFUSED])
def test_a_value_that_would_come_back_changed_is_refused(value: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(sx.errors.UnsupportedError, match=match):
        sx.save_checkpoint({"value": value, "w": torch.zeros(1)}, tmp_path / "save")


@pytest.mark.parametrize(
    "value",
    [dt.datetime(2020, 1, 1, fold=1), dt.time(1, fold=1), 10**4299, -(10**4299)],
    ids=lambda value: str(value)[:30],
)
def test_a_value_at_the_limit_comes_back(value: Any, tmp_path: Path) -> None:
    sx.save_checkpoint({"value": value, "w": torch.zeros(1)}, tmp_path / "save")
    state = {"value": None, "w": torch.ones(1)}
    sx.load_checkpoint(state, tmp_path / "save")
    assert repr(state["value"]) == repr(value)


@pytest.mark.parametrize(("old", "new"), [(b"1000", b"9000"), (b"0.5", b"0.9"), (b"1000", b"1:00")])
def test_a_changed_byte_of_a_plain_value_is_found(old: bytes, new: bytes, tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.zeros(4), "step": 1000, "lr": 0.5}, tmp_path / "save")
    file = tmp_path / "save/rank-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    live = {"w": torch.ones(4), "step": 0, "lr": 0.0}
    with pytest.raises(sx.errors.CorruptError, match="own digest") as caught:
        sx.load_checkpoint(live, tmp_path / "save")
    assert caught.value.rank == 0
    assert (live["step"], live["lr"], live["w"].tolist()) == (0, 0.0, [1.0] * 4)


# Tensors in export_checkpoint


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_keeps_the_sign_of_a_negative_view(dtype: torch.dtype, tmp_path: Path) -> None:
    negative = torch._neg_view(torch.arange(1.0, 4.0))
    sx.export_checkpoint({"w": negative}, tmp_path / "out", dtype=dtype)
    live = {"w": torch.zeros(3, dtype=dtype)}
    sx.load_checkpoint(live, tmp_path / "out")
    assert live["w"].tolist() == [-1, -2, -3]
    sx.save_checkpoint({"w": torch.arange(1.0, 4.0)}, tmp_path / "save")
    view = torch._neg_view(torch.zeros(3, dtype=dtype))
    sx.load_checkpoint({"w": view}, tmp_path / "save", dtype="state")
    assert view.tolist() == [1, 2, 3]


TIED: list[tuple[dict[str, Any], list[float]]] = [
    ({"layout": {"a": {"reduce": "max"}, "b": {"reduce": "min"}}}, [0.0, 1.0]),
    ({"layout": {"b": {"reduce": "max"}}, "replicas": "root"}, [1.0, 2.0]),
    ({"layout": {"a": {"reduce": "max"}, "b": {"reduce": "max"}}}, [1.0, 2.0]),
]


@pytest.mark.parametrize(("options", "expected"), TIED, ids=repr)
def test_a_tied_tensor_follows_its_own_rule(options: dict[str, Any], expected: list[float], tmp_path: Path) -> None:
    def exports() -> None:
        tied = torch.tensor([0.0, 1.0]) + sx.get_rank()
        sx.export_checkpoint({"a": tied, "b": tied}, tmp_path / "out", **options)

    run_ranks(exports, 2)
    live = {"b": torch.zeros(2)}
    sx.load_checkpoint(live, tmp_path / "out", strict=False)
    assert live["b"].tolist() == expected


def test_copies_of_a_tied_tensor_without_a_rule_are_compared(tmp_path: Path) -> None:
    def exports() -> None:
        tied = torch.tensor([0.0, 1.0]) + sx.get_rank()
        with pytest.raises(sx.errors.ReplicaError, match="different values") as caught:
            sx.export_checkpoint({"a": tied, "b": tied}, tmp_path / "out", layout={"a": {"reduce": "max"}})
        assert caught.value.name == "b"

    run_ranks(exports, 2)


def test_a_tie_on_another_rank_than_the_one_whose_copy_is_taken_does_not_count(tmp_path: Path) -> None:
    def exports() -> None:
        tied = torch.tensor([0.0, 1.0])
        state = {"a": tied, "b": tied} if sx.get_rank() else {"a": tied + 5}
        sx.export_checkpoint(state, tmp_path / "out", replicas="root")

    run_ranks(exports, 2)
    live = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    sx.load_checkpoint(live, tmp_path / "out")
    assert (live["a"].tolist(), live["b"].tolist()) == ([5.0, 6.0], [0.0, 1.0])


def test_a_tied_tensor_has_the_dtype_of_its_own_pattern(tmp_path: Path) -> None:
    tied = torch.tensor([0.0, 1.0])
    sx.export_checkpoint({"a": tied, "b": tied}, tmp_path / "out", dtype={"b": "float32", "*": "bfloat16"})
    with sx.open_checkpoint(tmp_path / "out") as opened:
        assert {name: tensor.dtype for name, tensor in opened.items()} == {"a": "BF16", "b": "F32"}


# Arguments


def test_flags_that_are_no_bools_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def calls() -> list[str]:
        wrong: Any = "no" if sx.get_rank() else False
        messages = []
        for call in (
            lambda: sx.export_checkpoint({"w": torch.ones(1)}, tmp_path / "out", overwrite=wrong),
            lambda: sx.save_checkpoint({"w": torch.ones(1)}, tmp_path / "save", overwrite=wrong),
            lambda: sx.load_checkpoint({"w": torch.ones(1)}, tmp_path / "out", on_progress=wrong or None),
        ):
            with pytest.raises(sx.errors.InvalidArgumentError) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    for messages in run_ranks(calls, 2):
        assert messages == [
            "overwrite must be True or False, not 'no' [rank 1]",
            "overwrite must be True or False, not 'no' [rank 1]",
            "on_progress must be a function of two numbers, not 'no' [rank 1]",
        ]
    yes: Any = "yes"
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"memory must.*'yes'"):
        sx.Checkpoints(tmp_path, memory=yes)


@pytest.mark.parametrize("options", [{"step": 1}, {"missing_ok": False}], ids=str)
def test_a_load_of_another_step_on_one_rank_is_refused_on_all(options: dict[str, Any], tmp_path: Path) -> None:
    def loads() -> None:
        saves = sx.Checkpoints(tmp_path)
        for step in (1, 2):
            saves.save({"w": torch.ones(1)}, step)
        (name,) = options
        with pytest.raises(sx.errors.InvalidArgumentError, match=rf"^{name} is") as caught:
            saves.load({"w": torch.zeros(1)}, **(options if sx.get_rank() else {}))
        assert caught.value.rank == 1

    run_ranks(loads, 2)


def test_tensors_of_other_shapes_on_other_ranks_are_each_ranks_own(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")

    def loads() -> list[float]:
        state = {"w": torch.zeros(2 + sx.get_rank())}
        sx.load_checkpoint(state, path)
        return state["w"].tolist()

    run_ranks(lambda: sx.save_checkpoint({"w": torch.ones(2 + sx.get_rank())}, path) and None, 2)
    assert run_ranks(loads, 2) == [[1, 1], [1, 1, 1]]
    text = r"ranks 0 and 1 saved F32 \[2\] and F32 \[3\] here: load on as many ranks"
    with pytest.raises(RankFailure, match=f"ReplicaError: {text}"):
        run_ranks(loads, 3)
    (finding,) = verify(path).findings
    assert isinstance(finding, sx.errors.ReplicaError)
