"""The parameters of a live optimizer, and which of them a source means by its names or numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from statexchange.errors import CorruptError, InvalidArgumentError, excerpt
from statexchange.sharding.paths import module_prefix
from statexchange.state.flatten import ParameterName
from statexchange.state.modules import bare_name
from statexchange.state.optimizers import names_of_groups, parameters_of
from statexchange.state.saved_optimizer import SavedOptimizer

__all__ = ["LiveParameters"]


class LiveParameters:
    """The parameters of a live optimizer, by what a source may call them.

    Attributes:
        by_label: the parameters by their names in the state, or all by number if one is not in the state.
        are_named: whether they have names.
    """

    def __init__(self, optimizer: Any, known: Mapping[int, ParameterName], path: str) -> None:
        self._optimizer = optimizer
        self._path = path
        self.parameters = parameters_of(optimizer)
        self._known = [known.get(id(parameter)) for parameter in self.parameters]
        names = [None if one is None else one.in_state for one in self._known]
        self.are_named = bool(names) and None not in names and len({*names}) == len(names)
        labels = names if self.are_named else list(map(str, range(len(names))))
        self.by_label: dict[str, Any] = {str(label): one for label, one in zip(labels, self.parameters, strict=True)}

    def by_group(self) -> list[dict[str, Any]]:
        """Return the parameters of each group by label."""
        items = iter(self.by_label.items())
        return [dict(itertools.islice(items, len(group["params"]))) for group in self._optimizer.param_groups]

    @functools.cached_property
    def in_state(self) -> dict[str, str | None]:
        """The label of each name in the state, of tied parameters all; None for a name that two have."""
        return self._labels(lambda known: (*known.all_in_state, *known.texts))

    @functools.cached_property
    def in_modules(self) -> dict[str, str | None]:
        """The label of each name in a module; None for a name that two parameters have."""
        return self._labels(lambda known: (name for _, name in known.in_modules))

    def _labels(self, names_of: Callable[[ParameterName], Iterable[str]]) -> dict[str, str | None]:
        labels: dict[str, str | None] = {}
        for label, known in zip(self.by_label, self._known, strict=True):
            for name in names_of(known) if known is not None and self.are_named else ():
                labels[name] = label if labels.get(name, label) == label else None
        return labels

    def labels_of(
        self,
        saved: SavedOptimizer,
        param_names: Sequence[str],
        new_names: Callable[[Sequence[str]], list[str]],
        *,
        in_state: bool,
    ) -> dict[str, str]:
        """Return the live label of each of the source's; of those that the live optimizer has.

        Args:
            saved: the optimizer in the source.
            param_names: the names that the source has for numbered parameters, if any.
            new_names: returns the state's names of parameters in the source.
            in_state: whether the source has the names in the whole state, as our own saves, or those in a module.

        Raises:
            InvalidArgumentError: which parameter is meant is not known.
        """
        labels = saved.labels
        are_integers = any(isinstance(key, int) for group in saved.groups for key in group.keys)
        # Texts are names in a file of torch. In a save of ours numbers are texts, too.
        if saved.by_number and (are_integers or in_state):
            if not are_integers:
                self._check_not_names(labels)
            return self._by_number(saved, param_names, new_names)
        names = new_names(labels)
        known = self.in_state
        if not in_state and known.keys().isdisjoint(names):
            known = self.in_modules
        if known.keys().isdisjoint(names):
            names = [name.removeprefix(module_prefix(names)) for name in names]
        twice = sorted(name for name in names if name in known and known[name] is None)
        if twice:
            raise InvalidArgumentError(
                f"the source has this optimizer's parameters by name, and two of the state's are called {twice[0]!r} "
                "in their modules: save the optimizer's own state_dict(), or leave the optimizer out by exclude",
                name=self._path,
            )
        found = {label: known.get(name) for label, name in zip(labels, names, strict=True)}
        return {label: live for label, live in found.items() if live is not None}

    def _check_not_names(self, numbers: Sequence[str]) -> None:
        """Raise InvalidArgumentError if numbers of the source, as texts, may be names, as those of a ParameterList."""
        for names in (self.in_modules, self.in_state):
            if {*names} == {*numbers} and [*names] != [*numbers]:
                raise InvalidArgumentError(
                    f"whether the source has {excerpt([*numbers], 80)} as numbers or as names of the parameters is not "
                    "known: save the optimizer itself, with its model, or give it the parameters in this order",
                    name=self._path,
                )

    def _by_number(
        self, saved: SavedOptimizer, names: Sequence[str], new_names: Callable[[Sequence[str]], list[str]]
    ) -> dict[str, str]:
        """Return the live label of each number: by the source's names of parameters, or else by order."""
        labels = saved.labels
        if names and len(names) != len(labels):
            text = f"the param groups of the source have {len(labels)} parameters, and {len(names)} param_names"
            raise CorruptError(f"{text}: leave the optimizer out by exclude", name=self._path)
        by_name = self._by_names(names, new_names(names)) if names else None
        if by_name is not None:
            return dict(zip(labels, by_name, strict=True))
        # Where no names help, the order counts, as in torch's own load_state_dict: groups of equal sizes are trusted.
        sizes = [len(group.labels) for group in saved.groups if group.labels]
        live_sizes = [len(group["params"]) for group in self._optimizer.param_groups if group["params"]]
        if sizes != live_sizes:
            text = (
                f"the source has this optimizer's parameters by number, in param groups of {sizes}, and the state's "
                f"groups have {live_sizes}: make the groups of the job that saved it, or leave the optimizer and its "
                "schedulers out"
            )
            raise InvalidArgumentError(text, name=self._path)
        return dict(zip(labels, self.by_label, strict=True))

    def _by_names(self, names: Sequence[str], new_names: Sequence[str]) -> list[str] | None:
        """Return the live label of each name; None if the live parameters have no names, or others altogether.

        Raises:
            InvalidArgumentError: the names are those of other parameters, or of two.
        """
        in_state = self.in_state
        in_order = [in_state.get(name) for name in new_names]
        if len({*in_order}) == len(self.by_label) and None not in in_order:
            return list(map(str, in_order))
        of_groups = names_of_groups(self._optimizer)
        lists = self._lists_of_names() if of_groups is None else [of_groups]
        found: list[list[str]] = []
        for live_names in lists:
            labels = _matched(new_names, live_names, [*self.by_label])
            if labels is not None and labels not in found:
                found.append(labels)
        if len(found) == 1:
            return found[0]
        bare = {*map(bare_name, new_names)}
        if not found and of_groups is None and all(bare.isdisjoint(map(bare_name, one)) for one in lists):
            return None
        live_names = lists[0] if lists else []
        texts = [f"{excerpt(sorted(one), 80)} ({len(one)})" for one in (live_names, names)]
        text = f"the state names the parameters of this optimizer {texts[0]}, and the source {texts[1]}"
        if len(found) > 1:
            text = (
                f"the source names the parameters {texts[1]}, and two modules of the state have these names for others"
            )
        text += ": give it the parameters and the names of the job that saved it, or leave it out by exclude"
        raise InvalidArgumentError(text, name=self._path)

    def _lists_of_names(self) -> list[list[str]]:
        """Return what the parameters are called in each module that has all, in their own modules, and in the state."""
        known = [one for one in self._known if one is not None]
        if not known or len(known) < len(self._known):
            return []
        modules = set.intersection(*({path for path, _ in one.in_modules} for one in known))
        of_modules = [[dict(one.in_modules)[path] for one in known] for path in sorted(modules)]
        return [*of_modules, [one.in_modules[0][1] for one in known], [one.in_state for one in known]]


def _matched(names: Sequence[str], live_names: Sequence[str], labels: Sequence[str]) -> list[str] | None:
    """Return the label of each name, if the names are those of all live parameters, in any order.

    Parts that wrappers put into names do not count. Names that occur twice are those of no parameter.
    """
    theirs, ours = ([bare_name(name) for name in one] for one in (names, live_names))
    by_name = dict(zip(ours, labels, strict=True))
    if len(by_name) < len(ours) or {*theirs} != by_name.keys() or len(theirs) != len(ours):
        return None
    return [by_name[name] for name in theirs]
