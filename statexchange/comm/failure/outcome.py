"""The rule by which a barrier ends alike on all ranks: all of them succeed, or all fail, each with its own deadline.

A rank that has waited long enough must not simply raise: the rank that it waited for may arrive at that moment, find
all ranks there, and go on. So a rank that gives up first writes that it does, and then looks again. A barrier has these
phases on a rank; each rank writes only its own, and never an earlier one:

    ABSENT   it has not arrived.
    HERE     it has arrived, and waits.
    CLOSING  it has given up waiting, or has seen a rank that has: it does not succeed by what it sees itself any more.
    FAILED   it raises.
    PASSED   it has gone on: the barrier has succeeded.

`next_phase` is the whole rule; it is what runs, on every path. Why it is right:

* A rank passes by what it sees itself only after it has seen all ranks HERE in one reading that began when all had
  arrived. That takes two readings (SEEN is what a rank knows between them), as a reading takes one rank after another.
  With two ranks one is enough, since a rank arrives itself before it reads. A rank that was CLOSING before the last one
  arrived is seen in that reading.
* So if a rank that is CLOSING still finds one ABSENT, nobody has passed and nobody will: FAILED.
* If all others are CLOSING too, nobody has passed, since PASSED stays visible: FAILED.
* If another one is HERE, it may be about to pass: wait. It will write PASSED, or see this rank and write CLOSING. Only
  if it does not run, because it is stopped or cut off, can a rank not learn what became of the barrier: UNKNOWN.

On one host the phases lie in the control page. Between hosts the coordinator asks the ranks, and each answers PASSED
or, from then on, CLOSING; a rank that has not answered counts as HERE. A rank that has died counts as CLOSING if it has
not passed. The coordinator's decision is the phase that the rule gives, and ranks that are CLOSING take it as what they
see.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ABSENT", "CLOSING", "FAILED", "HERE", "PASSED", "SEEN", "UNKNOWN", "next_phase"]

ABSENT: Final = -1
HERE: Final = 0
CLOSING: Final = 1
FAILED: Final = 2
PASSED: Final = 3
SEEN: Final = 4  # HERE to others; this rank knows that all have arrived, or will know by one reading
UNKNOWN: Final = 5  # CLOSING to others; this rank raises


def next_phase(own: int, lowest: int, highest: int, gives_up: bool) -> int:
    """Return the phase of a rank that is HERE, SEEN or CLOSING after it has read those of the others. Not collective.

    Args:
        own: Its phase. A rank that may pass by a single reading begins with SEEN.
        lowest: The earliest phase of the others; less than HERE is ABSENT.
        highest: The latest phase of the others; more than PASSED is PASSED.
        gives_up: Whether it does not want to wait any longer.

    Returns:
        A phase; UNKNOWN if the rank has to raise without knowing what the others do.

    Example:
        >>> from statexchange.comm.failure.outcome import ABSENT, CLOSING, FAILED, HERE, next_phase
        >>> next_phase(CLOSING, ABSENT, HERE, False) == FAILED  # a rank has not arrived: it cannot have passed
        True
    """
    if highest >= PASSED:
        return PASSED
    if own == CLOSING:
        if highest == FAILED or lowest != HERE:
            return FAILED
        return UNKNOWN if gives_up else CLOSING
    if highest > HERE or gives_up:
        return CLOSING
    if lowest < HERE:
        return own
    return PASSED if own == SEEN else SEEN
