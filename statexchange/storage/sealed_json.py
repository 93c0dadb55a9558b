"""JSON records that contain their own digest, so that a changed or cut record is found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statexchange.storage.tensorfile import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_sealed", "seal"]


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its digest under the key ``digest``."""
    return {**record, "digest": _digest_of(record)}


def check_sealed(raw: object) -> None:
    """Raise ValueError unless `raw` is a record that `seal` returned."""
    if not isinstance(raw, dict):
        raise ValueError("it is not an object")
    if raw["digest"] != _digest_of({key: value for key, value in raw.items() if key != "digest"}):
        raise ValueError("it differs from its own digest")


def _digest_of(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
