"""Checkpoints in object stores: read by ranges, published object by object with the manifest last."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import statexchange as sx
from statexchange.sources import open_source
from statexchange.storage import object_store

TENSORS = {
    "a": torch.arange(70_000.0).reshape(700, 100),
    "b.c": torch.arange(9).to(torch.int16),
    "z": torch.tensor(2.5),
}


@pytest.fixture
def store() -> Iterator[Any]:
    """An empty store, which lives in this process."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def put(store: Any, directory: Path, name: str) -> str:
    store.put(f"{directory}/", f"/{name}/", recursive=True)
    return f"memory://{name}"


def objects(store: Any, name: str) -> dict[str, bytes]:
    return {path.rpartition("/")[2]: store.cat_file(path) for path in store.find(f"/{name}")}


def test_a_hugging_face_directory_at_a_url(store: Any, tmp_path: Path) -> None:
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


def test_a_single_file_at_a_url(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    url = put(store, tmp_path, "bucket") + "/model.safetensors"
    sx.merge_checkpoint(url, tmp_path / "merged")
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")["a"], TENSORS["a"])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about saving without ranks
def test_torchs_own_formats_at_a_url(store: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(TENSORS, checkpoint_id=str(tmp_path / "dcp"))
    (tmp_path / "files").mkdir()
    torch.save(TENSORS, tmp_path / "files/model.pt")
    for kind in ("dcp", "files"):
        url = put(store, tmp_path / kind, kind)
        sx.merge_checkpoint(url, tmp_path / f"merged-{kind}")
        merged = load_file(tmp_path / f"merged-{kind}/model.safetensors")
        assert all(torch.equal(merged[name], TENSORS[name]) for name in TENSORS)


def test_a_workspace_that_was_copied_to_a_url(store: Any, tmp_path: Path) -> None:
    for step in range(2):
        sx.save_checkpoint({"model": TENSORS, "step": step}, tmp_path / "saved")
    url = put(store, tmp_path / "saved", "bucket/saved")
    (run,) = os.listdir(tmp_path / "saved")
    newest = sorted(os.listdir(tmp_path / "saved" / run))[-1]
    for place in (url, f"{url}/{run}", f"{url}/{run}/{newest}"):
        source = open_source(place)
        assert (source.kind, source.run, source.round, source.world_size) == ("workspace", run, int(newest), 1)
    live = {"model": {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, "step": 0}
    sx.load_checkpoint(live, url)
    assert live["step"] == 1
    assert all(torch.equal(live["model"][name], TENSORS[name]) for name in TENSORS)
    sx.merge_checkpoint(url, tmp_path / "merged", rename=[(r"^model\.", "")])
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")["a"], TENSORS["a"])
    (file,) = [path for path in store.find(f"/bucket/saved/{run}/{newest}") if path.endswith(".safetensors")]
    assert len(open_source(f"memory:/{file}").holders) == 1
    store.rm_file(file)
    with pytest.raises(sx.IncompleteError, match="this rank's file is missing"):
        open_source(url)


def test_nothing_at_a_url_and_stores_that_are_not_known(store: Any) -> None:
    with pytest.raises(sx.NotFoundError, match=r"no such path.*memory://nowhere"):
        open_source("memory://nowhere")
    with pytest.raises(ValueError, match="no file system for this"):
        open_source("carrier-pigeon://roof")
    with pytest.raises(sx.MissingExtraError, match=r'pip install "statexchange\[s3\]"'):
        open_source("s3://bucket/x")


def test_an_object_that_ends_too_early_is_found(store: Any, tmp_path: Path) -> None:
    sx.export_checkpoint(TENSORS, tmp_path / "local")
    url = put(store, tmp_path / "local", "model")
    whole = store.cat_file("/model/model.safetensors")
    store.pipe_file("/model/model.safetensors", whole[:-5])
    with pytest.raises(sx.CorruptError, match=r"model\.safetensors"):
        sx.merge_checkpoint(url, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


# Publishing


def test_a_merge_into_a_store_is_the_merge_into_a_directory(store: Any, tmp_path: Path) -> None:
    sx.save_checkpoint(TENSORS, tmp_path / "saved")
    (tmp_path / "config.json").write_text("{}")
    options: dict[str, Any] = {"max_shard_size": 200_000, "files_from": tmp_path / "config.json"}
    sx.merge_checkpoint(tmp_path / "saved", tmp_path / "local", **options)
    report = sx.merge_checkpoint(tmp_path / "saved", "memory://bucket/out", **options)
    assert report.path == "memory://bucket/out"
    assert objects(store, "bucket/out") == {p.name: p.read_bytes() for p in (tmp_path / "local").iterdir()}
    made = {path.rpartition("/")[2]: store.store[path].created for path in store.find("/bucket/out")}
    assert max(made, key=lambda name: made[name]) == "statexchange.json"


def test_a_checkpoint_in_a_store_is_not_replaced_unasked(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", max_shard_size=200_000)
    before = objects(store, "out")
    for dry_run in (True, False):
        with pytest.raises(sx.TargetExistsError, match=r"overwrite=True.*memory://out"):
            sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", dry_run=dry_run)
    assert objects(store, "out") == before
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", overwrite=True)
    assert sorted(objects(store, "out")) == ["model.safetensors", "statexchange.json"]
    store.pipe_file("/out/notes.txt", b"mine")
    with pytest.raises(sx.UnsafeError, match=r"notes\.txt"):
        sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", overwrite=True)
    assert store.exists("/out/statexchange.json")


def test_a_merge_that_fails_leaves_no_object(store: Any, tmp_path: Path) -> None:
    sx.export_checkpoint(TENSORS, tmp_path / "local", max_shard_size=200_000)
    last = sorted((tmp_path / "local").glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    with pytest.raises(sx.CorruptError, match="differ from their digest"):
        sx.merge_checkpoint(tmp_path / "local", "memory://out")
    assert objects(store, "out") == {}


@pytest.mark.parametrize("name", ["statexchange.json", "model.safetensors.index.json"])
def test_of_two_merges_into_one_target_one_is_refused(name: str, store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    theirs = b"theirs"

    def other_merge(done: int, total: int) -> None:
        if not store.exists(f"/out/{name}"):
            store.pipe_file(f"/out/{name}", theirs)

    with pytest.raises(sx.TargetExistsError, match=name):
        sx.merge_checkpoint(
            tmp_path / "model.safetensors", "memory://out", max_shard_size=200_000, on_progress=other_merge
        )
    assert objects(store, "out") == {name: theirs}


def test_a_merge_that_fails_while_overwriting_leaves_the_old_checkpoint(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out")
    before = set(objects(store, "out"))
    sx.export_checkpoint(TENSORS, tmp_path / "local")
    file = tmp_path / "local/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(sx.CorruptError, match="differ from their digest"):
        sx.merge_checkpoint(tmp_path / "local", "memory://out", overwrite=True)
    assert set(objects(store, "out")) == before


def test_a_target_that_holds_the_source_is_refused(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out")
    before = objects(store, "out")
    with pytest.raises(sx.UnsafeError, match="the source lies in the target"):
        sx.merge_checkpoint("memory://out", "memory://out", overwrite=True, max_shard_size=200_000)
    assert objects(store, "out") == before


def test_what_a_refused_merge_did_not_put_it_does_not_remove(store: Any, tmp_path: Path) -> None:
    """The other merge puts an object of the same name after this one began its own."""
    save_file(TENSORS, tmp_path / "model.safetensors")

    class Held(io.BytesIO):
        def __init__(self, path: str) -> None:
            super().__init__()
            self.path = path

        def close(self) -> None:
            if not self.closed and self.path:
                if store.exists(self.path):
                    raise FileExistsError(self.path)
                store.pipe_file(self.path, self.getvalue())
            super().close()

        def discard(self) -> None:
            self.path = ""

    class Late(type(store)):  # type: ignore[misc]
        """A store that commits at close, as S3 and GCS do, and then refuses what is there."""

        protocol = "late"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.replace("late://", "memory://")))

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return Held(path) if mode == "xb" else super()._open(path, mode, **options)

    fsspec.register_implementation("late", Late, clobber=True)

    def other_merge(done: int, total: int) -> None:
        store.pipe_file("/out/model.safetensors", b"theirs")

    with pytest.raises(sx.TargetExistsError):
        sx.merge_checkpoint(tmp_path / "model.safetensors", "late://out", on_progress=other_merge)
    assert objects(store, "out") == {"model.safetensors": b"theirs"}


def test_credentials_stay_out_of_messages() -> None:
    with pytest.raises(sx.StateExchangeError) as caught:
        open_source("http://joe:secret@127.0.0.1:9/x.safetensors?token=hidden")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_the_command_line_takes_urls(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    run = [sys.executable, "-m", "statexchange"]
    source, out = f"file://{tmp_path}/model.safetensors", f"file://{tmp_path}/out"
    for arguments in (["merge", source, out], ["verify", out], ["ls", out], ["info", out]):
        done = subprocess.run([*run, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], TENSORS["a"])


def test_urls_are_told_from_paths() -> None:
    assert object_store.is_url("s3://bucket/key")
    assert not any(map(object_store.is_url, ("shm://name", "file:///a/path", "/a/path", "relative", "C:\\path")))
