"""``statexchange info``: what lies at a path, in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from statexchange.cli import command as commands
from statexchange.cli.output import Output, code_of, fields_of, gravest
from statexchange.cli.text import ranges
from statexchange.formats.source import listing
from statexchange.units import format_bytes

if TYPE_CHECKING:
    from statexchange.report.summary import Summary


@commands.command
@click.argument("path")
def command(output: Output, path: str) -> int:
    """Say what lies at PATH, from headers alone: kind, tensors, dtypes, bytes, ranks."""
    from statexchange.report.summary import summarize

    summary = summarize(path)
    for problem in summary.problems:  # the reason comes first
        output.warning(str(problem))
    if summary.unsupported:
        output.warning(f"tensors that cannot be read: {listing(summary.unsupported)}")
    output.facts(_facts(summary))
    worst = gravest(summary.problems)
    return output.finish(code_of(worst) if worst else "OK", fields_of(summary), error=worst)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in summary.dtypes.items())
    facts = [
        ("kind", summary.kind),
        ("path", summary.path),
        ("tensors", f"{summary.num_tensors:,}"),
        ("parameters", f"{summary.num_parameters:,}"),
        ("bytes", _exact(summary.nbytes)),
        ("dtypes", dtypes or "none"),
        ("files", f"{summary.num_files:,}, {_exact(summary.file_nbytes)}"),
    ]
    if summary.world_size is not None:
        facts += [
            ("run", str(summary.run)),
            ("round", str(summary.round)),
            ("ranks", f"{len(summary.ranks)} of {summary.world_size}: {ranges(summary.ranks)}"),
        ]
    elif summary.ranks:
        facts.append(("ranks", f"{len(summary.ranks)}: {ranges(summary.ranks)}"))
    if summary.aliases:
        facts.append(("aliases", ", ".join(f"{alias} -> {kept}" for alias, kept in summary.aliases.items())))
    if summary.others:
        facts.append(("others", f"{len(summary.others):,}: {listing(summary.others)}"))
    facts.append(("digests", "known, not checked here" if summary.proven else "not known"))
    if summary.num_unreadable:
        facts.append(("unreadable", f"{summary.num_unreadable:,} tensors, listed but not to be read"))
    return facts


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
