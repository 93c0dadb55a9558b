"""The wheel of this checkout, for the tests that install it."""

from __future__ import annotations

import pytest
from environments import Built, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Built:
    """Build sdist and wheel once for all workers."""
    own = tmp_path_factory.getbasetemp()
    return build((own if worker_id == "master" else own.parent) / "built")
