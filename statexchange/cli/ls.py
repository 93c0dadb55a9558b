"""``statexchange ls``: the tensors of a checkpoint, or the saves of a job."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.options import option
from statexchange.cli.output import Output, Row, code_of, error_record, fields_of, most_severe
from statexchange.cli.picture_file import PictureFile, picture_options
from statexchange.cli.table_layout import Narrowing
from statexchange.errors import InvalidArgumentError, did_you_mean, without_secrets
from statexchange.units import format_bytes, format_ranks, format_shape, format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.formats.source import Source
    from statexchange.report.rounds import RankRow
    from statexchange.report.saves import SaveRow, SavesReport, UnfinishedRow
    from statexchange.report.summary import TensorRow

_UNKNOWN = "?"
_HEADER = ("NAME", "DTYPE", "SHAPE", "BYTES", "HELD-BY")
_ROUNDS_HEADER = ("RUN", "ROUND", "RANK", "WRITTEN", "BYTES", "STATE")
_SAVES_HEADER = ("STEP", "TIME", "BYTES", "RANKS", "METRICS", "STATE")
_NARROWING = Narrowing(drop=("HELD-BY",), shorten={"HELD-BY": 20, "NAME": 32, "SHAPE": 16}, cut=("HELD-BY",))
_ROUNDS_NARROWING = Narrowing(drop=("WRITTEN",), shorten={"RUN": 16})
_SAVES_NARROWING = Narrowing(
    drop=("RANKS", "TIME"), shorten={"METRICS": 12, "STATE": 24}, cut=("METRICS",), wrap=("STATE",)
)


@commands.command
@picture_options("Draw which rank or file supplied which bytes into an SVG.")
@commands.each_path()
@option("include", "-i", help="List only tensors whose name matches; repeatable.")
@click.option("--rounds", is_flag=True, help="List the files of a workspace, by run, round and rank.")
def command(output: Output, path: str, include: tuple[str, ...], rounds: bool, picture: PictureFile | None) -> int:
    """List the tensors at PATH with dtypes, global shapes and bytes.

    Reads headers only. HELD-BY is the file, or the ranks that have a part.

    Lists the saves if PATH is the directory of a job's saves. STATE is what
    manifests, sizes and headers show; verify reads everything. Exits with 4 if a
    save is broken, 5 if a file is missing; an unfinished save is no finding.

    \b
    Examples:
      statexchange ls model --include "*.weight"
      statexchange ls model trained --json
    """
    from statexchange.formats.registry import holds_saves, open_source
    from statexchange.formats.source import abbreviated_list, abbreviated_reasons
    from statexchange.report.summary import known_bytes, tensor_rows

    if rounds:
        if picture is not None:
            raise InvalidArgumentError("--svg draws tensors, and --rounds lists files: leave one out")
        return _list_rounds(output, path, include)
    if holds_saves(path):
        if picture is not None:
            picture.refuse_saves(path)
        return _list_saves(output, path, include)
    source = open_source(path, strict=False)
    rows = _selected(tensor_rows(source), include)
    cells = [_cells(row, source.has_ranks, output.aligned) for row in rows]
    output.table(_HEADER, cells, right=("BYTES",), narrowing=_NARROWING)
    if source.others:
        output.message(f"entries that are not tensors: {abbreviated_list(source.others)}")
    for note in source.notes:
        output.message(note)
    if source.unsupported:
        output.warning(
            f"tensors that cannot be read: {abbreviated_reasons({n: e.message for n, e in source.unsupported.items()})}"
        )
    for problem in source.problems:
        output.warning(str(problem))
    if picture is not None:
        _draw_supply(source, rows, picture)
    worst = most_severe(source.problems)
    data = {
        "path": without_secrets(path),
        "kind": source.kind,
        "num_tensors": len(rows),
        "nbytes": known_bytes(rows),
        "others": dict(source.others),
        "picture": None if picture is None else picture.path,
    }
    return output.finish(code_of(worst) if worst else "OK", data, rows=("tensors", map(fields_of, rows)), error=worst)


def _draw_supply(source: Source, rows: list[TensorRow], picture: PictureFile) -> None:
    """Draw which rank or file supplied which bytes of the listed tensors."""
    from statexchange.report.supply import supply_of
    from statexchange.report.supply_picture import supply_picture

    names = {row.name for row in rows}
    picture.write(supply_picture(supply_of(source).select(names)))


def _selected(rows: list[TensorRow], patterns: Sequence[str]) -> list[TensorRow]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            hint = did_you_mean(pattern, (row.name for row in rows))
            raise InvalidArgumentError(f"include pattern {pattern!r} matches no tensor{hint}")
    return [row for row in rows if not patterns or any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]


def _cells(row: TensorRow, has_ranks: bool, is_rounded: bool) -> tuple[str, ...]:
    nbytes = _UNKNOWN if row.nbytes is None else format_bytes(row.nbytes) if is_rounded else str(row.nbytes)
    shape = _UNKNOWN if row.shape is None else format_shape(row.shape)
    held_by = format_ranks(row.holders) if has_ranks or len(row.holders) > 1 else row.file
    return row.name, row.dtype, shape, nbytes, held_by


def _list_rounds(output: Output, path: str, include: Sequence[str]) -> int:
    from statexchange.report.rounds import list_rounds

    if include:
        raise InvalidArgumentError("--include selects tensors, and --rounds lists files: leave one out")
    report = list_rounds(path)
    cells = [_round_cells(row, output.aligned) for row in report.rows]
    output.table(_ROUNDS_HEADER, cells, right=("ROUND", "BYTES"), narrowing=_ROUNDS_NARROWING)
    for note in report.notes:
        output.message(note)
    for problem in report.problems:
        output.warning(str(problem))
    worst = most_severe(report.problems)
    data = {"path": report.path, "kind": "workspace", "notes": list(report.notes)}
    rows = [_round_record(row) for row in report.rows]
    return output.finish(code_of(worst) if worst else "OK", data, rows=("rounds", rows), error=worst)


def _round_cells(row: RankRow, is_rounded: bool) -> tuple[str, ...]:
    nbytes = "-"
    if row.nbytes is not None:
        nbytes = format_bytes(row.nbytes) if is_rounded else str(row.nbytes)
    written = "-" if row.written is None else format_time(row.written)
    state = f"{row.state}, committed" if row.is_committed else row.state
    return row.run, str(row.round), "-" if row.rank is None else str(row.rank), written, nbytes, state


def _round_record(row: RankRow) -> Row:
    record = fields_of(row)
    record["config"] = None if row.config is None else fields_of(row.config)
    record["problem"] = None if row.problem is None else error_record(row.problem, code_of(row.problem))
    return record


def _list_saves(output: Output, path: str, include: Sequence[str]) -> int:
    from statexchange.report.saves import list_saves

    if include:
        raise InvalidArgumentError(
            "--include selects tensors, and this directory has saves: name one of them", path=path
        )
    report = list_saves(path)
    cells = [_save_cells(row, output.aligned) for row in report.saves]
    cells += [_unfinished_cells(row, output.aligned) for row in report.unfinished]
    output.table(_SAVES_HEADER, cells, right=("STEP", "BYTES", "RANKS"), narrowing=_SAVES_NARROWING)
    for text in report.warnings:
        output.warning(text)
    worst = most_severe(report.problems)
    data = {"path": report.path, "kind": "saves", "num_saves": len(report.saves), "nbytes": report.nbytes}
    return output.finish(code_of(worst) if worst else "OK", data, rows=("saves", _save_records(report)), error=worst)


def _save_cells(row: SaveRow, is_rounded: bool) -> tuple[str, ...]:
    if row.created is None or row.nbytes is None:
        return str(row.step), "-", "-", "-", "-", row.state
    metrics = ", ".join(f"{name} {value:g}" for name, value in row.metrics.items())
    nbytes = format_bytes(row.nbytes) if is_rounded else str(row.nbytes)
    return str(row.step), format_time(row.created), nbytes, str(row.world_size), metrics or "-", row.state


def _unfinished_cells(row: UnfinishedRow, is_rounded: bool) -> tuple[str, ...]:
    nbytes = format_bytes(row.nbytes) if is_rounded else str(row.nbytes)
    return str(row.step), "-", nbytes, "-", "-", row.state


def _save_records(report: SavesReport) -> list[Row]:
    """Return a JSON object for each save and unfinished save, with the same keys."""
    records: list[Row] = []
    for row in report.saves:
        problems = [error_record(problem, code_of(problem)) for problem in row.problems]
        worst = most_severe(row.problems)
        code = code_of(worst) if worst else "OK"
        records.append({**fields_of(row), "is_finished": True, "code": code, "problems": problems})
    empty = dict.fromkeys(("created", "world_size", "job", "code"))
    for unfinished in report.unfinished:
        records.append(
            {
                "step": unfinished.step,
                "path": next(iter(unfinished.paths), None),
                "nbytes": unfinished.nbytes,
                **empty,
                "metrics": {},
                "state": unfinished.state,
                "problems": [],
                "is_finished": False,
            }
        )
    return records
