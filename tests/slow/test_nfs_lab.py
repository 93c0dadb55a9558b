"""The command line of tools/nfs_lab, without booting hosts: the lab itself runs in CI and by hand."""

import os
import subprocess
import sys
import tempfile
from functools import partial

import pytest
from scripts import CANNOT_RUN, HOME, run_lab

lab = partial(run_lab, "nfs_lab")


def listed() -> list[str]:
    done = lab("list")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_check_has_a_summary_and_its_name_is_in_the_docs():
    page = (HOME / "docs" / "nfs_lab.md").read_text(encoding="utf-8")
    lines = listed()
    assert len(lines) >= 60
    for line in lines:
        name, _, rest = line.partition("[")
        summary = rest.partition("]")[2].split(maxsplit=1)
        assert summary, line
        assert len(" ".join(summary)) > 20, line
        assert name in page, f"docs/nfs_lab.md does not name the check {name}"


@pytest.mark.parametrize("code", ["A1", "A2", "A3", "A5", "A6", "C1", "C2", "C7", "C8", "C9", "C10", "G15"])
def test_every_code_has_a_check(code):
    assert any(code in line.replace(",", " ").split() for line in listed())


@pytest.mark.parametrize("command", ["list", "mounts"])
def test_a_reader_that_has_gone_is_no_error(command):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "tools/nfs_lab", command],
        cwd=HOME, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, stdout=writing, stderr=subprocess.PIPE,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_check_names_are_unique():
    names = [line.split()[0] for line in listed()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "arguments",
    [
        ("fly",),
        ("check", "--unknown"),
        ("on", "--workdir", "/tmp"),
        ("on", "--workdir", "/tmp", "nobody", "ls"),
        ("down",),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_a_usage_error(arguments):
    done = lab(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_a_pattern_without_a_check_is_a_usage_error():
    done = lab("--only", "no such check")
    assert done.returncode == 2
    assert "no check matches" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("check",), ("up",), ("--only", "C7")], ids=str)
def test_what_the_machine_lacks_is_named(arguments, tmp_path):
    done = lab(*arguments, PATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == CANNOT_RUN, done.stderr
    assert "cannot run here" in done.stderr
    for program in ("gcc", "apt-get", "dpkg"):
        assert f"the program {program}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_command_for_a_lab_that_is_not_up_is_an_error():
    with tempfile.TemporaryDirectory() as workdir:
        done = lab("on", "--workdir", workdir, "cA", "true")
        assert done.returncode == 3
        assert "no lab is up" in done.stderr
        assert lab("down", "--workdir", workdir).returncode == 0


def test_a_long_work_directory_is_refused(tmp_path):
    done = lab("down", "--workdir", str(tmp_path / ("x" * 80)))
    assert done.returncode == CANNOT_RUN
    assert "work directory" in done.stderr
