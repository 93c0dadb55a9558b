"""The merge plan, compared with a reference that counts how often each element of an array is covered."""

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from plans import corruptions, counted, meshes, whole

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    OverlapError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import (
    Plan,
    RankShards,
    TensorPlan,
    plan_merge,
    prove_cover,
)
from statexchange.sharding.shards import Box, Shard, full_box


def verdict(shape: tuple[int, ...], boxes: Any) -> str:
    """Return what an exact proof must find for distinct boxes."""
    counts = counted(shape, boxes)
    bad = counts[counts != 1]
    return "cover" if not bad.size else "overlap" if bad[0] > 1 else "missing"


def region_in(text: str) -> tuple[slice, ...]:
    found = re.search(r"region \[([0-9:, ]*)\]", text)
    assert found is not None, text
    return tuple(slice(*map(int, part.split(":"))) for part in found[1].split(", ") if part)


def plan_one(
    shape: tuple[int, ...], boxes_by_holder: list[list[Box]], dtype: str = "F32", **options: Any
) -> TensorPlan:
    rank_shards = [
        RankShards(10 + r, [Shard("w", dtype, shape, tuple(boxes))]) for r, boxes in enumerate(boxes_by_holder)
    ]
    return plan_merge(rank_shards, ExportOptions(**options)).files[0].tensors[0]


@given(meshes())
def test_every_piece_of_a_plan_is_a_box_of_its_holder_and_of_all_replicas(
    mesh: tuple[tuple[int, ...], list[list[Box]]],
) -> None:
    shape, boxes_by_holder = mesh
    tensor = plan_one(shape, boxes_by_holder)
    assert (counted(shape, [piece.box for piece in tensor.pieces]) == 1).all()
    for piece in tensor.pieces:
        for holder, index in [(piece.holder, piece.box_index), *piece.replicas]:
            assert boxes_by_holder[holder][index] == piece.box
        everywhere = {
            (h, i) for h, boxes in enumerate(boxes_by_holder) for i, box in enumerate(boxes) if box == piece.box
        }
        assert everywhere == {(piece.holder, piece.box_index), *piece.replicas}
    starts = [piece.box.offsets for piece in tensor.pieces]
    assert starts == sorted(starts)


@given(corruptions())
@example(((4, 4), [[Box((0, 0), (2, 4))], [Box((1, 0), (3, 4))]]))
def test_corrupted_boxes_get_the_verdict_of_the_reference(case: tuple[tuple[int, ...], list[list[Box]]]) -> None:
    shape, boxes_by_holder = case
    distinct = {box for boxes in boxes_by_holder for box in boxes if box.numel}
    expected = verdict(shape, distinct)
    counts = counted(shape, distinct)
    if expected == "cover":
        plan_one(shape, boxes_by_holder)
        return
    with pytest.raises((IncompleteError, OverlapError)) as caught:
        plan_one(shape, boxes_by_holder)
    region = counts[region_in(str(caught.value))]
    assert caught.value.name == "w"
    assert region.size
    if expected == "missing":
        assert type(caught.value) is IncompleteError
        assert (region == 0).all()
    else:
        assert type(caught.value) is OverlapError
        assert (region > 1).all()
        claims = [int(rank) for rank in re.findall(r"rank (\d+)", str(caught.value))]
        claimed = [region_in("region " + text) for text in re.findall(r"as (\[.*?\])", str(caught.value))]
        for rank, where in zip(claims, claimed, strict=False):
            assert where in [
                tuple(slice(o, e) for o, e in zip(b.offsets, b.ends, strict=True)) for b in boxes_by_holder[rank - 10]
            ]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 5)])
def test_an_empty_tensor_needs_no_holder(shape: tuple[int, ...]) -> None:
    assert plan_one(shape, [[], [full_box(shape)]]).pieces == ()


def test_a_scalar_is_one_element() -> None:
    assert len(plan_one((), [[full_box(())], [full_box(())]]).pieces) == 1
    with pytest.raises(IncompleteError, match=r"region \[\] of shape \(\)"):
        plan_one((), [[], []])


def test_a_region_that_nobody_holds_is_named_with_the_ranks_of_the_rest() -> None:
    rows = [[Box((2 * r, 0), (2, 6))] for r in range(4)]
    rows[2] = []
    with pytest.raises(IncompleteError, match=re.escape("region [4:6, 0:6]")) as caught:
        plan_one((8, 6), rows)
    assert "[10, 11, 13]" in str(caught.value)


def test_a_cover_of_very_unequal_boxes_is_proved_fast() -> None:
    n = 20_000
    long = {Box((0, i), (n, 1)): [0] for i in range(n // 2)} | {Box((i, n // 2), (1, n // 2)): [1] for i in range(n)}
    prove_cover("w", (n, n), long)  # cut by cut this would take 10**8 steps
    del long[Box((n - 1, n // 2), (1, n // 2))]
    with pytest.raises(IncompleteError, match=re.escape(f"[{n - 1}:{n}, {n // 2}:{n}]")):
        prove_cover("w", (n, n), long)


def test_a_gap_is_found_in_a_shape_too_large_to_number_its_corners() -> None:
    n = 40_000
    shape = (n,) * 4
    diagonal = {Box((i,) * 4, (1,) * 4): [0] for i in range(n)}
    with pytest.raises(IncompleteError, match=re.escape("[0:1, 0:40000, 0:40000, 1:40000]")):
        prove_cover("w", shape, diagonal)


@pytest.mark.slow
def test_many_boxes_along_many_dims_are_divided_before_their_corners_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, ones = (2,) * 12, (1,) * 12
    boxes = {Box(at, ones): [0] for at in product(range(2), repeat=12)}  # at once these have 2**24 corners
    prove_cover("w", shape, boxes)
    missing, region = (0, 1, *(1,) * 10), "[0:1, 1:2, 1:2, 1:2, 1:2, 1:2, 1:2, 1:2, 1:2, 1:2, 1:2, 1:2]"
    del boxes[Box(missing, ones)]
    with pytest.raises(IncompleteError, match=re.escape(f"region {region}")):
        prove_cover("w", shape, boxes)
    boxes[Box(missing, ones)] = [0]
    boxes[Box((1, 1, *(1,) * 10), ones)] = [1]
    boxes[Box((1, 0, *(1,) * 10), (1, 2, *(1,) * 10))] = [2]
    with pytest.raises(OverlapError, match=r"rank 0\b.*rank 2\b"):
        prove_cover("w", shape, boxes)
    monkeypatch.setattr("statexchange.sharding.plan._MAX_CORNERS", 8)
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    with pytest.raises(UnsupportedError, match="5 boxes"):
        prove_cover("w", (3, 3), {Box(*box): [0] for box in pinwheel})


def test_cuts_along_too_many_dims_are_refused() -> None:
    shape = (2,) * 40
    with pytest.raises(UnsupportedError, match="40 dims"):
        prove_cover("w", shape, {Box((0,) * 40, (1,) * 40): [0]})


@pytest.mark.parametrize(("change", "what"), [(("F32", (4,)), "global_shape"), (("F16", (8,)), "dtype")])
def test_holders_that_disagree_are_named(change: tuple[str, tuple[int, ...]], what: str) -> None:
    rank_shards = [
        RankShards(3, [Shard("w", "F32", (8,), (Box((0,), (4,)),))]),
        RankShards(7, [Shard("w", *change, (Box((0,), (4,)),))]),
    ]
    with pytest.raises(CorruptError, match=rf"disagree.*{what}") as caught:
        plan_merge(rank_shards)
    assert (caught.value.name, caught.value.rank) == ("w", 7)


def names_of(plan: Plan) -> list[str]:
    return [tensor.name for file in plan.files for tensor in file.tensors]


def test_tied_names_are_dropped_only_where_every_holder_ties_them() -> None:
    def plan(*aliases: dict[str, str], **options: Any) -> Plan:
        return plan_merge(
            [RankShards(r, [whole("a", 2), whole("b", 2)], a) for r, a in enumerate(aliases)], ExportOptions(**options)
        )

    assert (names_of(plan({"b": "a"}, {"b": "a"})), plan({"b": "a"}).aliases) == (["a"], {"b": "a"})
    assert names_of(plan({"b": "a"}, {})) == ["a", "b"]
    assert names_of(plan({"b": "a"}, {"a": "b"})) == ["a", "b"]
    assert names_of(plan({"b": "a"}, exclude=("a",))) == ["b"]
    renamed = plan({"b": "a"}, rename=(("^", "model."),))
    assert (names_of(renamed), renamed.aliases) == (["model.a"], {"model.b": "model.a"})


def test_claimed_ties_that_would_lose_a_tensor_are_ignored() -> None:
    shards = [whole("a", 2), whole("b", 2), whole("c", 3)]
    for aliases in ({"a": "b", "b": "a"}, {"c": "a"}, {"a": "a"}, {"a": "gone"}, {"gone": "a"}):
        assert names_of(plan_merge([RankShards(0, shards, aliases)])) == ["a", "b", "c"], aliases
    chain = plan_merge([RankShards(0, [whole(n, 2) for n in "abc"], {"a": "b", "b": "c"})])
    assert all(kept in names_of(chain) for kept in chain.aliases.values())
    assert {*names_of(chain), *chain.aliases} == {"a", "b", "c"}


def test_an_empty_part_does_not_count_for_ties() -> None:
    parts = [Shard(n, "F32", (2,), (Box((0,), (2,)),)) for n in "ab"]
    empty = [Shard(n, "F32", (2,), (Box((2,), (0,)),)) for n in "ab"]
    assert names_of(plan_merge([RankShards(0, parts, {"b": "a"}), RankShards(1, empty)])) == ["a"]


@pytest.mark.parametrize("rename", [("[ab]_tied", "z"), ("a_tied", "b"), ("^b$", "a_tied"), ("a_tied", "b_tied")])
def test_rename_gives_a_tied_name_to_no_other_tensor(rename: tuple[str, str]) -> None:
    """An output has one tensor of a name: the other one, or its tie, would be lost."""
    shards = [whole(name, 2) for name in ("a", "a_tied", "b", "b_tied")]
    with pytest.raises(UnsafeError, match="one name"):
        plan_merge([RankShards(0, shards, {"a_tied": "a", "b_tied": "b"})], ExportOptions(rename=(rename,)))


def test_tied_tensors_may_get_one_name() -> None:
    shards = [whole(name, 2) for name in ("a", "b", "c")]
    plan = plan_merge([RankShards(0, shards, {"b": "a", "c": "a"})], ExportOptions(rename=(("[bc]", "d"),)))
    assert (names_of(plan), plan.aliases) == (["a"], {"d": "a"})
    plan = plan_merge([RankShards(0, shards, {"b": "a", "c": "a"})], ExportOptions(rename=((".", "d"),)))
    assert (names_of(plan), plan.aliases) == (["d"], {})


def test_tensors_are_selected_and_renamed_and_bad_patterns_are_refused() -> None:
    rank_shards = [RankShards(0, [whole("model.a", 1), whole("model.b", 1), whole("head", 1)])]
    assert names_of(plan_merge(rank_shards, ExportOptions(include=("model.*",), exclude=("*.b",)))) == ["model.a"]
    renamed = plan_merge(rank_shards, ExportOptions(rename=str.upper, include=("h*",))).files[0].tensors[0]
    assert (renamed.name, renamed.source) == ("HEAD", "head")
    with pytest.raises(InvalidArgumentError, match=r"pattern 'x\*'"):
        plan_merge(rank_shards, ExportOptions(include=("x*",)))
    with pytest.raises(UnsafeError, match="one name") as caught:
        plan_merge(rank_shards, ExportOptions(rename=((r"model\..", "same"),)))
    assert all(repr(name) in str(caught.value) for name in ("model.a", "model.b"))
    assert caught.value.name == "same"
    with pytest.raises(InvalidArgumentError, match="rename pattern"):
        plan_merge(rank_shards, ExportOptions(rename=(("(", ""),)))
    with pytest.raises(InvalidArgumentError, match="rename must return"):
        plan_merge(rank_shards, ExportOptions(rename=lambda name: None))  # type: ignore[arg-type,return-value]
