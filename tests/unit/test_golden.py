"""The output of the commands on a terminal of 80 and of 200 columns is that of the files in tests/data/golden."""

import re
import subprocess
import sys

import golden
import pytest
from commands import command_environment
from golden import GOLDEN, GOLDEN_LINES, WIDTHS, build, golden_file, golden_text, run_lines


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Return the output of each command, by width and name."""
    root = tmp_path_factory.mktemp("golden")
    build(root)
    return {width: run_lines(root, width) for width in WIDTHS}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", GOLDEN_LINES)
def test_output_on_a_terminal_is_the_golden_one(written: dict[int, dict[str, str]], name: str, width: int) -> None:
    assert golden_text(name, written[width][name]) == golden_file(name, width).read_text()


@pytest.mark.parametrize("name", ["ls", "ls-saves", "ls-rounds", "diff", "diff-stat"])
def test_tables_fit_the_terminal(written: dict[int, dict[str, str]], name: str) -> None:
    lines = [re.sub(r"\\x1b\[\d+m", "", line) for line in written[80][name].splitlines()]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", ["scan", "scan-broken"])
def test_verdicts_are_whole_on_a_narrow_terminal(written: dict[int, dict[str, str]], name: str) -> None:
    verdicts = {}
    for width in WIDTHS:
        header, *lines = written[width][name].replace("\\x1b[1m", "").replace("\\x1b[0m", "").splitlines()
        begin = header.index("VERDICT")
        assert begin <= width - 32  # the other columns leave room for the beginning of each verdict
        verdicts[width] = [line[begin:] for line in lines[:-2]]  # the last two: the count and the exit code
    assert verdicts[80] == verdicts[200]


def test_each_golden_file_is_of_a_command() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden_file(n, w).name for n in GOLDEN_LINES for w in WIDTHS}


def test_the_program_that_writes_the_files_starts() -> None:
    command = [sys.executable, golden.__file__]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment(), timeout=60, check=False)
    assert done.stderr == f"{golden.__doc__}\n"
