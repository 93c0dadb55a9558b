"""Serialise each rank's shard metadata, send it to the ranks that plan, and merge it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import CorruptError, InvalidArgumentError, MismatchError
from statexchange.messages import decode, encoded
from statexchange.sharding.options import check_equal_options
from statexchange.sharding.rules import REDUCTIONS, Layout, Part, place_parts, renumber_names
from statexchange.sharding.sharding_spec import ShardingSpec
from statexchange.sharding.shards import LongTuple, Shard, TensorInfo, shape_from_json
from statexchange.state.describe import Description, MeshLayout
from statexchange.storage.files import digest
from statexchange.tensors import TensorLike, itemsize_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DescribedShard:
    """A rank's shard of one tensor; `part` is set if a layout has yet to place it in the whole."""

    shard: Shard | ShardingSpec
    part: Part | None = None


@dataclass(frozen=True)
class RankMetadata:
    """One rank's shards, and its options as text by name.

    `reductions` are operations by name; `aliases`, `unused` and `extra_state` are as in a Description. Ranks that hold
    all their tensors over one mesh have equal metadata, which is sent and parsed once.
    """

    shards: Sequence[DescribedShard]
    aliases: Mapping[str, str]
    unused: Sequence[str]
    extra_state: Sequence[str]
    reductions: Mapping[str, str]
    options: Mapping[str, str]

    @classmethod
    def of(cls, described: Description, options: Mapping[str, str]) -> RankMetadata:
        """Return the metadata of a description: the same object as for an equal one before, most often."""
        tensors = []
        for local in described.tensors.values():
            tensors.append((local.shard, local.layout, local.part, local.reduce))
        return _metadata_of(
            LongTuple(tensors),
            LongTuple(described.aliases.items()),
            described.unused,
            described.extra_state,
            LongTuple(options.items()),
        )

    @cached_property
    def data(self) -> bytes:
        """This as it is sent."""
        return encoded(self, RankMetadata)

    def check(self) -> None:
        """Raise ValueError if this cannot be another rank's metadata."""
        if not set(self.reductions.values()) <= set(REDUCTIONS):
            raise ValueError("a reduction is neither max nor min")
        for described in self.shards:
            itemsize_of(described.shard.dtype)
            shape_from_json(described.shard.global_shape)
            if described.part is not None:
                described.part.check()


@lru_cache(4)
def _metadata_of(
    tensors: LongTuple[tuple[Shard, MeshLayout, Part | None, str | None]],
    aliases: LongTuple[tuple[str, str]],
    unused: tuple[str, ...],
    extra_state: tuple[str, ...],
    options: LongTuple[tuple[str, str]],
) -> RankMetadata:
    """Return the metadata of a rank; `tensors` has of each the shard, what its mesh says, its part and reduction."""
    shards = []
    reductions: dict[str, str] = {}
    for shard, layout, part, reduce in tensors:
        if reduce is not None:
            reductions[shard.name] = reduce
        sent: Shard | ShardingSpec = shard
        if layout.placement is not None:
            # The mesh says what each rank holds: a spec is equal on all of them, where boxes would differ.
            sent = ShardingSpec(shard.name, shard.dtype, shard.global_shape, layout.placement, layout.mesh_ranks)
        shards.append(DescribedShard(sent, part))
    return RankMetadata(shards, dict(aliases), unused, extra_state, reductions, dict(options))


def gather_distinct(comm: Communicator, data: bytes, root: int | None = None) -> list[bytes]:
    """Return every rank's data on `root`, [] elsewhere; with None on all ranks. Collective.

    Of several ranks with equal data only the first sends it: if ranks 0 to 2 have a, b and a, ranks 0 and 1 send, and
    the result is [a, b, a].
    """
    # First the digests alone: with one model on a mesh of thousands of ranks, the data of one rank is all that travels.
    digests = comm.all_gather_bytes(digest(data).encode(), operation="the comparison of descriptions")
    sender: dict[bytes, int] = {}  # the first rank with each digest
    for rank, rank_digest in enumerate(digests):
        sender.setdefault(rank_digest, rank)
    if sender[digests[comm.rank]] != comm.rank:
        data = b""
    sent = comm.all_gather_bytes(data, root=root, operation="the gathering of descriptions")
    if not sent:  # not on root
        return []
    return [sent[sender[rank_digest]] for rank_digest in digests]


def decode_distinct(sent: Sequence[bytes], kind: type[T], what: str) -> Iterator[tuple[int, T]]:
    """Yield what `gather_distinct` has gathered, each value once, with the first rank that has it."""
    for data in dict.fromkeys(sent):
        rank = sent.index(data)
        yield rank, decode(data, kind, what, rank)


def parse_metadata(sent: Sequence[bytes], rank_here: int, metadata_here: RankMetadata) -> list[RankMetadata]:
    """Decode what `gather_distinct` has gathered; equal metadata is parsed once, and this rank's own not at all."""
    # The very object for this rank, too: what was made of it for the last export is found by it.
    parsed = {sent[rank_here]: metadata_here}
    for rank, data in enumerate(sent):
        if data not in parsed:
            parsed[data] = _parsed(data, rank)
    return [parsed[data] for data in sent]


@lru_cache(8)
def _parsed(data: bytes, rank: int) -> RankMetadata:
    return decode(data, RankMetadata, "the description of its state", rank, RankMetadata.check)


def tensors_of(described: Description) -> dict[str, TensorInfo]:
    """Return the dtype and global shape of each tensor of this rank."""
    tensors = {}
    for name, local in described.tensors.items():
        tensors[name] = TensorInfo(local.shard.dtype, local.shard.global_shape)
    return tensors


def all_tensors(comm: Communicator, described: Description) -> dict[str, TensorInfo]:
    """Return the dtype and global shape of each tensor of any rank. Collective."""
    sent = gather_distinct(comm, encoded(tensors_of(described), dict[str, TensorInfo]))
    tensors: dict[str, TensorInfo] = {}
    with comm.phase("comparing its tensors"):
        for rank, of_rank in decode_distinct(sent, dict[str, TensorInfo], "its tensors"):
            for name, info in of_rank.items():
                first = tensors.setdefault(name, info)
                if first != info:
                    text = "this rank's dtype or shape differs from another's"
                    raise CorruptError(text, name=name, rank=rank, expected=first, found=info)
    return tensors


def check_metadata(metadata: Sequence[RankMetadata], layout: Layout) -> None:
    """Raise InvalidArgumentError if options or ranks do not fit, or a pattern of the layout matches on no rank."""
    check_equal_options([rank_metadata.options for rank_metadata in metadata])
    if layout.mesh:
        layout.check_ranks(range(len(metadata)))
    # A pattern may be for the tensors of one pipeline stage: it must match on some rank.
    unused = set.intersection(*(set(rank_metadata.unused) for rank_metadata in metadata))
    if unused:
        raise InvalidArgumentError(f"layout pattern {min(unused)!r} matches no tensor")


@dataclass(frozen=True, slots=True)
class _Naming:
    """The facts that decide a rank's names: options, a conversion or none, and the names that its layout renumbers."""

    options: Mapping[str, str]
    converts: bool
    sources: Mapping[str, str]


def agreed_names(
    comm: Communicator, described: Description, layout: Layout, conversion: Mapping[str, str] | None
) -> tuple[Description, bool]:
    """Return the description with the names that a layout renumbers, and whether any rank has a conversion. Collective.

    `conversion` are the options of this rank's conversion as text by name, None without one; it is not applied.
    """
    renumbers = any(rule.renumber for rule in layout.rules.values())
    # Compared, since all ranks renumber or none: new numbers follow from the names of all ranks.
    options = {"whether the layout renumbers": str(renumbers)}
    if conversion is not None:
        options |= conversion
    sources: dict[str, str] = {}
    if renumbers:
        sources = {name: described.sources.get(name, name) for name in described.tensors}
    sent = from_all(comm, _Naming(options, conversion is not None, sources), _Naming, "the conversions")
    with comm.phase("comparing the conversions"):
        check_equal_options([naming.options for naming in sent])
        converts = any(naming.converts for naming in sent)
        if not renumbers:
            return described, converts
        names = renumber_names({rank: naming.sources for rank, naming in enumerate(sent)}, layout)[comm.rank]
        for name, times in Counter(names.values()).items():
            if times > 1:
                text = "the layout gives this name to two tensors of one rank"
                raise InvalidArgumentError(text, name=name, rank=comm.rank)
        aliases = {names.get(alias, alias): names.get(name, name) for alias, name in described.aliases.items()}
        return replace(described.renamed(names), aliases=aliases), converts


def local_box(described: Description, name: str, index: int) -> TensorLike:
    """Return the tensor of box `index` of `name`; raise MismatchError if this rank does not hold it."""
    local = described.tensors.get(name)
    if local is None or index >= len(local.tensors):
        raise MismatchError("the plan names a box that this rank does not hold", name=name)
    return local.tensors[index]


def reductions_of(metadata: Sequence[RankMetadata]) -> dict[str, str]:
    """Return the reduction of each tensor whose copies are reduced; it must be equal on all ranks."""
    reductions: dict[str, str] = {}
    for rank, rank_metadata in enumerate(metadata):
        for name, operation in rank_metadata.reductions.items():
            if reductions.setdefault(name, operation) != operation:
                text = "layouts differ in the reduction of this tensor"
                first = reductions[name]
                raise InvalidArgumentError(text, name=name, rank=rank, expected=first, found=operation)
    return reductions


def rank_shards(metadata: Sequence[RankMetadata], layout: Layout) -> list[list[Shard | ShardingSpec]]:
    """Return each rank's shards, with the parts of layout rules placed in their whole tensors.

    A spec that all ranks of its mesh give is listed for the first of them only, unless another rank has a tensor of
    this name. It stands for the boxes of all: of "w" of shape (4, 3), cut by rows on 2 ranks, rank 0 has the spec and
    rank 1 nothing. Where rank 2 has a "w", too, ranks 0 and 1 have boxes: [0:2, 0:3] and [2:4, 0:3].
    """
    agreed = _agreed_specs(metadata)
    # Ranks with equal metadata share one object. Thousands of them may have a model on a mesh, with nothing to list.
    kept: dict[int, list[DescribedShard]] = {}
    for rank_metadata in metadata:
        if id(rank_metadata) not in kept:
            kept[id(rank_metadata)] = [shard for shard in rank_metadata.shards if shard.shard not in agreed]
    parts: dict[str, dict[int, Part]] = {}
    for rank, rank_metadata in enumerate(metadata):
        for described in kept[id(rank_metadata)]:
            if described.part is not None:
                parts.setdefault(described.shard.name, {})[rank] = described.part
    positions = {name: place_parts(tensor_parts, layout.mesh) for name, tensor_parts in parts.items()}
    # Now by rank: a part has another place on each, and a spec that is not agreed becomes each one's boxes.
    shards: list[list[Shard | ShardingSpec]] = []
    seen: set[int] = set()
    for rank, rank_metadata in enumerate(metadata):
        of_rank: list[Shard | ShardingSpec] = []
        described_shards = rank_metadata.shards
        if id(rank_metadata) in seen:  # the first of these ranks has listed the agreed specs
            described_shards = kept[id(rank_metadata)]
        for described in described_shards:
            shard = described.shard
            if described.part is not None:
                shard = Shard(shard.name, shard.dtype, *positions[shard.name][rank])
            elif isinstance(shard, ShardingSpec) and shard in agreed:
                if agreed[shard] != rank:
                    continue
            elif isinstance(shard, ShardingSpec):
                shard = shard.shard_of(rank)
            of_rank.append(shard)
        seen.add(id(rank_metadata))
        shards.append(of_rank)
    return shards


def _agreed_specs(metadata: Sequence[RankMetadata]) -> dict[Shard | ShardingSpec, int]:
    """Return the specs that stay specs, each with the lowest rank that has it.

    All ranks of the mesh, which lists them in order, give the same spec, and no other rank has a tensor of its name.
    """
    # By identity, as equal metadata is one object (`parse_metadata`): to compare it with itself would take seconds for
    # 100,000 tensors.
    ranks_of: dict[int, list[int]] = {}
    for rank, rank_metadata in enumerate(metadata):
        ranks_of.setdefault(id(rank_metadata), []).append(rank)
    distinct = {id(rank_metadata): rank_metadata for rank_metadata in metadata}
    givers: dict[str, list[int]] = {}  # the metadata that have a tensor, by its name
    specs: dict[str, Shard | ShardingSpec | None] = {}  # None where they differ
    for number, rank_metadata in distinct.items():
        for described in rank_metadata.shards:
            shard = described.shard
            givers.setdefault(shard.name, []).append(number)
            if specs.setdefault(shard.name, shard) != shard or described.part is not None:
                specs[shard.name] = None
    agreed: dict[Shard | ShardingSpec, int] = {}
    are_meshes: dict[tuple[tuple[int, ...], tuple[int, ...], int], bool] = {}
    for name, spec in specs.items():
        if not isinstance(spec, ShardingSpec):
            continue
        key = tuple(givers[name]), spec.ranks, spec.placement.num_ranks
        if key not in are_meshes:
            ranks: list[int] = []
            for number in givers[name]:
                ranks += ranks_of[number]
            # In their order, so that the first copy of a piece is that of the lowest rank.
            are_meshes[key] = sorted(ranks) == list(spec.ranks or range(spec.placement.num_ranks))
        if are_meshes[key]:
            agreed[spec] = min(ranks_of[number][0] for number in givers[name])
    return agreed
