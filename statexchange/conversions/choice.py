"""The option `convert`: which conversion a caller means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

from statexchange.conversions.builtin import BUILTIN
from statexchange.conversions.plan import unknown_names
from statexchange.conversions.rules import ConversionRules
from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.sharding.options import Convert

__all__ = ["check_numbers", "choose_conversion", "conversion_of"]

_INVERSE = "inverse:"


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


@functools.cache
def _built_in(name: str) -> ConversionRules:
    return ConversionRules.parse(BUILTIN[name], name)


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
