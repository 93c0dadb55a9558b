"""Agree which rank writes each tensor of a save that several ranks hold, so that each box is written once.

Ranks along a mesh axis that replicates a DTensor have the same boxes of it: the mesh declares copies, and one of these
ranks writes them (declared_copies.py finds copies that differ all the same, and there is no save). Data-parallel ranks
have the same plain parameters, which nothing declares: whether these are equal is decided anew at each save, by digests
of their bytes. Equal bytes decide who writes, and never what a tensor is: what differs is each rank's own, is written
by each, and comes back to each.

Tensors are grouped by the ranks that may have copies: those that its mesh says for a DTensor, all ranks for others. In
a group ranks with the same names, dtypes and shapes are compared::

    what ranks send each other                                      when
    for each group a digest of its names and shapes, and for each   always: about 100 bytes from each rank
    unit (a first key of the state) of plain tensors a digest of
    its digests
    the digest of each tensor of a unit                             the unit differs, as statistics of batches do
    the names of a group, each distinct list once                   ranks have other names, as pipeline stages do
    a record of the boxes that it writes, for the proof that each   always: about 100 bytes from each rank, and two
    element is there once                                           hashes for each part that lies on no mesh

A tensor whose name ranks of two such groups have, as two stages may, is each rank's own, too. For this the names of
empty tensors, and of those that no other rank can have, are compared as well. So a tensor has either one copy in the
save, or one from each rank that has it, and no record is needed of whose copy stands for a rank's own.

The choice itself, and the sum of the proof, are in sharding/plan.py.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import CorruptError, IncompleteError
from statexchange.exchange.rank_metadata import decode_distinct, gather_distinct
from statexchange.exchange.staging import shard_data
from statexchange.messages import decode, encoded
from statexchange.sharding.plan import RankShards, cover_sum, covers_evenly, plan_merge, plan_writers
from statexchange.sharding.shards import Box, LongTuple, Shard
from statexchange.state.describe import LocalTensor, MeshLayout
from statexchange.storage.files import digest
from statexchange.storage.rank_writer import digests_of
from statexchange.tensors import collector_paused

_WHOLE, _PARTS, _ALONE = "whole", "parts", "alone"  # kinds that are no list of ranks
_ADVICE = "no load could read it: give tensors of different pipeline stages different names, or correct the layout"


class Shares(NamedTuple):
    """This rank's share of the writing.

    Attributes:
        written: the tensors that it writes.
        digests: the digests of the boxes of each tensor that was compared, or that another rank writes.
    """

    written: Sequence[LocalTensor]
    digests: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Record:
    """The record of one group of tensors that a rank sends to the others.

    Attributes:
        kind: the ranks that have copies by a mesh, as text; of other tensors "whole" and "parts", which any rank may
            have, and "alone", which none has.
        mesh: the mesh, as text; "" for tensors without one.
        structure: a digest of the names, dtypes and shapes, of what is tied and of what lies in files of its own.
        boxes: a digest of the boxes.
        units: for each unit a digest of the digests of its tensors; () if a mesh says that these are copies.
    """

    kind: str
    mesh: str
    structure: str
    boxes: str
    units: tuple[str, ...]

    @property
    def has_declared_copies(self) -> bool:
        """Whether a mesh says that other ranks have copies of these tensors."""
        return self.kind not in (_WHOLE, _PARTS, _ALONE)

    @property
    def names(self) -> str:
        """A text that is equal for groups with the same tensors, whichever boxes of them a rank has by their mesh."""
        kind = "copies" if self.has_declared_copies else self.kind
        return f"{kind} {self.mesh} {self.structure}"

    @property
    def key(self) -> tuple[str, str, str]:
        """A key that is equal on the ranks that are compared."""
        return self.kind, self.names, self.boxes


class _Tensor(NamedTuple):
    """A tensor; `place` is its name and, for a part without a mesh, in a second line its boxes."""

    shard: Shard
    place: str


class _Group(NamedTuple):
    """This rank's tensors in a group, by unit; the record is without the units' digests."""

    record: _Record
    units: Sequence[Sequence[_Tensor]]

    @property
    def tensors(self) -> list[_Tensor]:
        """All tensors."""
        return [tensor for unit in self.units for tensor in unit]

    def digested(self, digests: Mapping[str, Sequence[str]]) -> _Record:
        """Return the record with the units' digests, from those of the boxes of each tensor."""
        if self.record.kind not in (_WHOLE, _PARTS):
            return self.record
        units = []
        for unit in self.units:
            units.append(_digest_of([" ".join(digests[tensor.shard.name]) for tensor in unit]))
        return replace(self.record, units=tuple(units))


def share_writing(
    comm: Communicator,
    tensors: Sequence[LocalTensor],
    aliases: Mapping[str, str],
    frozen: Collection[str],
    stall_timeout_s: float,
) -> Shares:
    """Choose what this rank writes of its tensors: all that it has alone, and its share of those with equal copies.

    Collective. Plain tensors are read once, for their digests, and so are those that another rank writes. `aliases` has
    the name that is kept for each other name of a tied tensor: one rank writes both, so that they are still tied in its
    file. `frozen` are the names of parameters that lie in files of their own: who writes them does not depend on any
    other tensor, so that the next save has the same files.

    Raises:
        IncompleteError, OverlapError: the ranks' boxes do not cover a tensor exactly once.
        CorruptError: one rank's part of a tensor is of another dtype or global shape than another rank's.
    """
    shards = LongTuple([local.shard for local in tensors])
    layouts = LongTuple([local.layout for local in tensors])
    tied, not_trained = LongTuple(aliases.items()), frozenset(frozen)
    with comm.phase("digesting its tensors", timeout_s=stall_timeout_s), collector_paused():
        groups = _groups(shards, layouts, tied, not_trained)
        # Of what lies on a mesh no bytes are needed to choose a writer: the mesh itself says who has copies.
        plain = [local for local in tensors if _kind_of(local.shard, local.layout) in (_WHOLE, _PARTS)]
        digests = digests_of(shard_data(plain), comm.progress)
        here = [group.digested(digests) for group in groups]
    records = from_all(comm, here, list[_Record], "the digests of its tensors")
    members = _members(records)
    in_several = _in_several_groups(comm, groups, records)
    apart = in_several | _differing(comm, groups, digests, records, members)
    left_to_others: set[str] = set()
    for group in groups:
        if group.record.kind == _ALONE:
            continue
        equal = LongTuple([tensor.shard for tensor in group.tensors if tensor.place not in apart])
        for name, writer in plan_writers(equal, tuple(members[group.record.key]), tied, not_trained).items():
            if writer != comm.rank:
                left_to_others.add(name)
    written = [local for local in tensors if local.shard.name not in left_to_others]
    _prove_cover(comm, shards, _cover_record(groups, frozenset(left_to_others), frozenset(in_several)))
    declared = False
    for of_rank in records:
        declared = declared or any(record.has_declared_copies for record in of_rank)
    if declared:  # on any rank: the phase is collective
        with comm.phase("digesting its copies", timeout_s=stall_timeout_s), collector_paused():
            # For declared_copies.py: the writer's digests come from its writing, and the others' from here.
            copies = [local for local in tensors if local.shard.name in left_to_others - digests.keys()]
            digests |= digests_of(shard_data(copies), comm.progress)
    return Shares(written, digests)


@dataclass(frozen=True, slots=True)
class _CoverRecord:
    """A record of what a rank writes, for the proof that each element is there once.

    Of "w" of shape (4, 3), cut by rows on a mesh of 2 ranks, rank 0 writes the box with the first element, and the
    group has this tensor alone: `begun` is {group: (1, 1)} there and {group: (0, 1)} on rank 1. By a layout instead,
    rank 0 has "w" in `firsts`, and rank 1 has nothing but its share of the `total`.

    Attributes:
        total: the `cover_sum` of the boxes that it writes, as text.
        begun: for each group of a mesh how many of its tensors the rank writes the first element of, and how many the
            group has; the key is a hash of the group's names.
        firsts: the other tensors whose first element it writes, once for each box, as `_hashes`.
        wholes: the whole tensors that lie in several groups.
        empty: the tensors of which it has no element, and that lie in no group of a mesh or in several groups.
    """

    total: str
    begun: Mapping[str, tuple[int, int]]
    firsts: Sequence[tuple[str, str]]
    wholes: Sequence[tuple[str, str]]
    empty: Sequence[tuple[str, str]]


@functools.lru_cache(4)
def _cover_record(
    groups: LongTuple[_Group], left_to_others: frozenset[str], in_several: frozenset[str]
) -> _CoverRecord:
    """Return the record of a rank that leaves some tensors to others; `in_several` are places in several groups."""
    begun: dict[str, tuple[int, int]] = {}
    firsts: list[tuple[str, str]] = []
    wholes: list[tuple[str, str]] = []
    empty: list[tuple[str, str]] = []
    written = []
    for group in groups:
        num_begun = num_tensors = 0
        for shard, place in group.tensors:
            num_firsts = 0
            if shard.name not in left_to_others:
                written.append(shard)
                num_firsts = _num_firsts(shard.boxes)
            # A whole tensor, which every rank writes or leaves to one with equal bytes, needs no proof, and one
            # without elements has none to lose.
            if 0 in shard.global_shape or (group.record.kind == _WHOLE and place not in in_several):
                continue
            if group.record.mesh and place not in in_several:
                num_begun += num_firsts
                num_tensors += 1
            elif not shard.nbytes:
                empty.append(_hashes(shard))
            elif shard.is_whole:
                wholes.append(_hashes(shard))
            else:
                firsts += [_hashes(shard)] * num_firsts
        if num_tensors:
            begun[digest(group.record.names.encode())] = num_begun, num_tensors
    return _CoverRecord(str(cover_sum(written)), begun, firsts, wholes, empty)


def _hashes(shard: Shard) -> tuple[str, str]:
    """Return a hash of the name, and one of the dtype and global shape, too."""
    return digest(shard.name.encode()), digest(f"{shard.name} {shard.dtype} {shard.global_shape}".encode())


@functools.lru_cache(1024)  # a model has many tensors of few shapes and placements
def _num_firsts(boxes: tuple[Box, ...]) -> int:
    """Return how many of the boxes have the first element of their tensor."""
    count = 0
    for box in boxes:
        if box.numel and not any(box.offsets):
            count += 1
    return count


def _are_there_once(records: Sequence[_CoverRecord]) -> bool:
    """Whether all ranks together write each element of each tensor once, or each rank its own whole tensor."""
    # The sum of all proves that each tensor's elements are written equally often: as often as its first one.
    if not covers_evenly(int(record.total) for record in records):
        return False
    # By a mesh a box has one writer, so that no tensor is there twice. If one were not there at all, its first
    # element would be missing.
    begun: dict[str, int] = {}
    expected: dict[str, int] = {}
    firsts: list[tuple[str, str]] = []
    wholes: list[tuple[str, str]] = []
    for record in records:
        firsts += record.firsts
        wholes += record.wholes
        for names, (num_begun, num_tensors) in record.begun.items():
            begun[names] = begun.get(names, 0) + num_begun
            expected[names] = num_tensors
    # Other parts may come from anywhere: two ranks may cut one tensor in two ways, or one may have the whole.
    begun_names = {name for name, _ in firsts}
    if begun != expected or len(begun_names) < len(firsts) or not begun_names.isdisjoint(name for name, _ in wholes):
        return False
    # A rank that has none of a tensor's elements knows the tensor all the same: somebody must write it.
    present = {*firsts, *wholes}
    return all(present.issuperset(record.empty) for record in records)


def _prove_cover(comm: Communicator, shards_here: Sequence[Shard], record: _CoverRecord) -> None:
    """Raise unless all ranks together write each element of each tensor once, or each rank its own. Collective."""
    if _are_there_once(from_all(comm, record, _CoverRecord, "the record of its boxes")):
        return
    # Only now all boxes travel to root, which finds the first flaw. There is none if two pipeline stages have
    # the same boxes of one name, and each writes them.
    sent = gather_distinct(comm, encoded([*shards_here], list[Shard]), root=0)
    with comm.phase("proving that each element is saved"):
        by_rank = [decode(data, list[Shard], "its boxes", rank) for rank, data in enumerate(sent)]
        # Whole tensors are each rank's own, and may differ in shape between ranks.
        partial: set[str] = set()
        for shards in by_rank:
            partial.update(shard.name for shard in shards if not shard.is_whole)
        holders = []
        for rank, shards in enumerate(by_rank):
            holders.append(RankShards(rank, [shard for shard in shards if shard.name in partial]))
        try:
            plan_merge(holders)
        except (CorruptError, IncompleteError) as error:
            raise error.located(advice=_ADVICE) from None


def _kind_of(shard: Shard, layout: MeshLayout) -> str:
    """Return the kind of the group in which a tensor is compared, as `_Record` has it."""
    # By its mesh also a part that is empty: so that all ranks of the mesh have groups of the same names.
    if layout.mesh:
        return layout.copies or _ALONE
    if not shard.nbytes:
        return _ALONE
    return _WHOLE if shard.is_whole else _PARTS


@functools.lru_cache(4)
def _groups(
    shards: LongTuple[Shard],
    layouts: LongTuple[MeshLayout],
    aliases_of: LongTuple[tuple[str, str]],
    frozen: frozenset[str],
) -> LongTuple[_Group]:
    """Return the groups of this rank's tensors; the names of tied ones come with the name that is kept."""
    aliases = dict(aliases_of)
    grouped: dict[tuple[str, str], dict[str, list[_Tensor]]] = {}
    # Sorted, as ranks may have filled a mapping in different orders.
    for shard, layout in sorted(zip(shards, layouts, strict=True), key=lambda pair: pair[0].name):
        name = shard.name
        kind = _kind_of(shard, layout)
        place = f"{name}\n{shard.boxes}" if kind == _PARTS else name
        units = grouped.setdefault((kind, layout.mesh), {})
        units.setdefault(name.partition(".")[0], []).append(_Tensor(shard, place))
    groups = []
    for (kind, mesh), units in grouped.items():
        structure = []
        boxes = []
        for unit in units.values():
            for shard, place in unit:
                # All that decides who writes: only ranks that agree about it choose the same rank.
                facts = shard.dtype, shard.global_shape, aliases.get(shard.name), shard.name in frozen
                structure.append(f"{place} {facts}")
                boxes.append(str(shard.boxes))
        record = _Record(kind, mesh, _digest_of(structure), _digest_of(boxes), ())
        groups.append(_Group(record, list(units.values())))
    return LongTuple(groups)


def _digest_of(texts: Iterable[str]) -> str:
    # No name has a control character, so that different lists have different texts.
    return digest("\n".join(texts).encode())


def _members(records: Sequence[Sequence[_Record]]) -> dict[tuple[str, str, str], list[int]]:
    """Return the ranks that are compared, in order, by the key of their groups."""
    members: dict[tuple[str, str, str], list[int]] = {}
    for rank, of_rank in enumerate(records):
        for record in of_rank:
            members.setdefault(record.key, []).append(rank)
    return members


def _in_several_groups(comm: Communicator, groups: LongTuple[_Group], records: Sequence[Sequence[_Record]]) -> set[str]:
    """Return the places whose tensors are also in another group, on this rank or another. Collective."""
    # Where all ranks have groups with the same names, each knows them already.
    if len({frozenset(record.names for record in of_rank) for of_rank in records}) == 1:
        return _in_several_of(groups)
    sent = gather_distinct(comm, encoded(_places_of(groups), dict[str, list[str]]))
    places: dict[str, list[str]] = {}
    with comm.phase("comparing names"):
        for _, of_rank in decode_distinct(sent, dict[str, list[str]], "its names"):
            places |= of_rank
    return _apart(places)


def _places_of(groups: Sequence[_Group]) -> dict[str, list[str]]:
    return {group.record.names: [tensor.place for tensor in group.tensors] for group in groups}


@functools.lru_cache(4)
def _in_several_of(groups: LongTuple[_Group]) -> set[str]:
    return _apart(_places_of(groups))


def _apart(places: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the places that are also in another group, from those of each group.

    Two stages of a pipeline have "layers.0.w" in groups of other names: this place is apart, and each rank writes it.
    """
    groups_of: dict[str, set[str]] = {}
    for names, of_group in places.items():
        for place in of_group:
            name, _, boxes = place.partition("\n")
            # Ranks have different parts of one tensor, each in a group of other parts: only the same part is compared.
            groups_of.setdefault(name, set()).add(_PARTS if boxes else names)
            groups_of.setdefault(place, set()).add(names)
    apart = set()
    for place, of_place in groups_of.items():
        if len(of_place) > 1 or len(groups_of[place.partition("\n")[0]]) > 1:
            apart.add(place)
    return apart


def _differing(
    comm: Communicator,
    groups: Sequence[_Group],
    digests_of_boxes: Mapping[str, Sequence[str]],
    records: Sequence[Sequence[_Record]],
    members: Mapping[tuple[str, str, str], Sequence[int]],
) -> set[str]:
    """Return the places of this rank's tensors that another rank of their group has with other bytes. Collective."""
    first: dict[tuple[str, str, str], _Record] = {}
    units: dict[tuple[str, str, str], set[int]] = {}  # the numbers of units that differ, by group
    for of_rank in records:
        for record in of_rank:
            expected = first.setdefault(record.key, record)
            for number, pair in enumerate(zip(expected.units, record.units, strict=True)):
                if pair[0] != pair[1]:
                    units.setdefault(record.key, set()).add(number)
    if not units:
        return set()
    compared: list[tuple[_Record, list[_Tensor]]] = []
    digests_here: dict[str, list[str]] = {}
    for group in groups:
        differing = units.get(group.record.key, ())
        tensors: list[_Tensor] = []
        for number in sorted(differing):
            tensors += group.units[number]
        if tensors:
            compared.append((group.record, tensors))
            key = str(group.record.key)
            digests_here[key] = [" ".join(digests_of_boxes[tensor.shard.name]) for tensor in tensors]
    # Of the units that differ only: a model has thousands of tensors, and statistics of batches are few.
    digests = from_all(comm, digests_here, dict[str, list[str]], "the digests of its tensors")
    places: set[str] = set()
    for record, tensors in compared:
        key = str(record.key)
        for rank in members[record.key]:
            for tensor, here, there in zip(tensors, digests_here[key], digests[rank][key], strict=True):
                if here != there:
                    places.add(tensor.place)
    return places
