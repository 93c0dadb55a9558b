"""Saves of a job by step, and what they hold."""

from __future__ import annotations

from pathlib import Path


def entries(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())
