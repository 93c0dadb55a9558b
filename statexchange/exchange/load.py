"""Load a checkpoint into live state, in place, from any mesh and placements into any other."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from statexchange import values
from statexchange.comm.communicator import Communicator
from statexchange.comm.session import public_call
from statexchange.comm.world import as_communicator
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    ReplicaError,
)
from statexchange.exchange.reading import Job, assign_readers, read_all
from statexchange.formats.registry import open_source
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.plan import prove_cover
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.state.describe import describe
from statexchange.state.restore import Restoration, Saved, merged, restoration, tree_of_names
from statexchange.storage.byte_range import ByteRange
from statexchange.storage.store import is_url
from statexchange.storage.tensorfile import digest
from statexchange.tensors import check_writable, mark_changed, torch_dtype

__all__ = ["LoadReport", "load_checkpoint"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    `nbytes` were read from the source for `num_tensors`; `missing` are names of the state that the source lacks,
    `unexpected` those of the source that the state lacks.
    """

    path: str
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float


@public_call("load_checkpoint")
def load_checkpoint(
    state: Any,
    source: str | os.PathLike[str],
    *,
    comm: Any = None,
    strict: bool = True,
    stall_timeout_s: float = 300.0,
) -> LoadReport:
    """Load the checkpoint at `source` into `state`, in place and bit by bit as it was saved.

    Collective over `comm`; blocks until all ranks are done. A rank reads what its own boxes need, so world size, mesh
    and placements may differ from those of the save. What several ranks of a host need is read once: from files through
    the page cache, from an object store by one rank, which sends it to the others. Shapes, dtypes and names are checked
    before anything is changed; a failure on any rank is raised on all. After a failure during reading, the state is
    part old, part new.

    Values that differ between ranks (e.g. RNG state) are restored per rank if the world size is unchanged. Otherwise
    differing tensors raise ReplicaError, and rank 0's plain values are used. Tensors with no counterpart in state are
    created as torch tensors.

    Boxes that a rank reads whole are checked against their digests; `verify` checks all. All ranks read the same
    checkpoint: if it is replaced during the load, the new one is loaded instead, once; after that it is an error.

    Args:
        state: a module, a mapping of names to tensors or a list of modules, with the source's names for tensors; or a
            nested mapping as for `save_checkpoint`, ``{"model": ..., "optimizer": ..., "step": 7}``, in which
            optimizers get state and param groups, objects with `load_state_dict` get their own state, and other entries
            are replaced. Megatron-Core's ShardedTensors are matched by their keys.
        source: a path or URL of anything that `merge_checkpoint` reads.
        comm: the communicator; by default the current one.
        strict: raise an error for names that a rank misses and for names that no rank has a place for, as torch does;
            else the report lists them. Shapes and dtypes must be equal in any case.
        stall_timeout_s: limit of the time in which no rank moves a byte; the total time is not limited.

    Returns:
        The number of bytes and tensors that this rank has read, and the names that were missing or unexpected.

    Raises:
        NotFoundError: nothing known is at `source`, or with `strict` a name is missing from it.
        InvalidArgumentError: with `strict` a name is unexpected; a shape or dtype differs; ranks passed different
            paths.
        IncompleteError: a rank's file or a region of a tensor is missing.
        OverlapError: two ranks saved overlapping regions of a tensor.
        ReplicaError: ranks saved different values of a region.
        CorruptError: bytes differ from their digest, or files contradict each other.
        ReplacedError: the checkpoint was replaced during the load, twice.
        UnsupportedError, StorageError.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        state = {"model": model, "optimizer": optimizer, "step": 0}
        statexchange.load_checkpoint(state, "/shared/run-7")
    """
    communicator = as_communicator(comm)
    began = time.perf_counter()
    try:
        return _load(state, source, communicator, strict, stall_timeout_s, began)
    except ReplacedError:  # raised on all ranks
        return _load(state, source, communicator, strict, stall_timeout_s, began)


def _load(
    state: Any, source: str | os.PathLike[str], communicator: Communicator, strict: bool, timeout_s: float, began: float
) -> LoadReport:
    """Load once; see `load_checkpoint`."""
    with contextlib.ExitStack() as holding:
        with communicator.phase("reading the headers", timeout_s=timeout_s):
            opened = holding.enter_context(_opened(source, communicator))
        _check_same(opened, communicator)
        return _fill(state, opened, communicator, strict, timeout_s, began)


def _fill(
    state: Any, opened: Source, communicator: Communicator, strict: bool, stall_timeout_s: float, began: float
) -> LoadReport:
    with communicator.phase("finding its tensors", timeout_s=stall_timeout_s):
        catalog = _Catalog(opened, communicator)
        wanted = _wanted(state, catalog)
        for name in filter(opened.unsupported.__contains__, wanted.missing):
            raise opened.unsupported[name]
        jobs = [_job(name, live, path, catalog) for name, live, path in wanted.targets]
    strangers = set.intersection(*map(set, communicator.all_gather_object(wanted.unexpected)))
    wanted.unexpected = [name for name in wanted.unexpected if name in strangers]  # no rank has a place for them
    with communicator.phase("comparing the names"):
        if strict:
            _check_names(wanted, catalog)
    readers = assign_readers(jobs, communicator) if is_url(opened.path) else {}
    with communicator.phase("reading", timeout_s=stall_timeout_s):
        mark_changed(live for _, live, _ in wanted.targets)
        mark_changed(part for job in jobs for part in job.held.tensors)
        read = read_all(jobs, readers, communicator)
        for deed in wanted.deeds:
            deed()
    names = (tuple(wanted.missing), tuple(wanted.unexpected))
    return LoadReport(opened.path, len(jobs), read, *names, time.perf_counter() - began)


def _check_same(opened: Source, comm: Communicator) -> None:
    """Raise, on all ranks, if they have opened different checkpoints. Collective.

    Of one path that is a ReplacedError, of different paths an InvalidArgumentError. Files of one name and size may
    still be those of two publications: ranks of a host compare which files they have opened, and so do all ranks on a
    file system that hosts share.
    """
    if comm.world_size == 1:
        return
    holders = [[os.path.basename(holder.path), holder.nbytes, len(holder.tensors)] for holder in opened.holders]
    shared = [holder.file.shared_identity for holder in opened.holders]
    local = [holder.file.local_identity for holder in opened.holders]
    facts = [opened.kind, opened.run, opened.round, holders, opened.manifest, shared]
    where = f", round {opened.round} of {opened.run}" if opened.round is not None else ""
    found = comm.all_gather_object([_digest(facts), _digest(local), opened.path, opened.path + where])
    for rank, theirs in enumerate(found):
        other = next(first for first, node in enumerate(comm.nodes) if node == comm.nodes[rank])
        same_facts, same_files = theirs[0] == found[0][0], theirs[1] == found[other][1]
        if same_facts and same_files:
            continue
        first = 0 if not same_facts else other
        if theirs[2] == found[first][2]:
            raise ReplacedError(
                f"ranks {first} and {rank} opened different versions of this checkpoint, because it was replaced "
                "during the load: load again when nothing publishes to this path",
                path=theirs[2],
            )
        raise InvalidArgumentError(
            f"rank {first} opened {found[first][3]} and rank {rank} opened {theirs[3]}: pass the same path on all "
            "ranks",
            rank=rank,
            path=theirs[3],
        )


def _digest(facts: Any) -> str:
    return digest(json.dumps(facts).encode())


def _opened(source: str | os.PathLike[str], comm: Communicator) -> Source:
    """The source; where there are several hosts, the error that it is not there tells on which."""
    try:
        return open_source(source)
    except NotFoundError as error:
        if comm.num_nodes == 1:
            raise
        text = f"{error.message} on {comm.hosts[comm.rank]}; all hosts must see the source"
        raise NotFoundError(text, rank=comm.rank, path=error.path) from error


class _Catalog:
    """The tensors of a source by name: dtype, shape, and where every box lies.

    On as many ranks as saved it, what a rank saved itself comes first.
    """

    def __init__(self, source: Source, comm: Communicator) -> None:
        self.source = source
        self.own = comm.rank if source.world_size == comm.world_size else None
        self.aliases: dict[str, str] = {}
        self._parts: dict[str, list[tuple[int, SourceTensor, str]]] = {}
        for holder in sorted(source.holders, key=lambda holder: holder.rank != self.own):
            self.aliases.update(holder.aliases)
            for tensor in holder.tensors.values():
                self._parts.setdefault(tensor.shard.name, []).append((holder.rank, tensor, holder.path))
        if source.manifest is not None:
            self.aliases.update(source.manifest.get("aliases", {}))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored(name) in self._parts

    def stored(self, name: str) -> str:
        """The name under which a tied tensor was written."""
        return name if name in self._parts else self.aliases.get(name, name)

    def _counting(self, name: str) -> list[tuple[int, SourceTensor, str]]:
        """The parts of a tensor that count: a whole one that this rank has saved itself counts alone."""
        parts = self._parts[self.stored(name)]
        rank, tensor, _ = parts[0]
        return parts[:1] if rank == self.own and tensor.shard.boxes == (full_box(tensor.shard.global_shape),) else parts

    def shard_of(self, name: str) -> Shard:
        """What the source says of a tensor; CorruptError if its files disagree."""
        parts = self._counting(name)
        first = parts[0][1].shard
        for _, tensor, path in parts[1:]:
            shard = tensor.shard
            if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
                raise CorruptError(
                    "two files disagree on dtype or shape",
                    name=name,
                    path=path,
                    expected=f"{first.dtype} {first.global_shape}",
                    found=f"{shard.dtype} {shard.global_shape}",
                )
        return first

    def boxes_of(self, name: str) -> dict[Box, tuple[ByteRange, int]]:
        """Return the byte range of each box, with the rank that saved it.

        ReplicaError if copies differ and none is this rank's own.
        """
        found: dict[Box, tuple[ByteRange, int]] = {}
        parts = self._counting(name)
        for rank, tensor, path in parts:
            for box, extent in zip(tensor.shard.boxes, tensor.extents, strict=True):
                if not box.numel:
                    continue
                known, first = found.setdefault(box, (extent, rank))
                if first != self.own and None not in (known.digest, extent.digest) and known.digest != extent.digest:
                    raise ReplicaError(
                        f"ranks {first} and {rank} saved different values for region {box}: on as many ranks as saved "
                        "them each gets its own",
                        name=name,
                        rank=rank,
                        path=path,
                    )
        return found


# What is wanted


def _wanted(state: Any, catalog: _Catalog) -> Restoration:
    """The tensors of `state` with their names in the source, and what is to be done besides."""
    types = values.types_of(state)
    own = catalog.source.configs.get(-1 if catalog.own is None else catalog.own)
    texts = [*([own] if own is not None else []), *catalog.source.configs.values()]
    kept: list[str] = []
    trees = [values.decode(text, types=types, leaf=_noting(kept)) for text in dict.fromkeys(texts)]
    of_names = not kept and (len(catalog) > 0 or not trees)  # a config beside tensors is not what they lie in
    saved = tree_of_names(state, catalog, catalog.source.texts) if of_names else merged(trees)
    wanted = restoration(state, saved, lambda name, own, like: _memory(catalog.shard_of(name), own, like))
    if of_names:
        taken = {catalog.stored(name) for name, _, _ in wanted.targets}
        wanted.unexpected = [name for name in (*catalog, *catalog.source.unsupported) if name not in taken]
    return wanted


def _noting(kept: list[str]) -> Callable[[str], Saved]:
    """Makes the places of tensors, whose names are kept."""

    def leaf(name: str) -> Saved:
        kept.append(name)
        return Saved(name)

    return leaf


def _memory(shard: Shard, own: Any, like: Any) -> Any:
    """`own` if the tensor fits into it; else new memory, placed as `like` if that has its shape, else whole."""
    import torch

    dtype = torch_dtype(shard.dtype)
    if isinstance(own, torch.Tensor) and (tuple(own.shape), own.dtype) == (shard.global_shape, dtype):
        return own
    if like is not None and tuple(like.shape) == shard.global_shape:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(shard.global_shape, dtype=dtype)


def _check_names(wanted: Restoration, catalog: _Catalog) -> None:
    """Missing or unexpected names, all at once, as torch reports them."""
    if not wanted.missing and not wanted.unexpected:
        return
    told = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("missing in the source", wanted.missing), ("not in the state", wanted.unexpected))
        if names
    ]
    text = f"the names differ; {'; '.join(told)} (strict=False loads what both have{_hint(wanted, catalog)})"
    kind = NotFoundError if wanted.missing else InvalidArgumentError
    raise kind(text, path=catalog.source.path)


def _hint(wanted: Restoration, catalog: _Catalog) -> str:
    """Return advice if the source has all missing names under one prefix, else ""."""
    for prefix in {name.split(".", 1)[0] for name in catalog if "." in name}:
        if wanted.missing and all(f"{prefix}.{name}" in catalog for name in wanted.missing):
            return f'; the source has them under "{prefix}": give {{"{prefix}": state}}'
    return ""


def _job(name: str, live: Any, path: str, catalog: _Catalog) -> Job:
    stored = catalog.shard_of(name)
    held = describe({path: live}).held[path]
    for part in held.tensors:
        check_writable(part, path)
    for what, ours, theirs in (
        ("shape", held.shard.global_shape, stored.global_shape),
        ("dtype", held.shard.dtype, stored.dtype),
    ):
        padded = what == "shape" and len(ours) == len(theirs) and getattr(live, "allow_shape_mismatch", False)
        if ours != theirs and not padded:  # of a padded tensor what both have is read
            raise InvalidArgumentError(
                f"{what} differs from the source's", name=path, path=catalog.source.path, expected=theirs, found=ours
            )
    boxes = catalog.boxes_of(name)
    try:
        prove_cover(name, stored.global_shape, {box: [rank] for box, (_, rank) in boxes.items()})
    except (CorruptError, IncompleteError) as error:
        raise error.located(name=name, path=catalog.source.path) from error
    return Job(name, held, {box: extent for box, (extent, _) in boxes.items()})
