"""Merging files: the bytes that one process would have saved, or an error that names rank and tensor, and no output."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model, save_torch_state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import chunks, lay_out, refuse, whole_state
from safetensors.torch import load_file, save_file
from stored import flip_bit
from workspaces import bytes_of, part, write_round

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    OverlapError,
    ReplicaError,
    StateExchangeError,
    TargetExistsError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.formats.registry import open_source
from statexchange.sharding.shards import Box, full_box


@pytest.mark.parametrize(("world_size", "dim"), [(1, 0), (3, 0), (4, 1), (3, 2), (9, 0)])
def test_one_file_is_what_save_file_writes(tmp_path: Path, world_size: int, dim: int) -> None:
    state = whole_state()
    write_round(tmp_path / "ws", *lay_out(state, world_size, dim))
    seen: list[tuple[int, int]] = []
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", on_progress=lambda *counts: seen.append(counts))
    save_file(state, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "statexchange.json"]
    assert seen[-1] == (report.nbytes, report.nbytes) == (sum(len(bytes_of(t)) for t in state.values()),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (report.num_tensors, report.files) == (len(state), (("model.safetensors", report.nbytes),))
    assert sorted(os.listdir(tmp_path)) == ["expected", "out", "ws"]


def test_boxes_of_two_dims_and_interleaved_rows_are_merged(tmp_path: Path) -> None:
    value = torch.randn(1000, 900, dtype=torch.float64)
    blocks = [Box((r, c), (h, w)) for r, h in ((0, 301), (301, 699)) for c, w in ((0, 1), (1, 899))]
    strided = [[Box((r, 0), (1, 900)) for r in range(1000) if r % 3 == k] for k in range(3)]
    write_round(
        tmp_path / "ws",
        *[[part("mesh", value, blocks[r]), *([part("rows", value, *strided[r])] if r < 3 else [])] for r in range(4)],
    )
    merge_checkpoint(tmp_path / "ws", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(back["mesh"], value)
    assert torch.equal(back["rows"], value)


@st.composite
def cut(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[Box]]]:
    """Draw a small tensor, and for each rank some boxes of a random mesh over it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = [Box((), ())]
    for edges in cuts:
        boxes = [Box((*b.offsets, lo), (*b.shape, hi - lo)) for b in boxes for lo, hi in pairwise(edges)]
    ranks: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for box in draw(st.permutations(boxes)):
        ranks[draw(st.integers(0, len(ranks) - 1))].append(box)
    dtype = draw(st.sampled_from([torch.float32, torch.int8, torch.bfloat16, torch.complex64]))
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape), ranks


@settings(max_examples=20)
@given(cut(), st.integers(20, 300))
def test_tensors_of_any_sharding_are_restored(tmp_path_factory: pytest.TempPathFactory, case: Any, window: int) -> None:
    from statexchange.formats import tensor_reader
    from statexchange.storage import regions

    value, ranks = case
    path = tmp_path_factory.mktemp("any", numbered=True)
    write_round(path / "ws", *[[part("w", value, *boxes)] for boxes in ranks])
    with pytest.MonkeyPatch.context() as patch:  # small windows, so that small tensors take many
        patch.setattr(tensor_reader, "WINDOW_BYTES", window)
        patch.setattr(tensor_reader, "windows", lambda shape, itemsize: regions.windows(shape, itemsize, window))
        merge_checkpoint(path / "ws", path / "out")
    back = load_file(path / "out" / "model.safetensors")["w"]
    assert (back.dtype, back.shape, bytes_of(back)) == (value.dtype, value.shape, bytes_of(value))
    shutil.rmtree(path)


def test_several_files_and_an_index_as_the_hub_writes_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 50), torch.nn.Linear(50, 7))
    state = {name: value.detach() for name, value in model.state_dict().items()}
    # The split follows the order of the state dict, which a file does not keep; so both get the order of the file.
    state = dict(sorted(state.items()))
    write_round(tmp_path / "ws", *lay_out(state, 2, 0))
    (tmp_path / "hub").mkdir()
    save_torch_state_dict(state, tmp_path / "hub", max_shard_size=6000)
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", max_shard_size=6000, threads=2)
    names = sorted(p.name for p in (tmp_path / "hub").iterdir())
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*names, "statexchange.json"])
    assert len(report.files) == 3
    for name in names:
        ours, theirs = (tmp_path / "out" / name).read_bytes(), (tmp_path / "hub" / name).read_bytes()
        if name.endswith(".json"):
            assert json.loads(ours) == json.loads(theirs)
        else:
            assert ours == theirs
    loaded = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 50), torch.nn.Linear(50, 7))
    load_torch_model(loaded, tmp_path / "out")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in state.items())


def test_the_manifest_records_the_source_of_every_byte(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(4, 3)
    top, bottom = chunks((4, 3), 2, 0)
    write_round(
        tmp_path / "ws", [part("w", value, top), part("v", value, full_box((4, 3)))], [part("w", value, bottom)]
    )
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", rename=[("^", "m.")])
    source = {(h.rank, t.shard.name): t.byte_ranges[0].digest for h, t in open_source(tmp_path / "ws").shards()}
    record = json.loads((tmp_path / "out" / "statexchange.json").read_text())
    assert record["tensors"]["m.w"] == {
        "file": "model.safetensors", "dtype": "F32", "shape": [4, 3], "source": "w",
        "boxes": [[[0, 0], [2, 3], source[0, "w"], 0], [[2, 0], [2, 3], source[1, "w"], 1]],
    }  # fmt: skip
    assert record["tensors"]["m.v"]["boxes"] == [[[0, 0], [4, 3], source[0, "v"], 0]]
    assert (record["files"], record["source"], record["aliases"]) == (["model.safetensors"], "workspace", {})


def test_a_merged_directory_can_be_merged_again_to_the_same_bytes(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out(whole_state(), 3, 1))
    merge_checkpoint(tmp_path / "ws", tmp_path / "one")
    merge_checkpoint(tmp_path / "one", tmp_path / "several", max_shard_size="1MB")
    merge_checkpoint(tmp_path / "several", tmp_path / "again", max_shard_size="1GB")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()


def test_altered_bytes_are_named_and_nothing_is_published(tmp_path: Path) -> None:
    state = whole_state()
    files = write_round(tmp_path / "ws", *lay_out(state, 3, 0))
    path = files[1]
    byte_range = next(h for h in open_source(tmp_path / "ws").files if h.rank == 1).tensors["tall"].byte_ranges[0]
    flip_bit(path, byte_range.begin + byte_range.nbytes // 2, 2)
    for options in ({}, {"max_shard_size": 2_000_000, "threads": 2}):
        error = refuse(CorruptError, tmp_path, "digest", **options)
        assert (error.name, error.rank, error.path) == ("tall", 1, str(path))


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    files = write_round(tmp_path / "ws", *lay_out({"w": torch.ones(8, 8)}, 2, 0))
    path = files[1]
    os.truncate(path, path.stat().st_size - 1)
    assert refuse(CorruptError, tmp_path, "truncated").path == str(path)
    path.unlink()
    error = refuse(IncompleteError, tmp_path, "missing")
    assert (error.rank, error.path) == (1, str(path.parent))


def test_gaps_and_overlaps_are_named_with_tensor_region_and_ranks(tmp_path: Path) -> None:
    value = torch.ones(4, 4)
    write_round(tmp_path / "ws", [part("w", value, Box((0, 0), (2, 4)))], [part("w", value, Box((1, 0), (3, 4)))])
    error = refuse(OverlapError, tmp_path, r"\[1:2, 0:4\] .*rank 0\b.*rank 1\b")
    assert error.name == "w"
    shutil.rmtree(tmp_path / "ws")
    write_round(tmp_path / "ws", [part("w", value, Box((0, 0), (2, 4)))], [part("w", value, Box((3, 0), (1, 4)))])
    assert refuse(IncompleteError, tmp_path, r"\[2:3, 0:4\]").name == "w"


def test_replicas_that_differ_are_an_error_that_names_the_option(tmp_path: Path) -> None:
    box = full_box((2,))
    write_round(tmp_path / "ws", *[[part("w", torch.tensor([r, 5]), box)] for r in range(3)])
    error = refuse(ReplicaError, tmp_path, r"replicas=\"root\" \(--replicas root\)")
    assert (error.name, error.rank) == ("w", 1)
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", replicas="root")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [0, 5]


def test_replicas_without_digests_are_compared_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    for name, value in (("rank0", 1.0), ("rank1", 2.0)):
        save_file({"w": torch.full((9,), value), "same": torch.ones(3)}, tmp_path / "ws" / f"{name}.safetensors")
    assert refuse(ReplicaError, tmp_path, "different values").name == "w"
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", exclude="w")
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["same"]


def test_tied_tensors_are_written_once_if_they_are_equal(tmp_path: Path) -> None:
    value = torch.arange(6.0)
    parts = [part("a", value, full_box((6,))), part("b", value, full_box((6,)))]
    write_round(tmp_path / "ws", parts, extra={"aliases": {"b": "a"}})
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert (list(load_file(tmp_path / "out" / "model.safetensors")), report.aliases) == (["a"], {"b": "a"})
    assert json.loads((tmp_path / "out" / "statexchange.json").read_text())["aliases"] == {"b": "a"}
    shutil.rmtree(tmp_path / "ws")
    shutil.rmtree(tmp_path / "out")
    write_round(tmp_path / "ws", [parts[0], part("b", value + 1, full_box((6,)))], extra={"aliases": {"b": "a"}})
    assert refuse(ReplicaError, tmp_path, "tied to 'a'").name == "b"


def test_invalid_options_and_dtypes_are_refused(tmp_path: Path) -> None:
    write_round(
        tmp_path / "ws",
        [part("c", torch.ones(2, dtype=torch.complex128), full_box((2,))), part("w", torch.ones(1), full_box((1,)))],
    )
    assert refuse(UnsupportedError, tmp_path, "complex128").name == "c"
    refuse(UnsafeError, tmp_path, "one name", rename=[(".", "x")])
    refuse(UnsafeError, tmp_path, "control characters", exclude="c", rename=[("w", "a\nb")])
    # A pair outside of a list would be read as two pairs of characters.
    for rename in ("^w", {"w": "x"}, ("^w", "ab"), [("w",)]):
        refuse(InvalidArgumentError, tmp_path, "rename must be", rename=rename)
    refuse(InvalidArgumentError, tmp_path, "matches no tensor", include=["nothing.*"])
    refuse(InvalidArgumentError, tmp_path, "not a size", max_shard_size="big")
    (tmp_path / "out").mkdir()
    refuse(TargetExistsError, tmp_path, "exists", exclude="c")
    with pytest.raises(NotFoundError):
        merge_checkpoint(tmp_path / "gone", tmp_path / "x")


def test_a_dry_run_raises_what_the_merge_raises_and_writes_nothing(tmp_path: Path) -> None:
    parts = [part("w", torch.ones(2), full_box((2,))), part("v", torch.ones(2), full_box((2,)))]
    write_round(tmp_path / "ws", [*parts, part("c", torch.ones(2, dtype=torch.complex128), full_box((2,)))])
    file = tmp_path / "file"
    file.write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "taken").mkdir()
    out, plain = tmp_path / "out", {"exclude": "c"}
    cases: list[tuple[Path, dict[str, Any]]] = [
        (out, {}),  # complex128
        (out, {**plain, "rename": [("w", "")]}),
        (out, {**plain, "rename": [("w", "a\nb")]}),
        (out, {**plain, "rename": [("w", "\ud800")]}),
        (out, {**plain, "rename": [("w", "x" * 600)]}),
        (out, {**plain, "rename": [("[wv]", "x")]}),
        (out, {**plain, "files_from": {"model.safetensors": "x"}}),
        (file / "out", plain),
        (file / "a" / "out", plain),
        (tmp_path / "link" / "out", plain),
        (tmp_path / ("n" * 256), plain),
        (tmp_path / ("n" * 300) / "out", plain),
        (tmp_path / "taken", plain),
        (file, {**plain, "overwrite": True}),
        (Path("/proc/out"), plain),
        (Path("/proc/nowhere/out"), plain),
    ]
    before = sorted(os.listdir(tmp_path))
    for path, options in cases:
        found = []
        for dry_run in (True, False):
            with pytest.raises(StateExchangeError) as caught:
                merge_checkpoint(tmp_path / "ws", path, dry_run=dry_run, **options)
            found.append((caught.value.code, caught.value.name))
        assert found[0] == found[1], (path, options)
    merge_checkpoint(tmp_path / "ws", out / "a" / "b", dry_run=True, **plain)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_dry_run_refuses_copies_that_cannot_be_reduced(tmp_path: Path) -> None:
    layout = {"w": {"reduce": "max"}}
    for value in (torch.ones(2, dtype=torch.complex64), torch.ones(2)):
        (tmp_path / "ws").mkdir()
        save_file({"w": value}, tmp_path / "ws/rank_0.safetensors")
        save_file({"w": value.to(torch.complex64)}, tmp_path / "ws/rank_1.safetensors")
        for dry_run in (True, False):
            refuse(StateExchangeError, tmp_path, "complex|dtype", layout=layout, dry_run=dry_run)
        shutil.rmtree(tmp_path / "ws")
