"""The manifest of a round of a workspace as root wrote it in earlier versions, which still is read."""

from __future__ import annotations

import json
from typing import Any

from statexchange.storage.location import seal
from statexchange.storage.tensorfile import SCHEMA

MANIFEST = "manifest.json"


def manifest_bytes(files: list[tuple[str, Any]], *, run: str = "job", number: int = 1, generation: int = 1) -> bytes:
    """Return the manifest of a round of as many ranks as it has files, given by name and size."""
    record = {
        "schema": SCHEMA,
        "run": run,
        "round": number,
        "generation": generation,
        "world_size": int(files[0][0].split(".")[0].rpartition("-")[2]),
        "files": files,
        "extra": {},
    }
    return json.dumps(seal(record), indent=1).encode()
