"""Merging files: the bytes that one process would have saved, or an error that names rank and tensor, and no output."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model, save_torch_state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stored import contents_of, flip_bit, json_header, write_raw, write_with_header
from warm_python import warm_python
from workspaces import bytes_of, part, write_round

import statexchange as sx
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
from statexchange.report.verify import verify
from statexchange.sharding.shards import Box, full_box
from statexchange.storage.publish.directory_build import _receipt
from statexchange.storage.tensorfile import ShardData
from statexchange.tensors import DTYPE_NAMES


def chunks(shape: tuple[int, ...], world_size: int, dim: int) -> list[Box]:
    """Return the boxes of torch.chunk, some of them possibly empty."""
    size = -(-shape[dim] // world_size)
    begins = [min(size * r, shape[dim]) for r in range(world_size + 1)]
    return [
        Box(
            tuple(begins[r] if d == dim else 0 for d in range(len(shape))),
            tuple(begins[r + 1] - begins[r] if d == dim else s for d, s in enumerate(shape)),
        )
        for r in range(world_size)
    ]


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = {getattr(torch, long_name): name for long_name, name in DTYPE_NAMES.items()}
    state = {f"all.{name}": torch.arange(35).to(dtype).reshape(7, 5) for dtype, name in names.items() if name != "C128"}
    state["big"] = torch.randn(1500, 701, generator=generator)  # more than a window
    state["tall"] = torch.randn(700_001, 3, generator=generator).bfloat16()
    state["cube"] = torch.randn(3, 300, 1000, generator=generator)
    state["größe"] = torch.arange(12).reshape(3, 4)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 3)
    return state


def lay_out(state: dict[str, torch.Tensor], world_size: int, dim: int) -> list[list[ShardData]]:
    """Cut every tensor along a dim if it has that dim; else put it on all ranks."""
    ranks: list[list[ShardData]] = [[] for _ in range(world_size)]
    for name, value in state.items():
        shape = tuple(value.shape)
        boxes = chunks(shape, world_size, dim) if value.ndim > dim else [full_box(shape)] * world_size
        for rank, box in zip(ranks, boxes, strict=True):
            rank.append(part(name, value, box))
    return ranks


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


def refuse(error: type[StateExchangeError], path: Path, match: str, **options: Any) -> StateExchangeError:
    """Check that merging `path`/ws raises `error` and leaves nothing."""
    before = sorted(os.listdir(path))
    with pytest.raises(error, match=match) as caught:
        merge_checkpoint(path / "ws", path / "out", **options)
    assert sorted(os.listdir(path)) == before
    return caught.value


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


def test_metadata_of_a_file_is_kept(tmp_path: Path) -> None:
    kept = {f"key{n}": json.dumps({"_type": n}) for n in range(13)}
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors", {"format": "pt", **kept})
    report = merge_checkpoint(tmp_path / "one.safetensors", tmp_path / "out")
    assert json_header(tmp_path / "out/model.safetensors")["__metadata__"] == {"format": "pt", **kept}
    assert report.notes == ()
    merge_checkpoint(tmp_path / "out", tmp_path / "again", max_shard_size=1)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_metadata_on_which_files_differ_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for number, format_ in ((1, "flax"), (2, "flax")):
        metadata = {"format": format_, "same": "x", "differs": str(number), f"only{number}": "y"}
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"src/m-0000{number}-of-00002.safetensors", metadata)
    report = merge_checkpoint(tmp_path / "src", tmp_path / "out")
    kept = {"format": "pt", "only1": "y", "only2": "y", "same": "x"}
    assert json_header(tmp_path / "out/model.safetensors")["__metadata__"] == kept
    assert report.notes == (
        "metadata keys that are not kept: differs (files differ)",
        "the metadata key format becomes 'pt'; it was 'flax'",
    )


def test_metadata_that_is_no_text_is_named(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"half":"\\ud800"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    write_with_header(tmp_path / "x.safetensors", header, b"\7")
    report = merge_checkpoint(tmp_path / "x.safetensors", tmp_path / "out")
    assert report.notes == ("metadata keys that are not kept: half (not valid text)",)
    assert json_header(tmp_path / "out/model.safetensors")["__metadata__"] == {"format": "pt"}


def test_metadata_of_workspaces_and_of_torchs_writer_is_not_kept(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"w": torch.ones(4, 2)}, 2, 0))
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, path in enumerate(sorted((tmp_path / "ws").rglob("*.safetensors"))):
        shutil.copy(path, parts / f"{number}.safetensors")
    for source in ("ws", "parts"):
        report = merge_checkpoint(tmp_path / source, tmp_path / f"{source}.out")
        assert json_header(tmp_path / f"{source}.out/model.safetensors")["__metadata__"] == {"format": "pt"}
        assert report.notes == ()


@pytest.mark.parametrize("layout", [None, {"nothing": {"dim": 0}}])
def test_a_tensor_of_an_unknown_dtype_does_not_hide_others(tmp_path: Path, layout: Any) -> None:
    (tmp_path / "ws").mkdir()
    path = tmp_path / "ws/m.safetensors"
    write_raw(path, {"odd": ("Q4", [2, 2], b"ab"), "w": ("U8", [2], b"cd"), "nothing": ("U8", [1], b"e")})
    error = refuse(UnsupportedError, tmp_path, "dtype Q4", layout=layout)
    assert (error.name, error.path) == ("odd", str(path))
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", include="w", layout=layout)
    assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [99, 100]
    with sx.open_checkpoint(tmp_path / "ws") as checkpoint:
        assert {name: (t.dtype, t.shape) for name, t in checkpoint.items()} == {
            "odd": ("Q4", (2, 2)), "w": ("U8", (2,)), "nothing": ("U8", (1,))
        }  # fmt: skip
        with pytest.raises(UnsupportedError, match="Q4"):
            checkpoint["odd"].read()
    with pytest.raises(UnsupportedError, match="Q4") as caught:
        sx.load_checkpoint(
            {"odd": torch.zeros(2), "w": torch.zeros(2, dtype=torch.uint8)}, tmp_path / "ws", strict=False
        )
    assert caught.value.name == "odd"
    assert [type(found) for found in verify(tmp_path / "ws").findings] == [UnsupportedError]


def test_an_index_may_list_a_tensor_of_an_unknown_dtype(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"odd": ("Q4", [2, 2], b"ab"), "w": ("U8", [2], b"cd")})
    index = {"weight_map": {"odd": "model.safetensors", "w": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_source(tmp_path) as source:
        assert (source.problems, list(source.unsupported)) == ((), ["odd"])


def test_optimizer_state_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (tmp_path / "src").mkdir()
    torch.save(model.state_dict(), tmp_path / "src/pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "src/optimizer.pt")
    report = merge_checkpoint(tmp_path / "src", tmp_path / "out")
    assert report.notes == ("only the section 'model' is read, not 'optimizer' (all: section=\"all\", --section all)",)
    assert load_file(tmp_path / "out/model.safetensors").keys() == model.state_dict().keys()
    report = merge_checkpoint(tmp_path / "src", tmp_path / "all", section="all")
    assert report.notes[-1].startswith("6 of 8 tensors look like optimizer state, such as state.0.")
    report = merge_checkpoint(tmp_path / "src", tmp_path / "weights", section="all", exclude="state.*")
    assert load_file(tmp_path / "weights/model.safetensors").keys() == model.state_dict().keys()
    assert not any("optimizer" in note for note in report.notes)
    report = merge_checkpoint(tmp_path / "src/optimizer.pt", tmp_path / "moments", section="optimizer")
    assert report.num_tensors == 6
    assert not any("look like" in note for note in report.notes)
    save_file({"w": torch.ones(1), "w.exp_avg": torch.ones(1)}, tmp_path / "x.safetensors")  # a format without sections
    report = merge_checkpoint(tmp_path / "x.safetensors", tmp_path / "x")
    assert report.notes[-1].startswith("1 of 2 tensors look like optimizer state, such as w.exp_avg: ")


def test_deepspeeds_placeholders_are_refused_by_name(tmp_path: Path) -> None:
    state = {
        "module": {"w": torch.empty(0), "b": torch.empty(0)},
        "param_shapes": [{"w": torch.Size([2, 2]), "b": torch.Size([2])}],
        "ds_version": "0.15",
    }
    torch.save(state, tmp_path / "ws")
    error = refuse(UnsupportedError, tmp_path, r"2 tensors .*the directory")
    assert error.name == "module.w"
    torch.save({"w": torch.empty(0)}, tmp_path / "ws")
    merge_checkpoint(tmp_path / "ws", tmp_path / "out")


def test_readers_name_the_ranks_of_a_gap_and_of_an_overlap(tmp_path: Path) -> None:
    w, b = torch.ones(4), torch.ones(1)
    other = part("b", b, full_box((1,)))
    write_round(tmp_path / "hole", [other], [other, part("w", w, Box((0,), (2,)))])
    write_round(tmp_path / "overlap", [other], [part("w", w, Box((0,), (3,)))], [part("w", w, Box((2,), (2,)))])
    state = {"w": torch.zeros(4), "b": torch.zeros(1)}
    match = r"region \[2:4\].*ranks \[1\]"
    with sx.open_checkpoint(tmp_path / "hole") as checkpoint, pytest.raises(IncompleteError, match=match):
        checkpoint["w"].read()
    with pytest.raises(IncompleteError, match=r"ranks \[1\]") as hole:
        sx.load_checkpoint(state, tmp_path / "hole")
    assert (hole.value.name, hole.value.path) == ("w", str(tmp_path / "hole"))
    with pytest.raises(OverlapError, match=r"rank 1 .*rank 2\b") as overlap:
        sx.load_checkpoint(state, tmp_path / "overlap")
    assert (overlap.value.name, overlap.value.rank, overlap.value.path) == ("w", 2, str(tmp_path / "overlap"))


def test_small_files_are_copied_but_not_weights_or_training_state(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", [part("w", torch.ones(2), full_box((2,)))])
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for name in ("config.json", "tokenizer.model", ".hidden", "old.safetensors", "pytorch_model.bin", "x.index.json"):
        (model / name).write_text(name)
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=model)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        "statexchange.json",
        "tokenizer.model",
    ]
    for name in ("trainer_state.json", "latest", "zero_to_fp32.py", "train_results.json", "fsdp_config.json"):
        (model / name).write_text(name)
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=model, overwrite=True)
    assert sorted(name for name, *_ in map(str.split, os.listdir(tmp_path / "out")) if "model" not in name) == [
        "config.json",
        "statexchange.json",
    ]
    assert not any("nothing is taken" in note for note in report.notes)
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=[model / ".hidden"], overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == [".hidden", "model.safetensors", "statexchange.json"]
    files = {"config.json": "{}", "tokenizer.model": b"\xff"}
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=files, overwrite=True)
    assert (tmp_path / "out/config.json").read_text() == "{}"
    assert (tmp_path / "out/tokenizer.model").read_bytes() == b"\xff"
    shutil.rmtree(tmp_path / "out")
    for name in ("", "..", "sub/config.json", "/config.json"):
        refuse(InvalidArgumentError, tmp_path, "plain file name", files_from={name: "{}"})
    refuse(InvalidArgumentError, tmp_path, "'model.safetensors'", files_from={"model.safetensors": "{}"})
    os.mkfifo(tmp_path / "fifo")
    refuse(UnsafeError, tmp_path, "regular file", files_from=[tmp_path / "fifo"])
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refuse(UnsafeError, tmp_path, "regular file", files_from=model)


def test_a_directory_without_small_files_is_named(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", [part("w", torch.ones(2), full_box((2,)))])
    job = tmp_path / "job"
    job.mkdir()
    (job / "trainer_state.json").write_text("{}")
    text = f"files_from: nothing is taken from {job}: it has no config, tokenizer or other such file"
    assert text in merge_checkpoint(tmp_path / "ws", tmp_path / "out", files_from=job).notes
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "statexchange.json"]


def test_a_dry_run_plans_and_touches_nothing(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out(whole_state(), 2, 0))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "a" / "out", max_shard_size="1MB", dry_run=True)
    assert report.dry_run
    assert len(report.files) > 1
    assert os.listdir(tmp_path) == ["ws"]


def test_a_merge_of_100_ranks_needs_few_descriptors(tmp_path: Path) -> None:
    value = torch.arange(100 * 4).reshape(100, 4)
    write_round(tmp_path / "ws", *[[part("w", value, box)] for box in chunks((100, 4), 100, 0)])
    program = "import sys; from statexchange.checkpoint.merge import merge_checkpoint; merge_checkpoint(*sys.argv[1:])"
    command = ["prlimit", "--nofile=64", sys.executable, "-c", program, str(tmp_path / "ws"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], value)


MEASURE = """
import sys
from statexchange.checkpoint import merge
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10
before = peak()
merge.merge_checkpoint(sys.argv[1], sys.argv[2], max_shard_size="60MB", threads=2)
print(peak() - before, "torch" in sys.modules)
"""


@pytest.mark.parametrize("dim", [0, 1])
def test_a_merge_of_200_mb_needs_less_than_100_mb_of_memory_and_no_torch(dim: int) -> None:
    place = Path("/dev/shm") / f"statexchange-test-{os.getpid()}"
    place.mkdir(mode=0o700)
    try:
        state = {f"w{i}": torch.zeros(5000, 2500) for i in range(4)}  # 200 MB
        write_round(place / "ws", *lay_out(state, 4, dim))
        command = [sys.executable, "-c", MEASURE, str(place / "ws"), str(place / "out")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        megabytes, torch_there = done.stdout.split()
        assert int(megabytes) < 100
        assert torch_there == "False"
    finally:
        shutil.rmtree(place)


def test_an_error_in_one_file_stops_the_others(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({f"w{i}": torch.ones(600, 1000) for i in range(8)}, 2, 1))
    seen: list[int] = []

    def fail(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_checkpoint(tmp_path / "ws", tmp_path / "out", max_shard_size="2.4MB", threads=2, on_progress=fail)
    assert len(seen) < 12  # of at least 32
    assert os.listdir(tmp_path) == ["ws"]


@pytest.mark.parametrize("files", [1, 3], ids=["one-file", "three-files"])
def test_any_number_of_threads_writes_the_same_bytes(tmp_path: Path, files: int) -> None:
    state = {f"w{i:02}": torch.randn(700, 1000) for i in range(12)}  # 34 MB: a file is divided among several threads
    state |= {"one": torch.randn(3_000_000), "empty": torch.zeros(0, 3), "last": torch.ones(3)}
    write_round(tmp_path / "ws", *lay_out(state, 2, 0))
    size = -(-sum(value.nbytes for value in state.values()) // files)
    for threads in (1, 2, 5):
        done: list[int] = []
        out = tmp_path / str(threads)

        def count(at: int, total: int, done: list[int] = done) -> None:
            done.append(at)

        merge_checkpoint(tmp_path / "ws", out, threads=threads, max_shard_size=size, on_progress=count)
        assert (done, done[-1]) == (sorted(done), sum(value.nbytes for value in state.values()))
        assert contents_of(out) == contents_of(tmp_path / "1")
    merged: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "5").glob("*.safetensors"):
        merged |= load_file(path)
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], value) for name, value in state.items())


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """Return values that show how a conversion rounds: ties, the smallest and largest of every dtype, random bits."""
    generator = torch.Generator().manual_seed(3)
    edges = [v for d in FLOATS for i in [torch.finfo(d)] for v in (i.max, i.tiny, i.smallest_normal, i.eps, i.tiny / 2)]
    edges += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-40, 65519.99, 65520.0, 3.39e38]
    edges += [1 + 2**-8 + 2**-30, 2**-25, 2**-24 * 1.5, 0.0, float("inf"), 1 / 3, float("nan")]
    values = torch.tensor([*edges, *(-v for v in edges)], dtype=torch.float64)
    random = torch.randint(-(2**31), 2**31 - 1, (60_000,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.cat([values, random.double(), torch.randn(60_000, generator=generator).double()]).to(dtype)


def test_each_tensor_is_cast_by_the_first_pattern_that_matches_its_name(tmp_path: Path) -> None:
    state = {"up.weight": torch.ones(2), "norm.weight": torch.ones(2), "count": torch.ones(2, dtype=torch.int64)}
    save_file(state, tmp_path / "model.safetensors")
    for cast in ({"norm.*": torch.float64, "*": "BF16"}, {"norm.*": "float64", "up.*": "bf16", "*.weight": "float16"}):
        merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", dtype=cast, overwrite=True)
        written = load_file(tmp_path / "out/model.safetensors")
        found = {name: tensor.dtype for name, tensor in written.items()}
        assert found == {"up.weight": torch.bfloat16, "norm.weight": torch.float64, "count": torch.int64}
    with pytest.raises(InvalidArgumentError, match=r"pattern 'none\.\*'"):
        merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "never", dtype={"none.*": "float32"})


def test_a_cast_leaves_the_scales_of_float8_tensors(tmp_path: Path) -> None:
    state = {
        "q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "q.weight_scale_inv": torch.ones(1),
        "q.input_scale": torch.ones(1) * 2,
        "q.bias": torch.ones(2),
        "norm.scale": torch.ones(3),
    }
    save_file(state, tmp_path / "model.safetensors")
    merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", dtype="bfloat16")
    written = load_file(tmp_path / "out/model.safetensors")
    assert {name for name, tensor in written.items() if tensor.dtype == torch.bfloat16} == {"q.bias", "norm.scale"}
    assert written["q.weight_scale_inv"].dtype == torch.float32
    assert bytes_of(written["q.weight"]) == bytes_of(state["q.weight"])


@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_floats_are_converted_bit_by_bit_as_torch_does(tmp_path: Path, target: torch.dtype) -> None:
    state = {str(dtype): awkward(dtype) for dtype in FLOATS}
    state |= {"matrix": torch.randn(1500, 701), "int": torch.arange(5), "fp8": torch.ones(3).to(torch.float8_e5m2)}
    state |= {"bool": torch.tensor([True]), "complex": torch.ones(2, dtype=torch.complex64), "none": torch.empty(0, 3)}
    write_round(tmp_path / "ws", *lay_out(state, 3, 1))
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", dtype=str(target).removeprefix("torch."), max_shard_size="3MB")
    back: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        back |= load_file(file)
    for name, value in state.items():
        expected = value
        if value.dtype in FLOATS and value.dtype != target:
            expected = value.to(target).masked_fill(value.isnan(), float("nan"))
        assert back[name].dtype == expected.dtype
        assert bytes_of(back[name]) == bytes_of(expected), name
    merge_checkpoint(tmp_path / "ws", tmp_path / "torch", dtype=target, max_shard_size="3MB")
    checked = verify(tmp_path / "out")
    assert (checked.findings, checked.num_unproven) == ((), 0)


def test_a_merge_casts_as_an_export_does_and_checks_digests(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 200, dtype=torch.float64), "n": torch.arange(4)}
    files = write_round(tmp_path / "ws", *lay_out(state, 2, 0))
    merge_checkpoint(tmp_path / "ws", tmp_path / "merged", dtype=torch.bfloat16)
    sx.export_checkpoint(state, tmp_path / "exported", dtype=torch.bfloat16)
    written, exported = (tmp_path / name / "model.safetensors" for name in ("merged", "exported"))
    assert written.read_bytes() == exported.read_bytes()
    for name in ("int8", "float8_e4m3fn", "F8_E4M3", "double trouble"):
        refuse(InvalidArgumentError, tmp_path, "dtype must be", dtype=name)
    flip_bit(files[1], -1)
    assert refuse(CorruptError, tmp_path, "digest", dtype="float16").rank == 1


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_around_all_names_are_removed(tmp_path: Path, wrapper: str) -> None:
    state = {"model.a": torch.ones(2), "head": torch.zeros(3)}
    write_round(tmp_path / "ws", *lay_out({wrapper + name: value for name, value in state.items()}, 2, 0))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", rename=[("^model", "m")])
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"m.a", "head"}
    (note,) = report.notes
    assert "wrappers" in note
    merge_checkpoint(tmp_path / "ws", tmp_path / "upper", rename=str.upper, exclude="*.head")
    assert set(load_file(tmp_path / "upper" / "model.safetensors")) == {"MODEL.A"}


def test_a_prefix_of_only_some_names_is_kept(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"module.a": torch.ones(2), "module": torch.ones(2)}, 1, 0))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"module.a", "module"}
    assert report.notes == ()


def test_a_model_inside_a_nested_state_is_reported(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"model.model.a": torch.ones(2), "model.lm_head": torch.ones(2)}, 1, 0))
    (note,) = merge_checkpoint(tmp_path / "ws", tmp_path / "out").notes
    assert '--rename "^model\\.="' in note
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "new", rename=[(r"^model\.", "")])
    assert (report.notes, list(load_file(tmp_path / "new" / "model.safetensors"))) == ((), ["lm_head", "model.a"])
    write_round(tmp_path / "tied", *lay_out({"model.layers.0.w": torch.ones(2), "model.norm": torch.ones(2)}, 1, 0))
    assert merge_checkpoint(tmp_path / "tied", tmp_path / "hf", files_from={"config.json": "{}"}).notes == ()


KILLED = """
import os, signal, sys
from statexchange.checkpoint import merge
from statexchange.storage.publish.directory_build import DirectoryBuild
source, out, when = sys.argv[1:4]
record = DirectoryBuild.record
def die(self, name, facts):
    if when == "before": os.kill(os.getpid(), signal.SIGKILL)
    record(self, name, facts)
    if name.endswith("00002-of-00004.safetensors"): os.kill(os.getpid(), signal.SIGKILL)
DirectoryBuild.record = die
merge.merge_checkpoint(source, out, max_shard_size=2_500_000, threads=1, overwrite=os.path.exists(out))
"""


def kill_a_merge(source: Path, out: Path, when: str = "after") -> Path:
    """Kill a merge of four files when two are finished; return the directory that it leaves."""
    done = subprocess.run(
        [warm_python("commands"), "-c", KILLED, str(source), str(out), when], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = out.parent.glob(f".{out.name}.*.partial")
    return left


def four_files(path: Path) -> None:
    """Write a workspace whose merge, with files of at most 2.5 MB, has four files."""
    write_round(path / "ws", *lay_out({f"w{i}": torch.randn(600, 1000) for i in range(4)}, 2, 1))


def marks(directory: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of each file, which show whether it has been written again."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in directory.glob("*.safetensors")}


@pytest.mark.parametrize("target", ["absent", "there"])
def test_a_killed_merge_is_resumed_after_its_finished_files(tmp_path: Path, target: str) -> None:
    four_files(tmp_path)
    merge_checkpoint(tmp_path / "ws", tmp_path / "expected", max_shard_size=2_500_000)
    out = tmp_path / "place" / "out"
    if target == "there":
        merge_checkpoint(tmp_path / "ws", out)
    before = marks(kill_a_merge(tmp_path / "ws", out))
    assert len(before) == 4
    seen: list[int] = []
    report = merge_checkpoint(
        tmp_path / "ws", out, max_shard_size=2_500_000, overwrite=True, on_progress=lambda done, _: seen.append(done)
    )
    names = sorted(before)
    assert report.reused == tuple(names[:2])
    after = marks(out)
    assert [after[name] == before[name] for name in names] == [True, True, False, False]
    assert contents_of(out) == contents_of(tmp_path / "expected")
    assert (seen[0], seen[1], seen[-1]) == (2_400_000, 4_800_000, 9_600_000)
    assert os.listdir(out.parent) == ["out"]


def test_a_file_without_a_receipt_or_changed_since_is_written_again(tmp_path: Path) -> None:
    four_files(tmp_path)
    merge_checkpoint(tmp_path / "ws", tmp_path / "expected", max_shard_size=2_500_000)

    def reused_after(harm: Callable[[Path], object], when: str = "after") -> tuple[str, ...]:
        out = tmp_path / "place" / "out"
        harm(kill_a_merge(tmp_path / "ws", out, when))
        report = merge_checkpoint(tmp_path / "ws", out, max_shard_size=2_500_000)
        assert contents_of(out) == contents_of(tmp_path / "expected")
        assert os.listdir(out.parent) == ["out"]
        shutil.rmtree(out.parent)
        return report.reused

    one, two = (f"model-0000{n}-of-00004.safetensors" for n in (1, 2))
    assert reused_after(lambda left: None, "before") == ()
    assert reused_after(lambda left: (left / one).write_bytes((left / two).read_bytes())) == (two,)
    assert reused_after(lambda left: (left / _receipt(one)).write_text("[1, 2")) == (two,)
    assert reused_after(lambda left: (left / one).unlink()) == (two,)
    assert reused_after(lambda left: (left / "notes.txt").write_text("x")) == (one, two)

    def link(left: Path) -> None:
        (tmp_path / "victim").write_bytes((left / one).read_bytes())
        (left / one).unlink()
        (left / one).symlink_to(tmp_path / "victim")

    assert reused_after(link) == (two,)
    assert (tmp_path / "victim").exists()


def test_a_file_of_another_source_or_other_options_is_never_reused(tmp_path: Path) -> None:
    four_files(tmp_path)
    source = open_source(tmp_path / "ws").files[0].path
    changes: dict[str, tuple[Callable[[], object], dict[str, Any]]] = {
        "time": (lambda: os.utime(source), {}),
        "dtype": (lambda: None, {"dtype": "float16"}),
        "replicas": (lambda: None, {"replicas": "root"}),
        "names": (lambda: None, {"rename": [("w", "v")]}),
    }
    for name, (change, options) in changes.items():
        out = tmp_path / name / "out"
        kill_a_merge(tmp_path / "ws", out)
        change()
        report = merge_checkpoint(tmp_path / "ws", out, max_shard_size=2_500_000, **options)
        assert (report.reused, os.listdir(out.parent)) == ((), ["out"]), name


def test_two_merges_into_one_target_do_not_share_files(tmp_path: Path) -> None:
    four_files(tmp_path)
    inner: list[str] = []

    def second(done: int, total: int) -> None:
        if not inner:
            with pytest.raises(TargetExistsError, match=rf"process {os.getpid()}\b") as caught:
                merge_checkpoint(tmp_path / "ws", tmp_path / "out")
            inner.append(caught.value.code)

    merge_checkpoint(tmp_path / "ws", tmp_path / "out", on_progress=second)
    assert inner == ["UNSAFE"]
    assert sorted(os.listdir(tmp_path)) == ["out", "ws"]


def test_a_dry_run_reports_the_sources_of_each_tensor(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"w": torch.ones(4, 4), "n": torch.ones(())}, 2, 1))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", dry_run=True, dtype="float16", rename=[("w", "x")])
    listed = {t.name: (t.source, t.dtype, t.shape, t.file, t.num_boxes, len(t.ranks)) for t in report.tensors}
    assert listed["x"] == ("w", "F16", (4, 4), "model.safetensors", 2, 2)
    assert listed["n"] == ("n", "F16", (), "model.safetensors", 1, 1)


@pytest.mark.parametrize("kind", ["save", "published"])
def test_a_target_inside_a_save_or_a_published_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    sx.save_checkpoint(state, tmp_path / "x") if kind == "save" else sx.export_checkpoint(state, tmp_path / "x")
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    with pytest.raises(sx.errors.UnsafeError, match="inside the source"):
        sx.merge_checkpoint(tmp_path / "x", tmp_path / "x/merged", include="w")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"overwrite": "no"}, "overwrite must be"),
    ({"resume": 1}, "resume must be"),
    ({"dry_run": None}, "dry_run must be"),
    ({"on_progress": 5}, "on_progress must be"),
    ({"threads": "2"}, "threads must be"),
    ({"threads": 0}, "threads must be"),
]


@pytest.mark.parametrize(("options", "match"), WRONG, ids=repr)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    sx.export_checkpoint({"w": torch.zeros(2)}, tmp_path / "x")
    sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "y")
    with pytest.raises(sx.errors.InvalidArgumentError, match=match):
        sx.merge_checkpoint(tmp_path / "x", tmp_path / "y", **options)
    with sx.open_checkpoint(tmp_path / "y") as kept:
        assert kept["w"].read().tolist() == [1, 1]
