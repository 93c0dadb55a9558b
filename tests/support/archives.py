"""Unpack the samples of tests/data that are archives."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

# Python 3.14 takes this filter by default, 3.12 and 3.13 warn without one, and before 3.11.4 there is none.
_OPTIONS: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar archive into a new folder."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, **_OPTIONS)
