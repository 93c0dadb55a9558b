"""Sharding specs of tensors on meshes, compared element by element with torch's own chunks and with explicit boxes."""

import gc
import math
import tracemalloc
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statexchange.errors import CorruptError, IncompleteError
from statexchange.messages import decode, encoded
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.pieces import (
    Pieces,
    SpecPieces,
    boxes_of,
    holders_of,
    nbytes_by_holder,
    pieces_of_rank,
    pieces_written_by,
)
from statexchange.sharding.plan import Plan, RankShards, TensorPlan, plan_merge
from statexchange.sharding.sharding_spec import (
    DimSplit,
    Placement,
    ShardingSpec,
    coordinate_of,
    covers_exactly,
    local_boxes,
    parts_within,
)
from statexchange.sharding.shards import Box, Piece, Shard, full_box, intersect


@st.composite
def placements(draw: st.DrawFn, smallest: int = 0) -> tuple[tuple[int, ...], Placement]:
    shape = tuple(draw(st.lists(st.integers(smallest, 9), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    cut = st.one_of(st.none(), st.builds(DimSplit, dims, st.sampled_from([1, 1, 2, 3])))
    return shape, Placement(mesh, tuple(draw(cut) for _ in mesh))


def torch_elements(shape: tuple[int, ...], placement: Placement, at: tuple[int, ...]) -> Any:
    """Return the numbers of the elements that a rank holds by torch's own chunking of a whole tensor."""
    local = torch.arange(math.prod(shape)).reshape(shape)
    for parts, index, cut in zip(placement.mesh_shape, at, placement.splits, strict=True):
        if cut is not None:
            pieces = local.chunk(cut.split_factor, cut.dim) if local.shape[cut.dim] else [local]
            chosen = [piece.chunk(parts, cut.dim)[index : index + 1] for piece in pieces]
            empty = local.narrow(cut.dim, 0, 0)
            local = torch.cat([empty, *(chunk for found in chosen for chunk in found)], cut.dim)
    return local


def planned(shape: tuple[int, ...], placement: Placement, **options: Any) -> TensorPlan:
    ranks = range(math.prod(placement.mesh_shape))
    rank_shards = [
        RankShards(rank, [ShardingSpec("w", "F32", shape, placement)] if rank == 0 else ()) for rank in ranks
    ]
    return plan_merge(rank_shards, ExportOptions(**options)).files[0].tensors[0]


def elements_of(box: Box, shape: tuple[int, ...]) -> Any:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


@settings(max_examples=100)
@given(placements())
def test_every_element_comes_once_and_from_ranks_that_have_it(case: tuple[tuple[int, ...], Placement]) -> None:
    shape, placement = case
    tensor = planned(shape, placement)
    ranks = list(product(*map(range, placement.mesh_shape)))
    elements = [torch_elements(shape, placement, at) for at in ranks]
    counts = np.zeros(shape, dtype=int)
    boxes_by_rank: list[list[tuple[int, Box]]] = [[] for _ in ranks]
    for piece in tensor.pieces:
        counts[tuple(slice(o, e) for o, e in zip(piece.box.offsets, piece.box.ends, strict=True))] += 1
        for rank, index in [(piece.holder, piece.box_index), *piece.replicas]:
            boxes_by_rank[rank].append((index, piece.box))
    assert (counts == 1).all()
    for rank, boxes in enumerate(boxes_by_rank):
        boxes.sort(key=lambda item: item[0])
        assert [index for index, _ in boxes] == list(range(len(boxes)))
        numbers = sorted(n for _, box in boxes for n in elements_of(box, shape).reshape(-1).tolist())
        assert numbers == sorted(elements[rank].reshape(-1).tolist())
    offsets = [piece.box.offsets for piece in tensor.pieces]
    assert offsets == sorted(offsets)
    # The pieces are a lazy sequence.
    assert list(tensor.pieces) == [tensor.pieces[index] for index in range(len(tensor.pieces))]
    assert list(tensor.pieces[1:]) == list(tensor.pieces)[1:]


@given(placements(smallest=1))
def test_a_sharding_spec_gives_the_plan_of_its_boxes(case: tuple[tuple[int, ...], Placement]) -> None:
    shape, placement = case
    rank_shards = []
    for rank, at in enumerate(product(*map(range, placement.mesh_shape))):
        boxes = tuple(box for box, _ in local_boxes(shape, placement.mesh_shape, at, placement.splits))
        rank_shards.append(RankShards(rank, [Shard("w", "F32", shape, boxes)]))
    explicit = plan_merge(rank_shards, ExportOptions(replicas="root")).files[0].tensors[0].pieces
    pieces = planned(shape, placement, replicas="root").pieces
    assert list(pieces) == list(explicit)
    assert list(boxes_of(pieces)) == list(boxes_of(explicit))
    assert_same_answers(pieces, explicit, len(rank_shards))


def assert_same_answers(pieces: Pieces, explicit: Pieces, world_size: int) -> None:
    for rank in range(world_size):
        assert list(pieces_of_rank(pieces, rank)) == list(pieces_of_rank(explicit, rank))
    for with_copies in (False, True):
        ranks, counts = holders_of(pieces, with_copies=with_copies)
        listed, of_each = holders_of(explicit, with_copies=with_copies)
        assert list(ranks) == list(listed)
        assert list(counts) == list(of_each)
    written = [nbytes_by_holder([(them, 4)], world_size).tolist() for them in (pieces, explicit)]
    assert written[0] == written[1]
    some = np.arange(world_size) % 2 == 1
    assert list(pieces_written_by(pieces, some)) == list(pieces_written_by(explicit, some))


@settings(deadline=None)
@given(placements(smallest=1), st.data())
def test_the_ranks_of_a_mesh_may_be_any(case: tuple[tuple[int, ...], Placement], data: st.DataObject) -> None:
    shape, placement = case
    ranks = tuple(data.draw(st.permutations(range(placement.num_ranks + 2)))[: placement.num_ranks])
    turn = data.draw(st.integers(0, 9))
    pieces = SpecPieces(shape, placement, turn, ranks)
    explicit = []
    for piece in SpecPieces(shape, placement, turn):
        copies = tuple((ranks[holder], index) for holder, index in piece.replicas)
        explicit.append(Piece(piece.box, ranks[piece.holder], piece.box_index, copies))
    assert list(pieces) == explicit
    assert_same_answers(pieces, tuple(explicit), placement.num_ranks + 2)
    spec = ShardingSpec("w", "F32", shape, placement, ranks)
    boxes = {rank: set(spec.shard_of(rank).boxes) for rank in ranks}
    assert all(boxes[rank] == {piece.box for piece in pieces.of_rank(rank)} for rank in ranks)
    begins = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True))
    region = Box(begins, sizes)
    inside = [(number, box) for number, box in enumerate(pieces.boxes) if intersect(box, region) == box]
    assert list(pieces.within(region)) == inside


@settings(max_examples=200, deadline=None)
@given(placements(), st.data())
def test_parts_within_a_box_are_those_that_overlap_it(
    case: tuple[tuple[int, ...], Placement], data: st.DataObject
) -> None:
    shape, placement = case
    if not covers_exactly(shape, placement):
        return
    begins = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True))
    box = Box(begins, sizes)
    axes = [axis for axis, split in enumerate(placement.splits) if split is not None]
    expected = set()
    for coordinate in product(*map(range, placement.mesh_shape)):
        for part, _ in local_boxes(shape, placement.mesh_shape, coordinate, placement.splits):
            if intersect(part, box) is not None:
                expected.add((part, tuple(coordinate[axis] for axis in axes)))
    found = parts_within(shape, placement, box)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_replicas_supply_tensors_in_turn() -> None:
    mesh = Placement((4, 2), (None, DimSplit(0)))
    specs = [ShardingSpec(f"w{i}", "F32", (8, 2), mesh) for i in range(8)]
    plan = plan_merge([RankShards(0, specs), *(RankShards(rank, ()) for rank in range(1, 8))])
    suppliers = [piece.holder for tensor in plan.files[0].tensors for piece in tensor.pieces]
    assert sorted(suppliers) == sorted([*range(8)] * 2)


def test_a_tied_name_of_a_large_mesh_is_not_looked_up_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    shard_of = ShardingSpec.shard_of

    def counted(spec: ShardingSpec, rank: int) -> Shard:
        looked_at.append(rank)
        return shard_of(spec, rank)

    monkeypatch.setattr(ShardingSpec, "shard_of", counted)
    mesh, ranks, tied = Placement((64,), (DimSplit(0),)), tuple(range(64)), {"head": "embedding"}
    specs = [ShardingSpec(name, "F32", (64, 2), mesh, ranks) for name in ("embedding", "head")]
    plan = plan_merge([RankShards(0, specs, tied), *(RankShards(rank, (), tied) for rank in ranks[1:])])
    assert names_of(plan) == ["embedding"]
    assert len(looked_at) < 10


def names_of(plan: Plan) -> list[str]:
    return [tensor.name for file in plan.files for tensor in file.tensors]


def test_sharding_specs_are_selected_renamed_and_tied_as_shards_are() -> None:
    mesh = Placement((2,), (DimSplit(0),))
    a, b = ShardingSpec("a", "F32", (4,), mesh), ShardingSpec("b", "F32", (4,), mesh)
    plain = Shard("c", "I64", (3,), (full_box((3,)),))

    def tied(*shards: Shard | ShardingSpec) -> list[RankShards]:
        return [RankShards(0, shards, {"b": "a"}), RankShards(1, [plain], {"b": "a"})]

    plan = plan_merge(tied(a, plain, b), ExportOptions(rename=[("a", "x")]))
    assert (names_of(plan), plan.aliases) == (["c", "x"], {"b": "x"})
    # A rank outside of their mesh has no part in it, nor has one that ties what other ranks do not.
    assert names_of(plan_merge([*tied(a, plain, b), RankShards(2, ())])) == ["c", "a"]
    assert names_of(plan_merge([RankShards(0, [a, plain, b], {"b": "a"}), RankShards(1, [plain])])) == ["c", "a", "b"]
    other = ShardingSpec("b", "F32", (4,), Placement((2,), (None,)))
    assert names_of(plan_merge(tied(a, other, plain))) == ["c", "a", "b"]
    assert names_of(plan_merge(tied(a, plain, b), ExportOptions(exclude=("c", "a")))) == ["b"]
    files = plan_merge(tied(a, plain, other), ExportOptions(max_shard_size=1)).files
    assert [[tensor.name for tensor in file.tensors] for file in files] == [["a"], ["c"], ["b"]]
    for twice in ((a, ShardingSpec("a", "F32", (4,), other.placement)), (ShardingSpec("c", "I64", (3,), mesh),)):
        with pytest.raises(CorruptError, match="conflicting sharding specs"):
            plan_merge(tied(*twice))


def test_a_tie_is_found_where_one_name_alone_lies_on_a_mesh_of_all_its_ranks() -> None:
    mesh = Placement((2,), (DimSplit(0),))
    head = ShardingSpec("head", "F32", (4,), mesh)
    embed = [Shard("embed", "F32", (4,), (Box((2 * (rank % 2),), (2,)),)) for rank in range(4)]
    ranks = [RankShards(rank, [embed[rank], *([head] if rank == 0 else [])], {"head": "embed"}) for rank in range(4)]
    plan = plan_merge(ranks)
    assert (names_of(plan), plan.aliases) == (["embed"], {"head": "embed"})


def test_a_rank_with_an_empty_part_does_not_count_for_ties() -> None:
    mesh = Placement((2,), (DimSplit(0),))
    for rows, expected in ((1, ["a"]), (2, ["a", "b"])):
        both = [ShardingSpec(name, "F32", (rows, 3), mesh) for name in "ab"]
        assert names_of(plan_merge([RankShards(0, both, {"b": "a"}), RankShards(1, ())])) == expected


@settings(max_examples=50)
@given(placements(), st.data())
def test_a_placement_round_trips_through_a_message(
    case: tuple[tuple[int, ...], Placement], data: st.DataObject
) -> None:
    shape, placement = case
    rank = data.draw(st.integers(0, math.prod(placement.mesh_shape) - 1))
    assert decode(encoded(placement, Placement), Placement, "the placement", 0) == placement
    at = list(product(*map(range, placement.mesh_shape)))[rank]
    assert coordinate_of(rank, placement.mesh_shape) == at
    elements = torch_elements(shape, placement, at)
    assert ShardingSpec("w", "U8", shape, placement).shard_of(rank).nbytes == elements.numel()


def test_runs_that_leave_a_gap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of cover does not rely on the arithmetic of placements."""
    from statexchange.sharding import sharding_spec

    mesh = Placement((3,), (DimSplit(0, 2),))
    assert covers_exactly((7, 2), mesh)
    sharding_spec._runs.cache_clear()
    wrong = [[], [(Box((0,), (3,)), (0,))], [(Box((4,), (3,)), (0,))]]
    monkeypatch.setattr(
        sharding_spec, "local_boxes", lambda shape, mesh, at, cuts: wrong[at[0]] if cuts else [(full_box(shape), (0,))]
    )
    assert not covers_exactly((7, 2), mesh)
    with pytest.raises(IncompleteError, match="does not cover"):
        planned((7, 2), mesh)
    sharding_spec._runs.cache_clear()


@pytest.mark.slow
def test_a_plan_does_not_grow_with_ranks_times_tensors() -> None:
    sizes = []
    for ranks in (64, 1024):
        specs = [
            ShardingSpec(f"layers.{i}.w", "BF16", (4096, 64), Placement((ranks,), (DimSplit(0),))) for i in range(2000)
        ]
        rank_shards = [RankShards(rank, specs if rank == 0 else ()) for rank in range(ranks)]
        tracemalloc.start()
        plan = plan_merge(rank_shards)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert sum(len(tensor.pieces) for file in plan.files for tensor in file.tensors) == 2000 * ranks
    per_rank = (sizes[1] - sizes[0]) / (1024 - 64)
    assert per_rank < 2000  # less than a byte for each tensor
