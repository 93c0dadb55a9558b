"""Describe the machine, for the head of a table."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["machine_text"]


def machine_text() -> str:
    """Return number and model of the cores, and the load: "2 cores (AMD EPYC), load 0.3"."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = {line.split(":")[1].strip() for line in facts if line.startswith("model name")}
    return f"{len(os.sched_getaffinity(0))} cores ({', '.join(sorted(models))}), load {os.getloadavg()[0]:.1f}"
