"""The command line of the lab."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from nfs_lab.checks import Case, CheckFailedError, cases
from nfs_lab.lab import CLIENTS, HOSTS, MOUNTS, SERVER, Lab, LabError
from nfs_lab.machine import CannotRunError, check_requirements
from nfs_lab.session import Session

__all__ = ["CANNOT_RUN", "main"]

OK, FAILED, USAGE, LAB_FAILED, CANNOT_RUN = 0, 1, 2, 3, 77
CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMMAND = "python tools/nfs_lab"

_ended_by: list[int] = []

_EPILOG = f"""\
exit status: 0 all checks passed, 1 a check failed, 2 usage, 3 the lab itself failed,
{CANNOT_RUN} the lab cannot run on this machine (the message names what is missing)
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="A kernel NFS server and kernel NFS clients on one machine, and the checks that need them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    check = commands.add_parser("check", help="boot, run the checks, take down (the default)")
    _add_place(check, required=False)
    _add_packages(check)
    check.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="checks whose name[mount] or code (C1) match"
    )
    check.add_argument("--long", action="store_true", help="100 runs of each race; about an hour")
    check.add_argument("--keep", action="store_true", help="leave the lab up at the end")
    check.add_argument("--python", default=sys.executable, help="the interpreter that hosts run (default: this one)")
    check.add_argument(
        "--source", default=CHECKOUT, help="the directory that holds statexchange (default: this checkout)"
    )

    up = commands.add_parser("up", help="boot the lab and leave it up")
    _add_place(up, required=False)
    _add_packages(up)

    commands.add_parser("list", help="list the checks")
    commands.add_parser("mounts", help="list the mounts that hosts have")

    on = commands.add_parser("on", help="run a shell command in a host")
    _add_place(on, required=True)
    on.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    on.add_argument("host", choices=tuple(HOSTS))
    on.add_argument("words", nargs="+", metavar="CMD")

    boot = commands.add_parser("boot", help="boot a host again, or the third client cC")
    _add_place(boot, required=True)
    boot.add_argument("--skew", type=int, default=0, metavar="SECONDS", help="set its clock ahead by this")
    boot.add_argument("host", choices=tuple(HOSTS))

    kill = commands.add_parser("kill", help="cut a host's power")
    _add_place(kill, required=True)
    kill.add_argument("host", choices=tuple(HOSTS))

    down = commands.add_parser("down", help="take the lab down")
    _add_place(down, required=True)
    return parser


def _add_place(parser: argparse.ArgumentParser, *, required: bool) -> None:
    text = "the lab's work directory" + ("" if required else " (default: a temporary one)")
    parser.add_argument("--workdir", required=required, metavar="DIR", help=text)


def _add_packages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--packages", metavar="DIR", help="where packages are unpacked, to be used again (default: in DIR)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the lab and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, "check")
    options = _parser().parse_args(words)
    try:
        return int(globals()[f"_{options.command}"](options))
    except CannotRunError as error:
        print(f"the NFS lab cannot run here: {error}", file=sys.stderr)
        return CANNOT_RUN
    except LabError as error:
        print(f"the NFS lab failed: {error}", file=sys.stderr)
        return LAB_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _list(_: argparse.Namespace) -> int:
    _write("".join(f"{case.name:56} {case.check.covers:7} {case.check.summary}\n" for case in cases()))
    return OK


def _mounts(_: argparse.Namespace) -> int:
    _write("".join(f"/run/m/{name:9} {source:28} {options}\n" for name, (source, options) in MOUNTS.items()))
    return OK


def _write(text: str) -> None:
    """Write text to stdout; drop the rest without an error if its reader has gone, as `head` does."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # so that the flush at exit does not fail, too
        os.close(nowhere)


def _up(options: argparse.Namespace) -> int:
    check_requirements()
    workdir = options.workdir or tempfile.mkdtemp(prefix="nfs-lab-")
    os.makedirs(workdir, exist_ok=True)
    lab = Lab(workdir, options.packages)
    with _ending_on_signals(), _taking_down(lab, keep=True, temporary=options.workdir is None):
        lab.up()
    _print_next_commands(lab)
    return OK


def _print_next_commands(lab: Lab) -> None:
    print(f"the lab is up: hosts {SERVER}, {', '.join(CLIENTS)}. To run a shell command in a host, and to end the lab:")
    print(f"  {COMMAND} on --workdir {lab.workdir} {CLIENTS[0]} 'mount -t nfs,nfs4'")
    print(f"  {COMMAND} down --workdir {lab.workdir}")


def _running_lab(options: argparse.Namespace) -> Lab:
    lab = Lab(options.workdir)
    if not lab.is_up:
        raise LabError(f"no lab is up in {lab.workdir}")
    return lab


def _on(options: argparse.Namespace) -> int:
    lab = _running_lab(options)
    status, output = lab.wait(options.host, lab.start(options.host, " ".join(options.words)), options.timeout)
    _write(output)
    return status


def _boot(options: argparse.Namespace) -> int:
    lab = _running_lab(options)
    lab.kill(options.host)
    lab.boot(options.host, after_power_cut=True, skew_s=options.skew)
    lab.wait_until_booted(options.host)
    if options.host != SERVER:
        lab.mount([options.host])
    return OK


def _kill(options: argparse.Namespace) -> int:
    _running_lab(options).kill(options.host)
    return OK


def _down(options: argparse.Namespace) -> int:
    Lab(options.workdir).down()
    return OK


def _check(options: argparse.Namespace) -> int:
    chosen = cases(options.only)
    if not chosen:
        print(f"no check matches {options.only}; `{COMMAND} list` shows all", file=sys.stderr)
        return USAGE
    check_requirements()
    workdir = options.workdir or tempfile.mkdtemp(prefix="nfs-lab-")
    os.makedirs(workdir, exist_ok=True)
    lab = Lab(workdir, options.packages)
    with _ending_on_signals(), _taking_down(lab, keep=options.keep, temporary=options.workdir is None):
        began = time.monotonic()
        if not lab.is_up:
            lab.up()
        print(f"{time.monotonic() - began:6.1f} s  the lab is up", flush=True)
        session = Session(lab, options.python, os.path.abspath(options.source), long=options.long)
        try:
            session.start()
            print(f"{time.monotonic() - began:6.1f} s  agents have started", flush=True)
            failed = _run(session, chosen, began)
        finally:
            session.close()
    print(f"{len(chosen) - len(failed)} of {len(chosen)} checks passed in {time.monotonic() - began:.0f} s")
    for case, text in failed:
        print(f"FAILED {case.name} ({case.check.covers or 'no code'}): {case.check.summary}\n    {text[:1500]}")
    if options.keep:
        _print_next_commands(lab)
    return FAILED if failed else OK


def _run(session: Session, chosen: Sequence[Case], began: float) -> list[tuple[Case, str]]:
    """Run checks one after the other; return those that failed, with what they found."""
    failed = []
    for case in chosen:
        verdict, text, start = "PASS", "", time.monotonic()
        if _ended_by:
            raise SystemExit(128 + _ended_by[0])
        try:
            text = case.check.function(session, case.mount) or ""
        except CheckFailedError as error:
            verdict, text = "FAIL", str(error)
        except Exception:  # noqa: BLE001 (a bug in one check must not hide the results of the others)
            verdict, text = "FAIL", traceback.format_exc()
        if verdict == "FAIL":
            failed.append((case, text))
        now = time.monotonic()
        line = f"{now - began:6.1f} s {now - start:5.1f} s  {verdict}  {case.name} {case.check.covers}"
        print(
            f"{line}  {' '.join(text.split())[-200 if verdict == 'FAIL' and 'Traceback' in text else 0 :][:200]}",
            flush=True,
        )
        session.restore()
    return failed


@contextlib.contextmanager
def _taking_down(lab: Lab, *, keep: bool, temporary: bool) -> Iterator[None]:
    """Take the lab down at the end; with `keep` only after a failure."""
    try:
        yield
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            lab.down()
            if temporary:
                shutil.rmtree(lab.workdir)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the lab is taken down."""

    def end(number: int, _: FrameType | None) -> None:
        _ended_by.append(number)  # `_run` checks it, as an `except` of a check may catch the SystemExit
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
