"""Layouts of quantised weights in safetensors: what the packed tensors are, and torchao's metadata about them.

The tensors of these layouts are plain ones and are copied as they are. Only the library that wrote them knows what the
bytes mean, so `info` names the layout, by the names of the tensors.

torchao takes a quantised weight ``l.weight`` apart, into ``l._weight_qdata``, ``l._weight_scale`` and others. The text
metadata of the file has a record for each weight under its name, and the list of all under "tensor_names".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from statexchange.errors import UnsupportedError, excerpt
from statexchange.formats.config_check import is_plain
from statexchange.formats.source import TORCHAO_NAMES, Source, torchao_names

__all__ = ["packing_notes", "renamed_torchao"]


_VLLM = "transformers, with the package that wrote it, or vLLM loads it"
# By names of tensors, of which the first that is there counts: what the weights are, and which tool loads them.
_LAYOUTS = (
    (
        re.compile(r"\.quant_state\.bitsandbytes__|\.SCB$"),
        "bitsandbytes: weights packed into U8, or I8 with SCB, and their scales beside them",
        "transformers with bitsandbytes loads it",
    ),
    (re.compile(r"\.g_idx$"), "GPTQ: weights packed into I32 as qweight, qzeros, scales and g_idx", _VLLM),
    (
        re.compile(r"\.qzeros$"),
        "AWQ, or GPTQ without g_idx: weights packed into I32 as qweight, qzeros and scales",
        _VLLM,
    ),
    (
        re.compile(r"\._[^.]+_qdata$"),
        "torchao: weights taken apart into _weight_qdata, _weight_scale and others, with records in the metadata",
        "transformers or vLLM with torchao loads it",
    ),
    (
        re.compile(r"\.weight_packed$"),
        "compressed-tensors: weights quantised, or packed as weight_packed, with scales beside them",
        "vLLM, or transformers with compressed-tensors, loads it",
    ),
    (
        re.compile(r"_blocks_scales$"),
        "MXFP4: weights packed into U8 as *_blocks, with *_scales",
        "transformers or vLLM loads it",
    ),
    (
        re.compile(r"\.weight_scale_inv$"),
        "float8 by blocks: weights in F8_E4M3 with weight_scale_inv",
        "transformers or vLLM loads it",
    ),
)


def packing_notes(source: Source) -> tuple[str, ...]:
    """Return a note about the layout of quantised weights in a Hugging Face checkpoint; () for any other source."""
    names = {tensor.shard.name: tensor.shard.dtype for _, tensor in source.shards()}
    # Tensors decide: a config that calls plain weights quantised is named by config_check.py.
    if source.kind != "huggingface" or is_plain(names):
        return ()
    # A list of blocks may have any name, so one of MXFP4 is known by its two parts.
    pairs = [f"{name}_scales" for name in names if f"{name.removesuffix('_blocks')}_scales" in names]
    for pattern, title, tool in _LAYOUTS:
        if any(map(pattern.search, (*names, *pairs))):
            return (f"{title}. {tool}; a merge copies the packed tensors as they are",)
    return ()


def renamed_torchao(metadata: Mapping[str, str], rename: Callable[[str], str], path: str) -> dict[str, str]:
    """Return text metadata in which torchao's records have the new names; any other metadata unchanged.

    Args:
        metadata: the text metadata of a checkpoint.
        rename: gives the new name of a tensor.
        path: the checkpoint's, for messages.

    Raises:
        UnsupportedError: the parts of a weight would get names that torchao does not put together.
    """
    if TORCHAO_NAMES not in metadata:
        return dict(metadata)
    weights = torchao_names(metadata[TORCHAO_NAMES])
    if weights is None or not all(name in metadata for name in weights):
        return dict(metadata)
    new_names = {name: rename(name) for name in weights}
    for name, new_name in new_names.items():
        old_part, new_part = (_part_of(weight, "qdata") for weight in (name, new_name))
        if new_name != name and rename(old_part) != new_part:
            text = (
                f"torchao would not find the parts of this weight: {excerpt(old_part)} becomes "
                f"{excerpt(rename(old_part))}, not {excerpt(new_part)}. Rename modules, not weights"
            )
            raise UnsupportedError(text, name=name, path=path)
    found = {new_names.get(key, key): value for key, value in metadata.items() if key != TORCHAO_NAMES}
    return {**found, TORCHAO_NAMES: json.dumps(list(new_names.values()))}


def _part_of(weight: str, part: str) -> str:
    """Return the name of a part of a weight: of ``l.weight`` it is ``l._weight_qdata``."""
    module, dot, last = weight.rpartition(".")
    return f"{module}{dot}_{last}_{part}"
