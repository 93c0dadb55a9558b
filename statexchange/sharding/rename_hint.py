"""Find the regex that gives the tensors of one checkpoint the names of those of another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

__all__ = ["suggest_rename"]

_MAX_NAMES, _MAX_CANDIDATES = 50, 8


def suggest_rename(names_a: Iterable[str], names_b: Iterable[str]) -> tuple[str, str, int] | None:
    """Return a regex that replaces a prefix so that as many names of A as possible become names of B.

    Args:
        names_a: the names in A.
        names_b: the names in B.

    Returns:
        The regex, its replacement, and the number of names of A that B has then; None if no prefix increases it.

    Example:
        >>> suggest_rename(["model.up.weight", "model.norm.weight"], ["up.weight", "norm.weight"])
        ('^model\\\\.', '', 2)
    """
    all_a, all_b = set(names_a), set(names_b)
    found: tuple[str, str, int] | None = None
    # It must be the prefix of most names, not of one module that resembles another.
    most = len(all_a & all_b) + (min(len(all_a - all_b), len(all_b - all_a)) - 1) // 2
    for prefix, other in _prefixes(sorted(all_a - all_b), sorted(all_b - all_a)):
        renamed = [other + name.removeprefix(prefix) if name.startswith(prefix) else name for name in all_a]
        count = len(all_b.intersection(renamed))
        # `--rename REGEX=REPLACEMENT` is split at its last "=".
        if count > most and len(set(renamed)) == len(renamed) and "=" not in other:
            most = count
            found = f"^{re.escape(prefix)}", other.replace("\\", "\\\\"), count
    return found


def _prefixes(names_a: list[str], names_b: list[str]) -> list[tuple[str, str]]:
    """Return pairs of prefixes before an equal rest of names, the most frequent first."""
    by_last: dict[str, list[list[str]]] = {}
    for name in names_b:
        parts = name.split(".")
        by_last.setdefault(parts[-1], []).append(parts)
    pairs: Counter[tuple[str, str]] = Counter()
    for name in names_a[:: max(1, len(names_a) // _MAX_NAMES)]:
        a = name.split(".")
        alike = by_last.get(a[-1], [])
        for b in alike[:: max(1, len(alike) // _MAX_NAMES)]:
            same = 0
            while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
                same += 1
            rest_a, rest_b = a[: len(a) - same], b[: len(b) - same]
            are_numbers = rest_a[-1:] + rest_b[-1:] and all(part.isdigit() for part in rest_a[-1:] + rest_b[-1:])
            if same > 1 and not are_numbers:  # "weight" alone is in every module, and two layers are not one
                pairs["".join(f"{part}." for part in rest_a), "".join(f"{part}." for part in rest_b)] += same
    return [pair for pair, _ in pairs.most_common(_MAX_CANDIDATES)]
