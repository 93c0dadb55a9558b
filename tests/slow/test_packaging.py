"""Wheel and sdist are built, installed into empty environments, and tried from another folder."""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import CONSTRAINTS, Built, install, new_environment, run_outside, run_pip
from scripts import HOME

import statexchange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_wheel_works_in_an_empty_environment_without_torch(built: Built, tmp_path: Path) -> None:
    programs = new_environment(tmp_path / "venv")
    install(programs, "-c", CONSTRAINTS, built.wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = (
        "import sys, statexchange\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "import numpy\n"
        "statexchange.export_checkpoint({'a': numpy.ones((2, 3), numpy.float32)}, 'out')\n"
        "print(statexchange.__version__, statexchange.__file__)\n"
    )
    version, path = run_outside(programs / "python", "-c", script, folder=elsewhere).split()
    assert version == statexchange.__version__
    assert Path(path).is_relative_to(tmp_path / "venv")
    assert version in run_outside(programs / "statexchange", "--version", folder=elsewhere)
    assert re.search(
        r"^tensors +1$", run_outside(programs / "statexchange", "info", "out", folder=elsewhere), re.MULTILINE
    )
    run_outside(programs / "statexchange", "verify", "out", folder=elsewhere)
    assert "torch" not in run_pip(programs, "list")
    run_pip(programs, "check")


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    ours = {name for name in names if ".dist-info/" not in name}
    package = [
        path for path in (HOME / "statexchange").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert ours == {str(path.relative_to(HOME)) for path in package}
    assert {"statexchange/py.typed", "statexchange/__init__.pyi"} <= ours
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_metadata_has_no_broken_link(built: Built) -> None:
    wheel = zipfile.ZipFile(built.wheel)
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_string(wheel.read(name).decode())
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "# statexchange" in text
    assert "docs/tutorial.md" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "![" not in text


def test_links_of_the_readme_resolve_in_the_sdist(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    links = set(re.findall(r"\]\(([^)#]+)", (HOME / "README.md").read_text(encoding="utf-8")))
    assert links - names == set()
    assert {"tests/conftest.py", "tools/constraints.txt", "LICENSE", "CHANGELOG.md", "mkdocs.yml"} <= names
