"""Match the numbers by which a source has an optimizer's parameters with the live parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statexchange.errors import CorruptError, InvalidArgumentError, excerpt
from statexchange.sharding.wrappers import without_wrappers
from statexchange.state.modules import bare_name
from statexchange.state.optimizers import names_of_groups, parameters_of
from statexchange.state.state_dict import ParameterName

__all__ = ["FoundState", "NumberedParameters", "check_fit"]

# States of an optimizer that have the shape of their parameter.
_OF_PARAMETERS_SHAPE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
}
_OF_FACTORED_SHAPE = {"row_var", "col_var"}  # Adafactor: 1 in the dim over which it is a mean


class FoundState(NamedTuple):
    """A tensor of a parameter's state in the source.

    Attributes:
        key: what the optimizer calls the state.
        shape: the shape of its tensor.
        label: the parameter's name in the state, or its number.
        path: the path of the tensor, for messages.
    """

    key: str
    shape: tuple[int, ...]
    label: str
    path: str


def check_fit(
    optimizer: Any, parameters: Mapping[str, Any], found: Iterable[FoundState], of_numbers: Container[str]
) -> None:
    """Raise InvalidArgumentError if states do not have the shapes of their parameters.

    If parameters have numbers, their labels are in `of_numbers`, and the order differs then. An optimizer that is not
    torch's may have states of other shapes: the order of its parameters differs if the shapes are those of the
    parameters in another order.
    """
    by_key: dict[str, list[FoundState]] = {}
    for one in found:
        if one.key in _OF_PARAMETERS_SHAPE | _OF_FACTORED_SHAPE:
            by_key.setdefault(one.key, []).append(one)
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    for key, states in by_key.items():
        expected = [_expected_shape(one, parameters[one.label]) for one in states]
        wrong = [(one, shape) for one, shape in zip(states, expected, strict=True) if one.shape != shape]
        if wrong and (is_torchs or Counter(one.shape for one in states) == Counter(expected)):
            one, shape = wrong[0]
            own = optimizer.state.get(parameters[one.label], {})
            if isinstance(own, Mapping) and tuple(getattr(own.get(key), "shape", ())) == one.shape and not is_torchs:
                continue
            if one.label not in of_numbers and not is_torchs:
                continue
            text = (
                f"the source has this optimizer's parameters by number, and this one does not fit {one.label!r}: give "
                "the optimizer the parameters in the order of the job that saved it, or leave it out of the state"
            )
            if one.label not in of_numbers:
                text = (
                    f"the state of this parameter does not have the shape of {one.label!r}: build the model as it was "
                    "saved, or leave the optimizer out by exclude"
                )
            raise InvalidArgumentError(text, name=one.path, expected=shape, found=one.shape)


def _expected_shape(found: FoundState, parameter: Any) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if found.key in _OF_FACTORED_SHAPE and len(found.shape) == len(shape):
        return tuple(1 if one == 1 else size for one, size in zip(found.shape, shape, strict=True))
    return shape


@dataclass(frozen=True, slots=True)
class NumberedParameters:
    """The numbers that a source has for an optimizer's parameters.

    Attributes:
        numbers: those of each param group.
        names: the ``param_names`` of all groups, if the source has any.
        old_names: the source's own names of tensors by those of the state.
        path: that of the optimizer, for messages.
        are_texts: whether the source has the numbers as text: they may be names, as those of a ParameterList.
    """

    numbers: Sequence[Sequence[str]]
    names: Sequence[str]
    old_names: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    are_texts: bool = False

    def labels(
        self, optimizer: Any, parameters: Mapping[str, Any], known: Mapping[int, ParameterName]
    ) -> dict[str, str]:
        """Return the label of each number: by the names that the source has, if they are the live ones, else by order.

        Args:
            optimizer: the live optimizer.
            parameters: its parameters by label, in the order of its groups.
            known: the names of parameters by `id`.

        Raises:
            InvalidArgumentError: the source's names contradict the live ones, or the groups have other sizes.
        """
        flat_numbers = [number for of_group in self.numbers for number in of_group]
        if self.names and len(self.names) != len(flat_numbers):
            text = (
                f"the param groups of the source have {len(flat_numbers)} parameters, and {len(self.names)} param_names"
            )
            raise CorruptError(f"{text}: leave the optimizer out by exclude", name=self.path)
        by_name = self._by_name(optimizer, parameters, known) if self.names else None
        if by_name is not None:
            return dict(zip(flat_numbers, by_name, strict=True))
        if self.are_texts and any(
            own != flat_numbers and {*own} == {*flat_numbers} for own in _names_in_state(optimizer, known)
        ):
            raise InvalidArgumentError(
                f"whether the source has {excerpt(flat_numbers, 80)} as numbers or as names of the parameters is not "
                "known: save the optimizer itself, with its model, or give it the parameters in this order",
                name=self.path,
            )
        sizes = [len(of_group) for of_group in self.numbers if of_group]
        own_sizes = [len(group["params"]) for group in optimizer.param_groups if group["params"]]
        if sizes != own_sizes:
            text = (
                f"the source has this optimizer's parameters by number, in param groups of {sizes}, and the "
                f"state's groups have {own_sizes}: make the groups of the job that saved it, or leave the "
                "optimizer and its schedulers out"
            )
            raise InvalidArgumentError(text, name=self.path)
        return dict(zip(flat_numbers, parameters, strict=True))

    def _by_name(
        self, optimizer: Any, parameters: Mapping[str, Any], known: Mapping[int, ParameterName]
    ) -> list[str] | None:
        """Return the labels of the source's names; None if they and those of the state have nothing in common.

        The live names are those of the groups, those in a module that has all parameters, those in the parameters' own
        modules, and those in the state. None if the groups have no names, and all others differ: then the order is what
        both have in common. Names of which only some are the same contradict that order, and so may a `rename`.
        """
        labels = [*parameters]
        found = self._by_old_names(parameters, known)
        if found is not None:
            return found
        of_groups = names_of_groups(optimizer)
        own_names = _names_in_state(optimizer, known)
        for prefixes in (False, True):
            found = None if of_groups is None else _matched(self.names, of_groups, labels, prefixes=prefixes)
            ways = [_matched(self.names, own, labels, prefixes=prefixes) for own in own_names]
            different = [*{tuple(way): way for way in ways if way is not None}.values()]
            if found is None and labels in different:  # one module has them in this order
                return labels
            if found is None and len(different) > 1:
                raise InvalidArgumentError(
                    f"the source names the parameters of this optimizer {excerpt(self.names, 80)}, and two modules of "
                    "the state have these names for different ones: give the optimizer their names, or the state one "
                    "of these modules",
                    name=self.path,
                )
            if found is not None or different:
                return different[0] if found is None else found
        of_parameters = [known[id(one)] for one in parameters_of(optimizer) if id(one) in known]
        is_renamed = any(self.old_names.get(one.in_state, one.in_state) != one.in_state for one in of_parameters)
        in_modules = {name for one in of_parameters for _, name in one.in_modules}
        if (
            of_groups is not None
            or is_renamed
            or not {*map(bare_name, in_modules)}.isdisjoint(map(bare_name, self.names))
        ):
            own = of_groups or [*own_names, sorted(in_modules)][0]
            lists = [f"{excerpt(sorted(one), 80)} ({len(one)})" for one in (own, self.names)]
            raise InvalidArgumentError(
                f"the state names the parameters of this optimizer {lists[0]}, and the source {lists[1]}: give it the "
                "parameters and the names of the job that saved it, or leave it out by exclude",
                name=self.path,
            )
        return None

    def _by_old_names(self, parameters: Mapping[str, Any], known: Mapping[int, ParameterName]) -> list[str] | None:
        """Return the labels of the source's names, which lead to the live parameters by the tensors of the model.

        They are the names of these tensors in the source after one prefix, that of the module. None if they are not.
        """
        by_tensor: dict[str, str] = {}
        for label, parameter in parameters.items():
            for name in known[id(parameter)].all_in_state if id(parameter) in known else ():
                if name in self.old_names:
                    by_tensor[self.old_names[name]] = label
        names = self.names
        if len(names) != len(parameters) or len({*names}) < len(names):
            return None
        ways = [
            [by_tensor[prefix + name] for name in names]
            for prefix in _prefixes(by_tensor, [names[0]])
            if all(prefix + name in by_tensor for name in names)
        ]
        return ways[0] if len(ways) == 1 and len({*ways[0]}) == len(names) else None


def _names_in_state(optimizer: Any, known: Mapping[int, ParameterName]) -> list[list[str]]:
    """Return the names of an optimizer's parameters in each module that has all, in their own modules and in the state.

    None if the state lacks one of them.
    """
    found = [known[id(one)] for one in parameters_of(optimizer) if id(one) in known]
    if not found or len(found) < len(parameters_of(optimizer)):
        return []
    modules = set.intersection(*({path for path, _ in one.in_modules} for one in found))
    of_modules = [[dict(one.in_modules)[path] for one in found] for path in sorted(modules)]
    return [*of_modules, [one.in_modules[0][1] for one in found], [one.in_state for one in found]]


def _matched(
    names: Sequence[str], own_names: Sequence[str], labels: Sequence[str], *, prefixes: bool
) -> list[str] | None:
    """Return the label of each name if the names are those of all parameters, `own_names`, in any order.

    Parts that wrappers put into names do not count. With `prefixes`, all names of one side may have a prefix, such as
    the "module." of DistributedDataParallel. Names that occur twice must be the same in the same order.
    """
    theirs, ours = ([without_wrappers(name) for name in one] for one in (names, own_names))
    if len(theirs) != len(ours):
        return None
    if theirs == ours:
        return [*labels]
    by_name = dict(zip(ours, labels, strict=True))
    if len(by_name) < len(ours) or len({*theirs}) < len(theirs):
        return None
    if not prefixes:
        return [by_name[name] for name in theirs] if by_name.keys() == {*theirs} else None
    for prefix in _prefixes([theirs[0]], ours):
        if all(name.startswith(prefix) and name[len(prefix) :] in by_name for name in theirs):
            return [by_name[name[len(prefix) :]] for name in theirs]
    for prefix in _prefixes(ours, [theirs[0]]):
        if all(prefix + name in by_name for name in theirs):
            return [by_name[prefix + name] for name in theirs]
    return None


def _prefixes(longer: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return what comes before one of `names`, at a dot, in one of the names of `longer`, the shortest first."""
    found = {one.removesuffix(name) for one in longer for name in names if f".{one}".endswith(f".{name}")}
    return sorted(found, key=len)
