"""``statexchange verify``: read and check a whole checkpoint, all saves of a job, or all versions of weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, Row, code_of, error_record, fields_of, worst_code
from statexchange.cli.progress import Progress
from statexchange.errors import CorruptError, IncompleteError, without_secrets
from statexchange.report.value_checks import CHECKS, ValueFindingError
from statexchange.units import format_bytes, format_number, format_seconds, format_transfer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from statexchange.errors import StateExchangeError
    from statexchange.report.hub_metadata import HubComparison
    from statexchange.report.value_checks import Check
    from statexchange.report.verify import VerifyReport

_NOT_IN_DATA = ("findings", "hub", "notes")  # notes are the warnings of the JSON


@commands.command
@commands.each_path(total="without a finding")
@click.option(
    "--values",
    is_flag=True,
    help="Check the values, too: NaN, infinities, zeros that a lost write left, constants.",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(CHECKS),
    metavar="CHECK",
    help=f"With --values, leave out one check: {', '.join(CHECKS[:-1])} or {CHECKS[-1]}; repeatable.",
)
@click.option(
    "--against",
    metavar="DIR",
    help="Compare files with the hashes in DIR/.cache/huggingface/download, as `hf download --local-dir` leaves them.",
)
def command(output: Output, path: str, values: bool, without: tuple[str, ...], against: str | None) -> int:
    """Check everything at PATH: digests, completeness, equal copies.

    Exits with 1 if copies of one region differ, or if --values finds something;
    4 if something is broken, 5 if something is missing. If PATH is the directory
    of a job's saves, or of weight versions, each of them is checked, a version with
    all that it is based on; the exit code is that of the most severe finding.

    \b
    Examples:
      statexchange verify model
      statexchange verify model trained --quiet
    """
    from statexchange.report.verify import verify

    if without and not values:
        raise click.UsageError("--without leaves out a check of --values: give --values, too")
    checks: list[Check] = []
    if values:
        checks = [check for check in CHECKS if check not in without]
        if not checks:
            raise click.UsageError("--without leaves out every check of --values")
    listing = commands.listing_at(path, against=against)
    if listing is not None:
        return _verify_each(output, path, listing, checks)
    began = time.perf_counter()
    try:
        with Progress(output, "verify") as progress:
            report = verify(path, checks=checks, against=against, on_progress=progress)
    except (CorruptError, IncompleteError) as error:
        # It cannot even be opened: the finding of one problem, with the same exit code as a problem that was found.
        return _finding_alone(output, error)
    output.warnings(report.notes)
    _show(output, report, checks, time.perf_counter() - began)
    data = fields_of(report)
    for key in _NOT_IN_DATA:
        del data[key]
    if report.hub is not None:
        data["against"] = fields_of(report.hub)
        del data["against"]["findings"]  # they are among those of the report
    return output.finish(data, rows=("findings", _records(report.findings)), problems=report.findings)


def _records(findings: Iterable[StateExchangeError]) -> list[Row]:
    """Return the JSON objects of findings; those of values have four keys more."""
    records = []
    for finding in findings:
        record = error_record(finding, code_of(finding))
        if isinstance(finding, ValueFindingError):
            for key in ("check", "region", "first", "count"):
                record[key] = getattr(finding, key)
        records.append(record)
    return records


def _show_findings(output: Output, findings: Iterable[StateExchangeError]) -> None:
    for finding in findings:
        output.line(f"{code_of(finding):<10}  {finding}")


def _finding_alone(output: Output, error: StateExchangeError) -> int:
    """Report the problem because of which a checkpoint cannot be opened."""
    _show_findings(output, [error])
    output.line("1 finding")
    return output.finish(None, rows=("findings", _records([error])), problems=[error])


def _show(output: Output, report: VerifyReport, checks: Sequence[Check], seconds: float) -> None:
    read = f"{format_bytes(report.nbytes)} read in {format_seconds(seconds)}"
    output.line(f"{report.path}: {report.kind}, {_tensors_text(report)}, {read}")
    _show_findings(output, report.findings)
    if report.hub is not None:
        _show_hub(output, report.hub)
    if report.num_unproven:
        output.warning(f"no digest is known of {_unproven_text(report)} bytes cannot be checked")
    # Nothing else shows that values were checked.
    has_odd_values = any(isinstance(finding, ValueFindingError) for finding in report.findings)
    if checks and report.num_boxes and not has_odd_values:
        output.line(f"values: nothing found by {', '.join(checks)}")
    # Never "ok" for more than was checked: without digests the bytes may be any.
    if report.findings:
        output.line(format_number(len(report.findings), "finding"))
    elif not report.num_boxes:
        output.line("ok, but there is no tensor in it, and so nothing to check")
    elif not report.num_unproven:
        output.line("ok: every element is there exactly once, every digest agrees")
    elif report.num_unproven < report.num_boxes:
        output.line("ok: every element is there exactly once, every digest that is known agrees")
    else:
        output.line("structure ok: every element is there exactly once; bytes not checked, no digest is known")


def _tensors_text(report: VerifyReport) -> str:
    """Return the number of tensors, and of the regions in which they are stored."""
    text = format_number(report.num_tensors, "tensor")
    if report.num_boxes != report.num_tensors:
        text += f" in {report.num_boxes:,} regions"
    return text


def _unproven_text(report: VerifyReport) -> str:
    """Return the number of tensors, or of regions where these are parts of tensors, whose digests are not known."""
    kind = "tensor" if report.num_boxes == report.num_tensors else "region"
    whose = "its" if report.num_unproven == 1 else "their"
    return f"{format_number(report.num_unproven, kind)}: {whose}"


def _show_hub(output: Output, hub: HubComparison) -> None:
    # Named, as "the hash of the download agrees" would be taken for all files.
    for name in hub.not_covered:
        output.line(f"NOT COVERED  the download has no hash of {name}")
    # A download that was resumed after the repository had changed
    if len(hub.commits) > 1:
        output.warning(f"the files were downloaded from {len(hub.commits):,} commits: {', '.join(hub.commits)}")
    are_equal = "file has the hash" if len(hub.equal) == 1 else "files have the hashes"
    output.line(f"{len(hub.equal):,} {are_equal} of the download; {len(hub.not_covered):,} not covered")


def _verify_each(output: Output, path: str, kind: str, checks: Collection[Check]) -> int:
    """Check all saves of a job, or all versions of weights."""
    from statexchange.report.verify import verify_saves
    from statexchange.report.versions import verify_versions

    findings: list[StateExchangeError] = []
    records: list[Row] = []
    num_whole = 0
    began = time.perf_counter()
    with Progress(output, "verify") as progress:
        verify_listed = verify_saves if kind == "saves" else verify_versions
        for keys, report in verify_listed(path, checks=checks, on_progress=progress):
            now = time.perf_counter()
            # Each report comes when its save has been read, so that the time since the last one is its own.
            read = "not read"
            if report.is_read:
                read = format_transfer(report.num_tensors, report.nbytes, now - began)
            began = now
            outcome = "ok"
            if report.findings:
                outcome = format_number(len(report.findings), "finding")
            output.line(f"{_label(keys)}: {read}: {outcome}")
            _show_findings(output, report.findings)
            findings += report.findings
            record: Row = {**keys, "path": report.path}
            for key in ("num_tensors", "num_boxes", "nbytes"):
                # 0 would be a number of what was read.
                record[key] = getattr(report, key) if report.is_read else None
            code = worst_code(report.findings)
            records.append({**record, "code": code, "findings": _records(report.findings)})
            # Copies that differ, and odd values, are findings in a save that is whole.
            num_whole += code in ("OK", "FINDINGS")
    output.line(f"{num_whole:,} of {len(records):,} {kind} are whole")
    data = {"path": without_secrets(path), "kind": kind, f"num_{kind}": len(records), "num_whole": num_whole}
    return output.finish(data, rows=(kind, records), problems=findings)


def _label(keys: Mapping[str, str | int]) -> str:
    if "step" in keys:
        return f"step {keys['step']}"
    if keys["run"]:
        return f"version {keys['run']}/{keys['version']}"
    return f"version {keys['version']}"
