"""Names and values in files that would control a terminal, or break JSON or SVG, are escaped."""

from __future__ import annotations

import json
import os
import re
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from command_lines import COMMAND_LINES
from commands import CommandLine, exit_code_of
from stored import write_raw
from sweeps import slow

from statexchange.cli.commands import COMMANDS
from statexchange.cli.main import cli
from statexchange.cli.output import EXIT_CODES

HOSTILE = {
    "escape": "a\x1b[31mred\x1b[0m",
    "title": "a\x1b]0;title\x07b",
    "link": "a\x1b]8;;http://x\x1b\\b",
    "C1": "a\x9b31m\x9d0;x\x9cb",
    "newline": "a\nerror: forged\r\nb",
    "tab": "a\tb\x0b\x0cc",
    "separators": "a\u2028b\u2029c\x85d",
    "bidi": "a\u202etxt.exe\u202c\u2066b\u2069\u200f",
    "invisible": "a\u200b\ufeff\U000e0041b",
    "surrogate": "a\ud800b",
    "long": "x" * 100_000,
    "script": "</script><script>alert(1)</script>",
    "markup": "&<>\"'-->]]>",
    "NUL": "a\x00b",
    "format": "{0}%s{name}[bold]",
    "delete": "a\x7fb",
}
BY_DEFAULT = ("escape", "newline", "bidi", "surrogate")  # the others are more of these kinds
NAMES = [name if name in BY_DEFAULT else slow(name) for name in HOSTILE]
pytestmark = pytest.mark.usefixtures("plain_environment")


def write_safetensors(path: Path, name: str, fill: float, metadata: dict[str, str]) -> None:
    data = np.full((2, 3), fill, np.float32).tobytes()
    write_raw(path, {f"layer.{name}.w": ("F32", [2, 3], data)}, metadata=metadata)


@pytest.fixture(scope="module", params=NAMES)
def hostile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return a directory of checkpoints, a hostile text, and the name of the directory whose own name has it.

    The checkpoints have the text in names, metadata, configs and, where possible, file names.
    """
    text = HOSTILE[request.param]
    home = tmp_path_factory.mktemp("hostile")
    for folder, fill in (("a", 1.0), ("b", float("nan"))):
        (home / folder).mkdir()
        write_safetensors(home / folder / "model.safetensors", text, fill, {text: text, "format": "pt"})
        config = {"architectures": [text], "model_type": text, text: {text: [text]}}
        (home / folder / "config.json").write_text(json.dumps(config))
    torch.save({f"layer.{text}.w": torch.ones(2, 3), text: text, "step": 1}, home / "state.pt")
    (home / "index").mkdir()
    weight_map = {f"layer.{text}.w": f"{text}.safetensors", "w": text}
    (home / "index/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    named = home / as_argument(text).replace("/", "_").replace("\0", "_")[:200]
    named.mkdir()
    write_safetensors(named / "model.safetensors", "0", 1.0, {})
    return home, text, named.name


def as_argument(text: str) -> str:
    """Return a text as Python shows one of a program's arguments: bytes that are no text are other surrogates."""
    return os.fsdecode(text.encode("utf-8", "surrogatepass"))


CASES = [case.split() for lines in COMMAND_LINES.values() for case in lines.hostile.split("|") if case]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_hostile_texts_are_escaped_in_every_output(
    case: list[str],
    hostile: tuple[Path, str, str],
    call: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, text, named = hostile
    monkeypatch.chdir(home)
    words = {"NAME": as_argument(f"layer.{text}.w"), "TEXT": as_argument(text), "NAMED": named}
    arguments = [words.get(part, part) for part in case]
    for form in ("human", "auto", "json", "jsonl"):
        code, out, err = call(*arguments, "--format", form)
        assert code != EXIT_CODES["INTERNAL"], err
        # pipes get tables whose cells tabs separate
        allowed = "\n\t" if form == "auto" else "\n"
        assert unsafe(out, allowed) == unsafe(err, "\n") == set()
        assert not any(line.startswith("error: forged") for line in (out + err).splitlines())
        if form == "json":
            assert set(json.loads(out)) >= {"ok", "data"}
        elif form == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in out.splitlines())


PICTURES = [
    ["info", "a"],
    ["ls", "a"],
    ["ls", "state.pt"],
    ["show", "a", "NAME"],
    ["info", "NAMED"],
    ["ls", "NAMED"],
    ["show", "NAMED", "layer.0.w"],
]


@pytest.mark.parametrize("case", PICTURES, ids=" ".join)
def test_hostile_texts_are_escaped_in_pictures(
    case: list[str], hostile: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, text, named = hostile
    monkeypatch.chdir(home)
    picture = tmp_path / "picture.svg"
    words = {"NAME": as_argument(f"layer.{text}.w"), "NAMED": named}
    code = exit_code_of(*(words.get(part, part) for part in case), "--svg", picture)
    if code != 0:  # readers refuse names with control characters: there is nothing to draw
        assert "NAMED" not in case
        assert code in (EXIT_CODES["NOT_FOUND"], EXIT_CODES["CORRUPT"])
        assert not picture.exists()
        return
    raw = picture.read_text(encoding="utf-8")
    assert unsafe(raw, "\n") == set()
    assert {re.sub(r"\{.*\}", "", element.tag) for element in ET.fromstring(raw).iter()} <= {
        "svg", "title", "desc", "style", "rect", "text", "tspan", "g", "path", "line", "defs", "clipPath", "polyline",
        "pattern", "circle",
    }  # fmt: skip


def test_each_command_that_draws_has_a_case() -> None:
    context = click.Context(cli)
    drawing = [name for name in COMMANDS if any("--svg" in one.opts for one in cli.get_command(context, name).params)]
    assert list(dict.fromkeys(case[0] for case in PICTURES)) == drawing


def unsafe(text: str, allowed: str) -> set[str]:
    """Return the characters of an output that control a terminal, or that it does not show."""
    return {one for one in set(text) if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - set(allowed)


def text_parameters() -> list[tuple[str, int | str]]:
    """Return each parameter of a command that takes a text: the command, and the number of an argument or an option."""
    found: list[tuple[str, int | str]] = []
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        found += [(name, number) for number in range(len(arguments))]
        found += [
            (name, one.opts[0]) for one in command.params if isinstance(one, click.Option) and one.type is click.STRING
        ]
    return found


# Not paths of files: texts that are not the bytes of an argument, an empty one, and one that is too long for a name.
NO_PATHS = ["a\ud800b", "~\ud800/x", "memory://a\ud800", "a\udcffb", "a\0b", "", "x" * 5000]


@pytest.mark.parametrize("where", text_parameters(), ids=lambda where: f"{where[0]} {where[1]}")
def test_a_text_that_is_no_path_is_refused_by_name(
    where: tuple[str, int | str], tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    write_safetensors(Path("a/model.safetensors"), "0", 1.0, {})
    name, place = where
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for text in NO_PATHS:
        values = ["a", "b", "c"][: sum(isinstance(one, click.Argument) for one in command.params)]
        if isinstance(place, int):
            values[place] = text
        arguments = [name, *values, *(["--keep", "1"] if name == "prune" else [])]
        if isinstance(place, str):
            arguments += [place, text]
        code, out, err = call(*arguments)
        assert code != EXIT_CODES["INTERNAL"], (arguments, err)
        assert unsafe(out, "\n\t") == unsafe(err, "\n") == set()
