"""Suggest a layout for tensors of several ranks that seem to be parts of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["layout_advice", "rule_for_dim"]


def rule_for_dim(name: str) -> Callable[[int], str]:
    """Return a function that writes the rule of a layout file which divides tensor `name` along a dim."""

    def rule(dim: int) -> str:
        return f'{{"{name}": {{"dim": {dim}}}}}'

    return rule


def layout_advice(shapes: Sequence[tuple[int, ...]], rule: Callable[[int], str]) -> str:
    """Return the rules that tensors of these shapes allow, if each is a rank's part of one tensor; "" for none.

    Parts differ in the size of one dim at most. If all have one shape, it may be any dim, and the advice says how to
    find out which.

    Args:
        shapes: shapes of some ranks' tensors.
        rule: writes the rule for a dim.
    """
    first = shapes[0]
    if any(len(shape) != len(first) for shape in shapes):
        return ""
    dims = [dim for dim in range(len(first)) if len({shape[dim] for shape in shapes}) > 1]
    if len(dims) > 1:
        return ""
    if dims or len(first) == 1:
        return rule(dims[0] if dims else 0)
    if not first:
        return ""
    rules = ", or ".join(map(rule, range(len(first))))
    check = f"it is the dim along which the model's tensor is larger than a rank's {list(first)}"
    words = '; in a tp_plan "colwise" is dim 0 of a weight, "rowwise" dim 1' if len(first) == 2 else ""
    return f"{rules} ({check}{words})"
