"""New environments for tests of installation. The pip of the tests installs into them, as its own would take 5 s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from scripts import HOME

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONSTRAINTS = HOME / "tools" / "constraints.txt"


class Built(NamedTuple):
    """The archives of this checkout; the wheel is built from the sdist."""

    sdist: Path
    wheel: Path


def run_outside(*command: object, folder: Path) -> str:
    """Run a command without this checkout on its path, and return its output."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def new_environment(folder: Path) -> Path:
    """Make an environment in which nothing is installed; return the folder of its programs."""
    run_outside(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    return folder / "bin"


def run_pip(programs: Path, *arguments: object) -> str:
    """Run pip for an environment, and return its output."""
    return run_outside(sys.executable, "-m", "pip", "--python", programs / "python", *arguments, folder=programs)


def install(programs: Path, *arguments: object) -> None:
    """Install into an environment; what is imported there is compiled then, and not all that pip could compile."""
    run_pip(programs, "install", "-q", "--no-compile", *arguments)


def build(folder: Path) -> Built:
    """Build both archives unless another worker has; what pyproject.toml requires for it is installed once."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            programs = new_environment(folder / "tools")
            text = (HOME / "pyproject.toml").read_text(encoding="utf-8")
            install(programs, "-c", CONSTRAINTS, "build", *tomllib.loads(text)["build-system"]["requires"])
            options = ["--no-isolation", "--outdir", folder / "dist"]
            run_outside(programs / "python", "-m", "build", *options, HOME, folder=folder)
    (sdist,), (wheel,) = folder.glob("dist/*.tar.gz"), folder.glob("dist/*.whl")
    return Built(sdist, wheel)
