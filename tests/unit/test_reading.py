"""Readers beside publishers: a reader gets one publication, whatever happens between two of its file operations.

A reader runs in a process of its own, whose audit hook stops it at its n-th look. A look is a "statexchange.storage"
event: a directory is opened or listed, or a file opened. There the test runs a publisher to its end, and then lets the
reader continue. The test repeats this for n = 1, 2, ... until a read takes fewer than n looks, so new looks of readers
are tested without a change here.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from stored import flip_bit
from sweeps import slow
from warm_python import warm_python

import statexchange as sx
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    UnknownNameError,
)
from statexchange.formats.registry import open_source
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.sharding.shards import Box
from statexchange.storage.location import open_path
from statexchange.storage.publish.claim import CLAIM_NAME, Claim

READER = """
import json, os, sys
import numpy as np
import statexchange as sx
from statexchange.report.verify import verify
from statexchange.storage.publish.claim import CLAIM_NAME, Claim

path, how = sys.argv[1:]
stop_at = looks = 0
busy = False

def hook(event, args):
    global looks, busy
    if event != "statexchange.storage" or busy or not stop_at:
        return
    looks += 1
    if looks == stop_at:
        busy = True
        print(json.dumps(["look", args[0]]), flush=True)
        sys.stdin.readline()
        busy = False

def values(arrays):
    return sorted({float(v) for name, a in arrays for v in np.unique(a)})

def run(number):
    if how == "open":
        with sx.open_checkpoint(path) as checkpoint:
            return values((name, t.read()) for name, t in checkpoint.items())
    if how == "load":
        state = {f"t{i}": np.zeros((6, 4), np.float32) for i in range(3)}
        sx.load_checkpoint(state, path)
        return values(state.items())
    if how == "merge":
        out = f"{path}-merged-{number}"
        sx.merge_checkpoint(path, out, threads=1)
        assert not verify(out).findings
        return values((name, t.read()) for name, t in sx.open_checkpoint(out).items())
    if how == "verify":
        findings = verify(path).findings
        return [0.0] if not findings else [str(f) for f in findings]
    if how == "saved":
        state = {"model": {f"t{i}": np.zeros((6, 4), np.float32) for i in range(3)}, "step": -1}
        sx.load_checkpoint(state, path)
        return sorted({*values(state["model"].items()), float(state["step"])})
    config, weights = sx.NFSWorkspace(path, run="r").read_configs_and_weights_from_rank(0)
    return sorted({*values(weights.items()), float(config["k"])})

sys.addaudithook(hook)
for line in sys.stdin:
    looks, number = 0, json.loads(line)
    stop_at = number
    try:
        answer = ["values", run(number)]
    except Exception as error:
        answer = ["error", type(error).__name__, str(error)]
    stop_at = 0
    print(json.dumps(answer), flush=True)
"""


class Reader:
    """A process that reads `path`, stopping at its n-th look."""

    def __init__(self, path: Path, how: str) -> None:
        command = [warm_python("commands"), "-c", READER, str(path), how]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def read(self, stop_at: int, meanwhile: Callable[[], None]) -> tuple[list[Any], bool]:
        """Read once, and call `meanwhile` at a look; return the result, and whether there were so many looks."""
        assert self._process.stdout is not None
        self._say(json.dumps(stop_at))
        answer = json.loads(self._process.stdout.readline())
        stopped = answer[0] == "look"
        if stopped:
            meanwhile()
            self._say("")
            answer = json.loads(self._process.stdout.readline())
        return answer, stopped


def state_of(value: float) -> dict[str, Any]:
    return {f"t{i}": np.full((6, 4), value, np.float32) for i in range(3)}


def export(path: Path, value: float, **options: Any) -> None:
    sx.export_checkpoint(state_of(value), path, overwrite=True, max_shard_size=150, **options)


def at_every_look(reader: Reader, publish: Callable[[float], None]) -> Iterator[tuple[int, float, list[Any]]]:
    """Yield (n, the value published meanwhile, the answer) for each look of a read."""
    for number in range(1, 500):
        answer, stopped = reader.read(number, lambda: publish(float(number)))  # noqa: B023 (called before it changes)
        if not stopped:
            print(f"{number - 1} looks")
            assert number > 3
            return
        yield number, float(number), answer
    raise AssertionError("a read without an end")


def assert_read_as_old_or_new(path: Path, how: str, publish: Callable[[float], None]) -> None:
    """Publish the value 0, then another one at each look; a read finds only the value before it or this one."""
    publish(0.0)
    before = 0.0
    with Reader(path, how) as reader:
        for number, value, answer in at_every_look(reader, publish):
            assert answer[0] == "values", (number, answer)
            assert answer[1] in ([before], [value]), (number, answer)
            before = value


def assert_verified(path: Path, publish: Callable[[float], None]) -> None:
    """Publish, and again at each look of `verify`, which has no findings."""
    publish(0.0)
    with Reader(path, "verify") as reader:
        for number, _, answer in at_every_look(reader, publish):
            assert answer == ["values", [0.0]], number


@pytest.mark.parametrize("how", ["open", "load", slow("merge")])
def test_a_checkpoint_that_is_replaced_at_any_look_is_read_as_the_old_or_the_new_one(
    how: str, sweep_path: Path
) -> None:
    path = sweep_path / "out"
    assert_read_as_old_or_new(path, how, functools.partial(export, path))


def test_a_checkpoint_that_is_replaced_at_any_look_verifies(sweep_path: Path) -> None:
    path = sweep_path / "out"
    assert_verified(path, functools.partial(export, path))


def replace_files(path: Path, value: float) -> None:
    """Replace each file of a foreign directory by a rename, one after another, as a trainer does that saves again."""
    path.mkdir(exist_ok=True)
    for number, (name, array) in enumerate(state_of(value).items(), 1):
        save_numpy({name: array}, path / "new")
        os.replace(path / "new", path / f"model-{number:05d}-of-00003.safetensors")


@pytest.mark.parametrize("how", ["open", "load", "merge"])
def test_a_directory_whose_files_are_replaced_one_by_one_at_any_look_is_not_mixed(how: str, sweep_path: Path) -> None:
    path = sweep_path / "out"
    replace_files(path, 0.0)
    before, kinds = 0.0, set()
    with Reader(path, how) as reader:
        for number, value, answer in at_every_look(reader, functools.partial(replace_files, path)):
            kinds.add(answer[0])
            assert answer[1] in ([before], [value], "ReplacedError"), (number, answer)
            assert how != "merge" or answer[0] == "values", (number, answer)  # it reads again
            before = value
    assert "values" in kinds


def read_by(call: str, path: Path, on_progress: Callable[[int, int], None]) -> Any:
    if call == "verify":
        return verify(path, on_progress=on_progress)
    if call == "diff":
        return sx.diff_checkpoints(path, path.parent / "other", on_progress=on_progress)
    if call == "load":
        return sx.load_checkpoint(state_of(0.0), path, on_progress=on_progress)
    return sx.merge_checkpoint(path, path.parent / "merged", on_progress=on_progress, threads=1)


@pytest.mark.parametrize("call", ["verify", "diff", "load", "merge"])
def test_names_are_compared_with_the_opened_files_after_the_last_read(call: str, tmp_path: Path) -> None:
    for name in ("source", "other"):
        replace_files(tmp_path / name, 1.0)
    numbers = iter(range(2, 100))
    with pytest.raises(ReplacedError) as caught:
        read_by(call, tmp_path / "source", lambda _, __: replace_files(tmp_path / "source", float(next(numbers))))
    assert caught.value.path is not None
    assert str(tmp_path / "source" / "model-0000") in caught.value.path
    assert sorted(os.listdir(tmp_path)) == ["other", "source"]


def save(path: Path, value: float) -> None:
    sx.save_checkpoint({"model": state_of(value), "step": int(value)}, path, overwrite=True)


def test_a_save_that_is_replaced_at_any_look_is_read_as_the_old_or_the_new_one(sweep_path: Path) -> None:
    path = sweep_path / "saved"
    assert_read_as_old_or_new(path, "saved", functools.partial(save, path))


def test_a_save_that_is_replaced_at_any_look_verifies(sweep_path: Path) -> None:
    path = sweep_path / "saved"
    assert_verified(path, functools.partial(save, path))


def test_a_save_that_is_removed_at_any_look_is_read_whole_or_is_not_there(sweep_path: Path) -> None:
    path = sweep_path / "saved"

    def remove() -> None:
        (path / "save.json").unlink()  # no save any more, while its files are removed one by one
        shutil.rmtree(path)

    with Reader(path, "saved") as reader:
        for number in range(1, 500):
            save(path, 1.0)
            answer, stopped = reader.read(number, remove)
            if not stopped:
                break
            assert answer == ["values", [1.0]] or answer[:2] == ["error", "NotFoundError"], (number, answer)
    assert not stopped
    assert number > 3


@pytest.mark.slow
def test_a_workspace_whose_rounds_are_dropped_at_any_look_is_read_as_the_old_or_a_newer_one(sweep_path: Path) -> None:
    workspace = sx.NFSWorkspace(sweep_path / "ws", run="r")

    def write(value: float) -> None:
        for _ in range(3):
            workspace.write_configs_and_weights({"k": value}, state_of(value))

    assert_read_as_old_or_new(sweep_path / "ws", "nfs", write)


def test_an_open_checkpoint_is_read_as_it_was_when_it_was_opened(tmp_path: Path) -> None:
    """The checkpoint that replaces it has other tensors, in another order, at the old offsets."""
    path = tmp_path / "out"
    sx.export_checkpoint({"a": np.full(3, 1.0), "b": np.full(2, 2.0)}, path)
    with sx.open_checkpoint(path) as held:
        sx.export_checkpoint({"a": np.full(9, 7.0), "b": np.full(5, 8.0)}, path, overwrite=True)
        assert (held["a"].read().tolist(), held["b"].read().tolist()) == ([1.0] * 3, [2.0] * 2)
    with sx.open_checkpoint(path) as now:
        assert now["b"].read().tolist() == [8.0] * 5


def test_a_checkpoint_without_references_holds_no_descriptors(tmp_path: Path) -> None:
    export(tmp_path / "out", 1.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        opened = sx.open_checkpoint(tmp_path / "out")
        assert opened["t0"].read().sum() == 24
    assert len(os.listdir("/proc/self/fd")) > before
    del opened
    assert len(os.listdir("/proc/self/fd")) == before


def plain_source(path: Path, value: float) -> None:
    path.mkdir()
    for number in range(2):
        save_file({f"t{number}": torch.full((300, 1000), value)}, path / f"{number}.safetensors")


def overwrite_in_place(path: Path, value: float) -> None:
    """Write over a checkpoint in place, as a careless program does with its next one."""
    with open(path / "1.safetensors", "r+b") as file:
        data = file.read()
        header = 8 + int.from_bytes(data[:8], "little")
        file.seek(header)
        file.write(np.full(300 * 1000, value, np.float32).tobytes())


def test_a_source_that_is_changed_in_place_while_it_is_merged_is_merged_again(tmp_path: Path) -> None:
    plain_source(tmp_path / "source", 1.0)
    seen: list[int] = []

    def change(done: int, total: int) -> None:
        if done > total // 2 and not seen:
            seen.append(done)
            overwrite_in_place(tmp_path / "source", 2.0)

    sx.merge_checkpoint(tmp_path / "source", tmp_path / "out", threads=1, on_progress=change)
    with sx.open_checkpoint(tmp_path / "out") as merged:
        assert [np.unique(merged[name].read()).tolist() for name in ("t0", "t1")] == [[1.0], [2.0]]


def test_a_source_that_is_changed_in_place_again_and_again_is_not_published(tmp_path: Path) -> None:
    plain_source(tmp_path / "source", 1.0)
    value = iter(range(2, 1000))

    def change(done: int, total: int) -> None:
        if done > total // 2:
            overwrite_in_place(tmp_path / "source", float(next(value)))

    with pytest.raises(ReplacedError, match="changed while") as caught:
        sx.merge_checkpoint(tmp_path / "source", tmp_path / "out", threads=1, on_progress=change)
    assert caught.value.path == str(tmp_path / "source" / "1.safetensors")
    assert os.listdir(tmp_path) == ["source"]


def test_reading_a_tensor_that_was_changed_in_place_is_an_error(tmp_path: Path) -> None:
    plain_source(tmp_path / "source", 1.0)
    with sx.open_checkpoint(tmp_path / "source") as held:
        overwrite_in_place(tmp_path / "source", 2.0)
        assert np.unique(held["t0"].read()).tolist() == [1.0]
        with pytest.raises(ReplacedError, match="read it again"):
            held["t1"].read()


NONCE, PLAN = "0123456789abcdef", "a" * 32


def test_between_the_two_renames_of_a_replacement_the_new_checkpoint_is_read(tmp_path: Path) -> None:
    """A publisher that is killed there leaves this on a file system that cannot exchange names."""
    export(tmp_path / "out", 1.0)
    export(tmp_path / "new", 2.0)
    os.rename(tmp_path / "out", tmp_path / f".out.{NONCE}.replaced")
    os.rename(tmp_path / "new", tmp_path / f".out.{PLAN}.{NONCE}.partial")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "latest").symlink_to("newest")
    (tmp_path / "links" / "newest").symlink_to("../out")
    for path in (tmp_path / "out", tmp_path / "links" / "latest"):
        with sx.open_checkpoint(path) as found:
            assert np.unique(found["t0"].read()).tolist() == [2.0]
        assert not verify(path).findings
    os.rename(tmp_path / f".out.{PLAN}.{NONCE}.partial", tmp_path / f".out.{PLAN}.{'f' * 16}.partial")
    for path in (tmp_path / "out", tmp_path / "links" / "latest"):
        with pytest.raises(NotFoundError):  # of another publisher that has not finished it
            sx.open_checkpoint(path)


def test_a_partial_directory_alone_is_not_read(tmp_path: Path) -> None:
    export(tmp_path / "new", 2.0)
    os.rename(tmp_path / "new", tmp_path / f".out.{PLAN}.{NONCE}.partial")
    with pytest.raises(NotFoundError):
        sx.open_checkpoint(tmp_path / "out")


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
