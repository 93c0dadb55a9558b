"""``statexchange verify``: read and check a whole checkpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, code_of, error_record, fields_of, most_severe
from statexchange.cli.progress import Progress
from statexchange.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from statexchange.report.verify import VerifyReport


@commands.command
@click.argument("path")
def command(output: Output, path: str) -> int:
    """Check everything at PATH: digests, completeness, equal copies.

    Exits with 1 if copies of one region differ, 4 if something is broken, 5 if
    something is missing.
    """
    from statexchange.report.verify import verify

    began = time.perf_counter()
    with Progress(output, "verify") as progress:
        report = verify(path, on_progress=progress)
    _show(output, report, time.perf_counter() - began)
    worst = most_severe(report.findings)
    rows = [error_record(finding, code_of(finding)) for finding in report.findings]
    data = {key: value for key, value in fields_of(report).items() if key != "findings"}
    return output.finish(code_of(worst) if worst else "OK", data, rows=("findings", rows), error=worst)


def _show(output: Output, report: VerifyReport, seconds: float) -> None:
    output.line(
        f"{report.path}: {report.kind}, {report.num_tensors:,} tensors, {report.num_boxes:,} boxes, "
        f"{format_bytes(report.nbytes)} read in {format_seconds(seconds)}"
    )
    for finding in report.findings:
        output.line(f"{code_of(finding):<10}  {finding}")
    if report.num_unproven:
        output.warning(f"no digest is known of {report.num_unproven:,} boxes: their bytes cannot be checked")
    if report.findings:
        output.line("1 finding" if len(report.findings) == 1 else f"{len(report.findings):,} findings")
    elif not report.num_unproven:
        output.line("ok: every element is there exactly once, every digest agrees")
    elif report.num_unproven < report.num_boxes:
        output.line("ok: every element is there exactly once, every digest that is known agrees")
    else:
        output.line("structure ok: every element is there exactly once; bytes not checked, no digest is known")
