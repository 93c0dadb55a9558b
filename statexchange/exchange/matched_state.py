"""Match a source and a live state, before a load reads or changes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, ReplicaError, StateExchangeError, type_text
from statexchange.exchange.converting import ChosenConversion, convert_for_load, with_names_in_memory
from statexchange.exchange.load_items import (
    like_parameter,
    live_targets,
    place_targets,
    read_item,
    renumbered_names,
    stored_entries,
)
from statexchange.exchange.reading import ReadItem
from statexchange.exchange.source_entries import check_conflicts, check_ranks, has_tree, source_entries
from statexchange.exchange.stored_tensors import StoredTensors
from statexchange.formats.source import Source
from statexchange.lazy import is_installed
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.paths import paths_above
from statexchange.sharding.rules import Layout, with_dots
from statexchange.state.dtensors import is_sharded, new_dtensor
from statexchange.state.entries import Entries
from statexchange.state.flatten import flatten
from statexchange.state.leaves import contains_state
from statexchange.state.load_plan import LoadPlan, ObjectStates, Place
from statexchange.state.match import match
from statexchange.state.matching import Matching
from statexchange.state.modules import is_extra_state
from statexchange.state.name_filter import NameFilter, strips_wrappers
from statexchange.state.pretrained import adapter_names, is_adapter_model
from statexchange.state.saved_values import SavedTensor
from statexchange.tensors import is_array, is_dtensor, is_torch, memory_of, name_of_dtype, numpy_dtype, torch_dtype
from statexchange.units import format_number

__all__ = ["MatchedState"]


class MatchedState:
    """The live state, the source, and what of them belongs together: the plan of a load.

    A load calls `convert`, `find_entries`, `renumber` if any rank has a layout, `match` and `items`, in this order.

    Attributes:
        state: the live state.
        source: the source, converted if it had to be.
        options: those of the load.
        layout: the layout of the load, without any rule if it has none.
        without_rule: names of the source for which a conversion has no rule.
        entries: those of the source, after `find_entries`.
        tensors: the source's tensors by its own names, after `find_entries`.
        lacking: for a tensor of the state of which the source has some parts only, a part that it lacks.
    """

    def __init__(self, state: Any, source: Source, options: LoadOptions, comm: Communicator) -> None:
        self.state = state
        self.source = self._original = source
        self.options = options
        self._comm = comm
        self.without_rule: tuple[str, ...] = ()
        self.lacking: Mapping[str, str] = {}
        self._aliases: dict[str, str] = {}
        self._objects = ObjectStates()
        self._live = flatten(state)
        names = {name for file in source.files for name in file.tensors}
        self._names = NameFilter(options, self._live.units, strips_wrappers=strips_wrappers(names, state))
        self.layout = Layout({}) if options.layout is None else options.layout.unmatched()
        self._renumbered: Mapping[str, str] = {}
        self.tensors: StoredTensors
        self.entries: Entries

    def convert(self, conversion: ChosenConversion | None) -> None:
        """Convert the source by a chosen conversion, or to the names that a model of transformers has in memory."""
        options, original = self.options, self.source
        if conversion is not None:
            self.source, self.without_rule = convert_for_load(original, conversion, strict=options.strict)
        elif options.layout is None:  # with one, shapes in memory are those of parts
            self.source, self.lacking = with_names_in_memory(original, self.state, options, self._names.name)
            if self.source is not original:
                name_of = self._names.name
                for file in original.files:  # aliases of tensors that stay as they are
                    self._aliases |= {name_of(alias): name_of(name) for alias, name in file.aliases.items()}
                # The source was renamed, and lost wrappers' parts, before it was converted.
                self._names = NameFilter(replace(options, rename=()), self._live.units)

    def find_entries(self) -> None:
        """Find the entries of the source and of the live state."""
        comm, options = self._comm, self.options
        if not isinstance(self.state, Mapping) and not contains_state(self.state):
            text = f"the state is {type_text(self.state)}: give modules, optimizers or mappings"
            raise InvalidArgumentError(text, path=self.source.path)
        self.tensors = StoredTensors(self.source, options.replicas, comm.rank, comm.world_size, comm.progress)
        self.tensors.aliases |= {alias: name for alias, name in self._aliases.items() if name in self.tensors}
        with _located(self.source.path):
            self.entries = source_entries(self.source, self.tensors, self._names, self.state, self._live, self._objects)
        if has_tree(self.source, self.tensors):
            for rule in self.layout.rules.values():
                if rule.renames:
                    text = (
                        f"layout rule for {rule.pattern!r} renames tensors, and this source was saved with the names "
                        "that the state has: leave it out"
                    )
                    raise InvalidArgumentError(text, path=self.source.path)

    def renumber(self) -> None:
        """Find the source's names of tensors that a layout renumbers over all ranks. Collective."""
        self._renumbered = renumbered_names(self._comm, self._live, self.options, self.layout)

    def match(self) -> LoadPlan:
        """Plan the load. Not collective."""
        source, options, tensors = self.source, self.options, self.tensors
        tree = has_tree(source, tensors)
        matching = Matching(
            names=self._names,
            stored=lambda text, keys: stored_entries(text, keys, self.entries, self.layout, self._renumbered),
            allocate=partial(_tensor_to_fill, self),
            shape_of=tensors.shape_of if options.layout is None else None,
            objects=self._objects,
            has_tree=tree,
            classes={self._names.place(path): names for path, names in source.optimizers.items()},
        )
        with _located(source.path):
            plan = match(self.state, self._live, self.entries, matching)
        self._check_whose_it_is(plan)
        refusals = {self._names.name(name): error for name, error in source.unsupported.items()}
        others = [name for name in refusals if options.wants(name) and name not in plan.missing]
        # Where nothing fits, an entry that cannot be read, as a whole module, may be what was meant.
        for name in [*plan.missing, *(others if plan.missing and not plan.targets else ())]:
            meant = self.lacking.get(name, name)
            for refused, error in refusals.items():
                if meant in (refused, *paths_above(refused)):
                    raise error
        if not tree:
            plan.unexpected += others
        if is_adapter_model(self.state) and source is not self._original:
            self._leave_out_base(plan)
        if source.kind == "huggingface" and not any(map(is_extra_state, tensors)):
            plan.tolerated.update(filter(is_extra_state, plan.missing))  # an export leaves it out
        return plan

    def _leave_out_base(self, plan: LoadPlan) -> None:
        """Let what a PEFT model has besides its adapter be missing, if the source is an adapter alone."""
        adapter = {*adapter_names(self.state).values()}
        plan.missing = [name for name in plan.missing if name in adapter]

    def _check_whose_it_is(self, plan: LoadPlan) -> None:
        """Raise ReplicaError if another number of ranks has saved what belongs to a rank, or different values."""
        source, tensors, takes_root = self.source, self.tensors, self.options.replicas == "root"
        if tensors.own_rank is not None:
            return
        per_rank = {*map(self._names.place, source.per_rank), *self._live.per_rank}
        if source.world_size is not None or tensors.world_size != 1:
            check_ranks(per_rank, plan.loaded, tensors, takes_root=takes_root)
        if not takes_root:
            check_conflicts(self.entries.conflicts | plan.conflicts, plan.loaded, tensors)

    def items(self, plan: LoadPlan, *, has_layout: bool, timeout_s: float) -> list[ReadItem]:
        """Return what is read for each target; collective if any rank has a layout."""
        comm, options = self._comm, self.options
        with comm.phase("finding its tensors", timeout_s=timeout_s):
            targets = live_targets(plan, self.entries, self.tensors, self.layout, self._renumbered, comm.rank)
        if has_layout:
            targets = place_targets(comm, targets, self.layout, selects=bool(options.include or options.exclude))
        with comm.phase("comparing the tensors", timeout_s=timeout_s):
            return [read_item(target, self.tensors, options) for target in targets]


@contextlib.contextmanager
def _located(path: str) -> Iterator[None]:
    """Let an error about the state name the source, too."""
    try:
        yield
    except StateExchangeError as error:
        raise (error if error.path is not None else error.located(path=path)) from error.__cause__


def _tensor_to_fill(matched: MatchedState, name: str, place: Place, path: str) -> Any:
    """Return the tensor of this place that the saved one `name` is read into. Not collective.

    It is the live one if the saved one fits into it. A new one is like the live one, or else like the parameter whose
    state it is: it lies on the same device, and is a DTensor on the same mesh. As in torch's `load_state_dict`, a count
    of steps lies on the CPU, or on the parameter's device if the optimizer is fused or capturable. Where torch is not
    installed, the new tensor is an array of numpy.
    """
    shard, own = matched.tensors.shard_of(name), place.own
    stored = shard.dtype
    shape: Sequence[int] = shard.global_shape
    if like_parameter(name, place.parameter_name, matched.entries, matched.tensors, matched.layout):
        shape = tuple(place.parameter.shape)  # a shard, as the parameter is
    _check_is_of_all_ranks(matched, name, shape, place.parameter, path)
    if place.is_filled and _fits(matched, stored, shape, own):
        moves = place.is_step and not place.on_host and own.device != place.parameter.device
        if not moves:
            return own
    like = own if is_torch(own) and not place.is_step else place.parameter
    if is_array(own) or (like is None and not is_installed("torch")):
        return np.empty(shape, numpy_dtype(stored))
    return _new(matched, name, stored, shape, place, like)


def _check_is_of_all_ranks(matched: MatchedState, name: str, shape: Sequence[int], parameter: Any, path: str) -> None:
    """Raise ReplicaError for a whole tensor beside a sharded parameter that is neither a scalar nor of its shape.

    It may be a value for each row of the parameter, of which this rank has only some. A save of several ranks records
    what belongs to a rank; one of a single rank, or of torch, does not show that the parameter would be sharded.
    """
    source = matched.tensors.source
    is_recorded = matched.tensors.own_rank is not None or source.world_size not in (None, 1)
    if is_recorded or not is_sharded(parameter) or _cut_dims(matched, name):
        return
    if tuple(shape) not in ((), tuple(parameter.shape)):
        saved = format_number(source.world_size or 1, "rank")
        raise ReplicaError(
            f"state of a sharded parameter has neither its shape nor is it a scalar: {saved} saved it, and "
            f"{matched.tensors.world_size} load it, each with a part of the parameter; exclude={path!r} leaves it",
            name=path,
            path=source.path,
            expected=tuple(parameter.shape),
            found=tuple(shape),
        )


def _fits(matched: MatchedState, stored: str, shape: Sequence[int], own: Any) -> bool:
    """Whether a saved tensor can be read into the live one."""
    if not (is_torch(own) or is_array(own)) or tuple(own.shape) != shape:
        return False
    found = name_of_dtype(own.dtype) or ""
    return found == stored or matched.options.casts(stored, found)


def _new(matched: MatchedState, name: str, stored: str, shape: Sequence[int], place: Place, like: Any) -> Any:
    """Return a new tensor of `shape`, like the live tensor or parameter `like` if that is not None."""
    import torch

    dtype = torch_dtype(stored)
    if like is None or place.on_host or like.layout is not torch.strided or like.is_quantized:
        return torch.empty(shape, dtype=dtype)
    has_shape = tuple(like.shape) == shape
    if has_shape and not place.is_step and matched.options.casts(stored, memory_of(like, name).dtype):
        dtype = like.dtype
    if not is_dtensor(like):
        if has_shape:
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=like.device)
    cut = _cut_dims(matched, name)
    # Each rank had the whole tensor, and a part of the parameter: it was a plain one.
    is_plain = not cut and like is place.parameter and bool(_cut_dims_of_parameter(matched, place.parameter_name))
    if has_shape and not is_plain:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return new_dtensor(like, shape, dtype, cut) if cut else torch.empty(shape, dtype=dtype, device=like.device)


def _cut_dims(matched: MatchedState, name: str) -> set[int]:
    """Return the dims in which saved parts of a tensor are smaller than the whole; none if the source lacks it."""
    if name not in matched.tensors:
        return set()
    shape = matched.tensors.shape_of(name)
    boxes = [box for box in matched.tensors.boxes_of(name) if box.numel]
    return {dim for box in boxes for dim in range(len(shape)) if box.shape[dim] != shape[dim]}


def _cut_dims_of_parameter(matched: MatchedState, path: str) -> set[int]:
    parameter = matched.entries.at(with_dots(path)) if path else None
    if parameter is None or not isinstance(parameter.leaf, SavedTensor):
        return set()
    return _cut_dims(matched, parameter.leaf.name)
