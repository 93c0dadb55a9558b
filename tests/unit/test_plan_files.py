"""Files of a merge: their names, sizes, options, and who writes what."""

import dataclasses
import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory, split_torch_state_dict_into_shards
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import corruptions, counted, meshes, whole
from safetensors import safe_open
from safetensors.torch import save_file
from stored import json_header

import statexchange
from statexchange.errors import (
    InvalidArgumentError,
)
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import (
    Plan,
    RankShards,
    cover_sum,
    covers_evenly,
    plan_merge,
    plan_writers,
)
from statexchange.sharding.shards import Box, LongTuple, Shard, full_box
from statexchange.tensors import ITEMSIZE

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
