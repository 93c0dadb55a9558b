"""The option `convert`: which conversion a caller means, a built-in one or the caller's own.

The built-in conversions are JSON files beside this module, in the form of a user's own file (`rules`).

torchtitan rotates neighbouring rows of queries and keys, transformers the two halves of a head. The last rules have the
names of torchtitan up to 0.2; ``freqs_cis`` is computed from the config, and dropped.

Megatron-Core fuses queries, keys and values by group of heads, and gate and up one after the other. torch_dist stacks
the layers, unless it was saved with singleton_local_shards; the older format has a name for each layer: so each rule
for a layer is there twice. Transformer Engine's layers have a norm in the linear that follows, the local ones beside
it. With singleton_local_shards the gate and up lie apart, as ``weight_w`` and ``weight_v``. An MLP has a gate if its
fc1 has twice as many rows as its fc2 has columns: their permutes move nothing, and check this by the number ``ffn``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from statexchange.conversions.plan import unknown_names
from statexchange.conversions.rules import ConversionRules
from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.sharding.options import Convert

_INVERSE = "inverse:"
BUILTIN: Mapping[str, str] = {"torchtitan:llama3": "torchtitan_llama3.json", "megatron:gpt": "megatron_gpt.json"}
"""The file of each built-in conversion."""


def choose_conversion(convert: Convert, read: Callable[[str], object]) -> ConversionRules:
    """Return the conversion that the option `convert` names.

    Args:
        convert: the name of a built-in conversion or the path of a JSON file, with or without "inverse:" before it; or
            the content of such a file.
        read: returns the JSON value of a file, given its path.

    Raises:
        InvalidArgumentError: there is no such conversion, or a file has none.
    """
    if isinstance(convert, Mapping):
        return ConversionRules.parse(convert, "the conversion")
    if not isinstance(convert, str) or not convert:
        raise InvalidArgumentError(f"convert must be a name, a path or a mapping, not {excerpt(convert)}")
    name = convert.removeprefix(_INVERSE)
    if name in BUILTIN:
        rules = _built_in(name)
    elif name.endswith(".json"):
        rules = ConversionRules.parse(read(name), name)
    else:
        choices = ", ".join(BUILTIN)
        raise InvalidArgumentError(f"there is no conversion {excerpt(name)}: choose {choices}, or FILE.json")
    if convert.startswith(_INVERSE):
        return rules.inverse()
    return rules


def conversion_of(names: Collection[str]) -> str | None:
    """Return the built-in conversion that has a rule for each name of a model; None if there is none."""
    for builtin in BUILTIN:
        conversion = _built_in(builtin)
        # Most models have names of other families, which the first name shows without a look at the others.
        if not unknown_names(conversion, [next(iter(names))]) and not unknown_names(conversion, names):
            return builtin
    return None


def read_builtin(name: str) -> dict[str, Any]:
    """Return a built-in conversion in its JSON form. Not collective."""
    conversion: dict[str, Any] = json.loads(Path(__file__).with_name(BUILTIN[name]).read_text("utf-8"))
    return conversion


@functools.cache
def _built_in(name: str) -> ConversionRules:
    return ConversionRules.parse(read_builtin(name), name)


def check_numbers(numbers: object, convert: object) -> dict[str, int]:
    """Return the option `convert_with`, numbers by name; raise InvalidArgumentError for anything else.

    `convert` is the option that needs the numbers.
    """
    if numbers is None:
        return {}
    if numbers and convert is None:
        raise InvalidArgumentError("convert_with has numbers for a conversion: give convert, too")
    if not isinstance(numbers, Mapping):
        raise InvalidArgumentError(f"convert_with must be a mapping of names to numbers, not {excerpt(numbers)}")
    checked = {}
    for name, number in numbers.items():
        if not isinstance(name, str) or not isinstance(number, int) or not 0 <= number < 1 << 48:
            raise InvalidArgumentError(
                f"convert_with: {excerpt(name)} must be a number from 0 on, not {excerpt(number)}"
            )
        checked[name] = int(number)
    return checked
