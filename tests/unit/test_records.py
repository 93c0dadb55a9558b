"""Records that ranks send each other about state: they round-trip; one that was changed is valid or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import statexchange as sx
from statexchange.exchange.exporting import ExportReport
from statexchange.exchange.gather import _RankMessage, _TensorMetadata
from statexchange.exchange.memory_copy import _Answer
from statexchange.exchange.rank_metadata import RankMetadata, check_equal_options
from statexchange.exchange.reading import WantedBox
from statexchange.exchange.same_source import _OpenedSource
from statexchange.exchange.saving import _Start, _Written
from statexchange.sharding import records
from statexchange.sharding.placements import DimSplit
from statexchange.sharding.plan import Piece
from statexchange.sharding.rules import Layout
from statexchange.sharding.sharding_spec import Placement
from statexchange.sharding.shards import Box
from statexchange.sharding.write_plan import BoxReceipt, BoxReceipts, WriteFile, WritePlan, WriteTensor, assign_hosts
from statexchange.state.describe import describe

LAYOUT = {
    "cut": {"dim": 1, "blocks": [1, 1]},
    "split.qkv": {"dim": 0, "split": {"qkv": {"q": 1, "k": 1}}},
    "own": {"global_shape": [4, 2], "offsets": [2, 0], "shape": [2, 2]},
    "scale": {"reduce": "max"},
}
STATE = {name: torch.ones(2, 2) for name in ("cut", "split.qkv", "own", "scale", "plain")}
PIECES = [Piece(Box((0, 0), (2, 2)), 1, 0, ((0, 1),)), Piece(Box((2, 0), (2, 2)), 0, 0)]
PLAN = WritePlan(
    (WriteFile("/out/a", is_reserved=True), WriteFile("/out/b", is_reserved=False)),
    (WriteTensor(1, 80, (4, 2), "F32", "w", "max", PIECES), WriteTensor(0, 8, (2,), "BF16", "v", None, ())),
    ({}, {"layers.0.w": "layers.1.w"}),
    (0, 1),
    "/out/probe",
    compares=True,
)


def metadata() -> RankMetadata:
    described = describe(STATE, Layout.parse(LAYOUT))
    placement = Placement((2, 1), (DimSplit(0), None))
    found = RankMetadata.of(described, {"dtype": "None"}).to_json()
    found["placements"] = [placement.to_json()]
    found["shards"].append({"name": "mesh", "dtype": "F32", "shape": [4, 2], "placement": 0})
    return RankMetadata.from_json(json.loads(json.dumps(found)))


TENSORS_METADATA = (
    _TensorMetadata("w", "F32", (2, 3), "parameter", requires_grad=True, alias=None, offset=0),
    _TensorMetadata("tied", "F32", (2, 3), "parameter", requires_grad=True, alias="w", offset=64),
)
CASES: list[tuple[Any, Callable[[Any], Any]]] = [
    (metadata(), RankMetadata.from_json),
    (PLAN, lambda raw: WritePlan.from_json(raw, 2)),
    (BoxReceipts((BoxReceipt(0, 1, 0, "aa"), BoxReceipt(1, 0, 2, "bb"))), BoxReceipts.from_json),
    (_RankMessage(TENSORS_METADATA, {"id": "a"}, ["x"]), _RankMessage.from_json),
    (WantedBox("w", Box((0,), (2,)), "F32"), WantedBox.from_json),
    (
        ExportReport("/p", (("a", 1),), 1, 1, {"b": "a"}, 0.5, {"write": 0.1}, {"write": 1}, (1, 0), ("a note",)),
        ExportReport.from_json,
    ),
    (
        _Start(
            "step-000000007", "/saves", "0123456789abcdef", "hidden", has_layout=False, has_copies=True, memory=True
        ),
        _Start.from_json,
    ),
    (_Written(100, "etag", "/saves"), _Written.from_json),
    (_Answer("no room", "/dev/shm/hidden", "digest"), _Answer.from_json),
    (_OpenedSource("a", "b", "/p", "/p, round 3", {"strict": "True"}, has_layout=True), _OpenedSource.from_json),
]
IDS = [type(record).__name__ for record, _ in CASES]
WRONG: list[Any] = [None, True, -1, 1.5, 1 << 70, 10**400, "", "x", [], [1], [[1, 2]], {}, {"a": 1}]


def sent(record: Any) -> Any:
    return json.loads(records.encoded(record))


def places(raw: Any) -> Iterator[tuple[Any, ...]]:
    """Return every place in a JSON value, as the keys that lead to it."""
    yield ()
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(raw, dict):
        items = raw.items()
    elif isinstance(raw, list):
        items = enumerate(raw)
    for key, item in items:
        for rest in places(item):
            yield (key, *rest)


def changed(raw: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy in which `change` was applied to the container and key of a place."""
    top = [copy.deepcopy(raw)]
    inside: Any = top
    for key in (0, *place)[:-1]:
        inside = inside[key]
    change(inside, (0, *place)[-1])
    return top[0] if top else None


@pytest.mark.parametrize(("record", "read"), CASES, ids=IDS)
def test_a_record_round_trips(record: Any, read: Callable[[Any], Any]) -> None:
    assert sent(read(sent(record))) == sent(record)


@pytest.mark.parametrize(("record", "read"), CASES, ids=IDS)
def test_a_record_that_was_changed_is_read_or_refused(record: Any, read: Callable[[Any], Any]) -> None:
    """Wrong types, counts and values anywhere: a ValueError, or another valid record."""
    raw, refused = sent(record), 0

    def check(other: Any) -> bool:
        try:
            found = read(other)
        except ValueError:
            return True
        assert sent(read(sent(found))) == sent(found)
        return False

    def dropped(inside: Any, key: Any) -> None:
        del inside[key]

    for place in places(raw):
        refused += check(changed(raw, place, dropped))
        for value in WRONG:
            refused += check(changed(raw, place, lambda inside, key, value=value: inside.__setitem__(key, value)))
    assert refused > len(WRONG)


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"[1, 2]", b"\xff", b"[" * 100_000])
def test_an_invalid_record_names_the_rank_that_sent_it(data: bytes) -> None:
    with pytest.raises(sx.errors.MismatchError, match="same version") as caught:
        records.decoded(data, lambda raw: WritePlan.from_json(raw, 2), "the plan", 3)
    assert caught.value.rank == 3


def test_a_plan_with_absent_ranks_or_files_is_refused() -> None:
    for place, value in (
        (("tensors", 0, "file"), 2),
        (("tensors", 0, "pieces", 0, "holder"), 2),
        (("tensors", 0, "pieces", 0, "replicas", 0, 0), 2),
        (("tensors", 0, "pieces", 0, "box"), [[3, 0], [2, 2]]),
        (("rename_of", 1), 2),
        (("rename_of",), [0]),
    ):
        raw = changed(sent(PLAN), place, lambda inside, key, value=value: inside.__setitem__(key, value))
        with pytest.raises(ValueError, match=r"not a|outside"):
            WritePlan.from_json(raw, 2)


def test_boxes_that_are_reduced_are_those_with_copies() -> None:
    (found,) = PLAN.reductions()
    assert (found.name, found.op, found.holder, found.index, found.copies) == ("w", "max", 1, 0, ((0, 1),))


def test_a_file_is_written_by_the_host_to_which_the_least_is_sent() -> None:
    one = [Piece(Box((0,), (8,)), 0, 0), Piece(Box((8,), (24,)), 2, 0)]
    tensors = tuple(WriteTensor(file, 0, (32,), "F32", f"w{file}", None, one) for file in range(2))
    plan = WritePlan((WriteFile("a", True), WriteFile("b", True)), tensors, ({},), (0,) * 3, "", compares=True)
    assert assign_hosts(plan, [0, 0, 1], [True] * 3) == [1, 0]
    assert assign_hosts(plan, [0, 0, 1], [True, True, False]) == [0, 0]


def test_options_that_differ_are_named_with_both_values() -> None:
    same = {"dtype": "None", "replicas": "'equal'"}
    check_equal_options([same, dict(same)])
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"^dtype is .* 0 .*'float16' .* 2") as caught:
        check_equal_options([same, same, {**same, "dtype": "'float16'"}])
    assert caught.value.rank == 2
