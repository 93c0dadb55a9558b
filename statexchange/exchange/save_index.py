"""Gather the index of a save on root: which file has which boxes of each tensor, for its manifest."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from statexchange.comm.communicator import Communicator, to_root
from statexchange.exchange.frozen_files import FrozenFile
from statexchange.exchange.rank_metadata import gather_distinct
from statexchange.messages import decode, encoded
from statexchange.sharding.sharding_spec import Placement
from statexchange.sharding.shards import LongTuple, Shard
from statexchange.state.describe import Description, MeshLayout
from statexchange.state.state_dict import SavedState
from statexchange.storage.files import digest
from statexchange.storage.publish.build import WrittenFile
from statexchange.storage.save_index import (
    Group,
    IndexedTensor,
    SavedLayout,
    index_text,
    is_readable,
    layout_of,
)
from statexchange.storage.tensorfile import IndexedState
from statexchange.tensors import collector_paused

__all__ = ["RankIndex", "gather_index", "index_of_rank", "joined"]

_log = logging.getLogger(__name__)
_ANY_TEXT = 1 << 20  # characters, of which no text takes more memory than a reader may use


@dataclass(frozen=True, slots=True)
class _Shared:
    """The part of a message that ranks of one mesh have alike: the groups of the mesh, and the state beside tensors."""

    groups: Sequence[Group]
    state: IndexedState


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of a message that differs between ranks.

    For each file it has the numbers of the groups of a mesh, and those of the others, each with the rank in its mesh.
    """

    values: str
    of_mesh: Sequence[Sequence[tuple[int, int]]]
    others: Sequence[Sequence[tuple[int, int]]]


class RankIndex(NamedTuple):
    """The encoded message of a rank to root: what other ranks may have alike, its other groups, and its own record.

    The other groups are those of plain tensors, which ranks with equal copies deal out to each other: they would make
    the messages of all ranks distinct.
    """

    shared: bytes
    others: bytes
    own: bytes


def gather_index(
    comm: Communicator,
    saved: SavedState,
    described: Description,
    file: WrittenFile,
    frozen: Mapping[str, FrozenFile],
) -> str:
    """Return the text of the index on root, "" elsewhere and for an index that readers would refuse. Collective.

    Args:
        comm: the communicator.
        saved: this rank's state.
        described: its tensors, whose meshes say where uneven parts lie.
        file: its file.
        frozen: its files of frozen parameters, in the order of the manifest.
    """
    files: list[Iterable[Shard]] = [file.content.shards]
    files += [of_key.shards.values() for of_key in frozen.values()]
    with collector_paused():
        here = index_of_rank(saved, described, files, comm.rank)
        shared, _ = gather_distinct(comm, here.shared, root=0)
        others, _ = gather_distinct(comm, here.others, root=0)
        own = to_root(comm, here.own, "the places of its tensors")
        text = ""
        with comm.phase("indexing"):
            if comm.rank == 0:
                text, num_files = joined(list(map(RankIndex, shared, others, own)))
                if len(text) > _ANY_TEXT and not is_readable(text, num_files, comm.world_size):
                    _log.warning("the save has boxes that follow no mesh, too many for its index: loads open all files")
                    text = ""
    return text


def index_of_rank(saved: SavedState, described: Description, files: Sequence[Iterable[Shard]], rank: int) -> RankIndex:
    """Return what a rank sends of the shards of its files."""
    shards_of_files, layouts = [], []
    for shards in files:
        shards_of_files.append(tuple(shards))
        layouts.append(tuple(described.tensors[shard.name].layout for shard in shards_of_files[-1]))
    state = {"aliases": dict(saved.described.aliases), **saved.owners}
    shared, others, *places = _groups_of(LongTuple(shards_of_files), LongTuple(layouts), json.dumps(state), rank)
    return RankIndex(shared, others, encoded(_Own(digest(saved.common.encode()), *places), _Own))


class _Groups(NamedTuple):
    """The groups of a rank's files: the messages of a `RankIndex`, and the numbers of the groups as in `_Own`."""

    shared: bytes
    others: bytes
    places_of_mesh: Sequence[Sequence[tuple[int, int]]]
    places_of_others: Sequence[Sequence[tuple[int, int]]]


@functools.lru_cache(4)
def _groups_of(
    files: LongTuple[tuple[Shard, ...]],
    layouts: LongTuple[tuple[MeshLayout, ...]],
    state: str,
    rank: int,
) -> _Groups:
    """Return the groups of each file's shards, whose `layouts` are what their meshes say; `state` is JSON text."""
    of_mesh: dict[tuple[SavedLayout, int, int], list[IndexedTensor]] = {}
    others: dict[tuple[SavedLayout, int, int], list[IndexedTensor]] = {}
    for number, (shards, of_shards) in enumerate(zip(files, layouts, strict=True)):
        # By identity first: to compare layouts takes longer than all else here, and most tensors share a few objects.
        seen: dict[int, tuple[object, list[IndexedTensor]]] = {}
        for shard, layout in zip(shards, of_shards, strict=True):
            # A mesh also says where an uneven or an empty part lies.
            if layout.placement is not None:
                place, groups = _placed(layout.placement, layout.mesh_ranks, rank), of_mesh
            else:
                place, groups = layout_of(shard.global_shape, shard.boxes), others
            if id(place) not in seen:
                seen[id(place)] = place, groups.setdefault((*place, number), [])
            seen[id(place)][1].append(IndexedTensor(shard.name, shard.dtype, shard.global_shape))
    listed_of_mesh = [Group(place, tensors) for (place, _, _), tensors in of_mesh.items()]
    shared = encoded(_Shared(listed_of_mesh, IndexedState.from_json(json.loads(state))), _Shared)
    listed = [Group(place, tensors) for (place, _, _), tensors in others.items()]
    num_files = len(files)
    return _Groups(shared, encoded(listed, list[Group]), _places(of_mesh, num_files), _places(others, num_files))


@functools.lru_cache(256)
def _placed(placement: Placement, mesh_ranks: tuple[int, ...], rank: int) -> tuple[SavedLayout, int]:
    return SavedLayout(placement), mesh_ranks.index(rank) if mesh_ranks else rank


def _places(groups: Iterable[tuple[SavedLayout, int, int]], num_files: int) -> list[list[tuple[int, int]]]:
    """Return, for each file, the numbers of its groups with the rank in their meshes."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(num_files)]
    for number, (_, mesh_rank, file) in enumerate(groups):
        places[file].append((number, mesh_rank))
    return places


def joined(sent: Sequence[RankIndex]) -> tuple[str, int]:
    """Return the text of the index of what all ranks have sent, and the number of its files."""
    shared: dict[bytes, _Shared] = {}
    others: dict[bytes, list[Group]] = {}
    states: dict[bytes, int] = {}
    state_of: dict[bytes, int] = {}
    ranks: list[int] = []
    values: list[str] = []
    files: list[list[tuple[Group, int]]] = []
    frozen: list[list[tuple[Group, int]]] = []
    for rank, message in enumerate(sent):
        if message.shared not in shared:
            held = shared[message.shared] = decode(message.shared, _Shared, "what its files hold", rank)
            state_of[message.shared] = states.setdefault(encoded(held.state, IndexedState), len(states))
        if message.others not in others:
            others[message.others] = decode(message.others, list[Group], "what its files hold", rank)
        own = decode(message.own, _Own, "the places of its tensors", rank)
        values.append(own.values)
        ranks.append(state_of[message.shared])
        for number, (of_mesh, of_others) in enumerate(zip(own.of_mesh, own.others, strict=True)):
            groups = [(shared[message.shared].groups[group], mesh_rank) for group, mesh_rank in of_mesh]
            groups += [(others[message.others][group], mesh_rank) for group, mesh_rank in of_others]
            (frozen if number else files).append(groups)
    listed = [decode(data, IndexedState, "its state", 0) for data in states]
    return index_text([*files, *frozen], listed, ranks, values), len(files) + len(frozen)
