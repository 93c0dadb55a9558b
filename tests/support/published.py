"""Publishers in processes of their own."""

import json
from pathlib import Path

from publishing import (
    publish,
)

from statexchange.processes import Owner


def leave(
    place: Path,
    nonce: str,
    owner: Owner,
    *kinds: str,
    plan: str = "0" * 32,
    value: int = 5,
    stem: str = ".out",
) -> dict[str, Path]:
    """Write what a killed publisher leaves: its record, and whole directories under hidden names of these kinds."""
    (place / f"{stem}.{nonce}.owner").write_text(json.dumps(owner.to_json()))
    left = {}
    for kind in kinds:
        left[kind] = place / (f"{stem}.{plan}.{nonce}.partial" if kind == "partial" else f"{stem}.{nonce}.{kind}")
        publish(place / "template", value, overwrite=True)
        (place / "template").rename(left[kind])
    return left


A, B = "a" * 16, "b" * 16
