"""Tables on narrow terminals: which columns are left out, and what is shortened."""

import pytest

from statexchange.cli.table_layout import Narrowing, aligned, narrowed

CELLS = [
    ["NAME", "KIND", "NOTE", "BYTES", "REASON"],
    ["model.layers.0.mlp.up_proj.weight", "plain", "-", "1 B", "it has no end and was not written as a whole"],
    ["b", "other", "-", "22 B", "fine"],
]
NARROWING = Narrowing(drop=("KIND", "NOTE"), shorten={"REASON": 10, "NAME": 14}, cut=("REASON",))


def lines(width: int) -> list[str]:
    return aligned(narrowed(CELLS, width, NARROWING), ("BYTES",))


def test_a_table_that_fits_is_not_changed() -> None:
    natural = max(map(len, aligned(CELLS, ())))
    assert narrowed(CELLS, natural, NARROWING) == CELLS


@pytest.mark.parametrize("width", range(33, 110))
def test_lines_fit_any_width_down_to_the_least(width: int) -> None:
    assert max(map(len, lines(width))) <= width


def test_texts_are_shortened_in_order_and_no_more_than_needed() -> None:
    assert lines(74) == [
        "NAME                               KIND   NOTE  BYTES  REASON",
        "model.layers.0.mlp.up_proj.weight  plain  -       1 B  it has no end an...",
        "b                                  other  -      22 B  fine",
    ]


def test_columns_without_a_value_are_left_out_first() -> None:
    assert lines(44) == [
        "NAME                KIND   BYTES  REASON",
        "model.l...j.weight  plain    1 B  it has...",
        "b                   other   22 B  fine",
    ]
    assert lines(38)[0].split() == ["NAME", "BYTES", "REASON"]


def test_a_table_is_not_narrower_than_its_least_width() -> None:
    assert lines(10) == lines(33)


@pytest.mark.parametrize("width", range(33, 110))
def test_a_sentence_that_is_wrapped_loses_nothing(width: int) -> None:
    wrapping = Narrowing(drop=NARROWING.drop, shorten=NARROWING.shorten, wrap=("REASON",))
    header, *rows = narrowed(CELLS, width, wrapping)
    assert max(map(len, aligned([header, *rows], ("BYTES",)))) <= width
    assert " ".join(row[-1].strip() for row in rows) == f"{CELLS[1][-1]} fine"
    assert [row[0] != "" for row in rows] == [True, *[False] * (len(rows) - 2), True]
    assert all(line.startswith("  ") for line in (row[-1] for row in rows[1:-1]))


def test_a_word_that_is_too_long_for_a_line_goes_on_in_the_next() -> None:
    cells = [["PATH", "REASON"], ["a", "CORRUPT global_step2/mp_rank_00_model_states.pt: no pickle"]]
    assert aligned(narrowed(cells, 30, Narrowing(shorten={"REASON": 10}, wrap=("REASON",))), ()) == [
        "PATH  REASON",
        "a     CORRUPT global_step2/mp_",
        "        rank_00_model_states.p",
        "        t: no pickle",
    ]
