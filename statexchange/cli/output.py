"""All that the command line writes: data on stdout, the rest on stderr; for people, or JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

from statexchange import settings
from statexchange.errors import ReplicaError, StateExchangeError, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from _typeshed import DataclassInstance

__all__ = [
    "EXIT_CODES",
    "FORMATS",
    "Output",
    "Row",
    "code_of",
    "error_record",
    "fields_of",
    "most_severe",
    "printable",
]

SCHEMA = 1
_MAX_TEXT = 5000  # characters of what an error is about
FORMATS = ("auto", "human", "json", "jsonl")
EXIT_CODES = {
    "OK": 0,
    "FINDINGS": 1,
    "USAGE": 2,
    "NOT_FOUND": 3,
    "CORRUPT": 4,
    "INCOMPLETE": 5,
    "TIMEOUT": 6,
    "UNSAFE": 7,
    "IO": 8,
    "INTERNAL": 70,
    "INTERRUPTED": 130,
}
_MOST_SEVERE_FIRST = (
    "INTERNAL",
    "CORRUPT",
    "INCOMPLETE",
    "UNSAFE",
    "IO",
    "TIMEOUT",
    "NOT_FOUND",
    "USAGE",
    "FINDINGS",
)
_BOLD, _RED, _YELLOW, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"

Row = dict[str, Any]


def code_of(finding: StateExchangeError) -> str:
    """The code under which a look reports what it found: copies that differ are no broken file."""
    return "FINDINGS" if isinstance(finding, ReplicaError) else finding.code


def most_severe(findings: Iterable[StateExchangeError]) -> StateExchangeError | None:
    """The finding that decides the exit code; of equally grave ones the first."""
    return min(findings, key=lambda finding: _MOST_SEVERE_FIRST.index(code_of(finding)), default=None)


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal could obey or that nobody could see."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return ascii(char)[1:-1]


class Output:
    """Where a command writes. What is for people is not written where JSON was asked for, and vice versa.

    A reader that goes away (``| head``) does not change what a command found: the rest is dropped quietly.
    """

    def __init__(self, *, closed: OSError | None = None) -> None:
        """`closed` is why nothing can be written to stdout."""
        self.format = "auto"
        self._warnings: list[str] = []
        self._closed = closed
        self._lost: OSError | None = None

    @property
    def human(self) -> bool:
        """Whether text is wanted, not JSON. "auto" is text wherever it goes."""
        return self.format in ("auto", "human")

    @property
    def aligned(self) -> bool:
        """Whether a table is laid out for eyes; else its cells are exact, and tabs separate them."""
        return self.format == "human" or sys.stdout.isatty()

    def can_show(self, characters: str) -> bool:
        """Whether stdout's encoding has `characters`."""
        try:
            characters.encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True

    def line(self, text: str = "") -> None:
        """A line of data for people."""
        if self.human:
            self._write(sys.stdout, printable(text))

    def fields(self, fields: Iterable[tuple[str, str]]) -> None:
        """Keys and values, one pair a line."""
        rows = list(fields)
        width = max((len(key) for key, _ in rows), default=0)
        for key, value in rows:
            self.line(f"{key:<{width}}  {value}")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """A table; columns named in `right` are aligned there. Nothing is ever cut off."""
        if not self.human:
            return
        cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
        lines = _aligned(cells, right) if self.aligned else ["\t".join(row) for row in cells]
        self._write(sys.stdout, self._styled(lines[0], _BOLD, sys.stdout))
        for line in lines[1:]:
            self._write(sys.stdout, line)

    def message(self, text: str) -> None:
        """Something for people to know that is no data."""
        self._write(sys.stderr, _printable_lines(text))

    def warning(self, text: str) -> None:
        """Something to know that is no failure; JSON carries it too."""
        self._warnings.append(text)
        if self.human:
            self._marked("warning:", _YELLOW, text)

    def finish(
        self,
        code: str,
        data: Row | None,
        *,
        rows: tuple[str, Iterable[Row]] | None = None,
        error: BaseException | None = None,
    ) -> int:
        """Write the result where JSON was asked for; returns the exit code.

        `rows` are (plural name, objects): JSON has them in `data` under that name; JSON Lines has one object
        a line, whose type is the name's singular, and `data` in the summary that is the last line.
        """
        if self.human:
            return EXIT_CODES[code]
        envelope: Row = {
            "schema": SCHEMA,
            "ok": code == "OK",
            "code": code,
            "data": data,
            "warnings": self._warnings,
        }
        if error is not None:
            envelope["error"] = error_record(error, code)
        name, objects = rows or ("", ())
        if self.format == "json":
            if data is not None and name:
                envelope["data"] = {**data, name: list(objects)}
            self._write(sys.stdout, _json(envelope, indent=2))
            return EXIT_CODES[code]
        for row in objects:
            self._write(sys.stdout, _json({"type": name.removesuffix("s"), **row}))
        self._write(sys.stdout, _json({"type": "summary", **envelope}))
        return EXIT_CODES[code]

    def fail(self, error: BaseException, code: str, hint: str | None = None) -> int:
        """Report an error that ended the command; returns the exit code."""
        if not self.human:
            return self.finish(code, None, error=error)
        self._marked("error:", _RED, without_secrets(str(error)))
        if hint is not None:
            self.message(f"hint: {hint}")
        return EXIT_CODES[code]

    def live(self, text: str) -> bool:
        """Show `text` in place of what `live` showed last; "" clears the line. False without a terminal."""
        if not sys.stderr.isatty():
            return False
        width = shutil.get_terminal_size().columns - 1
        self._write(sys.stderr, f"\r{printable(text)[:width]}\x1b[K", end="")
        return True

    def close(self) -> bool:
        """Flush; False, with a message, if stdout could not take everything."""
        try:
            sys.stdout.flush()
        except OSError as error:
            self._give_up(sys.stdout, error)
        if self._lost is not None:
            self._marked("error:", _RED, f"cannot write the output: {self._lost.strerror}")
        return self._lost is None

    def _marked(self, mark: str, style: str, text: str) -> None:
        self._write(sys.stderr, f"{self._styled(mark, style, sys.stderr)} {_printable_lines(text)}")

    def _styled(self, text: str, style: str, stream: TextIO) -> str:
        plain = not stream.isatty() or settings.no_color()
        return text if plain else f"{style}{text}{_RESET}"

    def _write(self, stream: TextIO, text: str, end: str = "\n") -> None:
        if stream is sys.stdout and self._closed is not None:
            self._lost = self._closed
            return
        encoding = stream.encoding or "ascii"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
            if stream is sys.stderr:
                stream.flush()
        except OSError as error:
            self._give_up(stream, error)

    def _give_up(self, stream: TextIO, error: OSError) -> None:
        """Lead a stream to nowhere from now on, so that nothing stumbles over it again, not even at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            self._lost = error


def _aligned(cells: Sequence[Sequence[str]], right: Sequence[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligns = [">" if name in right else "<" for name in cells[0]]
    return ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligns, widths, strict=True)).rstrip() for row in cells]


def _printable_lines(text: str) -> str:
    """Several lines stay several, but none after the first can pass for a line of ours."""
    return "\n  ".join(printable(line.expandtabs()) for line in text.splitlines())


def error_record(error: BaseException, code: str) -> Row:
    """What JSON says of an error; `expected` and `found` as text unless they are numbers."""
    about = {key: _simple(getattr(error, key, None)) for key in ("rank", "name", "path", "expected", "found")}
    return {"code": code, "message": without_secrets(getattr(error, "message", None) or str(error)), **about}


def fields_of(report: DataclassInstance) -> Row:
    """A report's fields by name."""
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}


def _simple(value: object) -> object:
    """A number, or text of limited length: a broken file may have a name of any length in each of many errors."""
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, StateExchangeError):
        return error_record(value, code_of(value))
    raise TypeError(f"no JSON for {type(value).__name__}")
