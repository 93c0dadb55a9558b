"""Small files of frameworks and conversions that request much memory or time, beside those of rows E1 to E13.

Each function writes its files into an empty directory.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
from pickled import (
    ZERO,
    Pickled,
    again,
    archive,
    integer,
    keep,
    listed,
    made,
    mapped,
    named,
    numbers,
    pairs,
    tensor,
    text,
)
from safetensors.numpy import save_file

MANY, OFTEN = 2000, 20_000
CHECKPOINT = "torch.distributed.checkpoint."


# DeepSpeed


def _deepspeed(path: Path, **entries: Pickled) -> None:
    """Write the model's file of a step, and rank 0's file of the optimizer's states with `state`."""
    step = path / "global_step1"
    step.mkdir()
    (path / "latest").write_text("global_step1")
    state = entries.pop("state", named({}))
    entries = {"module": named({}), "param_shapes": listed([]), **entries}
    archive(step / "mp_rank_00_model_states.pt", named(entries))
    archive(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt", named({"optimizer_state_dict": state}))


def _shared(value: Pickled, times: int = OFTEN, key: int = 7) -> Pickled:
    """A list that refers to one value many times; `key` is the value's number in the pickle."""
    return listed([keep(key, value), *([again(key)] * times)])


def groups_of_equal_shapes(path: Path) -> None:
    shapes = named({f"w{number}": numbers(4) for number in range(MANY)})
    _deepspeed(path, param_shapes=_shared(shapes))


def buffers_in_each_other(path: Path) -> None:
    _deepspeed(path, buffer_names=listed([pairs()]))


def names_in_each_other(path: Path) -> None:
    shapes = listed([named({"w": numbers(2)})])
    _deepspeed(path, param_shapes=shapes, shared_params=named({"tied": pairs()}))


def places_again_and_again(path: Path) -> None:
    address = made("deepspeed.utils.fragment_address", start=integer(0), numel=integer(0))
    table = named({"w0": keep(9, address), **{f"w{number}": again(9) for number in range(1, MANY)}})
    state = named(
        {
            "single_partition_of_fp32_groups": _shared(tensor()),
            "partition_count": integer(1),
            "base_optimizer_state": named({"state": mapped([])}),
            "param_slice_mappings": _shared(table, key=8),
        }
    )
    _deepspeed(path, param_shapes=listed([named({f"w{number}": ZERO for number in range(MANY)})]), state=state)


def states_again_and_again(path: Path) -> None:
    states = named({f"s{number}": tensor() for number in range(MANY // 4)})
    state = named(
        {
            "single_partition_of_fp32_groups": _shared(tensor()),
            "partition_count": integer(1),
            "base_optimizer_state": _shared(states),
        }
    )
    _deepspeed(path, param_shapes=listed([named({"w": numbers(2)})]), state=state)


# DCP


def a_list_in_itself(path: Path) -> None:
    """Write an entry that is a list of itself, many times."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        itself = b"\x80\x02]q\x00(" + b"h\x00" * 9000 + b"e."
        file.writestr("archive/data.pkl", itself)
        file.writestr("archive/byteorder", b"little")
    data = content.getvalue()
    (path / "__0_0.distcp").write_bytes(data)
    index = made(CHECKPOINT + "metadata.MetadataIndex", fqn=text("groups"), offset=b"N")
    place = made(
        CHECKPOINT + "filesystem._StorageInfo",
        relative_path=text("__0_0.distcp"),
        offset=integer(0),
        length=integer(len(data)),
    )
    entries = named({"groups": made(CHECKPOINT + "metadata.BytesStorageMetadata")})
    metadata = made(
        CHECKPOINT + "metadata.Metadata", state_dict_metadata=entries, storage_data=mapped([(index, place)])
    )
    (path / ".metadata").write_bytes(b"\x80\x02" + metadata + b".")


# Many files


def files_that_each_ask_for_little(path: Path) -> None:
    """Write files of which each alone would be read: its pickle visits one list often."""
    value = _shared(listed([listed([])] * 1000), 7)
    for rank in range(20):
        archive(path / f"model_rank_{rank}.pt", named({f"a{rank}": value}))


# Conversions


def _converted(path: Path, conversion: dict[str, object], config: dict[str, object], shape: tuple[int, ...]) -> None:
    save_file({"w": np.zeros(shape, "f4")}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "conversion.json").write_text(json.dumps(conversion))


def numbers_of_numbers(path: Path) -> None:
    """Write numbers of which each names the next one fifty times."""
    known = {f"n{depth}": {"value": "*".join([f"n{depth + 1}"] * 50)} for depth in range(6)}
    rule = {"from": "w", "to": "v", "values": [{"pad": {"dim": 0, "to": "n0"}}]}
    _converted(path, {"numbers": {**known, "n6": {"config": ["one"]}}, "rules": [rule]}, {"one": 1}, (4,))


def a_permutation_of_nothing(path: Path) -> None:
    values = [{"permute": {"dim": 0, "shape": [1 << 40, "none", 1], "order": [1, 0, 2]}}]
    conversion = {"numbers": {"none": {"config": ["none"]}}, "rules": [{"from": "w", "to": "v", "values": values}]}
    _converted(path, conversion, {"none": 0}, (0, 4))


def permutations_one_after_another(path: Path) -> None:
    values = [{"permute": {"dim": 0, "shape": [1 << 7, 1 << 7, 1 << 7], "order": [1, 0, 2]}}] * 3
    _converted(path, {"rules": [{"from": "w", "to": "v", "values": values}]}, {}, (1 << 21,))


def a_permutation_of_many_parts(path: Path) -> None:
    groups = {"split": {"dim": 0, "sizes": [1], "groups": 1 << 9}}
    values = [groups, {"permute": {"dim": 0, "shape": [1 << 10, 1 << 10], "order": [1, 0]}}]
    _converted(path, {"rules": [{"from": "w", "to": "v", "values": values}]}, {}, (1 << 20,))


def layers_of_nothing(path: Path) -> None:
    rule = {"from": "w", "to": "layers.{layer}.w", "unstack": ["layer"]}
    _converted(path, {"rules": [rule]}, {}, (1 << 20, 0))


FRAMEWORKS = (
    groups_of_equal_shapes,
    buffers_in_each_other,
    names_in_each_other,
    places_again_and_again,
    states_again_and_again,
    a_list_in_itself,
    files_that_each_ask_for_little,
)
