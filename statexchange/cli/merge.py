"""``statexchange merge``: merge shards on disk into one checkpoint directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from statexchange.cli import commands
from statexchange.cli.options import option
from statexchange.cli.output import Output, fields_of
from statexchange.cli.progress import Progress
from statexchange.formats.sections import ALL, SECTIONS
from statexchange.units import format_bytes, format_number, format_seconds, format_shape, name_ranks

if TYPE_CHECKING:
    from statexchange.checkpoint.merge import MergeReport, PlannedTensor


@commands.command
@click.argument("source")
@click.argument("path")
@option("section", choices=[*SECTIONS, ALL])
@option("layout")
@option("include")
@option("exclude")
@option("rename")
@option("convert")
@option("convert_with")
@option("replicas")
@option("dtype")
@option("max_shard_size")
@option("filename_pattern")
@option("files_from")
@click.option(
    "--no-files", is_flag=True, help="Leave out config, tokenizer and other small files of a Hugging Face SOURCE."
)
@option("threads", type=click.IntRange(min=1))
@option("overwrite")
@option("resume")
@option("dry_run")
def command(output: Output, source: str, path: str, **options: Any) -> int:
    """Merge the shards at SOURCE into one checkpoint directory PATH.

    PATH appears complete or not at all. SOURCE has any format that info reads.

    \b
    A layout file maps name patterns to rules; the first that matches wins:
      {"mesh": {"pp": 2, "ep": 2, "tp": 4},         the ranks, slowest axis first
       "rules": {
         "*.o_proj.weight": {"dim": 1, "axis": "tp"},
         "*.gate_up.weight": {"dim": 0, "axis": "tp", "blocks": [1, 1]},
         "*.qkv.weight": {"dim": 0, "axis": "tp",
                          "split": {"qkv": {"q": 4, "k": 1, "v": 1}}},
         "*.experts.*": {"renumber": "experts", "axis": "ep"},
         "*.scale": {"reduce": "max"}}}
    Without a mesh the layout may be the rules alone. Keywords of
    transformers' tp_plan are rules too.
    Reference: python -m pydoc statexchange.sharding.rules

    \b
    Examples:
      statexchange merge shards merged --dtype bf16
      statexchange merge shards other --rename "^norm[.]=final_norm." --dry-run
    """
    from statexchange.checkpoint.merge import merge_checkpoint

    commands.refuse_other_ranks()
    if options.pop("no_files"):
        if options["files_from"]:
            raise click.UsageError("--no-files and --files-from contradict each other")
    elif not options["files_from"]:
        # For the call, () means no files, and None those of the source.
        options["files_from"] = None
    with Progress(output, "merge") as progress:
        report = merge_checkpoint(source, path, **options, on_progress=progress)
    # What was left out, and what differs between a config and the tensors
    output.warnings(report.notes)
    _show(output, report)
    fields = fields_of(report)
    tensors = fields.pop("tensors")
    if report.dry_run:
        return output.finish(fields, rows=("tensors", tensors))
    return output.finish(fields)


def _show(output: Output, report: MergeReport) -> None:
    doing, pace = "would merge", ""
    if not report.dry_run:
        doing = "merged"
        pace = f" in {format_seconds(report.seconds)}, {format_bytes(report.nbytes / report.seconds)}/s"
    tensors = format_number(report.num_tensors, "tensor")
    output.line(f"{doing} {tensors}, {format_bytes(report.nbytes)}, into {report.path}{pace}")
    for name, nbytes in report.files:
        output.line(f"  {name}  {format_bytes(nbytes)}")
    for name in report.reused:
        output.line(f"  {name} was reused from an interrupted merge")
    # A dry run has the plan of each tensor; after a merge `ls` shows the result.
    rows = [[t.name, t.dtype, format_shape(t.shape), t.file, _origin(t)] for t in report.tensors]
    if rows:
        output.table(["NAME", "DTYPE", "SHAPE", "FILE", "FROM"], rows, drop=("SHAPE", "DTYPE"))
    for alias, kept in report.aliases.items():
        output.line(f"  {alias} is tied to {kept} and not written again")


def _origin(tensor: PlannedTensor) -> str:
    """Return which ranks supply a tensor, and in how many regions."""
    text = name_ranks(tensor.ranks)
    # Usually each rank has one region.
    if tensor.num_boxes != len(tensor.ranks):
        text = f"{tensor.num_boxes:,} regions of {text}"
    if tensor.source != tensor.name:
        text += f", as {tensor.source}"
    return text
