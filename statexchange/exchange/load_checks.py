"""Checks of a load before anything changes: that all ranks read one checkpoint, whose state it is, and its names.

On another number of ranks than saved it, a load refuses what belongs to one rank, and values that differ between ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    ReplicaError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.reading import differing_text
from statexchange.formats.save_files import ListedFiles
from statexchange.formats.source import Source
from statexchange.sharding.options import check_equal_options
from statexchange.sharding.paths import paths_above
from statexchange.sharding.rules import with_dots
from statexchange.state.load_plan import LoadPlan
from statexchange.state.units import is_extra_state
from statexchange.units import format_number

_MOST_NAMES = 3  # whose values differ, that a message lists
_MOST_MISSING = 5  # that a message lists of names that are missing or unexpected
_ADVICE = (
    'rename=[("pattern", "replacement")] changes the names of the source; '
    'to add a prefix to those of the state, load {"prefix": state}; to remove it, load state["prefix"]'
)


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
    is_nfs: bool

    @classmethod
    def of(cls, source: Source, request: LoadRequest) -> _OpenedSource:
        """Describe the source that this rank has opened."""
        content: list[object] = [source.kind, source.run, source.round, source.manifest]
        local = []
        files = source.files
        # The files of a save with an index are not open, and need not be opened for this.
        if isinstance(files, ListedFiles):
            # The manifest names the id of each file, which is compared where the file is opened.
            content.append(source.save)
            files = ()
        for holder in files:
            # Two publications may have files of equal names and sizes. So ranks of one host also compare the files'
            # local identity, and all ranks compare their identity on a file system that hosts share.
            content += [holder.name, holder.nbytes, len(holder.tensors), holder.file.shared_identity]
            local.append(holder.file.local_identity)
        path = shown = source.path
        if source.round is not None:
            shown += f", round {source.round} of {source.run}"
        options = request.options.texts()
        if request.conversion is not None:
            options |= request.conversion.texts()
        has_layout, is_nfs = request.options.layout is not None, source.opened.store.is_nfs
        return cls(_digest(content), _digest(local), path, shown, options, has_layout, is_nfs)


def check_same_source(source: Source, request: LoadRequest, comm: Communicator) -> tuple[bool, bool]:
    """Return whether any rank has a layout, and whether what several hosts need is read once in the job. Collective.

    Different checkpoints or options raise on all ranks.

    Raises:
        ReplacedError: ranks have opened different checkpoints at one path.
        InvalidArgumentError: they have opened different paths, or have different options.
    """
    opened_here = _OpenedSource.of(source, request)
    opened = from_all(comm, opened_here, _OpenedSource, "the description of the checkpoint")
    for rank, of_rank in enumerate(opened):
        first_rank = 0
        if of_rank.content == opened[0].content:
            # Each host may have a copy of its own: files are compared with those of the host's first rank.
            first_rank = comm.nodes.index(comm.nodes[rank])
            if of_rank.files == opened[first_rank].files:
                continue
        first = opened[first_rank]
        if of_rank.path == first.path:
            raise ReplacedError(
                f"ranks {first_rank} and {rank} opened different versions of this checkpoint, because it was replaced "
                "during the load: load again when nothing publishes to this path",
                path=of_rank.path,
            )
        raise InvalidArgumentError(
            f"rank {first_rank} opened {first.shown} and rank {rank} opened {of_rank.shown}: pass the same path on "
            "all ranks",
            rank=rank,
            path=of_rank.path,
        )
    check_equal_options([of_rank.options for of_rank in opened])
    readers = request.options.readers
    if readers is None and any(of_rank.is_nfs for of_rank in opened):
        readers = "job"
    # A copy in memory is on each host, and an object store has no one server.
    is_once = readers == "job" and request.reading is None and not source.opened.store.is_remote
    return any(of_rank.has_layout for of_rank in opened), is_once and comm.num_nodes > 1


def _digest(value: object) -> str:
    return xxh3_128_hexdigest(json.dumps(value).encode())


def check_whose_state(plan: LoadPlan, loaded: LoadSource) -> None:
    """Raise ReplicaError if another number of ranks has saved what belongs to a rank, or different values."""
    matching, takes_root = loaded.matching, loaded.matching.names.options.replicas == "root"
    places = _places(plan.loaded)
    # A source that does not record its ranks is of one: it fits one rank, as that of a save by one does.
    if matching.saved_by is not None or matching.loaded_by != 1:
        per_rank = loaded.live.per_rank
        per_rank.update(map(matching.names.place, loaded.converted.source.per_rank))
        names = places & per_rank
        if takes_root:  # root's objects do, but no other rank's part of a parameter fits
            names.intersection_update(map(with_dots, loaded.tensors.names))
        if names:
            raise _other_ranks(min(names), loaded)
    if takes_root:
        return
    # Only what is loaded counts: `exclude` is the remedy that the error names.
    conflicts = matching.entries.conflicts | plan.conflicts
    differing = [name for name in conflicts if name in places]
    if differing:
        rank, other = conflicts[differing[0]]
        exclude = differing if len(differing) <= _MOST_NAMES else []
        text = differing_text(_shown(differing), exclude, rank, other)
        raise ReplicaError(text, rank=other, path=loaded.matching.path)


def _other_ranks(name: str, loaded: LoadSource) -> ReplicaError:
    """Return the error for what belongs to a rank.

    It is refused even if it is equal on all ranks: ranks with one random state draw the same numbers, and a position in
    one rank's part of the data repeats or skips samples in another.
    """
    leave = ""
    if name:
        leave = f": pass exclude={name!r} to leave it as it is on each rank"
    return ReplicaError(
        f"{name or 'the state'!r} belongs to a rank, and fits the same number of ranks only: "
        f"{format_number(loaded.matching.saved_by or 1, 'rank')} saved it, and the world size is "
        f"{loaded.matching.loaded_by} now{leave}",
        name=name or None,
        path=loaded.matching.path,
    )


def _shown(names: Sequence[str]) -> str:
    if not names[0]:
        return "different states"
    if len(names) == 1:
        return f"different values of {names[0]!r}"
    return f"different values of {names[0]!r} and {len(names) - 1} more"


def _places(loaded: Collection[str]) -> set[str]:
    """Return the paths of all that is loaded, and of what contains it."""
    places: set[str] = set()
    for text in loaded:
        places.update(paths_above(text))
    if places:
        places.add("")
    return places


def settle_names(plan: LoadPlan, loaded: LoadSource) -> None:
    """Settle which names are missing or unexpected where the source itself says more of them. Not collective.

    Raises:
        UnsupportedError: what is missing is in the source, in a form that cannot be read.
    """
    source, names = loaded.converted.source, loaded.matching.names
    unreadable: dict[str, UnsupportedError] = {}
    unexpected = []
    for stored, error in source.unsupported.items():
        name = names.name(stored)
        unreadable[name] = error
        if names.options.wants(name) and name not in plan.missing:
            unexpected.append(name)
    for name in plan.missing:
        for refused, error in unreadable.items():
            if name == refused or name in paths_above(refused):
                raise error
    # Where nothing fits, an entry that cannot be read, as a whole module, may be what was meant.
    if unexpected and plan.missing and not plan.targets:
        raise unreadable[unexpected[0]]
    if not loaded.matching.has_tree:
        plan.unexpected += unexpected
    if loaded.converted.adapter is not None:  # the base model has its weights already
        plan.missing = [name for name in plan.missing if name in loaded.converted.adapter]
    # An export leaves extra state out.
    if source.kind == "huggingface" and not any(map(is_extra_state, loaded.tensors.names)):
        plan.tolerated.update(filter(is_extra_state, plan.missing))


def compare_names(comm: Communicator, plan: LoadPlan, loaded: LoadSource) -> None:
    """Raise, on all ranks, if names of the state or of the source have no counterpart. Collective.

    A name is unexpected only if it is so on every rank. Without ``strict`` names are listed by the plan alone, unless a
    rank would load nothing. Plain values of a torch checkpoint that no rank has are no error, nor is extra state that a
    source of tensors alone cannot have.

    Raises:
        NotFoundError: the source lacks names of the state.
        InvalidArgumentError: the state lacks names of the source, or `include` and `exclude` leave nothing to load.
    """
    options, path = loaded.matching.names.options, loaded.matching.path
    everywhere, is_empty = {*plan.unexpected}, plan.is_empty
    if comm.world_size > 1:
        here = (plan.unexpected, is_empty)
        for unexpected, is_empty_there in from_all(comm, here, tuple[list[str], bool], "unexpected names"):
            everywhere.intersection_update(unexpected)
            is_empty &= is_empty_there
    with comm.phase("comparing the names"):
        plan.unexpected = [name for name in plan.unexpected if name in everywhere]
        differs = not plan.tolerated.issuperset([*plan.missing, *plan.unexpected])
        if differs and (options.strict or _loads_nothing(plan)):
            raise _names_error(plan, path)
        if is_empty and (options.include or options.exclude):
            patterns = []
            for option, names in (("include", options.include), ("exclude", options.exclude)):
                if names:
                    patterns.append(f"{option}={list(names)}")
            text = f"{' and '.join(patterns)} selects no tensor and no value that both the source and the state have"
            raise InvalidArgumentError(text, path=path)


def _loads_nothing(plan: LoadPlan) -> bool:
    """Whether the source lacks all tensors of the state, or all that a state without tensors has."""
    if not plan.missing or plan.targets:
        return False
    return plan.is_empty or not plan.stateful.isdisjoint(plan.missing)


def _names_error(plan: LoadPlan, path: str) -> StateExchangeError:
    """Return an error that lists all missing and unexpected names, as torch does."""
    missing = [name for name in plan.missing if name not in plan.tolerated]
    what, general = "the names differ", "strict=False loads what both have"
    # With something in common, strict=False would do; with nothing, it would hide the mistake.
    if not plan.targets and not plan.num_values:
        what, general = "the source has no name of the state", ""
    elif _loads_nothing(plan):  # an error without `strict`, too
        what, general = "the source has no tensor of the state", ""
    parts = [what]
    for names, problem in ((missing, "missing in the source"), (plan.unexpected, "not in the state")):
        if names:
            listed = names[:_MOST_MISSING]
            if len(names) > _MOST_MISSING:
                listed.append("...")
            parts.append(f"{len(names)} {problem}: {', '.join(listed)}")
    text = "; ".join(filter(None, [*parts, _ADVICE, general]))
    if missing:
        return NotFoundError(text, path=path)
    return InvalidArgumentError(text, path=path)
