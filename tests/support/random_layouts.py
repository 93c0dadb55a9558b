"""Random layouts of tensors that are cut by hand, for hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

State = dict[str, torch.Tensor]


@st.composite
def cut_by_rules(draw: st.DrawFn) -> tuple[Any, State, list[State]]:
    """Draw a layout, the merged tensors that it should give, and the ranks' tensors, cut by torch alone."""
    mesh = {"a": draw(st.integers(1, 3)), "b": draw(st.integers(1, 3))}
    whole: State = {}
    rules: dict[str, Any] = {}
    states: list[State] = [{} for _ in range(mesh["a"] * mesh["b"])]
    for number in range(draw(st.integers(1, 4))):
        name = f"t{number}"
        dims = draw(st.integers(1, 3))
        axis_of = draw(st.permutations(range(dims)).map(lambda order: dict(zip("ab", order, strict=False))))
        axis_of = {axis: dim for axis, dim in axis_of.items() if draw(st.booleans())}
        pieces: dict[str, list[list[int]]] = {}  # by axis and position: the size of each block
        rule: list[Any] = []
        for axis, dim in axis_of.items():
            blocks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            scales = [draw(st.integers(0, 2)) for _ in range(mesh[axis])]
            pieces[axis] = [[block * scale for block in blocks] for scale in scales]
            rule.append({"dim": dim, "axis": axis, "blocks": blocks})
        shape = [draw(st.integers(1, 4)) for _ in range(dims)]
        for axis, dim in axis_of.items():
            shape[dim] = sum(map(sum, pieces[axis]))
        value = torch.arange(torch.Size(shape).numel()).reshape(shape)
        whole[name] = value
        rules[name] = rule or "replicate"
        for rank, state in enumerate(states):
            at = {"a": rank // mesh["b"], "b": rank % mesh["b"]}
            part = value
            for axis, dim in axis_of.items():
                by_block = part.split([sum(p[k] for p in pieces[axis]) for k in range(len(pieces[axis][0]))], dim)
                mine = [b.split([p[k] for p in pieces[axis]], dim)[at[axis]] for k, b in enumerate(by_block)]
                part = torch.cat(mine, dim)
            state[name] = part
    return {"mesh": mesh, "rules": rules}, whole, states
