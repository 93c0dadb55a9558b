"""Find the names and boxes of a layout's parts in their whole tensors, over all ranks, for save and load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from statexchange.comm.communicator import Communicator, from_all
from statexchange.exchange.rank_metadata import (
    RankMetadata,
    check_metadata,
    gather_distinct,
    parse_metadata,
    rank_shards,
)
from statexchange.sharding.options import mesh_option
from statexchange.sharding.paths import joined
from statexchange.sharding.rules import Layout, renumber_names
from statexchange.sharding.shards import Shard
from statexchange.state.describe import Description
from statexchange.state.load_plan import Matching
from statexchange.state.tree import LiveState
from statexchange.state.units import live_items


def place_parts(comm: Communicator, described: Description, layout: Layout) -> Description:
    """Return the description with the layout's parts turned into boxes of their whole tensors. Collective.

    All ranks must have the same mesh. A pattern that matches no tensor of any rank is an InvalidArgumentError.
    """
    parts = {}
    for name, local in described.tensors.items():
        # All others, DTensors among them, know their boxes already.
        if local.part is not None:
            parts[name] = local
    own = RankMetadata.of(Description(parts, unused=described.unused), mesh_option(layout))
    # Ranks with equal parts send equal metadata, which travels once.
    sent = gather_distinct(comm, own.data)
    tensors = dict(described.tensors)
    with comm.phase("placing its tensors"):
        metadata = parse_metadata(sent, comm.rank, own)
        check_metadata(metadata, layout)
        for shard in rank_shards(metadata, layout)[comm.rank]:
            if isinstance(shard, Shard):
                tensors[shard.name] = tensors[shard.name]._replace(shard=shard, part=None)
    return replace(described, tensors=tensors)


def renumbered_names(comm: Communicator, live: LiveState, matching: Matching) -> dict[str, str]:
    """Return the source's names of tensors that a layout renumbers over all ranks. Collective."""
    layout, options = matching.layout, matching.names.options
    names: dict[str, str] = {}
    with comm.phase("naming its tensors"):
        if any(rule.renumber for rule in layout.rules.values()):
            for name in filter(options.wants, _live_names(live)):
                rule = layout.rule_for(name)
                new_names = [name]
                if rule is not None:
                    new_names = rule.names(name)
                names |= dict.fromkeys(new_names, name)
    # Outside of the phases: a rank that fails in one takes part in its end, and in no collective inside it.
    by_rank = from_all(comm, names, dict[str, str], "its names")
    with comm.phase("renumbering its tensors"):
        return renumber_names(dict(enumerate(by_rank)), layout)[comm.rank]


def _live_names(live: LiveState) -> Iterator[str]:
    """Yield the names of the live tensors."""
    for entry in live.entries:
        if entry.kind == "tensor":
            yield entry.text
        elif entry.kind == "module":
            for name in live_items(entry.value)[0]:
                yield joined(entry.text, name)
