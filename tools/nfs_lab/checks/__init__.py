"""The checks, in the order in which they run."""

from nfs_lab.checks import exchange, faults, overwriting, publishing, ranks  # noqa: F401 (they register their checks)
from nfs_lab.checks.registry import CHECKS, Case, Check, CheckFailedError, cases

__all__ = ["CHECKS", "Case", "Check", "CheckFailedError", "cases"]
