"""Plan a conversion: match the names of a checkpoint with rules, and find what fills every output tensor.

With the rule that splits ``layers.{layer}.fc1`` into ``{layer}.gate`` and ``{layer}.up``::

    inputs    layers.0.fc1 F32 (8, 4), layers.1.fc1 F32 (8, 4)
    outputs   0.gate F32 (4, 4), 0.up F32 (4, 4), 1.gate, 1.up
    fills     layers.0.fc1: rows 0 to 3 fill 0.gate, rows 4 to 7 fill 0.up; and so layers.1.fc1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from statexchange.conversions.numbers import KnownConfig, Numbers, UnknownNumberError
from statexchange.conversions.operations import Planned
from statexchange.conversions.patches import Dim, Patch, identity
from statexchange.conversions.rules import ConversionRules, Rule
from statexchange.errors import IncompleteError, InvalidArgumentError, UnsafeError, UnsupportedError
from statexchange.sharding.shards import Box, TensorInfo, full_box
from statexchange.tensors import PACKED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SHOWN = 5
_MAX_STACKED = 1 << 20
# Outputs that stacked tensors may have in addition to one for each element: an empty tensor could claim any number.
_LEAST_UNSTACKED = 1 << 16
_MANY_FILLS = 16  # from here on a search in arrays is faster than a look at each, and worth the import of numpy
_TIED = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class Fill:
    """The patch by which an input, or zeros, fill a part of the output `target`; an empty output has an empty patch."""

    target: str
    patch: Patch


class InputFills:
    """Finds the parts of outputs that a box of one input fills; an input may have thousands of parts and boxes."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        self._fills = fills
        self._ends: NDArray[np.int64] | None = None
        if len(fills) > _MANY_FILLS:
            import numpy as np

            lows, ends = [], []
            for fill in fills:
                box = fill.patch.input_box
                lows.append(box.offsets)
                ends.append(box.ends)
            self._lows, self._ends = np.array(lows, np.int64), np.array(ends, np.int64)

    def parts(self, box: Box) -> Iterator[Fill]:
        """Yield the parts of fills whose elements lie in `box` of the input, as fills by that box, in order."""
        fills = self._fills
        if self._ends is not None:
            import numpy as np

            overlaps = np.all((self._lows < box.ends) & (self._ends > box.offsets), axis=1)
            fills = [fills[number] for number in np.flatnonzero(overlaps).tolist()]
        for fill in fills:
            for patch in fill.patch.within(box):
                yield Fill(fill.target, patch)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The outputs of a conversion, and the inputs that fill them.

    Attributes:
        tensors: the outputs by name.
        fills: for each input by name, what it fills.
        zeros: the parts of outputs that are zeros.
        ties: outputs that need not be written if they equal another.
        single: outputs that one input fills, perhaps with zeros.
    """

    tensors: Mapping[str, TensorInfo]
    fills: Mapping[str, Sequence[Fill]]
    zeros: Sequence[Fill] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    single: AbstractSet[str] = frozenset()

    def output_of(self, name: str) -> str | None:
        """Return the one output of which an input fills elements; None if it fills none or several."""
        targets = {fill.target for fill in self.fills.get(name, ())}
        if len(targets) != 1:
            return None
        return targets.pop()

    def new_aliases(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Return the aliases of tied inputs by the outputs' names, if both fill one output each, in the same way."""
        new_aliases = {}
        # Inputs with the same bytes make outputs with the same bytes only if nothing else fills either of them.
        for alias, name in aliases.items():
            new, kept = self.output_of(alias), self.output_of(name)
            if new is None or kept is None or not {new, kept} <= self.single or self.tensors[new] != self.tensors[kept]:
                continue
            if _patches(self.fills[alias]) == _patches(self.fills[name]):
                new_aliases[new] = kept
        return new_aliases


def _patches(fills: Sequence[Fill]) -> list[Patch]:
    return [fill.patch for fill in fills]


def plan_conversion(
    conversion: ConversionRules,
    tensors: Mapping[str, TensorInfo],
    convert_with: Mapping[str, int] = {},
    configs: Sequence[KnownConfig] = (),
) -> ConversionPlan:
    """Plan the conversion of all of a model's tensors.

    Args:
        conversion: the rules.
        tensors: the inputs by name.
        convert_with: numbers that the caller gave.
        configs: configs of the model, in which other numbers are looked up.

    Returns:
        The plan.

    Raises:
        InvalidArgumentError: no name has a rule; a number is not known; a tensor does not fit its rule.
        UnsafeError: some names have no rule, or two rules give one name.
        IncompleteError: a tensor that a rule needs together with others is missing.
        UnsupportedError: tensors of different dtypes would become one.
    """
    numbers = Numbers(conversion.numbers, convert_with, configs)
    return _Planner(conversion, tensors, numbers).plan()


def unknown_names(conversion: ConversionRules, names: Iterable[str]) -> list[str]:
    """Return the names for which a conversion has no rule."""
    return [name for name in names if _match(conversion, name) is None]


class _Match(NamedTuple):
    """The number of the rule that has a pattern for a name, of the pattern in it, and its placeholders' values."""

    rule: int
    source: int
    values: Mapping[str, str]


def _match(conversion: ConversionRules, name: str) -> _Match | None:
    """Return the first rule for a name."""
    for number, rule in enumerate(conversion.rules):
        for source, pattern in enumerate(rule.sources):
            values = pattern.match(name)
            if values is not None:
                return _Match(number, source, values)
    return None


@dataclass(slots=True)
class _Group:
    """The inputs that one rule turns into outputs together, by their index along the dims that are stacked."""

    rule: Rule
    values: Mapping[str, str]
    names: dict[tuple[int, ...], dict[int, str]] = field(default_factory=dict)


class _Planner:
    """The planning of one conversion."""

    def __init__(self, conversion: ConversionRules, tensors: Mapping[str, TensorInfo], numbers: Numbers) -> None:
        self._conversion = conversion
        self._inputs = tensors
        self._numbers = numbers
        self._outputs: dict[str, TensorInfo] = {}
        self._fills: dict[str, list[Fill]] = {name: [] for name in tensors}
        self._zeros: list[Fill] = []
        self._single: set[str] = set()
        self._unstacked_left = _LEAST_UNSTACKED + sum(math.prod(info.shape) for info in tensors.values())
        # By the id of a rule, which the conversion keeps alive, and the shapes of its inputs.
        self._applied: dict[tuple[int, tuple[tuple[int, ...], ...]], list[Planned]] = {}

    def plan(self) -> ConversionPlan:
        """Return the plan."""
        waiting = self._groups()
        self._numbers.check()
        # Numbers may follow from shapes in any order of the tensors: each round plans at least one more group.
        while waiting:
            unknown: UnknownNumberError | None = None
            later = []
            for group in waiting:
                try:
                    self._add(group)
                except UnknownNumberError as error:
                    unknown = unknown or error
                    later.append(group)
            # A round that plans no group would be followed by the same one again.
            if unknown is not None and len(later) == len(waiting):
                raise unknown
            waiting = later
        self._restore()
        plan = ConversionPlan(self._outputs, self._fills, self._zeros, {}, self._single)
        return replace(plan, ties=self._ties(plan))

    def _groups(self) -> list[_Group]:
        """Return the inputs in groups, each with its rule, in the order of the inputs."""
        groups: dict[tuple[int, tuple[tuple[str, str], ...]], _Group] = {}
        unknown = []
        for name in self._inputs:
            match = _match(self._conversion, name)
            if match is None:
                unknown.append(name)
                continue
            rule = self._conversion.rules[match.rule]
            shared = dict(match.values)
            index = tuple(_layer_number(shared.pop(placeholder), name) for placeholder in rule.stack)
            group = groups.setdefault((match.rule, tuple(sorted(shared.items()))), _Group(rule, shared))
            group.names.setdefault(index, {})[match.source] = name
        if unknown:
            raise self._unknown(unknown)
        return list(groups.values())

    def _unknown(self, names: Sequence[str]) -> InvalidArgumentError | UnsafeError:
        shown = ", ".join(names[:_SHOWN])
        if len(names) > _SHOWN:
            shown += ", ..."
        if len(names) == len(self._inputs):
            text = f"convert: {self._conversion.name} has a rule for none of the {len(names)} names: {shown}"
            return InvalidArgumentError(text)
        text = f"convert: {self._conversion.name} has no rule for {len(names)} of {len(self._inputs)} names: {shown}"
        advice = "to leave them out, exclude (--exclude); else write a conversion of your own that has rules for them"
        return UnsafeError(f"{text}; {advice}")

    def _add(self, group: _Group) -> None:
        """Add what one group fills: for each index of the inputs' leading dims that are unstacked, most often ()."""
        rule = group.rule
        sizes = self._stacked_sizes(group)
        if not rule.targets:
            return
        names_of = {}
        all_names = []
        for index, by_source in sorted(group.names.items()):
            names_of[index] = [by_source[source] for source in range(len(rule.sources))]
            all_names += names_of[index]
        # Inputs of other indices must have the shapes of the first ones, so that the operations are planned once.
        first, depth = next(iter(names_of.values())), len(rule.unstack)
        shapes = [self._inputs[name].shape for name in first]
        leading = shapes[0][:depth]
        self._check_shapes(rule, names_of.values(), shapes, leading)
        outputs = self._apply(rule, first, [shape[depth:] for shape in shapes])
        # Once for (), where nothing is unstacked.
        for position in product(*map(range, leading)):
            values = {**group.values, **dict(zip(rule.unstack, map(str, position), strict=True))}
            for target, output in zip(rule.targets, outputs, strict=True):
                new = target.filled(values)
                self._add_output(new, all_names, (*sizes, *output.shape))
                for index, names in names_of.items():
                    self._add_fills(new, names, [_moved(patch, position, index) for patch in output.patches])
                if len(all_names) == 1 and not depth and not rule.stack:
                    self._single.add(new)

    def _stacked_sizes(self, group: _Group) -> tuple[int, ...]:
        """Return the sizes of the outputs' leading dims, which are the indices in the inputs' names; most often ()."""
        for names in group.names.values():
            for number, pattern in enumerate(group.rule.sources):
                if number not in names:
                    text = f"convert: the rule for this tensor needs {pattern.text!r} beside it, which the source lacks"
                    raise IncompleteError(text, name=next(iter(names.values())))
        # Indices are different and not negative: as many as the product of the sizes are all of them.
        sizes = tuple(max(index) + 1 for index in zip(*group.names, strict=True))
        if math.prod(sizes) > _MAX_STACKED or math.prod(sizes) != len(group.names):
            name = next(iter(group.names[min(group.names)].values()))
            text = f"convert: {len(group.names)} tensors are to be stacked by {', '.join(group.rule.stack)}"
            raise IncompleteError(f"{text}, which go up to {[size - 1 for size in sizes]}: some are missing", name=name)
        return sizes

    def _check_shapes(
        self, rule: Rule, names: Iterable[Sequence[str]], shapes: Sequence[tuple[int, ...]], leading: tuple[int, ...]
    ) -> None:
        """Raise unless all inputs have the dims that are unstacked, and those that are stacked have one shape."""
        for of_index in names:
            for name, expected in zip(of_index, shapes, strict=True):
                shape, depth = self._inputs[name].shape, len(rule.unstack)
                if len(shape) < depth or shape[:depth] != leading or math.prod(leading) > _MAX_STACKED:
                    text = f"convert: shape {shape} does not have {depth} leading dims for {', '.join(rule.unstack)}"
                    raise InvalidArgumentError(text, name=name)
                if shape != expected:
                    text = "convert: shapes differ: this tensor cannot be stacked with the first one"
                    raise InvalidArgumentError(text, name=name, expected=expected, found=shape)
        self._unstacked_left -= math.prod(leading) * len(rule.targets)
        if self._unstacked_left < 0:
            text = f"convert: stacked tensors without elements would become {math.prod(leading)} tensors and more"
            raise UnsupportedError(text, name=rule.sources[0].text)

    def _apply(self, rule: Rule, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Planned]:
        """Return the outputs of a rule for inputs of these shapes; layers have equal ones, and are planned once."""
        for name, shape in zip(names, shapes, strict=True):
            _check_packed(rule, name, self._inputs[name].dtype, len(shape))
        # Not by the rule itself: to hash it would take all its names and operations for each layer.
        key = (id(rule), tuple(shapes))
        if key not in self._applied:
            tensors = []
            for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                tensors.append(Planned(name, shape, identity(shape, number)))
            for operation in rule.operations:
                tensors = operation.apply(tensors, self._numbers)
            if len(tensors) != len(rule.targets):
                text = f"convert: the values make {len(tensors)} tensors, and 'to' has {len(rule.targets)} names"
                raise InvalidArgumentError(text, name=names[0])
            self._applied[key] = tensors
        return self._applied[key]

    def _add_output(self, new: str, names: Sequence[str], shape: tuple[int, ...]) -> None:
        if new in self._outputs:
            raise UnsafeError(f"convert gives one name to two tensors, one of them from {names[0]!r}", name=new)
        # Operations move bytes: elements of two dtypes cannot lie in one tensor.
        dtypes = {self._inputs[name].dtype: name for name in names}
        if len(dtypes) > 1:
            shown = ", ".join(f"{dtype} of {name}" for dtype, name in dtypes.items())
            raise UnsupportedError(f"convert: tensors of different dtypes would become one: {shown}", name=new)
        self._outputs[new] = TensorInfo(next(iter(dtypes)), shape)

    def _add_fills(self, new: str, names: Sequence[str], patches: Sequence[Patch]) -> None:
        shape = self._outputs[new].shape
        # An output without elements has no patch, but a file must have it: that of its first input.
        if not math.prod(shape):
            self._fills[names[0]].append(Fill(new, Patch(0, full_box(shape), (), (Dim(None),) * len(shape))))
        for patch in patches:
            if patch.source is None:
                self._zeros.append(Fill(new, patch))
            else:
                self._fills[names[patch.source]].append(Fill(new, patch))

    def _restore(self) -> None:
        """Add the outputs that are missing because they equal another."""
        for rule in self._conversion.rules:
            if not rule.restored_from:
                continue
            new, same = rule.targets[0].text, rule.restored_from
            # A model whose embeddings are not tied has it, and a part of a model may lack both.
            if new in self._outputs or same not in self._outputs:
                continue
            # Its fills are added below, so that both are read from the same bytes and written in full.
            self._outputs[new] = self._outputs[same]
            for fills in [*self._fills.values(), self._zeros]:
                fills += [replace(fill, target=new) for fill in fills if fill.target == same]

    def _ties(self, plan: ConversionPlan) -> dict[str, str]:
        """Return the outputs that equal another in this model, which has tied embeddings."""
        if not self._numbers.get(_TIED):
            return {}
        ties = {}
        for rule in self._conversion.rules:
            if rule.tied_to:
                new, other = plan.output_of(rule.sources[0].text), plan.output_of(rule.tied_to)
                if new is not None and other is not None:
                    ties[new] = other
        return ties


def _check_packed(rule: Rule, name: str, dtype: str, num_dims: int) -> None:
    """Raise UnsupportedError if a rule would move elements along the last dim of a dtype that shares bytes among them.

    `num_dims` is that of the tensor without dims that are unstacked.
    """
    if dtype not in PACKED:
        return
    dims = [getattr(operation, "dim", -1) for operation in rule.operations]  # transpose has none
    # Without dims left, the last one is unstacked.
    if not num_dims or {-1, num_dims - 1}.intersection(dims):
        text = f"convert: along the last dim of {dtype} several elements share bytes, so only whole rows can be moved"
        raise UnsupportedError(text, name=name)


def _layer_number(text: str, name: str) -> int:
    """Return the number in a name that becomes an index."""
    # Layers 1 and 01 would be one index. Python refuses to read numbers of thousands of digits.
    if not text.isascii() or not text.isdigit() or str(int(text[:18])) != text:
        raise InvalidArgumentError(f"convert: {text!r} in this name is to be an index, and is no number", name=name)
    return int(text)


def _moved(patch: Patch, position: tuple[int, ...], index: tuple[int, ...]) -> Patch:
    """Return a patch whose input is at `position` of a stacked tensor, or whose output is at `index` of one.

    For position (5,), dim 0 of a layer runs along dim 1 of the stacked input, and begins at (5, 0) for (0,). For index
    (5,), the output has a dim 0 of size 1 at offset 5, which runs along no dim of the layer.
    """
    if not position and not index:
        return patch
    dims = [Dim(None)] * len(index)
    for along in patch.dims:
        dims.append(along if along.dim is None else Dim(along.dim + len(position), along.indices))
    begin = patch.begin
    if patch.source is not None:  # zeros lie in no input
        begin = (*position, *begin)
    box = Box((*index, *patch.box.offsets), (*(1,) * len(index), *patch.box.shape))
    return Patch(patch.source, box, begin, tuple(dims))
