"""The schemas of docs/schemas, for tests that validate JSON outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

__all__ = ["SCHEMAS", "validator"]

_FOLDER = Path(__file__).parents[2] / "docs/schemas"
SCHEMAS: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*.json"))}
_REGISTRY: Registry[Any] = Registry().with_resources(
    (f"{name}.json", Resource.from_contents(schema)) for name, schema in SCHEMAS.items()
)


def validator(reference: str) -> Draft202012Validator:
    """Return a validator for the schema at `reference`, as "ls.json" or "ls.json#/$defs/tensor"."""
    return Draft202012Validator({"$ref": reference}, registry=_REGISTRY)
