"""An open checkpoint: boxes, indices and names, and what is said of a source that is broken."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from readers import PLAN, export
from safetensors.torch import save_file
from stored import flip_bit

import statexchange as sx
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    UnknownNameError,
)
from statexchange.formats.registry import open_source
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.sharding.shards import Box
from statexchange.storage.location import open_path
from statexchange.storage.publish.claim import CLAIM_NAME, Claim

# The manifest is compared with the files


@pytest.fixture(scope="module", params=["rows", "columns"])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a published checkpoint with a tensor of two boxes: two runs of its file, or two that interleave."""
    folder = tmp_path_factory.mktemp(request.param)
    for rank in range(2):
        save_file({"w": torch.arange(12.0).reshape(3, 4) + 100 * rank}, folder / f"rank{rank}.safetensors")
    dim = {"rows": 0, "columns": 1}[request.param]
    out = folder / "merged"
    sx.merge_checkpoint(folder, out, layout={"w": {"dim": dim}})
    return out


@pytest.mark.parametrize("at", [-1, -96, -45])
def test_a_flipped_byte_of_a_tensor_of_several_boxes_is_found_by_every_reader(
    sharded: Path, at: int, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    flip_bit(broken / "model.safetensors", at)
    assert len(verify(broken).findings) == 1
    state = {"w": np.zeros(sx.open_checkpoint(sharded)["w"].shape, np.float32)}
    for read in (
        lambda: sx.merge_checkpoint(broken, tmp_path / "out"),
        lambda: sx.load_checkpoint(state, broken),
        lambda: sx.open_checkpoint(broken)["w"].read(),
    ):
        with pytest.raises(CorruptError, match="digest") as caught:
            read()
        assert caught.value.name == "w"
    assert os.listdir(tmp_path) == ["broken"]


def test_a_whole_checkpoint_passes_every_check(sharded: Path, tmp_path: Path) -> None:
    sx.merge_checkpoint(sharded, tmp_path / "again")
    with sx.open_checkpoint(sharded) as one, sx.open_checkpoint(tmp_path / "again") as other:
        assert one["w"].read().tobytes() == other["w"].read().tobytes()
    report = verify(sharded)
    assert (report.findings, report.num_boxes, report.num_unproven) == ((), 2, 0)


def with_header(source: Path, path: Path, old: str, new: str) -> Path:
    shutil.copytree(source, path)
    data = (path / "model.safetensors").read_bytes()
    assert old.encode() in data
    assert len(old) == len(new)
    (path / "model.safetensors").write_bytes(data.replace(old.encode(), new.encode(), 1))
    return path


def test_a_header_that_contradicts_the_manifest_is_corrupt(tmp_path: Path) -> None:
    sx.export_checkpoint({"w": np.arange(24, dtype=np.float32).reshape(4, 6)}, tmp_path / "good")
    for number, (old, new) in enumerate([("[4,6]", "[6,4]"), ('"F32"', '"I32"')]):
        broken = with_header(tmp_path / "good", tmp_path / f"bad{number}", old, new)
        for read in (lambda: sx.merge_checkpoint(broken, tmp_path / "out"), lambda: sx.open_checkpoint(broken)):  # noqa: B023
            with pytest.raises(CorruptError, match="manifest disagree"):
                read()
        assert [type(finding) for finding in verify(broken).findings][:1] == [CorruptError]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_missing_files_are_detected_by_the_count_in_file_names(name: str, tmp_path: Path) -> None:
    """A merge to an object store that is killed leaves such a directory."""
    if name.endswith(".bin"):
        torch.save({"a": torch.ones(2)}, tmp_path / name)
    else:
        save_file({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(IncompleteError, match="is missing") as caught:
        sx.open_checkpoint(tmp_path)
    assert "00002-of-" in caught.value.path
    assert [type(finding) for finding in verify(tmp_path).findings] == [IncompleteError]


def test_a_broken_source_is_shown_as_far_as_it_can_be_read_after_the_error(tmp_path: Path, call: CommandLine) -> None:
    export(tmp_path / "out", 1.0)
    name = "model-00002-of-00003.safetensors"
    os.truncate(tmp_path / "out" / name, os.path.getsize(tmp_path / "out" / name) - 1)
    found = summarize(tmp_path / "out")
    assert (found.num_tensors, found.num_unreadable, found.nbytes, found.proven) == (3, 1, 3 * 96, False)
    save_file({"a": torch.ones(3, 2)}, tmp_path / "one.safetensors")
    os.truncate(tmp_path / "one.safetensors", os.path.getsize(tmp_path / "one.safetensors") - 8)
    alone = summarize(tmp_path / "one.safetensors")
    assert (alone.num_tensors, alone.num_unreadable, alone.nbytes, alone.proven) == (1, 1, 24, False)
    code, out, err = call("info", tmp_path / "one.safetensors")
    assert code == 4
    assert "digests" in out
    assert "known, not checked" not in out
    assert "truncated" in err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_directory_without_its_metadata_is_incomplete(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    os.remove(tmp_path / "dcp" / ".metadata")
    with pytest.raises(IncompleteError, match=r"\.metadata is missing"):
        open_source(tmp_path / "dcp")
    found = summarize(tmp_path / "dcp")
    assert (found.kind, found.proven, len(found.problems)) == ("dcp", False, 1)


def test_foreign_files_are_checked_also_under_python_o(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"DCP_SHARDING_INFO": "[1]"})
    (tmp_path / "out").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "statexchange.json").write_text("[]")
    program = """
import sys, statexchange as sx
for path in sys.argv[1:]:
    try:
        sx.open_checkpoint(path)
    except sx.errors.CorruptError as error:
        print(bool(error.message.partition(": ")[2]))
"""
    for options in ([], ["-O"]):
        command = [sys.executable, *options, "-c", program, tmp_path / "a.safetensors", tmp_path / "out"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\nTrue\n"


def test_without_digests_verify_does_not_call_the_bytes_correct(tmp_path: Path, call: CommandLine) -> None:
    save_file({"a": torch.full((2,), float("nan"))}, tmp_path / "a.safetensors")
    code, out, _ = call("verify", tmp_path / "a.safetensors")
    assert code == 0
    assert "structure ok" in out
    assert "bytes not checked" in out


def test_a_directory_with_a_claim_and_no_manifest_is_being_written(tmp_path: Path) -> None:
    """Readers of an object store find this while a checkpoint is published there."""
    (tmp_path / CLAIM_NAME).write_bytes(Claim.new("0" * 16, PLAN, ("model.safetensors",)).to_bytes())
    with pytest.raises(IncompleteError, match=r"no complete .*process \d+ "):
        sx.open_checkpoint(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(IncompleteError, match="no complete checkpoint"):
        sx.load_checkpoint({"a": torch.zeros(2)}, tmp_path)
    assert [type(finding) for finding in verify(tmp_path).findings] == [IncompleteError]


def test_a_closed_checkpoint_opens_nothing(tmp_path: Path) -> None:
    """After `close` its descriptor number may belong to another directory, in which it must not open a name."""
    (tmp_path / "one/below").mkdir(parents=True)
    (tmp_path / "other/below").mkdir(parents=True)
    for folder in ("one", "other"):
        (tmp_path / folder / "a").write_bytes(b"a")
    place = open_path(str(tmp_path / "one"))
    file = place.store.open("a")
    before = set(os.listdir("/proc/self/fd"))
    place.close()
    others = [os.open(tmp_path / "other", os.O_RDONLY) for _ in before]  # these reuse the closed numbers
    try:
        opened = set(os.listdir("/proc/self/fd"))
        for use in (
            lambda: place.store.open("a"),
            lambda: place.store.below("below"),
            lambda: place.store.listing,
            lambda: file.read_all(),
            lambda: file.check_unchanged(),
        ):
            with pytest.raises(InvalidArgumentError, match="been closed"):
                use()
        assert set(os.listdir("/proc/self/fd")) == opened
    finally:
        for fd in others:
            os.close(fd)


def test_a_box_is_given_as_offsets_and_shape_and_other_forms_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6).reshape(2, 3)}, tmp_path / "model.safetensors")
    with sx.open_checkpoint(tmp_path) as checkpoint:
        for box in (((0, 1), (2, 2)), [[0, 1], [2, 2]], (torch.Size((0, 1)), torch.Size((2, 2)))):
            assert checkpoint["a"].read(box).tolist() == [[1, 2], [4, 5]]
        for wrong in (
            "x",
            3,
            (0, 1),
            ((0, 1),),
            ((0,), (2, 3)),
            ((0, 1), (2, 2), (3, 3)),
            ((0.5, 1), (2, 2)),
            (slice(2), slice(2)),
        ):
            with pytest.raises(InvalidArgumentError, match="box must be"):
                checkpoint["a"].read(wrong)


@pytest.mark.parametrize(
    "box",
    [Box((1, 0), (2, 3)), ((1, 0), (2, 3)), Box((0,), (1,)), Box((9, 9), (0, 1)), Box((-1, 0), (1, 1))],
    ids=str,
)
def test_a_box_outside_of_a_tensor_is_refused(box: Box, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with (
        sx.open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(InvalidArgumentError, match="outside"),
    ):
        checkpoint["a"].read(box)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_tensor_is_read_as_a_torch_tensor_of_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(12).reshape(3, 4).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "none": torch.empty(0, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with sx.open_checkpoint(tmp_path) as checkpoint:
        for name, expected in tensors.items():
            found = checkpoint[name].read(framework="pt")
            assert found.dtype == expected.dtype
            assert (
                torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) if found.dim() else found == expected
            )
        part = checkpoint["w"].read(Box((1, 0), (1, 2)), framework="pt")
        assert part.tolist() == tensors["w"][1:2, :2].tolist()
        part.zero_()  # memory of its own
        assert torch.equal(checkpoint["w"].read(framework="pt"), tensors["w"])
        with pytest.raises(InvalidArgumentError, match="framework must be"):
            checkpoint["w"].read(framework="tf")  # type: ignore[call-overload]


def test_a_name_that_an_open_checkpoint_lacks_is_a_named_key_error(tmp_path: Path) -> None:
    sx.save_checkpoint({"model": {"enc.weight": np.ones((3, 4)), "b": np.zeros(2)}, "step": 7}, tmp_path / "saved")
    with sx.open_checkpoint(tmp_path / "saved") as checkpoint:
        with pytest.raises(KeyError, match=r"did you mean 'model\.enc\.weight'") as caught:
            checkpoint["model.enc.weigth"]
        assert isinstance(caught.value, NotFoundError)
        assert (caught.value.name, caught.value.path) == ("model.enc.weigth", str(tmp_path / "saved"))
        assert type(pickle.loads(pickle.dumps(caught.value))) is UnknownNameError
        assert "model.b" in checkpoint
        assert "step" not in checkpoint
        with pytest.raises(KeyError, match=r"call load_checkpoint\(state, path\)"):
            checkpoint["step"]
        assert checkpoint.get("step") is None
        assert checkpoint.get("step", 3) == 3


@pytest.mark.parametrize("save", [sx.save_checkpoint, torch.save], ids=["save", "torch"])
def test_the_error_for_a_plain_value_says_how_to_read_it(save: Any, tmp_path: Path) -> None:
    save({"w": torch.ones(2), "step": 7}, tmp_path / "saved")
    with pytest.raises(KeyError, match="load_checkpoint"):
        sx.open_checkpoint(tmp_path / "saved")["step"]
    state: dict[str, Any] = {}
    sx.load_checkpoint(state, tmp_path / "saved", include="step")
    assert state == {"step": 7}


INDICES = [
    *(1, -1, np.s_[:], np.s_[1:3], np.s_[-2:, :2], np.s_[1, 2:], np.s_[:, -1, 0], np.s_[2, 3, 1], (), np.s_[3:1]),
    *(np.s_[9:], np.s_[:, :, ::1]),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_stored_tensor_is_read_by_an_index_as_an_array_is(index: Any, tmp_path: Path) -> None:
    array = np.arange(24).reshape(3, 4, 2)
    sx.export_checkpoint({"a": array}, tmp_path / "out")
    block = sx.open_checkpoint(tmp_path / "out")["a"][index]
    np.testing.assert_array_equal(block, array[index], strict=True)


@pytest.mark.parametrize("index", [np.s_[::2], np.s_[::-1], ..., None, [0], True, "a", (0, 0, 0)], ids=str)
def test_other_indices_of_a_stored_tensor_are_refused(index: Any, tmp_path: Path) -> None:
    sx.export_checkpoint({"a": np.ones((3, 4))}, tmp_path / "out")
    tensor = sx.open_checkpoint(tmp_path / "out")["a"]
    with pytest.raises(InvalidArgumentError, match="index") as caught:
        tensor[index]
    assert caught.value.name == "a"
    with pytest.raises(IndexError):
        tensor[3]
    assert [row.tolist() for row in tensor] == [[1.0] * 4] * 3
