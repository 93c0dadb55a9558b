"""The versions that pyproject.toml claims: tools/test_on_python.sh runs tests on other interpreters."""

import os
import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
NOT_HERE = 77


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.parametrize("arguments", [("3.10", "lowest", "torch"), ("3.10", "lowest"), ("3.13",)], ids=" ".join)
def test_on_another_python(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["bash", "tools/test_on_python.sh", *arguments],
        cwd=HOME,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"Python {arguments[0]}" in done.stdout
