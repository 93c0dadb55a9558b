"""Opening: path resolution, the budget of descriptors, and which files stay open."""

from __future__ import annotations

import copy
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from programs import require_root
from safetensors.torch import save_file

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.storage.location import open_path
from statexchange.storage.workspace import Workspace

NOBODY = 65534


def publish(path: Path, value: float) -> None:
    sx.export_checkpoint({"a": np.full(3, value)}, path)


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "/etc/passwd", "below/file"])
def test_a_name_that_leads_out_of_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    publish(tmp_path / "ck", 1.0)
    memory = fsspec.filesystem("memory")
    memory.put(os.fspath(tmp_path / "ck"), f"{tmp_path}/ck", recursive=True)
    for path in (f"{tmp_path}/ck", f"memory:/{tmp_path}/ck"):
        with open_path(path) as opened:
            assert opened.store.open("model.safetensors").size > 0
            with pytest.raises(sx.errors.UnsafeError, match="not the name"):
                opened.store.open(name)


def test_two_dots_after_a_link_mean_the_parent_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "ck", 1.0)
    publish(tmp_path / "real" / "ck", 2.0)
    (tmp_path / "real" / "sub").mkdir()
    (tmp_path / "link").symlink_to("real/sub")
    monkeypatch.chdir(tmp_path)
    for path in ("link/../ck", tmp_path / "link" / ".." / "ck"):
        assert sx.open_checkpoint(path)["a"].read()[0] == 2.0
    monkeypatch.chdir(tmp_path / "real" / "ck")
    for path in ("", ".", "./", "../ck/", "../../real/ck/."):
        if path:
            assert sx.open_checkpoint(path)["a"].read()[0] == 2.0
    monkeypatch.chdir(tmp_path / "real" / "sub")
    assert len(sx.open_checkpoint("../ck")) == 1


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_broken_link_is_a_missing_file(kind: str, tmp_path: Path) -> None:
    """A cleaned cache of downloads leaves such links."""
    if kind == "pt":
        torch.save({"a": torch.ones(2)}, tmp_path / "a0.pt")
    else:
        save_file({"a": torch.ones(2)}, tmp_path / "a0.safetensors")
    (tmp_path / f"a1.{kind}").symlink_to(tmp_path / "gone")
    with pytest.raises(sx.errors.IncompleteError, match="missing") as caught:
        sx.merge_checkpoint(tmp_path, tmp_path / "out")
    assert caught.value.path == str(tmp_path / f"a1.{kind}")
    assert [type(finding) for finding in verify(tmp_path).findings] == [sx.errors.IncompleteError]


@pytest.mark.parametrize("target", ["gone", "gone/below"])
def test_a_link_to_nothing_is_named_with_what_it_says_and_not_waited_for(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds} s for a link to nothing")

    monkeypatch.setattr("time.sleep", fail)
    (tmp_path / "latest").symlink_to("newest")
    (tmp_path / "newest").symlink_to(target)
    with pytest.raises(sx.errors.NotFoundError, match=r"link leads.*newest") as caught:
        sx.open_checkpoint(tmp_path / "latest")
    assert caught.value.path == str(tmp_path / "latest")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.report.summary import summarize
from statexchange.storage.workspace import Workspace
many, path, plain = sys.argv[1:]
held = [sx.open_checkpoint(many) for _ in range(5)]
assert all(len(checkpoint) == 100 for checkpoint in held)
assert sum(t.read().sum() for t in held[0].values()) == sum(t.read().sum() for t in held[4].values()) == 9900.0
assert summarize(path + "/job").num_tensors == 1
workspace = Workspace(path)
workspace.write([], run="job", round=2, rank=0, world_size=1)
assert summarize(path + "/job").num_tensors == 0
assert summarize(plain).kind == "torch"
print("ok")
"""


def test_few_descriptors_serve_many_files_rounds_and_directories(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(100):
        save_file({f"t{number}": torch.full((2,), float(number))}, tmp_path / "many" / f"{number:03d}.safetensors")
    source = Workspace(tmp_path / "ws")
    for number in range(100):
        source.write([], run=f"run{number % 50}", round=1 + number // 50, rank=0, world_size=1)
    sx.NFSWorkspace(tmp_path / "ws", run="job").write_configs_and_weights(None, {"a": np.ones(1)})
    (tmp_path / "plain").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "plain" / "a.pt")
    for number in range(100):
        (tmp_path / "plain" / f"d{number}").mkdir()
    command = [sys.executable, "-c", LIMITED, *(str(tmp_path / name) for name in ("many", "ws", "plain"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr


REPLACED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
import json, os
import numpy as np
import statexchange as sx
from safetensors.numpy import save_file

path, how = sys.argv[1:]
with sx.open_checkpoint(path) as held:
    if how == "files":
        for name in os.listdir(path):
            (tensor,) = (tensor for tensor in held if name == f"{tensor}.safetensors")
            save_file({tensor: np.full(2, 7.0, np.float32)}, path + "/.new")
            os.replace(path + "/.new", f"{path}/{name}")
    else:
        state = {f"t{n:03d}": np.full(2, 7.0, np.float32) for n in range(100)}
        sx.export_checkpoint(state, path, overwrite=True, max_shard_size=8)
    values, replaced = set(), 0
    for name in held:
        try:
            values |= set(held[name].read().tolist())
        except sx.errors.ReplacedError:
            replaced += 1
print(json.dumps([sorted(values), replaced]))
"""


@pytest.mark.parametrize("how", ["files", "directory"])
def test_a_file_that_is_opened_again_is_the_one_that_was_opened(how: str, tmp_path: Path) -> None:
    """Files are closed and opened again where a checkpoint has more of them than descriptors are kept open."""
    path = tmp_path / "many"
    if how == "files":
        path.mkdir()
        for number in range(100):
            save_file({f"t{number:03d}": torch.full((2,), 1.0)}, path / f"t{number:03d}.safetensors")
    else:
        state = {f"t{number:03d}": np.full(2, 1.0, np.float32) for number in range(100)}
        sx.export_checkpoint(state, path, max_shard_size=8)
    done = subprocess.run([sys.executable, "-c", REPLACED, str(path), how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values, replaced = json.loads(done.stdout)
    assert values in ([], [1.0])
    assert replaced > 50


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_an_open_checkpoint_is_neither_pickled_nor_copied(scheme: str, tmp_path: Path) -> None:
    publish(tmp_path / "out", 3.0)
    opened = sx.open_checkpoint(f"{scheme}{tmp_path}/out")
    assert opened["a"].read().tolist() == [3.0] * 3
    for value in (opened, opened["a"]):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(sx.errors.UnsupportedError, match="open it again"):
                copied(value)


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_buffer_is_filled_from_an_offset_or_the_file_is_truncated(scheme: str, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(5000)
    (tmp_path / "x").write_bytes(content)
    with open_path(f"{scheme}{tmp_path}") as opened:
        file = opened.store.open("x")
        for nbytes in (0, 9, 4993):
            buffer = memoryview(bytearray(nbytes))
            file.read_into(buffer, 7)
            assert buffer == content[7 : 7 + nbytes]
        with pytest.raises(sx.errors.CorruptError, match="truncated"):
            file.read_into(memoryview(bytearray(4994)), 7)
        os.truncate(tmp_path / "x", 4000)
        with pytest.raises(sx.errors.ReplacedError, match="changed while"):
            file.read_into(memoryview(bytearray(4993)), 7)


def test_a_closed_file_is_not_opened_again(tmp_path: Path) -> None:
    publish(tmp_path / "out", 3.0)
    opened = sx.open_checkpoint(tmp_path / "out")
    opened.close()
    with pytest.raises(sx.errors.InvalidArgumentError, match="has been closed"):
        opened["a"].read()


def test_a_directory_whose_name_is_no_run_is_not_opened() -> None:
    """lost+found, which only root may open; the reader is another user."""
    require_root()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "ws"
        sx.NFSWorkspace(workspace, run="job").write_configs_and_weights(None, {"a": np.ones(2)})
        for path in (Path(folder), workspace, *workspace.rglob("*")):
            os.chown(path, NOBODY, -1)
        (workspace / "lost+found").mkdir(mode=0o700)
        os.seteuid(NOBODY)
        try:
            assert summarize(workspace).num_tensors == 1
        finally:
            os.seteuid(0)


Call = Callable[[Any], Any]
STATE = {"w": np.ones(3)}
CALLS: dict[str, Call] = {
    "export": lambda path: sx.export_checkpoint(STATE, path),
    "export in the background": lambda path: sx.export_checkpoint(STATE, path, background=True).result(30),
    "files_from": lambda path: sx.export_checkpoint(STATE, "out", files_from=[path]),
    "save": lambda path: sx.save_checkpoint(STATE, path),
    "save in the background": lambda path: sx.save_checkpoint(STATE, path, background=True).result(30),
    "load": lambda path: sx.load_checkpoint(dict(STATE), path),
    "merge from": lambda path: merge_checkpoint(path, "out"),
    "merge to": lambda path: merge_checkpoint("checkpoint", path),
    "layout": lambda path: merge_checkpoint("checkpoint", "out", layout=path),
    "open": lambda path: sx.open_checkpoint(path),
    "summarize": summarize,
    "verify": verify,
    "gather": lambda path: list(ExitStack().enter_context(sx.gather_state(STATE, workspace=path))),
    "workspace": Workspace,
    "NFSWorkspace": sx.NFSWorkspace,
}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint in the current directory, which also has the user's home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "checkpoint/model.safetensors")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (call, path)
        for call in CALLS
        for path in (b"path", "nu\0ll", "file:///nu%00ll", 7, "")
        if (call, path) != ("NFSWorkspace", "")  # the current directory is the checkpoint
    ],
)
def test_every_call_refuses_what_is_no_path(call: str, path: Any, checkpoint: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"path|patterns") as caught:
        CALLS[call](path)
    assert sorted(os.listdir()) == ["checkpoint", "home"], caught.value


def test_a_missing_relative_path_is_shown_as_an_absolute_one(checkpoint: Path) -> None:
    with pytest.raises(sx.errors.NotFoundError) as caught:
        sx.load_checkpoint(STATE, "no/such")
    assert caught.value.path == str(checkpoint.parent / "no/such")


def test_an_error_of_a_store_is_wrapped_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x"  # nobody listens
        with pytest.raises(sx.errors.StorageError) as caught:
            sx.load_checkpoint(STATE, url)
    text = str(caught.value)
    assert (text.count("cannot look up"), text.count(url)) == (1, 1)


@pytest.mark.parametrize("call", ["export", "export in the background", "save", "save in the background", "merge to"])
def test_a_tilde_is_the_home_directory_where_a_checkpoint_is_written(call: str, checkpoint: Path) -> None:
    report = CALLS[call]("~/out")
    assert report.path == str(checkpoint.parent / "home/out")
    assert sorted(os.listdir()) == ["checkpoint", "home"]
    assert sx.open_checkpoint(Path("~/out"))["w"].read().tolist() == [1, 1, 1]
    name = "save.json" if call.startswith("save") else "model.safetensors"
    assert (checkpoint.parent / "home/out" / name).exists()


@pytest.mark.parametrize("make", [Workspace, sx.NFSWorkspace])
def test_a_tilde_is_the_home_directory_where_a_workspace_is_written(make: Call, checkpoint: Path) -> None:
    made = make("~/saved")
    if isinstance(made, sx.NFSWorkspace):
        made.write_configs_and_weights(None, STATE)
    else:
        assert made.path == str(checkpoint.parent / "home/saved")
    assert sorted(os.listdir()) == ["checkpoint", "home"]


@pytest.mark.parametrize("call", ["files_from", "load", "merge from", "open", "summarize", "verify", "layout"])
def test_errors_show_the_absolute_path(call: str, checkpoint: Path) -> None:
    for path, meant in (("no/where", checkpoint.parent / "no/where"), ("~/x", checkpoint.parent / "home/x")):
        with pytest.raises(sx.errors.NotFoundError, match="no such path") as caught:
            CALLS[call](path)
        assert caught.value.path == str(meant)


@pytest.mark.parametrize(("option", "what"), [("layout", "a layout"), ("convert", "a conversion")])
def test_an_option_that_is_no_json_file_is_refused(option: str, what: str, checkpoint: Path) -> None:
    Path("half.json").write_text('{"rules": [')
    Path("folder.json").mkdir()
    for path, problem in (("folder.json", "a directory"), ("half.json", "none: broken JSON: Expecting value")):
        with pytest.raises(sx.errors.InvalidArgumentError, match=rf"{what} is .*{problem}"):
            merge_checkpoint("checkpoint", "out", **{option: path})
