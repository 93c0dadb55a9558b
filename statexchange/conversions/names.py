"""Patterns of tensor names with placeholders: ``layers.{layer}.attention.wq.weight``.

``{layer}`` stands for one part of a dotted name, ``{name*}`` for one part or more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from statexchange.errors import InvalidArgumentError, excerpt

__all__ = ["NamePattern"]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")


@dataclass(frozen=True)
class NamePattern:
    """A pattern of names, such as ``layers.{layer}.norm.weight``.

    Raises:
        InvalidArgumentError: a placeholder is malformed or occurs twice.

    Example:
        >>> NamePattern("layers.{layer}.{rest*}").match("layers.12.attention.wq.weight")
        {'layer': '12', 'rest': 'attention.wq.weight'}
        >>> NamePattern("model.layers.{layer}.mlp").filled({"layer": "12"})
        'model.layers.12.mlp'
    """

    text: str

    def __post_init__(self) -> None:
        rest = _PLACEHOLDER.sub("", self.text)
        if not self.text or "{" in rest or "}" in rest:
            text = "is not a name pattern: placeholders are like {layer}, or {name*} for several parts of a name"
            raise InvalidArgumentError(f"convert: {excerpt(self.text)} {text}")
        if len(_PLACEHOLDER.findall(self.text)) != len(self.placeholders):
            raise InvalidArgumentError(f"convert: a placeholder occurs twice in the name pattern {excerpt(self.text)}")

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders."""
        return frozenset(name for name, _ in _PLACEHOLDER.findall(self.text))

    @cached_property
    def _start(self) -> str:
        return self.text.partition("{")[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = []
        end = 0
        for match in _PLACEHOLDER.finditer(self.text):
            parts.append(re.escape(self.text[end : match.start()]))
            name, several = match.groups()
            parts.append(f"(?P<{name}>.+)" if several else f"(?P<{name}>[^.]+)")
            end = match.end()
        parts.append(re.escape(self.text[end:]))
        # A foreign file may have a line break in a name, which "." would not match.
        return re.compile("".join(parts), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in a name; None if the name does not match."""
        # Each name is compared with the patterns of all rules before its own: most are ruled out here, uncompiled.
        if not name.startswith(self._start):
            return None
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return match.groupdict()

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name with these values for the placeholders."""
        return _PLACEHOLDER.sub(lambda match: values[match.group(1)], self.text)
