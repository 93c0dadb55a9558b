"""Build pickles and files of torch.save from the bytes of opcodes, without torch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

Pickled = bytes  # opcodes that push one value


def keep(number: int, value: Pickled) -> Pickled:
    """Push `value` and memoise it under a number, by which `again` pushes it in 5 bytes."""
    return value + b"r" + number.to_bytes(4, "little")


def again(number: int) -> Pickled:
    return b"j" + number.to_bytes(4, "little")


def text(value: str) -> Pickled:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def integer(value: int) -> Pickled:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def several(items: Iterable[Pickled]) -> Pickled:
    return b"(" + b"".join(items) + b"t"


def numbers(*values: int) -> Pickled:
    return several(map(integer, values))


def listed(items: Iterable[Pickled]) -> Pickled:
    return b"](" + b"".join(items) + b"e"


def mapped(pairs: Iterable[tuple[Pickled, Pickled]]) -> Pickled:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def named(values: dict[str, Pickled]) -> Pickled:
    return mapped((text(key), value) for key, value in values.items())


def symbol(path: str) -> Pickled:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def call(function: Pickled, *arguments: Pickled) -> Pickled:
    return function + several(arguments) + b"R"


def made(kind: str, **state: Pickled) -> Pickled:
    """An object of a class, with a state."""
    return symbol(kind) + b")\x81" + named(state) + b"b"


def pairs(depth: int = 40) -> Pickled:
    """Nested pairs: 2**depth values in 7 bytes a level."""
    value = keep(1000, integer(1) + b"\x85")
    for level in range(depth):
        value = keep(1001 + level, value + again(1000 + level) + b"\x86")
    return value


# The pickles of torch.save

FLOATS = symbol("torch.FloatStorage")
REBUILD = symbol("torch._utils._rebuild_tensor_v2")
ORDERED = symbol("collections.OrderedDict")
SIZE = numbers(2)
ZERO = numbers(0)
ONE = numbers(1)
KEY = text("0")
MESH = "torch.distributed.device_mesh.DeviceMesh"
SPEC = "torch.distributed.tensor._dtensor_spec.DTensorSpec"
PLACEMENTS = "torch.distributed.tensor.placement_types."


def storage(key: Pickled = KEY, numel: int = 2) -> Pickled:
    return several([text("storage"), FLOATS, key, text("cpu"), integer(numel)]) + b"Q"


def tensor(
    shape: Pickled = SIZE,
    strides: Pickled = ONE,
    *,
    key: Pickled = KEY,
    numel: int = 2,
    offset: int = 0,
    more: Pickled = b"",
) -> Pickled:
    """A tensor of floats in a storage of `numel`."""
    return call(REBUILD, storage(key, numel), integer(offset), shape, strides, b"\x89", ORDERED + b")R", more)


def dtensor(wrapped: Pickled, state: Pickled) -> Pickled:
    """A DTensor whose wrapper was built with the arguments `wrapped`."""
    wrapper = symbol("torch._utils._rebuild_wrapper_subclass")
    rebuild = symbol("torch._tensor._rebuild_from_type_v2")
    return call(rebuild, wrapper, symbol("torch.distributed.tensor.DTensor"), wrapped, state)


def archive(path: Path, data: Pickled, storages: dict[str, bytes] | None = None) -> Path:
    """Write a file of torch.save with one value, and storages by their keys."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + data + b".")
        file.writestr("archive/byteorder", b"little")
        for key, content in ({"0": bytes(8)} if storages is None else storages).items():
            file.writestr(f"archive/data/{key}", content)
    return path
