"""When a job saves: at multiples of a step, after a time by rank 0's clock, or after a signal on any rank."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TypeAlias

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.settings import check_timeout
from statexchange.sharding.options import whole_number

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_log = logging.getLogger(__name__)


class SaveSchedule:
    """Says after which steps a job saves; the arguments are those of `Checkpoints`.

    Threads need no lock: a save in the background notes its end, and each number is assigned at once.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | None,
        on_signal: str | Sequence[str] | None,
        agree_every: int,
    ) -> None:
        if every_steps is not None:
            every_steps = whole_number(every_steps, "every_steps", least=1)
        if every_s is not None:
            every_s = check_timeout(every_s, "every_s")
        self._every_steps, self._every_s = every_steps, every_s
        self._agree_every = whole_number(agree_every, "agree_every", least=1)
        self._saved_at = time.monotonic()
        self._signals = _Signals(on_signal)

    @property
    def is_stopping(self) -> bool:
        """Whether any rank has received a signal."""
        return self._signals.is_stopping

    def is_multiple(self, step: int) -> bool:
        """Whether a step is one after which to save, by its number alone. Not collective."""
        return self._every_steps is not None and step > 0 and step % self._every_steps == 0

    def needs_agreement(self, step: int) -> bool:
        """Whether the ranks compare signals and clocks at this step: a collective call costs more than a step may."""
        return (self._every_s is not None or bool(self._signals.names)) and step % self._agree_every == 0

    def agree(self, comm: Communicator) -> bool:
        """Return whether to save, by the signals of all ranks and rank 0's clock. Collective."""
        since_save_s = time.monotonic() - self._saved_at
        is_late = comm.rank == 0 and self._every_s is not None and since_save_s >= self._every_s
        sent = from_all(comm, (self._signals.take(), is_late), tuple[str | None, bool], "its signals")
        wanted = False
        for rank, (name, is_due) in enumerate(sent):
            wanted |= is_due
            if name is not None:
                wanted = self._signals.is_stopping = True
                if comm.rank == 0:
                    _log.info("rank %d received %s: saving at this step", rank, name)
        return wanted

    def note_save(self) -> None:
        """Note a save or load: from now on the time of `every_s` counts."""
        self._saved_at = time.monotonic()

    def restore_signals(self) -> None:
        """Restore the handlers of signals."""
        self._signals.restore()


class _Signals:
    """Handlers that record signals until the next agreement, and call the previous handlers.

    A handler may also run where it must not record: in a process that was forked from the job, such as a worker of a
    data loader, and after `restore`, if that could not remove it. It then puts back the previous handler and raises the
    signal again, so that SIGTERM ends such a process.

    Attributes:
        names: the signals.
        is_stopping: whether any rank has received one.
    """

    def __init__(self, on_signal: str | Sequence[str] | None) -> None:
        self.names = _signal_names(on_signal)
        self.is_stopping = False
        self._received: str | None = None
        self._pid = os.getpid()
        self._is_active = True
        self._previous: dict[int, _Handler] = {}
        if self.names and threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("on_signal needs the main thread: make this Checkpoints there")
        for name in self.names:
            number = signal.Signals[name]
            # Python runs a handler in the main thread, between two bytecodes: so it may only note the signal, and the
            # save is made where the training loop asks.
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before(number)
        if self._is_active and os.getpid() == self._pid:
            self._received = signal.Signals(number).name
            if callable(before):
                # It must not end the process before the save: the job leaves its loop by `is_stopping`.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    before(number, frame)
            return
        # A child or a closed job: end as if this handler had never been here.
        signal.signal(number, before)
        signal.raise_signal(number)

    def _before(self, number: int) -> _Handler:
        """Return the previous handler, skipping those of closed Checkpoints."""
        handler = self._previous[number]
        owner = getattr(handler, "__self__", None)
        while isinstance(owner, _Signals) and not owner._is_active:  # noqa: SLF001 (another object of this class)
            handler = owner._previous[number]  # noqa: SLF001
            owner = getattr(handler, "__self__", None)
        return signal.SIG_DFL if handler is None else handler

    def take(self) -> str | None:
        """Return the signal that came since the last call."""
        received = self._received
        if received is not None:
            self._received = None
        return received

    def restore(self) -> None:
        """Restore the previous handlers; outside of the main thread, the next signal does so."""
        was_active, self._is_active = self._is_active, False
        if not was_active or threading.current_thread() is not threading.main_thread():
            return
        for number in self._previous:
            if signal.getsignal(number) == self._note:
                signal.signal(number, self._before(number))


def _signal_names(on_signal: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in `on_signal`; raise InvalidArgumentError for anything else."""
    if on_signal is None:
        return ()
    names: Iterable[object] = [on_signal]
    if not isinstance(on_signal, str) and isinstance(on_signal, Iterable):
        names = on_signal
    checked: dict[str, None] = {}
    for name in names:
        # These two cannot be handled.
        if not isinstance(name, str) or name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise InvalidArgumentError(f"on_signal takes names such as 'SIGTERM' or 'SIGUSR1', not {excerpt(name)}")
        checked[signal.Signals[name].name] = None
    return tuple(checked)
