"""``statexchange scan``: the checkpoints below directories, and which of them are whole."""

from __future__ import annotations

import time
from collections import Counter
from operator import attrgetter
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
    "step": lambda row: (-1 if row.step is None else row.step, ""),  # first those without a step
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
    # What --only leaves out is counted, and decides the exit code.
    statuses = Counter(map(attrgetter("status"), rows))
    shown = [row for row in rows if only in (None, row.status)]
    if sort != "path":
        shown.sort(key=_KEYS[sort])
    cells = [_cells(output, row) for row in shown]
    output.table(_HEADER, cells, right=_HEADER[3:8], drop=_DROP)
    places = "1 directory" if num_directories == 1 else f"{num_directories:,} directories"
    text = f"{format_number(len(rows), 'checkpoint')} in {places}"
    if rows:
        text += f": {', '.join(f'{count:,} {status}' for status, count in statuses.most_common())}"
    output.message(text)
    num_broken = statuses["broken"]
    data = {"num_directories": num_directories, "num_checkpoints": len(rows), "num_broken": num_broken}
    return output.finish(data, rows=("checkpoints", shown), is_ok=not num_broken)


def _cells(output: Output, row: ScanRow) -> tuple[str, ...]:
    step = age = "-"
    if row.step is not None:
        step = str(row.step)
    if row.modified is not None:
        # A server's clock may be ahead.
        age = format_seconds(max(0.0, time.time() - row.modified))
    num_tensors, num_parameters = str(row.num_tensors), str(row.num_parameters)
    if output.aligned:
        num_tensors, num_parameters = f"{row.num_tensors:,}", format_count(row.num_parameters)
    texts = (row.path, row.kind or "-", row.model or "-", step, num_tensors, num_parameters)
    return (*texts, output.size(row.nbytes), age, row.verdict)
