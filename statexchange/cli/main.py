"""The ``statexchange`` command: run the subcommand and translate errors into messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from statexchange import __version__
from statexchange.cli.commands import COMMANDS, common_options, requested_format
from statexchange.cli.failures import report_failure
from statexchange.cli.output import EXIT_CODES, Output
from statexchange.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Commands(click.Group):
    """A group whose commands are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        # Only the one that runs: each imports what it needs, and some need numpy.
        command: click.Command = import_module(f"statexchange.cli.{cmd_name}").command
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the commands without importing their modules, as click would."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click's own message suggests nothing.
        if args[0][:1] != "-" and args[0] not in COMMANDS:
            raise click.UsageError(f"No such command {args[0]!r}{did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> int:
        try:
            return int(super().invoke(ctx) or 0)
        except KeyboardInterrupt:  # before click translates it to Abort
            output: Output = ctx.obj
            return output.fail(KeyboardInterrupt("interrupted"), "INTERRUPTED")


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@common_options
@click.pass_context
def cli(context: click.Context, output: Output) -> None:  # noqa: ARG001 (whose options are set by now)
    """Inspect, verify and merge sharded checkpoints."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(EXIT_CODES["USAGE"])


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its exit code."""
    output = Output(closed=_open_closed_streams())
    code = _run(output, sys.argv[1:] if arguments is None else arguments)
    # A full disk may only show when the last of the output is flushed.
    if not output.close():
        code = EXIT_CODES["IO"]
    sys.exit(code)


def _open_closed_streams() -> OSError | None:
    """Open closed standard streams on /dev/null; return an error if stdout is one of them.

    Otherwise a file opened for writing would get the descriptor of a closed stream, and with it everything that
    libraries write to that stream.
    """
    closed = []
    # In this order, as `open` takes the lowest free number.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            closed.append(fd)
    # Python has set them to None when it started without their descriptors.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if fd in closed:
            setattr(sys, name, open(fd, "w", closefd=False))  # noqa: SIM115 (stays open until the process ends)
    if 1 in closed:
        return OSError(errno.EBADF, os.strerror(errno.EBADF))
    return None


def _run(output: Output, arguments: Sequence[str]) -> int:
    try:
        # Not standalone: click would print errors and exit by its own codes.
        code = cli.main(list(arguments), prog_name="statexchange", obj=output, standalone_mode=False)
        return int(code or 0)
    except click.Abort:
        return EXIT_CODES["INTERRUPTED"]
    except click.ClickException as error:
        # The command has not begun, which would have set the format.
        output.format = requested_format(arguments)
        return _refuse_usage(output, error)
    except Exception as error:  # noqa: BLE001 (what ends the program is an exit code)
        return report_failure(output, error)


def _refuse_usage(output: Output, error: click.ClickException) -> int:
    path = "statexchange"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        path = error.ctx.command_path
    return output.fail(click.ClickException(error.format_message()), "USAGE", f"{path} --help")
