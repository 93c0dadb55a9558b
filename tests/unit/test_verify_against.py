"""``verify --against``: files are compared with what a hub or its cache says of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from commands import CommandLine
from safetensors.numpy import save_file
from valued import noise

from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, NotFoundError
from statexchange.report.verify import verify

COMMIT = "11c5a3d5811f50298f278a704980280950aedb10"


def blob_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def downloaded(folder: Path, files: Mapping[str, bytes], *, lfs: Callable[[str], bool]) -> Path:
    """Lay files out as huggingface_hub's ``hf download --local-dir`` does."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        record = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        record.parent.mkdir(parents=True, exist_ok=True)
        etag = hashlib.sha256(data).hexdigest() if lfs(name) else blob_sha1(data)
        record.write_text(f"{COMMIT}\n{etag}\n1712656091.123\n")
        record.with_suffix(".lock").touch()
    (folder / ".cache" / "huggingface" / ".gitignore").write_text("*")
    return folder


class TestAgainst:
    @pytest.fixture
    def repo(self, tmp_path: Path) -> Path:
        save_file({"w": noise(64, 64)}, tmp_path / "made.safetensors")
        data = (tmp_path / "made.safetensors").read_bytes()
        files = {"model.safetensors": data, "config.json": b"{}\n", "empty.txt": b"", "onnx/model.onnx": b"onnx"}
        return downloaded(tmp_path / "repo", files, lfs=lambda name: name.endswith(("safetensors", "onnx")))

    def test_a_download_that_did_not_change_has_no_findings(self, repo: Path, call: CommandLine) -> None:
        report = verify(repo, against=repo)
        assert report.findings == ()
        assert report.num_unproven == 0
        assert report.hub is not None
        assert report.hub.equal == ("config.json", "empty.txt", "model.safetensors", "onnx/model.onnx")
        assert report.hub.not_covered == ()
        assert report.hub.commits == (COMMIT,)
        code, out, err = call("verify", repo, "--against", repo)
        assert (code, err) == (0, "")
        assert "4 files have the hashes of the download; 0 not covered" in out

    def test_a_copy_is_compared_with_the_metadata_in_the_download_folder(self, repo: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("model.safetensors", "config.json", "empty.txt"):
            (copy / name).write_bytes((repo / name).read_bytes())
        (copy / "onnx").mkdir()
        (copy / "onnx" / "model.onnx").write_bytes(b"onnx")
        assert verify(copy, against=repo / ".cache" / "huggingface" / "download").findings == ()

    def test_a_file_that_differs_is_corrupt(self, repo: Path, call: CommandLine) -> None:
        (repo / "config.json").write_bytes(b"{ \n")
        with (repo / "model.safetensors").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\1")
        findings = verify(repo, against=repo).findings
        assert {(type(one), Path(str(one.path)).name) for one in findings} == {
            (CorruptError, "config.json"),
            (CorruptError, "model.safetensors"),
        }
        code, out, _ = call("verify", repo, "--against", repo)
        assert code == 4
        assert "the SHA-256 differs from that of the download" in out

    def test_a_missing_file_is_a_finding_and_one_without_a_hash_is_not_covered(
        self, repo: Path, call: CommandLine
    ) -> None:
        (repo / "onnx" / "model.onnx").unlink()
        (repo / "onnx" / "mine.onnx").write_bytes(b"mine")
        record = repo / ".cache" / "huggingface" / "download" / "empty.txt.metadata"
        record.write_text(f"{COMMIT}\nno-hash-of-this-kind\n1.0\n")
        report = verify(repo, against=repo)
        (missing,) = report.findings
        assert isinstance(missing, IncompleteError)
        assert str(missing.path).endswith("onnx/model.onnx")
        assert report.hub is not None
        assert report.hub.not_covered == ("empty.txt", "onnx/mine.onnx")
        code, out, _ = call("verify", repo, "--against", repo)
        assert code == 5
        assert "NOT COVERED  the download has no hash of onnx/mine.onnx" in out

    def test_one_file_is_compared_alone(self, repo: Path) -> None:
        report = verify(repo / "model.safetensors", against=repo)
        assert (report.findings, report.num_unproven) == ((), 0)
        assert report.hub is not None
        assert report.hub.equal == ("model.safetensors",)

    @pytest.mark.parametrize("text", ["", "x\n", f"{COMMIT}\n", f"{COMMIT}\nabc\nnever\n", "\x00" * 9000])
    def test_broken_metadata_is_corrupt(self, text: str, repo: Path) -> None:
        (repo / ".cache" / "huggingface" / "download" / "config.json.metadata").write_text(text)
        (finding,) = verify(repo, against=repo).findings
        assert isinstance(finding, CorruptError)
        assert str(finding.path).endswith("config.json.metadata")

    def test_files_of_two_commits_are_a_warning(self, repo: Path, call: CommandLine) -> None:
        record = repo / ".cache" / "huggingface" / "download" / "config.json.metadata"
        record.write_text(record.read_text().replace(COMMIT, "2" * 40))
        code, _, err = call("verify", repo, "--against", repo)
        assert code == 0
        assert "from 2 commits" in err

    def test_a_folder_without_metadata_is_not_found(self, repo: Path, tmp_path: Path) -> None:
        for folder in ("dcp", "jobs/dcp"):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / ".metadata").write_bytes(b"of torch DCP")
            with pytest.raises(NotFoundError, match="no metadata"):
                verify(repo, against=tmp_path)
        with pytest.raises(NotFoundError):
            verify(repo, against=tmp_path / "nowhere")
        with pytest.raises(InvalidArgumentError):
            verify(repo, against=repo / "config.json")

    def test_json_has_the_files_that_were_compared(self, repo: Path, call: CommandLine) -> None:
        code, envelope = call.json("verify", repo, "--against", repo)
        assert code == 0
        against = envelope["data"]["against"]
        assert against["equal"] == ["config.json", "empty.txt", "model.safetensors", "onnx/model.onnx"]
        assert against["commits"] == [COMMIT]


class TestCache:
    """A snapshot in the Hub's cache, whose files are links to blobs with their hashes as names."""

    @pytest.fixture
    def snapshot(self, tmp_path: Path) -> Path:
        save_file({"w": noise(64, 64)}, tmp_path / "made.safetensors")
        files = {
            "model.safetensors": (tmp_path / "made.safetensors").read_bytes(),
            "config.json": b"{}\n",
            "onnx/model.onnx": b"onnx",
        }
        model = tmp_path / "models--org--name"
        (model / "blobs").mkdir(parents=True)
        for name, data in files.items():
            is_lfs = name.endswith(("safetensors", "onnx"))
            blob = model / "blobs" / (hashlib.sha256(data).hexdigest() if is_lfs else blob_sha1(data))
            blob.write_bytes(data)
            link = model / "snapshots" / COMMIT / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return model / "snapshots" / COMMIT

    def test_the_names_of_blobs_prove_the_bytes(self, snapshot: Path, call: CommandLine) -> None:
        report = verify(snapshot)
        assert (report.findings, report.num_unproven) == ((), 0)
        assert report.hub is not None
        assert report.hub.equal == ("config.json", "model.safetensors", "onnx/model.onnx")
        assert (report.hub.not_covered, report.hub.commits) == ((), (COMMIT,))
        code, out, err = call("verify", snapshot)
        assert (code, err) == (0, "")
        assert "every digest agrees" in out
        one_file = verify(snapshot / "model.safetensors")
        assert one_file.num_unproven == 0
        assert one_file.hub is not None
        assert one_file.hub.equal == ("model.safetensors",)

    def test_a_link_to_the_snapshot_is_checked_too(self, snapshot: Path, tmp_path: Path) -> None:
        (tmp_path / "short").symlink_to(snapshot)
        assert verify(tmp_path / "short").num_unproven == 0

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_changed_bytes_of_a_blob_are_a_finding(self, name: str, snapshot: Path, call: CommandLine) -> None:
        blob = (snapshot / name).resolve()
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        (finding,) = verify(snapshot).findings
        assert isinstance(finding, CorruptError)
        assert finding.path == str(snapshot / name)
        assert finding.expected == blob.name
        assert call("verify", snapshot)[0] == 4

    def test_files_that_are_no_links_to_blobs_are_not_proven(self, snapshot: Path, tmp_path: Path) -> None:
        data = (snapshot / "model.safetensors").read_bytes()
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").write_bytes(data)
        report = verify(snapshot)
        assert report.num_unproven == 1
        assert report.hub is not None
        assert report.hub.not_covered == ("model.safetensors",)
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "weights").write_bytes(data)
        (tmp_path / "plain").mkdir()
        (tmp_path / "plain" / "model.safetensors").symlink_to("../blobs/weights")
        assert verify(tmp_path / "plain").hub is None
