"""Each command has its row in the table of command lines, and nothing else has."""

import inspect

import pytest
from command_lines import COMMAND_LINES, NEEDED

from statexchange.cli.commands import COMMANDS
from statexchange.cli.main import cli


def test_the_table_has_the_commands_in_their_order() -> None:
    assert list(COMMAND_LINES) == list(COMMANDS)


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_lines_for_each_test_or_a_reason_to_have_none(name: str, needed: str) -> None:
    lines = getattr(COMMAND_LINES[name], needed)
    assert bool(lines) != (needed in COMMAND_LINES[name].without)
    texts = lines.values() if isinstance(lines, dict) else lines.split("|") if lines else ()
    assert [text for text in texts if text.split()[0] != name] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_sentence_of_the_list_begins_the_help_of_the_command(name: str) -> None:
    command = cli.get_command(cli.make_context("statexchange", [], resilient_parsing=True), name)
    assert command is not None
    assert command.help is not None
    assert inspect.cleandoc(command.help).splitlines()[0] == COMMANDS[name]
