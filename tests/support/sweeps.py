"""Sweeps: a few cases run by default, all others under the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return one case of a parametrisation, marked `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def by_default(cases: Iterable[Any], *positions: int) -> list[Any]:
    """Return all cases, those marked `slow` that do not stand at `positions`."""
    found = list(cases)
    return [
        case if at in positions else slow(*(case if isinstance(case, tuple) else (case,)))
        for at, case in enumerate(found)
    ]


def steps(every: int) -> list[Any]:
    """Return the cases of a parametrisation by step: `every`, for each `every`-th event, and 1, marked `slow`."""
    return [every, slow(1)]


EVERY = pytest.mark.parametrize("every", [24, slow(1)], ids=["some", "all"])
"""For a test that tries one thing at many places: at each 24th by default, at each one under `slow`."""


def some(cases: Sequence[Any], every: int) -> Sequence[Any]:
    """Return the last of each `every` cases, and the last of all."""
    return [case for at, case in enumerate(cases, 1) if at % every == 0 or at == len(cases)]
