"""What a load checks between ranks: that all read the same checkpoint with the same options, and whose state it is.

On another number of ranks than saved it, a load refuses what belongs to one rank, and values that differ between ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all
from statexchange.errors import InvalidArgumentError, ReplacedError, ReplicaError
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.rank_metadata import check_equal_options
from statexchange.exchange.reading import differing_text
from statexchange.formats.source import Source
from statexchange.sharding.paths import paths_above
from statexchange.sharding.rules import with_dots
from statexchange.state.load_plan import LoadPlan
from statexchange.storage.files import digest
from statexchange.units import format_number

__all__ = ["check_same_source", "check_whose_state"]

_MOST_NAMES = 3  # that a message lists


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
    def of(cls, source: Source, request: LoadRequest) -> _OpenedSource:
        """Describe the source that this rank has opened."""
        content: list[object] = [source.kind, source.run, source.round, source.manifest]
        local = []
        for holder in source.files:
            # Two publications may have files of equal names and sizes. So ranks of one host also compare the files'
            # local identity, and all ranks compare their identity on a file system that hosts share.
            content += [holder.name, holder.nbytes, len(holder.tensors), holder.file.shared_identity]
            local.append(holder.file.local_identity)
        shown = source.path
        if source.round is not None:
            shown += f", round {source.round} of {source.run}"
        options = request.options.texts()
        if request.conversion is not None:
            options |= request.conversion.texts()
        return cls(_digest(content), _digest(local), source.path, shown, options, request.options.layout is not None)


def check_same_source(source: Source, request: LoadRequest, comm: Communicator) -> bool:
    """Return whether any rank has a layout; raise, on all ranks, for different checkpoints or options. Collective.

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
    return any(of_rank.has_layout for of_rank in opened)


def _digest(value: object) -> str:
    return digest(json.dumps(value).encode())


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
        text = differing_text(_shown(differing), _excluding(differing), rank, other)
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
    others = ""
    if len(names) == 2:
        others = " and 1 other entry"
    elif len(names) > 2:
        others = f" and {len(names) - 1} other entries"
    return f"different values of {names[0]!r}{others}"


def _places(loaded: Collection[str]) -> set[str]:
    """Return the paths of all that is loaded, and of what contains it."""
    places: set[str] = set()
    for text in loaded:
        places.update(paths_above(text))
    if places:
        places.add("")
    return places


def _excluding(names: Sequence[str]) -> str | list[str]:
    """Return what to pass as `exclude`: a few names, or patterns for the entries of the state that hold many."""
    # One level at a time, from the leaves: the pattern should leave out no more than it must.
    while len(names) > _MOST_NAMES:
        outer = set()
        for name in names:
            path = name.removesuffix(".*")
            outer.add(f"{path.rpartition('.')[0] or path}.*")
        if len(outer) == len(names):
            break
        names = sorted(outer)
    if len(names) == 1:
        return names[0]
    return list(names)
