"""Match the numbers by which a source has an optimizer's parameters with the live parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.state.modules import without_wrappers
from statexchange.state.optimizers import labelled_parameters
from statexchange.state.state_dict import ParameterName

__all__ = ["NumberedParameters", "check_fits"]

# States of an optimizer that have the shape of their parameter.
_OF_PARAMETERS_SHAPE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
}
_OF_FACTORED_SHAPE = {"row_var", "col_var"}  # Adafactor: 1 in the dim over which it is a mean


def check_fits(key: str, shape: tuple[int, ...], parameter: Any, label: str, path: str) -> None:
    """Raise InvalidArgumentError if a state does not fit the parameter of its number, as the order differs.

    Args:
        key: what the optimizer calls the state.
        shape: the shape of its tensor.
        parameter: the parameter.
        label: the parameter's name in the state, or number, for the message.
        path: the path of the tensor.
    """
    if key not in _OF_PARAMETERS_SHAPE | _OF_FACTORED_SHAPE:
        return
    expected = tuple(parameter.shape)
    if key in _OF_FACTORED_SHAPE and len(shape) == len(expected):
        expected = tuple(1 if one == 1 else size for one, size in zip(shape, expected, strict=True))
    if shape != expected:
        text = (
            f"the source has this optimizer's parameters by number, and this one does not fit {label!r}: give the "
            "optimizer the parameters in the order of the job that saved it, or leave it out of the state"
        )
        raise InvalidArgumentError(text, name=path, expected=expected, found=shape)


@dataclass(frozen=True, slots=True)
class NumberedParameters:
    """The numbers that a source has for an optimizer's parameters.

    Attributes:
        numbers: those of each param group.
        names: the ``param_names`` of all groups, if the source has any.
        old_names: the source's own names of tensors by those of the state.
        path: that of the optimizer, for messages.
    """

    numbers: Sequence[Sequence[str]]
    names: Sequence[str]
    old_names: Mapping[str, str] = field(default_factory=dict)
    path: str = ""

    def labels(
        self, optimizer: Any, parameters: Mapping[str, Any], known: Mapping[int, ParameterName]
    ) -> dict[str, str]:
        """Return the label of each number: by the names that the source has, if they are the live ones, else by order.

        Args:
            optimizer: the live optimizer.
            parameters: its parameters by label.
            known: the names of parameters by `id`.

        Raises:
            InvalidArgumentError: the source's names contradict the live ones, or the groups have other sizes.
        """
        flat_numbers = [number for of_group in self.numbers for number in of_group]
        by_name = self._by_name(optimizer, parameters, known)
        if by_name is not None and len(flat_numbers) == len(self.names):
            return {number: by_name[name] for number, name in zip(flat_numbers, self.names, strict=True)}
        sizes = [len(of_group) for of_group in self.numbers if of_group]
        own_sizes = [len(group["params"]) for group in optimizer.param_groups if group["params"]]
        if sizes != own_sizes:
            text = (
                f"the source has this optimizer's parameters by number, in param groups of {sizes}, and the "
                f"state's groups have {own_sizes}: make the groups of the job that saved it, or leave the "
                "optimizer out"
            )
            raise InvalidArgumentError(text, name=self.path)
        return dict(zip(flat_numbers, parameters, strict=True))

    def _by_name(
        self, optimizer: Any, parameters: Mapping[str, Any], known: Mapping[int, ParameterName]
    ) -> dict[str, str] | None:
        """Return labels by the source's names; None if it has none.

        None, too, if the state's optimizer has no names, and those of its modules are all different: then the order is
        what both have in common. Names of which only some are the same contradict that order, and so may a `rename`.
        """
        if not self.names:
            return None
        labels = {id(parameter): label for label, parameter in parameters.items()}
        found = self._by_old_names(labels, known)
        if found is not None:
            return found
        of_modules: dict[str, str] = {}
        ambiguous: set[str] = set()
        for key, label in labels.items():
            for name in known[key].in_modules if key in known else ():
                if of_modules.setdefault(name, label) != label:
                    ambiguous.add(name)
        unique = {name: label for name, label in of_modules.items() if name not in ambiguous}
        of_groups = {name: labels[id(parameter)] for name, parameter in labelled_parameters(optimizer).items()}
        for own in (of_groups, unique):
            found = _matched(self.names, own, len(labels))
            if found is not None:
                return found
        has_names = any("param_names" in group for group in optimizer.param_groups)
        own = of_groups if has_names else of_modules
        new_names = [known[key].in_state for key in labels if key in known]
        is_renamed = any(self.old_names.get(name, name) != name for name in new_names)
        if has_names or is_renamed or not own.keys().isdisjoint(self.names):
            lists = [f"{excerpt(sorted(one), 80)} ({len(one)})" for one in ([*own], self.names)]
            raise InvalidArgumentError(
                f"the state names the parameters of this optimizer {lists[0]}, and the source {lists[1]}: give it the "
                "parameters and the names of the job that saved it, or leave it out by exclude",
                name=self.path,
            )
        return None

    def _by_old_names(self, labels: Mapping[int, str], known: Mapping[int, ParameterName]) -> dict[str, str] | None:
        """Return labels by the source's names for parameters, which lead to the live ones by the tensors of the model.

        They are the names of these tensors in the source after one prefix, that of the module. None if they are not.
        """
        by_tensor: dict[str, str] = {}
        for key, label in labels.items():
            new = known[key].in_state if key in known else ""
            if new in self.old_names:
                by_tensor[self.old_names[new]] = label
        names = self.names
        if len(names) != len(labels) or len(by_tensor) < len(labels):
            return None
        prefixes = [
            prefix for prefix in _prefixes(by_tensor, [names[0]]) if all(prefix + n in by_tensor for n in names)
        ]
        return {name: by_tensor[prefixes[0] + name] for name in names} if len(prefixes) == 1 else None


def _matched(names: Sequence[str], own: Mapping[str, str], count: int) -> dict[str, str] | None:
    """Return the label of each name if the names are those of all `count` parameters.

    Names of wrapped modules lack what the wrapper put into them, or have one prefix, as the "module." of
    DistributedDataParallel; both on either side.
    """
    bare = {name: without_wrappers(name) for name in names}
    bare_own = {without_wrappers(name): label for name, label in own.items()}
    first = bare[names[0]]
    ways = [(theirs, "") for theirs in _prefixes([first], bare_own)]
    ways += [("", ours) for ours in _prefixes(bare_own, [first])]
    for theirs, ours in ways:
        if all(one.startswith(theirs) and ours + one[len(theirs) :] in bare_own for one in bare.values()):
            found = {name: bare_own[ours + one[len(theirs) :]] for name, one in bare.items()}
            if len(found) == len(names) == len(set(found.values())) == count:
                return found
    return None


def _prefixes(longer: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return what comes before one of `names`, at a dot, in one of the names of `longer`, the shortest first."""
    found = {one.removesuffix(name) for one in longer for name in names if f".{one}".endswith(f".{name}")}
    return sorted(found, key=len)
