"""The options of commands that are those of a public call: made from the fields of its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

import click

from statexchange.sharding.options import CallOptions, ExportOptions

F = TypeVar("F", bound=Callable[..., object])


def _parse_renames(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Split at the last ``=``: a lookahead in the regex may contain one, a tensor's name hardly ever does."""
    pairs = []
    for value in values:
        regex, equals, replacement = value.rpartition("=")
        if not equals:
            raise click.BadParameter(f"{value!r} is not REGEX=REPL", context, parameter)
        pairs.append((regex, replacement))
    return pairs


def _parse_numbers(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """Return numbers by name."""
    numbers: dict[str, int] = {}
    for value in values:
        name, _, number = value.partition("=")
        # int() would also take "1_000", " 7" and other digits than ASCII; a number of 15 digits fits anywhere.
        if not name or not number.isascii() or not number.isdigit() or len(number) > 15:
            raise click.BadParameter(f"{value!r} is not NAME=NUMBER", context, parameter)
        numbers[name] = int(number)
    return numbers


def _parse_dtypes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Return dtypes by pattern; the one for all tensors comes last, because the first match counts."""
    by_pattern: dict[str, str] = {}
    for value in values:
        pattern, _, dtype = value.rpartition("=")
        pattern = pattern or "*"
        if pattern in by_pattern:
            what = {"*": "all tensors"}.get(pattern, pattern)
            raise click.BadParameter(f"{by_pattern[pattern]} and {dtype} are both for {what}", context, parameter)
        by_pattern[pattern] = dtype
    # Last, whatever the order on the command line
    if "*" in by_pattern:
        by_pattern["*"] = by_pattern.pop("*")
    return by_pattern or None


_FIELDS = {field.name: field for field in (*fields(CallOptions), *fields(ExportOptions))}
_CALLBACKS = {"rename": _parse_renames, "convert_with": _parse_numbers, "dtype": _parse_dtypes}


def option(name: str, *short: str, **changes: object) -> Callable[[F], F]:
    """Return a decorator that adds the option of a public call to a command.

    Args:
        name: its name in the call, as "max_shard_size" for ``--max-shard-size``.
        short: its short form, as "-i".
        changes: what this command shows in another way than the field says, such as `help`.
    """
    # Names, helps and defaults are those of the public call, so that the command cannot differ from it.
    default = _FIELDS[name].default
    shown = {**_FIELDS[name].metadata["shown"], **changes}
    if "choices" in shown:
        shown["type"] = click.Choice(shown.pop("choices"))
    if default is False:
        shown["is_flag"] = True
    elif default:
        shown |= {"default": default, "show_default": True}
    return click.option(f"--{name.replace('_', '-')}", *short, callback=_CALLBACKS.get(name), **shown)
