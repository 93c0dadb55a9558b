"""Verify a checkpoint: recompute every digest, prove that boxes cover every tensor exactly, compare replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, ReplicaError, StateExchangeError
from statexchange.layout.plan import Holding, PlanOptions, TensorPlan, plan_merge, prove_cover
from statexchange.layout.shards import ITEMSIZE, Box
from statexchange.sources import Source, SourceTensor, open_source
from statexchange.storage import files
from statexchange.storage.regions import intersect, windows, within

__all__ = ["VerifyReport", "verify"]


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
        self._found: dict[tuple[int, str, int], str] = {}  # digests that nobody knew before

    def run(self) -> None:
        published = self._source.manifest["tensors"] if self._source.manifest is not None else {}
        for number, holder in enumerate(self._source.holders):
            for tensor in holder.tensors.values():
                self._guard(self._tensor, number, tensor, published.get(tensor.shard.name))
        if self._source.manifest is not None:
            self._compare_with_manifest(published)
        else:
            self._cover()

    def _guard(self, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except StateExchangeError as error:
            self.findings.append(error)

    def _tensor(self, number: int, tensor: SourceTensor, published: Any) -> None:
        if published is not None and len(published["boxes"]) > 1:
            self._published_boxes(tensor, published)
            return
        for index in range(len(tensor.extents)):
            self._guard(self._extent, number, tensor, index)

    def _extent(self, number: int, tensor: SourceTensor, index: int) -> None:
        import xxhash

        extent, name = tensor.extents[index], tensor.shard.name
        self.num_boxes += 1
        hasher = xxhash.xxh3_128()
        for block in tensor.blocks(index):
            hasher.update(block)
            self._count(len(block))
        found = hasher.hexdigest()
        if extent.digest is None:
            self.num_unproven += 1
            self._found[number, name, index] = found
        elif found != extent.digest:
            rank = self._source.holders[number].rank if self._source.kind == "workspace" else None
            raise self._broken(name, extent.path, extent.digest, found, rank)

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
        fd = files.open_for_reading(extent.path)
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
            files.close(fd)
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
        by_name: dict[str, list[int]] = {}
        for number, holder in enumerate(self._source.holders):
            for name in holder.tensors:
                by_name.setdefault(name, []).append(number)
        for name, numbers in by_name.items():
            self._guard(self._cover_of, name, numbers)

    def _cover_of(self, name: str, numbers: list[int]) -> None:
        held = [self._source.holders[number] for number in numbers]
        plan = plan_merge([Holding(holder.rank, [holder.tensors[name].shard]) for holder in held], PlanOptions())
        for tensor in plan.files[0].tensors:
            self._replicas(tensor, numbers)

    def _replicas(self, tensor: TensorPlan, numbers: list[int]) -> None:
        for piece in tensor.pieces:
            ours = self._digest(numbers[piece.holder], tensor.source, piece.box_index)
            for holder, index in piece.replicas:
                theirs = self._digest(numbers[holder], tensor.source, index)
                if ours is not None and theirs is not None and ours != theirs:
                    one, other = (self._source.holders[numbers[h]].rank for h in (piece.holder, holder))
                    self.findings.append(
                        ReplicaError(
                            f"ranks {one} and {other} hold different values for region {piece.box}",
                            name=tensor.source,
                            rank=other,
                        )
                    )

    def _digest(self, number: int, name: str, index: int) -> str | None:
        """The digest of a box; None if it could not be read, which is a finding of its own."""
        known = self._source.holders[number].tensors[name].extents[index].digest
        return known if known is not None else self._found.get((number, name, index))

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
