"""``statexchange demo``: train a small model, kill the job, resume, export and load it, and show the result."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

import click

from statexchange.cli import commands
from statexchange.cli.output import Output, fields_of
from statexchange.cli.picture_file import PictureFile
from statexchange.storage.location import resolve_path
from statexchange.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from statexchange.demo import DemoReport

_PICTURE = "supply.svg"
_LINE_EVERY = 10


@commands.command
@click.option("--ranks", "-n", default=4, show_default=True, type=click.IntRange(min=1), help="Processes to train on.")
@click.option("--keep", metavar="DIR", help="Keep the merged checkpoint in DIR/merged, with a picture beside it.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1), help="Training steps.")
def command(output: Output, ranks: int, keep: str | None, steps: int) -> int:
    """Train a small model, kill it half-way, resume, export and load.

    It resumes on two ranks, and the exported checkpoint is compared with their shards.
    Needs torch. Exits with 1 if a tensor is not bit-equal, or the logits differ by more
    than 1e-5.

    \b
    Examples:
      statexchange demo --ranks 2 --steps 20
    """
    from statexchange.demo import run_demo

    commands.refuse_other_ranks()
    picture, drawn = None, None
    if keep is not None:
        # Checked now: after minutes of training it would be too late.
        picture = PictureFile.at(os.path.join(resolve_path(keep, "--keep"), _PICTURE))
        drawn = picture.path
    watch = _DemoProgress(output, steps, picture)
    try:
        report = run_demo(ranks, keep=keep, steps=steps, on_progress=watch)
    finally:
        output.live("")
    _show(output, report, watch.supplied, drawn)
    data = {**fields_of(report), "tensors_equal": report.tensors_equal, "picture": drawn}
    return output.finish(data, is_ok=report.ok)


class _DemoProgress:
    """Shows a demo's steps, and draws the merged checkpoint before it is removed."""

    def __init__(self, output: Output, steps: int, picture: PictureFile | None) -> None:
        self._output = output
        self._steps = steps
        self._picture = picture
        self.supplied: list[str] = []  # what each rank has supplied
        self._show_status("starting the ranks")

    def __call__(self, event: dict[str, Any]) -> None:
        if event["phase"] == "train":
            self._step(event["step"] + 1, event["loss"], event["seconds"])
        elif event["phase"] == "killed":
            self._show_status(f"killed all {event['ranks']} ranks after step {event['step']}; starting fewer")
        elif event["phase"] == "resumed":
            self._output.live("")
            self._output.message(f"resumed from the save of step {event['step']} on {event['ranks']} ranks")
        elif event["phase"] == "export":
            self._show_status("exporting the merged checkpoint, comparing it with the shards")
        else:
            self._show_status("loading it in one process")
            self._draw(event["path"])

    def _show_status(self, text: str) -> None:
        # In place of the last line on a terminal, as a line of its own anywhere else
        if not self._output.live(text):
            self._output.message(text)

    def _step(self, step: int, loss: float, seconds: float) -> None:
        text = f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.3f}  {seconds:.2f} s/step"
        left = f"  {format_seconds((self._steps - step) * seconds)} left"
        # In a log, some steps are enough.
        if not self._output.live(text + left) and (step % _LINE_EVERY == 0 or step in (1, self._steps)):
            self._output.message(text)

    def _draw(self, path: str) -> None:
        from statexchange.formats.registry import open_source
        from statexchange.report.supply import nbytes_by_rank, supply_of, supply_picture

        # The demo has called: only now do the files of one without --keep exist.
        with open_source(path, strict=False) as source:
            supply = supply_of(source)
        for rank, nbytes in sorted(nbytes_by_rank(supply.tensors).items()):
            self.supplied.append(f"{supply.label(rank)}  {format_bytes(nbytes)}  {nbytes / supply.nbytes:.1%}")
        if self._picture is not None:
            self._picture.write(supply_picture(supply))


def _show(output: Output, report: DemoReport, supplied: list[str], picture: str | None) -> None:
    first_ranks = _ranks_text(report.first_world_size, report.first_mesh)
    output.line(f"{report.parameters:,} parameters, trained on {first_ranks},")
    output.line(f"killed, and resumed on {_ranks_text(report.world_size, report.mesh)}")
    _show_loss(output, report)
    _show_checks(output, report)
    _section(output, "which rank supplied which bytes", supplied)
    title = "files (not kept; --keep DIR does)"
    if report.path:
        title = f"files in {report.path}"
    _section(output, title, [f"{format_bytes(nbytes):>8}  {name}" for name, nbytes in report.files])
    if picture is not None:
        output.line()
        output.line(f"picture  {picture}")


def _ranks_text(world_size: int, mesh: tuple[int, int]) -> str:
    return f"{world_size} ranks ({mesh[0]} data parallel x {mesh[1]} tensor parallel)"


def _section(output: Output, title: str, lines: list[str]) -> None:
    output.line()
    output.line(title)
    for line in lines:
        output.line(f"  {line}".rstrip())


def _show_loss(output: Output, report: DemoReport) -> None:
    first, losses = report.first_losses, report.losses
    output.line()
    if first:
        text = f"loss on {report.first_world_size} ranks, killed after step {len(first)} of {len(losses)}"
        output.line(f"{text}: {first[0]:.2f} to {first[-1]:.2f}")
    # The median: the first steps take longer than the others.
    pace = sorted(report.step_seconds)[len(report.step_seconds) // 2]
    text = f"loss on {report.world_size} ranks, resumed from the save of step {report.resumed_step}"
    output.line(f"{text}: {losses[report.resumed_step]:.2f} to {losses[-1]:.2f}, steps of {pace:.2f} s")


def _show_checks(output: Output, report: DemoReport) -> None:
    written = textwrap.wrap(repr(report.prompt + report.text), 90)
    rate = format_bytes(report.export_bytes / report.export_seconds)
    grown, root = format_bytes(report.root_peak_growth_bytes), format_bytes(report.root_peak_bytes)
    output.line()
    output.fields(
        [
            ("tensors bit-equal", f"{report.tensors_equal}/{report.tensors_total}"),
            *(("not equal", name) for name in report.mismatches),
            ("logits error", f"{report.logits_error:.1e} of the largest logit, 1e-05 allowed"),
            (
                "export",
                f"{format_bytes(report.export_bytes)} in {format_seconds(report.export_seconds)}, {rate}/s",
            ),
            (
                "root's peak memory",
                f"{root} with torch; the export of {format_bytes(report.model_bytes)} added {grown}",
            ),
            ("total", format_seconds(report.total_seconds)),
        ]
    )
    _section(output, "what the merged model writes", written)
