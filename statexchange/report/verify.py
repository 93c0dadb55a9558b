"""Verify a checkpoint: recompute every digest, prove that boxes cover every tensor exactly, compare replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, ReplicaError, StateExchangeError
from statexchange.layout.plan import Holding, PlanOptions, TensorPlan, plan_merge, prove_cover
from statexchange.layout.shards import ITEMSIZE, Box
from statexchange.sources import Extent, Source, SourceTensor, open_source
from statexchange.storage import files
from statexchange.storage.regions import intersect, windows, within

__all__ = ["VerifyReport", "verify"]

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked and what was found. `num_unproven` counts boxes of which no digest is known."""

    path: str
    kind: str
    num_tensors: int
    num_boxes: int
    num_unproven: int
    nbytes: int
    findings: tuple[StateExchangeError, ...]


def verify(path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read and check everything at `path`; what is wrong becomes a finding, not an exception. Not collective.

    `on_progress(done, total)` counts bytes. Raises NotFoundError if there is nothing to verify.
    """
    source = open_source(path, strict=False)
    check = _Check(source, on_progress)
    check.run()
    names = {tensor.shard.name for _, tensor in source.shards()}
    return VerifyReport(
        os.fspath(path), source.kind, len(names), check.num_boxes, check.num_unproven, check.done, tuple(check.findings)
    )


class _Check:
    """One pass over a source."""

    def __init__(self, source: Source, on_progress: Callable[[int, int], None] | None) -> None:
        self._source = source
        self._on_progress = on_progress
        self._total = sum(extent.nbytes for _, tensor in source.shards() for extent in tensor.extents)
        self.done = 0
        self.num_boxes = 0
        self.num_unproven = 0
        self.findings: list[StateExchangeError] = list(source.problems)

    def run(self) -> None:
        published = self._source.manifest["tensors"] if self._source.manifest is not None else {}
        for holder, tensor in self._source.shards():
            self._guard(self._tensor, holder.rank, tensor, published.get(tensor.shard.name))
        if self._source.manifest is not None:
            self._compare_with_manifest(published)
        else:
            self._cover()

    def _guard(self, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except StateExchangeError as error:
            self.findings.append(error)

    def _tensor(self, rank: int, tensor: SourceTensor, published: Any) -> None:
        if published is not None and len(published["boxes"]) > 1:
            self._published_boxes(tensor, published)
            return
        for extent in tensor.extents:
            self._guard(self._extent, rank, tensor.shard.name, extent)

    def _extent(self, rank: int, name: str, extent: Extent) -> None:
        import xxhash

        self.num_boxes += 1
        hasher = xxhash.xxh3_128()
        fd = files.open_file(extent.path)
        try:
            for begin in range(0, extent.nbytes, _CHUNK_BYTES):
                chunk = bytearray(min(_CHUNK_BYTES, extent.nbytes - begin))
                files.pread_into(fd, memoryview(chunk), extent.begin + begin, extent.path)
                hasher.update(chunk)
                self._count(len(chunk))
        finally:
            os.close(fd)
        if extent.digest is None:
            self.num_unproven += 1
        elif hasher.hexdigest() != extent.digest:
            raise self._broken(
                name, extent.path, extent.digest, hasher.hexdigest(), rank if self._source.kind == "workspace" else None
            )

    def _broken(
        self, name: str, path: str, expected: str, found: str, rank: int | None, box: Box | None = None
    ) -> CorruptError:
        where = f" in region {box}" if box is not None else ""
        return CorruptError(
            f"bytes differ from their digest{where}", name=name, rank=rank, path=path, expected=expected, found=found
        )

    def _published_boxes(self, tensor: SourceTensor, published: Mapping[str, Any]) -> None:
        """All boxes of one merged tensor in one forward pass over its bytes."""
        import xxhash

        shard, extent = tensor.shard, tensor.extents[0]
        boxes = [(Box.from_json(raw[:2]), str(raw[2]), int(raw[3])) for raw in published["boxes"]]
        prove_cover(shard.name, shard.global_shape, {box: [rank] for box, _, rank in boxes})
        hashers = [xxhash.xxh3_128() for _ in boxes]
        fd = files.open_file(extent.path)
        try:
            at = extent.begin
            for window in windows(shard.global_shape, ITEMSIZE[shard.dtype]):
                buffer = bytearray(window.numel * ITEMSIZE[shard.dtype])
                files.pread_into(fd, memoryview(buffer), at, extent.path)
                at += len(buffer)
                for (box, _, _), hasher in zip(boxes, hashers, strict=True):
                    _hash_part(buffer, shard.dtype, window, box, hasher)
                self._count(len(buffer))
        finally:
            os.close(fd)
        for (box, expected, rank), hasher in zip(boxes, hashers, strict=True):
            self.num_boxes += 1
            if hasher.hexdigest() != expected:
                self.findings.append(self._broken(shard.name, extent.path, expected, hasher.hexdigest(), rank, box))

    def _compare_with_manifest(self, published: Mapping[str, Any]) -> None:
        found = {tensor.shard.name: tensor.shard for _, tensor in self._source.shards()}
        broken = {problem.path for problem in self._source.problems}
        for name, fact in published.items():
            shard = found.get(name)
            path = os.path.join(self._source.path, str(fact["file"]))
            if shard is None:
                if path not in broken:
                    self.findings.append(
                        IncompleteError("the manifest lists this tensor, no file has it", name=name, path=path)
                    )
            elif [shard.dtype, list(shard.global_shape)] != [fact["dtype"], fact["shape"]]:
                expected, has = f"{fact['dtype']} {fact['shape']}", f"{shard.dtype} {list(shard.global_shape)}"
                self.findings.append(
                    CorruptError("file and manifest disagree", name=name, path=path, expected=expected, found=has)
                )
        for name in found.keys() - published.keys():
            self.findings.append(
                CorruptError("the manifest does not list this tensor", name=name, path=self._source.path)
            )

    def _cover(self) -> None:
        """Prove the cover of each tensor by itself, so that every flaw is found, and compare replicas."""
        by_name: dict[str, None] = {tensor.shard.name: None for _, tensor in self._source.shards()}
        for name in by_name:
            self._guard(self._cover_of, name)

    def _cover_of(self, name: str) -> None:
        holdings = [
            Holding(holder.rank, [holder.tensors[name].shard] if name in holder.tensors else [])
            for holder in self._source.holders
        ]
        plan = plan_merge(holdings, PlanOptions())
        for tensor in plan.files[0].tensors:
            self._replicas(tensor)

    def _replicas(self, tensor: TensorPlan) -> None:
        for piece in tensor.pieces:
            ranks = [(piece.holder, piece.box_index), *piece.replicas]
            copies = {h: self._source.holders[h].tensors[tensor.source].extents[i].digest for h, i in ranks}
            for holder, known in copies.items():
                if known != copies[piece.holder]:
                    one, other = (self._source.holders[h].rank for h in (piece.holder, holder))
                    self.findings.append(
                        ReplicaError(
                            f"ranks {one} and {other} hold different values for region {piece.box}",
                            name=tensor.source,
                            rank=other,
                        )
                    )

    def _count(self, nbytes: int) -> None:
        self.done += nbytes
        if self._on_progress is not None:
            self._on_progress(self.done, self._total)


def _hash_part(buffer: bytearray, dtype: str, window: Box, box: Box, hasher: Any) -> None:
    from statexchange.layout.arrays import elements

    part = intersect(box, window)
    if part is not None:
        block = elements(buffer, dtype, window.shape)[within(part, window)]
        hasher.update(block.tobytes())
