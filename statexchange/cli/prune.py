"""``statexchange prune``: remove the saves of a job, or the versions of weights, that need not stay."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.progress import Progress
from statexchange.errors import without_secrets
from statexchange.storage.steps import Retention, steps_text
from statexchange.units import format_bytes, format_number

if TYPE_CHECKING:
    from statexchange.checkpoint.prune import PruneReport

_HEADER = ("STEP", "BYTES", "ACTION", "WHY")
_VERSIONS_HEADER = ("RUN", "VERSION", "BYTES", "ACTION")


def _parse_best(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, str] | None:
    if value is None:
        return None
    # The last colon: the name of a metric may have one, such as "eval:loss".
    metric, _, direction = value.rpartition(":")
    if not metric or direction not in ("min", "max"):
        raise click.BadParameter(f"{value!r} is neither METRIC:min nor METRIC:max", context, parameter)
    return metric, direction


@commands.command
@click.argument("path")
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="Keep the newest N saves.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="STEPS", help="Keep saves at multiples of STEPS too.")
@click.option(
    "--best",
    metavar="METRIC:min|max",
    callback=_parse_best,
    help="Keep the save with the least or greatest METRIC too.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be removed.")
def command(
    output: Output,
    path: str,
    keep: int,
    keep_every: int | None,
    best: tuple[str, str] | None,
    dry_run: bool,
) -> int:
    """Remove old saves of a job, or old weight versions, at PATH.

    PATH is the directory in which Checkpoints saves. What killed processes left
    of unfinished saves is removed too. A broken save does not count as one of the
    newest, and is not removed; nor is a directory that has other files too. Each
    of these is a warning and sets the exit code.

    Of a directory of versions, --keep counts those of the current run; what these
    are based on stays, too. Others are retired, and removed by a later prune, or by
    the trainer, a minute later and once no reader has them.

    \b
    Examples:
      statexchange prune saves --keep 2 --keep-every 1000 --dry-run
      statexchange prune saves --keep 2
    """
    from statexchange.checkpoint.prune import prune_saves
    from statexchange.storage.versions import holds_versions

    commands.refuse_other_ranks()
    # Versions have no steps and no metrics.
    if holds_versions(path):
        if keep_every is not None or best is not None:
            raise click.UsageError("--keep-every and --best are for saves, and PATH has versions")
        return _prune_versions(output, path, keep, is_dry_run=dry_run)
    with Progress(output, "prune") as progress:
        report = prune_saves(path, Retention(keep, keep_every, best), dry_run=dry_run, on_progress=progress)
    # Broken saves are not removed, as parts of them may still be read.
    output.warnings(report.problems)
    _show(output, report)
    data = {"path": report.path, "dry_run": dry_run, "nbytes": report.nbytes}
    return output.finish(data, rows=("saves", report.rows), problems=report.problems)


def _prune_versions(output: Output, path: str, keep: int, *, is_dry_run: bool) -> int:
    from statexchange.checkpoint.version_retention import prune_versions

    rows = prune_versions(path, keep, dry_run=is_dry_run)
    cells = []
    nbytes = 0
    for row in rows:
        cells.append((row.run, str(row.version), output.size(row.nbytes), _action_text(row.action, is_dry_run)))
        # What is retired now is removed later.
        if row.action == "removed":
            nbytes += row.nbytes
    output.table(_VERSIONS_HEADER, cells, right=_VERSIONS_HEADER[1:3])
    if output.human:
        counts = Counter(map(attrgetter("action"), rows))
        removed = format_number(counts["removed"], "version")
        output.message(f"removed {removed}, {format_bytes(nbytes)}; {counts['retired']:,} retired")
    data = {"path": without_secrets(path), "dry_run": is_dry_run, "nbytes": nbytes}
    return output.finish(data, rows=("versions", list(map(fields_of, rows))))


def _show(output: Output, report: PruneReport) -> None:
    cells = []
    kept = []
    num_saves = num_unfinished = 0
    for row in report.rows:
        action = _action_text(row.action, report.dry_run)
        cells.append((str(row.step), output.size(row.nbytes), action, row.reason))
        if row.action == "kept":
            kept.append(row.step)
        elif row.action == "removed" and row.is_unfinished:
            num_unfinished += 1
        elif row.action == "removed":
            num_saves += 1
    output.table(_HEADER, cells, right=_HEADER[:2])
    # JSON has the rows, from which all of this follows.
    if not output.human:
        return
    text = "would remove" if report.dry_run else "removed"
    text += f" {format_number(num_saves, 'save')}"
    if num_unfinished:
        text += f" and {num_unfinished:,} unfinished"
    staying = "none"
    if kept:
        staying = f"step{'s' if len(kept) > 1 else ''} {steps_text(kept)}"
    output.message(f"{text}, {format_bytes(report.nbytes)}; kept {staying}")


def _action_text(action: str, is_dry_run: bool) -> str:
    """Return what was done, or would be done: "removed" becomes "would be removed"."""
    if is_dry_run and action in ("removed", "retired"):
        return f"would be {action}"
    return action
