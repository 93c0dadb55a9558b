"""The examples in docstrings of the packages about files run as they stand, without torch."""

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

WITH_EXAMPLES = {
    "statexchange.checkpoint.merge": {"merge_checkpoint"},
    "statexchange.formats.registry": {"open_checkpoint"},
    "statexchange.formats.source": {"StoredTensor.read"},
    "statexchange.report.summary": {"summarize"},
    "statexchange.report.verify": {"verify"},
    "statexchange.storage.workspace": {"Workspace"},
}
PROGRAM = """
import doctest, importlib, sys
module = importlib.import_module(sys.argv[1])
runner = doctest.DocTestRunner()
for test in doctest.DocTestFinder().find(module):
    if test.name == sys.argv[1] + "." + sys.argv[2]:
        runner.run(test)
assert runner.tries and not runner.failures
assert "torch" not in sys.modules
"""
EXAMPLES = [(module, name) for module, names in WITH_EXAMPLES.items() for name in sorted(names)]


@pytest.mark.parametrize(("module", "name"), EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_an_example_runs_in_an_empty_directory_without_torch(module: str, name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_is_listed_here() -> None:
    found = {}
    for module in WITH_EXAMPLES:
        tests = doctest.DocTestFinder().find(import_module(module))
        found[module] = {test.name.removeprefix(f"{module}.") for test in tests if test.examples}
    assert found == WITH_EXAMPLES
