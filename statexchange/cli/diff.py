"""``statexchange diff``: where two checkpoints differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.options import option
from statexchange.cli.output import Output
from statexchange.cli.progress import Progress
from statexchange.formats.sections import ALL, SECTIONS
from statexchange.sharding.options import CallOptions, ExportOptions
from statexchange.units import format_shape

if TYPE_CHECKING:
    from statexchange.report.diff import TensorDiff
    from statexchange.report.value_statistics import ValueDiff

_HEADER = ("NAME", "DIFFERS", "ELEMENTS", "MAX-ABS", "REL-L2", "COSINE", "FIRST", "NAN")
_DROP = ("COSINE", "FIRST", "ELEMENTS", "NAN", "MAX-ABS")
_BAR, _DECADES = 20, 10  # a full bar is a relative difference of 1 and more; each decade less is a tenth shorter

_RENAME = "--rename REGEX=REPL gives tensors of A the names of tensors of B"


@commands.command
@click.argument("a")
@click.argument("b")
@option("section", choices=[*SECTIONS, ALL], help="Compare this section. [default: the model]")
@option("include", "-i", help="Compare only names that match; repeatable.")
@option("exclude", "-x", help="Leave out names that match; repeatable.")
@option("rename", help="Rename the tensors of A before they are compared; repeatable.")
@option("convert", help="Convert A to another model family's names and values first, as merge does.")
@option("convert_with")
@option("tolerance", type=click.FloatRange(min=0))
@click.option("--stat", is_flag=True, help="Show a bar for each tensor that differs, by the size of the difference.")
def command(output: Output, a: str, b: str, *, stat: bool, **arguments: object) -> int:
    """Compare the checkpoints A and B: names, shapes, dtypes and values.

    They may be of any formats and shardings. Exits with 1 if they differ. Where both have
    digests of the same boxes, only tensors that differ are read.

    \b
    Examples:
      statexchange diff model trained --stat
      statexchange diff model trained --tolerance 1e-3
    """
    from statexchange.report.diff import diff_paths

    with Progress(output, "diff") as progress:
        call = CallOptions.of({**arguments, "on_progress": progress})
        report = diff_paths(a, b, ExportOptions.of(arguments), call)
    notes = [*report.notes]
    # What only one side has may be the same tensor under another name, if the other side has such tensors, too.
    if {"only in a", "only in b"} <= {tensor.status for tensor in report.tensors}:
        notes.append(_RENAME)
    for note in notes:
        output.message(f"note: {note}")
    if report.differing:
        header, rows = list(_HEADER), []
        for tensor in report.differing:
            rows.append(_cells(tensor))
            if stat:
                rows[-1].append(_bar(output, tensor.values))
        if stat:
            header.append("SIZE")
        output.table(header, rows, right=_HEADER[2:6], drop=_DROP)
    output.line(str(report))
    data = {
        "a": report.a,
        "b": report.b,
        "equal": report.equal,
        "num_tensors": len(report.tensors),
        "num_differing": len(report.differing),
        "nbytes": report.nbytes,
        "notes": notes,
    }
    return output.finish(data, rows=("tensors", report.tensors), is_ok=report.equal)


def _cells(tensor: TensorDiff) -> list[str]:
    cells = [tensor.name, _difference(tensor)]
    values = tensor.values
    if values is None:
        return [*cells, *("-" * (len(_HEADER) - len(cells)))]
    cells += [f"{values.num_differing:,}", f"{values.max_abs:.3g}", f"{values.relative_l2:.3g}", f"{values.cosine:.6f}"]
    first = nans = "-"
    if values.first is not None:
        first = format_shape(values.first)
    if values.num_nan_a or values.num_nan_b:
        nans = f"{values.num_nan_a:,} {values.num_nan_b:,}"
    return [*cells, first, nans]


def _difference(tensor: TensorDiff) -> str:
    """Return what differs, with both sides."""
    if tensor.status == "shape" and tensor.shape_a is not None and tensor.shape_b is not None:
        return f"shape {format_shape(tensor.shape_a)} {format_shape(tensor.shape_b)}"
    if tensor.dtype_a != tensor.dtype_b and tensor.dtype_a is not None and tensor.dtype_b is not None:
        # Of equal values the dtype is all that differs.
        what = "dtype" if tensor.status == "dtype" else "values,"
        return f"{what} {tensor.dtype_a} {tensor.dtype_b}"
    return tensor.status


def _bar(output: Output, values: ValueDiff | None) -> str:
    """Return a bar by the relative difference, on a logarithmic scale; "" without one, as of NaN alone."""
    if values is None or not values.relative_l2:
        return ""
    # 1e-10 and less is one character, so that a difference is always seen.
    decades = max(0.0, _DECADES + math.log10(min(values.relative_l2, 1.0)))
    return output.bar(max(1, round(_BAR * decades / _DECADES)))
