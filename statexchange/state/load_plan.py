"""The plan of a load: what decides which entries of a source fill the live state, and what they change in it.

A source's name goes through `rename`, loses what wrappers put into it, and is then paired with the live path of the
same text. `include` and `exclude` are asked for names of the state::

    model._orig_mod.w  --rename ("^model", "net")-->  net._orig_mod.w  --wrappers-->  net.w  --exclude="net.*"-->  left

The parts of wrappers stay where the state has names with them, as a mapping that a compiled model returned. In front
of a module's names ``module.`` is looked for where they are matched, and compared alike for an optimizer's names.

The plan has the tensors to be read, and the calls that then install them and the plain values, in order. Making it
changes nothing: an error leaves the live state as it was.

A saved tensor is read into the live one if it fits, else into a new one. Example: AdamW has made no state yet. The
moments of a parameter that is a DTensor become DTensors on its mesh, and the count of steps a plain tensor on the CPU,
as torch's `load_state_dict` leaves it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from statexchange.errors import InvalidArgumentError, ReplicaError, UnsafeError, UnsupportedError, type_text
from statexchange.lazy import is_installed
from statexchange.sharding.options import LoadOptions, renamed
from statexchange.sharding.paths import (
    ListItem,
    Path,
    TupleItem,
    find_wrapper,
    joined,
    paths_above,
    text_of,
    without_wrappers,
)
from statexchange.sharding.rules import Layout, with_dots
from statexchange.state.describe import new_dtensor
from statexchange.state.entries import Conflicts, Entries, Entry, SavedTensor, are_equal, refuse_opaque
from statexchange.state.tree import check_change, children, is_leaf, walk, with_children, with_types_of
from statexchange.state.types import Leaf
from statexchange.state.units import ObjectStates, is_module
from statexchange.tensors import (
    checked_dtype,
    is_array,
    is_dtensor,
    is_sharded,
    is_torch,
    name_of_dtype,
    numpy_dtype,
    torch_dtype,
)
from statexchange.units import format_number

# Values that are installed as they are.
PLAIN = (bool, int, float, str, type(None))


# The source's names


class NameFilter:
    """Gives the entries of a source the names of the state.

    `units` are the paths of the live optimizers and other objects, which move whole. With `strips_wrappers` names lose
    what torch.compile and others put into them.
    """

    def __init__(self, options: LoadOptions, units: Collection[str], *, strips_wrappers: bool = False) -> None:
        self.options = options
        self._units = units
        self._strips_wrappers = strips_wrappers
        self._places: dict[str, str] = {}
        self.changes_names = bool(options.rename) or strips_wrappers
        self.selects = bool(options.include or options.exclude)

    def without_renames(self) -> NameFilter:
        """Return the filter for a source whose names are the state's already."""
        return NameFilter(replace(self.options, rename=()), self._units)

    def name(self, name: str) -> str:
        """Return the state's name of an entry of the source."""
        new = name
        if self.options.rename:
            new = renamed(name, self.options.rename)
        if self._strips_wrappers:
            # After the renames, whose patterns are for the names that the source has.
            return without_wrappers(new)
        return new

    def wants_any(self, value: Leaf, path: str) -> bool:
        """Whether anything in a value at a path is selected."""
        return not self.selects or any(self.options.wants(step.path) for step in walk(value, path=path))

    def wants_whole(self, *parts: tuple[Leaf, str]) -> bool:
        """Whether what has these values at these paths is loaded: if one path is included, and none is excluded."""
        if not self.selects:
            return True
        paths = []
        for value, path in parts:
            for step in walk(value, path=path):
                paths.append(step.path)
        return self.options.wants_object(paths)

    def path(self, text: str) -> str:
        """Return the state's path of something in the source, which moves with the optimizer or object that has it."""
        return self._text(text, ()) if self.changes_names else text

    def place(self, path: str) -> str:
        """Return the new path of a container, also if a pattern for what is inside it moves it: ``^opt\\.``."""
        if path not in self._places:
            new = self.name(path)
            # A function expects whole names.
            if new == path and not callable(self.options.rename):
                inside = self.name(f"{path}.")
                if inside.endswith("."):
                    new = inside[:-1]
            self._places[path] = new
        return self._places[path]

    def entries(self, entries: Sequence[Entry], path: str) -> list[Entry]:
        """Return the entries of one rank by the names of the state; `path` is that of the source.

        Raises:
            UnsafeError: two entries have one name then.
        """
        if not self.changes_names:
            return [*entries]
        new_entries = list(map(self._entry, entries))
        olds: dict[str, Entry] = {}
        for new, old in zip(new_entries, entries, strict=True):
            first = olds.setdefault(new.text, old)
            # Tied tensors may get one name: they have the same values.
            if first.text != old.text and not _are_one_tensor(first, old):
                text = f"rename gives one name to both {first.text!r} and {old.text!r}: change rename"
                raise UnsafeError(text, name=new.text, path=path)
        _check_places(new_entries, olds, path)
        return new_entries

    def _entry(self, entry: Entry) -> Entry:
        text = self._text(entry.text, entry.keys)
        if text == entry.text:
            return entry
        return entry._replace(text=text, keys=_kept_keys(entry.keys, text))

    def _text(self, text: str, keys: Path) -> str:
        # An optimizer, or another object, is loaded by itself: all of it goes where its own path goes.
        for unit in paths_above(text):
            new = self.place(unit)
            if new in self._units:
                return new + text[len(unit) :]
        # What is inside a list moves with the list.
        for index, key in enumerate(keys):
            if isinstance(key, ListItem | TupleItem):
                inside = text_of(keys[index:])
                head = text[: -len(inside) - 1]
                if self._strips_wrappers:
                    inside = without_wrappers(inside)
                if not head:
                    return inside
                return joined(self.place(head), inside)
        return self.name(text)


def _check_places(entries: Sequence[Entry], olds: Mapping[str, Entry], path: str) -> None:
    """Raise UnsafeError if an entry was moved into another one, or to the place of a mapping of others.

    `olds` are the entries as they were, by their new texts.
    """
    leaves = {entry.text: entry.leaf for entry in entries}
    for text in leaves:
        *above, _ = paths_above(text)
        for place in above:
            # An empty mapping takes what others put into it.
            if leaves.get(place, {}) == {}:
                continue
            for moved in (text, place):
                if olds[moved].text != moved:
                    what = f"rename moves {olds[moved].text!r} into another entry of the source, or to its place"
                    raise UnsafeError(f"{what}: change rename", name=place, path=path)


def _are_one_tensor(entry: Entry, other: Entry) -> bool:
    """Whether two entries are names of one tensor."""
    return isinstance(entry.leaf, SavedTensor) and are_equal(entry.leaf, other.leaf)


def _kept_keys(keys: Path, text: str) -> Path:
    """Return the last keys with which a new text still ends: what moves with its mapping keeps its keys."""
    end, count = len(text), 0
    for key in reversed(keys):
        part = str(key)
        begin = end - len(part)
        if begin < 0 or text[begin:end] != part or (begin > 0 and text[begin - 1] != "."):
            break
        count, end = count + 1, begin - 1
    return keys[len(keys) - count :]


def has_wrappers(names: Collection[str], state: Leaf) -> bool:
    """Whether names of a source have parts that wrappers have put into them, and those of the state do not.

    Names of live modules have none; a mapping of the state may, as the state dict of a compiled model.
    """
    if find_wrapper("\n".join(names)) is None:
        return False
    # A model may have a tensor under both names: then these parts are no wrapper's.
    if {*map(without_wrappers, names)} <= {*names}:
        return False
    for step in walk(state, lambda _, value: isinstance(value, Mapping) and not is_module(value)):
        # Each key is the last one of a step.
        key = str(step.keys[-1]) if step.keys else ""
        if key != without_wrappers(key):
            return False
    return True


@dataclass(slots=True)
class Matching:
    """The entries of a source, and what decides which of them fill a live state.

    Attributes:
        names: the filter of the load, with its options.
        entries: the entries of the source.
        objects: the present states of objects.
        has_tree: whether the source is a save of ours, with the names of parameters in the whole state.
        classes: the classes of optimizers that the source records, by path.
        path: that of the source, for errors.
        saved_by: the number of ranks that have saved; None if the source does not record it.
        loaded_by: the number of ranks that load.
        layout: the rules for live tensors that are parts of whole ones; one without rules if the load has none.
        renumbered: the source's names of tensors that the layout renumbers over all ranks.
        knows_owners: whether the source records which tensors belong to a rank: one that several ranks have saved, or
            as many as load.
        left_out: the paths of what a save was asked to leave out, by the names of the state.
    """

    names: NameFilter
    entries: Entries
    objects: ObjectStates
    has_tree: bool
    classes: Mapping[str, frozenset[str]]
    path: str
    saved_by: int | None
    loaded_by: int
    layout: Layout = field(init=False)
    renumbered: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    knows_owners: bool = field(init=False)

    def __post_init__(self) -> None:
        # A copy: it notes which patterns have matched, and a load may run twice.
        options = self.names.options
        self.layout = Layout({})
        if options.layout is not None:
            self.layout = options.layout.unmatched()
        self.knows_owners = self.saved_by == self.loaded_by or self.saved_by not in (None, 1)

    def leaves_out(self, path: str) -> bool:
        """Whether a save was asked to leave out what lies at a path: then it is left as it is."""
        return bool(self.left_out) and not self.left_out.isdisjoint(("", *paths_above(path)))

    def stored(self, text: str) -> list[Entry] | None:
        """Return the entries that fill a live tensor, several if a layout splits it; None if the source lacks one."""
        names: Sequence[str] = [text]
        if self.layout.rules:
            rule = self.layout.rule_for(text)
            if rule is not None:
                names = rule.names(text)
        entries = []
        for part in names:
            # Experts and layers have numbers of their own on each rank; those in the source follow from all ranks.
            name = self.renumbered.get(part, part)
            entry = self.entries.tensor(name)
            if entry is None:
                return None
            entries.append(entry)
        return entries

    def name_of_part(self, name: str) -> str:
        """Return the source's name of a tensor that a layout's rule has made of a live one."""
        name = self.renumbered.get(name, name)
        entry = self.entries.tensor(name)
        return name if entry is None else entry.leaf.name

    def parameter(self, name: str) -> SavedTensor | None:
        """Return the source's tensor of the parameter that has this name in the state; None if it has none."""
        # A layout's patterns may write the items of lists as "a[0]"; paths have dots.
        entry = self.entries.tensor(with_dots(name)) if name else None
        return None if entry is None else entry.leaf

    def is_like_parameter(self, saved: SavedTensor, parameter_name: str) -> bool:
        """Whether a tensor of an optimizer's state has its parameter's shape in the source, and a layout shards that.

        Then the live tensor is this rank's part of it, as the parameter is.
        """
        if not parameter_name or self.layout.rule_for(parameter_name) is None:
            return False
        parameter = self.parameter(parameter_name)
        return parameter is not None and parameter.shape == saved.shape


# What is changed


class Place(NamedTuple):
    """A place of the live state for a saved tensor that may need a new one.

    Attributes:
        live: the live tensor or array there, or None.
        is_filled: whether that itself is filled if the saved tensor fits, or else always a new one like it.
        parameter: the parameter whose optimizer state it is, or None.
        parameter_name: the parameter's name in the state, or "".
        is_step: whether it counts the parameter's steps.
        on_host: whether a new tensor lies on the CPU, wherever the parameter is.
    """

    live: Leaf = None
    is_filled: bool = True
    parameter: Leaf = None
    parameter_name: str = ""
    is_step: bool = False
    on_host: bool = False


def tensor_to_fill(matching: Matching, saved: SavedTensor, place: Place, path: str) -> Leaf:
    """Return the tensor of a place that a saved one is read into.

    It is the live one if the saved one fits into it. A new one is like the live one, or else like the parameter whose
    state it is: it lies on the same device, and is a DTensor on the same mesh. Where torch is not installed, it is an
    array of numpy.

    Args:
        matching: the load.
        saved: the saved tensor.
        place: the place.
        path: the path of the place, for errors.

    Raises:
        ReplicaError: it may be a value for each row of a parameter, of which this rank has only some.
        CorruptError: files of the source disagree on the tensor.
    """
    if saved.problem is not None:
        raise saved.problem
    live, parameter = place.live, place.parameter
    shape = saved.shape
    if matching.layout.rules and matching.is_like_parameter(saved, place.parameter_name):
        shape = tuple(parameter.shape)  # a part, as the parameter is
    if not matching.knows_owners:
        _check_is_of_all_ranks(matching, saved, shape, parameter, path)
    is_live_torch = is_torch(live)
    if place.is_filled and (is_live_torch or is_array(live)) and tuple(live.shape) == shape:
        dtype = name_of_dtype(live.dtype) or ""
        has_dtype = dtype == saved.dtype or matching.names.options.casts(saved.dtype, dtype)
        # A fused or capturable optimizer wants its counts of steps beside the parameters, all others on the CPU.
        moves = place.is_step and not place.on_host and live.device != parameter.device
        if has_dtype and not moves:
            return live
    like = parameter
    if is_live_torch and not place.is_step:
        like = live
    if is_array(live) or (like is None and not is_installed("torch")):
        return np.empty(shape, numpy_dtype(saved.dtype))
    return _new_tensor(matching, saved, shape, place, like)


def _check_is_of_all_ranks(
    matching: Matching, saved: SavedTensor, shape: tuple[int, ...], parameter: Leaf, path: str
) -> None:
    """Raise ReplicaError for a whole tensor beside a sharded parameter that is neither a scalar nor of its shape.

    It may be a value for each row of the parameter, of which this rank has only some. A save of several ranks records
    what belongs to a rank; one of a single rank, or of torch, does not show that the parameter would be sharded.
    """
    if saved.cut_dims or shape == () or not is_sharded(parameter):
        return
    expected = tuple(parameter.shape)
    if shape != expected:
        ranks = format_number(matching.saved_by or 1, "rank")
        raise ReplicaError(
            f"state of a sharded parameter has neither its shape nor is it a scalar: {ranks} saved it, and "
            f"{matching.loaded_by} load it, each with a part of the parameter; exclude={path!r} leaves it",
            name=path,
            path=matching.path,
            expected=expected,
            found=shape,
        )


def _new_tensor(matching: Matching, saved: SavedTensor, shape: tuple[int, ...], place: Place, like: Leaf) -> Leaf:
    """Return a new tensor of `shape`, like the live tensor or parameter `like` if that is not None."""
    import torch

    dtype = torch_dtype(saved.dtype)
    # A quantized or sparse tensor has no form that another dtype or shape could have.
    if like is None or place.on_host or like.layout is not torch.strided or like.is_quantized:
        return torch.empty(shape, dtype=dtype)
    has_shape = tuple(like.shape) == shape
    if has_shape and not place.is_step and matching.names.options.casts(saved.dtype, checked_dtype(like, saved.name)):
        dtype = like.dtype
    if has_shape and not (is_dtensor(like) and _was_whole(matching, saved, place, like)):
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    if is_dtensor(like) and saved.cut_dims:
        return new_dtensor(like, shape, dtype, set(saved.cut_dims))
    return torch.empty(shape, dtype=dtype, device=like.device)


def _was_whole(matching: Matching, saved: SavedTensor, place: Place, like: Leaf) -> bool:
    """Whether each rank that saved had the whole of this tensor, and a part of its parameter: then it was a plain one.

    A tensor of the parameter's shape is else taken for one that lies as the parameter does.
    """
    if saved.cut_dims or like is not place.parameter:
        return False
    parameter = matching.parameter(place.parameter_name)
    return parameter is not None and bool(parameter.cut_dims)


class LoadTarget(NamedTuple):
    """A live tensor that is to be filled.

    Attributes:
        name: the source's name of the tensor that it is filled with; None if a layout's rule names the parts.
        live: the live tensor.
        path: its path in the state, for messages and layouts.
        parameter_name: the parameter whose optimizer state it is, or "".
    """

    name: str | None
    live: Leaf
    path: str
    parameter_name: str = ""


@dataclass(slots=True)
class LoadPlan:
    """The steps that turn a live state into the saved one.

    Example:
        `fill` of the saved value ``{"exp_avg": SavedTensor("o.m"), "step": 3}``, beside a live dict without entries,
        returns ``{"exp_avg": <a new tensor>, "step": 3}``, and the new tensor is a target of the plan.

    Attributes:
        matching: the load.
        targets: the tensors to be read.
        callbacks: to be called, in order, once the tensors are read.
        missing: paths of the live state that the source lacks.
        stateful: those among them that are of tensors or of objects with a state.
        unexpected: paths of the source that the live state lacks.
        tolerated: those of `missing` and `unexpected` that are no error with ``strict``.
        loaded: the paths of all that is loaded, in the source by the names of the state.
        matched: the paths of all entries of the source that the live state has a place for, loaded or not.
        conflicts: parameters of optimizers for which ranks saved different hyperparameters, or other state, by path.
        num_values: the number of plain values that are loaded.
    """

    matching: Matching
    targets: list[LoadTarget] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    stateful: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    tolerated: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    matched: set[str] = field(default_factory=set)
    conflicts: Conflicts = field(default_factory=dict)
    num_values: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is loaded."""
        return not (self.targets or self.callbacks or self.num_values)

    def add_loaded(self, entries: Iterable[Entry]) -> None:
        """Add entries of the source that are loaded."""
        for entry in entries:
            self.matched.add(entry.text)
            self.loaded.add(entry.text)

    def add_missing(self, path: str, *, stateful: bool = True) -> None:
        """Add a path of the live state that the source lacks, unless it was asked to leave that out."""
        if self.matching.leaves_out(path):
            return
        self.missing.append(path)
        if stateful:
            self.stateful.add(path)

    def fill(self, saved: Leaf, path: str, place: Place = Place()) -> Leaf:  # noqa: B008 (immutable)
        """Return a saved value with tensors, in containers of the types of the live value, `place.live`."""
        if isinstance(saved, SavedTensor):
            live = tensor_to_fill(self.matching, saved, place, path)
            self.targets.append(LoadTarget(saved.name, live, path, place.parameter_name))
            return live
        if isinstance(saved, PLAIN):
            return saved
        # The tree of a save is JSON: an OrderedDict of the live state was saved as a mapping like any other.
        with named(path):
            return with_types_of(place.live, self._with_tensors(saved, path, place))

    def _with_tensors(self, saved: Leaf, path: str, place: Place) -> Leaf:
        if isinstance(saved, SavedTensor):
            return self.fill(saved, path, place)
        items = children(saved)
        if items is None:
            refuse_opaque(saved, path)
            return saved
        # An object that is a leaf may have items, too, but they are not places of the state.
        live_items = {} if is_leaf(place.live) else children(place.live) or {}
        new = {}
        for key, item in items.items():
            # A key may be of a type that only the job that saved it had.
            if type(key) is not str:
                refuse_opaque(key, path)
            if isinstance(item, PLAIN):
                new[key] = item
            else:
                new[key] = self._with_tensors(item, joined(path, key), place._replace(live=live_items.get(key)))
        if isinstance(saved, list):
            return list(new.values())
        return new if type(saved) is dict else with_children(saved, new)

    def change(self, container: Leaf, change: Callable[[Leaf], object], path: str) -> None:
        """Plan the change of a mutable container; raise UnsupportedError if a copy of it refuses the change."""
        # A class of the user's may refuse, or check, what is put into it. Tried on a copy this is an error of the
        # plan; later it would be one of a state that is half loaded.
        with named(path):
            check_change(container, change)
        self.callbacks.append(functools.partial(change, container))


def name_of(stored: Sequence[Entry]) -> str | None:
    """Return the source's name of the one tensor that fills a live one; None if a layout splits that."""
    return stored[0].leaf.name if len(stored) == 1 else None


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Let an error about a container name its path, and say what to do."""
    try:
        yield
    except UnsupportedError as error:
        # An inner container has been named already.
        if error.name is not None:
            raise
        text = f"{error.message}: give a dict, list or tuple, or leave it out by exclude"
        raise UnsupportedError(text, name=path) from error.__cause__


def other_kind_error(wanted: str, saved: Leaf, path: str) -> InvalidArgumentError:
    """Return the error for a source that has something else at `path` than what the live state needs."""
    kind = type_text(saved)
    if isinstance(saved, SavedTensor):
        kind = "a tensor"
    elif isinstance(saved, list | tuple):
        kind = format_number(len(saved), "item")
    text = "this was saved as something else: build it as it was saved, or leave it out by exclude"
    return InvalidArgumentError(text, name=path, expected=wanted, found=kind)
