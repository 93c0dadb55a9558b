"""Write the command line's output: data on stdout, messages on stderr; as text, or as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, TextIO

from statexchange import settings
from statexchange.cli.table_layout import aligned, narrowed
from statexchange.errors import ReplicaError, StateExchangeError, without_secrets
from statexchange.units import format_bytes, format_time, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from _typeshed import DataclassInstance

SCHEMA = 1
_WIDE_COLUMNS = 200  # of a terminal on which nothing is shortened
_MAX_TEXT = 5000  # characters of a field of an error
FORMATS = ("auto", "human", "json", "jsonl")
EXIT_CODES = {  # the most severe first: of several findings it decides
    "INTERRUPTED": 130,
    "INTERNAL": 70,
    "CORRUPT": 4,
    "INCOMPLETE": 5,
    "UNSAFE": 7,
    "IO": 8,
    "TIMEOUT": 6,
    "NOT_FOUND": 3,
    "USAGE": 2,
    "FINDINGS": 1,
    "OK": 0,
}
_MOST_SEVERE_FIRST = tuple(EXIT_CODES)
_CODES = {number: code for code, number in EXIT_CODES.items()}
_BOLD, _RED, _YELLOW, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"

Row = dict[str, Any]


def code_of(finding: StateExchangeError) -> str:
    """Return the code of a finding; different copies are FINDINGS, not CORRUPT."""
    if isinstance(finding, ReplicaError):
        return "FINDINGS"
    return finding.code


def most_severe(findings: Iterable[StateExchangeError]) -> StateExchangeError | None:
    """Return the most severe finding, which decides the exit code; of several the first."""
    return min(findings, key=lambda finding: _MOST_SEVERE_FIRST.index(code_of(finding)), default=None)


def worst_code(findings: Iterable[StateExchangeError]) -> str:
    """Return the code of the most severe finding; OK if there is none."""
    worst = most_severe(findings)
    if worst is None:
        return "OK"
    return code_of(worst)


class Output:
    """Writes a command's output, either text or JSON.

    If the reader closes the pipe (``| head``), the rest is dropped quietly, and the exit code stays the same.
    """

    def __init__(self, *, closed: OSError | None = None) -> None:
        """Make the output; `closed` is the error of a stdout that cannot be written."""
        self.format = "auto"
        self.quiet = self.verbose = False
        self._warnings: list[str] = []
        self._path: str | None = None  # of several PATHs, the current one
        self._records: list[Row] = []  # the results of the earlier ones
        self._closed = closed
        self._lost: OSError | None = None

    @property
    def human(self) -> bool:
        """Whether text is written, not JSON."""
        return self.format in ("auto", "human")

    @property
    def aligned(self) -> bool:
        """Whether tables are aligned and numbers rounded; else cells are exact and separated by tabs."""
        return self.format == "human" or sys.stdout.isatty()

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 if there is none."""
        import shutil  # loads three compression libraries

        return shutil.get_terminal_size().columns

    def bar(self, length: int) -> str:
        """Return a bar of so many characters, in ASCII if stdout cannot encode blocks."""
        # The C locale, as in many containers, has ASCII alone.
        try:
            "█".encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            return "#" * length
        return "█" * length

    def line(self, text: str = "") -> None:
        """Write a line of data as text."""
        if self.human:
            self._write(sys.stdout, printable(text))

    def fields(self, fields: Iterable[tuple[str, object]]) -> None:
        """Write keys and values, one pair a line, without values that are None or empty texts."""
        rows = [(key, value) for key, value in fields if value not in (None, "")]
        # One column of keys for those that are shown
        width = max((len(key) for key, _ in rows), default=0)
        for key, value in rows:
            self.line(f"{key:<{width}}  {value}")

    def size(self, nbytes: int | None) -> str:
        """Return the cell of a number of bytes: exact for programs, rounded for people, "-" if it is not known."""
        if nbytes is None:
            return "-"
        if self.aligned:
            return format_bytes(nbytes)
        return str(nbytes)

    def time(self, seconds: float | None) -> str:
        """Return the cell of a time since the epoch, "-" if it is not known."""
        if seconds is None:
            return "-"
        return format_time(seconds)

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Sequence[str] = (),
        drop: Sequence[str] = (),
    ) -> None:
        """Write a table; columns named in `right` are right-aligned.

        It is fitted to a terminal of less than 200 columns, which may leave out the columns in `drop`, the first first.
        The last column is always whole.
        """
        if not self.human:
            return
        # Names come from files: a control character in one could rewrite the lines above on a terminal.
        cells: Sequence[Sequence[str]] = [list(map(printable, row)) for row in (header, *rows)]
        if sys.stdout.isatty() and self.width < _WIDE_COLUMNS:
            cells = narrowed(cells, self.width, drop)
        lines = list(map("\t".join, cells))
        if self.aligned:
            lines = aligned(cells, right)
        self._write(sys.stdout, self._styled(lines[0], _BOLD, sys.stdout))
        for line in lines[1:]:
            self._write(sys.stdout, line)

    def message(self, text: str) -> None:
        """Write a message to stderr, unless it is quiet."""
        if not self.quiet:
            self._write(sys.stderr, _printable_lines(text))

    def log(self, text: str) -> None:
        """Write a message to stderr, unless that is a pipe: its reader expects only messages that matter."""
        if not _is_pipe(sys.stderr):
            self.message(text)

    def warning(self, text: str) -> None:
        """Write a warning to stderr, or keep it for the JSON output."""
        # JSON has them beside the data, and quiet programs still get them.
        self._warnings.append(text)
        if self.human and not self.quiet:
            self._marked("warning:", _YELLOW, text)

    def warnings(self, texts: Iterable[str | StateExchangeError]) -> None:
        """Write a warning for each text or problem."""
        for text in texts:
            self.warning(str(text))

    def finish(
        self,
        data: Row | list[Row] | None,
        *,
        rows: tuple[str, Iterable[object]] = ("", ()),
        problems: Iterable[StateExchangeError] = (),
        is_ok: bool = True,
        code: str = "OK",
        error: BaseException | None = None,
    ) -> int:
        """Write the JSON result, if JSON was requested, and return the exit code.

        Args:
            data: the result's fields.
            rows: (plural name, objects). JSON has them in `data` under that name. JSON Lines has one object a line,
                whose type is the name's singular; the last line is a summary with `data`.
            problems: what was found, of which the most severe decides the code.
            is_ok: whether nothing else was found, such as a difference: else the code without a problem is FINDINGS.
            code: the code without a problem.
            error: the error that ended the command, if one did.
        """
        if not is_ok:
            code = "FINDINGS"
        worst = most_severe(problems)
        if worst is not None:
            code, error = code_of(worst), worst
        if self.human:
            return EXIT_CODES[code]
        name, objects = rows
        is_lines = self.format == "jsonl"
        # One of several PATHs has one line in all, so that each line names its PATH.
        if is_lines and self._path is None:
            for row in objects:
                self._write(sys.stdout, _json({"type": name.removesuffix("s"), **_plain(row)}))
        elif isinstance(data, dict) and name:
            data = {**data, name: list(objects)}
        result: Row = {"ok": code == "OK", "code": code, "data": data, "warnings": self._warnings}
        if error is not None:
            result["error"] = error_record(error, code)
        if self._path is None:
            result = {"schema": SCHEMA, **result}
            if is_lines:
                self._write(sys.stdout, _json({"type": "summary", **result}))
            else:
                self._write(sys.stdout, _json(result, indent=2))
        elif is_lines:
            self._write(sys.stdout, _json({"type": "path", "path": self._path, **result}))
        else:
            self._records.append({"path": self._path, **result})
        return EXIT_CODES[code]

    def for_each(self, paths: Sequence[str], look: Callable[[str], int], total: str = "") -> int:
        """Call `look` for each of several PATHs; return the most severe of the exit codes that it returns.

        Text has a heading line before each and, with `total`, a summary after the last: how many are "without a
        finding", for example, and the code of each other one. JSON has a list in `data`: a record of each PATH and what
        `look` has given `finish` or `fail`. JSON Lines has one such record a line, before the summary.
        """
        codes: list[int] = []
        try:
            for path in paths:
                self._path = without_secrets(path)
                self._warnings = []
                if codes:
                    self.line()
                self.line(f"==> {self._path} <==")  # as head and tail write
                codes.append(look(path))
        finally:
            # Also after an error in the options, whose JSON is that of the whole command.
            self._path, self._warnings = None, []
        if total:
            self._show_total(paths, codes, total)
        code = min(map(_CODES.__getitem__, codes), key=_MOST_SEVERE_FIRST.index)
        data: Row | list[Row] = self._records
        if self.format == "jsonl":  # the records are written
            data = {"num_paths": len(paths), "num_ok": codes.count(EXIT_CODES["OK"])}
        return self.finish(data, code=code)

    def _show_total(self, paths: Sequence[str], codes: Sequence[int], total: str) -> None:
        self.line()
        self.line(f"{codes.count(EXIT_CODES['OK']):,} of {len(paths):,} {total}")
        for path, code in zip(paths, codes, strict=True):
            if code != EXIT_CODES["OK"]:
                self.line(f"{_CODES[code]:<10}  {without_secrets(path)}")

    def fail(self, error: BaseException, code: str, hint: str | None = None, *, trace: str = "") -> int:
        """Report the error that ended the command, after a traceback if there is one, and return the exit code."""
        # Also in JSON mode: on stderr, where it does not break the output.
        for line in trace.splitlines():
            self._write(sys.stderr, printable(line))
        if not self.human:
            return self.finish(None, code=code, error=error)
        self._marked("error:", _RED, without_secrets(str(error)))
        if hint is not None:
            self._write(sys.stderr, printable(f"hint: {hint}"))
        return EXIT_CODES[code]

    def live(self, text: str) -> bool:
        """Show `text` in place of the last live text; "" clears the line. Return False without a terminal."""
        if self.quiet or not sys.stderr.isatty():
            return False
        # A character less than the width, as some terminals wrap after the last column; \x1b[K clears the rest of it.
        self._write(sys.stderr, f"\r{printable(text)[: self.width - 1]}\x1b[K", end="")
        return True

    def close(self) -> bool:
        """Flush stdout; write an error and return False if part of the output could not be written."""
        self._flush_data()
        if self._lost is not None:
            self._marked("error:", _RED, f"cannot write the output: {self._lost.strerror}")
        return self._lost is None

    def _flush_data(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            self._give_up(sys.stdout, error)

    def _marked(self, mark: str, style: str, text: str) -> None:
        self._write(sys.stderr, f"{self._styled(mark, style, sys.stderr)} {_printable_lines(text)}")

    def _styled(self, text: str, style: str, stream: TextIO) -> str:
        if not stream.isatty() or settings.no_color():
            return text
        return f"{style}{text}{_RESET}"

    def _write(self, stream: TextIO, text: str, end: str = "\n") -> None:
        if stream is sys.stdout and self._closed is not None:
            self._lost = self._closed
            return
        if stream is sys.stderr:
            self._flush_data()  # a message comes after the data that it follows, where both go to one file
        # What the encoding lacks is escaped, where a stream would raise: a name may have any character.
        encoding = stream.encoding or "ascii"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
            if stream is sys.stderr:
                stream.flush()
        except OSError as error:
            self._give_up(stream, error)

    def _give_up(self, stream: TextIO, error: OSError) -> None:
        """Redirect a stream to /dev/null, so that no later write fails, not even the flush at exit."""
        # The descriptor is replaced and not the stream: Python flushes the stream that it has, at exit, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        # A reader that has closed the pipe, as `head` does, wants no more.
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            self._lost = error


def _is_pipe(stream: TextIO) -> bool:
    """Whether a program reads what is written to a stream."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except OSError:  # it was closed, or is no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _printable_lines(text: str) -> str:
    """Escape each line, and indent all but the first so that they cannot pass for other messages."""
    return "\n  ".join(printable(line.expandtabs()) for line in text.splitlines())


def error_record(error: BaseException, code: str) -> Row:
    """Return the JSON object of an error; `expected` and `found` are text unless they are numbers."""
    about = {key: _simple(getattr(error, key, None)) for key in ("rank", "name", "path", "expected", "found")}
    return {"code": code, "message": without_secrets(getattr(error, "message", None) or str(error)), **about}


def fields_of(report: DataclassInstance) -> Row:
    """Return a report's fields by name."""
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}


def _simple(value: object) -> object:
    """Return a number, or text of limited length: a broken file may have a huge name in each of many errors."""
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    return text


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: records and errors are objects; NaN, infinite and complex numbers are text."""
    # JSON has none of these, and a reader in another language would stop at the words that Python writes.
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, StateExchangeError):
        return error_record(value, code_of(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = fields_of(value)
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return value
