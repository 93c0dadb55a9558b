"""Exports and saves for transformers' Trainer, and the states of all random number generators as one object."""

from __future__ import annotations

from statexchange.lazy import lazy_names

_HOMES = {
    "CheckpointsTrainer": "statexchange.integrations.transformers",
    "ExportCallback": "statexchange.integrations.transformers",
    "RandomState": "statexchange.integrations.random",
}

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    _HOMES,
    need={
        "CheckpointsTrainer": ("torch", "transformers"),
        "ExportCallback": ("torch", "transformers"),
        "RandomState": ("torch",),
    },
)
