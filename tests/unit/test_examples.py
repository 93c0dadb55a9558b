"""Every example in a docstring runs as a doctest, and every public name has one."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statexchange as sx
from statexchange.comm import defaults

PACKAGE = Path(sx.__file__).parent
MODULES = [
    ".".join(("statexchange", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text()
]
EXAMPLES = {
    example.name: example
    for module in MODULES
    for example in doctest.DocTestFinder().find(import_module(module))
    if example.examples
}


def public_names() -> Iterator[tuple[str, Any]]:
    """Return the public functions and classes other than errors, with the names of their docstrings."""
    for package in (sx, sx.comm, sx.train, sx.integrations):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, Exception)):
                continue
            yield f"{value.__module__}.{value.__qualname__}", value


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_does_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = EXAMPLES[name]
    example.globs.update(sx=sx, np=np, torch=torch)
    report: list[str] = []
    with defaults.use(None):  # an example may set the default communicator
        try:
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
        finally:
            sx.shutdown()
    assert not report, "".join(report)


def test_every_public_name_has_an_example() -> None:
    assert not [name for name, _ in public_names() if name not in EXAMPLES]


def test_every_method_of_a_communicator_has_an_example() -> None:
    methods = [name for name, value in vars(sx.comm.Communicator).items() if inspect.isfunction(value)]
    shown = {name.rpartition(".")[2] for name in EXAMPLES if ".Communicator." in name}
    assert not [name for name in methods if not name.startswith("_") and name not in shown]


def test_every_public_function_explains_its_arguments() -> None:
    missing = []
    for name, value in public_names():
        if inspect.isabstract(value) or value is sx.comm.Communicator:  # users do not call these
            continue
        if inspect.isclass(value) and value.__init__ is object.__init__:  # it takes no arguments
            continue
        text = inspect.getdoc(value) or ""
        called = value.__init__ if inspect.isclass(value) else value
        arguments = [argument for argument in inspect.signature(called).parameters if argument != "self"]
        explained = f"{text}\n{inspect.getdoc(called) or ''}" if called is not value else text
        missing += [f"{name}: {one}" for one in arguments if f"    {one}: " not in explained]
    assert not missing
