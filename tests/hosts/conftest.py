"""All tests of this directory need two hosts."""

from __future__ import annotations

import pytest
from two_hosts import missing


@pytest.fixture(autouse=True)
def _two_hosts() -> None:
    """Skip a test if this machine cannot make two hosts."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
