"""The tree of modules in the dotted names of a checkpoint's tensors, with what lies below each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statexchange.report.tensor_rows import TensorRow

__all__ = ["ModuleNode", "module_tree"]


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module, or a run of numbered ones that are alike, with all that lies below.

    Attributes:
        name: its own part of the dotted name, as "self_attn"; "0..31" for modules that are alike; "" at the top.
        path: the dotted name, which ends in `name`.
        num_alike: number of modules that this stands for.
        num_tensors: number of tensors, of all of these modules.
        num_parameters: number of their elements.
        nbytes: their bytes.
        children: the modules and tensors directly below.
    """

    name: str
    path: str
    num_alike: int
    num_tensors: int
    num_parameters: int
    nbytes: int
    children: tuple[ModuleNode, ...]

    def walk(self, depth: int) -> Iterator[tuple[int, ModuleNode]]:
        """Yield (depth, node) for this node, which has `depth`, and all below it, parents first."""
        waiting = [(depth, self)]
        while waiting:
            level, node = waiting.pop()
            yield level, node
            waiting += [(level + 1, child) for child in reversed(node.children)]


class _Branch:
    """A module while the tree is built. Branches are alike if their `form` is equal."""

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.tensors: list[TensorRow] = []
        self.num_tensors = self.num_parameters = self.nbytes = 0
        self.form = 0


def module_tree(rows: Iterable[TensorRow], depth: int) -> ModuleNode:
    """Return the tree of the tensors' names, down to `depth` parts of a name.

    Successive numbered modules, such as layers.0 to layers.31, are one node if all below them has the same names,
    dtypes and shapes.
    """
    top = _Branch()
    branches = [top]
    for row in rows:
        branch = top
        parts = row.name.split(".", depth)[:depth]  # deeper parts count in the last one
        path = [top]
        for part in parts:
            if part not in branch.below:
                branch.below[part] = _Branch()
                branches.append(branch.below[part])
            branch = branch.below[part]
            path.append(branch)
        branch.tensors.append(row)
        for one in path:
            one.num_tensors += 1
            one.num_parameters += row.num_parameters
            one.nbytes += row.nbytes or 0
    forms: dict[Hashable, int] = {}  # numbers, so that a form does not hold all forms below
    for branch in reversed(branches):  # children come after their parents
        own = tuple(sorted((row.name.split(".", depth)[depth:], row.dtype, row.shape) for row in branch.tensors))
        below = tuple(sorted((name, child.form) for name, child in branch.below.items()))
        branch.form = forms.setdefault((repr(own), below), len(forms))
    return _node("", "", [top])


def _node(name: str, path: str, alike: list[_Branch]) -> ModuleNode:
    """Return the node of branches that are alike. The work is bounded by their number and the depth."""
    children = []
    for run in _runs(alike[0].below):
        shown = run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}"
        below = [branch.below[part] for branch in alike for part in run]
        children.append(_node(shown, f"{path}.{shown}".removeprefix("."), below))
    return ModuleNode(
        name,
        path,
        len(alike),
        sum(branch.num_tensors for branch in alike),
        sum(branch.num_parameters for branch in alike),
        sum(branch.nbytes for branch in alike),
        tuple(children),
    )


def _runs(below: dict[str, _Branch]) -> list[list[str]]:
    """Return the names in order of their numbers, successive ones whose branches are alike together."""
    runs: list[list[str]] = []
    for name in sorted(below, key=lambda name: (0, int(name), "") if _is_number(name) else (1, 0, "")):
        last = runs[-1][-1] if runs else ""
        is_next = _is_number(name) and _is_number(last) and int(name) == int(last) + 1
        if is_next and below[name].form == below[last].form:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name
