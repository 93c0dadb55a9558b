"""The saved tree of a checkpoint under the names of the live state, and what the options of a load leave of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange import values
from statexchange.errors import CorruptError, InvalidArgumentError, ReplicaError, UnsafeError
from statexchange.exchange.catalog import Catalog, differing_text
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.rules import with_dots
from statexchange.state.containers import children, is_dataclass, other_with
from statexchange.state.leaves import contains_state, is_leaf, is_per_rank, is_stateful
from statexchange.state.load_plan import NO_TREE, ObjectStates, live_paths, live_types
from statexchange.state.merged_trees import Conflicts, SavedTensor, UnknownValue, merge_trees, with_other_entries
from statexchange.state.modules import is_module
from statexchange.state.optimizers import is_optimizer, is_state_of_optimizer
from statexchange.state.source_names import names_above
from statexchange.state.state_dict import parameter_names
from statexchange.state.tree import WalkStep, entry_path, walk
from statexchange.storage.stored_values import decode_stored
from statexchange.units import format_number

__all__ = ["LivePlaces", "SavedTree", "check_ranks", "check_unions"]

_MOST_NAMES = 3  # that a message lists


@dataclass(frozen=True, slots=True)
class SavedTree:
    """The saved tree under the state's names.

    Attributes:
        tree: what any rank has saved; NO_TREE if the state is one object, which is not to be loaded.
        rank_tree: what plain values are taken from: what this rank saved, or the lowest; NO_TREE if ranks agree.
        unions: lists of param groups that differ between ranks.
        left_out: the paths that the options leave out.
        lacking: the paths in mappings of plain values that `include` selects, and the save does not have.
        places: those of the live state.
        optimizers: the classes of optimizers that ranks have saved, by path with dots before indices.
    """

    tree: Any
    rank_tree: Any
    unions: Conflicts
    left_out: frozenset[str]
    lacking: frozenset[str]
    places: LivePlaces
    optimizers: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, state: Any, catalog: Catalog, objects: ObjectStates) -> SavedTree | None:
        """Return the tree; None if the source has none, or one that refers to none of its tensors.

        Raises:
            ReplicaError: ranks saved different values that are to be equal, or what belongs to a rank was saved by
                another number of ranks.
            UnsafeError: `rename` gives two entries one name, or a name of which the keys are not known.
        """
        if not catalog.source.configs:
            return None
        configs = sorted(catalog.source.configs.items(), key=lambda item: (item[0] != catalog.own_rank, item[0]))
        ranks: dict[str, int] = {}  # the first rank with each text
        for rank, text in configs:
            ranks.setdefault(text, rank)
        kept: list[str] = []
        unknown: list[UnknownValue] = []
        places = LivePlaces.of(state)
        renaming = _Renaming(catalog, places)
        trees = _decoded_trees(catalog, ranks, values.types_of(state), renaming, kept, unknown)
        selection = _Selection(state, catalog.options, places, objects)
        # Objects may know the types inside their states. To ask one for its state may have effects, so that only those
        # that are loaded are asked, and only for a type that is not known yet.
        if unknown:
            wanted = selection.of(merge_trees(trees).tree)
            types = live_types(state, objects, _paths_of(wanted) | {""})
            trees = _decoded_trees(catalog, ranks, {**types, **values.types_of(state)}, renaming, kept, unknown)
        if not kept and len(catalog) > 0:
            return None  # no saved state, but a config that was stored beside the tensors
        for rule in catalog.layout.rules.values():
            if rule.renames:
                raise InvalidArgumentError(
                    f"layout rule for {rule.pattern!r} renames tensors, and this source was saved with the names that "
                    "the state has: leave it out",
                    path=catalog.source.path,
                )
        merged = merge_trees(trees)
        tree = selection.of(merged.tree)
        if catalog.own_rank is None and (catalog.source.per_rank or places.per_rank):
            recorded = map(renaming.new_path, catalog.source.per_rank)
            check_ranks({*recorded, *places.per_rank}, _names_of(tree), catalog)
        _check_values(tree, catalog, merged.conflicts)
        selects = catalog.options.include or catalog.options.exclude
        saved = _paths_of(merged.tree) if selects else set()
        left_out = frozenset(saved - _paths_of(tree) if selects else ())
        lacking = frozenset(places.lacking(saved, catalog.options))
        classes = {renaming.new_path(path): names for path, names in catalog.source.optimizers.items()}
        first = next(iter(trees.values()))
        if catalog.own_rank is None and catalog.options.replicas == "root":
            first = with_other_entries(first, merged.tree)
        elif catalog.own_rank is None or len(trees) == 1:
            return cls(tree, NO_TREE, merged.unions, left_out, lacking, places, classes)
        rank_tree = selection.restricted(first, tree) if selects else first
        unions = {} if catalog.options.replicas == "root" else merged.unions
        return cls(tree, rank_tree, unions, left_out, lacking, places, classes)


def _decoded_trees(
    catalog: Catalog,
    ranks: Mapping[str, int],
    types: Mapping[str, type],
    renaming: _Renaming,
    kept: list[str],
    unknown: list[UnknownValue],
) -> dict[int, Any]:
    """Return the trees that ranks saved, under the state's names.

    Add the names of tensors and the values of unknown types to the lists.
    """
    leaf, path, budget = _leaf_reader(kept, catalog), catalog.source.path, catalog.source.budget

    def placeholder(type_name: str, text: str, problem: str) -> UnknownValue:
        unknown.append(UnknownValue(type_name, text, problem))
        return unknown[-1]

    found = {}
    for text, rank in ranks.items():
        tree = decode_stored(text, path, budget, types=types, leaf=leaf, unknown=placeholder)
        found[rank] = renaming.of(tree)
    return found


def _leaf_reader(kept: list[str], catalog: Catalog) -> Callable[[str], SavedTensor]:
    """Return a leaf decoder that adds tensor names to `kept`; CorruptError for a tensor that no file has."""

    def leaf(name: str) -> SavedTensor:
        kept.append(name)
        new = catalog.new_name(name)
        if new not in catalog:
            text = "the saved state has this tensor, but no file has it"
            raise CorruptError(text, name=name, path=catalog.source.path)
        return SavedTensor(new)

    return leaf


# The live state


@dataclass(frozen=True, slots=True)
class LivePlaces:
    """The containers of a live state, and what in it is loaded whole, by dotted path.

    `containers` are modules, mappings, and other containers that hold state; `units` are objects with a state of their
    own, such as optimizers and schedulers; `leaves` are all other values. `per_rank` are those, with dots before
    indices, whose state belongs to a rank. `alike` are paths of two places, as of the keys 1 and "1".
    """

    containers: dict[str, WalkStep] = field(default_factory=dict)
    units: dict[str, WalkStep] = field(default_factory=dict)
    leaves: dict[str, Any] = field(default_factory=dict)
    per_rank: set[str] = field(default_factory=set)
    alike: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, state: Any) -> LivePlaces:
        """Find the places of a state."""
        places = cls()
        seen: set[str] = set()
        for step in walk(state, lambda _, value: _is_entered(value)):
            if step.path in seen:
                places.alike.add(step.path)
            seen.add(step.path)
            if is_per_rank(step.value):
                places.per_rank.add(with_dots(step.path))
            if not step.is_leaf or is_module(step.value):
                places.containers[step.path] = step
            elif is_optimizer(step.value) or is_stateful(step.value):
                places.units[step.path] = step
            else:
                places.leaves[step.path] = step.value
        return places

    def may_want(self, path: str, options: LoadOptions) -> bool:
        """Whether the entry at a path of the state, or anything inside it, is to be loaded."""
        if path in self.containers:
            return options.may_want(path)
        unit = next((one for one in self.units if _is_in(path, one)), None)
        return options.wants(path) if unit is None else options.may_want(unit)

    def lacking(self, saved: Collection[str], options: LoadOptions) -> Iterator[str]:
        """Yield the paths of plain values in mappings that were saved without them, if `include` selects them.

        Without `include` a mapping becomes what was saved, and loses other entries.
        """
        for path, step in self.containers.items() if options.include else ():
            if path not in saved or not isinstance(step.value, Mapping) or contains_state(step.value):
                continue
            for key, item in step.value.items():
                inner = f"{path}.{key}"
                if inner not in saved and options.wants(inner) and not (isinstance(item, Mapping) and not item):
                    yield inner


def _is_entered(value: Any) -> bool:
    """Whether what is in a live value is loaded or left by itself."""
    if is_leaf(value):
        return False
    return isinstance(value, Mapping) or (children(value) is not None and contains_state(value))


def _is_in(path: str, outer: str) -> bool:
    """Whether `path` is `outer` or a path inside it."""
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}["))


# Options


class _Renaming:
    """Moves the entries of saved trees to the paths that `rename` gives them."""

    def __init__(self, catalog: Catalog, places: LivePlaces) -> None:
        self._catalog = catalog
        self._places = places
        self._own_keys: dict[str, dict[str, Any]] = {}  # of mappings of the live state, by text
        self._holds_state: dict[str, bool] = {}  # whether a mapping of the live state does

    def of(self, saved: Any) -> Any:
        """Return a saved tree under the state's names; the parameters in an optimizer's state are renamed, too."""
        catalog, units = self._catalog, self._places.units
        if not catalog.options.rename or not isinstance(saved, Mapping):
            return saved
        if "" in units:
            return self._with_new_parameters(saved)
        moved: dict[Any, Any] = {}
        old_paths: dict[str, str] = {}

        def enters(path: str, value: Any) -> bool:
            is_mapping = isinstance(value, Mapping) and bool(value) and not is_state_of_optimizer(value)
            return value is saved or (is_mapping and self.new_path(path) not in units)

        for unit in walk(saved, enters):
            if not unit.is_leaf:
                continue
            new = self.new_path(unit.path)
            *outer_keys, last_key = unit.keys if new == unit.path else self._keys_of(new, unit.keys)
            target: Any = moved
            for key in outer_keys:
                target = target.setdefault(key, {}) if isinstance(target, dict) else None
            first = old_paths.setdefault(new, unit.path)
            if not isinstance(target, dict) or last_key in target:
                text = f"rename gives one name to both {first!r} and {unit.path!r}"
                if first == unit.path:
                    text = f"rename moves {unit.path!r} to the place of another entry of the source, or into it"
                raise UnsafeError(f"{text}: change rename", name=new, path=catalog.source.path)
            target[last_key] = self._with_new_parameters(unit.value)
        return moved

    def new_path(self, path: str) -> str:
        """Return the new path of an entry, also if a pattern for what is inside it moves it: ``^opt\\.``."""
        new = self._catalog.new_name(path)
        if callable(self._catalog.options.rename):  # which expects whole names
            return new
        inside = self._catalog.new_name(f"{path}.")
        return inside[:-1] if new == path and inside.endswith(".") else new

    def _keys_of(self, path: str, old_keys: Sequence[Any]) -> list[Any]:
        """Return the keys that lead to a path that `rename` returned.

        The innermost mapping or module of the live state that contains the path gives the first keys. The rest is

        1. one key, if that is a module or has such a key;
        2. or as many of the old keys as the path still ends with, so that what moves with its mapping keeps its keys,
           and before them the text that remains, if any, as one key.
        """
        alike = self._places.alike.intersection(names_above(path, ""))
        if alike:
            text = "rename moves an entry of the source to a path that two keys of the state have: make both text"
            raise UnsafeError(text, name=min(alike), path=self._catalog.source.path)
        within = self._innermost(path)
        rest = _rest(path, within)
        if is_module(within.value):
            return [*within.keys, rest]
        if within.path not in self._own_keys:
            self._own_keys[within.path] = {str(key): key for key in within.value}
        if rest in self._own_keys[within.path]:
            return [*within.keys, self._own_keys[within.path][rest]]
        head, kept = path, ()
        for count in range(len(old_keys), 0, -1):
            tail = ".".join(map(str, old_keys[-count:]))
            if path == tail or path.endswith(f".{tail}"):
                head, kept = path.removesuffix(tail).removesuffix("."), tuple(old_keys[-count:])
                break
        place = self._places.containers.get(head) or self._places.units.get(head)
        if kept and (place is not None or not head):
            return [*(() if place is None else place.keys), *kept]
        within = self._innermost(head)
        rest = _rest(head, within)
        if within.path not in self._holds_state:
            self._holds_state[within.path] = contains_state(within.value)
        # Elsewhere a wrong key is found: the names of what holds state, and those of a whole state, are compared.
        if "." in rest and not self._holds_state[within.path] and (within.path or not within.value):
            text = (
                f"rename moves {'.'.join(map(str, old_keys))!r} into a mapping that the state does not have, so that "
                "the keys that lead there are not known: make this mapping in the state, or change rename"
            )
            raise UnsafeError(text, name=path, path=self._catalog.source.path)
        return [*within.keys, rest, *kept]

    def _innermost(self, path: str) -> WalkStep:
        """Return the innermost mapping or module of the live state that contains a path, or else an empty one."""
        while path:
            path = path.rpartition(".")[0]
            step = self._places.containers.get(path)
            if step is not None and (isinstance(step.value, Mapping) or is_module(step.value)):
                return step
        return WalkStep("", (), {}, is_leaf=False)

    def _with_new_parameters(self, saved: Any) -> Any:
        """Return an optimizer's saved state with its parameters renamed; all else, as parameters' numbers, stays."""
        if not is_state_of_optimizer(saved):
            return saved
        listed = {key for group in saved["param_groups"] for key in group["params"]}

        def new_key(key: Any) -> Any:
            is_name = isinstance(key, str) and key in listed and not key.isdecimal()
            return self._catalog.new_name(key) if is_name else key

        groups = [{**group, "params": [new_key(key) for key in group["params"]]} for group in saved["param_groups"]]
        state = {new_key(key): entry for key, entry in saved["state"].items()}
        return {**saved, "state": state, "param_groups": groups}


def _rest(path: str, within: WalkStep) -> str:
    return path[len(within.path) + 1 :] if within.path else path


class _Selection:
    """The part of a saved tree that `include` and `exclude` select.

    Mappings are loaded by entry, dataclasses and namedtuples by field, and lists of the live state that hold state by
    item. All else is loaded or left whole, by the paths that it has in the saved tree and in the live state: a load of
    an object with an excluded entry would remove that entry if it was not saved.
    """

    def __init__(self, state: Any, options: LoadOptions, places: LivePlaces, objects: ObjectStates) -> None:
        self._options = options
        self._places = places
        self._objects = objects
        self._names: dict[int, str] = {}
        if options.include or options.exclude:
            self._names = {key: name.in_state for key, name in parameter_names(state).items()}

    def of(self, saved: Any, path: str = "") -> Any:
        """Return what is selected of the saved tree at `path`; NO_TREE if that is nothing."""
        if not (self._options.include or self._options.exclude):
            return saved
        live = self._places.containers.get(path)
        is_mapping = isinstance(saved, Mapping) and bool(saved or not path) and not is_state_of_optimizer(saved)
        if is_mapping and path not in self._places.units:
            entries = {key: self.of(item, entry_path(path, key)) for key, item in saved.items()}
            selected = {key: item for key, item in entries.items() if item is not NO_TREE}
            return selected if selected or not path else NO_TREE
        if isinstance(saved, tuple) and hasattr(saved, "_fields") and live is not None:
            return self.of(children(saved), path)
        if isinstance(saved, list | tuple) and live is not None and isinstance(live.value, list | tuple):
            return self._items(saved, len(live.value), path)
        if self._has_fields(saved, path):
            return self._fields(saved, path)
        return saved if self._wants(saved, path) else NO_TREE

    def _has_fields(self, saved: Any, path: str) -> bool:
        """Whether this is a dataclass or namedtuple of plain values, as the live one there."""
        is_alike = type(saved) is type(self._places.leaves.get(path))
        return is_alike and (is_dataclass(saved) or hasattr(saved, "_fields"))

    def _fields(self, saved: Any, path: str) -> Any:
        """Return a dataclass or namedtuple of plain values with the live values of the fields that are not selected."""
        fields, own = children(saved) or {}, children(self._places.leaves[path]) or {}
        kept = {name: own[name] for name, value in fields.items() if not self._wants(value, entry_path(path, name))}
        return NO_TREE if len(kept) == len(fields) else other_with(saved, kept)

    def restricted(self, one: Any, selected: Any, path: str = "") -> Any:
        """Return the tree of one rank without what was left out of `selected`, the tree of all ranks."""
        if isinstance(one, dict) and isinstance(selected, dict):
            return {
                key: self.restricted(item, selected[key], entry_path(path, key))
                for key, item in one.items()
                if key in selected
            }
        if isinstance(one, list | tuple) and type(selected) is list:
            pairs = enumerate(zip(one, selected, strict=False))
            return [self.restricted(item, other, f"{path}[{i}]") for i, (item, other) in pairs]
        return self._fields(one, path) if self._has_fields(one, path) else one

    def _items(self, saved: Sequence[Any], length: int, path: str) -> Any:
        """Return the selected items of a list that has `length` items in the live state, NO_TREE for the others.

        What lengths differ by may be left out; else the load refuses the list.
        """
        items = [self.of(item, f"{path}[{i}]") for i, item in enumerate(saved)]
        if all(item is NO_TREE for item in items):
            return NO_TREE
        while len(items) > length and items[-1] is NO_TREE:
            items.pop()
        while len(items) < length and not self._places.may_want(f"{path}[{len(items)}]", self._options):
            items.append(NO_TREE)
        return items

    def _wants(self, saved: Any, path: str) -> bool:
        places = self._places
        if path in places.units and path and not self._options.may_want(path):
            return False  # without asking the object for its state
        paths = [step.path for step in walk(saved, path=path)]
        if path in places.units:
            paths += live_paths(places.units[path].value, path, self._names, self._objects)
        elif path in places.containers:
            paths += [step.path for step in walk(places.containers[path].value, path=path)]
        elif path in places.leaves:
            paths += [step.path for step in walk(places.leaves[path], path=path)]
        return self._options.wants_object(paths)


def _paths_of(saved: Any) -> set[str]:
    """Return the paths of all entries of nested mappings and lists."""
    return {
        step.path
        for step in walk(saved, lambda _, value: isinstance(value, Mapping | list | tuple))
        if step.keys and step.value is not NO_TREE
    }


def _names_of(saved: Any) -> Iterator[str]:
    """Yield the paths of all entries of a saved tree, with dots before indices; of tensors the names."""
    for step in walk(saved):
        if isinstance(step.value, SavedTensor):
            yield with_dots(step.value.name)  # the path of an optimizer's state may have another, renamed parameter
        elif step.value is not NO_TREE:
            yield with_dots(step.path)


# Values that differ between ranks


def _check_values(saved: Any, catalog: Catalog, conflicts: Conflicts) -> None:
    """Raise ReplicaError for values in the saved tree that ranks saved differently, if they are to be equal.

    Args:
        saved: the tree under the state's names, without what is not loaded.
        catalog: has the source, and the options of the load.
        conflicts: two ranks that saved different values, by the keys of the state that lead there.
    """
    if catalog.own_rank is not None or catalog.options.replicas == "root" or not conflicts:
        return
    loaded = {"", *map(with_dots, _paths_of(saved))}
    names = {".".join(map(str, keys)): ranks for keys, ranks in conflicts.items()}
    found = [name for name in names if with_dots(name) in loaded]
    if found:
        rank, other = names[found[0]]
        others = ""
        if len(found) > 1:
            others = " and 1 other entry" if len(found) == 2 else f" and {len(found) - 1} other entries"
        what = f"different values of {found[0]!r}{others}" if found[0] else "different states"
        text = differing_text(what, _excluding(found), rank, other)
        raise ReplicaError(text, rank=other, path=catalog.source.path)


def check_unions(plain: Collection[str], differing: Collection[str], catalog: Catalog, unions: Conflicts) -> None:
    """Raise ReplicaError for lists of param groups that are not to be joined, if ranks saved different ones.

    Args:
        plain: the paths of the plain values that are loaded, and whose lists are to be equal.
        differing: the paths of the groups of optimizers that have different values for one parameter.
        catalog: has the source, and the options of the load.
        unions: two ranks that saved different lists, by the keys of the state that lead there.
    """
    loaded = {with_dots(path) for path in (*plain, *differing)}
    for keys, (rank, other) in unions.items():
        name = ".".join(map(str, keys))
        steps = with_dots(name).split(".")
        if any(".".join(steps[:count]) in loaded for count in range(1, len(steps) + 1)):
            text = differing_text(f"different values of {name!r}", name, rank, other)
            raise ReplicaError(text, rank=other, path=catalog.source.path)


def check_ranks(per_rank: Iterable[str], loaded: Iterable[str], catalog: Catalog) -> None:
    """Raise ReplicaError if what belongs to a rank is loaded, on another number of ranks than have saved it.

    It is refused even if it is equal on all ranks: ranks with one random state draw the same numbers, and a position in
    one rank's part of the data repeats or skips samples in another. With ``replicas="root"`` the state of an object is
    loaded nevertheless, but not that of a part of a parameter, which fits no other part.

    Args:
        per_rank: the paths of what belongs to a rank.
        loaded: the names of tensors, and the paths of all else that is loaded, with dots before indices.
        catalog: has the source, and the options of the load.
    """
    names = {*loaded}.intersection(per_rank)
    if catalog.options.replicas == "root":
        names &= {*map(with_dots, catalog)}  # of tensors: these are parts of parameters
    if names:
        name, ranks = min(names), catalog.source.world_size or 1
        leave = f": pass exclude={name!r} to leave it as it is on each rank" if name else ""
        raise ReplicaError(
            f"{name or 'the state'!r} belongs to a rank, and fits the same number of ranks only: "
            f"{format_number(ranks, 'rank')} saved it, and the world size is {catalog.world_size} now{leave}",
            name=name or None,
            path=catalog.source.path,
        )


def _excluding(names: Sequence[str]) -> str | list[str]:
    """Return what to pass as `exclude`: a few names, or patterns for the entries of the state that hold many."""
    while len(names) > _MOST_NAMES:
        paths = [name.removesuffix(".*") for name in names]
        outer = sorted({f"{path.rpartition('.')[0] or path}.*" for path in paths})
        if len(outer) == len(names):
            break
        names = outer
    return names[0] if len(names) == 1 else list(names)
