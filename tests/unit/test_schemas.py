"""Every JSON output is valid by its schema in docs/schemas, and every schema is used by an output."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from command_lines import COMMAND_LINES
from commands import CommandLine
from json_schemas import SCHEMAS, validator
from jsonschema import Draft202012Validator
from safetensors.numpy import save_file
from stored import DATA
from whole_checkpoints import KINDS

from statexchange.cli.commands import COMMANDS
from statexchange.cli.main import cli

COMMON = {"--format", "--json", "--quiet", "--verbose"}  # which leave the JSON as it is, or choose it
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.save of one process


def references(value: Any, file: str) -> set[str]:
    """Return every definition that a schema refers to, with its file."""
    found: set[str] = set()
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            target, _, pointer = value["$ref"].partition("#")
            found.add(f"{target or file}#{pointer}")
        for one in value.values():
            found |= references(one, file)
    elif isinstance(value, list):
        for one in value:
            found |= references(one, file)
    return found


def objects(value: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return every schema of an object with properties, with its place."""
    found: list[tuple[str, dict[str, Any]]] = []
    if isinstance(value, dict):
        if isinstance(value.get("properties"), dict) and value.get("type") == "object":
            found.append((where, value))
        for key, one in value.items():
            found += objects(one, f"{where}/{key}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            found += objects(one, f"{where}/{number}")
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with checkpoints of many kinds, whole and broken."""
    home = tmp_path_factory.mktemp("place")
    kinds = ("save", "saves", "export", "workspace", "dcp", "torch file", "ZeRO-2", "Trainer")
    for name in (*kinds, "huggingface shards", "rank files"):
        KINDS[name].build(home / name.replace(" ", "_"))
    os.mkdir(home / "gguf")
    shutil.copy(DATA / "foreign/model.gguf", home / "gguf")
    shards = home / "huggingface_shards"
    shutil.copytree(shards, home / "missing")
    (home / "missing/model-00002-of-00003.safetensors").unlink()
    shutil.copytree(home / "saves", home / "broken_saves")
    (home / "broken_saves/step-000000010/rank-00001-of-00003.safetensors").unlink()
    for file in sorted((home / "broken_saves/step-000000020").glob("rank-*.safetensors"))[:1]:
        file.write_bytes(file.read_bytes()[:-100])
    shutil.copytree(home / "saves", home / "unfinished_saves")
    (home / "unfinished_saves/step-000000020/save.json").unlink()
    shutil.copytree(home / "export", home / "changed")
    first = KINDS["export"].files(home / "changed")[0]
    first.write_bytes(first.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")
    os.mkdir(home / "odd")
    odd = {"nan": np.array([1.0, np.nan, -np.inf] * 8, np.float32), "zero": np.zeros((2, 40), np.float32)}
    save_file(odd, home / "odd/model.safetensors")
    os.mkdir(home / "other")
    save_file({**odd, "zero": np.ones((2, 40), np.float32)}, home / "other/model.safetensors")
    metadata = home / "download/.cache/huggingface/download"
    metadata.mkdir(parents=True)
    digest = hashlib.sha256((home / "odd/model.safetensors").read_bytes()).hexdigest()
    (metadata / "model.safetensors.metadata").write_text(f"{'a' * 40}\n{digest}\n1700000000.0\n")
    return home


LISTED = [case.strip() for lines in COMMAND_LINES.values() for case in lines.json.split("|")]


@pytest.mark.usefixtures("plain_environment")
@pytest.mark.parametrize("case", [*LISTED, "nosuch", "inf"])
def test_json_output_is_valid_by_its_schema(
    case: str, place: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    command, *rest = case.split()
    schema = f"{command if command in COMMANDS else 'errors'}.json"
    writes = command in ("merge", "seal", "prune") and "--dry-run" not in rest
    forms = [["--json"]] if writes or "--svg" in rest else [["--json"], ["--format", "jsonl"]]
    for form in forms:
        _, out, _ = call(command, *rest, *form)
        if form == ["--json"]:
            validator(schema).validate(json.loads(out))
            continue
        *lines, summary = map(json.loads, out.splitlines())
        assert summary["type"] == "summary"
        validator(schema).validate(summary)
        for line in lines:
            assert line["type"] in (*COMMAND_LINES[command].rows, "path")
            validator(f"{schema}#/$defs/{line['type']}").validate(line)


def test_every_schema_is_a_valid_one_and_is_that_of_a_command() -> None:
    for content in SCHEMAS.values():
        Draft202012Validator.check_schema(content)
    assert set(SCHEMAS) == {"common", "errors", *COMMANDS}


def test_every_option_is_in_a_case() -> None:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        options = {max(one.opts, key=len) for one in command.params if isinstance(one, click.Option)} - COMMON
        assert options - {word for case in LISTED if case.split()[0] == name for word in case.split()} == set()


def test_every_definition_is_used() -> None:
    defined = {f"{file}.json#/$defs/{name}" for file, content in SCHEMAS.items() for name in content.get("$defs", ())}
    used = set().union(*(references(content, f"{file}.json") for file, content in SCHEMAS.items()))
    assert used - defined == set()
    assert defined - used == set()


def test_no_object_may_have_a_key_that_its_schema_lacks() -> None:
    for file, content in SCHEMAS.items():
        for where, schema in objects(content, file):
            assert schema["additionalProperties"] is False, where
            assert set(schema["required"]) <= set(schema["properties"]), where


def test_another_key_is_refused(place: Path, call: CommandLine) -> None:
    _, found = call.json("info", place / "export")
    validator("info.json").validate(found)
    found["data"]["another"] = 1
    assert not validator("info.json").is_valid(found)
