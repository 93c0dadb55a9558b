"""The claim: the object in a directory of an object store that names the process publishing there.

A store has no directory to rename and no locks. A publisher creates the claim exclusively, renews it while it writes,
and removes it when it has put the manifest. object_build.py explains the protocol; readers only need `claim_of`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, NotFoundError
from statexchange.processes import Owner
from statexchange.storage.json_text import parse_json

if TYPE_CHECKING:
    from statexchange.storage.store import Store

__all__ = ["CLAIM_NAME", "Claim", "claim_of"]

CLAIM_NAME = ".statexchange-claim.json"
_SCHEMA = 1
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """A publisher's claim: its process, start time, plan digest and the objects it may put.

    `names` also lists objects of earlier publishers, which it removes; `versions` has the store's version of each
    object that it has put. `renewal` is a counter, so that no two contents of a claim are equal.
    """

    nonce: str
    owner: Owner
    since: str
    plan: str
    names: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    renewal: int = 0

    @classmethod
    def new(cls, nonce: str, plan: str, names: tuple[str, ...]) -> Claim:
        """Return a claim of this process that begins now."""
        from datetime import datetime, timezone  # for writers only

        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(nonce, Owner.current(), since, plan, names)

    def to_bytes(self) -> bytes:
        """Return the object's content."""
        record = {
            "schema": _SCHEMA,
            "nonce": self.nonce,
            "owner": self.owner.to_json(),
            "since": self.since,
            "plan": self.plan,
            "names": sorted(self.names),
            "versions": self.versions,
            "renewal": self.renewal,
        }
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def parse(cls, data: bytes, path: str) -> Claim:
        """Return what `to_bytes` wrote; anything else is a CorruptError."""
        raw: Any = parse_json(data, path)
        try:
            if raw["schema"] != _SCHEMA or type(raw["renewal"]) is not int:
                raise ValueError("another schema")
            names, versions = raw["names"], raw["versions"]
            texts = [raw["nonce"], raw["since"], raw["plan"], *names, *versions, *versions.values()]
            if not all(isinstance(text, str) for text in texts) or not isinstance(names, list):
                raise ValueError("not text")
            if any("/" in name or name in ("", ".", "..") for name in names):
                raise ValueError("not a plain name")
            owner = Owner.from_json(raw["owner"])
            return cls(raw["nonce"], owner, raw["since"], raw["plan"], tuple(names), dict(versions), raw["renewal"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken claim: {error}", path=path) from None

    def __str__(self) -> str:
        return f"{self.owner} has been publishing here since {self.since}"


def claim_of(store: Store) -> str | None:
    """Describe the process that is publishing, or was interrupted while publishing, in a directory; None without one.

    A directory with a claim and without a manifest is being written; with a manifest it is whole. Not collective.
    """
    if CLAIM_NAME not in store.listing:
        return None
    try:
        return str(Claim.parse(store.read_small(CLAIM_NAME, _MAX_BYTES), store.path_of(CLAIM_NAME)))
    except NotFoundError:
        return None
    except CorruptError:
        return "a process whose claim cannot be read has been publishing here"
