"""Verify a checkpoint, or all saves of a job.

Recompute digests, prove that boxes cover each tensor once, compare copies, check values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from statexchange.errors import (
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    without_secrets,
)
from statexchange.formats.config_check import source_warnings
from statexchange.formats.registry import open_source
from statexchange.formats.sealed_files import check_sealed_file, sealed_files
from statexchange.formats.source import Source, SourceTensor
from statexchange.report.hub_metadata import HubComparison, compare_with_cache, compare_with_hub
from statexchange.report.tensor_facts import cover_problems, file_numbers, known_digest
from statexchange.report.value_checks import Check, TensorChecks, ValueFindingError
from statexchange.sharding.plan import prove_cover
from statexchange.storage.regions import BoxDigest, blocks, to_global
from statexchange.storage.save_check import check_saves
from statexchange.storage.steps import saves_path, step_name

_UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        path: the verified path.
        kind: its format; "unread" for a save or version that could not be opened, of which nothing is counted.
        num_tensors: number of tensors.
        num_boxes: number of boxes read.
        num_unproven: number of boxes whose bytes cannot be checked, as neither they nor their file has a known hash.
        nbytes: bytes read.
        findings: an error for each problem; then a `ValueFindingError` for each that the checks of values found.
        hub: the comparison with the hashes of a download, whose findings are among `findings`; None without.
        notes: files of weights that were not read and other facts about the reading; differences between a config and
            the tensors beside it.
    """

    path: str
    kind: str
    num_tensors: int
    num_boxes: int
    num_unproven: int
    nbytes: int
    findings: tuple[StateExchangeError, ...]
    hub: HubComparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether the numbers count what was read."""
        return self.kind != _UNREAD


def verify(
    path: str | os.PathLike[str],
    *,
    checks: Collection[Check] = (),
    against: str | os.PathLike[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read and check a whole checkpoint.

    Not collective. Problems become findings, not exceptions.

    Args:
        path: a path or URL of any format that `open_checkpoint` reads.
        checks: the checks of values to make.
        against: a directory with the metadata of a download from the Hub, with which files are compared. Without it,
            files of a snapshot in the Hub's cache are compared with the names of their blobs, which are hashes.
        on_progress: called with (bytes done, bytes in total), first of the hashes of a download, then of the tensors.

    Returns:
        The report.

    Raises:
        NotFoundError: there is no checkpoint at the path, or no metadata at `against`.
        ReplacedError: the checkpoint was replaced twice while it was read.
        UnsupportedError: the format is one that is not read.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.zeros(4)}, "model.safetensors")
        >>> report = verify("model.safetensors")
        >>> report.num_tensors, report.nbytes, report.findings
        (1, 32, ())
    """

    # All of it may be done twice: what was found before a replacement was noticed may be of two checkpoints.
    def attempt() -> VerifyReport:
        with open_source(path, strict=False) as source:
            source.read_ahead()
            if against is None:
                hub = compare_with_cache(source.opened, on_progress=on_progress)
            else:
                hub = compare_with_hub(path, against, on_progress=on_progress)
            check = _Check(source, checks, hub, on_progress)
            check.run()
            return VerifyReport(
                path=without_secrets(os.fspath(path)),
                kind=source.kind,
                num_tensors=len(source.tensor_names),
                num_boxes=check.num_boxes,
                num_unproven=check.num_unproven,
                nbytes=check.done,
                findings=tuple(check.findings),
                hub=hub,
                notes=(*source.notes, *source_warnings(source, check.digests)),
            )

    try:
        return attempt()
    except ReplacedError:  # read it again, once
        return attempt()


class _Check:
    """One pass over a source."""

    def __init__(
        self,
        source: Source,
        checks: Collection[Check],
        hub: HubComparison | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._checks = frozenset(checks)
        self._tensor_checks: dict[tuple[str, str, tuple[int, ...]], TensorChecks] = {}
        self._on_progress = on_progress
        # Every byte of these is known: they need no digest of each tensor.
        self._equal_files: set[str] = set()
        self._sealed = sealed_files(source)
        self._total = sum(sealed.digest_nbytes for sealed in self._sealed)
        self._total += sum(shard.nbytes for shard in source.described())
        self.done = self.num_boxes = self.num_unproven = 0
        self.findings: list[StateExchangeError] = [*source.problems, *source.unsupported.values()]
        self.findings += source.empty_weights()
        if hub is not None:
            self._equal_files.update(map(source.opened.store.path_of, hub.equal))
            self.findings += hub.findings
        self._computed: dict[tuple[int, str, int], str] = {}  # digests that are not stored: by file, tensor, box
        # The digests of each tensor's boxes; [] if several files have parts of it, whose order is not known.
        self.digests: dict[str, list[str]] = {}

    def run(self) -> None:
        """Check everything; raise ReplacedError if a file was replaced or changed while it was read."""
        values: list[ValueFindingError] = []
        for number, shard_file in enumerate(self._source.files):
            for name in shard_file.tensors:
                self._guard(self._read_tensor, number, name)
        # After all files: parts of one tensor may lie in several.
        for tensor_checks in self._tensor_checks.values():
            values += tensor_checks.findings()
        # Each tensor separately, so that every problem is reported. A spec is there exactly once.
        for name, numbers in file_numbers(self._source.files_without_specs).items():
            self._guard(self.findings.extend, cover_problems(self._source, name, numbers, self._computed))
        for sealed in self._sealed:
            self._guard(check_sealed_file, self._source.opened.store, sealed)
            self._count(sealed.digest_nbytes)
        # Last: what is broken explains odd values.
        self.findings += values
        self._source.check_unchanged()

    def _guard(self, check: Callable[..., None], *args: Any) -> None:
        """Call `check`; its error becomes a finding, unless the source was replaced."""
        try:
            check(*args)
        except ReplacedError:
            raise
        except StateExchangeError as error:
            self.findings.append(error)

    def _read_tensor(self, number: int, name: str) -> None:
        """Read all that a file has of a tensor."""
        is_alone = name not in self.digests
        self.digests[name] = []
        tensor = self._source.files[number].tensors[name]
        for index in range(len(tensor.byte_ranges)):
            self._guard(self._read_box, number, tensor, index)
        # A box that could not be read has no digest, which is another finding.
        of_boxes = [known_digest(self._computed, tensor, number, index) for index in range(len(tensor.byte_ranges))]
        if is_alone and None not in of_boxes:
            self.digests[name] = list(filter(None, of_boxes))

    def _read_box(self, number: int, tensor: SourceTensor, index: int) -> None:
        """Read a box, compare its digests, or those of its parts, and look at its values."""
        stored, box, shard = tensor.byte_ranges[index], tensor.shard.boxes[index], tensor.shard
        self.num_boxes += len(stored.parts) or 1
        digest = BoxDigest(stored, box, shard.dtype, always=not stored.parts)
        rank = None
        if self._source.has_ranks:
            rank = self._source.files[number].rank
        checked = None
        if self._checks:
            # Files that disagree on dtype or shape, which is another finding, are checked each by itself.
            key = shard.name, shard.dtype, shard.global_shape
            if key not in self._tensor_checks:
                self._tensor_checks[key] = TensorChecks(*key, self._checks)
            checked = self._tensor_checks[key].begin(stored, box, rank)
        for window, data in blocks(stored, box.shape, shard.dtype):
            placed = to_global(window, box)
            digest.update(placed, data)
            if checked is not None:
                checked.checks.add(checked, placed, data)
            self._count(len(data))
        if checked is not None:
            checked.checks.end(checked)
        # A box that several ranks wrote has digests of their parts alone, which prove it if they cover it.
        if stored.parts:
            prove_cover(shard.name, shard.global_shape, {part: [0] for part, _ in stored.parts})
        elif stored.digest is None:
            self.num_unproven += stored.path not in self._equal_files
            self._computed[number, shard.name, index] = digest.hexdigest()
        self.findings += digest.problems(shard.name, rank)

    def _count(self, nbytes: int) -> None:
        self.done += nbytes
        if self._on_progress is not None:
            self._on_progress(self.done, self._total)


def verify_saves(
    path: str | os.PathLike[str],
    *,
    checks: Collection[Check] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[dict[str, int], VerifyReport]]:
    """Read and check every save of a directory of steps, oldest first, and yield its keys and the result.

    Not collective. Problems become findings, not exceptions. A save that is removed meanwhile is left out.

    Args:
        path: the directory or URL in which `Checkpoints` saves.
        checks: the checks of values to make.
        on_progress: called with (bytes done, bytes in total) of each save.

    Yields:
        {"step": the step} and the result of a save.

    Raises:
        NotFoundError: the directory does not exist, or has no saves.
        InvalidArgumentError: it is one save, or a file.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.Checkpoints("saves").save({"w": torch.zeros(2)}, 10)
        >>> for keys, report in verify_saves("saves"):
        ...     keys, report.findings
        ({'step': 10}, ())
    """
    root = saves_path(path)
    for save in check_saves(root):
        if save.manifest is None:  # the ranks' files alone would look like another format
            yield {"step": save.step}, _unread(save.path, save.problems)
            continue
        report = verify_listed(os.path.join(root, step_name(save.step)), checks, on_progress)
        # The job may remove a save that was listed.
        was_removed = not report.is_read and isinstance(report.findings[0], NotFoundError)
        if not was_removed:
            yield {"step": save.step}, report


def verify_listed(path: str, checks: Collection[Check], on_progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Return the result for one of several checkpoints, whose error is its finding. Not collective."""
    try:
        return verify(path, checks=checks, on_progress=on_progress)
    except StateExchangeError as error:
        return _unread(without_secrets(path), (error,))


def _unread(path: str, findings: tuple[StateExchangeError, ...]) -> VerifyReport:
    return VerifyReport(path, _UNREAD, 0, 0, 0, 0, findings)
