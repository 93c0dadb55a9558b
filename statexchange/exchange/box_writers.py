"""Choose which rank writes each tensor of a save that several ranks hold, so that equal boxes are written once.

Data-parallel ranks have the same parameters, and ranks along a mesh axis that replicates a DTensor have the same boxes
of it. Whether copies are equal is decided anew at each save, by digests of their bytes. Equal bytes decide who writes,
and never what a tensor is: what differs is each rank's own, is written by each, and comes back to each.

A tensor is compared among the ranks that may have copies of it: those that its mesh says for a DTensor, all for others.
In such a group ranks with the same names, dtypes and shapes are compared::

    what ranks send each other                                      when
    for each group a digest of its names and shapes, and for each   always: about 100 bytes from each rank
    unit (a first key of the state) a digest of its digests
    the digest of each tensor of a unit                             the unit differs, as statistics of batches do
    the names of a group, each distinct list once                   ranks have other names, as pipeline stages do

If stages both have a tensor of one name, it is each rank's own, too. So a tensor has either one copy in the save, or
one from each rank that has it, and a load need not be told whose copy stands for a rank's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from statexchange.comm.communicator import Communicator, from_all
from statexchange.exchange.rank_metadata import gather_distinct
from statexchange.exchange.staging import Staging, shard_data
from statexchange.messages import decode, encoded
from statexchange.sharding.shards import full_box
from statexchange.state.describe import LocalTensor
from statexchange.storage.files import digest
from statexchange.storage.tensorfile import digests_of
from statexchange.tensors import collector_paused

__all__ = ["Shares", "share_writing"]

_ALL_WITH_PARTS = "parts"


class Shares(NamedTuple):
    """What this rank writes of a save.

    Attributes:
        written: the tensors that it writes.
        digests: the digests of the boxes of each tensor that was compared.
    """

    written: Sequence[LocalTensor]
    digests: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Record:
    """What a rank tells the others of the tensors of one group.

    Attributes:
        ranks: the group: the ranks that have copies, as text; "" for all ranks, or "parts" for parts that any may have.
        mesh: the mesh that says so, as text; "" for tensors without one.
        structure: a digest of the names, dtypes and shapes.
        units: for each unit a digest of the digests of its tensors.
    """

    ranks: str
    mesh: str
    structure: str
    units: tuple[str, ...]

    @property
    def names(self) -> tuple[str, str]:
        """What is equal for groups with the same names. Groups of one mesh have different boxes of its tensors."""
        return self.mesh, self.structure


class _Tensor(NamedTuple):
    """A tensor that may have copies; `place` is equal for the same boxes of one tensor."""

    local: LocalTensor
    place: str
    digest: str


class _Group(NamedTuple):
    """This rank's tensors in a group, by unit."""

    record: _Record
    units: Sequence[Sequence[_Tensor]]

    @property
    def tensors(self) -> list[_Tensor]:
        """All tensors."""
        return [tensor for unit in self.units for tensor in unit]


def share_writing(comm: Communicator, tensors: Sequence[LocalTensor], stall_timeout_s: float) -> Shares:
    """Choose what this rank writes of its tensors: all that it has alone, and its share of those with equal copies.

    Collective. Tensors that may have copies are read once, for their digests.
    """
    with comm.phase("digesting its tensors", timeout_s=stall_timeout_s), collector_paused():
        may_have_copies = [local for local in tensors if _may_have_copies(local)]
        digests = digests_of(shard_data(may_have_copies, Staging()), comm.progress)
        groups = _groups(may_have_copies, digests)
    here = [group.record for group in groups]
    records = from_all(comm, here, list[_Record], "the digests of its tensors")
    apart = _in_several_groups(comm, groups, records) | _differing(comm, groups, records)
    left_to_others: set[str] = set()
    for group in groups:
        members = _members(group.record, records)
        load = dict.fromkeys(members, 0)
        # The largest first, each for the rank that has the fewest bytes until then: all members have these tensors in
        # the same order, and choose the same rank.
        equal = [tensor for tensor in group.tensors if tensor.place not in apart]
        for local, _, _ in sorted(equal, key=lambda tensor: -tensor.local.shard.nbytes):
            writer = min(members, key=load.__getitem__)
            load[writer] += local.shard.nbytes
            if writer != comm.rank:
                left_to_others.add(local.shard.name)
    return Shares([local for local in tensors if local.shard.name not in left_to_others], digests)


def _may_have_copies(local: LocalTensor) -> bool:
    """Whether another rank may have the same boxes of a tensor."""
    return local.shard.nbytes > 0 and not (local.mesh and not local.copies)


def _groups(tensors: Sequence[LocalTensor], digests: Mapping[str, Sequence[str]]) -> list[_Group]:
    """Return the groups of this rank's tensors that may have copies."""
    grouped: dict[tuple[str, str], dict[str, list[_Tensor]]] = {}
    # Sorted, as ranks may have filled a mapping in different orders.
    for local in sorted(tensors, key=lambda local: local.shard.name):
        shard = local.shard
        ranks, place = local.copies, shard.name
        # A mesh gives other boxes to the ranks of another group. Any other part may be the same on any rank. Ranks that
        # have other parts may have the same whole tensors, so that these are a group of their own.
        if not local.mesh and shard.boxes != (full_box(shard.global_shape),):
            ranks, place = _ALL_WITH_PARTS, f"{place} {shard.boxes}"
        units = grouped.setdefault((ranks, local.mesh), {})
        tensor = _Tensor(local, place, " ".join(digests[shard.name]))
        units.setdefault(shard.name.partition(".")[0], []).append(tensor)
    groups = []
    for (ranks, mesh), units in grouped.items():
        structure = []
        contents = []
        for unit in units.values():
            contents.append(_digest_of(tensor.digest for tensor in unit))
            for local, place, _ in unit:
                structure.append(f"{place} {local.shard.dtype} {local.shard.global_shape}")
        groups.append(_Group(_Record(ranks, mesh, _digest_of(structure), tuple(contents)), list(units.values())))
    return groups


def _digest_of(texts: Iterable[str]) -> str:
    # No name has a control character, so that different lists have different texts.
    return digest("\n".join(texts).encode())


def _members(record: _Record, records: Sequence[Sequence[_Record]]) -> list[int]:
    """Return the ranks that have the same tensors in a group."""
    members = []
    for rank, of_rank in enumerate(records):
        for other in of_rank:
            if (other.ranks, other.names) == (record.ranks, record.names):
                members.append(rank)
    return members


def _in_several_groups(comm: Communicator, groups: Sequence[_Group], records: Sequence[Sequence[_Record]]) -> set[str]:
    """Return the places that groups with other names both have. Collective."""
    places_here: dict[str, list[str]] = {}
    for group in groups:
        mesh, structure = group.record.names
        places_here[f"{structure} {mesh}"] = [tensor.place for tensor in group.tensors]
    places = places_here
    # Where all ranks have groups with the same names, each knows them already.
    if len({frozenset(record.names for record in of_rank) for of_rank in records}) > 1:
        sent, _ = gather_distinct(comm, encoded(places_here, dict[str, list[str]]))
        places = {}
        with comm.phase("comparing names"):
            for data in dict.fromkeys(sent):
                places |= decode(data, dict[str, list[str]], "its names", sent.index(data))
    counts: Counter[str] = Counter()
    for of_group in places.values():
        counts.update(of_group)
    return {place for place, count in counts.items() if count > 1}


def _differing(comm: Communicator, groups: Sequence[_Group], records: Sequence[Sequence[_Record]]) -> set[str]:
    """Return the places of this rank's tensors that another rank of their group has with other bytes. Collective."""
    first: dict[tuple[str, tuple[str, str]], _Record] = {}
    units: dict[tuple[str, tuple[str, str]], set[int]] = {}  # the numbers of units that differ, by group
    for of_rank in records:
        for record in of_rank:
            key = (record.ranks, record.names)
            expected = first.setdefault(key, record)
            for number, pair in enumerate(zip(expected.units, record.units, strict=True)):
                if pair[0] != pair[1]:
                    units.setdefault(key, set()).add(number)
    if not units:
        return set()
    compared: list[tuple[_Record, list[_Tensor]]] = []
    digests_here: dict[str, list[str]] = {}
    for group in groups:
        record = group.record
        differing = units.get((record.ranks, record.names), ())
        tensors = [tensor for number in sorted(differing) for tensor in group.units[number]]
        if tensors:
            compared.append((record, tensors))
            digests_here[f"{record.ranks} {record.mesh}"] = [tensor.digest for tensor in tensors]
    digests = from_all(comm, digests_here, dict[str, list[str]], "the digests of its tensors")
    places: set[str] = set()
    for record, tensors in compared:
        for rank in _members(record, records):
            for tensor, there in zip(tensors, digests[rank][f"{record.ranks} {record.mesh}"], strict=True):
                if tensor.digest != there:
                    places.add(tensor.place)
    return places
