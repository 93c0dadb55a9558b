"""Show the progress of a long command: a live line on a terminal, a line each 30 s in a log file, none in a pipe."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from statexchange.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from statexchange.cli.output import Output

_FIRST_S, _LIVE_S, _LOG_S = 1.0, 0.1, 30.0


class LiveLine:
    """Shows a changing line. A context manager, which clears the line at the end.

    Only one thread at a time may call it. Nothing is shown in the first second.
    """

    def __init__(self, output: Output, label: str) -> None:
        self._output = output
        self._label = label
        self._began = time.monotonic()
        self._next_live = self._began + _FIRST_S
        self._next_line = self._began + _LOG_S
        self._shown = False

    def show(self, text: Callable[[float], str]) -> None:
        """Show what `text` returns for the seconds since the start, at most every 0.1 s; cheap otherwise."""
        # Called for each window that is read: between two lines it only looks at the clock.
        now = time.monotonic()
        if now < self._next_live:
            return
        self._next_live = now + _LIVE_S
        line = f"{self._label}  {text(now - self._began)}"
        # `live` returns False without a terminal: then a log gets a line every 30 s.
        self._shown = self._output.live(line)
        if not self._shown and now >= self._next_line:
            self._next_line = now + _LOG_S
            self._output.log(line)

    def clear(self) -> None:
        """Clear the line, before other text is written."""
        if self._shown:
            self._output.live("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()


class Progress(LiveLine):
    """Shows bytes done, bytes/s and time left."""

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""

        def text(seconds: float) -> str:
            # At the rate so far. Tensors without elements have 0 bytes in all.
            left, share = 0.0, 1.0
            if done:
                left = (total - done) * seconds / done
            if total:
                share = done / total
            sizes = f"{format_bytes(done)} of {format_bytes(total)} ({share:.0%})"
            return f"{sizes}  {format_bytes(done / seconds)}/s  {format_seconds(left)} left"

        self.show(text)
