"""The registry of checks: functions with a docstring, codes and the mounts that they run on.

A code, such as C1, stands for a guarantee, and selects its checks by `--only`. Its letter is its group: A is what
readers get during overwrites; C is what concurrent, killed, interrupted or mapped writers leave; G is ranks; H is
caches, full disks and mount options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nfs_lab.session import CheckFailedError, Session

__all__ = ["CHECKS", "Case", "Check", "CheckFailedError", "cases", "check"]

Function = Callable[[Session, str], str | None]


@dataclass(frozen=True)
class Check:
    """A check. `covers` are the codes of the guarantees that it checks, joined by ", "; "" for one without a code."""

    name: str
    function: Function
    covers: str
    mounts: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.function.__doc__ or "").strip().split("\n")[0]


@dataclass(frozen=True)
class Case:
    """A check on one mount."""

    check: Check
    mount: str

    @property
    def name(self) -> str:
        """The name that `--only` matches and the output shows."""
        return f"{self.check.name}[{self.mount}]"


CHECKS: list[Check] = []


def check(covers: str, mounts: Sequence[str]) -> Callable[[Function], Function]:
    """Register a function (session, mount) that returns a detail to show or raises CheckFailedError."""

    def register(function: Function) -> Function:
        CHECKS.append(Check(function.__name__, function, covers, tuple(mounts)))
        return function

    return register


def cases(only: Sequence[str] = ()) -> list[Case]:
    """All cases, or those whose name or one of whose codes matches a pattern in `only` (a part of a name will do)."""
    found = [Case(check, mount) for check in CHECKS for mount in check.mounts]
    return [case for case in found if not only or any(_matches(case, pattern) for pattern in only)]


def _matches(case: Case, pattern: str) -> bool:
    return pattern in case.name or fnmatchcase(case.name, pattern) or pattern in case.check.covers.split(", ")
