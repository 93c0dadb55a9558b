"""Checkpoints in object stores are read by ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from commands import CommandLine
from fsspec import AbstractFileSystem
from objects import TENSORS, put
from safetensors.torch import load_file, save_file

import statexchange as sx
from statexchange.formats.registry import open_source
from statexchange.storage.location import is_remote, open_path


def test_a_hugging_face_directory_at_a_url_is_opened_merged_and_loaded(store: Any, tmp_path: Path) -> None:
    sx.export_checkpoint(TENSORS, tmp_path / "local", max_shard_size=200_000)
    url = put(store, tmp_path / "local", "bucket/model")
    opened = sx.open_checkpoint(url)
    assert {name: opened[name].shape for name in opened} == {name: tuple(t.shape) for name, t in TENSORS.items()}
    assert (opened["a"].read() == TENSORS["a"].numpy()).all()
    sx.merge_checkpoint(url, tmp_path / "merged")
    save_file(TENSORS, tmp_path / "plain.safetensors", {"format": "pt"})
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    live = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    sx.load_checkpoint(live, url)
    assert all(torch.equal(live[name], TENSORS[name]) for name in TENSORS)


def test_a_single_file_at_a_url_is_merged(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    url = put(store, tmp_path, "bucket") + "/model.safetensors"
    sx.merge_checkpoint(url, tmp_path / "merged")
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")["a"], TENSORS["a"])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about saving without ranks
def test_torchs_own_formats_at_a_url_are_merged(store: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(TENSORS, checkpoint_id=str(tmp_path / "dcp"))
    (tmp_path / "files").mkdir()
    torch.save(TENSORS, tmp_path / "files/model.pt")
    for kind in ("dcp", "files"):
        url = put(store, tmp_path / kind, kind)
        sx.merge_checkpoint(url, tmp_path / f"merged-{kind}")
        merged = load_file(tmp_path / f"merged-{kind}/model.safetensors")
        assert all(torch.equal(merged[name], TENSORS[name]) for name in TENSORS)


def test_a_workspace_that_was_copied_to_a_url_is_read(store: Any, tmp_path: Path) -> None:
    for value in range(2):
        sx.NFSWorkspace(tmp_path / "ws", run="job").write_configs_and_weights({"k": value}, TENSORS)
    url = put(store, tmp_path / "ws", "bucket/ws")
    for place in (url, f"{url}/job", f"{url}/job/000002"):
        source = open_source(place)
        assert (source.kind, source.run, source.round, source.world_size) == ("workspace", "job", 2, 1)
    assert sx.NFSWorkspace(url).read_configs_and_weights_from_rank(0)[0] == {"k": 1}
    live = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    sx.load_checkpoint(live, url)
    assert all(torch.equal(live[name], TENSORS[name]) for name in TENSORS)
    (file,) = [path for path in store.find("/bucket/ws/job/000002") if path.endswith(".safetensors")]
    assert len(open_source(f"memory:/{file}").files) == 1


def test_a_save_that_was_copied_to_a_url_is_read(store: Any, tmp_path: Path) -> None:
    sx.save_checkpoint({"model": TENSORS, "step": 1}, tmp_path / "saved")
    url = put(store, tmp_path / "saved", "bucket/saved")
    source = open_source(url)
    assert (source.kind, source.step, source.round, source.world_size) == ("save", None, None, 1)
    live = {"model": {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, "step": 0}
    sx.load_checkpoint(live, url)
    assert live["step"] == 1
    assert all(torch.equal(live["model"][name], TENSORS[name]) for name in TENSORS)
    sx.merge_checkpoint(url, tmp_path / "merged", rename=[(r"^model\.", "")])
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")["a"], TENSORS["a"])
    file = f"{url}/rank-00000-of-00001.safetensors"
    assert len(open_source(file).files) == 1
    manifest = store.cat_file("/bucket/saved/save.json")
    store.rm_file("/bucket/saved/save.json")
    for place in (url, file):
        with pytest.raises(sx.errors.IncompleteError, match=r"save\.json.*missing"):
            open_source(place)
    store.pipe_file("/bucket/saved/save.json", manifest)
    store.rm_file("/bucket/saved/rank-00000-of-00001.safetensors")
    with pytest.raises(sx.errors.IncompleteError, match="file is missing") as caught:
        open_source(url)
    assert caught.value.rank == 0


def test_absent_urls_and_unknown_schemes_are_errors(store: Any) -> None:
    for url in ("memory://nowhere", "memory://my-bucket/nowhere"):
        with pytest.raises(sx.errors.NotFoundError, match=rf"no such path.*{url}"):
            open_source(url)
    with pytest.raises(ValueError, match="no file system"):
        open_source("carrier-pigeon://roof")
    with pytest.raises(sx.errors.MissingExtraError, match=r'pip install "statexchange\[gcs\]"'):
        open_source("gs://bucket/x")


def test_a_truncated_object_is_detected(store: Any, tmp_path: Path) -> None:
    sx.export_checkpoint(TENSORS, tmp_path / "local")
    url = put(store, tmp_path / "local", "model")
    whole = store.cat_file("/model/model.safetensors")
    store.pipe_file("/model/model.safetensors", whole[:-5])
    with pytest.raises(sx.errors.CorruptError, match=r"model\.safetensors"):
        sx.merge_checkpoint(url, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "statexchange.json"])
def test_an_object_that_is_removed_while_it_is_read_is_not_an_absent_path(
    name: str, store: Any, tmp_path: Path
) -> None:
    """A publisher that overwrites first removes the objects; a job that resumes must not find "nothing was saved"."""
    sx.export_checkpoint(TENSORS, tmp_path / "local")
    url = put(store, tmp_path / "local", "model")
    with sx.open_checkpoint(url) as checkpoint:
        store.rm("/model", recursive=True)
        with pytest.raises(sx.errors.ReplacedError, match="removed while"):
            checkpoint["a"].read()
    put(store, tmp_path / "local", "model")
    opened = open_path(url)
    file = opened.store.open(name)
    store.rm(f"/model/{name}")
    with pytest.raises(sx.errors.ReplacedError, match="removed while") as caught:
        file.read_all()
    assert caught.value.path == f"{url}/{name}"


class Refusing(AbstractFileSystem):  # type: ignore[misc]
    """A file system whose every call fails."""

    protocol = "refusing"

    def info(self, *arguments: Any, **options: Any) -> Any:
        raise OSError(5, "the disk is on fire")

    ls = pipe_file = _open = info


def test_the_failure_of_a_store_is_one_message(tmp_path: Path) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    save_file(TENSORS, tmp_path / "model.safetensors")
    url = "refusing://bucket/x"
    calls: list[Callable[[], Any]] = [
        lambda: sx.open_checkpoint(url),
        lambda: sx.load_checkpoint({}, url),
        lambda: sx.merge_checkpoint(url, tmp_path / "out"),
        lambda: sx.merge_checkpoint(tmp_path / "model.safetensors", url),
        lambda: sx.merge_checkpoint(tmp_path / "model.safetensors", url, dry_run=True),
        lambda: sx.export_checkpoint(TENSORS, tmp_path / "out", files_from=url),
    ]
    for call in calls:
        with pytest.raises(sx.errors.StorageError, match="on fire") as caught:
            call()
        assert str(caught.value).count("cannot") == 1
        assert str(caught.value).count(url) == 1


def test_credentials_stay_out_of_messages() -> None:
    with pytest.raises(sx.StateExchangeError) as caught:
        open_source("http://joe:secret@127.0.0.1:9/x.safetensors?token=hidden")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_the_command_line_takes_urls(tmp_path: Path, call: CommandLine) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source, out = f"file://{tmp_path}/model.safetensors", f"file://{tmp_path}/out"
    for arguments in (["merge", source, out], ["verify", out], ["ls", out], ["info", out]):
        code, _, err = call(*arguments)
        assert code == 0, err
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], TENSORS["a"])


def test_urls_are_distinguished_from_paths() -> None:
    assert is_remote("s3://bucket/key")
    paths = ("shm://name", "file:///a/path", "/a/path", "relative", "C:\\path")
    assert not any(map(is_remote, paths))
