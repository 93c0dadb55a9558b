"""The merge plan, compared with a reference that counts how often each element of an array is covered."""

import dataclasses
import inspect
import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory, split_torch_state_dict_into_shards
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from stored import json_header

import statexchange
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
    cover_sum,
    covers_evenly,
    plan_merge,
    plan_writers,
    prove_cover,
)
from statexchange.sharding.shards import Box, LongTuple, Shard, full_box
from statexchange.tensors import ITEMSIZE


def counted(shape: tuple[int, ...], boxes: Any) -> Any:
    """Return how often each element is covered, counted one by one."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        for index in np.ndindex(*box.shape):
            counts[tuple(o + i for o, i in zip(box.offsets, index, strict=True))] += 1
    return counts


def verdict(shape: tuple[int, ...], boxes: Any) -> str:
    """Return what an exact proof must find for distinct boxes."""
    counts = counted(shape, boxes)
    bad = counts[counts != 1]
    return "cover" if not bad.size else "overlap" if bad[0] > 1 else "missing"


def region_in(text: str) -> tuple[slice, ...]:
    found = re.search(r"region \[([0-9:, ]*)\]", text)
    assert found is not None, text
    return tuple(slice(*map(int, part.split(":"))) for part in found[1].split(", ") if part)


@st.composite
def meshes(draw: st.DrawFn, fewest_dims: int = 0) -> tuple[tuple[int, ...], list[list[Box]]]:
    """Draw a global shape and each holder's boxes, by cutting dims into (uneven, empty, interleaved) parts."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=fewest_dims, max_size=3)))
    cuts = [draw(st.lists(st.integers(0, size), max_size=3).map(sorted)) for size in shape]
    ranges = [list(zip([0, *c], [*c, size], strict=True)) for c, size in zip(cuts, shape, strict=True)]
    boxes = [
        Box(
            tuple(r[i][0] for r, i in zip(ranges, place, strict=True)),
            tuple(r[i][1] - r[i][0] for r, i in zip(ranges, place, strict=True)),
        )
        for place in np.ndindex(*(len(r) for r in ranges))
    ]
    holders = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, holders - 1), min_size=len(boxes), max_size=len(boxes)))
    boxes_by_holder: list[list[Box]] = [[] for _ in range(holders)]
    for box, owner in zip(draw(st.permutations(boxes)), owners, strict=True):
        boxes_by_holder[owner].append(box)
    for box in draw(st.lists(st.sampled_from(boxes), max_size=3)):  # replicas
        boxes_by_holder[draw(st.integers(0, holders - 1))].append(box)
    return shape, boxes_by_holder


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


@st.composite
def corruptions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    shape, boxes_by_holder = draw(meshes())
    places = [(h, i) for h, boxes in enumerate(boxes_by_holder) for i, box in enumerate(boxes) if box.numel]
    for _ in range(draw(st.integers(1, 3))):
        h, i = draw(st.sampled_from(places))
        box = boxes_by_holder[h][i]
        kind = draw(st.sampled_from(["drop", "move", "add"]))
        if kind == "drop":
            boxes_by_holder[h][i] = Box(box.offsets, (0,) * len(shape)) if shape else box
            continue
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True))
        if kind == "move":
            boxes_by_holder[h][i] = Box(offsets, sizes)
        else:
            boxes_by_holder[draw(st.integers(0, len(boxes_by_holder) - 1))].append(Box(offsets, sizes))
    return shape, boxes_by_holder


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


def whole(name: str, *shape: int, dtype: str = "F32") -> Shard:
    return Shard(name, dtype, shape, (full_box(shape),))


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


PATTERNS = ["model.safetensors", "a/{suffix}.safetensors", "{suffix}.safetensors", ".m{suffix}.safetensors"]
PATTERNS += ["m{suffix}.bin", "m{suffix}{x}.safetensors", "m{suffix}.safetensors\n", "..{suffix}.safetensors"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_file_names_that_readers_would_not_find_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match="filename_pattern"):
        ExportOptions(filename_pattern=pattern)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 << 20),
        (" 1.5 kb ", 1500),
        ("7", 7),
        (7, 7),
        ("0.1TB", 10**11),
        ("2g", 2 * 10**9),
        ("9B", 9),
    ],
)
def test_a_size_is_a_number_of_bytes_or_a_text_with_a_unit(text: int | str, nbytes: int) -> None:
    assert ExportOptions(max_shard_size=text).max_shard_bytes == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 i", "5XB", "1e9", "5GBs", "nan", "GBx", "٣GB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not a size"):
        ExportOptions(max_shard_size=text)


@pytest.mark.parametrize("size", [0, -5])
def test_a_size_must_be_positive(size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="must be positive"):
        ExportOptions(max_shard_size=size)


WRONG: list[dict[str, Any]] = [
    {"include": 5},
    {"exclude": ["a", 5]},
    {"rename": "ab"},
    {"rename": [("(", "")]},
    {"replicas": ["equal"]},
    {"dtype": 17},
    {"dtype": "int8"},
    {"max_shard_size": 1.5},
    {"max_shard_size": True},
    {"max_shard_size": None},
    {"filename_pattern": 5},
    {"layout": 5},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_option_is_named_with_what_is_accepted(wrong: dict[str, Any]) -> None:
    (option,) = wrong
    with pytest.raises(InvalidArgumentError, match=rf"^{option}\b.*(must|size|unterminated)"):
        ExportOptions(**wrong)


def test_export_and_merge_have_the_same_options_and_defaults() -> None:
    known = {field.name: field.default for field in dataclasses.fields(ExportOptions)}
    for call in (statexchange.export_checkpoint, statexchange.merge_checkpoint):
        spelled = inspect.signature(call).parameters
        assert {name: spelled[name].default for name in known} == known


@dataclass
class Case:
    sizes: dict[str, tuple[str, int]]
    limit: int


cases = st.builds(
    Case,
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=6),
        st.tuples(st.sampled_from(["float32", "int8", "bfloat16", "bool"]), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
)
SHORT = {"float32": "F32", "int8": "I8", "bfloat16": "BF16", "bool": "BOOL"}


@settings(max_examples=40)
@given(cases)
def test_files_are_split_and_named_as_the_hub_does(case: Case) -> None:
    # huggingface_hub identifies tensors by their storage, and empty tensors have no storage to distinguish them by.
    state = {name: torch.zeros(n + 1, dtype=getattr(torch, dtype)) for name, (dtype, n) in case.sizes.items()}
    hub = split_torch_state_dict_into_shards(state, max_shard_size=case.limit)
    holding = RankShards(0, [whole(name, n + 1, dtype=SHORT[dtype]) for name, (dtype, n) in case.sizes.items()])
    ours = plan_merge([holding], ExportOptions(max_shard_size=case.limit))
    assert {f.name: {t.name for t in f.tensors} for f in ours.files} == {
        k: set(v) for k, v in hub.filename_to_tensors.items()
    }
    assert ours.nbytes == hub.metadata["total_size"]
    assert ours.num_tensors == len(state)


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 300), min_size=1, max_size=20),
    st.integers(1, 200),
)
def test_files_are_split_as_the_hubs_factory_does_with_empty_and_oversized_tensors(
    sizes: dict[str, int], limit: int
) -> None:
    pattern = "model{suffix}.safetensors"
    hub = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=pattern, max_shard_size=limit
    )
    holding = RankShards(0, [whole(name, n, dtype="U8") for name, n in sizes.items()])
    ours = plan_merge([holding], ExportOptions(max_shard_size=limit))
    assert {f.name: {t.name for t in f.tensors} for f in ours.files} == {
        k: set(v) for k, v in hub.filename_to_tensors.items()
    }


@given(cases)
def test_tensors_lie_in_a_file_where_safetensors_puts_them(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    path = tmp_path_factory.mktemp("st") / "x"
    save_file({k: torch.zeros(n, dtype=getattr(torch, d)) for k, (d, n) in case.sizes.items()}, path)
    holding = RankShards(0, [whole(name, n, dtype=SHORT[dtype]) for name, (dtype, n) in case.sizes.items()])
    (ours,) = plan_merge([holding], ExportOptions(max_shard_size=1 << 40)).files
    header = json_header(path)
    assert {t.name: [t.begin, t.begin + t.nbytes] for t in ours.tensors} == {
        k: v["data_offsets"] for k, v in header.items()
    }
    assert [t.name for t in ours.tensors] == list(header)
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == {t.name for t in ours.tensors}


@given(meshes(fewest_dims=1))
def test_the_plan_digest_changes_with_the_output(mesh: tuple[tuple[int, ...], list[list[Box]]]) -> None:
    shape, boxes_by_holder = mesh

    def digest(rows: int, **options: Any) -> str:
        held_by = [RankShards(r, [Shard("w", "F32", shape, tuple(boxes))]) for r, boxes in enumerate(boxes_by_holder)]
        return plan_merge([*held_by, RankShards(9, [whole("v", rows)])], ExportOptions(**options)).digest

    assert re.fullmatch("[0-9a-f]{32}", digest(3))
    assert digest(3) == digest(3)
    assert len({digest(3), digest(4), digest(3, rename=(("v", "u"),)), digest(3, max_shard_size=1)}) == 4


def test_a_digest_is_the_same_in_every_process_and_version() -> None:
    assert plan_merge([RankShards(0, [whole("w", 2, 3)])]).digest == "3692e210ceb558688f652b97e2f19a4f"


def supplied(plan: Plan, holders: int) -> list[int]:
    loads = [0] * holders
    for file in plan.files:
        for tensor in file.tensors:
            for piece in tensor.pieces:
                loads[piece.holder] += piece.box.numel * ITEMSIZE[tensor.dtype]
    return loads


@given(st.lists(corruptions() | meshes(), min_size=1, max_size=3))
@example([((4, 4), [[Box((0, 0), (2, 4))], [Box((1, 0), (3, 4))]])])
@example([((4,), [[Box((0,), (1,))], [Box((3,), (1,))]])])
@example([((2, 2), [[Box((0, 0), (1, 1)), Box((1, 1), (1, 1))], [Box((0, 1), (1, 1)), Box((0, 1), (1, 1))]])])
def test_the_sums_of_holders_tell_whether_each_element_is_written_equally_often(
    cases: list[tuple[tuple[int, ...], list[list[Box]]]],
) -> None:
    sums = []
    are_covered = True
    for number, (shape, boxes_by_holder) in enumerate(cases):
        for boxes in boxes_by_holder:
            sums.append(cover_sum([Shard(f"w{number}", "F32", shape, tuple(boxes))]))
        counts = counted(shape, [box for boxes in boxes_by_holder for box in boxes])
        are_covered &= len(set(counts.reshape(-1).tolist())) == 1
    assert covers_evenly(sums) == are_covered


def test_boxes_of_tensors_with_other_names_dtypes_or_shapes_cover_nothing_together() -> None:
    halves = Box((0,), (2,)), Box((2,), (2,))
    first = Shard("w", "F32", (4,), halves[:1])
    second = Shard("w", "F32", (4,), halves[1:])
    assert covers_evenly([cover_sum([first]), cover_sum([second])])
    for other in (replace(second, name="v"), replace(second, dtype="I32"), replace(second, global_shape=(5,))):
        assert not covers_evenly([cover_sum([first]), cover_sum([other])])


@given(st.lists(st.integers(0, 99), min_size=9, max_size=30), st.integers(1, 5))
def test_writers_have_about_equal_shares_and_tied_names_one_writer(sizes: list[int], num_ranks: int) -> None:
    shards = [Shard(f"w{number}", "U8", (size,), (full_box((size,)),)) for number, size in enumerate(sizes)]
    ranks = tuple(range(num_ranks))
    writers = plan_writers(LongTuple(shards), ranks, LongTuple(), frozenset())
    loads = [0] * num_ranks
    for shard in shards:
        if shard.nbytes > 16:
            loads[writers[shard.name]] += shard.nbytes
        else:  # scalars and their like, which would make each file a part of every load
            assert writers[shard.name] == 0
    assert max(loads) - min(loads) <= max(sizes)
    frozen = frozenset({"w7", "w8"})
    writers = plan_writers(LongTuple(shards), ranks, LongTuple([("w1", "w0"), ("w2", "w0")]), frozen)
    assert writers["w0"] == writers["w1"] == writers["w2"]
    alone = plan_writers(LongTuple(shards[7:9]), ranks, LongTuple(), frozen)
    assert alone == {name: writers[name] for name in frozen}


def test_replicas_are_supplied_in_turn_or_by_root_only() -> None:
    shards = [whole(f"w{i}", 100 + i) for i in range(40)]
    rank_shards = [RankShards(r, shards) for r in range(4)]
    loads = supplied(plan_merge(rank_shards), 4)
    assert max(loads) - min(loads) <= 4 * 140
    assert supplied(plan_merge(rank_shards, ExportOptions(replicas="root")), 4)[1:] == [0, 0, 0]
    with pytest.raises(InvalidArgumentError, match="replicas must be"):
        ExportOptions(replicas="any")  # type: ignore[arg-type]


def test_no_tensors_make_one_empty_file() -> None:
    (file,) = plan_merge([RankShards(0, [])]).files
    assert (file.name, file.tensors) == ("model.safetensors", ())
