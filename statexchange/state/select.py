"""Leave out of the tree of a state what `include` and `exclude` of a save do not select.

Patterns are of names in the state, or of what contains them. What is loaded as a whole is selected as a whole, if one
of its names is included and none is excluded::

    {"model": net, "lrs": [1, 2], "step": 3}, exclude=["model.base.*", "lrs.0"]
    left out: model.base.weight, model.base.bias, lrs

The save records the paths that were left out, and not the patterns, which a load could only ask of names that it has
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from statexchange.errors import UnsupportedError, type_text
from statexchange.sharding.options import LoadOptions, unmatched
from statexchange.sharding.paths import joined
from statexchange.state.tree import Kind, children, has_indices, parts, walk
from statexchange.state.types import Leaf
from statexchange.state.units import hyperparameters
from statexchange.tensors import is_tensor

__all__ = ["Selection", "select"]

_LEFT_OUT: Leaf = object()


@dataclass(slots=True)
class Selection:
    """The part of a state that is saved.

    Attributes:
        tree: the tree, in which a list has an empty mapping for an item that is left out.
        left_out: the paths of what is left out; "" if that is all.
        unmatched: the patterns of `include` that match no name.
        unused: the patterns of `exclude` that match no name, without those that begin with a path that is left out.
    """

    tree: Leaf
    left_out: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def select(tree: Leaf, units: Mapping[str, Kind], options: LoadOptions) -> Selection:
    """Return what of a tree is selected; `units` has the kind of the modules, optimizers and objects at their paths.

    Raises:
        UnsupportedError: only a part of a namedtuple or dataclass that holds tensors or objects is selected, or one of
            two keys that have one text.
    """
    selecting = _Selecting(units, options)
    selected = selecting.select(tree, "")
    alike = selecting.kept.intersection(selecting.left_out)
    if alike:
        text = "two keys of the state look alike here, and include and exclude select one of them: make both text"
        raise UnsupportedError(text, name=min(alike))
    if selected is _LEFT_OUT:
        selected = {}
    # The names inside an optimizer that is left out are not collected: a pattern for one of them may be right.
    whole = tuple(joined(path, "") for path in selecting.left_out if path)
    unused = [pattern for pattern in unmatched(options.exclude, selecting.names) if not pattern.startswith(whole)]
    return Selection(selected, selecting.left_out, unmatched(options.include, selecting.names), unused)


class _Selecting:
    """Walks over a tree, and notes what was left out and the names that were asked for."""

    def __init__(self, units: Mapping[str, Kind], options: LoadOptions) -> None:
        self.left_out: list[str] = []
        self.names: set[str] = set()
        self.kept: set[str] = set()
        self._units = units
        self._options = options

    def select(self, value: Leaf, path: str) -> Leaf:
        """Return what is selected of the value at a path."""
        kind = self._units.get(path)
        if kind == "optimizer":
            return self._optimizer(value, path)
        items = children(value)
        if not items or kind == "object":
            return self._whole(value, path)
        if not isinstance(value, Mapping) and not self._holds_state(value, path):
            # Lists and records of plain values are loaded as a whole.
            return self._whole(value, path)
        new: dict[Leaf, Leaf] = {}
        for key, item in items.items():
            inner = joined(path, key)
            # Extra state of a module may be a mapping, and goes to one call of its.
            selected = self._whole(item, inner) if kind == "module" else self.select(item, inner)
            if selected is not _LEFT_OUT:
                new[key] = selected
        if not new:
            self.left_out.append(path)
            return _LEFT_OUT
        if isinstance(value, Mapping):
            return new
        if has_indices(value):
            # The others keep their indices.
            return type(value)(new.get(key, {}) for key in items)
        if any(new.get(key) is not item for key, item in items.items()):
            text = f"include and exclude select a part of {type_text(value)} here: select all of it, or nothing"
            raise UnsupportedError(text, name=path)
        return value

    def _holds_state(self, value: Leaf, path: str) -> bool:
        begin = joined(path, "")
        return any(map(is_tensor, parts(value))) or any(unit.startswith(begin) for unit in self._units)

    def _whole(self, value: Leaf, path: str) -> Leaf:
        """Return a value if it is selected as a whole."""
        names = [step.path for step in walk(value, path=path)]
        self.names.update(names)
        if self._options.wants_object(names):
            self.kept.add(path)
            return value
        self.left_out.append(path)
        return _LEFT_OUT

    def _optimizer(self, tree: Mapping[str, Leaf], path: str) -> Leaf:
        """Return an optimizer's state dict with its param groups, and the state of the parameters that are selected."""
        groups = joined(path, "param_groups")
        self.names.update([path, groups])
        if path and not self._options.may_want(path):
            self.left_out.append(path)
            return _LEFT_OUT
        # The groups are needed to know the parameters. Their values are left where they are for what is not selected.
        labels: list[Leaf] = []
        for group in tree["param_groups"]:
            labels += group["params"]
            for label in group["params"]:
                where = joined(groups, label)
                names = [where, *(joined(where, key) for key in hyperparameters(group))]
                self.names.update(names)
                if not self._options.wants_object(names):
                    # With a slash: a parameter may be called by a number, and "param_groups.0" is a group.
                    self.left_out.append(f"{groups}/{label}")
        new: dict[str, Leaf] = {"state": {}, "param_groups": tree["param_groups"]}
        for label in dict.fromkeys([*labels, *tree["state"]]):
            selected = self._whole(tree["state"].get(label, {}), joined(path, f"state.{label}"))
            # One that has made no step has no state. It is noted all the same, as a load would take it for that.
            if selected is not _LEFT_OUT and label in tree["state"]:
                new["state"][label] = selected
        for key, item in tree.items():
            if key not in new:
                selected = self._whole(item, joined(path, key))
                if selected is not _LEFT_OUT:
                    new[key] = selected
        return new
