"""Saves by step at the URL of an object store."""

from __future__ import annotations

WHOLE = ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "save.json"]


def step_url(url: str, step: int) -> str:
    return f"{url}/step-{step:09d}"
