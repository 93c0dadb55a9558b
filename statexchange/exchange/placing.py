"""Find the boxes of a layout's parts in their whole tensors, for save and load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError
from statexchange.exchange.rank_metadata import (
    RankMetadata,
    check_equal_options,
    gather_metadata,
    parse_metadata,
    rank_shards,
)
from statexchange.sharding.options import mesh_option
from statexchange.sharding.rules import Layout
from statexchange.sharding.shards import Shard
from statexchange.state.describe import Description

__all__ = ["parameter_names", "place_parts"]


def parameter_names(name: str) -> Iterable[str]:
    """Return the parameter names that an optimizer tensor's name may contain: ``optimizer.state.NAME.exp_avg``."""
    base = "." + name.rpartition(".")[0]
    at = base.find(".state.")
    while at >= 0:
        yield base[at + len(".state.") :]
        at = base.find(".state.", at + 1)


def place_parts(comm: Communicator, described: Description, layout: Layout) -> Description:
    """Return the description with the layout's parts turned into boxes of their whole tensors. Collective.

    All ranks must have the same mesh. A pattern that matches no tensor of any rank is an InvalidArgumentError.
    """
    parts = {name: local for name, local in described.tensors.items() if local.part is not None}
    own = RankMetadata.of(Description(parts, unused=described.unused), mesh_option(layout))
    sent, _ = gather_metadata(comm, own)
    tensors = dict(described.tensors)
    with comm.phase("placing its tensors"):
        metadata = parse_metadata(sent, comm.rank, own)
        check_equal_options([rank_metadata.options for rank_metadata in metadata])
        layout.check_ranks(range(comm.world_size))
        unused = set.intersection(*(set(rank_metadata.unused) for rank_metadata in metadata))
        if unused:
            raise InvalidArgumentError(f"layout pattern {min(unused)!r} matches no tensor")
        for shard in rank_shards(metadata, layout)[comm.rank]:
            if isinstance(shard, Shard):
                tensors[shard.name] = replace(tensors[shard.name], shard=shard, part=None)
    return replace(described, tensors=tensors)
