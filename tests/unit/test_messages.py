"""Records that ranks send each other about state: they round-trip; one that was changed is valid or refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import statexchange as sx
from statexchange.conversions.numbers import KnownConfig
from statexchange.exchange.box_writers import _CoverRecord
from statexchange.exchange.compared_rows import Compared
from statexchange.exchange.exporting import ExportReport
from statexchange.exchange.gather import _RankMessage
from statexchange.exchange.gather_transport import TensorMetadata, _ArenaAddress, _FileAddress, _Place
from statexchange.exchange.load_checks import _OpenedSource
from statexchange.exchange.rank_metadata import DescribedShard, RankMetadata
from statexchange.exchange.reading import Overflows, WantedBox
from statexchange.exchange.saving import _Start, _Written
from statexchange.messages import decode, encoded
from statexchange.report.value_statistics import ValueSums
from statexchange.sharding.options import check_equal_options
from statexchange.sharding.pieces import SpecPieces
from statexchange.sharding.rules import Layout
from statexchange.sharding.sharding_spec import DimSplit, Placement, ShardingSpec
from statexchange.sharding.shards import Box, Piece
from statexchange.sharding.write_plan import WriteFile, WritePlan, WriteTensor, assign_hosts
from statexchange.state.describe import describe
from statexchange.storage.tensorfile import SavedFile, SaveManifest
from statexchange.train import synchronize

LAYOUT = {
    "cut": {"dim": 1, "blocks": [1, 1]},
    "split.qkv": {"dim": 0, "split": {"qkv": {"q": 1, "k": 1}}},
    "own": {"global_shape": [4, 2], "offsets": [2, 0], "shape": [2, 2]},
    "scale": {"reduce": "max"},
}
STATE = {name: torch.ones(2, 2) for name in ("cut", "split.qkv", "own", "scale", "plain")}
PIECES = (Piece(Box((0, 0), (2, 2)), 1, 0, ((0, 1),)), Piece(Box((2, 0), (2, 2)), 0, 0))
PLAN = WritePlan(
    (WriteFile("/out/a", is_reserved=True), WriteFile("/out/b", is_reserved=False)),
    (
        WriteTensor(1, 80, (4, 2), "F32", "w", "max", PIECES),
        WriteTensor(0, 8, (2,), "BF16", "v", None, SpecPieces((2,), Placement((2,), (DimSplit(0),)), 1, (1, 0))),
    ),
    compares=True,
)


def metadata() -> RankMetadata:
    described = describe(STATE, Layout.parse(LAYOUT))
    placement = Placement((2, 1), (DimSplit(0), None))
    found = RankMetadata.of(described, {"dtype": "None"})
    spec = DescribedShard(ShardingSpec("mesh", "F32", (4, 2), placement))
    return replace(found, shards=(*found.shards, spec), unused=("a",), extra_state=())


TENSORS_METADATA = (
    TensorMetadata("w", "F32", (2, 3), "parameter", requires_grad=True, alias=None, offset=0),
    TensorMetadata("tied", "F32", (2, 3), "parameter", requires_grad=True, alias="w", offset=64),
)
SUMS = ValueSums(1, math.inf, [0.5, 1.0, math.inf, 0.0], (1, 2), [0, 1])
LEAVES = (synchronize._LeafSpec("tensor", "a.w", "float32", (2, 3)), synchronize._LeafSpec("object", "a.f"))
ROOT_PARTS = (synchronize._Part("{}", LEAVES, ("T",)), synchronize._Part("", (), ()))
MANIFEST = SaveManifest("0123456789abcdef", "job", 1.5, (10, 20), 7, {"loss": 1, "accuracy": 0.5})
CASES: list[tuple[Any, Any, Callable[[Any], object] | None]] = [
    (metadata(), RankMetadata, RankMetadata.check),
    (PLAN, WritePlan, partial(WritePlan.check, world_size=2)),
    (_RankMessage(TENSORS_METADATA, {"id": "a"}, ["x"]), _RankMessage, _RankMessage.check),
    (_ArenaAddress("a", 1, 2, 3, 4096), _ArenaAddress, None),
    (_Place("gather-0123456789abcdef", "key"), _Place, None),
    (_FileAddress(80, "etag"), _FileAddress, None),
    ([WantedBox("w", Box((0,), (2,)), "F32", "0f")], list[WantedBox], None),
    ([Overflows("w", Box((0,), (2,)), 3)], list[Overflows], None),
    (
        ExportReport("/p", (("a", 1),), 1, 1, {"b": "a"}, 0.5, (1, 0), ("a note",)),
        ExportReport | None,
        None,
    ),
    (
        _Start(
            "0123456789abcdef",
            "hidden",
            "step-000000006",
            2,
            has_layout=False,
            has_copies=True,
            options={"memory": "True", "exclude": "['a']"},
            is_empty=False,
            unmatched=("b",),
            unused=("c.*",),
        ),
        _Start,
        None,
    ),
    (_Written(100, (SavedFile("frozen", 9, 0, "0123"),), {"rank": "etag", "frozen": ""}), _Written, None),
    (_CoverRecord("123", {"names": (1, 2)}, (("01", "02"),), (("23", "45"),), ()), _CoverRecord, None),
    (("/dev/shm/hidden", "no room"), tuple[str, str], None),
    ({"rank-00000-of-00001.safetensors": 80}, dict[str, int], None),
    (
        _OpenedSource("a", "b", "/p", "/p, round 3", {"strict": "True"}, has_layout=True, is_nfs=False),
        _OpenedSource,
        None,
    ),
    (({"w": Compared("F32", (4,), {Box((0,), (4,)): SUMS})}, 16), tuple[dict[str, Compared], int], None),
    ([KnownConfig("config.json", {"layers": 2, "names": ["a"]})], list[KnownConfig], None),
    ((b"\0header", b""), tuple[bytes, ...], None),
    (None, tuple[bytes, int, int] | None, None),
    (list(ROOT_PARTS), list[synchronize._Part], None),
]
IDS = [getattr(kind, "__name__", str(kind)) for _, kind, _ in CASES]
WRONG: list[Any] = [None, True, -1, 1.5, 1 << 70, 10**400, "", "x", [], [1], [[1, 2]], {}, {"a": 1}]


def sent(record: Any, kind: Any) -> Any:
    return json.loads(encoded(record, kind))


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


@pytest.mark.parametrize(("record", "kind", "check"), CASES, ids=IDS)
def test_a_record_round_trips(record: Any, kind: Any, check: Callable[[Any], object] | None) -> None:
    assert decode(encoded(record, kind), kind, "it", 0, check) == record


@pytest.mark.parametrize(("record", "kind", "valid"), CASES, ids=IDS)
def test_a_record_that_was_changed_is_read_or_refused(
    record: Any, kind: Any, valid: Callable[[Any], object] | None
) -> None:
    """Wrong types, counts and values anywhere: a MismatchError, or another valid record."""
    raw, refused = sent(record, kind), 0

    def check(other: Any) -> bool:
        try:
            found = decode(other, kind, "it", 0, valid)
        except sx.errors.MismatchError:
            return True
        data = encoded(found, kind)
        assert encoded(decode(data, kind, "it", 0, valid), kind) == data
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
        decode(data, WritePlan, "the plan", 3)
    assert caught.value.rank == 3


def test_a_plan_with_absent_ranks_or_files_is_refused() -> None:
    first, second = PLAN.tensors
    piece = PIECES[0]
    for wrong, text in (
        (replace(PLAN, tensors=(replace(first, file=2), second)), "file 2"),
        (replace(PLAN, tensors=(replace(first, pieces=(piece._replace(holder=2),)), second)), "rank 2"),
        (replace(PLAN, tensors=(replace(first, pieces=(piece._replace(replicas=((2, 1),)),)),)), "rank 2"),
        (replace(PLAN, tensors=(replace(first, pieces=(Piece(Box((3, 0), (2, 2)), 1, 0),)),)), "outside"),
        (replace(PLAN, tensors=(replace(first, reduce="sum"), second)), "reduction"),
        (replace(PLAN, tensors=(replace(second, pieces=replace(second.pieces, ranks=(0, 2))),)), "not among"),
        (replace(PLAN, tensors=(replace(second, pieces=replace(second.pieces, shape=(3,))),)), "shape"),
    ):
        with pytest.raises(sx.errors.MismatchError, match=text):
            decode(encoded(wrong, WritePlan), WritePlan, "the plan", 0, partial(WritePlan.check, world_size=2))


def test_a_wrong_field_is_named() -> None:
    raw = sent(PLAN, WritePlan)
    raw["tensors"][1]["begin"][1] = "8"
    with pytest.raises(sx.errors.MismatchError, match="tensors: begin: not int"):
        decode(raw, WritePlan, "the plan", 3)


def test_equal_shapes_and_placements_travel_once() -> None:
    placement = Placement((64,), (DimSplit(0),))
    few, many = (
        [ShardingSpec(f"{number:06}", "F32", (4096, 4096), placement) for number in range(size)] for size in (1, 1000)
    )
    each = (len(encoded(many, list[ShardingSpec])) - len(encoded(few, list[ShardingSpec]))) / 999
    assert each < len('"000000","F32",0,0,0,') + 1


def test_a_file_is_written_by_the_host_to_which_the_least_is_sent() -> None:
    one = [Piece(Box((0,), (8,)), 0, 0), Piece(Box((8,), (24,)), 2, 0)]
    tensors = tuple(WriteTensor(file, 0, (32,), "F32", f"w{file}", None, one) for file in range(2))
    plan = WritePlan((WriteFile("a", True), WriteFile("b", True)), tensors, compares=True)
    assert assign_hosts(plan, [0, 0, 1], [True] * 3) == [1, 0]
    assert assign_hosts(plan, [0, 0, 1], [True, True, False]) == [0, 0]
    with pytest.raises(sx.errors.NotFoundError, match="file system") as caught:
        assign_hosts(plan, [0, 0, 1], [True, False, False])
    assert caught.value.rank == 1


def test_options_that_differ_are_named_with_both_values() -> None:
    same = {"dtype": "None", "replicas": "'equal'"}
    check_equal_options([same, dict(same)])
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"^dtype is .* 0 .*'float16' .* 2") as caught:
        check_equal_options([same, same, {**same, "dtype": "'float16'"}])
    assert caught.value.rank == 2
