"""The state of an optimizer from the names of a source: by its parameters' names, or by their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from statexchange.errors import CorruptError, InvalidArgumentError, type_text
from statexchange.state.merged_trees import SavedTensor
from statexchange.state.numbered_parameters import FoundState, NumberedParameters, check_fit
from statexchange.state.optimizers import hyperparameters, named_parameters, optimizer_tree, parameters_of
from statexchange.state.source_names import Entries, SourceNames, by_first, by_number, is_index, is_text
from statexchange.state.state_dict import ParameterName
from statexchange.tensors import is_torch

__all__ = ["OptimizerNames"]


class OptimizerNames:
    """Builds optimizers' trees; `parameters` has each parameter's names, in the state and in its module, by its id."""

    def __init__(self, source: SourceNames, entries: Entries, parameters: Mapping[int, ParameterName]) -> None:
        self._source = source
        self._entries = entries
        self._parameters = parameters
        self.ungrouped: set[str] = set()  # the paths of optimizers whose groups are not in the source's order

    def tree(self, optimizer: Any, prefix: str) -> Any:
        """Return an optimizer's tree with the parameters that the source has."""
        names = {key: name.in_state for key, name in self._parameters.items()}
        states, groups = self._entries.below(f"{prefix}state."), self._entries.below(f"{prefix}param_groups.")
        known: dict[str, Any] = {}  # by the names in their modules
        twice: set[str] = set()
        for parameter in parameters_of(optimizer):
            if id(parameter) in self._parameters:
                for _, name in self._parameters[id(parameter)].in_modules:
                    if known.setdefault(name, parameter) is not parameter:
                        twice.add(name)
        if self._is_numbered(states, groups, known):
            return self._numbered(optimizer, prefix, states, groups, named_parameters(optimizer, names))
        used = {*_by_owner(states, known), *self._listed_names(prefix, groups), *_by_owner(groups, known)}
        if not twice.isdisjoint(used):
            raise InvalidArgumentError(
                "the source has this optimizer's parameters by name, and two of the state's are called "
                f"{min(twice & used)!r} in their modules: save the optimizer's own state_dict(), or leave the "
                "optimizer out by exclude",
                name=prefix.removesuffix("."),
            )
        in_state_names = {name: names[id(parameter)] for name, parameter in known.items()}
        state = {
            in_state_names[owner]: self._entries.container(
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
        if empty or not any(map(_is_listing, groups)) or len(joined) != len(by_number(groups)):
            self.ungrouped.add(prefix.removesuffix("."))
        return {"state": state, "param_groups": joined}

    def _is_numbered(self, states: Mapping[str, str], groups: Mapping[str, str], known: Collection[str]) -> bool:
        """Whether the source has parameters by number: as its groups list them, or if no name is a known one's."""
        for name, entry in groups.items():
            if _is_listing(name) and entry in self._source.texts:
                for parameter in self._listed(entry):
                    return not isinstance(parameter, str)
        return not _by_owner(states, known) and any(is_index(name.partition(".")[0]) for name in states)

    def _groups(
        self,
        prefix: str,
        groups: Mapping[str, str],
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
                in_state_names[owner]: self._entries.container(
                    group, own_groups[in_state_names[owner]], f"{prefix}param_groups.{owner}"
                )
                for owner, group in _by_owner(groups, in_state_names).items()
            }, [*own_empty]
        found: dict[str, dict[str, Any]] = {}
        empty: list[Mapping[str, Any]] = []
        for number, group in by_number(groups).items():
            params = self._listed(group.pop("params")) if "params" in group else []
            listed = self._names_of(number, params, prefix)
            of_state = [in_state_names[name] for name in listed if name in in_state_names]
            if of_state:
                settings = self._entries.container(group, own_groups[of_state[0]], f"{prefix}param_groups.{number}")
                found |= dict.fromkeys(of_state, settings)
            elif not params and len(empty) < len(own_empty):
                empty.append(self._entries.container(group, own_empty[len(empty)], f"{prefix}param_groups.{number}"))
        return found, empty

    def _listed_names(self, prefix: str, groups: Mapping[str, str]) -> set[str]:
        """Return the names of all parameters that groups of the source list."""
        listing = {number: group["params"] for number, group in by_number(groups).items() if "params" in group}
        return {
            name for number, entry in listing.items() for name in self._names_of(number, self._listed(entry), prefix)
        }

    def _names_of(self, number: str, listed: Iterable[str], prefix: str) -> list[str]:
        """Return the names in the state's modules of the parameters that a group of the source lists."""
        return [self._in_module(f"{prefix}param_groups.{number}.params", prefix, name) for name in listed]

    def _in_module(self, listing: str, prefix: str, name: str) -> str:
        """Return the name in the state's module of a parameter that a group of the source lists."""
        # `rename` is given whole names: a listed one is renamed as a part of the name of its state.
        before, found, _ = self._source.old_names.get(listing, listing).rpartition("param_groups.")
        example = f"{before}state.{name}.step"
        new = self._source.renamed(example)
        is_same = not found or new == example
        return name if is_same else new.removeprefix(f"{prefix}state.").removesuffix(".step")

    def _listed(self, entry: str, kind: str = "parameters", types: tuple[type, ...] = (int, str)) -> list[Any]:
        """Return the parameters, by number or name, or the names that a group lists; raise CorruptError for else."""
        found = self._entries.value(entry)
        if isinstance(found, tuple) or (found is None and kind == "names"):
            found = list(found or ())
        if not isinstance(found, list) or not all(isinstance(one, types) for one in found):
            what = "a tensor" if isinstance(found, SavedTensor) else type_text(found)
            text = (
                f"the param group lists no {kind} here, but has {what}: save what the optimizer's "
                "state_dict() returns, or leave the optimizer out by exclude"
            )
            raise CorruptError(text, name=entry)
        return found

    def _numbered(
        self,
        optimizer: Any,
        prefix: str,
        states: Mapping[str, str],
        groups: Mapping[str, str],
        parameters: Mapping[str, Any],
    ) -> Any:
        """Return an optimizer's tree where the source numbers parameters.

        The parameters are those of these numbers in the order of the live param groups, or those of the names that the
        source's groups have for the numbers, if these are the live ones.
        """
        numbered_groups = by_number(groups).items()
        params = [self._listed(group.pop("params")) if "params" in group else [] for _, group in numbered_groups]
        numbers = [list(map(str, of_group)) for of_group in params]
        names = [
            self._listed(group["param_names"], "names", (str,))
            for _, group in numbered_groups
            if "param_names" in group
        ]
        flat_names = [name for of_group in names for name in of_group]
        numbered = NumberedParameters(numbers, flat_names, self._source.old_names, prefix.removesuffix("."))
        labels = numbered.labels(optimizer, parameters, self._parameters)
        own_groups = [hyperparameters(group) for group in optimizer.param_groups]
        own_by_parameter = {
            id(parameter): own
            for own, of_group in zip(own_groups, _params_of(optimizer), strict=True)
            for parameter in of_group
        }
        named = []
        for position, (number, group) in enumerate(numbered_groups):
            of_group = [labels[one] for one in numbers[position]]
            own_group = own_groups[position] if position < len(own_groups) else {}
            if of_group:
                own_group = own_by_parameter[id(parameters[of_group[0]])]
            settings = self._entries.container(group, own_group, f"{prefix}param_groups.{number}") if group else {}
            named.append({**settings, "params": of_group})
        found = []
        for rest, entry in states.items():
            number, _, key = rest.partition(".")
            shape = self._source.shape_of(entry) if number in labels and entry in self._source.tensors else None
            if shape is not None:
                found.append(FoundState(key, shape, labels[number], entry))
        check_fit(optimizer, parameters, found, parameters)
        state: dict[Any, Any] = {}
        for number, entries in by_first(states).items():
            if number in labels:
                own = optimizer.state.get(parameters[labels[number]], {})
                state[labels[number]] = self._entries.item(entries, own, f"{prefix}state.{number}")
            else:  # of the optimizer, not of a parameter
                shared = self._shared_key(optimizer, number, f"{prefix}state.{number}")
                state[shared] = self._entries.item(entries, optimizer.state.get(shared, {}), f"{prefix}state.{number}")
        return {"state": state, "param_groups": named}

    def _shared_key(self, optimizer: Any, text: str, name: str) -> Any:
        """Return the key of state that is no parameter's, by its text."""
        own = [key for key in optimizer.state if not is_torch(key) and str(key) == text]
        if len(own) == 1:
            return own[0]
        if own or not is_text(text):
            raise InvalidArgumentError(
                "whether the key of this state was a text or something else is not known: give the state of the "
                "optimizer this key, or leave the optimizer out",
                name=name,
            )
        return text


def _is_listing(name: str) -> bool:
    """Whether a name after ``param_groups.`` is that of a numbered group's parameters."""
    number, _, key = name.partition(".")
    return is_index(number) and key == "params"


def _by_owner(entries: Mapping[str, str], owners: Collection[str]) -> dict[str, dict[str, str]]:
    """Group entries by the owner whose name begins theirs, the longest of several."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        owner = name.rpartition(".")[0]
        while owner and owner not in owners:
            owner = owner.rpartition(".")[0]
        if owner:
            found.setdefault(owner, {})[name[len(owner) + 1 :]] = entry
    return found


def _params_of(optimizer: Any) -> list[list[Any]]:
    """Return the parameters of each group."""
    return [list(group["params"]) for group in optimizer.param_groups]
