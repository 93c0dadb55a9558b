"""Every `Example:` block of a public docstring runs, as a doctest, in a world of one.

An example may use `sx`, `np` and `torch` without importing them. Add a module to MODULES to have its examples run.
"""

import doctest
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import statexchange as sx
from statexchange.comm import defaults

MODULES = (
    "statexchange.comm.adopt",
    "statexchange.comm.calls",
    "statexchange.comm.communicator",
    "statexchange.comm.defaults",
    "statexchange.comm.failure.outcome",
    "statexchange.comm.init",
    "statexchange.comm.topology",
    "statexchange.comm.work",
)
# What users call: each of these has an example.
PUBLIC = {
    "statexchange.comm.communicator": ("Communicator",),
    "statexchange.comm.defaults": (
        "as_communicator",
        "get_backend",
        "get_communicator",
        "get_local_rank",
        "get_rank",
        "get_world_size",
        "is_initialized",
    ),
    "statexchange.comm.init": ("init", "shutdown"),
    "statexchange.comm.work": ("Work",),
}
HEADING = "Example:"


def documented(module: str) -> Iterator[tuple[str, Any]]:
    """Every public function, class, method and property of a module with its dotted name."""
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if getattr(value, "__module__", None) != module:
            continue
        yield f"{module}.{name}", value
        if inspect.isclass(value):
            for member, attribute in vars(value).items():
                if not member.startswith("_") and (callable(attribute) or isinstance(attribute, property)):
                    yield f"{module}.{name}.{member}", attribute


def example_of(value: Any) -> str | None:
    """The lines of the example in a docstring, without their indentation."""
    lines = (inspect.getdoc(value) or "").splitlines()
    if HEADING not in lines:
        return None
    block = []
    for line in lines[lines.index(HEADING) + 1 :]:
        if line and not line.startswith(" "):
            break
        block.append(line)
    return textwrap.dedent("\n".join(block))


EXAMPLES = {
    name: example
    for module in MODULES
    for name, value in documented(module)
    if (example := example_of(value)) is not None
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_does_what_it_shows(name: str) -> None:
    names = {"sx": sx, "np": np, "torch": torch}
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, 0)
    assert test.examples, "an example has lines that begin with >>>"
    report: list[str] = []
    with defaults.use(None):  # what an example makes is the default of nobody else
        try:
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        finally:
            sx.shutdown()
    assert not report, "".join(report)


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_what_users_call_has_an_example(module: str) -> None:
    assert not [name for name in PUBLIC[module] if f"{module}.{name}" not in EXAMPLES]


def test_every_method_of_a_communicator_has_an_example() -> None:
    """Properties say it all in one line; a method has arguments, and a result."""
    cls = importlib.import_module("statexchange.comm.communicator").Communicator
    methods = [name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")]
    shown = {name.rpartition(".")[2] for name in EXAMPLES if ".Communicator." in name}
    assert not [name for name in methods if name not in shown]


def test_every_public_function_names_its_arguments() -> None:
    """In the Google style: one entry under `Args:` for each argument."""
    missing = []
    for module, names in PUBLIC.items():
        for name, value in documented(module):
            if name.split(".")[3] not in names or not inspect.isfunction(value):
                continue
            arguments = [argument for argument in inspect.signature(value).parameters if argument != "self"]
            text = inspect.getdoc(value) or ""
            missing += [f"{name}: {a}" for a in arguments if f"\n    {a}: " not in text and f"    *{a}" not in text]
    assert not missing
