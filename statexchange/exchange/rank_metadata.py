"""Serialise each rank's shard metadata, send it to the ranks that plan, and merge it there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError
from statexchange.sharding import records
from statexchange.sharding.rules import REDUCTIONS, Layout, Part, place_parts, renumber_names
from statexchange.sharding.sharding_spec import Placement, ShardingSpec
from statexchange.sharding.shards import Box, Shard, shape_from_json
from statexchange.state.describe import Description
from statexchange.storage.tensorfile import digest
from statexchange.tensors import itemsize_of

__all__ = [
    "HeldShard",
    "RankMetadata",
    "check_equal_options",
    "gather_metadata",
    "held_box",
    "operations",
    "parse_metadata",
    "rank_shards",
    "renames",
]

_MAX_SHOWN = 300  # characters of an option in a message


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A rank's shard of one tensor; `part` is set if a layout has yet to place it in the whole."""

    shard: Shard | ShardingSpec
    part: Part | None = None

    def renamed(self, name: str) -> HeldShard:
        """Return the same shard under another name."""
        return HeldShard(replace(self.shard, name=name), None if self.part is None else replace(self.part, name=name))


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """One rank's shards, and its options as text by name.

    `reductions` are operations by name; `aliases`, `unused` and `sources` are as in a Description. All
    ranks describe tensors over a mesh alike, and equal metadata is parsed once.
    """

    held: Sequence[HeldShard]
    aliases: Mapping[str, str]
    unused: Sequence[str]
    sources: Mapping[str, str]
    reductions: Mapping[str, str]
    options: Mapping[str, str]

    @classmethod
    def of(cls, described: Description, options: Mapping[str, str]) -> RankMetadata:
        """Return the metadata of a description."""
        held = []
        for one in described.held.values():
            shard: Shard | ShardingSpec = one.shard
            if one.placement is not None:
                shard = ShardingSpec(shard.name, shard.dtype, shard.global_shape, one.placement)
            held.append(HeldShard(shard, one.part))
        reductions = {name: one.reduce for name, one in described.held.items() if one.reduce is not None}
        return cls(held, described.aliases, described.unused, described.sources, reductions, options)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        placements: dict[Placement, int] = {}
        held: list[dict[str, Any]] = []
        for one in self.held:
            if isinstance(one.shard, ShardingSpec):
                number = placements.setdefault(one.shard.placement, len(placements))
                shape = one.shard.global_shape
                held.append({"name": one.shard.name, "dtype": one.shard.dtype, "shape": shape, "placement": number})
            elif one.part is None:
                held.append({"shard": one.shard.to_json()})
            else:
                held.append({"shard": one.shard.to_json(), "part": one.part.to_json()})
        return {
            "held": held,
            "placements": [placement.to_json() for placement in placements],
            "aliases": dict(self.aliases),
            "unused": list(self.unused),
            "sources": dict(self.sources),
            "reductions": dict(self.reductions),
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, raw: Any) -> RankMetadata:
        """Return the metadata that `to_json` wrote; raise ValueError for anything else."""
        names = ("held", "placements", "aliases", "unused", "sources", "reductions", "options")
        raw_held, raw_placements, aliases, unused, sources, raw_reductions, options = records.fields(raw, *names)
        placements = records.items(raw_placements, Placement.from_json)
        reductions = records.texts(raw_reductions)
        if not set(reductions.values()) <= set(REDUCTIONS):
            raise ValueError("a reduction is neither max nor min")
        return cls(
            records.items(raw_held, lambda one: _held(one, placements)),
            records.texts(aliases),
            records.items(unused, records.text),
            records.texts(sources),
            reductions,
            records.texts(options),
        )

    def renamed(self, names: Mapping[str, str], rank: int) -> RankMetadata:
        """Return the metadata with the tensors in `names` renamed."""
        held: dict[str, HeldShard] = {}
        for one in self.held:
            new = names.get(one.shard.name, one.shard.name)
            if new in held:
                raise InvalidArgumentError("the layout gives this name to two tensors of one rank", name=new, rank=rank)
            held[new] = one.renamed(new)
        aliases = {names.get(alias, alias): names.get(kept, kept) for alias, kept in self.aliases.items()}
        reductions = {names.get(name, name): operation for name, operation in self.reductions.items()}
        return replace(self, held=list(held.values()), aliases=aliases, reductions=reductions)


def _held(raw: Any, placements: Sequence[Placement]) -> HeldShard:
    if type(raw) is dict and "placement" in raw:
        name, dtype, shape, number = records.fields(raw, "name", "dtype", "shape", "placement")
        itemsize_of(dtype)
        placement = placements[records.count(number, len(placements))]
        return HeldShard(ShardingSpec(records.text(name), dtype, shape_from_json(shape), placement))
    if type(raw) is dict and "part" in raw:
        raw_shard, part = records.fields(raw, "shard", "part")
        return HeldShard(Shard.from_json(raw_shard), Part.from_json(part))
    (raw_shard,) = records.fields(raw, "shard")
    return HeldShard(Shard.from_json(raw_shard))


def gather_metadata(comm: Communicator, ours: RankMetadata, root: int | None = None) -> tuple[list[bytes], int]:
    """Return every rank's metadata as bytes on `root` ([] elsewhere; None: on all ranks), and the bytes sent.

    Collective. Of several ranks with equal metadata only the first sends it. `parse_metadata` decodes the bytes.
    """
    data = records.encoded(ours)
    digests = comm.all_gather_bytes(digest(data).encode(), operation="the comparison of descriptions")
    sender: dict[bytes, int] = {}
    for rank, found in enumerate(digests):
        sender.setdefault(found, rank)
    sends = sender[digests[comm.rank]] == comm.rank
    sent = comm.all_gather_bytes(data if sends else b"", root=root, operation="the gathering of descriptions")
    return [sent[sender[found]] for found in digests] if sent else [], sum(map(len, sent))


def parse_metadata(sent: Sequence[bytes], own_rank: int, ours: RankMetadata) -> list[RankMetadata]:
    """Decode the result of `gather_metadata`; equal metadata is parsed once, and this rank's own not at all."""
    found = {sent[own_rank]: ours}
    for rank, data in enumerate(sent):
        if data not in found:
            found[data] = records.decoded(data, RankMetadata.from_json, "the description of its state", rank)
    return [found[data] for data in sent]


def check_equal_options(options: Sequence[Mapping[str, str]]) -> None:
    """Raise InvalidArgumentError if an option differs between ranks; it names the option and both values."""
    first = options[0]
    for rank, theirs in enumerate(options):
        for option, value in theirs.items() if theirs is not first else ():
            if value != first.get(option):
                raise InvalidArgumentError(
                    f"{option} is {_shown(first.get(option))} on rank 0 and {_shown(value)} on rank {rank}: give all "
                    "ranks the same",
                    rank=rank,
                )


def held_box(described: Description, name: str, index: int) -> Any:
    """Return the tensor of box `index` of `name`; raise MismatchError if this rank does not hold it."""
    held = described.held.get(name)
    if held is None or index >= len(held.tensors):
        raise MismatchError("the plan names a box that this rank does not hold", name=name)
    return held.tensors[index]


def _shown(value: str | None) -> str:
    return str(value)[:_MAX_SHOWN]


def renames(metadata: Sequence[RankMetadata], layout: Layout) -> list[dict[str, str]]:
    """Return for each rank the new names of tensors that a layout numbers over all ranks."""
    if not any(rule.renumber for rule in layout.rules.values()):
        return [{}] * len(metadata)
    names = {
        rank: {held.shard.name: one.sources.get(held.shard.name, held.shard.name) for held in one.held}
        for rank, one in enumerate(metadata)
    }
    found = renumber_names(names, layout)
    return [{old: new for old, new in found[rank].items() if old != new} for rank in range(len(metadata))]


def operations(metadata: Sequence[RankMetadata]) -> dict[str, str]:
    """Return the reduction of each tensor whose copies are reduced; it must be equal on all ranks."""
    found: dict[str, str] = {}
    for rank, one in enumerate(metadata):
        for name, operation in one.reductions.items():
            if found.setdefault(name, operation) != operation:
                raise InvalidArgumentError(
                    "layouts differ in the reduction of this tensor",
                    name=name,
                    rank=rank,
                    expected=found[name],
                    found=operation,
                )
    return found


def _by_rank(metadata: Sequence[RankMetadata]) -> list[list[HeldShard]]:
    """Return each rank's shards; a shard that all ranks describe alike, over a mesh of all ranks, only for rank 0."""
    distinct = list({id(one): one for one in metadata}.values())
    agreed = set.intersection(
        *({held.shard for held in one.held if isinstance(held.shard, ShardingSpec)} for one in distinct)
    )
    agreed = {spec for spec in agreed if math.prod(spec.placement.mesh_shape) == len(metadata)}
    rest = {id(one): [held for held in one.held if held.shard not in agreed] for one in distinct}
    found: list[list[HeldShard]] = []
    for rank, one in enumerate(metadata):
        ours = one.held if rank == 0 else rest[id(one)]
        found.append([_explicit(held, rank) if held.shard not in agreed else held for held in ours])
    return found


def _explicit(held: HeldShard, rank: int) -> HeldShard:
    return HeldShard(held.shard.shard_of(rank)) if isinstance(held.shard, ShardingSpec) else held


def rank_shards(metadata: Sequence[RankMetadata], layout: Layout) -> list[list[Shard | ShardingSpec]]:
    """Return each rank's shards, with the parts of layout rules placed in their whole tensors."""
    described = _by_rank(metadata)
    parts: dict[str, dict[int, Part]] = {}
    for rank, shards in enumerate(described):
        for held in shards:
            if held.part is not None:
                parts.setdefault(held.shard.name, {})[rank] = held.part
    placed = {name: place_parts(of_rank, layout.mesh) for name, of_rank in parts.items()}
    return [
        [held.shard if held.part is None else _placed(held.shard, *placed[held.shard.name][rank]) for held in shards]
        for rank, shards in enumerate(described)
    ]


def _placed(shard: Shard | ShardingSpec, global_shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Shard:
    return Shard(shard.name, shard.dtype, global_shape, boxes)
