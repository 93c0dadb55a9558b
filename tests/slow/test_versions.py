"""The versions that pyproject.toml claims: tools/test_on_python.sh runs tests on other interpreters."""

import os
import subprocess

import pytest
from environments import Built
from scripts import HOME

NOT_HERE = 77  # the exit status of the script if the interpreter is not installed

RUNS = [
    pytest.param(("3.10", "lowest", "torch"), marks=pytest.mark.long),  # gigabytes of wheels
    pytest.param(("3.10", "lowest"), marks=pytest.mark.slow),
    pytest.param(("3.13",), marks=pytest.mark.slow),
]


@pytest.mark.timeout(850)
@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_the_tests_pass_on_another_python(arguments: tuple[str, ...], built: Built) -> None:
    done = subprocess.run(
        ["bash", "tools/test_on_python.sh", *arguments],
        cwd=HOME,
        env={**os.environ, "WHEEL": str(built.wheel), "PYTEST_ADDOPTS": "-n 0"},  # workers would import all anew
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"Python {arguments[0]}" in done.stdout
