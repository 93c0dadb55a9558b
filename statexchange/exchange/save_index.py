"""Gather the index of a save on root: which file has which boxes of each tensor, for its manifest."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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

    For each file it has the numbers of the groups of a mesh, and those of the groups of plain tensors, each with the
    rank in its mesh. Ranks with equal copies of plain tensors deal them out to each other: `groups` are this rank's, as
    they are encoded, since most ranks of a large job have none, or equal ones.
    """

    values: str
    of_mesh: list[list[tuple[int, int]]]
    plain: list[list[tuple[int, int]]]
    groups: bytes


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
        shared_here, own_here = messages_of_rank(saved, described, files, comm.rank)
        shared = gather_distinct(comm, shared_here, root=0)
        own = to_root(comm, own_here, "the places of its tensors")
        text = ""
        with comm.phase("indexing"):
            if comm.rank == 0:
                text, num_files = joined(shared, own)
                if len(text) > _ANY_TEXT and not is_readable(text, num_files, comm.world_size):
                    _log.warning("the save has boxes that follow no mesh, too many for its index: loads open all files")
                    text = ""
    return text


def messages_of_rank(
    saved: SavedState, described: Description, files: Sequence[Iterable[Shard]], rank: int
) -> tuple[bytes, bytes]:
    """Return what a rank sends of the shards of its files: what other ranks may have alike, and its own record."""
    shards_of_files, layouts = [], []
    for shards in files:
        shards_of_files.append(tuple(shards))
        layouts.append(tuple(described.tensors[shard.name].layout for shard in shards_of_files[-1]))
    state = {"aliases": dict(saved.described.aliases), **saved.owners}
    # All but the values is remembered from the last save: a step changes values, and no tensor's place.
    shared, own = _groups_of(LongTuple(shards_of_files), LongTuple(layouts), json.dumps(state), rank)
    return shared, encoded(replace(own, values=digest(saved.common.encode())), _Own)


@functools.lru_cache(4)
def _groups_of(
    files: LongTuple[tuple[Shard, ...]],
    layouts: LongTuple[tuple[MeshLayout, ...]],
    state: str,
    rank: int,
) -> tuple[bytes, _Own]:
    """Return the messages, without `values`, of each file's shards; `layouts` are what their meshes say.

    `state` is JSON text.
    """
    of_mesh: dict[tuple[SavedLayout, int, int], list[IndexedTensor]] = {}
    plain: dict[tuple[SavedLayout, int, int], list[IndexedTensor]] = {}
    for number, (shards, of_shards) in enumerate(zip(files, layouts, strict=True)):
        # By identity first: to compare layouts takes longer than all else here, and most tensors share a few objects.
        seen: dict[int, tuple[object, list[IndexedTensor]]] = {}
        for shard, layout in zip(shards, of_shards, strict=True):
            # A mesh also says where an uneven or an empty part lies.
            if layout.placement is not None:
                place, groups = _placed(layout.placement, layout.mesh_ranks, rank), of_mesh
            else:
                place, groups = layout_of(shard.global_shape, shard.boxes), plain
            if id(place) not in seen:
                seen[id(place)] = place, groups.setdefault((*place, number), [])
            seen[id(place)][1].append(IndexedTensor(shard.name, shard.dtype, shard.global_shape))
    shared, of_mesh_places = _listed(of_mesh, len(files))
    listed, places = _listed(plain, len(files))
    groups_here = b""
    if listed:
        groups_here = encoded(listed, list[Group])
    own = _Own("", of_mesh_places, places, groups_here)
    return encoded(_Shared(shared, IndexedState.from_json(json.loads(state))), _Shared), own


def _listed(
    groups: Mapping[tuple[SavedLayout, int, int], Sequence[IndexedTensor]], num_files: int
) -> tuple[list[Group], list[list[tuple[int, int]]]]:
    """Return the groups, and for each file the numbers of its groups with the rank in their meshes."""
    listed: list[Group] = []
    places: list[list[tuple[int, int]]] = [[] for _ in range(num_files)]
    for (layout, mesh_rank, file), tensors in groups.items():
        places[file].append((len(listed), mesh_rank))
        listed.append(Group(layout, tensors))
    return listed, places


@functools.lru_cache(256)
def _placed(placement: Placement, mesh_ranks: tuple[int, ...], rank: int) -> tuple[SavedLayout, int]:
    return SavedLayout(placement), mesh_ranks.index(rank) if mesh_ranks else rank


def joined(sent_shared: Sequence[bytes], sent_own: Sequence[bytes]) -> tuple[str, int]:
    """Return the text of the index of what all ranks have sent, and the number of its files.

    Files of frozen parameters come last, as in the manifest: of ranks 0 and 1 with one such file each, the order is
    0, 1, 0's frozen one, 1's frozen one.
    """
    shared: dict[bytes, _Shared] = {}
    plain: dict[bytes, list[Group]] = {b"": []}
    states: dict[bytes, int] = {}
    state_of: dict[bytes, int] = {}
    ranks: list[int] = []
    values: list[str] = []
    files: list[list[tuple[Group, int]]] = []
    frozen: list[list[tuple[Group, int]]] = []
    for rank, (data, own_data) in enumerate(zip(sent_shared, sent_own, strict=True)):
        if data not in shared:
            shared[data] = decode(data, _Shared, "what its files hold", rank)
            state_of[data] = states.setdefault(encoded(shared[data].state, IndexedState), len(states))
        own = decode(own_data, _Own, "the places of its tensors", rank)
        values.append(own.values)
        ranks.append(state_of[data])
        if own.groups not in plain:
            plain[own.groups] = decode(own.groups, list[Group], "what its files hold", rank)
        for number, (of_mesh, of_plain) in enumerate(zip(own.of_mesh, own.plain, strict=True)):
            groups = [(shared[data].groups[group], mesh_rank) for group, mesh_rank in of_mesh]
            groups += [(plain[own.groups][group], mesh_rank) for group, mesh_rank in of_plain]
            (frozen if number else files).append(groups)
    listed = [decode(data, IndexedState, "its state", 0) for data in states]
    return index_text([*files, *frozen], listed, ranks, values), len(files) + len(frozen)
