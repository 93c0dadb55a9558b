"""Saves of jobs in which some parameters do not train."""

from __future__ import annotations

from typing import Any

import torch

FROZEN = "rank-00000-of-00001.frozen-0.safetensors"


def set_base(state: dict[str, Any], value: float) -> None:
    with torch.no_grad():
        state["model"]["base"].weight[0, 0] = value


ADAPTER_JOBS = """
import torch
from statexchange.testing import run_ranks
from checkpoint_jobs import load_adapters, save_adapters

def job(path, steps):  # its two ranks are threads, so that a kill ends both
    run_ranks(save_adapters, 2, args=(path, *steps))

serve(job)
"""
