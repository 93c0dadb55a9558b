"""``statexchange info``: a summary of a checkpoint, or of the saves of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.picture_file import PictureFile, picture_options
from statexchange.errors import InvalidArgumentError
from statexchange.formats.source import abbreviated_list, abbreviated_reasons
from statexchange.units import format_bytes, format_count, format_number, format_ranks, format_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statexchange.formats.source import Part
    from statexchange.report.rounds import RankStatus
    from statexchange.report.summary import SectionSummary, Summary
    from statexchange.report.tensor_facts import ModuleNode

_MAX_NAMES = 4  # shown of a part's files
_DEPTH = 4  # of the tree: a layer's attention and MLP, in most models
_TREE_HEADER = ("MODULE", "PARAMETERS", "BYTES")
_BAR = 20  # characters of all bytes


@commands.command
@picture_options("Draw the parameters into an SVG: an area for each tensor.")
@commands.each_path()
@click.option("--tree", is_flag=True, help="Show the modules in the names of tensors, with parameters and bytes.")
@click.option(
    "--depth",
    type=click.IntRange(1, 64),
    metavar="N",
    help=f"Show N levels of the tree.  [default: {_DEPTH}]",
)
def command(output: Output, path: str, tree: bool, depth: int | None, picture: PictureFile | None) -> int:
    """Summarize the checkpoint at PATH: tensors, dtypes, bytes, ranks.

    Reads headers only. PATH is a save or a directory of a job's saves, a Hugging
    Face directory or file, a workspace, a torch DCP directory, a Megatron or
    DeepSpeed checkpoint, or files of torch.save; a local path or a URL.

    \b
    Examples:
      statexchange info model
      statexchange info model --tree --depth 3
    """
    from statexchange.formats.registry import holds_saves
    from statexchange.report.summary import summarize

    if depth is None and tree:
        depth = _DEPTH
    if holds_saves(path):
        if picture is not None or depth is not None:
            text = "--svg and --tree show one checkpoint, and this directory has saves: name one of them"
            raise InvalidArgumentError(text, path=path)
        return _summarize_saves(output, path)
    summary = summarize(path, tree_depth=depth)
    output.warnings(summary.problems)  # before the summary, which may be partial because of them
    if summary.unsupported:
        output.warning(f"tensors that cannot be read: {abbreviated_reasons(summary.unsupported)}")
    if picture is not None:
        from statexchange.formats.registry import open_source
        from statexchange.report.treemap import parameters_picture

        with open_source(path, strict=False) as source:
            picture.write(parameters_picture(source))
    statuses: list[RankStatus] = []
    if summary.kind == "workspace" and summary.run is not None:
        from statexchange.report.rounds import list_rounds, newest_of_ranks

        statuses = newest_of_ranks(list_rounds(path), summary.run)
    output.fields([*_fields(summary), *map(_rank_field, statuses)])
    if summary.tree is not None:
        output.line()
        _show_tree(output, summary.tree)
    record = {
        **fields_of(summary),
        "picture": picture and picture.path,
        "rank_statuses": statuses,
    }
    return output.finish(record, problems=summary.problems)


def _show_tree(output: Output, tree: ModuleNode) -> None:
    """Write a row for each module: indented and with a bar by its bytes, or with exact numbers for programs."""
    header = (*_TREE_HEADER, "SHARE") if output.aligned else _TREE_HEADER
    rows: list[tuple[str, ...]] = []
    for level, node in tree.walk(-1):
        if node is tree:
            continue
        if not output.aligned:
            rows.append((node.path, str(node.num_parameters), str(node.nbytes)))
            continue
        alike = f" ({node.num_alike:,} alike)" if ".." in node.name else ""
        bar = output.bar(round(_BAR * node.nbytes / (tree.nbytes or 1)))
        name = f"{'  ' * level}{node.name}{alike}"
        rows.append((name, format_count(node.num_parameters), format_bytes(node.nbytes), bar))
    output.table(header, rows, right=_TREE_HEADER[1:])


def _rank_field(status: RankStatus) -> tuple[str, str]:
    if status.round is None:
        return f"rank {status.rank}", "missing"
    facts = [f"round {status.round}" + (", late" if status.status == "late" else "")]
    if status.written is not None:
        facts.append(f"written {format_time(status.written)}")
    if status.num_config_keys is not None:
        keys = format_number(status.num_config_keys, "config key")
        facts.append(keys + (f" ({status.config_type})" if status.config_type else ""))
    if status.nbytes is not None:
        facts.append(format_bytes(status.nbytes))
    return f"rank {status.rank}", ", ".join(facts)


def _fields(summary: Summary) -> list[tuple[str, object]]:
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in summary.dtypes.items())
    files = f"{summary.num_files:,}, {_exact_bytes(summary.file_nbytes)}" if summary.num_files else None
    sections = {name: section for name, section in summary.sections.items() if section.num_tensors}
    others = f"{len(summary.others):,}: {abbreviated_list(summary.others)}" if summary.others else None
    unreadable = None
    if summary.num_unreadable:
        verb = "tensor is" if summary.num_unreadable == 1 else "tensors are"
        unreadable = f"{summary.num_unreadable:,} {verb} listed but cannot be read"
    return [
        ("kind", summary.kind),
        ("path", summary.path),
        ("tensors", f"{summary.num_tensors:,}"),
        ("parameters", f"{summary.num_parameters:,}{_of_section(summary)}"),
        ("bytes", _exact_bytes(summary.nbytes)),
        ("dtypes", dtypes or "none"),
        ("files", files),
        ("step", summary.step),
        ("saved", _time_text(summary.created)),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in summary.metrics.items())),
        ("job" if summary.kind == "save" else "run", summary.run),
        ("round", summary.round),
        ("ranks", _ranks_text(summary)),
        *_parts(summary.parts),
        ("sections", ", ".join(map(_section_text, sections.items())) if len(sections) > 1 else None),
        ("aliases", ", ".join(f"{alias} -> {kept}" for alias, kept in summary.aliases.items())),
        ("others", others),
        ("digests", "known, not checked here" if summary.proven else "not known"),
        *(("note", note) for note in summary.notes),
        ("unreadable", unreadable),
    ]


def _time_text(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)


def _ranks_text(summary: Summary) -> str | None:
    if summary.world_size is None and not summary.ranks:
        return None
    size = "" if summary.world_size is None else f" of {summary.world_size}"
    ranks = f": {format_ranks(summary.ranks)}" if summary.ranks else ""
    return f"{len(summary.ranks)}{size}{ranks}"


def _of_section(summary: Summary) -> str:
    """Return whose parameters are counted, if the checkpoint has other tensors than the model's."""
    beside = [name for name, section in summary.sections.items() if name != "model" and section.num_tensors]
    if not beside:
        return ""
    return " in the section model" if "model" in summary.sections else " of the model, as no section is one"


def _parts(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return the files of each section of a framework's directory."""
    names: dict[str, list[str]] = {}
    for part in parts:
        refusal = " (cannot be read)" if part.refusal else ""
        names.setdefault(part.section or "parts", []).extend(f"{name}{refusal}" for name in part.names)
    fields = []
    for section, of_section in names.items():
        hidden = len(of_section) - _MAX_NAMES
        more = f" and {hidden:,} more" if hidden > 0 else ""
        fields.append((section, ", ".join(of_section[:_MAX_NAMES]) + more))
    return fields


def _section_text(section: tuple[str, SectionSummary]) -> str:
    name, summary = section
    return f"{name} {summary.num_tensors:,} ({format_bytes(summary.nbytes)})"


def _summarize_saves(output: Output, path: str) -> int:
    from statexchange.report.saves import list_saves
    from statexchange.storage.steps import steps_text

    report = list_saves(path)
    output.warnings(report.warnings)
    newest, newest_record = None, None
    steps = f": steps {steps_text(row.step for row in report.saves)}" if report.saves else ""
    if report.newest is not None:
        saved = "" if report.newest.created is None else f", saved {format_time(report.newest.created)}"
        newest = f"step {report.newest.step}{saved}, {report.newest.state}"
        newest_record = fields_of(report.newest)
        del newest_record["problems"]  # those of all saves are listed
    output.fields(
        [
            ("kind", "saves"),
            ("path", report.path),
            ("saves", f"{len(report.saves):,}{steps}"),
            ("newest", newest),
            ("bytes", _exact_bytes(report.nbytes)),
            ("broken", _listed({row.step: row.state for row in report.saves if row.problems})),
            ("unfinished", _listed({row.step: row.state for row in report.unfinished})),
        ]
    )
    data = {
        "kind": "saves",
        "path": report.path,
        "num_saves": len(report.saves),
        "steps": [row.step for row in report.saves],
        "newest": newest_record,
        "nbytes": report.nbytes,
        "num_broken": sum(bool(row.problems) for row in report.saves),
        "unfinished": report.unfinished,
        "problems": report.problems,
    }
    return output.finish(data, problems=report.problems)


def _listed(states: Mapping[int, str]) -> str:
    if not states:
        return ""
    return f"{len(states):,}: {abbreviated_list({f'step {step}': state for step, state in states.items()})}"


def _exact_bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
