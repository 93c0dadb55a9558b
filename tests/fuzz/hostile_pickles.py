"""Files of torch.save, DCP and ranks that request much memory or time: rows E1 to E8 of the defects, and similar."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pickled import (
    FLOATS,
    ORDERED,
    REBUILD,
    SIZE,
    ZERO,
    Pickled,
    again,
    archive,
    call,
    integer,
    keep,
    listed,
    made,
    mapped,
    named,
    pairs,
    several,
    storage,
    symbol,
    tensor,
    text,
)
from safetensors.numpy import save_file

from statexchange.sharding.shards import Box, Shard
from statexchange.storage.tensorfile import ShardData
from statexchange.storage.workspace import Workspace

Build = Callable[[Path], Path]
"""Writes files into an empty folder, and returns the path to open."""

PRIME = (1 << 61) - 1  # numbers that differ by a multiple of it have equal hashes


def torch_file(value: Callable[[], Pickled]) -> Build:
    return lambda folder: archive(folder / "x.pt", value())


# Names of files that claim many ranks


def claimed(folder: Path) -> Path:
    """One rank's file of a world of 999,999,999."""
    world_size = 999_999_999
    tensors = [ShardData(Shard("w", "U8", (4,), (Box((0,), (4,)),)), (np.zeros(4, np.uint8),))]
    Workspace(folder / "ws").write(tensors, run="job", round=1, rank=0, world_size=world_size)
    return folder / "ws"


def numbered(folder: Path, layout: object = None, shape: tuple[int, ...] = (2,)) -> Path:
    files = folder / "files"
    files.mkdir()
    for number in (0, 20261122011500 if layout is None else 1):
        save_file({"w": np.zeros(shape, "f4")}, files / f"rank_{number}.safetensors")
    (folder / "layout.json").write_text(json.dumps(layout or {"w": {"dim": 0}}))
    return files


# Files of torch.save


def copies() -> Pickled:
    content = mapped((integer(n), b"N") for n in range(5000))
    counter = symbol("collections.Counter")
    return listed([call(keep(1, counter), keep(0, content)), *[call(again(1), again(0))] * 10_000])


def below_a_long_name() -> Pickled:
    return named({"k" * 300_000: mapped((integer(n), b"N") for n in range(30_000))})


def repeated_key(key: Pickled, times: int) -> Pickled:
    return listed([mapped([(keep(0, key), b"N")]), *[mapped([(again(0), b"N")])] * times])


def equal_keys() -> Pickled:
    """Return two equal strings that are different objects."""
    first = mapped([(keep(0, text("k" * 300_000)), b"N"), (keep(1, text("k" * 300_000)), b"N")])
    return listed([first, *[mapped([(again(0), b"N"), (again(1), b"N")])] * 20_000])


def colliding_numbers() -> Pickled:
    return mapped((integer(n * PRIME), b"N") for n in range(40_000))


def colliding_pairs() -> Pickled:
    """Return pairs with one hash: the second number is computed from the first by Python's hash of tuples."""
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


def shared_wrappers() -> Pickled:
    """Return one tensor in 10,000 Parameters, each under a name of its own."""
    parameter = keep(0, symbol("torch._utils._rebuild_parameter"))
    first = parameter + b"(" + (again(0) + b"(") * 10_000 + tensor() + b"\x89NtR" * 10_000 + b"\x89NtR"
    return listed([keep(1, first), *[again(1)] * 10_000])


def shared_list() -> Pickled:
    return named({"a": keep(0, listed([b"N"] * 60_000)), "b": mapped((integer(n), again(0)) for n in range(10_000))})


def distributed(ranks: Pickled, count: int = 1) -> Pickled:
    """Return DTensors in two parts, on meshes of their own that share one list of ranks."""
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


def shared_refusals() -> Pickled:
    """Return one sparse tensor, and one object that holds a tensor, each under 100,000 names."""
    sparse = call(symbol("torch._utils._rebuild_sparse_tensor"), b"N")
    holding = call(symbol("some.Class"), tensor())
    return listed([keep(0, sparse), *[again(0)] * 100_000, keep(1, holding), *[again(1)] * 100_000])


def shared_opaque() -> Pickled:
    """Return a list of lists that repeat one opaque object."""
    opaque = call(symbol("some.Class"), b"N")
    return listed([keep(0, listed([keep(1, opaque), *[again(1)] * 60_000])), *[again(0)] * 10_000])


def opaque_of_opaque() -> Pickled:
    """Return objects that hold one another, 10,000 deep, each of them also under a name."""
    found, value = [], b"N"
    for number in range(10_000):
        value = keep(number, call(symbol("some.Class"), value))
        found.append((text(str(number)), value))
        value = again(number)
    return mapped(found)


def equal_ranks() -> Pickled:
    """Return two ranks that are nested pairs, equal but not identical, so that comparing them takes 2**40 steps."""
    other = pairs()
    for level in reversed(range(41)):
        other = other.replace((1000 + level).to_bytes(4, "little"), (2000 + level).to_bytes(4, "little"))
    return distributed(several([pairs(), other, integer(1)]))


def shared_arguments() -> Pickled:
    """Return tensors of 100,000 arguments, which are all one object."""
    first = [storage(), integer(0), SIZE, integer(1) + b"\x85", b"\x89", ORDERED + b")R"]
    arguments = keep(0, several([*first, *[b"N"] * 100_000]))
    return listed([keep(1, REBUILD) + arguments + b"R", *[again(1) + again(0) + b"R"] * 10_000])


def opaque_key() -> Pickled:
    return mapped([(call(symbol("torch.device"), pairs()), mapped([(text("a"), b"N")]))])


# DCP

CHECKPOINT = "torch.distributed.checkpoint."
PROPERTIES = keep(
    500, symbol(CHECKPOINT + "metadata.TensorProperties") + b")\x81" + several([symbol("torch.float32")]) + b"b"
)


def fact(size: Pickled = SIZE, chunks: Pickled | None = None, properties: Pickled = PROPERTIES) -> Pickled:
    chunk = made(CHECKPOINT + "metadata.ChunkStorageMetadata", offsets=integer(0) + b"\x85", sizes=SIZE)
    return made(
        CHECKPOINT + "metadata.TensorStorageMetadata",
        properties=properties,
        size=size,
        chunks=listed([chunk]) if chunks is None else chunks,
    )


def stored(
    name: Pickled, offset: Pickled, file: Pickled, begin: int = 0, length: int = 0, **more: Pickled
) -> tuple[Pickled, Pickled]:
    index = made(CHECKPOINT + "metadata.MetadataIndex", fqn=name, offset=offset)
    info = made(
        CHECKPOINT + "filesystem._StorageInfo",
        relative_path=file,
        offset=integer(begin),
        length=integer(length),
        **more,
    )
    return index, info


def dcp(facts: dict[str, Pickled], *entries: tuple[Pickled, Pickled], data: Pickled = b"N") -> Build:
    """Write a DCP directory with one file that holds an archive of this pickle."""

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
    """Return 2,000 entries at one place of the file, with a pickle of 200,000 bytes."""
    data = listed([b"N"] * 200_000)

    def build(folder: Path) -> Path:
        length = archive(folder / "one", data).stat().st_size
        others = {f"n{n}": made(CHECKPOINT + "metadata.BytesStorageMetadata") for n in range(2000)}
        return dcp(others, *[stored(text(name), b"N", FILE, 0, length) for name in others], data=data)(folder)

    return build


def shared_chunks() -> Build:
    """Return 2,000 tensors that have the same 1,000 parts."""
    parts = [
        made(CHECKPOINT + "metadata.ChunkStorageMetadata", offsets=integer(n) + b"\x85", sizes=keep(501, ZERO))
        for n in range(1000)
    ]
    first = fact(chunks=keep(502, listed(parts)))
    following = fact(chunks=again(502), properties=again(500))
    return dcp({f"n{n}": following if n else first for n in range(2000)})


def long_name_of_parts() -> Build:
    """Return a tensor with a name of 300,000 characters and 5,000 parts, none of which is stored."""
    parts = [
        made(CHECKPOINT + "metadata.ChunkStorageMetadata", offsets=integer(n) + b"\x85", sizes=integer(1) + b"\x85")
        for n in range(5000)
    ]
    return dcp({"n" * 300_000: fact(integer(5000) + b"\x85", listed(parts))})


# By row of the defects.
PICKLES: dict[str, dict[str, Build]] = {
    "worlds": {
        "of a name": claimed,
    },
    "numbers": {
        "in names": numbered,
        "in a shape": lambda folder: numbered(
            folder, {"w": {"dim": 0, "split": {"w": {"q": 1, "k": 1}}, "interleaved": True}}, shape=(1 << 40, 0)
        ),
        "in a mesh": lambda folder: numbered(
            folder, {"mesh": {"tp": 1 << 40}, "rules": {"w": {"dim": 0, "axis": "tp"}}}
        ),
    },
    "copies": {"of a dict": torch_file(copies)},
    "names": {
        "below a long one": torch_file(below_a_long_name),
        "of wrappers": torch_file(lambda: named({"module." * 150_000 + "w": tensor()})),
        "of parts that are missing": lambda folder: long_name_of_parts()(folder),
    },
    "messages": {
        "on a shape": torch_file(lambda: listed([tensor(shape=pairs())])),
        "on a storage": torch_file(lambda: listed([tensor(key=pairs())])),
        "on a class": torch_file(lambda: pairs() + text("x") + b"\x93"),
        "with an opaque key": torch_file(opaque_key),
        "on sizes": dcp({"w": fact(size=pairs())}),
        "on properties": dcp({"w": fact(properties=symbol(CHECKPOINT + "metadata.TensorProperties") + b")\x81)b")}),
        "on a file": dcp({"w": fact()}, stored(text("w"), ZERO, pairs())),
        "on an extension": dcp({"w": fact()}, stored(text("w"), ZERO, FILE, transform_descriptors=pairs())),
        "on a name": dcp({"w": fact()}, stored(pairs(), ZERO, FILE)),
    },
    "keys": {
        "long tuples": torch_file(lambda: repeated_key(several([b"N"] * 60_000), 20_000)),
        "equal texts": torch_file(equal_keys),
        "numbers of one hash": torch_file(colliding_numbers),
        "pairs of one hash": torch_file(colliding_pairs),
    },
    "shared": {
        "wrappers": torch_file(shared_wrappers),
        "a list": torch_file(shared_list),
        "a list in itself": torch_file(lambda: b"\x80\x02]q\x00(" + b"h\x00" * 2_000_000 + b"e"),
        "arguments": torch_file(shared_arguments),
        "ranks, equal and not the same": torch_file(equal_ranks),
        "ranks of meshes": torch_file(lambda: distributed(several([b"K\x01"] * 40_000), 300)),
        "parts": lambda folder: shared_chunks()(folder),
    },
    "opaque": {
        "objects with tensors": torch_file(shared_refusals),
        "an object again and again": torch_file(shared_opaque),
        "objects in each other": torch_file(opaque_of_opaque),
    },
    "places": {"of entries": lambda folder: one_place()(folder)},
}
