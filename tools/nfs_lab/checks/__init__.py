"""The checks, in the order in which they run."""

from nfs_lab.checks import (  # noqa: F401 (they register their checks)
    exchange,
    faults,
    overwriting,
    publishing,
    ranks,
    versions,
)
from nfs_lab.checks.registry import CHECKS, Case, Check, CheckFailedError, cases

__all__ = ["CHECKS", "Case", "Check", "CheckFailedError", "cases"]
