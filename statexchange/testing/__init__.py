"""Ranks for tests, ours and other people's: `run_ranks` in code, ``@pytest.mark.ranks`` with the plugin."""

from statexchange.testing.ranks import RankFailure, RankOutcome, RankOutcomes, report, run_ranks

__all__ = ["RankFailure", "RankOutcome", "RankOutcomes", "report", "run_ranks"]
