"""Archives of torch.save that are like an earlier one are read as if each were parsed."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from statexchange.errors import StateExchangeError
from statexchange.formats.torch_archive import TensorArchives
from statexchange.storage.location import open_path
from statexchange.storage.store import Budget, StoredFile


def archive(tensor: torch.Tensor) -> bytes:
    data = io.BytesIO()
    torch.save(tensor, data)
    return data.getvalue()


def opened(folder: Path, data: bytes) -> StoredFile:
    """Write a file of archives, and open it."""
    (folder / "archives").write_bytes(data)
    return open_path(str(folder)).store.open("archives")


def outcome(archives: TensorArchives, file: StoredFile, begin: int, length: int) -> Any:
    """Return what an archive has, or its error."""
    try:
        view, stored = archives.open(file, begin, length)
    except (StateExchangeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return type(error), str(error)
    return view, stored.begin, stored.nbytes, stored.strides


def new_archives() -> TensorArchives:
    return TensorArchives(Budget("archives", 1 << 20))


@pytest.mark.parametrize("rows", [3, 4000])
def test_archives_that_differ_in_their_numbers_are_alike(rows: int, tmp_path: Path) -> None:
    tensors = [torch.randn(rows, 8) for _ in range(5)]
    parts = [archive(tensor) for tensor in tensors]
    file = opened(tmp_path, b"".join(parts))
    archives = new_archives()
    begin = 0
    for tensor, part in zip(tensors, parts, strict=True):
        view, stored = archives.open(file, begin, len(part))
        assert (view.dtype, view.shape) == ("F32", (rows, 8))
        data = bytearray(stored.nbytes)
        file.read_into(memoryview(data), stored.begin)
        assert data == tensor.numpy().tobytes()
        begin += len(part)
    assert archives._num_kept == 1  # or this test shows nothing


@pytest.mark.parametrize("changes", [1, 2, 6])
def test_a_changed_archive_is_read_as_by_itself(changes: int, tmp_path: Path) -> None:
    rng = random.Random(changes)
    whole = archive(torch.arange(24.0).reshape(3, 8))
    others = [archive(torch.arange(24).reshape(3, 8).to(torch.int32)), archive(torch.arange(24.0).reshape(8, 3).t())]
    damaged = []
    for at in range(len(whole) if changes == 1 else 1500):
        data = bytearray(whole)
        places = [at] if changes == 1 else rng.sample(range(len(whole)), changes)
        for place in places:
            data[place] = rng.choice([data[place] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        damaged.append(bytes(data))
    parts = [whole, *others, *damaged]
    file = opened(tmp_path, b"".join(parts))
    seen = new_archives()
    begin = num_sound = 0
    for part in parts:
        expected = outcome(new_archives(), file, begin, len(part))
        assert outcome(seen, file, begin, len(part)) == expected
        num_sound += len(expected) == 4
        begin += len(part)
    assert 0 < num_sound < len(parts)
