"""Failure detection: ranks notice that another one has failed, and agree on the outcome of the call in which it did."""
