"""Tables and lists of the pages in docs agree with the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import statexchange
from statexchange import errors, settings
from statexchange.cli.commands import COMMANDS
from statexchange.cli.output import EXIT_CODES

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, columns: int) -> list[list[str]]:
    """Return the rows of all tables of a page with this number of columns, without their heads."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    heads = {at - before for at, line in enumerate(lines) if line.startswith("|---") for before in (0, 1)}
    tables = [line for at, line in enumerate(lines) if line.startswith("|") and at not in heads]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]
    return [row for row in cells if len(row) == columns]


def test_the_exit_codes_of_the_page_are_those_of_the_command_line() -> None:
    shown = {code: int(number) for number, code, _, _ in rows("errors.md", 4) if number.isdecimal()}
    assert shown == EXIT_CODES


def test_the_reference_has_every_command() -> None:
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    shown = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert shown == ["statexchange", *(f"statexchange {name}" for name in COMMANDS)], "run tools/cli_reference.py"


def test_the_exceptions_of_the_page_are_those_of_errors() -> None:
    shown = {name.strip("`"): (base.strip("`"), code) for name, base, code, _ in rows("errors.md", 4) if "`" in name}
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert shown == {kind.__name__: (kind.__bases__[-1].__name__, kind.code) for kind in classes}


def test_the_variables_of_the_page_are_those_that_settings_reads() -> None:
    tree = ast.parse(Path(settings.__file__).read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read = {text for text in texts if re.fullmatch(r"[A-Z][A-Z_]+", text)}
    named = {name for cell, _ in rows("how-to/mpi_slurm.md", 2) for name in re.findall(r"`([A-Z_]+)`", cell)}
    assert named == read


@pytest.mark.parametrize("package", ["", "comm", "train", "integrations", "errors"])
def test_the_reference_lists_every_public_name(package: str) -> None:
    home = getattr(statexchange, package) if package else statexchange
    page = (DOCS / "reference" / f"{package or 'python'}.md").read_text(encoding="utf-8")
    prefix = f"statexchange.{package}." if package else "statexchange."
    listed = re.findall(rf"^::: {re.escape(prefix)}(\w+)$", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == public(home)
    for name in listed:
        assert getattr(home, name) is not None


def public(home: ModuleType) -> set[str]:
    """Return the names that a package's page of the reference must list.

    Packages have pages of their own; of `errors`, only the classes are listed.
    """
    names = {name for name in home.__all__ if not hasattr(getattr(home, name), "__path__") and name != "errors"}
    if home is errors:
        return {name for name in names if name.endswith("Error")}
    return names - {"StateExchangeError"}  # errors.md lists it


def test_each_error_in_a_public_docstring_has_a_reason() -> None:
    """mkdocs needs lines "NAME: reason" or "NAME, NAME: reason" under "Raises:"."""
    wrong = []
    for home in (statexchange, statexchange.comm, statexchange.train, statexchange.integrations, statexchange.testing):
        for name in home.__all__:
            found = getattr(home, name)
            members = vars(found).values() if inspect.isclass(found) else ()
            for documented in (found, *members):
                _, _, section = (inspect.getdoc(documented) or "").partition("\nRaises:\n")
                entries = re.findall(r"^    (\S.*)", section.partition("\n\n")[0], re.MULTILINE)
                wrong += [f"{name}: {entry}" for entry in entries if not re.match(r"[\w., ]+: ", entry)]
    assert wrong == []


def test_prose_has_lines_of_at_most_120_characters() -> None:
    root = DOCS.parent
    for page in (*DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        lines = [line for line in text.splitlines() if not line.startswith(("|", "![", "    "))]
        assert [line for line in lines if len(line) > 120] == [], page.name


def test_the_private_names_in_the_contributing_guide_are_in_the_code() -> None:
    guide = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(_[a-zA-Z]\w*)`", guide))
    assert names, "the guide names none"
    code = "\n".join(path.read_text(encoding="utf-8") for path in Path(statexchange.__file__).parent.rglob("*.py"))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)] == []
