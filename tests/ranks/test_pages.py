"""Every block of README.md and of docs is run: here, or by the test that OF_OTHER_TESTS names.

A comment before each block names what a test does with it:

* ``runs: COMMAND``: a script, written to the file that the command names, then started so.
* ``prints``: the output of the block before it.
* ``writes: NAME``: a file.
* ``console``: commands, each followed by its output if the page shows that.
* ``layout``: a layout file, which the parser of layouts accepts.
* ``programs``: commands that take too long or need rare machines: the test checks that programs and options exist.
* ``block: NAME``, ``output: NAME``, ``commands``, ``commands: NAME``: a test of its own runs it.

The blocks of a page share a directory, and run in the order in which they stand.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from scripts import HOME, PAGES, page_block, page_blocks, page_text, run_commands, shell
from sweeps import slow

from statexchange.sharding.rules import Layout

HERE = {"runs", "prints", "writes", "console", "layout", "programs"}
OF_OTHER_TESTS = {
    "block: train.py": "test_readme",
    "commands: killed": "test_readme",
    "output: torchrun": "test_readme",
    "commands": "test_readme",
    "block: layout.py": "test_readme",
    "output: statexchange demo": "test_readme",
    "commands: pictures": "test_demo",
    "block: job.py": "test_readme",
    "output: job.py": "test_readme",
    "block: reduce.py": "test_readme",
    "output: reduce.py": "test_readme",
    "block: fit.py": "test_readme",
    "block: resume.py": "test_readme",
    "commands: resume": "test_readme",
    "commands: look": "test_readme",
    "commands: merge": "test_readme",
    "block: read.py": "test_readme",
    "output: read.py": "test_readme",
    "block: on_save.py": "test_recipes",
    "block: fit_trainer.py": "test_integrations",
    "block: loop.py": "test_integrations",
    "block: pipeline.py": "test_recipes",
    "block: to_hf.py": "test_recipes",
    "block: rollouts.py": "test_weight_versions",
    "block: lora.py": "test_recipes",
    "block: ema.py": "test_recipes",
    "block: meta.py": "test_recipes",
    "block: stages.py": "test_recipes",
    "commands: megatron": "test_megatron_ranks",
    "commands: torchtitan": "test_conversions_megatron",
    "commands: megatron to llama": "test_conversions_megatron",
    "block: own.json": "test_conversions_megatron",
    "commands: deepspeed": "test_deepspeed",
    "commands: install model_signing": "test_signing",
    "block: to_sign.py": "test_signing",
    "commands: sign": "test_signing",
}
SLOW = {f"docs/how-to/{name}.md" for name in ("collectives", "fsdp2", "saves", "weights")}  # they import torch


def kind_of(marker: str) -> str:
    return marker.partition(":")[0]


def test_every_fenced_block_is_one_that_a_test_runs() -> None:
    elsewhere = []
    for page in PAGES:
        blocks = page_blocks(page)
        assert len(re.findall(r"^```", page_text(page), re.MULTILINE)) == 2 * len(blocks), page
        elsewhere += [block.marker for block in blocks if kind_of(block.marker) not in HERE]
    assert sorted(elsewhere) == sorted(OF_OTHER_TESTS)


def run_here() -> list[object]:
    """Return the pages with blocks that are run here."""
    found = [page for page in PAGES if any(kind_of(block.marker) in HERE for block in page_blocks(page))]
    return [slow(page) if page in SLOW else page for page in found]


LONG = ("docs/how-to/inspecting.md", "docs/how-to/workspaces.md", "docs/reference/cli.md")


@pytest.mark.parametrize("page", [slow(page) if page in LONG else page for page in run_here()])
def test_the_blocks_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    printed = ""
    for marker, text in page_blocks(page):
        kind, _, argument = marker.partition(": ")
        if kind == "writes":
            (tmp_path / argument).write_text(text)
        elif kind == "runs":
            script = next(word for word in argument.split() if word.endswith(".py"))
            (tmp_path / script).write_text(text)
            printed = shell(argument, tmp_path, warm="torch" if "import torch" in text else "commands").stdout
        elif kind == "prints":
            assert printed == text
        elif kind == "console":
            run_commands(text, tmp_path)
        elif kind == "layout":
            assert Layout.parse(json.loads(text)).rules
        elif kind == "programs":
            for line in text.splitlines():
                check_program(line.removeprefix("$ "))


def check_program(line: str) -> None:
    """Check that the program of a command line exists, and that it has the options of the line."""
    program, *arguments = shlex.split(line, comments=True)[1:]
    path = HOME / program
    assert path.exists(), line
    folder = path if path.is_dir() else path.parent  # programs of one folder share options
    known = "".join(source.read_text(encoding="utf-8") for source in sorted(folder.glob("*.py")))
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in known, line


def test_the_readme_is_short_and_its_links_lead_to_files() -> None:
    text = page_text("README.md")
    assert len(text.splitlines()) <= 150
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 20
    assert [link for link in links if not (HOME / link).is_file()] == []


def test_the_example_and_the_table_of_the_readme_each_fit_a_screen() -> None:
    """A screen has 24 lines of 100 columns."""
    example = page_block("block: train.py").splitlines()
    table = [line for line in page_text("README.md").splitlines() if line.startswith("|")]
    for lines in (example, table):
        assert 10 < len(lines) <= 24
        assert [line for line in lines if len(line) > 100] == []


def test_no_page_has_code_that_is_not_fenced() -> None:
    """Except for the two commands of the README, which CI runs."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page_text(page), flags=re.MULTILINE | re.DOTALL)
        indented = re.findall(r"(?<=\n\n) {4}\S.*", text)
        assert len(indented) == (1 if page == "README.md" else 0), (page, indented)


def test_the_files_that_contributing_names_exist() -> None:
    text = (HOME / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:statexchange|tests|docs|tools)/[\w./-]+)`", text)
    assert len(paths) > 25
    assert [path for path in paths if not (HOME / path).exists() and "NAME" not in path] == []
