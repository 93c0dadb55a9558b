"""Export live sharded state as one Hugging Face checkpoint.

Root plans and keeps the metadata; every rank writes its own bytes in place. Nobody holds the model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange.checkpoint.extra_files import FilesFrom, extra_files
from statexchange.checkpoint.index import BoxFact
from statexchange.checkpoint.publication import PlannedFile, Publication, target_path
from statexchange.comm.communicator import Communicator
from statexchange.comm.world import as_communicator
from statexchange.errors import InvalidArgumentError, ReplicaError
from statexchange.exchange.answers import Answer, answer_bytes, operations, renames, shards_by_rank
from statexchange.exchange.reducing import Reduction, reduce_copies
from statexchange.exchange.writing import Order, write_boxes, writing_nodes
from statexchange.settings import check_timeout
from statexchange.sharding.options import ExportOptions, Rename, Replicas
from statexchange.sharding.plan import Holding, Plan, TensorPlan, plan_merge
from statexchange.sharding.shards import Box
from statexchange.state.describe import Description, describe
from statexchange.storage.store import is_url, text_of
from statexchange.storage.tensorfile import digest
from statexchange.tensors import ITEMSIZE

__all__ = ["ExportReport", "ExportRequest", "export_checkpoint", "export_described"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did. `files` are (name, bytes); `rank_nbytes` bytes of tensors by the rank that supplied them.

    By phase, `phases` has seconds and `phase_nbytes` bytes: what ranks told root ("describe"), what root told them
    ("plan"), tensors ("write") and receipts ("publish").
    """

    path: str
    files: tuple[tuple[str, int], ...]
    nbytes: int
    num_tensors: int
    aliases: Mapping[str, str]
    seconds: float
    phases: Mapping[str, float]
    phase_nbytes: Mapping[str, int]
    rank_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a call of `export_checkpoint` asks for beside the state."""

    path: str
    options: ExportOptions
    files_from: FilesFrom = None
    overwrite: bool = False
    stall_timeout_s: float = 300.0
    on_progress: Callable[[int, int], None] | None = None

    @classmethod
    def of(
        cls,
        out: str | os.PathLike[str],
        *,
        files_from: FilesFrom = None,
        overwrite: bool = False,
        stall_timeout_s: float = 300.0,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> ExportRequest:
        """Check and keep the arguments of a call; `options` are those of `ExportOptions`."""
        path = text_of(out, "out")
        check_timeout(stall_timeout_s, "stall_timeout_s")
        return cls(path, ExportOptions(**options), files_from, overwrite, stall_timeout_s, on_progress)


class _Clock:
    """Seconds and bytes by phase."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.phases: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    def lap(self, phase: str, nbytes: int = 0) -> None:
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self.nbytes[phase] = nbytes
        self._last = now


def export_checkpoint(
    state: Any,
    out: str | os.PathLike[str],
    *,
    comm: Any = None,
    layout: Mapping[str, Any] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    replicas: Replicas = "equal",
    dtype: Any = None,
    max_shard_size: int | str = "5GB",
    filename_pattern: str = "model{suffix}.safetensors",
    files_from: FilesFrom = None,
    overwrite: bool = False,
    stall_timeout_s: float = 300.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write the ranks' sharded `state` as one merged checkpoint directory `out`; the same report on every rank.

    Collective over `comm`. Only root's host has to see `out`: what others hold is sent there; hosts that see it, too,
    share the files. The directory appears when it is whole and durable, or not
    at all, and any rank's failure is raised on all ranks. No rank holds more than its own shard.

    `state`: a module, a mapping of names to tensors, or a list of such. DTensors, and Megatron-Core's ShardedTensors in
    its nested state dicts, say where they belong (the latter by their keys, and with the padding of a vocabulary); a
    plain tensor counts as a replica unless `layout` has a rule for its name pattern: torch's ``Shard(dim)`` or
    ``Replicate()``, ``{"dim": 0}``, transformers' `model.tp_plan`, or what else `statexchange.sharding.rules` tells.
    Where copies are reduced (``{"reduce": "max"}``), the rank that writes them holds them once more.

    `include` and `exclude` are shell patterns, one or several; `rename` a function or (regex, replacement) pairs;
    `dtype` casts floating tensors; `replicas="root"` takes the first holder's copy where copies differ; `files_from`
    names a directory (its small files go along) or files, or maps names to texts; `on_progress(done, total)` is called
    with this rank's bytes. `stall_timeout_s` limits the time in which nobody moves a byte, not the total.

    `out` and the options are root's: give the same on all ranks.

    Raises TargetExistsError, UnsafeError, IncompleteError, OverlapError, CorruptError, ReplicaError, UnsupportedError,
    InvalidArgumentError, NotFoundError (`files_from`), StorageError, StallError, PeerError.
    """
    communicator = as_communicator(comm)
    clock = _Clock()
    with communicator.phase("describing its state"):
        request = ExportRequest.of(
            out,
            include=include,
            exclude=exclude,
            rename=rename,
            replicas=replicas,
            dtype=dtype,
            max_shard_size=max_shard_size,
            filename_pattern=filename_pattern,
            layout=layout,
            files_from=files_from,
            overwrite=overwrite,
            stall_timeout_s=stall_timeout_s,
            on_progress=on_progress,
        )
        described = describe(state, request.options.new_layout(), communicator.rank)
    return _Export(communicator, described, request, clock).run()


def export_described(described: Description, request: ExportRequest, comm: Communicator) -> ExportReport:
    """Export what a rank has described, as `export_checkpoint` does. Collective."""
    return _Export(comm, described, request, _Clock()).run()


class _Export:
    """One export, from descriptions to the published directory."""

    def __init__(self, comm: Communicator, described: Description, request: ExportRequest, clock: _Clock) -> None:
        self._comm = comm
        self._described = described
        self._request = request
        self._options = request.options
        self._layout = request.options.new_layout()
        self._stall_timeout_s = request.stall_timeout_s
        self._clock = clock
        self._publication: Publication | None = None
        self._plan: Plan | None = None
        self._open: list[PlannedFile] = []
        self._probe = ""
        self._renames: list[dict[str, str]] = []
        self._operations: dict[str, str] = {}

    def run(self) -> ExportReport:
        """Export; collective."""
        comm = self._comm
        try:
            answers = self._answers()
            with comm.phase("planning"):
                if comm.rank == 0:
                    self._prepare(answers)
            told, _, ordered = comm.exchange(self._told() + b"\n" + self._order(), doing="the plan")[0].partition(b"\n")
            order = Order.parse(ordered)
            nodes = writing_nodes(comm, order)
            self._clock.lap("plan", len(told) + len(ordered))
            self._prepare_values(json.loads(told))
            digests: list[tuple[int, int, str]] = []
            with comm.phase("writing", timeout_s=self._stall_timeout_s):
                headers = [opened.header for opened in self._open]
                digests = write_boxes(comm, self._described, order, nodes, headers, self._request.on_progress)
            self._clock.lap("write", self._plan.nbytes if self._plan is not None else 0)
            receipts = comm.exchange(json.dumps(digests).encode(), root=0, doing="the receipts")
            report: ExportReport | None = None
            with comm.phase("publishing", timeout_s=self._stall_timeout_s):
                if comm.rank == 0:
                    report = self._publish(receipts, nodes)
            return self._shared(report)
        finally:
            if self._publication is not None:
                self._publication.abandon()

    def _answers(self) -> list[bytes]:
        """Root: every rank's description. Of equal ones the first alone travels."""
        comm, ours = self._comm, answer_bytes(self._described)
        digests = comm.exchange(digest(ours).encode(), doing="the comparison of descriptions")
        speaker: dict[bytes, int] = {}
        for rank, found in enumerate(digests):
            speaker.setdefault(found, rank)
        speaks = speaker[digests[comm.rank]] == comm.rank
        said = comm.exchange(ours if speaks else b"", root=0, doing="the gathering of descriptions")
        self._clock.lap("describe", sum(map(len, said)))
        return [said[speaker[found]] for found in digests] if comm.rank == 0 else []

    def _prepare(self, answers: Sequence[bytes]) -> None:
        """Root: prove the cover, take the target, and make the files."""
        self._layout.check_ranks(range(len(answers)))
        said = {answer: Answer.parse(answer) for answer in set(answers)}
        parsed = [said[answer] for answer in answers]
        unused = set.intersection(*(set(one.unused) for one in parsed))
        if unused:
            raise InvalidArgumentError(f"layout pattern {min(unused)!r} matches no tensor")
        self._renames = renames(parsed, self._layout)
        parsed = [
            one.renamed(names, rank) if names else one
            for rank, (one, names) in enumerate(zip(parsed, self._renames, strict=True))
        ]
        self._operations = operations(parsed)
        shards = shards_by_rank(parsed, self._layout)
        holdings = [Holding(rank, shards[rank], parsed[rank].aliases) for rank in range(len(parsed))]
        self._plan = plan_merge(holdings, self._options)
        path = target_path(self._request.path)
        if is_url(path):
            raise InvalidArgumentError(f"a checkpoint goes to a directory, not to {path!r}")
        extra = extra_files(self._request.files_from, self._plan)
        self._publication = Publication(
            path, self._plan, source="export", extra=extra, overwrite=self._request.overwrite
        )
        self._open = [self._publication.create(file) for file in self._plan.files]
        if self._comm.num_nodes > 1:
            self._probe = self._publication.make_probe()

    def _told(self) -> bytes:
        """Root: what every rank must do before it writes: new names of its tensors, and reductions."""
        if self._plan is None:
            return b""
        distinct: dict[str, int] = {}
        numbers = [distinct.setdefault(json.dumps(names, sort_keys=True), len(distinct)) for names in self._renames]
        reductions = [
            [tensor.source, self._operations[tensor.source], piece.holder, piece.box_index, piece.replicas]
            for file in self._plan.files
            for tensor in file.tensors
            if tensor.source in self._operations
            for piece in tensor.pieces
            if piece.replicas
        ]
        return json.dumps([[json.loads(text) for text in distinct], numbers, reductions]).encode()

    def _prepare_values(self, told: Any) -> None:
        """Every rank: names as the plan has them, and results in place of copies that are reduced."""
        comm = self._comm
        renames, numbers, reductions = told
        self._described = self._described.renamed(renames[numbers[comm.rank]])
        if reductions:
            with comm.phase("reducing copies", timeout_s=self._stall_timeout_s):
                self._described = reduce_copies(comm, self._described, [Reduction(*one) for one in reductions])
            self._clock.lap("reduce")

    def _order(self) -> bytes:
        """Root: what every rank must know to write its part."""
        if self._plan is None:
            return b""
        tensors = [
            [
                number,
                o.offset_of(t),
                list(t.shape),
                t.dtype,
                t.source,
                [
                    [*p.box.to_json(), p.holder, p.box_index, () if t.source in self._operations else p.replicas]
                    for p in t.pieces
                ],
            ]
            for number, (f, o) in enumerate(zip(self._plan.files, self._open, strict=True))
            for t in f.tensors
        ]
        opened = [[o.path, o.is_reserved] for o in self._open]
        return Order(opened, tensors, self._probe, self._options.replicas == "equal").to_bytes()

    def _publish(self, receipts: Sequence[bytes], nodes: Sequence[int]) -> ExportReport:
        """Root: compare replicas, finish files, write the manifest, rename."""
        plan, publication = self._plan, self._publication
        assert plan is not None
        assert publication is not None
        tensors = [tensor for file in plan.files for tensor in file.tensors]
        facts = _box_facts(tensors, [json.loads(receipt) for receipt in receipts])
        for opened, node in zip(self._open, nodes, strict=True):
            opened.finish(writes_header=node == self._comm.node_rank)
        small_files = publication.commit(facts)
        files = [(file.name, opened.nbytes) for file, opened in zip(plan.files, self._open, strict=True)]
        self._clock.lap("publish", sum(map(len, receipts)))
        return ExportReport(
            publication.path,
            tuple(sorted(files + small_files)),
            plan.nbytes,
            plan.num_tensors,
            plan.aliases,
            time.perf_counter() - self._clock.began,
            self._clock.phases,
            self._clock.nbytes,
            _supplied(tensors, self._comm.world_size),
        )

    def _shared(self, report: ExportReport | None) -> ExportReport:
        """Root's report on every rank."""
        fields = {name: getattr(report, name) for name in ExportReport.__slots__} if report is not None else None
        return ExportReport(**self._comm.broadcast_object(fields))


def _supplied(tensors: Sequence[TensorPlan], world_size: int) -> tuple[int, ...]:
    supplied = [0] * world_size
    for tensor in tensors:
        for piece in tensor.pieces:
            supplied[piece.holder] += piece.box.numel * ITEMSIZE[tensor.dtype]
    return tuple(supplied)


def _box_facts(tensors: Sequence[TensorPlan], receipts: Sequence[Sequence[Any]]) -> dict[str, list[BoxFact]]:
    """For each tensor the supplier and digest of each piece; replicas that differ are a ReplicaError."""
    found: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for rank, receipt in enumerate(receipts):
        for tensor, piece, box_digest in receipt:
            found.setdefault((tensor, piece), []).append((rank, box_digest))
    facts: dict[str, list[BoxFact]] = {}
    for number, tensor in enumerate(tensors):
        facts[tensor.name] = []
        for index, piece in enumerate(tensor.pieces):
            copies = found[number, index]
            ours = next(box_digest for rank, box_digest in copies if rank == piece.holder)
            for rank, theirs in copies:
                if theirs != ours:
                    raise replica_error(tensor.name, piece.box, piece.holder, rank)
            facts[tensor.name].append(BoxFact(piece.holder, ours))
    return facts


def replica_error(name: str, box: Box, rank: int, other: int) -> ReplicaError:
    """Two ranks, or one, hold different bytes for one box; the message says how to go on."""
    who = f"ranks {rank} and {other} hold" if rank != other else f"rank {rank} twice holds"
    return ReplicaError(
        f"{who} different values for region {box}: if each rank holds a part, say so with "
        f'layout={{"{name}": Shard(0)}}; to take rank {min(rank, other)}\'s copy, replicas="root"; tensors that '
        "are not the same, as of pipeline stages that each count their layers from 0, need names of their own",
        name=name,
        rank=other,
    )
