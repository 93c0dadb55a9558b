"""Headers, indexes, manifests and tensors that request much memory or time: rows E8 to E13 of the defects, and similar.

Each function writes its files into an empty directory.
"""

from __future__ import annotations

import json
import math
import os
import random
import struct
from pathlib import Path
from typing import Any

import xxhash
from pickled import MESH, PLACEMENTS, SPEC, Pickled, archive, dtensor, integer, made, named, numbers, several, tensor

NO_DIGEST = "0" * 32
EMPTY_DIGEST = "99aa06d3014798d86001c324468d497f"


# Safetensors files and manifests


def safetensors(path: Path, header: dict[str, Any] | bytes, nbytes: int = 0) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + nbytes)


def published(path: Path, shape: list[int], nbytes: int, boxes: list[Any], **fields: Any) -> None:
    """Write a directory with one tensor `w`, and a manifest that lists its boxes as (offsets, shape, digest, rank)."""
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, nbytes]}
    safetensors(path / "model.safetensors", {"w": entry, **fields.pop("header", {})}, nbytes)
    fact = {"file": "model.safetensors", "dtype": "U8", "shape": shape, "source": "w", "boxes": boxes, **fields}
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
    """Write boxes that each reach from the start of a file to its end; each window holds a few of them."""
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
    """Write a file that is a part of the tensor by torch's metadata, and all of it by the manifest."""
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


# Files of torch.save with one storage, of 16 floats


def torch_file(path: Path, **tensors: Pickled) -> None:
    archive(path / "model.pt", named(tensors), {"0": bytes(range(64))})


def part(shape: Pickled, strides: Pickled, offset: int = 0) -> Pickled:
    return tensor(shape, strides, numel=16, offset=offset)


def strided(length: int, local: Pickled, mesh: list[int], *factors: int) -> Pickled:
    """Write a DTensor of one dim, cut along each axis of a mesh as a _StridedShard with a split factor."""
    cuts = [made(PLACEMENTS + "_StridedShard", dim=integer(0), split_factor=integer(factor)) for factor in factors]
    device_mesh = made(
        MESH,
        mesh=part(numbers(*mesh), numbers(*(0 for _ in mesh))),
        _flatten_mesh_list=numbers(*range(math.prod(mesh))),
        _coordinate_on_dim=numbers(*(0 for _ in mesh)),
    )
    spec = made(SPEC, mesh=device_mesh, placements=several(cuts))
    return dtensor(several([b"N", b"N", numbers(length)]), named({"_spec": spec, "_local_tensor": local}))


FOUR = part(numbers(4), numbers(1))
DEEP = b")" + b"\x85" * 3000  # a tuple in a tuple in a tuple


def expanded(path: Path) -> None:
    torch_file(path, w=part(numbers(1 << 20, 1 << 20), numbers(0, 0)))


def overlapping(path: Path) -> None:
    torch_file(path, **{f"w{i}": part(numbers(1 << 18, 8), numbers(0, 1), offset=i % 8) for i in range(100)})


def a_little_expanded(path: Path) -> None:
    torch_file(path, w=part(numbers(1000, 4), numbers(0, 1)))


def strided_often(path: Path) -> None:
    torch_file(path, w=strided(1 << 18, FOUR, [2, 2], 1 << 16, 1 << 16))


def strided_in_many(path: Path) -> None:
    local = part(numbers(1 << 16), numbers(0))
    torch_file(path, **{f"w{i}": strided(1 << 16, local, [1, 1], 1 << 16, 1 << 16) for i in range(50)})


def a_mesh_of_many_axes(path: Path) -> None:
    torch_file(path, w=strided(4, FOUR, [1] * 40, *[1] * 40), v=strided(4, FOUR, [2, 2], 1, 1))


def deep_shape(path: Path) -> None:
    torch_file(path, w=part(DEEP, numbers(1)))


def deep_value(path: Path) -> None:
    torch_file(path, w=DEEP)


def no_files(path: Path) -> None:
    (path / "statexchange.json").write_text('{"files": 5}')


def aliases_of_lists(path: Path) -> None:
    published(path, [4], 4, [[[0], [4], NO_DIGEST, 0]])
    manifest = json.loads((path / "statexchange.json").read_text())
    (path / "statexchange.json").write_text(json.dumps({**manifest, "aliases": {"tied": ["w"]}}))


def negative_rank(path: Path) -> None:
    published(path, [4], 4, [[[0], [4], NO_DIGEST, -1]])


def an_index_of_absent_files(path: Path) -> None:
    weight_map = {f"w{number}": f"{number}.safetensors" for number in range(10_000)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def an_index_of_absent_torch_files(path: Path) -> None:
    weight_map = {f"w{number}": f"{number}.bin" for number in range(10_000)}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "1.bin").touch()


def long_facts(path: Path) -> None:
    folder = path / "job" / "000001"
    folder.mkdir(parents=True)
    facts = {"schema": "a." * 200_000}
    header = {"__metadata__": {"statexchange": json.dumps(facts)}}
    safetensors(folder / "rank-00000-of-00001.0000000000000000.safetensors", header)


def a_long_dotted_name(path: Path) -> None:
    local = strided(1 << 18, FOUR, [2, 2], 1, 1)
    torch_file(path, **{"a." * 100_000: local})


def a_deep_config(path: Path, depth: int = 900) -> None:
    """Write a config.json that json can still parse, beside a tensor."""
    whole(path)
    (path / "config.json").write_text('{"a":' * depth + "0" + "}" * depth)


def whole(path: Path) -> None:
    safetensors(path / "model.safetensors", {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 4)


MANIFESTS = (
    empty_dim,
    empty_boxes,
    twelve_dims,
    many_columns,
    dense_header,
    dense_keys,
    dense_manifest,
    sparse_index,
    smaller_sparse_index,
    other_shape,
    part_with_boxes,
    far_offsets,
    far_shape,
    expanded,
    overlapping,
    a_little_expanded,
    strided_often,
    strided_in_many,
    a_mesh_of_many_axes,
    deep_shape,
    deep_value,
    no_files,
    aliases_of_lists,
    an_index_of_absent_files,
    an_index_of_absent_torch_files,
    long_facts,
    a_long_dotted_name,
    a_deep_config,
    negative_rank,
    whole,
)
