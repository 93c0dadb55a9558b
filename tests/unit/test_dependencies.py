"""pyproject.toml declares all that is imported, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOME = Path(__file__).parents[2]
PACKAGE = HOME / "statexchange"
# fsspec imports these by the scheme of a URL.
BY_SCHEME = {"s3fs", "gcsfs"}
# Never imported at run time; users or tests install them.
TESTS_ONLY = {"pytest", "_pytest"}
GIVEN_BY_THE_CALLER = {"peft"}  # imported only if the model is one of this package's
TYPES_ONLY = {"typing_extensions", "_typeshed"}
OF_THE_PACKAGE = ("torch", "mpi", "hf", "versions")  # extras whose packages it imports itself
NEEDED_BY_TRANSFORMERS = {"accelerate"}  # for its Trainer


def declared() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def names(requirements: list[str]) -> set[str]:
    return {
        re.split(r"[\[<>=!~;\s]", requirement, maxsplit=1)[0].replace("-", "_").lower() for requirement in requirements
    }


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imported() -> dict[str, set[str]]:
    """Third-party packages, each with the modules of ours that import it when they run."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while left:
            node = left.pop()
            if isinstance(node, ast.expr) or is_for_types(node):  # an expression imports nothing
                continue
            left.extend(ast.iter_child_nodes(node))
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [str(node.module)]
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "statexchange":
                    found.setdefault(top, set()).add(str(path.relative_to(PACKAGE)))
    return found


def test_each_declared_dependency_is_imported() -> None:
    extras = declared()["optional-dependencies"]
    wanted = names(declared()["dependencies"])
    for extra in OF_THE_PACKAGE:
        wanted |= names(extras[extra])
    assert wanted - imported().keys() == NEEDED_BY_TRANSFORMERS
    assert names(extras["s3"]) | names(extras["gcs"]) == BY_SCHEME


def test_each_imported_dependency_is_declared() -> None:
    extras = declared()["optional-dependencies"]
    known = names(declared()["dependencies"])
    for extra in OF_THE_PACKAGE:
        known |= names(extras[extra])
    assert imported().keys() - known - TESTS_ONLY - TYPES_ONLY - GIVEN_BY_THE_CALLER == set()
    for package in TESTS_ONLY & imported().keys():
        assert {path.partition("/")[0] for path in imported()[package]} == {"testing"}
