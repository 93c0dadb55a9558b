"""JSON records that contain their own digest, so that a changed or cut record is found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statexchange.storage.tensorfile import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["seal", "unseal"]


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its digest under the key ``digest``."""
    return {**record, "digest": _digest_of(record)}


def unseal(sealed: object) -> dict[str, Any]:
    """Return the record in what `seal` has returned; raise ValueError or KeyError for anything else."""
    if not isinstance(sealed, dict):
        raise ValueError("it is not an object")
    record = {key: value for key, value in sealed.items() if key != "digest"}
    if sealed["digest"] != _digest_of(record):
        raise ValueError("it differs from its own digest")
    return record


def _digest_of(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
