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
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from readers import NONCE, PLAN, export, save, state_of
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from sweeps import slow
from warm_python import warm_python

import statexchange as sx
from statexchange.errors import (
    NotFoundError,
    ReplacedError,
)
from statexchange.report.verify import verify

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
