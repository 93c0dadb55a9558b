"""Tables on narrow terminals: which columns are left out, and what is shortened."""

import pytest

from statexchange.cli.table_layout import aligned, narrowed

CELLS = [
    ["NAME", "KIND", "NOTE", "BYTES", "REASON"],
    ["model.layers.0.mlp.up_proj.weight", "plain", "-", "1 B", "it has no end and was not written as a whole"],
    ["b", "other", "-", "22 B", "fine"],
]
SHORT = [[*row[:-1], row[-1][:32]] for row in CELLS]  # the last column is never shortened
LEAST = 32 + 2 + 5 + 2 + 32


def lines(width: int) -> list[str]:
    return aligned(narrowed(SHORT, width, ("KIND", "NOTE")), ("BYTES",))


def test_a_table_that_fits_is_not_changed() -> None:
    natural = max(map(len, aligned(CELLS, ())))
    assert narrowed(CELLS, natural, ("KIND", "NOTE")) == CELLS


@pytest.mark.parametrize("width", range(LEAST, 110))
def test_lines_fit_any_width_down_to_the_least(width: int) -> None:
    assert max(map(len, lines(width))) <= width


def test_the_widest_texts_lose_their_middle() -> None:
    assert lines(86) == [
        "NAME                              KIND   NOTE  BYTES  REASON",
        "model.layers.0....up_proj.weight  plain  -       1 B  it has no end and was not writte",
        "b                                 other  -      22 B  fine",
    ]


@pytest.mark.parametrize("width", range(10, 110))
def test_sentences_of_the_last_column_lose_nothing(width: int) -> None:
    cells = narrowed(CELLS, width, ("KIND", "NOTE"))
    assert [row[-1] for row in cells] == [row[-1] for row in CELLS]
    room = max(width, LEAST) - 32
    assert all(line.index(row[-1]) <= room for line, row in zip(aligned(cells, ("BYTES",)), cells, strict=True))


def test_columns_are_left_out_in_order() -> None:
    assert lines(LEAST + 6)[0].split() == ["NAME", "NOTE", "BYTES", "REASON"]
    assert lines(LEAST + 5)[0].split() == ["NAME", "BYTES", "REASON"]


def test_a_table_is_not_narrower_than_its_least_width() -> None:
    assert lines(10) == lines(LEAST)
