"""Load a checkpoint into live state, in place, whatever mesh and placement it was saved from or is wanted in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from statexchange import values
from statexchange.comm.communicator import Communicator
from statexchange.comm.world import as_communicator
from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, NotFoundError, ReplicaError
from statexchange.exchange.buffers import torch_dtype
from statexchange.exchange.describe import describe
from statexchange.exchange.nested import Restoration, Saved, merged, names_tree, restoration
from statexchange.exchange.reading import Job, dealt, read_all
from statexchange.layout.plan import prove_cover
from statexchange.layout.shards import ITEMSIZE, Box, Shard, full_box
from statexchange.sources import Extent, Source, SourceTensor, open_source
from statexchange.storage.object_store import is_url
from statexchange.storage.regions import is_contiguous, linear_offset
from statexchange.storage.tensorfile import digest

__all__ = ["LoadReport", "load_checkpoint"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on this rank: `nbytes` it has taken from the source for `num_tensors`; `missing` are names of the
    state that the source lacks, `unexpected` those of the source that the state lacks."""

    path: str
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float


def load_checkpoint(
    state: Any,
    source: str | os.PathLike[str],
    *,
    comm: Any = None,
    strict: bool = True,
    stall_timeout_s: float = 300.0,
) -> LoadReport:
    """Fill `state` from the checkpoint at `source`, in place, bit by bit as it was saved.

    Collective over `comm`, and blocks until all ranks are done. `source` is anything that `merge_checkpoint` reads. A
    rank reads what its own boxes need, so world size, mesh and placements may be others than those it was saved with.
    What several ranks of a host want is read once: of files by the page cache, of objects by one rank for the others.
    What does not fit is found before anything is changed; any rank's failure is raised on all. After a failure while
    reading, the state is part old, part new.

    `state`: a module, a mapping of names to tensors or a list of modules, with the source's names for tensors; or
    what `save_checkpoint` takes, ``{"model": ..., "optimizer": ..., "step": 7}``, in which optimizers get state and
    param groups, what has a `load_state_dict` is given its own, and other entries are replaced. Megatron-Core's
    ShardedTensors go by their keys.
    With `strict`, names that a rank misses, and names that no rank has a place for, are an error, as in torch; else the
    report lists them. Shapes and dtypes must be equal. What ranks saved differently under one name, as a generator's
    state, each gets back on as many ranks; on others differing tensors are a ReplicaError, and of plain values the
    first rank's count. New tensors, in place of what is none in `state`, are torch's.
    `stall_timeout_s` limits the time in which nobody moves a byte, not the total.
    Boxes that a rank reads whole and in one run are checked against their digests; `verify` checks all.

    Raises NotFoundError, IncompleteError, CorruptError, ReplicaError, InvalidArgumentError, UnsupportedError,
    StorageError, StallError, PeerError.
    """
    communicator = as_communicator(comm)
    began = time.perf_counter()
    wanted = Restoration()
    with communicator.phase("reading the headers", timeout_s=stall_timeout_s):
        opened = _opened(source, communicator)
    _check_same(opened, communicator)
    with communicator.phase("finding its tensors", timeout_s=stall_timeout_s):
        catalog = _Catalog(opened, communicator)
        wanted = _wanted(state, catalog)
        jobs = [_job(name, live, path, catalog) for name, live, path in wanted.targets]
    strangers = set.intersection(*map(set, communicator.all_gather_object(wanted.unexpected)))
    wanted.unexpected = [name for name in wanted.unexpected if name in strangers]  # no rank has a place for them
    with communicator.phase("comparing the names"):
        if strict:
            _check_names(wanted, catalog)
    readers = dealt(jobs, communicator) if is_url(opened.path) else {}
    with communicator.phase("reading", timeout_s=stall_timeout_s):
        read = read_all(jobs, readers, communicator)
        for deed in wanted.deeds:
            deed()
    names = (tuple(wanted.missing), tuple(wanted.unexpected))
    return LoadReport(opened.path, len(jobs), read, *names, time.perf_counter() - began)


def _check_same(opened: Source, comm: Communicator) -> None:
    """InvalidArgumentError, on all ranks, if they have opened different checkpoints. Collective."""
    if comm.world_size == 1:
        return
    holders = [[os.path.basename(holder.path), holder.nbytes, len(holder.tensors)] for holder in opened.holders]
    facts = [opened.kind, opened.run, opened.round, holders, opened.manifest]
    told = f"{opened.path}" + (f", round {opened.round} of {opened.run}" if opened.round is not None else "")
    found = comm.all_gather_object([digest(json.dumps(facts).encode()), told])
    for rank, (theirs, at) in enumerate(found):
        if theirs != found[0][0]:
            raise InvalidArgumentError(
                f"ranks 0 and {rank} have opened different checkpoints, {found[0][1]} and {at}: give all the same; one "
                "that is replaced just now can be loaded again",
                rank=rank,
                path=at,
            )


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

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self._parts

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

    def boxes_of(self, name: str) -> dict[Box, Extent]:
        """Where each box of a tensor lies; ReplicaError if its copies differ and none is this rank's own."""
        found: dict[Box, tuple[Extent, int]] = {}
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
        boxes = {box: extent for box, (extent, _) in found.items()}
        return self._pieces_of(parts[0][1].shard, boxes) or boxes

    def _pieces_of(self, shard: Shard, boxes: Mapping[Box, Extent]) -> dict[Box, Extent]:
        """A published tensor in the pieces whose digests its manifest has, if each of them is one run of the file."""
        whole = boxes.get(full_box(shard.global_shape))
        fact = (self.source.manifest or {}).get("tensors", {}).get(shard.name)
        if whole is None or whole.digest is not None or whole.strides is not None or fact is None:
            return {}
        if (fact["dtype"], tuple(fact["shape"])) != (shard.dtype, shard.global_shape):
            return {}
        found = {}
        for *raw, known, _ in fact["boxes"]:
            box = Box.from_json(raw)
            if not is_contiguous(box, shard.global_shape):
                return {}
            begin = whole.begin + linear_offset(box, shard.global_shape) * ITEMSIZE[shard.dtype]
            found[box] = Extent(whole.path, begin, box.numel * ITEMSIZE[shard.dtype], known)
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
    saved = names_tree(state, catalog.__contains__) if of_names else merged(trees)
    wanted = restoration(state, saved, lambda name, own, like: _memory(catalog.shard_of(name), own, like))
    if of_names:
        taken = {catalog.stored(name) for name, _, _ in wanted.targets}
        wanted.unexpected = [name for name in catalog if name not in taken]
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
    """What to write instead, where the source has all missing names under one prefix."""
    for prefix in {name.split(".", 1)[0] for name in catalog if "." in name}:
        if wanted.missing and all(f"{prefix}.{name}" in catalog for name in wanted.missing):
            return f'; the source has them under "{prefix}": give {{"{prefix}": state}}'
    return ""


def _job(name: str, live: Any, path: str, catalog: _Catalog) -> Job:
    stored = catalog.shard_of(name)
    held = describe({path: live}).held[path]
    for part in held.tensors:
        _check_writable(part, path)
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
        prove_cover(name, stored.global_shape, {box: [0] for box in boxes})
    except CorruptError as error:
        raise CorruptError(error.message, name=name, path=catalog.source.path) from error
    except IncompleteError as error:
        raise IncompleteError(error.message, name=name, path=catalog.source.path) from error
    return Job(name, held, boxes)


def _check_writable(part: Any, path: str) -> None:
    if isinstance(part, np.ndarray):
        problem = None if part.flags.writeable else "this array is read-only"
    else:
        strides = zip(part.shape, part.stride(), strict=True)
        problem = "several elements lie in one place of memory" if any(n > 1 and not s for n, s in strides) else None
    if problem is not None:
        raise InvalidArgumentError(f"{problem}, and is to be filled", name=path)
