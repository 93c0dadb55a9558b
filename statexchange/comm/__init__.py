"""Ranks in agreement: who we are, exchange of small values, and failure that reaches everyone."""
