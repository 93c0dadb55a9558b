"""A save or export does not depend on those before it: what a rank keeps of them is used for equal tensors alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import statexchange as sx
from statexchange.testing import run_ranks

FIRST, SECOND, THIRD = torch.arange(8.0).reshape(4, 2), torch.arange(3.0), torch.ones(2, 2, dtype=torch.float16)
CHANGING = {"save", "digest", "created", "job"}  # what is another in each save of one state


def states(rank: int) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """By name: a state that resembles the others, and the options of its save and of its export."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def on_mesh(tensor: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(tensor, mesh, [placement])

    w, b = FIRST, SECOND
    made: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "plain": ({"w": w, "b": b}, {}, {}),
        "other values": ({"w": w + 1, "b": b + 1}, {}, {}),
        "other dtype": ({"w": w, "b": b.double()}, {}, {}),
        "other shape": ({"w": w.T.contiguous(), "b": b}, {}, {}),
        "other order": ({"b": b, "w": w}, {}, {}),
        "tied": ({"w": w, "b": b, "t": w}, {}, {}),
        "not tied": ({"w": w, "b": b, "t": w.clone()}, {}, {}),
        "rows": ({"w": on_mesh(w, Shard(0)), "b": b}, {}, {}),
        "columns": ({"w": on_mesh(w, Shard(1)), "b": b}, {}, {}),
        "copies": ({"w": on_mesh(w, Replicate()), "b": b}, {}, {}),
        "of rank 1": ({"w": w, "b": b, **({"own": w} if rank else {})}, {}, {}),
        "parts": ({"w": w[2 * rank :][:2], "b": b}, {"layout": {"w": Shard(0)}}, {"layout": {"w": Shard(0)}}),
        "columns by a layout": ({"w": w, "b": b}, {"layout": {"w": Shard(1)}}, {"layout": {"w": Shard(1)}}),
        "selected": ({"w": w, "b": b}, {"exclude": "b"}, {"exclude": "b"}),
        "cast": ({"w": w, "b": b}, {}, {"dtype": "bfloat16"}),
        "two files": ({"w": w, "b": b}, {}, {"max_shard_size": 32}),
        "root's": ({"w": w + rank, "b": b}, {}, {"replicas": "root"}),
        "half": ({"w": THIRD, "b": b}, {}, {}),
    }
    return made


def header_of(path: Path) -> Any:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    if "statexchange" in header["__metadata__"]:
        header["__metadata__"]["statexchange"] = without_changing(json.loads(header["__metadata__"]["statexchange"]))
    return header, data[8 + struct.unpack("<Q", data[:8])[0] :]


def without_changing(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in CHANGING}


def content_of(folder: Path) -> dict[str, Any]:
    """The files of a directory, without what is another in each save."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.name == "save.json":
            found[path.name] = without_changing(json.loads(path.read_text()))
        elif path.suffix == ".safetensors":
            found[path.name] = header_of(path)
        else:
            found[path.name] = path.read_bytes()
    return found


def writes_in_turn(folder: str, order: list[int], repeat: int) -> None:
    comm = sx.get_communicator()
    made = list(states(comm.rank).items())
    for number in order:
        name, (state, of_save, of_export) = made[number]
        for _ in range(repeat):
            sx.save_checkpoint(state, f"{folder}/save {name}", overwrite=True, **of_save)
            if name != "of rank 1":
                sx.export_checkpoint(state, f"{folder}/export {name}", overwrite=True, **of_export)


def test_a_directory_does_not_depend_on_what_was_written_before(tmp_path: Path) -> None:
    count = 18
    forwards, backwards, again = tmp_path / "forwards", tmp_path / "backwards", tmp_path / "again"
    for folder, order, repeat in (
        (forwards, range(count), 1),
        (backwards, reversed(range(count)), 1),
        (again, range(count), 2),
    ):
        folder.mkdir()
        run_ranks(writes_in_turn, 2, backend="gloo", args=(str(folder), list(order), repeat))
    names = sorted(path.name for path in forwards.iterdir())
    assert len(names) == 2 * count - 1
    for name in names:
        expected = content_of(forwards / name)
        assert content_of(backwards / name) == expected, name
        assert content_of(again / name) == expected, name


def exports_renamed(folder: str) -> None:
    prefixes = iter(("a.", "b."))
    prefix = [""]
    rename: Callable[[str], str] = lambda name: prefix[0] + name  # noqa: E731 (the same function each time)
    for _ in range(2):
        prefix[0] = next(prefixes)
        sx.export_checkpoint({"w": FIRST}, f"{folder}/{prefix[0]}", rename=rename)


def test_a_function_that_renames_is_asked_at_each_export(tmp_path: Path) -> None:
    run_ranks(exports_renamed, 2, backend="gloo", args=(str(tmp_path),))
    for prefix in ("a.", "b."):
        with sx.open_checkpoint(tmp_path / prefix) as checkpoint:
            assert list(checkpoint) == [prefix + "w"]


def saves_and_frees(folder: str) -> bool:
    import weakref

    array = np.ones(1000, np.float32)
    # Of the memory, which a view of the tensor would keep, too.
    memory = weakref.ref(array)
    tensor = torch.from_numpy(array)
    sx.save_checkpoint({"w": tensor}, f"{folder}/save")
    sx.export_checkpoint({"w": tensor}, f"{folder}/export")
    del tensor, array
    return memory() is None


def test_no_tensor_is_kept(tmp_path: Path) -> None:
    assert run_ranks(saves_and_frees, 2, backend="gloo", args=(str(tmp_path),)) == [True, True]
