"""Every kind of state with every operation: bit-equal, or refused by name; docs/state.md has the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from state_kinds import CALLS, KINDS, outcome, table

TESTED_BY_OTHERS = {
    kind
    for kind in KINDS
    if kind.startswith(("optimizer ", "scheduler "))
    and kind not in ("optimizer AdamW", "optimizer LBFGS", "optimizer SGD with momentum", "scheduler MultiStepLR")
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in TESTED_BY_OTHERS else ()) for kind in KINDS]
)
def test_each_call_keeps_or_refuses_a_kind_of_state_as_the_page_states(kind: str, tmp_path: Path) -> None:
    found = [outcome(KINDS[kind], call, str(tmp_path / str(number))) for number, call in enumerate(CALLS)]
    assert found == table()[kind]


def test_the_table_of_the_page_has_every_kind_and_no_other() -> None:
    assert table().keys() == KINDS.keys()
