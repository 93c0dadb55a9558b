"""The list of commands, and what they share: common options, several PATHs, and the check of ranks."""

from __future__ import annotations

import functools
import gc
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from statexchange import settings
from statexchange.cli.failures import report_failure
from statexchange.cli.output import FORMATS
from statexchange.errors import InvalidArgumentError, UnsafeError, without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statexchange.cli.output import Output

# Each command is a module of this package, which is imported when the command runs; the sentence is what `--help` says
# of it, and the first one of its own help. Tests of all commands go by this list.
COMMANDS = {
    "info": "Summarize the checkpoint at PATH: tensors, dtypes, bytes, ranks.",
    "ls": "List the tensors at PATH with dtypes, global shapes and bytes.",
    "show": "Show the configs at PATH, or the tensor NAME with its values.",
    "scan": "List the checkpoints below directories; say which are whole.",
    "diff": "Compare the checkpoints A and B: names, shapes, dtypes and values.",
    "verify": "Check everything at PATH: digests, completeness, equal copies.",
    "merge": "Merge the shards at SOURCE into one checkpoint directory PATH.",
    "seal": "Add a manifest with digests to the checkpoint at PATH.",
    "prune": "Remove old saves of a job, or old weight versions, at PATH.",
    "demo": "Train a small model, kill it half-way, resume, export and load.",
}


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands, which may stand before the command too; `function` takes the Output first."""

    @click.option(
        "--format",
        "chosen",
        type=click.Choice(FORMATS),
        help="human: aligned text; json: one object; jsonl: one object a line; auto: text, tab-separated in pipes.",
    )
    @click.option("--json", "is_json", is_flag=True, help="The same as --format json.")
    @click.option("-q", "--quiet", is_flag=True, help="Write no messages but errors; data and the exit code stay.")
    @click.option("-v", "--verbose", is_flag=True, help="Write a log of what is done, with times, to stderr.")
    @click.pass_obj
    @functools.wraps(function)
    def run(output: Output, /, *, chosen: str | None, is_json: bool, quiet: bool, verbose: bool, **options: Any) -> Any:
        # This runs for the group and then for the command: what stands after the command's name wins.
        if is_json:
            output.format = "json"
        elif chosen is not None:
            output.format = chosen
        output.quiet |= quiet
        output.verbose |= verbose
        if output.quiet and output.verbose:
            raise click.UsageError("--quiet and --verbose contradict each other", click.get_current_context())
        return function(output, **options)

    return run


@contextmanager
def _log_shown(output: Output) -> Iterator[None]:
    """Write the log of this package to stderr as messages, or only its warnings, as warnings."""
    import logging

    class _Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if output.verbose:
                output.message(without_secrets(self.format(record)))
            elif record.levelno >= logging.WARNING:
                output.warning(without_secrets(record.getMessage()))

    logger, handler = logging.getLogger("statexchange"), _Messages()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # A test, or a program that calls the command line, has handlers of its own, which are put back.
    handlers, level = logger.handlers, logger.level
    logger.handlers = [handler]
    if output.verbose:
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.setLevel(level)


def command(function: Callable[..., int]) -> click.Command:
    """Return a click command for a function that takes the Output first and returns the exit code."""

    @functools.wraps(function)
    def run(output: Output, **options: Any) -> int:
        # Clients of object stores leave garbage in cycles that holds the bytes of a request, so that with a URL among
        # the arguments the collector has to run, which the start of the program has disabled.
        if "://" in str(options):
            gc.enable()
        with _log_shown(output):
            return function(output, **options)

    return click.command()(common_options(run))


def each_path(*, total: str = "") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator for a command with the argument PATH..., whose function takes `output` and one `path`.

    The function is called for each PATH. An error at one is reported, and the others are still looked at. The exit code
    is that of the most severe. With `total`, such as "without a finding", a line after the last PATH has the number of
    PATHs with exit code 0: "2 of 3 without a finding".
    """

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @click.argument("paths", nargs=-1, required=True, metavar="PATH...")
        @functools.wraps(function)
        def run(output: Output, paths: tuple[str, ...], **options: Any) -> int:
            # One broken checkpoint of many is no reason not to look at the rest.
            def look(path: str) -> int:
                try:
                    return function(output, path, **options)
                except click.ClickException:  # the options are wrong for every PATH
                    raise
                except Exception as error:  # noqa: BLE001 (what ends the work on a PATH is an exit code)
                    return report_failure(output, error)

            # The JSON of one PATH is its result, and not a list of one.
            if len(paths) == 1:
                return look(paths[0])
            return output.for_each(paths, look, total)

        return run

    return decorate


def listing_at(path: str, **options: object) -> str | None:
    """Return what the directory at a path has, "saves" or "versions"; None if it is no directory of these.

    Args:
        path: the path.
        options: by name, the values of options that are not for such directories.

    Raises:
        InvalidArgumentError: it is such a directory, and one of these options is used.
    """
    from statexchange.formats.registry import holds_saves
    from statexchange.storage.versions import holds_versions

    for kind, is_kind in (("versions", holds_versions), ("saves", holds_saves)):
        if is_kind(path):
            for name, value in options.items():
                # Named rather than left out: a user would take the answer for a filtered one.
                if value:
                    text = f"--{name} cannot be used, as this directory has {kind}: name one of them"
                    raise InvalidArgumentError(text, path=path)
            return kind
    return None


def refuse_other_ranks() -> None:
    """Raise UnsafeError on every rank of a launcher but rank 0: all would write the same files."""
    # As in `srun statexchange merge ...`, or from a job's script that every rank runs.
    launch = settings.detect_launch()
    if launch.world_size > 1 and launch.rank != 0:
        raise UnsafeError(
            f"only rank 0 runs this command, and {launch.variable} is {launch.world_size}: start it once",
            rank=launch.rank,
        )


def requested_format(arguments: Sequence[str]) -> str:
    """Return the format that a command line with a usage error asks for."""
    # click has stopped at the error, and may not have come to these options.
    options = [*arguments, "--"]
    del options[options.index("--") :]
    if "--json" in options:
        return "json"
    for option, following in pairwise([*options, ""]):
        name, _, value = option.partition("=")
        if name == "--format" and (value or following) in FORMATS:
            return value or following
    return "auto"
