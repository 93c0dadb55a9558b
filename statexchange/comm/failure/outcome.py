"""The rule by which a barrier ends alike on all ranks: all of them succeed or all fail, although deadlines differ.

A rank that has waited long enough must not simply raise: the rank that it waited for may arrive at that moment, find
all ranks there, and go on. So a rank that gives up first writes that it does, and then looks again. A barrier has these
phases on a rank; each rank writes only its own, and never an earlier one:

    ABSENT   it has not arrived.
    HERE     it has arrived, and waits.
    CLOSING  it has given up waiting, or has seen a rank that has. Now it passes only if another one has PASSED.
    FAILED   it raises.
    PASSED   it has gone on: the barrier has succeeded.

Two more phases are never written, and known to the rank alone: SEEN, which the others read as HERE, and UNKNOWN, which
they read as CLOSING.

All code applies the rule by one function, `next_phase`. Why the rule is right:

* A rank that is not CLOSING passes only after it has seen all ranks HERE in one reading that began when all had
  arrived. That takes two readings, as a reading takes one rank after another: the first shows that all have arrived
  (SEEN), the second is the one that counts. With two ranks one is enough, since a rank arrives itself before it reads.
  A rank that was CLOSING before the last one arrived shows in that reading.
* So if a rank that is CLOSING still reads ABSENT of one, no rank has passed and none will: FAILED.
* If all others are CLOSING too, no rank has passed, since PASSED stays visible: FAILED.
* If another one is HERE, it may be about to pass: wait. It will write PASSED, or see this rank and write CLOSING. If it
  does neither in time, because it is stopped or cut off, the outcome cannot be determined: UNKNOWN.

On one host the phases lie in the control page. Between hosts the coordinator asks the ranks, and each answers PASSED
or, from then on, CLOSING; a rank that has not answered counts as HERE. A rank that has died counts as CLOSING if it has
not passed. The coordinator's decision is the phase that the rule gives, and a rank that is CLOSING takes it for
a phase that it has read.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ABSENT", "CLOSING", "FAILED", "HERE", "PASSED", "SEEN", "UNKNOWN", "next_phase"]

ABSENT: Final = -1
HERE: Final = 0
CLOSING: Final = 1
FAILED: Final = 2
PASSED: Final = 3
SEEN: Final = 4  # HERE to others; one more reading in which all are HERE suffices
UNKNOWN: Final = 5  # CLOSING to others; this rank raises


def next_phase(own: int, lowest: int, highest: int, gives_up: bool) -> int:
    """Return the phase of a rank that is HERE, SEEN or CLOSING after it has read those of the others. Not collective.

    Args:
        own: its phase. A rank that may pass by a single reading begins with SEEN.
        lowest: the earliest phase of the others; less than HERE is ABSENT.
        highest: the latest phase of the others; more than PASSED is PASSED.
        gives_up: whether its wait is over, by a deadline or an interrupt.

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
