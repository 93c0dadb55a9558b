"""``statexchange info``: a summary of a checkpoint, or of the saves of a job."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.picture_file import PictureFile, picture_options
from statexchange.errors import InvalidArgumentError
from statexchange.formats.source import abbreviated_list, abbreviated_reasons, with_hidden
from statexchange.units import format_bytes, format_count, format_number, format_ranks, format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.formats.source import Part
    from statexchange.report.rounds import RankStatus
    from statexchange.report.saves import SaveRow, UnfinishedRow
    from statexchange.report.summary import Summary
    from statexchange.report.tensor_facts import ModuleNode

_MAX_NAMES = 4  # shown of a part's files
_DEPTH = 4  # of the tree: a layer's attention and MLP, in most models
_TREE_HEADER: tuple[str, ...] = ("MODULE", "PARAMETERS", "BYTES")
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

    # --depth alone asks for the tree, too.
    if depth is None and tree:
        depth = _DEPTH
    if holds_saves(path):
        # A job's saves are many checkpoints.
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
    # The rounds of a workspace also show the ranks that have not written the newest one.
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
    header = _TREE_HEADER
    if output.aligned:
        header += ("SHARE",)
    rows: list[tuple[str, ...]] = []
    for level, node in tree.walk(-1):
        # The top has no name, and its numbers are those of the summary.
        if node is tree:
            continue
        if not output.aligned:
            rows.append((node.path, str(node.num_parameters), str(node.nbytes)))
            continue
        name = f"{'  ' * level}{node.name}"
        if ".." in node.name:
            name += f" ({node.num_alike:,} alike)"
        bar = output.bar(round(_BAR * node.nbytes / (tree.nbytes or 1)))
        rows.append((name, format_count(node.num_parameters), format_bytes(node.nbytes), bar))
    output.table(header, rows, right=_TREE_HEADER[1:])


def _rank_field(status: RankStatus) -> tuple[str, str]:
    if status.round is None:
        return f"rank {status.rank}", "missing"
    facts = [f"round {status.round}"]
    if status.status == "late":
        facts.append("late")
    if status.written is not None:
        facts.append(f"written {format_time(status.written)}")
    if status.num_config_keys is not None:
        keys = format_number(status.num_config_keys, "config key")
        if status.config_type:
            keys += f" ({status.config_type})"
        facts.append(keys)
    if status.nbytes is not None:
        facts.append(format_bytes(status.nbytes))
    return f"rank {status.rank}", ", ".join(facts)


def _fields(summary: Summary) -> list[tuple[str, object]]:
    # Lines of None or an empty text are left out.
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in summary.dtypes.items())
    files = saved = others = unreadable = None
    if summary.num_files:
        files = f"{summary.num_files:,}, {_exact_bytes(summary.file_nbytes)}"
    if summary.created is not None:
        saved = format_time(summary.created)
    sections = []
    for name, section in summary.sections.items():
        if section.num_tensors:
            sections.append(f"{name} {section.num_tensors:,} ({format_bytes(section.nbytes)})")
    # One section has all that the lines above count.
    if len(sections) == 1:
        sections.clear()
    if summary.others:
        others = f"{len(summary.others):,}: {abbreviated_list(summary.others)}"
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
        ("saved", saved),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in summary.metrics.items())),
        ("job" if summary.kind == "save" else "run", summary.run),
        ("round", summary.round),
        ("ranks", _ranks_text(summary)),
        *_parts(summary.parts),
        ("sections", ", ".join(sections)),
        ("aliases", ", ".join(f"{alias} -> {kept}" for alias, kept in summary.aliases.items())),
        ("others", others),
        ("digests", "known, not checked here" if summary.proven else "not known"),
        *(("note", note) for note in summary.notes),
        ("unreadable", unreadable),
    ]


def _ranks_text(summary: Summary) -> str | None:
    if summary.world_size is None and not summary.ranks:
        return None
    text = f"{len(summary.ranks)}"
    if summary.world_size is not None:
        text += f" of {summary.world_size}"
    if summary.ranks:
        text += f": {format_ranks(summary.ranks)}"
    return text


def _of_section(summary: Summary) -> str:
    """Return whose parameters are counted, if the checkpoint has other tensors than the model's."""
    for name, section in summary.sections.items():
        if name != "model" and section.num_tensors:
            break
    else:
        return ""
    if "model" in summary.sections:
        return " in the section model"
    return " of the model, as no section is one"


def _parts(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return the files of each section of a framework's directory."""
    names: dict[str, list[str]] = {}
    for part in parts:
        of_section = names.setdefault(part.section or "parts", [])
        refusal = " (cannot be read)" if part.refusal else ""
        for name in part.names:
            of_section.append(name + refusal)
    fields = []
    for section, of_section in names.items():
        # A job of thousands of ranks has as many files.
        fields.append((section, with_hidden(of_section[:_MAX_NAMES], len(of_section))))
    return fields


def _summarize_saves(output: Output, path: str) -> int:
    from statexchange.report.saves import list_saves
    from statexchange.storage.steps import steps_text

    report = list_saves(path)
    output.warnings(report.warnings)
    newest, newest_record = None, None
    steps = list(map(attrgetter("step"), report.saves))
    count = f"{len(steps):,}"
    if steps:
        count += f": steps {steps_text(steps)}"
    if report.newest is not None:
        newest = f"step {report.newest.step}"
        # The manifest of a broken save may be unreadable.
        if report.newest.created is not None:
            newest += f", saved {format_time(report.newest.created)}"
        newest += f", {report.newest.state}"
        newest_record = fields_of(report.newest)
        del newest_record["problems"]  # those of all saves are listed
    broken = [row for row in report.saves if row.problems]
    output.fields(
        [
            ("kind", "saves"),
            ("path", report.path),
            ("saves", count),
            ("newest", newest),
            ("bytes", _exact_bytes(report.nbytes)),
            ("broken", _listed(broken)),
            ("unfinished", _listed(report.unfinished)),
        ]
    )
    data = {
        "kind": "saves",
        "path": report.path,
        "num_saves": len(report.saves),
        "steps": steps,
        "newest": newest_record,
        "nbytes": report.nbytes,
        "num_broken": len(broken),
        "unfinished": report.unfinished,
        "problems": report.problems,
    }
    return output.finish(data, problems=report.problems)


def _listed(rows: Sequence[SaveRow | UnfinishedRow]) -> str:
    """Return the number of steps and their states; "" without one."""
    states = {f"step {row.step}": row.state for row in rows}
    if not states:
        return ""
    return f"{len(states):,}: {abbreviated_list(states)}"


def _exact_bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
