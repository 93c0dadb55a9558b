"""A checkpoint behind a web server: read by ranges if the server supports them, else refused by name."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statexchange as sx
from statexchange.report.summary import summarize
from statexchange.report.verify import verify


class WithoutRanges(SimpleHTTPRequestHandler):
    """A handler that ignores ranges, and logs nothing."""

    def log_message(self, *_: Any) -> None: ...


class WithRanges(WithoutRanges):
    """A handler that answers ranges."""

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        file = Path(self.directory, self.path.lstrip("/").partition("?")[0])
        if match is None or not file.is_file():
            super().do_GET()
            return
        data = file.read_bytes()[int(match[1]) : int(match[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(folder: Path, handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve the files in a folder; yield the server's URL."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a checkpoint, with a secret in its query; `request.param` handles the requests."""
    sx.export_checkpoint({"w": np.arange(6, dtype=np.float32)}, tmp_path / "out")
    with serving(tmp_path / "out", request.param) as url:
        yield f"{url}/model.safetensors?signature=hidden"


@pytest.mark.parametrize("served", [WithRanges], indirect=True)
def test_a_file_is_read_in_ranges(served: str) -> None:
    with sx.open_checkpoint(served) as checkpoint:
        assert checkpoint["w"].read().tolist() == [0, 1, 2, 3, 4, 5]
    for path in (checkpoint.path, summarize(served).path, verify(served).path):
        assert path == served.removesuffix("?signature=hidden")


@contextmanager
def counting(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Serve a folder; yield the URL, and the sizes of the ranges that are read."""
    sizes: list[int] = []

    class Counted(WithRanges):
        def do_GET(self) -> None:
            if "Range" in self.headers:  # not when the size is asked for
                begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
                sizes.append(int(end) - int(begin) + 1)
            super().do_GET()

    with serving(folder, Counted) as url:
        yield url, sizes


def test_small_tensors_near_each_other_are_read_by_one_request_and_large_gaps_are_not(tmp_path: Path) -> None:
    saved = {f"layer.{i:03}.bias": np.full(200, i, dtype=np.float32) for i in range(300)}
    saved |= {f"layer.{i:03}.weight": np.full(20_000, i, dtype=np.float32) for i in range(300) if i % 100 == 50}
    sx.export_checkpoint(saved, tmp_path / "out")
    with counting(tmp_path / "out") as (url, sizes):
        state = {name: np.zeros_like(array) for name, array in saved.items() if name.endswith("bias")}
        sx.load_checkpoint(state, f"{url}/model.safetensors", strict=False)
    assert all(np.array_equal(array, saved[name]) for name, array in state.items())
    assert len(sizes) < 10, sizes  # for the header, and for the data before, between and after the weights
    assert sum(sizes) < 1.5 * sum(array.nbytes for array in state.values())


@pytest.mark.parametrize("call", ["open", "verify", "merge", "diff", "diff of casts"])
def test_a_whole_file_of_small_tensors_is_read_by_few_requests(call: str, tmp_path: Path) -> None:
    saved = {f"layer.{i:04}.bias": np.full(100, i, dtype=np.float32) for i in range(2000)}
    sx.export_checkpoint(saved, tmp_path / "out")
    sx.merge_checkpoint(tmp_path / "out", tmp_path / "cast", dtype="float16")
    with counting(tmp_path / "out") as (url, sizes):
        file = f"{url}/model.safetensors"
        if call == "open":
            with sx.open_checkpoint(file) as opened:
                assert all(np.array_equal(opened[name].read(), array) for name, array in saved.items())
        elif call == "verify":
            report = verify(file)
            assert (report.num_tensors, report.nbytes, report.findings) == (2000, 800_000, ())
        elif call == "merge":
            sx.merge_checkpoint(file, tmp_path / "merged")
            with sx.open_checkpoint(tmp_path / "merged") as merged:
                assert all(np.array_equal(merged[name].read(), array) for name, array in saved.items())
        else:
            other = tmp_path / ("out" if call == "diff" else "cast")
            report = sx.diff_checkpoints(file, other / "model.safetensors", threads=3)
            assert {tensor.status for tensor in report.tensors} == {"equal" if call == "diff" else "dtype"}
    assert len(sizes) < 30, sizes
    assert sum(sizes) < 4 * (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("served", [WithoutRanges], indirect=True)
def test_a_server_without_ranges_is_refused_by_name(served: str) -> None:
    with pytest.raises(sx.errors.UnsupportedError, match="range requests") as caught:
        sx.open_checkpoint(served)
    assert "hidden" not in str(caught.value)


class Forbidding(WithoutRanges):
    """A handler that refuses everything."""

    def do_GET(self) -> None:
        self.send_error(403)

    def do_HEAD(self) -> None:
        self.send_error(403)


@pytest.mark.parametrize("served", [Forbidding], indirect=True)
def test_a_server_that_forbids_or_is_down_is_not_called_an_absent_path(served: str) -> None:
    with pytest.raises(sx.errors.StorageError, match="403") as caught:
        sx.open_checkpoint(served)
    assert "hidden" not in str(caught.value)
    with socket.socket() as nobody:  # bound, but it does not listen
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(sx.errors.StorageError, match=r"(?i)cannot connect") as caught:
            sx.open_checkpoint(f"http://127.0.0.1:{port}/model.safetensors?signature=hidden")
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("served", [WithRanges], indirect=True)
def test_an_absent_url_is_not_found_and_cannot_be_published_to(served: str, tmp_path: Path) -> None:
    host = served.rpartition("/")[0]
    with pytest.raises(sx.errors.NotFoundError, match="no such path"):
        sx.open_checkpoint(f"{host}/gone.safetensors")
    with pytest.raises(sx.errors.UnsupportedError, match="read-only"):
        sx.merge_checkpoint(tmp_path / "out", f"{host}/new")
