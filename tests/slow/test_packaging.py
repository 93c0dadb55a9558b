"""Wheel and sdist are built, installed into empty environments, and tried from another folder."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import statexchange

HOME = Path(__file__).parents[2]
CONSTRAINTS = HOME / "tools" / "constraints.txt"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: object, folder: Path) -> str:
    """Run a command without this checkout on its path, and return its output."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, *requirements: object) -> Path:
    """Return the folder of programs of a new environment in which `requirements` are installed."""
    run(sys.executable, "-m", "venv", folder, folder=folder.parent)
    run(folder / "bin/pip", "install", "-q", "-c", CONSTRAINTS, *requirements, folder=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    programs = environment(folder / "tools", "build")
    run(programs / "python", "-m", "build", "--outdir", folder / "dist", HOME, folder=folder)
    return folder / "dist"


def wheel_in(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_the_wheel_works_in_an_empty_environment_without_torch(built: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv", wheel_in(built))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = (
        "import sys, statexchange\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "import numpy\n"
        "statexchange.export_checkpoint({'a': numpy.ones((2, 3), numpy.float32)}, 'out')\n"
        "print(statexchange.__version__, statexchange.__file__)\n"
    )
    version, path = run(programs / "python", "-c", script, folder=elsewhere).split()
    assert version == statexchange.__version__
    assert Path(path).is_relative_to(tmp_path / "venv")
    assert version in run(programs / "statexchange", "--version", folder=elsewhere)
    assert re.search(r"^tensors +1$", run(programs / "statexchange", "info", "out", folder=elsewhere), re.MULTILINE)
    run(programs / "statexchange", "verify", "out", folder=elsewhere)
    assert "torch" not in run(programs / "pip", "list", folder=elsewhere)
    run(programs / "pip", "check", folder=elsewhere)


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = set(zipfile.ZipFile(wheel_in(built)).namelist())
    ours = {name for name in names if ".dist-info/" not in name}
    package = [
        path for path in (HOME / "statexchange").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert ours == {str(path.relative_to(HOME)) for path in package}
    assert {"statexchange/py.typed", "statexchange/__init__.pyi"} <= ours
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_metadata_has_no_broken_link(built: Path) -> None:
    wheel = zipfile.ZipFile(wheel_in(built))
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_string(wheel.read(name).decode())
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "# statexchange" in text
    assert "docs/tutorial.md" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "![" not in text


def test_links_of_the_readme_resolve_in_the_sdist(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    links = set(re.findall(r"\]\(([^)#]+)", (HOME / "README.md").read_text(encoding="utf-8")))
    assert links - names == set()
    assert {"tests/conftest.py", "tools/constraints.txt", "LICENSE", "CHANGELOG.md", "mkdocs.yml"} <= names
