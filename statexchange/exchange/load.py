"""Load a checkpoint into live state, in place, from any mesh and placements into any other."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from statexchange.checkpoint.tensor_notes import note_on_overflows
from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.conversions.choice import Convert
from statexchange.errors import InvalidArgumentError, NotFoundError, ReplacedError
from statexchange.exchange.converting import ChosenConversion
from statexchange.exchange.matched_state import MatchedState
from statexchange.exchange.name_check import compare_names
from statexchange.exchange.rank_metadata import check_equal_options
from statexchange.exchange.reading import Overflows, ReadItem, assign_readers, read_all
from statexchange.formats.registry import open_source
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, sections_of, select_section
from statexchange.formats.source import Source, abbreviated_names
from statexchange.processes import collector_paused
from statexchange.settings import check_progress
from statexchange.sharding import records
from statexchange.sharding.options import LoadOptions, Rename, Replicas
from statexchange.sharding.shards import Box
from statexchange.state.describe import State
from statexchange.state.load_plan import LoadPlan
from statexchange.state.modules import is_module, module_items
from statexchange.storage.files import digest
from statexchange.tensors import mark_changed
from statexchange.units import format_transfer

__all__ = ["LoadReport", "load_checkpoint", "load_now"]

_log = logging.getLogger(__name__)
_KEYED_KINDS = ("dcp", "deepspeed", "torch")  # formats whose first keys show the sections


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    `nbytes` were read from the source for `num_tensors`; `missing` are paths of the state that the source lacks,
    `unexpected` those of the source that the state lacks; each is the highest path below which the other side has
    nothing. `step` is that of the save, None for any other source. `notes` are about values that a cast has made
    infinite, on any rank, and about this rank's parameters that are one tensor in the source. Root's are logged, too.
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
            Of an optimizer the state of each parameter, ``"optimizer.state.NAME"``, and its hyperparameters,
            ``"optimizer.param_groups.NAME"``, are selected by themselves. Another object with a state of its own, or a
            list of plain values, is loaded whole if anything in it matches, as it was saved or as it is now. It is an
            error if nothing at all is selected on any rank; one of several patterns may match nothing.
        exclude: shell patterns, in the form of `include`, of the names in `state` to leave as they are: ``"random.*"``.
            Another object than an optimizer, or a list of plain values, is left whole if anything in it matches, as it
            was saved or as it is now; of an optimizer the state of one parameter, or its hyperparameters.
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
        UnsafeError: `rename` gives two entries one name, or moves one into another.
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
        comm = self._comm
        with contextlib.ExitStack() as holding:
            with collector_paused():
                with comm.phase("reading the headers", timeout_s=self._stall_timeout_s):
                    if self._options is None:  # once: a second run would find an iterator used up
                        self._options = LoadOptions(**given)
                    source = holding.enter_context(_opened(path, state, comm, self._conversion))
                texts = {} if self._conversion is None else self._conversion.texts()
                has_layout = _check_same(source, self._options, texts, comm)
                with comm.phase("finding its tensors", timeout_s=self._stall_timeout_s):
                    matched = MatchedState(state, source, self._options, comm)
                    # Only now: ranks compare the files, and may convert them in different ways.
                    matched.convert(self._conversion)
                    matched.find_entries()
                if has_layout:
                    matched.renumber()
                with comm.phase("finding its tensors", timeout_s=self._stall_timeout_s):
                    plan = matched.match()
                items = matched.items(plan, has_layout=has_layout, timeout_s=self._stall_timeout_s)
                compare_names(comm, matched, plan)
            return self._fill(matched, plan, items)

    def _fill(self, matched: MatchedState, plan: LoadPlan, items: Sequence[ReadItem]) -> LoadReport:
        """Read the items, and run the plan's callbacks. Collective."""
        comm, source = self._comm, matched.source
        if self._before_reading is not None:
            self._before_reading(items)
        readers = assign_readers(items, comm) if source.opened.store.is_remote else {}
        with comm.phase("reading", timeout_s=self._stall_timeout_s):
            # A DTensor has a version of its own beside that of its local part.
            mark_changed([target.live for target in plan.targets])
            mark_changed([part for item in items for part in item.local.tensors])
            read, overflows = read_all(items, readers, comm, self._on_progress, reads_again=self.reads_again)
            for callback in plan.callbacks:
                callback()
        names = (tuple(plan.missing), tuple(plan.unexpected))
        notes = _notes_on_lost_ties(plan, matched.tensors.aliases)
        if matched.options.dtype is not None:  # equal on all ranks
            notes += _notes_on_overflows(comm, overflows)
        seconds = time.perf_counter() - self._began
        report = LoadReport(source.path, len(plan.targets), read, *names, seconds, source.step, notes)
        if comm.rank == 0:
            _log.info("loaded %s", report)
            for note in notes:
                _log.warning("loaded from %s: %s", report.path, note)
        return report


def _notes_on_overflows(comm: Communicator, overflows: Sequence[Overflows]) -> tuple[str, ...]:
    """Return a note about what a cast has made infinite on any rank; each box counts once. Collective."""
    sent = comm.all_gather_object([record.to_json() for record in overflows])
    by_box: dict[tuple[str, Box], int] = {}
    what = "the values that overflowed"
    for rank, raw in enumerate(sent):
        records_of_rank = records.parsed(raw, lambda raw: records.items(raw, Overflows.from_json), what, rank)
        by_box |= {(record.name, record.box): record.num_elements for record in records_of_rank}
    counts: Counter[str] = Counter()
    for (name, _), num_elements in by_box.items():
        counts[name] += num_elements
    return note_on_overflows(counts)


def _notes_on_lost_ties(plan: LoadPlan, aliases: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on parameters that are one tensor in the source and several here, as after `to_empty`."""
    live: dict[str, dict[int, str]] = {}
    for target in plan.targets if aliases else ():
        if target.name is not None and getattr(target.live, "requires_grad", False):  # only what trains will differ
            of_tensor = live.setdefault(aliases.get(target.name, target.name), {})
            of_tensor.setdefault(id(target.live), target.path)
    lost = [" and ".join(paths.values()) for paths in live.values() if len(paths) > 1]
    if not lost:
        return ()
    text = (
        f"{abbreviated_names(lost)}: one tensor in the source and several here, which differ after a training "
        "step; to train one, assign it to all these modules after to_empty (transformers: model.tie_weights())"
    )
    return (text,)


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
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> _OpenedSource:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        *texts, options, has_layout = records.fields(raw, *cls.__dataclass_fields__)
        content, files, path, shown = map(records.text, texts)
        return cls(content, files, path, shown, records.texts(options), records.flag(has_layout))


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
