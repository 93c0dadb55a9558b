"""``statexchange seal``: add digests to a checkpoint that exists."""

from __future__ import annotations

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.progress import Progress
from statexchange.units import format_bytes, format_number


@commands.command
@click.argument("path")
@click.option("--overwrite", is_flag=True, help="Replace a statexchange.json that exists.")
@click.option("--dry-run", is_flag=True, help="Read headers only, and write nothing.")
def command(output: Output, path: str, overwrite: bool, dry_run: bool) -> int:
    """Add a manifest with digests to the checkpoint at PATH.

    PATH is a Hugging Face directory of safetensors files, or a single such file.
    The manifest, statexchange.json, has digests of all tensors and of all files
    beside them. These stay as they are. `statexchange verify` then finds every
    byte that changes.

    \b
    Examples:
      statexchange seal bare
    """
    from statexchange.checkpoint.seal import seal_checkpoint

    commands.refuse_other_ranks()
    with Progress(output, "seal") as progress:
        report = seal_checkpoint(path, overwrite=overwrite, dry_run=dry_run, on_progress=progress)
    doing = "would write" if report.dry_run else "wrote"
    tensors = format_number(report.num_tensors, "tensor")
    files = format_number(report.num_files, "file")
    # The files beside the tensors, too, such as tokenizers: a changed one is found by its digest.
    output.line(f"{doing} {report.manifest}: digests of {tensors} and {files}, {format_bytes(report.nbytes)}")
    return output.finish(fields_of(report))
