"""``statexchange ls``: the tensors of a checkpoint."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, code_of, fields_of, most_severe
from statexchange.errors import InvalidArgumentError, without_secrets
from statexchange.report.pictures import shape_text
from statexchange.units import format_bytes, format_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.report.summary import TensorRow

_HEADER = ("NAME", "DTYPE", "SHAPE", "BYTES", "HELD-BY")


@commands.command
@click.argument("path")
@click.option(
    "--include", "-i", multiple=True, metavar="GLOB", help="List only tensors whose name matches; repeatable."
)
def command(output: Output, path: str, include: tuple[str, ...]) -> int:
    """List the tensors at PATH with dtypes, global shapes and bytes.

    Reads headers only. HELD-BY is the file, or the ranks that have a part.
    """
    from statexchange.formats.registry import open_source
    from statexchange.formats.source import abbreviated_list
    from statexchange.report.summary import tensor_rows

    source = open_source(path, strict=False)
    rows = _selected(tensor_rows(source), include)
    by_rank = source.kind in ("workspace", "dcp")
    output.table(_HEADER, (_cells(row, by_rank, output.aligned) for row in rows), right=("BYTES",))
    if source.others:
        output.message(f"entries that are not tensors: {abbreviated_list(source.others)}")
    if source.unsupported:
        output.warning(
            f"tensors that cannot be read: {abbreviated_list({n: e.message for n, e in source.unsupported.items()})}"
        )
    for problem in source.problems:
        output.warning(str(problem))
    worst = most_severe(source.problems)
    data = {
        "path": without_secrets(path),
        "kind": source.kind,
        "num_tensors": len(rows),
        "nbytes": sum(row.nbytes for row in rows),
        "others": dict(source.others),
    }
    return output.finish(code_of(worst) if worst else "OK", data, rows=("tensors", map(fields_of, rows)), error=worst)


def _selected(rows: list[TensorRow], patterns: Sequence[str]) -> list[TensorRow]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            raise InvalidArgumentError(f"include pattern {pattern!r} matches no tensor")
    return [row for row in rows if not patterns or any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]


def _cells(row: TensorRow, by_rank: bool, is_rounded: bool) -> tuple[str, ...]:
    nbytes = format_bytes(row.nbytes) if is_rounded else str(row.nbytes)
    held_by = format_ranks(row.holders) if by_rank or len(row.holders) > 1 else row.file
    return row.name, row.dtype, shape_text(row.shape), nbytes, held_by
