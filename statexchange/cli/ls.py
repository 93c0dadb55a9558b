"""``statexchange ls``: the tensors of a checkpoint, the saves of a job, or the versions of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.options import option
from statexchange.cli.output import Output, Row, fields_of, worst_code
from statexchange.cli.picture_file import PictureFile, picture_options
from statexchange.errors import InvalidArgumentError, without_secrets
from statexchange.sharding.options import ExportOptions
from statexchange.units import format_number, format_ranks, format_shape

if TYPE_CHECKING:
    from statexchange.errors import StateExchangeError
    from statexchange.report.rounds import RankRow
    from statexchange.report.saves import SaveRow, UnfinishedRow
    from statexchange.report.tensor_facts import TensorRow
    from statexchange.report.versions import VersionRow

_UNKNOWN = "?"
_HEADER = ("NAME", "DTYPE", "SHAPE", "BYTES", "HELD-BY")
_ROUNDS_HEADER = ("RUN", "ROUND", "RANK", "WRITTEN", "BYTES", "STATE")
_SAVES_HEADER = ("STEP", "TIME", "BYTES", "RANKS", "METRICS", "STATE")
_VERSIONS_HEADER = ("RUN", "VERSION", "TIME", "BYTES", "KIND", "STATE")


@commands.command
@picture_options("Draw which rank or file supplied which bytes into an SVG.")
@commands.each_path()
@option("include", "-i", help="List only tensors whose name matches; repeatable.")
@click.option("--rounds", is_flag=True, help="List the files of a workspace, by run, round and rank.")
def command(output: Output, path: str, include: tuple[str, ...], rounds: bool, picture: PictureFile | None) -> int:
    """List the tensors at PATH with dtypes, global shapes and bytes.

    Reads headers only. HELD-BY is the file, or the ranks that have a part; where
    there are no ranks, the numbers of the files.

    Lists the saves if PATH is the directory of a job's saves, and the versions if
    it is a directory of weight versions. STATE is what manifests, sizes and headers
    show; verify reads everything. Exits with 4 if one is broken, 5 if a file is
    missing; an unfinished save is no finding.

    \b
    Examples:
      statexchange ls model --include "*.weight"
      statexchange ls model trained --json
    """
    from statexchange.formats.registry import open_source
    from statexchange.formats.source import abbreviated_list, abbreviated_reasons
    from statexchange.report.tensor_facts import known_bytes, tensor_rows

    if rounds and (include or picture is not None):
        raise InvalidArgumentError(
            "--include and --svg are for tensors, and --rounds lists files: leave it out", path=path
        )
    listing = commands.listing_at(path, include=include, svg=picture, rounds=rounds)
    if listing == "versions":
        return _list_versions(output, path)
    if listing == "saves":
        return _list_saves(output, path)
    if rounds:
        return _list_rounds(output, path)
    # What is broken or missing is a warning; the rest is listed.
    source = open_source(path, strict=False)
    rows = tensor_rows(source)
    if include:
        # By the rules of a merge, which refuses a pattern that matches nothing.
        selected = ExportOptions(include=include)
        selected.check_include([row.name for row in rows])
        rows = [row for row in rows if selected.wants(row.name)]
    cells = [_cells(output, row, source.has_ranks) for row in rows]
    output.table(_HEADER, cells, right=("BYTES",), drop=("HELD-BY",))
    if source.others:
        output.message(f"entries that are not tensors: {abbreviated_list(source.others)}")
    for note in source.notes:
        output.message(note)
    if source.unsupported:
        reasons = {name: error.message for name, error in source.unsupported.items()}
        output.warning(f"tensors that cannot be read: {abbreviated_reasons(reasons)}")
    output.warnings(source.problems)
    if picture is not None:
        from statexchange.report.supply import supply_of, supply_picture

        picture.write(supply_picture(supply_of(source).select({row.name for row in rows})))
    data = {
        "path": without_secrets(path),
        "kind": source.kind,
        "num_tensors": len(rows),
        "nbytes": known_bytes(rows),
        "others": dict(source.others),
        "picture": picture and picture.path,
    }
    return output.finish(data, rows=("tensors", [row._asdict() for row in rows]), problems=source.problems)


def _cells(output: Output, row: TensorRow, has_ranks: bool) -> tuple[str, ...]:
    nbytes = shape = _UNKNOWN
    if row.nbytes is not None:
        nbytes = output.size(row.nbytes)
    if row.shape is not None:
        shape = format_shape(row.shape)
    # Without ranks the holders are numbers of files, and the name of a single one says more.
    held_by = row.file
    if has_ranks or len(row.holders) > 1:
        held_by = format_ranks(row.holders)
    return row.name, row.dtype, shape, nbytes, held_by


def _list_rounds(output: Output, path: str) -> int:
    from statexchange.report.rounds import list_rounds

    report = list_rounds(path)
    cells = [_round_cells(output, row) for row in report.rows]
    output.table(_ROUNDS_HEADER, cells, right=("ROUND", "BYTES"), drop=("WRITTEN",))
    for note in report.notes:
        output.message(note)
    output.warnings(report.problems)
    data = {"path": report.path, "kind": "workspace", "notes": report.notes}
    return output.finish(data, rows=("rounds", report.rows), problems=report.problems)


def _round_cells(output: Output, row: RankRow) -> tuple[str, ...]:
    rank = "-"  # the name of a file that is being written does not show its rank
    if row.rank is not None:
        rank = str(row.rank)
    return row.run, str(row.round), rank, output.time(row.written), output.size(row.nbytes), row.state


def _list_versions(output: Output, path: str) -> int:
    from statexchange.report.versions import list_version_rows

    rows = list_version_rows(path)
    cells = [_version_cells(output, row) for row in rows]
    output.table(_VERSIONS_HEADER, cells, right=("VERSION", "BYTES"), drop=("RUN", "TIME"))
    problems: list[StateExchangeError] = []
    records: list[Row] = []
    nbytes = 0
    for row in rows:
        problems += row.problems
        records.append({**fields_of(row), "code": worst_code(row.problems)})
        nbytes += row.nbytes
    output.warnings(problems)
    data = {"path": without_secrets(path), "kind": "versions", "num_versions": len(rows), "nbytes": nbytes}
    return output.finish(data, rows=("versions", records), problems=problems)


def _version_cells(output: Output, row: VersionRow) -> tuple[str, ...]:
    kind = row.kind or _UNKNOWN
    if row.base_version is not None:
        kind = f"delta of {row.base_version}, {format_number(row.changed or 0, 'tensor')}"
    return row.run or "-", str(row.version), output.time(row.created), output.size(row.nbytes), kind, row.state


def _list_saves(output: Output, path: str) -> int:
    from statexchange.report.saves import list_saves

    report = list_saves(path)
    unfinished = list(map(_unfinished_row, report.unfinished))
    cells = [_save_cells(output, row) for row in (*report.saves, *unfinished)]
    output.table(_SAVES_HEADER, cells, right=("STEP", "BYTES", "RANKS"), drop=("RANKS", "TIME"))
    output.warnings(report.warnings)
    records: list[Row] = []
    for row in report.saves:
        records.append({**fields_of(row), "is_finished": True, "code": worst_code(row.problems)})
    # They have the same keys, and no code: a save that is being written is no problem.
    for row in unfinished:
        records.append({**fields_of(row), "path": row.path or None, "is_finished": False, "code": None})
    data = {"path": report.path, "kind": "saves", "num_saves": len(report.saves), "nbytes": report.nbytes}
    return output.finish(data, rows=("saves", records), problems=report.problems)


def _unfinished_row(row: UnfinishedRow) -> SaveRow:
    """Return a row with the same keys as those of saves."""
    from statexchange.report.saves import SaveRow

    return SaveRow(row.step, next(iter(row.paths), ""), nbytes=row.nbytes, state=row.state)


def _save_cells(output: Output, row: SaveRow) -> tuple[str, ...]:
    metrics = ", ".join(f"{name} {value:g}" for name, value in row.metrics.items())
    size, ranks = output.size(row.nbytes), str(row.world_size or "-")
    state = row.state
    if row.is_superseded:
        state += ", superseded"
    return str(row.step), output.time(row.created), size, ranks, metrics or "-", state
