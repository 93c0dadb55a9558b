"""Records that ranks exchange during a save: files that they have written, and the committed round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statexchange.sharding import records
from statexchange.storage.workspace import Receipt

__all__ = ["CommittedRound", "RoundStart", "SavedFile", "receipt_from_json", "receipt_to_json"]


def receipt_to_json(receipt: Receipt) -> dict[str, Any]:
    """Return a JSON value that `receipt_from_json` reads."""
    return {"file": receipt.relative, "nbytes": receipt.nbytes}


def receipt_from_json(raw: Any) -> Receipt:
    """Return the receipt that `receipt_to_json` wrote; raise ValueError or UnsafeError for anything else."""
    file, nbytes = records.fields(raw, "file", "nbytes")
    receipt = Receipt(records.text(file), records.count(nbytes))
    receipt.rank_name  # noqa: B018 (it raises unless this is the name of a rank's file)
    return receipt


@dataclass(frozen=True, slots=True)
class RoundStart:
    """The start of a save: the round that root has chosen, and whether this rank has a layout."""

    number: int | None
    has_layout: bool

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {"number": self.number, "has_layout": self.has_layout}

    @classmethod
    def from_json(cls, raw: Any) -> RoundStart:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        number, has_layout = records.fields(raw, "number", "has_layout")
        return cls(records.optional(number, records.count), records.flag(has_layout))


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file that a rank has written, and its workspace."""

    receipt: Receipt
    path: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {"receipt": receipt_to_json(self.receipt), "path": self.path}

    @classmethod
    def from_json(cls, raw: Any) -> SavedFile:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        receipt, path = records.fields(raw, "receipt", "path")
        return cls(receipt_from_json(receipt), records.text(path))


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """The round that root has committed."""

    generation: int
    receipts: tuple[Receipt, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {"generation": self.generation, "receipts": [receipt_to_json(receipt) for receipt in self.receipts]}

    @classmethod
    def from_json(cls, raw: Any) -> CommittedRound:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        generation, receipts = records.fields(raw, "generation", "receipts")
        return cls(records.count(generation), records.items(receipts, receipt_from_json))
