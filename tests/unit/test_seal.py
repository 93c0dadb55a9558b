"""``seal`` adds digests to checkpoints that exist, changes nothing else, and refuses what it cannot prove."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine, command_environment
from safetensors.numpy import save_file
from stored import flip_bit
from warm_python import warm_python

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.checkpoint.seal import seal_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.report.verify import verify

MANIFEST = "statexchange.json"


def write_files(folder: Path) -> Path:
    """Write a Hugging Face directory of two files with an index, and others beside them."""
    folder.mkdir(parents=True)
    a = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "a.bias": np.zeros(3, np.float16)}
    b = {"b.weight": np.arange(700000, dtype=np.int64), "empty": np.zeros((0, 3), np.float32)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(a, folder / names[0], metadata={"format": "pt"})
    save_file(b, folder / names[1], metadata={"format": "pt"})
    weight_map = {**dict.fromkeys(a, names[0]), **dict.fromkeys(b, names[1])}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"onnx")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "model")


def files_and_attributes(folder: Path) -> dict[str, Any]:
    """Return content, modification time, mode and inode of each file but the manifest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            attributes = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path)] = (digest, attributes.st_mtime_ns, attributes.st_mode, attributes.st_ino)
    return found


def test_nothing_but_the_manifest_is_new(folder: Path) -> None:
    before, listed = files_and_attributes(folder), set(os.listdir(folder))
    assert verify(folder).num_unproven == 4
    report = seal_checkpoint(folder)
    assert files_and_attributes(folder) == before
    assert set(os.listdir(folder)) == listed | {MANIFEST}
    assert (report.num_tensors, report.num_files, report.dry_run) == (4, 5, False)
    checked = verify(folder)
    assert (checked.findings, checked.num_unproven) == ((), 0)
    umask = os.umask(0)
    os.umask(umask)
    assert (folder / MANIFEST).stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_a_flipped_bit_is_found(folder: Path, at: str) -> None:
    seal_checkpoint(folder)
    path = folder / "model-00002-of-00002.safetensors"
    flip_bit(path, {"first": -8 * 700_000, "middle": -4 * 700_000, "last": -1}[at], bit=2)
    (finding,) = verify(folder).findings
    assert isinstance(finding, CorruptError)
    assert finding.name == "b.weight"
    with sx.open_checkpoint(folder) as checkpoint, pytest.raises(CorruptError):
        checkpoint["b.weight"].read()


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def change_a_letter(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"l", b"L", 1))


CHANGES: dict[str, tuple[str, Callable[[Path], None], type[StateExchangeError]]] = {
    "a small file is appended to": ("config.json", append, CorruptError),
    "a letter of a small file": ("config.json", change_a_letter, CorruptError),
    "a small file is removed": ("config.json", Path.unlink, IncompleteError),
    "a file of tensors is appended to": ("model-00001-of-00002.safetensors", append, CorruptError),
    "a file of tensors is removed": ("model-00001-of-00002.safetensors", Path.unlink, IncompleteError),
    "an empty file is filled": ("README.md", append, CorruptError),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_later_is_named(folder: Path, change: str) -> None:
    name, act, kind = CHANGES[change]
    seal_checkpoint(folder)
    act(folder / name)
    findings = verify(folder).findings
    assert any(isinstance(one, kind) and str(one.path).endswith(name) for one in findings), findings


def test_the_text_in_a_header_is_sealed(folder: Path) -> None:
    seal_checkpoint(folder)
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"np"'))
    (finding,) = verify(folder).findings
    assert str(finding).startswith("bytes of the header differ from their digest in the manifest")


def test_a_file_of_the_same_size_that_replaces_another_is_named(folder: Path) -> None:
    seal_checkpoint(folder)
    name = "model-00001-of-00002.safetensors"
    other = {"a.weight": np.ones((3, 4), np.float32), "a.bias": np.zeros(3, np.float16)}
    save_file(other, folder / name, metadata={"format": "pt"})
    (finding,) = verify(folder).findings
    assert (type(finding), finding.name) == (CorruptError, "a.weight")


def test_a_single_file_seals_its_directory(tmp_path: Path) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    report = seal_checkpoint(tmp_path / "model.safetensors")
    assert report.path == str(tmp_path)
    assert verify(tmp_path).num_unproven == 0


def test_sealing_one_of_several_files_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="seal the directory"):
        seal_checkpoint(folder / "model-00001-of-00002.safetensors")


def test_a_link_to_a_file_is_followed(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(blobs / name)
    seal_checkpoint(folder)
    assert verify(folder).findings == ()
    assert (folder / "config.json").is_symlink()


def test_a_manifest_is_replaced_only_if_asked(folder: Path) -> None:
    seal_checkpoint(folder)
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(TargetExistsError, match="--overwrite"):
        seal_checkpoint(folder)
    assert (folder / MANIFEST).read_bytes() == before
    append(folder / "config.json")
    assert verify(folder).findings
    seal_checkpoint(folder, overwrite=True)
    assert verify(folder).findings == ()
    assert [name for name in os.listdir(folder) if name.startswith(".tmp")] == []


def test_an_export_that_was_changed_is_sealed_again_with_its_tied_names(tmp_path: Path) -> None:
    tied = np.ones((2, 3), np.float32)
    sx.export_checkpoint({"embed.weight": tied, "lm_head.weight": tied}, tmp_path / "out")
    aliases = json.loads((tmp_path / "out" / MANIFEST).read_text())["aliases"]
    assert aliases
    (name,) = set(aliases.values())
    save_file({name: 2 * tied}, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert verify(tmp_path / "out").findings
    seal_checkpoint(tmp_path / "out", overwrite=True)
    assert verify(tmp_path / "out").findings == ()
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["aliases"] == aliases


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 3, "tensors": {}}', '{"aliases": {"b": 1}, "tensors": {}}'])
def test_a_manifest_that_cannot_be_read_is_not_replaced(text: str, folder: Path) -> None:
    """It may have names of tied tensors, which no other file has."""
    (folder / MANIFEST).write_text(text)
    with pytest.raises(TargetExistsError):
        seal_checkpoint(folder)
    with pytest.raises(CorruptError, match="tied"):
        seal_checkpoint(folder, overwrite=True)
    assert (folder / MANIFEST).read_text() == text
    (folder / MANIFEST).unlink()
    seal_checkpoint(folder)
    assert verify(folder).findings == ()


def test_a_dry_run_writes_nothing(folder: Path, call: CommandLine) -> None:
    listed = set(os.listdir(folder))
    code, out, _ = call("seal", folder, "--dry-run")
    assert code == 0
    assert out.startswith("would write ")
    assert set(os.listdir(folder)) == listed


def test_no_publisher_replaces_a_sealed_directory(folder: Path) -> None:
    seal_checkpoint(folder)
    with pytest.raises(UnsafeError, match="refused to overwrite"):
        sx.export_checkpoint({"w": np.ones(3)}, folder, overwrite=True)
    assert verify(folder).findings == ()


def test_a_sealed_directory_is_merged_with_its_digests(folder: Path, tmp_path: Path) -> None:
    seal_checkpoint(folder)
    merge_checkpoint(folder, tmp_path / "merged")
    assert verify(tmp_path / "merged").findings == ()
    assert sx.diff_checkpoints(folder, tmp_path / "merged").equal


def truncate(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 4)


def forget_in_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["a.bias"]
    path.write_text(json.dumps(index))


def copy_a_tensor(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00002.safetensors")


def rename_with_a_space(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        path.rename(folder / f"my model {number}.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], None], type[StateExchangeError], str]] = {
    "truncated": (truncate, CorruptError, "model-00001"),
    "a file is missing": (lambda at: (at / "model-00002-of-00002.safetensors").unlink(), IncompleteError, "00002"),
    "not in the index": (forget_in_index, CorruptError, "a.bias"),
    "twice": (copy_a_tensor, UnsupportedError, "a.bias|a.weight"),
    "a name that readers refuse": (rename_with_a_space, CorruptError, "my model"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_not_sealed(folder: Path, how: str) -> None:
    breaks, kind, named = BROKEN[how]
    breaks(folder)
    for dry_run in (True, False):
        with pytest.raises(kind, match=named):
            seal_checkpoint(folder, dry_run=dry_run)
    assert MANIFEST not in os.listdir(folder)


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    sx.save_checkpoint(state, tmp_path / "save")
    with pytest.raises(UnsupportedError, match="digests of its"):
        seal_checkpoint(tmp_path / "save")
    sx.Checkpoints(tmp_path / "saves").save(state, 1)
    with pytest.raises(UnsupportedError, match="digests of their"):
        seal_checkpoint(tmp_path / "saves")
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="statexchange merge"):
        seal_checkpoint(tmp_path / "model.pt")
    with pytest.raises(NotFoundError):
        seal_checkpoint(tmp_path / "nowhere")


def test_parts_of_tensors_are_refused_by_name(tmp_path: Path) -> None:
    parts = {"w": {"saved_offsets": [2, 0]}}
    save_file(
        {"w": np.ones((2, 3), np.float32)},
        tmp_path / "shard-00002-model-00001-of-00001.safetensors",
        metadata={"DCP_SHARDING_INFO": json.dumps(parts)},
    )
    parts = {"w": {"saved_offsets": [0, 0]}}
    save_file(
        {"w": np.ones((2, 3), np.float32)},
        tmp_path / "shard-00001-model-00001-of-00001.safetensors",
        metadata={"DCP_SHARDING_INFO": json.dumps(parts)},
    )
    with pytest.raises(UnsupportedError, match="parts of tensors"):
        seal_checkpoint(tmp_path)


@pytest.mark.parametrize("change", ["grows", "is touched", "is added", "is removed"])
def test_a_file_that_changes_while_it_is_sealed_is_an_error(folder: Path, change: str) -> None:
    def disturb(done: int, total: int) -> None:
        assert 0 < done <= total
        if change == "grows":
            append(folder / "model-00001-of-00002.safetensors")
        elif change == "is touched":
            os.utime(folder / "config.json", ns=(1, 1))
        elif change == "is added":
            (folder / "new.txt").touch()
        else:
            (folder / "README.md").unlink(missing_ok=True)

    with pytest.raises(ReplacedError):
        seal_checkpoint(folder, on_progress=disturb)
    assert MANIFEST not in os.listdir(folder)


def test_of_two_seals_at_once_only_one_writes_its_manifest(folder: Path) -> None:
    def seal_first(done: int, total: int) -> None:
        if done == total:
            seal_checkpoint(folder)

    with pytest.raises((TargetExistsError, ReplacedError)):
        seal_checkpoint(folder, on_progress=seal_first)
    assert verify(folder).findings == ()


def test_a_read_only_directory_is_refused_before_its_files_are_read() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = write_files(Path(place) / "model")
        for path in (Path(place), *folder.glob("*.*")):
            path.chmod(0o755)
        folder.chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:  # root may write everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(StorageError, match="cannot write"):
                seal_checkpoint(folder, on_progress=lambda done, total: pytest.fail("it was read"))
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_objects_in_a_store_are_sealed(tmp_path: Path) -> None:
    import fsspec

    files = write_files(tmp_path / "model")
    system = fsspec.filesystem("memory")
    for path in files.glob("*.*"):
        system.pipe_file(f"/sealed/{path.name}", path.read_bytes())
    try:
        seal_checkpoint("memory://sealed")
        assert (verify("memory://sealed").findings, verify("memory://sealed").num_unproven) == ((), 0)
        with pytest.raises(TargetExistsError):
            seal_checkpoint("memory://sealed")
        system.pipe_file("/sealed/config.json", b"{}")
        assert verify("memory://sealed").findings
        seal_checkpoint("memory://sealed", overwrite=True)
        assert verify("memory://sealed").findings == ()
    finally:
        system.rm("/sealed", recursive=True)


def test_a_rank_other_than_0_does_not_seal(folder: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert call("seal", folder)[0] == 7
    assert MANIFEST not in os.listdir(folder)


def test_json_has_the_counts_or_the_code_of_the_error(folder: Path, call: CommandLine) -> None:
    code, envelope = call.json("seal", folder)
    assert code == 0
    data = envelope["data"]
    assert (data["num_tensors"], data["num_files"], data["dry_run"]) == (4, 5, False)
    code, envelope = call.json("seal", folder)
    assert (code, envelope["code"]) == (7, "UNSAFE")


@pytest.mark.parametrize("sealed", [[], {"a": 1}, {"a": [1, 2, "x"]}, {"a": [1, 1, 3]}, {"a": [-1, -1, "x"]}])
def test_a_manifest_with_broken_seals_is_corrupt(folder: Path, sealed: object) -> None:
    seal_checkpoint(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["sealed"] = sealed
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert any(isinstance(one, CorruptError) for one in verify(folder).findings)


def test_a_sealed_name_does_not_lead_out_of_the_directory(folder: Path, tmp_path: Path) -> None:
    seal_checkpoint(folder)
    (tmp_path / "secret").write_text("x")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["sealed"]["../secret"] = [1, 1, "0" * 32]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (finding,) = verify(folder).findings
    assert isinstance(finding, UnsafeError)


def test_an_interrupted_seal_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(1)}, path)
    program = (
        "import sys; from statexchange.cli.main import main\n"
        "def slow(*_): print('reading', flush=True); __import__('time').sleep(60)\n"
        "def hook(event, about): event == 'statexchange.storage' and about[0] == 'link' and slow()\n"
        "sys.addaudithook(hook)\n"
        "main(['seal', sys.argv[1]])"
    )
    command = [warm_python("commands"), "-c", program, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=command_environment(), text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_that_is_replaced_by_a_rename_while_it_is_sealed_is_an_error(folder: Path, tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    changed = tmp_path / "changed"
    changed.write_bytes((folder / name).read_bytes())
    flip_bit(changed, -1)

    def disturb(done: int, total: int) -> None:
        if done == total and changed.exists():
            changed.rename(folder / name)

    with pytest.raises(ReplacedError):
        seal_checkpoint(folder, on_progress=disturb)
    assert MANIFEST not in os.listdir(folder)
