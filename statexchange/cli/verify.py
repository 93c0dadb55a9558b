"""``statexchange verify``: read and check a whole checkpoint, or all saves of a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from statexchange.cli import commands
from statexchange.cli.output import Output, Row, code_of, error_record, fields_of, most_severe
from statexchange.cli.progress import Progress
from statexchange.errors import without_secrets
from statexchange.units import format_bytes, format_seconds, format_transfer

if TYPE_CHECKING:
    from statexchange.errors import StateExchangeError
    from statexchange.report.verify import VerifyReport
    from statexchange.report.verify_saves import SaveVerdict


@commands.command
@commands.each_path
def command(output: Output, path: str) -> int:
    """Check everything at PATH: digests, completeness, equal copies.

    Exits with 1 if copies of one region differ, 4 if something is broken, 5 if
    something is missing. If PATH is the directory of a job's saves, each save is
    checked, and the exit code is that of the most severe finding.
    """
    from statexchange.formats.registry import holds_saves
    from statexchange.report.verify import verify

    if holds_saves(path):
        return _verify_saves(output, path)
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


def _verify_saves(output: Output, path: str) -> int:
    from statexchange.report.verify_saves import verify_saves

    findings: list[StateExchangeError] = []
    records: list[Row] = []
    began = time.perf_counter()
    with Progress(output, "verify") as progress:
        for verdict in verify_saves(path, on_progress=progress):
            now = time.perf_counter()
            _show_save(output, verdict, now - began)
            began = now
            findings += verdict.findings
            records.append(_save_record(verdict))
    num_whole = sum(record["code"] == "OK" for record in records)
    output.line(f"{num_whole:,} of {len(records):,} saves are whole")
    worst = most_severe(findings)
    data = {"path": without_secrets(path), "kind": "saves", "num_saves": len(records), "num_whole": num_whole}
    return output.finish(code_of(worst) if worst else "OK", data, rows=("saves", records), error=worst)


def _show_save(output: Output, verdict: SaveVerdict, seconds: float) -> None:
    """Write one line, and one for each finding."""
    read = "not read"
    if verdict.report is not None:
        read = format_transfer(verdict.report.num_tensors, verdict.report.nbytes, seconds)
    num = len(verdict.findings)
    result = "ok" if not num else "1 finding" if num == 1 else f"{num:,} findings"
    output.line(f"step {verdict.step}: {read}: {result}")
    for finding in verdict.findings:
        output.line(f"{code_of(finding):<10}  {finding}")


def _save_record(verdict: SaveVerdict) -> Row:
    worst = most_severe(verdict.findings)
    report = verdict.report
    return {
        "step": verdict.step,
        "path": verdict.path,
        "code": code_of(worst) if worst else "OK",
        "num_tensors": None if report is None else report.num_tensors,
        "num_boxes": None if report is None else report.num_boxes,
        "nbytes": None if report is None else report.nbytes,
        "findings": [error_record(finding, code_of(finding)) for finding in verdict.findings],
    }
