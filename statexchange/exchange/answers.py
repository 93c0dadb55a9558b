"""What ranks tell root of the state that they hold, and what root makes of all their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statexchange.errors import CorruptError, InvalidArgumentError
from statexchange.sharding.rules import Layout, Part, place, renumbered
from statexchange.sharding.shards import Box, Shard
from statexchange.sharding.spread import Placement, Spread
from statexchange.state.describe import Description
from statexchange.tensors import dtype_name

__all__ = ["Answer", "answer_bytes", "operations", "renames", "shards_by_rank"]


def answer_bytes(described: Description) -> bytes:
    """What a rank holds. Of tensors over a mesh every rank says the same, and root reads it once."""
    held: list[Any] = []
    placements: dict[Any, int] = {}
    for h in described.held.values():
        if h.placement is not None:
            number = placements.setdefault(h.placement, len(placements))
            held.append([h.shard.name, h.shard.dtype, h.shard.global_shape, number])
        else:
            held.append([h.shard.to_json(), h.part.to_json() if h.part else None])
    reductions = {
        name: [h.reduce, dtype_name(h.tensors[0], name)]
        for name, h in described.held.items()
        if h.reduce is not None and h.tensors
    }
    said = [
        held,
        [p.to_json() for p in placements],
        dict(described.aliases),
        described.unused,
        dict(described.sources),
        reductions,
    ]
    return json.dumps(said, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank has said of its state, in `answer_bytes`; of equal answers there is one.

    `reductions` are (operation, dtype in which it is held) by name; the rest is as in a Description.
    """

    held: Sequence[tuple[Shard | Spread, Part | None]]
    aliases: Mapping[str, str]
    unused: Sequence[str]
    sources: Mapping[str, str]
    reductions: Mapping[str, Sequence[str]]

    @classmethod
    def parse(cls, answer: bytes) -> Answer:
        """What `answer_bytes` wrote."""
        held, raw_placements, *rest = json.loads(answer)
        placements = [Placement.from_json(raw) for raw in raw_placements]
        entries: list[tuple[Shard | Spread, Part | None]] = []
        for entry in held:
            if len(entry) == 4:
                name, dtype, shape, number = entry
                entries.append((Spread(name, dtype, tuple(shape), placements[number]), None))
            else:
                shard, part = entry
                entries.append((Shard.from_json(shard), Part.from_json(part) if part is not None else None))
        return cls(entries, *rest)

    def renamed(self, names: Mapping[str, str], rank: int) -> Answer:
        """The same under other names, for those that `names` has one for."""
        held: dict[str, tuple[Shard | Spread, Part | None]] = {}
        for shard, part in self.held:
            new = names.get(shard.name, shard.name)
            if new in held:
                raise InvalidArgumentError("the layout makes two tensors of one rank this one", name=new, rank=rank)
            held[new] = (replace(shard, name=new), None if part is None else replace(part, name=new))
        aliases = {names.get(alias, alias): names.get(kept, kept) for alias, kept in self.aliases.items()}
        reductions = {names.get(name, name): told for name, told in self.reductions.items()}
        return replace(self, held=list(held.values()), aliases=aliases, reductions=reductions)


def renames(said: Sequence[Answer], layout: Layout) -> list[dict[str, str]]:
    """By rank, the names that are to be others because a layout counts on over the ranks; equal ones are one."""
    if not any(rule.renumber for rule in layout.rules.values()):
        return [{}] * len(said)
    names = {
        rank: {shard.name: one.sources.get(shard.name, shard.name) for shard, _ in one.held}
        for rank, one in enumerate(said)
    }
    found = renumbered(names, layout)
    return [{old: new for old, new in found[rank].items() if old != new} for rank in range(len(said))]


def operations(said: Sequence[Answer]) -> dict[str, str]:
    """The operation for each tensor of which copies are reduced; they must be held in one dtype."""
    found: dict[str, tuple[str, str]] = {}
    for rank, one in enumerate(said):
        for name, (operation, dtype) in one.reductions.items():
            _, known = found.setdefault(name, (operation, dtype))
            if dtype != known:
                raise CorruptError(
                    "copies to be reduced differ in dtype", name=name, rank=rank, expected=known, found=dtype
                )
    return {name: operation for name, (operation, _) in found.items()}


def _by_rank(parsed: Sequence[Answer]) -> list[list[tuple[Shard | Spread, Part | None]]]:
    """What each rank holds: a tensor of which all ranks say that it lies over a mesh of all is told by rank 0 alone."""
    distinct = list({id(one): one for one in parsed}.values())
    agreed = set.intersection(*({shard for shard, _ in one.held if isinstance(shard, Spread)} for one in distinct))
    agreed = {s for s in agreed if math.prod(s.placement.mesh_shape) == len(parsed)}
    rest = {id(one): [pair for pair in one.held if pair[0] not in agreed] for one in distinct}
    found: list[list[tuple[Shard | Spread, Part | None]]] = []
    for rank, one in enumerate(parsed):
        ours = one.held if rank == 0 else rest[id(one)]
        found.append([(s.shard_of(rank) if isinstance(s, Spread) and s not in agreed else s, p) for s, p in ours])
    return found


def shards_by_rank(said: Sequence[Answer], layout: Layout) -> list[list[Shard | Spread]]:
    """Every rank's shards, with the parts that layout rules speak of placed where they lie in the whole."""
    described = _by_rank(said)
    parts: dict[str, dict[int, Part]] = {}
    for rank, shards in enumerate(described):
        for shard, part in shards:
            if part is not None:
                parts.setdefault(shard.name, {})[rank] = part
    placed = {name: place(held, layout.grid) for name, held in parts.items()}
    return [
        [shard if part is None else _placed(shard, *placed[shard.name][rank]) for shard, part in shards]
        for rank, shards in enumerate(described)
    ]


def _placed(shard: Shard | Spread, global_shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Shard:
    return Shard(shard.name, shard.dtype, global_shape, boxes)
