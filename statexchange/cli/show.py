"""``statexchange show``: the configs of a checkpoint, or one of its tensors with its values."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.picture_file import PictureFile, picture_options
from statexchange.errors import InvalidArgumentError, NotFoundError, did_you_mean, excerpt, without_secrets
from statexchange.units import format_bytes, format_ranks, format_shape, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from statexchange.formats.source import Source
    from statexchange.report.configs import ConfigComparison
    from statexchange.report.tensor_facts import TensorFacts
    from statexchange.report.value_statistics import Bin, ValueStatistics
    from statexchange.sharding.shards import Box

_CORNER = (slice(4), slice(6))  # rows and columns of the default slice
_PART = re.compile(r"(-?[0-9]{1,18})|(-?[0-9]{1,18})? *: *(-?[0-9]{1,18})?")  # one index, or begin:end
_BAR = 40
# A terminal shows values of at most _MAX_VALUE characters, and the first _CUT_VALUE characters of longer ones.
_MAX_VALUE, _CUT_VALUE = 300, 60
_ABSENT = "(no such key)"

Slice = tuple[int | slice, ...]


def _parse_slice(context: click.Context, parameter: click.Parameter, value: str | None) -> Slice | None:
    """Return the index that an expression such as ``0:2,:8`` stands for, as numpy takes it."""
    if value is None:
        return None
    index: list[int | slice] = []
    text = value.strip().removeprefix("[").removesuffix("]")
    # Of a tensor without dims; "".split(",") would have one part.
    if not text:
        return ()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            text = f"{value!r} is not of the form 0:2,:8 (begin:end, or one index)"
            raise click.BadParameter(text, context, parameter)
        number, begin, end = match.groups()
        if number is not None:
            index.append(int(number))
        else:
            index.append(slice(int(begin) if begin else None, int(end) if end else None))
    return tuple(index)


@commands.command
@picture_options("Draw into an SVG which rank or file supplied which region of the tensor.")
@click.argument("path")
@click.argument("name", required=False)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Show only what this rank has written.")
@click.option(
    "--slice",
    "index",
    metavar="SLICE",
    callback=_parse_slice,
    help="The values of a tensor to show, as in 0:2,:8.  [default: a corner]",
)
def command(
    output: Output,
    path: str,
    name: str | None,
    rank: int | None,
    index: Slice | None,
    picture: PictureFile | None,
) -> int:
    """Show the configs at PATH, or the tensor NAME with its values.

    For a workspace (its newest round; name the directory of an older one) or save
    these are the configs of its ranks: what all have in common, then the keys that
    differ. For other checkpoints they are config.json and all entries that are not
    tensors.

    All values of the tensor are read, in bounded memory. Statistics and histogram
    leave NaN and infinite values out.

    \b
    Examples:
      statexchange show shards
      statexchange show model norm.weight --slice :2
    """
    from statexchange.formats.registry import open_source

    if name is None and index is not None:
        raise click.UsageError(
            "--slice selects values of a tensor: give its NAME after PATH", click.get_current_context()
        )
    if name is None and picture is not None:
        raise click.UsageError("--svg draws a tensor: give its NAME after PATH", click.get_current_context())
    with open_source(path, strict=False) as source:
        if rank is not None:
            source = _of_rank(source, rank)  # noqa: PLW2901 (the same files, which the first one closes)
        if name is None:
            return _show_configs(output, without_secrets(path), source)
        return _show_tensor(output, without_secrets(path), source, name, index, picture, is_part=rank is not None)


def _of_rank(source: Source, rank: int) -> Source:
    """Return the source with the files and configs of one rank alone."""
    if not source.has_ranks:
        raise InvalidArgumentError(
            f"this is a checkpoint without ranks ({source.kind}): leave out --rank", path=source.path
        )
    files = tuple(shard_file for shard_file in source.files if shard_file.rank == rank)
    if not files:
        holders = "no rank has one"
        if source.files:
            holders = f"these ranks have: {format_ranks(map(attrgetter('rank'), source.files))}"
        raise NotFoundError(f"rank {rank} has no file here; {holders}", path=source.path)
    configs = {}
    if rank in source.configs:
        configs[rank] = source.configs[rank]
    return replace(source, files=files, configs=configs)


# Configs


def _show_configs(output: Output, path: str, source: Source) -> int:
    from statexchange.report.configs import compare_configs, plain_configs, plain_entries
    from statexchange.report.summary import model_config

    by_ranks = plain_configs(source)
    comparison = compare_configs(by_ranks)
    entries = plain_entries(source)
    # The configs of ranks are those of the job, which may differ from the model's beside them.
    model = None
    if not by_ranks:
        model = model_config(source.config_store)
    output.warnings(source.problems)
    output.line(_title(path, source))
    if by_ranks:
        _write_comparison(output, by_ranks, comparison)
    if model is not None:
        _write_section(output, "config.json", model)
    if source.others:
        output.line()
        output.line("entries that are not tensors")
        _write_entries(output, entries, source.others)
    if source.metadata and not by_ranks:
        _write_section(output, "metadata", dict(source.metadata))
    # An empty answer would look like a failure.
    if not (by_ranks or model is not None or source.others or source.metadata or source.problems):
        output.message("nothing but tensors is here, no config: `ls` lists them, and `show PATH NAME` shows one")
    data = {
        "path": path,
        "kind": source.kind,
        "run": source.run,
        "round": source.round,
        "step": source.step,
        "world_size": source.world_size,
        "configs": [{"ranks": ranks, "config": config} for ranks, config in by_ranks.items()],
        "common": comparison.common,
        "differing": comparison.differing,
        "model_config": model,
        "entries": entries,
        "others": dict(source.others),
        "metadata": dict(source.metadata),
    }
    return output.finish(data, problems=source.problems)


def _title(path: str, source: Source) -> str:
    facts = [f"{path}: {source.kind}"]
    if source.kind == "workspace":
        facts += [f"run {source.run}", f"round {source.round}"]
    elif source.step is not None:
        facts.append(f"step {source.step}")
    if source.configs and source.world_size is not None:
        facts.append(f"configs of {len(source.configs)} of {source.world_size} ranks")
    return ", ".join(facts)


def _write_comparison(output: Output, by_ranks: Mapping[tuple[int, ...], Any], comparison: ConfigComparison) -> None:
    ranks = list(chain.from_iterable(by_ranks))
    who = f"all ranks ({format_ranks(ranks)})"
    if len(ranks) == 1:
        who = f"rank {ranks[0]}"
    if not comparison.differing:
        _write_section(output, who, comparison.common)
        return
    if comparison.common is not None:
        _write_section(output, f"in common on {who}", comparison.common)
    output.line()
    output.line("where ranks differ")
    for differing in comparison.differing:
        output.line(f"  {differing.key or 'the config'}")
        for value in differing.values:
            label = name_ranks(value.ranks)
            if not value.is_present:
                output.line(f"    {label}: {_ABSENT}")
                continue
            for line in _tree_lines(label, value.value, 2, output.aligned):
                output.line(line)


def _write_section(output: Output, title: str, value: Any) -> None:
    output.line()
    output.line(title)
    for line in _body_lines(value, 1, output.aligned):
        output.line(line)


def _write_entries(output: Output, entries: Mapping[str, Any], others: Mapping[str, str]) -> None:
    """Write entries that are not tensors: their values, or what they are."""
    for name, description in others.items():
        if name in entries:
            for line in _tree_lines(name, entries[name], 1, output.aligned):
                output.line(line)
        else:
            output.line(f"  {name}: {description}")


def _tree_lines(key: str, value: Any, depth: int, is_cut: bool) -> Iterator[str]:
    """Yield the lines of a key and its value, in which the items of a container stand below one another."""
    indent = "  " * depth
    if isinstance(value, dict) and value.get("__name__") == "tensor" and value.keys() == {"__name__", "name"}:
        yield f"{indent}{key}: tensor {value['name']}"
    elif _is_nested(value):
        title = f"{indent}{key}:"
        # The type of a dataclass, namedtuple or Enum
        if isinstance(value, dict) and isinstance(value.get("__name__"), str):
            title += f" {value['__name__']}"
        yield title
        yield from _body_lines(value, depth + 1, is_cut)
    else:
        yield f"{indent}{key}: {_value_text(value, is_cut)}"


def _body_lines(value: Any, depth: int, is_cut: bool) -> Iterator[str]:
    if not _is_nested(value):
        yield "  " * depth + _value_text(value, is_cut)
        return
    if not isinstance(value, dict):
        value = {f"[{number}]": item for number, item in enumerate(value)}
    for key, item in value.items():
        if key != "__name__":
            yield from _tree_lines(key, item, depth, is_cut)


def _is_nested(value: Any) -> bool:
    """Whether the items of a value stand on lines of their own."""
    if isinstance(value, dict):
        return bool(value)
    # A list of plain numbers reads best on one line.
    return isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) and item for item in value)


def _value_text(value: Any, is_cut: bool) -> str:
    """Return a value's repr; cut for a terminal, where a huge value would scroll everything else away."""
    if not is_cut:
        return repr(value)
    text = excerpt(value, _MAX_VALUE + 1)
    if len(text) <= _MAX_VALUE:
        return text
    size = ""
    if isinstance(value, str):
        size = f"{len(value):,} characters; "
    elif isinstance(value, list | tuple):
        size = f"{len(value):,} items; "
    return f"{text[:_CUT_VALUE]}... ({size}a pipe or --json has all)"


# Tensors


def _show_tensor(
    output: Output,
    path: str,
    source: Source,
    name: str,
    index: Slice | None,
    picture: PictureFile | None,
    *,
    is_part: bool,
) -> int:
    from statexchange.report.tensor_facts import tensor_facts

    facts = tensor_facts(source, name, is_part=is_part)
    if facts is None:
        return _show_entry(output, path, source, name, picture)

    # Only now, as they import numpy
    from statexchange.cli.progress import Progress
    from statexchange.report.value_statistics import read_slice, read_statistics

    box = _box_of(facts, index)
    if picture is not None:
        from statexchange.report.supply import supply_of, supply_picture

        picture.write(supply_picture(supply_of(source).select({facts.tied_to or facts.name})))
    # Before the statistics: a slice that is too large is refused before the whole tensor is read.
    values = read_slice(facts, box)
    with Progress(output, "show") as progress:
        statistics = read_statistics(facts, progress)
    files = {region.stored.path for region in facts.regions}
    output.warnings(source.problems)
    values_and_cover = [*facts.problems, *statistics.problems]
    output.warnings(values_and_cover)
    # All problems are shown; only those of this tensor decide the exit code.
    problems = [problem for problem in source.problems if problem.name == name or problem.path in files]
    problems += values_and_cover
    _write_tensor(output, facts, has_ranks=source.has_ranks)
    _write_values(output, box, values, facts)
    _write_statistics(output, statistics, facts)
    record = fields_of(statistics)
    del record["problems"]  # they are among those of the tensor
    data = {
        "path": path,
        "kind": source.kind,
        **{key: getattr(facts, key) for key in ("name", "tied_to", "dtype", "shape", "nbytes", "section")},
        "slice": {**box._asdict(), "values": values.tolist()},
        "statistics": record,
        "problems": problems,
        "picture": picture and picture.path,
    }
    regions = []
    for region in facts.regions:
        stored = {"holders": region.holders, "files": region.files, "nbytes": region.stored.nbytes}
        regions.append({**region.box._asdict(), **stored})
    return output.finish(data, rows=("regions", regions), problems=problems)


def _show_entry(output: Output, path: str, source: Source, name: str, picture: PictureFile | None) -> int:
    """Show an entry that is not a tensor; raise NotFoundError if there is none."""
    from statexchange.report.configs import plain_entries
    from statexchange.report.tensor_facts import aliases_of, tensor_rows

    if name not in source.others:
        tensors = (row.name for row in tensor_rows(source))
        # All that can be shown by name, tied names and other entries, too
        names = list(dict.fromkeys([*tensors, *aliases_of(source), *source.others]))
        if not names and source.problems:
            raise source.problems[0]
        output.warnings(source.problems)  # the tensor may be in a broken file
        hint = did_you_mean(name, names) or "; ls lists all names"
        raise NotFoundError(f"there is no tensor {excerpt(name, 200)} among {len(names):,}{hint}", path=source.path)
    if picture is not None:
        raise InvalidArgumentError("--svg draws a tensor, and this entry is none", name=name, path=source.path)
    entries = plain_entries(source)
    output.line("not a tensor:")
    _write_entries(output, entries, {name: source.others[name]})
    data = {"path": path, "kind": source.kind, "name": name}
    return output.finish({**data, "description": source.others[name], "value": entries.get(name)})


def _box_of(facts: TensorFacts, index: Slice | None) -> Box:
    """Return the block that an index stands for; without one the first corner."""
    from statexchange.sharding.shards import selected_box

    num_dims = len(facts.shape)
    # The corner of the last two dims, at the first index of all others: of the last `num_dims` of these.
    if index is None:
        index = ((slice(1),) * num_dims + _CORNER)[len(_CORNER) :]
    try:
        return selected_box(facts.shape, index)
    except IndexError:
        text = f"--slice is outside of the tensor, whose shape is {format_shape(facts.shape)}"
        raise InvalidArgumentError(text, name=facts.name) from None


def _write_tensor(output: Output, facts: TensorFacts, *, has_ranks: bool) -> None:
    output.fields(
        [
            ("name", facts.name),
            ("dtype", facts.dtype),
            ("shape", format_shape(facts.shape)),
            ("bytes", f"{format_bytes(facts.nbytes)} ({facts.nbytes:,} bytes)"),
            ("section", facts.section),
            ("tied to", facts.tied_to),
        ]
    )
    output.line()
    header = ["REGION", "BYTES", "FILE"]
    if has_ranks:
        header.insert(2, "RANKS")
    rows = []
    for region in facts.regions:
        row = [str(region.box), output.size(region.stored.nbytes), region.files[0]]
        # Copies of a region are in several files.
        if len(region.files) > 1:
            row[-1] += f" and {len(region.files) - 1} more"
        if has_ranks:
            row.insert(2, format_ranks(region.holders))
        rows.append(row)
    output.table(header, rows, right=("BYTES",), drop=("BYTES",))


def _write_values(output: Output, box: Box, values: Any, facts: TensorFacts) -> None:
    import numpy as np

    output.line()
    if not box.numel:
        output.line(f"values {box}: none")
        return
    title = f"values {box}"
    if box.shape != facts.shape:
        title += f" of {format_shape(facts.shape)}"
    output.line(title)
    texts = [_number_text(value, exact=not output.aligned) for value in values.flat]
    width = max(map(len, texts))
    # numpy sets the brackets of an array of texts; its own numbers would be rounded and shortened.
    matrix = np.array([text.rjust(width) for text in texts]).reshape(box.shape)
    # Whole, as the size of the slice is limited: neither "..." nor a wrapped row.
    written = np.array2string(
        matrix,
        separator="  ",
        formatter={"all": str},
        threshold=sys.maxsize,
        max_line_width=sys.maxsize,
    )
    for line in written.splitlines():
        output.line(f"  {line}")


def _number_text(value: object, *, exact: bool = False) -> str:
    if value is None:  # no file has this element
        return "-"
    if isinstance(value, float | complex) and not exact:
        return f"{value:.6g}"
    return str(value)


def _write_statistics(output: Output, statistics: ValueStatistics, facts: TensorFacts) -> None:
    exact = not output.aligned
    elements = f"{statistics.num_elements:,}"
    # With --rank, or where a part of the tensor is missing
    if statistics.num_elements < math.prod(facts.shape):
        elements += f" of {math.prod(facts.shape):,}"
    fields: list[tuple[str, object]] = [("elements", elements)]
    if facts.dtype in ("C64", "C128"):
        fields.append(("figures", "of the absolute values"))
    # None if no value is finite; the counts below are of all values.
    if statistics.min is not None:
        for key in ("min", "max", "mean", "std"):
            fields.append((key, _number_text(getattr(statistics, key), exact=exact)))
    for key, count in (("zeros", statistics.num_zeros), ("NaN", statistics.num_nan), ("Inf", statistics.num_inf)):
        if not count:
            fields.append((key, "0"))
            continue
        share = count / statistics.num_elements
        percent = "less than 0.1%"
        if share >= 0.001:
            percent = f"{share:.1%}"
        fields.append((key, f"{count:,} ({percent})"))
    output.line()
    output.fields(fields)
    if not statistics.histogram:
        return
    output.line()
    most = max(map(attrgetter("count"), statistics.histogram))
    counts = len(f"{most:,}")
    labels = list(map(_bin_label, statistics.histogram))
    width = max(map(len, labels))
    for label, bin_ in zip(labels, statistics.histogram, strict=True):
        length = 0
        if bin_.count:
            # A few among millions are still seen.
            length = max(1, round(_BAR * bin_.count / most))
        output.line(f"{label:>{width}}  {bin_.count:>{counts},}  {output.bar(length)}".rstrip())


def _bin_label(bin_: Bin) -> str:
    if bin_.low == bin_.high:
        return _number_text(bin_.low)
    return f"{_number_text(bin_.low)} to {_number_text(bin_.high)}"
