"""An extension of griffe, by which mkdocs reads docstrings: "Example:" is a section of code, as "Examples:" is."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class ExampleSections(Extension):
    """Renames the sections of every docstring as they are loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
