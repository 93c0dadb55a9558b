"""Build the tree of a state from the names of a source that has none: a torch checkpoint, or files of tensors alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, NotFoundError, type_text
from statexchange.state.containers import children, has_indices
from statexchange.state.leaves import contains_state, is_leaf, is_stateful
from statexchange.state.load_plan import NO_TREE, ObjectStates, live_paths
from statexchange.state.megatron import leaves, sharded_kind
from statexchange.state.merged_trees import SavedTensor
from statexchange.state.modules import is_module, live_items
from statexchange.state.optimizer_names import OptimizerNames
from statexchange.state.optimizers import is_optimizer, is_state_of_optimizer, state_of_optimizer
from statexchange.state.source_names import (
    Entries,
    SourceNames,
    by_first,
    dotted_siblings,
    has_no_leaves,
    is_index,
    names_above,
)
from statexchange.state.state_dict import ParameterName, parameter_names
from statexchange.state.tree import entry_path, walk
from statexchange.tensors import is_tensor
from statexchange.units import format_number

__all__ = ["NamesTree", "tree_from_names"]

_HIDING_NOTHING = contextlib.nullcontext()
_ABSENT = object()  # where the source has nothing for the live state, or nothing that the load wants


@dataclass(frozen=True, slots=True)
class NamesTree:
    """The tree of a state from the names of a source.

    Attributes:
        tree: the tree, as saving would have given it; NO_TREE if the options leave out the whole state.
        taken: the names of the plain values that it has, and all names of what the options leave out whole.
        left_out: the paths of what the options leave out whole, with dots before indices.
        lacking: the paths of plain values inside mappings of such values that the source lacks.
        ungrouped: the paths of optimizers whose param groups are not all those of the source, in its order.
    """

    tree: Any
    taken: frozenset[str]
    left_out: frozenset[str]
    lacking: frozenset[str]
    ungrouped: frozenset[str]


def tree_from_names(state: Any, source: SourceNames, objects: ObjectStates) -> NamesTree:
    """Build the tree that saving `state` with what a source has would have given. Not collective.

    A name is the path in the state, joined by dots. The modules of a list share one namespace, or have their indices in
    names. Names in an optimizer's state are those of torch.distributed.checkpoint: ``state`` or ``param_groups``, then
    the parameter's name in its module. Or, as in an optimizer's own `state_dict`, the parameter's number in the order
    of the param groups; these must then have the sizes of the live ones. A hyperparameter that the source lacks stays
    as it is. Other objects with a state have entries as their present one in `objects`.

    Raises:
        NotFoundError: the source has nothing for a state that is no mapping.
        InvalidArgumentError: a live container does not fit the source's entries; an optimizer's parameters are
            numbered, and do not fit the live ones; or the state is a plain value.
        UnsupportedError: the source has a value that is no plain one where the state has a plain one or an optimizer.
    """
    if not isinstance(state, Mapping) and not contains_state(state):
        raise InvalidArgumentError(f"the state is {type_text(state)}: give modules, optimizers or mappings")
    builder = _Builder(source, parameter_names(state), objects)
    tree = builder.entry(state, "")
    if tree is _ABSENT and isinstance(state, Mapping) and not is_leaf(state):
        tree = {}
    if tree is _ABSENT and "" not in builder.left_out:
        raise NotFoundError(
            f"the source has nothing for the state, {type_text(state)}: give a state with the source's names, or a "
            "mapping that has it under its name in the source"
        )
    sets = (builder.entries.taken, builder.left_out, builder.lacking, builder.optimizers.ungrouped)
    return NamesTree(NO_TREE if tree is _ABSENT else tree, *map(frozenset, sets))


class _Builder:
    """Builds the tree of a state, entry by entry. The attributes are what `NamesTree` returns."""

    def __init__(self, source: SourceNames, parameters: Mapping[int, ParameterName], objects: ObjectStates) -> None:
        self.entries = Entries(source)
        self.left_out: set[str] = set()
        self.lacking: set[str] = set()
        self._source = source
        self.optimizers = OptimizerNames(source, self.entries, parameters)
        in_state = {key: name.in_state for key, name in parameters.items()}
        in_module = {key: name.in_modules[0][1] for key, name in parameters.items()}
        self._parameter_names: list[Mapping[int, str]] = [in_state, in_module, {}]
        self._objects = objects
        self._in_unit = False

    def entry(self, value: Any, name: str) -> Any:
        """Return the tree of the live `value` called `name`, "" for the whole state; `_ABSENT` for nothing."""
        has = self._source.has
        prefix = f"{name}." if name else ""
        if is_tensor(value):
            return SavedTensor(name) if self._wants(name) and has(name) else _ABSENT
        kind = sharded_kind(value)
        if _is_unit(value):
            return self._unit(value, name, prefix)
        if kind in ("object", "local"):
            return _ABSENT
        if name and not self._may_want(name, value):
            return self._leave_out(name)
        if kind is not None:
            return [SavedTensor(part.key) for _, part in leaves(value) if has(part.key)]
        if is_module(value):
            return self._module(live_items(value), prefix)
        if not contains_state(value):
            return self._plain(value, name, prefix)
        if self.entries.has_value(name):
            return self._selected(self.entries.value(name), name, value)
        if has_indices(value):
            return self._modules(value, prefix) if all(map(is_module, value)) else self._list(value, name, prefix)
        return self._mapping(value, prefix)

    def _wants(self, name: str) -> bool:
        return self._in_unit or self._source.options.wants(name)

    def _wants_in_value(self, name: str) -> bool:
        """Whether an entry of the source is wanted, or anything in its value."""
        if self._wants(name) or name not in self._source.texts:
            return self._wants(name)
        text = self._source.texts[name]
        inside = walk(values.decode(text), path=name) if text[0] in "[{" else ()
        return self._source.options.wants_object([step.path for step in inside])

    def _may_want(self, name: str, value: Any) -> bool:
        """Whether the live `value`, or anything inside it, is to be loaded."""
        has_entries = children(value) is not None or (is_leaf(value) and not is_tensor(value))
        return self._wants(name) or (has_entries and self._source.options.may_want(name))

    def _module(self, items: tuple[dict[str, Any], dict[str, Any]], prefix: str, at: str = "") -> dict[str, Any]:
        """Return the tree of a module by its `live_items`.

        Patterns may have its names in the source, or those after its place, `at`.
        """
        live, rest = items
        wanted = {name for name in (*live, *rest) if self._wants_of_module(name, prefix, at or prefix)}
        has = self._source.has
        tree: dict[str, Any] = {
            name: SavedTensor(prefix + name) for name in live if name in wanted and has(prefix + name)
        }
        for name, value in rest.items():  # extra state, which may be passed over if it is not understood
            if name in wanted and prefix + name not in self._source.opaque:
                item = self._whole(self.entry, value, prefix + name)
                if item is not _ABSENT:
                    tree[name] = item
        return tree

    def _wants_of_module(self, name: str, prefix: str, at: str) -> bool:
        if at == prefix:
            return self._wants(prefix + name)
        is_wanted = self._in_unit or self._source.options.wants_object([prefix + name, at + name])
        if not is_wanted:
            self._leave_out(at + name, [prefix + name])
        return is_wanted

    def _modules(self, live: Sequence[Any], prefix: str) -> list[dict[str, Any]]:
        """Return the trees of a list of modules, which share one namespace or have their indices in names.

        "0.weight" may be a name in one module or that of the first one's weight: what the source has more of counts.
        """
        has, modules = self._source.has, list(map(live_items, live))
        names = [(i, name) for i, (tensors, _) in enumerate(modules) for name in tensors]
        with_index = sum(has(f"{prefix}{i}.{name}") for i, name in names)
        if with_index > sum(has(f"{prefix}{name}") for _, name in names):
            return [self._module(items, f"{prefix}{i}.") for i, items in enumerate(modules)]
        return [self._module(items, prefix, f"{prefix}{i}.") for i, items in enumerate(modules)]

    def _mapping(self, live: Any, prefix: str) -> dict[Any, Any]:
        """Return the entries of a live mapping, namedtuple or dataclass, each by its own name."""
        items = live if isinstance(live, Mapping) else children(live) or {}
        names: dict[str, Any] = {}
        for key in items:
            name = f"{prefix}{key}"
            if names.setdefault(name, key) is not key:
                text = f"two keys of the mapping here look alike, {names[name]!r} and {key!r}: make both text"
                raise InvalidArgumentError(text, name=name)
        tree = {}
        siblings = dotted_siblings(names, len(prefix))
        for name, (key, value) in zip(names, items.items(), strict=True):
            with self.entries.hiding(siblings[name]) if name in siblings else _HIDING_NOTHING:
                item = self.entry(value, name)
            if item is not _ABSENT:
                tree[key] = item
        return tree

    # Plain values

    def _plain(self, live: Any, name: str, prefix: str) -> Any:
        """Return a value without state: whole, or by entries of the source."""
        if name in self._source.tensors or self.entries.has_value(name):
            return self._selected(self.entries.value(name), name, live)
        if not _has_text_keys(live):
            entries = {
                rest: entry
                for rest, entry in self.entries.below(prefix).items()
                if self._wants(entry) or entry not in self._source.opaque
            }
            if any(map(self._wants_in_value, entries.values())):
                return self._selected(self.entries.container(entries, live, name), name, live)
            if entries or not self._wants(name):  # nothing in it is wanted
                return self._leave_out(name)
            # An empty container has no entry in some sources: it may have been saved.
            return live if has_no_leaves(live) and not self._source.writes_empty else _ABSENT
        tree = self._mapping(live, prefix)
        lacking = {f"{prefix}{key}" for key in live if key not in tree} - self.left_out
        if not lacking and not tree:
            return self._leave_out(name)
        # An object takes its whole state or none; a mapping of which nothing was saved is missing as one.
        if lacking and (self._in_unit or len(lacking) == len(live)):
            return _ABSENT
        self.lacking |= lacking
        return tree

    def _selected(self, saved: Any, name: str, live: Any) -> Any:
        """Return what is to be loaded of a value that the source has in one piece; `_ABSENT` for nothing.

        Entries of mappings are loaded or left by themselves, and so are the items of a list that holds state.
        """
        if self._in_unit:
            return saved
        own = {} if is_leaf(live) else children(live) or {}
        if isinstance(saved, Mapping) and saved and not _is_unit(live):
            entries = {key: self._selected(item, entry_path(name, key), own.get(key)) for key, item in saved.items()}
            return {key: item for key, item in entries.items() if item is not _ABSENT} or self._leave_out(name)
        if isinstance(saved, list | tuple) and len(saved) == len(own) and contains_state(live) and not is_leaf(live):
            items = [self._selected(item, entry_path(name, i), own.get(i)) for i, item in enumerate(saved)]
            items = [NO_TREE if item is _ABSENT else item for item in items]
            return self._leave_out(name) if all(item is NO_TREE for item in items) else items
        paths = [step.path for step in walk(saved, path=name)]
        if _is_unit(live):
            paths += self._live_paths(live, name)
        elif not is_leaf(live):
            paths += [step.path for step in walk(live, path=name)]
        return saved if self._source.options.wants_object(paths) else self._leave_out(name)

    # Objects, which are loaded or left out whole

    def _unit(self, live: Any, name: str, prefix: str) -> Any:
        """Return the tree of an object with a state; `_ABSENT` if it is not to be loaded."""
        options = self._source.options
        selects = (options.include or options.exclude) and not self._in_unit
        names = [*self.entries.below(prefix).values()] if selects else []
        if selects and name and not options.may_want(name):
            return self._leave_out(name, names)
        tree = self._whole(self._of_unit, live, name, prefix)
        if selects and tree is not _ABSENT:
            paths = {path for one in names for path in names_above(one, name)}
            paths.update(step.path for step in walk(tree, path=name))
            paths.update(self._live_paths(live, name))
            if not options.wants_object([*paths]):
                return self._leave_out(name, names)
        return tree

    def _live_paths(self, live: Any, name: str) -> list[str]:
        """Return the paths in the present state of an object, by all the names that parameters may have in a source."""
        return [path for known in self._parameter_names for path in live_paths(live, name, known, self._objects)]

    def _whole(self, build: Callable[..., Any], *args: Any) -> Any:
        """Return what `build` returns if all that is inside is to be loaded."""
        outer, self._in_unit = self._in_unit, True
        tree = build(*args)
        self._in_unit = outer
        return tree

    def _leave_out(self, path: str, names: Iterable[str] = ()) -> Any:
        """Note a path of the state that stays as it is, with the names of the source in it; return `_ABSENT`."""
        self.entries.taken.update(names)
        self.left_out.add(path)
        return _ABSENT

    def _of_unit(self, live: Any, name: str, prefix: str) -> Any:
        if self.entries.has_value(name):
            return self.entries.value(name)
        if is_optimizer(live):
            more = self._mapping(state_of_optimizer(live, name)["more"], prefix)
            return {**self.optimizers.tree(live, prefix), **more}
        if isinstance(live, Mapping) and not is_leaf(live):
            return self._plain(live, name, prefix) if not contains_state(live) else self._mapping(live, prefix)
        return self._object(live, name, prefix)

    def _object(self, live: Any, name: str, prefix: str) -> Any:
        """Return the state of an object that has `load_state_dict`."""
        entries = self.entries.below(prefix)
        own = self._objects.of(live, name)
        # A state that is one object does not take the entries of a source of something else.
        if not name and not by_first(entries).keys() & set(map(str, children(own) or {})):
            return _ABSENT
        if entries:
            return self.entries.container(entries, own, name)
        return {} if children(own) == {} else _ABSENT

    def _list(self, live: Sequence[Any], name: str, prefix: str) -> Any:
        """Return the items of a list that holds state, with NO_TREE for those that are not to be loaded."""
        items = [self.entry(item, f"{prefix}{i}") for i, item in enumerate(live)]
        for i, item in enumerate(live):
            if items[i] is _ABSENT and (f"{prefix}{i}" in self.left_out or not self._may_want(f"{prefix}{i}", item)):
                items[i] = NO_TREE
        lacking = [i for i, item in enumerate(items) if item is _ABSENT]
        if all(item is NO_TREE for item in items):
            return self._leave_out(name)
        if all(item is _ABSENT or item is NO_TREE for item in items):
            return _ABSENT
        may_want = self._source.options.may_want
        found = [key for key in by_first(self.entries.below(prefix)) if self._in_unit or may_want(f"{prefix}{key}")]
        others = [key for key in found if not (is_index(key) and int(key) < len(items))]
        if lacking or others:
            more = f"has {prefix + others[0]!r} besides" if others else f"lacks {f'{prefix}{lacking[0]}'!r}"
            count = format_number(len(items), "item")
            text = f"the state has {count} here, and the source {more}: make the list as it was saved, or leave it out "
            text += "by exclude"
            raise InvalidArgumentError(text, name=name)
        return items


def _is_unit(live: Any) -> bool:
    """Whether a live value is loaded or left out whole.

    That is an object with a state, or what an optimizer's `state_dict` returns.
    """
    if is_leaf(live):
        return is_optimizer(live) or (is_stateful(live) and not is_module(live))
    return is_state_of_optimizer(live)


def _has_text_keys(value: Any) -> bool:
    """Whether a value is a mapping of texts that has some: its entries are looked up by their names."""
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(key, str) for key in value)
