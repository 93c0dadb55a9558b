"""Load a checkpoint into live state, in place, from any mesh and placements into any other."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from statexchange.checkpoint.tensor_notes import note_on_overflows
from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.conversions.choice import Convert
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
)
from statexchange.exchange.catalog import Catalog
from statexchange.exchange.converting import ChosenConversion, convert_for_load, with_names_in_memory
from statexchange.exchange.new_tensors import tensor_to_fill
from statexchange.exchange.placing import parameter_names, place_parts
from statexchange.exchange.rank_metadata import check_equal_options
from statexchange.exchange.reading import Overflows, ReadItem, assign_readers, read_all
from statexchange.exchange.saved_tree import LivePlaces, SavedTree, check_ranks, check_unions
from statexchange.exchange.shared_memory_check import check_shared_memory
from statexchange.formats.registry import open_source
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, sections_of, select_section
from statexchange.formats.source import Source
from statexchange.processes import collector_paused
from statexchange.settings import check_progress
from statexchange.sharding import records
from statexchange.sharding.options import FLOATS, LoadOptions, Rename, Replicas
from statexchange.sharding.plan import prove_cover
from statexchange.sharding.rename_hint import suggest_rename
from statexchange.sharding.rules import renumber_names, with_dots
from statexchange.sharding.shards import Box
from statexchange.sharding.wrappers import WRAPPERS, without_wrappers
from statexchange.state.containers import children
from statexchange.state.describe import Description, LocalTensor, State, describe_entry
from statexchange.state.load_plan import NO_TREE, LoadPlan, Matching, ObjectStates, plan_load
from statexchange.state.merged_trees import SavedTensor
from statexchange.state.modules import is_module, live_items, module_items
from statexchange.state.names_tree import tree_from_names
from statexchange.state.source_names import SourceNames
from statexchange.state.tree import flatten, walk
from statexchange.storage.tensorfile import digest
from statexchange.tensors import check_writable, is_tensor, mark_changed, without_grad
from statexchange.units import format_transfer

__all__ = ["LoadReport", "load_checkpoint", "load_now"]

_log = logging.getLogger(__name__)
_SHOWN = 5
_KEYED_KINDS = ("dcp", "deepspeed", "torch")  # formats whose first keys show the sections


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    `nbytes` were read from the source for `num_tensors`; `missing` are names of the state that the source lacks,
    `unexpected` those of the source that the state lacks. `step` is that of the save, None for any other source.
    `notes` are about values that a cast has made infinite, on any rank; they are logged on root, too.
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
    before anything is changed; a failure on any rank is raised on all. After a failure during reading, each tensor is
    as it was, or as it was saved; one that was read in part, or whose bytes differ from their digest, is filled with
    NaN (all bits set) unless its old values are still there. The error says how many tensors have changed.

    Values that differ between ranks (e.g. RNG state) are restored per rank if the world size is unchanged. Otherwise
    they raise ReplicaError, unless `exclude` leaves them as they are or `replicas` is "root". So does the state of an
    object with ``per_rank = True``, even if it is equal on all ranks.
    Modules and optimizers whose `load_state_dict` does more than torch's, by hooks or overrides, load what was read.
    Tensors with no counterpart in state are created as torch tensors; where torch is not installed, as numpy arrays.

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
            a torch checkpoint that no rank has are listed by the report alone. State of an optimizer of another shape
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
            mapping keeps its keys. What is inside a list, or in the state of another object, is not renamed.
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
        load.reads_again = True
        return load.run(state, path, given)


@dataclass(frozen=True, slots=True)
class _OpenedSource:
    """The checkpoint that a rank has opened, and its options; ranks compare these records.

    `content` and `files` are digests. Equal `content` means the same checkpoint. Equal `files`, on ranks of one host,
    means the same files.
    """

    content: str
    files: str
    path: str
    shown: str
    options: Mapping[str, str]
    has_layout: bool

    @classmethod
    def of(cls, source: Source, options: LoadOptions, texts: Mapping[str, str]) -> _OpenedSource:
        """Describe the source that this rank has opened; `texts` are further options.

        Two publications may have files of equal names and sizes. So ranks of one host also compare the files' local
        identity, and all ranks compare their identity on a file system that hosts share.
        """
        holders = [[os.path.basename(holder.path), holder.nbytes, len(holder.tensors)] for holder in source.files]
        shared = [holder.file.shared_identity for holder in source.files]
        local = [holder.file.local_identity for holder in source.files]
        content = [source.kind, source.run, source.round, holders, source.manifest, shared]
        where = f", round {source.round} of {source.run}" if source.round is not None else ""
        shown = source.path + where
        has_layout = options.layout is not None
        return cls(_digest(content), _digest(local), source.path, shown, {**options.texts(), **texts}, has_layout)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {
            "content": self.content,
            "files": self.files,
            "path": self.path,
            "shown": self.shown,
            "options": dict(self.options),
            "has_layout": self.has_layout,
        }

    @classmethod
    def from_json(cls, raw: Any) -> _OpenedSource:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        content, files, path, shown, options, has_layout = records.fields(
            raw, "content", "files", "path", "shown", "options", "has_layout"
        )
        return cls(
            records.text(content),
            records.text(files),
            records.text(path),
            records.text(shown),
            records.texts(options),
            records.flag(has_layout),
        )


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
        self.reads_again = False

    def run(self, state: Any, path: str | os.PathLike[str], given: Mapping[str, Any]) -> LoadReport:
        """Load once, with the options that were given; collective."""
        with contextlib.ExitStack() as holding:
            with collector_paused():
                source, plan, items = self._plan(state, path, given, holding)
            return self._fill(source, plan, items)

    def _plan(
        self, state: Any, path: str | os.PathLike[str], given: Mapping[str, Any], holding: contextlib.ExitStack
    ) -> tuple[Source, LoadPlan, list[ReadItem]]:
        """Open the source, which `holding` closes; return it with the load plan and the items to read. Collective."""
        comm = self._comm
        with comm.phase("reading the headers", timeout_s=self._stall_timeout_s):
            if self._options is None:  # once: a second run would find an iterator used up
                self._options = LoadOptions(**given)
            options = self._options
            source = holding.enter_context(_opened(path, state, comm, self._conversion))
            without_rule: tuple[str, ...] = ()
            if self._conversion is not None:
                source, without_rule = convert_for_load(source, self._conversion, strict=options.strict)
            elif options.layout is None:  # with one, shapes in memory are those of parts
                source = with_names_in_memory(source, state)
        texts = {} if self._conversion is None else self._conversion.texts()
        has_layout = _check_same(source, options, texts, comm)
        with comm.phase("finding its tensors", timeout_s=self._stall_timeout_s):
            strips = _strips_wrappers(source, state)
            catalog = Catalog(source, options, comm.rank, comm.world_size, comm.progress, strips_wrappers=strips)
            objects = ObjectStates()
            tree = SavedTree.of(state, catalog, objects)
            if not has_layout:
                plan = _load_plan(state, catalog, tree, objects)
                items = [_read_item(target, catalog) for target in _targets(plan, catalog, comm.rank)]
        if has_layout:
            plan, items = self._plan_with_layout(state, catalog, tree, objects)
        sent = comm.all_gather_object(_ComparedNames(plan.unexpected, plan.is_empty).to_json())
        with comm.phase("comparing the names"):
            by_rank = [
                records.parsed(raw, _ComparedNames.from_json, "unexpected names", rank) for rank, raw in enumerate(sent)
            ]
            # A name is unexpected only if it is so on every rank.
            unexpected = [set(names.unexpected) for names in by_rank]
            plan.unexpected = [name for name in plan.unexpected if all(name in names for names in unexpected)]
            plan.unexpected += without_rule
            if options.strict or _loads_nothing(plan):
                _check_names(state, plan, catalog)
            if (options.include or options.exclude) and all(names.is_empty for names in by_rank):
                raise InvalidArgumentError(_selects_nothing(options), path=source.path)
        return source, plan, items

    def _fill(self, source: Source, plan: LoadPlan, items: Sequence[ReadItem]) -> LoadReport:
        """Read the items, and run the plan's callbacks. Collective."""
        comm = self._comm
        if self._before_reading is not None:
            self._before_reading(items)
        readers = assign_readers(items, comm) if source.opened.store.is_remote else {}
        with comm.phase("reading", timeout_s=self._stall_timeout_s):
            mark_changed(live for _, live, _ in plan.targets)
            mark_changed(part for item in items for part in item.local.tensors)
            read, overflows = read_all(items, readers, comm, self._on_progress, reads_again=self.reads_again)
            check_shared_memory(items, comm)
            for callback in plan.callbacks:
                callback()
        names = (tuple(plan.missing), tuple(plan.unexpected))
        notes = self._notes(overflows)
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

    def _plan_with_layout(
        self, state: Any, catalog: Catalog, tree: SavedTree | None, objects: ObjectStates
    ) -> tuple[LoadPlan, list[ReadItem]]:
        """Return the load plan and the items to read, if any rank has a layout. Collective."""
        catalog.renumbered = self._renumbered(state, catalog, None if tree is not None else objects)
        with self._comm.phase("finding its tensors", timeout_s=self._stall_timeout_s):
            plan = _load_plan(state, catalog, tree, objects)
            targets = _targets(plan, catalog, self._comm.rank)
        targets = self._placed(targets, catalog)
        with self._comm.phase("comparing the tensors", timeout_s=self._stall_timeout_s):
            return plan, [_read_item(target, catalog) for target in targets]

    def _renumbered(self, state: Any, catalog: Catalog, objects: ObjectStates | None) -> dict[str, str]:
        """Return the source's names of tensors that a layout renumbers over all ranks. Collective.

        `objects` is None if the source has a saved tree.
        """
        ours: dict[str, str] = {}
        layout = catalog.layout
        with self._comm.phase("naming its tensors"):
            if objects is not None and any(rule.renumber for rule in layout.rules.values()):
                tree = tree_from_names(state, SourceNames(lambda _: True, catalog.options), objects).tree
                live = [leaf.name for _, leaf in flatten(tree) if isinstance(leaf, SavedTensor)]
                for name in live:
                    rule = layout.rule_for(name)
                    ours |= dict.fromkeys([name] if rule is None else rule.names(name), name)
        sent = self._comm.all_gather_object(ours)
        with self._comm.phase("renumbering its tensors"):
            names = {rank: records.parsed(raw, records.texts, "its names", rank) for rank, raw in enumerate(sent)}
            return renumber_names(names, layout)[self._comm.rank]

    def _placed(self, targets: Sequence[_Target], catalog: Catalog) -> list[_Target]:
        """Return the targets with each part's boxes in its whole tensor. Collective."""
        tensors: dict[str, LocalTensor] = {}
        for target in targets:
            tensors.setdefault(target.name, target.local.renamed(target.name))
        layout = catalog.layout
        selects = catalog.options.include or catalog.options.exclude
        unused = () if selects else tuple(sorted(layout.unused))
        placed = place_parts(self._comm, Description(tensors, unused=unused), layout).tensors
        found = []
        for target in targets:
            whole = target.local
            if whole.part is not None:
                shard = replace(placed[target.name].shard, name=whole.shard.name)
                whole = replace(whole, shard=shard, part=None)
            found.append(target._replace(local=whole))
        return found


def _check_same(source: Source, options: LoadOptions, texts: Mapping[str, str], comm: Communicator) -> bool:
    """Raise, on all ranks, if they have opened different checkpoints or were given different options. Collective.

    Different checkpoints at one path are a ReplacedError, at different paths an InvalidArgumentError. Return whether
    any rank has a layout.
    """
    if comm.world_size == 1:
        return options.layout is not None
    ours = _OpenedSource.of(source, options, texts)
    sent = comm.all_gather_object(ours.to_json())
    found = [
        records.parsed(raw, _OpenedSource.from_json, "the description of the checkpoint", rank)
        for rank, raw in enumerate(sent)
    ]
    for rank, theirs in enumerate(found):
        other = next(first for first, node in enumerate(comm.nodes) if node == comm.nodes[rank])
        same_content, same_files = theirs.content == found[0].content, theirs.files == found[other].files
        if same_content and same_files:
            continue
        first = 0 if not same_content else other
        if theirs.path == found[first].path:
            raise ReplacedError(
                f"ranks {first} and {rank} opened different versions of this checkpoint, because it was replaced "
                "during the load: load again when nothing publishes to this path",
                path=theirs.path,
            )
        raise InvalidArgumentError(
            f"rank {first} opened {found[first].shown} and rank {rank} opened {theirs.shown}: pass the same path on "
            "all ranks",
            rank=rank,
            path=theirs.path,
        )
    check_equal_options([one.options for one in found])
    return any(one.has_layout for one in found)


def _digest(value: Any) -> str:
    return digest(json.dumps(value).encode())


def _opened(
    path: str | os.PathLike[str], state: Any, comm: Communicator, conversion: ChosenConversion | None
) -> Source:
    """Open the part of the source that the state needs; on several hosts NotFoundError names the one that lacks it.

    For a conversion that is the model. From a training framework's directory it is the model, too, unless the state is
    a mapping with sections as keys, which needs all parts.
    """
    names_sections = isinstance(state, Mapping) and any(key in SECTIONS for key in state)
    try:
        if conversion is not None:
            return open_source(path, section=None)
        source = open_source(path, section=ALL if names_sections else MODEL_OF_PARTS)
        return _model_for(state, source)
    except NotFoundError as error:
        if comm.num_nodes == 1:
            raise
        text = f"{error.message} on {comm.hosts[comm.rank]}; all hosts must see the source"
        raise NotFoundError(text, rank=comm.rank, path=error.path) from error


def _model_for(state: Any, source: Source) -> Source:
    """Return only the model's section of a job's state if `state` is a module without the section's prefix in names."""
    if not is_module(state) or source.kind not in _KEYED_KINDS:
        return source
    models = [section for section in sections_of(source) if section.name == "model" and section.prefix]
    if not models:
        return source
    (model,) = models
    own = module_items(state, keep_vars=True)
    return source if model.names & own.keys() else select_section(source, model.name)


# The load plan


def _load_plan(state: Any, catalog: Catalog, tree: SavedTree | None, objects: ObjectStates) -> LoadPlan:
    """Plan the load: the live tensors with their names in the source, and the callbacks that restore the rest."""
    options = catalog.options
    if tree is None:
        names = _source_names(catalog)
        with _located(catalog.source.path):
            named = tree_from_names(state, names, objects)
        saved, rank_tree, left_out, lacking = named.tree, NO_TREE, named.left_out, named.lacking
        matching = Matching(None, options.layout is None, named.ungrouped)
    else:
        saved, rank_tree, left_out, lacking = tree.tree, tree.rank_tree, tree.left_out, tree.lacking
        ungrouped = set() if rank_tree is not NO_TREE else {".".join(map(str, keys[:-1])) for keys in tree.unions}
        matching = Matching(catalog.old_names, options.layout is None, ungrouped, tree.optimizers)
    selects = options.include or options.exclude
    stays = partial(_stays, options, left_out | lacking) if selects or lacking else None
    allocate = partial(tensor_to_fill, catalog)
    if saved is NO_TREE:
        return LoadPlan()
    with _located(catalog.source.path):
        plan = plan_load(state, saved, allocate, objects, stays, rank_tree, matching)
    if tree is not None:
        check_unions(plan.plain if tree.rank_tree is NO_TREE else (), plan.differing, catalog, tree.unions)
    elif plan.plain and {catalog.world_size, catalog.source.world_size or 1} != {1}:
        # Other sources have one state of an object, whatever the number of ranks.
        check_ranks(LivePlaces.of(state).per_rank, map(with_dots, plan.plain), catalog)
    plan.missing += sorted(lacking.difference(plan.missing))
    if selects:
        places = LivePlaces.of(state) if tree is None else tree.places
        is_left_out = partial(_is_left_out, left_out)
        plan.missing = [path for path in plan.missing if not is_left_out(path) and places.may_want(path, options)]
    if tree is None:
        taken = {catalog.stored(one) for name, _, _ in plan.targets for one in catalog.names_of(name)}
        taken |= named.taken
        holding = [name for name, text in names.texts.items() if text not in ("{}", "[]")]
        found = [*catalog, *holding, *names.opaque, *map(catalog.new_name, catalog.source.unsupported)]
        plan.unexpected = [name for name in found if name not in taken and options.wants(name)]
    refusals = {catalog.new_name(name): error for name, error in catalog.source.unsupported.items()}
    # Where nothing fits, an entry that cannot be read, as a whole module, may be what was meant.
    meant = [*plan.missing, *([] if plan.targets or not plan.missing else plan.unexpected)]
    for name in filter(refusals.__contains__, meant):
        raise refusals[name]
    return plan


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


def _is_left_out(left_out: Container[str], path: str) -> bool:
    """Whether a path is left out. Those of a source without a saved tree have dots before indices."""
    return path in left_out or with_dots(path) in left_out


def _stays(options: LoadOptions, left_out: Container[str], path: str, value: Any) -> bool:
    """Whether the entry at `path` of a live mapping of plain values is not to be loaded, nor anything in it."""
    if _is_left_out(left_out, path):
        return True
    return not options.wants_object([step.path for step in walk(value, path=path) if not children(step.value)])


def _source_names(catalog: Catalog) -> SourceNames:
    """Return what the source has, by the state's names."""
    source = catalog.source
    return SourceNames(
        has=catalog.has,
        options=catalog.options,
        tensors={*catalog},
        texts={catalog.new_name(name): text for name, text in source.texts.items()},
        opaque={catalog.new_name(name): text for name, text in source.others.items() if name not in source.texts},
        shape_of=partial(_shape_of, catalog),
        renamed=catalog.new_name,
        leaves_out_empty=source.kind == "dcp",
        writes_empty=source.kind in ("torch", "lightning"),
        old_names=catalog.old_names,
    )


def _shape_of(catalog: Catalog, name: str) -> tuple[int, ...] | None:
    """Return the global shape of a tensor; None if plain live tensors may be parts of whole ones."""
    return None if catalog.options.layout is not None else catalog.shard_of(name).global_shape


class _Target(NamedTuple):
    """A live tensor at `path` of the state, or a part of one, and the catalog's name of its source."""

    name: str
    path: str
    local: LocalTensor
    is_padded: bool


def _targets(plan: LoadPlan, catalog: Catalog, rank: int) -> list[_Target]:
    """Describe the live tensors to fill; a layout's rule may split one into several."""
    layout = catalog.layout
    if layout.rules:
        like = {
            path: catalog.shape_like(name, parameter_names(path)) for name, _, path in plan.targets if name in catalog
        }
        layout.like = {path: parameter for path, parameter in like.items() if parameter is not None}
    found = []
    with without_grad():
        for name, live, path in plan.targets:
            is_padded = bool(getattr(live, "allow_shape_mismatch", False))
            for local in describe_entry(path, live, layout, rank):
                is_whole = local.shard.name == path
                source = name if is_whole else local.shard.name
                found.append(_Target(catalog.renumbered.get(source, source), path, local, is_padded))
    return found


def _loads_nothing(plan: LoadPlan) -> bool:
    """Whether the source lacks all tensors of the state, or all that a state without tensors has."""
    lacks_state = not plan.stateful.isdisjoint(plan.missing)
    return bool(plan.missing) and not plan.targets and (lacks_state or plan.is_empty)


def _selects_nothing(options: LoadOptions) -> str:
    """Return the message for patterns that leave nothing to load on any rank."""
    given = {"include": list(options.include), "exclude": list(options.exclude)}
    patterns = " and ".join(f"{option}={names}" for option, names in given.items() if names)
    return f"{patterns} selects no tensor and no value that both the source and the state have"


def _check_names(state: Any, plan: LoadPlan, catalog: Catalog) -> None:
    """Raise an error that lists all missing and unexpected names, as torch does."""
    value_names = {*map(catalog.new_name, catalog.source.others)}
    if not plan.missing and all(name in value_names for name in plan.unexpected):
        return
    lists = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("missing in the source", plan.missing), ("not in the state", plan.unexpected))
        if names
    ]
    if not plan.targets and not plan.num_values:
        what, general = "the source has no name of the state", ""
    elif _loads_nothing(plan):  # an error without `strict`, too
        what, general = "the source has no tensor of the state", ""
    else:
        what, general = "the names differ", "strict=False loads what both have"
    advice = [_hint(state, plan, catalog), general]
    text = "; ".join([what, *lists, *filter(None, advice)])
    kind = NotFoundError if plan.missing else InvalidArgumentError
    raise kind(text, path=catalog.source.path)


def _hint(state: Any, plan: LoadPlan, catalog: Catalog) -> str:
    """Return advice if the source has names for an optimizer's parameters, or the missing ones with another prefix."""
    if plan.nameless:
        return (
            f"the source has the parameters of {min(plan.nameless)!r} by their names in the state that was saved: "
            "give the state what has these parameters, too, under the same name; exclude leaves it as it is"
        )
    # Parameters of optimizers have the names of their tensors in the state. What is missing whole has several names.
    missing = [name for name in plan.missing if name not in plan.parameters]
    inside = {name: _names_in(state[name]) for name in missing if isinstance(state, Mapping) and name in state}
    missing = [f"{name}.{inner}" if inner else name for name in missing for inner in inside.get(name) or [""]]
    prefixes = dict.fromkeys(name.split(".", 1)[0] for name in catalog if "." in name)
    for prefix in sorted(prefixes, key=lambda prefix: (prefix != "model", prefix not in SECTIONS)):
        is_above = not plan.targets and missing and all(f"{prefix}.{name}" in catalog for name in missing)
        if is_above and prefix not in WRAPPERS:
            return f'the source has them under "{prefix}": give {{"{prefix}": state}}'
    free = {*catalog} - {name for name, _, _ in plan.targets}
    for prefix in dict.fromkeys(name.split(".", 1)[0] for name in missing if "." in name):
        if free.issuperset(name[len(prefix) + 1 :] for name in missing if name.startswith(f"{prefix}.")):
            is_key = isinstance(state, Mapping) and prefix in state
            if plan.targets and not is_key:  # it would move names that fit
                continue
            advice = f'give state["{prefix}"]' if is_key else f'rename=[("^", "{prefix}.")] gives them this name'
            return f'the source has them without "{prefix}": {advice}'
    found = suggest_rename(free, missing)
    return f"rename=[{found[:2]!r}] gives {found[2]} tensors of the source names of the state" if found else ""


def _names_in(value: Any) -> list[str]:
    """Return the names of the tensors in a module, or in a mapping."""
    if is_module(value):
        return [*live_items(value)[0]]
    return [step.path for step in walk(value) if is_tensor(step.value)] if isinstance(value, Mapping) else []


def _read_item(target: _Target, catalog: Catalog) -> ReadItem:
    stored, local = catalog.shard_of(target.name), target.local
    for part in local.tensors:
        check_writable(part, target.path)
    ours, theirs = local.shard.global_shape, stored.global_shape
    # The common part of a padded tensor is read.
    if ours != theirs and not (target.is_padded and len(ours) == len(theirs)):
        hint = "; build the state as it was saved, or leave this tensor out by exclude"
        if len(ours) == len(theirs) and local.placement is None and catalog.world_size > 1:
            dim = next(dim for dim in range(len(ours)) if ours[dim] != theirs[dim])
            hint = f'; if each rank holds a part, say so with layout={{"{target.path}": Shard({dim})}}'
        text = f"the state's shape differs from the source's{hint}"
        raise InvalidArgumentError(text, name=target.path, path=catalog.source.path, expected=theirs, found=ours)
    if local.shard.dtype != stored.dtype and not catalog.options.casts(stored.dtype, local.shard.dtype):
        castable = {stored.dtype, local.shard.dtype} <= set(FLOATS)
        hint = '; dtype="state" casts to the dtype that the state has' if castable else ""
        raise InvalidArgumentError(
            f"the state's dtype differs from the source's{hint}",
            name=target.path,
            path=catalog.source.path,
            expected=stored.dtype,
            found=local.shard.dtype,
        )
    boxes = catalog.boxes_of(target.name)
    try:
        prove_cover(target.name, stored.global_shape, catalog.holders_of(target.name))
    except (CorruptError, IncompleteError) as error:
        explained = catalog.source.explained(error)
        raise explained.located(name=target.name, path=catalog.source.path) from error
    return ReadItem(target.name, local, boxes, stored.dtype)
