"""List what each rank has written to a workspace, round by round, from names and headers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import filterfalse, islice
from typing import Literal

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    without_secrets,
)
from statexchange.formats import workspace
from statexchange.report.configs import ConfigFacts, config_facts
from statexchange.storage import atomic
from statexchange.storage.location import OpenedPath, read_with_retry, resolve_path
from statexchange.storage.workspace import RankName, WorkspaceView

State = Literal["whole", "unfinished", "abandoned", "broken", "missing"]
_MAX_MISSING = 1000  # listed of a round: a file's name may claim any world size


@dataclass(frozen=True, slots=True)
class RankRow:
    """The state of one rank's write in one round.

    Attributes:
        run: the run.
        round: the round.
        rank: the rank; None for an unfinished file, whose name does not show it.
        world_size: number of ranks of the round; None for an unfinished file.
        state: "whole"; "broken" for a file that its header or name contradicts; "missing"; "unfinished" for a file
            that is being written, and "abandoned" if its writer has provably ended.
        path: the file's path, or that of the round if the missing file's name is not known.
        nbytes: bytes of the file; None for a missing one.
        written: when it was last written, in seconds since the epoch; None if that is not known.
        config: number of keys and type of its config; None if it cannot be read.
        problem: the error of a broken file.
    """

    run: str
    round: int
    rank: int | None
    world_size: int | None
    state: State
    path: str
    nbytes: int | None = None
    written: float | None = None
    config: ConfigFacts | None = None
    problem: StateExchangeError | None = None


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The progress of one rank.

    Attributes:
        rank: the rank.
        status: "present"; "late" if the newest whole round of another rank is newer; "missing" if it has none.
        round: its newest whole round; None if there is none, like all that follow.
        written: when it wrote that, as in `RankRow`.
        nbytes: bytes of its file.
        path: the file.
        num_config_keys: as in `ConfigFacts`.
        config_type: as in `ConfigFacts`.
    """

    rank: int
    status: Literal["present", "late", "missing"]
    round: int | None = None
    written: float | None = None
    nbytes: int | None = None
    path: str | None = None
    num_config_keys: int | None = None
    config_type: str | None = None


@dataclass(frozen=True, slots=True)
class RoundsReport:
    """The rounds of a workspace, of one of its runs, or one round.

    Attributes:
        path: its path.
        rows: a row for each rank and round, by run, round and rank.
        notes: what is not listed.
    """

    path: str
    rows: tuple[RankRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[StateExchangeError, ...]:
        """The errors of all rows."""
        return tuple(row.problem for row in self.rows if row.problem is not None)


def list_rounds(path: str | os.PathLike[str]) -> RoundsReport:
    """List what each rank has written to a workspace, or to one run or round of it.

    Not collective. Reads headers only. A rank that has no file in a round, but one in a newer round, is not listed
    there: ranks remove their older files.

    Args:
        path: the workspace, or the directory of a run or of a round in it.

    Raises:
        NotFoundError: the path does not exist.
        InvalidArgumentError: it is not a workspace.

    Example:
        >>> import statexchange as sx
        >>> sx.NFSWorkspace("ws", run="job").write_configs_and_weights({"layers": 2}, {})
        >>> for row in list_rounds("ws").rows:
        ...     row.run, row.round, row.rank, row.state, row.config.num_keys
        ('job', 1, 0, 'whole', 1)
    """

    def read(opened: OpenedPath) -> RoundsReport:
        rows: list[RankRow] = []
        notes: list[str] = []
        # The path may be a workspace, a run or a round: what lies above it says which.
        with opened:
            if not workspace.matches(opened):
                raise InvalidArgumentError("not a workspace: only workspaces have rounds", path=opened.path)
            root, run, number = workspace.position(opened)
            with root:
                view = WorkspaceView(root.store)
                for name, candidate in view.all_rounds(run):
                    if number is None or candidate == number:
                        rows += _rows_of_round(view, name, candidate, notes)
        return RoundsReport(without_secrets(os.fspath(path)), tuple(_sorted(rows)), tuple(notes))

    return read_with_retry(resolve_path(path, "a workspace"), read)


def _rows_of_round(view: WorkspaceView, run: str, number: int, notes: list[str]) -> Iterator[RankRow]:
    """Yield the rows of a round, none if it is removed meanwhile; add to `notes` what is not listed."""
    try:
        names = view.rank_names(run, number)
        temporary = view.temporary_files(run, number)
    except NotFoundError:
        return
    for name in names:
        # The file may be removed meanwhile.
        with contextlib.suppress(NotFoundError):
            yield _row(view, name)
    folder = os.path.join(view.path, run, f"{number:06d}")
    if names:
        ranks, world_size = {name.rank for name in names}, names[0].world_size
        # Lazily: a name may claim a world size of 10**9.
        for rank in islice(filterfalse(ranks.__contains__, range(world_size)), _MAX_MISSING):
            yield RankRow(run, number, rank, world_size, "missing", folder)
        hidden = world_size - len(ranks) - _MAX_MISSING
        if hidden > 0:
            notes.append(f"{hidden:,} more ranks have no file in round {number} of run {run}")
    for file_name, nbytes in temporary:
        state: State = "abandoned" if atomic.is_abandoned(file_name) else "unfinished"
        yield RankRow(run, number, None, None, state, os.path.join(folder, file_name), nbytes)


def _row(view: WorkspaceView, name: RankName) -> RankRow:
    """Return the row of a file; raise NotFoundError or ReplacedError if it was removed or replaced meanwhile."""
    path = os.path.join(view.path, name.relative)
    where = (name.run, name.round, name.rank, name.world_size)
    try:
        file = view.open(name)
        facts = config_facts(file.config, file.path, file.file.budget)
    except (NotFoundError, ReplacedError):
        raise
    except StateExchangeError as error:
        # Its size is known even if it cannot be opened.
        broken = view.stored(name)
        return RankRow(*where, "broken", path, None if broken is None else broken.size, problem=error)
    return RankRow(*where, "whole", path, file.file.size, file.file.modified, facts)


def _sorted(rows: list[RankRow]) -> Iterator[RankRow]:
    """Yield the rows by run, round and rank, without those of files that a rank has replaced by a newer round."""
    newest: dict[tuple[str, int | None], int] = {}
    for row in rows:
        if row.state == "whole":
            key = (row.run, row.rank)
            newest[key] = max(row.round, newest.get(key, row.round))
    for row in sorted(rows, key=lambda row: (row.run, row.round, row.rank is None, row.rank or 0)):
        # The rank has removed this file, when it wrote the newer round.
        if row.state == "missing" and newest.get((row.run, row.rank), 0) > row.round:
            continue
        yield row


def newest_of_ranks(report: RoundsReport, run: str) -> list[RankStatus]:
    """Return how far each rank of a run is, by its newest whole round. Not collective."""
    newest: dict[int, RankRow | None] = {}
    world_size = 0  # of the newest round, which comes last
    last = 0  # the newest whole round of any rank
    for row in report.rows:
        if row.run == run and row.rank is not None and row.world_size is not None:
            world_size = row.world_size
            newest.setdefault(row.rank, None)
            if row.state == "whole":
                newest[row.rank] = row
                last = max(last, row.round)
    statuses = []
    for rank, latest in sorted(newest.items()):
        # Rounds before a restart on fewer ranks had more.
        if rank >= world_size:
            continue
        if latest is None or latest.config is None:
            statuses.append(RankStatus(rank, "missing"))
            continue
        config = latest.config.num_keys, latest.config.type
        status: Literal["late", "present"] = "late" if latest.round < last else "present"
        statuses.append(RankStatus(rank, status, latest.round, latest.written, latest.nbytes, latest.path, *config))
    return statuses
