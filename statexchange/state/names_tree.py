"""Build the tree of a state from the names of a source that has none: a torch checkpoint, or files of tensors alone."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, NotFoundError, UnsupportedError, type_text
from statexchange.sharding.options import LoadOptions
from statexchange.state.leaves import contains_state, is_leaf, is_stateful
from statexchange.state.load_plan import ObjectStates, SavedTensor, is_state_of_optimizer
from statexchange.state.megatron import leaves, sharded_kind
from statexchange.state.modules import is_module, live_items
from statexchange.state.optimizers import (
    hyperparameters,
    is_optimizer,
    labelled_parameters,
    named_parameters,
    optimizer_tree,
    parameters_of,
    state_of_optimizer,
)
from statexchange.state.state_dict import ParameterName, modules_of, parameter_names
from statexchange.state.tree import children, contains, walk
from statexchange.tensors import is_tensor, is_torch

__all__ = ["SourceNames", "tree_from_names"]

# States of an optimizer that have the shape of their parameter.
_OF_PARAMETERS_SHAPE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
}
_OF_FACTORED_SHAPE = {"row_var", "col_var"}  # Adafactor: 1 in the dim over which it is a mean


def _same(name: str) -> str:
    return name


@dataclass(slots=True)
class SourceNames:
    """What a source has, by the names of the state.

    Attributes:
        has: whether it has a tensor of a name.
        options: what the load wants.
        tensors: the names of the tensors.
        texts: plain values by name, as JSON text of `values`.
        opaque: descriptions, by name, of the entries that are neither.
        shape_of: returns the global shape of a tensor, by which numbered parameters are checked; None for no check.
        renamed: returns the state's name of one of the source.
        raw: the source's own names by those of the state, where they differ.
        leaves_out_empty: whether it has no entries for empty mappings.
        taken: the names of `texts` that the tree has, and all names of what the options leave out whole;
            `tree_from_names` adds them.
        left_out: the paths of what the options leave out whole; `tree_from_names` adds them.
        lacking: the paths of plain values inside mappings of such values that the source lacks; `tree_from_names` adds
            them.
    """

    has: Callable[[str], bool]
    options: LoadOptions = field(default_factory=LoadOptions)
    tensors: Collection[str] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    shape_of: Callable[[str], tuple[int, ...] | None] = lambda _: None
    renamed: Callable[[str], str] = _same
    raw: Mapping[str, str] = field(default_factory=dict)
    leaves_out_empty: bool = False
    taken: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    lacking: set[str] = field(default_factory=set)


def tree_from_names(state: Any, source: SourceNames, objects: ObjectStates) -> Any:
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
    known = parameter_names(modules_of(state))
    tree = _NamesTree(source, known, objects).entry(state, "")
    if tree is not _ABSENT:
        return tree
    if isinstance(state, Mapping):
        return {}
    if contains_state(state):
        raise NotFoundError("the source has nothing for the state")
    raise InvalidArgumentError(f"the state is {type_text(state)}: give modules, optimizers or mappings")


class _Entry:
    """An entry of the source, by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_ABSENT = object()  # where the source has nothing for the live state, or nothing that the load wants


class _NamesTree:
    """The names of a source in order, and each parameter's names in the state and in its module."""

    def __init__(self, source: SourceNames, parameters: Mapping[int, ParameterName], objects: ObjectStates) -> None:
        self._source = source
        self._parameters = parameters
        self._objects = objects
        self._known = {*source.tensors, *source.texts, *source.opaque}
        self._names = sorted(self._known)
        self._decoded: dict[str, Any] = {}
        self._in_unit = False
        self._others: dict[str, set[str]] = {}  # `_longer` of the mappings that are being entered

    def entry(self, value: Any, name: str) -> Any:
        """Return the tree of the live `value` called `name`, "" for the whole state; `_ABSENT` for nothing."""
        source = self._source
        prefix = f"{name}." if name else ""
        if is_tensor(value):
            return SavedTensor(name) if self._wants(name) and source.has(name) else _ABSENT
        kind = sharded_kind(value)
        if _is_unit(value):
            return self._unit(value, name, prefix)
        if kind in ("object", "local"):
            return _ABSENT
        if name and not self._may_want(name, value):
            return self._left_out(name)
        if kind is not None:
            return [SavedTensor(part.key) for _, part in leaves(value) if source.has(part.key)]
        if is_module(value):
            return self._module(value, prefix)
        if not contains_state(value):
            return self._plain(value, name, prefix)
        if name in source.texts or name in source.opaque:
            return self._value(name)
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            shared = [self._module(module, prefix) for module in value]
            return shared if any(shared) else [self._module(part, f"{prefix}{i}.") for i, part in enumerate(value)]
        return self._mapping(value, prefix)

    def _wants(self, name: str) -> bool:
        return self._in_unit or self._source.options.wants(name)

    def _may_want(self, name: str, value: Any) -> bool:
        """Whether the live `value`, or anything inside it, is to be loaded."""
        has_entries = children(value) is not None or (is_leaf(value) and not is_tensor(value))
        return self._wants(name) or (has_entries and self._source.options.may_want(name))

    def _module(self, module: Any, prefix: str) -> dict[str, Any]:
        live, rest = live_items(module)
        has = self._source.has
        tree: dict[str, Any] = {
            name: SavedTensor(prefix + name) for name in live if self._wants(prefix + name) and has(prefix + name)
        }
        for name, value in rest.items():  # extra state, which may be passed over if it is not understood
            if self._wants(prefix + name) and prefix + name not in self._source.opaque:
                item = self._whole(self.entry, value, prefix + name)
                if item is not _ABSENT:
                    tree[name] = item
        return tree

    def _mapping(self, live: Any, prefix: str) -> dict[Any, Any]:
        """Return the entries of a live mapping, namedtuple or dataclass, each by its own name."""
        items = live if isinstance(live, Mapping) else children(live) or {}
        names: dict[str, Any] = {}
        for key in items:
            name = f"{prefix}{key}"
            if names.setdefault(name, key) is not key:
                text = f"two keys of the mapping here look alike, {names[name]!r} and {key!r}: make both text"
                raise InvalidArgumentError(text, name=name)
        outer, self._others = self._others, {**self._others, **_longer(names, len(prefix))}
        tree = {}
        for name, (key, value) in zip(names, items.items(), strict=True):
            item = self.entry(value, name)
            if item is not _ABSENT:
                tree[key] = item
        self._others = outer
        return tree

    # Plain values

    def _plain(self, live: Any, name: str, prefix: str) -> Any:
        """Return a value without state: whole, or by entries of the source."""
        if name in self._known:
            return self._selected(self._value(name), name)
        if not _has_text_keys(live):
            entries = {
                rest: entry
                for rest, entry in self._entries(prefix).items()
                if self._wants(entry.name) or entry.name not in self._source.opaque
            }
            if any(self._wants(entry.name) for entry in entries.values()):
                return self._selected(self._container(entries, live, name), name)
            if entries or not self._wants(name):
                return self._left_out(name)
            return live if _has_no_leaves(live) else _ABSENT
        tree = self._mapping(live, prefix)
        lacking = {f"{prefix}{key}" for key in live if key not in tree} - self._source.left_out
        if not lacking and not tree:
            return self._left_out(name)
        if lacking and (not tree or self._in_unit):
            return _ABSENT
        self._source.lacking |= lacking
        return tree

    def _selected(self, saved: Any, name: str) -> Any:
        """Return a plain value without the entries of mappings that are not to be loaded; `_ABSENT` for nothing."""
        if self._in_unit:
            return saved
        if isinstance(saved, Mapping) and saved:
            items = {key: self._selected(item, f"{name}.{key}") for key, item in saved.items()}
            return {key: item for key, item in items.items() if item is not _ABSENT} or self._left_out(name)
        paths = [step.path for step in walk(saved, path=name)]
        return saved if self._source.options.wants_object(paths) else self._left_out(name)

    # Objects and lists, which are loaded or left out whole

    def _unit(self, live: Any, name: str, prefix: str) -> Any:
        """Return the tree of an object or a list that holds state; `_ABSENT` if it is not to be loaded."""
        options = self._source.options
        selects = (options.include or options.exclude) and not self._in_unit
        names = [entry.name for entry in self._entries(prefix).values()] if selects else []
        if selects and name and not options.may_want(name):
            return self._left_out(name, names)
        tree = self._whole(self._of_unit, live, name, prefix)
        if selects and tree is not _ABSENT:
            paths = {path for one in names for path in _outer(one, name)}
            paths.update(step.path for step in walk(tree, path=name))
            if not options.wants_object([*paths]):
                return self._left_out(name, names)
            self._source.taken.update(names)
        return tree

    def _whole(self, build: Callable[..., Any], *args: Any) -> Any:
        """Return what `build` returns if all that is inside is to be loaded."""
        outer, self._in_unit = self._in_unit, True
        tree = build(*args)
        self._in_unit = outer
        return tree

    def _left_out(self, path: str, names: Iterable[str] = ()) -> Any:
        self._source.taken.update(names)
        self._source.left_out.add(path)
        return _ABSENT

    def _of_unit(self, live: Any, name: str, prefix: str) -> Any:
        if name in self._source.texts or name in self._source.opaque:
            return self._value(name)
        if is_optimizer(live):
            more = self._mapping(state_of_optimizer(live, name)["more"], prefix)
            return {**self._optimizer(live, prefix), **more}
        if isinstance(live, list | tuple):
            return self._list(live, name, prefix)
        if isinstance(live, Mapping):
            return self._plain(live, name, prefix) if not contains_state(live) else self._mapping(live, prefix)
        return self._object(live, name, prefix)

    def _object(self, live: Any, name: str, prefix: str) -> Any:
        """Return the state of an object that has `load_state_dict`."""
        entries = self._entries(prefix)
        own = self._objects.of(live, name)
        if not name and not _by_first(entries).keys() & set(map(str, children(own) or {})):
            return _ABSENT
        if entries:
            return self._container(entries, own, name)
        return {} if children(own) == {} else _ABSENT

    def _list(self, live: Any, name: str, prefix: str) -> Any:
        items = [self.entry(item, f"{prefix}{i}") for i, item in enumerate(live)]
        lacking = [i for i, item in enumerate(items) if item is _ABSENT]
        if len(lacking) == len(items):
            return _ABSENT
        found = _by_first(self._entries(prefix)).keys()
        others = [key for key in found if not (key.isdecimal() and int(key) < len(items))]
        if lacking or others:
            more = f"has {others[0]!r} besides" if others else f"lacks item {lacking[0]}"
            text = f"the state has {len(items)} items here, and the source {more}: make the list as it was saved"
            raise InvalidArgumentError(text, name=name)
        return items

    # Entries whose names have a common beginning

    def _entries(self, prefix: str) -> dict[str, _Entry]:
        """Return what the source has under names that begin with `prefix`, by the rest of the name."""
        begin = end = bisect.bisect_left(self._names, prefix)
        while end < len(self._names) and self._names[end].startswith(prefix):
            end += 1
        names = self._names[begin:end]
        others = self._others.get(prefix.removesuffix("."))
        if others:
            names = [name for name in names if others.isdisjoint(_outer(name, prefix))]
        return {name[len(prefix) :]: _Entry(name) for name in names}

    def _container(self, entries: Mapping[str, _Entry], own: Any, name: str) -> Any:
        """Return the container that was saved as `entries`, by the keys of the live one `own` in the same place.

        The names do not show what it was: "a.0" may be an item of a list or an entry under a number, a text or a key
        with a dot. So the live container decides, and what it cannot decide is refused.
        """
        if isinstance(own, list | tuple):
            items = self._items(entries, own, name)
            if items is not None:
                return items if isinstance(own, list) else tuple(items)
        elif isinstance(own, Mapping):
            keys = {str(key): key for key in own}
            if len(keys) < len(own):
                raise InvalidArgumentError("two keys of the mapping here look alike: make both text", name=name)
            matched = _by_key(entries, keys)
            found_entries = {}
            for text, key in keys.items():
                if text in matched:
                    found_entries[key] = self._item(matched[text], own[key], f"{name}.{text}")
                elif self._may_be_empty(own[key], f"{name}.{text}"):
                    found_entries[key] = own[key]
            taken = {
                rest for text, below in matched.items() for rest in (f"{text}.{one}" if one else text for one in below)
            }
            others = {rest: entry for rest, entry in entries.items() if rest not in taken}
            if all(map(_is_text, others)):
                return found_entries | {rest: self._value(entry.name) for rest, entry in others.items()}
        example = next(iter(entries.values())).name
        raise InvalidArgumentError(
            f"the source has {len(entries)} entries here, as {example!r}, and the state has no container of "
            "the same keys to put them into: make it as it was saved (an optimizer has its containers once it has "
            "taken a step), or leave it out by exclude",
            name=name,
        )

    def _items(self, entries: Mapping[str, _Entry], own: Sequence[Any], name: str) -> list[Any] | None:
        """Return the items of a list whose live one is `own`; None if the entries are not those of a list."""
        by_index = _by_first(entries)
        if not all(index.isdecimal() and str(int(index)) == index for index in by_index):
            return None
        items: list[Any] = []
        for i in range(1 + max(map(int, by_index))) if len(by_index) > len(own) else range(len(own)):
            live = own[i] if i < len(own) else None
            if str(i) in by_index:
                items.append(self._item(by_index.pop(str(i)), live, f"{name}.{i}"))
            elif self._may_be_empty(live, f"{name}.{i}"):
                items.append(live)
            else:
                break
        return None if by_index else items

    def _may_be_empty(self, own: Any, name: str) -> bool:
        """Whether the source may have what the state has at `name`, although it has no entry there.

        Raise InvalidArgumentError if the source may have an empty mapping there, and the state has none.
        """
        if _has_no_leaves(own):
            return True
        if self._source.leaves_out_empty and contains(own, lambda part: isinstance(part, Mapping)):
            text = (
                "the source has nothing here, as torch leaves out empty mappings: empty that of the state, or leave it "
                "out by exclude"
            )
            raise InvalidArgumentError(text, name=name)
        return False

    def _item(self, entries: Mapping[str, _Entry], own: Any, name: str) -> Any:
        """Return an item of a container: a value, if its name ends here, or another container."""
        return self._value(entries[""].name) if [*entries] == [""] else self._container(entries, own, name)

    def _value(self, name: str) -> Any:
        if name in self._source.texts:
            self._source.taken.add(name)
            text = self._source.texts[name]
            if text[0] in "[{":
                return values.decode(text)
            if text not in self._decoded:  # flattened groups repeat the same few values for each parameter
                self._decoded[text] = values.decode(text)
            return self._decoded[text]
        if name in self._source.opaque:
            text = self._source.opaque[name]
            raise UnsupportedError(
                f"the source has something here that is neither a tensor nor a plain value: {text}. Load "
                "what holds it with the program that wrote it, and leave it out of the state here",
                name=name,
            )
        return SavedTensor(name)

    # Optimizers

    def _optimizer(self, optimizer: Any, prefix: str) -> Any:
        """Return an optimizer's tree with the parameters that the source has."""
        names = {key: name.in_state for key, name in self._parameters.items()}
        states, groups = self._entries(f"{prefix}state."), self._entries(f"{prefix}param_groups.")
        known = {  # by the names in their modules
            self._parameters[id(parameter)].in_module: parameter
            for parameter in parameters_of(optimizer)
            if id(parameter) in self._parameters
        }
        if self._is_numbered(states, groups, known):
            return self._numbered(optimizer, prefix, states, groups, named_parameters(optimizer, names))
        in_state_names = {in_module: names[id(parameter)] for in_module, parameter in known.items()}
        state = {
            in_state_names[owner]: self._container(
                entries, optimizer.state.get(known[owner], {}), f"{prefix}state.{owner}"
            )
            for owner, entries in _by_owner(states, known).items()
        }
        own_groups = {
            names[id(parameter)]: hyperparameters(group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        }
        own_empty = [hyperparameters(group) for group in optimizer.param_groups if not group["params"]]
        settings, empty = self._groups(prefix, groups, in_state_names, own_groups, own_empty)
        for group in optimizer_tree(optimizer, names, prefix[:-1])["param_groups"]:
            for in_state in group["params"]:
                if in_state in state:
                    settings.setdefault(in_state, group)
        names_by_group: dict[int, list[str]] = {}
        for name, group in settings.items():
            names_by_group.setdefault(id(group), []).append(name)
        joined = [{**settings[of_group[0]], "params": of_group} for of_group in names_by_group.values()]
        joined += [{**group, "params": []} for group in empty]
        return {"state": state, "param_groups": joined}

    def _is_numbered(self, states: Mapping[str, _Entry], groups: Mapping[str, _Entry], known: Collection[str]) -> bool:
        """Whether the source has parameters by number: as its groups list them, or if no name is a known one's."""
        for name, entry in groups.items():
            if _is_listing(name) and entry.name in self._source.texts:
                for parameter in values.decode(self._source.texts[entry.name]):
                    return not isinstance(parameter, str)
        return not _by_owner(states, known) and any(name.partition(".")[0].isdecimal() for name in states)

    def _groups(
        self,
        prefix: str,
        groups: Mapping[str, _Entry],
        in_state_names: Mapping[str, str],
        own_groups: Mapping[str, Mapping[str, Any]],
        own_empty: Sequence[Mapping[str, Any]],
    ) -> tuple[dict[str, dict[str, Any]], list[Mapping[str, Any]]]:
        """Return the hyperparameters of each parameter in the source, by its name in the state, and of empty groups.

        A torch checkpoint has them by the number of a group, which lists its ``params``, or flattened by parameter; it
        then has no empty groups, and the state's stay as they are.
        """
        if not any(map(_is_listing, groups)):
            return {
                in_state_names[owner]: self._container(
                    group, own_groups[in_state_names[owner]], f"{prefix}param_groups.{owner}"
                )
                for owner, group in _by_owner(groups, in_state_names).items()
            }, [*own_empty]
        found: dict[str, dict[str, Any]] = {}
        empty: list[Mapping[str, Any]] = []
        for number, group in _by_number(groups).items():
            params = self._value(group.pop("params").name) if "params" in group else []
            listed = [self._in_module(f"{prefix}param_groups.{number}.params", prefix, name) for name in params]
            of_state = [in_state_names[name] for name in listed if name in in_state_names]
            if of_state:
                settings = self._container(group, own_groups[of_state[0]], f"{prefix}param_groups.{number}")
                found |= dict.fromkeys(of_state, settings)
            elif not params and len(empty) < len(own_empty):
                empty.append(self._container(group, own_empty[len(empty)], f"{prefix}param_groups.{number}"))
        return found, empty

    def _in_module(self, listing: str, prefix: str, name: str) -> str:
        """Return the name in the state's module of a parameter that a group of the source lists."""
        raw = self._source.raw.get(listing, listing)
        example = f"{raw[: raw.rindex('param_groups.')]}state.{name}.step"
        new = self._source.renamed(example)
        return name if new == example else new.removeprefix(f"{prefix}state.").removesuffix(".step")

    def _numbered(
        self,
        optimizer: Any,
        prefix: str,
        states: Mapping[str, _Entry],
        groups: Mapping[str, _Entry],
        parameters: Mapping[str, Any],
    ) -> Any:
        """Return an optimizer's tree where the source numbers parameters.

        The parameters are those of these numbers in the order of the live param groups, or those of the names that the
        source's groups have for the numbers, if these are the live ones.
        """
        by_number = sorted(_by_number(groups).items(), key=lambda item: int(item[0]))
        params = [self._value(group.pop("params").name) if "params" in group else [] for _, group in by_number]
        numbers = [list(map(str, of_group)) for of_group in params]
        names = [self._value(group["param_names"].name) for _, group in by_number if "param_names" in group]
        labels = self._labels_by_name(optimizer, numbers, names, parameters)
        if labels is None:
            sizes, own_sizes = [[len(of_group) for of_group in one] for one in (numbers, _params_of(optimizer))]
            if sizes != own_sizes:
                text = (
                    f"the source has this optimizer's parameters by number, in param groups of {sizes}, and the "
                    f"state's groups have {own_sizes}: make the groups of the job that saved it, or leave the "
                    "optimizer out"
                )
                raise InvalidArgumentError(text, name=prefix.removesuffix("."))
            labels = dict(zip([number for of_group in numbers for number in of_group], parameters, strict=True))
        own_groups = [hyperparameters(group) for group in optimizer.param_groups]
        own_by_parameter = {
            id(parameter): own
            for own, of_group in zip(own_groups, _params_of(optimizer), strict=True)
            for parameter in of_group
        }
        named = []
        for position, (number, group) in enumerate(by_number):
            of_group = [labels[one] for one in numbers[position]]
            own_group = own_groups[position] if position < len(own_groups) else {}
            if of_group:
                own_group = own_by_parameter[id(parameters[of_group[0]])]
            settings = self._container(group, own_group, f"{prefix}param_groups.{number}") if group else {}
            named.append({**settings, "params": of_group})
        for rest, entry in states.items():
            number, _, key = rest.partition(".")
            if number in labels:
                self._check_numbered(entry.name, key, labels[number], parameters)
        state: dict[Any, Any] = {}
        for number, entries in _by_first(states).items():
            if number in labels:
                own = optimizer.state.get(parameters[labels[number]], {})
                state[labels[number]] = self._item(entries, own, f"{prefix}state.{number}")
            else:  # of the optimizer, not of a parameter
                shared = self._shared_key(optimizer, number, f"{prefix}state.{number}")
                state[shared] = self._item(entries, optimizer.state.get(shared, {}), f"{prefix}state.{number}")
        return {"state": state, "param_groups": named}

    def _labels_by_name(
        self,
        optimizer: Any,
        numbers: Sequence[Sequence[str]],
        names: Sequence[Sequence[str]],
        parameters: Mapping[str, Any],
    ) -> dict[str, str] | None:
        """Return labels of `parameters` by the numbers in a source that names them; None if it does not, or others."""
        flat_numbers = [number for of_group in numbers for number in of_group]
        flat_names = [name for of_group in names for name in of_group]
        if not flat_names:
            return None
        labels = {id(parameter): label for label, parameter in parameters.items()}
        of_modules = {
            self._parameters[key].in_module: label for key, label in labels.items() if key in self._parameters
        }
        of_groups = {name: labels[id(parameter)] for name, parameter in labelled_parameters(optimizer).items()}
        for known in (of_groups, of_modules):
            if len(flat_names) == len(flat_numbers) == len(known) and known.keys() == {*flat_names}:
                return {number: known[name] for number, name in zip(flat_numbers, flat_names, strict=True)}
        return None

    def _shared_key(self, optimizer: Any, text: str, name: str) -> Any:
        """Return the key of state that is no parameter's, by its text."""
        own = [key for key in optimizer.state if not is_torch(key) and str(key) == text]
        if len(own) == 1:
            return own[0]
        if own or not _is_text(text):
            raise InvalidArgumentError(
                "whether the key of this state was a text or something else is not known: give the state of the "
                "optimizer this key, or leave the optimizer out",
                name=name,
            )
        return text

    def _check_numbered(self, name: str, key: str, label: str, parameters: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError if a tensor does not fit the parameter of its number, as the order differs."""
        if key not in _OF_PARAMETERS_SHAPE | _OF_FACTORED_SHAPE or name not in self._source.tensors:
            return
        found = self._source.shape_of(name)
        expected = tuple(parameters[label].shape)
        if key in _OF_FACTORED_SHAPE and found is not None and len(found) == len(expected):
            expected = tuple(1 if one == 1 else size for one, size in zip(found, expected, strict=True))
        if found not in (None, expected):
            text = (
                f"the source has this optimizer's parameters by number, and this one does not fit {label!r}: give the "
                "optimizer the parameters in the order of the job that saved it, or leave it out of the state"
            )
            raise InvalidArgumentError(text, name=name, expected=expected, found=found)


def _is_unit(live: Any) -> bool:
    """Whether a live value is loaded or left out whole.

    That is an object with a state, what an optimizer's `state_dict` returns, or a list that holds state.
    """
    if isinstance(live, Mapping):
        return is_state_of_optimizer(live)
    if is_leaf(live):
        return is_optimizer(live) or (is_stateful(live) and not is_module(live))
    if isinstance(live, list | tuple) and not hasattr(live, "_fields"):
        return contains_state(live) and not all(is_module(part) for part in live)
    return False


def _longer(names: Iterable[str], start: int) -> dict[str, set[str]]:
    """Return, for a name of a mapping's entry, the other names that seem to be inside it: "a.b" for "a".

    `start` is the number of characters that are the mapping's own name.
    """
    known = {*names}
    found: dict[str, set[str]] = {}
    for name in known:
        end = name.rfind(".", start)
        while end > start:
            if name[:end] in known:
                found.setdefault(name[:end], set()).add(name)
            end = name.rfind(".", start, end)
    return found


def _outer(name: str, prefix: str) -> list[str]:
    """Return a name and all its beginnings, at dots, that are longer than `prefix`, and `prefix`."""
    found = [prefix]
    end = len(prefix)
    while (end := name.find(".", end + 1)) >= 0:
        found.append(name[:end])
    return [*found, name]


def _is_listing(name: str) -> bool:
    """Whether a name after ``param_groups.`` is that of a numbered group's parameters."""
    number, _, key = name.partition(".")
    return number.isdecimal() and key == "params"


def _by_owner(entries: Mapping[str, _Entry], owners: Collection[str]) -> dict[str, dict[str, _Entry]]:
    """Group entries by the owner whose name begins theirs, the longest of several."""
    found: dict[str, dict[str, _Entry]] = {}
    for name, entry in entries.items():
        owner = name.rpartition(".")[0]
        while owner and owner not in owners:
            owner = owner.rpartition(".")[0]
        if owner:
            found.setdefault(owner, {})[name[len(owner) + 1 :]] = entry
    return found


def _has_text_keys(value: Any) -> bool:
    """Whether a value is a mapping of texts that has some: its entries are looked up by their names."""
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(key, str) for key in value)


def _has_no_leaves(value: Any) -> bool:
    """Whether a value is an empty mapping, or holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(_has_no_leaves, value.values()))
    return isinstance(value, list) and len(value) > 0 and all(map(_has_no_leaves, value))


def _is_text(key: str) -> bool:
    """Whether a key in a name was a text, and no number, None or True, or several keys with dots between them."""
    return key.isidentifier() and key not in ("True", "False", "None", "inf", "nan")


def _params_of(optimizer: Any) -> list[list[Any]]:
    """Return the parameters of each group."""
    return [list(group["params"]) for group in optimizer.param_groups]


def _by_key(entries: Mapping[str, _Entry], keys: Collection[str]) -> dict[str, dict[str, _Entry]]:
    """Group entries by the key that begins their names, the longest of several; the rest of a name may be ""."""
    found: dict[str, dict[str, _Entry]] = {}
    for name, entry in entries.items():
        key = name
        while key not in keys and "." in key:
            key = key.rpartition(".")[0]
        if key in keys:
            found.setdefault(key, {})[name[len(key) + 1 :]] = entry
    return {key: found[key] for key in keys if key in found}


def _by_first(entries: Mapping[str, _Entry]) -> dict[str, dict[str, _Entry]]:
    """Group entries by the first part of their names; the rest of a name may be ""."""
    found: dict[str, dict[str, _Entry]] = {}
    for name, entry in entries.items():
        first, _, rest = name.partition(".")
        found.setdefault(first, {})[rest] = entry
    return found


def _by_number(groups: Mapping[str, _Entry]) -> dict[str, dict[str, _Entry]]:
    """Group entries of numbered param groups by the number."""
    return {number: group for number, group in _by_first(groups).items() if number.isdecimal()}
