"""Small files that ask for much: what a reader does is bounded by the bytes that it was given.

One child process with little memory and time looks at all of them. Each case is one command with the exit code and
the words that it must end with.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

import statexchange
from statexchange.errors import NotFoundError, PeerError, StorageError, without_secrets
from statexchange.storage.workspace import Workspace

HOME = os.fspath(Path(statexchange.__file__).parents[1])
MEMORY_BYTES, CPU_SECONDS = 1 << 30, 14
CHILD = f"""
import contextlib, io, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
from statexchange.cli.main import main
for line in sys.stdin:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(json.loads(line))
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, text.getvalue()]), flush=True)
"""
NO_DIGEST = "0" * 32
EMPTY_DIGEST = "99aa06d3014798d86001c324468d497f"


# Safetensors files and manifests


def safetensors(path: Path, header: dict[str, Any] | bytes, nbytes: int = 0) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + nbytes)


def published(path: Path, shape: list[int], nbytes: int, boxes: list[Any], **said: Any) -> None:
    """A directory with one tensor `w`, and a manifest that lists its boxes as (offsets, shape, digest, rank)."""
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, nbytes]}
    safetensors(path / "model.safetensors", {"w": entry, **said.pop("header", {})}, nbytes)
    fact = {"file": "model.safetensors", "dtype": "U8", "shape": shape, "source": "w", "boxes": boxes, **said}
    (path / "statexchange.json").write_text(json.dumps({"files": ["model.safetensors"], "tensors": {"w": fact}}))


def empty_dim(path: Path) -> None:
    published(path, [1 << 48, 0], 0, [[[0, 0], [1 << 48, 0], EMPTY_DIGEST, 0]])


def empty_boxes(path: Path) -> None:
    boxes = [[[begin, 0], [size, 0], EMPTY_DIGEST, 0] for begin, size in ((0, 5), (7, 1 << 40), (1, 1 << 47))]
    published(path, [1 << 48, 0], 0, boxes)


def twelve_dims(path: Path) -> None:
    chance, boxes = random.Random(1), set()
    while len(boxes) < 9000:
        offsets = tuple(chance.randrange(2) for _ in range(12))
        boxes.add((offsets, tuple(chance.randrange(1, 3 - offset) for offset in offsets)))
    published(path, [2] * 12, 2**12, [[*box, NO_DIGEST, 0] for box in sorted(boxes)])


def many_columns(path: Path) -> None:
    """Boxes that all reach from the begin of a file to its end; each window has a few of them."""
    columns, width = 20_000, 1 << 13
    known = xxhash.xxh3_128_hexdigest(bytes(2 * width))
    boxes = [[[0, column * width], [2, width], known, 0] for column in range(columns)]
    published(path, [2, columns * width], 2 * columns * width, boxes)


def dense_header(path: Path) -> None:
    safetensors(path / "model.safetensors", b'{"a":[' + b"[]," * 10_000_000 + b"[]]}")


def dense_keys(path: Path) -> None:
    text = ",".join(f'"{number:x}":0' for number in range(1_500_000))
    safetensors(path / "model.safetensors", b"{" + text.encode() + b"}")


def dense_manifest(path: Path) -> None:
    (path / "statexchange.json").write_bytes(b'{"tensors":[' + b"{}," * 10_000_000 + b"{}]}")


def sparse_index(path: Path) -> None:
    (path / "model.safetensors.index.json").touch()
    os.truncate(path / "model.safetensors.index.json", 1 << 30)


def smaller_sparse_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {')
    os.truncate(path / "model.safetensors.index.json", 250 << 20)


def other_shape(path: Path) -> None:
    published(path, [2, 2], 4, [[[0], [4], NO_DIGEST, 0]])
    manifest = json.loads((path / "statexchange.json").read_text())
    manifest["tensors"]["w"]["shape"] = [4]
    (path / "statexchange.json").write_text(json.dumps(manifest))


def part_with_boxes(path: Path) -> None:
    """Torch says that the file has a part of the tensor, the manifest that it has all of it."""
    header = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [3, 3]}})}}
    boxes = [[[row, 0], [1, 2], NO_DIGEST, 0] for row in range(2)]
    published(path, [2, 2], 4, boxes, header=header)


def far_offsets(path: Path) -> None:
    header = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [1 << 48] * 64}})}
    entry = {"dtype": "U8", "shape": [1] * 64, "data_offsets": [0, 1]}
    safetensors(path / "model.safetensors", {"__metadata__": header, "w": entry}, 1)


def far_shape(path: Path) -> None:
    published(path, [1], 1, [])
    manifest = json.loads((path / "statexchange.json").read_text())
    manifest["tensors"]["w"]["shape"] = [1 << 48] * 64
    (path / "statexchange.json").write_text(json.dumps(manifest))


# Files of torch.save, written without torch: parts of a pickle as bytes

Pickled = bytes


def text_of(value: str) -> Pickled:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> Pickled:
    return b"\x8a\x08" + value.to_bytes(8, "little")


def tuple_of(*items: Pickled) -> Pickled:
    return b"(" + b"".join(items) + b"t"


def numbers(*values: int) -> Pickled:
    return tuple_of(*map(number, values))


def dict_of(**items: Pickled) -> Pickled:
    return b"}(" + b"".join(text_of(key) + value for key, value in items.items()) + b"u"


def symbol(name: str) -> Pickled:
    return f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode()


def call(name: str, *arguments: Pickled) -> Pickled:
    return symbol(name) + tuple_of(*arguments) + b"R"


def instance(name: str, **state: Pickled) -> Pickled:
    return symbol(name) + b")\x81" + dict_of(**state) + b"b"


def tensor(shape: Pickled, strides: Pickled, offset: int = 0) -> Pickled:
    """A tensor of the file's one storage, which has 16 floats."""
    storage = (
        tuple_of(text_of("storage"), symbol("torch.FloatStorage"), text_of("0"), text_of("cpu"), number(16)) + b"Q"
    )
    rest = b"\x89" + call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", storage, number(offset), shape, strides, rest)


def dtensor(length: int, local: Pickled, mesh: list[int], *factors: int) -> Pickled:
    """A DTensor of one dim, cut along each axis of a mesh as a _StridedShard of a factor."""
    placement = "torch.distributed.tensor.placement_types._StridedShard"
    placements = [instance(placement, dim=number(0), split_factor=number(factor)) for factor in factors]
    ranks = 1
    for size in mesh:
        ranks *= size
    device_mesh = instance(
        "torch.distributed.device_mesh.DeviceMesh",
        mesh=tensor(numbers(*mesh), numbers(*(0 for _ in mesh))),
        _flatten_mesh_list=numbers(*range(ranks)),
        _coordinate_on_dim=numbers(*(0 for _ in mesh)),
    )
    spec = instance(
        "torch.distributed.tensor._dtensor_spec.DTensorSpec", mesh=device_mesh, placements=tuple_of(*placements)
    )
    state = dict_of(_spec=spec, _local_tensor=local)
    wrapped = tuple_of(b"N", b"N", numbers(length))
    return call(
        "torch._tensor._rebuild_from_type_v2",
        symbol("torch._utils._rebuild_wrapper_subclass"),
        symbol("torch.distributed.tensor.DTensor"),
        wrapped,
        state,
    )


def torch_file(path: Path, **tensors: Pickled) -> None:
    with zipfile.ZipFile(path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02" + dict_of(**tensors) + b".")
        archive.writestr("model/byteorder", b"little")
        archive.writestr("model/data/0", bytes(range(64)))


FOUR = tensor(numbers(4), numbers(1))
DEEP = b")" + b"\x85" * 3000  # a tuple in a tuple in a tuple


def expanded(path: Path) -> None:
    torch_file(path, w=tensor(numbers(1 << 20, 1 << 20), numbers(0, 0)))


def overlapping(path: Path) -> None:
    torch_file(path, **{f"w{i}": tensor(numbers(1 << 18, 8), numbers(0, 1), offset=i % 8) for i in range(100)})


def a_little_expanded(path: Path) -> None:
    torch_file(path, w=tensor(numbers(1000, 4), numbers(0, 1)))


def strided_often(path: Path) -> None:
    torch_file(path, w=dtensor(1 << 18, FOUR, [2, 2], 1 << 16, 1 << 16))


def strided_in_many(path: Path) -> None:
    local = tensor(numbers(1 << 16), numbers(0))
    torch_file(path, **{f"w{i}": dtensor(1 << 16, local, [1, 1], 1 << 16, 1 << 16) for i in range(50)})


def a_mesh_of_many_axes(path: Path) -> None:
    torch_file(path, w=dtensor(4, FOUR, [1] * 40, *[1] * 40), v=dtensor(4, FOUR, [2, 2], 1, 1))


def deep_shape(path: Path) -> None:
    torch_file(path, w=tensor(DEEP, numbers(1)))


def deep_value(path: Path) -> None:
    torch_file(path, w=DEEP)


def no_files(path: Path) -> None:
    (path / "statexchange.json").write_text('{"files": 5}')


def whole(path: Path) -> None:
    safetensors(path / "model.safetensors", {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 4)


@dataclass(frozen=True)
class Case:
    """A command on the files that `make` writes, the exit code that it must have, and words that it must print."""

    make: Callable[[Path], None]
    command: str
    code: int
    says: str


CASES = [
    Case(empty_dim, "verify IN", 0, "every digest agrees"),
    Case(empty_dim, "merge IN OUT", 0, "merged 1 tensors, 0 B"),
    Case(empty_boxes, "info IN", 0, "tensors     1"),
    Case(empty_boxes, "verify IN", 0, "3 boxes, 0 B"),
    Case(twelve_dims, "verify IN", 7, "9000 boxes that are cut along 12 dims at once are more than can be proved"),
    Case(many_columns, "verify IN", 0, "20,000 boxes, 328 MB"),
    Case(dense_header, "merge IN OUT", 4, "would take more memory"),
    Case(dense_keys, "info IN/model.safetensors", 4, "would take more memory"),
    Case(dense_manifest, "verify IN", 4, "would take more memory"),
    Case(sparse_index, "info IN", 4, "more than the limit"),
    Case(smaller_sparse_index, "verify IN", 4, "broken JSON: byte 16 is zero, as if it had not been written"),
    Case(other_shape, "verify IN", 4, "file and manifest disagree"),
    Case(part_with_boxes, "verify IN", 4, "file and manifest disagree"),
    Case(far_offsets, "info IN", 4, "no tensor has a shape of 64 dims that is so large"),
    Case(far_offsets, "verify IN/model.safetensors", 4, "no tensor has a shape of 64 dims that is so large"),
    Case(far_shape, "info IN", 4, "broken manifest"),
    Case(expanded, "info IN/model.pt", 7, "more than 16 times those of its files"),
    Case(expanded, "verify IN/model.pt", 7, "save them with .contiguous()"),
    Case(expanded, "merge IN OUT", 7, "save them with .contiguous()"),
    Case(overlapping, "verify IN", 7, "save them with .contiguous()"),
    Case(a_little_expanded, "merge IN OUT", 0, "merged 1 tensors, 16.0 kB"),
    Case(strided_often, "info IN", 4, "it repeats what it holds"),
    Case(strided_in_many, "verify IN", 4, "it repeats what it holds"),
    Case(a_mesh_of_many_axes, "verify IN", 4, "does not fit its placements"),
    Case(deep_shape, "info IN", 4, "not what torch writes"),
    Case(deep_value, "verify IN", 4, "deeper than anything real"),
    Case(no_files, "info IN", 4, "broken manifest"),
    Case(no_files, "merge GOOD IN --overwrite", 4, "it lists no files"),
    Case(whole, "info zip://hf::/x.zip", 3, "no such path [zip://hf::/x.zip]"),
]

URL_COMMANDS = [
    "info http://joe:PW@127.0.0.1:9/x.safetensors?X-Amz-Signature=SIG",
    "verify zip://a::http://joe:PW@127.0.0.1:9/x.zip?X-Amz-Signature=SIG",
    "ls nosuch://joe:PW@127.0.0.1/x?SIG",
    "info one http://joe:PW@127.0.0.1:9/x?SIG",
    "info memory://joe:PW@host/x?SIG",
    "merge memory://joe:PW@host/x?SIG https://joe:PW@127.0.0.1:9/x?SIG --json",
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the output of each case's command, all from one process of small means."""
    root = tmp_path_factory.mktemp("hostile")
    good = root / "good"
    good.mkdir()
    whole(good)
    lines = []
    for number_, case in enumerate(CASES):
        path = root / case.make.__name__
        if not path.exists():
            path.mkdir()
            case.make(path)
        places = {"IN": str(path), "OUT": str(root / f"out-{number_}"), "GOOD": str(good)}
        words = [places.get(word.partition("/")[0], word.partition("/")[0]) for word in case.command.split()]
        rests = [word.partition("/")[1:] for word in case.command.split()]
        lines.append(json.dumps([word + "".join(rest) for word, rest in zip(words, rests, strict=True)]))
    lines += [json.dumps(command.split()) for command in URL_COMMANDS]
    environment = {**os.environ, "PYTHONPATH": HOME, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    missing = [(None, f"the process ended with {done.returncode}: {done.stderr}")] * (len(lines) - len(found))
    return dict(zip([*map(_name, CASES), *URL_COMMANDS], [*found, *missing], strict=True))


def _name(case: Case) -> str:
    return f"{case.make.__name__}-{case.command}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_small_file_costs_little_and_is_named(case: Case, ended: dict[str, tuple[int, str]]) -> None:
    code, said = ended[_name(case)]
    assert (code, "Traceback" in said) == (case.code, False), said[-2000:]
    assert case.says in said


# Streams that are closed


def run_closed(redirections: str, *arguments: object) -> tuple[int, str]:
    shell = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "statexchange"]
    environment = {**os.environ, "PYTHONPATH": HOME, "OPENBLAS_NUM_THREADS": "1"}
    command = [*shell, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def test_closed_streams_end_in_the_exit_code_that_says_so(tmp_path: Path) -> None:
    whole(tmp_path)
    assert run_closed(">&-", "info", tmp_path) == (8, "error: cannot write the output: Bad file descriptor\n")
    assert run_closed("0<&- >&- 2>&-", "info", tmp_path / "gone") == (3, "")
    code, said = run_closed("2>&-", "merge", tmp_path, tmp_path / "out", "--json")
    assert (code, json.loads(said)["code"]) == (0, "OK")


# Secrets in URLs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://joe:PW@host:80/x.safetensors?X-Amz-Signature=SIG", "http://host:80/x.safetensors"),
        ("s3://KEY:PW@bucket/a@b/c", "s3://bucket/a@b/c"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("http://joe:P/W@host/x?SIG", "http://host/x"),
        ("http://joe:P?W@host/x?SIG", "http://host/x"),
        ("http://[::1]:80/a@b?SIG", "http://[::1]:80/a@b"),
        ("zip://a.bin?SIG::http://joe:PW@host/x.zip?SIG", "zip://a.bin::http://host/x.zip"),
        ("simplecache::s3://KEY:PW@bucket/x", "simplecache::s3://bucket/x"),
        ("see 'http://joe:PW@h/x?SIG' or \"http://h/y?SIG\" too", "see 'http://h/x' or \"http://h/y\" too"),
        ("file:///a/b?c@d", "file:///a/b?c@d"),
        ("shm://name", "shm://name"),
        ("/a/b?c", "/a/b?c"),
    ],
)
def test_a_url_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert without_secrets(shown) == shown


def test_errors_and_reprs_show_no_secrets() -> None:
    url = "s3://KEY:PW@bucket/x?SIG"
    texts = [str(NotFoundError(f"not {url!r}", path=url)), repr(StorageError("no").located(path=url))]
    texts += [str(PeerError(1, "reading", f"no {url}")), PeerError(1, "reading", f"no {url}").cause]
    for text in (*texts, repr(Workspace(url))):
        assert "bucket" in text or text == "StorageError('no [s3://bucket/x]')"
        assert not any(secret in text for secret in ("KEY", "PW", "SIG"))


@pytest.mark.parametrize("command", URL_COMMANDS)
def test_the_command_line_shows_no_secrets(command: str, ended: dict[str, tuple[int, str]]) -> None:
    code, said = ended[command]
    assert code in (2, 3, 7, 8), said
    assert "Traceback" not in said
    assert not any(secret in said for secret in ("joe", "PW", "SIG"))
