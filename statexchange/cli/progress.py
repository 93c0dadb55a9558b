"""Show the progress of a long command: a live line on a terminal, a line every 30 s in a log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from statexchange.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from types import TracebackType

    from statexchange.cli.output import Output

__all__ = ["Progress"]

_FIRST_S, _LIVE_S, _LOG_S = 1.0, 0.1, 30.0


class Progress:
    """Shows bytes done, bytes/s and time left. A context manager, which clears its line at the end.

    Call it as `progress(done, total)`; that is cheap, and only one thread at a time may do so. Nothing is shown in the
    first second.
    """

    def __init__(self, output: Output, label: str) -> None:
        self._output = output
        self._label = label
        self._began = time.monotonic()
        self._next_live = self._began + _FIRST_S
        self._next_line = self._began + _LOG_S
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes, at most every 0.1 s."""
        now = time.monotonic()
        if now < self._next_live:
            return
        self._next_live = now + _LIVE_S
        text = self._text(done, total, now - self._began)
        self._shown = self._output.live(text)
        if not self._shown and now >= self._next_line:
            self._next_line = now + _LOG_S
            self._output.message(text)

    def _text(self, done: int, total: int, seconds: float) -> str:
        left = (total - done) * seconds / done if done else 0.0
        share = done / total if total else 1.0
        sizes = f"{format_bytes(done)} of {format_bytes(total)} ({share:.0%})"
        return f"{self._label}  {sizes}  {format_bytes(done / seconds)}/s  {format_seconds(left)} left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._output.live("")
