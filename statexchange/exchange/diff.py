"""Compare two checkpoints, or a checkpoint with live state: each rank compares its own rows."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.conversions.choice import Convert
from statexchange.errors import InvalidArgumentError, excerpt, without_secrets
from statexchange.exchange.converting import ChosenConversion, convert_live
from statexchange.exchange.placing import place_parts
from statexchange.exchange.saved_names import SavedNames, saved_names
from statexchange.exchange.saving import describe_save
from statexchange.exchange.staging import Staging
from statexchange.formats.open_checkpoint import OpenCheckpoint, StoredTensor
from statexchange.formats.registry import open_source
from statexchange.formats.replicas import TAKE_LOWEST, check_tensor_copies
from statexchange.formats.sections import ALL
from statexchange.formats.source import SectionName, Source, Weights
from statexchange.report.diff import DiffReport, TensorDiff, check_tolerance, diff_paths
from statexchange.report.value_sums import ValueSums, same_bytes
from statexchange.settings import check_progress
from statexchange.sharding import records
from statexchange.sharding.options import ExportOptions, Rename
from statexchange.sharding.plan import RankShards, plan_merge
from statexchange.sharding.shards import Box, shape_from_json
from statexchange.state.describe import Description, LocalTensor, State
from statexchange.tensors import PACKED, array_over

__all__ = ["diff_checkpoints"]


def diff_checkpoints(
    a: State | str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    layout: Mapping[str, Any] | None = None,
    section: SectionName | Literal["all"] | None = None,
    weights: Weights | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    convert: Convert | None = None,
    convert_with: Mapping[str, int] | None = None,
    tolerance: float | None = None,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats and shardings, or live state with a checkpoint.

    Not collective for two paths; memory is bounded, whatever the size of the tensors. Collective over `comm` for live
    state: each rank compares the rows that it holds, and all get the same report, so a job can verify a load. Only
    tensors are compared.

    Args:
        a: a path or URL of any format that `open_checkpoint` reads; or live state, as for `save_checkpoint`.
        b: another path or URL.
        comm: for live state, a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        layout: for live state, the sharding of plain tensors, as for `save_checkpoint`.
        section: what to compare of a job's state, as for `merge_checkpoint`: by default the model, where it is known.
        weights: which weights of a DeepSpeed checkpoint are the model, as for `merge_checkpoint`, in a and b.
        include: shell patterns of names to compare; by default all. They are matched after `rename` and `convert`. A
            live model of transformers, such as one with all experts in one tensor, is compared by the names in b.
        exclude: shell patterns of names to leave out.
        rename: a function of a name, or (regex, replacement) pairs, for the names in a.
        convert: a conversion of the names and values in a, as for `merge_checkpoint`; `rename` applies after it. Live
            state must then be a model alone.
        convert_with: numbers that the conversion needs, by name. Others come from the config of a live model of
            transformers, or from a config.json beside a path.
        tolerance: values are equal if they differ by at most this, whatever their dtypes, and NaN equals NaN. By
            default bits and dtypes must be equal.
        threads: for two paths, the number of tensors read at once; by default one per core.
        on_progress: for two paths, called with (bytes done, bytes in total).

    Returns:
        The report. A tied name is listed if the other checkpoint stores a tensor under it.

    Raises:
        NotFoundError: there is no checkpoint at a path.
        IncompleteError: something is missing in one of them.
        CorruptError: a file is broken; `statexchange verify` names what.
        ReplicaError: the copies that ranks have of one tensor differ.
        ReplacedError: a checkpoint was changed while it was read.
        InvalidArgumentError: an option is wrong, or the patterns select no name.
        PeerError: another rank has failed.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.ones(4), "b": numpy.zeros(2)}, "a.safetensors")
        >>> save_file({"w": numpy.array([1.0, 1, 1.5, 1]), "b": numpy.zeros(2)}, "b.safetensors")
        >>> report = diff_checkpoints("a.safetensors", "b.safetensors")
        >>> for tensor in report.differing:
        ...     tensor.name, tensor.status, tensor.values.max_abs, tensor.values.first
        ('w', 'values', 0.5, (2,))
        >>> import torch
        >>> diff_checkpoints({"w": torch.ones(4, dtype=torch.float64)}, "a.safetensors", include="w").equal
        True
    """
    check_progress(on_progress)
    if isinstance(a, str | os.PathLike):
        return diff_paths(
            a,
            b,
            section=section,
            weights=weights,
            include=include,
            exclude=exclude,
            rename=rename,
            convert=convert,
            convert_with=convert_with,
            tolerance=tolerance,
            threads=threads,
            on_progress=on_progress,
        )
    with public_call("diff_checkpoints"):
        communicator = as_communicator(comm)
        with communicator.phase("describing its state"):
            check_tolerance(tolerance)
            conversion = ChosenConversion.of(convert, convert_with, a)
            selected = ExportOptions(include=include, exclude=exclude, rename=rename)
            saved = describe_save(a, layout, communicator.rank)
            # The names of a job's state begin with its sections.
            names_sections = conversion is None and isinstance(a, Mapping)
            wanted = ALL if section is None and names_sections else section
        described = saved.described
        described, _ = convert_live(communicator, described, conversion, ExportOptions(layout=layout))
        if conversion is None and communicator.all_gather_object(layout is not None).count(True):
            described = place_parts(communicator, described, saved.rules)
        with communicator.phase("choosing its names"):
            names = None if conversion is not None or layout is not None else saved_names(a)
        return _LiveComparison(communicator, described, selected, tolerance, names).run(b, wanted, weights)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A rank's part of one live tensor: dtype, global shape, and the sums of each box that could be compared."""

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[Box, ValueSums]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        boxes = [[box.to_json(), sums.to_json()] for box, sums in self.boxes.items()]
        return {"dtype": self.dtype, "shape": self.shape, "boxes": boxes}

    @classmethod
    def from_json(cls, raw: Any) -> _Compared:
        """Return the part that `to_json` wrote; raise ValueError for anything else."""
        dtype, shape, raw_boxes = records.fields(raw, "dtype", "shape", "boxes")
        boxes = {}
        for pair in records.items(raw_boxes, lambda pair: records.items(pair, lambda part: part, 2)):
            boxes[Box.from_json(pair[0])] = ValueSums.from_json(pair[1])
        return cls(records.text(dtype), shape_from_json(shape), boxes)


class _LiveComparison:
    """Compares live tensors with those of a checkpoint."""

    def __init__(
        self,
        comm: Communicator,
        described: Description,
        selected: ExportOptions,
        tolerance: float | None,
        names: SavedNames | None,
    ) -> None:
        self._comm = comm
        self._names = names
        self._described = described
        self._selected = selected
        self._tolerance = tolerance
        self._nbytes = 0

    def run(self, path: str | os.PathLike[str], section: str | None, weights: Weights | None) -> DiffReport:
        """Compare all tensors. Collective."""
        ours: dict[str, Any] = {}
        with contextlib.ExitStack() as holding:
            with self._comm.phase("reading the headers"):
                source = open_source(path, section=section, weights=weights).unwrapped()
                stored = holding.enter_context(OpenCheckpoint(source))
                names = list(stored)
            live = self._live(stored)
            with self._comm.phase("comparing its rows"):
                facts = {name: (one.dtype, one.shape) for name, one in stored.items() if self._selected.wants(name)}
                self._check_copies(source, facts.keys())
                for name, local in live.items():
                    ours[name] = self._compare(local, stored.get(name)).to_json()
                    self._comm.progress()
        parts: dict[str, list[_Compared]] = {}
        sent = self._comm.all_gather_object([ours, self._nbytes])
        nbytes = 0
        for rank, raw in enumerate(sent):
            of_rank, rank_nbytes = records.parsed(raw, _parts_of_rank, "its comparison", rank)
            nbytes += rank_nbytes
            for name, part in of_rank.items():
                parts.setdefault(name, []).append(part)
        tensors = []
        for name in sorted(parts.keys() | facts.keys()):
            tensors.append(self._result(name, parts.get(name, []), facts.get(name)))
        if not tensors and not names:
            raise InvalidArgumentError("there is nothing to compare: neither has a tensor", path=source.path)
        if not tensors:
            raise InvalidArgumentError(f"include and exclude select none of the names, such as {excerpt(names[0])}")
        notes = tuple(f"b: {note}" for note in source.notes)
        return DiffReport("live state", without_secrets(os.fspath(path)), tuple(tensors), nbytes, notes)

    def _live(self, stored: OpenCheckpoint) -> dict[str, LocalTensor]:
        """Return the selected live tensors by the names to compare. Collective.

        What a model of transformers has under another name in memory than in files has the checkpoint's name.
        """
        tensors = self._described.tensors
        apart = {name: local for name, local in tensors.items() if self._selected.renamed(name) not in stored}
        converted, _ = convert_live(self._comm, replace(self._described, tensors=apart), self._names, ExportOptions())
        live = {name: local for name, local in tensors.items() if name not in apart} | dict(converted.tensors)
        live = {self._selected.renamed(name): local for name, local in live.items()}
        return {name: local for name, local in live.items() if self._selected.wants(name)}

    def _check_copies(self, source: Source, names: Collection[str]) -> None:
        """Raise ReplicaError if copies in the checkpoint differ: only one of them is compared with the live state.

        Each rank checks its share of the tensors.
        """
        ours = set(sorted(names)[self._comm.rank :: self._comm.world_size])
        shards = []
        for holder in source.rank_shards():
            shards.append(RankShards(holder.rank, [shard for shard in holder.shards if shard.name in ours]))
        for file in plan_merge(shards).files:
            for tensor in file.tensors:
                check_tensor_copies(source, tensor, TAKE_LOWEST)
                self._comm.progress()

    def _compare(self, local: LocalTensor, stored: StoredTensor | None) -> _Compared:
        """Compare this rank's boxes of a tensor."""
        shard = local.shard
        boxes: dict[Box, ValueSums] = {}
        if stored is not None and stored.shape == shard.global_shape:
            for box, tensor in zip(shard.boxes, local.tensors, strict=True):
                boxes[box] = self._sums(box, tensor, shard.dtype, stored)
        return _Compared(shard.dtype, shard.global_shape, boxes)

    def _sums(self, box: Box, tensor: Any, dtype: str, stored: StoredTensor) -> ValueSums:
        sums = ValueSums()
        is_packed = bool({dtype, stored.dtype} & PACKED.keys())
        if is_packed and dtype != stored.dtype:  # values of packed dtypes are not computed
            return sums
        for window, data in Staging().parts(tensor, dtype):
            offsets = tuple(map(operator.add, box.offsets, window.offsets))
            theirs = stored.read(Box(offsets, window.shape))
            if is_packed:
                sums.num_differing += not same_bytes(memoryview(data).cast("B"), theirs.reshape(-1).data)
            else:
                sums.add(Box(offsets, window.shape), array_over(data, dtype, window.shape), theirs, self._tolerance)
            self._nbytes += theirs.nbytes
            self._comm.progress()
        return sums

    def _result(self, name: str, parts: Sequence[_Compared], stored: tuple[str, tuple[int, ...]] | None) -> TensorDiff:
        """Return the comparison of one tensor from the parts of all ranks."""
        if not parts:
            assert stored is not None  # the name comes from a, from b or from both
            return TensorDiff(name, "only in b", None, stored[0], None, stored[1])
        dtype, shape = parts[0].dtype, parts[0].shape
        if stored is None:
            return TensorDiff(name, "only in a", dtype, None, shape, None)
        if shape != stored[1]:
            return TensorDiff(name, "shape", dtype, stored[0], shape, stored[1])
        boxes: dict[Box, ValueSums] = {}
        for part in parts:
            for box, sums in part.boxes.items():
                if box not in boxes or sums.num_differing > boxes[box].num_differing:  # the worst of several copies
                    boxes[box] = sums
        total = ValueSums()
        for sums in boxes.values():
            total.merge(sums)
        if not total.num_differing and dtype == stored[0]:
            return TensorDiff(name, "equal", dtype, dtype, shape, shape, "bytes")
        values = None if {dtype, stored[0]} & PACKED.keys() else total.result()
        return TensorDiff.of_values(name, (dtype, stored[0]), shape, values, self._tolerance)


def _parts_of_rank(raw: Any) -> tuple[dict[str, _Compared], int]:
    parts, nbytes = records.items(raw, lambda part: part, 2)
    return records.mapping(parts, _Compared.from_json), records.count(nbytes)
