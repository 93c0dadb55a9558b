"""Public names of a package that are imported on first use, so that importing the package stays cheap."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from statexchange.errors import needing_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, homes: Mapping[str, str], *, need: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    ``dir()`` lists the names that can be imported: not those whose `need` is not installed. Tools that inspect a
    package, such as pydoc, read every name that it lists.

    Args:
        package: the package's name.
        homes: the module of each public name, or "" if the name is a submodule of the package.
        need: the optional packages, such as torch, that a name's module imports.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needing_extra(name):
            home = homes[name]
            value = getattr(import_module(home), name) if home else import_module(f"{package}.{name}")
        # Python asks for `__getattr__` only while the module does not have the name itself.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        shown = set(homes)
        for name, packages in (need or {}).items():
            if not all(map(is_installed, packages)):
                shown.remove(name)
        for name in vars(sys.modules[package]):
            if name.startswith("__") and name.endswith("__"):
                shown.add(name)
        return sorted(shown)

    return load, names, sorted(homes)


def is_installed(package: str) -> bool:
    """Whether an optional package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # hidden by a finder, or by None in sys.modules
        return False
