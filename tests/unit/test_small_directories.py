"""Small files and directories come along with the weights, at paths and URLs; what does not is named in one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine
from fsspec.core import url_to_fs
from safetensors.numpy import load_file, save_file

import statexchange as sx
from statexchange.checkpoint.publication import Draft, Publication
from statexchange.errors import StateExchangeError, TargetExistsError, UnsafeError
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import RankShards, plan_merge
from statexchange.sharding.shards import Shard, full_box

WEIGHTS = {"embeddings.word_embeddings.weight": np.ones((4, 2), "float32")}
SMALL = {
    "modules.json": json.dumps(
        [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]
    ),
    "config.json": "{}",
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": '{"in_features": 2}',
    "additional_chat_templates/tool_use.jinja": "{{ messages }}",
    "0_Asym/query_0/config.json": "{}",
}


def write_model(folder: Path) -> Path:
    """Write a directory of sentence-transformers."""
    for name, text in SMALL.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    save_file(WEIGHTS, folder / "model.safetensors")
    save_file({"linear.weight": np.ones((2, 2), "float32")}, folder / "2_Dense/model.safetensors")
    return folder


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


EXPECTED = {*SMALL, "model.safetensors", "2_Dense/model.safetensors", "statexchange.json"}


def notes_on_copies(report: Any) -> list[str]:
    return [note for note in report.notes if note.startswith("not copied")]


def test_small_directories_come_along(tmp_path: Path, call: CommandLine) -> None:
    source = write_model(tmp_path / "in")
    report = sx.merge_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    assert report.notes == ()
    assert files_below(tmp_path / "out") == EXPECTED
    for name in EXPECTED - {"config.json", "model.safetensors", "statexchange.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    for entry in json.loads((tmp_path / "out/modules.json").read_text()):
        assert (tmp_path / "out" / entry["path"]).is_dir()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert call("verify", tmp_path / "out")[0] == 0
    assert call("info", tmp_path / "out")[0] == 0
    # A published directory is a source itself, and may be replaced.
    assert sx.merge_checkpoint(tmp_path / "out", tmp_path / "again").notes == ()
    assert files_below(tmp_path / "again") == EXPECTED
    for none in ((), []):
        sx.merge_checkpoint(source, tmp_path / "again", overwrite=True, files_from=none)
        assert files_below(tmp_path / "again") == {"model.safetensors", "statexchange.json"}


def test_directories_of_files_from_come_along(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    save_file(WEIGHTS, tmp_path / "bare.safetensors")
    sx.merge_checkpoint(tmp_path / "bare.safetensors", tmp_path / "out", files_from=source)
    assert files_below(tmp_path / "out") == EXPECTED
    sx.export_checkpoint(WEIGHTS, tmp_path / "live", files_from=source)
    assert files_below(tmp_path / "live") == EXPECTED


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-5/optimizer.pt", "global_step3/x.json", "optimizer_0/x.json", "pytorch_model_fsdp_0/x.distcp",
        "runs/x", "a/b/c/d/e.json", ".hf_metadata/config.json", "large.txt", "onnx/large.txt",
    ],
)  # fmt: skip
def test_what_is_not_copied_is_named(name: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    with open(source / name, "wb") as file:
        file.truncate((100 << 20) if "large" in name else 1)
    (source / ".git").mkdir()  # of a tool
    (source / ".git/config").write_text("x")
    (note,) = notes_on_copies(sx.merge_checkpoint(source, tmp_path / "out"))
    assert name.partition("/")[0] in note
    assert ".git" not in note
    assert files_below(tmp_path / "out") == EXPECTED


def test_links_out_of_the_directory_are_not_followed_and_named_in_one_line(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (source / "link").symlink_to(outside)
    (source / "nested").mkdir()
    (source / "nested/link").symlink_to(outside)
    os.mkfifo(source / "fifo")
    (note,) = notes_on_copies(sx.merge_checkpoint(source, tmp_path / "out"))
    assert all(f"{name} (" in note for name in ("link", "nested", "fifo"))
    assert files_below(tmp_path / "out") == EXPECTED


def test_a_file_with_a_suffix_of_weights_is_named_and_copied_if_it_is_given(tmp_path: Path, call: CommandLine) -> None:
    source = write_model(tmp_path / "in")
    (source / "spk_dict.pt").write_bytes(b"speakers")
    assert "spk_dict.pt" in str(sx.merge_checkpoint(source, tmp_path / "out").notes)
    assert call("merge", source, tmp_path / "given", "--files-from", source / "spk_dict.pt")[0] == 0
    assert files_below(tmp_path / "given") == EXPECTED | {"spk_dict.pt"}
    assert (tmp_path / "given/spk_dict.pt").read_bytes() == b"speakers"


def test_the_directory_of_a_checkpoint_of_its_own_is_not_copied(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    sx.merge_checkpoint(source, source / "out")
    report = sx.merge_checkpoint(source, source / "out", overwrite=True)
    assert files_below(source / "out") == EXPECTED
    (note,) = notes_on_copies(report)
    assert "out" in note


def test_all_directories_together_have_a_limit(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    for name in ("3_a", "4_b", "5_c"):
        (source / name).mkdir()
        with open(source / name / "x.bin", "wb") as file:
            file.truncate(30 << 20)
    (note,) = notes_on_copies(sx.merge_checkpoint(source, tmp_path / "out"))
    assert "5_c" in note
    assert files_below(tmp_path / "out") == EXPECTED | {"3_a/x.bin", "4_b/x.bin"}


def test_a_directory_with_a_file_that_the_manifest_does_not_list_is_not_replaced(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in")
    sx.merge_checkpoint(source, tmp_path / "out")
    (tmp_path / "out/2_Dense/mine.txt").write_text("mine")
    with pytest.raises(UnsafeError) as caught:
        sx.merge_checkpoint(source, tmp_path / "out", overwrite=True)
    assert "2_Dense/mine.txt" in str(caught.value)
    (tmp_path / "out/2_Dense/mine.txt").unlink()
    (tmp_path / "out/own").mkdir()
    with pytest.raises(UnsafeError):
        sx.merge_checkpoint(source, tmp_path / "out", overwrite=True)


def test_nothing_is_left_of_a_publication_that_is_abandoned_or_killed(tmp_path: Path) -> None:
    shards = [Shard("a", "U8", (4,), (full_box((4,)),))]
    plan = plan_merge([RankShards(0, shards)], ExportOptions())
    with Publication(
        tmp_path / "out", Draft(plan, source="test", extra={"1_Pooling/config.json": b"{}"})
    ) as publication:
        publication.create(plan.files[0]).finish()
        with pytest.raises(KeyError):  # there is no provenance: the small files are written by then
            publication.commit({})
        assert files_below(Path(publication.build.building_path)) >= {"1_Pooling/config.json"}
    assert os.listdir(tmp_path) == []
    if os.fork() == 0:
        publication = Publication(tmp_path / "out", Draft(plan, source="test", extra={"1_Pooling/config.json": b"{}"}))
        try:
            publication.commit({})
        finally:
            os._exit(0)
    os.wait()
    assert len(os.listdir(tmp_path)) > 1
    source = write_model(tmp_path / "in")
    sx.merge_checkpoint(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("kind", ["store", "s3"])
def test_directories_come_along_to_and_from_an_object_store(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"{request.getfixturevalue(kind)}/out" if kind == "s3" else "memory://out"
    request.getfixturevalue("store")
    system, base = url_to_fs(url)
    source = write_model(tmp_path / "in")

    def keys() -> set[str]:
        system.invalidate_cache()
        return {path.removeprefix(f"{base}/") for path in system.find(base)}

    sx.merge_checkpoint(source, url)
    assert keys() == EXPECTED
    sx.merge_checkpoint(url, tmp_path / "back")
    assert files_below(tmp_path / "back") == EXPECTED
    with pytest.raises(TargetExistsError):
        sx.merge_checkpoint(source, url)
    shutil.rmtree(source / "2_Dense")
    sx.merge_checkpoint(source, url, overwrite=True)
    assert keys() == {name for name in EXPECTED if not name.startswith("2_Dense")}
    system.pipe_file(f"{base}/1_Pooling/mine.txt", b"mine")
    with pytest.raises(UnsafeError):
        sx.merge_checkpoint(source, url, overwrite=True)
    assert "1_Pooling/mine.txt" in keys()


def test_objects_of_a_publisher_that_failed_are_removed(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "in")
    put = store.pipe_file

    def fail(path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("/modules.json"):
            raise PermissionError(13, "no more")
        return put(path, *args, **options)

    monkeypatch.setattr(store, "pipe_file", fail)
    with pytest.raises(StateExchangeError):
        sx.merge_checkpoint(source, "memory://out")
    assert store.find("/out") == []


@pytest.mark.parametrize("weights", ["adapter_model.bin", "adapter_model.safetensors"])
def test_the_config_of_an_adapter_comes_along(weights: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save

    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = {name: torch.ones(2, 3), name.replace("_A", "_B"): torch.ones(3, 2)}
    (tmp_path / "in").mkdir()
    if weights.endswith(".bin"):
        torch.save(tensors, tmp_path / "in" / weights)
    else:
        save(tensors, tmp_path / "in" / weights)
    (tmp_path / "in/adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    assert sx.merge_checkpoint(tmp_path / "in", tmp_path / "out").notes == ()
    assert files_below(tmp_path / "out") == {"adapter_config.json", "adapter_model.safetensors", "statexchange.json"}
    assert load_file(tmp_path / "out/adapter_model.safetensors").keys() == tensors.keys()
    (note,) = sx.merge_checkpoint(tmp_path / "in" / weights, tmp_path / "alone").notes
    assert "adapter_config.json" in note
    given = sx.merge_checkpoint(
        tmp_path / "in" / weights, tmp_path / "given", files_from=tmp_path / "in/adapter_config.json"
    )
    assert given.notes == ()


def test_a_tokenizers_directories_are_exported(tmp_path: Path) -> None:
    class Tokenizer:
        """It writes files as a tokenizer of transformers with several chat templates does."""

        def save_pretrained(self, folder: str) -> None:
            os.mkdir(f"{folder}/additional_chat_templates")
            Path(folder, "tokenizer.json").write_text("{}")
            Path(folder, "additional_chat_templates/tool_use.jinja").write_text("{}")

    sx.export_checkpoint(WEIGHTS, tmp_path / "out", tokenizer=Tokenizer())
    assert files_below(tmp_path / "out") >= {"tokenizer.json", "additional_chat_templates/tool_use.jinja"}
