"""Make small changes to the files of a source, by their kind: JSON, safetensors, pickles, zips, directories, bytes.

All changes follow from the files and one `random.Random`. A file is never written in place, since it may be a hard link
to the file of the source. A mutator returns a line of text about its change.
"""

from __future__ import annotations

import io
import os
import pickletools
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pickled
from mutate_json import KEYS, LARGE, MAX_DIRECTORY_DEPTH, MAX_STRUCTURED_BYTES, NUMBERS, TEXTS, json_file, mutated_json

__all__ = ["mutate", "mutated_pickle", "mutated_safetensors"]


# Safetensors


def mutated_safetensors(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return a file with another header, another header length, or another body."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = chance.randrange(12)
    if kind == 0:
        length = chance.choice((0, 1, 7, length - 1, length + 1, len(data), 10**8, 10**8 + 1, 1 << 32, (1 << 64) - 1))
        return struct.pack("<Q", length) + header + body, f"header length {length}"
    if kind == 1:
        body, what = _mutated_bytes(body, chance)
        return data[: 8 + length] + body, f"body: {what}"
    text, what = mutated_json(header.decode(), chance)
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded + body, f"header: {what}"


# Pickles


HARMFUL = [
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"cbuiltins\ngetattr\n",
    b"ctorch.Tensor\n__class__.__bases__\n",
    b"csome\nClass\n",
    b"c" + b"a" * 300 + b"\nB\n",
    b"\x8c\x02os\x8c\x06system\x93",
    b"cnumpy.core.multiarray\nscalar\n",
]
OPCODES = [
    b"N",
    b"\x88",
    b"(",
    b")",
    b"]",
    b"}",
    b"\x8f",
    b"0",
    b"1",
    b"2",
    b"R",
    b"b",
    b"\x81",
    b"\x92",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"a",
    b"e",
    b"s",
    b"u",
    b"\x90",
    b"\x91",
    b"Q",
    b"\x94",
    b"h\x00",
    b"h\x01",
    b"h\xff",
    b"j\0\0\0\0",
    b"q\x00",
    b"r\xff\xff\xff\xff",
    b".",
    b"\x80\x02",
    b"\x80\x05",
    b"\x95" + b"\xff" * 8,
    b"\x82\x01",
    b"P1\n",
    b"I5\n",
    b"\x97",
    b"G\x7f\xf0\0\0\0\0\0\0",
    b"\x8a\xff" + b"\x7f" * 255,
    b"\x8b\0\0\0\x80",
    b"B\xff\xff\xff\x7f",
    b"\x96" + b"\0" * 8,
    b"i__main__\nx\n",
    b"o",
    b"K\x00",
    b"J\xff\xff\xff\xff",
]


def mutated_pickle(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return a pickle with a few of its opcodes changed."""
    codes = _codes(data)
    changes = []
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(codes))
        kind = chance.randrange(10)
        if kind < 4:
            codes[at], what = _other_argument(codes[at], codes, chance)
        elif kind == 4:
            what = f"without {codes.pop(at)!r:.40}" if len(codes) > 1 else ""
        elif kind == 5:
            count = chance.choice((1, 1, 2, 5, 20, 100))
            codes[at:at] = codes[at : at + count]
            what = f"{count} twice"
        elif kind == 6:
            other = chance.randrange(len(codes))
            codes[at], codes[other] = codes[other], codes[at]
            what = f"swap with {other}"
        elif kind == 7:
            begin = chance.randrange(len(codes))
            piece = codes[begin : begin + chance.choice((1, 3, 10, 40))]
            codes[at:at] = piece
            what = f"{len(piece)} from {begin} too"
        elif kind == 8:
            code = chance.choice((chance.choice(HARMFUL), chance.choice((pickled.pairs(25), *OPCODES))))
            codes.insert(at, code)
            what = f"and {code!r:.40}"
        else:
            codes.insert(at, chance.choice(OPCODES) * chance.choice((1, 2, 50, 5000)))
            what = f"many {codes[at]!r:.40}"
        changes.append(f"at {at} {what}")
    return b"".join(codes), "; ".join(changes)


def _codes(data: bytes) -> list[bytes]:
    """Return the bytes of each opcode; the bytes after the last one that can be parsed are one piece."""
    begins = []
    try:
        for _, _, position in pickletools.genops(data):
            begins.append(position)
    except ValueError:
        pass
    if not begins:
        return [data]
    return [data[begin:end] for begin, end in zip(begins, [*begins[1:], len(data)], strict=True)]


def _other_argument(code: bytes, codes: list[bytes], chance: random.Random) -> tuple[bytes, str]:
    """Return an opcode of the same kind with another argument, or one from another place."""
    first = code[:1]
    number = chance.choice((*NUMBERS, *LARGE[:-1]))
    if first in b"KMJ\x8a":
        new = pickled.integer(chance.choice((number, -number)))
    elif first in b"X\x8c":
        known = [one for one in codes if one[:1] in b"X\x8c"]
        chosen = chance.choice((*TEXTS, *KEYS)).encode("utf-8", "surrogatepass")
        new = chance.choice((chance.choice(known), b"X" + struct.pack("<I", len(chosen)) + chosen))
    elif first in b"c\x93":
        known = [one for one in codes if one[:1] in b"c\x93"]
        new = chance.choice((chance.choice(known), chance.choice(HARMFUL)))
    elif first in b"hjqr":
        new = (b"j" if first in b"hj" else b"r") + chance.choice((chance.randrange(64), number % (1 << 32))).to_bytes(
            4, "little"
        )
    else:
        new = chance.choice((chance.choice(codes), chance.choice(OPCODES)))
    return new, f"{code!r:.40} is {new!r:.40}"


# Zips


def _mutated_zip(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Change a zip of torch.save, or a file of DCP, which is several zips one after another."""
    ends = [match.end() + 18 for match in re.finditer(rb"PK\x05\x06", data)]
    number = chance.randrange(len(ends)) if ends else 0
    begin, end = [0, *ends][number], [*ends, len(data)][number]
    inner, what = _one_zip(data[begin:end], chance)
    return data[:begin] + inner + data[end:], what


def _one_zip(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    if chance.random() < 0.3:
        return _patched_zip(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = [[name, file.read(name)] for name in file.namelist()]
    at = chance.randrange(len(members))
    pickles = [n for n, (name, _) in enumerate(members) if name.endswith("data.pkl")]
    kind = chance.randrange(12)
    if kind < 7 and pickles:
        at = pickles[0]
        members[at][1], what = mutated_pickle(members[at][1], chance)
    elif kind == 7:
        what = f"without {members.pop(at)[0]}"
    elif kind == 8:
        what = f"{members[at][0]} twice"
        members.append(list(members[at]))
    elif kind == 9:
        new = chance.choice((members[chance.randrange(len(members))][0], *TEXTS)).encode("utf-8", "replace").decode()
        what = f"{members[at][0]} is {new!r:.40}"
        members[at][0] = new[:60_000]
    else:
        members[at][1], what = _mutated_bytes(members[at][1], chance)
        what = f"{members[at][0]}: {what}"
    method = zipfile.ZIP_DEFLATED if chance.random() < 0.02 else zipfile.ZIP_STORED
    room = len(data) - len(_zip_of(members, method))
    if room >= 120:  # another member fills the freed bytes, so that the following ones keep their offsets
        members.append(["archive/padding", bytes(room - 128)] if room >= 128 else ["p", b""])
    return _zip_of(members, method), what


def _zip_of(members: list[list[Any]], method: int) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", method) as file:
        for name, content in members:
            info = zipfile.ZipInfo("x")
            info.filename = name.replace("\0", "_")
            info.compress_type = method
            if info.filename in file.NameToInfo:
                del file.NameToInfo[info.filename]  # zipfile warns of equal names
            file.writestr(info, content)
    return found.getvalue()


def _patched_zip(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Change one field of a local header, of an entry of the central directory, or of the end record."""
    marks = [match.start() for match in re.finditer(rb"PK(\x01\x02|\x03\x04|\x05\x06)", data)]
    mark, width = chance.choice(marks), chance.choice((2, 4))
    at = mark + 2 * chance.randrange(2, 22)
    old = int.from_bytes(data[at : at + width], "little")
    new = chance.choice((old + 1, old - 1, chance.choice(NUMBERS), 0xFFFF, 0xFFFFFFFF)) % (1 << 8 * width)
    return data[:at] + new.to_bytes(width, "little") + data[at + width :], f"{old} at {at} of the zip is {new}"


# Bytes


def _mutated_bytes(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    if not data:
        return b"\0", "a byte where there was none"
    at = chance.randrange(len(data))
    end = min(len(data), at + chance.choice((1, 2, 4, 8, 64, 4096)))
    kind = chance.randrange(8)
    if kind < 2:
        bit = 1 << chance.randrange(8)
        return data[:at] + bytes((data[at] ^ bit,)) + data[at + 1 :], f"bit {bit} of byte {at}"
    if kind == 2:
        return data[:at], f"cut at {at}"
    if kind == 3:
        more = chance.choice((b"\0", b"\0" * 4096, b"x", data[:64]))
        return data + more, f"{len(more)} more bytes"
    if kind == 4:
        return data[:at] + data[end:], f"without {at} to {end}"
    if kind == 5:
        return data[:end] + data[at:], f"{at} to {end} twice"
    if kind == 6:
        return data[:at] + bytes(end - at) + data[end:], f"zeros from {at} to {end}"
    number = chance.choice((*NUMBERS, *LARGE[:6])).to_bytes(8, "little")[: chance.choice((1, 2, 4, 8))]
    return data[:at] + number + data[at + len(number) :], f"{number!r} at {at}"


def _mutated_file(path: Path, chance: random.Random) -> str:
    """Change one file by its kind, or, one time in eight and if it is large, as bytes."""
    size = path.stat().st_size
    if size > 4 * MAX_STRUCTURED_BYTES:
        return _patched_in_place(path, size, chance)
    data = path.read_bytes()
    mutator: Callable[[bytes, random.Random], tuple[bytes, str]] = _mutated_bytes
    if size <= MAX_STRUCTURED_BYTES and chance.random() < 0.875:
        if data[:1] == b"{":
            mutator = json_file
        elif data[8:9] == b"{":
            mutator = mutated_safetensors
        elif data[:4] == b"PK\3\4":
            mutator = _zip_of_safetensors if b"statexchange.json" in data else _mutated_zip
        elif data[:1] == b"\x80":
            mutator = mutated_pickle
    try:
        new, what = mutator(data, chance)
    except Exception:  # noqa: BLE001 (an earlier change has broken what this one parses)
        new, what = _mutated_bytes(data, chance)
    _replace_file(path, new)
    return f"{_shown(path.name)}: {what}"


def _zip_of_safetensors(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Change a zip that is read as a directory: one of its files, or the zip itself."""
    if chance.random() < 0.2:
        return _patched_zip(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = [[name, file.read(name)] for name in file.namelist()]
    member = chance.choice(members)
    mutator = json_file if member[1][:1] == b"{" else mutated_safetensors
    member[1], what = mutator(member[1], chance)
    return _zip_of(members, chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))), f"{member[0]}: {what}"


def _replace_file(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _patched_in_place(path: Path, size: int, chance: random.Random) -> str:
    """Change a byte of a large file, which may be sparse, or its size."""
    copy = path.with_name(path.name + ".copy")
    with open(path, "rb") as old, open(copy, "wb") as new:
        for begin, end in _data_of(old.fileno(), size):
            old.seek(begin)
            new.seek(begin)
            shutil.copyfileobj(io.BytesIO(old.read(end - begin)), new)
        new.truncate(chance.choice((size, size, size - 1, size // 2)))
        at = chance.choice((chance.randrange(64), chance.randrange(size)))
        new.seek(at)
        new.write(bytes((chance.randrange(256),)))
    copy.replace(path)
    return f"{_shown(path.name)}: byte {at}"


def _data_of(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file that hold data, not holes."""
    found, at = [], 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        found.append((begin, at))
    return found


# Directories

_NONCE = re.compile(r"[0-9a-f]{16}")
_NAMES = (
    "model.safetensors",
    "model-00003-of-00003.safetensors",
    "rank-00001-of-00002.0000000000000000.safetensors",
    "rank-00001-of-00002.safetensors",
    "statexchange.json",
    "manifest.json",
    "save.json",
    "dropped.json",
    ".metadata",
    "__1_0.distcp",
    "x.pt",
    "model.safetensors.index.json",
    "rank_7.safetensors",
    "shard-00003-model-00001-of-00001.safetensors",
    "000002",
    "job2",
    ".statexchange-claim.json",
    "x.gguf",
    "zarr.json",
    "n" * 200,
    "é",
    "a\nb",
    "\x1b[31m",
)


def _shown(name: str) -> str:
    return _NONCE.sub("*", name)


def _below(root: Path) -> list[Path]:
    """Return a directory and everything below it, in an order that does not depend on random names."""
    found = [root]
    for depth in range(MAX_DIRECTORY_DEPTH):
        found += sorted(
            (
                p
                for one in found
                if len(one.relative_to(root).parts) == depth and _is_directory(one)
                for p in one.iterdir()
            ),
            key=lambda path: (_shown(str(path)), str(path)),
        )
    return found


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _mutated_directory(root: Path, chance: random.Random) -> str:
    """Remove, rename, swap, empty or replace a file or a directory."""
    paths = _below(root)
    path = chance.choice(paths[1:] or paths)
    other = chance.choice([one for one in paths if one.parent == path.parent])
    kind = chance.choice(
        ("remove", "rename", "swap", "copy", "directory", "fifo", "dangling", "loop", "link", "empty", "mode")
    )
    name = chance.choice(_NAMES)
    if kind == "mode":
        path.chmod(chance.choice((0o777, 0o000, 0o770))) if not path.is_symlink() else None
    elif kind == "rename":
        path.rename(_free(path.with_name(chance.choice((name, path.name + "2", path.name[1:] or "y")))))
    elif kind == "swap" and other != path:
        aside = _free(path.with_name("aside"))
        path.rename(aside)
        other.rename(path)
        aside.rename(other)
    elif kind == "copy":
        target = _free(path.with_name(name))
        if _is_directory(path):
            shutil.copytree(path, target, symlinks=True, copy_function=os.link)
        elif path.is_file() and not path.is_symlink():
            os.link(path, target)
    elif kind == "link" and path.is_file() and not path.is_symlink():
        target = _free(path.with_name("target"))
        path.rename(target)
        path.symlink_to(target.name)
    else:
        _remove(path)
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "empty":
            path.write_bytes(b"")
    return f"{kind} {_shown(str(path.relative_to(root.parent)))} {name if kind in ('rename', 'copy') else ''}"


def _free(path: Path) -> Path:
    """`path`, or another name if that is taken."""
    while os.path.lexists(path):
        path = path.with_name(path.name[:200] + "_")
    return path


def _remove(path: Path) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def mutate(folder: Path, chance: random.Random) -> list[str]:
    """Change the files in `folder`; return lines about the changes."""
    changes = []
    for _ in range(chance.choice((1, 1, 1, 1, 2, 3))):
        files = [path for path in _below(folder) if path.is_file() and not path.is_symlink()]
        if files and chance.random() < 0.85:
            changes.append(_mutated_file(chance.choice(files), chance))
        elif len(_below(folder)) > 1:
            changes.append(_mutated_directory(folder, chance))
    return changes
