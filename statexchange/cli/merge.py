"""``statexchange merge``: merge shards on disk into one checkpoint directory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.progress import Progress
from statexchange.cli.table_layout import Narrowing
from statexchange.formats.sections import ALL, SECTIONS
from statexchange.formats.source import WEIGHTS
from statexchange.sharding.options import REPLICAS, ExportOptions
from statexchange.units import format_bytes, format_ranks, format_seconds, format_shape

if TYPE_CHECKING:
    from statexchange.checkpoint.merge import MergeReport, PlannedTensor

_NARROWING = Narrowing(drop=("SHAPE", "DTYPE"), shorten={"FILE": 20, "FROM": 16, "NAME": 32}, cut=("FILE", "FROM"))
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ExportOptions)}


def _parse_dtypes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Return dtypes by pattern; the one for all tensors comes last, because the first match counts."""
    by_pattern: dict[str, str] = {}
    for value in values:
        pattern, _, dtype = value.rpartition("=")
        if not pattern and "*" in by_pattern:
            raise click.BadParameter(f"{by_pattern['*']} and {dtype} are both for all tensors", context, parameter)
        by_pattern[pattern or "*"] = dtype
    if "*" in by_pattern:
        by_pattern["*"] = by_pattern.pop("*")
    return by_pattern or None


@commands.command
@click.argument("source")
@click.argument("path")
@click.option(
    "--section",
    type=click.Choice([*SECTIONS, ALL]),
    help="Merge this section of a job's state, as info lists them. By default the model; all if patterns are given.",
)
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    help="Of a DeepSpeed checkpoint: the fp32 master weights (default, where they can be read), or the module's own.",
)
@click.option(
    "--layout",
    metavar="FILE.json",
    help="How plain tensors of per-rank files are sharded, by name pattern: see above.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Merge only tensors whose name matches; repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose name matches; repeatable.")
@click.option(
    "--rename",
    multiple=True,
    metavar="REGEX=REPL",
    callback=commands.parse_renames,
    help="Replace REGEX by REPL in tensor names; repeatable, applied in order.",
)
@click.option(
    "--convert",
    metavar="NAME|FILE.json",
    help="Write another model family's names and values: a built-in conversion such as torchtitan:llama3, or your own. "
    "inverse: before it converts in the other direction.",
)
@commands.CONVERT_WITH
@click.option(
    "--replicas",
    type=click.Choice(REPLICAS),
    default=_DEFAULTS["replicas"],
    show_default=True,
    help="equal: copies must be equal; root: take the lowest rank's copy.",
)
@click.option(
    "--dtype",
    multiple=True,
    metavar="[GLOB=]DTYPE",
    callback=_parse_dtypes,
    help="Write floating tensors in this dtype (bfloat16, float16, float32, float64), or those whose name "
    "matches; repeatable. Integers, float8 and its scales stay as they are.",
)
@click.option(
    "--max-shard-size",
    default=_DEFAULTS["max_shard_size"],
    show_default=True,
    metavar="SIZE",
    help="Start a new file at this size.",
)
@click.option(
    "--filename-pattern",
    metavar="NAME",
    help="Output file name; {suffix} becomes -00001-of-00004 where there are several files.  "
    "[default: model{suffix}.safetensors; for an adapter of PEFT, adapter_model{suffix}.safetensors]",
)
@click.option(
    "--files-from",
    multiple=True,
    metavar="PATH",
    help="Extra files to copy (config, tokenizer), or a directory of them; repeatable.",
)
@click.option(
    "--no-files", is_flag=True, help="Leave out config, tokenizer and other small files of a Hugging Face SOURCE."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of files written at once; by default one per core.",
)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at PATH.")
@click.option(
    "--resume",
    is_flag=True,
    help="Reuse or remove files of interrupted merges on other hosts, which must have ended.",
)
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be written.")
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
        options["files_from"] = None
    with Progress(output, "merge") as progress:
        report = merge_checkpoint(source, path, **options, on_progress=progress)
    for note in report.notes:
        output.warning(note)
    _show(output, report)
    fields = fields_of(report)
    tensors = [fields_of(tensor) for tensor in fields.pop("tensors")]
    return output.finish("OK", fields, rows=("tensors", tensors) if report.dry_run else None)


def _show(output: Output, report: MergeReport) -> None:
    rate = f" in {format_seconds(report.seconds)}, {format_bytes(report.nbytes / report.seconds)}/s"
    done, pace = ("would merge", "") if report.dry_run else ("merged", rate)
    tensors = "1 tensor" if report.num_tensors == 1 else f"{report.num_tensors:,} tensors"
    output.line(f"{done} {tensors}, {format_bytes(report.nbytes)}, into {report.path}{pace}")
    for name, nbytes in report.files:
        output.line(f"  {name}  {format_bytes(nbytes)}")
    for name in report.reused:
        output.line(f"  {name} was reused from an interrupted merge")
    rows = [[t.name, t.dtype, format_shape(t.shape), t.file, _origin(t)] for t in report.tensors]
    if rows:
        output.table(["NAME", "DTYPE", "SHAPE", "FILE", "FROM"], rows, narrowing=_NARROWING)
    for alias, kept in report.aliases.items():
        output.line(f"  {alias} is tied to {kept} and not written again")


def _origin(tensor: PlannedTensor) -> str:
    """Return which ranks supply a tensor, and in how many regions."""
    regions = f"{tensor.num_boxes:,} regions of " if tensor.num_boxes != len(tensor.ranks) else ""
    source = f", as {tensor.source}" if tensor.source != tensor.name else ""
    return f"{regions}rank{'s' if len(tensor.ranks) != 1 else ''} {format_ranks(tensor.ranks)}{source}"
