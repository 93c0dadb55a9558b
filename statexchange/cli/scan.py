"""``statexchange scan``: the checkpoints below directories, and which of them are whole."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output
from statexchange.cli.progress import LiveLine
from statexchange.units import format_count, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from statexchange.report.scan import ScanRow

_HEADER = ("PATH", "KIND", "MODEL", "STEP", "TENSORS", "PARAMETERS", "BYTES", "AGE", "VERDICT")
_DROP = ("TENSORS", "PARAMETERS", "MODEL", "AGE", "STEP", "KIND")
_KEYS: dict[str, Callable[[ScanRow], tuple[float, str]]] = {
    "size": lambda row: (-row.nbytes, ""),
    "age": lambda row: (-(row.modified or 0.0), ""),
    "step": lambda row: (-1 if row.step is None else row.step, ""),
    "verdict": lambda row: (row.status == "whole", row.verdict),
}


@commands.command
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--only", type=click.Choice(["broken", "whole", "unfinished"]), help="List only the checkpoints of this status."
)
@click.option(
    "--sort",
    type=click.Choice(["path", *_KEYS]),
    default="path",
    show_default=True,
    help="Order of the rows: size: largest first; age: newest first; step: lowest first; verdict: not whole first.",
)
def command(output: Output, paths: tuple[str, ...], only: str | None, sort: str) -> int:
    """List the checkpoints below directories; say which are whole.

    Reads headers, manifests and sizes; verify reads everything. Exits with 1 if one is
    broken. Links to directories are not followed.

    \b
    Examples:
      statexchange scan .
      statexchange scan . --only broken --sort size
    """
    from statexchange.report.scan import scan

    num_directories = 0
    rows: list[ScanRow] = []
    with LiveLine(output, "scan") as live:

        def count(folder: str) -> None:
            nonlocal num_directories
            num_directories += 1
            live.show(lambda _: f"{num_directories:,} directories, {len(rows):,} checkpoints  {folder}")

        for path in paths:
            for row in scan(path, on_directory=count):
                rows.append(row)  # one by one, as `count` shows their number
    broken = [row for row in rows if row.status == "broken"]
    shown = [row for row in rows if only in (None, row.status)]
    if sort != "path":
        shown.sort(key=_KEYS[sort])
    cells = [_cells(output, row) for row in shown]
    output.table(_HEADER, cells, right=_HEADER[3:8], drop=_DROP)
    counts = ", ".join(f"{count:,} {status}" for status, count in Counter(row.status for row in rows).most_common())
    total = format_number(len(rows), "checkpoint")
    places = "1 directory" if num_directories == 1 else f"{num_directories:,} directories"
    output.message(f"{total} in {places}" + (f": {counts}" if rows else ""))
    data = {"num_directories": num_directories, "num_checkpoints": len(rows), "num_broken": len(broken)}
    return output.finish(data, rows=("checkpoints", shown), code="FINDINGS" if broken else "OK")


def _cells(output: Output, row: ScanRow) -> tuple[str, ...]:
    age = "-" if row.modified is None else format_seconds(max(0.0, time.time() - row.modified))
    return (
        row.path,
        row.kind or "-",
        row.model or "-",
        "-" if row.step is None else str(row.step),
        f"{row.num_tensors:,}" if output.aligned else str(row.num_tensors),
        format_count(row.num_parameters) if output.aligned else str(row.num_parameters),
        output.size(row.nbytes),
        age,
        row.verdict,
    )
