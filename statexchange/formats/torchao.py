"""torchao's text metadata about quantised weights in safetensors.

torchao takes a quantised weight ``l.weight`` apart, into ``l._weight_qdata``, ``l._weight_scale`` and others. The text
metadata of the file has a record for each weight under its name, and the list of all under "tensor_names". The tensors
are plain ones; without the metadata nothing puts them together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from statexchange.errors import CorruptError, UnsupportedError, excerpt
from statexchange.storage.location import parse_json
from statexchange.storage.store import Budget

TENSOR_NAMES = "tensor_names"


def listed_weights(text: str) -> list[str] | None:
    """Return torchao's list of all weights, the value of `TENSOR_NAMES`; None if it is something else."""
    try:
        listed = parse_json(text, "", Budget(""))
    except CorruptError:
        return None
    # "tensor_names" may be the metadata of any program: what is no list of names is left as it is.
    return listed if isinstance(listed, list) and set(map(type, listed)) <= {str} else None


def renamed_records(metadata: Mapping[str, str], rename: Callable[[str], str], path: str) -> dict[str, str]:
    """Return text metadata in which torchao's records have the new names; any other metadata unchanged.

    Args:
        metadata: the text metadata of a checkpoint.
        rename: gives the new name of a tensor.
        path: the checkpoint's, for messages.

    Raises:
        UnsupportedError: the parts of a weight would get names that torchao does not put together.

    Example:
        >>> metadata = {"l.weight": '{"_type": "Int8Tensor"}', "tensor_names": '["l.weight"]'}
        >>> renamed_records(metadata, lambda name: f"model.{name}", "model.safetensors")
        {'model.l.weight': '{"_type": "Int8Tensor"}', 'tensor_names': '["model.l.weight"]'}
    """
    if TENSOR_NAMES not in metadata:
        return dict(metadata)
    weights = listed_weights(metadata[TENSOR_NAMES])
    if weights is None or not all(name in metadata for name in weights):
        return dict(metadata)
    new_names = {name: rename(name) for name in weights}
    for name, new_name in new_names.items():
        # The weight itself is no tensor of the file. Its parts are, and are renamed by their own names: one of them
        # shows whether both renames agree.
        part, expected = _part_of(name), _part_of(new_name)
        if new_name != name and rename(part) != expected:
            text = f"{excerpt(part)} becomes {excerpt(rename(part))}, not {excerpt(expected)}"
            text = f"torchao would not find the parts of this weight: {text}. Rename modules, not weights"
            raise UnsupportedError(text, name=name, path=path)
    records = {new_names.get(key, key): value for key, value in metadata.items()}
    return {**records, TENSOR_NAMES: json.dumps(list(new_names.values()))}


def _part_of(weight: str) -> str:
    """Return the name of the quantised values of a weight: of ``l.weight`` it is ``l._weight_qdata``."""
    module, dot, last = weight.rpartition(".")
    return f"{module}{dot}_{last}_qdata"
