"""Write docs/reference/cli.md, the help of every command; tests/ranks/test_pages.py compares it with the commands.

python tools/cli_reference.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from statexchange.cli.commands import COMMANDS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

`statexchange`, also `python -m statexchange`. Data goes to stdout, messages to stderr. No colour, no progress and no
truncation in pipes; `NO_COLOR` is honoured. [Errors](../errors.md#exit-codes) has the exit codes,
[inspecting](../how-to/inspecting.md), [saves of a job](../how-to/saves.md#on-the-command-line) and
[merging](../how-to/merging.md) show the commands at work.
`tools/cli_reference.py` has written this page.
"""


def section(*words: str) -> str:
    """Return the heading of a command and its help, as a block that a test runs."""
    command = [sys.executable, "-m", "statexchange", *words, "--help"]
    environment = {**os.environ, "COLUMNS": "80"}
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    name = " ".join(("statexchange", *words))
    return f"\n## {name}\n\n<!-- console -->\n```console\n$ {name} --help\n{text}```\n"


if __name__ == "__main__":
    PAGE.write_text(HEAD + section() + "".join(section(name) for name in COMMANDS), encoding="utf-8")
