"""Small files that would take much: what a reader does is bounded by the bytes that it is given.

Each file is opened by the command line in processes that have 2 GiB of address space and a few seconds of a processor.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sweeps import by_default

from statexchange.sharding.shards import Box, Shard
from statexchange.storage.tensorfile import Held
from statexchange.storage.workspace import MANIFEST, Manifest, Workspace, _manifest_text

MEMORY_BYTES, CPU_S = 2 << 30, 5
OK, USAGE, CORRUPT, INCOMPLETE, UNSAFE = 0, 2, 4, 5, 7
PRIME = (1 << 61) - 1  # numbers that differ by a multiple of it have one hash

# One child for each command, forked after the imports. Its exit code is that of `wait`: a signal's number is negative.
COMMANDS = """
import json, os, resource, sys
from statexchange.cli.main import main
import statexchange.cli.info, statexchange.cli.merge, statexchange.cli.verify, statexchange.checkpoint.merge
import statexchange.formats.dcp, statexchange.formats.torch_file, statexchange.formats.workspace
import statexchange.report.summary, statexchange.report.verify

memory, cpu = map(int, sys.argv[1:])
codes = []
for call in json.load(sys.stdin):
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        os.dup2(2, 1)
        main(call)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


# Opcodes of a pickle. `keep` gives a value a number, by which `again` names it in 5 bytes.


def keep(number: int, value: bytes) -> bytes:
    return value + b"r" + number.to_bytes(4, "little")


def again(number: int) -> bytes:
    return b"j" + number.to_bytes(4, "little")


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def several(items: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def listed(items: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def mapped(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def named(values: dict[str, bytes]) -> bytes:
    return mapped((text(key), value) for key, value in values.items())


def symbol(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + several(arguments) + b"R"


def made(kind: str, **state: bytes) -> bytes:
    return symbol(kind) + b")\x81" + named(state) + b"b"


def pairs(depth: int = 40) -> bytes:
    """Pairs of one pair each: 2**depth values in 7 bytes a level."""
    value = keep(1000, integer(1) + b"\x85")
    for level in range(depth):
        value = keep(1001 + level, value + again(1000 + level) + b"\x86")
    return value


FLOATS = symbol("torch.FloatStorage")
REBUILD = symbol("torch._utils._rebuild_tensor_v2")
ORDERED = symbol("collections.OrderedDict")
SIZE = integer(2) + b"\x85"
ZERO = integer(0) + b"\x85"


def tensor(
    shape: bytes = SIZE, strides: bytes = integer(1) + b"\x85", key: bytes = text("0"), more: bytes = b""
) -> bytes:
    storage = several([text("storage"), FLOATS, key, text("cpu"), integer(2)]) + b"Q"
    return call(REBUILD, storage, integer(0), shape, strides, b"\x89", ORDERED + b")R", more)


def archive(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + data + b".")
        file.writestr("archive/data/0", bytes(8))
    return path


Build = Callable[[Path], Path]


def torch_file(data: bytes) -> Build:
    return lambda folder: archive(folder / "x.pt", data)


# Names of files that claim much


def claimed(folder: Path, *, committed: bool) -> Path:
    """One rank's file of a world of 999,999,999."""
    world_size = 999_999_999
    held = [Held(Shard("w", "U8", (4,), (Box((0,), (4,)),)), memoryview(bytes(4)))]
    receipt = Workspace(folder / "ws").write(held, run="job", round=1, rank=0, world_size=world_size)
    if committed:
        manifest = _manifest_text(Manifest("job", 1, 1, world_size, (receipt,), {}))
        (folder / "ws" / "job" / "000001" / MANIFEST).write_bytes(manifest)
    return folder / "ws"


def numbered(folder: Path, layout: object = None, shape: tuple[int, ...] = (2,)) -> Path:
    files = folder / "files"
    files.mkdir()
    for number in (1, 20261122011500 if layout is None else 2):
        save_file({"w": np.zeros(shape, "f4")}, files / f"rank_{number}.safetensors")
    (folder / "layout.json").write_text(json.dumps(layout or {"w": {"dim": 0}}))
    return files


# Files of torch.save


def copies() -> bytes:
    content = listed(several([integer(n), b"N"]) for n in range(5000))
    return listed([call(keep(1, ORDERED), keep(0, content)), *[call(again(1), again(0))] * 10_000])


def below_a_long_name() -> bytes:
    return named({"k" * 300_000: mapped((integer(n), b"N") for n in range(30_000))})


def repeated_key(key: bytes, times: int) -> bytes:
    return listed([mapped([(keep(0, key), b"N")]), *[mapped([(again(0), b"N")])] * times])


def equal_keys() -> bytes:
    """Two texts of one content, of which neither is the other."""
    first = mapped([(keep(0, text("k" * 300_000)), b"N"), (keep(1, text("k" * 300_000)), b"N")])
    return listed([first, *[mapped([(again(0), b"N"), (again(1), b"N")])] * 20_000])


def colliding_numbers() -> bytes:
    return mapped((integer(n * PRIME), b"N") for n in range(40_000))


def colliding_pairs() -> bytes:
    """Pairs with one hash: the second number follows from the first by how Python hashes a tuple."""
    one, two, five, size = 11400714785074694791, 14029467366897019727, 2870177450012600261, 1 << 64
    inverse, keys = pow(two, -1, size), []
    for first in range(1, 80_000):
        lane = (five + first * two) % size
        lane = (lane << 31 | lane >> 33) % size * one % size
        second = -lane * inverse % size
        second -= size if second >> 63 else 0
        if abs(second) < PRIME:
            keys.append((first, second))
    assert len(keys) > 10_000
    assert len({hash(key) for key in keys}) == 1
    return mapped((integer(a) + integer(b) + b"\x86", b"N") for a, b in keys)


def shared_wrappers() -> bytes:
    """A tensor in 10,000 Parameters, all of them under 10,000 names."""
    parameter = keep(0, symbol("torch._utils._rebuild_parameter"))
    first = parameter + b"(" + (again(0) + b"(") * 10_000 + tensor() + b"\x89NtR" * 10_000 + b"\x89NtR"
    return listed([keep(1, first), *[again(1)] * 10_000])


def shared_list() -> bytes:
    return named({"a": keep(0, listed([b"N"] * 60_000)), "b": mapped((integer(n), again(0)) for n in range(10_000))})


def distributed(ranks: bytes, count: int = 1) -> bytes:
    """DTensors in two parts, on meshes of their own that share a list of ranks."""
    space = "torch.distributed."
    wrapper, kind = symbol("torch._utils._rebuild_wrapper_subclass"), symbol(space + "tensor.DTensor")
    cut = made(space + "tensor.placement_types.Shard", dim=integer(0))
    local = tensor(shape=integer(1) + b"\x85")
    arguments = several([kind, FLOATS, SIZE])
    found = []
    for number in range(count):
        shared = {9: ranks, 10: cut + b"\x85", 11: local, 12: arguments, 13: wrapper, 14: kind}
        ranks_of, cuts, local_part, of_wrapper, function, of = (
            again(key) if number else keep(key, value) for key, value in shared.items()
        )
        layout = made(space + "_mesh_layout._MeshLayout", shape=SIZE, stride=integer(number + 1) + b"\x85")
        mesh = made(
            space + "device_mesh.DeviceMesh",
            _layout=layout,
            _flatten_rank_map=ranks_of,
            _coordinate_on_dim=ZERO,
        )
        spec = made(space + "tensor._dtensor_spec.DTensorSpec", mesh=mesh, placements=cuts)
        state = named({"_spec": spec, "_local_tensor": local_part})
        rebuild = symbol("torch._tensor._rebuild_from_type_v2")
        found.append(call(rebuild, function, of, of_wrapper, b"N" + state + b"\x86"))
    return listed(found)


def shared_refusals() -> bytes:
    """One sparse tensor, and one object with a tensor in it, each under 100,000 names."""
    sparse = call(symbol("torch._utils._rebuild_sparse_tensor"), b"N")
    holding = call(symbol("some.Class"), tensor())
    return listed([keep(0, sparse), *[again(0)] * 100_000, keep(1, holding), *[again(1)] * 100_000])


def shared_opaque() -> bytes:
    """A list of one opaque object many times, many times."""
    made = call(symbol("some.Class"), b"N")
    return listed([keep(0, listed([keep(1, made), *[again(1)] * 60_000])), *[again(0)] * 10_000])


def opaque_of_opaque() -> bytes:
    """Objects that hold one another, 10,000 deep, each of them under a name too."""
    found, value = [], b"N"
    for number in range(10_000):
        value = keep(number, call(symbol("some.Class"), value))
        found.append((text(str(number)), value))
        value = again(number)
    return mapped(found)


def equal_ranks() -> bytes:
    """Two ranks that are pairs, equal and not the same, so that which is less takes 2**40 steps."""
    other = pairs()
    for level in reversed(range(41)):
        other = other.replace((1000 + level).to_bytes(4, "little"), (2000 + level).to_bytes(4, "little"))
    return distributed(several([pairs(), other, integer(1)]))


def shared_arguments() -> bytes:
    """Tensors of 100,000 arguments, the same ones."""
    storage = several([text("storage"), FLOATS, text("0"), text("cpu"), integer(2)]) + b"Q"
    first = [storage, integer(0), SIZE, integer(1) + b"\x85", b"\x89", ORDERED + b")R"]
    arguments = keep(0, several([*first, *[b"N"] * 100_000]))
    return listed([keep(1, REBUILD) + arguments + b"R", *[again(1) + again(0) + b"R"] * 10_000])


def opaque_key() -> bytes:
    return mapped([(call(symbol("torch.device"), pairs()), mapped([(text("a"), b"N")]))])


# DCP

CHECKPOINT = "torch.distributed.checkpoint."
PROPERTIES = keep(
    500, symbol(CHECKPOINT + "metadata.TensorProperties") + b")\x81" + several([symbol("torch.float32")]) + b"b"
)


def fact(size: bytes = SIZE, chunks: bytes | None = None, properties: bytes = PROPERTIES) -> bytes:
    chunk = made(CHECKPOINT + "metadata.ChunkStorageMetadata", offsets=integer(0) + b"\x85", sizes=SIZE)
    return made(
        CHECKPOINT + "metadata.TensorStorageMetadata",
        properties=properties,
        size=size,
        chunks=listed([chunk]) if chunks is None else chunks,
    )


def stored(
    name: bytes, offset: bytes, file: bytes, begin: int = 0, length: int = 0, **more: bytes
) -> tuple[bytes, bytes]:
    index = made(CHECKPOINT + "metadata.MetadataIndex", fqn=name, offset=offset)
    info = made(
        CHECKPOINT + "filesystem._StorageInfo",
        relative_path=file,
        offset=integer(begin),
        length=integer(length),
        **more,
    )
    return index, info


def dcp(facts: dict[str, bytes], *entries: tuple[bytes, bytes], data: bytes = b"N") -> Build:
    """A DCP directory with one file, in which lies an archive of this pickle."""

    def build(folder: Path) -> Path:
        (folder / "dcp").mkdir()
        metadata = made(
            CHECKPOINT + "metadata.Metadata", state_dict_metadata=named(facts), storage_data=mapped(entries)
        )
        (folder / "dcp" / ".metadata").write_bytes(b"\x80\x02" + metadata + b".")
        archive(folder / "dcp" / "__0_0.distcp", data)
        return folder / "dcp"

    return build


FILE = text("__0_0.distcp")


def one_place() -> Build:
    """2,000 entries that are one place in the file, with a pickle of 200,000 bytes."""
    data = listed([b"N"] * 200_000)

    def build(folder: Path) -> Path:
        length = archive(folder / "x", data).stat().st_size
        others = {f"n{n}": made(CHECKPOINT + "metadata.BytesStorageMetadata") for n in range(2000)}
        return dcp(others, *[stored(text(name), b"N", FILE, 0, length) for name in others], data=data)(folder)

    return build


def shared_chunks() -> Build:
    """2,000 tensors of the same 1,000 parts."""
    parts = [
        made(CHECKPOINT + "metadata.ChunkStorageMetadata", offsets=integer(n) + b"\x85", sizes=keep(501, ZERO))
        for n in range(1000)
    ]
    first = fact(chunks=keep(502, listed(parts)))
    following = fact(chunks=again(502), properties=again(500))
    return dcp({f"n{n}": following if n else first for n in range(2000)})


def long_name_of_parts() -> Build:
    """A tensor with a name of 300,000 characters and 5,000 parts, all of them stored nowhere."""
    parts = [
        made(CHECKPOINT + "metadata.ChunkStorageMetadata", offsets=integer(n) + b"\x85", sizes=integer(1) + b"\x85")
        for n in range(5000)
    ]
    return dcp({"n" * 300_000: fact(integer(5000) + b"\x85", listed(parts))})


LISTED_RANKS = several([b"K\x01"] * 40_000)

# By row of the defects: what it is, how it is made, and the exit codes of info and verify, and of merge.
CASES: dict[str, dict[str, tuple[Build, int, int]]] = {
    "worlds": {
        "of a name": (lambda folder: claimed(folder, committed=False), INCOMPLETE, INCOMPLETE),
        "of a manifest": (lambda folder: claimed(folder, committed=True), CORRUPT, CORRUPT),
    },
    "numbers": {
        "in names": (numbered, OK, INCOMPLETE),
        "in a shape": (
            lambda folder: numbered(
                folder, {"w": {"dim": 0, "split": {"w": {"q": 1, "k": 1}}, "interleaved": True}}, shape=(1 << 40, 0)
            ),
            OK,
            USAGE,
        ),
        "in a grid": (
            lambda folder: numbered(folder, {"grid": {"tp": 1 << 40}, "rules": {"w": {"dim": 0, "axis": "tp"}}}),
            OK,
            USAGE,
        ),
    },
    "copies": {"of a list": (torch_file(copies()), CORRUPT, CORRUPT)},
    "names": {
        "below a long one": (torch_file(below_a_long_name()), CORRUPT, CORRUPT),
        "of wrappers": (torch_file(named({"module." * 150_000 + "w": tensor()})), OK, OK),
        "of parts that are missing": (long_name_of_parts(), INCOMPLETE, INCOMPLETE),
    },
    "messages": {
        "on a shape": (torch_file(listed([tensor(shape=pairs())])), CORRUPT, CORRUPT),
        "on a storage": (torch_file(listed([tensor(key=pairs())])), CORRUPT, CORRUPT),
        "on a class": (torch_file(pairs() + text("x") + b"\x93"), UNSAFE, UNSAFE),
        "with an opaque key": (torch_file(opaque_key()), OK, OK),
        "on sizes": (dcp({"w": fact(size=pairs())}), CORRUPT, CORRUPT),
        "on a file": (dcp({"w": fact()}, stored(text("w"), ZERO, pairs())), CORRUPT, CORRUPT),
        "on an extension": (
            dcp({"w": fact()}, stored(text("w"), ZERO, FILE, transform_descriptors=pairs())),
            UNSAFE,
            UNSAFE,
        ),
        "on a name": (dcp({"w": fact()}, stored(pairs(), ZERO, FILE)), CORRUPT, CORRUPT),
    },
    "keys": {
        "long tuples": (torch_file(repeated_key(several([b"N"] * 60_000), 20_000)), CORRUPT, CORRUPT),
        "equal texts": (torch_file(equal_keys()), CORRUPT, CORRUPT),
        "numbers of one hash": (torch_file(colliding_numbers()), CORRUPT, CORRUPT),
        "pairs of one hash": (torch_file(colliding_pairs()), CORRUPT, CORRUPT),
    },
    "shared": {
        "wrappers": (torch_file(shared_wrappers()), CORRUPT, CORRUPT),
        "a list": (torch_file(shared_list()), CORRUPT, CORRUPT),
        "arguments": (torch_file(shared_arguments()), CORRUPT, CORRUPT),
        "ranks, equal and not the same": (torch_file(equal_ranks()), CORRUPT, CORRUPT),
        "ranks of meshes": (torch_file(distributed(LISTED_RANKS, 300)), CORRUPT, CORRUPT),
        "parts": (shared_chunks(), CORRUPT, CORRUPT),
    },
    "opaque": {
        "objects with tensors": (torch_file(shared_refusals()), CORRUPT, CORRUPT),
        "an object again and again": (torch_file(shared_opaque()), CORRUPT, CORRUPT),
        "objects in each other": (torch_file(opaque_of_opaque()), OK, OK),
    },
    "places": {"of entries": (one_place(), CORRUPT, CORRUPT)},
}


@pytest.mark.parametrize("row", by_default(CASES, 0, 1))
def test_a_small_file_takes_little(tmp_path: Path, row: str) -> None:
    calls = []
    for number, (build, _, _) in enumerate(CASES[row].values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, layout = str(build(folder)), folder / "layout.json"
        options = ["--layout", str(layout)] if layout.exists() else []
        calls += [["info", path], ["verify", path], ["merge", path, str(folder / "merged"), *options]]
    command = [sys.executable, "-c", COMMANDS, str(MEMORY_BYTES), str(CPU_S)]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=60)
    codes = iter(json.loads(done.stdout))
    found = {case: [next(codes), next(codes), next(codes)] for case in CASES[row]}
    assert found == {case: [looking, looking, merging] for case, (_, looking, merging) in CASES[row].items()}, (
        done.stderr[-4000:]
    )
    assert "Traceback" not in done.stderr
