"""An extension of griffe, mkdocs' reader of docstrings, that treats the section "Example:" like "Examples:"."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class ExampleSections(Extension):
    """Renames "Example:" to "Examples:" in every docstring that griffe loads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in the docstring of `obj`."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
