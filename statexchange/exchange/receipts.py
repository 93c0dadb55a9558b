"""Encode the receipts of files in a workspace, which ranks send to root."""

from __future__ import annotations

from typing import Any

from statexchange.sharding import records
from statexchange.storage.workspace import Receipt

__all__ = ["receipt_from_json", "receipt_to_json"]


def receipt_to_json(receipt: Receipt) -> dict[str, Any]:
    """Return a JSON value that `receipt_from_json` reads."""
    return {"file": receipt.relative, "nbytes": receipt.nbytes}


def receipt_from_json(raw: Any) -> Receipt:
    """Return the receipt that `receipt_to_json` wrote; raise ValueError or UnsafeError for anything else."""
    file, nbytes = records.fields(raw, "file", "nbytes")
    receipt = Receipt(records.text(file), records.count(nbytes))
    receipt.rank_name  # noqa: B018 (it raises unless this is the name of a rank's file)
    return receipt
