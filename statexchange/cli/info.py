"""``statexchange info``: a summary of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, code_of, fields_of, most_severe
from statexchange.formats.source import abbreviated_list
from statexchange.units import format_bytes, format_ranks

if TYPE_CHECKING:
    from statexchange.report.summary import Summary


@commands.command
@click.argument("path")
def command(output: Output, path: str) -> int:
    """Summarize the checkpoint at PATH: tensors, dtypes, bytes, ranks.

    Reads headers only. PATH is a Hugging Face directory or file, a workspace, a
    torch DCP directory, or files of torch.save; a local path or a URL.
    """
    from statexchange.report.summary import summarize

    summary = summarize(path)
    for problem in summary.problems:  # before the summary, which may be partial because of them
        output.warning(str(problem))
    if summary.unsupported:
        output.warning(f"tensors that cannot be read: {abbreviated_list(summary.unsupported)}")
    output.fields(_fields(summary))
    worst = most_severe(summary.problems)
    return output.finish(code_of(worst) if worst else "OK", fields_of(summary), error=worst)


def _fields(summary: Summary) -> list[tuple[str, str]]:
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in summary.dtypes.items())
    fields = [
        ("kind", summary.kind),
        ("path", summary.path),
        ("tensors", f"{summary.num_tensors:,}"),
        ("parameters", f"{summary.num_parameters:,}"),
        ("bytes", _exact(summary.nbytes)),
        ("dtypes", dtypes or "none"),
        ("files", f"{summary.num_files:,}, {_exact(summary.file_nbytes)}"),
    ]
    if summary.world_size is not None:
        fields += [
            ("run", str(summary.run)),
            ("round", str(summary.round)),
            ("ranks", f"{len(summary.ranks)} of {summary.world_size}: {format_ranks(summary.ranks)}"),
        ]
    elif summary.ranks:
        fields.append(("ranks", f"{len(summary.ranks)}: {format_ranks(summary.ranks)}"))
    if summary.aliases:
        fields.append(("aliases", ", ".join(f"{alias} -> {kept}" for alias, kept in summary.aliases.items())))
    if summary.others:
        fields.append(("others", f"{len(summary.others):,}: {abbreviated_list(summary.others)}"))
    fields.append(("digests", "known, not checked here" if summary.proven else "not known"))
    if summary.num_unreadable:
        fields.append(("unreadable", f"{summary.num_unreadable:,} tensors are listed but cannot be read"))
    return fields


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
