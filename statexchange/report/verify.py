"""Verify a checkpoint: recompute all digests, prove that boxes cover each tensor exactly once, compare replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statexchange.errors import ReplacedError, ReplicaError, StateExchangeError, without_secrets
from statexchange.formats.registry import open_source
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import RankShards, TensorPlan, plan_merge, prove_cover
from statexchange.storage.regions import BoxDigest, blocks, to_global

__all__ = ["VerifyReport", "verify"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        path: the verified path.
        kind: its format.
        num_tensors: number of tensors.
        num_boxes: number of boxes read.
        num_unproven: number of boxes without a known digest, whose bytes cannot be checked.
        nbytes: bytes read.
        findings: an error for each problem.
    """

    path: str
    kind: str
    num_tensors: int
    num_boxes: int
    num_unproven: int
    nbytes: int
    findings: tuple[StateExchangeError, ...]


def verify(path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read and check a whole checkpoint.

    Not collective. Problems become findings, not exceptions.

    Args:
        path: a path or URL of any format that `open_checkpoint` reads.
        on_progress: called with (bytes done, bytes in total).

    Returns:
        The report.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        ReplacedError: the checkpoint was replaced twice while it was read.
        UnsupportedError: the format is one that is only shown.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.zeros(4)}, "model.safetensors")
        >>> report = verify("model.safetensors")
        >>> report.num_tensors, report.nbytes, report.findings
        (1, 32, ())
    """
    for is_last_attempt in (False, True):
        with open_source(path, strict=False) as source:
            if source.refusal is not None and not source.problems:
                raise source.refusal
            check = _Check(source, on_progress)
            try:
                check.run()
            except ReplacedError:  # read it again, once
                if is_last_attempt:
                    raise
                continue
            names = {tensor.shard.name for _, tensor in source.shards()}
            return VerifyReport(
                path=without_secrets(os.fspath(path)),
                kind=source.kind,
                num_tensors=len(names),
                num_boxes=check.num_boxes,
                num_unproven=check.num_unproven,
                nbytes=check.done,
                findings=tuple(check.findings),
            )
    raise AssertionError("the last attempt returns or raises")


class _Check:
    """One pass over a source."""

    def __init__(self, source: Source, on_progress: Callable[[int, int], None] | None) -> None:
        self._source = source
        self._on_progress = on_progress
        self._total = sum(byte_range.nbytes for _, tensor in source.shards() for byte_range in tensor.byte_ranges)
        self.done = 0
        self.num_boxes = 0
        self.num_unproven = 0
        self.findings: list[StateExchangeError] = [*source.problems, *source.unsupported.values()]
        self._computed: dict[tuple[int, str, int], str] = {}  # digests that are not stored: by file, tensor, box

    def run(self) -> None:
        """Check everything; raise ReplacedError if a file was replaced or changed meanwhile."""
        for number, shard_file in enumerate(self._source.files):
            for tensor in shard_file.tensors.values():
                for index in range(len(tensor.byte_ranges)):
                    self._guard(self._box, number, tensor, index)
        self._cover()
        self._source.check_unchanged()

    def _guard(self, check: Callable[..., None], *args: Any) -> None:
        """Call `check`; its error becomes a finding, unless the source was replaced."""
        try:
            check(*args)
        except ReplacedError:
            raise
        except StateExchangeError as error:
            self.findings.append(error)

    def _box(self, number: int, tensor: SourceTensor, index: int) -> None:
        """Read a box and compare its digests, or those of its parts."""
        stored, box, shard = tensor.byte_ranges[index], tensor.shard.boxes[index], tensor.shard
        self.num_boxes += len(stored.parts) or 1
        digest = BoxDigest(stored, box, shard.dtype, always=not stored.parts)
        for window, data in blocks(stored, box.shape, shard.dtype):
            digest.update(to_global(window, box), data)
            self._count(len(data))
        if stored.parts:
            prove_cover(shard.name, shard.global_shape, {part: [0] for part, _ in stored.parts})
        elif stored.digest is None:
            self.num_unproven += 1
            self._computed[number, shard.name, index] = digest.hexdigest()
        rank = self._source.files[number].rank if self._source.kind in ("save", "workspace") else None
        for problem in digest.problems(shard.name, rank):
            self.findings.append(problem)

    def _cover(self) -> None:
        """Prove the cover of each tensor separately, so that every problem is found, and compare replicas."""
        by_name: dict[str, list[int]] = {}
        for number, shard_file in enumerate(self._source.files):
            for name in shard_file.tensors:
                by_name.setdefault(name, []).append(number)
        for name, numbers in by_name.items():
            self._guard(self._cover_of, name, numbers)

    def _cover_of(self, name: str, numbers: list[int]) -> None:
        """Prove the cover of one tensor, which is in the files with these numbers, and compare its replicas."""
        shard_files = [self._source.files[number] for number in numbers]
        rank_shards = [RankShards(shard_file.rank, [shard_file.tensors[name].shard]) for shard_file in shard_files]
        plan = plan_merge(rank_shards, ExportOptions())
        for tensor in plan.files[0].tensors:
            self._replicas(tensor, numbers)

    def _replicas(self, tensor: TensorPlan, numbers: list[int]) -> None:
        for piece in tensor.pieces:
            expected = self._digest(numbers[piece.holder], tensor.source, piece.box_index)
            for holder, index in piece.replicas:
                found = self._digest(numbers[holder], tensor.source, index)
                if expected is not None and found is not None and expected != found:
                    rank = self._source.files[numbers[piece.holder]].rank
                    other = self._source.files[numbers[holder]].rank
                    text = f"ranks {rank} and {other} hold different values for region {piece.box}"
                    self.findings.append(ReplicaError(text, name=tensor.source, rank=other))

    def _digest(self, number: int, name: str, index: int) -> str | None:
        """Return the digest of a box; None if it could not be read, which is another finding."""
        stored = self._source.files[number].tensors[name].byte_ranges[index].digest
        return stored if stored is not None else self._computed.get((number, name, index))

    def _count(self, nbytes: int) -> None:
        self.done += nbytes
        if self._on_progress is not None:
            self._on_progress(self.done, self._total)
