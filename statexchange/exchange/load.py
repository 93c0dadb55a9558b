"""Load a checkpoint into live state, in place, from any mesh and placements into any other."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from statexchange.checkpoint.tensor_notes import note_on_overflows
from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.conversions.choice import Convert
from statexchange.errors import InvalidArgumentError, ReplacedError, StateExchangeError, type_text
from statexchange.exchange.converting import ChosenConversion, convert_for_load, with_names_in_memory
from statexchange.exchange.load_items import live_targets, place_targets, read_item, stored_entries
from statexchange.exchange.name_check import SHOWN, check_names, loads_nothing, selects_nothing
from statexchange.exchange.new_tensors import Filled, tensor_to_fill
from statexchange.exchange.opened_source import check_same, opened
from statexchange.exchange.reading import Overflows, ReadItem, assign_readers, read_all
from statexchange.exchange.shared_memory_check import check_shared_memory
from statexchange.exchange.source_entries import check_conflicts, check_ranks, has_tree, source_entries
from statexchange.exchange.stored_tensors import StoredTensors
from statexchange.formats.source import Source, abbreviated_names
from statexchange.processes import collector_paused
from statexchange.settings import check_progress
from statexchange.sharding import records
from statexchange.sharding.options import LoadOptions, Rename, Replicas
from statexchange.sharding.rules import Layout, renumber_names
from statexchange.sharding.shards import Box
from statexchange.sharding.wrappers import without_wrappers
from statexchange.state.describe import State
from statexchange.state.entries import Entries
from statexchange.state.flatten import flatten
from statexchange.state.leaves import contains_state
from statexchange.state.load_plan import LoadPlan, ObjectStates
from statexchange.state.match import Matching, match
from statexchange.state.modules import is_extra_state, is_module, live_items
from statexchange.state.name_filter import NameFilter
from statexchange.state.tree import walk
from statexchange.tensors import mark_changed
from statexchange.units import format_transfer

__all__ = ["LoadReport", "load_checkpoint", "load_now"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    `nbytes` were read from the source for `num_tensors`; `missing` are names of the state that the source lacks,
    `unexpected` those of the source that the state lacks. `step` is that of the save, None for any other source.
    `notes` are about values that a cast has made infinite, on any rank, and about this rank's parameters that are one
    tensor in the source. Root's are logged, too.
    """

    path: str
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float
    step: int | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        missing = f", {len(self.missing)} missing" if self.missing else ""
        unexpected = f", {len(self.unexpected)} unexpected" if self.unexpected else ""
        transfer = format_transfer(self.num_tensors, self.nbytes, self.seconds)
        return f"{transfer} <- {self.path}{missing}{unexpected}"


@public_call("load_checkpoint")
def load_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    strict: bool = True,
    layout: Mapping[str, Any] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    convert: Convert | None = None,
    convert_with: Mapping[str, int] | None = None,
    dtype: Literal["state"] | None = None,
    replicas: Replicas = "equal",
    on_progress: Callable[[int, int], None] | None = None,
    stall_timeout_s: float = 300.0,
) -> LoadReport:
    """Load the checkpoint at `path` into `state`, in place and bit for bit as it was saved.

    Collective over `comm`; blocks until all ranks are done. A rank reads what its own boxes need, so world size, mesh
    and placements may differ from those of the save. What several ranks of a host need is read once: from files through
    the page cache, from an object store by one rank, which sends it to the others. Shapes, dtypes and names are checked
    before anything is changed; a failure on any rank is raised on all. After a failure during reading, the state is
    part old, part new.

    Values that differ between ranks (e.g. RNG state) are restored per rank if the world size is unchanged. Otherwise
    they raise ReplicaError, unless `exclude` leaves them as they are or `replicas` is "root". So does the state of an
    object with ``per_rank = True``, even if it is equal on all ranks.
    Modules and optimizers whose `load_state_dict` does more than torch's, by hooks or overrides, load what was read.
    Tensors with no counterpart in state are created as torch tensors.

    Boxes that a rank reads whole are checked against their digests; `verify` checks all. All ranks read the same
    checkpoint: if it is replaced during the load, the new one is loaded instead; a second replacement is an error.

    `strict`, `dtype`, `replicas` and a layout's mesh must be the same on all ranks. `layout`, `include`, `exclude` and
    `rename` may otherwise differ, as between the stages of a pipeline.

    Args:
        state: a module, a mapping of names to tensors or a list of modules, with the source's names for tensors; or a
            nested mapping as for `save_checkpoint`, ``{"model": ..., "optimizer": ..., "step": 7}``, in which
            optimizers get state and param groups, objects with `load_state_dict` get their own state, and other entries
            are replaced. Megatron-Core's ShardedTensors are matched by their keys.
        path: a path or URL of anything that `merge_checkpoint` reads.
        comm: the communicator; by default the current one.
        strict: raise an error for names of the state that the source lacks and for names of the source that no rank
            has, as torch does; else the report lists them, and it is an error only if the source has no tensor of the
            state, or no entry of a state of plain values. Shapes and dtypes must be equal in any case. Plain values of
            a torch checkpoint that no rank has are listed by the report alone, and so is extra state of modules if a
            safetensors checkpoint has none, as an export. State of an optimizer of another shape
            or dtype than the saved one is replaced.
        layout: rules for plain tensors of `state` that are parts of whole ones, as in `export_checkpoint`, by their
            dotted paths: ``{"*.up.weight": Shard(0)}``. Optimizer state of a parameter's shape follows the parameter's
            rule. A rule that renames (split, renumber) is for sources of tensors alone, such as a Hugging
            Face checkpoint, and not for what `save_checkpoint` has written.
        include: shell patterns, one or several, of the names in `state` to load, by their dotted paths:
            ``"model.encoder.*"``, or ``"model"`` for all in it; the items of a list have their indices as names,
            ``"optimizers.0"``, and a dataclass its fields. All else stays as it is, is not read, and counts as neither
            missing nor unexpected.
            An optimizer or another object with a state of its own, or a list of plain values, is loaded whole if
            anything in it matches, as it was saved or as it is now. It is an error if nothing at all is selected on any
            rank; one of several patterns may match nothing.
        exclude: shell patterns, in the form of `include`, of the names in `state` to leave as they are: ``"random.*"``.
            An optimizer or another object with a state of its own, or a list of plain values, is left whole if anything
            in it matches, as it was saved or as it is now.
        rename: from the source's names to those in `state`: a function, or (regex, replacement) pairs, which are
            applied in order. Names are dotted paths; the parameters of optimizers are renamed too. What moves with its
            mapping keeps its keys. What is inside a list, or in the state of another object, is not renamed. Where a
            model of transformers has other names in memory than in its files, this gives the names of the files.
        convert: convert the source's model to the names and values of the state first: a built-in conversion such as
            "torchtitan:llama3", the path of a JSON file (`statexchange.conversions.rules`), or the file's content.
            "inverse:" before the name or path converts in the other direction. Only the model's tensors are loaded
            then. A name of the source without a rule is unexpected. `rename` applies to the names after the conversion.
        convert_with: numbers that the conversion needs, as ``{"n_heads": 32}``. Others come from the config of a state
            that is a model of transformers, or from a config.json beside the source.
        dtype: None: dtypes must be equal, and values are loaded bit for bit. "state": where floating dtypes (float16,
            bfloat16, float32, float64) differ, values are cast to that of the tensor in `state`, rounded to nearest;
            the report's `notes` name tensors in which finite values became infinite.
            Optimizer state that does not exist yet gets the parameter's dtype if it has its shape, else the source's.
        replicas: what to do if the number of ranks has changed and ranks saved different values of one region or plain
            value, such as BatchNorm's statistics under DistributedDataParallel: "equal" raises ReplicaError, "root"
            takes the lowest rank's. On the same number of ranks, each gets its own.
        on_progress: called with the bytes that this rank has read and those that it will read.
        stall_timeout_s: limit of the time in which no rank moves a byte; the total time is not limited. A rank that
            does not call at all is waited for until the communicator's `timeout_s`.

    Returns:
        The number of bytes and tensors that this rank has read, and the names that were missing or unexpected.

    Raises:
        NotFoundError: there is no known checkpoint at `path`, or with `strict` a name is missing from it.
        InvalidArgumentError: with `strict` a name is unexpected; a shape or dtype differs; an optimizer is of another
            class than the saved one; ranks passed different paths or options; a layout rule does not fit a tensor, or
            matches none; `include` and `exclude` leave nothing to load.
        IncompleteError: a rank's file or a region of a tensor is missing.
        OverlapError: two ranks saved overlapping regions of a tensor.
        ReplicaError: ranks saved different values of a region or plain value, or two live tensors share memory and the
            source has different values for them; then the state has been changed. Or what belongs to a rank was saved
            by another number of ranks.
        CorruptError: bytes differ from their digest, or files contradict each other.
        ReplacedError: the checkpoint was replaced during the load, twice.
        UnsafeError: `rename` gives two entries one name, or a path whose keys are not known.
        UnsupportedError, StorageError: see `statexchange.errors`.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.save_checkpoint({"model": {"w": torch.ones(2)}, "step": 7}, "saved")
        >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
        >>> report = sx.load_checkpoint(state, "saved")
        >>> state
        {'model': {'w': tensor([1., 1.])}, 'step': 7}
    """
    communicator = as_communicator(comm)
    began = time.perf_counter()
    given = {
        "strict": strict,
        "layout": layout,
        "include": include,
        "exclude": exclude,
        "rename": rename,
        "dtype": dtype,
        "replicas": replicas,
    }
    with communicator.phase("choosing its conversion"):
        check_progress(on_progress)
        conversion = ChosenConversion.of(convert, convert_with, state)
    return load_now(
        state,
        path,
        communicator,
        given,
        conversion=conversion,
        stall_timeout_s=stall_timeout_s,
        on_progress=on_progress,
        began=began,
    )


def load_now(
    state: State,
    path: str | os.PathLike[str],
    comm: Communicator,
    given: Mapping[str, Any],
    *,
    conversion: ChosenConversion | None = None,
    stall_timeout_s: float,
    on_progress: Callable[[int, int], None] | None = None,
    before_reading: Callable[[Sequence[ReadItem]], None] | None = None,
    began: float,
) -> LoadReport:
    """Load as `load_checkpoint` does, with the options `given`. Collective.

    `before_reading` is called on all ranks with what this rank will read, once all is checked and before the state is
    changed; it may be collective. The report counts seconds from `began`.
    """
    load = _Load(comm, conversion, stall_timeout_s, on_progress, before_reading, began)
    try:
        return load.run(state, path, given)
    except ReplacedError:  # raised on all ranks
        return load.run(state, path, given)


@dataclass(frozen=True, slots=True)
class _ComparedNames:
    """A rank's unexpected names, and whether it would load nothing; ranks compare these records."""

    unexpected: Sequence[str]
    is_empty: bool

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {"unexpected": list(self.unexpected), "is_empty": self.is_empty}

    @classmethod
    def from_json(cls, raw: Any) -> _ComparedNames:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        unexpected, is_empty = records.fields(raw, "unexpected", "is_empty")
        return cls(records.items(unexpected, records.text), records.flag(is_empty))


class _Load:
    """One call of `load_checkpoint`; it may run twice."""

    def __init__(
        self,
        comm: Communicator,
        conversion: ChosenConversion | None,
        stall_timeout_s: float,
        on_progress: Callable[[int, int], None] | None,
        before_reading: Callable[[Sequence[ReadItem]], None] | None,
        began: float,
    ) -> None:
        self._comm = comm
        self._conversion = conversion
        self._options: LoadOptions | None = None
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress
        self._before_reading = before_reading
        self._began = began

    def run(self, state: Any, path: str | os.PathLike[str], given: Mapping[str, Any]) -> LoadReport:
        """Load once, with the options that were given; collective."""
        comm = self._comm
        with contextlib.ExitStack() as holding:
            with collector_paused():
                with comm.phase("reading the headers", timeout_s=self._stall_timeout_s):
                    if self._options is None:  # once: a second run would find an iterator used up
                        self._options = LoadOptions(**given)
                    source = holding.enter_context(opened(path, state, comm, self._conversion))
                texts = {} if self._conversion is None else self._conversion.texts()
                has_layout = check_same(source, self._options, texts, comm)
                matched = _MatchedState(state, source, self._options, comm)
                with comm.phase("finding its tensors", timeout_s=self._stall_timeout_s):
                    # Only now: ranks compare the files, and may convert them in different ways.
                    matched.convert(self._conversion)
                    matched.find_entries()
                if has_layout:
                    matched.renumber()
                with comm.phase("finding its tensors", timeout_s=self._stall_timeout_s):
                    plan = matched.match()
                items = matched.items(plan, has_layout=has_layout, timeout_s=self._stall_timeout_s)
                self._compare_names(matched, plan)
            return self._fill(matched, plan, items)

    def _compare_names(self, matched: _MatchedState, plan: LoadPlan) -> None:
        """Raise, on all ranks, if names differ and that is an error. Collective."""
        comm, options = self._comm, matched.options
        sent = comm.all_gather_object(_ComparedNames(plan.unexpected, plan.is_empty).to_json())
        with comm.phase("comparing the names"):
            by_rank = [
                records.parsed(raw, _ComparedNames.from_json, "unexpected names", rank) for rank, raw in enumerate(sent)
            ]
            # A name is unexpected only if it is so on every rank.
            unexpected = [set(names.unexpected) for names in by_rank]
            plan.unexpected = [name for name in plan.unexpected if all(name in names for names in unexpected)]
            plan.unexpected += matched.without_rule
            if options.strict or loads_nothing(plan):
                check_names(matched.state, plan, matched.entries, matched.reasons(plan), matched.source.path)
            if (options.include or options.exclude) and all(names.is_empty for names in by_rank):
                raise InvalidArgumentError(selects_nothing(options), path=matched.source.path)

    def _fill(self, matched: _MatchedState, plan: LoadPlan, items: Sequence[ReadItem]) -> LoadReport:
        """Read the items, and run the plan's callbacks. Collective."""
        comm, source = self._comm, matched.source
        if self._before_reading is not None:
            self._before_reading(items)
        readers = assign_readers(items, comm) if source.opened.store.is_remote else {}
        with comm.phase("reading", timeout_s=self._stall_timeout_s):
            mark_changed(target.live for target in plan.targets)
            mark_changed(part for item in items for part in item.local.tensors)
            read, overflows = read_all(items, readers, comm, self._on_progress)
            check_shared_memory(items, comm)
            for callback in plan.callbacks:
                callback()
        names = (tuple(plan.missing), tuple(plan.unexpected))
        notes = matched.notes_on_lost_ties(plan) + self._notes(overflows)
        seconds = time.perf_counter() - self._began
        report = LoadReport(source.path, len(plan.targets), read, *names, seconds, source.step, notes)
        if comm.rank == 0:
            _log.info("loaded %s", report)
            for note in notes:
                _log.warning("loaded from %s: %s", report.path, note)
        return report

    def _notes(self, overflows: Sequence[Overflows]) -> tuple[str, ...]:
        """Return a note about what a cast has made infinite on any rank; each box counts once. Collective."""
        if self._options is None or self._options.dtype is None:  # equal on all ranks
            return ()
        sent = self._comm.all_gather_object([record.to_json() for record in overflows])
        by_box: dict[tuple[str, Box], int] = {}
        what = "the values that overflowed"
        for rank, raw in enumerate(sent):
            records_of_rank = records.parsed(raw, lambda raw: records.items(raw, Overflows.from_json), what, rank)
            by_box |= {(record.name, record.box): record.num_elements for record in records_of_rank}
        counts: Counter[str] = Counter()
        for (name, _), num_elements in by_box.items():
            counts[name] += num_elements
        return note_on_overflows(counts)


class _MatchedState:
    """The live state, the source, and what of them belongs together."""

    def __init__(self, state: Any, source: Source, options: LoadOptions, comm: Communicator) -> None:
        self.state = state
        self.source = source
        self.options = options
        self._comm = comm
        self.without_rule: tuple[str, ...] = ()
        self._lacking: Mapping[str, str] = {}
        self._aliases: dict[str, str] = {}
        self._objects = ObjectStates()
        self._live = flatten(state)
        self._names = NameFilter(options, self._live.units, strips_wrappers=_strips_wrappers(source, state))
        self._layout = Layout({}) if options.layout is None else options.layout.unmatched()
        self._renumbered: Mapping[str, str] = {}
        self._tensors: StoredTensors
        self.entries: Entries

    def convert(self, conversion: ChosenConversion | None) -> None:
        """Convert the source by a chosen conversion, or to the names that a model of transformers has in memory."""
        options, original = self.options, self.source
        if conversion is not None:
            self.source, self.without_rule = convert_for_load(original, conversion, strict=options.strict)
        elif options.layout is None:  # with one, shapes in memory are those of parts
            self.source, self._lacking = with_names_in_memory(original, self.state, options, self._names.name)
            if self.source is not original:
                name_of = self._names.name
                for file in original.files:  # aliases of tensors that stay as they are
                    self._aliases |= {name_of(alias): name_of(name) for alias, name in file.aliases.items()}
                self._names = NameFilter(replace(options, rename=()), self._live.units)

    def find_entries(self) -> None:
        """Find the entries of the source and of the live state."""
        comm, options = self._comm, self.options
        if not isinstance(self.state, Mapping) and not contains_state(self.state):
            text = f"the state is {type_text(self.state)}: give modules, optimizers or mappings"
            raise InvalidArgumentError(text, path=self.source.path)
        self._tensors = StoredTensors(self.source, options.replicas, comm.rank, comm.world_size, comm.progress)
        self._tensors.aliases |= {alias: name for alias, name in self._aliases.items() if name in self._tensors}
        with _located(self.source.path):
            self.entries = source_entries(
                self.source, self._tensors, self._names, self.state, self._live, self._objects
            )
        if has_tree(self.source, self._tensors):
            for rule in self._layout.rules.values():
                if rule.renames:
                    text = (
                        f"layout rule for {rule.pattern!r} renames tensors, and this source was saved with the names "
                        "that the state has: leave it out"
                    )
                    raise InvalidArgumentError(text, path=self.source.path)

    def renumber(self) -> None:
        """Find the source's names of tensors that a layout renumbers over all ranks. Collective."""
        names: dict[str, str] = {}
        layout = self._layout
        with self._comm.phase("naming its tensors"):
            if any(rule.renumber for rule in layout.rules.values()):
                for name in self._live_names():
                    rule = layout.rule_for(name)
                    names |= dict.fromkeys([name] if rule is None else rule.names(name), name)
        sent = self._comm.all_gather_object(names)
        with self._comm.phase("renumbering its tensors"):
            by_rank = {rank: records.parsed(raw, records.texts, "its names", rank) for rank, raw in enumerate(sent)}
            self._renumbered = renumber_names(by_rank, layout)[self._comm.rank]

    def _live_names(self) -> Iterator[str]:
        """Yield the names of the live tensors that are loaded."""
        for entry in self._live.entries:
            if entry.kind == "tensor" and self.options.wants(entry.text):
                yield entry.text
            elif entry.kind == "module":
                for name in live_items(entry.value)[0]:
                    path = f"{entry.text}.{name}" if entry.text else name
                    if self.options.wants(path):
                        yield path

    def match(self) -> LoadPlan:
        """Plan the load. Not collective."""
        source, options, tensors = self.source, self.options, self._tensors
        filled = Filled(tensors, self.entries, options, self._layout)
        tree = has_tree(source, tensors)
        matching = Matching(
            names=self._names,
            stored=lambda text, keys: stored_entries(text, keys, self.entries, self._layout, self._renumbered),
            allocate=partial(tensor_to_fill, filled),
            shape_of=tensors.shape_of if options.layout is None else None,
            objects=self._objects,
            has_tree=tree,
            classes={self._names.place(path): names for path, names in source.optimizers.items()},
        )
        with _located(source.path):
            plan = match(self.state, self._live, self.entries, matching)
        takes_root = options.replicas == "root"
        if tensors.own_rank is None:
            per_rank = {*map(self._names.place, source.per_rank), *self._live.per_rank}
            if tree or {tensors.world_size, source.world_size or 1} != {1}:
                check_ranks(per_rank, plan.loaded, tensors, takes_root=takes_root)
            if not takes_root:
                check_conflicts(self.entries.conflicts | plan.conflicts, plan.loaded, tensors)
        refusals = {self._names.name(name): error for name, error in source.unsupported.items()}
        for name in plan.missing:
            error = refusals.get(self._lacking.get(name, name))
            if error is not None:
                raise error
        if not tree:
            plan.unexpected += [name for name in refusals if name not in plan.missing and options.wants(name)]
        if source.kind == "huggingface" and not any(map(is_extra_state, tensors)):
            plan.tolerated.update(filter(is_extra_state, plan.missing))  # an export leaves it out
        return plan

    def reasons(self, plan: LoadPlan) -> list[str]:
        """Return the reasons why tensors are missing of which the source has some parts."""
        reasons = []
        for name in plan.missing[:SHOWN]:
            part = self._lacking.get(name)
            if part is not None:
                what = f"has shape {self._tensors.shape_of(part)}" if part in self._tensors else "is not"
                reasons.append(f"{name} is missing: {part} {what} in the source")
        return reasons

    def notes_on_lost_ties(self, plan: LoadPlan) -> tuple[str, ...]:
        """Return a note on parameters that are one tensor in the source and several here, as after `to_empty`."""
        live: dict[str, dict[int, str]] = {}
        for target in plan.targets if self._tensors.aliases else ():
            if target.name is not None and getattr(target.live, "requires_grad", False):  # only what trains will differ
                of_tensor = live.setdefault(self._tensors.aliases.get(target.name, target.name), {})
                of_tensor.setdefault(id(target.live), target.path)
        lost = [" and ".join(paths.values()) for paths in live.values() if len(paths) > 1]
        if not lost:
            return ()
        text = (
            f"{abbreviated_names(lost)}: one tensor in the source and several here, which differ after a training "
            "step; to train one, assign it to all these modules after to_empty (transformers: model.tie_weights())"
        )
        return (text,)

    def items(self, plan: LoadPlan, *, has_layout: bool, timeout_s: float) -> list[ReadItem]:
        """Return what is read for each target; collective if any rank has a layout."""
        comm, options = self._comm, self.options
        with comm.phase("finding its tensors", timeout_s=timeout_s):
            targets = live_targets(plan, self.entries, self._tensors, self._layout, self._renumbered, comm.rank)
        if has_layout:
            targets = place_targets(comm, targets, self._layout, selects=bool(options.include or options.exclude))
        with comm.phase("comparing the tensors", timeout_s=timeout_s):
            return [read_item(target, self._tensors, options) for target in targets]


@contextlib.contextmanager
def _located(path: str) -> Iterator[None]:
    """Let an error about the state name the source, too."""
    try:
        yield
    except StateExchangeError as error:
        raise (error if error.path is not None else error.located(path=path)) from error.__cause__


def _strips_wrappers(source: Source, state: Any) -> bool:
    """Whether names of the source have parts that wrappers have put into them, and those of the state do not.

    Names of live modules have none; a mapping of the state may, as the state dict of a compiled model.
    """
    names = {name for file in source.files for name in file.tensors}
    if all(name == without_wrappers(name) or without_wrappers(name) in names for name in names):
        return False
    steps = walk(state, lambda _, value: isinstance(value, Mapping) and not is_module(value))
    keys = (str(step.keys[-1]) for step in steps if step.keys)
    return all(key == without_wrappers(key) for key in keys)
