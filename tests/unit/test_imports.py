"""Rules of the package, checked by its imports: which package may import which, no cycles, nothing heavy on import."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import statexchange

PACKAGE = Path(statexchange.__file__).parent
BOTTOM = {"cgroups", "errors", "lazy", "messages", "processes", "settings", "tensors", "units", "values"}

# By package or top module: those that it may import besides itself.
MAY_IMPORT = {
    "cgroups": BOTTOM,
    "errors": BOTTOM,
    "lazy": BOTTOM,
    "messages": BOTTOM,
    "processes": BOTTOM,
    "settings": BOTTOM,
    "tensors": BOTTOM,
    "units": BOTTOM,
    "values": BOTTOM,
    "sharding": BOTTOM,
    "conversions": BOTTOM | {"sharding"},
    "state": BOTTOM | {"sharding"},
    "shared_memory": BOTTOM,
    "storage": BOTTOM | {"sharding"},
    "formats": BOTTOM | {"conversions", "sharding", "storage"},
    "checkpoint": BOTTOM | {"conversions", "sharding", "storage", "formats"},
    "report": BOTTOM | {"conversions", "sharding", "storage", "formats"},
    "comm": BOTTOM | {"shared_memory"},
    "train": BOTTOM | {"comm", "sharding", "state"},
    "exchange": BOTTOM
    | {
        "conversions",
        "sharding",
        "storage",
        "formats",
        "checkpoint",
        "report",
        "comm",
        "shared_memory",
        "state",
        "train",
    },
    "integrations": BOTTOM | {"formats", "exchange"},
    "testing": BOTTOM
    | {
        "sharding",
        "storage",
        "formats",
        "checkpoint",
        "report",
        "comm",
        "shared_memory",
        "exchange",
        "statexchange",
    },
    "demo": BOTTOM
    | {"sharding", "storage", "formats", "checkpoint", "report", "comm", "exchange", "testing", "statexchange"},
    "cli": BOTTOM
    | {
        "sharding",
        "storage",
        "formats",
        "checkpoint",
        "report",
        "comm",
        "exchange",
        "testing",
        "demo",
        "statexchange",
    },
}
MAY_IMPORT["demo"] |= {"demo_model", "demo_ranks"}
MAY_IMPORT["demo_model"] = MAY_IMPORT["demo_ranks"] = MAY_IMPORT["demo"]
TORCH_FREE = {
    "cgroups",
    "errors",
    "lazy",
    "messages",
    "processes",
    "settings",
    "units",
    "values",
    "sharding",
    "conversions",
    "shared_memory",
    "storage",
    "formats",
    "checkpoint",
    "report",
}


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "statexchange"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports() -> dict[str, set[str]]:
    """Return every module's imports, at any depth of its code; ``from package import module`` counts as the module."""
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in modules.items():
        found[name] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports relatively"
                joined = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {target if target in modules else str(node.module) for target in joined}
    return found


def ours() -> dict[str, set[str]]:
    return {name: {i for i in found if i.split(".")[0] == "statexchange"} for name, found in imports().items()}


def test_every_package_has_a_rule() -> None:
    assert {package_of(name) for name in imports()} <= MAY_IMPORT.keys() | {"statexchange", "__main__"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    wrong = [
        (name, target)
        for name, targets in ours().items()
        for target in targets
        if package_of(name) == package and package_of(target) not in MAY_IMPORT[package] | {package}
    ]
    assert not wrong


def test_there_are_no_import_cycles() -> None:
    """At any depth of the code: an import inside a function makes a cycle, too, and is harder to find."""
    graph = ours()
    done: set[str] = set()
    cycles: list[str] = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            cycles.append(" -> ".join((*trail[trail.index(name) :], name)))
            return
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            visit(target, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())
    assert not cycles


@pytest.mark.parametrize("package", sorted(TORCH_FREE))
def test_torch_free_packages_never_import_torch(package: str) -> None:
    wrong = []
    for name, found in imports().items():
        if package_of(name) == package and any(imported.split(".")[0] == "torch" for imported in found):
            wrong.append(name)
    assert not wrong


def test_importing_the_torch_free_packages_and_the_cli_does_not_load_torch() -> None:
    names = [n for n in imports() if package_of(n) in TORCH_FREE | {"cli", "tensors"}]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_statexchange_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, statexchange; heavy = {'torch', 'numpy', 'fsspec', 'mpi4py'}; assert not heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_settings_reads_the_environment() -> None:
    """testing/ passes the environment on to the ranks that it starts, and reads no variable itself."""
    readers = [
        str(path)
        for path in PACKAGE.rglob("*.py")
        if package_of(module_name(path)) not in ("settings", "testing")
        and any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes(path))
    ]
    assert not readers


def test_no_f_string_truncates_a_whole_repr() -> None:
    """``{value!r:.100}`` makes the whole repr of `value`, and then truncates it: `errors.excerpt` does not."""
    found = [
        (str(path.relative_to(PACKAGE)), node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.FormattedValue) and node.conversion != -1 and node.format_spec is not None
    ]
    assert not found


def test_no_module_imports_pickle_or_its_kin() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing.shared_memory"}
    assert not [(name, found & forbidden) for name, found in imports().items() if found & forbidden]


def test_no_class_has_a_del_method() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert "def __del__" not in path.read_text(), path
