"""Ranks for tests of this package and of others: `run_ranks` in code, ``@pytest.mark.ranks`` with the plugin."""

from statexchange.testing.child import report
from statexchange.testing.ranks import RankFailure, RankOutcome, RankOutcomes, run_ranks

__all__ = ["RankFailure", "RankOutcome", "RankOutcomes", "report", "run_ranks"]
